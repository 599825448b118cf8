//! Attention of BF16 and F16 on tensor cores, by `mma.sync` (sm_80 and later): FlashAttention-2
//! (Dao, 2023).
//!
//! Legend: that of `attention`.
//!
//! A block of four warps takes a tile of queries, whose fragments stay in registers, and goes over
//! tiles of keys and values, double-buffered in shared memory by `cp.async`. Each warp
//! has 16 or 32 rows of the scores `S = Q Kᵀ`. Their maximum and the sum of `P = exp(S − max)` are
//! kept in registers and rescaled from one tile to the next (online softmax); `P` is rounded to the
//! type of the values before it is multiplied by them, the sum is that of the unrounded ones.
//! Tiles of keys start at multiples of their size, and keys that a query does not see weigh zero:
//! the bits of a query depend on no other query.
//!
//! Versions:
//! 1. exponentials by `ex2.approx`; one barrier per tile of keys; K and V are waited for together;
//!    the result is stored by 4 bytes.
//! 2. quads exchange pairs of columns, and store whole sectors (`quads`).

use std::fmt;

use ir::DType;

use super::attention::{
    Names, Part, is_together, print_head, print_kept, print_offset, print_scalars, row_of,
};
use super::parameter::Parameter;
use super::quads::QuadStore;
use super::shared::{Fragments, Operand, SharedTile, copy};
use super::text::{Text, element, line, number};
use crate::kernel::Attention;

/// Warps of a block.
pub(super) const WARPS: usize = 4;
/// Threads of a block.
pub(super) const THREADS: usize = 32 * WARPS;
/// Elements of shared memory: all that it has without a launch attribute.
pub(super) const SHARED_ELEMENTS: usize = 48 * 1024 / 2;
/// Fewest queries. Chosen: one tile of `mma.sync`, below which the tile is mostly empty.
const QUERIES_MIN: usize = 16;
/// Elements of a vector of 16 bytes.
pub(super) const VECTOR: usize = 8;

/// The key of a tile of a thread's first score, and how far others of it are from there.
const KEYS: [&str; 2] = ["lane % 4 * 2", "n * 8 + e % 2"];

/// The forward pass, each tile of queries of a head by one block.
#[derive(Clone, Debug, PartialEq)]
pub struct FlashTile {
    /// What is computed.
    pub attention: Attention,
    /// Queries of a tile: 64 or 128.
    pub query_tile: usize,
    /// Keys of a tile.
    pub key_tile: usize,
}

/// Whether a forward pass runs on tensor cores.
pub(super) fn fits(a: &Attention) -> bool {
    let is_narrow = matches!(a.dtype, DType::BF16 | DType::F16);
    let is_aligned = |strides: [usize; 3]| strides.iter().all(|s| s.is_multiple_of(VECTOR));
    is_narrow
        && a.dim.is_multiple_of(16)
        && (16..=128).contains(&a.dim)
        && [a.q, a.k, a.v, a.out].into_iter().all(is_aligned)
        && a.queries >= QUERIES_MIN
        && a.keys > 0
}

/// Whether scores are scaled within the exponent: nothing else is done to them, and the largest is
/// the largest product.
pub(super) fn is_plain(a: &Attention) -> bool {
    a.softcap == 0.0 && a.bias.is_none() && a.scale > 0.0
}

/// The factor of scores in the exponent of two.
pub(super) fn exponent_factor(a: &Attention) -> String {
    let scale = if is_plain(a) { a.scale } else { 1.0 };
    number(DType::F32, scale * std::f64::consts::LOG2_E)
}

/// Whether query `s` sees key `j`, as an expression; documents are read only of what is there.
pub(super) fn visible(a: &Attention, names: &Names) -> String {
    let mut visible = format!("j < {}", a.keys);
    if a.causal {
        visible += " && j <= s + offset";
    }
    if a.window > 0 {
        visible += &format!(" && j > s + offset - {}", a.window);
    }
    if let Some(together) = is_together(a, names) {
        visible += &format!(" && (s >= {} || {together})", a.queries);
    }
    visible
}

/// Prints the copy of a tile of rows of `dim` elements, given the address of the first, the
/// distance of rows and how many there are: zeros beyond.
pub(super) fn print_copy(
    dim: usize,
    tile: SharedTile,
    (from, stride): (&str, usize),
    [to, count]: [&str; 2],
    text: &mut Text,
) {
    tile.open_copies([dim, VECTOR, THREADS], text);
    line!(text, "const bool is_there = (i64)to_row < (i64)({count});");
    let to = format!("{to} + {}", tile.offset("to_row", "to_column"));
    let from = format!("{from} + (is_there ? to_row * {stride}ULL + to_column : 0)");
    copy(VECTOR, [&to, &from, "is_there"], text);
    text.end();
}

