//! Whether a kernel can be executed: what its types cannot say.
//!
//! A kernel that this accepts uses no byte beyond what [`Kernel::inputs`] and [`Kernel::outputs`]
//! say, computes those without overflow, and never writes one element from two threads. It is what
//! stands between a file and the unsafe code of [`crate::cpu`].

use ir::DType;
use ir::op::Operands;

use crate::arguments::{Argument, part_inputs, products_inputs};
use crate::border::Border;
use crate::kernel::{
    Attention, Copy, Dropout, Experts, Fill, Gather, Kernel, Line, Lines, Pointwise, Positions,
    Product, Products, Rope, Scales, Source, StoredTypes, Window,
};
use crate::offset::Offset;
use crate::rows::{Access, Digit, Draw, Instr, Output, RowInput, Rows};

/// No size, stride, offset, extent or number of points is larger: a tebi of elements. Chosen: far
/// beyond a device's memory, and products of two of them fit 128 bits.
pub const LIMIT: usize = 1 << 40;
/// The most loops, digits, inputs or outputs of a kernel. Chosen: tensors have a few dims.
const LOOPS_MAX: usize = 64;
/// The most instructions of a block program. Chosen: fusion stops at tens.
const INSTRS_MAX: usize = 4096;

type Verdict = Result<(), String>;

/// Checks a kernel.
///
/// # Errors
/// A sentence that says which part of the kernel is impossible.
pub fn verify(kernel: &Kernel) -> Verdict {
    kernel.scalars()?;
    match kernel {
        Kernel::Product(p) => product(p),
        Kernel::Rows(r) => rows(r),
        Kernel::Attention(a) => attention(a, false),
        Kernel::AttentionBwd(a) => attention(a, true),
        Kernel::Experts(e) => experts(e, false),
        Kernel::ExpertsBwd(e) => experts(e, true),
        Kernel::ScatterAdd(g) => counts(g.dtype).and_then(|()| look_up(g)),
        Kernel::Gather(g) | Kernel::Replace(g) => look_up(g),
        Kernel::Lines(l) => lines(l),
        Kernel::Rope(r) => rope(r),
        Kernel::Copy(c) => copy(c),
        Kernel::Place(w) | Kernel::Take(w) => window(w),
        Kernel::Fill(f) => fill(f),
        Kernel::Products(p) => products(p),
    }
}

fn require(holds: bool, otherwise: &str) -> Verdict {
    if holds { Ok(()) } else { Err(otherwise.to_owned()) }
}

fn computes(dtype: DType) -> Verdict {
    require(matches!(dtype, DType::F32 | DType::F64), "it computes in neither f32 nor f64")
}

/// A type of numbers that a kernel reads, computes with and writes, in F32 where it is narrow.
fn rounds(dtype: DType) -> Verdict {
    if matches!(dtype, DType::BF16 | DType::F16) { Ok(()) } else { computes(dtype) }
}

/// A type of numbers that kernels add.
fn counts(dtype: DType) -> Verdict {
    let known = matches!(dtype, DType::F32 | DType::F64 | DType::I32 | DType::U32 | DType::I64);
    require(known, "its elements are no numbers that are added")
}

fn converts(dtype: DType) -> Verdict {
    let known = matches!(dtype, DType::F32 | DType::F64 | DType::I32 | DType::U32 | DType::Bool);
    let known = known || dtype.is_narrow();
    require(known, "an argument is of a type that is not converted")
}

/// A type that lines and fills are of.
fn holds(dtype: DType) -> Verdict {
    if dtype == DType::I64 { Ok(()) } else { converts(dtype) }
}

fn small(numbers: impl IntoIterator<Item = usize>) -> Verdict {
    require(numbers.into_iter().all(|n| n <= LIMIT), "a size or an offset is too large")
}

/// The points and the reach of a nest of (size, stride) loops stay within the limit.
fn nest(loops: &[(usize, usize)], offset: usize) -> Verdict {
    require(loops.len() <= LOOPS_MAX, "it has too many loops")?;
    small(loops.iter().flat_map(|(size, stride)| [*size, *stride]).chain([offset]))?;
    let points = loops.iter().try_fold(1_usize, |n, (size, _)| n.checked_mul(*size));
    let reach =
        |(size, stride): &(usize, usize)| (*size as u128).saturating_sub(1) * *stride as u128;
    let extent = offset as u128 + loops.iter().map(reach).sum::<u128>();
    let fits = points.is_some_and(|n| n <= LIMIT) && extent <= LIMIT as u128;
    require(fits, "it uses more elements than there can be")
}

