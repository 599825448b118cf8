//! The gradient of queries on tensor cores, to whose sums blocks add in turn: no order of blocks
//! and threads changes a bit, whatever keys a tile of queries sees, and whatever the workspace
//! holds.

use gantline_kernels::cuda::Functions;
use gantline_kernels::{Attention, Kernel, Offset};

use crate::flash::{ExpectedGradient, is_flash_backward};
use crate::flash_warpgroup::{for_sm90a, windowed};
use crate::flash_warpgroup_backward::is_backward_by_warpgroups;
use crate::shim::{Library, compiler};
use crate::tensor::{for_sm80, mistaken};
use crate::{Buffer, Random, same_bits};

/// Orders of threads that have four, two or three blocks at a time.
const SEVERAL: [u64; 3] = [3, 5, 6];

/// Attention of some queries and keys, and of heads in groups that share keys.
fn grouped([queries, keys, heads, group, dim]: [usize; 5]) -> Attention {
    let kv_heads = heads / group;
    let layout = |length: usize, heads: usize| Attention::contiguous(length, heads, dim);
    Attention {
        keys,
        kv_heads,
        group,
        window: 0,
        query_offset: keys as i64 - queries as i64,
        k: layout(keys, kv_heads),
        v: layout(keys, kv_heads),
        documents: None,
        ..windowed(&mut Random::new(3), [queries, queries + keys, heads, dim])
    }
}

/// Attention whose tiles of queries are seen by all tiles of keys, by some, and by none.
fn shapes() -> Vec<Attention> {
    let all = [
        Attention { causal: false, ..grouped([90, 270, 2, 1, 64]) },
        grouped([129, 129, 4, 4, 128]),
        Attention { batch: 2, ..grouped([70, 140, 2, 2, 80]) },
        // The first queries see no key.
        grouped([250, 100, 2, 1, 48]),
        // Tiles of queries that a tile of keys does not see, before and after it.
        Attention { window: 40, ..grouped([400, 400, 1, 1, 32]) },
        Attention { window: 100, ..grouped([150, 230, 2, 2, 96]) },
        // The last queries see no key: all are further back than the window, or all queries do not.
        Attention { window: 70, query_offset: 130, ..grouped([200, 200, 1, 1, 64]) },
        Attention { window: 30, query_offset: 500, ..grouped([100, 200, 1, 1, 16]) },
        Attention { query_offset: -400, ..grouped([100, 200, 1, 1, 64]) },
        // Of the first key-value head one query head is another shard's.
        Attention { heads: 3, head_offset: Offset::Fixed(1), ..grouped([70, 150, 4, 2, 64]) },
    ];
    all.map(with_layouts).into()
}

/// The same with the strides that its sizes have without gaps.
fn with_layouts(a: Attention) -> Attention {
    let Attention { queries, keys, heads, kv_heads, dim, .. } = a;
    let (q, k) =
        (Attention::contiguous(queries, heads, dim), Attention::contiguous(keys, kv_heads, dim));
    Attention { q, k, v: k, out: q, ..a }
}

/// A family of gradients: its name, the functions of a kernel, and whether functions are of it.
type Gradients = (&'static str, fn(&Kernel) -> (Kernel, Functions), fn(&Functions) -> bool);

const BY_WARPS: Gradients = ("turns", for_sm80, is_flash_backward);
const BY_WARPGROUPS: Gradients = ("turns_warpgroup", for_sm90a, is_backward_by_warpgroups);

#[test]
fn no_order_of_blocks_changes_a_bit_of_gradients() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    check_orders(BY_WARPS, shapes());
}

#[test]
fn no_order_of_blocks_changes_a_bit_of_gradients_by_warpgroups() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    // Tiles of keys between the first and the last to add, with a mask and without one.
    let longer = [
        Attention { causal: false, ..grouped([140, 400, 1, 1, 64]) },
        grouped([390, 520, 1, 1, 128]),
    ];
    check_orders(BY_WARPGROUPS, shapes().into_iter().chain(longer.map(with_layouts)).collect());
}

