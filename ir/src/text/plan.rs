//! The text form of plans: one decision per line, canonical, read back to the same plan.
//!
//! ```text
//! plan 2 gpt2 on [pp=2, dp=2, cp=2, tp=4] of h100
//!   target sm_90a
//!   micro-batch size=4 count=8
//!   schedule interleaved stages 4 7 10 14
//!   data seq=128 dtype=bf16
//!   inference buckets 1 8 16 32
//!   precision parameters=bf16 compute=bf16 accumulate=f32 master=f32 gradients=f32 …
//!   optimizer adamw beta1=0.9 beta2=0.95 eps=1e-8 decay=0.1 decay_biases=0.0
//!   clip 1.0
//!   lora rank=8,alpha=16,targets=q,v
//!   context all-gather
//!   zero 2 over 4
//!   offload activations=host optimizer=disk
//!   layer block keep full
//!     keep none 0..2 6..8
//!     %w_fc: [*, dim1 @ tp]
//!   predict step_time_s 0.25 fitted
//! ```
//! The line `inference` marks a plan of inference and lists its prefill buckets. The line `target`
//! is left out where no kernels are written for the cluster's devices, and older texts lack it. The
//! line `precision` has all [`ROLES`] in order, `products` only where it is not `own`, and is left
//! out where `dtype` is that of all. `stages` are, for each chunk of a stage, one past its last
//! call in the entry. `keep` below a layer says what some of its calls keep instead, by ranges of
//! their numbers, whose ends are one past the last. `context all-gather` is how context-parallel
//! ranks attend to each other's tokens, and is there where the mesh has several. `experts N` are
//! ranks that share experts, `experts N etp=1` those of `tp` first; that line, `zero` and `offload`
//! are left out where there is nothing of the kind, as are values that are replicated, and dims
//! after the last one that is split. An unusual nesting of axes follows the mesh: `order
//! dp.tp.cp.pp`, innermost first. Comments start with `#`. The names of model and cluster stand in
//! quotes where they would be read otherwise. Texts of version 1 have no number after `plan`, and
//! are read.
//!
//! `E1021` is a line that is not understood, or a number beyond what a plan may have, `E1022` a
//! decision that is missing or taken twice, `E1023` a version that is not known.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use super::program::unescape;
use crate::lora::Lora;
use crate::plan::{
    ContextForm, ExpertParallel, FunctionPlan, Keep, MICROBATCHES_MAX, Mesh, Offload, Optimizer,
    Place, Plan, Prediction, Purpose, RANKS_MAX, Schedule, TOKENS_MAX, USUAL_ORDER, Zero,
    parse_order,
};
use crate::precision::{Precision, ROLES};
use crate::sharding::{Axis, Sharding};
use crate::target::Target;
use crate::{DType, Diagnostic, Span};

/// The version of texts that are written.
const VERSION: u32 = 2;
/// The word for 1F1B with several chunks a stage.
const INTERLEAVED: &str = "interleaved";
/// The calls of a function that a text may name. Chosen: more than any model has layers.
const CALLS_MAX: usize = 1 << 16;
/// The most diagnostics that one reading reports.
const DIAGNOSTICS_MAX: usize = 20;

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [model, cluster] = [&self.model, &self.cluster].map(|name| phrase(name));
        writeln!(f, "plan {VERSION} {model} on {} of {cluster}", self.mesh)?;
        if let Some(target) = self.target {
            writeln!(f, "  target {target}")?;
        }
        self.fmt_decisions(f)?;
        for (name, Prediction { value, origin }) in &self.predictions {
            writeln!(f, "  predict {name} {value:?} {origin}")?;
        }
        Ok(())
    }
}

