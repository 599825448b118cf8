//! A product as parts for tasks.

use std::ops::Range;

use super::Cpu;
use super::block::{Patch, Sink};
use super::formats::{Format, Operand};
use super::frame::framed;
use super::pairs::{self, PairedPart};
use super::plane::Planes;
use super::rounded::Rounded;
use super::scratch::Bump;
use super::tiles::{
    Epilogue, Loop, Nest, Part, Then, apart_bytes, block_of, merge, points, scratch_bytes,
};
use super::vector::{Pairs, Scalar};
use super::view::{Shared, View, ViewMut};
use crate::kernel::{Pointwise, Product, ProductPart, Products, Source};

/// Rows of a part are a multiple of these: whole register tiles of 8 or 12 rows.
const ROWS: usize = 24;
/// The same where tiles are of 32 rows.
const ROWS_OF_PAIRS: usize = 32;
/// Columns likewise: whole tiles of 32 or 48 columns of f32, or of 32 of pairs.
const COLUMNS: usize = 96;

/// Numbers of f32 in the widest vector: rows that are worth storing by vectors.
const VECTOR: usize = 16;

/// A product with its loops merged and its operands in the order that suits the tiles.
#[derive(Debug)]
pub(super) struct Plan {
    batch: Vec<Loop>,
    pub(super) nest: Nest,
    /// Whether `a` and `b` changed places.
    pub(super) swapped: bool,
    /// How `a`, `b` and `c` of the description are stored.
    formats: [Format; 3],
    /// Whether it is of pairs, where the machine has an instruction for them.
    pairs: bool,
}

/// Bytes of scratch per thread.
pub(super) fn scratch<S>(p: &Product) -> usize {
    let [_, m, n, k] = p.sizes();
    let borders = p.borders.len();
    let apart = match Format::of(p.stored.c) {
        Format::Own => 0,
        Format::BF16 | Format::F16 | Format::F8E4M3 | Format::F8E5M2 | Format::Tf32 => {
            apart_bytes::<S>(m, n).max(apart_bytes::<S>(n, m))
        }
    };
    let planes = Planes::new(p, block_of([n, k])).map_or(0, |p| p.bytes::<S>());
    let panels = scratch_bytes::<S>([m, n, k], borders).max(scratch_bytes::<S>([n, m, k], borders));
    let bytes = panels + apart + planes;
    if !pairs::fits(p) {
        return bytes;
    }
    bytes.max(pairs::scratch_bytes([m, n, k])).max(pairs::scratch_bytes([n, m, k]))
}

/// Chooses which side of `c` runs along vectors. Multiplication commutes, so bits do not change.
pub(super) fn plan(p: &Product) -> Plan {
    let m = merge(p.m.iter().map(|l| Loop { size: l.size, strides: [l.a, 0, l.c] }));
    let n = merge(p.n.iter().map(|l| Loop { size: l.size, strides: [0, l.b, l.c] }));
    let k = merge(p.k.iter().map(|l| Loop { size: l.size, strides: [l.a, l.b, 0] }));
    let batch = merge(p.batch.iter().map(|l| Loop { size: l.size, strides: [l.a, l.b, l.c] }));
    let contiguous = |loops: &[Loop]| loops.last().is_some_and(|l| l.strides[2] == 1);
    let (rows, columns) = (points(&m), points(&n));
    let strided = contiguous(&m) && !contiguous(&n);
    let swapped = rows > columns && columns < 8 || strided && rows >= VECTOR.min(columns);
    // Columns are packed with their borders, rows are not.
    let swapped = swapped && p.borders.is_empty();
    let swap = |loops: Vec<Loop>| -> Vec<Loop> {
        let swap_one =
            |l: &Loop| Loop { strides: [l.strides[1], l.strides[0], l.strides[2]], ..*l };
        loops.iter().map(swap_one).collect()
    };
    let accumulate = p.accumulate;
    let [of_a, of_b] = [p.stored.a, p.stored.b].map(|dtype| Format::of_operand(dtype, p.operands));
    let formats = [of_a, of_b, Format::of(p.stored.c)];
    let pairs = pairs::fits(p);
    if swapped {
        let (frames, planes) = (Vec::new(), None);
        let nest = Nest { m: swap(n), n: swap(m), k: swap(k), accumulate, frames, planes };
        Plan { batch: swap(batch), nest, swapped, formats, pairs }
    } else {
        let planes = Planes::new(p, block_of([points(&n), points(&k)]));
        let frames = if planes.is_some() { Vec::new() } else { framed(p) };
        let nest = Nest { m, n, k, accumulate, frames, planes };
        Plan { batch, nest, swapped, formats, pairs }
    }
}

impl Plan {
    /// The offsets in the operands and in the result of one entry of the batch.
    pub(super) fn offsets(&self, entry: usize) -> [usize; 3] {
        [0, 1, 2].map(|operand| offset(&self.batch, operand, entry))
    }

    /// What is added to columns of the description as what is added to rows and to columns here.
    fn sides<T>(&self, of_columns: Option<T>) -> [Option<T>; 2] {
        if self.swapped { [of_columns, None] } else { [None, of_columns] }
    }
}

