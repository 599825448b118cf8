//! A plan over groups of devices as one configuration, which is what other tools can be told.
//!
//! Copies on every group that have as many micro-batches and lie alike are copies of one
//! configuration; stages that lie alike on every group are uneven stages of one. Everything else is
//! refused with what differs: no tool that is exported to takes a layout for each group.

use std::fmt;

use super::Tool;
use crate::configuration::Configuration;

/// What one group does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The group's name.
    pub group: String,
    /// Its devices' name.
    pub device: String,
    /// Samples of a step.
    pub samples: u32,
    /// How its ranks are used; stages are those of the group.
    pub configuration: Configuration,
}

/// How parts make a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Every group has copies of the model.
    Shares,
    /// The stages of each group follow those of the one before it.
    Stages,
}

/// Why a tool cannot be told a plan over groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// No group does anything.
    Nothing,
    /// The tool knows devices of one kind.
    OneDevice(Tool),
    /// Two groups lie otherwise: their names, and what each has.
    Layouts([String; 2], [String; 2]),
    /// Copies on two groups have other numbers of samples: their names, and the numbers.
    Samples([String; 2], [u32; 2]),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Nothing => write!(f, "no group does anything"),
            Refusal::OneDevice(tool) => {
                write!(f, "{} knows devices of one kind, and the plan has several", tool.name())
            }
            Refusal::Layouts([a, b], [one, other]) => {
                write!(f, "`{a}` lies as `{one}`, `{b}` as `{other}`, and there is one layout")
            }
            Refusal::Samples([a, b], [one, other]) => {
                write!(f, "copies on `{a}` have {one} samples, on `{b}` {other}, not as many")
            }
        }
    }
}

/// The one configuration that a plan over groups is, with the samples of all of them.
///
/// # Errors
/// What the tool cannot be told.
pub fn joined(kind: Kind, parts: &[Part], tool: Tool) -> Result<Configuration, Refusal> {
    let Some((first, others)) = parts.split_first() else { return Err(Refusal::Nothing) };
    if tool == Tool::Calculon && others.iter().any(|other| other.device != first.device) {
        return Err(Refusal::OneDevice(tool));
    }
    let alone = |part: &Part| alike(kind, &part.configuration);
    for other in others {
        let names = [first.group.clone(), other.group.clone()];
        if alone(first) != alone(other) {
            return Err(Refusal::Layouts(
                names,
                [alone(first), alone(other)].map(|c| c.to_string()),
            ));
        }
        let samples = [first, other].map(|part| part.samples / part.configuration.dp.max(1));
        if kind == Kind::Shares && samples[0] != samples[1] {
            return Err(Refusal::Samples(names, samples));
        }
    }
    let mut whole = first.configuration.clone();
    let all = || parts.iter().map(|part| &part.configuration);
    match kind {
        Kind::Shares => whole.dp = all().map(|c| c.dp).sum(),
        Kind::Stages => {
            whole.pp = all().map(|c| c.pp).sum();
            whole.stage_layers = all().flat_map(|c| c.stage_layers.iter().copied()).collect();
            let is_even = |layers: &[u32]| layers.windows(2).all(|pair| pair[0] == pair[1]);
            if is_even(&whole.stage_layers) {
                whole.stage_layers.clear();
            }
        }
    }
    Ok(whole)
}

/// A layout without what groups may differ in.
fn alike(kind: Kind, c: &Configuration) -> Configuration {
    match kind {
        Kind::Shares => Configuration { dp: 1, ..c.clone() },
        Kind::Stages => Configuration { pp: 1, stage_layers: Vec::new(), ..c.clone() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(group: &str, samples: u32, text: &str) -> Part {
        let device = group.to_owned();
        Part { group: group.to_owned(), device, samples, configuration: text.parse().unwrap() }
    }

    /// A whole is cut into groups and joined again.
    #[test]
    fn parts_are_joined_as_they_were_cut() {
        let whole = "tp=2 pp=3 dp=4 mbs=1 sp zero=1 stages=4.6.5";
        let parts = [
            part("a", 32, "tp=2 pp=2 dp=4 mbs=1 sp zero=1 stages=4.6"),
            part("b", 32, "tp=2 pp=1 dp=4 mbs=1 sp zero=1 stages=5"),
        ];
        for tool in [Tool::Megatron, Tool::Torchtitan, Tool::DeepSpeed] {
            let joined = joined(Kind::Stages, &parts, tool).unwrap();
            assert_eq!(joined.to_string(), whole.parse::<Configuration>().unwrap().to_string());
        }
        assert_eq!(
            joined(Kind::Stages, &parts, Tool::Calculon),
            Err(Refusal::OneDevice(Tool::Calculon))
        );
        let shares = [part("a", 48, "tp=2 dp=6 mbs=2"), part("b", 16, "tp=2 dp=2 mbs=2")];
        let joined = joined(Kind::Shares, &shares, Tool::Megatron).unwrap();
        assert_eq!((joined.dp, joined.tp, joined.microbatch), (8, 2, 2));
    }

    #[test]
    fn what_differs_is_told() {
        let a = part("a", 32, "tp=2 dp=4 mbs=1");
        let refused = |other: Part| {
            joined(Kind::Shares, &[a.clone(), other], Tool::Megatron).unwrap_err().to_string()
        };
        let layouts = refused(part("b", 32, "tp=4 dp=4 mbs=1"));
        assert!(layouts.contains("`a` lies as") && layouts.contains("tp=4"), "{layouts}");
        let samples = refused(part("b", 32, "tp=2 dp=8 mbs=1"));
        assert_eq!(samples, "copies on `a` have 8 samples, on `b` 4, not as many");
        assert_eq!(joined(Kind::Shares, &[], Tool::Megatron), Err(Refusal::Nothing));
        let alone = joined(Kind::Shares, std::slice::from_ref(&a), Tool::Calculon).unwrap();
        assert_eq!(alone, a.configuration);
    }
}
