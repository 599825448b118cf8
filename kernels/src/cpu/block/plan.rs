//! How a block program is executed: its blocks, its phases and the place of each value.
//!
//! Lanes of a block are whole rows where rows are short, so that a reduction is done when its
//! instruction is. Longer rows are cut: the instructions that a reduction needs run over all pieces
//! of the row first, and again for whoever comes after it; computing twice is cheaper than a trip
//! to memory. Everything here depends on the kernel alone.

use std::borrow::Cow;

use super::lanes::Kind;
use crate::rows::{Access, Digit, Instr, Output, Rows};

/// Lanes of a block that suit the first-level cache. Measured: 768 to 3072 are equally fast, fewer
/// spend their time in dispatch.
const BLOCK_LANES: usize = 1536;
/// Longest row that is not cut although it is reduced.
const WHOLE_ROW_LANES: usize = 8192;
/// Points below which a task is not worth its dispatch.
const TASK_POINTS: usize = 16_384;
/// Most tasks of a launch: bounds the partial sums.
const TASKS_MAX: usize = 32;

/// Where a value lives while its block runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// Nobody reads it.
    Nowhere,
    /// A register of lanes.
    Lanes(usize),
    /// A register of one number per row.
    Rows(usize),
    /// The input's own memory, if the block is contiguous there, else the register.
    Input(usize),
    /// The memory of a dense output.
    Output(usize),
}

/// One sweep over the pieces of a row.
#[derive(Clone, Debug, Default)]
pub(super) struct Phase {
    /// Instructions on row scalars that run before the pieces.
    pub(super) before: Vec<usize>,
    /// Instructions that run on each piece.
    pub(super) each: Vec<usize>,
}

/// A block program ready to run.
#[derive(Clone, Debug)]
pub(super) struct Plan<'a> {
    pub(super) rows: Cow<'a, Rows>,
    pub(super) kinds: Vec<Kind>,
    pub(super) places: Vec<Place>,
    /// Instructions that run once per task: they depend on neither row nor piece.
    pub(super) once: Vec<usize>,
    pub(super) phases: Vec<Phase>,
    /// Rows of a block.
    pub(super) block_rows: usize,
    /// Columns of a block.
    pub(super) block_cols: usize,
    pub(super) lane_registers: usize,
    pub(super) row_registers: usize,
    /// Tasks over rows, and over columns.
    pub(super) tasks: [usize; 2],
}

