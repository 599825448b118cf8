//! Routed experts and their gradient against loops over all pairs in f64.

use gantline_kernels::cpu::{Cpu, Isa};
use gantline_kernels::verify::verify;
use gantline_kernels::{Experts, Kernel};
use ir::DType;

use crate::{Buffer, Random, run, run_on_threads, same_bits, sets};

pub(crate) const TYPES: [DType; 4] = [DType::F32, DType::F64, DType::BF16, DType::F16];

/// The most that a result may be off, of the largest element of its tensor. With pairs of BF16 what
/// is inside of an expert is rounded, too.
pub(crate) fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-13,
        DType::F32 => 4e-6,
        DType::F16 => 1e-3,
        _ => 1.2e-2,
    }
}

/// Which gates are not 0.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Routing {
    /// This many experts of each token.
    TopK(usize),
    /// Those of one expert.
    One(usize),
    All,
    None,
    /// Any, but of the first expert none.
    Any,
}

fn routings(random: &mut Random, e: &Experts) -> [Routing; 5] {
    let one = Routing::One(random.below(e.experts));
    [Routing::TopK(e.top_k), one, Routing::All, Routing::None, Routing::Any]
}

fn gates(random: &mut Random, e: &Experts, routing: Routing) -> Vec<f64> {
    let mut gates = Vec::new();
    for _ in 0..e.tokens {
        let first = random.below(e.experts);
        for expert in 0..e.experts {
            let is_routed = match routing {
                Routing::TopK(count) => (expert + e.experts - first) % e.experts < count,
                Routing::One(one) => expert == one,
                Routing::All => true,
                Routing::None => false,
                Routing::Any => expert > 0 && random.below(3) == 0,
            };
            // Either zero is one.
            let zero = if random.below(2) == 0 { 0.0 } else { -0.0 };
            gates.push(if is_routed { 0.1 + random.number().abs() } else { zero });
        }
    }
    gates
}

pub(crate) fn random_experts(random: &mut Random, dtype: DType) -> Experts {
    let experts = 1 + random.below(6);
    Experts {
        tokens: random.pick(&[1, 2, 5, 31, 64, 130, 300]),
        experts,
        model: random.pick(&[1, 3, 16, 40, 97, 200]),
        inner: random.pick(&[1, 7, 33, 96, 100, 210]),
        top_k: 1 + random.below(experts),
        of: experts,
        accumulate: [false; 3],
        dtype,
    }
}

