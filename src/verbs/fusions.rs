//! `inspect MODEL --fusions`: what rewriting makes of each function before planning, by which
//! rules, and what one rank launches for each layer then.

use std::collections::BTreeSet;

use codegen::launched::{Launch, Launched, launched};
use ir::import::Model;
use ir::precision::Precision;
use ir::rewrite::price::Work;
use ir::rewrite::report::{FunctionReport, Report};
use ir::rewrite::rules::rules;
use ir::rewrite::saturate::Selection;
use ir::rewrite::{Options, idiom, simplify};
use ir::{DType, Module};
use serde_json::{Value, json};

use crate::LOSS;
use crate::documents::{self, Document};
use crate::failure::{Failure, usage};
use crate::output::{self, Table};

/// What rewriting makes of a model, and what is launched then.
#[derive(Debug)]
pub struct Fusions {
    /// The passes: what recognition found, and what was simplified when gradients were there.
    pub passes: Vec<Report>,
    /// The launches of each layer, which are those for one sample on one rank; none where
    /// the model cannot be planned.
    pub launched: Vec<Launched>,
    /// Why launches cannot be told.
    pub refused: Option<String>,
    /// The names of all values, before and after.
    values: BTreeSet<String>,
}

/// The report on a model as it is prepared for planning. A model that cannot be planned is only
/// simplified.
///
/// # Errors
/// `E5001` for a rule that there is not.
pub fn report(model: &Model, without: &[String]) -> Result<Fusions, Failure> {
    let selection = selection(without)?;
    let mut values = names(&model.module);
    if model.module.function(LOSS).is_some() {
        match crate::prepare_with(model, selection.clone(), &Precision::uniform(DType::F32)) {
            Ok((module, passes)) => {
                // Without a kernel for something there still is what rewriting does.
                let (launched, refused) = match launched(&module, LOSS) {
                    Ok(launched) => (launched, None),
                    Err(refusal) => (Vec::new(), Some(refusal.to_string())),
                };
                values.append(&mut names(&module));
                return Ok(Fusions { passes: passes.into(), launched, refused, values });
            }
            Err(Failure::Input(_)) => {}
            Err(world) => return Err(world),
        }
    }
    Ok(simplified(model.module.clone(), selection))
}

/// The report on a module that is only evaluated, with the rules that it is evaluated with but
/// those that `without` names.
///
/// # Errors
/// Those of [`report`].
pub fn report_of(module: Module, without: &[String]) -> Result<Fusions, Failure> {
    let without = selection(without)?.without;
    Ok(simplified(module, Selection { without, ..Selection::default() }))
}

fn simplified(mut module: Module, selection: Selection) -> Fusions {
    let mut values = names(&module);
    let report = simplify(&mut module, &Options { selection, ..Options::default() });
    values.append(&mut names(&module));
    Fusions { passes: vec![report], launched: Vec::new(), refused: None, values }
}

/// The names of the values of all functions.
fn names(module: &Module) -> BTreeSet<String> {
    let values = module.functions.iter().flat_map(|function| &function.values);
    values.map(|value| value.name.clone()).collect()
}

/// The rules that models are prepared with but some, which there must be.
fn selection(without: &[String]) -> Result<Selection, Failure> {
    for name in without {
        if !rules().any(|rule| rule.name == name) && !idiom::names().any(|known| known == name) {
            let headline = format!("there is no rule `{name}`");
            let help = "see the rules that `--fusions` names";
            return Err(usage("--no-rule", headline).help(help).into());
        }
    }
    Ok(Selection { without: without.to_vec(), ..Selection::for_models() })
}

