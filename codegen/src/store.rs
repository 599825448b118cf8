//! The buffers of one class of ranks, as they are collected and then placed.

mod units;

use std::collections::BTreeMap;

use ir::DType;
use ir::plan::{Offload, Place};
use ir::precision::Precision;
pub(crate) use ir::program::BufferId;
use ir::program::{
    ALIGNMENT, Buffer, Contents, Entry, Experts, Program, Routine, STATE_BLOCK, ShardRole, Step,
    WeightShard, aligned,
};
use serde::Serialize;

use crate::arena::{Lifetime, Packing, pack};
pub(crate) use units::{Passing, Unit, extents_of_units};

/// The device among memory spaces.
const DEVICE: usize = Place::Device as usize;

/// A weight as a class holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WeightPlace {
    /// The entry's weight.
    pub(crate) weight: usize,
    /// Its name.
    pub(crate) name: String,
    /// Its sizes.
    pub(crate) global: Vec<usize>,
    /// For each dim, the first element held and the number held.
    pub(crate) ranges: Vec<(usize, usize)>,
    /// How data-parallel ranks share it by experts, if they do.
    pub(crate) experts: Option<Experts>,
    /// Whether tensor-parallel ranks hold different parts.
    pub(crate) is_cut: bool,
    /// Whether its gradient is to be summed over tensor-parallel ranks.
    pub(crate) is_partial: bool,
    /// Whether products or look-ups read it: whether it is no bias and no weight of a norm.
    pub(crate) is_matrix: bool,
    /// Whether it is not trained: it has no gradient, no master and no state.
    pub(crate) is_frozen: bool,
    /// Whether its states have 8 bits, and a scale for each block.
    pub(crate) is_coded: bool,
    /// The stages that hold it.
    pub(crate) stages: Vec<usize>,
    /// The calls that read it, where ranks share gradients.
    pub(crate) callers: Vec<Caller>,
    /// Whether this stage is the first of them.
    pub(crate) owned: bool,
}

/// The pieces into which the optimizer's part of weights is split, each on its own of the ranks
/// that hold the same weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Shards {
    /// Of weights that all ranks along `dp` and `cp` hold.
    pub(crate) whole: usize,
    /// Of weights that some of these share by experts.
    pub(crate) experts: usize,
}

impl Shards {
    /// No pieces.
    pub(crate) const ONE: Shards = Shards { whole: 1, experts: 1 };

    /// Those of weights that ranks share by experts, or of others.
    pub(crate) fn pieces(self, is_expert: bool) -> usize {
        if is_expert { self.experts } else { self.whole }
    }

    /// Whether every rank updates all of its weights.
    pub(crate) fn are_one(self) -> bool {
        self.whole == 1
    }
}

/// A call that reads a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(crate) struct Caller {
    /// Its number among the calls of the entry.
    pub(crate) call: usize,
    /// Whether it makes the gradient after those of activations.
    pub(crate) is_late: bool,
}

/// Weights that lie side by side because they are reduced, counted and updated alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Region {
    /// Copies of weights that an earlier stage counts.
    pub(crate) foreign: bool,
    /// See [`WeightPlace::is_partial`].
    pub(crate) is_partial: bool,
    /// See [`WeightPlace::is_cut`].
    pub(crate) is_cut: bool,
    /// See [`WeightPlace::is_matrix`].
    pub(crate) is_matrix: bool,
    /// See [`WeightPlace::is_frozen`].
    pub(crate) is_frozen: bool,
    /// See [`WeightPlace::is_coded`].
    pub(crate) is_coded: bool,
    /// Whether data-parallel ranks share them by experts.
    pub(crate) is_expert: bool,
}

