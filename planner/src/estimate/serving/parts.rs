//! Where the time of a pass of inference goes, and how far its prediction may be off.
//!
//! A product takes the time of its operations or that of its bytes, whichever is longer, with a
//! smooth passage between. A pass is homogeneous in the times of all that it does: where everything
//! takes twice as long, it does. What it loses where one thing takes a share longer, over that
//! share, is the part of that thing; by Euler's theorem the parts sum to the pass.

use std::ops::Add;

use schemars::JsonSchema;
use serde::Serialize;

use super::{Batch, Replica, Serving, Work};
use crate::estimate::interval::{self, ROWS, START, TENSOR, UNKNOWN};
use crate::estimate::rates::Rates;

/// The seconds of a pass, by what takes them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub struct Parts {
    /// Products read their weights, and the few rows that these are multiplied with.
    pub weights_s: f64,
    /// What is cached is read.
    pub cache_s: f64,
    /// Operations of products and of attention over new tokens.
    pub arithmetic_s: f64,
    /// Kernels that move rows.
    pub rows_s: f64,
    /// Kernels start and end.
    pub launches_s: f64,
    /// Collectives of tensor parallelism.
    pub tensor_s: f64,
    /// Tokens go to their experts and back.
    pub expert_s: f64,
    /// Messages between stages.
    pub send_s: f64,
    /// The device waits for the host to dispatch.
    pub dispatch_s: f64,
    /// Another model drafts tokens.
    pub draft_s: f64,
}

/// By how much a rate is changed to see what depends on it. Chosen: far above rounding, far below
/// what makes another tile the fastest.
const STEP: f64 = 1e-6;

impl Parts {
    /// The parts with their names, in order.
    pub fn parts(&self) -> [(&'static str, f64); 10] {
        [
            ("weights read", self.weights_s),
            ("KV read", self.cache_s),
            ("arithmetic", self.arithmetic_s),
            ("rows", self.rows_s),
            ("launches", self.launches_s),
            ("tensor", self.tensor_s),
            ("expert", self.expert_s),
            ("send", self.send_s),
            ("dispatch", self.dispatch_s),
            ("draft", self.draft_s),
        ]
    }

    /// Each part times a factor.
    pub(super) fn scaled(self, factor: f64) -> Parts {
        self.with(Parts::default(), |a, _| factor * a)
    }

    /// What `of` says of each part of both.
    fn with(self, other: Parts, of: impl Fn(f64, f64) -> f64) -> Parts {
        Parts {
            weights_s: of(self.weights_s, other.weights_s),
            cache_s: of(self.cache_s, other.cache_s),
            arithmetic_s: of(self.arithmetic_s, other.arithmetic_s),
            rows_s: of(self.rows_s, other.rows_s),
            launches_s: of(self.launches_s, other.launches_s),
            tensor_s: of(self.tensor_s, other.tensor_s),
            expert_s: of(self.expert_s, other.expert_s),
            send_s: of(self.send_s, other.send_s),
            dispatch_s: of(self.dispatch_s, other.dispatch_s),
            draft_s: of(self.draft_s, other.draft_s),
        }
    }

    /// All of it.
    pub fn total_s(&self) -> f64 {
        self.parts().iter().map(|(_, seconds)| seconds).sum()
    }

    /// What the devices themselves compute or move.
    pub fn busy_s(&self) -> f64 {
        let own_s = self.weights_s + self.cache_s + self.arithmetic_s;
        own_s + self.rows_s + self.launches_s + self.draft_s
    }
}

impl Add for Parts {
    type Output = Parts;

    fn add(self, other: Parts) -> Parts {
        self.with(other, |a, b| a + b)
    }
}

impl Work {
    /// Seconds of devices, without communication: of kernels, and of reading what is cached.
    fn device_s(&self) -> [f64; 2] {
        let passes = [self.layers, self.first, self.last];
        [passes.map(|pass| pass.compute_s()).iter().sum(), self.cached_s]
    }
}

impl Serving<'_> {
    /// The parts of [`Serving::forward`]'s time from the first layer to the last.
    pub fn parts(&self, copy: Replica, batch: u32, tokens: u32, cached: u64) -> Parts {
        self.parts_of(copy, &Batch::of(batch, tokens, cached))
    }

    /// The parts of [`Serving::pass`]'s time from the first layer to the last. What waits for the
    /// host is the rest.
    pub fn parts_of(&self, copy: Replica, batch: &Batch) -> Parts {
        let work = self.work(copy, batch);
        let lost = |slow: &dyn Fn(&mut Rates)| -> [f64; 2] {
            let mut estimator = self.estimator.clone();
            slow(&mut estimator.rates);
            let slower = Serving { estimator: &estimator, ..*self };
            let slower = slower.work(copy, batch).device_s();
            let now = work.device_s();
            [0, 1].map(|at| ((slower[at] - now[at]) / STEP).max(0.0))
        };
        let longer = 1.0 + STEP;
        let [weights_s, _] =
            lost(&|rates| rates.product.iter_mut().for_each(|p| p.bytes_per_s /= longer));
        let [arithmetic_s, on_cache_s] = lost(&|rates| {
            rates.product.iter_mut().for_each(|p| p.peak_flops /= longer);
            rates.attention.forward_flops /= longer;
        });
        let [rows_s, cache_s] = lost(&|rates| rates.memory_bytes_per_s /= longer);
        let launches_s = lost(&|rates| {
            for product in &mut rates.product {
                product.floor_s *= longer;
                product.tile_s *= longer;
            }
            rates.attention.floor_s *= longer;
            rates.kernel_s *= longer;
        });
        let sum = |of: fn(&crate::estimate::price::Pass) -> f64| {
            of(&work.layers) + of(&work.first) + of(&work.last)
        };
        let device_s: f64 = work.device_s().iter().sum();
        let arithmetic_s = arithmetic_s + on_cache_s;
        let launches_s = launches_s.iter().sum();
        let of_device_s = weights_s + cache_s + arithmetic_s + rows_s + launches_s;
        let waits_for_host = self.estimator.profile.host.forward_s > 0.0;
        Parts {
            weights_s,
            cache_s,
            arithmetic_s,
            rows_s,
            launches_s,
            dispatch_s: if waits_for_host { (device_s - of_device_s).max(0.0) } else { 0.0 },
            tensor_s: sum(|pass| pass.tensor_s),
            expert_s: sum(|pass| pass.expert_s),
            send_s: work.sends_s[0],
            draft_s: 0.0,
        }
    }

    /// By which factors a pass may be shorter and longer, so that four in five lie between: as
    /// steps of training of which each part takes as long.
    pub fn factors(&self, parts: &Parts) -> [f64; 2] {
        let Self { estimator, .. } = self;
        let product = estimator.rates.product_rates(estimator.job.arithmetic).spread;
        let attention = estimator.rates.attention.spread;
        let spreads = [
            (parts.weights_s, product),
            (parts.cache_s, ROWS),
            (parts.arithmetic_s, product.max(attention)),
            (parts.rows_s, ROWS),
            (parts.launches_s, START),
            (parts.tensor_s, TENSOR),
            (parts.expert_s, UNKNOWN),
            (parts.send_s, UNKNOWN),
            (parts.dispatch_s, UNKNOWN),
            (parts.draft_s, product),
        ];
        interval::around(&spreads, parts.expert_s > 0.0, estimator.profile.doubt)
    }
}
