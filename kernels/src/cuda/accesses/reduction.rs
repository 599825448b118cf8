//! Accesses of fused loops over rows that reduce, and of the second pass of their sums.

use std::collections::BTreeSet;

use super::rows::{Keys, Stream, is_open, live, loaded, used};
use super::{Accesses, Blocks, LANES, SECTOR, Site, Sites, Warp, relative};
use crate::cuda::program::Program;
use crate::cuda::reduction::{PartialSums, RowReduction, total_of};
use crate::cuda::rows::THREADS;
use crate::rows::Output;

/// A part of the text of a block.
enum Step<'r> {
    /// A loop over the columns of a row.
    Columns(Vec<Column<'r>>),
    /// Row scalars that all lanes load, or that the first one loads and stores.
    Row(Vec<Stream<'r>>, Who),
    /// A reduction over the block: what warps have is stored, and loaded by all.
    Reduce([Site; 3]),
    /// Values of the blocks of a cluster, from the first one on, are loaded by all.
    Exchange([Site; 2], usize),
}

/// Which lanes of a row access its scalars.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Who {
    All,
    First,
}

/// What a lane accesses of a column.
enum Column<'r> {
    Stream(Stream<'r>),
    /// The sum of the block of that column, in a workspace.
    Sum(Site),
}

/// The text of a function, as its accesses in order.
struct Body<'r> {
    tile: &'r RowReduction,
    sites: Sites,
    live: BTreeSet<usize>,
    width: usize,
    /// Before all rows.
    keys: Keys,
    /// The same: of sums of columns in a workspace, which start as zero.
    first_sums: Vec<Site>,
    /// For each row.
    steps: Vec<Step<'r>>,
    /// Behind all rows.
    last_sums: LastSums,
}

impl<'r> Body<'r> {
    fn of(tile: &'r RowReduction) -> Body<'r> {
        let rows = &tile.rows;
        let (mut sites, live) = (Sites::default(), live(rows));
        let keys = Keys::of(rows, &live, &mut sites);
        let width = tile.vector.as_ref().map_or(1, |vector| vector.width);
        let bytes = rows.dtype.size() as usize;
        let is_sum = |output: &&Output| matches!(output, Output::ColSum { .. });
        let in_workspace = rows.outputs.iter().filter(is_sum).filter(|_| !tile.in_registers);
        let first_sums = in_workspace.map(|_| sites.device(bytes)).collect();
        let last_sums = LastSums::of(tile, &mut sites);
        let steps = Vec::new();
        let mut body = Body { tile, sites, live, width, keys, first_sums, steps, last_sums };
        body.row();
        body
    }

    /// What rows access.
    fn streams(&self) -> impl Iterator<Item = &Stream<'r>> {
        self.steps.iter().flat_map(|step| {
            let columns = match step {
                Step::Columns(all) => &all[..],
                Step::Row(..) | Step::Reduce(_) | Step::Exchange(..) => &[],
            };
            let scalars = match step {
                Step::Row(all, _) => &all[..],
                Step::Columns(_) | Step::Reduce(_) | Step::Exchange(..) => &[],
            };
            let streams = columns.iter().filter_map(|column| match column {
                Column::Stream(stream) => Some(stream),
                Column::Sum(_) => None,
            });
            streams.chain(scalars)
        })
    }

    /// The accesses of a row, in the order of the text.
    fn row(&mut self) {
        let rows = &self.tile.rows;
        let program = Program::new(rows, Vec::new(), self.tile.vector.as_ref());
        if self.tile.keeps {
            let all = loaded(rows, &self.live);
            let kept = all.into_iter().filter(|input| self.is_vector(*input)).collect();
            let columns = self.inputs(&kept);
            self.steps.push(Step::Columns(columns));
        }
        let (mut known, mut slot) = (BTreeSet::new(), 0);
        for level in 0..=program.depth() {
            let all = program.reductions(level).into_iter();
            let vectors: Vec<_> = all.filter(|(_, _, x)| program.vectors[*x]).collect();
            if !vectors.is_empty() {
                self.pass(&program, vectors.iter().map(|(_, _, x)| *x), &mut known, Vec::new());
                vectors.iter().for_each(|_| self.reduce());
                if self.tile.cluster > 1 {
                    self.exchange(slot..slot + vectors.len());
                }
                slot += vectors.len();
            }
            let scalars = &program.row_scalars(level) & &self.live;
            let inputs = loaded(rows, &scalars);
            let streams = inputs.into_iter().map(|input| self.input(input)).collect();
            self.steps.push(Step::Row(streams, Who::All));
        }
        self.write(&program, &mut known);
    }

