//! A job on groups of other devices each: a batch that is shared over them, or stages on one group
//! after another ([`hetero_pipeline`]), whichever is faster.
//!
//! Where a batch is shared, every group trains copies of the model in a layout of its own, on as
//! many samples as it has time for; at the end of a step the groups exchange their gradients. The
//! batch is cut into equal pieces, and a group takes any number of them, or none; where nothing
//! divides the batch, one group takes what is left over (`shares`).

use ir::{Diagnostic, Span};
use serde::Serialize;

pub use self::request::GroupRequest;
pub(in crate::search) use self::request::{GROUPS_MAX, ranks_wrong};
use self::shares::Shares;
use super::hetero_pipeline::{self, HeteroPipeline, Lines};
use super::request::Chosen;
use crate::cluster::Cluster;
use crate::configuration::Configuration;
use crate::estimate::legal;

mod request;
mod shares;
#[cfg(test)]
pub(crate) mod tests;

/// How a job lies over groups.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Grouped {
    /// Every group has copies of the model.
    Shares(BatchShares),
    /// Every group has stages of it.
    Stages(HeteroPipeline),
}

impl Grouped {
    /// Seconds of a step.
    pub fn step_time_s(&self) -> f64 {
        match self {
            Grouped::Shares(shared) => shared.step_time_s,
            Grouped::Stages(across) => across.step_time_s,
        }
    }

    /// One in ten steps is shorter than the first, one in ten longer than the second. Of shares, as
    /// wide as that of the slowest group.
    pub fn interval_s(&self) -> [f64; 2] {
        let shared = match self {
            Grouped::Stages(across) => return across.interval_s,
            Grouped::Shares(shared) => shared,
        };
        let chosen = shared.shares.iter().filter_map(|share| share.chosen.as_ref());
        let estimates = chosen.map(|chosen| &chosen.estimate);
        let slowest = estimates.max_by(|a, b| a.step_time_s.total_cmp(&b.step_time_s));
        slowest.map_or([shared.step_time_s; 2], |slowest| {
            [slowest.step_time_low_s, slowest.step_time_high_s]
                .map(|seconds| shared.step_time_s * seconds / slowest.step_time_s)
        })
    }

    /// The groups that take part, each with its devices and the seconds in which they compute.
    pub fn used(&self) -> Vec<(usize, u32, f64)> {
        match self {
            Grouped::Shares(shared) => {
                let busy = |share: &Share| {
                    let busy_s = share.chosen.as_ref()?.estimate.busy_s;
                    Some((share.group, share.ranks, busy_s))
                };
                shared.shares.iter().filter_map(busy).collect()
            }
            Grouped::Stages(across) => {
                across.parts.iter().map(|part| (part.group, part.ranks, part.busy_s)).collect()
            }
        }
    }

    /// Devices that take part.
    pub fn devices(&self) -> u32 {
        self.used().iter().map(|(_, ranks, _)| ranks).sum()
    }

    /// Money for an hour of the devices that take part, where it is known of all of their groups
    /// what an hour of a device costs.
    pub fn hourly(&self, price: &dyn Fn(usize) -> Option<f64>) -> Option<f64> {
        let of = |(group, ranks, _): &(usize, u32, f64)| Some(f64::from(*ranks) * price(*group)?);
        self.used().iter().map(of).sum()
    }

    /// Joules of a step on the devices that take part, where it is known what all of them draw.
    pub fn joules(&self, cluster: &Cluster) -> Option<f64> {
        let of = |(group, ranks, busy_s): &(usize, u32, f64)| {
            let power = cluster.groups[*group].device.power.as_ref()?;
            Some(f64::from(*ranks) * power.joules(self.step_time_s(), *busy_s))
        };
        self.used().iter().map(of).sum()
    }
}

/// The best plan over groups: heterogeneous data parallelism or a heterogeneous pipeline.
///
/// # Errors
/// Those of [`share`].
pub fn plan(asked: &GroupRequest<'_>) -> Result<Grouped, Vec<Diagnostic>> {
    Ways::new(asked)?.best(asked.set.as_deref())
}

/// The sets of groups whose fastest way is found, with it, all groups last; of sets with as many
/// groups of each kind, the first.
///
/// # Errors
/// Those of [`share`], where no set of groups has a plan.
pub fn of_each_set(
    asked: &GroupRequest<'_>,
) -> Result<Vec<(Vec<usize>, Grouped)>, Vec<Diagnostic>> {
    let mut ways = Ways::new(asked)?;
    let mut found = Vec::new();
    let mut wrong = Vec::new();
    for set in asked.sets_like(None) {
        match ways.best(Some(&set)) {
            Ok(way) => found.push((set, way)),
            Err(diagnostics) => wrong = diagnostics,
        }
    }
    if found.is_empty() { Err(wrong) } else { Ok(found) }
}

/// What is known of a job's ways over groups, kept for one set of them after another.
struct Ways<'a> {
    asked: &'a GroupRequest<'a>,
    shares: Shares<'a>,
    lines: Lines<'a>,
}

