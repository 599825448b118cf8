//! The device functions of fused loops over rows that reduce: how rows and columns are spread.

use crate::cuda::function::{Function, Functions};
use crate::cuda::parameter::{Buffer, Parameter};
use crate::cuda::program::{Program, offsets};
use crate::cuda::reduction::{PartialSums, RowReduction, total_of};
use crate::cuda::rows::THREADS;
use crate::cuda::tile::Tile;
use crate::cuda::vector::Vectorized;
use crate::rows::{BinaryOp, Instr, Output, RowInput, Rows, UnaryOp};
use ir::target::Arch;

/// Longest row that one warp reduces. Chosen: 32 elements per lane.
const WARP_COLS: usize = 1024;
/// Blocks that sums are spread over. Chosen: four per multiprocessor of an H100.
const BLOCKS: usize = 528;
/// Fewest rows of a sum of all that are spread over the warps of a block.
const WARP_ROWS: usize = 64;
/// Rows that a warp adds up before there is a second partial sum, so that those of columns are an
/// eighth of what is summed at most.
const SUMMED_ROWS: usize = 8;
/// Most numbers that a thread adds to, side by side. Chosen: three sums of 24 columns fit.
const SUMS: usize = 96;
/// How wide rows are shared: threads of a block, blocks of a cluster, and the most registers of a
/// thread that hold what it has loaded. The first that fits is taken. Chosen: a thread of 512 has
/// 128 registers, and clusters of up to eight blocks are those that every GPU with clusters has.
const SHARES: [Share; 6] = [
    Share { threads: THREADS, cluster: 1, kept: 48 },
    Share { threads: 512, cluster: 1, kept: 48 },
    Share { threads: 512, cluster: 2, kept: 48 },
    Share { threads: 512, cluster: 4, kept: 48 },
    Share { threads: 512, cluster: 8, kept: 48 },
    Share { threads: 512, cluster: 1, kept: 80 },
];

/// The threads of a row, and what they keep of it.
#[derive(Clone, Copy)]
struct Share {
    threads: u32,
    cluster: u32,
    kept: usize,
}

/// The functions of a program that reduces.
pub(super) fn functions(
    what: &str,
    rows: &Rows,
    mut parameters: Vec<Parameter>,
    outputs: &[Parameter],
    (all, arch): (&mut Functions, Option<Arch>),
) {
    let mut tile = spread(rows, arch);
    let mut second = Vec::new();
    for (at, output) in rows.outputs.iter().enumerate() {
        let (len, chunks, partial, accumulate) = match output {
            Output::Store { .. } => continue,
            Output::ColSum { .. } if tile.has_all_rows() => {
                tile.sums[at] = Some(outputs[at].buffer);
                continue;
            }
            Output::ColSum { accumulate, .. } => (rows.cols, tile.blocks, rows.dtype, *accumulate),
            Output::TotalSum { accumulate, .. } => {
                (1, tile.grid(), total_of(rows.dtype), *accumulate)
            }
        };
        let workspace = all.workspaces.len();
        all.workspaces.push((len * chunks) as u64 * partial.size());
        tile.sums[at] = Some(Buffer::Workspace(workspace));
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
        grid: tile.grid() as u64,
        threads: tile.threads,
        tile: Tile::RowReduction(tile),
    });
    all.functions.append(&mut second);
}

