//! Products of BF16 and F16 on the tensor cores of sm_90a, by `wgmma`.
//!
//! One warp copies stages of both operands to shared memory by TMA; two warpgroups multiply them,
//! 64 rows of the block tile each. Every stage has two mbarriers: `full` counts the bytes of its
//! copies, `empty` the warps that have read it. An accumulator starts as zero, or as the old value
//! where the product accumulates, and steps of 16 along k are added in ascending order.
//!
//! Versions:
//! 1. block tiles of 128 × 128 × 64 in four stages, a block tile per block; the epilogue stores
//!    each element alone.

use std::fmt;

use ir::DType;

use super::index::{coordinate_of, nest};
use super::loops::Loops;
use super::parameter::Parameter;
use super::text::{Text, element, line};
use crate::kernel::Product;

/// Threads of a warpgroup.
const WARPGROUP: u32 = 128;
/// Warpgroups that multiply.
const CONSUMERS: u32 = 2;
/// The block tile: rows and columns of the result, and its extent along k.
const TILE_MN: usize = 128;
const TILE_K: usize = 64;
/// Stages of the ring. Chosen: 128 KiB of the 227 KiB that a block may have.
const STAGES: usize = 4;
/// Bytes of a stage of one operand, and of 64 of its rows or columns.
const STAGE: usize = TILE_MN * TILE_K * 2;
const HALF: usize = STAGE / 2;
/// Registers of a thread that copies, and of one that multiplies.
const REGISTERS: [u32; 2] = [40, 232];
/// Bytes of a row of the swizzle, and of the eight rows after which it repeats.
const ROW: usize = 128;
const ROWS: usize = 8 * ROW;
/// The most dims of a tensor map.
const DIMS: usize = 5;

/// A product, each block tile by one block.
#[derive(Clone, Debug, PartialEq)]
pub struct WarpgroupTile {
    /// What is computed.
    pub product: Product,
    /// The parameter that is added to each row of the result.
    pub bias: Option<usize>,
    /// The parameter that is added last.
    pub addend: Option<usize>,
    /// How each operand is copied to shared memory.
    pub operands: [MappedOperand; 2],
}

/// An operand that TMA copies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MappedOperand {
    /// Whether rows of a tile are along k; else along m or n.
    pub k_major: bool,
    /// What the launch passes.
    pub map: TensorMap,
    /// The loops over batch that the map has dims for.
    batch: Vec<usize>,
}

/// A parameter of the launch that describes a tensor to TMA: what `cuTensorMapEncodeTiled` takes,
/// with zeros out of bounds, element strides of one and no interleaving.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorMap {
    /// The name of the parameter.
    pub name: &'static str,
    /// Which of the function's parameters the tensor starts at, at a multiple of 16 bytes.
    pub parameter: usize,
    /// BF16 or F16.
    pub dtype: DType,
    /// Elements of each dim, the contiguous one first.
    pub dims: Vec<u64>,
    /// Bytes from an element to the next of each dim but the first: multiples of 16.
    pub strides_bytes: Vec<u64>,
    /// Elements of a box along each dim. The first is 64, the 128 bytes of the swizzle.
    pub box_dims: Vec<u32>,
}

/// Several loops as one: its size and stride. A single point has any stride.
fn merged(loops: &[[usize; 2]]) -> Option<[usize; 2]> {
    let mut whole: Option<[usize; 2]> = None;
    for [size, stride] in loops.iter().rev().filter(|[size, _]| *size > 1) {
        match &mut whole {
            None => whole = Some([*size, *stride]),
            Some([inside, step]) if *stride == *inside * *step => *inside *= size,
            Some(_) => return None,
        }
    }
    Some(whole.unwrap_or([1, 0]))
}