impl Plan {
    /// The text of the decisions alone, without model, cluster, target and predictions.
    pub fn decisions(&self) -> String {
        struct Decisions<'a>(&'a Plan);
        impl fmt::Display for Decisions<'_> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                writeln!(f, "{}", self.0.mesh)?;
                self.0.fmt_decisions(f)
            }
        }
        Decisions(self).to_string()
    }

    fn fmt_decisions(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (size, count) = (self.microbatch_size, self.microbatch_count);
        writeln!(f, "  micro-batch size={size} count={count}")?;
        let ends: String = self.stage_ends.iter().map(|end| format!(" {end}")).collect();
        let is_1f1b = self.schedule == Schedule::OneForwardOneBackward;
        let is_interleaved = is_1f1b && self.chunks_per_stage() > 1;
        let schedule = if is_interleaved { INTERLEAVED } else { self.schedule.name() };
        writeln!(f, "  schedule {schedule} stages{ends}")?;
        writeln!(f, "  data seq={} dtype={}", self.seq, self.dtype())?;
        if let Purpose::Inference { buckets } = &self.purpose {
            let buckets: String = buckets.iter().map(|bucket| format!(" {bucket}")).collect();
            writeln!(f, "  inference buckets{buckets}")?;
        }
        if !self.precision.is_uniform() {
            writeln!(f, "  precision {}", self.precision)?;
        }
        writeln!(f, "  optimizer {}", optimizer_text(self.optimizer))?;
        if let Some(clip) = self.clip {
            writeln!(f, "  clip {clip:?}")?;
        }
        if let Some(lora) = &self.lora {
            writeln!(f, "  lora {lora}")?;
        }
        if self.mesh.cp > 1 {
            writeln!(f, "  context {}", self.context.name())?;
        }
        match self.experts {
            ExpertParallel { ep: 1, .. } => {}
            ExpertParallel { ep, takes_tp: false } => writeln!(f, "  experts {ep}")?,
            ExpertParallel { ep, takes_tp: true } => writeln!(f, "  experts {ep} etp=1")?,
        }
        match self.zero {
            Zero { stage: 0, .. } => {}
            Zero { stage, shard: 0 } => writeln!(f, "  zero {stage}")?,
            Zero { stage, shard } => writeln!(f, "  zero {stage} over {shard}")?,
        }
        let moved = self.offload.places().into_iter().filter(|(_, place)| *place != Place::Device);
        let moved: String = moved.map(|(name, p)| format!(" {name}={}", p.name())).collect();
        if !moved.is_empty() {
            writeln!(f, "  offload{moved}")?;
        }
        for (name, function) in &self.functions {
            writeln!(f, "  layer {name} keep {}", function.keep.name())?;
            for keep in Keep::ALL {
                let calls = function.exceptions.iter().filter(|(_, other)| **other == keep);
                let calls: Vec<usize> = calls.map(|(call, _)| *call).collect();
                if !calls.is_empty() {
                    writeln!(f, "    keep {}{}", keep.name(), ranges_text(&calls))?;
                }
            }
            let is_listed = |sharding: &Sharding| sharding.layouts().next().is_some();
            for (value, sharding) in function.shardings.iter().filter(|(_, s)| is_listed(s)) {
                let cut = sharding.layouts().filter_map(|(_, layout)| layout.cut_dim()).max();
                let ndim = cut.map_or(0, |dim| dim + 1);
                writeln!(f, "    %{value}: {}", sharding.display(ndim))?;
            }
        }
        Ok(())
    }
}

/// Ascending numbers as ranges, each with a space before it.
fn ranges_text(numbers: &[usize]) -> String {
    let runs = numbers.chunk_by(|a, b| a + 1 == *b);
    runs.map(|run| format!(" {}..{}", run[0], run[0] + run.len())).collect()
}

/// A name of any characters, in quotes where it needs them.
fn phrase(name: &str) -> String {
    let mut words = name.split(' ');
    let is_read_otherwise = |c: char| c.is_control() || "\"#\\".contains(c);
    let is_plain = name.trim() == name
        && !name.contains(is_read_otherwise)
        && words.clone().next().is_none_or(|first| first.parse::<u32>().is_err())
        && words.all(|word| !["", "on", "of"].contains(&word));
    if is_plain { name.to_owned() } else { format!("\"{}\"", name.escape_default()) }
}

/// Cuts a name, as [`phrase`] writes it, and the word after it off a text.
fn cut_phrase<'t>(text: &'t str, word: &str) -> Option<(String, &'t str)> {
    let Some(quoted) = text.strip_prefix('"') else {
        let (name, rest) = if word.is_empty() { (text, "") } else { text.split_once(word)? };
        return Some((name.to_owned(), rest));
    };
    let end = quote_end(quoted)?;
    Some((unescape(&quoted[..end])?, quoted[end + 1..].strip_prefix(word)?))
}

