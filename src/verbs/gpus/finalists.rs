//! The memory of answers about GPUs: that of their compiled programs, wherever there are some.

use codegen::footprint::NotYet;
use ir::lora::Lora;
use kernels::Bytes;
use planner::configuration::Configuration;
use planner::estimate::memory::Memory;
use planner::estimate::{Estimator, HostLimits};
use planner::finalists::{Finalists, Held, Lowering, Oversized};
use planner::search::request::{Chosen, SearchResult, search};

use super::{Subject, features, question};
use crate::documents::{DeviceMemory, MemorySource};
use crate::failure::Failure;
use crate::planned::{Built, Wanted};
use crate::verbs::flags::{Aim, RequestFlags};

/// What plans are compiled for.
#[derive(Clone, Debug)]
pub struct Programs<'a> {
    wanted: Wanted<'a>,
    /// Why no plan is compiled, whatever it decides.
    none: Option<NotYet>,
    beside: Beside,
}

/// What there is beside the program of a device.
#[derive(Clone, Copy, Debug)]
pub struct Beside {
    /// Bytes of the device that programs do not have.
    pub reserve_bytes: f64,
    /// The memory of the node.
    pub host: HostLimits,
}

impl Beside {
    /// That of a subject.
    pub fn of(estimator: &Estimator<'_>) -> Beside {
        Beside { reserve_bytes: estimator.reserve_bytes(), host: estimator.host() }
    }
}

fn not_yet(decision: impl Into<String>) -> NotYet {
    NotYet { decision: decision.into() }
}

impl<'a> Programs<'a> {
    /// Programs of a model as they are wanted, with what is beside them; `obstacles` are what no
    /// program has, in words, each with whether it is wanted.
    pub fn new(wanted: Wanted<'a>, beside: Beside, obstacles: &[(bool, String)]) -> Self {
        let none = obstacles.iter().find(|(is_there, _)| *is_there);
        let none = none.map(|(_, words)| not_yet(words.clone()));
        Programs { wanted, none, beside }
    }

