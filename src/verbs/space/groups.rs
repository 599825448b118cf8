//! `plan` on a cluster of several groups of devices: the batch is shared over them.

use kernels::{Bytes, Seconds};
use planner::cluster::Cluster;
use planner::estimate::described::described;
use planner::estimate::{Job, style};
use planner::space::ask::EVALUATIONS_MAX;
use planner::space::groups::{self, Shared};
use serde_json::{Value, json};

use super::{Aim, arithmetic, count};
use crate::cache;
use crate::failure::{Exit, Failure, usage};
use crate::output::{self, Table};
use crate::verbs::plan::PlanArgs;

/// Answers `plan`.
pub(super) fn plan(args: &PlanArgs, cluster: &Cluster) -> Result<Exit, Failure> {
    let asked = &args.asked;
    if args.objective != Aim::Time || args.watts.is_some() || args.budget.is_some() {
        let headline = "shares of a batch are searched for time, without a clock";
        return Err(usage("--objective", headline).help("leave it out").into());
    }
    let devices = cluster.devices().unwrap_or(0);
    if let Some(ranks) = asked.place.ranks.filter(|ranks| *ranks != devices) {
        let headline = format!("{ranks} ranks, and the groups have {devices}");
        return Err(usage("--ranks", headline).help(format!("write --devices {devices}")).into());
    }
    let key = asked.key("plan-groups", &(cluster, args)).filter(|_| args.output.is_none());
    cache::answer(key, || found(args, cluster))
}

fn found(args: &PlanArgs, cluster: &Cluster) -> Result<(Exit, String), Failure> {
    let asked = &args.asked;
    let seq = asked.seq.map(|seq| count("--seq", seq)).transpose()?;
    let work = described(&asked.model, seq)?.work;
    let dtype = asked.dtype.unwrap_or(ir::DType::BF16);
    let batch = asked.gbs.unwrap_or(asked.place.ranks(cluster));
    let shared = groups::share(&groups::Asked {
        work: &work,
        cluster,
        style: style::OURS,
        job: Job { global_batch: batch as u64, arithmetic: arithmetic(dtype) },
        limits: asked.limited.all_limits()?,
        evaluations_max: EVALUATIONS_MAX,
    })?;
    let tokens = batch as f64 * f64::from(work.seq);
    let document = json!({
        "schema": "gantline.plan-groups/1",
        "model": work.name,
        "params": work.parameters(),
        "cluster": cluster.describe(),
        "devices": asked.place.ranks(cluster),
        "gbs": batch,
        "seq": work.seq,
        "dtype": dtype.name(),
        "step_time_s": shared.step_time_s,
        "tokens_per_s": tokens / shared.step_time_s,
        "exchange_s": shared.exchange_s,
        "piece": shared.piece,
        "searched": shared.searched,
        "groups": rows(cluster, &shared),
    });
    if let Some(path) = &args.output {
        let text = format!("{document:#}\n");
        std::fs::write(path, text).map_err(runtime::Error::io("write", path.as_ref()))?;
        output::note(&format!("wrote {path}"));
    }
    let text = match asked.json {
        true => format!("{document:#}"),
        false => {
            let parameters = output::count(work.parameters());
            let head = format!("model    {}: {parameters} parameters in {dtype}\n", work.name);
            head + &page(cluster, &shared, tokens)
        }
    };
    Ok((Exit::Success, text))
}

fn rows(cluster: &Cluster, shared: &Shared) -> Vec<Value> {
    let row = |share: &groups::Share| {
        let estimate = share.chosen.as_ref().map(|chosen| &chosen.estimate);
        json!({
            "group": cluster.groups[share.group].name,
            "device": cluster.groups[share.group].device.name,
            "first_rank": share.first_rank,
            "ranks": share.ranks,
            "samples": share.samples,
            "text": share.chosen.as_ref().map(|chosen| chosen.configuration.to_string()),
            "plan": share.chosen.as_ref().map(|chosen| &chosen.configuration),
            "step_time_s": estimate.map(|estimate| estimate.step_time_s),
            "peak_mem_bytes": estimate.map(|estimate| estimate.memory.total_bytes()),
        })
    };
    shared.shares.iter().map(row).collect()
}

fn page(cluster: &Cluster, shared: &Shared, tokens: f64) -> String {
    let mut table = Table::new(["group", "ranks", "samples", "step", "memory", "plan"]);
    for share in &shared.shares {
        let group = &cluster.groups[share.group];
        let last = share.first_rank + share.ranks - 1;
        let of = |text: &dyn Fn(&planner::space::ask::Chosen) -> String| {
            share.chosen.as_ref().map_or("-".to_owned(), text)
        };
        table.row([
            group.name.clone(),
            format!("{}..{last}", share.first_rank),
            share.samples.to_string(),
            of(&|chosen| Seconds(chosen.estimate.step_time_s).to_string()),
            of(&|chosen| Bytes(chosen.estimate.memory.total_bytes() as u64).to_string()),
            of(&|chosen| chosen.configuration.to_string()),
        ]);
    }
    let mut text = format!("cluster  {}\n\n{}", cluster.describe(), table.text());
    text += &format!(
        "\nstep {}, of which {} to exchange gradients between groups; {} tokens/s\n",
        Seconds(shared.step_time_s),
        Seconds(shared.exchange_s),
        output::count((tokens / shared.step_time_s) as u64)
    );
    text += &format!(
        "shares are multiples of {}; no other is faster ({} searches)\n",
        shared.piece, shared.searched
    );
    text
}
