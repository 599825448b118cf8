//! Measuring kernels on this machine. Communicators are measured by the caller, who knows them.
//!
//! All cores work at once, each thread on buffers of its own, as ranks do: rates are those of one
//! rank among others. Each point takes the median thread's fastest half of its launches.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use ir::DType;
use kernels::cpu::{Cpu, View, ViewMut};
use kernels::rows::{Access, BinaryOp, Instr, Output, RowInput, Rows, UnaryOp};
use kernels::{Attention, Copy, CopyLoop, Kernel, Product, price};

use crate::calibration::{Calibration, Curve};
use crate::link::Link;
use crate::machine::Machine;

/// Sides of the square products. Chosen: from one tile to what no cache holds.
const SIDES: [usize; 6] = [32, 64, 128, 256, 512, 1024];
/// Elements of the elementwise kernels and copies. Chosen: from the first cache to the memory.
const ELEMENTS: [usize; 6] = [1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 21, 1 << 23];
/// Lengths of the sequences of attention. Chosen: those of small models to those of long texts.
const LENGTHS: [usize; 4] = [64, 256, 1024, 2048];
/// Heads of attention, and the dims of one. Chosen: a small model's.
const HEADS: [usize; 2] = [2, 64];
/// Launches of one point at least.
const LAUNCHES_MIN: usize = 3;
/// Columns of the elementwise kernels.
const COLUMNS: usize = 1024;

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
/// **Cost**: half a second at least; the largest points may take a little longer than their share.
pub fn calibrate(machine: &Machine, links: Links, budget: Duration) -> Calibration {
    let cores = machine.cores;
    let points = 2 * SIDES.len() + 2 * ELEMENTS.len() + 2 * LENGTHS.len() + 2;
    let share = budget / points as u32;
    let launch_s = rounded(seconds(&elementwise(1, 1), cores, share));
    let rate = |kernel: &Kernel, amount: f64| {
        let seconds = seconds(kernel, cores, share);
        // Launching is charged apart.
        rounded(amount / (seconds - launch_s).max(seconds / 10.0))
    };
    let mut calibration = Calibration {
        machine: format!("{} cores, {}", cores, machine.instruction_set),
        threads: 1,
        launch_s: Some(launch_s),
        collective: links.collective,
        send: links.send,
        ..Calibration::default()
    };
    for dtype in [DType::F32, DType::F64] {
        let mut curve = Curve::default();
        for side in SIDES {
            let kernel = Kernel::Product(Product::matrix(side, side, side, dtype));
            let flops = price::flops(&kernel).0 as f64;
            curve.0.push([flops, rate(&kernel, flops)]);
        }
        calibration.product.insert(dtype, curve);
    }
    for length in LENGTHS {
        let kernels =
            [Kernel::Attention(attention(length)), Kernel::AttentionBwd(attention(length))];
        let curves = [&mut calibration.attention, &mut calibration.attention_bwd];
        for (kernel, curve) in kernels.into_iter().zip(curves) {
            let flops = price::flops(&kernel).0 as f64;
            curve.0.push([flops / HEADS[0] as f64, rate(&kernel, flops)]);
        }
    }
    let kernel = computing(64, COLUMNS);
    calibration.elementwise_flops_per_s = Some(rate(&kernel, price::flops(&kernel).0 as f64));
    for elements in ELEMENTS {
        let kernel = elementwise(elements / COLUMNS.min(elements), COLUMNS.min(elements));
        let bytes = price::bytes(&kernel).0 as f64;
        calibration.rows.0.push([bytes, rate(&kernel, bytes)]);
        let kernel = copy(elements);
        let bytes = price::bytes(&kernel).0 as f64;
        calibration.copy.0.push([bytes, rate(&kernel, bytes)]);
    }
    calibration
}

/// Four digits: more is noise.
fn rounded(number: f64) -> f64 {
    format!("{number:.3e}").parse().unwrap_or(number)
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
        query_offset: 0,
        position: false,
        head_offset: 0,
        kv_offset: 0,
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
        source_offset: 0,
        target_offset: 0,
        zero_first: 0,
        dtype: DType::F32,
    })
}

/// The seconds of one launch while all cores run the same.
fn seconds(kernel: &Kernel, cores: usize, share: Duration) -> f64 {
    let start = Barrier::new(cores);
    let mut medians: Vec<f64> = thread::scope(|scope| {
        let threads: Vec<_> =
            (0..cores).map(|_| scope.spawn(|| thread_seconds(kernel, &start, share))).collect();
        let join =
            |t: thread::ScopedJoinHandle<'_, f64>| t.join().expect("a kernel does not panic");
        threads.into_iter().map(join).collect()
    });
    medians.sort_by(f64::total_cmp);
    medians[medians.len() / 2]
}

fn thread_seconds(kernel: &Kernel, start: &Barrier, share: Duration) -> f64 {
    let cpu = Cpu::new(1);
    let buffer =
        |argument: &kernels::arguments::Argument| vec![0.5f64; argument.bytes().div_ceil(8)];
    let inputs: Vec<Vec<f64>> = kernel.inputs().iter().map(buffer).collect();
    let mut outputs: Vec<Vec<f64>> = kernel.outputs().iter().map(buffer).collect();
    let inputs: Vec<View<'_>> = inputs.iter().map(|b| View::of(b)).collect();
    let outputs: Vec<ViewMut<'_>> = outputs.iter_mut().map(|b| ViewMut::of(b)).collect();
    cpu.execute(kernel, &inputs, &outputs);
    start.wait();
    let begin = Instant::now();
    let mut times = Vec::new();
    // Short launches are timed in groups, so that reading the clock does not count.
    let mut group = 1;
    while times.len() < LAUNCHES_MIN || begin.elapsed() < share {
        let before = Instant::now();
        for _ in 0..group {
            cpu.execute(kernel, &inputs, &outputs);
        }
        let took = before.elapsed().as_secs_f64();
        times.push(took / group as f64);
        if took < 50e-6 {
            group *= 2;
            times.clear();
        }
    }
    times.sort_by(f64::total_cmp);
    times[times.len() / 4].max(1e-9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_calibration_reads_back() {
        let machine = Machine { cores: 1, memory_bytes: 1 << 30, instruction_set: "any".into() };
        let measured = calibrate(&machine, Links::default(), Duration::from_millis(50));
        let text = measured.to_string();
        let read = Calibration::parse("measured", &text);
        assert_eq!(read.as_ref(), Ok(&measured), "{text}");
        assert_eq!(measured.hash(), read.unwrap().hash());
        assert!(measured.rows.0.iter().all(|[_, rate]| *rate > 1e6), "{text}");
    }
}