impl MappedOperand {
    /// How TMA copies an operand, given its loops over batch, over m or n, and over k; none where
    /// a box of five dims with strides of 16 bytes cannot have its tiles.
    fn of(
        (name, parameter, dtype): (&'static str, usize, DType),
        [batch, side, k]: [&[[usize; 2]]; 3],
    ) -> Option<MappedOperand> {
        let (side, k) = (merged(side)?, merged(k)?);
        let bytes = dtype.size() as usize;
        let chunk = 16 / bytes;
        let may_lead = |[size, stride]: [usize; 2]| size == 1 || stride == 1;
        let may_follow =
            |[size, stride]: [usize; 2]| size == 1 || stride > 0 && stride.is_multiple_of(chunk);
        let k_major = may_lead(k) && may_follow(side);
        if !(k_major || may_lead(side) && may_follow(k)) {
            return None;
        }
        let ([first, _], [second, stride]) = if k_major { (k, side) } else { (side, k) };
        let stride = if second == 1 { first.next_multiple_of(chunk) } else { stride };
        let mut map = TensorMap {
            name,
            parameter,
            dtype,
            dims: vec![first as u64, second as u64],
            strides_bytes: vec![(stride * bytes) as u64],
            box_dims: vec![TILE_K as u32, if k_major { TILE_MN } else { TILE_K } as u32],
        };
        let mut dims = Vec::new();
        for (at, [size, stride]) in batch.iter().enumerate() {
            if *size <= 1 || *stride == 0 {
                continue;
            }
            if !stride.is_multiple_of(chunk) {
                return None;
            }
            dims.push(at);
            map.dims.push(*size as u64);
            map.strides_bytes.push((stride * bytes) as u64);
            map.box_dims.push(1);
        }
        let is_encodable = map.dims.len() <= DIMS
            && map.dims.iter().all(|size| *size <= 1 << 31)
            && map.strides_bytes.iter().all(|bytes| *bytes < 1 << 40);
        is_encodable.then_some(MappedOperand { k_major, map, batch: dims })
    }

    /// Bytes between the two halves along m or n of a tile, and between its groups of eight rows,
    /// as matrix descriptors have them. The first counts only where rows are along m or n.
    fn offsets(&self) -> [usize; 2] {
        [if self.k_major { 16 } else { HALF }, ROWS]
    }

    /// Bytes of a step of 16 along k.
    fn step(&self) -> usize {
        if self.k_major { 32 } else { 16 * ROW }
    }

    /// Prints the copies of a stage.
    fn print_copy(&self, side: &str, batch: &[usize], text: &mut Text) {
        let TensorMap { name, .. } = &self.map;
        let operand = name.trim_end_matches("_map");
        let coordinates: String = self
            .batch
            .iter()
            .map(|at| format!(", (i32)({})", coordinate_of(batch, *at, "batch")))
            .collect();
        let k = format!("(i32)(step * {TILE_K})");
        let boxes = if self.k_major { 1 } else { 2 };
        for at in 0..boxes {
            let to = format!("{operand}_stage + {}", at * HALF);
            let side = format!("(i32)(block_{side} + {})", at * TILE_K);
            let [first, second] = if self.k_major { [&k, &side] } else { [&side, &k] };
            line!(text, "tma_load({to}, {name}, full + stage, {first}, {second}{coordinates});");
        }
    }
}

/// Both operands of a product as TMA copies them.
fn operands(p: &Product) -> Option<[MappedOperand; 2]> {
    let loops = Loops::of(p);
    let a = [&loops.batch[0][..], &loops.m[0], &loops.k[0]];
    let b = [&loops.batch[1][..], &loops.n[0], &loops.k[1]];
    Some([
        MappedOperand::of(("a_map", 0, p.stored.a), a)?,
        MappedOperand::of(("b_map", 1, p.stored.b), b)?,
    ])
}

impl WarpgroupTile {
    /// Threads of a block: a warpgroup that copies, and those that multiply.
    pub(super) const THREADS: u32 = WARPGROUP * (CONSUMERS + 1);

    /// The tile of a product that runs on tensor cores, with parameters that are added to it; none
    /// where TMA cannot copy its operands.
    pub(super) fn of(
        product: &Product,
        [bias, addend]: [Option<usize>; 2],
    ) -> Option<WarpgroupTile> {
        let operands = operands(product)?;
        Some(WarpgroupTile { product: product.clone(), bias, addend, operands })
    }

    /// Bytes of dynamic shared memory of a block: stages, and two mbarriers for each.
    pub const SHARED_BYTES: usize = STAGES * (2 * STAGE + 16);

    /// Block tiles along batch, m and n.
    pub(super) fn tiles(&self) -> [usize; 3] {
        let [batch, m, n, _] = self.product.sizes();
        [batch, m.div_ceil(TILE_MN), n.div_ceil(TILE_MN)]
    }

    fn steps(&self) -> usize {
        self.product.sizes()[3].div_ceil(TILE_K)
    }

    pub(super) fn print(&self, parameters: &[Parameter], text: &mut Text) {
        let p = &self.product;
        let loops = Loops::of(p);
        let [_, rows, columns] = self.tiles();
        line!(text, "DYNAMIC_SHARED(stages, {});", Self::SHARED_BYTES);
        line!(text, "u64* const full = (u64*)(stages + {});", STAGES * 2 * STAGE);
        line!(text, "u64* const empty = full + {STAGES};");
        line!(text, "const u64 block_m = (u64)blockIdx.x / {columns} % {rows} * {TILE_MN};");
        line!(text, "const u64 block_n = (u64)blockIdx.x % {columns} * {TILE_MN};");
        line!(text, "const u64 batch = (u64)blockIdx.x / {};", columns * rows);
        line!(text, "if (threadIdx.x == 0) {{");
        line!(text, "for (u32 stage = 0; stage < {STAGES}; stage += 1) {{");
        line!(text, "mbarrier_init(full + stage, 1);");
        line!(text, "mbarrier_init(empty + stage, {});", CONSUMERS * WARPGROUP / 32);
        text.end();
        line!(text, "mbarrier_init_fence();");
        text.end();
        line!(text, "sync_block();");
        self.print_producer(text);
        self.print_consumer(&loops, parameters, text);
    }

    /// Prints the stage of a step, and where its operands lie.
    fn print_stage(text: &mut Text) {
        line!(text, "const u32 stage = step % {STAGES};");
        line!(text, "u8* const a_stage = stages + stage * {};", 2 * STAGE);
        line!(text, "u8* const b_stage = a_stage + {STAGE};");
    }

