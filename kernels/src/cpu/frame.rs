//! Packing columns of an operand with borders: positions, and runs of columns side by side.

use super::formats::{BF16, F8E4M3, F8E5M2, F16, Format, Operand, Tf32};
use super::pack::Element;
use super::vector::{Job, Scalar, Vector};
use crate::border::Border;
use crate::kernel::Product;

/// A border, and where its loops stand among those of `n` and `k`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Framed {
    border: Border,
    /// Points of the loops inside of that of `n`, and its size.
    n: [usize; 2],
    /// The same of `k`.
    k: [usize; 2],
}

/// The borders of a product, the one whose columns lie side by side last.
pub(super) fn framed(p: &Product) -> Vec<Framed> {
    let place = |sizes: Vec<usize>, at: usize| [sizes[at + 1..].iter().product(), sizes[at]];
    let frame = |border: &Border| Framed {
        border: *border,
        n: place(p.n.iter().map(|l| l.size).collect(), border.n),
        k: place(p.k.iter().map(|l| l.size).collect(), border.k),
    };
    let mut found: Vec<Framed> = p.borders.iter().map(frame).collect();
    found.sort_by_key(|framed| std::cmp::Reverse(framed.n[0]));
    found
}

impl Framed {
    fn fill([inside, size]: [usize; 2], by: usize, start: usize, positions: &mut [isize]) {
        for (at, position) in positions.iter_mut().enumerate() {
            *position = ((start + at) / inside % size * by) as isize;
        }
    }
}

/// Positions along the borders of a block of columns and a block of `k`.
#[derive(Clone, Copy)]
pub(super) struct Frame<'a> {
    borders: &'a [Framed],
    /// For each border, one for each column.
    n: &'a [isize],
    /// For each border, one for each point of `k`.
    k: &'a [isize],
    columns: usize,
    points: usize,
}

impl<'a> Frame<'a> {
    pub(super) fn new(borders: &'a [Framed], n: &'a [isize], k: &'a [isize]) -> Frame<'a> {
        let of_each = |positions: &[isize]| positions.len() / borders.len().max(1);
        Frame { borders, n, k, columns: of_each(n), points: of_each(k) }
    }

    pub(super) fn is_none(&self) -> bool {
        self.borders.is_empty()
    }

    /// Fills the positions of columns from `start` on.
    pub(super) fn fill_n(borders: &[Framed], start: usize, len: usize, table: &mut [isize]) {
        for (framed, positions) in borders.iter().zip(table.chunks_exact_mut(len.max(1))) {
            Framed::fill(framed.n, framed.border.stride, start, positions);
        }
    }

    /// Fills the positions of points of `k` from `start` on, less what stands before.
    pub(super) fn fill_k(borders: &[Framed], start: usize, len: usize, table: &mut [isize]) {
        for (framed, positions) in borders.iter().zip(table.chunks_exact_mut(len.max(1))) {
            Framed::fill(framed.k, framed.border.dilation, start, positions);
            positions.iter_mut().for_each(|p| *p -= framed.border.before as isize);
        }
    }

    /// How many columns from `first` on, of which `bn` has the other offsets, differ only in the
    /// last border and there by its stride: no loop with a border is inside of that.
    fn run(&self, first: usize, bn: &[usize]) -> usize {
        let last = self.borders.len() - 1;
        let at = |column: usize| self.n[last * self.columns + column];
        let stride = self.borders[last].border.stride as isize;
        let follows = |i: &usize| {
            let column = first + i;
            bn[*i] == bn[0] && at(column) - at(column - 1) == stride
        };
        (1..bn.len()).take_while(follows).count() + 1
    }

    /// Writes `panel[k, i]` for columns `first + i`, whose other offsets are `bn` and `bk`: what is
    /// read there or zero, and zeros for `i` past `bn.len()`.
    ///
    /// # Safety
    ///
    /// `b` holds all sums of the tables and of the elements within the borders, the panel
    /// `bk.len() * width` numbers.
    #[inline(always)]
    pub(super) unsafe fn pack<V: Vector>(
        &self,
        b: Operand,
        first: usize,
        bn: &[usize],
        bk: &[usize],
        width: usize,
        panel: *mut V::Scalar,
    ) {
        macro_rules! narrow {
            ($element:ty) => {{
                let b = b.start();
                V::call(Columns::<$element, V::Scalar> {
                    frame: self,
                    b,
                    first,
                    bn,
                    bk,
                    width,
                    panel,
                })
            }};
        }
        match b.format {
            // SAFETY: by the contract of the function.
            Format::Own => unsafe {
                self.pack_elements::<V, V::Scalar>(b.start(), first, bn, bk, width, panel);
            },
            Format::BF16 => narrow!(BF16),
            Format::F16 => narrow!(F16),
            Format::F8E4M3 => narrow!(F8E4M3),
            Format::F8E5M2 => narrow!(F8E5M2),
            Format::Tf32 => narrow!(Tf32),
        }
    }

    /// # Safety
    ///
    /// As [`Frame::pack`].
    #[inline(always)]
    unsafe fn pack_elements<V: Vector, T: Element<V::Scalar>>(
        &self,
        b: *const T,
        first: usize,
        bn: &[usize],
        bk: &[usize],
        width: usize,
        panel: *mut V::Scalar,
    ) {
        let mut done = 0;
        while done < bn.len() {
            let len = self.run(first + done, &bn[done..]);
            for (k, offset) in bk.iter().enumerate() {
                // SAFETY: the panel holds `len` columns from `done` on.
                unsafe {
                    let target = panel.add(k * width + done);
                    let source = b.wrapping_add(offset + bn[done]);
                    self.pack_run::<V, T>(source, first + done, k, len, target);
                }
            }
            done += len;
        }
        if bn.len() < width {
            for k in 0..bk.len() {
                // SAFETY: by the contract of the function.
                unsafe { zeros(panel.add(k * width), bn.len()..width) };
            }
        }
    }

    /// Packs columns that are a run, for one point of `k`.
    ///
    /// # Safety
    ///
    /// As [`Frame::pack`].
    #[inline(always)]
    unsafe fn pack_run<V: Vector, T: Element<V::Scalar>>(
        &self,
        source: *const T,
        first: usize,
        k: usize,
        len: usize,
        target: *mut V::Scalar,
    ) {
        let count = self.borders.len();
        let position = |border: usize| {
            self.n[border * self.columns + first] + self.k[border * self.points + k]
        };
        let mut source = source;
        for (at, framed) in self.borders[..count - 1].iter().enumerate() {
            let Some(element) = framed.border.element(position(at)) else {
                // SAFETY: by the contract of the function.
                unsafe { zeros(target, 0..len) };
                return;
            };
            source = source.wrapping_add(element * framed.border.step);
        }
        let border = &self.borders[count - 1].border;
        let start = position(count - 1);
        // SAFETY: what is read lies within the border, what is written among `len` numbers.
        unsafe {
            if border.spread == 1 {
                let there = within(border, start, len);
                let from = start + (there.start * border.stride) as isize;
                let source = source.wrapping_offset(from * border.step as isize);
                match border.stride * border.step {
                    1 => copy_within::<V, T>(source, there, len, target),
                    // Known to the compiler, which then reads whole vectors.
                    2 => spread_within(source, 2, there, len, target),
                    step => spread_within(source, step, there, len, target),
                }
            } else {
                for i in 0..len {
                    let element = border.element(start + (i * border.stride) as isize);
                    let read = |element: usize| (*source.add(element * border.step)).number();
                    *target.add(i) = element.map_or(V::Scalar::ZERO, read);
                }
            }
        }
    }
}

/// [`Frame::pack`] of narrow elements.
struct Columns<'a, T, S> {
    frame: &'a Frame<'a>,
    b: *const T,
    first: usize,
    bn: &'a [usize],
    bk: &'a [usize],
    width: usize,
    panel: *mut S,
}

