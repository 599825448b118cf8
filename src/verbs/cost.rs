//! `cost` and `size`: how long a data set takes and for how much, how few devices are enough.

use planner::cluster::{Cluster, Kind, Power};
use planner::explain::{Explanation, explain};
use planner::goodput::Interruptions;
use planner::search::groups::Grouped;
use planner::search::request::SearchResult;

use super::gpus::groups::Mixed;
use super::gpus::{Subject, answer, set_power};
use super::inference;
use crate::argument::HOUR_S;
use crate::cache;
use crate::documents::{self, Document, SizeRow};
use crate::failure::{Exit, Failure, or_reason, usage};
use crate::output::or_document;
use crate::output::{self, Table};
use crate::verbs::flags::{
    Aim, Bill, CostArgs, DEVICES_MAX, Demand, JOULES_PER_KWH, RequestFlags, refuse_cpus,
};

/// What a run costs at one time of a step.
#[derive(Clone, Copy)]
struct Run {
    seconds: f64,
    device_hours: f64,
    money: Option<f64>,
    kwh: Option<f64>,
}

/// A plan as a bill sees it.
#[derive(Clone, Debug)]
struct Way {
    devices: u32,
    tokens: f64,
    /// Seconds of the shortest, the expected and the longest step.
    times: [f64; 3],
    joules: Option<f64>,
    /// Money for an hour of all devices.
    hourly: Option<f64>,
    plan: String,
}

impl Way {
    fn of(subject: &Subject, answer: &SearchResult, bill: &Bill) -> Way {
        let estimate = &answer.best[0].estimate;
        Way {
            devices: subject.devices,
            tokens: subject.tokens(),
            times: [estimate.step_time_low_s, estimate.step_time_s, estimate.step_time_high_s],
            joules: subject.joules(estimate),
            hourly: bill.hourly(&subject.cluster).map(|price| price * f64::from(subject.devices)),
            plan: answer.best[0].configuration.to_string(),
        }
    }

    fn over_groups(mixed: &Mixed, way: &Grouped, bill: &Bill) -> Way {
        let [low, high] = way.interval_s();
        let hourly = way.hourly(&|group| bill.hourly(&mixed.cluster.groups[group]));
        Way {
            devices: way.devices(),
            tokens: mixed.tokens(),
            times: [low, way.step_time_s(), high],
            joules: way.joules(&mixed.cluster),
            hourly,
            plan: mixed.text(way),
        }
    }

    /// The runs of the shortest, the expected and the longest step.
    fn runs(&self, bill: &Bill) -> (f64, [Run; 3]) {
        let steps = (bill.tokens.unwrap_or(0.0) / self.tokens).ceil();
        // Where steps are longer, computing and waiting are.
        let joules = |step_s: f64| Some(self.joules? * step_s / self.times[1]);
        let goodput = bill.interruptions(self.devices);
        let goodput = goodput.map_or(1.0, |all| all.goodput(all.best_interval_s()));
        let run = |step_s: f64| {
            let seconds = steps * step_s / goodput;
            Run {
                seconds,
                device_hours: seconds / HOUR_S * f64::from(self.devices),
                money: self.hourly.map(|price| price * seconds / HOUR_S),
                kwh: joules(step_s).map(|joules| steps * joules / JOULES_PER_KWH),
            }
        };
        (steps, self.times.map(run))
    }
}

fn row(run: &Run) -> documents::Run {
    documents::Run {
        time_s: run.seconds,
        device_hours: run.device_hours,
        money: run.money,
        energy_kwh: run.kwh,
    }
}

impl CostArgs {
    /// The cluster with devices that draw what was asked.
    pub(super) fn cluster(&self, asked: &RequestFlags) -> Result<Cluster, Failure> {
        let mut cluster = asked.place.cluster()?;
        refuse_cpus(&cluster, "`cost --ranks N` is answered for CPUs too")?;
        match self.bill.watts {
            Some(watts) => cluster.device.power = Some(Power::constant(watts, "--watts")),
            None if cluster.groups.is_empty() => {
                set_power(&mut cluster, &asked.assumed.stated()?);
            }
            None => {}
        }
        Ok(cluster)
    }
}

