//! Arrays in NumPy's `.npy` files, versions 1 and 2.
//!
//! A file is `\x93NUMPY`, two bytes of version, the length of the header (16 bits in version 1,
//! 32 in version 2), the header, which is a Python dictionary such as
//! `{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }`, and the elements.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;

use ir::{DType, Diagnostic, Span};

use crate::error::{Error, Failure};
use crate::map::Map;

const MAGIC: &[u8; 6] = b"\x93NUMPY";
/// The elements start at a multiple of this.
const ALIGNMENT: usize = 64;
/// What can be done with an array that is not read.
const CONVERT: &str = "save it as `np.ascontiguousarray(x).astype('float32')`, \
                       or as float16, float64, bool or integers";
/// Types whose elements become those of a wider one when they are read: what the file calls them,
/// their bytes, and the wider type.
const NARROW: [(&str, usize, DType); 8] = [
    ("|b1", 1, DType::I32),
    ("|u1", 1, DType::I32),
    ("|i1", 1, DType::I32),
    ("<u2", 2, DType::I32),
    ("<i2", 2, DType::I32),
    ("<u4", 4, DType::I64),
    ("<u8", 8, DType::I64),
    ("<f2", 2, DType::F32),
];

/// An array.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Array {
    /// f32, f64, i32 or i64.
    pub dtype: DType,
    /// The dims.
    pub dims: Vec<usize>,
    /// The elements: row-major, little-endian.
    pub bytes: Vec<u8>,
}

/// Reads an array.
///
/// Elements of narrower types become f32, i32 or i64.
///
/// **Errors.** E4001; E4010 if the file is damaged; E4011 if its elements are no numbers, are
/// unsigned of 64 bits and above 2⁶³, or not in row-major order.
pub fn read(path: &Path) -> Result<Array, Failure> {
    let (array, is_unsigned) = read_bits(path)?;
    let is_high = |chunk: &[u8; 8]| i64::from_le_bytes(*chunk) < 0;
    if is_unsigned && array.bytes.as_chunks().0.iter().any(is_high) {
        let span = Span::of(path.display().to_string());
        let wrong = Diagnostic::error("E4011", span, "an element above 2⁶³").help(CONVERT);
        return Err(wrong.into());
    }
    Ok(array)
}

/// Reads an array, and whether its elements are integers of 64 bits without a sign, whose bits are
/// those of the `i64` that they are then.
///
/// **Errors.** E4001, E4010 and E4011 as of [`read`].
pub fn read_bits(path: &Path) -> Result<(Array, bool), Failure> {
    let map = Map::open(path)?;
    Ok(parse(&map, &Span::of(path.display().to_string()))?)
}

/// Writes an array. Equal arrays make equal files.
///
/// **Errors.** E4011 if the dtype is not f32, f64, i32 or i64.
pub fn write(path: &Path, dtype: DType, dims: &[usize], bytes: &[u8]) -> Result<(), Failure> {
    let descr = describe(dtype).ok_or_else(|| {
        let headline = format!("elements of type {dtype} are not written to `.npy`");
        Diagnostic::error("E4011", Span::of(path.display().to_string()), headline)
            .help("write the value as f32")
    })?;
    write_as(path, descr, dims, bytes)
}

/// Writes an array of elements that the format calls `descr`, such as `<f2`.
///
/// **Errors.** Those of writing a file.
pub fn write_as(path: &Path, descr: &str, dims: &[usize], bytes: &[u8]) -> Result<(), Failure> {
    let elements: usize = dims.iter().product();
    let size = descr.get(2..).and_then(|size| size.parse::<usize>().ok()).unwrap_or(0);
    assert_eq!(elements * size, bytes.len(), "the bytes are the elements");
    let dims: String = dims.iter().map(|dim| format!("{dim}, ")).collect();
    let dims =
        if dims.matches(',').count() > 1 { dims.trim_end_matches(", ") } else { dims.trim_end() };
    let mut header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({dims}), }}");
    while !(MAGIC.len() + 4 + header.len() + 1).is_multiple_of(ALIGNMENT) {
        header.push(' ');
    }
    header.push('\n');
    let length = u16::try_from(header.len()).expect("a header of fewer than 3000 dims is short");
    let mut file = File::create(path).map_err(Error::io("create", path))?;
    let parts = [MAGIC, &[1, 0][..], &length.to_le_bytes(), header.as_bytes(), bytes];
    for part in parts {
        file.write_all(part).map_err(Error::io("write", path))?;
    }
    Ok(())
}

fn describe(dtype: DType) -> Option<&'static str> {
    match dtype {
        DType::F32 => Some("<f4"),
        DType::F64 => Some("<f8"),
        DType::I32 => Some("<i4"),
        DType::I64 => Some("<i8"),
        DType::BF16
        | DType::F16
        | DType::F8E4M3
        | DType::F8E5M2
        | DType::I8
        | DType::U32
        | DType::Bool => None,
    }
}

