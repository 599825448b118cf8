//! Operators that add up: products, convolutions, pools, reductions, normalisations.

use super::elementwise::divide;
use super::moving::padded;
use super::site::{ELEMENTS_MAX, Made, Site, Translated, dim_at, joint};
use super::unsigned::{is_u64, ordered, quotient};
use crate::DType;
use crate::module::ValueId;
use crate::op::{Binary, Combiner, Comparison, Convolution, Einsum, Op, Unary, Windows};

fn contract(s: &mut Site, einsum: Einsum, a: ValueId, b: ValueId) -> Made {
    s.push(Op::Contract(einsum), &[a, b])
}

fn letters(range: std::ops::Range<usize>) -> Vec<char> {
    range.map(|at| (b'a' + at as u8) as char).collect()
}

/// Products of the last two dims; the dims before them repeat. A matrix without such dims is not
/// repeated, so that it stays one product.
pub(super) fn matmul(s: &mut Site) -> Translated {
    let (mut a, mut b) = (s.operand(0)?, s.operand(1)?);
    let (vector_a, vector_b) = (s.ndim(a) == 1, s.ndim(b) == 1);
    if vector_a {
        a = s.reshape(a, &[1, s.dims(a)[0]])?;
    }
    if vector_b {
        b = s.reshape(b, &[s.dims(b)[0], 1])?;
    }
    let (of_a, of_b) = (s.dims(a), s.dims(b));
    if of_a.len() < 2 || of_b.len() < 2 || of_a.len().max(of_b.len()) > 20 {
        return Err(format!("dims {of_a:?} and {of_b:?}"));
    }
    let (lead_a, lead_b) = (&of_a[..of_a.len() - 2], &of_b[..of_b.len() - 2]);
    let lead = joint(lead_a, lead_b)?;
    let full = |lead: &[usize], of: &[usize]| [lead, &of[of.len() - 2..]].concat();
    if !lead_a.is_empty() {
        a = s.broadcast(a, &full(&lead, &of_a))?;
    }
    if !lead_b.is_empty() {
        b = s.broadcast(b, &full(&lead, &of_b))?;
    }
    let common = letters(0..lead.len());
    let of = |has: bool, last: [char; 2]| [if has { &common[..] } else { &[] }, &last].concat();
    let einsum = Einsum::new(
        of(!lead_a.is_empty(), ['x', 'y']),
        of(!lead_b.is_empty(), ['y', 'z']),
        of(true, ['x', 'z']),
    );
    let product = contract(s, einsum, a, b)?;
    let dims = s.dims(product);
    let keep =
        |at: &usize| !(vector_a && *at + 2 == dims.len() || vector_b && *at + 1 == dims.len());
    let kept: Vec<usize> = (0..dims.len()).filter(keep).map(|at| dims[at]).collect();
    Ok(vec![s.reshape(product, &kept)?])
}

/// `alpha a b + beta c`
pub(super) fn gemm(s: &mut Site) -> Translated {
    let (a, b) = (s.operand(0)?, s.operand(1)?);
    let order = |turned: i64, letters: [char; 2]| match turned {
        0 => letters.to_vec(),
        _ => vec![letters[1], letters[0]],
    };
    let einsum = Einsum::new(
        order(s.int("transA", 0), ['x', 'y']),
        order(s.int("transB", 0), ['y', 'z']),
        vec!['x', 'z'],
    );
    let mut y = contract(s, einsum, a, b)?;
    let (alpha, beta) = (s.float("alpha", 1.0), s.float("beta", 1.0));
    if alpha != 1.0 {
        y = s.with(Binary::Mul, y, alpha)?;
    }
    let Some(mut c) = s.optional(2) else { return Ok(vec![y]) };
    if beta != 1.0 {
        c = s.with(Binary::Mul, c, beta)?;
    }
    let c = s.broadcast(c, &s.dims(y))?;
    Ok(vec![s.binary(Binary::Add, y, c)?])
}

/// Strides, dilations, pads and sizes of kernels at most. Chosen: longer than any signal that a
/// window moves along, and so small that no product of two overflows.
const GEOMETRY_MAX: usize = 1 << 24;

