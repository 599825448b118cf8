//! Attention and its gradient against the materialised scores.

use gantline_kernels::{Attention, Dropout, Kernel};
use ir::DType;
use ir::random::{Key, uniform};

use crate::{Buffer, Random, assert_close, run_on_threads, sets};

const KEY: [u32; 4] = [7, 3, 11, 5];

fn random_attention(random: &mut Random, dtype: DType) -> Attention {
    let group = 1 + random.below(3);
    let (kv_heads, kv_offset) = (1 + random.below(2), random.below(3));
    let heads = group * kv_heads;
    let (queries, keys) = (1 + random.below(230), 1 + random.below(300));
    let dim = random.pick(&[1, 3, 16, 40, 64]);
    // Queries, keys and values may be slices of one buffer: heads further apart than they are long.
    let spread = |random: &mut Random, length: usize, heads: usize| {
        let wide = heads + random.below(3);
        [length * wide * dim, wide * dim, dim]
    };
    Attention {
        batch: 1 + random.below(2),
        queries,
        keys,
        heads,
        kv_heads,
        dim,
        scale: 0.3 + random.number() * 0.1,
        causal: random.below(2) == 0,
        query_offset: random.below(keys + 40) as i64 - 20,
        position: false,
        head_offset: kv_offset * group,
        kv_offset,
        group,
        dropout: (random.below(2) == 0).then_some(Dropout {
            p: 0.25,
            salt: 9,
            sample_offset: 2,
            heads_total: 13,
            head_base: 4,
            queries_total: 1000,
            query_base: 17,
            keys_total: 999,
            key_base: 1,
        }),
        dtype,
        q: spread(random, queries, heads),
        k: spread(random, keys, kv_heads),
        v: spread(random, keys, kv_heads),
        out: spread(random, queries, heads),
    }
}

fn visible(a: &Attention, i: usize, j: usize) -> bool {
    !a.causal || j as i64 <= i as i64 + a.query_offset
}

fn factor(a: &Attention, b: usize, h: usize, i: usize, j: usize) -> f64 {
    let Some(d) = &a.dropout else { return 1.0 };
    let key = Key::from_words(KEY);
    let sample = u64::from(key.sample) + d.sample_offset + b as u64;
    let row = (sample * d.heads_total + d.head_base + h as u64) * d.queries_total + d.query_base;
    let index = (row + i as u64) * d.keys_total + d.key_base + j as u64;
    if f64::from(uniform(key.stream(d.salt), index)) >= d.p { 1.0 / (1.0 - d.p) } else { 0.0 }
}

fn at(strides: [usize; 3], b: usize, s: usize, h: usize) -> usize {
    b * strides[0] + s * strides[1] + h * strides[2]
}

fn dot(x: &[f64], i: usize, y: &[f64], j: usize, dim: usize) -> f64 {
    (0..dim).map(|d| x[i + d] * y[j + d]).sum()
}

/// Output and log-sum-exp, into buffers whose other elements stay.
fn forward(a: &Attention, q: &[f64], k: &[f64], v: &[f64], out: &mut [f64]) -> Vec<f64> {
    let mut lse = Vec::new();
    for b in 0..a.batch {
        for h in 0..a.heads {
            let g = a.kv_head(h);
            for i in 0..a.queries {
                let seen: Vec<usize> = (0..a.keys).filter(|&j| visible(a, i, j)).collect();
                let score =
                    |&j: &usize| a.scale * dot(q, at(a.q, b, i, h), k, at(a.k, b, j, g), a.dim);
                let scores: Vec<f64> = seen.iter().map(score).collect();
                let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = scores.iter().map(|s| (s - largest).exp()).sum();
                let row_lse = if seen.is_empty() { f64::NEG_INFINITY } else { largest + sum.ln() };
                lse.push(row_lse);
                for d in 0..a.dim {
                    let term = |(s, &j): (&f64, &usize)| {
                        (s - row_lse).exp() * factor(a, b, h, i, j) * v[at(a.v, b, j, g) + d]
                    };
                    out[at(a.out, b, i, h) + d] = scores.iter().zip(&seen).map(term).sum();
                }
            }
        }
    }
    lse
}

/// Gradients `dq dk dv` by the formulas, into zeroed buffers.
fn backward(a: &Attention, [q, k, v, dout]: [&[f64]; 4], grads: [&mut Vec<f64>; 3]) {
    let mut out = vec![0.0; dout.len()];
    let lse = forward(a, q, k, v, &mut out);
    let [dq, dk, dv] = grads;
    for b in 0..a.batch {
        for h in 0..a.heads {
            let g = a.kv_head(h);
            for i in 0..a.queries {
                let (qi, oi) = (at(a.q, b, i, h), at(a.out, b, i, h));
                let delta = dot(&out, oi, dout, oi, a.dim);
                for j in (0..a.keys).filter(|&j| visible(a, i, j)) {
                    let (kj, vj) = (at(a.k, b, j, g), at(a.v, b, j, g));
                    let score = a.scale * dot(q, qi, k, kj, a.dim);
                    let weight = (score - lse[(b * a.heads + h) * a.queries + i]).exp();
                    let z = factor(a, b, h, i, j);
                    let ds = weight * (z * dot(dout, oi, v, vj, a.dim) - delta) * a.scale;
                    for d in 0..a.dim {
                        dq[qi + d] += ds * k[kj + d];
                        dk[kj + d] += ds * q[qi + d];
                        dv[vj + d] += weight * z * dout[oi + d];
                    }
                }
            }
        }
    }
}

