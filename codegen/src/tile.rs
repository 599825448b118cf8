//! Lowering of a fused function to a block program: every decision is taken here.

use std::collections::HashMap;

use ir::op::{Binary, Combiner, Comparison, Unary};
use ir::random::{DrawBits, SHARED_DRAWS};
use ir::{DType, Dim, Function, Module, Node, Op, ValueId};
use kernels::Offset;
use kernels::rows::{
    Access, BinaryOp, Digit, Draw, Instr, Output, ReduceOp, RowInput, Rows, UnaryOp, vectors,
};

use crate::domain::{Domain, Extent, extents, strides};
use crate::fuse::superinstruction;
use crate::leaf::is_leaf;
use crate::precision::{Bounds, compute_dtype, range_of};
use crate::scalars::Scalars;

/// Products of integers up to this are numbers of binary64, which [`UnaryOp::WrapI32`] wraps.
const PRODUCT_MAX: f64 = 1_125_899_906_842_624.0;
/// What an integer of 32 bits is cut by, `2^16`.
const HALF: f64 = 65_536.0;

/// A block program and, for each of its inputs, the parameter of the kernel function.
#[derive(Clone, Debug)]
pub struct Tile {
    /// The program; its outputs are the function's results, in order.
    pub rows: Rows,
    /// For each input, the parameter that is passed.
    pub inputs: Vec<ValueId>,
    /// What a launch of it passes.
    pub scalars: Scalars,
}

/// The block program of a function marked `kernel`.
///
/// # Panics
/// When the function has no domain: [`crate::fuse`] makes only functions that have one.
pub fn lower_kernel(function: &Function, module: &Module) -> Tile {
    let nodes = nodes(function);
    let domain = Domain::of(function, &nodes).expect("a fused kernel has a domain");
    let extents = extents(function, &nodes, &domain).expect("its values fit the domain");
    lower_over(function, module, &domain, extents)
}

/// The block program of a function marked `kernel` over a domain that is given, if it computes
/// every value at every point of that from what its parameters hold there: no sums and no draws.
pub(crate) fn lower_pointwise(
    function: &Function,
    module: &Module,
    domain: &Domain,
) -> Option<Tile> {
    let computed = nodes(function);
    let is_sum = |at: &usize| matches!(function.nodes[*at].op, Op::Reduce { .. });
    let draws = function.nodes.iter().any(|node| matches!(node.op, Op::Random { .. }));
    if draws || computed.iter().any(is_sum) {
        return None;
    }
    let extents = extents(function, &computed, domain)?;
    let is_full = extents.iter().all(|(_, extent)| *extent == Extent::Full);
    is_full.then(|| lower_over(function, module, domain, extents))
}

/// The nodes that a kernel computes once, which are no leaves.
fn nodes(function: &Function) -> Vec<usize> {
    (0..function.nodes.len()).filter(|at| !is_leaf(&function.nodes[*at].op)).collect()
}

fn lower_over(
    function: &Function,
    module: &Module,
    domain: &Domain,
    extents: Vec<(ValueId, Extent)>,
) -> Tile {
    let mut lower = Lower {
        function,
        dtype: compute_dtype(function, nodes(function)).expect("its nodes fit one type"),
        domain,
        extents: extents.into_iter().collect(),
        producers: function.producers(),
        instrs: Vec::new(),
        inputs: Vec::new(),
        passed: Vec::new(),
        made: HashMap::new(),
        reduced: HashMap::new(),
        scalars: Scalars::default(),
    };
    for at in nodes(function) {
        lower.node(&function.nodes[at], module);
    }
    let outputs = function.results.iter().map(|r| lower.output(*r)).collect();
    let rows = Rows {
        rows: domain.rows(),
        cols: domain.cols(),
        dtype: lower.dtype,
        inputs: lower.inputs,
        instrs: lower.instrs,
        outputs,
    };
    Tile { rows, inputs: lower.passed, scalars: lower.scalars }
}

struct Lower<'f> {
    function: &'f Function,
    /// What is computed in.
    dtype: DType,
    domain: &'f Domain,
    extents: HashMap<ValueId, Extent>,
    producers: Vec<Option<usize>>,
    instrs: Vec<Instr>,
    inputs: Vec<RowInput>,
    passed: Vec<ValueId>,
    /// The instruction that holds a value for an extent.
    made: HashMap<(ValueId, bool), usize>,
    /// The value that a column or total sum adds up.
    reduced: HashMap<ValueId, usize>,
    scalars: Scalars,
}

