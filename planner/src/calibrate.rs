//! Measuring kernels on this machine. Communicators are measured by the caller, who knows them.
//!
//! All cores work at once, each thread on buffers of its own, as ranks do: rates are those of one
//! rank among others. The kernels take turns in several rounds, so that a machine whose speed
//! varies is seen at all of its speeds by each of them, and a kernel's time is the median of the
//! rounds' medians, as steps are timed by their median too. Launches use buffers in turn that no
//! cache holds together.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use ir::DType;
use kernels::arguments::Argument;
use kernels::cpu::{Cpu, View, ViewMut};
use kernels::rows::{Access, BinaryOp, Instr, Output, RowInput, Rows, UnaryOp};
use kernels::{Attention, Copy, CopyLoop, Kernel, Offset, Product, price};

use crate::calibration::{Calibration, Curve};
use crate::link::Link;
use crate::machine::Machine;

/// Element types of the products.
const DTYPES: [DType; 3] = [DType::F32, DType::F64, DType::BF16];
/// Heads of attention, and the dims of one. Chosen: a small model's.
const HEADS: [usize; 2] = [2, 64];
/// Bytes that the launches of a kernel read and write before the first buffer is used again.
/// Chosen: more than caches hold, as a step comes back to its weights much later.
const COLD_BYTES: usize = 32 << 20;
/// Upper limit of launches of a kernel, each on its own buffers. Chosen: the smallest product needs
/// this many to fill [`COLD_BYTES`].
const LAUNCHES_MAX: usize = 4096;
/// Columns of the elementwise kernels.
const COLUMNS: usize = 1024;

/// What is measured, and how carefully.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Sides of the square products.
    sides: &'static [usize],
    /// Elements of the elementwise kernels and copies.
    elements: &'static [usize],
    /// Lengths of the sequences of attention.
    lengths: &'static [usize],
    /// Times that each kernel takes its turn.
    rounds: u32,
    /// Digits of a rate that are kept.
    digits: usize,
}

impl Sizes {
    /// For a file that is made once. Chosen: products from one tile to what no cache holds,
    /// elements from the first cache to the memory, the sequences of small models and of long
    /// texts; the median of five leaves out two bad seconds, and more than four digits are noise.
    pub const ALL: Sizes = Sizes {
        sides: &[32, 64, 128, 256, 512, 1024],
        elements: &[1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 21, 1 << 23],
        lengths: &[64, 256, 1024, 2048],
        rounds: 5,
        digits: 4,
    };
    /// For a first answer within a second or so. Chosen: what the others lie between, and two
    /// digits, so that noise seldom makes another plan.
    pub const FEW: Sizes = Sizes {
        sides: &[64, 256, 512],
        elements: &[1 << 13, 1 << 19, 1 << 22],
        lengths: &[256, 1024],
        rounds: 3,
        digits: 2,
    };

    /// The digits of a rate that matter.
    pub fn rounded(&self, number: f64) -> f64 {
        format!("{number:.0$e}", self.digits - 1).parse().unwrap_or(number)
    }
}

/// Links that the caller measured.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Links {
    /// Collectives of as many ranks as there are cores.
    pub collective: Option<Link>,
    /// Messages between two ranks.
    pub send: Option<Link>,
}

/// Measures the kernels of one-thread ranks on all cores of this machine, in about `budget`.
///
/// **Cost**: half a second at least; the largest kernels may take a little longer than their share.
pub fn calibrate(
    machine: &Machine,
    links: Links,
    (sizes, budget): (&Sizes, Duration),
) -> Calibration {
    let cores = machine.cores;
    let rounded = |number| sizes.rounded(number);
    let kernels = kernels(sizes);
    let mut measured = seconds(&kernels, cores, (sizes.rounds, budget)).into_iter().zip(&kernels);
    let launch_s = rounded(measured.next().expect("the launch is the first").0);
    let mut rate = |amount: fn(&Kernel) -> f64| {
        let (seconds, kernel) = measured.next().expect("a time for each kernel");
        // Launching is charged apart.
        let working = (seconds - launch_s).max(seconds / 10.0);
        (amount(kernel), rounded(amount(kernel) / working))
    };
    let flops = |kernel: &Kernel| price::flops(kernel).0 as f64;
    let bytes = |kernel: &Kernel| price::bytes(kernel).0 as f64;
    let mut calibration = Calibration {
        machine: format!("{} cores, {}", cores, machine.instruction_set),
        threads: 1,
        launch_s: Some(launch_s),
        collective: links.collective,
        send: links.send,
        ..Calibration::default()
    };
    for dtype in DTYPES {
        let curve = sizes.sides.iter().map(|_| rate(flops).into()).collect();
        calibration.product.insert(dtype, Curve(curve));
    }
    for _ in sizes.lengths {
        for curve in [&mut calibration.attention, &mut calibration.attention_bwd] {
            let (flops, rate) = rate(flops);
            curve.0.push([flops / HEADS[0] as f64, rate]);
        }
    }
    calibration.elementwise_flops_per_s = Some(rate(flops).1);
    for _ in sizes.elements {
        calibration.rows.0.push(rate(bytes).into());
        calibration.copy.0.push(rate(bytes).into());
    }
    calibration
}

