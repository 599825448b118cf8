//! Whether a composite of a module is what the library has under its name.

use std::collections::BTreeMap;

use super::bounds::{Breach, infinite};
use super::{Template, read_instance, templates};
use crate::dim::Dim;
use crate::import::nearest;
use crate::module::{Attributes, Function, Kind, Module};
use crate::text::print::line;
use crate::types::TensorType;
use crate::{Diagnostic, Span};

/// What a composite is called whose body is not the library's: `edited.gelu_tanh`.
const EDITED: &str = "edited.";

/// Something wrong with the attributes of an instance.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Fault {
    /// The attribute; none where one is missing.
    pub(crate) attribute: Option<String>,
    /// The code of a diagnostic about it.
    pub(crate) code: &'static str,
    headline: String,
    note: Option<String>,
    help: Option<String>,
}

impl Fault {
    /// A diagnostic at a place.
    pub(crate) fn at(self, span: Span) -> Diagnostic {
        let mut diagnostic = Diagnostic::error(self.code, span, self.headline);
        diagnostic.notes.extend(self.note);
        diagnostic.help = self.help;
        diagnostic
    }
}

/// What is wrong with the attributes of an instance for operands of the given types; nothing for a
/// composite that the library does not have.
///
/// `E1014` for attributes that the composite does not take or that are missing; where there are
/// none, `E1015` for values that are out of bounds.
pub(crate) fn faults(composite: &str, given: &Attributes, operands: &[TensorType]) -> Vec<Fault> {
    let Some(template) = templates().get(composite) else { return Vec::new() };
    let wrong = template.misnamed(given);
    match template.complete(given) {
        Some(attributes) if wrong.is_empty() => {
            let breaches = template.breaches(&template.all(&attributes), operands);
            breaches.into_iter().map(|breach| out_of_bounds(composite, breach)).collect()
        }
        _ => wrong,
    }
}

fn out_of_bounds(composite: &str, breach: Breach) -> Fault {
    let Breach { attribute, value, wanted, with } = breach;
    let headline = format!("`{attribute}` is {value}, and `{composite}` needs {wanted}");
    let with: Vec<String> = with.iter().map(|(name, value)| format!("{name} = {value}")).collect();
    let note = (!with.is_empty()).then(|| format!("here {}", with.join(", ")));
    Fault { attribute: Some(attribute), code: "E1015", headline, note, help: None }
}

impl Template {
    /// Attributes that are unknown or missing.
    fn misnamed(&self, given: &Attributes) -> Vec<Fault> {
        let names = || self.attributes.iter().map(|(name, _)| name.as_str());
        let mut wrong = Vec::new();
        for key in given.keys().filter(|key| names().all(|name| name != *key)) {
            let known: Vec<String> = names().map(|name| format!("`{name}`")).collect();
            let takes = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
            wrong.push(Fault {
                attribute: Some(key.clone()),
                code: "E1014",
                headline: format!("`{}` has no attribute `{key}`", self.name),
                note: Some(format!("the attributes of `{}`: {takes}", self.name)),
                help: nearest(key, names()).map(|near| format!("did you mean `{near}`?")),
            });
        }
        let is_missing = |(name, default): &&(String, Option<f64>)| {
            default.is_none() && !given.contains_key(name)
        };
        for (name, _) in self.attributes.iter().filter(is_missing) {
            wrong.push(Fault {
                attribute: None,
                code: "E1014",
                headline: format!("`{}` needs the attribute `{name}`", self.name),
                note: None,
                help: Some(format!("write `{name}=` and a number between the parentheses")),
            });
        }
        wrong
    }

    /// The bounds that attributes break, where sizes are those of the operands.
    fn breaches(&self, attributes: &Attributes, operands: &[TensorType]) -> Vec<Breach> {
        if let Some(breach) = infinite(attributes) {
            return vec![breach];
        }
        let definition = self.definition(attributes);
        let names = definition.bind(attributes.clone(), operands);
        let dims = names.map(|names| names.dims).unwrap_or_default();
        let size = |name: &str| dims.get(name).and_then(Dim::as_constant).map(|size| size as f64);
        definition.bounds.iter().filter_map(|bound| bound.breach(attributes, size)).collect()
    }
}

