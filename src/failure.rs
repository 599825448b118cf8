//! How a command ends: its message to the user, and its exit code.
//!
//! | code | meaning |
//! |--:|---|
//! | 0 | success, or the answer is yes |
//! | 1 | a defect of this program |
//! | 2 | wrong use of the command line |
//! | 3 | infeasible, or the answer is no |
//! | 4 | a model or feature that is not supported |
//! | 5 | a verification or assertion failed |
//! | 6 | a bad file |
//! | 7 | the outside world failed: a rank, a disk |
//! | 75 | interrupted after a complete checkpoint |
//! | 130 | interrupted without one: before the first step, or by a second signal |
//!
//! # Diagnostics of the command line
//!
//! | code | what is wrong | exit code |
//! |---|---|--:|
//! | `E5001` | flags that contradict each other, or a value that makes no sense | 2 |
//! | `E5002` | a directory that already holds a run | 2 |
//! | `E5003` | a directory that holds no run | 2 |
//! | `E5004` | the description of a run that is damaged | 6 |
//! | `E5005` | a plan that cannot be read | 6 |
//! | `E5006` | a plan that was made for something else | 2 |
//! | `E5007` | no mesh with the given number of ranks fits the model | 3 |
//! | `E5008` | a mesh does not compute what one device does | 5 |
//! | `E5009` | an input array that does not fit the model | 2 |
//! | `E5010` | a verb that this kind of model does not have | 4 |
//! | `E5011` | a table without a column that is needed | 6 |
//! | `E5012` | a table that cannot be read | 6 |
//! | `E5013` | weights of another model than was compiled | 2 |
//! | `E5014` | a compiled file without a step to run | 6 |
//! | `E5015` | a step that is another one with a rule than without | 5 |
//! | `E5016` | a layout in a file, another tool's or ours, that cannot be read | 6 |
//! | `E5017` | a plan over groups that another tool cannot be told | 4 |
//! | `E5019` | a file that is no text | 6 |
//! | `E5020` | less memory is left than a run needs | 7 |
//! | `E5021` | a `generation_config.json` that cannot be read | 6 |
//! | `E5022` | a line of `--prompts` that is no prompt | 6 |
//! | `W5018` | columns of a table that nothing reads | 0 |

use std::fs;
use std::path::Path;

use ir::diagnostic::render;
use ir::{Diagnostic, Span};
use serde_json::Value;

/// How a command ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Success, or the answer is yes.
    Success,
    /// A defect of this program.
    Bug,
    /// Wrong use of the command line.
    Usage,
    /// Infeasible, or the answer is no.
    Infeasible,
    /// A model or feature that is not supported.
    Unsupported,
    /// A verification or assertion failed.
    Failed,
    /// A bad file.
    BadFile,
    /// The outside world failed.
    World,
    /// Interrupted after a complete checkpoint.
    Interrupted,
    /// Interrupted without one.
    Killed,
}

impl Exit {
    /// The exit code.
    pub const fn code(self) -> u8 {
        match self {
            Exit::Success => 0,
            Exit::Bug => 1,
            Exit::Usage => 2,
            Exit::Infeasible => 3,
            Exit::Unsupported => 4,
            Exit::Failed => 5,
            Exit::BadFile => 6,
            Exit::World => 7,
            Exit::Interrupted => 75,
            Exit::Killed => 130,
        }
    }

    fn of_code(code: u8) -> Exit {
        match code {
            2 => Exit::Usage,
            3 => Exit::Infeasible,
            4 => Exit::Unsupported,
            5 => Exit::Failed,
            7 => Exit::World,
            _ => Exit::BadFile,
        }
    }
}

/// Why a command has no answer.
#[derive(Debug)]
pub enum Failure {
    /// The input is wrong: at least one diagnostic.
    Input(Vec<Diagnostic>),
    /// The outside world failed.
    World(runtime::Error),
}

impl From<Diagnostic> for Failure {
    fn from(diagnostic: Diagnostic) -> Failure {
        Failure::Input(vec![diagnostic])
    }
}