/// `x gates w_gate w_up w_down dy`: what is inside of experts is about one. Tokens without gates
/// are no numbers: nothing reads them.
pub(crate) fn operands(random: &mut Random, e: &Experts, routing: Routing) -> Vec<Buffer> {
    let [of_model, of_inner] = [e.model, e.inner].map(|size| 2.0 / (size as f64).sqrt());
    let mut numbers = |len: usize, scale: f64| -> Vec<f64> {
        random.numbers(len).iter().map(|x| x * scale).collect()
    };
    let rows = e.tokens * e.model;
    let weights = [of_model, of_model, of_inner].map(|scale| numbers(e.weights(), scale));
    let (mut x, mut dy) = (numbers(rows, 1.0), numbers(rows, 1.0));
    let gates = gates(random, e, routing);
    for (token, gates) in gates.chunks(e.experts).enumerate() {
        if gates.iter().all(|gate| *gate == 0.0) {
            let row = token * e.model..(token + 1) * e.model;
            [&mut x, &mut dy].into_iter().for_each(|of| of[row.clone()].fill(f64::NAN));
        }
    }
    let [w_gate, w_up, w_down] = weights;
    [x, gates, w_gate, w_up, w_down, dy].iter().map(|x| Buffer::new(e.dtype, x)).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `target += factor · row`.
fn add(target: &mut [f64], factor: f64, row: &[f64]) {
    target.iter_mut().zip(row).for_each(|(t, x)| *t += factor * x);
}

/// `y`, then the gradients, by the formulas, pair by pair.
pub(crate) fn reference(e: &Experts, operands: &[Buffer]) -> (Vec<f64>, [Vec<f64>; 5]) {
    reference_rounded(e, operands, &|x| x)
}

/// The same, where what is multiplied is rounded before.
pub(crate) fn reference_rounded(
    e: &Experts,
    operands: &[Buffer],
    round: &dyn Fn(f64) -> f64,
) -> (Vec<f64>, [Vec<f64>; 5]) {
    let numbers: Vec<Vec<f64>> = operands.iter().map(Buffer::numbers).collect();
    let [x, gates, w_gate, w_up, w_down, dy] = &numbers[..] else { panic!("six operands") };
    let Experts { tokens, experts, model, inner, .. } = *e;
    let mut y = vec![0.0; tokens * model];
    let [mut dgate, mut dup, mut ddown] = [0; 3].map(|_| vec![0.0; e.weights()]);
    let (mut dx, mut dgates) = (vec![0.0; tokens * model], vec![0.0; tokens * experts]);
    for token in 0..tokens {
        let of_token = token * model..(token + 1) * model;
        let (x, dy) = (&x[of_token.clone()], &dy[of_token.clone()]);
        for expert in 0..experts {
            let share = gates[token * experts + expert];
            if share == 0.0 {
                continue;
            }
            for f in 0..inner {
                let row = (expert * inner + f) * model;
                let row = row..row + model;
                let column = |m: usize| (expert * model + m) * inner + f;
                let gate = dot(x, &w_gate[row.clone()]);
                let up = dot(x, &w_up[row.clone()]);
                let sigmoid = 1.0 / (1.0 + (-gate).exp());
                let inside = gate * sigmoid * up;
                let weighted = round(share * inside);
                let mut outer = 0.0;
                for m in 0..model {
                    y[token * model + m] += weighted * w_down[column(m)];
                    outer += dy[m] * w_down[column(m)];
                    ddown[column(m)] += dy[m] * weighted;
                }
                dgates[token * experts + expert] += outer * inside;
                let of_up = round(share * outer * gate * sigmoid);
                let slope = sigmoid * (1.0 + gate * (1.0 - sigmoid));
                let of_gate = round(share * outer * up * slope);
                add(&mut dgate[row.clone()], of_gate, x);
                add(&mut dup[row.clone()], of_up, x);
                add(&mut dx[of_token.clone()], of_gate, &w_gate[row.clone()]);
                add(&mut dx[of_token.clone()], of_up, &w_up[row]);
            }
        }
    }
    (y, [dx, dgates, dgate, dup, ddown])
}

/// Gradients, of which some are added to what outputs hold.
pub(crate) fn with_old(e: &Experts, gradients: [Vec<f64>; 5], old: &[Buffer]) -> Vec<Vec<f64>> {
    let adds = [false; 2].into_iter().chain(e.accumulate);
    let gradients = gradients.into_iter().zip(old).zip(adds);
    gradients
        .map(|((new, old), adds)| {
            let old = old.numbers();
            let old = |at: usize| if adds { old[at] } else { 0.0 };
            new.iter().enumerate().map(|(at, x)| x + old(at)).collect()
        })
        .collect()
}

/// The distance of the element that is furthest from what it should be, over the largest one of the
/// tensor; infinite where it is no number.
pub(crate) fn furthest(found: &Buffer, want: &[f64]) -> f64 {
    let found = found.numbers();
    assert_eq!(found.len(), want.len());
    let most = want.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
    let off = |(found, want): (&f64, &f64)| match (found - want).abs() {
        0.0 => 0.0,
        apart if apart.is_nan() => f64::INFINITY,
        apart => apart / most,
    };
    found.iter().zip(want).map(off).fold(0.0, f64::max)
}

pub(crate) fn assert_near(found: &Buffer, want: &[f64], tolerance: f64, what: &str) {
    let share = furthest(found, want);
    assert!(share <= tolerance, "{what}: an element is {share} of the largest off");
}

/// The forward and the backward kernel, with what their outputs hold before.
pub(crate) fn kernels(random: &mut Random, e: &Experts) -> [(Kernel, Vec<Buffer>); 2] {
    let forward = Experts { accumulate: [false; 3], ..e.clone() };
    [Kernel::Experts(forward), Kernel::ExpertsBwd(e.clone())].map(|kernel| {
        verify(&kernel).unwrap_or_else(|why| panic!("{kernel}: {why}"));
        let outputs = kernel.outputs();
        let old = outputs.iter().map(|of| Buffer::new(of.dtype, &random.numbers(of.len)));
        (kernel, old.collect())
    })
}

pub(crate) const GRADIENTS: [&str; 5] = ["dx", "dgates", "dw_gate", "dw_up", "dw_down"];

#[test]
fn experts_are_the_pairs_of_their_tokens() {
    for case in 0..60 {
        let mut random = Random::new(case);
        let mut e = random_experts(&mut random, TYPES[case as usize % 4]);
        e.accumulate = [0; 3].map(|_| random.below(4) == 0);
        let routing = routings(&mut random, &e)[case as usize / 4 % 5];
        let operands = operands(&mut random, &e, routing);
        let (y, gradients) = reference(&e, &operands);
        let [(forward, old), (backward, old_gradients)] = kernels(&mut random, &e);
        let gradients = with_old(&e, gradients, &old_gradients);
        for isa in sets() {
            let what = |of: &str| format!("{of} of {e:?}, {routing:?}, on {isa:?}");
            let tolerance = tolerance(e.dtype);
            let found = run_on_threads(isa, &forward, &operands[..5], &old);
            assert_near(&found[0], &y, tolerance, &what("y"));
            let found = run_on_threads(isa, &backward, &operands, &old_gradients);
            for (at, want) in gradients.iter().enumerate() {
                assert_near(&found[at], want, tolerance, &what(GRADIENTS[at]));
            }
            // Where there is no pair the gradient of a gate is zero, not nearly so.
            for (gate, found) in operands[1].numbers().iter().zip(found[1].numbers()) {
                assert!(*gate != 0.0 || found.to_bits() == 0, "{}", what("dgates"));
            }
        }
    }
}

/// Weights of experts that no token passes are not read.
#[test]
fn experts_without_tokens_are_not_read() {
    for (case, dtype) in TYPES.into_iter().enumerate() {
        let mut random = Random::new(900 + case as u64);
        let (experts, accumulate, top_k) = (4, [false; 3], 1);
        let (tokens, model, inner) = (37, 40, 70);
        let e = Experts { tokens, experts, model, inner, top_k, of: experts, accumulate, dtype };
        let mut operands = operands(&mut random, &e, Routing::One(2));
        let (y, gradients) = reference(&e, &operands);
        for buffer in &mut operands[2..5] {
            let mut numbers = buffer.numbers();
            let size = inner * model;
            numbers[..2 * size].fill(f64::NAN);
            numbers[3 * size..].fill(f64::NAN);
            *buffer = Buffer::new(dtype, &numbers);
        }
        let [(forward, old), (backward, old_gradients)] = kernels(&mut random, &e);
        for isa in sets() {
            let found = run_on_threads(isa, &forward, &operands[..5], &old);
            assert_near(&found[0], &y, tolerance(dtype), "y");
            let found = run_on_threads(isa, &backward, &operands, &old_gradients);
            for (at, want) in gradients.iter().enumerate() {
                assert_near(&found[at], want, tolerance(dtype), GRADIENTS[at]);
            }
        }
    }
}

/// A gate that is no number makes its token none, and no other.
#[test]
fn a_gate_that_is_no_number_is_a_pair() {
    for (case, dtype) in TYPES.into_iter().enumerate() {
        let mut random = Random::new(950 + case as u64);
        let e = Experts {
            tokens: 9,
            experts: 3,
            of: 3,
            top_k: 1,
            ..random_experts(&mut random, dtype)
        };
        let mut operands = operands(&mut random, &e, Routing::TopK(1));
        let mut gates = operands[1].numbers();
        gates[4 * e.experts + 1] = f64::NAN;
        operands[1] = Buffer::new(dtype, &gates);
        let [(forward, old), _] = kernels(&mut random, &e);
        for isa in sets() {
            let found = run_on_threads(isa, &forward, &operands[..5], &old)[0].numbers();
            for (at, y) in found.iter().enumerate() {
                assert_eq!(y.is_nan(), at / e.model == 4, "{y} of token {}", at / e.model);
            }
        }
    }
}

/// The kernel of `tokens` of the tokens, and its operands.
fn piece(e: &Experts, operands: &[Buffer], tokens: [usize; 2]) -> (Experts, Vec<Buffer>) {
    let [from, to] = tokens;
    let cut =
        |at: usize, row: usize| Buffer::new(e.dtype, &operands[at].numbers()[from * row..to * row]);
    let weights = operands[2..5].to_vec();
    let [x, gates, dy] = [cut(0, e.model), cut(1, e.experts), cut(5, e.model)];
    let operands = [vec![x, gates], weights, vec![dy]].concat();
    (Experts { tokens: to - from, ..e.clone() }, operands)
}

/// What a token yields depends on no other token.
#[test]
fn tokens_may_be_cut() {
    for case in 0..16 {
        let mut random = Random::new(1000 + case);
        let e = random_experts(&mut random, TYPES[case as usize % 4]);
        let routing = routings(&mut random, &e)[case as usize / 4];
        let operands = operands(&mut random, &e, routing);
        let middle = random.below(e.tokens + 1);
        for isa in sets() {
            let cpu = Cpu::with_isa(2, isa);
            let mut results = |e: &Experts, operands: &[Buffer]| {
                let [(forward, old), (backward, old_gradients)] = kernels(&mut random, e);
                let y = run(&cpu, &forward, &operands[..5], &old);
                let gradients = run(&cpu, &backward, operands, &old_gradients);
                [&y[0], &gradients[0], &gradients[1]].map(Buffer::numbers)
            };
            let whole = results(&e, &operands);
            let mut joined = [0; 3].map(|_| Vec::new());
            for tokens in [[0, middle], [middle, e.tokens]] {
                let (piece, of_piece) = piece(&e, &operands, tokens);
                for (all, found) in joined.iter_mut().zip(results(&piece, &of_piece)) {
                    all.extend(found);
                }
            }
            assert_eq!(whole, joined, "{middle} of {e:?} on {isa:?}");
        }
    }
}

/// Two experts that all tokens pass, so wide that there are several passes.
fn of_passes(random: &mut Random, inner: usize, dtype: DType) -> (Experts, Vec<Buffer>) {
    let (tokens, experts, model, top_k) = (600, 2, 3, 1);
    let e = Experts {
        tokens,
        experts,
        model,
        inner,
        top_k,
        of: experts,
        accumulate: [false; 3],
        dtype,
    };
    let operands = operands(random, &e, Routing::All);
    (e, operands)
}

/// A pass of 913 rows ends within the second expert: its gradients have the bits that it has alone,
/// in one pass.
#[test]
fn passes_change_no_bit() {
    for (case, dtype) in [DType::F32, DType::BF16].into_iter().enumerate() {
        let mut random = Random::new(1100 + case as u64);
        let (e, operands) = of_passes(&mut random, 6_100, dtype);
        let size = e.model * e.inner;
        let mut alone = operands.clone();
        let gates: Vec<f64> = operands[1].numbers().into_iter().skip(1).step_by(2).collect();
        alone[1] = Buffer::new(dtype, &gates);
        for weights in &mut alone[2..5] {
            *weights = Buffer::new(dtype, &weights.numbers()[size..]);
        }
        let single = Experts { experts: 1, ..e.clone() };
        let isa = Isa::detect();
        let [_, (backward, old)] = kernels(&mut random, &e);
        let all = run_on_threads(isa, &backward, &operands, &old);
        let (_, want) = reference(&e, &operands);
        for (at, want) in want.iter().enumerate() {
            assert_near(&all[at], want, tolerance(dtype), GRADIENTS[at]);
        }
        let [_, (backward, old)] = kernels(&mut random, &single);
        let one = run_on_threads(isa, &backward, &alone, &old);
        for kind in 2..5 {
            let second = Buffer::new(DType::F32, &all[kind].numbers()[size..]);
            assert!(same_bits(&second, &one[kind]), "{} of {dtype}", GRADIENTS[kind]);
        }
    }
}

/// A pass of 838 rows has one expert.
#[test]
fn sums_over_experts_go_on_in_the_next_pass() {
    for (case, dtype) in [DType::F32, DType::BF16].into_iter().enumerate() {
        let mut random = Random::new(1150 + case as u64);
        let (e, operands) = of_passes(&mut random, 20_000, dtype);
        let [(forward, old), _] = kernels(&mut random, &e);
        let y = run_on_threads(Isa::detect(), &forward, &operands[..5], &old);
        assert_near(&y[0], &reference(&e, &operands).0, tolerance(dtype), "y");
    }
}

/// The gradients, where gates are not 0, against differences of the forward kernel.
#[test]
fn the_gradient_is_that_of_finite_differences() {
    for case in 0..6 {
        let mut random = Random::new(1200 + case);
        let sizes = [0; 4].map(|_| 1 + random.below(5));
        let [tokens, experts, model, inner] = sizes;
        let (top_k, accumulate, dtype) = (1, [false; 3], DType::F64);
        let e = Experts { tokens, experts, model, inner, top_k, of: experts, accumulate, dtype };
        let operands = operands(&mut random, &e, Routing::TopK(experts.div_ceil(2)));
        let [(forward, old), (backward, old_gradients)] = kernels(&mut random, &e);
        let cpu = Cpu::new(1);
        let loss = |operands: &[Buffer]| {
            let y = run(&cpu, &forward, &operands[..5], &old)[0].numbers();
            dot(&y, &operands[5].numbers())
        };
        let gradients = run(&cpu, &backward, &operands, &old_gradients);
        for (at, gradient) in gradients.iter().enumerate() {
            for (element, found) in gradient.numbers().into_iter().enumerate() {
                if at == 1 && operands[1].numbers()[element] == 0.0 {
                    continue;
                }
                let moved = |by: f64| {
                    let mut numbers = operands[at].numbers();
                    numbers[element] += by;
                    let mut moved = operands.clone();
                    moved[at] = Buffer::F64(numbers);
                    loss(&moved)
                };
                let slope = (moved(1e-5) - moved(-1e-5)) / 2e-5;
                let what = format!("{}[{element}] is {found}, not {slope}", GRADIENTS[at]);
                assert!((found - slope).abs() < 1e-7, "{what}: {e:?}");
            }
        }
    }
}

/// Experts with one empty dim each.
pub(crate) fn with_empty_dims() -> [Experts; 4] {
    let accumulate = [false, true, false];
    let [tokens, experts, model, inner] = [3, 2, 4, 5];
    let (top_k, of, dtype) = (1, 2, DType::F32);
    let full = Experts { tokens, experts, model, inner, top_k, of, accumulate, dtype };
    [
        Experts { tokens: 0, ..full.clone() },
        Experts { experts: 0, ..full.clone() },
        Experts { model: 0, ..full.clone() },
        Experts { inner: 0, ..full },
    ]
}

/// Empty dims: results are zero, and what is added to stays.
#[test]
fn nothing_is_computed_of_nothing() {
    let mut random = Random::new(1300);
    for e in with_empty_dims() {
        let [tokens, experts, model, inner] = [3, 2, 4, 5];
        let full = Experts { tokens, experts, model, inner, ..e.clone() };
        let operands = operands(&mut random, &full, Routing::All);
        let [(forward, old), (backward, old_gradients)] = kernels(&mut random, &e);
        let fit = |kernel: &Kernel| -> Vec<Buffer> {
            let wanted = kernel.inputs().into_iter().zip(&operands);
            wanted.map(|(of, all)| Buffer::new(of.dtype, &all.numbers()[..of.len])).collect()
        };
        let y = run_on_threads(Isa::detect(), &forward, &fit(&forward), &old);
        assert!(y[0].numbers().iter().all(|y| *y == 0.0), "{e:?}");
        let found = run_on_threads(Isa::detect(), &backward, &fit(&backward), &old_gradients);
        for (at, (found, old)) in found.iter().zip(&old_gradients).enumerate() {
            let zeros = Buffer::new(e.dtype, &vec![0.0; old.numbers().len()]);
            let want = if at == 3 { old } else { &zeros };
            assert!(same_bits(found, want), "{} of {e:?}", GRADIENTS[at]);
        }
    }
}
