//! A job on groups of other devices each: a batch that is shared over them, or stages on one group
//! after another ([`across`](super::across)), whichever is faster.
//!
//! Where a batch is shared, every group trains copies of the model in a layout of its own, on as
//! many samples as it has time for; at the end of a step the groups exchange their gradients. The
//! batch is cut into equal pieces, and a group takes any number of them, or none.
//!
//! The best shares are found by bounds that become times: the shares whose slowest group has the
//! least bound are looked at, their bounds are replaced by what the search finds for the group on
//! so many samples, and so on until the shares with the least bound are all known. Nothing is
//! supposed of how times grow with samples.

use ir::{Diagnostic, Span};
use serde::Serialize;

use super::across::{Across, across};
use super::ask::{Chosen, Question, extreme};
use super::knobs::{Frame, divisors};
use super::tree::{Budget, Objective, Path, Tree};
use super::uniform::Space;
use crate::cluster::Cluster;
use crate::configuration::Configuration;
use crate::estimate::style::Style;
use crate::estimate::workload::Workload;
use crate::estimate::{Estimator, Job, legal};
use crate::limits::Limits;

/// Pieces of a batch at most. Chosen: shares are then as even as speeds are known.
const PIECES_MAX: u32 = 64;
/// Groups at most: each set of them is looked at.
pub(super) const GROUPS_MAX: usize = 8;

/// What is asked.
#[derive(Clone)]
pub struct Asked<'a> {
    /// What a step computes.
    pub work: &'a Workload,
    /// A cluster of groups.
    pub cluster: &'a Cluster,
    /// How programs execute.
    pub style: Style,
    /// The batch of all groups, and the arithmetic.
    pub job: Job,
    /// What the user fixes and forbids, in each group.
    pub limits: Limits,
    /// How far the search for one group may go.
    pub evaluations_max: u64,
    /// Whether the fullest device is to be small, in place of the time of a step.
    pub for_memory: bool,
    /// The groups that all take part, ascending; none where any may.
    pub set: Option<Vec<usize>>,
}

/// How a job lies over groups.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Grouped {
    /// Every group has copies of the model.
    Shares(Shared),
    /// Every group has stages of it.
    Stages(Across),
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

    /// Joules of a step on the devices that take part, where it is known what all of them draw.
    pub fn joules(&self, cluster: &Cluster) -> Option<f64> {
        let of = |(group, ranks, busy_s): &(usize, u32, f64)| {
            let power = cluster.groups[*group].device.power.as_ref()?;
            Some(f64::from(*ranks) * power.joules(self.step_time_s(), *busy_s))
        };
        self.used().iter().map(of).sum()
    }
}

/// The best way over groups: shares of the batch, or stages on one group after another.
///
/// # Errors
/// As [`share`].
pub fn plan(asked: &Asked<'_>) -> Result<Grouped, Vec<Diagnostic>> {
    joined(asked)?;
    let shared = share(asked);
    if asked.for_memory || asked.cluster.groups.len() > GROUPS_MAX {
        return Ok(Grouped::Shares(shared?));
    }
    let below_s = shared.as_ref().map_or(f64::INFINITY, |shared| shared.step_time_s);
    match across(asked, below_s).map_err(|wrong| vec![wrong])? {
        Some(across) => Ok(Grouped::Stages(across)),
        None => Ok(Grouped::Shares(shared?)),
    }
}

/// The sets of groups whose fastest way is found, with it, all groups last.
///
/// # Errors
/// As [`share`], where no set has a way.
pub fn of_each_set(asked: &Asked<'_>) -> Result<Vec<(Vec<usize>, Grouped)>, Vec<Diagnostic>> {
    let mut found = Vec::new();
    let mut wrong = Vec::new();
    for set in sets(asked.cluster.groups.len().min(GROUPS_MAX)) {
        match plan(&Asked { set: Some(set.clone()), ..asked.clone() }) {
            Ok(way) => found.push((set, way)),
            Err(diagnostics) => wrong = diagnostics,
        }
    }
    if found.is_empty() { Err(wrong) } else { Ok(found) }
}

