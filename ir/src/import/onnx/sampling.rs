//! Elements at places that are computed: `GridSample` and `AffineGrid`.
//!
//! Legend: N batch, C channels, P points of the image, O points of the result.

use super::quantise::rounded;
use super::site::{Made, Site, Translated};
use crate::module::ValueId;
use crate::op::{Binary, Comparison, Op, Unary};
use crate::{DType, Tensor};

/// What a coordinate outside of the image means.
#[derive(Clone, Copy, PartialEq)]
enum Outside {
    Zeros,
    Border,
    Reflection,
}

/// Coordinates of points, `[N, O]` for each spatial dim, and of how many neighbours to take.
struct Points {
    coordinates: Vec<ValueId>,
    sizes: Vec<usize>,
    outside: Outside,
    align: bool,
}

pub(super) fn affine_grid(s: &mut Site) -> Translated {
    let theta = s.operand(0)?;
    let size = s.integers(1)?.ok_or("no size")?;
    let align = s.int("align_corners", 0) != 0;
    let spatial: Vec<usize> = size.iter().skip(2).map(|n| (*n).max(0) as usize).collect();
    let (count, points) = (spatial.len(), spatial.iter().product::<usize>());
    let dims = s.dims(theta);
    if dims.get(1..) != Some(&[count, count + 1][..]) || points == 0 {
        return Err(format!("a matrix of dims {dims:?} for {size:?}"));
    }
    // The last dim first, and one.
    let mut grid = Vec::new();
    for point in 0..points {
        let (mut rest, mut row) = (point, vec![1.0]);
        for size in spatial.iter().rev() {
            let (at, size) = ((rest % size) as f64, *size as f64);
            let place = match align {
                true if size == 1.0 => 0.0,
                true => -1.0 + 2.0 * at / (size - 1.0),
                false => (2.0 * at + 1.0) / size - 1.0,
            };
            row.insert(row.len() - 1, place);
            rest /= size as usize;
        }
        grid.extend(row);
    }
    let grid = s.array(Tensor::from_f64(s.dtype(theta), &[points, count + 1], grid))?;
    let y = s.contract("pj,nij->npi", grid, theta)?;
    Ok(vec![s.reshape(y, &[&[dims[0]][..], &spatial, &[count]].concat())?])
}

pub(super) fn grid_sample(s: &mut Site) -> Translated {
    let (x, grid) = (s.operand(0)?, s.operand(1)?);
    let (dims, of_grid) = (s.dims(x), s.dims(grid));
    let spatial = dims.len().saturating_sub(2);
    let fits = of_grid.len() == dims.len() && of_grid.last() == Some(&spatial);
    if !fits || spatial == 0 || dims[0] != of_grid[0] || dims.contains(&0) {
        return Err(format!("an image {dims:?} and a grid {of_grid:?}"));
    }
    let align = s.int("align_corners", 0) != 0;
    let outside = match s.text("padding_mode", "zeros").as_str() {
        "zeros" => Outside::Zeros,
        "border" => Outside::Border,
        "reflection" => Outside::Reflection,
        other => return Err(format!("padding_mode `{other}`")),
    };
    let points: usize = of_grid[1..=spatial].iter().product();
    let flat = s.reshape(grid, &[dims[0], points, spatial])?;
    let mode = s.text("mode", "linear");
    let is_nearest = mode == "nearest";
    let mut coordinates = Vec::new();
    for at in 0..spatial {
        // The last coordinate of the grid is that of the first dim.
        let one = s.cut(flat, 2, spatial - 1 - at, 1)?;
        let one = s.reshape(one, &[dims[0], points])?;
        let size = dims[2 + at] as f64;
        let raised = s.with(Binary::Add, one, 1.0)?;
        let mut place = if align {
            s.with(Binary::Mul, raised, (size - 1.0) / 2.0)?
        } else {
            let scaled = s.with(Binary::Mul, raised, size)?;
            let less = s.with(Binary::Sub, scaled, 1.0)?;
            s.with(Binary::Mul, less, 0.5)?
        };
        if is_nearest {
            place = rounded(s, place)?;
        }
        coordinates.push(within(s, place, outside, align, size)?);
    }
    let points = Points { coordinates, sizes: dims[2..].to_vec(), outside, align };
    let y = match mode.as_str() {
        "nearest" => taken(s, x, &points, &[vec![0]], |_, _, _| Ok(None))?,
        "linear" | "bilinear" => taken(s, x, &points, &[vec![0, 1]], linear_weight)?,
        "cubic" | "bicubic" => taken(s, x, &points, &[vec![-1, 0, 1, 2]], cubic_weight)?,
        other => return Err(format!("mode `{other}`")),
    };
    Ok(vec![s.reshape(y, &[&dims[..2], &of_grid[1..=spatial]].concat())?])
}

