//! Matrix products on CUDA cores: tiles in shared memory, sums in the order of the CPU's contract.
//!
//! Versions:
//! 1. block tiles of 64 × 64 × 16 in one stage, thread tiles of 4 × 4, scalar loads.

use std::fmt;

use ir::DType;

use super::aligned::aligned;
use super::arch::{Arch, Target};
use super::function::{Function, Functions};
use super::index::{coordinate_of, nest};
use super::loops::Loops;
use super::parameter::{Buffer, Parameter};
use super::slices::{SliceSum, Stored, slices};
use super::tensor::{self, Elements, TensorTile};
use super::text::{Text, element, line};
use super::tile::Tile;
use super::warpgroup::WarpgroupTile;
use crate::kernel::{Product, Products, Source};

/// Threads of a block.
const THREADS: u32 = 256;
/// The block tile: rows and columns of the result, and its extent along k.
const TILE_MN: usize = 64;
/// Elementwise of `k` that lie in shared memory at a time.
const TILE_K: usize = 16;
/// The thread tile: rows and columns of the result.
const THREAD_TILE: usize = 4;

/// A product, each block tile by one block.
#[derive(Clone, Debug, PartialEq)]
pub struct ProductTile {
    /// What is computed.
    pub product: Product,
    /// The parameter that is added to each row of the result.
    pub bias: Option<usize>,
    /// The parameter that is added last.
    pub addend: Option<usize>,
}

impl ProductTile {
    /// Block tiles along batch, m and n.
    fn tiles(&self) -> [usize; 3] {
        let [batch, m, n, _] = self.product.sizes();
        [batch, m.div_ceil(TILE_MN), n.div_ceil(TILE_MN)]
    }
}

/// Adds the functions of a product of two buffers; with others that are added to it.
pub(super) fn function(
    what: &str,
    product: &Product,
    [a, b, c]: [Parameter; 3],
    others: [Option<Parameter>; 2],
    (all, target): (&mut Functions, Option<Target>),
) {
    let by_warpgroups = target.is_some_and(|target| {
        target.arch == Arch::Sm90a && tensor::fits(product, target) == Some(Elements::Halves)
    });
    let (product, [a, b]) = match by_warpgroups {
        true => aligned(what, product, [a, b], all),
        false => (product.clone(), [a, b]),
    };
    let product = &product;
    let with_others = |mut parameters: Vec<Parameter>| {
        let added = others.map(|parameter| {
            parameter.map(|parameter| {
                parameters.push(parameter);
                parameters.len() - 1
            })
        });
        (parameters, added)
    };
    let (parameters, added) = with_others(vec![a, b, c]);
    let BlockTiles { tile, tiles, threads, is_split } = BlockTiles::of(product, added, target);
    let tiles: u64 = tiles.iter().map(|tiles| *tiles as u64).product();
    let mut function = Function {
        what: what.to_owned(),
        parameters,
        offsets: Vec::new(),
        grid: tiles,
        threads,
        tile,
    };
    if !is_split {
        all.functions.push(function);
        return;
    }
    let [batch, m, n, _] = product.sizes();
    let workspace =
        Parameter { buffer: Buffer::Workspace(all.workspaces.len()), dtype: DType::F32 };
    all.workspaces.push((slices(product) * batch * m * n) as u64 * DType::F32.size());
    function.parameters = vec![a, b, c, workspace];
    function.grid *= slices(product) as u64;
    let (parameters, [bias, addend]) = with_others(vec![workspace, c]);
    let sum = SliceSum { product: product.clone(), bias, addend };
    all.functions.extend([function, sum.function(what, parameters)]);
}

/// The block tiles of a product.
struct BlockTiles {
    tile: Tile,
    /// Along batch, m and n.
    tiles: [usize; 3],
    threads: u32,
    /// Whether each slice of k is summed by a block of its own.
    is_split: bool,
}

