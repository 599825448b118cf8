//! `--for inference|prefill|decode` of `plan`, `fit`, `score`, `explain`, `compare`, `cost` and
//! `size`: how copies of a model answer prompts.

pub mod compare;
pub mod cost;
pub mod cpus;
pub mod explain;
pub mod largest;
mod page;
pub mod size;
mod written;

use ir::{Diagnostic, Span};
use planner::cluster::Cluster;
use planner::configuration::Configuration;
use planner::divisors::divisors;
use planner::estimate::Estimator;
use planner::estimate::described::described;
use planner::estimate::profile::{self, Assumption, Profile};
use planner::estimate::serving::{
    Batch, Drafter, Drafting, Forward, Held, InFlight, Lengths, Load, PASS_TOKENS, Parts, Replica,
    Serving, StaticBatch,
};
use planner::estimate::workload::Item;
use planner::limits::Decision;

use self::page::print;
use super::gpus::{Subject, arithmetic, products_note};
use crate::argument::PathArg;
use crate::failure::{Exit, Failure, usage};
use crate::output;
use crate::verbs::flags::{Purpose, RequestFlags, Requests, Served, refuse_cpus};

/// What copies are asked to do at once.
#[derive(Clone, Debug, Default)]
struct Wanted {
    /// Sequences over all copies; none for the most that fit.
    sequences: Option<u64>,
    /// What the requests are.
    requests: Requests,
    /// Tokens of a request; none where passes alone are asked about.
    lengths: Option<Lengths>,
}

impl Wanted {
    fn new(served: &Served, sequences: Option<u64>) -> Result<Wanted, Failure> {
        let requests = served.requests.clone();
        Ok(Wanted { sequences, lengths: requests.lengths()?, requests })
    }

    /// The token budget of a pass.
    fn pass_tokens(&self) -> u32 {
        let said = self.requests.pass_tokens.and_then(|tokens| u32::try_from(tokens).ok());
        said.unwrap_or(PASS_TOKENS)
    }
}

/// How many sequences copies have at once, over all of them.
#[derive(Clone, Copy, Debug)]
enum AtOnce {
    /// As many as are stated.
    Stated(u64),
    /// As many as fit and are soon enough.
    Most,
    /// The same, but no more where twice as many give less than [`WORTH`] more tokens per second.
    Enough,
}

/// The share of tokens per second that twice as many sequences give more, where they are worth it.
/// Chosen: far below what predictions are off. Where t₁ + n t₂ seconds give n tokens, the last
/// number that is worth it takes 25 to 50 times as long as one sequence.
const WORTH: f64 = 0.02;

/// A batched prefill.
#[derive(Clone, Copy, Debug)]
struct Prompts {
    /// Prompts of a group, and groups that follow each other through the stages.
    each: u32,
    groups: u32,
    pass: Forward,
}

impl Prompts {
    /// Seconds of a copy per prompt.
    fn apart_s(&self) -> f64 {
        self.pass.turn_s(self.groups) / f64::from(self.each) / f64::from(self.groups)
    }
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
    /// Sequences of a copy that fit and are soon enough; 0 where none does.
    most: u64,
    /// The longest context, in tokens, of each of `longest_of` sequences over all copies: of the
    /// sequences asked for, or of one on each copy.
    longest: u64,
    longest_of: u64,
    /// Bytes of the fullest device with its sequences, or with one where none fits.
    need_bytes: f64,
    /// One prompt.
    prompt: Option<Forward>,
    /// As many prompts as the token budget and memory allow.
    prompts: Option<Prompts>,
    /// One sequence on each copy.
    single: Option<Forward>,
    /// All sequences.
    many: Option<Forward>,
    /// All sequences as a static batch.
    static_batch: Option<StaticBatch>,
    /// All sequences with in-flight batching.
    in_flight: Option<InFlight>,
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

    /// Tokens of prompts per second and device, where each prompt has `tokens` to work on.
    fn prompt_rate(&self, tokens: u32) -> Option<f64> {
        Some(f64::from(tokens) / self.prompts?.apart_s() / self.ranks())
    }