impl Region {
    /// Regions lie in this order, which puts those that are treated alike side by side, whatever
    /// the mesh: matrices are updated by one launch and everything else by one, and what a rank
    /// counts in the norm is one run in the middle of both. What is shared by experts comes after
    /// them, and what is frozen last, so that the others have the same places in the blocks of all
    /// roles.
    fn order(self) -> RegionOrder {
        let from_outside = match self {
            Region { foreign: true, .. } => 0,
            Region { is_partial: true, .. } => 1,
            Region { is_cut: false, .. } => 2,
            Region { is_cut: true, .. } => 3,
        };
        let place = if self.is_matrix { from_outside } else { 3 - from_outside };
        let (is_frozen, is_expert) = (self.is_frozen, self.is_expert);
        (is_frozen, is_expert, !self.is_matrix, self.is_coded, place, self.is_partial, self.is_cut)
    }

    /// Neighbours that have this in common are one bucket: they are updated with the same
    /// hyper-parameters, and a rank counts all of them in the norm or none. It is the same on all
    /// tensor-parallel ranks. None for what is not trained.
    fn bucket(self) -> Option<(bool, bool, bool, bool, bool)> {
        let Region { is_matrix, foreign, is_cut, is_coded, is_expert, .. } = self;
        (!self.is_frozen).then_some((is_expert, is_matrix, is_coded, foreign, is_cut))
    }
}

/// Where a region lies: offsets of parameters, masters, gradients, optimizer states of its weights
/// and the scales of these.
#[derive(Clone, Debug)]
pub(crate) struct RegionPlace {
    pub(crate) region: Region,
    pub(crate) elements: usize,
    pub(crate) params: u64,
    pub(crate) masters: Option<u64>,
    pub(crate) grads: u64,
    pub(crate) states: Vec<u64>,
    pub(crate) scales: Vec<u64>,
}

/// Weights side by side of which each rank that holds them updates one piece.
#[derive(Clone, Debug)]
pub(crate) struct Bucket {
    pub(crate) region: Region,
    /// Elements of one piece.
    pub(crate) piece: usize,
    /// The view of the whole bucket's parameters; where calls gather them, of those of one call.
    pub(crate) params: BufferId,
    /// The view of the whole bucket's gradients; where ranks share these, the piece of their sum.
    pub(crate) grads: BufferId,
    /// The piece of what is updated, of each optimizer state, and of the scales of these.
    pub(crate) master: BufferId,
    pub(crate) states: Vec<BufferId>,
    pub(crate) scales: Vec<BufferId>,
}

pub(crate) struct Store {
    pub(crate) weights: Vec<WeightPlace>,
    regions: Vec<RegionPlace>,
    /// Empty where every rank updates all of its weights.
    pub(crate) buckets: Vec<Bucket>,
    /// Empty where ranks hold whole gradients.
    pub(crate) units: Vec<Unit>,
    /// Buffers within transient ones: where each begins there.
    within: BTreeMap<u32, (u32, u64)>,
    /// The pieces of buckets.
    shards: Shards,
    pub(crate) precision: Precision,
    buffers: Vec<Buffer>,
    /// Views of what persists, by memory space, first byte and elements, in their order.
    runs: BTreeMap<(Place, u64, usize), Vec<BufferId>>,
    /// How many buffers these are of.
    runs_noted: usize,
    /// For each transient buffer, when it is live.
    spans: BTreeMap<u32, (usize, usize)>,
    routines: Vec<Routine>,
    /// Where parameters, and states of the optimizer with masters, lie.
    offload: Offload,
    /// The memory spaces of buffers that are not on the device.
    away: BTreeMap<u32, Place>,
    /// By memory space: bytes of what persists.
    ends: [u64; 3],
    params: BTreeMap<usize, BufferId>,
    grads: BTreeMap<usize, BufferId>,
    all_grads: Option<(BufferId, usize)>,
    stats: Vec<BufferId>,
    constants: [Option<BufferId>; 2],
    update_frame: Option<BufferId>,
}

impl Store {
    /// Places parameters region by region.
    pub(crate) fn new(weights: Vec<WeightPlace>, precision: Precision) -> Store {
        let mut store = Store::empty(weights, precision, Shards::ONE);
        store.block("params", precision.parameters, Contents::Param);
        store
    }

