//! Partition: function × shardings → the function of one rank, with explicit collectives.
//!
//! Every value is computed in the sharding that the plan gives it; where a node needs an operand in
//! another one, the operand is resharded, once per sharding. Nothing is decided here: the factor
//! that a node is cut along follows from the shardings of its result and operands.

mod experts;
mod segments;

use std::collections::{BTreeMap, HashMap};

use ir::build::Builder;
use ir::factors::{
    EXPERTS_OF_RANK_FORM, Factor, Offset, SEQUENCE_FORMS, canonical, factors_and_forms, make_local,
    term_ways, zeros,
};
use ir::op::{Collective, Combiner};
use ir::sharding::{Layout, Piece};
use ir::{
    Axis, Bindings, Dim, Function, Kind, Module, Node, Op, Plan, Sharding, Target, TensorType,
    ValueId,
};

use crate::executable::executed_target;

/// The axes along which values of one function lie, outermost first: where two of them cut one dim,
/// the later one cuts what the earlier one has left. Ranks that share experts are neighbours along
/// `tp` if they take it, `cp` and `dp`: along `ep` lie experts alone, and tokens along the others.
pub const VALUE_AXES: [Axis; 4] = [Axis::Dp, Axis::Ep, Axis::Cp, Axis::Tp];

/// What collectives of experts run along where ranks of `tp` share these too: `tp` outermost.
pub const EXPERTS_WITH_TP: &str = "tp.ep";

/// The place of `dp` among [`VALUE_AXES`].
const DP: usize = 0;
/// The place of `ep` among them.
const EP: usize = 1;
/// The place of `cp` among them.
const CP: usize = 2;
/// The place of `tp` among them.
const TP: usize = 3;

/// The shardings of a function's values, by name.
pub type Shardings = BTreeMap<String, Sharding>;

/// Which rank's function is wanted: the sizes of the axes and the rank's place on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// For each of [`VALUE_AXES`], the number of ranks.
    pub sizes: [usize; 4],
    /// For each of [`VALUE_AXES`], this rank's coordinate: 0 on `dp` and `ep`: along `dp` ranks run
    /// one program, whichever experts they have.
    pub coordinates: [usize; 4],
    /// Whether the ranks of `ep` are all along `tp` first ([`ir::ExpertParallel::takes_tp`]).
    pub takes_tp: bool,
    /// Samples of one micro-batch on this rank.
    pub microbatch_size: usize,
    /// What kernels are compiled for.
    pub target: Option<Target>,
}

/// A function of one rank.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Local {
    /// The local function; its composites are in `module`.
    pub function: Function,
    /// The composites that it calls.
    pub module: Module,
}

impl Place {
    /// A place on `cp` and `tp` of what a plan has, for all data-parallel ranks.
    pub fn of(plan: &Plan, [context, tensor]: [usize; 2]) -> Place {
        let Plan { mesh, experts, microbatch_size, .. } = *plan;
        Place {
            sizes: [mesh.dp, experts.ep, mesh.cp, mesh.tp],
            takes_tp: experts.takes_tp,
            coordinates: [0, 0, context, tensor],
            microbatch_size,
            target: executed_target(plan),
        }
    }

    /// The samples of a micro-batch over all ranks.
    pub fn samples(&self) -> usize {
        self.microbatch_size * self.sizes[DP]
    }
}

/// Layouts on each of [`VALUE_AXES`].
pub type Layouts = [Layout; 4];

/// The layouts of a sharding.
pub fn layouts(sharding: &Sharding) -> Layouts {
    VALUE_AXES.map(|axis| sharding.on(axis))
}

/// How a node runs on one axis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Choice {
    /// Every rank computes the whole.
    Replicate,
    /// One factor is cut.
    Cut(usize),
    /// Every rank computes with its terms, in one of the [`term_ways`].
    Terms(usize),
}

