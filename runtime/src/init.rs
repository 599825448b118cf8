//! First values of weights: a pure function of seed, name and place in the whole tensor.
//!
//! So a run starts from the same weights however they are cut.

use std::f64::consts::TAU;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use ir::DType;
use ir::random::{Key, mix, uniform};

use crate::block;
use crate::convert::{Stored, convert};
use crate::execute::{Part, Session};

/// The site of the draws, as the `random` op has one.
const SALT: u32 = 0x1217;
/// Elements computed at a time. Chosen: some hundred microseconds, and within the L2 cache.
const CHUNK: usize = 1 << 12;

/// How a weight begins.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// All zero.
    Zeros,
    /// All one.
    Ones,
    /// Normally distributed around zero.
    Normal {
        /// The standard deviation.
        std: f64,
        /// The index in the first dim of a row of zeros.
        zero_row: Option<usize>,
    },
}

/// The first values of a block of a weight, row-major, as little-endian numbers.
///
/// A normal number is made of two uniform ones of 24 bits (Box and Muller 1958), and is at most
/// 5.8 standard deviations from zero.
/// **Determinism.** Each element depends on seed, name, its index in the whole tensor, and on the
/// machine's logarithm and cosine.
pub fn values(
    init: Init,
    seed: u32,
    name: &str,
    dims: &[usize],
    block: &[Range<usize>],
    dtype: DType,
) -> Vec<u8> {
    let stream = stream(seed, name);
    let number = |local: usize| match init {
        Init::Zeros => 0.0,
        Init::Ones => 1.0,
        Init::Normal { std, zero_row } => {
            let index = global_index(local, dims, block);
            let row = dims.iter().skip(1).product::<usize>().max(1) as u64;
            let is_zero = zero_row.is_some_and(|zero| index / row == zero as u64);
            if is_zero { 0.0 } else { std * normal(stream, index) }
        }
    };
    let size = dtype.size() as usize;
    let mut out = vec![0; block::elements(block) * size];
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let share = block::elements(block).div_ceil(threads).next_multiple_of(CHUNK).max(CHUNK);
    let parts = Mutex::new(out.chunks_mut(share * size).enumerate());
    let next = || parts.lock().unwrap_or_else(PoisonError::into_inner).next();
    let fill = || {
        while let Some((at, part)) = next() {
            for (index, chunk) in part.chunks_mut(CHUNK * size).enumerate() {
                let first = at * share + index * CHUNK;
                let numbers = (first..first + chunk.len() / size).map(number);
                let bytes: Vec<u8> = numbers.flat_map(f64::to_le_bytes).collect();
                chunk.copy_from_slice(&convert(Stored::DType(DType::F64), &bytes, dtype));
            }
        }
    };
    std::thread::scope(|scope| {
        // Where the system starts no more threads, those that there are do the work.
        let spawn = |_: &usize| std::thread::Builder::new().spawn_scoped(scope, fill).is_ok();
        (1..threads).take_while(spawn).for_each(drop);
        fill();
    });
    out
}

impl Session {
    /// Gives every weight its first values, and zeros to the states of the optimizer.
    pub fn init_weights(&mut self, seed: u32, init: &dyn Fn(&str, &[usize]) -> Init) {
        for (name, dims) in self.weights() {
            let init = init(&name, &dims);
            let mut first = |block: &[Range<usize>], dtype| {
                Ok::<_, std::convert::Infallible>(values(init, seed, &name, &dims, block, dtype))
            };
            let Ok(_) = self.write_weight(&name, Part::Weight, &mut first);
            let mut zeros = |block: &[Range<usize>], dtype: DType| {
                let bytes = block::elements(block) * dtype.size() as usize;
                Ok::<_, std::convert::Infallible>(vec![0; bytes])
            };
            for index in 0.. {
                let Ok(is_there) = self.write_weight(&name, Part::State(index), &mut zeros);
                if !is_there {
                    break;
                }
                let Ok(_) = self.write_weight(&name, Part::Scale(index), &mut zeros);
            }
        }
    }
}

/// The stream of the draws of a weight.
fn stream(seed: u32, name: &str) -> u64 {
    let hash = name.bytes().fold(0, |hash, byte| mix(hash ^ (u64::from(byte) + 1)));
    let key = Key { seed, step: 0, path: (hash >> 32) as u32, sample: 0 };
    key.stream(SALT ^ hash as u32)
}

/// The row-major index in the whole tensor of an element of a block.
fn global_index(local: usize, dims: &[usize], block: &[Range<usize>]) -> u64 {
    let (mut rest, mut stride, mut index) = (local, 1, 0);
    for (&dim, range) in dims.iter().zip(block).rev() {
        index += (range.start + rest % range.len()) * stride;
        rest /= range.len();
        stride *= dim;
    }
    index as u64
}

