//! A routed feed-forward layer: of each expert only the rows of its tokens are multiplied.
//!
//! Of a pass there are three rounds of tasks: tiles of `silu(x w_gateᵀ) ∘ x w_upᵀ`, weighted by
//! gates, tiles of their products with `w_down`, and sums over the experts of a token, in ascending
//! order. See [`super::routed`].

use super::Cpu;
use super::attention::{load_up_to, store_up_to};
use super::formats::{Format, Operand, Round};
use super::routed::{
    Grid, Matrix, Multiplier, Passes, Routes, Run, Sums, TILE, add_up, clear, gather, pass_rows,
    rows_bytes,
};
use super::scratch::{Bump, lines_of};
use super::vector::{Job, Scalar, Vector};
use super::view::{View, ViewMut};
use crate::kernel::{Experts, Kernel};

/// Bytes of scratch per thread and per launch.
pub(super) fn scratch<S: Scalar>(e: &Experts) -> [usize; 2] {
    let products = Multiplier::bytes::<S>(e.model.max(e.inner));
    let rows = rows_of_pass::<S>(e);
    let of_pass = rows_bytes::<S>(rows, e.model, Format::of(e.dtype))
        + rows_bytes::<S>(rows, e.inner, Format::Own)
        + rows_bytes::<S>(rows, e.model, Format::Own);
    [2 * lines_of::<S>(TILE) + products, Routes::<S>::bytes(e) + of_pass + Sums::bytes::<S>(e)]
}

fn rows_of_pass<S>(e: &Experts) -> usize {
    let bytes = e.model * Format::of(e.dtype).bytes::<S>() + (e.model + e.inner) * size_of::<S>();
    pass_rows(e, bytes)
}

/// The tensors of a launch, and rows of scratch.
struct Forward<'a, S> {
    e: &'a Experts,
    multiplier: Multiplier<'a>,
    routes: Routes<S>,
    /// `w_gate` and `w_up`, a row for each number inside of an expert.
    up: [Matrix; 2],
    /// A row for each number of a token.
    down: Matrix,
    /// Of each pair: its token, what is inside of its expert, and what that yields.
    x: Matrix,
    inside: Matrix,
    y: Matrix,
}

/// Runs a routed feed-forward layer.
pub(super) fn execute<S: Scalar>(cpu: &Cpu, e: &Experts, inputs: &[View], outputs: &[ViewMut]) {
    if e.tokens == 0 || e.weights() == 0 {
        let y = Kernel::Experts(e.clone()).outputs()[0];
        return clear(&outputs[0], &y);
    }
    let format = Format::of(e.dtype);
    let input = |at: usize, row: usize| Matrix::input(&inputs[at], format, row);
    let mut buffer = super::lock(&cpu.shared);
    let scratch = &mut buffer.bump(self::scratch::<S>(e)[1]);
    let (multiplier, rows) = (Multiplier::new(cpu, e), rows_of_pass::<S>(e));
    let forward = Forward::<S> {
        e,
        multiplier,
        routes: Routes::new(cpu, e, input(1, e.experts), scratch),
        up: [input(2, e.model), input(3, e.model)],
        down: input(4, e.inner),
        x: Matrix::room::<S>(scratch, rows, e.model, format),
        inside: Matrix::room::<S>(scratch, rows, e.inner, multiplier.factors()),
        y: Matrix::room::<S>(scratch, rows, e.model, Format::Own),
    };
    let sums = Sums::new::<S>(e, Matrix::output(&outputs[0], format, e.model), scratch);
    let mut passes = Passes::new(&forward.routes.counts, rows);
    let mut is_first = true;
    loop {
        let runs = passes.next();
        gather(cpu, &forward.routes, &runs, [input(0, e.model), forward.x]);
        forward.multiply_up(&runs);
        forward.multiply_down(&runs);
        let ends = [is_first, passes.is_done()];
        add_up(cpu, (&forward.routes, &runs), (forward.y, sums), ends);
        is_first = false;
        if passes.is_done() {
            return;
        }
    }
}

impl<S: Scalar> Forward<'_, S> {
    /// Computes what is inside of the experts of a pass.
    fn multiply_up(&self, runs: &[Run]) {
        let (e, Multiplier { cpu, .. }) = (self.e, self.multiplier);
        let grid = Grid::new(runs.iter().map(|run| run.rows), e.inner, cpu.threads());
        let cycles = self.multiplier.cycles(e, runs, 2);
        cpu.for_each(grid.tasks(), cycles, scratch::<S>(e)[0], |task, scratch: &mut Bump| {
            let (at, [first, rows], [column, columns]) = grid.tile(task);
            let (run, row) = (&runs[at], runs[at].row + first);
            let x = self.x.side::<S>([row, 0]);
            let tiles = self.up.map(|weights| {
                let tile = scratch.take::<S>(TILE);
                let w = weights.side::<S>([run.expert * e.inner + column, 0]).transposed();
                (tile, w)
            });
            for (tile, w) in tiles {
                let sizes = [rows, columns, e.model];
                self.multiplier.multiply(sizes, [x, w], (tile, columns), false, scratch.rest());
            }
            cpu.isa.run(Weigh {
                tiles: tiles.map(|(tile, _)| tile),
                columns,
                gates: &self.routes.gates(run)[first..first + rows],
                inside: self.inside,
                place: [row, column],
            });
        });
    }

    /// Multiplies it with `w_down`.
    fn multiply_down(&self, runs: &[Run]) {
        let (e, Multiplier { cpu, .. }) = (self.e, self.multiplier);
        let grid = Grid::new(runs.iter().map(|run| run.rows), e.model, cpu.threads());
        let cycles = self.multiplier.cycles(e, runs, 1);
        cpu.for_each(grid.tasks(), cycles, scratch::<S>(e)[0], |task, scratch: &mut Bump| {
            let (at, [first, rows], [column, columns]) = grid.tile(task);
            let (run, row) = (&runs[at], runs[at].row + first);
            let w = self.down.side::<S>([run.expert * e.model + column, 0]).transposed();
            let sides = [self.inside.side::<S>([row, 0]), w];
            let y = (self.y.numbers::<S>([row, column]), e.model);
            self.multiplier.multiply([rows, columns, e.inner], sides, y, false, scratch.rest());
        });
    }
}

/// Makes a tile of what is inside of an expert of its two products.
struct Weigh<'a, S> {
    /// Products with `w_gate` and with `w_up`; the first one is overwritten.
    tiles: [*mut S; 2],
    columns: usize,
    /// Of each row.
    gates: &'a [S],
    inside: Matrix,
    place: [usize; 2],
}

impl<S: Scalar> Job<S> for Weigh<'_, S> {
    #[inline(always)]
    fn run<V: Vector<Scalar = S>>(self) {
        let Weigh { tiles, columns, gates, inside, place: [first, column] } = self;
        let zero = S::ZERO;
        for (row, gate) in gates.iter().enumerate() {
            let [x, up] = tiles.map(|tile| tile.wrapping_add(row * columns));
            let share = V::splat(*gate);
            for i in (0..columns).step_by(V::LANES) {
                // SAFETY: tiles hold a row of columns for each gate.
                unsafe {
                    let gate: V = load_up_to(x, i, columns, zero);
                    let open = gate.mul(S::sigmoid(gate));
                    let weighted = open.mul(load_up_to(up, i, columns, zero)).mul(share);
                    store_up_to(weighted, x, i, columns);
                }
            }
            let target: Operand = inside.at::<S>([first + row, column]);
            V::call(Round { source: x.cast_const(), target, len: columns });
        }
    }
}
