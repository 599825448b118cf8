//! What the user fixes and forbids: `--fix tp=8 --forbid pp --max mbs=4 --max memory=60GiB`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use ir::import::nearest;
use ir::{Diagnostic, Span};

use crate::configuration::{Configuration, Offload, Recompute, Schedule, USUAL_ORDER};
use crate::quantity::Unit;

/// A decision that can be limited.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Knob {
    /// Pipeline stages.
    Pp,
    /// Data-parallel ranks.
    Dp,
    /// Tensor-parallel ranks.
    Tp,
    /// Sequence parallelism between layers: 0 or 1.
    Sp,
    /// Samples of a micro-batch on one rank.
    Mbs,
    /// What is kept for the backward pass, of all layers: 0 for nothing, 1 for everything.
    Keep,
    /// Context-parallel ranks.
    Cp,
    /// Expert-parallel ranks.
    Ep,
    /// Chunks of layers that a stage interleaves.
    Vpp,
    /// The schedule, by its place in [`Schedule::ALL`](crate::configuration::Schedule::ALL).
    Schedule,
    /// The ZeRO stage.
    Zero,
    /// Ranks over which one copy is sharded, where they are fewer than all.
    Shard,
    /// What is computed again: nothing, attention, some layers, all layers.
    Recompute,
    /// Whether anything lies elsewhere than on the device.
    Offload,
    /// Whether the axes are placed otherwise than usual.
    Placement,
}

impl Knob {
    /// All of them.
    pub const ALL: [Knob; 15] = [
        Knob::Pp,
        Knob::Dp,
        Knob::Tp,
        Knob::Sp,
        Knob::Mbs,
        Knob::Keep,
        Knob::Cp,
        Knob::Ep,
        Knob::Vpp,
        Knob::Schedule,
        Knob::Zero,
        Knob::Shard,
        Knob::Recompute,
        Knob::Offload,
        Knob::Placement,
    ];

    /// The name in flags.
    pub fn name(self) -> &'static str {
        match self {
            Knob::Pp => "pp",
            Knob::Dp => "dp",
            Knob::Tp => "tp",
            Knob::Sp => "sp",
            Knob::Mbs => "mbs",
            Knob::Keep => "keep",
            Knob::Cp => "cp",
            Knob::Ep => "ep",
            Knob::Vpp => "vpp",
            Knob::Schedule => "schedule",
            Knob::Zero => "zero",
            Knob::Shard => "shard",
            Knob::Recompute => "recompute",
            Knob::Offload => "offload",
            Knob::Placement => "placement",
        }
    }

    /// Names of the values, from 0 on; none where they are counts.
    pub fn words(self) -> &'static [&'static str] {
        match self {
            Knob::Keep => &["none", "full"],
            Knob::Sp | Knob::Offload => &["off", "on"],
            Knob::Schedule => &["gpipe", "1f1b", "zb-h1", "zb-h2"],
            Knob::Recompute => &["none", "attention", "layers", "full"],
            Knob::Placement => &["usual", "any"],
            Knob::Pp
            | Knob::Dp
            | Knob::Tp
            | Knob::Mbs
            | Knob::Cp
            | Knob::Ep
            | Knob::Vpp
            | Knob::Zero
            | Knob::Shard => &[],
        }
    }

    /// The value that does without it.
    pub fn without(self) -> usize {
        match self {
            Knob::Pp | Knob::Dp | Knob::Tp | Knob::Mbs | Knob::Cp | Knob::Ep | Knob::Vpp => 1,
            Knob::Keep | Knob::Schedule => 1,
            Knob::Sp | Knob::Zero | Knob::Shard => 0,
            Knob::Recompute | Knob::Offload | Knob::Placement => 0,
        }
    }
}

impl fmt::Display for Knob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The limits of a search.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    fixed: BTreeMap<Knob, usize>,
    max: BTreeMap<Knob, usize>,
    forbidden: BTreeSet<Knob>,
    /// Bytes of a device that a job may use.
    memory_bytes: Option<u64>,
}

/// The name of what is no decision and has a limit: bytes of a device.
const MEMORY: &str = "memory";

