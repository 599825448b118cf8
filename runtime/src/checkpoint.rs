//! Checkpoints that a crash can't damage.
//!
//! ```text
//! ROOT/LATEST              the name of the newest one: step-300
//! ROOT/step-300/           a complete checkpoint; never written to again
//!      step-300/manifest.json    what is in it, with a hash of each file and of itself
//!      step-300/*.safetensors    slices of tensors
//! ROOT/step-400.tmp/       one that is being written, or was when the run ended
//! ```
//!
//! Files are written and synced in `step-N.tmp`, the manifest last; then the directory gets its
//! name, then `LATEST` is replaced. Each of the two renames is atomic, and the directory they
//! happen in is synced after each, so that after a crash anywhere `LATEST` names a complete
//! checkpoint. Prior art: the same order in LevelDB's `CURRENT` and in SQLite's journals.
//!
//! Tensors are stored as slices of the global tensor, whoever had them, so that a run resumes
//! under another plan or another number of ranks: a rank reads any block, and [`Checkpoint`]
//! puts it together.

mod manifest;
mod read;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use ir::{DType, Diagnostic, Span};
use kernels::Bytes;
use serde_json::Value;

pub use manifest::{FileEntry, SliceEntry};
pub use read::Checkpoint;

use crate::disk::{Disk, Files, UNFINISHED, replace_on, room};
use crate::error::{Error, Failure};
use crate::weights::{NewTensor, write_to};
use manifest::{MANIFEST, Manifest};

/// The file that names the newest checkpoint.
const LATEST: &str = "LATEST";
/// What a checkpoint takes beside its tensors, about: headers and the manifest.
const MANIFEST_BYTES: u64 = 64 << 10;

/// A slice of a tensor, to be written.
#[derive(Clone, Copy, Debug)]
pub struct Slice<'a> {
    /// The name of the tensor.
    pub name: &'a str,
    /// The type of its elements.
    pub dtype: DType,
    /// The dims of the whole tensor.
    pub dims: &'a [usize],
    /// Which block of it this is.
    pub block: &'a [Range<usize>],
    /// The elements of the block: row-major, little-endian.
    pub bytes: &'a [u8],
}

impl Slice<'_> {
    /// The name in its file: that of the tensor if it is whole, else with its block.
    fn key(&self) -> String {
        if self.block.iter().zip(self.dims).all(|(range, &dim)| *range == (0..dim)) {
            return self.name.to_owned();
        }
        let ranges: Vec<String> =
            self.block.iter().map(|range| format!("{}..{}", range.start, range.end)).collect();
        format!("{}[{}]", self.name, ranges.join(", "))
    }
}

/// What is wrong with the checkpoint of a step.
#[derive(Debug)]
pub struct Damage {
    /// The step.
    pub step: u64,
    /// What is damaged: at least one `E4041`.
    pub diagnostics: Vec<Diagnostic>,
}

/// The checkpoints of one run.
pub struct Store {
    root: PathBuf,
    keep: Option<usize>,
    disk: Box<dyn Disk>,
}

impl Store {
    /// The checkpoints in a directory, which is made when the first one is written.
    ///
    /// `keep` is how many are kept, the newest ones; all if none.
    pub fn new(root: &Path, keep: Option<usize>) -> Store {
        Store { root: root.to_owned(), keep, disk: Box::new(Files) }
    }

    /// Whether the disk has room for what a run will write: `coming` checkpoints of so many bytes
    /// each, of which the oldest go when there are more than are kept.
    ///
    /// **Errors.** [`Error::Room`].
    pub fn check_room(&self, bytes: u64, coming: u64) -> Result<(), Error> {
        let there = self.steps().map_or(0, |steps| steps.len() as u64);
        // The newest is complete before the oldest goes.
        let most = self.keep.map_or(u64::MAX, |keep| keep as u64 + 1);
        let more = there.saturating_add(coming).min(most.max(there + 1)) - there;
        let need = (bytes + MANIFEST_BYTES).saturating_mul(more);
        let Some(have) = room(&self.root).filter(|have| *have < need) else { return Ok(()) };
        let what = match more {
            1 => "a checkpoint".to_owned(),
            more => format!("{more} checkpoints"),
        };
        Err(Error::Room { path: self.root.clone(), what, need: Bytes(need), have: Bytes(have) })
    }

    /// The error of a checkpoint that could not be written.
    pub(crate) fn failed(&self, step: u64, cause: Error) -> Error {
        let previous = self.latest_name().ok().flatten().map(|name| name.step);
        Error::Checkpoint { step, root: self.root.clone(), previous, cause: Box::new(cause) }
    }

