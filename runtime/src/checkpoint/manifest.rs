//! The manifest of a checkpoint: what is in it, and the hashes to tell whether it still is.

use std::collections::BTreeMap;
use std::ops::Range;

use ir::{DType, Diagnostic, Span};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::block;

use super::Slice;

/// The name of the file.
pub(super) const MANIFEST: &str = "manifest.json";
/// The version of the format, raised by a change that older programs can't read.
const FORMAT: u64 = 1;
/// The hash of the manifest stands between these, at its end, over all before it.
const HASH_START: &str = ",\n  \"blake3\": \"";
const HASH_END: &str = "\"\n}\n";

/// A file of a checkpoint, as the rank that wrote it describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// The name within the checkpoint.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// Its hash, in hexadecimal.
    pub blake3: String,
    /// What is in it.
    pub slices: Vec<SliceEntry>,
}

/// A slice of a tensor in a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SliceEntry {
    /// The name of the tensor.
    pub name: String,
    /// The type of its elements.
    pub dtype: DType,
    /// The dims of the whole tensor.
    pub dims: Vec<usize>,
    /// Which block of it this is: first and one past last, for each dim.
    pub ranges: Vec<[usize; 2]>,
    /// The name in the file.
    pub key: String,
    /// The hash of its bytes, in hexadecimal, to name the tensor where a file is damaged.
    pub blake3: String,
}

impl SliceEntry {
    pub(super) fn new(slice: &Slice<'_>, key: String) -> SliceEntry {
        SliceEntry {
            name: slice.name.to_owned(),
            dtype: slice.dtype,
            dims: slice.dims.to_vec(),
            ranges: slice.block.iter().map(|range| [range.start, range.end]).collect(),
            key,
            blake3: blake3::hash(slice.bytes).to_hex().to_string(),
        }
    }
}

/// A tensor of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct TensorEntry {
    pub(super) dims: Vec<usize>,
    pub(super) dtype: DType,
    pub(super) slices: Vec<Place>,
}

/// Where a slice of a tensor is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Place {
    pub(super) file: String,
    pub(super) key: String,
    ranges: Vec<[usize; 2]>,
    /// The hash of the slice; checkpoints of earlier versions have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) blake3: Option<String>,
}

impl Place {
    /// The block of the tensor.
    pub(super) fn block(&self) -> Vec<Range<usize>> {
        self.ranges.iter().map(|&[start, end]| start..end).collect()
    }
}

/// What a file must be like.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FileCheck {
    pub(super) bytes: u64,
    pub(super) blake3: String,
}

/// The manifest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Manifest {
    format: u64,
    pub(super) step: u64,
    pub(super) files: BTreeMap<String, FileCheck>,
    pub(super) tensors: BTreeMap<String, TensorEntry>,
    pub(super) state: Value,
}

impl Manifest {
    /// **Constraints.** All slices of a tensor agree on its dims and dtype.
    pub(super) fn new(step: u64, files: Vec<FileEntry>, state: Value) -> Manifest {
        let mut tensors: BTreeMap<String, TensorEntry> = BTreeMap::new();
        let mut checks = BTreeMap::new();
        for file in files {
            for slice in file.slices {
                let SliceEntry { name, dtype, dims, ranges, key, blake3 } = slice;
                let tensor = tensors.entry(name).or_insert_with(|| TensorEntry {
                    dims: dims.clone(),
                    dtype,
                    slices: Vec::new(),
                });
                assert_eq!(
                    (&tensor.dims, tensor.dtype),
                    (&dims, dtype),
                    "slices are of one tensor"
                );
                if tensor.slices.iter().all(|place| place.ranges != ranges) {
                    let file = file.name.clone();
                    tensor.slices.push(Place { file, key, ranges, blake3: Some(blake3) });
                }
            }
            checks.insert(file.name, FileCheck { bytes: file.bytes, blake3: file.blake3 });
        }
        Manifest { format: FORMAT, step, files: checks, tensors, state }
    }

