//! Dot products of pairs, with AVX512-BF16: panels are those of the tiles of AMX.

use std::arch::x86_64::*;

/// Rows of a register tile.
const ROWS: usize = 8;
/// Bytes of a tile of a panel.
const TILE: usize = 1024;

/// Adds the products of `steps` steps of panels of 16 · `rows` rows and 16 · `columns` columns to
/// `c`, whose rows are `row_bytes` apart, or to zeros.
///
/// # Safety
///
/// The machine has AVX512-BF16. The panels hold as many tiles for each step, `c` as many numbers;
/// `rows` and `columns` are one or two.
pub(super) unsafe fn multiply(
    [rows, columns]: [usize; 2],
    steps: usize,
    [a, b]: [*const u8; 2],
    c: *mut f32,
    row_bytes: usize,
    add: bool,
) {
    for row in (0..16 * rows).step_by(ROWS) {
        // SAFETY: by the contract of the function.
        unsafe {
            let a = a.add(row / 16 * TILE + row % 16 * 64);
            let c = c.byte_add(row * row_bytes);
            match columns {
                2 => tile::<2>(steps, [a, b], rows * TILE, c, row_bytes, add),
                _ => tile::<1>(steps, [a, b], rows * TILE, c, row_bytes, add),
            }
        }
    }
}

/// Eight rows and some vectors of columns.
///
/// # Safety
///
/// As [`multiply`], with `a_step` bytes from one step of rows to the next.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
#[allow(clippy::needless_range_loop, reason = "constant bounds keep sums in registers")]
unsafe fn tile<const COLUMNS: usize>(
    steps: usize,
    [mut a, mut b]: [*const u8; 2],
    a_step: usize,
    c: *mut f32,
    row_bytes: usize,
    add: bool,
) {
    // SAFETY: by the contract of the function. The two types of vectors are the same bits.
    unsafe {
        let pairs = |x: __m512i| std::mem::transmute::<__m512i, __m512bh>(x);
        let mut sums = [[_mm512_setzero_ps(); COLUMNS]; ROWS];
        if add {
            for i in 0..ROWS {
                for j in 0..COLUMNS {
                    sums[i][j] = _mm512_loadu_ps(c.byte_add(i * row_bytes).add(16 * j));
                }
            }
        }
        for _ in 0..steps {
            for k in 0..16 {
                let mut column = [pairs(_mm512_setzero_si512()); COLUMNS];
                for j in 0..COLUMNS {
                    column[j] = pairs(_mm512_loadu_si512(b.add(j * TILE + k * 64).cast()));
                }
                for i in 0..ROWS {
                    let pair = a.add(i * 64 + k * 4).cast::<i32>().read_unaligned();
                    let pair = pairs(_mm512_set1_epi32(pair));
                    for j in 0..COLUMNS {
                        sums[i][j] = _mm512_dpbf16_ps(sums[i][j], pair, column[j]);
                    }
                }
            }
            a = a.add(a_step);
            b = b.add(COLUMNS * TILE);
        }
        for i in 0..ROWS {
            for j in 0..COLUMNS {
                _mm512_storeu_ps(c.byte_add(i * row_bytes).add(16 * j), sums[i][j]);
            }
        }
    }
}