fn key_input(a: &Attention) -> Option<Buffer> {
    a.dropout.as_ref().map(|_| Buffer::U32(KEY.to_vec()))
}

#[test]
fn attention_and_its_gradient_match_the_materialised_scores() {
    for case in 0..16 {
        let mut random = Random::new(case);
        for dtype in [DType::F32, DType::F64] {
            let a = random_attention(&mut random, dtype);
            let tolerance = if dtype == DType::F32 { 3e-5 } else { 1e-12 };
            let kernel = Kernel::Attention(a.clone());
            let mut buffer = |len: usize| Buffer::new(dtype, &random.numbers(len));
            let lens = Kernel::AttentionBwd(a.clone()).inputs();
            let [q, k, v, out] = [0, 1, 2, 3].map(|i| buffer(lens[i].len));
            let (dout, lse) = (buffer(lens[3].len), buffer(lens[4].len));
            let mut inputs = vec![q.clone(), k.clone(), v.clone()];
            inputs.extend(key_input(&a));
            let mut want = out.numbers();
            let want_lse = forward(&a, &q.numbers(), &k.numbers(), &v.numbers(), &mut want);
            for isa in sets() {
                let old = [out.clone(), lse.clone()];
                let got = run_on_threads(isa, &kernel, &inputs, &old);
                assert_close(&got[0].numbers(), &want, tolerance, &format!("out {isa:?} {a:?}"));
                assert_close(&got[1].numbers(), &want_lse, tolerance, &format!("lse {a:?}"));
                check_gradient(&a, [&q, &k, &v, &dout], &got, isa, tolerance);
            }
        }
    }
}

fn check_gradient(
    a: &Attention,
    [q, k, v, dout]: [&Buffer; 4],
    forward_outputs: &[Buffer],
    isa: gantline_kernels::cpu::Isa,
    tolerance: f64,
) {
    let kernel = Kernel::AttentionBwd(a.clone());
    let mut inputs = vec![q.clone(), k.clone(), v.clone()];
    inputs.extend([forward_outputs[0].clone(), forward_outputs[1].clone(), dout.clone()]);
    inputs.extend(key_input(a));
    // Elements between the heads are nobody's and must stay.
    let old: Vec<Buffer> =
        kernel.outputs().iter().map(|o| Buffer::new(a.dtype, &vec![0.5; o.len])).collect();
    let got = run_on_threads(isa, &kernel, &inputs, &old);
    let mut grads: Vec<Vec<f64>> = kernel.outputs().iter().map(|o| vec![0.0; o.len]).collect();
    let [dq, dk, dv] = &mut grads[..] else { unreachable!("three gradients") };
    let numbers = [q, k, v, dout].map(Buffer::numbers);
    backward(a, [&numbers[0], &numbers[1], &numbers[2], &numbers[3]], [dq, dk, dv]);
    let owned = |strides: [usize; 3], length: usize, heads: usize, len: usize| {
        let mut owned = vec![false; len];
        for b in 0..a.batch {
            for s in 0..length {
                for h in 0..heads {
                    let first = at(strides, b, s, h);
                    owned[first..first + a.dim].fill(true);
                }
            }
        }
        owned
    };
    let layouts = [(a.q, a.queries, a.heads), (a.k, a.keys, a.kv_heads), (a.v, a.keys, a.kv_heads)];
    for (i, (strides, length, heads)) in layouts.into_iter().enumerate() {
        let owned = owned(strides, length, heads, grads[i].len());
        let want: Vec<f64> =
            owned.iter().zip(&grads[i]).map(|(&own, &g)| if own { g } else { 0.5 }).collect();
        let what = format!("gradient {i} on {isa:?} of {a:?}");
        assert_close(&got[i].numbers(), &want, 4.0 * tolerance, &what);
    }
}

