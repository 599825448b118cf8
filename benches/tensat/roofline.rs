//! The published limits of the device of the peers' table.

/// What a kernel does.
#[derive(Clone, Copy, Default)]
pub(crate) struct Work {
    /// Operations of products.
    pub(crate) flops: u64,
    /// Bytes read and written.
    pub(crate) bytes: u64,
}

/// NVIDIA T4, `f32` (datasheet, 2018): operations and bytes a second.
const FLOPS_PER_S: f64 = 8.1e12;
const BYTES_PER_S: f64 = 320e9;
/// Seconds of a launch. Chosen: between the 3 and 10 microseconds that eager kernels take.
const LAUNCH_S: f64 = 5e-6;

/// The seconds of kernels one after the other, each as fast as the device allows.
pub(crate) fn seconds(kernels: &[Work]) -> f64 {
    let seconds = |work: &Work| {
        LAUNCH_S + (work.flops as f64 / FLOPS_PER_S).max(work.bytes as f64 / BYTES_PER_S)
    };
    kernels.iter().map(seconds).sum()
}
