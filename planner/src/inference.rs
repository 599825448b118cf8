//! The search for plans of inference on the ranks of CPUs: every mesh and number of slots is
//! compiled, so that times and bytes are those of the programs.
//!
//! The decode steps of a mesh for all numbers of slots are compiled together, since they share
//! layers. A replica prefills one prompt at a time; a decode step gives a token to every slot.

use std::collections::BTreeMap;

use codegen::compile::Compiled;
use codegen::inference::{compile_entries, forwards_of};
use ir::plan::buckets::pieces_of;
use ir::plan::{
    ContextForm, FunctionPlan, Keep, Offload, Optimizer, Prediction, Purpose, Schedule, Zero,
};
use ir::precision::Precision;
use ir::program::Contents;
use ir::sharding::pieces;
use ir::{Diagnostic, ExpertParallel, Mesh, Module, Plan, Program, Span};
use kernels::Bytes;

use crate::cluster::Cluster;
use crate::compiled::{self, Usable};
use crate::footprint::{Footprint, fullest};
use crate::limits::Limits;
use crate::link::Link;
use crate::price::{LaunchPrice, Prices};
use crate::shard::{self, Rates};
use crate::simulate::simulate_entry;

/// Numbers of slots that are compared. Chosen: beyond the last, matrix products are compute-bound
/// on any CPU.
const SLOTS: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];

/// Rates that shardings are compared with. Chosen: a core and the memory that it shares; only their
/// ratios matter.
const RATES: Rates = Rates {
    flops_per_s: 1e11,
    memory_bytes_per_s: 1e10,
    link: Link { latency_s: 1e-6, bandwidth_bytes_per_s: 1e10 },
};

/// A request for a plan of inference.
#[derive(Clone, Debug)]
pub struct Job<'a> {
    /// For each prefill bucket, ascending from 1, the prepared module.
    pub modules: &'a [(usize, Module)],
    /// Their entry.
    pub entry: &'a str,
    /// The model's name.
    pub model: String,
    /// The cluster.
    pub cluster: &'a Cluster,
    /// The ranks, all of which are used.
    pub ranks: usize,
    /// Tokens of a slot's KV cache.
    pub capacity: usize,
    /// The element types, which the modules have.
    pub precision: Precision,
    /// What the user fixes and forbids.
    pub limits: Limits,
    /// Concurrent sequences over all replicas; none for the best number.
    pub sequences: Option<usize>,
    /// The objective to maximise.
    pub aim: Aim,
    /// Upper limits on the seconds per output token and to the first token.
    pub within_s: [Option<f64>; 2],
}

/// The objective of a search for inference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Aim {
    /// Prefill throughput in tokens per second.
    Prefill {
        /// Tokens of a prompt.
        prompt: usize,
    },
    /// Decode throughput in tokens per second, without prefill.
    Decode {
        /// Tokens of a prompt.
        prompt: usize,
    },
    /// Output tokens per second with in-flight batching of equal requests.
    Requests {
        /// Tokens of a prompt.
        prompt: usize,
        /// New tokens.
        output: usize,
    },
}

impl Aim {
    /// Tokens of a prompt.
    fn prompt(self) -> usize {
        match self {
            Aim::Prefill { prompt } | Aim::Decode { prompt } | Aim::Requests { prompt, .. } => {
                prompt
            }
        }
    }
}

/// A mesh with a number of slots, priced.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Way {
    /// The mesh: replicas along `dp`.
    pub mesh: Mesh,
    /// Slots of a replica.
    pub slots: usize,
    /// Seconds to prefill a prompt.
    pub prompt_s: f64,
    /// Seconds per output token of a sequence, with all slots taken; with requests in flight it
    /// includes the prefill of others in between.
    pub token_s: f64,
    /// The objective value: tokens per second over all replicas.
    pub tokens_per_s: f64,
    /// Upper bound on the memory in use on the fullest node or rank.
    pub need: Bytes,
    /// The memory of that node or rank.
    pub have: Bytes,
    /// Whether latency is within the limits.
    pub is_soon: bool,
}

impl Way {
    /// Whether memory and latency are within the limits.
    pub fn fits(&self) -> bool {
        self.has_room() && self.is_soon
    }

    /// Whether memory is within the limit.
    pub fn has_room(&self) -> bool {
        self.need <= self.have
    }
}

