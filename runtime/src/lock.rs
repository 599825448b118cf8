//! One writer for the directory of a run.
//!
//! The lock is the operating system's, on a file in the directory, so that it ends with the process
//! that holds it, however that ends. The file also says who that is, for the message to the second
//! one; what it says after the holder's end means nothing.

use std::fs::{File, TryLockError};
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::error::Error;

/// The file in the directory of a run that its writer holds locked.
pub const LOCK: &str = "run.lock";

/// The most bytes that are read of what a holder says of itself.
const HOLDER_BYTES_MAX: u64 = 256;

/// The right to write to the directory of a run; given back when it is dropped.
#[derive(Debug)]
pub struct RunLock {
    /// Closing it unlocks.
    _file: File,
    /// The directory, where it was made for the lock.
    made: Option<PathBuf>,
}

impl Drop for RunLock {
    /// Removes a directory that was made for the lock and got nothing else. Whoever opens the file
    /// meanwhile finds it locked.
    fn drop(&mut self) {
        let Some(folder) = &self.made else { return };
        let names = std::fs::read_dir(folder).map(|entries| entries.flatten());
        let is_empty = names.is_ok_and(|mut names| names.all(|entry| entry.file_name() == LOCK));
        if is_empty {
            // What cannot be removed is an empty directory.
            let _ = std::fs::remove_file(folder.join(LOCK));
            let _ = std::fs::remove_dir(folder);
        }
    }
}

impl RunLock {
    /// Takes the lock of a directory, which is made where it is missing.
    ///
    /// # Errors
    /// [`Error::Locked`] when another process, or this one, holds it; [`Error::Io`].
    pub fn take(folder: &Path) -> Result<RunLock, Error> {
        let made = (!folder.exists()).then(|| folder.to_owned());
        std::fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
        let path = folder.join(LOCK);
        let file = File::options().read(true).write(true).create(true).truncate(false).open(&path);
        let mut file = file.map_err(Error::io("open", &path))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut holder = String::new();
                // Without a name the message is shorter, and no less true.
                let _ = file.take(HOLDER_BYTES_MAX).read_to_string(&mut holder);
                let holder = holder.lines().next().unwrap_or_default().to_owned();
                return Err(Error::Locked { folder: folder.to_owned(), holder });
            }
            Err(TryLockError::Error(error)) => return Err(Error::io("lock", &path)(error)),
        }
        let said = holder();
        let written = file
            .set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| file.write_all(said.as_bytes()));
        written.map_err(Error::io("write", &path))?;
        Ok(RunLock { _file: file, made })
    }
}

/// This process, as the holder of a lock.
fn holder() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = if host.trim().is_empty() { "this host" } else { host.trim() };
    let since = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    format!("process {} on {host} since {}\n", std::process::id(), utc(since))
}

/// Seconds since 1970 as `2026-11-23 16:05:09 UTC`.
///
/// Days to a date as in Hinnant, "chrono-compatible low-level date algorithms" (`civil_from_days`):
/// years begin in March, so that the leap day is the last one.
pub fn utc(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (rest / 3_600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn a_second_writer_is_told_who_the_first_one_is() {
        let scratch = Scratch::new("lock");
        let folder = scratch.join("run");
        let first = RunLock::take(&folder).unwrap();
        let Err(Error::Locked { holder, .. }) = RunLock::take(&folder) else {
            panic!("two writers of one run");
        };
        assert!(holder.starts_with(&format!("process {} on ", std::process::id())), "{holder}");
        std::fs::write(folder.join("run.toml"), "").unwrap();
        drop(first);
        drop(RunLock::take(&folder).unwrap());
        assert!(folder.join("run.toml").exists());
    }

    #[test]
    fn a_directory_that_got_nothing_else_goes_with_its_lock() {
        let scratch = Scratch::new("lock-alone");
        let folder = scratch.join("run");
        drop(RunLock::take(&folder).unwrap());
        assert!(!folder.exists());
        std::fs::create_dir(&folder).unwrap();
        drop(RunLock::take(&folder).unwrap());
        assert!(folder.exists(), "it was there before");
    }

    #[test]
    fn times_are_those_of_the_calendar() {
        for (seconds, text) in [
            (0, "1970-01-01 00:00:00 UTC"),
            (951_782_399, "2000-02-28 23:59:59 UTC"),
            (951_782_400, "2000-02-29 00:00:00 UTC"),
            (1_709_251_199, "2024-02-29 23:59:59 UTC"),
            (4_107_542_400, "2100-03-01 00:00:00 UTC"),
        ] {
            assert_eq!(utc(seconds), text);
        }
    }
}
