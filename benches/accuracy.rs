//! Predicted against measured: the time of a training step of gpt2-mini and gpt2 on 1, 2 and 4
//! ranks of this machine, after a calibration.
//!
//! ```text
//! cargo bench --bench accuracy                          # all rows, as a Markdown table
//! cargo bench --bench accuracy -- gpt2-mini             # the rows of a model
//! cargo bench --bench accuracy -- gpt2-mini --launches  # and each kind of launch
//! ```
//! Rows that fix no mesh run the plan that the search finds. The speed of virtual cores changes
//! within seconds, so each row is calibrated and measured in turns: the predicted time is the
//! median of the turns' predictions, the measured one that of all steps after the first two.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use gantline::job::{ADAMW, PlanRequest};
use gantline::output::answer;
use gantline::verbs::calibrate::measured;
use gantline::{LOSS, compile, import, plan, prepare};
use ir::import::{Options, preset};
use ir::program::{Instruction, Step};
use ir::random::mix;
use ir::{DType, Plan};
use kernels::Kernel;
use planner::calibrate::Sizes;
use planner::cluster::Cluster;
use planner::compiled::{Job, Scorer};
use planner::limits::{Decision, Limits};
use planner::price::Prices;
use runtime::execute::{Batch, Classes, Options as Execution, Scalars, Session};
use runtime::init::Init;
use runtime::trace::{Trace, Tracing};

/// Times that a row is calibrated and measured.
const TURNS: usize = 3;
/// Seconds that calibrating takes in a turn.
const CALIBRATION_S: f64 = 2.0;
/// Seconds of the steps of a turn, about.
const STEPS_S: f64 = 1.5;

/// What is predicted and measured.
struct Case {
    model: &'static str,
    seq: usize,
    samples: usize,
    ranks: usize,
    fixed: &'static [(Decision, usize)],
}

