//! Writing a safetensors file.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use ir::DType;

use crate::convert::Stored;
use crate::error::Error;

use super::header::list;

/// A tensor to be written.
#[derive(Clone, Copy, Debug)]
pub struct NewTensor<'a> {
    /// The name.
    pub name: &'a str,
    /// The type of its elements.
    pub dtype: DType,
    /// The dims.
    pub dims: &'a [usize],
    /// The elements: row-major, little-endian.
    pub bytes: &'a [u8],
}

/// Writes tensors to a file, and to the disk.
pub fn write(
    path: &Path,
    tensors: &[NewTensor<'_>],
    metadata: &BTreeMap<String, String>,
) -> Result<(), Error> {
    let file = File::create(path).map_err(Error::io("create", path))?;
    let mut writer = BufWriter::new(file);
    write_to(&mut writer, tensors, metadata).map_err(Error::io("write", path))?;
    let file = writer.into_inner().map_err(|error| Error::io("write", path)(error.into_error()))?;
    file.sync_all().map_err(Error::io("sync", path))
}

/// Writes tensors as a safetensors file.
///
/// **Constraints.** Names are distinct, and bytes are as many as dims and dtype say.
/// **Determinism.** Equal tensors and metadata make equal bytes, whatever the order given:
/// tensors are ordered by falling element size, which aligns them all, then by name.
pub fn write_to(
    writer: &mut dyn Write,
    tensors: &[NewTensor<'_>],
    metadata: &BTreeMap<String, String>,
) -> io::Result<()> {
    let mut order: Vec<&NewTensor<'_>> = tensors.iter().collect();
    order.sort_by_key(|tensor| (std::cmp::Reverse(tensor.dtype.size()), tensor.name));
    let header = header(&order, metadata);
    writer.write_all(&(header.len() as u64).to_le_bytes())?;
    writer.write_all(header.as_bytes())?;
    for tensor in order {
        writer.write_all(tensor.bytes)?;
    }
    Ok(())
}

/// The header, padded so that the data starts at a multiple of 8 bytes.
fn header(order: &[&NewTensor<'_>], metadata: &BTreeMap<String, String>) -> String {
    let quote = |text: &str| serde_json::Value::from(text).to_string();
    let mut parts = Vec::new();
    if !metadata.is_empty() {
        let pairs: Vec<String> = metadata
            .iter()
            .map(|(key, value)| format!("{}:{}", quote(key), quote(value)))
            .collect();
        parts.push(format!("\"__metadata__\":{{{}}}", pairs.join(",")));
    }
    let mut start = 0;
    for tensor in order {
        let elements: usize = tensor.dims.iter().product();
        let end = start + elements * tensor.dtype.size() as usize;
        assert_eq!(end - start, tensor.bytes.len(), "the bytes are the tensor's elements");
        let mut part = quote(tensor.name);
        let _ = write!(
            part,
            ":{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{start},{end}]}}",
            Stored::DType(tensor.dtype).name(),
            list(tensor.dims)
        );
        parts.push(part);
        start = end;
    }
    let mut header = format!("{{{}}}", parts.join(","));
    while !header.len().is_multiple_of(8) {
        header.push(' ');
    }
    header
}
