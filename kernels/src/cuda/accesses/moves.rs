//! Accesses of what moves elements.

use ir::DType;

use super::{Accesses, Blocks, LANES, SECTOR, Site, Sites, Warp, nested, relative};
use crate::cuda::moves::{Move, RowCopy, THREADS};
use crate::cuda::transpose::{self, Transposition};
use crate::kernel::{Copy, CopyLoop, Positions, Rope};
use crate::offset::Offset;

/// Where a thread's element or vector is, by its number: the accesses of one thread.
type Threads<'a> = Box<dyn Fn(usize, usize, &mut Warp) + 'a>;

/// Accesses of one thread per element or vector; none where values decide.
pub(super) fn elements(tile: &Move, grid: u64) -> Option<Accesses> {
    let thread = match tile {
        Move::Fill { dtype, .. } => fill(*dtype),
        Move::Copy(c) => copy(c)?,
        Move::CopyRows(c) => copy_rows(c)?,
        Move::Rope(r) => rope(r),
        Move::Transpose(_)
        | Move::Place(_)
        | Move::Take(_)
        | Move::Gather(_)
        | Move::Links(_)
        | Move::Scatter(_)
        | Move::Replace(_) => return None,
    };
    let count = tile.elements();
    let mut blocks = Blocks::new();
    for block in 0..grid as usize {
        let threads = block * THREADS as usize..((block + 1) * THREADS as usize).min(count);
        // Warps that access a few addresses, as those of other blocks do, are known by these.
        blocks.count(key(tile, threads.start, threads.len()), 1, |warp| {
            for (number, at) in threads.enumerate() {
                if number % LANES == 0 {
                    warp.end();
                }
                thread(at, number % LANES, warp);
            }
            warp.end();
        })?;
    }
    Some(blocks.count)
}

/// What the counts of a block depend on: the number of its threads, and where they are. Blocks of a
/// fill are alike; others where the elements behind them are the same in each loop.
fn key(tile: &Move, first: usize, count: usize) -> Vec<u64> {
    let (loops, c) = match tile {
        Move::Fill { .. } => return vec![count as u64],
        Move::Copy(c) => (c.loops.clone(), c),
        Move::CopyRows(rows) => (rows.loops_of_vectors(), &rows.copy),
        Move::Rope(r) => return key_of_rope(r, first, count),
        Move::Transpose(_)
        | Move::Place(_)
        | Move::Take(_)
        | Move::Gather(_)
        | Move::Links(_)
        | Move::Scatter(_)
        | Move::Replace(_) => return vec![first as u64],
    };
    // Along the outermost loops nothing but the start changes.
    let mut inside: usize = loops.iter().map(|l| l.size.max(1)).product();
    let mut key = vec![count as u64];
    let (mut rest, mut from, mut to) = (first, 0, 0);
    let mut is_inner = false;
    for l in &loops {
        inside /= l.size.max(1);
        let coordinate = rest / inside;
        rest %= inside;
        // A loop that the block stays within one point of.
        is_inner = is_inner || rest + count > inside;
        if is_inner {
            key.push(coordinate as u64);
        } else {
            from += coordinate * l.source;
            to += coordinate * l.target;
        }
    }
    key.extend([from, to].map(|at| at as u64 * c.dtype.size() % SECTOR));
    key
}

fn key_of_rope(r: &Rope, first: usize, count: usize) -> Vec<u64> {
    let half = r.dim / 2;
    let tokens = first / half..=(first + count - 1) / half;
    let mut key = vec![count as u64, (first % half) as u64, (4 * tokens.start()) as u64 % SECTOR];
    for [b, s, _] in [r.x, r.y] {
        let at = |token: usize| (token / r.seq * b + token % r.seq * s) as u64 * r.dtype.size();
        relative(&mut key, tokens.clone().map(at));
    }
    key
}

fn fill(dtype: DType) -> Threads<'static> {
    let bytes = dtype.size() as usize;
    let site = Sites::default().device(bytes);
    Box::new(move |at, lane, warp| warp.access(site, lane, (at * bytes) as u64))
}

