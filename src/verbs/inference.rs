//! `--for inference|prefill|decode` of `plan`, `fit`, `score`, `explain`, `compare`, `cost` and
//! `size`: how copies of a model answer prompts.

pub mod compare;
pub mod cost;
pub mod explain;
mod page;
pub mod size;

use ir::{Diagnostic, Span};
use planner::cluster::Cluster;
use planner::configuration::Configuration;
use planner::divisors::divisors;
use planner::estimate::Estimator;
use planner::estimate::serving::{Forward, Held, Load, Parts, Replica, Serving};
use planner::estimate::workload::Item;
use planner::limits::Decision;

use self::page::print;
use super::gpus::Subject;
use crate::failure::{Exit, Failure, usage};
use crate::verbs::flags::{Purpose, RequestFlags, Served, refuse_cpus};

/// Tokens of a prompt that are worked on at once, at most. Chosen: what servers usually cut prompts
/// into; longer pieces need more working memory and are no faster.
const PIECE_MAX: u32 = 8192;

/// What copies are asked to do at once.
#[derive(Clone, Copy, Debug, Default)]
struct Wanted {
    /// Sequences over all copies; none for the most that fit.
    sequences: Option<u64>,
    /// Seconds from one token of a sequence to the next, at most.
    token_s: Option<f64>,
}

/// One way to lie, and what it gives. Where it does not fit it gives nothing.
#[derive(Clone, Debug)]
struct Row {
    copy: Replica,
    copies: u32,
    held: Held,
    /// Sequences of the fullest copy, and of all copies.
    load: Load,
    sequences: u64,
    /// The longest context, in tokens, of each of `longest_of` sequences over all copies: of the
    /// sequences asked for, or of one on each copy.
    longest: u64,
    longest_of: u64,
    /// The most sequences of a copy that fit, late or not.
    most: u64,
    /// Bytes of the fullest device with its sequences, or with one where none fits.
    need_bytes: f64,
    /// A prompt on each stage, as far as they fit.
    prompt: Option<Forward>,
    /// One sequence on each copy.
    single: Option<Forward>,
    /// All sequences.
    many: Option<Forward>,
}

impl Row {
    fn ranks(&self) -> f64 {
        f64::from(self.copy.tp) * f64::from(self.copy.pp)
    }

    fn devices(&self) -> f64 {
        self.ranks() * f64::from(self.copies)
    }

    /// Whether it does what it is for.
    fn fits(&self, purpose: Purpose) -> bool {
        match purpose {
            Purpose::Prefill => self.prompt.is_some(),
            Purpose::Training | Purpose::Inference | Purpose::Decode => self.many.is_some(),
        }
    }

    /// Prompts that a copy works on at once.
    fn prompts(&self) -> u32 {
        Load::of(self.most.max(1), self.copy.pp).groups
    }

    /// Tokens of prompts of `seq` tokens per second and device.
    fn prompt_rate(&self, seq: u32) -> Option<f64> {
        let prompts = self.prompts();
        let done_s = self.prompt?.turn_s(prompts);
        Some(f64::from(seq) * f64::from(prompts) / done_s / self.ranks())
    }

    /// Seconds from one token of a sequence to the next, all groups working.
    fn token_s(&self) -> Option<f64> {
        Some(self.many?.turn_s(self.load.groups))
    }

    /// New tokens per second and device, of those without a sequence too.
    fn rate(&self) -> Option<f64> {
        Some(self.sequences as f64 / self.token_s()? / self.devices())
    }

    /// What rows are sorted by: tokens per second and device.
    fn figure(&self, purpose: Purpose, seq: u32) -> f64 {
        let figure = match purpose {
            Purpose::Prefill => self.prompt_rate(seq),
            Purpose::Training | Purpose::Inference | Purpose::Decode => self.rate(),
        };
        figure.unwrap_or(0.0)
    }
}

/// Copies of a model on a cluster, and what they are asked to do.
struct Copies<'a> {
    subject: &'a Subject,
    serving: Serving<'a>,
    wanted: Wanted,
    purpose: Purpose,
}

