//! Elaboration: from the name of a plan, `tp=2 pp=4 dp=8 mbs=1 sp zero=1`, to the plan.
//!
//! A name decides the mesh, the stages, the schedule, what is recomputed, sharded and offloaded.
//! What it leaves open, how each value of each function lies on the axes, follows from the
//! module alone: the search over shardings weighs options by fixed rates, so that equal names mean
//! equal plans on every cluster. [`name_of`] reads the name off a plan, and counts the decisions in
//! which the plan differs from what its name means.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;

use codegen::blocks::BLOCK;
use codegen::calls::{Calls, Operand};
use ir::lora::Lora;
use ir::plan::{ContextForm, FunctionPlan, Keep, Optimizer, Prediction};
use ir::precision::{Precision, Products};
use ir::{Axis, Diagnostic, ExpertParallel, Mesh, Module, Plan, Span, Target};
use serde::{Deserialize, Serialize};

use crate::configuration::{Configuration, Recompute};
use crate::estimate::profile::GANTLINE;
use crate::link::Link;
use crate::shard::{Rates, Request, shard};

#[cfg(test)]
pub(crate) mod tests;

/// What options are weighed by where no device is known: an accelerator of 100 TFLOP/s and 1 TB/s,
/// with links of 100 GB/s. Chosen: round numbers whose ratios are those of today's nodes.
const NOMINAL: Rates = Rates {
    flops_per_s: 1e14,
    memory_bytes_per_s: 1e12,
    link: Link { latency_s: 5e-6, bandwidth_bytes_per_s: 1e11 },
};

/// What a plan is for, beside its name.
#[derive(Clone, Debug)]
pub struct Purpose<'a> {
    /// The prepared module: composites without kernels inlined, gradient functions there.
    pub module: &'a Module,
    /// The entry, a chain of calls.
    pub entry: &'a str,
    /// The model's name.
    pub model: String,
    /// The cluster.
    pub cluster: String,
    /// What kernels are compiled for there.
    pub target: Option<Target>,
    /// Samples of a step.
    pub global_batch_size: usize,
    /// Tokens of a sample.
    pub seq: usize,
    /// The element types, which the module has.
    pub precision: Precision,
    /// The update.
    pub optimizer: Optimizer,
    /// The norm to which gradients are clipped.
    pub clip: Option<f64>,
    /// The adapters that are trained in place of the model.
    pub lora: Option<Lora>,
    /// What is predicted of the plan.
    pub predictions: BTreeMap<String, Prediction>,
}

/// Whether context-parallel ranks have as many tokens, in whole blocks where products of 8 bits sum
/// over them; else a headline and a way out.
fn check_tokens(purpose: &Purpose<'_>, pieces: usize) -> Result<(), (String, &'static str)> {
    let seq = purpose.seq;
    if !seq.is_multiple_of(pieces) {
        let headline = format!("{seq} tokens are not {pieces} equal pieces");
        return Err((headline, "use a `cp` whose double divides the tokens"));
    }
    let has_blocks = matches!(purpose.precision.products, Products::F8E4M3 | Products::F8Hybrid);
    if has_blocks && pieces > 1 && !seq.is_multiple_of(pieces * BLOCK) {
        let headline = format!("{seq} tokens are not {pieces} pieces of whole blocks of {BLOCK}");
        return Err((headline, "use a smaller `cp`, or bf16"));
    }
    Ok(())
}

