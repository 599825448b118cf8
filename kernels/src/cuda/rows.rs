//! Fused loops over rows: one thread per point where nothing is reduced, else one warp or block per
//! row.
//!
//! Versions:
//! 1. each reduction is one pass over the row, which recomputes the values that it depends on;
//!    column and total sums are taken in two kernels, the first over chunks of rows whose bounds
//!    depend on the shape alone.
//! 2. loads and stores are vectors of up to 16 bytes where columns are aligned.

use std::collections::BTreeSet;
use std::fmt;

use ir::DType;

use super::function::{Function, Functions};
use super::moves::fill;
use super::parameter::{Buffer, Named, Parameter};
use super::program::{Program, combined, identity};
use super::text::{Text, element, line, number};
use super::tile::Tile;
use super::vector::Vectorized;
use crate::kernel::Fill;
use crate::rows::{Instr, Output, ReduceOp, Rows};

/// Threads of a block.
const THREADS: u32 = 256;
/// Longest row that one warp reduces. Chosen: 32 elements per lane.
const WARP_COLS: usize = 1024;
/// Most chunks of rows of a column or total sum. Chosen: a few per multiprocessor.
const CHUNKS: usize = 512;

/// One thread per point, or per row where all values are row scalars.
#[derive(Clone, Debug, PartialEq)]
pub struct Elementwise {
    /// The program.
    pub rows: Rows,
    /// Whether a thread takes a row.
    pub by_row: bool,
    /// Elementwise that a thread takes at once, side by side.
    pub vector: Option<Vectorized>,
}

/// One warp or block per chunk of rows, which it reduces one after the other.
#[derive(Clone, Debug, PartialEq)]
pub struct RowReduction {
    /// The program.
    pub rows: Rows,
    /// Threads that share a row: 32, or all of the block.
    pub group: u32,
    /// Rows of a chunk.
    pub chunk: usize,
    /// Chunks.
    pub chunks: usize,
    /// For each output that is a sum, the workspace of its partial sums.
    pub partials: Vec<Option<usize>>,
    /// Vectorised accesses; none where each element is accessed alone.
    pub vector: Option<Vectorized>,
}

/// Adds the partial sums of all chunks in ascending order: one thread per sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartialSums {
    /// Sums side by side.
    pub len: usize,
    /// Partial sums of each.
    pub chunks: usize,
    /// The type of partial sums.
    pub partial: DType,
    /// The type of the result.
    pub dtype: DType,
    /// Whether it is added to what is there.
    pub accumulate: bool,
}

/// The offsets of a program.
fn offsets(rows: &Rows) -> Vec<Named> {
    let offset = |(at, instr): (usize, &Instr)| match instr {
        Instr::Random(draw) => Some(Named::new(format!("draw{at}"), draw.offset)),
        Instr::Index { base, .. } => Some(Named::new(format!("index{at}"), *base)),
        Instr::Load { .. }
        | Instr::Const { .. }
        | Instr::Unary { .. }
        | Instr::Binary { .. }
        | Instr::Select { .. }
        | Instr::Reduce { .. } => None,
    };
    rows.instrs.iter().enumerate().filter_map(offset).collect()
}

/// The functions of a program on these buffers.
pub(super) fn functions(
    what: &str,
    rows: &Rows,
    inputs: &[Parameter],
    outputs: &[Parameter],
    all: &mut Functions,
) {
    if rows.rows * rows.cols == 0 {
        return empty_sums(what, rows, outputs, all);
    }
    let parameters: Vec<Parameter> = inputs.iter().chain(outputs).copied().collect();
    let is_point = |output: &Output| match output {
        Output::Store { access, .. } => access.col_stride > 0,
        Output::ColSum { .. } | Output::TotalSum { .. } => false,
    };
    let reduces = rows.instrs.iter().any(|instr| matches!(instr, Instr::Reduce { .. }));
    let vectors = rows.vectors();
    let by_row = rows.outputs.iter().all(|output| {
        matches!(output, Output::Store { access, .. } if access.col_stride == 0)
            && !vectors[output.value()]
    });
    if !reduces && (by_row || rows.outputs.iter().all(is_point)) {
        let points = if by_row { rows.rows } else { rows.rows * rows.cols };
        let vector = if by_row { None } else { Vectorized::of(rows) };
        let threads = points / vector.as_ref().map_or(1, |vector| vector.width);
        all.functions.push(Function {
            what: what.to_owned(),
            parameters,
            offsets: offsets(rows),
            grid: threads.div_ceil(THREADS as usize) as u64,
            threads: THREADS,
            tile: Tile::Elementwise(Elementwise { rows: rows.clone(), by_row, vector }),
        });
        return;
    }
    row_reduction(what, rows, parameters, outputs, all);
}

