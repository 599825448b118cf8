//! The work of any module: layers are the functions that its entry calls, products are its
//! contractions and convolutions, and everything between them runs as one kernel.
//!
//! A sample is one token, whatever it holds, so that nothing cuts a sequence. What the backward
//! pass needs is kept: inputs of products, and of kernels that are not linear. On `tp` a product
//! whose input is whole cuts its weight's columns; the op table's factors ([`ir::factors`]) carry
//! the cut on, and where they cannot, values are made whole again. So tensor parallelism divides
//! the units of every cut, and is no choice for a module in which nothing can be cut.

use std::collections::{BTreeMap, BTreeSet};

use ir::factors::{Factor, factors};
use ir::inline::inline_composites;
use ir::op::{Binary, Combiner, Einsum, Unary};
use ir::{
    Bindings, Class, Diagnostic, Dim, Function, Kind, Layout, Module, Node, Op, Span, ValueId,
};

use super::{ATTENTION, Item, Layer, Split, Workload, assumptions};
use crate::divisors::gcd;

/// The work of a module's entry, a chain of calls. `B` is unbound: the samples.
///
/// # Errors
/// `E3103` when there is no such entry, `E3403` for one without layers or of open sizes.
pub fn of_module(name: &str, module: &Module, entry: &str) -> Result<Workload, Diagnostic> {
    let mut module = module.clone();
    // Queries of one sequence and keys of another are products as any.
    let mut attends = module.functions.iter().filter_map(attended);
    let is_own = attends.all(|(queries, keys)| queries == keys);
    inline_composites(&mut module, |name| is_own && name.starts_with(ATTENTION));
    let Some(main) = module.function(entry) else {
        let headline = format!("the module `{name}` has no function `{entry}`");
        return Err(Diagnostic::error("E3103", Span::of(name.to_owned()), headline));
    };
    let seq = module.functions.iter().filter_map(attended).map(|(queries, _)| queries).max();
    let seq = u32::try_from(seq.unwrap_or(0)).unwrap_or(u32::MAX);
    let assumptions = assumptions::of_module(&module, main, seq);
    let shared = shared_weights(main);
    let mut units = Units::default();
    let mut calls: Vec<Layer> = Vec::new();
    let mut own = main.clone();
    own.nodes.retain(|node| node.callee().is_none());
    for node in main.nodes.iter() {
        let Some(callee) = node.callee().and_then(|callee| module.function(callee)) else {
            continue;
        };
        let given = callee.params().zip(&node.operands);
        let elsewhere = given.filter(|(_, operand)| shared.contains(operand));
        let elsewhere = elsewhere.map(|(param, _)| param).collect();
        let mut reader = Reader::new(&module, callee, elsewhere);
        let items = reader.items();
        units = units.with(reader.units);
        let width = callee.params().map(|param| kept_elements(callee, param)).sum::<u64>();
        let width = u32::try_from(width).unwrap_or(u32::MAX);
        match calls.last_mut() {
            Some(last) if last.name == callee.name && last.items == items => last.count += 1,
            _ => calls.push(Layer { name: callee.name.clone(), count: 1, width, items }),
        }
    }
    let called = main.nodes.iter().filter(|node| node.callee().is_some());
    let given = called.flat_map(|node| node.operands.iter().copied()).collect();
    let mut reader = Reader::new(&module, &own, given);
    let mut rest = reader.items();
    units = units.with(reader.units);
    if calls.is_empty() {
        let items = std::mem::take(&mut rest);
        calls.push(Layer { name: entry.to_owned(), count: 1, width: 0, items });
    }
    let in_common = shared.iter().map(|weight| elements(main, *weight)).sum();
    let mut workload = ends(name, calls, rest, in_common, units);
    workload.assumptions = assumptions;
    let all = || workload.layers.iter().flat_map(|layer| &layer.items).chain(&workload.last);
    if all().all(|item| item.parameters()[0] == 0) {
        let headline = format!("`{name}` has no weight whose size is known");
        let wrong = Diagnostic::error("E3403", Span::of(name.to_owned()), headline);
        return Err(wrong.help("leave no size open but `B`, and `S` with --seq"));
    }
    Ok(workload)
}

