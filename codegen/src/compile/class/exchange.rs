//! What ranks with the same weights exchange around a call: parameters that they share are gathered
//! before it, gradients that they share are scattered after it (ZeRO 2 and 3, Rajbhandari et al.
//! 2020).

use std::collections::{BTreeMap, BTreeSet};

use ir::DType;
use ir::precision::Precision;
use ir::program::{Contents, Exchange, ShardRole, Step};
use kernels::Kernel;
use kernels::rows::{Access, Instr, Output, RowInput, Rows};

use super::chunk::Chunk;
use super::launch::{exchange_pieces, fill, launch};
use super::{Class, shard_group};
use crate::calls::Operand;
use crate::specialise::Source;
use crate::store::{BufferId, Passing, Unit};
use crate::weights::shards;

/// A call of a micro-batch's work: its moment on the clock, and whether it makes late gradients.
pub(super) type Moment = (usize, bool);

/// What is exchanged around the calls of a class. Micro-batches do so in the same buffers.
#[derive(Default)]
pub(super) struct Exchanges {
    /// Steps that gather the parameters of a call.
    gathers: BTreeMap<Moment, Vec<Step>>,
    /// Steps that clear gradients which a call does not write, or adds to twice.
    clears: BTreeMap<Moment, Vec<Step>>,
    /// What is done with the gradients of a call.
    scatters: BTreeMap<Moment, Vec<Scatter>>,
    /// Where a call finds a weight, by the entry's number.
    params: BTreeMap<(Moment, usize), BufferId>,
    /// Where a call leaves its gradient of a weight.
    terms: BTreeMap<(Moment, usize), BufferId>,
}

/// How the gradients of a unit are added up: the first of a step is the sum, later ones are added.
struct Scatter {
    unit: usize,
    first: Vec<Step>,
    later: Vec<Step>,
}

impl Exchanges {
    /// Where a call finds a weight that its ranks share.
    pub(super) fn param(&self, moment: Moment, weight: usize) -> Option<BufferId> {
        self.params.get(&(moment, weight)).copied()
    }

    /// Where a call leaves a gradient that its ranks share.
    pub(super) fn term(&self, moment: Moment, weight: usize) -> Option<BufferId> {
        self.terms.get(&(moment, weight)).copied()
    }

    /// Appends what gathers the parameters of a call.
    pub(super) fn gather(&self, moment: Moment, steps: &mut Vec<Step>) {
        steps.extend(self.gathers.get(&moment).into_iter().flatten().cloned());
    }

    /// Appends what comes right before a call.
    pub(super) fn clear(&self, moment: Moment, steps: &mut Vec<Step>) {
        steps.extend(self.clears.get(&moment).into_iter().flatten().cloned());
    }

    /// Appends what comes after a call, where some units have sums already.
    pub(super) fn scatter(
        &self,
        moment: Moment,
        summed: &mut BTreeSet<usize>,
        steps: &mut Vec<Step>,
    ) {
        for scatter in self.scatters.get(&moment).into_iter().flatten() {
            let is_first = summed.insert(scatter.unit);
            let made = if is_first { &scatter.first } else { &scatter.later };
            steps.extend(made.iter().cloned());
        }
    }
}

/// What a call reads and makes of weights at a moment.
struct Needs {
    moment: Moment,
    /// When gathered parameters are there.
    span: (usize, usize),
    read: BTreeSet<usize>,
    /// The weights of which it makes gradients, with how often.
    made: BTreeMap<usize, usize>,
}