impl Lower<'_> {
    fn push(&mut self, instr: Instr) -> usize {
        self.instrs.push(instr);
        self.instrs.len() - 1
    }

    #[expect(clippy::wildcard_enum_match_arm, reason = "only fusible nodes come here")]
    fn node(&mut self, node: &Node, module: &Module) {
        let result = node.result();
        let own = self.extents[&result];
        let reduces = matches!(node.op, Op::Reduce { .. });
        let operand_extent = if reduces { self.operand_extent(node.operands[0]) } else { own };
        let operands: Vec<usize> =
            node.operands.iter().map(|o| self.operand(*o, operand_extent)).collect();
        let made = match &node.op {
            Op::Unary(op) => self.unary(node, *op, operands[0]),
            Op::Binary(op) => self.binary(node, *op, operands[0], operands[1]),
            Op::Compare(op) => {
                self.push(Instr::Binary { op: comparison(*op), a: operands[0], b: operands[1] })
            }
            Op::Select => {
                let [condition, a, b] = [operands[0], operands[1], operands[2]];
                self.push(Instr::Select { condition, a, b })
            }
            Op::Cast { dtype } => self.cast(node.operands[0], operands[0], *dtype),
            Op::Reduce { combiner, .. } => match own {
                Extent::Row => self.reduce(result, *combiner, operands[0]),
                Extent::Full | Extent::Column | Extent::Total => {
                    let is_full = operand_extent == Extent::Full;
                    let x = if is_full { self.spread(operands[0]) } else { operands[0] };
                    self.reduced.insert(result, x);
                    return;
                }
            },
            Op::Call { function } => self.superinstruction(function, module, &operands),
            op => unreachable!("`{}` is not fused", ir::infer::name(op)),
        };
        let made = self.rounded(node, made);
        self.made.insert((result, own == Extent::Full), made);
    }

    /// What a node made as a number of its result's type, where that is narrow.
    fn rounded(&mut self, node: &Node, x: usize) -> usize {
        let dtype = self.function.ty(node.result()).dtype;
        let is_exact = matches!(
            node.op,
            Op::Select | Op::Unary(Unary::Neg | Unary::Abs) | Op::Binary(Binary::Max | Binary::Min)
        );
        match UnaryOp::rounding(dtype).filter(|_| dtype.is_narrow() && !is_exact) {
            Some(op) => self.push(Instr::Unary { op, x }),
            None => x,
        }
    }

    /// A reduction of each row. Truths are summed by asking for any; sums of integers of 32 bits
    /// wrap.
    fn reduce(&mut self, result: ValueId, combiner: Combiner, x: usize) -> usize {
        let dtype = self.function.ty(result).dtype;
        let op = match combiner {
            Combiner::Sum if dtype == DType::Bool => ReduceOp::Max,
            Combiner::Sum | Combiner::Max | Combiner::Min => reduce(combiner),
        };
        let x = self.push(Instr::Reduce { op, x });
        if op == ReduceOp::Sum { self.wrap(x, dtype) } else { x }
    }

    /// A number as one of an integer type.
    fn wrap(&mut self, x: usize, dtype: DType) -> usize {
        let truth = |lower: &mut Self, x| lower.push(Instr::Unary { op: UnaryOp::Not, x });
        match dtype {
            DType::I32 => self.push(Instr::Unary { op: UnaryOp::WrapI32, x }),
            DType::U32 => self.push(Instr::Unary { op: UnaryOp::WrapU32, x }),
            DType::Bool => {
                let no = truth(self, x);
                truth(self, no)
            }
            DType::I8
            | DType::I64
            | DType::F64
            | DType::F32
            | DType::BF16
            | DType::F16
            | DType::F8E4M3
            | DType::F8E5M2 => x,
        }
    }

    /// A value at every point, also where it is the same in all columns: a sum adds it as often.
    fn spread(&mut self, x: usize) -> usize {
        if vectors(&self.inputs, &self.instrs)[x] {
            return x;
        }
        let condition = self.push(Instr::Const { value: 1.0 });
        let b = self.push(Instr::Index { row: Vec::new(), col_stride: 1, base: Offset::ZERO });
        self.push(Instr::Select { condition, a: x, b })
    }

    /// A value as one of another type. Zero as an integer has no sign.
    fn cast(&mut self, from: ValueId, mut x: usize, to: DType) -> usize {
        if self.dtype == DType::I64 {
            return self.wrap(x, to);
        }
        let producer = self.producers[from.index()].map(|at| &self.function.nodes[at]);
        let is_made = producer.is_some_and(|node| !is_leaf(&node.op));
        let dtype = self.function.ty(from).dtype;
        if is_made && !dtype.is_float() && dtype != DType::Bool && to.is_float() {
            let zero = self.push(Instr::Const { value: 0.0 });
            x = self.push(Instr::Binary { op: BinaryOp::Add, a: x, b: zero });
        }
        if to == DType::F32 && self.dtype == DType::F64 {
            x = self.push(Instr::Unary { op: UnaryOp::Single, x });
        }
        x
    }

    /// A function of one number; what leaves the integers of a type wraps.
    fn unary(&mut self, node: &Node, op: Unary, x: usize) -> usize {
        let x = self.push(Instr::Unary { op: unary(op), x });
        let dtype = self.function.ty(node.result()).dtype;
        let (_, highest) = range_of(dtype);
        let bounds = Bounds::of(self.function).unwrapped(node);
        if dtype.is_float() || bounds.is_none_or(|(_, high)| high <= highest) {
            return x;
        }
        self.wrap(x, dtype)
    }

    /// A function of two numbers; what leaves the integers of a type wraps.
    fn binary(&mut self, node: &Node, op: Binary, a: usize, b: usize) -> usize {
        let dtype = self.function.ty(node.result()).dtype;
        let plain = Instr::Binary { op: binary(op), a, b };
        if dtype.is_float() || dtype == DType::I64 {
            return self.push(plain);
        }
        let Some((low, high)) = Bounds::of(self.function).unwrapped(node) else {
            return self.push(plain);
        };
        let (lowest, highest) = range_of(dtype);
        if lowest <= low && high <= highest {
            return self.push(plain);
        }
        let wrap = if dtype == DType::U32 { UnaryOp::WrapU32 } else { UnaryOp::WrapI32 };
        if self.dtype == DType::I64 || low.abs().max(high.abs()) <= PRODUCT_MAX {
            let x = self.push(plain);
            return self.push(Instr::Unary { op: wrap, x });
        }
        // a b = 2^16 (h b) + l b, with a = 2^16 h + l.
        let half = self.push(Instr::Const { value: HALF });
        let part = self.push(Instr::Const { value: 1.0 / HALF });
        let mut two = |op, a, b| self.push(Instr::Binary { op, a, b });
        let x = two(BinaryOp::Mul, a, part);
        let high = self.push(Instr::Unary { op: UnaryOp::Floor, x });
        let mut two = |op, a, b| self.push(Instr::Binary { op, a, b });
        let above = two(BinaryOp::Mul, high, half);
        let low = two(BinaryOp::Sub, a, above);
        let x = two(BinaryOp::Mul, high, b);
        let upper = self.push(Instr::Unary { op: wrap, x });
        let mut two = |op, a, b| self.push(Instr::Binary { op, a, b });
        let upper = two(BinaryOp::Mul, upper, half);
        let lower = two(BinaryOp::Mul, low, b);
        let x = two(BinaryOp::Add, upper, lower);
        self.push(Instr::Unary { op: wrap, x })
    }

    fn superinstruction(&mut self, callee: &str, module: &Module, operands: &[usize]) -> usize {
        let name = superinstruction(module, callee).expect("only these calls are fused");
        let unary = |op| Instr::Unary { op, x: operands[0] };
        let binary = |op| Instr::Binary { op, a: operands[0], b: operands[1] };
        let instr = match name {
            "gelu_tanh" => unary(UnaryOp::GeluTanh),
            "gelu_erf" => unary(UnaryOp::GeluErf),
            "silu" => unary(UnaryOp::Silu),
            "gelu_tanh_bwd" => binary(BinaryOp::GeluTanhGrad),
            "gelu_erf_bwd" => binary(BinaryOp::GeluErfGrad),
            "silu_bwd" => binary(BinaryOp::SiluGrad),
            _ => unreachable!("`{name}` is no single instruction"),
        };
        self.push(instr)
    }

    fn operand_extent(&self, operand: ValueId) -> Extent {
        if let Some(extent) = self.extents.get(&operand) {
            return *extent;
        }
        let sizes = self.function.ty(operand).sizes().expect("local sizes are bound");
        if sizes == self.domain.sizes { Extent::Full } else { Extent::Row }
    }

    /// The instruction that holds an operand at every point, or in every row.
    fn operand(&mut self, value: ValueId, extent: Extent) -> usize {
        let key = (value, extent == Extent::Full);
        if let Some(made) = self.made.get(&key) {
            return *made;
        }
        let made = match self.producers[value.index()].map(|at| &self.function.nodes[at]) {
            Some(node) => self.leaf(node, extent),
            None => {
                let access = self.own_access(extent);
                self.load(value, access)
            }
        };
        self.made.insert(key, made);
        made
    }

    fn own_access(&self, extent: Extent) -> Access {
        match extent {
            Extent::Full => Access::full(self.domain.rows(), self.domain.cols()),
            Extent::Row => Access::per_row(self.domain.rows()),
            Extent::Column => Access::per_column(),
            Extent::Total => Access::scalar(),
        }
    }

    fn load(&mut self, param: ValueId, access: Access) -> usize {
        let input = self.input(param, access);
        self.push(Instr::Load { input })
    }

    fn input(&mut self, param: ValueId, access: Access) -> usize {
        let dtype = self.function.ty(param).dtype;
        let same = |(at, p): (usize, &ValueId)| *p == param && self.inputs[at].access == access;
        if let Some(there) = self.passed.iter().enumerate().position(same) {
            return there;
        }
        self.inputs.push(RowInput { dtype, access });
        self.passed.push(param);
        self.inputs.len() - 1
    }

    #[expect(clippy::wildcard_enum_match_arm, reason = "only leaves come here")]
    fn leaf(&mut self, node: &Node, extent: Extent) -> usize {
        match &node.op {
            Op::Constant { value, dtype, .. } => {
                self.push(Instr::Const { value: held(*value, *dtype) })
            }
            Op::Iota { dim, start, dtype, .. } => {
                let instr = self.index(*dim, *start, extent);
                let x = self.push(instr);
                let rounds = dtype.is_narrow() || *dtype == DType::F32 && self.dtype == DType::F64;
                match UnaryOp::rounding(*dtype).filter(|_| rounds) {
                    Some(op) => self.push(Instr::Unary { op, x }),
                    None => x,
                }
            }
            Op::Random { salt, start, extent: global, per_sample, bits, dims, .. } => {
                let key = self.input(node.operands[0], Access::scalar());
                let places = global_places(start, global, dims, *per_sample);
                let draw = self.draw(key, (*salt, *bits), places, extent);
                self.push(Instr::Random(draw))
            }
            Op::Broadcast { new, .. } => self.broadcast(node, new, extent),
            op => unreachable!("`{}` is no leaf", ir::infer::name(op)),
        }
    }

    fn broadcast(&mut self, node: &Node, new: &[usize], extent: Extent) -> usize {
        let source = node.operands[0];
        if self.extents.contains_key(&source) {
            return self.made[&(source, false)];
        }
        if let Some(at) = self.producers[source.index()] {
            return self.leaf(&self.function.nodes[at].clone(), Extent::Row);
        }
        let (row, col_stride) = strides(self.function, node.result(), new, extent, self.domain)
            .expect("the domain was chosen so that broadcasts are evenly spaced");
        let digits = self.row_digits(&row);
        self.load(source, Access { row: digits, col_stride, offset: 0 })
    }

    /// The digits of the row index with the given strides per row dim.
    fn row_digits(&self, strides: &[usize]) -> Vec<Digit> {
        digits(&self.domain.sizes[..self.domain.split], strides)
    }

    fn index(&mut self, dim: usize, start: i64, extent: Extent) -> Instr {
        let in_rows = dim < self.domain.split;
        debug_assert!(in_rows || extent == Extent::Full, "a row has no column index");
        let mut strides = vec![0; self.domain.split];
        if in_rows {
            strides[dim] = 1;
        }
        let row = self.row_digits(&strides);
        let base = self.scalars.offset(start, Scalars::ANY);
        Instr::Index { row, col_stride: usize::from(!in_rows), base }
    }

    fn draw(
        &mut self,
        key: usize,
        (salt, bits): (u32, DrawBits),
        places: Places,
        extent: Extent,
    ) -> Draw {
        let Places { strides, offset, unit, sample_stride } = places;
        let split = self.domain.split;
        let col = match extent {
            Extent::Full => digits(&self.domain.sizes[split..], &strides[split..]),
            Extent::Row | Extent::Column | Extent::Total => Vec::new(),
        };
        let offset = self.scalars.offset(offset.cast_signed(), Scalars::any_of(unit));
        let row = self.row_digits(&strides[..split]);
        Draw { key, salt, bits, row, col, offset, unit, sample_stride }
    }

    fn output(&mut self, result: ValueId) -> Output {
        match self.extents[&result] {
            Extent::Column => Output::ColSum { value: self.reduced[&result], accumulate: false },
            Extent::Total => Output::TotalSum { value: self.reduced[&result], accumulate: false },
            extent @ (Extent::Full | Extent::Row) => Output::Store {
                value: self.made[&(result, extent == Extent::Full)],
                access: self.own_access(extent),
                dtype: self.function.ty(result).dtype,
                accumulate: false,
            },
        }
    }
}

