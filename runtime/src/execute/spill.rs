//! The memory of ranks on a disk: files without names, mapped.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _};
use std::path::Path;
use std::process;
use std::sync::atomic::{AtomicUsize, Ordering};

use kernels::Bytes;

use crate::disk;
use crate::error::Error;
use crate::local::arena::Arena;

/// What tells files of one process from each other.
static NEXT: AtomicUsize = AtomicUsize::new(0);

/// An arena of some bytes on the disk of a directory, all zero, for a rank.
///
/// # Errors
/// The disk has too little room, or the file cannot be made there.
pub(super) fn arena(bytes: u64, rank: usize, folder: Option<&Path>) -> Result<Arena, Error> {
    if let (0, Some(none)) = (bytes, Arena::new(0)) {
        return Ok(none);
    }
    let temporary = std::env::temp_dir();
    let folder = folder.unwrap_or(&temporary);
    let have = disk::room(folder).unwrap_or(u64::MAX);
    if have < bytes {
        let (path, what) = (folder.to_owned(), format!("what rank {rank} offloads"));
        return Err(Error::Room { path, what, need: Bytes(bytes), have: Bytes(have) });
    }
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let path = folder.join(format!(".gantline-{}-{number}.offload", process::id()));
    let error = |call| Error::io(call, &path);
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path);
    let file = file.map_err(error("make"))?;
    // It is there until the process ends, however it does.
    fs::remove_file(&path).map_err(error("unlink"))?;
    reserve(&file, bytes).map_err(error("reserve"))?;
    Arena::of_file(&file).map_err(error("map"))
}

/// Makes a file as long as that, with all its blocks, so that no later write lacks room.
fn reserve(file: &File, bytes: u64) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        use rustix::fs::{FallocateFlags, fallocate};
        let done = rustix::io::retry_on_intr(|| fallocate(file, FallocateFlags::empty(), 0, bytes));
        let full = [rustix::io::Errno::NOSPC, rustix::io::Errno::FBIG, rustix::io::Errno::DQUOT];
        match done {
            Ok(()) => return Ok(()),
            Err(error) if full.contains(&error) => return Err(error.into()),
            // Not all file systems can.
            Err(_) => {}
        }
    }
    let mut writer = io::BufWriter::with_capacity(1 << 20, file);
    io::copy(&mut io::repeat(0).take(bytes), &mut writer)?;
    io::Write::flush(&mut writer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_zeroed_and_have_no_names() {
        let folder = std::env::temp_dir().join(format!("gantline-spill-{}", process::id()));
        fs::create_dir_all(&folder).unwrap();
        let mut arena = arena(10_000, 0, Some(&folder)).unwrap();
        assert_eq!(arena.len(), 10_000);
        assert!(arena.bytes(0..10_000).iter().all(|&byte| byte == 0));
        arena.bytes_mut(9_999..10_000)[0] = 7;
        assert_eq!(arena.bytes(9_998..10_000), [0, 7]);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
        fs::remove_dir_all(&folder).unwrap();
        let lacking = super::arena(10_000, 3, Some(&folder.join("none"))).map(|_| ());
        let text = lacking.unwrap_err().to_string();
        assert!(text.contains("none"), "{text}");
    }

    #[test]
    fn a_disk_without_room_is_told() {
        let text = arena(u64::MAX / 4, 3, None).map(|_| ()).unwrap_err().to_string();
        assert!(text.contains("what rank 3 offloads"), "{text}");
    }
}