/// Sets of at least one of so many groups, all of them last.
fn sets(count: usize) -> impl Iterator<Item = Vec<usize>> {
    let members = move |set: u32| (0..count).filter(|group| set >> group & 1 == 1).collect();
    (1u32..1 << count).map(members)
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
pub struct Shared {
    /// The groups in order.
    pub shares: Vec<Share>,
    /// Samples of a piece.
    pub piece: u32,
    /// Seconds in which groups exchange their gradients.
    pub exchange_s: f64,
    /// Seconds of a step: those of the slowest group, and the exchange.
    pub step_time_s: f64,
    /// Groups with so many samples that were searched.
    pub searched: usize,
}

/// What is known of a group on so many pieces.
#[derive(Clone, Debug)]
enum Value {
    /// Not less than this.
    Bound(f64),
    /// This, or that there is no layout.
    Found(Option<Box<Chosen>>),
}

impl Value {
    /// Seconds, or bytes of the fullest device.
    fn worth(&self, for_memory: bool) -> f64 {
        match self {
            Value::Bound(worth) => *worth,
            Value::Found(Some(chosen)) if for_memory => chosen.estimate.memory.total_bytes(),
            Value::Found(Some(chosen)) => chosen.estimate.step_time_s,
            Value::Found(None) => f64::INFINITY,
        }
    }
}

struct Groups<'a> {
    asked: &'a Asked<'a>,
    piece: u32,
    pieces: usize,
    /// By group and pieces.
    values: Vec<Vec<Value>>,
    searched: usize,
}

impl Asked<'_> {
    /// Samples of a step.
    pub(super) fn batch(&self) -> u32 {
        u32::try_from(self.job.global_batch).unwrap_or(u32::MAX)
    }

    /// Whether so many groups are those that are asked for.
    pub(super) fn allows(&self, set: &[usize]) -> bool {
        self.set.as_ref().is_none_or(|only| only == set)
    }

    pub(super) fn devices(&self, group: usize) -> u32 {
        let devices = self.cluster.groups[group].devices().unwrap_or(0);
        u32::try_from(devices).unwrap_or(u32::MAX)
    }

    pub(super) fn estimator(
        &self,
        group: usize,
        samples: u32,
    ) -> Result<Estimator<'_>, Diagnostic> {
        let job = Job { global_batch: samples.into(), ..self.job };
        Estimator::new(self.work, &self.cluster.groups[group], self.style, job)
    }

    /// Seconds in which `n` groups sum their gradients in a ring: each sends `2 (n - 1) / n` of
    /// them (Patarasuk and Yuan 2009), through the ports of all its devices; the slowest decides.
    fn exchange_s(&self, set: &[usize]) -> f64 {
        if set.len() < 2 {
            return 0.0;
        }
        let n = set.len() as f64;
        let sent = 2.0 * (n - 1.0) / n;
        let bytes = sent * self.work.parameters() as f64 * self.style.exchange_bytes;
        let of = |group: &usize| {
            let cluster = &self.cluster.groups[*group];
            let level = cluster.levels.last().expect("a cluster has a level");
            let rate = level.bandwidth.value * f64::from(self.devices(*group));
            bytes / rate + level.latency.value
        };
        set.iter().map(of).fold(0.0, f64::max)
    }
}

