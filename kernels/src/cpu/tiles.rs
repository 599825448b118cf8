//! Matrix products: packed panels and a register tile, as in BLIS (Van Zee, van de Geijn 2015).
//!
//! Loops of any strides become one product by tables: the address of `a[m, k]` is the sum of an
//! offset that depends on `m` and one that depends on `k`, and so for `b` and `c`. Packing reads
//! through the tables, so the register tile never sees a stride. A panel of columns is packed just
//! before its first use, and is then still in the cache.
//!
//! An element of the result is one chain of fused multiply-adds per block of `k`, whichever tile
//! computes it. That, and not the choice of tiles, makes its bits independent of all other sizes.

use super::block::{Machine, Patch, Sink};
use super::blocked::Block;
use super::extent::{THIN, height, step};
use super::formats::{Format, Operand};
use super::frame::{Frame, Framed};
use super::pack::{pack_columns, pack_rows};
use super::plane::Planes;
use super::rounded::Rounded;
use super::scratch::{Bump, lines_of};
use super::vector::{Job, MAX_LANES, Scalar, Vector};
use super::view::Shared;
use crate::kernel::Product;

/// Points of `k` per block.
const KC: usize = Product::K_BLOCK;
/// Rows per block: their panels stay in a second-level cache of 1 MiB. A multiple of 8, the height
/// of most tiles.
const MC: usize = 256;
/// Columns per block: just under 1 MiB of panels in f32. A multiple of all tile widths.
const NC: usize = 960;
/// Rows whose results stay in a third-level cache while blocks of `k` are added to them: 8 MiB in
/// f32. After these the columns are packed again, at a cost of less than a hundredth.
const MS: usize = 2048;

/// The same where sums are kept apart from the result, which is narrow: 2 MiB.
const MS_APART: usize = 512;

/// Most panels of columns for which reading rows in place beats packing them.
const IN_PLACE: usize = 8;

/// A loop with its strides in `a`, `b` and `c`; zero where it does not occur.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Loop {
    pub(super) size: usize,
    pub(super) strides: [usize; 3],
}

/// The loops of one product without its batch.
#[derive(Clone, Debug)]
pub(super) struct Nest {
    pub(super) m: Vec<Loop>,
    pub(super) n: Vec<Loop>,
    pub(super) k: Vec<Loop>,
    pub(super) accumulate: bool,
    /// The borders of `b`, unless it is read from planes.
    pub(super) frames: Vec<Framed>,
    pub(super) planes: Option<Planes>,
}

/// Most columns and points of `k` of a block of so many.
pub(super) fn block_of([n, k]: [usize; 2]) -> [usize; 2] {
    [n.min(NC), k.min(KC)]
}

/// Number of points of a list of loops.
pub(super) fn points(loops: &[Loop]) -> usize {
    loops.iter().map(|l| l.size).product()
}

/// Drops loops of one point and joins neighbours that are one loop in all operands.
pub(super) fn merge(loops: impl Iterator<Item = Loop>) -> Vec<Loop> {
    let mut merged: Vec<Loop> = Vec::new();
    for inner in loops.filter(|l| l.size != 1) {
        match merged.last_mut() {
            Some(outer) if outer.strides == inner.strides.map(|s| s * inner.size) => {
                *outer = Loop { size: outer.size * inner.size, strides: inner.strides };
            }
            _ => merged.push(inner),
        }
    }
    merged
}

/// The offsets in operand `operand` of the points from `start` on.
pub(super) fn fill_offsets(loops: &[Loop], operand: usize, start: usize, offsets: &mut [usize]) {
    let Some((inner, outer)) = loops.split_last() else {
        offsets.fill(0);
        return;
    };
    let stride = inner.strides[operand];
    let mut done = 0;
    while done < offsets.len() {
        let (mut rest, first) = ((start + done) / inner.size, (start + done) % inner.size);
        let mut base = first * stride;
        for l in outer.iter().rev() {
            base += rest % l.size * l.strides[operand];
            rest /= l.size;
        }
        let run = (inner.size - first).min(offsets.len() - done);
        for (i, offset) in offsets[done..done + run].iter_mut().enumerate() {
            *offset = base + i * stride;
        }
        done += run;
    }
}