/// The formulas of [`backward`] themselves, against differences of [`forward`].
#[test]
fn the_gradient_is_that_of_finite_differences() {
    for case in 0..3 {
        let mut random = Random::new(100 + case);
        let mut a = random_attention(&mut random, DType::F64);
        (a.queries, a.keys, a.query_offset) = (5, 6, 1);
        for t in [&mut a.q, &mut a.k, &mut a.v, &mut a.out] {
            t[0] = 6 * t[1];
        }
        let kernel = Kernel::AttentionBwd(a.clone());
        let lens: Vec<usize> = kernel.inputs().iter().map(|i| i.len).collect();
        let tensors = [0, 1, 2, 5].map(|i| random.numbers(lens[i]));
        let loss = |t: &[Vec<f64>; 4]| -> f64 {
            let mut out = vec![0.0; lens[3]];
            forward(&a, &t[0], &t[1], &t[2], &mut out);
            dot(&out, 0, &t[3], 0, lens[3])
        };
        let mut out = Buffer::F64(vec![0.0; lens[3]]);
        let lse = forward(&a, &tensors[0], &tensors[1], &tensors[2], &mut vec![0.0; lens[3]]);
        if let Buffer::F64(out) = &mut out {
            forward(&a, &tensors[0], &tensors[1], &tensors[2], out);
        }
        let [q, k, v, dout] = tensors.clone().map(Buffer::F64);
        let mut inputs = vec![q, k, v, out, Buffer::F64(lse), dout];
        inputs.extend(key_input(&a));
        let old: Vec<Buffer> =
            kernel.outputs().iter().map(|o| Buffer::F64(vec![0.0; o.len])).collect();
        let got = run_on_threads(gantline_kernels::cpu::Isa::detect(), &kernel, &inputs, &old);
        for (operand, grad) in got.iter().enumerate() {
            for _ in 0..40 {
                let i = random.below(lens[operand]);
                let mut shifted = [tensors.clone(), tensors.clone()];
                shifted[0][operand][i] += 1e-5;
                shifted[1][operand][i] -= 1e-5;
                let slope = (loss(&shifted[0]) - loss(&shifted[1])) / 2e-5;
                let got = grad.numbers()[i];
                assert!((got - slope).abs() < 1e-7, "d{operand}[{i}] is {got}, not {slope}: {a:?}");
            }
        }
    }
}

/// A tile of queries alone has the bits that it has among all queries.
#[test]
fn bits_of_a_query_do_not_depend_on_other_queries() {
    let mut random = Random::new(5);
    let layout = |length: usize| Attention::contiguous(length, 2, 32);
    let whole = Attention {
        batch: 1,
        queries: 200,
        keys: 300,
        heads: 2,
        kv_heads: 2,
        dim: 32,
        scale: 0.2,
        causal: true,
        query_offset: 100,
        head_offset: 0,
        kv_offset: 0,
        position: false,
        group: 1,
        dropout: None,
        dtype: DType::F32,
        q: layout(200),
        k: layout(300),
        v: layout(300),
        out: layout(200),
    };
    let q = random.numbers(200 * 64);
    let [k, v] = [0, 1].map(|_| Buffer::new(DType::F32, &random.numbers(300 * 64)));
    let attend = |from: usize, to: usize| {
        let n = to - from;
        let part = Attention {
            queries: n,
            query_offset: 100 + from as i64,
            q: layout(n),
            out: layout(n),
            ..whole.clone()
        };
        let q = Buffer::new(DType::F32, &q[from * 64..to * 64]);
        let old = [Buffer::F32(vec![0.0; n * 64]), Buffer::F32(vec![0.0; n * 2])];
        let isa = gantline_kernels::cpu::Isa::detect();
        run_on_threads(isa, &Kernel::Attention(part), &[q, k.clone(), v.clone()], &old)[0].numbers()
    };
    let all = attend(0, 200);
    for (from, to) in [(0, 1), (1, 70), (70, 199), (199, 200)] {
        assert_eq!(attend(from, to), all[from * 64..to * 64], "queries {from}..{to}");
    }
}

/// A position that is known at run time counts as one that is known before, for few queries and
/// for many.
#[test]
fn a_position_is_added_at_run_time() {
    for case in 0..60 {
        let mut random = Random::new(1000 + case);
        let dtype = random.pick(&[DType::F32, DType::F64]);
        let known =
            Attention { causal: true, dropout: None, ..random_attention(&mut random, dtype) };
        let queries = if case % 2 == 0 { 1 + random.below(6) } else { known.queries };
        let known = Attention { queries, ..known };
        let position = random.below(known.keys);
        let q = random.numbers(known.batch * known.q[0]);
        let [k, v] = [known.k, known.v].map(|strides| random.numbers(known.batch * strides[0]));
        let mut want = vec![0.5; known.batch * known.out[0]];
        let placed =
            Attention { query_offset: known.query_offset + position as i64, ..known.clone() };
        let inputs = [&q, &k, &v].map(|x| Buffer::new(dtype, x));
        let [q, k, v] = inputs.each_ref().map(Buffer::numbers);
        forward(&placed, &q, &k, &v, &mut want);
        let kernel = Kernel::Attention(Attention { position: true, ..known });
        let inputs = [inputs.to_vec(), vec![Buffer::I32(vec![position as i32])]].concat();
        let old = [Buffer::new(dtype, &vec![0.5; want.len()])];
        let tolerance = if dtype == DType::F32 { 2e-5 } else { 1e-12 };
        for isa in sets() {
            let got = run_on_threads(isa, &kernel, &inputs, &old);
            assert_eq!(got.len(), 1);
            assert_close(&got[0].numbers(), &want, tolerance, "out");
        }
    }
}