    /// Places parameters region by region, and of those that are not frozen masters, gradients and
    /// that many optimizer `states`: masters and states whole, or of each bucket one of `shards`
    /// pieces.
    pub(crate) fn for_training(
        weights: Vec<WeightPlace>,
        (states, offload): (usize, Offload),
        precision: Precision,
        shards: Shards,
    ) -> Store {
        let mut store = Store::empty(weights, precision, shards);
        store.offload = offload;
        let Precision { parameters, gradients, master, .. } = precision;
        let params = store.block("params", parameters, Contents::Param);
        let is_whole = shards.are_one();
        let masters = master.filter(|_| is_whole);
        let masters = masters.map(|dtype| store.block("master", dtype, Contents::Master));
        let from = store.ends[DEVICE];
        let grads = store.block("grads", gradients, Contents::Grad);
        let elements = ((store.ends[DEVICE] - from) / gradients.size()) as usize;
        let all = store.view("grads", gradients, elements, from);
        store.all_grads = Some((all, elements));
        let blocks: Vec<_> =
            (0..states).filter(|_| is_whole).map(|index| store.state_blocks(index)).collect();
        let trained = params.into_iter().filter(|(region, ..)| !region.is_frozen);
        for (at, (region, elements, params)) in trained.enumerate() {
            let of_region = |there: &BTreeMap<_, u64>| there.get(&region.order()).copied();
            let states = blocks.iter().filter_map(|[states, _]| of_region(states)).collect();
            let scales = blocks.iter().filter_map(|[_, scales]| of_region(scales)).collect();
            let (grads, masters) = (grads[at].2, masters.as_ref().map(|block| block[at].2));
            let place = RegionPlace { region, elements, params, masters, grads, states, scales };
            store.regions.push(place);
        }
        if !is_whole {
            store.split_buckets(states);
        }
        store
    }

    /// Places a state of all weights: first those without scales, then those with them, then these.
    /// By the order of regions, where each begins.
    fn state_blocks(&mut self, index: usize) -> [BTreeMap<RegionOrder, u64>; 2] {
        let precision = self.precision;
        let starts = |block: Vec<(Region, usize, u64)>| {
            block.into_iter().map(|(region, _, start)| (region.order(), start)).collect()
        };
        let state = |weight| Contents::State { weight, index };
        let [plain, coded] = [false, true].map(|is_coded| {
            let has = |place: &WeightPlace| !place.is_frozen && place.is_coded == is_coded;
            self.block_of("state", (precision.state(is_coded), 1), &has, state)
        });
        let scale = |weight| Contents::Scale { weight, index };
        let of_blocks = (precision.accumulate, STATE_BLOCK);
        let scales = self.block_of("scale", of_blocks, &|place| place.is_coded, scale);
        let mut states: BTreeMap<RegionOrder, u64> = starts(plain);
        states.extend(starts(coded));
        [states, starts(scales)]
    }

    /// Gives each bucket its views, and its piece of what is updated and of each state.
    fn split_buckets(&mut self, states: usize) {
        let precision = self.precision;
        for (at, run) in self.runs(Region::bucket).into_iter().enumerate() {
            let RegionPlace { region, elements, params, grads, .. } = run;
            let piece = elements / self.shards.pieces(region.is_expert);
            let params = self.view("params", precision.parameters, elements, params);
            let grads = self.view("grads", precision.gradients, elements, grads);
            let mut shard = |name: String, role, dtype, elements| {
                let contents = Contents::Shard { role, bucket: params };
                self.persistent(&name, contents, dtype, vec![elements])
            };
            let name = format!("master.shard{at}");
            let master = shard(name, ShardRole::Master, precision.updated(), piece);
            let mut of_states = Vec::new();
            let mut scales = Vec::new();
            for index in 0..states {
                let (name, dtype) =
                    (format!("state{index}.shard{at}"), precision.state(region.is_coded));
                of_states.push(shard(name, ShardRole::State(index), dtype, piece));
            }
            for index in (0..states).filter(|_| region.is_coded) {
                let (name, dtype) = (format!("scale{index}.shard{at}"), precision.accumulate);
                scales.push(shard(name, ShardRole::Scale(index), dtype, piece / STATE_BLOCK));
            }
            let states = of_states;
            self.buckets.push(Bucket { region, piece, params, grads, master, states, scales });
        }
    }

