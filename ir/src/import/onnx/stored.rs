//! Stored tensors: element types, places, and the elements where they are needed.

use bytes::Bytes;

use super::proto::TensorProto;
use crate::tensor::holds;
use crate::{DType, Tensor};

/// Opens a file beside the model by the name that the model has for it.
pub type OpenBeside<'o> = &'o mut dyn FnMut(&str) -> Result<Bytes, String>;

/// A tensor of a file.
#[derive(Clone, Debug)]
pub struct Stored {
    /// The element type.
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
        let int = |elements: Vec<i64>| Tensor::int(self.dtype, dims, elements);
        match self.dtype {
            DType::F64 => Tensor::f64(dims, all(bytes, f64::from_le_bytes)),
            DType::F32 => Tensor::f32(dims, all(bytes, f32::from_le_bytes)),
            DType::I8 => int(all(bytes, |b| i64::from(i8::from_le_bytes(b)))),
            DType::I32 => int(all(bytes, |b| i64::from(i32::from_le_bytes(b)))),
            DType::I64 => int(all(bytes, i64::from_le_bytes)),
            DType::U32 => int(all(bytes, |b| i64::from(u32::from_le_bytes(b)))),
            DType::Bool => Tensor::bool(dims, bytes.iter().map(|b| *b != 0).collect()),
            DType::BF16 | DType::F16 | DType::F8E4M3 | DType::F8E5M2 => {
                panic!("refused when read: {}", self.dtype)
            }
        }
    }
}

/// The element type of ONNX's number for it.
///
/// # Errors
/// The name of a type that is not supported.
pub(super) fn dtype(number: i32) -> Result<DType, String> {
    let names = [
        "undefined",
        "float",
        "uint8",
        "int8",
        "uint16",
        "int16",
        "int32",
        "int64",
        "string",
        "bool",
        "float16",
        "double",
        "uint32",
        "uint64",
        "complex64",
        "complex128",
        "bfloat16",
        "float8e4m3fn",
        "float8e4m3fnuz",
        "float8e5m2",
        "float8e5m2fnuz",
        "uint4",
        "int4",
        "float4e2m1",
    ];
    let name = usize::try_from(number).ok().and_then(|n| names.get(n)).unwrap_or(&"unknown");
    Ok(match *name {
        "float" => DType::F32,
        "double" => DType::F64,
        "int8" => DType::I8,
        "int32" => DType::I32,
        "int64" => DType::I64,
        "uint32" => DType::U32,
        "bool" => DType::Bool,
        _ => return Err(format!("elements of type {name}")),
    })
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
    let dtype = dtype(proto.data_type).map_err(Wrong::Unsupported)?;
    if !holds(dtype) {
        return Err(Wrong::Unsupported(format!("elements of type {dtype}")));
    }
    let dims: Option<Vec<usize>> = proto.dims.iter().map(|d| usize::try_from(*d).ok()).collect();
    let count = |dims: &Vec<usize>| {
        let bytes = dims.iter().try_fold(1_usize, |n, d| n.checked_mul(*d))?;
        bytes.checked_mul(dtype.size() as usize)
    };
    let sized = dims.and_then(|dims| count(&dims).map(|bytes| (dims, bytes)));
    let Some((dims, size)) = sized else {
        return Err(Wrong::Damaged(format!("dims {:?}", proto.dims)));
    };
    let bytes = if proto.data_location == 1 {
        external(proto, size, open).map_err(Wrong::Damaged)?
    } else if proto.raw_data.is_empty() {
        listed(proto, dtype)
    } else {
        proto.raw_data.clone()
    };
    if bytes.len() != size {
        let found = format!("{} bytes of elements, not {size}", bytes.len());
        return Err(Wrong::Damaged(found));
    }
    Ok(Stored { dtype, dims, bytes })
}

fn listed(proto: &TensorProto, dtype: DType) -> Bytes {
    let bytes: Vec<u8> = match dtype {
        DType::F32 => proto.float_data.iter().flat_map(|x| x.to_le_bytes()).collect(),
        DType::F64 => proto.double_data.iter().flat_map(|x| x.to_le_bytes()).collect(),
        DType::I64 => proto.int64_data.iter().flat_map(|x| x.to_le_bytes()).collect(),
        DType::I32 => proto.int32_data.iter().flat_map(|x| x.to_le_bytes()).collect(),
        DType::U32 => proto.uint64_data.iter().flat_map(|x| (*x as u32).to_le_bytes()).collect(),
        DType::I8 | DType::Bool => proto.int32_data.iter().map(|x| *x as u8).collect(),
        DType::BF16 | DType::F16 | DType::F8E4M3 | DType::F8E5M2 => Vec::new(),
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
