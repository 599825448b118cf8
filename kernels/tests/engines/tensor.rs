//! Kernels for tensor cores (sm_80), executed by the shim: products of BF16 and F16 against exact
//! sums, on random shapes and layouts; barriers that are left out, and other mistakes in the text.

use std::collections::BTreeSet;

use gantline_kernels::cuda::{Arch, Functions, Tile, functions, functions_for};
use gantline_kernels::rows::ReduceOp;
use gantline_kernels::{Access, Attention, BinaryOp, Instr, Output, RowInput, Rows, UnaryOp};
use gantline_kernels::{Kernel, LoopABC, Offset, Product, ProductPart, Products, StoredTypes};
use ir::DType;

use crate::shim::{Library, compiler};
use crate::{Buffer, Case, Random, same_bits};

/// A kernel with its functions for sm_80.
pub(crate) fn for_sm80(kernel: &Kernel) -> (Kernel, Functions) {
    (kernel.clone(), functions_for(kernel, Arch::Sm80))
}

/// A product of matrices that lie in one of two ways each, some rows longer than need be.
fn matrix(random: &mut Random, dtype: DType, [m, n, k]: [usize; 3]) -> Product {
    let mut p = Product::matrix(m, n, k, DType::F32);
    let more = random.pick(&[0, 0, 1, 2, 4, 8]);
    p.stored = StoredTypes { a: dtype, b: dtype, c: random.pick(&[DType::F32, dtype]) };
    p.accumulate = p.stored.c == DType::F32 && random.below(2) == 0;
    let [of_a, of_b] = [0; 2].map(|_| random.below(2) == 0);
    (p.m[0].a, p.k[0].a) = if of_a { (k + more, 1) } else { (1, m + more) };
    (p.n[0].b, p.k[0].b) = if of_b { (k + more, 1) } else { (1, n + more) };
    // Rows of the result end anywhere, also where they start at multiples of 4 or 8 elements.
    let row = random.pick(&[n, n.next_multiple_of(4), n.next_multiple_of(8)]);
    p.m[0].c = row;
    if random.below(4) == 0 {
        (p.m[0].c, p.n[0].c) = (1, m);
    }
    if random.below(4) == 0 {
        let size = random.pick(&[2, 3]);
        let [a, b] = [(k.max(m) + more) * (k.max(m) + more), random.pick(&[0, 1, 8]) * 1024];
        p.batch.push(LoopABC { size, a, b, c: m * row });
    }
    p
}

/// Asserts that what lies between the rows of a result is as it was.
fn assert_gaps_are_left(p: &Product, case: &Case, found: &Buffer) {
    let written: BTreeSet<usize> = elements(p).into_iter().map(|([_, _, c], _)| c).collect();
    for (at, (old, found)) in case.old[0].numbers().iter().zip(found.numbers()).enumerate() {
        assert!(written.contains(&at) || *old == found, "{p:?}: {at} is no element");
    }
}

/// The offsets of a point in `a`, `b` and `c`, and in `n`, for every element of the result.
fn elements(p: &Product) -> Vec<([usize; 3], usize)> {
    let mut all = vec![([0; 3], 0)];
    let mut extend = |size: usize, strides: [usize; 3], own: usize| {
        all = all
            .iter()
            .flat_map(|(at, n)| {
                (0..size).map(move |i| {
                    let at = [0, 1, 2].map(|o: usize| at[o] + i * strides[o]);
                    (at, if own > 0 { n * own + i } else { *n })
                })
            })
            .collect();
    };
    p.batch.iter().for_each(|l| extend(l.size, [l.a, l.b, l.c], 0));
    p.m.iter().for_each(|l| extend(l.size, [l.a, 0, l.c], 0));
    p.n.iter().for_each(|l| extend(l.size, [0, l.b, l.c], l.size));
    all
}

/// Elementwise of `k`: offsets in `a` and `b`.
fn contracted(p: &Product) -> Vec<[usize; 2]> {
    let mut all = vec![[0; 2]];
    for l in &p.k {
        all = all
            .iter()
            .flat_map(|at| (0..l.size).map(move |i| [at[0] + i * l.a, at[1] + i * l.b]))
            .collect();
    }
    all
}

/// One step from a number to the next of its type.
pub(crate) fn ulp(dtype: DType, x: f64) -> f64 {
    let bits = match dtype {
        DType::BF16 => 8,
        DType::F16 => 11,
        _ => 24,
    };
    let least: f64 = if dtype == DType::F16 { 6e-5 } else { 1e-37 };
    x.abs().max(least) * 2_f64.powi(1 - bits)
}

