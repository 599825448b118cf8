//! The layers of a job, sharded and priced once for each way to cut them, and the plans that are
//! made of them.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use codegen::calls::{Calls, Operand};
use codegen::compile::Compiler;
use codegen::partition::Place;
use codegen::routines::Layer;
use ir::plan::{FunctionPlan, Keep};
use ir::program::{Instruction, Routine};
use ir::{Diagnostic, Mesh, Plan, Program, Sharding, Span};

use super::{Candidate, Job, Scored, assemble};
use crate::footprint::{Footprint, fullest};
use crate::price::{LaunchPrice, Prices};
use crate::shard::{Rates, Request, Sharded, shard};
use crate::simulate::simulate;

/// What the shardings and the routines of layers depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) dp: usize,
    pub(super) tp: usize,
    pub(super) sequence: bool,
    pub(super) microbatch_size: usize,
}

/// What a call of a layer takes, forward and backward together, when nobody waits.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct CallPrice {
    /// Kernels and collectives of the first tensor-parallel rank.
    pub(super) seconds: f64,
    /// Kernels of all tensor-parallel ranks together, at least.
    pub(super) compute_s: f64,
    /// Bytes that the first rank keeps from forward to backward.
    pub(super) kept_bytes: u64,
    /// Bytes that all tensor-parallel ranks keep together, at least.
    pub(super) kept_bytes_of_all: u64,
}

/// The layer, what it keeps, and whether its gradients are added.
type Variant = (Key, usize, Keep, bool);

/// What the program of one class depends on, among the candidates of one job.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct ClassKey {
    key: Key,
    pp: usize,
    stage: usize,
    tensor: usize,
    /// The first call, and one past the last one.
    calls: [usize; 2],
    /// What the layers of the stage keep.
    keeps: Vec<Option<Keep>>,
    /// For each weight of several calls, the stages that hold it.
    holders: Vec<Vec<usize>>,
}

/// The layers of a job.
pub(super) struct LayerTable<'a> {
    job: &'a Job<'a>,
    compiler: Compiler<'a>,
    layers: Vec<String>,
    /// By key with one data-parallel rank: what a rank has does not depend on their number.
    sharded: BTreeMap<Key, Result<Sharded, Diagnostic>>,
    priced: BTreeMap<Variant, CallPrice>,
    /// The prices of the compiler's kernels, as far as they were asked for.
    launches: Vec<LaunchPrice>,
    /// A plan for each way to cut and keep; candidates differ from it by their stages.
    plans: BTreeMap<(Key, Vec<Keep>), Plan>,
    /// The programs of candidates, which have many stages in common.
    programs: BTreeMap<ClassKey, Rc<Program>>,
    /// For each weight that several calls read, these.
    shared: Vec<Vec<usize>>,
}

