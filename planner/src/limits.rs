//! What the user fixes and forbids: `--fix tp=8 --forbid pp --max mbs=4 --max memory=60GiB`.

pub(crate) mod cause;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use ir::import::nearest;
use ir::plan::parse_order;
use ir::{Axis, Diagnostic, Span};

use crate::configuration::{Configuration, Offload, Place, Recompute, Schedule, USUAL_ORDER, Zero};
use crate::quantity::Unit;
use crate::tools::{Form, Sizes, Target};

/// A decision that can be limited.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Decision {
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
    /// Tensor-parallel ranks that slice the same experts; 0 for as many as the executor has.
    Etp,
    /// Chunks of layers that a stage interleaves.
    Vpp,
    /// The schedule, by its place in [`Schedule::ALL`](crate::configuration::Schedule::ALL).
    Schedule,
    /// The ZeRO stage.
    Zero,
    /// Ranks over which one copy is sharded; 0 for all that hold one.
    Shard,
    /// What is recomputed: nothing, attention, some layers, all layers.
    Recompute,
    /// Whether anything lies elsewhere than on the device.
    Offload,
    /// Where states of the optimizer and masters lie, by its number in
    /// [`Place::ALL`](ir::plan::Place::ALL).
    OffloadOptimizer,
    /// Where weights lie between calls, likewise.
    OffloadParameters,
    /// Where what the backward pass reads lies between passes, likewise.
    OffloadActivations,
    /// How the axes are placed: 0 as usual, 1 anyhow, from 2 on in one order.
    Placement,
}

impl Decision {
    /// All of them.
    pub const ALL: [Decision; 19] = [
        Decision::Pp,
        Decision::Dp,
        Decision::Tp,
        Decision::Sp,
        Decision::Mbs,
        Decision::Keep,
        Decision::Cp,
        Decision::Ep,
        Decision::Etp,
        Decision::Vpp,
        Decision::Schedule,
        Decision::Zero,
        Decision::Shard,
        Decision::Recompute,
        Decision::Offload,
        Decision::OffloadOptimizer,
        Decision::OffloadParameters,
        Decision::OffloadActivations,
        Decision::Placement,
    ];

    /// The name in flags.
    pub fn name(self) -> &'static str {
        match self {
            Decision::Pp => "pp",
            Decision::Dp => "dp",
            Decision::Tp => "tp",
            Decision::Sp => "sp",
            Decision::Mbs => "mbs",
            Decision::Keep => "keep",
            Decision::Cp => "cp",
            Decision::Ep => "ep",
            Decision::Etp => "etp",
            Decision::Vpp => "vpp",
            Decision::Schedule => "schedule",
            Decision::Zero => "zero",
            Decision::Shard => "shard",
            Decision::Recompute => "recompute",
            Decision::Offload => "offload",
            Decision::OffloadOptimizer => "offload-optimizer",
            Decision::OffloadParameters => "offload-parameters",
            Decision::OffloadActivations => "offload-activations",
            Decision::Placement => "placement",
        }
    }

    /// Names of the values, from 0 on; none where they are counts.
    pub fn words(self) -> &'static [&'static str] {
        match self {
            Decision::Keep => &["none", "full"],
            Decision::Sp | Decision::Offload => &["off", "on"],
            Decision::OffloadOptimizer
            | Decision::OffloadParameters
            | Decision::OffloadActivations => &["device", "host", "disk"],
            Decision::Schedule => &["gpipe", "1f1b", "zb-h1", "zb-h2"],
            Decision::Recompute => &["none", "attention", "layers", "full"],
            Decision::Placement => &["usual", "any"],
            Decision::Pp
            | Decision::Dp
            | Decision::Tp
            | Decision::Mbs
            | Decision::Cp
            | Decision::Ep
            | Decision::Etp
            | Decision::Vpp
            | Decision::Zero
            | Decision::Shard => &[],
        }
    }

    /// The value that does without it.
    pub fn without(self) -> usize {
        match self {
            Decision::Pp
            | Decision::Dp
            | Decision::Tp
            | Decision::Mbs
            | Decision::Cp
            | Decision::Ep
            | Decision::Vpp => 1,
            Decision::Keep | Decision::Schedule => 1,
            Decision::Sp | Decision::Zero | Decision::Shard | Decision::Etp => 0,
            Decision::Recompute
            | Decision::Offload
            | Decision::OffloadOptimizer
            | Decision::OffloadParameters
            | Decision::OffloadActivations
            | Decision::Placement => 0,
        }
    }
}

