//! Execution profiles: how a framework's release executes a layer, as facts about its software.
//!
//! A profile holds no constant that was fitted to a measured run. Each field says what the release
//! does: which kernels are fused, what overlaps, what is stored in which type, how much a host
//! does for one operation. [`Profile::source`] says where that can be read.

mod engines;
mod facts;
mod parts;
mod releases;
mod sharded;

pub use engines::{ENGINES, of_engine};
pub use facts::{Assumption, Counted, FACTS, Fact, Stated, Update, completions, table};
pub use parts::NOTHING;
pub use releases::{
    DEEPSPEED, DEFAULT, GANTLINE, MEGATRON_2022, MEGATRON_BRIDGE, PROFILES, of_framework,
    on_new_device,
};
pub use sharded::{TORCH_FSDP, TORCHTITAN_2025};

use serde::Serialize;

use super::devices;
pub use super::experts::ExpertPlacement;
use super::memory::Memory;
use super::rates::{Arithmetic, AttentionKernel, ProductKernels, Rates};
use super::workload::Workload;
use crate::cluster::Cluster;
use ir::target::{Arch, Target};

/// How something is exchanged over data-parallel ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Exchange {
    /// After the last backward pass, or where it is needed: nothing runs beside it.
    AtEnd,
    /// Beside computation.
    Overlapped,
}

/// What selective recomputation recomputes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Selective {
    /// The inside of attention (Korthikanti et al. 2022).
    Attention,
    /// Everything but the inside of attention and every second product.
    Operations,
}

/// To how many words a vocabulary is padded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum VocabularyPadding {
    /// None: the words that the model has.
    Never,
    /// Where the ranks of `tp` do not divide it.
    ToDivide,
    /// Where they do not, or a rank's columns are odd to load.
    ToLoad,
}

/// What the peak of memory that a run prints counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Printed {
    /// All that a device's driver sees.
    Device,
    /// What the allocator holds, of use or not (`max_memory_reserved` of PyTorch).
    Reserved,
    /// What tensors hold (`max_memory_allocated`).
    Allocated,
}

/// How weights that are sharded stay whole for a while, and sums of gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Whole {
    /// What a call reads and the next one does, and the gradients that it makes, from right before
    /// to right after it: what programs of `codegen` hold.
    Calls,
    /// Two layers at a time.
    Layers,
    /// The ends of the model too, from the forward to the backward pass: PyTorch gathers them with
    /// the root, which it does not shard again. Stages keep all of theirs, and reduce gradients
    /// after their last micro-batch.
    Ends,
    /// So, and gradients are reduced after the last micro-batch of any run (`no_sync`).
    EndsAndSums,
}

/// How long the host needs to give the device work.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Host {
    /// Seconds of one operation of the forward pass; 0 where kernels are launched as a graph.
    pub forward_s: f64,
    /// Seconds of one operation of the backward pass.
    pub backward_s: f64,
    /// Operations for each one that launches a kernel: views, modules, and their book-keeping.
    pub operations: f64,
    /// Whether the host waits for each kernel before it goes on.
    pub is_blocking: bool,
    /// Share of a host's time that goes to threads of the communication library while messages
    /// between stages on different nodes are under way.
    pub polling_share: f64,
}

/// What a release launches around fused attention: copies that lay queries, keys and values out,
/// and small kernels that describe them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct AroundAttention {
    /// Launches of the forward pass.
    pub forward_launches: f64,
    /// Launches of the backward pass.
    pub backward_launches: f64,
    /// Bytes that copies move forward, for each element of queries, keys and values.
    pub forward_bytes: f64,
    /// Bytes that copies move backward, for each of them.
    pub backward_bytes: f64,
}

