//! How fast one device executes one kernel: the device files, and the formulas that use them.
//!
//! A device file holds the datasheet and what `planner/calibration` fitted to published timings of
//! single kernels. The clock that a device sustains was chosen beside runs of models.
//!
//! Legend: m, n, k rows, columns and contracted elements of a product; t seconds.

use ir::{Diagnostic, Span};
use serde::{Deserialize, Serialize};

/// The arithmetic of products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Arithmetic {
    /// Single precision without tensor cores.
    F32,
    /// Single precision rounded to tf32 in tensor cores.
    Tf32,
    /// Two-byte floats, either kind.
    Half,
    /// One-byte floats, either kind.
    F8,
    /// Half-byte floats with a scale for each block of 16.
    F4,
}

impl Arithmetic {
    /// Bytes of an element of weights and activations outside of products.
    pub fn element_bytes(self) -> f64 {
        match self {
            Arithmetic::F32 | Arithmetic::Tf32 => 4.0,
            Arithmetic::Half | Arithmetic::F8 | Arithmetic::F4 => 2.0,
        }
    }

    /// Bytes of an element that a product reads.
    pub fn operand_bytes(self) -> f64 {
        match self {
            Arithmetic::F32 | Arithmetic::Tf32 => 4.0,
            Arithmetic::Half => 2.0,
            Arithmetic::F8 => 1.0,
            Arithmetic::F4 => 0.5625,
        }
    }
}

/// How the inside of attention is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum AttentionKernel {
    /// Scores are written to memory; mask, softmax and dropout are kernels of their own.
    Separate,
    /// Scores are written to memory; scale, mask and softmax are one kernel.
    FusedSoftmax,
    /// One kernel that never writes scores (Dao et al. 2022): its first generation.
    Flash1,
    /// Its second generation (Dao 2023).
    Flash2,
    /// The fastest kernel of the device: Shah et al. 2024, or the vendor's library.
    FlashBest,
}

impl AttentionKernel {
    /// The name in texts.
    pub fn name(self) -> &'static str {
        match self {
            AttentionKernel::Separate => "attention with scores in memory",
            AttentionKernel::FusedSoftmax => "attention with scores in memory and a fused softmax",
            AttentionKernel::Flash1 => "FlashAttention",
            AttentionKernel::Flash2 => "FlashAttention-2",
            AttentionKernel::FlashBest => "the fastest attention kernel of the device",
        }
    }
}

/// Which instructions of tensor cores products are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProductKernels {
    /// Those that the device's library is timed with.
    Fastest,
    /// `mma.sync`, instructions of a warp, of which devices from Hopper on reach less.
    MmaSync,
}

/// A tile that a product kernel computes on one multiprocessor, and the share of the peak that it
/// reaches there.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub struct Tile(pub f64, pub f64, pub f64);

/// Products of one arithmetic.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct ProductRates {
    /// Which.
    pub arithmetic: Arithmetic,
    /// Operations per second, dense, of the datasheet.
    pub peak_flops: f64,
    /// Seconds of the smallest product.
    pub floor_s: f64,
    /// Seconds at the ends of a tile, when nothing is multiplied.
    pub tile_s: f64,
    /// How far waves are whole: 1 for all multiprocessors waiting for the last tile, 0 for none.
    pub quantised: f64,
    /// Bytes per second of operands and results.
    pub bytes_per_s: f64,
    /// Share of the boost clock that they keep under the power limit of long runs.
    pub sustained_share: f64,
    /// The tiles that kernels exist for.
    pub tiles: Vec<Tile>,
    /// Relative spread of the residuals of the fit.
    pub spread: f64,
}

/// Fused attention on one device.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct AttentionRates {
    /// Operations per second of long sequences, forward.
    pub forward_flops: f64,
    /// Operations per second of long sequences, backward.
    pub backward_flops: f64,
    /// Share that the first generation of fused kernels reaches.
    pub first_generation: f64,
    /// Share that the second generation reaches.
    pub second_generation: f64,
    /// Share that heads of fewer than 96 elements reach.
    pub narrow_share: f64,
    /// Keys at which half of the rate is reached.
    pub half_keys: f64,
    /// Seconds of the smallest call.
    pub floor_s: f64,
    /// Relative spread of the residuals of the fit.
    pub spread: f64,
}

