//! Narrow formats of numbers, as elements of memory: [`ir::formats`] for whole vectors.
//!
//! The arithmetic on bits is that of F. Giesen's conversions of half-floats: the numbers of one
//! binade are evenly spaced, so that adding half of their distance to the bits rounds, and the sum
//! with a number whose last bit is the smallest subnormal one rounds to those.

use ir::DType;
use ir::formats::tf32;
use ir::op::Operands;

use super::vector::{Job, MAX_LANES, Scalar, Vector};

/// An element that is a number of F32 in fewer bits.
pub(super) trait Narrow: Copy + 'static {
    const ZERO: Self;

    fn widen(self) -> f32;
    /// The nearest one.
    fn nearest(x: f32) -> Self;

    /// # Safety
    /// `LANES` elements are readable at `p`.
    #[inline(always)]
    unsafe fn load<V: Vector>(p: *const Self) -> V {
        // SAFETY: by the contract of the function.
        unsafe { load_lanes(p) }
    }

    /// # Safety
    /// `LANES` elements are writable at `p`.
    #[inline(always)]
    unsafe fn store<V: Vector>(x: V, p: *mut Self) {
        // SAFETY: by the contract of the function.
        unsafe { store_lanes(x, p) }
    }

    /// The nearest numbers of the format.
    #[inline(always)]
    fn round<V: Vector>(x: V) -> V {
        round_lanes::<Self, V>(x)
    }
}

/// # Safety
///
/// `LANES` elements are readable at `p`.
#[inline(always)]
pub(super) unsafe fn load_lanes<T: Narrow, V: Vector>(p: *const T) -> V {
    let mut lanes = [V::Scalar::ZERO; MAX_LANES];
    for (i, lane) in lanes.iter_mut().enumerate().take(V::LANES) {
        // SAFETY: by the contract of the function.
        *lane = V::Scalar::from_f32(unsafe { *p.add(i) }.widen());
    }
    // SAFETY: LANES <= MAX_LANES numbers are there to read.
    unsafe { V::load(lanes.as_ptr()) }
}

/// # Safety
///
/// `LANES` elements are writable at `p`.
#[inline(always)]
pub(super) unsafe fn store_lanes<T: Narrow, V: Vector>(x: V, p: *mut T) {
    let mut lanes = [V::Scalar::ZERO; MAX_LANES];
    // SAFETY: LANES <= MAX_LANES numbers are there to write; the rest by the contract.
    unsafe {
        x.store(lanes.as_mut_ptr());
        for (i, lane) in lanes.iter().enumerate().take(V::LANES) {
            *p.add(i) = T::nearest(lane.sticky());
        }
    }
}

#[inline(always)]
pub(super) fn round_lanes<T: Narrow, V: Vector>(x: V) -> V {
    x.map(|x| V::Scalar::from_f32(T::nearest(x.sticky()).widen()))
}

/// Loads the first `n < LANES` lanes, the others are zero.
///
/// # Safety
///
/// `n` elements are readable at `p`.
#[inline(always)]
pub(super) unsafe fn load_first<T: Narrow, V: Vector>(p: *const T, n: usize) -> V {
    let mut lanes = [T::ZERO; MAX_LANES];
    for (i, lane) in lanes.iter_mut().enumerate().take(n) {
        // SAFETY: by the contract of the function.
        *lane = unsafe { *p.add(i) };
    }
    // SAFETY: LANES <= MAX_LANES elements are there to read.
    unsafe { T::load(lanes.as_ptr()) }
}

/// Stores the first `n < LANES` lanes.
///
/// # Safety
///
/// `n` elements are writable at `p`.
#[inline(always)]
pub(super) unsafe fn store_first<T: Narrow, V: Vector>(x: V, p: *mut T, n: usize) {
    let mut lanes = [T::ZERO; MAX_LANES];
    // SAFETY: LANES <= MAX_LANES elements are there to write; the rest by the contract.
    unsafe {
        T::store(x, lanes.as_mut_ptr());
        for (i, lane) in lanes.iter().enumerate().take(n) {
            *p.add(i) = *lane;
        }
    }
}