impl<'a> Plan<'a> {
    /// Plans a kernel. `aliased[output]` says whether the output shares memory with another
    /// argument, and must therefore be written last.
    pub(super) fn new(rows: &'a Rows, aliased: &[bool]) -> Plan<'a> {
        check(rows);
        let rows = flatten(rows);
        let kinds = kinds(&rows);
        let reduces = rows.instrs.iter().any(|i| matches!(i, Instr::Reduce { .. }));
        let whole = rows.cols <= if reduces { WHOLE_ROW_LANES } else { BLOCK_LANES };
        let (block_rows, block_cols) = if whole {
            ((BLOCK_LANES / rows.cols.max(1)).clamp(1, rows.rows.max(1)), rows.cols)
        } else {
            (1, BLOCK_LANES)
        };
        let needed = needed(&rows);
        let once = once(&rows, &kinds, &needed, whole && block_rows > 1);
        let phases = phases(&rows, &kinds, &needed, &once, whole);
        let mut plan = Plan {
            kinds,
            places: Vec::new(),
            once,
            phases,
            block_rows,
            block_cols,
            lane_registers: 0,
            row_registers: 0,
            tasks: tasks(&rows, reduces),
            rows,
        };
        plan.place(aliased);
        plan
    }

    /// Plans a kernel that reduces nothing for any rectangle of its points: blocks are pieces of
    /// one row. `aliased` is as for [`Plan::new`].
    pub(super) fn of_patches(rows: &'a Rows, aliased: &[bool]) -> Plan<'a> {
        check(rows);
        let (kinds, needed) = (kinds(rows), needed(rows));
        let once = once(rows, &kinds, &needed, false);
        let phases = phases(rows, &kinds, &needed, &once, false);
        let mut plan = Plan {
            kinds,
            places: Vec::new(),
            once,
            phases,
            block_rows: 1,
            block_cols: rows.cols.clamp(1, BLOCK_LANES),
            lane_registers: 0,
            row_registers: 0,
            tasks: [1, 1],
            rows: Cow::Borrowed(rows),
        };
        plan.place(aliased);
        plan
    }

    /// The same plan, with the kernel in it.
    pub(super) fn into_owned(self) -> Plan<'static> {
        Plan { rows: Cow::Owned(self.rows.into_owned()), ..self }
    }

    /// Distance of registers of lanes: a whole number of cache lines, but not a power of two, as
    /// numbers 4 KiB apart would compete for the same sets of the cache.
    pub(super) fn lane_stride(&self) -> usize {
        (self.block_rows * self.block_cols).next_multiple_of(16) + 16
    }

    /// Distance of registers of rows.
    pub(super) fn row_stride(&self) -> usize {
        self.block_rows.next_multiple_of(16)
    }

    /// Assigns registers: a scan over each phase that frees a register after its last use.
    fn place(&mut self, aliased: &[bool]) {
        let count = self.rows.instrs.len();
        self.places = vec![Place::Nowhere; count];
        for (value, kind) in self.kinds.iter().enumerate() {
            if *kind != Kind::Lanes {
                self.places[value] = Place::Rows(self.row_registers);
                self.row_registers += 1;
            }
        }
        let mut permanent = 0;
        for &value in &self.once {
            if self.kinds[value] == Kind::Lanes {
                self.places[value] = Place::Lanes(permanent);
                permanent += 1;
            }
        }
        self.lane_registers = permanent;
        // A value that several phases compute has one place: registers of all phases are
        // distinct where they hold different values, and are chosen anew in each phase.
        let direct = self.direct(aliased);
        let in_place = aliased.contains(&true);
        let mut fixed: Vec<Option<usize>> = vec![None; count];
        for phase in 0..self.phases.len() {
            let last = self.last_uses(phase);
            let mut free: Vec<usize> = Vec::new();
            for step in 0..self.phases[phase].each.len() {
                let value = self.phases[phase].each[step];
                if self.kinds[value] == Kind::Lanes {
                    let register = fixed[value].or_else(|| free.pop()).unwrap_or_else(|| {
                        self.lane_registers += 1;
                        self.lane_registers - 1
                    });
                    free.retain(|&f| f != register);
                    fixed[value] = Some(register);
                    self.places[value] = match self.rows.instrs[value] {
                        // What is stored as it was loaded must survive the stores before it.
                        Instr::Load { .. } if in_place && self.is_stored(value) => {
                            Place::Lanes(register)
                        }
                        Instr::Load { .. } => Place::Input(register),
                        Instr::Const { .. }
                        | Instr::Index { .. }
                        | Instr::Unary { .. }
                        | Instr::Binary { .. }
                        | Instr::Select { .. }
                        | Instr::Reduce { .. }
                        | Instr::Random(_) => {
                            direct[value].map_or(Place::Lanes(register), Place::Output)
                        }
                    };
                }
                if self.phases.len() == 1 {
                    self.release(&last, step, value, &fixed, &mut free);
                }
            }
        }
    }

    fn is_stored(&self, value: usize) -> bool {
        self.rows.outputs.iter().any(|o| o.value() == value)
    }

    /// Frees the registers whose last reader was `step`. With several phases none is freed: a
    /// register then belongs to one value throughout.
    fn release(
        &self,
        last: &[usize],
        step: usize,
        value: usize,
        fixed: &[Option<usize>],
        free: &mut Vec<usize>,
    ) {
        let mut dying: Vec<usize> = self.rows.instrs[value].operands().collect();
        dying.push(value);
        dying.sort_unstable();
        dying.dedup();
        for operand in dying {
            let is_lanes = self.kinds[operand] == Kind::Lanes && !self.once.contains(&operand);
            if let (true, Some(register)) = (is_lanes && last[operand] == step, fixed[operand]) {
                free.push(register);
            }
        }
    }

    /// For each value, the step of the phase after which nobody reads it.
    fn last_uses(&self, phase: usize) -> Vec<usize> {
        let mut last = vec![0; self.rows.instrs.len()];
        for (step, &value) in self.phases[phase].each.iter().enumerate() {
            last[value] = last[value].max(step);
            for operand in self.rows.instrs[value].operands() {
                last[operand] = step;
            }
        }
        if phase + 1 == self.phases.len() {
            for output in &self.rows.outputs {
                last[output.value()] = usize::MAX;
            }
        }
        last
    }

    /// Values that can be computed right into the memory of an output.
    fn direct(&self, aliased: &[bool]) -> Vec<Option<usize>> {
        let mut direct = vec![None; self.rows.instrs.len()];
        for (index, output) in self.rows.outputs.iter().enumerate() {
            if let Output::Store { value, access, dtype, accumulate: false } = output {
                let dense = is_dense(access, self.rows.rows, self.rows.cols);
                let lanes = self.kinds[*value] == Kind::Lanes && !self.once.contains(value);
                if dense && lanes && *dtype == self.rows.dtype && !aliased[index] {
                    direct[*value] = Some(index);
                }
            }
        }
        direct
    }
}

/// What a kernel's types cannot say.
fn check(rows: &Rows) {
    for (value, instr) in rows.instrs.iter().enumerate() {
        assert!(instr.operands().all(|o| o < value), "operands are earlier values");
    }
    let vectors = rows.vectors();
    for output in &rows.outputs {
        let is_vector = vectors[output.value()];
        match output {
            Output::Store { access, .. } => {
                assert!(!is_vector || access.col_stride != 0, "a vector is stored over columns");
            }
            Output::ColSum { .. } => assert!(is_vector, "column sums are of vectors"),
            Output::TotalSum { .. } => {}
        }
    }
}

/// Whether an access is that of a row-major `[rows, cols]` from some offset on.
pub(super) fn is_dense(access: &Access, rows: usize, cols: usize) -> bool {
    let by_rows = match access.row[..] {
        [Digit { div: 1, modulus, stride }] => modulus >= rows && stride == cols,
        _ => false,
    };
    access.col_stride == 1 && (by_rows || rows <= 1 && access.row.is_empty())
}

/// Whether digits enumerate a row-major `[rows, cols]`.
fn enumerate(row: &[Digit], col: &[Digit], rows: usize, cols: usize) -> bool {
    let row =
        matches!(*row, [Digit { div: 1, modulus, stride }] if modulus >= rows && stride == cols);
    row && matches!(*col, [Digit { div: 1, modulus, stride: 1 }] if modulus >= cols)
}

/// The same kernel as one long row, if it has no notion of rows.
fn flatten(rows: &Rows) -> Cow<'_, Rows> {
    let is_flat = |access: &Access| {
        let constant = access.col_stride == 0 && access.row.is_empty();
        constant || is_dense(access, rows.rows, rows.cols)
    };
    let instrs = rows.instrs.iter().all(|instr| match instr {
        Instr::Load { .. } | Instr::Const { .. } => true,
        Instr::Unary { .. } | Instr::Binary { .. } | Instr::Select { .. } => true,
        Instr::Index { row, col_stride, .. } => row.is_empty() && *col_stride == 0,
        Instr::Reduce { .. } => false,
        Instr::Random(d) => enumerate(&d.row, &d.col, rows.rows, rows.cols),
    });
    let vectors = rows.vectors();
    let outputs = rows.outputs.iter().all(|output| match output {
        Output::Store { access, .. } => is_dense(access, rows.rows, rows.cols),
        Output::ColSum { .. } => false,
        Output::TotalSum { value, .. } => vectors[*value],
    });
    if rows.rows <= 1 || !instrs || !outputs || !rows.inputs.iter().all(|i| is_flat(&i.access)) {
        return Cow::Borrowed(rows);
    }
    let points = rows.rows * rows.cols;
    let mut flat = Rows { rows: 1, cols: points, ..rows.clone() };
    let whole = Digit { div: 1, modulus: points, stride: 1 };
    for instr in &mut flat.instrs {
        if let Instr::Random(draw) = instr {
            (draw.row, draw.col) = (Vec::new(), vec![whole]);
        }
    }
    Cow::Owned(flat)
}