impl Choice {
    /// What the operands must be, and what the results are.
    pub fn layouts(&self, node: &Node, factors: &[Factor]) -> (Vec<Layout>, Vec<Layout>) {
        let all = |layout: Layout, count: usize| vec![layout; count];
        let (operands, results) = (node.operands.len(), node.results.len());
        match self {
            Choice::Replicate => {
                (all(Layout::Replicated, operands), all(Layout::Replicated, results))
            }
            Choice::Cut(at) => (factors[*at].operands.clone(), factors[*at].results.clone()),
            Choice::Terms(way) => {
                let partial = Layout::Partial(Combiner::Sum);
                let operand = |is_term| if is_term { partial } else { Layout::Replicated };
                let way = term_ways(&node.op, operands).swap_remove(*way);
                (way.into_iter().map(operand).collect(), all(partial, results))
            }
        }
    }
}

/// The operands of a node as they lie on one axis.
#[derive(Clone, Copy, Debug)]
pub struct Operands<'o> {
    /// How each lies.
    pub layouts: &'o [Layout],
    /// The elements of each.
    pub sizes: &'o [u64],
    /// Whether each is zero, where that is known: a zero is a term of what others are terms of.
    pub zeros: &'o [bool],
    /// Whether ranks know where their pieces lie, so that each makes a term of the whole of one,
    /// with zeros around it.
    pub are_placed: bool,
}

impl Operands<'_> {
    /// What it takes to bring an operand to a layout: more than zero where something is done, and
    /// its elements more where they are moved. None where it cannot be had.
    fn moved(&self, at: usize, to: Layout) -> Option<u64> {
        let is_zero = || self.zeros.get(at) == Some(&true);
        match (self.layouts[at], to) {
            (from, to) if from == to => Some(0),
            (Layout::Replicated, Layout::Partial(_)) if is_zero() => Some(0),
            (Layout::Cut { .. }, Layout::Partial(Combiner::Sum)) if self.are_placed => Some(1),
            (_, Layout::Partial(_)) => None,
            (Layout::Replicated, Layout::Cut { .. }) => Some(1),
            _ => Some(2 + self.sizes[at]),
        }
    }
}

/// The choice on one axis that yields `results`, moving the fewest elements of the operands; of the
/// factors only those that can be cut. None when the node cannot yield them.
pub fn choose(
    node: &Node,
    (factors, can_be_cut): (&[Factor], &dyn Fn(&Factor) -> bool),
    operands: &Operands<'_>,
    results: &[Layout],
) -> Option<Choice> {
    let cuts = (0..factors.len()).filter(|at| can_be_cut(&factors[*at])).map(Choice::Cut);
    let terms = (0..term_ways(&node.op, node.operands.len()).len()).map(Choice::Terms);
    let candidates = std::iter::once(Choice::Replicate).chain(cuts).chain(terms);
    let mut best: Option<(u64, Choice)> = None;
    for choice in candidates {
        let (wanted, yields) = choice.layouts(node, factors);
        if yields != results {
            continue;
        }
        let moved = wanted.iter().enumerate().map(|(at, to)| operands.moved(at, *to));
        let Some(moved) = moved.sum::<Option<u64>>() else { continue };
        if best.as_ref().is_none_or(|(least, _)| moved < *least) {
            best = Some((moved, choice));
        }
    }
    best.map(|(_, choice)| choice)
}

/// The function of one rank.
///
/// # Errors
/// A sentence that names the value whose sharding no factor of its node yields, or whose dims the
/// mesh cannot cut.
pub fn partition(
    module: &Module,
    function: &Function,
    shardings: &Shardings,
    place: Place,
) -> Result<Local, String> {
    partition_for_output(module, function, shardings, place, &[])
}

/// Partitions as [`partition`] does, except that every rank along `tp` has the whole of the results
/// that `is_output` marks.
///
/// # Errors
/// Those of [`partition`].
pub fn partition_for_output(
    module: &Module,
    function: &Function,
    shardings: &Shardings,
    place: Place,
    is_output: &[bool],
) -> Result<Local, String> {
    let bindings = bindings(place);
    let mut global = function.clone();
    global.bind(&bindings);
    let mut bound = module.clone();
    bound.bind(&bindings);
    partition_bound(&bound, &global, shardings, place, is_output)
}

