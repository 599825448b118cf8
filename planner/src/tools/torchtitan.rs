//! How torchtitan shares layers and weights: github.com/pytorch/torchtitan, release 0.2.1.

use crate::configuration::Configuration;
use crate::estimate::profile::ExpertPlacement;

/// Layers of `count` chunks, first to last, where the embedding counts as `first` layers and the
/// head as `last` (`generate_llm_fqn_per_model_part`); none where torchtitan refuses.
pub fn torchtitan_chunks(layers: u32, count: u32, [first, last]: [u32; 2]) -> Option<Vec<u32>> {
    let all = layers.checked_add(first)?.checked_add(last)?;
    let each = all.checked_div(count)?;
    if count < 2 || each == 0 || first > each || last > each {
        return None;
    }
    let more = all % count;
    let chunk = |at: u32| {
        let own = each + u32::from(at < more);
        own - if at == 0 { first } else { 0 } - if at + 1 == count { last } else { 0 }
    };
    Some((0..count).map(chunk).collect())
}

/// Layers that the embedding and the loss have to count for each, so that torchtitan's chunks are
/// those of a configuration; none where no number does that.
pub fn torchtitan_ends(c: &Configuration, layers: u32) -> Option<u32> {
    let count = c.pp.saturating_mul(c.vpp);
    let wanted = c.chunks(layers);
    let found = (0..2).find(|ends| {
        torchtitan_chunks(layers, count, [*ends; 2]).is_some_and(|chunks| chunks == wanted)
    });
    // Several chunks of a stage follow from the layers of one.
    found.filter(|ends| c.vpp == 1 || torchtitan_chunk(c, layers, *ends).is_some())
}

/// The layers of a chunk from which torchtitan computes how many there are.
pub fn torchtitan_chunk(c: &Configuration, layers: u32, ends: u32) -> Option<u32> {
    let (all, count) = (layers + 2 * ends, c.pp.saturating_mul(c.vpp));
    let chunk = all.div_ceil(count);
    (all.div_ceil(chunk) == count).then_some(chunk)
}

/// Ranks over which weights are sharded, where a number of them is named and it can be had.
pub(super) fn named_shard(c: &Configuration) -> Option<u32> {
    let part = c.zero.shard / c.cp;
    let is_part = part > 0 && c.zero.shard.is_multiple_of(c.cp) && c.dp.is_multiple_of(part);
    is_part.then_some(part)
}

/// torchtitan's `data_parallel_shard_degree`: context-parallel ranks share the shards of as many
/// data-parallel ranks, and experts lie on ranks that share shards.
pub fn shard_degree(c: &Configuration) -> u32 {
    let shard = if c.zero.stage == 0 { 1 } else { named_shard(c).unwrap_or(c.dp) };
    if shares_weights(c, shard) { shard } else { c.dp }
}

pub(super) fn shares_weights(c: &Configuration, shard: u32) -> bool {
    let shared = c.ep.saturating_mul(ExpertPlacement::FromTensor.slices(c));
    shard.saturating_mul(c.cp).saturating_mul(c.tp).is_multiple_of(shared) || shard == c.dp
}
