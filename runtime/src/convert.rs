//! Elements as files store them, and their conversion.

use half::{bf16, f16};
use ir::{DType, formats};

/// The type of elements in a safetensors file: more types than a module has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// An element type of modules.
    DType(DType),
    /// Unsigned 8-bit integer.
    U8,
    /// Signed 16-bit integer.
    I16,
    /// Unsigned 16-bit integer.
    U16,
    /// Unsigned 64-bit integer.
    U64,
}

/// The names of safetensors.
const NAMES: [(&str, Stored); 15] = [
    ("F64", Stored::DType(DType::F64)),
    ("F32", Stored::DType(DType::F32)),
    ("BF16", Stored::DType(DType::BF16)),
    ("F16", Stored::DType(DType::F16)),
    ("F8_E4M3", Stored::DType(DType::F8E4M3)),
    ("F8_E5M2", Stored::DType(DType::F8E5M2)),
    ("I64", Stored::DType(DType::I64)),
    ("I32", Stored::DType(DType::I32)),
    ("I8", Stored::DType(DType::I8)),
    ("U32", Stored::DType(DType::U32)),
    ("BOOL", Stored::DType(DType::Bool)),
    ("U8", Stored::U8),
    ("I16", Stored::I16),
    ("U16", Stored::U16),
    ("U64", Stored::U64),
];

impl Stored {
    /// The type with a name of safetensors.
    pub fn from_name(name: &str) -> Option<Stored> {
        NAMES.iter().find(|(known, _)| *known == name).map(|&(_, stored)| stored)
    }

    /// The name in safetensors.
    pub fn name(self) -> &'static str {
        let known = NAMES.iter().find(|&&(_, stored)| stored == self);
        known.map(|&(name, _)| name).expect("the table names all types")
    }

    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Stored::DType(dtype) => dtype.size() as usize,
            Stored::U8 => 1,
            Stored::I16 | Stored::U16 => 2,
            Stored::U64 => 8,
        }
    }

    /// Whether elements are floating-point numbers.
    fn is_float(self) -> bool {
        match self {
            Stored::DType(dtype) => dtype.is_float(),
            Stored::U8 | Stored::I16 | Stored::U16 | Stored::U64 => false,
        }
    }
}

/// Elements converted at a time, on the stack; chosen to stay within the L1 cache.
const CHUNK: usize = 512;

/// Converts little-endian elements.
///
/// Equal types keep their bits. A float rounds once, to nearest, ties to even; too large a value
/// becomes infinite, or not-a-number where there are no infinities. A float becomes an integer by
/// cutting its fraction off, within the integer's range. Integers between each other wrap around.
/// 64-bit integers pass through f64 on their way to a float.
pub fn convert(from: Stored, bytes: &[u8], to: DType) -> Vec<u8> {
    if from == Stored::DType(to) {
        return bytes.to_vec();
    }
    let mut out = Vec::with_capacity(bytes.len() / from.size() * to.size() as usize);
    for chunk in bytes.chunks(CHUNK * from.size()) {
        if from.is_float() || to.is_float() {
            let mut numbers = [0.0; CHUNK];
            let n = decode(from, chunk, &mut numbers, |x| x, |i| i as f64, |u| u as f64);
            encode_floats(to, &numbers[..n], &mut out);
        } else {
            let mut numbers = [0; CHUNK];
            let n = decode(from, chunk, &mut numbers, |x| x as i64, |i| i, |u| u as i64);
            encode_integers(to, &numbers[..n], &mut out);
        }
    }
    out
}

/// Reads elements as `T`, by way of the widest type of their kind; returns their number.
fn decode<T>(
    from: Stored,
    bytes: &[u8],
    out: &mut [T],
    float: impl Fn(f64) -> T,
    signed: impl Fn(i64) -> T,
    unsigned: impl Fn(u64) -> T,
) -> usize {
    match from {
        Stored::DType(DType::F64) => each(bytes, out, |b| float(f64::from_le_bytes(b))),
        Stored::DType(DType::F32) => each(bytes, out, |b| float(f32::from_le_bytes(b).into())),
        Stored::DType(DType::BF16) => each(bytes, out, |b| float(bf16::from_le_bytes(b).into())),
        Stored::DType(DType::F16) => each(bytes, out, |b| float(f16::from_le_bytes(b).into())),
        Stored::DType(DType::F8E4M3) => {
            each(bytes, out, |[b]| float(formats::decode(DType::F8E4M3, b.into())))
        }
        Stored::DType(DType::F8E5M2) => {
            each(bytes, out, |[b]| float(formats::decode(DType::F8E5M2, b.into())))
        }
        Stored::DType(DType::I8) => each(bytes, out, |b| signed(i8::from_le_bytes(b).into())),
        Stored::I16 => each(bytes, out, |b| signed(i16::from_le_bytes(b).into())),
        Stored::DType(DType::I32) => each(bytes, out, |b| signed(i32::from_le_bytes(b).into())),
        Stored::DType(DType::I64) => each(bytes, out, |b| signed(i64::from_le_bytes(b))),
        Stored::DType(DType::Bool) => each(bytes, out, |[b]| unsigned(u64::from(b != 0))),
        Stored::U8 => each(bytes, out, |[b]| unsigned(b.into())),
        Stored::U16 => each(bytes, out, |b| unsigned(u16::from_le_bytes(b).into())),
        Stored::DType(DType::U32) => each(bytes, out, |b| unsigned(u32::from_le_bytes(b).into())),
        Stored::U64 => each(bytes, out, |b| unsigned(u64::from_le_bytes(b))),
    }
}