/// The plan that a name means.
///
/// # Errors
/// `E3401` for a name that does not fit the model or the batch, `E3101` and `E3102` where a layer
/// cannot be split as asked, `E3405` for ranks that share experts across a part of `tp`.
pub fn elaborate(name: &Configuration, purpose: &Purpose<'_>) -> Result<Plan, Vec<Diagnostic>> {
    let error = |code, headline: String, help: &str| {
        vec![Diagnostic::error(code, Span::of(name.to_string()), headline).help(help)]
    };
    let calls = Calls::of_entry(purpose.module, purpose.entry).map_err(|one| vec![one])?;
    let layers = layers_of(&calls);
    name.check(layers.len() as u32)?;
    let mesh = mesh_of(name);
    let experts = sharing_of(name);
    check_experts(name).map_err(|(headline, help)| error("E3405", headline, help))?;
    let context = ContextForm::default();
    let pieces = context.pieces(mesh.cp);
    check_tokens(purpose, pieces).map_err(|(headline, help)| error("E3401", headline, help))?;
    let samples = purpose.global_batch_size as u64;
    let count = name.microbatch_count(samples).ok_or_else(|| {
        let headline = format!("{samples} samples are no multiple of dp · mbs");
        error("E3401", headline, "use a batch that dp · mbs divides")
    })?;
    let request = Request {
        module: purpose.module,
        entry: purpose.entry,
        dp: mesh.dp,
        cp: mesh.cp,
        tp: mesh.tp,
        experts,
        microbatch_size: name.microbatch as usize,
        sequence: name.sequence_parallel && mesh.tp > 1,
        rates: NOMINAL,
    };
    let sharded = shard(&request).map_err(|one| vec![one])?;
    let stage_ends = stage_ends(name, &calls, &layers);
    let keeps = Keeps::of(name, &calls, &layers, &stage_ends)
        .ok_or_else(|| error("E3401", "`recompute=auto` is no decision".to_owned(), "choose"))?;
    let functions = sharded.functions.into_iter().map(|(function, shardings)| {
        let plan = FunctionPlan::new(Keep::Full, shardings).on_besides(mesh, experts);
        let plan = keeps.plan(&function, plan);
        (function, plan)
    });
    Ok(Plan {
        model: purpose.model.clone(),
        cluster: purpose.cluster.clone(),
        target: purpose.target,
        mesh,
        microbatch_size: name.microbatch as usize,
        microbatch_count: count as usize,
        seq: purpose.seq,
        purpose: ir::plan::Purpose::Training,
        precision: purpose.precision,
        schedule: name.schedule,
        stage_ends,
        context,
        experts,
        zero: name.zero,
        offload: name.offload,
        optimizer: purpose.optimizer,
        clip: purpose.clip,
        lora: purpose.lora.clone(),
        functions: functions.collect(),
        predictions: purpose.predictions.clone(),
    })
}

/// How ranks share experts that a name means.
pub fn sharing_of(name: &Configuration) -> ExpertParallel {
    let takes_tp = name.ep > 1 && GANTLINE.experts.slices(name) < name.tp;
    ExpertParallel { ep: name.ep as usize, takes_tp }
}

/// Whether plans say how a name shares experts; else a headline and a way out.
fn check_experts(name: &Configuration) -> Result<(), (String, &'static str)> {
    let (experts, tp, etp) = (sharing_of(name), name.tp, GANTLINE.experts.slices(name));
    let ep = experts.ep;
    if ep > 1 && etp != 1 && etp != tp {
        let headline = format!("etp={etp} is neither 1 nor all of tp={tp}");
        return Err((headline, "use `etp=1`, or leave it out, or ask for `--name`"));
    }
    if experts.takes_tp && !name.sequence_parallel {
        let headline = format!("ep={ep} takes ranks of tp={tp}, which do not share tokens");
        return Err((headline, "add `sp`, or use an `ep` whose factors are of cp · dp"));
    }
    if ep == 1 && name.etp != 0 && etp != tp {
        let headline = format!("etp={etp}, and no ranks share experts");
        return Err((headline, "use an `ep` that is a multiple of tp, or leave `etp` out"));
    }
    if mesh_of(name).besides_experts(experts).is_none() {
        let headline = format!("ep={ep} takes a part of tp={tp}, or what is no part of cp · dp");
        return Err((headline, "use an `ep` that is a multiple of tp, or ask for `--name`"));
    }
    Ok(())
}

/// The mesh that a name means.
pub fn mesh_of(name: &Configuration) -> Mesh {
    let [pp, dp, cp, tp] = [name.pp, name.dp, name.cp, name.tp].map(|ranks| ranks as usize);
    Mesh { pp, dp, cp, tp, order: name.order }
}

/// The calls that are layers: all but a first and a last function that are called once, which are
/// the model's ends.
pub fn layers_of(calls: &Calls) -> Range<usize> {
    let names: Vec<&str> = calls.calls.iter().map(|call| call.function.as_str()).collect();
    let mut layers = 0..names.len();
    let is_once = |name: &str| names.iter().filter(|other| **other == name).count() == 1;
    if layers.len() > 1 && is_once(names[layers.end - 1]) {
        layers.end -= 1;
    }
    if layers.len() > 1 && is_once(names[0]) {
        layers.start += 1;
    }
    layers
}

/// For each chunk of a stage, one past its last call.
fn stage_ends(name: &Configuration, calls: &Calls, layers: &Range<usize>) -> Vec<usize> {
    let (depth, chunks) = (layers.len() as u32, name.pp * name.vpp);
    let mut end = layers.start;
    let mut ends: Vec<usize> = (0..chunks)
        .map(|chunk| {
            let (stage, round) = (chunk % name.pp, chunk / name.pp);
            let own = name.layers_of(depth, stage).0;
            let own = if name.vpp == 1 { own } else { name.chunk_layers(own, stage, round) };
            end += own as usize;
            end
        })
        .collect();
    ends[chunks as usize - 1] = calls.calls.len();
    ends
}

