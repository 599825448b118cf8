//! Packing: strided operands of a product become panels that register tiles read in order.

use super::extent::{height, step};
use super::formats::{self, BF16, F8E4M3, F8E5M2, F16, Format, Narrow, Operand, Tf32};
use super::vector::{Job, Scalar, Vector};

/// An element that is packed as the number that it is.
pub(super) trait Element<S: Scalar>: Copy {
    fn number(self) -> S;
    /// # Safety
    /// `LANES` elements are readable at `p`.
    unsafe fn load<V: Vector<Scalar = S>>(p: *const Self) -> V;
    /// The first `n < LANES` lanes; the others are zero.
    ///
    /// # Safety
    /// `n` elements are readable at `p`.
    unsafe fn load_first<V: Vector<Scalar = S>>(p: *const Self, n: usize) -> V;
    /// # Safety
    /// As [`Vector::transpose`].
    unsafe fn transpose<V: Vector<Scalar = S>>(
        source: *const Self,
        source_stride: usize,
        target: *mut S,
        target_stride: usize,
    );
}

impl<S: Scalar> Element<S> for S {
    #[inline(always)]
    fn number(self) -> S {
        self
    }
    #[inline(always)]
    unsafe fn load<V: Vector<Scalar = S>>(p: *const S) -> V {
        // SAFETY: by the contract of the function.
        unsafe { V::load(p) }
    }
    #[inline(always)]
    unsafe fn load_first<V: Vector<Scalar = S>>(p: *const S, n: usize) -> V {
        // SAFETY: by the contract of the function.
        unsafe { V::load_first(p, n, S::ZERO) }
    }
    #[inline(always)]
    unsafe fn transpose<V: Vector<Scalar = S>>(
        source: *const S,
        source_stride: usize,
        target: *mut S,
        target_stride: usize,
    ) {
        // SAFETY: by the contract of the function.
        unsafe { V::transpose(source, source_stride, target, target_stride) };
    }
}

/// Numbers of the largest square that is transposed.
const SQUARE: usize = 64;

macro_rules! narrow {
    ($($element:ty),*) => {$(
        impl<S: Scalar> Element<S> for $element {
            #[inline(always)]
            fn number(self) -> S {
                S::from_f32(self.widen())
            }
            #[inline(always)]
            unsafe fn load<V: Vector<Scalar = S>>(p: *const Self) -> V {
                // SAFETY: by the contract of the function.
                unsafe { Narrow::load(p) }
            }
            #[inline(always)]
            unsafe fn load_first<V: Vector<Scalar = S>>(p: *const Self, n: usize) -> V {
                // SAFETY: by the contract of the function.
                unsafe { formats::load_first(p, n) }
            }
            #[inline(always)]
            unsafe fn transpose<V: Vector<Scalar = S>>(
                source: *const Self,
                source_stride: usize,
                target: *mut S,
                target_stride: usize,
            ) {
                const { assert!(V::TILE <= V::LANES && V::TILE * V::TILE <= SQUARE) };
                let mut square = [S::ZERO; SQUARE];
                // SAFETY: by the contract of the function; the square holds its rows.
                unsafe {
                    let start = square.as_mut_ptr();
                    for i in 0..V::TILE {
                        let (from, to) = (source.add(i * source_stride), start.add(i * V::TILE));
                        if V::TILE == V::LANES {
                            Narrow::load::<V>(from).store(to);
                        } else {
                            let row = formats::load_first::<_, V>(from, V::TILE);
                            row.store_first(to, V::TILE);
                        }
                    }
                    V::transpose(start, V::TILE, target, target_stride);
                }
            }
        }
    )*};
}

narrow!(BF16, F16, F8E4M3, F8E5M2, Tf32);

/// Packs columns of `b` into a panel of `width` columns, padded with zeros.
///
/// # Safety
///
/// `b` holds all sums of the two tables, the panel `bk.len() * width` numbers.
#[inline(always)]
pub(super) unsafe fn pack_columns<V: Vector>(
    b: Operand,
    bn: &[usize],
    bk: &[usize],
    width: usize,
    panel: *mut V::Scalar,
) {
    macro_rules! narrow {
        ($element:ty) => {
            V::call(Columns::<$element, V::Scalar> { b: b.start(), bn, bk, width, panel })
        };
    }
    match b.format {
        // SAFETY: by the contract of the function.
        Format::Own => unsafe { pack::<V, V::Scalar>(b.start(), bn, bk, width, panel) },
        Format::BF16 => narrow!(BF16),
        Format::F16 => narrow!(F16),
        Format::F8E4M3 => narrow!(F8E4M3),
        Format::F8E5M2 => narrow!(F8E5M2),
        Format::Tf32 => narrow!(Tf32),
    }
}

/// [`pack_columns`] of narrow elements.
struct Columns<'a, T, S> {
    b: *const T,
    bn: &'a [usize],
    bk: &'a [usize],
    width: usize,
    panel: *mut S,
}

impl<T: Element<S>, S: Scalar> Job<S> for Columns<'_, T, S> {
    #[inline(always)]
    fn run<V: Vector<Scalar = S>>(self) {
        // SAFETY: by the contract of `pack_columns`.
        unsafe { pack::<V, T>(self.b, self.bn, self.bk, self.width, self.panel) };
    }
}

