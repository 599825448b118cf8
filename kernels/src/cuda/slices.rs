//! How products on tensor cores sum over k.
//!
//! A kernel's [`Tiling`](crate::kernel::Tiling) says in how many slices: of several, each is summed
//! by blocks of its own into a part of a workspace, the first one from the old value where the
//! product accumulates, and a second function, or of skinny products the block that comes last
//! (`tickets`), adds them to zero in ascending order. Within a slice
//! every 1024 points, or 128 where elements are bytes, are a run that accumulators sum, and runs
//! are added to zero in ascending order. The bits of an element therefore depend on k, the tiling
//! and the instructions alone, and not on m and n, however these are sharded.

use std::fmt;

use ir::DType;

use super::index::nest;
use super::loops::Loops;
use super::parameter::Parameter;
use super::scales::ScaleParameters;
use super::text::{Text, element, line};
use super::tickets::tickets;
use crate::kernel::Product;

/// Points of k of a run. Chosen: large block tiles add accumulators only every 16 steps or more.
const RUN: usize = 1024;

/// The same of products of bytes, of whose sums tensor cores keep few bits: those of 128 points, as
/// DeepSeek-V3 has them.
const RUN_OF_BYTES: usize = 128;

/// Threads of a block.
pub(super) const THREADS: u64 = 256;

/// Points of k of a run of a product.
pub(super) fn run(product: &Product) -> usize {
    if product.stored.a.size() == 1 { RUN_OF_BYTES } else { RUN }
}

/// Whether a slice of a product has several runs.
pub(super) fn has_runs(product: &Product) -> bool {
    product.slice() > run(product)
}

/// The parameter that is the workspace of a function that sums slices, behind both operands and the
/// result: there is one where a product has several slices.
pub(super) fn workspace(product: &Product) -> Option<usize> {
    (product.tiling.split > 1).then_some(3)
}

/// Bytes of the workspace that holds the slices of a product.
pub(super) fn bytes(product: &Product) -> u64 {
    let [batch, m, n, _] = product.sizes();
    (product.tiling.split * batch * m * n) as u64 * DType::F32.size()
}

/// The scales of a product, which are behind its workspace and counters.
pub(super) fn scales(product: &Product) -> Option<ScaleParameters> {
    let before = [workspace(product), tickets(product)];
    ScaleParameters::of(product, 3 + before.iter().flatten().count())
}

/// Adds the slices of a product, each in a part of a workspace: one thread per element.
#[derive(Clone, Debug, PartialEq)]
pub struct SliceSum {
    /// The product.
    pub product: Product,
    /// The parameter that is added to each row of the result.
    pub bias: Option<usize>,
    /// The parameter that is added last.
    pub addend: Option<usize>,
}

impl SliceSum {
    pub(super) fn print(&self, parameters: &[Parameter], text: &mut Text) {
        let p = &self.product;
        let loops = Loops::of(p);
        let [batch, m, n, _] = p.sizes();
        let count = batch * m * n;
        line!(text, "const u64 i = (u64)blockIdx.x * {THREADS} + threadIdx.x;");
        line!(text, "if (i >= {count}) return;");
        line!(text, "const u64 n = i % {n}, m = i / {n} % {m}, batch = i / {};", m * n);
        let of_batch = nest(&loops.batch[2], "batch");
        let [of_m, of_n] = [nest(&loops.m[1], "m"), nest(&loops.n[1], "n")];
        line!(text, "const u64 place = ({of_batch}) + ({of_m}) + ({of_n});");
        line!(text, "float sum = 0;");
        line!(text, "UNROLL");
        line!(text, "for (u32 slice = 0; slice < {}; slice += 1) {{", p.tiling.split);
        line!(text, "sum = sum + {}[slice * {count}ULL + i];", parameters[0].name());
        text.end();
        let result = Stored { product: p, added: [self.bias, self.addend], parameters, at: 1 };
        result.print("sum", "n", text);
    }
}

impl fmt::Display for SliceSum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "one thread per element adds {} slices", self.product.tiling.split)
    }
}

/// Prints the tile of the result of a block, and its points of k: the first one and the number of
/// steps: of one slice where there is a workspace for them. Tiles are counted along batch, m and n,
/// and have sizes along m, n and k; k and the slice are counted as the tile is.
pub(super) fn print_block(
    [k, slice]: [usize; 2],
    [batches, rows, columns]: [usize; 3],
    [tile_m, tile_n, tile_k]: [usize; 3],
    workspace: Option<usize>,
    text: &mut Text,
) {
    let (steps, tiles) = (k.div_ceil(tile_k), columns * rows);
    line!(text, "const u64 block_m = (u64)blockIdx.x / {columns} % {rows} * {tile_m};");
    line!(text, "const u64 block_n = (u64)blockIdx.x % {columns} * {tile_n};");
    if workspace.is_none() {
        line!(text, "const u64 batch = (u64)blockIdx.x / {tiles};");
        line!(text, "const u32 first_k = 0, steps = {steps};");
        return;
    }
    line!(text, "const u64 batch = (u64)blockIdx.x / {tiles} % {batches};");
    line!(text, "const u32 slice = blockIdx.x / {};", tiles * batches);
    print_steps([k, slice], tile_k, text);
}

