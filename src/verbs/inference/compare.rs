//! `compare --for inference`: layouts of copies side by side, and the best of each cluster.

use kernels::{Bytes, Seconds};
use planner::configuration::Configuration;
use planner::estimate::serving::Parts;
use serde_json::{Value, json};

use super::page::{executor, header, laid, recommended, told};
use super::{Copies, Models, Noted, Row, models, wanted};
use crate::argument::PathArg;
use crate::documents::{self, Document};
use crate::failure::{Exit, Failure, usage};
use crate::verbs::flags::CompareArgs;
use crate::{cache, output};

/// Answers `compare` about inference: what each layout gives and where its time goes.
pub fn compare(args: &CompareArgs) -> Result<Exit, Failure> {
    let ours = on(args, &args.asked.place.cluster, Noted::Now)?;
    let besides = args.beside.iter().map(|cluster| on(args, cluster, Noted::Before));
    let besides = besides.collect::<Result<Vec<Models>, Failure>>()?;
    let key = args.asked.key("compare-inference", &(&ours, &besides, args));
    cache::answer(key, || Ok((Exit::Success, compared(&ours, &besides, args)?)))
}

/// The models of the same request on another cluster.
fn on(args: &CompareArgs, cluster: &PathArg, noted: Noted) -> Result<Models, Failure> {
    let mut asked = args.asked.clone();
    asked.place.cluster.clone_from(cluster);
    let cluster = asked.place.cluster()?;
    models(&asked, cluster, &args.served, noted)
}

/// A layout on a cluster, with what is said of it.
struct Column {
    name: String,
    cluster: String,
    row: Row,
    parts: [Parts; 2],
    fits: bool,
    have_bytes: f64,
    prompt_rate: Option<f64>,
    told: Value,
}

impl Column {
    fn of(copies: &Copies<'_>, name: String, row: Row) -> Column {
        let mut told = told(copies, &row);
        let parts = copies.parts(&row);
        let [prompt, token] = &parts;
        told["cluster"] = json!(copies.subject.cluster.name);
        told["have_bytes"] = json!(copies.have_bytes());
        told["prompt_breakdown"] = json!(prompt);
        told["token_breakdown"] = json!(token);
        Column {
            name,
            cluster: copies.subject.cluster.name.clone(),
            parts,
            fits: row.fits(copies.purpose),
            have_bytes: copies.have_bytes(),
            prompt_rate: row.prompt_rate(copies.lengths().own_prompt()),
            row,
            told,
        }
    }
}

fn compared(ours: &Models, besides: &[Models], args: &CompareArgs) -> Result<String, Failure> {
    let estimators = ours.estimators()?;
    let wanted = wanted(&args.asked, &args.served)?;
    let purpose = args.served.purpose;
    let copies = Copies::new(ours, &estimators, wanted, purpose)?;
    let mut columns = Vec::new();
    for (at, text) in args.with.iter().enumerate() {
        let row = written(&copies, text)?;
        columns.push(Column::of(&copies, format!("({})", at + 1), row));
    }
    for (at, models) in std::iter::once(ours).chain(besides).enumerate() {
        let estimators = models.estimators()?;
        let copies = Copies::new(models, &estimators, copies.wanted.clone(), purpose)?;
        let rows = copies.rows(&args.asked)?;
        // What fits nowhere is shown where it is nearest to that.
        let best = recommended(&copies, &rows).or(rows.first()).cloned();
        let name = if at == 0 { "best".to_owned() } else { models.subject.cluster.name.clone() };
        columns.extend(best.map(|row| Column::of(&copies, name, row)));
    }
    if args.asked.json {
        let document = documents::CompareInference {
            model: ours.subject.work.name.clone(),
            seq: copies.seq().into(),
            plans: columns.into_iter().map(|column| column.told).collect(),
            bests: 1 + besides.len() as u64,
            executor: executor(&copies),
        };
        return Ok(format!("{:#}", document.to_json()));
    }
    Ok(format!("{}\n{}", header(&copies), page(&columns)))
}