/// Where the elements of a draw are in the global tensor.
pub(crate) struct Places {
    /// The strides of the global tensor.
    pub(crate) strides: Vec<usize>,
    /// The place of the first local element, for the first sample, in units.
    pub(crate) offset: u64,
    /// Elements of a unit, which divides the place of every rank's first element.
    pub(crate) unit: u64,
    /// How much further that is for the next sample.
    pub(crate) sample_stride: u64,
}

pub(crate) fn global_places(
    start: &[i64],
    global: &[Dim],
    local: &[Dim],
    per_sample: u32,
) -> Places {
    let mut strides = vec![1_usize; start.len()];
    for dim in (0..start.len().saturating_sub(1)).rev() {
        strides[dim] = strides[dim + 1] * global[dim + 1].as_constant().unwrap_or(1) as usize;
    }
    let offset: u64 =
        start.iter().zip(&strides).map(|(s, stride)| *s as u64 * *stride as u64).sum();
    // A dim that is whole begins at 0 on every rank; samples may be shared out in any case.
    let may_begin_later = |dim: usize| dim == 0 || local[dim] != global[dim];
    let is_even = |dim: usize| (strides[dim] as u64).is_multiple_of(SHARED_DRAWS);
    let unit = match (0..start.len()).filter(|dim| may_begin_later(*dim)).all(is_even) {
        true => SHARED_DRAWS,
        false => 1,
    };
    let sample_stride = strides.first().map_or(0, |stride| *stride as u64 * u64::from(per_sample));
    Places { strides, offset: offset / unit, unit, sample_stride }
}

