//! What each op refuses, by the number of its constraint, and small values known by heart.

use gantline_ir::eval::eval;
use gantline_ir::text::parse_module;
use gantline_ir::{DType, Tensor};

const PARAMS: &str = "%x: f64[2, 3], %i: i32[3], %m: bool[2, 3], %s: f64[], %k: u32[4]";

fn read(line: &str) -> Result<gantline_ir::Module, String> {
    let text = format!("module m\n  func @f({PARAMS}) {{\n    {line}\n    return %y\n  }}\n");
    parse_module("text", &text).map_err(|found| found[0].headline.clone())
}

#[test]
fn each_constraint_refuses_by_its_number() {
    for (line, refusal) in [
        ("%y: i32[2] = constant 4294967296", "constant (C1): 4294967296 is no i32"),
        ("%y: i32[2] = constant 0.5", "constant (C1)"),
        ("%y: u32[2] = constant -1", "constant (C1)"),
        ("%y: i64[2] = constant 1e19", "constant (C1)"),
        ("%y: bool[2] = constant 2", "constant (C1)"),
        ("%y: i32[2] = iota dim=1", "iota (C1)"),
        ("%y: i32[2] = iota dim=0 start=2147483647", "iota (C2)"),
        ("%y: u32[2] = iota dim=0 start=-1", "iota (C2)"),
        ("%y: f64[2, 3] = random salt=1 start=[0, -1] %k", "random (C3)"),
        ("%y: f64[2, 3] = random salt=1 start=[0, 1] extent=[2, 3] %k", "random (C3)"),
        ("%y: f64[2] = prod dims=[2] %x", "prod (C1)"),
        ("%y: bool[2] = prod dims=[1] %m", "prod (C2)"),
        ("%y: i32[2] = argmax dim=2 %x", "argmax (C1)"),
        ("%y: i32[2] = argmax dim=1 %m", "argmax (C2)"),
        ("%y: f64[2, 3] = cumulative sum dim=2 %x", "cumulative (C1)"),
        ("%y: bool[2, 3] = cumulative max dim=1 %m", "cumulative (C2)"),
        ("%y: f64[2, 2] = conv %x %i", "conv (C1)"),
        ("%y: f64[2, 2] = conv %s %s", "conv (C1)"),
        ("%t: f64[3, 2] = transpose perm=[1, 0] %x\n%y: f64[2, 3] = conv %x %t", "conv (C2)"),
        ("%y: f64[2, 2] = conv stride=[1] before=[0] %x %x", "conv (C4)"),
        ("%y: f64[2, 2] = conv x=[1, 1] %x %x", "conv (C5)"),
        ("%y: f64[2, 2] = conv w=[0] %x %x", "conv (C5)"),
        ("%y: f64[2, 2] = conv y=[2, 0, 1] %x %x", "conv (C5)"),
        ("%y: f64[2, 3] = window dim=2 size=1 %x", "window (C1)"),
        ("%y: f64[2, 3] = window dim=1 size=4 %x", "window (C2)"),
        ("%y: f64[2, 3] = window dim=1 size=2 stride=0 %x", "window (C2)"),
        ("%y: f64[2, 3] = window dim=1 size=2 dilation=0 %x", "window (C2)"),
        ("%y: f64[2, 3] = window dim=1 size=2 dilation=3 %x", "window (C2)"),
        ("%y: f64[5] = fold dim=0 size=3 stride=1 %x", "fold (C1)"),
        ("%y: f64[2, 3] = fold dim=1 size=3 stride=1 %x", "fold (C1)"),
        ("%y: f64[2] = fold dim=0 size=3 stride=1 %x", "fold (C2)"),
        ("%y: i32[2, 3] = sort ascending dim=2 %x", "sort (C1)"),
        ("%y: i32[2, 3] = top_k dim=2 count=1 %x", "top_k (C1)"),
        ("%y: i32[2, 4] = top_k dim=1 count=4 %x", "top_k (C2)"),
        ("%y: f64[2, 3] = scatter dim=0 start=0 %x %x %x", "scatter (C1)"),
        ("%y: f64[2, 3] = scatter dim=0 start=0 %x %i %x", "scatter (C2)"),
        ("%y: f64[2, 3] = scatter dim=2 start=0 %x %i %x", "scatter (C2)"),
        ("%y: f64[2, 3] = reverse dims=[0, 2] %x", "reverse (C1)"),
        ("%y: f64[2, 3] = reverse dims=[1, 1] %x", "reverse (C1)"),
        ("%y: f64[] = dispatch pieces=1 top_k=1 axis=ep %s %x", "dispatch (C1)"),
        ("%y: f64[4, 3] = dispatch pieces=2 top_k=1 axis=ep %x %x", "dispatch (C2)"),
        ("%y: f64[2, 3] = dispatch pieces=1 top_k=1 axis=ep %x %m", "dispatch (C2)"),
        ("%y: f64[1, 3] = combine pieces=4 top_k=1 axis=ep %x %x", "combine (C1)"),
        ("%y: f64[1, 3] = combine pieces=2 top_k=1 axis=ep %x %x", "combine (C2)"),
    ] {
        let found = read(line).unwrap_err();
        assert!(found.starts_with(refusal), "{line}: {found}");
    }
}

