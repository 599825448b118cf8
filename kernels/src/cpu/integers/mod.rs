//! Products of integers of 8 and of 16 bits, summed in 32.
//!
//! Blocks and tables of offsets are those of [`super::tiles`]; sums wrap, so that neither the order
//! of terms nor the cut of `k` enters a bit, and all instructions give the same. Without VNNI,
//! bytes are packed as numbers of 16 bits, which `vpmaddwd` multiplies exactly. That also holds the
//! difference of a byte and its zero point, of 9 bits, so that no sums of rows and columns are
//! taken out of a product: these would read its operands once more, and save nothing on AVX2.
//!
//! `steps` the instructions, `panels` the packing; here the blocks.

mod panels;
mod steps;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod x86;

use ir::DType;

use super::Cpu;
use super::extent::step;
use super::formats::Operand;
use super::frame::Frame;
use super::product::{Grid, Plan};
use super::scratch::{Bump, lines_of};
use super::tiles::{Nest, fill_offsets, points, table};
use super::vector::Isa;
use super::view::{View, ViewMut};
use crate::kernel::Product;
use panels::{WIDE, groups, pack, pack_rows};
use steps::{Job, Step, Words};

/// Points of `k` of a block: a panel of columns of 16 bits takes 16 KiB with AVX2.
const KC: usize = 512;
/// Rows of a block, a multiple of the heights of tiles: 240 KiB of panels.
const MC: usize = 240;
/// Columns of a block: 480 KiB of panels.
const NC: usize = 480;
/// The same where all rows are in one block: each panel is then packed in the place of the one
/// before it, and rows are packed once for more columns.
const NC_ONCE: usize = 3072;

/// Whether a product is one of integers.
pub(super) fn fits(p: &Product) -> bool {
    p.dtype == DType::I32
}

/// The instructions that multiply integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Multiplier {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    AvxVnni,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
}

impl Multiplier {
    /// The fastest of a set, and of this machine.
    fn of(isa: Isa) -> Multiplier {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Amx | Isa::Avx512Bf16 | Isa::Avx512 => {
                let has_vnni = is_x86_feature_detected!("avx512vnni");
                if has_vnni { Multiplier::Avx512Vnni } else { Multiplier::Avx512 }
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                let has_vnni = is_x86_feature_detected!("avxvnni");
                if has_vnni { Multiplier::AvxVnni } else { Multiplier::Avx2 }
            }
            _ => Multiplier::Portable,
        }
    }

    /// Runs a job with the instruction for operands of bytes alone, or for any.
    fn run<J: Job>(self, are_bytes: bool, job: J) {
        match (self, are_bytes) {
            (Multiplier::Portable, _) => Words::enter(job),
            #[cfg(target_arch = "x86_64")]
            (Multiplier::Avx2, _) => x86::Words8::enter(job),
            #[cfg(target_arch = "x86_64")]
            (Multiplier::AvxVnni, false) => x86::VnniWords8::enter(job),
            #[cfg(target_arch = "x86_64")]
            (Multiplier::AvxVnni, true) => x86::VnniBytes8::enter(job),
            #[cfg(target_arch = "x86_64")]
            (Multiplier::Avx512, _) => x86::Words16::enter(job),
            #[cfg(target_arch = "x86_64")]
            (Multiplier::Avx512Vnni, false) => x86::VnniWords16::enter(job),
            #[cfg(target_arch = "x86_64")]
            (Multiplier::Avx512Vnni, true) => x86::VnniBytes16::enter(job),
        }
    }
}

/// Elements of an operand.
#[derive(Clone, Copy)]
enum Numbers {
    Bytes(*const i8),
    /// I32, truncated to 16 bits.
    Words(*const i32),
}

impl Numbers {
    fn new(view: &View, dtype: DType) -> Numbers {
        if dtype == DType::I8 { Numbers::Bytes(view.start()) } else { Numbers::Words(view.start()) }
    }

    fn moved(self, offset: usize) -> Numbers {
        match self {
            Numbers::Bytes(start) => Numbers::Bytes(start.wrapping_add(offset)),
            Numbers::Words(start) => Numbers::Words(start.wrapping_add(offset)),
        }
    }

    /// # Safety
    ///
    /// As [`pack`].
    #[inline(always)]
    unsafe fn pack<S: Step>(self, wide: &[usize], deep: &[usize], width: usize, panel: *mut i32) {
        // SAFETY: by the contract of the function.
        unsafe {
            match self {
                Numbers::Bytes(start) => pack::<S, i8>(start, wide, deep, width, panel),
                Numbers::Words(start) => pack::<S, i32>(start, wide, deep, width, panel),
            }
        }
    }
}

