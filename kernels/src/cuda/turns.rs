//! Turns of the gradient of attention: in which order tiles of keys add to a tile of queries.
//!
//! A block takes a tile of keys and goes over the tiles of the queries of all heads that read them.
//! Its parts of the gradient of queries it adds to sums in a workspace. Blocks add to a tile of
//! queries in turn: those of later keys first. A counter in global memory says whose turn it is, so
//! that sums are in the order of the tiles and never depend on timing. The first to add stores, and
//! the last one rounds the sums to the type of the gradient. A tile of queries that sees no key is
//! the first or the last block's, whose part is zero.
//!
//! A block waits for blocks of smaller numbers alone, since later keys have smaller numbers. Those
//! have started before it: GPUs start blocks in the order of their numbers, though CUDA's guide
//! does not promise it. The first block that is not done waits for none, so that all end, however
//! few a GPU holds at once. Blocks go over queries in their order: under a causal mask a tile of
//! queries is then the first of the block whose turn is first, and blocks that start together do
//! not wait. Without one each is a step behind the one before.

use super::text::{Text, line};
use crate::kernel::Attention;

/// The tiles of a gradient of attention.
#[derive(Clone, Copy)]
pub(super) struct Turns<'a> {
    pub(super) attention: &'a Attention,
    /// Keys of a block.
    pub(super) keys: usize,
    /// Queries of a step.
    pub(super) queries: usize,
}

impl Turns<'_> {
    /// Tiles of keys of a head.
    pub(super) fn key_tiles(self) -> usize {
        self.attention.keys.div_ceil(self.keys)
    }

    /// Tiles of queries of a head.
    pub(super) fn query_tiles(self) -> usize {
        self.attention.queries.div_ceil(self.queries)
    }

    pub(super) fn blocks(self) -> u64 {
        let Attention { batch, kv_heads, .. } = self.attention;
        (batch * kv_heads * self.key_tiles()) as u64
    }

    /// Tiles of queries of all heads and samples.
    pub(super) fn all_query_tiles(self) -> u64 {
        let Attention { batch, heads, .. } = self.attention;
        (batch * heads * self.query_tiles()) as u64
    }

    /// Prints the block's keys, and the steps that they take.
    pub(super) fn print_block(self, text: &mut Text) {
        let (Attention { kv_heads, .. }, tiles) = (self.attention, self.key_tiles());
        line!(text, "const u64 b = blockIdx.x / {};", kv_heads * tiles);
        line!(text, "const u64 g = blockIdx.x / {tiles} % {kv_heads};");
        // Later keys start first.
        line!(text, "const i32 own = {} - (i32)(blockIdx.x % {tiles});", tiles - 1);
        line!(text, "const i64 first_row = (i64)own * {};", self.keys);
        self.print_tiles(text);
    }

    /// Prints the tiles of queries of the block's steps, from `begin` to `end`, and the heads that
    /// have them: all tiles of which [`Turns::print_turn`] says that the block has a turn.
    fn print_tiles(self, text: &mut Text) {
        let Attention { heads, group, causal, window, .. } = *self.attention;
        let (step, last, tiles) = (self.queries, self.key_tiles() - 1, self.query_tiles());
        let queries = tiles * step;
        match causal {
            true => line!(
                text,
                "const i32 begin = \
                 own == 0 ? 0 : (i32)(clamped(first_row - offset, {queries}) / {step});"
            ),
            false => line!(text, "const i32 begin = 0;"),
        }
        match window {
            0 => line!(text, "const i32 end = {tiles};"),
            _ => line!(
                text,
                "const i32 end = own == {last} ? {tiles} : \
                 (i32)(clamped(first_row - offset + {}, {queries}) / {step});",
                window + self.keys - 2 + step
            ),
        }
        line!(text, "const u32 steps_of_head = (u32)(end - begin);");
        for (name, more) in [("first_head", 0), ("end_head", 1)] {
            line!(
                text,
                "const i32 {name} = (i32)clamped(((i64)g + {more}) * {group} - head_offset, \
                 {heads});"
            );
        }
        line!(text, "const u32 steps = (u32)(end_head - first_head) * steps_of_head;");
    }

    /// Prints the head, the tile and the first query of a step.
    pub(super) fn print_position(self, step: &str, text: &mut Text) {
        let size = self.queries;
        line!(text, "const u64 h = first_head + ({step}) / steps_of_head;");
        line!(text, "const i64 tile = begin + (i64)(({step}) % steps_of_head);");
        line!(text, "const i64 first_column = tile * {size};");
    }

    /// Prints the block's `turn` of the tile of queries of a step, and `first_own`: the tile of
    /// keys whose turn is the last.
    pub(super) fn print_turn(self, text: &mut Text) {
        let Attention { causal, window, .. } = *self.attention;
        let (step, last, rows) = (self.queries, self.key_tiles() - 1, self.keys);
        let keys = self.key_tiles() * rows - 1;
        match causal {
            true => line!(
                text,
                "const i64 last_own = clamped(first_column + offset + {}, {keys}) / {rows};",
                step - 1
            ),
            false => line!(text, "const i64 last_own = {last};"),
        }
        match window {
            0 => line!(text, "const i64 first_own = 0;"),
            _ => line!(
                text,
                "const i64 first_own = \
                 clamped(first_column + offset + 1 - {window}, {keys}) / {rows};"
            ),
        }
        line!(text, "const u32 turn = (u32)(last_own - own);");
    }
}
