//! Newtypes for the quantities that are predicted and measured.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Mul};

use serde::{Deserialize, Serialize};

/// A number of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Bytes(pub u64);

/// A number of floating-point operations; a fused multiply-add counts two.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Flops(pub u64);

/// A duration in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Seconds(pub f64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.0 as f64;
        match self.0 {
            0..0x400 => write!(f, "{} B", self.0),
            0x400..0x10_0000 => write!(f, "{:.1} KiB", value / 1024.0),
            0x10_0000..0x4000_0000 => write!(f, "{:.1} MiB", value / 1_048_576.0),
            0x4000_0000.. => write!(f, "{:.2} GiB", value / 1_073_741_824.0),
        }
    }
}

impl fmt::Display for Flops {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.0 as f64;
        if value < 1e3 {
            write!(f, "{} flop", self.0)
        } else if value < 1e6 {
            write!(f, "{:.1} kflop", value / 1e3)
        } else if value < 1e9 {
            write!(f, "{:.1} Mflop", value / 1e6)
        } else if value < 1e12 {
            write!(f, "{:.1} Gflop", value / 1e9)
        } else {
            write!(f, "{:.2} Tflop", value / 1e12)
        }
    }
}

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0;
        if seconds.abs() < 1e-3 {
            write!(f, "{:.1} µs", seconds * 1e6)
        } else if seconds.abs() < 1.0 {
            write!(f, "{:.2} ms", seconds * 1e3)
        } else if seconds.abs() < 600.0 {
            write!(f, "{seconds:.2} s")
        } else if seconds.abs() < 2.0 * 3600.0 {
            write!(f, "{:.1} min", seconds / 60.0)
        } else if seconds.abs() < 2.0 * 86400.0 {
            write!(f, "{:.1} h", seconds / 3600.0)
        } else {
            write!(f, "{:.1} days", seconds / 86400.0)
        }
    }
}

macro_rules! additive {
    ($($unit:ident: $number:ty),*) => {$(
        impl Add for $unit {
            type Output = $unit;
            fn add(self, other: $unit) -> $unit {
                $unit(self.0 + other.0)
            }
        }

        impl AddAssign for $unit {
            fn add_assign(&mut self, other: $unit) {
                self.0 += other.0;
            }
        }

        impl Mul<$number> for $unit {
            type Output = $unit;
            fn mul(self, times: $number) -> $unit {
                $unit(self.0 * times)
            }
        }

        impl Sum for $unit {
            fn sum<I: Iterator<Item = $unit>>(items: I) -> $unit {
                items.fold($unit::default(), Add::add)
            }
        }
    )*};
}

additive!(Bytes: u64, Flops: u64, Seconds: f64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_print_for_people() {
        assert_eq!(Bytes(1000).to_string(), "1000 B");
        assert_eq!(Bytes(3 << 19).to_string(), "1.5 MiB");
        assert_eq!(Bytes(5 << 29).to_string(), "2.50 GiB");
        assert_eq!(Flops(2_500_000).to_string(), "2.5 Mflop");
        assert_eq!(Seconds(0.00025).to_string(), "250.0 µs");
        assert_eq!(Seconds(0.0125).to_string(), "12.50 ms");
        assert_eq!(Seconds(2.0).to_string(), "2.00 s");
        assert_eq!(Seconds(25148.81).to_string(), "7.0 h");
        assert_eq!([900.0, 3e5].map(|s| Seconds(s).to_string()), ["15.0 min", "3.5 days"]);
    }
}
