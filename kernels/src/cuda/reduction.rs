//! Fused loops over rows that reduce: one warp or block per row, and sums over rows in two passes.
//!
//! A block takes rows one after the other, and of a program without reductions over rows a segment
//! of their columns. Each thread adds up its own columns, in registers where they fit, its block
//! adds up what its warps have, and a second function adds the partial sums of all blocks. Rows of
//! a block depend on the shape alone. A reduction over a row is one pass over it, which computes
//! again what it depends on; what is loaded stays in registers from pass to pass where it fits, and
//! so do exponentials and other functions that take many operations.

use std::collections::BTreeSet;
use std::fmt;

use ir::DType;

use super::parameter::{Buffer, Parameter};
use super::program::{Program, combined, identity};
use super::rows::{THREADS, names, show_width};
use super::text::{Text, element, line, number};
use super::vector::Vectorized;
use crate::rows::{Output, ReduceOp, Rows};

/// Columns that a block sums. Chosen: eight numbers of F32 fill a sector of 32 bytes.
const SIDE: usize = 8;

/// One warp or block per row, or per segment of its columns.
#[derive(Clone, Debug, PartialEq)]
pub struct RowReduction {
    /// The program.
    pub rows: Rows,
    /// Threads that share a row: 32, or all of the block.
    pub group: u32,
    /// Rows that they take one after the other.
    pub chunk: usize,
    /// Blocks side by side along the rows.
    pub blocks: usize,
    /// Columns that they take of each.
    pub segment: usize,
    /// Of a loop over columns that is unrolled, the steps.
    pub turns: Option<usize>,
    /// Whether sums of columns are added up in registers; else where partial sums lie.
    pub in_registers: bool,
    /// Whether what is loaded by vectors stays in registers for all passes.
    pub keeps: bool,
    /// Values that stay in registers from the pass that computes them on.
    pub kept_values: Vec<usize>,
    /// For each output that is a sum, the workspace of its partial sums, one per block.
    pub partials: Vec<Option<usize>>,
    /// Vectorised accesses; none where each element is accessed alone.
    pub vector: Option<Vectorized>,
}

/// Adds the partial sums of all blocks, in an order that depends on their number alone.
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

/// The type that a sum over all points is taken in.
pub(super) fn total_of(dtype: DType) -> DType {
    if dtype == DType::I64 { DType::I64 } else { DType::F64 }
}

impl RowReduction {
    /// Segments of the columns.
    pub(super) fn segments(&self) -> usize {
        self.rows.cols.div_ceil(self.segment)
    }

    /// Numbers in shared memory between those of adjacent columns of a vector. The same element of
    /// the vectors of a warp lies side by side, and columns that follow each other in other banks.
    pub(super) fn column_pitch(&self) -> usize {
        let (columns, width) = (self.segment.min(self.rows.cols), self.width());
        // As many as a turn of the banks serves.
        let at_once = 128 / self.rows.dtype.size() as usize;
        match width {
            1 => columns,
            _ => columns.div_ceil(width).next_multiple_of(at_once) + at_once / width,
        }
    }

    /// Where the sum of column `col` lies in shared memory.
    fn place_of_column(&self) -> String {
        let column = if self.segments() > 1 { "(col - base)" } else { "col" };
        match self.width() {
            1 => column.to_owned(),
            width => format!("{column} % {width} * {} + {column} / {width}", self.column_pitch()),
        }
    }

    pub(super) fn width(&self) -> usize {
        self.vector.as_ref().map_or(1, |vector| vector.width)
    }

