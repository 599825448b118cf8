//! `plan`, `fit` and `explain` on a cluster of several groups of devices: a batch is shared over
//! them, or stages lie on one after another.

use std::time::Instant;

use ir::{DType, Diagnostic};
use kernels::{Bytes, Seconds};
use planner::check::groups::{Work, check_groups};
use planner::cluster::{Cluster, Memory, Power};
use planner::configuration::Configuration;
use planner::estimate::step::Breakdown;
use planner::estimate::workload::Workload;
use planner::estimate::{Job, style};
use planner::space::across::across;
use planner::space::ask::EVALUATIONS_MAX;
use planner::space::groups::{self, Grouped};
use serde_json::{Value, json};

use super::{Aim, arithmetic, count, element_type, model};
use crate::cache;
use crate::failure::{Exit, Failure, usage};
use crate::output::{self, Table};
use crate::verbs::plan::{Asked, PlanArgs};

/// How much slower the other kind of plan may be to be told. Chosen.
const TOLD: f64 = 3.0;

/// A question about groups, with everything that it borrows.
#[derive(Clone, Debug)]
pub struct Mixed {
    /// What a step computes.
    pub work: Workload,
    /// The groups.
    pub cluster: Cluster,
    global_batch: u32,
    dtype: DType,
    /// Bytes of a device that a job may use, where the user limits them.
    memory_bytes: Option<f64>,
}

impl Mixed {
    /// What is asked about, on all devices of all groups; `watts` are what each draws, where the
    /// groups do not say.
    pub fn new(asked: &Asked, mut cluster: Cluster, watts: Option<f64>) -> Result<Mixed, Failure> {
        let devices = cluster.devices().unwrap_or(0);
        if let Some(ranks) = asked.place.ranks.filter(|ranks| *ranks != devices) {
            let headline = format!("{ranks} ranks, and the groups have {devices}");
            return Err(usage("--ranks", headline)
                .help(format!("write --devices {devices}"))
                .into());
        }
        if let Some(watts) = watts {
            for group in &mut cluster.groups {
                group.device.power = Some(Power::constant(watts, "--watts"));
            }
        }
        Ok(Mixed {
            work: model(asked)?.work,
            global_batch: count("--gbs", asked.gbs.unwrap_or(devices.max(8)))?,
            dtype: element_type(asked.dtype, &cluster)?,
            memory_bytes: asked.limited.all_limits()?.memory_bytes(),
            cluster,
        })
    }

    /// The same of what was read already.
    pub fn of(work: Workload, cluster: Cluster, global_batch: u32, dtype: DType) -> Mixed {
        Mixed { work, cluster, global_batch, dtype, memory_bytes: None }
    }

    /// What layouts of the groups cost, written one after another with `;` between them, `-` for a
    /// group that does nothing; `change` may change each. `job` is what is trained.
    pub fn score(
        &self,
        (flag, text): (&str, &str),
        change: &dyn Fn(Configuration) -> Configuration,
        question: &groups::Asked<'_>,
    ) -> Result<Grouped, Failure> {
        let texts: Vec<&str> = text.split(';').map(str::trim).collect();
        let count = self.cluster.groups.len();
        if texts.len() != count {
            let headline = format!("{} layouts, and the cluster has {count} groups", texts.len());
            let help = "write one for each group with `;` between them, `-` for none";
            return Err(usage(flag, headline).help(help).into());
        }
        let read = |text: &&str| match *text {
            "-" => Ok(None),
            text => text.parse().map(|c| Some(change(c))),
        };
        let layouts =
            texts.iter().map(read).collect::<Result<Vec<_>, _>>().map_err(Failure::Input)?;
        Ok(Grouped::Shares(groups::score(question, &layouts)?))
    }

    /// Samples of a step.
    pub fn global_batch(&self) -> usize {
        self.global_batch as usize
    }

    /// Tokens of a step.
    pub fn tokens(&self) -> f64 {
        f64::from(self.global_batch) * f64::from(self.work.seq)
    }