    fn empty(weights: Vec<WeightPlace>, precision: Precision, shards: Shards) -> Store {
        let mut store = Store {
            weights,
            regions: Vec::new(),
            buckets: Vec::new(),
            units: Vec::new(),
            within: BTreeMap::new(),
            runs: BTreeMap::new(),
            runs_noted: 0,
            shards,
            precision,
            buffers: Vec::new(),
            spans: BTreeMap::new(),
            routines: Vec::new(),
            offload: Offload::default(),
            away: BTreeMap::new(),
            ends: [0; 3],
            params: BTreeMap::new(),
            grads: BTreeMap::new(),
            all_grads: None,
            stats: Vec::new(),
            constants: [None; 2],
            update_frame: None,
        };
        store.weights.sort_by_key(|w| (region_of(w).order(), w.weight));
        store
    }

    /// One buffer per weight that has this role; the elements of each region, and where it begins.
    /// The elements of a weight have the same place in the blocks of all roles that it has.
    fn block(
        &mut self,
        kind: &str,
        dtype: DType,
        contents: impl Fn(usize) -> Contents,
    ) -> Vec<(Region, usize, u64)> {
        let is_param = matches!(contents(0), Contents::Param(_));
        self.block_of(kind, (dtype, 1), &|place| is_param || !place.is_frozen, contents)
    }

    /// A block of the weights that `has` names, with one number for `per` elements.
    fn block_of(
        &mut self,
        kind: &str,
        (dtype, per): (DType, usize),
        has: &dyn Fn(&WeightPlace) -> bool,
        contents: impl Fn(usize) -> Contents,
    ) -> Vec<(Region, usize, u64)> {
        let at = self.place_of(&contents(0)) as usize;
        // A bucket begins here, and ends where its pieces are equally long.
        let mut bucket_start = self.ends[at];
        let mut regions: Vec<(Region, u64, u64)> = Vec::new();
        let weights = std::mem::take(&mut self.weights);
        for (index, place) in weights.iter().enumerate() {
            if !has(place) {
                continue;
            }
            let start = self.ends[at];
            let quantum = quantum(&self.precision, place.is_coded) / per;
            let mut sizes: Vec<usize> = place.ranges.iter().map(|r| r.1).collect();
            if let Some(last) = sizes.last_mut() {
                *last /= per;
            }
            let padded = sizes.iter().product::<usize>().next_multiple_of(quantum);
            let name = format!("{kind}.{}", place.name);
            let buffer = self.persistent(&name, contents(index), dtype, sizes);
            self.ends[at] = start + padded as u64 * dtype.size();
            let bucket = region_of(place).bucket();
            let next = weights.get(index + 1).map(|next| region_of(next).bucket());
            if bucket.is_some() && next != Some(bucket) {
                let pieces = self.shards.pieces(place.experts.is_some());
                let of_pieces = (quantum * pieces) as u64 * dtype.size();
                let bytes = self.ends[at] - bucket_start;
                self.ends[at] = bucket_start + bytes.next_multiple_of(of_pieces);
                bucket_start = self.ends[at];
            }
            let made = &self.buffers[buffer.0 as usize].contents;
            if matches!(made, Contents::Param(_)) {
                self.params.insert(place.weight, buffer);
            } else if matches!(made, Contents::Grad(_)) {
                self.grads.insert(place.weight, buffer);
            }
            match regions.last_mut() {
                Some((region, _, end)) if *region == region_of(place) => *end = self.ends[at],
                _ => regions.push((region_of(place), start, self.ends[at])),
            }
        }
        self.weights = weights;
        let place = |(region, start, end): (Region, u64, u64)| {
            (region, ((end - start) / dtype.size()) as usize, start)
        };
        regions.into_iter().map(place).collect()
    }

