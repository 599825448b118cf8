//! What a routed feed-forward layer and its gradient share: who passes which expert, passes over
//! these pairs, and products of their rows.
//!
//! Pairs of a token and an expert are ordered by expert and then by token. A pass fills the rows of
//! scratch with the next pairs: rows of tokens are gathered, so that those of one expert are a
//! matrix, multiplied in tiles, and the results of all experts added to the rows of tokens by
//! tasks that own tokens. No task of a pass waits for another, and an expert that has most of the
//! tokens has most of the tiles.

use super::Cpu;
use super::attention_bwd::add_row;
use super::formats::{Format, Operand, Round, Widen};
use super::pairs::{self, PairedPart};
use super::scratch::{Bump, lines_of};
use super::tiles::{self, Epilogue, Loop, Nest, Part};
use super::vector::{Job, Pairs, Scalar, Vector};
use super::view::{Shared, View, ViewMut};
use crate::arguments::Argument;
use crate::kernel::{Experts, Product};

/// The granularity of passes: one that ends within an expert has a multiple of this of its rows,
/// whole blocks of `k` of the gradients of weights, whose bits then do not depend on where it ends.
const ROWS: usize = Product::K_BLOCK;
/// Bytes of the rows of a pass. Chosen: experts of a few hundred rows each are packed once, and
/// beside activations it is little.
const PASS_BYTES: usize = 64 << 20;
/// Rows and columns of a tile of products, and of one where there are few tiles for each thread.
/// Columns are whole blocks of [`BLOCK`].
const TILES: [[usize; 2]; 2] = [[256, 192], [96, 96]];
/// Tiles per thread below which they are smaller. Chosen.
const TILES_PER_THREAD: usize = 4;
/// Columns of which gradients of gates are summed apart: how columns are cut then changes no bit.
pub(super) const BLOCK: usize = 96;
/// Tokens whose rows are added up by one task.
const TOKENS: usize = 16;
/// Rows that are gathered by one task.
const GATHERED: usize = 32;

/// Numbers of a tile.
pub(super) const TILE: usize = TILES[0][0] * TILES[0][1];

/// Rows in memory, one after the other: of an argument, or in scratch.
#[derive(Clone, Copy)]
pub(super) struct Matrix {
    start: Shared<u8>,
    pub(super) format: Format,
    /// Elements of a row.
    pub(super) row: usize,
}

/// One side of a product: where it starts, and its strides over rows and columns.
#[derive(Clone, Copy)]
pub(super) struct Side {
    start: Operand,
    strides: [usize; 2],
}

impl Side {
    pub(super) fn transposed(self) -> Side {
        let [row, column] = self.strides;
        Side { strides: [column, row], ..self }
    }
}

impl Matrix {
    pub(super) fn input(view: &View, format: Format, row: usize) -> Matrix {
        Matrix { start: Shared::new(view.start::<u8>().cast_mut()), format, row }
    }

    pub(super) fn output(view: &ViewMut, format: Format, row: usize) -> Matrix {
        Matrix { start: Shared::new(view.start::<u8>()), format, row }
    }

    /// Room for rows of a format, of those that [`rows_bytes`] counts.
    pub(super) fn room<S>(scratch: &mut Bump, rows: usize, row: usize, format: Format) -> Matrix {
        let start = scratch.take::<u8>(rows * row * format.bytes::<S>());
        Matrix { start: Shared::new(start), format, row }
    }

    /// The elements from a row and a column on.
    pub(super) fn at<S>(self, [row, column]: [usize; 2]) -> Operand {
        Operand::new(self.start.get(), self.format).moved::<S>(row * self.row + column)
    }

    /// As [`Matrix::at`], where elements are numbers of `S`.
    pub(super) fn numbers<S>(self, place: [usize; 2]) -> *mut S {
        debug_assert!(self.format == Format::Own, "it holds what is computed with");
        self.at::<S>(place).start::<S>().cast_mut()
    }

    pub(super) fn side<S>(self, place: [usize; 2]) -> Side {
        Side { start: self.at::<S>(place), strides: [self.row, 1] }
    }
}

/// Bytes of rows in scratch.
pub(super) fn rows_bytes<S>(rows: usize, row: usize, format: Format) -> usize {
    lines_of::<u8>(rows * row * format.bytes::<S>())
}

/// Rows of a pass; each takes `row_bytes`.
pub(super) fn pass_rows(e: &Experts, row_bytes: usize) -> usize {
    (PASS_BYTES / row_bytes.max(1)).max(ROWS).min(e.tokens * e.experts)
}

