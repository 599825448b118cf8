//! Rewriting: a function replaced by an equal, cheaper one.
//!
//! A function becomes an e-graph (`egg`), a set of classes of equal terms ([`region`]); rules add
//! equal terms to classes ([`rules`], applied by [`saturate`](mod@saturate)); one term of each
//! class is chosen, so that their prices sum to the least ([`choose`](mod@choose), [`price`]), and
//! made a function again.
//!
//! **Invariants.**
//! * Attributes are in the term, types are facts of its class: terms of one class have equal types,
//!   and no term is added that [`infer`](crate::infer) refuses.
//! * A rule says what it keeps: every bit, all but rounding, or less. Every rule is executed on
//!   random instances, by the interpreter.
//! * The same function yields the same one again, on any number of threads.
//! * Parameters, results and their types stay; values that stay keep their names.
//!
//! **Reading order.** [`term`], [`facts`], [`region`], [`pattern`], [`rules`],
//! [`idiom`], [`saturate`](mod@saturate), [`choose`](mod@choose), [`price`], [`report`], `piece`.

pub mod term;
pub mod facts;
pub mod region;
pub mod pattern;
pub mod rules;
pub mod saturation;
pub mod idiom;
pub mod saturate;
pub mod choose;
pub mod price;
pub mod report;
mod piece;

use std::collections::{BTreeMap, BTreeSet};

use egg::Id;

use crate::module::{Function, Kind, Module};
use crate::recognise::{Found, is_recognised, recognise};
use crate::types::TensorType;
use choose::{Choice, DECISIONS_MAX, choose};
use pattern::{Pattern, Site};
use price::{Work, term_work, work};
use region::Region;
use report::{Change, FunctionReport, Report};
use rules::{Keeps, Rule};
use saturate::{Limits, Selection, saturate};
use saturation::Saturation;
use term::Term;

/// How a module is rewritten.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Which rules are applied.
    pub selection: Selection,
    /// What a saturation may take.
    pub limits: Limits,
}

/// Replaces every function that is no composite by an equal, cheaper one, where there is one.
///
/// Keeps parameters, results and their types, and what functions compute as far as the selected
/// rules do. A function is looked at once, however often it is called.
pub fn simplify(module: &mut Module, options: &Options) -> Report {
    let mut report = Report::default();
    let names: Vec<String> = module.functions.iter().map(|f| f.name.clone()).collect();
    for name in names {
        let Some(function) = module.function(&name) else { continue };
        if matches!(function.kind, Kind::Composite { .. }) {
            continue;
        }
        let (before, _) = function_work(function, module);
        let found = recognised(module, &name, options);
        let Some(function) = module.function(&name) else { continue };
        if is_list_of_calls(function, module) {
            report.functions.push(unchanged(function, module));
            continue;
        }
        let rules = |region: &mut Region| saturate(region, &options.selection, &options.limits);
        let (simpler, mut reports) = in_pieces(&function.clone(), module, &rules);
        if !found.is_empty() {
            note(&found, before, &mut reports[0]);
        }
        report.functions.append(&mut reports);
        if let Some(place) = module.functions.iter_mut().find(|f| f.name == name) {
            *place = simpler;
        }
    }
    report
}

/// What is recognised in a function by what it computes. Where a definition stands, op for op, it
/// is found first: another composite may compute the same as it by more ops.
fn recognised(module: &mut Module, function: &str, options: &Options) -> Vec<Found> {
    let selection = &options.selection;
    if !selection.composites || !selection.by_meaning {
        return Vec::new();
    }
    let takes = |name: &str| selection.takes(name, Keeps::Bits);
    if !is_recognised(module, function, &takes) {
        return Vec::new();
    }
    let mut found = Vec::new();
    if let Some(place) = module.functions.iter().position(|f| f.name == function) {
        let definitions = |region: &mut Region| saturate::find_definitions(region, &takes);
        let (defined, reports) = in_pieces(&module.functions[place].clone(), module, &definitions);
        let changes = reports.into_iter().flat_map(|report| report.changes);
        found.extend(changes.flat_map(|Change { value, rules }| {
            rules.into_iter().map(move |composite| Found { composite, value: value.clone() })
        }));
        if let Some(place) = module.functions.iter_mut().find(|f| f.name == function) {
            *place = defined;
        }
    }
    found.extend(recognise(module, function, &takes, &|_| None));
    found
}

/// Adds what was recognised beforehand to the report of a function, which did `before` then.
fn note(found: &[Found], before: Work, report: &mut FunctionReport) {
    report.before = before;
    for Found { composite, value } in found {
        *report.saturation.uses.entry(composite).or_default() += 1;
        if !report.changes.iter().any(|change| change.value == *value) {
            report.changes.push(Change { value: value.clone(), rules: vec![composite] });
        }
    }
}