/// The functions of a program without points: its sums are zero, and nothing is stored.
fn empty_sums(what: &str, rows: &Rows, outputs: &[Parameter], all: &mut Functions) {
    for (output, parameter) in rows.outputs.iter().zip(outputs) {
        let len = match output {
            Output::ColSum { accumulate: false, .. } => rows.cols,
            Output::TotalSum { accumulate: false, .. } => 1,
            Output::Store { .. } | Output::ColSum { .. } | Output::TotalSum { .. } => continue,
        };
        let zeros = Fill { len, dtype: parameter.dtype, value: 0.0 };
        all.functions.push(fill(what, &zeros, *parameter));
    }
}

fn row_reduction(
    what: &str,
    rows: &Rows,
    mut parameters: Vec<Parameter>,
    outputs: &[Parameter],
    all: &mut Functions,
) {
    let group = if rows.cols <= WARP_COLS { 32 } else { THREADS };
    let sums = rows.outputs.iter().any(|output| !matches!(output, Output::Store { .. }));
    let chunk = if sums { rows.rows.div_ceil(CHUNKS) } else { 1 };
    let chunks = rows.rows.div_ceil(chunk);
    let mut partials = vec![None; rows.outputs.len()];
    let mut second = Vec::new();
    for (at, output) in rows.outputs.iter().enumerate() {
        let (len, partial, accumulate) = match output {
            Output::Store { .. } => continue,
            Output::ColSum { accumulate, .. } => (rows.cols, rows.dtype, *accumulate),
            Output::TotalSum { accumulate, .. } => {
                (1, if rows.dtype == DType::I64 { DType::I64 } else { DType::F64 }, *accumulate)
            }
        };
        let workspace = all.workspaces.len();
        all.workspaces.push((len * chunks) as u64 * partial.size());
        partials[at] = Some(workspace);
        let workspace = Parameter { buffer: Buffer::Workspace(workspace), dtype: partial };
        parameters.push(workspace);
        second.push(Function {
            what: format!("{what}: sums {at}"),
            parameters: vec![workspace, outputs[at]],
            offsets: Vec::new(),
            grid: len.div_ceil(THREADS as usize) as u64,
            threads: THREADS,
            tile: Tile::PartialSums(PartialSums {
                len,
                chunks,
                partial,
                dtype: rows.dtype,
                accumulate,
            }),
        });
    }
    all.functions.push(Function {
        what: what.to_owned(),
        parameters,
        offsets: offsets(rows),
        grid: chunks.div_ceil((THREADS / group) as usize) as u64,
        threads: THREADS,
        tile: Tile::RowReduction(RowReduction {
            rows: rows.clone(),
            group,
            chunk,
            chunks,
            partials,
            vector: Vectorized::of(rows),
        }),
    });
    all.functions.append(&mut second);
}

impl Elementwise {
    pub(super) fn print(&self, parameters: &[Parameter], text: &mut Text) {
        let Elementwise { rows, by_row, vector } = self;
        let program = Program::new(rows, names(rows, parameters), vector.as_ref());
        if let Some(vector) = vector {
            return self.print_vectorized(&program, vector.width, parameters, text);
        }
        let (index, points) =
            if *by_row { ("row", rows.rows) } else { ("point", rows.rows * rows.cols) };
        line!(text, "const u64 {index} = (u64)blockIdx.x * {THREADS} + threadIdx.x;");
        line!(text, "if ({index} >= {points}) return;");
        if !by_row {
            line!(text, "const u64 row = point / {}, col = point % {};", rows.cols, rows.cols);
        }
        program.streams(text);
        program.values(text, &(0..rows.instrs.len()).collect());
        for at in 0..rows.outputs.len() {
            program.store(text, at, &parameters[rows.inputs.len() + at].name());
        }
    }

