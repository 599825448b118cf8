//! Products of BF16 by instructions that multiply pairs: tiles of AMX, or AVX512-BF16.
//!
//! Blocks as in [`super::tiles`], but columns are packed once for all rows: of a block of them all
//! points of `k`, or as many as there is room for. An element starts as zero or the old value, and
//! each step of `k` is added to it in ascending order, so that it does not matter where `k` is cut.

#[cfg(not(target_arch = "x86_64"))]
mod absent;
#[cfg(target_arch = "x86_64")]
pub(super) mod amx;
#[cfg(target_arch = "x86_64")]
mod dot;
#[cfg(target_arch = "x86_64")]
mod panels;

#[cfg(not(target_arch = "x86_64"))]
use absent::{amx, dot, panels};

use ir::DType;

use super::blocked::Block;
use super::extent::step;
use super::formats::Format;
use super::frame::Frame;
use super::scratch::{Bump, lines_of};
use super::tiles::{Finish, Part, fill_offsets, points, table};
use super::vector::{Job, Pairs, Scalar, Vector};
use crate::kernel::Product;
use panels::{DEPTH, Side, tiles};

/// Points of `k` of a block. Chosen: more of them do not leave panels in a first-level cache, with
/// fewer of them sums are loaded and stored more often.
const KC: usize = 384;
/// Rows of a block: their panels of 192 KiB stay in a second-level cache.
const MC: usize = 256;
/// Most columns of a block: sums of as many rows take 1 MiB.
const NC: usize = 960;
/// Points of `k` of which the columns of a block are packed at once.
const DEEP: usize = 4096;
/// Numbers of columns that are packed at once: 4 MiB.
const PACKED: usize = 2 << 20;
/// Rows whose sums are kept while blocks of `k` are added to them, where columns are packed again
/// after these.
const STRIP: usize = 512;
/// Rows, and columns, of a register tile.
const SIDE: usize = 2 * panels::SIDE;

/// Whether a product is one of pairs, on machines that have an instruction for it.
pub(super) fn fits(p: &Product) -> bool {
    let stored = [p.stored.a, p.stored.b];
    let [_, _, _, k] = p.sizes();
    p.dtype == DType::F32 && stored == [DType::BF16; 2] && p.borders.is_empty() && k > 0
}

/// The sizes of blocks of a part.
#[derive(Clone, Copy)]
struct Sizes {
    /// Points of `k` of a block, a whole number of steps.
    kc: usize,
    /// Points of `k` that are packed at once, a whole number of blocks.
    deep: usize,
    /// Columns of a block.
    nc: usize,
    /// Whether columns of all points are packed at once.
    is_whole: bool,
}

impl Sizes {
    fn new(k: usize) -> Sizes {
        let count = k.div_ceil(KC).max(1);
        let kc = k.div_ceil(count).next_multiple_of(DEPTH);
        let blocks = k.div_ceil(kc).max(1);
        let deep = kc * blocks.min(DEEP / kc);
        let nc = (PACKED / deep / SIDE * SIDE).min(NC);
        Sizes { kc, deep, nc, is_whole: deep >= k }
    }

    /// Rows of which sums are complete before those of others begin.
    fn strip(self) -> usize {
        if self.is_whole { MC } else { STRIP }
    }
}

/// Bytes of scratch that a part of at most `m` × `n` and of `k` points takes.
pub(super) fn scratch_bytes([m, n, k]: [usize; 3]) -> usize {
    bytes_of([m, n], Sizes::new(k))
}

/// Bytes of scratch that a part of at most `m` × `n` and of any number of points up to `k` takes.
pub(super) fn most_scratch_bytes([m, n, k]: [usize; 3]) -> usize {
    // Blocks, and what is packed at once, are no longer than points and a block fill up.
    let (kc, deep) = (k.next_multiple_of(DEPTH).min(KC), (k + KC).min(DEEP));
    bytes_of([m, n], Sizes { kc, deep, nc: NC, is_whole: false })
}

