//! `DUMP=dir`: the module after each pass, as numbered files that are read back as `.graph` texts.

use std::fs;
use std::path::PathBuf;

use ir::Module;

/// Where modules are written, if they are.
#[derive(Debug, Default)]
pub struct Dump {
    folder: Option<PathBuf>,
    count: usize,
    failed: Option<runtime::Error>,
}

impl Dump {
    /// Into the directory that the environment variable `DUMP` names; nowhere without it.
    pub fn from_environment() -> Dump {
        Dump::into(std::env::var_os("DUMP").filter(|dir| !dir.is_empty()).map(PathBuf::from))
    }

    /// Into a directory, which is made where there is none.
    pub fn into(folder: Option<PathBuf>) -> Dump {
        Dump { folder, ..Dump::default() }
    }

    /// Writes the module as `03-inline.graph`, say. After a failure nothing more is written.
    pub fn write(&mut self, pass: &str, module: &Module) {
        let Some(folder) = self.folder.as_ref().filter(|_| self.failed.is_none()) else { return };
        let path = folder.join(format!("{:02}-{pass}.graph", self.count));
        self.count += 1;
        let made = fs::create_dir_all(folder).map_err(runtime::Error::io("create", folder));
        let write = || fs::write(&path, module.to_string());
        let written = made.and_then(|()| write().map_err(runtime::Error::io("write", &path)));
        self.failed = written.err();
    }

    /// Whether everything could be written.
    ///
    /// # Errors
    /// The first failure.
    pub fn finish(self) -> Result<(), runtime::Error> {
        self.failed.map_or(Ok(()), Err)
    }
}
