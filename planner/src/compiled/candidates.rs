//! The candidates: everything that the limits allow, each with a lower bound of its time.

use codegen::specialise::attends;
use ir::plan::{Keep, Offload, Optimizer, Place, Schedule, Zero};
use ir::{Diagnostic, ExpertParallel, Mesh};

use super::bound::{Bound, Weights, bound};
use super::candidate::Candidate;
use super::keys::{Key, LayerQuery};
use super::layers::LayerTable;
use super::ranks::Usable;
use super::{Job, allows, keep_number};
use crate::divisors::divisors;
use crate::limits::{Decision, RECOMPUTE_ATTENTION, RECOMPUTE_FULL, RECOMPUTE_NONE};

/// Ways to cut the calls into stages that are all tried. Chosen: 14 calls in 4 stages are 286.
const CUTS_MAX: usize = 512;
/// As [`CUTS_MAX`], into interleaved chunks. Chosen: they add few candidates.
const CHUNK_CUTS_MAX: usize = 16;
/// As [`CUTS_MAX`], where ranks share gradients, or values are offloaded: what is exchanged or
/// copied around each call is known once a candidate is compiled, which takes a hundred times as
/// long as to time another one. Chosen: all ways to cut five calls into two stages; of more, the
/// even and the balanced one.
const SHARED_CUTS_MAX: usize = 4;

type Bounded = Vec<(Candidate, Bound)>;

/// All candidates with one of some placements of values, with their bounds, and why some meshes
/// have none.
pub(super) fn candidates(
    job: &Job<'_>,
    table: &mut LayerTable<'_>,
    offloads: &[Offload],
) -> Result<(Bounded, Option<Diagnostic>), Diagnostic> {
    let mut all = Vec::new();
    let mut failed = None;
    let usable = Usable::of(job)?;
    usable.check(job)?;
    let meshes = usable.meshes(job, job.ranks);
    let keys_of = |mesh: Mesh| (mesh, keys(job, mesh, usable.experts));
    let keys: Vec<(Mesh, Vec<Key>)> = meshes.into_iter().map(keys_of).collect();
    let asked = |key: &Key| (*key, asked(job, *key, table.layer_count()));
    let all_keys: Vec<(Key, Vec<LayerQuery>)> =
        keys.iter().flat_map(|(_, k)| k).map(asked).collect();
    table.add_all(&all_keys);
    for (mesh, keys) in keys {
        for key in keys {
            let weights = Weights::new(table.calls(), key, &usable.weights_of_experts);
            let added = table.add(key).and_then(|()| check_weights(job, table, key));
            if let Err(diagnostic) = added {
                failed.get_or_insert(diagnostic);
                continue;
            }
            for keeps in keep_sets(job, table.layer_count()) {
                match add_cuts(job, table, (mesh, &weights), (&keeps, offloads), key, &mut all) {
                    // What ranks cannot share by tokens, they may share otherwise.
                    Err(diagnostic) if key.cp > 1 => _ = failed.get_or_insert(diagnostic),
                    added => added?,
                }
            }
        }
    }
    Ok((all, failed))
}

/// What the cut of a key decides of weights: whether ranks hold whole blocks of states that have
/// scales, and whether gradients are sums over those that share samples.
fn check_weights(job: &Job<'_>, table: &mut LayerTable<'_>, key: Key) -> Result<(), Diagnostic> {
    let has_blocks = job.precision.has_coded_states() && key.tp > 1;
    if !has_blocks && key.dp == 1 {
        return Ok(());
    }
    let candidate = Candidate {
        mesh: Mesh { dp: key.dp, cp: key.cp, tp: key.tp, ..Mesh::ONE },
        experts: key.experts,
        sequence: key.sequence,
        microbatch_size: key.microbatch_size,
        keeps: vec![Keep::Full; table.layer_count()],
        stage_ends: vec![table.calls().calls.len()],
        zero: Zero::default(),
        schedule: Schedule::default(),
        offload: Offload::default(),
    };
    let plan = table.plan(&candidate)?;
    table.check_weights(&plan)
}

