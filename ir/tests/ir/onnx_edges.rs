//! Edges of ONNX operators: ends of types, infinities, nothing at all, and numbers without a sign.

use bytes::Bytes;
use gantline_ir::eval::eval;
use gantline_ir::import::onnx::{Array, ENTRY, Element, Given, Numbers, read_onnx};
use gantline_ir::rewrite::{Options, simplify};
use gantline_ir::{DType, Tensor};

use crate::draws::{Draws, seeds};
use crate::onnx_file::{
    attribute, branch, file, int, ints, model, node, number, port, stored, stored_floats,
};
use crate::onnx_refused::{computed, said};

const INFINITY: f32 = f32::INFINITY;

fn cast(from: &str, to: &str, element: i64) -> Vec<u8> {
    node("Cast", &[from], &[to], &[int("to", element)])
}

#[test]
fn reductions_of_integers_infinities_and_nothing() {
    let mean = [cast("x", "i", 6), node("ReduceMean", &["i"], &["y"], &[int("keepdims", 0)])];
    assert_eq!(computed(&[-3.0, -3.0, -4.0], &mean), [-3.0]);
    let log = [node("ReduceLogSumExp", &["x"], &["y"], &[int("keepdims", 0)])];
    assert_eq!(computed(&[-INFINITY, -INFINITY], &log), [f64::NEG_INFINITY]);
    assert_eq!(computed(&[INFINITY, 1.0, -INFINITY], &log), [f64::INFINITY]);
    assert!(computed(&[f32::NAN, 1.0], &log)[0].is_nan());
    let none = [stored("s", &[1], &[0]), stored("e", &[1], &[0])];
    let none = [none.concat(), node("Slice", &["x", "s", "e"], &["n"], &[])].concat();
    // The number of the type, and the largest and the least of nothing.
    for (element, most, least) in [
        (1, f64::NEG_INFINITY, f64::INFINITY),
        (3, -128.0, 127.0),
        (2, 0.0, 255.0),
        (6, -2_147_483_648.0, 2_147_483_647.0),
        (12, 0.0, 4_294_967_295.0),
        (9, 0.0, 1.0),
    ] {
        for (operator, wanted) in [("ReduceMax", most), ("ReduceMin", least)] {
            let reduce = node(operator, &["c"], &["y"], &[int("keepdims", 0)]);
            let parts = [none.clone(), cast("n", "c", element), reduce];
            assert_eq!(computed(&[1.0], &parts), [wanted], "{operator} of {element}");
        }
    }
}

#[test]
fn signs_hyperbolic_sines_and_slices_backwards() {
    let sign = computed(&[f32::NAN, -2.0, 0.0, 3.0], &[node("Sign", &["x"], &["y"], &[])]);
    assert!(sign[0].is_nan() && sign[1..] == [-1.0, 0.0, 1.0]);
    let x = [88.8, -89.3, 1e-4, -0.75, 0.0];
    for (operator, of) in [("Sinh", f64::sinh as fn(f64) -> f64), ("Cosh", f64::cosh)] {
        for (found, x) in computed(&x, &[node(operator, &["x"], &["y"], &[])]).iter().zip(x) {
            let wanted = of(f64::from(x));
            let off = (found - wanted).abs() / wanted.abs().max(f64::from(f32::MIN_POSITIVE));
            assert!(off < 1e-6, "{operator} of {x}: {found}, not {wanted}");
        }
    }
    for (start, end, wanted) in
        [(-10, -20, &[1.0][..]), (-3, -20, &[1.0]), (10, 0, &[3.0, 2.0]), (0, 2, &[])]
    {
        let lists = [
            stored("s", &[1], &[start]),
            stored("e", &[1], &[end]),
            stored("a", &[1], &[0]),
            stored("b", &[1], &[-1]),
        ];
        let slice = node("Slice", &["x", "s", "e", "a", "b"], &["y"], &[]);
        assert_eq!(computed(&[1.0, 2.0, 3.0], &[lists.concat(), slice]), wanted);
    }
}

