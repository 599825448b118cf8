//! For tests: a directory that goes away, and damaged copies of a file.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use ir::random::mix;

/// A directory of one test, removed at its end.
pub(crate) struct Scratch {
    path: PathBuf,
}

impl Scratch {
    pub(crate) fn new(name: &str) -> Scratch {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let unique = COUNT.fetch_add(1, Ordering::Relaxed);
        let folder = format!("gantline-{name}-{}-{unique}", std::process::id());
        let path = std::env::temp_dir().join(folder);
        std::fs::create_dir_all(&path).unwrap();
        Scratch { path }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// Seeded random numbers; the seed is printed, and `SEED` replaces it.
pub(crate) struct Numbers(u64);

impl Numbers {
    pub(crate) fn new() -> Numbers {
        let seed = std::env::var("SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(1);
        println!("SEED={seed}");
        Numbers(seed)
    }

    pub(crate) fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        (mix(self.0) % limit as u64) as usize
    }
}

/// Damaged copies, each with its number: bytes changed, inserted, removed, doubled, cut off.
pub(crate) fn mutations(valid: &[u8], count: usize) -> impl Iterator<Item = (usize, Vec<u8>)> {
    let mut numbers = Numbers::new();
    let valid = valid.to_vec();
    (0..count).map(move |number| {
        let mut bytes = valid.clone();
        for _ in 0..1 + numbers.below(3) {
            let at = numbers.below(bytes.len().max(1));
            match numbers.below(6) {
                _ if bytes.is_empty() => bytes.push(numbers.below(256) as u8),
                0 => bytes[at] = numbers.below(256) as u8,
                1 => bytes[at] ^= 1 << numbers.below(8),
                2 => bytes.insert(at, b"0919{}[],:\"-"[numbers.below(12)]),
                3 => drop(bytes.remove(at)),
                4 => {
                    let end = (at + numbers.below(16)).min(bytes.len());
                    bytes.extend_from_within(at..end);
                }
                _ => bytes.truncate(at),
            }
        }
        (number, bytes)
    })
}