/// Refuses what only inference is asked, and training on nothing.
fn refuse_inference(args: &CostArgs) -> Result<(), Failure> {
    let Demand { prompt_tokens, rate } = args.demand;
    let given = [("--prompt-tokens", prompt_tokens), ("--rate", rate)];
    if let Some((flag, _)) = given.into_iter().find(|(_, number)| number.is_some()) {
        let headline = "training is on `--tokens`, as fast as it can be".to_owned();
        return Err(usage(flag, headline).help("leave it out, or write `--for inference`").into());
    }
    if args.bill.tokens.is_none() {
        let headline = "the number of tokens to train on is missing".to_owned();
        return Err(usage("--tokens", headline).help("write `--tokens 300B`").into());
    }
    Ok(())
}

/// Copies that serve have no checkpoints.
fn refuse_interruptions(args: &CostArgs) -> Result<(), Failure> {
    if args.bill.mtbf.is_none() {
        return Ok(());
    }
    let headline = "copies that answer save no checkpoints".to_owned();
    Err(usage("--mtbf", headline).help("leave it out, or ask about training").into())
}

/// The least share of the time that counts. Chosen: below, nobody trains.
const GOODPUT_MIN: f64 = 1e-3;

/// Why next to nothing of the time counts, where failures are so frequent.
fn standstill(way: &Way, args: &CostArgs) -> Option<String> {
    let all = args.bill.interruptions(way.devices)?;
    if all.goodput(all.best_interval_s()) >= GOODPUT_MIN {
        return None;
    }
    let [mtbf, save, restart] = [all.mtbf_s, all.save_s, all.restart_s].map(output::seconds);
    Some(format!(
        "one of {} devices fails every {mtbf}, a save takes {save} and a restart {restart}: next \
         to nothing of the time counts",
        way.devices
    ))
}

/// Refuses failures so frequent that next to nothing is saved between them.
fn check_progress(way: &Way, args: &CostArgs) -> Result<(), Failure> {
    let Some(headline) = standstill(way, args) else { return Ok(()) };
    let help = "write the mean time between failures of one device, such as `--mtbf 50000h`";
    Err(usage("--mtbf", headline).help(help).into())
}

/// The time between failures, between saves, and the share of the time that counts.
fn interrupted(way: &Way, args: &CostArgs) -> Option<documents::Interrupted> {
    let all = args.bill.interruptions(way.devices)?;
    let interval_s = all.best_interval_s();
    let goodput = all.goodput(interval_s);
    let Interruptions { mtbf_s, save_s, restart_s } = all;
    Some(documents::Interrupted { mtbf_s, save_s, restart_s, interval_s, goodput })
}

/// Answers `cost`: time, money and energy of a data set. No where the deadline is missed.
pub fn cost(args: &CostArgs) -> Result<Exit, Failure> {
    or_document(args.asked.json, costs(args))
}

fn costs(args: &CostArgs) -> Result<Exit, Failure> {
    if args.served.is_inference()? {
        refuse_interruptions(args)?;
        return inference::cost::cost(args);
    }
    refuse_inference(args)?;
    if args.asked.place.cluster()?.device.kind == Kind::Cpu {
        return on_cpus(args);
    }
    let cluster = args.cluster(&args.asked)?;
    if !cluster.groups.is_empty() {
        let mixed = Mixed::new(&args.asked, cluster, args.bill.watts)?;
        let key = args.asked.key("cost-groups", &(&mixed, args));
        return cache::answer(key, || {
            let best = mixed.best(&args.asked, Aim::Time)?;
            let way = Way::over_groups(&mixed, &best, &args.bill);
            let names = [&mixed.work.name, &mixed.cluster.describe(), &mixed.header()];
            bill(names, &way, args, (&mixed.cluster, Some(mixed.executor())))
        });
    }
    let subject = Subject::new(&args.asked, cluster)?;
    let key = args.asked.key("cost", &(&subject, args));
    cache::answer(key, || {
        let way = Way::of(&subject, &answer(&subject, &args.asked)?, &args.bill);
        let names = [&subject.work.name, &subject.cluster.describe(), &subject.header()];
        bill(names, &way, args, (&subject.cluster, Some(subject.executor())))
    })
}