impl Limits {
    /// Reads the flags: `fix` and `max` are `KNOB=NUMBER`, `forbid` is `KNOB`; `max` is also
    /// `memory=BYTES` with a unit.
    ///
    /// # Errors
    /// `E3202` for each that is no limit.
    pub fn parse(
        fix: &[String],
        forbid: &[String],
        max: &[String],
    ) -> Result<Limits, Vec<Diagnostic>> {
        let mut limits = Limits::default();
        let mut diagnostics = Vec::new();
        for text in fix {
            match pair("--fix", text) {
                Ok((knob, number)) => diagnostics.extend(limits.fix_once(knob, number).err()),
                Err(diagnostic) => diagnostics.push(diagnostic),
            }
        }
        for text in max {
            if let Some(bytes) = text.strip_prefix(MEMORY).and_then(|rest| rest.strip_prefix('=')) {
                diagnostics.extend(limits.limit_memory(text, bytes).err());
                continue;
            }
            match pair("--max", text) {
                Ok((knob, number)) => {
                    let before = limits.max.insert(knob, number);
                    diagnostics.extend(contradiction("--max", knob, before, number));
                }
                Err(diagnostic) => diagnostics.push(diagnostic),
            }
        }
        for text in forbid {
            match knob("--forbid", text) {
                Ok(knob) => _ = limits.forbidden.insert(knob),
                Err(diagnostic) => diagnostics.push(diagnostic),
            }
        }
        if diagnostics.is_empty() { Ok(limits) } else { Err(diagnostics) }
    }

    /// Reads how many bytes of a device may be used.
    fn limit_memory(&mut self, text: &str, bytes: &str) -> Result<(), Diagnostic> {
        let number = Unit::Bytes.parse(bytes).filter(|bytes| *bytes >= 1.0);
        let Some(bytes) = number.map(|bytes| bytes as u64) else {
            let headline = format!("`--max {text}` has no number of bytes with a unit");
            let help = "write `--max memory=60GiB`, of each device";
            return Err(Diagnostic::error("E3202", Span::of("--max"), headline).help(help));
        };
        let before = self.memory_bytes.replace(bytes).filter(|before| *before != bytes);
        before.map_or(Ok(()), |before| {
            let [one, other] = [before, bytes].map(memory_setting);
            let headline = format!("`{one}` and `{other}` contradict each other");
            Err(Diagnostic::error("E3202", Span::of("--max"), headline).help("write one of them"))
        })
    }

    /// Bytes of a device that a job may use, where that is limited.
    pub fn memory_bytes(&self) -> Option<f64> {
        self.memory_bytes.map(|bytes| bytes as f64)
    }

    /// The limits of decisions alone.
    pub fn without_memory(&self) -> Limits {
        Limits { memory_bytes: None, ..self.clone() }
    }

    /// Fixes a decision.
    pub fn fix(&mut self, knob: Knob, number: usize) {
        self.fixed.insert(knob, number);
    }

    /// Fixes a decision that is not fixed to something else.
    ///
    /// # Errors
    /// `E3202` where it is.
    pub fn fix_once(&mut self, knob: Knob, number: usize) -> Result<(), Diagnostic> {
        let before = self.fixed.insert(knob, number);
        contradiction("--fix", knob, before, number).map_or(Ok(()), Err)
    }

    /// Whether a whole configuration may be so: as the search takes its decisions, partial shards
    /// alone are of the knob `shard`, and recomputation is also that of the knob `keep`.
    pub fn allow_all(&self, c: &Configuration) -> bool {
        let counts = [
            (Knob::Pp, c.pp),
            (Knob::Dp, c.dp),
            (Knob::Tp, c.tp),
            (Knob::Mbs, c.microbatch),
            (Knob::Cp, c.cp),
            (Knob::Ep, c.ep),
            (Knob::Vpp, c.vpp),
            (Knob::Sp, u32::from(c.sequence_parallel)),
            (Knob::Zero, u32::from(c.zero.stage)),
            (Knob::Offload, u32::from(c.offload != Offload::default())),
            (Knob::Placement, u32::from(c.order != USUAL_ORDER)),
        ];
        let schedule = Schedule::ALL.into_iter().position(|schedule| schedule == c.schedule);
        let (again, keeps) = match c.recompute {
            Recompute::None | Recompute::Auto => (0, self.allow(Knob::Keep, 1)),
            Recompute::Attention => (1, true),
            Recompute::Layers(_) => (2, self.fixed(Knob::Keep).is_none()),
            Recompute::Full => (3, self.allow(Knob::Keep, 0)),
        };
        counts.into_iter().all(|(knob, count)| self.allow(knob, count as usize))
            && schedule.is_some_and(|place| self.allow(Knob::Schedule, place))
            && (c.zero.shard == 0 || self.allow(Knob::Shard, c.zero.shard as usize))
            && self.allow(Knob::Recompute, again)
            && keeps
    }

