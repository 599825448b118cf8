//! Files of the user: regular ones, of a bounded size.
//!
//! A pipe may never end and a device such as `/dev/zero` does not, so neither is opened.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::Path;

/// Bytes of the longest text or table that is read whole. Chosen: a hundred times as long as any
/// that people write, and small beside the memory of a machine that plans.
pub const BYTES_MAX: u64 = 1 << 30;

/// Reads a file.
///
/// # Errors
/// Those of the system; `InvalidInput` for what is no regular file; `FileTooLarge` beyond
/// [`BYTES_MAX`].
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let kind = fs::metadata(path)?;
    if !kind.is_file() {
        let what = if kind.is_dir() { "a directory" } else { "a pipe or device" };
        let text = format!("it is {what}, no regular file");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    let mut bytes = Vec::new();
    File::open(path)?.take(BYTES_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > BYTES_MAX {
        let text = format!("it is longer than {BYTES_MAX} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, text));
    }
    Ok(bytes)
}

/// Reads a text.
///
/// # Errors
/// As [`read`]; `InvalidData` for what is not UTF-8.
pub fn read_text(path: &Path) -> io::Result<String> {
    let wrong = |error| io::Error::new(io::ErrorKind::InvalidData, error);
    String::from_utf8(read(path)?).map_err(wrong)
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_are_opened() {
        let refused = |path: &str| read(Path::new(path)).unwrap_err().kind();
        assert_eq!(refused("/dev/zero"), io::ErrorKind::InvalidInput);
        assert_eq!(refused("/"), io::ErrorKind::InvalidInput);
        assert_eq!(refused("/no/such/file"), io::ErrorKind::NotFound);
        assert!(!read_text(Path::new(file!().trim_start_matches("ir/"))).unwrap().is_empty());
    }
}