fn kinds(rows: &Rows) -> Vec<Kind> {
    let mut kinds: Vec<Kind> = Vec::with_capacity(rows.instrs.len());
    let vectors = rows.vectors();
    for (value, instr) in rows.instrs.iter().enumerate() {
        let depends_on_row = match instr {
            Instr::Load { input } => !rows.inputs[*input].access.row.is_empty(),
            Instr::Index { row, .. } => !row.is_empty(),
            Instr::Random(draw) => !draw.row.is_empty(),
            Instr::Const { .. } => false,
            // A row that is reduced from uniform numbers is left in its row.
            Instr::Reduce { .. } => true,
            Instr::Unary { .. } | Instr::Binary { .. } | Instr::Select { .. } => {
                instr.operands().any(|o| kinds[o] == Kind::PerRow)
            }
        };
        kinds.push(match (vectors[value], depends_on_row) {
            (true, _) => Kind::Lanes,
            (false, true) => Kind::PerRow,
            (false, false) => Kind::Uniform,
        });
    }
    kinds
}

/// Values that an output depends on.
fn needed(rows: &Rows) -> Vec<bool> {
    let mut needed = vec![false; rows.instrs.len()];
    for output in &rows.outputs {
        needed[output.value()] = true;
    }
    for value in (0..rows.instrs.len()).rev() {
        if needed[value] {
            rows.instrs[value].operands().for_each(|o| needed[o] = true);
        }
    }
    needed
}