/// A nest whose points are all different elements: the stride of a loop exceeds the reach of the
/// loops inside of it. Sufficient, not necessary; layouts of tensors and their slices have it.
fn injective(loops: &[(usize, usize)], offset: usize) -> Verdict {
    nest(loops, offset)?;
    let mut moving: Vec<(usize, usize)> =
        loops.iter().filter(|(size, _)| *size > 1).map(|(size, stride)| (*stride, *size)).collect();
    moving.sort_unstable();
    let mut reach = 0;
    for (stride, size) in moving {
        require(stride > reach, "it writes one element twice")?;
        reach += (size - 1) * stride;
    }
    Ok(())
}

/// The types of a product in memory: that of its sums, or narrow ones where that is F32.
fn stored(p: &Product) -> Verdict {
    let StoredTypes { a, b, c } = p.stored;
    if p.dtype == DType::I32 {
        let read = |dtype: DType| matches!(dtype, DType::I8 | DType::I32);
        require(read(a) && read(b), "an operand is of a type that is not summed in i32")?;
        let is_plain = p.borders.is_empty() || b == DType::I32;
        require(is_plain, "columns with borders are of a type that is not moved")?;
        return require(c == DType::I32, "a result is of a type that its sums are not");
    }
    computes(p.dtype)?;
    let read = |dtype: DType| dtype == p.dtype || p.dtype == DType::F32 && dtype.is_narrow();
    require(read(a) && read(b), "an operand is of a type that its sums are not")?;
    let rounded = p.dtype == DType::F32 && matches!(c, DType::BF16 | DType::F16);
    require(c == p.dtype || rounded, "a result is of a type that its sums are not rounded to")?;
    require(c == p.dtype || !p.accumulate, "it adds to sums that were rounded")
}

fn product(p: &Product) -> Verdict {
    stored(p)?;
    let types = [p.dtype, p.stored.a, p.stored.b];
    let rounds = types == [DType::F32; 3] && p.borders.is_empty();
    require(p.operands == Operands::Exact || rounds, "it rounds operands that are not of f32")?;
    let lens = [p.batch.len(), p.m.len(), p.n.len(), p.k.len()];
    require(lens.into_iter().all(|n| n <= LOOPS_MAX), "it has too many loops")?;
    let batch = |stride: fn(&crate::LoopABC) -> usize| {
        p.batch.iter().map(move |l| (l.size, stride(l))).collect::<Vec<_>>()
    };
    let mut a = batch(|l| l.a);
    a.extend(p.m.iter().map(|l| (l.size, l.a)).chain(p.k.iter().map(|l| (l.size, l.a))));
    let mut b = batch(|l| l.b);
    b.extend(p.n.iter().map(|l| (l.size, l.b)).chain(p.k.iter().map(|l| (l.size, l.b))));
    let mut c = batch(|l| l.c);
    c.extend(p.m.iter().map(|l| (l.size, l.c)).chain(p.n.iter().map(|l| (l.size, l.c))));
    p.borders.iter().try_for_each(|at| border(p, at))?;
    scales(p)?;
    let k = p.k.iter().try_fold(1_usize, |n, l| n.checked_mul(l.size)).filter(|k| *k <= LIMIT);
    let is_split = |k| p.tiling.split > 0 && p.tiling.without_empty(k) == p.tiling;
    require(k.is_some_and(is_split), "a slice of its sums is empty")?;
    // Loops of borders have no elements of their own: what is read is counted by the borders.
    let held = b.iter().copied().filter(|(_, stride)| *stride > 0);
    let held = held.chain(p.borders.iter().map(|border| (border.size, border.step)));
    nest(&held.collect::<Vec<_>>(), 0)?;
    nest(&a, 0)?;
    nest(&b, 0)?;
    injective(&c, 0)
}

/// Scales of codes, of a product of two matrices in whole runs.
fn scales(p: &Product) -> Verdict {
    let Some(scales) = p.scales else { return Ok(()) };
    let StoredTypes { a, b, .. } = p.stored;
    let are_codes = [a, b].iter().all(|of| matches!(of, DType::F8E4M3 | DType::F8E5M2));
    require(are_codes, "it has scales of what are no codes")?;
    require(p.batch.is_empty() && p.borders.is_empty(), "scales are of what is no matrix")?;
    let [_, m, n, k] = p.sizes();
    require(k.is_multiple_of(Scales::RUN), "a run of sums is not whole")?;
    for (Scales { block, of_block, of_run }, side) in scales.into_iter().zip([m, n]) {
        require(block > 0, "a block of scales is empty")?;
        nest(&[(side.div_ceil(block), of_block), (k / Scales::RUN, of_run)], 0)?;
    }
    Ok(())
}

