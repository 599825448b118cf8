//! The times of layers on one rank, each compiled once.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use codegen::calls::{Calls, Operand};
use codegen::compile::Compiler;
use codegen::crossing::rounded_gradients;
use codegen::partition::Place;
use codegen::routines::{GradientSums, LayerDecisions};
use ir::plan::Keep;
use ir::program::{Instruction, Routine};
use ir::{Diagnostic, Mesh, Span};

use super::Job;
use super::keys::{CallPrice, Key, LayerQuery};
use crate::price::{LaunchPrice, Prices};
use crate::shard::{Rates, Request, Sharded, shard};
use crate::simulate::{Timed, add_parts};

/// A layer on one rank along `cp` and `tp`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Variant {
    pub(super) key: Key,
    pub(super) layer: usize,
    pub(super) keep: Keep,
    /// For each parameter, whether its gradient is added.
    pub(super) adds: Vec<bool>,
    pub(super) context: usize,
    pub(super) tensor: usize,
}

/// What a layer does on one rank.
pub(super) struct TimedLayer {
    pub(super) forward: Timed,
    pub(super) backward: Timed,
    /// What of `backward` is for adding to gradients instead of writing them.
    added_s: f64,
    /// Bytes of its results.
    pub(super) result_bytes: Vec<u64>,
    /// Bytes of what it keeps beside them.
    pub(super) kept_bytes: u64,
}

pub(super) type TimedLayers = BTreeMap<Variant, Arc<TimedLayer>>;

/// Compiles layers and prices them.
pub(super) struct Pricer<'a> {
    pub(super) job: &'a Job<'a>,
    pub(super) compiler: Compiler<'a>,
    /// The prices of the compiler's kernels, as far as they were asked for.
    pub(super) launches: Vec<LaunchPrice>,
    pub(super) timed: TimedLayers,
}