/// Uniform values, and loads per column where blocks repeat all columns.
fn once(rows: &Rows, kinds: &[Kind], needed: &[bool], repeats: bool) -> Vec<usize> {
    let per_column = |instr: &Instr| {
        let Instr::Load { input } = instr else { return false };
        rows.inputs[*input].access.row.is_empty()
    };
    let is_once = |value: usize| {
        kinds[value] == Kind::Uniform
            || repeats && kinds[value] == Kind::Lanes && per_column(&rows.instrs[value])
    };
    (0..rows.instrs.len()).filter(|&v| needed[v] && is_once(v)).collect()
}

/// Sweeps over a row, see [`Phase`].
fn phases(rows: &Rows, kinds: &[Kind], needed: &[bool], once: &[usize], whole: bool) -> Vec<Phase> {
    let values = || (0..rows.instrs.len()).filter(|v| needed[*v] && !once.contains(v));
    if whole {
        return vec![Phase { before: Vec::new(), each: values().collect() }];
    }
    // The number of sweeps that must have ended before a value is known.
    let mut level = vec![0; rows.instrs.len()];
    for value in values() {
        let operands = rows.instrs[value].operands().map(|o| level[o]).max().unwrap_or(0);
        let reduces = usize::from(matches!(rows.instrs[value], Instr::Reduce { .. }));
        level[value] = operands + reduces;
    }
    let count = values().map(|v| level[v]).max().unwrap_or(0) + 1;
    let mut phases = vec![Phase::default(); count];
    for (index, phase) in phases.iter_mut().enumerate() {
        let mut wanted = vec![false; rows.instrs.len()];
        let is_reduce = |v: usize| matches!(rows.instrs[v], Instr::Reduce { .. });
        for value in values().filter(|&v| is_reduce(v) && level[v] == index + 1) {
            wanted[value] = true;
        }
        if index + 1 == count {
            rows.outputs.iter().for_each(|o| wanted[o.value()] = true);
        }
        let row_value = |v: usize| kinds[v] == Kind::PerRow && !is_reduce(v);
        phase.before = values().filter(|&v| row_value(v) && level[v] == index).collect();
        for value in (0..rows.instrs.len()).rev().filter(|v| !once.contains(v)) {
            let computed = kinds[value] == Kind::Lanes || is_reduce(value) && level[value] > index;
            if wanted[value] && computed {
                rows.instrs[value].operands().for_each(|o| wanted[o] = true);
                phase.each.push(value);
            }
        }
        phase.each.reverse();
    }
    phases
}

/// Cuts of rows and columns into tasks.
fn tasks(rows: &Rows, reduces: bool) -> [usize; 2] {
    let wanted = (rows.rows * rows.cols / TASK_POINTS).clamp(1, TASKS_MAX);
    let by_rows = wanted.min(rows.rows.max(1));
    let blocks = rows.cols.div_ceil(BLOCK_LANES).max(1);
    [by_rows, if reduces { 1 } else { (wanted / by_rows).clamp(1, blocks) }]
}