/// Whether all that a function does is to call layers, each call another one: nothing that any rule
/// knows, however many there are.
fn is_list_of_calls(function: &Function, module: &Module) -> bool {
    let is_layer = |callee: &str| module.function(callee).is_some_and(|f| f.kind == Kind::Layer);
    let mut seen = BTreeSet::new();
    function.nodes.iter().all(|node| {
        node.callee().is_some_and(is_layer) && seen.insert((node.callee(), &node.operands))
    })
}

/// The report of a function that is left as it is.
fn unchanged(function: &Function, module: &Module) -> FunctionReport {
    let (before, _) = function_work(function, module);
    FunctionReport {
        name: function.name.clone(),
        before,
        after: before,
        classes: 0,
        terms: 0,
        saturation: Saturation { is_complete: true, ..Saturation::default() },
        decisions: 0,
        gap: 0.0,
        changes: Vec::new(),
    }
}

/// Simplifies a function, piece by piece where it is large, by what `saturates` adds to a graph.
fn in_pieces(
    function: &Function,
    module: &mut Module,
    saturates: &dyn Fn(&mut Region) -> Saturation,
) -> (Function, Vec<FunctionReport>) {
    let pieces = piece::cut(function, piece::NODES_MAX);
    let count = pieces.len();
    let (mut simpler, mut reports) = (Vec::new(), Vec::new());
    for (at, piece) in pieces.iter().enumerate() {
        let (emitted, mut of_piece) = simplify_one(piece, module, &function.name, saturates);
        if count > 1 {
            of_piece.name = format!("{} ({} of {count})", function.name, at + 1);
        }
        simpler.push(emitted);
        reports.push(of_piece);
    }
    let simpler = match count {
        1 => simpler.remove(0),
        _ => piece::join(function, &pieces, &simpler),
    };
    (simpler, reports)
}

/// Simplifies a function, or a piece of the function `caller`; composites that it calls then are
/// placed above that.
fn simplify_one(
    function: &Function,
    module: &mut Module,
    caller: &str,
    saturates: &dyn Fn(&mut Region) -> Saturation,
) -> (Function, FunctionReport) {
    let mut region = Region::of(function, module);
    let saturation = saturates(&mut region);
    let choice = match saturation.steps.is_empty() {
        true => Some(region.only_choice()),
        false => region.choose(),
    };
    let choice = match choice {
        Some(choice) => choice,
        // Without any choice free of cycles there is still the function as it was.
        None => {
            region = Region::of(function, module);
            region.only_choice()
        }
    };
    let (emitted, report) = replace(&region, saturation, &choice);
    place_callees(module, caller, &emitted, &region);
    (emitted, report)
}

