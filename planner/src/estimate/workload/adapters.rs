//! Low-rank adapters beside a transformer whose own weights are frozen (Hu et al. 2021), and frozen
//! weights in few bits (Dettmers et al. 2023).

#[cfg(test)]
mod tests;

use ir::lora::{ALL_LINEAR, Lora};
use ir::{Diagnostic, Span};

use super::{Cut, Frozen, Item, Workload};

/// A place of a layer that can be adapted, by the names that peft and checkpoints give it.
#[derive(Clone, Copy, Debug)]
struct Slot {
    names: &'static [&'static str],
}

const QUERIES: Slot = Slot { names: &["q", "q_proj", "wq", "query", "q_lin"] };
const KEYS: Slot = Slot { names: &["k", "k_proj", "wk", "key", "k_lin"] };
const VALUES: Slot = Slot { names: &["v", "v_proj", "wv", "value", "v_lin"] };
const JOINED: Slot = Slot { names: &["qkv", "qkv_proj", "c_attn", "query_key_value", "wqkv"] };
const OUT: Slot = Slot { names: &["o", "o_proj", "wo", "out_proj", "c_proj", "dense"] };
const GATE: Slot = Slot { names: &["gate", "gate_proj", "w1"] };
const UP: Slot = Slot { names: &["up", "up_proj", "w3", "c_fc", "fc1", "dense_h_to_4h"] };
const GATED: Slot = Slot { names: &["gate_up", "gate_up_proj"] };
const DOWN: Slot = Slot { names: &["down", "down_proj", "w2", "c_proj", "fc2", "dense_4h_to_h"] };

/// A product of a layer with its parts: each a slot and columns of the result. Parts that are named
/// alone have an adapter each; the joined slot has one for all.
struct Place {
    parts: Vec<(Slot, u32)>,
    joined: Option<Slot>,
}

/// What a product is, from the items around it; none of one that has no name of its own.
fn place(items: &[Item], at: usize) -> Option<Place> {
    let Item::Product { n, cut, .. } = items[at] else { return None };
    let after = &items[at + 1..];
    let next = after.iter().find(|item| !matches!(item, Item::Rope { .. } | Item::Norm { .. }))?;
    let before = at.checked_sub(1).map(|before| &items[before]);
    let one = |slot| Some(Place { parts: vec![(slot, n)], joined: None });
    match (before, next, cut) {
        (_, Item::Attention { heads, kv_heads, qk_dim, v_dim, .. }, Cut::Columns) => {
            let parts = vec![
                (QUERIES, heads * qk_dim),
                (KEYS, kv_heads * qk_dim),
                (VALUES, kv_heads * v_dim),
            ];
            let all: u32 = parts.iter().map(|(_, columns)| columns).sum();
            (all == n).then_some(Place { parts, joined: Some(JOINED) })
        }
        (Some(Item::Attention { .. }), _, Cut::Rows) => one(OUT),
        (_, Item::Activation { gated: true, width }, _) if n == 2 * width => {
            Some(Place { parts: vec![(GATE, *width), (UP, *width)], joined: Some(GATED) })
        }
        (_, Item::Activation { .. }, _) => one(UP),
        (Some(Item::Activation { .. }), _, Cut::Rows) => one(DOWN),
        _ => None,
    }
}

/// The adapters of a product at a place: their number, and the columns of their results.
fn adapted(place: &Place, targets: &[String]) -> (u32, u32) {
    let is_meant = |slot: Slot, target: &String| slot.names.contains(&target.as_str());
    let joined = |target: &String| place.joined.is_some_and(|slot| is_meant(slot, target));
    if targets.iter().any(joined) {
        return (1, place.parts.iter().map(|(_, columns)| columns).sum());
    }
    let all = targets.iter().any(|target| target == ALL_LINEAR);
    let meant = |slot: Slot| all || targets.iter().any(|target| is_meant(slot, target));
    let columns = place.parts.iter().filter(|(slot, _)| meant(*slot)).map(|(_, columns)| *columns);
    columns.fold((0, 0), |(parts, n), columns| (parts + 1, n + columns))
}

impl Workload {
    /// The work of training adapters of the targeted products, all else frozen.
    ///
    /// # Errors
    /// `E3406` for a target that is no product of the model, or one of experts, and for a rank
    /// above the sizes of a product.
    pub fn with_adapters(mut self, lora: &Lora) -> Result<Workload, Diagnostic> {
        let wrong = |headline: String, help: String| {
            Err(Diagnostic::error("E3406", Span::of("--lora"), headline).help(help))
        };
        let rank = u32::try_from(lora.rank).unwrap_or(u32::MAX);
        let mut names: Vec<&str> = Vec::new();
        let mut has_experts = false;
        for layer in &mut self.layers {
            let mut items = Vec::with_capacity(layer.items.len());
            for (at, item) in layer.items.iter().enumerate() {
                items.push(*item);
                has_experts |= matches!(item, Item::Experts { .. });
                let Item::Product { k, cut, .. } = *item else { continue };
                let Some(place) = place(&layer.items, at) else { continue };
                let slots = place.parts.iter().map(|(slot, _)| *slot).chain(place.joined);
                for name in slots.flat_map(|slot| slot.names) {
                    if !names.contains(name) {
                        names.push(name);
                    }
                }
                let (parts, n) = adapted(&place, &lora.targets);
                if parts == 0 {
                    continue;
                }
                let most = k.min(n / parts);
                if rank > most {
                    let headline = format!("rank {rank} is more than a product has: {k} by {n}");
                    return wrong(headline, format!("write `rank={most}` or less"));
                }
                items.push(Item::Adapter { k, n, rank, parts, cut });
            }
            layer.items = items;
        }
        for target in &lora.targets {
            if target == ALL_LINEAR && has_experts {
                let headline = "adapters of experts are not priced, and `all-linear` has them";
                let help = "name targets of attention: `targets=q,k,v,o`".to_owned();
                return wrong(headline.to_owned(), help);
            }
            if target != ALL_LINEAR && !names.contains(&target.as_str()) {
                let headline = format!("the target `{target}` is no product of `{}`", self.name);
                let help = match names.is_empty() {
                    true => "its graph names no products: price it on CPUs".to_owned(),
                    false => format!("targets are {ALL_LINEAR}, {}", names.join(", ")),
                };
                return wrong(headline, help);
            }
        }
        if names.is_empty() {
            let headline = format!("no product of `{}` can be adapted on GPUs", self.name);
            return wrong(headline, "leave --lora out".to_owned());
        }
        self.frozen = Some(Frozen { base: lora.base });
        Ok(self)
    }

    /// Parameters that are trained: all, or those of adapters.
    pub fn trained_parameters(&self) -> u64 {
        if self.frozen.is_none() {
            return self.parameters();
        }
        let adapters = |items: &[Item]| -> u64 {
            let all = items.iter().filter(|item| matches!(item, Item::Adapter { .. }));
            all.map(|item| item.parameters()[0]).sum()
        };
        self.layers.iter().map(|layer| u64::from(layer.count) * adapters(&layer.items)).sum()
    }
}