/// The element of a result that is furthest from where it should be: above 1 it is too far.
pub(crate) struct Furthest {
    /// The distance over its bound.
    pub(crate) share: f64,
    pub(crate) element: usize,
    /// What it is, and should be.
    pub(crate) found: f64,
    pub(crate) wanted: f64,
}

impl Furthest {
    /// That of no element.
    pub(crate) const NONE: Furthest = Furthest { share: 0.0, element: 0, found: 0.0, wanted: 0.0 };

    /// The further one of these two; no number is furthest.
    pub(crate) fn or(self, share: f64, element: usize, [found, wanted]: [f64; 2]) -> Furthest {
        let share = if share.is_nan() { f64::INFINITY } else { share };
        if share > self.share { Furthest { share, element, found, wanted } } else { self }
    }
}

/// Whether an output is as near to the exact sum as the table of bounds says, else where it is not.
pub(crate) fn is_near(
    p: &Product,
    case: &Case,
    found: &Buffer,
    added: [Option<usize>; 2],
) -> Option<String> {
    let Furthest { share, element, found, wanted } = share_of_bound(p, case, found, added);
    (share > 1.0).then(|| format!("{p:?}: element {element} is {found}, not {wanted}"))
}

/// The element of an output that is furthest from the exact sum, as a share of the bound.
pub(crate) fn share_of_bound(
    p: &Product,
    case: &Case,
    found: &Buffer,
    added: [Option<usize>; 2],
) -> Furthest {
    let [a, b] = [0, 1].map(|at: usize| case.inputs[at].numbers());
    let (old, found) = (case.old[0].numbers(), found.numbers());
    let [bias, addend] = added.map(|at| at.map(|at| case.inputs[at].numbers()));
    let terms = contracted(p);
    let mut furthest = Furthest::NONE;
    for ([in_a, in_b, in_c], n) in elements(p) {
        let start = if p.accumulate { old[in_c] } else { 0.0 };
        let (mut sum, mut most) = (start, start.abs());
        for [of_a, of_b] in &terms {
            let x = a[in_a + of_a] * b[in_b + of_b];
            sum += x;
            most += x.abs();
        }
        let mut limit = (terms.len() + 4) as f64 * 2_f64.powi(-23) * most;
        limit += ulp(p.stored.c, sum.abs() + limit);
        for more in [bias.as_ref().map(|x| x[n]), addend.as_ref().map(|x| x[in_c])] {
            let Some(more) = more else { continue };
            sum += more;
            limit += ulp(p.stored.c, sum.abs() + limit);
        }
        let share = (found[in_c] - sum).abs() / limit;
        furthest = furthest.or(share, in_c, [found[in_c], sum]);
    }
    furthest
}

fn is_tensor(functions: &Functions) -> bool {
    functions.functions.iter().all(|function| matches!(function.tile, Tile::Tensor(_)))
}