/// The numbers of a convolution or pool, one for each spatial dim.
pub(super) struct Geometry {
    pub(super) kernel: Vec<usize>,
    pub(super) stride: Vec<usize>,
    pub(super) dilation: Vec<usize>,
    pub(super) before: Vec<i64>,
    pub(super) after: Vec<i64>,
}

pub(super) fn geometry(s: &Site, image: &[usize], kernel: Vec<usize>) -> Result<Geometry, String> {
    let spatial = image.len();
    let steps = |name: &str| -> Result<Vec<usize>, String> {
        let found = s.ints(name).unwrap_or_else(|| vec![1; spatial]);
        let steps: Option<Vec<usize>> =
            found.iter().map(|n| usize::try_from(*n).ok().filter(|n| *n > 0)).collect();
        steps.filter(|n| n.len() == spatial).ok_or_else(|| format!("{name} {found:?}"))
    };
    let (stride, dilation) = (steps("strides")?, steps("dilations")?);
    if kernel.len() != spatial || kernel.contains(&0) {
        return Err(format!("a kernel {kernel:?}"));
    }
    for (name, numbers) in [("strides", &stride), ("dilations", &dilation), ("a kernel", &kernel)] {
        if numbers.iter().any(|number| *number > GEOMETRY_MAX) {
            return Err(format!("{name} {numbers:?}, of more than 2^24"));
        }
    }
    let mut pads = s.ints("pads").unwrap_or_else(|| vec![0; 2 * spatial]);
    if pads.len() != 2 * spatial {
        return Err(format!("pads {pads:?}"));
    }
    let same = s.text("auto_pad", "NOTSET");
    if same == "VALID" {
        pads = vec![0; 2 * spatial];
    }
    if same.starts_with("SAME") {
        for at in 0..spatial {
            let span = (kernel[at] - 1) * dilation[at] + 1;
            let windows = image[at].div_ceil(stride[at]);
            let all = (windows.saturating_sub(1) * stride[at] + span).saturating_sub(image[at]);
            let less = (all / 2) as i64;
            let more = all as i64 - less;
            (pads[at], pads[at + spatial]) =
                if same == "SAME_UPPER" { (less, more) } else { (more, less) };
        }
    }
    if pads.iter().any(|pad| pad.unsigned_abs() > GEOMETRY_MAX as u64) {
        return Err(format!("pads {pads:?}, of more than 2^24"));
    }
    let after = pads.split_off(spatial);
    Ok(Geometry { kernel, stride, dilation, before: pads, after })
}

fn add_bias(s: &mut Site, y: ValueId, at: usize) -> Made {
    let Some(bias) = s.optional(at) else { return Ok(y) };
    let dims = s.ty(y).dims;
    let new = (0..dims.len()).filter(|dim| *dim != 1).collect();
    let bias = s.push(Op::Broadcast { new, dims }, &[bias])?;
    s.binary(Binary::Add, y, bias)
}

pub(super) fn conv(s: &mut Site) -> Translated {
    let (x, w) = (s.operand(0)?, s.operand(1)?);
    let (image, kernel) = (s.dims(x), s.dims(w));
    if image.len() < 3 || kernel.len() != image.len() {
        return Err(format!("dims {image:?} and {kernel:?}"));
    }
    let Geometry { stride, dilation, before, after, .. } =
        geometry(s, &image[2..], kernel[2..].to_vec())?;
    let groups = s.count("group", 1)?;
    if kernel[1].checked_mul(groups) != Some(image[1]) {
        return Err(format!("{groups} groups of dims {image:?} and {kernel:?}"));
    }
    let spread = vec![1; stride.len()];
    let op = Op::Conv(Convolution {
        stride,
        before,
        after,
        dilation,
        spread,
        orders: Default::default(),
    });
    let y = s.push(op, &[x, w])?;
    Ok(vec![add_bias(s, y, 2)?])
}