/// Where the quote ends that a text is the inside of.
fn quote_end(text: &str) -> Option<usize> {
    let mut is_escaped = false;
    text.find(|c| {
        let ends = c == '"' && !is_escaped;
        is_escaped = c == '\\' && !is_escaped;
        ends
    })
}

/// The line without its comment, which starts with a `#` that is not quoted.
fn without_comment(line: &str) -> &str {
    let mut start = 0;
    while let Some(at) = line[start..].find(['#', '"']).map(|at| start + at) {
        start = match line[at..].strip_prefix('"') {
            Some(inside) => at + 1 + quote_end(inside).map_or(inside.len(), |end| end + 1),
            None if at == 0 || line[..at].ends_with(' ') => return &line[..at],
            None => at + 1,
        };
    }
    line
}

fn optimizer_text(optimizer: Optimizer) -> String {
    match optimizer {
        Optimizer::None => "none".to_owned(),
        Optimizer::Sgd { decay, decay_biases } => {
            format!("sgd decay={decay:?} decay_biases={decay_biases:?}")
        }
        Optimizer::AdamW { beta1, beta2, eps, decay, decay_biases } => format!(
            "adamw beta1={beta1:?} beta2={beta2:?} eps={eps:?} decay={decay:?} \
             decay_biases={decay_biases:?}"
        ),
    }
}

/// Reads the text of a plan. `source` names the text in diagnostics.
///
/// # Errors
/// `E1021` and `E1022`, at most twenty, in text order.
pub fn parse_plan(source: &str, text: &str) -> Result<Plan, Vec<Diagnostic>> {
    let mut reader = Reader { source, diagnostics: Vec::new(), draft: Draft::default() };
    let mut start = 0;
    for line in text.split_inclusive('\n') {
        let content = without_comment(line);
        let indent = content.len() - content.trim_start().len();
        let content = content.trim();
        if !content.is_empty() {
            let at = start + indent;
            reader.line(content, at..at + content.len());
        }
        start += line.len();
    }
    reader.finish()
}

#[derive(Default)]
struct Draft {
    head: Option<(String, Mesh, String)>,
    target: Option<Target>,
    microbatch: Option<(usize, usize)>,
    schedule: Option<(Schedule, Vec<usize>)>,
    data: Option<(usize, DType)>,
    purpose: Option<Purpose>,
    precision: Option<Precision>,
    optimizer: Option<Optimizer>,
    clip: Option<f64>,
    lora: Option<Lora>,
    context: Option<ContextForm>,
    experts: Option<ExpertParallel>,
    zero: Option<Zero>,
    offload: Option<Offload>,
    functions: BTreeMap<String, FunctionPlan>,
    predictions: BTreeMap<String, Prediction>,
    /// The layer whose values follow.
    layer: Option<String>,
}

struct Reader<'a> {
    source: &'a str,
    diagnostics: Vec<Diagnostic>,
    draft: Draft,
}

