//! Fused loops over rows that reduce: one warp, block or cluster of blocks per row, and sums over
//! rows in two passes.
//!
//! A block takes rows one after the other, and of a program without reductions over rows a segment
//! of their columns. Each thread adds up its own columns, in registers where they fit, its block
//! adds up what its warps have, and a second function adds the partial sums of all blocks, unless
//! one block has all rows. Rows of a block depend on the shape alone. A reduction over a row is one
//! pass over it, which computes again what it depends on; what is loaded stays in registers from
//! pass to pass where it fits, and so do exponentials and other functions that take many
//! operations. A row whose numbers do not fit the registers of 256 threads has a larger block, or
//! on GPUs with distributed shared memory a cluster of blocks, which exchange what they reduce.

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

/// Bytes of sums of columns that a block lays side by side in shared memory before it stores them.
/// Chosen: of 48 KiB, which are there without asking, most.
const LAID_OUT: usize = 32 << 10;

/// One warp, block or cluster of blocks per row, or per segment of its columns.
#[derive(Clone, Debug, PartialEq)]
pub struct RowReduction {
    /// The program.
    pub rows: Rows,
    /// Threads that share a row: 32, all of the block, or all of the cluster.
    pub group: u32,
    /// Threads of a block.
    pub threads: u32,
    /// Blocks that share a row.
    pub cluster: u32,
    /// Rows that they take one after the other.
    pub chunk: usize,
    /// Blocks, or clusters of them, side by side along the rows.
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
    /// For each output that is a sum, where what a block adds up is stored: a workspace of partial
    /// sums, one per block, or the output, where one block has all rows.
    pub sums: Vec<Option<Buffer>>,
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
    /// Whether one block has all rows, so that its sums of columns are those of the output.
    pub(super) fn has_all_rows(&self) -> bool {
        self.blocks == 1 && self.in_registers
    }

    /// Blocks of a launch.
    pub(super) fn grid(&self) -> usize {
        self.blocks * self.segments() * self.cluster as usize
    }

    /// Whether a row has one warp, so that those of a block have rows of their own.
    pub(super) fn is_by_warp(&self) -> bool {
        self.group == 32
    }

    /// The number of levels whose reductions blocks of a cluster exchange.
    fn exchanges(&self, program: &Program<'_>) -> usize {
        let is_exchanged =
            |level: &usize| program.reductions(*level).iter().any(|(_, _, x)| program.vectors[*x]);
        (0..=program.depth()).filter(is_exchanged).count()
    }

    /// Whether the blocks of a cluster meet behind a row: where they have no other exchange before
    /// they write what others may still read.
    pub(super) fn meets_behind_rows(&self, program: &Program<'_>) -> bool {
        self.cluster > 1 && self.chunk > 1 && self.exchanges(program) == 1
    }

