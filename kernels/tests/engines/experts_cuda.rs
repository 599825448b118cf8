//! The text of routed experts and of their gradient for GPUs, executed by the shim, against loops
//! over all pairs in f64 and the CPU's kernel; mistakes that are planted in it.

use gantline_kernels::cpu::{Cpu, Isa};
use gantline_kernels::cuda::{Arch, Functions, functions, functions_for};
use gantline_kernels::{Experts, Kernel};
use ir::DType;

use crate::experts::{
    GRADIENTS, Routing, TYPES, assert_near, furthest, kernels, operands, random_experts,
    reference_rounded, tolerance, with_empty_dims, with_old,
};
use crate::shim::{Library, compiler};
use crate::tensor::{EACH, mistaken};
use crate::{Buffer, Case, Random, run, runs_all, same_bits};

/// A launch of experts or of their gradient, with what its results should be.
pub(crate) struct Expected {
    pub(crate) case: Case,
    pub(crate) functions: Functions,
    want: Vec<Vec<f64>>,
}

impl Expected {
    /// How far results are from what they should be, over how far they may be.
    pub(crate) fn share(&self, found: &[Buffer]) -> f64 {
        let limit = limit(&self.case.kernel);
        let outputs = self.want.iter().zip(found);
        outputs.map(|(want, found)| furthest(found, want) / limit).fold(0.0, f64::max)
    }
}

/// Random shapes of each architecture.
const NUMBERS: u64 = 9;

/// The most that a result may be off, of the largest element of its tensor.
fn limit(kernel: &Kernel) -> f64 {
    match kernel.outputs()[0].dtype {
        DType::BF16 => 6e-3,
        dtype => tolerance(dtype),
    }
}

/// How text is made of a kernel.
type Lowered<'a> = &'a dyn Fn(&Kernel) -> Functions;

const ARCHS: [(&str, Lowered<'static>); 3] = [
    ("any", &functions),
    ("sm_80", &|kernel| functions_for(kernel, Arch::Sm80)),
    ("sm_90a", &|kernel| functions_for(kernel, Arch::Sm90a)),
];

/// How tokens are routed: at most as many pairs of each as it has room for.
fn routing(random: &mut Random, e: &mut Experts) -> Routing {
    match random.below(6) {
        0 => Routing::One(random.below(e.experts)),
        1 => {
            (e.top_k, e.of) = (e.experts, e.experts);
            Routing::All
        }
        2 => Routing::None,
        3 => {
            // Some tokens pass fewer experts, and none the first.
            (e.top_k, e.of) = (e.experts, e.experts);
            Routing::Any
        }
        _ => Routing::TopK(e.top_k.min(e.experts)),
    }
}

/// What the kernels should yield, which round what is multiplied to the type of tensors.
fn rounded(e: &Experts, operands: &[Buffer]) -> (Vec<f64>, [Vec<f64>; 5]) {
    reference_rounded(e, operands, &|x| Buffer::new(e.dtype, &[x]).numbers()[0])
}

/// Both kernels on random shapes.
pub(crate) fn expected(number: u64, dtype: DType, lowered: Lowered<'_>) -> [Expected; 2] {
    let mut random = Random::new(number);
    let mut e = random_experts(&mut random, dtype);
    match number % 7 {
        0 => e.tokens = 1,
        // More experts than tokens, of which other ranks have as many.
        1 => (e.experts, e.tokens, e.top_k, e.of) = (9, 4, 3, 18),
        2 => (e.experts, e.top_k, e.of) = (1, 1, 4),
        _ => {}
    }
    e.accumulate = [0; 3].map(|_| random.below(3) == 0);
    let routing = routing(&mut random, &mut e);
    let operands = operands(&mut random, &e, routing);
    let (y, gradients) = rounded(&e, &operands);
    let [(forward, old), (backward, old_gradients)] = kernels(&mut random, &e);
    let gradients = with_old(&e, gradients, &old_gradients);
    let launch = |kernel: Kernel, inputs: &[Buffer], old: Vec<Buffer>, want: Vec<Vec<f64>>| {
        let functions = lowered(&kernel);
        let case = Case { kernel, scalars: Vec::new(), inputs: inputs.to_vec(), old };
        Expected { case, functions, want }
    };
    [
        launch(forward, &operands[..5], old, vec![y]),
        launch(backward, &operands, old_gradients, gradients),
    ]
}

fn library(name: &str, all: &[Expected]) -> Library {
    let texts = all.iter().map(|of| (of.case.kernel.clone(), of.functions.clone())).collect();
    Library::new(name, texts).expect("there is a compiler")
}

fn names(expected: &Expected) -> &'static [&'static str] {
    if expected.want.len() == 1 { &["y"] } else { &GRADIENTS }
}