/// Products on random shapes, of which every fourth is one of several with a bias and an addend.
pub(crate) fn cases(count: u64) -> Vec<(Case, Product, [Option<usize>; 2])> {
    let edges = [1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 64, 70, 127, 128, 129, 136];
    let case = |number: u64| {
        let mut random = Random::new(number);
        let dtype = random.pick(&[DType::BF16, DType::F16]);
        let sizes = [0; 3].map(|_| random.pick(&edges));
        let mut p = matrix(&mut random, dtype, sizes);
        if !number.is_multiple_of(4) {
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
fn products_are_as_near_to_exact_sums_as_the_bound() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let cases = cases(32);
    let all: Vec<(Kernel, Functions)> =
        cases.iter().map(|(case, ..)| for_sm80(&case.kernel)).collect();
    assert!(all.iter().all(|(_, of)| is_tensor(of)), "narrow products run on tensor cores");
    let (mut widths, mut stored): (Vec<[usize; 2]>, Vec<usize>) = (Vec::new(), Vec::new());
    for tile in all.iter().flat_map(|(_, of)| &of.functions).map(|function| &function.tile) {
        if let Tile::Tensor(tile) = tile {
            widths.push(tile.copies.map(|copy| copy.width));
            stored.push(tile.store.width);
        }
    }
    for width in [1, 2, 4, 8] {
        let found = widths.iter().flatten().any(|found| *found == width);
        let found = found && stored.contains(&width);
        assert!(found || std::env::var("SEED").is_ok(), "accesses to {width} are among the cases");
    }
    let library = Library::new("tensor", all).expect("there is a compiler");
    for (at, (case, p, added)) in cases.iter().enumerate() {
        let found = case.execute(&library, at, 0);
        assert_eq!(is_near(p, case, &found[0], *added), None, "case {at}");
        assert_gaps_are_left(p, case, &found[0]);
        let again = case.execute(&library, at, 5 + at as u64);
        assert!(same_bits(&again[0], &found[0]), "case {at}: the order of threads changes bits");
    }
}

/// Rows and columns of a product, cut out of it, have the same bits.
#[test]
fn bits_do_not_depend_on_how_a_product_is_cut() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let mut random = Random::new(77);
    let [m, n, k] = [150, 140, 90];
    let mut whole = Product::matrix(m, n, k, DType::BF16);
    whole.stored.c = DType::F32;
    let [rows, columns] = [33, 65];
    let mut part = whole.clone();
    (part.m[0].size, part.n[0].size) = (rows, columns);
    let kernels = [whole, part].map(Kernel::Product);
    let all = kernels.iter().map(for_sm80).collect();
    let library = Library::new("tensor_cut", all).expect("there is a compiler");
    let [whole, part] = kernels.map(|kernel| Case::new(&mut random, kernel));
    let part = Case { inputs: whole.inputs.clone(), ..part };
    let [whole, part] = [whole.execute(&library, 0, 0), part.execute(&library, 1, 0)];
    let (whole, part) = (whole[0].numbers(), part[0].numbers());
    for row in 0..rows {
        for column in 0..columns {
            let [a, b] = [whole[row * n + column], part[row * n + column]];
            assert!(a.to_bits() == b.to_bits(), "{row}, {column}: {b}, not {a}");
        }
    }
}

#[test]
fn equal_kernels_have_equal_text() {
    for (case, ..) in cases(12) {
        let text = || functions_for(&case.kernel, Arch::Sm90a).functions[0].text("f");
        assert_eq!(text(), text());
        // Without an architecture nothing runs on tensor cores.
        assert!(!is_tensor(&functions(&case.kernel)));
    }
}

/// Every time.
pub(crate) const EACH: usize = usize::MAX;

/// What can be wrong in the text of a product: what is replaced, which time, and by what.
const MISTAKES: [(&str, usize, &str); 17] = [
    ("sync_block();", 0, ""),
    ("cp_async_wait<1>();", 0, ""),
    ("cp_async_wait<1>();", 0, "cp_async_wait<2>();"),
    ("cp_async_commit();", 0, ""),
    ("step % 3", 0, "step % 2"),
    ("(step - 2) % 3", 0, "(step - 1) % 3"),
    ("is_there);", EACH, "true);"),
    ("^ row / 2 % 4", 0, "^ row % 4"),
    ("^ row % 8", 0, "^ row / 2 % 4"),
    ("ldmatrix(", 0, "ldmatrix_trans("),
    ("ldmatrix_trans(", 0, "ldmatrix("),
    ("lane / 16 * 8", 0, "lane / 8 % 2 * 8"),
    ("lane / 16 * 8", 1, "lane / 8 % 2 * 8"),
    ("warp_mma<bf16>(acc, a, b);", 0, "if (k == 0) warp_mma<bf16>(acc, a, b);"),
    ("q / 2 * 8", 0, "q % 2 * 8"),
    ("exchange_columns(x_pairs);", 0, ""),
    ("+ lane % 4 * 8;", 0, "+ (lane ^ 1) % 4 * 8;"),
];

/// The text with one mistake.
pub(crate) fn mistaken(text: &str, (right, time, wrong): (&str, usize, &str)) -> String {
    if time == EACH {
        return text.replace(right, wrong);
    }
    let found = text.match_indices(right).nth(time);
    let (at, _) = found.unwrap_or_else(|| panic!("`{right}`: {text}"));
    format!("{}{wrong}{}", &text[..at], &text[at + right.len()..])
}

#[test]
fn mistakes_in_the_text_of_a_product_are_found() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let mut p = Product::matrix(136, 136, 100, DType::BF16);
    // Rows go on behind the last point of `k`.
    p.m[0].a = 104;
    let kernel = Kernel::Product(p.clone());
    let change = |at: usize, text: String| match at {
        0 => text,
        _ => mistaken(&text, MISTAKES[at - 1]),
    };
    let all = vec![for_sm80(&kernel); MISTAKES.len() + 1];
    let library = Library::changed("tensor_mistakes", all, &change).expect("there is a compiler");
    let case = Case::new(&mut Random::new(5), kernel);
    let is_found = |at: usize, seed: u64| {
        is_near(&p, &case, &case.execute(&library, at, seed)[0], [None; 2]).is_some()
    };
    assert!((0..8).all(|seed| !is_found(0, seed)), "without a mistake nothing is found");
    for (at, mistake) in MISTAKES.iter().enumerate() {
        assert!((0..8).any(|seed| is_found(at + 1, seed)), "{mistake:?} is not found");
    }
}

