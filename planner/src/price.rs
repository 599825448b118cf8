//! The time of kernels and collectives on one rank of a cluster.
//!
//! A kernel takes `max(flops / rate, bytes / bandwidth) + launch`. Rates are those of the
//! calibration where there is one, else of the datasheet times a chosen efficiency.

use ir::program::{Exchange, Group, Instruction, Routine};
use ir::{Axis, DType, Mesh};
use kernels::{Kernel, price};

use crate::cluster::{Cluster, Kind, Origin};
use crate::link::Link;

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
/// The same from a datasheet. Chosen: cores and links of one name differ by this much.
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

    /// Between which seconds a step takes, that is predicted to take so many.
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

    /// Operations per second of products of so many operations.
    pub fn product_rate(&self, dtype: DType, flops: f64) -> f64 {
        let cluster = self.cluster;
        let measured = cluster.calibration.as_ref().and_then(|calibration| {
            let (rate, _) = calibration.product.get(&dtype)?.at(flops)?;
            let threads = cluster.threads(self.ranks) as f64 / calibration.threads as f64;
            Some(rate * if cluster.device.kind == Kind::Cpu { threads } else { 1.0 })
        });
        measured
            .unwrap_or_else(|| PRODUCT_EFFICIENCY * cluster.flops_per_s(dtype, self.ranks).value)
    }

    /// Bytes per second of fused elementwise kernels, or of copies, of so many bytes.
    pub fn memory_rate(&self, bytes: f64, is_copy: bool) -> f64 {
        let measured = self.cluster.calibration.as_ref().and_then(|calibration| {
            let curve = if is_copy { &calibration.copy } else { &calibration.rows };
            curve.at(bytes).map(|(rate, _)| rate)
        });
        measured
            .unwrap_or_else(|| MEMORY_EFFICIENCY * self.cluster.memory_bandwidth(self.ranks).value)
    }

    /// The most that [`Prices::memory_rate`] says of fused kernels of so many bytes or more.
    pub fn memory_rate_max(&self, bytes: f64) -> f64 {
        let calibration = self.cluster.calibration.as_ref();
        let points = calibration.map_or(&[][..], |c| &c.rows.0).iter();
        let beyond = points.filter(|[at, _]| *at >= bytes).map(|[_, rate]| *rate);
        beyond.fold(self.memory_rate(bytes, false), f64::max)
    }

    /// The time of one launch.
    pub fn launch(&self, kernel: &Kernel) -> LaunchPrice {
        let (flops, bytes) = (price::flops(kernel).0 as f64, price::bytes(kernel).0 as f64);
        let (dtype, is_product, is_copy) = match kernel {
            Kernel::Product(p) => (p.dtype, true, false),
            Kernel::Attention(a) | Kernel::AttentionBwd(a) => (a.dtype, true, false),
            Kernel::Rows(r) => (r.dtype, false, false),
            Kernel::Rope(r) => (r.dtype, false, false),
            Kernel::Gather(g) | Kernel::ScatterAdd(g) => (g.dtype, false, true),
            Kernel::Copy(c) => (c.dtype, false, true),
            Kernel::Place(w) | Kernel::Take(w) => (w.dtype, false, true),
            Kernel::Fill(f) => (f.dtype, false, true),
        };
        let compute = if is_product {
            flops / self.product_rate(dtype, flops)
        } else {
            let peak = self.cluster.flops_per_s(dtype, self.ranks).value;
            flops * ELEMENTWISE_SLOWDOWN / peak
        };
        let memory = bytes / self.memory_rate(bytes, is_copy);
        let measured = self.cluster.calibration.as_ref().and_then(|c| c.launch_s);
        let launch = measured.unwrap_or(self.cluster.device.launch_s.value);
        LaunchPrice { seconds: compute.max(memory) + launch, is_product }
    }

    /// The links of a group of ranks, and how many members it has.
    pub fn group(&self, group: &Group) -> (Link, usize) {
        let Mesh { pp, dp, tp } = self.mesh;
        let (span, members) = match group {
            Group::Axis(Axis::Tp) => (tp, tp),
            Group::Axis(Axis::Dp) => (dp * tp, dp),
            Group::Axis(Axis::Pp) => (pp * dp * tp, pp),
            Group::Axis(Axis::Cp) => (1, 1),
            Group::Stages(stages) => (pp * dp * tp, stages.len()),
            Group::World => (pp * dp * tp, pp * dp * tp),
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
            Exchange::AllGather { outer, inner, counts } => {
                link.all_gather(padded(*outer, *inner, counts), members).0
            }
            Exchange::ReduceScatter { outer, inner, counts } => {
                link.reduce_scatter(padded(*outer, *inner, counts), members).0
            }
        }
    }

    /// The time of a message to the next stage.
    pub fn send(&self, bytes: u64) -> f64 {
        let measured = self.cluster.calibration.as_ref().and_then(|c| c.send);
        let link = match (self.cluster.device.kind, measured) {
            (Kind::Cpu, Some(send)) => send,
            (Kind::Cpu | Kind::Gpu, _) => self.cluster.link(2 * self.mesh.dp * self.mesh.tp),
        };
        link.send(bytes as f64).0
    }

    /// The least time of a call: nobody waits for anybody, no core is shared.
    pub fn routine(&self, routine: &Routine, launches: &[LaunchPrice]) -> f64 {
        let seconds = |instruction: &Instruction| match instruction {
            Instruction::Launch { kernel, .. } => launches[*kernel].seconds,
            Instruction::Collective { exchange, group, dtype, elements, .. } => {
                self.collective(exchange, group, *dtype, *elements)
            }
        };
        routine.instructions.iter().map(seconds).sum()
    }
}