/// The report for people: a line for each function, then the values that are computed otherwise,
/// then what is launched.
pub fn page(fusions: &Fusions) -> String {
    let reports = &fusions.passes;
    let mut table =
        Table::new(["function", "launches", "before", "bytes", "before", "terms", "rounds", "gap"]);
    for function in reports.last().iter().flat_map(|report| &report.functions) {
        table.row([
            function.name.clone(),
            function.after.launches.to_string(),
            function.before.launches.to_string(),
            output::bytes(function.after.bytes),
            output::bytes(function.before.bytes),
            function.terms.to_string(),
            function.saturation.rounds.to_string(),
            format!("{:.1} %", 100.0 * function.gap),
        ]);
    }
    let mut text = table.text();
    for function in reports.iter().flat_map(|report| &report.functions) {
        text += &changes(function);
    }
    fusions.launched.iter().fold(text, |text, half| text + &launches(half))
}

/// A line for each launch of half a layer.
fn launches(half: &Launched) -> String {
    let mut table = Table::new(["launch", "bytes", "writes"]);
    for launch in &half.launches {
        let values = launch.values.iter().map(|value| format!("%{value}"));
        let values = values.collect::<Vec<_>>().join(", ");
        table.row([launch.kernel.clone(), output::bytes(launch.bytes), values]);
    }
    let bytes = output::bytes(half.launches.iter().map(|launch| launch.bytes).sum());
    let count = half.launches.len();
    let title = format!("@{} {}: {count} launches, {bytes}", half.layer, half.half);
    let choice = half.choice.map(|choice| {
        let Work { launches, bytes, .. } = choice.work;
        let gap = 100.0 * choice.gap();
        format!("{launches} fused, {}; at most {gap:.1} % from the best\n", output::bytes(bytes))
    });
    format!("\n{title}\n{}{}", choice.unwrap_or_default(), table.text())
}

fn changes(function: &FunctionReport) -> String {
    let mut text = String::new();
    for limit in &function.saturation.limits_hit {
        text += &format!("\n@{} hit a limit: {limit}\n", function.name);
    }
    if function.changes.is_empty() {
        return text;
    }
    let mut table = Table::new(["value", "rules"]);
    for change in &function.changes {
        table.row([format!("%{}", change.value), change.rules.join(", ")]);
    }
    text + &format!("\n@{}\n{}", function.name, table.text())
}

/// How a value came about: the rules that led to it, with what they are for.
///
/// # Errors
/// `E5001` when no function has such a value, or no rule has changed it.
pub fn explain(fusions: &Fusions, value: &str) -> Result<String, Failure> {
    let reports = &fusions.passes;
    let value = value.trim_start_matches('%');
    let mut text = String::new();
    for function in reports.iter().flat_map(|report| &report.functions) {
        for change in function.changes.iter().filter(|change| change.value == value) {
            text += &format!("%{value} of @{}\n", function.name);
            for name in &change.rules {
                text += &match rules().find(|rule| rule.name == *name) {
                    Some(rule) => {
                        let (left, right) = (rule.left, rule.right);
                        let keeps = rule.keeps.name();
                        format!("  {name}: {left} = {right}\n    {keeps}; {}\n", rule.why)
                    }
                    None => format!("  {name}: its definition in the library = a call\n"),
                };
            }
        }
    }
    if text.is_empty() {
        let wrong = match fusions.values.contains(value) {
            true => usage("--explain", format!("no rule has changed how `%{value}` is computed")),
            false => usage("--explain", format!("no function has a value `%{value}`"))
                .help("see the values that `--fusions` names"),
        };
        return Err(wrong.into());
    }
    Ok(text)
}

/// The report as JSON.
pub fn document(fusions: &Fusions) -> Value {
    let passes: Vec<Value> = fusions.passes.iter().map(pass).collect();
    let launch = |launch: &Launch| {
        let Launch { kernel, values, bytes, flops } = launch;
        json!({"kernel": kernel, "values": values, "bytes": bytes, "flops": flops})
    };
    let half = |half: &Launched| {
        let launches: Vec<Value> = half.launches.iter().map(launch).collect();
        let choice = half.choice.map(|choice| {
            let Work { launches, bytes, .. } = choice.work;
            let (price, greedy, bound) = (choice.price(), choice.greedy, choice.bound);
            json!({
                "launches": launches, "bytes": bytes, "price": price, "greedy": greedy,
                "bound": bound, "gap": choice.gap(), "tries": choice.tries,
            })
        });
        json!({"layer": half.layer, "half": half.half, "launches": launches, "choice": choice})
    };
    let launched: Vec<Value> = fusions.launched.iter().map(half).collect();
    documents::Fusions { passes, launched }.to_json()
}

