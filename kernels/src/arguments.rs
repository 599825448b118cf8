//! Which buffers a kernel wants, and how long they must be.

use ir::DType;

use crate::kernel::{
    Attention, Copy, Experts, Gather, Kernel, Line, Lines, Positions, Product, ProductPart,
    Products, Rope, Scales, Source, Window,
};
use crate::rows::{Access, Instr, Output, Rows};

/// One argument of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Argument {
    /// Type of its elements.
    pub dtype: DType,
    /// Elements from its start to the last one used.
    pub len: usize,
}

impl Argument {
    /// Bytes from its start to the last element used.
    pub fn bytes(&self) -> usize {
        self.len * self.dtype.size() as usize
    }
}

impl Kernel {
    /// The inputs of the launch, in order.
    pub fn inputs(&self) -> Vec<Argument> {
        match self {
            Kernel::Product(p) => product_inputs(p),
            Kernel::Rows(r) => rows_inputs(r),
            Kernel::Attention(a) => attention_inputs(a),
            Kernel::AttentionBwd(a) => attention_bwd_inputs(a),
            Kernel::Experts(e) => experts_inputs(e).to_vec(),
            Kernel::ExpertsBwd(e) => {
                let mut inputs = experts_inputs(e).to_vec();
                inputs.push(inputs[0]);
                inputs
            }
            Kernel::Gather(g) => vec![table(g), ids(g)],
            Kernel::ScatterAdd(g) | Kernel::Replace(g) => vec![ids(g), looked_up(g)],
            Kernel::Lines(l) => vec![lines(l, l.extent, l.dtype)],
            Kernel::Rope(r) => rope_inputs(r),
            Kernel::Copy(c) => vec![copy_source(c)],
            Kernel::Place(w) => vec![window(w, w.len), positions(w.positions)],
            Kernel::Take(w) => vec![window(w, w.capacity), positions(w.positions)],
            Kernel::Fill(_) => Vec::new(),
            Kernel::Products(p) => products_inputs(p),
        }
    }

    /// Pairs of an input and an output that may be one buffer: each point is read before it is
    /// written, and by nothing else.
    pub fn in_place(&self) -> Vec<(usize, usize)> {
        match self {
            Kernel::Rows(r) => {
                let mut pairs = Vec::new();
                for (i, input) in r.inputs.iter().enumerate() {
                    for (o, output) in r.outputs.iter().enumerate() {
                        // Keys of draws are read for every point.
                        let is_key =
                            |instr: &Instr| matches!(instr, Instr::Random(d) if d.key == i);
                        if let Output::Store { access, dtype, .. } = output
                            && !r.instrs.iter().any(is_key)
                            && same_points(access, &input.access, r)
                            && dtype.size() == input.dtype.size()
                        {
                            pairs.push((i, o));
                        }
                    }
                }
                pairs
            }
            Kernel::Rope(r) if r.x == r.y => vec![(0, 0)],
            Kernel::Rope(_)
            | Kernel::Product(_)
            | Kernel::Products(_)
            | Kernel::Attention(_)
            | Kernel::AttentionBwd(_)
            | Kernel::Experts(_)
            | Kernel::ExpertsBwd(_)
            | Kernel::Gather(_)
            | Kernel::ScatterAdd(_)
            | Kernel::Replace(_)
            | Kernel::Lines(_)
            | Kernel::Copy(_)
            | Kernel::Place(_)
            | Kernel::Take(_)
            | Kernel::Fill(_) => Vec::new(),
        }
    }

