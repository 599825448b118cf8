//! The search problem of one layer: its nodes in an order that suits a beam, the ways to run each
//! on `tp`, and what the layouts of parameters and results must be.

use std::collections::BTreeMap;

use codegen::partition::Choice;
use ir::factors::{Factor, canonical, factors, passes_partial};
use ir::sharding::pieces;
use ir::{Axis, Diagnostic, Dim, Function, Layout, Module, Node, Op, Span, TensorType, ValueId};

use super::data::data_layouts;
use super::experts::{computes_with_experts, expert_dims};
use super::roles::{Layer, Role};
use super::work::work;
use super::{Rates, Request};

/// What the layout of a value must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Demand {
    /// As is best.
    Free,
    /// This.
    Is(Layout),
    /// As the first use wants it; cut, when `cut` and any dim can be.
    Stored { cut: bool },
    /// As the stored parameter lies; a term of it where that is replicated.
    Gradient(ValueId),
    /// As the stored parameter lies.
    Same(ValueId),
}

/// What the operands must be, and what the results are then.
type Layouts = (Vec<Layout>, Vec<Layout>);

/// A way to run a node.
#[derive(Clone, Debug)]
pub(super) struct Way {
    pub(super) choice: Choice,
    pub(super) wanted: Vec<Layout>,
    pub(super) yields: Vec<Layout>,
    pub(super) seconds: f64,
    /// Whether another way yields the same.
    pub(super) ambiguous: bool,
}

/// A node, and the ways to run it.
#[derive(Clone, Debug)]
pub(super) struct Step {
    pub(super) node: usize,
    pub(super) factors: Vec<Factor>,
    pub(super) ways: Vec<Way>,
}

/// The search problem of one layer.
pub(super) struct Problem<'a> {
    pub(super) function: &'a Function,
    pub(super) tp: usize,
    pub(super) rates: Rates,
    /// How each value lies on `dp`.
    pub(super) data: Vec<Layout>,
    /// How each value lies on `cp`.
    pub(super) context: Vec<Layout>,
    cp: usize,
    /// For each value the dim that counts experts, which `tp` does not cut.
    pub(super) expert_dims: Vec<Option<usize>>,
    /// Whether ranks of `tp` share experts: it cuts no value of these, and the tokens of nodes that
    /// compute with them.
    takes_tp: bool,
    pub(super) demands: Vec<Demand>,
    pub(super) steps: Vec<Step>,
    /// The first step that depends on a cotangent.
    pub(super) late_from: usize,
    /// For a value that is made from nothing, the cuts in which its node can make it.
    pub(super) made: Vec<Option<Vec<Layout>>>,
    /// For a parameter whose gradient a step makes, the layouts in which that can be made.
    differentiated: Vec<Option<Vec<Layout>>>,
    /// For each value, the last step that asks for its layout.
    pub(super) last_use: Vec<usize>,
    /// For each value, its elements.
    pub(super) elements: Vec<u64>,
    /// For each value, the bytes that the ranks along `tp` have of it together.
    pub(super) bytes: Vec<f64>,
}

