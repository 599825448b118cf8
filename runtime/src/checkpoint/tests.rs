//! Checkpoints come back whole, in any cut, after a crash anywhere.

#![allow(clippy::single_range_in_vec_init)]

use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use serde_json::json;

use super::*;
use crate::disk::Content;
use crate::scratch::{Numbers, Scratch, mutations};

/// How the disk fails.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    /// The machine stops: nothing happens any more.
    Crash,
    /// Nothing more can be written, and all else works.
    Full,
}

/// A disk that fails at one of its operations; each write of a file counts several.
struct Faulty {
    fault: Fault,
    left: AtomicUsize,
    log: Mutex<Vec<String>>,
}

impl Faulty {
    fn new(fault: Fault, fail_at: usize) -> Faulty {
        Faulty { fault, left: AtomicUsize::new(fail_at), log: Mutex::default() }
    }

    fn operate(&self, writes: bool, name: &str, path: &Path) -> io::Result<()> {
        let file = path.file_name().unwrap().to_string_lossy().into_owned();
        let left = self.left.load(Ordering::Relaxed);
        if left > 0 {
            self.left.store(left - 1, Ordering::Relaxed);
            self.log.lock().unwrap().push(format!("{name} {file}"));
            return Ok(());
        }
        if self.fault == Fault::Crash || writes {
            return Err(io::Error::from(io::ErrorKind::StorageFull));
        }
        Ok(())
    }
}

/// Fails in the middle of a write.
struct Torn<'a>(&'a mut dyn Write, &'a Faulty);

impl Write for Torn<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Err(error) = self.1.operate(true, "bytes of", Path::new("file")) {
            self.0.write_all(&bytes[..bytes.len() / 2])?;
            return Err(error);
        }
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl Disk for Arc<Faulty> {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.operate(true, "create", path)?;
        Files.create_dir(path)
    }

    fn write(&self, path: &Path, content: Content<'_>) -> io::Result<()> {
        self.operate(true, "write", path)?;
        Files.write(path, &mut |writer| content(&mut Torn(writer, self)))?;
        self.operate(true, "written", path)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.operate(false, "sync", path)?;
        Files.sync_dir(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.operate(false, "rename", from)?;
        Files.rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.operate(false, "remove", path)?;
        Files.remove(path)
    }
}

/// Writes a 4x6 tensor of ones times `step` in two files, and a scalar, as two ranks would.
fn save(store: &Store, step: u64) -> Result<PathBuf, Error> {
    let values: Vec<u8> =
        (0..12).flat_map(|i| (i as f32 + 100.0 * step as f32).to_le_bytes()).collect();
    let dtype = DType::F32;
    let draft = store.begin(step)?;
    let mut files = Vec::new();
    for (rank, columns) in [0..3, 3..6].into_iter().enumerate() {
        let block = [0..4, columns];
        let weight = Slice { name: "w", dtype, dims: &[4, 6], block: &block, bytes: &values };
        let scalar = Slice { name: "scale", dtype, dims: &[], block: &[], bytes: &values[..4] };
        files.push(store.join(step).write(&format!("rank-{rank}"), &[weight, scalar])?);
    }
    draft.commit(files, json!({ "seed": 7, "step": step }))
}

fn check(checkpoint: &Checkpoint) {
    checkpoint.verify().unwrap();
    let step = checkpoint.step();
    assert_eq!(checkpoint.state()["step"], step);
    let bytes = checkpoint.read("w", &[1..3, 2..5], DType::F32).unwrap();
    let values: Vec<f32> = bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect();
    let base = 100.0 * step as f32;
    assert_eq!(values, [5.0, 3.0, 4.0, 8.0, 6.0, 7.0].map(|x| x + base));
    assert_eq!(checkpoint.read("scale", &[], DType::F32).unwrap(), base.to_le_bytes());
}

fn codes<T>(result: Result<T, Failure>) -> Vec<(&'static str, Option<String>)> {
    match result {
        Ok(_) => Vec::new(),
        Err(Failure::Input(found)) => found.into_iter().map(|d| (d.code, d.help)).collect(),
        Err(Failure::World(error)) => panic!("{error}"),
    }
}

