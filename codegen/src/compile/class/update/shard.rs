//! Updates that data-parallel ranks share: each keeps and updates one piece of every bucket (ZeRO,
//! Rajbhandari et al. 2020, stage 1).
//!
//! Gradients are scattered instead of summed on every rank, and updated parameters are gathered
//! again. Both move as many bytes together as the sum would.

use ir::program::{BufferId, Contents, Exchange, Group, Instruction, Ref, ShardRole, Step};
use ir::sharding::Axis;

use super::{Class, Updated, call_collective, counts, reduce_copies, update as update_elements};
use crate::store::Bucket;

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
    reduce_copies(class, steps);
    let scattered = |bucket: Bucket| {
        let dtype = class.plan.precision.gradients;
        let grads = transient(class, &bucket, ShardRole::Grad);
        let slots = [bucket.grads, grads];
        let scatter = |counts| Exchange::ReduceScatter { outer: 1, inner: 1, counts };
        exchange(class, &bucket, ("reduce-scatter", dtype), slots, &scatter, steps);
        Piece { bucket, grads }
    };
    buckets.into_iter().map(scattered).collect()
}

/// The pieces that this rank counts in the norm, with their elements.
pub(super) fn counted(class: &Class<'_>, pieces: &[Piece]) -> Vec<(BufferId, usize)> {
    let counted = pieces.iter().filter(|piece| counts(class, piece.bucket.region));
    counted.map(|piece| (piece.grads, piece.bucket.piece)).collect()
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
    for Piece { bucket, grads } in pieces {
        let is_rounded = class.plan.precision.master.is_some();
        let rounded = is_rounded.then(|| transient(class, bucket, ShardRole::Rounded));
        let updated = Updated {
            is_matrix: bucket.region.is_matrix,
            elements: bucket.piece,
            params: bucket.master,
            grads: *grads,
            states: bucket.states.clone(),
            scales: bucket.scales.clone(),
            rounded,
        };
        update_elements(class, &updated, scalars, steps)?;
        let dtype = class.plan.precision.parameters;
        let slots = [rounded.unwrap_or(bucket.master), bucket.params];
        let gather = |counts| Exchange::AllGather { outer: 1, inner: 1, counts };
        exchange(class, bucket, ("all-gather", dtype), slots, &gather, steps);
    }
    Ok(())
}

/// Room for a piece of a bucket after the last micro-batch.
fn transient(class: &mut Class<'_>, bucket: &Bucket, role: ShardRole) -> BufferId {
    let (name, dtype) = match role {
        ShardRole::Grad => ("grads", class.plan.precision.gradients),
        ShardRole::Rounded | ShardRole::Master | ShardRole::State(_) | ShardRole::Scale(_) => {
            ("rounded", class.plan.precision.parameters)
        }
    };
    let contents = Contents::Shard { role, bucket: bucket.params };
    let after = class.clock.end() + 1;
    let name = format!("{name}.shard");
    class.store.transient(&name, contents, dtype, vec![bucket.piece], (after, after))
}

/// Appends a collective over `dp` from one buffer to another, in pieces of a bucket.
fn exchange(
    class: &mut Class<'_>,
    bucket: &Bucket,
    (name, dtype): (&str, ir::DType),
    [from, to]: [BufferId; 2],
    exchange: &dyn Fn(Vec<usize>) -> Exchange,
    steps: &mut Vec<Step>,
) {
    let ranks = class.plan.mesh.dp;
    let exchange = exchange(vec![bucket.piece; ranks]);
    let [piece, whole] = [1, ranks].map(|n| n * bucket.piece);
    let [sent, received] = match exchange {
        Exchange::AllGather { .. } => [piece, whole],
        Exchange::ReduceScatter { .. } | Exchange::AllReduce(_) => [whole, piece],
    };
    let bytes = |elements: usize| elements as u64 * dtype.size();
    let collective = Instruction::Collective {
        exchange,
        group: Group::Axis(Axis::Dp),
        dtype,
        exchanged: dtype,
        elements: sent,
        input: Ref::Slot(0),
        output: Ref::Slot(1),
    };
    let slots = [(from, bytes(sent)), (to, bytes(received))];
    call_collective(class, name, &slots, collective, steps);
}