/// Softmax of rows that are longer than what a warp takes.
pub(crate) fn softmax() -> Rows {
    let [rows, cols] = [3, 1100];
    let input = RowInput { dtype: DType::F32, access: Access::full(rows, cols) };
    let output =
        |value, access| Output::Store { value, access, dtype: DType::F32, accumulate: false };
    let reduce = |op, x| Instr::Reduce { op, x };
    Rows {
        rows,
        cols,
        dtype: DType::F32,
        inputs: vec![input],
        instrs: vec![
            Instr::Load { input: 0 },
            reduce(ReduceOp::Max, 0),
            Instr::Binary { op: BinaryOp::Sub, a: 0, b: 1 },
            Instr::Unary { op: UnaryOp::Exp, x: 2 },
            reduce(ReduceOp::Sum, 3),
            Instr::Binary { op: BinaryOp::Div, a: 3, b: 4 },
        ],
        outputs: vec![output(5, Access::full(rows, cols))],
    }
}

pub(crate) fn attention() -> Attention {
    let [batch, queries, keys, heads, kv_heads, dim] = [1, 37, 70, 2, 1, 40];
    let of_queries = [queries * heads * dim, heads * dim, dim];
    let of_keys = [keys * kv_heads * dim, kv_heads * dim, dim];
    Attention {
        batch,
        queries,
        keys,
        heads,
        kv_heads,
        dim,
        scale: 0.2,
        causal: false,
        window: 0,
        softcap: 0.0,
        bias: None,
        bias_grad: false,
        documents: None,
        query_offset: 0,
        head_offset: Offset::ZERO,
        group: 2,
        q: of_queries,
        k: of_keys,
        v: of_keys,
        out: of_queries,
        dropout: None,
        position: false,
        dtype: DType::F32,
    }
}

/// Every function that synchronises, with each of its barriers left out once. Of a row the last
/// two are for the next one, of which these have none.
#[test]
fn barriers_that_are_left_out_are_found() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let kernels = [
        (Kernel::Product(Product::matrix(70, 65, 40, DType::F32)), "sync_block();", 0),
        (Kernel::Product(Product::matrix(130, 40, 140, DType::BF16)), "sync_block();", 0),
        (Kernel::Rows(softmax()), "sync_block();", 2),
        (Kernel::Attention(attention()), "sync_warp();", 0),
        (Kernel::AttentionBwd(attention()), "sync_warp();", 0),
    ];
    let mut changed: Vec<(usize, usize, usize)> = Vec::new();
    for (at, (kernel, barrier, needless)) in kernels.iter().enumerate() {
        for (number, function) in functions_for(kernel, Arch::Sm80).functions.iter().enumerate() {
            let count = function.text("f").matches(barrier).count() - needless;
            assert!(count > 0, "threads of {function} synchronise");
            changed.extend((0..count).map(|time| (at, number, time)));
        }
    }
    let count = kernels.len();
    let of = |at: usize| match at.checked_sub(count) {
        None => at,
        Some(number) => changed[number].0,
    };
    let change = |at: usize, text: String| match at.checked_sub(count).map(|at| changed[at]) {
        Some((kernel, number, time)) if text.contains(&format!("_{number}(")) => {
            mistaken(&text, (kernels[kernel].1, time, ""))
        }
        _ => text,
    };
    let all: Vec<usize> = (0..count + changed.len()).map(of).collect();
    let texts = all.iter().map(|at| for_sm80(&kernels[*at].0)).collect();
    let library = Library::checked("barriers", texts, &change).expect("there is a compiler");
    let mut random = Random::new(9);
    let cases: Vec<Case> =
        kernels.iter().map(|(kernel, ..)| Case::new(&mut random, kernel.clone())).collect();
    for (at, kernel) in all.iter().enumerate() {
        let mut found = (0..8).filter_map(|seed| {
            cases[*kernel].execute(&library, at, seed);
            library.report()
        });
        match at.checked_sub(count) {
            None => assert_eq!(found.next(), None, "{:?}", kernels[*kernel].0),
            Some(number) => assert!(found.next().is_some(), "{:?} is not found", changed[number]),
        }
    }
    println!("{} barriers", changed.len());
}