fn each<const N: usize, T>(bytes: &[u8], out: &mut [T], read: impl Fn([u8; N]) -> T) -> usize {
    let (elements, rest) = bytes.as_chunks::<N>();
    assert!(rest.is_empty(), "tensors hold whole elements");
    for (out, element) in out.iter_mut().zip(elements) {
        *out = read(*element);
    }
    elements.len()
}

fn encode_floats(to: DType, numbers: &[f64], out: &mut Vec<u8>) {
    match to {
        DType::F64 => put(numbers, out, f64::to_le_bytes),
        DType::F32 => put(numbers, out, |x| (x as f32).to_le_bytes()),
        DType::BF16 | DType::F16 => put(numbers, out, |x| formats::encode(to, x).to_le_bytes()),
        DType::F8E4M3 | DType::F8E5M2 => put(numbers, out, |x| [formats::encode(to, x) as u8]),
        DType::I8 => put(numbers, out, |x| (x as i8).to_le_bytes()),
        DType::I32 => put(numbers, out, |x| (x as i32).to_le_bytes()),
        DType::I64 => put(numbers, out, |x| (x as i64).to_le_bytes()),
        DType::U32 => put(numbers, out, |x| (x as u32).to_le_bytes()),
        DType::Bool => put(numbers, out, |x| [u8::from(x != 0.0)]),
    }
}

fn encode_integers(to: DType, numbers: &[i64], out: &mut Vec<u8>) {
    match to {
        DType::I8 => put(numbers, out, |x| (x as i8).to_le_bytes()),
        DType::I32 => put(numbers, out, |x| (x as i32).to_le_bytes()),
        DType::I64 => put(numbers, out, i64::to_le_bytes),
        DType::U32 => put(numbers, out, |x| (x as u32).to_le_bytes()),
        DType::Bool => put(numbers, out, |x| [u8::from(x != 0)]),
        DType::F64 | DType::F32 | DType::BF16 | DType::F16 | DType::F8E4M3 | DType::F8E5M2 => {
            unreachable!("floats are encoded from floats")
        }
    }
}

fn put<const N: usize, T: Copy>(numbers: &[T], out: &mut Vec<u8>, write: impl Fn(T) -> [u8; N]) {
    out.extend(numbers.iter().flat_map(|&x| write(x)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eight_bit_floats_come_back_from_every_code() {
        for (dtype, name) in [(DType::F8E4M3, "F8_E4M3"), (DType::F8E5M2, "F8_E5M2")] {
            let codes: Vec<u8> = (0..=255).collect();
            let stored = Stored::from_name(name).unwrap();
            let wide = convert(stored, &codes, DType::F32);
            let back = convert(Stored::DType(DType::F32), &wide, dtype);
            for (code, back) in codes.iter().zip(back) {
                let nan = f32::from_le_bytes(wide[*code as usize * 4..][..4].try_into().unwrap());
                assert!(nan.is_nan() || *code == back, "{name} {code:#x} became {back:#x}");
            }
        }
    }

    #[test]
    fn floats_round_to_nearest_even() {
        let f8 = |x: f64| convert(Stored::DType(DType::F64), &x.to_le_bytes(), DType::F8E4M3)[0];
        assert_eq!(f8(448.0), 0x7e);
        assert_eq!(f8(464.0), 0x7e);
        assert_eq!(f8(465.0), 0x7f);
        assert_eq!(f8(f64::INFINITY), 0x7f);
        assert_eq!(f8(1.0625), 0x38);
        assert_eq!(f8(-1.1875), 0xba);
        let e5 = |x: f64| convert(Stored::DType(DType::F64), &x.to_le_bytes(), DType::F8E5M2)[0];
        assert_eq!(e5(1e9), 0x7c);
        assert_eq!(e5(f64::NEG_INFINITY), 0xfc);
    }

    #[test]
    fn integers_are_exact_between_each_other() {
        let big = i64::MAX - 1;
        let out = convert(Stored::DType(DType::I64), &big.to_le_bytes(), DType::I32);
        assert_eq!(out, (big as i32).to_le_bytes());
        let out = convert(Stored::U64, &u64::MAX.to_le_bytes(), DType::I64);
        assert_eq!(out, (-1_i64).to_le_bytes());
        let out = convert(Stored::U8, &[0, 1, 255], DType::F32);
        assert_eq!(out, [0_f32, 1.0, 255.0].map(f32::to_le_bytes).concat());
    }

    #[test]
    fn long_arrays_cross_chunks() {
        let values: Vec<f32> = (0..3 * CHUNK + 7).map(|i| i as f32 / 8.0).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        let wide = convert(Stored::DType(DType::F32), &bytes, DType::F64);
        let back = convert(Stored::DType(DType::F64), &wide, DType::F32);
        assert_eq!(back, bytes);
    }
}
