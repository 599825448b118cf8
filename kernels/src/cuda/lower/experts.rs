//! The device functions of routed experts and of their gradient.
//!
//! Rows of pairs are placed and gathered, multiplied by the weights of their experts, and added up
//! by tokens. Of what is inside of experts both products and their function are one launch. Of a
//! gradient `dy w_down` is stored before, in the type of sums, and what is inside computed once
//! more.

use ir::DType;
use ir::target::Arch;

use super::moves;
use super::product::BlockTiles;
use crate::cuda::function::{Function, Functions};
use crate::cuda::grouped::{Along, Grouped, Pair, PairGradient};
use crate::cuda::parameter::{Buffer, Parameter};
use crate::cuda::routing::{ExpertRows, RoutingStep, RoutingTile, THREADS, chunks};
use crate::cuda::tile::Tile;
use crate::cuda::{product as simt, tensor};
use crate::kernel::{Experts, Fill, LoopAB, LoopABC, LoopAC, LoopBC, Product, StoredTypes};

/// Functions of experts, as they are added one after the other.
struct Launches<'a> {
    e: &'a Experts,
    what: &'a str,
    arch: Option<Arch>,
    rows: ExpertRows,
    tables: Tables,
    all: &'a mut Functions,
}

/// Workspaces that say which rows the pairs have.
struct Tables {
    /// The first row of each expert, and the end of the last one's.
    starts: Parameter,
    /// The rows of each expert that pairs have.
    counts: Parameter,
    /// The expert of each tile of rows, or how many there are.
    experts: Parameter,
    /// The token of each row.
    tokens: Parameter,
    /// The gate of each row, of the type of sums.
    gates: Parameter,
    /// The rows of each token, in ascending order of experts.
    places: Parameter,
}

/// Rows by the weight of their expert: how many columns there are, their stride in the weight, and
/// the same of k.
#[derive(Clone, Copy)]
struct Weight {
    n: [usize; 2],
    k: [usize; 2],
}

fn workspace(all: &mut Functions, len: usize, dtype: DType) -> Parameter {
    let buffer = Buffer::Workspace(all.workspaces.len());
    all.workspaces.push(len as u64 * dtype.size());
    Parameter { buffer, dtype }
}

/// Fills outputs of a kernel that computes nothing.
fn clear(what: &str, outputs: &[(Parameter, usize)], all: &mut Functions) {
    for (output, len) in outputs.iter().filter(|(_, len)| *len > 0) {
        let zeros = Fill { len: *len, dtype: output.dtype, value: 0.0 };
        all.functions.push(moves::fill(&format!("{what}: zeros"), &zeros, *output));
    }
}

/// The functions of the forward pass.
pub(super) fn forward(
    what: &str,
    e: &Experts,
    inputs: &[Parameter],
    y: Parameter,
    (all, arch): (&mut Functions, Option<Arch>),
) {
    if e.tokens == 0 || e.weights() == 0 {
        return clear(what, &[(y, e.tokens * e.model)], all);
    }
    let [x, gates, w_gate, w_up, w_down] = [0, 1, 2, 3, 4].map(|at: usize| inputs[at]);
    let mut launches = Launches::new(what, e, gates, (all, arch));
    let x = launches.gather("tokens", x);
    let inside = launches.inside(x, [w_gate, w_up], None);
    let down = Weight { n: [e.model, e.inner], k: [e.inner, 1] };
    let sums = launches.workspace_of_rows(e.model, e.dtype.accumulation());
    launches.multiply("down", [inside, w_down], (sums, false), down);
    launches.combine("sums", sums, y);
}