impl Reader<'_> {
    fn report(&mut self, code: &'static str, bytes: Range<usize>, headline: String, help: &str) {
        if self.diagnostics.len() < DIAGNOSTICS_MAX {
            let span = Span { source: self.source.to_owned(), bytes };
            self.diagnostics.push(Diagnostic::error(code, span, headline).help(help));
        }
    }

    fn line(&mut self, line: &str, bytes: Range<usize>) {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        let rest = rest.trim();
        let form = match word {
            "plan" => "plan 2 NAME on [pp=1, dp=1, cp=1, tp=1] of CLUSTER",
            "target" => "target sm_90a",
            "micro-batch" => "micro-batch size=4 count=8",
            "schedule" => "schedule 1f1b stages 7 14",
            "context" => "context all-gather",
            "experts" => "experts 8",
            "zero" => "zero 1 over 8",
            "offload" => "offload optimizer=host activations=disk",
            "keep" => "keep none 0..3 6..8",
            "data" => "data seq=128 dtype=f32",
            "inference" => "inference buckets 1 8 16",
            "precision" => {
                "precision parameters=bf16 compute=bf16 accumulate=f32 master=f32 gradients=f32 \
                 reduce=f32 states=f32 saved=bf16 logits=bf16"
            }
            "optimizer" => {
                "optimizer adamw beta1=0.9 beta2=0.95 eps=1e-8 decay=0.1 decay_biases=0.0"
            }
            "clip" => "clip 1.0",
            "lora" => "lora rank=8,alpha=16,targets=q,v",
            "predict" => "predict step_time_s 0.25 fitted",
            "layer" => "layer NAME keep full",
            _ if word.starts_with('%') => "%NAME: [dim0 @ dp, *, dim2 @ tp] partial sum tp",
            _ => {
                let headline = format!("a plan has no `{word}`");
                let help = "the lines of a plan start with plan, target, micro-batch, schedule, \
                            data, inference, precision, optimizer, clip, lora, context, experts, \
                            zero, offload, layer, keep, % or predict";
                return self.report("E1021", bytes, headline, help);
            }
        };
        if let Some(version) = version(word, rest).filter(|version| *version != VERSION) {
            let headline = format!("this is a plan of version {version}");
            let help = format!("this release reads versions 1 and {VERSION}: plan again with it");
            return self.report("E1023", bytes, headline, &help);
        }
        match self.draft.take(word, rest, line) {
            Some(true) => {}
            Some(false) => {
                let headline = format!("`{word}` is decided twice");
                self.report("E1022", bytes, headline, "leave one of the lines out");
            }
            None => {
                let headline = format!("cannot read `{line}`");
                self.report("E1021", bytes, headline, &format!("write it as `{form}`"));
            }
        }
    }

    fn finish(mut self) -> Result<Plan, Vec<Diagnostic>> {
        let draft = std::mem::take(&mut self.draft);
        let there = [
            ("plan", draft.head.is_some()),
            ("micro-batch", draft.microbatch.is_some()),
            ("schedule", draft.schedule.is_some()),
            ("data", draft.data.is_some()),
            ("optimizer", draft.optimizer.is_some()),
        ];
        // A line that cannot be read is reported already.
        let is_read = self.diagnostics.is_empty();
        for (word, _) in there.iter().filter(|(_, there)| is_read && !there) {
            let headline = format!("the plan has no `{word}`");
            self.report("E1022", 0..0, headline, &format!("add a line `{word} …`"));
        }
        let parts = (draft.head, draft.microbatch, draft.schedule, draft.data, draft.optimizer);
        let (Some(head), Some(microbatch), Some(schedule), Some(data), Some(optimizer)) = parts
        else {
            return Err(self.diagnostics);
        };
        let precision = draft.precision.unwrap_or(Precision::uniform(data.1));
        if precision.compute != data.1 {
            let headline = format!("dtype={} and compute={}", data.1, precision.compute);
            self.report("E1022", 0..0, headline, "activations have one type: write it twice");
        }
        let tokens = microbatch.0.checked_mul(data.0);
        for (what, number, most) in [
            ("ranks", Some(head.1.ranks()), RANKS_MAX),
            ("micro-batches", Some(microbatch.1), MICROBATCHES_MAX),
            ("tokens in a micro-batch", tokens, TOKENS_MAX),
        ] {
            if number.is_none_or(|number| number > most) {
                let headline = format!("the plan has more than {most} {what}");
                self.report("E1021", 0..0, headline, "plan for less");
            }
        }
        let cp = head.1.cp;
        if (cp > 1) != draft.context.is_some() {
            let headline = match cp {
                1 => "a plan with one rank along `cp` has no `context`".to_owned(),
                _ => format!("cp={cp}, and no line says how its ranks attend to each other"),
            };
            self.report("E1022", 0..0, headline, "`context all-gather` belongs to cp=2 or more");
        }
        if !self.diagnostics.is_empty() {
            return Err(self.diagnostics);
        }
        Ok(Plan {
            context: draft.context.unwrap_or_default(),
            experts: draft.experts.unwrap_or(ExpertParallel::NONE),
            zero: draft.zero.unwrap_or_default(),
            offload: draft.offload.unwrap_or_default(),
            model: head.0,
            mesh: head.1,
            cluster: head.2,
            target: draft.target,
            microbatch_size: microbatch.0,
            microbatch_count: microbatch.1,
            seq: data.0,
            purpose: draft.purpose.unwrap_or_default(),
            precision,
            schedule: schedule.0,
            stage_ends: schedule.1,
            optimizer,
            clip: draft.clip,
            lora: draft.lora,
            functions: draft.functions.into_iter().map(canonical).collect(),
            predictions: draft.predictions,
        })
    }
}

