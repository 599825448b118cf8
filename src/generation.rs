//! Generation: a description and weights to tokens.
//!
//! ```text
//! description ─decoding→ modules, one per length ─plan→ one plan
//! modules × plan ─compile→ one program ─start→ decoder
//! ```
//!
//! All lengths share weights and caches, so they share a plan: it is made for one token at a time,
//! where no sharding cuts the sequence.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use codegen::calls::Calls;
use codegen::compile::Compiled;
use codegen::inference::{Forward, compile_entries};
use codegen::prepare::prepare_inference_as;
use ir::ids::Ids;
use ir::import::{DecodingOptions, Description, LogitsOf, Model, decoding};
use ir::plan::{ContextForm, FunctionPlan, Keep, Offload, Optimizer, Schedule, Zero};
use ir::precision::Precision;
use ir::sharding::pieces;
use ir::{DType, Diagnostic, ExpertParallel, Mesh, Module, Plan, Span};
use planner::link::Link;
use planner::shard::{self, Rates};
use runtime::beams::{BeamSearch, Hypothesis};
use runtime::decode::Decoder;
use runtime::execute::{self, Classes, Session};
use runtime::generate::{Ending, Sampling};
use runtime::in_flight::{self, Continuation, Request};
use runtime::trace::Tracing;

use crate::failure::Failure;

/// The entry that reads tokens at a position.
pub const DECODE: &str = "decode";

/// The shortest piece of a prompt that has an entry of its own, besides one token. Chosen: below
/// it, padding costs next to nothing.
const BUCKET_MIN: usize = 8;

/// What options of a sharding are weighed by. Chosen: a core and the memory that it shares; only
/// their ratios matter.
const RATES: Rates = Rates {
    flops_per_s: 1e11,
    memory_bytes_per_s: 1e10,
    link: Link { latency_s: 1e-6, bandwidth_bytes_per_s: 1e10 },
};

/// How a generator runs; there are no defaults.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// Tokens of a prompt and its continuation, at most.
    pub capacity: usize,
    /// Sequences that go on side by side, at least one. Prompts are read one by one.
    pub sequences: usize,
    /// The grid of ranks. Along `dp` there are replicas, each with requests of its own.
    pub mesh: Mesh,
    /// The element type of weights, caches and activations.
    pub dtype: DType,
    /// Threads of one rank.
    pub threads_per_rank: usize,
}

/// A model that continues prompts.
pub struct Generator {
    model: Model,
    plan: Plan,
    /// One of each replica.
    decoders: Vec<Decoder>,
}

impl Generator {
    /// Compiles a model for generation and starts its ranks. `fill` writes the weights, with
    /// [`runtime::load::load_weights`] or otherwise.
    ///
    /// # Errors
    /// A description or options that do not fit, a mesh that does not, and those of `fill`.
    pub fn new(
        description: &Description,
        options: &Options,
        fill: &mut dyn FnMut(&mut Session, &Model) -> Result<(), Failure>,
    ) -> Result<Generator, Failure> {
        let precision = Precision::uniform(options.dtype);
        let mut lengths = vec![1];
        let powers = std::iter::successors(Some(BUCKET_MIN), |length| Some(2 * length));
        lengths.extend(powers.take_while(|length| *length <= options.capacity));
        let mut modules = Vec::new();
        let mut model = None;
        for tokens in lengths {
            let Options { capacity, .. } = *options;
            let dtype = precision.accumulate;
            let wanted = DecodingOptions { tokens, capacity, dtype, logits: LogitsOf::Last };
            let found = decoding(description, &wanted)?.model;
            modules.push((tokens, prepare_inference_as(found.module.clone(), DECODE, &precision)?));
            model.get_or_insert(found);
        }
        let model = model.expect("there is an entry for one token");
        let replica = Mesh { dp: 1, ..options.mesh };
        let plan = plan_forward(&modules[0].1, DECODE, replica, options.sequences, 1, precision)?;
        let forward = |(tokens, module), samples| {
            let name = match samples {
                1 => format!("{DECODE}.{tokens}"),
                _ => format!("{DECODE}.{tokens}x{samples}"),
            };
            Forward { name, module, entry: DECODE, samples }
        };
        let mut entries: Vec<Forward<'_>> =
            modules.iter().map(|(tokens, module)| forward((tokens, module), 1)).collect();
        if options.sequences > 1 {
            let (tokens, module) = &modules[0];
            entries.push(forward((tokens, module), options.sequences));
        }
        let Compiled { programs, kernels } = compile_entries(&entries, &plan)?;
        let ids = Ids::of(&modules[0].1, DECODE);
        let classes = Arc::new(Classes { programs, kernels, mesh: plan.mesh, ids });
        let how = execute::Options {
            threads_per_rank: options.threads_per_rank,
            deadline: crate::deadline(None),
            tracing: Tracing::None,
            disk: None,
        };
        let mut decoders = Vec::new();
        for _ in 0..options.mesh.dp {
            let mut session = Session::start(classes.clone(), &how)?;
            fill(&mut session, &model)?;
            decoders.push(Decoder::new(session));
        }
        Ok(Generator { model, plan, decoders })
    }