#[test]
fn text_of_experts_is_near_the_pairs_of_their_tokens() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    for (arch, lowered) in ARCHS {
        let types: &[DType] = if arch == "any" { &TYPES } else { &TYPES[2..] };
        let of = |case: u64| expected(case, types[case as usize % types.len()], lowered);
        let all: Vec<Expected> = (0..NUMBERS).flat_map(of).collect();
        let library = library(&format!("experts-{arch}"), &all);
        for (at, expected) in all.iter().enumerate() {
            let found = expected.case.execute(&library, at, 0);
            let what = |name: &str| format!("{name} for {arch}: {:?}", expected.case.kernel);
            for ((name, want), found) in names(expected).iter().zip(&expected.want).zip(&found) {
                assert_near(found, want, limit(&expected.case.kernel), &what(name));
            }
            let again = expected.case.execute(&library, at, 3 + at as u64);
            let is_same = again.iter().zip(&found).all(|(a, b)| same_bits(a, b));
            assert!(is_same, "the order of threads changes bits: {}", what(""));
            if expected.want.len() > 1 {
                let gates = expected.case.inputs[1].numbers();
                for (gate, found) in gates.iter().zip(found[1].numbers()) {
                    assert!(*gate != 0.0 || found.to_bits() == 0, "{}", what("dgates"));
                }
            }
        }
    }
}

/// On CUDA cores `y`, `dx` and gradients of weights of F32 have the bits of the CPU's.
#[test]
fn text_of_experts_on_cuda_cores_has_the_bits_of_the_cpu() {
    if compiler().is_none() || !Isa::Avx2.is_available() {
        println!("skipped: no C++ compiler, or no AVX2");
        return;
    }
    let all: Vec<Expected> =
        (20..28).flat_map(|case| expected(case, DType::F32, &functions)).collect();
    let library = library("experts-bits", &all);
    for (at, expected) in all.iter().enumerate() {
        let Case { kernel, inputs, old, .. } = &expected.case;
        let want = run(&Cpu::with_isa(1, Isa::Avx2), kernel, inputs, old);
        let found = expected.case.execute(&library, at, 0);
        for (output, (want, found)) in want.iter().zip(&found).enumerate() {
            // Gradients of gates are summed in another order.
            let is_gates = want.numbers().len() > 1 && expected.want.len() > 1 && output == 1;
            assert!(is_gates || same_bits(want, found), "output {output} of {kernel:?}");
        }
    }
}

/// A token with more pairs than it has room for is no number, and no other is.
#[test]
fn tokens_with_too_many_pairs_are_no_numbers() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    for (arch, lowered) in ARCHS {
        let mut random = Random::new(40);
        let (tokens, experts, model, inner, top_k) = (70, 4, 24, 40, 2);
        let (accumulate, dtype, of) = ([false; 3], DType::BF16, experts);
        let e = Experts { tokens, experts, model, inner, top_k, of, accumulate, dtype };
        let mut operands = operands(&mut random, &e, Routing::TopK(top_k));
        let mut gates = operands[1].numbers();
        let crowded = 33;
        gates[crowded * experts..(crowded + 1) * experts].fill(0.5);
        operands[1] = Buffer::new(dtype, &gates);
        let all: Vec<Case> = kernels(&mut random, &e)
            .into_iter()
            .map(|(kernel, old)| {
                let count = kernel.inputs().len();
                Case { inputs: operands[..count].to_vec(), kernel, scalars: Vec::new(), old }
            })
            .collect();
        let texts = all.iter().map(|of| (of.kernel.clone(), lowered(&of.kernel))).collect();
        let library =
            Library::new(&format!("experts-crowded-{arch}"), texts).expect("there is a compiler");
        for (at, case) in all.iter().enumerate() {
            for (element, x) in case.execute(&library, at, 0)[0].numbers().iter().enumerate() {
                assert_eq!(x.is_nan(), element / model == crowded, "{element} is {x}, {arch}");
            }
        }
    }
}