/// The transpose of a convolution: strides lie between the elements, kernels are turned.
pub(super) fn conv_transpose(s: &mut Site) -> Translated {
    let (x, w) = (s.operand(0)?, s.operand(1)?);
    let (image, kernel) = (s.dims(x), s.dims(w));
    if image.len() < 3 || kernel.len() != image.len() {
        return Err(format!("dims {image:?} and {kernel:?}"));
    }
    let mut g = geometry(s, &image[2..], kernel[2..].to_vec())?;
    let spatial = g.kernel.len();
    pads_of_output(s, &image[2..], &mut g)?;
    let groups = usize::try_from(s.int("group", 1)).unwrap_or(0);
    let inner = kernel[0].checked_div(groups).ok_or("no groups")?;
    let more = s.ints("output_padding").unwrap_or_else(|| vec![0; spatial]);
    let is_pad = |more: &i64| (0..=GEOMETRY_MAX as i64).contains(more);
    if more.len() != spatial || !more.iter().all(is_pad) {
        return Err(format!("output_padding {more:?} of {spatial} dims"));
    }
    let span = |at: usize| ((g.kernel[at] - 1) * g.dilation[at]) as i64;
    // [gC, O, K] -> [gO, C, K], backwards.
    let apart = s.reshape(w, &[&[groups, inner], &kernel[1..]].concat())?;
    let mut perm: Vec<usize> = (0..spatial + 3).collect();
    perm.swap(1, 2);
    let turned = s.transpose(apart, &perm)?;
    let w = s.reshape(turned, &[&[groups * kernel[1], inner], &kernel[2..]].concat())?;
    let w = s.push(Op::Reverse { dims: (2..spatial + 2).collect() }, &[w])?;
    let op = Op::Conv(Convolution {
        stride: vec![1; spatial],
        before: (0..spatial).map(|at| span(at) - g.before[at]).collect(),
        after: (0..spatial).map(|at| span(at) - g.after[at] + more[at]).collect(),
        dilation: g.dilation.clone(),
        spread: g.stride.clone(),
        orders: Default::default(),
    });
    let y = s.push(op, &[x, w])?;
    Ok(vec![add_bias(s, y, 2)?])
}

/// Pads of a transposed convolution whose output shape is given, or as many times the image as the
/// stride.
fn pads_of_output(s: &Site, image: &[usize], g: &mut Geometry) -> Result<(), String> {
    let auto_pad = s.text("auto_pad", "NOTSET");
    let stated = s.ints("output_shape");
    let is_same = auto_pad.starts_with("SAME");
    if stated.is_none() && !is_same {
        return Ok(());
    }
    let more = s.ints("output_padding").unwrap_or_else(|| vec![0; image.len()]);
    for (at, size) in image.iter().enumerate() {
        let (stride, size) = (g.stride[at] as i64, *size as i64);
        let wanted = match &stated {
            // Some exporters write batch and channels too.
            Some(stated) => stated.len().checked_sub(image.len()).map(|lead| stated[lead + at]),
            None => stride.checked_mul(size),
        };
        let wanted = wanted.filter(|size| (0..=ELEMENTS_MAX as i64).contains(size));
        let wanted = wanted.ok_or_else(|| format!("an output shape {stated:?}"))?;
        let span = (g.kernel[at] - 1) as i64 * g.dilation[at] as i64 + 1;
        let more = more.get(at).copied().unwrap_or(0);
        let all = stride * (size - 1) + more + span - wanted;
        let half = all.div_euclid(2);
        (g.before[at], g.after[at]) =
            if auto_pad == "SAME_UPPER" { (half, all - half) } else { (all - half, half) };
    }
    Ok(())
}

/// Windows of all spatial dims, padded with a value: `[N, C, count, size, count, size, …]`.
pub(super) fn windows(s: &mut Site, x: ValueId, g: &Geometry, outside: f64) -> Made {
    let mut x = x;
    for at in (0..g.kernel.len()).rev() {
        x = windows_along(s, x, g, at, outside)?;
    }
    Ok(x)
}

/// Windows of one spatial dim, padded with a value: `[…, count, size, …]`.
fn windows_along(s: &mut Site, x: ValueId, g: &Geometry, at: usize, outside: f64) -> Made {
    let dim = 2 + at;
    let x = padded(s, x, dim, [g.before[at], g.after[at]], outside)?;
    let of = Windows { dim, size: g.kernel[at], stride: g.stride[at], dilation: g.dilation[at] };
    s.push(Op::Window(of), &[x])
}