    /// Begins a checkpoint, by one rank; what an earlier crash left behind is removed.
    pub fn begin(&self, step: u64) -> Result<Draft<'_>, Error> {
        let draft = self.join(step);
        let made = self.make_folder(&draft.folder);
        made.map_err(|cause| draft.failed(cause))?;
        Ok(draft)
    }

    /// Joins a checkpoint that another rank has begun, to write files of it.
    pub fn join(&self, step: u64) -> Draft<'_> {
        let folder = self.root.join(format!("step-{step}.{UNFINISHED}"));
        Draft { store: self, step, folder }
    }

    fn make_folder(&self, folder: &Path) -> Result<(), Error> {
        self.disk.create_dir(&self.root).map_err(Error::io("create", &self.root))?;
        for stale in self.names()?.filter(|name| is_unfinished(name)) {
            self.remove(&self.root.join(stale))?;
        }
        self.disk.create_dir(folder).map_err(Error::io("create", folder))
    }

    /// The newest complete checkpoint, its manifest checked.
    ///
    /// It may be replaced and removed by its run in the middle of this: then the next one is read.
    ///
    /// **Errors.** E4040 if there is none; those of [`Store::open`].
    pub fn latest(&self) -> Result<Checkpoint, Failure> {
        let mut name = self.latest_name()?;
        loop {
            let Some(found) = name else {
                return Err(self.none("no checkpoint in this directory").into());
            };
            let opened = self.open_name(&found);
            let newer = if opened.is_err() { self.latest_name()? } else { name };
            if newer == name {
                return opened;
            }
            name = newer;
        }
    }

    /// The newest checkpoint of which every byte is what was written, and what is damaged of those
    /// that come after it, the newest first. Steps after the latest are of another history.
    ///
    /// **Cost.** Reads checkpoints until one is intact.
    /// **Errors.** E4040 if there is none; E4041 of the newest if none is intact; E4042.
    pub fn newest_intact(&self) -> Result<(Checkpoint, Vec<Damage>), Failure> {
        let latest = self.latest_name()?;
        let latest = latest.ok_or_else(|| self.none("no checkpoint in this directory"))?;
        let older = self.complete()?.into_iter().rev().filter(|name| *name < latest);
        let mut damages = Vec::new();
        for name in [latest].into_iter().chain(older) {
            match self.open_intact(name) {
                Ok(checkpoint) => return Ok((checkpoint, damages)),
                Err(Failure::Input(found)) if found.iter().all(|d| d.code == "E4041") => {
                    damages.push(Damage { step: name.step, diagnostics: found });
                }
                Err(other) => return Err(other),
            }
        }
        let mut newest = damages.swap_remove(0).diagnostics;
        for diagnostic in &mut newest {
            diagnostic.help = Some("there is no older checkpoint that is intact".to_owned());
        }
        Err(newest.into())
    }

    /// A checkpoint, all its bytes checked.
    fn open_intact(&self, name: Name) -> Result<Checkpoint, Failure> {
        let checkpoint = Checkpoint::open(&self.root.join(name.folder()))?;
        checkpoint.verify()?;
        Ok(checkpoint)
    }

    /// The checkpoint of a step, its manifest checked.
    ///
    /// **Errors.** E4040 if there is none, E4041 if it is damaged, E4042 if it is of another
    /// version of this program.
    pub fn open(&self, step: u64) -> Result<Checkpoint, Failure> {
        let names = self.complete()?;
        if let Some(name) = names.iter().rev().find(|name| name.step == step) {
            return self.open_name(name);
        }
        let none = self.none(&format!("no checkpoint of step {step} in this directory"));
        if names.is_empty() {
            return Err(none.into());
        }
        let steps: Vec<String> = names.iter().map(|name| name.step.to_string()).collect();
        Err(none.help(format!("there are steps {}", steps.join(", "))).into())
    }

    /// Steps with a complete checkpoint, ascending.
    pub fn steps(&self) -> Result<Vec<u64>, Error> {
        let mut steps: Vec<u64> = self.complete()?.iter().map(|name| name.step).collect();
        steps.dedup();
        Ok(steps)
    }

    /// The step of the newest checkpoint, intact or not.
    pub fn latest_step(&self) -> Result<Option<u64>, Error> {
        Ok(self.latest_name()?.map(|name| name.step))
    }

    /// The directory of the checkpoint of a step.
    pub fn folder_of(&self, step: u64) -> PathBuf {
        self.root.join(Name { step, current: true }.folder())
    }

    fn none(&self, headline: &str) -> Diagnostic {
        Diagnostic::error("E4040", Span::of(self.root.display().to_string()), headline)
    }

    fn open_name(&self, name: &Name) -> Result<Checkpoint, Failure> {
        let found = Checkpoint::open(&self.root.join(name.folder()));
        found.map_err(|failure| self.with_way_out(failure, name.step))
    }

    /// The newest checkpoint before a step that is valid through and through.
    ///
    /// **Cost.** Reads checkpoints until one is valid.
    pub fn older_valid(&self, step: u64) -> Option<u64> {
        let older = self.complete().ok()?.into_iter().rev().filter(|name| name.step < step);
        let mut older = older.into_iter();
        older.find(|name| self.open_intact(*name).is_ok()).map(|name| name.step)
    }

    /// Completes a failure to read the checkpoint of a step with what can be resumed instead.
    pub fn with_way_out(&self, failure: Failure, step: u64) -> Failure {
        let Failure::Input(mut diagnostics) = failure else { return failure };
        let help = match self.older_valid(step) {
            Some(step) => format!("resume from step {step}, which is intact"),
            None => "there is no older checkpoint that is intact".to_owned(),
        };
        for diagnostic in diagnostics.iter_mut().filter(|d| d.help.is_none()) {
            diagnostic.help = Some(help.clone());
        }
        Failure::Input(diagnostics)
    }

    /// What `LATEST` names; if it names nothing that exists, the newest complete checkpoint.
    ///
    /// A run may write its next checkpoint and remove this one in the middle of this: as long as
    /// the file comes to name another, it is read again.
    fn latest_name(&self) -> Result<Option<Name>, Error> {
        let mut named = self.named_latest()?;
        loop {
            // The one it names is away for a moment while another of the same step replaces it.
            let candidates = named.iter().flat_map(|&name| [name, Name { current: false, ..name }]);
            let exists = |name: &Name| self.root.join(name.folder()).is_dir();
            if let Some(name) = candidates.into_iter().find(exists) {
                return Ok(Some(name));
            }
            let newest = self.complete()?.pop();
            let named_now = self.named_latest()?;
            if named_now == named {
                return Ok(newest);
            }
            named = named_now;
        }
    }

    /// What `LATEST` names, whether or not that exists.
    fn named_latest(&self) -> Result<Option<Name>, Error> {
        let path = self.root.join(LATEST);
        match ir::file::read_text(&path) {
            Ok(text) => Ok(Name::parse(text.trim())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            // A damaged name is as good as none.
            Err(error) if error.kind() == io::ErrorKind::InvalidData => Ok(None),
            Err(error) => Err(Error::io("read", &path)(error)),
        }
    }

    /// Complete checkpoints, ascending.
    fn complete(&self) -> Result<Vec<Name>, Error> {
        let mut names: Vec<Name> = self.names()?.filter_map(|name| Name::parse(&name)).collect();
        names.sort_unstable();
        Ok(names)
    }

    /// The names in the directory; none if there is no directory.
    fn names(&self) -> Result<impl Iterator<Item = String>, Error> {
        let names = match std::fs::read_dir(&self.root) {
            Ok(entries) => entries
                .map(|entry| entry.map(|entry| entry.file_name()))
                .collect::<io::Result<Vec<_>>>()
                .map_err(Error::io("read the directory", &self.root))?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(Error::io("read the directory", &self.root)(error)),
        };
        Ok(names.into_iter().filter_map(|name| name.into_string().ok()))
    }

    fn remove(&self, path: &Path) -> Result<(), Error> {
        self.disk.remove(path).map_err(Error::io("remove", path))
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<(), Error> {
        self.disk.rename(from, to).map_err(Error::io("rename", from))?;
        self.disk.sync_dir(&self.root).map_err(Error::io("sync", &self.root))
    }

    /// Removes what is beyond the number to keep. Steps after this one are of another history and
    /// are left alone.
    fn prune(&self, step: u64) -> Result<(), Error> {
        let complete = self.complete()?;
        for replaced in complete.iter().filter(|name| !name.current) {
            self.retire(replaced)?;
        }
        let Some(keep) = self.keep else { return Ok(()) };
        let older = complete.iter().rev().filter(|name| name.current && name.step <= step);
        for name in older.skip(keep.max(1)) {
            self.retire(name)?;
        }
        Ok(())
    }

    /// Removes a checkpoint. It loses its name first: what a crash leaves of it is none.
    fn retire(&self, name: &Name) -> Result<(), Error> {
        let unfinished = self.root.join(format!("step-{}.{UNFINISHED}", name.step));
        self.remove(&unfinished)?;
        self.rename(&self.root.join(name.folder()), &unfinished)?;
        self.remove(&unfinished)
    }
}

/// The name of a complete checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Name {
    step: u64,
    /// False once a newer one of the same step takes its place: `step-N.old`.
    current: bool,
}

