//! The gradient of a routed feed-forward layer, which computes what is inside of experts once more.
//!
//! With `g = x w_gateᵀ`, `u = x w_upᵀ`, `σ` the logistic function of `g`, `s` the gate of a pair,
//! `open = g σ` and `dh = dy w_down`, of each pair: `dgate = dh · (open u)`, the gradients of
//! `g` and `u` are `s dh u σ (1 + g (1 - σ))` and `s dh open`, and from them come `dx` and the
//! gradients of weights: of `w_down` it is `dyᵀ (s open u)`.
//!
//! Of a pass there are tasks for what is inside, for the gradients of gates, of weights, and of
//! tokens, and for the sums over the experts of a token. See [`super::routed`].

use super::Cpu;
use super::attention::{load_up_to, store_up_to};
use super::formats::{Format, Round};
use super::routed::{
    BLOCK, Grid, Matrix, Multiplier, Passes, Routes, Run, Side, Sums, TILE, add_up, clear, gather,
    pass_rows, rows_bytes,
};
use super::scratch::{Bump, lines_of};
use super::vector::{Job, Scalar, Vector};
use super::view::{View, ViewMut};
use crate::kernel::{Experts, Kernel};

/// Rows whose gradients of gates are summed by one task.
const SUMMED: usize = 64;

/// Bytes of scratch per thread and per launch.
pub(super) fn scratch<S: Scalar>(e: &Experts) -> [usize; 2] {
    let rows = rows_of_pass::<S>(e);
    let products = Multiplier::bytes::<S>(e.model.max(e.inner).max(rows));
    let of_pass = 2 * rows_bytes::<S>(rows, e.model, Format::of(e.dtype))
        + 3 * rows_bytes::<S>(rows, e.inner, Format::Own)
        + rows_bytes::<S>(rows, e.model, Format::Own)
        + rows_bytes::<S>(rows, e.inner.div_ceil(BLOCK), Format::Own);
    [3 * lines_of::<S>(TILE) + products, Routes::<S>::bytes(e) + of_pass + Sums::bytes::<S>(e)]
}

fn rows_of_pass<S>(e: &Experts) -> usize {
    let numbers = e.model + 3 * e.inner + e.inner.div_ceil(BLOCK);
    pass_rows(e, 2 * e.model * Format::of(e.dtype).bytes::<S>() + numbers * size_of::<S>())
}

/// The tensors of a launch, and rows of scratch.
struct Backward<'a, S> {
    e: &'a Experts,
    multiplier: Multiplier<'a>,
    routes: Routes<S>,
    /// `w_gate` and `w_up`, a row for each number inside of an expert.
    up: [Matrix; 2],
    /// A row for each number of a token.
    down: Matrix,
    dgates: Matrix,
    /// Gradients as `up` and `down` are.
    dup: [Matrix; 2],
    ddown: Matrix,
    /// Of each pair: its token, and the gradient of its result.
    x: Matrix,
    dy: Matrix,
    /// What is multiplied by `w_down`, and the gradients of products with `w_gate` and `w_up`.
    inside: [Matrix; 3],
    /// Parts of the gradient of its gate.
    parts: Matrix,
    /// The gradient of its token.
    dx: Matrix,
}

