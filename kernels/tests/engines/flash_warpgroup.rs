//! Attention by TMA and `wgmma` (sm_90a), executed by the shim: no further from f64 than twice the
//! CPU's kernel, on random shapes; mistakes in the text and in tensor maps are found.

use gantline_kernels::cuda::{Arch, Functions, TensorMap, Tile, functions_for};
use gantline_kernels::{Attention, Kernel, Offset};
use ir::DType;

use crate::flash::{Expected, check_part, check_positions, distance, random_flash, random_of};
use crate::shim::{Library, compiler};
use crate::tensor::{EACH, mistaken};
use crate::{Random, assert_close, same_bits};

pub(crate) fn for_sm90a(kernel: &Kernel) -> (Kernel, Functions) {
    (kernel.clone(), functions_for(kernel, Arch::Sm90a))
}

fn is_by_warpgroups(functions: &Functions) -> bool {
    functions.functions.iter().all(|function| matches!(function.tile, Tile::FlashWarpgroup(_)))
}

#[test]
fn attention_by_warpgroups_is_as_near_to_f64_as_twice_the_cpu() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let case = |number: u64| {
        let mut random = Random::new(number);
        let a = random_of(number, &mut random);
        Expected::new(&mut random, a)
    };
    let all: Vec<Expected> = (0..30).map(case).collect();
    let functions: Vec<_> = all.iter().map(|expected| for_sm90a(&expected.case.kernel)).collect();
    assert!(functions.iter().all(|(_, of)| is_by_warpgroups(of)), "they run on warpgroups");
    let library = Library::new("flash_warpgroup", functions).expect("there is a compiler");
    for (at, expected) in all.iter().enumerate() {
        let found = expected.case.execute(&library, at, 0);
        let what = &format!("case {at}: {:?}", expected.attention);
        assert_eq!(library.report(), None, "{what}");
        assert_close(&found[1].numbers(), &expected.lse, 3e-5, what);
        let (off, limit) = (distance(&found[0].numbers(), &expected.out), 2.0 * expected.distance);
        assert!(off <= limit, "{what}: {off} off, {limit} at most");
        let again = expected.case.execute(&library, at, 5 + at as u64);
        assert_eq!(library.report(), None, "{what}");
        assert!(found.iter().zip(&again).all(|(a, b)| same_bits(a, b)), "{what}: order matters");
    }
}

/// Attention whose operands TMA cannot copy is that of sm_80, as is all on other architectures.
#[test]
fn attention_runs_on_warpgroups_where_tma_copies_its_operands() {
    let mut fitting = Attention { dim: 64, ..random_flash(&mut Random::new(3), &[64]) };
    fitting.batch = 2;
    let tile = |a: &Attention, arch: Arch| {
        let of = functions_for(&Kernel::Attention(a.clone()), arch);
        is_by_warpgroups(&of)
    };
    let [_, s, h] = fitting.k;
    let shared = Attention { k: [0, s, h], ..fitting.clone() };
    let odd = Attention { dim: 40, ..fitting.clone() };
    for arch in Arch::ALL {
        assert_eq!(tile(&fitting, arch), arch == Arch::Sm90a, "{arch}");
        assert!(!tile(&shared, arch), "keys without a stride have no tensor map");
        assert!(!tile(&odd, arch), "heads of 40 have no rows of 32 bytes");
    }
}

/// An attention of one batch over contiguous buffers, causal with a window.
pub(crate) fn windowed(random: &mut Random, [queries, keys, heads, dim]: [usize; 4]) -> Attention {
    let layout = |length: usize| Attention::contiguous(length, heads, dim);
    Attention {
        batch: 1,
        queries,
        keys,
        heads,
        kv_heads: heads,
        group: 1,
        head_offset: Offset::ZERO,
        scale: 0.25,
        causal: true,
        window: keys - queries,
        softcap: 0.0,
        bias: None,
        dropout: None,
        query_offset: (keys - queries) as i64 - 10,
        q: layout(queries),
        k: layout(keys),
        v: layout(keys),
        out: layout(queries),
        dtype: DType::BF16,
        ..random_flash(random, &[dim])
    }
}

