//! Tensors: the values of the reference interpreter.

use crate::types::TensorType;
use crate::{DType, Dim, formats};

/// The elements of a tensor in row-major order.
#[derive(Clone, Debug, PartialEq)]
pub enum Data {
    /// Elements of `f64`.
    F64(Vec<f64>),
    /// Elements of `f32`, or of a narrow floating-point type, each a number of that.
    F32(Vec<f32>),
    /// Elements of any integer type, each in the range of the tensor's type.
    Int(Vec<i64>),
    /// Elements of `bool`.
    Bool(Vec<bool>),
}

/// A dense tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// The type of the elements.
    pub dtype: DType,
    /// The sizes, outermost first.
    pub dims: Vec<usize>,
    /// The elements.
    pub data: Data,
}

impl Tensor {
    /// A tensor of `f64`.
    ///
    /// # Panics
    /// All constructors panic when the elements are not as many as the dims say.
    pub fn f64(dims: &[usize], elements: Vec<f64>) -> Tensor {
        Tensor::new(DType::F64, dims, Data::F64(elements))
    }

    /// A tensor of `f32`.
    pub fn f32(dims: &[usize], elements: Vec<f32>) -> Tensor {
        Tensor::new(DType::F32, dims, Data::F32(elements))
    }

    /// A tensor of an integer type; elements outside its range wrap.
    pub fn int(dtype: DType, dims: &[usize], elements: Vec<i64>) -> Tensor {
        let elements = elements.into_iter().map(|e| wrap(dtype, e)).collect();
        Tensor::new(dtype, dims, Data::Int(elements))
    }

    /// A tensor of `bool`.
    pub fn bool(dims: &[usize], elements: Vec<bool>) -> Tensor {
        Tensor::new(DType::Bool, dims, Data::Bool(elements))
    }

    /// The key of random draws, of type `u32[4]`.
    pub fn key(key: crate::random::Key) -> Tensor {
        Tensor::int(DType::U32, &[4], key.words().map(i64::from).to_vec())
    }

    /// A tensor of any type whose elements are given as `f64` and cast.
    pub fn from_f64(dtype: DType, dims: &[usize], elements: Vec<f64>) -> Tensor {
        Tensor::new(dtype, dims, Data::from_f64(dtype, elements))
    }

    /// A tensor that holds one number everywhere.
    pub fn filled(dtype: DType, dims: &[usize], value: f64) -> Tensor {
        Tensor::from_f64(dtype, dims, vec![value; dims.iter().product()])
    }

    /// A tensor of elements that are of its type, or of f32 and rounded to a narrow one.
    pub(crate) fn new(dtype: DType, dims: &[usize], mut data: Data) -> Tensor {
        if let (true, Data::F32(x)) = (dtype.is_narrow(), &mut data) {
            x.iter_mut().for_each(|e| *e = formats::round(dtype, *e));
        }
        let count: usize = dims.iter().product();
        assert!(data.len() == count, "{} elements for dims {dims:?}", data.len());
        Tensor { dtype, dims: dims.to_vec(), data }
    }

    /// The type.
    pub fn ty(&self) -> TensorType {
        TensorType::new(self.dtype, self.dims.iter().map(|d| Dim::from(*d)))
    }

    /// The number of elements.
    pub fn count(&self) -> usize {
        self.data.len()
    }

    /// All elements as `f64`; true is one.
    pub fn to_f64(&self) -> Vec<f64> {
        self.data.to_f64()
    }

    /// The element of a tensor that has one.
    ///
    /// # Panics
    /// When it has not one element.
    pub fn scalar(&self) -> f64 {
        assert!(self.count() == 1, "{} elements are no scalar", self.count());
        self.to_f64()[0]
    }

    /// The largest absolute difference of two elements. Equal infinities do not differ; a NaN
    /// against anything else than a NaN, and tensors of different types, differ infinitely.
    pub fn max_abs_difference(&self, other: &Tensor) -> f64 {
        self.largest(other, |a, b| (a - b).abs())
    }

    /// The largest difference of two elements, divided by the larger of one and the magnitude of
    /// the element of `other`.
    pub fn max_relative_difference(&self, other: &Tensor) -> f64 {
        self.largest(other, |a, b| (a - b).abs() / b.abs().max(1.0))
    }

    fn largest(&self, other: &Tensor, difference: impl Fn(f64, f64) -> f64) -> f64 {
        if self.dtype != other.dtype || self.dims != other.dims {
            return f64::INFINITY;
        }
        let of_pair = |(a, b): (f64, f64)| match (a == b, a.is_nan(), b.is_nan()) {
            (true, _, _) | (_, true, true) => 0.0,
            (_, true, false) | (_, false, true) => f64::INFINITY,
            // Relative to an infinity everything would be near, or no number.
            (false, false, false) if a.is_infinite() || b.is_infinite() => f64::INFINITY,
            (false, false, false) => difference(a, b),
        };
        self.to_f64().into_iter().zip(other.to_f64()).map(of_pair).fold(0.0, f64::max)
    }
}