/// Packs rows of `a` into panels as tall as the register tiles of so many vectors that will read
/// them.
///
/// # Safety
///
/// `a` holds all sums of the two tables, the panel a number for each.
#[inline(always)]
pub(super) unsafe fn pack_rows<V: Vector>(
    a: Operand,
    am: &[usize],
    ak: &[usize],
    vectors: usize,
    panel: *mut V::Scalar,
) {
    macro_rules! narrow {
        ($element:ty) => {
            V::call(Rows::<$element, V::Scalar> { a: a.start(), am, ak, vectors, panel })
        };
    }
    match a.format {
        // SAFETY: by the contract of the function.
        Format::Own => unsafe { pack_panels::<V, V::Scalar>(a.start(), am, ak, vectors, panel) },
        Format::BF16 => narrow!(BF16),
        Format::F16 => narrow!(F16),
        Format::F8E4M3 => narrow!(F8E4M3),
        Format::F8E5M2 => narrow!(F8E5M2),
        Format::Tf32 => narrow!(Tf32),
    }
}

/// [`pack_rows`] of narrow elements.
struct Rows<'a, T, S> {
    a: *const T,
    am: &'a [usize],
    ak: &'a [usize],
    vectors: usize,
    panel: *mut S,
}

impl<T: Element<S>, S: Scalar> Job<S> for Rows<'_, T, S> {
    #[inline(always)]
    fn run<V: Vector<Scalar = S>>(self) {
        // SAFETY: by the contract of `pack_rows`.
        unsafe { pack_panels::<V, T>(self.a, self.am, self.ak, self.vectors, self.panel) };
    }
}

/// # Safety
///
/// As [`pack_rows`].
#[inline(always)]
unsafe fn pack_panels<V: Vector, T: Element<V::Scalar>>(
    a: *const T,
    am: &[usize],
    ak: &[usize],
    vectors: usize,
    panel: *mut V::Scalar,
) {
    let mut done = 0;
    while done < am.len() {
        let rows = height::<V>(vectors, am.len() - done);
        // SAFETY: panels follow each other in the room of a block.
        unsafe { pack::<V, T>(a, &am[done..done + rows], ak, rows, panel.add(done * ak.len())) };
        done += rows;
    }
}

/// Writes `panel[k, i] = source[wide[i] + deep[k]]`, and zeros for `i` past `wide.len()`.
#[inline(always)]
unsafe fn pack<V: Vector, T: Element<V::Scalar>>(
    source: *const T,
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
                    T::load::<V>(row.add(i)).store(target.add(i));
                }
                if rest > 0 {
                    let lanes = T::load_first::<V>(row.add(whole), rest);
                    lanes.store_first(target.add(whole), rest);
                }
            }
        } else if let (Some(stride), Some(1)) = (wide_step, step(deep)) {
            let start = source.add(wide[0] + deep[0]);
            pack_transposed::<V, T>(start, stride, [wide.len(), deep.len()], width, panel);
        } else if let Some(runs) = Runs::of(wide, V::LANES) {
            runs.pack::<V, T>(source, deep, width, panel);
        } else {
            for (k, &offset) in deep.iter().enumerate() {
                for (i, &start) in wide.iter().enumerate() {
                    *panel.add(k * width + i) = (*source.add(offset + start)).number();
                }
            }
        }
    }
}

/// Writes `panel[k, i] = start[i * stride + k]`.
#[inline(always)]
unsafe fn pack_transposed<V: Vector, T: Element<V::Scalar>>(
    start: *const T,
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
                    *panel.add(k * width + i) = (*start.add(i * stride + k)).number();
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
                        V::prefetch(start.wrapping_add(next * stride + k).cast());
                    }
                }
                let source = start.add(i * stride + k);
                T::transpose::<V>(source, stride, panel.add(k * width + i), width);
            }
        }
    }
}

/// Offsets in a few runs of neighbours.
struct Runs {
    /// The place among all, the offset there, and how many.
    pieces: [(usize, usize, usize); Runs::MOST],
    count: usize,
}

impl Runs {
    /// Most vectors that are copied for a panel, which is at most three wide.
    const MOST: usize = 12;

    /// The runs, each of at most as many as a vector holds; none where too many.
    #[inline(always)]
    fn of(offsets: &[usize], lanes: usize) -> Option<Runs> {
        let mut runs = Runs { pieces: [(0, 0, 0); Runs::MOST], count: 0 };
        let mut done = 0;
        while done < offsets.len() {
            let first = offsets[done];
            let rest = offsets[done..].iter().take(lanes).enumerate();
            let len = rest.take_while(|(i, offset)| **offset == first + i).count();
            *runs.pieces.get_mut(runs.count)? = (done, first, len);
            runs.count += 1;
            done += len;
        }
        // Short ones are as soon copied one by one.
        (runs.count * 3 <= offsets.len()).then_some(runs)
    }

    /// As [`pack`].
    ///
    /// # Safety
    ///
    /// As there.
    #[inline(always)]
    unsafe fn pack<V: Vector, T: Element<V::Scalar>>(
        &self,
        source: *const T,
        deep: &[usize],
        width: usize,
        panel: *mut V::Scalar,
    ) {
        for (k, &offset) in deep.iter().enumerate() {
            for &(at, start, len) in &self.pieces[..self.count] {
                // SAFETY: by the contract of the function.
                unsafe {
                    let (source, target) = (source.add(offset + start), panel.add(k * width + at));
                    if len == V::LANES {
                        T::load::<V>(source).store(target);
                    } else {
                        T::load_first::<V>(source, len).store_first(target, len);
                    }
                }
            }
        }
    }
}
