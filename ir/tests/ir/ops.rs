//! A case for every op: [`next`] and [`cases`] do not compile while an op has none.

use gantline_ir::convolution::DimOrder;
use gantline_ir::op::{
    Binary, Collective, Combiner, Comparison, Convolution, Einsum, Unary, Windows,
};
use gantline_ir::random::DrawBits;
use gantline_ir::{DType, Dim, Op, Tensor};

use crate::draws::Draws;

/// One op with operands that it takes.
pub(crate) struct Case {
    pub(crate) op: Op,
    pub(crate) operands: Vec<Tensor>,
}

/// One op of each kind, in the order of the enum.
pub(crate) fn kinds() -> Vec<Op> {
    let first = Op::Constant { value: 0.5, dtype: DType::F64, dims: vec![Dim::from(2)] };
    std::iter::successors(Some(first), next).collect()
}

pub(crate) fn plain_conv() -> Convolution {
    Convolution {
        stride: vec![1],
        before: vec![0],
        after: vec![0],
        dilation: vec![1],
        spread: vec![1],
        orders: Default::default(),
    }
}

const WINDOWS: Windows = Windows { dim: 0, size: 2, stride: 1, dilation: 1 };

fn next(op: &Op) -> Option<Op> {
    let dims = || vec![Dim::from(2), Dim::from(3)];
    let dtype = DType::F64;
    Some(match op {
        Op::Constant { .. } => Op::Iota { dim: 1, start: 3, dtype, dims: dims() },
        Op::Iota { .. } => {
            let start = vec![0, 1];
            let (extent, bits) = (dims(), DrawBits::B24);
            Op::Random { salt: 3, start, extent, per_sample: 1, bits, dtype, dims: dims() }
        }
        Op::Random { .. } => Op::FoldKey { salt: 1 },
        Op::FoldKey { .. } => Op::Unary(Unary::Neg),
        Op::Unary(_) => Op::Binary(Binary::Add),
        Op::Binary(_) => Op::Compare(Comparison::Eq),
        Op::Compare(_) => Op::Select,
        Op::Select => Op::Cast { dtype },
        Op::Cast { .. } => Op::Contract(Einsum::parse("ab,bc->ac").unwrap()),
        Op::Contract(_) => {
            let einsum = Einsum::parse("ab,cb->ac").unwrap();
            Op::ScaledContract { einsum, runs_first: [false; 2] }
        }
        Op::ScaledContract { .. } => Op::Conv(plain_conv()),
        Op::Conv(_) => Op::Reduce { combiner: Combiner::Sum, dims: vec![0] },
        Op::Reduce { .. } => Op::Prod { dims: vec![0] },
        Op::Prod { .. } => Op::ArgMax { dim: 0 },
        Op::ArgMax { .. } => Op::Cumulative { combiner: Combiner::Sum, dim: 0 },
        Op::Cumulative { .. } => Op::Sort { dim: 0, descending: false },
        Op::Sort { .. } => Op::TopK { dim: 0, count: 1 },
        Op::TopK { .. } => Op::Reshape { dims: dims() },
        Op::Reshape { .. } => Op::Transpose { perm: vec![1, 0] },
        Op::Transpose { .. } => Op::Broadcast { new: vec![0], dims: dims() },
        Op::Broadcast { .. } => Op::Slice { dim: 0, start: 0, size: 1 },
        Op::Slice { .. } => Op::Pad { dim: 0, before: 1, after: 2 },
        Op::Pad { .. } => Op::Reverse { dims: vec![0] },
        Op::Reverse { .. } => Op::Window(WINDOWS),
        Op::Window(_) => Op::Fold { windows: WINDOWS, extent: 2 },
        Op::Fold { .. } => Op::Concat { dim: 0 },
        Op::Concat { .. } => Op::Gather { dim: 0, start: 0 },
        Op::Gather { .. } => Op::ScatterAdd { dim: 0, start: 0, size: Dim::from(3) },
        Op::ScatterAdd { .. } => Op::Scatter { dim: 0, start: 0 },
        Op::Scatter { .. } => Op::DynamicUpdateSlice { dim: 0 },
        Op::DynamicUpdateSlice { .. } => Op::DynamicSlice { dim: 0, size: Dim::from(1) },
        Op::DynamicSlice { .. } => Op::Call { function: "layer".to_owned() },
        Op::Call { .. } => {
            let kind = Collective::AllReduce(Combiner::Sum);
            Op::Collective { kind, axis: "tp".to_owned() }
        }
        Op::Collective { .. } => return None,
    })
}