    fn is_vector(&self, input: usize) -> bool {
        self.tile.vector.as_ref().is_some_and(|vector| vector.inputs[input])
    }

    fn input(&mut self, input: usize) -> Stream<'r> {
        let of = &self.tile.rows.inputs[input];
        let width = if self.is_vector(input) { self.width } else { 1 };
        Stream::new((&of.access, of.dtype.size() as usize), width, &mut self.sites)
    }

    fn inputs(&mut self, inputs: &BTreeSet<usize>) -> Vec<Column<'r>> {
        inputs.iter().map(|input| Column::Stream(self.input(*input))).collect()
    }

    /// A pass over a row for some values, with what is accessed behind their loads.
    fn pass(
        &mut self,
        program: &Program<'_>,
        wanted: impl IntoIterator<Item = usize>,
        known: &mut BTreeSet<usize>,
        behind: Vec<Column<'r>>,
    ) {
        let values = program.vectors_of(wanted, known);
        let computed: BTreeSet<usize> = &values - known;
        known.extend(computed.iter().filter(|at| self.tile.kept_values.contains(at)));
        let inputs = loaded(&self.tile.rows, &computed);
        let is_loaded = |input: &usize| !(self.tile.keeps && self.is_vector(*input));
        let inputs = inputs.into_iter().filter(is_loaded).collect();
        let mut columns = self.inputs(&inputs);
        columns.extend(behind);
        self.steps.push(Step::Columns(columns));
    }

    /// A reduction over the threads of a row.
    fn reduce(&mut self) {
        if self.tile.reduces_over_blocks() {
            let bytes = self.tile.rows.dtype.size() as usize;
            let sites = [0; 3].map(|_| self.sites.shared(bytes));
            self.steps.push(Step::Reduce(sites));
        }
    }

    /// What blocks of a cluster have reduced, of the numbers of some reductions.
    fn exchange(&mut self, slots: std::ops::Range<usize>) {
        let bytes = self.tile.rows.dtype.size() as usize;
        for slot in slots {
            let sites = [0; 2].map(|_| self.sites.shared(bytes));
            self.steps.push(Step::Exchange(sites, slot * self.tile.cluster as usize));
        }
    }

    /// The last pass over a row: stores and sums.
    fn write(&mut self, program: &Program<'_>, known: &mut BTreeSet<usize>) {
        let rows = &self.tile.rows;
        let (mut wanted, mut behind, mut scalars) = (Vec::new(), Vec::new(), Vec::new());
        for (at, output) in rows.outputs.iter().enumerate() {
            match output {
                Output::Store { access, dtype, accumulate, value } => {
                    let is_column = access.col_stride > 0;
                    let is_vector = self.tile.vector.as_ref().is_some_and(|v| v.outputs[at]);
                    let width = if is_column && is_vector { self.width } else { 1 };
                    for _ in 0..=usize::from(*accumulate) {
                        let of_access = (access, dtype.size() as usize);
                        let stream = Stream::new(of_access, width, &mut self.sites);
                        match is_column {
                            true => behind.push(Column::Stream(stream)),
                            false => scalars.push(stream),
                        }
                    }
                    wanted.extend(is_column.then_some(*value));
                }
                Output::ColSum { value, .. } => {
                    wanted.push(*value);
                    if !self.tile.in_registers {
                        let bytes = rows.dtype.size() as usize;
                        behind.extend([0; 2].map(|_| Column::Sum(self.sites.device(bytes))));
                    }
                }
                Output::TotalSum { value, .. } => {
                    wanted.extend(program.vectors[*value].then_some(*value));
                }
            }
        }
        if !wanted.is_empty() {
            self.pass(program, wanted, known, behind);
        }
        self.steps.push(Step::Row(scalars, Who::First));
    }
}

