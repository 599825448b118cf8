//! Products by TMA and `wgmma` (sm_90a), executed by the shim: against exact sums, on random shapes
//! and layouts; which products have them; mistakes in the text and in tensor maps.

use gantline_kernels::cuda::{
    Arch, Functions, StagedOperand, TensorMap, Tile, WarpgroupTile, functions_for,
};
use gantline_kernels::{Kernel, LoopAB, LoopABC, LoopAC, Product, ProductPart, Products};
use ir::DType;

use crate::shim::{Library, compiler};
use crate::tensor::{EACH, is_near, mistaken};
use crate::{Buffer, Case, Random, same_bits};

fn for_sm90a(kernel: &Kernel) -> (Kernel, Functions) {
    (kernel.clone(), functions_for(kernel, Arch::Sm90a))
}

/// The tile of a product's first function, if that runs on warpgroups.
fn warpgroup_tile(product: &Product, arch: Arch) -> Option<WarpgroupTile> {
    let of = functions_for(&Kernel::Product(product.clone()), arch);
    let Tile::Warpgroup(tile) = of.functions.into_iter().next()?.tile else { return None };
    Some(tile)
}

/// Whether TMA copies both operands.
fn is_mapped(tile: &WarpgroupTile) -> bool {
    tile.operands.iter().all(|operand| matches!(operand, StagedOperand::Mapped(_)))
}

/// A product of matrices that lie in one of two ways each, with rows of whole chunks of 16 bytes or
/// of any bytes.
fn matrix(
    random: &mut Random,
    dtype: DType,
    [m, n, k]: [usize; 3],
    (major, is_aligned): (usize, bool),
) -> Product {
    let mut p = Product::matrix(m, n, k, dtype);
    let row = |size: usize, random: &mut Random| match is_aligned {
        true => size.next_multiple_of(8) + random.below(2) * 8,
        false => size + random.pick(&[0, 1, 2, 4]),
    };
    p.stored.c = random.pick(&[DType::F32, dtype]);
    p.accumulate = p.stored.c == DType::F32 && random.below(2) == 0;
    let rows = [m, n, k].map(|size| row(size, random));
    (p.m[0].a, p.k[0].a) = if major.is_multiple_of(2) { (rows[2], 1) } else { (1, rows[0]) };
    (p.n[0].b, p.k[0].b) = if major / 2 == 0 { (rows[2], 1) } else { (1, rows[1]) };
    if random.below(4) == 0 {
        let a = (rows[0].max(m) * rows[2].max(k)).next_multiple_of(8);
        let b = random.pick(&[0, rows[1] * rows[2]]);
        p.batch.push(LoopABC { size: 2, a, b, c: m * n });
    }
    p
}

/// A launch, its product, and which inputs are added to the result.
pub(crate) type Added = (Case, Product, [Option<usize>; 2]);

pub(crate) fn cases(count: u64) -> Vec<Added> {
    let edges = [1, 7, 8, 16, 33, 64, 65, 128, 129, 136];
    // Every third has rows that start anywhere.
    let case = |number: u64| {
        let mut random = Random::new(number + 900);
        let dtype = random.pick(&[DType::BF16, DType::F16]);
        let [m, n] = [0; 2].map(|_| random.pick(&edges));
        let k = random.pick(&[1, 15, 64, 70, 128, 200, 328, 460]);
        let layout = (number as usize % 4, !number.is_multiple_of(3));
        let mut p = matrix(&mut random, dtype, [m, n, k], layout);
        if !number.is_multiple_of(5) {
            return (Case::new(&mut random, Kernel::Product(p.clone())), p, [None; 2]);
        }
        p.accumulate = false;
        p.batch.clear();
        let part =
            ProductPart { bias: Some(2), addend: Some(3), ..ProductPart::of(0, 1, p.clone()) };
        let kernel = Kernel::Products(Products { parts: vec![part] });
        (Case::new(&mut random, kernel), p, [Some(2), Some(3)])
    };
    (0..count).map(case).collect()
}

