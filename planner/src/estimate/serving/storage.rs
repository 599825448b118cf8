//! The formats that weights and cached keys and values are stored in for inference.

use std::str::FromStr;

use serde::Serialize;

/// What the scales of a format take.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
enum Scales {
    /// None, or one for a whole tensor or output channel: too few to count.
    Few,
    /// Bytes of the scale and zero point of a block of this many elements.
    Block { elements: f64, bytes: f64 },
    /// Bytes of those of each vector of one head and token.
    Vector { bytes: f64 },
}

/// A format of stored elements.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Format {
    /// The name in flags.
    pub name: &'static str,
    element_bytes: f64,
    scales: Scales,
}

const BF16: Format = Format { name: "bf16", element_bytes: 2.0, scales: Scales::Few };
const F16: Format = Format { name: "f16", ..BF16 };
const F8: Format = Format { name: "f8", element_bytes: 1.0, scales: Scales::Few };
/// Scale and zero point in two bytes each.
const PAIR_BYTES: f64 = 4.0;

/// Formats of weights. Products convert them to the type that they compute in as they read them,
/// so that a narrow format saves bytes and no operations. Sources: LLM.int8() and SmoothQuant scale
/// output channels; AWQ and GPTQ have a scale in f16 and a zero point in 4 bits for each 128
/// elements; gpt-fast has two in bf16 for each 32; bitsandbytes has one in f32 for each 64, and
/// with double quantisation (Dettmers et al. 2023) one in 8 bits, with one in f32 for each 256.
pub const WEIGHTS: [Format; 8] = [
    BF16,
    F16,
    F8,
    Format { name: "int8", ..F8 },
    narrow("int4", 128.0, 2.5),
    narrow("int4-g32", 32.0, PAIR_BYTES),
    narrow("nf4", 64.0, 4.0),
    narrow("nf4-dq", 64.0, 1.0 + 4.0 / 256.0),
];

/// Formats of cached keys and values. Source: Liu et al. 2024 (KIVI) and LMDeploy scale each
/// token's vector of a head.
pub const CACHES: [Format; 5] = [
    BF16,
    F16,
    F8,
    Format { name: "int8", element_bytes: 1.0, scales: Scales::Vector { bytes: PAIR_BYTES } },
    Format { name: "int4", element_bytes: 0.5, scales: Scales::Vector { bytes: PAIR_BYTES } },
];

/// The name of a format by the names that PyTorch and vLLM give it.
fn own_name(name: &str) -> &str {
    match name {
        "fp8" | "fp8_e4m3" | "fp8_e5m2" => F8.name,
        "fp16" | "float16" => F16.name,
        "bfloat16" => BF16.name,
        _ => name,
    }
}

const fn narrow(name: &'static str, elements: f64, bytes: f64) -> Format {
    Format { name, element_bytes: 0.5, scales: Scales::Block { elements, bytes } }
}

impl Format {
    /// The format of weights of this name.
    pub fn of_weights(name: &str) -> Option<Format> {
        let name = own_name(name);
        WEIGHTS.into_iter().find(|format| format.name == name)
    }

    /// The format of caches of this name.
    pub fn of_cache(name: &str) -> Option<Format> {
        let name = own_name(name);
        CACHES.into_iter().find(|format| format.name == name)
    }

    /// Bytes of `vectors` vectors of `size` elements each, with their scales.
    pub fn bytes(&self, vectors: f64, size: f64) -> f64 {
        let elements = vectors * size;
        let scales = match self.scales {
            Scales::Few => 0.0,
            Scales::Block { elements: block, bytes } => elements / block * bytes,
            Scales::Vector { bytes } => vectors * bytes,
        };
        elements * self.element_bytes + scales
    }
}

/// How a copy of a model is stored.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Storage {
    /// The weights of products; none for the type that products compute in.
    pub weights: Option<Format>,
    /// Keys and values.
    pub cache: Format,
}

impl Default for Storage {
    /// Weights as products read them, two-byte keys and values.
    fn default() -> Storage {
        Storage { weights: None, cache: BF16 }
    }
}

/// A format of weights by its name.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WeightFormat(pub Format);

/// A format of keys and values by its name.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CacheFormat(pub Format);

fn names(formats: &[Format]) -> String {
    formats.iter().map(|format| format.name).collect::<Vec<_>>().join(", ")
}

impl FromStr for WeightFormat {
    type Err = String;

    fn from_str(name: &str) -> Result<WeightFormat, String> {
        let found = Format::of_weights(name).map(WeightFormat);
        found.ok_or_else(|| format!("weights are stored as one of {}", names(&WEIGHTS)))
    }
}

impl FromStr for CacheFormat {
    type Err = String;

    fn from_str(name: &str) -> Result<CacheFormat, String> {
        let found = Format::of_cache(name).map(CacheFormat);
        found.ok_or_else(|| format!("keys and values are stored as one of {}", names(&CACHES)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bits of an element as the papers and repositories print them: 4.127 for QLoRA with double
    /// quantisation (Dettmers et al. 2023, section 3), 4.5 without; 4.15625 for GPTQ's groups of
    /// 128; 5 for gpt-fast's groups of 32.
    #[test]
    fn elements_have_the_published_bits() {
        let bits = |name| 8.0 * Format::of_weights(name).unwrap().bytes(1e6, 4096.0) / 4096e6;
        for (name, published) in
            [("nf4-dq", 4.127), ("nf4", 4.5), ("int4", 4.156_25), ("int4-g32", 5.0), ("bf16", 16.0)]
        {
            assert!((bits(name) - published).abs() < 5e-4, "{name}: {}", bits(name));
        }
        let cache = |name| Format::of_cache(name).unwrap().bytes(2.0, 128.0);
        assert_eq!(["bf16", "f8", "int8", "int4"].map(cache), [512.0, 256.0, 264.0, 136.0]);
        assert!("int3".parse::<WeightFormat>().unwrap_err().contains("int4-g32"));
    }
}
