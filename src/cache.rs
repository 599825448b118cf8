//! Answers that were found before, kept on disk by a hash of all that they depend on.
//!
//! They lie in `$XDG_CACHE_HOME/gantline/answers`, or below `$HOME/.cache`; without either, or
//! where nothing can be written, there is no cache and nothing is said. An answer is found again
//! by the content of what was asked, the program included, so that it is the same with and without
//! a cache. A file that is not what was written is not used, and is written again.

use std::fmt::Debug;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::failure::{Exit, Failure};
use crate::output;

/// What a file begins with: a name and a version of this form.
const MAGIC: &str = "gantline-answer/1";
/// Answers that are kept; the oldest go first. Chosen: some megabytes.
const ANSWERS_MAX: usize = 512;

/// What an answer depends on, as a hash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key(String);

impl Key {
    /// The key of a verb's question; `asked` prints all of it: model, cluster and flags. None where
    /// the program cannot be told from others.
    pub fn new(verb: &str, asked: &dyn Debug) -> Option<Key> {
        Key::of(&std::env::current_exe().ok()?, verb, asked)
    }

    fn of(program: &Path, verb: &str, asked: &dyn Debug) -> Option<Key> {
        let program = fs::metadata(program).ok()?;
        let (length, modified) = (program.len(), program.modified().ok()?);
        let version = env!("CARGO_PKG_VERSION");
        let all = format!("{MAGIC} {version} {length} {modified:?} {verb} {asked:?}");
        Some(Key(blake3::hash(all.as_bytes()).to_hex().to_string()))
    }
}

/// Where what is kept of a kind lies.
pub fn folder(kind: &str) -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).map(PathBuf::from);
    // Relative paths are to be ignored: XDG Base Directory Specification.
    let caches = variable("XDG_CACHE_HOME").filter(|path| path.is_absolute());
    let home = || Some(variable("HOME").filter(|path| path.is_absolute())?.join(".cache"));
    Some(caches.or_else(home)?.join("gantline").join(kind))
}

/// Prints the answer that was found before, or finds, keeps and prints it. Without a key there is
/// no cache.
///
/// # Errors
/// Those of `find`, which are not kept.
pub fn answer(
    key: Option<Key>,
    find: impl FnOnce() -> Result<(Exit, String), Failure>,
) -> Result<Exit, Failure> {
    let path = key.and_then(|key| Some(folder("answers")?.join(key.0)));
    if let Some((exit, text)) = path.as_deref().and_then(read) {
        output::answer(&text);
        return Ok(exit);
    }
    let (exit, text) = find()?;
    if let Some(path) = path {
        // An answer that cannot be kept is no worse.
        let _ = keep(&path, exit, &text);
    }
    output::answer(&text);
    Ok(exit)
}

fn header(exit: Exit, text: &str) -> String {
    format!("{MAGIC} {} {}\n", exit.code(), blake3::hash(text.as_bytes()).to_hex())
}

/// The answer of a file that is whole.
fn read(path: &Path) -> Option<(Exit, String)> {
    let content = fs::read_to_string(path).ok()?;
    let (_, text) = content.split_once('\n')?;
    let exits = [Exit::Success, Exit::Infeasible];
    let exit = exits.into_iter().find(|exit| content.starts_with(&header(*exit, text)))?;
    Some((exit, text.to_owned()))
}

/// Writes a file that is whole or not there, and makes room.
fn keep(path: &Path, exit: Exit, text: &str) -> std::io::Result<()> {
    let Some(folder) = path.parent() else { return Ok(()) };
    fs::create_dir_all(folder)?;
    let part = path.with_extension(format!("{}.part", std::process::id()));
    fs::write(&part, header(exit, text) + text)?;
    fs::rename(&part, path)?;
    let age = |entry: &fs::DirEntry| entry.metadata().and_then(|file| file.modified()).ok();
    let mut all: Vec<(Option<SystemTime>, PathBuf)> =
        fs::read_dir(folder)?.flatten().map(|entry| (age(&entry), entry.path())).collect();
    all.sort();
    for (_, old) in all.iter().take(all.len().saturating_sub(ANSWERS_MAX)) {
        fs::remove_file(old)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_those_of_what_is_asked() {
        let key = Key::new("plan", &("a", 1.0));
        assert!(key.is_some());
        assert_eq!(Key::of(Path::new("/nowhere/gantline"), "plan", &"a"), None);
        assert_eq!(key, Key::new("plan", &("a", 1.0)));
        for other in [Key::new("cost", &("a", 1.0)), Key::new("plan", &("a", 1.0 + f64::EPSILON))] {
            assert_ne!(key, other);
        }
    }

    #[test]
    fn only_whole_files_are_read_and_the_oldest_go() {
        let folder = std::env::temp_dir().join(format!("gantline-answers-{}", std::process::id()));
        let path = folder.join("first");
        keep(&path, Exit::Infeasible, "two\nlines\n").unwrap();
        let whole = fs::read(&path).unwrap();
        assert_eq!(read(&path), Some((Exit::Infeasible, "two\nlines\n".to_owned())));
        for at in 0..whole.len() {
            fs::write(&path, &whole[..at]).unwrap();
            assert_eq!(read(&path), None, "cut at {at}");
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            fs::write(&path, &damaged).unwrap();
            assert_eq!(read(&path), None, "damaged at {at}");
        }
        for number in 0..ANSWERS_MAX + 3 {
            keep(&folder.join(number.to_string()), Exit::Success, "").unwrap();
        }
        assert_eq!(fs::read_dir(&folder).unwrap().count(), ANSWERS_MAX);
        assert_eq!(read(&folder.join((ANSWERS_MAX + 2).to_string())).unwrap().1, "");
        fs::remove_dir_all(&folder).unwrap();
    }
}
