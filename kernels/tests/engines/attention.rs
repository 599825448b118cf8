//! Attention and its gradient against the materialised scores.

use std::ops::Range;

use gantline_kernels::cpu::Isa;
use gantline_kernels::{Attention, Dropout, Kernel, Offset};
use ir::DType;
use ir::random::{DrawBits, Key};

use crate::{Buffer, Random, assert_close, run_on_threads, sets};

const KEY: [u32; 4] = [7, 3, 11, 5];

pub(crate) fn random_attention(random: &mut Random, dtype: DType) -> Attention {
    let group = 1 + random.below(3);
    let kv_heads = 1 + random.below(2);
    // Of the first key-value head, some of the query heads may be another shard's.
    let others = random.below(group);
    let heads = group * kv_heads - others;
    let (queries, keys) = (1 + random.below(230), 1 + random.below(300));
    let dim = random.pick(&[1, 3, 16, 40, 64]);
    // Queries, keys and values may be slices of one buffer: heads further apart than they are long.
    let spread = |random: &mut Random, length: usize, heads: usize| {
        let wide = heads + random.below(3);
        [length * wide * dim, wide * dim, dim]
    };
    let batch = 1 + random.below(2);
    // Shorter than the keys, as long, or longer.
    let shorter = 1 + random.below(keys);
    let window = random.pick(&[0, 1, shorter, keys, keys + 7]);
    let bias = (random.below(2) == 0).then(|| bias_strides(random, [batch, heads, queries, keys]));
    let bits = random.pick(&[DrawBits::B24, DrawBits::B16]);
    let (keys_total, key_base) = random.pick(&[(999, 1), (1008, 32)]);
    let query_base = random.below(700) as u64;
    Attention {
        batch,
        queries,
        keys,
        heads,
        kv_heads,
        dim,
        scale: 0.3 + random.number() * 0.1,
        causal: window > 0 || random.below(2) == 0,
        window,
        softcap: random.pick(&[0.0, 0.8]),
        bias_grad: false,
        bias,
        documents: None,
        query_offset: random.below(keys + 40) as i64 - 20,
        position: false,
        head_offset: Offset::Fixed(others as i64),
        group,
        dropout: (random.below(2) == 0).then_some(Dropout {
            p: 0.25,
            salt: 9,
            bits,
            sample_offset: 2,
            heads_total: 13,
            head_base: Offset::Fixed(4),
            queries_total: 1000,
            query_base,
            keys_total,
            key_base,
        }),
        dtype,
        q: spread(random, queries, heads),
        k: spread(random, keys, kv_heads),
        v: spread(random, keys, kv_heads),
        out: spread(random, queries, heads),
    }
}

/// Attention to tokens of packed documents.
pub(crate) fn random_packed(random: &mut Random, dtype: DType) -> Attention {
    packed(random, random_attention, dtype)
}

/// As many keys as queries, in documents, or of some of the queries more keys.
pub(crate) fn packed(
    random: &mut Random,
    draw: impl Fn(&mut Random, DType) -> Attention,
    dtype: DType,
) -> Attention {
    let mut a = draw(random, dtype);
    let before = random.pick(&[0, 0, 1, 70]);
    let behind = random.pick(&[0, 0, 40]);
    a.keys = before + a.queries + behind;
    for strides in [&mut a.k, &mut a.v] {
        strides[0] = a.keys * strides[1];
    }
    a.window = a.window.min(a.keys);
    let sizes = [a.batch, a.heads, a.queries, a.keys];
    a.bias = a.bias.map(|_| bias_strides(random, sizes));
    Attention { documents: Some(before), ..a }
}

/// The document of token `i` of sample `b`: of equal lengths one after the other, or the same with
/// numbers that come again, or any number for any token.
fn document(a: &Attention, b: usize, i: usize) -> i32 {
    let length = 1 + (7 * a.heads + 5 * a.dim + 31 * b) % 90;
    let scrambled = |n: usize| ((n * 2_654_435_761) >> 13) as i32 % 3 - 1;
    match (a.queries + a.dim) % 3 {
        0 => (i / length) as i32,
        1 => scrambled(i / length),
        _ => scrambled(i),
    }
}

/// The input that numbers documents, where there is one.
pub(crate) fn document_input(a: &Attention) -> Option<Buffer> {
    let all = (0..a.batch).flat_map(|b| (0..a.keys).map(move |i| document(a, b, i)));
    a.documents.map(|_| Buffer::I32(all.collect()))
}

