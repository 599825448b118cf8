//! `plan --for inference|prefill|decode` on the ranks of CPUs, whose plans `generate` carries out.

use ir::import::{Architecture, Description, Model, Weight};
use ir::plan::buckets::usual_buckets;
use ir::precision::{Precision, Products};
use ir::{DType, Plan};
use kernels::{Bytes, Seconds};
use planner::cluster::{Cluster, Kind};
use planner::inference::{Aim, Found, Job, Way, search};
use planner::limits::Decision;
use serde_json::{Value, json};

use crate::argument::PathArg;
use crate::documents::{self, Document};
use crate::failure::{Exit, Failure, usage};
use crate::generation::{DECODE, Pieces};
use crate::job::{self, positions_max};
use crate::output::{self, Table};
use crate::verbs::flags::{Purpose, RequestFlags, Served};

use super::Told;

/// The request, for printing.
struct Subject<'a> {
    model: &'a Model,
    cluster: &'a Cluster,
    ranks: usize,
    capacity: usize,
    dtype: DType,
    aim: Aim,
}

/// Whether a cluster has CPUs.
pub fn are_meant(cluster: &Cluster) -> bool {
    cluster.device.kind == Kind::Cpu
}

/// Answers; the plan is written where a file is named. No where nothing fits.
pub fn answer(
    asked: &RequestFlags,
    served: &Served,
    told: Told,
    file: Option<&PathArg>,
) -> Result<Exit, Failure> {
    refuse_others(asked, served)?;
    let cluster = asked.place.measured_cluster()?;
    let description = crate::resolve(&asked.model)?.description;
    let context = served.requests.context()?.or(asked.seq);
    let capacity = context.unwrap_or_else(|| longest(&description));
    check_context(&description, capacity)?;
    let (dtype, products) = asked.dtype.unwrap_or(DType::F32.into()).computed();
    job::check_executable(dtype)?;
    refuse_rounded(products)?;
    let precision = Precision::uniform(dtype);
    let pieces = Pieces::of(&description, &usual_buckets(capacity), capacity, &precision)?;
    let ranks = asked.place.ranks(&cluster);
    job::check_local(&cluster, ranks)?;
    let aim = aim(served, capacity)?;
    let job = Job {
        modules: &pieces.modules,
        entry: DECODE,
        model: pieces.model.name.clone(),
        cluster: &cluster,
        ranks,
        capacity,
        precision,
        limits: asked.all_limits()?,
        sequences: asked.gbs,
        aim,
        within_s: [served.requests.token_time, served.requests.first_token_time],
    };
    let found = search(&job)?;
    if let (Some(path), Some(plan)) = (file, &found.plan) {
        let path = path.path();
        std::fs::write(path, plan.to_string()).map_err(runtime::Error::io("write", path))?;
        output::note(&format!("wrote {}", path.display()));
    }
    let subject = Subject { model: &pieces.model, cluster: &cluster, ranks, capacity, dtype, aim };
    match (&found.plan, told) {
        _ if asked.json => output::answer_json(&document(&subject, &found)),
        (Some(plan), Told::Plan) => output::answer(&plan.to_string()),
        _ => output::answer(&page(&subject, &found)),
    }
    if told == Told::WaysToWrite && file.is_none() && found.plan.is_some() && !asked.json {
        output::note("`-o FILE.plan` writes the plan for `generate --plan`");
    }
    Ok(if found.plan.is_some() { Exit::Success } else { Exit::Infeasible })
}

/// The longest sequence of a model, and of its KV caches.
fn longest(description: &Description) -> usize {
    let kept = match &description.architecture {
        Architecture::Family(family) => family.cached_max(),
        Architecture::Graph(_) | Architecture::Sized(_) => None,
    };
    positions_max(description).min(kept.unwrap_or(usize::MAX))
}

/// Refuses sequences that are longer than the model's positions.
fn check_context(description: &Description, capacity: usize) -> Result<(), Failure> {
    let most = longest(description);
    if capacity <= most {
        return Ok(());
    }
    let headline = format!("sequences of {capacity} tokens, and the model has {most} positions");
    Err(usage("--seq", headline).help(format!("write `--seq {most}` or less")).into())
}