/// Reads an array from the bytes of a file, and whether it is one of `u64`.
fn parse(file: &[u8], span: &Span) -> Result<(Array, bool), Diagnostic> {
    let wrong = |what: &str| {
        Diagnostic::error("E4010", span.clone(), format!("not a `.npy` file: {what}"))
            .help("write the file again with `np.save`")
    };
    let rest = file.strip_prefix(MAGIC).ok_or_else(|| wrong("it doesn't start as one"))?;
    let (header, data) = match rest {
        [1, 0, a, b, rest @ ..] => rest.split_at_checked(u16::from_le_bytes([*a, *b]).into()),
        [2, 0, a, b, c, d, rest @ ..] => {
            rest.split_at_checked(u32::from_le_bytes([*a, *b, *c, *d]) as usize)
        }
        _ => return Err(wrong("its version is neither 1.0 nor 2.0")),
    }
    .ok_or_else(|| wrong("its header is longer than the file"))?;
    let header = std::str::from_utf8(header).map_err(|_| wrong("its header is not text"))?;
    let header = Header::parse(header).ok_or_else(|| wrong("its header can't be read"))?;
    let known = [DType::F32, DType::F64, DType::I32, DType::I64];
    let refused = |what: String| Diagnostic::error("E4011", span.clone(), what).help(CONVERT);
    let narrow = NARROW.into_iter().find(|(descr, ..)| *descr == header.descr);
    let dtype = known.into_iter().find(|&dtype| describe(dtype) == Some(header.descr));
    let dtype = dtype
        .or(narrow.map(|(_, _, dtype)| dtype))
        .ok_or_else(|| refused(format!("elements of type `{}` are not read", header.descr)))?;
    if header.fortran_order {
        return Err(refused("the array is in column-major (Fortran) order".to_owned()));
    }
    let width = narrow.map_or(dtype.size() as usize, |(_, width, _)| width);
    let size = header.shape.iter().try_fold(width, |n, &dim| n.checked_mul(dim));
    if size != Some(data.len()) {
        let what = format!("{} bytes are not {:?} elements of {dtype}", data.len(), header.shape);
        return Err(wrong(&what));
    }
    let bytes = match narrow {
        Some((descr, ..)) => widened(descr, data),
        None => data.to_vec(),
    };
    Ok((Array { dtype, dims: header.shape, bytes }, header.descr == "<u8"))
}

/// Elements of a narrow type as those of the wider one; the bits of those of 64.
fn widened(descr: &str, data: &[u8]) -> Vec<u8> {
    fn all<const N: usize, T, const M: usize>(
        data: &[u8],
        of: impl Fn([u8; N]) -> T,
        bytes: impl Fn(T) -> [u8; M],
    ) -> Vec<u8> {
        data.as_chunks::<N>().0.iter().flat_map(|chunk| bytes(of(*chunk))).collect()
    }
    match descr {
        "|b1" => all(data, |b: [u8; 1]| i32::from(b[0] != 0), i32::to_le_bytes),
        "|u1" => all(data, |b| u8::from_le_bytes(b).into(), i32::to_le_bytes),
        "|i1" => all(data, |b| i8::from_le_bytes(b).into(), i32::to_le_bytes),
        "<u2" => all(data, |b| u16::from_le_bytes(b).into(), i32::to_le_bytes),
        "<i2" => all(data, |b| i16::from_le_bytes(b).into(), i32::to_le_bytes),
        "<u4" => all(data, |b| u32::from_le_bytes(b).into(), i64::to_le_bytes),
        "<f2" => all(data, |b| half::f16::from_le_bytes(b).to_f32(), f32::to_le_bytes),
        _ => data.to_vec(),
    }
}

/// The dictionary before the elements.
#[derive(Debug, PartialEq)]
struct Header<'a> {
    descr: &'a str,
    fortran_order: bool,
    shape: Vec<usize>,
}

impl<'a> Header<'a> {
    /// Reads the dictionaries that `np.save` writes: these three keys, in any order.
    fn parse(text: &'a str) -> Option<Header<'a>> {
        let mut rest = text.trim().strip_prefix('{')?.strip_suffix('}')?.trim();
        let (mut descr, mut fortran_order, mut shape) = (None, None, None);
        while !rest.is_empty() {
            let (key, after) = quoted(rest)?;
            let value = after.trim_start().strip_prefix(':')?.trim_start();
            rest = match key {
                "descr" => {
                    let (text, after) = quoted(value)?;
                    descr = Some(text);
                    after
                }
                "fortran_order" => {
                    let (truth, after) = match value.strip_prefix("True") {
                        Some(after) => (true, after),
                        None => (false, value.strip_prefix("False")?),
                    };
                    fortran_order = Some(truth);
                    after
                }
                "shape" => {
                    let (list, after) = value.strip_prefix('(')?.split_once(')')?;
                    let dims = list.split(',').map(str::trim).filter(|dim| !dim.is_empty());
                    shape = Some(dims.map(|dim| dim.parse().ok()).collect::<Option<Vec<_>>>()?);
                    after
                }
                _ => return None,
            };
            rest = rest.trim_start();
            rest = rest.strip_prefix(',').unwrap_or(rest).trim_start();
        }
        Some(Header { descr: descr?, fortran_order: fortran_order?, shape: shape? })
    }
}

/// A text in quotes, and what follows it.
fn quoted(text: &str) -> Option<(&str, &str)> {
    let quote = text.chars().next().filter(|c| ['\'', '"'].contains(c))?;
    text[1..].split_once(quote)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::{Scratch, mutations};

    fn code(file: &[u8]) -> &'static str {
        match parse(file, &Span::default()) {
            Ok(_) => "",
            Err(diagnostic) => diagnostic.code,
        }
    }