impl From<Vec<Diagnostic>> for Failure {
    fn from(diagnostics: Vec<Diagnostic>) -> Failure {
        Failure::Input(diagnostics)
    }
}

impl From<runtime::Error> for Failure {
    fn from(error: runtime::Error) -> Failure {
        Failure::World(error)
    }
}

impl From<runtime::Failure> for Failure {
    fn from(failure: runtime::Failure) -> Failure {
        match failure {
            runtime::Failure::Input(diagnostics) => Failure::Input(diagnostics),
            runtime::Failure::World(error) => Failure::World(error),
        }
    }
}

/// What was found, or why there is nothing; anything else that went wrong is an error.
///
/// # Errors
/// Failures that say nothing of what there is.
pub fn or_reason<T>(found: Result<T, Failure>) -> Result<Result<T, Diagnostic>, Failure> {
    match found {
        Ok(found) => Ok(Ok(found)),
        Err(failure) => Ok(Err(failure.into_no()?)),
    }
}

/// A number behind a diagnostic; null where there is none.
pub fn fact(wrong: &Diagnostic, name: &str) -> Value {
    let found = wrong.facts.as_ref().and_then(|facts| facts.get(name));
    found.cloned().unwrap_or_default()
}

/// Whether a diagnostic is the answer no.
pub(crate) fn is_no(wrong: &Diagnostic) -> bool {
    exit_of(wrong.code) == Exit::Infeasible
}

impl Failure {
    /// The answer no, where the failure is one: the first of its diagnostics.
    ///
    /// # Errors
    /// The failure, where it is no answer.
    pub fn into_no(self) -> Result<Diagnostic, Failure> {
        match self {
            Failure::Input(mut wrong) if !wrong.is_empty() && wrong.iter().all(is_no) => {
                Ok(wrong.swap_remove(0))
            }
            Failure::Input(_) | Failure::World(_) => Err(self),
        }
    }

    /// The exit code; that of the first diagnostic where there are several.
    pub fn exit(&self) -> Exit {
        match self {
            Failure::Input(diagnostics) => {
                diagnostics.first().map_or(Exit::Usage, |first| exit_of(first.code))
            }
            Failure::World(_) => Exit::World,
        }
    }

    /// The message for stderr: at most twenty diagnostics.
    pub fn message(&self) -> String {
        match self {
            Failure::Input(diagnostics) => {
                let mut texts: Vec<String> = diagnostics.iter().take(SHOWN).map(draw).collect();
                if diagnostics.len() > SHOWN {
                    texts.push(format!("and {} more\n", diagnostics.len() - SHOWN));
                }
                texts.join("\n")
            }
            Failure::World(error) => {
                let help = way_out(error).map(|help| format!("  = help: {help}\n"));
                format!("error: {error}\n{}", help.unwrap_or_default())
            }
        }
    }
}

/// What to do about a failure of the outside world, where that is known.
fn way_out(error: &runtime::Error) -> Option<String> {
    if let runtime::Error::Locked { .. } = error {
        return Some("wait for it to end or stop it, or choose another directory".to_owned());
    }
    if let runtime::Error::Gpu { help, .. } | runtime::Error::Processes { help, .. } = error {
        return Some(help.clone());
    }
    if let Some(limit) = error.limit().filter(|_| !error.is_disk_full()) {
        return Some(format!("raise the limit on {limit}, or use fewer ranks or threads"));
    }
    if !error.is_disk_full() {
        return None;
    }
    Some(match error {
        runtime::Error::Checkpoint { root, previous: Some(_), .. } => {
            let run = root.parent().unwrap_or(root).display();
            format!("make room, then go on with `gantline train --resume {run}`")
        }
        runtime::Error::Room { what, .. } if what.contains("offloads") => {
            let folders =
                "`train` offloads to the disk of its directory, other commands to $TMPDIR";
            format!("make room there; {folders}")
        }
        runtime::Error::Room { .. } => {
            "make room, choose another directory, or keep fewer checkpoints with --keep".to_owned()
        }
        runtime::Error::Checkpoint { .. }
        | runtime::Error::Io { .. }
        | runtime::Error::Threads { .. }
        | runtime::Error::Locked { .. }
        | runtime::Error::Communication(_)
        | runtime::Error::Gpu { .. }
        | runtime::Error::Processes { .. }
        | runtime::Error::Abandoned => "make room, then give the same command again".to_owned(),
    })
}