    pub(super) fn print(&self, parameters: &[Parameter], text: &mut Text) {
        let RowReduction { rows, group, chunk, blocks, segment, .. } = self;
        let program = Program::new(rows, names(rows, parameters), self.vector.as_ref());
        let groups = THREADS / group;
        let sums = self.partials.iter().any(Option::is_some);
        let segments = self.segments();
        if segments > 1 {
            line!(text, "const u64 block = blockIdx.x / {segments};");
            line!(text, "const u64 base = blockIdx.x % {segments} * {segment};");
            let end = format!("base + {segment}");
            match rows.cols % segment {
                0 => line!(text, "const u64 end = {end};"),
                _ => line!(text, "const u64 end = {end} < {} ? {end} : {};", rows.cols, rows.cols),
            }
        } else {
            line!(text, "const u64 block = blockIdx.x;");
        }
        if *group < THREADS {
            line!(text, "const u32 lane = threadIdx.x % {group};");
            line!(text, "const u64 chunk = block * {groups} + threadIdx.x / {group};");
        } else {
            line!(text, "const u32 lane = threadIdx.x;");
            line!(text, "const u64 chunk = block;");
        }
        if *group == THREADS || sums {
            let shared = [(rows.dtype, "warp_values"), (DType::F64, "warp_totals")];
            for (dtype, name) in shared {
                line!(text, "SHARED({}, {name}, {});", element(dtype), THREADS / 32);
            }
        }
        program.streams(text);
        self.start_sums(&program, text);
        line!(text, "for (u64 row = chunk * {chunk}; row < (chunk + 1) * {chunk}; row += 1) {{");
        if rows.rows != blocks * groups as usize * chunk {
            line!(text, "if (row >= {}) break;", rows.rows);
        }
        if self.keeps {
            self.load(&program, text);
        }
        let mut known = BTreeSet::new();
        for level in 0..=program.depth() {
            self.reduce(&program, level, &mut known, text);
            program.values(text, &program.row_scalars(level));
        }
        self.write(&program, parameters, &mut known, text);
        text.end();
        self.finish_sums(text);
    }

    fn workspace(&self, output: usize) -> Option<Buffer> {
        self.partials[output].map(Buffer::Workspace)
    }

    /// The sums of columns, with their workspaces.
    fn columns(&self) -> impl Iterator<Item = (usize, Buffer)> {
        let outputs = self.rows.outputs.iter().enumerate();
        outputs.filter_map(|(at, output)| match output {
            Output::ColSum { .. } => Some((at, self.workspace(at)?)),
            Output::Store { .. } | Output::TotalSum { .. } => None,
        })
    }

    /// The sums over all points, with their workspaces.
    fn totals(&self) -> impl Iterator<Item = (usize, Buffer)> {
        let outputs = self.rows.outputs.iter().enumerate();
        outputs.filter_map(|(at, output)| match output {
            Output::TotalSum { .. } => Some((at, self.workspace(at)?)),
            Output::Store { .. } | Output::ColSum { .. } => None,
        })
    }

    fn start_sums(&self, program: &Program<'_>, text: &mut Text) {
        let (rows, compute) = (&self.rows, program.compute());
        for (at, workspace) in self.columns() {
            match self.turns {
                Some(turns) if self.in_registers => {
                    let count = turns * self.width();
                    line!(text, "{compute} sum{at}[{count}];");
                    line!(text, "UNROLL");
                    line!(text, "for (u32 i = 0; i < {count}; i += 1) {{");
                    line!(text, "sum{at}[i] = 0;");
                    text.end();
                }
                _ => {
                    // By the threads that add to them.
                    self.open_columns(program, (&BTreeSet::new(), &[]), text);
                    line!(text, "{workspace}[block * {} + col] = 0;", rows.cols);
                    self.close_columns(program, &[], text);
                }
            }
        }
        for (at, _) in self.totals() {
            line!(text, "{} total{at} = 0;", element(total_of(rows.dtype)));
        }
    }

    /// Prints the loads of all vectors of a row.
    fn load(&self, program: &Program<'_>, text: &mut Text) {
        let Some(turns) = self.turns else { return };
        program.declare_kept(turns, text);
        for value in &self.kept_values {
            let count = turns * self.width();
            line!(text, "{} kept_v{value}[{count}];", program.compute());
        }
        self.open_turns(text);
        program.keep(text);
        text.end();
    }