/// Some pairs of one expert, in a pass.
pub(super) struct Run {
    pub(super) expert: usize,
    /// Of the pairs of the expert, the first one.
    pub(super) first: usize,
    /// The row of the pass that it has.
    pub(super) row: usize,
    pub(super) rows: usize,
}

/// All passes, in order.
pub(super) struct Passes<'a> {
    counts: &'a [usize],
    rows: usize,
    /// The next pair.
    expert: usize,
    done: usize,
}

impl<'a> Passes<'a> {
    /// Passes of at most `rows` rows; `counts` are the pairs of each expert.
    pub(super) fn new(counts: &'a [usize], rows: usize) -> Passes<'a> {
        Passes { counts, rows, expert: 0, done: 0 }
    }

    pub(super) fn is_done(&self) -> bool {
        self.expert == self.counts.len()
    }

    /// The runs of the next pass; none where there are no pairs.
    pub(super) fn next(&mut self) -> Vec<Run> {
        let (mut runs, mut row) = (Vec::new(), 0);
        while let Some(count) = self.counts.get(self.expert) {
            let (left, room) = (count - self.done, self.rows - row);
            let rows = if left <= room { left } else { room / ROWS * ROWS };
            if rows > 0 {
                runs.push(Run { expert: self.expert, first: self.done, row, rows });
                (row, self.done) = (row + rows, self.done + rows);
            }
            if rows < left {
                break;
            }
            (self.expert, self.done) = (self.expert + 1, 0);
        }
        runs
    }
}

/// The pairs of a launch: for each expert, its tokens in ascending order and their gates.
pub(super) struct Routes<S> {
    tokens: Shared<u32>,
    gates: Shared<S>,
    /// Pairs of each expert.
    pub(super) counts: Vec<usize>,
    /// Pairs for which an expert has room.
    most: usize,
}

impl<S: Scalar> Routes<S> {
    pub(super) fn bytes(e: &Experts) -> usize {
        let pairs = e.tokens * e.experts;
        lines_of::<u32>(pairs) + lines_of::<S>(pairs) + lines_of::<S>(e.experts)
    }

    /// Reads all gates.
    pub(super) fn new(cpu: &Cpu, e: &Experts, gates: Matrix, scratch: &mut Bump) -> Routes<S> {
        let pairs = e.tokens * e.experts;
        let (tokens, found) = (scratch.take::<u32>(pairs), scratch.take::<S>(pairs));
        let row = scratch.take::<S>(e.experts);
        let mut counts = vec![0; e.experts];
        let lists = (tokens, found);
        cpu.isa.run(Route { gates, tokens: e.tokens, row, lists, counts: &mut counts });
        let (tokens, gates) = (Shared::new(tokens), Shared::new(found));
        Routes { tokens, gates, counts, most: e.tokens }
    }

    /// The tokens of a run.
    pub(super) fn tokens(&self, run: &Run) -> &[u32] {
        let start = self.tokens.get().wrapping_add(run.expert * self.most + run.first);
        // SAFETY: the list of an expert has all pairs that are counted, and is written no more.
        unsafe { std::slice::from_raw_parts(start, run.rows) }
    }

    /// Their gates.
    pub(super) fn gates(&self, run: &Run) -> &[S] {
        let start = self.gates.get().wrapping_add(run.expert * self.most + run.first);
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts(start, run.rows) }
    }
}

/// See [`Routes::new`].
struct Route<'a, S> {
    gates: Matrix,
    tokens: usize,
    /// Room for the gates of one token.
    row: *mut S,
    lists: (*mut u32, *mut S),
    counts: &'a mut [usize],
}

impl<S: Scalar> Job<S> for Route<'_, S> {
    #[inline(always)]
    fn run<V: Vector<Scalar = S>>(self) {
        let Route { gates, tokens, row, lists, counts } = self;
        for token in 0..tokens {
            let source = gates.at::<S>([token, 0]);
            V::call(Widen { source, target: row, len: counts.len() });
            for (expert, count) in counts.iter_mut().enumerate() {
                // SAFETY: the row has a number per expert, and lists room for all tokens each.
                unsafe {
                    let gate = *row.add(expert);
                    if gate != S::ZERO {
                        let at = expert * tokens + *count;
                        *lists.0.add(at) = token as u32;
                        *lists.1.add(at) = gate;
                        *count += 1;
                    }
                }
            }
        }
    }
}

