//! Operands of products that are copied first, to rows that TMA can copy.
//!
//! TMA copies rows that start at multiples of 16 bytes. Others, such as those of a vocabulary of
//! 50,257, go through the registers of one warpgroup, which is some times slower; where several
//! block tiles read the operand, a copy of it to a workspace with longer rows costs less.
//! Results have the same bits.

use super::moves;
use crate::cuda::function::Functions;
use crate::cuda::loops::Loops;
use crate::cuda::mapped::merged;
use crate::cuda::parameter::{Buffer, Parameter};
use crate::cuda::warpgroup::{StagedOperand, WarpgroupTile};
use crate::kernel::{Copy, CopyLoop, Product};
use crate::offset::Offset;

/// Fewest block tiles that read each element of an operand that is copied. Chosen: a warpgroup
/// copies about eight times as slowly as the memory of an H200 is.
const READERS: usize = 4;
/// Bytes at whose multiples rows of a copy start.
const CHUNK: usize = 16;

/// A product of operands that can be copied by TMA where that pays, with the copies before it.
pub(super) fn aligned(
    what: &str,
    product: &Product,
    operands: [Parameter; 2],
    all: &mut Functions,
) -> (Product, [Parameter; 2]) {
    let tile = WarpgroupTile::of(product, [None, None]);
    let (mut product, mut operands) = (product.clone(), operands);
    if tile.is_transposed || !product.borders.is_empty() {
        return (product, operands);
    }
    let [_, along_m, along_n] = tile.tiles();
    for (at, readers) in [along_n, along_m].into_iter().enumerate() {
        let is_copied = matches!(tile.operands[at], StagedOperand::Copied(..));
        if !is_copied || readers < READERS {
            continue;
        }
        let Some(copied) = CopiedOperand::of(&product, at) else { continue };
        let source = operands[at];
        let buffer = Buffer::Workspace(all.workspaces.len());
        all.workspaces.push(copied.len as u64 * source.dtype.size());
        let workspace = Parameter { buffer, dtype: source.dtype };
        let copy = Copy {
            loops: copied.loops.clone(),
            source_offset: Offset::ZERO,
            target_offset: 0,
            zero_first: 0,
            dtype: source.dtype,
        };
        let name = ["first", "second"][at];
        moves::copy(&format!("{what}: {name} operand"), &copy, [source, workspace], all);
        copied.replace(&mut product, at);
        operands[at] = workspace;
    }
    (product, operands)
}

/// How an operand lies in a workspace.
struct CopiedOperand {
    /// Elements.
    len: usize,
    loops: Vec<CopyLoop>,
    /// Strides of the loops over batch, over m or n, and over k.
    strides: [Vec<usize>; 3],
}

impl CopiedOperand {
    /// The first or second operand of a product: by rows of what it is contiguous along, else of k;
    /// none where its rows cannot be told from its loops.
    fn of(product: &Product, at: usize) -> Option<CopiedOperand> {
        let loops = Loops::of(product);
        let (batch, k) = (&loops.batch[at], &loops.k[at]);
        let side = if at == 0 { &loops.m[0] } else { &loops.n[0] };
        let ([side_size, side_stride], [k_size, k_stride]) = (merged(side)?, merged(k)?);
        let by_side = side_stride == 1 && k_stride != 1;
        let [outer, inner] = match by_side {
            true => [[k_size, k_stride], [side_size, side_stride]],
            false => [[side_size, side_stride], [k_size, k_stride]],
        };
        let bytes = [product.stored.a, product.stored.b][at].size() as usize;
        let row = inner[0].next_multiple_of(CHUNK / bytes);
        let mut len = row * outer[0];
        let mut copied = vec![
            CopyLoop { size: outer[0], source: outer[1], target: row },
            CopyLoop { size: inner[0], source: inner[1], target: 1 },
        ];
        let mut strides = vec![0; batch.len()];
        for (place, [size, stride]) in batch.iter().enumerate().rev() {
            if *size > 1 && *stride > 0 {
                strides[place] = len;
                copied.insert(0, CopyLoop { size: *size, source: *stride, target: len });
                len *= size;
            }
        }
        let scaled = |of: &[[usize; 2]], merged: usize, new: usize| {
            let stride = |[size, stride]: &[usize; 2]| match size {
                1 => 0,
                _ => stride / merged.max(1) * new,
            };
            of.iter().map(stride).collect()
        };
        let [of_side, of_k] = if by_side { [1, row] } else { [row, 1] };
        let strides = [strides, scaled(side, side_stride, of_side), scaled(k, k_stride, of_k)];
        Some(CopiedOperand { len, loops: copied, strides })
    }

    /// Has a product read the workspace.
    fn replace(&self, product: &mut Product, at: usize) {
        let [batch, side, k] = &self.strides;
        for (l, stride) in product.batch.iter_mut().zip(batch) {
            *(if at == 0 { &mut l.a } else { &mut l.b }) = *stride;
        }
        for (l, stride) in product.k.iter_mut().zip(k) {
            *(if at == 0 { &mut l.a } else { &mut l.b }) = *stride;
        }
        if at == 0 {
            product.m.iter_mut().zip(side).for_each(|(l, stride)| l.a = *stride);
        } else {
            product.n.iter_mut().zip(side).for_each(|(l, stride)| l.b = *stride);
        }
    }
}