/// How a framework executes a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Profile {
    /// The name in flags.
    pub name: &'static str,
    /// The instructions of products.
    pub products: ProductKernels,
    /// The inside of attention.
    pub attention: AttentionKernel,
    /// Whether causal attention skips what is masked.
    pub skips_masked: bool,
    /// What is launched around fused attention.
    pub around_attention: AroundAttention,
    /// Words of the vocabulary, where the release's runs fix it.
    pub vocabulary: Option<u32>,
    /// When a vocabulary is padded.
    pub vocabulary_padding: VocabularyPadding,
    /// Whether a normalisation is one kernel.
    pub fused_norm: bool,
    /// Whether bias and activation are one kernel.
    pub fused_activation: bool,
    /// Whether bias, dropout and residual are one kernel.
    pub fused_residual: bool,
    /// Whether the rotation of queries and keys is one kernel.
    pub fused_rope: bool,
    /// Whether there is dropout, in attention and between layers.
    pub dropout: bool,
    /// Bytes per logit that the loss reads and writes, forward and backward.
    pub loss_bytes: [f64; 2],
    /// Bytes per logit that the loss keeps.
    pub loss_saved_bytes: f64,
    /// Bytes per logit that it needs beside them while gradients are made.
    pub loss_working_bytes: f64,
    /// Bytes per logit that it needs more where logits are cut over `tp`.
    pub loss_cut_bytes: f64,
    /// Whether each rank of `tp` holds the embedding and all logits.
    pub whole_logits: bool,
    /// The host.
    pub host: Host,
    /// When gradients are exchanged.
    pub gradients: Exchange,
    /// When weights are gathered, where they are sharded.
    pub weights: Exchange,
    /// When they are gathered again for the backward pass.
    pub backward_weights: Exchange,
    /// Bytes of a weight.
    pub weight_bytes: f64,
    /// Bytes of a gradient element where it is held.
    pub gradient_bytes: f64,
    /// Bytes of a gradient element where it is exchanged.
    pub exchange_bytes: f64,
    /// Bytes of the largest collective that gradients and weights are exchanged in.
    pub bucket_bytes: f64,
    /// What stays whole for a while, where weights are sharded.
    pub whole: Whole,
    /// Collectives that the weights of a layer are gathered in, where they are sharded.
    pub pieces_per_layer: f64,
    /// Whether collectives of sharded state take lists of tensors, of which each rank's piece is
    /// copied by itself.
    pub copies_pieces: bool,
    /// Whether weights that were gathered are copied into their tensors before they are used, and
    /// gradients out of theirs before they are reduced.
    pub copies_gathered: bool,
    /// Bytes per parameter that adding a micro-batch's gradients reads and writes.
    pub accumulate_bytes: f64,
    /// Whether the products that make gradients of weights add them to the sum themselves.
    pub fuses_accumulation: bool,
    /// What selective recomputation recomputes.
    pub selective: Selective,
    /// Whether the host launches products, casts and scales for each expert of a rank alone.
    pub product_per_expert: bool,
    /// Bytes of optimizer state of a parameter, master weight included.
    pub state_bytes: f64,
    /// Whether the update reads a copy in single precision of gradients that are narrower; it is
    /// sharded as the state is.
    pub copies_gradients: bool,
    /// Bytes that an update reads and writes per parameter, with clipping and casts.
    pub update_bytes: f64,
    /// Share of the collectives of tensor parallelism that run beside products.
    pub tensor_hidden: f64,
    /// Share of those of the backward pass that run beside the gradients of weights, as far as
    /// these are long enough.
    pub tensor_backward_hidden: f64,
    /// Operations of the host for one collective of tensor parallelism.
    pub tensor_operations: f64,
    /// Whether stages are cut by the operations of layers and ends, not by the number of layers.
    pub balances_stages: bool,
    /// What is recomputed where a run does not say: `none`, `attention` or `full`.
    pub usual_recompute: &'static str,
    /// The stage of sharding where a run does not say.
    pub usual_zero: u8,
    /// Whether the backward pass recomputes norms from their inputs, rotary embedding keeps its
    /// result alone, and recomputed attention keeps no result either.
    pub recomputes_rows: bool,
    /// Whether an update over sharded states has a shard of the summed gradients, and of the
    /// weights that are gathered, beside the states. They lie where activations were.
    pub updates_in_pieces: bool,
    /// Whether what a stage sends is kept until its backward pass, beside what its layers keep.
    pub keeps_sent: bool,
    /// Whether sequences are cut over `tp` where a run does not say.
    pub usual_sequence_parallel: bool,
    /// The network of the cluster that the profile's runs were made on.
    pub fabric: &'static str,
    /// Whether results that a collective over `tp` has read are of use again only when the device
    /// has come past it, while the host runs ahead (`record_stream` of PyTorch).
    pub frees_late: bool,
    /// Where ranks that share experts lie.
    pub experts: ExpertPlacement,
    /// Whether the backward pass gathers tokens and computes what is inside of experts again, of
    /// which nothing is kept: what programs of `codegen` do.
    pub experts_again: bool,
    /// Whether a token goes once to a node where several of its experts are.
    pub experts_once: bool,
    /// Whether stages send while they compute.
    pub sends_hidden: bool,
    /// Whether a stage boundary carries each element once over `tp`, gathered at the receiver.
    pub scatter_gather: bool,
    /// Whether the peak of memory that a run prints is that of its first rank, not of the fullest.
    pub prints_first: bool,
    /// What that peak counts.
    pub prints: Printed,
    /// Bytes of the context and libraries that no tensor accounts for.
    pub reserve_bytes: f64,
    /// Bytes that an allocator holds in pieces that nothing asks for, for each byte that comes and
    /// goes: they count in what a run prints, and are given back before a run fails.
    pub printed_share: f64,
    /// Relative spread of step times for what is not known of the release; 0 for one that is known.
    pub doubt: f64,
    /// What a user stated on top of the release.
    pub stated: Stated,
    /// Where the facts are from.
    pub source: &'static str,
}