/// A coordinate inside of the image, where the border or a reflection stands for what is outside.
fn within(s: &mut Site, x: ValueId, outside: Outside, align: bool, size: f64) -> Made {
    match outside {
        Outside::Zeros => Ok(x),
        Outside::Border => {
            let low = s.with(Binary::Max, x, 0.0)?;
            s.with(Binary::Min, low, size - 1.0)
        }
        Outside::Reflection => {
            let (low, high) = if align { (0.0, size - 1.0) } else { (-0.5, size - 0.5) };
            if high <= low {
                return s.number(0.0, x);
            }
            // A wave of the period of two images.
            let (span, period) = (high - low, 2.0 * (high - low));
            let moved = s.with(Binary::Sub, x, low)?;
            let ratio = s.with(Binary::Div, moved, period)?;
            let whole = s.unary(Unary::Floor, ratio)?;
            let whole = s.with(Binary::Mul, whole, period)?;
            let rest = s.sub(moved, whole)?;
            let back = s.with(Binary::Sub, rest, span)?;
            let back = s.unary(Unary::Abs, back)?;
            let near = s.number(span, back)?;
            let near = s.sub(near, back)?;
            s.with(Binary::Add, near, low)
        }
    }
}

/// The weight of a neighbour that is so far from the element before a coordinate; none for one.
type Weight = fn(&mut Site, ValueId, i64) -> Result<Option<ValueId>, String>;

fn linear_weight(s: &mut Site, rest: ValueId, offset: i64) -> Result<Option<ValueId>, String> {
    if offset == 1 {
        return Ok(Some(rest));
    }
    let one = s.number(1.0, rest)?;
    s.sub(one, rest).map(Some)
}

/// R. Keys, Cubic convolution interpolation for digital image processing, 1981, with -3/4.
fn cubic_weight(s: &mut Site, rest: ValueId, offset: i64) -> Result<Option<ValueId>, String> {
    let a = -0.75;
    let place = s.number(offset as f64, rest)?;
    let distance = s.sub(rest, place)?;
    let d = s.unary(Unary::Abs, distance)?;
    let horner = |s: &mut Site, of: [f64; 4]| -> Made {
        let mut sum = s.number(of[0], d)?;
        for coefficient in &of[1..] {
            let product = s.mul(sum, d)?;
            sum = s.with(Binary::Add, product, *coefficient)?;
        }
        Ok(sum)
    };
    let is_near = offset == 0 || offset == 1;
    let coefficients =
        if is_near { [a + 2.0, -(a + 3.0), 0.0, 1.0] } else { [a, -5.0 * a, 8.0 * a, -4.0 * a] };
    horner(s, coefficients).map(Some)
}

