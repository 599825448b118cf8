//! Buckets of which ranks share gradients, and parameters too (ZeRO 2 and 3, Rajbhandari
//! et al. 2020).
//!
//! A unit is a bucket that the same calls read, on all stages. A call makes whole gradients of it,
//! which are scattered at once: each rank keeps a piece of their sum. Where ranks share parameters,
//! each keeps a piece, and a call gathers what it reads.

use std::collections::{BTreeMap, BTreeSet};

use ir::DType;
use ir::plan::{Offload, Place};
use ir::precision::Precision;
use ir::program::{BufferId, Contents, Member, STATE_BLOCK, ShardRole};
use serde::Serialize;

use super::{Bucket, Caller, DEVICE, Region, Shards, Store, WeightPlace, quantum, region_of};

/// A bucket of which ranks share gradients, and all weights that the same calls read.
#[derive(Clone, Debug)]
pub(crate) struct Unit {
    pub(crate) region: Region,
    /// The calls that read its weights.
    pub(crate) callers: Vec<Caller>,
    /// The stages that hold its weights.
    pub(crate) stages: Vec<usize>,
    /// Its weights, by number in [`Store::weights`].
    members: Vec<Member>,
    /// Elements of all, padded to pieces of equal length.
    pub(crate) elements: usize,
    /// What parameters are gathered from, where ranks share these.
    pub(crate) source: Option<BufferId>,
    /// The view of its parameters; where ranks share these, of those of the first call.
    pub(crate) params: BufferId,
    /// Of [`Store::buckets`]; none of what is not trained.
    pub(crate) bucket: Option<usize>,
}

/// What the weights of a unit have in common, and in which order units lie.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(crate) struct Key {
    region: (bool, bool, bool, bool, bool, bool, bool),
    callers: Vec<Caller>,
}

impl Key {
    fn of(place: &WeightPlace) -> Key {
        let Region { foreign, is_partial, is_cut, is_matrix, is_frozen, is_coded, is_expert } =
            region_of(place);
        let region = (is_frozen, is_expert, !is_matrix, is_coded, foreign, is_partial, is_cut);
        Key { region, callers: place.callers.clone() }
    }
}

impl Unit {
    /// Its weights, and the elements of all.
    pub(crate) fn all(&self) -> (&[Member], usize) {
        (&self.members, self.elements)
    }
}

/// What passes through the memory of a call.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Passing {
    /// Parameters.
    Gathered,
    /// Gradients.
    Term,
}

/// What a call holds of a unit while it runs, as whole tensors.
pub(crate) struct Whole {
    /// All of it.
    pub(crate) view: BufferId,
    /// By the entry's weight.
    pub(crate) weights: BTreeMap<usize, BufferId>,
}

/// All of units that matters to how they are reduced and updated: what their weights are, the
/// stages that hold them, and elements.
pub(crate) fn extents_of_units(
    weights: &[WeightPlace],
    precision: &Precision,
    shards: Shards,
) -> Vec<(impl Serialize + use<>, Vec<usize>, usize)> {
    let mut sorted = weights.to_vec();
    sorted.sort_by_key(|place| (Key::of(place), place.weight));
    let extent = |unit: &[WeightPlace]| {
        let elements = members(unit, 0, precision, shards).1;
        (Key::of(&unit[0]).region, unit[0].stages.clone(), elements)
    };
    sorted.chunk_by(|a, b| Key::of(a) == Key::of(b)).map(extent).collect()
}

/// The weights of a unit, the first of which has a number, and the elements of all: each is padded
/// to the alignment in all types, and the last so that pieces are.
fn members(
    unit: &[WeightPlace],
    number: usize,
    precision: &Precision,
    shards: Shards,
) -> (Vec<Member>, usize) {
    let quantum = quantum(precision, unit[0].is_coded);
    let (mut members, mut end) = (Vec::new(), 0);
    for (at, place) in unit.iter().enumerate() {
        members.push(Member { weight: number + at, first: end });
        let elements = place.ranges.iter().map(|r| r.1).product::<usize>();
        end += elements.next_multiple_of(quantum);
    }
    (members, end.next_multiple_of(quantum * shards.pieces(unit[0].experts.is_some())))
}