fn bytes_of([m, n]: [usize; 2], sizes: Sizes) -> usize {
    let (mc, nc) = (m.min(MC), n.min(sizes.nc));
    let [wide_m, wide_n] = [mc, nc].map(|size| size.next_multiple_of(SIDE));
    let offsets = [mc, mc, nc, nc, sizes.kc, sizes.kc, mc, nc];
    lines_of::<u16>(wide_m * sizes.kc)
        + lines_of::<u16>(wide_n * sizes.deep)
        + lines_of::<f32>(m.min(sizes.strip()).next_multiple_of(SIDE) * wide_n)
        + lines_of::<f32>(SIDE * SIDE)
        + offsets.map(lines_of::<usize>).iter().sum::<usize>()
}

/// A part of a product of pairs.
pub(super) struct PairedPart<'a, S> {
    pub(super) part: Part<'a, S>,
    pub(super) by: Pairs,
}

impl<S: Scalar> Job<S> for PairedPart<'_, S> {
    #[inline(always)]
    fn run<V: Vector<Scalar = S>>(self) {
        assert!(size_of::<S>() == 4, "sums are of F32");
        // SAFETY: whoever makes a part gives operands that hold all offsets of its loops, scratch
        // of `scratch_bytes`, and a way of multiplying that the machine has.
        unsafe { part::<V>(self.part, self.by) }
    }
}

/// The instruction that multiplies, ready on this thread.
enum Multiplier {
    Dot,
    Tiles(amx::Tiles),
}

impl Multiplier {
    /// # Safety
    ///
    /// The machine has it.
    unsafe fn new(by: Pairs) -> Multiplier {
        match by {
            Pairs::Dot => Multiplier::Dot,
            // SAFETY: by the contract of the function.
            Pairs::Tiles => Multiplier::Tiles(unsafe { amx::Tiles::lay_out() }),
        }
    }

    /// # Safety
    ///
    /// As [`amx::Tiles::multiply`].
    #[inline(always)]
    unsafe fn multiply(
        &self,
        tiles: [usize; 2],
        steps: usize,
        panels: [*const u16; 2],
        c: *mut f32,
        row_bytes: usize,
        add: bool,
    ) {
        let panels = panels.map(|panel| panel.cast());
        // SAFETY: by the contract of the function.
        unsafe {
            match self {
                Multiplier::Dot => dot::multiply(tiles, steps, panels, c, row_bytes, add),
                Multiplier::Tiles(laid) => laid.multiply(tiles, steps, panels, c, row_bytes, add),
            }
        }
    }
}

/// Tables and panels of one task.
struct Room<S> {
    a: *mut u16,
    b: *mut u16,
    /// Offsets in `a`, `b` and `c` of a block of rows, of columns, and of points of `k`.
    rows: [*mut usize; 2],
    columns: [*mut usize; 2],
    deep: [*mut usize; 2],
    /// A register tile.
    edge: *mut f32,
    /// Sums of a result that is rounded.
    apart: Option<*mut S>,
}

impl<S> Room<S> {
    fn take(part: &mut Part<S>, sizes: Sizes) -> Room<S> {
        let ([m0, m1], [n0, n1]) = (part.rows, part.columns);
        let (mc, nc) = ((m1 - m0).min(MC), (n1 - n0).min(sizes.nc));
        let [wide_m, wide_n] = [mc, nc].map(|size| size.next_multiple_of(SIDE));
        let strip = (m1 - m0).min(sizes.strip()).next_multiple_of(SIDE);
        let scratch: &mut Bump = part.scratch;
        Room {
            a: scratch.take(wide_m * sizes.kc),
            b: scratch.take(wide_n * sizes.deep),
            rows: [scratch.take(mc), scratch.take(mc)],
            columns: [scratch.take(nc), scratch.take(nc)],
            deep: [scratch.take(sizes.kc), scratch.take(sizes.kc)],
            edge: scratch.take(SIDE * SIDE),
            apart: part.rounded.map(|_| scratch.take(strip * wide_n)),
        }
    }
}