/// Weighted sums of the neighbours of points: `[N, C, O]`.
fn taken(s: &mut Site, x: ValueId, points: &Points, offsets: &[Vec<i64>], weight: Weight) -> Made {
    let dims = s.dims(x);
    let (batch, channels) = (dims[0], dims[1]);
    let area: usize = points.sizes.iter().product();
    let spatial = points.sizes.len();
    // [N P, C]
    let flat = s.reshape(x, &[batch, channels, area])?;
    let rows = s.transpose(flat, &[0, 2, 1])?;
    let rows = s.reshape(rows, &[batch * area, channels])?;
    let offsets = &offsets[0];
    let (mut places, mut inside, mut weights) = (Vec::new(), Vec::new(), Vec::new());
    for (coordinate, size) in points.coordinates.iter().zip(&points.sizes) {
        let floor = s.unary(Unary::Floor, *coordinate)?;
        let rest = s.sub(*coordinate, floor)?;
        let (mut of_place, mut of_inside, mut of_weight) = (Vec::new(), Vec::new(), Vec::new());
        for offset in offsets {
            let (at, is_inside) = neighbour(s, floor, *offset, *size, points)?;
            of_place.push(at);
            of_inside.push(is_inside);
            of_weight.push(weight(s, rest, *offset)?);
        }
        places.push(of_place);
        inside.push(of_inside);
        weights.push(of_weight);
    }
    let mut sum = None;
    for combination in 0..offsets.len().pow(spatial as u32) {
        let digit = |at: usize| combination / offsets.len().pow(at as u32) % offsets.len();
        let first = s.ty(points.coordinates[0]).dims;
        let dims: Vec<usize> =
            first.iter().filter_map(|d| d.as_constant()).map(|d| d as usize).collect();
        let mut place = s.index(0, DType::I32, &dims)?;
        let mut factor: Option<ValueId> = None;
        let mut holds: Option<ValueId> = None;
        for at in 0..spatial {
            place = s.with(Binary::Mul, place, points.sizes[at] as f64)?;
            place = s.add(place, places[at][digit(at)])?;
            if let Some(own) = weights[at][digit(at)] {
                factor = Some(factor.map_or(Ok(own), |factor| s.mul(factor, own))?);
            }
            if let Some(own) = inside[at][digit(at)] {
                holds = Some(match holds {
                    Some(holds) => s.select(holds, own, holds)?,
                    None => own,
                });
            }
        }
        let picked = s.push(Op::Gather { dim: 0, start: 0 }, &[rows, place])?;
        let mut term = picked;
        let full = s.ty(term).dims;
        let spread = |s: &mut Site, x: ValueId| {
            s.push(Op::Broadcast { new: vec![2], dims: full.clone() }, &[x])
        };
        if let Some(factor) = factor {
            let factor = spread(s, factor)?;
            term = s.mul(term, factor)?;
        }
        if let Some(holds) = holds {
            let holds = spread(s, holds)?;
            let zero = s.number(0.0, term)?;
            term = s.select(holds, term, zero)?;
        }
        sum = Some(match sum {
            Some(sum) => s.add(sum, term)?,
            None => term,
        });
    }
    s.transpose(sum.ok_or("no neighbours")?, &[0, 2, 1])
}

/// The index of a neighbour, inside of the image, and whether it lies there; none where all do.
fn neighbour(
    s: &mut Site,
    floor: ValueId,
    offset: i64,
    size: usize,
    points: &Points,
) -> Result<(ValueId, Option<ValueId>), String> {
    let place = s.with(Binary::Add, floor, offset as f64)?;
    let mut is_inside = None;
    let mut near = place;
    if points.outside == Outside::Zeros {
        let zero = s.number(0.0, place)?;
        let last = s.number(size as f64 - 1.0, place)?;
        let low = s.compare(Comparison::Le, zero, place)?;
        let high = s.compare(Comparison::Le, place, last)?;
        is_inside = Some(s.select(low, high, low)?);
    } else {
        near = within(s, place, points.outside, points.align, size as f64)?;
        // Reflected indices are cut off to whole ones.
        near = s.unary(Unary::Floor, near)?;
    }
    let low = s.with(Binary::Max, near, 0.0)?;
    let near = s.with(Binary::Min, low, size as f64 - 1.0)?;
    // What is no number is no place.
    let same = s.compare(Comparison::Eq, near, near)?;
    let zero = s.number(0.0, near)?;
    let near = s.select(same, near, zero)?;
    Ok((s.cast(near, DType::I32)?, is_inside))
}