/// `target = source`.
///
/// # Safety
///
/// Both hold `len` elements and do not overlap.
#[inline(always)]
pub(super) unsafe fn widen_all<T: Narrow, V: Vector>(
    source: *const T,
    target: *mut V::Scalar,
    len: usize,
) {
    let whole = len - len % V::LANES;
    // SAFETY: by the contract of the function.
    unsafe {
        for i in (0..whole).step_by(V::LANES) {
            T::load::<V>(source.add(i)).store(target.add(i));
        }
        let rest = load_first::<T, V>(source.add(whole), len - whole);
        rest.store_first(target.add(whole), len - whole);
    }
}

/// `target = source`, rounded.
///
/// # Safety
///
/// Both hold `len` elements and do not overlap.
#[inline(always)]
pub(super) unsafe fn narrow_all<T: Narrow, V: Vector>(
    source: *const V::Scalar,
    target: *mut T,
    len: usize,
) {
    let whole = len - len % V::LANES;
    // SAFETY: by the contract of the function.
    unsafe {
        for i in (0..whole).step_by(V::LANES) {
            T::store(V::load(source.add(i)), target.add(i));
        }
        let rest = V::load_first(source.add(whole), len - whole, V::Scalar::ZERO);
        store_first(rest, target.add(whole), len - whole);
    }
}

/// The upper half of a number of F32.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct BF16(u16);

/// Five bits of exponent, ten of mantissa.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct F16(u16);

/// Four bits of exponent, three of mantissa, no infinities.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct F8E4M3(u8);

/// The upper half of an F16.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct F8E5M2(u8);

/// The bit of a number of F32 that makes what is no number a quiet one.
pub(super) const QUIET: u32 = 0x0040_0000;
const INFINITE: u32 = 0x7f80_0000;
const MAGNITUDE: u32 = 0x7fff_ffff;

/// The code of the nearest magnitude to one of F32, for a format of `MANTISSA` bits whose exponents
/// have a `BIAS`; codes from `beyond` on are that.
#[inline(always)]
fn code<const MANTISSA: u32, const BIAS: u32>(magnitude: u32, beyond: u32) -> u32 {
    let shift = 23 - MANTISSA;
    let odd = magnitude >> shift & 1;
    let above = magnitude.wrapping_add((1 << (shift - 1)) - 1 + odd) >> shift;
    let normal = above.wrapping_sub((127 - BIAS) << MANTISSA);
    // Its last bit is the smallest number of the format.
    let ruler = (151 - BIAS - MANTISSA) << 23;
    let sum = f32::from_bits(magnitude) + f32::from_bits(ruler);
    let subnormal = sum.to_bits().wrapping_sub(ruler);
    let is_normal = magnitude >= (128 - BIAS) << 23;
    (if is_normal { normal } else { subnormal }).min(beyond)
}

/// The number of a magnitude whose exponent and mantissa are moved to where F32 has them.
#[inline(always)]
fn scaled<const BIAS: u32>(moved: u32) -> f32 {
    f32::from_bits(moved) * f32::from_bits((254 - BIAS) << 23)
}

#[inline(always)]
fn signed(magnitude: u32, sign: u32) -> f32 {
    f32::from_bits(magnitude | sign)
}

impl Narrow for BF16 {
    const ZERO: BF16 = BF16(0);

    #[inline(always)]
    fn widen(self) -> f32 {
        let bits = u32::from(self.0) << 16;
        let is_nan = bits & MAGNITUDE > INFINITE;
        f32::from_bits(bits | if is_nan { QUIET } else { 0 })
    }

