//! `cost --for inference`: what tokens take on copies of a model, or a rate of them.

use planner::cluster::Cluster;
use planner::estimate::serving::Lengths;

use super::page::{answered, executor, header, laid, recommended};
use super::{Copies, Models, Noted, Row, models, wanted};
use crate::argument::HOUR_S;
use crate::cache;
use crate::documents::{self, Document};
use crate::failure::{Exit, Failure, usage};
use crate::output::{self, Table};
use crate::verbs::flags::{Bill, CostArgs, JOULES_PER_KWH};

/// How long all devices work for some tokens.
#[derive(Clone, Copy)]
struct Pace {
    seconds: f64,
    /// In which a device computes.
    busy_s: f64,
}

impl Pace {
    /// What prompts and new tokens take on all devices, at the low, the expected and the high time.
    fn of(copies: &Copies<'_>, row: &Row, [prompts, tokens]: [f64; 2]) -> Option<[Pace; 3]> {
        let [prompt, token] = copies.parts(row);
        let devices = row.devices();
        let mut all = [Pace { seconds: 0.0, busy_s: 0.0 }; 3];
        let rates = [row.prompt_rate(copies.lengths().own_prompt()), row.rate()];
        // Where requests are in flight, prompts are worked on beside new tokens.
        let prompts = if row.in_flight.is_some() { 0.0 } else { prompts };
        let passes = [(prompts, prompt, 1), (tokens, token, row.load.groups)];
        let turns = [row.prompts.map(|prompts| prompts.apart_s()), row.token_s()];
        for (((tokens, parts, groups), rate), turn_s) in passes.into_iter().zip(rates).zip(turns) {
            if tokens <= 0.0 {
                continue;
            }
            let seconds = tokens / rate? / devices;
            // Each stage has its part of the passes of all groups.
            let share = f64::from(groups) * parts.busy_s() / f64::from(row.copy.pp) / turn_s?;
            let [low, high] = copies.serving.factors(&parts);
            for (pace, factor) in all.iter_mut().zip([low, 1.0, high]) {
                pace.seconds += factor * seconds;
                pace.busy_s += factor * seconds * share.min(1.0);
            }
        }
        Some(all)
    }
}

/// What a run or an hour costs.
struct Cost {
    seconds: f64,
    /// The share of the time in which devices work.
    utilisation: f64,
    device_hours: f64,
    money: Option<f64>,
    kwh: Option<f64>,
    /// Money for a million new tokens.
    per_million: Option<f64>,
}

impl Cost {
    /// Of all tokens one after the other, or of an hour at a rate: devices that wait are paid too.
    fn of(bill: &Bill, cluster: &Cluster, pace: Pace, devices: f64, per_hour: Option<f64>) -> Cost {
        let Pace { seconds, busy_s } = pace;
        let [all_s, utilisation] = match per_hour {
            Some(_) => [HOUR_S, seconds / HOUR_S],
            None => [seconds, 1.0],
        };
        let device_hours = devices * all_s / HOUR_S;
        let money = bill.hourly(cluster).map(|price| price * device_hours);
        let tokens = per_hour.or(bill.tokens);
        let power = cluster.device.power.as_ref();
        let joules = power.map(|power| devices * power.joules(all_s, busy_s.min(all_s)));
        Cost {
            seconds: all_s,
            utilisation,
            device_hours,
            money,
            kwh: joules.map(|joules| joules / JOULES_PER_KWH),
            per_million: money.zip(tokens).map(|(money, tokens)| money / tokens * 1e6),
        }
    }

    fn row(&self) -> documents::Served {
        documents::Served {
            time_s: self.seconds,
            utilisation: self.utilisation,
            device_hours: self.device_hours,
            money: self.money,
            energy_kwh: self.kwh,
            money_per_million_tokens: self.per_million,
        }
    }
}

/// Tokens of prompts for each new one, and of both how many are asked for: of all, or of an hour.
pub(super) fn tokens(args: &CostArgs) -> Result<[f64; 2], Failure> {
    if let Some(lengths) = args.served.requests.lengths()? {
        return of_requests(args, lengths);
    }
    let (new, prompts) = (args.bill.tokens, args.demand.prompt_tokens);
    match (args.demand.rate, new) {
        (None, None) if prompts.is_none() => {
            let headline = "the number of tokens is missing".to_owned();
            let help = "write `--tokens N`, or `--rate N` for tokens per second";
            Err(usage("--tokens", headline).help(help).into())
        }
        (None, _) => Ok([prompts.unwrap_or(0.0), new.unwrap_or(0.0)]),
        (Some(rate), None) if prompts.is_none() => Ok([0.0, HOUR_S * rate]),
        (Some(_), None) => {
            let headline = "`--rate` with `--prompt-tokens` needs the number of new tokens";
            let help = "write `--tokens N`: the new tokens that come with these prompts";
            Err(usage("--prompt-tokens", headline.to_owned()).help(help).into())
        }
        (Some(rate), Some(new)) => {
            let hour = HOUR_S * rate;
            Ok([hour * prompts.unwrap_or(0.0) / new, hour])
        }
    }
}

