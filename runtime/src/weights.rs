//! Model weights in safetensors files: one file, or a Hugging Face directory with shards.
//!
//! Files are mapped, so that a rank that asks for its block of a tensor reads little else.
//! Headers are checked against the size of the file before anything of a tensor is read.

mod header;
mod write;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use ir::{DType, Diagnostic, Span};

pub use write::{NewTensor, write, write_to};

use crate::block;
use crate::convert::{Stored, convert};
use crate::error::Failure;
use crate::map::Map;

/// The file of an unsharded model.
pub const FILE: &str = "model.safetensors";
/// The table of contents of a sharded model.
pub const INDEX: &str = "model.safetensors.index.json";

/// The weights of a model.
pub struct Weights {
    source: PathBuf,
    files: Vec<Map>,
    tensors: BTreeMap<String, Tensor>,
}

/// Where a tensor is, and what it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// The dims.
    pub dims: Vec<usize>,
    /// The type of the stored elements.
    pub stored: Stored,
    file: usize,
    bytes: Range<usize>,
}

impl Weights {
    /// Opens a safetensors file, an index of shards, or a directory with either.
    ///
    /// **Errors.** E4001 to E4005; reading fails.
    pub fn open(path: &Path) -> Result<Weights, Failure> {
        let is_index = |path: &Path| path.extension().is_some_and(|e| e == "json");
        if !path.is_dir() {
            return if is_index(path) { open_index(path) } else { open_file(path) };
        }
        if path.join(FILE).exists() {
            return open_file(&path.join(FILE));
        }
        if path.join(INDEX).exists() {
            return open_index(&path.join(INDEX));
        }
        let mut diagnostic = Diagnostic::error("E4001", at(path), "no weights in this directory")
            .note(format!("looked for `{FILE}` and `{INDEX}`"));
        if path.join("pytorch_model.bin").exists() {
            let help =
                "convert `pytorch_model.bin` to safetensors: pickles run code and are not read";
            diagnostic = diagnostic.help(help);
        }
        Err(diagnostic.into())
    }

    /// The tensors of a safetensors file that is mapped already.
    ///
    /// **Errors.** E4002 to E4004.
    pub(crate) fn of_map(map: Map, path: &Path) -> Result<Weights, Vec<Diagnostic>> {
        let tensors = header::parse(&map, path)?;
        let tensors =
            tensors.into_iter().map(|entry| (entry.name.clone(), entry.place(0))).collect();
        Ok(Weights { source: path.to_owned(), files: vec![map], tensors })
    }

    /// The file, index or directory that was opened.
    pub fn source(&self) -> &Path {
        &self.source
    }

