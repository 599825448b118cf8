//! Packing numbers of BF16 into tiles of pairs.
//!
//! A tile is 16 lines of 64 bytes. Of rows, a line is 32 points of `k` of one row; of columns, a
//! pair of points of each of 16 columns. Seen as pairs, one is the other transposed.

use std::arch::x86_64::*;

use crate::cpu::extent::step;

/// Points of `k` of a tile.
pub(super) const DEPTH: usize = 32;
/// Rows or columns of a tile.
pub(super) const SIDE: usize = 16;
/// Numbers of a tile.
pub(super) const TILE: usize = DEPTH * SIDE;

/// Which operand a panel is of.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Rows,
    Columns,
}

/// The tiles of a panel for each step: two, unless one has room for what there is.
pub(super) fn tiles(wide: usize) -> usize {
    if wide > SIDE { 2 } else { 1 }
}

/// Packs at most 32 rows or columns, whose offsets are `wide`, and zeros beyond them.
///
/// # Safety
///
/// The machine has AVX-512 F, BW and VL. `source` holds all sums of the two tables, the panel
/// [`tiles`] for each [`DEPTH`] of `deep`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn pack(
    side: Side,
    source: *const u16,
    wide: &[usize],
    deep: &[usize],
    panel: *mut u16,
) {
    let is_deep = step(deep) == Some(1);
    let is_wide = !is_deep && step(wide) == Some(1);
    let count = tiles(wide.len());
    for (at, deep) in deep.chunks(DEPTH).enumerate() {
        // SAFETY: by the contract of the function.
        unsafe {
            let target = panel.add(at * count * TILE);
            if is_wide && side == Side::Columns && [wide.len(), deep.len()] == [DEPTH; 2] {
                whole_columns(source.wrapping_add(wide[0]), deep, target);
                continue;
            }
            for (tile, wide) in wide.chunks(SIDE).enumerate() {
                let target = target.add(tile * TILE);
                let [are_rows, is_side] = [!is_wide, side == Side::Rows];
                if are_rows == is_side {
                    if is_deep {
                        along(source, wide, deep, |i, line| store(target, i, line));
                    } else if is_wide {
                        across(source, wide, deep, |i, line| store(target, i, line));
                    } else {
                        gathered(source, wide, deep, |i, line| store(target, i, line));
                    }
                    continue;
                }
                let mut lines = [_mm512_setzero_si512(); SIDE];
                if is_deep {
                    along(source, wide, deep, |i, line| lines[i] = line);
                } else if is_wide {
                    across(source, wide, deep, |i, line| lines[i] = line);
                } else {
                    gathered(source, wide, deep, |i, line| lines[i] = line);
                }
                for (i, line) in transposed(lines).into_iter().enumerate() {
                    store(target, i, line);
                }
            }
        }
    }
}

// What follows has no features of its own, so that it is inlined into functions that have them.

type Lines = [__m512i; SIDE];

/// # Safety
///
/// The tile has the line, and the machine AVX-512.
#[inline(always)]
unsafe fn store(tile: *mut u16, i: usize, line: __m512i) {
    // SAFETY: by the contract of the function.
    unsafe { _mm512_store_si512(tile.add(i * DEPTH).cast(), line) };
}

/// Lines of rows, whose points of `k` are contiguous.
///
/// # Safety
///
/// `source` holds all sums of the two tables, of at most [`SIDE`] and [`DEPTH`] offsets. The
/// machine has AVX-512 F, BW and VL.
#[inline(always)]
unsafe fn along(
    source: *const u16,
    wide: &[usize],
    deep: &[usize],
    mut to: impl FnMut(usize, __m512i),
) {
    let mask = u32::MAX >> (DEPTH - deep.len());
    for i in 0..SIDE {
        // SAFETY: by the contract of the function; what is masked is not read.
        to(i, unsafe {
            match wide.get(i) {
                Some(offset) => {
                    let start = source.wrapping_add(offset + deep[0]);
                    _mm512_maskz_loadu_epi16(mask, start.cast())
                }
                None => _mm512_setzero_si512(),
            }
        });
    }
}

/// Lines of columns, which are contiguous.
///
/// # Safety
///
/// As [`along`].
#[inline(always)]
unsafe fn across(
    source: *const u16,
    wide: &[usize],
    deep: &[usize],
    mut to: impl FnMut(usize, __m512i),
) {
    let mask = u16::MAX >> (SIDE - wide.len());
    // SAFETY: by the contract of the function; what is masked is not read.
    let row = |k: usize| unsafe {
        match deep.get(k) {
            Some(offset) => {
                let start = source.wrapping_add(offset + wide[0]);
                _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, start.cast()))
            }
            None => _mm512_setzero_si512(),
        }
    };
    for i in 0..SIDE {
        // SAFETY: by the contract of the function.
        to(i, unsafe { _mm512_or_si512(row(2 * i), _mm512_slli_epi32::<16>(row(2 * i + 1))) });
    }
}