/// Tokens of the queries and of the keys of a function that is attention.
fn attended(function: &Function) -> Option<(u64, u64)> {
    let Kind::Composite { name, .. } = &function.kind else { return None };
    let mut tokens = function.params().map(|param| function.ty(param).dims.get(1).map_or(0, size));
    name.starts_with(ATTENTION).then_some((tokens.next()?, tokens.next()?))
}

/// What comes before the first of several runs of layers, and after the last, are the ends of the
/// model. `rest` is what the entry does itself.
fn ends(
    name: &str,
    mut calls: Vec<Layer>,
    rest: Vec<Item>,
    in_common: u64,
    units: Units,
) -> Workload {
    let mut first = Vec::new();
    let mut last = Vec::new();
    if calls.len() > 1 && calls.last().is_some_and(|layer| layer.count == 1) {
        last = calls.pop().map_or_else(Vec::new, |layer| layer.items);
    }
    if calls.len() > 1 && calls[0].count == 1 {
        first = calls.remove(0).items;
    }
    last.extend(rest);
    if in_common > 0 {
        first.push(Item::parameters_alone(in_common));
    }
    Workload {
        name: name.to_owned(),
        seq: 1,
        width: calls.iter().map(|layer| layer.width).max().unwrap_or(0),
        layers: calls,
        first,
        last,
        tied: false,
        tensor_units: Some(units.divided()),
        assumptions: Vec::new(),
        frozen: None,
    }
}

/// Parameters of the entry that several calls take, and that are no samples.
fn shared_weights(main: &Function) -> BTreeSet<ValueId> {
    let mut seen = BTreeSet::new();
    let mut shared = BTreeSet::new();
    for node in main.nodes.iter().filter(|node| node.callee().is_some()) {
        let weights = node
            .operands
            .iter()
            .filter(|operand| operand.index() < main.param_count && is_weight(main, **operand));
        for operand in weights.copied().collect::<BTreeSet<_>>() {
            if !seen.insert(operand) {
                shared.insert(operand);
            }
        }
    }
    shared
}

/// The units of all cuts.
#[derive(Clone, Copy, Debug, Default)]
struct Units {
    /// The greatest divisor of those that are few; 0 where there are none.
    few: u64,
    /// Whether others are many: their pieces may differ by one.
    are_many: bool,
}

impl Units {
    /// With one cut more.
    fn and(self, units: u64) -> Units {
        match units < MANY_UNITS {
            true => Units { few: gcd(self.few, units), ..self },
            false => Units { are_many: true, ..self },
        }
    }

    fn with(self, other: Units) -> Units {
        Units { few: gcd(self.few, other.few), are_many: self.are_many || other.are_many }
    }

    /// What ranks have to divide.
    fn divided(self) -> u32 {
        let units = match (self.few, self.are_many) {
            (0, true) => MANY_UNITS,
            (few, _) => few.max(1),
        };
        u32::try_from(units).unwrap_or(1)
    }
}

/// Units of which one more or less does not matter. Chosen: at 64 ranks, a sixteenth of a piece.
const MANY_UNITS: u64 = 1 << 10;

/// Whether a value is of samples.
fn varies(function: &Function, value: ValueId) -> bool {
    function.ty(value).dims.iter().any(|dim| dim.mentions(Dim::BATCH))
}

fn is_weight(function: &Function, value: ValueId) -> bool {
    function.ty(value).dtype.is_float() && !varies(function, value)
}

fn size(dim: &Dim) -> u64 {
    let one = Bindings::from([(Dim::BATCH.to_owned(), 1)]);
    dim.bind(&one).as_constant().and_then(|size| u64::try_from(size).ok()).unwrap_or(0)
}

/// Elements of a value, of one sample.
fn elements(function: &Function, value: ValueId) -> u64 {
    let sizes = function.ty(value).dims.iter().map(size);
    sizes.fold(1, u64::saturating_mul)
}

/// Elements of one sample that are worth keeping: of floats that vary.
fn kept_elements(function: &Function, value: ValueId) -> u64 {
    let is_kept = varies(function, value) && function.ty(value).dtype.is_float();
    if is_kept { elements(function, value) } else { 0 }
}

/// Whether the backward pass of an op needs none of its operands.
fn is_linear(op: &Op) -> bool {
    match op.class() {
        Class::Source | Class::View | Class::Join | Class::Indexed | Class::Collective => true,
        Class::Elementwise => matches!(
            op,
            Op::Cast { .. } | Op::Unary(Unary::Neg) | Op::Binary(Binary::Add | Binary::Sub)
        ),
        Class::Reduction => matches!(op, Op::Reduce { combiner: Combiner::Sum, .. }),
        Class::Product | Class::Scan | Class::Call => false,
    }
}