    /// The question in the planner's form.
    pub fn question(&self, asked: &Asked) -> Result<groups::Asked<'_>, Failure> {
        let global_batch = u64::from(self.global_batch);
        Ok(groups::Asked {
            work: &self.work,
            cluster: &self.cluster,
            style: style::OURS,
            job: Job { global_batch, arithmetic: arithmetic(self.dtype) },
            limits: asked.limited.all_limits()?,
            evaluations_max: EVALUATIONS_MAX,
            for_memory: false,
            set: None,
            stop: &|| false,
        })
    }

    /// The best way over the groups.
    pub fn best(&self, asked: &Asked, aim: Aim) -> Result<Grouped, Failure> {
        self.best_until(asked, aim, &|| false)
    }

    /// The best way that is found before it is time to stop.
    fn best_until(
        &self,
        asked: &Asked,
        aim: Aim,
        stop: &dyn Fn() -> bool,
    ) -> Result<Grouped, Failure> {
        let mut question = groups::Asked { stop, ..self.question(asked)? };
        question.for_memory = aim == Aim::Memory;
        let worth: &dyn Fn(&Grouped) -> f64 = match aim {
            Aim::Time | Aim::Memory => {
                let way = groups::plan(&question)?;
                if cfg!(debug_assertions) {
                    self.doubt(&way);
                }
                return Ok(way);
            }
            Aim::Cost => &|way| f64::from(way.devices()) * way.step_time_s(),
            Aim::Energy => &|way| way.joules(&self.cluster).unwrap_or(f64::INFINITY),
            Aim::Pareto => {
                let headline = "a frontier is found for devices that are alike";
                return Err(usage("--objective", headline).help("use time, or memory").into());
            }
        };
        let ways = groups::of_each_set(&question)?.into_iter().map(|(_, way)| way);
        let best = ways.min_by(|a, b| worth(a).total_cmp(&worth(b)));
        Ok(best.expect("a set of groups has a way, or this is refused"))
    }

    /// Stops where a plan is not legal, by code that did not search for it.
    fn doubt(&self, way: &Grouped) {
        let Mixed { work, cluster, global_batch, .. } = self;
        let wrong = check_groups(&Work { work, cluster, global_batch: *global_batch }, way);
        assert!(wrong.is_empty(), "a plan that is found is legal: {wrong:?}");
    }

    /// The fastest way of each set of groups.
    pub fn ways(&self, asked: &Asked) -> Result<Vec<Grouped>, Failure> {
        let ways = groups::of_each_set(&self.question(asked)?)?;
        Ok(ways.into_iter().map(|(_, way)| way).collect())
    }

    /// What is asked about, in three lines.
    pub fn header(&self) -> String {
        let parameters = output::count(self.work.parameters());
        let mut text = format!("model    {}: {parameters} parameters", self.work.name);
        text += &format!(" in {}\ncluster  {}\n", self.dtype, self.cluster.describe());
        let samples = output::count(self.global_batch.into());
        text += &format!("step     {samples} samples of {} tokens\n", self.work.seq);
        text
    }

    fn unknown_power(&self) -> Diagnostic {
        let headline = format!("it is not known what the devices of `{}` draw", self.cluster.name);
        let help = "write `--watts N`, or `[group.device.power]` with `busy` and `idle`";
        usage("--objective", headline).help(help)
    }

    /// What the groups do, in one text.
    pub fn text(&self, way: &Grouped) -> String {
        let rows = rows(self, way);
        let plans =
            rows.iter().filter_map(|row| Some(format!("{}: {}", row.group.name, row.plan?)));
        plans.collect::<Vec<_>>().join("; ")
    }

    fn names(&self, way: &Grouped) -> Vec<&str> {
        let name = |(group, _, _): &(usize, u32, f64)| self.cluster.groups[*group].name.as_str();
        way.used().iter().map(name).collect()
    }
}

/// Answers `plan`.
pub(super) fn plan(args: &PlanArgs, cluster: Cluster) -> Result<Exit, Failure> {
    let asked = &args.asked;
    let mixed = Mixed::new(asked, cluster, args.watts)?;
    let draws = mixed.cluster.groups.iter().all(|group| group.device.power.is_some());
    if args.objective == Aim::Energy && !draws {
        return Err(mixed.unknown_power().into());
    }
    // What a clock has cut off is no one's answer, and a file is written each time.
    let may_be_kept = args.budget.is_none() && args.output.is_none();
    let key = asked.key("plan-groups", &(&mixed, args)).filter(|_| may_be_kept);
    cache::answer(key, || found(args, &mixed))
}