/// All meshes with their best number of slots, and the plan of the best.
#[derive(Clone, Debug)]
pub struct Found {
    /// The plan, with predictions; none where nothing fits.
    pub plan: Option<Plan>,
    /// One per mesh, with its best number of slots: those that fit first, then by throughput.
    pub ways: Vec<Way>,
}

/// Finds the mesh and the number of slots with the highest throughput.
///
/// # Errors
/// `E3203` when the limits leave no mesh; `E3204` when the model cannot use the ranks; what
/// sharding and compiling report.
pub fn search(job: &Job<'_>) -> Result<Found, Diagnostic> {
    let module = &job.modules[0].1;
    // Replicas share no batch, so that any number of them is allowed.
    let of_ranks = compiled::Job {
        module,
        entry: job.entry,
        model: job.model.clone(),
        cluster: job.cluster,
        ranks: job.ranks,
        global_batch_size: job.ranks,
        seq: 1,
        precision: job.precision,
        optimizer: Optimizer::None,
        clip: None,
        lora: None,
        limits: job.limits.clone(),
        evaluations_max: 0,
    };
    let usable = Usable::of(&of_ranks)?;
    usable.check(&of_ranks)?;
    let meshes = usable.meshes(&of_ranks, job.ranks);
    if meshes.is_empty() {
        let headline = format!("`{}` leaves no mesh of {} ranks", job.limits, job.ranks);
        let help = "leave out a limit: replicas have tp · pp ranks each";
        return Err(Diagnostic::error("E3203", Span::of("--fix"), headline).help(help));
    }
    let ways = meshes.into_iter().map(|mesh| best_way(job, mesh));
    let mut ways = ways.collect::<Result<Vec<Way>, Diagnostic>>()?;
    ways.sort_by(|a, b| {
        let sorted = b.tokens_per_s.total_cmp(&a.tokens_per_s);
        let least = a.need.cmp(&b.need);
        b.fits().cmp(&a.fits()).then(if a.fits() { sorted } else { least })
    });
    let best = ways.first().filter(|way| way.fits());
    let plan = best.map(|way| planned(job, way)).transpose()?;
    Ok(Found { plan, ways })
}

/// The plan of a mesh and a number of slots, compiled for its exact arena.
fn planned(job: &Job<'_>, way: &Way) -> Result<Plan, Diagnostic> {
    let mut plan = plan_replicas(job, way.mesh, way.slots)?;
    let Compiled { programs, .. } =
        compile_entries(&forwards_of(job.modules, job.entry, &[way.slots]), &plan)?;
    let arena = programs.iter().map(|program| program.arena_bytes).max().unwrap_or(0);
    let origin = Prices::new(job.cluster, way.mesh).origin().name();
    for (name, value, origin) in [
        ("token_s", way.token_s, origin),
        ("prompt_s", way.prompt_s, origin),
        ("tokens_per_s", way.tokens_per_s, origin),
        ("arena_bytes", arena as f64, "derived"),
    ] {
        let prediction = Prediction { value, origin: origin.to_owned() };
        plan.predictions.insert(name.to_owned(), prediction);
    }
    Ok(plan)
}

/// The best number of slots of a mesh.
fn best_way(job: &Job<'_>, mesh: Mesh) -> Result<Way, Diagnostic> {
    let slots = match (job.sequences, job.aim) {
        (_, Aim::Prefill { .. }) => vec![1],
        (Some(all), _) => vec![all.div_ceil(mesh.dp).max(1)],
        (None, _) => SLOTS.to_vec(),
    };
    let most = slots.iter().copied().max().unwrap_or(1);
    let plan = plan_replicas(job, mesh, most)?;
    let compiled = compile_entries(&forwards_of(job.modules, job.entry, &slots), &plan)?;
    let timed = Timed::new(job, mesh, &slots, &compiled);
    let ways = slots.iter().map(|slots| {
        let way = timed.way(*slots);
        if way.need <= way.have || timed.slots.len() == 1 {
            return Ok(way);
        }
        // Compiled with other numbers of slots, the bytes are an upper bound.
        let plan = plan_replicas(job, mesh, *slots)?;
        let alone = compile_entries(&forwards_of(job.modules, job.entry, &[*slots]), &plan)?;
        let exact = Timed::new(job, mesh, &[*slots], &alone).bytes(*slots);
        Ok(Way { need: exact.0, ..way })
    });
    let ways = ways.collect::<Result<Vec<Way>, Diagnostic>>()?;
    let better = |a: Way, b: Way| {
        let is_better = match (a.fits(), b.fits()) {
            (true, true) => b.tokens_per_s > a.tokens_per_s,
            (false, false) => b.need < a.need,
            (_, b_fits) => b_fits,
        };
        if is_better { b } else { a }
    };
    Ok(ways.into_iter().reduce(better).expect("there is a number of slots"))
}

