//! Parts that the profiles of several releases have in common.

use super::{AroundAttention, Host};

/// An eager release of PyTorch under Python on a server core: 10 µs for an operation with its
/// dispatch, autograd node and share of the interpreter, forward, and 9 µs backward. Five
/// operations for each kernel: the forward pass of Megatron-LM's layer launches 15 kernels and is
/// some 75 calls, of which most are views, modules, and the states of random generators.
pub(super) const EAGER: Host = Host {
    forward_s: 10e-6,
    backward_s: 9e-6,
    operations: 5.0,
    is_blocking: false,
    polling_share: 0.0,
};

/// Kernels that are launched as graphs or by compiled code.
pub(super) const NO_HOST: Host = Host {
    forward_s: 0.0,
    backward_s: 0.0,
    operations: 1.0,
    is_blocking: false,
    polling_share: 0.0,
};

/// Attention kernels that read the product's result where it lies.
pub const NOTHING: AroundAttention = AroundAttention {
    forward_launches: 0.0,
    backward_launches: 0.0,
    forward_bytes: 0.0,
    backward_bytes: 0.0,
};

/// One collective for all gradients of a stage.
pub(super) const WHOLE: f64 = f64::INFINITY;