/// # Safety
///
/// See [`Part`] and [`PairedPart`].
#[inline(always)]
unsafe fn part<V: Vector>(mut part: Part<V::Scalar>, by: Pairs) {
    let ([m0, m1], [n0, n1], k) = (part.rows, part.columns, points(&part.nest.k));
    let sizes = Sizes::new(k);
    let room = Room::take(&mut part, sizes);
    let (mc, nc) = ((m1 - m0).min(MC), (n1 - n0).min(sizes.nc));
    let tables = part.rounded.map(|_| [part.scratch.take(mc), part.scratch.take(nc)]);
    let mut finish = Finish::<V>::new(&mut part, tables);
    // SAFETY: by the contract of the function.
    let multiplier = unsafe { Multiplier::new(by) };
    // Blocks of about the same size, of whole tiles.
    let count = (n1 - n0).div_ceil(sizes.nc).max(1);
    let most = (n1 - n0).div_ceil(count).next_multiple_of(SIDE).min(sizes.nc);
    for n in (n0..n1).step_by(most) {
        let n_len = most.min(n1 - n);
        // SAFETY: the tables have room for a block each, and hold nothing yet.
        let [bn, cn] = room.columns.map(|start| unsafe { table(start, n_len) });
        fill_offsets(&part.nest.n, 1, n, bn);
        if room.apart.is_none() {
            fill_offsets(&part.nest.n, 2, n, cn);
        } else {
            // A panel of columns after the other, so that a register tile lies in one page.
            let panel = (m1 - m0).min(sizes.strip()).next_multiple_of(SIDE) * SIDE;
            let offset = |i: usize| i / SIDE * panel + i % SIDE;
            cn.iter_mut().enumerate().for_each(|(i, at)| *at = offset(i));
        }
        for m in (m0..m1).step_by(sizes.strip()) {
            let rows = [m, m1.min(m + sizes.strip())];
            for first in (0..k).step_by(sizes.deep) {
                let deep = [first, k.min(first + sizes.deep)];
                let columns = Columns { bn, cn, first: n, pack: m == m0 || !sizes.is_whole };
                let finish = if deep[1] == k { Some(&mut finish) } else { None };
                // SAFETY: operands and room hold the blocks, by the contract of the part.
                unsafe { strip::<V>(&part, &room, &multiplier, columns, rows, deep, finish) };
            }
        }
    }
}

/// A block of columns, and whether it is still to be packed.
#[derive(Clone, Copy)]
struct Columns<'a> {
    bn: &'a [usize],
    cn: &'a [usize],
    first: usize,
    pack: bool,
}

/// Multiplies some rows with a block of columns over points of `k` that are packed at once.
///
/// # Safety
///
/// Operands and room hold all of them.
#[inline(always)]
unsafe fn strip<V: Vector>(
    part: &Part<V::Scalar>,
    room: &Room<V::Scalar>,
    multiplier: &Multiplier,
    columns: Columns<'_>,
    [m0, m1]: [usize; 2],
    [k0, k1]: [usize; 2],
    mut finish: Option<&mut Finish<'_, V>>,
) {
    let Columns { bn, cn, first, pack } = columns;
    let kc = Sizes::new(points(&part.nest.k)).kc;
    let wide = bn.len().next_multiple_of(SIDE);
    let (c, row) = (room.apart.unwrap_or(part.c), room.apart.map(|_| SIDE));
    // Blocks of about the same size, of whole tiles.
    let count = (m1 - m0).div_ceil(MC).max(1);
    let most = (m1 - m0).div_ceil(count).next_multiple_of(SIDE).min(MC);
    for k in (k0..k1).step_by(kc) {
        let k_len = kc.min(k1 - k);
        // SAFETY: the tables have room for a block each.
        let [ak, bk] = room.deep.map(|start| unsafe { table(start, k_len) });
        fill_offsets(&part.nest.k, 0, k, ak);
        fill_offsets(&part.nest.k, 1, k, bk);
        let b = room.b.wrapping_add((k - k0) * wide);
        for m in (m0..m1).step_by(most) {
            let m_len = most.min(m1 - m);
            // SAFETY: as above.
            let [am, cm] = room.rows.map(|start| unsafe { table(start, m_len) });
            fill_offsets(&part.nest.m, 0, m, am);
            match row {
                None => fill_offsets(&part.nest.m, 2, m, cm),
                Some(row) => {
                    let offset = |i: usize| (m - m0 + i) * row;
                    cm.iter_mut().enumerate().for_each(|(i, at)| *at = offset(i));
                }
            }
            let frame = Frame::new(&[], &[], &[]);
            let block = Block { a: part.a, b: part.b, c, am, cm, ak, bk, bn, cn, frame };
            let add = k > 0 || part.nest.accumulate;
            let place = Place { b, pack: pack && m == m0, add, row };
            // SAFETY: by the contract of the function.
            unsafe {
                multiply(&block, room, multiplier, place);
                if let Some(finish) = finish.as_mut().filter(|_| k + k_len == k1) {
                    finish.finish(&block, m, first);
                }
            }
        }
    }
}