fn faulty(scratch: &Scratch, fault: Fault, fail_at: usize) -> Store {
    Store {
        root: scratch.path().to_owned(),
        keep: Some(2),
        disk: Box::new(Arc::new(Faulty::new(fault, fail_at))),
    }
}

#[test]
fn a_checkpoint_comes_back_in_any_cut() {
    let scratch = Scratch::new("checkpoint");
    let store = Store::new(&scratch.join("run"), None);
    assert_eq!(codes(store.latest())[0].0, "E4040");
    save(&store, 3).unwrap();
    let checkpoint = store.latest().unwrap();
    check(&checkpoint);
    let tensors: Vec<_> = checkpoint.tensors().collect();
    assert_eq!(tensors, [("scale", &[][..], DType::F32), ("w", &[4, 6], DType::F32)]);
    for (name, block, dtype) in [
        ("v", vec![0..1], DType::F32),
        ("w", vec![0..4, 0..7], DType::F32),
        ("w", vec![0..24], DType::F32),
        ("w", vec![0..4, 0..6], DType::BF16),
    ] {
        assert_eq!(codes(checkpoint.read(name, &block, dtype))[0].0, "E4043");
    }
    let error = codes(store.open(4));
    assert_eq!(error, [("E4040", Some("there are steps 3".to_owned()))]);
}

#[test]
fn the_last_few_are_kept() {
    let scratch = Scratch::new("keep");
    let store = Store::new(scratch.path(), Some(2));
    for step in [1, 2, 10, 11, 9] {
        save(&store, step).unwrap();
    }
    // Step 9 is of another history than 10 and 11, of which it knows nothing.
    assert_eq!(store.steps().unwrap(), [9, 10, 11]);
    check(&store.latest().unwrap());
    assert_eq!(store.latest().unwrap().step(), 9);
}

#[test]
fn after_a_crash_anywhere_the_latest_is_complete() {
    for replaced in [false, true] {
        let mut crashes = 0;
        loop {
            let scratch = Scratch::new("crash");
            let store = Store::new(scratch.path(), Some(2));
            save(&store, 1).unwrap();
            let next = if replaced { 1 } else { 2 };
            let result = save(&faulty(&scratch, Fault::Crash, crashes), next);
            let latest = store.latest().unwrap();
            check(&latest);
            assert!(latest.step() == 1 || latest.step() == 2);
            if result.is_ok() {
                assert_eq!(latest.step(), next);
                break;
            }
            save(&store, 5).unwrap();
            check(&store.latest().unwrap());
            assert_eq!(store.latest().unwrap().step(), 5);
            assert!(store.names().unwrap().all(|name| !name.ends_with(".tmp")));
            crashes += 1;
        }
        assert!(crashes > 20, "{crashes} crashes");
    }
}

#[test]
fn a_full_disk_leaves_the_previous_checkpoint_and_no_draft() {
    let scratch = Scratch::new("full");
    let store = Store::new(scratch.path(), Some(2));
    save(&store, 1).unwrap();
    let mut failures = 0;
    while let Err(error) = save(&faulty(&scratch, Fault::Full, failures), 2) {
        assert!(error.is_disk_full());
        let text = error.to_string();
        assert!(text.contains("step 2") && text.contains(&*scratch.path().to_string_lossy()));
        assert!(text.contains("the checkpoint of step 1 is intact"), "{text}");
        assert!(!scratch.join("step-2.tmp").exists());
        check(&store.latest().unwrap());
        fs::remove_dir_all(scratch.join("step-2")).ok();
        failures += 1;
    }
    assert!(failures > 10, "{failures} failures");
}

