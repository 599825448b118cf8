//! Tiles of AMX. Its intrinsics are not stable, hence assembly.
//!
//! A tile holds 16 rows of 64 bytes. One instruction multiplies 16 rows of 32 numbers of BF16 with
//! as many columns and adds the products to a tile of F32, see [`crate::kernel::Product`].

use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::marker::PhantomData;
use std::sync::OnceLock;

/// Whether this machine has the tiles and the system lets this process use them.
pub(in crate::cpu) fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| has_tiles() && may_use_tiles())
}

fn has_tiles() -> bool {
    const BF16: u32 = 1 << 22;
    const TILES: u32 = 1 << 24;
    if __cpuid_count(0, 0).eax < 7 {
        return false;
    }
    __cpuid_count(7, 0).edx & (BF16 | TILES) == BF16 | TILES
}

/// Asks the system to keep the contents of tiles when it changes threads.
#[cfg(target_os = "linux")]
fn may_use_tiles() -> bool {
    const REQUEST: libc::c_long = 0x1023;
    const CONTENTS_OF_TILES: libc::c_long = 18;
    // SAFETY: the call takes two numbers and changes what the process may do, nothing else.
    unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST, CONTENTS_OF_TILES) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn may_use_tiles() -> bool {
    false
}

/// What `ldtilecfg` reads.
#[repr(C, align(64))]
struct Layout {
    palette: u8,
    start: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Tiles that are laid out on this thread, until this is dropped.
pub(super) struct Tiles {
    /// Not for other threads.
    _here: PhantomData<*mut ()>,
}

impl Tiles {
    /// Lays out eight whole tiles.
    ///
    /// # Safety
    ///
    /// [`is_available`].
    pub(super) unsafe fn lay_out() -> Tiles {
        let mut layout =
            Layout { palette: 1, start: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        layout.row_bytes[..8].fill(64);
        layout.rows[..8].fill(16);
        // SAFETY: by the contract of the function; the layout is valid, and lives during the call.
        unsafe {
            asm!(
                "ldtilecfg [{}]", in(reg) &raw const layout,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, readonly, preserves_flags),
            );
        }
        Tiles { _here: PhantomData }
    }

    /// Adds the products of `steps` steps of panels of 16 · `rows` rows and 16 · `columns` columns
    /// to `c`, whose rows are `row_bytes` apart, or to zeros.
    ///
    /// # Safety
    ///
    /// The panels hold as many tiles for each step, `c` as many numbers; `rows` and `columns` are
    /// one or two; there is a step.
    #[inline(always)]
    pub(super) unsafe fn multiply(
        &self,
        [rows, columns]: [usize; 2],
        steps: usize,
        [a, b]: [*const u8; 2],
        c: *mut f32,
        row_bytes: usize,
        add: bool,
    ) {
        debug_assert!(steps > 0, "a block has a point of `k`");
        // SAFETY: by the contract of the function.
        unsafe {
            match [rows, columns] {
                [2, 2] => two_by_two(steps, a, b, c, row_bytes, add),
                [2, _] => two_by_one(steps, a, b, c, row_bytes, add),
                [_, 2] => one_by_two(steps, a, b, c, row_bytes, add),
                _ => one_by_one(steps, a, b, c, row_bytes, add),
            }
        }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: tiles are laid out.
        unsafe {
            asm!(
                "tilerelease",
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, nomem, preserves_flags),
            );
        }
    }
}