    /// Programs for a subject.
    pub fn of(subject: &Subject, asked: &'a RequestFlags) -> Result<Programs<'a>, Failure> {
        let tool = subject.target.map_or(String::new(), |tool| tool.to_string());
        let obstacles = [
            (subject.target.is_some(), format!("programs of {tool}")),
            (!subject.stated.is_empty(), STATED.to_owned()),
            (stores_in_few_bits(asked.lora.as_ref()), FEW_BITS.to_owned()),
        ];
        let beside = Beside::of(&subject.estimator()?);
        Ok(Programs::new(subject.wanted(asked), beside, &obstacles))
    }

    /// What is in the way of a plan, as far as its name says.
    fn obstacle(&self, c: &Configuration) -> Option<NotYet> {
        let lacking = features(c).lacking();
        let lacking = (!lacking.is_empty()).then(|| not_yet(lacking.join(", ")));
        self.none.clone().or(lacking)
    }

    fn built(&self, c: &Configuration) -> Result<Built, NotYet> {
        match self.obstacle(c) {
            Some(why) => Err(why),
            None => Built::of(&self.wanted).map_err(|failure| match failure {
                Failure::Input(wrong) => {
                    wrong.into_iter().next().map_or_else(|| not_yet(""), NotYet::from)
                }
                Failure::World(error) => not_yet(error.to_string()),
            }),
        }
    }

    /// What the fullest device of a plan holds.
    ///
    /// # Errors
    /// Why there is no program of it.
    pub fn held(&self, c: &Configuration) -> Result<Held, NotYet> {
        let built = self.built(c)?;
        self.lowered(&mut Lowering::new(built.purpose(&self.wanted))?, c)
    }

    fn lowered(&self, lowering: &mut Lowering<'_>, c: &Configuration) -> Result<Held, NotYet> {
        match self.obstacle(c) {
            Some(why) => Err(why),
            None => {
                let footprint = lowering.footprint(c)?;
                let Beside { reserve_bytes, host } = self.beside;
                let host_excess_bytes = (footprint.host as f64 - host.bytes(c)).max(0.0);
                Ok(Held { footprint, reserve_bytes, host_excess_bytes })
            }
        }
    }
}

/// Says of a plan that facts of its executor are stated.
pub const STATED: &str = "facts of the executor that `--assume` states";
/// Says of a plan that frozen weights are codes of few bits.
pub const FEW_BITS: &str = "frozen weights that are stored in few bits";

/// Whether frozen weights are stored in another type than products compute in.
pub fn stores_in_few_bits(lora: Option<&Lora>) -> bool {
    lora.is_some_and(|lora| lora.base.is_some())
}

/// Compiles the best plan of an answer. Where a time is minimised and its program does not fit, the
/// answer becomes the next one that does.
///
/// # Errors
/// `E3201` where no finalist's program fits.
pub fn settle(
    subject: &Subject,
    asked: &RequestFlags,
    aim: Aim,
    answer: &mut SearchResult,
) -> Result<Finalists, Failure> {
    let programs = Programs::of(subject, asked)?;
    let alone = |held| Finalists { held, oversized: Vec::new() };
    let built = match programs.built(&answer.best[0].configuration) {
        Ok(built) => built,
        Err(why) => return Ok(alone(Err(why))),
    };
    let mut lowering = match Lowering::new(built.purpose(&programs.wanted)) {
        Ok(lowering) => lowering,
        Err(why) => return Ok(alone(Err(why))),
    };
    let mut lower = |c: &Configuration| programs.lowered(&mut lowering, c);
    if !matches!(aim, Aim::Time | Aim::Cost | Aim::Energy) {
        return Ok(alone(lower(&answer.best[0].configuration)));
    }
    let estimator = subject.estimator()?;
    let mut search_within = |bytes: f64| {
        let estimator = estimator.clone().limited(Some(bytes));
        search(&question(subject, asked, &estimator, aim, &|| false).ok()?).ok()
    };
    let found = planner::finalists::settle(answer, &mut lower, &mut search_within)?;
    if aim == Aim::Energy && !found.oversized.is_empty() {
        // The bound that is kept is one of times.
        answer.gap = None;
    }
    Ok(found)
}

/// The bytes that a plan is known to need, and whether these fit.
pub fn needs(chosen: &Chosen, held: &Result<Held, NotYet>, have: f64) -> (f64, bool) {
    match held {
        Ok(held) => (held.total_bytes(), held.total_bytes() <= have),
        Err(_) => (chosen.estimate.memory.total_bytes(), chosen.fits),
    }
}

/// The memory of a plan as documents have it.
pub fn device_memory(expected: &Memory, held: &Result<Held, NotYet>) -> DeviceMemory {
    match held {
        Ok(held) => DeviceMemory {
            from: MemorySource::Compiled,
            bytes: held.memory(),
            communication_bytes: Some(held.footprint.communication as f64),
            arena_bytes: Some(held.footprint.arena),
            host_bytes: Some(held.footprint.host),
            disk_bytes: Some(held.footprint.disk),
            expected: Some(*expected),
            not_compiled: None,
        },
        Err(why) => DeviceMemory {
            from: MemorySource::Estimate,
            bytes: *expected,
            communication_bytes: None,
            arena_bytes: None,
            host_bytes: None,
            disk_bytes: None,
            expected: None,
            not_compiled: Some(why.to_string()),
        },
    }
}

fn bytes(bytes: f64) -> String {
    Bytes(bytes as u64).to_string()
}

/// What a plan needs under its compiled program and by the closed form, in a line or two.
pub fn memory_lines(expected: &Memory, held: &Result<Held, NotYet>) -> String {
    let of_closed_form = format!("{} expected in closed form", bytes(expected.total_bytes()));
    match held {
        Ok(held) => {
            let parts = held.memory().parts().into_iter().filter(|(_, held)| *held > 0.0);
            let parts: Vec<_> =
                parts.map(|(name, held)| format!("{name} {}", bytes(held))).collect();
            let total = bytes(held.total_bytes());
            let places = [("host", held.footprint.host), ("disk", held.footprint.disk)];
            let beside: String = places
                .into_iter()
                .filter(|(_, held)| *held > 0)
                .map(|(place, held)| format!("; on the {place} {}", Bytes(held)))
                .collect();
            let parts = parts.join(", ");
            format!("memory {total} compiled, {of_closed_form}\n  compiled: {parts}{beside}\n")
        }
        Err(why) => format!("memory {of_closed_form}; not compiled yet: {why}\n"),
    }
}

/// A line for each plan that would be better and whose program does not fit.
pub fn oversized_lines(oversized: &[Oversized], have: f64) -> String {
    let line = |Oversized { chosen, held }: &Oversized| {
        let [need, have] = [held.total_bytes(), have].map(bytes);
        let expected = bytes(chosen.estimate.memory.total_bytes());
        let name = &chosen.configuration;
        format!("{name} does not fit: {need} compiled, of {have}, {expected} expected\n")
    };
    oversized.iter().map(line).collect()
}

impl Subject {
    /// What plans of the subject are for, as it is asked about.
    pub fn wanted<'a>(&self, asked: &'a RequestFlags) -> Wanted<'a> {
        Wanted {
            model: asked.model.path(),
            cluster: self.cluster.describe(),
            target: self.cluster.target(),
            global_batch_size: self.global_batch as usize,
            seq: self.seq as usize,
            dtype: self.dtype,
            lora: asked.lora.clone(),
            predictions: Default::default(),
        }
    }
}