/// Bytes of scratch per thread.
pub(super) fn scratch(p: &Product) -> usize {
    let [_, m, n, k] = p.sizes();
    // Rows and columns may change places.
    let side = m.max(n);
    let (mc, kc) = (side.min(MC), k.min(KC));
    let [nc, packed] = [NC_ONCE, NC].map(|most| side.min(most).next_multiple_of(WIDE));
    let borders = p.borders.len();
    let tables = [mc, mc, nc, nc, kc, kc].map(lines_of::<usize>).iter().sum::<usize>();
    let positions = lines_of::<isize>(borders * nc) + lines_of::<isize>(borders * kc);
    let framed = if borders > 0 { lines_of::<f32>(kc * WIDE) } else { 0 };
    // The largest groups are of two numbers.
    let groups = kc.div_ceil(2);
    let panels = [mc * groups, packed * groups, nc, WIDE * WIDE].map(lines_of::<i32>);
    panels.iter().sum::<usize>() + tables + positions + framed
}

/// Cycles of a product, at the rate of `vpmaddwd` in AVX2.
fn cycles(p: &Product) -> u64 {
    p.flops().0 / 64
}

/// Runs a product of integers.
pub(super) fn execute(cpu: &Cpu, p: &Product, plan: &Plan, inputs: &[View], outputs: &[ViewMut]) {
    let multiplier = Multiplier::of(cpu.isa);
    let are_bytes = [p.stored.a, p.stored.b] == [DType::I8; 2];
    let grid = Grid::new(plan, cpu.threads());
    cpu.for_each(grid.tasks(), cycles(p), scratch(p), |task, scratch: &mut Bump| {
        let part = Part::new(p, plan, (&grid, task), inputs, outputs, scratch);
        multiplier.run(are_bytes, part);
    });
}

/// The rows and columns of a product that one task computes.
struct Part<'a> {
    nest: &'a Nest,
    rows: [usize; 2],
    columns: [usize; 2],
    a: Numbers,
    b: Numbers,
    c: *mut i32,
    scratch: &'a mut Bump,
}

impl<'a> Part<'a> {
    fn new(
        p: &Product,
        plan: &'a Plan,
        (grid, task): (&Grid, usize),
        inputs: &[View],
        outputs: &[ViewMut],
        scratch: &'a mut Bump,
    ) -> Part<'a> {
        let [a, b] =
            [(0, p.stored.a), (1, p.stored.b)].map(|(at, dtype)| Numbers::new(&inputs[at], dtype));
        let (a, b) = if plan.swapped { (b, a) } else { (a, b) };
        let (entry, rows, columns) = grid.part(task);
        let [of_a, of_b, of_c] = plan.offsets(entry);
        let c = outputs[0].start::<i32>().wrapping_add(of_c);
        Part { nest: &plan.nest, rows, columns, a: a.moved(of_a), b: b.moved(of_b), c, scratch }
    }
}

impl Job for Part<'_> {
    #[inline(always)]
    fn run<S: Step>(self) {
        // SAFETY: whoever makes a part gives operands that hold all offsets of its loops, and
        // scratch of `scratch`.
        unsafe { part::<S>(self) }
    }
}

/// The block size along n, given the number of rows of the part.
fn most_columns(rows: usize) -> usize {
    if rows <= MC { NC_ONCE } else { NC }
}

/// Tables and panels of one task.
struct Room {
    a: *mut i32,
    b: *mut i32,
    /// What the sums of each column of a block start from.
    start: *mut i32,
    edge: *mut i32,
    /// Offsets in an operand and in the result.
    rows: [*mut usize; 2],
    columns: [*mut usize; 2],
    deep: [*mut usize; 2],
    /// Positions along borders, and columns that have them.
    positions: [*mut isize; 2],
    framed: *mut f32,
}

impl Room {
    fn take<S: Step>(part: &mut Part) -> Room {
        let ([m0, m1], [n0, n1]) = (part.rows, part.columns);
        let (mc, kc) = ((m1 - m0).min(MC), points(&part.nest.k).min(KC));
        let (width, is_once) = (2 * S::LANES, m1 - m0 <= MC);
        let nc = (n1 - n0).min(most_columns(m1 - m0)).next_multiple_of(width);
        let (borders, groups) = (part.nest.frames.len(), groups::<S>(kc));
        let scratch = &mut *part.scratch;
        Room {
            a: scratch.take(mc * groups),
            b: scratch.take(if is_once { width } else { nc } * groups),
            start: scratch.take(nc),
            edge: scratch.take(WIDE * S::ROWS),
            rows: [scratch.take(mc), scratch.take(mc)],
            columns: [scratch.take(nc), scratch.take(nc)],
            deep: [scratch.take(kc), scratch.take(kc)],
            positions: [scratch.take(borders * nc), scratch.take(borders * kc)],
            framed: scratch.take(if borders > 0 { kc * width } else { 0 }),
        }
    }
}