impl<'a> Problem<'a> {
    pub(super) fn new(
        request: &Request<'_>,
        bound: &'a Module,
        (layer, context): (&Layer, Vec<Layout>),
        fixed: &BTreeMap<String, Layout>,
    ) -> Result<Problem<'a>, Diagnostic> {
        let named = |module: &'a Module, name: &str| {
            module.function(name).expect("layers are functions of the module")
        };
        let function = named(bound, &layer.function);
        let primal = named(bound, &layer.name);
        let symbolic = request.module.function(&layer.function);
        let symbolic = symbolic.expect("binding keeps the functions");
        let data = data_layouts(symbolic, request.module);
        let part = |layout: Layout, ranks: usize| match layout {
            Layout::Cut { .. } => 1.0 / ranks as f64,
            Layout::Replicated | Layout::Partial(_) => 1.0,
        };
        let share = |at: usize| part(data[at], request.dp) * part(context[at], request.cp);
        let types = || function.values.iter().map(|v| &v.ty);
        let bytes = types().enumerate().map(|(at, ty)| ty.bytes().unwrap_or(0) as f64 * share(at));
        let bytes: Vec<f64> = bytes.collect();
        let elements = types().map(|ty| ty.count().unwrap_or(0) as u64).collect();
        let mut demands = demands(request, layer, primal, function, fixed)?;
        let (expert_dims, takes_tp) = (expert_dims(function, bound), request.experts.takes_tp);
        for (demand, dim) in demands.iter_mut().zip(&expert_dims) {
            if takes_tp && dim.is_some() && matches!(demand, Demand::Stored { .. }) {
                *demand = Demand::Is(Layout::Replicated);
            }
        }
        let mut problem = Problem {
            function,
            tp: request.tp,
            rates: request.rates,
            data,
            context,
            cp: request.cp,
            expert_dims,
            takes_tp,
            demands,
            steps: Vec::new(),
            late_from: 0,
            made: vec![None; function.values.len()],
            differentiated: vec![None; function.values.len()],
            last_use: Vec::new(),
            elements,
            bytes,
        };
        problem.add_steps(symbolic, bound, primal.param_count);
        problem.last_use = problem.last_uses();
        problem.add_gradients();
        Ok(problem)
    }

    /// Orders the nodes: what is made from nothing has no step of its own, a broadcast comes right
    /// before its first reader. So few values whose layouts are a matter of taste live at once.
    fn add_steps(&mut self, symbolic: &Function, bound: &Module, primal_params: usize) {
        let function = self.function;
        let producers = function.producers();
        let mut waits = vec![false; function.nodes.len()];
        let mut late = vec![false; function.values.len()];
        late[primal_params..function.param_count].fill(true);
        let mut late_from = None;
        for (at, node) in function.nodes.iter().enumerate() {
            let is_late = node.operands.iter().any(|o| late[o.index()]);
            node.results.iter().for_each(|r| late[r.index()] = is_late);
            let is_result = node.results.iter().any(|r| function.results.contains(r));
            let is_made =
                matches!(node.op, Op::Constant { .. } | Op::Iota { .. } | Op::Random { .. });
            if is_made && !is_result {
                let factors =
                    canonical(factors(node, function, bound), node, function, (Axis::Tp, self.tp));
                let cuts = factors.iter().filter(|f| self.is_legal(f, node, symbolic));
                let cuts = cuts.map(|f| f.results[0]).collect();
                self.made[node.result().index()] = Some(cuts);
                continue;
            }
            if matches!(node.op, Op::Broadcast { .. }) && !is_result {
                waits[at] = true;
                continue;
            }
            let mut ready = vec![at];
            let mut work: Vec<ValueId> = node.operands.clone();
            while let Some(operand) = work.pop() {
                if let Some(maker) = producers[operand.index()].filter(|maker| waits[*maker]) {
                    waits[maker] = false;
                    ready.push(maker);
                    work.extend(&function.nodes[maker].operands);
                }
            }
            if is_late {
                late_from.get_or_insert(self.steps.len());
            }
            for at in ready.into_iter().rev() {
                self.push_step(at, symbolic, bound);
            }
        }
        for at in (0..waits.len()).filter(|at| waits[*at]) {
            self.push_step(at, symbolic, bound);
        }
        self.late_from = late_from.unwrap_or(self.steps.len());
    }

    fn push_step(&mut self, at: usize, symbolic: &Function, bound: &Module) {
        let node = &self.function.nodes[at];
        let all = factors(node, self.function, bound);
        let factors = canonical(all, node, self.function, (Axis::Tp, self.tp));
        let all_work = work(node, self.function, bound);
        let rates = self.rates;
        let values = || node.operands.iter().chain(&node.results);
        let whole = values().map(|v| self.function.ty(*v).bytes().unwrap_or(0) as f64).sum::<f64>();
        let local = values().map(|v| self.bytes[v.index()]).sum::<f64>();
        let data_share = if whole > 0.0 { local / whole } else { 1.0 };
        let seconds = data_share * all_work.seconds(rates.flops_per_s, rates.memory_bytes_per_s);
        let cuts = (0..factors.len()).map(Choice::Cut);
        // Terms of products are summed before, where they are less.
        let terms = passes_partial(&node.op).then_some(Choice::Terms(0));
        let choices = std::iter::once(Choice::Replicate).chain(cuts).chain(terms);
        let all: Vec<(Choice, Layouts)> = choices
            .map(|choice| {
                let layouts = choice.layouts(node, &factors);
                (choice, layouts)
            })
            .collect();
        let ambiguous = |yields: &Vec<Layout>| all.iter().filter(|w| w.1.1 == *yields).count() > 1;
        let cuts_tokens = self.takes_tp && computes_with_experts(node, self.function, bound);
        let legal = |choice: &Choice| match choice {
            Choice::Cut(at) => self.is_legal(&factors[*at], node, symbolic),
            Choice::Replicate | Choice::Terms(_) => !cuts_tokens,
        };
        let ways: Vec<Way> = all
            .iter()
            .filter(|(choice, _)| legal(choice))
            .map(|(choice, (wanted, yields))| {
                let share = match choice {
                    Choice::Cut(at) => largest_share(&factors[*at].units, self.tp),
                    Choice::Replicate | Choice::Terms(_) => 1.0,
                };
                Way {
                    choice: choice.clone(),
                    wanted: wanted.clone(),
                    yields: yields.clone(),
                    seconds: seconds * share,
                    ambiguous: ambiguous(yields),
                }
            })
            .collect();
        self.steps.push(Step { node: at, factors, ways });
    }

    /// Whether a factor leaves no piece empty and does not cut samples.
    fn is_legal(&self, factor: &Factor, node: &Node, symbolic: &Function) -> bool {
        if self.tp == 1 {
            return false;
        }
        let cut_fits = |(value, layout): (&ValueId, &Layout)| match *layout {
            Layout::Cut { dim, unit } => {
                let samples = symbolic.ty(*value).dims[dim].mentions(Dim::BATCH);
                let experts = self.expert_dims[value.index()];
                let counts_experts = experts == Some(dim) || self.takes_tp && experts.is_some();
                let size = self.size_on_cp(*value, dim);
                !samples && !counts_experts && pieces(size, unit, self.tp).is_some()
            }
            Layout::Replicated | Layout::Partial(_) => true,
        };
        let operands = node.operands.iter().zip(&factor.operands);
        operands.chain(node.results.iter().zip(&factor.results)).all(cut_fits)
    }

    /// The size of a dim on the context-parallel rank that has least of it.
    fn size_on_cp(&self, value: ValueId, dim: usize) -> usize {
        let size = self.function.ty(value).dims[dim].as_constant().unwrap_or(0) as usize;
        match self.context[value.index()] {
            Layout::Cut { dim: own, unit } if own == dim => {
                let all = pieces(size, unit, self.cp).unwrap_or_default();
                all.iter().map(|piece| piece.size).min().unwrap_or(0)
            }
            Layout::Cut { .. } | Layout::Replicated | Layout::Partial(_) => size,
        }
    }

    fn last_uses(&self) -> Vec<usize> {
        let mut last = vec![0; self.function.values.len()];
        for (at, step) in self.steps.iter().enumerate() {
            let node = &self.function.nodes[step.node];
            for operand in &node.operands {
                last[operand.index()] = at;
            }
            for result in &node.results {
                match self.demands[result.index()] {
                    Demand::Gradient(of) | Demand::Same(of) => last[of.index()] = at,
                    Demand::Free | Demand::Is(_) | Demand::Stored { .. } => {}
                }
            }
        }
        last
    }

    fn add_gradients(&mut self) {
        for step in &self.steps {
            for (at, result) in self.function.nodes[step.node].results.iter().enumerate() {
                let Demand::Gradient(of) = self.demands[result.index()] else { continue };
                let yields = step.ways.iter().map(|way| way.yields[at]).collect();
                self.differentiated[of.index()] = Some(yields);
            }
        }
    }

    /// The stored cut of a parameter that its first reader wants whole: its gradient has to lie
    /// likewise.
    pub(super) fn stored_cut(&self, value: ValueId) -> Layout {
        let sizes = self.function.ty(value).sizes().unwrap_or_default();
        let expert_dim = self.expert_dims[value.index()];
        let cuts = super::cuttable(&sizes, self.tp).into_iter();
        let gradients = self.differentiated[value.index()].as_ref();
        let can_be_made = |cut: &Layout| gradients.is_none_or(|made| made.contains(cut));
        let cuts = cuts.filter(|cut| cut.cut_dim() != expert_dim && can_be_made(cut));
        let size = |cut: &Layout| cut.cut_dim().map_or(0, |dim| sizes[dim]);
        cuts.rev().max_by_key(size).unwrap_or(Layout::Replicated)
    }
}

