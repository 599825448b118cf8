//! Shardings of values: each by itself, each node from its operands, layers where they meet.

use std::collections::{BTreeMap, BTreeSet};

use ir::factors::{
    EXPERT_FORM, Factor, SEQUENCE_FORMS, are_terms, canonical, factors_and_forms, term_ways, zeros,
};
use ir::op::Combiner;
use ir::plan::FunctionPlan;
use ir::sharding::pieces;
use ir::{
    Axis, Bindings, Diagnostic, Dim, Function, Layout, Module, Node, Op, Plan, Sharding, ValueId,
};

use super::error;

/// The axes along which values lie.
const AXES: [Axis; 4] = [Axis::Dp, Axis::Cp, Axis::Tp, Axis::Ep];
const TERM: Layout = Layout::Partial(Combiner::Sum);
const WHOLE: Layout = Layout::Replicated;

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
        layer.check_weights(primal, &weights, &bound);
        layer.check_gradients_passed(primal, &weights);
        let given = node.results.iter().map(|result| entry.results.contains(result));
        layer.check_sums(primal, given);
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

    fn sharding(&self, value: ValueId) -> Option<&Sharding> {
        self.decisions.shardings.get(&self.function.value(value).name)
    }

    /// The ranks along an axis over which a value can lie: where it is cut over experts, these have
    /// taken some.
    fn ranks(&self, value: ValueId, axis: Axis) -> usize {
        let Plan { mesh, experts, .. } = *self.plan;
        let names_experts =
            self.sharding(value).is_some_and(|s| s.on(Axis::Ep).cut_dim().is_some());
        match axis {
            Axis::Ep => experts.ep,
            Axis::Pp | Axis::Dp | Axis::Cp | Axis::Tp if names_experts => {
                mesh.besides_experts(experts).map_or(1, |rest| rest.size(axis))
            }
            Axis::Pp | Axis::Dp | Axis::Cp | Axis::Tp => mesh.size(axis),
        }
    }

    /// How a value lies on an axis; on an axis of one rank it is whole.
    fn layout(&self, value: ValueId, axis: Axis) -> Layout {
        if self.ranks(value, axis) == 1 {
            return Layout::Replicated;
        }
        self.sharding(value).map_or(Layout::Replicated, |s| s.on(axis))
    }

    fn fits(&self, value: ValueId, layout: Layout, axis: Axis) -> bool {
        let Layout::Cut { dim, unit } = layout else { return true };
        let size = self.function.ty(value).dims.get(dim).and_then(Dim::as_constant);
        let Some(mut size) = size.map(|size| size as usize) else { return false };
        // Parts of a sample are cut again where tensor-parallel ranks share tokens.
        if let (Axis::Tp, Layout::Cut { dim: outer, unit }) = (axis, self.layout(value, Axis::Cp))
            && outer == dim
        {
            let parts = Axis::Cp.piece_order().shares(size, unit, self.plan.mesh.cp);
            let part = parts.as_ref().and_then(|parts| parts.first());
            size = part.map_or(0, |part| part.iter().map(|piece| piece.size).sum());
        }
        axis.piece_order().shares(size, unit, self.ranks(value, axis)).is_some()
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
                self.check_taken(value, &sharding, axis);
            }
            self.check_cuts(value, &name);
        }
        self.found.len() == before
    }

    /// A dim is cut once, but tokens over `cp` and `tp`; experts in equal parts.
    fn check_cuts(&mut self, value: ValueId, name: &str) {
        let dim = |axis| self.layout(value, axis).cut_dim();
        let [dp, cp, tp, ep] = AXES.map(dim);
        let pairs = [(dp, cp), (dp, tp), (dp, ep), (cp, ep), (tp, ep)];
        if let Some((Some(twice), _)) = pairs.into_iter().find(|(a, b)| a.is_some() && a == b) {
            let headline = format!("`%{name}` of `{}` is cut twice along dim {twice}", self.name);
            self.report("E3304", headline);
        }
        let names_experts = self.sharding(value).is_some_and(|s| s.on(Axis::Ep) != WHOLE);
        if names_experts && self.plan.experts.ep == 1 {
            let headline = format!("`%{name}` of `{}` is cut over ep", self.name);
            let note = "no ranks share experts: the plan has no line `experts`";
            self.found.push(error("E3304", self.plan, headline).note(note));
        }
        let Some(count) = ep.and_then(|dim| self.function.ty(value).dims.get(dim)) else { return };
        let count = count.as_constant().unwrap_or(0);
        let ranks = self.plan.experts.ep;
        if count % ranks as i64 != 0 {
            let headline = format!("ep={ranks} does not divide the {count} experts of `%{name}`");
            self.report("E3304", headline);
        }
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

    /// A value that is cut over experts says nothing of axes that these have taken whole.
    fn check_taken(&mut self, value: ValueId, sharding: &Sharding, axis: Axis) {
        let is_taken = self.ranks(value, axis) == 1 && self.plan.mesh.size(axis) > 1;
        if axis != Axis::Ep && is_taken && sharding.on(axis) != WHOLE {
            let name = &self.function.value(value).name;
            let headline = format!("`%{name}` of `{}` lies on {axis} in parts", self.name);
            let note = format!("ep takes all of {axis} where values are cut over it");
            self.found.push(error("E3304", self.plan, headline).note(note));
        }
    }

    fn check_value(&mut self, value: ValueId, sharding: &Sharding, axis: Axis) {
        let ranks = self.ranks(value, axis);
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
            for axis in AXES {
                let Plan { mesh, experts, .. } = *self.plan;
                let ranks = if axis == Axis::Ep { experts.ep } else { mesh.size(axis) };
                if ranks == 1 {
                    continue;
                }
                let forms: &[&str] = match axis {
                    Axis::Cp => &SEQUENCE_FORMS,
                    Axis::Ep => &[EXPERT_FORM],
                    Axis::Pp | Axis::Dp | Axis::Tp => &[],
                };
                let all = factors_and_forms(node, self.function, bound, forms);
                let factors = canonical(all, node, self.function, (axis, ranks));
                if !self.is_computable(node, &factors, &zeros, axis) {
                    let name = &self.function.value(node.results[0]).name;
                    let op = ir::infer::name(&node.op);
                    let headline =
                        format!("`{}` cannot compute `%{name}` on {axis} as planned", self.name);
                    let note = format!("no factor of its `{op}` fits its operands and results");
                    self.found.push(error("E3305", self.plan, headline).note(note));
                }
            }
            self.check_tokens_of_experts(node, bound);
        }
    }

    /// Where ranks of `tp` share experts, they share the tokens that these compute with: each would
    /// send the same ones otherwise.
    fn check_tokens_of_experts(&mut self, node: &Node, bound: &Module) {
        let with = |forms: &[&str]| factors_and_forms(node, self.function, bound, forms).len();
        if !self.plan.experts.takes_tp || with(&[EXPERT_FORM]) == with(&[]) {
            return;
        }
        let is_whole = |result: &&ValueId| {
            let of_tokens = self.layout(**result, Axis::Ep) == WHOLE;
            of_tokens && self.layout(**result, Axis::Tp).cut_dim() != Some(1)
        };
        if let Some(whole) = node.results.iter().find(is_whole) {
            let name = &self.function.value(*whole).name;
            let headline = format!("`%{name}` of `{}` is not cut by tokens over tp", self.name);
            let note = "with `etp=1` ranks of tp share the tokens that experts compute with";
            self.found.push(error("E3306", self.plan, headline).note(note));
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
        // A part of a sample, with zeros around it, is a term of the whole.
        let as_term = |layout: Layout| match layout {
            Layout::Cut { .. } if axis == Axis::Cp => TERM,
            Layout::Cut { .. } | Layout::Replicated | Layout::Partial(_) => layout,
        };
        let operands =
            || node.operands.iter().map(|o| (as_term(self.layout(*o, axis)), is_zero(o)));
        let mut ways = term_ways(&node.op, node.operands.len()).into_iter();
        if results().all(|r| r == TERM) && ways.any(|way| are_terms(&way, operands())) {
            return true;
        }
        factors.iter().any(|factor| {
            let values = node.operands.iter().chain(&node.results);
            let layouts = factor.operands.iter().chain(&factor.results);
            let lie = node.results.iter().zip(&factor.results);
            // Over one rank a sum is whole.
            lie.into_iter().all(|(result, layout)| {
                let is_whole = self.ranks(*result, axis) == 1 && layout.cut_dim().is_none();
                is_whole || self.layout(*result, axis) == *layout
            }) && values.zip(layouts).all(|(value, layout)| self.fits(*value, *layout, axis))
        })
    }

    /// Weights are cut over `tp` where they have two dims, and by experts over `ep`; their
    /// gradients lie as they do, and are sums over the ranks that hold copies.
    fn check_weights(&mut self, primal: &Function, is_weight: &[bool], bound: &Module) {
        let experts = self.weights_of_experts(bound);
        let gradients = self.function.results[primal.results.len()..].to_vec();
        let gradients: BTreeMap<ValueId, ValueId> =
            primal.differentiable_params().zip(gradients).collect();
        for param in primal.params().filter(|p| is_weight[p.index()]) {
            let name = primal.value(param).name.clone();
            // Ranks that share experts may have taken those of `tp`.
            let tp = self.ranks(param, Axis::Tp);
            let sizes = primal.ty(param).sizes().unwrap_or_default();
            let whole = self.layout(param, Axis::Tp) == Layout::Replicated;
            let can_be_cut = sizes.iter().any(|size| pieces(*size, 1, tp).is_some());
            if whole && tp > 1 && sizes.len() > 1 && can_be_cut {
                let headline = format!("every rank of tp={tp} stores all of `%{name}`");
                self.report("E3306", headline);
            }
            for axis in [Axis::Dp, Axis::Cp] {
                if self.layout(param, axis) != WHOLE {
                    let headline = format!("`%{name}` is cut over {axis}, which holds copies");
                    self.report("E3306", headline);
                }
            }
            self.check_experts(&name, (param, experts.get(&param).copied()));
            let Some(gradient) = gradients.get(&param) else { continue };
            let (stored, layout) = (self.layout(param, Axis::Tp), self.layout(*gradient, Axis::Tp));
            let differs = layout != stored && !(whole && layout == TERM);
            if differs || self.layout(param, Axis::Ep) != self.layout(*gradient, Axis::Ep) {
                let headline = format!("the gradient of `%{name}` does not lie as the weight does");
                self.report("E3306", headline);
            }
            for axis in [Axis::Dp, Axis::Cp] {
                let ranks = self.ranks(*gradient, axis);
                let is_sum = self.layout(*gradient, axis) == TERM;
                if ranks > 1 && !is_sum && !zeros(self.function)[gradient.index()] {
                    let headline = format!(
                        "the gradient of `%{name}` is whole on each rank of {axis}={ranks}"
                    );
                    self.report("E3306", format!("{headline}: their sum counts it {ranks} times"));
                }
            }
        }
    }

    /// What layers pass back lies as what they have passed on.
    fn check_gradients_passed(&mut self, primal: &Function, is_weight: &[bool]) {
        let gradients = self.function.results[primal.results.len()..].to_vec();
        let params = primal.differentiable_params().zip(gradients);
        let params = params.filter(|(param, _)| !is_weight[param.index()]);
        let cotangent = |result: &ValueId| {
            let name = format!("d.{}", self.function.value(*result).name);
            let found = self.function.find(&name)?;
            (found.index() < self.function.param_count).then_some((*result, found))
        };
        let results = self.function.results[..primal.results.len()].iter().filter_map(cotangent);
        let pairs: Vec<(ValueId, ValueId)> = params.chain(results).collect();
        for (value, gradient) in pairs {
            let differs = |axis: &Axis| self.layout(value, *axis) != self.layout(gradient, *axis);
            // The loss is a sum over ranks, and its cotangent a number that all have.
            let is_scalar = self.function.ty(value).ndim() == 0;
            if let Some(axis) = AXES.iter().find(|axis| !is_scalar && differs(axis)) {
                let name = &self.function.value(value).name;
                let headline = format!("`%{name}` and its gradient lie differently on {axis}");
                self.report("E3307", headline);
            }
        }
    }

    /// Results of the entry are sums over samples and tokens, of which each rank has a term.
    fn check_sums(&mut self, primal: &Function, given: impl Iterator<Item = bool>) {
        let zeros = zeros(self.function);
        let results = self.function.results[..primal.results.len()].to_vec();
        let given = results.into_iter().zip(given).filter(|(_, is_given)| *is_given);
        let given: Vec<ValueId> = given.map(|(result, _)| result).collect();
        // The ranks of `tp` have terms of all, or all of each.
        let on_tp = |result: &ValueId| self.layout(*result, Axis::Tp);
        if let Some(other) = given.iter().find(|result| on_tp(result) != on_tp(&given[0])) {
            let [first, other] = [given[0], *other].map(|id| &self.function.value(id).name);
            let headline = format!("`%{first}` and `%{other}` lie differently on tp");
            self.report("E3306", headline);
        }
        for result in given {
            for axis in [Axis::Dp, Axis::Cp] {
                let ranks = self.ranks(result, axis);
                if ranks > 1 && self.layout(result, axis) != TERM && !zeros[result.index()] {
                    let name = &self.function.value(result).name;
                    let headline = format!("`%{name}` is whole on each rank of {axis}={ranks}");
                    self.report("E3306", format!("{headline}: their sum counts it {ranks} times"));
                }
            }
        }
    }

    /// A weight of experts is cut by experts over `ep` and by nothing else there; any other is not.
    fn check_experts(&mut self, name: &str, (param, experts): (ValueId, Option<usize>)) {
        let ep = self.plan.experts.ep;
        let own = self.layout(param, Axis::Ep).cut_dim();
        if experts.is_some() && self.layout(param, Axis::Tp).cut_dim() == experts {
            let headline = format!("the experts of `%{name}` are cut over tp, which shares tokens");
            self.report("E3306", headline);
        }
        if ep == 1 || own == experts {
            return;
        }
        let headline = match experts {
            Some(dim) => format!("`%{name}` is not cut over ep={ep} along dim {dim}, its experts"),
            None => format!("`%{name}` is cut over ep={ep}, and no experts compute with it"),
        };
        self.report("E3306", headline);
    }

    /// The weights that experts compute with, and the dim that counts them: those that the form of
    /// expert parallelism cuts, directly or through casts.
    fn weights_of_experts(&self, bound: &Module) -> BTreeMap<ValueId, usize> {
        let producers = self.function.producers();
        let stored = |mut value: ValueId| {
            while let Some(node) = producers[value.index()].map(|at| &self.function.nodes[at])
                && matches!(node.op, Op::Cast { .. })
            {
                value = node.operands[0];
            }
            value
        };
        let mut found = BTreeMap::new();
        for node in self.function.nodes.iter().filter(|node| node.callee().is_some()) {
            let without = factors_and_forms(node, self.function, bound, &[]).len();
            let all = factors_and_forms(node, self.function, bound, &[EXPERT_FORM]);
            for form in &all[without..] {
                let cut = node.operands.iter().zip(&form.operands);
                found.extend(cut.filter_map(|(o, layout)| Some((stored(*o), layout.cut_dim()?))));
            }
        }
        found
    }
}

