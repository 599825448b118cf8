//! `plan` and `fit` on a cluster of several groups of devices: a batch is shared over them, or
//! stages lie on one after another.

pub mod explain;
pub mod given;
pub mod page;

use std::collections::BTreeSet;
use std::time::Instant;

use ir::{DType, Diagnostic};
use kernels::Seconds;
use planner::check::groups::check_groups;
use planner::cluster::{Cluster, Power};
use planner::estimate::Job;
use planner::estimate::described::Described;
use planner::estimate::profile::{self, Profile, Stated};
use planner::estimate::workload::Workload;
use planner::search::groups::{self, Grouped};
use planner::search::request::EVALUATIONS_MAX;

use self::page::{Row, document, page, rows, table};
use super::{
    arithmetic, assumed, assumption_lines, count, element_type, noted_model, products_note,
    samples_of, set_power,
};
use crate::verbs::assume;
use crate::verbs::flags::{Aim, PlanArgs, RequestFlags};

use crate::documents::{self, Document};
use crate::failure::{Exit, Failure, or_reason, usage};
use crate::job::Precision;
use crate::{cache, output};

/// A question about groups, with everything that it borrows.
#[derive(Clone, Debug)]
pub struct Mixed {
    /// What a step computes.
    pub work: Workload,
    /// The groups.
    pub cluster: Cluster,
    global_batch: u32,
    /// Tokens of a sample; those of a graph are in its own samples.
    seq: u32,
    dtype: Precision,
    /// Bytes of a device that a job may use, where the user limits them.
    memory_bytes: Option<f64>,
    /// What the user states of the executor.
    stated: Stated,
}

impl Mixed {
    /// What is asked about, on all devices of all groups; `watts` are what each draws, where the
    /// groups do not say.
    pub fn new(
        asked: &RequestFlags,
        mut cluster: Cluster,
        watts: Option<f64>,
    ) -> Result<Mixed, Failure> {
        asked.refuse_tool("lays all devices out alike, and the cluster has groups")?;
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
        let stated = asked.assumed.stated()?;
        cluster.groups.iter_mut().for_each(|group| set_power(group, &stated));
        let Described { work, tokens: seq, .. } = noted_model(asked)?;
        note_common_type(asked.dtype, &cluster);
        let notes = cluster
            .groups
            .iter()
            .filter_map(|group| products_note(&profile::GANTLINE.stating(stated).on(group), group));
        notes.collect::<BTreeSet<String>>().iter().for_each(|note| output::note(note));
        Ok(Mixed {
            work,
            seq,
            global_batch: count("--gbs", asked.gbs.unwrap_or(devices.max(8)))?,
            dtype: element_type(asked.dtype, &cluster)?,
            memory_bytes: asked.all_limits()?.memory_bytes(),
            stated,
            cluster,
        })
    }

    /// The request for a model and a cluster that have been read already.
    pub fn of(
        described: Described,
        cluster: Cluster,
        global_batch: u32,
        dtype: Precision,
    ) -> Mixed {
        let Described { work, tokens: seq, .. } = described;
        let stated = Stated::NOTHING;
        Mixed { work, cluster, global_batch, seq, dtype, memory_bytes: None, stated }
    }

    /// The same with what a user states of an executor that goes by `profile`.
    pub fn stating(self, stated: Stated) -> Mixed {
        Mixed { stated, ..self }
    }

    /// How programs are assumed to execute.
    fn profile(&self) -> Profile {
        let profile = profile::GANTLINE.stating(self.stated);
        assumed(profile, arithmetic(self.dtype), &self.work)
    }

    /// So, as documents have it.
    pub fn executor(&self) -> documents::Executor {
        documents::Executor::of(&self.profile(), None)
    }

    /// Samples of a step.
    pub fn global_batch(&self) -> usize {
        self.global_batch as usize
    }

    /// Tokens of a step.
    pub fn tokens(&self) -> f64 {
        f64::from(self.global_batch) * f64::from(self.seq)
    }

