//! Products on tensor cores, by `mma.sync` (sm_80 and later): of BF16 and F16; of F32 rounded to
//! TF32, where the product reads that; of F8E4M3 and F8E5M2 (sm_89, and sm_100, which converts them
//! to F16 first; those of sm_90a are multiplied by `warpgroup`).
//!
//! Shared memory, `ldmatrix` and the fragments of instructions count in units of two bytes; an
//! instruction takes 16 of them along k. An element of F32 is two units, two bytes are one.
//! Operands of F32 that are not contiguous along k are copied element by element, which transposes
//! them. Bytes that are not contiguous along k, or an odd number of them, form no units: such
//! products run on CUDA cores.
//!
//! An accumulator starts as zero, or as the old value where the product accumulates; steps of 16
//! along k are added to it in ascending order, runs and slices of k as in `slices`. Its bits depend
//! on no other size.
//!
//! A convolution is a product of which an operand, the image, has borders: copies to shared memory
//! compute where an element lies, and write zeros beyond the image (implicit GEMM, as cuDNN's).
//! Its gradients are convolutions too. NHWC images are copied by vectors along the channels, which
//! are then the innermost loop of k; of NCHW images adjacent threads copy adjacent elements of a
//! row.
//!
//! Versions:
//! 1. block tiles of 128 × 128 × 32 in three stages of `cp.async`, warp tiles of 64 × 32; the
//!    epilogue stores each element alone.
//! 2. skinny products, such as those of decoding, stream the weights through block tiles of
//!    16 × 64 × 64 or 16 × 32 × 64, one block per slice of k.
//! 3. TF32 and FP8 in the same tiles; adjacent threads copy F32 along k also where it is strided.
//! 4. one block per slice of k also of wide products, where they have fewer tiles than there are
//!    multiprocessors.
//! 5. quads exchange pairs of columns, and store whole sectors (`quads`).
//! 6. convolutions of BF16 and F16; loops of an operand that go on where others end are one.
//! 7. sums of runs of bytes are multiplied by scales.
//! 8. of skinny products the last block of a tile adds its slices (`tickets`).

use std::fmt;

use ir::DType;
use ir::op::Operands;
use ir::target::Arch;

use super::grouped::{Along, Grouped, Pair};
use super::index::nest;
use super::loops::{Loops, joined, print_borders};
use super::parameter::Parameter;
use super::quads::QuadStore;
use super::scales::{ScaleParameters, with_run};
use super::shared::{Fragments, Operand, SharedTile, copy};
use super::slices::{Stored, has_runs, print_block, run, scales, workspace};
use super::text::{Text, element, line};
use super::tickets::{Ticket, tickets};
use super::tiling::SKINNY_ROWS;
use crate::border::Border;
use crate::kernel::{Family, LoopAB, LoopABC, LoopAC, LoopBC, Product, StoredTypes};

/// Fewest blocks of a skinny product that have 64 columns. Chosen: two per multiprocessor.
const SKINNY_BLOCKS: usize = 256;

/// The sizes of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockShape {
    /// The block tile: rows and columns of the result, and its extent along k.
    pub tile: [usize; 3],
    /// The warp tile: rows and columns of the result.
    pub warp_tile: [usize; 2],
    /// Stages of the pipeline: as many as fit static shared memory.
    pub stages: usize,
}

/// Rows of wide block tiles.
pub(super) const ROWS: usize = 128;

impl BlockShape {
    const WIDE: BlockShape = BlockShape { tile: [ROWS, 128, 32], warp_tile: [64, 32], stages: 3 };
    const SKINNY: [BlockShape; 2] = [
        BlockShape { tile: [SKINNY_ROWS, 64, 64], warp_tile: [16, 16], stages: 4 },
        BlockShape { tile: [SKINNY_ROWS, 32, 64], warp_tile: [16, 16], stages: 7 },
    ];

    fn of(product: &Product) -> BlockShape {
        let [batch, _, n, _] = product.sizes();
        let [wider, narrower] = BlockShape::SKINNY;
        let blocks = batch * n.div_ceil(64) * product.tiling.split;
        match product.tiling.family {
            Family::Skinny if blocks < SKINNY_BLOCKS => narrower,
            Family::Skinny => wider,
            Family::Wide => BlockShape::WIDE,
        }
    }

    fn threads(self) -> usize {
        let [m, n, _] = self.tile;
        m / self.warp_tile[0] * (n / self.warp_tile[1]) * 32
    }
}

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
    /// What both operands' elements are.
    pub elements: Elements,
    /// The sizes of a block, along k in units.
    pub shape: BlockShape,
    /// The workspace's parameter, where each slice of k is summed by a block of its own.
    pub workspace: Option<usize>,
    /// The parameters that are scales.
    pub scales: Option<ScaleParameters>,
    /// The parameter that is the counters of tiles, where the last block of one adds its slices.
    pub tickets: Option<usize>,
    /// How sums are stored to the result, or to the workspace where another function adds slices.
    pub store: QuadStore,
    /// Whether it is a product of the rows of experts.
    pub grouped: Option<Grouped>,
    /// The operand that is an image. As the first one it is so of this product alone, which has the
    /// operands of its kernel in the other order.
    pub image: Option<Operand>,
}

