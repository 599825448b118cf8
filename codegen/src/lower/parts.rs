//! Parts: locals that lie in another one, so that operands side by side need no copy.

use ir::ValueId;
use ir::program::{ALIGNMENT, Instruction, LocalBuffer, Ref};

use super::{Lower, touched};
use crate::arena::{Lifetime, pack};

impl Lower<'_> {
    /// A new local, whole.
    pub(super) fn local(&mut self, name: String, bytes: u64) -> u32 {
        self.locals.push(LocalBuffer { name, bytes, offset: 0, within: None });
        self.locals.len() as u32 - 1
    }

    /// What a value lies in: a slot, or a local that is no part.
    pub(super) fn whole(&mut self, value: ValueId) -> Ref {
        match self.home(value) {
            Ref::Local(at) => Ref::Local(whole_of(&self.locals, at as usize).0 as u32),
            slot @ Ref::Slot(_) => slot,
        }
    }

    /// Puts a value into a new local from a byte on, where it then lies and need not be copied;
    /// `false` where it lies elsewhere for good: in a slot, in another local, or between aligned
    /// bytes. O(1).
    pub(super) fn put_within(&mut self, value: ValueId, whole: Ref, offset: u64) -> bool {
        let (Ref::Local(part), Ref::Local(whole)) = (self.home(value), whole) else {
            return false;
        };
        let local = &mut self.locals[part as usize];
        let is_free = part != whole && local.within.is_none() && offset.is_multiple_of(ALIGNMENT);
        if is_free {
            (local.within, local.offset) = (Some(whole), offset);
        }
        is_free
    }
}

/// Gives locals their offsets in a frame; returns the bytes of the frame. A part of another local
/// keeps its distance from the start of the outermost local that it lies in.
pub(super) fn place(locals: &mut [LocalBuffer], instructions: &[Instruction]) -> u64 {
    let wholes: Vec<(usize, u64)> = (0..locals.len()).map(|at| whole_of(locals, at)).collect();
    let lifetimes = lifetimes(locals, &wholes, instructions);
    let is_whole: Vec<usize> = (0..locals.len()).filter(|at| wholes[*at].0 == *at).collect();
    let packing = pack(&is_whole.iter().map(|at| lifetimes[*at]).collect::<Vec<_>>());
    for (at, offset) in is_whole.iter().zip(&packing.offsets) {
        locals[*at].offset = *offset;
    }
    for (at, (whole, offset)) in wholes.into_iter().enumerate() {
        if whole != at {
            locals[at].offset = locals[whole].offset + offset;
            locals[at].within = Some(whole as u32);
        }
    }
    packing.bytes
}

/// The local that is no part in which one lies, and from which of its bytes on.
fn whole_of(locals: &[LocalBuffer], mut at: usize) -> (usize, u64) {
    let mut offset = 0;
    while let Some(whole) = locals[at].within {
        offset += locals[at].offset;
        at = whole as usize;
    }
    (at, offset)
}

