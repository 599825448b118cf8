//! Packing operands into panels of groups, which register tiles read in order.
//!
//! A panel holds, for each group of points of `k`, one group for each of its rows or columns. Past
//! the last row, column or point it holds zeros.

use super::steps::{Number, Step};
use crate::cpu::extent::step;

/// An element of an operand.
pub(super) trait Element: Copy {
    /// Its number: of more than 16 bits the low ones count.
    fn number(self) -> i32;
}

impl Element for i8 {
    #[inline(always)]
    fn number(self) -> i32 {
        self.into()
    }
}

impl Element for i32 {
    #[inline(always)]
    fn number(self) -> i32 {
        self
    }
}

/// Most rows or columns of a panel, or of a register tile.
pub(super) const WIDE: usize = 32;

/// Groups that some points of `k` take.
pub(super) fn groups<S: Step>(points: usize) -> usize {
    points.div_ceil(S::Number::DEPTH)
}

/// Packs rows or columns whose offsets are `wide`, at points of `k` whose offsets are `deep`, into
/// a panel that is `width` of them wide.
///
/// # Safety
///
/// `source` holds all sums of the two tables, the panel `width` for each of [`groups`].
#[inline(always)]
pub(super) unsafe fn pack<S: Step, T: Element>(
    source: *const T,
    wide: &[usize],
    deep: &[usize],
    width: usize,
    panel: *mut i32,
) {
    let depth = S::Number::DEPTH;
    if wide.len() == 2 * S::LANES && width == wide.len() && step(wide) == Some(1) {
        let source = source.wrapping_add(wide[0]);
        let row = |k: usize| source.wrapping_add(deep[k]);
        // SAFETY: by the contract of the function.
        return unsafe { pack_rows::<S, T>(row, deep.len(), panel) };
    }
    // SAFETY: by the contract of the function; nobody else refers to the panel.
    let panel = unsafe { std::slice::from_raw_parts_mut(panel, groups::<S>(deep.len()) * width) };
    let is_deep = step(deep) == Some(1);
    for i in 0..width {
        let line = panel.iter_mut().skip(i).step_by(width);
        let Some(offset) = wide.get(i) else {
            line.for_each(|group| *group = 0);
            continue;
        };
        let start = source.wrapping_add(*offset);
        let place = |(at, x): (usize, i32)| S::Number::place(x, at);
        let group = |numbers: &mut dyn Iterator<Item = i32>| -> i32 {
            numbers.enumerate().map(place).fold(0, |group, x| group | x)
        };
        if is_deep && !deep.is_empty() {
            // SAFETY: by the contract of the function.
            let numbers =
                unsafe { std::slice::from_raw_parts(start.wrapping_add(deep[0]), deep.len()) };
            for (target, numbers) in line.zip(numbers.chunks(depth)) {
                *target = group(&mut numbers.iter().map(|x| x.number()));
            }
            continue;
        }
        for (target, points) in line.zip(deep.chunks(depth)) {
            // SAFETY: by the contract of the function.
            let number = |point: &usize| unsafe { *start.wrapping_add(*point) }.number();
            *target = group(&mut points.iter().map(number));
        }
    }
}

/// Packs `2 * LANES` columns that lie side by side, of which `row` says where each point of `k` is.
///
/// # Safety
///
/// As [`pack`].
#[inline(always)]
pub(super) unsafe fn pack_rows<S: Step, T: Element>(
    row: impl Fn(usize) -> *const T,
    points: usize,
    panel: *mut i32,
) {
    let (depth, width) = (S::Number::DEPTH, 2 * S::LANES);
    // SAFETY: by the contract of the function; nobody else refers to the panel.
    let panel = unsafe { std::slice::from_raw_parts_mut(panel, groups::<S>(points) * width) };
    for (g, columns) in panel.chunks_exact_mut(width).enumerate() {
        let first = g * depth;
        for at in 0..depth.min(points - first) {
            // SAFETY: by the contract of the function.
            let row = unsafe { std::slice::from_raw_parts(row(first + at), width) };
            for (group, element) in columns.iter_mut().zip(row) {
                let number = S::Number::place(element.number(), at);
                *group = if at == 0 { number } else { *group | number };
            }
        }
    }
}

/// Adds 128 to each signed byte of a panel, which makes them unsigned.
///
/// # Safety
///
/// The panel holds `len` groups.
pub(super) unsafe fn add_offset(panel: *mut i32, len: usize) {
    // SAFETY: by the contract of the function; nobody else refers to the panel.
    let panel = unsafe { std::slice::from_raw_parts_mut(panel, len) };
    panel.iter_mut().for_each(|group| *group ^= 0x8080_8080_u32.cast_signed());
}

/// What sums start from: zeros, or minus 128 times the sum of each column where rows are unsigned.
///
/// # Safety
///
/// The panel holds `width` groups for each of `groups`, and `start` as many sums.
#[inline(always)]
pub(super) unsafe fn starts<S: Step>(
    panel: *const i32,
    groups: usize,
    width: usize,
    start: *mut i32,
) {
    // SAFETY: by the contract of the function.
    unsafe {
        let start = std::slice::from_raw_parts_mut(start, width);
        start.fill(0);
        if !S::IS_OFFSET {
            return;
        }
        for columns in std::slice::from_raw_parts(panel, groups * width).chunks_exact(width) {
            for (start, group) in start.iter_mut().zip(columns) {
                let sum: i32 = group.to_le_bytes().map(|x| i32::from(x.cast_signed())).iter().sum();
                *start = start.wrapping_sub(sum << 7);
            }
        }
    }
}