impl<'a> Groups<'a> {
    /// Nothing is known but of no pieces.
    fn new(asked: &'a Asked<'a>) -> Result<Groups<'a>, Vec<Diagnostic>> {
        let count = asked.cluster.groups.len();
        if count == 0 || count > GROUPS_MAX {
            let headline =
                format!("{count} groups of devices, and 1 to {GROUPS_MAX} share a batch");
            return Err(vec![wrong(asked, "E3404", headline)]);
        }
        joined(asked)?;
        let batch = asked.batch();
        let pieces = divisors(batch).into_iter().filter(|n| *n <= PIECES_MAX).max().unwrap_or(1);
        let values = vec![vec![Value::Bound(0.0)]; count];
        Ok(Groups { asked, piece: batch / pieces, pieces: pieces as usize, values, searched: 0 })
    }

    /// The answer.
    fn told(&self, set: &[usize], pieces: &[usize]) -> Shared {
        let shares = self.shares(set, pieces);
        let exchange_s = self.asked.exchange_s(set);
        let chosen = shares.iter().filter_map(|share| share.chosen.as_ref());
        let slowest_s = chosen.map(|chosen| chosen.estimate.step_time_s).fold(0.0, f64::max);
        Shared {
            shares,
            piece: self.piece,
            exchange_s,
            step_time_s: slowest_s + exchange_s,
            searched: self.searched,
        }
    }

    /// Asks the search, where that was not done yet.
    fn find(&mut self, group: usize, pieces: usize) -> Result<(), Diagnostic> {
        if let Value::Found(_) = self.values[group][pieces] {
            return Ok(());
        }
        let Asked { limits, evaluations_max, for_memory, .. } = self.asked;
        let objective = if *for_memory { Objective::Memory } else { Objective::Time };
        let samples = self.piece * pieces as u32;
        let estimator = self.asked.estimator(group, samples)?;
        let question = Question {
            estimator: &estimator,
            devices: self.asked.devices(group),
            global_batch: samples,
            limits: limits.clone(),
            objective,
            power: None,
            budget: Budget { evaluations_max: *evaluations_max, stop: &|| false },
        };
        let found = extreme(&question, question.devices, limits, objective);
        let found = found.filter(|chosen| chosen.fits);
        self.values[group][pieces] = Value::Found(found.map(Box::new));
        self.searched += 1;
        Ok(())
    }

    /// Pieces of the groups of a set, at least one each, whose slowest group has the least time as
    /// far as it is known; with that time.
    fn least(&self, set: &[usize]) -> Option<(f64, Vec<usize>)> {
        // By pieces that are given away: the least time of the groups so far, and their pieces.
        let mut best: Vec<Option<(f64, Vec<usize>)>> = vec![None; self.pieces + 1];
        best[0] = Some((0.0, Vec::new()));
        for group in set {
            let mut next: Vec<Option<(f64, Vec<usize>)>> = vec![None; self.pieces + 1];
            for (given, before) in best.iter().enumerate() {
                let Some((slowest, shares)) = before else { continue };
                for more in 1..=self.pieces - given {
                    let slowest =
                        slowest.max(self.values[*group][more].worth(self.asked.for_memory));
                    let there = &mut next[given + more];
                    if there.as_ref().is_none_or(|(other, _)| slowest < *other) {
                        let shares = shares.iter().copied().chain([more]).collect();
                        *there = Some((slowest, shares));
                    }
                }
            }
            best = next;
        }
        best.pop().flatten()
    }

    fn shares(&self, set: &[usize], pieces: &[usize]) -> Vec<Share> {
        let mut first_rank = 0;
        let mut shares = Vec::new();
        for group in 0..self.values.len() {
            let ranks = self.asked.devices(group);
            let at = set.iter().position(|other| *other == group);
            let taken = at.map_or(0, |at| pieces[at]);
            let chosen = match &self.values[group][taken] {
                Value::Found(Some(chosen)) if taken > 0 => Some((**chosen).clone()),
                Value::Found(_) | Value::Bound(_) => None,
            };
            let samples = self.piece * taken as u32;
            shares.push(Share { group, first_rank, ranks, samples, chosen });
            first_rank += ranks;
        }
        shares
    }
}

