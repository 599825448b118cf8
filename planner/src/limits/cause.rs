//! Which limits leave nothing: the fewest that do so together, found by leaving each out in turn,
//! and the values nearest to theirs that leave something.

use std::fmt;

use ir::{Diagnostic, Span};

use super::{ANYHOW, Decision, Limits, setting};

/// One limit of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Limit {
    /// It is so.
    Fix(Decision, usize),
    /// It is no more.
    Max(Decision, usize),
    /// It is not there.
    Forbid(Decision),
}

impl Limit {
    /// The flag that says it.
    fn flag(self) -> &'static str {
        match self {
            Limit::Fix(..) => "--fix",
            Limit::Max(..) => "--max",
            Limit::Forbid(_) => "--forbid",
        }
    }

    /// This limit with the value `number`; none for a limit without a value.
    fn of(self, number: usize) -> Option<Limit> {
        match self {
            Limit::Fix(decision, _) => Some(Limit::Fix(decision, number)),
            Limit::Max(decision, _) => Some(Limit::Max(decision, number)),
            Limit::Forbid(_) => None,
        }
    }

    /// The value, and the values of words that there are for it.
    fn number(self) -> Option<(usize, usize)> {
        match self {
            // Orders of axes are not near to each other.
            Limit::Fix(Decision::Placement, number) => Some((number.min(ANYHOW + 1), ANYHOW + 1)),
            Limit::Fix(decision, number) | Limit::Max(decision, number) => {
                Some((number, decision.words().len()))
            }
            Limit::Forbid(_) => None,
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Limit::Fix(decision, number) | Limit::Max(decision, number) => {
                write!(f, "{} {}", self.flag(), setting(decision, number))
            }
            Limit::Forbid(decision) => write!(f, "{} {decision}", self.flag()),
        }
    }
}

impl Limits {
    /// The limits of decisions, one by one.
    pub(crate) fn each(&self) -> Vec<Limit> {
        let fixed = self.fixed.iter().map(|(decision, number)| Limit::Fix(*decision, *number));
        let max = self.max.iter().map(|(decision, number)| Limit::Max(*decision, *number));
        fixed
            .chain(max)
            .chain(self.forbidden.iter().map(|decision| Limit::Forbid(*decision)))
            .collect()
    }

    fn without(&self, limit: Limit) -> Limits {
        let mut limits = self.clone();
        match limit {
            Limit::Fix(decision, _) => _ = limits.fixed.remove(&decision),
            Limit::Max(decision, _) => _ = limits.max.remove(&decision),
            Limit::Forbid(decision) => _ = limits.forbidden.remove(&decision),
        }
        limits
    }

    fn with(&self, limit: Limit) -> Limits {
        let mut limits = self.clone();
        match limit {
            Limit::Fix(decision, number) => _ = limits.fixed.insert(decision, number),
            Limit::Max(decision, number) => _ = limits.max.insert(decision, number),
            Limit::Forbid(decision) => _ = limits.forbidden.insert(decision),
        }
        limits
    }
}

/// Why limits leave nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cause {
    /// The limits, none of which can be left out; none where nothing is left without them either.
    pub(crate) limits: Vec<Limit>,
    /// What one of them can be in its place: the nearest values, the smaller one first.
    pub(crate) instead: Vec<Limit>,
}

impl Cause {
    /// Finds the cause, where limits leave nothing. `numbers` are counts that may be tried in the
    /// place of others, ascending.
    pub(crate) fn of(
        limits: &Limits,
        numbers: &[usize],
        leaves_some: impl Fn(&Limits) -> bool,
    ) -> Cause {
        let mut kept = limits.clone();
        for limit in limits.each() {
            let without = kept.without(limit);
            if !leaves_some(&without) {
                kept = without;
            }
        }
        let limits = kept.each();
        // Other values are allowed by all limits or they are no way out.
        let nearest = |limit: &Limit| {
            let Some((now, words)) = limit.number() else { return Vec::new() };
            let words: Vec<usize> = (0..words).collect();
            let numbers = if words.is_empty() { numbers } else { &words };
            let is_some = |number: &usize| {
                let other = limit.of(*number).map(|other| kept.without(*limit).with(other));
                other.is_some_and(|other| other.check().is_ok() && leaves_some(&other))
            };
            let smaller = numbers.iter().rev().filter(|number| **number < now).copied();
            let larger = numbers.iter().filter(|number| **number > now).copied();
            let smaller = smaller.filter(|_| matches!(limit, Limit::Fix(..)));
            let found = smaller.into_iter().find(is_some).into_iter();
            found.chain(larger.into_iter().find(is_some)).filter_map(|n| limit.of(n)).collect()
        };
        let instead = limits.iter().flat_map(nearest).collect();
        Cause { limits, instead }
    }

