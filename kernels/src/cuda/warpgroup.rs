//! Products of BF16, F16, F8E4M3 and F8E5M2 on the tensor cores of sm_90a, by `wgmma`.
//!
//! One thread copies stages of both operands to shared memory by TMA; two warpgroups multiply them,
//! 64 rows of the block tile each. Every stage has two mbarriers: `full` counts the bytes of its
//! copies, `empty` the warps that have read it. An accumulator starts as zero, or as the old value
//! where the product accumulates, and steps of 16 along k are added in ascending order, runs and
//! slices of k as in `slices`.
//!
//! All products of these types run here: sharding m or n may change the strides of an operand, and
//! must not change bits. What TMA cannot copy, such as rows that do not start at multiples of 16
//! bytes, all threads of the first warpgroup copy, or a function before it (`aligned`).
//!
//! A stage has 128 bytes of each row along k, and an instruction takes 32 of them, so bytes differ
//! in the instruction and in what is counted. Both their operands are contiguous along k, which the
//! instruction demands. Of their sums tensor cores keep few bits: accumulators sum 128 points of k,
//! which are then added to totals of F32; the old value is there from the start.
//!
//! Versions:
//! 1. block tiles of 128 × 128 × 64 in four stages, a block tile per block; the epilogue stores
//!    each element alone.
//! 2. blocks are persistent: each takes one tile after the other, whose copies run while the tile
//!    before is stored; and where rows of the result start at multiples of 16 bytes, it is stored
//!    by TMA from shared memory.
//! 3. skinny products, such as those of decoding, are transposed, since `wgmma` takes 64 rows but
//!    may take 16 columns: block tiles of 64 × 16 × 64 in eight stages, one block per slice of k.
//! 4. operands that TMA cannot copy go through registers, in vectors as wide as they are aligned.
//! 5. tiles of wide products for each slice of k, stored to the workspace by TMA, where products
//!    have fewer tiles than there are multiprocessors.
//! 6. bytes.
//! 7. sums of runs of bytes are multiplied by scales.
//! 8. of skinny products the last block of a tile adds its slices (`tickets`), and weights are
//!    fetched while the launch before ends.

use std::fmt;

use ir::DType;

use super::grouped::{Along, Grouped, Pair};
use super::index::nest;
use super::loops::Loops;
use super::mapped::{HALF, MappedOperand, MappedResult, ROWS, SIDE, SWIZZLE_ROW};
use super::parameter::Parameter;
use super::quads::QuadStore;
use super::scales::{ScaleParameters, with_run};
use super::slices::{Stored, has_runs, print_block, print_tile, run, scales, workspace};
use super::tensor::OperandCopy;
use super::tensor_map::TensorMap;
use super::text::{Text, element, line};
use super::tickets::{Ticket, tickets};
use super::tiling::SKINNY_ROWS;
use crate::kernel::{Family, LoopAB, LoopABC, LoopAC, LoopBC, Product, Scales, StoredTypes};

/// Threads of a warpgroup.
pub(super) const WARPGROUP: u32 = 128;
/// Bytes along k that an instruction takes.
const STEP: usize = 32;

/// The sizes of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WarpgroupShape {
    /// Warpgroups that multiply, 64 rows of the block tile each.
    pub consumers: u32,
    /// Columns of the block tile.
    pub columns: usize,
    /// Stages of the ring.
    pub stages: usize,
}

impl WarpgroupShape {
    /// Chosen: 128 KiB of the 227 KiB that a block may have.
    const WIDE: WarpgroupShape = WarpgroupShape { consumers: 2, columns: 128, stages: 4 };
    /// Chosen: 80 KiB, so that two blocks share a multiprocessor.
    const SKINNY: WarpgroupShape = WarpgroupShape { consumers: 1, columns: SKINNY_ROWS, stages: 8 };

    /// The block tile along m and n.
    fn sides(self) -> [usize; 2] {
        [ROWS * self.consumers as usize, self.columns]
    }

    /// Bytes of a stage of each operand.
    fn stage(self) -> [usize; 2] {
        self.sides().map(|side| side * SWIZZLE_ROW)
    }

    fn stage_bytes(self) -> usize {
        self.stage().iter().sum()
    }
}

/// Registers of a thread that copies, and of one that multiplies, where there are two warpgroups
/// of the latter.
const REGISTERS: [u32; 2] = [40, 232];
/// Bytes of the eight rows after which the swizzle repeats.
const SWIZZLE: usize = 8 * SWIZZLE_ROW;

