//! Matrix products on CUDA cores: tiles in shared memory, sums in the order of the CPU's contract.
//!
//! Versions:
//! 1. block tiles of 64 × 64 × 16 in one stage, thread tiles of 4 × 4, scalar loads.

use std::fmt;

use ir::op::Operands;

use super::grouped::{Along, Grouped, Pair};
use super::index::nest;
use super::loops::{Loops, print_borders};
use super::parameter::Parameter;
use super::scales::ScaleParameters;
use super::slices::Stored;
use super::text::{Text, element, line};
use crate::kernel::Product;

/// Threads of a block.
pub(super) const THREADS: u32 = 256;
/// The block tile: rows and columns of the result, and its extent along k.
const TILE_MN: usize = 64;
/// Elementwise of `k` that lie in shared memory at a time.
pub(super) const TILE_K: usize = 16;
/// The thread tile: rows and columns of the result.
pub(super) const THREAD_TILE: usize = 4;
/// Elements from one point of k to the next in shared memory: one more than there are, so that
/// those of one row or column lie in different banks.
pub(super) const PITCH: usize = TILE_MN + 1;
/// Columns of each of two weights that take turns in a block tile: half of a thread's.
const RUN: usize = THREAD_TILE / 2;

/// A product, each block tile by one block.
#[derive(Clone, Debug, PartialEq)]
pub struct ProductTile {
    /// What is computed.
    pub product: Product,
    /// The parameter that is added to each row of the result.
    pub bias: Option<usize>,
    /// The parameter that is added last.
    pub addend: Option<usize>,
    /// The parameters that are scales: what codes are worth is multiplied.
    pub scales: Option<ScaleParameters>,
    /// Whether it is one of the rows of experts.
    pub grouped: Option<Grouped>,
}

/// Rows of the block tile.
pub(super) const ROWS: usize = TILE_MN;

impl ProductTile {
    /// Block tiles along batch, m and n.
    pub(super) fn tiles(&self) -> [usize; 3] {
        let [batch, m, n, _] = self.product.sizes();
        let columns = n.div_ceil(self.columns());
        match self.grouped.map(|grouped| grouped.along) {
            // The rows of a tile say which expert is theirs.
            Some(Along::Rows { .. }) => [1, m.div_ceil(TILE_MN), columns],
            Some(Along::Contracted { .. }) | None => [batch, m.div_ceil(TILE_MN), columns],
        }
    }

    /// Columns of the result of a block tile.
    fn columns(&self) -> usize {
        Grouped::columns(self.grouped, TILE_MN)
    }
}

impl ProductTile {
    pub(super) fn print(&self, parameters: &[Parameter], text: &mut Text) {
        let p = &self.product;
        let loops = Loops::of(p);
        let ([_, m, n, k], [_, rows, columns]) = (p.sizes(), self.tiles());
        let compute = element(p.dtype);
        let [a, b, c] = [0, 1, 2].map(|at: usize| parameters[at].name());
        line!(text, "SHARED({compute}, a_tile, {});", TILE_K * PITCH);
        line!(text, "SHARED({compute}, b_tile, {});", TILE_K * PITCH);
        match self.grouped {
            None => {
                line!(
                    text,
                    "const u64 block_m = (u64)blockIdx.x / {columns} % {rows} * {TILE_MN};"
                );
                line!(text, "const u64 block_n = (u64)blockIdx.x % {columns} * {TILE_MN};");
                line!(text, "const u64 batch = (u64)blockIdx.x / {};", columns * rows);
            }
            Some(grouped) => {
                line!(text, "const u64 tile = blockIdx.x;");
                let tile = [TILE_MN, self.columns(), TILE_K];
                grouped.print_tile(p, [rows, columns], tile, (parameters, "return"), text);
            }
        }
        for (name, of) in ["a", "b", "c"].iter().zip(&loops.batch) {
            line!(text, "const u64 batch_{name} = {};", nest(of, "batch"));
        }
        let count = TILE_MN / THREAD_TILE;
        line!(text, "const u32 thread_m = threadIdx.x / {count} * {THREAD_TILE};");
        line!(text, "const u32 thread_n = threadIdx.x % {count} * {THREAD_TILE};");
        line!(text, "{compute} acc[{THREAD_TILE}][{THREAD_TILE}];");
        self.print_start(&loops, &c, [m, n], text);
        let (from, to) = match self.grouped {
            None => ("0", k.to_string()),
            Some(_) => ("first_k", "end_k".to_owned()),
        };
        line!(text, "for (u64 first = {from}; first < {to}; first += {}) {{", Product::K_BLOCK);
        line!(text, "const u64 end = first + {0} < {to} ? first + {0} : {to};", Product::K_BLOCK);
        line!(text, "{compute} chain[{THREAD_TILE}][{THREAD_TILE}] = {{}};");
        line!(text, "for (u64 at = first; at < end; at += {TILE_K}) {{");
        self.print_copy(&loops, ([&a, &b], parameters), [m, n], text);
        line!(text, "sync_block();");
        line!(text, "const u32 deep = end - at < {TILE_K} ? (u32)(end - at) : {TILE_K};");
        line!(text, "for (u32 d = 0; d < deep; d += 1) {{");
        Self::print_chain(compute, text);
        text.end();
        line!(text, "sync_block();");
        text.end();
        line!(text, "for (u32 i = 0; i < {THREAD_TILE}; i += 1) {{");
        line!(
            text,
            "for (u32 j = 0; j < {THREAD_TILE}; j += 1) acc[i][j] = acc[i][j] + chain[i][j];"
        );
        text.end();
        text.end();
        match self.grouped.and_then(|grouped| grouped.pair) {
            None => self.print_epilogue(&loops, (parameters, [m, n]), text),
            Some(pair) => self.print_pair(pair, parameters, text),
        }
    }

