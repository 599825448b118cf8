//! Block programs: a thread a point where nothing is summed, else a team of threads a row.
//!
//! Versions:
//! 1. a warp or a block a row, values computed anew in the sweep of each reduction; sums over rows
//!    in two passes, of chunks of rows whose cut depends on the shape alone.
//! 2. loads and stores of up to 16 bytes where columns are aligned.

use std::collections::BTreeSet;
use std::fmt;

use ir::DType;

use super::function::{Buffer, Function, Functions, Named, Parameter};
use super::program::{Program, combined, identity};
use super::text::{Text, element, line, number};
use super::tile::Tile;
use super::wide::Wide;
use crate::rows::{Instr, Output, ReduceOp, Rows};

/// Threads of a block.
const THREADS: u32 = 256;
/// Longest row that a warp takes. Chosen: 32 numbers a lane.
const WARP_COLS: usize = 1024;
/// Chunks of rows of a sum over them, at most. Chosen: some for each multiprocessor.
const CHUNKS: usize = 512;

/// A thread a point, or a row where values differ by row alone.
#[derive(Clone, Debug, PartialEq)]
pub struct Points {
    /// The program.
    pub rows: Rows,
    /// Whether points are rows.
    pub by_row: bool,
    /// Points that a thread takes at once, side by side.
    pub wide: Option<Wide>,
}

/// A team of threads takes a chunk of rows, one after the other.
#[derive(Clone, Debug, PartialEq)]
pub struct Sweeps {
    /// The program.
    pub rows: Rows,
    /// Threads of a team: a warp or the block.
    pub team: u32,
    /// Rows of a chunk.
    pub chunk: usize,
    /// Chunks.
    pub chunks: usize,
    /// For each output that is a sum, the workspace of its partial sums.
    pub partials: Vec<Option<usize>>,
    /// Columns that a thread takes at once.
    pub wide: Option<Wide>,
}

/// Adds partial sums in ascending order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sum {
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

/// The functions of a program whose inputs and outputs are those buffers.
pub(super) fn functions(
    what: &str,
    rows: &Rows,
    inputs: &[Parameter],
    outputs: &[Parameter],
    all: &mut Functions,
) {
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
        let points =
            if by_row { rows.rows.min(rows.rows * rows.cols) } else { rows.rows * rows.cols };
        let wide = if by_row { None } else { Wide::of(rows) };
        let threads = points / wide.as_ref().map_or(1, |wide| wide.width);
        all.functions.push(Function {
            what: what.to_owned(),
            parameters,
            offsets: offsets(rows),
            grid: threads.div_ceil(THREADS as usize) as u64,
            threads: THREADS,
            tile: Tile::Points(Points { rows: rows.clone(), by_row, wide }),
        });
        return;
    }
    sweeps(what, rows, parameters, outputs, all);
}

fn sweeps(
    what: &str,
    rows: &Rows,
    mut parameters: Vec<Parameter>,
    outputs: &[Parameter],
    all: &mut Functions,
) {
    let team = if rows.cols <= WARP_COLS { 32 } else { THREADS };
    let sums = rows.outputs.iter().any(|output| !matches!(output, Output::Store { .. }));
    let chunk = if sums { rows.rows.div_ceil(CHUNKS).max(1) } else { 1 };
    // Sums of no rows are zero.
    let chunks = rows.rows.div_ceil(chunk).max(usize::from(sums));
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
        let room = all.workspaces.len();
        all.workspaces.push((len * chunks) as u64 * partial.size());
        partials[at] = Some(room);
        let room = Parameter { buffer: Buffer::Workspace(room), dtype: partial };
        parameters.push(room);
        second.push(Function {
            what: format!("{what}: sums {at}"),
            parameters: vec![room, outputs[at]],
            offsets: Vec::new(),
            grid: len.div_ceil(THREADS as usize) as u64,
            threads: THREADS,
            tile: Tile::Sum(Sum { len, chunks, partial, dtype: rows.dtype, accumulate }),
        });
    }
    all.functions.push(Function {
        what: what.to_owned(),
        parameters,
        offsets: offsets(rows),
        grid: chunks.div_ceil((THREADS / team) as usize) as u64,
        threads: THREADS,
        tile: Tile::Sweeps(Sweeps {
            rows: rows.clone(),
            team,
            chunk,
            chunks,
            partials,
            wide: Wide::of(rows),
        }),
    });
    all.functions.append(&mut second);
}