/// Random cases of an op's kind.
pub(crate) fn cases(op: &Op, r: &mut Draws) -> Vec<Case> {
    let ndim = 1 + r.below(3);
    let dims = r.dims(ndim);
    let dim = r.below(ndim);
    match op {
        Op::Constant { .. } | Op::Iota { .. } => vec![case(op.clone(), [])],
        Op::Random { .. } => [0, 1, 5].map(|rows| draw(op.clone(), rows, r)).into(),
        Op::FoldKey { .. } => vec![case(op.clone(), [r.key()])],
        Op::Unary(_) => Unary::ALL.map(|how| unary(how, &dims, r)).into(),
        Op::Binary(_) => Binary::ALL.map(|how| binary(how, &dims, r)).into(),
        Op::Compare(_) => Comparison::ALL
            .map(|how| case(Op::Compare(how), [r.signed(&dims), r.signed(&dims)]))
            .into(),
        Op::Select => vec![case(Op::Select, [r.bools(&dims), r.signed(&dims), r.signed(&dims)])],
        Op::Cast { .. } => [DType::F64, DType::I32, DType::Bool]
            .map(|dtype| case(Op::Cast { dtype }, [r.signed(&dims)]))
            .into(),
        Op::Contract(_) => contract(r),
        Op::ScaledContract { .. } => vec![scaled_contract(r)],
        Op::Conv(_) => vec![conv(1 + r.below(2), r)],
        Op::Reduce { .. } => Combiner::ALL.map(|how| reduce(how, &dims, r)).into(),
        Op::Prod { .. } => vec![case(Op::Prod { dims: some(ndim, r) }, [with_zeros(&dims, r)])],
        Op::ArgMax { .. } => vec![case(Op::ArgMax { dim }, [r.signed(&dims)])],
        Op::Cumulative { .. } => Combiner::ALL
            .map(|combiner| case(Op::Cumulative { combiner, dim }, [r.signed(&dims)]))
            .into(),
        Op::Sort { .. } => {
            vec![case(Op::Sort { dim, descending: r.coin() }, [r.ids(&dims, -2, 3)])]
        }
        Op::TopK { .. } => {
            let count = 1 + r.below(dims[dim]);
            vec![case(Op::TopK { dim, count }, [r.signed(&dims)])]
        }
        Op::Reshape { .. } => vec![case(Op::Reshape { dims: flat(&dims) }, [r.signed(&dims)])],
        Op::Transpose { .. } => vec![transpose(&dims, r)],
        Op::Broadcast { .. } => vec![broadcast(&dims, dim, r)],
        Op::Slice { .. } => {
            let start = r.below(dims[dim]);
            let size = 1 + r.below(dims[dim] - start);
            vec![case(Op::Slice { dim, start, size }, [r.signed(&dims)])]
        }
        Op::Pad { .. } => {
            let (before, after) = (r.below(3), r.below(3));
            vec![case(Op::Pad { dim, before, after }, [r.signed(&dims)])]
        }
        Op::Reverse { .. } => {
            vec![case(Op::Reverse { dims: some(ndim, r) }, [r.signed(&dims)])]
        }
        Op::Window(_) => {
            let (windows, extent) = windows(dim, r);
            vec![case(Op::Window(windows), [r.signed(&with(&dims, dim, extent))])]
        }
        Op::Fold { .. } => {
            let (windows, extent) = windows(dim, r);
            let mut of = dims;
            of.splice(dim..=dim, [windows.count(extent).unwrap(), windows.size]);
            vec![case(Op::Fold { windows, extent }, [r.signed(&of)])]
        }
        Op::Concat { .. } => {
            let size = 1 + r.below(3);
            let other = with(&dims, dim, size);
            let operands = [r.signed(&dims), r.signed(&other), r.signed(&dims)];
            vec![case(Op::Concat { dim }, operands)]
        }
        Op::Gather { .. } => vec![gather(&dims, dim, r)],
        Op::ScatterAdd { .. } => vec![scatter_add(&dims, dim, r)],
        Op::Scatter { .. } => vec![scatter(&dims, dim, r)],
        Op::DynamicUpdateSlice { .. } => {
            let size = 1 + r.below(dims[dim]);
            let update = r.signed(&with(&dims, dim, size));
            let at = if dim > 0 && r.coin() { &dims[..1] } else { &[] };
            let operands = [r.signed(&dims), update, r.ids(at, -1, 5)];
            vec![case(Op::DynamicUpdateSlice { dim }, operands)]
        }
        Op::DynamicSlice { .. } => {
            let size = Dim::from(1 + r.below(dims[dim]));
            let at = if dim > 0 && r.coin() { &dims[..1] } else { &[] };
            let operands = [r.signed(&dims), r.ids(at, -1, 5)];
            vec![case(Op::DynamicSlice { dim, size }, operands)]
        }
        Op::Call { .. } => vec![case(op.clone(), [r.signed(&[2, 3]), r.ids(&[2], 0, 2)])],
        Op::Collective { .. } => vec![case(op.clone(), [r.signed(&dims)])],
    }
}

