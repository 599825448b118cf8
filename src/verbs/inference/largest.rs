//! `fit --largest` about inference: the longest context, or the most sequences at once, for which
//! any layout fits and answers soon enough.

use ir::Diagnostic;
use kernels::{Bytes, Seconds};
use planner::cluster::Cluster;
use serde_json::Value;

use super::page::{header, laid, refused, served as subject_of, told};
use super::{AtOnce, Copies, Noted, Row, models, wanted};
use crate::documents::{self, Document};
use crate::failure::{Exit, Failure, usage};
use crate::output;
use crate::verbs::flags::{Largest, Purpose, RequestFlags, Served, refuse_cpus};
use crate::verbs::gpus::largest::Searched;

/// What is printed of a layout that fits.
struct Fits {
    row: Row,
    told: Value,
}

/// What is asked about, for people and for programs.
struct Subject {
    header: String,
    have_bytes: f64,
    document: documents::ServedModel,
}

impl Subject {
    fn of(copies: &Copies<'_>) -> Subject {
        Subject {
            header: header(copies),
            have_bytes: copies.have_bytes(),
            document: subject_of(copies),
        }
    }
}

/// Answers; no where nothing fits.
pub fn largest(
    asked: &RequestFlags,
    cluster: Cluster,
    served: &Served,
    what: Largest,
) -> Result<Exit, Failure> {
    refuse_cpus(&cluster, "`plan --for inference` compares slots on CPUs")?;
    refuse_given(asked, served, what)?;
    let (subject, found) = match what {
        Largest::Seq => longest(asked, cluster, served)?,
        Largest::Mbs | Largest::Gbs => most(asked, cluster, served, what)?,
    };
    let exit = if found.found.is_some() { Exit::Success } else { Exit::Infeasible };
    match asked.json {
        true => output::answer_json(&document(subject, what, found).to_json()),
        false => output::answer(&page(&subject, what, &found)),
    }
    Ok(exit)
}

/// Refuses what is given and asked for, and sequences of prompts alone.
fn refuse_given(asked: &RequestFlags, served: &Served, what: Largest) -> Result<(), Failure> {
    let is_given = match what {
        Largest::Seq => asked.seq.is_some() || served.requests.input_len.is_some(),
        Largest::Mbs | Largest::Gbs => asked.gbs.is_some(),
    };
    let refuse = |headline: String, help: &str| -> Result<(), Failure> {
        Err(usage("--largest", headline).help(help).into())
    };
    if is_given {
        let given = match what {
            Largest::Seq if asked.seq.is_none() => "the length of requests",
            Largest::Seq => "`--seq`",
            Largest::Mbs | Largest::Gbs => "`--gbs`",
        };
        let headline = format!("{given} is given, and the largest `{}` asked for", what.name());
        return refuse(headline, "leave one of them out");
    }
    if what != Largest::Seq && served.purpose == Purpose::Prefill {
        let headline = "prompts alone have no sequences that go on at once".to_owned();
        return refuse(headline, "write `--for inference`");
    }
    Ok(())
}

/// The longest context of the sequences that are asked for, or of one on each copy.
fn longest(
    asked: &RequestFlags,
    cluster: Cluster,
    served: &Served,
) -> Result<(Subject, Searched<Fits>), Failure> {
    let mut subject = None;
    let found = Largest::Seq.search(|seq| {
        let asked = RequestFlags { seq: Some(seq), ..asked.clone() };
        let models = match models(&asked, cluster.clone(), served, Noted::Before) {
            Ok(models) => models,
            // A table of positions has an end.
            Err(Failure::Input(wrong)) if wrong.iter().all(is_of_positions) => {
                return Ok(Err(wrong[0].headline.clone()));
            }
            Err(failure) => return Err(failure),
        };
        let estimators = models.estimators()?;
        let copies = Copies::new(&models, &estimators, wanted(&asked, served)?, served.purpose)?;
        let rows = copies.rows(&asked)?;
        let best = rows.first().filter(|row| row.fits(served.purpose));
        if subject.is_none() || best.is_some() {
            subject = Some(Subject::of(&copies));
        }
        Ok(match best {
            Some(row) => Ok(Fits { row: row.clone(), told: told(&copies, row) }),
            None => Err(why(&refused(&copies, &rows))),
        })
    })?;
    let Some(subject) = subject else {
        let reason = found.next.map_or_else(String::new, |(_, reason)| reason);
        return Err(usage("--largest", reason).into());
    };
    Ok((subject, found))
}

