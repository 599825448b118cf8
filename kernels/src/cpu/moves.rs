//! Kernels that move data: look-ups, copies, constants, rotary embedding.

use ir::DType;

use super::Cpu;
use super::formats::{BF16, F8E4M3, F8E5M2, F16, Format, Narrow, Operand, Round, Widen};
use super::scratch::lines_of;
use super::vector::{Job, Scalar, Vector};
use super::view::{Shared, View, ViewMut};
use crate::kernel::{Copy, CopyLoop, Fill, Gather, Positions, Rope};

/// Elements that a task moves at least.
const TASK_ELEMENTS: usize = 16_384;

/// The piece `index` of `count` of `size` points.
pub(super) fn piece(size: usize, count: usize, index: usize) -> std::ops::Range<usize> {
    size * index / count..size * (index + 1) / count
}

pub(super) fn tasks(size: usize, elements: usize) -> usize {
    (elements / TASK_ELEMENTS).clamp(1, size.max(1)).min(256)
}

/// The local row that an id means, if it is of this shard.
fn local_row(g: &Gather, id: i32) -> Option<usize> {
    let row = usize::try_from(i64::from(id) - g.base.bound()).ok()?;
    (id >= 0 && row < g.rows).then_some(row)
}

/// Looks rows up: what their elements are does not matter, but how long they are.
pub(super) fn gather(cpu: &Cpu, g: &Gather, inputs: &[View], outputs: &[ViewMut]) {
    match g.dtype.size() {
        1 => gather_sized::<u8>(cpu, g, inputs, outputs),
        2 => gather_sized::<u16>(cpu, g, inputs, outputs),
        4 => gather_sized::<u32>(cpu, g, inputs, outputs),
        _ => gather_sized::<u64>(cpu, g, inputs, outputs),
    }
}

fn gather_sized<T: Default + std::marker::Copy>(
    cpu: &Cpu,
    g: &Gather,
    inputs: &[View],
    outputs: &[ViewMut],
) {
    let table = Shared::new(inputs[0].start::<T>().cast_mut());
    let ids = Shared::new(inputs[1].start::<i32>().cast_mut());
    let target = Shared::new(outputs[0].start::<T>());
    let rows = g.outer * g.count;
    let tasks = tasks(rows, rows * g.width);
    cpu.for_each(tasks, (rows * g.width) as u64, 0, |task, _| {
        for i in piece(rows, tasks, task) {
            // SAFETY: the arguments were checked to hold `count` ids and `outer` times as many
            // rows, and the tables; a task writes rows of its own.
            unsafe {
                let row = target.get().add(i * g.width);
                let first = i / g.count * g.rows;
                match local_row(g, *ids.get().add(i % g.count)) {
                    Some(found) => {
                        row.copy_from(table.get().add((first + found) * g.width), g.width);
                    }
                    None => std::slice::from_raw_parts_mut(row, g.width).fill(T::default()),
                }
            }
        }
    });
}

/// Adds rows of integers to a table, in the order of [`scatter_add`].
pub(super) fn scatter_add_whole(cpu: &Cpu, g: &Gather, inputs: &[View], outputs: &[ViewMut]) {
    match g.dtype.size() {
        // Sums without a sign have the same bits.
        4 => scatter_add_of::<u32>(cpu, g, inputs, outputs, u32::wrapping_add),
        _ => scatter_add_of::<u64>(cpu, g, inputs, outputs, u64::wrapping_add),
    }
}