/// A border of loops that are there and read nothing else.
fn border(p: &Product, border: &Border) -> Verdict {
    let (n, k) = (p.n.get(border.n), p.k.get(border.k));
    let (Some(n), Some(k)) = (n, k) else { return Err("a border is of no loop".into()) };
    require(n.b == 0 && k.b == 0, "a loop of a border reads by itself")?;
    let same = p.borders.iter().filter(|other| other.n == border.n || other.k == border.k);
    require(same.count() == 1, "a loop has two borders")?;
    require(border.stride > 0 && border.spread > 0, "a border has no step")?;
    let before = usize::try_from(border.before.unsigned_abs()).unwrap_or(usize::MAX);
    small([border.stride, border.dilation, border.spread, border.size, border.step, before])?;
    nest(&[(n.size, border.stride), (k.size, border.dilation)], before)?;
    nest(&[(border.size, border.spread)], before)
}

fn products(p: &Products) -> Verdict {
    require((1..=LOOPS_MAX).contains(&p.parts.len()), "it has no products, or too many")?;
    let operands = p.operand_count();
    for part in &p.parts {
        require(
            part.operands().all(|at| at < operands),
            "it reads an operand that it does not have",
        )?;
        require(part.product.dtype == p.dtype(), "its products are of several types")?;
        let is_scaled = part.scales.is_some() == part.product.scales.is_some();
        require(is_scaled, "it has scales that its product does not read, or lacks some")?;
        computes(p.dtype())?;
        product(&part.product)?;
    }
    for (at, part) in p.parts.iter().enumerate() {
        part.then.as_ref().map_or(Ok(()), |then| pointwise(p, at, then))?;
        require(!part.in_place || can_be_in_place(p, at), "a result is lost before it is read")?;
    }
    let inputs = products_inputs(p);
    let typed = |(at, wanted): (usize, Argument)| inputs[at].dtype == wanted.dtype;
    let mut read = p.parts.iter().flat_map(part_inputs);
    require(read.all(typed), "its products read an operand as several types")?;
    for team in p.teams().into_iter().filter(|team| team.len() > 1) {
        let last = &p.parts[team.end - 1].product;
        let alike = p.parts[team].iter().all(|part| is_matrix(&part.product, last.sizes()));
        require(alike, "products of other sizes are computed by the same tasks")?;
    }
    let is_read = |at: usize| p.parts.iter().any(|part| part.operands().any(|o| o == at));
    require((0..operands).all(is_read), "no product reads an operand")
}

/// Whether a product yields a row-major matrix as large as one of such sizes.
fn is_matrix(p: &Product, [_, m, n, _]: [usize; 4]) -> bool {
    let mut step = 1;
    let loops = p.m.iter().map(|l| (l.size, l.c)).chain(p.n.iter().map(|l| (l.size, l.c)));
    let loops: Vec<(usize, usize)> = loops.collect();
    let dense = loops.iter().rev().all(|(size, stride)| {
        let fits = *size == 1 || *stride == step;
        step = step.saturating_mul(*size);
        fits
    });
    dense && p.batch.is_empty() && p.sizes()[1..3] == [m, n]
}

/// Whether the first output of a program can take the place of the result: it is as large, and
/// nothing but the program reads the result.
fn can_be_in_place(p: &Products, at: usize) -> bool {
    let part = &p.parts[at];
    let Some(then) = &part.then else { return false };
    let whole = Access::full(then.rows.rows, then.rows.cols);
    let is_whole = matches!(then.rows.outputs.first(),
        Some(Output::Store { access, dtype, accumulate: false, .. })
            if *access == whole && *dtype == part.product.stored.c);
    let others = p.parts.iter().enumerate().filter(|(other, _)| *other != at);
    let mut read = others.flat_map(|(_, other)| &other.then).flat_map(|then| &then.inputs);
    is_whole && !part.product.accumulate && read.all(|source| *source != Source::Result(at))
}