fn case<const N: usize>(op: Op, operands: [Tensor; N]) -> Case {
    Case { op, operands: operands.into() }
}

fn draw(mut op: Op, rows: u32, r: &mut Draws) -> Case {
    if let Op::Random { per_sample, .. } = &mut op {
        *per_sample = rows;
    }
    case(op, [r.key()])
}

fn sizes(dims: &[usize]) -> Vec<Dim> {
    dims.iter().map(|d| Dim::from(*d)).collect()
}

fn flat(dims: &[usize]) -> Vec<Dim> {
    vec![Dim::from(dims.iter().product::<usize>()), Dim::from(1)]
}

fn with(dims: &[usize], dim: usize, size: usize) -> Vec<usize> {
    let mut dims = dims.to_vec();
    dims[dim] = size;
    dims
}

fn unary(how: Unary, dims: &[usize], r: &mut Draws) -> Case {
    let x = match how {
        Unary::Log | Unary::Sqrt | Unary::Rsqrt => r.positive(dims),
        Unary::Neg
        | Unary::Abs
        | Unary::Exp
        | Unary::Tanh
        | Unary::Erf
        | Unary::Sin
        | Unary::Cos
        | Unary::Floor
        | Unary::PowerFloor => r.signed(dims),
    };
    case(Op::Unary(how), [x])
}

fn binary(how: Binary, dims: &[usize], r: &mut Draws) -> Case {
    let a = if how == Binary::Pow { r.positive(dims) } else { r.signed(dims) };
    case(Op::Binary(how), [a, r.signed(dims)])
}

fn contract(r: &mut Draws) -> Vec<Case> {
    let texts =
        ["ab,bc->ac", "zab,zbc->zca", "ab,cb->ca", "a,b->ab", "ab,ab->", "abc,b->ca", "a,a->a"];
    let sizes = r.dims(26);
    let of = |letters: &[char]| -> Vec<usize> {
        letters.iter().map(|c| sizes[*c as usize - 'a' as usize]).collect()
    };
    let mut make = |text: &&str| {
        let einsum = Einsum::parse(text).unwrap();
        let operands = [r.signed(&of(&einsum.a)), r.signed(&of(&einsum.b))];
        case(Op::Contract(einsum), operands)
    };
    texts.iter().map(&mut make).collect()
}

/// Rows of codes with scales of their own, or of 128 together.
fn scaled_contract(r: &mut Draws) -> Case {
    let [rows, columns, runs] = [1 + r.below(3), 1 + r.below(200), 1 + r.below(2)];
    let runs_first = [r.coin(), r.coin()];
    let scales = |blocks: usize, runs_first: bool, r: &mut Draws| {
        let dims = if runs_first { [runs, blocks] } else { [blocks, runs] };
        Tensor::from_f64(DType::F32, &dims, r.positive(&dims).to_f64())
    };
    let codes = |dims: &[usize], r: &mut Draws| {
        Tensor::from_f64(DType::F8E4M3, dims, r.signed(dims).to_f64())
    };
    let text = ["ab,cb->ac", "ba,cb->ca", "abd,cbd->ac"][r.below(3)];
    let mut einsum = Einsum::parse(text).unwrap();
    einsum.is_wide = r.coin();
    let summed = |with_d: usize| if text.contains('d') { [runs, 128][with_d] } else { runs * 128 };
    let size = |letter: &char| match letter {
        'a' => rows,
        'c' => columns,
        letter => summed(usize::from(*letter == 'd')),
    };
    let [of_a, of_b] = [&einsum.a, &einsum.b].map(|l| l.iter().map(size).collect::<Vec<_>>());
    let blocks = if r.coin() { columns } else { columns.div_ceil(128) };
    let operands = [
        codes(&of_a, r),
        codes(&of_b, r),
        scales(rows, runs_first[0], r),
        scales(blocks, runs_first[1], r),
    ];
    case(Op::ScaledContract { einsum, runs_first }, operands)
}