/// Weights of experts that no token passes are not read.
#[test]
fn text_does_not_read_experts_without_tokens() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    for (arch, lowered) in ARCHS {
        let mut all = Vec::new();
        let mut random = Random::new(50);
        let (experts, accumulate, top_k, of, dtype) = (4, [false; 3], 1, 4, DType::BF16);
        let (tokens, model, inner) = (37, 40, 72);
        let e = Experts { tokens, experts, model, inner, top_k, of, accumulate, dtype };
        let mut operands = operands(&mut random, &e, Routing::One(2));
        let (y, gradients) = rounded(&e, &operands);
        for buffer in &mut operands[2..5] {
            let mut numbers = buffer.numbers();
            let size = inner * model;
            numbers[..2 * size].fill(f64::NAN);
            numbers[3 * size..].fill(f64::NAN);
            *buffer = Buffer::new(dtype, &numbers);
        }
        for ((kernel, old), want) in
            kernels(&mut random, &e).into_iter().zip([vec![y], gradients.to_vec()])
        {
            let inputs = operands[..kernel.inputs().len()].to_vec();
            let functions = lowered(&kernel);
            let case = Case { kernel, scalars: Vec::new(), inputs, old };
            all.push(Expected { case, functions, want });
        }
        let library = library(&format!("experts-unread-{arch}"), &all);
        for (at, expected) in all.iter().enumerate() {
            let found = expected.case.execute(&library, at, 0);
            for ((name, want), found) in names(expected).iter().zip(&expected.want).zip(&found) {
                let limit = limit(&expected.case.kernel);
                assert_near(found, want, limit, &format!("{name} for {arch}"));
            }
        }
    }
}

/// Empty dims: results are zero, and what is added to stays.
#[test]
fn text_computes_nothing_of_nothing() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let mut random = Random::new(60);
    let mut all = Vec::new();
    for e in with_empty_dims() {
        for (kernel, old) in kernels(&mut random, &e) {
            let inputs = kernel.inputs().into_iter();
            let inputs = inputs.map(|of| Buffer::new(of.dtype, &random.numbers(of.len))).collect();
            all.push(Case { kernel, scalars: Vec::new(), inputs, old });
        }
    }
    let texts = all.iter().map(|of| (of.kernel.clone(), functions(&of.kernel))).collect();
    let library = Library::new("experts-empty", texts).expect("there is a compiler");
    for (at, case) in all.iter().enumerate() {
        let want = run(&Cpu::new(1), &case.kernel, &case.inputs, &case.old);
        assert_eq!(case.execute(&library, at, 0), want, "{:?}", case.kernel);
    }
}

/// What can be wrong: for which architecture, of the gradient or not, in which function, what is
/// replaced, which time, and by what.
type Mistake = (usize, usize, usize, &'static str, usize, &'static str);

/// The stride at which mistakes are sampled, unless all are planted.
const SAMPLED: usize = 4;

const MISTAKES: [Mistake; 33] = [
    // Which rows pairs have.
    (0, 0, 0, "pairs += is_pair ? 1 : 0;", 0, "pairs += 1;"),
    (0, 0, 1, "sync_block();", 0, ""),
    (0, 0, 1, "sync_block();", 1, ""),
    (0, 0, 1, "before + sum - own", 0, "before + sum"),
    (0, 0, 1, "before += shuffle(sum, 31);", 1, ""),
    (0, 0, 1, "at < end / 64", 0, "at < end / 64 - 1"),
    (0, 1, 2, "= 0xffffffffu;", 0, "= 0;"),
    (0, 1, 3, "(1u << lane) - 1", 0, "(2u << lane) - 1"),
    (0, 0, 2, "+ before +", 0, "+"),
    (0, 1, 3, "* 32 + lane", 0, "* 32 + (lane ^ 1)"),
    (0, 0, 2, "] = 0xffffffffu;", 0, "] = 0;"),
    // Rows there and back.
    (0, 0, 3, "(u64)token * ", 0, "(u64)row % 7 * "),
    (0, 0, 6, "* 3 + pair]", 0, "* 3 + 2 - pair]"),
    // Products on CUDA cores.
    (0, 0, 4, "const u64 batch = ", 0, "const u64 batch = 1 + 0 * "),
    (0, 0, 4, "% 2 == 0 ? ", 0, "% 2 == 1 ? "),
    (0, 0, 4, " * share", 0, ""),
    (0, 1, 7, "1 - sigmoid", 0, "1 + sigmoid"),
    (0, 1, 7, "shuffle_xor(sum, 8)", 0, "shuffle_xor(sum, 4)"),
    (0, 1, 12, "= first_k + ", 0, "= 32 + first_k + "),
    (0, 1, 12, "const u32 first_k = ", 0, "const u32 first_k = 64 + 0 * "),
    // Those by mma.sync.
    (1, 0, 4, "const u64 batch = ", 0, "const u64 batch = 1 + 0 * "),
    (1, 0, 4, "/ 16 % 2 == 0", 0, "/ 8 % 2 == 0"),
    (1, 0, 4, "acc[i][j + t + 2]", 0, "acc[i][j + t]"),
    (1, 0, 4, "exchange_columns(x0_pairs);", 0, ""),
    (1, 1, 7, "shuffle_xor(sum, 2)", 0, "shuffle_xor(sum, 1)"),
    (1, 1, 7, "exchange_columns(x2_pairs);", 0, ""),
    (1, 1, 12, "k < end_k", EACH, "k < end_k - 1"),
    (1, 1, 12, "+ 31) / 32;", 0, ") / 32;"),
    // Those by wgmma.
    (2, 0, 4, "const u64 batch = ", 1, "const u64 batch = 1 + 0 * "),
    (2, 0, 4, "acc[32 + (j", 0, "acc[(j"),
    (2, 0, 4, "other_map, full", 0, "b_map, full"),
    (2, 1, 12, "const u32 first_k = ", 0, "const u32 first_k = 128 + 0 * "),
    (2, 1, 12, "+ 63) / 64;", 0, ") / 64;"),
];