    /// Seconds from one token of a sequence to the next, all groups working; beside prompts, where
    /// requests have lengths.
    fn token_s(&self) -> Option<f64> {
        let alone_s = || Some(self.many?.turn_s(self.load.groups));
        self.in_flight.map(|requests| requests.token_s).or_else(alone_s)
    }

    /// New tokens per second and device, of those without a sequence too.
    fn rate(&self) -> Option<f64> {
        Some(self.sequences as f64 / self.token_s()? / self.devices())
    }

    /// What rows are sorted by: tokens per second and device.
    fn figure(&self, purpose: Purpose, tokens: u32) -> f64 {
        let figure = match purpose {
            Purpose::Prefill => self.prompt_rate(tokens),
            Purpose::Training | Purpose::Inference | Purpose::Decode => self.rate(),
        };
        figure.unwrap_or(0.0)
    }
}

/// A model on devices, with its draft model and its engine.
#[derive(Clone, Debug)]
pub struct Models {
    subject: Subject,
    draft: Option<Box<Subject>>,
    engine: Profile,
}

/// What a model and its draft model are priced with.
struct Estimators<'a> {
    model: Estimator<'a>,
    draft: Option<Estimator<'a>>,
}

impl Models {
    /// # Errors
    /// If the draft model cannot be read, or has a vocabulary of another size.
    fn new(subject: Subject, requests: &Requests) -> Result<Models, Failure> {
        let engine = requests.engine.unwrap_or(profile::GANTLINE).on(&subject.cluster);
        let engine = engine.stating(subject.stated);
        let Some(path) = &requests.draft else {
            return Ok(Models { subject, draft: None, engine });
        };
        let draft = described(path.path(), Some(subject.seq))?;
        let (work, latent) = (draft.work, draft.latent);
        let draft = Subject { work, latent, ..subject.clone() };
        let [ours, theirs] = [&subject, &draft].map(vocabulary);
        if ours != theirs {
            let headline = format!(
                "the draft model `{}` has a vocabulary of {theirs}, and `{}` one of {ours}",
                draft.work.name, subject.work.name
            );
            let help = "name a model of the same tokenizer: its tokens are verified one by one";
            return Err(usage("--draft", headline).help(help).into());
        }
        Ok(Models { subject, draft: Some(Box::new(draft)), engine })
    }

    /// The same on other devices.
    fn on(&self, devices: u32) -> Models {
        let on = |subject: &Subject| Subject { devices, ..subject.clone() };
        Models {
            subject: on(&self.subject),
            draft: self.draft.as_deref().map(|draft| Box::new(on(draft))),
            engine: self.engine,
        }
    }

    fn estimators(&self) -> Result<Estimators<'_>, Failure> {
        let draft = match &self.draft {
            Some(draft) => Some(draft.estimator_as(self.engine)?),
            None => None,
        };
        Ok(Estimators { model: self.subject.estimator_as(self.engine)?, draft })
    }
}

/// The size of a model's vocabulary.
fn vocabulary(subject: &Subject) -> u32 {
    let tables = subject.work.first.iter().filter_map(|item| {
        if let Item::Embedding { vocab, .. } = item { Some(*vocab) } else { None }
    });
    tables.max().unwrap_or(0)
}

/// The request with the context that its requests need.
fn with_context(asked: &RequestFlags, served: &Served) -> Result<RequestFlags, Failure> {
    let seq = served.requests.context()?.or(asked.seq);
    Ok(RequestFlags { seq, ..asked.clone() })
}

/// Copies of a model on a cluster, and what they are asked to do.
struct Copies<'a> {
    subject: &'a Subject,
    engine: Profile,
    serving: Serving<'a>,
    wanted: Wanted,
    purpose: Purpose,
}

