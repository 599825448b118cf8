//! Reading a checkpoint: any block of any tensor, whoever wrote it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use ir::{DType, Diagnostic, Span};
use serde_json::Value;

use crate::block;
use crate::convert::Stored;
use crate::error::Failure;
use crate::map::Map;
use crate::weights::Weights;

use super::manifest::{FileCheck, MANIFEST, Manifest, Place};

/// A complete checkpoint.
///
/// Opening checks the manifest and the sizes of the files; the hash of a file is checked when
/// something is first read from it. The files stay open, so that a checkpoint can be read to its
/// end while its run removes it.
pub struct Checkpoint {
    folder: PathBuf,
    manifest: Manifest,
    files: BTreeMap<String, (Map, OnceLock<Weights>)>,
}

/// Damaged tensors that are named for one file.
const NAMED_MAX: usize = 3;

impl Checkpoint {
    /// Opens the checkpoint in a directory.
    ///
    /// **Errors.** E4041, E4042.
    pub fn open(folder: &Path) -> Result<Checkpoint, Failure> {
        let path = folder.join(MANIFEST);
        if !path.exists() {
            return Err(damaged(&path, "the checkpoint has no manifest").into());
        }
        let manifest = Manifest::parse(&Map::open(&path)?, &span(&path))?;
        let (mut diagnostics, mut files) = (Vec::new(), BTreeMap::new());
        for (name, check) in &manifest.files {
            let path = folder.join(name);
            match Map::open(&path) {
                Ok(map) if map.len() as u64 == check.bytes => {
                    files.insert(name.clone(), (map, OnceLock::new()));
                }
                Ok(map) => diagnostics.push(of_other_size(&path, map, check)),
                Err(Failure::Input(found)) => {
                    let why = found.first().map_or("can't be read", |first| &first.headline);
                    let tensors: Vec<&str> = manifest.tensors_of(name).collect();
                    diagnostics.push(damaged(&path, why).note(named(&tensors)));
                }
                Err(world) => return Err(world),
            }
        }
        if !diagnostics.is_empty() {
            return Err(diagnostics.into());
        }
        Ok(Checkpoint { folder: folder.to_owned(), manifest, files })
    }

    /// The step after which it was written.
    pub fn step(&self) -> u64 {
        self.manifest.step
    }

    /// The directory.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Bytes of its files of tensors.
    pub fn bytes(&self) -> u64 {
        self.manifest.files.values().map(|file| file.bytes).sum()
    }

    /// The state of the run.
    pub fn state(&self) -> &Value {
        &self.manifest.state
    }