    /// Whether sums of columns are laid side by side in shared memory.
    pub(super) fn lays_out(&self) -> bool {
        let bytes = self.width() * self.column_pitch() * self.rows.dtype.size() as usize;
        self.in_registers && (self.is_by_warp() || self.cluster == 1 && bytes <= LAID_OUT)
    }

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
        let RowReduction { rows, chunk, blocks, .. } = self;
        let program = Program::new(rows, names(rows, parameters), self.vector.as_ref());
        self.place_threads(text);
        self.declare_shared(&program, text);
        program.streams(text);
        self.start_sums(&program, text);
        line!(text, "for (u64 row = chunk * {chunk}; row < (chunk + 1) * {chunk}; row += 1) {{");
        if rows.rows != blocks * self.groups() as usize * chunk {
            line!(text, "if (row >= {}) break;", rows.rows);
        }
        if self.keeps {
            self.load(&program, text);
        }
        let (mut known, mut slot) = (BTreeSet::new(), 0);
        for level in 0..=program.depth() {
            slot += self.reduce(&program, level, (&mut known, slot), text);
            program.values(text, &program.row_scalars(level));
        }
        self.write(&program, parameters, &mut known, text);
        if self.meets_behind_rows(&program) {
            line!(text, "sync_cluster();");
        }
        text.end();
        self.finish_sums(text);
    }

    /// Threads of a block over those that share a row.
    pub(super) fn groups(&self) -> u32 {
        (self.threads / self.group).max(1)
    }

    /// Names the block's columns, the lane and the rows of a thread.
    fn place_threads(&self, text: &mut Text) {
        let RowReduction { rows, group, threads, cluster, segment, .. } = self;
        match (self.segments(), cluster) {
            (1, 1) => line!(text, "const u64 block = blockIdx.x;"),
            (1, _) => line!(text, "const u64 block = blockIdx.x / {cluster};"),
            (segments, _) => {
                line!(text, "const u64 block = blockIdx.x / {segments};");
                line!(text, "const u64 base = blockIdx.x % {segments} * {segment};");
                let (end, cols) = (format!("base + {segment}"), rows.cols);
                match cols % segment {
                    0 => line!(text, "const u64 end = {end};"),
                    _ => line!(text, "const u64 end = {end} < {cols} ? {end} : {cols};"),
                }
            }
        }
        if self.is_by_warp() {
            line!(text, "const u32 lane = threadIdx.x % {group};");
            let groups = self.groups();
            line!(text, "const u64 chunk = block * {groups} + threadIdx.x / {group};");
            return;
        }
        match cluster {
            1 => line!(text, "const u32 lane = threadIdx.x;"),
            _ => {
                line!(text, "const u32 rank = blockIdx.x % {cluster};");
                line!(text, "const u32 lane = rank * {threads} + threadIdx.x;");
            }
        }
        line!(text, "const u64 chunk = block;");
    }

    /// Declares what warps and blocks exchange; those of a cluster then wait until all have begun.
    fn declare_shared(&self, program: &Program<'_>, text: &mut Text) {
        let sums = self.sums.iter().any(Option::is_some);
        let (element_of, warps) = (element(self.rows.dtype), self.threads / 32);
        if !self.is_by_warp() || sums {
            line!(text, "SHARED({element_of}, warp_values, {warps});");
            line!(text, "SHARED({}, warp_totals, {warps});", element(DType::F64));
        }
        if self.cluster > 1 {
            let is_vector = |(_, _, x): &(usize, ReduceOp, usize)| program.vectors[*x];
            let all = (0..=program.depth()).flat_map(|level| program.reductions(level));
            let count = all.filter(is_vector).count() * self.cluster as usize;
            line!(text, "SHARED({element_of}, block_values, {count});");
            line!(text, "sync_cluster();");
        }
    }

    /// The sums of columns, and where what a block adds up is stored.
    fn columns(&self) -> impl Iterator<Item = (usize, Buffer)> {
        let outputs = self.rows.outputs.iter().enumerate();
        outputs.filter_map(|(at, output)| match output {
            Output::ColSum { .. } => Some((at, self.sums[at]?)),
            Output::Store { .. } | Output::TotalSum { .. } => None,
        })
    }

    /// The same of sums over all points.
    fn totals(&self) -> impl Iterator<Item = (usize, Buffer)> {
        let outputs = self.rows.outputs.iter().enumerate();
        outputs.filter_map(|(at, output)| match output {
            Output::TotalSum { .. } => Some((at, self.sums[at]?)),
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

    /// Prints the reductions of a level, in one pass over the row; says how many blocks exchange.
    fn reduce(
        &self,
        program: &Program<'_>,
        level: usize,
        (known, slot): (&mut BTreeSet<usize>, usize),
        text: &mut Text,
    ) -> usize {
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
            return 0;
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
        self.reduce_threads(program, &vectors, slot, text);
        vectors.len()
    }

    /// Reduces what the threads of a row have: those of a warp, then the warps of a block, then the
    /// blocks of a cluster, whose values lie from `slot` on.
    fn reduce_threads(
        &self,
        program: &Program<'_>,
        vectors: &[(usize, ReduceOp, usize)],
        slot: usize,
        text: &mut Text,
    ) {
        let (dtype, cluster) = (self.rows.dtype, self.cluster as usize);
        for (place, (at, op, _)) in vectors.iter().enumerate() {
            let value = format!("v{at}");
            if self.rows.cols == 1 {
                line!(text, "{value} = shuffle({value}, 0);");
                continue;
            }
            let warps = if self.is_by_warp() { 1 } else { self.threads / 32 };
            reduce_block(warps, &value, "warp_values", (*op, dtype), text);
            if cluster > 1 {
                let first = (slot + place) * cluster;
                let own = format!("block_values + {first} + rank");
                line!(text, "if (threadIdx.x < {cluster}) {{");
                line!(text, "store_in_cluster({own}, threadIdx.x, {value});");
                text.end();
            }
            // Before others write there.
            let is_met_behind = cluster > 1 && place + 1 == vectors.len();
            if !self.is_by_warp() && !is_met_behind && !self.is_last(program, *at) {
                line!(text, "sync_block();");
            }
        }
        if cluster == 1 {
            return;
        }
        line!(text, "sync_cluster();");
        for (place, (at, op, _)) in vectors.iter().enumerate() {
            let first = (slot + place) * cluster;
            line!(text, "v{at} = block_values[{first}];");
            line!(text, "for (u32 other = 1; other < {cluster}; other += 1) {{");
            let other = format!("block_values[{first} + other]");
            line!(text, "v{at} = {};", combined(*op, dtype, &format!("v{at}"), &other));
            text.end();
        }
    }

    /// Whether a reduction is the last one of the block: of its only row, without sums behind it.
    fn is_last(&self, program: &Program<'_>, value: usize) -> bool {
        let is_it = |(at, _, x): &(usize, ReduceOp, usize)| program.vectors[*x].then_some(*at);
        let reductions = (0..=program.depth()).flat_map(|level| program.reductions(level));
        let last = reductions.collect::<Vec<_>>().iter().filter_map(is_it).next_back();
        self.chunk == 1 && self.sums.iter().all(Option::is_none) && last == Some(value)
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
        let meeting = match self.cluster {
            1 if self.is_by_warp() => "sync_warp();",
            1 => "sync_block();",
            _ => "sync_cluster();",
        };
        line!(text, "{meeting}");
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
    fn column(&self, at: usize, to: Buffer) -> String {
        let width = self.width();
        match self.vector {
            _ if !self.in_registers => format!("{to}[block * {} + col]", self.rows.cols),
            Some(_) => format!("sum{at}[turn * {width} + e]"),
            None => format!("sum{at}[turn]"),
        }
    }

    fn add(&self, program: &Program<'_>, (at, output): (usize, &Output), text: &mut Text) {
        match (output, self.sums[at]) {
            (Output::ColSum { value, .. }, Some(to)) => {
                let sum = self.column(at, to);
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
        if self.lays_out() && self.columns().next().is_some() {
            let count = self.width() * self.column_pitch();
            line!(text, "SHARED({}, columns, {count});", element(rows.dtype));
        }
        let columns: Vec<(usize, Buffer)> = self.columns().filter(|_| self.in_registers).collect();
        for (number, (at, to)) in columns.iter().enumerate() {
            self.finish_columns((*at, *to), number + 1 == columns.len(), text);
        }
        let dtype = total_of(rows.dtype);
        let shared = if dtype == DType::I64 { "warp_values" } else { "warp_totals" };
        for (number, (at, to)) in self.totals().enumerate() {
            if number > 0 {
                line!(text, "sync_block();");
            }
            let total = format!("total{at}");
            reduce_block(self.threads / 32, &total, shared, (ReduceOp::Sum, dtype), text);
            line!(text, "if (threadIdx.x == 0) {to}[blockIdx.x] = {total};");
        }
    }

    /// The same of a sum of columns: what the warps have is added up in shared memory, from where
    /// threads store columns that lie side by side.
    fn finish_columns(&self, (at, to): (usize, Buffer), is_last: bool, text: &mut Text) {
        let rows = &self.rows;
        let bare = Program::new(rows, Vec::new(), self.vector.as_ref());
        let none = BTreeSet::new();
        let sum = self.column(at, to);
        if !self.lays_out() {
            self.open_columns(&bare, (&none, &[]), text);
            self.store_column(at, to, &sum, text);
            return self.close_columns(&bare, &[], text);
        }
        let column = format!("columns[{}]", self.place_of_column());
        if self.is_by_warp() {
            line!(text, "for (u32 warp = 0; warp < {}; warp += 1) {{", self.threads / 32);
            line!(text, "if (threadIdx.x / 32 == warp) {{");
        }
        self.open_columns(&bare, (&none, &[]), text);
        match self.is_by_warp() {
            true => {
                let next = combined(ReduceOp::Sum, rows.dtype, &column, &sum);
                line!(text, "{column} = warp == 0 ? {sum} : {next};");
            }
            false => line!(text, "{column} = {sum};"),
        }
        self.close_columns(&bare, &[], text);
        if self.is_by_warp() {
            text.end();
        }
        line!(text, "sync_block();");
        if self.is_by_warp() {
            text.end();
        }
        let (from, end) = match self.segments() {
            1 => ("threadIdx.x".to_owned(), rows.cols.to_string()),
            _ => ("base + threadIdx.x".to_owned(), "end".to_owned()),
        };
        line!(text, "for (u64 col = {from}; col < {end}; col += {}) {{", self.threads);
        self.store_column(at, to, &column, text);
        text.end();
        if !is_last {
            line!(text, "sync_block();");
        }
    }

    /// Prints the store of a sum at `col`: a block's part, or all of it.
    fn store_column(&self, at: usize, to: Buffer, sum: &str, text: &mut Text) {
        let accumulates = matches!(self.rows.outputs[at], Output::ColSum { accumulate: true, .. });
        if !self.has_all_rows() {
            line!(text, "{to}[block * {} + col] = {sum};", self.rows.cols);
        } else if accumulates {
            let old = format!("{to}[col]");
            line!(text, "{old} = {};", combined(ReduceOp::Sum, self.rows.dtype, &old, sum));
        } else {
            line!(text, "{to}[col] = {sum};");
        }
    }
}

/// Reduces a value over the warps of a block, or of one: a butterfly within the warp, then over the
/// warps in ascending order.
fn reduce_block(
    warps: u32,
    value: &str,
    shared: &str,
    (op, dtype): (ReduceOp, DType),
    text: &mut Text,
) {
    line!(text, "for (int bits = 16; bits > 0; bits /= 2) {{");
    let other = format!("shuffle_xor({value}, bits)");
    line!(text, "{value} = {};", combined(op, dtype, value, &other));
    text.end();
    if warps == 1 {
        return;
    }
    line!(text, "if (threadIdx.x % 32 == 0) {shared}[threadIdx.x / 32] = {value};");
    line!(text, "sync_block();");
    line!(text, "{value} = {shared}[0];");
    line!(text, "for (int warp = 1; warp < {warps}; warp += 1) {{");
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
        let RowReduction { rows, cluster, chunk, segment, .. } = self;
        let threads = match cluster {
            1 if self.is_by_warp() => "warp".to_owned(),
            1 => "block".to_owned(),
            _ => format!("cluster of {cluster} blocks"),
        };
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