/// The functions of the gradient.
pub(super) fn backward(
    what: &str,
    e: &Experts,
    inputs: &[Parameter],
    outputs: &[Parameter],
    (all, arch): (&mut Functions, Option<Arch>),
) {
    let sizes = [e.tokens * e.model, e.tokens * e.experts, e.weights(), e.weights(), e.weights()];
    if e.tokens == 0 || e.weights() == 0 {
        let adds = [false; 2].into_iter().chain(e.accumulate);
        let new = outputs.iter().copied().zip(sizes).zip(adds).filter(|(_, adds)| !adds);
        let new: Vec<(Parameter, usize)> = new.map(|(output, _)| output).collect();
        return clear(what, &new, all);
    }
    let [x, gates, w_gate, w_up, w_down, dy] = [0, 1, 2, 3, 4, 5].map(|at: usize| inputs[at]);
    clear(what, &[(outputs[1], sizes[1])], all);
    let mut launches = Launches::new(what, e, gates, (all, arch));
    let (x, dy) = (launches.gather("tokens", x), launches.gather("gradients", dy));
    let sums = e.dtype.accumulation();
    let outer = launches.workspace_of_rows(e.inner, sums);
    let of_outer = Weight { n: [e.inner, 1], k: [e.model, e.inner] };
    launches.multiply("outer", [dy, w_down], (outer, false), of_outer);
    let gradients = [(); 2].map(|()| launches.workspace_of_rows(e.inner, e.dtype));
    let inside = launches.inside(x, [w_gate, w_up], Some((outer, gradients, outputs[1])));
    let dx = launches.workspace_of_rows(e.model, sums);
    let of_tokens = Weight { n: [e.model, 1], k: [e.inner, e.model] };
    launches.multiply("tokens by gate", [gradients[0], w_gate], (dx, false), of_tokens);
    launches.multiply("tokens by up", [gradients[1], w_up], (dx, true), of_tokens);
    launches.combine("sums", dx, outputs[0]);
    let [of_gate, of_up, of_down] = [2, 3, 4].map(|at: usize| outputs[at]);
    let weights = [
        ("weights of gate", [gradients[0], x], of_gate, [e.inner, e.model]),
        ("weights of up", [gradients[1], x], of_up, [e.inner, e.model]),
        ("weights of down", [dy, inside], of_down, [e.model, e.inner]),
    ];
    for ((name, factors, to, sizes), adds) in weights.into_iter().zip(e.accumulate) {
        launches.sum_weights(name, factors, (to, adds), sizes);
    }
}

