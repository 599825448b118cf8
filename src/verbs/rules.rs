//! `verify MODEL --bisect-rules`: whether rewriting keeps what a model computes, and else which
//! rule does not.
//!
//! One step of one rank is computed with rules and without. Where the two differ, rules are left
//! out by halves, until one is found that makes the difference.

use std::collections::BTreeSet;

use ir::import::Model;
use ir::rewrite::rules::rules;
use ir::rewrite::saturate::Selection;
use ir::rewrite::{bisect, idiom};
use ir::{Diagnostic, Span};
use serde_json::json;

use crate::failure::{Exit, Failure};
use crate::job::Question;
use crate::output;
use crate::verbs::verify::{Args, difference, step_of_one};

/// What rules do to a step.
struct Answer {
    /// The rules that fire, by name.
    fired: Vec<&'static str>,
    /// How far the step with them is from the step without.
    error: f64,
    /// The rule that makes the difference, where it is too large.
    culprit: Option<&'static str>,
}

/// Answers.
pub(super) fn run(args: &Args, model: &Model, question: &mut Question) -> Result<Exit, Failure> {
    let Answer { fired, error, culprit } = find(model, question, args.seed, &Selection::exact())?;
    if args.json {
        output::answer_json(&json!({
            "schema": "gantline.verify_rules/1", "model": args.model, "ok": culprit.is_none(),
            "rules": fired, "error_max": error, "culprit": culprit,
        }));
    } else if !fired.is_empty() {
        output::answer(&fired.join("\n"));
    }
    let Some(culprit) = culprit else {
        let count = fired.len();
        output::note(&format!("with {count} rules the step is that without, to {error:.1e}"));
        return Ok(Exit::Success);
    };
    let headline = format!("the rule `{culprit}` changes what `{}` computes", args.model);
    Err(Diagnostic::error("E5015", Span::of(&args.model), headline)
        .note(format!("with rules the step is off by {error:.1e}"))
        .help("report it; until then the rule is at fault, not the model")
        .into())
}

fn find(
    model: &Model,
    question: &mut Question,
    seed: u32,
    selection: &Selection,
) -> Result<Answer, Failure> {
    let all: Vec<&'static str> =
        rules().chain(selection.more).map(|rule| rule.name).chain(idiom::names()).collect();
    let mut step = |applied: &[&str]| {
        let left_out = all.iter().filter(|name| !applied.contains(name));
        let without = left_out.map(|name| (*name).to_owned()).collect();
        let selection = Selection { without, ..selection.clone() };
        let (module, reports) = crate::prepare_with(model, selection)?;
        question.module = module;
        let fired: BTreeSet<&'static str> = reports.iter().flat_map(|r| r.rules()).collect();
        Ok::<_, Failure>((fired, step_of_one(question, model, seed)?, question.dtype))
    };
    let (_, expected, dtype) = step(&[])?;
    let (fired, found, _) = step(&all)?;
    let fired: Vec<&'static str> = fired.into_iter().collect();
    let line = difference(&expected, &found, dtype);
    let culprit = match line.is_ok {
        true => None,
        false => bisect(&fired, |applied| {
            Ok::<_, Failure>(difference(&expected, &step(applied)?.1, dtype).is_ok)
        })?,
    };
    Ok(Answer { fired, error: line.error, culprit })
}

#[cfg(test)]
mod tests {
    use ir::DType;
    use ir::import::{Options, preset};
    use ir::plan::Optimizer;
    use ir::rewrite::rules::{Keeps, Rule};
    use planner::cluster::Cluster;
    use planner::limits::Limits;

    use super::*;

    /// A rule that is wrong, and cheaper than what is right.
    const WRONG: &[Rule] = &[Rule {
        name: "drop-exponential",
        left: "(exp ?x)",
        right: "?x",
        when: |_| Some(Vec::new()),
        keeps: Keeps::Bits,
        why: "to be found",
    }];

    fn answer(more: &'static [Rule]) -> Answer {
        let options = Options { seq: 8, dtype: DType::F64, dropout: Some(0.0) };
        let model = crate::import(&preset("gpt2-mini").expect("a preset"), &options).unwrap();
        let mut question = Question {
            cluster: Cluster::load("cpu-local").unwrap(),
            module: model.module.clone(),
            model: model.name.clone(),
            ranks: 1,
            global_batch_size: 1,
            seq: 8,
            dtype: DType::F64,
            optimizer: Optimizer::Sgd { decay: 0.0, decay_biases: 0.0 },
            clip: None,
            limits: Limits::default(),
        };
        find(&model, &mut question, 1, &Selection { more, ..Selection::exact() }).unwrap()
    }

    #[test]
    fn the_rules_keep_a_step_and_a_wrong_one_among_them_is_found() {
        let answer_without = answer(&[]);
        assert_eq!(answer_without.culprit, None, "off by {}", answer_without.error);
        assert!(!answer_without.fired.is_empty());
        let answer = answer(WRONG);
        assert_eq!(answer.culprit, Some("drop-exponential"), "of {:?}", answer.fired);
    }
}
