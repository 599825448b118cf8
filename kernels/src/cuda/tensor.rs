//! Products of BF16 and F16 on tensor cores, by `mma.sync` (sm_80 and later).
//!
//! An accumulator starts as zero, or as the old value where the product accumulates; steps of 16
//! along k are added to it in ascending order. Its bits depend on no other size.
//!
//! Versions:
//! 1. block tiles of 128 × 128 × 32 in three stages of `cp.async`, warp tiles of 64 × 32; the
//!    epilogue stores each element alone.

use std::fmt;

use ir::DType;

use super::index::nest;
use super::loops::Loops;
use super::parameter::Parameter;
use super::shared::{Fragments, Operand, SharedTile, copy};
use super::text::{Text, element, line};
use crate::kernel::Product;

/// The block tile: rows and columns of the result, and its extent along k.
const TILE_MN: usize = 128;
const TILE_K: usize = 32;
/// Stages of the pipeline: as many as fit static shared memory.
const STAGES: usize = 3;
/// The warp tile: rows and columns of the result.
const WARP_TILE: [usize; 2] = [64, 32];
/// Elements of a stage of one operand.
const STAGE: usize = TILE_MN * TILE_K;

/// A product, each block tile by one block.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorTile {
    /// What is computed.
    pub product: Product,
    /// The parameter that is added to each row of the result.
    pub bias: Option<usize>,
    /// The parameter that is added last.
    pub addend: Option<usize>,
    /// How each operand is copied to shared memory.
    pub copies: [OperandCopy; 2],
}

/// How an operand is copied to shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OperandCopy {
    /// Whether vectors, and rows of the tile, are along k; else along m or n.
    pub k_major: bool,
    /// Elements of a vector: 8, 4 or 2 by `cp.async`, or 1.
    pub width: usize,
}

/// Whether a product runs on tensor cores.
pub(super) fn fits(p: &Product) -> bool {
    let is_narrow = matches!(p.stored.a, DType::BF16 | DType::F16) && p.stored.a == p.stored.b;
    is_narrow && p.dtype == DType::F32 && p.borders.is_empty() && p.sizes()[3] > 0
}

impl OperandCopy {
    /// The widest vectors of an operand, given its loops over batch, over m or n, and over k.
    fn of(batch: &[[usize; 2]], side: &[[usize; 2]], k: &[[usize; 2]]) -> OperandCopy {
        let (of_side, of_k) = (width(side, &[batch, k]), width(k, &[batch, side]));
        let is_unit = |loops: &[[usize; 2]]| inner(loops).is_some_and(|[_, stride]| stride == 1);
        // Adjacent threads load adjacent elements also where vectors have one.
        let k_major = of_k > of_side || of_k == of_side && (is_unit(k) || !is_unit(side));
        OperandCopy { k_major, width: of_k.max(of_side) }
    }
}

/// The innermost loop of several points.
fn inner(loops: &[[usize; 2]]) -> Option<[usize; 2]> {
    loops.iter().rev().find(|[size, _]| *size > 1).copied()
}

/// The widest vectors along some loops, where buffers are aligned.
fn width(along: &[[usize; 2]], others: &[&[[usize; 2]]]) -> usize {
    let Some([size, 1]) = inner(along) else { return 1 };
    let (last, before) = match along.iter().rposition(|[size, _]| *size > 1) {
        Some(at) => (size, &along[..at]),
        None => return 1,
    };
    let strides = others.iter().flat_map(|loops| loops.iter()).chain(before);
    let strides: Vec<usize> =
        strides.filter(|[size, _]| *size > 1).map(|[_, stride]| *stride).collect();
    let fits = |width: &usize| {
        last.is_multiple_of(*width) && strides.iter().all(|stride| stride.is_multiple_of(*width))
    };
    [8, 4, 2].into_iter().find(fits).unwrap_or(1)
}

