//! The gradient of attention of BF16 and F16 on the tensor cores of sm_90a, by `wgmma`: the
//! structure of FlashAttention-3 (Shah et al., 2024), its dQ in the order of `turns`.
//!
//! Legend: that of `attention`.
//!
//! A block takes a tile of 128 keys, whose K and V stay in shared memory, and goes over tiles of 64
//! or 128 queries. One warp copies Q and dO of a step to rings of two stages, by TMA, and beside
//! them `lse` and `delta` of its queries. Two warpgroups have 64 keys each: they compute
//! `Sᵀ = K Qᵀ` and `dPᵀ = V dOᵀ`, from them P and dS, and add `Pᵀ dO` to dV and `dSᵀ Q` to dK.
//! These two products take P and dS from registers, as accumulators of the first two are, rounded,
//! the fragments of their first operand. For the block's part of dQ, `dS K`, each warpgroup writes
//! its dS to shared memory, and has 64 of the part's queries or columns.
//!
//! Parts go through shared memory to a warp for each warpgroup, which adds them in turn: TMA adds
//! them to the sums in device memory, while the warpgroups go on with the next step. When its turn
//! is the last one, that warp adds part and sum itself, rounds them and stores dQ.
//!
//! Head dims are filled up to 64 or 128 by the zeros that TMA writes out of bounds, as are rows of
//! queries and keys. Of such queries weights are zero, since their `lse` is infinite. Heads beyond
//! 64 with dropout do not fit the registers, and stay with `flash_backward`.
//!
//! Versions:
//! 1. tiles of 128 keys and 64 queries, of 128 × 128 for heads up to 64, whose scores are computed
//!    64 queries at a time; exponentials run while dP is multiplied where scores are no more than
//!    scaled, and for heads beyond 64 dV beside dQ, and dK while dQ goes to shared memory.

use std::fmt;

use ir::DType;

use super::attention::{Names, Part, is_together, print_scalars, row_of, tile_of_queries};
use super::flash;
use super::flash::{VECTOR, exponent_factor, is_plain};
use super::flash_backward::{print_key_gradients, print_query_values, print_slope};
use super::flash_warpgroup::{SWIZZLE, SWIZZLE_COLUMNS, is_encodable, map, print_box_copies};
use super::parameter::Parameter;
use super::quads::QuadStore;
use super::tensor_map::TensorMap;
use super::text::{Text, element, line, number};
use super::turns::Turns;
use crate::kernel::Attention;

/// Threads of a block: a warpgroup that copies and adds, and two that multiply.
pub(super) const THREADS: u32 = 384;
/// Keys of a tile: 64 for each warpgroup that multiplies.
pub(super) const KEY_TILE: usize = 128;
/// Stages of the rings of Q and of dO.
const STAGES: usize = 2;
/// Bytes of a row of the swizzle.
pub(super) const SWIZZLE_ROW: usize = 2 * SWIZZLE_COLUMNS;
/// Rows and columns of a part of dQ, and its elements.
pub(super) const PART_SIDE: usize = 64;
pub(super) const PART: usize = PART_SIDE * PART_SIDE;
/// Queries of the scores that are computed at once: more do not fit the registers.
pub(super) const COLUMNS: usize = 64;
/// Scores of a thread at once: those of two keys.
pub(super) const SCORES: usize = COLUMNS / 2;
/// Threads of a warpgroup.
pub(super) const WARPGROUP: usize = 128;
/// Elements of a vector of sums: of f32, 16 bytes.
pub(super) const SUMS: usize = 4;
/// Vectors of a part that a thread has.
pub(super) const VECTORS: usize = PART / SUMS / WARPGROUP;
/// Workspaces: sums of dQ, and counters of turns, behind `delta`.
const SUMS_AT: usize = 1;
const TURNS_AT: usize = 2;
/// Parts of dQ of a tile of queries, one for each warpgroup that multiplies.
pub(super) const PARTS: usize = 2;

/// The gradients of queries, keys and values, each tile of keys of a head by one block.
#[derive(Clone, Debug, PartialEq)]
pub struct FlashWarpgroupBackward {
    /// What is computed.
    pub attention: Attention,
    /// Queries of a step: 64 or 128.
    pub step: usize,
    /// What TMA copies: Q, K, V and dO.
    pub maps: [TensorMap; 4],
}

