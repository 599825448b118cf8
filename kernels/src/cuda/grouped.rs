//! Products of the rows of experts, of all experts in one launch.
//!
//! Rows of the pairs of a token and an expert lie in workspaces, those of an expert one after the
//! other from a whole block tile on (`routing`). Where rows are those of the result, the number of
//! a tile of rows says whose weights are multiplied; where they are contracted, each expert has its
//! own result, and its own bounds of k. Tiles that no expert has end at once: a launch has as many
//! as there can be, however tokens are routed.

use std::fmt;

use super::parameter::Parameter;
use super::quads::QuadStore;
use super::slices::print_band;
use super::text::{Text, element, line};
use crate::kernel::Product;

/// How the rows of experts take part in a product, whose batch is the experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grouped {
    /// Which dim they are.
    pub along: Along,
    /// Whether two products of the same rows share a block tile.
    pub pair: Option<Pair>,
    /// Pairs of a token and an expert that are expected: what accesses are counted of
    /// ([`Accesses`](super::Accesses)). The text is the same for any number.
    pub pairs: usize,
}

/// The dim of a product that rows of experts are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Along {
    /// Rows of the first operand and of the result; the second operand is the expert's.
    Rows {
        /// The parameter with the expert of each tile of rows.
        experts: usize,
    },
    /// Points of k; the result is the expert's.
    Contracted {
        /// The parameter with the first row of each expert.
        starts: usize,
        /// The parameter with the number of its rows.
        counts: usize,
    },
}

/// A second product of the same rows by another weight, `g = x w_gateᵀ` and `u = x w_upᵀ`, and what
/// becomes of both. Runs of columns of the weights take turns in the block tile, so that a thread
/// has the same elements of both products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair {
    /// The parameter that is the second weight.
    pub other: usize,
    /// The parameter with the gate of each row.
    pub gates: usize,
    /// Of a gradient, its other parameters.
    pub gradient: Option<PairGradient>,
}

/// The parameters of the gradient of what is inside of an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PairGradient {
    /// `dy w_down`, of the type of sums.
    pub outer: usize,
    /// The gradients of `g` and of `u`.
    pub results: [usize; 2],
    /// Parts of the gradient of the gate of each row: one for each run of columns.
    pub parts: usize,
}

impl Grouped {
    /// Prints the expert of the block tile of a number, `batch`, the tile, and its points of k: the
    /// first one, the end, and the number of steps. What follows is left out where the tile has no
    /// expert. Tiles are counted along m and n.
    pub(super) fn print_tile(
        &self,
        product: &Product,
        [rows, columns]: [usize; 2],
        [tile_m, tile_n, tile_k]: [usize; 3],
        (parameters, leave): (&[Parameter], &str),
        text: &mut Text,
    ) {
        let [experts, _, _, k] = product.sizes();
        let tiles = rows * columns;
        match self.along {
            Along::Rows { experts: of_tiles } => {
                line!(text, "const u32 in_batch = (u32)tile;");
                print_band([rows, columns], [tile_m, tile_n], text);
                let name = parameters[of_tiles].name();
                line!(text, "const u64 batch = {name}[block_m / {tile_m}];");
                line!(text, "if (batch >= {experts}) {leave};");
                let steps = k.div_ceil(tile_k);
                line!(text, "const u32 first_k = 0, end_k = {k}, steps = {steps};");
            }
            Along::Contracted { starts, counts } => {
                let [starts, counts] = [starts, counts].map(|at| parameters[at].name());
                line!(text, "const u64 batch = tile / {tiles};");
                line!(text, "const u32 in_batch = (u32)(tile % {tiles});");
                print_band([rows, columns], [tile_m, tile_n], text);
                line!(text, "const u32 first_k = {starts}[batch];");
                line!(text, "const u32 end_k = first_k + {counts}[batch];");
                line!(text, "const u32 steps = (end_k - first_k + {}) / {tile_k};", tile_k - 1);
            }
        }
    }

    /// Columns of the result in a block tile of `extent` columns.
    pub(super) fn columns(grouped: Option<Grouped>, extent: usize) -> usize {
        match grouped.and_then(|grouped| grouped.pair) {
            Some(_) => extent / 2,
            None => extent,
        }
    }
}

impl Pair {
    /// The column of the result that a column of the block tile is of, with runs of `run` columns
    /// of each weight.
    pub(super) fn column(local: &str, run: usize) -> String {
        format!("{local} / {} * {run} + {local} % {run}", 2 * run)
    }

    /// The weight that it is of, given the first one.
    pub(super) fn weight(&self, first: &str, local: &str, run: usize, of: &[Parameter]) -> String {
        format!("({local} / {run} % 2 == 0 ? {first} : {})", of[self.other].name())
    }

    /// The results: their parameters, and the names of the values that [`Pair::print_values`]
    /// declares.
    pub(super) fn results(&self) -> Vec<(usize, &'static str)> {
        let gradients = self.gradient.iter().flat_map(|of| of.results).zip(["dgate", "dup"]);
        [(2, "weighted")].into_iter().chain(gradients).collect()
    }

