//! Ops that are several launches.

use std::ops::Range;

use ir::convolution::DimOrder;
use ir::op::{Convolution, Operands, Windows};
use ir::program::Ref;
use ir::{DType, Node, ValueId};
use kernels::kernel::{
    Copy, CopyLoop, Line, Lines, LoopAB, LoopABC, LoopAC, LoopBC, Product, StoredTypes, Tiling,
};
use kernels::{Border, Kernel, Offset};

use super::Lower;
use crate::catalogue::{look_up, reduction, row_major};
use crate::pool::Pool;
use crate::refusal::Refusal;
use crate::scalars::Scalars;

impl Lower<'_> {
    fn sizes(&self, value: ValueId) -> Result<Vec<usize>, Refusal> {
        self.ty(value).sizes().ok_or_else(|| "a local size is open".into())
    }

    pub(super) fn scratch(&mut self, name: &str, elements: usize, dtype: DType) -> Ref {
        Ref::Local(self.local(name.to_owned(), elements as u64 * dtype.size()))
    }

    /// Operands side by side: computed there where each is one run of bytes, else copied.
    pub(super) fn concatenate(&mut self, node: &Node, dim: usize) -> Result<(), Refusal> {
        let sizes = self.sizes(node.result())?;
        let (whole, is_one_run) = (row_major(&sizes), sizes[..dim].iter().all(|size| *size == 1));
        let (to, mut first) = (self.home(node.result()), 0);
        let lies: Vec<Ref> = node.operands.iter().map(|operand| self.whole(*operand)).collect();
        for (operand, own) in node.operands.iter().zip(&lies) {
            let sizes = self.sizes(*operand)?;
            let start = (first * whole[dim]) as u64 * self.ty(*operand).dtype.size();
            // What stands there twice is copied from elsewhere.
            let is_once = lies.iter().filter(|other| *other == own).count() == 1;
            if is_one_run && is_once && self.put_within(*operand, to, start) {
                first += sizes[dim];
                continue;
            }
            let source = row_major(&sizes);
            let loops = (0..sizes.len()).map(|at| CopyLoop {
                size: sizes[at],
                source: source[at],
                target: whole[at],
            });
            let copy = Copy {
                loops: loops.collect(),
                source_offset: Offset::ZERO,
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
        let mut scalars = Scalars::default();
        let table = look_up(self.ty(x), self.ty(ids), (dim, start), true, &mut scalars)?;
        let (from, to) = (self.home(x), self.home(node.result()));
        self.copy(x, to, from);
        let inputs = vec![self.home(ids), self.home(updates)];
        self.launch_with(Kernel::Replace(table), scalars, inputs, vec![to]);
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
            self.copy(x, to, from);
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

    /// One number for each window.
    pub(super) fn pool(&mut self, node: &Node, pool: Pool) -> Result<(), Refusal> {
        let Windows { dim, size, stride, dilation } = pool.windows;
        let x = self.function.nodes[pool.from].operands[0];
        let sizes = self.sizes(x)?;
        let lines = Lines {
            outer: sizes[..dim].iter().product(),
            extent: sizes[dim],
            result: self.sizes(node.result())?[dim],
            inner: sizes[dim + 1..].iter().product(),
            how: Line::Pool { op: reduction(pool.combiner), size, stride, dilation },
            dtype: self.ty(x).dtype,
        };
        let (from, to) = (self.home(x), self.home(node.result()));
        self.launch(Kernel::Lines(lines), vec![from], vec![to]);
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
    /// that overlap, and zeros around and between its elements.
    ///
    /// Legend: N samples, g groups, C and O channels of one, X, K, Y points of the image, of a
    /// kernel and of the result.
    pub(super) fn convolution(
        &mut self,
        node: &Node,
        c: &Convolution,
    ) -> Result<(Product, [Ref; 2]), Refusal> {
        let [x, w] = node.operands[..] else {
            return Err("a convolution has two operands".into());
        };
        let [in_x, in_w, in_y] = &c.orders;
        // Sizes and strides of dims in the usual order, however they lie.
        let lie = |order: &DimOrder, sizes: Vec<usize>| {
            (order.usual(&sizes), order.usual(&row_major(&sizes)))
        };
        let (image, of_x) = lie(in_x, self.sizes(x)?);
        let (kernel, of_k) = lie(in_w, self.sizes(w)?);
        let (result, of_y) = lie(in_y, self.sizes(node.result())?);
        let groups = image[1].checked_div(kernel[1]).unwrap_or(1);
        let (depth, outputs) = (kernel[1], kernel[0].checked_div(groups).unwrap_or(0));
        let mut n = vec![LoopBC { size: image[0], b: of_x[0], c: of_y[0] }];
        let mut sums = vec![LoopAB { size: depth, a: of_k[1], b: of_x[1] }];
        let mut borders = Vec::new();
        for at in 2..image.len() {
            let border = Border {
                n: at - 1,
                k: at - 1,
                stride: c.stride[at - 2],
                dilation: c.dilation[at - 2],
                before: c.before[at - 2],
                spread: c.spread[at - 2],
                size: image[at],
                step: of_x[at],
            };
            let moves = [c.before[at - 2], c.after[at - 2]] != [0, 0] || border.spread != 1;
            let is_window = kernel[at] != 1 || moves;
            let b = if is_window { 0 } else { border.stride * of_x[at] };
            n.push(LoopBC { size: result[at], b, c: of_y[at] });
            sums.push(LoopAB { size: kernel[at], a: of_k[at], b: 0 });
            borders.extend(is_window.then_some(border));
        }
        let group = LoopABC {
            size: groups,
            a: outputs * of_k[0],
            b: depth * of_x[1],
            c: outputs * of_y[1],
        };
        let product = Product {
            batch: if groups > 1 { vec![group] } else { Vec::new() },
            m: vec![LoopAC { size: outputs, a: of_k[0], c: of_y[1] }],
            n,
            k: sums,
            accumulate: false,
            dtype: self.ty(x).dtype.accumulation(),
            stored: StoredTypes { a: self.ty(w).dtype, ..StoredTypes::all(self.ty(x).dtype) },
            operands: Operands::Exact,
            borders,
            scales: None,
            tiling: Tiling::default(),
        };
        Ok((product, [self.home(w), self.home(x)]))
    }
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
