//! `size --for inference`: the fewest or cheapest devices that give a token soon enough, or enough
//! tokens per second.
//!
//! Copies that share nothing do not know of each other: twice as many give twice as many tokens.
//! So for each way in which a copy, or some that share experts, may lie, one is priced, and as many
//! are counted as the demand takes.

use std::collections::BTreeSet;

use planner::cluster::Cluster;
use planner::estimate::serving::Replica;
use serde_json::{Value, json};

use super::cost::tokens;
use super::page::{engine_lines, executor, told};
use super::{AtOnce, Copies, Models, Noted, Row, Wanted, models, refuse_others, wanted};
use crate::argument::HOUR_S;
use crate::cache;
use crate::documents::{self, Document};
use crate::failure::{Exit, Failure, usage};
use crate::output::{self, Table};
use crate::verbs::flags::{CostArgs, DEVICES_MAX, Purpose, RequestFlags};
use crate::verbs::gpus::noted_model;

/// Ranks that share products at most. Chosen: beyond two nodes of eight, collectives take longer
/// than what they save.
const TENSOR_MAX: u32 = 64;
/// Upper limit of copies that share experts. Chosen: the number that DeepSeek-AI 2024 decode with.
const SHARING_MAX: u32 = 512;
/// Ways that are listed at most.
const LISTED: usize = 8;

/// What has to be met: seconds of all devices that a second of the demand takes.
#[derive(Clone, Copy)]
struct Load {
    /// Tokens of prompts and new ones, per second.
    rates: [f64; 2],
    /// Sequences at once.
    sequences: Option<u64>,
}

/// A number of devices that is enough.
struct Enough {
    kind: String,
    devices: u32,
    nodes: u32,
    /// Money for an hour of all of them.
    hourly: Option<f64>,
    row: Row,
    told: Value,
}

/// Answers `size` about inference: the fewest devices that are enough, of the cheapest kind where
/// the cluster has groups.
pub fn size(args: &CostArgs) -> Result<Exit, Failure> {
    let cluster = args.asked.place.cluster()?;
    let load = load(args)?;
    let kinds = match cluster.groups.is_empty() {
        true => vec![cluster.clone()],
        false => cluster.groups.clone(),
    };
    kinds.iter().try_for_each(|kind| refuse_others(&args.asked, kind))?;
    let unpriced = kinds.iter().find(|kind| args.bill.hourly(kind).is_none());
    if let (true, Some(kind)) = (kinds.len() > 1, unpriced) {
        output::note(&format!(
            "note: it is not known what an hour of `{}` costs, and the fewest devices count",
            kind.name
        ));
    }
    let work = noted_model(&args.asked)?.work;
    let key = args.asked.key("size-inference", &(&work, &cluster, args));
    cache::answer(key, || sized(&kinds, args, load))
}

/// What is asked for, in a second.
fn load(args: &CostArgs) -> Result<Load, Failure> {
    if let Some(devices) = args.asked.place.ranks {
        let headline = format!("{devices} devices are given, and `size` looks for their number");
        return Err(usage("--devices", headline).help("leave it out, or use `cost`").into());
    }
    let sequences = args.asked.gbs.map(|gbs| gbs as u64);
    let period_s = match (args.demand.rate, args.bill.deadline) {
        (Some(_), _) => HOUR_S,
        (None, Some(deadline)) => deadline,
        (None, None) if args.served.requests.token_time.is_some() || sequences.is_some() => {
            return Ok(Load { rates: [0.0; 2], sequences });
        }
        (None, None) => {
            let headline = "`size` needs something to meet".to_owned();
            let help = "write `--token-time 50ms`, `--rate N` new tokens per second, `--gbs N` \
                        sequences at once, or `--tokens N --deadline 1h`";
            return Err(usage("--rate", headline).help(help).into());
        }
    };
    Ok(Load { rates: tokens(args)?.map(|tokens| tokens / period_s), sequences })
}

fn sized(kinds: &[Cluster], args: &CostArgs, load: Load) -> Result<(Exit, String), Failure> {
    let mut all = Vec::new();
    for kind in kinds {
        all.extend(enough(kind, args, load)?);
    }
    let is_priced = all.iter().all(|enough| enough.hourly.is_some());
    all.sort_by(|a, b| {
        let [a_money, b_money] = [a, b].map(|e| e.hourly.filter(|_| is_priced).unwrap_or(0.0));
        let rates = [a, b].map(|enough| enough.row.rate().unwrap_or(0.0));
        a_money
            .total_cmp(&b_money)
            .then(a.devices.cmp(&b.devices))
            .then(rates[1].total_cmp(&rates[0]))
    });
    all.truncate(LISTED);
    let exit = if all.is_empty() { Exit::Infeasible } else { Exit::Success };
    let (engine, lines) = assumed(&kinds[0], args)?;
    let text = match args.asked.json {
        true => format!("{:#}", document(&all, args, load, engine)),
        false => page(&all, args, load, (is_priced, &lines)),
    };
    Ok((exit, text))
}

