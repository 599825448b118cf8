//! `run X.gtl`: the programs that `compile` wrote, on drawn numbers or the user's.
//!
//! A step is that of training, its rate zero: loss, gradients and the update are computed, and no
//! weight changes. Without weights and tokens they are drawn from a seed: times are those of real
//! ones, and the loss is that of a model that knows nothing.

use std::ops::Range;

use ir::ids::{self, Ids};
use ir::import::{Model, Options};
use ir::random::mix;
use ir::{Diagnostic, Module, Plan, Span};
use runtime::artefact::Requirements;
use runtime::execute::{Batch, Phase, Samples, Scalars, Session};

use super::{Answer, Args, Feed, mean_grads, read_arrays, tell, token_path, write};
use crate::argument::PathArg;
use crate::artefact::{open, vocab};
use crate::failure::{Exit, Failure, usage};
use crate::output;
use crate::verbs::generate::{self, Origin};

/// Decides what is drawn.
const SEED: u32 = 1;
/// The standard deviation of weights that are drawn: that of GPT-2.
const STD: f64 = 0.02;

/// A file that was read: what is said about it, once its programs run.
struct Compiled<'a> {
    args: &'a Args,
    module: Module,
    plan: Plan,
    requirements: Requirements,
    /// The batch of a step.
    samples: Samples,
}

/// Answers.
pub(super) fn run(args: &Args) -> Result<Exit, Failure> {
    let contents = open(args.model.path())?;
    let (module, plan) = (contents.module.clone(), contents.plan.clone());
    let requirements = contents.requirements.clone();
    let classes = contents.into_classes(crate::LOSS);
    let Some(samples) = classes.samples(Phase::Step) else {
        let headline = "its programs have no step that reads tokens";
        return Err(Diagnostic::error("E5014", Span::of(&args.model), headline)
            .help("compile a model that has a `loss`")
            .into());
    };
    let compiled = Compiled { args, module, plan, requirements, samples };
    compiled.check_flags()?;
    let feed = compiled.feed()?;
    let weights = args.weights.as_ref().map(|source| compiled.weights(source)).transpose()?;
    output::note(&compiled.describe());
    let mut session = crate::start(classes, compiled.plan.target, compiled.threads())?;
    match &weights {
        Some((model, origin)) => origin.fill(&mut session, model)?,
        None => session
            .init_weights(SEED, &|_, _| runtime::init::Init::Normal { std: STD, zero_row: None }),
    }
    let mut answer = Answer::of(compiled.plan.dtype(), &feed);
    answer.predicted_s = compiled.plan.predictions.get("step_time_s").map(|p| p.value);
    let model = weights.as_ref().map(|(model, _)| model);
    compute(args, &mut session, &feed, model, &mut answer)?;
    if let Some(folder) = &args.output {
        write(folder, &answer)?;
    }
    tell(args, &answer);
    Ok(Exit::Success)
}

fn compute(
    args: &Args,
    session: &mut Session,
    feed: &Feed,
    model: Option<&Model>,
    answer: &mut Answer,
) -> Result<(), Failure> {
    let labels = feed.labels.as_deref().unwrap_or_default();
    let batch = Batch { tokens: &feed.tokens, labels, ..Batch::default() };
    // A loss alone needs no backward pass; what is timed is what was predicted.
    let report = match args.bench.is_none() && !args.grad && !args.input.is_empty() {
        true => session.evaluate(&batch)?,
        false => session.step(&batch, Scalars::default())?,
    };
    if let (true, Some(model)) = (args.grad, model) {
        answer.grads = mean_grads(session, model, &report);
    }
    for _ in 0..args.bench.unwrap_or(0) {
        answer.times.push(session.step(&batch, Scalars::default())?.seconds);
    }
    answer.report = Some(report);
    Ok(())
}