fn found(args: &PlanArgs, mixed: &Mixed) -> Result<(Exit, String), Failure> {
    let start = Instant::now();
    let stop = || args.budget.is_some_and(|budget_s| start.elapsed().as_secs_f64() > budget_s);
    let way = mixed.best_until(&args.asked, args.objective, &stop)?;
    let document = document(mixed, &way);
    if let Some(path) = &args.output {
        let text = format!("{document:#}\n");
        std::fs::write(path, text).map_err(runtime::Error::io("write", path.as_ref()))?;
        output::note(&format!("wrote {path}"));
    }
    let text = match (args.asked.json, args.plan) {
        (true, _) => format!("{document:#}"),
        (false, true) => mixed.text(&way),
        (false, false) => mixed.header() + &page(mixed, &way),
    };
    Ok((Exit::Success, text))
}

/// Whether no device holds too much.
pub fn fits(way: &Grouped) -> bool {
    match way {
        Grouped::Stages(_) => true,
        Grouped::Shares(shared) => {
            shared.shares.iter().all(|share| share.chosen.as_ref().is_none_or(|chosen| chosen.fits))
        }
    }
}

/// A plan over groups, as JSON.
pub fn document(mixed: &Mixed, way: &Grouped) -> Value {
    let [low, high] = way.interval_s();
    let (shared, across) = match way {
        Grouped::Shares(shared) => (Some(shared), None),
        Grouped::Stages(across) => (None, Some(across)),
    };
    json!({
        "schema": "gantline.plan-groups/1",
        "kind": kind(way),
        "model": mixed.work.name,
        "params": mixed.work.parameters(),
        "cluster": mixed.cluster.describe(),
        "devices": mixed.cluster.devices(),
        "used_devices": way.devices(),
        "gbs": mixed.global_batch,
        "seq": mixed.work.seq,
        "dtype": mixed.dtype.name(),
        "step_time_s": way.step_time_s(),
        "step_time_low_s": low,
        "step_time_high_s": high,
        "tokens_per_s": mixed.tokens() / way.step_time_s(),
        "energy_j": way.joules(&mixed.cluster),
        "exchange_s": shared.map(|shared| shared.exchange_s),
        "piece": shared.map(|shared| shared.piece),
        "rest": shared.map(|shared| shared.rest),
        "nearest_batches": shared.map(|shared| &shared.nearest),
        "searched": shared.map(|shared| shared.searched),
        "microbatch_count": across.map(|across| across.microbatch_count),
        "all_cuts": across.map(|across| across.all_cuts),
        "complete": match way {
            Grouped::Shares(shared) => shared.complete,
            Grouped::Stages(across) => across.complete,
        },
        "groups": rows(mixed, way).iter().map(Row::told).collect::<Vec<_>>(),
    })
}

/// What one group does.
struct Row<'a> {
    group: &'a Cluster,
    first_rank: u32,
    ranks: u32,
    samples: u32,
    first_layer: u32,
    layers: u32,
    /// Seconds of its step, or of a micro-batch on its slowest stage.
    seconds: Option<f64>,
    need_bytes: Option<f64>,
    have_bytes: f64,
    plan: Option<&'a Configuration>,
}

impl Row<'_> {
    fn told(&self) -> Value {
        json!({
            "group": self.group.name,
            "device": self.group.device.name,
            "first_rank": self.first_rank,
            "ranks": self.ranks,
            "samples": self.samples,
            "first_layer": self.first_layer,
            "layers": self.layers,
            "text": self.plan.map(ToString::to_string),
            "plan": self.plan,
            "step_time_s": self.seconds,
            "peak_mem_bytes": self.need_bytes,
            "have_bytes": self.have_bytes,
        })
    }
}