/// A number as a type holds it.
fn held(value: f64, dtype: DType) -> f64 {
    match dtype {
        DType::F32 => f64::from(value as f32),
        DType::Bool => f64::from(u8::from(value != 0.0)),
        DType::I8 | DType::I32 | DType::U32 | DType::I64 => {
            let (lowest, highest) = range_of(dtype);
            value.trunc().clamp(lowest, highest)
        }
        DType::F64 => value,
        DType::BF16 | DType::F16 | DType::F8E4M3 | DType::F8E5M2 => {
            ir::formats::nearest(dtype, value)
        }
    }
}

/// Mixed-radix digits of a row-major index over `sizes`, without those of no weight.
pub fn digits(sizes: &[usize], strides: &[usize]) -> Vec<Digit> {
    let mut found: Vec<Digit> = Vec::new();
    let mut div = 1;
    for (size, stride) in sizes.iter().zip(strides).rev() {
        if *stride != 0 && *size != 1 {
            match found.last_mut() {
                // Two dims that are one in memory are one digit.
                Some(last)
                    if last.div * last.modulus == div && last.stride * last.modulus == *stride =>
                {
                    last.modulus *= size;
                }
                _ => found.push(Digit { div, modulus: *size, stride: *stride }),
            }
        }
        div *= size;
    }
    found.reverse();
    found
}

