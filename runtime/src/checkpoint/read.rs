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

use super::manifest::{FileCheck, MANIFEST, Manifest};

/// A complete checkpoint.
///
/// Opening checks the manifest and the sizes of the files; the hash of a file is checked when
/// something is first read from it.
pub struct Checkpoint {
    folder: PathBuf,
    manifest: Manifest,
    files: BTreeMap<String, OnceLock<Weights>>,
}

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
        let mut diagnostics = Vec::new();
        for (name, check) in &manifest.files {
            let path = folder.join(name);
            match path.metadata() {
                Ok(metadata) if metadata.len() == check.bytes => {}
                Ok(metadata) => {
                    let headline =
                        format!("has {} bytes instead of {}", metadata.len(), check.bytes);
                    diagnostics.push(damaged(&path, &headline));
                }
                Err(error) => {
                    diagnostics.push(damaged(&path, &format!("can't be read: {error}")));
                }
            }
        }
        if !diagnostics.is_empty() {
            return Err(diagnostics.into());
        }
        let files = manifest.files.keys().map(|name| (name.clone(), OnceLock::new())).collect();
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
        let (cell, check) = (&self.files[name], &self.manifest.files[name]);
        if let Some(weights) = cell.get() {
            return Ok(weights);
        }
        let weights = open_file(&self.folder.join(name), check)?;
        Ok(cell.get_or_init(|| weights))
    }
}

fn open_file(path: &Path, check: &FileCheck) -> Result<Weights, Failure> {
    let map = Map::open(path)?;
    if blake3::hash(&map).to_hex().as_str() != check.blake3 {
        return Err(damaged(path, "the file is damaged: its hash is another").into());
    }
    Weights::open(path)
}

fn span(path: &Path) -> Span {
    Span::of(path.display().to_string())
}

fn damaged(path: &Path, headline: &str) -> Diagnostic {
    Diagnostic::error("E4041", span(path), headline)
}
