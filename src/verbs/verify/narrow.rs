//! `verify` in a narrow type, or with activations saved in one: how far each mesh is from the
//! truth, beside one rank.
//!
//! The truth is the step in f64, by the interpreter. What narrow numbers are rounded to depends on
//! where sums are cut, so that meshes differ by as much as one rank differs from the truth, and not
//! by rounding alone. A mesh may be twice as far from it as one rank is, and one rank twice as far
//! as the interpreter is that rounds each value to its type.

use ir::import::Model;
use ir::precision::{Precision, Products};

use super::reference::Reference;
use super::{Args, Computed, compare, finish, lines_of, note_loss, rounding_of_sums};
use crate::failure::{Exit, Failure, usage};
use crate::job::PlanRequest;

/// How much farther from the truth a step may be than what it is measured by.
const FARTHER_MAX: f64 = 2.0;

/// Answers.
pub(in crate::verbs) fn run(
    args: &Args,
    model: &Model,
    question: &mut PlanRequest,
    one: &Computed,
) -> Result<Exit, Failure> {
    let Precision { compute, saved, products, .. } = question.precision;
    let narrow = if saved.size() < compute.size() { saved } else { compute };
    let dtype = if products == Products::Own { narrow.name() } else { products.name() };
    let numbers = (dtype, products != Products::Own || narrow.is_narrow());
    let Some(reference) = Reference::of(question, model, args.seed)? else {
        let headline = format!(
            "{dtype} is compared with f64 by the interpreter, which does no \
                                step of this model: it is too large, or draws"
        );
        let help = match args.plan {
            Some(_) => "write a smaller MODEL, and one without dropout",
            None => "verify a smaller model, or in f32",
        };
        return Err(usage("--dtype", headline).help(help).into());
    };
    let mesh = ir::Mesh::ONE;
    let mut own = compare(mesh, false, &reference.step, one);
    let Some(typed) = reference.typed(question) else {
        let headline = format!("the interpreter does no step of this model in {dtype}");
        return Err(usage("--dtype", headline).help("verify in f32").into());
    };
    let rounded = compare(mesh, false, &reference.step, &typed);
    note_loss(one.loss);
    let rounding = rounding_of_sums(question, args.ranks);
    if args.ranks == 1 && args.plan.is_none() {
        own.is_ok = own.distance <= FARTHER_MAX * rounded.distance + rounding;
        return finish(args, numbers, &reference.step, vec![own], Vec::new());
    }
    let (mut lines, refused) = lines_of(args, model, question, &reference.step)?;
    let farthest = FARTHER_MAX * own.distance.max(rounded.distance) + rounding;
    lines.iter_mut().for_each(|line| line.is_ok = line.distance <= farthest);
    finish(args, numbers, &reference.step, lines, refused)
}
