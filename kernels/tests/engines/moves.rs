//! Look-ups, copies, constants and rotary embedding.

use std::slice;

use gantline_kernels::{Copy, CopyLoop, Fill, Gather, Kernel, Offset, Positions, Rope, Window};
use ir::DType;

use crate::{Buffer, Random, assert_close, run_on_threads, sets};

#[test]
fn a_gather_masks_ids_of_other_shards_and_scatter_undoes_it() {
    for case in 0..20 {
        let mut random = Random::new(case);
        let dtype = random.pick(&[DType::F32, DType::F64]);
        let (rows, width, count) = (1 + random.below(20), 1 + random.below(50), random.below(900));
        let base = random.below(10) as i64;
        let accumulate = random.below(2) == 0;
        let outer = 1 + random.below(3);
        let g = Gather { outer, rows, base: Offset::Fixed(base), width, count, accumulate, dtype };
        let ids: Vec<i32> = (0..count).map(|_| random.below(rows + 20) as i32 - 2).collect();
        let local = |id: i32| {
            let row = i64::from(id) - base;
            (0..rows as i64).contains(&row).then_some(row as usize)
        };
        let table = Buffer::new(dtype, &random.numbers(outer * rows * width));
        let source = Buffer::new(dtype, &random.numbers(outer * count * width));
        let (t, s) = (table.numbers(), source.numbers());
        let place = |i: usize| {
            let row = local(ids[i / width % count])?;
            Some((i / width / count * rows + row) * width + i % width)
        };
        let element = |i: usize| place(i).map_or(0.0, |at| t[at]);
        let want: Vec<f64> = (0..outer * count * width).map(element).collect();
        let mut want_table = if accumulate { t.clone() } else { vec![0.0; t.len()] };
        let mut want_replaced = t.clone();
        for i in 0..outer * count * width {
            if let Some(at) = place(i) {
                want_table[at] += s[i];
                want_replaced[at] = s[i];
            }
        }
        for isa in sets() {
            let inputs = [table.clone(), Buffer::I32(ids.clone())];
            let kernel = Kernel::Gather(g.clone());
            let got = run_on_threads(isa, &kernel, &inputs, std::slice::from_ref(&source));
            assert_close(&got[0].numbers(), &want, 0.0, "gather");
            let inputs = [Buffer::I32(ids.clone()), source.clone()];
            let kernel = Kernel::ScatterAdd(g.clone());
            let got = run_on_threads(isa, &kernel, &inputs, std::slice::from_ref(&table));
            let tolerance = if dtype == DType::F32 { 1e-4 } else { 1e-13 };
            assert_close(&got[0].numbers(), &want_table, tolerance, "scatter");
            let kernel = Kernel::Replace(g.clone());
            let got = run_on_threads(isa, &kernel, &inputs, std::slice::from_ref(&table));
            assert_close(&got[0].numbers(), &want_replaced, 0.0, "replace");
        }
    }
}

#[test]
pub(crate) fn copies_follow_their_strides() {
    for case in 0..60 {
        let mut random = Random::new(case);
        let dtype = random.pick(&[DType::F32, DType::F64, DType::I32, DType::Bool]);
        let mut loops = Vec::new();
        let mut targets: Vec<usize> = (0..1 + random.below(4)).collect();
        let count = targets.len();
        let (mut source, mut target) = (1, 1);
        let sizes: Vec<usize> = (0..count).map(|_| 1 + random.below(9)).collect();
        for i in (1..count).rev() {
            targets.swap(i, random.below(i + 1));
        }
        let mut target_strides = vec![0; count];
        for &t in &targets {
            target_strides[t] = target;
            target *= sizes[t] + random.below(2);
        }
        for i in (0..count).rev() {
            let repeat = random.below(5) == 0;
            let stride = if repeat { 0 } else { source };
            loops.insert(0, CopyLoop { size: sizes[i], source: stride, target: target_strides[i] });
            source *= if repeat { 1 } else { sizes[i] + random.below(2) };
        }
        let mut c = Copy {
            loops,
            source_offset: Offset::Fixed(random.below(5) as i64),
            target_offset: random.below(5),
            zero_first: 0,
            dtype,
        };
        c.zero_first = random.below(2) * (c.target_offset + target);
        let kernel = Kernel::Copy(c.clone());
        let from = Buffer::new(dtype, &random.numbers(kernel.inputs()[0].len));
        let old = Buffer::new(dtype, &random.numbers(kernel.outputs()[0].len + 3));
        let mut want = old.numbers();
        want[..c.zero_first].fill(0.0);
        let numbers = from.numbers();
        for point in 0..sizes.iter().product() {
            let (mut rest, mut from, mut to) =
                (point, c.source_offset.bound() as usize, c.target_offset);
            for l in c.loops.iter().rev() {
                from += rest % l.size * l.source;
                to += rest % l.size * l.target;
                rest /= l.size;
            }
            want[to] = numbers[from];
        }
        let isa = gantline_kernels::cpu::Isa::detect();
        let got = run_on_threads(isa, &kernel, &[from], &[old]);
        assert_close(&got[0].numbers(), &want, 0.0, &format!("{c:?}"));
    }
}