    /// The longest runs of neighbouring regions that have the same key, each as one region; those
    /// without a key are left out. A run has the properties of its first region.
    pub(crate) fn runs<K: PartialEq>(&self, key: impl Fn(Region) -> Option<K>) -> Vec<RegionPlace> {
        let mut runs: Vec<(Option<K>, RegionPlace)> = Vec::new();
        for place in &self.regions {
            let key = key(place.region);
            match runs.last_mut() {
                // Each region ends where the next one begins.
                Some((last, run)) if *last == key => run.elements += place.elements,
                _ => runs.push((key, place.clone())),
            }
        }
        runs.into_iter().filter(|(key, _)| key.is_some()).map(|(_, run)| run).collect()
    }

    /// A view over a run of regions.
    pub(crate) fn run(
        &mut self,
        name: &str,
        dtype: DType,
        offset: u64,
        elements: usize,
    ) -> BufferId {
        self.run_in(Place::Device, name, dtype, (offset, elements))
    }

    /// A view over a run of regions in a memory space, from a byte of that on.
    pub(crate) fn run_in(
        &mut self,
        place: Place,
        name: &str,
        dtype: DType,
        (offset, elements): (u64, usize),
    ) -> BufferId {
        self.add_runs();
        let known = self.runs.get(&(place, offset, elements)).into_iter().flatten();
        // What is transient has no place yet.
        if let Some(there) = known.copied().find(|there| !self.spans.contains_key(&there.0)) {
            return there;
        }
        let view = self.view(name, dtype, elements, offset);
        if place != Place::Device {
            self.away.insert(view.0, place);
        }
        view
    }

    /// Notes the views that were made since the last time.
    fn add_runs(&mut self) {
        let first = self.runs_noted;
        self.runs_noted = self.buffers.len();
        for (at, buffer) in self.buffers.iter().enumerate().skip(first) {
            let [elements] = buffer.sizes[..] else { continue };
            let id = BufferId(at as u32);
            if buffer.contents == Contents::View && !self.spans.contains_key(&id.0) {
                let key = (self.place(id), buffer.offset, elements);
                self.runs.entry(key).or_default().push(id);
            }
        }
    }

    fn push(&mut self, buffer: Buffer) -> BufferId {
        self.buffers.push(buffer);
        BufferId(self.buffers.len() as u32 - 1)
    }

    fn push_in(&mut self, place: Place, buffer: Buffer) -> BufferId {
        let id = self.push(buffer);
        if place != Place::Device {
            self.away.insert(id.0, place);
        }
        id
    }

    /// A buffer that keeps its place for the whole program.
    pub(crate) fn persistent(
        &mut self,
        name: &str,
        contents: Contents,
        dtype: DType,
        sizes: Vec<usize>,
    ) -> BufferId {
        let bytes = sizes.iter().product::<usize>() as u64 * dtype.size();
        let place = self.place_of(&contents);
        let offset = self.ends[place as usize];
        self.ends[place as usize] += aligned(bytes);
        let buffer = Buffer { name: name.to_owned(), contents, dtype, sizes, bytes, offset };
        self.push_in(place, buffer)
    }

    /// The memory space of what persists.
    fn place_of(&self, contents: &Contents) -> Place {
        let Offload { optimizer, parameters, .. } = self.offload;
        match contents {
            Contents::Master(_) | Contents::State { .. } | Contents::Scale { .. } => optimizer,
            Contents::Shard { role: ShardRole::State(_) | ShardRole::Scale(_), .. } => optimizer,
            Contents::Param(_) | Contents::Shard { role: ShardRole::Param, .. } => parameters,
            // Where no type is narrower, it is what parameters are gathered from.
            Contents::Shard { role: ShardRole::Master, .. } => match self.precision.master {
                Some(_) => optimizer,
                None => parameters,
            },
            Contents::Shard {
                role: ShardRole::Grad | ShardRole::Term | ShardRole::Rounded,
                ..
            }
            | Contents::Grad(_)
            | Contents::Feed(_)
            | Contents::Stats
            | Contents::Cache(_)
            | Contents::Output
            | Contents::View
            | Contents::Part { .. }
            | Contents::Activation
            | Contents::Frame
            | Contents::Gathered { .. }
            | Contents::Term { .. } => Place::Device,
        }
    }