/// Prints the points of k of a slice: the first one and the number of steps.
fn print_steps([k, slice]: [usize; 2], tile_k: usize, text: &mut Text) {
    let (steps, per_slice) = (k.div_ceil(tile_k), slice / tile_k);
    line!(text, "const u32 first_k = slice * {slice}, left = {steps} - slice * {per_slice};");
    line!(text, "const u32 steps = left < {per_slice} ? left : {per_slice};");
}

/// Rows of tiles that are taken together. Chosen: the 132 tiles that run at once then read 8 tiles
/// of one operand and 17 of the other.
const BAND: usize = 8;

/// Prints the tile of the result of that number, `tile`, and its points of k, as [`print_block`]
/// does; tiles of a slice come before those of the next one. Tiles that follow each other share
/// operands: they go down the columns of a band of rows.
pub(super) fn print_tile(
    [k, slice]: [usize; 2],
    [batches, rows, columns]: [usize; 3],
    [tile_m, tile_n, tile_k]: [usize; 3],
    workspace: Option<usize>,
    text: &mut Text,
) {
    let tiles = rows * columns;
    line!(text, "const u32 in_batch = (u32)(tile % {tiles});");
    match workspace {
        Some(_) => {
            line!(text, "const u64 batch = tile / {tiles} % {batches};");
            line!(text, "const u32 slice = (u32)(tile / {});", tiles * batches);
        }
        None => line!(text, "const u64 batch = tile / {tiles};"),
    }
    print_band([rows, columns], [tile_m, tile_n], text);
    match workspace {
        Some(_) => print_steps([k, slice], tile_k, text),
        None => line!(text, "const u32 first_k = 0, steps = {};", k.div_ceil(tile_k)),
    }
}

/// Prints where the tile `in_batch` of a batch is, going down the columns of a band of rows.
pub(super) fn print_band(
    [rows, columns]: [usize; 2],
    [tile_m, tile_n]: [usize; 2],
    text: &mut Text,
) {
    line!(
        text,
        "const u32 band = in_batch / {0} * {BAND}, in_band = in_batch % {0};",
        BAND * columns
    );
    line!(text, "const u32 in_column = {rows} - band < {BAND} ? {rows} - band : {BAND};");
    line!(text, "const u64 block_m = (u64)(band + in_band % in_column) * {tile_m};");
    line!(text, "const u64 block_n = (u64)(in_band / in_column) * {tile_n};");
}

/// How the sums of a product are stored.
pub(super) struct Stored<'a> {
    pub(super) product: &'a Product,
    /// The parameters that are added to each row, and last.
    pub(super) added: [Option<usize>; 2],
    pub(super) parameters: &'a [Parameter],
    /// The parameter that is the result.
    pub(super) at: usize,
}

impl Stored<'_> {
    /// Prints the store of a sum at `place`, in the column of that name.
    pub(super) fn print(&self, sum: &str, column: &str, text: &mut Text) {
        let kept = element(self.product.stored.c);
        line!(text, "{kept} x = Store<{kept}>::of({sum});");
        self.print_added("x", [column, "place"], text);
        line!(text, "{}[place] = x;", self.parameters[self.at].name());
    }

    /// Prints the store of a vector `x` of sums at `place`, the first in column `n` of `columns`:
    /// what is beyond them is left out.
    pub(super) fn print_vector(&self, width: usize, columns: usize, text: &mut Text) {
        let (kept, to) = (element(self.product.stored.c), self.parameters[self.at].name());
        let unroll = |text: &mut Text| {
            line!(text, "UNROLL");
            line!(text, "for (u32 e = 0; e < {width}; e += 1) {{");
        };
        if !columns.is_multiple_of(width) {
            line!(text, "if (n + {width} > {columns}) {{");
            unroll(text);
            line!(text, "if (n + e >= {columns}) continue;");
            self.print_added("x.x[e]", ["n + e", "place + e"], text);
            line!(text, "{to}[place + e] = x.x[e];");
            text.end();
            line!(text, "continue;");
            text.end();
        }
        let [bias, addend] = self.added;
        let added = [("bias", bias, "n"), ("addend", addend, "place")];
        for (name, at, place) in added.into_iter().filter_map(|(n, at, p)| Some((n, at?, p))) {
            let (of, kind) = (self.parameters[at].name(), format!("{kept}, {width}"));
            line!(text, "const Vector<{kind}> {name}s = load_vector<{kind}>({of} + {place});");
            unroll(text);
            self.print_sum("x.x[e]", &format!("{name}s.x[e]"), text);
            text.end();
        }
        line!(text, "store_vector({to} + place, x);");
    }

    /// Prints what is added to an element of the result, in a column and at a place.
    pub(super) fn print_added(&self, x: &str, [column, place]: [&str; 2], text: &mut Text) {
        let [bias, addend] = self.added;
        let added = [bias.map(|at| (at, column)), addend.map(|at| (at, place))];
        for (at, place) in added.into_iter().flatten() {
            self.print_sum(x, &format!("{}[{place}]", self.parameters[at].name()), text);
        }
    }

    fn print_sum(&self, x: &str, other: &str, text: &mut Text) {
        let kept = element(self.product.stored.c);
        let load = format!("Load<{}>::of", element(self.product.dtype));
        line!(text, "{x} = Store<{kept}>::of({load}({x}) + {load}({other}));");
    }
}