impl<'a> Copies<'a> {
    fn new(
        models: &'a Models,
        estimators: &'a Estimators<'a>,
        wanted: Wanted,
        purpose: Purpose,
    ) -> Result<Copies<'a>, Failure> {
        let subject = &models.subject;
        let drafter = models.draft.as_deref().zip(estimators.draft.as_ref());
        let model = drafter.map(|(draft, estimator)| Drafter { estimator, latent: draft.latent });
        let speculation = wanted.requests.speculation();
        let serving = Serving {
            storage: wanted.requests.storage(),
            drafting: speculation.map(|speculation| Drafting { speculation, model }),
            ..Serving::new(&estimators.model, subject.latent)
        };
        refuse_without_prompts(subject, &serving)?;
        let engine = models.engine.in_arithmetic(arithmetic(subject.dtype));
        let copies = Copies { subject, engine, serving, wanted, purpose };
        copies.refuse_shared()?;
        Ok(copies)
    }

    /// Refuses a shared prefix of prompts that an encoder sees as a whole.
    fn refuse_shared(&self) -> Result<(), Failure> {
        if self.lengths().shared == 0 || self.serving.can_chunk_prompts() {
            return Ok(());
        }
        let name = &self.subject.work.name;
        let headline = format!("`{name}` encodes a prompt as a whole: it has no prefix to share");
        Err(usage("--shared-prefix", headline).help("leave it out").into())
    }

    fn seq(&self) -> u32 {
        self.subject.work.seq
    }

    /// What the price assumes, fact by fact.
    fn facts(&self) -> Vec<Assumption> {
        let requests = &self.wanted.requests;
        let mut facts = self.serving.assumptions();
        for fact in &mut facts {
            fact.stated |= fact.name == "kv-cache" && requests.kv_dtype.is_some();
        }
        facts.push(Assumption {
            name: "pass-tokens",
            value: output::count(self.wanted.pass_tokens().into()),
            stated: requests.pass_tokens.is_some(),
        });
        facts
    }

    /// Tokens of a request: without lengths, a prompt of the whole context.
    fn lengths(&self) -> Lengths {
        let whole = Lengths { prompt: self.seq(), output: 0, shared: 0 };
        self.wanted.lengths.unwrap_or(whole)
    }

    /// Cached tokens that a new token sees at the mean.
    fn cached(&self) -> u64 {
        self.lengths().middle()
    }

    /// Tokens of a sequence, and those that all share.
    fn context(&self) -> [u64; 2] {
        let lengths = self.lengths();
        [lengths.context(), lengths.shared.into()]
    }

    fn have_bytes(&self) -> f64 {
        self.serving.estimator.memory_bytes
    }

    /// Tokens of a piece of a prompt.
    fn piece(&self) -> u32 {
        self.lengths().own_prompt().min(self.wanted.pass_tokens())
    }

    /// What copies give that lie so, with the sequences that are wanted over all of them, or as
    /// many as are enough.
    fn row(&self, copy: Replica, copies: u32) -> Row {
        self.row_of(copy, copies, self.wanted.sequences.map_or(AtOnce::Enough, AtOnce::Stated))
    }

    /// The row of copies with a number of sequences.
    fn row_of(&self, copy: Replica, copies: u32, at_once: AtOnce) -> Row {
        let Copies { serving, wanted, .. } = self;
        let (lengths, piece, budget) = (self.lengths(), self.piece(), wanted.pass_tokens());
        let most = serving.most_sequences(copy, self.context(), piece);
        let soon = self.in_time(copy, most);
        // Copies without a sequence wait, and so do stages.
        let (sequences, fullest) = match at_once {
            AtOnce::Stated(all) => (Some(all), all.div_ceil(copies.into())),
            AtOnce::Most => (None, soon),
            AtOnce::Enough => (None, self.enough(copy, soon)),
        };
        let is_prompt = self.purpose == Purpose::Prefill;
        let prompt = (most > 0).then(|| serving.prompt(copy, 1, lengths, budget));
        let late = |limit_s: f64| prompt.is_some_and(|prompt| prompt.latency_s > limit_s);
        let is_late = wanted.requests.first_token_time.is_some_and(late);
        let prompt = prompt.filter(|_| !is_late);
        let is_soon = sequences.is_none() || self.in_time(copy, fullest) == fullest;
        let fits = (1..=most).contains(&fullest) && is_soon && !is_late;
        let in_flight = match self.batches_in_flight() && fits {
            true => serving.in_flight(copy, fullest, lengths, budget),
            false => None,
        };
        // A budget of tokens may hold requests back that would fit.
        let working = in_flight.map_or(fullest, |found| found.sequences);
        let load = Load::of(working, copy.pp);
        let each = sequences.map_or(1, |_| fullest);
        let asked_all = sequences.filter(|_| working == fullest);
        Row {
            copy,
            copies,
            held: serving.held(copy),
            load,
            sequences: asked_all.unwrap_or(u64::from(copies) * working),
            most: if is_late { 0 } else { soon },
            longest: serving.longest_context(copy, each, piece),
            longest_of: sequences.unwrap_or(copies.into()),
            need_bytes: serving.bytes(copy, working.max(1), self.context(), piece),
            prompt,
            prompts: prompt.map(|_| self.prompts(copy, most)),
            single: fits.then(|| serving.token(copy, 1, self.cached())),
            many: fits.then(|| serving.token(copy, load.batch, self.cached())),
            static_batch: (fits && lengths.output > 0 && !is_prompt)
                .then(|| serving.static_batch(copy, working, lengths, budget)),
            in_flight,
        }
    }

    /// Whether answers are about in-flight batching.
    fn batches_in_flight(&self) -> bool {
        self.purpose == Purpose::Inference && self.lengths().output > 0
    }

    /// The sequences of a copy, up to `most`, of which twice as many give less than [`WORTH`] more
    /// tokens per second, as `most` is halved.
    fn enough(&self, copy: Replica, most: u64) -> u64 {
        let Copies { serving, .. } = self;
        if most <= 1 || self.purpose == Purpose::Prefill {
            return most;
        }
        let rate = |sequences: u64| match self.batches_in_flight() {
            true => {
                let budget = self.wanted.pass_tokens();
                let found = serving.in_flight(copy, sequences, self.lengths(), budget);
                found.map_or(0.0, |found| found.tokens_per_s)
            }
            false => {
                let Load { groups, batch, .. } = Load::of(sequences, copy.pp);
                sequences as f64 / serving.token(copy, batch, self.cached()).turn_s(groups)
            }
        };
        let (mut sequences, mut given) = (most, rate(most));
        while sequences > 1 {
            let half = rate(sequences / 2);
            if given > half * (1.0 + WORTH) {
                break;
            }
            (sequences, given) = (sequences / 2, half);
        }
        sequences
    }

    /// The most sequences of a copy, up to `most`, that have their tokens soon enough.
    fn in_time(&self, copy: Replica, most: u64) -> u64 {
        let Some(limit_s) = self.wanted.requests.token_time else { return most };
        match self.batches_in_flight() {
            true => self.serving.most_in_flight_within(copy, most, self.lengths(), limit_s),
            false => self.serving.most_within(copy, self.cached(), most, limit_s),
        }
    }

    /// The batched prefill of a copy: as many prompts as the token budget and memory allow.
    fn prompts(&self, copy: Replica, most: u64) -> Prompts {
        let (lengths, budget) = (self.lengths(), self.wanted.pass_tokens());
        let groups = Load::of(most, copy.pp).groups;
        let room = u32::try_from(most / u64::from(groups)).unwrap_or(u32::MAX);
        let each = (budget / lengths.own_prompt()).clamp(1, room.max(1));
        Prompts { each, groups, pass: self.serving.prompt(copy, each, lengths, budget) }
    }

    /// All ways to lie on all devices that the limits allow: those that fit first, then those with
    /// the most tokens per second and device.
    fn rows(&self, asked: &RequestFlags) -> Result<Vec<Row>, Failure> {
        let limits = asked.all_limits()?;
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
        let (purpose, tokens) = (self.purpose, self.lengths().own_prompt());
        rows.sort_by(|a, b| {
            let figures = [a, b].map(|row| row.figure(purpose, tokens));
            let fits = [a, b].map(|row| row.fits(purpose));
            let needs = [a, b].map(|row| row.need_bytes);
            let sorted = fits[1].cmp(&fits[0]).then(figures[1].total_cmp(&figures[0]));
            // Of those that give nothing, the smallest is the nearest.
            if fits == [false; 2] { needs[0].total_cmp(&needs[1]) } else { sorted }
        });
        Ok(rows)
    }

    /// The parts of the passes of one prompt, and of those of a token of all sequences, with the
    /// prompts beside them.
    fn parts(&self, row: &Row) -> [Parts; 2] {
        let Copies { serving, .. } = self;
        let sequences = row.load.batch.max(1);
        let token = match row.in_flight {
            Some(found) => serving.mixed(row.copy, found.sequences, self.lengths()).1,
            None => Batch::of(sequences, 1, self.cached()),
        };
        [
            serving.prompt_parts(row.copy, self.lengths(), self.wanted.pass_tokens()),
            serving.token_parts(row.copy, &token),
        ]
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
        (c.etp != plain.etp, "slices of experts by `etp`"),
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
    subject: Subject,
    c: &Configuration,
    sequences: Option<u32>,
    served: &Served,
    json: bool,
) -> Result<Exit, Failure> {
    let models = Models::new(subject, &served.requests)?;
    let estimators = models.estimators()?;
    let wanted = Wanted::new(served, sequences.map(u64::from))?;
    let copies = Copies::new(&models, &estimators, wanted, served.purpose)?;
    let (copy, count) = copies.laid_out("--config", c, c.dp)?;
    Ok(print(&copies, &[copies.row(copy, count)], json))
}