/// A product, each block tile by one block.
#[derive(Clone, Debug, PartialEq)]
pub struct WarpgroupTile {
    /// What is computed: the transposed product where it is skinny.
    pub product: Product,
    /// Whether it is that.
    pub is_transposed: bool,
    /// The parameter that is added to each row of the result, or to each column where that is
    /// transposed.
    pub bias: Option<usize>,
    /// The parameter that is added last.
    pub addend: Option<usize>,
    /// How each operand is copied to shared memory.
    pub operands: [StagedOperand; 2],
    /// The sizes of a block.
    pub shape: WarpgroupShape,
    /// The workspace's parameter, where each slice of k is summed by a block of its own.
    pub workspace: Option<usize>,
    /// The parameter that is the counters of tiles, where the last block of one adds its slices.
    pub tickets: Option<usize>,
    /// The parameters that are scales.
    pub scales: Option<ScaleParameters>,
    /// How TMA stores the result; none where threads store it.
    pub result: Option<MappedResult>,
    /// Whether it is a product of the rows of experts.
    pub grouped: Option<Grouped>,
    /// The second one of two weights that take turns in the block tile, where TMA copies them.
    pub other: Option<TensorMap>,
}

/// How an operand is copied to shared memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StagedOperand {
    /// By TMA.
    Mapped(MappedOperand),
    /// By the threads of a warpgroup: how, and which parameter the operand is.
    Copied(OperandCopy, usize),
}