/// What one layer passes to another lies equally in both, and so does every use of a weight.
fn check_boundaries(module: &Module, entry: &Function, plan: &Plan, found: &mut Vec<Diagnostic>) {
    let mut lies: BTreeMap<ValueId, (Sharding, String)> = BTreeMap::new();
    let sharding = |function: &str, value: &str| {
        let planned = plan.functions.get(function).and_then(|f| f.shardings.get(value));
        plan.mesh.relevant_besides(plan.experts, planned.unwrap_or(&Sharding::default()))
    };
    for param in entry.params() {
        let value = entry.value(param);
        let is_fed = !value.ty.dtype.is_float() && value.ty.ndim() == 2;
        if is_fed && value.ty.dims[0].mentions(Dim::BATCH) {
            let own = [(Axis::Dp, Layout::cut(0)), (Axis::Cp, Layout::cut(1))];
            let own = plan.mesh.relevant(&Sharding::new(own));
            lies.insert(param, (own, format!("`%{}`, which is fed,", value.name)));
        }
    }
    for node in &entry.nodes {
        let Op::Call { function } = &node.op else { continue };
        let Some(callee) = module.function(function) else { continue };
        for (param, operand) in callee.params().zip(&node.operands) {
            let name = &callee.value(param).name;
            let wanted = sharding(function, name);
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
            let here = format!("`%{name}` of `{function}`");
            lies.insert(*value, (sharding(function, name), here));
        }
    }
}
