//! A way over groups as users see it: the table, the page and the document.

use kernels::{Bytes, Seconds};
use planner::cluster::{Cluster, Memory};
use planner::configuration::Configuration;
use planner::estimate::step::Breakdown;
use planner::search::groups::{BatchShares, Grouped, Share};
use planner::search::hetero_pipeline::{Part, StagePartitions};
use serde_json::{Value, json};

use super::Mixed;
use crate::argument::HOUR_S;
use crate::documents;
use crate::output::{self, Table};

/// Whether no device holds too much.
pub fn fits(way: &Grouped) -> bool {
    match way {
        Grouped::Stages(across) => {
            across.parts.iter().all(|part| part.peak_bytes <= part.have_bytes)
        }
        Grouped::Shares(shared) => {
            shared.shares.iter().all(|share| share.chosen.as_ref().is_none_or(|chosen| chosen.fits))
        }
    }
}

/// A plan over groups, as JSON.
pub fn document(mixed: &Mixed, way: &Grouped) -> documents::PlanGroups {
    let [low, high] = way.interval_s();
    let (shared, across) = match way {
        Grouped::Shares(shared) => (Some(shared), None),
        Grouped::Stages(across) => (None, Some(across)),
    };
    documents::PlanGroups {
        kind: kind(way).to_owned(),
        model: mixed.work.name.clone(),
        params: mixed.work.parameters(),
        cluster: mixed.cluster.describe(),
        devices: mixed.cluster.devices().unwrap_or_default() as u64,
        used_devices: way.devices().into(),
        gbs: mixed.global_batch.into(),
        seq: mixed.seq.into(),
        dtype: mixed.dtype.name().to_owned(),
        step_time_s: way.step_time_s(),
        step_time_low_s: low,
        step_time_high_s: high,
        tokens_per_s: mixed.tokens() / way.step_time_s(),
        energy_j: way.joules(&mixed.cluster),
        money: mixed.hourly(way).map(|(money, _)| money * way.step_time_s() / HOUR_S),
        exchange_s: shared.map(|shared| shared.exchange_s),
        piece: shared.map(|shared| shared.piece.into()),
        rest: shared.map(|shared| shared.rest.into()),
        nearest_batches: shared.map(|shared| shared.nearest.iter().map(|n| (*n).into()).collect()),
        searched: shared.map(|shared| shared.searched as u64),
        microbatch_count: across.map(|across| across.microbatch_count),
        cuts: across.map(|across| json!(across.cuts)),
        complete: match way {
            Grouped::Shares(shared) => shared.complete,
            Grouped::Stages(across) => across.complete,
        },
        groups: rows(mixed, way).iter().map(Row::told).collect(),
    }
}

/// What one group does.
pub(super) struct Row<'a> {
    pub(super) group: &'a Cluster,
    first_rank: u32,
    ranks: u32,
    samples: u32,
    first_layer: u32,
    layers: u32,
    /// Seconds of its step, or of a micro-batch on its slowest stage.
    seconds: Option<f64>,
    need_bytes: Option<f64>,
    have_bytes: f64,
    pub(super) plan: Option<&'a Configuration>,
}

impl Row<'_> {
    /// The row as JSON.
    pub(super) fn told(&self) -> Value {
        json!({
            "group": self.group.name,
            "device": self.group.device.name,
            "first_rank": self.first_rank,
            "ranks": self.ranks,
            "samples": self.samples,
            "first_layer": self.first_layer,
            "layers": self.layers,
            "text": self.plan.map(ToString::to_string),
            "plan": self.plan,
            "step_time_s": self.seconds,
            "peak_mem_bytes": self.need_bytes,
            "have_bytes": self.have_bytes,
        })
    }
}

/// What each group does.
pub(super) fn rows<'a>(mixed: &'a Mixed, way: &'a Grouped) -> Vec<Row<'a>> {
    let group = |at: usize| &mixed.cluster.groups[at];
    let have = |at: usize| {
        let (Memory::PerRank(bytes) | Memory::PerNode(bytes)) = group(at).memory();
        mixed.memory_bytes.unwrap_or(f64::INFINITY).min(bytes as f64)
    };
    match way {
        Grouped::Shares(shared) => {
            let row = |share: &'a Share| {
                let chosen = share.chosen.as_ref();
                Row {
                    group: group(share.group),
                    first_rank: share.first_rank,
                    ranks: share.ranks,
                    samples: share.samples,
                    first_layer: 0,
                    layers: chosen.map_or(0, |_| mixed.work.depth()),
                    seconds: chosen.map(|chosen| chosen.estimate.step_time_s),
                    need_bytes: chosen.map(|chosen| chosen.estimate.memory.total_bytes()),
                    have_bytes: have(share.group),
                    plan: chosen.map(|chosen| &chosen.configuration),
                }
            };
            shared.shares.iter().map(row).collect()
        }
        Grouped::Stages(across) => {
            let row = |part: &'a Part| Row {
                group: group(part.group),
                first_rank: part.first_rank,
                ranks: part.ranks,
                samples: mixed.global_batch,
                first_layer: part.first_layer,
                layers: part.configuration.stage_layers.iter().sum(),
                seconds: Some(part.slowest_s),
                need_bytes: Some(part.peak_bytes),
                have_bytes: part.have_bytes,
                plan: Some(&part.configuration),
            };
            across.parts.iter().map(row).collect()
        }
    }
}