/// A program on the blocks of a product's result.
fn pointwise(p: &Products, at: usize, then: &Pointwise) -> Verdict {
    let (r, sizes) = (&then.rows, p.parts[at].product.sizes());
    rows(r)?;
    let fits = is_matrix(&p.parts[at].product, sizes) && [r.rows, r.cols] == sizes[1..3];
    require(fits, "a program has other points than the product before it")?;
    let stores = r.outputs.iter().all(|output| matches!(output, Output::Store { .. }));
    let moves = |instr: &Instr| matches!(instr, Instr::Reduce { .. } | Instr::Random(_));
    require(stores && !r.instrs.iter().any(moves), "a program after a product sums or draws")?;
    let read = |dtype: DType| dtype == r.dtype || dtype.is_narrow();
    let typed = r.dtype == p.dtype() && r.inputs.iter().all(|input| read(input.dtype));
    require(typed && r.inputs.len() == then.inputs.len(), "a program reads other types")?;
    let there = |(input, source): (&RowInput, &Source)| match source {
        Source::Operand(_) => true,
        Source::Result(result) => {
            let whole = input.access == Access::full(r.rows, r.cols);
            *result <= at && whole && input.dtype == p.parts[*result].product.stored.c
        }
    };
    require(
        r.inputs.iter().zip(&then.inputs).all(there),
        "a program reads results that are not there yet",
    )
}

fn digits(digits: &[Digit]) -> Verdict {
    require(digits.len() <= LOOPS_MAX, "it has too many digits")?;
    small(digits.iter().flat_map(|d| [d.div, d.modulus, d.stride]))?;
    require(digits.iter().all(|d| d.div > 0 && d.modulus > 0), "a digit has no values")?;
    let reach = |d: &Digit| (d.modulus as u128 - 1) * d.stride as u128;
    let reach: u128 = digits.iter().map(reach).sum();
    // A digit that repeats less than its modulus reaches less; such ones are sizes of a domain.
    require(reach <= 1 << 62, "digits reach too far")
}

/// The loops that an access makes over the rows of a domain.
fn row_loops(access: &Access, rows: usize) -> Vec<(usize, usize)> {
    let size = |d: &Digit| rows.div_ceil(d.div).min(d.modulus);
    access.row.iter().map(|d| (size(d), d.stride)).collect()
}

fn access(access: &Access, rows: usize, cols: usize) -> Verdict {
    digits(&access.row)?;
    let reaches = row_loops(access, rows).into_iter().chain([(cols, access.col_stride)]);
    // Each loop alone: digits may overlap, so that their product is no number of points.
    small([access.offset, access.col_stride])?;
    let reach = |(size, stride): (usize, usize)| size.saturating_sub(1) as u128 * stride as u128;
    let extent = access.offset as u128 + reaches.map(reach).sum::<u128>();
    require(extent <= LIMIT as u128, "it uses more elements than there can be")
}

/// A store writes every point (or row) to an element of its own: its digits are those of a mixed
/// radix that reaches all rows, and their strides nest.
fn store(to: &Access, rows: usize, cols: usize) -> Verdict {
    access(to, rows, cols)?;
    let mut radix: Vec<&Digit> = to.row.iter().filter(|d| d.modulus > 1).collect();
    radix.sort_by_key(|d| d.div);
    let mut covered = 1_usize;
    for digit in radix {
        require(digit.div == covered, "a store's digits are no digits of the row")?;
        covered = covered.saturating_mul(digit.modulus);
    }
    require(covered >= rows, "a store puts several rows into one")?;
    let mut loops = row_loops(to, rows);
    if to.col_stride != 0 {
        loops.push((cols, to.col_stride));
    }
    injective(&loops, to.offset)
}

fn rows(r: &Rows) -> Verdict {
    let is_whole = r.dtype == DType::I64;
    let converts = if is_whole { holds } else { converts };
    if !is_whole {
        computes(r.dtype)?;
    }
    nest(&[(r.rows, 0), (r.cols, 0)], 0)?;
    let short = r.instrs.len() <= INSTRS_MAX
        && r.inputs.len() <= LOOPS_MAX
        && (1..=LOOPS_MAX).contains(&r.outputs.len());
    require(short, "it has too many instructions, inputs or outputs, or no output")?;
    for input in &r.inputs {
        converts(input.dtype)?;
        access(&input.access, r.rows, r.cols)?;
    }
    for (value, instr) in r.instrs.iter().enumerate() {
        require(instr.operands().all(|o| o < value), "an instruction reads a later value")?;
        instruction(r, instr)?;
    }
    let values = r.instrs.len();
    require(r.outputs.iter().all(|o| o.value() < values), "an output has no value")?;
    let vectors = r.vectors();
    for output in &r.outputs {
        let is_vector = vectors[output.value()];
        match output {
            Output::Store { access, dtype, accumulate, .. } => {
                converts(*dtype)?;
                let adds = !is_whole && (*dtype == DType::F64 || is_added_in_f32(*dtype));
                require(adds || !accumulate, "it adds to integers")?;
                let lies = !is_vector || access.col_stride != 0 || r.cols <= 1;
                require(lies, "a vector is stored without columns")?;
                store(access, r.rows, r.cols)?;
            }
            Output::ColSum { .. } => require(is_vector, "a column sum is of no vector")?,
            Output::TotalSum { .. } => {}
        }
    }
    Ok(())
}