fn is_of_positions(wrong: &Diagnostic) -> bool {
    wrong.code == "E1108"
}

/// A line of a page that says why nothing fits, as a reason.
fn why(line: &str) -> String {
    line.trim_start_matches("✗ ").trim_end().to_owned()
}

/// The most sequences at once, of a copy or of all copies.
fn most(
    asked: &RequestFlags,
    cluster: Cluster,
    served: &Served,
    what: Largest,
) -> Result<(Subject, Searched<Fits>), Failure> {
    let models = models(asked, cluster, served, Noted::Now)?;
    let estimators = models.estimators()?;
    let copies = Copies::new(&models, &estimators, wanted(asked, served)?, served.purpose)?;
    let subject = Subject::of(&copies);
    let rows = copies.rows(asked)?;
    let figure = |row: &Row| match what {
        Largest::Mbs => row.most,
        Largest::Seq | Largest::Gbs => row.most * u64::from(row.copies),
    };
    // Of those that hold as many the first, which gives the most tokens per second.
    let best = rows.iter().reduce(|a, b| if figure(b) > figure(a) { b } else { a });
    let Some(best) = best.filter(|row| row.most > 0) else {
        let reason = why(&refused(&copies, &rows));
        return Ok((subject, Searched { found: None, next: Some((1, reason)) }));
    };
    let number = figure(best);
    let row = copies.row_of(best.copy, best.copies, AtOnce::Most);
    let more = AtOnce::Stated((best.most + 1) * u64::from(best.copies));
    let missing = copies.row_of(best.copy, best.copies, more).need_bytes - copies.have_bytes();
    let reason = match missing > 0.0 {
        true => format!("{} lacks {} on a device", best.copy, Bytes(missing.ceil() as u64)),
        false => format!("{} has its tokens too late", best.copy),
    };
    let fits = Fits { told: told(&copies, &row), row };
    let next = Some((number as usize + 1, reason));
    Ok((subject, Searched { found: Some((number as usize, fits)), next }))
}

fn document(
    subject: Subject,
    what: Largest,
    Searched { found, next }: Searched<Fits>,
) -> documents::LargestInference {
    documents::LargestInference {
        subject: subject.document,
        of: what.name().to_owned(),
        largest: found.as_ref().map(|(number, _)| *number as u64),
        row: found.map(|(_, fits)| fits.told),
        next: next.as_ref().map(|(number, _)| *number as u64),
        reason: next.map(|(_, reason)| reason),
    }
}

fn page(subject: &Subject, what: Largest, Searched { found, next }: &Searched<Fits>) -> String {
    let name = what.name();
    let mut text = format!("{}\n", subject.header);
    text += &match found {
        Some((number, Fits { row, .. })) => {
            let number = output::count(*number as u64);
            format!("✓ {name}={number} is the largest: {}\n", laid(row)) + &given(subject, row)
        }
        None => format!("✗ nothing fits at any {name}\n"),
    };
    if let Some((next, reason)) = next {
        text += &format!("  {name}={}: {reason}\n", output::count(*next as u64));
    }
    text
}

/// What a layout gives and holds, as a line.
fn given(subject: &Subject, row: &Row) -> String {
    let [need, have] = [row.need_bytes, subject.have_bytes].map(|bytes| Bytes(bytes as u64));
    let token = row.token_s().map(|token_s| format!(", {} a token", Seconds(token_s)));
    format!(
        "  {} sequences at once{}, {need} of {have} on the fullest device\n",
        output::count(row.sequences),
        token.unwrap_or_default()
    )
}