/// The cluster and the limits that inference is answered for; anything else is refused.
fn refuse_others(asked: &RequestFlags, cluster: &Cluster) -> Result<(), Failure> {
    asked.refuse_tool("trains, and `--for` asks about inference")?;
    asked.assumed.stated_of_inference()?;
    if asked.lora.is_some() {
        let headline = "inference is priced with adapters merged into the model".to_owned();
        return Err(usage("--lora", headline).help("leave it out").into());
    }
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
fn wanted(asked: &RequestFlags, served: &Served) -> Result<Wanted, Failure> {
    Wanted::new(served, asked.gbs.map(|gbs| gbs as u64))
}

/// The models of a request on a cluster.
fn models(
    asked: &RequestFlags,
    cluster: Cluster,
    served: &Served,
    noted: Noted,
) -> Result<Models, Failure> {
    refuse_others(asked, &cluster)?;
    let asked = with_context(asked, served)?;
    let subject = match noted {
        Noted::Now => Subject::with_warnings(&asked, cluster)?,
        Noted::Before => Subject::quiet(&asked, cluster)?,
    };
    let models = Models::new(subject, &served.requests)?;
    let note = products_note(&models.engine, &models.subject.cluster);
    if let (Noted::Now, Some(note)) = (noted, note) {
        output::note(&note);
    }
    Ok(models)
}

/// When the model's warnings are printed.
#[derive(Clone, Copy)]
enum Noted {
    Now,
    Before,
}

/// What is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// All ways to lie on the devices.
    Ways,
    /// The same, and how the plan is written.
    WaysToWrite,
    /// The plan's text.
    Plan,
}