impl fmt::Display for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The numbers of [`Decision::Recompute`] of the recomputation that is the same in all layers.
pub const RECOMPUTE_NONE: usize = 0;
/// As [`RECOMPUTE_NONE`].
pub const RECOMPUTE_ATTENTION: usize = 1;
/// As [`RECOMPUTE_NONE`]: of some layers.
pub const RECOMPUTE_LAYERS: usize = 2;
/// As [`RECOMPUTE_NONE`].
pub const RECOMPUTE_FULL: usize = 3;

/// The number of [`Decision::Placement`] that allows all orders.
const ANYHOW: usize = 1;
/// From here on the numbers of [`Decision::Placement`] are orders of the axes: their places in the
/// usual order, as digits.
const ORDERS: usize = 2;

/// The number of an order of the axes: 0 of the usual one.
fn order_number(order: [Axis; 4]) -> usize {
    if order == USUAL_ORDER {
        return 0;
    }
    let place = |axis: &Axis| USUAL_ORDER.iter().position(|usual| usual == axis).unwrap_or(0);
    ORDERS + order.iter().fold(0, |number, axis| 4 * number + place(axis))
}

/// The order of a number.
fn order_of(number: usize) -> [Axis; 4] {
    let digits = number.saturating_sub(ORDERS);
    [64, 16, 4, 1].map(|unit| USUAL_ORDER[digits / unit % 4])
}

/// The axes of a configuration that have several ranks, in an order.
fn moving(order: [Axis; 4], c: &Configuration) -> impl Iterator<Item = Axis> {
    order.into_iter().filter(|axis| c.size(*axis) > 1)
}