    /// The outputs of the launch, in order.
    pub fn outputs(&self) -> Vec<Argument> {
        match self {
            Kernel::Product(p) => vec![product_output(p)],
            Kernel::Rows(r) => rows_outputs(r),
            Kernel::Attention(a) if a.position => vec![queries(a, a.out)],
            Kernel::Attention(a) => vec![queries(a, a.out), lse(a)],
            Kernel::AttentionBwd(a) => {
                let mut gradients = vec![queries(a, a.q), keys(a, a.k), keys(a, a.v)];
                gradients.extend(bias(a).filter(|_| a.bias_grad));
                gradients
            }
            Kernel::Experts(e) => vec![experts_inputs(e)[0]],
            Kernel::ExpertsBwd(e) => {
                let [x, gates, weights @ ..] = experts_inputs(e);
                let sums = |of: Argument| Argument { dtype: of.dtype.accumulation(), ..of };
                [x, gates].into_iter().chain(weights.map(sums)).collect()
            }
            Kernel::Gather(g) => vec![looked_up(g)],
            Kernel::ScatterAdd(g) | Kernel::Replace(g) => vec![table(g)],
            Kernel::Lines(l) => vec![lines_result(l)],
            Kernel::Rope(r) => vec![rope_tensor(r, r.y)],
            Kernel::Copy(c) => vec![copy_target(c)],
            Kernel::Place(w) => vec![window(w, w.capacity)],
            Kernel::Take(w) => vec![window(w, w.len)],
            Kernel::Fill(f) => vec![Argument { dtype: f.dtype, len: f.len }],
            Kernel::Products(p) => {
                let results = p.parts.iter().map(|part| product_output(&part.product));
                let then = p.parts.iter().flat_map(|part| {
                    let outputs = part.then.iter().flat_map(|then| rows_outputs(&then.rows));
                    outputs.skip(usize::from(part.in_place))
                });
                results.chain(then).collect()
            }
        }
    }
}

/// Rows up to this are computed as a whole where they are reduced. Chosen: no kernel cuts them.
const WHOLE_ROW: usize = 1024;

/// Whether two accesses use the same element for each point, and no other point does: what is the
/// same in all columns is read for each of them, which may be after one was written. Where short
/// rows are reduced, all of a row is read before anything of it is written.
fn same_points(a: &Access, b: &Access, r: &Rows) -> bool {
    let moving = |access: &Access| {
        let mut loops: Vec<(usize, usize, usize)> = access
            .row
            .iter()
            .map(|d| (d.div, rows_of(d.div, d.modulus, r.rows), d.stride))
            .filter(|(_, size, stride)| *size > 1 && *stride > 0)
            .collect();
        loops.sort_unstable();
        loops
    };
    let reduces = r.instrs.iter().any(|instr| matches!(instr, Instr::Reduce { .. }));
    let is_whole = reduces && r.cols <= WHOLE_ROW && !has_sums(r);
    let columns = r.cols <= 1 || a.col_stride == b.col_stride && (a.col_stride > 0 || is_whole);
    a.offset == b.offset && moving(a) == moving(b) && columns
}

/// Whether a program sums over several rows.
fn has_sums(r: &Rows) -> bool {
    r.outputs.iter().any(|output| !matches!(output, Output::Store { .. }))
}

fn rows_of(div: usize, modulus: usize, rows: usize) -> usize {
    rows.div_ceil(div).min(modulus)
}

/// Positions that are known at run time.
fn positions(len: usize) -> Argument {
    Argument { dtype: DType::I32, len }
}

/// The key of a random draw.
const KEY: Argument = Argument { dtype: DType::U32, len: 4 };

/// One more than the largest index of a nest of (size, stride) loops, zero if it is empty.
fn extent(loops: impl Iterator<Item = (usize, usize)>) -> usize {
    let mut last = 0;
    for (size, stride) in loops {
        if size == 0 {
            return 0;
        }
        last += (size - 1) * stride;
    }
    last + 1
}

fn product_inputs(p: &Product) -> Vec<Argument> {
    let batch_a = p.batch.iter().map(|l| (l.size, l.a));
    let batch_b = p.batch.iter().map(|l| (l.size, l.b));
    let a =
        batch_a.chain(p.m.iter().map(|l| (l.size, l.a))).chain(p.k.iter().map(|l| (l.size, l.a)));
    let b =
        batch_b.chain(p.n.iter().map(|l| (l.size, l.b))).chain(p.k.iter().map(|l| (l.size, l.b)));
    let b = b.chain(p.borders.iter().map(|border| (border.size, border.step)));
    let mut inputs = vec![
        Argument { dtype: p.stored.a, len: extent(a) },
        Argument { dtype: p.stored.b, len: extent(b) },
    ];
    let [_, m, n, k] = p.sizes();
    for (of, side) in p.scales.iter().flatten().zip([m, n]) {
        let loops = [(side.div_ceil(of.block.max(1)), of.of_block), (k / Scales::RUN, of.of_run)];
        inputs.push(Argument { dtype: DType::F32, len: extent(loops.into_iter()) });
    }
    inputs
}