/// What the elements of both operands are to tensor cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Elements {
    /// BF16 or F16.
    Halves,
    /// F32, rounded to TF32.
    Tf32,
    /// F8E4M3 and F8E5M2.
    Bytes,
}

impl Elements {
    /// What operands of a product are, if tensor cores of an architecture multiply them.
    fn of(p: &Product, arch: Arch) -> Option<Elements> {
        let StoredTypes { a, b, .. } = p.stored;
        let are = |types: [DType; 2]| types.contains(&a) && types.contains(&b);
        let is_rounded = p.operands == Operands::Tf32;
        if are([DType::BF16, DType::F16]) && a == b {
            return Some(Elements::Halves);
        }
        if are([DType::F8E4M3, DType::F8E5M2]) && arch >= Arch::Sm89 {
            return Some(Elements::Bytes);
        }
        (are([DType::F32, DType::F32]) && is_rounded).then_some(Elements::Tf32)
    }

    /// The loops of a product in units: sizes and strides of k, and strides of the others; none
    /// where the operands are no matrices of units.
    fn units(self, p: &Product) -> Option<Loops> {
        let mut loops = Loops::of(p);
        if self == Elements::Halves {
            return Some(loops);
        }
        let [a, b, _] = &mut loops.batch;
        let ([of_m, _], [of_n, _]) = (&mut loops.m, &mut loops.n);
        for along in [a, b, of_m, of_n] {
            self.convert_strides(along)?;
        }
        for along in &mut loops.k {
            let inner = along.iter().rposition(|[size, _]| *size > 1);
            let adjacent = inner.filter(|at| along[*at][1] == 1);
            match (self, adjacent) {
                (_, Some(at)) => {
                    self.convert_strides(&mut along[..at])?;
                    along[at][0] = self.in_units(along[at][0])?;
                }
                // Each element is a run of two units.
                (Elements::Tf32, None) => {
                    self.convert_strides(along)?;
                    along.push([2, 1]);
                }
                (Elements::Halves | Elements::Bytes, None) => return None,
            }
        }
        Some(loops)
    }

    /// Counts strides of loops in units; none where these are not whole.
    fn convert_strides(self, loops: &mut [[usize; 2]]) -> Option<()> {
        for [_, stride] in loops.iter_mut().filter(|[size, _]| *size > 1) {
            *stride = self.in_units(*stride)?;
        }
        Some(())
    }

    /// Elements in units, where they are whole ones.
    pub(super) fn in_units(self, count: usize) -> Option<usize> {
        match self {
            Elements::Halves => Some(count),
            Elements::Tf32 => Some(count * 2),
            Elements::Bytes => count.is_multiple_of(2).then_some(count / 2),
        }
    }
}

/// How an operand is copied to shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OperandCopy {
    /// Whether vectors, and rows of the tile, are along k; else along m or n.
    pub k_major: bool,
    /// Elements of a vector: 8, 4 or 2 by `cp.async`, or 1.
    pub width: usize,
}

/// The store of a slice to the workspace, by the columns of the result.
pub(super) fn slice_store(columns: usize) -> QuadStore {
    QuadStore { dtype: DType::F32, width: if columns.is_multiple_of(2) { 2 } else { 1 } }
}

/// Whether a product runs on tensor cores, and what the elements of its operands are to them.
pub(super) fn fits(p: &Product, arch: Arch) -> Option<Elements> {
    let is_summed = p.dtype == DType::F32 && p.sizes()[3] > 0;
    let elements = Elements::of(p, arch).filter(|_| is_summed)?;
    // Borders count in elements.
    let has_units = p.borders.is_empty() || elements == Elements::Halves;
    elements.units(p).filter(|_| has_units).map(|_| elements)
}

/// A product with the loops over an image's channels innermost, where these are contiguous.
fn with_channels_last(product: &Product) -> Product {
    let mut p = product.clone();
    let borders = |of: fn(&Border) -> usize| p.borders.iter().map(of).collect::<Vec<usize>>();
    let (of_k, of_n) = (borders(|border| border.k), borders(|border| border.n));
    let channels = |all: &mut dyn Iterator<Item = [usize; 2]>, windows: &[usize]| {
        let is_it = |(at, l): (usize, [usize; 2])| l[1] == 1 && l[0] > 1 && !windows.contains(&at);
        all.enumerate().position(is_it).filter(|_| !windows.is_empty())
    };
    if let Some(from) = channels(&mut p.k.iter().map(|l| [l.size, l.b]), &of_k) {
        let channels = p.k.remove(from);
        p.k.push(channels);
        let moved = p.borders.iter_mut().filter(|border| border.k > from);
        moved.for_each(|border| border.k -= 1);
    }
    if let Some(from) = channels(&mut p.n.iter().map(|l| [l.size, l.b]), &of_n) {
        let channels = p.n.remove(from);
        p.n.push(channels);
        let moved = p.borders.iter_mut().filter(|border| border.n > from);
        moved.for_each(|border| border.n -= 1);
    }
    p
}

