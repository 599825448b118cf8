//! Attention of BF16 and F16 on the tensor cores of sm_90a, by `wgmma`: the structure of
//! FlashAttention-3 (Shah et al., 2024).
//!
//! Legend: that of `attention`.
//!
//! One warp copies a tile of 128 queries, then tiles of keys and of values to rings of two stages,
//! by TMA; two warpgroups have 64 queries each. While a warpgroup's softmax of a tile of scores
//! `S = Q Kᵀ` runs, the tensor cores multiply the weights `P` of the tile before by its values, and
//! while one warpgroup waits the other one multiplies. `P` stays in registers: the accumulators of
//! `S` are, rounded to the type of the values, the fragments of the first operand of `P V`.
//! Rounding, the order of keys and what a query does not see are those of `flash`: the bits of a
//! query depend on no other query.
//!
//! Head dims are filled up to 64 or 128 by the zeros that TMA writes out of bounds.
//!
//! Versions:
//! 1. tiles of 128 × 128, of 128 × 64 where scores are more than scaled; no order between the
//!    warpgroups but that of their waits; the result is stored by 4 bytes.
//! 2. quads exchange pairs of columns, and store whole sectors (`quads`).

use std::fmt;

use ir::DType;

use super::attention::{
    Names, Part, is_together, print_head, print_kept, print_offset, print_scalars, row_of,
};
use super::flash;
use super::flash::{
    exponent_factor, is_plain, print_score, print_stored_row, print_tile_of_queries,
    print_visible_keys,
};
use super::parameter::Parameter;
use super::tensor_map::TensorMap;
use super::text::{Text, element, line, number};
use crate::kernel::Attention;

/// Threads of a block: a warpgroup that copies, and two that multiply.
pub(super) const THREADS: u32 = 384;
/// Queries of a tile.
pub(super) const QUERY_TILE: usize = 128;
/// Warps that multiply.
pub(super) const WARPS: usize = 8;
/// Stages of the rings of K and of V.
const STAGES: usize = 2;
/// Elements of a row of the swizzle, which is 128 bytes, and bytes of the eight after which it
/// repeats.
pub(super) const SWIZZLE_COLUMNS: usize = 64;
pub(super) const SWIZZLE: usize = 1024;
/// Registers of a thread that copies, and of one that multiplies.
const REGISTERS: [u32; 2] = [40, 232];
/// The key of a tile of a thread's first score, and how far others of it are from there.
const KEYS: [&str; 2] = ["lane % 4 * 2", "i / 4 * 8 + i % 2"];

/// The forward pass, each tile of queries of a head by one block.
#[derive(Clone, Debug, PartialEq)]
pub struct FlashWarpgroup {
    /// What is computed.
    pub attention: Attention,
    /// Keys of a tile: 64 or 128.
    pub key_tile: usize,
    /// What TMA copies: Q, K and V.
    pub maps: [TensorMap; 3],
}