/// The first element that a copy reads; none where the launch says.
fn start(c: &Copy) -> Option<u64> {
    match c.source_offset {
        Offset::Fixed(offset) => Some(offset.unsigned_abs()),
        Offset::Scalar { .. } => None,
    }
}

fn side(loops: &[CopyLoop], stride: fn(&CopyLoop) -> usize) -> Vec<[usize; 2]> {
    loops.iter().map(|l| [l.size, stride(l)]).collect()
}

fn copy(c: &Copy) -> Option<Threads<'_>> {
    let (start, bytes, mut sites) = (start(c)?, c.dtype.size(), Sites::default());
    let [load, store] = [0; 2].map(|_| sites.device(bytes as usize));
    let (source, target) = (side(&c.loops, |l| l.source), side(&c.loops, |l| l.target));
    Some(Box::new(move |at, lane, warp| {
        warp.access(load, lane, (start + nested(&source, at)) * bytes);
        warp.access(store, lane, (c.target_offset as u64 + nested(&target, at)) * bytes);
    }))
}

fn copy_rows(rows: &RowCopy) -> Option<Threads<'_>> {
    let RowCopy { copy: c, width, is_aligned } = rows;
    let (start, bytes, mut sites) = (start(c)?, c.dtype.size(), Sites::default());
    let [whole, tail] = [0; 2].map(|_| {
        let of = |is_aligned: bool| if is_aligned { *width } else { 1 };
        is_aligned.map(|is_aligned| (sites.device(of(is_aligned) * bytes as usize), is_aligned))
    });
    let tail = tail.map(|(site, _)| (Site { bytes, ..site }, false));
    let outer = &c.loops[..c.loops.len() - 1];
    let (source, target) = (side(outer, |l| l.source), side(outer, |l| l.target));
    let row = c.loops.last()?.size;
    let parts = row.div_ceil(*width);
    Some(Box::new(move |at, lane, warp| {
        let (number, first) = (at / parts, at % parts * width);
        let from = start + nested(&source, number) + first as u64;
        let to = c.target_offset as u64 + nested(&target, number) + first as u64;
        let (sites, count) = match first + width > row {
            true => (tail, row % width),
            false => (whole, *width),
        };
        for ((site, is_vector), at) in sites.into_iter().zip([from, to]) {
            let count = if is_vector { 1 } else { count as u64 };
            (0..count).for_each(|e| warp.access(site, lane, (at + e) * bytes));
        }
    }))
}

fn rope(r: &Rope) -> Threads<'_> {
    let (bytes, half, mut sites) = (r.dtype.size(), r.dim / 2, Sites::default());
    let positions = sites.device(4);
    let [low, high, to_low, to_high] = [0; 4].map(|_| sites.device(bytes as usize));
    Box::new(move |at, lane, warp| {
        let (i, token) = (at % half, at / half);
        let (b, s) = (token / r.seq, token % r.seq);
        match r.positions {
            Positions::From(_) => {}
            Positions::FromInput(_) => warp.access(positions, lane, 0),
            Positions::FromInputs(_) => warp.access(positions, lane, 4 * b as u64),
            Positions::Table => warp.access(positions, lane, 4 * token as u64),
        }
        for h in 0..r.heads {
            let place = |[of_b, of_s, of_h]: [usize; 3]| b * of_b + s * of_s + h * of_h + i;
            let [from, to] = [r.x, r.y].map(|strides| place(strides) as u64);
            let half = half as u64;
            warp.access(low, lane, from * bytes);
            warp.access(high, lane, (from + half) * bytes);
            warp.access(to_low, lane, to * bytes);
            warp.access(to_high, lane, (to + half) * bytes);
        }
    })
}