/// Several products, ready to be launched.
#[derive(Debug)]
pub(super) struct Plans {
    plans: Vec<Plan>,
    teams: Vec<Range<usize>>,
    /// For each product, the program on its result and where its inputs come from.
    patches: Vec<Option<(Patch, Vec<Source>)>>,
}

impl Plans {
    pub(super) fn new(p: &Products) -> Plans {
        let patch = |part: &ProductPart| {
            let Pointwise { rows, inputs } = part.then.as_ref()?;
            Some((Patch::new(rows, part.in_place), inputs.clone()))
        };
        Plans {
            plans: p.parts.iter().map(|part| plan(&part.product)).collect(),
            teams: p.teams(),
            patches: p.parts.iter().map(patch).collect(),
        }
    }
}

/// Bytes of scratch per thread of several products.
pub(super) fn scratch_of_all<S>(p: &Products) -> usize {
    let of_part = |part: &ProductPart| {
        let then = part.then.as_ref().map_or(0, |then| Patch::scratch::<S>(&then.rows));
        scratch::<S>(&part.product) + then
    };
    p.parts.iter().map(of_part).max().unwrap_or(0)
}

/// How a product is cut into tasks.
#[derive(Clone, Copy)]
pub(super) struct Grid {
    m: usize,
    n: usize,
    batch: usize,
    row_parts: usize,
    column_parts: usize,
    /// What rows of a part are a multiple of.
    row_tile: usize,
}

impl Grid {
    pub(super) fn new(plan: &Plan, threads: usize) -> Grid {
        let (m, n) = (points(&plan.nest.m), points(&plan.nest.n));
        let batch = points(&plan.batch);
        let (row_parts, column_parts) = cut(m, n, threads.div_ceil(batch.max(1)));
        let row_tile = if plan.pairs { ROWS_OF_PAIRS } else { ROWS };
        Grid { m, n, batch, row_parts, column_parts, row_tile }
    }

    pub(super) fn tasks(&self) -> usize {
        self.batch * self.row_parts * self.column_parts
    }

    /// The entry of the batch, the rows and the columns of a task.
    pub(super) fn part(&self, task: usize) -> (usize, [usize; 2], [usize; 2]) {
        let Grid { m, n, row_parts, column_parts, row_tile, .. } = *self;
        let (entry, part) = (task / (row_parts * column_parts), task % (row_parts * column_parts));
        let (row_part, column_part) = (part / column_parts, part % column_parts);
        let rows = piece(m, row_parts, row_part, row_tile);
        (entry, rows, piece(n, column_parts, column_part, COLUMNS))
    }
}

/// A product and where its operands and its result are.
struct Placed<'a, S> {
    plan: &'a Plan,
    a: Operand,
    b: Operand,
    c: *mut S,
    epilogue: Epilogue<S>,
    rounded: Option<Rounded>,
    then: Option<Then<'a, S>>,
}

impl<'a, S: Scalar> Placed<'a, S> {
    fn new(plan: &'a Plan, a: &View, b: &View, c: &ViewMut) -> Placed<'a, S> {
        let [of_a, of_b, of_c] = plan.formats;
        let (a, b) = (Operand::new(a.start(), of_a), Operand::new(b.start(), of_b));
        let (a, b) = if plan.swapped { (b, a) } else { (a, b) };
        let rounded = (of_c != Format::Own).then(|| {
            let c = Operand::new(c.start::<u8>(), of_c);
            Rounded { c, by_row: None, by_column: None, addend: None }
        });
        Placed { plan, a, b, c: c.start::<S>(), epilogue: Epilogue::none(), rounded, then: None }
    }

    /// The same, and what is added to the result.
    fn adding(self, bias: Option<&View>, addend: Option<&View>) -> Placed<'a, S> {
        if let Some(Rounded { c, .. }) = self.rounded {
            let [bias, addend] =
                [bias, addend].map(|view| Some(Operand::new(view?.start(), c.format)));
            let [by_row, by_column] = self.plan.sides(bias);
            return Placed { rounded: Some(Rounded { c, by_row, by_column, addend }), ..self };
        }
        let [bias, addend] = [bias, addend].map(|view| view.map(View::start::<S>));
        let [by_row, by_column] = self.plan.sides(bias);
        Placed { epilogue: Epilogue { by_row, by_column, addend }, ..self }
    }

    fn run(&self, cpu: &Cpu, grid: Grid, task: usize, scratch: &mut Bump) {
        let (entry, rows, columns) = grid.part(task);
        let [of_a, of_b, of_c] = self.plan.offsets(entry);
        let part = Part {
            nest: &self.plan.nest,
            rows,
            columns,
            a: self.a.moved::<S>(of_a),
            b: self.b.moved::<S>(of_b),
            c: self.c.wrapping_add(of_c),
            epilogue: self.epilogue.moved(of_c),
            rounded: self.rounded.map(|rounded| rounded.moved::<S>(of_c)),
            then: self.then,
            scratch,
        };
        match cpu.isa.pairs().filter(|_| self.plan.pairs) {
            Some(by) => cpu.isa.run_pairs(PairedPart { part, by }),
            None => cpu.isa.run(part),
        }
    }
}

