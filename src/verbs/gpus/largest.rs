//! `fit --largest`: the longest sequence, or the largest micro-batch, for which any plan fits.

use kernels::{Bytes, Seconds};
use planner::cluster::Cluster;
use planner::limits::Decision;
use planner::search::request::Chosen;

use super::{Subject, answer, finalists, plan_row};
use crate::documents::plans::PlanRow;
use crate::documents::{self, Document};
use crate::failure::{Exit, Failure, usage};
use crate::output;
use crate::verbs::flags::{Aim, Largest, RequestFlags};

impl Largest {
    /// Its name in flags.
    pub fn name(self) -> &'static str {
        match self {
            Largest::Seq => "seq",
            Largest::Mbs => "mbs",
            Largest::Gbs => "gbs",
        }
    }

    /// The first number that is tried, whose doubles follow.
    fn first(self) -> usize {
        match self {
            Largest::Seq => 1024,
            Largest::Mbs | Largest::Gbs => 1,
        }
    }

    /// The most that is tried. Chosen: far above what any device holds.
    fn most(self) -> usize {
        match self {
            Largest::Seq => 1 << 30,
            Largest::Mbs | Largest::Gbs => 1 << 16,
        }
    }

    /// Between the largest number that fits and the next that was tried there is at most this.
    fn step(self, fits: usize) -> usize {
        match self {
            // A 64th, in whole tiles of products.
            Largest::Seq => (fits / 64).next_power_of_two().max(128),
            Largest::Mbs | Largest::Gbs => 1,
        }
    }

    /// Doubles until nothing fits, then halves what is between. `tried` says what fits with a
    /// number, or why nothing does.
    pub fn search<T>(
        self,
        mut tried: impl FnMut(usize) -> Result<Result<T, String>, Failure>,
    ) -> Result<Searched<T>, Failure> {
        let mut found: Option<(usize, T)> = None;
        let mut number = self.first();
        let mut fails = loop {
            match tried(number)? {
                Ok(fits) if number >= self.most() => {
                    return Ok(Searched { found: Some((number, fits)), next: None });
                }
                Ok(fits) => found = Some((number, fits)),
                Err(reason) => break (number, reason),
            }
            number *= 2;
        };
        // Below the first number, too, something may fit.
        let mut low = found.as_ref().map_or(0, |(number, _)| *number);
        while fails.0 - low > self.step(low) {
            let step = self.step(low);
            let middle = (low + (fails.0 - low) / 2).next_multiple_of(step);
            let middle = middle.min(fails.0 - 1).max(1);
            if middle <= low {
                break;
            }
            match tried(middle)? {
                Ok(fits) => (low, found) = (middle, Some((middle, fits))),
                Err(reason) => fails = (middle, reason),
            }
        }
        Ok(Searched { found, next: Some(fails) })
    }
}

/// The largest number with which something fits.
#[derive(Clone, Debug)]
pub struct Searched<T> {
    /// That number, and what fits with it; none where nothing fits with any.
    pub found: Option<(usize, T)>,
    /// The smallest that was tried with which nothing fits, and why; none where all fit.
    pub next: Option<(usize, String)>,
}

/// What fits with a number.
struct Fits {
    subject: Subject,
    best: Chosen,
    /// Bytes of the fullest device: compiled, where programs carry the plan out.
    held_bytes: f64,
}

/// Answers `fit --largest`.
pub fn largest(asked: &RequestFlags, cluster: &Cluster, what: Largest) -> Result<Exit, Failure> {
    if !cluster.groups.is_empty() {
        let headline = "the largest of groups of devices is not searched for".to_owned();
        return Err(usage("--largest", headline).help("ask about one group alone").into());
    }
    if what == Largest::Gbs {
        let headline = "a step has as many micro-batches as its batch takes, whatever that is";
        return Err(usage("--largest", headline.to_owned()).help("write `--largest mbs`").into());
    }
    let given = match what {
        Largest::Seq => asked.seq.is_some(),
        Largest::Mbs | Largest::Gbs => asked.all_limits()?.fixed(Decision::Mbs).is_some(),
    };
    if given {
        let headline = format!("`{}` is given, and its largest value asked for", what.name());
        return Err(usage("--largest", headline).help("leave one of them out").into());
    }
    if what == Largest::Mbs && asked.gbs.is_some() {
        let headline = "the batch follows the micro-batch that is tried, and `--gbs` is given";
        return Err(usage("--gbs", headline).help("leave it out").into());
    }
    let found = what.search(|number| tried(asked, cluster, what, number))?;
    tell(asked, what, found)
}

/// Searches with one number.
fn tried(
    asked: &RequestFlags,
    cluster: &Cluster,
    what: Largest,
    number: usize,
) -> Result<Result<Fits, String>, Failure> {
    let mut own = asked.clone();
    match what {
        Largest::Seq => own.seq = Some(number),
        Largest::Mbs | Largest::Gbs => {
            own.limited.axes.mbs = Some(number);
            // A batch that every number of data-parallel ranks divides.
            let devices = own.place.ranks(cluster);
            own.gbs = Some(own.gbs.unwrap_or(devices).next_multiple_of(devices * number));
        }
    }
    let subject = match Subject::quiet(&own, cluster.clone()) {
        Ok(subject) => subject,
        // A table of positions has an end.
        Err(Failure::Input(wrong)) if wrong.iter().all(|one| one.code == "E1108") => {
            return Ok(Err(wrong[0].headline.clone()));
        }
        Err(failure) => return Err(failure),
    };
    // As `plan` does: of what fits in closed form, what fits as a program too.
    let settled = answer(&subject, &own).and_then(|mut found| {
        let finalists = finalists::settle(&subject, &own, Aim::Time, &mut found)?;
        let best = found.best.swap_remove(0);
        let held = finalists.held.map_or(best.estimate.memory.total_bytes(), |h| h.total_bytes());
        Ok((best, held))
    });
    match settled {
        Ok((best, held_bytes)) => Ok(Ok(Fits { subject, best, held_bytes })),
        Err(failure) => Ok(Err(failure.into_no()?.headline)),
    }
}

fn tell(
    asked: &RequestFlags,
    what: Largest,
    Searched { found, next }: Searched<Fits>,
) -> Result<Exit, Failure> {
    let exit = if found.is_some() { Exit::Success } else { Exit::Infeasible };
    if asked.json {
        let document = documents::Largest {
            of: what.name().to_owned(),
            largest: found.as_ref().map(|(number, _)| *number as u64),
            plan: found.as_ref().map(|(_, fits)| PlanRow {
                peak_mem_bytes: fits.held_bytes,
                ..plan_row(&fits.subject, &fits.best)
            }),
            next: next.as_ref().map(|(number, _)| *number as u64),
            reason: next.map(|(_, reason)| reason),
        };
        output::answer_json(&document.to_json());
        return Ok(exit);
    }
    let mut text = match &found {
        Some((number, Fits { subject, best, held_bytes })) => format!(
            "{}\n✓ {}={number} is the largest: {}\n  {} on the fullest device, {} a step\n",
            subject.header(),
            what.name(),
            best.configuration,
            Bytes(*held_bytes as u64),
            Seconds(best.estimate.step_time_s)
        ),
        None => format!("✗ nothing fits at any {}\n", what.name()),
    };
    if let Some((next, reason)) = next {
        text += &format!("  {}={next}: {reason}\n", what.name());
    }
    output::answer(&text);
    Ok(exit)
}
