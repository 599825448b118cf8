//! The random numbers of the `random` op: a pure function of a key and a global element index.
//!
//! A number never depends on how a tensor is cut, on the order of evaluation or on what was drawn
//! before, so that a sharded run equals the run on one device and recomputation repeats itself.
//! The mixer is the finaliser of SplitMix64 (Steele, Lea, Flood 2014), applied to a counter.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The attribute of composites whose draws have 16 bits.
const SHORT_DRAWS: &str = "short_draws";

/// What a draw depends on besides its site and element: the value of type `u32[4]` in a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// The seed of the run.
    pub seed: u32,
    /// The optimizer step.
    pub step: u32,
    /// A hash of the path of calls, extended by the `fold_key` op.
    pub path: u32,
    /// The index in the global batch of the first sample of this micro-batch.
    pub sample: u32,
}

impl Key {
    /// The key whose words are `words`, in the order seed, step, path, sample.
    pub fn from_words(words: [u32; 4]) -> Key {
        Key { seed: words[0], step: words[1], path: words[2], sample: words[3] }
    }

    /// The words of the key, in the order seed, step, path, sample.
    pub fn words(self) -> [u32; 4] {
        [self.seed, self.step, self.path, self.sample]
    }

    /// The key of a nested call: `salt` is mixed into the path.
    pub fn fold(self, salt: u32) -> Key {
        let path = (mix((u64::from(self.path) << 32) | u64::from(salt)) >> 32) as u32;
        Key { path, ..self }
    }

    /// The state from which the draws of the site `salt` are counted.
    pub fn stream(self, salt: u32) -> u64 {
        let run = mix((u64::from(self.step) << 32) | u64::from(self.seed));
        mix(run ^ ((u64::from(salt) << 32) | u64::from(self.path)))
    }
}

