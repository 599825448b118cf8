//! Operators whose results have as many elements as their operands' numbers tell: computed when
//! the model is read, from what is stored, or from the inputs that are given.

use std::cmp::Ordering;

use super::element::Element;
use super::site::{Site, Translated, dim_at};
use crate::module::ValueId;
use crate::tensor::{Data, strides};
use crate::{DType, Tensor};

fn indices(s: &mut Site, dims: &[usize], numbers: Vec<i64>) -> Result<ValueId, String> {
    s.hold(Tensor::int(DType::I64, dims, numbers))
}

/// The places of what is not zero, one row for each dim.
pub(super) fn non_zero(s: &mut Site) -> Translated {
    s.state(0, Element::I64);
    let x = s.known(0)?.ok_or("operand 0 is missing")?;
    let steps = strides(&x.dims);
    let numbers = x.to_f64();
    let found: Vec<usize> = (0..numbers.len()).filter(|at| numbers[*at] != 0.0).collect();
    let ndim = x.dims.len().max(1);
    let row = |dim: usize| match x.dims.get(dim) {
        Some(size) => found.iter().map(|at| (at / steps[dim] % size) as i64).collect::<Vec<i64>>(),
        None => vec![0; found.len()],
    };
    let rows: Vec<i64> = (0..ndim).flat_map(row).collect();
    Ok(vec![indices(s, &[ndim, found.len()], rows)?])
}

/// What a known condition picks: slices of a dim, or elements.
pub(super) fn compress(s: &mut Site) -> Translated {
    let mut x = s.operand(0)?;
    let condition = s.known(1)?.ok_or("operand 1 is missing")?.to_f64();
    let dim = if s.has("axis") {
        dim_at(s.int("axis", 0), s.ndim(x))?
    } else {
        let count = s.dims(x).iter().product();
        x = s.reshape(x, &[count])?;
        0
    };
    let size = s.dims(x)[dim];
    let holds = |at: &usize| condition.get(*at).is_some_and(|holds| *holds != 0.0);
    let places: Vec<usize> = (0..size).filter(holds).collect();
    if condition.iter().skip(size).any(|holds| *holds != 0.0) {
        return Err(format!("a condition of {} for {size}", condition.len()));
    }
    if places.is_empty() {
        return Ok(vec![s.cut(x, dim, 0, 0)?]);
    }
    Ok(vec![s.picked(x, dim, &places)?])
}

/// The order of two rows of numbers; what is no number comes last.
fn order(a: &[f64], b: &[f64]) -> Ordering {
    let pairs = a.iter().zip(b).map(|(a, b)| a.partial_cmp(b).unwrap_or(a.total_cmp(b)));
    pairs.into_iter().find(|order| order.is_ne()).unwrap_or(Ordering::Equal)
}

/// Elements or slices without those that are there already; where each stands first, where it is
/// among the rest, and how often it is there.
pub(super) fn unique(s: &mut Site) -> Translated {
    let x = s.known(0)?.ok_or("operand 0 is missing")?;
    if let Data::Int(numbers) = &x.data
        && numbers.iter().any(|n| n.unsigned_abs() > 1 << 53)
    {
        return Err("integers of more than 53 bits".to_owned());
    }
    let (dim, whole) = if s.has("axis") {
        (dim_at(s.int("axis", 0), x.dims.len())?, x.dims.clone())
    } else {
        (0, vec![x.count()])
    };
    let (numbers, steps, size) = (x.to_f64(), strides(&whole), whole[dim]);
    let slice = |at: usize| -> Vec<f64> {
        let of = |place: &usize| place / steps[dim] % size == at;
        (0..numbers.len()).filter(of).map(|place| numbers[place]).collect()
    };
    let slices: Vec<Vec<f64>> = (0..size).map(slice).collect();
    let mut by_value: Vec<usize> = (0..size).collect();
    by_value.sort_by(|a, b| order(&slices[*a], &slices[*b]).then(a.cmp(b)));
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for at in by_value {
        match groups.last_mut() {
            Some(group) if order(&slices[group[0]], &slices[at]).is_eq() => group.push(at),
            _ => groups.push(vec![at]),
        }
    }
    if s.int("sorted", 1) == 0 {
        groups.sort_by_key(|group| group[0]);
    }
    let first: Vec<i64> = groups.iter().map(|group| group[0] as i64).collect();
    let counts = groups.iter().map(|group| group.len() as i64).collect();
    let mut inverse = vec![0; size];
    for (at, group) in groups.iter().enumerate() {
        group.iter().for_each(|place| inverse[*place] = at as i64);
    }
    let mut dims = whole.clone();
    dims[dim] = groups.len();
    let own = strides(&dims);
    let place = |at: usize| {
        let row = at / own[dim].max(1) % groups.len().max(1);
        let rest = at / (own[dim] * groups.len()) * steps[dim] * size + at % own[dim];
        numbers[rest + groups[row][0] * steps[dim]]
    };
    let picked = (0..dims.iter().product()).map(place).collect();
    (1..4).for_each(|result| s.state(result, Element::I64));
    let y = s.hold(Tensor::from_f64(x.dtype, &dims, picked))?;
    let count = [groups.len()];
    let first = indices(s, &count, first)?;
    let inverse = indices(s, &[size], inverse)?;
    Ok(vec![y, first, inverse, indices(s, &count, counts)?])
}

