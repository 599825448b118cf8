//! The layers of a job, sharded and priced once for each way to cut them, and the plans that are
//! made of them.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use codegen::calls::{Calls, Operand};
use codegen::crossing::{Sums, crossing, gradient_adds};
use codegen::refusal::CODE_NO_KERNEL;
use codegen::schedule::{Pipeline, Turn};
use ir::plan::{FunctionPlan, Keep, Offload, Zero};
use ir::{Diagnostic, Plan, Program, Sharding, ValueId};

use super::keys::{CallPrice, Key, LayerQuery};
use super::pricer::{Pricer, TimedLayer, Variant, prices_for, shard_for};
use super::{Candidate, Job, Scored, assemble};
use crate::footprint::{Footprint, fullest};
use crate::price::Prices;
use crate::shard::Sharded;
use crate::simulate::{Move, Script, Timed, add_parts, simulate, simulate_scripts};

/// What the program of one class depends on, among the candidates of one job.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct ClassKey {
    key: Key,
    pp: usize,
    zero: Zero,
    offload: Offload,
    stage: usize,
    context: usize,
    tensor: usize,
    /// For each chunk, its calls: the first, and one past the last.
    calls: Vec<[usize; 2]>,
    /// What the layers of the stage keep.
    keeps: Vec<Option<Keep>>,
    /// For each weight of several calls, the stages that hold it.
    holders: Vec<Vec<usize>>,
}

/// What a stage does, for each micro-batch and at the ends of a step.
struct Stage {
    begin: Rc<Timed>,
    chunks: Vec<Chunk>,
    finish: Rc<Timed>,
}

/// What a stage does with one of its chunks.
struct Chunk {
    forward: Rc<Timed>,
    backward: Rc<Timed>,
    /// Bytes of each value that it passes on.
    passed_bytes: Vec<u64>,
}

/// The layers of a job.
pub(super) struct LayerTable<'a> {
    /// One for each thread that sharded; each compiles the layers of its keys.
    pricers: Vec<Pricer<'a>>,
    layers: Vec<String>,
    /// For each call, its layer.
    layer_of: Vec<usize>,
    /// By key with one data-parallel rank: what a rank has does not depend on their number. With
    /// the pricer of the key's layers.
    sharded: BTreeMap<Key, (Result<Sharded, Diagnostic>, usize)>,
    priced: BTreeMap<(Key, LayerQuery), CallPrice>,
    /// A plan for each way to cut and keep; candidates differ from it by their stages.
    plans: BTreeMap<(Key, Vec<Keep>), Plan>,
    /// The stages of candidates, many of which candidates share; and what stages do before the
    /// first and after the last micro-batch, where nothing is kept.
    stages: BTreeMap<ClassKey, Rc<Stage>>,
    ends: BTreeMap<ClassKey, [Rc<Timed>; 2]>,
    /// The programs of candidates.
    programs: BTreeMap<ClassKey, Rc<Program>>,
    /// For each weight that several calls read, these.
    shared: Vec<Vec<usize>>,
}