/// With `ceil_mode`, a last window that begins inside counts; more zeros after make it whole.
pub(super) fn round_up(s: &Site, g: &mut Geometry, image: &[usize]) {
    if s.int("ceil_mode", 0) == 0 {
        return;
    }
    for (at, size) in image.iter().enumerate() {
        let span = ((g.kernel[at] - 1) * g.dilation[at] + 1) as i64;
        let (size, stride) = (*size as i64 + g.before[at], g.stride[at] as i64);
        let left = (size + g.after[at] - span).max(0);
        let mut count = (left + stride - 1) / stride;
        if count * stride >= size {
            count -= 1;
        }
        g.after[at] = (count * stride + span - size).max(g.after[at]);
    }
}

pub(super) fn pool(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    let dims = s.dims(x);
    let kernel = s.ints("kernel_shape").ok_or("no kernel shape")?;
    let kernel: Option<Vec<usize>> = kernel.iter().map(|n| usize::try_from(*n).ok()).collect();
    if dims.len() < 3 {
        return Err(format!("an operand of dims {dims:?}"));
    }
    let mut g = geometry(s, &dims[2..], kernel.ok_or("a negative kernel")?)?;
    let given = g.after.clone();
    round_up(s, &mut g, &dims[2..]);
    let over: Vec<usize> = (0..g.kernel.len()).map(|at| 3 + 2 * at).collect();
    if s.node.op_type == "MaxPool" {
        return Ok(vec![pooled(s, x, &g, Combiner::Max, f64::NEG_INFINITY)?]);
    }
    let sum = pooled(s, x, &g, Combiner::Sum, 0.0)?;
    // Elements outside do not count, unless padding is asked to.
    let mut ones = s.number(1.0, x)?;
    let mut rest = Geometry { before: g.before.clone(), after: g.after.clone(), ..g };
    if s.int("count_include_pad", 0) != 0 {
        for (at, after) in given.iter().enumerate() {
            ones = padded(s, ones, 2 + at, [rest.before[at], *after], 1.0)?;
            rest.before[at] = 0;
            rest.after[at] -= after;
        }
    }
    let ones = windows(s, ones, &rest, 0.0)?;
    let count = s.reduce(Combiner::Sum, over, ones)?;
    Ok(vec![s.binary(Binary::Div, sum, count)?])
}

/// One number for each window of all spatial dims: of floats one dim after the other, so that each
/// is one launch, and no windows are stored.
fn pooled(s: &mut Site, x: ValueId, g: &Geometry, combiner: Combiner, outside: f64) -> Made {
    if !s.dtype(x).is_float() {
        let of = windows(s, x, g, outside)?;
        return s.reduce(combiner, (0..g.kernel.len()).map(|at| 3 + 2 * at).collect(), of);
    }
    let mut x = x;
    for at in (0..g.kernel.len()).rev() {
        let of = windows_along(s, x, g, at, outside)?;
        x = s.reduce(combiner, vec![3 + at], of)?;
    }
    Ok(x)
}

pub(super) fn global_pool(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    let mut dims = s.dims(x);
    let over: Vec<usize> = (2..dims.len()).collect();
    let y = match s.node.op_type.as_str() {
        "GlobalMaxPool" => s.reduce(Combiner::Max, over, x)?,
        _ => average(s, x, &over)?,
    };
    dims.iter_mut().skip(2).for_each(|dim| *dim = 1);
    Ok(vec![s.reshape(y, &dims)?])
}

/// The mean along dims, which vanish.
pub(super) fn average(s: &mut Site, x: ValueId, over: &[usize]) -> Made {
    let dims = s.dims(x);
    let count: usize = over.iter().map(|at| dims[*at]).product();
    let sum = s.reduce(Combiner::Sum, over.to_vec(), x)?;
    let count = s.number(count as f64, sum)?;
    if is_u64(s, 0) { quotient(s, sum, count) } else { divide(s, sum, count) }
}