    /// The names of the tensors of which a file has slices.
    pub(super) fn tensors_of(&self, file: &str) -> impl Iterator<Item = &str> {
        let holds = move |tensor: &TensorEntry| tensor.slices.iter().any(|p| p.file == file);
        self.tensors.iter().filter(move |(_, t)| holds(t)).map(|(name, _)| name.as_str())
    }

    /// The text, with its own hash as the last member.
    pub(super) fn to_text(&self) -> String {
        let text = serde_json::to_string_pretty(self).expect("its map keys are strings");
        let body = text.strip_suffix("\n}").expect("pretty objects end in a line of their own");
        let hash = blake3::hash(body.as_bytes()).to_hex();
        format!("{body}{HASH_START}{hash}{HASH_END}")
    }

    /// **Errors.** E4041 if it is damaged, E4042 if its format is newer.
    pub(super) fn parse(bytes: &[u8], span: &Span) -> Result<Manifest, Diagnostic> {
        let wrong = |what: &str| Diagnostic::error("E4041", span.clone(), what);
        let text = std::str::from_utf8(bytes).map_err(|_| wrong("the manifest is not text"))?;
        // The version comes first: another one may be hashed in another way.
        #[derive(Deserialize)]
        struct Version {
            format: u64,
        }
        let Version { format } = serde_json::from_str(text)
            .map_err(|error| wrong(&format!("the manifest is damaged: {error}")))?;
        if format != FORMAT {
            let headline =
                format!("the checkpoint has format {format}; this program knows {FORMAT}");
            return Err(Diagnostic::error("E4042", span.clone(), headline)
                .help("resume with the version of the program that wrote it"));
        }
        let split = text
            .strip_suffix(HASH_END)
            .and_then(|text| text.split_at_checked(text.len().checked_sub(64)?))
            .and_then(|(text, hash)| Some((text.strip_suffix(HASH_START)?, hash)));
        let (body, hash) = split.ok_or_else(|| wrong("the manifest doesn't end in its hash"))?;
        if blake3::hash(body.as_bytes()).to_hex().as_str() != hash {
            return Err(wrong("the manifest is damaged: its hash is another"));
        }
        let manifest: Manifest = serde_json::from_str(text)
            .map_err(|error| wrong(&format!("the manifest can't be read: {error}")))?;
        for (name, tensor) in &manifest.tensors {
            if !tensor.is_covered(&manifest.files) {
                return Err(wrong(&format!("the slices of tensor `{name}` don't make it up")));
            }
        }
        if let Some(name) = manifest.files.keys().find(|name| !is_file_name(name)) {
            return Err(wrong(&format!("`{name}` is not a file of the checkpoint")));
        }
        Ok(manifest)
    }
}

impl TensorEntry {
    /// Whether slices lie within the tensor and have as many elements as it has.
    fn is_covered(&self, files: &BTreeMap<String, FileCheck>) -> bool {
        let mut covered = 0_usize;
        for place in &self.slices {
            let block = place.block();
            let inside = |(r, &dim): (&Range<usize>, &usize)| r.start <= r.end && r.end <= dim;
            let fits = block.len() == self.dims.len() && block.iter().zip(&self.dims).all(inside);
            let size = checked_product(block.iter().map(ExactSizeIterator::len));
            let Some(sum) = size.and_then(|size| covered.checked_add(size)) else { return false };
            if !fits || !files.contains_key(&place.file) {
                return false;
            }
            covered = sum;
        }
        checked_product(self.dims.iter().copied()) == Some(covered)
    }

    /// The slices that have elements of a block.
    pub(super) fn slices_of(&self, wanted: &[Range<usize>]) -> impl Iterator<Item = &Place> {
        self.slices
            .iter()
            .filter(|place| block::elements(&block::overlap(&place.block(), wanted)) > 0)
    }
}

fn checked_product(mut sizes: impl Iterator<Item = usize>) -> Option<usize> {
    sizes.try_fold(1_usize, |n, size| n.checked_mul(size))
}

fn is_file_name(name: &str) -> bool {
    std::path::Path::new(name).file_name().is_some_and(|file| file == name)
}
