//! Updates that data-parallel ranks share: each keeps and updates one piece of every bucket (ZeRO,
//! Rajbhandari et al. 2020).
//!
//! Gradients are scattered instead of summed on every rank, and updated parameters are gathered
//! again. Both move as many bytes together as the sum would. Where fewer ranks than those along
//! `dp` have one copy, they exchange pieces among themselves, and the sums of each piece are summed
//! over the copies (hybrid sharding: MiCS, Zhang et al. 2022). Where calls have scattered their
//! gradients (stages 2 and 3), each rank has the sum of its piece already; where they gather
//! parameters (stage 3), nothing is gathered here.

use ir::precision::Precision;
use ir::program::{BufferId, Contents, Exchange, Group, ShardRole, Step};
use ir::sharding::Axis;

use super::super::launch::{all_reduce, exchange_pieces};
use super::super::{copies_group, shard_group};
use super::{Class, Counted, Updated, counts, offload, reduce_copies};
use crate::store::Bucket;
use crate::weights::shards;

/// A bucket, and the sum of the gradients of this rank's piece.
pub(super) struct Piece {
    bucket: Bucket,
    grads: BufferId,
}

/// Sums the gradients of each bucket, of which every rank gets its piece. Nothing where ranks
/// update all of their weights.
pub(super) fn reduce(class: &mut Class<'_>, steps: &mut Vec<Step>) -> Vec<Piece> {
    let buckets = class.store.buckets.clone();
    if buckets.is_empty() {
        return Vec::new();
    }
    if !class.store.units.is_empty() {
        return buckets.into_iter().map(|bucket| summed(class, bucket, steps)).collect();
    }
    reduce_copies(class, steps);
    let scattered = |bucket: Bucket| {
        let Precision { gradients: dtype, reduce: exchanged, .. } = class.plan.precision;
        let types = ("reduce-scatter", [dtype, exchanged]);
        let grads = transient(class, &bucket, ShardRole::Grad);
        let (is_expert, piece) = (bucket.region.is_expert, bucket.piece);
        let ranks = shards(class.plan).pieces(is_expert);
        let scatter = Exchange::scatter_of(vec![piece; ranks]);
        let scatter = (scatter, shard_group(class.plan, is_expert));
        let (slots, elements) = ([bucket.grads, grads], [ranks * piece, piece]);
        exchange_pieces(class, types, scatter, slots, elements, steps);
        sum_copies(class, grads, piece, steps);
        Piece { bucket, grads }
    };
    buckets.into_iter().map(scattered).collect()
}

/// The sum of the gradients of this rank's piece, of which tensor-parallel ranks or other stages
/// may have terms.
fn summed(class: &mut Class<'_>, bucket: Bucket, steps: &mut Vec<Step>) -> Piece {
    let Precision { gradients: dtype, reduce: exchanged, .. } = class.plan.precision;
    let (types, grads) = (([dtype, exchanged], bucket.piece), bucket.grads);
    if bucket.region.is_partial {
        all_reduce(class, grads, types, Group::Axis(Axis::Tp), steps);
    }
    let unit = class.store.unit_of(&bucket);
    let stages = unit.map_or_else(Vec::new, |unit| unit.stages.clone());
    if stages.len() > 1 {
        all_reduce(class, grads, types, Group::Stages(stages), steps);
    }
    sum_copies(class, grads, bucket.piece, steps);
    Piece { bucket, grads }
}

/// Sums a piece over the ranks that have the same one.
fn sum_copies(class: &mut Class<'_>, grads: BufferId, elements: usize, steps: &mut Vec<Step>) {
    let Precision { gradients: dtype, reduce: exchanged, .. } = class.plan.precision;
    if let Some(copies) = copies_group(class.plan) {
        all_reduce(class, grads, ([dtype, exchanged], elements), copies, steps);
    }
}

/// The pieces that this rank counts in the norm.
pub(super) fn counted(class: &Class<'_>, pieces: &[Piece]) -> Vec<Counted> {
    let counted = pieces.iter().filter(|piece| counts(class, piece.bucket.region));
    let of = |Piece { bucket, grads }: &Piece| Counted {
        grads: *grads,
        elements: bucket.piece,
        is_expert: bucket.region.is_expert,
    };
    counted.map(of).collect()
}

/// Updates this rank's pieces, and gathers the parameters of all.
///
/// # Errors
/// A sentence, when the optimizer has no kernel.
pub(super) fn update(
    class: &mut Class<'_>,
    pieces: &[Piece],
    scalars: [BufferId; 2],
    steps: &mut Vec<Step>,
) -> Result<(), String> {
    let mut all = Vec::new();
    for Piece { bucket, grads } in pieces {
        let is_rounded = class.plan.precision.master.is_some();
        let source = class.store.unit_of(bucket).and_then(|unit| unit.source);
        let has_all = shards(class.plan).pieces(bucket.region.is_expert) == 1;
        let rounded = match source {
            Some(source) => is_rounded.then_some(source),
            None if has_all && is_rounded => Some(bucket.params),
            None => is_rounded.then(|| transient(class, bucket, ShardRole::Rounded)),
        };
        all.push(Updated {
            is_matrix: bucket.region.is_matrix,
            elements: bucket.piece,
            params: bucket.master,
            grads: *grads,
            states: bucket.states.clone(),
            scales: bucket.scales.clone(),
            rounded,
        });
    }
    let mut gather = |class: &mut Class<'_>, at: usize, steps: &mut Vec<Step>| {
        let (bucket, rounded) = (&pieces[at].bucket, all[at].rounded);
        let unit = class.store.unit_of(bucket);
        if rounded == Some(bucket.params) || unit.is_some_and(|unit| unit.source.is_some()) {
            return;
        }
        let dtype = class.plan.precision.parameters;
        let slots = [rounded.unwrap_or(bucket.master), bucket.params];
        let (is_expert, piece) = (bucket.region.is_expert, bucket.piece);
        let ranks = shards(class.plan).pieces(is_expert);
        let gather = Exchange::gather_of(vec![piece; ranks]);
        let gather = (gather, shard_group(class.plan, is_expert));
        let elements = [piece, ranks * piece];
        exchange_pieces(class, ("all-gather", [dtype; 2]), gather, slots, elements, steps);
    };
    offload::update_all(class, &all, scalars, steps, &mut gather)
}

/// Room for a piece of a bucket after the last micro-batch.
fn transient(class: &mut Class<'_>, bucket: &Bucket, role: ShardRole) -> BufferId {
    let (name, dtype) = match role {
        ShardRole::Grad => ("grads", class.plan.precision.gradients),
        ShardRole::Rounded
        | ShardRole::Term
        | ShardRole::Param
        | ShardRole::Master
        | ShardRole::State(_)
        | ShardRole::Scale(_) => ("rounded", class.plan.precision.parameters),
    };
    let contents = Contents::Shard { role, bucket: bucket.params };
    let after = class.clock.end() + 1;
    let name = format!("{name}.shard");
    class.store.transient(&name, contents, dtype, vec![bucket.piece], (after, after))
}
