//! The gradient of attention of BF16 and F16 on tensor cores (sm_80 and later), as in
//! FlashAttention-2, but for the order in which dQ is summed.
//!
//! A block takes a tile of keys and goes over tiles of the queries of all heads that read them. It
//! computes `Sᵀ = K Qᵀ` and `dPᵀ = V dOᵀ`, from them `P = exp(S − lse)` and
//! `dS = P ∘ (dP − delta)`, where `delta` is the dot product of a row of O and dO, and adds
//! `Pᵀ dO` to its dV and `dSᵀ Q` to its dK, which it keeps in registers. Its part of dQ, `dS K`,
//! it adds to sums in a workspace when it has its turn (`turns`). P and dS are rounded to the type
//! of the operands.
//!
//! Versions:
//! 1. seven products instead of five, and no atomic operations: a function for dQ, whose blocks
//!    took tiles of queries, and one for dK and dV; fragments of the block's own rows are loaded
//!    from shared memory in each step; rows of O are reduced by a function before.
//! 2. quads exchange pairs of columns, and store whole sectors (`quads`).
//! 3. five products: dS goes through shared memory, where Q and dO of the step were, and parts of
//!    dQ are added by turns.

use std::fmt;

use ir::DType;

use super::attention::{Names, Part, print_kept, print_scalars, row_of, tile_of_queries};
use super::flash::{
    SHARED_ELEMENTS, THREADS, VECTOR, WARPS, exponent_factor, is_plain, print_copy, print_score,
    visible,
};
use super::parameter::Parameter;
use super::quads::QuadStore;
use super::shared::{Fragments, Operand, SharedTile};
use super::text::{Text, element, line, number};
use super::turns::Turns;
use crate::kernel::Attention;

/// Rows of the block's tile: one tile of `mma.sync` per warp.
pub(super) const ROWS: usize = 16 * WARPS;

/// Elements of a vector of sums: of f32, 16 bytes.
pub(super) const SUMS: usize = 4;

/// The key of a warp of a thread's first score, and how far others of it are from there.
const KEYS: [&str; 2] = ["lane / 4", "e / 2 * 8"];

/// The gradients of queries, keys and values, each tile of keys of a head by one block.
#[derive(Clone, Debug, PartialEq)]
pub struct FlashBackward {
    /// What is computed.
    pub attention: Attention,
    /// Queries of a step.
    pub step: usize,
}

/// One of the four operands, `name` that of its pointer.
struct Rows {
    name: &'static str,
    stride: usize,
}

impl FlashBackward {
    /// The tiles of an attention that fits.
    pub(super) fn new(a: &Attention) -> FlashBackward {
        // As many as registers have room for beside the gradients, and shared memory.
        let step = match a.dim {
            ..=32 => 64,
            33..=64 => 32,
            _ => 16,
        };
        let tile = FlashBackward { attention: a.clone(), step };
        let elements = 2 * (tile.block_tile().elements() + tile.stage());
        assert!(elements <= SHARED_ELEMENTS, "the tiles fit");
        tile
    }

