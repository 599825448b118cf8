//! `--assume`: facts of the executor that users state, read, completed and printed from one table.

use std::ffi::OsStr;

use clap::builder::{PossibleValue, StringValueParser, TypedValueParser};
use planner::estimate::profile::{self, Assumption, Profile, Stated};

use crate::failure::{Failure, usage};

/// The flag.
#[derive(Clone, Debug, Default, PartialEq, clap::Args)]
pub struct Assumed {
    /// State facts of the executor on top of its profile, on GPUs: optimizer=adam-8bit,
    /// gradients=bf16, attention=flash-2, cuda-graphs, reserve=2GiB, …; `--help` lists all
    #[arg(long, value_name = "FACT[=VALUE],…", value_delimiter = ',', value_parser = Facts)]
    #[arg(hide_possible_values = true, allow_hyphen_values = true)]
    #[arg(long_help = format!("{ABOUT}\n{}", profile::table()))]
    pub assume: Vec<String>,
}

const ABOUT: &str = "State facts of the executor on top of its profile, on GPUs. Every answer \
                     prints all of them, those that were stated apart. A fact without a \
                     value is stated as `yes`. In inference those count that are marked so. The \
                     facts, with what they can be:\n";

impl Assumed {
    /// What is stated.
    pub fn stated(&self) -> Result<Stated, Failure> {
        self.stated_beside(&[])
    }

    /// What is stated, and what of `facts` is about something else.
    pub fn stated_beside(&self, facts: &[String]) -> Result<Stated, Failure> {
        let name = |fact: &str| fact.trim().split('=').next().unwrap_or_default().to_owned();
        let is_stated = |fact: &&String| self.assume.iter().any(|own| name(own) == name(fact));
        let beside = facts.iter().filter(|fact| !is_stated(fact)).cloned();
        let all: Vec<String> = self.assume.iter().cloned().chain(beside).collect();
        let wrong = |all: Vec<(String, String)>| -> Failure {
            let one = |(headline, help)| usage("--assume", headline).help(help);
            all.into_iter().map(one).collect::<Vec<_>>().into()
        };
        Stated::read(&all).map_err(wrong)
    }

    /// What is stated of an executor of inference; facts that its price does not depend on are
    /// refused.
    pub fn stated_of_inference(&self) -> Result<Stated, Failure> {
        let stated = self.stated()?;
        let used = profile::FACTS.iter().filter(|fact| fact.inference).map(|fact| fact.name);
        let used = used.collect::<Vec<_>>().join(", ");
        let refuse = |name: &str| {
            let headline = format!("`{name}` is of training, and `--for` asks about inference");
            let help = match name {
                "weights" => "write `--weight-dtype FORMAT`".to_owned(),
                _ => format!("leave it out; facts of inference are {used}"),
            };
            usage("--assume", headline).help(help)
        };
        let refused: Vec<_> = stated.of_training().into_iter().map(refuse).collect();
        if refused.is_empty() { Ok(stated) } else { Err(refused.into()) }
    }

    /// Refuses facts where nothing reads them; `why` says what does not go together.
    pub fn refuse(&self, why: &str) -> Result<(), Failure> {
        let Some(first) = self.assume.first() else { return Ok(()) };
        let headline = format!("`{first}` is of the executor on GPUs, and {why}");
        Err(usage("--assume", headline).help("leave it out").into())
    }
}

/// Columns of a line of facts.
const COLUMNS: usize = 80;

/// The facts that a profile assumes, those that are stated apart.
pub fn lines(profile: &Profile) -> String {
    lines_of(profile.assumptions())
}

/// Facts in lines, those that are stated apart.
pub fn lines_of(facts: Vec<Assumption>) -> String {
    let (stated, assumed): (Vec<_>, Vec<_>) = facts.into_iter().partition(|fact| fact.stated);
    listed("assumes", &assumed) + &listed("stated", &stated)
}

/// Facts behind a word, in lines that are as long as they may be.
fn listed(word: &str, facts: &[Assumption]) -> String {
    let mut text = String::new();
    let mut line = format!("{word:<8}");
    for (at, Assumption { name, value, .. }) in facts.iter().enumerate() {
        let comma = if at + 1 < facts.len() { "," } else { "" };
        let part = format!(" {name} {}{comma}", value.replace(" bytes a parameter", " B"));
        if line.len() + part.len() > COLUMNS {
            text += &format!("{line}\n");
            line = " ".repeat(8);
        }
        line += &part;
    }
    if facts.is_empty() { text } else { text + &line + "\n" }
}

/// Texts, which a shell completes from the table; what is wrong with them is said of all at once,
/// by [`Assumed::stated`].
#[derive(Clone, Debug)]
struct Facts;

impl TypedValueParser for Facts {
    type Value = String;

    fn parse_ref(
        &self,
        command: &clap::Command,
        argument: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<String, clap::Error> {
        StringValueParser::new().parse_ref(command, argument, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        let all = profile::completions().iter();
        Some(Box::new(all.map(|(text, means)| PossibleValue::new(text.as_str()).help(*means))))
    }
}