impl Compiled<'_> {
    /// Threads of a rank: those that its prediction is for.
    fn threads(&self) -> usize {
        (self.requirements.machine.cores / self.requirements.ranks.max(1)).max(1)
    }

    /// Opens weights, and checks that the file was compiled from their model.
    fn weights(&self, source: &PathArg) -> Result<(Model, Origin), Failure> {
        let (description, _, origin) = generate::open(source)?;
        let Plan { seq, precision, .. } = self.plan;
        let dtype = precision.accumulate;
        let model =
            crate::import(&description, &Options { seq, dtype, dropout: None, documents: false })?;
        let weights = |module: &Module| {
            let function = module.function(crate::LOSS)?;
            // Their types are those of the precision.
            let param = |id| (function.value(id).name.clone(), function.ty(id).dims.clone());
            let is_weight = |(name, _): &(String, Vec<ir::Dim>)| name != "tokens";
            Some(function.params().map(param).take_while(is_weight).collect::<Vec<_>>())
        };
        if weights(&model.module) != weights(&self.module) {
            let (compiled, name) = (&self.plan.model, &model.name);
            let headline = format!("these are weights of `{name}`, and `{compiled}` is compiled");
            let help = "give the weights of the model that was compiled, or compile this one";
            return Err(Diagnostic::error("E5013", Span::of(source), headline).help(help).into());
        }
        Ok((model, origin))
    }

    fn describe(&self) -> String {
        let Plan { model, mesh, cluster, .. } = &self.plan;
        let dtype = self.plan.dtype();
        let (gbs, seq) = (self.samples.global(), self.samples.seq);
        let weights = match &self.args.weights {
            Some(source) => source.to_string(),
            None => format!("drawn with seed {SEED}: the loss is that of no model"),
        };
        format!(
            "model    {model} in {dtype}, steps of {gbs} samples of {seq} tokens\n\
             plan     on {mesh} of {cluster}\n\
             weights  {weights}"
        )
    }

    /// What was decided when the file was compiled cannot be asked for again.
    fn check_flags(&self) -> Result<(), Failure> {
        let args = self.args;
        let given = [
            ("--cluster", args.cluster.is_some()),
            ("--calibration", args.calibration.is_some()),
            ("--dtype", args.dtype.is_some()),
            ("--fix", !args.limited.is_empty()),
            ("--dim", !args.dim.is_empty()),
        ];
        let mut wrong = Vec::new();
        for (flag, _) in given.into_iter().filter(|(_, is_given)| *is_given) {
            let headline = format!("`{}` is compiled, which has decided this", args.model);
            wrong.push(usage(flag, headline).help("leave the flag out, or compile again with it"));
        }
        let ranks = self.requirements.ranks;
        if let Some(asked) = args.ranks.filter(|asked| *asked != ranks) {
            let headline =
                format!("`{}` is compiled for {ranks} ranks, and not for {asked}", args.model);
            let help = format!("leave --ranks out, or compile again with --ranks {asked}");
            wrong.push(usage("--ranks", headline).help(help));
        }
        let pairs = [
            (!args.input.is_empty(), args.labels.is_some(), "--input", "--labels FILE"),
            (args.labels.is_some(), !args.input.is_empty(), "--labels", "--input input_ids=FILE"),
            (args.grad, args.weights.is_some(), "--grad", "--weights DIR"),
        ];
        for (has, other, flag, missing) in pairs {
            if has && !other {
                let headline = format!("`{flag}` of a compiled step needs `{missing}`");
                wrong.push(usage(flag, headline).help(format!("write {missing} too")));
            }
        }
        if wrong.is_empty() { Ok(()) } else { Err(wrong.into()) }
    }

    /// Tokens and labels of one step: the user's, or drawn.
    fn feed(&self) -> Result<Feed, Failure> {
        let (samples, seq) = (self.samples.global(), self.samples.seq);
        if self.args.input.is_empty() {
            let (vocab, ids) = (vocab(&self.module), Ids::of(&self.module, crate::LOSS));
            let draw = |feed: ids::Feed, at: usize, number: usize| {
                let Range { start, end } = ids.range(feed, at % seq).unwrap_or(0..vocab as i64);
                let word = mix(u64::from(SEED) << 32 | number as u64);
                (start + (word % (end - start) as u64) as i64) as i32
            };
            let count = samples * seq;
            let tokens: Vec<i32> = (0..count).map(|at| draw(ids::Feed::Tokens, at, at)).collect();
            let labels =
                Some((0..count).map(|at| draw(ids::Feed::Labels, at, count + at)).collect());
            return Ok(Feed { samples, seq, tokens, labels });
        }
        let arrays = read_arrays(self.args)?;
        let given = (arrays.samples, arrays.seq);
        if given != (samples, seq) {
            let headline = format!(
                "the tokens are [{}, {}], and the file is compiled for [{samples}, {seq}]",
                given.0, given.1
            );
            let help =
                format!("give as many, or compile again with --gbs {} --seq {}", given.0, given.1);
            return Err(Diagnostic::error("E5009", Span::of(&token_path(self.args)?), headline)
                .help(help)
                .into());
        }
        Ok(arrays.feed(&Ids::of(&self.module, crate::LOSS), self.args)?)
    }
}