/// A line for each group.
pub(super) fn table(mixed: &Mixed, way: &Grouped) -> String {
    let is_line = matches!(way, Grouped::Stages(_));
    let (what, time) = if is_line { ("layers", "stage") } else { ("samples", "step") };
    let mut table = Table::new(["group", "ranks", what, time, "memory", "of", "plan"]);
    for row in rows(mixed, way) {
        let last_layer = row.first_layer + row.layers.max(1) - 1;
        let bytes = |bytes: f64| Bytes(bytes as u64).to_string();
        let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        table.row([
            row.group.name.clone(),
            format!("{}..{}", row.first_rank, row.first_rank + row.ranks - 1),
            match is_line {
                true => format!("{}..{last_layer}", row.first_layer),
                false => row.samples.to_string(),
            },
            or_none(row.seconds.map(|seconds| Seconds(seconds).to_string())),
            or_none(row.need_bytes.map(bytes)),
            bytes(row.have_bytes),
            or_none(row.plan.map(ToString::to_string)),
        ]);
    }
    table.text()
}

/// A plan over groups, for people.
pub fn page(mixed: &Mixed, way: &Grouped) -> String {
    let seconds = way.step_time_s();
    let rate = output::count((mixed.tokens() / seconds) as u64);
    let [low, high] = way.interval_s().map(Seconds);
    let mut text = format!("\n{}\nstep {}", table(mixed, way), Seconds(seconds));
    text += &format!(" (80 % prediction interval: {low} to {high})");
    if let Some((hourly, currency)) = mixed.hourly(way) {
        let money = output::number(hourly * seconds / HOUR_S);
        text += &format!(", {money} {currency}");
    }
    match way {
        Grouped::Shares(shared) => {
            let exchange = Seconds(shared.exchange_s);
            text += &format!(", of which {exchange} to exchange gradients between groups; ");
            text += &format!("{rate} tokens/s\nshares are multiples of {}", shared.piece);
            if shared.rest > 0 {
                text += &format!(", one with {} more", shared.rest);
            }
            // Of layouts that were given nothing was searched.
            text += match (shared.complete, shared.searched) {
                (true, 0) => "\n",
                (true, _) => "; no other is better\n",
                (false, _) => "\nthe search was cut off\n",
            };
            text += &idle(mixed, shared);
            if !shared.nearest.is_empty() {
                let batches: Vec<String> = shared.nearest.iter().map(u32::to_string).collect();
                let batches = batches.join(" or ");
                text += &format!("{} samples cannot be shared by all groups", mixed.global_batch);
                text += &format!(" within the limits; {batches} can\n");
            }
        }
        Grouped::Stages(across) => {
            let copies = across.parts[0].configuration.dp;
            let names = mixed.names(way).join(", ");
            text += &format!("; {rate} tokens/s\n{copies} copies of one pipeline over {names}, ");
            text += &format!("{} micro-batches each; ", across.microbatch_count);
            text += match across.cuts {
                StagePartitions::Given => "the cut is as given\n",
                StagePartitions::All => "all cuts of the layers were tried\n",
                StagePartitions::Moves => {
                    "its cut is balanced, and no layer moved makes it faster\n"
                }
                StagePartitions::NextMoves => {
                    "its cut is balanced, and no layer moved to the next stage makes it faster\n"
                }
                StagePartitions::Balanced => "its cut is balanced\n",
            };
            if !across.complete {
                text += "the search was cut off\n";
            }
        }
    }
    text
}

/// Which groups get no samples.
fn idle(mixed: &Mixed, shared: &BatchShares) -> String {
    let none = shared.shares.iter().filter(|share| share.samples == 0);
    let names: Vec<&str> =
        none.map(|share| mixed.cluster.groups[share.group].name.as_str()).collect();
    match names.is_empty() {
        true => String::new(),
        false => format!(
            "{} computes nothing: a step with its share takes longer, or does not fit\n",
            names.join(", ")
        ),
    }
}

/// Where a step goes: on the slowest group, where a batch is shared.
pub(super) fn breakdown(way: &Grouped) -> Option<Breakdown> {
    match way {
        Grouped::Stages(across) => Some(across.breakdown),
        Grouped::Shares(shared) => {
            let chosen = shared.shares.iter().filter_map(|share| share.chosen.as_ref());
            let estimates = chosen.map(|chosen| &chosen.estimate);
            let slowest = estimates.max_by(|a, b| a.step_time_s.total_cmp(&b.step_time_s));
            slowest.map(|slowest| slowest.breakdown)
        }
    }
}

/// What the way is called.
pub(super) fn kind(way: &Grouped) -> &'static str {
    match way {
        Grouped::Shares(_) => "shares",
        Grouped::Stages(_) => "stages",
    }
}