/// Gathers the rows of tokens of all runs.
pub(super) fn gather<S: Scalar>(
    cpu: &Cpu,
    routes: &Routes<S>,
    runs: &[Run],
    [from, to]: [Matrix; 2],
) {
    let Some(last) = runs.last() else { return };
    let (rows, bytes) = (last.row + last.rows, from.row * from.format.bytes::<S>());
    let cycles = (rows * bytes) as u64 / 8;
    cpu.for_each(rows.div_ceil(GATHERED), cycles, 0, |task, _| {
        let [start, end] = [task, task + 1].map(|at| (at * GATHERED).min(rows));
        for run in runs {
            let [first, behind] = [start, end].map(|at| at.clamp(run.row, run.row + run.rows));
            for row in first..behind {
                let token = routes.tokens(run)[row - run.row] as usize;
                let source = from.at::<S>([token, 0]).start::<u8>();
                let target = to.at::<S>([row, 0]).start::<u8>().cast_mut();
                // SAFETY: tokens have a row each, and so have pairs in scratch, of this task alone.
                unsafe { target.copy_from_nonoverlapping(source, bytes) };
            }
        }
    });
}

/// The tiles of one product for each of several runs.
pub(super) struct Grid {
    /// The run, the first row and the number of rows.
    rows: Vec<(usize, [usize; 2])>,
    columns: usize,
    width: usize,
}

impl Grid {
    /// Tiles of `[rows, columns]` results, one for each of `rows`.
    pub(super) fn new(
        rows: impl Iterator<Item = usize> + Clone,
        columns: usize,
        threads: usize,
    ) -> Grid {
        let [large, small] = TILES;
        let count = |[height, width]: [usize; 2]| {
            let rows: usize = rows.clone().map(|rows| rows.div_ceil(height)).sum();
            rows * columns.div_ceil(width)
        };
        let is_enough = threads == 1 || count(large) >= TILES_PER_THREAD * threads;
        let [height, width] = if is_enough { large } else { small };
        let tiles = |(at, rows): (usize, usize)| {
            (0..rows).step_by(height).map(move |row| (at, [row, height.min(rows - row)]))
        };
        Grid { rows: rows.enumerate().flat_map(tiles).collect(), columns, width }
    }

    pub(super) fn tasks(&self) -> usize {
        self.rows.len() * self.columns.div_ceil(self.width)
    }

    /// The run of a task, and the first one and the number of its rows and columns.
    pub(super) fn tile(&self, task: usize) -> (usize, [usize; 2], [usize; 2]) {
        let parts = self.columns.div_ceil(self.width);
        let (run, rows) = self.rows[task / parts];
        let first = task % parts * self.width;
        (run, rows, [first, self.width.min(self.columns - first)])
    }
}

/// How the products of a launch are computed.
#[derive(Clone, Copy)]
pub(super) struct Multiplier<'a> {
    pub(super) cpu: &'a Cpu,
    /// If both sides are of BF16, what multiplies them.
    pub(super) by: Option<Pairs>,
}

impl<'a> Multiplier<'a> {
    pub(super) fn new(cpu: &'a Cpu, e: &Experts) -> Multiplier<'a> {
        let is_paired = e.dtype == ir::DType::BF16;
        Multiplier { cpu, by: cpu.isa.pairs().filter(|_| is_paired) }
    }

    /// Bytes of scratch for a product of a tile over any number of points up to `k`.
    pub(super) fn bytes<S>(k: usize) -> usize {
        let [m, n] = TILES[0];
        tiles::scratch_bytes::<S>([m, n, k], 0).max(pairs::most_scratch_bytes([m, n, k]))
    }

    /// The format of what is computed and then multiplied.
    pub(super) fn factors(self) -> Format {
        if self.by.is_some() { Format::BF16 } else { Format::Own }
    }

    /// Cycles of `products` products for each pair of `runs`.
    pub(super) fn cycles(self, e: &Experts, runs: &[Run], products: usize) -> u64 {
        let per_cycle = match self.by {
            Some(Pairs::Tiles) => 512,
            Some(Pairs::Dot) => 64,
            None => 32,
        };
        let pairs: usize = runs.iter().map(|run| run.rows).sum();
        (2 * pairs * products * e.model * e.inner) as u64 / per_cycle
    }

    /// `c (+)= a b` for `a[m, k]`, `b[k, n]` and rows of `c`, which lie `row` apart.
    ///
    /// All hold their points, `c` those of one task, and scratch what [`Multiplier::bytes`] says.
    pub(super) fn multiply<S: Scalar>(
        self,
        [m, n, k]: [usize; 3],
        [a, b]: [Side; 2],
        (c, row): (*mut S, usize),
        accumulate: bool,
        mut scratch: Bump,
    ) {
        let of = |size: usize, strides: [usize; 3]| vec![Loop { size, strides }];
        let nest = Nest {
            m: of(m, [a.strides[0], 0, row]),
            n: of(n, [0, b.strides[1], 1]),
            k: of(k, [a.strides[1], b.strides[0], 0]),
            accumulate,
            frames: Vec::new(),
            planes: None,
        };
        let part = Part {
            nest: &nest,
            rows: [0, m],
            columns: [0, n],
            a: a.start,
            b: b.start,
            c,
            epilogue: Epilogue::none(),
            rounded: None,
            then: None,
            scratch: &mut scratch,
        };
        match self.by {
            Some(by) => self.cpu.isa.run_pairs(PairedPart { part, by }),
            None => self.cpu.isa.run(part),
        }
    }
}

/// Where rows of a pass are added up.
#[derive(Clone, Copy)]
pub(super) struct Sums {
    /// Numbers that are computed with, a row per token.
    sums: Matrix,
    /// The result, where that is narrow.
    rounded: Option<Matrix>,
}

impl Sums {
    pub(super) fn bytes<S>(e: &Experts) -> usize {
        if e.dtype.is_narrow() { rows_bytes::<S>(e.tokens, e.model, Format::Own) } else { 0 }
    }

