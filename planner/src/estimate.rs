//! What a training step costs on a cluster, in closed form: time with an interval and where it
//! goes, memory and what holds it.
//!
//! In: a [`Workload`], a [`Cluster`], a [`Configuration`] and a [`Profile`]. The price of a
//! configuration is separable. [`Estimator::prices`] makes tables that depend on the inside of
//! layers alone ([`Inside`]); [`Estimator::step`] reads them and adds what lies between layers,
//! in some hundred operations. A search memoises the former and calls the latter.
//!
//! Devices and links come from datasheets and from timings of single kernels and collectives,
//! profiles from what frameworks' releases do. A few numbers were chosen beside runs of models,
//! from ranges that are plausible without them: sustained clocks, host times, spreads of intervals.

mod bubble;
pub mod chosen;
pub mod cut;
pub mod described;
mod devices;
pub use devices::board_power;
mod experts;
mod collective;
pub mod group;
mod host;
pub(crate) use host::DISK_BYTES_PER_S;
pub use host::HostLimits;
pub mod interleaved;
mod interval;
mod layer;
pub mod legal;
pub mod line;
pub mod network;
pub mod padding;
pub mod price;
pub mod rates;
pub mod row;
pub mod serving;
mod stage;
mod terms;
pub mod memory;
pub mod step;
pub mod profile;
pub mod workload;

#[cfg(test)]
pub(crate) mod tests;

use ir::{Diagnostic, Span};
use serde::Serialize;

use crate::cluster::{Cluster, Known};
use crate::configuration::{Configuration, Recompute};

use experts::ExpertRanks;
use layer::{KnownItems, Lowering, Weights};
use memory::Memory;
use network::{Group, Network};
use price::{Inside, Prices};
use profile::Profile;
use rates::{Arithmetic, ProductKernels, Rates};
use step::{Breakdown, Step};
use terms::Terms;
use workload::Workload;

/// What is trained beside the model: how much at once, and in which arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Job {
    /// Samples of a step.
    pub global_batch: u64,
    /// The arithmetic of products with weights.
    pub arithmetic: Arithmetic,
}

/// A step, predicted.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// Seconds.
    pub step_time_s: f64,
    /// Seconds: one in ten steps is shorter.
    pub step_time_low_s: f64,
    /// Seconds: one in ten steps is longer.
    pub step_time_high_s: f64,
    /// Where the time goes.
    pub breakdown: Breakdown,
    /// Seconds of the step in which a device computes, on average.
    pub busy_s: f64,
    /// The fullest stage.
    pub memory: Memory,
    /// The stage whose memory a run of this profile prints.
    pub printed_memory: Memory,
    /// Micro-batches of a step on one data-parallel rank.
    pub microbatch_count: u64,
    /// The configuration, with what was left open decided.
    pub configuration: Configuration,
}

/// What of the places of ranks a step depends on: equal ones are priced alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The ranks of tensors, of a sequence and of experts; those with the same weights; those with
    /// the same experts.
    groups: [Group; 6],
    /// How far a stage is from the next.
    stages: u64,
    /// Whether stages are on different nodes.
    is_far: bool,
}

/// Prices steps of one workload on one cluster.
#[derive(Clone, Debug)]
pub struct Estimator<'a> {
    work: &'a Workload,
    rates: Rates,
    network: Network,
    profile: Profile,
    job: Job,
    host: HostLimits,
    peak_flops: f64,
    /// Bytes of a device that a job may use.
    pub memory_bytes: f64,
    /// Bytes of a device that any job could use.
    device_bytes: f64,
    /// Devices of which the slowest is waited for.
    devices: u64,
}

/// Whether all devices of a cluster have products of f32 that is rounded to tf32.
pub fn rounds_to_tf32(cluster: &Cluster) -> bool {
    let rounds = |cluster: &Cluster| {
        let rates = devices::rates(cluster);
        let tf32 = Arithmetic::Tf32;
        rates.is_ok_and(|rates| rates.product_rates(tf32).arithmetic == tf32)
    };
    match &cluster.groups[..] {
        [] => rounds(cluster),
        groups => groups.iter().all(rounds),
    }
}

