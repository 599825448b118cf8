//! How far a prediction may be off: each part of a step has a spread, and the spreads add up as
//! independent ones do, but for a share that all parts have in common.

use super::rates::{Arithmetic, Rates};
use super::step::Breakdown;

/// The quantile of a normal distribution below which nine tenths lie.
const Z: f64 = 1.2816;

/// Relative spread that all parts of a run share: clocks under power limits, placement, noise.
/// Source: Sinha et al. 2022, the average variation of devices of one type on five clusters.
const COMMON: f64 = 0.08;

/// Relative spread of runs with routed experts: how a release sorts, pads and exchanges tokens
/// changes from one to the next. Source: Megatron-Bridge's performance summaries, the same routed
/// models on the same devices in four releases of a year.
const ROUTED: f64 = 0.2;

/// Relative spread of attention over context-parallel ranks, whose pieces are smaller and joined
/// again. Source: torchtitan's tables, 8 ranks take up to half as long again as their operations.
const RING: f64 = 0.3;

/// Relative spread of kernels that move rows.
pub(super) const ROWS: f64 = 0.15;
/// Relative spread of what starts kernels.
pub(super) const START: f64 = 0.25;
/// Relative spread of collectives of tensor parallelism, and of gradients.
pub(super) const TENSOR: f64 = 0.4;
/// Relative spread of any other communication.
pub(super) const UNKNOWN: f64 = 0.5;

/// By which factors a step may be shorter and longer, so that four in five lie between.
///
/// `doubt` is the relative spread of what is not known about the framework.
pub(super) fn factors(
    breakdown: &Breakdown,
    rates: &Rates,
    arithmetic: Arithmetic,
    doubt: f64,
) -> [f64; 2] {
    let parts = breakdown.parts().map(|(name, seconds)| {
        let spread = match name {
            "products" => rates.product_rates(arithmetic).spread,
            "attention" if breakdown.context_s > 0.0 => RING,
            "attention" => rates.attention.spread,
            "recompute" | "bubble" => 0.08,
            "rows" => ROWS,
            "dispatch" => START,
            "tensor" | "gradients" => TENSOR,
            _ => UNKNOWN,
        };
        (seconds, spread)
    });
    around(&parts, breakdown.expert_s > 0.0, doubt)
}

/// Prediction interval, in seconds, of the sum of `parts`: the seconds of each and its relative
/// spread.
pub(super) fn around(parts: &[(f64, f64)], is_routed: bool, doubt: f64) -> [f64; 2] {
    let total: f64 = parts.iter().map(|(seconds, _)| seconds).sum();
    let variance: f64 =
        parts.iter().map(|(seconds, spread)| (seconds / total * spread).powi(2)).sum();
    let routed = if is_routed { ROUTED } else { 0.0 };
    let spread = (variance + COMMON.powi(2) + routed.powi(2) + doubt.powi(2)).sqrt();
    // Runs are rather slower than faster than their parts.
    [(-0.9 * Z * spread).exp(), (1.3 * Z * spread).exp()]
}