impl FlashWarpgroupBackward {
    /// The tile of an attention; none where it does not fit.
    pub(super) fn of(a: &Attention) -> Option<FlashWarpgroupBackward> {
        // Beside wide heads draws do not fit the registers.
        if !flash::fits(a) || a.dim > SWIZZLE_COLUMNS && a.dropout.is_some() {
            return None;
        }
        let step = if a.dim > SWIZZLE_COLUMNS { 64 } else { 128 };
        let [of_queries, of_keys] = [[a.batch, a.queries, a.heads], [a.batch, a.keys, a.kv_heads]];
        let dout = 5 + usize::from(a.bias.is_some()) + usize::from(a.documents.is_some());
        let maps = [
            map(("q_map", 0), a, of_queries, a.q, step)?,
            map(("k_map", 1), a, of_keys, a.k, KEY_TILE)?,
            map(("v_map", 2), a, of_keys, a.v, KEY_TILE)?,
            map(("dout_map", dout), a, of_queries, a.out, step)?,
        ];
        let tile = FlashWarpgroupBackward { attention: a.clone(), step, maps };
        tile.maps.iter().all(is_encodable).then_some(tile)
    }

    pub(super) fn turns(&self) -> Turns<'_> {
        Turns { attention: &self.attention, keys: KEY_TILE, queries: self.step }
    }

    /// Counters of turns: one for each part of a tile of queries.
    pub(super) fn counters(&self) -> u64 {
        self.turns().all_query_tiles() * PARTS as u64
    }

    /// Sums of dQ in the workspace: parts, each of vectors of the threads that multiply, in order.
    pub(super) fn sums(&self) -> u64 {
        self.counters() * PART as u64
    }

    /// The number of the workspace of sums of dQ, and its bytes.
    pub(super) fn shared_sums(&self) -> (usize, u64) {
        (SUMS_AT, self.sums() * DType::F32.size())
    }

    /// Parts of 64 columns of a head.
    fn halves(&self) -> usize {
        self.attention.dim.div_ceil(SWIZZLE_COLUMNS)
    }

    /// Whether the parts of dQ are columns, else queries.
    pub(super) fn splits_columns(&self) -> bool {
        self.halves() > 1
    }

    /// Bytes of the tile of K or V, and of a stage of Q or dO.
    fn tile_bytes(&self) -> [usize; 2] {
        [KEY_TILE, self.step].map(|rows| self.halves() * rows * SWIZZLE_ROW)
    }

    /// Bytes of dS: of each 64 queries, 128 rows of keys.
    fn slopes_bytes(&self) -> usize {
        self.step * KEY_TILE * 2
    }

    /// The arrays in shared memory, in order, with their types and bytes.
    fn arrays(&self) -> [(&'static str, &'static str, usize); 17] {
        let [of_keys, of_queries] = self.tile_bytes();
        let of_step = STAGES * self.step * 4;
        let barriers = |count: usize| 8 * count;
        [
            ("k_tile", "u8", of_keys),
            ("v_tile", "u8", of_keys),
            ("q_stages", "u8", STAGES * of_queries),
            ("dout_stages", "u8", STAGES * of_queries),
            ("slopes_tile", "u8", self.slopes_bytes()),
            ("parts", "u8", PARTS * PART * 4),
            ("sums_before", "u8", PARTS * PART * 4),
            ("bases", "float", of_step),
            ("deltas", "float", of_step),
            ("k_full", "u64", barriers(1)),
            ("v_full", "u64", barriers(1)),
            ("q_full", "u64", barriers(STAGES)),
            ("dout_full", "u64", barriers(STAGES)),
            ("stage_empty", "u64", barriers(STAGES)),
            ("slopes_full", "u64", barriers(1)),
            ("slopes_empty", "u64", barriers(1)),
            ("part_full", "u64", barriers(PARTS + PARTS)),
        ]
    }

    /// Bytes of dynamic shared memory of a block.
    pub(super) fn shared_bytes(&self) -> usize {
        self.arrays().iter().map(|(.., bytes)| bytes).sum()
    }

    fn memory(&self) -> &'static str {
        element(self.attention.dtype)
    }

    /// Accumulators of dK, and of dV, of a thread.
    fn accumulators(&self) -> usize {
        self.halves() * SWIZZLE_COLUMNS / 2
    }

    /// Registers of a thread that copies or adds, and of one that multiplies: together no more than
    /// the 168 that each has when the block starts.
    fn registers(&self) -> [u32; 2] {
        if self.attention.dim > SWIZZLE_COLUMNS { [40, 232] } else { [56, 224] }
    }

    /// Whether weights need no more than scores, so that they are computed while dP is multiplied.
    pub(super) fn is_split(&self) -> bool {
        is_plain(&self.attention) && self.attention.dropout.is_none()
    }

    pub(super) fn print(&self, parameters: &[Parameter], text: &mut Text) {
        let a = &self.attention;
        let names = Names::of(a, Part::Keys, parameters);
        line!(text, "DYNAMIC_SHARED(shared, {});", self.shared_bytes());
        print_scalars(a, &names, text);
        self.turns().print_block(text);
        // Loops whose number of steps is known are unrolled, and spill registers.
        line!(text, "const u32 all_steps = opaque(steps);");
        line!(text, "const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;");
        self.print_shared(text);
        line!(text, "if (threadIdx.x < {WARPGROUP}) {{");
        line!(text, "setmaxnreg_dec<{}>();", self.registers()[0]);
        self.print_producer(&names, text);
        self.print_adders(&names, text);
        line!(text, "return;");
        text.end();
        self.print_consumer(&names, text);
    }

    /// Prints the arrays in shared memory, and initialises the barriers.
    fn print_shared(&self, text: &mut Text) {
        let mut at = 0;
        for (name, kind, bytes) in self.arrays() {
            line!(text, "{kind}* const {name} = ({kind}*)(shared + {at});");
            at += bytes;
        }
        line!(text, "u64* const part_empty = part_full + {PARTS};");
        line!(text, "if (threadIdx.x == 0) {{");
        for name in ["k", "v"] {
            line!(text, "mbarrier_init({name}_full, 1);");
        }
        line!(text, "for (u32 stage = 0; stage < {STAGES}; stage += 1) {{");
        for name in ["q", "dout"] {
            // Bytes by TMA, and what the other lanes write.
            line!(text, "mbarrier_init({name}_full + stage, 2);");
        }
        line!(text, "mbarrier_init(stage_empty + stage, 8);");
        text.end();
        line!(text, "mbarrier_init(slopes_full, 8);");
        line!(text, "mbarrier_init(slopes_empty, 8);");
        line!(text, "for (u32 part = 0; part < {PARTS}; part += 1) {{");
        line!(text, "mbarrier_init(part_full + part, 4);");
        line!(text, "mbarrier_init(part_empty + part, 1);");
        text.end();
        line!(text, "mbarrier_init_fence();");
        text.end();
        line!(text, "sync_block();");
    }

    /// Prints the copies of one warp.
    fn print_producer(&self, names: &Names, text: &mut Text) {
        let [of_keys, of_queries] = self.tile_bytes();
        line!(text, "if (warp == 0) {{");
        line!(text, "if (lane == 0 && all_steps > 0) {{");
        for name in ["k", "v"] {
            line!(text, "mbarrier_expect({name}_full, {of_keys});");
            let to = (&format!("{name}_tile")[..], &format!("{name}_full")[..]);
            print_box_copies(name, to, "first_row, (i32)g", [self.halves(), KEY_TILE], text);
        }
        text.end();
        line!(text, "NO_UNROLL");
        line!(text, "for (u32 step = 0; step < all_steps; step += 1) {{");
        line!(text, "const u32 stage = step % {STAGES};");
        self.turns().print_position("step", text);
        line!(text, "mbarrier_wait(stage_empty + stage, (step / {STAGES} + 1) % 2);");
        line!(text, "if (lane == 0) {{");
        for name in ["q", "dout"] {
            line!(text, "mbarrier_expect({name}_full + stage, {of_queries});");
            let to = format!("{name}_stages + stage * {of_queries}");
            let to = (&to[..], &format!("{name}_full + stage")[..]);
            print_box_copies(name, to, "first_column, (i32)h", [self.halves(), self.step], text);
        }
        text.end();
        line!(text, "UNROLL");
        line!(text, "for (u32 i = lane; i < {}; i += 32) {{", self.step);
        line!(text, "const i64 s = first_column + i;");
        print_query_values(&self.attention, names, text);
        line!(text, "bases[stage * {} + i] = base;", self.step);
        line!(text, "deltas[stage * {} + i] = delta;", self.step);
        text.end();
        line!(text, "sync_warp();");
        line!(text, "if (lane == 0) mbarrier_arrive(q_full + stage);");
        line!(text, "if (lane == 0) mbarrier_arrive(dout_full + stage);");
        text.end();
        text.end();
    }

    /// Prints the additions of a warp for each warpgroup that multiplies.
    fn print_adders(&self, names: &Names, text: &mut Text) {
        let [sums, turns] = [SUMS_AT, TURNS_AT].map(|at| &names.workspaces[at]);
        let bytes = PART * 4;
        line!(text, "if (warp < {PARTS}) return;");
        line!(text, "const u32 consumer = warp - {PARTS};");
        line!(text, "u8* const part = parts + consumer * {bytes};");
        line!(text, "NO_UNROLL");
        line!(text, "for (u32 step = 0; step < all_steps; step += 1) {{");
        self.turns().print_position("step", text);
        self.turns().print_turn(text);
        let of_all = tile_of_queries(&self.attention, self.step, "(u64)tile");
        line!(text, "const u64 part_of_all = ({of_all}) * {PARTS} + consumer;");
        line!(text, "float* const part_sums = {sums} + part_of_all * {PART};");
        line!(text, "u32* const next_turn = {turns} + part_of_all;");
        // The first to add waits for its turn too: that the counter has begun anew.
        line!(text, "if (lane == 0) wait_for_turn(next_turn, turn);");
        line!(text, "sync_warp();");
        line!(text, "if (own == first_own) {{");
        self.print_queries(names, text);
        line!(text, "sync_warp();");
        line!(text, "if (lane == 0) mbarrier_arrive(part_empty + consumer);");
        line!(text, "continue;");
        text.end();
        line!(text, "mbarrier_wait(part_full + consumer, step % 2);");
        line!(text, "if (lane == 0) {{");
        line!(text, "fence_global_async();");
        line!(text, "if (turn > 0) tma_add_numbers(part_sums, part, {bytes});");
        line!(text, "if (turn == 0) tma_store_numbers(part_sums, part, {bytes});");
        line!(text, "tma_store_commit();");
        line!(text, "tma_store_wait();");
        line!(text, "mbarrier_arrive(part_empty + consumer);");
        line!(text, "tma_store_end();");
        line!(text, "fence_global_async();");
        text.end();
        line!(text, "sync_warp();");
        line!(text, "if (lane == 0) end_turn(next_turn, turn + 1);");
        text.end();
    }

    /// Prints the gradient of the queries of a step, which is complete: a lane has what four
    /// threads of the warpgroup have of the part, one after the other. It copies their sums first,
    /// which no other lane reads.
    fn print_queries(&self, names: &Names, text: &mut Text) {
        let (a, bytes) = (&self.attention, PART * 4);
        let open = |text: &mut Text| {
            line!(text, "NO_UNROLL");
            line!(text, "for (u32 t = lane; t < {WARPGROUP}; t += 32) {{");
        };
        line!(text, "float* const before = (float*)(sums_before + consumer * {bytes});");
        line!(text, "if (turn > 0) {{");
        open(text);
        line!(text, "NO_UNROLL");
        line!(text, "for (u32 n = 0; n < {VECTORS}; n += 1) {{");
        line!(text, "const u32 place = (n * {WARPGROUP} + t) * {SUMS};");
        line!(text, "cp_async<16>(before + place, part_sums + place, true);");
        (0..3).for_each(|_| text.end());
        line!(text, "cp_async_commit();");
        line!(text, "mbarrier_wait(part_full + consumer, step % 2);");
        line!(text, "cp_async_wait<0>();");
        let row = row_of(&names.grads[0], a.q, "b", "first_column", "h");
        line!(text, "{}* dq = {row};", self.memory());
        open(text);
        // A warp that copies has few registers.
        let store = QuadStore::of(a.dtype, 2, VECTOR);
        line!(text, "NO_UNROLL");
        line!(text, "for (u32 n = 0; n < {VECTORS}; n += {}) {{", store.tiles());
        self.print_whole_sums(store, text);
        self.print_rounded(store, text);
        (0..2).for_each(|_| text.end());
    }

    /// Prints `whole`: the numbers that a lane has of some tiles of 8 columns, of part and sums.
    fn print_whole_sums(&self, store: QuadStore, text: &mut Text) {
        let vector = format!("Vector<float, {SUMS}>");
        line!(text, "float whole[{}];", SUMS * store.tiles());
        line!(text, "UNROLL");
        line!(text, "for (u32 v = 0; v < {}; v += 1) {{", store.tiles());
        line!(text, "const u32 place = ((n + v) * {WARPGROUP} + t) * {SUMS};");
        line!(text, "const {vector} own = load_vector<float, {SUMS}>((const float*)part + place);");
        line!(text, "{vector} sum = own;");
        line!(text, "if (turn > 0) sum = load_vector<float, {SUMS}>(before + place);");
        line!(text, "UNROLL");
        let added = "turn > 0 ? sum.x[e] + own.x[e] : own.x[e]";
        line!(text, "for (u32 e = 0; e < {SUMS}; e += 1) whole[v * {SUMS} + e] = {added};");
        text.end();
    }

    /// Prints how a quad stores two rows of these.
    fn print_rounded(&self, store: QuadStore, text: &mut Text) {
        let (a, scale) = (&self.attention, number(DType::F32, self.attention.scale));
        let [first_row, first_column] = self.first_of_part("consumer");
        line!(text, "UNROLL");
        line!(text, "for (u32 r = 0; r < 2; r += 1) {{");
        line!(text, "if ({first_column} + n * 8 >= {}) continue;", a.dim);
        line!(text, "const u32 row = {first_row} + t / 32 * 16 + lane / 4 + r * 8;");
        let numbers =
            |tile: &str| [0, 1].map(|e| format!("whole[{tile} * {SUMS} + r * 2 + {e}] * {scale}"));
        store.print_vector("of_dq", numbers, text);
        let column = format!("{first_column} + n * 8 + {}", store.column());
        let place = format!("dq + row * {}ULL + {column}", a.q[1]);
        line!(text, "if (first_column + row < {}) store_vector({place}, of_dq);", a.queries);
        text.end();
    }

    /// The first query and the first column of a warpgroup's part of dQ.
    fn first_of_part(&self, consumer: &str) -> [String; 2] {
        let own = format!("{consumer} * {PART_SIDE}");
        if self.splits_columns() { ["0".to_owned(), own] } else { [own, "0".to_owned()] }
    }

    fn print_consumer(&self, names: &Names, text: &mut Text) {
        let accumulators = self.accumulators();
        line!(text, "setmaxnreg_inc<{}>();", self.registers()[1]);
        line!(text, "const u32 consumer = threadIdx.x / {WARPGROUP} - 1;");
        line!(text, "const u32 own_row = consumer * 64 + warp * 16 + lane / 4;");
        line!(text, "float acc[{accumulators}] = {{}}, v_acc[{accumulators}] = {{}};");
        line!(text, "float scores[{SCORES}], slopes[{SCORES}], part[{}];", SUMS * VECTORS);
        line!(text, "u32 p[{0}][4], ds[{0}][4];", COLUMNS / 16);
        line!(text, "if (all_steps > 0) {{");
        line!(text, "mbarrier_wait(k_full, 0);");
        line!(text, "mbarrier_wait(v_full, 0);");
        text.end();
        line!(text, "NO_UNROLL");
        line!(text, "for (u32 step = 0; step < all_steps; step += 1) {{");
        line!(text, "const u32 stage = step % {STAGES}, parity = step / {STAGES} % 2;");
        self.turns().print_position("step", text);
        match self.is_split() && self.step == COLUMNS {
            true => self.print_whole_step(names, text),
            false => self.print_step(names, text),
        }
        text.end();
        line!(text, "UNROLL");
        line!(text, "for (u32 r = 0; r < 2; r += 1) {{");
        line!(text, "const u32 row = own_row + r * 8;");
        let numbers = |sums: &str, tile: &str| {
            [0, 1].map(|e| format!("{sums}[(n + {tile}) * 4 + r * 2 + {e}]"))
        };
        print_key_gradients(&self.attention, names, numbers, text);
        text.end();
    }

    /// Prints a step of few queries, whose products run beside each other.
    fn print_whole_step(&self, names: &Names, text: &mut Text) {
        line!(text, "mbarrier_wait(q_full + stage, parity);");
        self.print_product(["k", "q", "scores"], "0", text);
        line!(text, "mbarrier_wait(dout_full + stage, parity);");
        self.print_product(["v", "dout", "slopes"], "0", text);
        self.print_slopes(names, "0", text);
        self.print_fragments(text);
        line!(text, "mbarrier_wait(slopes_empty, (step + 1) % 2);");
        self.print_shared_slopes("0", text);
        Self::print_arrival("slopes_full", text);
        self.print_gradient(["p", "dout", "v_acc"], "0", text);
        self.print_query_part(text);
        line!(text, "warpgroup_wait<1>(v_acc);");
        // Until here the registers of the weights must not be used for others.
        line!(text, "keep_order(p);");
        line!(text, "keep_order(v_acc);");
        self.print_gradient(["ds", "q", "acc"], "0", text);
        line!(text, "warpgroup_wait<1>(part);");
        line!(text, "keep_order(part);");
        line!(text, "if (lane == 0) mbarrier_arrive(slopes_empty);");
        self.print_shared_part(text);
        line!(text, "warpgroup_wait<0>(acc);");
        line!(text, "keep_order(ds);");
        line!(text, "if (lane == 0) mbarrier_arrive(stage_empty + stage);");
    }

    /// Prints a step that goes over its queries, some at a time.
    fn print_step(&self, names: &Names, text: &mut Text) {
        line!(text, "mbarrier_wait(q_full + stage, parity);");
        line!(text, "mbarrier_wait(dout_full + stage, parity);");
        line!(text, "mbarrier_wait(slopes_empty, (step + 1) % 2);");
        // Products of a loop that goes on would be serialised.
        line!(text, "UNROLL");
        line!(text, "for (u32 query = 0; query < {}; query += {COLUMNS}) {{", self.step);
        self.print_product(["k", "q", "scores"], "query", text);
        self.print_product(["v", "dout", "slopes"], "query", text);
        self.print_slopes(names, "query", text);
        self.print_fragments(text);
        self.print_shared_slopes("query", text);
        self.print_gradient(["p", "dout", "v_acc"], "query", text);
        self.print_gradient(["ds", "q", "acc"], "query", text);
        line!(text, "warpgroup_wait<0>(acc);");
        line!(text, "keep_order(v_acc);");
        line!(text, "keep_order(p);");
        line!(text, "keep_order(ds);");
        text.end();
        Self::print_arrival("slopes_full", text);
        line!(text, "if (lane == 0) mbarrier_arrive(stage_empty + stage);");
        self.print_query_part(text);
        line!(text, "warpgroup_wait<0>(part);");
        line!(text, "if (lane == 0) mbarrier_arrive(slopes_empty);");
        self.print_shared_part(text);
    }

    /// Prints the start of the product of the warpgroup's keys with the queries of a step, from one
    /// on.
    fn print_product(&self, [keys, queries, result]: [&str; 3], from: &str, text: &mut Text) {
        let [_, of_queries] = self.tile_bytes();
        let start = format!("{keys}_tile + consumer * {}", 64 * SWIZZLE_ROW);
        self.print_descriptor(&format!("{keys}_rows"), &start, 16, text);
        let start = format!("{queries}_stages + stage * {of_queries} + {from} * {SWIZZLE_ROW}");
        self.print_descriptor(&format!("{queries}_rows"), &start, 16, text);
        Self::print_zeros(result, SCORES, text);
        line!(text, "UNROLL");
        line!(text, "for (u32 d = 0; d < {}; d += 1) {{", self.attention.dim / 16);
        // Steps of 16 along a row of 64, and from one half to the next, in 16 bytes.
        let at = |rows: usize| format!("d / 4 * {} + d % 4 * 2", rows * SWIZZLE_ROW / 16);
        line!(
            text,
            "warpgroup_mma<{}, 0, 0>({result}, {keys}_rows + ({}), {queries}_rows + ({}));",
            self.memory(),
            at(KEY_TILE),
            at(self.step)
        );
        text.end();
        line!(text, "warpgroup_commit();");
    }

    fn print_descriptor(&self, name: &str, start: &str, leading: usize, text: &mut Text) {
        line!(
            text,
            "const u64 {name} = \
             matrix_descriptor(shared_address({start}), {leading}, {SWIZZLE}, SWIZZLE_128);"
        );
    }

    /// Prints accumulators that are zero, and the fence before they are added to.
    fn print_zeros(result: &str, count: usize, text: &mut Text) {
        line!(text, "UNROLL");
        line!(text, "for (u32 i = 0; i < {count}; i += 1) {result}[i] = 0;");
        line!(text, "warpgroup_fence({result});");
    }

    /// Opens the loop over a thread's scores, with the query `s` and the key `j` of each.
    fn open_scores(&self, from: &str, text: &mut Text) {
        line!(text, "UNROLL");
        line!(text, "for (u32 i = 0; i < {}; i += 1) {{", SCORES);
        line!(text, "const i64 s = first_column + {from} + i / 4 * 8 + lane % 4 * 2 + i % 2;");
        line!(text, "const i64 j = first_row + own_row + i / 2 % 2 * 8;");
    }

    /// Prints P and dS, which replace scores and dP, of queries from one on.
    fn print_slopes(&self, names: &Names, from: &str, text: &mut Text) {
        if self.is_split() {
            self.print_split_slopes(names, from, text);
            return;
        }
        line!(text, "warpgroup_wait<0>(slopes);");
        line!(text, "keep_order(scores);");
        self.print_bounds(from, text);
        self.open_scores(from, text);
        let place = format!("stage * {} + {from} + i / 4 * 8 + lane % 4 * 2 + i % 2", self.step);
        line!(text, "const float base = bases[{place}];");
        line!(text, "const float delta = deltas[{place}];");
        line!(text, "float& weight = scores[i];");
        line!(text, "float& slope = slopes[i];");
        let key = ["first_row + own_row - lane / 4", "lane / 4", "i / 2 % 2 * 8"];
        print_slope(&self.attention, names, &self.seen(names), key, text);
        text.end();
    }

    /// Prints the same: exponentials while dP is multiplied.
    fn print_split_slopes(&self, names: &Names, from: &str, text: &mut Text) {
        let (a, lowest) = (&self.attention, number(DType::F32, f64::NEG_INFINITY));
        line!(text, "warpgroup_wait<1>(scores);");
        line!(text, "keep_order(scores);");
        self.open_masked(text);
        self.print_bounds(from, text);
        self.open_scores(from, text);
        line!(text, "if (!({})) scores[i] = {lowest};", self.seen(names));
        (0..2).for_each(|_| text.end());
        self.open_pairs(["bases", from, "base"], text);
        let factor = exponent_factor(a);
        let score = "scores[i * 4 + e]";
        line!(text, "{score} = ex2_approx(fmaf({score}, {factor}, -base.x[e % 2]));");
        (0..2).for_each(|_| text.end());
        line!(text, "warpgroup_wait<0>(slopes);");
        self.open_pairs(["deltas", from, "delta"], text);
        let slope = "slopes[i * 4 + e]";
        line!(text, "{slope} = {score} * ({slope} - delta.x[e % 2]);");
        (0..2).for_each(|_| text.end());
        // Where dP of a hidden pair is no number, so would be its product with zero.
        self.open_masked(text);
        line!(text, "UNROLL");
        line!(text, "for (u32 i = 0; i < {SCORES}; i += 1) {{");
        line!(text, "if (scores[i] == 0.0f) slopes[i] = 0.0f;");
        (0..2).for_each(|_| text.end());
    }

    /// Prints P and dS, rounded, as fragments.
    fn print_fragments(&self, text: &mut Text) {
        line!(text, "UNROLL");
        line!(text, "for (u32 i = 0; i < {}; i += 1) {{", SCORES / 2);
        for (fragments, numbers) in [("p", "scores"), ("ds", "slopes")] {
            line!(
                text,
                "{fragments}[i / 4][i % 4] = packed<{}>({numbers}[i * 2], {numbers}[i * 2 + 1]);",
                self.memory()
            );
        }
        text.end();
    }

    /// Opens the loops over groups `i` of four scores, and over these, with the pair of numbers of
    /// their queries.
    fn open_pairs(&self, [numbers, from, name]: [&str; 3], text: &mut Text) {
        line!(text, "UNROLL");
        line!(text, "for (u32 i = 0; i < {}; i += 1) {{", SCORES / 4);
        let place = format!("{numbers} + stage * {} + {from} + i * 8 + lane % 4 * 2", self.step);
        line!(text, "const Vector<float, 2> {name} = load_vector<float, 2>({place});");
        line!(text, "UNROLL");
        line!(text, "for (u32 e = 0; e < 4; e += 1) {{");
    }

    /// Opens what is done where some query of the step does not see some key of the block.
    fn open_masked(&self, text: &mut Text) {
        let Attention { keys, causal, window, documents, .. } = self.attention;
        if documents.is_some() {
            line!(text, "{{");
            return;
        }
        let mut hidden = format!("first_row + {KEY_TILE} > {keys}");
        if causal {
            hidden += &format!(" || first_row + {} > first_column + offset", KEY_TILE - 1);
        }
        if window > 0 {
            let last = format!("first_column + {} + offset - {window}", self.step - 1);
            hidden += &format!(" || first_row <= {last}");
        }
        line!(text, "if ({hidden}) {{");
    }

    /// Prints which queries see a thread's keys, the second of which is eight behind the first:
    /// they are counted from the thread's first one, in numbers of 32 bits, as those of 64 bits
    /// would be spilled. `keys_left` is how many keys there are from the thread's first one on.
    fn print_bounds(&self, from: &str, text: &mut Text) {
        let Attention { keys, causal, window, .. } = self.attention;
        line!(
            text,
            "const i32 keys_left = (i32)clamped({keys} - first_row, {KEY_TILE}) - own_row;"
        );
        // Farther than any tile.
        let far = 2 * (KEY_TILE + self.step);
        let bound = |name: &str, more: usize, text: &mut Text| {
            let own = format!("first_row - offset - first_column + {}", more + far);
            let place = format!("own_row - lane % 4 * 2 - {from}");
            line!(text, "const i32 {name} = (i32)clamped({own}, {}) - {far} + {place};", 2 * far);
        };
        if causal {
            bound("seen_from", 0, text);
        }
        if window > 0 {
            bound("seen_to", window, text);
        }
    }

    /// Whether the query of score `i` sees its key, as an expression.
    fn seen(&self, names: &Names) -> String {
        let Attention { queries, causal, window, .. } = self.attention;
        let (key, column) = ("i / 2 % 2 * 8", "(i32)(i / 4 * 8 + i % 2)");
        let mut seen = format!("(i32)({key}) < keys_left");
        if causal {
            seen += &format!(" && {column} >= seen_from + (i32)({key})");
        }
        if window > 0 {
            seen += &format!(" && {column} < seen_to + (i32)({key})");
        }
        if let Some(together) = is_together(&self.attention, names) {
            // Documents are read only of what is there.
            seen += &format!(" && (s >= {queries} || {together})");
        }
        seen
    }

    /// Prints dS in shared memory, of queries from one on.
    fn print_shared_slopes(&self, from: &str, text: &mut Text) {
        let memory = self.memory();
        line!(text, "UNROLL");
        line!(text, "for (u32 i = 0; i < {}; i += 1) {{", SCORES / 2);
        line!(text, "const u32 row = own_row + i % 2 * 8, column = {from} + i / 2 * 8;");
        line!(text, "const u32 pair[1] = {{ds[i / 4][i % 4]}};");
        let half = KEY_TILE * SWIZZLE_ROW;
        line!(text, "u8* const to = slopes_tile + column / 64 * {half} + row * {SWIZZLE_ROW};");
        let place = "to + (column / 8 % 8 ^ row % 8) * 16 + lane % 4 * 4";
        line!(text, "store_shared({place}, vector_of<{memory}>(pair));");
        text.end();
    }

    /// Prints that a warp has written what TMA or products read.
    fn print_arrival(barrier: &str, text: &mut Text) {
        line!(text, "fence_proxy_async();");
        line!(text, "sync_warp();");
        line!(text, "if (lane == 0) mbarrier_arrive({barrier});");
    }

    /// Prints the start of the product of fragments with the rows of a step, from one on.
    fn print_gradient(&self, [fragments, queries, result]: [&str; 3], from: &str, text: &mut Text) {
        let ([_, of_queries], half) = (self.tile_bytes(), self.step * SWIZZLE_ROW);
        let columns = format!("{queries}_columns");
        let start = format!("{queries}_stages + stage * {of_queries} + {from} * {SWIZZLE_ROW}");
        self.print_descriptor(&columns, &start, half, text);
        line!(text, "warpgroup_fence({result});");
        line!(text, "UNROLL");
        line!(text, "for (u32 t = 0; t < {}; t += 1) {{", COLUMNS / 16);
        line!(
            text,
            "warpgroup_mma<{}, 1>({result}, {fragments}[t], {columns} + t * {});",
            self.memory(),
            2 * SWIZZLE / 16
        );
        text.end();
        line!(text, "warpgroup_commit();");
    }

    /// Prints the start of the product of dS with the block's keys.
    fn print_query_part(&self, text: &mut Text) {
        let [first_row, first_column] = self.first_of_part("consumer");
        // Each 64 queries of dS, and each 64 columns of K, have a half of the tile.
        let half = KEY_TILE * SWIZZLE_ROW;
        let start = |tile: &str, first: &str| format!("{tile} + {first} / 64 * {half}");
        line!(text, "mbarrier_wait(slopes_full, step % 2);");
        self.print_descriptor("ds_rows", &start("slopes_tile", &first_row), half, text);
        self.print_descriptor("k_columns", &start("k_tile", &first_column), half, text);
        Self::print_zeros("part", SUMS * VECTORS, text);
        line!(text, "UNROLL");
        line!(text, "for (u32 t = 0; t < {}; t += 1) {{", KEY_TILE / 16);
        let step = 2 * SWIZZLE / 16;
        line!(
            text,
            "warpgroup_mma<{}, 1, 1>(part, ds_rows + t * {step}, k_columns + t * {step});",
            self.memory()
        );
        text.end();
        line!(text, "warpgroup_commit();");
    }

    /// Prints the part in shared memory, once the part of the step before has been read.
    fn print_shared_part(&self, text: &mut Text) {
        line!(text, "mbarrier_wait(part_empty + consumer, (step + 1) % 2);");
        line!(text, "UNROLL");
        line!(text, "for (u32 n = 0; n < {VECTORS}; n += 1) {{");
        line!(text, "Vector<float, {SUMS}> x;");
        line!(text, "UNROLL");
        line!(text, "for (u32 e = 0; e < {SUMS}; e += 1) x.x[e] = part[n * {SUMS} + e];");
        let place = format!("(n * {WARPGROUP} + threadIdx.x % {WARPGROUP}) * {}", SUMS * 4);
        line!(text, "store_shared(parts + consumer * {} + {place}, x);", PART * 4);
        text.end();
        Self::print_arrival("part_full + consumer", text);
    }
}

impl fmt::Display for FlashWarpgroupBackward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "FlashAttention-3: tiles of {KEY_TILE} keys by 2 warpgroups and of {} queries in \
             {STAGES} stages by TMA, dQ by turns",
            self.step
        )
    }
}
