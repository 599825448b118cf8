//! Bytes of a device, by what holds them.

use schemars::JsonSchema;
use serde::Serialize;

/// Bytes of the fullest stage, by what holds them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub struct Memory {
    /// The stage, from 0.
    pub stage: u32,
    /// Weights.
    pub weights_bytes: f64,
    /// Gradients.
    pub gradients_bytes: f64,
    /// Optimizer state and master weights.
    pub optimizer_bytes: f64,
    /// What is kept for the backward pass.
    pub activations_bytes: f64,
    /// What one layer needs while it runs.
    pub working_bytes: f64,
    /// Context, libraries, communicators.
    pub reserve_bytes: f64,
    /// What was to lie on the host, and has no room there.
    pub host_excess_bytes: f64,
    /// What an allocator keeps of tensors that were freed before the peak, since none that is
    /// larger can take their place. It gives them back before a run fails: no part of the total.
    #[serde(skip)]
    pub freed_bytes: f64,
}

impl Memory {
    /// The parts with their names, in order.
    pub fn parts(&self) -> [(&'static str, f64); 7] {
        [
            ("weights", self.weights_bytes),
            ("gradients", self.gradients_bytes),
            ("optimizer", self.optimizer_bytes),
            ("activations", self.activations_bytes),
            ("working", self.working_bytes),
            ("reserve", self.reserve_bytes),
            ("host overflow", self.host_excess_bytes),
        ]
    }

    /// All of it.
    pub fn total_bytes(&self) -> f64 {
        self.parts().iter().map(|(_, bytes)| bytes).sum()
    }
}