/// A loop over steps: tiles 0 to 3 are sums, 4 and 5 of rows, 6 and 7 of columns.
macro_rules! steps {
    ($name:ident, [$($load:literal)*] [$($zero:literal)*] [$($step:literal)*] [$($store:literal)*]
     $a:literal $b:literal) => {
        /// # Safety
        ///
        /// As [`Tiles::multiply`].
        #[inline(always)]
        unsafe fn $name(
            steps: usize,
            a: *const u8,
            b: *const u8,
            c: *mut f32,
            row_bytes: usize,
            add: bool,
        ) {
            // SAFETY: by the contract of the function; tiles are laid out, and nothing lives in
            // them outside of this.
            unsafe {
                asm!(
                    "test {add:e}, {add:e}",
                    "jz 2f",
                    $($load,)*
                    "jmp 3f",
                    "2:",
                    $($zero,)*
                    "3:",
                    $($step,)*
                    concat!("add {a}, ", $a),
                    concat!("add {b}, ", $b),
                    "dec {steps}",
                    "jnz 3b",
                    $($store,)*
                    a = inout(reg) a => _,
                    b = inout(reg) b => _,
                    steps = inout(reg) steps => _,
                    c = in(reg) c,
                    below = in(reg) c.wrapping_byte_add(16 * row_bytes),
                    row = in(reg) row_bytes,
                    line = in(reg) 64_usize,
                    add = in(reg) u32::from(add),
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}

steps!(two_by_two,
    [
        "tileloadd tmm0, [{c} + {row}]"
        "tileloadd tmm1, [{c} + {row} + 64]"
        "tileloadd tmm2, [{below} + {row}]"
        "tileloadd tmm3, [{below} + {row} + 64]"
    ]
    ["tilezero tmm0" "tilezero tmm1" "tilezero tmm2" "tilezero tmm3"]
    [
        "tileloadd tmm6, [{b} + {line}]"
        "tileloadd tmm4, [{a} + {line}]"
        "tdpbf16ps tmm0, tmm4, tmm6"
        "tileloadd tmm7, [{b} + {line} + 1024]"
        "tdpbf16ps tmm1, tmm4, tmm7"
        "tileloadd tmm5, [{a} + {line} + 1024]"
        "tdpbf16ps tmm2, tmm5, tmm6"
        "tdpbf16ps tmm3, tmm5, tmm7"
    ]
    [
        "tilestored [{c} + {row}], tmm0"
        "tilestored [{c} + {row} + 64], tmm1"
        "tilestored [{below} + {row}], tmm2"
        "tilestored [{below} + {row} + 64], tmm3"
    ]
    "2048" "2048"
);

steps!(two_by_one,
    ["tileloadd tmm0, [{c} + {row}]" "tileloadd tmm2, [{below} + {row}]"]
    ["tilezero tmm0" "tilezero tmm2"]
    [
        "tileloadd tmm6, [{b} + {line}]"
        "tileloadd tmm4, [{a} + {line}]"
        "tdpbf16ps tmm0, tmm4, tmm6"
        "tileloadd tmm5, [{a} + {line} + 1024]"
        "tdpbf16ps tmm2, tmm5, tmm6"
    ]
    ["tilestored [{c} + {row}], tmm0" "tilestored [{below} + {row}], tmm2"]
    "2048" "1024"
);

steps!(one_by_two,
    ["tileloadd tmm0, [{c} + {row}]" "tileloadd tmm1, [{c} + {row} + 64]" "/*{below}*/"]
    ["tilezero tmm0" "tilezero tmm1"]
    [
        "tileloadd tmm6, [{b} + {line}]"
        "tileloadd tmm4, [{a} + {line}]"
        "tdpbf16ps tmm0, tmm4, tmm6"
        "tileloadd tmm7, [{b} + {line} + 1024]"
        "tdpbf16ps tmm1, tmm4, tmm7"
    ]
    ["tilestored [{c} + {row}], tmm0" "tilestored [{c} + {row} + 64], tmm1"]
    "1024" "2048"
);

steps!(one_by_one,
    ["tileloadd tmm0, [{c} + {row}]" "/*{below}*/"]
    ["tilezero tmm0"]
    [
        "tileloadd tmm6, [{b} + {line}]"
        "tileloadd tmm4, [{a} + {line}]"
        "tdpbf16ps tmm0, tmm4, tmm6"
    ]
    ["tilestored [{c} + {row}], tmm0"]
    "1024" "1024"
);
