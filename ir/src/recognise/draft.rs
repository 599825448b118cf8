//! Drafts: what a value is replaced by, checked before anything is replaced.

use super::element::{Element, Graph, Index};
use super::views::views;
use crate::build::Builder;
use crate::infer::infer;
use crate::library::check::faults;
use crate::library::read_instance;
use crate::module::{Attributes, ValueId};
use crate::op::Op;
use crate::types::TensorType;

/// Where an operand of a step comes from.
#[derive(Clone, Copy, Debug)]
pub(super) enum Source {
    /// A value of the function.
    Old(ValueId),
    /// A result of a step.
    New(usize, usize),
}

enum Make {
    Op(Op),
    Composite(&'static str, Attributes),
}

struct Step {
    make: Make,
    operands: Vec<Source>,
    types: Vec<TensorType>,
}

/// Steps that compute a value in place of the node that makes it.
pub(super) struct Draft<'g> {
    graph: &'g Graph<'g>,
    steps: Vec<Step>,
}

/// A draft that computes its value.
pub(super) struct Finished {
    steps: Vec<(Make, Vec<Source>)>,
    result: Source,
    /// The composite that it is for.
    pub(super) composite: &'static str,
    /// A value that is not to be computed any more.
    pub(super) spares: Option<ValueId>,
}

impl<'g> Draft<'g> {
    pub(super) fn new(graph: &'g Graph<'g>) -> Draft<'g> {
        Draft { graph, steps: Vec::new() }
    }

    /// The type of a source.
    pub(super) fn ty(&self, of: Source) -> &TensorType {
        match of {
            Source::Old(value) => self.graph.function.ty(value),
            Source::New(step, result) => &self.steps[step].types[result],
        }
    }

    /// Adds an op; none where it does not take such operands.
    pub(super) fn op(&mut self, op: Op, operands: &[Source]) -> Option<Source> {
        let types: Vec<&TensorType> = operands.iter().map(|o| self.ty(*o)).collect();
        let types = infer(&op, &types, self.graph.module).ok()?;
        self.steps.push(Step { make: Make::Op(op), operands: operands.to_vec(), types });
        Some(Source::New(self.steps.len() - 1, 0))
    }

    /// Adds a number for each element of a type.
    pub(super) fn number(&mut self, value: f64, ty: TensorType) -> Option<Source> {
        let TensorType { dtype, dims } = ty;
        self.op(Op::Constant { value, dtype, dims }, &[])
    }

    /// Adds views.
    pub(super) fn views(&mut self, of: Source, ops: Vec<Op>) -> Option<Source> {
        ops.into_iter().try_fold(of, |of, op| self.op(op, &[of]))
    }

    /// Adds the views that lay an element out with a dim for each group of digits.
    pub(super) fn laid(&mut self, of: &Element, wanted: &[Index]) -> Option<Source> {
        let ops = views(self.graph.dims(of.value), &of.index, wanted)?;
        self.views(Source::Old(of.value), ops)
    }

    /// Adds a call of a composite; its results. None where attributes are out of bounds.
    pub(super) fn composite(
        &mut self,
        name: &'static str,
        attributes: &[(&str, f64)],
        operands: &[Source],
    ) -> Option<Vec<Source>> {
        let attributes: Attributes =
            attributes.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
        let types: Vec<TensorType> = operands.iter().map(|o| self.ty(*o).clone()).collect();
        if !faults(name, &attributes, &types).is_empty() {
            return None;
        }
        let instance = read_instance(name, &attributes, &types, name)?.ok()?;
        let types = instance.result_types();
        let count = types.len();
        let make = Make::Composite(name, attributes);
        self.steps.push(Step { make, operands: operands.to_vec(), types });
        Some((0..count).map(|at| Source::New(self.steps.len() - 1, at)).collect())
    }

    /// The draft of a value, whose type it must have.
    pub(super) fn finish(
        self,
        composite: &'static str,
        result: Source,
        of: ValueId,
    ) -> Option<Finished> {
        let fits = self.ty(result) == self.graph.function.ty(of);
        let steps = self.steps.into_iter().map(|step| (step.make, step.operands)).collect();
        fits.then_some(Finished { steps, result, composite, spares: None })
    }
}

impl Finished {
    /// The same, worth it only where nothing else needs a value.
    pub(super) fn in_place_of(self, value: ValueId) -> Finished {
        Finished { spares: Some(value), ..self }
    }

    /// The values that it reads.
    pub(super) fn reads(&self) -> impl Iterator<Item = ValueId> {
        let operands = self.steps.iter().flat_map(|(_, operands)| operands);
        operands.chain([&self.result]).filter_map(|source| match source {
            Source::Old(value) => Some(*value),
            Source::New(..) => None,
        })
    }

    /// Adds its steps to a function, where `place` tells where old values are. Returns the result.
    pub(super) fn build(
        &self,
        b: &mut Builder<'_>,
        name: &str,
        place: impl Fn(ValueId) -> ValueId,
    ) -> ValueId {
        let mut made: Vec<Vec<ValueId>> = Vec::new();
        for (make, operands) in &self.steps {
            let operands: Vec<ValueId> = operands
                .iter()
                .map(|source| match source {
                    Source::Old(value) => place(*value),
                    Source::New(step, result) => made[*step][*result],
                })
                .collect();
            made.push(match make {
                Make::Op(op) => b.push_all(name, op.clone(), &operands),
                Make::Composite(composite, attributes) => {
                    let callee = b.instance(composite, attributes, &operands);
                    b.call(name, &callee, &operands)
                }
            });
        }
        match self.result {
            Source::Old(value) => place(value),
            Source::New(step, result) => made[step][result],
        }
    }
}
