//! Legality of a plan over groups of devices, by code that did not search for it: from the question
//! and the numbers of the plan alone. What a device needs is priced again.

use ir::{Diagnostic, Span};
use kernels::Bytes;

use super::DIAGNOSTICS_MAX;
use crate::cluster::{Cluster, Memory};
use crate::configuration::{Configuration, Recompute, Schedule};
use crate::estimate::line::{self, Section};
use crate::estimate::workload::Item;
use crate::estimate::{Estimator, Job};
use crate::search::groups::{BatchShares, GroupRequest, Grouped};
use crate::search::hetero_pipeline::HeteroPipeline;

/// Tokens of a context-parallel rank at least.
const RANK_TOKENS_MIN: u32 = 64;
/// The part of a device's bytes by which what a plan says may differ from what is priced again.
const ROUNDING: f64 = 1e-9;

/// What is illegal about a plan over groups: at most twenty diagnostics, `E3301` for ranks that are
/// not there, `E3302` for layers that are not computed once, `E3303` for samples that are not or
/// that do not fill a schedule, `E3304` for what cannot be cut so, `E3203` for what the limits do
/// not allow, `E3308` for what does not fit, or needs other bytes than the plan says.
pub fn check_groups(job: &GroupRequest<'_>, way: &Grouped) -> Vec<Diagnostic> {
    let mut checker = Checker { job, found: Vec::new() };
    match way {
        Grouped::Shares(shared) => checker.shares(shared),
        Grouped::Stages(across) => checker.stages(across),
    }
    checker.found.truncate(DIAGNOSTICS_MAX);
    checker.found
}

struct Checker<'a> {
    job: &'a GroupRequest<'a>,
    found: Vec<Diagnostic>,
}

/// What one group does.
struct Part<'a> {
    group: usize,
    first_rank: u32,
    ranks: u32,
    configuration: &'a Configuration,
    /// Stages of the whole pipeline.
    stages: u32,
    microbatch_count: u64,
    /// Bytes of the fullest device, as the plan says.
    need_bytes: f64,
    /// Bytes of the fullest device, as the checker prices them; none where there is no price.
    priced_bytes: Option<f64>,
}

