//! `plan`, `fit` and `explain`: what the planner answers about a model on a cluster.

use ir::import::Model;
use ir::{DType, Diagnostic, Span};
use planner::compiled::{Found, Scored};
use planner::elaborate::name_of;
use planner::explain::{Explanation, explain};
use planner::footprint::Footprint;
use serde_json::{Value, json};

use crate::argument::PathArg;
use crate::documents::{self, Document, PlanRow, StepParts};
use crate::failure::{self, Exit, Failure, usage};
use crate::flops::forward_flops;
use crate::job::PlanRequest;
use crate::output::{self, Table};
use crate::planned::cluster_of;
use crate::training::{read_plan, training_plan};
use crate::verbs::flags::{Aim, ExplainArgs, FitArgs, PlanArgs, RequestFlags, refuse_changes};
use crate::verbs::inference::Told;
use crate::verbs::{gpus, inference};

/// Plans that are listed at most.
const LISTED: usize = 8;

/// Answers `plan`: the fastest plan that fits, beside the best of other kinds.
pub fn plan(args: &PlanArgs) -> Result<Exit, Failure> {
    output::or_document(args.asked.json, planned(args))
}

fn planned(args: &PlanArgs) -> Result<Exit, Failure> {
    if args.served.is_inference()? {
        let wrong = [
            ("--objective", args.objective != Aim::Time),
            ("--watts", args.watts.is_some()),
            ("--budget", args.budget.is_some()),
            ("--name", args.name),
        ];
        if let Some((flag, _)) = wrong.into_iter().find(|(_, is_given)| *is_given) {
            let headline = "plans of inference are searched for the most tokens per second";
            return Err(usage(flag, headline).help("leave it out").into());
        }
        let cluster = args.asked.place.cluster()?;
        let told = if args.plan { Told::Plan } else { Told::WaysToWrite };
        return inference::serve(&args.asked, cluster, &args.served, told, args.output.as_ref());
    }
    if let Some(cluster) = args.asked.gpus()? {
        return gpus::plan(args, cluster);
    }
    let given = [
        ("--objective", args.objective != Aim::Time),
        ("--watts", args.watts.is_some()),
        ("--budget", args.budget.is_some()),
    ];
    if let Some((flag, _)) = given.into_iter().find(|(_, is_given)| *is_given) {
        let headline = "plans that are compiled are searched for time, without a clock";
        return Err(usage(flag, headline).help("leave it out").into());
    }
    let (model, question) = args.asked.question()?;
    let found = crate::plan(&question.job())?;
    if let Some(path) = &args.output {
        let path = path.path();
        std::fs::write(path, found.plan.to_string()).map_err(runtime::Error::io("write", path))?;
        output::note(&format!("wrote {}", path.display()));
    }
    if args.asked.json {
        output::answer_json(&document(&model, &question, &found));
    } else if args.plan {
        output::answer(&found.plan.to_string());
    } else if args.name {
        let name = name_of(&question.module, crate::LOSS, &found.plan)?;
        output::answer(&name.to_string());
    } else {
        output::answer(&page(&model, &question, &found));
    }
    Ok(Exit::Success)
}

/// Answers `explain`: where a step of the plan goes, and why the others are slower.
pub fn explain_plan(args: &ExplainArgs) -> Result<Exit, Failure> {
    output::or_document(args.asked.json, explained(args))
}

/// The request, of the cluster that a plan in a file is for where no flag says another.
fn of_plan(args: &ExplainArgs) -> Result<RequestFlags, Diagnostic> {
    let mut asked = args.asked.clone();
    let text = || ir::file::read_text(args.file.as_ref()?.path()).ok();
    if asked.place.cluster.is("cpu-local")
        && let Some(cluster) = text().map(|text| cluster_of(&text)).transpose()?.flatten()
    {
        asked.place.cluster = PathArg::from(cluster);
    }
    Ok(asked)
}

