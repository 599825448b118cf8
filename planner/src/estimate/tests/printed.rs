//! What runs print of their memory: what an allocator holds, of use or not.

use ir::random::mix;

use super::*;

/// A model of the Ultra-Scale Playbook: 1.34 billion parameters.
fn llama_1b() -> Workload {
    let shape = Shape {
        name: "1b".into(),
        layers: 16,
        hidden: 2048,
        heads: 32,
        kv_heads: 32,
        head_dim: 64,
        ffn: 8192,
        gated: true,
        vocab: 131_072,
        seq: 4096,
        positions: 0,
        causal: true,
        biases: false,
        tied: true,
        routed: None,
        head_norm: 0,
        low_rank: None,
    };
    shape.workload().unwrap()
}

fn estimate_with(profile: profile::Profile, text: &str) -> Estimate {
    let cluster = Cluster::load_on("h100", &machine()).unwrap();
    let work = llama_1b();
    let job = Job { global_batch: 256, arithmetic: Arithmetic::Half };
    let estimator = Estimator::new(&work, &cluster, profile, job).unwrap();
    estimator.estimate(&text.parse().unwrap()).unwrap()
}

/// While a host runs ahead, the two results of each layer that ranks sum up cannot be used again:
/// two bytes for each token and column. What fits does not depend on it.
#[test]
fn what_collectives_read_is_held() {
    let late = profile::of_framework("nanotron").unwrap();
    let prompt = profile::Profile { frees_late: false, ..late };
    let result = 4096.0 * 2048.0 * 2.0;
    for (text, results) in [
        ("tp=1 mbs=1", 0.0),
        ("tp=2 mbs=1", 32.0),
        ("tp=2 mbs=1 sp", 32.0),
        ("tp=2 mbs=4 sp", 128.0),
        // Eight layers of a stage, of two micro-batches: the device is slower than its host.
        ("tp=2 pp=2 mbs=8 sp", 8.0 * 2.0 * 8.0 * 2.0),
        // The host is late, and nothing of two micro-batches is held.
        ("tp=8 pp=2 mbs=1 sp", 0.0),
        // Four layers of a stage, of all but two micro-batches.
        ("tp=8 pp=4 mbs=1 sp", 2.0 * 4.0 * 2.0),
    ] {
        let [late, prompt] = [late, prompt].map(|profile| estimate_with(profile, text));
        let held = late.printed_memory.total_bytes() - prompt.printed_memory.total_bytes();
        let results = if text.contains("sp") { results } else { 0.0 };
        assert!((held / result - results).abs() < 1e-6, "{text}: {} results", held / result);
        assert_eq!(late.memory, prompt_of(&late, &prompt));
    }
}

/// The memory of one estimate with what was freed of another: all else is equal.
fn prompt_of(late: &Estimate, prompt: &Estimate) -> memory::Memory {
    memory::Memory { freed_bytes: late.memory.freed_bytes, ..prompt.memory }
}

/// What is printed is what tensors hold and at most what a device has, where these fit.
#[test]
fn printed_memory_is_that_of_a_device() {
    let nanotron = profile::of_framework("nanotron").unwrap();
    let titan = profile::of_framework("torchtitan 2025").unwrap();
    let device = h100_bytes();
    for seed in 0..200u64 {
        let draw = |salt: u64, count: u64| mix(seed * 8 + salt) % count;
        let [tp, pp, dp, mbs] =
            [1 << draw(0, 6), 1 << draw(1, 4), 1 << draw(2, 3), 1 << draw(3, 5)];
        let cut = if tp > 1 { "sp" } else { "" };
        let zero = if dp > 1 { draw(4, 2) } else { 0 };
        let text = format!("tp={tp} pp={pp} dp={dp} mbs={mbs} {cut} zero={zero} recompute=none");
        let profile = if draw(5, 2) == 0 { nanotron } else { titan };
        let found = estimate_with(profile, &text);
        let held = found.memory.total_bytes();
        let printed = found.printed_memory.total_bytes();
        let about = format!("seed {seed}: {text}: {printed} printed, {held} held");
        assert!(printed <= device.max(held) * (1.0 + 1e-9), "{about}");
        if pp == 1 {
            // One stage is the first and the fullest.
            assert!(printed >= held - found.memory.reserve_bytes, "{about}");
        }
    }
}

/// An allocator gives back what is of no use before a run fails: it holds a whole device, where
/// that and more was freed late.
#[test]
fn full_devices_are_printed_as_full() {
    let nanotron = profile::of_framework("nanotron").unwrap();
    let found = estimate_with(nanotron, "tp=8 pp=4 mbs=64 sp");
    let device = h100_bytes();
    let [held, printed] =
        [found.memory, found.printed_memory].map(|memory| memory.total_bytes() / device);
    assert!((0.5..0.9).contains(&held), "{held} of a device");
    assert!((printed - 1.0).abs() < 1e-9, "{printed} of a device");
}

/// A row may say which peak it states: what tensors hold is the least, what a driver sees the most.
#[test]
fn rows_say_what_their_peak_counts() {
    let run = read_runs(include_str!("../../../tests/unseen_runs.csv"));
    let run = run.into_iter().find(|run| !run.text("mem_kind").is_empty()).unwrap();
    let question = |kind: &str| {
        let mut run = run.clone();
        unseen::set(&mut run, "mem_kind", kind);
        row::read(&run)
    };
    let bytes = |kind: &str| question(kind).unwrap().answer().unwrap().printed_memory.total_bytes();
    let [allocated, reserved, device] = ["allocated", "reserved", "device"].map(bytes);
    assert!(allocated <= reserved && reserved < device, "{allocated} {reserved} {device}");
    assert_eq!(bytes(""), device);
    assert!(question("nvidia-smi").unwrap_err().contains("`mem_kind` is `nvidia-smi`"));
}

/// Bytes of a device for a job.
fn h100_bytes() -> f64 {
    let cluster = Cluster::load_on("h100", &machine()).unwrap();
    cluster.device.memory_bytes.value - cluster.device.reserved_bytes.value
}