/// What a run of a graph of an input `x` of floats is refused for; nothing where it is not.
fn demanded(x: &[f32], parts: &[Vec<u8>]) -> Vec<String> {
    let bytes = Bytes::from(file(18, &[x.len() as i64], parts));
    let mut open = |_: &str| Err("nothing is beside it".to_owned());
    let read = read_onnx("test.onnx", "test", bytes, &Given::default(), &mut open);
    let onnx = read.unwrap_or_else(|found| panic!("{found:?}"));
    let weights = onnx.weights.iter().map(|(_, held)| held.tensor());
    let args: Vec<Tensor> = weights.chain([Tensor::f32(&[x.len()], x.to_vec())]).collect();
    let results = eval(&onnx.module, ENTRY, &args).unwrap();
    let numbers = &results[onnx.outputs.len()..];
    assert_eq!(numbers.len(), onnx.checks.len());
    onnx.checks.iter().zip(numbers).filter_map(|(c, n)| c.wrong(n.scalar())).collect()
}

#[test]
fn ids_that_are_not_there_are_refused_when_they_are_seen() {
    let table = || stored_floats("t", &[1.0, 2.0, 3.0]);
    let ids = || cast("x", "i", 7);
    let pairs =
        || [stored("s", &[2], &[-1, 1]), node("Reshape", &["i", "s"], &["p"], &[])].concat();
    for (name, nodes) in [
        ("Gather", vec![node("Gather", &["t", "i"], &["y"], &[])]),
        ("GatherElements", vec![node("GatherElements", &["t", "i"], &["y"], &[])]),
        ("GatherND", vec![pairs(), node("GatherND", &["t", "p"], &["y"], &[])]),
        ("ScatterElements", vec![node("ScatterElements", &["t", "i", "x"], &["y"], &[])]),
        ("ScatterND", vec![pairs(), node("ScatterND", &["t", "p", "x"], &["y"], &[])]),
    ] {
        let parts: Vec<Vec<u8>> = [vec![table(), ids()], nodes].concat();
        assert_eq!(demanded(&[0.0, -3.0, 2.0], &parts), [""; 0], "{name}");
        for wrong in [3.0, -4.0, 2_147_483_648.0, -9e18] {
            let found = demanded(&[0.0, wrong, 2.0], &parts);
            assert!(found.len() == 1 && found[0].contains("of 3"), "{name} of {wrong}: {found:?}");
        }
    }
    // A branch that is not taken reads nothing.
    let gather = [node("Gather", &["t", "i"], &["g"], &[])];
    let other = [node("Neg", &["x"], &["g"], &[])];
    let branches = [branch("then_branch", &gather, "g"), branch("else_branch", &other, "g")];
    let first = [stored("z", &[1], &[0]), node("Gather", &["x", "z"], &["f"], &[])].concat();
    let is_positive = [cast("z", "zero", 1), node("Less", &["zero", "f"], &["c"], &[])].concat();
    let parts = [table(), ids(), first, is_positive, node("If", &["c"], &["y"], &branches)];
    assert_eq!(demanded(&[-1.0, 7.0], &parts), [""; 0]);
    assert_eq!(demanded(&[1.0, 7.0], &parts).len(), 1);
}

#[test]
fn what_is_too_large_is_refused_with_the_bound() {
    let pool = |attributes: &[Vec<u8>]| {
        let image = [stored("s", &[3], &[1, 1, -1]), node("Reshape", &["x", "s"], &["i"], &[])];
        [image.concat(), node("MaxPool", &["i"], &["y"], attributes)].concat()
    };
    let kernel = |size: i64| ints("kernel_shape", &[size]);
    let pad = |pads: [i64; 2]| [node("Pad", &["x", "p"], &["y"], &[]), stored("p", &[2], &pads)];
    let huge = 1 << 62;
    for (part, wanted) in [
        (pool(&[kernel(huge)]), "of more than 2^24"),
        (pool(&[kernel(2), ints("dilations", &[huge])]), "of more than 2^24"),
        (pool(&[kernel(2), ints("strides", &[huge])]), "of more than 2^24"),
        (pool(&[kernel(2), ints("pads", &[huge, huge])]), "of more than 2^24"),
        (pad([huge, 0]).concat(), "of more than 2^33"),
        (pad([-huge, i64::MIN]).concat(), "of more than 2^33"),
        (pad([1 << 33, 1]).concat(), "of more than 2^33 elements"),
        (
            [node("Expand", &["x", "p"], &["y"], &[]), stored("p", &[2], &[huge, 4])].concat(),
            "of more than 2^33 elements",
        ),
        ([cast("x", "i", 6), node("Gelu", &["i"], &["y"], &[])].concat(), "elements of type i32"),
    ] {
        let text = said(file(20, &[4], &[part]));
        assert!(text.starts_with("E1111") && text.contains(wanted), "{wanted}: {text}");
    }
    let softmax = node("Softmax", &["x"], &["y"], &[]);
    let text = said(file(20, &[1 << 40, 1 << 40], &[softmax]));
    assert!(text.contains("more than 2^33 elements"), "{text}");
}

