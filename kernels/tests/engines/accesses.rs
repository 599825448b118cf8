//! What the tile programs of kernels say of their accesses is what the shim counts where it
//! executes their text: sectors of device memory, and turns of the banks of shared memory.
//!
//! Launches of other tests are taken, of odd shapes too; those of `counts` are compared there.
//! Tokens of routed experts are dealt to these in turn, and on CUDA cores all tokens of a sample
//! are of one document, as is assumed where accesses are derived. A launch of each family is tried,
//! or all of them, which take minutes:
//! `GANTLINE_TEST_EVERY_KERNEL=1 cargo test --workspace --test engines derived -- --nocapture`.

use std::collections::{BTreeMap, BTreeSet};

use gantline_kernels::cuda::{
    Accesses, Arch, Function, Functions, Part, Tile, functions, functions_for,
};
use gantline_kernels::{Attention, Experts, Family, Kernel, Line, Lines, Product, ReduceOp};
use ir::DType;

use crate::attention::{packed, random_attention};
use crate::flash::random_flash;
use crate::product::{Framed, random_product};
use crate::rows::{buffers, random_rows};
use crate::shim::{Counts, Library, compiler};
use crate::{
    Buffer, Case, Random, convolution, elements, moves, recorded, runs_all, skinny, tensor,
    transpose, warpgroup, wide,
};

/// Launches of a test that are taken.
const LAUNCHES: usize = 2;
/// The same of all.
const ALL: usize = 40;
/// Draws for each launch that is small. With `SEED` all are the same, and may be large.
const TRIES: usize = 100;
/// Rows and columns of random programs.
const SHAPES: [(usize, usize); 7] =
    [(7, 7), (40, 60), (3, 768), (33, 16), (2, 1100), (64, 33), (300, 1)];
/// Launches that are compiled into one library.
const AT_ONCE: usize = 40;

/// The name of the family of a tile program.
fn family(tile: &Tile) -> &'static str {
    match tile {
        Tile::Elementwise(_) => "elementwise",
        Tile::RowReduction(_) => "reduction over rows",
        Tile::PartialSums(_) => "second pass of sums",
        Tile::Product(tile) if tile.grouped.is_some() => "experts on CUDA cores",
        Tile::Product(_) => "product on CUDA cores",
        Tile::Tensor(tile) if tile.grouped.is_some() => "experts by mma.sync",
        Tile::Tensor(tile) if tile.image.is_some() => "image by mma.sync",
        Tile::Tensor(tile) if tile.scales.is_some() => "codes with scales by mma.sync",
        Tile::Tensor(tile) if tile.tickets.is_some() => "slices by mma.sync and tickets",
        Tile::Tensor(_) => "product by mma.sync",
        Tile::SliceSum(_) => "sum of slices",
        Tile::Flash(_) => "attention by mma.sync",
        Tile::Warpgroup(tile) if tile.grouped.is_some() => "experts by wgmma",
        Tile::Warpgroup(tile) if tile.scales.is_some() => "codes with scales by wgmma",
        Tile::Warpgroup(tile) if tile.tickets.is_some() => "slices by wgmma and tickets",
        Tile::Warpgroup(tile) if tile.is_transposed => "skinny product by wgmma",
        Tile::Warpgroup(_) => "product by wgmma",
        Tile::FlashWarpgroup(_) => "attention by wgmma",
        Tile::FlashWarpgroupBackward(_) => "gradient of attention by wgmma",
        Tile::FlashBackward(_) => "gradient of attention by mma.sync",
        Tile::Attention(of) => match of.part {
            Part::Forward => "attention on CUDA cores",
            Part::Delta { .. } => "dot products of O and dO",
            Part::Queries | Part::Keys => "gradient of attention on CUDA cores",
            Part::Bias => "gradient of a bias",
        },
        Tile::Lines(_) => "along a dim",
        Tile::Move(_) => "move",
        Tile::Routing(_) => "routing",
    }
}

/// Families of attention, of which each has dropout in some launches, and documents in others.
fn variant(tile: &Tile) -> Option<&'static str> {
    let a = match tile {
        Tile::Flash(tile) => &tile.attention,
        Tile::FlashWarpgroup(tile) => &tile.attention,
        Tile::FlashBackward(tile) => &tile.attention,
        Tile::FlashWarpgroupBackward(tile) => &tile.attention,
        Tile::Attention(tile) => &tile.attention,
        _ => return None,
    };
    match (a.dropout.is_some(), a.documents.is_some()) {
        (false, false) => None,
        (true, false) => Some("with dropout"),
        (false, true) => Some("within documents"),
        (true, true) => Some("with both"),
    }
}

/// The shim counts a million products a second.
fn is_small(p: &Product) -> bool {
    p.sizes().iter().product::<usize>() < 100_000
}