    pub(super) fn turns(&self) -> Turns<'_> {
        Turns { attention: &self.attention, keys: ROWS, queries: self.step }
    }

    pub(super) fn blocks(&self) -> u64 {
        self.turns().blocks()
    }

    /// Tiles of queries of all heads and samples: as many counters are there.
    pub(super) fn counters(&self) -> u64 {
        self.turns().all_query_tiles()
    }

    /// Sums of dQ in the workspace: vectors of each thread, in its order.
    pub(super) fn sums(&self) -> u64 {
        self.counters() * self.sums_of_tile() as u64
    }

    /// The number of the workspace of sums of dQ, behind that of `delta`, and its bytes.
    pub(super) fn shared_sums(&self) -> (usize, u64) {
        (1, self.sums() * DType::F32.size())
    }

    fn sums_of_tile(&self) -> usize {
        2 * self.groups() * THREADS * SUMS
    }

    pub(super) fn block_tile(&self) -> SharedTile {
        SharedTile { rows: ROWS, columns: self.attention.dim.next_power_of_two() }
    }

    pub(super) fn step_tile(&self) -> SharedTile {
        SharedTile { rows: self.step, columns: self.attention.dim.next_power_of_two() }
    }

    /// dS of a step, whose rows are keys.
    pub(super) fn slopes_tile(&self) -> SharedTile {
        SharedTile { rows: ROWS, columns: self.step }
    }

    /// Elements of a stage: Q and dO of a step, then dS.
    fn stage(&self) -> usize {
        (2 * self.step_tile().elements()).max(self.slopes_tile().elements())
    }

    /// Warps along the queries of a step: of the others each has columns of its own of dQ.
    pub(super) fn row_warps(&self) -> usize {
        self.step / 16
    }

    /// Groups of 16 columns of dQ that a warp has.
    pub(super) fn groups(&self) -> usize {
        (self.attention.dim / 16).div_ceil(WARPS / self.row_warps())
    }

    /// Whether warps have as many groups of columns.
    pub(super) fn is_even(&self) -> bool {
        self.groups() * (WARPS / self.row_warps()) == self.attention.dim / 16
    }

    /// The operands of the block's rows, and those of a step: of S, then of dP.
    fn operands(&self) -> [[Rows; 2]; 2] {
        let a = &self.attention;
        let of = |name, strides: [usize; 3]| Rows { name, stride: strides[1] };
        [[of("k", a.k), of("v", a.v)], [of("q", a.q), of("dout", a.out)]]
    }

    pub(super) fn print(&self, parameters: &[Parameter], text: &mut Text) {
        let a = &self.attention;
        let names = Names::of(a, Part::Keys, parameters);
        let (memory, columns) = (element(a.dtype), a.dim / 16);
        let (block, stage) = (self.block_tile().elements(), self.stage());
        line!(text, "SHARED({memory}, block_tiles, {});", 2 * block);
        line!(text, "SHARED({memory}, stages, {});", 2 * stage);
        print_scalars(a, &names, text);
        self.print_block(&names, text);
        self.print_first_copies(&names, text);
        // For each 16 columns a warp tile of its own: fragments of all do not fit the registers.
        line!(text, "float acc[{columns}][1][2][4] = {{}};");
        line!(text, "float v_acc[{columns}][1][2][4] = {{}};");
        line!(text, "NO_UNROLL");
        line!(text, "for (u32 step = 0; step < steps; step += 1) {{");
        line!(text, "cp_async_wait<0>();");
        line!(text, "sync_block();");
        line!(text, "if (step + 1 < steps) {{");
        self.print_copies(&names, "step + 1", text);
        text.end();
        line!(text, "cp_async_commit();");
        line!(text, "{memory}* stage = stages + step % 2 * {stage};");
        self.turns().print_position("step", text);
        self.print_products(text);
        self.print_slopes(&names, text);
        self.print_gradients(text);
        self.print_turn(text);
        self.print_query_part(text);
        self.print_addition(&names, text);
        text.end();
        self.print_epilogue(&names, text);
    }

    /// Prints the block's keys, and the steps that they take.
    fn print_block(&self, names: &Names, text: &mut Text) {
        line!(text, "const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;");
        self.turns().print_block(text);
        for rows in &self.operands()[0] {
            self.print_pointer(names, rows.name, "first_row", text);
        }
    }

    /// Prints the pointer to a row of an operand.
    fn print_pointer(&self, names: &Names, name: &str, at: &str, text: &mut Text) {
        let a = &self.attention;
        let (buffer, strides, head) = match name {
            "q" => (&names.q, a.q, "h"),
            "dout" => (&names.dout, a.out, "h"),
            "k" => (&names.k, a.k, "g"),
            _ => (&names.v, a.v, "g"),
        };
        let row = row_of(buffer, strides, "b", at, head);
        line!(text, "const {}* {name} = {row};", element(a.dtype));
    }

    /// Prints the copies of the block's rows and of the first step, one group.
    fn print_first_copies(&self, names: &Names, text: &mut Text) {
        let tile = self.block_tile();
        for (at, operand) in self.operands()[0].iter().enumerate() {
            let to = format!("block_tiles + {}", at * tile.elements());
            let count = format!("{} - first_row", self.attention.keys);
            let from = (operand.name, operand.stride);
            print_copy(self.attention.dim, tile, from, [&to, &count], text);
        }
        line!(text, "if (steps > 0) {{");
        self.print_copies(names, "0", text);
        text.end();
        line!(text, "cp_async_commit();");
    }

    /// Prints the copies of a step.
    fn print_copies(&self, names: &Names, step: &str, text: &mut Text) {
        let (a, tile) = (&self.attention, self.step_tile());
        self.turns().print_position(step, text);
        for (at, operand) in self.operands()[1].iter().enumerate() {
            self.print_pointer(names, operand.name, "0", text);
            let to = format!("stages + ({step}) % 2 * {} + {}", self.stage(), at * tile.elements());
            let from = format!("{} + first_column * {}", operand.name, operand.stride);
            let count = format!("{} - first_column", a.queries);
            print_copy(a.dim, tile, (&from, operand.stride), [&to, &count], text);
        }
    }

    /// Prints `scores` and `slopes`: the products of the block's rows with those of the step.
    fn print_products(&self, text: &mut Text) {
        let (a, columns) = (&self.attention, self.step);
        let (block, step) = (self.block_tile(), self.step_tile());
        line!(text, "float scores[1][{0}][4] = {{}}, slopes[1][{0}][4] = {{}};", columns / 8);
        // The addresses of all fragments do not fit the registers beside large gradients.
        line!(text, "{}", if a.dim > 64 { "NO_UNROLL" } else { "UNROLL" });
        line!(text, "for (u32 d = 0; d < {}; d += 16) {{", a.dim);
        line!(text, "u32 a[1][4], b[{}][4];", columns / 16);
        for (at, product) in ["scores", "slopes"].into_iter().enumerate() {
            let rows = Fragments { operand: Operand::A, k_major: true, registers: ("a", 1) };
            let start = format!("block_tiles + {}", at * block.elements());
            rows.print_ldmatrix(block, [&start, "warp * 16", "d"], text);
            let registers = ("b", columns / 16);
            let of_step = Fragments { operand: Operand::B, k_major: true, registers };
            let start = format!("stage + {}", at * step.elements());
            of_step.print_ldmatrix(step, [&start, "0", "d"], text);
            line!(text, "warp_mma<{}>({product}, a, b);", element(a.dtype));
        }
        text.end();
    }

    /// Prints the weights in `scores`, after dropout, and the gradients of scores in `slopes`,
    /// before they are scaled.
    fn print_slopes(&self, names: &Names, text: &mut Text) {
        let a = &self.attention;
        for (name, count) in [("n", self.step / 8), ("e", 4)] {
            line!(text, "UNROLL");
            line!(text, "for (u32 {name} = 0; {name} < {count}; {name} += 1) {{");
        }
        line!(text, "const i64 j = first_row + warp * 16 + {} + {};", KEYS[0], KEYS[1]);
        line!(text, "const i64 s = first_column + n * 8 + lane % 4 * 2 + e % 2;");
        print_query_values(a, names, text);
        line!(text, "float& weight = scores[0][n][e];");
        line!(text, "float& slope = slopes[0][n][e];");
        let visible = format!("s < {} && {}", a.queries, visible(a, names));
        let key = ["first_row + warp * 16", KEYS[0], KEYS[1]];
        print_slope(a, names, &visible, key, text);
        text.end();
        text.end();
    }

    /// Prints the products of weights and slopes with the rows of the step, added to the gradients
    /// of values and keys.
    fn print_gradients(&self, text: &mut Text) {
        let (a, tile) = (&self.attention, self.step_tile());
        let (memory, columns) = (element(a.dtype), a.dim / 16);
        line!(text, "UNROLL");
        line!(text, "for (u32 t = 0; t < {}; t += 16) {{", self.step);
        line!(text, "u32 a[1][4];");
        for (factors, offset, sums) in [("slopes", 0, "acc"), ("scores", tile.elements(), "v_acc")]
        {
            line!(
                text,
                "accumulators_to_a<{memory}>(a[0], {factors}[0][t / 8], {factors}[0][t / 8 + 1]);"
            );
            line!(text, "UNROLL");
            line!(text, "for (u32 c = 0; c < {columns}; c += 1) {{");
            line!(text, "u32 b[1][4];");
            let registers = ("b", 1);
            let fragments = Fragments { operand: Operand::B, k_major: false, registers };
            let start = format!("stage + {offset}");
            fragments.print_ldmatrix(tile, [&start, "c * 16", "t"], text);
            line!(text, "warp_mma<{memory}>({sums}[c], a, b);");
            text.end();
        }
        text.end();
    }

    /// Prints the block's turn of the tile of queries, and dS in shared memory.
    fn print_turn(&self, text: &mut Text) {
        let (step, slopes) = (self.step, self.slopes_tile());
        let memory = element(self.attention.dtype);
        self.turns().print_turn(text);
        // All warps have read Q and dO.
        line!(text, "sync_block();");
        line!(text, "UNROLL");
        line!(text, "for (u32 n = 0; n < {}; n += 1) {{", step / 8);
        line!(text, "UNROLL");
        line!(text, "for (u32 r = 0; r < 2; r += 1) {{");
        line!(text, "const u32 row = warp * 16 + lane / 4 + r * 8;");
        line!(text, "const u32 column = n * 8 + lane % 4 * 2;");
        let [low, high] = [0, 1].map(|e| format!("slopes[0][n][2 * r + {e}]"));
        line!(text, "const u32 pair[1] = {{packed<{memory}>({low}, {high})}};");
        let place = slopes.offset("row", "column");
        line!(text, "store_vector(stage + {place}, vector_of<{memory}>(pair));");
        text.end();
        text.end();
    }

    /// Prints `part`: the product of dS with the block's keys.
    fn print_query_part(&self, text: &mut Text) {
        let (memory, groups) = (element(self.attention.dtype), self.groups());
        line!(text, "sync_block();");
        line!(text, "float part[{groups}][1][2][4] = {{}};");
        let rows = self.row_warps();
        line!(text, "const u32 first_group = warp / {rows} * {groups};");
        line!(text, "UNROLL");
        line!(text, "for (u32 t = 0; t < {ROWS}; t += 16) {{");
        line!(text, "u32 a[1][4];");
        let of_slopes = Fragments { operand: Operand::A, k_major: false, registers: ("a", 1) };
        let first = format!("warp % {rows} * 16");
        of_slopes.print_ldmatrix(self.slopes_tile(), ["stage", &first, "t"], text);
        self.open_groups(1, text);
        line!(text, "u32 b[1][4];");
        let of_keys = Fragments { operand: Operand::B, k_major: false, registers: ("b", 1) };
        let first = "(first_group + c) * 16";
        of_keys.print_ldmatrix(self.block_tile(), ["block_tiles", first, "t"], text);
        line!(text, "warp_mma<{memory}>(part[c], a, b);");
        text.end();
        text.end();
    }

    /// Opens the loop over the groups `c` of columns of a warp, some at a time.
    fn open_groups(&self, at_once: usize, text: &mut Text) {
        line!(text, "UNROLL");
        line!(text, "for (u32 c = 0; c < {}; c += {at_once}) {{", self.groups());
        if !self.is_even() {
            line!(text, "if (first_group + c >= {}) continue;", self.attention.dim / 16);
        }
    }

    /// Prints the addition of the part to the sums of the tile of queries when the block has its
    /// turn.
    fn print_addition(&self, names: &Names, text: &mut Text) {
        let [_, sums, turns] = &names.workspaces[..] else { unreachable!("three workspaces") };
        let size = self.sums_of_tile();
        let of_all = tile_of_queries(&self.attention, self.step, "(u64)tile");
        line!(text, "const u64 tile_of_all = {of_all};");
        line!(text, "float* sums = {sums} + tile_of_all * {size} + threadIdx.x * {SUMS};");
        line!(text, "u32* next_turn = {turns} + tile_of_all;");
        // The first to add waits for its turn too: that the counter has begun anew.
        line!(text, "if (threadIdx.x == 0) wait_for_turn(next_turn, turn);");
        line!(text, "sync_block();");
        let vector = format!("Vector<float, {SUMS}>");
        let open = |text: &mut Text| {
            self.open_groups(1, text);
            line!(text, "UNROLL");
            line!(text, "for (u32 n = 0; n < 2; n += 1) {{");
            line!(text, "float* place = sums + (c * 2 + n) * {};", THREADS * SUMS);
        };
        let each = |statement: String, text: &mut Text| {
            line!(text, "UNROLL");
            line!(text, "for (u32 e = 0; e < {SUMS}; e += 1) {statement}");
        };
        line!(text, "if (turn > 0) {{");
        open(text);
        line!(text, "const {vector} sum = load_vector<float, {SUMS}>(place);");
        each("part[c][0][n][e] = sum.x[e] + part[c][0][n][e];".to_owned(), text);
        (0..3).for_each(|_| text.end());
        line!(text, "if (own == first_own) {{");
        self.print_queries(names, text);
        text.end();
        line!(text, "if (own > first_own) {{");
        open(text);
        line!(text, "{vector} sum;");
        each("sum.x[e] = part[c][0][n][e];".to_owned(), text);
        line!(text, "store_vector(place, sum);");
        (0..3).for_each(|_| text.end());
        line!(text, "sync_block();");
        line!(text, "if (threadIdx.x == 0 && own > first_own) end_turn(next_turn, turn + 1);");
    }

    /// Prints the gradient of the queries of a step, which is complete.
    fn print_queries(&self, names: &Names, text: &mut Text) {
        let a = &self.attention;
        let (memory, scale) = (element(a.dtype), number(DType::F32, a.scale));
        let row = row_of(&names.grads[0], a.q, "b", "first_column", "h");
        line!(text, "{memory}* dq = {row};");
        let groups = if self.is_even() { self.groups() } else { 1 };
        let store = QuadStore::of(a.dtype, 2 * groups, VECTOR);
        line!(text, "UNROLL");
        line!(text, "for (u32 r = 0; r < 2; r += 1) {{");
        line!(text, "const u32 row = warp % {} * 16 + lane / 4 + r * 8;", self.row_warps());
        self.open_groups(store.tiles() / 2, text);
        let numbers = |tile: &str| {
            let at = format!("part[c + {tile} / 2][0][{tile} % 2]");
            [0, 1].map(|e| format!("{at}[2 * r + {e}] * {scale}"))
        };
        store.print_vector("of_dq", numbers, text);
        let column = format!("(first_group + c) * 16 + {}", store.column());
        let place = format!("dq + row * {}ULL + {column}", a.q[1]);
        line!(text, "if (first_column + row < {}) store_vector({place}, of_dq);", a.queries);
        text.end();
        text.end();
    }

    fn print_epilogue(&self, names: &Names, text: &mut Text) {
        let a = &self.attention;
        line!(text, "UNROLL");
        line!(text, "for (u32 r = 0; r < 2; r += 1) {{");
        line!(text, "const u32 row = warp * 16 + lane / 4 + r * 8;");
        let numbers = |sums: &str, tile: &str| {
            let at = format!("{sums}[(n + {tile}) / 2][0][(n + {tile}) % 2]");
            [0, 1].map(|e| format!("{at}[2 * r + {e}]"))
        };
        print_key_gradients(a, names, numbers, text);
        text.end();
    }
}