/// A box: its edges in ascending order.
type Edges = [f64; 4];

/// Boxes of the highest scores of each class that overlap with no better one.
pub(super) fn non_max_suppression(s: &mut Site) -> Translated {
    let boxes = s.known(0)?.ok_or("no boxes")?;
    let scores = s.known(1)?.ok_or("no scores")?;
    let number = |at: usize| -> Result<Option<f64>, String> {
        Ok(s.known(at)?.and_then(|list| list.to_f64().first().copied()))
    };
    let most = number(2)?.unwrap_or(0.0).max(0.0) as usize;
    let (overlap, least) = (number(3)?.unwrap_or(0.0), number(4)?);
    let [batch, count, 4] = boxes.dims[..] else { return Err(format!("boxes {:?}", boxes.dims)) };
    let [samples, classes, of] = scores.dims[..] else { return Err("scores".to_owned()) };
    if samples != batch || of != count {
        return Err(format!("boxes {:?} and scores {:?}", boxes.dims, scores.dims));
    }
    let (corners, scores) = (boxes.to_f64(), scores.to_f64());
    let by_centre = s.int("center_point_box", 0) != 0;
    let edges = |at: usize| -> Edges {
        let of = &corners[4 * at..4 * at + 4];
        if by_centre {
            let (x, y, width, height) = (of[0], of[1], of[2] / 2.0, of[3] / 2.0);
            return [y - height, x - width, y + height, x + width];
        }
        [of[0].min(of[2]), of[1].min(of[3]), of[0].max(of[2]), of[1].max(of[3])]
    };
    let mut selected: Vec<i64> = Vec::new();
    for sample in 0..batch {
        for class in 0..classes {
            let first = (sample * classes + class) * count;
            let of_class = &scores[first..first + count];
            let is_high = |at: &usize| least.is_none_or(|least| of_class[*at] > least);
            let mut candidates: Vec<usize> = (0..count).filter(is_high).collect();
            // The highest score first, and the first box of equal ones.
            candidates.sort_by(|a, b| of_class[*b].total_cmp(&of_class[*a]).then(a.cmp(b)));
            let mut kept: Vec<usize> = Vec::new();
            for at in candidates {
                if kept.len() == most {
                    break;
                }
                let own = edges(sample * count + at);
                let covers = |other: &usize| shared(own, edges(sample * count + other)) > overlap;
                if !kept.iter().any(covers) {
                    kept.push(at);
                    selected.extend([sample as i64, class as i64, at as i64]);
                }
            }
        }
    }
    Ok(vec![indices(s, &[selected.len() / 3, 3], selected)?])
}

/// The intersection of two boxes over their union.
fn shared(a: Edges, b: Edges) -> f64 {
    let area = |of: Edges| (of[2] - of[0]) * (of[3] - of[1]);
    let height = (a[2].min(b[2]) - a[0].max(b[0])).max(0.0);
    let width = (a[3].min(b[3]) - a[1].max(b[1])).max(0.0);
    let union = area(a) + area(b) - height * width;
    if area(a) <= 0.0 || area(b) <= 0.0 || union <= 0.0 { 0.0 } else { height * width / union }
}