impl<'a> Copies<'a> {
    fn new(
        subject: &'a Subject,
        estimator: &'a Estimator<'a>,
        wanted: Wanted,
        purpose: Purpose,
    ) -> Result<Copies<'a>, Failure> {
        let serving = Serving { estimator, latent: subject.latent };
        refuse_without_prompts(subject, &serving)?;
        Ok(Copies { subject, serving, wanted, purpose })
    }

    fn seq(&self) -> u32 {
        self.subject.work.seq
    }

    fn have_bytes(&self) -> f64 {
        self.serving.estimator.memory_bytes
    }

    /// Tokens of a piece of a prompt.
    fn piece(&self) -> u32 {
        self.seq().min(PIECE_MAX)
    }

    /// What copies give that lie so, with the sequences that are wanted over all of them, or as
    /// many as fit and are soon enough.
    fn row(&self, copy: Replica, copies: u32) -> Row {
        let Copies { serving, wanted, .. } = self;
        let (seq, piece) = (self.seq(), self.piece());
        let context = u64::from(seq);
        let most = serving.most_sequences(copy, context, piece);
        // Copies without a sequence wait, and so do stages.
        let asked = wanted.sequences.map(|all| all.div_ceil(copies.into()));
        let in_time = |count| match wanted.token_s {
            Some(limit_s) => serving.most_within(copy, context, count, limit_s),
            None => count,
        };
        let fullest = asked.unwrap_or_else(|| in_time(most));
        let fits =
            (1..=most).contains(&fullest) && (asked.is_none() || in_time(fullest) == fullest);
        let load = Load::of(fullest, copy.pp);
        let each = asked.unwrap_or(1);
        Row {
            copy,
            copies,
            held: serving.held(copy),
            load,
            sequences: wanted.sequences.unwrap_or(u64::from(copies) * fullest),
            longest: serving.longest_context(copy, each, piece),
            longest_of: wanted.sequences.unwrap_or(copies.into()),
            most,
            need_bytes: serving.bytes(copy, fullest.max(1), context, piece),
            prompt: (most > 0).then(|| serving.forward(copy, 1, seq, 0)),
            single: fits.then(|| serving.forward(copy, 1, 1, context)),
            many: fits.then(|| serving.forward(copy, load.batch, 1, context)),
        }
    }

    /// All ways to lie on all devices that the limits allow: those that fit first, then those with
    /// the most tokens per second and device.
    fn rows(&self, asked: &RequestFlags) -> Result<Vec<Row>, Failure> {
        let limits = asked.limited.all_limits()?;
        let allow = |decision: Decision, number: u32| limits.allow(decision, number as usize);
        let devices = self.subject.devices;
        let mut rows = Vec::new();
        for tp in divisors(devices).into_iter().filter(|tp| allow(Decision::Tp, *tp)) {
            for pp in divisors(devices / tp).into_iter().filter(|pp| allow(Decision::Pp, *pp)) {
                let copies = devices / tp / pp;
                if !allow(Decision::Dp, copies) || !self.serving.allows(self.serving.alone(tp, pp))
                {
                    continue;
                }
                let ways = self.serving.expert_ways(tp, copies).into_iter();
                let ways = ways.filter(|ep| allow(Decision::Ep, *ep));
                rows.extend(ways.map(|ep| self.row(Replica { tp, pp, ep }, copies)));
            }
        }
        if rows.is_empty() {
            let name = &self.subject.work.name;
            let headline = format!("no copy of {name} lies so within the limits");
            return Err(usage("--fix", headline).help("relax the limits").into());
        }
        let (purpose, seq) = (self.purpose, self.seq());
        rows.sort_by(|a, b| {
            let figures = [a, b].map(|row| row.figure(purpose, seq));
            let fits = [a, b].map(|row| row.fits(purpose));
            let needs = [a, b].map(|row| row.need_bytes);
            let sorted = fits[1].cmp(&fits[0]).then(figures[1].total_cmp(&figures[0]));
            // Of those that give nothing, the smallest is the nearest.
            if fits == [false; 2] { needs[0].total_cmp(&needs[1]) } else { sorted }
        });
        Ok(rows)
    }

    /// The parts of the pass of a prompt, and of that of a token of all sequences.
    fn parts(&self, row: &Row) -> [Parts; 2] {
        let of = |batch, tokens, cached| self.serving.parts(row.copy, batch, tokens, cached);
        [of(1, self.seq(), 0), of(row.load.batch.max(1), 1, self.seq().into())]
    }

    /// The replica and the number of copies of a layout that the user wrote, on `copies` copies.
    /// Decisions that inference does not have are all refused at once.
    fn laid_out(
        &self,
        flag: &str,
        c: &Configuration,
        copies: u32,
    ) -> Result<(Replica, u32), Failure> {
        refuse_training(flag, c)?;
        let mut copy = self.serving.alone(c.tp, c.pp);
        if c.ep > 1 {
            copy.ep = c.ep;
        }
        let name = &self.subject.work.name;
        if !self.serving.allows(copy) {
            let headline = format!("no copy of {name} lies over {copy}");
            let help = "use a tp that divides the heads, a stage for each layer at most, and an \
                        ep that divides the experts and is a multiple of tp";
            return Err(usage(flag, headline).help(help).into());
        }
        let sharing = copy.sharing();
        if !copies.is_multiple_of(sharing) {
            let headline = format!("{copies} copies, of which each {sharing} share their experts");
            let help = format!("write a dp that {sharing} divides");
            return Err(usage(flag, headline).help(help).into());
        }
        Ok((copy, copies))
    }
}