/// The same of requests whose lengths are known.
fn of_requests(args: &CostArgs, lengths: Lengths) -> Result<[f64; 2], Failure> {
    if args.demand.prompt_tokens.is_some() {
        let headline = "requests with `--input-len` say how many tokens prompts have".to_owned();
        return Err(usage("--prompt-tokens", headline).help("leave it out").into());
    }
    let new = match (args.demand.rate, args.bill.tokens) {
        (Some(rate), None) => HOUR_S * rate,
        (None, Some(tokens)) => tokens,
        (Some(_), Some(_)) => {
            let headline = "a rate and a number of new tokens are two questions".to_owned();
            return Err(usage("--rate", headline).help("write one of them").into());
        }
        (None, None) => {
            let headline = "the number of tokens is missing".to_owned();
            let help = "write `--tokens N`, or `--rate N` for tokens per second";
            return Err(usage("--tokens", headline).help(help).into());
        }
    };
    Ok([new * f64::from(lengths.own_prompt()) / f64::from(lengths.output), new])
}

/// Answers `cost` about inference; no where the deadline is missed, devices are too few for the
/// rate, or nothing fits.
pub fn cost(args: &CostArgs) -> Result<Exit, Failure> {
    let cluster = args.cluster(&args.asked)?;
    let tokens = tokens(args)?;
    let models = models(&args.asked, cluster, &args.served, Noted::Now)?;
    let key = args.asked.key("cost-inference", &(&models, args));
    cache::answer(key, || bill(&models, args, tokens))
}

fn bill(models: &Models, args: &CostArgs, tokens: [f64; 2]) -> Result<(Exit, String), Failure> {
    let estimators = models.estimators()?;
    let (subject, served) = (&models.subject, &args.served);
    let copies = Copies::new(models, &estimators, wanted(&args.asked, served)?, served.purpose)?;
    let rows = copies.rows(&args.asked)?;
    let paced =
        recommended(&copies, &rows).and_then(|row| Some((row, Pace::of(&copies, row, tokens)?)));
    let Some((row, paces)) = paced else {
        return Ok(answered(&copies, &rows, args.asked.json));
    };
    let per_hour = args.demand.rate.map(|_| tokens[1]);
    let of = |pace| Cost::of(&args.bill, &subject.cluster, pace, row.devices(), per_hour);
    let costs = paces.map(of);
    let enough = costs[1].utilisation <= 1.0;
    let in_time = args.bill.deadline.is_none_or(|deadline| costs[1].seconds <= deadline);
    let meets = if per_hour.is_some() { enough } else { in_time };
    let text = if args.asked.json {
        let [low, expected, high] = costs.each_ref().map(Cost::row);
        let document = documents::CostInference {
            model: subject.work.name.clone(),
            cluster: subject.cluster.describe(),
            devices: row.devices(),
            seq: copies.seq().into(),
            plan: row.copy.to_string(),
            copies: row.copies.into(),
            prompt_tokens: tokens[0],
            tokens: tokens[1],
            rate: args.demand.rate,
            low,
            expected,
            high,
            deadline_s: args.bill.deadline,
            currency: args.bill.currency(&subject.cluster),
            meets,
            executor: executor(&copies),
        };
        format!("{:#}", document.to_json())
    } else {
        let mut text = header(&copies);
        text += &format!("plan     {}\n", laid(row));
        text + &page(args, &subject.cluster, &costs, (tokens, meets))
    };
    Ok((if meets { Exit::Success } else { Exit::Infeasible }, text))
}

fn page(
    args: &CostArgs,
    cluster: &Cluster,
    costs: &[Cost; 3],
    ([prompts, tokens], meets): ([f64; 2], bool),
) -> String {
    let per_hour = args.demand.rate.is_some();
    let what = if per_hour { "an hour" } else { "all" };
    let number = output::number;
    let mut text =
        format!("tokens   {} new, {} of prompts: {what}\n\n", number(tokens), number(prompts));
    let mut table = Table::new(["", "low", "expected", "high"]);
    let row = |name: &str, cell: &dyn Fn(&Cost) -> String| {
        [name.to_owned(), cell(&costs[0]), cell(&costs[1]), cell(&costs[2])]
    };
    let known = |number: Option<f64>| number.map_or("-".to_owned(), output::number);
    if per_hour {
        table.row(row("devices busy", &|cost| format!("{:.1}%", 100.0 * cost.utilisation)));
    } else {
        table.row(row("time", &|cost| output::seconds(cost.seconds)));
    }
    table.row(row("device hours", &|cost| number(cost.device_hours)));
    if costs[1].money.is_some() {
        let name = args.bill.money_name(cluster);
        table.row(row(&name, &|cost| known(cost.money)));
    }
    if costs[1].per_million.is_some() {
        table.row(row("money for 1M new tokens", &|cost| known(cost.per_million)));
    }
    if costs[1].kwh.is_some() {
        table.row(row("kWh", &|cost| known(cost.kwh)));
    }
    text += &table.text();
    let prices = args.bill.said(cluster);
    if !prices.is_empty() {
        text += &format!("\n{prices}");
    }
    text += &Bill::energy_basis(cluster, costs[1].kwh.is_some());
    match (per_hour, args.bill.deadline) {
        (true, _) if meets => text += "\n✓ the devices are enough for this rate\n",
        (true, _) => {
            let times = number(costs[1].utilisation);
            text += &format!("\n✗ this rate needs {times} times as many: `size` finds them\n");
        }
        (false, Some(deadline)) => {
            let mark = if meets { "✓ within" } else { "✗ more than" };
            text += &format!("\n{mark} {}\n", output::seconds(deadline));
        }
        (false, None) => {}
    }
    text
}