#[test]
fn products_by_warpgroups_are_as_near_to_exact_sums_as_the_bound() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let cases = cases(30);
    let all = cases.iter().map(|(case, ..)| for_sm90a(&case.kernel)).collect();
    let library = Library::new("warpgroup", all).expect("there is a compiler");
    let tile = |p: &Product| warpgroup_tile(p, Arch::Sm90a).expect("it runs on warpgroups");
    let mapped = cases.iter().filter(|(_, p, _)| is_mapped(&tile(p))).count();
    assert!(std::env::var("SEED").is_ok() || (15..26).contains(&mapped), "{mapped} are by TMA");
    for (at, (case, p, added)) in cases.iter().enumerate() {
        let found = case.execute(&library, at, 0);
        assert_eq!(library.report(), None, "case {at}: {p:?}");
        assert_eq!(is_near(p, case, &found[0], *added), None, "case {at}");
        let again = case.execute(&library, at, 5 + at as u64);
        assert_eq!(library.report(), None, "case {at}: {p:?}");
        assert!(same_bits(&again[0], &found[0]), "case {at}: the order of threads changes bits");
    }
}

/// All products of these types run on warpgroups, however m and n are cut, and TMA copies operands
/// where it can. On other architectures none do.
#[test]
fn products_with_strides_of_16_bytes_and_five_dims_are_copied_by_tma() {
    let aligned = Product::matrix(64, 64, 64, DType::BF16);
    let changed = |change: &dyn Fn(&mut Product)| {
        let mut p = aligned.clone();
        change(&mut p);
        p
    };
    let batch = |count: usize| {
        let loops = (0..count).map(|at| LoopABC { size: 2, a: 8 << at, b: 0, c: 4096 << at });
        loops.collect::<Vec<_>>()
    };
    let rows = |of: [[usize; 2]; 2]| of.map(|[size, a]| LoopAC { size, a, c: 64 }).to_vec();
    let k = |of: [[usize; 3]; 2]| of.map(|[size, a, b]| LoopAB { size, a, b }).to_vec();
    let all: [(&str, bool, Product); 8] = [
        ("aligned rows", true, aligned.clone()),
        ("rows of 68", false, changed(&|p| p.m[0].a = 68)),
        ("no unit stride", false, changed(&|p| (p.m[0].a, p.k[0].a) = (256, 2))),
        ("three loops over batch", true, changed(&|p| p.batch = batch(3))),
        ("four loops over batch", false, changed(&|p| p.batch = batch(4))),
        ("rows in two loops", true, changed(&|p| p.m = rows([[4, 1024], [16, 64]]))),
        ("rows with a gap", false, changed(&|p| p.m = rows([[4, 2048], [16, 64]]))),
        ("k with a gap", false, changed(&|p| p.k = k([[4, 4096, 4096], [16, 1, 64]]))),
    ];
    for (what, fits, p) in &all {
        for arch in Arch::ALL {
            let tile = warpgroup_tile(p, arch);
            let wanted = (arch == Arch::Sm90a).then_some(*fits);
            assert_eq!(tile.as_ref().map(is_mapped), wanted, "{what} on {arch}");
        }
    }
}

/// Shards of a product, whose operands lie as if they were alone, have the bits of the whole.
#[test]
fn bits_do_not_depend_on_the_strides_of_shards() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let packed = |[m, n]: [usize; 2]| {
        let mut p = Product::matrix(m, n, 1090, DType::BF16);
        // Along m and n, so that the strides of k are their sizes.
        (p.m[0].a, p.k[0].a) = (1, m);
        p.stored.c = DType::F32;
        p
    };
    let sizes = [[64, 136], [33, 68], [32, 45], [17, 6], [5, 1], [1, 9]];
    let kernels = sizes.map(|sizes| Kernel::Product(packed(sizes)));
    let tiles = sizes.map(|sizes| warpgroup_tile(&packed(sizes), Arch::Sm90a));
    let tiles = tiles.map(|tile| tile.expect("each shard runs on warpgroups"));
    assert_eq!(tiles.iter().filter(|tile| is_mapped(tile)).count(), 1);
    let library = Library::new("shards", kernels.iter().map(for_sm90a).collect());
    let library = library.expect("there is a compiler");
    let whole = Case::new(&mut Random::new(8), kernels[0].clone());
    let [m, n] = sizes[0];
    let expected = whole.execute(&library, 0, 0)[0].numbers();
    for (at, [rows, columns]) in sizes.into_iter().enumerate() {
        let mut part = Case::new(&mut Random::new(8), kernels[at].clone());
        for (operand, (side, own)) in [(m, rows), (n, columns)].into_iter().enumerate() {
            let x = whole.inputs[operand].numbers();
            let places = (0..1090).flat_map(|k| (0..own).map(move |i| k * side + i));
            part.inputs[operand] =
                Buffer::new(DType::BF16, &places.map(|place| x[place]).collect::<Vec<f64>>());
        }
        let found = part.execute(&library, at, 1);
        assert_eq!(library.report(), None, "{rows} x {columns}");
        let found = found[0].numbers();
        for row in 0..rows {
            for column in 0..columns {
                let [found, expected] = [found[row * columns + column], expected[row * n + column]];
                assert_eq!(found.to_bits(), expected.to_bits(), "{rows} x {columns}");
            }
        }
    }
}

