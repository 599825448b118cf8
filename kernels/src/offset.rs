//! Offsets: where a rank's piece of something begins.
//!
//! Ranks with equal local sizes launch the same kernels. What differs between them, and not from
//! step to step, is a scalar of the launch: the kernel says which one it reads, and between which
//! bounds that lies. A kernel is verified for all that its bounds allow, a launch is held against
//! them ([`admit`](crate::scalars::admit)).

use serde::{Deserialize, Serialize};

/// A number of a kernel that may differ by rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Offset {
    /// The same in every launch.
    Fixed(i64),
    /// A scalar of the launch.
    Scalar {
        /// Which one.
        slot: usize,
        /// The least that it may be.
        least: i64,
        /// The most that it may be.
        most: i64,
    },
}

impl Offset {
    /// Nothing is added.
    pub const ZERO: Offset = Offset::Fixed(0);

    /// The least that it may be.
    pub fn least(self) -> i64 {
        match self {
            Offset::Fixed(value) => value,
            Offset::Scalar { least, .. } => least,
        }
    }

    /// The most that it may be.
    pub fn most(self) -> i64 {
        match self {
            Offset::Fixed(value) => value,
            Offset::Scalar { most, .. } => most,
        }
    }

    /// Its value in a launch with these scalars.
    ///
    /// # Panics
    /// If the launch has no such scalar, or one out of bounds.
    pub fn of(self, scalars: &[i64]) -> i64 {
        match self {
            Offset::Fixed(value) => value,
            Offset::Scalar { slot, least, most } => {
                let value = scalars[slot];
                assert!((least..=most).contains(&value), "a launch passes what its kernel admits");
                value
            }
        }
    }

    /// Its value in a kernel that is bound to the scalars of a launch.
    ///
    /// # Panics
    /// If it is a scalar: kernels are executed bound.
    #[inline(always)]
    pub fn bound(self) -> i64 {
        match self {
            Offset::Fixed(value) => value,
            Offset::Scalar { .. } => {
                panic!("kernels are executed bound to the scalars of a launch")
            }
        }
    }

    /// The same, with its slot moved up.
    pub(crate) fn shifted(self, slots: usize) -> Offset {
        match self {
            Offset::Fixed(_) => self,
            Offset::Scalar { slot, least, most } => {
                Offset::Scalar { slot: slot + slots, least, most }
            }
        }
    }
}
