use std::collections::BTreeMap;

use ir::eval::eval;
use ir::formats::nearest;
use ir::precision::{Precision, Products};
use ir::random::mix;
use ir::tensor::Tensor;
use ir::{DType, Module};

use crate::blocks::BLOCK;
use crate::prepare::prepare_training_as;

const TEXT: &str = "module m
  func @embed(%tokens: i32[B, 128], %table: f32[7, 256]) {
    %x: f32[B, 128, 256] = gather dim=0 start=0 %table %tokens
    return %x
  }
  func @first(%x: f32[B, 128, 256], %w: f32[256, 2, 64]) {
    %y: f32[B, 128, 2, 64] = contract bsm,mhd->bshd %x %w
    return %y
  }
  func @last(%y: f32[B, 128, 2, 64], %v: f32[2, 64, 3]) {
    %z: f32[B, 128, 3] = contract bshd,hdo->bso %y %v
    %sum: f32[] = reduce sum dims=[0, 1, 2] %z
    return %sum
  }
  func @main(%tokens: i32[B, 128], %table: f32[7, 256], %w: f32[256, 2, 64], %v: f32[2, 64, 3]) {
    %x: f32[B, 128, 256] = call @embed %tokens %table
    %y: f32[B, 128, 2, 64] = call @first %x %w
    %sum: f32[] = call @last %y %v
    return %sum
  }
";

fn prepared(products: Products) -> Module {
    let module = ir::text::parse_module("test", TEXT).expect("it reads");
    let precision = Precision { products, ..Precision::uniform(DType::F32) };
    prepare_training_as(module, "main", &precision).expect("it is prepared")
}

fn random(dims: &[usize], seed: u32) -> Tensor {
    let count: usize = dims.iter().product();
    // Of many sizes, zeros among them.
    let number = |at: usize| {
        let bits = mix(u64::from(seed) << 32 | at as u64) as u32;
        let scale = 2.0_f64.powi((bits >> 8) as i32 % 24 - 12);
        if bits.is_multiple_of(7) {
            0.0
        } else {
            scale * (f64::from(bits) / f64::from(u32::MAX) - 0.5)
        }
    };
    Tensor::from_f64(DType::F32, dims, (0..count).map(number).collect())
}

/// Elements rounded in blocks: `block` numbers the block of each.
fn rounded(x: &[f64], block: impl Fn(usize) -> usize, (dtype, most): (DType, f64)) -> Vec<f64> {
    let mut largest: BTreeMap<usize, f64> = BTreeMap::new();
    for (at, x) in x.iter().enumerate() {
        let entry = largest.entry(block(at)).or_insert(2.0_f64.powi(-100));
        *entry = entry.max(x.abs());
    }
    let read = |(at, x): (usize, &f64)| {
        let scale = (most / largest[&block(at)]).log2().floor().exp2();
        nearest(dtype, x * scale) / scale
    };
    x.iter().enumerate().map(read).collect()
}

/// `[m, k] x [k, n]`
fn product([m, k, n]: [usize; 3], a: impl Fn(usize, usize) -> f64, b: &[f64]) -> Vec<f64> {
    let element = |i: usize, j: usize| (0..k).map(|d| a(i, d) * b[d * n + j]).sum();
    (0..m).flat_map(|i| (0..n).map(move |j| (i, j))).map(|(i, j)| element(i, j)).collect()
}

fn assert_near(found: &Tensor, expected: &[f64], what: &str) {
    let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
    let apart: Vec<f64> = found.to_f64().iter().zip(expected).map(|(a, b)| a - b).collect();
    assert_eq!(apart.len(), expected.len(), "{what}");
    let distance = norm(&apart) / norm(expected);
    assert!(distance < 1e-6, "{what}: {distance:e}");
}

/// Forward pass, gradient of the activation and gradient of the weight, beside plain loops.
#[test]
fn products_read_blocks_of_8_bits() {
    const E4M3: (DType, f64) = (DType::F8E4M3, 448.0);
    let (samples, tokens, k, n) = (2, 128, 256, 128);
    let rows = samples * tokens;
    for (products, of_cotangents) in
        [(Products::F8E4M3, E4M3), (Products::F8Hybrid, (DType::F8E5M2, 57344.0))]
    {
        let module = prepared(products);
        let x = random(&[samples, tokens, k], 1);
        let w = random(&[k, 2, 64], 2);
        let dy = random(&[samples, tokens, 2, 64], 3);
        let [of_x, of_w, of_dy] = [&x, &w, &dy].map(Tensor::to_f64);
        let results = eval(&module, "first.grad", &[x, w, dy]).expect("it runs");
        let along_k = rounded(&of_x, |at| at / BLOCK, E4M3);
        let square = |at: usize| at / n / BLOCK * (n / BLOCK) + at % n / BLOCK;
        let weight = rounded(&of_w, square, E4M3);
        let y = product([rows, k, n], |i, d| along_k[i * k + d], &weight);
        assert_near(&results[0], &y, "y");
        let dy_along_n = rounded(&of_dy, |at| at / BLOCK, of_cotangents);
        let turned: Vec<f64> = (0..n * k).map(|at| weight[at % k * n + at / k]).collect();
        let dx = product([rows, n, k], |i, d| dy_along_n[i * n + d], &turned);
        assert_near(&results[1], &dx, "dx");
        let by_tokens = |width: usize| move |at: usize| at / width / BLOCK * width + at % width;
        let x_by_tokens = rounded(&of_x, by_tokens(k), E4M3);
        let dy_by_tokens = rounded(&of_dy, by_tokens(n), of_cotangents);
        let dw = product([k, rows, n], |i, d| x_by_tokens[d * k + i], &dy_by_tokens);
        assert_near(&results[2], &dw, "dw");
    }
}

/// Names of what is added can be read, in either direction of a sum.
#[test]
fn texts_are_read_back() {
    let module = prepared(Products::F8Hybrid);
    let read = ir::text::parse_module("test", &module.to_string()).expect("it reads");
    assert_eq!(read.to_string(), module.to_string());
}

/// The layer of the loss multiplies as without the role, and nothing else does.
#[test]
fn the_layer_of_the_loss_stays() {
    let (own, quantised) = (prepared(Products::Own), prepared(Products::F8E4M3));
    let function = |module: &Module, name: &str| module.function(name).cloned();
    for name in ["last", "last.grad"] {
        assert_eq!(function(&own, name), function(&quantised, name), "{name}");
    }
    assert_ne!(function(&own, "first.grad"), function(&quantised, "first.grad"));
}
