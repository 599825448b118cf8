//! The decisions of a uniform configuration, in the order in which they are taken, and which values
//! each can have.
//!
//! What decides most comes first: ranks of each kind and their placement, then micro-batches and
//! the schedule, then what is sharded, moved away and recomputed.

use ir::random::mix;

use super::branch_and_bound::Path;
use crate::configuration::{Configuration, Offload, Place, Recompute, Schedule, USUAL_ORDER, Zero};
use crate::divisors::divisors;
use crate::elaborate::sharing_of;
use crate::estimate::legal;
use crate::estimate::profile::GANTLINE;
use crate::limits::{Decision, Limits, RECOMPUTE_LAYERS};
use crate::tools::{Reads, Sizes};
use ir::Axis;

/// What bounds the values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SearchDomain {
    /// Devices, all of which are used.
    pub devices: u32,
    /// Samples of a step.
    pub global_batch: u32,
    /// Layers.
    pub layers: u32,
    /// Tensor-parallel ranks divide this: heads, and widths where there are no heads.
    pub heads: u32,
    /// Tokens of a sample; each context-parallel rank has two equal pieces of them.
    pub seq: u32,
    /// Expert-parallel ranks divide this; 1 where there are no experts.
    pub experts: u32,
    /// Whether there is a disk to offload to.
    pub disk: bool,
    /// Whether a configuration stands for all cuts of its layers, some of which have a deep stage.
    pub all_cuts: bool,
    /// What of the model a tool's rules depend on.
    pub sizes: Sizes,
    /// Whether stages may have other numbers of layers than is usual.
    pub uneven: bool,
    /// Whether ranks share experts as plans of our own programs say it alone.
    pub of_plans: bool,
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
    /// What is recomputed.
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

/// What lies where, of a number.
fn offload(number: u32) -> Offload {
    let place = |digit: u32| Place::ALL[(digit % 3) as usize];
    Offload {
        optimizer: place(number),
        parameters: place(number / 3),
        activations: place(number / HOST_ACTIVATIONS),
    }
}