/// Whether there is any candidate, before anything is compiled.
pub(super) fn has_candidates(job: &Job<'_>) -> bool {
    let Ok(usable) = Usable::of(job) else { return false };
    let has_chunks = |mesh: &Mesh| {
        let keys = keys(job, *mesh, usable.experts).into_iter();
        let mut chunks = keys.flat_map(|key| chunks(job, *mesh, key, usable.stages));
        chunks.next().is_some() && !zeros(job, *mesh).is_empty()
    };
    let is_placed = |mesh: &Mesh| {
        let placed = offloads(job).concat();
        zeros(job, *mesh).iter().any(|zero| placed.iter().any(|place| lie_so(*zero, *place)))
    };
    let may = |mesh: &Mesh| has_chunks(mesh) && is_placed(mesh);
    usable.meshes(job, job.ranks).iter().any(may) && !keep_sets(job, 1).is_empty()
}

/// Whether programs share weights so and place them there: where ranks share updates alone, they
/// gather all parameters after these.
fn lie_so(zero: Zero, offload: Offload) -> bool {
    offload.parameters == Place::Device || matches!(zero.stage, 0 | 3)
}

/// Where values may lie: the placements that are looked at first, and those that are looked at
/// where these need too much memory. What lies on the host of ranks that are CPUs saves nothing, so
/// that it is placed there only where the job says so.
pub(super) fn offloads(job: &Job<'_>) -> [Vec<Offload>; 2] {
    let has_states = job.optimizer.state_count() > 0 || job.precision.master.is_some();
    let is_asked = |decision: Decision, place: Place| {
        place != Place::Host || job.limits.fixed(decision) == Some(Place::Host as usize)
    };
    let may = |offload: &Offload| {
        job.limits.allow_offload(*offload)
            && is_asked(Decision::OffloadOptimizer, offload.optimizer)
            && is_asked(Decision::OffloadParameters, offload.parameters)
            && is_asked(Decision::OffloadActivations, offload.activations)
            && (has_states || offload.optimizer == Place::Device)
    };
    let places = || Place::ALL.into_iter();
    let pairs =
        places().flat_map(|optimizer| places().map(move |parameters| (optimizer, parameters)));
    let place = |(optimizer, parameters)| {
        places().map(move |activations| Offload { optimizer, parameters, activations })
    };
    let all: Vec<Offload> = pairs.flat_map(place).filter(may).collect();
    match all.split_first() {
        Some((first, others)) if *first == Offload::default() => [vec![*first], others.to_vec()],
        Some(_) | None => [all, Vec::new()],
    }
}

/// What the candidates of a key ask of layers.
fn asked(job: &Job<'_>, key: Key, layers: usize) -> Vec<LayerQuery> {
    let adds = has_several_microbatches(job, key);
    let of_set = |keeps: Vec<Keep>| keeps.into_iter().enumerate();
    let all = keep_sets(job, layers).into_iter().flat_map(of_set);
    all.map(|(layer, keep)| (layer, keep, adds)).collect()
}

/// Whether the gradients of micro-batches are added.
fn has_several_microbatches(job: &Job<'_>, key: Key) -> bool {
    job.global_batch_size > key.dp * key.microbatch_size
}

/// Every boundary and micro-batch on a mesh, and all ways to share that many experts.
fn keys(job: &Job<'_>, mesh: Mesh, experts: usize) -> Vec<Key> {
    let Mesh { dp, cp, tp, .. } = mesh;
    let has = |sequence: &bool| {
        (!sequence || tp > 1) && allows(job, Decision::Sp, usize::from(*sequence))
    };
    let of = |(experts, sequence)| {
        let sizes = microbatches(job, dp).into_iter();
        sizes.map(move |microbatch_size| Key { dp, experts, cp, tp, sequence, microbatch_size })
    };
    let boundaries = || [false, true].into_iter().filter(has);
    let may = |way: &ExpertParallel| {
        let etp = if way.takes_tp { 1 } else { tp };
        allows(job, Decision::Ep, way.ep) && (way.ep == 1 || allows(job, Decision::Etp, etp))
    };
    let ways = boundaries().flat_map(|sequence| {
        let ways = ways_to_share(mesh, experts, sequence.then_some(job.seq)).into_iter();
        ways.filter(may).map(move |way| (way, sequence))
    });
    ways.flat_map(of).collect()
}

/// All ways to share that many experts: over `dp` and `cp` beside slices along `tp`, or over `tp`
/// too where its ranks share the tokens of a sample, equally. Ranks of `cp` share experts all or
/// none. `tokens` are those of a sample, where ranks of `tp` share them.
pub fn ways_to_share(mesh: Mesh, experts: usize, tokens: Option<usize>) -> Vec<ExpertParallel> {
    let Mesh { dp, cp, tp, .. } = mesh;
    let takes_tp = tp > 1 && tokens.is_some_and(|tokens| tokens.is_multiple_of(cp * tp));
    let fits = |way: &ExpertParallel| {
        let on_data = way.data_ranks(mesh);
        (on_data == 1 || on_data.is_multiple_of(cp)) && experts.is_multiple_of(way.ep)
    };
    let of = |on_data: usize| {
        let with = ExpertParallel { ep: on_data * tp, takes_tp: true };
        [Some(ExpertParallel::along(on_data)), takes_tp.then_some(with)].into_iter().flatten()
    };
    divisors(dp * cp).into_iter().flat_map(of).filter(fits).collect()
}