/// Part of a product: the rows and columns that one task computes.
pub(super) struct Part<'a, S> {
    pub(super) nest: &'a Nest,
    pub(super) rows: [usize; 2],
    pub(super) columns: [usize; 2],
    pub(super) a: Operand,
    pub(super) b: Operand,
    /// The result, unless that is `rounded`.
    pub(super) c: *mut S,
    pub(super) epilogue: Epilogue<S>,
    pub(super) rounded: Option<Rounded>,
    pub(super) then: Option<Then<'a, S>>,
    pub(super) scratch: &'a mut Bump,
}

/// A block program that runs on each block of a result when that is done.
#[derive(Clone, Copy)]
pub(super) struct Then<'a, S> {
    pub(super) patch: &'a Patch,
    pub(super) inputs: &'a [Shared<u8>],
    pub(super) sinks: &'a [Sink<S>],
    /// Whether rows of the nest are columns of the program.
    pub(super) swapped: bool,
}

/// What is done with a block of a result when that is complete.
pub(super) struct Finish<'a, V: Vector> {
    nest: &'a Nest,
    epilogue: Epilogue<V::Scalar>,
    /// Where sums are rounded to, with room for the offsets of a block of it.
    rounded: Option<(Rounded, [*mut usize; 2])>,
    then: Option<(Machine<'a, V>, bool)>,
}

impl<'a, V: Vector> Finish<'a, V> {
    /// What is done with the blocks of a part; there are tables of offsets iff it is rounded.
    #[inline(always)]
    pub(super) fn new(part: &mut Part<'a, V::Scalar>, tables: Option<[*mut usize; 2]>) -> Self {
        let then = part.then.map(|then| {
            let machine = then.patch.machine::<V>(then.inputs, then.sinks, part.scratch);
            (machine, then.swapped)
        });
        Finish { nest: part.nest, epilogue: part.epilogue, rounded: part.rounded.zip(tables), then }
    }

    fn is_none(&self) -> bool {
        self.epilogue.is_none() && self.rounded.is_none() && self.then.is_none()
    }

    /// Finishes a block whose first row and column are `m` and `n`.
    ///
    /// # Safety
    ///
    /// As [`Epilogue::add_to`]; the arguments of the program hold the block, too.
    #[inline(always)]
    pub(super) unsafe fn finish(&mut self, block: &Block<V::Scalar>, m: usize, n: usize) {
        // SAFETY: by the contract of the function; tables have room for a block.
        unsafe {
            match &self.rounded {
                None => self.epilogue.add_to(block, m, n),
                Some((rounded, [rows, columns])) => {
                    let (rows, columns) =
                        (table(*rows, block.cm.len()), table(*columns, block.cn.len()));
                    fill_offsets(&self.nest.m, 2, m, rows);
                    fill_offsets(&self.nest.n, 2, n, columns);
                    rounded.store::<V>(block, [m, n], [rows, columns]);
                }
            }
        }
        if let Some((machine, swapped)) = &mut self.then {
            let (rows, columns) = ([m, m + block.cm.len()], [n, n + block.cn.len()]);
            let (rows, columns) = if *swapped { (columns, rows) } else { (rows, columns) };
            machine.run(rows, columns, [0, 0]);
        }
    }
}

/// What is added to the result of a product, in this order, while a block of it is in a
/// second-level cache.
#[derive(Clone, Copy)]
pub(super) struct Epilogue<S> {
    /// One number for each row.
    pub(super) by_row: Option<*const S>,
    /// One number for each column.
    pub(super) by_column: Option<*const S>,
    /// One number for each element, at the same offset as it.
    pub(super) addend: Option<*const S>,
}

impl<S: Scalar> Epilogue<S> {
    /// Nothing is added.
    pub(super) fn none() -> Epilogue<S> {
        Epilogue { by_row: None, by_column: None, addend: None }
    }

    fn is_none(&self) -> bool {
        self.by_row.is_none() && self.by_column.is_none() && self.addend.is_none()
    }

    /// The same for a result that starts at an offset.
    pub(super) fn moved(self, offset: usize) -> Epilogue<S> {
        Epilogue { addend: self.addend.map(|addend| addend.wrapping_add(offset)), ..self }
    }

