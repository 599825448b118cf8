//! Pitches: the same kernel on an argument whose rows lie further apart.
//!
//! Rows that start at multiples of 16 bytes are copied by the widest instructions of a GPU, and by
//! TMA at all. Where a dim is no such multiple, such as a vocabulary of 50,257, each row is
//! followed by padding, which is part of the buffer, not of the value: no kernel reads or writes
//! it.

use crate::kernel::{Copy, Kernel, Product, Products, Source};
use crate::offset::Offset;
use crate::rows::{Access, Instr, Output, Rows};

/// Rows of an argument, and how far apart they start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pitch {
    /// Elements of a row, more than one.
    pub row: usize,
    /// Elements from the start of one to that of the next, at least as many.
    pub pitch: usize,
}

impl Pitch {
    /// Where an element lies that lay at `index` when rows lay side by side.
    pub fn place(self, index: usize) -> usize {
        index / self.row * self.pitch + index % self.row
    }

    /// Gives strides their new values, of all loops over an argument that starts at an offset; none
    /// where one of them goes on from the middle of a row to that of the next.
    fn apply(self, mut loops: Vec<(usize, &mut usize)>, offset: usize) -> Option<usize> {
        let mut column = offset % self.row;
        for (size, stride) in &mut loops {
            if stride.is_multiple_of(self.row) {
                **stride = **stride / self.row * self.pitch;
            } else {
                column += size.saturating_sub(1) * **stride;
            }
        }
        (column < self.row).then(|| self.place(offset))
    }
}

/// The kernel that computes the same from and to an argument of which rows have a pitch: of inputs,
/// then outputs, by number. None where its loops do not follow the rows, or where nothing is known
/// of them.
pub fn with_pitch(kernel: &Kernel, argument: usize, pitch: Pitch) -> Option<Kernel> {
    let mut kernel = kernel.clone();
    let inputs = kernel.inputs().len();
    match &mut kernel {
        Kernel::Product(_) if (2..inputs).contains(&argument) => return None,
        Kernel::Product(p) => of_product(p, argument.min(2), pitch)?,
        Kernel::Products(p) if argument < inputs => of_operand(p, argument, pitch)?,
        Kernel::Products(p) => of_result(p, argument - inputs, pitch)?,
        Kernel::Rows(r) => match argument.checked_sub(inputs) {
            None => of_input(r, argument, pitch)?,
            Some(output) => of_output(r, output, pitch)?,
        },
        Kernel::Copy(c) => of_copy(c, argument == 0, pitch)?,
        Kernel::Attention(_)
        | Kernel::AttentionBwd(_)
        | Kernel::Experts(_)
        | Kernel::ExpertsBwd(_)
        | Kernel::Gather(_)
        | Kernel::ScatterAdd(_)
        | Kernel::Replace(_)
        | Kernel::Lines(_)
        | Kernel::Rope(_)
        | Kernel::Place(_)
        | Kernel::Take(_)
        | Kernel::Fill(_) => return None,
    }
    Some(kernel)
}

/// Of `a`, `b` or the result, by number.
fn of_product(p: &mut Product, argument: usize, pitch: Pitch) -> Option<()> {
    if argument == 1 && !p.borders.is_empty() {
        return None;
    }
    let Product { batch, m, n, k, .. } = p;
    let loops: Vec<(usize, &mut usize)> = match argument {
        0 => {
            let rows = m.iter_mut().map(|l| (l.size, &mut l.a));
            let sums = k.iter_mut().map(|l| (l.size, &mut l.a));
            batch.iter_mut().map(|l| (l.size, &mut l.a)).chain(rows).chain(sums).collect()
        }
        1 => {
            let columns = n.iter_mut().map(|l| (l.size, &mut l.b));
            let sums = k.iter_mut().map(|l| (l.size, &mut l.b));
            batch.iter_mut().map(|l| (l.size, &mut l.b)).chain(columns).chain(sums).collect()
        }
        _ => {
            let rows = m.iter_mut().map(|l| (l.size, &mut l.c));
            let columns = n.iter_mut().map(|l| (l.size, &mut l.c));
            batch.iter_mut().map(|l| (l.size, &mut l.c)).chain(rows).chain(columns).collect()
        }
    };
    pitch.apply(loops, 0).map(drop)
}