/// The objective.
fn aim(served: &Served, capacity: usize) -> Result<Aim, Failure> {
    let lengths = served.requests.lengths()?;
    let [prompt, output] = match lengths {
        Some(lengths) => [lengths.prompt as usize, lengths.output as usize],
        None => [capacity, 0],
    };
    Ok(match (served.purpose, lengths) {
        (Purpose::Prefill, _) => Aim::Prefill { prompt },
        (Purpose::Inference, Some(_)) => Aim::Requests { prompt, output },
        (Purpose::Training | Purpose::Inference | Purpose::Decode, _) => Aim::Decode { prompt },
    })
}

/// Refuses what is answered for GPUs alone.
fn refuse_others(asked: &RequestFlags, served: &Served) -> Result<(), Failure> {
    asked.refuse_tool("trains on GPUs, and the cluster has CPUs")?;
    asked.assumed.refuse("the cluster has CPUs")?;
    let requests = &served.requests;
    let given = [
        ("--engine", requests.engine.is_some()),
        ("--shared-prefix", requests.shared_prefix.is_some()),
        ("--pass-tokens", requests.pass_tokens.is_some()),
        ("--weight-dtype", requests.weight_dtype.is_some()),
        ("--kv-dtype", requests.kv_dtype.is_some()),
        ("--draft-tokens", requests.draft_tokens.is_some()),
        ("--lora", asked.lora.is_some()),
        ("--precision", !asked.precision.is_empty()),
        ("--document-mask", asked.document_mask),
        ("--optimizer", asked.optimizer != "adamw"),
        ("--imbalance", asked.imbalance.is_some()),
    ];
    let given = given.into_iter().filter(|(_, is_given)| *is_given);
    let refused = given.map(|(flag, _)| {
        let headline = "this is answered for GPUs, and the cluster has CPUs".to_owned();
        usage(flag, headline).help("leave it out")
    });
    let mut refused: Vec<_> = refused.collect();
    let lacking = asked.limited.lacking(&[Decision::Tp, Decision::Pp, Decision::Dp])?;
    refused.extend(lacking.iter().map(|decision| {
        let headline = format!("replicas on CPUs have no `{decision}`");
        usage("--fix", headline).help("leave it out: they are laid out by tp, pp and dp")
    }));
    if asked.place.nodes.is_some_and(|nodes| nodes > 1) {
        let headline = "inference on CPUs runs on the threads of one machine".to_owned();
        refused.push(usage("--nodes", headline).help("leave it out"));
    }
    if refused.is_empty() { Ok(()) } else { Err(refused.into()) }
}

/// Refuses types of products that `generate` does not execute.
fn refuse_rounded(products: Products) -> Result<(), Failure> {
    if products == Products::Own {
        return Ok(());
    }
    let headline = format!("inference on CPUs has no products in {}", products.name());
    Err(usage("--dtype", headline).help("write f32, bf16, f16 or f64").into())
}

/// A mesh as its factors.
fn layout(way: &Way) -> String {
    format!("tp={} pp={}", way.mesh.tp, way.mesh.pp)
}

fn document(subject: &Subject<'_>, found: &Found) -> Value {
    let has_plan = found.plan.is_some();
    let reason = json!(reason(subject, found));
    let recommended = found.ways.first().filter(|_| has_plan).map(|way| {
        let mut told = told(subject, way);
        told["reason"] = reason;
        told
    });
    let least = found.ways.iter().map(|way| way.need.0).min().unwrap_or(0);
    let have = found.ways.first().map_or(0, |way| way.have.0);
    let document = documents::Inference {
        subject: documents::ServedModel {
            model: subject.model.name.clone(),
            cluster: subject.cluster.describe(),
            devices: subject.ranks as u64,
            seq: subject.capacity as u64,
            dtype: subject.dtype.name().to_owned(),
            assumptions: Vec::new(),
            have_bytes: have as f64,
            executor: None,
        },
        fits: has_plan,
        recommended: recommended.and_then(|row| row.as_object().cloned()),
        missing_bytes: (!has_plan && least > have).then(|| (least - have) as f64),
        rows: found.ways.iter().map(|way| told(subject, way)).collect(),
    };
    document.to_json()
}

/// One way, for programs.
fn told(subject: &Subject<'_>, way: &Way) -> Value {
    let is_prefill = matches!(subject.aim, Aim::Prefill { .. });
    let rate = way.tokens_per_s / subject.ranks as f64;
    json!({
        "layout": layout(way),
        "tp": way.mesh.tp,
        "pp": way.mesh.pp,
        "ep": 1,
        "copies": way.mesh.dp,
        "fits": way.fits(),
        "need_bytes": way.need.0,
        "sequences": way.slots * way.mesh.dp,
        "slots": way.slots,
        "prompt_s": way.prompt_s,
        "prompt_tokens_per_s_per_device": is_prefill.then_some(rate),
        "token_s": way.token_s,
        "tokens_per_s_per_device": (!is_prefill).then_some(rate),
    })
}