fn is_product(op: &Op) -> bool {
    matches!(op, Op::Contract(_) | Op::Conv(_))
}

/// Reads one function.
struct Reader<'m> {
    module: &'m Module,
    function: &'m Function,
    /// Parameters that are counted elsewhere.
    elsewhere: BTreeSet<ValueId>,
    /// Weights whose elements an item has.
    counted: BTreeSet<ValueId>,
    /// Values that an item keeps.
    saved: BTreeSet<ValueId>,
    /// Whole inputs whose gradient a product sums already.
    summed: BTreeSet<ValueId>,
    /// How each value lies on `tp`.
    layouts: Vec<Layout>,
    /// What tensor-parallel ranks have to divide.
    units: Units,
}

impl<'m> Reader<'m> {
    fn new(module: &'m Module, function: &'m Function, elsewhere: BTreeSet<ValueId>) -> Reader<'m> {
        Reader {
            module,
            function,
            elsewhere,
            counted: BTreeSet::new(),
            saved: BTreeSet::new(),
            summed: BTreeSet::new(),
            layouts: vec![Layout::Replicated; function.values.len()],
            units: Units::default(),
        }
    }

    /// The items of the function, in the order of its products.
    fn items(&mut self) -> Vec<Item> {
        let function = self.function;
        let kernels = kernels(function);
        let mut items = Vec::new();
        for (at, node) in function.nodes.iter().enumerate() {
            if let Some(callee) = node.callee().and_then(|callee| self.module.function(callee)) {
                if let Some(item) = self.attention(node, callee, &mut items) {
                    items.push(item);
                    continue;
                }
                self.make_whole(&node.operands, &mut items);
                let mut inner = Reader::new(self.module, callee, BTreeSet::new());
                items.extend(inner.items());
                let given = callee.params().zip(&node.operands);
                self.counted.extend(given.map(|(_, operand)| *operand));
                continue;
            }
            let split = self.cut(node, &mut items);
            if is_product(&node.op) {
                items.push(self.product(node, split));
            } else if kernels[at] == Some(at) {
                items.push(self.kernel(&kernels, at));
            }
        }
        self.make_whole(&function.results, &mut items);
        // Weights that only kernels read.
        let rest: u64 = function
            .params()
            .filter(|param| is_weight(function, *param))
            .filter(|param| !self.counted.contains(param) && !self.elsewhere.contains(param))
            .map(|param| elements(function, param))
            .sum();
        if rest > 0 {
            items.push(Item::parameters_alone(rest));
        }
        items
    }

    /// The item of a call of attention, which is cut by heads where its operands are.
    fn attention(&mut self, node: &Node, callee: &Function, items: &mut Vec<Item>) -> Option<Item> {
        let Kind::Composite { attributes, .. } = &callee.kind else { return None };
        let (seq, _) = attended(callee)?;
        let small = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
        let dims = |at: usize| callee.ty(callee.params().nth(at)?).dims.get(2..4);
        let (Some([heads, dim]), Some([kv_heads, _])) = (dims(0), dims(1)) else { return None };
        let [heads, dim, kv_heads] = [heads, dim, kv_heads].map(|dim| small(size(dim)));
        let causal = attributes.get("query_offset").is_some_and(|offset| *offset < seq as f64);
        self.cut(node, items);
        let cut = self.is_cut(node.result());
        // Its item keeps queries, keys and values.
        self.save(&node.operands);
        Some(Item::Mixing { seq: small(seq), heads, kv_heads, dim, causal, cut })
    }

    /// Elements that are kept of values which no item keeps yet: of whole ones, and of cut ones.
    fn save(&mut self, values: &[ValueId]) -> [u64; 2] {
        let mut kept = [0, 0];
        for value in values {
            if !self.saved.insert(*value) {
                continue;
            }
            let is_cut = self.is_cut(*value);
            kept[usize::from(is_cut)] += kept_elements(self.function, *value);
        }
        kept
    }

    fn is_cut(&self, value: ValueId) -> bool {
        self.layouts[value.index()] != Layout::Replicated
    }

    /// Gathers values that are cut.
    fn make_whole(&mut self, values: &[ValueId], items: &mut Vec<Item>) {
        for value in values {
            if self.is_cut(*value) {
                self.layouts[value.index()] = Layout::Replicated;
                items.push(Item::Exchange { elements: elements(self.function, *value) });
            }
        }
    }

    /// Decides how a node is cut, says how its results lie, and gathers what cannot stay cut.
    fn cut(&mut self, node: &Node, items: &mut Vec<Item>) -> Split {
        let all = factors(node, self.function, self.module);
        if !node.operands.iter().any(|operand| self.is_cut(*operand)) {
            return self.cut_columns(node, &all);
        }
        let Some(factor) = all.iter().find(|factor| self.carries(factor, node)) else {
            self.make_whole(&node.operands, items);
            return Split::Whole;
        };
        self.units = self.units.and(size(&factor.units));
        let mut split = Split::Inside;
        for (result, layout) in node.results.iter().zip(&factor.results) {
            let stays_cut = matches!(layout, Layout::Cut { .. });
            self.layouts[result.index()] = if stays_cut { *layout } else { Layout::Replicated };
            if let Layout::Partial(_) = layout {
                split = Split::Rows;
                if !is_product(&node.op) {
                    items.push(Item::Exchange { elements: elements(self.function, *result) });
                }
            }
        }
        split
    }

    /// Cuts the columns of the weight of a product with whole input along the outermost dim that
    /// has several: heads, not what is in one.
    fn cut_columns(&mut self, node: &Node, all: &[Factor]) -> Split {
        let weight = node.operands.iter().position(|operand| !varies(self.function, *operand));
        let (true, Some(weight)) = (is_product(&node.op), weight) else { return Split::Whole };
        let mut columns = all.iter().filter(|factor| {
            let mut others = factor.operands.iter().enumerate().filter(|(at, _)| *at != weight);
            matches!(factor.operands[weight], Layout::Cut { .. })
                && others.all(|(_, layout)| *layout == Layout::Replicated)
                && matches!(factor.results[0], Layout::Cut { .. })
        });
        let Some(factor) = columns.find(|factor| size(&factor.units) > 1) else {
            return Split::Whole;
        };
        self.units = self.units.and(size(&factor.units));
        self.layouts[node.result().index()] = factor.results[0];
        let input = node.operands[1 - weight];
        if self.summed.insert(input) { Split::Columns } else { Split::ColumnsAgain }
    }

    /// Whether a factor takes the operands as they lie; what is whole can be cut.
    fn carries(&self, factor: &Factor, node: &Node) -> bool {
        let dim = |layout: &Layout| match layout {
            Layout::Cut { dim, .. } => Some(*dim),
            Layout::Replicated | Layout::Partial(_) => None,
        };
        let lies = node.operands.iter().map(|operand| &self.layouts[operand.index()]);
        let mut both = lies.zip(&factor.operands);
        both.all(|(have, want)| *have == Layout::Replicated || dim(have) == dim(want))
    }

    /// A contraction or a convolution.
    fn product(&mut self, node: &Node, split: Split) -> Item {
        let function = self.function;
        let [a, b] = [node.operands[0], node.operands[1]];
        let saves = self.save(&[a, b]);
        let is_weighted = !varies(function, a) || !varies(function, b);
        let [rows, k, n, batch] = if let Op::Contract(einsum) = &node.op {
            contracted(function, einsum, [a, b])
        } else {
            convolved(function, node)
        };
        let weights = [a, b].into_iter().filter(|v| is_weight(function, *v));
        let is_own = weights.fold(false, |own, weight| {
            let is_parameter = weight.index() < function.param_count;
            let is_new = is_parameter && !self.elsewhere.contains(&weight);
            (is_new && self.counted.insert(weight)) || own
        });
        Item::Contraction { rows, k, n, batch, weighted: is_weighted, own: is_own, saves, split }
    }

    /// The kernel of all nodes that are fused with the one at `root`.
    fn kernel(&mut self, kernels: &[Option<usize>], root: usize) -> Item {
        let function = self.function;
        let inside = |at: usize| kernels[at] == Some(root);
        let nodes = || function.nodes.iter().enumerate().filter(|(at, _)| inside(*at));
        let producers = function.producers();
        let made_inside = |value: &ValueId| producers[value.index()].is_some_and(inside);
        let mut enters: BTreeSet<ValueId> = BTreeSet::new();
        let mut reads = 0;
        for (_, node) in nodes() {
            for operand in node.operands.iter().filter(|operand| !made_inside(operand)) {
                // Of a table, only rows that are looked up are read.
                let is_table = matches!(node.op, Op::Gather { .. });
                let of = if is_table { node.result() } else { *operand };
                if enters.insert(*operand) {
                    reads += if varies(function, of) { elements(function, of) } else { 0 };
                }
            }
        }
        let mut leaves: BTreeSet<ValueId> = function.results.iter().copied().collect();
        let outside = function.nodes.iter().enumerate().filter(|(at, _)| !inside(*at));
        leaves.extend(outside.flat_map(|(_, node)| node.operands.iter().copied()));
        leaves.retain(|value| made_inside(value) && varies(function, *value));
        let writes = leaves.iter().map(|value| elements(function, *value)).sum();
        let is_linear = nodes().all(|(_, node)| is_linear(&node.op));
        let kept: Vec<ValueId> = if is_linear { Vec::new() } else { enters.into_iter().collect() };
        let mut cut = self.function.nodes.iter().enumerate().filter(|(at, _)| inside(*at));
        let cut = cut.any(|(_, node)| self.is_cut(node.result()));
        Item::Rows { reads, writes, saves: self.save(&kept), parameters: 0, cut }
    }
}