    /// Prints the reductions of a level, in one pass over the row.
    fn reduce(
        &self,
        program: &Program<'_>,
        level: usize,
        known: &mut BTreeSet<usize>,
        text: &mut Text,
    ) {
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
        let values = program.vectors_of(vectors.iter().map(|(_, _, x)| *x), known);
        self.open_columns(program, (&values, &[]), text);
        program.values_of_pass(text, &values, &self.kept_values, known);
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
                let of = (*op, rows.dtype);
                reduce_group(self.group, &format!("v{at}"), "warp_values", of, text);
                // Before others write there.
                if self.group == THREADS && !self.is_last(program, *at) {
                    line!(text, "sync_block();");
                }
            }
        }
    }

    /// Whether a reduction is the last one of the block: of its only row, without sums behind it.
    fn is_last(&self, program: &Program<'_>, value: usize) -> bool {
        let is_it = |(at, _, x): &(usize, ReduceOp, usize)| program.vectors[*x].then_some(*at);
        let reductions = (0..=program.depth()).flat_map(|level| program.reductions(level));
        let last = reductions.collect::<Vec<_>>().iter().filter_map(is_it).next_back();
        self.chunk == 1 && self.partials.iter().all(Option::is_none) && last == Some(value)
    }

    /// Opens the unrolled loop over the columns of a lane, from `first` on.
    fn open_turns(&self, text: &mut Text) {
        let (group, width) = (self.group as usize, self.width());
        let turns = self.turns.unwrap_or(1);
        let base = if self.segments() > 1 { "base + " } else { "" };
        let end = if self.segments() > 1 { "end".to_owned() } else { self.rows.cols.to_string() };
        let first = if self.vector.is_some() { "first" } else { "col" };
        line!(text, "UNROLL");
        line!(text, "for (u32 turn = 0; turn < {turns}; turn += 1) {{");
        line!(text, "const u64 {first} = {base}(turn * {group} + lane) * {width};");
        if self.rows.cols != self.segments() * turns * group * width {
            line!(text, "if ({first} >= {end}) break;");
        }
    }

    /// Opens the loop over the columns of a lane, with the vector loads that some values depend on.
    fn open_columns(
        &self,
        program: &Program<'_>,
        (values, targets): (&BTreeSet<usize>, &[(usize, String)]),
        text: &mut Text,
    ) {
        let (group, width) = (self.group as usize, self.width());
        if self.turns.is_some() {
            self.open_turns(text);
        } else {
            let [base, end] = match self.segments() {
                1 => [String::new(), self.rows.cols.to_string()],
                _ => ["base + ".to_owned(), "end".to_owned()],
            };
            let first = if self.vector.is_some() { "first" } else { "col" };
            let from = if width == 1 { "lane".to_owned() } else { format!("lane * {width}") };
            let step = group * width;
            line!(text, "UNROLL_4");
            line!(text, "for (u64 {first} = {base}{from}; {first} < {end}; {first} += {step}) {{");
        }
        if self.vector.is_some() {
            program.load_vectors(values, self.keeps, text);
            program.open_stores(targets, text);
            program.open_columns(text);
        }
    }

    /// Closes it, after the vector stores.
    fn close_columns(&self, program: &Program<'_>, targets: &[(usize, String)], text: &mut Text) {
        text.end();
        if self.vector.is_some() {
            program.close_stores(targets, text);
            text.end();
        }
    }

    /// Prints the last pass over the row: sums and stores.
    fn write(
        &self,
        program: &Program<'_>,
        parameters: &[Parameter],
        known: &mut BTreeSet<usize>,
        text: &mut Text,
    ) {
        let rows = program.rows;
        let target = |at: usize| parameters[rows.inputs.len() + at].name();
        let is_vector = |output: &&Output| match output {
            Output::Store { access, .. } => access.col_stride > 0,
            Output::ColSum { .. } => true,
            Output::TotalSum { value, .. } => program.vectors[*value],
        };
        let wanted: Vec<usize> = rows.outputs.iter().filter(is_vector).map(Output::value).collect();
        if !wanted.is_empty() {
            let values = program.vectors_of(wanted, known);
            let stored = rows.outputs.iter().enumerate().filter(|(_, output)| is_vector(output));
            let targets: Vec<(usize, String)> = stored.map(|(at, _)| (at, target(at))).collect();
            self.open_columns(program, (&values, &targets), text);
            program.values_of_pass(text, &values, &self.kept_values, known);
            for (at, output) in rows.outputs.iter().enumerate() {
                self.add(program, (at, output), text);
            }
            targets.iter().for_each(|(at, target)| program.store(text, *at, target));
            self.close_columns(program, &targets, text);
        }
        if rows.outputs.iter().all(|output| is_vector(&output)) {
            return;
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

    /// The sum of the column that a thread is at.
    fn column(&self, at: usize, workspace: Buffer) -> String {
        let width = self.width();
        match self.vector {
            _ if !self.in_registers => format!("{workspace}[block * {} + col]", self.rows.cols),
            Some(_) => format!("sum{at}[turn * {width} + e]"),
            None => format!("sum{at}[turn]"),
        }
    }

    fn add(&self, program: &Program<'_>, (at, output): (usize, &Output), text: &mut Text) {
        match (output, self.workspace(at)) {
            (Output::ColSum { value, .. }, Some(workspace)) => {
                let sum = self.column(at, workspace);
                let value = format!("v{value}");
                let next = combined(ReduceOp::Sum, program.rows.dtype, &sum, &value);
                line!(text, "{sum} = {next};");
            }
            (Output::TotalSum { value, .. }, Some(_)) if program.vectors[*value] => {
                self.add_total(program, at, *value, text);
            }
            _ => {}
        }
    }

    fn add_total(&self, program: &Program<'_>, at: usize, value: usize, text: &mut Text) {
        let [total, value] = [format!("total{at}"), format!("v{value}")];
        let sum = combined(ReduceOp::Sum, program.rows.dtype, &total, &value);
        line!(text, "{total} = {sum};");
    }

    /// Adds up what the warps of a block have.
    fn finish_sums(&self, text: &mut Text) {
        let rows = &self.rows;
        let bare = Program::new(rows, Vec::new(), self.vector.as_ref());
        let none = BTreeSet::new();
        if self.in_registers && self.group < THREADS {
            let count = self.width() * self.column_pitch();
            line!(text, "SHARED({}, columns, {count});", element(rows.dtype));
        }
        for (at, workspace) in self.columns().filter(|_| self.in_registers) {
            let sum = self.column(at, workspace);
            if self.group == THREADS {
                self.open_columns(&bare, (&none, &[]), text);
                line!(text, "{workspace}[block * {} + col] = {sum};", rows.cols);
                self.close_columns(&bare, &[], text);
                continue;
            }
            line!(text, "for (u32 warp = 0; warp < {}; warp += 1) {{", THREADS / 32);
            line!(text, "if (threadIdx.x / 32 == warp) {{");
            self.open_columns(&bare, (&none, &[]), text);
            let column = format!("columns[{}]", self.place_of_column());
            let next = combined(ReduceOp::Sum, rows.dtype, &column, &sum);
            line!(text, "{column} = warp == 0 ? {sum} : {next};");
            self.close_columns(&bare, &[], text);
            text.end();
            line!(text, "sync_block();");
            text.end();
            let (from, end) = match self.segments() {
                1 => ("threadIdx.x".to_owned(), rows.cols.to_string()),
                _ => ("base + threadIdx.x".to_owned(), "end".to_owned()),
            };
            line!(text, "for (u64 col = {from}; col < {end}; col += {THREADS}) {{");
            line!(text, "{workspace}[block * {} + col] = {column};", rows.cols);
            text.end();
            line!(text, "sync_block();");
        }
        let dtype = total_of(rows.dtype);
        let shared = if dtype == DType::I64 { "warp_values" } else { "warp_totals" };
        for (at, workspace) in self.totals() {
            let total = format!("total{at}");
            reduce_group(THREADS, &total, shared, (ReduceOp::Sum, dtype), text);
            line!(text, "sync_block();");
            line!(text, "if (threadIdx.x == 0) {workspace}[blockIdx.x] = {total};");
        }
    }
}

/// Reduces a value over a warp or a block: a butterfly within the warp, then over the warps in
/// ascending order.
fn reduce_group(
    group: u32,
    value: &str,
    shared: &str,
    (op, dtype): (ReduceOp, DType),
    text: &mut Text,
) {
    line!(text, "for (int bits = 16; bits > 0; bits /= 2) {{");
    let other = format!("shuffle_xor({value}, bits)");
    line!(text, "{value} = {};", combined(op, dtype, value, &other));
    text.end();
    if group == 32 {
        return;
    }
    line!(text, "if (threadIdx.x % 32 == 0) {shared}[threadIdx.x / 32] = {value};");
    line!(text, "sync_block();");
    line!(text, "{value} = {shared}[0];");
    line!(text, "for (int warp = 1; warp < {}; warp += 1) {{", THREADS / 32);
    line!(text, "{value} = {};", combined(op, dtype, value, &format!("{shared}[warp]")));
    text.end();
}

impl PartialSums {
    /// Sums of a block.
    pub(super) fn side(&self) -> usize {
        if self.len < SIDE { 1 } else { SIDE }
    }

    pub(super) fn print(&self, parameters: &[Parameter], text: &mut Text) {
        let PartialSums { len, chunks, partial, dtype, accumulate } = *self;
        let (workspace, target) = (parameters[0].name(), parameters[1].name());
        let side = self.side();
        let slices = THREADS as usize / side;
        let kind = element(partial);
        line!(text, "SHARED({kind}, sums, {THREADS});");
        if side == 1 {
            line!(text, "const u64 at = blockIdx.x, slice = threadIdx.x;");
        } else {
            line!(text, "const u64 at = (u64)blockIdx.x * {side} + threadIdx.x % {side};");
            line!(text, "const u64 slice = threadIdx.x / {side};");
        }
        let zero = number(partial, 0.0);
        line!(text, "{kind} sum = {zero};");
        line!(text, "if (at < {len}) {{");
        line!(text, "UNROLL_4");
        line!(text, "for (u64 chunk = slice; chunk < {chunks}; chunk += {slices}) {{");
        let next = format!("{workspace}[chunk * {len} + at]");
        line!(text, "sum = {};", combined(ReduceOp::Sum, partial, "sum", &next));
        text.end();
        text.end();
        line!(text, "sums[threadIdx.x] = sum;");
        line!(text, "sync_block();");
        if side == 1 {
            line!(text, "for (u32 half = {}; half > 0; half /= 2) {{", THREADS / 2);
            let other = "sums[threadIdx.x + half]";
            let next = combined(ReduceOp::Sum, partial, "sum", other);
            line!(text, "if (threadIdx.x < half) sums[threadIdx.x] = sum = {next};");
            line!(text, "sync_block();");
            text.end();
            line!(text, "if (threadIdx.x > 0) return;");
        } else {
            line!(text, "if (threadIdx.x >= {side} || at >= {len}) return;");
            line!(text, "for (u32 slice = 1; slice < {slices}; slice += 1) {{");
            let other = format!("sums[slice * {side} + threadIdx.x]");
            line!(text, "sum = {};", combined(ReduceOp::Sum, partial, "sum", &other));
            text.end();
        }
        let sum = format!("Store<{}>::of(sum)", element(dtype));
        let old = format!("{target}[at]");
        let sum = if accumulate { combined(ReduceOp::Sum, dtype, &old, &sum) } else { sum };
        line!(text, "{target}[at] = {sum};");
    }
}

impl fmt::Display for RowReduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RowReduction { rows, group, chunk, segment, .. } = self;
        let threads = if *group == 32 { "warp" } else { "block" };
        match chunk {
            1 => write!(f, "one {threads} per row of {}x{}", rows.rows, rows.cols)?,
            _ => write!(f, "one {threads} per {chunk} rows of {}x{}", rows.rows, rows.cols)?,
        }
        if self.segments() > 1 {
            write!(f, ", {segment} columns of each")?;
        }
        show_width(f, self.vector.as_ref())?;
        f.write_str(if self.keeps { ", loaded once" } else { "" })?;
        f.write_str(if self.kept_values.is_empty() { "" } else { ", exponentials computed once" })
    }
}

impl fmt::Display for PartialSums {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.side() {
            1 => write!(f, "one block per sum of {} partial sums", self.chunks),
            side => write!(f, "one block per {side} sums of {} partial sums", self.chunks),
        }
    }
}