/// Results with a mistake in the text have other bits. In launches on which the mistakes are
/// planted each token but one passes three of five experts.
#[test]
fn mistakes_in_the_text_of_experts_are_found() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let mut launches = Vec::new();
    for (number, (_, lowered)) in ARCHS.iter().enumerate() {
        let mut random = Random::new(70);
        let dtype = if number == 0 { DType::F32 } else { DType::BF16 };
        let (tokens, experts, model, inner, top_k) = (70, 5, 40, 72, 3);
        let (accumulate, of) = ([false; 3], experts);
        let e = Experts { tokens, experts, model, inner, top_k, of, accumulate, dtype };
        let mut operands = operands(&mut random, &e, Routing::TopK(top_k));
        let mut gates = operands[1].numbers();
        gates[7 * experts..8 * experts].fill(0.0);
        operands[1] = Buffer::new(dtype, &gates);
        launches.push(kernels(&mut random, &e).map(|(kernel, old)| {
            let inputs = operands[..kernel.inputs().len()].to_vec();
            let functions = lowered(&kernel);
            (Case { kernel, scalars: Vec::new(), inputs, old }, functions)
        }));
    }
    let text = |(arch, kernel): (usize, usize)| {
        let (case, functions) = &launches[arch][kernel];
        (case.kernel.clone(), functions.clone())
    };
    let right = [0, 1, 2].map(|arch| [(arch, 0), (arch, 1)]).concat();
    let mut texts: Vec<(Kernel, Functions)> = right.iter().map(|at| text(*at)).collect();
    let step = if runs_all() { 1 } else { SAMPLED };
    let first = Random::new(3).below(step);
    let planted: Vec<Mistake> = MISTAKES.iter().copied().skip(first).step_by(step).collect();
    texts.extend(planted.iter().map(|(arch, kernel, ..)| text((*arch, *kernel))));
    let change = |at: usize, text: String| match at.checked_sub(right.len()) {
        Some(number) => {
            let (_, _, number, right, time, wrong) = planted[number];
            let is_it = text.contains(&format!(" k{at}_{number}("));
            if is_it { mistaken(&text, (right, time, wrong)) } else { text }
        }
        None => text,
    };
    let library = Library::changed("experts-mistakes", texts, &change).expect("it compiles");
    let run = |of: (usize, usize), at: usize, seed: u64| {
        launches[of.0][of.1].0.execute(&library, at, seed)
    };
    let want: Vec<Vec<Buffer>> = right.iter().enumerate().map(|(at, of)| run(*of, at, 0)).collect();
    let is_missed = |(at, mistake): &(usize, &Mistake)| {
        let (arch, kernel, ..) = **mistake;
        let is_found = |seed: u64| {
            let found = run((arch, kernel), right.len() + at, seed);
            let want = &want[2 * arch + kernel];
            found.iter().zip(want).any(|(a, b)| !same_bits(a, b))
        };
        !(0..8).any(is_found)
    };
    let missed: Vec<_> = planted.iter().enumerate().filter(is_missed).collect();
    assert!(missed.is_empty(), "not found: {missed:#?}");
}