/// The product of an image and kernels, in place of that of kernels and an image: where channels of
/// the result are contiguous, so that rows are. Loops of borders along n are along m then.
pub(super) fn with_image_first(p: &Product) -> Option<Product> {
    let unit = |along: &mut dyn DoubleEndedIterator<Item = [usize; 2]>| {
        along.rev().find(|[size, _]| *size > 1).is_some_and(|[_, stride]| stride == 1)
    };
    let is_last = unit(&mut p.m.iter().map(|l| [l.size, l.c]));
    if p.borders.is_empty() || !is_last || unit(&mut p.n.iter().map(|l| [l.size, l.c])) {
        return None;
    }
    let turned = |l: &LoopABC| LoopABC { size: l.size, a: l.b, b: l.a, c: l.c };
    Some(Product {
        batch: p.batch.iter().map(turned).collect(),
        m: p.n.iter().map(|l| LoopAC { size: l.size, a: l.b, c: l.c }).collect(),
        n: p.m.iter().map(|l| LoopBC { size: l.size, b: l.a, c: l.c }).collect(),
        k: p.k.iter().map(|l| LoopAB { size: l.size, a: l.b, b: l.a }).collect(),
        stored: StoredTypes { a: p.stored.b, b: p.stored.a, ..p.stored },
        ..p.clone()
    })
}

impl OperandCopy {
    /// The widest vectors of an operand, given its loops over batch, over m or n, and over k.
    pub(super) fn of(batch: &[[usize; 2]], side: &[[usize; 2]], k: &[[usize; 2]]) -> OperandCopy {
        let (of_side, of_k) = (width(side, &[batch, k]), width(k, &[batch, side]));
        let is_unit = |loops: &[[usize; 2]]| inner(loops).is_some_and(|[_, stride]| stride == 1);
        // Adjacent threads load adjacent elements also where vectors have one.
        let k_major = of_k > of_side || of_k == of_side && (is_unit(k) || !is_unit(side));
        OperandCopy { k_major, width: of_k.max(of_side) }
    }

