//! The decisions of a uniform configuration, in the order in which they are taken, and which values
//! each can have.
//!
//! What decides most comes first: ranks of each kind and their placement, then micro-batches and
//! the schedule, then what is sharded, moved away and computed again.

use ir::random::mix;

use super::branch_and_bound::Path;
use crate::configuration::{Configuration, Offload, Place, Recompute, Schedule, USUAL_ORDER, Zero};
use crate::divisors::divisors;
use crate::estimate::legal;
use crate::limits::{Knob, Limits};
use ir::Axis;

/// What bounds the values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Devices, all of which are used.
    pub devices: u32,
    /// Samples of a step.
    pub global_batch: u32,
    /// Layers.
    pub layers: u32,
    /// Tensor-parallel ranks divide this: heads, and widths where there are no heads.
    pub heads: u32,
    /// Context-parallel ranks have two pieces each of so many tokens.
    pub seq: u32,
    /// Expert-parallel ranks divide this; 1 where there are no experts.
    pub experts: u32,
    /// Whether there is a disk to offload to.
    pub disk: bool,
    /// Whether a configuration stands for all cuts of its layers, some of which have a deep stage.
    pub all_cuts: bool,
    /// What the user fixes and forbids.
    pub limits: Limits,
}

/// The decisions, in order. Data-parallel ranks follow from the first three.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Pipeline stages.
    Pp,
    /// Tensor-parallel ranks.
    Tp,
    /// Context-parallel ranks.
    Cp,
    /// Expert-parallel ranks.
    Ep,
    /// Samples of a micro-batch.
    Microbatch,
    /// Sequence parallelism.
    Sequence,
    /// Placement of the axes.
    Order,
    /// The order of micro-batches, with interleaving.
    Schedule,
    /// What data-parallel ranks shard, over how many.
    Zero,
    /// What lies elsewhere.
    Offload,
    /// What is computed again.
    Recompute,
}

/// The decisions in the order of a path.
pub const STEPS: [Step; 11] = [
    Step::Pp,
    Step::Tp,
    Step::Cp,
    Step::Ep,
    Step::Microbatch,
    Step::Sequence,
    Step::Order,
    Step::Schedule,
    Step::Zero,
    Step::Offload,
    Step::Recompute,
];

/// Bits of the part of a value that is a count, beside a kind.
const COUNT_BITS: u32 = 24;
const COUNT_MASK: u32 = (1 << COUNT_BITS) - 1;
/// Ways of recomputation before those that count layers.
const RECOMPUTES: [Recompute; 3] = [Recompute::None, Recompute::Attention, Recompute::Full];
/// That of all layers, and that of one.
const FULL: u32 = 2;
const FIRST_COUNT: u32 = RECOMPUTES.len() as u32;
/// What is moved away where activations alone lie on the host.
const HOST_ACTIVATIONS: u32 = 9;
const PLACES: [Place; 3] = [Place::Device, Place::Host, Place::Disk];

/// Placements of four axes.
const ORDERS: u32 = 24;

/// The placement of a number below [`ORDERS`]; 0 is the usual one.
fn order(number: u32) -> [Axis; 4] {
    let mut order = USUAL_ORDER;
    if number == 0 {
        return order;
    }
    let digits = [number / 6, number % 6 / 2, number % 2];
    for (place, digit) in digits.into_iter().enumerate() {
        order[place..=place + digit as usize].rotate_right(1);
    }
    order
}

