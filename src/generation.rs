//! Generation: a description and weights to tokens.
//!
//! ```text
//! description ─decoding→ modules, one per length ─plan→ one plan
//! modules × plan ─compile→ one program ─start→ a decoder of each replica
//! ```
//!
//! All lengths share weights and caches, so they share a plan: it is made for one token at a time,
//! where no sharding cuts the sequence.

use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use codegen::compile::Compiled;
use codegen::inference::{compile_entries, forwards_of};
use codegen::prepare::prepare_inference_as;
use ir::ids::Ids;
use ir::import::{DecodingOptions, Description, LogitsOf, Model, decoding};
use ir::plan::buckets::usual_buckets;
use ir::precision::Precision;
use ir::{DType, Diagnostic, Mesh, Module, Plan, Span, Target};
use planner::cluster::Cluster;
use planner::footprint::Footprint;
use planner::inference::Replicas;
use runtime::beams::{BeamSearch, Hypothesis};
use runtime::decode::Decoder;
use runtime::execute::{self, Classes, Session};
use runtime::generate::{Ending, Sampling};
use runtime::in_flight::{self, Continuation, Request};
use runtime::processes::Peers;
use runtime::trace::Tracing;

use crate::failure::{Failure, usage};
use crate::processes::lead;

/// The entry that reads tokens at a position.
pub const DECODE: &str = "decode";

/// How a generator runs; there are no defaults.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// Tokens of a slot's KV cache.
    pub capacity: usize,
    /// Slots of a replica, at least one. Prefill takes one prompt at a time.
    pub sequences: usize,
    /// The mesh: replicas along `dp`, each with requests of its own.
    pub mesh: Mesh,
    /// The element type of weights, caches and activations.
    pub dtype: DType,
    /// Threads of one rank.
    pub threads_per_rank: usize,
    /// What kernels are compiled for: GPUs of this machine, or its cores where there is none.
    pub target: Option<Target>,
}

/// A model with a module per prefill bucket.
#[derive(Clone, Debug)]
pub struct Pieces {
    /// The model; its entry is that for one token.
    pub model: Model,
    /// For each bucket, ascending from 1, the prepared module.
    pub modules: Vec<(usize, Module)>,
}

impl Pieces {
    /// The modules of prefill buckets, the first of one token, with KV caches of `capacity` tokens.
    ///
    /// # Errors
    /// A description without decoding, or for shorter sequences.
    pub fn of(
        description: &Description,
        buckets: &[usize],
        capacity: usize,
        precision: &Precision,
    ) -> Result<Pieces, Failure> {
        let mut modules = Vec::new();
        let mut model = None;
        for tokens in buckets.iter().copied() {
            let dtype = precision.accumulate;
            let wanted = DecodingOptions { tokens, capacity, dtype, logits: LogitsOf::Last };
            let found = decoding(description, &wanted)?.model;
            modules.push((tokens, prepare_inference_as(found.module.clone(), DECODE, precision)?));
            model.get_or_insert(found);
        }
        let model = model.expect("there is an entry for one token");
        Ok(Pieces { model, modules })
    }

    /// The programs of a replica.
    ///
    /// # Errors
    /// A plan that is not of the model.
    pub fn compile(&self, plan: &Plan) -> Result<Programs, Failure> {
        let forwards = forwards_of(&self.modules, DECODE, &[plan.microbatch_size]);
        Ok(Programs(compile_entries(&forwards, plan)?))
    }
}

/// The programs of a replica, with their kernels.
#[derive(Debug)]
pub struct Programs(Compiled);

impl Programs {
    /// The footprint of each class of ranks, where all replicas together have `ranks` ranks.
    pub fn footprints(&self, cluster: &Cluster, ranks: usize) -> Vec<Footprint> {
        let threads = cluster.threads(cluster.ranks_per_node(ranks));
        Footprint::of_all(&self.0.programs, &self.0.kernels, cluster.target(), threads)
    }
}