    /// The same of an image, given its loops over batch, over the pixels of the result, and over k.
    /// Dims with borders have no vectors: where they start differs from tap to tap.
    fn of_image(
        p: &Product,
        batch: &[[usize; 2]],
        n: &[[usize; 2]],
        k: &[[usize; 2]],
    ) -> OperandCopy {
        let steps: Vec<[usize; 2]> = p.borders.iter().map(|border| [2, border.step]).collect();
        let (of_n, of_k) = (width(n, &[batch, k, &steps]), width(k, &[batch, n, &steps]));
        // Adjacent threads load adjacent elements where vectors have one.
        let run = |loops: &[[usize; 2]], step: &dyn Fn(usize) -> Option<usize>| {
            let Some(at) = loops.iter().rposition(|[size, _]| *size > 1) else { return 1 };
            let [size, stride] = loops[at];
            if step(at).unwrap_or(stride) == 1 { size } else { 1 }
        };
        let along_n = run(n, &|at| p.borders.iter().find(|b| b.n == at).map(|b| b.stride * b.step));
        let along_k =
            run(k, &|at| p.borders.iter().find(|b| b.k == at).map(|b| b.dilation * b.step));
        OperandCopy { k_major: (of_k, along_k) > (of_n, along_n), width: of_k.max(of_n) }
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

/// The loops of a product in units, as few as there can be. Those of an image are numbered by its
/// borders.
pub(super) fn joined_loops(p: &Product, elements: Elements, image: Option<Operand>) -> Loops {
    let mut loops = elements.units(p).expect("the product fits");
    let ([of_a, of_b], [m, c_m], [n, c_n]) = (&mut loops.k, &mut loops.m, &mut loops.n);
    [c_m, c_n].into_iter().for_each(|of| *of = joined(of));
    for (operand, along) in [(Operand::A, [of_a, m]), (Operand::B, [of_b, n])] {
        if image != Some(operand) {
            along.into_iter().for_each(|of| *of = joined(of));
        }
    }
    loops
}

/// Elements at whose multiples all rows of a result start, eight at most, where their elements are
/// adjacent. Those of several loops end there too.
fn alignment_of_rows(loops: &Loops) -> usize {
    let columns = &loops.n[1];
    let Some(last) = columns.iter().rposition(|[size, _]| *size > 1) else { return 1 };
    let [size, stride] = columns[last];
    if stride != 1 {
        return 1;
    }
    let pieces = columns[..last].iter().filter(|[size, _]| *size > 1);
    let ends: Vec<usize> = pieces.clone().map(|_| size).collect();
    let others = loops.batch[2].iter().chain(&loops.m[1]).filter(|[size, _]| *size > 1);
    let starts = others.chain(pieces).map(|[_, stride]| *stride);
    let all: Vec<usize> = starts.chain(ends).collect();
    [8, 4, 2].into_iter().find(|of| all.iter().all(|at| at.is_multiple_of(*of))).unwrap_or(1)
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
    /// Rows or columns of the block tile, and of the warp tile.
    extents: [usize; 2],
    shape: BlockShape,
    /// The product whose borders it has.
    image: Option<&'a Product>,
    /// Of the operand that two weights take turns in, both.
    pair: Option<(Pair, &'a [Parameter])>,
    /// Where k ends.
    end: String,
}

impl TensorTile {
    /// The tile of a product that fits, with parameters that are added to it.
    pub(super) fn of(
        product: &Product,
        elements: Elements,
        [bias, addend]: [Option<usize>; 2],
        grouped: Option<Grouped>,
    ) -> TensorTile {
        let product = with_channels_last(product);
        let has_image = !product.borders.is_empty();
        let is_alone = bias.is_none() && addend.is_none() && grouped.is_none();
        let (product, image) = match with_image_first(&product).filter(|_| is_alone) {
            Some(turned) => (turned, Some(Operand::A)),
            None => (product, has_image.then_some(Operand::B)),
        };
        let loops = joined_loops(&product, elements, image);
        let copies = [(Operand::A, &loops.m[0]), (Operand::B, &loops.n[0])].map(|(of, side)| {
            let at = usize::from(of == Operand::B);
            let (batch, k) = (&loops.batch[at], &loops.k[at]);
            match image == Some(of) {
                true => OperandCopy::of_image(&product, batch, side, k),
                false => OperandCopy::of(batch, side, k),
            }
        });
        let shape = BlockShape::of(&product);
        let (workspace, tickets) = (workspace(&product), tickets(&product));
        let (tiles, columns) = (shape.warp_tile[1] / 8, product.sizes()[2]);
        let tiles = Grouped::columns(grouped, tiles);
        let store = match (workspace, tickets) {
            (Some(_), None) => slice_store(columns),
            _ => QuadStore::of(product.stored.c, tiles, alignment_of_rows(&loops)),
        };
        let scales = scales(&product);
        TensorTile {
            product,
            bias,
            addend,
            copies,
            elements,
            shape,
            workspace,
            tickets,
            scales,
            store,
            grouped,
            image,
        }
    }

    /// Columns of the result of a block tile.
    pub(super) fn columns(&self) -> usize {
        Grouped::columns(self.grouped, self.shape.tile[1])
    }

    /// Columns of each of two weights that take turns in a block tile: half of a warp's, so that a
    /// thread has the same of both.
    pub(super) fn run(&self) -> usize {
        self.shape.warp_tile[1] / 2
    }

    /// Parts of the gradient of the gate of a row: one for each warp that has some of it.
    pub(super) fn parts(&self) -> usize {
        self.tiles()[2] * self.shape.tile[1] / self.shape.warp_tile[1]
    }

    /// Threads of a block.
    pub(super) fn threads(&self) -> u32 {
        self.shape.threads() as u32
    }

    /// Block tiles along batch, m and n.
    pub(super) fn tiles(&self) -> [usize; 3] {
        let [batch, m, n, _] = self.product.sizes();
        let (tile_m, columns) = (self.shape.tile[0], n.div_ceil(self.columns()));
        match self.grouped.map(|grouped| grouped.along) {
            // The rows of a tile say which expert is theirs.
            Some(Along::Rows { .. }) => [1, m.div_ceil(tile_m), columns],
            Some(Along::Contracted { .. }) | None => [batch, m.div_ceil(tile_m), columns],
        }
    }

    pub(super) fn print(&self, parameters: &[Parameter], text: &mut Text) {
        let p = &self.product;
        let loops = joined_loops(p, self.elements, self.image);
        let BlockShape { tile: [tile_m, tile_n, tile_k], stages, .. } = self.shape;
        let ([_, m, n, _], [warp_m, warp_n]) = (p.sizes(), self.shape.warp_tile);
        let k = loops.k[0].iter().map(|[size, _]| size).product();
        let operands = self.operands(&loops, parameters);
        for (name, extent) in [("a", tile_m), ("b", tile_n)] {
            line!(text, "SHARED({}, {name}_stages, {});", self.unit(), stages * extent * tile_k);
        }
        let units = |points| self.elements.in_units(points).expect("slices are whole units");
        let per_run = units(run(p)) / tile_k;
        self.print_tile(k, parameters, text);
        for (name, of) in ["a", "b", "c"].iter().zip(&loops.batch) {
            line!(text, "const u64 batch_{name} = {};", nest(of, "batch"));
        }
        line!(text, "const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;");
        line!(text, "const u32 warp_m = warp / {} * {warp_m};", tile_n / warp_n);
        line!(text, "const u32 warp_n = warp % {} * {warp_n};", tile_n / warp_n);
        let registers = format!("[{}][{}][4]", warp_m / 16, warp_n / 8);
        line!(text, "float acc{registers} = {{}};");
        // Of bytes the old value would lose bits among the accumulators.
        let is_of_bytes = self.elements == Elements::Bytes;
        let is_summed = is_of_bytes || has_runs(p);
        if is_summed {
            line!(text, "float total{registers} = {{}};");
        }
        if p.accumulate {
            let to = if is_of_bytes { "total" } else { "acc" };
            self.print_old(&loops, [m, n], to, &parameters[2].name(), text);
        }
        let ahead = stages - 1;
        line!(text, "for (u32 step = 0; step < steps + {ahead}; step += 1) {{");
        line!(text, "if (step >= {ahead}) {{");
        line!(text, "cp_async_wait<{}>();", ahead - 1);
        line!(text, "sync_block();");
        text.end();
        line!(text, "if (step < steps) {{");
        line!(text, "const u32 stage = step % {stages};");
        operands.iter().for_each(|operand| operand.print_copy(text));
        text.end();
        line!(text, "cp_async_commit();");
        line!(text, "if (step < {ahead}) continue;");
        line!(text, "const u32 stage = (step - {ahead}) % {stages};");
        if is_summed {
            line!(text, "if (step > {ahead} && (step - {ahead}) % {per_run} == 0) {{");
            let before = format!("(step - {ahead}) / {per_run} - 1");
            self.print_sum(("total", &before), parameters, text);
            text.end();
        }
        self.print_mma(&operands, text);
        text.end();
        if is_summed {
            let last = format!("(steps - 1) / {per_run}");
            self.print_sum(("acc", &last), parameters, text);
        }
        match self.grouped.and_then(|grouped| grouped.pair) {
            None => self.print_epilogue(&loops, (parameters, [m, n]), text),
            Some(pair) => self.print_pair(pair, parameters, text),
        }
    }

    /// Prints the tile of a block, and its units of k, of `k`.
    fn print_tile(&self, k: usize, parameters: &[Parameter], text: &mut Text) {
        let (p, [tile_m, _, tile_k]) = (&self.product, self.shape.tile);
        match self.grouped {
            None => {
                let slice = [k, self.elements.in_units(p.slice()).unwrap_or(k)];
                print_block(slice, self.tiles(), self.shape.tile, self.workspace, text);
            }
            Some(grouped) => {
                let [_, rows, columns] = self.tiles();
                let tile = [tile_m, self.columns(), tile_k];
                line!(text, "const u64 tile = blockIdx.x;");
                grouped.print_tile(p, [rows, columns], tile, (parameters, "return"), text);
            }
        }
    }

    /// The operands as their stages are printed.
    fn operands<'a>(
        &'a self,
        loops: &'a Loops,
        parameters: &'a [Parameter],
    ) -> [StagedOperand<'a>; 2] {
        let pair = self.grouped.and_then(|grouped| grouped.pair);
        let k: usize = loops.k[0].iter().map(|[size, _]| size).product();
        let end = if self.grouped.is_some() { "end_k".to_owned() } else { k.to_string() };
        let [_, m, n, _] = self.product.sizes();
        let [tile_m, tile_n, _] = self.shape.tile;
        let [warp_m, warp_n] = self.shape.warp_tile;
        let of_a = (Operand::A, "a", ("m", m), [&loops.m[0][..], &loops.k[0]], [tile_m, warp_m]);
        let of_b = (Operand::B, "b", ("n", n), [&loops.n[0][..], &loops.k[1]], [tile_n, warp_n]);
        let mut at = 0..;
        [of_a, of_b].map(|(operand, name, side, loops, extents)| {
            let at: usize = at.next().unwrap_or_default();
            StagedOperand {
                operand,
                name,
                buffer: self.buffer(&parameters[at]),
                side,
                loops,
                copy: self.copies[at],
                extents,
                shape: self.shape,
                image: (self.image == Some(operand)).then_some(&self.product),
                pair: pair.filter(|_| at == 1).map(|pair| (pair, parameters)),
                end: end.clone(),
            }
        })
    }

    /// The type of units.
    fn unit(&self) -> &'static str {
        match self.elements {
            Elements::Halves => element(self.product.stored.a),
            Elements::Tf32 | Elements::Bytes => "u16",
        }
    }

    /// The address of an operand's units.
    fn buffer(&self, parameter: &Parameter) -> String {
        match self.elements {
            Elements::Halves => parameter.name(),
            Elements::Tf32 | Elements::Bytes => format!("(const u16*){}", parameter.name()),
        }
    }

    /// Prints the addition of accumulators to the sum of runs, to where it goes, given the number
    /// of the run in its slice.
    fn print_sum(&self, (to, run_of_slice): (&str, &str), of: &[Parameter], text: &mut Text) {
        self.open_registers(QuadStore { dtype: DType::F32, width: 1 }, text);
        if let Some(scales) = &self.scales {
            let [_, m, n, _] = self.product.sizes();
            let per_run = self.elements.in_units(run(&self.product)).unwrap_or(1);
            line!(text, "const u64 m = block_m + warp_m + i * 16 + lane / 4 + q / 2 * 8;");
            line!(text, "const u64 n = block_n + warp_n + j * 8 + lane % 4 * 2 + q % 2;");
            let run = format!("first_k / {per_run} + {run_of_slice}");
            scales.print([m - 1, n - 1], &run, of, text);
        }
        let sum = with_run("total[i][j][q]", "acc[i][j][q]", self.scales.is_some());
        line!(text, "{to}[i][j][q] = {sum};");
        if to != "acc" {
            line!(text, "acc[i][j][q] = 0;");
        }
        (0..3).for_each(|_| text.end());
    }

    /// Prints the main loop's body: a stage is multiplied.
    fn print_mma(&self, operands: &[StagedOperand<'_>; 2], text: &mut Text) {
        // Bytes that are converted to F16 take twice the registers, too many for two steps at once.
        let is_of_bytes = self.elements == Elements::Bytes;
        line!(text, "{}", if is_of_bytes { "NO_UNROLL" } else { "UNROLL" });
        let (tile_k, [warp_m, warp_n]) = (self.shape.tile[2], self.shape.warp_tile);
        line!(text, "for (u32 k = 0; k < {tile_k}; k += 16) {{");
        line!(text, "u32 a[{}][4], b[{}][4];", warp_m / 16, warp_n / 16);
        for operand in operands {
            let StagedOperand { operand: of, name, side: (side, _), copy, extents, .. } = operand;
            let registers = (*name, extents[1] / 16);
            let fragments = Fragments { operand: *of, k_major: copy.k_major, registers };
            let start = operand.stage();
            fragments.print_ldmatrix(operand.tile(), [&start, &format!("warp_{side}"), "k"], text);
        }
        let [of_a, of_b] = [self.product.stored.a, self.product.stored.b].map(element);
        match self.elements {
            Elements::Halves => line!(text, "warp_mma<{of_a}>(acc, a, b);"),
            Elements::Bytes => line!(text, "warp_mma<{of_a}, {of_b}>(acc, a, b);"),
            Elements::Tf32 => {
                for (name, count) in [("a", warp_m / 4), ("b", warp_n / 4)] {
                    line!(text, "UNROLL");
                    line!(text, "for (u32 i = 0; i < {count}; i += 1) {{");
                    line!(text, "round_to_tf32({name}[i / 4][i % 4]);");
                    text.end();
                }
                line!(text, "warp_mma<tf32>(acc, a, b);");
            }
        }
        text.end();
    }

    /// Opens the loops over a thread's accumulators, `j` over the first tiles of vectors.
    fn open_registers(&self, store: QuadStore, text: &mut Text) {
        let [warp_m, warp_n] = self.shape.warp_tile;
        let of_row = store.width.min(2);
        for (name, count, step) in
            [("i", warp_m / 16, 1), ("j", warp_n / 8, store.tiles()), ("q", 4, of_row)]
        {
            line!(text, "UNROLL");
            line!(text, "for (u32 {name} = 0; {name} < {count}; {name} += {step}) {{");
        }
    }

    /// Prints the indices of a vector, and its place in the result.
    fn print_place(store: QuadStore, loops: &Loops, [m, n]: [usize; 2], text: &mut Text) {
        line!(text, "const u64 m = block_m + warp_m + i * 16 + lane / 4 + q / 2 * 8;");
        line!(text, "const u64 n = block_n + warp_n + j * 8 + {};", store.column());
        line!(text, "if (m >= {m} || n >= {n}) continue;");
        let [of_m, of_n] = [nest(&loops.m[1], "m"), nest(&loops.n[1], "n")];
        line!(text, "const u64 place = batch_c + ({of_m}) + ({of_n});");
    }

    /// How what a result holds is loaded, where it is.
    pub(super) fn old_values(&self, loops: &Loops) -> Option<QuadStore> {
        let loads = QuadStore::of(DType::F32, 1, alignment_of_rows(loops));
        self.product.accumulate.then_some(loads)
    }

    /// Prints the loads of what a result holds, which is of F32.
    fn print_old(&self, loops: &Loops, sizes: [usize; 2], to: &str, buffer: &str, text: &mut Text) {
        let Some(loads) = self.old_values(loops) else { return };
        self.open_registers(loads, text);
        if self.workspace.is_some() {
            line!(text, "if (slice > 0) continue;");
        }
        Self::print_place(loads, loops, sizes, text);
        match loads.width {
            1 => line!(text, "{to}[i][j][q] = {buffer}[place];"),
            width => {
                let columns = sizes[1];
                if !columns.is_multiple_of(width) {
                    line!(text, "if (n + {width} > {columns}) {{");
                    line!(text, "{to}[i][j][q] = {buffer}[place];");
                    line!(text, "continue;");
                    text.end();
                }
                line!(
                    text,
                    "const Vector<float, 2> old = load_vector<float, 2>({buffer} + place);"
                );
                for e in [0, 1] {
                    line!(text, "{to}[i][j][q + {e}] = old.x[{e}];");
                }
            }
        }
        (0..3).for_each(|_| text.end());
    }

    fn print_epilogue(
        &self,
        loops: &Loops,
        (parameters, sizes): (&[Parameter], [usize; 2]),
        text: &mut Text,
    ) {
        if let Some(at) = self.workspace {
            self.print_slice(loops, (&parameters[at].name(), sizes), text);
            if self.tickets.is_none() {
                return;
            }
            self.print_slices(loops, (&parameters[at].name(), sizes), text);
        }
        let store = self.store;
        self.open_sums(store, text);
        Self::print_place(store, loops, sizes, text);
        let added = [self.bias, self.addend];
        let stored = Stored { product: &self.product, added, parameters, at: 2 };
        match store.width {
            1 => stored.print("acc[i][j][q]", "n", text),
            width => stored.print_vector(width, sizes[1], text),
        }
        (0..3).for_each(|_| text.end());
    }

    /// Opens the loops over a thread's accumulators, with the vector `x` of those that are stored
    /// together.
    fn open_sums(&self, store: QuadStore, text: &mut Text) {
        self.open_registers(store, text);
        if store.width > 1 {
            let sums = |tile: &str| [0, 1].map(|e| format!("acc[i][j + {tile}][q + {e}]"));
            store.print_vector("x", sums, text);
        }
    }

    /// Prints the store of a slice to the workspace.
    fn print_slice(&self, loops: &Loops, (to, sizes): (&str, [usize; 2]), text: &mut Text) {
        let store = slice_store(sizes[1]);
        self.open_sums(store, text);
        Self::print_place(store, loops, sizes, text);
        let place = self.in_slice(sizes, &format!("(slice * {}ULL + batch)", self.batch()));
        match store.width {
            1 => line!(text, "{to}[{place}] = acc[i][j][q];"),
            _ => line!(text, "store_vector({to} + {place}, x);"),
        }
        (0..3).for_each(|_| text.end());
    }

    /// Prints the sum of all slices of a tile by the block that stores the last one; others end.
    fn print_slices(&self, loops: &Loops, (from, sizes): (&str, [usize; 2]), text: &mut Text) {
        let ticket = Ticket { product: &self.product, tiles: self.tiles().iter().product() };
        ticket.print(["sync_block()", "sync_block_or(", "threadIdx.x == 0"], text);
        ticket.open_slices(text);
        self.open_registers(QuadStore { dtype: DType::F32, width: 1 }, text);
        Self::print_place(QuadStore { dtype: DType::F32, width: 1 }, loops, sizes, text);
        ticket.print_add("acc[i][j][q]", [from, &self.in_slice(sizes, "batch")], text);
        (0..4).for_each(|_| text.end());
    }

    /// Matrices of the result.
    fn batch(&self) -> usize {
        self.product.sizes()[0]
    }

    /// The place of an element in a slice, given that of its matrix.
    fn in_slice(&self, [m, n]: [usize; 2], matrix: &str) -> String {
        format!("({matrix} * {m} + m) * {n} + n")
    }
}

impl TensorTile {
    /// Prints what becomes of two products, of which a thread has the same elements: of the tiles
    /// of 8 columns of a warp, the first half is of one and the second half of the other.
    fn print_pair(&self, pair: Pair, parameters: &[Parameter], text: &mut Text) {
        let (store, [_, _, n, _]) = (self.store, self.product.sizes());
        let ([warp_m, warp_n], tiles) = (self.shape.warp_tile, store.tiles());
        let apart = warp_n / 16;
        line!(text, "UNROLL");
        line!(text, "for (u32 i = 0; i < {}; i += 1) {{", warp_m / 16);
        line!(text, "UNROLL");
        line!(text, "for (u32 q = 0; q < 4; q += 2) {{");
        line!(text, "const u64 m = block_m + warp_m + i * 16 + lane / 4 + q / 2 * 8;");
        pair.print_row("float", parameters, text);
        line!(text, "UNROLL");
        line!(text, "for (u32 j = 0; j < {apart}; j += {tiles}) {{");
        let sums =
            [0, 1].map(|half| move |t: &str| format!("acc[i][j + {t} + {}][q + e]", half * apart));
        let first = "block_n + warp_n / 2 + (j + t) * 8 + lane % 4 * 2 + e";
        pair.print_vectors(store, sums, first, (n, parameters), text);
        line!(text, "const u64 n = block_n + warp_n / 2 + j * 8 + {};", store.column());
        pair.print_stores(store, (n, parameters), text);
        text.end();
        let part = format!("(block_n + warp_n / 2) / {}", self.run());
        pair.print_part(4, (&part, self.parts()), parameters, text);
        (0..2).for_each(|_| text.end());
    }
}

impl StagedOperand<'_> {
    /// A stage, with the dim that vectors are along as its columns.
    fn tile(&self) -> SharedTile {
        match self.copy.k_major {
            true => SharedTile { rows: self.extents[0], columns: self.shape.tile[2] },
            false => SharedTile { rows: self.shape.tile[2], columns: self.extents[0] },
        }
    }

    /// Where the stage of that number starts.
    fn stage(&self) -> String {
        format!("{}_stages + stage * {}", self.name, self.tile().elements())
    }

    /// Prints the copies of a stage, zeros where the operand ends.
    fn print_copy(&self, text: &mut Text) {
        let StagedOperand { name, buffer, side: (side, size), copy: of, end, .. } = self;
        let tile = self.tile();
        tile.open_copies([tile.columns, of.width, self.shape.threads()], text);
        let [to_side, to_k] =
            if of.k_major { ["to_row", "to_column"] } else { ["to_column", "to_row"] };
        let tile_k = self.shape.tile[2];
        let k = format!("first_k + step * {tile_k} + {to_k}");
        let (column, buffer) = match self.pair {
            None => (to_side.to_owned(), buffer.clone()),
            Some((pair, of)) => {
                let run = self.extents[1] / 2;
                (Pair::column(to_side, run), pair.weight(buffer, to_side, run, of))
            }
        };
        line!(text, "const u64 {side} = block_{side} + {column}, k = {k};");
        let is_there = format!("is_there = {side} < {size} && k < {end};");
        let [of_side, of_k] = [nest(self.loops[0], side), nest(self.loops[1], "k")];
        let place = format!("batch_{name} + ({of_side}) + ({of_k})");
        match self.image {
            None => {
                line!(text, "const bool {is_there}");
                line!(text, "const u64 place = is_there ? {place} : batch_{name};");
            }
            Some(product) => {
                line!(text, "bool {is_there}");
                line!(text, "u64 place = {place};");
                let sizes: Vec<usize> = self.loops[0].iter().map(|[size, _]| *size).collect();
                print_borders(product, (side, &sizes), "k", text);
                line!(text, "place = is_there ? place : batch_{name};");
            }
        }
        let to = format!("{} + {}", self.stage(), tile.offset("to_row", "to_column"));
        copy(of.width, [&to, &format!("{buffer} + place"), "is_there"], text);
        text.end();
    }
}

impl fmt::Display for TensorTile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BlockShape { tile: [m, n, k], warp_tile: [warp_m, warp_n], stages } = self.shape;
        let [a, b] = self.copies;
        write!(f, "block tiles of {m}x{n}x{k} in {stages} stages, ")?;
        let of = |operand| if self.image == Some(operand) { " of an image" } else { "" };
        let [of_a, of_b] = [Operand::A, Operand::B].map(of);
        write!(f, "warp tiles of {warp_m}x{warp_n}, a {a}{of_a}, b {b}{of_b}")?;
        match self.elements {
            Elements::Halves => {}
            Elements::Tf32 => write!(f, ", rounded to TF32")?,
            Elements::Bytes => write!(f, ", two bytes a unit")?,
        }
        if self.scales.is_some() {
            write!(f, ", runs by scales")?;
        }
        if self.workspace.is_some() {
            let by = if self.tickets.is_some() { " by tickets" } else { "" };
            write!(f, ", {} slices of k{by}", self.product.tiling.split)?;
        }
        self.grouped.map_or(Ok(()), |grouped| grouped.fmt(f))?;
        write!(f, ", stored by {}", self.store.width)
    }
}

impl fmt::Display for OperandCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let major = if self.k_major { "K-major" } else { "MN-major" };
        write!(f, "{major} by {}", self.width)
    }
}