    /// The question in the planner's form.
    pub fn question(&self, asked: &RequestFlags) -> Result<groups::GroupRequest<'_>, Failure> {
        let global_batch = u64::from(self.global_batch);
        Ok(groups::GroupRequest {
            work: &self.work,
            cluster: &self.cluster,
            profile: profile::GANTLINE.stating(self.stated),
            job: Job { global_batch, arithmetic: arithmetic(self.dtype) },
            limits: asked.all_limits()?,
            evaluations_max: EVALUATIONS_MAX,
            for_memory: false,
            set: None,
            stop: &|| false,
        })
    }

    /// The best way over the groups.
    pub fn best(&self, asked: &RequestFlags, aim: Aim) -> Result<Grouped, Failure> {
        self.best_until(asked, aim, &|| false)
    }

    /// The best way that is found before it is time to stop.
    fn best_until(
        &self,
        asked: &RequestFlags,
        aim: Aim,
        stop: &(dyn Fn() -> bool + Sync),
    ) -> Result<Grouped, Failure> {
        let mut question = groups::GroupRequest { stop, ..self.question(asked)? };
        question.for_memory = aim == Aim::Memory;
        let objective_value: &dyn Fn(&Grouped) -> f64 = match aim {
            Aim::Time | Aim::Memory => {
                let way = groups::plan(&question)?;
                if cfg!(debug_assertions) {
                    doubt(&question, &way);
                }
                return Ok(way);
            }
            Aim::Cost => &|way| self.objective_value(way) * way.step_time_s(),
            Aim::Energy => &|way| way.joules(&self.cluster).unwrap_or(f64::INFINITY),
            Aim::Pareto => {
                let headline = "a frontier is found for devices that are alike";
                return Err(usage("--objective", headline).help("use time, or memory").into());
            }
        };
        let ways = groups::of_each_set(&question)?.into_iter().map(|(_, way)| way);
        let best = ways.min_by(|a, b| objective_value(a).total_cmp(&objective_value(b)));
        Ok(best.expect("a set of groups has a way, or this is refused"))
    }

    /// Money for an hour of the devices that take part, where it is known of all groups; else their
    /// number.
    fn objective_value(&self, way: &Grouped) -> f64 {
        let groups = &self.cluster.groups;
        let price = |group: usize| Some(groups[group].price.as_ref()?.per_device_hour.value);
        let are_known = groups.iter().all(|group| group.price.is_some());
        let hourly = way.hourly(&price).filter(|_| are_known);
        hourly.unwrap_or_else(|| f64::from(way.devices()))
    }

    /// Money for an hour of the devices that take part, with its currency.
    pub fn hourly(&self, way: &Grouped) -> Option<(f64, &str)> {
        let price = |group: usize| self.cluster.groups[group].price.as_ref();
        let money = way.hourly(&|group| Some(price(group)?.per_device_hour.value))?;
        let (group, _, _) = *way.used().first()?;
        Some((money, &price(group)?.currency))
    }

    /// The fastest way of each set of groups.
    pub fn ways(&self, asked: &RequestFlags) -> Result<Vec<Grouped>, Failure> {
        let ways = groups::of_each_set(&self.question(asked)?)?;
        Ok(ways.into_iter().map(|(_, way)| way).collect())
    }

    /// What is asked about, in three lines.
    pub fn header(&self) -> String {
        let parameters = output::count(self.work.parameters());
        let mut text = format!("model    {}: {parameters} parameters", self.work.name);
        text += &format!(" in {}\ncluster  {}\n", self.dtype, self.cluster.describe());
        text += &samples_of(self.global_batch, self.seq);
        let profile = self.profile();
        text += &format!("executor {}\n{}", profile.describe(), assume::lines(&profile));
        text + &assumption_lines(&self.work)
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

/// Says why products are in a type that some group would not have chosen.
fn note_common_type(asked: Option<Precision>, cluster: &Cluster) {
    let usual = cluster.usual_dtype();
    let lacks = |group: &&Cluster| !group.multiplies(DType::BF16);
    let (None, Some(lacking)) = (asked, cluster.groups.iter().find(lacks)) else { return };
    if usual != DType::BF16 && cluster.groups.iter().any(|group| group.multiplies(DType::BF16)) {
        output::note(&format!(
            "all groups compute in {usual}: `{}` has no products in bf16",
            lacking.name
        ));
    }
}

/// Answers `plan`.
pub(super) fn plan(args: &PlanArgs, cluster: Cluster) -> Result<Exit, Failure> {
    let asked = &args.asked;
    let mixed = Mixed::new(asked, cluster, args.watts)?;
    if let Some(path) = &args.output
        && path.path().extension().is_some_and(|extension| extension == "plan")
    {
        let headline = "a plan over groups of devices has no text as `.plan` yet";
        return Err(usage("--output", headline).help("write JSON: `-o FILE.json`").into());
    }
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
    let document = document(mixed, &way).to_json();
    if let Some(path) = &args.output {
        let text = format!("{document:#}\n");
        std::fs::write(path, text).map_err(runtime::Error::io("write", path.as_ref()))?;
        output::note(&format!("wrote {path}"));
    }
    let text = match (args.asked.json, args.plan || args.name) {
        (true, _) => format!("{document:#}"),
        (false, true) => mixed.text(&way),
        (false, false) => mixed.header() + &page(mixed, &way),
    };
    Ok((Exit::Success, text))
}

/// Answers `fit`: what each group holds in the fastest way, if there is one.
pub(super) fn fit(asked: &RequestFlags, cluster: Cluster) -> Result<Exit, Failure> {
    let mixed = Mixed::new(asked, cluster, None)?;
    let best = mixed.best(asked, Aim::Time);
    if asked.json {
        let best = or_reason(best)?;
        let way = best.as_ref().ok();
        let rows = way.map(|way| rows(&mixed, way).iter().map(Row::told).collect::<Vec<_>>());
        let document = documents::FitGroups {
            model: mixed.work.name.clone(),
            cluster: mixed.cluster.describe(),
            devices: mixed.cluster.devices().unwrap_or_default() as u64,
            fits: way.is_some(),
            reason: best.as_ref().err().map(|no| no.headline.clone()),
            step_time_s: way.map(Grouped::step_time_s),
            rows: rows.unwrap_or_default(),
        };
        output::answer_json(&document.to_json());
        return Ok(if way.is_some() { Exit::Success } else { Exit::Infeasible });
    }
    let best = best?;
    let mut text = format!("{}\n{}\n", mixed.header(), table(&mixed, &best));
    text += &format!("✓ fits: {} a step\n", Seconds(best.step_time_s()));
    output::answer(&text);
    Ok(Exit::Success)
}

/// Stops where a plan is not legal, by code that did not search for it.
fn doubt(question: &groups::GroupRequest<'_>, way: &Grouped) {
    let wrong = check_groups(question, way);
    assert!(wrong.is_empty(), "a plan that is found is legal: {wrong:?}");
}