impl<'a> LayerTable<'a> {
    /// # Errors
    /// `E2001` when the entry is no list of calls.
    pub(super) fn new(job: &'a Job<'a>) -> Result<LayerTable<'a>, Diagnostic> {
        let compiler = Compiler::new(job.module, job.entry)?;
        let layers = compiler.calls().functions().into_iter().map(str::to_owned).collect();
        let shared = shared(compiler.calls());
        Ok(LayerTable {
            job,
            compiler,
            layers,
            sharded: BTreeMap::new(),
            priced: BTreeMap::new(),
            launches: Vec::new(),
            plans: BTreeMap::new(),
            programs: BTreeMap::new(),
            shared,
        })
    }

    pub(super) fn job(&self) -> &'a Job<'a> {
        self.job
    }

    pub(super) fn calls(&self) -> &Calls {
        self.compiler.calls()
    }

    pub(super) fn layer_count(&self) -> usize {
        self.layers.len()
    }

    /// Layers in which the sharding search left out states.
    pub(super) fn capped(&self) -> Vec<String> {
        let all: BTreeSet<&String> =
            self.sharded.values().flatten().flat_map(|s| &s.capped).collect();
        all.into_iter().cloned().collect()
    }

    /// Shards the layers for a key.
    ///
    /// # Errors
    /// What sharding reports.
    pub(super) fn add(&mut self, key: Key) -> Result<(), Diagnostic> {
        let key = Key { dp: 1, ..key };
        self.add_all(&[key]);
        match &self.sharded[&key] {
            Ok(_) => Ok(()),
            Err(diagnostic) => Err(diagnostic.clone()),
        }
    }

    /// Shards the layers for keys, on all cores of this machine.
    pub(super) fn add_all(&mut self, keys: &[Key]) {
        let keys: BTreeSet<Key> = keys.iter().map(|key| Key { dp: 1, ..*key }).collect();
        let new: Vec<Key> = keys.into_iter().filter(|k| !self.sharded.contains_key(k)).collect();
        let threads = thread::available_parallelism().map_or(1, usize::from).min(new.len());
        let next = AtomicUsize::new(0);
        let (job, next, new) = (self.job, &next, &new);
        let work = || {
            let mut made = Vec::new();
            while let Some(key) = new.get(next.fetch_add(1, Ordering::Relaxed)) {
                made.push((*key, shard_for(job, *key)));
            }
            made
        };
        thread::scope(|scope| {
            let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
            self.sharded.extend(work());
            for other in others {
                self.sharded.extend(other.join().expect("sharding does not panic"));
            }
        });
    }

    fn sharded(&self, key: Key) -> &Sharded {
        let found = &self.sharded[&Key { dp: 1, ..key }];
        found.as_ref().expect("candidates have keys that can be sharded")
    }

    /// The prices of the calls in order. `adds` says that there are several micro-batches, whose
    /// gradients are added.
    ///
    /// # Errors
    /// `E2002` when a layer cannot be compiled.
    pub(super) fn call_prices(
        &mut self,
        key: Key,
        keeps: &[Keep],
        adds: bool,
    ) -> Result<Vec<CallPrice>, Diagnostic> {
        let mut of_layer = Vec::new();
        // What a call takes does not depend on how many others do the same.
        let key = Key { dp: 1, ..key };
        for (layer, keep) in keeps.iter().enumerate() {
            of_layer.push(self.price((key, layer, *keep, adds))?);
        }
        let price = |function: &String| {
            let layer = self.layers.iter().position(|l| l == function);
            of_layer[layer.expect("layers are those that are called")]
        };
        Ok(self.calls().calls.iter().map(|call| price(&call.function)).collect())
    }

    fn price(&mut self, variant: Variant) -> Result<CallPrice, Diagnostic> {
        if let Some(there) = self.priced.get(&variant) {
            return Ok(*there);
        }
        let (key, layer, keep, adds) = variant;
        let name = self.layers[layer].clone();
        let shardings = self.sharded(key).functions[&name].clone();
        let plan = FunctionPlan { keep, shardings };
        let first = self.place_price(&name, &plan, key, 0, adds)?;
        // Pieces never grow along an axis.
        let last = self.place_price(&name, &plan, key, key.tp - 1, adds)?;
        let others = (key.tp - 1) as f64;
        let price = CallPrice {
            seconds: first.seconds,
            compute_s: first.compute_s + others * first.compute_s.min(last.compute_s),
            kept_bytes: first.kept_bytes,
            kept_bytes_of_all: first.kept_bytes
                + (key.tp as u64 - 1) * first.kept_bytes.min(last.kept_bytes),
        };
        self.priced.insert(variant, price);
        Ok(price)
    }

    /// The price on one tensor-parallel rank.
    fn place_price(
        &mut self,
        name: &str,
        plan: &FunctionPlan,
        key: Key,
        tensor: usize,
        adds: bool,
    ) -> Result<CallPrice, Diagnostic> {
        let place = Place {
            sizes: [key.dp, key.tp],
            coordinates: [0, tensor],
            microbatch_size: key.microbatch_size,
        };
        let calls = self.compiler.calls();
        let call = calls.first_call(name).expect("layers are those that are called");
        let is_weight = |o: &Operand| matches!(o, Operand::Weight(_));
        let added: Vec<bool> = call.operands.iter().map(|o| adds && is_weight(o)).collect();
        let is_last = call.results.iter().any(|r| calls.results.contains(r));
        let built = self.compiler.layers().layer(name, plan, place, &added, is_last);
        let built = built.map_err(|why| {
            Diagnostic::error(
                codegen::lower::refusal_code(&why),
                Span::of(self.job.model.clone()),
                why,
            )
            .note(format!("pricing `@{name}` on dp={}, tp={}", key.dp, key.tp))
        })?;
        let prices = prices_for(self.job, key);
        self.price_launches(&prices);
        let routines = || [&built.forward, &built.backward].into_iter();
        Ok(CallPrice {
            seconds: routines().map(|r| prices.routine(r, &self.launches)).sum(),
            compute_s: routines().map(|r| compute_seconds(r, &self.launches)).sum(),
            kept_bytes: kept_bytes(&built),
            kept_bytes_of_all: 0,
        })
    }

    /// Prices the kernels that were compiled since. They cost the same on all meshes of a job.
    fn price_launches(&mut self, prices: &Prices<'_>) {
        let known = self.launches.len();
        self.launches.extend(self.compiler.kernels()[known..].iter().map(|k| prices.launch(k)));
    }

    /// The plan of a candidate.
    ///
    /// # Errors
    /// What sharding reports.
    pub(super) fn plan(&mut self, candidate: &Candidate) -> Result<Plan, Diagnostic> {
        self.add(candidate.key())?;
        let sharded = self.sharded(candidate.key());
        let functions = self.layers.iter().zip(&candidate.keeps).map(|(name, keep)| {
            let shardings: BTreeMap<String, Sharding> = sharded.functions[name].clone();
            (name.clone(), FunctionPlan { keep: *keep, shardings })
        });
        Ok(assemble(self.job, candidate, functions))
    }

    /// What a plan that someone else made decides.
    pub(super) fn candidate_of(&self, plan: &Plan) -> Candidate {
        Candidate::of_plan(plan, self.calls(), &self.layers, self.job.module)
    }

    /// The time and the memory of a plan that someone else made.
    ///
    /// # Errors
    /// `E2002` when the plan does not fit the module.
    pub(super) fn score(
        &mut self,
        plan: &Plan,
        candidate: &Candidate,
    ) -> Result<Scored, Diagnostic> {
        let programs = self.compiler.programs(plan)?;
        Ok(self.scored(&programs, candidate))
    }

    /// The time and the memory of a candidate. What it has in common with others is compiled once.
    ///
    /// # Errors
    /// What sharding reports.
    pub(super) fn score_candidate(&mut self, candidate: &Candidate) -> Result<Scored, Diagnostic> {
        let kind = (candidate.key(), candidate.keeps.clone());
        let plan = match self.plans.remove(&kind) {
            Some(plan) => Plan { stage_ends: candidate.stage_ends.clone(), ..plan },
            None => self.plan(candidate)?,
        };
        let mut programs = Vec::new();
        for class in self.classes(candidate) {
            if let Some(there) = self.programs.get(&class) {
                programs.push(Rc::clone(there));
                continue;
            }
            let made = Rc::new(self.compiler.program(&plan, class.stage, class.tensor)?);
            programs.push(Rc::clone(&made));
            self.programs.insert(class, made);
        }
        self.plans.insert(kind, plan);
        Ok(self.scored(&programs, candidate))
    }

    fn scored<P: Borrow<Program>>(&mut self, programs: &[P], candidate: &Candidate) -> Scored {
        let (mesh, cluster) = (candidate.mesh, self.job.cluster);
        let prices = Prices::new(cluster, mesh);
        self.price_launches(&prices);
        let time = simulate(&prices, mesh, programs, &self.launches);
        let threads = cluster.threads(cluster.ranks_per_node(mesh.ranks()));
        let footprints = Footprint::of_all(programs, self.compiler.kernels(), threads);
        let (need, have) = fullest(&footprints, mesh.dp, cluster);
        Scored { candidate: candidate.clone(), time, footprints, need, have }
    }

    /// The classes of ranks of a candidate: stages outermost.
    fn classes(&self, candidate: &Candidate) -> Vec<ClassKey> {
        let Candidate { mesh, stage_ends, keeps, .. } = candidate;
        let stage_of = |call: &usize| stage_ends.partition_point(|end| end <= call);
        let holders = |calls: &Vec<usize>| {
            let mut stages: Vec<usize> = calls.iter().map(stage_of).collect();
            stages.dedup();
            stages
        };
        let holders: Vec<Vec<usize>> = self.shared.iter().map(holders).collect();
        let mut classes = Vec::new();
        let mut begin = 0;
        for (stage, end) in stage_ends.iter().enumerate() {
            let own = &self.calls().calls[begin..*end];
            let is_own = |layer: &String| own.iter().any(|call| call.function == *layer);
            let kept = self.layers.iter().zip(keeps);
            let kept = kept.map(|(layer, keep)| is_own(layer).then_some(*keep));
            let first = ClassKey {
                key: candidate.key(),
                pp: mesh.pp,
                stage,
                tensor: 0,
                calls: [begin, *end],
                keeps: kept.collect(),
                holders: holders.clone(),
            };
            classes.extend((0..mesh.tp).map(|tensor| ClassKey { tensor, ..first.clone() }));
            begin = *end;
        }
        classes
    }
}