/// Bytes of a number in single precision.
const SINGLE_BYTES: f64 = 4.0;
/// Bytes of the two moments of a parameter.
const MOMENTS_BYTES: f64 = 8.0;
/// Bytes that an update in single precision moves: weight, gradient and moments are read, all but
/// the gradient written.
const SINGLE_UPDATE_BYTES: f64 = 28.0;

impl Profile {
    /// Memory as a run of this profile prints it, on a device of `device_bytes` bytes. Memory that
    /// the allocator caches unused counts as working memory, as far as the device has room for it:
    /// an allocator gives it back where a device is full.
    pub(super) fn printed(&self, held: Memory, device_bytes: f64) -> Memory {
        let (freed, reserve) = match self.prints {
            Printed::Device => (0.0, held.reserve_bytes),
            Printed::Reserved => (held.freed_bytes, 0.0),
            Printed::Allocated => (0.0, 0.0),
        };
        let unused = (held.activations_bytes + held.working_bytes) * self.printed_share + freed;
        let room = (device_bytes - held.total_bytes()).max(0.0);
        Memory {
            working_bytes: held.working_bytes + unused.min(room),
            reserve_bytes: reserve,
            ..held
        }
    }

    /// The same on the devices of a cluster. Our own kernels multiply by the fastest instructions
    /// of Ampere and Hopper; for other architectures, and for an older one than the device's that
    /// a cluster file names, they multiply by `mma.sync`, attention too.
    pub fn on(self, cluster: &Cluster) -> Profile {
        match devices::rates(cluster) {
            Ok(rates) => self.with_rates(cluster, &rates),
            Err(_) => self,
        }
    }

    /// The same, given the rates of these devices.
    pub(super) fn with_rates(self, cluster: &Cluster, rates: &Rates) -> Profile {
        let is_ours = self.name == GANTLINE.name;
        let is_behind = rates.attention.second_generation < 1.0
            && cluster.target() != Some(Target::Cuda(Arch::Sm90a));
        if !is_ours || !is_behind {
            return self;
        }
        let is_best = self.attention == AttentionKernel::FlashBest;
        let attention = match is_best && !self.stated.says("attention") {
            true => AttentionKernel::Flash2,
            false => self.attention,
        };
        let products = match self.stated.says("products") {
            true => self.products,
            false => ProductKernels::MmaSync,
        };
        Profile { attention, products, ..self }
    }

