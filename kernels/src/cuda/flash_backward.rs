//! The gradient of attention of BF16 and F16 on tensor cores (sm_80 and later), as in
//! FlashAttention-2.
//!
//! Two functions of the same form: one for dQ, whose blocks take a tile of queries and go over
//! tiles of keys, and one for dK and dV, whose blocks take a tile of keys and go over tiles of the
//! queries of all heads that read them. Both recompute `P = exp(S − lse)` and
//! `dS = P ∘ (dP − delta)`, with `S = Q Kᵀ`, `dP = dO Vᵀ` and `delta` the dot product of a row of O
//! and dO, the latter function transposed. P and dS are rounded to the type of the operands. Each
//! gradient is written by one block: sums are in the order of the tiles.
//!
//! Versions:
//! 1. seven products instead of five, and no atomic operations; fragments of the block's own rows
//!    are loaded from shared memory in each step; rows of O are reduced by a function before.
//! 2. quads exchange pairs of columns, and store whole sectors (`quads`).

use std::fmt;

use ir::DType;

use super::attention::{Names, Part, print_head, print_kept, print_scalars, row_of};
use super::flash::{
    SHARED_ELEMENTS, VECTOR, WARPS, exponent_factor, is_plain, print_copy, print_score, visible,
};
use super::parameter::Parameter;
use super::quads::QuadStore;
use super::shared::{Fragments, Operand, SharedTile};
use super::text::{Text, element, line, number};
use crate::kernel::Attention;

/// Rows of the block's tile: one tile of `mma.sync` per warp.
const ROWS: usize = 16 * WARPS;

/// A part of the gradient, each tile of queries or keys of a head by one block.
#[derive(Clone, Debug, PartialEq)]
pub struct FlashBackward {
    /// What is computed.
    pub attention: Attention,
    /// [`Part::Queries`] or [`Part::Keys`].
    pub part: Part,
    /// Keys or queries of a step.
    pub step: usize,
}

/// One of the four operands, `name` that of its pointer.
struct Rows<'a> {
    name: &'a str,
    stride: usize,
}

impl FlashBackward {
    /// The tiles of a part of an attention that fits.
    pub(super) fn new(a: &Attention, part: Part) -> FlashBackward {
        let step = if a.dim > 64 { 16 } else { 64 };
        let tile = FlashBackward { attention: a.clone(), part, step };
        let elements = 2 * tile.block_tile().elements() + 4 * tile.step_tile().elements();
        assert!(elements <= SHARED_ELEMENTS, "the tiles fit");
        tile
    }

    /// Rows that blocks share, and how many heads and samples have them.
    fn extents(&self) -> [usize; 3] {
        let Attention { batch, heads, kv_heads, queries, keys, .. } = self.attention;
        match self.is_queries() {
            true => [batch, heads, queries],
            false => [batch, kv_heads, keys],
        }
    }

    fn is_queries(&self) -> bool {
        self.part == Part::Queries
    }

    pub(super) fn blocks(&self) -> u64 {
        let [batch, heads, rows] = self.extents();
        (batch * heads * rows.div_ceil(ROWS)) as u64
    }

    fn block_tile(&self) -> SharedTile {
        SharedTile { rows: ROWS, columns: self.attention.dim.next_power_of_two() }
    }

    fn step_tile(&self) -> SharedTile {
        SharedTile { rows: self.step, columns: self.attention.dim.next_power_of_two() }
    }

