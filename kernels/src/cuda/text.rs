//! Text of C++: lines, indented by the blocks they are in.

use std::fmt;

use ir::DType;

/// Lines of C++.
#[derive(Clone, Debug, Default)]
pub(super) struct Text {
    text: String,
    depth: usize,
}

impl Text {
    /// Adds a line. One that begins with a closing brace ends a block, one that ends with an
    /// opening one begins a block.
    pub(super) fn line(&mut self, line: impl fmt::Display) {
        let line = line.to_string();
        if line.starts_with('}') {
            self.depth -= 1;
        }
        if !line.is_empty() {
            self.text.push_str(&"  ".repeat(self.depth));
            self.text.push_str(&line);
        }
        self.text.push('\n');
        if line.ends_with('{') {
            self.depth += 1;
        }
    }

    /// Ends a block.
    pub(super) fn end(&mut self) {
        self.line("}");
    }

    /// All lines.
    pub(super) fn into_text(self) -> String {
        self.text
    }
}

/// Adds a formatted line to a [`Text`].
macro_rules! line {
    ($text:expr, $($format:tt)+) => { $text.line(format_args!($($format)+)) };
}
pub(super) use line;

/// The type of an element in memory.
pub(super) fn element(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "double",
        DType::F32 => "float",
        DType::BF16 => "bf16",
        DType::F16 => "f16",
        DType::F8E4M3 => "f8e4m3",
        DType::F8E5M2 => "f8e5m2",
        DType::I64 => "i64",
        DType::I32 => "i32",
        DType::U32 => "u32",
        DType::I8 => "signed char",
        DType::Bool => "truth",
    }
}

/// The type of elements of a size that are only moved.
pub(super) fn moved(dtype: DType) -> &'static str {
    match dtype.size() {
        1 => "u8",
        2 => "u16",
        4 => "u32",
        _ => "u64",
    }
}

/// A number of a compute type, to the last bit.
pub(super) fn number(dtype: DType, x: f64) -> String {
    if dtype == DType::I64 {
        return whole(x as i64);
    }
    if dtype == DType::F64 {
        return float(x, "", || format!("double_of_bits(0x{:016x}ULL)", x.to_bits()));
    }
    let single = x as f32;
    float(f64::from(single), "f", || format!("float_of_bits(0x{:08x}u)", single.to_bits()))
}

/// An integer of 64 bits.
pub(super) fn whole(x: i64) -> String {
    match x {
        i64::MIN => "(i64)0x8000000000000000ULL".to_owned(),
        x => format!("{x}LL"),
    }
}

fn float(x: f64, suffix: &str, bits: impl Fn() -> String) -> String {
    if !x.is_finite() {
        return bits();
    }
    let shown = format!("{x:?}");
    format!("{shown}{suffix}")
}