/// Accesses of a copy by tiles through shared memory.
pub(super) fn transpose(tile: &Transposition, grid: u64) -> Option<Accesses> {
    let start = start(&tile.copy)?;
    let (outer, [in_target, in_source]) = tile.loops();
    let [width, side_len] = tile.sizes();
    let bytes = tile.copy.dtype.size();
    let [down, across] = [in_target.size, in_source.size].map(|size| size.div_ceil(side_len));
    let (source, target) = (side(outer, |l| l.source), side(outer, |l| l.target));
    let mut blocks = Blocks::new();
    for block in 0..grid as usize {
        let number = block / (down * across);
        let [row, column] = [block / across % down, block % across].map(|at| at * side_len);
        let from = start + nested(&source, number) + (row * in_target.source + column) as u64;
        let to = tile.copy.target_offset as u64
            + nested(&target, number)
            + (column * in_source.target + row) as u64;
        let rows = (in_target.size - row).min(side_len);
        let columns = (in_source.size - column).min(side_len);
        let mut key = vec![rows as u64, columns as u64];
        key.extend([from, to].map(|at| at * bytes % SECTOR));
        let of = TransposedTile { tile, width, sizes: [rows, columns], from, to };
        blocks.count(key, 1, |warp| of.list(warp))?;
    }
    Some(blocks.count)
}

/// A tile of a transposition.
struct TransposedTile<'a> {
    tile: &'a Transposition,
    width: usize,
    /// Rows and columns that there are.
    sizes: [usize; 2],
    /// The first element in the source and in the target.
    from: u64,
    to: u64,
}

impl TransposedTile<'_> {
    fn list(&self, warp: &mut Warp) {
        let ([width, side], threads) = (self.tile.sizes(), transpose::THREADS as usize);
        let (vectors, bytes) = (side / width, self.tile.copy.dtype.size());
        let (_, [in_target, in_source]) = self.tile.loops();
        let [rows, columns] = self.sizes;
        let mut sites = Sites::default();
        let mut of = |is_aligned: bool| {
            let whole = if is_aligned { width } else { 1 };
            [sites.device(whole * bytes as usize), sites.device(bytes as usize)]
        };
        let [load, store] = self.tile.is_aligned.map(&mut of);
        let (fill, read) = (sites.shared(16), sites.shared(bytes as usize));
        for first in (0..threads).step_by(LANES) {
            for lane in 0..LANES {
                for i in (first + lane..side * vectors).step_by(threads) {
                    let (row, vector) = (i / vectors, i % vectors);
                    let at = self.from + (row * in_target.source + vector * width) as u64;
                    if row < rows && vector * width < columns {
                        let end = [vector * width, columns];
                        self.access(warp, lane, load, (at, self.tile.is_aligned[0], end));
                    }
                    let swizzled = (vector ^ (row / width)) * width;
                    warp.access(fill, lane, (row * side + swizzled) as u64 * bytes);
                }
                for i in (first + lane..side * vectors).step_by(threads) {
                    let (column, vector) = (i / vectors, i % vectors);
                    if column >= columns || vector * width >= rows {
                        continue;
                    }
                    let swizzled = ((column / width) ^ vector) * width + column % width;
                    for e in 0..width {
                        let at = (vector * width + e) * side + swizzled;
                        warp.access(read, lane, at as u64 * bytes);
                    }
                    let at = self.to + (column * in_source.target + vector * width) as u64;
                    let end = [vector * width, rows];
                    self.access(warp, lane, store, (at, self.tile.is_aligned[1], end));
                }
            }
            warp.end();
        }
    }

    /// A vector from an element on, of which what lies before the end of a row is accessed: whole,
    /// or element by element.
    fn access(
        &self,
        warp: &mut Warp,
        lane: usize,
        [whole, single]: [Site; 2],
        (at, is_aligned, [first, end]): (u64, bool, [usize; 2]),
    ) {
        let bytes = self.tile.copy.dtype.size();
        if is_aligned && first + self.width <= end {
            return warp.access(whole, lane, at * bytes);
        }
        let site = if is_aligned { single } else { whole };
        let count = self.width.min(end - first) as u64;
        (0..count).for_each(|e| warp.access(site, lane, (at + e) * bytes));
    }
}