/// The programs of a mesh with their times.
struct Timed<'a> {
    job: &'a Job<'a>,
    mesh: Mesh,
    prices: Prices<'a>,
    /// The numbers of slots whose decode steps are compiled.
    slots: &'a [usize],
    compiled: &'a Compiled,
    launches: Vec<LaunchPrice>,
    footprints: Vec<Footprint>,
}

impl<'a> Timed<'a> {
    fn new(job: &'a Job<'a>, mesh: Mesh, slots: &'a [usize], compiled: &'a Compiled) -> Timed<'a> {
        let prices = Prices::new(job.cluster, mesh);
        let launches = compiled.kernels.iter().map(|kernel| prices.launch(kernel)).collect();
        let threads = job.cluster.threads(job.cluster.ranks_per_node(mesh.ranks()));
        let target = job.cluster.target();
        let Compiled { programs, kernels } = compiled;
        let footprints = Footprint::of_all(programs, kernels, target, threads);
        Timed { job, mesh, prices, slots, compiled, launches, footprints }
    }

    /// Seconds of an entry, while all replicas run it.
    fn seconds(&self, entry: usize) -> f64 {
        let programs = &self.compiled.programs;
        simulate_entry(&self.prices, self.mesh, programs, &self.launches, entry).seconds
    }

    /// Prices a number of slots.
    fn way(&self, slots: usize) -> Way {
        let Job { modules, aim, capacity, within_s, .. } = self.job;
        let buckets: Vec<usize> = modules.iter().map(|(tokens, _)| *tokens).collect();
        let of_pieces = pieces_of(&buckets, aim.prompt(), *capacity).into_iter();
        let bucket = |piece: usize| buckets.partition_point(|shorter| *shorter < piece);
        let prompt_s = of_pieces.map(|piece| self.seconds(bucket(piece))).sum();
        let behind = self.slots.iter().filter(|other| **other > 1).position(|n| *n == slots);
        let step_s = self.seconds(behind.map_or(0, |at| modules.len() + at));
        // With fewer sequences than slots, some slots or replicas are idle.
        let most = slots * self.mesh.dp;
        let sequences = self.job.sequences.map_or(most, |all| all.min(most)) as f64;
        let busy = sequences / most as f64 * self.mesh.dp as f64;
        // Prefill gives the first output token, a decode step each further one. The prefill of the
        // next request stalls the other slots.
        let (side_by_side, further) = (slots as f64, |output: usize| (output.max(1) - 1) as f64);
        let (token_s, tokens_per_s) = match *aim {
            Aim::Prefill { prompt } => {
                let reading = self.job.sequences.map_or(self.mesh.dp, |all| all.min(self.mesh.dp));
                (step_s, reading as f64 * prompt as f64 / prompt_s)
            }
            Aim::Decode { .. } => (step_s, sequences / step_s),
            Aim::Requests { output, .. } => {
                let of_request = prompt_s + further(output) * step_s / side_by_side;
                let waits = side_by_side * prompt_s / further(output).max(1.0);
                (step_s + waits, busy * output as f64 / of_request)
            }
        };
        let is_within = |seconds: f64, limit: Option<f64>| limit.is_none_or(|most| seconds <= most);
        let is_prefill = matches!(aim, Aim::Prefill { .. });
        let (need, have) = self.bytes(slots);
        Way {
            mesh: self.mesh,
            slots,
            prompt_s,
            token_s,
            tokens_per_s,
            need,
            have,
            is_soon: (is_prefill || is_within(token_s, within_s[0]))
                && is_within(prompt_s, within_s[1]),
        }
    }

    /// Memory in use on the fullest node or rank with a number of slots, an upper bound where other
    /// numbers are compiled too, and the memory that it has.
    fn bytes(&self, slots: usize) -> (Bytes, Bytes) {
        let Job { cluster, limits, .. } = self.job;
        let memory = cluster.memory().limited(limits.memory_bytes());
        let classes = self.footprints.iter().zip(&self.compiled.programs);
        let footprints: Vec<Footprint> =
            classes.map(|(footprint, program)| of(footprint, program, slots)).collect();
        fullest(&footprints, self.mesh.dp, (memory, cluster.nodes))
    }
}

