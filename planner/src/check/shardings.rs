//! Shardings of values: each by itself, each node from its operands, layers where they meet.

use std::collections::{BTreeMap, BTreeSet};

use ir::factors::{Factor, are_terms, canonical, factors, term_ways, zeros};
use ir::op::Combiner;
use ir::plan::FunctionPlan;
use ir::sharding::pieces;
use ir::{
    Axis, Bindings, Diagnostic, Dim, Function, Layout, Module, Node, Op, Plan, Sharding, ValueId,
};

use super::error;

/// The axes along which values lie.
const AXES: [Axis; 2] = [Axis::Dp, Axis::Tp];
const TERM: Layout = Layout::Partial(Combiner::Sum);

/// Checks the shardings of all layers that the entry calls.
pub(super) fn check_shardings(
    module: &Module,
    entry: &str,
    plan: &Plan,
    found: &mut Vec<Diagnostic>,
) {
    let Some(entry) = module.function(entry) else { return };
    let mut bound = module.clone();
    let batch = (plan.microbatch_size * plan.mesh.dp) as i64;
    bound.bind(&Bindings::from([(Dim::BATCH.to_owned(), batch)]));
    let mut seen = Vec::new();
    for node in &entry.nodes {
        let Op::Call { function: name } = &node.op else { continue };
        if seen.contains(&name) {
            continue;
        }
        seen.push(name);
        let Some(primal) = module.function(name) else { continue };
        let gradient = format!("{name}.grad");
        let function = module.function(&gradient).unwrap_or(primal);
        let (Some(local), Some(decisions)) =
            (bound.function(&function.name), plan.functions.get(name))
        else {
            found.push(error("E3304", plan, format!("the plan decides nothing about `{name}`")));
            continue;
        };
        let mut layer = Layer { plan, name, symbolic: function, function: local, decisions, found };
        if !layer.check_values() {
            continue;
        }
        layer.check_nodes(&bound);
        let is_weight = |operand: &ValueId| is_weight(entry, *operand);
        let weights: Vec<bool> = node.operands.iter().map(is_weight).collect();
        layer.check_weights(primal, &weights);
    }
    if found.is_empty() {
        check_boundaries(module, entry, plan, found);
    }
}

fn is_weight(entry: &Function, operand: ValueId) -> bool {
    let ty = entry.ty(operand);
    let is_param = operand.index() < entry.param_count;
    is_param && ty.dtype.is_float() && !ty.dims.iter().any(|d| d.mentions(Dim::BATCH))
}

struct Layer<'a> {
    plan: &'a Plan,
    name: &'a str,
    /// With `B` unbound.
    symbolic: &'a Function,
    function: &'a Function,
    decisions: &'a FunctionPlan,
    found: &'a mut Vec<Diagnostic>,
}