impl<'a> Ways<'a> {
    fn new(asked: &'a GroupRequest<'a>) -> Result<Ways<'a>, Vec<Diagnostic>> {
        let shares = Shares::new(asked)?;
        let lines = Lines::new(asked).map_err(|wrong| vec![wrong])?;
        Ok(Ways { asked, shares, lines })
    }

    /// The best way of a set of groups, or of any.
    fn best(&mut self, set: Option<&[usize]>) -> Result<Grouped, Vec<Diagnostic>> {
        let shared = self.shares.best(set);
        if self.asked.for_memory {
            return Ok(Grouped::Shares(shared?));
        }
        let below_s = shared.as_ref().map_or(f64::INFINITY, |shared| shared.step_time_s);
        match self.lines.fastest(set, below_s) {
            Some(across) => Ok(Grouped::Stages(across)),
            None => Ok(Grouped::Shares(shared?)),
        }
    }
}

/// What a group does.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Share {
    /// The group, by its place in the cluster.
    pub group: usize,
    /// Its first rank.
    pub first_rank: u32,
    /// Its ranks.
    pub ranks: u32,
    /// Samples of a step; none where the group does nothing.
    pub samples: u32,
    /// Its layout.
    pub chosen: Option<Chosen>,
}

/// The shares of all groups.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BatchShares {
    /// The groups in order.
    pub shares: Vec<Share>,
    /// Samples of a piece.
    pub piece: u32,
    /// Samples that one group has beside its pieces.
    pub rest: u32,
    /// Seconds in which groups exchange their gradients.
    pub exchange_s: f64,
    /// Seconds of a step: those of the slowest group, and the exchange.
    pub step_time_s: f64,
    /// Searches done, each for one group with one number of samples.
    pub searched: usize,
    /// Whether no other shares can be faster.
    pub complete: bool,
    /// The batches next to this one that all groups can share, where they cannot share this one.
    pub nearest: Vec<u32>,
}

/// The fastest shares of a batch.
///
/// # Errors
/// `E3404` for a cluster without groups, or with too many; `E3203` where no layouts divide the
/// batch, `E3201` where no share fits, `E3205` where a budget ended first.
pub fn share(asked: &GroupRequest<'_>) -> Result<BatchShares, Vec<Diagnostic>> {
    Shares::new(asked)?.best(asked.set.as_deref())
}

/// The best shares of a batch over groups whose layouts are known; none for a group that does
/// nothing. Each share says whether it fits.
///
/// # Errors
/// `E3404` as [`share`]; `E3401` for layouts that make no sense for their groups or the batch.
pub fn score(
    asked: &GroupRequest<'_>,
    layouts: &[Option<Configuration>],
) -> Result<BatchShares, Vec<Diagnostic>> {
    let mut diagnostics = Vec::new();
    for (group, c) in layouts.iter().enumerate().filter_map(|(at, c)| Some((at, c.as_ref()?))) {
        diagnostics.extend(legal::check_model(asked.work, c).err().into_iter().flatten());
        diagnostics.extend(ranks_wrong(asked, group, c));
    }
    if !diagnostics.is_empty() {
        return Err(diagnostics);
    }
    Shares::of_layouts(asked, layouts)
}

/// What a pipeline over groups costs whose layouts are known, the first stages first; each names
/// the layers of its stages. Each part says whether it fits.
///
/// # Errors
/// `E3404` as [`share`]; `E3401` for layouts that make no sense for their groups, for the model or
/// for the batch, or that make no pipeline together.
pub fn score_line(
    asked: &GroupRequest<'_>,
    layouts: &[(usize, Configuration)],
) -> Result<HeteroPipeline, Vec<Diagnostic>> {
    there(asked)?;
    joined(asked)?;
    hetero_pipeline::score(asked, layouts)
}

/// There are groups, and not too many.
pub(super) fn there(asked: &GroupRequest<'_>) -> Result<(), Vec<Diagnostic>> {
    let count = asked.cluster.groups.len();
    if (1..=GROUPS_MAX).contains(&count) {
        return Ok(());
    }
    let headline = format!("{count} groups of devices, and 1 to {GROUPS_MAX} share a batch");
    Err(vec![wrong(asked, "E3404", headline)])
}

/// Several groups need links that leave their nodes.
fn joined(asked: &GroupRequest<'_>) -> Result<(), Vec<Diagnostic>> {
    let groups = &asked.cluster.groups;
    let alone = groups.iter().find(|group| groups.len() > 1 && group.levels.len() < 2);
    alone.map_or(Ok(()), |group| {
        let headline = format!("nothing joins `{}` to other groups", group.name);
        let help = "give it a second `[[level]]` with the bandwidth of its network";
        let span = Span::of(asked.cluster.name.clone());
        Err(vec![Diagnostic::error("E3404", span, headline).help(help)])
    })
}

fn wrong(asked: &GroupRequest<'_>, code: &'static str, headline: String) -> Diagnostic {
    Diagnostic::error(code, Span::of(asked.cluster.name.clone()), headline)
        .help("ask about one of the groups alone: `plan` says what is missing there")
}