    fn print_vectorized(
        &self,
        program: &Program<'_>,
        width: usize,
        parameters: &[Parameter],
        text: &mut Text,
    ) {
        let Rows { rows, cols, inputs, outputs, .. } = &self.rows;
        line!(text, "const u64 point = ((u64)blockIdx.x * {THREADS} + threadIdx.x) * {width};");
        line!(text, "if (point >= {}) return;", rows * cols);
        line!(text, "const u64 row = point / {cols}, first = point % {cols};");
        program.streams(text);
        let values = (0..self.rows.instrs.len()).collect();
        let target = |at: usize| (at, parameters[inputs.len() + at].name());
        let targets: Vec<(usize, String)> = (0..outputs.len()).map(target).collect();
        program.load_vectors(&values, text);
        program.open_stores(&targets, text);
        program.open_columns(text);
        program.values(text, &values);
        targets.iter().for_each(|(at, target)| program.store(text, *at, target));
        text.end();
        program.close_stores(&targets, text);
    }
}

fn names(rows: &Rows, parameters: &[Parameter]) -> Vec<String> {
    parameters[..rows.inputs.len()].iter().map(Parameter::name).collect()
}

impl RowReduction {
    pub(super) fn print(&self, parameters: &[Parameter], text: &mut Text) {
        let RowReduction { rows, group, chunk, chunks, .. } = self;
        let program = Program::new(rows, names(rows, parameters), self.vector.as_ref());
        let groups = THREADS / group;
        if *group < THREADS {
            line!(text, "const u32 lane = threadIdx.x % {group};");
            line!(text, "const u64 chunk = (u64)blockIdx.x * {groups} + threadIdx.x / {group};");
            line!(text, "if (chunk >= {chunks}) return;");
        } else {
            line!(text, "const u32 lane = threadIdx.x;");
            line!(text, "const u64 chunk = blockIdx.x;");
            let shared = [(rows.dtype, "warp_values"), (DType::F64, "warp_totals")];
            for (dtype, name) in shared {
                line!(text, "SHARED({}, {name}, {});", element(dtype), THREADS / 32);
            }
        }
        program.streams(text);
        self.start_sums(&program, text);
        line!(text, "for (u64 row = chunk * {chunk}; row < (chunk + 1) * {chunk}; row += 1) {{");
        if rows.rows % chunk != 0 {
            line!(text, "if (row >= {}) break;", rows.rows);
        }
        for level in 0..=program.depth() {
            self.reduce(&program, level, text);
            program.values(text, &program.row_scalars(level));
        }
        self.write(&program, parameters, text);
        text.end();
        self.finish_sums(text);
    }

    fn workspace(&self, output: usize) -> Option<Buffer> {
        self.partials[output].map(Buffer::Workspace)
    }

    fn start_sums(&self, program: &Program<'_>, text: &mut Text) {
        let rows = &self.rows;
        for (at, output) in rows.outputs.iter().enumerate() {
            let Some(workspace) = self.workspace(at) else { continue };
            if let Output::ColSum { .. } = output {
                // By the threads that add to them.
                self.open_columns(program, (&BTreeSet::new(), &[]), text);
                line!(text, "{workspace}[chunk * {} + col] = 0;", rows.cols);
                self.close_columns(program, &[], text);
            } else {
                let total = if rows.dtype == DType::I64 { "i64" } else { "double" };
                line!(text, "{total} total{at} = 0;");
            }
        }
    }