/// What calls keep, by their place in the entry.
struct Keeps<'c> {
    calls: &'c Calls,
    of_call: Vec<Keep>,
}

impl<'c> Keeps<'c> {
    /// None where the name leaves recomputation to an estimate.
    fn of(
        name: &Configuration,
        calls: &'c Calls,
        layers: &Range<usize>,
        stage_ends: &[usize],
    ) -> Option<Keeps<'c>> {
        let mut of_call = vec![Keep::Full; calls.calls.len()];
        let uniform = match name.recompute {
            Recompute::None | Recompute::Layers(_) => Keep::Full,
            Recompute::Attention => Keep::AllButAttention,
            Recompute::Full => Keep::None,
            Recompute::Auto => return None,
        };
        of_call[layers.clone()].fill(uniform);
        if let Recompute::Layers(count) = name.recompute {
            let each = (count / name.vpp.max(1)) as usize;
            let mut begin = 0;
            for end in stage_ends {
                let own = begin.max(layers.start)..(*end).min(layers.end);
                of_call[own].iter_mut().take(each).for_each(|keep| *keep = Keep::None);
                begin = *end;
            }
        }
        Some(Keeps { calls, of_call })
    }

    /// The decisions of a function with what its calls keep.
    fn plan(&self, function: &str, plan: FunctionPlan) -> FunctionPlan {
        let named = self.calls.calls.iter().zip(&self.of_call);
        let own = named.filter(|(call, _)| call.function == function);
        let keeps: Vec<Keep> = own.map(|(_, keep)| *keep).collect();
        // What most keep is said once.
        let count = |keep: Keep| keeps.iter().filter(|other| **other == keep).count();
        let keep = Keep::ALL.into_iter().rev().max_by_key(|keep| count(*keep));
        let keep = keep.unwrap_or(Keep::Full);
        let others = keeps.iter().copied().enumerate().filter(|(_, other)| *other != keep);
        FunctionPlan { keep, exceptions: others.collect(), ..plan }
    }
}

/// The name of a plan, with the number of decisions in which the plan differs from what it means.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Name {
    /// What the name says.
    pub configuration: Configuration,
    /// Decisions that are others than what the name means.
    pub differences: usize,
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.configuration)?;
        if self.differences > 0 {
            write!(f, " +{}", self.differences)?;
        }
        Ok(())
    }
}

/// The name of a legal plan of a module's entry.
///
/// # Errors
/// Those of [`elaborate`]; `E2001` when the entry is no list of calls.
pub fn name_of(module: &Module, entry: &str, plan: &Plan) -> Result<Name, Vec<Diagnostic>> {
    let calls = Calls::of_entry(module, entry).map_err(|one| vec![one])?;
    let configuration = configuration_of(module, &calls, plan);
    let purpose = Purpose {
        module,
        entry,
        model: plan.model.clone(),
        cluster: plan.cluster.clone(),
        target: plan.target,
        global_batch_size: plan.global_batch_size(),
        seq: plan.seq,
        precision: plan.precision,
        optimizer: plan.optimizer,
        clip: plan.clip,
        lora: plan.lora.clone(),
        predictions: BTreeMap::new(),
    };
    let meant = elaborate(&configuration, &purpose)?;
    let differences = differences(&calls, plan, &meant);
    Ok(Name { configuration, differences })
}

/// What a plan decides, as far as a name can say it.
fn configuration_of(module: &Module, calls: &Calls, plan: &Plan) -> Configuration {
    let decided = Configuration {
        ep: size(plan.experts.ep),
        etp: etp_of(plan.mesh, plan.experts),
        vpp: size(plan.chunks_per_stage()),
        microbatch: size(plan.microbatch_size),
        sequence_parallel: plan.mesh.tp > 1 && splits_sequence(module, calls, plan),
        zero: plan.zero,
        schedule: plan.schedule,
        offload: plan.offload,
        ..of_mesh(plan.mesh)
    };
    named(decided, calls, &plan.stage_ends, &keeps_of(calls, plan)).configuration
}

/// `etp` of a name: 0 where it goes without saying.
pub(crate) fn etp_of(mesh: Mesh, experts: ExpertParallel) -> u32 {
    let open = Configuration { ep: size(experts.ep), ..of_mesh(mesh) };
    let etp = if experts.takes_tp { 1 } else { open.tp };
    if experts.ep == 1 || GANTLINE.experts.slices(&open) == etp { 0 } else { etp }
}