impl<'a> LayerTable<'a> {
    /// # Errors
    /// `E2001` when the entry is no list of calls.
    pub(super) fn new(job: &'a Job<'a>) -> Result<LayerTable<'a>, Diagnostic> {
        let pricer = Pricer::new(job)?;
        let calls = pricer.calls();
        let layers: Vec<String> = calls.functions().into_iter().map(str::to_owned).collect();
        let layer_of = |function: &String| layers.iter().position(|l| l == function);
        let layer_of = |call: &codegen::calls::Call| {
            layer_of(&call.function).expect("layers are those that are called")
        };
        let layer_of = calls.calls.iter().map(layer_of).collect();
        let shared = shared(calls);
        Ok(LayerTable {
            pricers: vec![pricer],
            layers,
            layer_of,
            sharded: BTreeMap::new(),
            priced: BTreeMap::new(),
            plans: BTreeMap::new(),
            stages: BTreeMap::new(),
            ends: BTreeMap::new(),
            programs: BTreeMap::new(),
            shared,
        })
    }

    pub(super) fn job(&self) -> &'a Job<'a> {
        self.pricers[0].job
    }

    pub(super) fn calls(&self) -> &Calls {
        self.pricers[0].calls()
    }

    pub(super) fn layer_count(&self) -> usize {
        self.layers.len()
    }

    /// Layers in which the sharding search left out states.
    pub(super) fn capped(&self) -> Vec<String> {
        let all: BTreeSet<&String> =
            self.sharded.values().flat_map(|(s, _)| s).flat_map(|s| &s.capped).collect();
        all.into_iter().cloned().collect()
    }

    /// Shards the layers for a key.
    ///
    /// # Errors
    /// What sharding reports.
    pub(super) fn add(&mut self, key: Key) -> Result<(), Diagnostic> {
        let key = key.of_one_copy();
        let job = self.job();
        let (sharded, _) = self.sharded.entry(key).or_insert_with(|| (shard_for(job, key), 0));
        sharded.as_ref().map(|_| ()).map_err(Diagnostic::clone)
    }

    /// Shards the layers for keys and times what is asked of them, on all cores of this machine.
    pub(super) fn add_all(&mut self, all: &[(Key, Vec<LayerQuery>)]) {
        let mut new: BTreeMap<Key, BTreeSet<LayerQuery>> = BTreeMap::new();
        for (key, asked) in all {
            new.entry(key.of_one_copy()).or_default().extend(asked);
        }
        new.retain(|key, _| !self.sharded.contains_key(key));
        // Much to do comes first, so that nobody waits long for the last one.
        let mut new: Vec<(Key, BTreeSet<LayerQuery>)> = new.into_iter().collect();
        new.sort_by_key(|(key, _)| std::cmp::Reverse((key.tp.min(2), key.microbatch_size)));
        let threads = thread::available_parallelism().map_or(1, usize::from).min(new.len());
        let next = AtomicUsize::new(0);
        let job = self.job();
        while self.pricers.len() < threads {
            self.pricers.push(Pricer::new(job).expect("the table has one of the same job"));
        }
        let (layers, next, new) = (&self.layers, &next, &new);
        let work = |(at, pricer): (usize, &mut Pricer<'a>)| {
            let mut made = Vec::new();
            while let Some((key, asked)) = new.get(next.fetch_add(1, Ordering::Relaxed)) {
                let sharded = shard_for(job, *key);
                if let Ok(sharded) = &sharded {
                    pricer.time_all(*key, sharded, layers, asked);
                }
                made.push((*key, (sharded, at)));
            }
            made
        };
        thread::scope(|scope| {
            let mut pricers = self.pricers.iter_mut().enumerate();
            let own = pricers.next().expect("a table has a pricer");
            // Where the system starts no more threads, those that there are do the work.
            let spawn = |other| thread::Builder::new().spawn_scoped(scope, move || work(other));
            let others: Vec<_> = pricers.map_while(|other| spawn(other).ok()).collect();
            self.sharded.extend(work(own));
            for other in others {
                self.sharded.extend(other.join().expect("sharding does not panic"));
            }
        });
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
        let key = key.of_one_copy();
        let mut refused: Vec<Diagnostic> = Vec::new();
        for (layer, keep) in keeps.iter().enumerate() {
            match self.price(key, (layer, *keep, adds)) {
                Ok(price) => of_layer.push(price),
                Err(diagnostic) => refused.push(diagnostic),
            }
        }
        if let Some(all) = joined(refused) {
            return Err(all);
        }
        Ok(self.layer_of.iter().map(|layer| of_layer[*layer]).collect())
    }

    fn price(&mut self, key: Key, asked: LayerQuery) -> Result<CallPrice, Diagnostic> {
        if let Some(there) = self.priced.get(&(key, asked)) {
            return Ok(*there);
        }
        let (sharded, pricer) = sharded(&self.sharded, key);
        let price = self.pricers[pricer].price(key, sharded, &self.layers, asked)?;
        self.priced.insert((key, asked), price);
        Ok(price)
    }

    /// The plan of a candidate.
    ///
    /// # Errors
    /// What sharding reports.
    pub(super) fn plan(&mut self, candidate: &Candidate) -> Result<Plan, Diagnostic> {
        self.add(candidate.key())?;
        let (sharded, _) = sharded(&self.sharded, candidate.key());
        let functions = self.layers.iter().zip(&candidate.keeps).map(|(name, keep)| {
            let shardings: BTreeMap<String, Sharding> = sharded.functions[name].clone();
            (name.clone(), FunctionPlan::new(*keep, shardings))
        });
        Ok(assemble(self.job(), candidate, functions))
    }

    /// Whether ranks hold whole blocks of states, and gradients are sums over those that share
    /// samples.
    ///
    /// # Errors
    /// `E2002`, with a weight.
    pub(super) fn check_weights(&self, plan: &Plan) -> Result<(), Diagnostic> {
        self.pricers[0].compiler.check_weights(plan)
    }

    /// What a plan that someone else made decides.
    pub(super) fn candidate_of(&self, plan: &Plan) -> Candidate {
        Candidate::of_plan(plan, self.calls(), &self.layers, self.job().module)
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
        let programs = self.pricers[0].compiler.programs(plan)?;
        Ok(self.scored(&programs, candidate, 0))
    }

    /// The plan of a candidate, which goes back to where it comes from.
    fn take_plan(&mut self, candidate: &Candidate) -> Result<Plan, Diagnostic> {
        match self.plans.remove(&(candidate.key(), candidate.keeps.clone())) {
            Some(plan) => {
                let Candidate { stage_ends, zero, offload, .. } = candidate;
                let (zero, offload) = (*zero, *offload);
                Ok(Plan { stage_ends: stage_ends.clone(), zero, offload, ..plan })
            }
            None => self.plan(candidate),
        }
    }

    /// The time and the memory of a candidate. What it has in common with others is compiled once.
    ///
    /// # Errors
    /// What sharding reports.
    pub(super) fn score_candidate(&mut self, candidate: &Candidate) -> Result<Scored, Diagnostic> {
        let plan = self.take_plan(candidate)?;
        let (_, pricer) = sharded(&self.sharded, candidate.key());
        let mut programs = Vec::new();
        for class in self.classes(candidate) {
            if let Some(there) = self.programs.get(&class) {
                programs.push(Rc::clone(there));
                continue;
            }
            let compiler = &mut self.pricers[pricer].compiler;
            let made =
                Rc::new(compiler.program(&plan, [class.stage, class.context, class.tensor])?);
            programs.push(Rc::clone(&made));
            self.programs.insert(class, made);
        }
        self.plans.insert((candidate.key(), candidate.keeps.clone()), plan);
        Ok(self.scored(&programs, candidate, pricer))
    }

    /// The time and the memory of programs that a pricer's compiler made.
    fn scored<P: Borrow<Program>>(
        &mut self,
        programs: &[P],
        candidate: &Candidate,
        pricer: usize,
    ) -> Scored {
        let (mesh, cluster) = (candidate.mesh, self.job().cluster);
        let name = candidate.name(self.calls(), &self.layer_of);
        let memory = self.job().memory();
        let prices = Prices::new(cluster, mesh);
        let pricer = &mut self.pricers[pricer];
        pricer.price_launches(&prices);
        let time = simulate(&prices, mesh, programs, &pricer.launches);
        let threads = cluster.threads(cluster.ranks_per_node(mesh.ranks()));
        let footprints =
            Footprint::of_all(programs, pricer.compiler.kernels(), cluster.target(), threads);
        let (need, have) = fullest(&footprints, mesh.dp, (memory, cluster.nodes));
        Scored { candidate: candidate.clone(), name, time, footprints, need, have }
    }

    /// The time of a candidate, but for rounding, from the times of its layers: nothing is
    /// compiled but these. Where ranks exchange or copy around each call, it is compiled.
    ///
    /// # Errors
    /// What sharding and compiling report.
    pub(super) fn seconds(&mut self, candidate: &Candidate) -> Result<f64, Diagnostic> {
        if candidate.zero.stage > 1 || candidate.offload != Offload::default() {
            return Ok(self.score_candidate(candidate)?.time.seconds);
        }
        let mesh = candidate.mesh;
        let prices = Prices::new(self.job().cluster, mesh);
        let classes = self.classes(candidate);
        let mut stages = Vec::with_capacity(classes.len());
        for class in classes {
            stages.push(match self.stages.get(&class) {
                Some(there) => Rc::clone(there),
                None => {
                    let made = Rc::new(self.stage(candidate, &class)?);
                    self.stages.insert(class, Rc::clone(&made));
                    made
                }
            });
        }
        let pipeline = candidate.pipeline(self.job());
        let script = |class: usize| {
            let of_stage = mesh.cp * mesh.tp;
            let alike = stages.iter().skip(class % of_stage).step_by(of_stage);
            let alike: Vec<&Stage> = alike.map(Rc::as_ref).collect();
            script(&alike, class / of_stage, pipeline, &prices)
        };
        let scripts: Vec<Script> = (0..stages.len()).map(script).collect();
        Ok(simulate_scripts(&prices, mesh, &scripts).seconds)
    }

    fn stage(&mut self, candidate: &Candidate, class: &ClassKey) -> Result<Stage, Diagnostic> {
        let [begin, finish] = self.ends(candidate, class)?;
        let chunks = class.calls.iter().map(|calls| self.chunk(candidate, class, *calls));
        let chunks = chunks.collect::<Result<Vec<Chunk>, Diagnostic>>()?;
        Ok(Stage { begin, chunks, finish })
    }

    fn chunk(
        &mut self,
        candidate: &Candidate,
        class: &ClassKey,
        [from, to]: [usize; 2],
    ) -> Result<Chunk, Diagnostic> {
        let count = candidate.microbatch_count(self.job());
        let (calls, passed) = (self.calls(), crossing(self.calls(), to));
        let sums = Sums::OfStep { terms: count };
        let adds = gradient_adds(&calls.calls[from..to], &passed, sums);
        let mut timed = Vec::with_capacity(to - from);
        for (call, adds) in (from..to).zip(adds) {
            timed.push(self.timed(candidate, class, call, adds)?);
        }
        let mut halves = [Timed::default(), Timed::default()];
        halves.iter_mut().for_each(|half| half.is_layer = true);
        timed.iter().for_each(|layer| halves[0].append(&layer.forward));
        timed.iter().rev().for_each(|layer| halves[1].append(&layer.backward));
        let mut passed_bytes = Vec::with_capacity(passed.len());
        for value in passed {
            let made = |results: &[ValueId]| results.iter().position(|made| *made == value);
            let mut all = self.calls().calls.iter().enumerate();
            let found = all.find_map(|(at, call)| Some((at, made(&call.results)?)));
            let (call, result) = found.expect("what crosses is the result of a call");
            let layer = match call.checked_sub(from).and_then(|own| timed.get(own)) {
                Some(own) => Arc::clone(own),
                None => {
                    let adds = vec![false; self.calls().calls[call].operands.len()];
                    self.timed(candidate, class, call, adds)?
                }
            };
            passed_bytes.push(layer.result_bytes[result]);
        }
        let [forward, backward] = halves.map(Rc::new);
        Ok(Chunk { forward, backward, passed_bytes })
    }

    /// The time of a call on the ranks of a class.
    fn timed(
        &mut self,
        candidate: &Candidate,
        class: &ClassKey,
        call: usize,
        adds: Vec<bool>,
    ) -> Result<Arc<TimedLayer>, Diagnostic> {
        let layer = self.layer_of[call];
        let (key, keep) = (class.key.of_one_copy(), candidate.keeps[layer]);
        let variant =
            Variant { key, layer, keep, adds, context: class.context, tensor: class.tensor };
        let (sharded, pricer) = sharded(&self.sharded, key);
        self.pricers[pricer].time(variant, sharded, &self.layers[layer])
    }

    /// What a class does before its first micro-batch and after its last one.
    fn ends(
        &mut self,
        candidate: &Candidate,
        class: &ClassKey,
    ) -> Result<[Rc<Timed>; 2], Diagnostic> {
        let class = ClassKey { keeps: Vec::new(), ..class.clone() };
        if let Some([begin, finish]) = self.ends.get(&class) {
            return Ok([Rc::clone(begin), Rc::clone(finish)]);
        }
        let plan = self.take_plan(candidate)?;
        let (_, pricer) = sharded(&self.sharded, candidate.key());
        let ends = self.pricers[pricer].compiler.ends(&plan, class.stage, class.tensor)?;
        self.plans.insert((candidate.key(), candidate.keeps.clone()), plan);
        let prices = prices_for(self.job(), class.key);
        let pricer = &mut self.pricers[pricer];
        pricer.price_launches(&prices);
        let timed = [&ends.begin, &ends.finish].map(|routines| {
            let mut timed = Timed::default();
            for routine in routines {
                add_parts(&mut timed.parts, routine, &prices, &pricer.launches);
            }
            Rc::new(timed)
        });
        self.ends.insert(class, timed.clone());
        Ok(timed)
    }

    /// The classes of ranks of a candidate: stages outermost.
    fn classes(&self, candidate: &Candidate) -> Vec<ClassKey> {
        let Candidate { mesh, keeps, .. } = candidate;
        let stages: Vec<Vec<[usize; 2]>> =
            (0..mesh.pp).map(|stage| candidate.calls_of(stage)).collect();
        let has = |stage: &[[usize; 2]], call: usize| {
            stage.iter().any(|[from, to]| (*from..*to).contains(&call))
        };
        let holders = |calls: &Vec<usize>| -> Vec<usize> {
            let holds = |stage: &usize| calls.iter().any(|call| has(&stages[*stage], *call));
            (0..mesh.pp).filter(holds).collect()
        };
        let holders: Vec<Vec<usize>> = self.shared.iter().map(holders).collect();
        let mut classes = Vec::new();
        for (stage, calls) in stages.iter().enumerate() {
            let mut kept = vec![None; keeps.len()];
            for layer in calls.iter().flat_map(|[from, to]| &self.layer_of[*from..*to]) {
                kept[*layer] = Some(keeps[*layer]);
            }
            let first = ClassKey {
                key: candidate.key(),
                pp: mesh.pp,
                zero: candidate.zero,
                offload: candidate.offload,
                stage,
                context: 0,
                tensor: 0,
                calls: calls.clone(),
                keeps: kept,
                holders: holders.clone(),
            };
            let places = (0..mesh.cp).flat_map(|context| (0..mesh.tp).map(move |t| (context, t)));
            let class = |(context, tensor)| ClassKey { context, tensor, ..first.clone() };
            classes.extend(places.map(class));
        }
        classes
    }
}