/// Cycles of a product.
fn cycles(cpu: &Cpu, p: &Product) -> u64 {
    let per_cycle = match cpu.isa.pairs().filter(|_| pairs::fits(p)) {
        Some(Pairs::Tiles) => 512,
        Some(Pairs::Dot) => 64,
        None => 32,
    };
    p.flops().0 / per_cycle
}

/// Runs a product of `S`.
pub(super) fn execute<S: Scalar>(
    cpu: &Cpu,
    p: &Product,
    plan: &Plan,
    inputs: &[View],
    outputs: &[ViewMut],
) {
    let grid = Grid::new(plan, cpu.threads());
    cpu.for_each(grid.tasks(), cycles(cpu, p), scratch::<S>(p), |task, scratch: &mut Bump| {
        let placed = Placed::<S>::new(plan, &inputs[0], &inputs[1], &outputs[0]);
        placed.run(cpu, grid, task, scratch);
    });
}

/// The arguments of a program on a result.
struct Arguments<S> {
    inputs: Vec<Shared<u8>>,
    sinks: Vec<Sink<S>>,
}

/// For each product, the arguments of the program on its result.
fn arguments<S>(
    p: &Products,
    plans: &Plans,
    inputs: &[View],
    outputs: &[ViewMut],
) -> Vec<Arguments<S>> {
    let (results, mut then) = outputs.split_at(plans.plans.len());
    let mut of_part = |(at, patch): (usize, &Option<(Patch, Vec<Source>)>)| {
        let Some((_, sources)) = patch else {
            return Arguments { inputs: Vec::new(), sinks: Vec::new() };
        };
        let (part, own) = (&p.parts[at], results.get(at));
        let beside;
        (beside, then) = then.split_at(part.beside().len());
        let start = |source: &Source| match *source {
            Source::Operand(at) => inputs[at].start::<u8>().cast_mut(),
            Source::Result(at) => results[at].start::<u8>(),
        };
        let inputs = sources.iter().map(|source| Shared::new(start(source))).collect();
        let own = own.filter(|_| part.in_place).into_iter();
        Arguments { inputs, sinks: Patch::sinks(own.chain(beside)) }
    };
    plans.patches.iter().enumerate().map(&mut of_part).collect()
}

/// Runs several products of `S`, whose tasks are those of all, one team after the other.
pub(super) fn execute_all<S: Scalar>(
    cpu: &Cpu,
    p: &Products,
    plans: &Plans,
    inputs: &[View],
    outputs: &[ViewMut],
) {
    let grid = |team: &Range<usize>| Grid::new(&plans.plans[team.start], cpu.threads());
    let tasks = plans.teams.iter().map(|team| grid(team).tasks()).sum();
    let cost = p.parts.iter().map(|part| cycles(cpu, &part.product)).sum();
    let arguments = arguments::<S>(p, plans, inputs, outputs);
    let run = |at: usize, grid: Grid, task: usize, scratch: &mut Bump| {
        let (part, plan) = (&p.parts[at], &plans.plans[at]);
        let placed = Placed::<S>::new(plan, &inputs[part.a], &inputs[part.b], &outputs[at]);
        let input = |at: usize| &inputs[at];
        let mut placed = placed.adding(part.bias.map(input), part.addend.map(input));
        placed.then = plans.patches[at].as_ref().map(|(patch, _)| {
            let Arguments { inputs, sinks } = &arguments[at];
            Then { patch, inputs, sinks, swapped: plan.swapped }
        });
        placed.run(cpu, grid, task, scratch);
    };
    cpu.for_each(tasks, cost, scratch_of_all::<S>(p), |task, scratch: &mut Bump| {
        let mut rest = task;
        for team in &plans.teams {
            let grid = grid(team);
            if rest < grid.tasks() {
                team.clone().for_each(|at| run(at, grid, rest, &mut scratch.rest()));
                return;
            }
            rest -= grid.tasks();
        }
    });
}

/// The offset in an operand of one entry of the batch.
fn offset(batch: &[Loop], operand: usize, entry: usize) -> usize {
    let mut rest = entry;
    let mut offset = 0;
    for l in batch.iter().rev() {
        offset += rest % l.size * l.strides[operand];
        rest /= l.size;
    }
    offset
}

/// Cuts rows and columns into about `parts` parts, the longer side first.
fn cut(m: usize, n: usize, parts: usize) -> (usize, usize) {
    let (row_tiles, column_tiles) = (m.div_ceil(ROWS).max(1), n.div_ceil(COLUMNS).max(1));
    if n >= m {
        let columns = parts.min(column_tiles);
        ((parts / columns).clamp(1, row_tiles), columns)
    } else {
        let rows = parts.min(row_tiles);
        (rows, (parts / rows).clamp(1, column_tiles))
    }
}

/// Points `[from, to)` of piece `index` of `count`, in multiples of `tile`.
fn piece(size: usize, count: usize, index: usize, tile: usize) -> [usize; 2] {
    let tiles = size.div_ceil(tile);
    [index, index + 1].map(|i| (tiles * i / count * tile).min(size))
}