/// What is measured, in the order in which [`calibrate`] reads it.
fn kernels(sizes: &Sizes) -> Vec<Kernel> {
    let mut kernels = vec![elementwise(1, 1)];
    for dtype in DTYPES {
        let square = |side: &usize| Kernel::Product(Product::matrix(*side, *side, *side, dtype));
        kernels.extend(sizes.sides.iter().map(square));
    }
    for &length in sizes.lengths {
        kernels.push(Kernel::Attention(attention(length)));
        kernels.push(Kernel::AttentionBwd(attention(length)));
    }
    kernels.push(computing(64, COLUMNS));
    for &elements in sizes.elements {
        kernels.push(elementwise(elements / COLUMNS.min(elements), COLUMNS.min(elements)));
        kernels.push(copy(elements));
    }
    kernels
}

/// `y = (x + w) * x`, the shape of most fused kernels.
fn elementwise(rows: usize, cols: usize) -> Kernel {
    let dtype = DType::F32;
    let input = || RowInput { dtype, access: Access::full(rows, cols) };
    Kernel::Rows(Rows {
        rows,
        cols,
        dtype,
        inputs: vec![input(), input()],
        instrs: vec![
            Instr::Load { input: 0 },
            Instr::Load { input: 1 },
            Instr::Binary { op: BinaryOp::Add, a: 0, b: 1 },
            Instr::Binary { op: BinaryOp::Mul, a: 2, b: 0 },
        ],
        outputs: vec![Output::Store {
            value: 3,
            access: Access::full(rows, cols),
            dtype,
            accumulate: false,
        }],
    })
}

/// `y = tanh(tanh(tanh(tanh(x))))`: more to compute than to move.
fn computing(rows: usize, cols: usize) -> Kernel {
    let dtype = DType::F32;
    let access = Access::full(rows, cols);
    let mut instrs = vec![Instr::Load { input: 0 }];
    instrs.extend((0..4).map(|x| Instr::Unary { op: UnaryOp::Tanh, x }));
    Kernel::Rows(Rows {
        rows,
        cols,
        dtype,
        inputs: vec![RowInput { dtype, access: access.clone() }],
        instrs,
        outputs: vec![Output::Store { value: 4, access, dtype, accumulate: false }],
    })
}

/// Causal attention of a sequence to itself.
fn attention(length: usize) -> Attention {
    let [heads, dim] = HEADS;
    let layout = Attention::contiguous(length, heads, dim);
    Attention {
        batch: 1,
        queries: length,
        keys: length,
        heads,
        kv_heads: heads,
        dim,
        scale: 0.125,
        causal: true,
        window: 0,
        softcap: 0.0,
        bias: None,
        bias_grad: false,
        documents: None,
        query_offset: 0,
        position: false,
        head_offset: Offset::ZERO,
        group: 1,
        dropout: None,
        dtype: DType::F32,
        q: layout,
        k: layout,
        v: layout,
        out: layout,
    }
}

fn copy(elements: usize) -> Kernel {
    Kernel::Copy(Copy {
        loops: vec![CopyLoop { size: elements, source: 1, target: 1 }],
        source_offset: Offset::ZERO,
        target_offset: 0,
        zero_first: 0,
        dtype: DType::F32,
    })
}