/// An operand of rows that start anywhere, which several tiles read, is copied by a function of its
/// own to rows that TMA copies; others are not.
#[test]
fn operands_that_several_tiles_read_are_copied_to_aligned_rows() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let of = |sizes: [usize; 3], change: &dyn Fn(&mut Product)| {
        let [m, n, k] = sizes;
        let mut p = Product::matrix(m, n, k, DType::BF16);
        p.stored.c = DType::F32;
        change(&mut p);
        p
    };
    let all: [(usize, Product); 7] = [
        (1, of([20, 400, 77], &|_| {})),
        (1, of([20, 400, 64], &|p| (p.m[0].a, p.k[0].a) = (1, 21))),
        (1, of([20, 400, 64], &|p| (p.m[0].a, p.k[0].a) = (130, 2))),
        (1, of([400, 45, 64], &|_| {})),
        (2, of([400, 397, 70], &|p| (p.m[0].a, p.k[0].a) = (71, 1))),
        (1, of([20, 400, 77], &|p| p.batch = vec![LoopABC { size: 2, a: 1700, b: 0, c: 8000 }])),
        (0, of([20, 300, 77], &|_| {})),
    ];
    let kernels = all.clone().map(|(_, p)| Kernel::Product(p));
    let functions: Vec<(Kernel, Functions)> = kernels.iter().map(for_sm90a).collect();
    for ((copies, p), (_, of)) in all.iter().zip(&functions) {
        let count = of.functions.iter().filter(|of| matches!(of.tile, Tile::Move(_))).count();
        assert_eq!(count, *copies, "{p:?}");
        let Some(Tile::Warpgroup(tile)) = of.functions.last().map(|of| &of.tile) else {
            panic!("{p:?} runs on warpgroups")
        };
        assert_eq!(is_mapped(tile), *copies > 0, "{p:?}");
    }
    let library = Library::new("aligned", functions).expect("there is a compiler");
    for (at, (kernel, (_, p))) in kernels.into_iter().zip(&all).enumerate() {
        let case = Case::new(&mut Random::new(40 + at as u64), kernel);
        let found = case.execute(&library, at, 1);
        assert_eq!(library.report(), None, "{p:?}");
        assert_eq!(is_near(p, &case, &found[0], [None; 2]), None, "{p:?}");
    }
}