/// Checks that gradients are right, and have the same bits in all orders of blocks and threads.
fn check_orders((name, functions, is_it): Gradients, shapes: Vec<Attention>) {
    let mut random = Random::new(21);
    let gradient = |a: Attention| ExpectedGradient::new(&mut random, &a);
    let all: Vec<ExpectedGradient> = shapes.into_iter().map(gradient).collect();
    let functions: Vec<_> = all.iter().map(|expected| functions(&expected.case.kernel)).collect();
    assert!(functions.iter().all(|(_, of)| is_it(of)), "they run on tensor cores");
    let checked = Library::checked(&format!("{name}_checked"), functions.clone(), &|_, text| text);
    let checked = checked.expect("there is a compiler");
    let library = Library::new(name, functions).expect("there is a compiler");
    for (at, expected) in all.iter().enumerate() {
        let what = &expected.case.kernel;
        let first = expected.case.execute(&library, at, 0);
        assert_eq!(expected.off(&first), None, "{what}");
        for seed in SEVERAL {
            let found = expected.case.execute(&library, at, seed);
            assert_eq!(library.report(), None, "{what}, seed {seed}");
            let same = found.iter().zip(&first).all(|(a, b)| same_bits(a, b));
            assert!(same, "{what}: order matters, seed {seed}");
        }
        // One order that keeps that of threads, and one of several blocks at a time.
        for seed in [0, 7] {
            let found = expected.case.execute(&checked, at, seed);
            assert_eq!(checked.report(), None, "{what}, seed {seed}");
            let same = found.iter().zip(&first).all(|(a, b)| same_bits(a, b));
            assert!(same, "{what}: checks matter, seed {seed}");
        }
    }
}

/// A mistake in a text: what is replaced, which time, and by what.
type Mistake = (&'static str, usize, &'static str);

/// What is wrong with the first turns.
const MISTAKES: [Mistake; 3] = [
    ("s % 64 == 0", 0, "s % 128 == 0"),
    ("workspace2[(b * 1 + h)", 0, "workspace2[(h)"),
    ("] = 0;", 0, "] = 1;"),
];
const MISTAKES_BY_WARPGROUPS: [Mistake; 4] = [
    ("s % 128 == 0", 0, "s % 256 == 0"),
    ("workspace2[((b * 1 + h)", 0, "workspace2[((h)"),
    ("] = 0;", 0, "] = 1;"),
    ("lane < 2", 0, "lane < 1"),
];

/// Two launches in one workspace: the second finds the turns, and the sums, of the first. Where
/// turns do not begin anew all blocks wait.
#[test]
fn turns_begin_anew_in_each_launch() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    check_first_turns(BY_WARPS, &MISTAKES);
    check_first_turns(BY_WARPGROUPS, &MISTAKES_BY_WARPGROUPS);
}

/// Checks that two launches are right, and that mistakes are found.
fn check_first_turns((name, functions, _): Gradients, mistakes: &[Mistake]) {
    let all = Attention { batch: 2, causal: false, ..grouped([150, 200, 1, 1, 16]) };
    let a = with_layouts(all);
    let expected = ExpectedGradient::new(&mut Random::new(22), &a);
    let change = |at: usize, text: String| match at {
        at if at > 0 && text.contains(&format!(" k{at}_0(")) => mistaken(&text, mistakes[at - 1]),
        _ => text,
    };
    let all = vec![functions(&expected.case.kernel); mistakes.len() + 1];
    let library = Library::checked(&format!("{name}_anew"), all, &change);
    let library = library.expect("there is a compiler");
    let is_found = |at: usize, seed: u64| {
        let bytes = library.functions(at).workspace().0 as usize;
        let mut memory = Buffer::F64(vec![f64::NAN; bytes.div_ceil(8)]);
        let memory = memory.view_mut();
        let launch = || {
            let found = expected.case.run(|inputs, outputs| {
                library.launch_with(at, &[], inputs, outputs, (Some(&memory), seed));
            });
            library.report().is_some() || expected.off(&found).is_some()
        };
        launch() || launch()
    };
    assert!(SEVERAL.iter().all(|&seed| !is_found(0, seed)), "without a mistake nothing is found");
    for (at, mistake) in mistakes.iter().enumerate() {
        assert!(SEVERAL.iter().all(|&seed| is_found(at + 1, seed)), "{mistake:?} is not found");
    }
}