/// A block: its number along the rows, or that of its cluster, its number in that, and the columns
/// that it takes.
#[derive(Clone, Copy)]
struct Place {
    block: usize,
    rank: usize,
    columns: [usize; 2],
}

impl Place {
    /// The number of a column's sum, or of the block's part of it.
    fn sum(self, tile: &RowReduction, col: usize) -> u64 {
        (if tile.has_all_rows() { col } else { self.block * tile.rows.cols + col }) as u64
    }
}

impl ColumnSites {
    /// A lane's accesses to a sum in memory.
    fn copy(&self, warp: &mut Warp, lane: usize, number: u64) {
        for site in self.old.iter().chain([&self.to]) {
            warp.access(*site, lane, number * site.bytes);
        }
    }
}

impl RowReduction {
    fn place(&self, block: usize) -> Place {
        let segments = self.segments();
        let base = block % segments * self.segment;
        let columns = [base, (base + self.segment).min(self.rows.cols)];
        let cluster = self.cluster as usize;
        Place { block: block / segments / cluster, rank: block % cluster, columns }
    }

    /// Whether warps exchange what they have reduced of a row.
    fn reduces_over_blocks(&self) -> bool {
        !self.is_by_warp() && self.rows.cols > 1
    }

    /// The rows that a warp takes, or its block.
    fn rows_of(&self, block: usize, warp: usize) -> std::ops::Range<usize> {
        let groups = self.groups() as usize;
        let chunk = if groups == 1 { block } else { block * groups + warp };
        let end = self.rows.rows;
        (chunk * self.chunk).min(end)..((chunk + 1) * self.chunk).min(end)
    }

    /// Where the sum of a column of the block lies in shared memory.
    fn place_of(&self, column: usize) -> u64 {
        let place = match self.width() {
            1 => column,
            width => column % width * self.column_pitch() + column / width,
        };
        place as u64
    }

    /// The columns of a lane in steps of a vector, given its number in the row's threads.
    fn columns_of(&self, lane: usize, [base, end]: [usize; 2]) -> impl Iterator<Item = usize> {
        let width = self.vector.as_ref().map_or(1, |vector| vector.width);
        (base + lane * width..end).step_by(self.group as usize * width)
    }
}

/// Accesses of one warp or block per row.
pub(super) fn row_reduction(tile: &RowReduction, grid: u64) -> Option<Accesses> {
    // Of a reduction over blocks that nothing uses a compiler may leave out the loads alone.
    let rows = &tile.rows;
    if is_open(rows) || tile.reduces_over_blocks() && !live(rows).is_subset(&used(rows)) {
        return None;
    }
    let mut blocks = Blocks::new();
    let body = Body::of(tile);
    for block in 0..grid as usize {
        let place = tile.place(block);
        let mut key = vec![place.columns[0] as u64, place.columns[1] as u64];
        let last = (tile.threads / 32 - 1) as usize;
        let per_block = tile.rows_of(place.block, 0).start..tile.rows_of(place.block, last).end;
        key.push(place.rank as u64);
        key.push(per_block.len() as u64);
        key.push((place.block * tile.rows.cols) as u64 % SECTOR);
        key.push(block as u64 % SECTOR);
        for stream in body.streams() {
            relative(&mut key, per_block.clone().map(|row| stream.at(row, 0)));
        }
        blocks.count(key, 1, |warp| body.list(warp, place, block))?;
    }
    Some(blocks.count)
}