impl Draft {
    /// Takes a line: none when it cannot be read, false when it was there before.
    fn take(&mut self, word: &str, rest: &str, line: &str) -> Option<bool> {
        match word {
            "plan" => self.take_head(word, rest),
            "micro-batch" => {
                let [size, count] = read_numbers(rest, ["size", "count"])?;
                (size > 0 && count > 0).then_some(())?;
                set(&mut self.microbatch, (size, count))
            }
            "schedule" => set(&mut self.schedule, read_schedule(rest)?),
            "data" => {
                let (seq, dtype) = rest.split_once(' ')?;
                let seq = seq.strip_prefix("seq=")?.parse().ok()?;
                let dtype = dtype.trim().strip_prefix("dtype=")?.parse().ok()?;
                set(&mut self.data, (seq, dtype))
            }
            "inference" => set(&mut self.purpose, read_inference(rest)?),
            "precision" => set(&mut self.precision, read_precision(rest)?),
            "optimizer" => set(&mut self.optimizer, read_optimizer(rest)?),
            "clip" => set(&mut self.clip, read_finite(rest).filter(|clip| *clip > 0.0)?),
            "lora" => set(&mut self.lora, rest.parse().ok()?),
            "target" => set(&mut self.target, rest.parse().ok()?),
            "context" => {
                let form = ContextForm::ALL.into_iter().find(|form| form.name() == rest)?;
                set(&mut self.context, form)
            }
            "experts" => {
                let (count, takes_tp) = match rest.split_once(' ') {
                    Some((count, etp)) => (count, (etp.trim() == "etp=1").then_some(true)?),
                    None => (rest, false),
                };
                let ep = count.parse().ok().filter(|count| *count > 0)?;
                set(&mut self.experts, ExpertParallel { ep, takes_tp })
            }
            "zero" => set(&mut self.zero, read_zero(rest)?),
            "offload" => set(&mut self.offload, read_offload(rest)?),
            "keep" => self.take_exceptions(rest),
            "predict" => {
                let mut words = rest.split_whitespace();
                let (name, value, origin) = (words.next()?, words.next()?, words.next()?);
                let value = read_finite(value)?;
                let origin = words.next().is_none().then(|| origin.to_owned())?;
                let prediction = Prediction { value, origin };
                Some(self.predictions.insert(name.to_owned(), prediction).is_none())
            }
            "layer" => {
                let (name, keep) = rest.split_once(" keep ")?;
                self.layer = Some(name.to_owned());
                let plan = FunctionPlan::new(read_keep(keep.trim())?, BTreeMap::new());
                Some(self.functions.insert(name.to_owned(), plan).is_none())
            }
            _ => {
                let (value, sharding) = line.strip_prefix('%')?.split_once(": ")?;
                let sharding = Sharding::parse(sharding)?;
                let one_each =
                    Axis::ALL.iter().all(|a| sharding.layouts().filter(|l| l.0 == *a).count() < 2);
                let layer = self.functions.get_mut(self.layer.as_ref().filter(|_| one_each)?)?;
                Some(layer.shardings.insert(value.to_owned(), sharding).is_none())
            }
        }
    }

    /// Takes the first line: model, mesh and cluster.
    fn take_head(&mut self, word: &str, rest: &str) -> Option<bool> {
        let rest = match version(word, rest) {
            Some(_) => rest.split_once(' ')?.1,
            None => rest,
        };
        let (model, rest) = cut_phrase(rest, " on ")?;
        let (mesh, cluster) = rest.split_once(" of ")?;
        let (cluster, rest) = cut_phrase(cluster, "")?;
        set(&mut self.head, (model, read_mesh(mesh)?, cluster)).filter(|_| rest.is_empty())
    }