impl Layer<'_> {
    fn report(&mut self, code: &'static str, headline: String) {
        self.found.push(error(code, self.plan, headline));
    }

    /// How a value lies on an axis; on an axis of one rank it is whole.
    fn layout(&self, value: ValueId, axis: Axis) -> Layout {
        if self.plan.mesh.size(axis) == 1 {
            return Layout::Replicated;
        }
        let sharding = self.decisions.shardings.get(&self.function.value(value).name);
        sharding.map_or(Layout::Replicated, |s| s.on(axis))
    }

    fn fits(&self, value: ValueId, layout: Layout, axis: Axis) -> bool {
        let Layout::Cut { dim, unit } = layout else { return true };
        let size = self.function.ty(value).dims.get(dim).and_then(Dim::as_constant);
        size.is_some_and(|size| pieces(size as usize, unit, self.plan.mesh.size(axis)).is_some())
    }

    /// Whether every value has a sharding of its dims, without empty pieces.
    fn check_values(&mut self) -> bool {
        let before = self.found.len();
        self.check_names();
        for at in 0..self.function.values.len() {
            let value = ValueId(at as u32);
            let name = self.function.value(value).name.clone();
            let Some(sharding) = self.decisions.shardings.get(&name).cloned() else { continue };
            for axis in AXES {
                self.check_value(value, &sharding, axis);
            }
            if let (Some(dp), Some(tp)) =
                (self.layout(value, Axis::Dp).cut_dim(), self.layout(value, Axis::Tp).cut_dim())
                && dp == tp
            {
                let headline = format!("`%{name}` of `{}` is cut twice along dim {dp}", self.name);
                self.report("E3304", headline);
            }
        }
        self.found.len() == before
    }

    /// Whether the function has all values that are listed. A plan of another model lists many that
    /// it lacks, by one mistake.
    fn check_names(&mut self) {
        let values = self.function.values.iter().map(|value| &value.name);
        let known: BTreeSet<&String> = values.collect();
        let listed = self.decisions.shardings.keys();
        let missing: Vec<&String> = listed.filter(|name| !known.contains(name)).collect();
        let Some(first) = missing.first() else { return };
        let more = match missing.len() {
            1 => String::new(),
            count => format!(" and {} values more", count - 1),
        };
        let headline = format!("`{}` has no `%{first}`{more}, which the plan splits", self.name);
        let help = "a plan fits the model, length and version that it was made for: plan again";
        self.found.push(error("E3304", self.plan, headline).help(help));
    }

    fn check_value(&mut self, value: ValueId, sharding: &Sharding, axis: Axis) {
        let ranks = self.plan.mesh.size(axis);
        let layout = sharding.on(axis);
        let Layout::Cut { dim, unit } = layout else { return };
        let ty = self.symbolic.ty(value).clone();
        let name = &self.function.value(value).name;
        let Some(size) = ty.dims.get(dim) else {
            let headline = format!("`%{name}` of `{}` has no dim {dim}: it is {ty}", self.name);
            return self.report("E3304", headline);
        };
        if size.mentions(Dim::BATCH) != (axis == Axis::Dp) {
            let why = if axis == Axis::Dp { "does not count samples" } else { "counts samples" };
            let headline = format!(
                "`%{name}` of `{}` is cut over {axis} along dim {dim}, which {why}",
                self.name
            );
            return self.report("E3304", headline);
        }
        if !self.fits(value, layout, axis) {
            let headline =
                format!("`%{name}` of `{}` leaves a rank of {axis}={ranks} nothing", self.name);
            let note = format!("dim {dim} of {ty} is cut in units of {unit}");
            self.found.push(error("E3304", self.plan, headline).note(note));
        }
    }

    fn check_nodes(&mut self, bound: &Module) {
        let zeros = zeros(self.function);
        for node in &self.function.nodes {
            let all = factors(node, self.function, bound);
            for axis in AXES {
                let ranks = self.plan.mesh.size(axis);
                let factors = canonical(all.clone(), node, self.function, ranks);
                if ranks > 1 && !self.is_computable(node, &factors, &zeros, axis) {
                    let name = &self.function.value(node.results[0]).name;
                    let op = ir::infer::name(&node.op);
                    let headline =
                        format!("`{}` cannot compute `%{name}` on {axis} as planned", self.name);
                    let note = format!("no factor of its `{op}` fits its operands and results");
                    self.found.push(error("E3305", self.plan, headline).note(note));
                }
            }
        }
    }

    /// Whether whole operands, pieces along one factor, or terms give the results as planned, and
    /// the operands can be brought there.
    fn is_computable(&self, node: &Node, factors: &[Factor], zeros: &[bool], axis: Axis) -> bool {
        let results = || node.results.iter().map(|r| self.layout(*r, axis));
        if results().all(|r| r == Layout::Replicated) {
            return true;
        }
        let is_zero = |operand: &ValueId| zeros[operand.index()];
        let operands = || node.operands.iter().map(|o| (self.layout(*o, axis), is_zero(o)));
        let mut ways = term_ways(&node.op, node.operands.len()).into_iter();
        if results().all(|r| r == TERM) && ways.any(|way| are_terms(&way, operands())) {
            return true;
        }
        factors.iter().any(|factor| {
            let values = node.operands.iter().chain(&node.results);
            let layouts = factor.operands.iter().chain(&factor.results);
            results().eq(factor.results.iter().copied())
                && values.zip(layouts).all(|(value, layout)| self.fits(*value, *layout, axis))
        })
    }

    /// Weights are cut over `tp` where they have two dims, and their gradients lie as they do.
    fn check_weights(&mut self, primal: &Function, is_weight: &[bool]) {
        let gradients = self.function.results[primal.results.len()..].to_vec();
        let gradients: BTreeMap<ValueId, ValueId> =
            primal.differentiable_params().zip(gradients).collect();
        for param in primal.params().filter(|p| is_weight[p.index()]) {
            let name = primal.value(param).name.clone();
            let tp = self.plan.mesh.tp;
            let sizes = primal.ty(param).sizes().unwrap_or_default();
            let whole = self.layout(param, Axis::Tp) == Layout::Replicated;
            let can_be_cut = sizes.iter().any(|size| pieces(*size, 1, tp).is_some());
            if whole && tp > 1 && sizes.len() > 1 && can_be_cut {
                let headline = format!("every rank of tp={tp} stores all of `%{name}`");
                self.report("E3306", headline);
            }
            if self.layout(param, Axis::Dp) != Layout::Replicated {
                self.report("E3306", format!("`%{name}` is cut over dp, which holds copies"));
            }
            let Some(gradient) = gradients.get(&param) else { continue };
            let (stored, layout) = (self.layout(param, Axis::Tp), self.layout(*gradient, Axis::Tp));
            if layout != stored && !(whole && layout == TERM) {
                let headline = format!("the gradient of `%{name}` does not lie as the weight does");
                self.report("E3306", headline);
            }
            let dp = self.plan.mesh.dp;
            let is_sum = self.layout(*gradient, Axis::Dp) == TERM;
            if dp > 1 && !is_sum && !zeros(self.function)[gradient.index()] {
                let headline =
                    format!("the gradient of `%{name}` is whole on each rank of dp={dp}");
                self.report("E3306", format!("{headline}: their sum counts it {dp} times"));
            }
        }
    }
}