fn unary(op: Unary) -> UnaryOp {
    match op {
        Unary::Neg => UnaryOp::Neg,
        Unary::Abs => UnaryOp::Abs,
        Unary::Exp => UnaryOp::Exp,
        Unary::Log => UnaryOp::Log,
        Unary::Sqrt => UnaryOp::Sqrt,
        Unary::Rsqrt => UnaryOp::Rsqrt,
        Unary::Tanh => UnaryOp::Tanh,
        Unary::Erf => UnaryOp::Erf,
        Unary::Sin => UnaryOp::Sin,
        Unary::Cos => UnaryOp::Cos,
        Unary::Floor => UnaryOp::Floor,
        Unary::PowerFloor => UnaryOp::PowerFloor,
    }
}

fn binary(op: Binary) -> BinaryOp {
    match op {
        Binary::Add => BinaryOp::Add,
        Binary::Sub => BinaryOp::Sub,
        Binary::Mul => BinaryOp::Mul,
        Binary::Div => BinaryOp::Div,
        Binary::Max => BinaryOp::Max,
        Binary::Min => BinaryOp::Min,
        Binary::Pow => BinaryOp::Pow,
    }
}

fn comparison(op: Comparison) -> BinaryOp {
    match op {
        Comparison::Eq => BinaryOp::Eq,
        Comparison::Lt => BinaryOp::Lt,
        Comparison::Le => BinaryOp::Le,
    }
}

fn reduce(combiner: Combiner) -> ReduceOp {
    match combiner {
        Combiner::Sum => ReduceOp::Sum,
        Combiner::Max => ReduceOp::Max,
        Combiner::Min => ReduceOp::Min,
    }
}