impl StagedOperand {
    /// How tiles of an operand with `extent` rows or columns are copied.
    fn of(
        named: (&'static str, usize, DType),
        loops: [&[[usize; 2]]; 3],
        extent: usize,
    ) -> StagedOperand {
        if let Some(operand) = MappedOperand::of(named, loops, extent) {
            return StagedOperand::Mapped(operand);
        }
        let [batch, side, k] = loops;
        let widest = OperandCopy::of(batch, side, k);
        // A row along m or n has 64 elements, and those of bytes are along k.
        let copy = match widest.k_major || extent >= SIDE && named.2.size() == 2 {
            true => widest,
            false => OperandCopy { k_major: true, width: 1 },
        };
        StagedOperand::Copied(copy, named.1)
    }

    /// Both operands of a product, which are parameters of these numbers.
    fn both(p: &Product, parameters: [usize; 2], shape: WarpgroupShape) -> [StagedOperand; 2] {
        let loops = Loops::of(p);
        let a = [&loops.batch[0][..], &loops.m[0], &loops.k[0]];
        let b = [&loops.batch[1][..], &loops.n[0], &loops.k[1]];
        let [m, n] = shape.sides();
        [
            StagedOperand::of(("a_map", parameters[0], p.stored.a), a, m),
            StagedOperand::of(("b_map", parameters[1], p.stored.b), b, n),
        ]
    }

    /// What the launch passes.
    fn map(&self) -> Option<&TensorMap> {
        match self {
            StagedOperand::Mapped(operand) => Some(&operand.map),
            StagedOperand::Copied(..) => None,
        }
    }

    /// Whether rows of a stage are along k; else along m or n.
    fn k_major(&self) -> bool {
        match self {
            StagedOperand::Mapped(operand) => operand.k_major,
            StagedOperand::Copied(copy, _) => copy.k_major,
        }
    }

    /// Bytes between the two halves along m or n of a tile, and between its groups of eight rows,
    /// as matrix descriptors have them. The first counts only where rows are along m or n.
    fn offsets(&self) -> [usize; 2] {
        [if self.k_major() { 16 } else { HALF }, SWIZZLE]
    }

    /// Bytes between steps along k.
    fn step(&self) -> usize {
        if self.k_major() { STEP } else { 16 * SWIZZLE_ROW }
    }
}

/// An operand that threads copy, as the copies of its stages are printed.
struct ThreadCopy<'a> {
    copy: OperandCopy,
    /// `a` or `b`.
    name: &'a str,
    buffer: String,
    dtype: DType,
    /// `m` or `n`, its size, and its extent in a stage.
    side: (&'a str, usize, usize),
    /// Loops over that, and over k.
    loops: [&'a [[usize; 2]]; 2],
    /// Of the operand that two weights take turns in, both.
    pair: Option<(Pair, &'a [Parameter])>,
}

impl ThreadCopy<'_> {
    /// Prints the copies of a stage, zeros where the operand ends, to where TMA would put them.
    fn print(&self, k_size: usize, text: &mut Text) {
        let ThreadCopy { copy: OperandCopy { k_major, width }, name, buffer, dtype, .. } = self;
        let (side, size, extent) = self.side;
        let (kind, bytes) = (element(*dtype), dtype.size() as usize);
        let tile_k = SWIZZLE_ROW / bytes;
        let [rows, columns] = if *k_major { [extent, tile_k] } else { [tile_k, extent] };
        let (count, per_row) = (rows * columns / width, columns / width);
        let [to_side, to_k] = if *k_major { ["row", "column"] } else { ["column", "row"] };
        line!(text, "for (u32 i = threadIdx.x; i < {count}; i += {WARPGROUP}) {{");
        line!(text, "const u32 row = i / {per_row}, column = i % {per_row} * {width};");
        let (in_side, buffer) = match self.pair {
            None => (to_side.to_owned(), buffer.clone()),
            Some((pair, of)) => {
                (Pair::column(to_side, SIDE), pair.weight(buffer, to_side, SIDE, of))
            }
        };
        line!(
            text,
            "const u64 {side} = block_{side} + {in_side}, k = first_k + step * {tile_k} + {to_k};"
        );
        line!(text, "Vector<{kind}, {width}> x = {{}};");
        let [of_side, of_k] = [nest(self.loops[0], side), nest(self.loops[1], "k")];
        line!(text, "if ({side} < {size} && k < {k_size}) {{");
        let place = format!("batch_{name} + ({of_side}) + ({of_k})");
        line!(text, "x = load_vector<{kind}, {width}>({buffer} + {place});");
        text.end();
        line!(text, "const u32 in_row = column % {tile_k} * {bytes};");
        line!(
            text,
            "u8* const to = {name}_stage + column / {tile_k} * {HALF} + row * {SWIZZLE_ROW};"
        );
        line!(text, "store_shared(to + (in_row / 16 ^ row % 8) * 16 + in_row % 16, x);");
        text.end();
    }
}

/// The product of the transposed operands in the other order, whose result lies where it did.
fn transposed(p: &Product) -> Product {
    let batch = p.batch.iter().map(|l| LoopABC { size: l.size, a: l.b, b: l.a, c: l.c });
    let stored = StoredTypes { a: p.stored.b, b: p.stored.a, c: p.stored.c };
    Product {
        batch: batch.collect(),
        m: p.n.iter().map(|l| LoopAC { size: l.size, a: l.b, c: l.c }).collect(),
        n: p.m.iter().map(|l| LoopBC { size: l.size, b: l.a, c: l.c }).collect(),
        k: p.k.iter().map(|l| LoopAB { size: l.size, a: l.b, b: l.a }).collect(),
        stored,
        scales: p.scales.map(|[a, b]| [b, a]),
        ..p.clone()
    }
}

impl WarpgroupTile {
    /// The tile of a product that runs on tensor cores, with parameters that are added to it.
    pub(super) fn of(product: &Product, [bias, addend]: [Option<usize>; 2]) -> WarpgroupTile {
        let is_transposed = product.tiling.family == Family::Skinny;
        let (product, parameters, shape) = match is_transposed {
            true => (transposed(product), [1, 0], WarpgroupShape::SKINNY),
            false => (product.clone(), [0, 1], WarpgroupShape::WIDE),
        };
        let operands = StagedOperand::both(&product, parameters, shape);
        let (workspace, tickets) = (workspace(&product), tickets(&product));
        let result = match workspace {
            _ if is_transposed => None,
            Some(at) => MappedResult::of_slices(&product, at),
            None => MappedResult::of(&product),
        };
        let scales = scales(&product);
        let scales = if is_transposed { scales.map(ScaleParameters::swapped) } else { scales };
        WarpgroupTile {
            product,
            is_transposed,
            bias,
            addend,
            operands,
            shape,
            workspace,
            tickets,
            scales,
            result,
            grouped: None,
            other: None,
        }
    }

    /// The tile of a product of the rows of experts.
    pub(super) fn of_experts(product: &Product, grouped: Grouped) -> WarpgroupTile {
        let mut tile = WarpgroupTile::of(product, [None; 2]);
        tile.grouped = Some(grouped);
        let Some(pair) = grouped.pair else { return tile };
        tile.result = None;
        if let StagedOperand::Mapped(operand) = &mut tile.operands[1] {
            // A box has the columns of one weight.
            operand.map.box_dims[1] = SIDE as u32;
            let other =
                TensorMap { name: "other_map", parameter: pair.other, ..operand.map.clone() };
            tile.other = Some(other);
        }
        tile
    }

    fn pair(&self) -> Option<Pair> {
        self.grouped.and_then(|grouped| grouped.pair)
    }

    /// Columns of the result of a block tile.
    pub(super) fn columns(&self) -> usize {
        Grouped::columns(self.grouped, self.shape.columns)
    }

    /// Parts of the gradient of the gate of a row: one for each block tile.
    pub(super) fn parts(&self) -> usize {
        self.tiles()[2]
    }

    /// How results of two weights are stored.
    pub(super) fn pair_store(&self) -> QuadStore {
        let [_, _, n, _] = self.product.sizes();
        let aligned = [8, 4, 2].into_iter().find(|of| n.is_multiple_of(*of)).unwrap_or(1);
        QuadStore::of(self.product.stored.c, SIDE / 8, aligned)
    }

    /// Threads of a block: a warpgroup that copies, and those that multiply.
    pub(super) fn threads(&self) -> u32 {
        WARPGROUP * (self.shape.consumers + 1)
    }

    /// Whether fewer blocks than there are tiles compute the same.
    pub(super) fn is_persistent(&self) -> bool {
        !self.is_transposed
    }

    /// What the launch passes.
    pub(super) fn maps(&self) -> Vec<&TensorMap> {
        let operands = self.operands.iter().filter_map(StagedOperand::map);
        let operands = operands.chain(&self.other);
        operands.chain(self.result.iter().map(|result| &result.map)).collect()
    }

    /// Bytes of a warpgroup's rows of the result, where TMA stores them.
    fn result_bytes(&self) -> usize {
        let bytes = |result: &MappedResult| ROWS * self.shape.columns * result.bytes();
        self.result.as_ref().map_or(0, bytes)
    }

    /// Bytes of dynamic shared memory of a block: stages, results, and two mbarriers per stage.
    pub(super) fn shared_bytes(&self) -> usize {
        let WarpgroupShape { consumers, stages, .. } = self.shape;
        stages * (self.shape.stage_bytes() + 16) + consumers as usize * self.result_bytes()
    }

    /// Bytes of an element of an operand.
    pub(super) fn bytes(&self) -> usize {
        self.product.stored.a.size() as usize
    }

    /// The block tile along m, n and k.
    pub(super) fn tile(&self) -> [usize; 3] {
        let [m, n] = self.shape.sides();
        [m, n, SWIZZLE_ROW / self.bytes()]
    }

    /// Whether accumulators are added to totals.
    fn is_summed(&self) -> bool {
        self.bytes() == 1 || has_runs(&self.product)
    }

    /// Block tiles along batch, m and n.
    pub(super) fn tiles(&self) -> [usize; 3] {
        let ([batch, m, n, _], [tile_m, ..]) = (self.product.sizes(), self.tile());
        let columns = n.div_ceil(self.columns());
        match self.grouped.map(|grouped| grouped.along) {
            // The rows of a tile say which expert is theirs.
            Some(Along::Rows { .. }) => [1, m.div_ceil(tile_m), columns],
            Some(Along::Contracted { .. }) | None => [batch, m.div_ceil(tile_m), columns],
        }
    }

    pub(super) fn print(&self, parameters: &[Parameter], text: &mut Text) {
        let loops = Loops::of(&self.product);
        let WarpgroupShape { consumers, stages, .. } = self.shape;
        let ring = stages * self.shape.stage_bytes();
        line!(text, "DYNAMIC_SHARED(stages, {});", self.shared_bytes());
        if self.result.is_some() {
            line!(text, "u8* const results = stages + {ring};");
        }
        let barriers = ring + consumers as usize * self.result_bytes();
        line!(text, "u64* const full = (u64*)(stages + {barriers});");
        line!(text, "u64* const empty = full + {stages};");
        line!(text, "if (threadIdx.x == 0) {{");
        line!(text, "for (u32 stage = 0; stage < {stages}; stage += 1) {{");
        line!(text, "mbarrier_init(full + stage, {});", self.arrivals());
        line!(text, "mbarrier_init(empty + stage, {});", consumers * WARPGROUP / 32);
        text.end();
        line!(text, "mbarrier_init_fence();");
        text.end();
        line!(text, "sync_block();");
        self.print_producer(&loops, parameters, text);
        self.print_consumer(&loops, parameters, text);
    }

    /// Prints what a block fetches to the L2 cache before the launch before it has ended: the first
    /// stages of its weights, of which a skinny product reads each element once. Where the launch
    /// before writes them, what it writes passes the same cache.
    pub(super) fn print_prefetch(&self, text: &mut Text) {
        let StagedOperand::Mapped(weights) = &self.operands[0] else { return };
        if !self.is_transposed {
            return;
        }
        let batch: Vec<usize> = self.product.batch.iter().map(|l| l.size).collect();
        line!(text, "if (threadIdx.x == 0) {{");
        self.print_block(text);
        line!(text, "NO_UNROLL");
        let stages = self.shape.stages;
        line!(text, "for (u32 step = 0; step < steps && step < {stages}; step += 1) {{");
        let coordinates = weights.coordinates("block_m", &batch);
        line!(text, "tma_prefetch({}, {coordinates});", weights.map.name);
        (0..2).for_each(|_| text.end());
    }

    /// Prints the tile of a block, and its points of k.
    fn print_block(&self, text: &mut Text) {
        let p = &self.product;
        print_block([p.sizes()[3], p.slice()], self.tiles(), self.tile(), self.workspace, text);
    }

    /// Opens the loop over the tiles of a block, which counts the steps of all.
    fn open_tiles(&self, parameters: &[Parameter], text: &mut Text) {
        let p = &self.product;
        let (k, tiles, tile) = (p.sizes()[3], self.tiles(), self.tile());
        line!(text, "u32 count = 0;");
        if self.is_persistent() {
            let count: usize = tiles.iter().product::<usize>() * p.tiling.split;
            line!(text, "NO_UNROLL");
            line!(text, "for (u64 tile = blockIdx.x; tile < {count}; tile += gridDim.x) {{");
            match self.grouped {
                None => print_tile([k, p.slice()], tiles, tile, self.workspace, text),
                Some(grouped) => {
                    let [_, rows, columns] = tiles;
                    let tile = [tile[0], self.columns(), tile[2]];
                    let of = (parameters, "continue");
                    grouped.print_tile(p, [rows, columns], tile, of, text);
                }
            }
        } else {
            line!(text, "{{");
            self.print_block(text);
        }
    }

    /// Prints the stage of a step, and where its operands lie.
    fn print_stage(&self, text: &mut Text) {
        let [of_a, _] = self.shape.stage();
        line!(text, "const u32 stage = count % {};", self.shape.stages);
        line!(text, "u8* const a_stage = stages + stage * {};", self.shape.stage_bytes());
        line!(text, "u8* const b_stage = a_stage + {of_a};");
    }

    /// Whether warpgroups change their registers: where accumulators need more than all threads
    /// could have, and those that copy need few.
    fn sets_registers(&self) -> bool {
        self.shape.consumers > 1 && !self.has_copies()
    }

    /// Whether threads copy an operand.
    fn has_copies(&self) -> bool {
        self.operands.iter().any(|operand| operand.map().is_none())
    }

    /// Bytes of a stage that TMA copies.
    fn mapped_bytes(&self) -> usize {
        let stage = self.operands.iter().zip(self.shape.stage());
        stage.filter(|(operand, _)| operand.map().is_some()).map(|(_, bytes)| bytes).sum()
    }

    /// Arrivals that fill a stage: of the thread that starts TMA, and of each that copies.
    fn arrivals(&self) -> u32 {
        let copies = if self.has_copies() { WARPGROUP } else { 0 };
        u32::from(self.mapped_bytes() > 0) + copies
    }

    fn print_producer(&self, loops: &Loops, parameters: &[Parameter], text: &mut Text) {
        line!(text, "if (threadIdx.x < {WARPGROUP}) {{");
        if self.sets_registers() {
            line!(text, "setmaxnreg_dec<{}>();", REGISTERS[0]);
        }
        if !self.has_copies() {
            line!(text, "if (threadIdx.x > 0) return;");
        }
        self.open_tiles(parameters, text);
        let copies = self.thread_copies(loops, parameters);
        for (copy, of) in copies.iter().zip(&loops.batch) {
            let Some(ThreadCopy { name, .. }) = copy else { continue };
            line!(text, "const u64 batch_{name} = {};", nest(of, "batch"));
        }
        line!(text, "NO_UNROLL");
        line!(text, "for (u32 step = 0; step < steps; step += 1, count += 1) {{");
        self.print_stage(text);
        line!(text, "mbarrier_wait(empty + stage, (count / {} + 1) % 2);", self.shape.stages);
        self.print_tma_loads(text);
        for copy in copies.iter().flatten() {
            copy.print(self.product.sizes()[3], text);
        }
        if self.has_copies() {
            line!(text, "fence_proxy_async();");
            line!(text, "mbarrier_arrive(full + stage);");
        }
        (0..2).for_each(|_| text.end());
        line!(text, "return;");
        text.end();
    }

    /// Prints the copies of a stage by TMA, which one thread starts.
    fn print_tma_loads(&self, text: &mut Text) {
        if self.mapped_bytes() == 0 {
            return;
        }
        let batch: Vec<usize> = self.product.batch.iter().map(|l| l.size).collect();
        let [tile_m, tile_n] = self.shape.sides();
        if self.has_copies() {
            line!(text, "if (threadIdx.x == 0) {{");
        }
        line!(text, "mbarrier_expect(full + stage, {});", self.mapped_bytes());
        for (operand, side) in self.operands.iter().zip([("m", tile_m), ("n", tile_n)]) {
            if let StagedOperand::Mapped(operand) = operand {
                let other = self.other.as_ref().filter(|_| operand.map.name == "b_map");
                operand.print_copy(side, (&batch, other), text);
            }
        }
        if self.has_copies() {
            text.end();
        }
    }

    /// The operands that threads copy.
    fn thread_copies<'a>(
        &self,
        loops: &'a Loops,
        parameters: &'a [Parameter],
    ) -> [Option<ThreadCopy<'a>>; 2] {
        let ([_, m, n, _], [tile_m, tile_n, _]) = (self.product.sizes(), self.tile());
        let StoredTypes { a, b, .. } = self.product.stored;
        let of_a = ("a", a, ("m", m, tile_m), [&loops.m[0][..], &loops.k[0]]);
        let of_b = ("b", b, ("n", n, tile_n), [&loops.n[0][..], &loops.k[1]]);
        let copies = [(&self.operands[0], of_a), (&self.operands[1], of_b)];
        copies.map(|(operand, (name, dtype, side, loops))| match operand {
            StagedOperand::Mapped(_) => None,
            StagedOperand::Copied(copy, parameter) => Some(ThreadCopy {
                copy: *copy,
                name,
                buffer: parameters[*parameter].name(),
                dtype,
                side,
                loops,
                pair: self.pair().filter(|_| name == "b").map(|pair| (pair, parameters)),
            }),
        })
    }

    fn print_consumer(&self, loops: &Loops, parameters: &[Parameter], text: &mut Text) {
        let p = &self.product;
        let count = self.shape.columns / 2;
        if self.sets_registers() {
            line!(text, "setmaxnreg_inc<{}>();", REGISTERS[1]);
        }
        line!(text, "const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;");
        line!(text, "const u32 consumer = threadIdx.x / {WARPGROUP} - 1;");
        self.open_tiles(parameters, text);
        line!(text, "const u64 batch_c = {};", nest(&loops.batch[2], "batch"));
        line!(text, "float acc[{count}] = {{}};");
        let is_summed = self.is_summed();
        if is_summed {
            line!(text, "float total[{count}] = {{}};");
        }
        if p.accumulate {
            let first = if self.workspace.is_some() { "if (slice == 0) " } else { "" };
            // Of bytes the old value would lose bits among the accumulators.
            let to = if self.bytes() == 1 { "total" } else { "acc" };
            self.open_accumulators(loops, text);
            line!(text, "{first}{to}[i] = {}[place];", parameters[2].name());
            text.end();
        }
        line!(text, "NO_UNROLL");
        line!(text, "for (u32 step = 0; step < steps; step += 1, count += 1) {{");
        if is_summed {
            self.print_sum(parameters, text);
        }
        self.print_mma(text);
        text.end();
        line!(text, "warpgroup_wait<0>(acc);");
        let stages = self.shape.stages;
        let any = if self.grouped.is_some() { " && steps > 0" } else { "" };
        line!(text, "if (lane == 0{any}) mbarrier_arrive(empty + (count - 1) % {stages});");
        if is_summed {
            self.open_sums("(steps - 1)", parameters, text);
            line!(text, "acc[i] = {};", self.sum());
            text.end();
        }
        match (&self.result, self.pair()) {
            (_, Some(pair)) => self.print_pair(pair, parameters, text),
            (Some(result), None) => self.print_tma_store(result, loops, parameters, text),
            (None, None) => self.print_epilogue(loops, parameters, text),
        }
        text.end();
        if self.result.is_some() {
            line!(text, "if (threadIdx.x % {WARPGROUP} == 0) tma_store_wait();");
        }
    }

    /// Steps of a run.
    fn steps_of_run(&self) -> usize {
        run(&self.product) / self.tile()[2]
    }

    /// Prints the addition of accumulators to totals at the end of a run; of a run of one step its
    /// stage is released then.
    fn print_sum(&self, parameters: &[Parameter], text: &mut Text) {
        let steps = self.steps_of_run();
        match steps {
            1 => line!(text, "if (step > 0) {{"),
            _ => line!(text, "if (step > 0 && step % {steps} == 0) {{"),
        }
        line!(text, "warpgroup_wait<0>(acc);");
        if steps == 1 {
            let stages = self.shape.stages;
            line!(text, "if (lane == 0) mbarrier_arrive(empty + (count - 1) % {stages});");
        }
        self.open_sums("(step - 1)", parameters, text);
        line!(text, "total[i] = {};", self.sum());
        line!(text, "acc[i] = 0;");
        (0..2).for_each(|_| text.end());
    }

    /// An accumulator and its total, with what the former is worth.
    fn sum(&self) -> String {
        with_run("total[i]", "acc[i]", self.scales.is_some())
    }

    /// Opens the loop over a thread's sums, with what they are worth, given their step.
    fn open_sums(&self, step: &str, parameters: &[Parameter], text: &mut Text) {
        line!(text, "UNROLL");
        line!(text, "for (u32 i = 0; i < {}; i += 1) {{", self.shape.columns / 2);
        if let Some(scales) = &self.scales {
            let [_, m, n, _] = self.product.sizes();
            Self::print_indices(text);
            let run = format!("first_k / {0} + {step} / {1}", Scales::RUN, self.steps_of_run());
            scales.print([m - 1, n - 1], &run, parameters, text);
        }
    }

    /// Prints the row and the column of an accumulator.
    fn print_indices(text: &mut Text) {
        line!(
            text,
            "const u64 m = block_m + consumer * 64 + warp * 16 + lane / 4 + i / 2 % 2 * 8;"
        );
        line!(text, "const u64 n = block_n + i / 4 * 8 + lane % 4 * 2 + i % 2;");
    }

    /// Prints the product of a stage, and the release of the one before.
    fn print_mma(&self, text: &mut Text) {
        let stages = self.shape.stages;
        self.print_stage(text);
        line!(text, "mbarrier_wait(full + stage, count / {stages} % 2);");
        let starts = [format!("a_stage + consumer * {HALF}"), "b_stage".to_owned()];
        for ((operand, name), start) in self.operands.iter().zip(["a", "b"]).zip(starts) {
            let [leading, stride] = operand.offsets();
            let offsets = format!("{leading}, {stride}, SWIZZLE_128");
            line!(
                text,
                "const u64 {name} = matrix_descriptor(shared_address({start}), {offsets});"
            );
        }
        let [step_a, step_b] = [0, 1].map(|at: usize| self.operands[at].step() / 16);
        let [of_a, of_b] = self.operands.each_ref().map(|operand| u8::from(!operand.k_major()));
        line!(text, "warpgroup_fence(acc);");
        line!(text, "UNROLL");
        line!(text, "for (u32 k = 0; k < {}; k += 1) {{", SWIZZLE_ROW / STEP);
        let StoredTypes { a, b, .. } = self.product.stored;
        let part = match self.bytes() {
            1 => format!("warpgroup_mma_bytes<{}, {}>", element(a), element(b)),
            _ => format!("warpgroup_mma<{}, {of_a}, {of_b}>", element(a)),
        };
        line!(text, "{part}(acc, a + k * {step_a}, b + k * {step_b});");
        text.end();
        line!(text, "warpgroup_commit();");
        if self.steps_of_run() == 1 {
            return;
        }
        line!(text, "warpgroup_wait<1>(acc);");
        line!(text, "if (step > 0 && lane == 0) mbarrier_arrive(empty + (count - 1) % {stages});");
    }

    /// Opens the loop over a thread's accumulators, with their indices.
    fn open_accumulators(&self, loops: &Loops, text: &mut Text) {
        let [_, m, n, _] = self.product.sizes();
        line!(text, "UNROLL");
        line!(text, "for (u32 i = 0; i < {}; i += 1) {{", self.shape.columns / 2);
        Self::print_indices(text);
        line!(text, "if (m >= {m} || n >= {n}) continue;");
        let [of_m, of_n] = [nest(&loops.m[1], "m"), nest(&loops.n[1], "n")];
        line!(text, "const u64 place = batch_c + ({of_m}) + ({of_n});");
    }

    /// Prints the store of a warpgroup's rows by TMA: they are swizzled into shared memory once the
    /// stores of the tile before have read it.
    fn print_tma_store(
        &self,
        result: &MappedResult,
        loops: &Loops,
        parameters: &[Parameter],
        text: &mut Text,
    ) {
        let (product, columns) = (&self.product, result.columns());
        let (kept, bytes) = (element(result.map.dtype), result.bytes());
        line!(text, "u8* const result = results + consumer * {};", self.result_bytes());
        line!(text, "if (threadIdx.x % {WARPGROUP} == 0) tma_store_wait();");
        line!(text, "sync_warpgroup(consumer + 1);");
        line!(text, "UNROLL");
        line!(text, "for (u32 i = 0; i < {}; i += 2) {{", self.shape.columns / 2);
        line!(text, "const u32 row = warp * 16 + lane / 4 + i / 2 % 2 * 8;");
        line!(text, "const u32 column = i / 4 * 8 + lane % 4 * 2;");
        line!(text, "Vector<{kept}, 2> pair;");
        line!(text, "UNROLL");
        line!(text, "for (u32 e = 0; e < 2; e += 1) {{");
        line!(text, "pair.x[e] = Store<{kept}>::of(acc[i + e]);");
        if self.workspace.is_none() && self.bias.or(self.addend).is_some() {
            let [_, m_size, n_size, _] = product.sizes();
            line!(text, "const u64 m = block_m + consumer * 64 + row, n = block_n + column + e;");
            line!(text, "if (m >= {m_size} || n >= {n_size}) continue;");
            let [of_m, of_n] = [nest(&loops.m[1], "m"), nest(&loops.n[1], "n")];
            line!(text, "const u64 place = batch_c + ({of_m}) + ({of_n});");
            let added = [self.bias, self.addend];
            Stored { product, added, parameters, at: 2 }.print_added(
                "pair.x[e]",
                ["n", "place"],
                text,
            );
        }
        text.end();
        line!(text, "const u32 in_row = column % {columns} * {bytes};");
        let half = ROWS * SWIZZLE_ROW;
        line!(text, "u8* const to = result + column / {columns} * {half} + row * {SWIZZLE_ROW};");
        line!(text, "store_shared(to + (in_row / 16 ^ row % 8) * 16 + in_row % 16, pair);");
        text.end();
        line!(text, "fence_proxy_async();");
        line!(text, "sync_warpgroup(consumer + 1);");
        line!(text, "if (threadIdx.x % {WARPGROUP} == 0) {{");
        let batch = result.batch(product);
        for at in 0..self.shape.columns / columns {
            let (from, first) = (at * half, at * columns);
            line!(
                text,
                "tma_store(c_map, result + {from}, (i32)(block_n + {first}), \
                 (i32)(block_m + consumer * 64){batch});"
            );
        }
        line!(text, "tma_store_commit();");
        text.end();
    }

    /// Prints what becomes of two products, of which a thread has the same elements: the first half
    /// of its accumulators is of one, the second half of the other.
    fn print_pair(&self, pair: Pair, parameters: &[Parameter], text: &mut Text) {
        let (count, [_, _, n, _]) = (self.shape.columns / 2, self.product.sizes());
        let store = self.pair_store();
        line!(text, "UNROLL");
        line!(text, "for (u32 q = 0; q < 4; q += 2) {{");
        line!(text, "const u64 m = block_m + consumer * 64 + warp * 16 + lane / 4 + q / 2 * 8;");
        pair.print_row("float", parameters, text);
        line!(text, "UNROLL");
        line!(text, "for (u32 j = 0; j < {}; j += {}) {{", SIDE / 8, store.tiles());
        let sums = [0, count / 2]
            .map(|first| move |t: &str| format!("acc[{first} + (j + {t}) * 4 + q + e]"));
        let column = "block_n + (j + t) * 8 + lane % 4 * 2 + e";
        pair.print_vectors(store, sums, column, (n, parameters), text);
        line!(text, "const u64 n = block_n + j * 8 + {};", store.column());
        pair.print_stores(store, (n, parameters), text);
        text.end();
        let part = format!("block_n / {SIDE}");
        pair.print_part(4, (&part, self.parts()), parameters, text);
        text.end();
    }

    fn print_epilogue(&self, loops: &Loops, parameters: &[Parameter], text: &mut Text) {
        let ([batch, m, n, _], product) = (self.product.sizes(), &self.product);
        // The row and the column of the result, and how many there are.
        let [(row, rows), (column, columns)] =
            if self.is_transposed { [("n", n), ("m", m)] } else { [("m", m), ("n", n)] };
        if let Some(at) = self.workspace {
            let slices = parameters[at].name();
            let place =
                |matrix: &str| format!("({matrix} * {rows} + {row}) * {columns} + {column}");
            self.open_accumulators(loops, text);
            line!(text, "{slices}[{}] = acc[i];", place(&format!("(slice * {batch}ULL + batch)")));
            text.end();
            if self.tickets.is_none() {
                return;
            }
            let ticket = Ticket { product, tiles: self.tiles().iter().product() };
            let meet = ["sync_warpgroup(1)", "sync_warpgroup_or(1, "];
            let thread = format!("threadIdx.x == {WARPGROUP}");
            ticket.print([meet[0], meet[1], &thread], text);
            ticket.open_slices(text);
            self.open_accumulators(loops, text);
            ticket.print_add("acc[i]", [&slices, &place("batch")], text);
            (0..2).for_each(|_| text.end());
        }
        self.open_accumulators(loops, text);
        let added = [self.bias, self.addend];
        Stored { product, added, parameters, at: 2 }.print("acc[i]", column, text);
        text.end();
    }
}

impl fmt::Display for WarpgroupTile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ([a, b], [m, n, k]) = (&self.operands, self.tile());
        let WarpgroupShape { consumers, stages, .. } = self.shape;
        write!(f, "block tiles of {m}x{n}x{k} in {stages} stages by TMA, ")?;
        let (warpgroups, order) = (
            if consumers == 1 { "warpgroup" } else { "warpgroups" },
            if self.is_transposed { ", transposed" } else { "" },
        );
        write!(f, "{consumers} {warpgroups}, a {a}, b {b}{order}")?;
        if self.scales.is_some() {
            write!(f, ", runs by scales")?;
        }
        if self.result.is_some() {
            write!(f, ", stored by TMA")?;
        }
        self.grouped.map_or(Ok(()), |grouped| grouped.fmt(f))?;
        match self.workspace {
            Some(_) => {
                let by = if self.tickets.is_some() { " by tickets" } else { "" };
                write!(f, ", {} slices of k{by}", self.product.tiling.split)
            }
            None => Ok(()),
        }
    }
}

impl fmt::Display for StagedOperand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let major = if self.k_major() { "K-major" } else { "MN-major" };
        match self {
            StagedOperand::Mapped(operand) => {
                write!(f, "{major} in {} dims", operand.map.dims.len())
            }
            StagedOperand::Copied(copy, _) => {
                write!(f, "{major} by threads, {} at a time", copy.width)
            }
        }
    }
}