/// Diagnostics that are shown at most.
const SHOWN: usize = 20;
/// Bytes of the largest file of which a line is shown.
const EXCERPT_BYTES_MAX: u64 = 16 << 20;

/// A diagnostic of the command line: what is wrong with a flag.
pub fn usage(flag: &str, headline: impl Into<String>) -> Diagnostic {
    Diagnostic::error("E5001", Span::of(flag), headline)
}

/// Reads a text that a flag names.
pub fn read_text(path: impl AsRef<Path>, flag: &str) -> Result<String, Failure> {
    let path = path.as_ref();
    let shown = path.display();
    match ir::file::read_text(path) {
        Ok(text) => Ok(text),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            Err(usage(flag, format!("there is no file `{shown}`")).into())
        }
        Err(error) if error.kind() == std::io::ErrorKind::InvalidData => {
            let headline = format!("`{shown}` is not UTF-8 text");
            let help = "give a text file";
            Err(Diagnostic::error("E5019", Span::of(flag), headline).help(help).into())
        }
        Err(error) => Err(runtime::Error::io("read", path)(error).into()),
    }
}

/// The exit code of a diagnostic's code: that of the tables in the crates' chapters.
pub fn exit_of(code: &str) -> Exit {
    match code {
        // A chain of calls is what can be planned, sharded and compiled.
        "E2001" | "E2003" | "E2004" | "E2005" | "E3405" => Exit::Unsupported,
        "E2002" | "E3101" | "E3102" | "E3201" | "E3203" | "E3204" | "E3308" | "E5007" => {
            Exit::Infeasible
        }
        "E3006" | "E3103" | "E3202" | "E3205" => Exit::Usage,
        "E3401" | "E3402" | "E3403" | "E3404" | "E3406" => Exit::Usage,
        "E3007" => Exit::World,
        "E4001" | "E4021" | "E4030" | "E4032" | "E4040" => Exit::Usage,
        "E4050" | "E4051" | "E4060" => Exit::Usage,
        "E4055" | "E4074" | "E5020" => Exit::World,
        "E4052" | "E4053" | "E4054" | "E5008" | "E5015" => Exit::Failed,
        "E5001" | "E5002" | "E5003" | "E5006" | "E5009" | "E5013" => Exit::Usage,
        "E5010" | "E5017" => Exit::Unsupported,
        code if code.starts_with("E1") => Exit::of_code(ir::import::exit_code(code)),
        _ => Exit::BadFile,
    }
}

/// Draws a diagnostic, with the line that it is about where its source is a file.
pub fn draw(diagnostic: &Diagnostic) -> String {
    let path = Path::new(&diagnostic.span.source);
    let is_short = fs::metadata(path).is_ok_and(|m| m.is_file() && m.len() <= EXCERPT_BYTES_MAX);
    let text = if is_short { fs::read_to_string(path).ok() } else { None };
    render(diagnostic, text.as_deref())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_of_all_crates_have_their_exit_codes() {
        let known = [
            ("E1101", 2),
            ("E1103", 6),
            ("E1106", 4),
            ("E2001", 4),
            ("E2003", 4),
            ("E2004", 4),
            ("E2005", 4),
            ("E3405", 4),
            ("E3001", 6),
            ("E3006", 2),
            ("E3101", 3),
            ("E4002", 6),
            ("E4032", 2),
            ("E4052", 5),
            ("E4055", 7),
            ("E4071", 6),
            ("E4074", 7),
            ("E5001", 2),
            ("E5008", 5),
            ("E5015", 5),
        ];
        for (code, exit) in known {
            assert_eq!(exit_of(code).code(), exit, "{code}");
        }
    }
}