/// Rows, inner elements, columns and number of the products of one sample.
fn contracted(function: &Function, einsum: &Einsum, [a, b]: [ValueId; 2]) -> [u64; 4] {
    // The weight is the second operand.
    let is_first = varies(function, a);
    let (x, w) = if is_first { (a, b) } else { (b, a) };
    let (xs, ws) = if is_first { (&einsum.a, &einsum.b) } else { (&einsum.b, &einsum.a) };
    let sizes: BTreeMap<char, u64> = [(xs, x), (ws, w)]
        .into_iter()
        .flat_map(|(letters, value)| letters.iter().zip(&function.ty(value).dims))
        .map(|(letter, dim)| (*letter, size(dim)))
        .collect();
    let mut found = [1_u64; 4];
    for (letter, size) in sizes {
        let place = match (xs.contains(&letter), ws.contains(&letter)) {
            (true, false) => 0,
            (false, _) => 2,
            (true, true) if einsum.result.contains(&letter) => 3,
            (true, true) => 1,
        };
        found[place] = found[place].saturating_mul(size);
    }
    found
}

/// The sizes of a convolution as [`contracted`] gives them: one product for each group of channels.
fn convolved(function: &Function, node: &Node) -> [u64; 4] {
    let dims = |value: ValueId| &function.ty(value).dims;
    let (x, w) = (dims(node.operands[0]), dims(node.operands[1]));
    let groups = (size(&x[1]) / size(&w[1]).max(1)).max(1);
    let inside = w[1..].iter().map(size).fold(1, u64::saturating_mul);
    let rows = dims(node.result())[2..].iter().map(size).fold(1, u64::saturating_mul);
    [rows, inside, size(&w[0]) / groups, groups]
}