    fn print_producer(&self, text: &mut Text) {
        let batch: Vec<usize> = self.product.batch.iter().map(|l| l.size).collect();
        line!(text, "if (threadIdx.x < {WARPGROUP}) {{");
        line!(text, "setmaxnreg_dec<{}>();", REGISTERS[0]);
        line!(text, "if (threadIdx.x > 0) return;");
        line!(text, "NO_UNROLL");
        line!(text, "for (u32 step = 0; step < {}; step += 1) {{", self.steps());
        Self::print_stage(text);
        line!(text, "mbarrier_wait(empty + stage, (step / {STAGES} + 1) % 2);");
        line!(text, "mbarrier_expect(full + stage, {});", 2 * STAGE);
        for (operand, side) in self.operands.iter().zip(["m", "n"]) {
            operand.print_copy(side, &batch, text);
        }
        text.end();
        line!(text, "return;");
        text.end();
    }

    fn print_consumer(&self, loops: &Loops, parameters: &[Parameter], text: &mut Text) {
        let p = &self.product;
        let [_, m, n, _] = p.sizes();
        let kind = element(p.stored.a);
        line!(text, "setmaxnreg_inc<{}>();", REGISTERS[1]);
        line!(text, "const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;");
        line!(text, "const u32 consumer = threadIdx.x / {WARPGROUP} - 1;");
        line!(text, "const u64 batch_c = {};", nest(&loops.batch[2], "batch"));
        line!(text, "float acc[{}] = {{}};", TILE_MN / 2);
        if p.accumulate {
            Self::open_accumulators(loops, [m, n], text);
            line!(text, "acc[i] = {}[place];", parameters[2].name());
            text.end();
        }
        line!(text, "NO_UNROLL");
        line!(text, "for (u32 step = 0; step < {}; step += 1) {{", self.steps());
        Self::print_stage(text);
        line!(text, "mbarrier_wait(full + stage, step / {STAGES} % 2);");
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
        let majors = self.operands.each_ref().map(|operand| u8::from(!operand.k_major));
        line!(text, "warpgroup_fence(acc);");
        line!(text, "UNROLL");
        line!(text, "for (u32 k = 0; k < {}; k += 1) {{", TILE_K / 16);
        let [of_a, of_b] = majors;
        line!(
            text,
            "warpgroup_mma<{kind}, {of_a}, {of_b}>(acc, a + k * {step_a}, b + k * {step_b});"
        );
        text.end();
        line!(text, "warpgroup_commit();");
        line!(text, "warpgroup_wait<1>(acc);");
        line!(text, "if (step > 0 && lane == 0) mbarrier_arrive(empty + (step - 1) % {STAGES});");
        text.end();
        line!(text, "warpgroup_wait<0>(acc);");
        self.print_epilogue(loops, (parameters, [m, n]), text);
    }

    /// Opens the loop over a thread's accumulators, with their indices.
    fn open_accumulators(loops: &Loops, [m, n]: [usize; 2], text: &mut Text) {
        line!(text, "UNROLL");
        line!(text, "for (u32 i = 0; i < {}; i += 1) {{", TILE_MN / 2);
        line!(
            text,
            "const u64 m = block_m + consumer * 64 + warp * 16 + lane / 4 + i / 2 % 2 * 8;"
        );
        line!(text, "const u64 n = block_n + i / 4 * 8 + lane % 4 * 2 + i % 2;");
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
        line!(text, "{kept} x = Store<{kept}>::of(acc[i]);");
        let added = [self.bias.map(|at| (at, "n")), self.addend.map(|at| (at, "place"))];
        for (at, place) in added.into_iter().flatten() {
            let other = format!("Load<float>::of({}[{place}])", parameters[at].name());
            line!(text, "x = Store<{kept}>::of(Load<float>::of(x) + {other});");
        }
        line!(text, "{}[place] = x;", parameters[2].name());
        text.end();
    }
}

impl TensorMap {
    /// The same for the host's prelude, of a tensor that starts at an address.
    pub(super) fn host(&self, base: &str) -> String {
        let list = |of: &mut dyn Iterator<Item = String>| of.collect::<Vec<String>>().join(", ");
        let dims = list(&mut self.dims.iter().map(u64::to_string));
        let strides = list(&mut self.strides_bytes.iter().map(u64::to_string));
        let boxed = list(&mut self.box_dims.iter().map(u32::to_string));
        format!("TensorMap{{{base}, {}, {{{dims}}}, {{{strides}}}, {{{boxed}}}}}", self.dims.len())
    }
}

impl fmt::Display for WarpgroupTile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b] = &self.operands;
        write!(f, "block tiles of {TILE_MN}x{TILE_MN}x{TILE_K} in {STAGES} stages by TMA, ")?;
        write!(f, "{CONSUMERS} warpgroups, a {a}, b {b}")
    }
}

impl fmt::Display for MappedOperand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let major = if self.k_major { "K-major" } else { "MN-major" };
        write!(f, "{major} in {} dims", self.map.dims.len())
    }
}
