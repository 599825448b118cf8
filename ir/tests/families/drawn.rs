// The cases of `tests/reference/families`: their names, which of them are refused so far, and
// their weights, which are drawn. `tests/reference/README.md` describes the files.

use std::path::PathBuf;

/// What is refused so far; a case that is not refused any more fails the tests. The name of a
/// family stands for all of its cases.
pub(crate) const UNSUPPORTED: &[&str] = &[];

/// Cases whose rotary frequencies change within the text: keys in a cache were rotated with others,
/// so that no text is generated.
pub(crate) const WITHOUT_TEXT: &[&str] = &["llama-longrope_long", "phi3-longrope_long"];

/// The names of all cases, in order.
pub(crate) fn names() -> Vec<String> {
    let entries = std::fs::read_dir(root()).expect("there are cases");
    let name = |entry: std::io::Result<std::fs::DirEntry>| {
        entry.expect("it reads").file_name().into_string().expect("it is text")
    };
    let mut names: Vec<String> = entries.map(name).collect();
    names.sort();
    names
}

/// Where the cases are.
pub(crate) fn root() -> PathBuf {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let below = here.join("tests/reference/families");
    if below.is_dir() { below } else { here.join("../tests/reference/families") }
}

/// The part of a case's name before the hyphen.
pub(crate) fn family(case: &str) -> &str {
    case.split('-').next().unwrap_or(case)
}

/// Whether the case is refused so far.
pub(crate) fn is_unsupported(case: &str) -> bool {
    UNSUPPORTED.contains(&case) || UNSUPPORTED.contains(&family(case))
}

/// Whether no text is generated.
pub(crate) fn writes_no_text(case: &str) -> bool {
    WITHOUT_TEXT.contains(&case)
}

/// The values of a weight of a case, as `families.py` draws them.
pub(crate) fn draw(case: &str, weight: &str, dims: &[usize]) -> Vec<f64> {
    let (middle, width) = if weight.ends_with("bias") {
        (0.0, 0.2)
    } else if dims.len() == 1 || weight.contains("norm") {
        (1.0, 0.2)
    } else {
        (0.0, 0.5)
    };
    let numbers = uniform(&format!("{case}:{weight}"), dims.iter().product());
    numbers.into_iter().map(|x| middle + width * x).collect()
}

/// Numbers -1 ≤ x < 1 of splitmix64 (Steele, Lea, Flood 2014), from the hash of a name on.
pub(crate) fn uniform(name: &str, count: usize) -> Vec<f64> {
    let mut state = name.bytes().fold(0xCBF2_9CE4_8422_2325_u64, |state, byte| {
        (state ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3)
    });
    let mut next = || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        2.0 * (((z ^ (z >> 31)) >> 11) as f64 * (-53_f64).exp2()) - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// Runs a check of each case on all threads of the machine.
///
/// # Panics
/// When one fails, with the names of all that do.
pub(crate) fn each_case(cases: &[String], check: impl Fn(&str) + Sync) {
    let next = std::sync::atomic::AtomicUsize::new(0);
    let failed = std::sync::Mutex::new(Vec::new());
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads.min(cases.len()) {
            scope.spawn(|| {
                let take = || cases.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed));
                while let Some(case) = take() {
                    let run = std::panic::AssertUnwindSafe(|| check(case));
                    if std::panic::catch_unwind(run).is_err() {
                        failed.lock().expect("no thread dies").push(case.clone());
                    }
                }
            });
        }
    });
    let mut failed = failed.into_inner().expect("no thread dies");
    failed.sort();
    assert!(failed.is_empty(), "{} of {} cases: {failed:?}", failed.len(), cases.len());
}