/// The footprint of a rank without the KV caches for other numbers of slots: an upper bound, since
/// fewer entries need less scratch memory.
fn of(footprint: &Footprint, program: &Program, slots: usize) -> Footprint {
    let is_other = |samples: usize| samples != 1 && samples != slots;
    let others = program.buffers.iter().filter(|buffer| {
        matches!(buffer.contents, Contents::Cache(_))
            && buffer.sizes.first().is_some_and(|s| is_other(*s))
    });
    let bytes: u64 = others.map(|buffer| buffer.bytes).sum();
    let (caches, arena) = (footprint.caches - bytes, footprint.arena - bytes);
    Footprint { caches, arena, ..*footprint }
}

/// The plan of replicas on a mesh.
fn plan_replicas(job: &Job<'_>, mesh: Mesh, slots: usize) -> Result<Plan, Diagnostic> {
    let replicas = Replicas {
        model: &job.model,
        modules: job.modules,
        entry: job.entry,
        mesh,
        slots,
        capacity: job.capacity,
        precision: job.precision,
    };
    let plan = replicas.plan()?;
    Ok(Plan { cluster: job.cluster.describe(), target: job.cluster.target(), ..plan })
}

/// Replicas of a model on a mesh that is given.
#[derive(Clone, Copy, Debug)]
pub struct Replicas<'a> {
    /// The model's name.
    pub model: &'a str,
    /// As those of a [`Job`].
    pub modules: &'a [(usize, Module)],
    /// Their entry.
    pub entry: &'a str,
    /// The mesh: replicas along `dp`.
    pub mesh: Mesh,
    /// Slots of a replica.
    pub slots: usize,
    /// Tokens of a slot's KV cache.
    pub capacity: usize,
    /// The element types, which the modules have.
    pub precision: Precision,
}

impl Replicas<'_> {
    /// Their plan, for no cluster.
    ///
    /// # Errors
    /// Those of [`plan_forward`].
    pub fn plan(&self) -> Result<Plan, Diagnostic> {
        let Replicas { modules, entry, mesh, slots, precision, .. } = *self;
        let replica = Mesh { dp: 1, ..mesh };
        let plan = plan_forward(&modules[0].1, entry, replica, [slots, 1], precision)?;
        let buckets = modules.iter().map(|(tokens, _)| *tokens).collect();
        Ok(Plan {
            model: self.model.to_owned(),
            mesh,
            seq: self.capacity,
            purpose: Purpose::Inference { buckets },
            ..plan
        })
    }
}

/// A plan for an entry that only runs forward, on a mesh that is given: layers are cut over `tp`
/// as is cheapest, stages hold equal numbers of calls. `samples` are those of one rank, `tokens`
/// those of each.
///
/// # Errors
/// `E3103` when there is no such entry, `E3101` when the mesh does not fit the model.
pub fn plan_forward(
    module: &Module,
    entry: &str,
    mesh: Mesh,
    [samples, tokens]: [usize; 2],
    precision: Precision,
) -> Result<Plan, Diagnostic> {
    let calls = shard::layers(module, entry)?.iter().map(|layer| layer.calls).sum();
    let Mesh { pp, dp, tp, .. } = mesh;
    let wanted = shard::Request {
        module,
        entry,
        dp,
        cp: 1,
        tp,
        experts: ExpertParallel::NONE,
        microbatch_size: samples,
        sequence: false,
        rates: RATES,
    };
    let functions: BTreeMap<String, FunctionPlan> = shard::shard(&wanted)?
        .functions
        .into_iter()
        .map(|(name, shardings)| (name, FunctionPlan::new(Keep::None, shardings).on(mesh)))
        .collect();
    let stages = pieces(calls, 1, pp).ok_or_else(|| {
        let headline = format!("{calls} calls cannot be cut into pp={pp} stages");
        Diagnostic::error("E3101", Span::of("--pp"), headline)
            .help(format!("use a pp of at most {calls}"))
    })?;
    Ok(Plan {
        model: module.name.clone(),
        cluster: String::new(),
        target: None,
        mesh,
        microbatch_size: samples,
        microbatch_count: 1,
        seq: tokens,
        purpose: Purpose::Training,
        precision,
        schedule: Schedule::OneForwardOneBackward,
        stage_ends: stages.iter().map(|piece| piece.start + piece.size).collect(),
        context: ContextForm::default(),
        experts: ExpertParallel::NONE,
        zero: Zero::default(),
        offload: Offload::default(),
        optimizer: Optimizer::None,
        clip: None,
        lora: None,
        functions,
        predictions: BTreeMap::new(),
    })
}

