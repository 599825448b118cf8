//! Stored tensors: element types, places, and the elements where they are needed.

use bytes::Bytes;

use super::element::Element;
use super::proto::TensorProto;
use super::site::check_size;
use crate::{DType, Tensor};

/// Opens a file beside the model by the name that the model has for it.
pub type OpenBeside<'o> = &'o mut dyn FnMut(&str) -> Result<Bytes, String>;

/// A tensor of a file.
#[derive(Clone, Debug)]
pub struct Stored {
    /// The type of the elements in the file.
    pub element: Element,
    /// The type in which they are computed.
    pub dtype: DType,
    /// The dims.
    pub dims: Vec<usize>,
    /// The elements: row-major, little-endian.
    pub bytes: Bytes,
}

impl Stored {
    /// The tensor for the interpreter.
    pub fn tensor(&self) -> Tensor {
        fn all<const N: usize, T>(bytes: &[u8], of: impl Fn([u8; N]) -> T) -> Vec<T> {
            let (chunks, _) = bytes.as_chunks::<N>();
            chunks.iter().map(|chunk| of(*chunk)).collect()
        }
        let (bytes, dims) = (&self.bytes[..], self.dims.as_slice());
        if self.element.bits() < 32 && self.element != Element::Bool {
            let numbers = self.element.numbers(bytes, dims.iter().product());
            return Tensor::from_f64(self.dtype, dims, numbers);
        }
        let int = |elements: Vec<i64>| Tensor::int(self.dtype, dims, elements);
        match self.dtype {
            DType::F64 => Tensor::f64(dims, all(bytes, f64::from_le_bytes)),
            DType::F32 => Tensor::f32(dims, all(bytes, f32::from_le_bytes)),
            DType::I32 => int(all(bytes, |b| i64::from(i32::from_le_bytes(b)))),
            DType::I64 => int(all(bytes, i64::from_le_bytes)),
            DType::U32 => int(all(bytes, |b| i64::from(u32::from_le_bytes(b)))),
            DType::Bool => Tensor::bool(dims, bytes.iter().map(|b| *b != 0).collect()),
            DType::I8 | DType::BF16 | DType::F16 | DType::F8E4M3 | DType::F8E5M2 => {
                panic!("nothing is computed in {}", self.dtype)
            }
        }
    }
}

/// What is wrong with a stored tensor.
pub(super) enum Wrong {
    /// The file is damaged, or one beside it.
    Damaged(String),
    /// Something that is not supported.
    Unsupported(String),
}

impl Wrong {
    pub(super) fn text(self) -> String {
        match self {
            Wrong::Damaged(text) | Wrong::Unsupported(text) => text,
        }
    }
}

/// Reads where a tensor's elements are; those of a list are written as bytes.
pub(super) fn stored(proto: &TensorProto, open: OpenBeside) -> Result<Stored, Wrong> {
    let element = Element::of(proto.data_type).map_err(Wrong::Unsupported)?;
    let dims: Option<Vec<usize>> = proto.dims.iter().map(|d| usize::try_from(*d).ok()).collect();
    let count = |dims: &Vec<usize>| {
        let bytes = dims.iter().try_fold(1_usize, |n, d| n.checked_mul(*d))?;
        bytes.checked_mul(element.bits()).map(|bits| bits.div_ceil(8))
    };
    let sized = dims.and_then(|dims| count(&dims).map(|bytes| (dims, bytes)));
    let Some((dims, size)) = sized else {
        return Err(Wrong::Damaged(format!("dims {:?}", proto.dims)));
    };
    check_size(&dims).map_err(Wrong::Unsupported)?;
    let bytes = if proto.data_location == 1 {
        external(proto, size, open).map_err(Wrong::Damaged)?
    } else if proto.raw_data.is_empty() {
        listed(proto, element)
    } else {
        proto.raw_data.clone()
    };
    if bytes.len() != size {
        let found = format!("{} bytes of elements, not {size}", bytes.len());
        return Err(Wrong::Damaged(found));
    }
    Ok(Stored { element, dtype: element.carrier(), dims, bytes })
}

#[expect(clippy::wildcard_enum_match_arm, reason = "other types are of fewer bits")]
fn listed(proto: &TensorProto, element: Element) -> Bytes {
    let bytes: Vec<u8> = match element {
        Element::F32 => proto.float_data.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Element::F64 => proto.double_data.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Element::I64 => proto.int64_data.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Element::U64 => proto.uint64_data.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Element::I32 => proto.int32_data.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Element::U32 => proto.uint64_data.iter().flat_map(|x| (*x as u32).to_le_bytes()).collect(),
        // Bits of one element, or as many elements of fewer bits as a byte holds.
        _ if element.bits() == 16 => {
            proto.int32_data.iter().flat_map(|x| (*x as u16).to_le_bytes()).collect()
        }
        _ => proto.int32_data.iter().map(|x| *x as u8).collect(),
    };
    Bytes::from(bytes)
}

/// A range of a file beside the model.
fn external(proto: &TensorProto, size: usize, open: OpenBeside) -> Result<Bytes, String> {
    let entry = |key: &str| proto.external_data.iter().find(|e| e.key == key).map(|e| &e.value);
    let location = entry("location").ok_or("no location of the elements")?;
    let number = |key: &str, default: usize| match entry(key) {
        Some(text) => text.parse::<usize>().map_err(|_| format!("{key} is `{text}`")),
        None => Ok(default),
    };
    let (offset, length) = (number("offset", 0)?, number("length", size)?);
    let file = open(location)?;
    let end = offset.checked_add(length).filter(|end| *end <= file.len());
    let end = end.ok_or_else(|| {
        format!("bytes {offset} to {offset} + {length} of `{location}`, which has {}", file.len())
    })?;
    Ok(file.slice(offset..end))
}