/// For each node that is part of a kernel without products, the last node of that kernel: nodes
/// that vary and hand each other values run together.
fn kernels(function: &Function) -> Vec<Option<usize>> {
    let producers = function.producers();
    let fuses = |node: &Node| {
        let is_work = node.callee().is_none() && !is_product(&node.op);
        is_work && (node.results.iter().chain(&node.operands)).any(|v| varies(function, *v))
    };
    let mut parent: Vec<usize> = (0..function.nodes.len()).collect();
    fn root(parent: &[usize], mut at: usize) -> usize {
        while parent[at] != at {
            at = parent[at];
        }
        at
    }
    for (at, node) in function.nodes.iter().enumerate().filter(|(_, node)| fuses(node)) {
        for operand in node.operands.iter().filter(|operand| varies(function, **operand)) {
            if let Some(from) = producers[operand.index()].filter(|p| fuses(&function.nodes[*p])) {
                let other = root(&parent, from);
                parent[other] = at;
            }
        }
    }
    let nodes = function.nodes.iter().enumerate();
    nodes.map(|(at, node)| fuses(node).then(|| root(&parent, at))).collect()
}

#[cfg(test)]
mod tests {
    use ir::DType;
    use ir::cost::function_cost;
    use ir::import::{Description, Model, Options, import, preset, read_graph};