    /// The operands of the block's rows, and those of a step: of S, then of dP.
    fn operands(&self) -> [[Rows<'static>; 2]; 2] {
        let a = &self.attention;
        let of = |name, strides: [usize; 3]| Rows { name, stride: strides[1] };
        let of_queries = [of("q", a.q), of("dout", a.out)];
        let of_keys = [of("k", a.k), of("v", a.v)];
        if self.is_queries() { [of_queries, of_keys] } else { [of_keys, of_queries] }
    }

    pub(super) fn print(&self, parameters: &[Parameter], text: &mut Text) {
        let a = &self.attention;
        let names = Names::of(a, self.part, parameters);
        let (memory, columns) = (element(a.dtype), a.dim / 16);
        let (block, step) = (self.block_tile().elements(), self.step_tile().elements());
        line!(text, "SHARED({memory}, block_tiles, {});", 2 * block);
        line!(text, "SHARED({memory}, stages, {});", 4 * step);
        print_scalars(a, &names, text);
        self.print_block(&names, text);
        self.print_first_copies(&names, text);
        // For each 16 columns a warp tile of its own: fragments of all do not fit the registers.
        line!(text, "float acc[{columns}][1][2][4] = {{}};");
        if !self.is_queries() {
            line!(text, "float v_acc[{columns}][1][2][4] = {{}};");
        } else {
            self.print_row_values(&names, text);
        }
        line!(text, "NO_UNROLL");
        line!(text, "for (u32 step = 0; step < steps; step += 1) {{");
        line!(text, "cp_async_wait<0>();");
        line!(text, "sync_block();");
        line!(text, "if (step + 1 < steps) {{");
        self.print_copies(&names, "step + 1", text);
        text.end();
        line!(text, "cp_async_commit();");
        line!(text, "const {memory}* stage = stages + step % 2 * {};", 2 * step);
        self.print_position("step", text);
        self.print_products(text);
        self.print_slopes(&names, text);
        self.print_gradients(text);
        text.end();
        self.print_epilogue(&names, text);
    }

    /// Prints the block's rows, and the steps that they take.
    fn print_block(&self, names: &Names, text: &mut Text) {
        let a = &self.attention;
        let [_, heads, rows] = self.extents();
        let tiles = rows.div_ceil(ROWS);
        let own = if self.is_queries() { "h" } else { "g" };
        line!(text, "const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;");
        line!(text, "const u64 b = blockIdx.x / {};", heads * tiles);
        line!(text, "const u64 {own} = blockIdx.x / {tiles} % {heads};");
        line!(text, "const i64 first_row = (i64)(blockIdx.x % {tiles}) * {ROWS};");
        let last = rows - 1;
        line!(
            text,
            "const i64 last_row = first_row + {0} < {last} ? first_row + {0} : {last};",
            ROWS - 1
        );
        if self.is_queries() {
            print_head(a, "h", text);
            self.print_visible_keys(text);
        } else {
            self.print_visible_queries(text);
        }
        for rows in &self.operands()[0] {
            self.print_pointer(names, rows.name, "first_row", text);
        }
        if self.is_queries() {
            for rows in &self.operands()[1] {
                self.print_pointer(names, rows.name, "0", text);
            }
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

    /// Prints the keys of the steps of a tile of queries.
    fn print_visible_keys(&self, text: &mut Text) {
        let Attention { keys, causal, window, .. } = self.attention;
        let step = self.step;
        match causal {
            true => line!(text, "const i64 end = clamped(last_row + offset + 1, {keys});"),
            false => line!(text, "const i64 end = {keys};"),
        }
        match window {
            0 => line!(text, "const i64 begin = 0;"),
            _ => line!(
                text,
                "const i64 begin = \
                 clamped(first_row + offset + 1 - {window}, end) / {step} * {step};"
            ),
        }
        line!(text, "const u32 steps = (u32)((end - begin + {}) / {step});", step - 1);
    }

    /// Prints the queries of the steps of a tile of keys, and the heads that have them.
    fn print_visible_queries(&self, text: &mut Text) {
        let Attention { queries, heads, group, causal, window, .. } = self.attention;
        let step = self.step;
        match window {
            0 => line!(text, "const i64 end = {queries};"),
            _ => line!(text, "const i64 end = clamped(last_row - offset + {window}, {queries});"),
        }
        match causal {
            true => {
                line!(text, "const i64 begin = clamped(first_row - offset, end) / {step} * {step};")
            }
            false => line!(text, "const i64 begin = 0;"),
        }
        line!(text, "const u32 steps_of_head = (u32)((end - begin + {}) / {step});", step - 1);
        for (name, more) in [("first_head", 0), ("end_head", 1)] {
            line!(
                text,
                "const i64 {name} = clamped(((i64)g + {more}) * {group} - head_offset, \
                 {heads});"
            );
        }
        line!(text, "const u32 steps = (u32)(end_head - first_head) * steps_of_head;");
    }

    /// Prints the copies of the block's rows and of the first step, one group.
    fn print_first_copies(&self, names: &Names, text: &mut Text) {
        let tile = self.block_tile();
        let [_, _, rows] = self.extents();
        for (at, operand) in self.operands()[0].iter().enumerate() {
            let to = format!("block_tiles + {}", at * tile.elements());
            let count = format!("{rows} - first_row");
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
        self.print_position(step, text);
        let count = if self.is_queries() { a.keys } else { a.queries };
        for (at, operand) in self.operands()[1].iter().enumerate() {
            if !self.is_queries() {
                self.print_pointer(names, operand.name, "0", text);
            }
            let to = format!(
                "stages + ({step}) % 2 * {0} + {1}",
                2 * tile.elements(),
                at * tile.elements()
            );
            let from = format!("{} + first_column * {}", operand.name, operand.stride);
            let count = format!("{count} - first_column");
            print_copy(a.dim, tile, (&from, operand.stride), [&to, &count], text);
        }
    }

    /// Prints the first key, or the head and the first query, of a step.
    fn print_position(&self, step: &str, text: &mut Text) {
        let size = self.step;
        if self.is_queries() {
            line!(text, "const i64 first_column = begin + (i64)({step}) * {size};");
            return;
        }
        line!(text, "const u64 h = first_head + ({step}) / steps_of_head;");
        line!(text, "const i64 first_column = begin + (i64)(({step}) % steps_of_head) * {size};");
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

    /// Prints `base` and `delta` of query `s`: its `lse` to the base of two, infinite where it sees
    /// no key, and the dot product of its rows of O and dO.
    fn print_query_values(&self, names: &Names, [base, delta]: [&str; 2], text: &mut Text) {
        let Attention { heads, queries, .. } = self.attention;
        let [lowest, infinity] = [f64::NEG_INFINITY, f64::INFINITY].map(|x| number(DType::F32, x));
        let factor = number(DType::F32, std::f64::consts::LOG2_E);
        let lse = names.lse.as_deref().unwrap_or_default();
        line!(text, "const bool is_query = s < {queries};");
        line!(text, "const u64 query = (b * {heads} + h) * {queries} + (is_query ? (u64)s : 0);");
        line!(text, "const float lse_of = is_query ? {lse}[query] : {lowest};");
        line!(text, "{base} = lse_of == {lowest} ? {infinity} : lse_of * {factor};");
        line!(text, "{delta} = is_query ? {}[query] : 0.0f;", names.workspace);
    }

    /// Prints the values of the rows of a thread, which are queries.
    fn print_row_values(&self, names: &Names, text: &mut Text) {
        line!(text, "float row_base[2], row_delta[2];");
        line!(text, "UNROLL");
        line!(text, "for (u32 r = 0; r < 2; r += 1) {{");
        line!(text, "const i64 s = first_row + warp * 16 + lane / 4 + r * 8;");
        self.print_query_values(names, ["row_base[r]", "row_delta[r]"], text);
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
        let [row, column] = if self.is_queries() { ["s", "j"] } else { ["j", "s"] };
        line!(text, "const i64 {row} = first_row + warp * 16 + lane / 4 + e / 2 * 8;");
        line!(text, "const i64 {column} = first_column + n * 8 + lane % 4 * 2 + e % 2;");
        if self.is_queries() {
            line!(text, "const float base = row_base[e / 2], delta = row_delta[e / 2];");
        } else {
            line!(text, "float base, delta;");
            self.print_query_values(names, ["base", "delta"], text);
        }
        line!(text, "float& weight = scores[0][n][e];");
        line!(text, "float& slope = slopes[0][n][e];");
        let score = if is_plain(a) {
            "weight"
        } else {
            print_score(a, names, "weight", text);
            "score"
        };
        let visible = format!("s < {} && {}", a.queries, visible(a, names));
        let factor = exponent_factor(a);
        line!(text, "const bool is_visible = {visible};");
        line!(
            text,
            "const float share = is_visible ? ex2_approx(fmaf({score}, {factor}, -base)) : 0.0f;"
        );
        let kept = if a.dropout.is_some() {
            print_kept(a, text);
            " * kept"
        } else {
            ""
        };
        let cap = if a.softcap == 0.0 { "" } else { " * (1.0f - bound * bound)" };
        line!(text, "slope = is_visible ? share * (slope{kept} - delta){cap} : 0.0f;");
        line!(text, "weight = share{kept};");
        text.end();
        text.end();
    }

    /// Prints the products of weights and slopes with the rows of the step, added to the gradients.
    fn print_gradients(&self, text: &mut Text) {
        let (a, tile) = (&self.attention, self.step_tile());
        let (memory, columns) = (element(a.dtype), a.dim / 16);
        line!(text, "UNROLL");
        line!(text, "for (u32 t = 0; t < {}; t += 16) {{", self.step);
        line!(text, "u32 a[1][4];");
        let mut products = vec![("slopes", 0, "acc")];
        if !self.is_queries() {
            products.push(("scores", tile.elements(), "v_acc"));
        }
        for (factors, offset, sums) in products {
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

    fn print_epilogue(&self, names: &Names, text: &mut Text) {
        let a = &self.attention;
        let [_, _, rows] = self.extents();
        let memory = element(a.dtype);
        let scale = format!(" * {}", number(DType::F32, a.scale));
        let [dq, dk, dv] = [0, 1, 2].map(|at: usize| &names.grads[at]);
        let outputs = match self.is_queries() {
            true => vec![("dq", dq, a.q, "h", "acc", &scale[..])],
            false => {
                vec![("dk", dk, a.k, "g", "acc", &scale[..]), ("dv", dv, a.v, "g", "v_acc", "")]
            }
        };
        for (name, buffer, strides, head, ..) in &outputs {
            let row = row_of(buffer, *strides, "b", "first_row", head);
            line!(text, "{memory}* {name} = {row};");
        }
        line!(text, "UNROLL");
        line!(text, "for (u32 r = 0; r < 2; r += 1) {{");
        line!(text, "const u32 row = warp * 16 + lane / 4 + r * 8;");
        line!(text, "const bool is_there = first_row + row < {rows};");
        let store = QuadStore::of(a.dtype, a.dim / 8, VECTOR);
        line!(text, "UNROLL");
        line!(text, "for (u32 n = 0; n < {}; n += {}) {{", a.dim / 8, store.tiles());
        for (name, _, strides, _, sums, scale) in &outputs {
            let numbers = |tile: &str| {
                let at = format!("{sums}[(n + {tile}) / 2][0][(n + {tile}) % 2]");
                [0, 1].map(|e| format!("{at}[2 * r + {e}]{scale}"))
            };
            store.print_vector(&format!("of_{name}"), numbers, text);
            let place = format!("{name} + row * {}ULL + n * 8 + {}", strides[1], store.column());
            line!(text, "if (is_there) store_vector({place}, of_{name});");
        }
        text.end();
        text.end();
    }
}

impl fmt::Display for FlashBackward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (block, step) =
            if self.is_queries() { ("queries", "keys") } else { ("keys", "queries") };
        let size = self.step;
        write!(
            f,
            "FlashAttention-2: tiles of {ROWS} {block} by {WARPS} warps and of {size} {step} "
        )?;
        write!(f, "in 2 stages")
    }
}
