//! Chunks: a part of a function, once for each piece of its rows.

use ir::op::Op;
use ir::program::{Instruction, LocalBuffer, Ref, Routine};
use ir::sharding::Layout;
use ir::{Node, TensorType, ValueId};
use kernels::kernel::Copy;
use kernels::{Kernel, Offset};

use super::Lower;
use crate::catalogue::{cut, loops_of, row_major};
use crate::chunk::Chunks;
use crate::refusal::Refusal;
use crate::routines::routine_in_pieces;
use crate::scalars::Scalars;

impl Lower<'_> {
    /// The launches of all pieces, one piece after the other. Operands are copied out of what they
    /// are pieces of, results into that; terms are added to what the pieces before have left.
    pub(super) fn pieces(&mut self, node: &Node, chunks: &Chunks) -> Result<(), Refusal> {
        let Op::Call { function } = &node.op else { return Err("pieces are called for".into()) };
        let is_term = |layout: &Layout| matches!(layout, Layout::Partial(_));
        let first: Vec<bool> = node.results.iter().map(|r| self.adds[r.index()]).collect();
        let later: Vec<bool> = chunks.results.iter().map(is_term).collect();
        let mut body = chunks.body.clone();
        body.name.clone_from(function);
        let [first, later] = [first, later].map(|adds| {
            let unsharded = self.unsharded.of_piece();
            routine_in_pieces((&body, self.module), &unsharded, &adds, &[], self.table)
        });
        let (first, later) = (first?, later?);
        for piece in 0..chunks.count {
            let mut slots = Vec::new();
            for (at, (operand, layout)) in node.operands.iter().zip(&chunks.operands).enumerate() {
                slots.push(match *layout {
                    Layout::Cut { dim, .. } => {
                        let ty = body.ty(ValueId(at as u32));
                        self.take_piece(*operand, dim, piece, ty)?
                    }
                    Layout::Replicated | Layout::Partial(_) => self.home(*operand),
                });
            }
            let mut pieces = Vec::new();
            for ((result, own), layout) in
                node.results.iter().zip(&body.results).zip(&chunks.results)
            {
                slots.push(match *layout {
                    Layout::Cut { dim, .. } => {
                        let ty = body.ty(*own);
                        let part = self.scratch("piece", elements(ty)?, ty.dtype);
                        pieces.push((*result, dim, ty, part));
                        part
                    }
                    Layout::Replicated | Layout::Partial(_) => self.home(*result),
                });
            }
            self.inline(if piece == 0 { &first } else { &later }, &slots);
            for (result, dim, ty, part) in pieces {
                self.put_piece(result, dim, piece, ty, part)?;
            }
        }
        Ok(())
    }

    /// A copy of a piece of a value.
    fn take_piece(
        &mut self,
        value: ValueId,
        dim: usize,
        piece: usize,
        ty: &TensorType,
    ) -> Result<Ref, Refusal> {
        let sizes = ty.sizes().ok_or("a local size is open")?;
        let (at, mut scalars) = ((dim, piece * sizes[dim]), Scalars::default());
        let copy = cut(self.ty(value), at, &sizes, ty.dtype, &mut scalars)?;
        let (from, to) = (self.home(value), self.scratch("piece", elements(ty)?, ty.dtype));
        self.launch_with(Kernel::Copy(copy), scalars, vec![from], vec![to]);
        Ok(to)
    }

    /// Copies a piece of a value to its place.
    fn put_piece(
        &mut self,
        value: ValueId,
        dim: usize,
        piece: usize,
        ty: &TensorType,
        part: Ref,
    ) -> Result<(), Refusal> {
        let open = "a local size is open";
        let (sizes, whole) = (ty.sizes().ok_or(open)?, self.ty(value).sizes().ok_or(open)?);
        let target = row_major(&whole);
        let copy = Copy {
            loops: loops_of(&sizes, &row_major(&sizes), &target),
            source_offset: Offset::ZERO,
            target_offset: piece * sizes[dim] * target[dim],
            zero_first: 0,
            dtype: ty.dtype,
        };
        let to = self.home(value);
        self.launch(Kernel::Copy(copy), vec![part], vec![to]);
        Ok(())
    }

    /// The instructions of another routine, its slots as given.
    fn inline(&mut self, routine: &Routine, slots: &[Ref]) {
        let first = self.locals.len() as u32;
        self.locals.extend(routine.locals.iter().map(|local| {
            let whole = local.within.map(|at| (first + at, &routine.locals[at as usize]));
            LocalBuffer {
                offset: whole.map_or(0, |(_, whole)| local.offset - whole.offset),
                within: whole.map(|(at, _)| at),
                ..local.clone()
            }
        }));
        let own = |there: &Ref| match *there {
            Ref::Slot(at) => slots[at as usize],
            Ref::Local(at) => Ref::Local(first + at),
        };
        for instruction in &routine.instructions {
            let mut instruction = instruction.clone();
            match &mut instruction {
                Instruction::Launch { inputs, outputs, workspace, .. } => {
                    let touched = inputs.iter_mut().chain(outputs).chain(workspace);
                    touched.for_each(|there| *there = own(there));
                }
                Instruction::Collective { input, output, gates, .. } => {
                    let touched = [input, output].into_iter().chain(gates);
                    touched.for_each(|there| *there = own(there));
                }
            }
            self.instructions.push(instruction);
        }
    }
}

fn elements(ty: &TensorType) -> Result<usize, Refusal> {
    ty.count().ok_or_else(|| "a local size is open".into())
}