    /// Adds to a block whose first row and column are `m` and `n`.
    ///
    /// # Safety
    ///
    /// The operands hold the block, and nobody else uses its elements of `c`.
    #[inline(always)]
    unsafe fn add_to(&self, block: &Block<S>, m: usize, n: usize) {
        let contiguous = step(block.cn) == Some(1);
        for (i, &row) in block.cm.iter().enumerate() {
            // SAFETY: by the contract of the function; contiguous columns are a slice of `c` that
            // nothing else refers to, and as long a slice of each operand.
            unsafe {
                let first = self.by_row.map(|bias| *bias.add(m + i));
                if contiguous && !block.cn.is_empty() {
                    let (start, len) = (row + block.cn[0], block.cn.len());
                    let c = std::slice::from_raw_parts_mut(block.c.add(start), len);
                    let by_column = self.by_column.map(|bias| bias.add(n));
                    let addend = self.addend.map(|addend| addend.add(start));
                    if let Some(first) = first {
                        c.iter_mut().for_each(|x| *x = *x + first);
                    }
                    for operand in [by_column, addend].into_iter().flatten() {
                        let operand = std::slice::from_raw_parts(operand, len);
                        c.iter_mut().zip(operand).for_each(|(x, y)| *x = *x + *y);
                    }
                    continue;
                }
                for (j, &column) in block.cn.iter().enumerate() {
                    let element = block.c.add(row + column);
                    let second = self.by_column.map(|bias| *bias.add(n + j));
                    let last = self.addend.map(|addend| *addend.add(row + column));
                    for number in [first, second, last].into_iter().flatten() {
                        *element = *element + number;
                    }
                }
            }
        }
    }
}

/// Bytes of scratch that a part takes beyond [`scratch_bytes`] where its result is rounded.
pub(super) fn apart_bytes<S>(m: usize, n: usize) -> usize {
    let columns = (n + 47).min(NC);
    lines_of::<S>(m.min(MS_APART) * columns)
        + lines_of::<usize>(m.min(MC))
        + lines_of::<usize>(columns)
}

/// Bytes of scratch that a part of at most `m` × `n` × `k` points and some borders takes.
pub(super) fn scratch_bytes<S>([m, n, k]: [usize; 3], borders: usize) -> usize {
    // A tile is at most 48 columns wide.
    let (mc, nc, kc) = (m.min(MC), (n + 47).min(NC), k.min(KC));
    let tables = 2 * (lines_of::<usize>(mc) + lines_of::<usize>(nc) + lines_of::<usize>(kc));
    let positions = lines_of::<isize>(borders * nc) + lines_of::<isize>(borders * kc);
    lines_of::<S>(mc * kc) + lines_of::<S>(nc * kc) + tables + positions
}

impl<S: Scalar> Job<S> for Part<'_, S> {
    #[inline(always)]
    fn run<V: Vector<Scalar = S>>(self) {
        // SAFETY: whoever makes a part gives operands that hold all offsets of its loops, and
        // scratch of `scratch_bytes`.
        unsafe { part::<V>(self) }
    }
}

/// Tables and panels of one task.
struct Panels<S> {
    a: *mut S,
    b: *mut S,
    am: *mut usize,
    cm: *mut usize,
    bn: *mut usize,
    cn: *mut usize,
    ak: *mut usize,
    bk: *mut usize,
    /// Positions along borders.
    pn: *mut isize,
    pk: *mut isize,
    /// Sums of a result that is rounded.
    apart: Option<*mut S>,
    /// The planes of a block.
    planes: Option<*mut S>,
}

