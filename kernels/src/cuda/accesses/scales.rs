//! Accesses of scales: at the end of each run of k, for each sum of a thread, those of its row and
//! of its column. A scale that all rows or all columns of the result share is loaded once for all
//! sums of a thread. Accumulators of `mma.sync` and of `wgmma` lie alike: of each 8 rows and 8
//! columns a lane has two adjacent columns of a row.

use super::{Accesses, Blocks, LANES, Sites, relative};
use crate::kernel::{Product, Scales};

/// Accesses of the scales of a product, if it has some, given sizes of a block tile along m and n,
/// how many tiles there are, the numbers of runs, and the warps of a block that have sums.
pub(super) fn scales(
    p: &Product,
    [tile_m, tile_n]: [usize; 2],
    [tiles_m, tiles_n]: [usize; 2],
    (runs, warps): (&[usize], u64),
) -> Option<Accesses> {
    let Some([of_a, of_b]) = p.scales else { return Some(Accesses::default()) };
    let [_, m, n, _] = p.sizes();
    let warps = (tiles_m * tiles_n) as u64 * warps;
    // Of each 8 rows a load for each column of a lane.
    let rows = ScaleLoads {
        scales: of_a,
        size: m,
        extent: tile_m,
        loads: tile_m / 8,
        side: |load, lane| load * 8 + lane / 4,
        times: (tiles_n * tile_n / 4) as u64,
        warps,
    };
    // Of both columns of a lane, of each 8, a load for each 8 rows.
    let columns = ScaleLoads {
        scales: of_b,
        size: n,
        extent: tile_n,
        loads: tile_n / 4,
        side: |load, lane| load / 2 * 8 + lane % 4 * 2 + load % 2,
        times: (tiles_m * tile_m / 8) as u64,
        warps,
    };
    Some(rows.count(runs)?.plus(1, columns.count(runs)?))
}

/// The numbers of the runs of some slices, given their first points of k and steps, points of a run
/// and steps of one.
pub(super) fn runs(slices: &[[usize; 2]], [points, steps_of_run]: [usize; 2]) -> Vec<usize> {
    let of_slice = |[first_k, steps]: &[usize; 2]| {
        let first = first_k / points;
        first..first + steps.div_ceil(steps_of_run)
    };
    slices.iter().flat_map(of_slice).collect()
}

/// The scales of an operand, as the warps of a block load them.
struct ScaleLoads {
    scales: Scales,
    /// Rows or columns of the result, and of a block tile.
    size: usize,
    extent: usize,
    /// Loads that have rows or columns of their own.
    loads: usize,
    /// The row or column of a block tile, given the number of such a load and the lane.
    side: fn(usize, usize) -> usize,
    /// How often each is done for a run, by all blocks that share the rows or columns.
    times: u64,
    /// The warps of all blocks.
    warps: u64,
}

impl ScaleLoads {
    /// Counts the loads of some runs.
    fn count(&self, runs: &[usize]) -> Option<Accesses> {
        let Scales { block, of_block, of_run } = self.scales;
        if self.size <= block {
            return Some(Accesses { sectors: [self.warps * runs.len() as u64; 2], turns: [0; 2] });
        }
        let mut blocks = Blocks::new();
        for first in (0..self.size).step_by(self.extent) {
            for run in runs {
                // Beyond the result are the scales of its end.
                let at = |side: usize| {
                    let side = (first + side).min(self.size - 1);
                    4 * (side / block * of_block + run * of_run) as u64
                };
                let mut key = Vec::new();
                relative(&mut key, (0..self.extent).map(at));
                blocks.count(key, self.times, |warp| {
                    let site = Sites::default().device(4);
                    for load in 0..self.loads {
                        (0..LANES)
                            .for_each(|lane| warp.access(site, lane, at((self.side)(load, lane))));
                    }
                    warp.end();
                })?;
            }
        }
        Some(blocks.count)
    }
}