/// Prints `base` and `delta` of query `s`: its `lse` to the base of two, infinite where it sees no
/// key, and the dot product of its rows of O and dO.
pub(super) fn print_query_values(a: &Attention, names: &Names, text: &mut Text) {
    let Attention { heads, queries, .. } = a;
    let [lowest, infinity] = [f64::NEG_INFINITY, f64::INFINITY].map(|x| number(DType::F32, x));
    let factor = number(DType::F32, std::f64::consts::LOG2_E);
    let lse = names.lse.as_deref().unwrap_or_default();
    line!(text, "const bool is_query = s < {queries};");
    line!(text, "const u64 query = (b * {heads} + h) * {queries} + (is_query ? (u64)s : 0);");
    line!(text, "const float lse_of = is_query ? {lse}[query] : {lowest};");
    line!(text, "const float base = lse_of == {lowest} ? {infinity} : lse_of * {factor};");
    line!(text, "const float delta = is_query ? {}[query] : 0.0f;", names.workspaces[0]);
}

/// Prints how the products of query `s` and key `j` in `weight` and `slope` become the weight,
/// after dropout, and the gradient of the score before it is scaled, given `base` and `delta`.
/// `visible` is whether the query is there and sees the key, or is not there and `base` infinite;
/// `key` is the key as [`print_kept`] takes it.
pub(super) fn print_slope(
    a: &Attention,
    names: &Names,
    visible: &str,
    key: [&str; 3],
    text: &mut Text,
) {
    let score = if is_plain(a) {
        "weight"
    } else {
        print_score(a, names, "weight", text);
        "score"
    };
    let factor = exponent_factor(a);
    line!(text, "const bool is_visible = {visible};");
    line!(
        text,
        "const float share = is_visible ? ex2_approx(fmaf({score}, {factor}, -base)) : 0.0f;"
    );
    let kept = if a.dropout.is_some() {
        print_kept(a, key, text);
        " * kept"
    } else {
        ""
    };
    let cap = if a.softcap == 0.0 { "" } else { " * (1.0f - bound * bound)" };
    line!(text, "slope = is_visible ? share * (slope{kept} - delta){cap} : 0.0f;");
    line!(text, "weight = share{kept};");
}

