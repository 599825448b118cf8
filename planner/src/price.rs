//! The time of kernels and collectives on one rank of a cluster.
//!
//! A kernel takes `max(flops / rate, bytes / bandwidth) + launch`; on CPUs, a product first packs
//! the columns that it is about to multiply, so that the time of both is added. Rates are those of
//! the calibration where there is one, else of the datasheet times a chosen efficiency.

use ir::plan::Place;
use ir::program::{Exchange, Group};
use ir::{Axis, DType, Mesh};
use kernels::{Attention, Kernel, Product, price};

use crate::calibration::{Calibration, Curve};
use crate::cluster::{Cluster, Kind};
use crate::estimate::DISK_BYTES_PER_S;
use crate::link::Link;
use crate::origin::Origin;

/// The part of a datasheet's rate that products reach. Chosen: between 0.51 and 0.97 over vendors
/// and types.
const PRODUCT_EFFICIENCY: f64 = 0.7;
/// The part of a datasheet's bandwidth that elementwise kernels reach. Chosen.
const MEMORY_EFFICIENCY: f64 = 0.8;
/// Products' operations in the time of one other operation. Chosen: vectors without the reuse of
/// registers that products have.
const ELEMENTWISE_SLOWDOWN: f64 = 4.0;

/// By which factor a step may be faster or slower than predicted from a calibration. Chosen: what
/// `benches/accuracy.rs` asks of predictions.
const FITTED_SPREAD: f64 = 1.25;
/// By which factor a step may be faster or slower than predicted from a datasheet. Chosen: cores
/// and links of one name differ by this much.
const DATASHEET_SPREAD: f64 = 3.0;

/// The time of one launch, and what it counts as.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LaunchPrice {
    /// Seconds.
    pub seconds: f64,
    /// Whether it is a matrix product or attention.
    pub is_product: bool,
}

/// Prices on one rank of a mesh on a cluster.
#[derive(Clone, Debug)]
pub struct Prices<'a> {
    cluster: &'a Cluster,
    mesh: Mesh,
    /// Ranks on a node.
    ranks: usize,
}

