//! The `cp` axis: what is counted by tokens of a sample is cut by tokens.
//!
//! The second dim of ids and labels counts tokens, and so does every dim that a factor cuts
//! together with one that does. A node is cut along tokens of its result; a sum over tokens is
//! partial, and stays so through ops that are linear in it.

use std::collections::{BTreeMap, BTreeSet};

use ir::factors::{SEQUENCE_FORMS, are_terms, canonical, factors_and_forms, term_ways, zeros};
use ir::op::Combiner;
use ir::{Axis, Diagnostic, Dim, Function, Layout, Module, Node, Op, Span, ValueId};

use super::roles::{Layer, Role};
use super::together::{Together, places};

const TERM: Layout = Layout::Partial(Combiner::Sum);

/// For each layer, how each value of its function lies on `cp`.
pub(super) type ContextLayouts = BTreeMap<String, Vec<Layout>>;

/// How the values of all layers lie on `cp`, in a module whose sizes are bound. In the entry, `B`
/// is not.
///
/// # Errors
/// `E3102` when no feed counts tokens, `E3101` when a layer cannot be cut along them.
pub(super) fn context_layouts(
    cp: usize,
    entry: &Function,
    bound: &Module,
    layers: &[Layer],
) -> Result<ContextLayouts, Diagnostic> {
    let mut all = ContextLayouts::new();
    let whole = |layer: &Layer| {
        let values = bound.function(&layer.function).map_or(0, |function| function.values.len());
        (layer.name.clone(), vec![Layout::Replicated; values])
    };
    if cp == 1 {
        return Ok(layers.iter().map(whole).collect());
    }
    let mut tokens: Vec<Option<usize>> = vec![None; entry.values.len()];
    for param in entry.params() {
        let ty = entry.ty(param);
        let is_fed = !ty.dtype.is_float() && ty.ndim() == 2 && ty.dims[0].mentions(Dim::BATCH);
        tokens[param.index()] = is_fed.then_some(1);
    }
    if tokens.iter().all(Option::is_none) {
        let headline = format!("`{}` is fed nothing that counts tokens", entry.name);
        return Err(Diagnostic::error("E3102", Span::of("cp"), headline)
            .help("leave `cp` out: it shares the tokens of a sample"));
    }
    // For each layer, the dims of its results that count tokens.
    let mut known: BTreeMap<&str, Vec<Option<usize>>> = BTreeMap::new();
    for node in &entry.nodes {
        let Op::Call { function: name } = &node.op else { continue };
        let Some(layer) = layers.iter().find(|layer| layer.name == *name) else { continue };
        if !known.contains_key(name.as_str()) {
            let function = bound.function(&layer.function);
            let function = function.expect("layers are functions of the module");
            let fed = node.operands.iter().map(|operand| tokens[operand.index()]).collect();
            let sequence = Sequence::of(function, bound, layer, fed, cp);
            known.insert(&layer.name, sequence.result_dims(layer));
            all.insert(layer.name.clone(), sequence.layouts(layer)?);
        }
        for (result, dim) in node.results.iter().zip(&known[name.as_str()]) {
            tokens[result.index()] = *dim;
        }
    }
    Ok(all)
}

/// A function, and which dim of each value counts tokens.
struct Sequence<'a> {
    function: &'a Function,
    module: &'a Module,
    dims: Vec<Option<usize>>,
    cp: usize,
}

