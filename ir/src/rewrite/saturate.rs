//! Saturation: rules applied to an e-graph until nothing new comes up, within counted limits.

use std::sync::OnceLock;

use egg::Id;

use super::idiom;
use super::pattern::{Found, Pattern, Site, names_of};
use super::region::Region;
use super::rules::{Keeps, Rule, rules};
use super::saturation::{Saturation, Step};
use super::term::rebuild;

/// What a saturation may take. Counts, never times, so that the same input gives the same graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// How often all rules are tried.
    pub rounds: usize,
    /// How many terms the graph may have.
    pub terms: usize,
    /// How many places one rule may find in one round.
    pub places: usize,
}

impl Default for Limits {
    /// Chosen: a block of a transformer with its gradient takes 3 rounds and 500 terms.
    fn default() -> Limits {
        Limits { rounds: 8, terms: 20_000, places: 4_000 }
    }
}

/// Which rules are applied.
#[derive(Clone, Debug)]
pub struct Selection {
    /// Rules that keep less are left out.
    pub keeps: Keeps,
    /// Rules that are left out by name.
    pub without: Vec<String>,
    /// Whether composites of the library are recognised where their definition stands.
    pub composites: bool,
    /// Whether they are recognised by what is computed too, which changes rounding.
    pub by_meaning: bool,
    /// Rules beside those that are built in, tried after them.
    pub more: &'static [Rule],
}

impl Default for Selection {
    fn default() -> Selection {
        Selection {
            keeps: Keeps::Rounding,
            without: Vec::new(),
            composites: true,
            by_meaning: true,
            more: &[],
        }
    }
}

impl Selection {
    /// Rules that keep every bit, and composites where their definition stands.
    pub fn exact() -> Selection {
        Selection { by_meaning: false, ..Selection::for_models() }
    }

    /// What models are prepared with: rules that keep every bit, and composites, by definition and
    /// by what is computed.
    pub fn for_models() -> Selection {
        Selection { keeps: Keeps::Bits, ..Selection::default() }
    }

    /// Whether a rule is applied.
    pub fn takes(&self, name: &str, keeps: Keeps) -> bool {
        keeps <= self.keeps && self.without.iter().all(|without| without != name)
    }
}

/// A rule with its sides read.
struct Sides {
    rule: &'static Rule,
    /// The names of ops that the left side's root may be.
    roots: Vec<&'static str>,
    left: Pattern,
    right: Pattern,
}

impl Sides {
    fn of(rule: &'static Rule) -> Sides {
        let (left, right) = (Pattern::parse(rule.left), Pattern::parse(rule.right));
        let root = rule.left.trim_start_matches('(').split([' ', '#']).next().unwrap_or_default();
        Sides { rule, roots: names_of(root), left, right }
    }
}

fn built_in() -> &'static [Sides] {
    static SIDES: OnceLock<Vec<Sides>> = OnceLock::new();
    SIDES.get_or_init(|| rules().map(Sides::of).collect())
}

/// Applies rules until nothing new comes up or a limit is hit.
pub fn saturate(region: &mut Region, selection: &Selection, limits: &Limits) -> Saturation {
    let mut done = Saturation::default();
    let more: Vec<Sides> = selection.more.iter().map(Sides::of).collect();
    for _ in 0..limits.rounds {
        done.rounds += 1;
        let before = (region.graph.total_size(), done.steps.len());
        let mut places = Vec::new();
        for sides in built_in().iter().chain(&more) {
            if selection.takes(sides.rule.name, sides.rule.keeps) {
                find(region, sides, limits, &mut places, &mut done);
            }
        }
        if selection.composites {
            let takes = |name: &str| selection.takes(name, Keeps::Bits);
            for found in idiom::find(region, takes, &mut done) {
                idiom::apply(region, found, &mut done);
            }
        }
        for (sides, class, found) in places {
            if region.graph.total_size() >= limits.terms {
                done.hit(format!("{} terms", limits.terms));
                break;
            }
            apply(region, sides, class, found, &mut done);
        }
        rebuild(&mut region.graph);
        if before == (region.graph.total_size(), done.steps.len()) {
            done.is_complete = true;
            break;
        }
        if !done.limits_hit.is_empty() {
            break;
        }
    }
    if !done.is_complete && done.limits_hit.is_empty() {
        done.hit(format!("{} rounds", limits.rounds));
    }
    done
}

/// Adds the calls of the composites whose definitions stand in a graph, op for op.
pub(super) fn find_definitions(region: &mut Region, takes: &dyn Fn(&str) -> bool) -> Saturation {
    let mut done = Saturation { rounds: 1, ..Saturation::default() };
    for found in idiom::find(region, takes, &mut done) {
        idiom::apply(region, found, &mut done);
    }
    rebuild(&mut region.graph);
    done
}

fn find<'s>(
    region: &Region,
    sides: &'s Sides,
    limits: &Limits,
    places: &mut Vec<(&'s Sides, Id, Found)>,
    done: &mut Saturation,
) {
    let mut classes: Vec<Id> = Vec::new();
    for name in &sides.roots {
        classes.extend(region.graph.classes_for_op(name).into_iter().flatten());
    }
    classes.sort_unstable();
    classes.dedup();
    let mut count = 0;
    for class in classes {
        let found = sides.left.search(&region.graph, class, limits.places - count);
        count += found.len();
        places.extend(found.into_iter().map(|found| (sides, class, found)));
        if count >= limits.places {
            done.hit(format!("{} places of `{}`", limits.places, sides.rule.name));
            return;
        }
    }
}

fn apply(region: &mut Region, sides: &Sides, class: Id, found: Found, done: &mut Saturation) {
    let site = Site { graph: &region.graph, found: &found, root: class };
    let Some(ops) = (sides.rule.when)(&site) else { return };
    let Some((right, to)) = sides.right.build(&mut region.graph, &found, &ops) else { return };
    if region.graph.union(class, right) {
        done.note(Step { rule: sides.rule.name, class, from: found.terms, to });
    }
}