/// The same of whole block tiles.
fn has_few_tiles(p: &Product) -> bool {
    let [batch, m, n, k] = p.sizes();
    batch * m.div_ceil(128) * n.div_ceil(128) * k.div_ceil(32) <= 12
}

/// Products on CUDA cores: of random strides and types, of images, of codes with scales, and with
/// what is added to them.
fn on_cores(count: usize) -> Vec<Case> {
    let random = |number: usize| {
        let mut random = Random::new(number as u64 + 900);
        let dtype = random.pick(&[DType::F32, DType::F64]);
        let product = match number % 3 {
            0 => Framed::random(&mut random).product(dtype),
            _ => random_product(&mut random, dtype),
        };
        let is_tiny = product.sizes().iter().product::<usize>() < 20_000;
        is_tiny.then(|| Case::new(&mut random, Kernel::Product(product)))
    };
    let mut all: Vec<Case> = (0..TRIES * count).filter_map(random).take(2 * count).collect();
    let added = tensor::cases(64).into_iter().filter(|(_, p, _)| is_small(p));
    all.extend(added.map(|(case, ..)| case).take(count));
    let codes = elements::cases(64).into_iter().filter(|of| of.product.stored.a.size() == 1);
    all.extend(codes.filter(|of| is_small(&of.product)).map(|of| of.case).take(count));
    all
}

/// An operation along a dim of a random shape.
fn random_lines(number: usize) -> Case {
    let mut random = Random::new(number as u64 + 1300);
    let (outer, inner) = (1 + random.below(9), 1 + random.below(70));
    let [size, stride, dilation] = [0; 3].map(|_| 1 + random.below(3));
    let count = 1 + random.below(20);
    let reach = (count - 1) * stride + (size - 1) * dilation + 1 + random.below(3);
    let op = random.pick(&[ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min]);
    let (how, extent, result) = match number % 5 {
        0 => (Line::Cumulative(op), reach, reach),
        1 => (Line::Prod, reach, 1),
        2 => (Line::Reverse, reach, reach),
        3 => (Line::Fold { size, stride, dilation }, count * size, reach),
        _ => (Line::Pool { op, size, stride, dilation }, reach, count),
    };
    let dtype = random.pick(&[DType::F32, DType::F64, DType::I32, DType::U32]);
    let narrow = random.pick(&[DType::BF16, DType::Bool]);
    let dtype = if how == Line::Reverse { random.pick(&[dtype, narrow]) } else { dtype };
    let kernel = Kernel::Lines(Lines { outer, extent, result, inner, how, dtype });
    Case::new(&mut random, kernel)
}

/// What an attention has beside rows.
#[derive(Clone, Copy, PartialEq)]
enum More {
    Nothing,
    Dropout,
    /// Documents, and perhaps dropout.
    Documents,
}

/// An attention of random strides and its gradient, on CUDA cores or on tensor cores; none of one
/// that takes long, or that lacks what it should have.
fn random_attentions(number: usize, on_cores: bool, more: More) -> Option<[Case; 2]> {
    let mut random = Random::new(number as u64 + if on_cores { 2300 } else { 1700 });
    let dtype = random.pick(&[DType::F32, DType::BF16]);
    let dtype = if number % 8 == 7 { DType::F64 } else { dtype };
    // Of wider heads gradients with dropout are by `mma.sync` alone.
    let dims: &[usize] = if more == More::Dropout { &[16, 48] } else { &[16, 48, 64, 80, 128] };
    let draw = |random: &mut Random, dtype: DType| match on_cores {
        true => random_attention(random, dtype),
        false => random_flash(random, dims),
    };
    let a = match more {
        More::Documents => packed(&mut random, draw, dtype),
        More::Nothing => Attention { dropout: None, ..draw(&mut random, dtype) },
        More::Dropout => draw(&mut random, dtype),
    };
    let bias_grad = a.bias.is_some();
    let a = Attention { position: false, bias_grad, ..a };
    let sees = (0..a.queries).any(|s| !a.visible(s).is_empty());
    let is_meant = match more {
        More::Nothing => true,
        More::Dropout => a.dropout.is_some() && sees,
        More::Documents => sees,
    };
    let steps = a.batch * a.heads * a.queries * a.keys;
    let is_small = if on_cores { steps * a.dim < 20_000 } else { steps < 20_000 };
    let kernels = [
        Kernel::Attention(Attention { bias_grad: false, ..a.clone() }),
        Kernel::AttentionBwd(a.clone()),
    ];
    // The gradient of a bias is computed on CUDA cores.
    let is_one = on_cores || bias_grad;
    (is_small && is_meant).then(|| {
        kernels.map(|kernel| {
            let mut case = Case::new(&mut random, kernel);
            if a.documents.is_some() && is_one {
                let number = 3 + usize::from(a.bias.is_some());
                case.inputs[number] = Buffer::I32(vec![1; a.batch * a.keys]);
            }
            case
        })
    })
}

