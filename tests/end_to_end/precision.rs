//! Functions of several element types: kernels against the interpreter, bit by bit.
//!
//! Numbers are those that a wrong choice of the compute type, of an order or of a store changes:
//! no number at all, infinities, integers that f32 does not have, and such that overflow.

use std::collections::BTreeMap;

use ir::build::Builder;
use ir::eval::eval;
use ir::op::{Binary, Combiner, Comparison, Op, Unary};
use ir::{DType, Dim, Kind, Module, Tensor, TensorType, ValueId};

use crate::draws::{Draws, seeds};
use crate::operators::compiled;

const TYPES: [DType; 5] = [DType::F32, DType::F64, DType::I32, DType::U32, DType::Bool];

fn element(dtype: DType, r: &mut Draws) -> f64 {
    let whole = [0.0, 1.0, 3.0, 100.0, 1_000_003.0, 16_777_216.0, 16_777_217.0, 2_147_483_647.0];
    let signed = [-1.0, -7.0, -65_537.0, -16_777_219.0, -2_147_483_648.0];
    let unsigned = [4_294_967_295.0, 4_000_000_001.0, 2_147_483_648.0];
    let float = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0, 1e8, 3e38, -1e-9];
    let drawn = [r.number(-2.0, 2.0); 8];
    let all = if dtype == DType::Bool {
        whole[..2].to_vec()
    } else if dtype == DType::I32 {
        [&whole[..], &signed].concat()
    } else if dtype == DType::U32 {
        [&whole[..], &unsigned].concat()
    } else {
        [&whole[..4], &float, &drawn].concat()
    };
    all[r.below(all.len())]
}

fn tensor(dtype: DType, dims: &[usize], r: &mut Draws) -> Tensor {
    let count: usize = dims.iter().product();
    Tensor::from_f64(dtype, dims, (0..count).map(|_| element(dtype, r)).collect())
}

/// A function of up to fourteen nodes over `[R, C]` and `[R]`, and its operands.
struct Writer<'m, 'r> {
    b: Builder<'m>,
    r: &'r mut Draws,
    dims: [usize; 2],
    values: Vec<ValueId>,
    operands: Vec<Tensor>,
}

impl Writer<'_, '_> {
    fn param(&mut self, dtype: DType, is_wide: bool) -> ValueId {
        let dims = &self.dims[..if is_wide { 2 } else { 1 }];
        self.operands.push(tensor(dtype, dims, self.r));
        self.b.param(&format!("x{}", self.operands.len()), TensorType::of(dtype, dims))
    }

    fn pick(&mut self, fits: impl Fn(&TensorType) -> bool) -> Option<ValueId> {
        let fitting: Vec<ValueId> =
            self.values.iter().copied().filter(|value| fits(self.b.ty(*value))).collect();
        (!fitting.is_empty()).then(|| fitting[self.r.below(fitting.len())])
    }

    /// Two values of one type.
    fn pair(&mut self, fits: impl Fn(&TensorType) -> bool) -> Option<(ValueId, ValueId)> {
        let a = self.pick(fits)?;
        let ty = self.b.ty(a).clone();
        Some((a, self.pick(|other| *other == ty)?))
    }

    fn node(&mut self, name: &str) -> Option<ValueId> {
        let wide: Vec<Dim> = self.dims.map(Dim::from).to_vec();
        let is_number = |ty: &TensorType| ty.dtype != DType::Bool;
        let is_signed = |ty: &TensorType| ty.dtype.is_float() || ty.dtype == DType::I32;
        Some(match self.r.below(14) {
            0..4 => {
                let (a, c) = self.pair(is_number)?;
                let all = [Binary::Add, Binary::Sub, Binary::Mul, Binary::Max, Binary::Min];
                self.b.binary(name, all[self.r.below(5)], a, c)
            }
            4 | 5 => {
                let (a, c) = self.pair(is_number)?;
                let all = [Comparison::Eq, Comparison::Lt, Comparison::Le];
                self.b.compare(name, all[self.r.below(3)], a, c)
            }
            6 | 7 => {
                let condition = self.pick(|ty| ty.dtype == DType::Bool)?;
                let dims = self.b.ty(condition).dims.clone();
                let (a, c) = self.pair(|ty| ty.dims == dims)?;
                self.b.push(name, Op::Select, &[condition, a, c])
            }
            8 | 9 => {
                let x = self.pick(|_| true)?;
                let dtype = TYPES[self.r.below(5)];
                if dtype == self.b.ty(x).dtype {
                    return None;
                }
                self.b.push(name, Op::Cast { dtype }, &[x])
            }
            10 => {
                let x = self.pick(|ty| ty.ndim() == 1)?;
                self.b.push(name, Op::Broadcast { new: vec![1], dims: wide }, &[x])
            }
            11 => {
                let x = self.pick(|ty| ty.dtype.is_float() && ty.ndim() == 2)?;
                let how = [Combiner::Max, Combiner::Min][self.r.below(2)];
                self.b.reduce(name, how, vec![1], x)
            }
            12 => {
                let x = self.pick(is_signed)?;
                let all = [Unary::Neg, Unary::Abs, Unary::Sqrt, Unary::Floor];
                let count = if self.b.ty(x).dtype.is_float() { 4 } else { 2 };
                self.b.unary(name, all[self.r.below(count)], x)
            }
            _ => {
                let dtype = TYPES[self.r.below(4)];
                if self.r.coin() {
                    self.b.iota(name, self.r.below(2), dtype, wide)
                } else {
                    let value = element(dtype, self.r);
                    self.b.constant(name, value, TensorType::of(dtype, &self.dims))
                }
            }
        })
    }
}