/// Answers `cost` where ranks are threads or processes of CPUs, which are the devices: of the
/// fastest plan that is compiled.
fn on_cpus(args: &CostArgs) -> Result<Exit, Failure> {
    let (model, question) = args.asked.question()?;
    let found = crate::plan(&question.job())?;
    let Explanation { step_time_low_s, step_time_high_s, .. } = explain(&found);
    let step_s = found.best.time.seconds;
    let power = args.bill.watts.map(|watts| Power::constant(watts, "--watts"));
    let power = power.or_else(|| question.cluster.device.power.clone());
    let joules = power.map(|power| question.ranks as f64 * power.joules(step_s, step_s));
    let cluster = &question.cluster;
    let way = Way {
        devices: u32::try_from(question.ranks).unwrap_or(u32::MAX),
        hourly: args.bill.hourly(cluster).map(|price| price * question.ranks as f64),
        tokens: (question.global_batch_size * question.seq) as f64,
        times: [step_time_low_s, step_s, step_time_high_s],
        joules,
        plan: found.best.name.to_string(),
    };
    let header = super::plan::header(&model, &question);
    let names = [&question.model, &cluster.describe(), &header];
    let (exit, text) = bill(names, &way, args, (cluster, None))?;
    output::answer(&text);
    Ok(exit)
}

/// The prices of a bill, and what is missing for one of energy.
fn bases(args: &CostArgs, cluster: &Cluster, expected: &Run) -> String {
    let prices = args.bill.said(cluster);
    let mut text = if prices.is_empty() { prices } else { format!("\n{prices}") };
    text += &Bill::energy_basis(cluster, expected.kwh.is_some());
    text
}

/// What `cost` prints of a model, a cluster and a header; `executor` is that of GPUs.
fn bill(
    [model, name, header]: [&String; 3],
    way: &Way,
    args: &CostArgs,
    (cluster, executor): (&Cluster, Option<documents::Executor>),
) -> Result<(Exit, String), Failure> {
    check_progress(way, args)?;
    let (steps, [low, expected, high]) = way.runs(&args.bill);
    let deadline = args.bill.deadline;
    let meets = deadline.is_none_or(|deadline| expected.seconds <= deadline);
    let text = if args.asked.json {
        let document = documents::Cost {
            model: model.clone(),
            cluster: name.clone(),
            devices: way.devices.into(),
            tokens: args.bill.tokens.unwrap_or(0.0),
            steps,
            plan: way.plan.clone(),
            step_time_s: way.times[1],
            low: row(&low),
            expected: row(&expected),
            high: row(&high),
            deadline_s: deadline,
            meets_deadline: meets,
            currency: args.bill.currency(cluster),
            interrupted: interrupted(way, args),
            executor,
        };
        format!("{:#}", document.to_json())
    } else {
        let mut table = Table::new(["", "low", "expected", "high"]);
        let all = [low, expected, high];
        let row = |name: &str, text: &dyn Fn(&Run) -> String| {
            [name.to_owned(), text(&all[0]), text(&all[1]), text(&all[2])]
        };
        let number = output::number;
        table.row(row("time", &|run| output::seconds(run.seconds)));
        table.row(row("device hours", &|run| number(run.device_hours)));
        if expected.money.is_some() {
            let name = args.bill.money_name(cluster);
            table.row(row(&name, &|run| number(run.money.unwrap_or(0.0))));
        }
        if expected.kwh.is_some() {
            table.row(row("kWh", &|run| number(run.kwh.unwrap_or(0.0))));
        }
        let mut text = format!("{header}plan     {}\n", way.plan);
        text += &format!("run      {} steps\n", number(steps));
        if let Some(found) = interrupted(way, args) {
            text += &format!(
                "failures one in {}; saving after each {} of steps, {:.1}% of the time counts\n",
                output::seconds(found.mtbf_s),
                output::seconds(found.interval_s),
                100.0 * found.goodput
            );
        }
        text += &format!("\n{}", table.text());
        text += &bases(args, cluster, &expected);
        if let Some(deadline) = deadline {
            let mark = if meets { "✓ within" } else { "✗ more than" };
            text += &format!("\n{mark} {}\n", output::seconds(deadline));
        }
        text
    };
    Ok((if meets { Exit::Success } else { Exit::Infeasible }, text))
}