/// The rule that makes something break, among those that are tried; none where there are none.
///
/// `holds` is asked with the rules that are applied. Without any it must hold, with all it must
/// not: what is returned is the first rule, in the order given, that breaks it together with those
/// before it. Asks once for each halving of their number.
///
/// # Errors
/// Those of `holds`.
pub fn bisect<'r, E>(
    rules: &[&'r str],
    mut holds: impl FnMut(&[&'r str]) -> Result<bool, E>,
) -> Result<Option<&'r str>, E> {
    let (mut fine, mut broken) = (0, rules.len());
    while fine + 1 < broken {
        let middle = usize::midpoint(fine, broken);
        if holds(&rules[..middle])? { fine = middle } else { broken = middle }
    }
    Ok(broken.checked_sub(1).map(|last| rules[last]))
}

/// A function of primitive ops as rules alone simplify it.
pub(crate) fn normal_form(function: &Function) -> Function {
    let mut region = Region::of(function, &Module::default());
    let selection = Selection { composites: false, ..Selection::default() };
    saturate(&mut region, &selection, &Limits::default());
    match region.choose() {
        Some(choice) => region.emit(&choice.terms),
        None => function.clone(),
    }
}

/// Puts the composites that a piece of a function calls above the function.
fn place_callees(module: &mut Module, caller: &str, function: &Function, region: &Region) {
    let callees: BTreeSet<String> =
        function.nodes.iter().filter_map(|node| node.callee().map(str::to_owned)).collect();
    for callee in callees {
        let place = |name: &str| module.functions.iter().position(|f| f.name == name);
        match (place(&callee), place(caller)) {
            (Some(at), Some(of_caller)) if at > of_caller => {
                let callee = module.functions.remove(at);
                module.functions.insert(0, callee);
            }
            (Some(_), _) => {}
            (None, _) => {
                let made = region.graph.analysis.module.function(&callee).cloned();
                module.functions.splice(0..0, made);
            }
        }
    }
}

impl Region {
    /// The terms of a graph to which no rule has added any; nobody asks for their price.
    fn only_choice(&self) -> Choice {
        Choice { terms: self.as_it_is(), price: 0, bound: 0, decisions: 0 }
    }

    /// The cheapest terms that compute the results.
    pub fn choose(&self) -> Option<Choice> {
        let price = |term: &Term| term_work(&self.graph, term).price();
        choose(&self.graph, &self.results, price, DECISIONS_MAX)
    }
}

/// The function that was chosen, or the one that was there where that is no dearer.
fn replace(region: &Region, saturation: Saturation, choice: &Choice) -> (Function, FunctionReport) {
    let module = &region.graph.analysis.module;
    let (before, price_before) = function_work(&region.function, module);
    let emitted = region.emit(&choice.terms);
    let (after, price_after) = function_work(&emitted, module);
    let is_better = price_after < price_before && has_names_of_results(&emitted, &region.function);
    let function = if is_better { emitted } else { region.function.clone() };
    let report = FunctionReport {
        name: function.name.clone(),
        before,
        after: if is_better { after } else { before },
        classes: region.graph.number_of_classes(),
        terms: region.graph.total_size(),
        changes: if is_better { changes(region, &saturation, choice) } else { Vec::new() },
        saturation,
        decisions: choice.decisions,
        gap: choice.gap(),
    };
    (function, report)
}

/// Whether results have the names of those of another function: plans and callers ask for
/// gradients by name, so that two of them are not made one value of one name.
fn has_names_of_results(function: &Function, other: &Function) -> bool {
    let names = |f: &Function| -> Vec<String> {
        f.results.iter().map(|result| f.value(*result).name.clone()).collect()
    };
    names(function) == names(other)
}

/// What a function does, its calls as one launch each, and the price of that. What a callee does is
/// looked at once, however often it is called.
fn function_work(function: &Function, module: &Module) -> (Work, choose::Price) {
    let mut of_callees: BTreeMap<&str, Work> = BTreeMap::new();
    let (mut sum, mut price) = (Work::default(), 0);
    for node in &function.nodes {
        let of_node = || {
            let types = |ids: &[crate::ValueId]| -> Vec<&TensorType> {
                ids.iter().map(|id| function.ty(*id)).collect()
            };
            work(&node.op, &types(&node.operands), &types(&node.results), module)
        };
        let work = match node.callee() {
            Some(callee) => *of_callees.entry(callee).or_insert_with(of_node),
            None => of_node(),
        };
        sum = sum.plus(work);
        price += work.price();
    }
    (sum, price)
}

/// Which chosen terms rules have made, and by which rules.
fn changes(region: &Region, saturation: &Saturation, choice: &Choice) -> Vec<Change> {
    let history = History::of(region, saturation);
    let mut changes = Vec::new();
    for (class, term) in &choice.terms {
        let mut rules = Vec::new();
        history.follow(region, term, &mut BTreeSet::new(), &mut rules);
        if !rules.is_empty() {
            changes.push(Change { value: region.name_of(*class), rules });
        }
    }
    changes
}

/// Which use of a rule made each term.
struct History<'s> {
    made_by: BTreeMap<Term, &'s saturation::Step>,
}

impl<'s> History<'s> {
    fn of(region: &Region, saturation: &'s Saturation) -> History<'s> {
        let mut made_by = BTreeMap::new();
        for step in &saturation.steps {
            for term in &step.to {
                made_by.entry(canonical(region, term)).or_insert(step);
            }
        }
        for term in region.original_terms() {
            made_by.remove(&canonical(region, &term));
        }
        History { made_by }
    }

    /// The rules that led to a term, the first one first.
    fn follow(
        &self,
        region: &Region,
        term: &Term,
        seen: &mut BTreeSet<Term>,
        rules: &mut Vec<&'static str>,
    ) {
        let term = canonical(region, term);
        let Some(step) = self.made_by.get(&term).filter(|_| seen.insert(term.clone())) else {
            return;
        };
        for from in &step.from {
            self.follow(region, from, seen, rules);
        }
        if !rules.contains(&step.rule) {
            rules.push(step.rule);
        }
    }
}

fn canonical(region: &Region, term: &Term) -> Term {
    let operands = term.operands.iter().map(|id: &Id| region.graph.find(*id)).collect();
    Term { head: term.head, operands }
}

/// The function with one rule applied once, where the first result is computed. None where the rule
/// finds nothing there.
///
/// For the proof of a rule: what it returns has the right side in place of the left.
pub fn apply_once(function: &Function, module: &Module, rule: &Rule) -> Option<Function> {
    let mut region = Region::of(function, module);
    let root = region.graph.find(region.results[0]);
    let (left, right) = (Pattern::parse(rule.left), Pattern::parse(rule.right));
    for found in left.search(&region.graph, root, 8) {
        let site = Site { graph: &region.graph, found: &found, root };
        let Some(ops) = (rule.when)(&site) else { continue };
        let (class, _) = right.build(&mut region.graph, &found, &ops)?;
        term::rebuild(&mut region.graph);
        region.results[0] = class;
        return Some(region.emit(&region.as_it_is()));
    }
    None
}