fn explained(args: &ExplainArgs) -> Result<Exit, Failure> {
    let asked = &of_plan(args)?;
    if !args.what_if.is_empty() {
        refuse_changes(&args.what_if, &asked.place.cluster()?, &args.served)?;
        return gpus::what_if::what_if(asked, &args.what_if);
    }
    if args.served.is_inference()? {
        if args.file.is_some() {
            let headline = "plans of inference are carried out, and not explained".to_owned();
            let help = "`generate --plan` takes it; for GPUs write the layout: `--fix tp=8,pp=1`";
            return Err(usage("--plan", headline).help(help).into());
        }
        return inference::explain::explain(asked, asked.place.cluster()?, &args.served);
    }
    if let Some(cluster) = asked.gpus()? {
        return match &args.file {
            None => gpus::explain::explain(asked, cluster),
            Some(path) if !cluster.groups.is_empty() => {
                gpus::groups::explain::explain_file(asked, path, cluster)
            }
            Some(path) => gpus::explain::explain_file(asked, path),
        };
    }
    let (model, question, found) = match &args.file {
        None => {
            let (model, question) = asked.question()?;
            let found = crate::plan(&question.job())?;
            (model, question, found)
        }
        Some(path) => judged(asked, path)?,
    };
    let explanation: Explanation = explain(&found);
    if asked.json {
        output::answer_json(&documents::Explain { explanation }.to_json());
    } else {
        let header = header(&model, &question);
        output::answer(&format!("{header}\n{explanation}"));
    }
    Ok(Exit::Success)
}

/// What a compiled plan in a file costs, beside the one that is found.
fn judged(asked: &RequestFlags, path: &PathArg) -> Result<(Model, PlanRequest, Found), Failure> {
    let mut asked = asked.clone();
    let text = failure::read_text(path, "--plan")?;
    if text.trim_start().starts_with('{') {
        let headline = format!("`{path}` is no plan for the ranks of CPUs");
        let help = "write the cluster of the plan's GPUs: `--cluster h100`";
        return Err(Diagnostic::error("E5006", Span::of(path), headline).help(help).into());
    }
    let shown = &path.to_string();
    let plan = training_plan(shown, &text)?;
    asked.seq = asked.seq.or(Some(plan.seq));
    asked.gbs = asked.gbs.or(Some(plan.global_batch_size()));
    if asked.dtype.is_none() && asked.precision.is_empty() {
        asked.dtype = Some(plan.dtype().into());
        let roles = ir::precision::ROLES.iter();
        let written = |role: &&str| match *role {
            "products" => format!("products={}", plan.precision.products.name()),
            _ => format!("{role}={}", plan.precision.role(role).map_or("none", DType::name)),
        };
        asked.precision = roles.map(written).collect();
    }
    asked.place.ranks = asked.place.ranks.or(Some(plan.mesh.ranks()));
    asked.lora = asked.lora.or_else(|| plan.lora.clone());
    let (model, mut question) = asked.question()?;
    (question.optimizer, question.clip) = (plan.optimizer, plan.clip);
    let plan = read_plan(shown, &text, &question)?;
    let found = planner::compiled::judge(&question.job(), &plan)?;
    Ok((model, question, found))
}

/// Answers `fit`: what each strategy needs; yes if one fits.
pub fn fit(args: &FitArgs) -> Result<Exit, Failure> {
    output::or_document(args.asked.json, fitted(args))
}

fn fitted(args: &FitArgs) -> Result<Exit, Failure> {
    let asked = &args.asked;
    if !args.what_if.is_empty() {
        refuse_changes(&args.what_if, &asked.place.cluster()?, &args.served)?;
        return gpus::what_if::what_if(asked, &args.what_if);
    }
    if args.served.is_inference()? {
        let cluster = asked.place.cluster()?;
        if let Some(what) = args.largest {
            return inference::largest::largest(asked, cluster, &args.served, what);
        }
        return inference::serve(asked, cluster, &args.served, Told::Ways, None);
    }
    if let Some(cluster) = asked.gpus()? {
        return match args.largest {
            Some(what) => gpus::largest::largest(asked, &cluster, what),
            None => gpus::fit::fit(asked, cluster),
        };
    }
    if args.largest.is_some() {
        let headline = "the largest that fits is searched for on GPUs".to_owned();
        return Err(usage("--largest", headline).help("name GPUs: `--cluster h100`").into());
    }
    let (_, question) = asked.question()?;
    let fit = planner::fit::fit(&question.job())?;
    let fits = fit.fits();
    if asked.json {
        output::answer_json(&documents::Fit { fits, strategies: fit }.to_json());
    } else {
        output::answer(&fit.to_string());
    }
    Ok(if fits { Exit::Success } else { Exit::Infeasible })
}