/// The limits of a search.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    fixed: BTreeMap<Decision, usize>,
    max: BTreeMap<Decision, usize>,
    forbidden: BTreeSet<Decision>,
    /// Bytes of a device that a job may use.
    memory_bytes: Option<u64>,
    /// The tool that is to execute the plan.
    target: Option<Target>,
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
                Ok((decision, number)) => {
                    diagnostics.extend(limits.fix_once(decision, number).err())
                }
                Err(diagnostic) => diagnostics.push(diagnostic),
            }
        }
        for text in max {
            if let Some(bytes) = text.strip_prefix(MEMORY).and_then(|rest| rest.strip_prefix('=')) {
                diagnostics.extend(limits.limit_memory(text, bytes).err());
                continue;
            }
            let limited = pair("--max", text);
            let limited = limited.and_then(|(of, number)| Ok((bounded("--max", of)?, number)));
            match limited {
                Ok((decision, number)) => {
                    let before = limits.max.insert(decision, number);
                    diagnostics.extend(contradiction("--max", decision, before, number));
                }
                Err(diagnostic) => diagnostics.push(diagnostic),
            }
        }
        for text in forbid {
            match decision("--forbid", text).and_then(|decision| bounded("--forbid", decision)) {
                Ok(decision) => _ = limits.forbidden.insert(decision),
                Err(diagnostic) => diagnostics.push(diagnostic),
            }
        }
        diagnostics.extend(limits.contradictions());
        if diagnostics.is_empty() { Ok(limits) } else { Err(diagnostics) }
    }

    /// Whether the limits leave what they fix.
    ///
    /// # Errors
    /// `E3202` for each decision that is fixed to what is forbidden, or to more than there may be.
    pub fn check(&self) -> Result<(), Vec<Diagnostic>> {
        let wrong = self.contradictions();
        if wrong.is_empty() { Ok(()) } else { Err(wrong) }
    }

    fn contradictions(&self) -> Vec<Diagnostic> {
        let fixed = self.fixed.iter().map(|(decision, number)| (*decision, *number));
        let wrong = |(decision, number): (Decision, usize)| {
            let other = match self.max.get(&decision).filter(|max| number > **max) {
                Some(max) => format!("--max {}", setting(decision, *max)),
                None if !self.bound(decision, number) => format!("--forbid {decision}"),
                None => return None,
            };
            let headline =
                format!("`--fix {}` and `{other}` contradict", setting(decision, number));
            let help = "write one of them";
            Some(Diagnostic::error("E3202", Span::of("--fix"), headline).help(help))
        };
        fixed.filter_map(wrong).collect()
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

    /// Limits a search to what a tool can express.
    pub fn for_tool(self, target: Option<Target>) -> Limits {
        Limits { target, ..self }
    }

    /// The tool that is to execute the plan.
    pub fn target(&self) -> Option<Target> {
        self.target
    }

    /// A configuration with what is fixed, and everything else at its default.
    pub fn named(&self) -> Configuration {
        let mut c = Configuration::default();
        let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        for (decision, number) in self.fixed.iter().map(|(decision, number)| (*decision, *number)) {
            let place = || Place::ALL.get(number).copied().unwrap_or_default();
            match decision {
                Decision::Pp => c.pp = count(number),
                Decision::Dp => c.dp = count(number),
                Decision::Tp => c.tp = count(number),
                Decision::Cp => c.cp = count(number),
                Decision::Ep => c.ep = count(number),
                Decision::Etp => c.etp = count(number),
                Decision::Vpp => c.vpp = count(number),
                Decision::Mbs => c.microbatch = count(number),
                Decision::Sp => c.sequence_parallel = number == 1,
                Decision::Schedule => {
                    c.schedule = Schedule::ALL.get(number).copied().unwrap_or_default();
                }
                Decision::Zero => c.zero.stage = u8::try_from(number).unwrap_or(u8::MAX),
                Decision::Shard => c.zero.shard = count(number),
                Decision::OffloadOptimizer => c.offload.optimizer = place(),
                Decision::OffloadParameters => c.offload.parameters = place(),
                Decision::OffloadActivations => c.offload.activations = place(),
                Decision::Keep | Decision::Recompute | Decision::Offload | Decision::Placement => {}
            }
        }
        c
    }

    /// What is left where the user fixes and forbids nothing: the tool alone.
    pub fn released(&self) -> Limits {
        Limits::default().for_tool(self.target)
    }

    /// Reads a decision and its number, as in `--fix KNOB=NUMBER`.
    ///
    /// # Errors
    /// `E3202` for what is none.
    pub fn decision(text: &str) -> Result<(Decision, usize), Diagnostic> {
        pair("--fix", text)
    }

    /// Fixes a decision.
    pub fn fix(&mut self, decision: Decision, number: usize) {
        self.fixed.insert(decision, number);
    }

    /// Fixes a decision that is not fixed to something else.
    ///
    /// # Errors
    /// `E3202` where it is.
    pub fn fix_once(&mut self, decision: Decision, number: usize) -> Result<(), Diagnostic> {
        let before = self.fixed.insert(decision, number);
        contradiction("--fix", decision, before, number).map_or(Ok(()), Err)
    }

    /// Whether a whole configuration may be so: as the search takes its decisions, recomputation is
    /// also that of the knob `keep`.
    pub fn allow_all(&self, c: &Configuration) -> bool {
        let counts = [
            (Decision::Pp, c.pp),
            (Decision::Dp, c.dp),
            (Decision::Tp, c.tp),
            (Decision::Mbs, c.microbatch),
            (Decision::Cp, c.cp),
            (Decision::Ep, c.ep),
            (Decision::Etp, c.etp),
            (Decision::Vpp, c.vpp),
            (Decision::Sp, u32::from(c.sequence_parallel)),
            (Decision::Zero, u32::from(c.zero.stage)),
        ];
        let schedule = Schedule::ALL.into_iter().position(|schedule| schedule == c.schedule);
        let (recomputed, keeps) = match c.recompute {
            Recompute::None | Recompute::Auto => (0, self.allow(Decision::Keep, 1)),
            Recompute::Attention => (1, true),
            Recompute::Layers(_) => (2, self.fixed(Decision::Keep).is_none()),
            Recompute::Full => (3, self.allow(Decision::Keep, 0)),
        };
        counts.into_iter().all(|(decision, count)| self.allow(decision, count as usize))
            && self.allow_offload(c.offload)
            && schedule.is_some_and(|place| self.allow(Decision::Schedule, place))
            && self.allow_order(c)
            && match c.zero {
                Zero { stage: 1.., shard: 0 } => self.allow_whole_shards(c),
                Zero { shard, .. } => self.allow(Decision::Shard, shard as usize),
            }
            && self.allow(Decision::Recompute, recomputed)
            && keeps
            && self
                .target
                .is_none_or(|target| target.refusals(c, Sizes::default(), Form::Launch).is_empty())
    }

    /// Whether values may lie where a configuration places them.
    pub fn allow_offload(&self, offload: Offload) -> bool {
        let Offload { optimizer, parameters, activations } = offload;
        self.allow(Decision::Offload, usize::from(offload != Offload::default()))
            && self.allow(Decision::OffloadOptimizer, optimizer as usize)
            && self.allow(Decision::OffloadParameters, parameters as usize)
            && self.allow(Decision::OffloadActivations, activations as usize)
    }

    /// Whether ZeRO may shard over all ranks that hold copies, `dp · cp` of them: where a shard of
    /// that size is allowed, or is fixed to 0, or the decision is forbidden.
    pub fn allow_whole_shards(&self, c: &Configuration) -> bool {
        let copies = c.dp as usize * c.cp as usize;
        self.allow(Decision::Shard, copies)
            || self.fixed(Decision::Shard) == Some(0)
            || self.forbidden.contains(&Decision::Shard)
    }

    /// Whether the axes of a configuration may be placed as they are. Those of one rank are
    /// anywhere.
    pub fn allow_order(&self, c: &Configuration) -> bool {
        let is_order = |order: [Axis; 4]| moving(order, c).eq(moving(c.order, c));
        let (decision, other) = (Decision::Placement, usize::from(!is_order(USUAL_ORDER)));
        match self.fixed_order() {
            Some(fixed) => is_order(fixed) && self.bound(decision, other),
            None => self.allow(decision, other),
        }
    }

    /// The order of axes that is fixed, where it is not the usual one.
    pub fn fixed_order(&self) -> Option<[Axis; 4]> {
        self.fixed(Decision::Placement).filter(|fixed| *fixed >= ORDERS).map(order_of)
    }

    /// What a decision is fixed to.
    pub fn fixed(&self, decision: Decision) -> Option<usize> {
        self.fixed.get(&decision).copied()
    }

    /// Whether a decision may be so. What is forbidden is as if it were not there.
    pub fn allow(&self, decision: Decision, number: usize) -> bool {
        let is_free = |fixed: usize| decision == Decision::Placement && fixed == ANYHOW;
        self.fixed.get(&decision).is_none_or(|fixed| *fixed == number || is_free(*fixed))
            && self.bound(decision, number)
    }

    /// The same, whatever is fixed.
    fn bound(&self, decision: Decision, number: usize) -> bool {
        let none = decision.without();
        self.max.get(&decision).is_none_or(|max| number <= *max)
            && (number == none || !self.forbidden.contains(&decision))
    }

    /// Whether the user limits anything, beside the tool that is planned for.
    pub fn is_empty(&self) -> bool {
        *self == self.released()
    }
}