/// What can be wrong in the text: what is replaced, which time, and by what. Not among them are two
/// that change no result: without `setmaxnreg_inc` threads have fewer registers, and the leading
/// offset of a K-major matrix is not read.
const MISTAKES: [(&str, usize, &str); 54] = [
    ("sync_block();", 0, ""),
    ("mbarrier_init_fence();", 0, ""),
    ("mbarrier_init(full + stage, 1)", 0, "mbarrier_init(full + stage, 2)"),
    ("mbarrier_init(empty + stage, 8)", 0, "mbarrier_init(empty + stage, 4)"),
    ("mbarrier_init(empty + stage, 8)", 0, "mbarrier_init(empty + stage, 9)"),
    ("mbarrier_wait(empty + stage, (count / 4 + 1) % 2);", 0, ""),
    ("(count / 4 + 1) % 2", 0, "count / 4 % 2"),
    ("mbarrier_expect(full + stage, 32768);", 0, ""),
    ("full + stage, 32768", 0, "full + stage, 16384"),
    ("full + stage, 32768", 0, "full + stage, 65536"),
    ("tma_load(b_stage + 8192", 0, "if (0) tma_load(b_stage + 8192"),
    ("b_stage + 8192", 0, "b_stage + 0"),
    ("block_n + 64", 0, "block_n + 0"),
    ("first_k + step * 64", 0, "first_k + step * 32"),
    ("(i32)(block_m + 0)", 0, "(i32)(block_m + 8)"),
    ("mbarrier_wait(full + stage, count / 4 % 2);", 0, ""),
    ("count / 4 % 2", 0, "(count / 4 + 1) % 2"),
    ("warpgroup_fence(acc);", 0, ""),
    ("warpgroup_commit();", 0, ""),
    ("warpgroup_wait<1>(acc);", 0, ""),
    ("warpgroup_wait<1>(acc);", 0, "warpgroup_wait<2>(acc);"),
    ("warpgroup_wait<0>(acc);", 0, ""),
    ("warpgroup_wait<0>(acc);", 0, "warpgroup_wait<1>(acc);"),
    ("if (step > 0 && lane == 0) mbarrier_arrive(empty + (count - 1) % 4);", 0, ""),
    ("(count - 1) % 4", 0, "count % 4"),
    ("16, 1024, SWIZZLE_128", 0, "16, 512, SWIZZLE_128"),
    ("16, 1024, SWIZZLE_128", 0, "16, 1024, 2"),
    ("8192, 1024, SWIZZLE_128", 0, "16, 1024, SWIZZLE_128"),
    ("8192, 1024, SWIZZLE_128", 0, "8192, 2048, SWIZZLE_128"),
    ("consumer * 8192", 0, "consumer * 4096"),
    ("a + k * 2", 0, "a + k * 4"),
    ("b + k * 128", 0, "b + k * 64"),
    ("<bf16, 0, 1>", 0, "<bf16, 1, 1>"),
    ("<bf16, 0, 1>", 0, "<bf16, 0, 0>"),
    ("setmaxnreg_dec<40>();", 0, "setmaxnreg_dec<48>();"),
    ("setmaxnreg_inc<232>();", 0, "setmaxnreg_inc<240>();"),
    ("i / 2 % 2 * 8", EACH, "i % 2 * 8"),
    ("if (lane == 0) mbarrier_arrive(empty + (count - 1) % 4);", 0, ""),
    ("tile += gridDim.x", 0, "tile += gridDim.x + 1"),
    ("tile += gridDim.x", 1, "tile += gridDim.x + 1"),
    ("in_band % in_column", EACH, "in_band % 1"),
    ("u32 count = 0;", 0, "u32 count = 1;"),
    ("u32 count = 0;", 1, "u32 count = 1;"),
    ("tma_store_wait();", 0, ";"),
    ("tma_store_wait();", 1, ";"),
    ("tma_store_commit();", 0, ""),
    ("sync_warpgroup(consumer + 1);", 0, ""),
    ("sync_warpgroup(consumer + 1);", 1, ""),
    ("sync_warpgroup(consumer + 1);", EACH, "sync_warpgroup(1);"),
    ("fence_proxy_async();", 0, ""),
    ("(in_row / 16 ^ row % 8)", 0, "(in_row / 16 ^ row / 2 % 4)"),
    ("result + 8192", 0, "result + 0"),
    ("block_n + 32", 0, "block_n + 64"),
    ("consumer * 32768", 0, "consumer * 16384"),
];

/// What can be wrong in the tensor maps of both operands and the result. One that goes on along k
/// behind the last point changes no result: the other operand has zeros there.
const MAP_MISTAKES: [(usize, fn(&mut TensorMap)); 10] = [
    (0, |map| map.dims[0] -= 4),
    (1, |map| map.dims[1] -= 4),
    (0, |map| map.strides_bytes[0] += 16),
    (1, |map| map.strides_bytes[0] -= 16),
    (0, |map| map.box_dims[1] -= 8),
    (1, |map| map.parameter = 0),
    (2, |map| map.dims[0] -= 4),
    (2, |map| map.dims[1] -= 4),
    (2, |map| map.strides_bytes[0] -= 16),
    (2, |map| map.box_dims[1] -= 8),
];