/// What keeps a function from being what its kind says: the faults of its attributes, and `E1016`
/// for a body that is not the library's.
pub(crate) fn check(function: &Function) -> Vec<Diagnostic> {
    let Kind::Composite { name, attributes } = &function.kind else { return Vec::new() };
    let span = || Span::of(format!("@{}", function.name));
    let faults = faults(name, attributes, &function.param_types());
    if !faults.is_empty() {
        return faults.into_iter().map(|fault| fault.at(span())).collect();
    }
    if !templates().contains_key(name) || definition(function).is_some() {
        return Vec::new();
    }
    let headline = format!("the body of `@{}` is not the library's `{name}`", function.name);
    let mut wrong = Diagnostic::error("E1016", span(), headline);
    wrong.notes.extend(first_difference(function));
    vec![wrong]
}

/// Makes every composite that names one of the library the library's own instance. One whose body
/// computes something else becomes a composite of its own, which has no kernel and is compiled as
/// its body says; a warning `W1017` at the place that `place` tells says so.
///
/// Composites whose attributes are wrong are left as they are.
pub(crate) fn settle(module: &mut Module, place: impl Fn(&str) -> Span) -> Vec<Diagnostic> {
    let mut warnings = Vec::new();
    for function in &mut module.functions {
        let Kind::Composite { name, attributes } = &function.kind else { continue };
        let types = function.param_types();
        if !templates().contains_key(name) || !faults(name, attributes, &types).is_empty() {
            continue;
        }
        if let Some(instance) = definition(function) {
            *function = instance;
            continue;
        }
        let headline = format!(
            "the body of `@{}` is not the library's `{name}`, and is compiled as it is written",
            function.name
        );
        let mut warning = Diagnostic::warning("W1017", place(&function.name), headline)
            .help(format!("give it a name of its own in place of `{name}`, or restore its body"));
        warning.notes.extend(first_difference(function));
        warnings.push(warning);
        let kind = Kind::Composite { name: format!("{EDITED}{name}"), attributes: [].into() };
        function.kind = kind;
    }
    warnings
}

/// The library's instance under a function's name, where the function computes the same.
fn definition(function: &Function) -> Option<Function> {
    let instance = instance(function)?;
    let mut known = Numbers::new();
    let (own, other) = (numbers(function, &mut known), numbers(&instance, &mut known));
    let results = |function: &Function, numbers: &[usize]| -> Vec<usize> {
        function.results.iter().map(|result| numbers[result.index()]).collect()
    };
    (results(function, &own) == results(&instance, &other)).then_some(instance)
}

fn instance(function: &Function) -> Option<Function> {
    let Kind::Composite { name, attributes } = &function.kind else { return None };
    read_instance(name, attributes, &function.param_types(), &function.name)?.ok()
}

/// The first line of a body that the library's does not have.
fn first_difference(function: &Function) -> Option<String> {
    let Some(instance) = instance(function) else {
        return Some("its parameters are not those of the library's".to_owned());
    };
    let mut known = Numbers::new();
    numbers(&instance, &mut known);
    let count = known.len();
    let own = numbers(function, &mut known);
    let node = function.nodes.iter().find(|node| own[node.results[0].index()] >= count)?;
    Some(format!("the library has no line `{}`", line(function, node)))
}

/// The number of each value: an op with its operands' numbers and, of several results, which.
type Numbers = BTreeMap<(String, Vec<usize>, usize), usize>;

/// For each value of a function its number: equal values of two functions have one.
fn numbers(function: &Function, known: &mut Numbers) -> Vec<usize> {
    let mut number = |key: (String, Vec<usize>, usize)| {
        let next = known.len();
        *known.entry(key).or_insert(next)
    };
    let mut numbers: Vec<usize> =
        (0..function.param_count).map(|at| number((String::new(), Vec::new(), at))).collect();
    for node in &function.nodes {
        // What is printed tells ops apart down to the bits of their numbers.
        let op = format!("{:?}", node.op);
        let operands: Vec<usize> = node.operands.iter().map(|o| numbers[o.index()]).collect();
        for at in 0..node.results.len() {
            numbers.push(number((op.clone(), operands.clone(), at)));
        }
    }
    numbers
}
