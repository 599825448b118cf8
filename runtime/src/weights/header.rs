//! The headers of safetensors files and the index of shards, from bytes that may be anything.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use ir::{Diagnostic, Span};
use serde::Deserialize;
use serde_json::Value;

use crate::convert::Stored;

use super::{Tensor, at};

/// Bytes that a header may have: the limit of the format.
const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Diagnostics reported for one file.
const DIAGNOSTICS_MAX: usize = 20;

/// A tensor of a file.
pub(super) struct Entry {
    pub(super) name: String,
    dims: Vec<usize>,
    stored: Stored,
    /// Where in the file.
    bytes: Range<usize>,
}

impl Entry {
    /// The tensor, in the file with this number.
    pub(super) fn place(self, file: usize) -> Tensor {
        Tensor { dims: self.dims, stored: self.stored, file, bytes: self.bytes }
    }
}

/// An entry as the header writes it.
#[derive(Deserialize)]
struct Raw {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// Reads a header: 8 bytes of length, JSON, then the data, which the tensors cover without a gap.
///
/// **Errors.** E4002 if it is not a header, E4003 for each tensor that can't be where it is said
/// to be, E4004 for each element type that is not known.
pub(super) fn parse(file: &[u8], path: &Path) -> Result<Vec<Entry>, Vec<Diagnostic>> {
    let wrong = |headline: String| {
        let help = "download the file again, or check that it is a safetensors file";
        vec![Diagnostic::error("E4002", at(path), headline).help(help)]
    };
    let Some((length, rest)) = file.split_first_chunk::<8>() else {
        return Err(wrong(format!("{} bytes are too few for a safetensors file", file.len())));
    };
    let length = u64::from_le_bytes(*length);
    if length > HEADER_BYTES_MAX || length > rest.len() as u64 {
        return Err(wrong(format!(
            "the header says it has {length} bytes, and the file has {} in all",
            file.len()
        )));
    }
    let (json, data) = rest.split_at(length as usize);
    let header: BTreeMap<String, Value> = serde_json::from_slice(json)
        .map_err(|error| wrong(format!("the header is not a JSON object: {error}")))?;
    let mut entries = Vec::new();
    let mut diagnostics = Vec::new();
    for (name, value) in header {
        if name == "__metadata__" {
            continue;
        }
        match check_entry(&name, value, data.len(), &at(path)) {
            Ok((stored, dims, bytes)) => entries.push(Entry { name, dims, stored, bytes }),
            Err(diagnostic) => diagnostics.push(diagnostic),
        }
    }
    if diagnostics.is_empty() {
        check_cover(&entries, data.len(), &at(path), &mut diagnostics);
    }
    diagnostics.truncate(DIAGNOSTICS_MAX);
    if !diagnostics.is_empty() {
        return Err(diagnostics);
    }
    for entry in &mut entries {
        entry.bytes = entry.bytes.start + 8 + json.len()..entry.bytes.end + 8 + json.len();
    }
    Ok(entries)
}

/// Checks that one tensor lies within the data and is as long as its dims and type say.
fn check_entry(
    name: &str,
    value: Value,
    data_len: usize,
    span: &Span,
) -> Result<(Stored, Vec<usize>, Range<usize>), Diagnostic> {
    let wrong = |what: String| {
        Diagnostic::error("E4003", span.clone(), format!("tensor `{name}` {what}"))
            .help("download the file again: its header is damaged")
    };
    let raw: Raw = serde_json::from_value(value)
        .map_err(|error| wrong(format!("is not described as a tensor: {error}")))?;
    let stored = Stored::from_name(&raw.dtype).ok_or_else(|| {
        let headline = format!("tensor `{name}` has elements of type `{}`", raw.dtype);
        Diagnostic::error("E4004", span.clone(), headline)
            .note(
                "known types: F64 F32 BF16 F16 F8_E4M3 F8_E5M2 I64 I32 I16 I8 U64 U32 U16 U8 BOOL",
            )
            .help("store the tensor in one of these types")
    })?;
    let [start, end] = raw.data_offsets;
    if start > end || end > data_len as u64 {
        return Err(wrong(format!("is at bytes {start}..{end} of {data_len}")));
    }
    let size = raw.shape.iter().try_fold(stored.size() as u64, |n, &dim| n.checked_mul(dim));
    let dims: Option<Vec<usize>> = raw.shape.iter().map(|&d| usize::try_from(d).ok()).collect();
    match (size, dims) {
        (Some(size), Some(dims)) if size == end - start => {
            Ok((stored, dims, start as usize..end as usize))
        }
        _ => Err(wrong(format!(
            "has {} bytes, which are not [{}] elements of type {}",
            end - start,
            list(&raw.shape),
            stored.name()
        ))),
    }
}

/// Checks that tensors neither overlap nor leave a gap, which is what the format promises.
fn check_cover(entries: &[Entry], data_len: usize, span: &Span, diagnostics: &mut Vec<Diagnostic>) {
    let mut order: Vec<&Entry> = entries.iter().collect();
    order.sort_by_key(|entry| (entry.bytes.start, entry.bytes.end));
    let mut covered = 0;
    for entry in order {
        if entry.bytes.start != covered {
            let name = &entry.name;
            let headline = format!(
                "tensor `{name}` starts at byte {} of the data, the one before ends at {covered}",
                entry.bytes.start
            );
            diagnostics.push(Diagnostic::error("E4003", span.clone(), headline));
        }
        covered = entry.bytes.end;
    }
    if covered != data_len {
        let headline = format!("the tensors end at byte {covered} of {data_len} bytes of data");
        let help = "download the file again: it is longer or shorter than its header says";
        diagnostics.push(Diagnostic::error("E4003", span.clone(), headline).help(help));
    }
}

/// Reads an index: the shards by file name, each with its tensors.
///
/// **Errors.** E4005.
pub(super) fn parse_index(
    bytes: &[u8],
    path: &Path,
) -> Result<BTreeMap<String, Vec<String>>, Diagnostic> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let wrong = |headline: String| Diagnostic::error("E4005", at(path), headline);
    let index: Index = serde_json::from_slice(bytes)
        .map_err(|error| wrong(format!("not an index of safetensors shards: {error}")))?;
    let mut shards: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (name, file) in index.weight_map {
        let is_name = Path::new(&file).file_name().is_some_and(|name| name == file.as_str());
        if !is_name {
            return Err(wrong(format!("tensor `{name}` is in `{file}`, which is not a file name"))
                .note("shards lie beside their index"));
        }
        shards.entry(file).or_default().push(name);
    }
    Ok(shards)
}

/// Numbers with commas.
pub(super) fn list<T: ToString>(numbers: &[T]) -> String {
    numbers.iter().map(T::to_string).collect::<Vec<_>>().join(", ")
}
