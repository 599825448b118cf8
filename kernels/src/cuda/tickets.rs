//! Tickets of products whose slices of k one launch sums and adds.
//!
//! Each slice of a block tile is summed by a block of its own, which stores it to a workspace and
//! then takes a ticket of the tile. The block that takes the last one sees what the others have
//! stored, and adds all slices in ascending order: bits depend on no order of blocks. No block
//! waits for another. The last ticket sets its counter to zero, which it has to be when a launch
//! starts: counters lie in a memory of their own.

use ir::DType;

use super::parameter::{Buffer, Parameter};
use super::text::{Text, line};
use crate::kernel::{Family, Product};

/// The parameter that is the counters of a function, behind the workspace: there is one where a
/// skinny product has several slices. Those of wide products are added by a function of their own,
/// with more threads.
pub(super) fn tickets(product: &Product) -> Option<usize> {
    let Product { tiling, .. } = product;
    (tiling.family == Family::Skinny && tiling.split > 1).then_some(4)
}

/// The counters.
pub(super) const COUNTERS: Parameter = Parameter { buffer: Buffer::Tickets, dtype: DType::U32 };

/// The ticket that a thread of each block takes.
pub(super) struct Ticket<'a> {
    pub(super) product: &'a Product,
    /// Tiles of the result.
    pub(super) tiles: usize,
}

impl Ticket<'_> {
    /// Prints the end of the threads of all blocks of a tile but the last one, which all threads
    /// that store a slice come to: given how they meet, how one tells the others, up to its
    /// argument, and which one it is.
    pub(super) fn print(&self, [meet, tell, thread]: [&str; 3], text: &mut Text) {
        let (tiles, split) = (self.tiles, self.product.tiling.split);
        let counter = format!("{} + blockIdx.x % {tiles}", COUNTERS.name());
        line!(text, "{meet};");
        line!(text, "const bool is_last = {thread} && take_ticket({counter}, {split});");
        line!(text, "if (!{tell}is_last)) return;");
    }

    /// Opens the loop over slices. All elements of a thread are added to in each: their loads are
    /// under way together.
    pub(super) fn open_slices(&self, text: &mut Text) {
        line!(text, "UNROLL_4");
        line!(text, "for (u32 of = 0; of < {}; of += 1) {{", self.product.tiling.split);
    }

    /// Prints the addition of a slice of an element to `sum`, given the workspace and the place of
    /// the element in a slice.
    pub(super) fn print_add(&self, sum: &str, [workspace, place]: [&str; 2], text: &mut Text) {
        let [batch, m, n, _] = self.product.sizes();
        let size = batch * m * n;
        line!(text, "{sum} = (of > 0 ? {sum} : 0) + {workspace}[of * {size}ULL + {place}];");
    }
}