    fn view(&mut self, name: &str, dtype: DType, elements: usize, offset: u64) -> BufferId {
        let bytes = elements as u64 * dtype.size();
        let sizes = vec![elements];
        let name = name.to_owned();
        self.push(Buffer { name, contents: Contents::View, dtype, sizes, bytes, offset })
    }

    /// Some elements of a buffer, from one on.
    pub(crate) fn slice(&mut self, whole: BufferId, first: usize, elements: usize) -> BufferId {
        let Buffer { ref name, ref contents, dtype, offset, .. } = self.buffers[whole.0 as usize];
        let (name, place) = (name.clone(), self.place(whole));
        let persists = contents.outlasts_step() || *contents == Contents::View;
        if persists && !self.spans.contains_key(&whole.0) {
            return self.run_in(
                place,
                &name,
                dtype,
                (offset + first as u64 * dtype.size(), elements),
            );
        }
        self.part(&name, Contents::Part { of: whole }, dtype, vec![elements], (whole, first))
    }

    /// Room on the device for some elements like those of a buffer, from one moment to another.
    pub(crate) fn staged(
        &mut self,
        like: BufferId,
        elements: usize,
        span: (usize, usize),
    ) -> BufferId {
        let Buffer { ref name, dtype, .. } = self.buffers[like.0 as usize];
        let name = format!("{name}.staged");
        self.transient(&name, Contents::Activation, dtype, vec![elements], span)
    }

    /// The first elements of room for as many or more, as room of its own.
    pub(crate) fn first_of(&mut self, whole: BufferId, elements: usize) -> BufferId {
        let Buffer { ref name, ref sizes, dtype, .. } = self.buffers[whole.0 as usize];
        if *sizes == [elements] {
            return whole;
        }
        let name = name.clone();
        self.part(&name, Contents::Activation, dtype, vec![elements], (whole, 0))
    }

    /// The type of a buffer's elements.
    pub(crate) fn dtype(&self, buffer: BufferId) -> DType {
        self.buffers[buffer.0 as usize].dtype
    }

    /// The memory space of a buffer.
    pub(crate) fn place(&self, buffer: BufferId) -> Place {
        self.away.get(&buffer.0).copied().unwrap_or_default()
    }

    /// A buffer that begins at an element of another one.
    pub(crate) fn part(
        &mut self,
        name: &str,
        contents: Contents,
        dtype: DType,
        sizes: Vec<usize>,
        (whole, first): (BufferId, usize),
    ) -> BufferId {
        let bytes = sizes.iter().product::<usize>() as u64 * dtype.size();
        let name = name.to_owned();
        let id = self.push(Buffer { name, contents, dtype, sizes, bytes, offset: 0 });
        self.within.insert(id.0, (whole.0, first as u64 * dtype.size()));
        id
    }

    /// A buffer that is live from one moment of the work on a micro-batch to another.
    pub(crate) fn transient(
        &mut self,
        name: &str,
        contents: Contents,
        dtype: DType,
        sizes: Vec<usize>,
        span: (usize, usize),
    ) -> BufferId {
        let bytes = sizes.iter().product::<usize>() as u64 * dtype.size();
        let name = name.to_owned();
        let id = self.push(Buffer { name, contents, dtype, sizes, bytes, offset: 0 });
        self.spans.insert(id.0, (span.0, span.1.max(span.0)));
        id
    }

    /// A value that is live from one moment to another in a memory space.
    pub(crate) fn transient_in(
        &mut self,
        place: Place,
        name: &str,
        (dtype, sizes): (DType, Vec<usize>),
        span: (usize, usize),
    ) -> BufferId {
        let id = self.transient(name, Contents::Activation, dtype, sizes, span);
        if place != Place::Device {
            self.away.insert(id.0, place);
        }
        id
    }