    /// Prints the multiply-adds of a point of k, whose elements a thread loads once.
    fn print_chain(compute: &str, text: &mut Text) {
        line!(text, "{compute} x[{THREAD_TILE}], y[{THREAD_TILE}];");
        line!(text, "for (u32 i = 0; i < {THREAD_TILE}; i += 1) {{");
        for (own, name) in [("x", "m"), ("y", "n")] {
            let tile = if own == "x" { "a_tile" } else { "b_tile" };
            line!(text, "{own}[i] = {tile}[d * {PITCH} + thread_{name} + i];");
        }
        text.end();
        line!(text, "for (u32 i = 0; i < {THREAD_TILE}; i += 1) {{");
        line!(text, "for (u32 j = 0; j < {THREAD_TILE}; j += 1) {{");
        line!(text, "chain[i][j] = fma_of(x[i], y[j], chain[i][j]);");
        (0..2).for_each(|_| text.end());
    }

    /// Prints what becomes of two products: of a row, the 16 lanes of half a warp have two columns
    /// each.
    fn print_pair(&self, pair: Pair, parameters: &[Parameter], text: &mut Text) {
        let ([_, _, n, _], compute) = (self.product.sizes(), element(self.product.dtype));
        let (kept, columns) = (Pair::kept(&self.product), self.columns());
        line!(text, "for (u32 i = 0; i < {THREAD_TILE}; i += 1) {{");
        line!(text, "const u64 m = block_m + thread_m + i;");
        pair.print_row(compute, parameters, text);
        line!(text, "for (u32 j = 0; j < {RUN}; j += 1) {{");
        line!(text, "const u64 n = block_n + thread_n / 2 + j;");
        let outer = pair.outer(n, parameters);
        pair.print_values(compute, ["acc[i][j]", &format!("acc[i][j + {RUN}]"), &outer], text);
        line!(text, "if (n >= {n}) continue;");
        for (at, value) in pair.results() {
            let to = parameters[at].name();
            line!(text, "{to}[m * {n} + n] = Store<{kept}>::of({value});");
        }
        text.end();
        let part = (&format!("block_n / {columns}")[..], self.tiles()[2]);
        pair.print_part((TILE_MN / THREAD_TILE) as u32, part, parameters, text);
        text.end();
    }

    /// Opens the loops over the thread's accumulators, with their indices.
    fn open_accumulators(loops: &Loops, [m, n]: [usize; 2], text: &mut Text) {
        line!(text, "for (u32 i = 0; i < {THREAD_TILE}; i += 1) {{");
        line!(text, "for (u32 j = 0; j < {THREAD_TILE}; j += 1) {{");
        line!(text, "const u64 m = block_m + thread_m + i, n = block_n + thread_n + j;");
        line!(text, "if (m >= {m} || n >= {n}) continue;");
        let place =
            format!("batch_c + ({}) + ({})", nest(&loops.m[1], "m"), nest(&loops.n[1], "n"));
        line!(text, "const u64 place = {place};");
    }