impl Body<'_> {
    /// Lists the accesses of a block.
    fn list(&self, warp: &mut Warp, place: Place, number: usize) {
        let threads = self.tile.threads as usize;
        for at in 0..threads / LANES {
            for lane in 0..LANES {
                let in_row = match self.tile.is_by_warp() {
                    true => lane,
                    false => place.rank * threads + at * LANES + lane,
                };
                self.keys.pass(warp, lane);
                for site in &self.first_sums {
                    self.sum_columns(warp, (lane, in_row), *site, place);
                }
                for row in self.tile.rows_of(place.block, at) {
                    for step in &self.steps {
                        self.step(warp, step, (at, lane, in_row), row, place);
                    }
                }
                self.last_sums.list(self, warp, (at, lane, in_row), (place, number));
            }
            warp.end();
        }
    }

    /// A lane's accesses to the sums of its columns in a workspace.
    fn sum_columns(
        &self,
        warp: &mut Warp,
        (lane, in_row): (usize, usize),
        site: Site,
        place: Place,
    ) {
        for first in self.tile.columns_of(in_row, place.columns) {
            for col in first..first + self.width {
                let at = place.block * self.tile.rows.cols + col;
                warp.access(site, lane, at as u64 * site.bytes);
            }
        }
    }

    fn step(
        &self,
        warp: &mut Warp,
        step: &Step<'_>,
        (at, lane, in_row): (usize, usize, usize),
        row: usize,
        place: Place,
    ) {
        match step {
            Step::Columns(columns) => {
                for column in columns {
                    match column {
                        Column::Stream(stream) => {
                            for first in self.tile.columns_of(in_row, place.columns) {
                                stream.pass(warp, lane, row, [first, self.width]);
                            }
                        }
                        Column::Sum(site) => self.sum_columns(warp, (lane, in_row), *site, place),
                    }
                }
            }
            Step::Row(streams, who) => {
                if *who == Who::All || in_row == 0 {
                    streams.iter().for_each(|stream| stream.pass(warp, lane, row, [0, 1]));
                }
            }
            Step::Reduce(sites) => reduce(warp, *sites, (at, lane), self.tile.threads),
            Step::Exchange([first, others], slot) => {
                let place = |of: usize| ((slot + of) as u64) * first.bytes;
                warp.access(*first, lane, place(0));
                (1..self.tile.cluster as usize)
                    .for_each(|other| warp.access(*others, lane, place(other)));
            }
        }
    }
}

/// A reduction over the warps of a block: each stores what it has, and all load that of all.
fn reduce(
    warp: &mut Warp,
    [store, first, others]: [Site; 3],
    (at, lane): (usize, usize),
    threads: u32,
) {
    if lane == 0 {
        warp.access(store, lane, at as u64 * store.bytes);
    }
    warp.access(first, lane, 0);
    for other in 1..u64::from(threads) / LANES as u64 {
        warp.access(others, lane, other * others.bytes);
    }
}

/// The sites of a sum of columns.
struct ColumnSites {
    /// What warps add to in shared memory, and what they store there.
    load: Site,
    store: Site,
    /// The copy from there: what is loaded, what it is added to, and what is stored.
    read: Site,
    old: Option<Site>,
    to: Site,
}

/// The sites of what a block does behind its rows.
struct LastSums {
    columns: Vec<ColumnSites>,
    /// For each sum of all: its reduction, and its store.
    totals: Vec<([Site; 3], Site)>,
}

impl LastSums {
    fn of(tile: &RowReduction, sites: &mut Sites) -> LastSums {
        let rows = &tile.rows;
        let bytes = rows.dtype.size() as usize;
        let of_total = total_of(rows.dtype).size() as usize;
        let (mut columns, mut totals) = (Vec::new(), Vec::new());
        for output in &rows.outputs {
            match output {
                Output::ColSum { accumulate, .. } if tile.in_registers => {
                    let [load, store, read] = [0; 3].map(|_| sites.shared(bytes));
                    let to = [0; 2].map(|_| sites.device(bytes));
                    let adds = *accumulate && tile.has_all_rows();
                    columns.push(ColumnSites {
                        load,
                        store,
                        read,
                        old: adds.then_some(to[0]),
                        to: to[1],
                    });
                }
                Output::TotalSum { .. } => {
                    let shared = [0; 3].map(|_| sites.shared(of_total));
                    totals.push((shared, sites.device(of_total)));
                }
                Output::Store { .. } | Output::ColSum { .. } => {}
            }
        }
        LastSums { columns, totals }
    }