/// Mixes 64 bits so that every output bit depends on every input bit.
#[inline(always)]
pub fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The number of a stream that all its draws are made of.
#[inline(always)]
fn word(stream: u64, count: u64) -> u64 {
    mix(stream.wrapping_add(count.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
}

/// The draw number `index` of a stream, uniform in `[0, 1)` with 24 bits.
///
/// `index` is the row-major index of the element in the global tensor, whose first dim counts
/// samples from `Key::sample` on.
#[inline(always)]
pub fn uniform(stream: u64, index: u64) -> f32 {
    (word(stream, index) >> 40) as f32 * (1.0 / 16_777_216.0)
}

/// The draw number `index` of a stream, uniform in `[0, 1)` with 16 bits: a quarter of a mix.
///
/// Those of `index`, `index + 1`, `index + 8` and `index + 9`, where `index` has neither bit 0 nor
/// bit 3, share one: of a tile of scores on tensor cores, a thread has them all.
#[inline(always)]
pub fn uniform_short(stream: u64, index: u64) -> f32 {
    let count = (index >> 4 << 2) | (index >> 1 & 3);
    let quarter = (index & 1) | (index >> 2 & 2);
    (word(stream, count) >> (16 * quarter) & 0xffff) as f32 * (1.0 / 65_536.0)
}

/// Draws of 16 bits share mixes among so many, from a multiple of that on.
pub const SHARED_DRAWS: u64 = 16;

/// How many bits a draw has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub enum DrawBits {
    /// 24, from a mix of its own: [`uniform`].
    #[default]
    B24,
    /// 16, a quarter of a mix: [`uniform_short`]. An element is then dropped with the probability
    /// `ceil(65,536 p) / 65,536` in place of `p`.
    B16,
}

impl From<DrawBits> for u32 {
    fn from(bits: DrawBits) -> u32 {
        bits.count()
    }
}

impl TryFrom<u32> for DrawBits {
    type Error = String;

    fn try_from(count: u32) -> Result<DrawBits, String> {
        DrawBits::of(count).ok_or_else(|| format!("draws have 24 or 16 bits, not {count}"))
    }
}

impl DrawBits {
    /// The bits: 24 or 16.
    pub fn count(self) -> u32 {
        match self {
            DrawBits::B24 => 24,
            DrawBits::B16 => 16,
        }
    }

    /// Draws of so many bits, where there are such.
    pub fn of(count: u32) -> Option<DrawBits> {
        [DrawBits::B24, DrawBits::B16].into_iter().find(|bits| bits.count() == count)
    }

    /// The bits of the draws of a composite.
    pub fn of_composite(attributes: &BTreeMap<String, f64>) -> DrawBits {
        let is_short = attributes.get(SHORT_DRAWS).is_some_and(|flag| *flag != 0.0);
        if is_short { DrawBits::B16 } else { DrawBits::B24 }
    }

    /// The attribute that says so to a composite, where it has to.
    pub(crate) fn attribute(self) -> Option<(&'static str, f64)> {
        (self == DrawBits::B16).then_some((SHORT_DRAWS, 1.0))
    }

    /// The draw number `index` of a stream.
    #[inline(always)]
    pub fn uniform(self, stream: u64, index: u64) -> f32 {
        match self {
            DrawBits::B24 => uniform(stream, index),
            DrawBits::B16 => uniform_short(stream, index),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_are_uniform_and_streams_are_apart() {
        let key = Key { seed: 7, step: 3, path: 0, sample: 0 };
        let (a, b) = (key.stream(1), key.fold(5).stream(1));
        let n = 100_000_u64;
        let mean = |s: u64| (0..n).map(|i| f64::from(uniform(s, i))).sum::<f64>() / n as f64;
        assert!((mean(a) - 0.5).abs() < 0.005, "mean {}", mean(a));
        let covariance = (0..n)
            .map(|i| (f64::from(uniform(a, i)) - 0.5) * (f64::from(uniform(b, i)) - 0.5))
            .sum::<f64>()
            / n as f64;
        assert!(covariance.abs() < 0.002, "covariance {covariance}");
    }

    /// Neighbours that share a mix are as far apart as those that do not; each number is a whole
    /// one of 65,536ths, and they are evenly spread: chi² of 256 classes within 5 deviations.
    #[test]
    fn short_draws_are_uniform_and_independent() {
        let stream = Key { seed: 7, step: 3, path: 0, sample: 0 }.stream(1);
        let n = 1 << 18;
        let draws: Vec<f64> = (0..n).map(|i| f64::from(uniform_short(stream, i))).collect();
        let mut classes = [0_u32; 256];
        for draw in &draws {
            assert_eq!((draw * 65_536.0).fract(), 0.0);
            classes[(draw * 256.0) as usize] += 1;
        }
        let expected = n as f64 / 256.0;
        let chi: f64 = classes.iter().map(|c| (f64::from(*c) - expected).powi(2) / expected).sum();
        assert!((chi - 255.0).abs() < 5.0 * (2.0 * 255.0_f64).sqrt(), "chi² {chi}");
        for apart in [1, 2, 4, 7, 8, 9, 16, 64] {
            let pairs = draws.iter().zip(&draws[apart..]);
            let covariance = pairs.map(|(a, b)| (a - 0.5) * (b - 0.5)).sum::<f64>()
                / (n as usize - apart) as f64;
            // The deviation of a product of two uniform numbers is 1/12.
            let limit = 5.0 / 12.0 / (n as f64).sqrt();
            assert!(covariance.abs() < limit, "{apart} apart: covariance {covariance}");
        }
    }

    /// A mix makes exactly the four draws that are said to share it.
    #[test]
    fn four_draws_share_a_mix() {
        let all = |index: u64| [0, 1, 8, 9].map(|at| uniform_short(3, index + at) * 65_536.0);
        for index in (0..512).filter(|index| index & 9 == 0) {
            let word = word(3, (index >> 4 << 2) | (index >> 1 & 3));
            let quarters = [0, 1, 2, 3].map(|at| (word >> (16 * at) & 0xffff) as f32);
            assert_eq!(all(index), quarters, "index {index}");
        }
    }
}