impl fmt::Display for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fixed =
            self.fixed.iter().map(|(decision, n)| format!("--fix {}", setting(*decision, *n)));
        let max = self.max.iter().map(|(decision, n)| format!("--max {}", setting(*decision, *n)));
        let memory = self.memory_bytes.map(memory_setting);
        let forbidden = self.forbidden.iter().map(|decision| format!("--forbid {decision}"));
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
    decision: Decision,
    before: Option<usize>,
    number: usize,
) -> Option<Diagnostic> {
    let before = before.filter(|before| *before != number)?;
    let (one, other) = (setting(decision, before), setting(decision, number));
    let headline = format!("`{flag} {one}` and `{flag} {other}` contradict each other");
    Some(Diagnostic::error("E3202", Span::of(flag), headline).help("write one of them"))
}

fn setting(decision: Decision, number: usize) -> String {
    if decision == Decision::Placement && number >= ORDERS {
        return format!("{decision}={}", order_of(number).map(Axis::name).join("."));
    }
    match (decision, decision.words().get(number)) {
        (Decision::Sp, _) | (_, None) => format!("{decision}={number}"),
        (_, Some(word)) => format!("{decision}={word}"),
    }
}

fn decision(flag: &str, name: &str) -> Result<Decision, Diagnostic> {
    // Layouts say `order`.
    let wanted = if name == "order" { Decision::Placement.name() } else { name };
    Decision::ALL.into_iter().find(|decision| decision.name() == wanted).ok_or_else(|| {
        if name == MEMORY {
            let headline = format!("`{flag}` is of decisions, and {MEMORY} is none");
            let help = "write `--max memory=60GiB`, of each device";
            return Diagnostic::error("E3202", Span::of(flag), headline).help(help);
        }
        let memory = (flag == "--max").then_some(MEMORY);
        let names = || Decision::ALL.into_iter().map(Decision::name).chain(memory);
        let help = match nearest(name, names()) {
            Some(near) => format!("did you mean `{near}`?"),
            None => format!("these can be limited: {}", names().collect::<Vec<_>>().join(", ")),
        };
        let headline = format!("`{flag}` knows no `{name}`");
        Diagnostic::error("E3202", Span::of(flag), headline).help(help)
    })
}

/// Refuses a decision that has no number of its own where it is not fixed.
fn bounded(flag: &str, decision: Decision) -> Result<Decision, Diagnostic> {
    if decision != Decision::Etp {
        return Ok(decision);
    }
    let headline = format!("`{flag} {decision}` bounds what is the executor's unless it is fixed");
    Err(Diagnostic::error("E3202", Span::of(flag), headline).help("write `--fix etp=N`"))
}

