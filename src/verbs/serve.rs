//! `plan` and `score --for prefill|decode`, and `fit --for inference`: how copies of a model
//! answer prompts.

use clap::ValueEnum;
use ir::{Diagnostic, Span};
use kernels::{Bytes, Seconds};
use planner::cluster::Cluster;
use planner::divisors::divisors;
use planner::estimate::Estimator;
use planner::estimate::serving::{Forward, Held, Replica, Serving};
use planner::estimate::workload::Item;
use planner::limits::Knob;
use serde_json::{Value, json};

use super::cost::refuse_cpus;
use super::plan::Asked;
use super::space::Subject;
use crate::failure::{Exit, Failure, usage};
use crate::output::{self, Table};

/// What devices are for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Purpose {
    /// Steps of training
    #[default]
    Training,
    /// Both passes of inference
    Inference,
    /// The pass of a prompt
    Prefill,
    /// Passes of one token more
    Decode,
}

/// Tokens of a prompt that are worked on at once, at most. Chosen: what servers usually cut prompts
/// into; longer pieces need more working memory and are no faster.
const PIECE_MAX: u32 = 8192;

/// One way to lie, and what it gives.
struct Row {
    copy: Replica,
    copies: u32,
    held: Held,
    longest: u64,
    /// Groups of sequences on the fullest copy, at most one on each stage, and sequences of each.
    groups: u32,
    batch: u32,
    /// Sequences of all copies.
    sequences: u64,
    prompt: Forward,
    /// One sequence alone.
    single: Forward,
    /// The whole group.
    many: Option<Forward>,
}

impl Row {
    fn ranks(&self) -> f64 {
        f64::from(self.copy.tp) * f64::from(self.copy.pp)
    }

    /// Tokens of prompts of `seq` tokens per second and device.
    fn prompt_rate(&self, seq: u32) -> f64 {
        f64::from(seq) / self.prompt.slowest_s / self.ranks()
    }

    /// Seconds from one token of a sequence to the next, all groups working.
    fn token_s(&self) -> Option<f64> {
        let many = self.many?;
        Some(many.latency_s.max(many.slowest_s * f64::from(self.groups)))
    }