/// A block of columns and of `k`: offsets in both operands and the result.
struct Block<'a> {
    ak: &'a [usize],
    bk: &'a [usize],
    bn: &'a [usize],
    cn: &'a [usize],
    frame: Frame<'a>,
    /// Whether the sums are added to what is there.
    add: bool,
}

/// # Safety
///
/// See [`Part`].
#[inline(always)]
unsafe fn part<S: Step>(mut part: Part) {
    let room = Room::take::<S>(&mut part);
    let ([m0, m1], [n0, n1], k) = (part.rows, part.columns, points(&part.nest.k));
    let frames = part.nest.frames.as_slice();
    let most = most_columns(m1 - m0);
    for n in (n0..n1).step_by(most) {
        let n_len = most.min(n1 - n);
        // SAFETY: the tables have room for a block each, and hold nothing yet.
        let [bn, cn] = room.columns.map(|start| unsafe { table(start, n_len) });
        fill_offsets(&part.nest.n, 1, n, bn);
        fill_offsets(&part.nest.n, 2, n, cn);
        // SAFETY: as above.
        let pn = unsafe { table(room.positions[0], frames.len() * n_len) };
        Frame::fill_n(frames, n, n_len, pn);
        for block in 0..k.div_ceil(KC).max(1) {
            let k_len = KC.min(k - block * KC);
            // SAFETY: as above.
            let [ak, bk] = room.deep.map(|start| unsafe { table(start, k_len) });
            fill_offsets(&part.nest.k, 0, block * KC, ak);
            fill_offsets(&part.nest.k, 1, block * KC, bk);
            // SAFETY: as above.
            let pk = unsafe { table(room.positions[1], frames.len() * k_len) };
            Frame::fill_k(frames, block * KC, k_len, pk);
            let frame = Frame::new(frames, pn, pk);
            let add = block > 0 || part.nest.accumulate;
            // SAFETY: operands and room hold the block, by the contract of the part.
            unsafe { multiply::<S>(&part, &room, &Block { ak, bk, bn, cn, frame, add }) };
        }
    }
}

/// Multiplies all rows of a part with a block of columns.
///
/// # Safety
///
/// Operands and room hold the block.
#[inline(always)]
unsafe fn multiply<S: Step>(part: &Part, room: &Room, block: &Block) {
    let ([m0, m1], groups) = (part.rows, groups::<S>(block.ak.len()));
    let (width, is_once) = (2 * S::LANES, m1 - m0 <= MC);
    for m in (m0..m1).step_by(MC) {
        let m_len = MC.min(m1 - m);
        // SAFETY: the tables have room for a block each.
        let [am, cm] = room.rows.map(|start| unsafe { table(start, m_len) });
        fill_offsets(&part.nest.m, 0, m, am);
        fill_offsets(&part.nest.m, 2, m, cm);
        // SAFETY: panels follow each other in their room.
        unsafe {
            for (first, height) in heights::<S>(m_len) {
                let (rows, panel) = (&am[first..first + height], room.a.add(first * groups));
                part.a.pack::<S>(rows, block.ak, height, panel);
            }
            if S::IS_OFFSET {
                panels::add_offset(room.a, m_len * groups);
            }
            for first in (0..block.bn.len()).step_by(width) {
                let last = block.bn.len().min(first + width);
                let place = if is_once { 0 } else { first * groups };
                let (b, start) = (room.b.add(place), room.start.add(first));
                if m == m0 {
                    pack_columns::<S>(part, room, block, [first, last], b);
                    panels::starts::<S>(b, groups, width, start);
                }
                let panels = Panels { groups, a: room.a, b, start };
                let target = Target { c: part.c, cm, cn: &block.cn[first..last], add: block.add };
                target.compute::<S>(panels, room.edge);
            }
        }
    }
}

/// Packs the columns of a block into panels; the last one is padded with zeros.
///
/// # Safety
///
/// Operand and room hold them.
#[inline(always)]
unsafe fn pack_columns<S: Step>(
    part: &Part,
    room: &Room,
    block: &Block,
    [first, last]: [usize; 2],
    panel: *mut i32,
) {
    let (width, bn) = (2 * S::LANES, &block.bn[first..last]);
    // SAFETY: by the contract of the function. Borders are of operands of 32 bits, whose elements
    // are moved as those of F32 are, bit by bit.
    unsafe {
        match part.b {
            Numbers::Words(start) if !block.frame.is_none() => {
                let b = Operand::own(start.cast::<f32>());
                block.frame.pack::<S::Packing>(b, first, bn, block.bk, width, room.framed);
                let row = |k: usize| room.framed.cast::<i32>().cast_const().wrapping_add(k * width);
                pack_rows::<S, i32>(row, block.bk.len(), panel);
            }
            Numbers::Words(_) | Numbers::Bytes(_) => {
                part.b.pack::<S>(bn, block.bk, width, panel);
            }
        }
    }
}