    /// All tensors with their dims and types, by name.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &[usize], DType)> {
        let tensors = self.manifest.tensors.iter();
        tensors.map(|(name, tensor)| (name.as_str(), &tensor.dims[..], tensor.dtype))
    }

    /// Checks the hashes of all files.
    ///
    /// **Cost.** Reads all of it.
    /// **Errors.** E4041.
    pub fn verify(&self) -> Result<(), Failure> {
        let mut diagnostics = Vec::new();
        for name in self.manifest.files.keys() {
            match self.file(name) {
                Ok(_) => {}
                Err(Failure::Input(found)) => diagnostics.extend(found),
                Err(world) => return Err(world),
            }
        }
        if diagnostics.is_empty() { Ok(()) } else { Err(diagnostics.into()) }
    }

    /// The elements of a block of a tensor, in the type in which they are stored.
    ///
    /// **Errors.** E4041 if a file is damaged; E4043 if there is no such tensor, or it has no such
    /// block, or another type.
    pub fn read(
        &self,
        name: &str,
        wanted: &[Range<usize>],
        dtype: DType,
    ) -> Result<Vec<u8>, Failure> {
        let other = |headline: String| {
            Diagnostic::error("E4043", span(&self.folder), headline)
                .help("resume with the model and optimizer with which the run began")
        };
        let tensor = self
            .manifest
            .tensors
            .get(name)
            .ok_or_else(|| other(format!("the checkpoint has no tensor `{name}`")))?;
        let inside = |(r, &dim): (&Range<usize>, &usize)| r.start <= r.end && r.end <= dim;
        let fits = wanted.len() == tensor.dims.len() && wanted.iter().zip(&tensor.dims).all(inside);
        if !fits || tensor.dtype != dtype {
            let dims: Vec<String> = tensor.dims.iter().map(ToString::to_string).collect();
            let ranges: Vec<String> =
                wanted.iter().map(|r| format!("{}..{}", r.start, r.end)).collect();
            return Err(other(format!(
                "tensor `{name}` is {}[{}] in the checkpoint, and {dtype} [{}] of it is needed",
                tensor.dtype,
                dims.join(", "),
                ranges.join(", ")
            ))
            .into());
        }
        let size = dtype.size() as usize;
        let mut out = vec![0; block::elements(wanted) * size];
        let mut copied = 0;
        for place in tensor.slices_of(wanted) {
            let source = place.block();
            let bytes = self.slice(&place.file, &place.key, &source, dtype)?;
            copied += block::copy_overlap(bytes, &source, &mut out, wanted, size);
        }
        if copied != block::elements(wanted) {
            let headline = format!("the slices of tensor `{name}` don't make it up");
            return Err(damaged(&self.folder.join(MANIFEST), &headline).into());
        }
        Ok(out)
    }

    /// The bytes of a slice, which must be what the manifest says.
    fn slice(
        &self,
        file: &str,
        key: &str,
        block: &[Range<usize>],
        dtype: DType,
    ) -> Result<&[u8], Failure> {
        let weights = self.file(file)?;
        let fits = |tensor: &&crate::weights::Tensor| {
            tensor.stored == Stored::DType(dtype)
                && tensor.dims.iter().copied().eq(block.iter().map(ExactSizeIterator::len))
        };
        let tensor = weights.get(key).filter(fits).ok_or_else(|| {
            damaged(&self.folder.join(file), &format!("has no `{key}` as the manifest says"))
        })?;
        Ok(weights.bytes(tensor))
    }

    /// A file, its hash checked.
    fn file(&self, name: &str) -> Result<&Weights, Failure> {
        let ((map, cell), check) = (&self.files[name], &self.manifest.files[name]);
        if let Some(weights) = cell.get() {
            return Ok(weights);
        }
        let path = self.folder.join(name);
        let is_intact = blake3::hash(map).to_hex().as_str() == check.blake3;
        let weights = Weights::of_map(map.clone(), &path);
        match weights {
            Ok(weights) if is_intact => Ok(cell.get_or_init(|| weights)),
            Err(wrong) if is_intact => Err(wrong.into()),
            found => Err(self.name_damage(name, found.ok().as_ref()).into()),
        }
    }

    /// What is damaged of a file whose hash is another: the tensors whose own hashes are others.
    fn name_damage(&self, file: &str, weights: Option<&Weights>) -> Diagnostic {
        let wrong = damaged(&self.folder.join(file), "the file is damaged: its hash is another");
        let Some(weights) = weights else {
            let tensors: Vec<&str> = self.manifest.tensors_of(file).collect();
            return wrong.note(format!("its header is damaged; {}", named(&tensors)));
        };
        let is_damaged = |place: &Place| {
            let hash = weights.get(&place.key).map(|tensor| blake3::hash(weights.bytes(tensor)));
            match (&place.blake3, hash) {
                (Some(wanted), Some(found)) => found.to_hex().as_str() != wanted,
                (Some(_), None) => true,
                (None, _) => false,
            }
        };
        let tensors = self.manifest.tensors.iter().filter(|(_, tensor)| {
            tensor.slices.iter().any(|place| place.file == file && is_damaged(place))
        });
        let tensors: Vec<&str> = tensors.map(|(name, _)| name.as_str()).collect();
        wrong.note(named(&tensors))
    }
}

/// What is wrong with a file that was cut short, or has grown.
fn of_other_size(path: &Path, map: Map, check: &FileCheck) -> Diagnostic {
    let headline = format!("has {} bytes instead of {}", map.len(), check.bytes);
    let wrong = damaged(path, &headline);
    let tensors = Weights::of_map(map, path).err().unwrap_or_default();
    tensors.into_iter().take(NAMED_MAX).fold(wrong, |wrong, of| wrong.note(of.headline))
}

/// The first of some tensors, as a note.
fn named(tensors: &[&str]) -> String {
    let shown: Vec<String> =
        tensors.iter().take(NAMED_MAX).map(|name| format!("`{name}`")).collect();
    match (tensors.len(), tensors.len() - shown.len()) {
        (0, _) => "no tensor of it is damaged, or none that can be named".to_owned(),
        (1, _) => format!("tensor {} is damaged", shown[0]),
        (_, 0) => format!("tensors {} are damaged", shown.join(", ")),
        (_, more) => format!("tensors {} and {more} more are damaged", shown.join(", ")),
    }
}

fn span(path: &Path) -> Span {
    Span::of(path.display().to_string())
}

fn damaged(path: &Path, headline: &str) -> Diagnostic {
    Diagnostic::error("E4041", span(path), headline)
}
