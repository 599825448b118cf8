//! Planes: the part of an image that a block of a convolution reads, copied once with its zeros.
//!
//! In such a copy an element is the sum of an offset of its column and one of its point of `k`, as
//! in any product: what is packed of it needs no borders, and a product of few rows packs nothing.
//! Where columns stand `stride` positions apart, a line of a plane is cut into as many phases, so
//! that neighbouring columns are neighbouring elements.

use std::ops::Range;

use super::blocked::Block;
use super::extent::THIN;
use super::formats::Format;
use super::frame::{copy_within, spread_within, within, zeros};
use super::scratch::{Bump, lines_of};
use super::vector::{MAX_LANES, Scalar, Vector};
use crate::border::Border;
use crate::kernel::Product;

/// Most elements of the planes of a block: half of a second-level cache in f32.
const ELEMENTS: usize = 1 << 18;

/// Vectors of columns that a product of few rows computes at a time.
const PIECES: usize = 4;

/// One dim of planes: a border, and the sizes of its loops.
#[derive(Clone, Copy, Debug)]
struct Side {
    columns: usize,
    points: usize,
    border: Border,
}

impl Side {
    /// No dim: one column and one point that read the one element.
    const NONE: Side = Side {
        columns: 1,
        points: 1,
        border: Border {
            n: 0,
            k: 0,
            stride: 1,
            dilation: 1,
            before: 0,
            spread: 1,
            size: 1,
            step: 0,
        },
    };

    /// Positions that the points of one column read lie among so many.
    fn reach(&self) -> usize {
        (self.points - 1) * self.border.dilation + 1
    }
}

/// A product whose last loops of `n` and of `k` are those of borders.
#[derive(Clone, Debug)]
pub(super) struct Planes {
    /// Sizes and strides in `b` of the other loops.
    n: Vec<[usize; 2]>,
    k: Vec<[usize; 2]>,
    y: Side,
    x: Side,
    /// Columns of one image.
    image: usize,
    /// Points of `k` of one channel.
    taps: usize,
    /// Elements of one phase of a line, and of a line.
    phase: usize,
    pitch: usize,
    /// Elements of the planes of a block, at most.
    most: usize,
}

/// The columns of a block: which lines of which planes they read.
#[derive(Clone, Copy)]
struct Lines {
    /// The first column and the one after the last, counted in lines of the result.
    first: usize,
    last: usize,
    /// Elements of the lines that one point of the outer loops of `k` reads.
    elements: usize,
}

impl Planes {
    /// The planes of a product, if it has such loops and the planes of a block are small.
    pub(super) fn new(p: &Product, block: [usize; 2]) -> Option<Planes> {
        let (n, k) = (p.n.len(), p.k.len());
        let side = |border: &Border| Side {
            columns: p.n[border.n].size,
            points: p.k[border.k].size,
            border: *border,
        };
        let is_last = |border: &&Border| border.n + 1 == n && border.k + 1 == k;
        let is_before = |border: &&Border| border.n + 2 == n && border.k + 2 == k;
        let x = side(p.borders.iter().find(is_last)?);
        let y = p.borders.iter().find(is_before).map_or(Side::NONE, side);
        let sides = p.borders.len();
        let is_all = sides == 1 || sides == 2 && p.borders.iter().any(|b| is_before(&b));
        let is_plain = x.border.step == 1 && p.borders.iter().all(|b| b.spread == 1);
        let is_empty = p.sizes().contains(&0);
        let is_own = p.dtype.is_float() && Format::of(p.stored.b) == Format::Own;
        if !is_all || !is_plain || is_empty || !is_own {
            return None;
        }
        let stride = x.border.stride;
        let phase = ((x.columns - 1) * stride + x.reach()).div_ceil(stride);
        let mut planes = Planes {
            n: p.n[..n - sides].iter().map(|l| [l.size, l.b]).filter(|l| l[0] != 1).collect(),
            k: p.k[..k - sides].iter().map(|l| [l.size, l.b]).filter(|l| l[0] != 1).collect(),
            y,
            x,
            image: y.columns * x.columns,
            taps: y.points * x.points,
            phase,
            pitch: phase.checked_mul(stride)?,
            most: 0,
        };
        planes.most = planes.elements(block)?;
        (planes.most <= ELEMENTS).then_some(planes)
    }

    /// Elements of the planes of a block of at most so many columns and points of `k`, at most.
    fn elements(&self, [columns, points]: [usize; 2]) -> Option<usize> {
        let all = |loops: &[[usize; 2]]| loops.iter().map(|[size, _]| size).product::<usize>();
        let images = all(&self.n).min((columns - 1) / self.image + 2);
        let lines = (all(&self.n) * self.y.columns).min((columns - 1) / self.x.columns + 2);
        let channels = all(&self.k).min((points - 1) / self.taps + 2);
        let positions = lines.checked_mul(self.y.border.stride)?;
        let positions = positions.checked_add(images.checked_mul(self.y.reach())?)?;
        positions.checked_mul(self.pitch)?.checked_mul(channels)
    }