/// The part of the nodes that are enough to which `size` finds the fewest. Chosen: nobody plans
/// more exactly.
const NODES_PART: u64 = 32;
/// How many times the fewest devices `size` looks at for the cheapest, in steps of a quarter of
/// them. Chosen: beyond, exchanges cost more than memory saves.
const CHEAPEST_MAX: u64 = 3;

/// Samples of a step where `size` is not told. Chosen: enough to be shared by many devices.
const SIZE_BATCH: usize = 1024;

/// Answers `size`: the fewest devices that meet the deadline, and the cheapest ones.
pub fn size(args: &CostArgs) -> Result<Exit, Failure> {
    or_document(args.asked.json, enough(args))
}

fn enough(args: &CostArgs) -> Result<Exit, Failure> {
    if args.served.is_inference()? {
        refuse_interruptions(args)?;
        return inference::size::size(args);
    }
    refuse_inference(args)?;
    let Some(deadline) = args.bill.deadline else {
        return Err(usage("--deadline", "`size` needs a deadline".to_owned())
            .help("write `--deadline 30d`")
            .into());
    };
    if let Some(devices) = args.asked.place.ranks {
        let headline = format!("{devices} devices are given, and `size` looks for their number");
        return Err(usage("--devices", headline).help("leave it out, or use `cost`").into());
    }
    let preset = args.cluster(&args.asked)?;
    let mut asked = args.asked.clone();
    asked.gbs.get_or_insert(SIZE_BATCH);
    if !preset.groups.is_empty() {
        let mixed = Mixed::new(&asked, preset, args.bill.watts)?;
        let key = args.asked.key("size-groups", &(&mixed, args));
        return cache::answer(key, || fewest_groups(&mixed, args, deadline));
    }
    let subject = Subject::new(&asked, preset.clone())?;
    let key = args.asked.key("size", &(&subject, args));
    let about = (subject.open_header(), subject.executor());
    cache::answer(key, || smallest(&preset, args, deadline, &about))
}

/// What was found out about a number of devices.
type Tried = Result<(Way, Run), String>;

/// The fastest plan on `nodes` nodes, or why there is none.
fn on_nodes(
    preset: &Cluster,
    args: &CostArgs,
    deadline: f64,
    nodes: u64,
) -> Result<Tried, Failure> {
    let devices = nodes * preset.devices_per_node.unwrap_or(1) as u64;
    let mut asked = args.asked.clone();
    asked.gbs.get_or_insert(SIZE_BATCH);
    // What is looked for is not in the cluster's file.
    asked.place.ranks = Some(devices as usize);
    asked.place.nodes = Some(nodes as usize);
    let subject = Subject::quiet(&asked, args.cluster(&asked)?)?;
    let steps = (args.bill.tokens.unwrap_or(0.0) / subject.tokens()).ceil();
    let least_s = steps * subject.seconds_at_peak(devices as f64);
    let number = output::count(devices);
    if least_s > deadline {
        let least = output::seconds(least_s);
        return Ok(Err(format!(
            "{number} devices, the most that are tried, take {least} at their peak"
        )));
    }
    Ok(match or_reason(answer(&subject, &asked))? {
        Ok(found) => {
            let way = Way::of(&subject, &found, &args.bill);
            if let Some(why) = standstill(&way, args) {
                return Ok(Err(why));
            }
            let (_, [_, expected, _]) = way.runs(&args.bill);
            Ok((way, expected))
        }
        Err(no) => Err(format!("{number} devices: {}", no.headline)),
    })
}