    #[inline(always)]
    fn nearest(x: f32) -> BF16 {
        let bits = x.to_bits();
        let near = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
        let is_nan = bits & MAGNITUDE > INFINITE;
        BF16((if is_nan { bits | QUIET } else { near } >> 16) as u16)
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(p: *const BF16) -> V {
        // SAFETY: by the contract of the function.
        unsafe { V::load_bf16(p) }
    }

    #[inline(always)]
    unsafe fn store<V: Vector>(x: V, p: *mut BF16) {
        // SAFETY: by the contract of the function.
        unsafe { x.store_bf16(p) }
    }

    #[inline(always)]
    fn round<V: Vector>(x: V) -> V {
        x.round_bf16()
    }
}

impl Narrow for F16 {
    const ZERO: F16 = F16(0);

    #[inline(always)]
    fn widen(self) -> f32 {
        let (magnitude, sign) = (u32::from(self.0 & 0x7fff), u32::from(self.0 & 0x8000) << 16);
        let finite = scaled::<15>(magnitude << 13).to_bits();
        let quiet = if magnitude > 0x7c00 { QUIET } else { 0 };
        let special = INFINITE | magnitude << 13 | quiet;
        signed(if magnitude >= 0x7c00 { special } else { finite }, sign)
    }

    #[inline(always)]
    fn nearest(x: f32) -> F16 {
        let (magnitude, sign) = (x.to_bits() & MAGNITUDE, x.to_bits() >> 16 & 0x8000);
        let near = code::<10, 15>(magnitude, 0x7c00);
        let nan = 0x7e00 | magnitude >> 13 & 0x03ff;
        F16((sign | if magnitude > INFINITE { nan } else { near }) as u16)
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(p: *const F16) -> V {
        // SAFETY: by the contract of the function.
        unsafe { V::load_f16(p) }
    }

    #[inline(always)]
    unsafe fn store<V: Vector>(x: V, p: *mut F16) {
        // SAFETY: by the contract of the function.
        unsafe { x.store_f16(p) }
    }

    #[inline(always)]
    fn round<V: Vector>(x: V) -> V {
        x.round_f16()
    }
}

impl Narrow for F8E4M3 {
    const ZERO: F8E4M3 = F8E4M3(0);

    #[inline(always)]
    fn widen(self) -> f32 {
        let (magnitude, sign) = (u32::from(self.0 & 0x7f), u32::from(self.0 & 0x80) << 24);
        let number = scaled::<7>(magnitude << 20).to_bits();
        signed(if magnitude == 0x7f { INFINITE | QUIET } else { number }, sign)
    }

    #[inline(always)]
    fn nearest(x: f32) -> F8E4M3 {
        let (magnitude, sign) = (x.to_bits() & MAGNITUDE, x.to_bits() >> 24 & 0x80);
        // What is beyond is no number, as what is none.
        F8E4M3((sign | code::<3, 7>(magnitude, 0x7f)) as u8)
    }
}

impl Narrow for F8E5M2 {
    const ZERO: F8E5M2 = F8E5M2(0);

    #[inline(always)]
    fn widen(self) -> f32 {
        F16(u16::from(self.0) << 8).widen()
    }

    #[inline(always)]
    fn nearest(x: f32) -> F8E5M2 {
        let (magnitude, sign) = (x.to_bits() & MAGNITUDE, x.to_bits() >> 24 & 0x80);
        let near = code::<2, 15>(magnitude, 0x7c);
        F8E5M2((sign | if magnitude > INFINITE { 0x7f } else { near }) as u8)
    }
}

/// A number of F32 that is rounded to TF32 when it is read: [`ir::formats::tf32`].
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Tf32(f32);

impl Narrow for Tf32 {
    const ZERO: Tf32 = Tf32(0.0);

    #[inline(always)]
    fn widen(self) -> f32 {
        tf32(self.0)
    }

    #[inline(always)]
    fn nearest(x: f32) -> Tf32 {
        Tf32(tf32(x))
    }
}

/// How the elements of an argument are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// As the numbers that are computed with.
    Own,
    BF16,
    F16,
    F8E4M3,
    F8E5M2,
    /// As numbers of F32, which are rounded to TF32 when they are read.
    Tf32,
}

impl Format {
    /// Bytes of an element where `S` is computed with.
    pub(super) fn bytes<S>(self) -> usize {
        match self {
            Format::Own => size_of::<S>(),
            Format::BF16 | Format::F16 => 2,
            Format::F8E4M3 | Format::F8E5M2 => 1,
            Format::Tf32 => 4,
        }
    }

