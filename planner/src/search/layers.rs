//! The layers of a job, sharded and priced once for each way to cut them, and the plans that are
//! made of them.

use std::collections::{BTreeMap, BTreeSet};

use codegen::calls::{Calls, Operand};
use codegen::compile::Compiler;
use codegen::partition::Place;
use codegen::routines::Layer;
use ir::plan::{FunctionPlan, Keep};
use ir::program::{Instruction, Routine};
use ir::{Diagnostic, Mesh, Plan, Sharding, Span};

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

/// The layers of a job.
pub(super) struct LayerTable<'a> {
    job: &'a Job<'a>,
    compiler: Compiler<'a>,
    layers: Vec<String>,
    /// By key with one data-parallel rank: what a rank has does not depend on their number.
    sharded: BTreeMap<Key, Sharded>,
    priced: BTreeMap<Variant, CallPrice>,
    /// The prices of the compiler's kernels, as far as they were asked for.
    launches: Vec<LaunchPrice>,
}

impl<'a> LayerTable<'a> {
    /// # Errors
    /// `E2001` when the entry is no list of calls.
    pub(super) fn new(job: &'a Job<'a>) -> Result<LayerTable<'a>, Diagnostic> {
        let compiler = Compiler::new(job.module, job.entry)?;
        let layers = compiler.calls().functions().into_iter().map(str::to_owned).collect();
        Ok(LayerTable {
            job,
            compiler,
            layers,
            sharded: BTreeMap::new(),
            priced: BTreeMap::new(),
            launches: Vec::new(),
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
        let all: BTreeSet<&String> = self.sharded.values().flat_map(|s| &s.capped).collect();
        all.into_iter().cloned().collect()
    }

    fn prices(&self, key: Key) -> Prices<'a> {
        let Key { dp, tp, .. } = key;
        Prices::new(self.job.cluster, Mesh { pp: self.job.ranks / dp / tp, dp, tp })
    }

    /// Shards the layers for a key.
    ///
    /// # Errors
    /// What sharding reports.
    pub(super) fn add(&mut self, key: Key) -> Result<(), Diagnostic> {
        let key = Key { dp: 1, ..key };
        if self.sharded.contains_key(&key) {
            return Ok(());
        }
        let (job, prices) = (self.job, self.prices(key));
        let sharded = shard(&Request {
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
        })?;
        self.sharded.insert(key, sharded);
        Ok(())
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
        let shardings = self.sharded[&Key { dp: 1, ..key }].functions[&name].clone();
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
            Diagnostic::error("E2002", Span::of(self.job.model.clone()), why)
                .note(format!("pricing `@{name}` on dp={}, tp={}", key.dp, key.tp))
        })?;
        let prices = self.prices(key);
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
        let sharded = &self.sharded[&Key { dp: 1, ..candidate.key() }];
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

    /// The time and the memory of a plan.
    ///
    /// # Errors
    /// `E2002` when the plan does not fit the module.
    pub(super) fn score(
        &mut self,
        plan: &Plan,
        candidate: &Candidate,
    ) -> Result<Scored, Diagnostic> {
        let programs = self.compiler.programs(plan)?;
        let (mesh, cluster) = (plan.mesh, self.job.cluster);
        let prices = Prices::new(cluster, mesh);
        self.price_launches(&prices);
        let time = simulate(&prices, mesh, &programs, &self.launches);
        let threads = cluster.threads(cluster.ranks_per_node(mesh.ranks()));
        let kernels = self.compiler.kernels();
        let footprints = Footprint::of_all(&programs, kernels, threads);
        let (need, have) = fullest(&footprints, mesh.dp, cluster);
        Ok(Scored { candidate: candidate.clone(), time, footprints, need, have })
    }
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