/// Operations of one step, forward and backward.
fn step_flops(model: &Model, question: &PlanRequest) -> Option<f64> {
    let entry = ["logits", crate::LOSS].into_iter().find(|e| model.module.function(e).is_some())?;
    let forward = forward_flops(&model.module, entry)? as f64;
    Some(3.0 * forward * question.global_batch_size as f64)
}

/// The share of the devices' peak that the model's operations take.
fn mfu(model: &Model, question: &PlanRequest, step_s: f64) -> Option<f64> {
    let PlanRequest { cluster, ranks, precision, .. } = question;
    let dtype = &precision.compute;
    let on_node = cluster.ranks_per_node(*ranks);
    let rated = cluster.flops_per_s(*dtype, on_node).value;
    // What is measured says more of a CPU than what is said of CPUs in general.
    let measured = cluster.calibration.as_ref().and_then(|c| c.product.get(dtype));
    let fastest = measured.map_or(0.0, |curve| curve.0.iter().map(|p| p[1]).fold(0.0, f64::max));
    let peak = rated.max(fastest * cluster.threads(on_node) as f64);
    // Ranks beyond the cores of a node share them.
    let devices = *ranks as f64 / cluster.oversubscription(on_node);
    Some(step_flops(model, question)? / step_s / (peak * devices))
}

/// What is asked about, in three lines.
pub(super) fn header(model: &Model, question: &PlanRequest) -> String {
    let PlanRequest { ranks, global_batch_size, seq, precision, .. } = question;
    let dtype = precision.compute;
    let mut text = format!("model    {}: {}", model.name, output::count(model.param_count()));
    text += &format!(" parameters in {dtype}\n");
    text += &format!("cluster  {}, {ranks} ranks\n", question.cluster.describe());
    text += &format!("step     {global_batch_size} samples of {seq} tokens\n");
    text
}

/// The best plan of each mesh and boundary, the fastest first; those that do not fit come last.
fn listed(found: &Found) -> Vec<&Scored> {
    let kind = |s: &Scored| (s.candidate.mesh, s.candidate.sequence);
    let mut sorted: Vec<&Scored> = found.evaluated.iter().collect();
    sorted.sort_by(|a, b| b.fits().cmp(&a.fits()).then(a.time.seconds.total_cmp(&b.time.seconds)));
    let mut listed: Vec<&Scored> = Vec::new();
    for scored in sorted {
        if listed.len() < LISTED && listed.iter().all(|other| kind(other) != kind(scored)) {
            listed.push(scored);
        }
    }
    listed
}

fn page(model: &Model, question: &PlanRequest, found: &Found) -> String {
    let tokens = (question.global_batch_size * question.seq) as f64;
    let columns = ["plan", "step", "tokens/s", "per rank", "MFU", "memory", "of"];
    let mut table = Table::new(columns);
    for scored in listed(found) {
        let step_s = scored.time.seconds;
        let mfu = mfu(model, question, step_s).map(|mfu| format!("{:.1}%", 100.0 * mfu));
        table.row([
            scored.name.to_string(),
            output::seconds(step_s),
            output::count((tokens / step_s) as u64),
            output::count((tokens / step_s / question.ranks as f64) as u64),
            mfu.unwrap_or_default(),
            scored.need.to_string(),
            format!("{}{}", scored.have, if scored.fits() { "" } else { " does not fit" }),
        ]);
    }
    let origin = found.plan.predictions.get("step_time_s").map_or("", |p| p.origin.as_str());
    let (all, compiled) = (found.candidate_count, found.evaluated.len());
    let end =
        if found.complete { "none of the others can be faster" } else { "the search was cut off" };
    let on_disk = match offloaded(&found.best) {
        0 => String::new(),
        bytes => format!("the first places {} on the disk of its run\n", output::bytes(bytes)),
    };
    format!(
        "{}\n{}\n{on_disk}{all} candidates, {compiled} compiled, {end}; times are {origin}\n",
        header(model, question),
        table.text()
    )
}

