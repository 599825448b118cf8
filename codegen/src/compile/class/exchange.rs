//! What happens to weights around a call: parameters that lie elsewhere than on the device are
//! fetched before it (ZeRO-Infinity, Rajbhandari et al. 2021), those that ranks share are gathered,
//! and gradients that they share are scattered after it (ZeRO 2 and 3, Rajbhandari et al. 2020).

use std::collections::{BTreeMap, BTreeSet};

use ir::DType;
use ir::plan::Place;
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
    /// Steps that begin to fetch the parameters of a call from where they lie.
    fetches: BTreeMap<Moment, Vec<Step>>,
    /// Steps that wait for what was fetched, and gather the parameters of a call.
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

    /// Appends what begins to fetch the parameters of a call.
    pub(super) fn fetch(&self, moment: Moment, steps: &mut Vec<Step>) {
        steps.extend(self.fetches.get(&moment).into_iter().flatten().cloned());
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
    /// Calls of its pass before it; none where parameters are not brought ahead of time.
    before: usize,
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
                        let weights = self.store.weights_of(unit.1);
                        let is_there = stays && self.keep_gathered(&weights, &needs);
                        if !is_there {
                            self.allocate_gathered(unit, &needs, &mut placed);
                        }
                        self.allocate_terms(unit, &needs);
                    }
                    if units.is_empty() && self.plan.offload.parameters != Place::Device {
                        let weights: Vec<usize> = needs.read.iter().copied().collect();
                        if !(stays && self.keep_gathered(&weights, &needs)) {
                            self.allocate_fetched(&needs);
                        }
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
        let [at_forward, at_backward] = moments;
        [
            Needs {
                moment: (at_forward, false),
                before: call,
                read: forward.filter_map(|at| weight(*at)).collect(),
                made: BTreeMap::new(),
            },
            Needs {
                moment: (at_backward, false),
                before: chunk.own.len() - 1 - call,
                read: read(&layer.halves.backward_params),
                made: made(false),
            },
            Needs { moment: (at_backward, true), before: 0, read: read(late), made: made(true) },
        ]
    }

    /// Keeps parameters that were brought for the moment before; whether they were.
    fn keep_gathered(&mut self, weights: &[usize], needs: &Needs) -> bool {
        let moment = needs.moment;
        let before = (moment.0 - 1, false);
        if !weights.iter().any(|weight| needs.read.contains(weight)) {
            return false;
        }
        let there = weights.iter().map(|weight| self.exchanges.param(before, *weight));
        let Some(buffers) = there.collect::<Option<Vec<BufferId>>>() else { return false };
        for (weight, buffer) in weights.iter().zip(buffers) {
            self.store.keep_gathered(buffer, moment.0);
            self.exchanges.params.insert((moment, *weight), buffer);
        }
        true
    }

    /// Calls before the one that reads parameters in which these are gathered, and in which they
    /// are fetched.
    pub(super) fn ahead(&self) -> [usize; 2] {
        let gathers = self.plan.zero.stage > 2 && self.gathers_ahead;
        [usize::from(gathers), usize::from(gathers) + 1]
    }

    /// Room for parameters of which this rank has all, and what fetches them from where they lie.
    fn allocate_fetched(&mut self, needs: &Needs) {
        let moment = needs.moment;
        let [_, ahead] = self.ahead();
        let span = (moment.0 - needs.before.min(ahead), moment.0);
        for (source, whole) in self.store.fetched(&needs.read, span) {
            for (weight, buffer) in whole.weights {
                self.exchanges.params.insert((moment, weight), buffer);
            }
            let fetch = Step::Move { from: source, to: whole.view };
            self.exchanges.fetches.entry(moment).or_default().push(fetch);
            let wait = Step::Await { buffer: whole.view };
            self.exchanges.gathers.entry(moment).or_default().push(wait);
        }
    }

    /// Room for the parameters of a unit that a call reads, and what gathers them.
    fn allocate_gathered(
        &mut self,
        (at, unit): (usize, &Unit),
        needs: &Needs,
        placed: &mut BTreeSet<usize>,
    ) {
        let Needs { moment, before, .. } = *needs;
        let Some(mut source) = unit.source else { return };
        let weights = self.store.weights_of(unit);
        if !weights.iter().any(|weight| needs.read.contains(weight)) {
            return;
        }
        let [gathered, fetched] = self.ahead().map(|ahead| moment.0 - before.min(ahead));
        let span = (gathered, moment.0);
        let whole = match placed.insert(at) {
            true => self.store.first_gathered(unit, span),
            false => self.store.whole(unit.all(), Passing::Gathered, span),
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
        if self.store.place(source) != Place::Device {
            let staged = self.store.staged(source, elements[0], (fetched, gathered));
            let fetch = Step::Move { from: source, to: staged };
            self.exchanges.fetches.entry(moment).or_default().push(fetch);
            steps.push(Step::Await { buffer: staged });
            source = staged;
        }
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
        let whole = self.store.whole(unit.all(), Passing::Term, span);
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
        let is_again = self.plan.microbatch_count > 1 || self.callers_here(unit) > 1;
        if is_again && ranks == 1 && dtype == exchanged {
            // No other rank has terms.
            add(self, [whole.view, bucket.grads], (dtype, bucket.piece), &mut made.later);
        } else if is_again {
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