    /// Of an output with a row per token.
    pub(super) fn new<S>(e: &Experts, output: Matrix, scratch: &mut Bump) -> Sums {
        if !e.dtype.is_narrow() {
            return Sums { sums: output, rounded: None };
        }
        let sums = Matrix::room::<S>(scratch, e.tokens, e.model, Format::Own);
        Sums { sums, rounded: Some(output) }
    }
}

/// Adds the rows of a pass to those of tokens, in tasks of some tokens each. The first pass zeroes
/// them before, the last one rounds them.
pub(super) fn add_up<S: Scalar>(
    cpu: &Cpu,
    (routes, runs): (&Routes<S>, &[Run]),
    (rows, to): (Matrix, Sums),
    [is_first, is_last]: [bool; 2],
) {
    let tokens = routes.most;
    let pairs: usize = runs.iter().map(|run| run.rows).sum();
    let cycles = ((pairs + tokens) * rows.row) as u64 / 8;
    cpu.for_each(tokens.div_ceil(TOKENS), cycles, 0, |task, _| {
        let tokens = [task, task + 1].map(|at| (at * TOKENS).min(tokens));
        cpu.isa.run(AddUp { routes, runs, rows, to, tokens, is_first, is_last });
    });
}

/// See [`add_up`].
struct AddUp<'a, S> {
    routes: &'a Routes<S>,
    runs: &'a [Run],
    rows: Matrix,
    to: Sums,
    /// The first one, and the one behind the last.
    tokens: [usize; 2],
    is_first: bool,
    is_last: bool,
}

impl<S: Scalar> Job<S> for AddUp<'_, S> {
    #[inline(always)]
    fn run<V: Vector<Scalar = S>>(self) {
        let AddUp { routes, runs, rows, to, tokens: [from, end], .. } = self;
        let len = rows.row;
        let sums = |token: usize| to.sums.numbers::<S>([token, 0]);
        if self.is_first {
            // SAFETY: there is a row for each token; those of a task are its own.
            unsafe { std::slice::from_raw_parts_mut(sums(from), (end - from) * len) }.fill(S::ZERO);
        }
        for run in runs {
            let tokens = routes.tokens(run);
            let [first, behind] =
                [from, end].map(|at| tokens.partition_point(|token| (*token as usize) < at));
            for (at, token) in tokens.iter().enumerate().take(behind).skip(first) {
                let row = rows.numbers::<S>([run.row + at, 0]);
                // SAFETY: as above; pairs of the pass have a row each.
                unsafe { add_row::<V>(row, sums(*token as usize), len) };
            }
        }
        if let Some(rounded) = to.rounded.filter(|_| self.is_last) {
            let target = rounded.at::<S>([from, 0]);
            V::call(Round { source: sums(from).cast_const(), target, len: (end - from) * len });
        }
    }
}

/// Zeroes what outputs of a launch hold.
pub(super) fn clear(view: &ViewMut, argument: &Argument) {
    // SAFETY: outputs were checked to hold the bytes of their arguments, and are this launch's.
    unsafe { view.start::<u8>().write_bytes(0, argument.bytes()) };
}