/// Answers `plan` and `fit` about inference; the plan is written where a file is named. No where
/// nothing fits.
pub fn serve(
    asked: &RequestFlags,
    cluster: Cluster,
    served: &Served,
    told: Told,
    file: Option<&PathArg>,
) -> Result<Exit, Failure> {
    if cpus::are_meant(&cluster) {
        return cpus::answer(asked, served, told, file);
    }
    let models = models(asked, cluster, served, Noted::Now)?;
    let estimators = models.estimators()?;
    let copies = Copies::new(&models, &estimators, wanted(asked, served)?, served.purpose)?;
    let rows = copies.rows(asked)?;
    let best = rows.first().filter(|row| row.fits(served.purpose));
    let is_wanted = told == Told::Plan || file.is_some();
    let plan = best.filter(|_| is_wanted).map(|row| written::plan(&copies, row, asked));
    let plan = plan.transpose()?;
    if let (Some(path), Some(plan)) = (file, &plan) {
        let path = path.path();
        std::fs::write(path, plan.to_string()).map_err(runtime::Error::io("write", path))?;
        output::note(&format!("wrote {}", path.display()));
    }
    match &plan {
        Some(plan) if told == Told::Plan && !asked.json => {
            output::answer(&plan.to_string());
            Ok(Exit::Success)
        }
        _ => Ok(print(&copies, &rows, asked.json)),
    }
}
