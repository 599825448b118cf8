//! Whole numbers that divide others.

use std::iter::successors;
use std::ops::{Add, Div, Rem};

/// Unsigned integers, whatever their width.
pub trait Whole:
    Copy + PartialOrd + From<u8> + Add<Output = Self> + Div<Output = Self> + Rem<Output = Self>
{
}

impl Whole for u32 {}
impl Whole for u64 {}
impl Whole for usize {}

/// All divisors, ascending; none of zero, which every number divides.
///
/// **Cost**: √n divisions.
pub fn divisors<N: Whole>(n: N) -> Vec<N> {
    let (zero, one) = (N::from(0), N::from(1));
    let counted = successors(Some(one), |d| Some(*d + one)).take_while(|d| *d <= n / *d);
    let mut low: Vec<N> = counted.filter(|d| n % *d == zero).collect();
    let high: Vec<N> = low.iter().rev().map(|d| n / *d).filter(|d| *d > n / *d).collect();
    low.extend(high);
    low
}

/// The largest number that divides both; the other one where one is zero.
pub fn gcd<N: Whole>(a: N, b: N) -> N {
    if b == N::from(0) { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Squares, primes, one and zero among them.
    #[test]
    fn divisors_are_all_numbers_that_divide() {
        for n in 0..=1_000_u32 {
            let wanted: Vec<u32> = (1..=n).filter(|d| n.is_multiple_of(*d)).collect();
            assert_eq!(divisors(n), wanted, "{n}");
        }
        let largest = divisors(u32::MAX);
        assert_eq!([largest[0], largest[1], largest[largest.len() - 1]], [1, 3, u32::MAX]);
    }

    #[test]
    fn no_larger_number_divides_both() {
        for a in 0..=60_u64 {
            for b in 0..=60_u64 {
                let divides = |d: &u64| a.is_multiple_of(*d) && b.is_multiple_of(*d);
                let wanted = (1..=a.max(b)).rev().find(divides).unwrap_or(0);
                assert_eq!(gcd(a, b), wanted, "{a}, {b}");
            }
        }
    }
}
