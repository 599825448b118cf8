//! `verify MODEL --bisect-rules`: whether rewriting keeps what a model computes, and else which
//! rule does not.
//!
//! One step of one rank is computed with rules and without. Where the two differ, rules are left
//! out by halves, until one is found that makes the difference. Then the interpreter says who is at
//! fault: a rule that changes what a function computes, or kernels, which then compute one of two
//! equal functions wrongly.

use std::collections::BTreeSet;

use ir::import::Model;
use ir::rewrite::rules::rules;
use ir::rewrite::saturate::Selection;
use ir::rewrite::{bisect, idiom};
use ir::{Diagnostic, Module, Span};

use super::reference::{Reference, changed_function};
use super::{Args, Computed, difference, error_max, note_loss, step_of_one};
use crate::documents::{Document, VerifyRules};
use crate::failure::{Exit, Failure};
use crate::job::PlanRequest;
use crate::output;

/// What rules do to a step.
struct Answer {
    /// The rules that fire, by name.
    fired: Vec<&'static str>,
    /// How far the step with them is from the step without.
    error: f64,
    /// The rule that makes the difference, where it is too large, and what is at fault.
    culprit: Option<(&'static str, Fault)>,
    /// The loss without rules.
    loss: f64,
}

/// Why a step with rules is not the step without.
#[derive(Clone, Debug, PartialEq)]
enum Fault {
    /// A rule makes another function of a layer: which, and how far it is off.
    Rule(String, f64),
    /// Functions are equal: how far the kernels' step is from the interpreter's, without rules and
    /// with them.
    Kernels([f64; 2]),
    /// The interpreter cannot compute the model, or not soon.
    Open,
}

impl Fault {
    fn name(&self) -> Option<&'static str> {
        match self {
            Fault::Rule(..) => Some("rule"),
            Fault::Kernels(_) => Some("kernels"),
            Fault::Open => None,
        }
    }

    fn diagnostic(&self, model: &str, culprit: &str, error: f64) -> Diagnostic {
        let headline = match self {
            Fault::Rule(..) => format!("the rule `{culprit}` changes what `{model}` computes"),
            Fault::Kernels(_) => {
                format!(
                    "kernels compute `{model}` wrongly with the rule `{culprit}`, or without it"
                )
            }
            Fault::Open => {
                format!("with the rule `{culprit}` the step of `{model}` is another one")
            }
        };
        let found = Diagnostic::error("E5015", Span::of(model), headline)
            .note(format!("with rules the step is off by {error:.1e}"));
        match self {
            Fault::Rule(function, error) => found
                .note(format!(
                    "the interpreter computes the rewritten `@{function}` off by {error:.1e}"
                ))
                .help("report it; until then the rule is at fault, not the model"),
            Fault::Kernels([without, with]) => found
                .note("the interpreter computes all functions as before they are rewritten")
                .note(format!(
                    "off its step are {without:.1e} without rules, and {with:.1e} with them"
                ))
                .help("report it; kernels are at fault, neither the rule nor the model"),
            Fault::Open => found
                .note("the model is too large for the interpreter, or draws, so it cannot judge")
                .help("report it; the rule is at fault, or the kernels of what it makes"),
        }
    }
}

/// Answers.
pub(in crate::verbs) fn run(
    args: &Args,
    model: &Model,
    question: &mut PlanRequest,
) -> Result<Exit, Failure> {
    let Answer { fired, error, culprit, loss } =
        find(model, question, args.seed, &Selection::for_models())?;
    if args.json {
        let at_fault = culprit.as_ref().and_then(|(_, fault)| fault.name());
        let document = VerifyRules {
            model: args.model.to_string(),
            ok: culprit.is_none(),
            rules: fired.iter().map(ToString::to_string).collect(),
            error_max: error,
            culprit: culprit.as_ref().map(|(rule, _)| rule.to_string()),
            at_fault: at_fault.map(str::to_owned),
        };
        output::answer_json(&document.to_json());
    } else if !fired.is_empty() {
        output::answer(&fired.join("\n"));
    }
    note_loss(loss);
    let Some((culprit, fault)) = culprit else {
        let count = fired.len();
        output::note(&format!("with {count} rules the step is that without, to {error:.1e}"));
        return Ok(Exit::Success);
    };
    Err(fault.diagnostic(&args.model.to_string(), culprit, error).into())
}