/// One diagnostic of several layers that cannot be compiled: of those that lack kernels, where
/// there are any. None where there is none.
fn joined(refused: Vec<Diagnostic>) -> Option<Diagnostic> {
    let lacks_kernels = |diagnostic: &&Diagnostic| diagnostic.code == CODE_NO_KERNEL;
    let lacking: Vec<&Diagnostic> = refused.iter().filter(lacks_kernels).collect();
    let mut all = lacking.first().copied().or(refused.first())?.clone();
    for other in lacking.into_iter().skip(1) {
        all.headline = format!("{}; {}", all.headline, other.headline);
        all.notes.extend(other.notes.iter().cloned());
    }
    Some(all)
}

/// For each weight that several calls read, these calls.
fn shared(calls: &Calls) -> Vec<Vec<usize>> {
    let readers = |weight| {
        let reads = |at: &usize| calls.calls[*at].operands.contains(&Operand::Weight(weight));
        (0..calls.calls.len()).filter(reads).collect::<Vec<usize>>()
    };
    (0..calls.weights.len()).map(readers).filter(|calls| calls.len() > 1).collect()
}

/// The shardings of a key, and the pricer of its layers.
fn sharded(
    all: &BTreeMap<Key, (Result<Sharded, Diagnostic>, usize)>,
    key: Key,
) -> (&Sharded, usize) {
    let (found, pricer) = &all[&key.of_one_copy()];
    (found.as_ref().expect("candidates have keys that can be sharded"), *pricer)
}