    fn list(
        &self,
        body: &Body<'_>,
        warp: &mut Warp,
        (at, lane, in_row): (usize, usize, usize),
        (place, number): (Place, usize),
    ) {
        let [base, end] = place.columns;
        let tile = body.tile;
        for sites in &self.columns {
            if !tile.lays_out() {
                for first in tile.columns_of(in_row, place.columns) {
                    (first..first + body.width)
                        .for_each(|col| sites.copy(warp, lane, place.sum(tile, col)));
                }
                continue;
            }
            for first in tile.columns_of(in_row, place.columns) {
                for col in first..first + body.width {
                    let column = tile.place_of(col - base) * sites.load.bytes;
                    if at > 0 && tile.is_by_warp() {
                        warp.access(sites.load, lane, column);
                    }
                    warp.access(sites.store, lane, column);
                }
            }
            for col in (base + at * LANES + lane..end).step_by(tile.threads as usize) {
                let read = sites.read;
                warp.access(read, lane, tile.place_of(col - base) * read.bytes);
                sites.copy(warp, lane, place.sum(tile, col));
            }
        }
        for (shared, to) in &self.totals {
            reduce(warp, *shared, (at, lane), tile.threads);
            if at == 0 && lane == 0 {
                warp.access(*to, lane, number as u64 * to.bytes);
            }
        }
    }
}

/// Accesses of the second pass of sums.
pub(super) fn partial_sums(tile: &PartialSums, grid: u64) -> Option<Accesses> {
    let (side, threads) = (tile.side(), THREADS as usize);
    let slices = threads / side;
    let [of_partial, of_sum] = [tile.partial, tile.dtype].map(|dtype| dtype.size() as usize);
    let mut blocks = Blocks::new();
    for block in 0..grid as usize {
        let first = block * side;
        let count = side.min(tile.len - first);
        let key = [count, first * of_partial % SECTOR as usize, first * of_sum % SECTOR as usize];
        blocks.count(key.map(|x| x as u64).to_vec(), 1, |warp| {
            let mut sites = Sites::default();
            let (load, old, to) =
                (sites.device(of_partial), sites.device(of_sum), sites.device(of_sum));
            let [fill, other, half_store] = [0; 3].map(|_| sites.shared(of_partial));
            for thread in 0..threads {
                let (lane, at, slice) = (thread % LANES, thread % side, thread / side);
                if lane == 0 {
                    warp.end();
                }
                if at < count {
                    for chunk in (slice..tile.chunks).step_by(slices) {
                        let partial = chunk * tile.len + first + at;
                        warp.access(load, lane, (partial * of_partial) as u64);
                    }
                }
                warp.access(fill, lane, (thread * of_partial) as u64);
                let mut half = if side == 1 { threads / 2 } else { 0 };
                while half > 0 {
                    if thread < half {
                        warp.access(other, lane, ((thread + half) * of_partial) as u64);
                        warp.access(half_store, lane, (thread * of_partial) as u64);
                    }
                    half /= 2;
                }
                if thread >= side || at >= count {
                    continue;
                }
                if side > 1 {
                    for slice in 1..slices {
                        warp.access(other, lane, ((slice * side + thread) * of_partial) as u64);
                    }
                }
                let sum = ((first + at) * of_sum) as u64;
                if tile.accumulate {
                    warp.access(old, lane, sum);
                }
                warp.access(to, lane, sum);
            }
            warp.end();
        })?;
    }
    Some(blocks.count)
}