/// Prints `score` of query `s` and key `j`, scaled, capped and biased, and before it `bound`: the
/// capped score over the cap.
pub(super) fn print_score(a: &Attention, names: &Names, product: &str, text: &mut Text) {
    let Attention { scale, softcap, bias, queries, keys, .. } = a;
    let constant = |x: f64| number(DType::F32, x);
    line!(text, "float score = {product} * {};", constant(*scale));
    if *softcap != 0.0 {
        let (cap, inverse) = (constant(*softcap), constant(1.0 / softcap));
        line!(text, "const float bound = tanh_approx(score * {inverse});");
        line!(text, "score = {cap} * bound;");
    }
    if let (Some([b, h, s]), Some(name)) = (bias, &names.bias) {
        let place = format!("b * {b} + h * {h} + (u64)s * {s} + (u64)j");
        line!(text, "if (s < {queries} && j < {keys}) score += Load<float>::of({name}[{place}]);");
    }
}

/// Prints the batch `b`, the head `h` and the first query of the tile of a block.
pub(super) fn print_tile_of_queries(a: &Attention, tile: usize, text: &mut Text) {
    let (heads, tiles) = (a.heads, a.queries.div_ceil(tile));
    line!(
        text,
        "const u64 b = blockIdx.x / {}, h = blockIdx.x / {tiles} % {heads};",
        heads * tiles
    );
    // Under a causal mask the last tiles take longest, and start first.
    let number = format!("blockIdx.x % {tiles}");
    let number = if a.causal { format!("({} - {number})", tiles - 1) } else { number };
    line!(text, "const u64 first_query = (u64){number} * {tile};");
}

/// Prints the keys from `begin` to `end` that some query of the block sees, the first rounded down
/// to a multiple of the tile, those from `all_begin` to `all_end` that all see, and how many tiles
/// of keys there are.
pub(super) fn print_visible_keys(
    a: &Attention,
    [query_tile, key_tile]: [usize; 2],
    text: &mut Text,
) {
    let Attention { queries, keys, causal, window, .. } = *a;
    if causal {
        let last = queries - 1;
        line!(
            text,
            "const u64 last_query = first_query + {0} < {last} ? first_query + {0} : {last};",
            query_tile - 1
        );
        line!(text, "const i64 all_end = clamped((i64)first_query + offset + 1, {keys});");
        line!(text, "const i64 end = clamped((i64)last_query + offset + 1, {keys});");
    } else {
        line!(text, "const i64 all_end = {keys}, end = {keys};");
    }
    if window > 0 {
        line!(
            text,
            "const i64 all_begin = clamped((i64)last_query + offset + 1 - {window}, {keys});"
        );
        line!(
            text,
            "const i64 begin = clamped((i64)first_query + offset + 1 - {window}, end) / {key_tile} \
             * {key_tile};"
        );
    } else {
        line!(text, "const i64 all_begin = 0, begin = 0;");
    }
    line!(text, "const u32 steps = (u32)((end - begin + {}) / {key_tile});", key_tile - 1);
}

impl FlashTile {
    /// The tiles of an attention that fits.
    pub(super) fn new(a: &Attention) -> FlashTile {
        // Two stages of K and V are what static shared memory has room for, and Q is copied into
        // the second. With 32 rows of scores a warp has no registers left for more than the
        // softmax.
        let key_tile = if a.dim > 64 { 32 } else { 64 };
        let is_small = a.dim > 64 || a.queries <= 64 || !is_plain(a) || a.dropout.is_some();
        let query_tile = if is_small { 64 } else { 128 };
        let tile = FlashTile { attention: a.clone(), query_tile, key_tile };
        assert!(4 * tile.key_tile().elements() <= SHARED_ELEMENTS, "the stages fit");
        assert!(tile.query_tile().elements() <= 2 * tile.key_tile().elements(), "Q fits a stage");
        tile
    }

    /// Tiles of queries of a head.
    fn tiles(&self) -> usize {
        self.attention.queries.div_ceil(self.query_tile)
    }

    pub(super) fn blocks(&self) -> u64 {
        (self.attention.batch * self.attention.heads * self.tiles()) as u64
    }

    pub(super) fn query_tile(&self) -> SharedTile {
        SharedTile { rows: self.query_tile, columns: self.attention.dim.next_power_of_two() }
    }

