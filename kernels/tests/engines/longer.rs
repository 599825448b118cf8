//! The shim's longer run: each family and type on many shapes, with rows that start at multiples of
//! 2, 4, 8 and 16 bytes, in three orders of threads, with all checks.
//!
//! CI runs fewer cases of the same generators in the tests of each family. All of these, which take
//! minutes, and the table in `benches/README.md`:
//! `GANTLINE_TEST_EVERY_KERNEL=1 cargo test --workspace --test engines longer -- --nocapture`.

use std::collections::BTreeMap;

use gantline_kernels::Kernel;
use gantline_kernels::cuda::{self, Arch, Functions, functions_for};
use ir::DType;

use crate::cuda::{RECORDED, launched, share_of_tolerance};
use crate::flash::{Expected, ExpectedGradient, random_of};
use crate::shim::{Library, compiler};
use crate::{
    Buffer, Case, Random, Recorded, elements, experts_cuda, recorded, runs_all, same_bits, skinny,
    tensor, warpgroup,
};

/// Orders of threads, and blocks that are resident at once where a function is persistent.
const SCHEDULES: [u64; 3] = [0, 6, 91];
/// Shapes of each family and type at least.
const SHAPES: usize = 20;
/// Most launches of a test of the CPU that are taken of each type. Chosen: all of them take hours.
const LAUNCHES: usize = 24;
/// Cases that are compiled into one library.
const AT_ONCE: usize = 32;

/// A launch, and how far its result is from where it should be: above 1 it is too far.
struct Checked {
    family: &'static str,
    dtype: DType,
    case: Case,
    functions: Functions,
    share: Box<dyn Fn(&[Buffer]) -> f64>,
}

/// The cases of a family and type, and the largest share of the bound.
#[derive(Default)]
struct Tally {
    cases: usize,
    worst: f64,
}

/// Runs all cases, and adds them to the tallies.
fn run_all(cases: Vec<Checked>, tallies: &mut BTreeMap<(&'static str, &'static str), Tally>) {
    for (chunk, some) in cases.chunks(AT_ONCE).enumerate() {
        let all = some.iter().map(|of| (of.case.kernel.clone(), of.functions.clone())).collect();
        let name = format!("longer-{}-{chunk}", some[0].family.replace(' ', "-"));
        let library = Library::checked(&name, all, &|_, text| text).expect("it compiles");
        for (at, of) in some.iter().enumerate() {
            let mut first: Option<Vec<Buffer>> = None;
            for seed in SCHEDULES {
                let found = of.case.execute(&library, at, seed);
                let what = || format!("{}, seed {seed}: {:?}", of.family, of.case.kernel);
                assert_eq!(library.report(), None, "{}", what());
                let first = first.get_or_insert_with(|| found.clone());
                let is_same = found.iter().zip(first.iter()).all(|(a, b)| same_bits(a, b));
                assert!(is_same, "the order of threads changes bits: {}", what());
            }
            let share = (of.share)(&first.unwrap_or_default());
            assert!(share <= 1.0, "{share} of the bound: {:?}", of.case.kernel);
            let tally = tallies.entry((of.family, of.dtype.name())).or_default();
            tally.cases += 1;
            tally.worst = tally.worst.max(share);
        }
    }
}

/// Launches of the CPU's tests, against its results.
fn of_the_cpu() -> Vec<Checked> {
    let mut all = Vec::new();
    let output = |kernel: &Kernel| kernel.outputs().first().map_or(DType::F32, |of| of.dtype);
    for (family, test) in RECORDED {
        let mut by_type: BTreeMap<&str, Vec<Recorded>> = BTreeMap::new();
        for launch in recorded(test) {
            by_type.entry(output(&launch.case.kernel).name()).or_default().push(launch);
        }
        let spread = |launches: Vec<Recorded>| {
            let step = launches.len().div_ceil(LAUNCHES);
            launches.into_iter().step_by(step)
        };
        for (at, recorded) in by_type.into_values().flat_map(spread).enumerate() {
            let case = launched(at, &recorded);
            let functions = cuda::functions(&case.kernel);
            let output = output(&case.kernel);
            let (kernel, of) = (case.kernel.clone(), functions.clone());
            let share = move |found: &[Buffer]| {
                share_of_tolerance(&kernel, &of, &recorded.found, found).share
            };
            all.push(Checked { family, dtype: output, case, functions, share: Box::new(share) });
        }
    }
    all
}