/// Bytes that all ranks place on a disk.
fn offloaded(scored: &Scored) -> u64 {
    scored.footprints.iter().map(|one| one.disk).sum::<u64>() * scored.candidate.mesh.dp as u64
}

/// What a candidate costs. The interval, as shares of the expected time, is as wide for all.
fn plan_row(
    model: &Model,
    question: &PlanRequest,
    scored: &Scored,
    [low, high]: [f64; 2],
) -> PlanRow {
    let candidate = &scored.candidate;
    let samples = candidate.microbatch_size * candidate.mesh.dp;
    let step_s = scored.time.seconds;
    let tokens_per_s = (question.global_batch_size * question.seq) as f64 / step_s;
    let peak = scored.footprints.iter().map(Footprint::total).max();
    PlanRow {
        text: scored.name.to_string(),
        plan: json!(scored.name.to_string()),
        microbatch_count: (question.global_batch_size / samples) as u64,
        step_time_s: step_s,
        step_time_low_s: low * step_s,
        step_time_high_s: high * step_s,
        tokens_per_s,
        tokens_per_s_per_device: tokens_per_s / question.ranks as f64,
        mfu: mfu(model, question, step_s),
        peak_mem_bytes: peak.unwrap_or(0) as f64,
        disk_bytes: Some(offloaded(scored)).filter(|bytes| *bytes > 0),
        energy_j: None,
        fits: scored.fits(),
    }
}

fn document(model: &Model, question: &PlanRequest, found: &Found) -> Value {
    let explanation = explain(found);
    let of_best = |bound_s: f64| bound_s / found.best.time.seconds;
    let interval = [explanation.step_time_low_s, explanation.step_time_high_s].map(of_best);
    let row = |scored: &Scored| plan_row(model, question, scored, interval);
    let other = |scored: &Scored| {
        let mut other = json!(row(scored));
        other["mesh"] = json!(scored.candidate.mesh);
        other["sequence"] = json!(scored.candidate.sequence);
        other["microbatch_size"] = json!(scored.candidate.microbatch_size);
        other["need_bytes"] = json!(scored.need);
        other["have_bytes"] = json!(scored.have);
        other
    };
    let best = &found.best;
    let document = documents::Plan {
        row: PlanRow { plan: json!(found.plan), ..row(best) },
        model: model.name.clone(),
        params: model.param_count(),
        layers: model.layer_count as u64,
        cluster: question.cluster.describe(),
        ranks: question.ranks as u64,
        devices: question.ranks as u64,
        gbs: question.global_batch_size as u64,
        seq: question.seq as u64,
        dtype: question.precision.compute.name().to_owned(),
        assumptions: Vec::new(),
        vocabulary_padding: None,
        flops_per_step: step_flops(model, question),
        simulated_step_time_s: None,
        origin: explanation.origin,
        breakdown: StepParts::Ranks(best.time.breakdown),
        memory: None,
        have_bytes: best.have.0 as f64,
        gap: Some(explanation.gap),
        bound_s: found.bound_s,
        complete: found.complete,
        candidates: found.candidate_count as u64,
        space: None,
        frontier: Vec::new(),
        plans: listed(found).into_iter().map(other).collect(),
        too_large: Vec::new(),
        not_executed: Vec::new(),
        executor: None,
        decision_hash: Some(blake3::hash(found.plan.decisions().as_bytes()).to_string()),
    };
    document.to_json()
}