/// How a block is multiplied.
#[derive(Clone, Copy)]
struct Place {
    /// Its columns, packed.
    b: *mut u16,
    /// Whether they are still to be packed.
    pack: bool,
    /// Whether the products are added to what is there.
    add: bool,
    /// From row to row of a result that has room for whole tiles.
    row: Option<usize>,
}

/// Multiplies a block: packs its rows, and its columns panel by panel.
///
/// # Safety
///
/// Operands and room hold the block.
unsafe fn multiply<S>(block: &Block<S>, room: &Room<S>, multiplier: &Multiplier, place: Place) {
    debug_assert!(block.a.format == Format::BF16 && block.b.format == Format::BF16);
    let (k, steps) = (block.ak.len(), block.ak.len().div_ceil(DEPTH));
    let deep = k.next_multiple_of(DEPTH);
    // SAFETY: by the contract of the function; panels follow each other in their room.
    unsafe {
        for (i, rows) in block.am.chunks(SIDE).enumerate() {
            let panel = room.a.add(i * SIDE * deep);
            panels::pack(Side::Rows, block.a.start(), rows, block.ak, panel);
        }
        for (j, columns) in block.bn.chunks(SIDE).enumerate() {
            let b = place.b.add(j * SIDE * deep);
            if place.pack {
                panels::pack(Side::Columns, block.b.start(), columns, block.bk, b);
            }
            let columns = &block.cn[j * SIDE..][..columns.len()];
            let are_contiguous = step(columns) == Some(1);
            for (i, rows) in block.cm.chunks(SIDE).enumerate() {
                let a = room.a.add(i * SIDE * deep);
                let sizes = [tiles(rows.len()), tiles(columns.len())];
                let [high, broad] = sizes.map(|tiles| tiles * panels::SIDE);
                let is_whole = [rows.len(), columns.len()] == [high, broad];
                let in_result = || if is_whole && are_contiguous { step(rows) } else { None };
                let panels = [a.cast_const(), b.cast_const()];
                if let Some(row) = place.row.or_else(in_result) {
                    let c = block.c.add(rows[0] + columns[0]).cast::<f32>();
                    multiplier.multiply(sizes, steps, panels, c, 4 * row, place.add);
                    continue;
                }
                let edge = Edge { c: block.c.cast(), tile: room.edge, rows, columns };
                if place.add {
                    edge.load();
                }
                multiplier.multiply(sizes, steps, panels, room.edge, 4 * SIDE, place.add);
                edge.store();
            }
        }
    }
}

/// A register tile at the edge of a result, or of one whose elements are strided.
struct Edge<'a> {
    c: *mut f32,
    tile: *mut f32,
    rows: &'a [usize],
    columns: &'a [usize],
}

impl Edge<'_> {
    /// # Safety
    ///
    /// `c` holds all sums of rows and columns, the tile a register tile.
    unsafe fn load(&self) {
        for (i, row) in self.rows.iter().enumerate() {
            for (j, column) in self.columns.iter().enumerate() {
                // SAFETY: by the contract of the function.
                unsafe { *self.tile.add(i * SIDE + j) = *self.c.add(row + column) };
            }
        }
    }

    /// # Safety
    ///
    /// As [`Edge::load`].
    unsafe fn store(&self) {
        for (i, row) in self.rows.iter().enumerate() {
            for (j, column) in self.columns.iter().enumerate() {
                // SAFETY: by the contract of the function.
                unsafe { *self.c.add(row + column) = *self.tile.add(i * SIDE + j) };
            }
        }
    }
}