fn page(subject: &Subject<'_>, found: &Found) -> String {
    let Subject { model, cluster, ranks, capacity, dtype, aim } = subject;
    let mut text = format!("model    {}: ", model.name);
    let parameters: u64 = model.weights.iter().map(Weight::count).sum();
    text += &format!("{} parameters in {dtype}\n", output::count(parameters));
    text += &format!("cluster  {}, {ranks} ranks\n", cluster.describe());
    text += &format!("context  {} tokens, with full KV caches\n", output::count(*capacity as u64));
    if let Aim::Requests { prompt, output } = aim {
        let [prompt, output] = [prompt, output].map(|tokens| output::count(*tokens as u64));
        text += &format!("requests {prompt} input tokens, {output} output tokens\n");
    }
    let is_prefill = matches!(aim, Aim::Prefill { .. });
    let of_what = if is_prefill { "prompt tokens/s" } else { "new tokens/s" };
    let mut table =
        Table::new(["replica", "replicas", "slots", "prompt", "token", of_what, "memory"]);
    for way in &found.ways {
        let mark = if way.fits() { "✓" } else { "✗" };
        table.row([
            format!("{mark} {}", layout(way)),
            way.mesh.dp.to_string(),
            way.slots.to_string(),
            Seconds(way.prompt_s).to_string(),
            if is_prefill { "-".to_owned() } else { Seconds(way.token_s).to_string() },
            output::number(way.tokens_per_s),
            way.need.to_string(),
        ]);
    }
    text += &format!("\n{}\n", table.text());
    let Some(best) = found.ways.first() else { return text };
    text += &match &found.plan {
        Some(plan) => taken(subject, found, best, plan),
        None => refused(subject, found, best),
    };
    text + "\nslots: concurrent sequences of a replica; prompt: prefill of one; token: time per \
            output token with all slots taken; tokens/s and memory (upper bound): of all ranks\n"
}

/// The way to take, and why.
fn taken(subject: &Subject<'_>, found: &Found, best: &Way, plan: &Plan) -> String {
    let figure = output::number(best.tokens_per_s);
    let what = match subject.aim {
        Aim::Prefill { .. } => "tokens of prompts/s",
        Aim::Decode { .. } | Aim::Requests { .. } => "new tokens/s",
    };
    let origin = plan.predictions.get("token_s").map_or("", |told| told.origin.as_str());
    let (layout, reason) = (layout(best), reason(subject, found));
    let replicas = match best.mesh.dp {
        1 => "one replica".to_owned(),
        many => format!("{many} replicas"),
    };
    format!("✓ take {layout}, {replicas}: {figure} {what}, {reason} ({origin})\n")
}

/// Why a way is the one to take.
fn reason(subject: &Subject<'_>, found: &Found) -> String {
    let fitting = found.ways.iter().filter(|way| way.fits()).count();
    let what = match subject.aim {
        Aim::Prefill { .. } => "tokens of prompts",
        Aim::Decode { .. } | Aim::Requests { .. } => "new tokens",
    };
    match fitting {
        1 => "the only mesh that fits".to_owned(),
        _ => format!("the most {what} per second of the {fitting} meshes that fit"),
    }
}

/// Why nothing fits.
fn refused(subject: &Subject<'_>, found: &Found, nearest: &Way) -> String {
    let have = nearest.have;
    let fitting: Vec<&Way> = found.ways.iter().filter(|way| way.has_room()).collect();
    if fitting.is_empty() {
        let missing = Bytes(nearest.need.0.saturating_sub(have.0));
        let layout = layout(nearest);
        return format!("✗ nothing fits in {have}: {layout} lacks {missing}\n");
    }
    let least =
        |of: fn(&Way) -> f64| fitting.iter().map(|way| of(way)).fold(f64::INFINITY, f64::min);
    let [token, first] = [least(|way| way.token_s), least(|way| way.prompt_s)].map(Seconds);
    let token = match subject.aim {
        Aim::Prefill { .. } => String::new(),
        Aim::Decode { .. } | Aim::Requests { .. } => format!("a token takes {token} at least, "),
    };
    format!("✗ what fits in {have} is not as soon: {token}a prompt {first} at least\n")
}
