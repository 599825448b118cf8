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
use std::sync::Arc;

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
use planner::shard::{Rates, Request, shard};
use runtime::beams::{BeamSearch, Hypothesis};
use runtime::decode::Decoder;
use runtime::execute::{self, Classes, Session};
use runtime::generate::{Ending, Sampling};
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
    /// Sequences that are read at once, at least one.
    pub sequences: usize,
    /// The grid of ranks. Along `dp` all ranks do the same.
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
    decoder: Decoder,
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
        let plan =
            plan_forward(&modules[0].1, DECODE, options.mesh, options.sequences, 1, precision)?;
        let entries: Vec<Forward<'_>> = modules
            .iter()
            .map(|(tokens, module)| Forward {
                name: format!("{DECODE}.{tokens}"),
                module,
                entry: DECODE,
            })
            .collect();
        let Compiled { programs, kernels } = compile_entries(&entries, &plan)?;
        let ids = Ids::of(&modules[0].1, DECODE);
        let classes = Classes { programs, kernels, mesh: plan.mesh, ids };
        let how = execute::Options {
            threads_per_rank: options.threads_per_rank,
            deadline: crate::deadline(None),
            tracing: Tracing::None,
            disk: None,
        };
        let mut session = Session::start(Arc::new(classes), &how)?;
        fill(&mut session, &model)?;
        Ok(Generator { model, plan, decoder: Decoder::new(session) })
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
        self.check_known(prompt)?;
        self.decoder.reset();
        Ok(runtime::generate::generate(&mut self.decoder, prompt, sampling, ending, each)?)
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
        self.check_known(prompt)?;
        let search = BeamSearch { beams: self.plan.microbatch_size, length_penalty };
        Ok(search.search(&mut self.decoder, prompt, ending)?)
    }

    /// Whether the model has all tokens of a prompt.
    fn check_known(&self, prompt: &[u32]) -> Result<(), Failure> {
        let vocab = self.model.vocab;
        let unknown = prompt.iter().enumerate().find(|(_, token)| **token as usize >= vocab);
        if let Some((at, token)) = unknown {
            let headline =
                format!("token {at} of the prompt is {token}; the model has {vocab} tokens");
            let wrong = Diagnostic::error("E4023", Span::of("--prompt"), headline);
            return Err(wrong.help("use the model's own tokeniser").into());
        }
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

    /// What reads tokens: for timing, and for logits without sampling.
    pub fn decoder(&mut self) -> &mut Decoder {
        &mut self.decoder
    }
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
    let request = Request {
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
    let functions: BTreeMap<String, FunctionPlan> = shard(&request)?
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