/// # Safety
///
/// See [`Part`].
#[inline(always)]
unsafe fn part<V: Vector>(mut part: Part<V::Scalar>) {
    let ([m0, m1], [n0, n1], k) = (part.rows, part.columns, points(&part.nest.k));
    let vectors = vectors::<V>(n1 - n0);
    let width = vectors * V::LANES;
    let (mc, nc, kc) = ((m1 - m0).min(MC), (n1 - n0).next_multiple_of(width).min(NC), k.min(KC));
    let panels = Panels {
        a: part.scratch.take(mc * kc),
        b: part.scratch.take(nc * kc),
        am: part.scratch.take(mc),
        cm: part.scratch.take(mc),
        bn: part.scratch.take(nc),
        cn: part.scratch.take(nc),
        ak: part.scratch.take(kc),
        bk: part.scratch.take(kc),
        pn: part.scratch.take(part.nest.frames.len() * nc),
        pk: part.scratch.take(part.nest.frames.len() * kc),
        apart: part.rounded.map(|_| part.scratch.take((m1 - m0).min(MS_APART) * nc)),
        planes: part.nest.planes.as_ref().map(|p| p.take(part.scratch)),
    };
    let tables = part.rounded.map(|_| [part.scratch.take(mc), part.scratch.take(nc)]);
    let strip = if tables.is_some() { MS_APART } else { MS };
    let frames = part.nest.frames.as_slice();
    let mut finish = Finish::<V>::new(&mut part, tables);
    for n in (n0..n1).step_by(NC) {
        let n_len = NC.min(n1 - n);
        // SAFETY: the tables have room for a block each, and hold nothing yet.
        let (bn, cn) = unsafe { (table(panels.bn, n_len), table(panels.cn, n_len)) };
        match &part.nest.planes {
            Some(planes) => planes.fill_n(n, bn),
            None => fill_offsets(&part.nest.n, 1, n, bn),
        }
        if panels.apart.is_none() {
            fill_offsets(&part.nest.n, 2, n, cn);
        } else {
            cn.iter_mut().enumerate().for_each(|(i, offset)| *offset = i);
        }
        // SAFETY: as above.
        let pn = unsafe { table(panels.pn, frames.len() * n_len) };
        Frame::fill_n(frames, n, n_len, pn);
        for m in (m0..m1).step_by(strip) {
            let rows = [m, m1.min(m + strip)];
            for block in 0..k.div_ceil(KC).max(1) {
                let k_len = KC.min(k - block * KC);
                // SAFETY: as above.
                let (ak, bk) = unsafe { (table(panels.ak, k_len), table(panels.bk, k_len)) };
                fill_offsets(&part.nest.k, 0, block * KC, ak);
                // SAFETY: the operand and the room for planes hold the block.
                let b = unsafe { operand::<V>(&part, &panels, [n, n_len], block * KC, bk) };
                // SAFETY: as above.
                let pk = unsafe { table(panels.pk, frames.len() * k_len) };
                Frame::fill_k(frames, block * KC, k_len, pk);
                let frame = Frame::new(frames, pn, pk);
                let add = block > 0 || part.nest.accumulate;
                let is_last = (block + 1) * KC >= k && !finish.is_none();
                let tables = Tables { b, ak, bk, bn, cn, frame, n, vectors, add };
                let finish = if is_last { Some(&mut finish) } else { None };
                // SAFETY: operands and panels hold the block, by the contract of the part.
                unsafe { columns::<V>(&part, &panels, &tables, rows, finish) };
            }
        }
    }
}

/// Fills the offsets in `b` of a block of `k`; what they are offsets in, for columns from `n` on:
/// the operand or its planes, which are filled.
///
/// # Safety
///
/// The operand holds the block, and there is room for its planes.
#[inline(always)]
unsafe fn operand<V: Vector>(
    part: &Part<V::Scalar>,
    panels: &Panels<V::Scalar>,
    columns: [usize; 2],
    k: usize,
    bk: &mut [usize],
) -> Operand {
    let (Some(planes), Some(room)) = (&part.nest.planes, panels.planes) else {
        fill_offsets(&part.nest.k, 1, k, bk);
        return part.b;
    };
    planes.fill_k(columns, k, bk);
    // SAFETY: by the contract of the function.
    unsafe { planes.fill::<V>(part.b.start(), columns, [k, bk.len()], room) };
    Operand::own(room.cast_const())
}

/// The offsets of a block of columns and of a block of `k`, and how they are multiplied.
struct Tables<'a> {
    b: Operand,
    ak: &'a [usize],
    bk: &'a [usize],
    bn: &'a [usize],
    cn: &'a [usize],
    frame: Frame<'a>,
    /// The first column.
    n: usize,
    /// Vectors of columns of a register tile.
    vectors: usize,
    /// Whether the result is added to what is there.
    add: bool,
}