fn scatter_add_of<T: Default + std::marker::Copy>(
    cpu: &Cpu,
    g: &Gather,
    inputs: &[View],
    outputs: &[ViewMut],
    add: impl Fn(T, T) -> T + Sync,
) {
    let ids = Shared::new(inputs[0].start::<i32>().cast_mut());
    let source = Shared::new(inputs[1].start::<T>().cast_mut());
    let table = Shared::new(outputs[0].start::<T>());
    for_each_row(cpu, g, |outer, own, hits| {
        // SAFETY: there are `count` ids, `outer` times as many rows, and a table of `rows` for
        // each; a task clears and writes its own rows of the table, which is no row that it reads.
        unsafe {
            let table = table.get().add(outer * g.rows * g.width);
            if !g.accumulate {
                let own = table.add(own.start * g.width)..table.add(own.end * g.width);
                let len = own.end.offset_from_unsigned(own.start);
                std::slice::from_raw_parts_mut(own.start, len).fill(T::default());
            }
            for i in 0..g.count {
                let Some(row) = hits(*ids.get().add(i)) else { continue };
                let target = std::slice::from_raw_parts_mut(table.add(row * g.width), g.width);
                let source = source.get().add((outer * g.count + i) * g.width);
                for (sum, x) in target.iter_mut().zip(std::slice::from_raw_parts(source, g.width)) {
                    *sum = add(*sum, *x);
                }
            }
        }
    });
}

/// Adds rows to a table. A task owns rows of the table and scans all ids in order, so that no
/// order of additions depends on the number of tasks.
pub(super) fn scatter_add<S: Scalar>(cpu: &Cpu, g: &Gather, inputs: &[View], outputs: &[ViewMut]) {
    let ids = Shared::new(inputs[0].start::<i32>().cast_mut());
    let source = Shared::new(inputs[1].start::<S>().cast_mut());
    let table = Shared::new(outputs[0].start::<S>());
    for_each_row(cpu, g, |outer, own, hits| {
        let first = outer * g.rows;
        if !g.accumulate {
            // SAFETY: the table holds `rows` rows, of which a task clears its own.
            unsafe {
                let start = table.get().add((first + own.start) * g.width);
                std::slice::from_raw_parts_mut(start, own.len() * g.width).fill(S::ZERO);
            }
        }
        for i in 0..g.count {
            // SAFETY: there are `count` ids and rows.
            let id = unsafe { *ids.get().add(i) };
            if let Some(row) = hits(id) {
                let target = table.get().wrapping_add((first + row) * g.width);
                let source = source.get().wrapping_add((outer * g.count + i) * g.width);
                cpu.isa.run(AddRow { target, source, len: g.width });
            }
        }
    });
}

/// Writes rows over those of a table, in the order of the ids, as [`scatter_add`] adds them.
pub(super) fn replace(cpu: &Cpu, g: &Gather, inputs: &[View], outputs: &[ViewMut]) {
    match g.dtype.size() {
        1 => replace_sized::<u8>(cpu, g, inputs, outputs),
        2 => replace_sized::<u16>(cpu, g, inputs, outputs),
        4 => replace_sized::<u32>(cpu, g, inputs, outputs),
        _ => replace_sized::<u64>(cpu, g, inputs, outputs),
    }
}

fn replace_sized<T: std::marker::Copy>(
    cpu: &Cpu,
    g: &Gather,
    inputs: &[View],
    outputs: &[ViewMut],
) {
    let ids = Shared::new(inputs[0].start::<i32>().cast_mut());
    let source = Shared::new(inputs[1].start::<T>().cast_mut());
    let table = Shared::new(outputs[0].start::<T>());
    for_each_row(cpu, g, |outer, _, hits| {
        for i in 0..g.count {
            // SAFETY: there are `count` ids, `outer` times as many rows, and a table of `rows` for
            // each; a task writes its own rows of the table, which is no row that is written.
            unsafe {
                if let Some(row) = hits(*ids.get().add(i)) {
                    let target = table.get().add((outer * g.rows + row) * g.width);
                    target.copy_from(source.get().add((outer * g.count + i) * g.width), g.width);
                }
            }
        }
    });
}