    /// What is assumed of the executor, for people: the attention kernel, and bytes per parameter
    /// of weights, gradients and optimizer, master weights included.
    pub fn describe(&self) -> String {
        let Profile { name, weight_bytes, gradient_bytes, .. } = self;
        let bytes = self.optimizer_bytes();
        let optimizer = match self.stated.update {
            Update::Elements => format!("{bytes}"),
            Update::Factored | Update::Orthogonal => format!("({bytes} + moments)"),
        };
        let products = match self.products {
            ProductKernels::Fastest => "",
            ProductKernels::MmaSync => "products by mma.sync, ",
        };
        format!(
            "{name}: {products}{}; {weight_bytes} + {gradient_bytes} + {optimizer} bytes a \
             parameter in weights, gradients and optimizer",
            self.attention.name()
        )
    }

    /// Bytes that the optimizer holds for a parameter: its state, and the copy of its gradient.
    pub fn optimizer_bytes(&self) -> f64 {
        let is_copied = self.copies_gradients && self.gradient_bytes < SINGLE_BYTES;
        self.state_bytes + if is_copied { SINGLE_BYTES } else { 0.0 }
    }

    /// The same, with gradients summed over micro-batches and ranks in single precision.
    pub const fn summing_in_single(self) -> Profile {
        Profile {
            gradient_bytes: SINGLE_BYTES,
            exchange_bytes: SINGLE_BYTES,
            accumulate_bytes: 2.0 * SINGLE_BYTES,
            ..self
        }
    }

    /// Operations of a step for one sample, as MFU counts them.
    pub fn counted_flops(&self, work: &Workload) -> f64 {
        let Stated { counted, counts_masked, .. } = self.stated;
        let attention = work.attention_flops_per_token();
        let [seen, masked] = attention.map(|flops| flops * f64::from(work.seq));
        let masked = if counts_masked { masked } else { 0.0 };
        let parameters = 6.0 * work.visited_parameters() * f64::from(work.seq);
        match counted {
            Counted::Products => work.flops_per_sample() + masked,
            Counted::Parameters => parameters,
            Counted::ParametersAndAttention => parameters + seen + masked,
        }
    }

    /// Operations per second that MFU is against, of a device with `dense` ones.
    pub fn counted_peak(&self, dense: f64) -> f64 {
        dense * if self.stated.sparse_peak { 2.0 } else { 1.0 }
    }

    /// How operations are counted, in words.
    pub fn convention(&self) -> String {
        let Stated { counted, counts_masked, sparse_peak, .. } = self.stated;
        let causal = if counts_masked { "causal attention twice" } else { "causal attention once" };
        let flops = match counted {
            Counted::Products => format!("2 flops per multiply-add, {causal}"),
            Counted::Parameters => "6 flops per parameter that a token visits".to_owned(),
            Counted::ParametersAndAttention => {
                format!("6 flops per parameter that a token visits, those of attention, {causal}")
            }
        };
        flops + if sparse_peak { ", against the peak with sparsity" } else { "" }
    }

    /// This profile with what a user states on top of it.
    pub fn stating(self, stated: Stated) -> Profile {
        Profile { stated, ..self }
    }

    /// This profile in another arithmetic: in single precision weights and gradients have 4 bytes
    /// per element, and there is no second copy of them. What a user stated goes before.
    pub fn in_arithmetic(self, arithmetic: Arithmetic) -> Profile {
        let profile = match arithmetic {
            Arithmetic::Half | Arithmetic::F8 | Arithmetic::F4 => self,
            Arithmetic::F32 | Arithmetic::Tf32 => Profile {
                weight_bytes: 4.0,
                gradient_bytes: 4.0,
                exchange_bytes: 4.0,
                state_bytes: MOMENTS_BYTES,
                update_bytes: SINGLE_UPDATE_BYTES,
                ..self
            },
        };
        profile.stated.applied(profile)
    }
}
