//! Ops that are several launches.

use std::ops::Range;

use ir::op::Convolution;
use ir::program::Ref;
use ir::{DType, Node, ValueId};
use kernels::Kernel;
use kernels::kernel::{Copy, CopyLoop, Line, Lines, LoopAB, LoopABC, LoopAC, LoopBC, Product};

use super::Lower;
use crate::catalogue::{look_up, row_major};
use crate::refusal::Refusal;

impl Lower<'_> {
    fn sizes(&self, value: ValueId) -> Result<Vec<usize>, Refusal> {
        self.ty(value).sizes().ok_or_else(|| "a local size is open".into())
    }

    pub(super) fn scratch(&mut self, name: &str, elements: usize, dtype: DType) -> Ref {
        self.locals.push((name.to_owned(), elements as u64 * dtype.size()));
        Ref::Local(self.locals.len() as u32 - 1)
    }

    /// Operands side by side.
    pub(super) fn concatenate(&mut self, node: &Node, dim: usize) -> Result<(), Refusal> {
        let whole = row_major(&self.sizes(node.result())?);
        let (to, mut first) = (self.home(node.result()), 0);
        for operand in &node.operands {
            let sizes = self.sizes(*operand)?;
            let source = row_major(&sizes);
            let loops = (0..sizes.len()).map(|at| CopyLoop {
                size: sizes[at],
                source: source[at],
                target: whole[at],
            });
            let copy = Copy {
                loops: loops.collect(),
                source_offset: 0,
                target_offset: first * whole[dim],
                zero_first: 0,
                dtype: self.ty(*operand).dtype,
            };
            first += sizes[dim];
            if !sizes.contains(&0) {
                let from = self.home(*operand);
                self.launch(Kernel::Copy(copy), vec![from], vec![to]);
            }
        }
        Ok(())
    }

    /// A copy of the table, then the rows that are replaced.
    pub(super) fn replace(&mut self, node: &Node, dim: usize, start: i64) -> Result<(), Refusal> {
        let [x, ids, updates] = node.operands[..] else {
            return Err("a scatter has three operands".into());
        };
        let table = look_up(self.ty(x), self.ty(ids), dim, start, true)?;
        let (from, to) = (self.home(x), self.home(node.result()));
        self.copy(x, to, from, false);
        let inputs = vec![self.home(ids), self.home(updates)];
        self.launch(Kernel::Replace(table), inputs, vec![to]);
        Ok(())
    }

    /// Lines along several dims: dims that lie side by side are one.
    pub(super) fn along(&mut self, node: &Node, dims: &[usize], how: Line) -> Result<(), Refusal> {
        let x = node.operands[0];
        let dtype = self.ty(x).dtype;
        let mut sizes = self.sizes(x)?;
        let (mut from, to) = (self.home(x), self.home(node.result()));
        let runs = runs(dims);
        if runs.is_empty() {
            self.copy(x, to, from, false);
        }
        // The last one first, so that the dims of the others stay where they are.
        for (at, run) in runs.into_iter().enumerate().rev() {
            let extent: usize = sizes[run.clone()].iter().product();
            let result = if how == Line::Prod { 1 } else { extent };
            let outer: usize = sizes[..run.start].iter().product();
            let inner: usize = sizes[run.end..].iter().product();
            if how == Line::Prod {
                sizes.drain(run);
            }
            let target = match at {
                0 => to,
                _ => self.scratch("part", outer * result * inner, dtype),
            };
            let lines = Lines { outer, extent, result, inner, how, dtype };
            self.launch(Kernel::Lines(lines), vec![from], vec![target]);
            from = target;
        }
        Ok(())
    }

    /// A launch of [`Lower::convolution`].
    pub(super) fn convolve(&mut self, node: &Node, c: &Convolution) -> Result<(), Refusal> {
        let (product, operands) = self.convolution(node, c)?;
        let to = self.home(node.result());
        self.launch(Kernel::Product(product), operands.to_vec(), vec![to]);
        Ok(())
    }

    /// A matrix product for each group, of the kernels and the image, which it reads at strides
    /// that overlap; where zeros lie around or between elements, of a copy that has them.
    ///
    /// Legend: N samples, g groups, C and O channels of one, X, P, K, Y points of the image, of the
    /// copy, of a kernel and of the result.
    pub(super) fn convolution(
        &mut self,
        node: &Node,
        c: &Convolution,
    ) -> Result<(Product, [Ref; 2]), Refusal> {
        let [x, w] = node.operands[..] else {
            return Err("a convolution has two operands".into());
        };
        let (image, kernel) = (self.sizes(x)?, self.sizes(w)?);
        let result = self.sizes(node.result())?;
        let (mut from, mut padded) = (self.home(x), image.clone());
        if [&c.before, &c.after].into_iter().flatten().any(|n| *n != 0)
            || c.spread.iter().any(|s| *s != 1)
        {
            let copy;
            (copy, padded) = pad(c, &image, self.ty(x).dtype)?;
            let to = self.scratch("padded", copy.zero_first, copy.dtype);
            self.launch(Kernel::Copy(copy), vec![from], vec![to]);
            from = to;
        }
        let points = |of: &[usize]| of[2..].iter().product::<usize>();
        let (p, k, y) = (points(&padded), points(&kernel), points(&result));
        let groups = image[1].checked_div(kernel[1]).unwrap_or(1);
        let (depth, outputs) = (kernel[1], kernel[0].checked_div(groups).unwrap_or(0));
        let (of_p, of_k, of_y) = (row_major(&padded), row_major(&kernel), row_major(&result));
        let spatial = || 2..image.len();
        let mut n = vec![LoopBC { size: image[0], b: image[1] * p, c: result[1] * y }];
        n.extend(spatial().map(|at| LoopBC {
            size: result[at],
            b: c.stride[at - 2] * of_p[at],
            c: of_y[at],
        }));
        let mut sums = vec![LoopAB { size: depth, a: k, b: p }];
        sums.extend(spatial().map(|at| LoopAB {
            size: kernel[at],
            a: of_k[at],
            b: c.dilation[at - 2] * of_p[at],
        }));
        let group = LoopABC { size: groups, a: outputs * depth * k, b: depth * p, c: outputs * y };
        let product = Product {
            batch: if groups > 1 { vec![group] } else { Vec::new() },
            m: vec![LoopAC { size: outputs, a: depth * k, c: y }],
            n,
            k: sums,
            accumulate: false,
            dtype: self.ty(x).dtype,
        };
        Ok((product, [self.home(w), from]))
    }
}