/// The reductions `Reduce…`.
pub(super) fn reduction(s: &mut Site) -> Translated {
    let mut x = s.operand(0)?;
    let dims = s.dims(x);
    let axes = s.list("axes", 1)?.unwrap_or_default();
    if axes.is_empty() && s.int("noop_with_empty_axes", 0) != 0 {
        return Ok(vec![x]);
    }
    let mut over = axes.iter().map(|a| dim_at(*a, dims.len())).collect::<Result<Vec<_>, _>>()?;
    if over.is_empty() {
        over = (0..dims.len()).collect();
    }
    over.sort_unstable();
    over.dedup();
    let name = s.node.op_type.clone();
    let mut kept = dims.clone();
    over.iter().for_each(|at| kept[*at] = 1);
    if s.int("keepdims", 1) == 0 {
        kept = (0..dims.len()).filter(|at| !over.contains(at)).map(|at| dims[at]).collect();
    }
    let is_empty = over.iter().any(|at| dims[*at] == 0);
    if is_empty && matches!(name.as_str(), "ReduceMax" | "ReduceMin") {
        return Ok(vec![extreme(s, name == "ReduceMax", &kept)?]);
    }
    let mut peak = None;
    match name.as_str() {
        "ReduceL1" if s.dtype(x) == DType::U32 || is_u64(s, 0) => {}
        "ReduceL1" => x = s.unary(Unary::Abs, x)?,
        "ReduceL2" | "ReduceSumSquare" => x = s.binary(Binary::Mul, x, x)?,
        "ReduceLogSumExp" => {
            let most = s.reduce(Combiner::Max, over.clone(), x)?;
            let most = finite_or_zero(s, most)?;
            let repeated = s.repeat(most, &over, x)?;
            let shifted = s.binary(Binary::Sub, x, repeated)?;
            x = s.unary(Unary::Exp, shifted)?;
            peak = Some(most);
        }
        _ => {}
    }
    let mut y = match name.as_str() {
        "ReduceMax" | "ReduceMin" => {
            let how = if name == "ReduceMax" { Combiner::Max } else { Combiner::Min };
            let turns = is_u64(s, 0);
            let key = ordered(s, x, turns)?;
            let most = s.reduce(how, over.clone(), key)?;
            ordered(s, most, turns)?
        }
        "ReduceProd" => s.push(Op::Prod { dims: over.clone() }, &[x])?,
        "ReduceMean" => average(s, x, &over)?,
        _ => s.reduce(Combiner::Sum, over.clone(), x)?,
    };
    match name.as_str() {
        "ReduceL2" => y = s.unary(Unary::Sqrt, y)?,
        "ReduceLogSum" | "ReduceLogSumExp" => y = s.unary(Unary::Log, y)?,
        _ => {}
    }
    if let Some(peak) = peak {
        y = s.binary(Binary::Add, y, peak)?;
    }
    Ok(vec![s.reshape(y, &kept)?])
}

/// What is no infinity, and zero for one: a peak that is taken away leaves the others as they are.
fn finite_or_zero(s: &mut Site, x: ValueId) -> Made {
    let size = s.unary(Unary::Abs, x)?;
    let infinity = s.number(f64::INFINITY, x)?;
    let is_infinite = s.compare(Comparison::Eq, size, infinity)?;
    let zero = s.number(0.0, x)?;
    s.select(is_infinite, zero, x)
}

/// The largest of no numbers is the least of their type, and the other way round.
fn extreme(s: &mut Site, is_largest: bool, dims: &[usize]) -> Made {
    let dtype = s.dtype(s.operand(0)?);
    let element = s.element(0).ok_or("operand 0 is missing")?;
    if element.carrier().is_float() {
        if element.format().is_some_and(|format| !format.has_infinity) {
            return Err(format!("no elements of type {}", element.name()));
        }
        let most = if is_largest { f64::NEG_INFINITY } else { f64::INFINITY };
        return s.constant(most, dtype, dims);
    }
    let (low, high) = element.bounds().ok_or("elements without an order")?;
    s.integer(if is_largest { low } else { high }, dtype, dims)
}