    /// Prints the reductions of a level, in one pass over the row.
    fn reduce(&self, program: &Program<'_>, level: usize, text: &mut Text) {
        let (rows, compute) = (program.rows, program.compute());
        let (vectors, others): (Vec<_>, Vec<_>) =
            program.reductions(level).into_iter().partition(|(_, _, x)| program.vectors[*x]);
        for (at, op, x) in others {
            let sum = match (op, rows.dtype) {
                (ReduceOp::Sum, DType::I64) => format!("mul(v{x}, {}LL)", rows.cols),
                (ReduceOp::Sum, dtype) => format!("v{x} * {}", number(dtype, rows.cols as f64)),
                (ReduceOp::Max | ReduceOp::Min, _) => format!("v{x}"),
            };
            line!(text, "const {compute} v{at} = {sum};");
        }
        if vectors.is_empty() {
            return;
        }
        for (at, op, _) in &vectors {
            line!(text, "{compute} v{at} = {};", identity(*op, rows.dtype));
        }
        let values = program.vectors_of(vectors.iter().map(|(_, _, x)| *x));
        self.open_columns(program, (&values, &[]), text);
        program.values(text, &values);
        for (at, op, x) in &vectors {
            // The sum of one number is that, its sign too if it is zero.
            let next = match (op, rows.cols) {
                (ReduceOp::Sum, 1) => format!("v{x}"),
                _ => combined(*op, rows.dtype, &format!("v{at}"), &format!("v{x}")),
            };
            line!(text, "v{at} = {next};");
        }
        self.close_columns(program, &[], text);
        for (at, op, _) in &vectors {
            if rows.cols == 1 {
                line!(text, "v{at} = shuffle(v{at}, 0);");
            } else {
                self.reduce_group(&format!("v{at}"), "warp_values", (*op, rows.dtype), text);
            }
        }
    }

    /// Opens the loop over the columns of a lane, with the vector loads that some values depend on.
    fn open_columns(
        &self,
        program: &Program<'_>,
        (values, targets): (&BTreeSet<usize>, &[(usize, String)]),
        text: &mut Text,
    ) {
        let (cols, group) = (self.rows.cols, self.group as usize);
        let Some(Vectorized { width, .. }) = self.vector else {
            line!(text, "for (u64 col = lane; col < {cols}; col += {group}) {{");
            return;
        };
        let step = group * width;
        line!(text, "for (u64 first = lane * {width}; first < {cols}; first += {step}) {{");
        program.load_vectors(values, text);
        program.open_stores(targets, text);
        program.open_columns(text);
    }

    /// Closes it, after the vector stores.
    fn close_columns(&self, program: &Program<'_>, targets: &[(usize, String)], text: &mut Text) {
        text.end();
        if self.vector.is_some() {
            program.close_stores(targets, text);
            text.end();
        }
    }

    /// Reduces a value over the threads that share a row: a butterfly within the warp, then over
    /// the warps in ascending order.
    fn reduce_group(
        &self,
        value: &str,
        workspace: &str,
        (op, dtype): (ReduceOp, DType),
        text: &mut Text,
    ) {
        line!(text, "for (int bits = 16; bits > 0; bits /= 2) {{");
        let other = format!("shuffle_xor({value}, bits)");
        line!(text, "{value} = {};", combined(op, dtype, value, &other));
        text.end();
        if self.group == 32 {
            return;
        }
        line!(text, "if (lane % 32 == 0) {workspace}[lane / 32] = {value};");
        line!(text, "sync_block();");
        line!(text, "{value} = {workspace}[0];");
        line!(text, "for (int warp = 1; warp < {}; warp += 1) {{", THREADS / 32);
        line!(text, "{value} = {};", combined(op, dtype, value, &format!("{workspace}[warp]")));
        text.end();
        line!(text, "sync_block();");
    }

    /// Prints the last pass over the row: sums and stores.
    fn write(&self, program: &Program<'_>, parameters: &[Parameter], text: &mut Text) {
        let rows = program.rows;
        let target = |at: usize| parameters[rows.inputs.len() + at].name();
        let is_vector = |output: &&Output| match output {
            Output::Store { access, .. } => access.col_stride > 0,
            Output::ColSum { .. } => true,
            Output::TotalSum { value, .. } => program.vectors[*value],
        };
        let wanted: Vec<usize> = rows.outputs.iter().filter(is_vector).map(Output::value).collect();
        if !wanted.is_empty() {
            let values = program.vectors_of(wanted);
            let stored = rows.outputs.iter().enumerate().filter(|(_, output)| is_vector(output));
            let targets: Vec<(usize, String)> = stored.map(|(at, _)| (at, target(at))).collect();
            self.open_columns(program, (&values, &targets), text);
            program.values(text, &values);
            for (at, output) in rows.outputs.iter().enumerate() {
                self.add(program, (at, output), text);
            }
            targets.iter().for_each(|(at, target)| program.store(text, *at, target));
            self.close_columns(program, &targets, text);
        }
        // A row scalar may be stored in place of an input that other lanes still read.
        line!(text, "{}", if self.group == 32 { "sync_warp();" } else { "sync_block();" });
        for (at, output) in rows.outputs.iter().enumerate().filter(|(_, o)| !is_vector(o)) {
            line!(text, "if (lane == 0) {{");
            match output {
                Output::TotalSum { value, .. } => self.add_total(program, at, *value, text),
                Output::Store { .. } => program.store(text, at, &target(at)),
                Output::ColSum { .. } => unreachable!("column sums are of all columns"),
            }
            text.end();
        }
    }

