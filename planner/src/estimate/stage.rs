//! Stages of a configuration as the formula of a step sees them: which layers and ends each has,
//! what it computes of a micro-batch, and what it holds.

use super::bubble::Alike;
use super::interleaved::{Chunks, Interleaved};
use super::price::{LayerPrice, Moments, Pass, Prices};
use crate::configuration::{Configuration, Recompute};

/// A stage as the formula sees it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Stage {
    pub(super) layers: f64,
    pub(super) pass: Pass,
    pub(super) recompute_s: f64,
    /// What of it a device computes; the rest are collectives and waiting for the host.
    pub(super) again_busy_s: f64,
    pub(super) forward_s: f64,
    pub(super) backward_s: f64,
    /// What of a forward and of a backward pass the end of the model takes that is here.
    pub(super) end_s: [f64; 2],
    pub(super) forward_late_s: f64,
    pub(super) backward_late_s: f64,
    pub(super) weight_s: f64,
    pub(super) saved: f64,
    /// Of `saved`, what the ends of the model save.
    pub(super) end_saved: f64,
    /// Where what layers save is moved away: what is there at most of two layers, and what a layer
    /// needs beside while it runs.
    pub(super) moved: f64,
    pub(super) moved_working: f64,
    /// The same of routed experts, see `room`.
    pub(super) moved_room: f64,
    pub(super) put_off: [f64; 2],
    pub(super) sent: f64,
    pub(super) working: f64,
    pub(super) end_working: f64,
    /// Bytes in which routed experts are computed, beside what they keep.
    pub(super) room: f64,
    pub(super) freed: f64,
    pub(super) late: f64,
    pub(super) parameters: f64,
    pub(super) end_parameters: f64,
    /// Of the end that has most.
    pub(super) end_parameters_most: f64,
    pub(super) expert_parameters: f64,
    pub(super) tensors: f64,
    pub(super) moments: Moments,
    /// Bytes of frozen weights: dense ones, and those of experts.
    pub(super) frozen: [f64; 2],
    /// Those of the ends of the model.
    pub(super) end_frozen: f64,
}

impl Stage {
    pub(super) fn total_s(&self) -> f64 {
        self.pass.total_s() + self.recompute_s
    }

    /// Bytes that the host freed while the device was behind, with `in_flight` micro-batches under
    /// way. Without a pipeline they are those of one pass; with one, of all `in_flight` passes
    /// where the device is slower than the host, else of the `in_flight - 2` whose messages wait
    /// for the next stage.
    pub(super) fn late_bytes(&self, c: &Configuration, in_flight: f64) -> f64 {
        let host_is_late = self.pass.dispatch_s > LATE_SHARE * self.pass.total_s();
        let passes = match (c.pp, host_is_late) {
            (1, _) => 1.0,
            (_, false) => in_flight,
            (_, true) => (in_flight - 2.0).max(0.0),
        };
        self.late * passes
    }

    pub(super) fn alike(&self, run: &Run) -> Alike {
        let Stage { forward_s, backward_s, weight_s, .. } = *self;
        Alike { index: run.index, count: run.count, forward_s, backward_s, weight_s }
    }

    /// The passes of stages that interleave chunks. Each chunk has its share of the stage's layers;
    /// the first chunk of all also has the embedding, and the last one the head.
    pub(super) fn chunks(&self, c: &Configuration, run: &Run) -> Interleaved {
        let layers = run.to - run.from;
        let share =
            |chunk| f64::from(c.chunk_layers(layers, run.index, chunk)) / f64::from(layers.max(1));
        let ends = [0, c.vpp - 1].map(share);
        let inner = f64::from(c.vpp.saturating_sub(2)).max(1.0);
        let chunks = |seconds: f64, end_s: f64| {
            let layers_s = seconds - end_s;
            let [first_s, last_s] = ends.map(|share| share * layers_s);
            let inner_s = (layers_s - first_s - last_s) / inner;
            match run.index {
                0 => Chunks { first_s: first_s + end_s, inner_s, last_s },
                _ => Chunks { first_s, inner_s, last_s: last_s + end_s },
            }
        };
        Interleaved {
            index: run.index,
            count: run.count,
            forward: chunks(self.forward_s, self.end_s[0]),
            backward: chunks(self.backward_s, self.end_s[1]),
        }
    }
}