fn products() -> Vec<Checked> {
    let mut all = Vec::new();
    let mut add = |family, arch: Arch, (case, p, added): (Case, gantline_kernels::Product, _)| {
        let functions = functions_for(&case.kernel, arch);
        let (of, dtype) = (case.clone(), p.stored.a);
        let share = move |found: &[Buffer]| tensor::share_of_bound(&p, &of, &found[0], added).share;
        all.push(Checked { family, dtype, case, functions, share: Box::new(share) });
    };
    for case in tensor::cases(64) {
        add("products by mma.sync", Arch::Sm80, case);
    }
    for case in warpgroup::cases(64) {
        add("products by wgmma", Arch::Sm90a, case);
    }
    for case in skinny::cases(64) {
        add("skinny and sliced products by mma.sync", Arch::Sm80, case.clone());
        add("skinny and sliced products by wgmma", Arch::Sm90a, case);
    }
    for of in elements::cases(90) {
        let (arch, dtype) = (elements::arch(&of.product), of.product.stored.a);
        let functions = functions_for(&of.case.kernel, arch);
        let case = of.case.clone();
        let share = move |found: &[Buffer]| of.share(&found[0]);
        let family = "products by mma.sync, rounded or of bytes";
        all.push(Checked { family, dtype, case, functions, share: Box::new(share) });
    }
    all
}

fn attention() -> Vec<Checked> {
    let mut all = Vec::new();
    for number in 0..48 {
        let mut random = Random::new(1000 + number);
        let a = random_of(number % 20, &mut random);
        for (family, arch) in
            [("attention by mma.sync", Arch::Sm80), ("attention by wgmma", Arch::Sm90a)]
        {
            let expected = Expected::new(&mut Random::new(number), a.clone());
            let (case, dtype) = (expected.case.clone(), a.dtype);
            let functions = functions_for(&case.kernel, arch);
            let share = move |found: &[Buffer]| expected.share(found);
            all.push(Checked { family, dtype, case, functions, share: Box::new(share) });
        }
        let expected = ExpectedGradient::new(&mut Random::new(number), &a);
        let (case, dtype) = (expected.case.clone(), a.dtype);
        let functions = functions_for(&case.kernel, Arch::Sm80);
        let share = move |found: &[Buffer]| expected.share(found);
        let family = "gradients of attention by mma.sync";
        all.push(Checked { family, dtype, case, functions, share: Box::new(share) });
    }
    all
}

fn experts() -> Vec<Checked> {
    let mut all = Vec::new();
    for (family, arch) in [("experts by mma.sync", Arch::Sm80), ("experts by wgmma", Arch::Sm90a)] {
        for number in 0..40 {
            let dtype = [DType::BF16, DType::F16][number as usize % 2];
            let lowered = move |kernel: &Kernel| functions_for(kernel, arch);
            for expected in experts_cuda::expected(number, dtype, &lowered) {
                let (case, functions) = (expected.case.clone(), expected.functions.clone());
                let share = move |found: &[Buffer]| expected.share(found);
                all.push(Checked { family, dtype, case, functions, share: Box::new(share) });
            }
        }
    }
    for number in 0..40 {
        let dtype = [DType::F32, DType::F64][number as usize % 2];
        for expected in experts_cuda::expected(number, dtype, &cuda::functions) {
            let (case, functions) = (expected.case.clone(), expected.functions.clone());
            let share = move |found: &[Buffer]| expected.share(found);
            let family = "experts on CUDA cores";
            all.push(Checked { family, dtype, case, functions, share: Box::new(share) });
        }
    }
    all
}

#[test]
fn longer_run_of_all_families() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    if !runs_all() {
        return;
    }
    let mut tallies = BTreeMap::new();
    for cases in [of_the_cpu(), products(), attention(), experts()] {
        let mut by_family: BTreeMap<&str, Vec<Checked>> = BTreeMap::new();
        for case in cases {
            by_family.entry(case.family).or_default().push(case);
        }
        for (family, cases) in by_family {
            println!("{family}: {} launches", cases.len());
            run_all(cases, &mut tallies);
        }
    }
    println!("| family | type | shapes | largest share of the bound |\n|---|---|--:|--:|");
    for ((family, dtype), Tally { cases, worst }) in &tallies {
        let worst = if *worst == 0.0 { "same bits".to_owned() } else { format!("{worst:.2}") };
        println!("| {family} | {dtype} | {cases} | {worst} |");
    }
    let few: Vec<_> = tallies.iter().filter(|(_, tally)| tally.cases < SHAPES).collect();
    println!("{} of {} have fewer than {SHAPES} shapes", few.len(), tallies.len());
}