impl Launches<'_> {
    /// Adds the functions that place the rows of pairs.
    fn new<'a>(
        what: &'a str,
        e: &'a Experts,
        gates: Parameter,
        (all, arch): (&'a mut Functions, Option<Arch>),
    ) -> Launches<'a> {
        // Rows of all products lie in the same tiles.
        let on_tensor_cores = arch.is_some() && e.dtype.is_narrow();
        let tile = if on_tensor_cores { tensor::ROWS } else { simt::ROWS };
        let rows = ExpertRows::of(e, tile);
        let counted = workspace(all, chunks(e) * e.experts, DType::U32);
        let mut table = |len: usize| workspace(all, len, DType::U32);
        let (starts, counts) = (table(e.experts + 1), table(e.experts));
        let (experts, tokens) = (table(rows.tiles), table(rows.count()));
        let places = table(e.tokens * rows.per_token);
        let of_rows = workspace(all, rows.count(), e.dtype.accumulation());
        let tables = Tables { starts, counts, experts, tokens, gates: of_rows, places };
        let mut launches = Launches { e, what, arch, rows, tables, all };
        launches.step("pairs", RoutingStep::Count, vec![gates, counted]);
        let placed = vec![counted, starts, counts, experts, tokens, of_rows];
        launches.step("places", RoutingStep::Place, placed);
        let filled = vec![gates, counted, starts, tokens, of_rows, places];
        launches.step("rows", RoutingStep::Fill, filled);
        launches
    }

    fn step(&mut self, name: &str, step: RoutingStep, parameters: Vec<Parameter>) {
        let tile = RoutingTile { experts: self.e.clone(), rows: self.rows, step };
        self.all.functions.push(Function {
            what: format!("{}: {name}", self.what),
            parameters,
            offsets: Vec::new(),
            grid: tile.count().div_ceil(THREADS as usize) as u64,
            threads: THREADS,
            tile: Tile::Routing(tile),
        });
    }

    /// Room for a row of each pair.
    fn workspace_of_rows(&mut self, row: usize, dtype: DType) -> Parameter {
        workspace(self.all, self.rows.count() * row, dtype)
    }

    /// The rows of tokens of all pairs.
    fn gather(&mut self, name: &str, of_tokens: Parameter) -> Parameter {
        let rows = self.workspace_of_rows(self.e.model, self.e.dtype);
        let parameters = vec![of_tokens, self.tables.tokens, self.tables.starts, rows];
        self.step(&format!("gather {name}"), RoutingStep::Gather, parameters);
        rows
    }

    /// Adds up the rows of each token.
    fn combine(&mut self, name: &str, rows: Parameter, to: Parameter) {
        self.step(name, RoutingStep::Combine, vec![rows, self.tables.places, to]);
    }

    /// The product of rows by the weight of their expert.
    fn product(&self, weight: Weight, c: DType, accumulate: bool) -> Product {
        let (e, [n, of_n], [k, of_k]) = (self.e, weight.n, weight.k);
        Product {
            batch: vec![LoopABC { size: e.experts, a: 0, b: n * k, c: 0 }],
            m: vec![LoopAC { size: self.rows.count(), a: k, c: n }],
            n: vec![LoopBC { size: n, b: of_n, c: 1 }],
            k: vec![LoopAB { size: k, a: 1, b: of_k }],
            accumulate,
            stored: StoredTypes { c, ..StoredTypes::all(e.dtype) },
            ..Product::matrix(0, 0, 0, e.dtype)
        }
    }

    /// How rows take part in a product.
    fn grouped(&self, along: Along, pair: Option<Pair>) -> Grouped {
        let room = self.e.tokens * self.rows.per_token;
        Grouped { along, pair, pairs: self.e.pairs().min(room) }
    }

    /// Adds the function of a product, given its factors and its result.
    fn launch(
        &mut self,
        name: &str,
        product: &Product,
        parameters: Vec<Parameter>,
        grouped: Grouped,
    ) {
        let block = BlockTiles::of_experts(product, grouped, self.arch);
        self.all.functions.push(Function {
            what: format!("{}: {name}", self.what),
            parameters,
            offsets: Vec::new(),
            grid: block.tiles.iter().map(|tiles| *tiles as u64).product(),
            threads: block.threads,
            tile: block.tile,
        });
    }

    /// Multiplies rows by the weights of their experts, perhaps adding to what the result holds.
    fn multiply(
        &mut self,
        name: &str,
        [a, b]: [Parameter; 2],
        (c, adds): (Parameter, bool),
        weight: Weight,
    ) {
        let product = self.product(weight, c.dtype, adds);
        let grouped = self.grouped(Along::Rows { experts: 3 }, None);
        self.launch(name, &product, vec![a, b, c, self.tables.experts], grouped);
    }

    /// What is inside of experts, weighted by gates; of a gradient, given `dy w_down`, where the
    /// gradients of both products go, and the gradients of gates.
    fn inside(
        &mut self,
        x: Parameter,
        [w_gate, w_up]: [Parameter; 2],
        gradient: Option<(Parameter, [Parameter; 2], Parameter)>,
    ) -> Parameter {
        let (e, rows) = (self.e, self.rows.count());
        let inside = self.workspace_of_rows(e.inner, e.dtype);
        let weight = Weight { n: [e.inner, e.model], k: [e.model, 1] };
        let product = self.product(weight, e.dtype, false);
        let Tables { experts, gates, tokens, starts, .. } = self.tables;
        let mut parameters = vec![x, w_gate, inside, experts, w_up, gates];
        let mut pair = Pair { other: 4, gates: 5, gradient: None };
        let along = Along::Rows { experts: 3 };
        let Some((outer, results, dgates)) = gradient else {
            self.launch("inside", &product, parameters, self.grouped(along, Some(pair)));
            return inside;
        };
        pair.gradient = Some(PairGradient { outer: 6, results: [7, 8], parts: 9 });
        let grouped = self.grouped(along, Some(pair));
        let count = BlockTiles::of_experts(&product, grouped, self.arch).parts();
        let parts = workspace(self.all, rows * count, e.dtype.accumulation());
        parameters.extend([outer, results[0], results[1], parts]);
        self.launch("gradients inside", &product, parameters, grouped);
        let summed = vec![parts, tokens, starts, experts, gates, dgates];
        self.step("gradients of gates", RoutingStep::Gates(count), summed);
        inside
    }

    /// Sums the gradients of a weight of each expert over its rows.
    fn sum_weights(
        &mut self,
        name: &str,
        [a, b]: [Parameter; 2],
        (c, accumulate): (Parameter, bool),
        [m, n]: [usize; 2],
    ) {
        let (e, rows) = (self.e, self.rows.count());
        let product = Product {
            batch: vec![LoopABC { size: e.experts, a: 0, b: 0, c: m * n }],
            m: vec![LoopAC { size: m, a: 1, c: n }],
            n: vec![LoopBC { size: n, b: 1, c: 1 }],
            k: vec![LoopAB { size: rows, a: m, b: n }],
            accumulate,
            stored: StoredTypes { c: c.dtype, ..StoredTypes::all(e.dtype) },
            ..Product::matrix(0, 0, 0, e.dtype)
        };
        let Tables { starts, counts, .. } = self.tables;
        let along = Along::Contracted { starts: 3, counts: 4 };
        let grouped = self.grouped(along, None);
        self.launch(name, &product, vec![a, b, c, starts, counts], grouped);
    }
}