/// Whether numbers of a type are added to as those of f32, and rounded to it once.
fn is_added_in_f32(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::BF16 | DType::F16)
}

fn instruction(r: &Rows, instr: &Instr) -> Verdict {
    let is_whole = r.dtype == DType::I64;
    match instr {
        Instr::Load { input } => {
            let is_key = |i: &Instr| matches!(i, Instr::Random(draw) if draw.key == *input);
            let loads = *input < r.inputs.len() && !r.instrs.iter().any(is_key);
            require(loads, "it loads an input that it does not have, or the key")
        }
        Instr::Index { row, col_stride, base } => {
            digits(row)?;
            let near = [base.least(), base.most()].iter().all(|b| b.unsigned_abs() <= LIMIT as u64);
            require(near || is_whole, "an index starts too far from zero")?;
            nest(&[(r.cols, *col_stride)], 0)
        }
        Instr::Random(_) if is_whole => Err("integers are no draws".into()),
        Instr::Random(draw) => random(r, draw),
        Instr::Const { value } => {
            require(!is_whole || is_i64(*value), "a constant of a program of i64 is none")
        }
        Instr::Unary { op, .. } => {
            require(!is_whole || op.is_whole(), "a function of integers yields none")
        }
        Instr::Binary { op, .. } => {
            require(!is_whole || op.is_whole(), "a function of integers yields none")
        }
        Instr::Select { .. } | Instr::Reduce { .. } => Ok(()),
    }
}

/// Whether a number is an integer of 64 bits; `2^63`, to which the largest is rounded, is that.
fn is_i64(value: f64) -> bool {
    value.fract() == 0.0 && value.abs() <= 63.0_f64.exp2()
}

fn random(r: &Rows, draw: &Draw) -> Verdict {
    digits(&draw.row)?;
    digits(&draw.col)?;
    let is_key = r.inputs.get(draw.key).is_some_and(|i| i.dtype == DType::U32);
    require(is_key, "a draw has no key of u32")?;
    require(draw.unit > 0, "a draw counts in units of no point")?;
    begins(draw.offset, LIMIT / draw.unit as usize)?;
    // Sample numbers have 32 bits.
    let near = draw.sample_stride <= u64::from(u32::MAX) / 2;
    require(near, "a draw's positions are too large")
}

/// An offset, whatever a launch passes, is that of an element up to one.
fn begins(offset: Offset, last: usize) -> Verdict {
    let within = offset.least() >= 0 && offset.most().unsigned_abs() <= last as u64;
    require(within, "an offset is not within what it is of")
}

fn heads(dims: [usize; 4], strides: [usize; 3]) -> [(usize, usize); 4] {
    let [b, s, h] = strides;
    [(dims[0], b), (dims[1], s), (dims[2], h), (dims[3], 1)]
}