/// A draw from the standard normal distribution.
fn normal(stream: u64, index: u64) -> f64 {
    let [a, b] = [0, 1].map(|i| f64::from(uniform(stream, 2 * index + i)));
    // `a` is below one, so the logarithm is of a positive number.
    (-2.0 * (1.0 - a).ln()).sqrt() * (TAU * b).cos()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::execute::tiny;

    /// A row of zeros stays where it is however a weight is cut, and changes no other row.
    #[test]
    fn a_row_of_padding_is_zero() {
        let dims = [5, 3];
        let of = |zero_row, block: &[Range<usize>]| {
            let init = Init::Normal { std: 1.0, zero_row };
            floats(&values(init, 7, "wte", &dims, block, DType::F64))
        };
        let whole = of(Some(2), &[0..5, 0..3]);
        let mut expected = of(None, &[0..5, 0..3]);
        assert!(expected[6..9].iter().all(|number| *number != 0.0));
        expected[6..9].fill(0.0);
        assert_eq!(whole, expected);
        assert_eq!(of(Some(2), &[1..4, 1..3])[2..4], [0.0, 0.0]);
        assert_eq!(of(Some(2), &[1..4, 1..3])[..2], whole[4..6]);
    }

    fn floats(bytes: &[u8]) -> Vec<f64> {
        bytes.as_chunks().0.iter().map(|&b| f64::from_le_bytes(b)).collect()
    }

    #[test]
    fn any_cut_has_the_same_values() {
        let dims = [6, 5, 4];
        let init = Init::Normal { std: 0.5, zero_row: None };
        let whole = values(init, 3, "w", &dims, &block::whole(&dims), DType::F64);
        for cut in [[0..6, 0..5, 1..3], [2..5, 0..5, 0..4], [1..2, 3..5, 2..4], [0..0, 0..5, 0..4]]
        {
            let part = values(init, 3, "w", &dims, &cut, DType::F64);
            let mut expected = vec![0; part.len()];
            block::copy_overlap(&whole, &block::whole(&dims), &mut expected, &cut, 8);
            assert_eq!(part, expected, "{cut:?}");
        }
        assert_ne!(whole, values(init, 4, "w", &dims, &block::whole(&dims), DType::F64));
        assert_ne!(whole, values(init, 3, "v", &dims, &block::whole(&dims), DType::F64));
    }

    #[test]
    fn normals_are_normal_and_independent() {
        let n = 200_000;
        let draw = |seed, name| {
            let bytes = values(
                Init::Normal { std: 2.0, zero_row: None },
                seed,
                name,
                &[n],
                &[0..n],
                DType::F64,
            );
            floats(&bytes)
        };
        let a = draw(1, "h.0.attn.weight");
        let mean = |power: i32| a.iter().map(|x| (x / 2.0).powi(power)).sum::<f64>() / n as f64;
        // Expected 0, 1, 0, 3; each bound is five standard errors.
        for (power, expected, variance) in
            [(1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0)]
        {
            let bound = 5.0 * f64::sqrt(variance / n as f64);
            assert!((mean(power) - expected).abs() < bound, "moment {power} is {}", mean(power));
        }
        let correlation =
            |b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y / 4.0).sum::<f64>() / n as f64;
        for b in
            [draw(2, "h.0.attn.weight"), draw(1, "h.1.attn.weight"), [&a[1..], &a[..1]].concat()]
        {
            assert!(correlation(&b).abs() < 5.0 / (n as f64).sqrt(), "{}", correlation(&b));
        }
    }

    #[test]
    fn sessions_start_alike_on_every_mesh() {
        let first = |dp, tp| {
            let mut session = tiny::session(tiny::mesh(dp, tp), 1, 1);
            session.init_weights(7, &|name, dims| {
                assert_eq!((name, dims), ("w", &[tiny::SEQ][..]));
                Init::Normal { std: 0.02, zero_row: None }
            });
            let tensors = [Part::Weight, Part::State(0)];
            tensors.map(|part| session.read_weight("w", part).unwrap().to_f64())
        };
        let [weight, state] = first(1, 1);
        assert!(weight.iter().all(|x| *x != 0.0 && x.abs() < 0.2));
        assert_eq!(state, [0.0; tiny::SEQ]);
        assert_eq!(first(2, 4), [weight, state]);
    }

    #[test]
    fn constants_are_constant() {
        let bytes = values(Init::Ones, 0, "", &[2, 2], &[0..2, 0..1], DType::F32);
        assert_eq!(bytes, [1_f32; 2].map(f32::to_le_bytes).concat());
        assert_eq!(values(Init::Zeros, 0, "", &[3], &[0..3], DType::BF16), [0; 6]);
    }
}