fn find(
    model: &Model,
    question: &mut PlanRequest,
    seed: u32,
    selection: &Selection,
) -> Result<Answer, Failure> {
    let all: Vec<&'static str> =
        rules().chain(selection.more).map(|rule| rule.name).chain(idiom::names()).collect();
    let step = |applied: &[&str], question: &mut PlanRequest| {
        let left_out = all.iter().filter(|name| !applied.contains(name));
        let without = left_out.map(|name| (*name).to_owned()).collect();
        let selection = Selection { without, ..selection.clone() };
        let (module, reports) = crate::prepare_with(model, selection, &question.precision)?;
        question.module = module.clone();
        let fired: BTreeSet<&'static str> = reports.iter().flat_map(|r| r.rules()).collect();
        Ok::<_, Failure>((fired, step_of_one(question, model, seed)?, module))
    };
    let (_, expected, before) = step(&[], question)?;
    let (fired, found, after) = step(&all, question)?;
    let fired: Vec<&'static str> = fired.into_iter().collect();
    let error = difference(&expected, &found);
    let mut bound = error_max(question.precision.compute);
    let loss = expected.loss;
    if error <= bound {
        return Ok(Answer { fired, error, culprit: None, loss });
    }
    let reference = Reference::of(question, model, seed)?;
    if let Some(reference) = reference.as_ref().filter(|_| error.is_finite()) {
        bound = reference.error_max(bound);
    }
    let culprit = match error <= bound {
        true => None,
        false => bisect(&fired, |applied| {
            Ok::<_, Failure>(difference(&expected, &step(applied, question)?.1) <= bound)
        })?,
    };
    let culprit = culprit.map(|culprit| {
        let forms = [(&before, &expected), (&after, &found)];
        (culprit, fault(forms, reference.as_ref(), question, model.vocab))
    });
    Ok(Answer { fired, error, culprit, loss })
}

/// What is at fault where the steps of two forms of a module, without rules and with them, differ.
fn fault(
    [(before, expected), (after, found)]: [(&Module, &Computed); 2],
    reference: Option<&Reference>,
    question: &PlanRequest,
    vocab: usize,
) -> Fault {
    let Some(reference) = reference else { return Fault::Open };
    if let Some((function, error)) = changed_function(before, after, question, vocab) {
        return Fault::Rule(function, error);
    }
    Fault::Kernels([expected, found].map(|step| difference(&reference.step, step)))
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

    fn model() -> (Model, PlanRequest) {
        let options = Options { seq: 8, dtype: DType::F64, dropout: Some(0.0), documents: false };
        let model = crate::import(&preset("gpt2-mini").expect("a preset"), &options).unwrap();
        let question = PlanRequest {
            cluster: Cluster::load("cpu-local").unwrap(),
            module: model.module.clone(),
            model: model.name.clone(),
            ranks: 1,
            global_batch_size: 1,
            seq: 8,
            precision: ir::precision::Precision::uniform(DType::F64),
            optimizer: Optimizer::Sgd { decay: 0.0, decay_biases: 0.0 },
            clip: None,
            lora: None,
            limits: Limits::default(),
        };
        (model, question)
    }

    fn answer(more: &'static [Rule]) -> Answer {
        let (model, mut question) = model();
        find(&model, &mut question, 1, &Selection { more, ..Selection::for_models() }).unwrap()
    }

    #[test]
    fn the_rules_keep_a_step_and_a_wrong_one_among_them_is_found() {
        let answer_without = answer(&[]);
        let error = answer_without.error;
        assert!(answer_without.culprit.is_none(), "off by {error}");
        assert!(!answer_without.fired.is_empty());
        let answer = answer(WRONG);
        let (culprit, fault) = answer.culprit.expect("a rule is wrong");
        assert_eq!(culprit, "drop-exponential", "of {:?}", answer.fired);
        let Fault::Rule(function, error) = fault else { panic!("at fault is {fault:?}") };
        assert!(error > 1e-3, "@{function} is off by {error}");
    }

    /// Kernels that compute one form of a module wrongly are told from rules that change it.
    #[test]
    fn kernels_are_at_fault_where_functions_are_equal() {
        let (model, mut question) = model();
        let before = model.module.clone();
        question.module = crate::prepare(&model).unwrap();
        let after = question.module.clone();
        let right = step_of_one(&mut question, &model, 1).unwrap();
        let reference = Reference::of(&mut question, &model, 1).unwrap().expect("it is small");
        // The kernels compute what the interpreter does, to begin with.
        let error = difference(&reference.step, &right);
        assert!(error < 1e-10, "off by {error}");
        let mut wrong = Computed { loss: right.loss, grads: right.grads.clone() };
        let grad = wrong.grads.values_mut().next_back().expect("there are weights");
        grad.iter_mut().for_each(|number| *number *= 1.5);
        let forms = [(&before, &right), (&after, &wrong)];
        let found = fault(forms, Some(&reference), &question, model.vocab);
        let Fault::Kernels([without, with]) = found else { panic!("at fault is {found:?}") };
        assert!(without < 1e-10 && with > 1e-4, "{without} without, {with} with");
    }
}
