//! Scales of products of codes: what is added to totals at the end of a run of k.

use super::parameter::Parameter;
use super::text::{Text, line};
use crate::kernel::{Product, Scales};

/// The scales of a product, and which parameters they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScaleParameters {
    /// Of `a` and of `b`.
    pub numbers: [usize; 2],
    scales: [Scales; 2],
}

impl ScaleParameters {
    /// Those of a product, from a number on.
    pub(super) fn of(product: &Product, first: usize) -> Option<ScaleParameters> {
        product.scales.map(|scales| ScaleParameters { numbers: [first, first + 1], scales })
    }

    /// The same of a product whose operands changed places, and not the parameters.
    pub(super) fn swapped(self) -> ScaleParameters {
        let [a, b] = self.numbers;
        ScaleParameters { numbers: [b, a], ..self }
    }

    /// The scale of a row of `a` or of a column of `b`, by the number of the operand, in a run.
    pub(super) fn scale(&self, at: usize, side: &str, run: &str, of: &[Parameter]) -> String {
        let Scales { block, of_block, of_run } = self.scales[at];
        let name = of[self.numbers[at]].name();
        let block = if block == 1 { side.to_owned() } else { format!("{side} / {block}") };
        format!("{name}[{block} * {of_block} + ({run}) * {of_run}]")
    }

    /// Prints what a sum of codes is worth, as `worth`, given its row `m`, its column `n`, the
    /// last ones of the result, and its run. What is beyond the result has the scales of its end.
    /// It is the product of both scales, so that transposed products have the same bits; below
    /// 2^-149 it is zero.
    pub(super) fn print(&self, [m, n]: [usize; 2], run: &str, of: &[Parameter], text: &mut Text) {
        line!(text, "const u64 row = m < {m} ? m : {m}, column = n < {n} ? n : {n};");
        let scale = |at: usize| self.scale(at, ["row", "column"][at], run, of);
        line!(text, "const float worth = {} * {};", scale(0), scale(1));
    }
}

/// A total, with the sum of a run added to it.
pub(super) fn with_run(total: &str, sum: &str, is_scaled: bool) -> String {
    if is_scaled { format!("fma_of({sum}, worth, {total})") } else { format!("{total} + {sum}") }
}