/// Refuses models that go on after no prompt.
fn refuse_without_prompts(subject: &Subject, serving: &Serving<'_>) -> Result<(), Failure> {
    if serving.decodes() {
        return Ok(());
    }
    let items = || subject.work.layers.iter().flat_map(|layer| &layer.items);
    let looks = items().any(|item| matches!(item, Item::Attention { .. }));
    let mixes = items().any(|item| matches!(item, Item::Mixing { .. }));
    let lacking = match (looks, mixes) {
        (true, _) => "no attention to earlier tokens alone",
        (false, true) => "no entry that goes on from a cache",
        (false, false) => "no attention",
    };
    let headline =
        format!("`{}` has {lacking}, and so no prompt to go on after", subject.work.name);
    let help = "ask about training";
    Err(Diagnostic::error("E5010", Span::of("--for"), headline).help(help).into())
}

/// Refuses what a layout says that training alone has.
fn refuse_training(flag: &str, c: &Configuration) -> Result<(), Failure> {
    let plain = Configuration::default();
    let has = [
        (c.cp != plain.cp, "context parallelism"),
        (c.vpp != plain.vpp || c.schedule != plain.schedule, "schedule of micro-batches"),
        (c.zero != plain.zero, "gradients to shard"),
        (c.recompute != plain.recompute, "backward pass to recompute for"),
        (c.offload != plain.offload, "states to offload"),
        (c.order != plain.order, "placement of axes"),
        (c.stage_layers != plain.stage_layers, "uneven stages"),
    ];
    let refused = has
        .into_iter()
        .filter(|(is_there, _)| *is_there)
        .map(|(_, what)| usage(flag, format!("inference here has no {what}")).help("leave it out"));
    let refused: Vec<_> = refused.collect();
    if refused.is_empty() { Ok(()) } else { Err(refused.into()) }
}

/// Answers `score` about inference: what copies that the user wrote give; no where the work that
/// they are for does not fit. `sequences` are those of all copies.
pub fn score(
    subject: &Subject,
    c: &Configuration,
    sequences: Option<u32>,
    served: Served,
    json: bool,
) -> Result<Exit, Failure> {
    let estimator = subject.estimator()?;
    let wanted = Wanted { sequences: sequences.map(u64::from), token_s: served.token_time };
    let copies = Copies::new(subject, &estimator, wanted, served.purpose)?;
    let (copy, count) = copies.laid_out("--config", c, c.dp)?;
    Ok(print(&copies, &[copies.row(copy, count)], json))
}

/// The cluster and the limits that inference is answered for; anything else is refused.
fn refuse_others(asked: &RequestFlags, cluster: &Cluster) -> Result<(), Failure> {
    refuse_cpus(cluster, "`generate` runs a model here")?;
    if !cluster.groups.is_empty() {
        let headline = "copies for inference lie on devices that are alike, and these are not";
        let help = "ask about the cluster of one group, or `size`, which looks at each";
        return Err(usage("--cluster", headline.to_owned()).help(help).into());
    }
    let lacking =
        asked.limited.lacking(&[Decision::Tp, Decision::Pp, Decision::Dp, Decision::Ep])?;
    if lacking.is_empty() {
        return Ok(());
    }
    let refuse = |decision: &Decision| {
        let headline = format!("copies for inference have no `{decision}`");
        usage("--fix", headline).help("leave it out: they are laid out by tp, pp, dp and ep")
    };
    Err(lacking.iter().map(refuse).collect::<Vec<_>>().into())
}

/// What is wanted of all copies.
fn wanted(asked: &RequestFlags, served: Served) -> Wanted {
    Wanted { sequences: asked.gbs.map(|gbs| gbs as u64), token_s: served.token_time }
}

/// Answers `plan` and `fit` about inference; no where nothing fits.
pub fn serve(asked: &RequestFlags, cluster: Cluster, served: Served) -> Result<Exit, Failure> {
    refuse_others(asked, &cluster)?;
    let subject = Subject::new(asked, cluster)?;
    let estimator = subject.estimator()?;
    let copies = Copies::new(&subject, &estimator, wanted(asked, served), served.purpose)?;
    Ok(print(&copies, &copies.rows(asked)?, asked.json))
}
