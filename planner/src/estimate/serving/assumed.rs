//! What the price of inference assumes, fact by fact.

use super::{Serving, Storage, caches};
use crate::estimate::profile::Assumption;

impl Serving<'_> {
    /// How weights and caches are stored, and the facts of the executor that passes are priced
    /// with.
    pub fn assumptions(&self) -> Vec<Assumption> {
        let mut profile = self.estimator.profile;
        profile.stated.imbalance = Some(self.estimator.work.busiest());
        let stored = [
            Assumption {
                name: "weights",
                value: self.weights_text(),
                stated: self.storage.weights.is_some(),
            },
            Assumption {
                name: "kv-cache",
                value: self.cache_text(),
                stated: self.storage.cache != Storage::default().cache,
            },
        ];
        stored.into_iter().chain(profile.assumptions_of_inference()).collect()
    }

    /// Bytes of a parameter of products, and of those of the ends where they differ.
    fn weights_text(&self) -> String {
        let rounded = |bytes: f64| (bytes * 1e4).round() / 1e4;
        let [products, head] = [self.weight_bytes(), self.end_bytes()].map(rounded);
        let table = rounded(self.estimator.job.arithmetic.element_bytes());
        let each = format!("{products} bytes a parameter");
        match (products == head, products == table) {
            (true, true) => each,
            (true, false) => format!("{each}, {table} in the embedding"),
            (false, _) => format!("{each}, {table} in the embedding and {head} in the head"),
        }
    }

    /// The format of the KV cache, and the bytes of a token in one layer of a whole replica.
    fn cache_text(&self) -> String {
        let name = self.storage.cache.name;
        let Some(layer) = self.estimator.work.layers.iter().find(|layer| caches(layer)) else {
            return name.to_owned();
        };
        let bytes = self.cached_bytes(self.alone(1, 1), &layer.items);
        let shared = if self.latent.is_some() { ", of one shared vector" } else { "" };
        format!("{name} ({bytes} bytes a token and layer{shared})")
    }
}