impl Data {
    /// The number of elements.
    pub fn len(&self) -> usize {
        match self {
            Data::F64(x) => x.len(),
            Data::F32(x) => x.len(),
            Data::Int(x) => x.len(),
            Data::Bool(x) => x.len(),
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Elements cast to a type: to integers towards zero, to `bool` whether they are not zero.
    pub(crate) fn from_f64(dtype: DType, x: Vec<f64>) -> Data {
        match dtype {
            DType::F64 => Data::F64(x),
            DType::F32 => Data::F32(x.into_iter().map(|e| e as f32).collect()),
            DType::Bool => Data::Bool(x.into_iter().map(|e| e != 0.0).collect()),
            DType::I8 => Data::Int(x.into_iter().map(|e| i64::from(e as i8)).collect()),
            DType::I32 => Data::Int(x.into_iter().map(|e| i64::from(e as i32)).collect()),
            DType::I64 => Data::Int(x.into_iter().map(|e| e as i64).collect()),
            DType::U32 => Data::Int(x.into_iter().map(|e| i64::from(e as u32)).collect()),
            DType::BF16 | DType::F16 | DType::F8E4M3 | DType::F8E5M2 => {
                Data::F32(x.into_iter().map(|e| formats::nearest(dtype, e) as f32).collect())
            }
        }
    }

    pub(crate) fn to_f64(&self) -> Vec<f64> {
        match self {
            Data::F64(x) => x.clone(),
            Data::F32(x) => x.iter().map(|e| f64::from(*e)).collect(),
            Data::Int(x) => x.iter().map(|e| *e as f64).collect(),
            Data::Bool(x) => x.iter().map(|e| f64::from(u8::from(*e))).collect(),
        }
    }

    /// The elements at the given places, in their order; zero where a place is [`NOWHERE`].
    pub(crate) fn pick(&self, places: &[usize]) -> Data {
        match self {
            Data::F64(x) => Data::F64(pick(x, places)),
            Data::F32(x) => Data::F32(pick(x, places)),
            Data::Int(x) => Data::Int(pick(x, places)),
            Data::Bool(x) => Data::Bool(pick(x, places)),
        }
    }

    /// The elements of `from`, written over those at the given places of `self`.
    pub(crate) fn put(&mut self, places: &[usize], from: &Data) {
        match (self, from) {
            (Data::F64(x), Data::F64(from)) => put(x, places, from),
            (Data::F32(x), Data::F32(from)) => put(x, places, from),
            (Data::Int(x), Data::Int(from)) => put(x, places, from),
            (Data::Bool(x), Data::Bool(from)) => put(x, places, from),
            (Data::F64(_) | Data::F32(_) | Data::Int(_) | Data::Bool(_), _) => {
                panic!("verified: elements of one type")
            }
        }
    }
}

/// A place that holds a zero.
pub(crate) const NOWHERE: usize = usize::MAX;

fn pick<T: Copy + Default>(x: &[T], places: &[usize]) -> Vec<T> {
    places.iter().map(|at| x.get(*at).copied().unwrap_or_default()).collect()
}

fn put<T: Copy>(x: &mut [T], places: &[usize], from: &[T]) {
    for (at, value) in places.iter().zip(from) {
        x[*at] = *value;
    }
}

/// An integer in the range of its type, as two's complement does it.
pub(crate) fn wrap(dtype: DType, value: i64) -> i64 {
    match dtype {
        DType::I8 => i64::from(value as i8),
        DType::I32 => i64::from(value as i32),
        DType::U32 => i64::from(value as u32),
        DType::I64 => value,
        DType::F64
        | DType::F32
        | DType::BF16
        | DType::F16
        | DType::F8E4M3
        | DType::F8E5M2
        | DType::Bool => panic!("{dtype} is no integer type"),
    }
}

/// The distance of neighbours along each dim of a row-major tensor.
pub(crate) fn strides(dims: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; dims.len()];
    for at in (1..dims.len()).rev() {
        strides[at - 1] = strides[at] * dims[at];
    }
    strides
}

/// The places, in row-major order of `dims`, of a view whose neighbours along each dim are
/// `strides` apart and whose first element is at `offset`.
pub(crate) fn places(dims: &[usize], strides: &[usize], offset: usize) -> Vec<usize> {
    let count = dims.iter().product();
    let mut places = Vec::with_capacity(count);
    places.push(offset);
    if count == 0 {
        return Vec::new();
    }
    // Outermost dim first: each round repeats what is there at every index of the next dim.
    for (size, stride) in dims.iter().zip(strides) {
        let before = std::mem::replace(&mut places, Vec::with_capacity(count));
        for start in before {
            places.extend((0..*size).map(|at| start + at * stride));
        }
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_walk_in_row_major_order() {
        assert_eq!(places(&[2, 3], &[3, 1], 0), [0, 1, 2, 3, 4, 5]);
        assert_eq!(places(&[3, 2], &[1, 3], 0), [0, 3, 1, 4, 2, 5]);
        assert_eq!(places(&[2, 2], &[0, 1], 4), [4, 5, 4, 5]);
        assert_eq!(places(&[], &[], 0), [0]);
        assert_eq!(places(&[2, 0], &[0, 1], 0), [0; 0]);
    }

    #[test]
    fn differences_see_nan_and_infinity() {
        let t = |x: f64| Tensor::f64(&[1], vec![x]);
        assert_eq!(t(1.0).max_abs_difference(&t(3.0)), 2.0);
        assert_eq!(t(f64::INFINITY).max_abs_difference(&t(f64::INFINITY)), 0.0);
        assert_eq!(t(f64::NAN).max_abs_difference(&t(0.0)), f64::INFINITY);
        assert_eq!(t(1.0).max_abs_difference(&Tensor::f64(&[], vec![1.0])), f64::INFINITY);
    }
}