fn size(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// The axes of a mesh, with all else at its default.
pub(crate) fn of_mesh(mesh: Mesh) -> Configuration {
    let Mesh { pp, dp, cp, tp, order } = mesh;
    let [pp, dp, cp, tp] = [pp, dp, cp, tp].map(size);
    Configuration { pp, dp, cp, tp, order, ..Configuration::default() }
}

/// A name of what is decided, with the stages and the recomputation that come closest to what calls
/// keep and where stages end; what it does not say of these is counted.
pub(crate) fn named(
    mut decided: Configuration,
    calls: &Calls,
    ends: &[usize],
    keeps: &[Keep],
) -> Name {
    let layers = layers_of(calls);
    if decided.vpp == 1 && stage_ends(&decided, calls, &layers) != ends {
        let mut begin = layers.start;
        let mut layers_before = |end: usize| {
            let end = end.clamp(begin, layers.end);
            size(end - std::mem::replace(&mut begin, end))
        };
        let stage_layers: Vec<u32> = ends.iter().map(|end| layers_before(*end)).collect();
        if stage_layers.iter().all(|layers| *layers > 0) {
            decided.stage_layers = stage_layers;
        }
    }
    let deepest = decided.deepest(size(layers.len()));
    let counts = (1..deepest).filter(|count| count.is_multiple_of(decided.vpp));
    let all = [Recompute::None, Recompute::Attention, Recompute::Full].into_iter();
    let all = all.chain(counts.map(Recompute::Layers));
    let differing = |recompute: Recompute| {
        let name = Configuration { recompute, ..decided.clone() };
        let meant = Keeps::of(&name, calls, &layers, ends);
        let meant = meant.map_or_else(Vec::new, |meant| meant.of_call);
        (keeps.iter().zip(&meant).filter(|(a, b)| a != b).count(), recompute)
    };
    let (keeps, recompute) = all.map(differing).min_by_key(|found| found.0).unwrap_or_default();
    let configuration = Configuration { recompute, ..decided };
    let meant = stage_ends(&configuration, calls, &layers);
    let ends = ends.iter().zip(&meant).filter(|(a, b)| a != b).count();
    Name { configuration, differences: keeps + ends }
}

/// Whether a call takes a part of the tokens of what the layer before passes on.
pub(crate) fn splits_sequence(module: &Module, calls: &Calls, plan: &Plan) -> bool {
    calls.calls.iter().any(|call| {
        let Some(function) = module.function(&call.function) else { return false };
        let Some(planned) = plan.functions.get(&call.function) else { return false };
        let passed = function.params().zip(&call.operands);
        let passed = passed.filter(|(_, operand)| matches!(operand, Operand::Value(_)));
        let sharding = |param| planned.shardings.get(&function.value(param).name);
        let shardings = passed.filter_map(|(param, _)| sharding(param));
        shardings.map(|sharding| sharding.on(Axis::Tp).cut_dim()).any(|dim| dim == Some(1))
    })
}

/// What each call of a plan keeps.
fn keeps_of(calls: &Calls, plan: &Plan) -> Vec<Keep> {
    let numbered = calls.calls.iter().zip(calls.numbers());
    let keep = |(call, number): (&codegen::calls::Call, usize)| {
        plan.functions.get(&call.function).map_or(Keep::Full, |f| f.keep_of(number))
    };
    numbered.map(keep).collect()
}

/// The decisions in which two plans of one module and mesh differ: shardings of values, what calls
/// keep, and where stages end.
fn differences(calls: &Calls, plan: &Plan, meant: &Plan) -> usize {
    let differing = |a: &FunctionPlan, b: &FunctionPlan| {
        let on = |one: &FunctionPlan| one.clone().on_besides(plan.mesh, plan.experts);
        let (a, b) = (on(a), on(b));
        let values: BTreeSet<&String> = a.shardings.keys().chain(b.shardings.keys()).collect();
        values.into_iter().filter(|name| a.shardings.get(*name) != b.shardings.get(*name)).count()
    };
    let of_values = plan.functions.iter().map(|(name, function)| {
        meant.functions.get(name).map_or(1, |other| differing(function, other))
    });
    let keeps = keeps_of(calls, plan).into_iter().zip(keeps_of(calls, meant));
    let ends = plan.stage_ends.iter().zip(&meant.stage_ends);
    of_values.sum::<usize>()
        + keeps.filter(|(a, b)| a != b).count()
        + ends.filter(|(a, b)| a != b).count()
        + plan.stage_ends.len().abs_diff(meant.stage_ends.len())
}