/// Experts of random sizes and their gradient. The pairs that are expected are dealt to experts in
/// turn, and to tokens in their order.
fn random_experts(number: usize, types: &[DType]) -> [Case; 2] {
    let mut random = Random::new(number as u64 + 2900);
    let experts = 1 + random.below(3);
    // The tokens of two tiles, and of less than one.
    let tokens = random.pick(&[1, 3, 40, 70, 129]);
    let e = Experts {
        tokens,
        experts,
        model: random.pick(&[7, 16, 24, 33, 40]),
        inner: random.pick(&[9, 16, 20, 36, 72, 130]),
        top_k: 1 + random.below(experts),
        of: experts * (1 + random.below(2)),
        accumulate: [0; 3].map(|_| random.below(2) == 0),
        dtype: random.pick(types),
    };
    let mut gates = vec![0.0; tokens * experts];
    let pairs = e.pairs();
    (0..pairs).for_each(|pair| gates[pair * tokens / pairs * experts + pair % experts] = 0.5);
    let forward = Experts { accumulate: [false; 3], ..e.clone() };
    [Kernel::Experts(forward), Kernel::ExpertsBwd(e.clone())].map(|kernel| {
        let mut case = Case::new(&mut random, kernel);
        case.inputs[1] = Buffer::new(e.dtype, &gates);
        case
    })
}

/// Fused loops over rows of random shapes, and of rows that larger blocks and clusters share.
fn loops_over_rows(count: usize) -> Vec<(Case, Arch)> {
    let random = |number: usize| {
        let shape = SHAPES[number % SHAPES.len()];
        let mut random = Random::new(number as u64);
        let rows = random_rows(&mut random, DType::F32, shape, true);
        let (inputs, old) = buffers(&mut random, &rows);
        (Case { kernel: Kernel::Rows(rows), scalars: Vec::new(), inputs, old }, Arch::Sm80)
    };
    let wide = [Arch::Sm80, Arch::Sm90a].into_iter().flat_map(|arch| {
        let kernels = [
            wide::softmax(DType::F64, [3, 12_296], true),
            wide::softmax(DType::BF16, [1, 50_257], false),
            wide::norm(DType::F64, [2, 12_301]),
        ];
        kernels.map(|kernel| (Case::new(&mut Random::new(3), kernel), arch))
    });
    (0..3 * count).map(random).chain(wide).collect()
}

/// Launches with the functions of their kernels.
fn launches(count: usize) -> Vec<(Case, Functions)> {
    let mut all = Vec::new();
    let mut add = |case: Case, arch: Arch| {
        let functions = functions_for(&case.kernel, arch);
        all.push((case, functions));
    };
    loops_over_rows(count).into_iter().for_each(|(case, arch)| add(case, arch));
    for test in [
        moves::copies_follow_their_strides,
        moves::rotary_embedding_rotates_and_its_inverse_undoes_it,
    ] {
        let found = recorded(test);
        let step = found.len().div_ceil(count);
        found.into_iter().step_by(step).for_each(|of| add(of.case, Arch::Sm80));
    }
    let few = tensor::cases(64).into_iter().filter(|(_, p, _)| is_small(p)).take(count);
    few.for_each(|(case, ..)| add(case, Arch::Sm80));
    let few = elements::cases(64).into_iter().filter(|of| is_small(&of.product)).take(count);
    few.for_each(|of| add(of.case, elements::arch(&of.product)));
    let codes = elements::cases(200).into_iter().filter(|of| of.product.scales.is_some());
    for of in codes.filter(|of| has_few_tiles(&of.product)).take(2 * count) {
        add(of.case.clone(), Arch::Sm89);
        add(of.case, Arch::Sm90a);
    }
    let images = convolution::narrow(30 * count as u64).filter(|(_, p)| has_few_tiles(p));
    images.take(3 * count).for_each(|(case, _)| add(case, Arch::Sm80));
    for case in (0..count).flat_map(|at| random_experts(at, &[DType::BF16, DType::F16])) {
        add(case.clone(), Arch::Sm80);
        add(case, Arch::Sm90a);
    }
    for accumulate in [false, true] {
        let mut p = Product::matrix(17, 24, 256, DType::BF16);
        (p.stored.c, p.tiling.split, p.accumulate) = (DType::F32, 2, accumulate);
        add(Case::new(&mut Random::new(1), Kernel::Product(p.clone())), Arch::Sm80);
        // Slices of rows and columns that do not fill their tiles.
        (p.m[0].size, p.tiling.family) = (5, Family::Skinny);
        for arch in [Arch::Sm80, Arch::Sm90a] {
            add(Case::new(&mut Random::new(1), Kernel::Product(p.clone())), arch);
        }
    }
    for (at, dtype) in [DType::F32, DType::BF16, DType::Bool].into_iter().enumerate() {
        let copy = transpose::transposition(&mut Random::new(at as u64), dtype, [70, 45 + at]);
        add(Case::new(&mut Random::new(at as u64), Kernel::Copy(copy)), Arch::Sm80);
    }
    (0..20 * count).for_each(|number| add(random_lines(number), Arch::Sm80));
    let attention = |on_cores| {
        [More::Nothing, More::Dropout, More::Documents].into_iter().flat_map(move |more| {
            let all =
                (0..TRIES * count).filter_map(move |at| random_attentions(at, on_cores, more));
            all.take(1 + count / 4)
        })
    };
    for case in attention(false).flatten() {
        add(case.clone(), Arch::Sm80);
        add(case, Arch::Sm90a);
    }
    let by_warpgroups = warpgroup::cases(64).into_iter().filter(|(_, p, _)| is_small(p));
    let narrow = skinny::cases(64).into_iter().filter(|(_, p, _)| is_small(p));
    let few = by_warpgroups.take(3 * count).chain(narrow.take(2 * count));
    few.for_each(|(case, ..)| add(case, Arch::Sm90a));
    let types = [DType::F32, DType::F64, DType::BF16];
    let experts = (0..count).flat_map(|at| random_experts(100 + at, &types));
    let cases = on_cores(count).into_iter().chain(attention(true).flatten()).chain(experts);
    all.extend(cases.map(|case| {
        let functions = functions(&case.kernel);
        (case, functions)
    }));
    all
}