    /// A file with this header and so many bytes of zeros.
    fn file(header: &str, data: usize) -> Vec<u8> {
        let mut file = MAGIC.to_vec();
        file.extend([1, 0]);
        file.extend((header.len() as u16).to_le_bytes());
        file.extend(header.as_bytes());
        file.resize(file.len() + data, 0);
        file
    }

    #[test]
    fn arrays_come_back() {
        let scratch = Scratch::new("npy");
        let path = scratch.join("x.npy");
        for (dims, shape) in
            [(&[][..], "()"), (&[3], "(3,)"), (&[2, 3], "(2, 3)"), (&[0, 7], "(0, 7)")]
        {
            for dtype in [DType::F32, DType::F64, DType::I32, DType::I64] {
                let n = dims.iter().product::<usize>() * dtype.size() as usize;
                let bytes: Vec<u8> = (0..n).map(|i| i as u8).collect();
                write(&path, dtype, dims, &bytes).unwrap();
                let Ok(array) = read(&path) else { panic!("{dtype} {shape}") };
                assert_eq!(array, Array { dtype, dims: dims.to_vec(), bytes });
                let text = std::fs::read(&path).unwrap();
                assert_eq!((text.len() - n) % ALIGNMENT, 0);
                assert!(String::from_utf8_lossy(&text).contains(&format!("'shape': {shape}, }}")));
            }
        }
        assert!(matches!(write(&path, DType::BF16, &[0], &[]), Err(Failure::Input(_))));
    }

    #[test]
    fn narrow_elements_become_wider_ones() {
        let scratch = Scratch::new("npy-narrow");
        let path = scratch.join("x.npy");
        let wide = |descr: &str, dims: &[usize], bytes: &[u8]| {
            write_as(&path, descr, dims, bytes).unwrap();
            let array = read(&path).expect("it is read");
            let words = array.bytes.as_chunks().0.iter();
            let numbers: Vec<f64> = if array.dtype == DType::I32 {
                words.map(|b| i32::from_le_bytes(*b).into()).collect()
            } else if array.dtype == DType::F32 {
                words.map(|b| f32::from_le_bytes(*b).into()).collect()
            } else {
                let words = array.bytes.as_chunks().0.iter();
                words.map(|b| i64::from_le_bytes(*b) as f64).collect()
            };
            numbers
        };
        assert_eq!(wide("|b1", &[2], &[1, 0]), [1.0, 0.0]);
        assert_eq!(wide("|i1", &[2], &[0xff, 5]), [-1.0, 5.0]);
        assert_eq!(wide("|u1", &[1], &[0xff]), [255.0]);
        assert_eq!(wide("<i2", &[1], &[0xfe, 0xff]), [-2.0]);
        assert_eq!(wide("<u2", &[1], &[0xfe, 0xff]), [65534.0]);
        assert_eq!(wide("<f2", &[1], &[0x00, 0xc0]), [-2.0]);
        assert_eq!(wide("<u4", &[1], &[0xff; 4]), [4_294_967_295.0]);
        write_as(&path, "<u8", &[1], &[0xff; 8]).unwrap();
        assert!(matches!(read(&path), Err(Failure::Input(_))));
        let (array, is_unsigned) = read_bits(&path).expect("its bits are read");
        assert_eq!((array.bytes, is_unsigned), (vec![0xff; 8], true));
    }

    #[test]
    fn other_arrays_are_refused() {
        let with = |descr: &str, order: &str, shape: &str, data| {
            code(&file(
                &format!("{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}}}"),
                data,
            ))
        };
        assert_eq!(with("'<f4'", "False", "(2, 3)", 24), "");
        assert_eq!(with("\"<i8\"", "False", "(2,)", 16), "");
        assert_eq!(with("'>f4'", "False", "(2, 3)", 24), "E4011");
        assert_eq!(with("'|O'", "False", "(2, 3)", 24), "E4011");
        assert_eq!(with("'<f4'", "True", "(2, 3)", 24), "E4011");
        assert_eq!(with("'<f4'", "False", "(2, 3)", 23), "E4010");
        assert_eq!(with("'<f4'", "False", "(9223372036854775807, 9)", 24), "E4010");
        assert_eq!(with("'<f4'", "False", "(-1,)", 24), "E4010");
        assert_eq!(with("[('a', '<f4')]", "False", "(1,)", 4), "E4010");
        assert_eq!(code(b"text"), "E4010");
        assert_eq!(code(b"\x93NUMPY\x02\x00\xff\xff\xff\xff{}"), "E4010");
    }

    #[test]
    fn mutants_never_panic() {
        let valid = file("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }\n", 24);
        for (_, mutant) in mutations(&valid, 600) {
            let _ = parse(&mutant, &Span::default());
        }
    }
}