    /// How elements of an operand of a product are read.
    pub(super) fn of_operand(dtype: DType, operands: Operands) -> Format {
        match operands {
            Operands::Exact => Format::of(dtype),
            Operands::Tf32 => Format::Tf32,
        }
    }

    pub(super) fn of(dtype: DType) -> Format {
        match dtype {
            DType::BF16 => Format::BF16,
            DType::F16 => Format::F16,
            DType::F8E4M3 => Format::F8E4M3,
            DType::F8E5M2 => Format::F8E5M2,
            DType::F64
            | DType::F32
            | DType::I8
            | DType::I32
            | DType::I64
            | DType::U32
            | DType::Bool => Format::Own,
        }
    }
}

/// An operand: where it starts, and how its elements are stored.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operand {
    start: *const u8,
    pub(super) format: Format,
}

impl Operand {
    pub(super) fn new(start: *const u8, format: Format) -> Operand {
        Operand { start, format }
    }

    /// Elements that are the numbers computed with.
    pub(super) fn own<S: Scalar>(start: *const S) -> Operand {
        Operand { start: start.cast(), format: Format::Own }
    }

    pub(super) fn start<T>(self) -> *const T {
        self.start.cast()
    }

    /// The operand from an element on, where `S` is computed with.
    pub(super) fn moved<S>(self, elements: usize) -> Operand {
        let start = self.start.wrapping_add(elements * self.format.bytes::<S>());
        Operand { start, ..self }
    }
}

/// `target = source`, as numbers that are computed with.
///
/// Both hold `len` elements and do not overlap.
pub(super) struct Widen<S> {
    pub(super) source: Operand,
    pub(super) target: *mut S,
    pub(super) len: usize,
}

impl<S: Scalar> Job<S> for Widen<S> {
    #[inline(always)]
    fn run<V: Vector<Scalar = S>>(self) {
        let Widen { source, target, len } = self;
        // SAFETY: whoever makes the job gives as many elements.
        unsafe {
            match source.format {
                Format::Own => target.copy_from_nonoverlapping(source.start(), len),
                Format::BF16 => widen_all::<BF16, V>(source.start(), target, len),
                Format::F16 => widen_all::<F16, V>(source.start(), target, len),
                Format::F8E4M3 => widen_all::<F8E4M3, V>(source.start(), target, len),
                Format::F8E5M2 => widen_all::<F8E5M2, V>(source.start(), target, len),
                Format::Tf32 => widen_all::<Tf32, V>(source.start(), target, len),
            }
        }
    }
}

/// `target = source`, each number rounded once.
///
/// Both hold `len` elements and do not overlap.
pub(super) struct Round<S> {
    pub(super) source: *const S,
    /// What is written.
    pub(super) target: Operand,
    pub(super) len: usize,
}

impl<S: Scalar> Job<S> for Round<S> {
    #[inline(always)]
    fn run<V: Vector<Scalar = S>>(self) {
        let Round { source, target: Operand { start, format }, len } = self;
        let start = start.cast_mut();
        // SAFETY: whoever makes the job gives as many elements, and those of an output.
        unsafe {
            match format {
                Format::Own => start.cast::<S>().copy_from_nonoverlapping(source, len),
                Format::BF16 => narrow_all::<BF16, V>(source, start.cast(), len),
                Format::F16 => narrow_all::<F16, V>(source, start.cast(), len),
                Format::F8E4M3 => narrow_all::<F8E4M3, V>(source, start.cast(), len),
                Format::F8E5M2 => narrow_all::<F8E5M2, V>(source, start.cast(), len),
                Format::Tf32 => narrow_all::<Tf32, V>(source, start.cast(), len),
            }
        }
    }
}