#[test]
fn positions_are_those_of_samples_on_warpgroups() {
    match compiler() {
        Some(_) => check_positions("flash_warpgroup_positions", for_sm90a, is_by_warpgroups),
        None => println!("skipped: no C++ compiler"),
    }
}

/// Some of the queries alone have the bits that they have among all.
#[test]
fn bits_of_a_query_on_warpgroups_do_not_depend_on_other_queries() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let mut random = Random::new(8);
    let (heads, dim) = (2, 64);
    let whole = windowed(&mut random, [300, 700, heads, dim]);
    check_part("flash_warpgroup_part", for_sm90a, &mut random, whole, 170..230);
}

/// What can be wrong in the text: what is replaced, which time, and by what. Not among them are
/// those that change no result: `keep_order` is for the compiler of GPUs alone, and a release of
/// the other stage of K comes too late only, since the warp that copies waits for the stages in
/// turn.
const MISTAKES: [(&str, usize, &str); 54] = [
    ("sync_block();", 0, ""),
    ("mbarrier_init_fence();", 0, ""),
    ("mbarrier_init(q_full, 1)", 0, "mbarrier_init(q_full, 2)"),
    ("mbarrier_init(k_full + stage, 1)", 0, "mbarrier_init(k_full + stage, 2)"),
    ("mbarrier_init(k_empty + stage, 8)", 0, "mbarrier_init(k_empty + stage, 4)"),
    ("mbarrier_init(v_empty + stage, 8)", 0, "mbarrier_init(v_empty + stage, 9)"),
    ("mbarrier_expect(q_full, 32768);", 0, ""),
    ("mbarrier_wait(k_empty + stage, (step / 2 + 1) % 2);", 0, ""),
    ("mbarrier_wait(v_empty + stage, (step / 2 + 1) % 2);", 0, ""),
    ("(step / 2 + 1) % 2", 0, "step / 2 % 2"),
    ("(step / 2 + 1) % 2", 1, "step / 2 % 2"),
    ("mbarrier_expect(k_full + stage, 32768);", 0, ""),
    ("v_full + stage, 32768", 0, "v_full + stage, 16384"),
    ("q_tile + 16384, q_map", 0, "q_tile + 0, q_map"),
    ("q_full, 64, ", 0, "q_full, 0, "),
    ("k_full + stage, 64, ", 0, "k_full + stage, 0, "),
    ("(i32)step * 128", 0, "(i32)step * 64"),
    ("mbarrier_wait(q_full, 0);", 0, ""),
    ("mbarrier_wait(k_full + stage, step / 2 % 2);", 0, ""),
    ("mbarrier_wait(k_full + stage, step / 2 % 2);", 1, ""),
    ("mbarrier_wait(v_full + (step - 1) % 2, (step - 1) / 2 % 2);", 0, ""),
    ("mbarrier_wait(v_full + (tiles - 1) % 2, (tiles - 1) / 2 % 2);", 0, ""),
    ("scores[i] = 0;", 1, ";"),
    ("warpgroup_fence(scores);", 0, ""),
    ("warpgroup_fence(scores);", 1, ""),
    ("warpgroup_fence(acc);", 0, ""),
    ("warpgroup_fence(acc);", 1, ""),
    ("warpgroup_commit();", 0, ""),
    ("warpgroup_commit();", 1, ""),
    ("warpgroup_commit();", 2, ""),
    ("warpgroup_commit();", 3, ""),
    ("warpgroup_wait<0>(scores);", 0, ""),
    ("warpgroup_wait<1>(acc);", 0, ""),
    ("warpgroup_wait<1>(acc);", 0, "warpgroup_wait<2>(acc);"),
    ("warpgroup_wait<0>(acc);", 0, ""),
    ("warpgroup_wait<0>(acc);", 1, ""),
    ("if (lane == 0) mbarrier_arrive(k_empty);", 0, ""),
    ("if (lane == 0) mbarrier_arrive(v_empty + (step - 1) % 2);", 0, ""),
    ("16384, 1024, SWIZZLE_128", 0, "16, 1024, SWIZZLE_128"),
    ("d / 4 * 1024", 0, "d / 4 * 512"),
    ("d % 4 * 2", 1, "d % 4 * 4"),
    ("v + t * 128", 0, "v + t * 64"),
    ("<bf16, 1>", EACH, "<bf16, 0>"),
    ("consumer * 8192", 0, "consumer * 4096"),
    ("rescale[i / 2 % 2]", 0, "rescale[i % 2]"),
    ("row_sum[r] * rescale[r]", 1, "row_sum[r]"),
    ("setmaxnreg_dec<40>();", 0, "setmaxnreg_dec<48>();"),
    ("setmaxnreg_inc<232>();", 0, "setmaxnreg_inc<240>();"),
    ("first_row + r * 8", 0, "first_row"),
    ("clamped(seen, 128) - first_column", 1, "clamped(seen, 128)"),
    ("own < seen ? own : seen", 1, "seen"),
    ("s + offset + 1 - 610", 0, "s + offset - 610"),
    ("column >= row_begin[i / 2 % 2]", 0, "column >= row_begin[i % 2]"),
    ("scores[i * 2 + 1]", 1, "scores[i * 2]"),
];