    /// Bytes of scratch for the planes of a block.
    pub(super) fn bytes<S>(&self) -> usize {
        lines_of::<S>(self.most + PIECES * MAX_LANES)
    }

    /// Takes the room for that.
    pub(super) fn take<S>(&self, scratch: &mut Bump) -> *mut S {
        scratch.take(self.most + PIECES * MAX_LANES)
    }

    /// The lines of an image that columns `lines` of the result read, by their number among all.
    fn rows(&self, image: usize, lines: Lines) -> (usize, usize) {
        let first = lines.first.saturating_sub(image * self.y.columns);
        let last = (lines.last - image * self.y.columns).min(self.y.columns);
        (first, (last - first - 1) * self.y.border.stride + self.y.reach())
    }

    /// Images of which a block has columns.
    fn images(&self, lines: Lines) -> Range<usize> {
        if self.n.is_empty() {
            return 0..1;
        }
        lines.first / self.y.columns..(lines.last - 1) / self.y.columns + 1
    }

    /// The lines of the columns from `n` on.
    fn lines(&self, n: usize, len: usize) -> Lines {
        let (first, last) = (n / self.x.columns, (n + len).div_ceil(self.x.columns));
        let lines = Lines { first, last, elements: 0 };
        let rows = self.images(lines).map(|image| self.rows(image, lines).1).sum::<usize>();
        Lines { elements: rows * self.pitch, ..lines }
    }

    /// The offsets in planes of the columns from `n` on.
    pub(super) fn fill_n(&self, n: usize, offsets: &mut [usize]) {
        let lines = self.lines(n, offsets.len());
        let (mut base, mut done) = (0, 0);
        for image in self.images(lines) {
            let (first, rows) = self.rows(image, lines);
            let mut line = base;
            for y in image * self.y.columns + first..lines.last.min((image + 1) * self.y.columns) {
                let x = (n + done) - y * self.x.columns;
                let len = (self.x.columns - x).min(offsets.len() - done);
                for (i, offset) in offsets[done..done + len].iter_mut().enumerate() {
                    *offset = line + x + i;
                }
                done += len;
                line += self.y.border.stride * self.pitch;
            }
            base += rows * self.pitch;
        }
    }

    /// The offsets in planes of the points of `k` from `k` on, in a block of `columns` columns from
    /// `n` on.
    pub(super) fn fill_k(&self, [n, columns]: [usize; 2], k: usize, offsets: &mut [usize]) {
        let lines = self.lines(n, columns);
        let (taps, points, stride) = (self.taps, self.x.points, self.x.border.stride);
        let (mut channel, tap) = (0, k % taps);
        let (mut v, mut u) = (tap / points, tap % points);
        for offset in offsets {
            let (line, x) = (v * self.y.border.dilation, u * self.x.border.dilation);
            let (phase, x) = if stride == 1 { (0, x) } else { (x % stride, x / stride) };
            *offset = channel * lines.elements + line * self.pitch + phase * self.phase + x;
            u += 1;
            if u == points {
                (u, v) = (0, v + 1);
            }
            if v == self.y.points {
                (v, channel) = (0, channel + 1);
            }
        }
    }

    /// Copies what `columns` columns from `n` on and `points` points of `k` read of `b`.
    ///
    /// # Safety
    ///
    /// `b` holds the product's operand, `planes` as many elements as [`Planes::take`] says.
    #[inline(always)]
    pub(super) unsafe fn fill<V: Vector>(
        &self,
        b: *const V::Scalar,
        [n, columns]: [usize; 2],
        [k, points]: [usize; 2],
        planes: *mut V::Scalar,
    ) {
        let lines = self.lines(n, columns);
        let mut target = planes;
        for channel in k / self.taps..(k + points - 1) / self.taps + 1 {
            let channel = b.wrapping_add(offset(&self.k, channel));
            for image in self.images(lines) {
                let source = channel.wrapping_add(offset(&self.n, image));
                let (first, rows) = self.rows(image, lines);
                let from = (first * self.y.border.stride) as isize - self.y.border.before as isize;
                for row in 0..rows {
                    let element = self.y.border.element(from + row as isize);
                    let line = element.map(|y| source.wrapping_add(y * self.y.border.step));
                    // SAFETY: by the contract of the function.
                    unsafe { self.fill_line::<V>(line, target) };
                    target = target.wrapping_add(self.pitch);
                }
            }
        }
    }

    /// Copies a line in all of its phases, or zeros where there is none.
    ///
    /// # Safety
    ///
    /// The line holds as many elements as the border says, `target` a line of a plane.
    #[inline(always)]
    unsafe fn fill_line<V: Vector>(&self, line: Option<*const V::Scalar>, target: *mut V::Scalar) {
        let Border { stride, before, .. } = self.x.border;
        let len = self.phase;
        // SAFETY: by the contract of the function.
        unsafe {
            let Some(line) = line else {
                return zeros(target, 0..self.pitch);
            };
            for phase in 0..stride {
                let start = phase as isize - before as isize;
                let there = within(&self.x.border, start, len);
                let from = start + (there.start * stride) as isize;
                let (line, target) = (line.wrapping_offset(from), target.add(phase * len));
                match stride {
                    1 => copy_within::<V, V::Scalar>(line, there, len, target),
                    2 => spread_within(line, 2, there, len, target),
                    stride => spread_within(line, stride, there, len, target),
                }
            }
        }
    }