/// Strides of a bias that has some of the dims batch, heads and queries, and shares the others.
pub(crate) fn bias_strides(
    random: &mut Random,
    [batch, heads, queries, keys]: [usize; 4],
) -> [usize; 3] {
    let mut stride = keys;
    let [s, h, b] = [queries, heads, batch].map(|size| {
        if random.below(2) == 0 {
            return 0;
        }
        let own = stride;
        stride *= size;
        own
    });
    [b, h, s]
}

/// A bias of which some numbers are minus infinity, and sometimes those of whole rows.
pub(crate) fn random_bias(a: &Attention, random: &mut Random) -> Vec<f64> {
    let Some(strides) = a.bias else { return Vec::new() };
    let len = Kernel::Attention(a.clone()).inputs()[3].len;
    let mut bias = random.numbers(len);
    for number in &mut bias {
        if random.below(5) == 0 {
            *number = f64::NEG_INFINITY;
        }
    }
    if strides[2] > 0 {
        for row in bias.chunks_mut(a.keys).filter(|_| random.below(4) == 0) {
            row.fill(f64::NEG_INFINITY);
        }
    }
    bias
}

fn visible(a: &Attention, b: usize, i: usize, j: usize) -> bool {
    if a.documents.is_some_and(|start| document(a, b, start + i) != document(a, b, j)) {
        return false;
    }
    let position = i as i64 + a.query_offset;
    let behind = position - j as i64;
    !a.causal || behind >= 0 && (a.window == 0 || behind < a.window as i64)
}

fn bias_at(a: &Attention, b: usize, h: usize, i: usize, j: usize) -> usize {
    a.bias.map_or(0, |strides| b * strides[0] + h * strides[1] + i * strides[2] + j)
}

/// A score, and the derivative of the bound of its scaled product.
fn score(a: &Attention, product: f64, bias: Option<&f64>) -> (f64, f64) {
    let scaled = a.scale * product;
    let bounded = (scaled / a.softcap).tanh();
    let (score, slope) = match a.softcap {
        0.0 => (scaled, 1.0),
        cap => (cap * bounded, 1.0 - bounded * bounded),
    };
    (score + bias.unwrap_or(&0.0), slope)
}

fn factor(a: &Attention, b: usize, h: usize, i: usize, j: usize) -> f64 {
    let Some(d) = &a.dropout else { return 1.0 };
    let key = Key::from_words(KEY);
    let sample = u64::from(key.sample) + d.sample_offset + b as u64;
    let head = d.head_base.bound() as u64 + h as u64;
    let row = (sample * d.heads_total + head) * d.queries_total + d.query_base;
    let index = (row + i as u64) * d.keys_total + d.key_base + j as u64;
    let draw = d.bits.uniform(key.stream(d.salt), index);
    if f64::from(draw) >= d.p { 1.0 / (1.0 - d.p) } else { 0.0 }
}

fn at(strides: [usize; 3], b: usize, s: usize, h: usize) -> usize {
    b * strides[0] + s * strides[1] + h * strides[2]
}

fn dot(x: &[f64], i: usize, y: &[f64], j: usize, dim: usize) -> f64 {
    (0..dim).map(|d| x[i + d] * y[j + d]).sum()
}

/// Output and log-sum-exp, into buffers whose other elements stay.
pub(crate) fn forward(a: &Attention, [q, k, v, bias]: [&[f64]; 4], out: &mut [f64]) -> Vec<f64> {
    let mut lse = Vec::new();
    for b in 0..a.batch {
        for h in 0..a.heads {
            let g = a.kv_head(h);
            for i in 0..a.queries {
                let seen: Vec<usize> = (0..a.keys).filter(|&j| visible(a, b, i, j)).collect();
                let score = |&j: &usize| {
                    let product = dot(q, at(a.q, b, i, h), k, at(a.k, b, j, g), a.dim);
                    score(a, product, bias.get(bias_at(a, b, h, i, j))).0
                };
                let scores: Vec<f64> = seen.iter().map(score).collect();
                let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = scores.iter().map(|s| (s - largest).exp()).sum();
                let is_empty = largest == f64::NEG_INFINITY;
                let row_lse = if is_empty { largest } else { largest + sum.ln() };
                lse.push(row_lse);
                for d in 0..a.dim {
                    let term = |(s, &j): (&f64, &usize)| {
                        if is_empty {
                            return 0.0;
                        }
                        (s - row_lse).exp() * factor(a, b, h, i, j) * v[at(a.v, b, j, g) + d]
                    };
                    out[at(a.out, b, i, h) + d] = scores.iter().zip(&seen).map(term).sum();
                }
            }
        }
    }
    lse
}