    /// Takes what some calls of a layer keep.
    fn take_exceptions(&mut self, rest: &str) -> Option<bool> {
        let (keep, ranges) = rest.split_once(' ')?;
        let keep = read_keep(keep)?;
        let layer = self.functions.get_mut(self.layer.as_ref()?)?;
        let mut is_new = true;
        for range in ranges.split_whitespace() {
            let (from, to) = range.split_once("..")?;
            let (from, to): (usize, usize) = (from.parse().ok()?, to.parse().ok()?);
            (from < to && to <= CALLS_MAX).then_some(())?;
            let mut insert = |call| layer.exceptions.insert(call, keep).is_none();
            is_new &= (from..to).all(&mut insert);
        }
        Some(is_new)
    }
}

/// The decisions of a layer without those that say nothing.
fn canonical((name, read): (String, FunctionPlan)) -> (String, FunctionPlan) {
    let FunctionPlan { keep, mut exceptions, shardings } = read;
    exceptions.retain(|_, other| *other != keep);
    (name, FunctionPlan { exceptions, ..FunctionPlan::new(keep, shardings) })
}

/// The version that the first line of a plan names, where it names one.
fn version(word: &str, rest: &str) -> Option<u32> {
    let (first, _) = rest.split_once(' ').filter(|_| word == "plan")?;
    first.parse().ok()
}

fn read_keep(name: &str) -> Option<Keep> {
    Keep::ALL.into_iter().find(|keep| keep.name() == name)
}

/// Reads prefill buckets, which ascend from 1.
fn read_inference(rest: &str) -> Option<Purpose> {
    let buckets = rest.strip_prefix("buckets ")?.split_whitespace().map(|n| n.parse().ok());
    let buckets = buckets.collect::<Option<Vec<usize>>>()?;
    let ascends = buckets.first() == Some(&1) && buckets.is_sorted_by(|a, b| a < b);
    (ascends && buckets.last()? <= &TOKENS_MAX).then_some(Purpose::Inference { buckets })
}

fn read_zero(text: &str) -> Option<Zero> {
    let (stage, shard) = text.split_once(" over ").unwrap_or((text, "0"));
    let stage = stage.parse().ok().filter(|stage| *stage <= 3)?;
    Some(Zero { stage, shard: shard.trim().parse().ok()? })
}

/// Reads the order of micro-batches, and where chunks end.
fn read_schedule(text: &str) -> Option<(Schedule, Vec<usize>)> {
    let (name, ends) = text.split_once(" stages ")?;
    let is_named = |schedule: &Schedule| schedule.name() == name;
    let schedule = match name {
        INTERLEAVED => Schedule::OneForwardOneBackward,
        _ => Schedule::ALL.into_iter().find(is_named)?,
    };
    let ends: Option<Vec<usize>> = ends.split_whitespace().map(|end| end.parse().ok()).collect();
    Some((schedule, ends?))
}

fn read_offload(text: &str) -> Option<Offload> {
    let mut offload = Offload::default();
    for word in text.split_whitespace() {
        let (name, place) = word.split_once('=')?;
        let to = Place::ALL.into_iter().find(|to| to.name() == place)?;
        let at = offload.place_mut(name)?;
        // Each is said once, and that something stays is not said.
        (*at == Place::Device && to != Place::Device).then_some(())?;
        *at = to;
    }
    (offload != Offload::default()).then_some(offload)
}

fn set<T>(place: &mut Option<T>, value: T) -> Option<bool> {
    Some(place.replace(value).is_none())
}

fn read_finite(text: &str) -> Option<f64> {
    text.trim().parse().ok().filter(|number: &f64| number.is_finite())
}

/// Reads `a=1 b=2` with the given names in their order.
fn read_numbers<T: FromStr, const N: usize>(text: &str, names: [&str; N]) -> Option<[T; N]> {
    let mut words = text.split_whitespace();
    let mut numbers = Vec::new();
    for name in names {
        let number = words.next()?.strip_prefix(name)?.strip_prefix('=')?;
        numbers.push(number.parse().ok()?);
    }
    words.next().is_none().then_some(())?;
    numbers.try_into().ok()
}