impl<'a> Pricer<'a> {
    /// # Errors
    /// `E2001` when the entry is no list of calls.
    pub(super) fn new(job: &'a Job<'a>) -> Result<Pricer<'a>, Diagnostic> {
        let compiler = Compiler::new(job.module, job.entry)?;
        Ok(Pricer { job, compiler, launches: Vec::new(), timed: BTreeMap::new() })
    }

    pub(super) fn calls(&self) -> &Calls {
        self.compiler.calls()
    }

    /// Times the queries that will be asked of layers. A query that cannot be compiled fails when
    /// it is asked.
    pub(super) fn time_all(
        &mut self,
        key: Key,
        sharded: &Sharded,
        layers: &[String],
        asked: &BTreeSet<LayerQuery>,
    ) {
        for asked in asked {
            if self.price(key, sharded, layers, *asked).is_err() {
                return;
            }
        }
    }

    /// The price of a call.
    ///
    /// # Errors
    /// `E2002` when the layer cannot be compiled.
    pub(super) fn price(
        &mut self,
        key: Key,
        sharded: &Sharded,
        layers: &[String],
        (layer, keep, adds): LayerQuery,
    ) -> Result<CallPrice, Diagnostic> {
        let name = &layers[layer];
        let call = self.calls().first_call(name).expect("layers are those that are called");
        let is_weight = |o: &Operand| matches!(o, Operand::Weight(_));
        let adds: Vec<bool> = call.operands.iter().map(|o| adds && is_weight(o)).collect();
        let mut on = |tensor| {
            let variant = Variant { key, layer, keep, adds: adds.clone(), context: 0, tensor };
            self.time(variant, sharded, name)
        };
        // Pieces never grow along an axis.
        let (first, last) = (on(0)?, on(key.tp - 1)?);
        let seconds = |timed: &TimedLayer| {
            let halves = [timed.forward.seconds(), timed.backward.seconds()];
            [0, 1].map(|which| halves[0][which] + halves[1][which])
        };
        let others = (key.tp - 1) as f64;
        let ([all_s, compute_s], [_, least_s]) = (seconds(&first), seconds(&last));
        let kept = [first.kept_bytes, last.kept_bytes];
        Ok(CallPrice {
            seconds: all_s,
            compute_s: compute_s + others * compute_s.min(least_s),
            added_s: first.added_s,
            kept_bytes: kept[0],
            kept_bytes_of_all: kept[0] + (key.tp as u64 - 1) * kept[0].min(kept[1]),
        })
    }

    /// The time of a layer on one rank along `cp` and `tp`.
    ///
    /// # Errors
    /// `E2002` when it cannot be compiled.
    pub(super) fn time(
        &mut self,
        variant: Variant,
        sharded: &Sharded,
        name: &str,
    ) -> Result<Arc<TimedLayer>, Diagnostic> {
        if let Some(there) = self.timed.get(&variant) {
            return Ok(Arc::clone(there));
        }
        let Key { dp, experts, cp, tp, microbatch_size, .. } = variant.key;
        let place = Place {
            sizes: [dp, experts.ep, cp, tp],
            takes_tp: experts.takes_tp,
            coordinates: [0, 0, variant.context, variant.tensor],
            microbatch_size,
            target: self.job.cluster.target(),
        };
        let calls = self.calls();
        let call = calls.first_call(name).expect("layers are those that are called");
        let is_last = call.results.iter().any(|r| calls.results.contains(r));
        let decisions = LayerDecisions {
            shardings: &sharded.functions[name],
            keep: variant.keep,
            is_late: &[],
        };
        let rounded = rounded_gradients(call, &self.job.precision);
        let sums = GradientSums { adds: &variant.adds, rounded: &rounded };
        let built = self.compiler.layers().layer(name, decisions, place, sums, is_last);
        let built = built.map_err(|why| {
            Diagnostic::error(why.code(), Span::of(self.job.model.clone()), why.to_string())
                .note(format!("pricing `@{name}` on dp={dp}, cp={cp}, tp={tp}"))
        })?;
        let prices = prices_for(self.job, variant.key);
        self.price_launches(&prices);
        let half = |routine: &Routine| {
            let mut timed = Timed { parts: Vec::new(), is_layer: true };
            add_parts(&mut timed.parts, routine, &prices, &self.launches);
            timed
        };
        let launches = built.backward.instructions.iter().filter_map(|instruction| {
            let Instruction::Launch { kernel, .. } = instruction else { return None };
            Some(*kernel)
        });
        let added_s = launches.map(|kernel| self.added_s(kernel, &prices)).sum();
        let first = built.halves.forward_params.len();
        let results = &built.forward.slots[first..];
        let (passed, kept) = results.split_at(built.halves.primal_results);
        let timed = Arc::new(TimedLayer {
            forward: half(&built.forward),
            backward: half(&built.backward),
            added_s,
            result_bytes: passed.iter().map(|(_, bytes)| *bytes).collect(),
            kept_bytes: kept.iter().map(|(_, bytes)| bytes).sum(),
        });
        self.timed.insert(variant, Arc::clone(&timed));
        Ok(timed)
    }

    /// Seconds that a kernel would save if it wrote what it adds.
    fn added_s(&self, kernel: usize, prices: &Prices<'_>) -> f64 {
        let mut written = self.compiler.kernels()[kernel].clone();
        let mut sums = written.sums();
        if !sums.iter().any(|adds| **adds) {
            return 0.0;
        }
        sums.iter_mut().for_each(|adds| **adds = false);
        (self.launches[kernel].seconds - prices.launch(&written).seconds).max(0.0)
    }

    /// Prices the kernels that were compiled since. They cost the same on all meshes of a job.
    pub(super) fn price_launches(&mut self, prices: &Prices<'_>) {
        let known = self.launches.len();
        self.launches.extend(self.compiler.kernels()[known..].iter().map(|k| prices.launch(k)));
    }
}

/// The shardings of the layers of a job for a key.
pub(super) fn shard_for(job: &Job<'_>, key: Key) -> Result<Sharded, Diagnostic> {
    let prices = prices_for(job, key);
    shard(&Request {
        module: job.module,
        entry: job.entry,
        dp: key.dp,
        cp: key.cp,
        tp: key.tp,
        experts: key.experts,
        microbatch_size: key.microbatch_size,
        sequence: key.sequence,
        rates: Rates {
            flops_per_s: prices.product_rate(job.precision.compute.accumulation(), 1e9),
            memory_bytes_per_s: prices.memory_rate(1e6, false),
            link: job.cluster.link(key.tp),
        },
    })
}

/// The prices on the mesh of a key.
pub(super) fn prices_for<'a>(job: &Job<'a>, key: Key) -> Prices<'a> {
    let Key { dp, cp, tp, .. } = key;
    let pp = job.ranks / dp / cp / tp;
    Prices::new(job.cluster, Mesh { pp, dp, cp, tp, ..Mesh::ONE })
}