/// How a program is spread over blocks.
fn spread(rows: &Rows, arch: Option<Arch>) -> RowReduction {
    let vector = Vectorized::of(rows);
    let width = vector.as_ref().map_or(1, |vector| vector.width);
    let reduces = rows.instrs.iter().any(|instr| matches!(instr, Instr::Reduce { .. }));
    let is_column = |output: &&Output| matches!(output, Output::ColSum { .. });
    let columns = rows.outputs.iter().filter(is_column).count();
    let vectors = rows.vectors();
    let is_by_row = |output: &Output| match output {
        Output::Store { access, .. } => access.col_stride == 0,
        Output::ColSum { .. } => false,
        Output::TotalSum { value, .. } => !vectors[*value],
    };
    if sums(rows) && !reduces && !rows.outputs.iter().any(is_by_row) && columns * width <= SUMS {
        // So that each warp has some.
        let fewest = if columns > 0 { THREADS as usize / 32 } else { WARP_ROWS };
        let group = if rows.rows < fewest { THREADS as usize } else { 32 };
        let groups = THREADS as usize / group;
        let segment = match columns {
            0 => {
                let most = rows.cols.div_ceil(group * width);
                let segments = (BLOCKS * groups).div_ceil(rows.rows).min(most);
                rows.cols.div_ceil(segments).next_multiple_of(group * width)
            }
            _ => group * width,
        };
        return spread_over(rows, vector, (group, segment), SHARES[0]);
    }
    let fits = columns * rows.cols.div_ceil(32 * width) * width <= SUMS;
    if rows.cols <= WARP_COLS && fits {
        return spread_over(rows, vector, (32, rows.cols), SHARES[0]);
    }
    let has_clusters = arch.is_some_and(Arch::has_clusters);
    let single = Vectorized::single(rows);
    let by = |share: Share, vector: &Option<Vectorized>| {
        let group = share.threads as usize * share.cluster as usize;
        spread_over(rows, vector.clone(), (group, rows.cols), share)
    };
    if reduces && is_read_again(rows) {
        for share in SHARES.into_iter().filter(|share| share.cluster == 1 || has_clusters) {
            let vector = if vector.is_some() { &vector } else { &single };
            let tile = by(share, vector);
            if tile.keeps {
                return tile;
            }
        }
    }
    by(SHARES[0], &vector)
}

/// Whether a program has sums over its rows.
fn sums(rows: &Rows) -> bool {
    rows.outputs.iter().any(|output| !matches!(output, Output::Store { .. }))
}

/// Whether several passes over a row need what one has loaded.
fn is_read_again(rows: &Rows) -> bool {
    let passes = Program::new(rows, Vec::new(), None).passes();
    let is_loaded = |at: &usize| matches!(rows.instrs[*at], Instr::Load { .. });
    let times = |at: usize| passes.iter().filter(|pass| pass.contains(&at)).count();
    (0..rows.instrs.len()).filter(is_loaded).any(|at| times(at) > 1)
}

/// How a program is spread whose rows, or their segments, each have `group` threads.
fn spread_over(
    rows: &Rows,
    vector: Option<Vectorized>,
    (group, segment): (usize, usize),
    Share { threads, cluster, kept: most_kept }: Share,
) -> RowReduction {
    let width = vector.as_ref().map_or(1, |vector| vector.width);
    let reduces = rows.instrs.iter().any(|instr| matches!(instr, Instr::Reduce { .. }));
    let is_column = |output: &&Output| matches!(output, Output::ColSum { .. });
    let columns = rows.outputs.iter().filter(is_column).count();
    let groups = (threads as usize / group).max(1);
    let segments = rows.cols.div_ceil(segment);
    // What the warps of a block have is added one after the other, which few rows do not pay.
    let most = if reduces && columns > 0 { BLOCKS / 2 } else { BLOCKS };
    let wanted = (most / segments / cluster as usize).max(1);
    let at_once = if columns > 0 && !reduces { SUMMED_ROWS } else { 1 };
    let of_each = rows.rows.div_ceil(groups);
    let chunk = if sums(rows) { of_each.div_ceil(wanted).max(at_once.min(of_each)) } else { 1 };
    let turns = segment.min(rows.cols).div_ceil(group * width);
    let in_registers = columns > 0 && columns * turns * width <= SUMS;
    let registers = |(at, input): (usize, &RowInput)| match &vector {
        Some(vector) if vector.inputs[at] => {
            turns * (width * input.dtype.size() as usize).div_ceil(4)
        }
        _ => 0,
    };
    let kept: usize = rows.inputs.iter().enumerate().map(registers).sum();
    let keeps = reduces && kept > 0 && kept <= most_kept;
    let of_value = turns * width * (rows.dtype.size() as usize).div_ceil(4);
    let room = if keeps { (most_kept - kept) / of_value.max(1) } else { 0 };
    RowReduction {
        rows: rows.clone(),
        group: group as u32,
        threads,
        cluster,
        chunk,
        blocks: rows.rows.div_ceil(chunk * groups),
        segment,
        turns: (in_registers || keeps).then_some(turns),
        in_registers,
        keeps,
        kept_values: costly(rows, vector.as_ref()).into_iter().take(room).collect(),
        sums: vec![None; rows.outputs.len()],
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
