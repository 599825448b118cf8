//! Sequences and optional values: what is in them is known when the model is read, so that they
//! are nothing in the module.

use std::rc::Rc;

use super::{Meaning, Read, Walk, Wrong};
use crate::import::onnx::proto::{AttributeProto, NodeProto};
use crate::import::onnx::site::dim_at;
use crate::{DType, Tensor};

/// Whether an operator takes or makes sequences or optional values.
pub(in crate::import::onnx) fn is_of_sequences(operator: &str) -> bool {
    matches!(
        operator,
        "SequenceConstruct"
            | "SequenceEmpty"
            | "SequenceInsert"
            | "SequenceErase"
            | "SequenceAt"
            | "SequenceLength"
            | "ConcatFromSequence"
            | "SplitToSequence"
            | "Optional"
            | "OptionalHasElement"
            | "OptionalGetElement"
    )
}

impl Walk<'_> {
    /// What a node of sequences makes.
    pub(in crate::import::onnx) fn sequenced(
        &mut self,
        node: &NodeProto,
        reads: &[Option<Read>],
    ) -> Result<Vec<Read>, Wrong> {
        let operand = |at: usize| -> Result<Read, Wrong> {
            let found = reads.get(at).cloned().flatten();
            found.ok_or_else(|| Wrong::Use(format!("operand {at} is missing")))
        };
        let name = node.output.first().cloned().unwrap_or_default();
        let read = |meaning: Meaning| Read { name: name.clone(), meaning, element: None };
        let sequence = |all: Vec<Read>| read(Meaning::Sequence(Rc::new(all)));
        let tensor = |tensor: Tensor| read(Meaning::Known(Rc::new(tensor)));
        let all = |read: &Read| {
            if let Meaning::Sequence(all) = &read.meaning {
                return Ok(all.as_ref().clone());
            }
            Err(Wrong::Use(format!("`{}` is no sequence", read.name)))
        };
        let made = match node.op_type.as_str() {
            "SequenceConstruct" => sequence(reads.iter().flatten().cloned().collect()),
            "SequenceEmpty" => sequence(Vec::new()),
            "SequenceLength" => {
                let length = all(&operand(0)?)?.len() as i64;
                tensor(Tensor::int(DType::I64, &[], vec![length]))
            }
            "SequenceInsert" => {
                let mut elements = all(&operand(0)?)?;
                let at = self.place(reads, 2, elements.len() + 1, elements.len())?;
                elements.insert(at, operand(1)?);
                sequence(elements)
            }
            "SequenceErase" => {
                let mut elements = all(&operand(0)?)?;
                let last = elements.len().saturating_sub(1);
                let at = self.place(reads, 1, elements.len(), last)?;
                elements.remove(at);
                sequence(elements)
            }
            "SequenceAt" => {
                let elements = all(&operand(0)?)?;
                let at = self.place(reads, 1, elements.len(), 0)?;
                elements[at].clone()
            }
            "ConcatFromSequence" => self.joined(node, &all(&operand(0)?)?)?,
            "SplitToSequence" => sequence(self.pieces(node, reads)?),
            "Optional" => reads.first().cloned().flatten().unwrap_or(read(Meaning::Nothing)),
            "OptionalHasElement" => {
                let found = reads.first().cloned().flatten();
                let there = found.is_some_and(|read| !matches!(read.meaning, Meaning::Nothing));
                tensor(Tensor::bool(&[], vec![there]))
            }
            _ => match operand(0)? {
                Read { meaning: Meaning::Nothing, .. } => {
                    return Err(Wrong::Use("the optional value is not there".to_owned()));
                }
                found => found,
            },
        };
        Ok(vec![made])
    }

    /// A known place among so many, negative ones from the end.
    fn place(
        &mut self,
        reads: &[Option<Read>],
        at: usize,
        count: usize,
        default: usize,
    ) -> Result<usize, Wrong> {
        let Some(read) = reads.get(at).cloned().flatten() else {
            return if default < count {
                Ok(default)
            } else {
                Err(Wrong::Use("no element".into()))
            };
        };
        let known = self.known(&read);
        let known = known.ok_or_else(|| Wrong::Use("the place depends on an input".to_owned()))?;
        let place = known.to_f64().first().map_or(0, |place| *place as i64);
        // A place in the gaps between elements counts from the end of the elements.
        let size = if at == 2 { count - 1 } else { count };
        let place = if place < 0 { place + size as i64 } else { place };
        let found = usize::try_from(place).ok().filter(|place| *place < count);
        found.ok_or_else(|| Wrong::Use(format!("place {place} of {count}")))
    }

    fn joined(&mut self, node: &NodeProto, elements: &[Read]) -> Result<Read, Wrong> {
        let number = |name: &str| {
            node.attribute.iter().find(|a| a.name == name).map_or(0, |a: &AttributeProto| a.i)
        };
        let axis = number("axis");
        if elements.is_empty() {
            return Err(Wrong::Use("a sequence of nothing".to_owned()));
        }
        if number("new_axis") != 0 {
            return self.stacked(elements.to_vec(), axis, false);
        }
        self.applied("Concat", &[super::control::int("axis", axis)], elements)
    }

    fn pieces(&mut self, node: &NodeProto, reads: &[Option<Read>]) -> Result<Vec<Read>, Wrong> {
        let find = |name: &str| node.attribute.iter().find(|a| a.name == name).map(|a| a.i);
        let missing = || Wrong::Use("operand 0 is missing".to_owned());
        let x = reads.first().cloned().flatten().ok_or_else(missing)?;
        let id = self.value(&x.name, &x.meaning)?;
        let dims = self.b.ty(id).sizes().unwrap_or_default();
        let dim = dim_at(find("axis").unwrap_or(0), dims.len())?;
        let split = match reads.get(1).cloned().flatten() {
            Some(read) => Some(self.known(&read).ok_or_else(|| {
                Wrong::Use("the sizes of the pieces depend on an input".to_owned())
            })?),
            None => None,
        };
        let sizes: Vec<i64> = match &split {
            Some(split) if split.dims.is_empty() => {
                let size = split.scalar().max(1.0) as usize;
                let size = |at: usize| size.min(dims[dim] - at) as i64;
                let step = split.scalar().max(1.0) as usize;
                (0..dims[dim]).step_by(step).map(size).collect()
            }
            Some(split) => split.to_f64().iter().map(|size| *size as i64).collect(),
            None => vec![1; dims[dim]],
        };
        let keeps = split.is_some() || find("keepdims").unwrap_or(1) != 0;
        let list = |numbers: Vec<i64>| Read {
            name: "sizes".to_owned(),
            meaning: Meaning::Known(Rc::new(Tensor::int(DType::I64, &[numbers.len()], numbers))),
            element: None,
        };
        let (mut start, mut pieces) = (0, Vec::new());
        for size in sizes {
            let [from, to, axes] = [start, start + size, dim as i64].map(|n| list(vec![n]));
            let mut piece = self.applied("Slice", &[], &[x.clone(), from, to, axes.clone()])?;
            if !keeps {
                piece = self.applied("Squeeze", &[], &[piece, axes])?;
            }
            pieces.push(piece);
            start += size;
        }
        if start != dims[dim] as i64 {
            return Err(Wrong::Use(format!("pieces of {start} of a dim of {}", dims[dim])));
        }
        Ok(pieces)
    }
}
