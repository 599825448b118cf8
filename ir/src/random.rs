//! The random numbers of the `random` op: a pure function of a key and a global element index.
//!
//! A number never depends on how a tensor is cut, on the order of evaluation or on what was drawn
//! before, so that a sharded run equals the run on one device and recomputation repeats itself.
//! The mixer is the finaliser of SplitMix64 (Steele, Lea, Flood 2014), applied to a counter.

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

/// The draw number `index` of a stream, uniform in `[0, 1)` with 24 bits.
///
/// `index` is the row-major index of the element in the global tensor, whose first dim counts
/// samples from `Key::sample` on.
#[inline(always)]
pub fn uniform(stream: u64, index: u64) -> f32 {
    let bits = mix(stream.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15))) >> 40;
    bits as f32 * (1.0 / 16_777_216.0)
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
}