fn add_cuts(
    job: &Job<'_>,
    table: &mut LayerTable<'_>,
    (mesh, weights): (Mesh, &Weights),
    (keeps, offloads): (&[Keep], &[Offload]),
    key: Key,
    all: &mut Bounded,
) -> Result<(), Diagnostic> {
    let prices = table.call_prices(key, keeps, has_several_microbatches(job, key))?;
    let seconds: Vec<f64> = prices.iter().map(|p| p.seconds).collect();
    let chunks = chunks(job, mesh, key, seconds.len()).into_iter();
    let cut = |chunks: usize| {
        let most = if chunks == 1 { CUTS_MAX } else { CHUNK_CUTS_MAX };
        let stages = mesh.pp * chunks;
        (cuts(&seconds, stages, most), cuts(&seconds, stages, SHARED_CUTS_MAX))
    };
    for (all_cuts, few_cuts) in chunks.map(cut) {
        let may = |zero: &Zero, offload: &Offload, cut: &Vec<usize>| {
            let is_quick = zero.stage < 2 && *offload == Offload::default();
            lie_so(*zero, *offload) && (is_quick || few_cuts.contains(cut))
        };
        let zeros = zeros(job, mesh);
        let zeros = zeros.iter().flat_map(|zero| offloads.iter().map(move |place| (zero, place)));
        let each = all_cuts.iter().flat_map(|cut| zeros.clone().map(move |which| (cut, which)));
        for (stage_ends, (zero, offload)) in each.filter(|(cut, (z, place))| may(z, place, cut)) {
            let (zero, offload) = (*zero, *offload);
            let candidate = Candidate {
                mesh,
                experts: key.experts,
                sequence: key.sequence,
                microbatch_size: key.microbatch_size,
                keeps: keeps.to_vec(),
                stage_ends: stage_ends.clone(),
                zero,
                schedule: Schedule::default(),
                offload,
            };
            let bound = bound(job, weights, &prices, &candidate);
            all.push((candidate, bound));
        }
    }
    Ok(())
}

/// How many chunks a stage may have: several where stages divide the micro-batches.
fn chunks(job: &Job<'_>, mesh: Mesh, key: Key, calls: usize) -> Vec<usize> {
    let microbatches = job.global_batch_size / key.dp / key.microbatch_size;
    let goes_round = mesh.pp > 1 && microbatches.is_multiple_of(mesh.pp);
    let may = |chunks: &usize| (*chunks == 1 || goes_round) && allows(job, Decision::Vpp, *chunks);
    (1..=calls / mesh.pp).filter(may).collect()
}

/// What data-parallel ranks may share: nothing, the states of the optimizer, gradients too,
/// parameters too.
fn zeros(job: &Job<'_>, mesh: Mesh) -> Vec<Zero> {
    let has_states = mesh.data_ranks() > 1 && job.optimizer != Optimizer::None;
    let may = |zero: &Zero| {
        let stage = usize::from(zero.stage);
        allows(job, Decision::Zero, stage) && (stage == 0 || has_states)
    };
    [0, 1, 2, 3].map(|stage| Zero { stage, shard: 0 }).into_iter().filter(may).collect()
}

fn microbatches(job: &Job<'_>, dp: usize) -> Vec<usize> {
    let samples = job.global_batch_size / dp;
    let fits = |mbs: &usize| samples.is_multiple_of(*mbs) && allows(job, Decision::Mbs, *mbs);
    (1..=samples).filter(fits).collect()
}

/// What a layer may keep. Attention alone is recomputed only where that is asked for: what it saves
/// is little, where kernels do not store the scores.
fn keep_options(job: &Job<'_>) -> Vec<Keep> {
    if job.limits.fixed(Decision::Recompute) == Some(RECOMPUTE_ATTENTION) {
        return vec![Keep::AllButAttention];
    }
    let recompute = |keep: &Keep| if *keep == Keep::Full { RECOMPUTE_NONE } else { RECOMPUTE_FULL };
    let may = |keep: &Keep| {
        allows(job, Decision::Keep, keep_number(*keep))
            && allows(job, Decision::Recompute, recompute(keep))
    };
    [Keep::Full, Keep::None].into_iter().filter(may).collect()
}

