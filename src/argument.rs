//! What an argument names: a preset or a path, whose bytes need not be UTF-8.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

use clap::builder::{OsStringValueParser, TypedValueParser, ValueParserFactory};
use serde::{Deserialize, Serialize};

/// An argument that names a preset or a path.
///
/// Shown, bytes that are no UTF-8 are replaced; stored, it reads back to the byte.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Stored", into = "Stored")]
pub struct PathArg(PathBuf);

/// As it stands in files, which are UTF-8.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum Stored {
    Text(String),
    Bytes { bytes: Vec<u8> },
}

impl PathArg {
    /// As a path.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Whether it is this text.
    pub fn is(&self, text: &str) -> bool {
        self.0.as_os_str() == text
    }

    /// The name and the file of `NAME=FILE`.
    pub fn pair(&self) -> Option<(String, PathArg)> {
        let bytes = self.0.as_os_str().as_bytes();
        let at = bytes.iter().position(|byte| *byte == b'=')?;
        let (name, file) = (&bytes[..at], &bytes[at + 1..]);
        let name = String::from_utf8_lossy(name).into_owned();
        Some((name, PathArg::from(OsStr::from_bytes(file).to_owned())))
    }
}

impl AsRef<Path> for PathArg {
    fn as_ref(&self) -> &Path {
        &self.0
    }
}

impl From<&str> for PathArg {
    fn from(text: &str) -> PathArg {
        PathArg(PathBuf::from(text))
    }
}

impl From<OsString> for PathArg {
    fn from(argument: OsString) -> PathArg {
        PathArg(PathBuf::from(argument))
    }
}

/// As it is shown, which names it in diagnostics.
impl From<&PathArg> for String {
    fn from(argument: &PathArg) -> String {
        argument.to_string()
    }
}

impl From<Stored> for PathArg {
    fn from(stored: Stored) -> PathArg {
        match stored {
            Stored::Text(text) => PathArg(PathBuf::from(text)),
            Stored::Bytes { bytes } => PathArg::from(OsString::from_vec(bytes)),
        }
    }
}

impl From<PathArg> for Stored {
    fn from(named: PathArg) -> Stored {
        match named.0.into_os_string().into_string() {
            Ok(text) => Stored::Text(text),
            Err(other) => Stored::Bytes { bytes: other.into_vec() },
        }
    }
}

impl fmt::Display for PathArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.display().fmt(f)
    }
}

impl ValueParserFactory for PathArg {
    type Parser = clap::builder::MapValueParser<OsStringValueParser, fn(OsString) -> PathArg>;

    fn value_parser() -> Self::Parser {
        OsStringValueParser::new().map(PathArg::from)
    }
}
