//! Which bytes of its arguments a kernel reads and writes.

use std::collections::BTreeMap;
use std::ops::Range;

use ir::program::Instruction;
use ir::{DType, Program, Target};
use kernels::arguments::Argument;
use kernels::rows::{Access, Instr, Output, Rows};
use kernels::{Kernel, Product, ProductPart, Source, price};

/// More runs of bytes than this are taken for the range from the first to the last. Chosen: a
/// concatenation along the last dim of a batch of rows has one per row.
const RUNS_MAX: usize = 1 << 16;

/// Bytes of one argument.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Use {
    pub(super) runs: Vec<Range<u64>>,
    pub(super) dtype: DType,
    /// An output that is added to what is there.
    pub(super) adds: bool,
}

/// The bytes that a launch reads and writes, by argument.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Effects {
    pub(super) reads: Vec<Use>,
    pub(super) writes: Vec<Use>,
}

/// What all launches of programs read and write.
pub(super) struct AllEffects<'a> {
    /// By kernel and scalars.
    effects: BTreeMap<(usize, &'a [i64]), Effects>,
    /// By kernel, the bytes of its workspace; none where there is no such local.
    workspaces: BTreeMap<usize, u64>,
}

impl<'a> AllEffects<'a> {
    pub(super) fn of(
        programs: &'a [Program],
        kernels: &[Kernel],
        target: Option<Target>,
    ) -> AllEffects<'a> {
        let on_gpus = target.filter(|target| target.arch().is_some());
        let (mut effects, mut workspaces) = (BTreeMap::new(), BTreeMap::new());
        let routines = programs.iter().flat_map(|program| &program.routines);
        for instruction in routines.flat_map(|routine| &routine.instructions) {
            if let Instruction::Launch { kernel, scalars, .. } = instruction {
                let of = || self::effects(&kernels[*kernel].bind(scalars));
                effects.entry((*kernel, &scalars[..])).or_insert_with(of);
                let bytes = || price::workspace(&kernels[*kernel], on_gpus, 1).0;
                workspaces.entry(*kernel).or_insert_with(|| on_gpus.map_or(0, |_| bytes()));
            }
        }
        AllEffects { effects, workspaces }
    }

    /// The bytes of the local that a kernel is passed as its workspace.
    pub(super) fn workspace(&self, kernel: usize) -> u64 {
        self.workspaces.get(&kernel).copied().unwrap_or(0)
    }

    /// Those of one launch.
    pub(super) fn launch(&self, kernel: usize, scalars: &'a [i64]) -> &Effects {
        let found = self.effects.get(&(kernel, scalars));
        found.expect("these are effects of all launches of the programs")
    }
}

/// The effects of a kernel that is bound to the scalars of a launch, of products, fused loops and
/// copies exact up to [`RUNS_MAX`]; other reads are from the first element used to the last.
pub(super) fn effects(kernel: &Kernel) -> Effects {
    let inputs = kernel.inputs();
    let read = |(at, argument): (usize, &Argument)| {
        let size = argument.dtype.size();
        let elements = united(read(kernel, at, argument)).into_iter();
        let runs = elements.map(|r| r.start as u64 * size..r.end as u64 * size);
        Use { runs: runs.collect(), dtype: argument.dtype, adds: false }
    };
    let outputs = kernel.outputs();
    let write = |(at, argument): (usize, &Argument)| {
        let size = argument.dtype.size();
        let (elements, adds) = written(kernel, at, argument);
        let runs = elements.into_iter().map(|r| r.start as u64 * size..r.end as u64 * size);
        Use { runs: runs.collect(), dtype: argument.dtype, adds }
    };
    Effects {
        reads: inputs.iter().enumerate().map(read).collect(),
        writes: outputs.iter().enumerate().map(write).collect(),
    }
}