    /// Continues a prompt; `each` sees every token as soon as it is chosen, and may end it.
    ///
    /// # Errors
    /// `E4060` for a prompt that is empty or too long, `E4023` for a token that the model does not
    /// have, `E4061` if no logit is finite; a rank fails.
    pub fn generate(
        &mut self,
        prompt: &[u32],
        sampling: &Sampling,
        ending: &Ending,
        each: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Vec<u32>, Failure> {
        check_known(prompt, self.model.vocab)?;
        let decoder = self.decoder();
        decoder.reset();
        Ok(runtime::generate::generate(decoder, prompt, sampling, ending, each)?)
    }

    /// The likeliest continuations of a prompt, the best first, as many as are read at once.
    ///
    /// # Errors
    /// As [`Generator::generate`].
    pub fn search(
        &mut self,
        prompt: &[u32],
        length_penalty: f64,
        ending: &Ending,
    ) -> Result<Vec<Hypothesis>, Failure> {
        check_known(prompt, self.model.vocab)?;
        let search = BeamSearch { beams: self.plan.microbatch_size, length_penalty };
        Ok(search.search(self.decoder(), prompt, ending)?)
    }

    /// Continues requests on all replicas, side by side on each; `each` is told of every one that
    /// ends, with its number, as soon as it does.
    ///
    /// # Errors
    /// As [`Generator::generate`], of a request that fails.
    pub fn continue_all(
        &mut self,
        requests: &[Request],
        each: &mut (dyn FnMut(usize, Continuation) + Send),
    ) -> Result<(), Failure> {
        for request in requests {
            check_known(&request.prompt, self.model.vocab)?;
        }
        let waiting = Mutex::new(requests.iter().cloned().enumerate());
        let each = Mutex::new(each);
        let work = |decoder: &mut Decoder| {
            let mut next = || lock(&waiting).next();
            in_flight::continue_all(decoder, &mut next, &mut |at, one| lock(&each)(at, one))
        };
        std::thread::scope(|scope| {
            let replicas: Vec<_> =
                self.decoders.iter_mut().map(|decoder| scope.spawn(|| work(decoder))).collect();
            replicas.into_iter().try_for_each(|replica| {
                replica.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })
        })?;
        Ok(())
    }

    /// The model; its entry is that for one token.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The plan of all lengths.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// What reads tokens on the first replica: for timing, and for logits without sampling.
    pub fn decoder(&mut self) -> &mut Decoder {
        &mut self.decoders[0]
    }
}

/// What a mutex guards; a replica that panicked ends the run.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a model has all tokens of a prompt.
fn check_known(prompt: &[u32], vocab: usize) -> Result<(), Failure> {
    let unknown = prompt.iter().enumerate().find(|(_, token)| **token as usize >= vocab);
    if let Some((at, token)) = unknown {
        let headline = format!("token {at} of the prompt is {token}; the model has {vocab} tokens");
        let wrong = Diagnostic::error("E4023", Span::of("--prompt"), headline);
        return Err(wrong.help("use the model's own tokeniser").into());
    }
    Ok(())
}

/// A plan for an entry that only runs forward, on a mesh that is given: layers are cut over `tp`
/// as is cheapest, stages hold equal numbers of calls. `samples` are those of one rank.
///
/// # Errors
/// `E2001` when the entry is no list of calls, `E3101` when the mesh does not fit the model.
pub fn plan_forward(
    module: &Module,
    entry: &str,
    mesh: Mesh,
    samples: usize,
    seq: usize,
    precision: Precision,
) -> Result<Plan, Failure> {
    let calls = Calls::of(module, entry);
    let calls = calls
        .map_err(|why| Diagnostic::error("E2001", Span::of(format!("@{entry}")), why))?
        .calls
        .len();
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
        .map(|(name, shardings)| (name, FunctionPlan::new(Keep::None, shardings)))
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
        seq,
        precision,
        schedule: Schedule::OneForwardOneBackward,
        stage_ends: stages.iter().map(|piece| piece.start + piece.size).collect(),
        context: ContextForm::default(),
        experts: ExpertParallel::NONE,
        zero: Zero::default(),
        offload: Offload::default(),
        optimizer: Optimizer::Sgd { decay: 0.0, decay_biases: 0.0 },
        clip: None,
        lora: None,
        functions,
        predictions: BTreeMap::new(),
    })
}