/// The image with zeros around and between its elements, and its dims then.
fn pad(c: &Convolution, image: &[usize], dtype: DType) -> Result<(Copy, Vec<usize>), String> {
    let number = |n: usize| i64::try_from(n).map_err(|_| "a size is too large".to_owned());
    let mut padded = image[..2].to_vec();
    // For each spatial dim, the first element that is kept, how many are, and where it stands.
    let mut kept = Vec::new();
    for (at, size) in image[2..].iter().enumerate() {
        let (size, spread) = (number(*size)?, number(c.spread[at])?);
        let whole = (size - 1) * spread + 1 + c.before[at] + c.after[at];
        let first = round_up((-c.before[at]).max(0), spread);
        let end = round_up((whole - c.before[at]).max(0), spread).min(size);
        let count = (end - first).max(0);
        let place = (first * spread + c.before[at]).max(0);
        padded.push(usize::try_from(whole).map_err(|_| "pads cut more than there is")?);
        kept.push((first as usize, count as usize, place as usize));
    }
    let (source, target) = (row_major(image), row_major(&padded));
    let mut copy = Copy {
        loops: (0..2)
            .map(|at| CopyLoop { size: image[at], source: source[at], target: target[at] })
            .collect(),
        source_offset: 0,
        target_offset: 0,
        zero_first: padded.iter().product(),
        dtype,
    };
    for (at, (first, count, place)) in kept.into_iter().enumerate() {
        let (source, target) = (source[at + 2], target[at + 2]);
        copy.source_offset += first * source;
        copy.target_offset += place * target;
        copy.loops.push(CopyLoop { size: count, source, target: target * c.spread[at] });
    }
    Ok((copy, padded))
}

/// Ascending dims, those that follow each other together.
fn runs(dims: &[usize]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for dim in dims {
        match runs.last_mut() {
            Some(run) if run.end == *dim => run.end += 1,
            _ => runs.push(*dim..dim + 1),
        }
    }
    runs
}

/// `n / by` rounded up, of numbers that are not negative.
fn round_up(n: i64, by: i64) -> i64 {
    (n + by - 1) / by
}