/// The decisions of a path so far; those to come are at their defaults.
pub fn configuration(domain: &SearchDomain, path: &Path) -> Configuration {
    let mut c = Configuration::default();
    for (step, value) in STEPS.iter().zip(path.values()) {
        let value = *value;
        match step {
            Step::Pp => c.pp = value,
            Step::Tp => c.tp = value,
            Step::Cp => c.cp = value,
            Step::Order => c.order = order(value),
            Step::Ep => {
                c.ep = value & COUNT_MASK;
                let fixed = domain.limits.fixed(Decision::Etp);
                let fixed = fixed.map_or(0, |etp| u32::try_from(etp).unwrap_or(u32::MAX));
                c.etp = if value == c.ep { fixed } else { 1 };
            }
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
                c.offload = offload(value);
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
        c.dp = domain.devices / c.pp / c.tp / c.cp;
    }
    c
}

/// Micro-batches of a step.
fn microbatches(domain: &SearchDomain, c: &Configuration) -> u32 {
    domain.global_batch / c.dp / c.microbatch
}

/// Writes the values that the next decision can have.
pub fn options(domain: &SearchDomain, path: &Path, options: &mut Vec<u32>) {
    options.clear();
    let Some(step) = STEPS.get(path.values().len()) else { return };
    let c = configuration(domain, path);
    let allow = |decision: Decision, number: u32| domain.limits.allow(decision, number as usize);
    let replicas = c.dp.saturating_mul(c.cp);
    match step {
        Step::Pp => {
            let fits = |pp: &u32| *pp <= domain.layers && allow(Decision::Pp, *pp);
            options.extend(divisors(domain.devices).into_iter().filter(fits));
        }
        Step::Tp => {
            let fits = |tp: &u32| domain.heads.is_multiple_of(*tp) && allow(Decision::Tp, *tp);
            options.extend(divisors(domain.devices / c.pp).into_iter().filter(fits));
        }
        Step::Cp => {
            let rest = domain.devices / c.pp / c.tp;
            let fits = |cp: &u32| {
                let dp = rest / cp;
                may_cut_sequence(domain, *cp)
                    && domain.global_batch.is_multiple_of(dp)
                    && allow(Decision::Dp, dp)
                    && may_be_sharded(domain, rest)
            };
            options.extend(divisors(rest).into_iter().filter(fits));
        }
        Step::Order => options.extend(placements(domain, &c)),
        Step::Ep => {
            let groups = u64::from(replicas) * u64::from(c.tp);
            let fits = |ep: &u32| groups.is_multiple_of(u64::from(*ep)) && allow(Decision::Ep, *ep);
            let all = divisors(domain.experts).into_iter().filter(fits);
            options.extend(all.flat_map(|ep| ways_to_share(domain, &c, ep)));
        }
        Step::Microbatch => {
            let samples = domain.global_batch / c.dp;
            options.extend(divisors(samples).into_iter().filter(|mbs| allow(Decision::Mbs, *mbs)));
        }
        Step::Sequence => {
            // One token has nothing to cut.
            let values = if c.tp > 1 && domain.seq > 1 { &[1, 0][..] } else { &[0] };
            let is_whole = domain.of_plans && sharing_of(&c).takes_tp;
            let values = if is_whole { &[1][..] } else { values };
            options.extend(values.iter().filter(|sp| allow(Decision::Sp, **sp)));
        }
        Step::Schedule => schedules(domain, &c, options),
        Step::Zero => {
            if allow(Decision::Zero, 0) && allow(Decision::Shard, 0) {
                options.push(0);
            }
            let stages = (1..=3).filter(|stage| replicas > 1 && allow(Decision::Zero, *stage));
            for stage in stages {
                if domain.limits.allow_whole_shards(&c) {
                    options.push(stage << COUNT_BITS);
                }
                let shards = divisors(replicas).into_iter();
                let partial = shards.filter(|shard| (2..replicas).contains(shard));
                let partial = partial.filter(|shard| allow(Decision::Shard, *shard));
                let partial = partial.filter(|shard| legal::may_shard(&c, *shard));
                options.extend(partial.map(|shard| stage << COUNT_BITS | shard));
            }
        }
        Step::Offload => offloads(domain, options),
        Step::Recompute => recomputes(domain, &c, options),
    }
    keep_expressible(domain, path, *step, options);
}

/// The ways in which `ep` ranks share experts. Those of our own programs: beside all ranks of `tp`,
/// or over these first, with whole experts, where they share tokens equally.
fn ways_to_share(domain: &SearchDomain, c: &Configuration, ep: u32) -> Vec<u32> {
    let fixed = domain.limits.fixed(Decision::Etp).filter(|etp| *etp > 0);
    // Plans have no text for parts of `tp`: they are priced where somebody asks for them.
    let is_part = fixed.is_some_and(|etp| etp != 1 && etp != c.tp as usize);
    if !domain.of_plans || is_part || domain.experts == 1 {
        return if may_slice_experts(domain, c, ep) { vec![ep] } else { Vec::new() };
    }
    let beside = (c.dp.saturating_mul(c.cp)).is_multiple_of(ep);
    let tokens = domain.seq / c.cp;
    let shares_tokens = tokens.is_multiple_of(c.tp) && domain.limits.allow(Decision::Sp, 1);
    let takes_tp = c.tp > 1 && ep > 1 && ep.is_multiple_of(c.tp) && shares_tokens;
    let open = Configuration { ep, etp: 0, ..c.clone() };
    let goes_without_saying = GANTLINE.experts.slices(&open) == 1;
    let with = if goes_without_saying { ep } else { 1 << COUNT_BITS | ep };
    let with = if fixed.is_some() { ep } else { with };
    let may = |etp: u32| fixed.is_none_or(|fixed| fixed == etp as usize);
    let beside = (beside && may(c.tp)).then_some(ep);
    beside.into_iter().chain((takes_tp && may(1)).then_some(with)).collect()
}

/// Whether the fixed `etp` fits `ep`.
fn may_slice_experts(domain: &SearchDomain, c: &Configuration, ep: u32) -> bool {
    let Some(etp) = domain.limits.fixed(Decision::Etp).filter(|etp| *etp > 0) else { return true };
    let c = Configuration { ep, ..c.clone() };
    domain.experts > 1 && u32::try_from(etp).is_ok_and(|etp| c.may_slice_experts(etp))
}

/// Keeps those options of a decision with which the tool that is planned for can express all that
/// is decided by then.
fn keep_expressible(domain: &SearchDomain, path: &Path, step: Step, options: &mut Vec<u32>) {
    let (Some(target), Some(reads)) = (domain.limits.target(), read_after(step)) else { return };
    options.retain(|value| {
        let c = configuration(domain, &path.then(*value));
        target.allows(reads, &c, domain.sizes)
    });
}

/// The rules of a tool that can be asked once a decision is taken.
fn read_after(step: Step) -> Option<Reads> {
    match step {
        Step::Pp | Step::Tp | Step::Microbatch => None,
        Step::Cp => Some(Reads::Mesh),
        Step::Ep => Some(Reads::Experts),
        Step::Sequence => Some(Reads::Sequence),
        Step::Order => Some(Reads::Order),
        Step::Schedule => Some(Reads::Schedule),
        Step::Zero => Some(Reads::Zero),
        Step::Offload => Some(Reads::Offload),
        Step::Recompute => Some(Reads::Recompute),
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

/// Whether what `copies` ranks hold copies of can be sharded as the limits fix it: over all of
/// them, or over a number of ranks that divides them.
fn may_be_sharded(domain: &SearchDomain, copies: u32) -> bool {
    match domain.limits.fixed(Decision::Shard) {
        None | Some(0) => true,
        Some(shard) => shard > 1 && (copies as usize).is_multiple_of(shard),
    }
}

/// Whether `cp` context-parallel ranks may share a sequence.
pub(super) fn may_cut_sequence(domain: &SearchDomain, cp: u32) -> bool {
    domain.seq.is_multiple_of(legal::context_pieces(cp))
        && (cp == 1 || domain.seq / cp >= legal::TOKENS_MIN)
        && domain.limits.allow(Decision::Cp, cp as usize)
}

/// Whether a value of the last decision says how many layers of a stage are recomputed; such
/// values ascend.
pub fn counts_layers(recompute: u32) -> bool {
    recompute >= FIRST_COUNT
}

/// Whether a value of the last decision says that all layers are.
pub fn is_full(recompute: u32) -> bool {
    recompute == FULL
}

/// Whether counts of layers are what is recomputed in any case.
pub(super) fn asks_for_counts(domain: &SearchDomain) -> bool {
    domain.limits.fixed(Decision::Recompute) == Some(RECOMPUTE_LAYERS)
}

/// Nothing, attention, counts of layers below those of an even stage, all of them, and counts that
/// a deeper stage has more of.
fn recomputes(domain: &SearchDomain, c: &Configuration, options: &mut Vec<u32>) {
    let allow = |number: usize| domain.limits.allow(Decision::Recompute, number);
    let as_kept = |keep: usize| domain.limits.allow(Decision::Keep, keep);
    let even = domain.layers.div_ceil(c.pp);
    // As many layers as a stage has are all.
    let deepest =
        if domain.all_cuts && c.pp > 1 && c.vpp == 1 { domain.layers - (c.pp - 1) } else { even };
    // Where what layers save is moved away, those of some free nothing.
    let is_counted = c.offload.activations == Place::Device || asks_for_counts(domain);
    let counts = |from: u32, to: u32| {
        let is_free = is_counted && allow(2) && domain.limits.fixed(Decision::Keep).is_none();
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
fn placements(domain: &SearchDomain, c: &Configuration) -> Vec<u32> {
    let alone = |axis: &Axis| c.size(*axis) == 1;
    let mut seen: Vec<Vec<Axis>> = Vec::new();
    let mut kept = Vec::new();
    let fixed = domain.limits.fixed_order();
    for number in 0..ORDERS {
        let order = order(number);
        let moving: Vec<Axis> = order.into_iter().filter(|axis| !alone(axis)).collect();
        let placed = Configuration { order, ..c.clone() };
        // A fixed order is shown as the user wrote it.
        let is_told = number == 0 || fixed.is_none_or(|fixed| fixed == order);
        if is_told && !seen.contains(&moving) && domain.limits.allow_order(&placed) {
            seen.push(moving);
            kept.push(number);
        }
    }
    kept
}

fn schedules(domain: &SearchDomain, c: &Configuration, options: &mut Vec<u32>) {
    let allow = |decision: Decision, number: u32| domain.limits.allow(decision, number as usize);
    let usual = Schedule::default();
    let m = microbatches(domain, c);
    let index = |schedule: Schedule| {
        Schedule::ALL.iter().position(|other| *other == schedule).unwrap_or(0) as u32
    };
    let plain = std::iter::once(usual).chain(Schedule::ALL.into_iter().filter(|s| *s != usual));
    for schedule in plain {
        let alone = c.pp == 1 && schedule != usual;
        if !alone
            && legal::is_filled(schedule, c.pp, m.into())
            && allow(Decision::Schedule, index(schedule))
            && allow(Decision::Vpp, 1)
        {
            options.push(index(schedule) << COUNT_BITS | 1);
        }
    }
    // Interleaving goes round in groups of as many micro-batches as there are stages.
    if c.pp > 1 && m.is_multiple_of(c.pp) && allow(Decision::Schedule, index(usual)) {
        // Stages have equal chunks, or a layer less: other numbers of chunks have as deep ones.
        let chunks = divisors(domain.layers.div_ceil(c.pp)).into_iter().skip(1);
        let is_filled = |vpp: u32| {
            let interleaved = Configuration { vpp, ..c.clone() };
            // Two stages whose ends have no layer wait for each other: nothing tells how long.
            let is_filled = legal::unfilled(&interleaved, domain.layers).is_none();
            is_filled && (c.pp > 2 || domain.layers >= c.pp * vpp)
        };
        let chunks = chunks.filter(|vpp| allow(Decision::Vpp, *vpp) && is_filled(*vpp));
        options.extend(chunks.map(|vpp| index(usual) << COUNT_BITS | vpp));
    }
}

fn offloads(domain: &SearchDomain, options: &mut Vec<u32>) {
    let places = if domain.disk { 3 } else { 2 };
    for activations in 0..places {
        for parameters in 0..places {
            for optimizer in 0..places {
                let value = optimizer + 3 * parameters + HOST_ACTIVATIONS * activations;
                if domain.limits.allow_offload(offload(value)) {
                    options.push(value);
                }
            }
        }
    }
}

/// What the options below a path depend on.
pub fn shape(domain: &SearchDomain, path: &Path) -> u64 {
    let c = configuration(domain, path);
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
            let m = microbatches(domain, &c);
            let rounds = u(m.min(2 * c.pp)) * 2 + u(u32::from(m.is_multiple_of(c.pp)));
            let axes = if path.values().len() == 7 { 0 } else { u(c.tp) << 32 | u(c.cp) };
            vec![u(c.pp), u(c.dp) * u(c.cp), copies, rounds, axes]
        }
        8 => vec![u(c.pp), u(c.dp) * u(c.cp), copies, u(c.vpp)],
        _ => vec![u(c.pp), u(c.vpp), u(u32::from(c.offload.activations != Place::Device))],
    };
    // The rules of a tool depend on all that is decided but the micro-batch, which is in `rounds`.
    let decided = path.values().iter().enumerate().filter(|(at, _)| {
        domain.limits.target().is_some() && STEPS.get(*at) != Some(&Step::Microbatch)
    });
    // Where ranks of `tp` share experts, they share tokens.
    let is_open = (4..6).contains(&path.values().len());
    let shares_tokens = is_open && domain.of_plans && sharing_of(&c).takes_tp;
    let parts = parts.into_iter().chain(decided.map(|(_, value)| u(*value)));
    let parts = parts.chain(shares_tokens.then_some(u64::MAX));
    parts.fold(0, |hash, part| mix(hash.wrapping_add(part).wrapping_add(1)))
}