fn attention(a: &Attention, backward: bool) -> Verdict {
    rounds(a.dtype)?;
    small([a.batch, a.queries, a.keys, a.heads, a.kv_heads, a.dim])?;
    small([a.group])?;
    scores([a.batch, a.heads, a.queries, a.keys])?;
    require(a.query_offset.unsigned_abs() <= LIMIT as u64, "queries are too far from keys")?;
    require(a.group > 0, "no query heads share a key-value head")?;
    small([a.window])?;
    require(a.window == 0 || a.causal, "a window without an order of keys")?;
    require(a.softcap.is_finite() && a.softcap >= 0.0, "the bound of scores is no bound")?;
    if let Some([b, h, s]) = a.bias {
        let loops = [(a.batch, b), (a.heads, h), (a.queries, s), (a.keys, 1)];
        nest(&loops, 0)?;
        if a.bias_grad {
            let own = loops.into_iter().filter(|(_, stride)| *stride > 0);
            injective(&own.collect::<Vec<_>>(), 0)?;
        }
    }
    let is_numbered = |start: usize| start <= a.keys && a.queries <= a.keys - start;
    require(a.documents.is_none_or(is_numbered), "a query has no number of its document")?;
    require(a.documents.is_none() || !a.position, "documents at a run-time position")?;
    require(!a.bias_grad || (backward && a.bias.is_some()), "a gradient of no bias")?;
    begins(a.head_offset, LIMIT)?;
    let last = a.head_offset.most() as usize + a.heads.max(1) - 1;
    let served = last / a.group < a.kv_heads;
    require(served || a.heads == 0, "a query head has no key-value head")?;
    let of_queries = |strides| heads([a.batch, a.queries, a.heads, a.dim], strides);
    let of_keys = |strides| heads([a.batch, a.keys, a.kv_heads, a.dim], strides);
    let written = if backward { injective } else { nest };
    written(&of_queries(a.q), 0)?;
    written(&of_keys(a.k), 0)?;
    written(&of_keys(a.v), 0)?;
    injective(&of_queries(a.out), 0)?;
    let forward = !backward && a.dropout.is_none();
    require(!a.position || forward, "a gradient or a dropout at a run-time position")?;
    a.dropout.as_ref().map_or(Ok(()), dropout)
}

fn dropout(d: &Dropout) -> Verdict {
    require((0.0..1.0).contains(&d.p), "a probability is not in [0, 1)")?;
    begins(d.head_base, LIMIT)?;
    let bases = [d.sample_offset, d.query_base, d.key_base];
    require(bases.iter().all(|b| *b <= LIMIT as u64), "a position is too large")?;
    let totals = [d.heads_total, d.queries_total, d.keys_total];
    scores([1, totals[0] as usize, totals[1] as usize, totals[2] as usize])
}

/// Scores are counted, never stored.
fn scores(sizes: [usize; 4]) -> Verdict {
    let points = sizes.into_iter().try_fold(1_usize, |n, size| n.checked_mul(size));
    require(points.is_some_and(|n| n <= 1 << 56), "there are too many scores")
}

fn experts(e: &Experts, backward: bool) -> Verdict {
    rounds(e.dtype)?;
    let Experts { tokens, experts, model, inner, top_k, of, accumulate, .. } = *e;
    require(backward || accumulate == [false; 3], "it adds to gradients that it does not have")?;
    require(u32::try_from(tokens).is_ok(), "it has too many tokens")?;
    require(experts <= of.max(1), "it has more experts than all ranks")?;
    require((1..=of.max(1)).contains(&top_k), "a token passes more experts than there are")?;
    require(of <= 1 << 20, "it has too many experts")?;
    for sizes in [[tokens, experts, 1], [experts, inner, model]] {
        nest(&sizes.map(|size| (size, 0)), 0)?;
    }
    // GPUs number the rows of pairs, each expert's up to a whole tile.
    let pairs = tokens
        .checked_mul(top_k.min(experts))
        .and_then(|n| n.checked_add(experts.checked_mul(128)?));
    require(pairs.is_some_and(|n| u32::try_from(n).is_ok()), "it has too many pairs")?;
    // Of each pair there is a row of what is inside of its expert; operations are counted.
    nest(&[(tokens, 0), (experts, 0), (model.max(inner), 0)], 0)?;
    let points = [tokens, experts, model, inner].iter().try_fold(1_usize, |n, s| n.checked_mul(*s));
    require(points.is_some_and(|n| n <= 1 << 56), "its experts compute too much")
}

fn look_up(g: &Gather) -> Verdict {
    holds(g.dtype).map_err(|_| "rows are of a type that is not moved")?;
    nest(&[(g.outer, 0), (g.rows, 0), (g.width, 1)], 0)?;
    nest(&[(g.outer, 0), (g.count, 0), (g.width, 1)], 0)?;
    begins(g.base, LIMIT)
}

