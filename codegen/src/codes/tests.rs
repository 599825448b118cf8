use ir::eval::eval;
use ir::plan::Keep;
use ir::precision::{Precision, Products};
use ir::random::mix;
use ir::target::InstructionSet;
use ir::tensor::Tensor;

use super::*;
use crate::partition::{Place, bindings};
use crate::prepare::{prepare_inference_as, prepare_training_as};
use crate::specialise::specialise;

const TEXT: &str = "module m
  func @first(%x: f32[B, 128, 256], %w: f32[256, 2, 64]) {
    %y: f32[B, 128, 2, 64] = contract bsm,mhd->bshd %x %w
    return %y
  }
  func @second(%y: f32[B, 128, 2, 64], %w: f32[384, 2, 64], %c: f32[384]) {
    %z: f32[B, 128, 384] = contract bshd,ohd->bso %y %w
    %d: f32[B, 128, 384] = broadcast new=[0, 1] %c
    %r: f32[B, 128, 384] = add %z %d
    return %r
  }
  func @last(%y: f32[B, 128, 384], %v: f32[384, 3]) {
    %z: f32[B, 128, 3] = contract bso,on->bsn %y %v
    %sum: f32[] = reduce sum dims=[0, 1, 2] %z
    return %sum
  }
  func @main(%x: f32[B, 128, 256], %w: f32[256, 2, 64], %u: f32[384, 2, 64], %c: f32[384],
      %v: f32[384, 3]) {
    %y: f32[B, 128, 2, 64] = call @first %x %w
    %z: f32[B, 128, 384] = call @second %y %u %c
    %sum: f32[] = call @last %z %v
    return %sum
  }
";

/// One rank.
const TWO_SAMPLES: Place =
    Place { sizes: [1; 4], coordinates: [0; 4], takes_tp: false, microbatch_size: 2, target: None };

fn random(ty: &TensorType, seed: u32) -> Tensor {
    let dims = ty.sizes().expect("sizes are bound");
    let number = |at: usize| {
        let bits = mix(u64::from(seed) << 32 | at as u64) as u32;
        // Of many sizes, zeros among them.
        let scale = 2.0_f64.powi((bits >> 8) as i32 % 16 - 8);
        let number = scale * (f64::from(bits) / f64::from(u32::MAX) - 0.5);
        if bits.is_multiple_of(7) { 0.0 } else { number }
    };
    Tensor::from_f64(ty.dtype, &dims, (0..dims.iter().product()).map(number).collect())
}

/// The products of codes of a function, and how many operands are transposed for them.
fn counts(function: &Function) -> [usize; 2] {
    let count = |is: fn(&Op) -> bool| function.nodes.iter().filter(|node| is(&node.op)).count();
    [
        count(|op| matches!(op, Op::ScaledContract { .. })),
        count(|op| matches!(op, Op::Transpose { .. })),
    ]
}

fn operands(function: &Function) -> Vec<Tensor> {
    let typed = function.params().zip(0..);
    typed.map(|(param, seed)| random(function.ty(param), seed)).collect()
}

fn prepared(text: &str, precision: &Precision) -> Module {
    let module = ir::text::parse_module("test", text).expect("it reads");
    let mut module = prepare_training_as(module, "main", precision).expect("it is prepared");
    module.bind(&bindings(TWO_SAMPLES));
    module
}

/// A module of which one function reads codes, whose results are near those of numbers.
fn reading_codes(module: &Module, name: &str, limit: f64) -> Module {
    let function = module.function(name).expect("a layer");
    let mut read = function.clone();
    read_codes(&mut read, module, Some(Target::Cuda(Arch::Sm90a)));
    let (text, operands) = (read.to_string(), operands(function));
    let mut changed = module.clone();
    *changed.functions.iter_mut().find(|f| f.name == name).expect("a layer") = read;
    assert_eq!(ir::verify::verify(&changed), Vec::new());
    let [expected, found] =
        [module, &changed].map(|module| eval(module, name, &operands).expect("it runs"));
    assert_near(&found, &expected, limit, &text);
    changed
}

fn assert_near(found: &[Tensor], expected: &[Tensor], limit: f64, text: &str) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
        let (x, y) = (expected.to_f64(), found.to_f64());
        let apart: Vec<f64> = x.iter().zip(&y).map(|(x, y)| x - y).collect();
        let distance = norm(&apart) / norm(&x);
        assert!(distance <= limit, "{distance:e}\n{text}");
    }
}

/// Forward passes and gradients with products of codes are those of the numbers that codes are,
/// but for the order of sums, in F32 and in BF16, which rounds each result.
#[test]
fn products_of_codes_are_those_of_numbers() {
    for products in [Products::F8E4M3, Products::F8Hybrid] {
        for (precision, limit) in [
            (Precision::uniform(DType::F32), 1e-6),
            (Precision::training(DType::BF16), 2.0_f64.powi(-8)),
        ] {
            let module = prepared(TEXT, &Precision { products, ..precision });
            for (name, wanted) in [
                ("first", [1, 1]),
                ("second", [1, 0]),
                // The gradient of a weight reads both operands by tokens.
                ("first.grad", [3, 3]),
                ("second.grad", [3, 3]),
            ] {
                let changed = reading_codes(&module, name, limit);
                let read = changed.function(name).expect("a layer");
                assert_eq!(counts(read), wanted, "{name}: {read}");
                let again = ir::text::parse_module("test", &changed.to_string()).expect("it reads");
                assert_eq!(again.to_string(), changed.to_string());
            }
        }
    }
}