/// What binds the open sizes of a module for the ranks of a place: the samples of a micro-batch.
pub(crate) fn bindings(place: Place) -> Bindings {
    Bindings::from([(Dim::BATCH.to_owned(), place.samples() as i64)])
}

/// Partitions a module and a function whose sizes are bound, as [`partition_for_output`] does.
///
/// # Errors
/// Those of [`partition`].
pub(crate) fn partition_bound(
    bound: &Module,
    global: &Function,
    shardings: &Shardings,
    place: Place,
    is_output: &[bool],
) -> Result<Local, String> {
    let mut composites = Module::new(bound.name.clone());
    let local = {
        let builder = Builder::new(&mut composites, global.name.clone(), Kind::Layer);
        let mut work = Partition {
            global,
            module: bound,
            shardings,
            place,
            builder,
            shards: HashMap::new(),
            brought: HashMap::new(),
            zeros: zeros(global),
        };
        for param in global.params() {
            work.param(param)?;
        }
        for node in &global.nodes {
            work.node(node)?;
        }
        let mut result = |(at, result): (usize, &ValueId)| {
            let mut layouts = work.produced(*result)?;
            if is_output.get(at) == Some(&true) {
                layouts[TP] = Layout::Replicated;
            }
            work.shard(*result, layouts)
        };
        let results: Result<Vec<ValueId>, String> =
            global.results.iter().enumerate().map(&mut result).collect();
        work.builder.into_function(&results?)
    };
    Ok(Local { function: local, module: composites })
}

/// How a node runs on each of [`VALUE_AXES`], and how its operands and results lie then.
struct Chosen {
    choices: Vec<Choice>,
    operands: Vec<Layouts>,
    results: Vec<Layouts>,
}

struct Partition<'a> {
    global: &'a Function,
    module: &'a Module,
    shardings: &'a Shardings,
    place: Place,
    builder: Builder<'a>,
    /// The local value of a global value in some layouts.
    shards: HashMap<(ValueId, Layouts), ValueId>,
    /// The local gates of a rank's experts, by the global ones and how those of its tokens lie.
    brought: HashMap<(ValueId, Layouts), ValueId>,
    /// Which global values are zero.
    zeros: Vec<bool>,
}