#[test]
fn inputs_are_of_their_type_or_refused() {
    let array = |numbers: Numbers| Array { dims: vec![1], numbers };
    let whole = |element: Element, number: i128| {
        let found = element.tensor_of(&array(Numbers::Whole(vec![number])));
        found.map(|tensor| tensor.to_f64()[0])
    };
    let real = |element: Element, number: f64| {
        let found = element.tensor_of(&array(Numbers::Real(vec![number])));
        found.map(|tensor| tensor.to_f64()[0])
    };
    for (element, low, high) in [
        (Element::I8, -128, 127),
        (Element::U8, 0, 255),
        (Element::I32, i128::from(i32::MIN), i128::from(i32::MAX)),
        (Element::U32, 0, i128::from(u32::MAX)),
        (Element::Bool, 0, 1),
    ] {
        assert_eq!(whole(element, low), Ok(low as f64));
        assert_eq!(whole(element, high), Ok(high as f64));
        assert_eq!(real(element, high as f64), Ok(high as f64));
        for outside in [low - 1, high + 1, 1 << 40, 1 << 100] {
            assert_eq!(whole(element, outside), Err(outside.to_string()), "{}", element.name());
        }
        assert!(real(element, 0.5).is_err() && real(element, f64::NAN).is_err());
    }
    // Held as the number with a sign that has its bits.
    assert_eq!(whole(Element::U64, (1 << 64) - 1), Ok(-1.0));
    assert!(whole(Element::U64, -1).is_err() && whole(Element::U64, 1 << 64).is_err());
    assert!(whole(Element::I64, 1 << 63).is_err() && real(Element::I64, 1e19).is_err());
    assert_eq!(real(Element::F16, 65_519.0), Ok(65_504.0));
    assert!(real(Element::F16, 65_520.0).is_err() && real(Element::F32, 1e39).is_err());
    assert!(real(Element::F8E4M3, f64::INFINITY).is_err());
    assert_eq!(real(Element::F16, f64::INFINITY), Ok(f64::INFINITY));
}

/// A file of inputs `a` and `b` of an element type and one node, which yields `y`.
fn of_two(element: u64, size: i64, node: &[u8]) -> Vec<u8> {
    let inputs = ["a", "b"].map(|name| port(11, name, element, &[size]));
    model(&[node.to_vec(), inputs.concat(), port(12, "y", element, &[])], &[])
}