/// Runs a task for each share of the rows of each table, which says whether an id is of its rows.
fn for_each_row(
    cpu: &Cpu,
    g: &Gather,
    run: impl Fn(usize, std::ops::Range<usize>, &dyn Fn(i32) -> Option<usize>) + Sync,
) {
    let tasks = cpu.threads().min(g.rows).max(1);
    let cycles = (g.outer * (g.count + g.rows) * g.width) as u64;
    cpu.for_each(tasks, cycles, 0, |task, _| {
        let own = piece(g.rows, tasks, task);
        let hits = |id: i32| local_row(g, id).filter(|row| own.contains(row));
        for outer in 0..g.outer {
            run(outer, own.clone(), &hits);
        }
    });
}

/// `target += source`.
struct AddRow<S> {
    target: *mut S,
    source: *const S,
    len: usize,
}

impl<S: Scalar> Job<S> for AddRow<S> {
    #[inline(always)]
    fn run<V: Vector<Scalar = S>>(self) {
        let whole = self.len - self.len % V::LANES;
        // SAFETY: both rows hold `len` numbers.
        unsafe {
            for i in (0..whole).step_by(V::LANES) {
                let target = self.target.add(i);
                V::load(target).add(V::load(self.source.add(i))).store(target);
            }
            for i in whole..self.len {
                *self.target.add(i) = *self.target.add(i) + *self.source.add(i);
            }
        }
    }
}

/// Bytes of scratch of a rotary embedding, per thread: sines and cosines of one position, and the
/// numbers of a head that is narrow.
pub(super) fn rope_scratch<S>(r: &Rope) -> usize {
    let head = if r.dtype.is_narrow() { r.dim } else { 0 };
    2 * lines_of::<S>(r.dim / 2) + lines_of::<S>(head)
}

/// Rotates pairs.
pub(super) fn rope<S: Scalar>(cpu: &Cpu, r: &Rope, inputs: &[View], outputs: &[ViewMut]) {
    let format = Format::of(r.dtype);
    let x = Shared::new(inputs[0].start::<u8>().cast_mut());
    let y = Shared::new(outputs[0].start::<u8>());
    let table = Shared::new(inputs.last().map_or(std::ptr::null(), View::start::<i32>).cast_mut());
    let half = r.dim / 2;
    let elements = r.batch * r.seq * r.heads * r.dim;
    let tasks = tasks(r.batch * r.seq, elements);
    cpu.for_each(tasks, elements as u64, rope_scratch::<S>(r), |task, scratch| {
        let (cos, sin) = (scratch.take::<S>(half), scratch.take::<S>(half));
        let head = scratch.take::<S>(if format == Format::Own { 0 } else { r.dim });
        for token in piece(r.batch * r.seq, tasks, task) {
            let (b, s) = (token / r.seq, token % r.seq);
            // SAFETY: the input of positions was checked to hold one, or one per sample or token.
            let position = unsafe {
                match r.positions {
                    Positions::From(offset) => (offset + s as u64) as f64,
                    Positions::FromInput(offset) => {
                        (offset + s as u64) as f64 + f64::from(*table.get())
                    }
                    Positions::FromInputs(offset) => {
                        (offset + s as u64) as f64 + f64::from(*table.get().add(b))
                    }
                    Positions::Table => f64::from(*table.get().add(token)),
                }
            };
            let sign = if r.inverse { -1.0 } else { 1.0 };
            for (i, frequency) in r.frequencies.iter().enumerate().take(half) {
                let (sine, cosine) = (sign * position * frequency).sin_cos();
                // SAFETY: the tables have room for half the dim.
                unsafe {
                    *cos.add(i) = S::from_f64(r.gain * cosine);
                    *sin.add(i) = S::from_f64(r.gain * sine);
                }
            }
            for h in 0..r.heads {
                let place = |of: [usize; 3]| b * of[0] + s * of[1] + h * of[2];
                let x = Operand::new(x.get(), format).moved::<S>(place(r.x));
                let y = Operand::new(y.get(), format).moved::<S>(place(r.y));
                if format == Format::Own {
                    let (x, y) = (x.start(), y.start::<S>().cast_mut());
                    cpu.isa.run(Rotate { x, y, cos, sin, half });
                } else {
                    cpu.isa.run(RotateNarrow { x, y, head, cos, sin, half });
                }
            }
        }
    });
}