/// A device.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Rates {
    /// The name in clusters and in tables of measurements.
    pub name: String,
    /// Multiprocessors.
    pub processors: f64,
    /// Operations per second in single precision without tensor cores, of the datasheet.
    pub f32_flops: f64,
    /// Operations per second of products that round to tf32, of the datasheet; none before 2020.
    pub tf32_flops: Option<f64>,
    /// Bytes per second to and from memory, of the datasheet.
    pub memory_bytes_per_s: f64,
    /// Share of it that long kernels reach.
    pub memory_share: f64,
    /// Seconds of the smallest kernel.
    pub kernel_s: f64,
    /// Bytes below which a kernel does not reach its share of the bandwidth by half.
    pub ramp_bytes: f64,
    /// Bytes per second between the device and its host, each direction.
    pub host_bytes_per_s: f64,
    /// Watts of the board, of the datasheet.
    pub board_watts: Option<f64>,
    /// How much longer gradients of weights take than other products of their size.
    pub weight_factor: f64,
    /// Products, by arithmetic.
    pub product: Vec<ProductRates>,
    /// Fused attention of the best kernel for the device.
    pub attention: AttentionRates,
}

/// Share of the peak by the largest power of two that divides all dims of a product, from 1 to 64
/// elements. Source: NVIDIA, "Matrix multiplication background", figures on alignment: kernels for
/// 128-byte rows are the fastest, those below 16 bytes do without asynchronous copies.
const ALIGNED: [f64; 7] = [0.3, 0.4, 0.6, 0.85, 0.92, 0.97, 1.0];

/// The largest power of two that divides all sizes, as far as it matters.
fn alignment(sizes: &[f64]) -> usize {
    let powers = sizes.iter().map(|size| (*size as u64).trailing_zeros() as usize);
    powers.min().unwrap_or(0).min(ALIGNED.len() - 1)
}

/// The least power limit, as a share of the board's power. Source: `nvidia-smi -q -d POWER` of A100
/// SXM (100 of 400 W), the lowest share of the devices that are known; below, the clocks of the
/// device's table say nothing.
const LEAST_POWER: f64 = 0.25;

/// Which size of a product is that of tokens: zeros may be added to them, so that a kernel for
/// aligned sizes runs where that is faster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tokens {
    Rows,
    Contracted,
}

/// How the operands of a product lie before it.
#[derive(Clone, Copy, Debug)]
pub struct StoredOperands {
    /// Bytes of an element of the weight.
    pub weight_bytes: f64,
    /// Whether rows that the product reads in one byte or less are cast by a kernel of its own.
    pub casts_rows: bool,
}

/// How products run.
#[derive(Clone, Copy, Debug)]
struct Run {
    /// Share of the boost clock.
    clock: f64,
    /// Bytes that they move beside operands and results.
    more_bytes: f64,
    /// As of [`StoredOperands::casts_rows`].
    casts: bool,
}

impl Run {
    fn at(clock: f64) -> Run {
        Run { clock, more_bytes: 0.0, casts: true }
    }
}

/// Relative spread of the speed of devices of one type with work that is limited by power. Source:
/// Sinha et al. 2022, five clusters: whiskers 8 % of the median apart, which are 5.4 spreads.
const DEVICE_SPREAD: f64 = 0.08 / 5.4;

/// The expected largest of `n` draws from a normal distribution, in spreads (Cramér 1946): about
/// `r + γ/r − (ln ln n + ln 4π) / (2r)` with `r = √(2 ln n)` and Euler's γ.
fn expected_largest(n: f64) -> f64 {
    if n < 2.0 {
        return 0.0;
    }
    let root = (2.0 * n.ln()).sqrt();
    let tail = n.ln().ln() + (4.0 * std::f64::consts::PI).ln();
    (root + 0.5772 / root - tail / (2.0 * root)).max(0.0)
}

impl Rates {
    /// Seconds of `batch` products `[m, k] · [k, n]` in a long run. More rows never take less.
    pub fn product_s(&self, arithmetic: Arithmetic, sizes: [f64; 4]) -> f64 {
        let clock = self.product_rates(arithmetic).sustained_share;
        self.padded_product_s(arithmetic, sizes, Tokens::Rows, Run::at(clock))
    }

    /// Seconds of `batch` products `[m, k] · [k, n]` in a long run, whose operands lie as `stored`
    /// says.
    pub fn stored_product_s(
        &self,
        arithmetic: Arithmetic,
        sizes: [f64; 4],
        stored: StoredOperands,
    ) -> f64 {
        let [_, n, k, batch] = sizes;
        let more_bytes = batch * k * n * (stored.weight_bytes - arithmetic.operand_bytes());
        let clock = self.product_rates(arithmetic).sustained_share;
        let run = Run { clock, more_bytes, casts: stored.casts_rows };
        self.padded_product_s(arithmetic, sizes, Tokens::Rows, run)
    }