impl<'a> Estimator<'a> {
    /// Looks up the devices and links of a cluster.
    ///
    /// # Errors
    /// `E3404` for a cluster without devices of its own.
    pub fn new(
        work: &'a Workload,
        cluster: &Cluster,
        profile: Profile,
        job: Job,
    ) -> Result<Estimator<'a>, Diagnostic> {
        Estimator::without_source("", work, cluster, profile, job)
    }

    /// Looks up the devices and links for a job on `devices` devices of a cluster: each step waits
    /// for the slowest of these, not of the whole cluster.
    ///
    /// # Errors
    /// As [`Estimator::new`].
    pub fn over(
        devices: u64,
        work: &'a Workload,
        cluster: &Cluster,
        profile: Profile,
        job: Job,
    ) -> Result<Estimator<'a>, Diagnostic> {
        Estimator::without_stragglers("", work, cluster, profile, job)
            .map(|all| all.waiting(devices))
    }

    /// Looks up the devices and links of a cluster, without the constants that were chosen with
    /// runs of `table` in view ([`chosen`]).
    ///
    /// # Errors
    /// As [`Estimator::new`].
    pub fn without_source(
        table: &str,
        work: &'a Workload,
        cluster: &Cluster,
        profile: Profile,
        job: Job,
    ) -> Result<Estimator<'a>, Diagnostic> {
        let devices = cluster.devices().unwrap_or(1) as u64;
        Estimator::without_stragglers(table, work, cluster, profile, job)
            .map(|all| all.waiting(devices))
    }

    /// Slows all devices to the slowest of `devices`.
    fn waiting(mut self, devices: u64) -> Estimator<'a> {
        self.rates.wait_for_slowest([self.devices, devices], self.profile.stated.straggler);
        Estimator { devices, ..self }
    }

    /// Prices of devices none of which is slower than the others.
    fn without_stragglers(
        table: &str,
        work: &'a Workload,
        cluster: &Cluster,
        mut profile: Profile,
        job: Job,
    ) -> Result<Estimator<'a>, Diagnostic> {
        if !cluster.groups.is_empty() {
            let headline = "this is for devices that are alike, and the cluster has several groups";
            let help = "ask about one group, or use `plan`, which shares a batch over groups";
            let span = Span::of(cluster.name.clone());
            return Err(Diagnostic::error("E3404", span, headline).help(help));
        }
        let mut rates = devices::rates(cluster)?;
        chosen::set_aside(table, &mut profile, &mut rates);
        let network = devices::network(cluster)?;
        let reserved = cluster.device.reserved_bytes.value;
        let memory_bytes = (cluster.device.memory_bytes.value - reserved).max(0.0);
        let known = |known: &Option<Known>| known.as_ref().map(|known| known.value);
        let host = HostLimits {
            memory_bytes: known(&cluster.host.memory_bytes),
            link_bytes_per_s: rates.host_bytes_per_s,
            shared_bytes_per_s: known(&cluster.host.bandwidth).unwrap_or(f64::INFINITY),
            devices: cluster.devices_per_node.unwrap_or(1) as u64,
        };
        let profile = profile.with_rates(cluster, &rates).in_arithmetic(job.arithmetic);
        if profile.products == ProductKernels::MmaSync {
            rates.multiply_by_mma_sync();
        }
        if let Some(watts) = profile.stated.power_w {
            rates.limit_power(&cluster.device.name, watts)?;
        }
        let peak_flops = devices::peak_flops(cluster, &rates, job.arithmetic);
        let device_bytes = memory_bytes;
        Ok(Estimator {
            work,
            rates,
            network,
            profile,
            job,
            host,
            peak_flops,
            memory_bytes,
            device_bytes,
            devices: 1,
        })
    }

    /// Limits a job to `memory_bytes` bytes of each device; none for all that a device has.
    pub fn limited(mut self, memory_bytes: Option<f64>) -> Estimator<'a> {
        self.memory_bytes = memory_bytes.unwrap_or(f64::INFINITY).min(self.device_bytes);
        self
    }

    /// The estimator of the same job with a global batch of `global_batch` samples.
    pub fn of_batch(&self, global_batch: u64) -> Estimator<'a> {
        Estimator { job: Job { global_batch, ..self.job }, ..self.clone() }
    }

    /// The estimator of the same job on `devices` devices.
    pub fn on_devices(&self, devices: u64) -> Estimator<'a> {
        self.clone().waiting(devices)
    }

    /// Operations per second of a device, of its datasheet, in the arithmetic that times are priced
    /// with.
    pub fn peak_flops(&self) -> f64 {
        self.peak_flops
    }

    /// Bytes of a device beside what programs allocate: context, libraries, communicators.
    pub fn reserve_bytes(&self) -> f64 {
        self.profile.reserve_bytes
    }

    /// What a node's memory beside its devices can take.
    pub fn host(&self) -> HostLimits {
        self.host
    }

    /// The workload.
    pub fn workload(&self) -> &Workload {
        self.work
    }

    /// The part of a configuration that layers see.
    pub fn inside(&self, c: &Configuration) -> Inside {
        Inside::of(c, self.profile.experts)
    }

    /// The inside whose prices are the same, of all that differ in their placement alone.
    pub fn inside_alike(&self, inside: Inside) -> Inside {
        inside.placed(|group| self.network.alike(group))
    }

    /// What of the placement of its axes a configuration's step depends on.
    pub fn placement(&self, c: &Configuration) -> Placement {
        let Inside { tp_group, cp_group, ep_group, slices_group, .. } =
            self.inside_alike(self.inside(c));
        let copies = [Group::data(c), ExpertRanks::of(c, self.profile.experts).copies];
        let [data, experts] = copies.map(|group| self.network.alike_in_parts(group));
        let terms = self.terms();
        let stages = self.network.distance_alike(terms.stages_apart(c));
        let is_far = terms.sends_far(c);
        Placement {
            groups: [tp_group, cp_group, ep_group, slices_group, data, experts],
            stages,
            is_far,
        }
    }

    /// The tables of all configurations whose insides are cut alike.
    ///
    /// **Cost** some thousand operations for each item and tile.
    pub fn prices(&self, inside: Inside) -> Prices {
        let Workload { seq, width, .. } = *self.work;
        let lowering = Lowering {
            rates: &self.rates,
            network: &self.network,
            profile: &self.profile,
            job: &self.job,
            inside,
            seq: f64::from(seq),
            weights: Weights::trained(self.job.arithmetic, self.work.frozen),
        };
        let mut known = KnownItems::default();
        let mut price = |items, width| lowering.price_knowing(&mut known, items, width);
        let layers = self.work.layers.iter();
        let layers = layers.map(|layer| (layer.count, price(&layer.items, layer.width))).collect();
        let tokens = f64::from(inside.microbatch) * f64::from(seq) / f64::from(inside.cp);
        let [first, last] = [&self.work.first, &self.work.last].map(|end| price(end, width));
        let head = self.work.head_parameters() as f64;
        let tied = if self.work.tied { head / f64::from(inside.tp) } else { 0.0 };
        let (tied, tied_frozen_bytes) = match self.work.frozen {
            None => (tied, 0.0),
            Some(_) => (0.0, tied * self.profile.weight_bytes),
        };
        let tied_moments =
            if self.work.tied { lowering.head_moments(&self.work.last) } else { 0.0 };
        Prices {
            layers,
            first,
            last,
            boundary_bytes: tokens * f64::from(width) * self.job.arithmetic.element_bytes(),
            tied_parameters: tied,
            tied_moments,
            tied_frozen_bytes,
        }
    }

    /// A step of `count` micro-batches. `prices` are those of the configuration's inside.
    ///
    /// **Cost** some hundred operations, and some dozen for each stage.
    pub fn step(&self, configuration: &Configuration, prices: &Prices, count: u64) -> Step {
        self.terms().step(configuration, prices, count)
    }

    /// What of such a step is passes, and waiting for them; the other parts are zero.
    pub fn passes(&self, configuration: &Configuration, prices: &Prices, count: u64) -> Breakdown {
        self.terms().passes(configuration, prices, count)
    }

    /// What of such a step is exchanged, updated and moved; the other parts are zero.
    pub fn after(&self, configuration: &Configuration, prices: &Prices, count: u64) -> Breakdown {
        self.terms().after(configuration, prices, count)
    }

    /// Bytes of the fullest stage in such a step.
    pub fn bytes(&self, configuration: &Configuration, prices: &Prices, count: u64) -> f64 {
        self.terms().bytes(configuration, prices, count)
    }

    fn terms(&self) -> Terms<'_> {
        let Estimator { rates, network, profile, host, .. } = self;
        Terms { rates, network, profile, host }
    }

    /// A step with its interval; recomputation that was left open is the least that fits.
    ///
    /// # Errors
    /// `E3401` for each thing about the configuration that makes no sense for this job ([`legal`]).
    pub fn estimate(&self, configuration: &Configuration) -> Result<Estimate, Vec<Diagnostic>> {
        legal::check(self.work, configuration, self.job.global_batch)?;
        self.estimate_run(configuration)
    }

    /// A step of a run that was measured, with its interval. Legality is not checked: the run was
    /// possible, whatever its description says.
    ///
    /// # Errors
    /// `E3401` for what has no price.
    pub(super) fn estimate_run(
        &self,
        configuration: &Configuration,
    ) -> Result<Estimate, Vec<Diagnostic>> {
        configuration.check(self.work.depth())?;
        let Some(count) = configuration.microbatch_count(self.job.global_batch) else {
            return Err(vec![legal::undivided(configuration, self.job.global_batch)]);
        };
        let prices = self.prices(self.inside(configuration));
        let choices: &[Recompute] = match configuration.recompute {
            Recompute::Auto => &[Recompute::None, Recompute::Attention, Recompute::Full],
            Recompute::None | Recompute::Attention | Recompute::Layers(_) | Recompute::Full => {
                &[configuration.recompute]
            }
        };
        let mut decided = configuration.clone();
        let mut step = Step::default();
        for choice in choices {
            decided.recompute = *choice;
            step = self.step(&decided, &prices, count);
            if step.memory.total_bytes() <= self.memory_bytes {
                break;
            }
        }
        let step_time_s = step.breakdown.total_s();
        let printed = if self.profile.prints_first { step.first_memory } else { step.memory };
        let [low, high] = interval::factors(
            &step.breakdown,
            &self.rates,
            self.job.arithmetic,
            self.profile.doubt,
        );
        Ok(Estimate {
            step_time_s,
            step_time_low_s: step_time_s * low,
            step_time_high_s: step_time_s * high,
            breakdown: step.breakdown,
            busy_s: step.busy_s,
            memory: step.memory,
            printed_memory: self.profile.printed(printed, self.memory_bytes),
            microbatch_count: count,
            configuration: decided,
        })
    }
}
