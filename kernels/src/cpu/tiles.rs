//! Matrix products: packed panels and a register tile, as in BLIS (Van Zee, van de Geijn 2015).
//!
//! Loops of any strides become one product by tables: the address of `a[m, k]` is the sum of an
//! offset that depends on `m` and one that depends on `k`, and so for `b` and `c`. Packing reads
//! through the tables, so the register tile never sees a stride.
//!
//! An element of the result is one chain of fused multiply-adds per block of `k`, whichever tile
//! computes it. That, and not the choice of tiles, makes its bits independent of all other sizes.

use super::scratch::{Bump, lines_of};
use super::vector::{Job, Scalar, Vector};
use crate::kernel::Product;

/// Points of `k` per block.
const KC: usize = Product::K_BLOCK;
/// Rows per block: their panels stay in the second-level cache. A multiple of all tile heights.
const MC: usize = 120;
/// Columns per block: 1 MiB of panels in f32. A multiple of all tile widths.
const NC: usize = 1024;

/// Most rows for which reading `b` in place beats packing it.
pub(super) const THIN: usize = 4;

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
fn fill_offsets(loops: &[Loop], operand: usize, start: usize, offsets: &mut [usize]) {
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

/// The common difference of a table, if there is one.
#[inline(always)]
fn step(offsets: &[usize]) -> Option<usize> {
    let step = if offsets.len() < 2 { 1 } else { offsets[1].wrapping_sub(offsets[0]) };
    offsets.windows(2).all(|w| w[1].wrapping_sub(w[0]) == step).then_some(step)
}

/// Part of a product: the rows and columns that one task computes.
pub(super) struct Part<'a, S> {
    pub(super) nest: &'a Nest,
    pub(super) rows: [usize; 2],
    pub(super) columns: [usize; 2],
    pub(super) a: *const S,
    pub(super) b: *const S,
    pub(super) c: *mut S,
    pub(super) scratch: &'a mut Bump,
}

/// Bytes of scratch that a part of at most `m` × `n` × `k` points takes.
pub(super) fn scratch_bytes<S>(m: usize, n: usize, k: usize) -> usize {
    let (mc, nc, kc) = (m.min(MC), n.next_multiple_of(32).min(NC), k.min(KC));
    let tables = 2 * (lines_of::<usize>(mc) + lines_of::<usize>(nc) + lines_of::<usize>(kc));
    lines_of::<S>(mc * kc) + lines_of::<S>(nc * kc) + tables
}

impl<S: Scalar> Job<S> for Part<'_, S> {
    #[inline(always)]
    fn run<V: Vector<Scalar = S>>(self) {
        // SAFETY: whoever makes a part gives operands that hold all offsets of its loops, and
        // scratch of `scratch_bytes`.
        unsafe { part::<V>(self) }
    }
}

/// A block of a product and its tables of offsets.
pub(super) struct Block<'a, S> {
    pub(super) a: *const S,
    pub(super) b: *const S,
    pub(super) c: *mut S,
    pub(super) am: &'a [usize],
    pub(super) cm: &'a [usize],
    pub(super) ak: &'a [usize],
    pub(super) bk: &'a [usize],
    pub(super) bn: &'a [usize],
    pub(super) cn: &'a [usize],
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
}

/// # Safety
///
/// See [`Part`].
#[inline(always)]
unsafe fn part<V: Vector>(part: Part<V::Scalar>) {
    let width = 2 * V::LANES;
    let ([m0, m1], [n0, n1], k) = (part.rows, part.columns, points(&part.nest.k));
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
    };
    for n in (n0..n1).step_by(NC) {
        let n_len = NC.min(n1 - n);
        // SAFETY: the tables have room for a block each, and hold nothing yet.
        let (bn, cn) = unsafe { (table(panels.bn, n_len), table(panels.cn, n_len)) };
        fill_offsets(&part.nest.n, 1, n, bn);
        fill_offsets(&part.nest.n, 2, n, cn);
        for block in 0..k.div_ceil(KC).max(1) {
            let k_len = KC.min(k - block * KC);
            // SAFETY: as above.
            let (ak, bk) = unsafe { (table(panels.ak, k_len), table(panels.bk, k_len)) };
            fill_offsets(&part.nest.k, 0, block * KC, ak);
            fill_offsets(&part.nest.k, 1, block * KC, bk);
            let add = block > 0 || part.nest.accumulate;
            if m1 - m0 <= THIN && k_len >= THIN && step(bn) == Some(1) {
                // SAFETY: as above; the panels of `b` have room for `THIN` rows.
                unsafe {
                    let am = table(panels.am, m1 - m0);
                    let cm = table(panels.cm, m1 - m0);
                    fill_offsets(&part.nest.m, 0, m0, am);
                    fill_offsets(&part.nest.m, 2, m0, cm);
                    let block = Block { a: part.a, b: part.b, c: part.c, am, cm, ak, bk, bn, cn };
                    super::thin::multiply::<V>(&block, panels.b, add);
                }
                continue;
            }
            // SAFETY: operands and panels hold the block, by the contract of the part.
            unsafe { pack_columns::<V>(part.b, bn, bk, panels.b) };
            for m in (m0..m1).step_by(MC) {
                let m_len = MC.min(m1 - m);
                // SAFETY: as above.
                let (am, cm) = unsafe { (table(panels.am, m_len), table(panels.cm, m_len)) };
                fill_offsets(&part.nest.m, 0, m, am);
                fill_offsets(&part.nest.m, 2, m, cm);
                // SAFETY: as above.
                unsafe {
                    pack_rows::<V>(part.a, am, ak, panels.a);
                    multiply::<V>(&panels, k_len, part.c, cm, cn, add);
                }
            }
        }
    }
}