/// The part of the units that the first rank has.
fn largest_share(units: &Dim, ranks: usize) -> f64 {
    let units = units.as_constant().unwrap_or(1).max(1) as usize;
    units.div_ceil(ranks) as f64 / units as f64
}

fn demands(
    request: &Request<'_>,
    layer: &Layer,
    primal: &Function,
    function: &Function,
    fixed: &BTreeMap<String, Layout>,
) -> Result<Vec<Demand>, Diagnostic> {
    let mut demands = vec![Demand::Free; function.values.len()];
    for (at, role) in layer.roles.iter().enumerate() {
        let names = layer.weights[at].iter().flatten();
        let pinned = names.filter_map(|name| fixed.get(name)).next();
        let ty = &primal.values[at].ty;
        demands[at] = match (role, pinned) {
            (_, Some(layout)) => Demand::Is(*layout),
            (Role::Activation, None) => Demand::Is(boundary(request, ty)?),
            (Role::Weight, None) => Demand::Stored { cut: ty.ndim() >= 2 },
            (Role::Cache, None) => Demand::Stored { cut: false },
            (Role::Feed, None) => Demand::Is(Layout::Replicated),
        };
    }
    for (at, result) in primal.results.iter().enumerate() {
        let ty = primal.ty(*result);
        let demand = match (layer.passes_on[at], layer.replaces[at]) {
            (true, _) => Demand::Is(boundary(request, ty)?),
            (false, Some(param)) => Demand::Same(ValueId(param as u32)),
            (false, None) if ty.ndim() == 0 => Demand::Is(Layout::Replicated),
            (false, None) => Demand::Free,
        };
        set(&mut demands, function, function.results[at], demand);
        let cotangent = format!("d.{}", primal.value(*result).name);
        if let Some(cotangent) =
            function.find(&cotangent).filter(|c| c.index() < function.param_count)
        {
            let same = matches!(demand, Demand::Is(_)).then_some(demand);
            demands[cotangent.index()] = same.unwrap_or(Demand::Is(Layout::Replicated));
        }
    }
    let gradients = function.results[primal.results.len()..].iter();
    for (param, gradient) in primal.differentiable_params().zip(gradients) {
        let demand = match (&layer.roles[param.index()], demands[param.index()]) {
            (Role::Activation, demand) => demand,
            (Role::Weight, _) => Demand::Gradient(param),
            (Role::Feed | Role::Cache, _) => Demand::Free,
        };
        set(&mut demands, function, *gradient, demand);
    }
    Ok(demands)
}