/// When each local or a part of it is live: from the first instruction that touches it to the last.
fn lifetimes(
    locals: &[LocalBuffer],
    wholes: &[(usize, u64)],
    instructions: &[Instruction],
) -> Vec<Lifetime> {
    let mut spans: Vec<Option<(usize, usize)>> = vec![None; locals.len()];
    for (at, instruction) in instructions.iter().enumerate() {
        for touched in touched(instruction) {
            if let Ref::Local(local) = touched {
                let span = spans[wholes[local as usize].0].get_or_insert((at, at));
                span.1 = at;
            }
        }
    }
    let lifetime = |(local, span): (&LocalBuffer, &Option<(usize, usize)>)| {
        let (first, last) = span.unwrap_or((0, 0));
        Lifetime { bytes: local.bytes, first, last }
    };
    locals.iter().zip(&spans).map(lifetime).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_live_as_long_as_the_whole_and_lie_in_it() {
        let local = |name: &str, bytes, within: Option<(u32, u64)>| LocalBuffer {
            name: name.into(),
            bytes,
            offset: within.map_or(0, |(_, offset)| offset),
            within: within.map(|(whole, _)| whole),
        };
        // `x` beside `y` is `xy`; that beside `z` is `xyz`; `w` lives while parts of it do.
        let mut locals = vec![
            local("x", 64, Some((3, 0))),
            local("w", 128, None),
            local("y", 64, Some((3, 64))),
            local("xy", 128, Some((5, 64))),
            local("z", 64, Some((5, 0))),
            local("xyz", 192, None),
        ];
        let launch = |inputs: &[u32], output: u32| Instruction::Launch {
            kernel: 0,
            scalars: Vec::new(),
            inputs: inputs.iter().map(|at| Ref::Local(*at)).collect(),
            outputs: vec![Ref::Local(output)],
            workspace: None,
        };
        let steps = [launch(&[], 0), launch(&[0], 1), launch(&[1], 2), launch(&[1], 4)];
        assert_eq!(place(&mut locals, &steps), 320);
        let whole = locals[5].offset;
        let lies: Vec<_> =
            locals.iter().map(|l| (l.within, l.offset.wrapping_sub(whole))).collect();
        assert_eq!([lies[0], lies[2]], [(Some(5), 64), (Some(5), 128)]);
        assert_eq!([lies[3], lies[4], lies[5]], [(Some(5), 64), (Some(5), 0), (None, 0)]);
        let apart = locals[1].offset >= whole + 192 || locals[1].offset + 128 <= whole;
        assert!(apart && locals[1].within.is_none());
    }

    /// Wholes, some cut into parts and these again, in any order.
    fn drawn(draw: &mut impl FnMut(u64) -> u64) -> Vec<LocalBuffer> {
        let mut locals: Vec<LocalBuffer> = Vec::new();
        let local = |within: Option<u32>, offset, bytes| LocalBuffer {
            name: String::new(),
            bytes,
            offset,
            within,
        };
        for _ in 0..2 + draw(3) {
            locals.push(local(None, 0, ALIGNMENT * (1 + draw(5)) - draw(2)));
        }
        let mut at = 0;
        while at < locals.len() && locals.len() < 12 {
            let pieces = locals[at].bytes / ALIGNMENT;
            if pieces > 1 && draw(2) == 0 {
                let first = ALIGNMENT * (1 + draw(pieces - 1));
                let rest = locals[at].bytes - first;
                locals.push(local(Some(at as u32), 0, first));
                locals.push(local(Some(at as u32), first, rest));
            }
            at += 1;
        }
        let shift = draw(locals.len() as u64) as usize;
        let count = locals.len();
        locals.rotate_right(shift);
        let moved = |at: u32| ((at as usize + shift) % count) as u32;
        locals.iter_mut().for_each(|local| local.within = local.within.map(moved));
        locals
    }

    /// What is written to a local is there when it or what it lies in is read, as if each whole had
    /// a memory of its own.
    #[test]
    fn locals_hold_what_was_written_to_them() {
        let (mut shared, mut read) = (0, 0);
        for seed in 0..300_u64 {
            let mut state = seed;
            let mut draw = |below: u64| {
                state = ir::random::mix(state.wrapping_add(0x9e37_79b9_7f4a_7c15));
                state % below
            };
            let mut locals = drawn(&mut draw);
            let count = locals.len() as u64;
            let wholes: Vec<(usize, u64)> =
                (0..locals.len()).map(|at| whole_of(&locals, at)).collect();
            let touched: Vec<[usize; 2]> =
                (0..4 + draw(9)).map(|_| [0; 2].map(|_| draw(count) as usize)).collect();
            let launch = |[from, to]: &[usize; 2]| Instruction::Launch {
                kernel: 0,
                scalars: Vec::new(),
                inputs: vec![Ref::Local(*from as u32)],
                outputs: vec![Ref::Local(*to as u32)],
                workspace: None,
            };
            let bytes = place(&mut locals, &touched.iter().map(launch).collect::<Vec<_>>());
            let sum: u64 = locals.iter().filter(|l| l.within.is_none()).map(|l| l.bytes).sum();
            shared += usize::from(bytes < sum);
            let mut frame = vec![None; bytes as usize];
            let mut own = vec![vec![None; 5 * ALIGNMENT as usize]; locals.len()];
            for (step, [from, to]) in touched.into_iter().enumerate() {
                let range = |local: usize, start: u64| {
                    start as usize..(start + locals[local].bytes) as usize
                };
                let (whole, start) = wholes[from];
                let held = &frame[range(from, locals[from].offset)];
                for (held, wanted) in held.iter().zip(&own[whole][range(from, start)]) {
                    assert!(wanted.is_none() || held == wanted, "seed {seed}: {locals:?}");
                    read += usize::from(wanted.is_some());
                }
                let (whole, start) = wholes[to];
                frame[range(to, locals[to].offset)].fill(Some(step));
                own[whole][range(to, start)].fill(Some(step));
            }
        }
        assert!(shared > 50 && read > 10_000, "{shared} frames share bytes, {read} are read");
    }
}