/// The elements of an input that are read.
fn read(kernel: &Kernel, at: usize, argument: &Argument) -> Vec<Range<usize>> {
    match kernel {
        Kernel::Product(p) => factor(p, at),
        Kernel::Products(p) => p.parts.iter().flat_map(|part| of_part(part, at)).collect(),
        Kernel::Rows(r) => loaded(r, at, argument),
        Kernel::Copy(c) => {
            let loops = c.loops.iter().map(|l| (l.size, l.source)).collect();
            runs(loops, c.source_offset.bound() as usize)
        }
        Kernel::Attention(_)
        | Kernel::AttentionBwd(_)
        | Kernel::Experts(_)
        | Kernel::ExpertsBwd(_)
        | Kernel::Gather(_)
        | Kernel::ScatterAdd(_)
        | Kernel::Replace(_)
        | Kernel::Lines(_)
        | Kernel::Rope(_)
        | Kernel::Place(_)
        | Kernel::Take(_)
        | Kernel::Fill(_) => std::iter::once(0..argument.len).collect(),
    }
}

/// The elements of `a`, of `b` or of scales, by number. Borders leave out some of what loops reach.
fn factor(p: &Product, at: usize) -> Vec<Range<usize>> {
    if at > 1 || at == 1 && !p.borders.is_empty() {
        let inputs = Kernel::Product(p.clone()).inputs();
        return std::iter::once(0..inputs[at].len).collect();
    }
    let strides = |a: usize, b: usize| if at == 0 { a } else { b };
    let mut loops: Vec<(usize, usize)> =
        p.batch.iter().map(|l| (l.size, strides(l.a, l.b))).collect();
    loops.extend(p.k.iter().map(|l| (l.size, strides(l.a, l.b))));
    match at {
        0 => loops.extend(p.m.iter().map(|l| (l.size, l.a))),
        _ => loops.extend(p.n.iter().map(|l| (l.size, l.b))),
    }
    runs(loops, 0)
}

/// The elements of an operand that one of several products reads, in any of its roles.
fn of_part(part: &ProductPart, operand: usize) -> Vec<Range<usize>> {
    let p = &part.product;
    let mut all = Vec::new();
    for (at, number) in part.factors().enumerate() {
        if number == operand {
            all.extend(factor(p, at));
        }
    }
    if part.bias == Some(operand) {
        all.push(0..p.sizes()[2]);
    }
    if part.addend == Some(operand) {
        all.extend(multiplied(p).0);
    }
    if let Some(then) = &part.then {
        let inputs = then.rows.inputs.iter().zip(&then.inputs);
        let here = inputs.filter(|(_, source)| **source == Source::Operand(operand));
        all.extend(here.flat_map(|(input, _)| accessed(&then.rows, &input.access)));
    }
    all
}

fn loaded(r: &Rows, at: usize, argument: &Argument) -> Vec<Range<usize>> {
    let is_key = |instr: &Instr| matches!(instr, Instr::Random(draw) if draw.key == at);
    match r.instrs.iter().any(is_key) {
        true => std::iter::once(0..argument.len).collect(),
        false => accessed(r, &r.inputs[at].access),
    }
}

fn accessed(r: &Rows, access: &Access) -> Vec<Range<usize>> {
    let mut loops = row_loops(access, r.rows);
    loops.push((r.cols, access.col_stride));
    runs(loops, access.offset)
}

/// Runs in order, those that meet as one.
fn united(mut runs: Vec<Range<usize>>) -> Vec<Range<usize>> {
    runs.retain(|run| !run.is_empty());
    runs.sort_by_key(|run| (run.start, run.end));
    let mut all: Vec<Range<usize>> = Vec::new();
    for run in runs {
        match all.last_mut() {
            Some(last) if run.start <= last.end => last.end = last.end.max(run.end),
            _ => all.push(run),
        }
    }
    all
}

