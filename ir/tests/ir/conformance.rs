//! Ops on a few numbers against PyTorch and NumPy, whose results are in a file; `make.py` beside it
//! writes it.

use gantline_ir::eval::eval;
use gantline_ir::op::{Binary, Combiner, Comparison, Unary};
use gantline_ir::text::parse_module;
use gantline_ir::{DType, Tensor};

const CASES: &str = include_str!("../conformance/ops.txt");

/// The ops that are not elementwise.
const OTHERS: [&str; 27] = [
    "select",
    "cast",
    "contract",
    "scaled_contract",
    "conv",
    "prod",
    "argmax",
    "sort",
    "top_k",
    "reshape",
    "transpose",
    "broadcast",
    "slice",
    "pad",
    "reverse",
    "concat",
    "window",
    "fold",
    "iota",
    "constant",
    "gather",
    "scatter_add",
    "scatter",
    "dynamic_update_slice",
    "dynamic_slice",
    "cumulative",
    "reduce",
];

/// A tensor and its type, of `f32[2, 3] 1.0 2.0 …`.
fn tensor(text: &str) -> (Tensor, String) {
    let (ty, numbers) = text.split_once(']').unwrap();
    let (name, dims) = ty.split_once('[').unwrap();
    let sizes = dims.split(", ").filter(|size| !size.is_empty());
    let sizes: Vec<usize> = sizes.map(|size| size.parse().unwrap()).collect();
    let dtype = DType::ALL.into_iter().find(|dtype| dtype.name() == name).unwrap();
    let words = || numbers.split_whitespace();
    let tensor = if dtype == DType::Bool {
        Tensor::bool(&sizes, words().map(|word| word == "1").collect())
    } else if dtype.is_float() {
        Tensor::from_f64(dtype, &sizes, words().map(|word| word.parse().unwrap()).collect())
    } else {
        Tensor::int(dtype, &sizes, words().map(|word| word.parse().unwrap()).collect())
    };
    (tensor, format!("{ty}]"))
}

/// The distance of two neighbours near a number, which is not below that of the least ones.
fn unit(dtype: DType, number: f64) -> f64 {
    let units = [
        (DType::F64, (52, -1074)),
        (DType::F32, (23, -149)),
        (DType::BF16, (7, -133)),
        (DType::F16, (10, -24)),
    ];
    let (_, (bits, least)) = units.into_iter().find(|(known, _)| *known == dtype).unwrap();
    let exponent = number.abs().log2().floor();
    2f64.powf((exponent - f64::from(bits)).max(f64::from(least)))
}

/// Whether elements are equal to the bit, or within some units in the last place.
fn agree(found: &Tensor, wanted: &Tensor, ulps: f64) -> bool {
    let dtype = wanted.ty().dtype;
    if !dtype.is_float() {
        return found == wanted;
    }
    let is_near = |(a, b): (f64, f64)| match ulps {
        _ if a.is_nan() || b.is_nan() => a.is_nan() && b.is_nan(),
        0.0 => a.to_bits() == b.to_bits(),
        _ => a == b || (a - b).abs() <= ulps * unit(dtype, b),
    };
    found.ty() == wanted.ty() && found.to_f64().into_iter().zip(wanted.to_f64()).all(is_near)
}

/// What an op computes of operands, as a text of it says.
fn computed(op: &str, operands: &[(Tensor, String)], result: &str) -> Tensor {
    let names = ["a", "b", "c", "d"];
    let params = operands.iter().zip(names).map(|((_, ty), name)| format!("%{name}: {ty}"));
    let params = params.collect::<Vec<_>>().join(", ");
    let words = names[..operands.len()].iter().map(|name| format!(" %{name}"));
    let words: String = words.collect();
    let text = format!(
        "module m\n  func @main({params}) {{\n    %r: {result} = {op}{words}\n    return %r\n  }}\n"
    );
    let module = parse_module("m", &text).unwrap_or_else(|wrong| panic!("{text}{wrong:?}"));
    let operands: Vec<Tensor> = operands.iter().map(|(tensor, _)| tensor.clone()).collect();
    let results = eval(&module, "main", &operands);
    results.unwrap_or_else(|wrong| panic!("{text}{wrong:?}")).swap_remove(0)
}

#[test]
fn ops_compute_what_other_implementations_compute() {
    let mut seen = Vec::new();
    for case in CASES.split("\n\n").skip(1).filter(|case| !case.trim().is_empty()) {
        let mut lines: Vec<&str> = case.trim().lines().collect();
        let (op, last) = (lines.remove(0), lines.pop().unwrap());
        let (how, wanted) = last.split_once(' ').unwrap();
        let ulps = how.strip_prefix('~').map_or(0.0, |ulps| ulps.parse().unwrap());
        let operands: Vec<(Tensor, String)> = lines.iter().map(|l| tensor(l.trim())).collect();
        let (wanted, ty) = tensor(wanted);
        let found = computed(op, &operands, &ty);
        assert!(agree(&found, &wanted, ulps), "{case}\nfound {found:?}");
        seen.push(op);
    }
    let elementwise = Unary::ALL.map(Unary::name).into_iter().chain(Binary::ALL.map(Binary::name));
    let elementwise = elementwise.chain(Comparison::ALL.map(Comparison::name));
    for name in elementwise.chain(OTHERS) {
        let has = |op: &&str| op.split(' ').next() == Some(name);
        assert!(seen.iter().any(has), "there is no case of `{name}`");
    }
    for combiner in Combiner::ALL.map(Combiner::name) {
        let text = format!("reduce {combiner} ");
        assert!(seen.iter().any(|op| op.starts_with(&text)), "there is no case of `{text}`");
    }
}