impl<'a> Prices<'a> {
    /// The prices of a mesh.
    pub fn new(cluster: &'a Cluster, mesh: Mesh) -> Prices<'a> {
        Prices { cluster, mesh, ranks: cluster.ranks_per_node(mesh.ranks()) }
    }

    /// By how much ranks on the same cores slow each other down when all of them are busy.
    pub fn oversubscription(&self) -> f64 {
        self.cluster.oversubscription(self.ranks)
    }

    /// Ranks of a node.
    pub fn ranks_per_node(&self) -> usize {
        self.ranks
    }

    /// Cores of a node.
    pub fn cores(&self) -> f64 {
        self.cluster.device.cores as f64
    }

    /// Prediction interval, in seconds, of a step that is predicted to take `seconds`.
    pub fn interval(&self, seconds: f64) -> [f64; 2] {
        let factor = match &self.cluster.calibration {
            Some(_) => FITTED_SPREAD,
            None => DATASHEET_SPREAD,
        };
        [seconds / factor, seconds * factor]
    }

    /// How the times are known: the weakest of their sources.
    pub fn origin(&self) -> Origin {
        match &self.cluster.calibration {
            Some(_) => Origin::Fitted,
            None => self.cluster.flops_per_s(DType::F32, self.ranks).origin.max(Origin::Datasheet),
        }
    }

    /// The threads of a rank, for each one that was measured.
    fn threads(&self) -> f64 {
        let Cluster { device, calibration, .. } = self.cluster;
        match (device.kind, calibration) {
            (Kind::Cpu, Some(c)) => self.cluster.threads(self.ranks) as f64 / c.threads as f64,
            (Kind::Cpu | Kind::Gpu, _) => 1.0,
        }
    }

    /// The rate of a rank on some work: its threads share it evenly.
    fn measured(
        &self,
        work: f64,
        curve: impl Fn(&'a Calibration) -> Option<&'a Curve>,
    ) -> Option<f64> {
        let threads = self.threads();
        let curve = curve(self.cluster.calibration.as_ref()?)?;
        curve.at(work / threads).map(|(rate, _)| rate * threads)
    }

    /// Operations per second of a matrix product of `flops` operations.
    pub fn product_rate(&self, dtype: DType, flops: f64) -> f64 {
        // A file from before products of BF16 were measured has none.
        let wide = dtype.accumulation();
        let curve = |c: &'a Calibration| c.product.get(&dtype).or_else(|| c.product.get(&wide));
        self.measured(flops, curve).unwrap_or_else(|| {
            PRODUCT_EFFICIENCY * self.cluster.flops_per_s(dtype, self.ranks).value
        })
    }

    /// Operations per second of attention, or of its gradient.
    fn attention_rate(&self, a: &Attention, flops: f64, is_gradient: bool) -> f64 {
        let heads = (a.batch * a.heads) as f64;
        // Heads are the tasks that threads share.
        let calibration =
            self.cluster.calibration.as_ref().filter(|_| a.dtype.accumulation() == DType::F32);
        let curve = calibration.map(|c| if is_gradient { &c.attention_bwd } else { &c.attention });
        let measured = curve.and_then(|curve| curve.at(flops / heads));
        let measured = measured.map(|(rate, _)| rate * self.threads());
        measured.unwrap_or_else(|| self.product_rate(a.dtype, flops))
    }

    /// Bytes per second of a fused elementwise kernel, or of a copy, that moves `bytes` bytes.
    pub fn memory_rate(&self, bytes: f64, is_copy: bool) -> f64 {
        self.measured(bytes, |c| Some(if is_copy { &c.copy } else { &c.rows }))
            .unwrap_or_else(|| MEMORY_EFFICIENCY * self.cluster.memory_bandwidth(self.ranks).value)
    }

    /// Operations per second of kernels that are neither products nor attention.
    fn elementwise_rate(&self, dtype: DType) -> f64 {
        let calibration = self.cluster.calibration.as_ref();
        let measured = calibration.and_then(|c| c.elementwise_flops_per_s);
        let f32_of = if dtype == DType::F64 { 0.5 } else { 1.0 };
        measured.map(|rate| rate * f32_of * self.threads()).unwrap_or_else(|| {
            self.cluster.flops_per_s(dtype, self.ranks).value / ELEMENTWISE_SLOWDOWN
        })
    }

    /// Upper bound on [`Prices::memory_rate`] of fused kernels that move `bytes` bytes or more.
    pub fn memory_rate_max(&self, bytes: f64) -> f64 {
        let calibration = self.cluster.calibration.as_ref();
        let points = calibration.map_or(&[][..], |c| &c.rows.0).iter();
        let threads = self.threads();
        let beyond = points.filter(|[at, _]| *at * threads >= bytes);
        let beyond = beyond.map(|[_, rate]| *rate * threads);
        beyond.fold(self.memory_rate(bytes, false), f64::max)
    }

    /// The time of one launch.
    pub fn launch(&self, kernel: &Kernel) -> LaunchPrice {
        let (flops, bytes) = (price::flops(kernel).0 as f64, price::bytes(kernel).0 as f64);
        let is_copy = matches!(
            kernel,
            Kernel::Gather(_)
                | Kernel::ScatterAdd(_)
                | Kernel::Replace(_)
                | Kernel::Copy(_)
                | Kernel::Place(_)
                | Kernel::Take(_)
                | Kernel::Fill(_)
        );
        let (rate, is_product) = match kernel {
            Kernel::Product(p) => (self.product_rate(multiplied(p), flops), true),
            // One after the other: each is as fast as it would be alone.
            Kernel::Products(p) => {
                let then = price::pointwise_flops(p).0 as f64;
                let products = flops - then;
                let dtype = p.parts.first().map_or(DType::F32, |part| multiplied(&part.product));
                let rate = self.product_rate(dtype, products / p.parts.len().max(1) as f64);
                // Programs on their results take their time beside that of the products.
                let slower = then / self.elementwise_rate(p.dtype());
                (if then > 0.0 { flops / (products / rate + slower) } else { rate }, true)
            }
            Kernel::Attention(a) => (self.attention_rate(a, flops, false), true),
            Kernel::AttentionBwd(a) => (self.attention_rate(a, flops, true), true),
            // Products of the rows of each expert.
            Kernel::Experts(e) => {
                (self.product_rate(e.dtype, flops / (3 * e.experts.max(1)) as f64), true)
            }
            Kernel::ExpertsBwd(e) => {
                (self.product_rate(e.dtype, flops / (8 * e.experts.max(1)) as f64), true)
            }
            Kernel::Rows(r) => (self.elementwise_rate(r.dtype), false),
            Kernel::Rope(r) => (self.elementwise_rate(r.dtype), false),
            Kernel::Gather(g) | Kernel::ScatterAdd(g) | Kernel::Replace(g) => {
                (self.elementwise_rate(g.dtype), false)
            }
            Kernel::Lines(l) => (self.elementwise_rate(l.dtype), false),
            Kernel::Copy(c) => (self.elementwise_rate(c.dtype), false),
            Kernel::Place(w) | Kernel::Take(w) => (self.elementwise_rate(w.dtype), false),
            Kernel::Fill(f) => (self.elementwise_rate(f.dtype), false),
        };
        let compute = flops / rate + self.packing_s(kernel);
        let memory = bytes / self.memory_rate(bytes, is_copy);
        let measured = self.cluster.calibration.as_ref().and_then(|c| c.launch_s);
        let launch = measured.unwrap_or(self.cluster.device.launch_s.value);
        LaunchPrice { seconds: compute.max(memory) + launch, is_product }
    }

    /// Seconds in which matrix products pack columns, while nothing is multiplied. It counts where
    /// few rows share a packed column.
    fn packing_s(&self, kernel: &Kernel) -> f64 {
        if self.cluster.device.kind != Kind::Cpu {
            return 0.0;
        }
        let packed = |p: &Product| {
            let [batch, _, columns, depth] = p.sizes();
            (batch * columns * depth) as u64 * p.stored.b.size()
        };
        let bytes: u64 = if let Kernel::Product(p) = kernel {
            packed(p)
        } else if let Kernel::Products(p) = kernel {
            p.parts.iter().map(|part| packed(&part.product)).sum()
        } else {
            return 0.0;
        };
        bytes as f64 / self.memory_rate(bytes as f64, false)
    }

    /// The links of a group of ranks, and how many members it has.
    pub fn group(&self, group: &Group) -> (Link, usize) {
        let Mesh { pp, dp, cp, tp, .. } = self.mesh;
        let (stage, ranks) = (dp * cp * tp, pp * dp * cp * tp);
        let (span, members) = match group {
            Group::Axis(Axis::Tp) => (tp, tp),
            Group::Axis(Axis::Cp) => (cp * tp, cp),
            Group::Axis(Axis::Dp) => (stage, dp),
            Group::Data => (stage, dp * cp),
            Group::Shards(count) => (count * tp, *count),
            Group::Copies(count) => (stage, dp * cp / count),
            Group::Strided { count, stride } => (count * stride * tp, *count),
            Group::Experts(count) => (*count, *count),
            Group::Axis(Axis::Pp) => (ranks, pp),
            Group::Axis(Axis::Ep) => (1, 1),
            Group::Stages(stages) => (ranks, stages.len()),
            Group::World => (ranks, ranks),
        };
        (self.cluster.link(span), members)
    }

    /// The time of a collective once all members are there. Pieces are padded to the largest.
    pub fn collective(
        &self,
        exchange: &Exchange,
        group: &Group,
        dtype: DType,
        elements: usize,
    ) -> f64 {
        let (link, members) = self.group(group);
        let padded = |outer: usize, inner: usize, counts: &[usize]| {
            let largest = counts.iter().max().copied().unwrap_or(0);
            (outer * inner * largest * members) as f64 * dtype.size() as f64
        };
        match exchange {
            Exchange::AllReduce(_) => {
                link.all_reduce(elements as f64 * dtype.size() as f64, members).0
            }
            Exchange::AllGather { outer, inner, counts, .. } => {
                link.all_gather(padded(*outer, *inner, counts), members).0
            }
            Exchange::ReduceScatter { outer, inner, counts, .. } => {
                link.reduce_scatter(padded(*outer, *inner, counts), members).0
            }
            Exchange::AllToAll { .. } => {
                link.all_to_all(elements as f64 * dtype.size() as f64, members).0
            }
            Exchange::Dispatch(routed) | Exchange::Combine(routed) => {
                let rows = routed.visitors() * routed.pieces as f64;
                let bytes = rows * routed.width as f64 * dtype.size() as f64;
                link.all_to_all(bytes, members).0
            }
        }
    }

    /// The time in which bytes are copied from the device to another place, or from there. Ranks of
    /// a node have a disk together.
    pub fn copy(&self, place: Place, bytes: u64) -> f64 {
        let bytes = bytes as f64;
        match place {
            Place::Device => 0.0,
            Place::Host => 2.0 * bytes / self.memory_rate(2.0 * bytes, true),
            Place::Disk => {
                let rate = DISK_BYTES_PER_S / self.ranks.max(1) as f64;
                bytes / rate.min(self.memory_rate(2.0 * bytes, true) / 2.0)
            }
        }
    }

    /// The time of a message to the next stage.
    pub fn send(&self, bytes: u64) -> f64 {
        let measured = self.cluster.calibration.as_ref().and_then(|c| c.send);
        let link = match (self.cluster.device.kind, measured) {
            (Kind::Cpu, Some(send)) => send,
            (Kind::Cpu | Kind::Gpu, _) => {
                let Mesh { dp, cp, tp, .. } = self.mesh;
                self.cluster.link(2 * dp * cp * tp)
            }
        };
        link.send(bytes as f64).0
    }
}

/// The type whose products are as fast as this one: of two operands of BF16 that, of codes with
/// scales theirs, else that of its sums.
fn multiplied(p: &Product) -> DType {
    match [p.stored.a, p.stored.b] {
        [DType::BF16, DType::BF16] => DType::BF16,
        [code, _] if p.scales.is_some() => code,
        _ => p.dtype,
    }
}