/// The seconds of one launch of each kernel while all cores run the same.
fn seconds(kernels: &[Kernel], cores: usize, (rounds, budget): (u32, Duration)) -> Vec<f64> {
    let start = Barrier::new(cores);
    let share = budget / (rounds * kernels.len() as u32);
    let of_threads: Vec<Vec<Vec<f64>>> = thread::scope(|scope| {
        let measure = || scope.spawn(|| thread_seconds(kernels, &start, (rounds, share)));
        let threads: Vec<_> = (0..cores).map(|_| measure()).collect();
        let join = |t: thread::ScopedJoinHandle<'_, _>| t.join().expect("a kernel does not panic");
        threads.into_iter().map(join).collect()
    });
    let of_kernel = |k: usize| median(of_threads.iter().map(|t| median(t[k].clone())).collect());
    (0..kernels.len()).map(of_kernel).collect()
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// One thread's seconds of each kernel in each round.
fn thread_seconds(
    kernels: &[Kernel],
    start: &Barrier,
    (rounds, share): (u32, Duration),
) -> Vec<Vec<f64>> {
    let cpu = Cpu::new(1);
    let most = |of: fn(&Kernel) -> Vec<Argument>| {
        let words = |kernel| of(kernel).iter().map(words).sum();
        kernels.iter().map(words).max().unwrap_or(0).max(COLD_BYTES / 8)
    };
    let read = vec![0.5f64; most(Kernel::inputs)];
    let mut written = vec![0.5f64; most(Kernel::outputs)];
    let mut times = vec![Vec::new(); kernels.len()];
    for _ in 0..rounds {
        for (kernel, times) in kernels.iter().zip(&mut times) {
            let launches = launches(kernel, &read, &mut written);
            start.wait();
            times.push(launch_seconds(&cpu, kernel, &launches, share));
        }
    }
    times
}

/// Words of a buffer, of whole cache lines.
fn words(argument: &Argument) -> usize {
    argument.bytes().div_ceil(64) * 8
}

/// A launch's inputs and outputs.
type Launch<'a> = (Vec<View<'a>>, Vec<ViewMut<'a>>);

/// Launches of a kernel, each on its own part of `read` and `written`, until one of these is full
/// or there are [`LAUNCHES_MAX`].
fn launches<'a>(kernel: &Kernel, read: &'a [f64], written: &'a mut [f64]) -> Vec<Launch<'a>> {
    let lengths =
        |arguments: Vec<Argument>| -> Vec<usize> { arguments.iter().map(words).collect() };
    let (inputs, outputs) = (lengths(kernel.inputs()), lengths(kernel.outputs()));
    let (mut reads, mut writes) = (read, written);
    let mut launches = Vec::new();
    let is_room = |reads: &[f64], writes: &[f64]| {
        inputs.iter().sum::<usize>() <= reads.len() && outputs.iter().sum::<usize>() <= writes.len()
    };
    while launches.len() < LAUNCHES_MAX && is_room(reads, writes) {
        let mut launch = Launch::default();
        for length in &inputs {
            let (buffer, rest) = reads.split_at(*length);
            reads = rest;
            launch.0.push(View::of(buffer));
        }
        for length in &outputs {
            let (buffer, rest) = writes.split_at_mut(*length);
            writes = rest;
            launch.1.push(ViewMut::of(buffer));
        }
        launches.push(launch);
    }
    launches
}

/// The median seconds of launches that go on for `share`.
fn launch_seconds(cpu: &Cpu, kernel: &Kernel, launches: &[Launch<'_>], share: Duration) -> f64 {
    let mut turns = launches.iter().cycle();
    let mut launch = |count: usize| {
        for (inputs, outputs) in turns.by_ref().take(count) {
            cpu.execute(kernel, inputs, outputs);
        }
    };
    launch(1);
    let begin = Instant::now();
    let mut times = Vec::new();
    // Short launches are timed in groups, so that reading the clock does not count.
    let mut group = 1;
    while times.is_empty() || begin.elapsed() < share {
        let before = Instant::now();
        launch(group);
        let took = before.elapsed().as_secs_f64();
        times.push(took / group as f64);
        if took < 50e-6 {
            group *= 2;
            times.clear();
        }
    }
    median(times).max(1e-9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_calibration_reads_back() {
        let machine = Machine { cores: 1, memory_bytes: 1 << 30, instruction_set: "any".into() };
        let sizes = Sizes::FEW;
        let measured = calibrate(&machine, Links::default(), (&sizes, Duration::from_millis(50)));
        let text = measured.to_string();
        let read = Calibration::parse("measured", &text);
        assert_eq!(read.as_ref(), Ok(&measured), "{text}");
        assert_eq!(measured.hash(), read.unwrap().hash());
        assert!(measured.rows.0.iter().all(|[_, rate]| *rate > 1e6), "{text}");
        // Each curve is that of its own kernels.
        let at = |curve: &Curve| curve.0.iter().map(|[at, _]| *at).collect::<Vec<f64>>();
        let of = |sizes: &[usize], each: fn(f64) -> f64| -> Vec<f64> {
            sizes.iter().map(|size| each(*size as f64)).collect()
        };
        let flops = of(sizes.sides, |side| 2.0 * side.powi(3));
        assert!(measured.product.values().all(|curve| at(curve) == flops), "{text}");
        assert_eq!(at(&measured.rows), of(sizes.elements, |elements| 12.0 * elements));
        assert_eq!(at(&measured.copy), of(sizes.elements, |elements| 8.0 * elements));
        let pairs = at(&measured.attention).into_iter().zip(at(&measured.attention_bwd));
        // Two products of queries and keys forward, five backward.
        assert!(pairs.into_iter().all(|(forward, backward)| backward == 2.5 * forward), "{text}");
    }
}