/// Layers of which a device holds activations that lie elsewhere: of one they are made or read, and
/// those of another are on their way.
const MOVED_LAYERS: f64 = 2.0;

/// Share of a pass that the device waits for its host, from which on it is not behind. Chosen.
const LATE_SHARE: f64 = 0.1;

/// Stages that are alike and follow each other; an end of the model is on its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    /// The first of them.
    pub(super) index: u32,
    /// How many there are.
    pub(super) count: u32,
    /// Layers of the first: from, and to but not with.
    pub(super) from: u32,
    pub(super) to: u32,
}

/// The stages of a configuration in order. Few, also where there are many stages.
pub(super) fn runs(c: &Configuration, prices: &Prices) -> impl Iterator<Item = Run> {
    let depth: u32 = prices.layers.iter().map(|(count, _)| count).sum();
    let (mut index, mut from) = (0, 0);
    std::iter::from_fn(move || {
        if index >= c.pp {
            return None;
        }
        let (layers, alike) = c.layers_of(depth, index);
        let mut count = 1;
        if 0 < index && index + 1 < c.pp && layers > 0 {
            let mut ends = prices.layers.iter().scan(0, |end, (count, _)| {
                *end += count;
                Some(*end)
            });
            let end = ends.find(|end| *end > from).unwrap_or(depth);
            count = ((end - from) / layers).min(alike).min(c.pp - 1 - index).max(1);
        }
        let run = Run { index, count, from, to: from + layers };
        index += count;
        from += layers * count;
        Some(run)
    })
}

/// A stage: its layers and ends, with what is recomputed. `is_far` says that stages are on
/// different nodes.
pub(super) fn stage(c: &Configuration, prices: &Prices, run: &Run, is_far: bool) -> Stage {
    let mut stage = Stage::default();
    hold(&mut stage, c, prices, run);
    for_each_part(c, prices, run, |part| add_passes(&mut stage, c, part));
    if is_far {
        stage.forward_s += stage.forward_late_s;
        stage.backward_s += stage.backward_late_s;
        stage.pass.dispatch_s += stage.forward_late_s + stage.backward_late_s;
    }
    stage
}

/// What a stage holds, of its layers and ends.
pub(super) fn hold(stage: &mut Stage, c: &Configuration, prices: &Prices, run: &Run) {
    for_each_part(c, prices, run, |part| add_bytes(stage, c, part));
    // One stage holds a shared weight once; two hold it each.
    if c.pp == 1 {
        stage.parameters -= prices.tied_parameters;
        stage.end_parameters -= prices.tied_parameters;
        stage.moments.bytes[0] -= prices.tied_moments;
        stage.frozen[0] -= prices.tied_frozen_bytes;
        stage.end_frozen -= prices.tied_frozen_bytes;
    }
}

/// Equal layers of a stage, or an end of the model.
#[derive(Clone, Copy)]
struct Part<'a> {
    price: &'a LayerPrice,
    count: f64,
    /// How many of the layers are recomputed whole; none for an end.
    whole: Option<f64>,
}