impl<'a> Sequence<'a> {
    /// `fed` are the dims of the operands of its call that count tokens.
    fn of(
        function: &'a Function,
        module: &'a Module,
        layer: &Layer,
        fed: Vec<Option<usize>>,
        cp: usize,
    ) -> Sequence<'a> {
        let forms = |node: &Node| factors_and_forms(node, function, module, &SEQUENCE_FORMS);
        let mut together = Together::of(function, forms);
        for (param, dim) in function.params().zip(&fed) {
            dim.iter().for_each(|dim| together.mean((param, *dim)));
        }
        // A cotangent has the dims of its result.
        for (result, cotangent) in cotangents(function, layer) {
            for dim in 0..function.ty(result).ndim() {
                together.join((result, dim), (cotangent, dim));
            }
        }
        Sequence { dims: together.dims(function), function, module, cp }
    }

    fn result_dims(&self, layer: &Layer) -> Vec<Option<usize>> {
        let results = &self.function.results[..layer.passes_on.len()];
        results.iter().map(|result| self.dims[result.index()]).collect()
    }

    fn by_tokens(&self, value: ValueId) -> Layout {
        self.dims[value.index()].map_or(Layout::Replicated, Layout::cut)
    }

    fn layouts(&self, layer: &Layer) -> Result<Vec<Layout>, Diagnostic> {
        let zeros = zeros(self.function);
        let mut layouts = vec![Layout::Replicated; self.function.values.len()];
        for param in self.function.params() {
            let is_weight = layer.roles.get(param.index()) == Some(&Role::Weight);
            if !is_weight {
                layouts[param.index()] = self.by_tokens(param);
            }
        }
        let summed: BTreeSet<ValueId> =
            self.gradients(layer).map(|(_, gradient)| gradient).collect();
        for node in &self.function.nodes {
            let is_summed = node.results.iter().any(|result| summed.contains(result));
            let terms = is_summed && self.sums_pieces(node, &layouts, &zeros);
            let results = match terms {
                true => vec![TERM; node.results.len()],
                false => self.node_layouts(node, &layouts, &zeros),
            };
            for (result, layout) in node.results.iter().zip(results) {
                layouts[result.index()] = layout;
            }
        }
        self.check(layer, &layouts, &zeros)?;
        Ok(layouts)
    }

    fn node_layouts(&self, node: &Node, layouts: &[Layout], zeros: &[bool]) -> Vec<Layout> {
        let all = factors_and_forms(node, self.function, self.module, &SEQUENCE_FORMS);
        let all = canonical(all, node, self.function, (Axis::Cp, self.cp));
        let counts = |(value, dim): (ValueId, usize)| self.dims[value.index()] == Some(dim);
        let along = || all.iter().filter(|f| places(node, f).any(counts) && self.fits(node, f));
        let first = node.results[0];
        let of_tokens =
            along().find(|f| f.results[0].cut_dim().is_some_and(|d| counts((first, d))));
        let summed = || along().find(|factor| factor.results[0] == TERM);
        if let Some(factor) = of_tokens.or_else(summed) {
            return factor.results.clone();
        }
        let operands = || node.operands.iter().map(|o| (layouts[o.index()], zeros[o.index()]));
        let mut ways = term_ways(&node.op, node.operands.len()).into_iter();
        let terms = ways.any(|way| are_terms(&way, operands()));
        vec![if terms { TERM } else { Layout::Replicated }; node.results.len()]
    }

    /// Whether a node of one result makes a term of a sum on each rank from pieces of its operands,
    /// which are terms of the whole with zeros around them: so a table of positions gets its
    /// gradient, of which each rank has the rows of its tokens.
    fn sums_pieces(&self, node: &Node, layouts: &[Layout], zeros: &[bool]) -> bool {
        let operands = || {
            node.operands.iter().map(|operand| {
                let layout = layouts[operand.index()];
                let is_piece = layout.cut_dim().is_some();
                (if is_piece { TERM } else { layout }, zeros[operand.index()])
            })
        };
        let mut ways = term_ways(&node.op, node.operands.len()).into_iter();
        node.results.len() == 1 && ways.any(|way| are_terms(&way, operands()))
    }

    /// The weights of a layer with their gradients.
    fn gradients(&self, layer: &Layer) -> impl Iterator<Item = (ValueId, ValueId)> {
        let trained = self.module.function(&layer.name).into_iter();
        let trained = trained.flat_map(|primal| primal.differentiable_params());
        let gradients = self.function.results[layer.passes_on.len()..].iter().copied();
        let is_weight = |param: &ValueId| layer.roles[param.index()] == Role::Weight;
        trained.zip(gradients).filter(move |(param, _)| is_weight(param))
    }

    /// Whether a factor leaves no piece empty.
    fn fits(&self, node: &Node, factor: &ir::factors::Factor) -> bool {
        let values = node.operands.iter().chain(&node.results);
        let layouts = factor.operands.iter().chain(&factor.results);
        values.zip(layouts).all(|(value, layout)| match *layout {
            Layout::Cut { dim, unit } => {
                let size = self.function.ty(*value).dims[dim].as_constant().unwrap_or(0);
                Axis::Cp.piece_order().shares(size as usize, unit, self.cp).is_some()
            }
            Layout::Replicated | Layout::Partial(_) => true,
        })
    }

    /// What other layers take lies by tokens, and gradients of weights are sums over all of them.
    fn check(&self, layer: &Layer, layouts: &[Layout], zeros: &[bool]) -> Result<(), Diagnostic> {
        let error = |value: ValueId, why: &str| {
            let headline = format!("`cp={}` cannot cut `{}`", self.cp, layer.name);
            let note = format!("`%{}` {why}", self.function.value(value).name);
            Err(Diagnostic::error("E3101", Span::of("cp"), headline)
                .note(note)
                .help("leave `cp` out: the model has no form for parts of a sample"))
        };
        for (result, passes_on) in self.function.results.iter().zip(&layer.passes_on) {
            if *passes_on && layouts[result.index()] != self.by_tokens(*result) {
                return error(*result, "is not made by tokens");
            }
        }
        for (_, gradient) in self.gradients(layer) {
            if layouts[gradient.index()] != TERM && !zeros[gradient.index()] {
                return error(gradient, "is no sum over tokens");
            }
        }
        Ok(())
    }
}

/// The results of a layer with the cotangents that its gradient function takes.
fn cotangents<'a>(
    function: &'a Function,
    layer: &Layer,
) -> impl Iterator<Item = (ValueId, ValueId)> + 'a {
    let results = function.results[..layer.passes_on.len()].iter();
    results.filter_map(|result| {
        let name = format!("d.{}", function.value(*result).name);
        let cotangent = function.find(&name)?;
        (cotangent.index() < function.param_count).then_some((*result, cotangent))
    })
}