/// The first rows and the heights of register tiles of so many rows.
#[inline(always)]
fn heights<S: Step>(rows: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut first = 0;
    std::iter::from_fn(move || {
        let height = match rows - first {
            0 => return None,
            12.. if S::ROWS == 12 => 12,
            6.. if S::ROWS >= 6 => 6,
            4.. => 4,
            2.. => 2,
            _ => 1,
        };
        first += height;
        Some((first - height, height))
    })
}

/// Packed operands of register tiles.
#[derive(Clone, Copy)]
struct Panels {
    groups: usize,
    a: *const i32,
    b: *const i32,
    start: *const i32,
}

/// Where the sums of a panel of columns go.
struct Target<'a> {
    c: *mut i32,
    cm: &'a [usize],
    cn: &'a [usize],
    add: bool,
}

impl Target<'_> {
    /// # Safety
    ///
    /// The panels hold all rows and a panel of columns, the result its elements, the edge a tile.
    #[inline(always)]
    unsafe fn compute<S: Step>(&self, panels: Panels, edge: *mut i32) {
        let width = 2 * S::LANES;
        let is_whole = self.cn.len() == width && step(self.cn) == Some(1);
        for (first, height) in heights::<S>(self.cm.len()) {
            let cm = &self.cm[first..first + height];
            // SAFETY: by the contract of the function.
            unsafe {
                let panels = Panels { a: panels.a.add(first * panels.groups), ..panels };
                if is_whole {
                    let c = self.c.wrapping_add(self.cn[0]);
                    tile_of::<S>(panels, height, |i| c.wrapping_add(cm[i]), self.add);
                    continue;
                }
                let element = |i: usize, j: usize| self.c.wrapping_add(cm[i] + self.cn[j]);
                let points = (0..height).flat_map(|i| (0..self.cn.len()).map(move |j| (i, j)));
                if self.add {
                    points.clone().for_each(|(i, j)| *edge.add(i * width + j) = *element(i, j));
                }
                tile_of::<S>(panels, height, |i| edge.wrapping_add(i * width), self.add);
                points.for_each(|(i, j)| *element(i, j) = *edge.add(i * width + j));
            }
        }
    }
}

/// A register tile of some height.
///
/// # Safety
///
/// As [`tile`].
#[inline(always)]
unsafe fn tile_of<S: Step>(
    panels: Panels,
    height: usize,
    row: impl Fn(usize) -> *mut i32,
    add: bool,
) {
    // SAFETY: by the contract of the function.
    unsafe {
        match height {
            12 if S::ROWS == 12 => tile::<S, 12>(panels, row, add),
            6 if S::ROWS >= 6 => tile::<S, 6>(panels, row, add),
            4 => tile::<S, 4>(panels, row, add),
            2 => tile::<S, 2>(panels, row, add),
            _ => tile::<S, 1>(panels, row, add),
        }
    }
}

/// A register tile: the sums of `R` rows and two vectors of columns.
///
/// # Safety
///
/// The panels hold `R` rows and as many columns, each row of the result two vectors.
#[inline(always)]
#[allow(clippy::needless_range_loop, reason = "constant bounds keep sums in registers")]
unsafe fn tile<S: Step, const R: usize>(
    panels: Panels,
    row: impl Fn(usize) -> *mut i32,
    add: bool,
) {
    let Panels { groups, a, b, start } = panels;
    // SAFETY: by the contract of the function.
    unsafe {
        let rows = std::slice::from_raw_parts(a.cast::<[i32; R]>(), groups);
        let columns = std::slice::from_raw_parts(b.cast::<[S::Groups; 2]>(), groups);
        let mut sums = [[S::load(start), S::load(start.add(S::LANES))]; R];
        if add {
            for i in 0..R {
                for j in 0..2 {
                    sums[i][j] = sums[i][j].add(S::load(row(i).wrapping_add(j * S::LANES)));
                }
            }
        }
        for (rows, columns) in rows.iter().zip(columns) {
            let columns = columns.map(S::of);
            for i in 0..R {
                let group = S::splat(rows[i]);
                for j in 0..2 {
                    sums[i][j] = sums[i][j].step(group, columns[j]);
                }
            }
        }
        for i in 0..R {
            for j in 0..2 {
                sums[i][j].store(row(i).wrapping_add(j * S::LANES));
            }
        }
    }
}