/// The row of a layout that the user wrote: on as many copies as it says, or as there is room for.
fn written(copies: &Copies<'_>, text: &str) -> Result<Row, Failure> {
    let c: Configuration = text.parse().map_err(Failure::Input)?;
    let devices = u64::from(copies.subject.devices);
    let each = u64::from(c.tp) * u64::from(c.pp);
    let says_copies = text.split_whitespace().any(|word| word.starts_with("dp="));
    let count = if says_copies { u64::from(c.dp) } else { (devices / each).max(1) };
    if count.saturating_mul(each) > devices {
        let headline = format!("{} ranks on {devices} devices", count.saturating_mul(each));
        return Err(usage("--with", headline).help("write --devices with more").into());
    }
    let (copy, count) = copies.laid_out("--with", &c, count as u32)?;
    Ok(copies.row(copy, count))
}

fn page(columns: &[Column]) -> String {
    let mut text = String::new();
    let width = columns.iter().map(|column| column.name.len()).max().unwrap_or(0).max(6);
    for column in columns {
        let (name, cluster) = (&column.name, &column.cluster);
        text += &format!("{name:<width$} {} on {cluster}\n", laid(&column.row));
    }
    let bytes = |bytes: f64| Bytes(bytes as u64).to_string();
    let time = |time: Option<f64>| time.map_or("-".to_owned(), |s| Seconds(s).to_string());
    let count = |rate: Option<f64>| rate.map_or("-".to_owned(), |n| output::count(n as u64));
    let line = |name: &str, cell: &dyn Fn(&Column) -> String| -> Vec<String> {
        std::iter::once(name.to_owned()).chain(columns.iter().map(cell)).collect()
    };
    let token = |column: &Column| column.row.many.map(|_| column.parts[1]);
    let prompt = |column: &Column| column.row.prompt.map(|_| column.parts[0]);
    let mut rows = vec![
        line("", &|column| column.name.clone()),
        line("devices", &|column| output::count(column.row.devices() as u64)),
        line("sequences at once", &|column| output::count(column.row.sequences)),
        line("new tokens/s each", &|column| count(column.row.rate())),
        line("token", &|column| time(column.row.token_s())),
    ];
    rows.extend(breakdown(columns, token));
    rows.extend([
        line("token alone", &|column| time(column.row.single.map(|pass| pass.latency_s))),
        line("prompt tokens/s each", &|column| count(column.prompt_rate)),
        line("prompt", &|column| time(column.row.prompt.map(|pass| pass.latency_s))),
    ]);
    rows.extend(breakdown(columns, prompt));
    rows.extend([
        line("memory", &|column| bytes(column.row.need_bytes)),
        line("  weights", &|column| bytes(column.row.held.weights_bytes)),
        line("  KV of a token", &|column| bytes(column.row.held.cache_bytes_per_token)),
        line("of a device", &|column| bytes(column.have_bytes)),
        line("fits", &|column| if column.fits { "yes" } else { "no" }.to_owned()),
    ]);
    text.push('\n');
    for cells in rows {
        text += &format!("  {:<21}", cells[0]);
        for cell in &cells[1..] {
            text += &format!("{cell:>14}");
        }
        text.push('\n');
    }
    text
}

/// A line for each part of a pass that takes time anywhere.
fn breakdown(columns: &[Column], of: impl Fn(&Column) -> Option<Parts>) -> Vec<Vec<String>> {
    let part = |column: &Column, at: usize| Some(of(column)?.parts()[at].1);
    let names = Parts::default().parts().map(|(name, _)| name);
    let lines = names.into_iter().enumerate().filter_map(|(at, name)| {
        let cells: Vec<Option<f64>> = columns.iter().map(|column| part(column, at)).collect();
        let takes = cells.iter().flatten().any(|seconds| *seconds > 0.0);
        let cells = cells.into_iter().map(|cell| cell.map_or("-".to_owned(), output::seconds));
        takes.then(|| std::iter::once(format!("  {name}")).chain(cells).collect())
    });
    lines.collect()
}