/// An operand as its stages are printed.
struct StagedOperand<'a> {
    operand: Operand,
    /// `a` or `b`.
    name: &'a str,
    buffer: String,
    /// `m` or `n`, and its size.
    side: (&'a str, usize),
    /// Loops over that, and over k.
    loops: [&'a [[usize; 2]]; 2],
    copy: OperandCopy,
}

impl TensorTile {
    /// Threads of a block: 2 × 4 warps.
    pub(super) const THREADS: u32 = 256;

    /// The tile of a product that fits, with parameters that are added to it.
    pub(super) fn of(product: &Product, [bias, addend]: [Option<usize>; 2]) -> TensorTile {
        let loops = Loops::of(product);
        let copies = [
            OperandCopy::of(&loops.batch[0], &loops.m[0], &loops.k[0]),
            OperandCopy::of(&loops.batch[1], &loops.n[0], &loops.k[1]),
        ];
        TensorTile { product: product.clone(), bias, addend, copies }
    }

    /// Block tiles along batch, m and n.
    pub(super) fn tiles(&self) -> [usize; 3] {
        let [batch, m, n, _] = self.product.sizes();
        [batch, m.div_ceil(TILE_MN), n.div_ceil(TILE_MN)]
    }

    pub(super) fn print(&self, parameters: &[Parameter], text: &mut Text) {
        let p = &self.product;
        let loops = Loops::of(p);
        let ([_, m, n, k], [_, rows, columns]) = (p.sizes(), self.tiles());
        let [a, b, c] = [0, 1, 2].map(|at: usize| parameters[at].name());
        let kind = element(p.stored.a);
        let operands = [
            (Operand::A, "a", a, ("m", m), [&loops.m[0][..], &loops.k[0]], self.copies[0]),
            (Operand::B, "b", b, ("n", n), [&loops.n[0][..], &loops.k[1]], self.copies[1]),
        ]
        .map(|(operand, name, buffer, side, loops, copy)| StagedOperand {
            operand,
            name,
            buffer,
            side,
            loops,
            copy,
        });
        for name in ["a", "b"] {
            line!(text, "SHARED({kind}, {name}_stages, {});", STAGES * STAGE);
        }
        line!(text, "const u64 block_m = (u64)blockIdx.x / {columns} % {rows} * {TILE_MN};");
        line!(text, "const u64 block_n = (u64)blockIdx.x % {columns} * {TILE_MN};");
        line!(text, "const u64 batch = (u64)blockIdx.x / {};", columns * rows);
        for (name, of) in ["a", "b", "c"].iter().zip(&loops.batch) {
            line!(text, "const u64 batch_{name} = {};", nest(of, "batch"));
        }
        line!(text, "const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;");
        let [warp_m, warp_n] = WARP_TILE;
        line!(text, "const u32 warp_m = warp / {} * {warp_m};", TILE_MN / warp_n);
        line!(text, "const u32 warp_n = warp % {} * {warp_n};", TILE_MN / warp_n);
        line!(text, "float acc[{}][{}][4] = {{}};", warp_m / 16, warp_n / 8);
        if p.accumulate {
            Self::open_accumulators(&loops, [m, n], text);
            line!(text, "acc[i][j][q] = {c}[place];");
            (0..3).for_each(|_| text.end());
        }
        let (steps, ahead) = (k.div_ceil(TILE_K), STAGES - 1);
        line!(text, "for (u64 step = 0; step < {}; step += 1) {{", steps + ahead);
        line!(text, "if (step >= {ahead}) {{");
        line!(text, "cp_async_wait<{}>();", ahead - 1);
        line!(text, "sync_block();");
        text.end();
        line!(text, "if (step < {steps}) {{");
        line!(text, "const u32 stage = (u32)(step % {STAGES}) * {STAGE};");
        operands.iter().for_each(|operand| operand.print_copy(k, text));
        text.end();
        line!(text, "cp_async_commit();");
        line!(text, "if (step < {ahead}) continue;");
        line!(text, "const u32 stage = (u32)((step - {ahead}) % {STAGES}) * {STAGE};");
        self.print_mma(&operands, text);
        text.end();
        self.print_epilogue(&loops, (parameters, [m, n]), text);
    }

    /// Prints the main loop's body: a stage is multiplied.
    fn print_mma(&self, operands: &[StagedOperand<'_>; 2], text: &mut Text) {
        line!(text, "UNROLL");
        line!(text, "for (u32 k = 0; k < {TILE_K}; k += 16) {{");
        line!(text, "u32 a[{}][4], b[{}][4];", WARP_TILE[0] / 16, WARP_TILE[1] / 16);
        for (operand, extent) in operands.iter().zip(WARP_TILE) {
            let StagedOperand { operand: of, name, side: (side, _), copy, .. } = operand;
            let registers = (*name, extent / 16);
            let fragments = Fragments { operand: *of, k_major: copy.k_major, registers };
            let start = format!("{name}_stages + stage");
            fragments.print_ldmatrix(operand.tile(), [&start, &format!("warp_{side}"), "k"], text);
        }
        line!(text, "warp_mma<{}>(acc, a, b);", element(self.product.stored.a));
        text.end();
    }

    /// Opens the loops over a thread's accumulators, with their indices.
    fn open_accumulators(loops: &Loops, [m, n]: [usize; 2], text: &mut Text) {
        for (name, count) in [("i", WARP_TILE[0] / 16), ("j", WARP_TILE[1] / 8), ("q", 4)] {
            line!(text, "UNROLL");
            line!(text, "for (u32 {name} = 0; {name} < {count}; {name} += 1) {{");
        }
        line!(text, "const u64 m = block_m + warp_m + i * 16 + lane / 4 + q / 2 * 8;");
        line!(text, "const u64 n = block_n + warp_n + j * 8 + lane % 4 * 2 + q % 2;");
        line!(text, "if (m >= {m} || n >= {n}) continue;");
        let [of_m, of_n] = [nest(&loops.m[1], "m"), nest(&loops.n[1], "n")];
        line!(text, "const u64 place = batch_c + ({of_m}) + ({of_n});");
    }

    fn print_epilogue(
        &self,
        loops: &Loops,
        (parameters, sizes): (&[Parameter], [usize; 2]),
        text: &mut Text,
    ) {
        let kept = element(self.product.stored.c);
        Self::open_accumulators(loops, sizes, text);
        line!(text, "{kept} x = Store<{kept}>::of(acc[i][j][q]);");
        let added = [self.bias.map(|at| (at, "n")), self.addend.map(|at| (at, "place"))];
        for (at, place) in added.into_iter().flatten() {
            let other = format!("Load<float>::of({}[{place}])", parameters[at].name());
            line!(text, "x = Store<{kept}>::of(Load<float>::of(x) + {other});");
        }
        line!(text, "{}[place] = x;", parameters[2].name());
        (0..3).for_each(|_| text.end());
    }
}

impl StagedOperand<'_> {
    /// A stage, with the dim that vectors are along as its columns.
    fn tile(&self) -> SharedTile {
        match self.copy.k_major {
            true => SharedTile { rows: TILE_MN, columns: TILE_K },
            false => SharedTile { rows: TILE_K, columns: TILE_MN },
        }
    }

    /// Prints the copies of a stage, zeros where the operand ends.
    fn print_copy(&self, k_size: usize, text: &mut Text) {
        let StagedOperand { name, buffer, side: (side, size), copy: of, .. } = self;
        let tile = self.tile();
        tile.open_copies([tile.columns, of.width, TensorTile::THREADS as usize], text);
        let [to_side, to_k] =
            if of.k_major { ["to_row", "to_column"] } else { ["to_column", "to_row"] };
        line!(text, "const u64 {side} = block_{side} + {to_side}, k = step * {TILE_K} + {to_k};");
        line!(text, "const bool is_there = {side} < {size} && k < {k_size};");
        let [of_side, of_k] = [nest(self.loops[0], side), nest(self.loops[1], "k")];
        line!(
            text,
            "const u64 place = is_there ? batch_{name} + ({of_side}) + ({of_k}) : batch_{name};"
        );
        let to = format!("{name}_stages + stage + {}", tile.offset("to_row", "to_column"));
        copy(of.width, [&to, &format!("{buffer} + place"), "is_there"], text);
        text.end();
    }
}

impl fmt::Display for TensorTile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ([warp_m, warp_n], [a, b]) = (WARP_TILE, self.copies);
        write!(f, "block tiles of {TILE_MN}x{TILE_MN}x{TILE_K} in {STAGES} stages, ")?;
        write!(f, "warp tiles of {warp_m}x{warp_n}, a {a}, b {b}")
    }
}

impl fmt::Display for OperandCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let major = if self.k_major { "K-major" } else { "MN-major" };
        write!(f, "{major} by {}", self.width)
    }
}