/// What `size` prints: nodes are doubled until they are enough, then the fewest are sought between
/// the last two numbers, and more are looked at that may be cheaper. Not all numbers are tried: one
/// that divides well may be enough though a greater one is not.
fn smallest(
    preset: &Cluster,
    args: &CostArgs,
    deadline: f64,
    about: &(String, documents::Executor),
) -> Result<(Exit, String), Failure> {
    let node = preset.devices_per_node.unwrap_or(1) as u64;
    let most = args.asked.place.nodes.map_or(u64::MAX, |most| most as u64).min(DEVICES_MAX / node);
    let mut tried: Vec<(Way, Run)> = Vec::new();
    // Why the number that was looked at last has no plan.
    let mut reason = None;
    let mut is_enough = |nodes: u64| -> Result<bool, Failure> {
        let known = tried.iter().find(|(way, _)| u64::from(way.devices) == nodes * node);
        if let Some((_, run)) = known {
            return Ok(run.seconds <= deadline);
        }
        match on_nodes(preset, args, deadline, nodes)? {
            Ok(found) => {
                tried.push(found);
                Ok(tried.last().is_some_and(|(_, run)| run.seconds <= deadline))
            }
            Err(why) => {
                reason = Some(why);
                Ok(false)
            }
        }
    };
    let (mut few, mut enough) = (0, 1);
    while !is_enough(enough)? {
        few = enough;
        if few >= most {
            break;
        }
        enough = (2 * enough).min(most);
    }
    if few < enough {
        let mut step = (enough / NODES_PART).max(1);
        while enough - few > step {
            let middle = few.midpoint(enough).next_multiple_of(step);
            let middle = if middle < enough { middle } else { enough - step };
            if is_enough(middle)? { enough = middle } else { few = middle }
        }
        step = (enough / 4).max(1);
        let more = (1..).map(|n| enough + n * step);
        for nodes in more.take_while(|nodes| *nodes <= most.min(CHEAPEST_MAX * enough)) {
            is_enough(nodes)?;
        }
    }
    tried.sort_by_key(|(way, _)| way.devices);
    Ok(sized(&tried, args, deadline, (args.asked.gbs.or(Some(SIZE_BATCH)), about), reason))
}

/// Adds a plan to those that were tried; whether it meets the deadline.
fn add_tried(tried: &mut Vec<(Way, Run)>, way: Way, bill: &Bill, deadline: f64) -> bool {
    let (_, [_, expected, _]) = way.runs(bill);
    tried.push((way, expected));
    expected.seconds <= deadline
}

/// The sets of groups, those with the fewest devices first, up to one that meets the deadline.
fn fewest_groups(mixed: &Mixed, args: &CostArgs, deadline: f64) -> Result<(Exit, String), Failure> {
    let ways = mixed.ways(&args.asked)?;
    let mut ways: Vec<Way> =
        ways.iter().map(|way| Way::over_groups(mixed, way, &args.bill)).collect();
    ways.sort_by(|a, b| a.devices.cmp(&b.devices).then(a.times[1].total_cmp(&b.times[1])));
    let mut tried = Vec::new();
    for way in ways {
        if add_tried(&mut tried, way, &args.bill, deadline) {
            break;
        }
    }
    let batch = Some(mixed.global_batch());
    let about = (mixed.header(), mixed.executor());
    Ok(sized(&tried, args, deadline, (batch, &about), None))
}

/// The fewest devices that meet the deadline, and the cheapest ones: of those that were tried.
fn enough_of(tried: &[(Way, Run)], deadline: f64) -> (Option<&Way>, Option<&Way>) {
    let enough = || tried.iter().filter(|(_, run)| run.seconds <= deadline);
    let price = |run: &Run| run.money.unwrap_or(run.device_hours);
    let cheapest = enough().min_by(|(_, a), (_, b)| price(a).total_cmp(&price(b)));
    let fewest = enough().min_by_key(|(way, _)| way.devices);
    (fewest.map(|(way, _)| way), cheapest.map(|(way, _)| way))
}