fn rows<'a>(mixed: &'a Mixed, way: &'a Grouped) -> Vec<Row<'a>> {
    let group = |at: usize| &mixed.cluster.groups[at];
    let have = |at: usize| {
        let (Memory::PerRank(bytes) | Memory::PerNode(bytes)) = group(at).memory();
        mixed.memory_bytes.unwrap_or(f64::INFINITY).min(bytes as f64)
    };
    match way {
        Grouped::Shares(shared) => {
            let row = |share: &'a groups::Share| {
                let chosen = share.chosen.as_ref();
                Row {
                    group: group(share.group),
                    first_rank: share.first_rank,
                    ranks: share.ranks,
                    samples: share.samples,
                    first_layer: 0,
                    layers: chosen.map_or(0, |_| mixed.work.depth()),
                    seconds: chosen.map(|chosen| chosen.estimate.step_time_s),
                    need_bytes: chosen.map(|chosen| chosen.estimate.memory.total_bytes()),
                    have_bytes: have(share.group),
                    plan: chosen.map(|chosen| &chosen.configuration),
                }
            };
            shared.shares.iter().map(row).collect()
        }
        Grouped::Stages(across) => {
            let row = |part: &'a planner::space::across::Part| Row {
                group: group(part.group),
                first_rank: part.first_rank,
                ranks: part.ranks,
                samples: mixed.global_batch,
                first_layer: part.first_layer,
                layers: part.configuration.stage_layers.iter().sum(),
                seconds: Some(part.slowest_s),
                need_bytes: Some(part.peak_bytes),
                have_bytes: part.have_bytes,
                plan: Some(&part.configuration),
            };
            across.parts.iter().map(row).collect()
        }
    }
}

fn table(mixed: &Mixed, way: &Grouped) -> String {
    let is_line = matches!(way, Grouped::Stages(_));
    let (what, time) = if is_line { ("layers", "stage") } else { ("samples", "step") };
    let mut table = Table::new(["group", "ranks", what, time, "memory", "of", "plan"]);
    for row in rows(mixed, way) {
        let last_layer = row.first_layer + row.layers.max(1) - 1;
        let bytes = |bytes: f64| Bytes(bytes as u64).to_string();
        let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        table.row([
            row.group.name.clone(),
            format!("{}..{}", row.first_rank, row.first_rank + row.ranks - 1),
            match is_line {
                true => format!("{}..{last_layer}", row.first_layer),
                false => row.samples.to_string(),
            },
            or_none(row.seconds.map(|seconds| Seconds(seconds).to_string())),
            or_none(row.need_bytes.map(bytes)),
            bytes(row.have_bytes),
            or_none(row.plan.map(ToString::to_string)),
        ]);
    }
    table.text()
}

/// A plan over groups, for people.
pub fn page(mixed: &Mixed, way: &Grouped) -> String {
    let seconds = way.step_time_s();
    let rate = output::count((mixed.tokens() / seconds) as u64);
    let mut text = format!("\n{}\nstep {}", table(mixed, way), Seconds(seconds));
    match way {
        Grouped::Shares(shared) => {
            let exchange = Seconds(shared.exchange_s);
            text += &format!(", of which {exchange} to exchange gradients between groups; ");
            text += &format!("{rate} tokens/s\nshares are multiples of {}", shared.piece);
            if shared.rest > 0 {
                text += &format!(", one with {} more", shared.rest);
            }
            // Of layouts that were given nothing was searched.
            text += match (shared.complete, shared.searched) {
                (true, 0) => "\n",
                (true, _) => "; no other is better\n",
                (false, _) => "\nthe search was cut off\n",
            };
            if !shared.nearest.is_empty() {
                let batches: Vec<String> = shared.nearest.iter().map(u32::to_string).collect();
                let batches = batches.join(" or ");
                text += &format!("{} samples cannot be shared by all groups", mixed.global_batch);
                text += &format!(" within the limits; {batches} can\n");
            }
        }
        Grouped::Stages(across) => {
            let copies = across.parts[0].configuration.dp;
            text +=
                &format!("; {rate} tokens/s\n{copies} copies of one pipeline over all groups, ");
            text += &format!("{} micro-batches each; ", across.microbatch_count);
            text += match across.all_cuts {
                true => "all cuts of the layers were tried\n",
                false => "its cut is balanced, and no layer moved makes it faster\n",
            };
            if !across.complete {
                text += "the search was cut off\n";
            }
        }
    }
    text
}

/// Where a step goes: on the slowest group, where a batch is shared.
fn breakdown(way: &Grouped) -> Option<Breakdown> {
    match way {
        Grouped::Stages(across) => Some(across.breakdown),
        Grouped::Shares(shared) => {
            let chosen = shared.shares.iter().filter_map(|share| share.chosen.as_ref());
            let estimates = chosen.map(|chosen| &chosen.estimate);
            let slowest = estimates.max_by(|a, b| a.step_time_s.total_cmp(&b.step_time_s));
            slowest.map(|slowest| slowest.breakdown)
        }
    }
}

