//! The operations on the file system that the files of a run are made of, so that each can fail in
//! tests; and [`replace`], by which a file is either the old one or the new one after any crash.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;

use crate::error::Error;

/// What writes the content of a file.
pub(crate) type Content<'a> = &'a mut dyn FnMut(&mut dyn Write) -> io::Result<()>;

/// The ending of a file that is being written beside the one that it will replace.
pub(crate) const UNFINISHED: &str = "tmp";

/// Makes or replaces a file: written whole under a temporary name beside it, synced, renamed, and
/// its directory synced. A crash at any point leaves the old content or the new one.
///
/// # Errors
/// The call that failed; the file is then as it was.
pub fn replace(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    replace_on(&Files, path, bytes)
}

/// As [`replace`], on a file system.
pub(crate) fn replace_on(disk: &dyn Disk, path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{UNFINISHED}"));
    let unfinished = path.with_file_name(name);
    let written = disk.write(&unfinished, &mut |writer| writer.write_all(bytes));
    let replaced = written
        .map_err(Error::io("write", path))
        .and_then(|()| disk.rename(&unfinished, path).map_err(Error::io("replace", path)));
    if let Err(error) = replaced {
        // What cannot be removed now is replaced by the next attempt.
        let _ = disk.remove(&unfinished);
        return Err(error);
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    disk.sync_dir(folder).map_err(Error::io("sync", folder))
}

/// Bytes that a directory's disk has left for this user, whether or not the directory is there yet;
/// none where the system does not say.
pub(crate) fn room(path: &Path) -> Option<u64> {
    let at = path.ancestors().map(|at| if at.as_os_str().is_empty() { Path::new(".") } else { at });
    let stat = at.filter_map(|at| rustix::fs::statvfs(at).ok()).next()?;
    Some(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// A file system.
pub(crate) trait Disk: Send + Sync {
    /// Makes a directory and those above it.
    fn create_dir(&self, path: &Path) -> io::Result<()>;

    /// Makes or replaces a file, writes it and syncs it.
    fn write(&self, path: &Path, content: Content<'_>) -> io::Result<()>;

    /// Makes sure that the names in a directory outlast a crash.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;

    /// Gives a file or directory another name, atomically.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Removes a file, or a directory and all in it; nothing if it isn't there.
    fn remove(&self, path: &Path) -> io::Result<()>;
}

/// The real file system.
pub(crate) struct Files;

impl Disk for Files {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        fs::create_dir_all(path)
    }

    fn write(&self, path: &Path, content: Content<'_>) -> io::Result<()> {
        let mut writer = BufWriter::with_capacity(1 << 20, File::create(path)?);
        content(&mut writer)?;
        writer.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
        match removed {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }
}