/// Of an operand, wherever it is read. What is added to a result lies as that does.
fn of_operand(p: &mut Products, operand: usize, pitch: Pitch) -> Option<()> {
    for part in &mut p.parts {
        let is_scales = part.scales.is_some_and(|scales| scales.contains(&operand));
        if is_scales || part.bias == Some(operand) || part.addend == Some(operand) {
            return None;
        }
        for (at, read) in [part.a, part.b].into_iter().enumerate() {
            if read == operand {
                of_product(&mut part.product, at, pitch)?;
            }
        }
        let Some(then) = &mut part.then else { continue };
        for (input, source) in then.inputs.iter().enumerate() {
            if *source == Source::Operand(operand) {
                of_input(&mut then.rows, input, pitch)?;
            }
        }
    }
    Some(())
}

/// Of a result, or of what a program computes of one. A result that a program reads is row-major.
fn of_result(p: &mut Products, output: usize, pitch: Pitch) -> Option<()> {
    let Some(beside) = output.checked_sub(p.parts.len()) else {
        let mut programs = p.parts.iter().flat_map(|part| &part.then);
        let is_read = programs.any(|then| then.inputs.contains(&Source::Result(output)));
        let part = &mut p.parts[output];
        if is_read || part.then.is_some() || part.addend.is_some() {
            return None;
        }
        return of_product(&mut part.product, 2, pitch);
    };
    let mut first = 0;
    for part in &mut p.parts {
        let (count, skipped) = (part.beside().len(), usize::from(part.in_place));
        if beside < first + count {
            let then = part.then.as_mut()?;
            return of_output(&mut then.rows, beside - first + skipped, pitch);
        }
        first += count;
    }
    None
}

/// Of what is loaded; the keys of draws have no rows.
fn of_input(r: &mut Rows, input: usize, pitch: Pitch) -> Option<()> {
    let is_key = |instr: &Instr| matches!(instr, Instr::Random(draw) if draw.key == input);
    if r.instrs.iter().any(is_key) {
        return None;
    }
    of_access(r.rows, r.cols, &mut r.inputs[input].access, pitch)
}

/// Of a store; sums over rows are one row.
fn of_output(r: &mut Rows, output: usize, pitch: Pitch) -> Option<()> {
    match r.outputs.get_mut(output)? {
        Output::Store { access, .. } => of_access(r.rows, r.cols, access, pitch),
        Output::ColSum { .. } | Output::TotalSum { .. } => None,
    }
}

fn of_access(rows: usize, cols: usize, access: &mut Access, pitch: Pitch) -> Option<()> {
    let Access { row, col_stride, offset } = access;
    let digits = row.iter_mut().map(|d| (rows.div_ceil(d.div).min(d.modulus), &mut d.stride));
    let loops = digits.chain([(cols, col_stride)]).collect();
    *offset = pitch.apply(loops, *offset)?;
    Some(())
}

/// Of the source, or of the target.
fn of_copy(c: &mut Copy, is_source: bool, pitch: Pitch) -> Option<()> {
    let loops = c.loops.iter_mut();
    if is_source {
        let Offset::Fixed(offset) = c.source_offset else { return None };
        let offset = usize::try_from(offset).ok()?;
        let loops = loops.map(|l| (l.size, &mut l.source)).collect();
        c.source_offset = Offset::Fixed(pitch.apply(loops, offset)? as i64);
    } else if c.zero_first == 0 {
        let loops = loops.map(|l| (l.size, &mut l.target)).collect();
        c.target_offset = pitch.apply(loops, c.target_offset)?;
    } else {
        return None;
    }
    Some(())
}