#[test]
fn fills_convert_their_value() {
    for (dtype, want) in [(DType::F32, -2.5), (DType::F64, -2.5), (DType::I32, -2.0)] {
        let kernel = Kernel::Fill(Fill { len: 5, value: -2.5, dtype });
        let isa = gantline_kernels::cpu::Isa::detect();
        let got = run_on_threads(isa, &kernel, &[], &[Buffer::new(dtype, &[0.0; 6])]);
        assert_eq!(got[0].numbers(), [want, want, want, want, want, 0.0]);
    }
}

#[test]
pub(crate) fn rotary_embedding_rotates_and_its_inverse_undoes_it() {
    for case in 0..16 {
        let mut random = Random::new(case);
        let (batch, seq, heads) = (1 + random.below(2), 1 + random.below(9), 1 + random.below(3));
        let dim = 2 * (1 + random.below(40));
        let frequency = |i: usize| 10_000_f64.powf(-2.0 * i as f64 / dim as f64);
        let layout = [seq * (heads + 1) * dim, (heads + 1) * dim, dim];
        let positions = random.pick(&[
            Positions::From(3),
            Positions::FromInput(2),
            Positions::FromInputs(2),
            Positions::Table,
        ]);
        let mut rope = Rope {
            batch,
            seq,
            heads,
            dim,
            frequencies: (0..dim / 2).map(frequency).collect(),
            positions,
            inverse: false,
            gain: 1.0,
            dtype: DType::F64,
            x: layout,
            y: layout,
        };
        let table: Vec<i32> = (0..batch * seq).map(|_| random.below(50) as i32).collect();
        let position = |b: usize, s: usize| match positions {
            Positions::From(offset) => offset as f64 + s as f64,
            Positions::FromInput(offset) => offset as f64 + s as f64 + f64::from(table[0]),
            Positions::FromInputs(offset) => offset as f64 + s as f64 + f64::from(table[b]),
            Positions::Table => f64::from(table[b * seq + s]),
        };
        let x = random.numbers(batch * layout[0]);
        let gain = 1.25;
        let mut want = x.clone();
        for point in 0..batch * seq * heads {
            let (b, s, h) = (point / heads / seq, point / heads % seq, point % heads);
            let first = b * layout[0] + s * layout[1] + h * layout[2];
            for i in 0..dim / 2 {
                let (sin, cos) = (position(b, s) * frequency(i)).sin_cos();
                let (u, v) = (x[first + i], x[first + dim / 2 + i]);
                want[first + i] = gain * (u * cos - v * sin);
                want[first + dim / 2 + i] = gain * (v * cos + u * sin);
            }
        }
        let inputs = |x: Vec<f64>| match positions {
            Positions::From(_) => vec![Buffer::F64(x)],
            _ => vec![Buffer::F64(x), Buffer::I32(table.clone())],
        };
        for isa in sets() {
            (rope.inverse, rope.gain) = (false, gain);
            let old = [Buffer::F64(x.clone())];
            let got = run_on_threads(isa, &Kernel::Rope(rope.clone()), &inputs(x.clone()), &old);
            assert_close(&got[0].numbers(), &want, 1e-14, "rotated");
            (rope.inverse, rope.gain) = (true, 1.0 / gain);
            let rotated = inputs(got[0].numbers());
            let back = run_on_threads(isa, &Kernel::Rope(rope.clone()), &rotated, &got);
            assert_close(&back[0].numbers(), &x, 1e-14, "rotated back");
        }
    }
}

#[test]
pub(crate) fn a_window_is_placed_and_taken_where_it_fits() {
    for case in 0..40 {
        let mut random = Random::new(case);
        let dtype = random.pick(&[DType::F32, DType::F64, DType::I32, DType::Bool]);
        let (positions, each, inner) =
            (1 + random.below(3), 1 + random.below(2), 1 + random.below(9));
        let outer = positions * each;
        let len = 1 + random.below(5);
        let capacity = len + random.below(6);
        let w = Window { outer, positions, len, capacity, inner, dtype };
        let at: Vec<i32> = (0..positions).map(|_| random.below(capacity + 4) as i32 - 2).collect();
        let first = |o: usize| at[o / each].clamp(0, (capacity - len) as i32) as usize;
        let small = Buffer::new(dtype, &random.numbers(outer * len * inner));
        let large = Buffer::new(dtype, &random.numbers(outer * capacity * inner));
        let (x, mut y) = (small.numbers(), large.numbers());
        let mut window = vec![0.0; x.len()];
        for i in 0..x.len() {
            let (o, rest) = (i / (len * inner), i % (len * inner));
            let at = o * capacity * inner + first(o) * inner + rest;
            window[i] = y[at];
            y[at] = x[i];
        }
        let at = Buffer::I32(at);
        for isa in sets() {
            let take = Kernel::Take(w.clone());
            let got =
                run_on_threads(isa, &take, &[large.clone(), at.clone()], slice::from_ref(&small));
            assert_eq!(got[0].numbers(), window);
            let place = Kernel::Place(w.clone());
            let got =
                run_on_threads(isa, &place, &[small.clone(), at.clone()], slice::from_ref(&large));
            assert_eq!(got[0].numbers(), y);
        }
    }
}