impl Name {
    fn parse(text: &str) -> Option<Name> {
        let text = text.strip_prefix("step-")?;
        let (number, current) = match text.strip_suffix(".old") {
            Some(number) => (number, false),
            None => (text, true),
        };
        let is_number = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
        let step = number.parse().ok().filter(|_| is_number)?;
        Some(Name { step, current })
    }

    fn folder(self) -> String {
        format!("step-{}{}", self.step, if self.current { "" } else { ".old" })
    }
}

/// Whether a name is that of a file or directory which a save began and did not finish.
fn is_unfinished(name: &str) -> bool {
    let name = name.strip_suffix(UNFINISHED).and_then(|name| name.strip_suffix('.'));
    name.is_some_and(|name| name == LATEST || Name::parse(name).is_some_and(|name| name.current))
}

/// A checkpoint that is being written.
pub struct Draft<'a> {
    store: &'a Store,
    step: u64,
    folder: PathBuf,
}

impl Draft<'_> {
    /// Writes a file of slices; the name is that of a file, without its extension.
    ///
    /// Different ranks write different files; what is returned goes to the rank that commits.
    /// **Errors.** On failure the draft is removed.
    pub fn write(&self, name: &str, slices: &[Slice<'_>]) -> Result<FileEntry, Error> {
        let name = format!("{name}.safetensors");
        let keys: Vec<String> = slices.iter().map(Slice::key).collect();
        let sizes: Vec<Vec<usize>> =
            slices.iter().map(|s| s.block.iter().map(ExactSizeIterator::len).collect()).collect();
        let tensors: Vec<NewTensor<'_>> = slices
            .iter()
            .zip(keys.iter().zip(&sizes))
            .map(|(slice, (key, dims))| NewTensor {
                name: key,
                dtype: slice.dtype,
                dims,
                bytes: slice.bytes,
            })
            .collect();
        let write = |writer: &mut dyn Write| write_to(writer, &tensors, &BTreeMap::new());
        let (bytes, hash) = self.write_file(&name, &write).map_err(|cause| self.failed(cause))?;
        let slices = slices.iter().zip(keys).map(|(slice, key)| SliceEntry::new(slice, key));
        Ok(FileEntry { name, bytes, blake3: hash, slices: slices.collect() })
    }

    /// Completes the checkpoint with all its files and the state of the run, and makes it the
    /// latest; then removes those beyond the number to keep. Returns its directory.
    ///
    /// A slice that several files have is taken from the first. Floats in `state` may change in
    /// their last bit on the way through JSON: store their bits if that matters.
    /// **Errors.** On failure the draft is removed, and the previous checkpoint is untouched.
    pub fn commit(&self, files: Vec<FileEntry>, state: Value) -> Result<PathBuf, Error> {
        self.commit_files(files, state).map_err(|cause| self.failed(cause))
    }

    fn commit_files(&self, files: Vec<FileEntry>, state: Value) -> Result<PathBuf, Error> {
        let store = self.store;
        let sync = |path: &Path| store.disk.sync_dir(path).map_err(Error::io("sync", path));
        sync(&self.folder)?;
        let text = Manifest::new(self.step, files, state).to_text();
        self.write_file(MANIFEST, &|writer| writer.write_all(text.as_bytes()))?;
        sync(&self.folder)?;
        let name = Name { step: self.step, current: true };
        let complete = store.root.join(name.folder());
        if complete.exists() {
            let old = store.root.join(Name { current: false, ..name }.folder());
            store.remove(&old)?;
            store.rename(&complete, &old)?;
        }
        store.rename(&self.folder, &complete)?;
        let content = format!("{}\n", name.folder());
        replace_on(&*store.disk, &store.root.join(LATEST), content.as_bytes())?;
        store.prune(self.step)?;
        Ok(complete)
    }

    /// Writes and syncs a file; returns its length and hash.
    fn write_file(
        &self,
        name: &str,
        content: &dyn Fn(&mut dyn Write) -> io::Result<()>,
    ) -> Result<(u64, String), Error> {
        let path = self.folder.join(name);
        let (mut bytes, mut hasher) = (0, blake3::Hasher::new());
        let written = self.store.disk.write(&path, &mut |writer| {
            let mut tee = Tee { writer, hasher: &mut hasher, bytes: &mut bytes };
            content(&mut tee)
        });
        written.map_err(Error::io("write", &path))?;
        Ok((bytes, hasher.finalize().to_hex().to_string()))
    }

    /// Removes the draft, and says what is left.
    fn failed(&self, cause: Error) -> Error {
        // What can't be removed now is removed when the next checkpoint begins.
        let _ = self.store.remove(&self.folder);
        self.store.failed(self.step, cause)
    }
}

/// Writes, counts and hashes.
struct Tee<'a> {
    writer: &'a mut dyn Write,
    hasher: &'a mut blake3::Hasher,
    bytes: &'a mut u64,
}

impl Write for Tee<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.writer.write(bytes)?;
        self.hasher.update(&bytes[..n]);
        *self.bytes += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.writer.flush()
    }
}