/// # Safety
///
/// `len` numbers have room at `start` and nobody else refers to them for `'a`.
#[inline(always)]
unsafe fn table<'a>(start: *mut usize, len: usize) -> &'a mut [usize] {
    // SAFETY: by the contract of the function; any bits are a number.
    unsafe { std::slice::from_raw_parts_mut(start, len) }
}

/// Height of the next register tile when `rows` are left.
#[inline(always)]
fn height<V: Vector>(rows: usize) -> usize {
    match rows {
        12.. if V::ROWS == 12 => 12,
        8.. if V::ROWS == 12 => 8,
        6.. if V::ROWS == 6 => 6,
        4.. => 4,
        2.. => 2,
        _ => 1,
    }
}

/// Packs columns of `b` into panels as wide as a register tile, padded with zeros.
#[inline(always)]
unsafe fn pack_columns<V: Vector>(
    b: *const V::Scalar,
    bn: &[usize],
    bk: &[usize],
    panel: *mut V::Scalar,
) {
    let width = 2 * V::LANES;
    for (i, columns) in bn.chunks(width).enumerate() {
        // SAFETY: panels follow each other in the room of a block.
        unsafe { pack::<V>(b, columns, bk, width, panel.add(i * width * bk.len())) };
    }
}

/// Packs rows of `a` into panels as tall as the register tiles that will read them.
#[inline(always)]
unsafe fn pack_rows<V: Vector>(
    a: *const V::Scalar,
    am: &[usize],
    ak: &[usize],
    panel: *mut V::Scalar,
) {
    let mut done = 0;
    while done < am.len() {
        let rows = height::<V>(am.len() - done);
        // SAFETY: panels follow each other in the room of a block.
        unsafe { pack::<V>(a, &am[done..done + rows], ak, rows, panel.add(done * ak.len())) };
        done += rows;
    }
}

/// Writes `panel[k, i] = source[wide[i] + deep[k]]`, and zeros for `i` past `wide.len()`.
#[inline(always)]
unsafe fn pack<V: Vector>(
    source: *const V::Scalar,
    wide: &[usize],
    deep: &[usize],
    width: usize,
    panel: *mut V::Scalar,
) {
    if wide.is_empty() || deep.is_empty() {
        return;
    }
    // SAFETY: the operand holds all sums of the two tables, the panel `deep.len() * width`.
    unsafe {
        if wide.len() < width {
            for k in 0..deep.len() {
                for i in wide.len()..width {
                    *panel.add(k * width + i) = V::Scalar::ZERO;
                }
            }
        }
        let wide_step = step(wide);
        if wide_step == Some(1) {
            let whole = wide.len() - wide.len() % V::LANES;
            let rest = wide.len() - whole;
            for (k, &offset) in deep.iter().enumerate() {
                let (row, target) = (source.add(offset + wide[0]), panel.add(k * width));
                for i in (0..whole).step_by(V::LANES) {
                    V::load(row.add(i)).store(target.add(i));
                }
                if rest > 0 {
                    let lanes = V::load_first(row.add(whole), rest, V::Scalar::ZERO);
                    lanes.store_first(target.add(whole), rest);
                }
            }
        } else if let (Some(stride), Some(1)) = (wide_step, step(deep)) {
            let start = source.add(wide[0] + deep[0]);
            pack_transposed::<V>(start, stride, [wide.len(), deep.len()], width, panel);
        } else {
            for (k, &offset) in deep.iter().enumerate() {
                for (i, &start) in wide.iter().enumerate() {
                    *panel.add(k * width + i) = *source.add(offset + start);
                }
            }
        }
    }
}