/// The decisions of a path so far; those to come are at their defaults.
pub fn configuration(frame: &Frame, path: &Path) -> Configuration {
    let mut c = Configuration::default();
    for (step, value) in STEPS.iter().zip(path.values()) {
        let value = *value;
        match step {
            Step::Pp => c.pp = value,
            Step::Tp => c.tp = value,
            Step::Cp => c.cp = value,
            Step::Order => c.order = order(value),
            Step::Ep => c.ep = value,
            Step::Microbatch => c.microbatch = value,
            Step::Sequence => c.sequence_parallel = value == 1,
            Step::Schedule => {
                c.schedule = Schedule::ALL[(value >> COUNT_BITS) as usize];
                c.vpp = value & COUNT_MASK;
            }
            Step::Zero => {
                c.zero = Zero { stage: (value >> COUNT_BITS) as u8, shard: value & COUNT_MASK };
            }
            Step::Offload => {
                let place = |digit: u32| PLACES[(digit % 3) as usize];
                c.offload = Offload {
                    optimizer: place(value),
                    parameters: place(value / 3),
                    activations: place(value / HOST_ACTIVATIONS),
                };
            }
            Step::Recompute => {
                c.recompute = match RECOMPUTES.get(value as usize) {
                    Some(recompute) => *recompute,
                    None => Recompute::Layers(value - FIRST_COUNT + 1),
                };
            }
        }
    }
    if path.values().len() >= 3 {
        c.dp = frame.devices / c.pp / c.tp / c.cp;
    }
    c
}

/// Micro-batches of a step.
fn microbatches(frame: &Frame, c: &Configuration) -> u32 {
    frame.global_batch / c.dp / c.microbatch
}

/// Writes the values that the next decision can have.
pub fn options(frame: &Frame, path: &Path, options: &mut Vec<u32>) {
    options.clear();
    let Some(step) = STEPS.get(path.values().len()) else { return };
    let c = configuration(frame, path);
    let allow = |knob: Knob, number: u32| frame.limits.allow(knob, number as usize);
    let replicas = c.dp.saturating_mul(c.cp);
    match step {
        Step::Pp => {
            let fits = |pp: &u32| *pp <= frame.layers && allow(Knob::Pp, *pp);
            options.extend(divisors(frame.devices).into_iter().filter(fits));
        }
        Step::Tp => {
            let fits = |tp: &u32| frame.heads.is_multiple_of(*tp) && allow(Knob::Tp, *tp);
            options.extend(divisors(frame.devices / c.pp).into_iter().filter(fits));
        }
        Step::Cp => {
            let rest = frame.devices / c.pp / c.tp;
            let fits = |cp: &u32| {
                let dp = rest / cp;
                may_cut_sequence(frame, *cp)
                    && frame.global_batch.is_multiple_of(dp)
                    && allow(Knob::Dp, dp)
                    && may_be_sharded(frame, rest)
            };
            options.extend(divisors(rest).into_iter().filter(fits));
        }
        Step::Order => options.extend(placements(frame, &c)),
        Step::Ep => {
            let groups = u64::from(replicas) * u64::from(c.tp);
            let fits = |ep: &u32| groups.is_multiple_of(u64::from(*ep)) && allow(Knob::Ep, *ep);
            options.extend(divisors(frame.experts).into_iter().filter(fits));
        }
        Step::Microbatch => {
            let samples = frame.global_batch / c.dp;
            options.extend(divisors(samples).into_iter().filter(|mbs| allow(Knob::Mbs, *mbs)));
        }
        Step::Sequence => {
            // One token has nothing to cut.
            let values = if c.tp > 1 && frame.seq > 1 { &[1, 0][..] } else { &[0] };
            options.extend(values.iter().filter(|sp| allow(Knob::Sp, **sp)));
        }
        Step::Schedule => schedules(frame, &c, options),
        Step::Zero => {
            if allow(Knob::Zero, 0) && allow(Knob::Shard, 0) {
                options.push(0);
            }
            let stages = (1..=3).filter(|stage| replicas > 1 && allow(Knob::Zero, *stage));
            for stage in stages {
                if frame.limits.allow_whole_shards(&c) {
                    options.push(stage << COUNT_BITS);
                }
                let shards = divisors(replicas).into_iter();
                let partial = shards.filter(|shard| (2..replicas).contains(shard));
                let partial = partial.filter(|shard| allow(Knob::Shard, *shard));
                let partial = partial.filter(|shard| legal::may_shard(&c, *shard));
                options.extend(partial.map(|shard| stage << COUNT_BITS | shard));
            }
        }
        Step::Offload => offloads(frame, options),
        Step::Recompute => recomputes(frame, &c, options),
    }
}