impl BlockTiles {
    /// Those of a product, given the numbers of parameters that are added to it.
    fn of(product: &Product, added: [Option<usize>; 2], target: Option<Target>) -> BlockTiles {
        let [bias, addend] = added;
        let fitting = target.and_then(|target| Some((target.arch, tensor::fits(product, target)?)));
        let Some((arch, elements)) = fitting else {
            let tile = ProductTile { product: product.clone(), bias, addend };
            let tiles = tile.tiles();
            return BlockTiles {
                tile: Tile::Product(tile),
                tiles,
                threads: THREADS,
                is_split: false,
            };
        };
        if arch == Arch::Sm90a && elements == Elements::Halves {
            let tile = WarpgroupTile::of(product, added);
            let (tiles, threads) = (tile.tiles(), tile.threads());
            let is_split = tile.workspace.is_some();
            return BlockTiles { tile: Tile::Warpgroup(tile), tiles, threads, is_split };
        }
        let tile = TensorTile::of(product, elements, added);
        let (tiles, threads, is_split) = (tile.tiles(), tile.threads(), tile.workspace.is_some());
        BlockTiles { tile: Tile::Tensor(tile), tiles, threads, is_split }
    }
}

/// Several products, and the programs on their results.
pub(super) fn functions(
    what: &str,
    products: &Products,
    inputs: &[Parameter],
    outputs: &[Parameter],
    (all, target): (&mut Functions, Option<Target>),
) {
    let mut beside = products.parts.len();
    for (at, part) in products.parts.iter().enumerate() {
        let operand = |number: usize| inputs[number];
        let operands = [operand(part.a), operand(part.b), outputs[at]];
        let added = [part.bias, part.addend].map(|number| number.map(operand));
        let what_part = &format!("{what}: part {at}");
        function(what_part, &part.product, operands, added, (all, target));
        let Some(then) = &part.then else { continue };
        let read: Vec<Parameter> = then
            .inputs
            .iter()
            .map(|source| match source {
                Source::Operand(number) => inputs[*number],
                Source::Result(number) => outputs[*number],
            })
            .collect();
        let mut written: Vec<Parameter> =
            outputs[at..].iter().take(usize::from(part.in_place)).copied().collect();
        let more = part.beside().len();
        written.extend(&outputs[beside..beside + more]);
        beside += more;
        super::rows::functions(&format!("{what}: then {at}"), &then.rows, &read, &written, all);
    }
}