fn lines(l: &Lines) -> Verdict {
    holds(l.dtype)?;
    nest(&[(l.outer, 0), (l.extent, 0), (l.inner, 1)], 0)?;
    nest(&[(l.outer, 0), (l.result, 0), (l.inner, 1)], 0)?;
    let moves = matches!(l.how, Line::Reverse);
    require(moves || !l.dtype.is_narrow(), "lines of a narrow type are only moved")?;
    let counts = l.dtype != DType::Bool;
    let fits = match l.how {
        Line::Cumulative(_) => counts && l.result == l.extent,
        Line::Prod | Line::ArgMax => counts && l.result == 1,
        // Indices are of 31 bits.
        Line::Order { .. } => l.result <= l.extent && l.extent <= i32::MAX as usize,
        Line::Reverse => l.result == l.extent,
        Line::Fold { size, stride, dilation } => {
            self::counts(l.dtype)?;
            small([size, stride, dilation])?;
            let reach = |count: usize, step: usize| count.saturating_sub(1) as u128 * step as u128;
            let count = l.extent.checked_div(size).unwrap_or(0);
            let last = reach(count, stride) + reach(size, dilation);
            size > 0 && l.extent.is_multiple_of(size) && (count == 0 || last < l.result as u128)
        }
        Line::Pool { size, stride, dilation, .. } => {
            self::counts(l.dtype)?;
            small([size, stride, dilation])?;
            let reach = |count: usize, step: usize| count.saturating_sub(1) as u128 * step as u128;
            let last = reach(l.result, stride) + reach(size, dilation);
            size > 0 && (l.result == 0 || last < l.extent as u128)
        }
    };
    require(fits, "lines do not have the length that they yield")
}

fn rope(r: &Rope) -> Verdict {
    rounds(r.dtype)?;
    let pairs = r.dim.is_multiple_of(2) && r.frequencies.len() == r.dim / 2;
    require(pairs, "it has not one frequency for each pair")?;
    require(r.gain.is_finite(), "its gain is no number")?;
    let offset = match r.positions {
        Positions::From(offset) | Positions::FromInput(offset) | Positions::FromInputs(offset) => {
            offset
        }
        Positions::Table => 0,
    };
    require(offset <= LIMIT as u64, "a position is too large")?;
    let dims = [r.batch, r.seq, r.heads, r.dim];
    nest(&heads(dims, r.x), 0)?;
    injective(&heads(dims, r.y), 0)
}

fn copy(c: &Copy) -> Verdict {
    let strides = |of: fn(&crate::CopyLoop) -> usize| {
        c.loops.iter().map(|l| (l.size, of(l))).collect::<Vec<_>>()
    };
    small([c.zero_first])?;
    begins(c.source_offset, LIMIT)?;
    nest(&strides(|l| l.source), c.source_offset.most() as usize)?;
    injective(&strides(|l| l.target), c.target_offset)
}

fn window(w: &Window) -> Verdict {
    require(w.len <= w.capacity, "a window is longer than what it is of")?;
    let are_shared = w.positions > 0 && w.outer.is_multiple_of(w.positions);
    require(are_shared, "its positions do not divide its windows")?;
    nest(&[(w.outer, 0), (w.capacity, 0), (w.inner, 1)], 0)
}

