//! The device functions of fused loops over rows that reduce: how rows and columns are spread.

use crate::cuda::function::{Function, Functions};
use crate::cuda::parameter::{Buffer, Parameter};
use crate::cuda::program::{Program, offsets};
use crate::cuda::reduction::{PartialSums, RowReduction, total_of};
use crate::cuda::rows::THREADS;
use crate::cuda::tile::Tile;
use crate::cuda::vector::Vectorized;
use crate::rows::{BinaryOp, Instr, Output, RowInput, Rows, UnaryOp};

/// Longest row that one warp reduces. Chosen: 32 elements per lane.
const WARP_COLS: usize = 1024;
/// Blocks that sums are spread over. Chosen: four per multiprocessor of an H100.
const BLOCKS: usize = 528;
/// Fewest rows that are spread over the warps of a block.
const WARP_ROWS: usize = 64;
/// Most numbers that a thread adds to, side by side. Chosen: three sums of 24 columns fit.
const SUMS: usize = 96;
/// Most registers of a thread that hold what it has loaded.
const KEPT: usize = 48;

/// The functions of a program that reduces.
pub(super) fn functions(
    what: &str,
    rows: &Rows,
    mut parameters: Vec<Parameter>,
    outputs: &[Parameter],
    all: &mut Functions,
) {
    let mut tile = spread(rows);
    let mut second = Vec::new();
    for (at, output) in rows.outputs.iter().enumerate() {
        let (len, chunks, partial, accumulate) = match output {
            Output::Store { .. } => continue,
            Output::ColSum { accumulate, .. } => (rows.cols, tile.blocks, rows.dtype, *accumulate),
            Output::TotalSum { accumulate, .. } => {
                (1, tile.blocks * tile.segments(), total_of(rows.dtype), *accumulate)
            }
        };
        let workspace = all.workspaces.len();
        all.workspaces.push((len * chunks) as u64 * partial.size());
        tile.partials[at] = Some(workspace);
        let workspace = Parameter { buffer: Buffer::Workspace(workspace), dtype: partial };
        parameters.push(workspace);
        let sums = PartialSums { len, chunks, partial, dtype: rows.dtype, accumulate };
        second.push(Function {
            what: format!("{what}: sums {at}"),
            parameters: vec![workspace, outputs[at]],
            offsets: Vec::new(),
            grid: len.div_ceil(sums.side()) as u64,
            threads: THREADS,
            tile: Tile::PartialSums(sums),
        });
    }
    all.functions.push(Function {
        what: what.to_owned(),
        parameters,
        offsets: offsets(rows),
        grid: (tile.blocks * tile.segments()) as u64,
        threads: THREADS,
        tile: Tile::RowReduction(tile),
    });
    all.functions.append(&mut second);
}

/// How a program is spread over blocks.
fn spread(rows: &Rows) -> RowReduction {
    let vector = Vectorized::of(rows);
    let width = vector.as_ref().map_or(1, |vector| vector.width);
    let reduces = rows.instrs.iter().any(|instr| matches!(instr, Instr::Reduce { .. }));
    let sums = rows.outputs.iter().any(|output| !matches!(output, Output::Store { .. }));
    let is_column = |output: &&Output| matches!(output, Output::ColSum { .. });
    let columns = rows.outputs.iter().filter(is_column).count();
    let vectors = rows.vectors();
    let is_by_row = |output: &Output| match output {
        Output::Store { access, .. } => access.col_stride == 0,
        Output::ColSum { .. } => false,
        Output::TotalSum { value, .. } => !vectors[*value],
    };
    let in_segments =
        sums && !reduces && !rows.outputs.iter().any(is_by_row) && columns * width <= SUMS;
    let fits = |group: usize, cols: usize| columns * cols.div_ceil(group * width) * width <= SUMS;
    let warp = 32;
    let block = THREADS as usize;
    let group = match in_segments {
        true if rows.rows >= WARP_ROWS => warp,
        false if rows.cols <= WARP_COLS && fits(warp, rows.cols) => warp,
        _ => block,
    };
    let groups = block / group;
    let segment = match columns {
        _ if !in_segments => rows.cols,
        0 => {
            let most = rows.cols.div_ceil(group * width);
            let segments = (BLOCKS * groups).div_ceil(rows.rows).min(most);
            rows.cols.div_ceil(segments).next_multiple_of(group * width)
        }
        _ => group * width,
    };
    let segments = rows.cols.div_ceil(segment);
    // What the warps of a block have is added one after the other, which few rows do not pay.
    let most = if reduces && columns > 0 { BLOCKS / 2 } else { BLOCKS };
    let wanted = (most / segments).max(1);
    let chunk = if sums { rows.rows.div_ceil(wanted * groups) } else { 1 };
    let turns = segment.min(rows.cols).div_ceil(group * width);
    let in_registers = columns > 0 && fits(group, segment);
    let registers = |(at, input): (usize, &RowInput)| match &vector {
        Some(vector) if vector.inputs[at] => {
            turns * (width * input.dtype.size() as usize).div_ceil(4)
        }
        _ => 0,
    };
    let kept: usize = rows.inputs.iter().enumerate().map(registers).sum();
    let keeps = reduces && kept > 0 && kept <= KEPT;
    let of_value = turns * width * (rows.dtype.size() as usize).div_ceil(4);
    let room = if keeps { (KEPT - kept) / of_value.max(1) } else { 0 };
    RowReduction {
        rows: rows.clone(),
        group: group as u32,
        chunk,
        blocks: rows.rows.div_ceil(chunk * groups),
        segment,
        turns: (in_registers || keeps).then_some(turns),
        in_registers,
        keeps,
        kept_values: costly(rows, vector.as_ref()).into_iter().take(room).collect(),
        partials: vec![None; rows.outputs.len()],
        vector,
    }
}

/// Values of many operations that several passes over a row need, the last one first.
fn costly(rows: &Rows, vector: Option<&Vectorized>) -> Vec<usize> {
    let passes = Program::new(rows, Vec::new(), vector).passes();
    let is_costly = |at: &usize| match &rows.instrs[*at] {
        Instr::Unary { op, .. } => matches!(
            op,
            UnaryOp::Exp
                | UnaryOp::Log
                | UnaryOp::Sqrt
                | UnaryOp::Rsqrt
                | UnaryOp::Recip
                | UnaryOp::Tanh
                | UnaryOp::Erf
                | UnaryOp::Sin
                | UnaryOp::Cos
                | UnaryOp::Sigmoid
                | UnaryOp::GeluTanh
                | UnaryOp::GeluErf
                | UnaryOp::Silu
        ),
        Instr::Binary { op, .. } => matches!(
            op,
            BinaryOp::Div
                | BinaryOp::Pow
                | BinaryOp::GeluTanhGrad
                | BinaryOp::GeluErfGrad
                | BinaryOp::SiluGrad
        ),
        Instr::Random(_) => true,
        Instr::Load { .. }
        | Instr::Const { .. }
        | Instr::Index { .. }
        | Instr::Select { .. }
        | Instr::Reduce { .. } => false,
    };
    let is_repeated = |at: &usize| passes.iter().filter(|pass| pass.contains(at)).count() > 1;
    let vectors = rows.vectors();
    let all = (0..rows.instrs.len()).filter(|at| vectors[*at] && is_costly(at) && is_repeated(at));
    // The last ones first: what they are made of is then not needed again.
    let mut all: Vec<usize> = all.collect();
    all.reverse();
    all
}