/// What one layer passes to another lies equally in both, and so does every use of a weight.
fn check_boundaries(module: &Module, entry: &Function, plan: &Plan, found: &mut Vec<Diagnostic>) {
    let mut lies: BTreeMap<ValueId, (Sharding, String)> = BTreeMap::new();
    let sharding = |function: &str, value: &str| {
        plan.functions.get(function).and_then(|f| f.shardings.get(value)).cloned()
    };
    for node in &entry.nodes {
        let Op::Call { function } = &node.op else { continue };
        let Some(callee) = module.function(function) else { continue };
        for (param, operand) in callee.params().zip(&node.operands) {
            let name = &callee.value(param).name;
            let Some(wanted) = sharding(function, name) else { continue };
            let here = format!("`%{name}` of `{function}`");
            let first = lies.entry(*operand).or_insert_with(|| (wanted.clone(), here.clone()));
            if first.0 != wanted {
                let ndim = callee.ty(param).ndim();
                let headline = format!("{here} and {} are one value in two shardings", first.1);
                let note = format!("{} and {}", wanted.display(ndim), first.0.display(ndim));
                found.push(error("E3307", plan, headline).note(note));
            }
        }
        for (result, value) in callee.results.iter().zip(&node.results) {
            let name = &callee.value(*result).name;
            if let Some(sharding) = sharding(function, name) {
                lies.insert(*value, (sharding, format!("`%{name}` of `{function}`")));
            }
        }
    }
}