impl Store {
    /// Places of each unit the pieces of gradients and of what is updated, with `states` optimizer
    /// states, and parameters: whole, or their piece where `gathers` says that calls gather them.
    pub(crate) fn for_units(
        weights: Vec<WeightPlace>,
        (states, offload): (usize, Offload),
        precision: Precision,
        shards: Shards,
        gathers: bool,
    ) -> Store {
        let mut store = Store::empty(weights, precision, shards);
        store.offload = offload;
        store.weights.sort_by_key(|place| (Key::of(place), place.weight));
        let weights = store.weights.clone();
        let mut number = 0;
        for unit in weights.chunk_by(|a, b| Key::of(a) == Key::of(b)) {
            let (members, elements) = members(unit, number, &precision, shards);
            number += unit.len();
            let unit = Unit {
                region: region_of(&unit[0]),
                callers: unit[0].callers.clone(),
                stages: unit[0].stages.clone(),
                members,
                elements,
                source: None,
                params: BufferId(0),
                bucket: None,
            };
            store.place_unit(unit, gathers, states);
        }
        store
    }

    fn place_unit(&mut self, mut unit: Unit, gathers: bool, states: usize) {
        let gathers = gathers && !self.has_whole(&unit.region);
        unit.params = match gathers {
            true => self.whole(unit.all(), Passing::Gathered, (0, 0)).view,
            false => self.resident(&unit),
        };
        let Precision { parameters, master, .. } = self.precision;
        if gathers && (master.is_some() || unit.region.is_frozen) {
            unit.source = Some(self.piece(&unit, "params", ShardRole::Param, parameters));
        }
        if !unit.region.is_frozen {
            let bucket = self.place_bucket(&unit, states);
            if gathers {
                unit.source.get_or_insert(bucket.master);
            }
            unit.bucket = Some(self.buckets.len());
            self.buckets.push(bucket);
        }
        self.units.push(unit);
    }

    /// Whether this rank has all of what others would gather, beside the masters: experts of which
    /// no other rank has copies.
    fn has_whole(&self, region: &Region) -> bool {
        let is_apart = self.precision.master.is_some() || region.is_frozen;
        let is_here = self.offload.parameters == Place::Device;
        is_apart && is_here && self.shards.pieces(region.is_expert) == 1
    }

    /// The parameters of a unit, whole, and the view of all.
    fn resident(&mut self, unit: &Unit) -> BufferId {
        let (start, dtype) = (self.ends[DEVICE], self.precision.parameters);
        for member in &unit.members {
            let place = &self.weights[member.weight];
            let (name, weight) = (format!("params.{}", place.name), place.weight);
            let sizes = place.ranges.iter().map(|r| r.1).collect();
            self.ends[DEVICE] = start + member.first as u64 * dtype.size();
            let buffer = self.persistent(&name, Contents::Param(member.weight), dtype, sizes);
            self.params.insert(weight, buffer);
        }
        self.ends[DEVICE] = start + unit.elements as u64 * dtype.size();
        self.view("params", dtype, unit.elements, start)
    }

    /// The piece that this rank keeps of something of a unit.
    fn piece(&mut self, unit: &Unit, name: &str, role: ShardRole, dtype: DType) -> BufferId {
        let per = if matches!(role, ShardRole::Scale(_)) { STATE_BLOCK } else { 1 };
        let elements = unit.elements / self.shards.pieces(unit.region.is_expert) / per;
        let name = format!("{name}.shard{}", self.units.len());
        let contents = Contents::Shard { role, bucket: unit.params };
        self.persistent(&name, contents, dtype, vec![elements])
    }

    /// The pieces of what the update of a unit reads and writes.
    fn place_bucket(&mut self, unit: &Unit, states: usize) -> Bucket {
        let (precision, region) = (self.precision, unit.region);
        let master = self.piece(unit, "master", ShardRole::Master, precision.updated());
        let grads = self.piece(unit, "grads", ShardRole::Grad, precision.gradients);
        let of_states = precision.state(region.is_coded);
        let mut state = |index: usize| {
            let name = format!("state{index}");
            self.piece(unit, &name, ShardRole::State(index), of_states)
        };
        let states: Vec<BufferId> = (0..states).map(&mut state).collect();
        let mut scale = |index: usize| {
            let name = format!("scale{index}");
            self.piece(unit, &name, ShardRole::Scale(index), precision.accumulate)
        };
        let coded = if region.is_coded { states.len() } else { 0 };
        let scales = (0..coded).map(&mut scale).collect();
        let piece = unit.elements / self.shards.pieces(region.is_expert);
        Bucket { region, piece, params: unit.params, grads, master, states, scales }
    }

