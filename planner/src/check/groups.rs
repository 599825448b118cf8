//! Legality of a plan over groups of devices, by code that did not search for it: from the job, the
//! groups and the numbers of the plan alone.

use ir::{Diagnostic, Span};
use kernels::Bytes;

use super::DIAGNOSTICS_MAX;
use crate::cluster::{Cluster, Memory};
use crate::configuration::Configuration;
use crate::estimate::workload::{Item, Workload};
use crate::space::across::Across;
use crate::space::groups::{Grouped, Shared};

/// What is to be shared.
#[derive(Clone, Copy, Debug)]
pub struct Work<'a> {
    /// What a step computes.
    pub work: &'a Workload,
    /// The groups.
    pub cluster: &'a Cluster,
    /// Samples of a step.
    pub global_batch: u32,
}

/// What is illegal about a plan over groups: at most twenty diagnostics, `E3301` for ranks that are
/// not there, `E3302` for layers that are not computed once, `E3303` for samples that are not,
/// `E3304` for what cannot be cut so, `E3308` for what does not fit.
pub fn check_groups(job: &Work<'_>, way: &Grouped) -> Vec<Diagnostic> {
    let mut checker = Checker { job, found: Vec::new() };
    match way {
        Grouped::Shares(shared) => checker.shares(shared),
        Grouped::Stages(across) => checker.stages(across),
    }
    checker.found.truncate(DIAGNOSTICS_MAX);
    checker.found
}

struct Checker<'a> {
    job: &'a Work<'a>,
    found: Vec<Diagnostic>,
}

/// What one group does.
struct Part<'a> {
    group: usize,
    first_rank: u32,
    ranks: u32,
    configuration: &'a Configuration,
    need_bytes: f64,
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
    fn shares(&mut self, shared: &Shared) {
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
            self.part(&Part {
                group: share.group,
                first_rank: share.first_rank,
                ranks: share.ranks,
                configuration: c,
                need_bytes: chosen.estimate.memory.total_bytes(),
            });
        }
        let batch = u64::from(self.job.global_batch);
        self.wrong("E3303", taken != batch, || format!("{taken} of {batch} samples are shared"));
        self.once(shared.shares.iter().map(|share| share.group));
    }

    /// Every layer is on one stage, in order; all groups have as many copies, of micro-batches and
    /// rounds that are the same.
    fn stages(&mut self, across: &Across) {
        let mut layer = 0;
        let first = across.parts.first().map(|part| &part.configuration);
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
            let batch = u64::from(self.job.global_batch);
            self.wrong("E3303", samples != batch, || {
                format!("`{name}` computes {samples} of {batch} samples")
            });
            self.part(&Part {
                group: part.group,
                first_rank: part.first_rank,
                ranks: part.ranks,
                configuration: c,
                need_bytes: part.peak_bytes,
            });
        }
        let depth = self.job.work.depth();
        self.wrong("E3302", layer != depth, || format!("stages have {layer} of {depth} layers"));
        self.once(across.parts.iter().map(|part| part.group));
    }

    /// A group has its own ranks, a layout of all of them, and memory for it.
    fn part(&mut self, part: &Part<'_>) {
        let Part { group, first_rank, ranks, configuration: c, need_bytes } = *part;
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
        let (Memory::PerRank(have) | Memory::PerNode(have)) = own.memory();
        self.wrong("E3308", need_bytes > have as f64, || {
            let (need, have) = (Bytes(need_bytes as u64), Bytes(have));
            format!("a device of `{name}` needs {need}, and has {have}")
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
    use crate::space::across::tests::small_line;
    use crate::space::groups::tests::{asked, cluster};
    use crate::space::groups::{plan, share};
    use crate::space::models;

    /// The codes and headlines of what is wrong.
    fn told(job: &Work<'_>, way: &Grouped) -> Vec<(&'static str, String)> {
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
        let job = Work { work: &work, cluster: &cluster, global_batch: 71 };
        assert_eq!(told(&job, &plan(&asked).unwrap()), []);
        let shared = share(&asked).unwrap();
        assert_eq!(told(&job, &Grouped::Shares(shared.clone())), []);
        type Change = fn(&mut Shared);
        let changes: [(&str, &str, Change); 11] = [
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
        let job = Work { cluster: &tight, ..job };
        let found = told(&job, &Grouped::Shares(shared));
        assert!(says(&found, "E3308", "needs"), "{found:?}");
    }

    fn layout(shared: &mut Shared) -> &mut Configuration {
        &mut shared.shares[0].chosen.as_mut().unwrap().configuration
    }

    /// Experts are cut into whole ones.
    #[test]
    fn experts_are_whole() {
        let mut shape = models::shape("mixtral-8x7b").unwrap();
        (shape.seq, shape.layers) = (2048, 2);
        let work = shape.workload().unwrap();
        let cluster = cluster(&[("h100", 1), ("a100", 1)]);
        let job = Work { work: &work, cluster: &cluster, global_batch: 16 };
        let mut shared = share(&asked(&work, &cluster, 16, &["cp=1", "pp=1"])).unwrap();
        layout(&mut shared).ep = 3;
        let found = told(&job, &Grouped::Shares(shared));
        assert!(says(&found, "E3304", "8 experts over 3"), "{found:?}");
    }

    /// Stages that leave out a layer, or compute other samples than their neighbours, are seen.
    #[test]
    fn lines_are_whole() {
        let (work, cluster, batch, across) = small_line();
        let job = Work { work: &work, cluster: &cluster, global_batch: batch };
        assert_eq!(told(&job, &Grouped::Stages(across.clone())), []);
        type Change = fn(&mut Across);
        let changes: [(&str, &str, Change); 9] = [
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
            ("E3308", "needs", |across| across.parts[1].peak_bytes = 1e15),
        ];
        for (code, said, change) in changes {
            let mut changed = across.clone();
            change(&mut changed);
            let found = told(&job, &Grouped::Stages(changed));
            assert!(says(&found, code, said), "{said}: {found:?}");
        }
    }
}
