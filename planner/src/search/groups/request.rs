//! What is asked of groups of devices.

use ir::{Diagnostic, Span};

use crate::cluster::Cluster;
use crate::configuration::Configuration;
use crate::estimate::line::Trunk;
use crate::estimate::profile::Profile;
use crate::estimate::workload::Workload;
use crate::estimate::{Estimator, Job};
use crate::limits::Limits;

/// Groups at most: each set of them is looked at.
pub(in crate::search) const GROUPS_MAX: usize = 8;

/// What is asked.
#[derive(Clone)]
pub struct GroupRequest<'a> {
    /// What a step computes.
    pub work: &'a Workload,
    /// A cluster of groups.
    pub cluster: &'a Cluster,
    /// How programs execute.
    pub profile: Profile,
    /// The batch of all groups, and the arithmetic.
    pub job: Job,
    /// What the user fixes and forbids, in each group.
    pub limits: Limits,
    /// How far the search for one group may go.
    pub evaluations_max: u64,
    /// Whether to minimise the bytes of the fullest device in place of the time of a step.
    pub for_memory: bool,
    /// The groups that all take part, ascending; none where any may.
    pub set: Option<Vec<usize>>,
    /// Says when to stop, by a clock: answers then depend on the machine.
    pub stop: &'a (dyn Fn() -> bool + Sync),
}

impl GroupRequest<'_> {
    /// Samples of a step.
    pub(in crate::search) fn batch(&self) -> u32 {
        u32::try_from(self.job.global_batch).unwrap_or(u32::MAX)
    }

    /// By group: the first one that is alike.
    pub(in crate::search) fn kinds(&self) -> Vec<usize> {
        let groups = &self.cluster.groups;
        let unnamed = |group: &Cluster| Cluster { name: String::new(), ..group.clone() };
        let unnamed: Vec<Cluster> = groups.iter().map(unnamed).collect();
        let first = |group| unnamed.iter().position(|other| *other == unnamed[group]);
        (0..groups.len()).map(|group| first(group).unwrap_or(group)).collect()
    }

    /// The sets of groups that are asked for, all of them last; of sets with as many groups of each
    /// kind, the first.
    pub(in crate::search) fn sets_like(&self, only: Option<&[usize]>) -> Vec<Vec<usize>> {
        if let Some(only) = only {
            return vec![only.to_vec()];
        }
        let kinds = self.kinds();
        let count = kinds.len().min(GROUPS_MAX);
        let members = |set: u32| (0..count).filter(|group| set >> group & 1 == 1).collect();
        let is_first = |set: &Vec<usize>| {
            let earlier = |group: usize| (0..group).filter(move |other| !set.contains(other));
            set.iter().all(|group| earlier(*group).all(|other| kinds[other] != kinds[*group]))
        };
        (1u32..1 << count).map(members).filter(is_first).collect()
    }

    pub(in crate::search) fn devices(&self, group: usize) -> u32 {
        let devices = self.cluster.groups[group].devices().unwrap_or(0);
        u32::try_from(devices).unwrap_or(u32::MAX)
    }

    /// What prices steps of the whole batch on a group.
    pub(in crate::search) fn estimator(&self, group: usize) -> Result<Estimator<'_>, Diagnostic> {
        let cluster = &self.cluster.groups[group];
        let estimator = Estimator::new(self.work, cluster, self.profile, self.job)?;
        Ok(estimator.limited(self.limits.memory_bytes()))
    }

    /// Seconds in which `n` groups sum their gradients in a ring: each sends an n-th of them
    /// `2 (n - 1)` times (Patarasuk and Yuan 2009), through the ports of all its devices; the
    /// slowest decides.
    pub(in crate::search) fn exchange_s(&self, set: &[usize]) -> f64 {
        if set.len() < 2 {
            return 0.0;
        }
        let n = set.len() as f64;
        let times = 2.0 * (n - 1.0);
        let bytes = self.work.trained_parameters() as f64 * self.profile.exchange_bytes / n;
        let of = |group: &usize| {
            let cluster = &self.cluster.groups[*group];
            let level = cluster.levels.last().expect("a cluster has a level");
            let rate = level.bytes_per_s() * f64::from(self.devices(*group));
            times * (bytes / rate + level.latency.value)
        };
        let own = set.iter().map(of).fold(0.0, f64::max);
        // The ring goes on in the order of the groups, and from the last to the first.
        let next = set.iter().cycle().skip(1);
        let trunks = set.iter().zip(next).filter_map(|(one, other)| self.trunk(*one, *other));
        trunks.map(|link| times * (bytes / link.bytes_per_s + link.latency_s)).fold(own, f64::max)
    }

    /// The link between two groups, where it is said what it is.
    pub(in crate::search) fn trunk(&self, one: usize, other: usize) -> Option<Trunk> {
        let link = self.cluster.between(one, other)?;
        Some(Trunk { bytes_per_s: link.bandwidth.value, latency_s: link.latency.value })
    }
}

/// The ranks of a layout are the devices of its group.
pub(in crate::search) fn ranks_wrong(
    asked: &GroupRequest<'_>,
    group: usize,
    c: &Configuration,
) -> Option<Diagnostic> {
    let devices = asked.devices(group);
    (c.ranks() != u64::from(devices)).then(|| {
        let name = &asked.cluster.groups[group].name;
        let headline = format!("{} ranks, and `{name}` has {devices}", c.ranks());
        Diagnostic::error("E3401", Span::of(c.to_string()), headline)
            .help(format!("write a layout of tp · cp · pp · dp = {devices}"))
    })
}