    pub(super) fn key_tile(&self) -> SharedTile {
        SharedTile { rows: self.key_tile, columns: self.attention.dim.next_power_of_two() }
    }

    /// Rows of scores of a warp, in tiles of 16.
    pub(super) fn row_tiles(&self) -> usize {
        self.query_tile / WARPS / 16
    }

    fn memory(&self) -> &'static str {
        element(self.attention.dtype)
    }

    pub(super) fn print(&self, parameters: &[Parameter], text: &mut Text) {
        let a = &self.attention;
        let names = Names::of(a, Part::Forward, parameters);
        let (memory, stage) = (self.memory(), self.key_tile().elements());
        line!(text, "SHARED({memory}, stages, {});", 4 * stage);
        print_scalars(a, &names, text);
        self.print_block(&names, text);
        self.print_queries(text);
        let (rows, columns) = (self.row_tiles(), a.dim / 8);
        let lowest = number(DType::F32, f64::NEG_INFINITY);
        line!(text, "float acc[{rows}][{columns}][4] = {{}};");
        line!(text, "float row_max[{rows}][2], row_sum[{rows}][2] = {{}};");
        Self::open_rows(rows, text);
        line!(text, "row_max[i][r] = {lowest};");
        Self::close_rows(text);
        line!(text, "NO_UNROLL");
        line!(text, "for (u32 step = 0; step < steps; step += 1) {{");
        line!(text, "cp_async_wait<0>();");
        line!(text, "sync_block();");
        line!(text, "if (step + 1 < steps) {{");
        self.print_copies("step + 1", text);
        text.end();
        line!(text, "cp_async_commit();");
        line!(text, "const {memory}* k_tile = stages + step % 2 * {};", 2 * stage);
        line!(text, "const {memory}* v_tile = k_tile + {stage};");
        line!(text, "const i64 first_key = begin + (i64)step * {};", self.key_tile);
        self.print_scores(&names, text);
        self.print_softmax(text);
        self.print_weighted_values(text);
        text.end();
        self.print_epilogue(&names, text);
    }

    /// Prints the block's queries, and the keys that they see.
    fn print_block(&self, names: &Names, text: &mut Text) {
        let (a, memory) = (&self.attention, self.memory());
        line!(text, "const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;");
        print_tile_of_queries(a, self.query_tile, text);
        print_offset(names, text);
        print_head(a, "h", text);
        line!(text, "const {memory}* q = {};", row_of(&names.q, a.q, "b", "first_query", "h"));
        line!(text, "const {memory}* k = {};", row_of(&names.k, a.k, "b", "0", "g"));
        line!(text, "const {memory}* v = {};", row_of(&names.v, a.v, "b", "0", "g"));
        print_visible_keys(a, [self.query_tile, self.key_tile], text);
    }

    /// Prints the copies of Q and the first tiles, and loads the fragments of Q.
    fn print_queries(&self, text: &mut Text) {
        let a = &self.attention;
        let (tile, rows, memory) = (self.query_tile(), self.row_tiles(), self.memory());
        line!(text, "{memory}* q_tile = stages + {};", 2 * self.key_tile().elements());
        let count = format!("{} - first_query", a.queries);
        print_copy(a.dim, tile, ("q", a.q[1]), ["q_tile", &count], text);
        line!(text, "cp_async_commit();");
        line!(text, "if (steps > 0) {{");
        self.print_copies("0", text);
        text.end();
        line!(text, "cp_async_commit();");
        line!(text, "cp_async_wait<1>();");
        line!(text, "sync_block();");
        line!(text, "u32 q_fragments[{}][{rows}][4];", a.dim / 16);
        line!(text, "UNROLL");
        line!(text, "for (u32 d = 0; d < {}; d += 16) {{", a.dim);
        let fragments = Fragments {
            operand: Operand::A,
            k_major: true,
            registers: ("q_fragments[d / 16]", rows),
        };
        let first = format!("warp * {}", 16 * rows);
        fragments.print_ldmatrix(tile, ["q_tile", &first, "d"], text);
        text.end();
    }

    /// Prints the copies of the tiles of K and V of a step.
    fn print_copies(&self, step: &str, text: &mut Text) {
        let (a, tile, size) = (&self.attention, self.key_tile(), self.key_tile);
        line!(text, "const i64 next_key = begin + (i64)({step}) * {size};");
        let count = format!("{} - next_key", a.keys);
        let stage = format!("stages + ({step}) % 2 * {}", 2 * tile.elements());
        for (name, strides, offset) in [("k", a.k, 0), ("v", a.v, tile.elements())] {
            let from = format!("{name} + next_key * {}", strides[1]);
            let to = format!("{stage} + {offset}");
            print_copy(a.dim, tile, (&from, strides[1]), [&to, &count], text);
        }
    }

    /// Prints `scores`, those of hidden keys minus infinity.
    fn print_scores(&self, names: &Names, text: &mut Text) {
        let (a, rows) = (&self.attention, self.row_tiles());
        line!(text, "float scores[{rows}][{}][4] = {{}};", self.key_tile / 8);
        line!(text, "UNROLL");
        line!(text, "for (u32 d = 0; d < {}; d += 16) {{", a.dim);
        line!(text, "u32 k_fragments[{}][4];", self.key_tile / 16);
        let registers = ("k_fragments", self.key_tile / 16);
        let fragments = Fragments { operand: Operand::B, k_major: true, registers };
        fragments.print_ldmatrix(self.key_tile(), ["k_tile", "0", "d"], text);
        line!(text, "warp_mma<{}>(scores, q_fragments[d / 16], k_fragments);", self.memory());
        text.end();
        if !is_plain(&self.attention) {
            self.open_scores(text);
            print_score(a, names, "scores[i][n][e]", text);
            line!(text, "scores[i][n][e] = score;");
            (0..3).for_each(|_| text.end());
        }
        match a.documents.is_some() {
            true => line!(text, "{{"),
            false => line!(
                text,
                "if (first_key < all_begin || first_key + {} > all_end) {{",
                self.key_tile
            ),
        }
        self.open_scores(text);
        let (visible, lowest) = (visible(a, names), number(DType::F32, f64::NEG_INFINITY));
        line!(text, "if (!({visible})) scores[i][n][e] = {lowest};");
        (0..4).for_each(|_| text.end());
    }

    /// Opens the loops over a thread's scores, with the query `s` and the key `j` of each.
    fn open_scores(&self, text: &mut Text) {
        let (rows, keys) = (self.row_tiles(), self.key_tile / 8);
        for (name, count) in [("i", rows), ("n", keys), ("e", 4)] {
            line!(text, "UNROLL");
            line!(text, "for (u32 {name} = 0; {name} < {count}; {name} += 1) {{");
        }
        line!(text, "const i64 s = (i64)first_query + {};", self.row("e / 2"));
        line!(text, "const i64 j = first_key + {} + {};", KEYS[0], KEYS[1]);
    }

    /// The row of the tile of queries of a thread's row `r` of 16 rows `i`.
    fn row(&self, r: &str) -> String {
        format!("warp * {} + i * 16 + lane / 4 + {r} * 8", 16 * self.row_tiles())
    }

    /// Opens the loops over a thread's rows.
    fn open_rows(rows: usize, text: &mut Text) {
        for (name, count) in [("i", rows), ("r", 2)] {
            line!(text, "UNROLL");
            line!(text, "for (u32 {name} = 0; {name} < {count}; {name} += 1) {{");
        }
    }

    fn close_rows(text: &mut Text) {
        (0..2).for_each(|_| text.end());
    }

    /// Prints the online softmax: scores become weights, and what was summed before is rescaled.
    fn print_softmax(&self, text: &mut Text) {
        let (keys, columns) = (self.key_tile / 8, self.attention.dim / 8);
        let (factor, lowest) =
            (exponent_factor(&self.attention), number(DType::F32, f64::NEG_INFINITY));
        Self::open_rows(self.row_tiles(), text);
        line!(text, "float top = row_max[i][r];");
        line!(text, "UNROLL");
        line!(text, "for (u32 n = 0; n < {keys}; n += 1) {{");
        line!(text, "top = fmaxf(top, fmaxf(scores[i][n][2 * r], scores[i][n][2 * r + 1]));");
        text.end();
        line!(text, "top = fmaxf(top, shuffle_xor(top, 1));");
        line!(text, "top = fmaxf(top, shuffle_xor(top, 2));");
        // Of a row that has seen no key all exponents are minus infinity.
        line!(text, "const float base = top == {lowest} ? 0.0f : top * {factor};");
        line!(text, "const float rescale = ex2_approx(fmaf(row_max[i][r], {factor}, -base));");
        line!(text, "row_max[i][r] = top;");
        line!(text, "row_sum[i][r] = row_sum[i][r] * rescale;");
        line!(text, "UNROLL");
        line!(text, "for (u32 n = 0; n < {columns}; n += 1) {{");
        line!(text, "acc[i][n][2 * r] = acc[i][n][2 * r] * rescale;");
        line!(text, "acc[i][n][2 * r + 1] = acc[i][n][2 * r + 1] * rescale;");
        text.end();
        line!(text, "UNROLL");
        line!(text, "for (u32 n = 0; n < {}; n += 1) {{", 2 * keys);
        line!(text, "float& weight = scores[i][n / 2][2 * r + n % 2];");
        line!(text, "weight = ex2_approx(fmaf(weight, {factor}, -base));");
        line!(text, "row_sum[i][r] = row_sum[i][r] + weight;");
        text.end();
        Self::close_rows(text);
        if self.attention.dropout.is_some() {
            self.open_scores(text);
            print_kept(&self.attention, ["first_key", KEYS[0], KEYS[1]], text);
            line!(text, "scores[i][n][e] = scores[i][n][e] * kept;");
            (0..3).for_each(|_| text.end());
        }
    }

    /// Prints the product of the weights with the tile of V, added to the result.
    fn print_weighted_values(&self, text: &mut Text) {
        let (rows, columns, memory) = (self.row_tiles(), self.attention.dim / 16, self.memory());
        line!(text, "UNROLL");
        line!(text, "for (u32 t = 0; t < {}; t += 16) {{", self.key_tile);
        line!(text, "u32 p_fragments[{rows}][4], v_fragments[{columns}][4];");
        line!(text, "UNROLL");
        line!(text, "for (u32 i = 0; i < {rows}; i += 1) {{");
        line!(
            text,
            "accumulators_to_a<{memory}>(p_fragments[i], scores[i][t / 8], scores[i][t / 8 + 1]);"
        );
        text.end();
        let registers = ("v_fragments", columns);
        let fragments = Fragments { operand: Operand::B, k_major: false, registers };
        fragments.print_ldmatrix(self.key_tile(), ["v_tile", "0", "t"], text);
        line!(text, "warp_mma<{memory}>(acc, p_fragments, v_fragments);");
        text.end();
    }

    fn print_epilogue(&self, names: &Names, text: &mut Text) {
        let (a, memory) = (&self.attention, self.memory());
        line!(text, "{memory}* out = {};", row_of(&names.out, a.out, "b", "first_query", "h"));
        Self::open_rows(self.row_tiles(), text);
        let row = self.row("r");
        let state = ["row_sum[i][r]", "row_max[i][r]"];
        let numbers = |n: &str| [0, 1].map(|e| format!("acc[i][{n}][2 * r + {e}]"));
        print_stored_row(a, names, &row, state, numbers, text);
        Self::close_rows(text);
    }
}