/// The fastest shares of a batch.
///
/// # Errors
/// `E3404` for a cluster without groups, or with too many; `E3201` where no share fits.
pub fn share(asked: &Asked<'_>) -> Result<Shared, Vec<Diagnostic>> {
    let count = asked.cluster.groups.len();
    let mut groups = Groups::new(asked)?;
    for group in 0..count {
        for pieces in 1..=groups.pieces {
            let samples = groups.piece * pieces as u32;
            let estimator = asked.estimator(group, samples).map_err(|wrong| vec![wrong])?;
            let frame = Frame::new(asked.work, asked.devices(group), samples, asked.limits.clone());
            let bound = || Space::new(&estimator, frame).bound(&Path::default(), f64::INFINITY);
            let bound = if asked.for_memory { 0.0 } else { bound().seconds };
            groups.values[group].push(Value::Bound(bound));
        }
    }
    let mut best: Option<(f64, Vec<usize>, Vec<usize>)> = None;
    for set in sets(count).filter(|set| asked.allows(set)) {
        let more_s = if asked.for_memory { 0.0 } else { asked.exchange_s(&set) };
        while let Some((slowest, pieces)) = groups.least(&set) {
            let worth = slowest + more_s;
            if best.as_ref().map_or(f64::INFINITY, |best| best.0) <= worth {
                break;
            }
            let before = groups.searched;
            for (group, pieces) in set.iter().zip(&pieces) {
                groups.find(*group, *pieces).map_err(|wrong| vec![wrong])?;
            }
            if groups.searched == before {
                best = Some((worth, set.clone(), pieces));
                break;
            }
        }
    }
    let Some((_, set, pieces)) = best else {
        let within = match asked.limits.is_empty() {
            true => String::new(),
            false => format!(" within `{}`", asked.limits),
        };
        let headline = format!("no group fits a share of the batch in memory{within}");
        return Err(vec![wrong(asked, "E3201", headline)]);
    };
    Ok(groups.told(&set, &pieces))
}

/// The best shares of a batch over groups whose layouts are known; none for a group that does
/// nothing. Whether they fit is told of each.
///
/// # Errors
/// `E3404` as [`share`]; `E3401` for layouts that make no sense for their groups or the batch.
pub fn score(
    asked: &Asked<'_>,
    layouts: &[Option<Configuration>],
) -> Result<Shared, Vec<Diagnostic>> {
    let mut groups = Groups::new(asked)?;
    let mut diagnostics = Vec::new();
    for (group, c) in layouts.iter().enumerate().filter_map(|(at, c)| Some((at, c.as_ref()?))) {
        diagnostics.extend(legal::check_model(asked.work, c).err().into_iter().flatten());
        let devices = asked.devices(group);
        if c.ranks() != u64::from(devices) {
            let name = &asked.cluster.groups[group].name;
            let headline = format!("{} ranks, and `{name}` has {devices}", c.ranks());
            let span = Span::of(c.to_string());
            diagnostics.push(Diagnostic::error("E3401", span, headline));
        }
    }
    if !diagnostics.is_empty() {
        return Err(diagnostics);
    }
    let set: Vec<usize> = (0..layouts.len()).filter(|group| layouts[*group].is_some()).collect();
    for (group, c) in layouts.iter().enumerate() {
        for pieces in 1..=groups.pieces {
            let samples = groups.piece * pieces as u32;
            let estimator = asked.estimator(group, samples).map_err(|wrong| vec![wrong])?;
            let chosen = c.as_ref().and_then(|c| {
                let estimate = estimator.estimate(c).ok()?;
                let fits = estimate.memory.total_bytes() <= estimator.memory_bytes;
                Some(Box::new(Chosen { configuration: c.clone(), estimate, fits }))
            });
            groups.values[group].push(Value::Found(chosen));
        }
    }
    let least = groups.least(&set).filter(|(slowest, _)| slowest.is_finite());
    let Some((_, pieces)) = least else {
        let batch = asked.batch();
        let headline = format!("no shares of {batch} samples that these layouts divide");
        let help = "choose a batch that is a multiple of dp × mbs of all groups";
        let span = Span::of(asked.cluster.name.clone());
        return Err(vec![Diagnostic::error("E3401", span, headline).help(help)]);
    };
    Ok(groups.told(&set, &pieces))
}

/// Several groups need links that leave their nodes.
fn joined(asked: &Asked<'_>) -> Result<(), Vec<Diagnostic>> {
    let groups = &asked.cluster.groups;
    let alone = groups.iter().find(|group| groups.len() > 1 && group.levels.len() < 2);
    alone.map_or(Ok(()), |group| {
        let headline = format!("nothing joins `{}` to other groups", group.name);
        let help = "give it a second `[[level]]` with the bandwidth of its network";
        let span = Span::of(asked.cluster.name.clone());
        Err(vec![Diagnostic::error("E3404", span, headline).help(help)])
    })
}