/// What can be wrong in the tensor maps of Q, K and V.
const MAP_MISTAKES: [(usize, fn(&mut TensorMap)); 6] = [
    (0, |map| map.dims[0] -= 16),
    (1, |map| map.dims[1] -= 64),
    (0, |map| map.strides_bytes[0] += 16),
    (2, |map| map.strides_bytes[1] -= 16),
    (1, |map| map.box_dims[1] -= 8),
    (2, |map| map.parameter = 1),
];

/// A quarter of the mistakes; `SEED=1` to `SEED=3` try the others.
#[test]
fn mistakes_in_attention_by_warpgroups_are_found() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let seed = std::env::var("SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(0);
    let is_tried = |at: &usize| at % 4 == seed % 4;
    let tried: Vec<usize> = (0..MISTAKES.len() + MAP_MISTAKES.len()).filter(is_tried).collect();
    let mut random = Random::new(11);
    let a = windowed(&mut random, [150, 760, 2, 80]);
    let expected = Expected::new(&mut random, a);
    let mistake = |at: usize| at.checked_sub(1).map(|at| tried[at]);
    let change = |at: usize, text: String| match mistake(at) {
        Some(at) if at < MISTAKES.len() => mistaken(&text, MISTAKES[at]),
        Some(_) | None => text,
    };
    let mut all = vec![for_sm90a(&expected.case.kernel); 1 + tried.len()];
    for (at, (_, functions)) in all.iter_mut().enumerate() {
        let map = mistake(at).and_then(|at| at.checked_sub(MISTAKES.len()));
        let Some((operand, change)) = map.map(|at| MAP_MISTAKES[at]) else { continue };
        let Tile::FlashWarpgroup(tile) = &mut functions.functions[0].tile else {
            panic!("the attention runs on warpgroups");
        };
        change(&mut tile.maps[operand]);
    }
    let library = Library::changed("flash_warpgroup_mistakes", all, &change).expect("it compiles");
    let right = expected.case.execute(&library, 0, 0);
    let is_found = |at: usize, seed: u64| {
        let found = expected.case.execute(&library, at, seed);
        let is_same = found.iter().zip(&right).all(|(a, b)| same_bits(a, b));
        library.report().is_some() || expected.is_off(&found) || !is_same
    };
    assert!((0..4).all(|seed| !is_found(0, seed)), "without a mistake nothing is found");
    for (place, at) in tried.iter().enumerate() {
        let what = MISTAKES.get(*at).map_or(format!("tensor map {at}"), |of| format!("{of:?}"));
        assert!((0..8).any(|seed| is_found(place + 1, seed)), "{what} is not found");
    }
}
