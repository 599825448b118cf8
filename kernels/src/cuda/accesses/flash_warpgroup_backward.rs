//! Accesses of the gradient of attention by `wgmma`: what its warps and TMA access in a step.

use super::attention::key_loads;
use super::flash::{Copied, HALF};
use super::flash_backward::{Backward, Step};
use super::warpgroup::swizzled;
use super::{Accesses, LANES, Site, Sites, Warp};
use crate::cuda::flash::VECTOR;
use crate::cuda::flash_warpgroup::{SWIZZLE_COLUMNS, WARPS};
use crate::cuda::flash_warpgroup_backward::{
    COLUMNS, FlashWarpgroupBackward, KEY_TILE, PART, PART_SIDE, PARTS, SCORES, SUMS, SWIZZLE_ROW,
    THREADS, VECTORS, WARPGROUP,
};
use crate::cuda::quads::QuadStore;

/// Accesses of all blocks; none where a scalar of the launch decides.
pub(super) fn backward(tile: &FlashWarpgroupBackward) -> Option<Accesses> {
    let of = Backward {
        a: &tile.attention,
        turns: tile.turns(),
        warps: WARPS,
        copied: Copied::ByTma,
        list: &|step, warp| {
            let sites = StepSites::of(tile);
            list_values(tile, step, (&sites, warp));
            (0..PARTS).for_each(|part| list_part(tile, step, part, (&sites, warp)));
            (0..WARPS).for_each(|number| list_slopes(tile, step, number, (&sites, warp)));
        },
    };
    // Warps that copy and add load the key of dropout too.
    let warps = tile.turns().blocks() * u64::from(THREADS) / LANES as u64;
    Some(of.all()?.0.plus(1, key_loads(&tile.attention, warps)))
}

/// What is accessed in a step, in order of its text.
struct StepSites {
    /// `lse` and `delta`, and both in shared memory.
    values: [Site; 2],
    values_stored: [Site; 2],
    /// Of the counter, load and store.
    counter: [Site; 2],
    /// Sums that TMA adds a part to.
    sums: Site,
    /// A part and the sums before, which are copied to shared memory.
    copied: [Site; 2],
    added: [Site; 2],
    result: Site,
    /// What warps that multiply load of both values, of the bias and of documents, and store of dS
    /// and of a part.
    values_loaded: [Site; 2],
    bias: Site,
    documents: [Site; 2],
    slopes: Site,
    part: Site,
}

/// How a row of dQ is stored.
fn store_of(tile: &FlashWarpgroupBackward) -> QuadStore {
    QuadStore::of(tile.attention.dtype, 2, VECTOR)
}

/// Values that are loaded at once.
fn width(tile: &FlashWarpgroupBackward) -> usize {
    if tile.is_split() { 2 } else { 1 }
}

impl StepSites {
    fn of(tile: &FlashWarpgroupBackward) -> StepSites {
        let mut all = Sites::default();
        let vector = 4 * SUMS;
        StepSites {
            values: [0; 2].map(|_| all.device(4)),
            values_stored: [0; 2].map(|_| all.shared(4)),
            counter: [0; 2].map(|_| all.device(4)),
            sums: all.device(4 * PART),
            copied: [all.device(vector), all.shared(vector)],
            added: [0; 2].map(|_| all.shared(vector)),
            result: all.device(store_of(tile).width * HALF as usize),
            values_loaded: [0; 2].map(|_| all.shared(4 * width(tile))),
            bias: all.device(HALF as usize),
            documents: [0; 2].map(|_| all.device(4)),
            slopes: all.shared(4),
            part: all.shared(vector),
        }
    }
}

/// Lists what the warp that copies loads and stores beside TMA: `lse` and `delta`.
fn list_values(tile: &FlashWarpgroupBackward, step: &Step, (of, warp): (&StepSites, &mut Warp)) {
    for lane in 0..LANES {
        for s in (lane..tile.step).step_by(LANES) {
            if s < step.queries {
                of.values.iter().for_each(|site| warp.access(*site, lane, step.lse + 4 * s as u64));
            }
            of.values_stored.iter().for_each(|site| warp.access(*site, lane, 4 * s as u64));
        }
    }
    warp.end();
}

/// Lists what the warp accesses that adds a part of dQ to the sums.
fn list_part(
    tile: &FlashWarpgroupBackward,
    step: &Step,
    part: usize,
    (of, warp): (&StepSites, &mut Warp),
) {
    warp.access(of.counter[0], 0, 0);
    if !step.is_last {
        // TMA adds the part, or stores it where it is the first.
        warp.access(of.sums, 0, 0);
        warp.access(of.counter[1], 0, 0);
        warp.end();
        return;
    }
    let store = store_of(tile);
    let [own, before] = of.added;
    let [first_row, first_column] = match tile.splits_columns() {
        true => [0, part * PART_SIDE],
        false => [part * PART_SIDE, 0],
    };
    for (lane, t) in
        (0..LANES).flat_map(|lane| (lane..WARPGROUP).step_by(LANES).map(move |t| (lane, t)))
    {
        let place = |n: usize| ((n * WARPGROUP + t) * SUMS * 4) as u64;
        for n in 0..VECTORS {
            if !step.is_first {
                [of.copied[0], of.copied[1], before]
                    .iter()
                    .for_each(|site| warp.access(*site, lane, place(n)));
            }
            warp.access(own, lane, place(n));
        }
        for n in (0..VECTORS).step_by(store.tiles()) {
            for row in [0, 8].map(|r| first_row + t / LANES * 16 + lane / 4 + r) {
                let column = first_column + n * 8;
                if column < tile.attention.dim && row < step.queries {
                    let column = column + store.column_of(lane, 0);
                    let at = (row * tile.attention.q[1] + column) as u64 * HALF;
                    warp.access(of.result, lane, step.q + at);
                }
            }
        }
    }
    warp.end();
}

/// Lists what a warp that multiplies accesses: values of its queries, the bias, dS and its part of
/// dQ, in shared memory.
fn list_slopes(
    tile: &FlashWarpgroupBackward,
    step: &Step,
    number: usize,
    (of, warp): (&StepSites, &mut Warp),
) {
    for from in (0..tile.step).step_by(COLUMNS) {
        for lane in 0..LANES {
            let own_row = number * 16 + lane / 4;
            for i in 0..SCORES {
                let s = from + i / 4 * 8 + lane % 4 * 2 + i % 2;
                let j = own_row + i / 2 % 2 * 8;
                if width(tile) == 1 || i % 4 == 0 {
                    of.values_loaded.iter().for_each(|site| warp.access(*site, lane, 4 * s as u64));
                }
                if let Some([.., stride]) = tile.attention.bias
                    && s < step.queries
                    && j < step.keys
                {
                    warp.access(of.bias, lane, step.bias + (s * stride + j) as u64 * HALF);
                }
                step.list_documents(&tile.attention, [s, j], of.documents, (&mut *warp, lane));
            }
            for i in 0..SCORES / 2 {
                let (row, column) = (own_row + i % 2 * 8, from + i / 2 * 8);
                let half = column / SWIZZLE_COLUMNS * KEY_TILE * SWIZZLE_ROW;
                let in_row = column % SWIZZLE_COLUMNS * HALF as usize + lane % 4 * 4;
                warp.access(of.slopes, lane, half as u64 + swizzled(row, in_row));
            }
        }
        warp.end();
    }
    for lane in 0..LANES {
        let thread = number * LANES % WARPGROUP + lane;
        for n in 0..VECTORS {
            warp.access(of.part, lane, ((n * WARPGROUP + thread) * SUMS * 4) as u64);
        }
    }
    warp.end();
}