/// Along one dim; before version 13 along all dims from it on.
pub(super) fn softmax(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    let dims = s.dims(x);
    let default = if s.opset < 13 { 1 } else { -1 };
    let dim = dim_at(s.int("axis", default), dims.len())?;
    let last = dims.len() - 1;
    let is_softmax = s.node.op_type == "Softmax";
    let made = if s.opset < 13 {
        let two = [dims[..dim].iter().product(), dims[dim..].iter().product()];
        let flat = s.reshape(x, &two)?;
        let y = softmax_of(s, flat, 1, is_softmax)?;
        s.reshape(y, &dims)?
    } else if is_softmax && dim == last && s.is_float(x) && !dims.contains(&0) {
        s.composite("softmax", &[], &[x])?
    } else {
        softmax_of(s, x, dim, is_softmax)?
    };
    Ok(vec![made])
}

pub(super) fn softmax_of(s: &mut Site, x: ValueId, dim: usize, is_softmax: bool) -> Made {
    let most = s.reduce(Combiner::Max, vec![dim], x)?;
    let most = s.repeat(most, &[dim], x)?;
    let shifted = s.binary(Binary::Sub, x, most)?;
    let e = s.unary(Unary::Exp, shifted)?;
    let sum = s.reduce(Combiner::Sum, vec![dim], e)?;
    if is_softmax {
        let sums = s.repeat(sum, &[dim], x)?;
        return s.binary(Binary::Div, e, sums);
    }
    let log = s.unary(Unary::Log, sum)?;
    let logs = s.repeat(log, &[dim], x)?;
    s.binary(Binary::Sub, shifted, logs)
}

/// `x` less its mean over dims, divided by the standard deviation; also mean and its reciprocal.
fn normal(s: &mut Site, x: ValueId, over: &[usize], epsilon: f64) -> Result<[ValueId; 3], String> {
    let mean = average(s, x, over)?;
    let means = s.repeat(mean, over, x)?;
    let centred = s.binary(Binary::Sub, x, means)?;
    let square = s.binary(Binary::Mul, centred, centred)?;
    let variance = average(s, square, over)?;
    let more = s.with(Binary::Add, variance, epsilon)?;
    let inverse = s.unary(Unary::Rsqrt, more)?;
    let inverses = s.repeat(inverse, over, x)?;
    Ok([s.binary(Binary::Mul, centred, inverses)?, mean, inverse])
}

pub(super) fn layer_norm(s: &mut Site) -> Translated {
    let (x, scale) = (s.operand(0)?, s.operand(1)?);
    let mut dims = s.dims(x);
    let first = dim_at(s.int("axis", -1), dims.len())?;
    let over: Vec<usize> = (first..dims.len()).collect();
    let epsilon = s.float("epsilon", 1e-5);
    let plain = over.len() == 1
        && s.node.output.len() == 1
        && !dims.contains(&0)
        && epsilon.is_finite()
        && 0.0 <= epsilon;
    let bias = s.optional(2);
    let fits = |of: ValueId, s: &Site| s.dims(of) == dims[first..];
    if let Some(bias) = bias.filter(|b| plain && fits(*b, s) && fits(scale, s)) {
        return Ok(vec![s.composite("layer_norm", &[("eps", epsilon)], &[x, scale, bias])?]);
    }
    let [normal, mean, inverse] = normal(s, x, &over, epsilon)?;
    let scale = s.broadcast(scale, &dims)?;
    let mut y = s.binary(Binary::Mul, normal, scale)?;
    if let Some(bias) = bias {
        let bias = s.broadcast(bias, &dims)?;
        y = s.binary(Binary::Add, y, bias)?;
    }
    over.iter().for_each(|at| dims[*at] = 1);
    Ok(vec![y, s.reshape(mean, &dims)?, s.reshape(inverse, &dims)?])
}

pub(super) fn rms_norm(s: &mut Site) -> Translated {
    let (x, scale) = (s.operand(0)?, s.operand(1)?);
    let dims = s.dims(x);
    let over: Vec<usize> = (dim_at(s.int("axis", -1), dims.len())?..dims.len()).collect();
    let square = s.binary(Binary::Mul, x, x)?;
    let mean = average(s, square, &over)?;
    let more = s.with(Binary::Add, mean, s.float("epsilon", 1e-5))?;
    let inverse = s.unary(Unary::Rsqrt, more)?;
    let inverses = s.repeat(inverse, &over, x)?;
    let normal = s.binary(Binary::Mul, x, inverses)?;
    let scale = s.broadcast(scale, &dims)?;
    Ok(vec![s.binary(Binary::Mul, normal, scale)?])
}