    /// What a decision is fixed to.
    pub fn fixed(&self, knob: Knob) -> Option<usize> {
        self.fixed.get(&knob).copied()
    }

    /// Whether a decision may be so. What is forbidden is as if it were not there.
    pub fn allow(&self, knob: Knob, number: usize) -> bool {
        let none = knob.without();
        self.fixed.get(&knob).is_none_or(|fixed| *fixed == number)
            && self.max.get(&knob).is_none_or(|max| number <= *max)
            && (number == none || !self.forbidden.contains(&knob))
    }

    /// Whether anything is limited.
    pub fn is_empty(&self) -> bool {
        *self == Limits::default()
    }
}

impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fixed = self.fixed.iter().map(|(knob, n)| format!("--fix {}", setting(*knob, *n)));
        let max = self.max.iter().map(|(knob, n)| format!("--max {knob}={n}"));
        let memory = self.memory_bytes.map(memory_setting);
        let forbidden = self.forbidden.iter().map(|knob| format!("--forbid {knob}"));
        let all = fixed.chain(max).chain(memory).chain(forbidden);
        f.write_str(&all.collect::<Vec<_>>().join(" "))
    }
}

/// A limit of memory, as the flag that says it.
pub(crate) fn memory_setting(bytes: u64) -> String {
    format!("--max {MEMORY}={}", Unit::Bytes.print(bytes as f64).replace(' ', ""))
}

/// The diagnostic of a limit that is said twice, and not the same.
fn contradiction(
    flag: &str,
    knob: Knob,
    before: Option<usize>,
    number: usize,
) -> Option<Diagnostic> {
    let before = before.filter(|before| *before != number)?;
    let (one, other) = (setting(knob, before), setting(knob, number));
    let headline = format!("`{flag} {one}` and `{flag} {other}` contradict each other");
    Some(Diagnostic::error("E3202", Span::of(flag), headline).help("write one of them"))
}

fn setting(knob: Knob, number: usize) -> String {
    match (knob, knob.words().get(number)) {
        (Knob::Sp, _) | (_, None) => format!("{knob}={number}"),
        (_, Some(word)) => format!("{knob}={word}"),
    }
}

fn knob(flag: &str, name: &str) -> Result<Knob, Diagnostic> {
    Knob::ALL.into_iter().find(|knob| knob.name() == name).ok_or_else(|| {
        if name == MEMORY {
            let headline = format!("`{flag}` is of decisions, and {MEMORY} is none");
            let help = "write `--max memory=60GiB`, of each device";
            return Diagnostic::error("E3202", Span::of(flag), headline).help(help);
        }
        let memory = (flag == "--max").then_some(MEMORY);
        let names = || Knob::ALL.into_iter().map(Knob::name).chain(memory);
        let help = match nearest(name, names()) {
            Some(near) => format!("did you mean `{near}`?"),
            None => format!("these can be limited: {}", names().collect::<Vec<_>>().join(", ")),
        };
        let headline = format!("`{flag}` knows no `{name}`");
        Diagnostic::error("E3202", Span::of(flag), headline).help(help)
    })
}