/// Goes through a stage, layer class by layer class, then through its ends.
fn for_each_part(c: &Configuration, prices: &Prices, run: &Run, mut take: impl FnMut(Part<'_>)) {
    let mut before = 0;
    for (count, price) in &prices.layers {
        let (start, end) = (run.from.max(before), run.to.min(before + count));
        if start < end {
            // The first ones of a stage are recomputed, of whatever class they are.
            let recomputed = match c.recompute {
                Recompute::Layers(layers) => {
                    run.from.saturating_add(layers).clamp(start, end) - start
                }
                Recompute::Full => end - start,
                Recompute::None | Recompute::Auto | Recompute::Attention => 0,
            };
            take(Part { price, count: f64::from(end - start), whole: Some(f64::from(recomputed)) });
        }
        before += count;
    }
    let ends = [(run.index == 0, &prices.first), (run.index + 1 == c.pp, &prices.last)];
    for (_, price) in ends.into_iter().filter(|(is_there, _)| *is_there) {
        take(Part { price, count: 1.0, whole: None });
    }
}

fn add_bytes(stage: &mut Stage, c: &Configuration, Part { price, count, whole }: Part<'_>) {
    let mut each = price.saved_bytes;
    let [mut working, mut room] = [price.working_bytes, price.room_bytes];
    if whole.is_some() && c.recompute == Recompute::Attention {
        each -= price.saved_attention_bytes;
        working += price.saved_attention_bytes;
    }
    let mut saved = each * count;
    if let Some(whole) = whole {
        stage.layers += count;
        // A layer that is recomputed has what it saves while it runs: no more than it would have
        // of both.
        let is_whole = whole >= count;
        let own = if is_whole { price.input_bytes } else { each };
        let again = if is_whole { price.saved_bytes } else { 0.0 };
        let there = MOVED_LAYERS * own + again;
        let before = stage.moved;
        stage.moved = before.max(MOVED_LAYERS * own);
        stage.moved_working = (before + stage.moved_working).max(there + working) - stage.moved;
        stage.moved_room = (before + stage.moved_room).max(there + room) - stage.moved;
        saved += (price.input_bytes - price.saved_bytes) * whole;
        // Of layers of several kinds any counts, so that more that are recomputed take no more.
        if !matches!(c.recompute, Recompute::None | Recompute::Attention | Recompute::Layers(0)) {
            working += price.saved_bytes;
            room += if room > 0.0 { price.saved_bytes } else { 0.0 };
        }
        stage.room = stage.room.max(room);
    }
    stage.saved += saved;
    if whole.is_some() {
        // The layer of the loss puts nothing off.
        let put_off = stage.put_off.iter_mut().zip(price.put_off_bytes);
        put_off.for_each(|(sum, bytes)| *sum += bytes * count);
        stage.working = stage.working.max(working);
    } else {
        stage.end_saved += saved;
        stage.end_working = stage.end_working.max(working);
        stage.end_parameters += price.parameters;
        stage.end_parameters_most = stage.end_parameters_most.max(price.parameters);
        stage.end_frozen += price.frozen_bytes[0];
    }
    stage.freed = stage.freed.max(price.freed_bytes);
    stage.late += price.late_bytes * count;
    stage.parameters += price.parameters * count;
    stage.expert_parameters += price.expert_parameters * count;
    stage.tensors += price.tensors * count;
    stage.moments += price.moments * count;
    stage.frozen[0] += price.frozen_bytes[0] * count;
    stage.frozen[1] += price.frozen_bytes[1] * count;
}

fn add_passes(stage: &mut Stage, c: &Configuration, Part { price, count, whole }: Part<'_>) {
    let (mut recompute_s, mut again_busy_s) = (0.0, 0.0);
    if whole.is_none() {
        stage.end_s = [price.forward.total_s(), price.backward.total_s()];
    }
    if let Some(whole) = whole {
        if c.recompute == Recompute::Attention {
            recompute_s += price.attention_again.total_s() * count;
            again_busy_s += price.attention_again.busy_s() * count;
        }
        if whole > 0.0 {
            recompute_s += price.forward_again.total_s() * whole;
            again_busy_s += price.forward_again.busy_s() * whole;
            stage.backward_late_s += price.forward_late_s * whole;
        }
    }
    stage.pass += (price.forward + price.backward) * count;
    stage.recompute_s += recompute_s;
    stage.again_busy_s += again_busy_s;
    stage.forward_s += price.forward.total_s() * count;
    stage.backward_s += price.backward.total_s() * count + recompute_s;
    stage.forward_late_s += price.forward_late_s * count;
    stage.backward_late_s += price.backward_late_s * count;
    stage.weight_s += price.weight_s * count;
}
