//! Damaged files of every format: a diagnostic or an answer, no panic, and no memory that the file
//! does not account for.
//!
//! `SEED=n` tries that seed alone.

use std::fs;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use std::sync::PoisonError;

use ir::diagnostic::render;
use stats_alloc::Region;

use crate::formats::{Format, expect_panics_of_the_reader, formats};
use crate::mutant::mutated;
use crate::{ALLOCATOR, ALONE};

/// Damaged copies of each file.
const MUTATIONS: u64 = 600;
/// Bytes that reading a file may allocate in all: so many, and so many for each byte of it.
/// Chosen: far below what a size in a file can ask for, above what an honest reading takes.
const BYTES_MAX: usize = 8 << 20;
const BYTES_PER_BYTE: usize = 400;

#[test]
fn damaged_files_are_refused_without_panic_or_great_memory() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    expect_panics_of_the_reader();
    let scratch = scratch();
    for format in formats(&scratch) {
        let Format { name, valid, read } = &format;
        assert!(read(valid).is_ok(), "{name}: the file itself is read: {:?}", read(valid));
        let mut refused = 0;
        for seed in seeds() {
            let damaged = mutated(valid, seed);
            let bound = BYTES_MAX + BYTES_PER_BYTE * damaged.len();
            let region = Region::new(ALLOCATOR);
            let answer = catch_unwind(|| read(&damaged));
            let allocated = region.change().bytes_allocated;
            let answer = answer.unwrap_or_else(|_| panic!("{name}, SEED={seed} panics"));
            assert!(allocated < bound, "{name}, SEED={seed} allocates {allocated} bytes");
            if let Err(found) = answer {
                refused += 1;
                let count = found.len();
                assert!((1..=20).contains(&count), "{name}, SEED={seed}: {count} diagnostics");
                let text = String::from_utf8_lossy(&damaged);
                for diagnostic in &found {
                    assert!(!diagnostic.headline.is_empty(), "{name}, SEED={seed}");
                    assert!(!render(diagnostic, Some(&text)).is_empty(), "{name}, SEED={seed}");
                }
            }
        }
        println!("{name}: {refused} of {} refused", seeds().count());
        assert!(refused > 0 || seeds().count() == 1, "{name}: no damage is ever found");
    }
    let _ = fs::remove_dir_all(&scratch);
}

fn seeds() -> std::ops::Range<u64> {
    let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok());
    seed.map_or(0..MUTATIONS, |seed| seed..seed + 1)
}

fn scratch() -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("mutations");
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).unwrap();
    path
}