/// Each operand is as long as the product that reaches furthest in it wants, and of the type that
/// the first one has it.
pub(crate) fn products_inputs(p: &Products) -> Vec<Argument> {
    let mut inputs: Vec<Option<Argument>> = vec![None; p.operand_count()];
    for (at, wanted) in p.parts.iter().flat_map(part_inputs) {
        if let Some(input) = inputs.get_mut(at) {
            input.get_or_insert(wanted).len = input.map_or(0, |input| input.len).max(wanted.len);
        }
    }
    let none = Argument { dtype: p.dtype(), len: 0 };
    inputs.into_iter().map(|input| input.unwrap_or(none)).collect()
}

/// The operands that a product of several reads, by their numbers, one as often as it is read.
pub(crate) fn part_inputs(part: &ProductPart) -> Vec<(usize, Argument)> {
    let product = &part.product;
    let result = product_output(product);
    let bias = Argument { len: product.sizes()[2], ..result };
    let mut operands: Vec<(usize, Argument)> =
        part.factors().zip(product_inputs(product)).collect();
    operands.extend(part.bias.map(|at| (at, bias)));
    operands.extend(part.addend.map(|at| (at, result)));
    operands.extend(part.then.iter().flat_map(|then| {
        let read = then.inputs.iter().zip(rows_inputs(&then.rows));
        read.filter_map(|(source, wanted)| match source {
            Source::Operand(at) => Some((*at, wanted)),
            Source::Result(_) => None,
        })
    }));
    operands
}

fn product_output(p: &Product) -> Argument {
    let batch = p.batch.iter().map(|l| (l.size, l.c));
    let c = batch.chain(p.m.iter().map(|l| (l.size, l.c))).chain(p.n.iter().map(|l| (l.size, l.c)));
    Argument { dtype: p.stored.c, len: extent(c) }
}

fn rows_inputs(r: &Rows) -> Vec<Argument> {
    let mut arguments: Vec<Argument> = r
        .inputs
        .iter()
        .map(|i| Argument { dtype: i.dtype, len: i.access.extent(r.rows, r.cols) })
        .collect();
    for instr in &r.instrs {
        if let crate::rows::Instr::Random(draw) = instr {
            arguments[draw.key] = KEY;
        }
    }
    arguments
}

fn rows_outputs(r: &Rows) -> Vec<Argument> {
    let vectors = r.vectors();
    let output = |output: &Output| match output {
        Output::Store { value, access, dtype, .. } => {
            let is_per_row = !vectors[*value] && access.col_stride == 0;
            let cols = if is_per_row { r.cols.min(1) } else { r.cols };
            Argument { dtype: *dtype, len: access.extent(r.rows, cols) }
        }
        Output::ColSum { .. } => Argument { dtype: r.dtype, len: r.cols },
        Output::TotalSum { .. } => Argument { dtype: r.dtype, len: 1 },
    };
    r.outputs.iter().map(output).collect()
}

fn heads_extent(dims: [usize; 4], strides: [usize; 3]) -> usize {
    let [batch, length, heads, dim] = dims;
    let [b, s, h] = strides;
    extent([(batch, b), (length, s), (heads, h), (dim, 1)].into_iter())
}

fn queries(a: &Attention, strides: [usize; 3]) -> Argument {
    Argument { dtype: a.dtype, len: heads_extent([a.batch, a.queries, a.heads, a.dim], strides) }
}