/// Prints how a quad stores the result of its row, and the log of its sum. `state` is the sum of a
/// thread's weights and the largest score of the row, `numbers` gives the two accumulators of the
/// columns of that number.
pub(super) fn print_stored_row(
    a: &Attention,
    names: &Names,
    row: &str,
    [row_sum, row_max]: [&str; 2],
    numbers: impl Fn(&str) -> [String; 2],
    text: &mut Text,
) {
    line!(text, "float sum = {row_sum};");
    line!(text, "sum = sum + shuffle_xor(sum, 1);");
    line!(text, "sum = sum + shuffle_xor(sum, 2);");
    line!(text, "const u32 row = {row};");
    line!(text, "const bool is_there = first_query + row < {};", a.queries);
    line!(text, "const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;");
    let columns = a.dim / 8;
    let store = QuadStore::of(a.dtype, columns, VECTOR);
    line!(text, "UNROLL");
    line!(text, "for (u32 n = 0; n < {columns}; n += {}) {{", store.tiles());
    let scaled =
        |tile: &str| numbers(&format!("(n + {tile})")).map(|number| format!("{number} * inverse"));
    store.print_vector("x", scaled, text);
    let place = format!("out + row * {}ULL + n * 8 + {}", a.out[1], store.column());
    line!(text, "if (is_there) store_vector({place}, x);");
    text.end();
    let Some(lse) = &names.lse else { return };
    let natural = if is_plain(a) { a.scale } else { 1.0 };
    let place = format!("(b * {} + h) * {} + first_query + row", a.heads, a.queries);
    let [lowest, natural] = [f64::NEG_INFINITY, natural].map(|value| number(DType::F32, value));
    line!(
        text,
        "if (is_there && lane % 4 == 0) {lse}[{place}] = sum == 0.0f ? {lowest} : \
         fmaf({row_max}, {natural}, log_of(sum));"
    );
}

impl fmt::Display for FlashTile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FlashTile { query_tile, key_tile, .. } = self;
        write!(f, "FlashAttention-2: tiles of {query_tile} queries by {WARPS} warps and of ")?;
        write!(f, "{key_tile} keys in 2 stages")
    }
}