/// Some paddings are negative, and some windows hang over an edge.
fn conv(spatial: usize, r: &mut Draws) -> Case {
    loop {
        let mut steps = |most: usize| (0..spatial).map(|_| 1 + r.below(most)).collect::<Vec<_>>();
        let (stride, dilation, spread) = (steps(3), steps(2), steps(2));
        let (kernel, image) = (steps(3), steps(5));
        let mut padding = || (0..spatial).map(|_| r.below(4) as i64 - 1).collect::<Vec<_>>();
        let (before, after) = (padding(), padding());
        let orders = [0; 3].map(|_| order(spatial + 2, r));
        let c = Convolution { stride, before, after, dilation, spread, orders };
        if c.result_sizes(&image, &kernel).is_none() {
            continue;
        }
        let [groups, inputs, outputs] = [1 + r.below(3), 1 + r.below(2), 1 + r.below(2)];
        let x = [&[1 + r.below(3), groups * inputs], image.as_slice()].concat();
        let w = [&[groups * outputs, inputs], kernel.as_slice()].concat();
        let (x, w) = (c.orders[0].lying(&x), c.orders[1].lying(&w));
        return case(Op::Conv(c), [r.signed(&x), r.signed(&w)]);
    }
}

/// Dims in the usual order, or in any.
pub(crate) fn order(ndim: usize, r: &mut Draws) -> DimOrder {
    let mut dims: Vec<usize> = (0..ndim).collect();
    if r.coin() {
        (1..ndim).rev().for_each(|at| dims.swap(at, r.below(at + 1)));
    }
    DimOrder::new(ndim, dims)
}

fn reduce(combiner: Combiner, dims: &[usize], r: &mut Draws) -> Case {
    let over = some(dims.len(), r);
    case(Op::Reduce { combiner, dims: over }, [r.signed(dims)])
}

/// Some of the dims.
fn some(ndim: usize, r: &mut Draws) -> Vec<usize> {
    (0..ndim).filter(|_| r.coin()).collect()
}

/// Every fifth element or so is zero.
fn with_zeros(dims: &[usize], r: &mut Draws) -> Tensor {
    let numbers = r.signed(dims).to_f64();
    let draw = |number| if r.below(5) == 0 { 0.0 } else { number };
    Tensor::f64(dims, numbers.into_iter().map(draw).collect())
}

/// Windows of a dim, and a size of it that has at least one, mostly with some left over.
fn windows(dim: usize, r: &mut Draws) -> (Windows, usize) {
    let [size, stride, dilation] = [1 + r.below(3), 1 + r.below(3), 1 + r.below(2)];
    (Windows { dim, size, stride, dilation }, (size - 1) * dilation + 1 + r.below(5))
}

fn transpose(dims: &[usize], r: &mut Draws) -> Case {
    let mut perm: Vec<usize> = (0..dims.len()).collect();
    for at in 0..perm.len() {
        perm.swap(at, r.below(dims.len()));
    }
    case(Op::Transpose { perm }, [r.signed(dims)])
}

fn broadcast(dims: &[usize], new: usize, r: &mut Draws) -> Case {
    let mut from = dims.to_vec();
    from.remove(new);
    case(Op::Broadcast { new: vec![new], dims: sizes(dims) }, [r.signed(&from)])
}

/// Some ids lie outside.
fn gather(dims: &[usize], dim: usize, r: &mut Draws) -> Case {
    let (start, count) = (r.below(3) as i64, r.below(3));
    let of = r.dims(count);
    let ids = r.ids(&of, start - 1, start + dims[dim] as i64 + 1);
    case(Op::Gather { dim, start }, [r.signed(dims), ids])
}

/// Some ids lie outside, some stand twice.
fn scatter(dims: &[usize], dim: usize, r: &mut Draws) -> Case {
    let (start, count) = (r.below(3) as i64, r.below(3));
    let of = r.dims(count);
    let ids = r.ids(&of, start - 1, start + dims[dim] as i64 + 1);
    let mut updates = dims.to_vec();
    updates.splice(dim..=dim, of);
    case(Op::Scatter { dim, start }, [r.signed(dims), ids, r.signed(&updates)])
}

fn scatter_add(dims: &[usize], dim: usize, r: &mut Draws) -> Case {
    let (start, size, count) = (r.below(3) as i64, 1 + r.below(3), r.below(3));
    let of = r.dims(count);
    let ids = r.ids(&of, start - 1, start + size as i64 + 1);
    let mut slices = dims.to_vec();
    slices.splice(dim..=dim, of);
    case(Op::ScatterAdd { dim, start, size: Dim::from(size) }, [ids, r.signed(&slices)])
}