    fn print_start(&self, loops: &Loops, c: &str, sizes: [usize; 2], text: &mut Text) {
        line!(text, "for (u32 i = 0; i < {THREAD_TILE}; i += 1) {{");
        line!(text, "for (u32 j = 0; j < {THREAD_TILE}; j += 1) acc[i][j] = 0;");
        text.end();
        if self.product.accumulate {
            Self::open_accumulators(loops, sizes, text);
            line!(text, "acc[i][j] = {c}[place];");
            text.end();
            text.end();
        }
    }

    /// Prints the copies of a tile of both operands to shared memory.
    fn print_copy(
        &self,
        loops: &Loops,
        ([a, b], parameters): ([&str; 2], &[Parameter]),
        [m_size, n_size]: [usize; 2],
        text: &mut Text,
    ) {
        let compute = element(self.product.dtype);
        line!(text, "for (u32 i = threadIdx.x; i < {}; i += {THREADS}) {{", TILE_MN * TILE_K);
        line!(text, "const u64 m = block_m + i / {TILE_K}, k = at + i % {TILE_K};");
        let place =
            format!("batch_a + ({}) + ({})", nest(&loops.m[0], "m"), nest(&loops.k[0], "k"));
        line!(text, "{compute} x = 0;");
        let worth = |side: usize| match self.scales {
            None => String::new(),
            Some(scales) => {
                let scale = scales.scale(side, ["m", "n"][side], "k / 128", parameters);
                format!(" * {scale}")
            }
        };
        let value = format!("Load<{compute}>::of({a}[{place}]){}", worth(0));
        line!(text, "if (m < {m_size} && k < end) x = {value};");
        let is_rounded = self.product.operands == Operands::Tf32;
        let x = if is_rounded { "tf32_of(x)" } else { "x" };
        line!(text, "a_tile[i % {TILE_K} * {PITCH} + i / {TILE_K}] = {x};");
        text.end();
        line!(text, "for (u32 i = threadIdx.x; i < {}; i += {THREADS}) {{", TILE_MN * TILE_K);
        let local = format!("(i % {TILE_MN})");
        let (column, b) = match self.grouped.and_then(|grouped| grouped.pair) {
            None => (format!("i % {TILE_MN}"), b.to_owned()),
            Some(pair) => (Pair::column(&local, RUN), pair.weight(b, &local, RUN, parameters)),
        };
        line!(text, "const u64 n = block_n + {column}, k = at + i / {TILE_MN};");
        line!(text, "{compute} x = 0;");
        line!(text, "if (n < {n_size} && k < end) {{");
        let place =
            format!("batch_b + ({}) + ({})", nest(&loops.n[0], "n"), nest(&loops.k[1], "k"));
        line!(text, "u64 place = {place};");
        line!(text, "bool is_there = true;");
        let sizes: Vec<usize> = self.product.n.iter().map(|l| l.size).collect();
        print_borders(&self.product, ("n", &sizes), "k", text);
        line!(text, "if (is_there) x = Load<{compute}>::of({b}[place]){};", worth(1));
        text.end();
        line!(text, "b_tile[i / {TILE_MN} * {PITCH} + i % {TILE_MN}] = {x};");
        text.end();
    }

    fn print_epilogue(
        &self,
        loops: &Loops,
        (parameters, sizes): (&[Parameter], [usize; 2]),
        text: &mut Text,
    ) {
        Self::open_accumulators(loops, sizes, text);
        let added = [self.bias, self.addend];
        let stored = Stored { product: &self.product, added, parameters, at: 2 };
        stored.print("acc[i][j]", "n", text);
        text.end();
        text.end();
    }
}

impl fmt::Display for ProductTile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block tiles of {TILE_MN}x{TILE_MN}x{TILE_K} in one stage, ")?;
        write!(f, "thread tiles of {THREAD_TILE}x{THREAD_TILE}")?;
        self.grouped.map_or(Ok(()), |grouped| grouped.fmt(f))
    }
}