/// Tokens and gates of all members, and of one: what is read is printed back.
#[test]
fn tokens_are_dispatched_and_combined_by_their_gates() {
    let text = "%g: f64[4, 2] = constant 0.5\n    %all: f64[4, 3] = dispatch pieces=2 top_k=1 \
                axis=ep %x %g\n    %y: f64[2, 3] = combine pieces=2 top_k=1 axis=ep %all %m2";
    let gates = "%m2: f64[2, 4] = constant 0.5\n    ";
    let module = read(&format!("{gates}{text}")).unwrap();
    let printed = module.to_string();
    assert!(printed.contains("dispatch pieces=2 top_k=1 axis=ep %x %g"), "{printed}");
    assert_eq!(parse_module("text", &printed).unwrap(), module);
}

/// The ends of what a type has are no errors.
#[test]
fn numbers_at_the_ends_of_their_types_are_taken() {
    for line in [
        "%y: i32[2] = constant 2147483647",
        "%y: i32[2] = constant -2147483648",
        "%y: u32[2] = constant 4294967295",
        "%y: i32[2] = iota dim=0 start=2147483646",
        "%y: f64[2, 3] = random salt=1 start=[5, 1] extent=[2, 4] %k",
    ] {
        read(line).unwrap_or_else(|found| panic!("{line}: {found}"));
    }
}

/// A line, the elements of `%x`, and those of the result.
const VALUES: &[(&str, [f64; 6], &[f64])] = &[
    ("%y: f64[2] = prod dims=[1] %x", [1.0, 2.0, 3.0, 4.0, 0.0, 6.0], &[6.0, 0.0]),
    ("%y: f64[] = prod dims=[0, 1] %x", [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &[720.0]),
    ("%y: i32[2] = argmax dim=1 %x", [1.0, 7.0, 7.0, 9.0, f64::NAN, f64::NAN], &[1.0, 1.0]),
    ("%y: i32[3] = argmax dim=0 %x", [1.0, 7.0, 7.0, 1.0, 8.0, 6.0], &[0.0, 1.0, 0.0]),
    (
        "%y: f64[2, 3] = cumulative sum dim=1 %x",
        [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        &[1.0, 3.0, 6.0, 4.0, 9.0, 15.0],
    ),
    (
        "%y: f64[2, 3] = cumulative max dim=1 %x",
        [1.0, 3.0, 2.0, 4.0, -5.0, 6.0],
        &[1.0, 3.0, 3.0, 4.0, 4.0, 6.0],
    ),
    (
        "%y: f64[2, 3] = cumulative min dim=0 %x",
        [1.0, 3.0, 2.0, 4.0, -5.0, 6.0],
        &[1.0, 3.0, 2.0, 1.0, -5.0, 2.0],
    ),
    (
        "%y: f64[2, 2, 2] = window dim=1 size=2 %x",
        [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        &[1.0, 2.0, 2.0, 3.0, 4.0, 5.0, 5.0, 6.0],
    ),
    (
        "%y: f64[2, 1, 2] = window dim=1 size=2 stride=2 dilation=2 %x",
        [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        &[1.0, 3.0, 4.0, 6.0],
    ),
    ("%y: f64[4] = fold dim=0 size=3 %x", [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &[1.0, 6.0, 8.0, 6.0]),
    (
        "%y: i32[2, 3] = sort ascending dim=1 %x",
        [2.0, f64::NAN, 1.0, 4.0, -5.0, 4.0],
        &[2.0, 0.0, 1.0, 1.0, 0.0, 2.0],
    ),
    (
        "%y: i32[2, 3] = sort descending dim=1 %x",
        [2.0, f64::NAN, 1.0, 4.0, -5.0, 4.0],
        &[1.0, 0.0, 2.0, 0.0, 2.0, 1.0],
    ),
    ("%y: i32[1, 3] = top_k dim=0 count=1 %x", [2.0, 6.0, 1.0, 2.0, -5.0, 4.0], &[0.0, 0.0, 1.0]),
    (
        "%y: f64[2, 3] = reverse dims=[0, 1] %x",
        [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        &[6.0, 5.0, 4.0, 3.0, 2.0, 1.0],
    ),
    (
        "%y: f64[2, 3] = reverse dims=[1] %x",
        [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        &[3.0, 2.0, 1.0, 6.0, 5.0, 4.0],
    ),
];

#[test]
fn small_values_are_those_of_the_definition() {
    for (line, x, wanted) in VALUES {
        let module = read(line).unwrap_or_else(|found| panic!("{line}: {found}"));
        let args = [
            Tensor::f64(&[2, 3], x.to_vec()),
            Tensor::int(DType::I32, &[3], vec![2, 0, 1]),
            Tensor::bool(&[2, 3], vec![true, false, true, false, true, false]),
            Tensor::f64(&[], vec![0.5]),
            Tensor::int(DType::U32, &[4], vec![0; 4]),
        ];
        let found = eval(&module, "f", &args).unwrap().remove(0);
        assert_eq!(found.to_f64(), *wanted, "{line}");
    }
}