#[test]
fn mistakes_in_products_by_warpgroups_are_found() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let mut p = Product::matrix(136, 136, 460, DType::BF16);
    // Rows go on behind the last point of `k`, columns behind the last row.
    (p.m[0].a, p.stored.c) = (464, DType::F32);
    p.batch.push(LoopABC { size: 2, a: 136 * 464, b: 464 * 136, c: 136 * 136 });
    let kernel = Kernel::Product(p.clone());
    let change = |at: usize, text: String| match at.checked_sub(1) {
        Some(at) if at < MISTAKES.len() => mistaken(&text, MISTAKES[at]),
        _ => text,
    };
    let mut all = vec![for_sm90a(&kernel); 1 + MISTAKES.len() + MAP_MISTAKES.len()];
    for ((_, functions), (operand, change)) in
        all[1 + MISTAKES.len()..].iter_mut().zip(MAP_MISTAKES)
    {
        let Tile::Warpgroup(tile) = &mut functions.functions[0].tile else {
            panic!("the product runs on warpgroups");
        };
        let result = tile.result.as_mut().expect("TMA stores the result");
        match tile.operands.get_mut(operand) {
            Some(StagedOperand::Mapped(operand)) => change(&mut operand.map),
            Some(StagedOperand::Copied(..)) => panic!("TMA copies the operand"),
            None => change(&mut result.map),
        }
    }
    let library = Library::changed("warpgroup_mistakes", all, &change).expect("it compiles");
    let case = Case::new(&mut Random::new(5), kernel);
    let finding = |at: usize, seed: u64| {
        let found = case.execute(&library, at, seed);
        library.report().or_else(|| is_near(&p, &case, &found[0], [None; 2]))
    };
    assert_eq!((0..3).find_map(|seed| finding(0, seed)), None);
    for at in 0..MISTAKES.len() + MAP_MISTAKES.len() {
        let what = MISTAKES.get(at).map_or(format!("tensor map {at}"), |of| format!("{of:?}"));
        let found = (0..8).find_map(|seed| finding(at + 1, seed));
        let found = found.unwrap_or_else(|| panic!("{what} is not found"));
        println!("{what}: {}", found.split("element").last().unwrap_or_default());
    }
}

/// What can be wrong where threads copy the second operand: what is replaced, which time, and by
/// what.
const COPY_MISTAKES: [(&str, usize, &str); 15] = [
    ("mbarrier_init(full + stage, 129)", 0, "mbarrier_init(full + stage, 128)"),
    ("mbarrier_init(full + stage, 129)", 0, "mbarrier_init(full + stage, 130)"),
    ("mbarrier_wait(empty + stage, (count / 4 + 1) % 2);", 0, ""),
    ("if (threadIdx.x == 0) {", 1, "if (threadIdx.x <= 1) {"),
    ("full + stage, 16384", 0, "full + stage, 32768"),
    ("fence_proxy_async();", 0, ""),
    ("mbarrier_arrive(full + stage);", 0, ""),
    ("n < 138", 0, "n < 136"),
    ("k < 460", 0, "k < 448"),
    ("first_k + step * 64 + row", 0, "first_k + step * 32 + row"),
    ("block_n + column", 0, "block_n + column / 64 * 64"),
    ("(in_row / 16 ^ row % 8)", 0, "(in_row / 16 ^ row / 2 % 4)"),
    ("column / 64 * 8192", 0, "column / 64 * 4096"),
    ("batch_b + ", 0, ""),
    ("i += 128", 0, "i += 256"),
];

#[test]
fn mistakes_in_copies_by_threads_are_found() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let mut p = Product::matrix(136, 138, 460, DType::BF16);
    // Rows of `b` start at multiples of 4 bytes, and go on behind the last column.
    (p.m[0].a, p.k[0].b, p.stored.c) = (464, 142, DType::F32);
    p.batch.push(LoopABC { size: 2, a: 136 * 464, b: 470 * 142, c: 136 * 138 });
    let kernel = Kernel::Product(p.clone());
    let change = |at: usize, text: String| match at.checked_sub(1) {
        Some(at) => mistaken(&text, COPY_MISTAKES[at]),
        None => text,
    };
    let all = vec![for_sm90a(&kernel); 1 + COPY_MISTAKES.len()];
    let library = Library::changed("copy_mistakes", all, &change).expect("it compiles");
    let case = Case::new(&mut Random::new(5), kernel);
    let finding = |at: usize, seed: u64| {
        let found = case.execute(&library, at, seed);
        library.report().or_else(|| is_near(&p, &case, &found[0], [None; 2]))
    };
    assert_eq!((0..3).find_map(|seed| finding(0, seed)), None);
    for (at, mistake) in COPY_MISTAKES.iter().enumerate() {
        let found = (0..8).find_map(|seed| finding(at + 1, seed));
        let found = found.unwrap_or_else(|| panic!("{mistake:?} is not found"));
        println!("{mistake:?}: {}", found.split("element").last().unwrap_or_default());
    }
}