/// A number for each channel, repeated to the dims of `like`.
fn per_channel(s: &mut Site, x: ValueId, like: ValueId) -> Made {
    let dims = s.ty(like).dims;
    let new = (0..dims.len()).filter(|dim| *dim != 1).collect();
    s.push(Op::Broadcast { new, dims }, &[x])
}

/// With statistics that were gathered before.
pub(super) fn batch_norm(s: &mut Site) -> Translated {
    if s.int("training_mode", 0) != 0 {
        return Err("training_mode is true".to_owned());
    }
    let x = s.operand(0)?;
    let [scale, bias, mean, variance] =
        [s.operand(1)?, s.operand(2)?, s.operand(3)?, s.operand(4)?];
    let more = s.with(Binary::Add, variance, s.float("epsilon", 1e-5))?;
    let inverse = s.unary(Unary::Rsqrt, more)?;
    let slope = s.binary(Binary::Mul, scale, inverse)?;
    let shift = s.binary(Binary::Mul, mean, slope)?;
    let offset = s.binary(Binary::Sub, bias, shift)?;
    let (slope, offset) = (per_channel(s, slope, x)?, per_channel(s, offset, x)?);
    let scaled = s.binary(Binary::Mul, x, slope)?;
    Ok(vec![s.binary(Binary::Add, scaled, offset)?])
}

pub(super) fn instance_norm(s: &mut Site) -> Translated {
    let (x, scale, bias) = (s.operand(0)?, s.operand(1)?, s.operand(2)?);
    let over: Vec<usize> = (2..s.ndim(x)).collect();
    let [normal, ..] = normal(s, x, &over, s.float("epsilon", 1e-5))?;
    let (scale, bias) = (per_channel(s, scale, x)?, per_channel(s, bias, x)?);
    let scaled = s.binary(Binary::Mul, normal, scale)?;
    Ok(vec![s.binary(Binary::Add, scaled, bias)?])
}

pub(super) fn group_norm(s: &mut Site) -> Translated {
    let (x, scale, bias) = (s.operand(0)?, s.operand(1)?, s.operand(2)?);
    let dims = s.dims(x);
    let groups = usize::try_from(s.int("num_groups", 1)).unwrap_or(0);
    if dims.len() < 2 || groups == 0 || !dims[1].is_multiple_of(groups) || s.opset < 21 {
        return Err(format!("{groups} groups of {dims:?}"));
    }
    let inner: usize = dims[1..].iter().product::<usize>() / groups;
    let apart = s.reshape(x, &[dims[0], groups, inner])?;
    let [normal, ..] = normal(s, apart, &[2], s.float("epsilon", 1e-5))?;
    let normal = s.reshape(normal, &dims)?;
    let (scale, bias) = (per_channel(s, scale, x)?, per_channel(s, bias, x)?);
    let scaled = s.binary(Binary::Mul, normal, scale)?;
    Ok(vec![s.binary(Binary::Add, scaled, bias)?])
}

pub(super) fn lp_normal(s: &mut Site) -> Translated {
    let x = s.operand(0)?;
    let dim = dim_at(s.int("axis", -1), s.ndim(x))?;
    let terms = match s.int("p", 2) {
        1 => s.unary(Unary::Abs, x)?,
        2 => s.binary(Binary::Mul, x, x)?,
        p => return Err(format!("p is {p}")),
    };
    let mut norm = s.reduce(Combiner::Sum, vec![dim], terms)?;
    if s.int("p", 2) == 2 {
        norm = s.unary(Unary::Sqrt, norm)?;
    }
    // Zeros have no direction, and stay.
    let zero = s.number(0.0, norm)?;
    let one = s.number(1.0, norm)?;
    let is_zero = s.compare(Comparison::Eq, norm, zero)?;
    let norm = s.select(is_zero, one, norm)?;
    let norms = s.repeat(norm, &[dim], x)?;
    Ok(vec![s.binary(Binary::Div, x, norms)?])
}