fn cases() -> Vec<Case> {
    use Decision::{Dp, Pp, Tp};
    let meshes: [(usize, &'static [(Decision, usize)]); 9] = [
        (1, &[]),
        (2, &[]),
        (2, &[(Dp, 2)]),
        (2, &[(Tp, 2)]),
        (2, &[(Pp, 2)]),
        (4, &[]),
        (4, &[(Dp, 4)]),
        (4, &[(Tp, 4)]),
        (4, &[(Pp, 4)]),
    ];
    let mut cases = Vec::new();
    for (ranks, fixed) in meshes {
        cases.push(Case { model: "gpt2-mini", seq: 256, samples: 8, ranks, fixed });
    }
    for (ranks, fixed) in meshes {
        // The largest model runs the chosen plans only: a step takes seconds.
        if fixed.is_empty() {
            cases.push(Case { model: "gpt2", seq: 256, samples: 4, ranks, fixed });
        }
    }
    cases
}

fn question(case: &Case, cluster: &Cluster) -> PlanRequest {
    let description = preset(case.model).expect("a preset");
    let options =
        Options { seq: case.seq, dtype: DType::F32, dropout: Some(0.0), documents: false };
    let model = import(&description, &options).expect("the model is imported");
    let mut limits = Limits::default();
    case.fixed.iter().for_each(|(decision, number)| limits.fix(*decision, *number));
    PlanRequest {
        module: prepare(&model).expect("the module is prepared"),
        model: model.name,
        cluster: cluster.clone(),
        ranks: case.ranks,
        global_batch_size: case.samples,
        seq: case.seq,
        precision: ir::precision::Precision::uniform(DType::F32),
        optimizer: ADAMW,
        clip: Some(1.0),
        lora: None,
        limits,
    }
}

/// Ranks that run a plan.
struct Runner {
    session: Session,
    ids: Vec<i32>,
}

impl Runner {
    fn start(plan: &Plan, classes: Classes, threads: usize, tracing: Tracing) -> Runner {
        let deadline = Duration::from_secs(60);
        let options = Execution { threads_per_rank: threads, deadline, tracing, disk: None };
        let mut session = Session::start(Arc::new(classes), &options).expect("the ranks start");
        session.init_weights(1, &|_, dims: &[usize]| match dims.len() {
            1 => Init::Ones,
            _ => Init::Normal { std: 0.02, zero_row: None },
        });
        let count = plan.global_batch_size() * plan.seq;
        let ids: Vec<i32> = (0..count).map(|i| (mix(i as u64) % 256) as i32).collect();
        let mut runner = Runner { session, ids };
        runner.step();
        runner.step();
        runner
    }

    /// The seconds of a step.
    fn step(&mut self) -> f64 {
        let batch = Batch { tokens: &self.ids, labels: &self.ids, ..Batch::default() };
        let scalars = Scalars { rate: 1e-5, ..Scalars::default() };
        self.session.step(&batch, scalars).expect("the step runs").seconds
    }

    /// The seconds of steps for about [`STEPS_S`].
    fn steps(&mut self) -> Vec<f64> {
        let mut times = vec![self.step()];
        while times.iter().sum::<f64>() < STEPS_S {
            times.push(self.step());
        }
        times
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn calibrated(cluster: &Cluster) -> Cluster {
    let calibration = measured(&Sizes::ALL, CALIBRATION_S).expect("the machine is measured");
    Cluster { calibration: Some(calibration), ..cluster.clone() }
}

/// Prints what launches of one kind took beside what was predicted, the largest difference first.
fn print_launches(classes: &Classes, prices: &Prices<'_>, trace: &Trace) {
    let mut kinds: BTreeMap<String, (usize, f64, f64)> = BTreeMap::new();
    for (rank, events) in trace.ranks.iter().enumerate() {
        let program = classes.program_of(rank);
        for event in events {
            let Some(at) = event.span.instruction else { continue };
            let Step::Call { routine, .. } = &program.steps[event.span.step] else { continue };
            let (name, predicted) = match &program.routines[*routine].instructions[at] {
                Instruction::Launch { kernel, .. } => {
                    let kernel: &Kernel = &classes.kernels[*kernel];
                    (kernel.to_string(), prices.launch(kernel).seconds)
                }
                Instruction::Collective { exchange, group, dtype, elements, .. } => {
                    let seconds = prices.collective(exchange, group, *dtype, *elements);
                    (event.name.clone(), seconds)
                }
            };
            let kind = kinds.entry(name).or_default();
            *kind = (kind.0 + 1, kind.1 + predicted, kind.2 + event.span.seconds);
        }
    }
    let mut kinds: Vec<_> = kinds.into_iter().collect();
    let difference = |k: &(String, (usize, f64, f64))| (k.1.1 - k.1.2).abs();
    kinds.sort_by(|a, b| difference(b).total_cmp(&difference(a)));
    for (name, (count, predicted, measured)) in kinds.iter().take(24) {
        let (p, m) = (1e3 * predicted, 1e3 * measured);
        let ratio = predicted / measured;
        answer(&format!("    {count:>5} x {p:>9.2} ms {m:>9.2} ms {ratio:>6.2}  {name}"));
    }
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).filter(|w| w != "--bench").collect();
    let launches = words.iter().any(|w| w == "--launches");
    let names = || words.iter().filter(|w| !w.starts_with("--"));
    let cluster = Cluster::load("cpu-local").expect("a preset");
    answer(&cluster.describe());
    answer("| model | ranks | plan | predicted | measured | ratio |");
    answer("|---|--:|---|--:|--:|--:|");
    for case in cases() {
        if names().all(|word| case.model == word) {
            run(&case, &cluster, launches);
        }
    }
}

/// Prints one row.
fn run(case: &Case, cluster: &Cluster, launches: bool) {
    let question = question(case, &calibrated(cluster));
    let found = plan(&question.job()).expect("there is a plan");
    let (candidate, model, ranks) = (&found.best.candidate, case.model, case.ranks);
    let chosen = if case.fixed.is_empty() { " (chosen)" } else { "" };
    let threads = cluster.threads(cluster.ranks_per_node(ranks));
    let classes = compile(&question.module, LOSS, &found.plan).expect("the plan compiles");
    let tracing = if launches { Tracing::Instructions } else { Tracing::None };
    let mut runner = Runner::start(&found.plan, classes.clone(), threads, tracing);
    let (mut predicted, mut measured) = (vec![found.best.time.seconds], runner.steps());
    let mut cluster = question.cluster.clone();
    for _ in 1..TURNS {
        cluster = calibrated(&cluster);
        let job = Job { cluster: &cluster, ..question.job() };
        let mut scorer = Scorer::new(&job).expect("the entry is a list of calls");
        let scored = scorer.score(&found.plan, candidate).expect("the plan fits the module");
        predicted.push(scored.time.seconds);
        measured.extend(runner.steps());
    }
    let (predicted_s, measured_s) = (median(predicted), median(measured));
    let ratio = predicted_s / measured_s;
    let row = format!("| {model} | {ranks} | {}{chosen} |", found.best.name);
    answer(&format!("{row} {predicted_s:.3} s | {measured_s:.3} s | {ratio:.2} |"));
    if launches {
        let parts = found.best.time.breakdown.parts();
        let parts: Vec<String> = parts.iter().map(|(n, s)| format!("{n} {s:.3}")).collect();
        answer(&format!("    {}", parts.join(", ")));
        let prices = Prices::new(&cluster, found.plan.mesh);
        print_launches(&classes, &prices, &runner.session.trace());
    }
}