    /// Prints what becomes of `g` and `u` of a row and a column, which are expressions as `outer`
    /// is, given `share`, the gate of the row: `weighted`, and of a gradient `dgate` and `dup`,
    /// while `sum` adds up that of the gate. Operations are those of the CPU.
    pub(super) fn print_values(
        &self,
        compute: &str,
        [gate, up, outer]: [&str; 3],
        text: &mut Text,
    ) {
        line!(text, "const {compute} gate = {gate}, up = {up};");
        line!(text, "const {compute} sigmoid = sigmoid_of(gate);");
        line!(text, "const {compute} open = gate * sigmoid, inside = open * up;");
        line!(text, "const {compute} weighted = inside * share;");
        if self.gradient.is_some() {
            line!(text, "const {compute} outer = {outer};");
            line!(text, "const {compute} scaled = outer * share;");
            line!(
                text,
                "const {compute} slope = fma_of(gate, ({compute})1 - sigmoid, ({compute})1) \
                 * sigmoid;"
            );
            line!(text, "const {compute} dgate = scaled * up * slope, dup = scaled * open;");
            line!(text, "sum = fma_of(outer, inside, sum);");
        }
    }

    /// Prints the gate of the row `m`, and of a gradient the sum of that of the gate.
    pub(super) fn print_row(&self, compute: &str, parameters: &[Parameter], text: &mut Text) {
        line!(text, "const {compute} share = {}[m];", parameters[self.gates].name());
        if self.gradient.is_some() {
            line!(text, "{compute} sum = 0;");
        }
    }

    /// Prints the sum of the gradient of the gate of the row `m` over `lanes` adjacent lanes, and
    /// its store as the part of that number, one of `parts`.
    pub(super) fn print_part(
        &self,
        lanes: u32,
        (part, parts): (&str, usize),
        parameters: &[Parameter],
        text: &mut Text,
    ) {
        let Some(gradient) = self.gradient else { return };
        let mut bits = lanes / 2;
        while bits > 0 {
            line!(text, "sum = sum + shuffle_xor(sum, {bits});");
            bits /= 2;
        }
        let to = parameters[gradient.parts].name();
        line!(text, "if (threadIdx.x % {lanes} == 0) {to}[m * {parts} + {part}] = sum;");
    }

    /// Prints the vectors of results that a lane stores of some tiles of 8 columns, as those of a
    /// quad's exchange, given the sums of `g` and `u` of the tile of a number and of column `e` of
    /// two, and that column, of `columns`, of tile `t`.
    pub(super) fn print_vectors(
        &self,
        store: QuadStore,
        [gate, up]: [impl Fn(&str) -> String; 2],
        column: &str,
        (columns, parameters): (usize, &[Parameter]),
        text: &mut Text,
    ) {
        let tiles = store.tiles();
        for (_, value) in self.results() {
            line!(text, "float {value}s[{tiles}][2];");
        }
        for (name, count) in [("t", tiles), ("e", 2)] {
            line!(text, "UNROLL");
            line!(text, "for (u32 {name} = 0; {name} < {count}; {name} += 1) {{");
        }
        if self.gradient.is_some() {
            line!(text, "const u64 n = {column};");
        }
        let outer = self.outer(columns, parameters);
        self.print_values("float", [&gate("t"), &up("t"), &outer], text);
        for (_, value) in self.results() {
            line!(text, "{value}s[t][e] = {value};");
        }
        (0..2).for_each(|_| text.end());
        for (at, (_, value)) in self.results().into_iter().enumerate() {
            let sums = |tile: &str| [0, 1].map(|e| format!("{value}s[{tile}][{e}]"));
            store.print_vector(&format!("x{at}"), sums, text);
        }
    }

    /// Prints the stores of these vectors to column `n`, of `columns`, of row `m`.
    pub(super) fn print_stores(
        &self,
        store: QuadStore,
        (columns, parameters): (usize, &[Parameter]),
        text: &mut Text,
    ) {
        for (at, (parameter, _)) in self.results().into_iter().enumerate() {
            let to = format!("{} + m * {columns} + n", parameters[parameter].name());
            match store.width {
                1 => {
                    for e in [0, 1] {
                        line!(text, "if (n + {e} < {columns}) *({to} + {e}) = x{at}.x[{e}];");
                    }
                }
                // Whole vectors: rows end at their multiples.
                _ => line!(text, "if (n < {columns}) store_vector({to}, x{at});"),
            }
        }
    }

    /// Where an element of `dy w_down` is, as an expression; `n` is a column of the result, of
    /// `columns`.
    pub(super) fn outer(&self, columns: usize, of: &[Parameter]) -> String {
        match self.gradient {
            None => String::new(),
            Some(gradient) => {
                let name = of[gradient.outer].name();
                format!("n < {columns} ? {name}[m * {columns} + n] : 0")
            }
        }
    }

    /// The type of results.
    pub(super) fn kept(product: &Product) -> &'static str {
        element(product.stored.c)
    }
}

/// What differs from a product of one matrix by another.
impl fmt::Display for Grouped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.along {
            Along::Rows { .. } => f.write_str(", rows of experts")?,
            Along::Contracted { .. } => f.write_str(", sums over the rows of experts")?,
        }
        match self.pair {
            None => Ok(()),
            Some(Pair { gradient: None, .. }) => f.write_str(", gate and up"),
            Some(Pair { gradient: Some(_), .. }) => f.write_str(", gradients of gate and up"),
        }
    }
}