/// What the shim counts of a function, as it is derived.
fn counted(function: &Function, counts: &Counts) -> Accesses {
    let is_matrix =
        matches!(function.tile, Tile::Tensor(_) | Tile::Flash(_) | Tile::FlashBackward(_));
    let turns = if is_matrix { counts.matrix_turns } else { counts.turns };
    Accesses { sectors: counts.sectors, turns }
}

/// Launches of which each has a function of a family that those before it have not; of attention
/// one with dropout or documents, which has more accesses.
fn one_of_each(mut all: Vec<(Case, Functions)>) -> Vec<(Case, Functions)> {
    all.sort_by_key(|(_, of)| !of.functions.iter().any(|f| variant(&f.tile).is_some()));
    let mut seen = BTreeSet::new();
    all.retain(|(_, of)| {
        let known = of.functions.iter().filter(|function| function.accesses().is_some());
        let before = seen.len();
        seen.extend(known.map(|function| family(&function.tile)));
        seen.len() > before
    });
    all
}

#[test]
fn derived_accesses_are_those_that_the_shim_counts() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let is_drawn = std::env::var("SEED").is_ok();
    let mut all = launches(if runs_all() { ALL } else { LAUNCHES });
    let is_known = |of: &Function| of.accesses().is_some();
    all.retain(|(_, of)| of.functions.iter().any(is_known));
    if !runs_all() && !is_drawn {
        all = one_of_each(all);
    }
    let mut families: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    let mut wrong = 0;
    for (chunk, some) in all.chunks(AT_ONCE).enumerate() {
        let texts = some.iter().map(|(case, of)| (case.kernel.clone(), of.clone())).collect();
        let library = Library::counted(&format!("derived-{chunk}"), texts).expect("it compiles");
        for (at, (case, functions)) in some.iter().enumerate() {
            case.execute(&library, at, 0);
            for (function, counts) in functions.functions.iter().zip(library.counts_of_functions())
            {
                let Some(derived) = function.accesses() else { continue };
                let variant = variant(&function.tile).unwrap_or_default();
                *families.entry((family(&function.tile), variant)).or_default() += 1;
                let found = counted(function, &counts);
                if derived != found {
                    println!("{derived:?}, counted {found:?}: {function} {:?}", case.kernel);
                    wrong += 1;
                }
            }
        }
    }
    println!("{families:?}");
    assert_eq!(wrong, 0, "what is derived of these is not what is counted");
    if is_drawn {
        return;
    }
    let names: BTreeSet<&str> = families.keys().map(|(name, _)| *name).collect();
    assert_eq!(names.len(), 27, "{families:?}");
    if !runs_all() {
        return;
    }
    for name in names.iter().filter(|name| name.contains("attention by")) {
        for any in [&[""][..], &["with dropout"], &["within documents", "with both"]] {
            let is_found = any.iter().any(|variant| families.contains_key(&(*name, *variant)));
            assert!(is_found, "{name} {any:?}: {families:?}");
        }
    }
}
