//! Integers near the ends of 32, 53 and 64 bits: compiled functions compute what the interpreter
//! does in 64.
//!
//! [`integers`] is a function of a seed: a graph of integers of all types, truths, and casts from
//! and to floating-point numbers, compiled as it is or rewritten, with nothing known of its
//! parameters or their ranges. Nothing of it is refused.

#![allow(clippy::wildcard_enum_match_arm, reason = "few element types are told apart")]

use codegen::function::compile_within;
use codegen::ranges::Range;
use ir::build::Builder;
use ir::eval::eval;
use ir::op::{Binary, Combiner, Comparison, Op, Unary, Windows};
use ir::rewrite::{Options, simplify};
use ir::tensor::Data;
use ir::{DType, Dim, Kind, Module, Tensor, TensorType, ValueId};
use kernels::Kernel;
use runtime::evaluate::Evaluation;

use crate::draws::Draws;

/// What became of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Outcome {
    /// It was compiled to kernels of 32 bits.
    Narrow,
    /// Some of its kernels compute in 64 bits.
    Whole,
}

/// The types of values.
const TYPES: [DType; 6] = [DType::I64, DType::I32, DType::U32, DType::Bool, DType::F32, DType::F64];

/// The elements of a tensor as kernels hold them.
pub(crate) fn bytes(x: &Tensor, dtype: DType) -> Vec<u8> {
    match (&x.data, dtype) {
        (Data::Int(x), DType::I64) => x.iter().flat_map(|x| x.to_le_bytes()).collect(),
        (Data::Int(x), DType::I8) => {
            let byte = |x: &i64| i8::try_from(*x).expect("proved to fit").cast_unsigned();
            x.iter().map(byte).collect()
        }
        (Data::Int(x), DType::U32) => x.iter().flat_map(|x| (*x as u32).to_le_bytes()).collect(),
        (Data::Int(x), _) => {
            let word = |x: &i64| i32::try_from(*x).expect("proved to fit").to_le_bytes();
            x.iter().flat_map(word).collect()
        }
        (Data::Bool(x), _) => x.iter().map(|x| u8::from(*x)).collect(),
        (Data::F32(x), _) => x.iter().flat_map(|x| x.to_le_bytes()).collect(),
        (Data::F64(x), _) => x.iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}

/// A tensor of the type that it had before integers became shorter.
pub(crate) fn tensor(dtype: DType, held: DType, dims: &[usize], bytes: &[u8]) -> Tensor {
    let words = || bytes.as_chunks::<4>().0.iter();
    let longs = || bytes.as_chunks::<8>().0.iter();
    match held {
        DType::I64 => Tensor::int(dtype, dims, longs().map(|b| i64::from_le_bytes(*b)).collect()),
        DType::I32 => {
            Tensor::int(dtype, dims, words().map(|b| i32::from_le_bytes(*b).into()).collect())
        }
        DType::U32 => {
            Tensor::int(dtype, dims, words().map(|b| u32::from_le_bytes(*b).into()).collect())
        }
        DType::Bool => Tensor::bool(dims, bytes.iter().map(|b| *b != 0).collect()),
        DType::F32 => Tensor::f32(dims, words().map(|b| f32::from_le_bytes(*b)).collect()),
        _ => Tensor::f64(dims, longs().map(|b| f64::from_le_bytes(*b)).collect()),
    }
}

/// The results of a function by its kernels, and whether any of these computes in 64 bits; why
/// there are none. The ranges of the parameters that `known` marks are given.
pub(crate) fn compiled(
    module: &Module,
    name: &str,
    args: &[Tensor],
    known: &[bool],
) -> Result<(Vec<Tensor>, bool), String> {
    let range = |param: ValueId| {
        let Data::Int(x) = &args[param.index()].data else { return None };
        let (low, high) = (*x.iter().min()?, *x.iter().max()?);
        known[param.index()].then(|| Range::new(low, high))
    };
    let made = compile_within(module, name, range).map_err(|why| why.headline)?;
    let is_whole = made
        .kernels
        .iter()
        .any(|kernel| matches!(kernel, Kernel::Rows(rows) if rows.dtype == DType::I64));
    let mut evaluation = Evaluation::new(made.routine, &made.kernels, 2).expect("there is memory");
    for (slot, (arg, ty)) in args.iter().zip(&made.params).enumerate() {
        evaluation.write(slot, &bytes(arg, ty.dtype));
    }
    evaluation.run();
    let types = module.function(name).expect("it was built").result_types();
    let result = |(at, (ty, held)): (usize, (&TensorType, &TensorType))| {
        let dims = ty.sizes().expect("sizes are fixed");
        tensor(ty.dtype, held.dtype, &dims, evaluation.read(made.params.len() + at))
    };
    Ok((types.iter().zip(&made.results).enumerate().map(result).collect(), is_whole))
}

/// Whether two tensors have the same bits; any number that is none equals any other.
pub(crate) fn is_same(a: &Tensor, b: &Tensor) -> bool {
    let equal = |a: &f64, b: &f64| a == b || (a.is_nan() && b.is_nan());
    let floats = || a.to_f64().iter().zip(&b.to_f64()).all(|(a, b)| equal(a, b));
    let is_float = a.dtype.is_float();
    a.dtype == b.dtype && a.dims == b.dims && if is_float { floats() } else { a.data == b.data }
}

/// An integer at or beside a power of two, a small one, or any.
fn number(r: &mut Draws) -> i64 {
    let near = r.below(5) as i64 - 2;
    let power = 1_i64 << [31, 32, 53, 62][r.below(4)];
    match r.below(10) {
        0..3 => r.below(12) as i64 - 4,
        3 => near,
        4 | 5 => power + near,
        6 | 7 => -power + near,
        8 => i64::MAX.wrapping_add(near),
        _ => r.word() as i64,
    }
}

fn argument(r: &mut Draws, dtype: DType, dims: &[usize]) -> Tensor {
    let count: usize = dims.iter().product();
    // Some parameters are small throughout, as ids and labels are.
    let is_small = r.below(3) == 0;
    let mut draw = || if is_small { r.below(9) as i64 - 2 } else { number(r) };
    let numbers: Vec<i64> = (0..count).map(|_| draw()).collect();
    match dtype {
        DType::Bool => Tensor::bool(dims, numbers.iter().map(|x| x & 1 == 1).collect()),
        DType::F32 | DType::F64 => {
            let mut of = |x: &i64| match r.below(12) {
                0 => f64::NAN,
                1..4 => *x as f64 / 8.0,
                _ => *x as f64,
            };
            Tensor::from_f64(dtype, dims, numbers.iter().map(&mut of).collect())
        }
        _ => Tensor::int(dtype, dims, numbers),
    }
}

/// A function whose values all have the dims `[rows, columns]`.
struct Writer<'m, 'r> {
    b: Builder<'m>,
    r: &'r mut Draws,
    dims: [usize; 2],
    values: Vec<ValueId>,
}

impl Writer<'_, '_> {
    fn any(&mut self) -> ValueId {
        self.values[self.r.below(self.values.len())]
    }

    fn dtype(&self, value: ValueId) -> DType {
        self.b.ty(value).dtype
    }

    /// A value of a type: one that is there, or a cast of any.
    fn of(&mut self, dtype: DType) -> ValueId {
        let there: Vec<ValueId> =
            self.values.iter().copied().filter(|value| self.dtype(*value) == dtype).collect();
        if there.is_empty() || self.r.below(12) == 0 {
            let x = self.any();
            return self.b.push("cast", Op::Cast { dtype }, &[x]);
        }
        there[self.r.below(there.len())]
    }

    fn integer_type(&mut self) -> DType {
        [DType::I64, DType::I64, DType::I64, DType::I32, DType::U32][self.r.below(5)]
    }

    fn constant(&mut self, dtype: DType) -> ValueId {
        let (low, high) = match dtype {
            DType::I32 => (i32::MIN.into(), i32::MAX.into()),
            DType::U32 => (0, u32::MAX.into()),
            _ => (i64::MIN, i64::MAX - 1023),
        };
        let mut value = number(self.r).clamp(low, high);
        if value as f64 as i64 != value {
            value = value >> 11 << 11;
        }
        let dims = self.dims.map(Dim::from).to_vec();
        self.b.push("c", Op::Constant { value: value as f64, dtype, dims }, &[])
    }

    fn reshaped(&mut self, x: ValueId, dims: &[usize]) -> ValueId {
        let dims = dims.iter().map(|size| Dim::from(*size)).collect();
        self.b.push("view", Op::Reshape { dims }, &[x])
    }

    /// What was reduced along some dims, at every point again.
    fn repeated(&mut self, x: ValueId, new: Vec<usize>) -> ValueId {
        let dims = self.dims.map(Dim::from).to_vec();
        self.b.push("repeated", Op::Broadcast { new, dims }, &[x])
    }

    fn binary(&mut self) -> ValueId {
        let dtype = self.integer_type();
        let a = self.of(dtype);
        let b = if self.r.coin() { self.of(dtype) } else { self.constant(dtype) };
        match self.r.below(9) {
            7 => {
                // The rest of a division.
                let quotient = self.b.binary("quotient", Binary::Div, a, b);
                let whole = self.b.binary("whole", Binary::Mul, quotient, b);
                self.b.binary("rest", Binary::Sub, a, whole)
            }
            8 => {
                // A shift, by arithmetic.
                let power = (1_u64 << self.r.below(31)) as f64;
                let dims = self.dims.map(Dim::from).to_vec();
                let power = self.b.push("power", Op::Constant { value: power, dtype, dims }, &[]);
                let how = if self.r.coin() { Binary::Mul } else { Binary::Div };
                self.b.binary("shifted", how, a, power)
            }
            how => self.b.binary("y", Binary::ALL[how], a, b),
        }
    }

    fn sum(&mut self) -> ValueId {
        let dims = [vec![0], vec![1], vec![0, 1]][self.r.below(3)].clone();
        let dim = dims[0];
        let dtype = self.integer_type();
        let x = self.of(dtype);
        match self.r.below(6) {
            0 => {
                let x = self.b.push("product", Op::Prod { dims: dims.clone() }, &[x]);
                self.repeated(x, dims)
            }
            1 => {
                let combiner = Combiner::ALL[self.r.below(3)];
                self.b.push("running", Op::Cumulative { combiner, dim }, &[x])
            }
            2 => {
                let x = self.b.push("largest", Op::ArgMax { dim }, &[x]);
                self.repeated(x, vec![dim])
            }
            3 => {
                let descending = self.r.coin();
                self.b.push("order", Op::Sort { dim, descending }, &[x])
            }
            _ => {
                let x = if self.r.below(4) == 0 { self.of(DType::Bool) } else { x };
                let combiner = Combiner::ALL[self.r.below(3)];
                let x = self.b.reduce("reduced", combiner, dims.clone(), x);
                self.repeated(x, dims)
            }
        }
    }

    fn look_up(&mut self) -> ValueId {
        let count = self.dims[0] * self.dims[1];
        let dims = self.dims;
        let of_ids = self.integer_type();
        let ids = self.of(of_ids);
        let start = [0, 0, 2, -3][self.r.below(4)].max(0);
        let dtype = if self.r.below(4) == 0 { DType::Bool } else { self.integer_type() };
        let table = self.of(dtype);
        let table = self.reshaped(table, &[count]);
        let dim = 0;
        match self.r.below(4) {
            0 if dtype != DType::Bool => {
                let x = self.of(dtype);
                let op = Op::ScatterAdd { dim, start, size: Dim::from(count) };
                let sums = self.b.push("sums", op, &[ids, x]);
                self.reshaped(sums, &dims)
            }
            1 => {
                let x = self.of(dtype);
                let made = self.b.push("replaced", Op::Scatter { dim, start }, &[table, ids, x]);
                self.reshaped(made, &dims)
            }
            _ => self.b.push("found", Op::Gather { dim, start }, &[table, ids]),
        }
    }

    fn moved(&mut self) -> ValueId {
        let x = self.any();
        let [rows, columns] = self.dims;
        match self.r.below(7) {
            0 => {
                let x = self.b.push("turned", Op::Transpose { perm: vec![1, 0] }, &[x]);
                self.reshaped(x, &[rows, columns])
            }
            1 => self.b.push("reversed", Op::Reverse { dims: vec![self.r.below(2)] }, &[x]),
            2 => {
                let start = self.r.below(columns);
                let part = Op::Slice { dim: 1, start, size: columns - start };
                let part = self.b.push("part", part, &[x]);
                self.b.push("padded", Op::Pad { dim: 1, before: start, after: 0 }, &[part])
            }
            3 => {
                let dtype = self.dtype(x);
                let other = self.of(dtype);
                let both = self.b.push("both", Op::Concat { dim: 0 }, &[x, other]);
                let start = self.r.below(rows + 1);
                self.b.push("part", Op::Slice { dim: 0, start, size: rows }, &[both])
            }
            4 => {
                let dtype = self.integer_type();
                let x = self.of(dtype);
                let x = self.b.push("padded", Op::Pad { dim: 1, before: 1, after: 1 }, &[x]);
                let windows = Windows { dim: 1, size: 3, stride: 1, dilation: 1 };
                let windows = self.b.push("windows", Op::Window(windows), &[x]);
                let combiner = Combiner::ALL[self.r.below(3)];
                self.b.reduce("pooled", combiner, vec![2], windows)
            }
            5 => {
                let dtype = self.integer_type();
                // The last number is one of the type, too.
                let (low, high) = match dtype {
                    DType::I32 => (i32::MIN.into(), i64::from(i32::MAX) - 2000),
                    DType::U32 => (0, i64::from(u32::MAX) - 2000),
                    _ => (i64::MIN, i64::MAX - 4000),
                };
                let start = number(self.r).clamp(low, high);
                let dims = self.dims.map(Dim::from).to_vec();
                self.b.push("count", Op::Iota { dim: self.r.below(2), start, dtype, dims }, &[])
            }
            _ => {
                let dtype = [DType::F32, DType::F64][self.r.below(2)];
                let (x, y) = (self.of(dtype), self.of(dtype));
                match self.r.below(3) {
                    0 => self.b.unary("floor", Unary::Floor, x),
                    1 => self.b.binary("less", Binary::Min, x, y),
                    _ => self.b.unary("minus", Unary::Neg, x),
                }
            }
        }
    }

    fn next(&mut self) {
        let value = match self.r.below(12) {
            0..4 => self.binary(),
            4 => {
                let dtype = [DType::I64, DType::I32][self.r.below(2)];
                let x = self.of(dtype);
                self.b.unary("u", [Unary::Neg, Unary::Abs][self.r.below(2)], x)
            }
            5 => {
                let a = self.any();
                let dtype = self.dtype(a);
                let is_number = !dtype.is_float() && dtype != DType::Bool;
                let b = match is_number && self.r.coin() {
                    true => self.constant(dtype),
                    false => self.of(dtype),
                };
                self.b.push("compared", Op::Compare(Comparison::ALL[self.r.below(3)]), &[a, b])
            }
            6 => {
                let a = self.any();
                let dtype = self.dtype(a);
                let (c, b) = (self.of(DType::Bool), self.of(dtype));
                self.b.push("chosen", Op::Select, &[c, a, b])
            }
            7 => {
                let x = self.any();
                let dtype = TYPES[self.r.below(6)];
                self.b.push("cast", Op::Cast { dtype }, &[x])
            }
            8 | 9 => self.sum(),
            10 => self.look_up(),
            _ => self.moved(),
        };
        self.values.push(value);
    }
}

/// A case of a seed.
///
/// # Panics
/// When it is refused, or a result is another one than the interpreter's.
pub(crate) fn integers(seed: u64) -> Outcome {
    let mut r = Draws::new(seed);
    let dims = match r.below(12) {
        // Rows that are cut, and as many as make tasks.
        0 => [3, 1500],
        1 => [1500, 3],
        _ => [1 + r.below(4), 1 + r.below(6)],
    };
    let types: Vec<DType> = (0..2 + r.below(4))
        .map(|at| if at == 0 { DType::I64 } else { TYPES[r.below(6)] })
        .collect();
    let args: Vec<Tensor> = types.iter().map(|dtype| argument(&mut r, *dtype, &dims)).collect();
    let mut module = Module::new("m");
    let mut b = Builder::new(&mut module, "f", Kind::Layer);
    let values: Vec<ValueId> =
        args.iter().enumerate().map(|(at, x)| b.param(&format!("x{at}"), x.ty())).collect();
    let params = values.len();
    let count = 2 + r.below(12);
    let mut writer = Writer { b, r: &mut r, dims, values };
    (0..count).for_each(|_| writer.next());
    let Writer { b, values, .. } = writer;
    let results: Vec<ValueId> = values[params..].iter().rev().take(4).copied().collect();
    b.finish(&results);
    let wanted = eval(&module, "f", &args).expect("it evaluates");
    let mut rewritten = module.clone();
    if r.coin() {
        simplify(&mut rewritten, &Options::default());
    }
    let known: Vec<bool> = args.iter().map(|_| r.below(3) == 0).collect();
    let what = format!("SEED={seed}\n{module}\n{rewritten}\n{args:?}");
    let (found, is_whole) = compiled(&rewritten, "f", &args, &known)
        .unwrap_or_else(|why| panic!("refused: {why}\n{what}"));
    let names = results.iter().map(|id| module.function("f").expect("built").value(*id));
    for ((found, wanted), value) in found.iter().zip(&wanted).zip(names) {
        let name = &value.name;
        assert!(is_same(found, wanted), "`%{name}` is {found:?}, not {wanted:?}\n{what}");
    }
    if is_whole { Outcome::Whole } else { Outcome::Narrow }
}

#[cfg(test)]
mod tests {
    use ir::import::onnx::{ENTRY, Given, read_onnx};

    use super::*;
    use crate::draws::seeds;

    #[test]
    fn graphs_of_integers_compute_what_the_interpreter_does() {
        let outcomes: Vec<Outcome> = seeds(150).into_iter().map(integers).collect();
        let count = |of: Outcome| outcomes.iter().filter(|outcome| **outcome == of).count();
        let enough = count(Outcome::Whole) >= 100 && count(Outcome::Narrow) >= 5;
        assert!(enough || std::env::var("SEED").is_ok(), "{outcomes:?}");
    }

    /// The results of one function of parameters, by its kernels with nothing known of them, each
    /// equal to the interpreter's.
    fn run(args: &[Tensor], build: impl Fn(&mut Builder, &[ValueId]) -> ValueId) -> Tensor {
        let mut module = Module::new("m");
        let mut b = Builder::new(&mut module, "f", Kind::Layer);
        let params: Vec<ValueId> =
            args.iter().enumerate().map(|(at, x)| b.param(&format!("x{at}"), x.ty())).collect();
        let result = build(&mut b, &params);
        b.finish(&[result]);
        let known = vec![false; args.len()];
        let (mut found, _) = compiled(&module, "f", args, &known).expect("it has kernels");
        let wanted = eval(&module, "f", args).expect("it evaluates");
        assert!(is_same(&found[0], &wanted[0]), "{found:?}, not {wanted:?} of\n{module}");
        found.remove(0)
    }

    fn longs(numbers: &[i64]) -> Tensor {
        Tensor::int(DType::I64, &[numbers.len()], numbers.to_vec())
    }

    fn constant(b: &mut Builder, value: f64, size: usize) -> ValueId {
        let dims = vec![Dim::from(size)];
        b.push("c", Op::Constant { value, dtype: DType::I64, dims }, &[])
    }

    const TWO_31: i64 = 1 << 31;

    #[test]
    fn sums_and_products_leave_32_bits() {
        let sum = run(&[longs(&[TWO_31 - 1])], |b, x| {
            let ten = constant(b, 10.0, 1);
            b.binary("y", Binary::Add, x[0], ten)
        });
        assert_eq!(sum, longs(&[TWO_31 + 9]));
        let quotient = run(&[longs(&[5000])], |b, x| {
            let (million, thousand) = (constant(b, 1e6, 1), constant(b, 1e3, 1));
            let product = b.binary("p", Binary::Mul, x[0], million);
            b.binary("y", Binary::Div, product, thousand)
        });
        assert_eq!(quotient, longs(&[5_000_000]));
    }

    #[test]
    fn casts_and_constants_keep_64_bits() {
        let cast = Op::Cast { dtype: DType::I64 };
        let found =
            run(&[Tensor::f32(&[2], vec![1e12, -3e18])], |b, x| b.push("y", cast.clone(), &[x[0]]));
        assert_eq!(found, longs(&[999_999_995_904, -3e18_f32 as i64]));
        // Above 2^31, without a sign.
        let unsigned = Tensor::int(DType::U32, &[2], vec![TWO_31 + 5, 7]);
        let found = run(&[unsigned], |b, x| b.push("y", cast.clone(), &[x[0]]));
        assert_eq!(found, longs(&[TWO_31 + 5, 7]));
        let found = run(&[], |b, _| constant(b, 40.0_f64.exp2(), 2));
        assert_eq!(found, longs(&[1 << 40, 1 << 40]));
    }

    #[test]
    fn comparisons_and_choices_see_64_bits() {
        let args = [longs(&[TWO_31, TWO_31 - 1, -TWO_31, TWO_31 + (1 << 32)])];
        let found = run(&args, |b, x| {
            let bound = constant(b, 31.0_f64.exp2(), 4);
            b.push("y", Op::Compare(Comparison::Eq), &[x[0], bound])
        });
        assert_eq!(found, Tensor::bool(&[4], vec![true, false, false, false]));
        let found = run(&args, |b, x| {
            let bound = constant(b, 40.0_f64.exp2(), 4);
            let less = b.push("less", Op::Compare(Comparison::Lt), &[x[0], bound]);
            b.push("y", Op::Select, &[less, bound, x[0]])
        });
        assert_eq!(found, longs(&[1 << 40; 4]));
    }

    #[test]
    fn running_sums_and_products_leave_32_bits() {
        let args = [longs(&[TWO_31 - 1, TWO_31 - 1, 3, -5])];
        let op = Op::Cumulative { combiner: Combiner::Sum, dim: 0 };
        let found = run(&args, |b, x| b.push("y", op.clone(), &[x[0]]));
        let total = 2 * TWO_31 - 2;
        assert_eq!(found, longs(&[TWO_31 - 1, total, total + 3, total - 2]));
        let found = run(&args, |b, x| b.push("y", Op::Prod { dims: vec![0] }, &[x[0]]));
        let product = (TWO_31 - 1).wrapping_mul(TWO_31 - 1).wrapping_mul(-15);
        assert_eq!(found, Tensor::int(DType::I64, &[], vec![product]));
        let found = run(&args, |b, x| b.reduce("y", Combiner::Sum, vec![0], x[0]));
        assert_eq!(found, Tensor::int(DType::I64, &[], vec![total - 2]));
    }

    /// An id of more than 32 bits is outside of the table, and not the one that it is modulo 2^32.
    #[test]
    fn ids_are_not_taken_modulo_32_bits() {
        let ids = longs(&[5, (1 << 32) + 5, i64::MIN + 5, -(1 << 32), 0]);
        let table = Tensor::f32(&[6], (1..7).map(|x| x as f32).collect());
        let found = run(&[table, ids], |b, x| b.push("y", Op::Gather { dim: 0, start: 0 }, x));
        assert_eq!(found, Tensor::f32(&[5], vec![6.0, 0.0, 0.0, 0.0, 1.0]));
    }

    /// A field of a protobuf message that is a message, a text or packed numbers.
    fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
        assert!(bytes.len() < 128, "a length is one byte");
        [&[number << 3 | 2, bytes.len() as u8], bytes].concat()
    }

    /// An ONNX file of one operator, of `x` of `int64[2, 2]` and stored scalars, that yields `y`.
    fn model(op: &str, scalars: &[i64]) -> Vec<u8> {
        let name = |at: usize| format!("c{at}");
        let mut node = field(1, b"x");
        let mut graph = Vec::new();
        for (at, value) in scalars.iter().enumerate() {
            node.extend(field(1, name(at).as_bytes()));
            let raw = field(9, &value.to_le_bytes());
            graph.extend(field(5, &[vec![2 << 3, 7], field(8, name(at).as_bytes()), raw].concat()));
        }
        node.extend([field(2, b"y"), field(4, op.as_bytes())].concat());
        let two = field(1, &[1 << 3, 2]);
        let ty = [vec![1 << 3, 7], field(2, &[two.clone(), two].concat())].concat();
        let port = |name: &[u8]| [field(1, name), field(2, &field(1, &ty))].concat();
        graph.extend([field(1, &node), field(11, &port(b"x")), field(12, &port(b"y"))].concat());
        [vec![1 << 3, 8], field(8, &[2 << 3, 18]), field(7, &graph)].concat()
    }

    /// What is stored in a file and is no number of binary64, and a diagonal that wraps.
    #[test]
    fn files_keep_64_bits() {
        let x = Tensor::int(DType::I64, &[2, 2], vec![1, 2, (1 << 53) + 7, i64::MIN]);
        let run = |op: &str, scalars: &[i64]| {
            let mut open = |_: &str| Err("nothing is beside it".to_owned());
            let bytes = bytes::Bytes::from(model(op, scalars));
            let onnx = read_onnx(op, op, bytes, &Given::default(), &mut open).expect("a model");
            let mut args: Vec<Tensor> = onnx.weights.iter().map(|(_, w)| w.tensor()).collect();
            args.push(x.clone());
            let known: Vec<bool> = (0..args.len()).map(|at| at + 1 < args.len()).collect();
            let (mut found, _) = compiled(&onnx.module, ENTRY, &args, &known).expect("kernels");
            found.remove(0)
        };
        let of = |numbers: [i64; 4]| Tensor::int(DType::I64, &[2, 2], numbers.to_vec());
        let (low, high) = (2, (1 << 53) + 1);
        assert_eq!(run("Clip", &[low, high]), of([2, 2, high, 2]));
        let sums = of([high + 1, high + 2, 2 * high + 6, i64::MIN + high]);
        assert_eq!(run("Add", &[high]), sums);
        // The upper triangle from a diagonal on that no element reaches.
        assert_eq!(run("Trilu", &[i64::MAX]), of([0; 4]));
        assert_eq!(run("Trilu", &[i64::MIN]), x);
    }

    /// What is proved to fit runs in 32 bits, counters and small constants among it.
    #[test]
    fn what_fits_stays_in_32_bits() {
        let mut module = Module::new("m");
        let mut b = Builder::new(&mut module, "f", Kind::Layer);
        let ids = b.param("ids", TensorType::of(DType::I64, &[4]));
        let op = Op::Iota { dim: 0, start: 0, dtype: DType::I64, dims: vec![Dim::from(4)] };
        let places = b.push("places", op, &[]);
        let seven = constant(&mut b, 7.0, 4);
        let scaled = b.binary("scaled", Binary::Mul, places, seven);
        let sum = b.binary("sum", Binary::Add, scaled, ids);
        b.finish(&[sum]);
        let args = [longs(&[0, 9, 3, 5])];
        let (known, is_whole) = compiled(&module, "f", &args, &[true]).expect("it has kernels");
        assert!(!is_whole, "ids below ten are known to fit");
        let (unknown, is_whole) = compiled(&module, "f", &args, &[false]).expect("it has kernels");
        assert!(is_whole && known == unknown, "{known:?}, {unknown:?}");
    }
}
