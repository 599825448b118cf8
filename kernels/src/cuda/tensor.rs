//! Products of BF16 and F16 by instructions that multiply matrices of a warp (sm_80 and later).
//!
//! An element starts as zero, or as the old value when the product accumulates; steps of 16 points
//! of `k` are added to it in ascending order. No other size enters its bits.
//!
//! Versions:
//! 1. tiles of 128 × 128 × 32, three of them in flight, 64 × 32 results of a warp; results are
//!    stored one by one.

use std::fmt;

use ir::DType;

use super::function::{Function, Parameter};
use super::index::nest;
use super::product::Loops;
use super::text::{Text, element, line};
use super::tile::Tile;
use crate::kernel::Product;

/// Threads of a block: 2 × 4 warps.
const THREADS: u32 = 256;
/// Rows and columns of a tile.
const SIDE: usize = 128;
/// Points of `k` of a tile.
const DEPTH: usize = 32;
/// Tiles in shared memory: all that it holds without being asked for more.
const STAGES: usize = 3;
/// Rows and columns of a warp.
const WARP: [usize; 2] = [64, 32];
/// Elements of an operand's tile.
const TILE: usize = SIDE * DEPTH;

/// A product in tiles, each of one block.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorTile {
    /// What is computed.
    pub product: Product,
    /// The parameter that is added to each row of the result.
    pub bias: Option<usize>,
    /// The parameter that is added last.
    pub addend: Option<usize>,
    /// How each operand is read.
    pub reads: [Read; 2],
}

/// How an operand is read: so many elements at once along one of its dims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Read {
    /// Whether they lie along `k`, not along rows or columns of the result.
    pub along_k: bool,
    /// How many there are: 8, 4 or 2 that go past registers, or 1.
    pub width: usize,
}

/// Whether a product is one of these.
pub(super) fn fits(p: &Product) -> bool {
    let is_narrow = matches!(p.stored.a, DType::BF16 | DType::F16) && p.stored.a == p.stored.b;
    is_narrow && p.dtype == DType::F32 && p.borders.is_empty() && p.sizes()[3] > 0
}

impl Read {
    /// The widest read of an operand: its loops over batch, over rows or columns, and over `k`.
    fn of(batch: &[[usize; 2]], side: &[[usize; 2]], k: &[[usize; 2]]) -> Read {
        let (of_side, of_k) = (width(side, &[batch, k]), width(k, &[batch, side]));
        let is_unit = |loops: &[[usize; 2]]| inner(loops).is_some_and(|[_, stride]| stride == 1);
        // Neighbours are read by neighbouring threads even where each is read alone.
        let along_k = of_k > of_side || of_k == of_side && (is_unit(k) || !is_unit(side));
        Read { along_k, width: of_k.max(of_side) }
    }
}

/// The innermost loop of several points.
fn inner(loops: &[[usize; 2]]) -> Option<[usize; 2]> {
    loops.iter().rev().find(|[size, _]| *size > 1).copied()
}

/// How many elements at once can be read along some loops, where buffers are aligned.
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

/// The function of a product of two buffers, with others that are added to it.
pub(super) fn function(
    what: &str,
    product: &Product,
    parameters: Vec<Parameter>,
    [bias, addend]: [Option<usize>; 2],
) -> Function {
    let loops = Loops::of(product);
    let reads = [
        Read::of(&loops.batch[0], &loops.m[0], &loops.k[0]),
        Read::of(&loops.batch[1], &loops.n[0], &loops.k[1]),
    ];
    let tile = TensorTile { product: product.clone(), bias, addend, reads };
    Function {
        what: what.to_owned(),
        parameters,
        offsets: Vec::new(),
        grid: tile.tiles().iter().map(|tiles| *tiles as u64).product(),
        threads: THREADS,
        tile: Tile::Tensor(tile),
    }
}