/// Keeps those options of the next decision that are looked at ahead: the usual order and whole
/// shards, nothing moved away and nothing counted; the last time, which is 1, with moved
/// activations and counts of layers; where it is 0, with all that is moved too.
pub fn keep_ahead(path: &Path, time: u32, options: &mut Vec<u32>) {
    match STEPS.get(path.values().len()) {
        Some(Step::Order) => options.truncate(1),
        Some(Step::Zero) => options.retain(|value| value & COUNT_MASK == 0),
        Some(Step::Offload) if time == 1 => {
            options.retain(|value| [0, HOST_ACTIVATIONS].contains(value))
        }
        Some(Step::Offload) if time > 1 => options.truncate(1),
        Some(Step::Recompute) if time > 1 => options.retain(|value| !counts_layers(*value)),
        Some(_) | None => {}
    }
}

/// Whether so many ranks that hold copies can be sharded over as many as are fixed.
fn may_be_sharded(frame: &Frame, copies: u32) -> bool {
    match frame.limits.fixed(Knob::Shard) {
        None | Some(0) => true,
        Some(shard) => shard > 1 && (copies as usize).is_multiple_of(shard),
    }
}

/// Whether so many context-parallel ranks may share a sequence.
pub(super) fn may_cut_sequence(frame: &Frame, cp: u32) -> bool {
    frame.seq.is_multiple_of(legal::context_pieces(cp))
        && (cp == 1 || frame.seq / cp >= legal::TOKENS_MIN)
        && frame.limits.allow(Knob::Cp, cp as usize)
}

/// Whether a value of the last decision says how many layers of a stage are computed again; such
/// values ascend.
pub fn counts_layers(recompute: u32) -> bool {
    recompute >= FIRST_COUNT
}

/// Whether a value of the last decision says that all layers are.
pub fn is_full(recompute: u32) -> bool {
    recompute == FULL
}

/// Nothing, attention, counts of layers below those of an even stage, all of them, and counts that
/// a deeper stage has more of.
fn recomputes(frame: &Frame, c: &Configuration, options: &mut Vec<u32>) {
    let allow = |number: usize| frame.limits.allow(Knob::Recompute, number);
    let as_kept = |keep: usize| frame.limits.allow(Knob::Keep, keep);
    let even = frame.layers.div_ceil(c.pp);
    // As many layers as a stage has are all.
    let deepest =
        if frame.all_cuts && c.pp > 1 && c.vpp == 1 { frame.layers - (c.pp - 1) } else { even };
    let counts = |from: u32, to: u32| {
        let is_free = allow(2) && frame.limits.fixed(Knob::Keep).is_none();
        // Chunks of a stage compute equally many again.
        let vpp = c.vpp;
        let kept = move |count: &u32| is_free && count.is_multiple_of(vpp);
        (from..to).filter(kept).map(|count| FIRST_COUNT + count - 1)
    };
    options.extend(Some(0).filter(|_| allow(0) && as_kept(1)));
    options.extend(Some(1).filter(|_| allow(1)));
    options.extend(counts(1, even));
    options.extend(Some(FULL).filter(|_| allow(3) && as_kept(0)));
    options.extend(counts(even.max(1), deepest));
}

/// Placements that differ: axes of one rank keep their places.
fn placements(frame: &Frame, c: &Configuration) -> Vec<u32> {
    let alone = |axis: &Axis| c.size(*axis) == 1;
    let mut seen: Vec<Vec<Axis>> = Vec::new();
    let mut kept = Vec::new();
    let fixed = frame.limits.fixed_order();
    for number in 0..ORDERS {
        let order = order(number);
        let moving: Vec<Axis> = order.into_iter().filter(|axis| !alone(axis)).collect();
        let placed = Configuration { order, ..c.clone() };
        // What is fixed is told as it was.
        let is_told = number == 0 || fixed.is_none_or(|fixed| fixed == order);
        if is_told && !seen.contains(&moving) && frame.limits.allow_order(&placed) {
            seen.push(moving);
            kept.push(number);
        }
    }
    kept
}