/// Multiplies some rows with a block of columns over a block of `k`.
///
/// # Safety
///
/// Operands hold all sums of their tables, panels a block each.
#[inline(always)]
unsafe fn columns<V: Vector>(
    part: &Part<V::Scalar>,
    panels: &Panels<V::Scalar>,
    tables: &Tables<'_>,
    [m0, m1]: [usize; 2],
    mut finish: Option<&mut Finish<'_, V>>,
) {
    let &Tables { b, ak, bk, bn, cn, frame, n, vectors, add } = tables;
    let c = panels.apart.unwrap_or(part.c);
    let fill_rows = |first: usize, offsets: &mut [usize]| match panels.apart {
        None => fill_offsets(&part.nest.m, 2, first, offsets),
        Some(_) => {
            let row = |i: usize| (first - m0 + i) * cn.len();
            offsets.iter_mut().enumerate().for_each(|(i, offset)| *offset = row(i));
        }
    };
    let is_thin = m1 - m0 <= THIN && reads_in_place(part, tables);
    // SAFETY: the panels have room for the tables, and the operands hold their sums.
    unsafe {
        if is_thin {
            let (am, cm) = (table(panels.am, m1 - m0), table(panels.cm, m1 - m0));
            fill_offsets(&part.nest.m, 0, m0, am);
            fill_rows(m0, cm);
            let block = Block { a: part.a, b, c, am, cm, ak, bk, bn, cn, frame };
            match &part.nest.planes {
                Some(planes) => planes.multiply::<V>(&block, n, add),
                None => super::thin::multiply::<V>(&block, panels.b, add),
            }
            if let Some(finish) = finish {
                finish.finish(&block, m0, n);
            }
            return;
        }
        // Blocks of about the same size, of whole tiles.
        let count = (m1 - m0).div_ceil(MC).max(1);
        let most = (m1 - m0).div_ceil(count).next_multiple_of(8).min(MC);
        for m in (m0..m1).step_by(most) {
            let m_len = most.min(m1 - m);
            let (am, cm) = (table(panels.am, m_len), table(panels.cm, m_len));
            fill_offsets(&part.nest.m, 0, m, am);
            fill_rows(m, cm);
            let block = Block { a: part.a, b, c, am, cm, ak, bk, bn, cn, frame };
            match vectors {
                3 => multiply::<V, 3>(&block, panels, m == m0, add),
                _ => multiply::<V, 2>(&block, panels, m == m0, add),
            }
            if let Some(finish) = &mut finish {
                finish.finish(&block, m, n);
            }
        }
    }
}

/// Whether there is a loop for few rows that packs no columns.
fn reads_in_place<S>(part: &Part<S>, tables: &Tables<'_>) -> bool {
    let &Tables { b, ak, bn, frame, .. } = tables;
    if part.nest.planes.is_some() {
        return part.a.format == Format::Own;
    }
    let is_row = ak.len() >= THIN && step(bn) == Some(1) && frame.is_none();
    is_row && super::thin::reads([part.a.format, b.format])
}

/// # Safety
///
/// `len` numbers have room at `start` and nobody else refers to them for `'a`.
#[inline(always)]
pub(super) unsafe fn table<'a, T>(start: *mut T, len: usize) -> &'a mut [T] {
    // SAFETY: by the contract of the function; any bits are a number.
    unsafe { std::slice::from_raw_parts_mut(start, len) }
}

/// Vectors of columns of the register tiles for `n` columns: three unless two are more than 6 %
/// faster by the cycles of multiplication, as a tile of 8 rows and three vectors loads less for
/// each multiplication than one of 12 rows and two.
#[inline(always)]
fn vectors<V: Vector>(n: usize) -> usize {
    // Quarter cycles of 8 rows and one point of `k`. A narrower last panel is bound by broadcasts:
    // 9 loads for 8 multiplications of one vector, 10 for 16 of two.
    let cost = |vectors: usize| {
        let of_rest = [0, 20, 34][n.div_ceil(V::LANES) % vectors];
        n.div_ceil(V::LANES) / vectors * vectors * 16 + of_rest
    };
    if V::ROWS == 12 && cost(3) * 15 <= cost(2) * 16 { 3 } else { 2 }
}