    /// How many columns from column `n` on are neighbours in planes.
    fn run(&self, n: usize) -> usize {
        self.x.columns - n % self.x.columns
    }

    /// Multiplies a block of at most [`THIN`] rows, `b` of which is planes. An element is the same
    /// chain of multiply-adds as in a register tile.
    ///
    /// # Safety
    ///
    /// Operands, of which none is narrow, hold all sums of their tables.
    #[inline(always)]
    pub(super) unsafe fn multiply<V: Vector>(&self, block: &Block<V::Scalar>, n: usize, add: bool) {
        const { assert!(THIN == 4) };
        // SAFETY: by the contract of the function.
        unsafe {
            match block.am.len() {
                1 => self.rows_of::<V, 1>(block, n, add),
                2 => self.rows_of::<V, 2>(block, n, add),
                3 => self.rows_of::<V, 3>(block, n, add),
                _ => self.rows_of::<V, 4>(block, n, add),
            }
        }
    }

    #[inline(always)]
    unsafe fn rows_of<V: Vector, const R: usize>(
        &self,
        block: &Block<V::Scalar>,
        n: usize,
        add: bool,
    ) {
        let mut pieces = [(0, 0); PIECES];
        let (mut count, mut done, mut run) = (0, 0, self.run(n));
        while done < block.bn.len() {
            let end = (done + run).min(block.bn.len());
            run = self.x.columns;
            while done < end {
                let len = (end - done).min(V::LANES);
                pieces[count] = (done, len);
                (done, count) = (done + len, count + 1);
                if count == PIECES {
                    // SAFETY: by the contract of `multiply`.
                    unsafe { chain::<V, R, PIECES>(block, &pieces, add) };
                    count = 0;
                }
            }
        }
        for piece in &pieces[..count] {
            // SAFETY: as above.
            unsafe { chain::<V, R, 1>(block, std::array::from_ref(piece), add) };
        }
    }
}

/// The offset of a point of loops of sizes and strides.
fn offset(loops: &[[usize; 2]], point: usize) -> usize {
    let (mut rest, mut offset) = (point, 0);
    for [size, stride] in loops.iter().rev() {
        offset += rest % size * stride;
        rest /= size;
    }
    offset
}

/// Multiplies `R` rows with pieces of neighbouring columns: the first one, and how many.
///
/// # Safety
///
/// As [`Planes::multiply`].
#[allow(clippy::needless_range_loop, reason = "constant bounds keep sums in registers")]
#[inline(always)]
unsafe fn chain<V: Vector, const R: usize, const P: usize>(
    block: &Block<V::Scalar>,
    pieces: &[(usize, usize); P],
    add: bool,
) {
    // SAFETY: by the contract of the function; behind planes there is room for what is read past
    // the last column.
    unsafe {
        let (a, b) = (block.a.start::<V::Scalar>(), block.b.start::<V::Scalar>());
        let b = pieces.map(|(column, _)| b.add(block.bn[column]));
        let mut rows = [a; R];
        for (row, offset) in rows.iter_mut().zip(block.am) {
            *row = a.add(*offset);
        }
        let mut sums = [[V::splat(V::Scalar::ZERO); P]; R];
        for (&of_a, &of_b) in block.ak.iter().zip(block.bk) {
            let x = b.map(|b| V::load(b.add(of_b)));
            for i in 0..R {
                let w = V::splat(*rows[i].add(of_a));
                for j in 0..P {
                    sums[i][j] = w.fma(x[j], sums[i][j]);
                }
            }
        }
        for i in 0..R {
            for (j, &(column, len)) in pieces.iter().enumerate() {
                store(sums[i][j], block, block.cm[i], column, len, add);
            }
        }
    }
}

/// Stores the sums of neighbouring columns of a row.
///
/// # Safety
///
/// `c` holds all sums of its tables.
#[inline(always)]
unsafe fn store<V: Vector>(
    sum: V,
    block: &Block<V::Scalar>,
    row: usize,
    column: usize,
    len: usize,
    add: bool,
) {
    let columns = &block.cn[column..column + len];
    // SAFETY: by the contract of the function.
    unsafe {
        let start = block.c.add(row + columns[0]);
        if columns[len - 1] == columns[0] + len - 1 {
            let sum = if add { V::load_first(start, len, V::Scalar::ZERO).add(sum) } else { sum };
            return sum.store_first(start, len);
        }
        let mut lanes = [V::Scalar::ZERO; MAX_LANES];
        sum.store(lanes.as_mut_ptr());
        for (&lane, &column) in lanes.iter().zip(columns) {
            let element = block.c.add(row + column);
            *element = if add { *element + lane } else { lane };
        }
    }
}