/// Runs the gradient of a routed feed-forward layer.
pub(super) fn execute<S: Scalar>(cpu: &Cpu, e: &Experts, inputs: &[View], outputs: &[ViewMut]) {
    let wanted = Kernel::ExpertsBwd(e.clone()).outputs();
    if e.tokens == 0 || e.weights() == 0 {
        let adds = [false; 2].into_iter().chain(e.accumulate);
        let new = outputs.iter().zip(&wanted).zip(adds).filter(|(_, adds)| !adds);
        return new.for_each(|((view, argument), _)| clear(view, argument));
    }
    clear(&outputs[1], &wanted[1]);
    let format = Format::of(e.dtype);
    let input = |at: usize, row: usize| Matrix::input(&inputs[at], format, row);
    let output = |at: usize, row: usize| Matrix::output(&outputs[at], Format::Own, row);
    let mut buffer = super::lock(&cpu.shared);
    let scratch = &mut buffer.bump(self::scratch::<S>(e)[1]);
    let (multiplier, rows) = (Multiplier::new(cpu, e), rows_of_pass::<S>(e));
    let mut room = |row: usize, format: Format| Matrix::room::<S>(scratch, rows, row, format);
    let (x, dy) = (room(e.model, format), room(e.model, format));
    let inside = [(); 3].map(|()| room(e.inner, multiplier.factors()));
    let parts = room(e.inner.div_ceil(BLOCK), Format::Own);
    let dx = room(e.model, Format::Own);
    let backward = Backward::<S> {
        e,
        multiplier,
        routes: Routes::new(cpu, e, input(1, e.experts), scratch),
        up: [input(2, e.model), input(3, e.model)],
        down: input(4, e.inner),
        dgates: Matrix::output(&outputs[1], format, e.experts),
        dup: [output(2, e.model), output(3, e.model)],
        ddown: output(4, e.inner),
        x,
        dy,
        inside,
        parts,
        dx,
    };
    let sums = Sums::new::<S>(e, Matrix::output(&outputs[0], format, e.model), scratch);
    backward.clear_unused();
    let mut passes = Passes::new(&backward.routes.counts, rows);
    let mut is_first = true;
    loop {
        let runs = passes.next();
        gather(cpu, &backward.routes, &runs, [input(0, e.model), x]);
        gather(cpu, &backward.routes, &runs, [input(5, e.model), dy]);
        backward.differentiate_inside(&runs);
        backward.sum_gates(&runs);
        backward.multiply_weights(&runs);
        backward.multiply_tokens(&runs);
        let ends = [is_first, passes.is_done()];
        add_up(cpu, (&backward.routes, &runs), (dx, sums), ends);
        is_first = false;
        if passes.is_done() {
            return;
        }
    }
}

