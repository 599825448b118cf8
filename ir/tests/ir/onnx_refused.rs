//! Small ONNX files: what means nothing is refused with what is wrong in it, and what is easily
//! computed wrong is not.

use bytes::Bytes;
use gantline_ir::Tensor;
use gantline_ir::eval::eval;
use gantline_ir::import::onnx::{ENTRY, Given, read_onnx};

use crate::onnx_file::{attribute, bytes, file, int, ints, node, stored};

/// What is said of a file; nothing where it is read.
pub(crate) fn said(file: Vec<u8>) -> String {
    let mut open = |_: &str| Err("nothing is beside it".to_owned());
    match read_onnx("test.onnx", "test", Bytes::from(file), &Given::default(), &mut open) {
        Ok(_) => String::new(),
        Err(found) => found.iter().map(|d| format!("{} {}\n", d.code, d.headline)).collect(),
    }
}

#[test]
fn what_an_operator_cannot_mean_is_refused() {
    let one = |operator: &str, rest: &[&str], attributes: &[Vec<u8>]| {
        node(operator, &[&["x"], rest].concat(), &["y"], attributes)
    };
    let perm = |perm: &[i64]| one("Transpose", &[], &[ints("perm", perm)]);
    let axis = |axis: Vec<u8>| one("Softmax", &[], &[axis]);
    let text = attribute("axis", bytes(4, b"hello"), 3);
    let split = |count: i64| node("Split", &["x"], &["y", "z"], &[int("num_outputs", count)]);
    let shaped = |shape: &[i64]| {
        [one("Reshape", &["s"], &[]), stored("s", &[shape.len() as i64], shape)].concat()
    };
    let gather = |id: i64| [one("Gather", &["i"], &[]), stored("i", &[1], &[id])].concat();
    let counted = |step: i64| {
        let numbers = [stored("a", &[], &[0]), stored("b", &[], &[4]), stored("c", &[], &[step])];
        [node("Range", &["a", "b", "c"], &["y"], &[]), numbers.concat()].concat()
    };
    // What is right beside what is wrong.
    for (right, wrong, part) in [
        (perm(&[1, 0]), perm(&[0, 0]), "Transpose"),
        (perm(&[0, 1]), perm(&[1, 1]), "Transpose"),
        (perm(&[0, 1]), perm(&[0]), "Transpose"),
        (axis(int("axis", 1)), axis(text), "attribute `axis` is a text, not a whole number"),
        (split(2), split(0), "0 pieces for 2 outputs"),
        (shaped(&[-1, 2]), shaped(&[-1, -1, 2]), "more than one is open"),
        (shaped(&[8, 2]), shaped(&[8, 3]), "Reshape"),
        (gather(3), gather(4), "the id 4 of 4"),
        (gather(-4), gather(-5), "the id -5 of 4"),
        (counted(2), counted(0), "a step of zero"),
    ] {
        let of = |parts: Vec<u8>| said(file(18, &[4, 4], &[parts]));
        assert_eq!(of(right), "");
        let text = of(wrong);
        assert!(text.starts_with("E1111") && text.contains(part), "{part}: {text}");
    }
}

#[test]
fn what_a_file_cannot_say_is_refused() {
    let neg = || node("Neg", &["x"], &["y"], &[]);
    assert_eq!(said(file(21, &[4], &[neg()])), "");
    assert_eq!(said(file(99, &[4], &[neg()])), "E1111 opset 99 is not supported\n");
    assert_eq!(said(file(1, &[4], &[neg()])), "E1111 opset 1 is not supported\n");
    let text = said(file(18, &[-4], &[neg()]));
    assert!(text.contains("E1110") && text.contains("dim 0 of the input `x` is -4"), "{text}");
    let text = said(file(18, &[4], &[node("Add", &["x", "z"], &["y"], &[])]));
    assert!(text.contains("the `Add` that makes `y` reads `z`"), "{text}");
}

/// The result of nodes of an input `x` of floats.
pub(crate) fn computed(x: &[f32], parts: &[Vec<u8>]) -> Vec<f64> {
    let dims = [x.len()];
    let bytes = Bytes::from(file(18, &[x.len() as i64], parts));
    let mut open = |_: &str| Err("nothing is beside it".to_owned());
    let read = read_onnx("test.onnx", "test", bytes, &Given::default(), &mut open);
    let onnx = read.unwrap_or_else(|found| panic!("{found:?}"));
    let weights = onnx.weights.iter().map(|(_, held)| held.tensor());
    let args: Vec<Tensor> = weights.chain([Tensor::f32(&dims, x.to_vec())]).collect();
    eval(&onnx.module, ENTRY, &args).unwrap()[0].to_f64()
}