/// Prints how a quad stores its `row` of dK and of dV. `numbers` gives the two accumulators `acc`
/// or `v_acc` of the columns of that number.
pub(super) fn print_key_gradients(
    a: &Attention,
    names: &Names,
    numbers: impl Fn(&str, &str) -> [String; 2],
    text: &mut Text,
) {
    let memory = element(a.dtype);
    let scale = format!(" * {}", number(DType::F32, a.scale));
    let [dk, dv] = [1, 2].map(|at: usize| &names.grads[at]);
    let outputs = [("dk", dk, a.k, "acc", &scale[..]), ("dv", dv, a.v, "v_acc", "")];
    for (name, buffer, strides, ..) in outputs {
        let row = row_of(buffer, strides, "b", "first_row", "g");
        line!(text, "{memory}* {name} = {row};");
    }
    line!(text, "const bool is_there = first_row + row < {};", a.keys);
    let store = QuadStore::of(a.dtype, a.dim / 8, VECTOR);
    line!(text, "UNROLL");
    line!(text, "for (u32 n = 0; n < {}; n += {}) {{", a.dim / 8, store.tiles());
    for (name, _, strides, sums, scale) in outputs {
        let scaled = |tile: &str| numbers(sums, tile).map(|number| format!("{number}{scale}"));
        store.print_vector(&format!("of_{name}"), scaled, text);
        let place = format!("{name} + row * {}ULL + n * 8 + {}", strides[1], store.column());
        line!(text, "if (is_there) store_vector({place}, of_{name});");
    }
    text.end();
}

impl fmt::Display for FlashBackward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = self.step;
        write!(
            f,
            "FlashAttention-2: tiles of {ROWS} keys by {WARPS} warps and of {size} queries in 2 \
             stages, dQ by turns"
        )
    }
}