    /// The scratch memory of a call.
    pub(crate) fn frame(&mut self, name: &str, bytes: u64, position: usize) -> BufferId {
        let sizes = vec![bytes as usize];
        self.transient(name, Contents::Frame, DType::I8, sizes, (position, position))
    }

    /// The scratch memory of the calls that end a step, at a position, as large as the largest
    /// needs: they run one after the other.
    pub(crate) fn update_frame(&mut self, bytes: u64, position: usize) -> BufferId {
        let Some(id) = self.update_frame else {
            let made = self.frame("update.frame", bytes, position);
            self.update_frame = Some(made);
            return made;
        };
        let there = &mut self.buffers[id.0 as usize];
        if there.bytes < bytes {
            (there.bytes, there.sizes) = (bytes, vec![bytes as usize]);
        }
        id
    }

    /// Loss sum, count and squared gradient norm.
    pub(crate) fn stats(&mut self) {
        let (start, dtype) = (self.ends[DEVICE], self.precision.accumulate);
        let whole = self.persistent("stats", Contents::Stats, dtype, vec![3]);
        let size = dtype.size();
        self.stats = vec![whole];
        for (at, name) in ["loss_sum", "count", "grad_squares"].into_iter().enumerate() {
            let part = self.view(name, dtype, 1, start + at as u64 * size);
            self.stats.push(part);
        }
        let loss = self.view("loss", dtype, 2, start);
        self.stats.push(loss);
    }

    /// The cotangents of the entry's results: 0, and the loss scale.
    pub(crate) fn cotangents_of_results(&mut self) {
        let dtype = self.precision.accumulate;
        for (at, name) in ["zero", "loss_scale"].into_iter().enumerate() {
            let constant = self.persistent(name, Contents::Activation, dtype, Vec::new());
            self.constants[at] = Some(constant);
        }
    }

    /// The buffer of one statistic: 0 the loss sum, 1 the count, 2 the squared gradient norm.
    pub(crate) fn stat(&self, at: usize) -> BufferId {
        self.stats[at + 1]
    }

    /// All statistics.
    pub(crate) fn all_stats(&self) -> BufferId {
        self.stats[0]
    }

    /// Loss sum and count.
    pub(crate) fn loss_stats(&self) -> BufferId {
        self.stats[4]
    }

    /// The cotangent of a result: 0 the number 0, 1 the loss scale.
    pub(crate) fn constant(&self, value: usize) -> BufferId {
        self.constants[value].expect("they are allocated where the loss is")
    }

    /// The parameter of an entry's weight.
    pub(crate) fn param(&self, weight: usize) -> BufferId {
        self.params[&weight]
    }

    /// The gradient of an entry's weight.
    pub(crate) fn grad(&self, weight: usize) -> BufferId {
        self.grads[&weight]
    }

    /// All gradients, and how many elements that is; none where ranks share them.
    pub(crate) fn all_grads(&self) -> Option<(BufferId, usize)> {
        self.all_grads.filter(|(_, elements)| *elements > 0)
    }

    /// Adds a routine, or finds the equal one.
    pub(crate) fn routine(&mut self, routine: &Routine) -> usize {
        if let Some(there) = self.routines.iter().position(|r| r == routine) {
            return there;
        }
        self.routines.push(routine.clone());
        self.routines.len() - 1
    }

    /// A routine that was added.
    pub(crate) fn routine_at(&self, at: usize) -> &Routine {
        &self.routines[at]
    }