impl<S: Scalar> Backward<'_, S> {
    /// Zeroes the gradients of weights of experts without pairs, unless they are added to.
    fn clear_unused(&self) {
        let (e, Multiplier { cpu, .. }) = (self.e, self.multiplier);
        let counts = self.routes.counts.iter().enumerate();
        let unused: Vec<usize> = counts.filter(|(_, n)| **n == 0).map(|(at, _)| at).collect();
        let gradients = [(self.dup[0], e.inner), (self.dup[1], e.inner), (self.ddown, e.model)];
        let cycles = (3 * unused.len() * e.inner * e.model) as u64 / 8;
        cpu.for_each(3 * unused.len(), cycles, 0, |task, _| {
            let (expert, kind) = (unused[task / 3], task % 3);
            let (gradient, rows) = gradients[kind];
            if !e.accumulate[kind] {
                let start = gradient.numbers::<S>([expert * rows, 0]);
                // SAFETY: the output has these rows of each expert, which are one task's.
                unsafe { std::slice::from_raw_parts_mut(start, rows * gradient.row) }.fill(S::ZERO);
            }
        });
    }

    /// Computes what is inside of the experts of a pass, and its gradients.
    fn differentiate_inside(&self, runs: &[Run]) {
        let (e, Multiplier { cpu, .. }) = (self.e, self.multiplier);
        let grid = Grid::new(runs.iter().map(|run| run.rows), e.inner, cpu.threads());
        let cycles = self.multiplier.cycles(e, runs, 3);
        cpu.for_each(grid.tasks(), cycles, scratch::<S>(e)[0], |task, scratch: &mut Bump| {
            let (at, [first, rows], [column, columns]) = grid.tile(task);
            let (run, row) = (&runs[at], runs[at].row + first);
            let x = self.x.side::<S>([row, 0]);
            let [gate, up] =
                self.up.map(|w| w.side::<S>([run.expert * e.inner + column, 0]).transposed());
            let down = self.down.side::<S>([run.expert * e.model, column]);
            let dy = self.dy.side::<S>([row, 0]);
            let tiles = [(); 3].map(|()| scratch.take::<S>(TILE));
            for (tile, sides) in tiles.into_iter().zip([[x, gate], [x, up], [dy, down]]) {
                let sizes = [rows, columns, e.model];
                self.multiplier.multiply(sizes, sides, (tile, columns), false, scratch.rest());
            }
            cpu.isa.run(Differentiate {
                tiles,
                columns,
                gates: &self.routes.gates(run)[first..first + rows],
                inside: self.inside,
                place: [row, column],
                parts: self.parts,
            });
        });
    }

    /// Sums the gradients of the gates of a pass.
    fn sum_gates(&self, runs: &[Run]) {
        let Multiplier { cpu, .. } = self.multiplier;
        let pieces = |run: &Run| run.rows.div_ceil(SUMMED);
        let rows: usize = runs.iter().map(|run| run.rows).sum();
        cpu.for_each(
            runs.iter().map(pieces).sum(),
            (rows * (20 + self.parts.row)) as u64,
            0,
            |mut task, _| {
                for run in runs {
                    if task < pieces(run) {
                        let first = task * SUMMED;
                        let tokens = &self.routes.tokens(run)[first..run.rows.min(first + SUMMED)];
                        let (parts, to) = (self.parts, self.dgates);
                        let row = run.row + first;
                        let expert = run.expert;
                        cpu.isa.run(SumGates::<S> { tokens, parts, row, to, expert, of: [] });
                        return;
                    }
                    task -= pieces(run);
                }
            },
        );
    }

    /// Multiplies the gradients of weights.
    fn multiply_weights(&self, runs: &[Run]) {
        let (e, Multiplier { cpu, .. }) = (self.e, self.multiplier);
        let grid = |rows: usize, columns: usize| {
            Grid::new(runs.iter().map(|_| rows), columns, cpu.threads())
        };
        let (up, down) = (grid(e.inner, e.model), grid(e.model, e.inner));
        let cycles = self.multiplier.cycles(e, runs, 3);
        let tasks = 2 * up.tasks() + down.tasks();
        cpu.for_each(tasks, cycles, scratch::<S>(e)[0], |task, scratch: &mut Bump| {
            let kind = (task / up.tasks()).min(2);
            let [weighted, dgate, dup] = self.inside;
            let (grid, left, right, to) = match kind {
                0 => (&up, dgate, self.x, self.dup[0]),
                1 => (&up, dup, self.x, self.dup[1]),
                _ => (&down, self.dy, weighted, self.ddown),
            };
            let (at, [row, rows], [column, columns]) = grid.tile(task - kind * up.tasks());
            let run = &runs[at];
            let sides: [Side; 2] =
                [left.side::<S>([run.row, row]).transposed(), right.side::<S>([run.row, column])];
            let (sizes, add) = ([rows, columns, run.rows], e.accumulate[kind] || run.first > 0);
            let of_expert = if kind == 2 { e.model } else { e.inner };
            let target = to.numbers::<S>([run.expert * of_expert + row, column]);
            self.multiplier.multiply(sizes, sides, (target, to.row), add, scratch.rest());
        });
    }

    /// Multiplies the gradients of tokens.
    fn multiply_tokens(&self, runs: &[Run]) {
        let (e, Multiplier { cpu, .. }) = (self.e, self.multiplier);
        let grid = Grid::new(runs.iter().map(|run| run.rows), e.model, cpu.threads());
        let cycles = self.multiplier.cycles(e, runs, 2);
        cpu.for_each(grid.tasks(), cycles, scratch::<S>(e)[0], |task, scratch: &mut Bump| {
            let (at, [first, rows], [column, columns]) = grid.tile(task);
            let (run, row) = (&runs[at], runs[at].row + first);
            let target = (self.dx.numbers::<S>([row, column]), e.model);
            for (kind, w) in self.up.into_iter().enumerate() {
                let w = w.side::<S>([run.expert * e.inner, column]);
                let sides = [self.inside[1 + kind].side::<S>([row, 0]), w];
                let (sizes, add) = ([rows, columns, e.inner], kind > 0);
                self.multiplier.multiply(sizes, sides, target, add, scratch.rest());
            }
        });
    }
}