    /// New tokens per second and device, of those without a sequence too.
    fn rate(&self) -> f64 {
        let devices = self.ranks() * f64::from(self.copies);
        self.token_s().map_or(0.0, |token_s| self.sequences as f64 / token_s / devices)
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

fn rows(asked: &Asked, subject: &Subject, estimator: &Estimator<'_>) -> Result<Vec<Row>, Failure> {
    let limits = asked.limited.all_limits()?;
    let serving = Serving { estimator, latent: subject.latent };
    refuse_without_prompts(subject, &serving)?;
    let allow = |knob: Knob, number: u32| limits.allow(knob, number as usize);
    let seq = subject.work.seq;
    let wanted = asked.gbs.map(|gbs| gbs as u64);
    let mut rows = Vec::new();
    for tp in divisors(subject.devices) {
        for pp in divisors(subject.devices / tp) {
            let copy = Replica { tp, pp };
            let copies = subject.devices / tp / pp;
            let may = allow(Knob::Tp, tp) && allow(Knob::Pp, pp) && allow(Knob::Dp, copies);
            if !may || !serving.allows(copy) {
                continue;
            }
            rows.push(row(&serving, copy, copies, seq, wanted));
        }
    }
    if rows.is_empty() {
        let headline = format!("no copy of {} lies so within the limits", subject.work.name);
        return Err(usage("--fix", headline).help("relax the limits").into());
    }
    Ok(rows)
}

/// What copies give that lie so, with `wanted` sequences of `seq` tokens over all of them, or as
/// many as fit.
fn row(serving: &Serving<'_>, copy: Replica, copies: u32, seq: u32, wanted: Option<u64>) -> Row {
    let most = serving.largest_batch(copy, seq.into());
    let all = u64::from(copies) * u64::from(copy.pp) * u64::from(most);
    let sequences = wanted.unwrap_or(all);
    // Copies without a sequence wait, and so do stages.
    let fullest = sequences.div_ceil(u64::from(copies));
    let groups = fullest.clamp(1, copy.pp.into()) as u32;
    let batch = fullest.div_ceil(groups.into());
    let batch = if batch <= u64::from(most) { batch as u32 } else { 0 };
    Row {
        copy,
        copies,
        held: serving.held(copy),
        longest: serving.longest_context(copy, seq.min(PIECE_MAX)),
        groups,
        batch,
        sequences,
        prompt: serving.forward(copy, 1, seq, 0),
        single: serving.forward(copy, 1, 1, seq.into()),
        many: (batch > 0).then(|| serving.forward(copy, batch, 1, seq.into())),
    }
}

/// Answers `score` about inference: what copies that the user wrote give; no where the work that
/// they are for does not fit. `sequences` are those of all copies.
pub fn score(
    subject: &Subject,
    (copy, copies): (Replica, u32),
    sequences: Option<u32>,
    purpose: Purpose,
    json: bool,
) -> Result<Exit, Failure> {
    let estimator = subject.estimator()?;
    let serving = Serving { estimator: &estimator, latent: subject.latent };
    refuse_without_prompts(subject, &serving)?;
    if !serving.allows(copy) {
        let Replica { tp, pp } = copy;
        let headline = format!("no copy of {} lies over tp={tp} pp={pp}", subject.work.name);
        let help = "use a tp that divides the heads, and a stage for each layer at most";
        return Err(usage("--config", headline).help(help).into());
    }
    let row = row(&serving, copy, copies, subject.work.seq, sequences.map(u64::from));
    let fits = |row: &Row| {
        let prompt = row.longest >= u64::from(subject.work.seq);
        match purpose {
            Purpose::Prefill => prompt,
            Purpose::Training | Purpose::Inference | Purpose::Decode => prompt && row.batch > 0,
        }
    };
    Ok(print(subject, &[row], fits, estimator.memory_bytes, json))
}

/// Prints all rows; yes where one fits.
fn print(
    subject: &Subject,
    rows: &[Row],
    fits: impl Fn(&Row) -> bool,
    have: f64,
    json: bool,
) -> Exit {
    let seq = subject.work.seq;
    let answer = rows.iter().any(&fits);
    if json {
        let all: Vec<Value> = rows.iter().map(|row| told(row, seq, fits(row))).collect();
        output::answer_json(&json!({
            "schema": "gantline.inference/1",
            "model": subject.work.name,
            "cluster": subject.cluster.describe(),
            "devices": subject.devices,
            "seq": seq,
            "dtype": subject.dtype.name(),
            "have_bytes": have,
            "fits": answer,
            "rows": all,
        }));
    } else {
        output::answer(&page(subject, rows, fits, have));
    }
    if answer { Exit::Success } else { Exit::Infeasible }
}

/// Answers `plan` and `fit` about inference; no where nothing fits.
pub fn serve(asked: &Asked, cluster: Cluster, purpose: Purpose) -> Result<Exit, Failure> {
    refuse_cpus(&cluster, "`generate` runs a model here")?;
    let lacking = asked.limited.lacking(&[Knob::Tp, Knob::Pp, Knob::Dp])?;
    if !lacking.is_empty() {
        let refuse = |knob: &Knob| {
            let headline = format!("copies for inference have no `{knob}`");
            usage("--fix", headline).help("leave it out: they are laid out by tp, pp and dp")
        };
        return Err(lacking.iter().map(refuse).collect::<Vec<_>>().into());
    }
    let subject = Subject::new(asked, cluster)?;
    let estimator = subject.estimator()?;
    let seq = subject.work.seq;
    let mut rows = rows(asked, &subject, &estimator)?;
    let fits = |row: &Row| row.longest >= u64::from(seq) && row.batch > 0;
    match purpose {
        Purpose::Prefill => rows.sort_by(|a, b| {
            let rate = |row: &Row| row.prompt_rate(seq);
            fits(b).cmp(&fits(a)).then(rate(b).total_cmp(&rate(a)))
        }),
        Purpose::Decode => {
            rows.sort_by(|a, b| fits(b).cmp(&fits(a)).then(b.rate().total_cmp(&a.rate())));
        }
        Purpose::Training | Purpose::Inference => {}
    }
    Ok(print(&subject, &rows, fits, estimator.memory_bytes, asked.json))
}

fn told(row: &Row, seq: u32, fits: bool) -> Value {
    json!({
        "tp": row.copy.tp,
        "pp": row.copy.pp,
        "copies": row.copies,
        "fits": fits,
        "weights_bytes": row.held.weights_bytes,
        "cache_bytes_per_token": row.held.cache_bytes_per_token,
        "longest_context": row.longest,
        "sequences": row.sequences,
        "prompt_s": row.prompt.latency_s,
        "prompt_tokens_per_s_per_device": row.prompt_rate(seq),
        "token_s_alone": row.single.latency_s,
        "token_s": row.token_s(),
        "tokens_per_s_per_device": row.rate(),
    })
}

fn page(subject: &Subject, rows: &[Row], fits: impl Fn(&Row) -> bool, have: f64) -> String {
    let columns = [
        "copy", "copies", "weights", "KV/token", "longest", "prompt", "tokens/s", "alone",
        "at once", "token", "tokens/s",
    ];
    let seq = subject.work.seq;
    let bytes = |bytes: f64| Bytes(bytes as u64).to_string();
    let mut table = Table::new(columns);
    for row in rows {
        let Replica { tp, pp } = row.copy;
        let mark = if fits(row) { "✓" } else { "✗" };
        table.row([
            format!("{mark} tp={tp} pp={pp}"),
            row.copies.to_string(),
            bytes(row.held.weights_bytes),
            bytes(row.held.cache_bytes_per_token),
            output::count(row.longest),
            Seconds(row.prompt.latency_s).to_string(),
            output::count(row.prompt_rate(seq) as u64),
            Seconds(row.single.latency_s).to_string(),
            output::count(row.sequences),
            row.token_s().map_or("-".to_owned(), |token_s| Seconds(token_s).to_string()),
            output::count(row.rate() as u64),
        ]);
    }
    let Subject { work, cluster, devices, dtype, .. } = subject;
    let mut text = format!("model    {}: ", work.name);
    text += &format!("{} parameters in {dtype}\n", output::count(work.parameters()));
    text += &format!("cluster  {}, {devices} devices\n", cluster.describe());
    text += &format!("context  {seq} tokens; {} of a device for a job\n\n", bytes(have));
    text += &table.text();
    text + "\nprompt: a whole context, alone; token: from one to the next of a sequence, alone and \
            with all sequences at once; tokens/s are of one device\n"
}