fn keys(a: &Attention, strides: [usize; 3]) -> Argument {
    Argument { dtype: a.dtype, len: heads_extent([a.batch, a.keys, a.kv_heads, a.dim], strides) }
}

fn lse(a: &Attention) -> Argument {
    Argument { dtype: a.dtype.accumulation(), len: a.batch * a.heads * a.queries }
}

fn bias(a: &Attention) -> Option<Argument> {
    let [b, h, s] = a.bias?;
    let loops = [(a.batch, b), (a.heads, h), (a.queries, s), (a.keys, 1)];
    Some(Argument { dtype: a.dtype, len: extent(loops.into_iter()) })
}

fn documents(a: &Attention) -> Option<Argument> {
    a.documents.map(|_| Argument { dtype: DType::I32, len: a.batch * a.keys })
}

fn attention_inputs(a: &Attention) -> Vec<Argument> {
    let mut arguments = vec![queries(a, a.q), keys(a, a.k), keys(a, a.v)];
    arguments.extend(bias(a));
    arguments.extend(documents(a));
    arguments.extend(a.dropout.iter().map(|_| KEY));
    arguments.extend(a.position.then(|| positions(a.batch)));
    arguments
}

fn attention_bwd_inputs(a: &Attention) -> Vec<Argument> {
    let out = queries(a, a.out);
    let mut arguments = vec![queries(a, a.q), keys(a, a.k), keys(a, a.v)];
    arguments.extend(bias(a));
    arguments.extend(documents(a));
    arguments.extend([out, lse(a), out]);
    arguments.extend(a.dropout.iter().map(|_| KEY));
    arguments
}

fn experts_inputs(e: &Experts) -> [Argument; 5] {
    let of = |len: usize| Argument { dtype: e.dtype, len };
    let weights = of(e.weights());
    [of(e.tokens * e.model), of(e.tokens * e.experts), weights, weights, weights]
}

fn table(g: &Gather) -> Argument {
    Argument { dtype: g.dtype, len: g.outer * g.rows * g.width }
}

fn ids(g: &Gather) -> Argument {
    Argument { dtype: DType::I32, len: g.count }
}

fn looked_up(g: &Gather) -> Argument {
    Argument { dtype: g.dtype, len: g.outer * g.count * g.width }
}

fn lines(l: &Lines, extent: usize, dtype: DType) -> Argument {
    Argument { dtype, len: l.outer * extent * l.inner }
}

fn lines_result(l: &Lines) -> Argument {
    let dtype = match l.how {
        Line::ArgMax | Line::Order { .. } => DType::I32,
        Line::Cumulative(_)
        | Line::Prod
        | Line::Reverse
        | Line::Fold { .. }
        | Line::Pool { .. } => l.dtype,
    };
    lines(l, l.result, dtype)
}

fn rope_tensor(r: &Rope, strides: [usize; 3]) -> Argument {
    Argument { dtype: r.dtype, len: heads_extent([r.batch, r.seq, r.heads, r.dim], strides) }
}

fn rope_inputs(r: &Rope) -> Vec<Argument> {
    let x = rope_tensor(r, r.x);
    match r.positions {
        Positions::From(_) => vec![x],
        Positions::FromInput(_) => vec![x, positions(1)],
        Positions::FromInputs(_) => vec![x, positions(r.batch)],
        Positions::Table => vec![x, positions(r.batch * r.seq)],
    }
}

fn window(w: &Window, len: usize) -> Argument {
    Argument { dtype: w.dtype, len: w.outer * len * w.inner }
}

fn copy_source(c: &Copy) -> Argument {
    let used = extent(c.loops.iter().map(|l| (l.size, l.source)));
    // Long enough for every launch.
    let start = c.source_offset.most() as usize;
    Argument { dtype: c.dtype, len: if used == 0 { 0 } else { start + used } }
}

fn copy_target(c: &Copy) -> Argument {
    let used = extent(c.loops.iter().map(|l| (l.size, l.target)));
    let written = if used == 0 { 0 } else { c.target_offset + used };
    Argument { dtype: c.dtype, len: written.max(c.zero_first) }
}