    /// Seconds of `batch` products that make gradients of weights, in a long run: tokens are the
    /// contracted dim, and more of them never take less. `bytes` is what accumulation into a sum
    /// reads and writes in addition, 0 without it.
    pub fn weight_product_s(&self, arithmetic: Arithmetic, sizes: [f64; 4], bytes: f64) -> f64 {
        let clock = self.product_rates(arithmetic).sustained_share;
        self.padded_product_s(
            arithmetic,
            sizes,
            Tokens::Contracted,
            Run { more_bytes: bytes, ..Run::at(clock) },
        )
    }

    /// Seconds of the same products alone, at the boost clock: what tables of timings show.
    pub fn kernel_product_s(&self, arithmetic: Arithmetic, sizes: [f64; 4]) -> f64 {
        self.padded_product_s(arithmetic, sizes, Tokens::Rows, Run::at(1.0))
    }

    /// The fastest of a product and of those with more tokens that are aligned better. Each of them
    /// takes no less with more tokens, and so does the fastest.
    fn padded_product_s(
        &self,
        arithmetic: Arithmetic,
        sizes: [f64; 4],
        tokens: Tokens,
        run: Run,
    ) -> f64 {
        let [m, n, k, _] = sizes;
        // Only tensor cores are loaded in pieces.
        if arithmetic == Arithmetic::F32 {
            return self.timed_product_s(arithmetic, sizes, 1.0, run);
        }
        let (at, others) = match tokens {
            Tokens::Rows => (0, [n, k]),
            Tokens::Contracted => (2, [m, n]),
        };
        let most = alignment(&others);
        let least = alignment(&[sizes[at].ceil()]).min(most);
        let seconds = (least..=most).map(|power| {
            let piece = f64::from(1_u32 << power);
            let mut padded = sizes;
            padded[at] = (sizes[at] / piece).ceil() * piece;
            self.timed_product_s(arithmetic, padded, ALIGNED[power], run)
        });
        seconds.fold(f64::INFINITY, f64::min)
    }

    /// Tiles over multiprocessors give waves; the slower of the waves and the memory counts, with
    /// a smooth passage: `t = floor + cast + (waves⁴ + memory⁴)^¼`, for the best tile.
    fn timed_product_s(
        &self,
        arithmetic: Arithmetic,
        [m, n, k, batch]: [f64; 4],
        aligned: f64,
        Run { clock, more_bytes, casts }: Run,
    ) -> f64 {
        if m * n * k * batch <= 0.0 {
            return 0.0;
        }
        let rates = self.product_rates(arithmetic);
        let moved = batch * (m * k + k * n) * arithmetic.operand_bytes()
            + batch * m * n * arithmetic.element_bytes()
            + more_bytes;
        let memory = moved / rates.bytes_per_s;
        let each = rates.peak_flops / self.processors * clock * aligned;
        let waves = rates.tiles.iter().map(|Tile(rows, columns, share)| {
            let tiles = (m / rows).ceil() * (n / columns).ceil() * batch;
            let waves = tiles / self.processors;
            let waves = if waves <= 1.0 {
                1.0
            } else {
                waves.ceil() * rates.quantised + waves * (1.0 - rates.quantised)
            };
            waves * (2.0 * rows * columns * k / (each * share) + rates.tile_s)
        });
        let compute = waves.fold(f64::INFINITY, f64::min);
        // Narrow operands are cast from two bytes first; weights are at hand.
        let is_narrow = matches!(rates.arithmetic, Arithmetic::F8 | Arithmetic::F4);
        let cast = if casts && is_narrow {
            let bytes = Arithmetic::Half.operand_bytes() + rates.arithmetic.operand_bytes();
            batch * m * k * bytes / rates.bytes_per_s
        } else {
            0.0
        };
        rates.floor_s + cast + (compute.powi(4) + memory.powi(4)).sqrt().sqrt()
    }

    /// The rates of an arithmetic; of the next wider one where the device has none.
    pub fn product_rates(&self, arithmetic: Arithmetic) -> &ProductRates {
        let known = self.product.iter().filter(|rates| rates.arithmetic <= arithmetic);
        let best = known.max_by_key(|rates| rates.arithmetic);
        best.or(self.product.first()).expect("a device file has products")
    }

    /// Slows products to those by `mma.sync`: to the share of the device's best kernels that the
    /// second generation of FlashAttention reaches, whose products are by it too.
    pub(super) fn multiply_by_mma_sync(&mut self) {
        let share = self.attention.second_generation;
        for product in self.product.iter_mut().filter(|of| of.arithmetic != Arithmetic::F32) {
            product.sustained_share *= share;
        }
    }

