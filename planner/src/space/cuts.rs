//! Other cuts of the layers into stages than the two that a leaf of the walk stands for.
//!
//! There are far too many to walk: what the search finds is improved by moving single layers from
//! stage to stage. How far the answer can be from the best of all cuts was measured on random jobs
//! that are small enough to try every cut ([`OFF_MAX`]).

use super::tree::ROUNDING;
use super::uniform::Space;
use crate::configuration::Configuration;
use crate::estimate::price::Inside;
use crate::estimate::step::Step;

#[cfg(test)]
mod tests;

/// How much slower than the best of all cuts the answers are at most, as a share. Measured: of 243
/// random jobs of 4 to 9 layers (`other_cuts_are_hardly_faster`) all answers but three are the
/// best, and the worst is 0.5 % off.
pub const OFF_MAX: f64 = 0.01;

/// Stages beyond which layers move between neighbours alone. Chosen: as for [`WORK_MAX`].
const ALL_PAIRS_MAX: u32 = 16;
/// Stages that are priced at most to cut the layers of a configuration. Chosen: some milliseconds.
const WORK_MAX: u32 = 50_000;

impl Space<'_> {
    /// The configuration with its layers moved between stages as long as that makes a step less and
    /// fits.
    pub fn recut(&self, c: &Configuration, bytes_max: f64) -> Configuration {
        let mut best = c.clone();
        if c.pp == 1 || c.vpp > 1 {
            return best;
        }
        let table = self.table(Inside::of(c));
        let price = |c: &Configuration| self.estimator.step(c, &table.prices, self.count(c));
        let worth = |step: &Step| self.worth(step.breakdown.total_s(), step.busy_s);
        if best.stage_layers.is_empty() {
            best.stage_layers = even(self.frame.layers, c.pp);
        }
        let mut least = worth(&price(&best));
        let near = c.pp > ALL_PAIRS_MAX;
        let moved = if near { 2 } else { c.pp };
        let rounds = WORK_MAX / moved.saturating_mul(c.pp).saturating_mul(c.pp).max(1);
        for _ in 0..rounds {
            let mut better = None;
            for stage_layers in moves(&best.stage_layers, near) {
                let moved = Configuration { stage_layers, ..best.clone() };
                let step = price(&moved);
                let fits = step.memory.total_bytes() <= bytes_max;
                if fits && worth(&step) < least * (1.0 - ROUNDING) {
                    least = worth(&step);
                    better = Some(moved);
                }
            }
            match better {
                Some(moved) => best = moved,
                None => break,
            }
        }
        if best.stage_layers == even(self.frame.layers, c.pp) {
            best.stage_layers.clear();
        }
        best
    }
}

/// Stages as even as they can be, longer ones first.
fn even(layers: u32, stages: u32) -> Vec<u32> {
    (0..stages).map(|at| layers / stages + u32::from(at < layers % stages)).collect()
}

/// Cuts with one layer more in one stage and one less in another: in the next one or the one before
/// alone, or in any.
pub(super) fn moves(layers: &[u32], near: bool) -> impl Iterator<Item = Vec<u32>> {
    let count = layers.len();
    let pairs = (0..count).flat_map(move |from| {
        let reach = if near { from.saturating_sub(1)..(from + 2).min(count) } else { 0..count };
        reach.map(move |to| (from, to))
    });
    pairs.filter(|(from, to)| from != to && layers[*from] > 1).map(|(from, to)| {
        let mut moved = layers.to_vec();
        moved[from] -= 1;
        moved[to] += 1;
        moved
    })
}