/// A step of the stage number `at` of all.
fn script(stages: &[&Stage], at: usize, pipeline: Pipeline, prices: &Prices<'_>) -> Script {
    let own = stages[at];
    let mut routines = vec![Rc::clone(&own.begin), Rc::clone(&own.finish)];
    for chunk in &own.chunks {
        routines.extend([&chunk.forward, &chunk.backward].map(Rc::clone));
    }
    let count = stages.len();
    let all = count * own.chunks.len();
    // The stage of a chunk, and what it passes on.
    let chunk = |number: usize| {
        let stage = number % count;
        let passed = &stages[stage].chunks[number / count].passed_bytes;
        (stage, passed.iter().map(|bytes| prices.send(*bytes)))
    };
    let mut moves = vec![Move::Call { routine: 0 }];
    for turn in pipeline.turns(at) {
        let own = turn.chunk();
        let number = own * count + at;
        let before = number.checked_sub(1).map(chunk);
        let after = (number + 1 < all).then(|| ((number + 1) % count, chunk(number).1));
        let (arriving, routine, leaving) = match turn {
            Turn::Forward { .. } => (before, 2 + 2 * own, after),
            Turn::Backward { .. } => (after, 3 + 2 * own, before),
            // 1F1B puts nothing off.
            Turn::Weights { .. } => continue,
        };
        if let Some((from, seconds)) = arriving {
            moves.extend(seconds.map(|_| Move::Receive { from }));
        }
        moves.push(Move::Call { routine });
        if let Some((to, seconds)) = leaving {
            moves.extend(seconds.map(|seconds| Move::Send { to, seconds }));
        }
    }
    moves.push(Move::Call { routine: 1 });
    Script { routines, moves }
}