/// Two tiles of columns, which are contiguous, without an edge.
///
/// # Safety
///
/// As [`along`]; the tiles have room.
#[inline(always)]
unsafe fn whole_columns(source: *const u16, deep: &[usize], tiles: *mut u16) {
    // SAFETY: by the contract of the function.
    unsafe {
        let first = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
        let second = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
        for (i, pair) in deep.chunks_exact(2).enumerate() {
            let [even, odd] =
                [pair[0], pair[1]].map(|k| _mm512_loadu_si512(source.wrapping_add(k).cast()));
            // Of each quarter, the first and the second half.
            let low = _mm512_unpacklo_epi16(even, odd);
            let high = _mm512_unpackhi_epi16(even, odd);
            store(tiles, i, _mm512_permutex2var_epi64(low, first, high));
            store(tiles.add(TILE), i, _mm512_permutex2var_epi64(low, second, high));
        }
    }
}

/// Lines of rows, one number after the other.
///
/// # Safety
///
/// As [`along`].
#[inline(always)]
unsafe fn gathered(
    source: *const u16,
    wide: &[usize],
    deep: &[usize],
    mut to: impl FnMut(usize, __m512i),
) {
    for i in 0..SIDE {
        let mut numbers = [0_u16; DEPTH];
        if let Some(row) = wide.get(i) {
            for (number, point) in numbers.iter_mut().zip(deep) {
                // SAFETY: by the contract of the function.
                *number = unsafe { source.wrapping_add(row + point).read_unaligned() };
            }
        }
        // SAFETY: a line is 32 numbers.
        to(i, unsafe { _mm512_loadu_si512(numbers.as_ptr().cast()) });
    }
}

/// The transposed matrix of pairs.
///
/// # Safety
///
/// The machine has AVX-512.
#[inline(always)]
unsafe fn transposed(lines: Lines) -> Lines {
    // SAFETY: by the contract of the function.
    unsafe {
        let mut x = lines;
        let mut y = lines;
        for i in (0..SIDE).step_by(2) {
            y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
            y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
        }
        // Of four lines, the columns 0 to 3 of each quarter.
        for i in (0..SIDE).step_by(4) {
            x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
            x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
            x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
            x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
        }
        for i in 0..4 {
            // Quarters 0 and 2, then 1 and 3, of lines 0 to 7 and of lines 8 to 15.
            y[i] = _mm512_shuffle_i32x4::<0x88>(x[i], x[4 + i]);
            y[4 + i] = _mm512_shuffle_i32x4::<0xdd>(x[i], x[4 + i]);
            y[8 + i] = _mm512_shuffle_i32x4::<0x88>(x[8 + i], x[12 + i]);
            y[12 + i] = _mm512_shuffle_i32x4::<0xdd>(x[8 + i], x[12 + i]);
        }
        for i in 0..4 {
            x[i] = _mm512_shuffle_i32x4::<0x88>(y[i], y[8 + i]);
            x[8 + i] = _mm512_shuffle_i32x4::<0xdd>(y[i], y[8 + i]);
            x[4 + i] = _mm512_shuffle_i32x4::<0x88>(y[4 + i], y[12 + i]);
            x[12 + i] = _mm512_shuffle_i32x4::<0xdd>(y[4 + i], y[12 + i]);
        }
        x
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever is contiguous, a panel holds the same.
    #[test]
    fn panels_hold_pairs_and_zeros() {
        if !(is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vl")) {
            return;
        }
        for wide in [1, 2, 15, 16, 17, 31, 32] {
            for deep in [1, 2, 31, 32, 33, 64, 77] {
                for [across, along] in [[1, 40], [90, 1], [2, 70], [200, 3]] {
                    let source: Vec<u16> = (0..20_000).collect();
                    let wides: Vec<usize> = (0..wide).map(|i| i * across).collect();
                    let deeps: Vec<usize> = (0..deep).map(|i| 5 + i * along).collect();
                    for side in [Side::Rows, Side::Columns] {
                        let count = tiles(wide) * deep.div_ceil(DEPTH);
                        let mut room = vec![7; count * TILE + DEPTH];
                        let from = room.as_ptr().align_offset(64);
                        let panel = &mut room[from..][..count * TILE];
                        // SAFETY: the source is longer than all sums, the panel as long as it says.
                        unsafe { pack(side, source.as_ptr(), &wides, &deeps, panel.as_mut_ptr()) };
                        for (at, &found) in panel.iter().enumerate() {
                            let (tile, at) = (at / TILE, at % TILE);
                            let (i, k) = match side {
                                Side::Rows => (at / DEPTH, at % DEPTH),
                                Side::Columns => (at / 2 % SIDE, at / DEPTH * 2 + at % 2),
                            };
                            let i = tile % tiles(wide) * SIDE + i;
                            let k = tile / tiles(wide) * DEPTH + k;
                            let is_there = i < wide && k < deep;
                            let want =
                                if is_there { (5 + i * across + k * along) as u16 } else { 0 };
                            assert_eq!(found, want, "{wide} {deep} {across} {along} {i} {k}");
                        }
                    }
                }
            }
        }
    }
}