#[test]
fn edges_of_operators_are_those_of_the_standard() {
    let cast =
        |from: &str, to: &str, element: i64| node("Cast", &[from], &[to], &[int("to", element)]);
    // An integer to the power of a fraction is an integer, and the fraction is not cut before.
    let parts =
        [stored("s", &[2], &[4, 9]), cast("s", "b", 6), node("Pow", &["b", "x"], &["y"], &[])];
    assert_eq!(computed(&[0.5, 0.5], &parts), [2.0, 3.0]);
    // Which no f32 holds; numpy yields it too.
    let parts = [
        stored("s", &[1], &[16_777_217]),
        cast("s", "b", 6),
        node("Pow", &["b", "x"], &["y"], &[]),
    ];
    assert_eq!(computed(&[1.0], &parts), [16_777_217.0]);
    // Rounding of the quotient does not reach the next integer; an infinite divisor leaves all.
    let divisors = [10.0_f32.recip(), f32::INFINITY, 0.5, 3.0];
    let parts = [
        stored("s", &[4], &[10, 0, 2, 0]),
        cast("s", "f", 1),
        node("Reciprocal", &["f"], &["b"], &[]),
        node("Mod", &["x", "b"], &["y"], &[int("fmod", 1)]),
    ];
    let divided = [1.0_f32, 5.0, -7.25, f32::INFINITY];
    let wanted: Vec<f64> = divided.iter().zip(divisors).map(|(a, b)| f64::from(a % b)).collect();
    let found = computed(&divided, &parts);
    assert_eq!(found[..3], wanted[..3]);
    assert!(found[3].is_nan() && wanted[3].is_nan());
    // The least integer has no negative.
    let parts = [cast("x", "i", 6), node("ArgMin", &["i"], &["y"], &[int("keepdims", 0)])];
    assert_eq!(computed(&[0.0, -2_147_483_648.0, -5.0], &parts), [1.0]);
    let last = [int("keepdims", 0), int("select_last_index", 1)];
    let parts = [cast("x", "i", 6), node("ArgMin", &["i"], &["y"], &last)];
    assert_eq!(computed(&[7.0, -5.0, -5.0, 9.0], &parts), [2.0]);
}

/// A number of any magnitude up to 2^±`exponent_max`, of 24 bits.
fn drawn(state: &mut u64, exponent_max: i32) -> f32 {
    let mut bits = || {
        *state += 1;
        gantline_ir::random::mix(*state)
    };
    let size = (bits() % (1 << 24)) as f32 / (1 << 23) as f32;
    let exponent = (bits() % (2 * exponent_max as u64)) as i32 - exponent_max;
    let size = size * (exponent as f32).exp2();
    if bits() % 2 == 0 { size } else { -size }
}

/// Remainders are those of IEEE 754's `fmod`, as Rust's `%` has them.
#[test]
fn remainders_are_exact() {
    let divided = |from: &[&str; 2], types: &[Vec<u8>]| {
        let parts = node("Mod", from, &["m"], &[int("fmod", 1)]);
        [types.concat(), parts, node("Cast", &["m"], &["y"], &[int("to", 11)])].concat()
    };
    let count = 2000;
    let mut state = 1;
    let x: Vec<f32> = (0..2 * count).map(|_| drawn(&mut state, 60)).collect();
    let halves = node("Split", &["x"], &["a", "b"], &[int("num_outputs", 2), int("axis", 0)]);
    let found = computed(&x, &[divided(&["a", "b"], &[halves])]);
    for (at, found) in found.iter().enumerate() {
        let (a, b) = (x[at], x[count + at]);
        assert!(*found == f64::from(a % b), "{a:e} by {b:e} leaves {:e}, not {found:e}", a % b);
    }
    // Of f64 with all their bits, as quotients are.
    let x: Vec<f32> = (0..4 * count).map(|_| drawn(&mut state, 16)).collect();
    let quarters = ["p", "q", "r", "t"];
    let mut parts =
        vec![node("Split", &["x"], &quarters, &[int("num_outputs", 4), int("axis", 0)])];
    let wide = quarters.map(|name| format!("{name}.wide"));
    for (from, to) in quarters.iter().zip(&wide) {
        parts.push(node("Cast", &[from], &[to], &[int("to", 11)]));
    }
    parts.push(node("Div", &[&wide[0], &wide[1]], &["a"], &[]));
    parts.push(node("Div", &[&wide[2], &wide[3]], &["b"], &[]));
    let found = computed(&x, &[divided(&["a", "b"], &parts)]);
    for (at, found) in found.iter().enumerate() {
        let part = |part: usize| f64::from(x[part * count + at]);
        let (a, b) = (part(0) / part(1), part(2) / part(3));
        assert!(*found == a % b, "{a:e} by {b:e} leaves {:e}, not {found:e}", a % b);
    }
}