/// An operand as its tiles are printed.
struct Operand<'a> {
    /// `a` or `b`.
    name: &'a str,
    /// The buffer.
    buffer: String,
    /// `m` or `n`, and how many there are.
    side: (&'a str, usize),
    /// Loops over that, and over `k`.
    loops: [&'a [[usize; 2]]; 2],
    read: Read,
}

impl TensorTile {
    /// Tiles of batch, rows and columns.
    fn tiles(&self) -> [usize; 3] {
        let [batch, m, n, _] = self.product.sizes();
        [batch, m.div_ceil(SIDE), n.div_ceil(SIDE)]
    }

    pub(super) fn print(&self, parameters: &[Parameter], text: &mut Text) {
        let p = &self.product;
        let loops = Loops::of(p);
        let ([_, m, n, k], [_, rows, columns]) = (p.sizes(), self.tiles());
        let [a, b, c] = [0, 1, 2].map(|at: usize| parameters[at].name());
        let kind = element(p.stored.a);
        let operands = [
            ("a", a, ("m", m), [&loops.m[0][..], &loops.k[0]], self.reads[0]),
            ("b", b, ("n", n), [&loops.n[0][..], &loops.k[1]], self.reads[1]),
        ]
        .map(|(name, buffer, side, loops, read)| Operand {
            name,
            buffer,
            side,
            loops,
            read,
        });
        for name in ["a", "b"] {
            line!(text, "SHARED({kind}, {name}_tiles, {});", STAGES * TILE);
        }
        line!(text, "const u64 first_m = (u64)blockIdx.x / {columns} % {rows} * {SIDE};");
        line!(text, "const u64 first_n = (u64)blockIdx.x % {columns} * {SIDE};");
        line!(text, "const u64 batch = (u64)blockIdx.x / {};", columns * rows);
        for (name, of) in ["a", "b", "c"].iter().zip(&loops.batch) {
            line!(text, "const u64 batch_{name} = {};", nest(of, "batch"));
        }
        line!(text, "const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;");
        line!(text, "const u32 own_m = warp / {} * {};", SIDE / WARP[1], WARP[0]);
        line!(text, "const u32 own_n = warp % {} * {};", SIDE / WARP[1], WARP[1]);
        line!(text, "float sums[{}][{}][4] = {{}};", WARP[0] / 16, WARP[1] / 8);
        if p.accumulate {
            Self::points(&loops, [m, n], text);
            line!(text, "sums[i][j][q] = {c}[place];");
            (0..3).for_each(|_| text.end());
        }
        let (steps, ahead) = (k.div_ceil(DEPTH), STAGES - 1);
        line!(text, "for (u64 step = 0; step < {}; step += 1) {{", steps + ahead);
        line!(text, "if (step >= {ahead}) {{");
        line!(text, "copies_wait<{}>();", ahead - 1);
        line!(text, "meet_block();");
        text.end();
        line!(text, "if (step < {steps}) {{");
        line!(text, "const u32 stage = (u32)(step % {STAGES}) * {TILE};");
        operands.iter().for_each(|operand| operand.print_fill(k, text));
        text.end();
        line!(text, "copies_commit();");
        line!(text, "if (step < {ahead}) continue;");
        line!(text, "const u32 stage = (u32)((step - {ahead}) % {STAGES}) * {TILE};");
        self.print_multiply(&operands, text);
        text.end();
        self.print_results(&loops, (parameters, [m, n]), text);
    }

    /// Prints what a warp makes of a tile.
    fn print_multiply(&self, operands: &[Operand<'_>; 2], text: &mut Text) {
        let [a, b] = operands;
        line!(text, "UNROLL");
        line!(text, "for (u32 k = 0; k < {DEPTH}; k += 16) {{");
        line!(text, "u32 a[{}][4], b[{}][4];", WARP[0] / 16, WARP[1] / 16);
        // The four matrices of 8 × 8 are those of rows first in `a`, those of `k` first in `b`.
        let [side_first, k_first] = ["lane / 8 % 2 * 8", "lane / 16 * 8"];
        a.print_load(WARP[0] / 16, [side_first, k_first], text);
        b.print_load(WARP[1] / 16, [k_first, side_first], text);
        line!(text, "warp_multiply<{}>(sums, a, b);", element(self.product.stored.a));
        text.end();
    }

    /// Opens the loops over a thread's results, with their indices.
    fn points(loops: &Loops, [m, n]: [usize; 2], text: &mut Text) {
        for (name, count) in [("i", WARP[0] / 16), ("j", WARP[1] / 8), ("q", 4)] {
            line!(text, "UNROLL");
            line!(text, "for (u32 {name} = 0; {name} < {count}; {name} += 1) {{");
        }
        line!(text, "const u64 m = first_m + own_m + i * 16 + lane / 4 + q / 2 * 8;");
        line!(text, "const u64 n = first_n + own_n + j * 8 + lane % 4 * 2 + q % 2;");
        line!(text, "if (m >= {m} || n >= {n}) continue;");
        let [of_m, of_n] = [nest(&loops.m[1], "m"), nest(&loops.n[1], "n")];
        line!(text, "const u64 place = batch_c + ({of_m}) + ({of_n});");
    }

    fn print_results(
        &self,
        loops: &Loops,
        (parameters, sizes): (&[Parameter], [usize; 2]),
        text: &mut Text,
    ) {
        let kept = element(self.product.stored.c);
        Self::points(loops, sizes, text);
        line!(text, "{kept} x = Store<{kept}>::of(sums[i][j][q]);");
        let added = [self.bias.map(|at| (at, "n")), self.addend.map(|at| (at, "place"))];
        for (at, place) in added.into_iter().flatten() {
            let other = format!("Load<float>::of({}[{place}])", parameters[at].name());
            line!(text, "x = Store<{kept}>::of(Load<float>::of(x) + {other});");
        }
        line!(text, "{}[place] = x;", parameters[2].name());
        (0..3).for_each(|_| text.end());
    }
}

impl Operand<'_> {
    /// Prints the copies of a tile. Where there is nothing, zeros are copied.
    fn print_fill(&self, k_size: usize, text: &mut Text) {
        let Operand { name, buffer, side: (side, size), read: Read { along_k, width }, .. } = self;
        let each = if *along_k { DEPTH } else { SIDE } / width;
        line!(text, "UNROLL");
        line!(text, "for (u32 i = threadIdx.x; i < {}; i += {THREADS}) {{", TILE / width);
        let (across, along) = (format!("i / {each}"), format!("i % {each} * {width}"));
        let (of_side, of_k) = if *along_k { (across, along) } else { (along, across) };
        line!(text, "const u32 to_{side} = {of_side}, to_k = {of_k};");
        line!(text, "const u64 {side} = first_{side} + to_{side}, k = step * {DEPTH} + to_k;");
        line!(text, "const bool is_there = {side} < {size} && k < {k_size};");
        let [of_side, of_k] = [nest(self.loops[0], side), nest(self.loops[1], "k")];
        line!(
            text,
            "const u64 place = is_there ? batch_{name} + ({of_side}) + ({of_k}) : batch_{name};"
        );
        let to = self.place(&format!("to_{side}"), "to_k");
        let to = format!("{name}_tiles + stage + {to}");
        match width {
            1 => line!(text, "copy_one({to}, {buffer} + place, is_there);"),
            _ => line!(text, "copy_early<{}>({to}, {buffer} + place, is_there);", width * 2),
        }
        text.end();
    }

    /// Where an element lies in a tile, such that eight rows of eight of them, that are read at
    /// once, lie in different banks.
    fn place(&self, side: &str, k: &str) -> String {
        if self.read.along_k {
            format!("({side} * {DEPTH} + (({k} / 8 ^ {side} / 2 % 4) * 8) + {k} % 8)")
        } else {
            format!("({k} * {SIDE} + (({side} / 8 ^ {k} % 8) * 8) + {side} % 8)")
        }
    }

    /// Prints the loads of a warp's matrices; of a row that a lane names, the first element's
    /// offset by side and by `k`.
    fn print_load(&self, count: usize, [side, k]: [&str; 2], text: &mut Text) {
        let Operand { name, side: (of_side, _), read, .. } = self;
        // A row of a matrix goes along what is contiguous; lanes number the rows.
        let (side, k) = match read.along_k {
            true => (format!("{side} + lane % 8"), k.to_owned()),
            false => (side.to_owned(), format!("{k} + lane % 8")),
        };
        let part = if read.along_k { "load_matrices" } else { "load_turned" };
        line!(text, "UNROLL");
        line!(text, "for (u32 i = 0; i < {count}; i += 1) {{");
        line!(text, "const u32 from = own_{of_side} + i * 16 + {side}, from_k = k + {k};");
        line!(text, "{part}({name}[i], {name}_tiles + stage + {});", self.place("from", "from_k"));
        text.end();
    }
}

impl fmt::Display for TensorTile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b] = self.reads;
        write!(f, "tiles of {SIDE}x{SIDE}x{DEPTH} by warps, {STAGES} in flight, ")?;
        write!(f, "a {a}, b {b}")
    }
}

impl fmt::Display for Read {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let along = if self.along_k { "k" } else { "its side" };
        write!(f, "by {} along {along}", self.width)
    }
}