    /// Places what is transient in a memory space, after what persists.
    fn pack_transients(&mut self, place: Place) -> Packing {
        let is_there = |id: &u32| self.place(BufferId(*id)) == place;
        let ids: Vec<u32> = self.spans.keys().copied().filter(is_there).collect();
        let lifetime = |id: &u32| {
            let (first, last) = self.spans[id];
            Lifetime { bytes: self.buffers[*id as usize].bytes, first, last }
        };
        let packing = pack(&ids.iter().map(lifetime).collect::<Vec<_>>());
        for (id, offset) in ids.iter().zip(&packing.offsets) {
            self.buffers[*id as usize].offset = self.ends[place as usize] + offset;
        }
        packing
    }

    /// Places what is transient and ends the program.
    pub(crate) fn into_program(
        mut self,
        name: &str,
        [stage, context, tensor]: [usize; 3],
        [steps, evaluate]: [Vec<Step>; 2],
        entries: Vec<Entry>,
    ) -> Program {
        let packings = Place::ALL.map(|place| self.pack_transients(place));
        let bytes =
            Place::ALL.map(|place| self.ends[place as usize] + packings[place as usize].bytes);
        // Offsets count through all arenas.
        let starts = [0, bytes[DEVICE], bytes[DEVICE] + bytes[Place::Host as usize]];
        for (id, place) in &self.away {
            self.buffers[*id as usize].offset += starts[*place as usize];
        }
        for (id, (whole, first)) in &self.within {
            self.buffers[*id as usize].offset = self.buffers[*whole as usize].offset + first;
        }
        let weights = self.weights.into_iter().map(|w| WeightShard {
            name: w.name,
            global: w.global,
            ranges: w.ranges,
            experts: w.experts,
            owned: w.owned,
        });
        Program {
            name: name.to_owned(),
            stage,
            context,
            tensor,
            weights: weights.collect(),
            buffers: self.buffers,
            arena_bytes: bytes[DEVICE],
            host_bytes: bytes[Place::Host as usize],
            disk_bytes: bytes[Place::Disk as usize],
            live_bytes_max: self.ends[DEVICE] + packings[DEVICE].live_bytes_max,
            routines: self.routines,
            steps,
            evaluate,
            entries,
        }
    }
}

/// Weights are padded to a multiple of this number of elements, so that each role ends on the
/// alignment: scales of states, too.
pub(crate) fn quantum(precision: &Precision, is_coded: bool) -> usize {
    let Precision { parameters, gradients, states, master, accumulate, .. } = *precision;
    let sizes = [parameters, gradients, states].into_iter().chain(master).map(DType::size);
    let elements = (ALIGNMENT / sizes.min().unwrap_or(1)) as usize;
    let of_scales = (ALIGNMENT / accumulate.size()) as usize * STATE_BLOCK;
    if is_coded { elements.max(of_scales) } else { elements }
}

/// Where a region comes among others.
type RegionOrder = (bool, bool, bool, bool, u8, bool, bool);

/// All of weights that matters to how they are reduced and updated: the padded elements of each
/// region, in order, and of each weight in several stages its elements and the stages.
pub(crate) fn extents<'w>(
    weights: &'w [WeightPlace],
    precision: &Precision,
) -> (
    BTreeMap<impl Ord + Serialize + use<>, u64>,
    BTreeMap<impl Ord + Serialize + use<>, (usize, &'w [usize])>,
) {
    let elements = |weight: &WeightPlace| weight.ranges.iter().map(|r| r.1).product::<usize>();
    let (mut regions, mut shared) = (BTreeMap::new(), BTreeMap::new());
    for weight in weights {
        let order = region_of(weight).order();
        let padded = elements(weight).next_multiple_of(quantum(precision, weight.is_coded));
        *regions.entry(order).or_insert(0) += padded as u64;
        if weight.stages.len() > 1 {
            shared.insert((order, weight.weight), (elements(weight), &weight.stages[..]));
        }
    }
    (regions, shared)
}

fn region_of(place: &WeightPlace) -> Region {
    Region {
        foreign: !place.owned,
        is_partial: place.is_partial,
        is_cut: place.is_cut,
        is_matrix: place.is_matrix,
        is_frozen: place.is_frozen,
        is_coded: place.is_coded,
        is_expert: place.experts.is_some(),
    }
}