fn pair(flag: &str, text: &str) -> Result<(Knob, usize), Diagnostic> {
    let (name, number) = text.split_once('=').unwrap_or((text, ""));
    let knob = knob(flag, name)?;
    let words = knob.words();
    let least = knob.without().min(1);
    let number = match words.iter().position(|word| *word == number) {
        Some(place) => Some(place),
        None if words.is_empty() || knob == Knob::Sp => {
            number.parse().ok().filter(|n| *n >= least && (knob != Knob::Sp || *n <= 1))
        }
        None => None,
    };
    number.map(|number| (knob, number)).ok_or_else(|| {
        let headline = format!("`{flag} {text}` has no number that fits");
        let help = match words {
            [] => format!("write `{flag} {knob}=8`"),
            words => format!("write `{flag} {knob}=` with one of {}", words.join(", ")),
        };
        Diagnostic::error("E3202", Span::of(flag), headline).help(help)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read_and_told() {
        let texts = |list: &[&str]| list.iter().map(|t| (*t).to_owned()).collect::<Vec<_>>();
        let limits =
            Limits::parse(&texts(&["tp=8", "keep=none"]), &texts(&["pp"]), &texts(&["mbs=4"]));
        let limits = limits.unwrap();
        assert_eq!(limits.to_string(), "--fix tp=8 --fix keep=none --max mbs=4 --forbid pp");
        assert!(limits.allow(Knob::Tp, 8) && !limits.allow(Knob::Tp, 4));
        assert!(limits.allow(Knob::Pp, 1) && !limits.allow(Knob::Pp, 2));
        assert!(limits.allow(Knob::Mbs, 4) && !limits.allow(Knob::Mbs, 8));
        let errors = Limits::parse(&texts(&["kepp=full", "tp=0"]), &[], &[]).unwrap_err();
        assert_eq!(errors[0].help.as_deref(), Some("did you mean `keep`?"));
        assert_eq!(errors[1].headline, "`--fix tp=0` has no number that fits");
    }

    #[test]
    fn memory_has_a_unit() {
        let limits = |max: &[&str]| {
            let max = max.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
            Limits::parse(&[], &[], &max)
        };
        let limited = limits(&["memory=60GiB", "tp=4"]).unwrap();
        assert_eq!(limited.to_string(), "--max tp=4 --max memory=60GiB");
        assert_eq!(limited.memory_bytes(), Some(60.0 * 1_073_741_824.0));
        assert!(!limited.is_empty() && limited.without_memory().memory_bytes().is_none());
        assert_eq!(limits(&["memory=80 GB", "memory=8e0"]).unwrap_err().len(), 1);
        let headline = |max: &[&str]| limits(max).unwrap_err()[0].headline.clone();
        for text in ["memory=60", "memory=", "memory=-1GiB", "memory=0GiB", "memory=GiB"] {
            assert!(headline(&[text]).contains("no number of bytes"), "{text}");
        }
        assert!(headline(&["memory=1GiB", "memory=2GiB"]).contains("contradict"));
        let help = limits(&["memroy=1GiB"]).unwrap_err()[0].help.clone();
        assert_eq!(help.as_deref(), Some("did you mean `memory`?"));
        let fixed = Limits::parse(&["memory=1GiB".to_owned()], &[], &[]).unwrap_err();
        assert!(fixed[0].headline.contains("is of decisions"), "{fixed:?}");
    }

    #[test]
    fn limits_do_not_contradict_each_other() {
        let texts = |list: &[&str]| list.iter().map(|t| (*t).to_owned()).collect::<Vec<_>>();
        let errors =
            Limits::parse(&texts(&["tp=4", "tp=8"]), &[], &texts(&["pp=2", "pp=3"])).unwrap_err();
        assert_eq!(errors[0].headline, "`--fix tp=4` and `--fix tp=8` contradict each other");
        assert_eq!(errors[1].headline, "`--max pp=2` and `--max pp=3` contradict each other");
        assert!(Limits::parse(&texts(&["tp=4", "tp=4"]), &[], &[]).is_ok());
    }

    /// A whole configuration is allowed where each of its decisions is.
    #[test]
    fn limits_are_those_of_whole_configurations() {
        let c = "tp=2 pp=2 dp=2 mbs=1 zero=2 recompute=full offload-optimizer=host".parse();
        let c: Configuration = c.unwrap();
        for (fix, allowed) in [
            ("tp=2", true),
            ("tp=1", false),
            ("zero=2", true),
            ("zero=0", false),
            ("offload=off", false),
            ("recompute=full", true),
            ("recompute=none", false),
            ("keep=none", true),
            ("keep=full", false),
            ("sp=off", true),
            ("schedule=1f1b", true),
            ("schedule=gpipe", false),
            ("placement=usual", true),
        ] {
            let limits = Limits::parse(&[fix.to_owned()], &[], &[]).unwrap();
            assert_eq!(limits.allow_all(&c), allowed, "{fix}");
        }
    }
}