/// Codes that others have made: of another largest number they are read as they are, and where
/// scales are no powers of two products read numbers.
#[test]
fn codes_of_others_keep_their_numbers() {
    let precision = Precision { products: Products::F8E4M3, ..Precision::uniform(DType::F32) };
    let text = prepared(TEXT, &precision).to_string();
    let other_most = text.replace("constant 448.0", "constant 240.0");
    let no_powers = text.replace("= power_floor", "= abs");
    assert!(other_most != text && no_powers != text, "{text}");
    for (text, wanted) in [(other_most, [3, 3]), (no_powers, [0, 0])] {
        let module = ir::text::parse_module("test", &text).expect("it reads");
        let changed = reading_codes(&module, "first.grad", 1e-6);
        let read = changed.function("first.grad").expect("a layer");
        assert_eq!(counts(read), wanted, "{read}");
    }
}

/// An operand that two products read in one order, and sum over other dims, has scales of its own
/// for each; weights that are cut in heads after they are coded are read as they were coded.
#[test]
fn scales_are_those_of_what_is_summed() {
    let text = "module m
  func @both(%x: f32[B, 128, 2, 128], %w: f32[256, 128], %v: f32[2, 128, 2, 128],
      %f: f32[256, 256]) {
    %y: f32[B, 128, 2, 256] = contract bshd,ed->bshe %x %w
    %z: f32[B, 128, 2, 128] = contract bshd,fghd->bsfg %x %v
    %h: f32[2, 128, 256] = reshape %f
    %q: f32[B, 128, 256] = contract bshd,hdm->bsm %z %h
    return %y %z %q
  }
  func @last(%y: f32[B, 128, 2, 256], %z: f32[B, 128, 2, 128], %q: f32[B, 128, 256]) {
    %a: f32[] = reduce sum dims=[0, 1, 2, 3] %y
    %b: f32[] = reduce sum dims=[0, 1, 2, 3] %z
    %c: f32[] = reduce sum dims=[0, 1, 2] %q
    %ab: f32[] = add %a %b
    %sum: f32[] = add %ab %c
    return %sum
  }
  func @main(%x: f32[B, 128, 2, 128], %w: f32[256, 128], %v: f32[2, 128, 2, 128],
      %f: f32[256, 256]) {
    %y: f32[B, 128, 2, 256], %z: f32[B, 128, 2, 128], %q: f32[B, 128, 256] = call @both %x %w %v %f
    %sum: f32[] = call @last %y %z %q
    return %sum
  }
";
    for (precision, limit) in [
        (Precision::uniform(DType::F32), 1e-6),
        (Precision::training(DType::BF16), 2.0_f64.powi(-8)),
    ] {
        let module = prepared(text, &Precision { products: Products::F8E4M3, ..precision });
        for name in ["both", "both.grad"] {
            let changed = reading_codes(&module, name, limit);
            let read = changed.function(name).expect("a layer");
            assert!(counts(read)[0] >= 3, "{read}");
        }
    }
}

/// Numbers that roles make narrow are no codes.
#[test]
fn products_of_codes_are_refused_in_narrow_types() {
    let text = "module m
  func @main(%x: f32[2, 128], %w: f32[3, 128], %s: f32[2, 1], %t: f32[3, 1]) {
    %y: f32[2, 3] = call @layer %x %w %s %t
    return %y
  }
";
    let layer = "
  func @layer(%x: f32[2, 128], %w: f32[3, 128], %s: f32[2, 1], %t: f32[3, 1]) {
    %a: f8e4m3[2, 128] = cast %x
    %b: f8e4m3[3, 128] = cast %w
    %y: f32[2, 3] = scaled_contract mk,nk->mn %a %b %s %t
    return %y
  }
";
    let text = text.replacen('\n', layer, 1);
    let module = ir::text::parse_module("test", &text).expect("it reads");
    let of = |precision| prepare_inference_as(module.clone(), "main", &precision);
    assert!(of(Precision::uniform(DType::F32)).is_ok());
    let refused = of(Precision::training(DType::BF16)).unwrap_err();
    assert_eq!(refused.code, "E2003");
}

/// What a forward half keeps are numbers, and scales or what they follow from: the backward half
/// makes codes of them again.
#[test]
fn halves_of_gradients_read_codes() {
    let precision = Precision { products: Products::F8E4M3, ..Precision::training(DType::BF16) };
    let module = prepared(TEXT, &precision);
    for (name, ends) in [("first.grad", [2, 1]), ("second.grad", [3, 1])] {
        for keep in Keep::ALL {
            let function = module.function(name).expect("a layer");
            let halves = specialise(function, &module, ends, keep, &[]);
            for (mut half, count) in [(halves.forward, 1), (halves.backward, 2)] {
                read_codes(&mut half, &module, Some(Target::Cuda(Arch::Sm90a)));
                assert_eq!(counts(&half)[0], count, "{half}");
            }
        }
    }
}

/// Where no instruction multiplies 8 bits, and in functions without codes, nothing changes.
#[test]
fn other_targets_and_functions_stay() {
    let precision = Precision { products: Products::F8E4M3, ..Precision::uniform(DType::F32) };
    let module = prepared(TEXT, &precision);
    let cpu = Some(Target::Cpu(InstructionSet::Amx));
    let older = Some(Target::Cuda(Arch::Sm80));
    let newer = Some(Target::Cuda(Arch::Sm90a));
    for (name, target) in
        [("first.grad", None), ("first.grad", cpu), ("first.grad", older), ("last.grad", newer)]
    {
        let function = module.function(name).expect("a layer").clone();
        let mut read = function.clone();
        read_codes(&mut read, &module, target);
        assert_eq!(read, function, "{name} for {target:?}");
    }
}
