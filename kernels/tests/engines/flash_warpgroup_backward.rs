//! The gradient of attention by TMA and `wgmma` (sm_90a), executed by the shim: no further from f64
//! than twice the CPU's kernel, on random shapes; mistakes in text and in tensor maps are found.

use gantline_kernels::cuda::{Arch, Functions, TensorMap, Tile, functions_for};
use gantline_kernels::{Attention, Dropout, Kernel, Offset};
use ir::DType;
use ir::random::DrawBits;

use crate::flash::{ExpectedGradient, random_flash, random_of};
use crate::flash_warpgroup::{for_sm90a, windowed};
use crate::shim::{Library, compiler};
use crate::tensor::mistaken;
use crate::{Buffer, Random, same_bits};

pub(crate) fn is_backward_by_warpgroups(functions: &Functions) -> bool {
    let is_it = |tile: &Tile| matches!(tile, Tile::FlashWarpgroupBackward(_));
    functions.functions.iter().filter(|function| is_it(&function.tile)).count() == 1
}

#[test]
fn gradients_by_warpgroups_are_as_near_to_f64_as_twice_the_cpu() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let case = |number: u64| {
        let mut random = Random::new(400 + number);
        let a = random_of(number, &mut random);
        ExpectedGradient::new(&mut random, &a)
    };
    let all: Vec<ExpectedGradient> = (0..22).map(case).collect();
    let functions: Vec<_> = all.iter().map(|expected| for_sm90a(&expected.case.kernel)).collect();
    let fit = functions.iter().filter(|(_, of)| is_backward_by_warpgroups(of)).count();
    assert!(fit >= all.len() / 2, "they run on warpgroups, but for some of wide heads: {fit}");
    let library = Library::new("flash_warpgroup_backward", functions).expect("it compiles");
    for (at, expected) in all.iter().enumerate() {
        let what = &format!("case {at}: {:?}", expected.case.kernel);
        let found = expected.case.execute(&library, at, 0);
        assert_eq!(library.report(), None, "{what}");
        assert_eq!(expected.off(&found), None, "{what}");
        let again = expected.case.execute(&library, at, 5 + at as u64);
        assert_eq!(library.report(), None, "{what}");
        assert!(found.iter().zip(&again).all(|(a, b)| same_bits(a, b)), "{what}: order matters");
    }
}

/// A query whose scores are no numbers spoils the gradients of the keys that it sees, and no
/// others, where scores are more than scaled.
#[test]
fn what_is_no_number_stays_with_the_keys_that_are_seen() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    const QUERY: usize = 5;
    let case = |(dim, softcap): (usize, f64)| {
        let mut random = Random::new(31);
        let a = windowed(&mut random, [150, 160, 2, dim]);
        let a = Attention { documents: None, softcap, ..a };
        let mut case = ExpectedGradient::new(&mut random, &a).case;
        // lse follows Q, K, V and the result.
        let mut lse = case.inputs[4].numbers();
        lse[QUERY] = f64::NAN;
        case.inputs[4] = Buffer::new(DType::F32, &lse);
        case
    };
    let cases = [(64, 2.0), (128, 2.0)].map(case);
    let by = |arch: Arch| {
        cases.iter().map(move |of| (of.kernel.clone(), functions_for(&of.kernel, arch)))
    };
    let all = by(Arch::Sm90a).chain(by(Arch::Sm80)).collect();
    let library = Library::new("flash_backward_no_numbers", all).expect("it compiles");
    for at in 0..2 * cases.len() {
        let case = &cases[at % cases.len()];
        let Kernel::AttentionBwd(a) = &case.kernel else { panic!("it is a gradient") };
        let gradients = case.execute(&library, at, 0);
        for (name, gradient) in [("dK", &gradients[1]), ("dV", &gradients[2])] {
            let numbers = gradient.numbers();
            let first = |key: usize| &numbers[key * a.heads * a.dim..][..a.dim];
            assert!(first(QUERY).iter().all(|x| x.is_nan()), "{at}: {name} of a key that is seen");
            let spoilt = (QUERY + 1..a.keys).find(|key| first(*key).iter().any(|x| x.is_nan()));
            assert_eq!(spoilt, None, "{at}: {name} of a key that is not seen");
        }
    }
}