impl ProductTile {
    pub(super) fn print(&self, parameters: &[Parameter], text: &mut Text) {
        let p = &self.product;
        let loops = Loops::of(p);
        let ([_, m, n, k], [_, rows, columns]) = (p.sizes(), self.tiles());
        let compute = element(p.dtype);
        let [a, b, c] = [0, 1, 2].map(|at: usize| parameters[at].name());
        line!(text, "SHARED({compute}, a_tile, {});", TILE_K * (TILE_MN + 1));
        line!(text, "SHARED({compute}, b_tile, {});", TILE_K * (TILE_MN + 1));
        line!(text, "const u64 block_m = (u64)blockIdx.x / {columns} % {rows} * {TILE_MN};");
        line!(text, "const u64 block_n = (u64)blockIdx.x % {columns} * {TILE_MN};");
        line!(text, "const u64 batch = (u64)blockIdx.x / {};", columns * rows);
        for (name, of) in ["a", "b", "c"].iter().zip(&loops.batch) {
            line!(text, "const u64 batch_{name} = {};", nest(of, "batch"));
        }
        let count = TILE_MN / THREAD_TILE;
        line!(text, "const u32 thread_m = threadIdx.x / {count} * {THREAD_TILE};");
        line!(text, "const u32 thread_n = threadIdx.x % {count} * {THREAD_TILE};");
        line!(text, "{compute} acc[{THREAD_TILE}][{THREAD_TILE}];");
        self.print_start(&loops, &c, [m, n], text);
        line!(text, "for (u64 first = 0; first < {k}; first += {}) {{", Product::K_BLOCK);
        line!(text, "const u64 end = first + {0} < {k} ? first + {0} : {k};", Product::K_BLOCK);
        line!(text, "{compute} chain[{THREAD_TILE}][{THREAD_TILE}] = {{}};");
        line!(text, "for (u64 at = first; at < end; at += {TILE_K}) {{");
        self.print_copy(&loops, [&a, &b], [m, n], text);
        line!(text, "sync_block();");
        line!(text, "const u32 deep = end - at < {TILE_K} ? (u32)(end - at) : {TILE_K};");
        line!(text, "for (u32 d = 0; d < deep; d += 1) {{");
        line!(text, "for (u32 i = 0; i < {THREAD_TILE}; i += 1) {{");
        line!(text, "for (u32 j = 0; j < {THREAD_TILE}; j += 1) {{");
        let row = TILE_MN + 1;
        line!(
            text,
            "chain[i][j] = fma_of(a_tile[d * {row} + thread_m + i], \
             b_tile[d * {row} + thread_n + j], chain[i][j]);"
        );
        (0..3).for_each(|_| text.end());
        line!(text, "sync_block();");
        text.end();
        line!(text, "for (u32 i = 0; i < {THREAD_TILE}; i += 1) {{");
        line!(
            text,
            "for (u32 j = 0; j < {THREAD_TILE}; j += 1) acc[i][j] = acc[i][j] + chain[i][j];"
        );
        text.end();
        text.end();
        self.print_epilogue(&loops, (parameters, [m, n]), text);
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
        [a, b]: [&str; 2],
        [m_size, n_size]: [usize; 2],
        text: &mut Text,
    ) {
        let compute = element(self.product.dtype);
        let row = TILE_MN + 1;
        line!(text, "for (u32 i = threadIdx.x; i < {}; i += {THREADS}) {{", TILE_MN * TILE_K);
        line!(text, "const u64 m = block_m + i / {TILE_K}, k = at + i % {TILE_K};");
        let place =
            format!("batch_a + ({}) + ({})", nest(&loops.m[0], "m"), nest(&loops.k[0], "k"));
        line!(text, "{compute} x = 0;");
        line!(text, "if (m < {m_size} && k < end) x = Load<{compute}>::of({a}[{place}]);");
        line!(text, "a_tile[i % {TILE_K} * {row} + i / {TILE_K}] = x;");
        text.end();
        line!(text, "for (u32 i = threadIdx.x; i < {}; i += {THREADS}) {{", TILE_MN * TILE_K);
        line!(text, "const u64 n = block_n + i % {TILE_MN}, k = at + i / {TILE_MN};");
        line!(text, "{compute} x = 0;");
        line!(text, "if (n < {n_size} && k < end) {{");
        let place =
            format!("batch_b + ({}) + ({})", nest(&loops.n[0], "n"), nest(&loops.k[1], "k"));
        line!(text, "u64 place = {place};");
        line!(text, "bool is_there = true;");
        self.borders(text);
        line!(text, "if (is_there) x = Load<{compute}>::of({b}[place]);");
        text.end();
        line!(text, "b_tile[i / {TILE_MN} * {row} + i % {TILE_MN}] = x;");
        text.end();
    }

    /// Prints the place of an element of dims with zeros around them.
    fn borders(&self, text: &mut Text) {
        let p = &self.product;
        let n_sizes: Vec<usize> = p.n.iter().map(|l| l.size).collect();
        let k_sizes: Vec<usize> = p.k.iter().map(|l| l.size).collect();
        for (at, border) in p.borders.iter().enumerate() {
            let n = coordinate_of(&n_sizes, border.n, "n");
            let k = coordinate_of(&k_sizes, border.k, "k");
            let (stride, dilation, before) = (border.stride, border.dilation, border.before);
            line!(
                text,
                "const i64 p{at} = (i64)({n}) * {stride} + (i64)({k}) * {dilation} - ({before}LL);"
            );
            let (spread, size, step) = (border.spread, border.size, border.step);
            line!(
                text,
                "is_there = is_there && p{at} >= 0 && p{at} % {spread} == 0 && p{at} / {spread} < \
                 {size};"
            );
            line!(text, "place += is_there ? (u64)(p{at} / {spread}) * {step} : 0;");
        }
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
        write!(f, "thread tiles of {THREAD_TILE}x{THREAD_TILE}")
    }
}