#[test]
fn names_are_given_after_what_they_name_is_on_the_disk() {
    let scratch = Scratch::new("order");
    let disk = Arc::new(Faulty::new(Fault::Crash, usize::MAX));
    let folder = scratch.path();
    Store::new(folder, None).begin(1).unwrap();
    let store = Store { root: folder.to_owned(), keep: None, disk: Box::new(Arc::clone(&disk)) };
    save(&store, 2).unwrap();
    let log = disk.log.lock().unwrap();
    let root = scratch.path().file_name().unwrap().to_string_lossy();
    let log: Vec<String> = log
        .iter()
        .filter(|line| !line.starts_with("bytes") && !line.starts_with("write "))
        .map(|line| line.replace(&*root, "ROOT"))
        .collect();
    let expected = [
        "create ROOT",
        "remove step-1.tmp",
        "create step-2.tmp",
        "written rank-0.safetensors",
        "written rank-1.safetensors",
        "sync step-2.tmp",
        "written manifest.json",
        "sync step-2.tmp",
        "rename step-2.tmp",
        "sync ROOT",
        "written LATEST.tmp",
        "rename LATEST.tmp",
        "sync ROOT",
    ];
    assert_eq!(log, expected);
}

#[test]
fn damage_is_named_with_the_way_out() {
    let scratch = Scratch::new("damage");
    let store = Store::new(scratch.path(), None);
    for step in 1..=3 {
        save(&store, step).unwrap();
    }
    let flip = |name: &str, at: usize| {
        let path = scratch.join(name);
        let mut bytes = fs::read(&path).unwrap();
        let at = at.min(bytes.len() - 1);
        bytes[at] ^= 1;
        fs::write(path, bytes).unwrap();
    };
    flip("step-2/rank-1.safetensors", 200);
    flip("step-3/rank-0.safetensors", 200);
    let checkpoint = store.latest().unwrap();
    let failure = checkpoint.verify().map_err(|failure| store.with_way_out(failure, 3));
    let Err(Failure::Input(diagnostics)) = failure else { panic!("no damage found") };
    assert!(diagnostics[0].span.source.ends_with("step-3/rank-0.safetensors"));
    assert_eq!(diagnostics[0].help.as_deref(), Some("resume from step 1, which is intact"));
    assert_eq!(codes(checkpoint.read("w", &[0..1, 0..1], DType::F32))[0].0, "E4041");
    assert_eq!(codes(checkpoint.read("w", &[0..1, 4..5], DType::F32)), []);

    let help = Some("resume from step 1, which is intact".to_owned());
    flip("step-3/manifest.json", 40);
    assert_eq!(codes(store.latest()), [("E4041", help.clone())]);
    fs::remove_file(scratch.join("step-2/rank-0.safetensors")).unwrap();
    assert_eq!(codes(store.open(2)), [("E4041", help)]);
    fs::write(scratch.join("step-1/manifest.json"), "{\"format\": 2}").unwrap();
    assert_eq!(codes(store.open(1))[0].0, "E4042");
    fs::remove_file(scratch.join("step-1/manifest.json")).unwrap();
    assert_eq!(codes(store.open(1))[0].0, "E4041");
}

#[test]
fn mutated_manifests_never_panic() {
    let scratch = Scratch::new("mutant");
    let store = Store::new(scratch.path(), None);
    save(&store, 1).unwrap();
    let path = scratch.join("step-1/manifest.json");
    let valid = fs::read(&path).unwrap();
    let body_end = valid.len() - HASH_TAIL;
    for (_, mutant) in mutations(&valid, 300) {
        assert!(mutant == valid || Manifest::parse(&mutant, &Span::default()).is_err());
    }
    // With a hash that fits, the content itself is what must be refused.
    let mut numbers = Numbers::new();
    for (_, mut mutant) in mutations(&valid[..body_end], 600) {
        let hash = blake3::hash(&mutant).to_hex();
        mutant.extend(format!(",\n  \"blake3\": \"{hash}\"\n}}\n").bytes());
        fs::write(&path, &mutant).unwrap();
        if let Ok(checkpoint) = store.latest() {
            for (name, dims, dtype) in checkpoint.tensors() {
                let block: Vec<_> = dims.iter().map(|&dim| 0..numbers.below(dim + 1)).collect();
                let _ = checkpoint.read(name, &block, dtype);
            }
        }
    }
}

/// Bytes of a manifest after what its hash is over.
const HASH_TAIL: usize = ",\n  \"blake3\": \"".len() + 64 + "\"\n}\n".len();
