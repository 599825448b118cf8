//! The layers of a job, sharded and priced once for each way to cut them.

use std::collections::{BTreeMap, BTreeSet};

use codegen::calls::{Calls, Operand};
use codegen::lower::KernelTable;
use codegen::partition::Place;
use codegen::routines::layer;
use ir::plan::{FunctionPlan, Keep};
use ir::{Diagnostic, Mesh, Plan, Sharding, Span};

use super::{Candidate, Job, assemble};
use crate::cluster::Memory;
use crate::price::{LaunchPrice, Prices};
use crate::shard::{Rates, Request, Sharded, shard};

/// What the shardings and the routines of layers depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) dp: usize,
    pub(super) tp: usize,
    pub(super) sequence: bool,
    pub(super) microbatch_size: usize,
}

struct Entry {
    sharded: Sharded,
    /// For each layer, the seconds of a forward and a backward call, keeping nothing and all.
    seconds: Vec<[f64; 2]>,
}

/// The layers of a job.
pub(super) struct LayerTable<'a> {
    job: &'a Job<'a>,
    calls: Option<Calls>,
    layers: Vec<String>,
    entries: BTreeMap<Key, Entry>,
}

impl<'a> LayerTable<'a> {
    pub(super) fn new(job: &'a Job<'a>) -> LayerTable<'a> {
        let calls = Calls::of(job.module, job.entry).ok();
        let names = calls.iter().flat_map(|c| c.functions()).map(str::to_owned).collect();
        LayerTable { job, layers: names, calls, entries: BTreeMap::new() }
    }

    pub(super) fn call_count(&self) -> usize {
        self.calls.as_ref().map_or(0, |c| c.calls.len())
    }

    pub(super) fn layer_count(&self) -> usize {
        self.layers.len()
    }

    /// Layers in which the sharding search left out states.
    pub(super) fn capped(&self) -> Vec<String> {
        let all: BTreeSet<&String> =
            self.entries.values().flat_map(|e| &e.sharded.capped).collect();
        all.into_iter().cloned().collect()
    }

    /// Shards and prices the layers for a key.
    pub(super) fn add(&mut self, key: Key) -> Result<(), Diagnostic> {
        if self.entries.contains_key(&key) {
            return Ok(());
        }
        let job = self.job;
        let mesh = Mesh { pp: job.ranks / key.dp / key.tp, dp: key.dp, tp: key.tp };
        let prices = Prices::new(job.cluster, mesh);
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
        let mut seconds = Vec::new();
        for name in &self.layers {
            let shardings = &sharded.functions[name];
            let price = |keep| self.layer_seconds(name, key, keep, shardings, &prices);
            seconds.push([price(Keep::None)?, price(Keep::Full)?]);
        }
        self.entries.insert(key, Entry { sharded, seconds });
        Ok(())
    }

    fn layer_seconds(
        &self,
        name: &str,
        key: Key,
        keep: Keep,
        shardings: &BTreeMap<String, Sharding>,
        prices: &Prices<'_>,
    ) -> Result<f64, Diagnostic> {
        let error = |why: String| {
            Diagnostic::error("E2002", Span::of(self.job.model.clone()), why)
                .note(format!("pricing `@{name}` on dp={}, tp={}", key.dp, key.tp))
        };
        let calls = self.calls.as_ref().ok_or_else(|| error("the entry has no calls".into()))?;
        let call = calls.first_call(name).ok_or_else(|| error("it is not called".into()))?;
        let is_weight: Vec<bool> =
            call.operands.iter().map(|o| matches!(o, Operand::Weight(_))).collect();
        let is_last = call.results.iter().any(|r| calls.results.contains(r));
        let place = Place {
            sizes: [key.dp, key.tp],
            coordinates: [0, 0],
            microbatch_size: key.microbatch_size,
        };
        let plan = FunctionPlan { keep, shardings: shardings.clone() };
        let mut table = KernelTable::default();
        let module = self.job.module;
        let built = layer(module, name, &plan, place, &is_weight, is_last, &mut table);
        let built = built.map_err(error)?;
        let launches: Vec<LaunchPrice> = table.kernels.iter().map(|k| prices.launch(k)).collect();
        Ok(prices.routine(&built.forward, &launches) + prices.routine(&built.backward, &launches))
    }

    /// For each call, the seconds of its forward and backward routine on the first rank.
    pub(super) fn call_seconds(&self, key: Key, keeps: &[Keep]) -> Vec<f64> {
        let entry = &self.entries[&key];
        let calls = self.calls.iter().flat_map(|c| &c.calls);
        let seconds = |function: &String| {
            let layer = self.layers.iter().position(|l| l == function);
            let layer = layer.expect("layers are those that are called");
            entry.seconds[layer][super::keep_number(keeps[layer])]
        };
        calls.map(|call| seconds(&call.function)).collect()
    }

    /// The least bytes of the fullest place, parameters, gradients and state alone and cut ever so
    /// evenly; and the bytes that it has.
    pub(super) fn least_bytes(&self, candidate: &Candidate) -> (u64, u64) {
        let Some(calls) = &self.calls else { return (0, u64::MAX) };
        let job = self.job;
        let copies = 2 + job.optimizer.state_count() as u64;
        let mut begin = 0;
        let mut stages = Vec::new();
        for end in &candidate.stage_ends {
            let operands = calls.calls[begin..*end].iter().flat_map(|c| &c.operands);
            let weights: BTreeSet<usize> = operands
                .filter_map(|o| if let Operand::Weight(at) = o { Some(*at) } else { None })
                .collect();
            let elements = |at: &usize| calls.weights[*at].sizes.iter().product::<usize>() as u64;
            let elements: u64 = weights.iter().map(elements).sum();
            stages.push(copies * job.dtype.size() * elements / candidate.mesh.tp as u64);
            begin = *end;
        }
        match job.cluster.memory() {
            Memory::PerRank(have) => (stages.iter().copied().max().unwrap_or(0), have),
            Memory::PerNode(have) => {
                let replicas = (candidate.mesh.dp * candidate.mesh.tp) as u64;
                (stages.iter().sum::<u64>() * replicas / job.cluster.nodes as u64, have)
            }
        }
    }

    /// The plan of a candidate.
    pub(super) fn plan(&mut self, candidate: &Candidate) -> Result<Plan, Diagnostic> {
        self.add(candidate.key())?;
        let sharded = &self.entries[&candidate.key()].sharded;
        let functions = self.layers.iter().zip(&candidate.keeps).map(|(name, keep)| {
            let shardings = sharded.functions[name].clone();
            (name.clone(), FunctionPlan { keep: *keep, shardings })
        });
        Ok(assemble(self.job, candidate, functions))
    }
}
