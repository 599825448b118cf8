//! Dynamic loss scaling (Micikevicius et al. 2018, section 3.2).
//!
//! Gradients of f16 that are too small for it become zero, those that are too large infinite. So
//! the gradient of the loss is multiplied by a scale while it flows back and divided by it before
//! the update. A step that overflows is skipped and halves the scale; after as many steps without
//! one it doubles. The constants are those of PyTorch's `GradScaler`.

use serde::{Deserialize, Serialize};

/// The scale of the first step.
const FIRST: f64 = 65_536.0;
/// Steps without an overflow after which the scale doubles.
const GROWTH_STEPS: u32 = 2000;
/// The largest scale: what is above it is no power of two of f32 that a sum of gradients has room
/// for. Chosen: as Megatron-LM's largest initial scale.
const LARGEST: f64 = 4_294_967_296.0;

/// The scale of the loss, and how long it has been as it is.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossScale {
    /// What the loss is multiplied by: a power of two.
    pub scale: f64,
    /// Steps since the last change.
    pub steps: u32,
}

impl Default for LossScale {
    fn default() -> LossScale {
        LossScale { scale: FIRST, steps: 0 }
    }
}

impl LossScale {
    /// A scale to begin with.
    pub fn first(scale: f64) -> LossScale {
        LossScale { scale, steps: 0 }
    }

    /// The scale of the first step where losses are summed over so many tokens: that of a mean loss
    /// in parts of the number, to a power of two.
    pub fn of_tokens(tokens: usize) -> LossScale {
        LossScale::first((FIRST / tokens.max(1).next_power_of_two() as f64).max(1.0))
    }

    /// The scale after a step.
    pub fn after(self, overflowed: Overflow) -> LossScale {
        match overflowed {
            Overflow::Found => LossScale { scale: self.scale / 2.0, steps: 0 },
            Overflow::None if self.steps + 1 < GROWTH_STEPS => {
                LossScale { steps: self.steps + 1, ..self }
            }
            Overflow::None => LossScale { scale: (2.0 * self.scale).min(LARGEST), steps: 0 },
        }
    }
}

/// Whether a loss or a gradient of a step was not finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overflow {
    /// One was not.
    Found,
    /// All were.
    None,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scale_halves_at_once_and_doubles_after_a_while() {
        let mut scale = LossScale::default();
        for _ in 0..3 {
            scale = scale.after(Overflow::Found);
        }
        assert_eq!(scale, LossScale { scale: FIRST / 8.0, steps: 0 });
        for _ in 0..GROWTH_STEPS {
            assert_eq!(scale.scale, FIRST / 8.0);
            scale = scale.after(Overflow::None);
        }
        assert_eq!(scale, LossScale { scale: FIRST / 4.0, steps: 0 });
        let never = (0..GROWTH_STEPS * 40).fold(scale, |scale, _| scale.after(Overflow::None));
        assert_eq!(never.scale, LARGEST);
    }
}