fn schedules(frame: &Frame, c: &Configuration, options: &mut Vec<u32>) {
    let allow = |knob: Knob, number: u32| frame.limits.allow(knob, number as usize);
    let usual = Schedule::default();
    let m = microbatches(frame, c);
    let index = |schedule: Schedule| {
        Schedule::ALL.iter().position(|other| *other == schedule).unwrap_or(0) as u32
    };
    let plain = std::iter::once(usual).chain(Schedule::ALL.into_iter().filter(|s| *s != usual));
    for schedule in plain {
        let alone = c.pp == 1 && schedule != usual;
        if !alone
            && legal::is_filled(schedule, c.pp, m.into())
            && allow(Knob::Schedule, index(schedule))
            && allow(Knob::Vpp, 1)
        {
            options.push(index(schedule) << COUNT_BITS | 1);
        }
    }
    // Interleaving goes round in groups of as many micro-batches as there are stages.
    if c.pp > 1 && m.is_multiple_of(c.pp) && allow(Knob::Schedule, index(usual)) {
        // Stages have equal chunks, or a layer less: other numbers of chunks have as deep ones.
        let chunks = divisors(frame.layers.div_ceil(c.pp)).into_iter().skip(1);
        let is_filled = |vpp: u32| {
            let interleaved = Configuration { vpp, ..c.clone() };
            // Two stages whose ends have no layer wait for each other: nothing tells how long.
            let is_filled = legal::unfilled(&interleaved, frame.layers).is_none();
            is_filled && (c.pp > 2 || frame.layers >= c.pp * vpp)
        };
        let chunks = chunks.filter(|vpp| allow(Knob::Vpp, *vpp) && is_filled(*vpp));
        options.extend(chunks.map(|vpp| index(usual) << COUNT_BITS | vpp));
    }
}

fn offloads(frame: &Frame, options: &mut Vec<u32>) {
    let places = if frame.disk { 3 } else { 2 };
    for activations in 0..places {
        for parameters in 0..places {
            for optimizer in 0..places {
                let kinds = [optimizer, parameters, activations];
                let moved = kinds.iter().any(|place| *place > 0);
                if frame.limits.allow(Knob::Offload, usize::from(moved)) {
                    options.push(optimizer + 3 * parameters + HOST_ACTIVATIONS * activations);
                }
            }
        }
    }
}

/// What the options below a path depend on.
pub fn shape(frame: &Frame, path: &Path) -> u64 {
    let c = configuration(frame, path);
    let u = |n: u32| u64::from(n);
    // Shards depend on the copies of experts, where ranks share these.
    let copies = if c.ep > 1 { u(c.dp) * u(c.cp) * u(c.tp) / u(c.ep) } else { 0 };
    let parts = match path.values().len() {
        0 => vec![],
        1..=3 => vec![u(c.pp), u(c.tp), u(c.cp)],
        // Placements depend on which axes have more than one rank, so on all of them.
        4 => vec![u(c.pp), u(c.tp), u(c.cp), copies],
        5..=7 => {
            // Schedules depend on these micro-batches, and on whether stages divide them.
            let m = microbatches(frame, &c);
            let rounds = u(m.min(2 * c.pp)) * 2 + u(u32::from(m.is_multiple_of(c.pp)));
            let axes = if path.values().len() == 7 { 0 } else { u(c.tp) << 32 | u(c.cp) };
            vec![u(c.pp), u(c.dp) * u(c.cp), copies, rounds, axes]
        }
        8 => vec![u(c.pp), u(c.dp) * u(c.cp), copies, u(c.vpp)],
        _ => vec![u(c.pp), u(c.vpp)],
    };
    parts.into_iter().fold(0, |hash, part| mix(hash.wrapping_add(part).wrapping_add(1)))
}