    /// Room for weights side by side as whole tensors while a call runs.
    pub(crate) fn whole(
        &mut self,
        (members, elements): (&[Member], usize),
        passing: Passing,
        span: (usize, usize),
    ) -> Whole {
        let Precision { parameters, gradients, .. } = self.precision;
        let (name, dtype) = match passing {
            Passing::Gathered => ("gathered", parameters),
            Passing::Term => ("terms", gradients),
        };
        let view = self.transient(name, Contents::View, dtype, vec![elements], span);
        let mut weights = BTreeMap::new();
        for Member { weight, first } in members.iter().copied() {
            let place = &self.weights[weight];
            let (name, of_entry) = (format!("{name}.{}", place.name), place.weight);
            let sizes: Vec<usize> = place.ranges.iter().map(|r| r.1).collect();
            let contents = match passing {
                Passing::Gathered => Contents::Gathered { weight, bucket: view },
                Passing::Term => Contents::Term { weight, bucket: view },
            };
            let buffer = self.part(&name, contents, dtype, sizes, (view, first));
            weights.insert(of_entry, buffer);
        }
        Whole { view, weights }
    }

    /// Room for some of the entry's weights while a call runs, and the views of where they lie:
    /// one of all that lie side by side.
    pub(crate) fn fetched(
        &mut self,
        wanted: &BTreeSet<usize>,
        span: (usize, usize),
    ) -> Vec<(BufferId, Whole)> {
        let own = self.weights.iter().enumerate();
        let own = own.filter(|(_, place)| wanted.contains(&place.weight)).map(|(at, _)| at);
        let numbers: Vec<usize> = own.collect();
        let mut fetched = Vec::new();
        for run in numbers.chunk_by(|a, b| a + 1 == *b) {
            let dtype = self.precision.parameters;
            let buffer =
                |at: usize| &self.buffers[self.params[&self.weights[at].weight].0 as usize];
            let (start, last) = (buffer(run[0]).offset, buffer(run[run.len() - 1]));
            let element = |offset: u64| ((offset - start) / dtype.size()) as usize;
            let elements = element(last.offset + last.bytes);
            let member = |at: &usize| Member { weight: *at, first: element(buffer(*at).offset) };
            let members: Vec<Member> = run.iter().map(member).collect();
            let source = self.run_in(self.offload.parameters, "params", dtype, (start, elements));
            let whole = self.whole((&members, elements), Passing::Gathered, span);
            fetched.push((source, whole));
        }
        fetched
    }

    /// Keeps the unit in which a gathered parameter is until a time.
    pub(crate) fn keep_gathered(&mut self, parameter: BufferId, until: usize) {
        let contents = &self.buffers[parameter.0 as usize].contents;
        let unit = contents.passing().map(|(_, bucket)| bucket.0);
        if let Some((_, last)) = unit.and_then(|unit| self.spans.get_mut(&unit)) {
            *last = until.max(*last);
        }
    }

    /// The entry's weights in a unit.
    pub(crate) fn weights_of(&self, unit: &Unit) -> Vec<usize> {
        unit.members.iter().map(|member| self.weights[member.weight].weight).collect()
    }

    /// The unit of a bucket; none where ranks hold whole gradients.
    pub(crate) fn unit_of(&self, bucket: &Bucket) -> Option<&Unit> {
        self.units.iter().find(|unit| unit.params == bucket.params)
    }

    /// The elements of all weights in a unit, without what pads them.
    pub(crate) fn elements_of(&self, unit: &Unit) -> usize {
        let elements = |member: &Member| -> usize {
            self.weights[member.weight].ranges.iter().map(|r| r.1).product()
        };
        unit.members.iter().map(elements).sum()
    }

    /// The room for the gathered parameters of a unit that was made with it, at a time.
    pub(crate) fn first_gathered(&mut self, unit: &Unit, span: (usize, usize)) -> Whole {
        self.spans.insert(unit.params.0, span);
        let of = |(at, buffer): (usize, &ir::program::Buffer)| {
            let (weight, bucket) = buffer.contents.passing()?;
            let weight = self.weights[weight].weight;
            (bucket == unit.params).then_some((weight, BufferId(at as u32)))
        };
        let weights = self.buffers.iter().enumerate().filter_map(of).collect();
        Whole { view: unit.params, weights }
    }
}