    /// The diagnostic, where limits leave `nothing`, such as `no configuration of 8 devices`; none
    /// where there is nothing without limits either.
    pub(crate) fn told(&self, nothing: &str) -> Option<Diagnostic> {
        let first = self.limits.first()?;
        let quoted = |limits: &[Limit], between: &str| {
            let texts: Vec<String> = limits.iter().map(|limit| format!("`{limit}`")).collect();
            texts.join(between)
        };
        let names = quoted(&self.limits, " and ");
        let (headline, leave_out) = match self.limits.len() {
            1 => (format!("{names} leaves {nothing}"), "leave it out"),
            _ => (format!("{names} together leave {nothing}"), "leave one of them out"),
        };
        let help = match self.instead.is_empty() {
            true => leave_out.to_owned(),
            false => format!("write {}, or {leave_out}", quoted(&self.instead, " or ")),
        };
        Some(Diagnostic::error("E3203", Span::of(first.flag()), headline).help(help))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(fix: &[&str], forbid: &[&str], max: &[&str]) -> Limits {
        let [fix, forbid, max] =
            [fix, forbid, max].map(|all| all.iter().map(|t| (*t).to_owned()).collect::<Vec<_>>());
        Limits::parse(&fix, &forbid, &max).unwrap()
    }

    /// Whether eight ranks and a batch of twelve samples have a layout, by trying all.
    fn has_some(limits: &Limits) -> bool {
        let sizes = 1..=8usize;
        sizes.clone().any(|tp| {
            sizes.clone().filter(|dp| tp * dp == 8 && 12usize.is_multiple_of(*dp)).any(|dp| {
                (1..=12 / dp).filter(|mbs| (12 / dp).is_multiple_of(*mbs)).any(|mbs| {
                    let decisions = [(Decision::Tp, tp), (Decision::Dp, dp), (Decision::Mbs, mbs)];
                    decisions.iter().all(|(decision, number)| limits.allow(*decision, *number))
                })
            })
        })
    }

    /// What is named leaves nothing together, and something without any of it; the values in its
    /// place leave something.
    #[test]
    fn the_fewest_limits_are_named() {
        let numbers: Vec<usize> = (1..=12).collect();
        for (given, named, instead) in [
            (limits(&["tp=3"], &[], &["mbs=4"]), "--fix tp=3", "--fix tp=2 --fix tp=4"),
            (limits(&["dp=8", "tp=1"], &[], &["mbs=4"]), "--fix tp=1", "--fix tp=2"),
            (limits(&[], &["tp"], &["mbs=4"]), "--forbid tp", ""),
            (
                limits(&["tp=2", "mbs=2"], &[], &["cp=2"]),
                "--fix tp=2 --fix mbs=2",
                "--fix tp=4 --fix mbs=1 --fix mbs=3",
            ),
            (limits(&[], &[], &["tp=1", "mbs=3"]), "--max tp=1", "--max tp=2"),
        ] {
            let cause = Cause::of(&given, &numbers, has_some);
            let texts = |all: &[Limit]| all.iter().map(Limit::to_string).collect::<Vec<_>>();
            assert_eq!(texts(&cause.limits).join(" "), named);
            assert_eq!(texts(&cause.instead).join(" "), instead, "{named}");
            let together =
                cause.limits.iter().fold(Limits::default(), |all, limit| all.with(*limit));
            assert!(!has_some(&together), "{named}");
            for limit in &cause.limits {
                assert!(has_some(&together.without(*limit)), "{limit} of {named}");
            }
        }
        let none = Cause::of(&limits(&["cp=2"], &[], &[]), &numbers, |_| false);
        assert_eq!(none.told("8 devices"), None);
    }
}