impl Partition<'_> {
    /// The layouts in which a value is produced. An axis of one rank holds everything whole.
    fn produced(&self, value: ValueId) -> Result<Layouts, String> {
        let name = &self.global.value(value).name;
        let mut layouts = self.shardings.get(name).map_or([Layout::Replicated; 4], layouts);
        for (layout, size) in layouts.iter_mut().zip(self.place.sizes) {
            if size == 1 {
                *layout = Layout::Replicated;
            }
        }
        Ok(layouts)
    }

    /// The sizes of a shard.
    fn sizes(&self, value: ValueId, layouts: Layouts) -> Result<Vec<usize>, String> {
        self.sizes_outside(value, layouts, VALUE_AXES.len())
    }

    /// The sizes of what the first `axes` axes leave of a value.
    fn sizes_outside(
        &self,
        value: ValueId,
        layouts: Layouts,
        axes: usize,
    ) -> Result<Vec<usize>, String> {
        let value = self.global.value(value);
        let sizes = value.ty.sizes();
        let mut sizes =
            sizes.ok_or_else(|| format!("`%{}` has open sizes: {}", value.name, value.ty))?;
        for (at, layout) in layouts.iter().enumerate().take(axes) {
            if let Layout::Cut { dim, unit } = *layout {
                let shares = self.shares(&value.name, sizes[dim], unit, at)?;
                sizes[dim] = length(&shares[self.place.coordinates[at]]);
            }
        }
        Ok(sizes)
    }

    /// What each rank along an axis holds of a dim.
    fn shares(
        &self,
        name: &str,
        size: usize,
        unit: usize,
        axis: usize,
    ) -> Result<Vec<Vec<Piece>>, String> {
        let ranks = self.place.sizes[axis];
        VALUE_AXES[axis].piece_order().shares(size, unit, ranks).ok_or_else(|| {
            let axis = VALUE_AXES[axis];
            format!("`%{name}`: {size} elements in units of {unit} over {axis}={ranks}")
        })
    }

    fn local_type(&self, value: ValueId, layouts: Layouts) -> Result<TensorType, String> {
        Ok(TensorType::of(self.global.ty(value).dtype, &self.sizes(value, layouts)?))
    }

    fn define(&mut self, global: ValueId, layouts: Layouts, local: ValueId) {
        self.shards.insert((global, layouts), local);
    }

    fn param(&mut self, param: ValueId) -> Result<(), String> {
        let layouts = self.produced(param)?;
        let ty = self.local_type(param, layouts)?;
        let local = self.builder.param(&self.global.value(param).name, ty);
        self.define(param, layouts, local);
        Ok(())
    }

    /// The value in some layouts: as produced, or resharded on each axis in turn.
    fn shard(&mut self, value: ValueId, wanted: Layouts) -> Result<ValueId, String> {
        if let Some(local) = self.shards.get(&(value, wanted)) {
            return Ok(*local);
        }
        let mut layouts = self.produced(value)?;
        let mut local = self.shards[&(value, layouts)];
        for (axis, to) in route(layouts, wanted) {
            if layouts[axis] != to {
                local = self.reshard(value, local, &mut layouts, axis, to)?;
            }
        }
        self.shards.insert((value, wanted), local);
        Ok(local)
    }

    fn reshard(
        &mut self,
        value: ValueId,
        local: ValueId,
        layouts: &mut Layouts,
        axis: usize,
        to: Layout,
    ) -> Result<ValueId, String> {
        let name = self.global.value(value).name.clone();
        if axis == EP {
            return Err(format!("`%{name}` is of experts where others are needed"));
        }
        let sizes = self.sizes_outside(value, *layouts, axis)?;
        let axis_name = VALUE_AXES[axis].name().to_owned();
        let collective = |kind: Collective| Op::Collective { kind, axis: axis_name.clone() };
        let (from, own, order) =
            (layouts[axis], self.place.coordinates[axis], VALUE_AXES[axis].piece_order());
        let inside = |dim: usize| layouts[axis + 1..].iter().any(|l| l.cut_dim() == Some(dim));
        if [from, to].into_iter().filter_map(Layout::cut_dim).any(inside) {
            return Err(format!("`%{name}` is cut again inside of what {axis_name} exchanges"));
        }
        let mut key = *layouts;
        key[axis] = to;
        *layouts = key;
        if let Some(there) = self.shards.get(&(value, key)) {
            return Ok(*there);
        }
        let counts = |dim: usize, unit: usize| -> Result<Vec<usize>, String> {
            let shares = self.shares(&name, sizes[dim], unit, axis)?;
            Ok(shares.iter().map(|share| length(share)).collect())
        };
        let result = match (from, to) {
            (Layout::Partial(Combiner::Sum), Layout::Cut { dim, unit }) => {
                let counts = counts(dim, unit)?;
                let op = collective(Collective::ReduceScatter { dim, counts, order, own });
                self.builder.push(&format!("{name}.scatter"), op, &[local])
            }
            (Layout::Partial(combiner), _) => {
                let op = collective(Collective::AllReduce(combiner));
                let whole = self.builder.push(&format!("{name}.reduce"), op, &[local]);
                self.cut(&name, whole, &sizes, to, axis)?
            }
            (Layout::Cut { dim, unit }, Layout::Partial(Combiner::Sum)) => {
                self.term(&name, local, (dim, unit, sizes[dim]), axis)?
            }
            (Layout::Cut { dim, unit }, _) => {
                let counts = counts(dim, unit)?;
                let op = collective(Collective::AllGather { dim, counts, order });
                let whole = self.builder.push(&format!("{name}.gather"), op, &[local]);
                self.cut(&name, whole, &sizes, to, axis)?
            }
            (Layout::Replicated, Layout::Partial(_)) if self.zeros[value.index()] => local,
            (Layout::Replicated, Layout::Partial(_)) => {
                return Err(format!("`%{name}` is whole and cannot become partial"));
            }
            (Layout::Replicated, _) => self.cut(&name, local, &sizes, to, axis)?,
        };
        self.shards.insert((value, key), result);
        Ok(result)
    }

    /// This rank's piece of a whole value.
    fn cut(
        &mut self,
        name: &str,
        whole: ValueId,
        sizes: &[usize],
        to: Layout,
        axis: usize,
    ) -> Result<ValueId, String> {
        let Layout::Cut { dim, unit } = to else { return Ok(whole) };
        if axis == DP {
            // Programs do not tell data-parallel ranks apart, so that none knows its piece.
            return Err(format!("`%{name}` is whole where a rank needs its samples"));
        }
        let shares = self.shares(name, sizes[dim], unit, axis)?;
        let slice = |Piece { start, size }: &Piece| {
            let op = Op::Slice { dim, start: *start, size: *size };
            self.builder.push(&format!("{name}.slice"), op, &[whole])
        };
        let parts: Vec<ValueId> = shares[self.place.coordinates[axis]].iter().map(slice).collect();
        Ok(self.joined(&format!("{name}.slices"), dim, &parts))
    }

    fn node(&mut self, node: &Node) -> Result<(), String> {
        let all = VALUE_AXES.map(|axis| {
            let forms: &[&str] = match axis {
                Axis::Cp => &SEQUENCE_FORMS,
                Axis::Ep => &[EXPERTS_OF_RANK_FORM],
                Axis::Pp | Axis::Dp | Axis::Tp => &[],
            };
            factors_and_forms(node, self.global, self.module, forms)
        });
        let Chosen { choices, operands: wanted, results } = self.choose(node, &all)?;
        if let Choice::Cut(at) = choices[EP]
            && let Some(routing) = self.routing(node, &all[EP][at])?
        {
            return self.routed(node, (&all, &choices), &wanted, &routing);
        }
        let operands: Vec<ValueId> = node
            .operands
            .iter()
            .zip(&wanted)
            .map(|(operand, layouts)| self.shard(*operand, *layouts))
            .collect::<Result<_, _>>()?;
        let locals = match self.segments(node, &all, &choices)? {
            Some(segments) => self.in_segments(node, &segments, &results, &operands)?,
            None => {
                let offsets = self.offsets(node, &all, &choices)?;
                let sizes = self.sizes(node.results[0], results[0])?;
                let op = self.local_op(node, &sizes, &offsets, &operands)?;
                let name = &self.global.value(node.results[0]).name;
                self.builder.push_all(name, op, &operands)
            }
        };
        for ((result, layouts), local) in node.results.iter().zip(results).zip(locals) {
            let expected = self.local_type(*result, layouts)?;
            let name = &self.global.value(*result).name;
            assert_eq!(*self.builder.ty(local), expected, "the shard of `%{name}`");
            self.define(*result, layouts, local);
        }
        Ok(())
    }

    /// How a node runs, and how its operands and results lie then: results as planned, but of a
    /// node that computes with experts on the axis of these. On those of tokens such a node has
    /// terms of what is of experts: ranks with others have none.
    fn choose(&self, node: &Node, all: &[Vec<Factor>; 4]) -> Result<Chosen, String> {
        let produced: Vec<Layouts> =
            node.operands.iter().map(|o| self.produced(*o)).collect::<Result<_, _>>()?;
        let results: Result<_, String> = node.results.iter().map(|r| self.produced(*r)).collect();
        let operands = vec![[Layout::Replicated; 4]; node.operands.len()];
        let mut chosen = Chosen { choices: Vec::new(), operands, results: results? };
        let elements = |o: &ValueId| self.global.ty(*o).count().unwrap_or(0) as u64;
        let sizes: Vec<u64> = node.operands.iter().map(elements).collect();
        let zeros: Vec<bool> = node.operands.iter().map(|o| self.zeros[o.index()]).collect();
        let ep = (VALUE_AXES[EP], self.place.sizes[EP]);
        let all_on_ep = canonical(all[EP].clone(), node, self.global, ep);
        let on_ep: Vec<Layout> = produced.iter().map(|l| l[EP]).collect();
        let experts = self.experts_of_rank(node, &all_on_ep, &on_ep);
        let is_of_experts: Vec<bool> =
            chosen.results.iter().map(|lies| lies[EP].cut_dim().is_some()).collect();
        for (axis, all) in all.iter().enumerate() {
            let ranks = self.place.sizes[axis];
            let factors = canonical(all.clone(), node, self.global, (VALUE_AXES[axis], ranks));
            let from: Vec<Layout> = produced.iter().map(|l| l[axis]).collect();
            let shares_tokens = matches!(axis, DP | CP) || axis == TP && self.place.takes_tp;
            let of_tokens = experts.is_some() && shares_tokens && ranks > 1;
            let yields = chosen.results.iter().zip(&is_of_experts).map(|(lies, is_of_experts)| {
                match *is_of_experts && of_tokens {
                    true => Layout::Partial(Combiner::Sum),
                    false => lies[axis],
                }
            });
            let yields: Vec<Layout> = yields.collect();
            let choice = match experts {
                Some(at) if axis == EP => Choice::Cut(at),
                _ => {
                    let are_placed = axis == CP;
                    let operands =
                        Operands { layouts: &from, sizes: &sizes, zeros: &zeros, are_placed };
                    let can_be_cut = |factor: &Factor| self.can_be_cut(node, factor, axis);
                    let factors = (&factors[..], &can_be_cut as &dyn Fn(&Factor) -> bool);
                    choose(node, factors, &operands, &yields).ok_or_else(|| {
                        let name = &self.global.value(node.results[0]).name;
                        let axis = VALUE_AXES[axis];
                        format!("no way to compute `%{name}` as {yields:?} on {axis} from {from:?}")
                    })?
                }
            };
            if axis == TP && of_tokens && !matches!(choice, Choice::Cut(_)) {
                let name = &self.global.value(node.results[0]).name;
                return Err(format!("`%{name}` is of experts that ranks of tp share, not tokens"));
            }
            let (wanted, yielded) = choice.layouts(node, &factors);
            chosen.operands.iter_mut().zip(wanted).for_each(|(lies, own)| lies[axis] = own);
            chosen.results.iter_mut().zip(yielded).for_each(|(lies, own)| lies[axis] = own);
            chosen.choices.push(choice);
        }
        Ok(chosen)
    }

    /// Whether a factor leaves every rank along an axis a piece, and `dp` and `cp` cut no dim both:
    /// one counts samples, the other one their tokens.
    fn can_be_cut(&self, node: &Node, factor: &Factor, axis: usize) -> bool {
        let values = node.operands.iter().chain(&node.results);
        let layouts = factor.operands.iter().chain(&factor.results);
        values.zip(layouts).all(|(value, layout)| {
            let Layout::Cut { dim, unit } = *layout else { return true };
            let Ok(produced) = self.produced(*value) else { return false };
            let Ok(sizes) = self.sizes_outside(*value, produced, axis) else { return false };
            let other = match axis {
                DP => produced[CP].cut_dim(),
                CP => produced[DP].cut_dim(),
                _ => None,
            };
            let order = VALUE_AXES[axis].piece_order();
            order.shares(sizes[dim], unit, self.place.sizes[axis]).is_some() && other != Some(dim)
        })
    }

    /// The attributes that move with the cut, and by how many units; those along `cp` move with
    /// each segment.
    fn offsets(
        &self,
        node: &Node,
        factors: &[Vec<Factor>; 4],
        choices: &[Choice],
    ) -> Result<Vec<(Offset, i64)>, String> {
        let mut offsets = Vec::new();
        for (axis, choice) in choices.iter().enumerate() {
            let Choice::Cut(at) = choice else { continue };
            let factor = &factors[axis][*at];
            let is_of_segments = axis == CP || axis == TP && choices[CP] == *choice;
            if factor.offsets.is_empty() || is_of_segments {
                continue;
            }
            let name = &self.global.value(node.results[0]).name;
            if matches!(axis, DP | EP) {
                // Programs do not tell data-parallel ranks apart: the sample of a draw counts from
                // the key, which the runtime sets for each rank.
                let is_whole = |offset: &Offset| matches!(offset, Offset::Whole { .. });
                let is_known =
                    |offset: &Offset| is_whole(offset) || *offset == Offset::RandomStart(0);
                if self.place.sizes[axis] > 1 && !factor.offsets.iter().all(is_known) {
                    return Err(format!("`%{name}` counts along the batch"));
                }
                let wholes = factor.offsets_at(0, self.units(node, factor)?);
                offsets.extend(wholes.filter(|(offset, _)| is_whole(offset)));
                continue;
            }
            let units = self.units(node, factor)?;
            let shares = self.shares(name, units, 1, axis)?;
            offsets.extend(factor.offsets_at(shares[self.place.coordinates[axis]][0].start, units));
        }
        Ok(offsets)
    }

    /// How many units a factor has.
    fn units(&self, node: &Node, factor: &Factor) -> Result<usize, String> {
        let units = factor.units.as_constant().and_then(|u| usize::try_from(u).ok());
        let name = &self.global.value(node.results[0]).name;
        units.ok_or_else(|| format!("`%{name}` has open sizes"))
    }

    /// The op with local sizes and offsets.
    fn local_op(
        &mut self,
        node: &Node,
        sizes: &[usize],
        offsets: &[(Offset, i64)],
        operands: &[ValueId],
    ) -> Result<Op, String> {
        let mut op = node.op.clone();
        let dims: Vec<Dim> = sizes.iter().map(|size| Dim::from(*size)).collect();
        make_local(&mut op, &dims, offsets);
        if let Op::Call { function } = &mut op {
            *function = self.local_callee(function, offsets, operands)?;
        }
        Ok(op)
    }

    /// The composite for the local types, with attributes counted from the shard.
    fn local_callee(
        &mut self,
        callee: &str,
        offsets: &[(Offset, i64)],
        operands: &[ValueId],
    ) -> Result<String, String> {
        let kind = self.module.function(callee).map(|f| f.kind.clone());
        let Some(Kind::Composite { name, mut attributes }) = kind else {
            return Err(format!("`@{callee}` is no composite"));
        };
        for (offset, units) in offsets {
            match offset {
                Offset::Attribute { name, unit } => {
                    let before = attributes.entry(name.clone()).or_insert(0.0);
                    *before += (*units * *unit as i64) as f64;
                }
                Offset::Whole { name, unit } => {
                    let known = attributes.entry(name.clone()).or_insert(0.0);
                    if *known == 0.0 {
                        *known = (*units * *unit as i64) as f64;
                    }
                }
                Offset::Start | Offset::RandomStart(_) => {}
            }
        }
        Ok(self.builder.instance(&name, &attributes, operands))
    }
}

/// On which axis a value is resharded after which, from layouts to others, and how it lies there
/// then: from the inside outwards. What lies along `cp` changes while `tp` cuts the same dim
/// nowhere.
fn route(from: Layouts, to: Layouts) -> Vec<(usize, Layout)> {
    let dims = |axis: usize| [from[axis], to[axis]].into_iter().filter_map(Layout::cut_dim);
    let is_nested = dims(CP).any(|dim| dims(TP).any(|inside| inside == dim));
    let mut route = Vec::new();
    if from[CP] != to[CP] && is_nested {
        let is_cut = from[TP].cut_dim().is_some();
        route.extend(is_cut.then_some((TP, Layout::Replicated)));
        route.push((CP, to[CP]));
    }
    route.extend((0..VALUE_AXES.len()).rev().map(|axis| (axis, to[axis])));
    route
}

/// The elements of all pieces of a dim.
fn length(share: &[Piece]) -> usize {
    share.iter().map(|piece| piece.size).sum()
}