fn fill(f: &Fill) -> Verdict {
    holds(f.dtype)?;
    small([f.len])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::{CopyLoop, ProductPart};

    fn store_of(access: Access) -> Kernel {
        Kernel::Rows(Rows {
            rows: 6,
            cols: 4,
            dtype: DType::F32,
            inputs: vec![RowInput { dtype: DType::F32, access: Access::full(6, 4) }],
            instrs: vec![Instr::Load { input: 0 }],
            outputs: vec![Output::Store { value: 0, access, dtype: DType::F32, accumulate: false }],
        })
    }

    #[test]
    fn usual_kernels_are_accepted() {
        let transposed = CopyLoop { size: 3, source: 5, target: 1 };
        let copy = Copy {
            loops: vec![CopyLoop { size: 5, source: 1, target: 3 }, transposed],
            source_offset: Offset::ZERO,
            target_offset: 7,
            zero_first: 0,
            dtype: DType::BF16,
        };
        let digit = |div, modulus, stride| Digit { div, modulus, stride };
        let permuted =
            Access { row: vec![digit(3, 2, 4), digit(1, 3, 8)], col_stride: 1, offset: 0 };
        for kernel in [
            Kernel::Copy(copy),
            Kernel::Product(Product::matrix(3, 4, 5, DType::F64)),
            store_of(Access::full(6, 4)),
            store_of(permuted),
        ] {
            assert_eq!(verify(&kernel), Ok(()), "{kernel}");
        }
    }

    #[test]
    fn impossible_kernels_are_refused() {
        let product = |change: &dyn Fn(&mut Product)| {
            let mut p = Product::matrix(3, 4, 5, DType::F32);
            change(&mut p);
            Kernel::Product(p)
        };
        let products = |parts: &[(usize, usize, DType)]| {
            let part = |(a, b, dtype): &(usize, usize, DType)| {
                ProductPart::of(*a, *b, Product::matrix(3, 4, 5, *dtype))
            };
            Kernel::Products(Products { parts: parts.iter().map(part).collect() })
        };
        assert_eq!(verify(&products(&[(0, 1, DType::F32), (0, 2, DType::F32)])), Ok(()));
        let looked_up = |slot, least, most| {
            let base = Offset::Scalar { slot, least, most };
            let (outer, rows, width, count) = (1, 9, 2, 3);
            let dtype = DType::F32;
            Kernel::Gather(Gather { outer, rows, base, width, count, accumulate: false, dtype })
        };
        assert_eq!(looked_up(0, 0, 9).scalars(), Ok(vec![0..=9]));
        assert_eq!(verify(&looked_up(0, 0, 9)), Ok(()));
        let copied = |most| {
            let loops = vec![CopyLoop { size: 5, source: 2, target: 1 }];
            let source_offset = Offset::Scalar { slot: 0, least: 0, most };
            let (target_offset, zero_first, dtype) = (0, 0, DType::F32);
            Kernel::Copy(Copy { loops, source_offset, target_offset, zero_first, dtype })
        };
        assert_eq!(copied(30).inputs()[0].len, 39);
        let digit = |div, modulus, stride| Digit { div, modulus, stride };
        let row = |row: Vec<Digit>, col_stride| store_of(Access { row, col_stride, offset: 0 });
        for kernel in [
            product(&|p| p.dtype = DType::I32),
            products(&[]),
            products(&[(0, 2, DType::F32)]),
            products(&[(0, usize::MAX, DType::F32)]),
            products(&[(0, 5, DType::F32)]),
            products(&[(0, 1, DType::F32), (0, 1, DType::F64)]),
            product(&|p| p.m[0].c = 3),
            product(&|p| p.m[0].c = 0),
            product(&|p| p.k[0].a = usize::MAX),
            product(&|p| p.k = vec![p.k[0]; 50]),
            product(&|p| p.tiling.split = 0),
            product(&|p| p.tiling.split = 2),
            product(&|p| p.tiling.split = usize::MAX),
            row(vec![digit(1, 6, 0)], 1),
            row(vec![digit(1, 5, 4)], 1),
            row(vec![digit(2, 6, 4)], 1),
            row(vec![digit(1, 6, 4)], 0),
            row(vec![digit(0, 6, 4)], 1),
            row(vec![digit(1, 0, 4)], 1),
            row(vec![digit(1, 6, 1 << 50)], 1),
            looked_up(0, -1, 9),
            looked_up(0, 0, i64::MAX),
            looked_up(0, 5, 4),
            looked_up(1, 0, 9),
            looked_up(usize::MAX, 0, 9),
            copied(LIMIT as i64),
            Kernel::Fill(Fill { len: usize::MAX, value: 0.0, dtype: DType::F32 }),
            Kernel::Fill(Fill { len: 1, value: 0.0, dtype: DType::I8 }),
        ] {
            assert!(verify(&kernel).is_err(), "{kernel:?}");
        }
    }

    #[test]
    fn impossible_experts_are_refused() {
        let experts = |change: fn(&mut Experts)| {
            let (tokens, experts, model, inner, top_k) = (6, 4, 5, 7, 2);
            let (accumulate, dtype) = ([false; 3], DType::F32);
            let of = experts;
            let mut e = Experts { tokens, experts, model, inner, top_k, of, accumulate, dtype };
            change(&mut e);
            [Kernel::Experts(e.clone()), Kernel::ExpertsBwd(e)]
                .map(|kernel| verify(&kernel).is_ok())
        };
        assert_eq!(experts(|_| {}), [true; 2]);
        assert_eq!(experts(|e| e.accumulate[1] = true), [false, true]);
        let impossible: [fn(&mut Experts); 9] = [
            |e| e.of = 3,
            |e| e.of = 1 << 21,
            |e| e.top_k = 0,
            |e| e.top_k = 5,
            |e| e.tokens = 1 << 33,
            |e| e.model = usize::MAX,
            |e| (e.model, e.inner) = (1 << 30, 1 << 30),
            |e| (e.tokens, e.model, e.inner) = (1 << 20, 1 << 18, 1 << 18),
            |e| e.dtype = DType::I32,
        ];
        for change in impossible {
            assert_eq!(experts(change), [false; 2]);
        }
    }
}
