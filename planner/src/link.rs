//! The time of collectives and messages on one level of links: `α–β`.
//!
//! Legend: n members, α latency of one message, β seconds per byte, V bytes of the whole value.

use kernels::Seconds;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A level of links as one collective sees it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Link {
    /// From the start of a message to its first byte.
    pub latency_s: f64,
    /// Bytes per second, per member and direction.
    pub bandwidth_bytes_per_s: f64,
}

impl Link {
    /// A message from one member to another: `α + V β`.
    pub fn send(self, bytes: f64) -> Seconds {
        Seconds(self.latency_s + bytes / self.bandwidth_bytes_per_s)
    }

    /// Every member gets `V` bytes, of which it has an n-th: `α log2 n + V β (n-1)/n`.
    pub fn all_gather(self, bytes: f64, members: usize) -> Seconds {
        self.ring(bytes, members, 1.0)
    }

    /// Every member gets an n-th of the sum of `V` bytes. Costs what a gather does.
    pub fn reduce_scatter(self, bytes: f64, members: usize) -> Seconds {
        self.ring(bytes, members, 1.0)
    }

    /// Every member gets the sum of `V` bytes: a scatter and a gather, in one call.
    pub fn all_reduce(self, bytes: f64, members: usize) -> Seconds {
        self.ring(bytes, members, 2.0)
    }

    /// Every member gets its piece of the `V` bytes of every one.
    pub fn all_to_all(self, bytes: f64, members: usize) -> Seconds {
        self.ring(bytes, members, 1.0)
    }

    fn ring(self, bytes: f64, members: usize, passes: f64) -> Seconds {
        if members <= 1 {
            return Seconds(0.0);
        }
        let n = members as f64;
        let latency = self.latency_s * n.log2().ceil();
        Seconds(latency + passes * bytes * (n - 1.0) / n / self.bandwidth_bytes_per_s)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_member_has_nothing_to_exchange() {
        let link = Link { latency_s: 1e-6, bandwidth_bytes_per_s: 1e9 };
        assert_eq!(link.all_reduce(1e6, 1), Seconds(0.0));
        assert!(link.all_reduce(1e6, 2).0 > link.all_gather(1e6, 2).0);
    }
}
