//! A plan in small, and the model on which it is executed.
//!
//! What a module computes of positions depends on whether a sequence is as long as the table of
//! learned positions, and a plan decides about these values. So a table that is longer than the
//! short sequence is tried as it is, and cut to it.

use codegen::calls::Calls;
use codegen::compile::compile;
use ir::import::{Architecture, Description, Options};
use ir::{Diagnostic, Module, Plan};
use planner::check::{check, check_decisions};
use planner::cluster::Cluster;
use planner::shrink::{Shrunk, Trait, shrink};

use crate::argument::PathArg;
use crate::failure::{self, Failure};
use crate::job::positions_max;
use crate::output;

/// Tokens of a sequence at most. Chosen: the interpreter does steps of small models.
const SEQ_MAX: usize = 32;

/// A plan in small.
pub(super) struct Small {
    /// The model, whose table of positions may be shorter.
    pub(super) description: Description,
    pub(super) plan: Plan,
}

/// The plan in a file, in small, on a model or on one with fewer positions.
///
/// # Errors
/// What is wrong with the plan, or, of the model as it is, why the plan in small does not fit.
pub(super) fn of(
    path: &PathArg,
    description: &Description,
    documents: bool,
) -> Result<Small, Failure> {
    let text = failure::read_text(path, "--plan")?;
    let plan = crate::training::training_plan(&path.to_string(), &text)?;
    let wrong = check_decisions(&plan);
    if !wrong.is_empty() {
        return Err(wrong.into());
    }
    let seq = plan.seq.min(SEQ_MAX).min(positions_max(description));
    let mut refused = None;
    for description in [Some(description.clone()), with_positions(description, seq)] {
        let Some(description) = description else { continue };
        match fitted(&plan, &description, (seq, documents))? {
            Ok(Shrunk { plan, kept, lost }) => {
                tell(&plan, &kept, &lost);
                return Ok(Small { description, plan });
            }
            Err(why) => _ = refused.get_or_insert(why),
        }
    }
    let note = format!("{path} is for `{}` with sequences of {}", plan.model, plan.seq);
    let refused: Vec<Diagnostic> = refused.unwrap_or_default();
    let help = "write a MODEL of the same architecture, dropout and adapters, with as many layers \
                as the plan in small has chunks";
    let said = |why: Diagnostic| Diagnostic { help: None, ..why }.note(note.clone()).help(help);
    Err(refused.into_iter().map(said).collect::<Vec<_>>().into())
}

/// A model whose table of learned positions is as long as a sequence.
fn with_positions(description: &Description, seq: usize) -> Option<Description> {
    let Architecture::Family(family) = &description.architecture else { return None };
    let is_longer = family.learned.is_some_and(|positions| positions > seq);
    let cut = is_longer.then(|| family.with_positions(seq))?;
    let architecture = Architecture::Family(Box::new(cut));
    Some(Description { architecture, ..description.clone() })
}

/// The plan in small for a model, or why it does not fit.
fn fitted(
    plan: &Plan,
    description: &Description,
    (seq, documents): (usize, bool),
) -> Result<Result<Shrunk, Vec<Diagnostic>>, Failure> {
    let options = Options { seq, dtype: plan.precision.accumulate, dropout: None, documents };
    let model = crate::import(description, &options)?;
    let module: Module = crate::prepare_as(&model, &plan.precision)?;
    let calls = Calls::of_entry(&module, crate::LOSS)?;
    let functions: Vec<&str> = calls.calls.iter().map(|call| call.function.as_str()).collect();
    let own = Plan { seq, model: model.name, target: None, ..plan.clone() };
    let shrunk = match shrink(&own, &functions) {
        Ok(shrunk) => shrunk,
        Err(why) => return Ok(Err(vec![why])),
    };
    let wrong = check(&module, crate::LOSS, &shrunk.plan, &Cluster::load("cpu-local")?);
    if !wrong.is_empty() {
        return Ok(Err(wrong));
    }
    let compiled = compile(&module, crate::LOSS, &shrunk.plan);
    Ok(compiled.map(|_| shrunk).map_err(|why| vec![why]))
}

fn tell(plan: &Plan, kept: &[Trait], lost: &[Trait]) {
    let listed = |traits: &[Trait]| {
        let names: Vec<String> = traits.iter().map(Trait::to_string).collect();
        names.join(", ")
    };
    output::note(&format!("in small {}: {}", plan.mesh, listed(kept)));
    if !lost.is_empty() {
        output::note(&format!("note: not in small: {}", listed(lost)));
    }
}
