//! The scalars of a launch: what a kernel admits, and the kernel of one launch.

use std::ops::RangeInclusive;

use crate::kernel::Kernel;
use crate::offset::Offset;
use crate::rows::{Instr, Rows};

impl Kernel {
    /// For each scalar of a launch, what the kernel admits.
    ///
    /// # Errors
    /// A sentence, where its offsets are no scalars in order, each of which can be something.
    pub fn scalars(&self) -> Result<Vec<RangeInclusive<i64>>, String> {
        let mut kernel = self.clone();
        let offsets = kernel.offsets_mut();
        let mut ranges: Vec<Option<RangeInclusive<i64>>> = vec![None; offsets.len()];
        for offset in offsets {
            let Offset::Scalar { slot, least, most } = *offset else { continue };
            let range = ranges.get_mut(slot).ok_or("it skips a scalar")?;
            let all = range.take().unwrap_or(i64::MIN..=i64::MAX);
            *range = Some(least.max(*all.start())..=most.min(*all.end()));
        }
        let count = ranges.iter().rposition(Option::is_some).map_or(0, |last| last + 1);
        let ranges: Option<Vec<_>> = ranges.into_iter().take(count).collect();
        let ranges = ranges.ok_or("it skips a scalar")?;
        if ranges.iter().any(RangeInclusive::is_empty) {
            return Err("a scalar has no values".to_owned());
        }
        Ok(ranges)
    }

    /// All its offsets.
    pub fn offsets_mut(&mut self) -> Vec<&mut Offset> {
        match self {
            Kernel::Rows(r) => of_rows(r).collect(),
            Kernel::Products(p) => {
                let programs = p.parts.iter_mut().filter_map(|part| part.then.as_mut());
                programs.flat_map(|then| of_rows(&mut then.rows)).collect()
            }
            Kernel::Attention(a) | Kernel::AttentionBwd(a) => {
                let drawn = a.dropout.as_mut().map(|dropout| &mut dropout.head_base);
                std::iter::once(&mut a.head_offset).chain(drawn).collect()
            }
            Kernel::Gather(g) | Kernel::ScatterAdd(g) | Kernel::Replace(g) => vec![&mut g.base],
            Kernel::Copy(c) => vec![&mut c.source_offset],
            Kernel::Product(_)
            | Kernel::Experts(_)
            | Kernel::ExpertsBwd(_)
            | Kernel::Lines(_)
            | Kernel::Rope(_)
            | Kernel::Place(_)
            | Kernel::Take(_)
            | Kernel::Fill(_) => Vec::new(),
        }
    }

    /// The kernel of one launch: its scalars are in it.
    ///
    /// # Panics
    /// If the kernel does not admit them.
    pub fn bind(&self, scalars: &[i64]) -> Kernel {
        let mut kernel = self.clone();
        let offsets = kernel.offsets_mut().into_iter();
        offsets.for_each(|offset| *offset = Offset::Fixed(offset.of(scalars)));
        kernel
    }
}

/// Holds the scalars of a launch against what its kernel admits, as [`Kernel::scalars`].
///
/// # Errors
/// A sentence that says which one is wrong.
pub fn admit(ranges: &[RangeInclusive<i64>], scalars: &[i64]) -> Result<(), String> {
    if ranges.len() != scalars.len() {
        let count = scalars.len();
        return Err(format!("passes {count} scalars to a kernel of {}", ranges.len()));
    }
    for (slot, (range, value)) in ranges.iter().zip(scalars).enumerate() {
        if !range.contains(value) {
            let (least, most) = (range.start(), range.end());
            return Err(format!("scalar {slot} is {value}, not within {least} to {most}"));
        }
    }
    Ok(())
}

impl Rows {
    /// Moves the slots of all scalars up, to stand behind those of others in one launch.
    pub fn shift_scalars(&mut self, slots: usize) {
        of_rows(self).for_each(|offset| *offset = offset.shifted(slots));
    }
}

fn of_rows(rows: &mut Rows) -> impl Iterator<Item = &mut Offset> {
    rows.instrs.iter_mut().filter_map(|instr| match instr {
        Instr::Index { base, .. } => Some(base),
        Instr::Random(draw) => Some(&mut draw.offset),
        Instr::Load { .. }
        | Instr::Const { .. }
        | Instr::Unary { .. }
        | Instr::Binary { .. }
        | Instr::Select { .. }
        | Instr::Reduce { .. } => None,
    })
}