/// As [`Rotate`], of narrow elements: in room for the numbers of a head.
struct RotateNarrow<S> {
    x: Operand,
    y: Operand,
    head: *mut S,
    cos: *const S,
    sin: *const S,
    half: usize,
}

impl<S: Scalar> Job<S> for RotateNarrow<S> {
    #[inline(always)]
    fn run<V: Vector<Scalar = S>>(self) {
        let RotateNarrow { x, y, head, cos, sin, half } = self;
        Widen { source: x, target: head, len: 2 * half }.run::<V>();
        Rotate { x: head, y: head, cos, sin, half }.run::<V>();
        Round { source: head, target: y, len: 2 * half }.run::<V>();
    }
}

/// Rotates the pairs of one head.
struct Rotate<S> {
    x: *const S,
    y: *mut S,
    cos: *const S,
    sin: *const S,
    half: usize,
}

impl<S: Scalar> Job<S> for Rotate<S> {
    #[inline(always)]
    fn run<V: Vector<Scalar = S>>(self) {
        let (half, whole) = (self.half, self.half - self.half % V::LANES);
        // SAFETY: the head holds `2 * half` numbers, the tables `half`. Both elements of a pair
        // are read before either is written, so that `y` may be `x`.
        unsafe {
            for i in (0..whole).step_by(V::LANES) {
                let (a, b) = (V::load(self.x.add(i)), V::load(self.x.add(half + i)));
                let (cos, sin) = (V::load(self.cos.add(i)), V::load(self.sin.add(i)));
                a.mul(cos).sub(b.mul(sin)).store(self.y.add(i));
                b.mul(cos).add(a.mul(sin)).store(self.y.add(half + i));
            }
            for i in whole..half {
                let (a, b) = (*self.x.add(i), *self.x.add(half + i));
                let (cos, sin) = (*self.cos.add(i), *self.sin.add(i));
                *self.y.add(i) = a * cos - b * sin;
                *self.y.add(half + i) = b * cos + a * sin;
            }
        }
    }
}

/// Copies with strides.
pub(super) fn copy(cpu: &Cpu, c: &Copy, inputs: &[View], outputs: &[ViewMut]) {
    match c.dtype.size() {
        1 => copy_sized::<u8>(cpu, c, inputs, outputs),
        2 => copy_sized::<u16>(cpu, c, inputs, outputs),
        4 => copy_sized::<u32>(cpu, c, inputs, outputs),
        _ => copy_sized::<u64>(cpu, c, inputs, outputs),
    }
}

/// Side of the squares in which a transposition is done.
const SQUARE: usize = 16;

fn copy_sized<T: Default + std::marker::Copy>(
    cpu: &Cpu,
    c: &Copy,
    inputs: &[View],
    outputs: &[ViewMut],
) {
    let source = inputs[0].start::<T>().wrapping_add(c.source_offset.bound() as usize);
    let target = outputs[0].start::<T>();
    // SAFETY: the target was checked to hold what is zeroed.
    unsafe { std::slice::from_raw_parts_mut(target, c.zero_first) }.fill(T::default());
    let loops = merge(&c.loops);
    if loops.iter().any(|l| l.size == 0) {
        return;
    }
    let inner_count = loops.len().min(2);
    let (outer, inner) = loops.split_at(loops.len() - inner_count);
    // The two innermost loops, of which missing ones have one point.
    let one = CopyLoop { size: 1, source: 0, target: 0 };
    let (a, b) = match inner {
        [a, b] => (*a, *b),
        [b] => (one, *b),
        _ => (one, one),
    };
    let (source, target) =
        (Shared::new(source.cast_mut()), Shared::new(target.wrapping_add(c.target_offset)));
    let planes: usize = outer.iter().map(|l| l.size).product();
    let elements = planes * a.size * b.size;
    let cut_rows = planes < 8;
    let row_tasks = if cut_rows { tasks(a.size.div_ceil(SQUARE), elements) } else { 1 };
    let plane_tasks = if cut_rows { planes } else { tasks(planes, elements) };
    cpu.for_each(plane_tasks * row_tasks, elements as u64, 0, |task, _| {
        let rows = piece(a.size.div_ceil(SQUARE), row_tasks, task % row_tasks);
        let rows = rows.start * SQUARE..(rows.end * SQUARE).min(a.size);
        for plane in piece(planes, plane_tasks, task / row_tasks) {
            let (mut rest, mut from, mut to) = (plane, 0, 0);
            for l in outer.iter().rev() {
                from += rest % l.size * l.source;
                to += rest % l.size * l.target;
                rest /= l.size;
            }
            let (from, to) = (source.get().wrapping_add(from), target.get().wrapping_add(to));
            // SAFETY: the arguments were checked to hold all points of the loops; tasks write
            // different ones.
            unsafe { copy_plane(from, to, rows.clone(), a, b) };
        }
    });
}