/// How passes are assumed to be executed on devices of a kind, for programs and for people.
fn assumed(kind: &Cluster, args: &CostArgs) -> Result<(documents::Engine, String), Failure> {
    let asked = of_one_device(args);
    let models = models(&asked, kind.clone(), &args.served, Noted::Before)?;
    let estimators = models.estimators()?;
    let wanted = Wanted::new(&args.served, None)?;
    let copies = Copies::new(&models, &estimators, wanted, purpose(args))?;
    Ok((executor(&copies), engine_lines(&copies)))
}

/// The request on one device, of which more are counted.
fn of_one_device(args: &CostArgs) -> RequestFlags {
    let place = crate::job::Where { ranks: Some(1), ..args.asked.place.clone() };
    RequestFlags { place, ..args.asked.clone() }
}

/// For each way to lie on devices of a kind: how many are enough.
fn enough(kind: &Cluster, args: &CostArgs, load: Load) -> Result<Vec<Enough>, Failure> {
    let asked = of_one_device(args);
    let limits = asked.all_limits()?;
    let models = models(&asked, kind.clone(), &args.served, Noted::Before)?;
    let each = kind.devices_per_node.unwrap_or(1) as u32;
    // As many nodes as the user says, or as the file of several kinds has.
    let bounded = asked.place.nodes.is_some() || !args.asked.place.cluster()?.groups.is_empty();
    let most = if bounded { kind.devices().map_or(u32::MAX, |n| n as u32) } else { u32::MAX };
    let most = most.min(u32::try_from(DEVICES_MAX).unwrap_or(u32::MAX));
    let mut found = Vec::new();
    let mut ways = ways(&models, args)?;
    ways.sort_by_key(|copy| copy.together() * copy.pp);
    let mut fewest = most;
    for copy in ways {
        let count = |devices: u32| counted(&models, args, load, (copy, devices));
        let unit = copy.together() * copy.pp;
        // More devices wait for a slower one: what is enough for few may lack a little for many.
        let mut devices = unit;
        // What is larger than what is enough is no answer.
        if unit > fewest {
            break;
        }
        let row = loop {
            let Some((row, need)) = count(devices)?.filter(|_| devices <= most) else { break None };
            if need <= devices {
                break Some(row);
            }
            devices = need;
        };
        let Some(row) = row else { continue };
        let may = |decision, number: u32| limits.allow(decision, number as usize);
        if !may(planner::limits::Decision::Dp, row.copies) {
            continue;
        }
        fewest = fewest.min(devices);
        let own = models.on(devices);
        let estimators = own.estimators()?;
        let wanted = wanted(&asked, &args.served)?;
        let copies = Copies::new(&own, &estimators, wanted, purpose(args))?;
        found.push(Enough {
            kind: kind.name.clone(),
            devices,
            nodes: devices.div_ceil(each),
            hourly: args.bill.hourly(kind).map(|price| price * f64::from(devices)),
            told: told(&copies, &row),
            row,
        });
    }
    Ok(found)
}

/// Both passes have to fit, whatever is asked for.
fn purpose(args: &CostArgs) -> Purpose {
    match args.served.purpose {
        Purpose::Training | Purpose::Inference | Purpose::Decode => Purpose::Inference,
        Purpose::Prefill => Purpose::Prefill,
    }
}

/// The ways in which a copy may lie, those that share experts too. Of as many layers on the deepest
/// stage the fewest stages are enough.
fn ways(models: &Models, args: &CostArgs) -> Result<Vec<Replica>, Failure> {
    use planner::limits::Decision;
    let limits = args.asked.all_limits()?;
    let may = |decision, number: u32| limits.allow(decision, number as usize);
    let estimators = models.estimators()?;
    let wanted = Wanted::new(&args.served, None)?;
    let copies = Copies::new(models, &estimators, wanted, purpose(args))?;
    let depth = models.subject.work.depth();
    let stages: BTreeSet<u32> = (1..=depth).map(|deepest| depth.div_ceil(deepest)).collect();
    let mut ways = Vec::new();
    for tp in (1..=TENSOR_MAX).filter(|tp| may(Decision::Tp, *tp)) {
        if !copies.serving.allows(copies.serving.alone(tp, 1)) {
            continue;
        }
        for ep in copies.serving.expert_ways(tp, SHARING_MAX) {
            let pipelines =
                stages.iter().filter(|pp| may(Decision::Pp, **pp) && may(Decision::Ep, ep));
            ways.extend(pipelines.map(|pp| Replica { tp, pp: *pp, ep }));
        }
    }
    ways.retain(|copy| copies.serving.held(*copy).weights_bytes < copies.have_bytes());
    Ok(ways)
}