    /// Slows all rates to those of the slowest of `devices` devices, which wait for each other in
    /// each step; before, they were those of the slowest of `before` devices.
    /// Where a user states it, the slowest of any is `straggler` of the mean slower.
    pub(super) fn wait_for_slowest(&mut self, [before, devices]: [u64; 2], straggler: Option<f64>) {
        let slowest = |n: u64| match straggler {
            None => 1.0 + DEVICE_SPREAD * expected_largest(n as f64),
            Some(share) => 1.0 + if n > 1 { share } else { 0.0 },
        };
        let slower = slowest(devices) / slowest(before);
        for product in &mut self.product {
            product.sustained_share /= slower;
        }
        self.attention.forward_flops /= slower;
        self.attention.backward_flops /= slower;
    }

    /// Limits the power of a device to `watts`: the clock that products sustain, and with it that
    /// of attention, follows the root of the power, as between devices of one chip (`scaled.toml`).
    /// Memory and links keep their clocks.
    ///
    /// # Errors
    /// `E3404` where no table has the power of a device called `name`, or it is less.
    pub(super) fn limit_power(&mut self, name: &str, watts: f64) -> Result<(), Diagnostic> {
        let wrong = |headline: String, help: &str| {
            Err(Diagnostic::error("E3404", Span::of("--assume"), headline).help(help))
        };
        let Some(most) = self.board_watts.filter(|_| self.name == name) else {
            let headline = format!("no table says the power of a {name}");
            return wrong(headline, "leave `power` out");
        };
        if watts > most {
            let headline = format!("a {name} draws {most} W at most, and {watts} W are stated");
            return wrong(headline, "state less, or leave `power` out");
        }
        let least = LEAST_POWER * most;
        if watts < least {
            let headline = format!("a {name} takes no limit of {watts} W, of {most} W");
            return wrong(headline, &format!("state {least} W or more, or leave `power` out"));
        }
        let clock = (watts / most).sqrt();
        for product in &mut self.product {
            product.sustained_share *= clock;
        }
        self.attention.forward_flops *= clock;
        self.attention.backward_flops *= clock;
        Ok(())
    }

    /// Adds the arithmetics that were not timed: half precision's kernels, scaled by the datasheet.
    pub(super) fn add_wide_products(&mut self) {
        let half = self.product_rates(Arithmetic::Half).clone();
        let wide = |arithmetic, flops| ProductRates {
            arithmetic,
            peak_flops: flops,
            spread: 0.15,
            ..half.clone()
        };
        let tf32 = self.tf32_flops.map(|flops| wide(Arithmetic::Tf32, flops));
        self.product.extend(tf32);
        self.product.push(wide(Arithmetic::F32, self.f32_flops));
    }

    /// Seconds of fused attention over `keys` keys with heads of `dim`, forward and backward.
    ///
    /// Backward counts two and a half times the operations (Dao et al. 2022). A generation of the
    /// kernel reaches a share of the best one.
    pub fn flash_s(
        &self,
        kernel: AttentionKernel,
        forward_flops: f64,
        keys: f64,
        dim: f64,
    ) -> [f64; 2] {
        let rates = &self.attention;
        let share = match kernel {
            AttentionKernel::Flash1 => rates.first_generation,
            AttentionKernel::Flash2 => rates.second_generation,
            AttentionKernel::Separate
            | AttentionKernel::FusedSoftmax
            | AttentionKernel::FlashBest => 1.0,
        };
        let narrow = if dim < 96.0 { rates.narrow_share } else { 1.0 };
        let ramp = keys / (keys + rates.half_keys) * share * narrow;
        let forward = rates.floor_s + forward_flops / (rates.forward_flops * ramp);
        let backward = rates.floor_s + 2.5 * forward_flops / (rates.backward_flops * ramp);
        [forward, backward]
    }

    /// Seconds of a memory-bound kernel that moves `bytes` bytes.
    pub fn rows_s(&self, bytes: f64) -> f64 {
        if bytes <= 0.0 {
            return 0.0;
        }
        self.kernel_s + (bytes + self.ramp_bytes) / (self.memory_bytes_per_s * self.memory_share)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tables of order statistics (Harter 1961).
    #[test]
    fn the_largest_of_many_is_that_of_the_tables() {
        for (n, expected) in [(10.0, 1.539), (100.0, 2.508), (1000.0, 3.241), (10000.0, 3.852)] {
            let ours = expected_largest(n);
            assert!((ours / expected - 1.0_f64).abs() < 0.07, "{n}: {ours} against {expected}");
        }
        assert_eq!(expected_largest(1.0), 0.0);
    }
}