fn drawn(r: &mut Draws) -> (Module, Vec<Tensor>) {
    let mut module = Module::new("m");
    let b = Builder::new(&mut module, "f", Kind::Layer);
    let sizes = [0, 1, 2, 5, 9, 40];
    let dims = [sizes[r.below(6)], sizes[r.below(6)]];
    let mut writer = Writer { b, r, dims, values: Vec::new(), operands: Vec::new() };
    for at in 0..4 + writer.r.below(3) {
        let dtype = TYPES[writer.r.below(5)];
        let value = writer.param(dtype, at != 1);
        writer.values.push(value);
    }
    let params = writer.values.len();
    for at in 0..4 + writer.r.below(11) {
        if let Some(value) = writer.node(&format!("n{at}")) {
            writer.values.push(value);
        }
    }
    let made = &writer.values[params..];
    let mut results: Vec<ValueId> =
        made.iter().copied().filter(|_| writer.r.below(3) == 0).collect();
    results.extend(made.last().filter(|last| !results.contains(last)));
    let Writer { b, operands, .. } = writer;
    b.finish(&results);
    (module, operands)
}

#[test]
fn functions_of_several_types_keep_every_bit() {
    let mut beside: BTreeMap<(DType, DType), usize> = BTreeMap::new();
    for seed in seeds(600) {
        let (module, operands) = drawn(&mut Draws::new(seed));
        let function = module.function("f").expect("it was built");
        let what = format!("SEED={seed}\n{module}");
        let found = compiled(&module, "f", &operands).unwrap_or_else(|why| panic!("{what}: {why}"));
        let wanted = eval(&module, "f", &operands).expect("it evaluates");
        assert_eq!(found.len(), wanted.len(), "{what}");
        for (at, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
            for (x, y) in found.iter().zip(wanted.to_f64()) {
                let is_same = x.to_bits() == y.to_bits() || x.is_nan() && y.is_nan();
                assert!(is_same, "{what}\nresult {at}: {x}, not {y}");
            }
        }
        let types = |value: &ValueId| function.ty(*value).dtype;
        for a in function.results.iter().map(types) {
            for b in function.results.iter().map(types) {
                *beside.entry((a, b)).or_default() += 1;
            }
        }
    }
    for a in TYPES {
        for b in TYPES {
            let count = beside.get(&(a, b)).copied().unwrap_or(0);
            assert!(count >= 20 || std::env::var("SEED").is_ok(), "{a} beside {b}: {count} times");
        }
    }
}

/// Zero as an integer has no sign, though what counters are computed in has one.
#[test]
fn zeros_of_integers_have_no_sign() {
    let mut module = Module::new("m");
    let mut b = Builder::new(&mut module, "f", Kind::Layer);
    let ty = |dtype| TensorType::of(dtype, &[4]);
    let count = b.iota("count", 0, DType::I32, vec![Dim::from(4)]);
    let seven = b.constant("seven", -7.0, ty(DType::I32));
    let product = b.binary("product", Binary::Mul, count, seven);
    let minus = b.unary("minus", Unary::Neg, count);
    let size = b.unary("size", Unary::Abs, count);
    let one = b.constant("one", 1.0, ty(DType::F32));
    let mut results = Vec::new();
    for (name, value) in [("a", product), ("b", minus), ("c", size)] {
        let float = b.push(&format!("{name}.float"), Op::Cast { dtype: DType::F32 }, &[value]);
        results.push(b.binary(name, Binary::Div, one, float));
    }
    b.finish(&results);
    let wanted = eval(&module, "f", &[]).expect("it evaluates");
    let found = compiled(&module, "f", &[]).expect("it compiles");
    for (found, wanted) in found.iter().zip(&wanted) {
        assert_eq!(*found, wanted.to_f64());
        assert_eq!(found[0], f64::INFINITY);
    }
}