/// Writes `panel[k, i] = start[i * stride + k]`.
#[inline(always)]
unsafe fn pack_transposed<V: Vector>(
    start: *const V::Scalar,
    stride: usize,
    [wide, deep]: [usize; 2],
    width: usize,
    panel: *mut V::Scalar,
) {
    // SAFETY: by the contract of `pack`.
    unsafe {
        if wide < V::TILE || deep < V::TILE {
            for i in 0..wide {
                for k in 0..deep {
                    *panel.add(k * width + i) = *start.add(i * stride + k);
                }
            }
            return;
        }
        // The last square of a side overlaps the one before, rather than leave a remainder.
        for i in (0..wide).step_by(V::TILE) {
            let i = i.min(wide - V::TILE);
            for k in (0..deep).step_by(V::TILE) {
                let k = k.min(deep - V::TILE);
                if k % 16 == 0 {
                    // The rows after these: each is a stream too short for the hardware to learn.
                    for next in i + V::TILE..i + 2 * V::TILE {
                        V::prefetch(start.wrapping_add(next * stride + k));
                    }
                }
                let source = start.add(i * stride + k);
                V::transpose(source, stride, panel.add(k * width + i), width);
            }
        }
    }
}

/// Multiplies the packed panels of a block into `c`.
#[inline(always)]
unsafe fn multiply<V: Vector>(
    panels: &Panels<V::Scalar>,
    k: usize,
    c: *mut V::Scalar,
    cm: &[usize],
    cn: &[usize],
    add: bool,
) {
    let width = 2 * V::LANES;
    for (i, columns) in cn.chunks(width).enumerate() {
        let contiguous = columns.len() == width && step(columns) == Some(1);
        let mut done = 0;
        while done < cm.len() {
            let rows = height::<V>(cm.len() - done);
            // SAFETY: the panels were packed for just these rows and columns.
            unsafe {
                let a = panels.a.add(done * k);
                let b = panels.b.add(i * width * k);
                let target = Target { c, rows: &cm[done..done + rows], columns, contiguous, add };
                match rows {
                    12 => tile::<V, 12>(k, a, b, target),
                    8 => tile::<V, 8>(k, a, b, target),
                    6 => tile::<V, 6>(k, a, b, target),
                    4 => tile::<V, 4>(k, a, b, target),
                    2 => tile::<V, 2>(k, a, b, target),
                    _ => tile::<V, 1>(k, a, b, target),
                }
            }
            done += rows;
        }
    }
}

/// Where a register tile goes.
struct Target<'a, S> {
    c: *mut S,
    rows: &'a [usize],
    columns: &'a [usize],
    contiguous: bool,
    add: bool,
}

/// One register tile: `R` rows and two vectors of columns.
#[inline(always)]
unsafe fn tile<V: Vector, const R: usize>(
    k: usize,
    a: *const V::Scalar,
    b: *const V::Scalar,
    target: Target<V::Scalar>,
) {
    let mut sums = [[V::splat(V::Scalar::ZERO); 2]; R];
    for k in 0..k {
        // SAFETY: the panels hold `k` steps.
        unsafe {
            let row = b.add(k * 2 * V::LANES);
            let (b0, b1) = (V::load(row), V::load(row.add(V::LANES)));
            for (i, sum) in sums.iter_mut().enumerate() {
                let x = V::splat(*a.add(k * R + i));
                sum[0] = x.fma(b0, sum[0]);
                sum[1] = x.fma(b1, sum[1]);
            }
        }
    }
    for (sum, &row) in sums.iter().zip(target.rows) {
        // SAFETY: `c` holds all sums of the tables of rows and columns.
        unsafe {
            if target.contiguous {
                let start = target.c.add(row + target.columns[0]);
                let second = start.add(V::LANES);
                let [s0, s1] = if target.add {
                    [V::load(start).add(sum[0]), V::load(second).add(sum[1])]
                } else {
                    *sum
                };
                s0.store(start);
                s1.store(second);
            } else {
                scatter::<V>(sum, target.c.add(row), target.columns, target.add);
            }
        }
    }
}

/// Stores one row of a tile at the edge or with strided columns.
#[inline(always)]
unsafe fn scatter<V: Vector>(sum: &[V; 2], row: *mut V::Scalar, columns: &[usize], add: bool) {
    let mut lanes = [V::Scalar::ZERO; 2 * super::vector::MAX_LANES];
    // SAFETY: two vectors fit; by the contract of `tile`.
    unsafe {
        sum[0].store(lanes.as_mut_ptr());
        sum[1].store(lanes.as_mut_ptr().add(V::LANES));
        for (&lane, &column) in lanes.iter().zip(columns) {
            let element = row.add(column);
            *element = if add { *element + lane } else { lane };
        }
    }
}