/// The keep sets of layers of which attention alone is recomputed: those without it keep all.
fn without_attention(job: &Job<'_>, layers: usize) -> Vec<Keep> {
    let named = crate::shard::layers(job.module, job.entry).unwrap_or_default();
    let attends = |layer: &crate::shard::Layer| attends(job.module, &layer.name);
    let keep = |at: usize| match named.get(at).is_some_and(attends) {
        true => Keep::AllButAttention,
        false => Keep::Full,
    };
    (0..layers).map(keep).collect()
}

/// Every choice of a keep set per layer; with many layers only the uniform ones.
fn keep_sets(job: &Job<'_>, layers: usize) -> Vec<Vec<Keep>> {
    const LAYERS_MAX: usize = 4;
    let options = keep_options(job);
    if options == [Keep::AllButAttention] {
        return vec![without_attention(job, layers)];
    }
    if layers > LAYERS_MAX {
        return options.iter().map(|keep| vec![*keep; layers]).collect();
    }
    let mut sets = vec![Vec::new()];
    for _ in 0..layers {
        sets = sets
            .iter()
            .flat_map(|set: &Vec<Keep>| {
                options.iter().map(|keep| {
                    let mut set = set.clone();
                    set.push(*keep);
                    set
                })
            })
            .collect();
    }
    sets
}

/// Ways to cut calls into stages or chunks: all of them where they are no more than `most`, else an
/// even and a balanced one.
fn cuts(seconds: &[f64], stages: usize, most: usize) -> Vec<Vec<usize>> {
    let calls = seconds.len();
    // Binomial coefficient: choose where the other stages end. Each partial product divides evenly.
    let count = (1..stages).try_fold(1usize, |n, i| Some(n.checked_mul(calls - i)? / i));
    if count.is_some_and(|count| count <= most) {
        return all_cuts(calls, stages);
    }
    let mut cuts = vec![even_cut(calls, stages), balanced_cut(seconds, stages)];
    cuts.dedup();
    cuts
}

/// All ways to cut calls into stages that are not empty.
fn all_cuts(calls: usize, stages: usize) -> Vec<Vec<usize>> {
    let mut cuts: Vec<Vec<usize>> = vec![Vec::new()];
    for stage in 1..stages {
        let extend = |cut: &Vec<usize>| {
            let from = cut.last().copied().unwrap_or(0) + 1;
            let cut = cut.clone();
            (from..=calls - (stages - stage)).map(move |end| [&cut[..], &[end]].concat())
        };
        cuts = cuts.iter().flat_map(extend).collect();
    }
    cuts.iter_mut().for_each(|cut| cut.push(calls));
    cuts
}

/// Stages of as equal a number of calls as can be; the first and the last call come on top.
pub(super) fn even_cut(calls: usize, stages: usize) -> Vec<usize> {
    let extra = if calls >= stages + 2 { 1 } else { 0 };
    let inner = calls - 2 * extra;
    let mut ends: Vec<usize> = (1..=stages).map(|s| extra + s * inner / stages).collect();
    ends[stages - 1] = calls;
    ends
}

/// Stages whose slowest one is as fast as can be, of these the first that is found.
/// O(stages · calls²).
pub(super) fn balanced_cut(seconds: &[f64], stages: usize) -> Vec<usize> {
    let calls = seconds.len();
    let sum = |from: usize, to: usize| seconds[from..to].iter().sum::<f64>();
    // least[s][n]: the slowest of `s + 1` stages of the first `n` calls.
    let mut least = vec![vec![f64::INFINITY; calls + 1]; stages];
    let mut cut = vec![vec![0; calls + 1]; stages];
    for (end, slowest) in least[0].iter_mut().enumerate().skip(1) {
        *slowest = sum(0, end);
    }
    for stage in 1..stages {
        for end in stage + 1..=calls {
            for begin in stage..end {
                let slowest = least[stage - 1][begin].max(sum(begin, end));
                if slowest < least[stage][end] {
                    (least[stage][end], cut[stage][end]) = (slowest, begin);
                }
            }
        }
    }
    let mut ends = vec![calls];
    for stage in (1..stages).rev() {
        ends.push(cut[stage][ends[ends.len() - 1]]);
    }
    ends.reverse();
    ends
}