/// What Rust's `u64` yields for numbers near the ends and the middle of the type.
#[test]
fn numbers_without_a_sign_are_compared_and_divided_as_such() {
    type Operator = (&'static str, Vec<Vec<u8>>, fn(u64, u64) -> u64);
    let operators: [Operator; 10] = [
        ("Less", vec![], |a, b| (a < b).into()),
        ("GreaterOrEqual", vec![], |a, b| (a >= b).into()),
        ("Max", vec![], u64::max),
        ("Min", vec![], u64::min),
        ("Div", vec![], |a, b| a / b),
        ("Mod", vec![], |a, b| a % b),
        ("Mod", vec![int("fmod", 1)], |a, b| a % b),
        ("Mul", vec![], u64::wrapping_mul),
        ("Sub", vec![], u64::wrapping_sub),
        ("BitwiseAnd", vec![], |a, b| a & b),
    ];
    for seed in seeds(20) {
        let mut r = Draws::new(seed);
        let mut draw = || {
            let near = [0, 1 << 31, 1 << 32, 1 << 53, 1 << 63, u64::MAX][r.below(6)];
            let far = [3, 1 << 20, u64::MAX][r.below(3)];
            near.wrapping_add(r.word() % far).wrapping_sub(r.word() % 3)
        };
        let a: Vec<u64> = (0..64).map(|_| draw()).collect();
        let b: Vec<u64> = (0..64).map(|_| draw().max(1)).collect();
        for (operator, attributes, of) in &operators {
            let file = of_two(13, 64, &node(operator, &["a", "b"], &["y"], attributes));
            let (found, _) = unsigned(file, &a, &b);
            for (at, found) in found.iter().enumerate() {
                let (a, b) = (a[at], b[at]);
                assert_eq!(*found, of(a, b), "SEED={seed}: {operator} of {a} and {b}");
            }
        }
        let most = node("ReduceMax", &["a"], &["y"], &[int("keepdims", 0)]);
        assert_eq!(unsigned(of_two(13, 64, &most), &a, &b).0, [*a.iter().max().unwrap()]);
        let largest = node("ArgMax", &["a"], &["y"], &[int("keepdims", 0)]);
        let at = unsigned(of_two(13, 64, &largest), &a, &b).0[0] as usize;
        assert_eq!(a[at], *a.iter().max().unwrap(), "SEED={seed}");
        for (element, nearest) in [(1, false), (11, true)] {
            let real = unsigned(of_two(13, 64, &cast("a", "y", element)), &a, &b).1;
            for (a, found) in a.iter().zip(real) {
                let wanted = if nearest { *a as f64 } else { f64::from(*a as f32) };
                assert_eq!(found, wanted, "SEED={seed}: {a}");
            }
        }
    }
}

/// What is one beside 2^64 is far from it where it is held: rewriting keeps all bits of it.
#[test]
fn constants_without_a_sign_keep_their_bits() {
    let most = [stored("s", &[1], &[-5]), cast("s", "k", 13)];
    for (operator, wanted) in [("Max", u64::MAX - 4), ("Min", 7), ("Sub", 12)] {
        let operands = if operator == "Sub" { ["a", "k"] } else { ["k", "a"] };
        let of = node(operator, &operands, &["y"], &[]);
        let file = of_two(13, 2, &[most.concat(), of].concat());
        assert_eq!(unsigned(file, &[7, 7], &[0, 0]).0, [wanted; 2], "{operator}");
    }
}

/// The results for two arrays of numbers without a sign: as bits, and as they are; those of what
/// rewriting makes of the graph are the same.
fn unsigned(file: Vec<u8>, a: &[u64], b: &[u64]) -> (Vec<u64>, Vec<f64>) {
    let mut open = |_: &str| Err("nothing is beside it".to_owned());
    let read = read_onnx("test.onnx", "test", Bytes::from(file), &Given::default(), &mut open);
    let onnx = read.unwrap_or_else(|found| panic!("{found:?}"));
    let args = [a, b].map(|numbers| {
        let numbers = Numbers::Whole(numbers.iter().map(|n| i128::from(*n)).collect());
        Element::U64.tensor_of(&Array { dims: vec![a.len()], numbers }).unwrap()
    });
    let weights = onnx.weights.iter().map(|(_, held)| held.tensor());
    let args: Vec<Tensor> = weights.chain(args).collect();
    let results = eval(&onnx.module, ENTRY, &args).unwrap();
    let mut module = onnx.module.clone();
    simplify(&mut module, &Options::default());
    assert_eq!(eval(&module, ENTRY, &args).unwrap(), results, "{module}");
    let result = &results[0];
    let numbers = result.to_f64();
    let bits = if let gantline_ir::tensor::Data::Int(bits) = &result.data { bits } else { &vec![] };
    let truths = numbers.iter().map(|x| u64::from(*x != 0.0));
    match result.dtype == DType::Bool {
        true => (truths.collect(), numbers),
        false => (bits.iter().map(|n| *n as u64).collect(), numbers),
    }
}

#[test]
fn operators_that_do_not_know_u64_refuse_it() {
    let relu = of_two(13, 4, &node("Relu", &["a"], &["y"], &[]));
    assert_eq!(said(relu), "E1111 this use of `Relu` is not supported: elements of type u64\n");
    let constant = attribute("value_int", number(3, i64::MAX - 1), 2);
    let parts = [node("Constant", &[], &["y"], &[constant])];
    let onnx = read_onnx(
        "test.onnx",
        "test",
        Bytes::from(file(18, &[1], &parts)),
        &Given::default(),
        &mut |_: &str| Err(String::new()),
    );
    let onnx = onnx.unwrap_or_else(|found| panic!("{found:?}"));
    let weights = onnx.weights.iter().map(|(_, held)| held.tensor());
    let args: Vec<Tensor> = weights.chain([Tensor::f32(&[1], vec![0.0])]).collect();
    let result = eval(&onnx.module, ENTRY, &args).unwrap()[0].clone();
    assert_eq!(result, Tensor::int(DType::I64, &[], vec![i64::MAX - 1]));
    // A number that no f64 is, repeated beside one that is given.
    let largest = [stored("k", &[1], &[i64::MAX - 1]), cast("x", "i", 7)].concat();
    let y = [node("Sub", &["k", "i"], &["s"], &[]), node("Sub", &["s", "k"], &["y"], &[])];
    assert_eq!(computed(&[3.0, -1.0], &[largest, y.concat()]), [-3.0, 1.0]);
}