/// The elements of an output that are written, and whether they are added to.
fn written(kernel: &Kernel, at: usize, argument: &Argument) -> (Vec<Range<usize>>, bool) {
    let whole = vec![0..argument.len];
    match kernel {
        Kernel::Product(p) => multiplied(p),
        Kernel::Products(p) => match p.parts.get(at) {
            Some(part) => multiplied(&part.product),
            None => {
                let beside = |part: &'_ ProductPart| -> Vec<_> {
                    let rows = part.then.as_ref().map(|then| &then.rows);
                    part.beside().iter().filter_map(|o| Some((rows?.clone(), o.clone()))).collect()
                };
                let mut outputs = p.parts.iter().flat_map(beside);
                let output = outputs.nth(at - p.parts.len());
                output.map_or((whole.clone(), false), |(rows, o)| stored(&rows, &o, whole))
            }
        },
        Kernel::Rows(r) => stored(r, &r.outputs[at], whole),
        Kernel::Attention(a) if at == 0 => {
            (heads([a.batch, a.queries, a.heads, a.dim], a.out), false)
        }
        Kernel::AttentionBwd(a) if at < 3 => {
            let dims = if at == 0 {
                [a.batch, a.queries, a.heads, a.dim]
            } else {
                [a.batch, a.keys, a.kv_heads, a.dim]
            };
            (heads(dims, [a.q, a.k, a.v][at]), false)
        }
        Kernel::Rope(r) => (heads([r.batch, r.seq, r.heads, r.dim], r.y), false),
        Kernel::Copy(c) => {
            let mut all =
                runs(c.loops.iter().map(|l| (l.size, l.target)).collect(), c.target_offset);
            all.insert(0, 0..c.zero_first);
            (all, false)
        }
        Kernel::ScatterAdd(g) => (whole, g.accumulate),
        Kernel::ExpertsBwd(e) if at >= 2 => (whole, e.accumulate[at - 2]),
        // Where the window stands is known at run time: the rest must have been there.
        Kernel::Place(_) | Kernel::Replace(_) => (whole, true),
        // The gradient of a bias is contiguous.
        Kernel::Attention(_)
        | Kernel::AttentionBwd(_)
        | Kernel::Experts(_)
        | Kernel::ExpertsBwd(_)
        | Kernel::Gather(_)
        | Kernel::Lines(_)
        | Kernel::Take(_)
        | Kernel::Fill(_) => (whole, false),
    }
}

fn multiplied(p: &Product) -> (Vec<Range<usize>>, bool) {
    let batch = p.batch.iter().map(|l| (l.size, l.c));
    let rows = p.m.iter().map(|l| (l.size, l.c));
    let loops = batch.chain(rows).chain(p.n.iter().map(|l| (l.size, l.c)));
    (runs(loops.collect(), 0), p.accumulate)
}

fn stored(r: &Rows, output: &Output, whole: Vec<Range<usize>>) -> (Vec<Range<usize>>, bool) {
    match output {
        Output::Store { value, access, accumulate, .. } => {
            let is_per_row = access.col_stride == 0 && !r.vectors()[*value];
            let cols = if is_per_row { r.cols.min(1) } else { r.cols };
            let mut loops = row_loops(access, r.rows);
            loops.push((cols, access.col_stride));
            (runs(loops, access.offset), *accumulate)
        }
        Output::ColSum { accumulate, .. } | Output::TotalSum { accumulate, .. } => {
            (whole, *accumulate)
        }
    }
}

fn row_loops(access: &Access, rows: usize) -> Vec<(usize, usize)> {
    access.row.iter().map(|d| (rows.div_ceil(d.div).min(d.modulus), d.stride)).collect()
}

fn heads(dims: [usize; 4], [b, s, h]: [usize; 3]) -> Vec<Range<usize>> {
    let [batch, length, heads, dim] = dims;
    runs(vec![(batch, b), (length, s), (heads, h), (dim, 1)], 0)
}

/// The runs of elements that a nest of (size, stride) loops reaches.
fn runs(mut loops: Vec<(usize, usize)>, offset: usize) -> Vec<Range<usize>> {
    if loops.iter().any(|(size, _)| *size == 0) {
        return Vec::new();
    }
    loops.retain(|(size, stride)| *size > 1 && *stride > 0);
    loops.sort_by_key(|(_, stride)| *stride);
    let mut run = 1;
    let mut outer = Vec::new();
    for (size, stride) in loops {
        if outer.is_empty() && stride == run {
            run *= size;
        } else {
            outer.push((size, stride));
        }
    }
    let count = outer.iter().try_fold(1_usize, |n, (size, _)| n.checked_mul(*size));
    if count.is_none_or(|count| count > RUNS_MAX) {
        let reach: usize = outer.iter().map(|(size, stride)| (size - 1) * stride).sum();
        return std::iter::once(offset..offset + reach + run).collect();
    }
    let mut starts = vec![offset];
    for (size, stride) in outer {
        starts = (0..size).flat_map(|i| starts.iter().map(move |s| s + i * stride)).collect();
    }
    starts.into_iter().map(|start| start..start + run).collect()
}

#[cfg(test)]
mod tests;