    /// All tensors, by name.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor))
    }

    /// The floating-point type in which most bytes are stored; none where no tensor has one.
    pub fn usual_dtype(&self) -> Option<DType> {
        let mut bytes: BTreeMap<DType, usize> = BTreeMap::new();
        for tensor in self.tensors.values() {
            if let Stored::DType(dtype) = tensor.stored
                && dtype.is_float()
            {
                *bytes.entry(dtype).or_default() += tensor.bytes.len();
            }
        }
        bytes.into_iter().max_by_key(|(_, bytes)| *bytes).map(|(dtype, _)| dtype)
    }

    /// A tensor, if there.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.tensors.get(name)
    }

    /// A tensor that must be there.
    ///
    /// **Errors.** E4006.
    pub fn find(&self, name: &str) -> Result<&Tensor, Diagnostic> {
        self.tensors.get(name).ok_or_else(|| {
            let headline = format!("no tensor `{name}` in the weights");
            let last = name.rsplit('.').next().unwrap_or(name);
            let is_similar = |known: &&String| known.rsplit('.').next() == Some(last);
            let similar: Vec<String> =
                self.tensors.keys().filter(is_similar).take(3).map(|k| format!("`{k}`")).collect();
            let note = if similar.is_empty() {
                format!("there are {} others", self.tensors.len())
            } else {
                format!("names that end alike: {}", similar.join(", "))
            };
            Diagnostic::error("E4006", at(&self.source), headline).note(note)
        })
    }

    /// The bytes of a tensor as stored: row-major, little-endian.
    pub fn bytes(&self, tensor: &Tensor) -> &[u8] {
        &self.files[tensor.file][tensor.bytes.clone()]
    }

    /// The elements of a block of a tensor, or of all of it, as little-endian `dtype`.
    ///
    /// **Cost.** Reads the block only, in runs as long as the block's rows.
    /// **Errors.** E4006; E4007 if the tensor has no such block.
    pub fn read(
        &self,
        name: &str,
        block: Option<&[Range<usize>]>,
        dtype: DType,
    ) -> Result<Vec<u8>, Diagnostic> {
        let tensor = self.find(name)?;
        let bytes = self.block_bytes(name, tensor, block)?;
        if tensor.stored == Stored::DType(dtype) {
            return Ok(bytes.into_owned());
        }
        Ok(convert(tensor.stored, &bytes, dtype))
    }

    /// As [`Weights::read`], as numbers.
    pub fn read_f32(
        &self,
        name: &str,
        block: Option<&[Range<usize>]>,
    ) -> Result<Vec<f32>, Diagnostic> {
        let bytes = self.read(name, block, DType::F32)?;
        Ok(bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect())
    }

    /// As [`Weights::read`], as numbers.
    pub fn read_f64(
        &self,
        name: &str,
        block: Option<&[Range<usize>]>,
    ) -> Result<Vec<f64>, Diagnostic> {
        let bytes = self.read(name, block, DType::F64)?;
        Ok(bytes.as_chunks().0.iter().map(|&b| f64::from_le_bytes(b)).collect())
    }

    fn block_bytes<'a>(
        &'a self,
        name: &str,
        tensor: &Tensor,
        block: Option<&[Range<usize>]>,
    ) -> Result<Cow<'a, [u8]>, Diagnostic> {
        let whole = block::whole(&tensor.dims);
        let Some(block) = block.filter(|&block| block != whole) else {
            return Ok(Cow::Borrowed(self.bytes(tensor)));
        };
        let inside = |(r, &dim): (&Range<usize>, &usize)| r.start <= r.end && r.end <= dim;
        if block.len() != tensor.dims.len() || !block.iter().zip(&tensor.dims).all(inside) {
            let wanted: Vec<_> = block.iter().map(|r| format!("{}..{}", r.start, r.end)).collect();
            let headline = format!(
                "tensor `{name}` is [{}], and block [{}] of it is needed",
                header::list(&tensor.dims),
                wanted.join(", ")
            );
            return Err(Diagnostic::error("E4007", at(&self.source), headline)
                .help("check that the weights belong to this model"));
        }
        let size = tensor.stored.size();
        let mut out = vec![0; block::elements(block) * size];
        block::copy_overlap(self.bytes(tensor), &whole, &mut out, block, size);
        Ok(Cow::Owned(out))
    }
}

/// Where a diagnostic about a whole file is.
fn at(path: &Path) -> Span {
    Span::of(path.display().to_string())
}

fn open_file(path: &Path) -> Result<Weights, Failure> {
    Ok(Weights::of_map(Map::open(path)?, path)?)
}

/// Opens the shards that an index names, and takes from each the tensors it is said to have.
fn open_index(path: &Path) -> Result<Weights, Failure> {
    let index = Map::open(path)?;
    let shards = header::parse_index(&index, path)?;
    let folder = path.parent().unwrap_or(Path::new(""));
    let mut weights =
        Weights { source: path.to_owned(), files: Vec::new(), tensors: BTreeMap::new() };
    for (file, names) in shards {
        let shard = folder.join(&file);
        let map = Map::open(&shard)?;
        let mut inside: BTreeMap<String, header::Entry> =
            header::parse(&map, &shard)?.into_iter().map(|e| (e.name.clone(), e)).collect();
        for name in names {
            let Some(entry) = inside.remove(&name) else {
                let headline = format!("tensor `{name}` is not in shard `{file}`");
                return Err(Diagnostic::error("E4005", at(path), headline)
                    .help("download the model again: its files don't belong together")
                    .into());
            };
            weights.tensors.insert(name, entry.place(weights.files.len()));
        }
        weights.files.push(map);
    }
    Ok(weights)
}

#[cfg(test)]
mod tests;