/// Multiplies a block: packs its columns the `first` time, panel by panel, and its rows where many
/// panels of columns read them or they cannot be read in place.
#[inline(always)]
unsafe fn multiply<V: Vector, const C: usize>(
    block: &Block<V::Scalar>,
    panels: &Panels<V::Scalar>,
    first: bool,
    add: bool,
) {
    let (k, width) = (block.ak.len(), C * V::LANES);
    let count = block.cn.len().div_ceil(width);
    let in_place =
        count <= IN_PLACE && block.a.format == Format::Own && k > 0 && step(block.ak) == Some(1);
    // SAFETY: operands and panels hold the block, by the contract of the part.
    unsafe {
        if !in_place {
            pack_rows::<V>(block.a, block.am, block.ak, C, panels.a);
        }
        for (i, columns) in block.cn.chunks(width).enumerate() {
            let b = panels.b.add(i * width * k);
            let vectors = columns.len().div_ceil(V::LANES);
            if first {
                let width = vectors * V::LANES;
                let of_b = &block.bn[i * C * V::LANES..][..columns.len()];
                if block.frame.is_none() {
                    pack_columns::<V>(block.b, of_b, block.bk, width, b);
                } else {
                    block.frame.pack::<V>(block.b, i * C * V::LANES, of_b, block.bk, width, b);
                }
            }
            let rows = if in_place {
                let first = block.a.start::<V::Scalar>().wrapping_add(block.ak[0]);
                Left::InPlace { first, offsets: block.am }
            } else {
                Left::Packed(panels.a)
            };
            let panel = Panel { k, b, full: C, columns };
            match vectors {
                3 => panel.multiply::<V, 3>(block, rows, add),
                2 => panel.multiply::<V, 2>(block, rows, add),
                _ => panel.multiply::<V, 1>(block, rows, add),
            }
        }
    }
}

/// The rows of a block.
#[derive(Clone, Copy)]
enum Left<'a, S> {
    /// As panels.
    Packed(*const S),
    /// Where they are, contiguous along `k`: the first one, and the offset of each.
    InPlace { first: *const S, offsets: &'a [usize] },
}

/// A panel of columns.
struct Panel<'a, S> {
    k: usize,
    b: *const S,
    /// Vectors of a full panel, which decide the heights of tiles.
    full: usize,
    columns: &'a [usize],
}

impl<S: Scalar> Panel<'_, S> {
    /// Multiplies all rows of a block with a panel of `C` vectors.
    ///
    /// # Safety
    ///
    /// As [`multiply`].
    #[inline(always)]
    unsafe fn multiply<V: Vector<Scalar = S>, const C: usize>(
        &self,
        block: &Block<S>,
        left: Left<'_, S>,
        add: bool,
    ) {
        let &Panel { k, b, columns, .. } = self;
        let contiguous = step(columns) == Some(1);
        let mut done = 0;
        while done < block.cm.len() {
            let rows = height::<V>(self.full, block.cm.len() - done);
            let target =
                Target { c: block.c, rows: &block.cm[done..done + rows], columns, contiguous, add };
            macro_rules! tile {
                ($rows:expr) => {{
                    // SAFETY: by the contract of the function.
                    let (a, next, stride) = unsafe { left.tile::<$rows>(done, k) };
                    V::call(Tile::<_, $rows, C> { k, a, next, stride, b, target })
                }};
            }
            match rows {
                12 => tile!(12),
                8 => tile!(8),
                6 => tile!(6),
                4 => tile!(4),
                2 => tile!(2),
                _ => tile!(1),
            }
            done += rows;
        }
    }
}

impl<S: Scalar> Left<'_, S> {
    /// Where the rows of a tile start from row `done` on, those of the next one where they are not
    /// packed, and the stride along `k`.
    ///
    /// # Safety
    ///
    /// There are `R` rows.
    #[inline(always)]
    unsafe fn tile<const R: usize>(&self, done: usize, k: usize) -> Start<S, R> {
        match *self {
            Left::Packed(panel) => {
                let start = panel.wrapping_add(done * k);
                (std::array::from_fn(|i| start.wrapping_add(i)), None, R)
            }
            Left::InPlace { first, offsets } => {
                let row = |i: usize| first.wrapping_add(offsets[done + i]);
                let is_last = done + 2 * R > offsets.len();
                let next = (!is_last).then(|| std::array::from_fn(|i| row(R + i)));
                (std::array::from_fn(row), next, 1)
            }
        }
    }
}

/// See [`Left::tile`].
type Start<S, const R: usize> = ([*const S; R], Option<[*const S; R]>, usize);

/// Where a register tile goes.
struct Target<'a, S> {
    c: *mut S,
    rows: &'a [usize],
    columns: &'a [usize],
    contiguous: bool,
    add: bool,
}