impl<T: Element<S>, S: Scalar> Job<S> for Columns<'_, T, S> {
    #[inline(always)]
    fn run<V: Vector<Scalar = S>>(self) {
        let Columns { frame, b, first, bn, bk, width, panel } = self;
        // SAFETY: by the contract of `Frame::pack`.
        unsafe { frame.pack_elements::<V, T>(b, first, bn, bk, width, panel) };
    }
}

/// The points of a run of `len`, the first at position `start`, that are elements.
#[inline(always)]
pub(super) fn within(border: &Border, start: isize, len: usize) -> std::ops::Range<usize> {
    let (stride, size) = (border.stride, border.size as isize);
    let until = |position: isize| {
        let ahead = usize::try_from(position - start).unwrap_or(0);
        if stride == 1 { ahead } else { ahead.div_ceil(stride) }
    };
    let end = until(size).min(len);
    until(0).min(end)..end
}

/// Copies numbers to the points `there` among `len`; the others become zero.
///
/// # Safety
///
/// As many are readable at `source`, and `target` has room for `len`.
#[inline(always)]
pub(super) unsafe fn copy_within<V: Vector, T: Element<V::Scalar>>(
    source: *const T,
    there: std::ops::Range<usize>,
    len: usize,
    target: *mut V::Scalar,
) {
    // SAFETY: by the contract of the function; whole vectors while there are as many numbers.
    unsafe {
        zeros(target, 0..there.start);
        let (mut source, mut target) = (source, target.add(there.start));
        let (mut left, mut room) = (there.len(), len - there.start);
        while left >= V::LANES {
            T::load::<V>(source).store(target);
            (source, target) = (source.add(V::LANES), target.add(V::LANES));
            (left, room) = (left - V::LANES, room - V::LANES);
        }
        // The rest with the zeros behind it, mostly at once.
        let rest = T::load_first::<V>(source, left);
        if room < V::LANES {
            rest.store_first(target, room);
        } else {
            rest.store(target);
            zeros(target, V::LANES..room);
        }
    }
}

/// As [`copy_within`], from every `step`-th number.
///
/// # Safety
///
/// As there.
#[inline(always)]
pub(super) unsafe fn spread_within<S: Scalar, T: Element<S>>(
    source: *const T,
    step: usize,
    there: std::ops::Range<usize>,
    len: usize,
    target: *mut S,
) {
    // SAFETY: by the contract of the function.
    unsafe {
        zeros(target, 0..there.start);
        zeros(target, there.end..len);
        let target = target.add(there.start);
        (0..there.len()).for_each(|i| *target.add(i) = (*source.add(i * step)).number());
    }
}

/// # Safety
///
/// `target` has room for the range.
#[inline(always)]
pub(super) unsafe fn zeros<S: Scalar>(target: *mut S, range: std::ops::Range<usize>) {
    // SAFETY: by the contract of the function.
    range.for_each(|i| unsafe { *target.add(i) = S::ZERO });
}