/// Gradients `dq dk dv dbias` by the formulas, into zeroed buffers.
pub(crate) fn backward(
    a: &Attention,
    [q, k, v, bias, dout]: [&[f64]; 5],
    grads: [&mut Vec<f64>; 4],
) {
    let mut out = vec![0.0; dout.len()];
    let lse = forward(a, [q, k, v, bias], &mut out);
    let [dq, dk, dv, dbias] = grads;
    for b in 0..a.batch {
        for h in 0..a.heads {
            let g = a.kv_head(h);
            for i in 0..a.queries {
                let (qi, oi) = (at(a.q, b, i, h), at(a.out, b, i, h));
                let delta = dot(&out, oi, dout, oi, a.dim);
                for j in (0..a.keys).filter(|&j| visible(a, b, i, j)) {
                    let (kj, vj) = (at(a.k, b, j, g), at(a.v, b, j, g));
                    let added = bias_at(a, b, h, i, j);
                    let (score, slope) = score(a, dot(q, qi, k, kj, a.dim), bias.get(added));
                    let lse = lse[(b * a.heads + h) * a.queries + i];
                    if lse == f64::NEG_INFINITY {
                        continue;
                    }
                    let weight = (score - lse).exp();
                    let z = factor(a, b, h, i, j);
                    let dscore = weight * (z * dot(dout, oi, v, vj, a.dim) - delta);
                    if a.bias_grad {
                        dbias[added] += dscore;
                    }
                    let ds = dscore * slope * a.scale;
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

pub(crate) fn key_input(a: &Attention) -> Option<Buffer> {
    a.dropout.as_ref().map(|_| Buffer::U32(KEY.to_vec()))
}

#[test]
pub(crate) fn attention_and_its_gradient_match_the_materialised_scores() {
    check_random(0..24, random_attention);
}

/// Of documents that stand one after the other, and of any numbers.
#[test]
pub(crate) fn attention_within_documents_matches_the_materialised_scores() {
    check_random(2000..2024, random_packed);
}

fn check_random(cases: Range<u64>, draw: impl Fn(&mut Random, DType) -> Attention) {
    for case in cases {
        let mut random = Random::new(case);
        for dtype in [DType::F32, DType::F64, DType::BF16] {
            let a = draw(&mut random, dtype);
            let tolerance = match dtype {
                DType::F32 => 3e-5,
                DType::F64 => 1e-12,
                // A weight and a result are rounded to 8 bits.
                _ => 1e-2,
            };
            let kernel = Kernel::Attention(a.clone());
            let mut buffer = |len: usize| Buffer::new(dtype, &random.numbers(len));
            let (lens, results) = (kernel.inputs(), kernel.outputs());
            let [q, k, v] = [0, 1, 2].map(|i| buffer(lens[i].len));
            let (out, dout) = (buffer(results[0].len), buffer(results[0].len));
            let lse = Buffer::new(results[1].dtype, &random.numbers(results[1].len));
            let bias = a.bias.map(|_| Buffer::new(dtype, &random_bias(&a, &mut random)));
            let mut inputs = vec![q.clone(), k.clone(), v.clone()];
            inputs.extend(bias.clone());
            inputs.extend(document_input(&a));
            inputs.extend(key_input(&a));
            let mut want = out.numbers();
            let added = bias.as_ref().map_or(Vec::new(), Buffer::numbers);
            let operands = [q.numbers(), k.numbers(), v.numbers(), added];
            let want_lse = forward(&a, operands.each_ref().map(Vec::as_slice), &mut want);
            for isa in sets() {
                let old = [out.clone(), lse.clone()];
                let got = run_on_threads(isa, &kernel, &inputs, &old);
                assert_close(&got[0].numbers(), &want, tolerance, &format!("out {isa:?} {a:?}"));
                assert_close(&got[1].numbers(), &want_lse, tolerance, &format!("lse {a:?}"));
                check_gradient(&a, [&q, &k, &v, &dout], bias.as_ref(), &got, isa, tolerance);
                if bias.is_some() {
                    let a = Attention { bias_grad: true, ..a.clone() };
                    check_gradient(&a, [&q, &k, &v, &dout], bias.as_ref(), &got, isa, tolerance);
                }
            }
        }
    }
}

fn check_gradient(
    a: &Attention,
    [q, k, v, dout]: [&Buffer; 4],
    bias: Option<&Buffer>,
    forward_outputs: &[Buffer],
    isa: Isa,
    tolerance: f64,
) {
    let kernel = Kernel::AttentionBwd(a.clone());
    let mut inputs = vec![q.clone(), k.clone(), v.clone()];
    inputs.extend(bias.cloned());
    inputs.extend(document_input(a));
    inputs.extend([forward_outputs[0].clone(), forward_outputs[1].clone(), dout.clone()]);
    inputs.extend(key_input(a));
    // Elements between the heads are nobody's and must stay.
    let old: Vec<Buffer> =
        kernel.outputs().iter().map(|o| Buffer::new(a.dtype, &vec![0.5; o.len])).collect();
    let got = run_on_threads(isa, &kernel, &inputs, &old);
    let mut grads: Vec<Vec<f64>> = kernel.outputs().iter().map(|o| vec![0.0; o.len]).collect();
    assert_eq!(grads.len(), if a.bias_grad { 4 } else { 3 });
    grads.resize(4, Vec::new());
    let [dq, dk, dv, dbias] = &mut grads[..] else { unreachable!("four gradients") };
    let added = bias.map_or(Vec::new(), Buffer::numbers);
    let numbers = [q.numbers(), k.numbers(), v.numbers(), added, dout.numbers()];
    backward(a, numbers.each_ref().map(Vec::as_slice), [dq, dk, dv, dbias]);
    if a.bias_grad {
        // Sums over samples, heads and queries.
        let what = format!("gradient of the bias on {isa:?} of {a:?}");
        assert_close(&got[3].numbers(), &grads[3], 20.0 * tolerance, &what);
    }
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
    for case in 0..8 {
        let mut random = Random::new(100 + case);
        let mut a = random_attention(&mut random, DType::F64);
        (a.queries, a.keys, a.query_offset) = (5, 6, 1);
        a.window = a.window.min(1 + random.below(7));
        let sizes = [a.batch, a.heads, a.queries, a.keys];
        a.bias = a.bias.map(|_| bias_strides(&mut random, sizes));
        a.bias_grad = a.bias.is_some();
        for t in [&mut a.q, &mut a.k, &mut a.v, &mut a.out] {
            t[0] = 6 * t[1];
        }
        let kernel = Kernel::AttentionBwd(a.clone());
        let lens: Vec<usize> = kernel.inputs().iter().map(|i| i.len).collect();
        let of_out = lens[3 + usize::from(a.bias.is_some())];
        let [q, k, v] = [0, 1, 2].map(|i| random.numbers(lens[i]));
        // Operands in the order of the gradients, then the cotangent.
        let tensors = [q, k, v, random_bias(&a, &mut random), random.numbers(of_out)];
        let lens: Vec<usize> = tensors.iter().map(Vec::len).collect();
        let loss = |t: &[Vec<f64>; 5]| -> f64 {
            let mut out = vec![0.0; of_out];
            forward(&a, [&t[0], &t[1], &t[2], &t[3]], &mut out);
            dot(&out, 0, &t[4], 0, of_out)
        };
        let mut out = vec![0.0; of_out];
        let lse = forward(&a, [&tensors[0], &tensors[1], &tensors[2], &tensors[3]], &mut out);
        let [q, k, v, bias, dout] = tensors.clone().map(Buffer::F64);
        let mut inputs = vec![q, k, v];
        inputs.extend(a.bias.map(|_| bias));
        inputs.extend([Buffer::F64(out), Buffer::F64(lse), dout]);
        inputs.extend(key_input(&a));
        let old: Vec<Buffer> =
            kernel.outputs().iter().map(|o| Buffer::F64(vec![0.0; o.len])).collect();
        let got = run_on_threads(Isa::detect(), &kernel, &inputs, &old);
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

/// Some of the queries alone, which lie without gaps.
pub(crate) fn of_queries(whole: &Attention, queries: Range<usize>) -> Attention {
    let Range { start, end } = queries;
    let layout = Attention::contiguous(end - start, whole.heads, whole.dim);
    let of_draws = |d: Dropout| Dropout { query_base: d.query_base + start as u64, ..d };
    Attention {
        queries: end - start,
        query_offset: whole.query_offset + start as i64,
        documents: whole.documents.map(|before| before + start),
        dropout: whole.dropout.clone().map(of_draws),
        q: layout,
        out: layout,
        ..whole.clone()
    }
}

/// Dropout of a model of four heads over these queries and keys.
pub(crate) fn dropout_of([queries, keys]: [usize; 2], bits: DrawBits) -> Dropout {
    Dropout {
        p: 0.25,
        salt: 9,
        bits,
        sample_offset: 0,
        heads_total: 4,
        head_base: Offset::Fixed(1),
        queries_total: queries as u64,
        query_base: 0,
        keys_total: keys as u64,
        key_base: 0,
    }
}

/// A tile of queries alone has the bits that it has among all queries, with dropout and documents
/// too.
#[test]
fn bits_of_a_query_do_not_depend_on_other_queries() {
    for (dtype, window) in [(DType::F32, 70), (DType::BF16, 70), (DType::BF16, 0)] {
        for isa in sets() {
            for bits in [None, Some(DrawBits::B24), Some(DrawBits::B16)] {
                let documents = (window == 0 || bits.is_none()).then_some(90);
                cut_queries(isa, dtype, window, (documents, bits));
            }
        }
    }
}

fn cut_queries(
    isa: Isa,
    dtype: DType,
    window: usize,
    (documents, bits): (Option<usize>, Option<DrawBits>),
) {
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
        window,
        softcap: 0.9,
        bias: Some([0, 300, 0]),
        bias_grad: false,
        documents,
        query_offset: 100,
        head_offset: Offset::ZERO,
        position: false,
        group: 1,
        dropout: bits.map(|bits| dropout_of([200, 300], bits)),
        dtype,
        q: layout(200),
        k: layout(300),
        v: layout(300),
        out: layout(200),
    };
    let q = random.numbers(200 * 64);
    let [k, v] = [0, 1].map(|_| Buffer::new(dtype, &random.numbers(300 * 64)));
    let bias = Buffer::new(dtype, &random.numbers(2 * 300));
    let attend = |from: usize, to: usize| {
        let (n, part) = (to - from, of_queries(&whole, from..to));
        let q = Buffer::new(dtype, &q[from * 64..to * 64]);
        let old = [Buffer::new(dtype, &vec![0.0; n * 64]), Buffer::F32(vec![0.0; n * 2])];
        let inputs = [q, k.clone(), v.clone(), bias.clone()].into_iter();
        let inputs = inputs.chain(document_input(&whole)).chain(key_input(&whole));
        let inputs: Vec<Buffer> = inputs.collect();
        run_on_threads(isa, &Kernel::Attention(part), &inputs, &old)[0].numbers()
    };
    let all = attend(0, 200);
    for (from, to) in [(0, 1), (1, 70), (70, 199), (199, 200)] {
        assert_eq!(attend(from, to), all[from * 64..to * 64], "queries {from}..{to}");
    }
}

/// A position of each sample that is known at run time counts as one that is known before, for few
/// queries and for many.
#[test]
pub(crate) fn a_position_is_added_at_run_time() {
    for case in 0..60 {
        let mut random = Random::new(1000 + case);
        let dtype = random.pick(&[DType::F32, DType::F64]);
        let known =
            Attention { causal: true, dropout: None, ..random_attention(&mut random, dtype) };
        let queries = if case % 2 == 0 { 1 + random.below(6) } else { known.queries };
        let mut known = Attention { queries, ..known };
        let sizes = [known.batch, known.heads, queries, known.keys];
        known.bias = known.bias.map(|_| bias_strides(&mut random, sizes));
        let known = known;
        let positions: Vec<usize> = (0..known.batch).map(|_| random.below(known.keys)).collect();
        let q = random.numbers(known.batch * known.q[0]);
        let [k, v] = [known.k, known.v].map(|strides| random.numbers(known.batch * strides[0]));
        let mut want = vec![0.5; known.batch * known.out[0]];
        let inputs = [&q, &k, &v].map(|x| Buffer::new(dtype, x));
        let [q, k, v] = inputs.each_ref().map(Buffer::numbers);
        let bias = known.bias.map(|_| Buffer::new(dtype, &random_bias(&known, &mut random)));
        let added = bias.as_ref().map_or(Vec::new(), Buffer::numbers);
        for (b, own) in want.chunks_mut(known.out[0]).enumerate() {
            let query_offset = known.query_offset + positions[b] as i64;
            let mut of_all = vec![0.5; known.batch * known.out[0]];
            let placed = Attention { query_offset, ..known.clone() };
            forward(&placed, [&q, &k, &v, &added], &mut of_all);
            own.copy_from_slice(&of_all[b * known.out[0]..][..known.out[0]]);
        }
        let kernel = Kernel::Attention(Attention { position: true, ..known });
        let mut inputs = inputs.to_vec();
        inputs.extend(bias);
        inputs.push(Buffer::I32(positions.iter().map(|position| *position as i32).collect()));
        let old = [Buffer::new(dtype, &vec![0.5; want.len()])];
        let tolerance = if dtype == DType::F32 { 2e-5 } else { 1e-12 };
        for isa in sets() {
            let got = run_on_threads(isa, &kernel, &inputs, &old);
            assert_eq!(got.len(), 1);
            assert_close(&got[0].numbers(), &want, tolerance, "out");
        }
    }
}
