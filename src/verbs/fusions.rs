//! `inspect MODEL --fusions`: what rewriting would make of each function, and by which rules.
//!
//! Plans are still made for the functions as they are imported.

use ir::Module;
use ir::autodiff::training_step;
use ir::import::Model;
use ir::rewrite::price::Work;
use ir::rewrite::report::{FunctionReport, Report};
use ir::rewrite::rules::rules;
use ir::rewrite::saturate::Selection;
use ir::rewrite::{Options, idiom, simplify};
use serde_json::{Value, json};

use crate::LOSS;
use crate::failure::{Failure, usage};
use crate::output::{self, Table};

/// The report on a model, with the functions of its gradients where it can be trained.
///
/// # Errors
/// `E5001` for a rule that there is not.
pub fn report(model: &Model, without: &[String]) -> Result<Report, Failure> {
    for name in without {
        if !rules().any(|rule| rule.name == name) && !idiom::names().any(|known| known == name) {
            let headline = format!("there is no rule `{name}`");
            let help = "see the rules that `--fusions` names";
            return Err(usage("--no-rule", headline).help(help).into());
        }
    }
    let mut module: Module = model.module.clone();
    if module.function(LOSS).is_some() {
        training_step(&mut module, LOSS)?;
    }
    let selection = Selection { without: without.to_vec(), ..Selection::default() };
    Ok(simplify(&mut module, &Options { selection, ..Options::default() }))
}

/// The report for people: a line for each function, then the values that are computed otherwise.
pub fn page(report: &Report) -> String {
    let mut table =
        Table::new(["function", "launches", "before", "bytes", "before", "terms", "rounds", "gap"]);
    for function in &report.functions {
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
    for function in &report.functions {
        text += &changes(function);
    }
    text + "\nPlans are made for the functions as they are imported.\n"
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
/// `E5001` when no function has such a value that rules have changed.
pub fn explain(report: &Report, value: &str) -> Result<String, Failure> {
    let value = value.trim_start_matches('%');
    let mut text = String::new();
    for function in &report.functions {
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
        let headline = format!("no rule has changed how `%{value}` is computed");
        return Err(usage("--explain", headline).into());
    }
    Ok(text)
}

/// The report as JSON.
pub fn document(report: &Report) -> Value {
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
    json!({"schema": "gantline.fusions/1", "functions": functions.collect::<Vec<_>>()})
}

#[cfg(test)]
mod tests {
    use ir::DType;
    use ir::import::{Options, preset};

    use super::*;
    use crate::failure::Exit;

    fn model() -> Model {
        let description = preset("gpt2-mini").expect("a preset");
        let options = Options { seq: 8, dtype: DType::F32, dropout: Some(0.0) };
        crate::import(&description, &options).unwrap()
    }

    #[test]
    fn every_layer_and_its_gradient_are_reported_and_none_is_dearer() {
        let report = report(&model(), &[]).unwrap();
        let names: Vec<&str> = report.functions.iter().map(|f| f.name.as_str()).collect();
        assert!(names.contains(&"block") && names.contains(&"block.grad"), "{names:?}");
        for function in &report.functions {
            assert!(function.after.price() <= function.before.price(), "{}", function.name);
        }
        assert!(page(&report).contains("block.grad"));
        assert_eq!(document(&report)["functions"].as_array().unwrap().len(), names.len());
    }

    #[test]
    fn unknown_rules_and_values_are_wrong_use() {
        let failure = report(&model(), &["no-such-rule".to_owned()]).unwrap_err();
        assert_eq!(failure.exit(), Exit::Usage);
        let report = report(&model(), &[]).unwrap();
        assert_eq!(explain(&report, "%no-such-value").unwrap_err().exit(), Exit::Usage);
    }
}