/// What `size` prints of what it tried.
fn sized(
    tried: &[(Way, Run)],
    args: &CostArgs,
    deadline: f64,
    (batch, (header, executor)): (Option<usize>, &(String, documents::Executor)),
    reason: Option<String>,
) -> (Exit, String) {
    let asked = &args.asked;
    let (fewest, cheapest) = enough_of(tried, deadline);
    let meets = fewest.is_some();
    let fastest = tried.iter().min_by(|(_, a), (_, b)| a.seconds.total_cmp(&b.seconds));
    let reason = match fastest {
        _ if meets => None,
        Some((way, run)) => Some(format!(
            "the fastest that was tried, {} devices, takes {}",
            output::count(way.devices.into()),
            output::seconds(run.seconds)
        )),
        None => reason,
    };
    let text = if asked.json {
        let tried = tried.iter().map(|(way, run)| SizeRow {
            run: row(run),
            devices: way.devices.into(),
            plan: way.plan.clone(),
            step_time_s: way.times[1],
            meets_deadline: run.seconds <= deadline,
        });
        let document = documents::Size {
            model: asked.model.to_string(),
            tokens: args.bill.tokens.unwrap_or(0.0),
            gbs: batch.map(|batch| batch as u64),
            deadline_s: deadline,
            devices: fewest.map(|way| way.devices.into()),
            cheapest_devices: cheapest.map(|way| way.devices.into()),
            tried: tried.collect(),
            reason,
            executor: Some(executor.clone()),
        };
        format!("{:#}", document.to_json())
    } else {
        let reason = reason.map(|reason| format!("  {reason}\n")).unwrap_or_default();
        format!("{header}\n{}{reason}", size_page(tried, deadline))
    };
    (if meets { Exit::Success } else { Exit::Infeasible }, text)
}

fn size_page(tried: &[(Way, Run)], deadline: f64) -> String {
    let runs = || tried.iter().map(|(_, run)| run);
    let (priced, powered) =
        (runs().any(|run| run.money.is_some()), runs().any(|run| run.kwh.is_some()));
    let mut table = Table::default();
    let row = |texts: [String; 6]| {
        let shown = [true, true, true, priced, powered, true];
        texts.into_iter().zip(shown).filter(|(_, is_shown)| *is_shown).map(|(text, _)| text)
    };
    let names = ["devices", "time", "device hours", "money", "kWh", "plan"];
    table.cells(row(names.map(str::to_owned)));
    let known = |number: Option<f64>| number.map_or("-".to_owned(), output::number);
    for (way, run) in tried {
        table.cells(row([
            way.devices.to_string(),
            output::seconds(run.seconds),
            output::number(run.device_hours),
            known(run.money),
            known(run.kwh),
            way.plan.clone(),
        ]));
    }
    let mut text = if tried.is_empty() { String::new() } else { table.text() };
    let time = output::seconds(deadline);
    let price = |run: &Run| run.money.unwrap_or(run.device_hours);
    let late = tried.iter().filter(|(_, run)| run.seconds > deadline);
    let late = late.min_by(|(_, a), (_, b)| price(a).total_cmp(&price(b)));
    text += &match enough_of(tried, deadline) {
        (Some(fewest), Some(cheapest)) if fewest.devices != cheapest.devices => {
            let (few, cheap) = (fewest.devices, cheapest.devices);
            format!("\n✓ {few} devices are enough for {time}, and {cheap} are the cheapest\n")
        }
        (Some(fewest), _) => format!("\n✓ {} devices are enough for {time}\n", fewest.devices),
        (None, _) => format!("\n✗ no number of devices that was tried meets {time}\n"),
    };
    let enough = runs().filter(|run| run.seconds <= deadline).map(price).min_by(f64::total_cmp);
    if let (Some((way, run)), Some(enough)) = (late, enough)
        && price(run) < enough
    {
        text += &format!(
            "  {} would cost less, and take {}\n",
            way.devices,
            output::seconds(run.seconds)
        );
    }
    text
}