fn pair(flag: &str, text: &str) -> Result<(Decision, usize), Diagnostic> {
    let (name, said) = text.split_once('=').unwrap_or((text, ""));
    let decision = decision(flag, name)?;
    let words = decision.words();
    let least = decision.without().min(1);
    let number = match words.iter().position(|word| *word == said) {
        Some(place) => Some(place),
        // An order is fixed, or it is not.
        None if decision == Decision::Placement && flag == "--fix" => {
            parse_order(said).map(order_number)
        }
        None if words.is_empty() || decision == Decision::Sp => {
            said.parse().ok().filter(|n| *n >= least && (decision != Decision::Sp || *n <= 1))
        }
        None => None,
    };
    number.map(|number| (decision, number)).ok_or_else(|| {
        let headline = match words {
            [] => format!("`{flag} {text}` has no number that fits"),
            _ => format!("`{flag} {text}`: there is no `{said}` of {decision}"),
        };
        let help = match words {
            [] => format!("write `{flag} {decision}=8`"),
            words if decision == Decision::Placement && flag == "--fix" => format!(
                "write `{flag} {decision}=` with one of {}, or the four axes, innermost first: \
                 tp.cp.dp.pp",
                words.join(", ")
            ),
            words => format!("write `{flag} {decision}=` with one of {}", words.join(", ")),
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
        assert!(limits.allow(Decision::Tp, 8) && !limits.allow(Decision::Tp, 4));
        assert!(limits.allow(Decision::Pp, 1) && !limits.allow(Decision::Pp, 2));
        assert!(limits.allow(Decision::Mbs, 4) && !limits.allow(Decision::Mbs, 8));
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
        for (forbid, max, said) in
            [("tp", "pp=2", "`--forbid tp`"), ("cp", "tp=2", "`--max tp=2`"), ("cp", "tp=4", "")]
        {
            let found = Limits::parse(&texts(&["tp=4", "cp=1"]), &texts(&[forbid]), &texts(&[max]));
            let said = format!("`--fix tp=4` and {said} contradict");
            let headlines = found.err().map(|all| all[0].headline.clone());
            assert_eq!(headlines, (forbid == "tp" || max == "tp=2").then_some(said));
        }
    }

    /// An order of the axes is fixed as layouts say it; axes of one rank are anywhere in it.
    #[test]
    fn orders_are_fixed_as_they_are_printed() {
        let limits = |fix: &str| Limits::parse(&[fix.to_owned()], &[], &[]);
        let c = |text: &str| text.parse::<Configuration>().unwrap();
        for order in ["tp.dp.pp.cp", "cp.tp.dp.pp", "pp.dp.cp.tp"] {
            let fixed = limits(&format!("order={order}")).unwrap();
            assert_eq!(fixed.to_string(), format!("--fix placement={order}"));
            assert_eq!(limits(&format!("placement={order}")).unwrap(), fixed);
            assert!(fixed.allow_all(&c(&format!("tp=2 cp=2 pp=2 dp=2 mbs=1 order={order}"))));
        }
        let swapped = limits("placement=tp.dp.pp.cp").unwrap();
        for (text, allowed) in [
            ("tp=2 pp=2 dp=2 mbs=1", true),
            ("tp=2 cp=2 dp=2 mbs=1", false),
            ("tp=2 cp=2 dp=2 mbs=1 order=tp.dp.cp.pp", true),
            ("tp=2 cp=2 dp=2 mbs=1 order=dp.tp.cp.pp", false),
        ] {
            assert_eq!(swapped.allow_all(&c(text)), allowed, "{text}");
        }
        assert_eq!(limits("order=tp.cp.dp.pp").unwrap(), limits("placement=usual").unwrap());
        let any = limits("placement=any").unwrap();
        assert!(
            any.allow_all(&c("tp=2 dp=2 mbs=1 order=dp.tp.cp.pp")) && any.allow_all(&c("dp=2"))
        );
        for wrong in ["placement=tp.tp.dp.pp", "placement=tp.dp", "order=", "placement=none"] {
            let help = limits(wrong).unwrap_err()[0].help.clone();
            assert!(help.is_some_and(|help| help.contains("tp.cp.dp.pp")), "{wrong}");
        }
        let forbid = ["placement".to_owned()];
        let none = Limits::parse(&["order=dp.tp.cp.pp".to_owned()], &forbid, &[]).unwrap_err();
        assert!(none[0].headline.contains("contradict"), "{none:?}");
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