/// Parameters keep the demand that they have as parameters.
fn set(demands: &mut [Demand], function: &Function, value: ValueId, demand: Demand) {
    if value.index() >= function.param_count {
        demands[value.index()] = demand;
    }
}

/// The layout of an activation between layers.
fn boundary(request: &Request<'_>, ty: &TensorType) -> Result<Layout, Diagnostic> {
    let cut = request.sequence && request.tp > 1 && ty.ndim() >= 2;
    if !cut {
        return Ok(Layout::Replicated);
    }
    let size = ty.dims[1].as_constant().unwrap_or(0) as usize / request.cp;
    if request.experts.takes_tp && !size.is_multiple_of(request.tp) {
        let tp = request.tp;
        let headline =
            format!("ranks of tp={tp} that share experts have no equal parts of {size} tokens");
        return Err(Diagnostic::error("E3102", Span::of("etp"), headline)
            .help("use a tp that divides the tokens of a rank, or leave `etp` out"));
    }
    if pieces(size, 1, request.tp).is_none() {
        let headline = format!("`sp` cannot cut {size} tokens over tp={}", request.tp);
        return Err(Diagnostic::error("E3102", Span::of("--fix sp"), headline)
            .help(format!("use a tp of at most {size}, or forbid `sp`")));
    }
    Ok(Layout::cut(1))
}