    use super::*;

    fn built(description: &Description, seq: usize) -> Model {
        import(
            description,
            &Options { seq, dtype: DType::F32, dropout: Some(0.0), documents: false },
        )
        .unwrap()
    }

    fn model(name: &str) -> Model {
        let path = format!("{}/../tests/models/{name}.graph", env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(&path).unwrap();
        built(&read_graph(&path, &text, name).unwrap(), 1)
    }

    fn work(model: &Model) -> Workload {
        of_module(&model.name, &model.module, "loss").unwrap()
    }

    /// Whatever a module computes: its weights are counted once each, and its products are those
    /// that the table of costs has, but for the half of attention that causal models do not see.
    #[test]
    fn weights_and_operations_are_those_of_the_module() {
        let mut models = vec![model("resnet"), model("dlrm"), model("t5")];
        let mut unseen = vec![0.0; models.len()];
        for (name, width, layers) in
            [("gpt2-mini", 256.0, 4.0), ("gpt2", 768.0, 12.0), ("llama-3-8b", 4096.0, 32.0)]
        {
            models.push(built(&preset(name).unwrap(), 64));
            unseen.push(2.0 * layers * width * 64.0 * 64.0);
        }
        for (model, unseen) in models.iter().zip(unseen) {
            let work = work(model);
            assert_eq!(work.parameters(), model.param_count(), "{}", model.name);
            let one = Bindings::from([(Dim::BATCH.to_owned(), 1)]);
            let flops = function_cost(&model.module, "loss").bind(&one).product_flops;
            let flops = flops.as_constant().unwrap() as f64 - unseen;
            let ratio = work.flops_per_token() / (3.0 * flops);
            assert!((ratio - 1.0).abs() < 1e-12, "{}: {ratio}", model.name);
        }
    }

    /// Layers are runs of equal calls; what is called once at an end is that end.
    #[test]
    fn layers_are_runs_of_calls() {
        let runs = |model: &Model| -> Vec<(String, u32)> {
            work(model).layers.into_iter().map(|layer| (layer.name, layer.count)).collect()
        };
        let named = |all: &[(&str, u32)]| -> Vec<(String, u32)> {
            all.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect()
        };
        assert_eq!(runs(&model("resnet")), named(&[("block", 2), ("down", 1)]));
        assert_eq!(runs(&model("dlrm")), named(&[("interact", 1)]));
        let t5 = named(&[("encode", 2), ("target", 1), ("decode", 2)]);
        assert_eq!(runs(&model("t5")), t5);
        assert_eq!(runs(&built(&preset("gpt2").unwrap(), 64)), named(&[("block", 12)]));
    }

    /// Tensor parallelism divides groups of channels, heads and hidden sizes: what the module has.
    #[test]
    fn only_what_the_module_has_is_cut() {
        assert_eq!(work(&model("resnet")).tensor_units, Some(2), "two groups of channels");
        assert_eq!(work(&model("t5")).tensor_units, Some(2), "two heads");
        let gpt2 = work(&built(&preset("gpt2").unwrap(), 64));
        assert_eq!(gpt2.tensor_units, Some(12), "twelve heads");
        // Megatron's: two products of a block are cut by columns, two by rows; attention inside.
        let splits: Vec<Split> = gpt2.layers[0]
            .items
            .iter()
            .filter_map(|item| {
                let Item::Contraction { split, .. } = item else { return None };
                Some(*split)
            })
            .collect();
        let (columns, recomputed, rows) = (Split::Columns, Split::ColumnsAgain, Split::Rows);
        assert_eq!(splits, [columns, recomputed, recomputed, rows, columns, rows]);
        let mut items = gpt2.layers[0].items.iter();
        assert!(items.any(|item| matches!(item, Item::Mixing { heads: 12, cut: true, .. })));
        let text = "module m\n  func @loss(%w: f32[1], %x: f32[B, 1]) {\n    \
            %y: f32[B] = contract bi,i->b %x %w\n    return %y\n  }\n";
        let module = ir::text::parse_module("m", text).unwrap();
        assert_eq!(of_module("m", &module, "loss").unwrap().tensor_units, Some(1));
        assert_eq!(of_module("m", &module, "none").unwrap_err().code, "E3103");
    }
}