#[cfg(test)]
mod tests {
    use codegen::prepare::prepare_inference_as;
    use ir::DType;
    use ir::import::{DecodingOptions, LogitsOf, decoding, read_config};
    use ir::plan::buckets::usual_buckets;

    use super::*;
    use crate::check::check;
    use crate::compiled::tests::cluster;

    const CAPACITY: usize = 48;

    fn modules() -> Vec<(usize, Module)> {
        let config = r#"{"model_type": "llama", "vocab_size": 259, "max_position_embeddings": 64,
            "num_hidden_layers": 3, "hidden_size": 48, "intermediate_size": 80,
            "num_attention_heads": 4, "num_key_value_heads": 2}"#;
        let description = read_config("config.json", config, "small").unwrap();
        let module = |tokens: usize| {
            let (dtype, logits) = (DType::F32, LogitsOf::Last);
            let wanted = DecodingOptions { tokens, capacity: CAPACITY, dtype, logits };
            let module = decoding(&description, &wanted).unwrap().model.module;
            prepare_inference_as(module, "decode", &Precision::uniform(dtype)).unwrap()
        };
        usual_buckets(CAPACITY).into_iter().map(|tokens| (tokens, module(tokens))).collect()
    }

    fn job<'a>(modules: &'a [(usize, Module)], cluster: &'a Cluster, ranks: usize) -> Job<'a> {
        Job {
            modules,
            entry: "decode",
            model: "small".into(),
            cluster,
            ranks,
            capacity: CAPACITY,
            precision: Precision::uniform(DType::F32),
            limits: Limits::default(),
            sequences: None,
            aim: Aim::Decode { prompt: 20 },
            within_s: [None; 2],
        }
    }

    /// Compiled alone, each mesh and number of slots takes the time that the search says, and no
    /// more memory.
    #[test]
    fn ways_are_those_of_their_programs() {
        let (modules, cluster) = (modules(), cluster(1 << 30));
        for aim in [
            Aim::Prefill { prompt: 33 },
            Aim::Decode { prompt: 20 },
            Aim::Requests { prompt: 20, output: 12 },
        ] {
            let job = Job { aim, ..job(&modules, &cluster, 4) };
            let found = search(&job).unwrap();
            let meshes: Vec<_> = found.ways.iter().map(|way| way.mesh).collect();
            assert_eq!(meshes.len(), 5, "of tp=1 pp=1, 2, 4, and of tp=2 pp=1, 2: {meshes:?}");
            for way in &found.ways {
                let plan = plan_replicas(&job, way.mesh, way.slots).unwrap();
                let forwards = forwards_of(&modules, "decode", &[way.slots]);
                let alone = compile_entries(&forwards, &plan).unwrap();
                let slots = [way.slots];
                let own = Timed::new(&job, way.mesh, &slots, &alone).way(way.slots);
                assert!(own.need <= way.need, "{way:?}");
                assert_eq!(Way { need: way.need, ..own }, *way, "{aim:?}");
                let wrong = check(&modules[0].1, "decode", &plan.replica(), &cluster);
                assert_eq!(wrong, [], "{way:?}");
            }
            let rates: Vec<f64> = found.ways.iter().map(|way| way.tokens_per_s).collect();
            assert!(rates.is_sorted_by(|a, b| a >= b), "{rates:?}");
            let plan = found.plan.unwrap();
            let [best, ..] = found.ways[..] else { panic!("there are ways") };
            assert_eq!((plan.mesh, plan.microbatch_size), (best.mesh, best.slots));
            assert_eq!(ir::text::parse_plan("printed", &plan.to_string()), Ok(plan));
        }
    }

    /// The search takes the best number of slots, and fewer under limits of memory or latency.
    #[test]
    fn the_number_of_slots_is_the_best_within_limits() {
        let (modules, cluster) = (modules(), cluster(1 << 30));
        let job = job(&modules, &cluster, 1);
        let best = search(&job).unwrap().ways[0];
        let with =
            |slots: usize| search(&Job { sequences: Some(slots), ..job.clone() }).unwrap().ways[0];
        let all: Vec<Way> = SLOTS.iter().map(|slots| with(*slots)).collect();
        let most = all.iter().map(|way| way.tokens_per_s).fold(0.0, f64::max);
        assert_eq!(best.tokens_per_s, most, "{all:?}");
        assert!(all.is_sorted_by(|a, b| a.need < b.need && a.token_s < b.token_s), "{all:?}");
        let [few, .., many] = all[..] else { panic!("there are several") };
        let limits = Limits::parse(&[], &[], &[format!("memory={}B", few.need.0)]).unwrap();
        let small = search(&Job { limits, ..job.clone() }).unwrap();
        assert_eq!((small.ways[0].slots, small.plan.is_some()), (1, true));
        let within_s = [Some((few.token_s + all[1].token_s) / 2.0), None];
        let soon = search(&Job { within_s, ..job.clone() }).unwrap();
        assert_eq!((soon.ways[0].slots, soon.plan.is_some()), (1, true), "{many:?}");
        let never = search(&Job { within_s: [Some(1e-12), None], ..job.clone() }).unwrap();
        assert!(never.plan.is_none() && !never.ways[0].fits());
    }

    /// Throughput counts no more sequences than there are, and the first output token costs no
    /// decode step.
    #[test]
    fn throughput_is_of_the_sequences_that_there_are() {
        let (modules, cluster) = (modules(), cluster(1 << 30));
        let job = Job { sequences: Some(1), ..job(&modules, &cluster, 4) };
        let found = search(&job).unwrap();
        let close = |a: f64, b: f64| (a - b).abs() < 1e-9 * b;
        assert!(found.ways.iter().all(|way| close(way.tokens_per_s, 1.0 / way.token_s)));
        for (output, passes) in [(1, 0.0), (2, 1.0), (9, 8.0)] {
            let aim = Aim::Requests { prompt: 20, output };
            let decode = search(&Job { ranks: 1, ..job.clone() }).unwrap().ways[0];
            let way = search(&Job { aim, ranks: 1, ..job.clone() }).unwrap().ways[0];
            let seconds = way.prompt_s + passes * decode.token_s;
            assert!(close(way.tokens_per_s, output as f64 / seconds), "{way:?}");
        }
    }

    #[test]
    fn limits_and_ranks_that_leave_nothing_are_told() {
        let (modules, cluster) = (modules(), cluster(1 << 30));
        let job = job(&modules, &cluster, 4);
        let limits = Limits::parse(&["tp=3".to_owned()], &[], &[]).unwrap();
        let wrong = search(&Job { limits, ..job.clone() }).unwrap_err();
        assert_eq!(wrong.code, "E3203", "{wrong:?}");
    }

    /// A plan that takes a decision of training is told which.
    #[test]
    fn decisions_of_training_are_refused() {
        let (modules, cluster) = (modules(), cluster(1 << 30));
        let plan = search(&job(&modules, &cluster, 2)).unwrap().plan.unwrap();
        let sgd = Optimizer::Sgd { decay: 0.0, decay_biases: 0.0 };
        let zero = Zero { stage: 1, shard: 0 };
        let purpose = Purpose::Inference { buckets: vec![1, 64] };
        let wrongs = [
            (Plan { microbatch_count: 2, ..plan.clone() }, "micro-batches"),
            (Plan { optimizer: sgd, ..plan.clone() }, "an optimizer"),
            (Plan { clip: Some(1.0), ..plan.clone() }, "clipped"),
            (Plan { zero, ..plan.clone() }, "ZeRO"),
            (Plan { purpose, ..plan.clone() }, "a prefill bucket of 64 tokens"),
        ];
        for (wrong, said) in wrongs {
            let found = check(&modules[0].1, "decode", &wrong.replica(), &cluster);
            assert_eq!(found.iter().map(|one| one.code).collect::<Vec<_>>(), ["E3309"], "{said}");
            assert!(found[0].headline.contains(said), "{found:?}");
        }
    }
}