/// For each weight that several calls read, these calls.
fn shared(calls: &Calls) -> Vec<Vec<usize>> {
    let readers = |weight| {
        let reads = |at: &usize| calls.calls[*at].operands.contains(&Operand::Weight(weight));
        (0..calls.calls.len()).filter(reads).collect::<Vec<usize>>()
    };
    (0..calls.weights.len()).map(readers).filter(|calls| calls.len() > 1).collect()
}

/// The shardings of the layers of a job for a key.
fn shard_for(job: &Job<'_>, key: Key) -> Result<Sharded, Diagnostic> {
    let prices = prices_for(job, key);
    shard(&Request {
        module: job.module,
        entry: job.entry,
        dp: key.dp,
        tp: key.tp,
        microbatch_size: key.microbatch_size,
        sequence: key.sequence,
        rates: Rates {
            flops_per_s: prices.product_rate(job.dtype, 1e9),
            memory_bytes_per_s: prices.memory_rate(1e6, false),
            link: job.cluster.link(key.tp),
        },
    })
}

fn prices_for<'a>(job: &Job<'a>, key: Key) -> Prices<'a> {
    let Key { dp, tp, .. } = key;
    Prices::new(job.cluster, Mesh { pp: job.ranks / dp / tp, dp, tp })
}

fn compute_seconds(routine: &Routine, launches: &[LaunchPrice]) -> f64 {
    let seconds = |instruction: &Instruction| match instruction {
        Instruction::Launch { kernel, .. } => launches[*kernel].seconds,
        Instruction::Collective { .. } => 0.0,
    };
    routine.instructions.iter().map(seconds).sum()
}

/// The bytes of the results that a layer keeps beside those of the primal.
fn kept_bytes(layer: &Layer) -> u64 {
    let first = layer.halves.forward_params.len() + layer.halves.primal_results;
    layer.forward.slots[first..].iter().map(|(_, bytes)| bytes).sum()
}