fn read_mesh(text: &str) -> Option<Mesh> {
    let (axes, order) = text.strip_prefix('[')?.split_once(']')?;
    let axes = axes.replace(',', " ");
    let [pp, dp, cp, tp] = match read_numbers(&axes, ["pp", "dp", "tp"]) {
        Some([pp, dp, tp]) => [pp, dp, 1, tp],
        None => read_numbers(&axes, ["pp", "dp", "cp", "tp"])?,
    };
    let order = match order.trim() {
        "" => USUAL_ORDER,
        words => parse_order(words.strip_prefix("order ")?.trim())?,
    };
    let mesh = Mesh { pp, dp, cp, tp, order };
    (mesh.checked_ranks()? > 0).then_some(mesh)
}

fn read_precision(text: &str) -> Option<Precision> {
    let mut precision = Precision::uniform(DType::F32);
    let mut words = text.split_whitespace();
    for role in ROLES {
        let Some(word) = words.next() else { return (role == "products").then_some(precision) };
        precision.set(role, word.strip_prefix(role)?.strip_prefix('=')?).ok()?;
    }
    words.next().is_none().then_some(precision)
}

fn read_optimizer(text: &str) -> Option<Optimizer> {
    let (name, numbers) = text.split_once(' ').unwrap_or((text, ""));
    // Each is a rate, or what is added.
    let is_positive = |number: &f64| number.is_finite() && *number >= 0.0;
    match name {
        "none" => numbers.is_empty().then_some(Optimizer::None),
        "sgd" => {
            let read: [f64; 2] = read_numbers(numbers, ["decay", "decay_biases"])?;
            let [decay, decay_biases] = read.iter().all(is_positive).then_some(read)?;
            Some(Optimizer::Sgd { decay, decay_biases })
        }
        "adamw" => {
            let names = ["beta1", "beta2", "eps", "decay", "decay_biases"];
            let read: [f64; 5] = read_numbers(numbers, names)?;
            let [beta1, beta2, eps, decay, decay_biases] =
                read.iter().all(is_positive).then_some(read)?;
            Some(Optimizer::AdamW { beta1, beta2, eps, decay, decay_biases })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diagnostic::render;

    const TEXT: &str = "plan 2 gpt2 on [pp=2, dp=1, tp=4] of cpu-local (2 cores, 7.60 GiB, avx2)
  target avx2
  micro-batch size=4 count=8
  schedule 1f1b stages 7 14
  data seq=128 dtype=f32
  optimizer adamw beta1=0.9 beta2=0.95 eps=1e-8 decay=0.1 decay_biases=0.0
  clip 1.0
  offload activations=host
  layer block keep full
    keep none 0..2 5..6
    %d.w: [*, dim1 @ tp] partial sum dp
    %x: [dim0 @ dp, dim1 @ tp unit 2]
  layer head keep none
  predict arena_bytes 1048576.0 derived
  predict step_time_s 0.25 fitted
";

    /// Version 1 has no number, no axis for contexts, and lists what is replicated.
    #[test]
    fn texts_of_version_1_are_read() {
        let first = "plan gpt2 on [pp=2, dp=1, tp=4] of cpu-local (2 cores, 7.60 GiB, avx2)
  micro-batch size=4 count=8
  schedule 1f1b stages 7 14
  data seq=128 dtype=f32
  optimizer adamw beta1=0.9 beta2=0.95 eps=1e-8 decay=0.1 decay_biases=0.0
  clip 1.0
  predict arena_bytes 1048576.0 derived
  predict step_time_s 0.25 fitted
  layer block keep full
    %d.w: [*, dim1 @ tp] partial sum dp
    %n1.rstd: []
    %x: [dim0 @ dp, dim1 @ tp unit 2]
  layer head keep none
";
        let second = TEXT.replace("  offload activations=host\n", "");
        let second = second.replace("    keep none 0..2 5..6\n", "");
        let second = second.replace("  target avx2\n", "");
        assert_eq!(parse_plan("first", first), parse_plan("second", &second));
        let later = parse_plan("later", &TEXT.replace("plan 2", "plan 7")).unwrap_err();
        assert_eq!(later[0].code, "E1023");
    }

    #[test]
    fn text_reads_back() {
        let plan = parse_plan("test", TEXT).unwrap();
        assert_eq!(plan.to_string(), TEXT);
        let json = serde_json::to_string(&plan).unwrap();
        assert_eq!(serde_json::from_str::<Plan>(&json).unwrap(), plan);
        let sgd = TEXT.replace("adamw beta1=0.9 beta2=0.95 eps=1e-8", "sgd");
        let sgd = sgd.replace("  clip 1.0\n", "  # not clipped\n\n");
        let plan = parse_plan("test", &sgd).unwrap();
        assert_eq!(parse_plan("test", &plan.to_string()), Ok(plan));
    }

    /// A line says all roles where they are not of one type, and texts without it mean one type.
    #[test]
    fn roles_read_back_and_must_agree_with_the_type() {
        let roles = "  precision parameters=bf16 compute=bf16 accumulate=f32 master=f32 \
                     gradients=f32 reduce=f32 states=f32 saved=bf16 logits=bf16\n";
        let typed = TEXT.replace("dtype=f32\n", &format!("dtype=bf16\n{roles}"));
        let plan = parse_plan("test", &typed).unwrap();
        assert_eq!(plan.to_string(), typed);
        assert_eq!(plan.precision, Precision::training(DType::BF16));
        let uniform = parse_plan("test", TEXT).unwrap().precision;
        assert_eq!(uniform, Precision::uniform(DType::F32));
        let headline = |text: &str| parse_plan("test", text).unwrap_err()[0].headline.clone();
        let other = typed.replace("dtype=bf16", "dtype=f16");
        assert_eq!(headline(&other), "dtype=f16 and compute=bf16");
        let unknown = typed.replace("states=f32", "states=i32");
        assert!(headline(&unknown).starts_with("cannot read `precision"), "{}", headline(&unknown));
        let masterless = typed.replace("master=f32", "master=none");
        assert_eq!(parse_plan("test", &masterless).unwrap().precision.master, None);
    }

    #[test]
    fn what_is_wrong_is_said_in_place() {
        let wrong = TEXT
            .replace("tp=4]", "tp=0]")
            .replace("  clip 1.0", "  cilp 1.0")
            .replace("keep none 0..2", "keep none 2..0")
            .replace("predict arena_bytes", "predict step_time_s");
        let found = parse_plan("my.plan", &wrong).unwrap_err();
        let text: String = found.iter().map(|d| render(d, Some(&wrong))).collect();
        let headlines: Vec<&str> = found.iter().map(|d| d.headline.as_str()).collect();
        assert_eq!(found.len(), 4, "{text}");
        assert!(text.contains("--> my.plan:10:5"), "{text}");
        assert_eq!(headlines[1], "a plan has no `cilp`");
        assert_eq!(headlines[3], "`predict` is decided twice");
        assert_eq!(parse_plan("empty", "").unwrap_err().len(), 5);
    }

    /// Products of what is read fit a number.
    #[test]
    fn numbers_have_bounds() {
        let huge = usize::MAX.to_string();
        for (from, to) in [
            ("dp=1, tp=4", "dp=65536, tp=4"),
            ("dp=1, tp=4", "dp=2305843009213693952, tp=4"),
            ("count=8", "count=65537"),
            ("size=4", &format!("size={huge}")),
            ("seq=128", "seq=268435457"),
            ("seq=128", &format!("seq={huge}")),
        ] {
            let found = parse_plan("test", &TEXT.replace(from, to)).unwrap_err();
            assert_eq!(found.len(), 1, "{to}: {found:?}");
            assert_eq!(found[0].code, "E1021", "{to}");
        }
    }

    #[test]
    fn mutations_never_panic() {
        for seed in 0..400 {
            let draw = |at: u64, below: usize| {
                (f64::from(crate::random::uniform(seed, at)) * below as f64) as usize
            };
            let mut bytes = TEXT.as_bytes().to_vec();
            for change in 0..3 {
                let at = draw(2 * change, bytes.len());
                bytes[at] = b" %[]=:@1\nx"[draw(2 * change + 1, 10)];
            }
            let text = String::from_utf8_lossy(&bytes);
            if let Ok(plan) = parse_plan("mutated", &text) {
                assert_eq!(parse_plan("printed", &plan.to_string()), Ok(plan));
            }
        }
    }
}