/// Makes the gradients of a tile of its three products.
struct Differentiate<'a, S> {
    /// Products with `w_gate`, with `w_up`, and of `dy` with `w_down`; all are overwritten.
    tiles: [*mut S; 3],
    columns: usize,
    /// Of each row.
    gates: &'a [S],
    inside: [Matrix; 3],
    place: [usize; 2],
    parts: Matrix,
}

impl<S: Scalar> Job<S> for Differentiate<'_, S> {
    #[inline(always)]
    fn run<V: Vector<Scalar = S>>(self) {
        let Differentiate { tiles, columns, gates, inside, place: [first, column], parts } = self;
        for (row, gate) in gates.iter().enumerate() {
            let of_row = tiles.map(|tile| tile.wrapping_add(row * columns));
            for block in (0..columns).step_by(BLOCK) {
                let len = BLOCK.min(columns - block);
                let at = of_row.map(|x| x.wrapping_add(block));
                // SAFETY: tiles hold a row of columns for each gate, parts a number per block.
                unsafe {
                    let part = differentiate::<V>(at, len, *gate);
                    *parts.numbers::<S>([first + row, (column + block) / BLOCK]) = part;
                }
            }
            for (source, to) in of_row.into_iter().zip(inside) {
                let target = to.at::<S>([first + row, column]);
                V::call(Round { source: source.cast_const(), target, len: columns });
            }
        }
    }
}

/// What a block of a row adds to the gradient of its gate; the products become what is multiplied
/// by `w_down`, and the gradients of the first two.
///
/// # Safety
///
/// All hold `len` numbers.
#[inline(always)]
unsafe fn differentiate<V: Vector>(
    [g, u, dh]: [*mut V::Scalar; 3],
    len: usize,
    gate: V::Scalar,
) -> V::Scalar {
    let (zero, one, share) = (V::Scalar::ZERO, V::splat(V::Scalar::ONE), V::splat(gate));
    let mut sum = V::splat(zero);
    for i in (0..len).step_by(V::LANES) {
        // SAFETY: by the contract of the function.
        unsafe {
            let [gate, up, outer] = [g, u, dh].map(|x| load_up_to::<V>(x, i, len, zero));
            let sigmoid = <V::Scalar as Scalar>::sigmoid(gate);
            let open = gate.mul(sigmoid);
            let inside = open.mul(up);
            sum = outer.fma(inside, sum);
            let outer = outer.mul(share);
            let slope = gate.fma(one.sub(sigmoid), one).mul(sigmoid);
            store_up_to(inside.mul(share), g, i, len);
            store_up_to(outer.mul(up).mul(slope), u, i, len);
            store_up_to(outer.mul(open), dh, i, len);
        }
    }
    sum.fold(|a, b| a + b)
}

/// Sums the parts of the gradients of gates of one expert.
struct SumGates<'a, S> {
    tokens: &'a [u32],
    parts: Matrix,
    /// The row of the first one.
    row: usize,
    to: Matrix,
    expert: usize,
    of: [S; 0],
}

impl<S: Scalar> Job<S> for SumGates<'_, S> {
    #[inline(always)]
    fn run<V: Vector<Scalar = S>>(self) {
        let SumGates { tokens, parts, row, to, expert, of: [] } = self;
        for (at, token) in tokens.iter().enumerate() {
            let start = parts.numbers::<S>([row + at, 0]).cast_const();
            // SAFETY: pairs of the pass have a row of parts each.
            let parts = unsafe { std::slice::from_raw_parts(start, parts.row) };
            let sum = parts.iter().fold(S::ZERO, |sum, part| sum + *part);
            let target = to.at::<S>([*token as usize, expert]);
            V::call(Round { source: &raw const sum, target, len: 1 });
        }
    }
}