fn wrong(asked: &Asked<'_>, code: &'static str, headline: String) -> Diagnostic {
    Diagnostic::error(code, Span::of(asked.cluster.name.clone()), headline)
        .help("ask about one of the groups alone: `plan` says what is missing there")
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::estimate::rates::Arithmetic;
    use crate::estimate::style;
    use crate::machine::Machine;
    use crate::space::ask::{EVALUATIONS_MAX, ask};
    use crate::space::models;

    /// Nodes of presets.
    pub(in crate::space) fn cluster(groups: &[(&str, usize)]) -> Cluster {
        let text: String = groups
            .iter()
            .map(|(preset, nodes)| {
                let deployment = format!("[group.deployment]\nnodes = {nodes}\n");
                format!("[[group]]\nextends = \"preset:{preset}\"\n{deployment}")
            })
            .collect();
        let machine = Machine { cores: 4, memory_bytes: 8 << 30, instruction_set: "avx2".into() };
        Cluster::parse("mixed.toml", &text, &machine).unwrap()
    }

    /// All shares of a batch over groups, tried one by one.
    fn tried(asked: &Asked<'_>, pieces: usize, piece: u32) -> f64 {
        let count = asked.cluster.groups.len();
        let seconds = |group: usize, taken: usize| {
            let samples = piece * taken as u32;
            let estimator = asked.estimator(group, samples).unwrap();
            let answer = ask(&Question {
                estimator: &estimator,
                devices: asked.devices(group),
                global_batch: samples,
                limits: asked.limits.clone(),
                objective: Objective::Time,
                power: None,
                budget: Budget { evaluations_max: EVALUATIONS_MAX, stop: &|| false },
            });
            answer.map_or(f64::INFINITY, |answer| answer.best[0].estimate.step_time_s)
        };
        let table: Vec<Vec<f64>> =
            (0..count).map(|g| (1..=pieces).map(|taken| seconds(g, taken)).collect()).collect();
        let mut best = f64::INFINITY;
        for code in 0..(pieces + 1).pow(count as u32) {
            let taken: Vec<usize> =
                (0..count).map(|g| code / (pieces + 1).pow(g as u32) % (pieces + 1)).collect();
            if taken.iter().sum::<usize>() != pieces {
                continue;
            }
            let set: Vec<usize> = (0..count).filter(|g| taken[*g] > 0).collect();
            let slowest = set.iter().map(|g| table[*g][taken[*g] - 1]).fold(0.0, f64::max);
            best = best.min(slowest + asked.exchange_s(&set));
        }
        best
    }

    /// On small clusters of two and three groups the shares are the best of all.
    #[test]
    fn shares_are_the_best_of_all() {
        let cases = [
            ("llama-3-8b", 8192, 48, &[("h100", 1), ("a100", 1)][..]),
            ("llama-3-8b", 8192, 40, &[("a100", 1), ("h100", 1)]),
            ("gpt-7.5b", 2048, 8, &[("h100", 1), ("a100", 2), ("v100", 1)]),
        ];
        for (model, seq, batch, groups) in cases {
            let mut shape = models::shape(model).unwrap();
            shape.seq = seq;
            let work = shape.workload().unwrap();
            let cluster = cluster(groups);
            let fix = ["placement=usual", "offload=off", "cp=1"].map(str::to_owned);
            let asked = Asked {
                work: &work,
                cluster: &cluster,
                style: style::OURS,
                job: Job { global_batch: batch.into(), arithmetic: Arithmetic::Half },
                limits: Limits::parse(&fix, &[], &[]).unwrap(),
                evaluations_max: EVALUATIONS_MAX,
                for_memory: false,
                set: None,
            };
            let found = share(&asked).unwrap();
            let best = tried(&asked, batch as usize, 1);
            let about = format!("{model}: {found:?}");
            assert!((found.step_time_s / best - 1.0).abs() < 1e-9, "{best}: {about}");
            assert_eq!(found.shares.iter().map(|s| s.samples).sum::<u32>(), batch, "{about}");
            // Of groups as large, the faster one takes more; the other is worth the exchange.
            let of = |device: &str| {
                let at = groups.iter().position(|(name, _)| *name == device).unwrap();
                found.shares[at].samples
            };
            let shared = of("h100") > of("a100") && of("a100") > 0;
            assert!(groups.len() > 2 || shared, "{about}");
        }
    }

    /// Two groups sum gradients by sending each once, through the slower network; a group without
    /// a network is refused.
    #[test]
    fn gradients_cross_once() {
        let work = models::shape("llama-3-8b").unwrap().workload().unwrap();
        let joined = cluster(&[("h100", 1), ("a100", 1)]);
        let mut apart = joined.clone();
        apart.groups[1].levels.truncate(1);
        let asked = |cluster| Asked {
            work: &work,
            cluster,
            style: style::OURS,
            job: Job { global_batch: 16, arithmetic: Arithmetic::Half },
            limits: Limits::default(),
            evaluations_max: EVALUATIONS_MAX,
            for_memory: false,
            set: None,
        };
        // 8,030,261,248 gradients of 4 bytes through eight ports of 25 GB/s.
        let expected_s = 8_030_261_248.0 * 4.0 / (8.0 * 25e9);
        let found_s = asked(&joined).exchange_s(&[0, 1]);
        assert!((found_s / expected_s - 1.0).abs() < 1e-3, "{found_s} {expected_s}");
        let refused = plan(&asked(&apart)).unwrap_err();
        assert_eq!(refused[0].code, "E3404", "{refused:?}");
    }

    /// What was found scores as it was found; no other shares of the same layouts are faster.
    #[test]
    fn what_is_found_scores_the_same() {
        let mut shape = models::shape("llama-3-8b").unwrap();
        shape.seq = 8192;
        let work = shape.workload().unwrap();
        let cluster = cluster(&[("h100", 1), ("a100", 1)]);
        let asked = Asked {
            work: &work,
            cluster: &cluster,
            style: style::OURS,
            job: Job { global_batch: 48, arithmetic: Arithmetic::Half },
            limits: Limits::parse(&["pp=1".to_owned()], &[], &[]).unwrap(),
            evaluations_max: EVALUATIONS_MAX,
            for_memory: false,
            set: None,
        };
        let found = share(&asked).unwrap();
        let layout = |share: &Share| Some(share.chosen.as_ref()?.configuration.clone());
        let layouts: Vec<_> = found.shares.iter().map(layout).collect();
        assert!(layouts.iter().all(Option::is_some), "{found:?}");
        let scored = score(&asked, &layouts).unwrap();
        assert!((scored.step_time_s / found.step_time_s - 1.0).abs() < 1e-9, "{scored:?}");
        let alone = score(&asked, &[layouts[0].clone(), None]).unwrap();
        assert!(alone.step_time_s > scored.step_time_s && alone.shares[0].samples == 48);
        let wrong = Configuration { dp: 3, ..Configuration::default() };
        let refused = score(&asked, &[Some(wrong.clone()), Some(wrong)]).unwrap_err();
        assert_eq!(refused.iter().map(|d| d.code).collect::<Vec<_>>(), ["E3401"; 2]);
    }

    #[test]
    fn what_no_group_can_hold_is_refused() {
        let work = models::shape("gpt-1t").unwrap().workload().unwrap();
        let cluster = cluster(&[("h100", 1), ("a100", 1)]);
        let asked = Asked {
            work: &work,
            cluster: &cluster,
            style: style::OURS,
            job: Job { global_batch: 2, arithmetic: Arithmetic::Half },
            limits: Limits::parse(&["offload=off".to_owned()], &[], &[]).unwrap(),
            evaluations_max: EVALUATIONS_MAX,
            for_memory: false,
            set: None,
        };
        assert_eq!(share(&asked).unwrap_err()[0].code, "E3201");
        let alone = Asked { cluster: &cluster.groups[0], ..asked };
        assert_eq!(share(&alone).unwrap_err()[0].code, "E3404");
    }
}