/// A row of the widest tile.
type Lanes<S> = [S; 3 * MAX_LANES];

/// A register tile as a job.
struct Tile<'a, S, const R: usize, const C: usize> {
    k: usize,
    /// Each row, and the stride along `k`.
    a: [*const S; R],
    stride: usize,
    /// Rows that are read after these, from a slower cache.
    next: Option<[*const S; R]>,
    b: *const S,
    target: Target<'a, S>,
}

impl<S: Scalar, const R: usize, const C: usize> Job<S> for Tile<'_, S, R, C> {
    #[inline(always)]
    fn run<V: Vector<Scalar = S>>(self) {
        // SAFETY: whoever makes a tile gives panels of `k` steps and a target that holds it.
        unsafe { tile::<V, R, C>(self) }
    }
}

/// One register tile: `R` rows and `C` vectors of columns.
///
/// Its sums stay in registers only if the compiler knows every index into them and nothing takes
/// their address: hence loops with constant bounds, and a function of its own.
#[allow(clippy::needless_range_loop, reason = "constant bounds keep sums in registers")]
#[inline(always)]
unsafe fn tile<V: Vector, const R: usize, const C: usize>(tile: Tile<V::Scalar, R, C>) {
    let Tile { k, a, stride, next, b, target } = tile;
    let width = C * V::LANES;
    // SAFETY: the panels hold `k` steps, `c` all sums of the tables of rows and columns.
    unsafe {
        let first = target.c.wrapping_add(target.columns[0]);
        if target.contiguous {
            for &row in target.rows {
                for j in 0..C {
                    V::prefetch(first.wrapping_add(row + j * V::LANES));
                }
            }
        }
        let mut sums = [[V::splat(V::Scalar::ZERO); C]; R];
        let mut from = 0;
        while from < k {
            let to = if next.is_some() { k.min(from + MAX_LANES) } else { k };
            if let Some(next) = next {
                for i in 0..R {
                    V::prefetch(next[i].wrapping_add(from));
                }
            }
            for k in from..to {
                sums = multiply_add::<V, R, C>(&a, k * stride, b.add(k * width), sums);
            }
            from = to;
        }
        if target.contiguous && target.columns.len() == width {
            assert!(target.rows.len() == R);
            for i in 0..R {
                let start = first.add(target.rows[i]);
                for j in 0..C {
                    let at = start.add(j * V::LANES);
                    let sum = if target.add { V::load(at).add(sums[i][j]) } else { sums[i][j] };
                    sum.store(at);
                }
            }
        } else {
            let mut lanes = [[V::Scalar::ZERO; 3 * MAX_LANES]; R];
            for i in 0..R {
                for j in 0..C {
                    sums[i][j].store(lanes[i].as_mut_ptr().add(j * V::LANES));
                }
            }
            store_edge(&lanes, &target);
        }
    }
}

/// Adds one step of `k` to a tile.
#[allow(clippy::needless_range_loop, reason = "constant bounds keep sums in registers")]
#[inline(always)]
unsafe fn multiply_add<V: Vector, const R: usize, const C: usize>(
    a: &[*const V::Scalar; R],
    offset: usize,
    b: *const V::Scalar,
    mut sums: [[V; C]; R],
) -> [[V; C]; R] {
    // SAFETY: the panels hold a step of a tile.
    unsafe {
        let mut row = [V::splat(V::Scalar::ZERO); C];
        for j in 0..C {
            row[j] = V::load(b.add(j * V::LANES));
        }
        for i in 0..R {
            let x = V::splat(*a[i].add(offset));
            for j in 0..C {
                sums[i][j] = x.fma(row[j], sums[i][j]);
            }
        }
    }
    sums
}

/// Stores the numbers of a tile at the edge of the columns, or of one whose columns are strided.
#[inline(always)]
unsafe fn store_edge<S: Scalar, const R: usize>(lanes: &[Lanes<S>; R], target: &Target<S>) {
    for (lanes, &row) in lanes.iter().zip(target.rows) {
        for (&lane, &column) in lanes.iter().zip(target.columns) {
            // SAFETY: `c` holds all sums of the tables of rows and columns.
            unsafe {
                let element = target.c.add(row + column);
                *element = if target.add { *element + lane } else { lane };
            }
        }
    }
}