/// Gradients whose operands TMA cannot copy are those of sm_80, as are all on other architectures,
/// and those that do not fit the registers.
#[test]
fn gradients_run_on_warpgroups_where_they_fit() {
    let fitting = Attention { dim: 128, ..random_flash(&mut Random::new(3), &[128]) };
    let fitting = Attention { batch: 2, bias: None, bias_grad: false, dropout: None, ..fitting };
    let is_it = |a: &Attention, arch: Arch| {
        is_backward_by_warpgroups(&functions_for(&Kernel::AttentionBwd(a.clone()), arch))
    };
    let [_, s, h] = fitting.k;
    let shared = Attention { k: [0, s, h], ..fitting.clone() };
    let dropout = Some(Dropout {
        p: 0.5,
        salt: 1,
        bits: DrawBits::B16,
        sample_offset: 0,
        heads_total: 8,
        head_base: Offset::ZERO,
        queries_total: 1024,
        query_base: 0,
        keys_total: 1024,
        key_base: 0,
    });
    let dropped = Attention { dropout, ..fitting.clone() };
    let biased = Attention { bias: Some([0, 0, 0]), ..fitting.clone() };
    let narrow = Attention { dim: 64, bias: Some([0, 0, 0]), ..dropped.clone() };
    for arch in Arch::ALL {
        for a in [&fitting, &biased, &narrow] {
            assert_eq!(is_it(a, arch), arch == Arch::Sm90a, "{arch}: {a:?}");
        }
        assert!(!is_it(&shared, arch), "keys without a stride have no tensor map");
        assert!(!is_it(&dropped, arch), "draws do not fit beside wide heads");
    }
}

/// What can be wrong in the text of the last function: what is replaced, which time, and by what.
/// Barriers, waits, fences and descriptors are those of `mutations`. Not among them is that keys
/// behind the last one are hidden: they are zeros, and their weights matter where these overflow.
const MISTAKES: [(&str, usize, &str); 50] = [
    ("first_row - offset, 192)", 0, "first_row - offset + 128, 192)"),
    ("first_row - offset + 330", 0, "first_row - offset + 202"),
    ("tile * 64", 0, "tile * 32"),
    ("bases[stage * 64 + i] = base", 0, "bases[i] = base"),
    ("deltas[stage * 64 + i] = delta", 0, "deltas[stage * 64 + i] = base"),
    ("s < 150", 0, "s < 149"),
    ("+ offset + 63, 383", 0, "+ offset, 383"),
    ("+ offset + 1 - 140, 383", 0, "+ offset + 64 - 140, 383"),
    ("(u32)(last_own - own)", 0, "(u32)(own - first_own)"),
    ("* 2 + consumer", 0, "* 2"),
    ("part_of_all * 4096", 0, "part_of_all * 2048"),
    ("own == first_own", 0, "own == last_own"),
    ("sums_before + consumer * 16384", 0, "sums_before"),
    ("turn > 0 ? sum.x[e] + own.x[e]", 0, "turn > 1 ? sum.x[e] + own.x[e]"),
    ("if (turn > 0) tma_add_numbers", 0, "if (turn > 1) tma_add_numbers"),
    ("if (turn == 0) tma_store_numbers", 0, "if (turn <= 1) tma_store_numbers"),
    ("t / 32 * 16", 0, "t / 32 * 8"),
    ("+ n * 8 >= 80", 0, "+ n * 8 >= 64"),
    ("r * 2 + 0] * 0.25f", 0, "r * 2 + 0]"),
    ("first_column + row < 150", 0, "first_column + row < 149"),
    ("consumer * 64 + warp * 16", 0, "warp * 16"),
    ("k_tile + consumer * 8192", 0, "k_tile"),
    ("v_tile + consumer * 8192", 0, "v_tile + consumer * 4096"),
    ("d / 4 * 512", 0, "d / 4 * 1024"),
    ("d / 4 * 1024", 1, "d / 4 * 512"),
    ("scores[i] = 0;", 0, ";"),
    ("slopes[i] = 0;", 0, ";"),
    ("part[i] = 0;", 0, ";"),
    ("first_row + 127 > first_column + offset", 0, "first_row > first_column + offset"),
    ("first_row <= first_column + 63", 0, "first_row <= first_column - 64"),
    ("seen_from + (i32)(i / 2 % 2 * 8)", 0, "seen_from"),
    ("< seen_to + ", 0, "<= seen_to + "),
    ("+ 384, 768) - 384 + own_row", 0, "+ 385, 768) - 384 + own_row"),
    ("load_vector<float, 2>(bases + stage * 64", 0, "load_vector<float, 2>(bases"),
    ("load_vector<float, 2>(deltas + stage", 0, "load_vector<float, 2>(bases + stage"),
    ("(slopes[i * 4 + e] - delta.x[e % 2])", 0, "slopes[i * 4 + e]"),
    ("-base.x[e % 2]", 0, "-base.x[0]"),
    ("slopes[i * 2], slopes[i * 2 + 1]", 0, "slopes[i * 2], slopes[i * 2]"),
    ("own_row + i % 2 * 8, column", 0, "own_row, column"),
    ("^ row % 8", 0, "^ row / 2 % 8"),
    ("p[t], dout_columns", 0, "ds[t], dout_columns"),
    ("ds[t], q_columns", 0, "p[t], q_columns"),
    ("k_tile + consumer * 64 / 64 * 16384", 0, "k_tile"),
    ("threadIdx.x % 128) * 16", 0, "threadIdx.x % 64) * 16"),
    ("setmaxnreg_dec<40>();", 0, "setmaxnreg_dec<48>();"),
    ("setmaxnreg_inc<232>();", 0, "setmaxnreg_inc<240>();"),
    ("row = own_row + r * 8", 0, "row = own_row"),
    ("v_acc[(n + 0) * 4", 0, "acc[(n + 0) * 4"),
    ("cp_async<16>(before + place", 0, "cp_async<16>(before + place % 2048"),
    ("(step) / steps_of_head", 0, "(step) / (2 * steps_of_head)"),
];