impl Checker<'_> {
    fn wrong(&mut self, code: &'static str, is_wrong: bool, headline: impl FnOnce() -> String) {
        if is_wrong {
            let span = Span::of(format!("the plan over {}", self.job.cluster.name));
            self.found.push(Diagnostic::error(code, span, headline()));
        }
    }

    /// Each group takes some samples in whole micro-batches, or does nothing; all samples are
    /// taken.
    fn shares(&mut self, shared: &BatchShares) {
        let mut taken = 0u64;
        for share in &shared.shares {
            taken += u64::from(share.samples);
            let name = self.name(share.group);
            let Some(chosen) = &share.chosen else {
                let idle = share.samples == 0;
                self.wrong("E3303", !idle, || format!("`{name}` has samples and no layout"));
                continue;
            };
            let c = &chosen.configuration;
            let at_once = u64::from(c.dp) * u64::from(c.microbatch);
            let (samples, count) = (u64::from(share.samples), chosen.estimate.microbatch_count);
            self.wrong("E3303", samples == 0 || at_once * count != samples, || {
                format!("`{name}` has {samples} samples, and computes {at_once} {count} times")
            });
            let layers: u32 = c.stage_layers.iter().sum();
            let depth = self.job.work.depth();
            self.wrong("E3302", !c.stage_layers.is_empty() && layers != depth, || {
                format!("`{name}` has {layers} of {depth} layers")
            });
            let priced = self.estimator(share.group, samples);
            let priced = priced.and_then(|estimator| estimator.estimate(c).ok());
            self.part(&Part {
                group: share.group,
                first_rank: share.first_rank,
                ranks: share.ranks,
                configuration: c,
                stages: c.pp,
                microbatch_count: count,
                need_bytes: chosen.estimate.memory.total_bytes(),
                priced_bytes: priced.map(|estimate| estimate.memory.total_bytes()),
            });
        }
        let batch = self.job.job.global_batch;
        self.wrong("E3303", taken != batch, || format!("{taken} of {batch} samples are shared"));
        self.once(shared.shares.iter().map(|share| share.group));
    }

    /// Every layer is on one stage, in order; all groups have as many copies, of micro-batches and
    /// rounds that are the same.
    fn stages(&mut self, across: &HeteroPipeline) {
        let mut layer = 0;
        let first = across.parts.first().map(|part| &part.configuration);
        let pp: u32 = across.parts.iter().map(|part| part.configuration.pp).sum();
        let mut priced = self.line_bytes(across).into_iter().flatten();
        for part in &across.parts {
            let (c, name) = (&part.configuration, self.name(part.group));
            let own: u32 = c.stage_layers.iter().sum();
            self.wrong("E3302", part.first_layer != layer, || {
                format!("`{name}` begins with layer {}, not {layer}", part.first_layer)
            });
            layer = part.first_layer + own;
            let stages = c.stage_layers.len();
            self.wrong("E3302", stages != c.pp as usize || c.stage_layers.contains(&0), || {
                format!("`{name}` has {} stages, and layers for {stages}", c.pp)
            });
            let round = |c: &Configuration| (c.dp, c.cp, c.microbatch, c.schedule, c.vpp);
            self.wrong("E3303", first.is_some_and(|first| round(first) != round(c)), || {
                format!("`{name}` has other copies, micro-batches or rounds than the first group")
            });
            let samples = u64::from(c.dp) * u64::from(c.microbatch) * across.microbatch_count;
            let batch = self.job.job.global_batch;
            self.wrong("E3303", samples != batch, || {
                format!("`{name}` computes {samples} of {batch} samples")
            });
            self.part(&Part {
                group: part.group,
                first_rank: part.first_rank,
                ranks: part.ranks,
                configuration: c,
                stages: pp,
                microbatch_count: across.microbatch_count,
                need_bytes: part.peak_bytes,
                priced_bytes: priced.next(),
            });
        }
        let depth = self.job.work.depth();
        self.wrong("E3302", layer != depth, || format!("stages have {layer} of {depth} layers"));
        self.once(across.parts.iter().map(|part| part.group));
    }

    fn estimator(&self, group: usize, samples: u64) -> Option<Estimator<'_>> {
        let cluster = self.job.cluster.groups.get(group)?;
        let job = Job { global_batch: samples, ..self.job.job };
        Estimator::new(self.job.work, cluster, self.job.profile, job).ok()
    }

    /// Bytes of the fullest device of each part, priced again; none where the parts make no line.
    fn line_bytes(&self, across: &HeteroPipeline) -> Option<Vec<f64>> {
        let parts = &across.parts;
        let layers = parts.iter().flat_map(|part| &part.configuration.stage_layers);
        let whole: u32 = layers.sum();
        let is_line = |c: &Configuration| c.stage_layers.len() == c.pp as usize;
        if whole != self.job.work.depth() || !parts.iter().all(|part| is_line(&part.configuration))
        {
            return None;
        }
        let pp = parts.iter().map(|part| part.configuration.pp).sum();
        let estimators: Vec<Estimator<'_>> = parts
            .iter()
            .map(|part| self.estimator(part.group, self.job.job.global_batch))
            .collect::<Option<_>>()?;
        let own = parts.iter().map(|part| &part.configuration);
        let prices: Vec<_> =
            estimators.iter().zip(own).map(|(all, c)| all.prices(all.inside(c))).collect();
        let whole = |c: &Configuration| Configuration { pp, stage_layers: vec![], ..c.clone() };
        let of_all: Vec<_> = parts.iter().map(|part| whole(&part.configuration)).collect();
        let sections: Vec<(Section<'_>, &[u32])> = (0..parts.len())
            .map(|at| {
                let (estimator, configuration) = (&estimators[at], &of_all[at]);
                let section = Section { estimator, configuration, prices: &prices[at], link: None };
                (section, &parts[at].configuration.stage_layers[..])
            })
            .collect();
        let stages = line::step(&sections, across.microbatch_count).stages;
        let mut stages = stages.iter().map(|stage| stage.memory.total_bytes());
        let most = |(_, layers): &(Section<'_>, &[u32])| {
            stages.by_ref().take(layers.len()).fold(0.0, f64::max)
        };
        Some(sections.iter().map(most).collect())
    }

    /// A group has its own ranks, a layout of all of them that is allowed, and memory for it.
    fn part(&mut self, part: &Part<'_>) {
        let Part { group, first_rank, ranks, configuration: c, .. } = *part;
        let groups = &self.job.cluster.groups;
        let devices = |group: &Cluster| group.devices().unwrap_or(0) as u64;
        let before: u64 = groups.iter().take(group).map(devices).sum();
        let Some(own) = groups.get(group) else {
            return self.wrong("E3301", true, || format!("there is no group {group}"));
        };
        let (name, there) = (&own.name, devices(own));
        self.wrong("E3301", (u64::from(first_rank), u64::from(ranks)) != (before, there), || {
            format!("`{name}` has {there} ranks from {before} on, not {ranks} from {first_rank}")
        });
        let product = [c.dp, c.cp, c.tp, c.pp].iter().map(|n| u64::from(*n)).product::<u64>();
        self.wrong("E3301", product != there, || {
            format!("dp · cp · tp · pp is {product}, and `{name}` has {there} devices")
        });
        self.cut(c, name);
        self.shards(c, name);
        self.rounds(part, name);
        let limits = &self.job.limits;
        let all = Configuration { pp: part.stages, ..c.clone() };
        self.wrong("E3203", !limits.allow_all(&all), || {
            format!("`{name}` is used as {all}, which {limits} does not allow")
        });
        let (Memory::PerRank(have) | Memory::PerNode(have)) = own.memory();
        let have = limits.memory_bytes().unwrap_or(f64::INFINITY).min(have as f64);
        let told = part.need_bytes;
        let need = part.priced_bytes.unwrap_or(told);
        self.wrong("E3308", (need - told).abs() > ROUNDING * need, || {
            let [told, need] = [told, need].map(|bytes| Bytes(bytes as u64));
            format!("a device of `{name}` needs {need}, and the plan says {told}")
        });
        self.wrong("E3308", need.max(told) > have, || {
            let [need, have] = [need.max(told), have].map(|bytes| Bytes(bytes as u64));
            format!("a device of `{name}` needs {need}, and has {have}")
        });
    }

    /// Shards are whole copies of what they shard.
    fn shards(&mut self, c: &Configuration, name: &str) {
        let [dp, cp, tp, ep] = [c.dp, c.cp, c.tp, c.ep].map(u64::from);
        self.wrong("E3304", c.zero.stage > 3, || format!("`{name}` has zero={}", c.zero.stage));
        let shard = u64::from(c.zero.shard);
        if c.zero.stage == 0 || shard == 0 {
            return;
        }
        self.wrong("E3304", dp * cp % shard != 0, || {
            format!("`{name}` cuts {} copies into shards over {shard} ranks", dp * cp)
        });
        let experts = (dp * cp * tp / ep.max(1)).max(1);
        self.wrong("E3304", ep > 1 && experts % shard.min(experts) != 0, || {
            format!("`{name}` cuts {experts} copies of experts into shards over {shard} ranks")
        });
    }

    /// Micro-batches fill the stages in their order, and what stages recompute is there.
    fn rounds(&mut self, part: &Part<'_>, name: &str) {
        let (c, pp, m) = (part.configuration, part.stages, part.microbatch_count);
        let p = u64::from(pp);
        let least = match c.schedule {
            _ if pp == 1 => 1,
            Schedule::GPipe | Schedule::OneForwardOneBackward => 1,
            Schedule::ZeroBubbleH1 => p,
            Schedule::ZeroBubbleH2 => 2 * p - 1,
        };
        self.wrong("E3303", m < least, || {
            format!("`{name}` has {m} micro-batches over {pp} stages, and takes {least}")
        });
        let (depth, v) = (self.job.work.depth(), c.vpp);
        let chunks = u64::from(pp) * u64::from(v);
        let is_even = u64::from(depth) % chunks.max(1) == 0 && m % p.max(1) == 0;
        let may_be = pp > 1 && c.stage_layers.is_empty() && is_even;
        let may_be = may_be && c.schedule == Schedule::OneForwardOneBackward;
        self.wrong("E3303", v == 0 || v > 1 && !may_be, || {
            format!("`{name}` interleaves {v} chunks of {pp} stages over {m} micro-batches")
        });
        self.wrong("E3302", c.stage_layers.is_empty() && pp > depth, || {
            format!("`{name}` has {pp} stages of {depth} layers")
        });
        let even = depth.div_ceil(pp.max(1));
        let deepest = c.stage_layers.iter().copied().max().unwrap_or(even);
        let recomputed = if let Recompute::Layers(layers) = c.recompute { layers } else { 0 };
        self.wrong("E3302", recomputed > deepest, || {
            format!("`{name}` computes {recomputed} layers of a stage again, and has {deepest}")
        });
    }

    /// What ranks share can be cut.
    fn cut(&mut self, c: &Configuration, name: &str) {
        let work = self.job.work;
        for item in work.layers.iter().flat_map(|layer| &layer.items) {
            let (mut what, mut number, mut over) = ("heads", 0, 1);
            if let Item::Attention { heads, .. } = item {
                (number, over) = (*heads, c.tp);
            }
            if let Item::Experts { count, .. } = item {
                (what, number, over) = ("experts", *count, c.ep);
            }
            self.wrong("E3304", !number.is_multiple_of(over), || {
                format!("`{name}` cuts {number} {what} over {over} ranks")
            });
        }
        let pieces = if c.cp > 1 { c.cp.saturating_mul(2) } else { 1 };
        self.wrong("E3304", !work.seq.is_multiple_of(pieces), || {
            format!("`{name}` cuts {} tokens into {pieces} pieces", work.seq)
        });
        let each = work.seq / c.cp.max(1);
        self.wrong("E3304", c.cp > 1 && each < RANK_TOKENS_MIN, || {
            format!("`{name}` has {each} tokens a rank, and takes {RANK_TOKENS_MIN}")
        });
    }

    fn once(&mut self, groups: impl Iterator<Item = usize>) {
        let mut groups: Vec<usize> = groups.collect();
        let count = groups.len();
        groups.sort_unstable();
        groups.dedup();
        self.wrong("E3301", groups.len() != count, || "a group is there twice".to_owned());
    }

    fn name(&self, group: usize) -> String {
        self.job.cluster.groups.get(group).map_or_else(String::new, |group| group.name.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::configuration::Zero;
    use crate::limits::Limits;
    use crate::search::groups::tests::{asked, cluster};
    use crate::search::groups::{plan, share};
    use crate::search::hetero_pipeline::tests::small_line;
    use crate::search::models;

    /// The codes and headlines of what is wrong.
    fn told(job: &GroupRequest<'_>, way: &Grouped) -> Vec<(&'static str, String)> {
        check_groups(job, way).into_iter().map(|found| (found.code, found.headline)).collect()
    }

    fn says(found: &[(&str, String)], code: &str, said: &str) -> bool {
        found.iter().any(|(other, headline)| *other == code && headline.contains(said))
    }

    /// What is found is legal; whatever is changed about it is seen, and called what it is.
    #[test]
    fn plans_over_groups_are_legal_as_they_are_alone() {
        let mut shape = models::shape("llama-3-8b").unwrap();
        (shape.seq, shape.layers) = (2048, 9);
        let work = shape.workload().unwrap();
        let cluster = cluster(&[("h100", 1), ("a100", 1)]);
        let asked = asked(&work, &cluster, 71, &["cp=1"]);
        let job = asked;
        assert_eq!(told(&job, &plan(&job).unwrap()), []);
        let shared = share(&job).unwrap();
        assert_eq!(told(&job, &Grouped::Shares(shared.clone())), []);
        type Change = fn(&mut BatchShares);
        let changes: [(&str, &str, Change); 18] = [
            ("E3303", "samples, and computes", |shared| shared.shares[0].samples += 1),
            ("E3303", "samples are shared", |shared| shared.shares[0].samples += 1),
            ("E3303", "samples, and computes", |shared| layout(shared).microbatch *= 2),
            ("E3301", "ranks from", |shared| shared.shares[1].first_rank += 1),
            ("E3301", "ranks from", |shared| shared.shares[1].ranks += 1),
            ("E3301", "dp · cp · tp · pp", |shared| layout(shared).dp *= 2),
            ("E3304", "heads over", |shared| layout(shared).tp *= 64),
            ("E3304", "tokens into 6 pieces", |shared| layout(shared).cp = 3),
            ("E3302", "of 9 layers", |shared| layout(shared).stage_layers = vec![1]),
            ("E3303", "no layout", |shared| shared.shares[0].chosen = None),
            ("E3301", "there is no group 9", |shared| shared.shares[1].group = 9),
            ("E3304", "shards over 5 ranks", |shared| {
                layout(shared).zero = Zero { stage: 1, shard: 5 };
            }),
            ("E3304", "zero=4", |shared| layout(shared).zero.stage = 4),
            ("E3303", "interleaves 2 chunks", |shared| layout(shared).vpp = 2),
            ("E3302", "computes 10 layers", |shared| {
                layout(shared).recompute = Recompute::Layers(10);
            }),
            ("E3302", "16 stages of 9", |shared| layout(shared).pp = 16),
            ("E3203", "does not allow", |shared| layout(shared).cp = 2),
            ("E3308", "the plan says", |shared| {
                let chosen = shared.shares[0].chosen.as_mut().unwrap();
                chosen.estimate.memory.weights_bytes -= 1e6;
            }),
        ];
        for (code, said, change) in changes {
            let mut changed = shared.clone();
            change(&mut changed);
            let found = told(&job, &Grouped::Shares(changed));
            assert!(says(&found, code, said), "{said}: {found:?}");
        }
        let small = Cluster { groups: vec![cluster.groups[0].clone(); 2], ..cluster.clone() };
        let mut tight = small.clone();
        tight.groups[0].device.memory_bytes.value = 1e9;
        let job = GroupRequest { cluster: &tight, ..job };
        let found = told(&job, &Grouped::Shares(shared.clone()));
        assert!(says(&found, "E3308", "and has"), "{found:?}");
        let small = Limits::parse(&[], &[], &["memory=2GiB".to_owned()]).unwrap();
        let job = GroupRequest { limits: small, cluster: &cluster, ..job };
        let found = told(&job, &Grouped::Shares(shared));
        assert!(says(&found, "E3308", "and has 2.00 GiB"), "{found:?}");
    }

    /// Orders of micro-batches that are not there, and cuts of few tokens.
    #[test]
    fn rounds_are_filled() {
        let (work, cluster, batch, across) = small_line();
        let job = asked(&work, &cluster, batch.into(), &[]);
        type Change = fn(&mut Configuration);
        let changes: [(&str, &str, Change); 4] = [
            ("E3303", "and takes 2", |c| c.schedule = Schedule::ZeroBubbleH1),
            ("E3303", "and takes 3", |c| c.schedule = Schedule::ZeroBubbleH2),
            ("E3304", "32 tokens a rank", |c| c.cp = 64),
            ("E3304", "copies of experts", |c| {
                (c.ep, c.dp, c.tp, c.zero) = (2, 12, 1, Zero { stage: 1, shard: 4 });
            }),
        ];
        for (code, said, change) in changes {
            let mut changed = across.clone();
            changed.microbatch_count = 1;
            change(&mut changed.parts[0].configuration);
            let found = told(&job, &Grouped::Stages(changed));
            assert!(says(&found, code, said), "{said}: {found:?}");
        }
    }

    fn layout(shared: &mut BatchShares) -> &mut Configuration {
        &mut shared.shares[0].chosen.as_mut().unwrap().configuration
    }

    /// Experts are cut into whole ones.
    #[test]
    fn experts_are_whole() {
        let mut shape = models::shape("mixtral-8x7b").unwrap();
        (shape.seq, shape.layers) = (2048, 2);
        let work = shape.workload().unwrap();
        let cluster = cluster(&[("h100", 1), ("a100", 1)]);
        let job = asked(&work, &cluster, 16, &["cp=1", "pp=1"]);
        let mut shared = share(&job).unwrap();
        layout(&mut shared).ep = 3;
        let found = told(&job, &Grouped::Shares(shared));
        assert!(says(&found, "E3304", "8 experts over 3"), "{found:?}");
    }

    /// Stages that leave out a layer, or compute other samples than their neighbours, are seen.
    #[test]
    fn lines_are_whole() {
        let (work, cluster, batch, across) = small_line();
        let job = asked(&work, &cluster, batch.into(), &[]);
        assert_eq!(told(&job, &Grouped::Stages(across.clone())), []);
        type Change = fn(&mut HeteroPipeline);
        let changes: [(&str, &str, Change); 10] = [
            ("E3302", "begins with layer", |across| across.parts[1].first_layer += 1),
            ("E3302", "stages have 7 of 6", |across| {
                across.parts[1].configuration.stage_layers[0] += 1;
            }),
            ("E3302", "begins with layer", |across| across.parts.reverse()),
            ("E3302", "and layers for", |across| {
                across.parts[1].configuration.stage_layers.push(0);
            }),
            ("E3303", "other copies", |across| across.parts[1].configuration.microbatch += 1),
            ("E3303", "of 8 samples", |across| across.microbatch_count += 1),
            ("E3301", "there twice", |across| across.parts[1].group = across.parts[0].group),
            ("E3301", "there is no group 9", |across| across.parts[1].group = 9),
            ("E3308", "and has", |across| across.parts[1].peak_bytes = 1e15),
            ("E3308", "the plan says", |across| across.parts[1].peak_bytes = 1e9),
        ];
        for (code, said, change) in changes {
            let mut changed = across.clone();
            change(&mut changed);
            let found = told(&job, &Grouped::Stages(changed));
            assert!(says(&found, code, said), "{said}: {found:?}");
        }
    }
}
