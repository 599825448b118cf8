//! Arrays that are given as inputs, as numbers of the types that the model has for them.

use super::element::Element;
use crate::Tensor;
use crate::tensor::Data;

/// Numbers, whatever they were stored as.
#[derive(Clone, Debug, PartialEq)]
pub enum Numbers {
    /// Integers of up to 64 bits, with or without a sign.
    Whole(Vec<i128>),
    /// Floating-point numbers.
    Real(Vec<f64>),
}

/// An array that is given as an input.
#[derive(Clone, Debug, PartialEq)]
pub struct Array {
    /// The sizes, outermost first.
    pub dims: Vec<usize>,
    /// The elements in row-major order.
    pub numbers: Numbers,
}

impl From<&Tensor> for Array {
    fn from(tensor: &Tensor) -> Array {
        let numbers = match &tensor.data {
            Data::Int(numbers) => Numbers::Whole(numbers.iter().map(|n| i128::from(*n)).collect()),
            Data::F64(_) | Data::F32(_) | Data::Bool(_) => Numbers::Real(tensor.to_f64()),
        };
        Array { dims: tensor.dims.clone(), numbers }
    }
}

impl Element {
    /// An array as elements of the type: whole numbers as they are, others as the nearest that the
    /// type has.
    ///
    /// # Errors
    /// A number that the type does not have: a fraction or a number out of range of an integer
    /// type, another than zero and one of truth values, one beyond the largest of a floating-point
    /// type.
    pub fn tensor_of(self, array: &Array) -> Result<Tensor, String> {
        match (&array.numbers, self.bounds()) {
            (Numbers::Whole(numbers), Some(_)) => {
                let held = numbers.iter().map(|n| self.held(*n).ok_or_else(|| n.to_string()));
                Ok(self.of_integers(&array.dims, held.collect::<Result<_, _>>()?))
            }
            (Numbers::Real(numbers), Some(_)) => {
                let whole = |x: &f64| {
                    let is_whole = x.fract() == 0.0 && x.abs() <= 2.0_f64.powi(64);
                    let held = is_whole.then(|| self.held(*x as i128)).flatten();
                    held.ok_or_else(|| x.to_string())
                };
                let held = numbers.iter().map(whole).collect::<Result<_, _>>()?;
                Ok(self.of_integers(&array.dims, held))
            }
            (Numbers::Whole(numbers), None) => {
                let is_single = self == Element::F32;
                // Rounded once.
                let wide = |n: &i128| if is_single { f64::from(*n as f32) } else { *n as f64 };
                let wide = numbers.iter().map(wide);
                self.of_reals(&array.dims, wide)
            }
            (Numbers::Real(numbers), None) => self.of_reals(&array.dims, numbers.iter().copied()),
        }
    }

    /// An integer as it is held; none where the type does not have it.
    fn held(self, number: i128) -> Option<i64> {
        if self == Element::U64 {
            return u64::try_from(number).ok().map(|number| number as i64);
        }
        let (low, high) = self.bounds()?;
        i64::try_from(number).ok().filter(|number| (low..=high).contains(number))
    }

    fn of_integers(self, dims: &[usize], held: Vec<i64>) -> Tensor {
        if self == Element::Bool {
            return Tensor::bool(dims, held.into_iter().map(|n| n != 0).collect());
        }
        Tensor::int(self.carrier(), dims, held)
    }

    fn of_reals(
        self,
        dims: &[usize],
        numbers: impl Iterator<Item = f64>,
    ) -> Result<Tensor, String> {
        let near = numbers.map(|x| self.nearest(x).ok_or_else(|| x.to_string()));
        let near = near.collect::<Result<_, _>>()?;
        Ok(Tensor::from_f64(self.carrier(), dims, near))
    }
}