/// The tensor map of an operand of attention, given its batch, length and heads, and its strides.
pub(super) fn map(
    (name, parameter): (&'static str, usize),
    a: &Attention,
    [batch, length, heads]: [usize; 3],
    [b, s, h]: [usize; 3],
    rows: usize,
) -> Option<TensorMap> {
    let bytes = a.dtype.size();
    let stride = |(size, stride): (usize, usize)| match size {
        1 => Some(stride.max(SWIZZLE_COLUMNS) as u64 * bytes),
        _ => (stride > 0).then_some(stride as u64 * bytes),
    };
    let [s, h, b] = [(length, s), (heads, h), (batch, b)].map(stride);
    Some(TensorMap {
        name,
        parameter,
        dtype: a.dtype,
        dims: [a.dim, length, heads, batch].map(|size| size as u64).to_vec(),
        strides_bytes: vec![s?, h?, b?],
        box_dims: vec![SWIZZLE_COLUMNS as u32, rows as u32, 1, 1],
    })
}

/// Whether `cuTensorMapEncodeTiled` takes a map's sizes.
pub(super) fn is_encodable(map: &TensorMap) -> bool {
    let is_short = map.strides_bytes.iter().all(|bytes| *bytes < 1 << 40);
    is_short && map.dims.iter().all(|size| *size < 1 << 31)
}

/// Prints the copies of a tile of some parts of 64 columns and some rows, to an address; its bytes
/// complete a phase of the barrier. `place` is the first row and the head.
pub(super) fn print_box_copies(
    name: &str,
    (to, barrier): (&str, &str),
    place: &str,
    [halves, rows]: [usize; 2],
    text: &mut Text,
) {
    for half in 0..halves {
        let (offset, column) = (half * rows * SWIZZLE_COLUMNS * 2, half * SWIZZLE_COLUMNS);
        line!(
            text,
            "tma_load({to} + {offset}, {name}_map, {barrier}, {column}, (i32){place}, (i32)b);"
        );
    }
}

impl FlashWarpgroup {
    /// The tile of an attention; none where it does not fit.
    pub(super) fn of(a: &Attention) -> Option<FlashWarpgroup> {
        if !flash::fits(a) {
            return None;
        }
        // Caps, biases and draws need the registers of half of the scores.
        let key_tile = if is_plain(a) && a.dropout.is_none() { 128 } else { 64 };
        let [queries, keys] = [a.queries, a.keys];
        let of_keys = [a.batch, keys, a.kv_heads];
        let maps = [
            map(("q_map", 0), a, [a.batch, queries, a.heads], a.q, QUERY_TILE)?,
            map(("k_map", 1), a, of_keys, a.k, key_tile)?,
            map(("v_map", 2), a, of_keys, a.v, key_tile)?,
        ];
        maps.iter().all(is_encodable).then(|| FlashWarpgroup {
            attention: a.clone(),
            key_tile,
            maps,
        })
    }

    pub(super) fn blocks(&self) -> u64 {
        let Attention { batch, heads, queries, .. } = self.attention;
        (batch * heads * queries.div_ceil(QUERY_TILE)) as u64
    }

    /// Parts of 64 columns of a head.
    fn halves(&self) -> usize {
        self.attention.dim.div_ceil(SWIZZLE_COLUMNS)
    }

    /// Bytes of the tile of Q, and of a stage of K or V.
    fn tile_bytes(&self) -> [usize; 2] {
        [QUERY_TILE, self.key_tile].map(|rows| self.halves() * self.half_bytes(rows))
    }

    /// Bytes of 64 columns of `rows` rows.
    fn half_bytes(&self, rows: usize) -> usize {
        rows * SWIZZLE_COLUMNS * 2
    }

    /// Bytes of dynamic shared memory of a block: tiles and mbarriers.
    pub(super) fn shared_bytes(&self) -> usize {
        let [of_queries, of_keys] = self.tile_bytes();
        of_queries + 2 * STAGES * of_keys + 8 * (1 + 4 * STAGES)
    }

    fn memory(&self) -> &'static str {
        element(self.attention.dtype)
    }

    /// Scores of a thread: those of two rows.
    fn scores(&self) -> usize {
        self.key_tile / 2
    }

    /// Accumulators of the result of a thread.
    fn accumulators(&self) -> usize {
        self.halves() * SWIZZLE_COLUMNS / 2
    }

    pub(super) fn print(&self, parameters: &[Parameter], text: &mut Text) {
        let a = &self.attention;
        let names = Names::of(a, Part::Forward, parameters);
        line!(text, "DYNAMIC_SHARED(q_tile, {});", self.shared_bytes());
        print_scalars(a, &names, text);
        print_tile_of_queries(a, QUERY_TILE, text);
        print_offset(&names, text);
        print_head(a, "h", text);
        print_visible_keys(a, [QUERY_TILE, self.key_tile], text);
        // Loops whose number of tiles is known are unrolled, and spill registers.
        line!(text, "const u32 tiles = opaque(steps);");
        self.print_barriers(text);
        self.print_producer(text);
        self.print_consumer(&names, text);
    }

    fn print_barriers(&self, text: &mut Text) {
        let [of_queries, of_keys] = self.tile_bytes();
        let ring = STAGES * of_keys;
        line!(text, "u8* const k_stages = q_tile + {of_queries};");
        line!(text, "u8* const v_stages = k_stages + {ring};");
        line!(text, "u64* const q_full = (u64*)(v_stages + {ring});");
        line!(text, "u64* const k_full = q_full + 1;");
        line!(text, "u64* const v_full = k_full + {STAGES};");
        line!(text, "u64* const k_empty = v_full + {STAGES};");
        line!(text, "u64* const v_empty = k_empty + {STAGES};");
        line!(text, "if (threadIdx.x == 0) {{");
        line!(text, "mbarrier_init(q_full, 1);");
        line!(text, "for (u32 stage = 0; stage < {STAGES}; stage += 1) {{");
        for name in ["k", "v"] {
            line!(text, "mbarrier_init({name}_full + stage, 1);");
            line!(text, "mbarrier_init({name}_empty + stage, 8);");
        }
        text.end();
        line!(text, "mbarrier_init_fence();");
        text.end();
        line!(text, "sync_block();");
    }

    fn print_producer(&self, text: &mut Text) {
        let [of_queries, of_keys] = self.tile_bytes();
        line!(text, "if (threadIdx.x < 128) {{");
        line!(text, "setmaxnreg_dec<{}>();", REGISTERS[0]);
        line!(text, "if (threadIdx.x > 0) return;");
        line!(text, "mbarrier_expect(q_full, {of_queries});");
        self.print_copy("q", "q_tile", "q_full", "first_query, (i32)h", text);
        line!(text, "NO_UNROLL");
        line!(text, "for (u32 step = 0; step < tiles; step += 1) {{");
        line!(text, "const u32 stage = step % {STAGES};");
        line!(text, "const i32 next_key = (i32)begin + (i32)step * {};", self.key_tile);
        for name in ["k", "v"] {
            line!(text, "mbarrier_wait({name}_empty + stage, (step / {STAGES} + 1) % 2);");
            line!(text, "mbarrier_expect({name}_full + stage, {of_keys});");
            let to = format!("{name}_stages + stage * {of_keys}");
            self.print_copy(name, &to, &format!("{name}_full + stage"), "next_key, (i32)g", text);
        }
        text.end();
        line!(text, "return;");
        text.end();
    }

    /// Prints the copies of a tile.
    fn print_copy(&self, name: &str, to: &str, barrier: &str, place: &str, text: &mut Text) {
        let rows = if name == "q" { QUERY_TILE } else { self.key_tile };
        print_box_copies(name, (to, barrier), place, [self.halves(), rows], text);
    }

    fn print_consumer(&self, names: &Names, text: &mut Text) {
        let lowest = number(DType::F32, f64::NEG_INFINITY);
        line!(text, "setmaxnreg_inc<{}>();", REGISTERS[1]);
        line!(text, "const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;");
        line!(text, "const u32 consumer = threadIdx.x / 128 - 1;");
        line!(text, "const u32 first_row = consumer * 64 + warp * 16 + lane / 4;");
        line!(text, "float acc[{}] = {{}}, scores[{}];", self.accumulators(), self.scores());
        line!(text, "u32 p[{}][4];", self.key_tile / 16);
        line!(text, "float row_max[2] = {{{lowest}, {lowest}}}, row_sum[2] = {{}}, rescale[2];");
        line!(text, "if (tiles > 0) {{");
        let rows = format!("q_tile + consumer * {}", self.half_bytes(64));
        line!(
            text,
            "const u64 q = matrix_descriptor(shared_address({rows}), 16, {SWIZZLE}, SWIZZLE_128);"
        );
        line!(text, "mbarrier_wait(q_full, 0);");
        line!(text, "{{");
        line!(text, "const u32 step = 0;");
        self.print_scores(text);
        line!(text, "warpgroup_wait<0>(scores);");
        line!(text, "if (lane == 0) mbarrier_arrive(k_empty);");
        self.print_softmax(names, text);
        self.print_weights(text);
        text.end();
        line!(text, "NO_UNROLL");
        line!(text, "for (u32 step = 1; step < tiles; step += 1) {{");
        self.print_scores(text);
        self.print_values("step - 1", text);
        line!(text, "warpgroup_wait<1>(acc);");
        line!(text, "keep_order(scores);");
        line!(text, "if (lane == 0) mbarrier_arrive(k_empty + step % {STAGES});");
        self.print_softmax(names, text);
        line!(text, "warpgroup_wait<0>(acc);");
        // Until here the registers of the weights must not be used for others.
        line!(text, "keep_order(p);");
        line!(text, "if (lane == 0) mbarrier_arrive(v_empty + (step - 1) % {STAGES});");
        line!(text, "UNROLL");
        line!(
            text,
            "for (u32 i = 0; i < {}; i += 1) acc[i] = acc[i] * rescale[i / 2 % 2];",
            self.accumulators()
        );
        self.print_weights(text);
        text.end();
        self.print_values("tiles - 1", text);
        line!(text, "warpgroup_wait<0>(acc);");
        line!(text, "keep_order(p);");
        text.end();
        self.print_epilogue(names, text);
    }

    /// Prints the start of the product of the queries with the keys of a step.
    fn print_scores(&self, text: &mut Text) {
        let (a, [_, of_keys]) = (&self.attention, self.tile_bytes());
        line!(text, "const u32 stage = step % {STAGES};");
        line!(text, "mbarrier_wait(k_full + stage, step / {STAGES} % 2);");
        let start = format!("k_stages + stage * {of_keys}");
        line!(
            text,
            "const u64 k = matrix_descriptor(shared_address({start}), 16, {SWIZZLE}, SWIZZLE_128);"
        );
        line!(text, "UNROLL");
        line!(text, "for (u32 i = 0; i < {}; i += 1) scores[i] = 0;", self.scores());
        line!(text, "warpgroup_fence(scores);");
        line!(text, "UNROLL");
        line!(text, "for (u32 d = 0; d < {}; d += 1) {{", a.dim / 16);
        // Steps of 16 along a row of 64, and from one half to the next, in 16 bytes.
        let at = |rows: usize| format!("d / 4 * {} + d % 4 * 2", self.half_bytes(rows) / 16);
        line!(
            text,
            "warpgroup_mma<{}, 0, 0>(scores, q + ({}), k + ({}));",
            self.memory(),
            at(QUERY_TILE),
            at(self.key_tile)
        );
        text.end();
        line!(text, "warpgroup_commit();");
    }

    /// Prints the start of the product of the weights with the values of a step.
    fn print_values(&self, step: &str, text: &mut Text) {
        let [_, of_keys] = self.tile_bytes();
        line!(text, "mbarrier_wait(v_full + ({step}) % {STAGES}, ({step}) / {STAGES} % 2);");
        let start = format!("v_stages + ({step}) % {STAGES} * {of_keys}");
        let half = self.half_bytes(self.key_tile);
        line!(
            text,
            "const u64 v = \
             matrix_descriptor(shared_address({start}), {half}, {SWIZZLE}, SWIZZLE_128);"
        );
        line!(text, "warpgroup_fence(acc);");
        line!(text, "UNROLL");
        line!(text, "for (u32 t = 0; t < {}; t += 1) {{", self.key_tile / 16);
        line!(
            text,
            "warpgroup_mma<{}, 1>(acc, p[t], v + t * {});",
            self.memory(),
            2 * SWIZZLE / 16
        );
        text.end();
        line!(text, "warpgroup_commit();");
    }

    /// Opens the loop over a thread's scores, with the query `s` and the key `j` of each.
    fn open_scores(&self, text: &mut Text) {
        line!(text, "UNROLL");
        line!(text, "for (u32 i = 0; i < {}; i += 1) {{", self.scores());
        line!(text, "const i64 s = (i64)first_query + first_row + i / 2 % 2 * 8;");
        line!(text, "const i64 j = first_key + {} + {};", KEYS[0], KEYS[1]);
    }

    /// Prints the online softmax: scores become weights, and `rescale` the factor of what was
    /// summed before.
    fn print_softmax(&self, names: &Names, text: &mut Text) {
        let a = &self.attention;
        line!(text, "const i64 first_key = begin + (i64)step * {};", self.key_tile);
        if !is_plain(a) {
            self.open_scores(text);
            print_score(a, names, "scores[i]", text);
            line!(text, "scores[i] = score;");
            text.end();
        }
        match a.documents.is_some() {
            true => line!(text, "{{"),
            false => line!(
                text,
                "if (first_key < all_begin || first_key + {} > all_end) {{",
                self.key_tile
            ),
        }
        self.print_mask(names, text);
        text.end();
        self.print_exponentials(text);
        if a.dropout.is_some() {
            self.open_scores(text);
            print_kept(a, ["first_key", KEYS[0], KEYS[1]], text);
            line!(text, "scores[i] = scores[i] * kept;");
            text.end();
        }
    }

    /// Prints minus infinity for the scores of keys that a query does not see. A row sees columns
    /// of the tile from `row_begin` to `row_end`, counted from the thread's first one: numbers of
    /// 32
    /// bits, as those of 64 bits would be spilled.
    fn print_mask(&self, names: &Names, text: &mut Text) {
        let (a, tile) = (&self.attention, self.key_tile);
        let lowest = number(DType::F32, f64::NEG_INFINITY);
        line!(text, "i32 row_begin[2], row_end[2];");
        line!(text, "UNROLL");
        line!(text, "for (u32 r = 0; r < 2; r += 1) {{");
        line!(text, "const i64 s = (i64)first_query + first_row + r * 8;");
        line!(text, "const i32 first_column = lane % 4 * 2;");
        line!(text, "i64 seen = {} - first_key;", a.keys);
        if a.causal {
            line!(text, "const i64 own = s + offset + 1 - first_key;");
            line!(text, "seen = own < seen ? own : seen;");
        }
        line!(text, "row_end[r] = (i32)clamped(seen, {tile}) - first_column;");
        let begin = match a.window {
            0 => "0".to_owned(),
            window => format!("(i32)clamped(s + offset + 1 - {window} - first_key, {tile})"),
        };
        line!(text, "row_begin[r] = {begin} - first_column;");
        text.end();
        self.open_scores(text);
        line!(text, "const i32 column = i / 4 * 8 + i % 2;");
        let mut seen = "column >= row_begin[i / 2 % 2] && column < row_end[i / 2 % 2]".to_owned();
        if let Some(together) = is_together(a, names) {
            // Documents are read only of what is there.
            seen += &format!(" && j < {} && (s >= {} || {together})", a.keys, a.queries);
        }
        line!(text, "if (!({seen})) scores[i] = {lowest};");
        text.end();
    }

    fn print_exponentials(&self, text: &mut Text) {
        let lowest = number(DType::F32, f64::NEG_INFINITY);
        let factor = exponent_factor(&self.attention);
        line!(text, "UNROLL");
        line!(text, "for (u32 r = 0; r < 2; r += 1) {{");
        line!(text, "float top = row_max[r];");
        line!(text, "UNROLL");
        line!(text, "for (u32 n = 0; n < {}; n += 1) {{", self.key_tile / 8);
        line!(text, "top = fmaxf(top, fmaxf(scores[n * 4 + r * 2], scores[n * 4 + r * 2 + 1]));");
        text.end();
        line!(text, "top = fmaxf(top, shuffle_xor(top, 1));");
        line!(text, "top = fmaxf(top, shuffle_xor(top, 2));");
        // Of a row that has seen no key all exponents are minus infinity.
        line!(text, "const float base = top == {lowest} ? 0.0f : top * {factor};");
        line!(text, "rescale[r] = ex2_approx(fmaf(row_max[r], {factor}, -base));");
        line!(text, "row_max[r] = top;");
        line!(text, "row_sum[r] = row_sum[r] * rescale[r];");
        line!(text, "UNROLL");
        line!(text, "for (u32 n = 0; n < {}; n += 1) {{", self.key_tile / 4);
        line!(text, "float& weight = scores[n / 2 * 4 + r * 2 + n % 2];");
        line!(text, "weight = ex2_approx(fmaf(weight, {factor}, -base));");
        line!(text, "row_sum[r] = row_sum[r] + weight;");
        (0..2).for_each(|_| text.end());
    }

    /// Prints the fragments of the weights.
    fn print_weights(&self, text: &mut Text) {
        line!(text, "UNROLL");
        line!(text, "for (u32 i = 0; i < {}; i += 1) {{", self.scores() / 2);
        line!(
            text,
            "p[i / 4][i % 4] = packed<{}>(scores[i * 2], scores[i * 2 + 1]);",
            self.memory()
        );
        text.end();
    }

    fn print_epilogue(&self, names: &Names, text: &mut Text) {
        let (a, memory) = (&self.attention, self.memory());
        line!(text, "{memory}* out = {};", row_of(&names.out, a.out, "b", "first_query", "h"));
        line!(text, "UNROLL");
        line!(text, "for (u32 r = 0; r < 2; r += 1) {{");
        let numbers = |n: &str| [0, 1].map(|e| format!("acc[{n} * 4 + r * 2 + {e}]"));
        let state = ["row_sum[r]", "row_max[r]"];
        print_stored_row(a, names, "first_row + r * 8", state, numbers, text);
        text.end();
    }
}

impl fmt::Display for FlashWarpgroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FlashAttention-3: tiles of {QUERY_TILE} queries by 2 warpgroups and of ")?;
        write!(f, "{} keys in {STAGES} stages by TMA", self.key_tile)
    }
}