/// The other processes that ranks are in.
pub struct Others {
    /// They.
    pub peers: Peers,
    /// Threads of a rank in each, where they are not its share of the cores.
    pub threads: Option<usize>,
}

/// Refuses replicas in several processes: each has a session of its own, and one is led.
fn check_one_replica(plan: &Plan) -> Result<(), Failure> {
    let replicas = plan.mesh.dp;
    if replicas == 1 {
        return Ok(());
    }
    let headline = format!("{replicas} replicas do not share processes yet");
    let help = "start the processes of each replica apart, with a part of the prompts";
    Err(usage("--dp", headline).help(help).into())
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
        Generator::among(description, options, None, fill)
    }

    /// As [`Generator::new`], with ranks in other processes too, which this one leads.
    ///
    /// # Errors
    /// As there, and those of [`lead`]; replicas in several processes.
    pub fn among(
        description: &Description,
        options: &Options,
        others: Option<Others>,
        fill: &mut dyn FnMut(&mut Session, &Model) -> Result<(), Failure>,
    ) -> Result<Generator, Failure> {
        let Options { capacity, sequences, mesh, dtype, threads_per_rank, target } = *options;
        let precision = Precision::uniform(dtype);
        let pieces = Pieces::of(description, &usual_buckets(capacity), capacity, &precision)?;
        let Pieces { model, modules } = &pieces;
        let (model, slots) = (&model.name, sequences);
        let replicas = Replicas { model, modules, entry: DECODE, mesh, slots, capacity, precision };
        let plan = Plan { target, ..replicas.plan()? };
        let programs = pieces.compile(&plan)?;
        Generator::start(pieces, plan, programs, (threads_per_rank, others), fill)
    }

    /// Starts the ranks of a plan of inference with what [`Pieces::compile`] made of it; as
    /// [`Generator::among`].
    ///
    /// # Errors
    /// Those of `fill`; ranks that cannot start.
    pub fn start(
        Pieces { model, modules }: Pieces,
        plan: Plan,
        Programs(Compiled { programs, kernels }): Programs,
        (threads_per_rank, others): (usize, Option<Others>),
        fill: &mut dyn FnMut(&mut Session, &Model) -> Result<(), Failure>,
    ) -> Result<Generator, Failure> {
        let ids = Ids::of(&modules[0].1, DECODE);
        let mesh = plan.replica().mesh;
        let classes = Classes { programs, kernels, mesh, ids };
        if let Some(Others { peers, threads }) = others {
            check_one_replica(&plan)?;
            let mut session = lead(classes, plan.target, threads, (None, None), peers)?;
            fill(&mut session, &model)?;
            return Ok(Generator { model, plan, decoders: vec![Decoder::new(session)] });
        }
        let classes = Arc::new(classes);
        let how = execute::Options {
            threads_per_rank,
            deadline: crate::deadline(None),
            tracing: Tracing::None,
            disk: None,
        };
        let ranks = mesh.ranks();
        let all = ranks * plan.mesh.dp;
        let gpus = crate::gpus(plan.target, (0..all, all), &classes.kernels)?;
        let mut decoders = Vec::new();
        for replica in 0..plan.mesh.dp {
            let mut session = match &gpus {
                Some(gpus) => {
                    let own = gpus.some(replica * ranks..(replica + 1) * ranks);
                    Session::start_on_gpus(classes.clone(), &how, &own)?
                }
                None => Session::start(classes.clone(), &how)?,
            };
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

    /// Processes requests on all replicas with in-flight batching. `each` is called with every
    /// request that ends: its number, and its output or its error.
    ///
    /// # Errors
    /// `E4023` for a token that the model does not have; a rank fails.
    pub fn continue_all(
        &mut self,
        requests: &[Request],
        each: &mut (dyn FnMut(usize, Result<Continuation, runtime::Failure>) + Send),
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

    /// As [`Session::end_with`].
    pub fn end_with(&self, code: u8) {
        self.decoders.iter().for_each(|decoder| decoder.end_with(code));
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