/// The row of a copy on `devices` devices, and the number of devices that it needs; none where it
/// never meets the demand.
fn counted(
    models: &Models,
    args: &CostArgs,
    load: Load,
    (copy, devices): (Replica, u32),
) -> Result<Option<(Row, u32)>, Failure> {
    let own = models.on(devices);
    let estimators = own.estimators()?;
    let count = devices / copy.tp / copy.pp;
    // The number of copies follows from the demand.
    let wanted = Wanted::new(&args.served, None)?;
    let copies = Copies::new(&own, &estimators, wanted, purpose(args))?;
    // Where sequences are asked for, each copy has to hold as many as it can.
    let at_once = load.sequences.map_or(AtOnce::Enough, |_| AtOnce::Most);
    let row = copies.row_of(copy, count, at_once);
    if !row.fits(copies.purpose) {
        return Ok(None);
    }
    let each = [row.prompt_rate(copies.lengths().own_prompt()), row.rate()];
    // Where requests are in flight, prompts are worked on beside new tokens.
    let prompts = if row.in_flight.is_some() { 0.0 } else { load.rates[0] };
    let busy = [prompts, load.rates[1]].into_iter().zip(each).map(|(rate, each)| match each {
        Some(each) => rate / each,
        None if rate > 0.0 => f64::INFINITY,
        None => 0.0,
    });
    let work = busy.sum::<f64>();
    let held = load.sequences.map_or(0, |all| all.div_ceil(row.load.sequences.max(1)));
    let held = held as f64 * row.ranks();
    let unit = f64::from(copy.together() * copy.pp);
    let units = (work.max(held) / unit).ceil().max(1.0);
    let need = units * unit;
    Ok((need <= f64::from(u32::MAX)).then_some((row, need as u32)))
}

fn document(all: &[Enough], args: &CostArgs, load: Load, executor: documents::Engine) -> Value {
    let best = all.first();
    let rows = all.iter().map(|enough| {
        let mut row = enough.told.clone();
        row["cluster"] = json!(enough.kind);
        row["devices"] = json!(enough.devices);
        row["nodes"] = json!(enough.nodes);
        row["money_per_hour"] = json!(enough.hourly);
        row
    });
    let document = documents::SizeInference {
        model: args.asked.model.to_string(),
        token_time_s: args.served.requests.token_time,
        rate: Some(load.rates[1]).filter(|rate| *rate > 0.0),
        prompt_rate: Some(load.rates[0]).filter(|rate| *rate > 0.0),
        sequences: load.sequences,
        devices: best.map(|enough| enough.devices.into()),
        cluster: best.map(|enough| enough.kind.clone()),
        rows: rows.collect(),
        executor,
    };
    document.to_json()
}

fn page(all: &[Enough], args: &CostArgs, load: Load, (is_priced, engine): (bool, &str)) -> String {
    let mut asks = Vec::new();
    if let Some(limit_s) = args.served.requests.token_time {
        asks.push(format!("a token within {}", output::seconds(limit_s)));
    }
    let [prompts, tokens] = load.rates;
    if tokens > 0.0 {
        asks.push(format!("{} new tokens/s", output::number(tokens)));
    }
    if prompts > 0.0 {
        asks.push(format!("{} tokens of prompts/s", output::number(prompts)));
    }
    if let Some(sequences) = load.sequences {
        asks.push(format!("{} sequences at once", output::count(sequences)));
    }
    let asks = asks.join(", ");
    let mut text = format!("model    {}\nasked    {asks}\n{engine}\n", args.asked.model);
    let Some(best) = all.first() else {
        return text + "✗ no number of devices that was tried meets this\n";
    };
    let mut columns = vec!["devices", "nodes", "copy", "copies", "token", "tokens/s", "at once"];
    if is_priced {
        columns.push("money/h");
    }
    let mut table = Table::default();
    table.cells(std::iter::once("cluster").chain(columns).map(str::to_owned));
    for Enough { kind, devices, nodes, hourly, row, .. } in all {
        let token = row.token_s().map_or("-".to_owned(), output::seconds);
        let all = row.rate().map_or(0.0, |rate| rate * row.devices());
        let cells = [
            kind.clone(),
            devices.to_string(),
            nodes.to_string(),
            row.copy.to_string(),
            row.copies.to_string(),
            token,
            output::count(all as u64),
            output::count(row.sequences),
        ];
        let money = hourly.filter(|_| is_priced).map(output::number);
        table.cells(cells.into_iter().chain(money));
    }
    text += &table.text();
    let why = if is_priced { "the cheapest" } else { "the fewest" };
    text += &format!("\n✓ {} devices of {} are enough: {why}\n", best.devices, best.kind);
    text
}