impl Points {
    pub(super) fn print(&self, parameters: &[Parameter], text: &mut Text) {
        let Points { rows, by_row, wide } = self;
        let program = Program::new(rows, names(rows, parameters), wide.as_ref());
        if let Some(wide) = wide {
            return self.print_wide(&program, wide.width, parameters, text);
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

    fn print_wide(
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
        program.load_wide(&values, text);
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

impl Sweeps {
    pub(super) fn print(&self, parameters: &[Parameter], text: &mut Text) {
        let Sweeps { rows, team, chunk, chunks, .. } = self;
        let program = Program::new(rows, names(rows, parameters), self.wide.as_ref());
        let teams = THREADS / team;
        if *team < THREADS {
            line!(text, "const u32 lane = threadIdx.x % {team};");
            line!(text, "const u64 chunk = (u64)blockIdx.x * {teams} + threadIdx.x / {team};");
            line!(text, "if (chunk >= {chunks}) return;");
        } else {
            line!(text, "const u32 lane = threadIdx.x;");
            line!(text, "const u64 chunk = blockIdx.x;");
            let meeting = [(rows.dtype, "meeting"), (DType::F64, "meeting_total")];
            for (dtype, name) in meeting {
                line!(text, "SHARED({}, {name}, {});", element(dtype), THREADS / 32);
            }
        }
        program.streams(text);
        self.start_sums(&program, text);
        line!(text, "for (u64 row = chunk * {chunk}; row < (chunk + 1) * {chunk}; row += 1) {{");
        if rows.rows % chunk != 0 || rows.rows == 0 {
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

    fn room(&self, output: usize) -> Option<Buffer> {
        self.partials[output].map(Buffer::Workspace)
    }

    fn start_sums(&self, program: &Program<'_>, text: &mut Text) {
        let rows = &self.rows;
        for (at, output) in rows.outputs.iter().enumerate() {
            let Some(room) = self.room(at) else { continue };
            if let Output::ColSum { .. } = output {
                // By the threads that add to them.
                self.open_columns(program, (&BTreeSet::new(), &[]), text);
                line!(text, "{room}[chunk * {} + col] = 0;", rows.cols);
                self.close_columns(program, &[], text);
            } else {
                let total = if rows.dtype == DType::I64 { "i64" } else { "double" };
                line!(text, "{total} total{at} = 0;");
            }
        }
    }

    /// Prints the reductions of a level.
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
                line!(text, "v{at} = of_lane(v{at}, 0);");
            } else {
                self.meet(&format!("v{at}"), "meeting", (*op, rows.dtype), text);
            }
        }
    }

    /// Opens the loop over the columns of a lane, and loads what some values are made of.
    fn open_columns(
        &self,
        program: &Program<'_>,
        (values, targets): (&BTreeSet<usize>, &[(usize, String)]),
        text: &mut Text,
    ) {
        let (cols, team) = (self.rows.cols, self.team as usize);
        let Some(Wide { width, .. }) = self.wide else {
            line!(text, "for (u64 col = lane; col < {cols}; col += {team}) {{");
            return;
        };
        let step = team * width;
        line!(text, "for (u64 first = lane * {width}; first < {cols}; first += {step}) {{");
        program.load_wide(values, text);
        program.open_stores(targets, text);
        program.open_columns(text);
    }

    /// Closes it, and stores.
    fn close_columns(&self, program: &Program<'_>, targets: &[(usize, String)], text: &mut Text) {
        text.end();
        if self.wide.is_some() {
            program.close_stores(targets, text);
            text.end();
        }
    }

    /// Combines the numbers of a team, in an order that depends on its size alone.
    fn meet(&self, value: &str, room: &str, (op, dtype): (ReduceOp, DType), text: &mut Text) {
        line!(text, "for (int bits = 16; bits > 0; bits /= 2) {{");
        let other = format!("swapped({value}, bits)");
        line!(text, "{value} = {};", combined(op, dtype, value, &other));
        text.end();
        if self.team == 32 {
            return;
        }
        line!(text, "if (lane % 32 == 0) {room}[lane / 32] = {value};");
        line!(text, "meet_block();");
        line!(text, "{value} = {room}[0];");
        line!(text, "for (int warp = 1; warp < {}; warp += 1) {{", THREADS / 32);
        line!(text, "{value} = {};", combined(op, dtype, value, &format!("{room}[warp]")));
        text.end();
        line!(text, "meet_block();");
    }

    /// Prints the last sweep: sums and stores.
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
        // Row scalars may lie where the team has read the row's.
        line!(text, "{}", if self.team == 32 { "meet_warp();" } else { "meet_block();" });
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
        match (output, self.room(at)) {
            (Output::ColSum { value, .. }, Some(room)) => {
                let sum = format!("{room}[chunk * {} + col]", program.rows.cols);
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
            let (Output::TotalSum { .. }, Some(room)) = (output, self.room(at)) else { continue };
            let meeting = if dtype == DType::I64 { "meeting" } else { "meeting_total" };
            self.meet(&format!("total{at}"), meeting, (ReduceOp::Sum, dtype), text);
            line!(text, "if (lane == 0) {room}[chunk] = total{at};");
        }
    }
}

impl Sum {
    pub(super) fn print(&self, parameters: &[Parameter], text: &mut Text) {
        let Sum { len, chunks, partial, dtype, accumulate } = *self;
        let (room, target) = (parameters[0].name(), parameters[1].name());
        line!(text, "const u64 at = (u64)blockIdx.x * {THREADS} + threadIdx.x;");
        line!(text, "if (at >= {len}) return;");
        line!(text, "{} sum = {room}[at];", element(partial));
        line!(text, "for (u64 chunk = 1; chunk < {chunks}; chunk += 1) {{");
        let next = format!("{room}[chunk * {len} + at]");
        line!(text, "sum = {};", combined(ReduceOp::Sum, partial, "sum", &next));
        text.end();
        let sum = format!("Store<{}>::of(sum)", element(dtype));
        let old = format!("{target}[at]");
        let sum = if accumulate { combined(ReduceOp::Sum, dtype, &old, &sum) } else { sum };
        line!(text, "{target}[at] = {sum};");
    }
}

fn show_width(f: &mut fmt::Formatter<'_>, wide: Option<&Wide>) -> fmt::Result {
    wide.map_or(Ok(()), |wide| write!(f, ", {} columns at once", wide.width))
}

impl fmt::Display for Points {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = if self.by_row { "row" } else { "point" };
        write!(f, "a thread a {what} of {}x{}", self.rows.rows, self.rows.cols)?;
        show_width(f, self.wide.as_ref())
    }
}

impl fmt::Display for Sweeps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Sweeps { rows, team, chunk, .. } = self;
        write!(f, "{team} threads for {chunk} rows of {}x{}", rows.rows, rows.cols)?;
        show_width(f, self.wide.as_ref())
    }
}

impl fmt::Display for Sum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a thread a sum of {} partial ones", self.chunks)
    }
}