/// What can be wrong in the tensor maps of Q, K, V and dO.
const MAP_MISTAKES: [(usize, fn(&mut TensorMap)); 6] = [
    (0, |map| map.dims[0] -= 16),
    (1, |map| map.dims[1] -= 64),
    (3, |map| map.strides_bytes[0] += 16),
    (2, |map| map.strides_bytes[0] -= 16),
    (3, |map| map.box_dims[1] -= 8),
    (3, |map| map.parameter = 0),
];

/// A quarter of the mistakes; `SEED=1` to `SEED=3` try the others.
#[test]
fn mistakes_in_gradients_by_warpgroups_are_found() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let seed = std::env::var("SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(0);
    let is_tried = |at: &usize| at % 4 == seed % 4;
    let tried: Vec<usize> = (0..MISTAKES.len() + MAP_MISTAKES.len()).filter(is_tried).collect();
    let mut random = Random::new(11);
    let layout = Attention::contiguous(290, 1, 80);
    let a = windowed(&mut random, [150, 290, 2, 80]);
    // The last queries see all keys.
    let query_offset = 150;
    let a = Attention { kv_heads: 1, group: 2, k: layout, v: layout, query_offset, ..a };
    let expected = ExpectedGradient::new(&mut random, &a);
    let mistake = |at: usize| at.checked_sub(1).map(|at| tried[at]);
    let change = |at: usize, text: String| match mistake(at) {
        Some(number) if number < MISTAKES.len() && text.contains(&format!(" k{at}_1(")) => {
            mistaken(&text, MISTAKES[number])
        }
        _ => text,
    };
    let mut all = vec![for_sm90a(&expected.case.kernel); 1 + tried.len()];
    for (at, (_, functions)) in all.iter_mut().enumerate() {
        let map = mistake(at).and_then(|at| at.checked_sub(MISTAKES.len()));
        let Some((operand, change)) = map.map(|at| MAP_MISTAKES[at]) else { continue };
        let Tile::FlashWarpgroupBackward(tile) = &mut functions.functions[1].tile else {
            panic!("the gradient runs on warpgroups");
        };
        change(&mut tile.maps[operand]);
    }
    let name = "flash_warpgroup_backward_mistakes";
    let library = Library::changed(name, all, &change).expect("it compiles");
    let right = expected.case.execute(&library, 0, 0);
    let is_found = |at: usize, seed: u64| {
        let found = expected.case.execute(&library, at, seed);
        let is_same = found.iter().zip(&right).all(|(a, b)| same_bits(a, b));
        library.report().is_some() || expected.off(&found).is_some() || !is_same
    };
    assert!((0..4).all(|seed| !is_found(0, seed)), "without a mistake nothing is found");
    for (place, at) in tried.iter().enumerate() {
        let what = MISTAKES.get(*at).map_or(format!("tensor map {at}"), |of| format!("{of:?}"));
        assert!((0..8).any(|seed| is_found(place + 1, seed)), "{what} is not found");
    }
}