/// Joins neighbours that are one loop and drops loops of one point.
fn merge(loops: &[CopyLoop]) -> Vec<CopyLoop> {
    let mut merged: Vec<CopyLoop> = Vec::new();
    for inner in loops.iter().filter(|l| l.size != 1) {
        match merged.last_mut() {
            Some(outer)
                if outer.source == inner.source * inner.size
                    && outer.target == inner.target * inner.size =>
            {
                *outer = CopyLoop { size: outer.size * inner.size, ..*inner };
            }
            _ => merged.push(*inner),
        }
    }
    merged
}

/// # Safety
///
/// All points of the two loops are readable from `from` and writable from `to` on.
unsafe fn copy_plane<T: std::marker::Copy>(
    from: *const T,
    to: *mut T,
    rows: std::ops::Range<usize>,
    a: CopyLoop,
    b: CopyLoop,
) {
    // SAFETY: by the contract of the function.
    unsafe {
        if b.source == 1 && b.target == 1 {
            for i in rows {
                to.add(i * a.target).copy_from(from.add(i * a.source), b.size);
            }
            return;
        }
        for i in rows.clone().step_by(SQUARE) {
            for j in (0..b.size).step_by(SQUARE) {
                for i in i..(i + SQUARE).min(rows.end) {
                    for j in j..(j + SQUARE).min(b.size) {
                        let x = *from.add(i * a.source + j * b.source);
                        *to.add(i * a.target + j * b.target) = x;
                    }
                }
            }
        }
    }
}

/// Fills a buffer.
pub(super) fn fill(f: &Fill, outputs: &[ViewMut]) {
    /// # Safety
    ///
    /// The view holds `len` elements of `T`.
    unsafe fn fill_with<T: std::marker::Copy>(view: &ViewMut, len: usize, x: T) {
        // SAFETY: by the contract of the function.
        unsafe { std::slice::from_raw_parts_mut(view.start::<T>(), len) }.fill(x);
    }
    let view = &outputs[0];
    // SAFETY: the argument was checked to hold `len` elements of the type.
    unsafe {
        match f.dtype {
            DType::F32 => fill_with(view, f.len, f.value as f32),
            DType::F64 => fill_with(view, f.len, f.value),
            DType::I32 => fill_with(view, f.len, f.value as i32),
            DType::U32 => fill_with(view, f.len, f.value as u32),
            DType::I64 => fill_with(view, f.len, f.value as i64),
            DType::Bool => fill_with(view, f.len, u8::from(f.value != 0.0)),
            DType::BF16 => fill_with(view, f.len, BF16::nearest(f.value.sticky())),
            DType::F16 => fill_with(view, f.len, F16::nearest(f.value.sticky())),
            DType::F8E4M3 => fill_with(view, f.len, F8E4M3::nearest(f.value.sticky())),
            DType::F8E5M2 => fill_with(view, f.len, F8E5M2::nearest(f.value.sticky())),
            DType::I8 => unreachable!("fills are not of {}", f.dtype),
        }
    }
}