    fn add(&self, program: &Program<'_>, (at, output): (usize, &Output), text: &mut Text) {
        let dtype = program.rows.dtype;
        match (output, self.workspace(at)) {
            (Output::ColSum { value, .. }, Some(workspace)) => {
                let sum = format!("{workspace}[chunk * {} + col]", program.rows.cols);
                let next = combined(ReduceOp::Sum, dtype, &sum, &format!("v{value}"));
                line!(text, "{sum} = {next};");
            }
            (Output::TotalSum { value, .. }, Some(_)) if program.vectors[*value] => {
                self.add_total(program, at, *value, text);
            }
            _ => {}
        }
    }

    fn add_total(&self, program: &Program<'_>, at: usize, value: usize, text: &mut Text) {
        let sum = combined(
            ReduceOp::Sum,
            program.rows.dtype,
            &format!("total{at}"),
            &format!("v{value}"),
        );
        line!(text, "total{at} = {sum};");
    }

    fn finish_sums(&self, text: &mut Text) {
        let dtype = if self.rows.dtype == DType::I64 { DType::I64 } else { DType::F64 };
        for (at, output) in self.rows.outputs.iter().enumerate() {
            let (Output::TotalSum { .. }, Some(workspace)) = (output, self.workspace(at)) else {
                continue;
            };
            let shared = if dtype == DType::I64 { "warp_values" } else { "warp_totals" };
            self.reduce_group(&format!("total{at}"), shared, (ReduceOp::Sum, dtype), text);
            line!(text, "if (lane == 0) {workspace}[chunk] = total{at};");
        }
    }
}

impl PartialSums {
    pub(super) fn print(&self, parameters: &[Parameter], text: &mut Text) {
        let PartialSums { len, chunks, partial, dtype, accumulate } = *self;
        let (workspace, target) = (parameters[0].name(), parameters[1].name());
        line!(text, "const u64 at = (u64)blockIdx.x * {THREADS} + threadIdx.x;");
        line!(text, "if (at >= {len}) return;");
        line!(text, "{} sum = {workspace}[at];", element(partial));
        line!(text, "for (u64 chunk = 1; chunk < {chunks}; chunk += 1) {{");
        let next = format!("{workspace}[chunk * {len} + at]");
        line!(text, "sum = {};", combined(ReduceOp::Sum, partial, "sum", &next));
        text.end();
        let sum = format!("Store<{}>::of(sum)", element(dtype));
        let old = format!("{target}[at]");
        let sum = if accumulate { combined(ReduceOp::Sum, dtype, &old, &sum) } else { sum };
        line!(text, "{target}[at] = {sum};");
    }
}

fn show_width(f: &mut fmt::Formatter<'_>, vector: Option<&Vectorized>) -> fmt::Result {
    vector.map_or(Ok(()), |vector| write!(f, ", vectors of {} columns", vector.width))
}

impl fmt::Display for Elementwise {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let item = if self.by_row { "row" } else { "point" };
        write!(f, "one thread per {item} of {}x{}", self.rows.rows, self.rows.cols)?;
        show_width(f, self.vector.as_ref())
    }
}

impl fmt::Display for RowReduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RowReduction { rows, group, chunk, .. } = self;
        let threads = if *group == 32 { "warp" } else { "block" };
        match chunk {
            1 => write!(f, "one {threads} per row of {}x{}", rows.rows, rows.cols)?,
            _ => write!(f, "one {threads} per {chunk} rows of {}x{}", rows.rows, rows.cols)?,
        }
        show_width(f, self.vector.as_ref())
    }
}

impl fmt::Display for PartialSums {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "one thread per sum of {} partial sums", self.chunks)
    }
}