impl Class<'_> {
    /// Room for what calls exchange, and the steps that do.
    pub(super) fn allocate_exchanges(&mut self) {
        let units = std::mem::take(&mut self.store.units);
        let mut of_call: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (at, unit) in units.iter().enumerate() {
            for caller in &unit.callers {
                of_call.entry(caller.call).or_default().push(at);
            }
        }
        let mut placed = BTreeSet::new();
        let is_alone = self.is_alone();
        for chunk in 0..self.chunks.len() {
            for call in 0..self.chunks[chunk].own.len() {
                let entry = self.chunks[chunk].first + call;
                // The backward pass of the last call follows its forward pass.
                let stays = is_alone && call + 1 == self.chunks[chunk].own.len();
                for needs in self.needs(&self.chunks[chunk], call) {
                    for at in of_call.get(&entry).into_iter().flatten() {
                        let unit = (*at, &units[*at]);
                        let is_there = stays && self.keep_gathered(unit.1, &needs);
                        if !is_there {
                            self.allocate_gathered(unit, &needs, &mut placed);
                        }
                        self.allocate_terms(unit, &needs);
                    }
                }
            }
        }
        self.store.units = units;
    }

    /// What a call reads and makes of weights: forward, backward, and late.
    fn needs(&self, chunk: &Chunk<'_>, call: usize) -> [Needs; 3] {
        let (own, layer) = (&chunk.own[call], chunk.layer(call));
        let weight = |param: usize| match own.operands.get(param) {
            Some(Operand::Weight(weight)) => Some(*weight),
            _ => None,
        };
        let evaluated = chunk.evaluation.as_ref().and_then(|e| e.layer(call));
        let evaluated = evaluated.into_iter().flat_map(|layer| &layer.params);
        let forward = layer.halves.forward_params.iter().chain(evaluated);
        let read = |sources: &[Source]| -> BTreeSet<usize> {
            let param =
                |source: &Source| if let Source::Param(at) = source { Some(*at) } else { None };
            sources.iter().filter_map(param).filter_map(weight).collect()
        };
        let made = |is_late: bool| {
            let mut made = BTreeMap::new();
            let params = layer.differentiable.iter().zip(&layer.is_late);
            for (param, _) in params.filter(|(_, late)| **late == is_late) {
                if let Some(weight) = weight(*param) {
                    *made.entry(weight).or_default() += 1;
                }
            }
            made
        };
        let late = layer.halves.late.as_ref().map_or(&[][..], |late| &late.params);
        let moments =
            [self.clock.forward(chunk.before + call), self.clock.backward(chunk.before + call)];
        let ahead =
            |at: usize, is_first: bool| (at - usize::from(!is_first && self.gathers_ahead), at);
        let last = call + 1 == chunk.own.len();
        let [at_forward, at_backward] = moments;
        [
            Needs {
                moment: (at_forward, false),
                span: ahead(at_forward, call == 0),
                read: forward.filter_map(|at| weight(*at)).collect(),
                made: BTreeMap::new(),
            },
            Needs {
                moment: (at_backward, false),
                span: ahead(at_backward, last),
                read: read(&layer.halves.backward_params),
                made: made(false),
            },
            Needs {
                moment: (at_backward, true),
                span: (at_backward, at_backward),
                read: read(late),
                made: made(true),
            },
        ]
    }

    /// Keeps the parameters of a unit that were gathered for the moment before; whether they were.
    fn keep_gathered(&mut self, unit: &Unit, needs: &Needs) -> bool {
        let moment = needs.moment;
        let before = (moment.0 - 1, false);
        let weights = self.store.weights_of(unit);
        if !weights.iter().any(|weight| needs.read.contains(weight)) {
            return false;
        }
        let there = weights.iter().map(|weight| self.exchanges.param(before, *weight));
        let Some(buffers) = there.collect::<Option<Vec<BufferId>>>() else { return false };
        for (weight, buffer) in weights.into_iter().zip(buffers) {
            self.store.keep_gathered(buffer, moment.0);
            self.exchanges.params.insert((moment, weight), buffer);
        }
        true
    }

    /// Room for the parameters of a unit that a call reads, and what gathers them.
    fn allocate_gathered(
        &mut self,
        (at, unit): (usize, &Unit),
        needs: &Needs,
        placed: &mut BTreeSet<usize>,
    ) {
        let Needs { moment, span, .. } = *needs;
        let Some(source) = unit.source else { return };
        let weights = self.store.weights_of(unit);
        if !weights.iter().any(|weight| needs.read.contains(weight)) {
            return;
        }
        let whole = match placed.insert(at) {
            true => self.store.first_gathered(unit, span),
            false => self.store.whole(unit, Passing::Gathered, span),
        };
        for (weight, buffer) in whole.weights {
            self.exchanges.params.insert((moment, weight), buffer);
        }
        let is_expert = unit.region.is_expert;
        let dtype = self.plan.precision.parameters;
        let ranks = shards(self.plan).pieces(is_expert);
        let counts = vec![unit.elements / ranks; ranks];
        let exchange = (Exchange::gather_of(counts), shard_group(self.plan, is_expert));
        let mut steps = Vec::new();
        let elements = [unit.elements / ranks, unit.elements];
        exchange_pieces(
            self,
            ("all-gather", [dtype; 2]),
            exchange,
            [source, whole.view],
            elements,
            &mut steps,
        );
        self.exchanges.gathers.entry(moment).or_default().extend(steps);
    }

    /// The calls of this class that read the weights of a unit.
    fn callers_here(&self, unit: &Unit) -> usize {
        let is_here = |call: usize| {
            self.chunks
                .iter()
                .any(|chunk| (chunk.first..chunk.first + chunk.own.len()).contains(&call))
        };
        unit.callers.iter().filter(|caller| is_here(caller.call)).count()
    }

    /// Room for the gradients of a unit that a call makes, and what adds them up.
    fn allocate_terms(&mut self, (at, unit): (usize, &Unit), needs: &Needs) {
        let moment = needs.moment;
        let Some(bucket) = unit.bucket.map(|at| self.store.buckets[at].clone()) else { return };
        let weights = self.store.weights_of(unit);
        let made: Vec<usize> = weights.iter().filter_map(|w| needs.made.get(w)).copied().collect();
        if made.is_empty() {
            return;
        }
        let span = (moment.0, moment.0);
        let Precision { gradients: dtype, reduce: exchanged, .. } = self.plan.precision;
        let is_expert = unit.region.is_expert;
        let ranks = shards(self.plan).pieces(is_expert);
        let whole = self.store.whole(unit, Passing::Term, span);
        for (weight, buffer) in whole.weights {
            self.exchanges.terms.insert((moment, weight), buffer);
        }
        let mut clears = Vec::new();
        // What lies between weights is summed with them.
        let is_whole = made.len() == weights.len() && self.store.elements_of(unit) == unit.elements;
        if !is_whole || made.iter().any(|times| *times > 1) {
            fill(self, whole.view, (dtype, unit.elements), 0.0, &mut clears);
        }
        self.exchanges.clears.entry(moment).or_default().extend(clears);
        let elements = [unit.elements, bucket.piece];
        let counts = vec![bucket.piece; ranks];
        let scatter = |class: &mut Self, to: BufferId, steps: &mut Vec<Step>| {
            let exchange = Exchange::scatter_of(counts.clone());
            let exchange = (exchange, shard_group(class.plan, is_expert));
            let buffers = [whole.view, to];
            let types = ("reduce-scatter", [dtype, exchanged]);
            exchange_pieces(class, types, exchange, buffers, elements, steps);
        };
        let mut made = Scatter { unit: at, first: Vec::new(), later: Vec::new() };
        scatter(self, bucket.grads, &mut made.first);
        if self.plan.microbatch_count > 1 || self.callers_here(unit) > 1 {
            let contents = Contents::Shard { role: ShardRole::Term, bucket: bucket.params };
            let sizes = vec![bucket.piece];
            let term = self.store.transient("term.shard", contents, dtype, sizes, span);
            scatter(self, term, &mut made.later);
            add(self, [term, bucket.grads], (dtype, bucket.piece), &mut made.later);
        }
        self.exchanges.scatters.entry(moment).or_default().push(made);
    }
}

/// Appends the addition of one buffer to another.
fn add(
    class: &mut Class<'_>,
    [from, to]: [BufferId; 2],
    (dtype, elements): (DType, usize),
    steps: &mut Vec<Step>,
) {
    let access = Access::full(1, elements);
    let rows = Rows {
        rows: 1,
        cols: elements,
        dtype: class.sums(),
        inputs: vec![RowInput { dtype, access: access.clone() }],
        instrs: vec![Instr::Load { input: 0 }],
        outputs: vec![Output::Store { value: 0, access, dtype, accumulate: true }],
    };
    launch(class, "add", Kernel::Rows(rows), &[from], &[to], steps);
}
