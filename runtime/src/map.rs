//! Files as memory.

use std::fs::File;
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;

use ir::{Diagnostic, Span};
use memmap2::Mmap;

use crate::error::{Error, Failure};

/// The content of a file, read when it is looked at; it stays when the file's name is removed.
#[derive(Clone)]
pub struct Map {
    /// None for an empty file, which can't be mapped.
    map: Option<Arc<Mmap>>,
}

impl Map {
    /// Maps a file that the user named.
    pub fn open(path: &Path) -> Result<Map, Failure> {
        let source = path.display().to_string();
        let refused =
            |headline: &str| Diagnostic::error("E4001", Span::of(source.clone()), headline).into();
        // Before it is opened: whoever opens a pipe waits for the other end.
        let metadata = match std::fs::metadata(path) {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(refused("no such file"));
            }
            Err(error) => return Err(Error::io("open", path)(error).into()),
        };
        if !metadata.is_file() {
            return Err(refused("not a regular file"));
        }
        let file = File::open(path).map_err(Error::io("open", path))?;
        let metadata = file.metadata().map_err(Error::io("read the size of", path))?;
        if metadata.len() == 0 {
            return Ok(Map { map: None });
        }
        // SAFETY: the mapping is private and read-only. Should another process shorten the file
        // meanwhile, the system ends this one with SIGBUS: nothing is read that isn't there.
        let map = unsafe { Mmap::map(&file) }.map_err(Error::io("map", path))?;
        Ok(Map { map: Some(Arc::new(map)) })
    }
}

impl AsRef<[u8]> for Map {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Deref for Map {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.map.as_deref().map_or(&[], |map| map)
    }
}