fn kind(way: &Grouped) -> &'static str {
    match way {
        Grouped::Shares(_) => "shares",
        Grouped::Stages(_) => "stages",
    }
}

/// Answers `explain`: where a step goes, and what other ways over the groups would take.
pub(super) fn explain(asked: &Asked, cluster: Cluster) -> Result<Exit, Failure> {
    let mixed = Mixed::new(asked, cluster, None)?;
    let key = asked.key("explain-groups", &(&mixed, asked));
    cache::answer(key, || Ok((Exit::Success, explanation(&mixed, asked)?)))
}

/// Other ways: on fewer groups, and of the other kind.
fn others(mixed: &Mixed, asked: &Asked, best: &Grouped) -> Result<Vec<Grouped>, Failure> {
    let question = mixed.question(asked)?;
    let mut all = mixed.ways(asked)?;
    match best {
        Grouped::Stages(_) => all.extend(groups::share(&question).ok().map(Grouped::Shares)),
        Grouped::Shares(shared) => {
            let across = across(&question, TOLD * shared.step_time_s);
            all.extend(across.map_err(Failure::from)?.map(Grouped::Stages));
        }
    }
    let what = |way: &Grouped| (kind(way), mixed.names(way), way.step_time_s().to_bits());
    all.retain(|way| what(way) != what(best));
    all.sort_by(|a, b| a.step_time_s().total_cmp(&b.step_time_s()));
    all.dedup_by(|a, b| what(a) == what(b));
    Ok(all)
}

fn explanation(mixed: &Mixed, asked: &Asked) -> Result<String, Failure> {
    let best = mixed.best(asked, Aim::Time)?;
    let others = others(mixed, asked, &best)?;
    let parts = breakdown(&best).unwrap_or_default();
    if asked.json {
        let mut document = document(mixed, &best);
        document["schema"] = json!("gantline.explain-groups/1");
        document["breakdown"] = json!(parts);
        let told = |way: &Grouped| {
            json!({
                "kind": kind(way),
                "groups": mixed.names(way),
                "devices": way.devices(),
                "step_time_s": way.step_time_s(),
            })
        };
        document["others"] = others.iter().map(told).collect();
        return Ok(format!("{document:#}"));
    }
    let mut text = mixed.header() + &page(mixed, &best);
    let total = parts.total_s();
    text += match best {
        Grouped::Shares(_) => "\nWhere a step goes, on the slowest group\n",
        Grouped::Stages(_) => "\nWhere a step goes\n",
    };
    for (name, seconds) in parts.parts().iter().filter(|(_, s)| *s > 0.0) {
        let (time, share) = (Seconds(*seconds).to_string(), 100.0 * seconds / total);
        text += &format!("  {name:<12}{time:>10} {share:>6.1}%\n");
    }
    text += "\nWhy not…\n";
    for way in &others {
        let more = Seconds((way.step_time_s() - best.step_time_s()).max(0.0)).to_string();
        text += &format!("  {} on {}  +{more}\n", kind(way), mixed.names(way).join(", "));
    }
    Ok(text)
}

/// Answers `fit`: what each group holds in the fastest way, if there is one.
pub(super) fn fit(asked: &Asked, cluster: Cluster) -> Result<Exit, Failure> {
    let mixed = Mixed::new(asked, cluster, None)?;
    let best = mixed.best(asked, Aim::Time);
    if asked.json {
        let way = best.as_ref().ok();
        let rows = way.map(|way| rows(&mixed, way).iter().map(Row::told).collect::<Vec<_>>());
        output::answer_json(&json!({
            "schema": "gantline.fit-groups/1",
            "model": mixed.work.name,
            "cluster": mixed.cluster.describe(),
            "devices": mixed.cluster.devices(),
            "fits": way.is_some(),
            "step_time_s": way.map(Grouped::step_time_s),
            "rows": rows.unwrap_or_default(),
        }));
        return Ok(if way.is_some() { Exit::Success } else { Exit::Infeasible });
    }
    let best = best?;
    let mut text = format!("{}\n{}\n", mixed.header(), table(&mixed, &best));
    text += &format!("✓ fits: {} a step\n", Seconds(best.step_time_s()));
    output::answer(&text);
    Ok(Exit::Success)
}
