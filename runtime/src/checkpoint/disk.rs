//! The operations on the file system that a checkpoint is made of, so that each can fail in tests.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;

/// What writes the content of a file.
pub(super) type Content<'a> = &'a mut dyn FnMut(&mut dyn Write) -> io::Result<()>;

/// A file system.
pub(super) trait Disk: Send + Sync {
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
pub(super) struct Files;

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