fn pass(report: &Report) -> Value {
    let work =
        |work: &Work| json!({"launches": work.launches, "bytes": work.bytes, "flops": work.flops});
    let functions = report.functions.iter().map(|function| {
        let changes = function.changes.iter();
        let changes: Vec<Value> =
            changes.map(|c| json!({"value": c.value, "rules": c.rules})).collect();
        json!({
            "name": function.name,
            "before": work(&function.before),
            "after": work(&function.after),
            "classes": function.classes,
            "terms": function.terms,
            "rounds": function.saturation.rounds,
            "limits_hit": function.saturation.limits_hit,
            "uses": function.saturation.uses,
            "decisions": function.decisions,
            "gap": function.gap,
            "changes": changes,
        })
    });
    json!({"functions": functions.collect::<Vec<_>>()})
}

#[cfg(test)]
mod tests {
    use ir::DType;
    use ir::import::{Options, preset};

    use super::*;
    use crate::failure::Exit;

    fn model() -> Model {
        let description = preset("gpt2-mini").expect("a preset");
        let options = Options { seq: 8, dtype: DType::F32, dropout: Some(0.0), documents: false };
        crate::import(&description, &options).unwrap()
    }

    #[test]
    fn every_layer_and_its_gradient_are_reported_and_none_is_dearer() {
        let fusions = report(&model(), &[]).unwrap();
        let reports = &fusions.passes;
        let names = |report: &Report| -> Vec<String> {
            report.functions.iter().map(|f| f.name.clone()).collect()
        };
        let last = names(&reports[1]);
        assert!(last.contains(&"block".to_owned()), "{last:?}");
        assert!(last.contains(&"block.grad".to_owned()), "{last:?}");
        for function in reports.iter().flat_map(|report| &report.functions) {
            assert!(function.after.price() <= function.before.price(), "{}", function.name);
        }
        assert!(page(&fusions).contains("block.grad"));
        let passes = document(&fusions)["passes"].clone();
        assert_eq!(passes[1]["functions"].as_array().unwrap().len(), last.len());
    }

    /// A block of seven launches forward and ten backward, of which one multiplies and applies
    /// GELU.
    #[test]
    fn what_a_block_launches_is_listed() {
        let fusions = report(&model(), &[]).unwrap();
        let of = |half: &str| {
            let is_it = |l: &&Launched| l.layer == "block" && l.half == half;
            fusions.launched.iter().find(is_it).unwrap()
        };
        assert_eq!([of("forward").launches.len(), of("backward").launches.len()], [7, 10]);
        let up = of("forward").launches.iter().find(|launch| launch.kernel.contains("then"));
        assert_eq!(up.unwrap().values.len(), 2, "{up:?}");
        assert!(page(&fusions).contains("@block forward: 7 launches"));
        let launched = document(&fusions)["launched"].clone();
        assert_eq!(launched.as_array().unwrap().len(), 2 * 3);
    }

    #[test]
    fn unknown_rules_and_values_are_wrong_use() {
        let failure = report(&model(), &["no-such-rule".to_owned()]).unwrap_err();
        assert_eq!(failure.exit(), Exit::Usage);
        let report = report(&model(), &[]).unwrap();
        let said = |value: &str| {
            let Err(Failure::Input(found)) = explain(&report, value) else {
                panic!("{value} is explained");
            };
            found[0].headline.clone()
        };
        assert_eq!(said("%no-such-value"), "no function has a value `%no-such-value`");
        let changed = report.passes.iter().flat_map(|p| &p.functions).flat_map(|f| &f.changes);
        let changed: BTreeSet<&String> = changed.map(|change| &change.value).collect();
        let kept = report.values.iter().find(|value| !changed.contains(value)).unwrap();
        assert!(said(kept).starts_with("no rule has changed"), "{kept}");
    }
}
