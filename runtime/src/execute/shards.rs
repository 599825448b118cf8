//! Weights, gradients and optimizer states between the host and the ranks that hold their shards.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;

use ir::DType;
use ir::program::{
    Buffer, BufferId, Contents, Member, Program, STATE_BLOCK, ShardRole, WeightShard, scale_dims,
};

use crate::block;
use crate::convert::{Stored, convert};

use super::{Classes, Session};

/// Which of the tensors that belong to a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// The weight itself: what is updated.
    Weight,
    /// The weight as layers read it, where that is rounded from what is updated.
    Rounded,
    /// Its gradient, as the last step left it.
    Grad,
    /// The state of the optimizer with this index.
    State(usize),
    /// What that is multiplied by, where it has 8 bits: a number for each block of the last dim.
    Scale(usize),
}

/// A shard of a tensor that belongs to a weight, on one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// The rank that holds it.
    pub rank: usize,
    /// The weight.
    pub name: String,
    /// Which of its tensors.
    pub part: Part,
    /// The sizes of the whole tensor.
    pub dims: Vec<usize>,
    /// What of it.
    pub block: Vec<Range<usize>>,
    /// The element type.
    pub dtype: DType,
    /// Where it is on the rank, and which element of the buffer is its first.
    pub buffer: BufferId,
    /// See there.
    pub first: usize,
    /// Whether no rank before this one holds the same, and it is no tied copy: together these
    /// shards are the whole tensor once.
    pub is_first: bool,
}

impl Shard {
    /// The bytes of its elements.
    pub fn bytes(&self) -> usize {
        block::elements(&self.block) * self.dtype.size() as usize
    }

    /// Where they are in the buffer.
    pub fn range(&self) -> Range<usize> {
        let start = self.first * self.dtype.size() as usize;
        start..start + self.bytes()
    }
}

/// A whole tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Values {
    /// The element type.
    pub dtype: DType,
    /// The sizes.
    pub dims: Vec<usize>,
    /// The elements: row-major, little-endian.
    pub bytes: Vec<u8>,
}

impl Values {
    /// The elements as numbers.
    pub fn to_f64(&self) -> Vec<f64> {
        let bytes = convert(Stored::DType(self.dtype), &self.bytes, DType::F64);
        bytes.as_chunks().0.iter().map(|&b| f64::from_le_bytes(b)).collect()
    }
}

impl Session {
    /// All shards of weights, gradients and states, by rank and then in the order of the program's
    /// buffers.
    pub fn shards(&self) -> &[Shard] {
        &self.shard_table().all
    }

    fn shard_table(&self) -> &ShardTable {
        self.shards.get_or_init(|| ShardTable::of(&self.classes))
    }

    /// The names of all weights and the sizes of each, in the order of stages.
    pub fn weights(&self) -> Vec<(String, Vec<usize>)> {
        let mut weights: Vec<(String, Vec<usize>)> = Vec::new();
        let mut seen = HashSet::new();
        for shard in self.shards().iter().filter(|shard| shard.part == Part::Weight) {
            if seen.insert(&shard.name) {
                weights.push((shard.name.clone(), shard.dims.clone()));
            }
        }
        weights
    }

    /// Overwrites a tensor on all ranks that hold some of it, tied copies included, and what is
    /// rounded from it.
    ///
    /// `values` gives the elements of a block, row-major, as little-endian numbers of a type; it
    /// is asked once for each distinct block. Returns whether any rank holds the tensor.
    pub fn write_weight<E>(
        &mut self,
        name: &str,
        part: Part,
        values: &mut dyn FnMut(&[Range<usize>], DType) -> Result<Vec<u8>, E>,
    ) -> Result<bool, E> {
        let mut shards = self.shards_of(name, part);
        let starts = |shard: &Shard| -> Vec<(usize, usize)> {
            shard.block.iter().map(|range| (range.start, range.end)).collect()
        };
        shards.sort_by_key(starts);
        let rounded = match part {
            Part::Weight => self.shards_of(name, Part::Rounded),
            Part::Rounded | Part::Grad | Part::State(_) | Part::Scale(_) => Vec::new(),
        };
        let mut values = |block: &[Range<usize>], dtype| {
            let bytes = values(block, dtype)?;
            let size = block::elements(block) * DType::size(dtype) as usize;
            assert_eq!(bytes.len(), size, "the values are those of the block");
            Ok(bytes)
        };
        for same in shards.chunk_by(|a, b| a.block == b.block && a.dtype == b.dtype) {
            let bytes = values(&same[0].block, same[0].dtype)?;
            for shard in same {
                self.write_shard(shard, &bytes);
            }
            for shard in rounded.iter().filter(|shard| shard.block == same[0].block) {
                let bytes = convert(Stored::DType(same[0].dtype), &bytes, shard.dtype);
                self.write_shard(shard, &bytes);
            }
        }
        // Ranks that update pieces of a weight have more of it to compute with.
        for shard in &rounded {
            let piece = shards.iter().find(|piece| piece.block == shard.block);
            if let (None, Some(updated)) = (piece, shards.first()) {
                let bytes = values(&shard.block, updated.dtype)?;
                let bytes = convert(Stored::DType(updated.dtype), &bytes, shard.dtype);
                self.write_shard(shard, &bytes);
            }
        }
        Ok(!shards.is_empty())
    }

    /// Puts a tensor together from its shards; none if no rank holds it.
    ///
    /// In debug builds, asserts that all copies of a shard are equal, bit for bit.
    pub fn read_weight(&self, name: &str, part: Part) -> Option<Values> {
        let shards = self.shards_of(name, part);
        let first = shards.iter().find(|shard| shard.is_first)?;
        let (dims, dtype) = (first.dims.clone(), first.dtype);
        let (whole, size) = (block::whole(&dims), dtype.size() as usize);
        let mut bytes = vec![0; block::elements(&whole) * size];
        let mut copied = 0;
        for shard in shards.iter().filter(|shard| shard.is_first) {
            let local = self.read_shard(shard);
            copied += block::copy_overlap(&local, &shard.block, &mut bytes, &whole, size);
        }
        assert_eq!(copied, block::elements(&whole), "the shards of a tensor are all of it");
        if cfg!(debug_assertions) {
            for shard in &shards {
                let mut local = self.read_shard(shard);
                let copy = local.clone();
                block::copy_overlap(&bytes, &whole, &mut local, &shard.block, size);
                assert!(copy == local, "rank {} has other values of `{name}`", shard.rank);
            }
        }
        Some(Values { dtype, dims, bytes })
    }

    /// As [`Session::read_weight`], of the gradient.
    pub fn read_grad(&self, name: &str) -> Option<Values> {
        self.read_weight(name, Part::Grad)
    }

    /// The elements of one shard.
    ///
    /// # Panics
    /// When the process of its rank is gone.
    pub fn read_shard(&self, shard: &Shard) -> Vec<u8> {
        self.bytes(shard.rank, shard.buffer, shard.range())
    }

    fn write_shard(&mut self, shard: &Shard, bytes: &[u8]) {
        self.write_from(shard.rank, shard.buffer, shard.range().start, bytes);
    }

    fn shards_of(&self, name: &str, part: Part) -> Vec<Shard> {
        let ShardTable { all, by_tensor } = self.shard_table();
        let of = by_tensor.get(name).and_then(|parts| parts.get(&part));
        of.into_iter().flatten().map(|at| all[*at].clone()).collect()
    }
}

/// The shards of all ranks.
#[derive(Debug)]
pub(super) struct ShardTable {
    all: Vec<Shard>,
    /// The numbers of those of each tensor, by the name of its weight.
    by_tensor: HashMap<String, BTreeMap<Part, Vec<usize>>>,
}

impl ShardTable {
    fn of(classes: &Classes) -> ShardTable {
        let mesh = classes.mesh;
        let mut seen = HashSet::new();
        let (mut all, mut by_tensor) = (Vec::new(), HashMap::<_, BTreeMap<_, Vec<_>>>::new());
        for rank in 0..mesh.ranks() {
            let program = classes.program_of(rank);
            let (data, updated) = (mesh.data_index(rank), Updated::of(program));
            for (index, buffer) in program.buffers.iter().enumerate() {
                for Held { weight, part, block, first } in held(program, &updated, buffer, data) {
                    let is_first = weight.owned && seen.insert((&weight.name, part, block.clone()));
                    let dims = match part {
                        Part::Scale(_) => scale_dims(&weight.global),
                        Part::Weight | Part::Rounded | Part::Grad | Part::State(_) => None,
                    };
                    let of_weight = by_tensor.entry(weight.name.clone()).or_default();
                    of_weight.entry(part).or_default().push(all.len());
                    all.push(Shard {
                        rank,
                        name: weight.name.clone(),
                        part,
                        dims: dims.unwrap_or_else(|| weight.global.clone()),
                        block,
                        dtype: buffer.dtype,
                        buffer: BufferId(index as u32),
                        first,
                        is_first,
                    });
                }
            }
        }
        ShardTable { all, by_tensor }
    }
}

/// What a program updates in place of the weights that layers read.
struct Updated {
    masters: HashSet<usize>,
    buckets: HashSet<BufferId>,
    /// Whether ranks share updates.
    is_split: bool,
}

impl Updated {
    fn of(program: &Program) -> Updated {
        let contents = || program.buffers.iter().map(|buffer| &buffer.contents);
        let master = |of: &_| if let Contents::Master(weight) = of { Some(*weight) } else { None };
        let bucket = |of: &_| {
            let Contents::Shard { role: ShardRole::Master, bucket } = of else { return None };
            Some(*bucket)
        };
        Updated {
            masters: contents().filter_map(master).collect(),
            buckets: contents().filter_map(bucket).collect(),
            is_split: contents().any(|of| matches!(of, Contents::Shard { .. })),
        }
    }

    /// Whether a weight as layers read it is rounded from what is updated. Weights that are not
    /// trained have no master.
    fn has_master(&self, program: &Program, weight: usize) -> bool {
        self.masters.contains(&weight) || self.is_split && program.trains(weight)
    }
}

/// A block of a tensor that a buffer of one rank holds, from an element of the buffer on.
struct Held<'a> {
    weight: &'a WeightShard,
    part: Part,
    block: Vec<Range<usize>>,
    first: usize,
}

/// What a buffer of a rank, by its number among those with the same weights, holds of which
/// weights.
fn held<'a>(
    program: &'a Program,
    updated: &Updated,
    buffer: &Buffer,
    data: usize,
) -> Vec<Held<'a>> {
    let (weight, part) = match buffer.contents {
        Contents::Master(weight) => (weight, Part::Weight),
        Contents::Param(weight) if updated.has_master(program, weight) => (weight, Part::Rounded),
        Contents::Param(weight) => (weight, Part::Weight),
        // Where ranks share the update, the sum over them is in their pieces.
        Contents::Grad(weight) if !updated.is_split => (weight, Part::Grad),
        Contents::State { weight, index } => (weight, Part::State(index)),
        Contents::Scale { weight, index } => (weight, Part::Scale(index)),
        Contents::Shard { role: ShardRole::Grad, bucket } => {
            return held_pieces(program, (buffer, bucket), Part::Grad, data);
        }
        Contents::Shard { role: ShardRole::Master, bucket } => {
            return held_pieces(program, (buffer, bucket), Part::Weight, data);
        }
        Contents::Shard { role: ShardRole::Param, bucket } => {
            let is_rounded = updated.buckets.contains(&bucket);
            let part = if is_rounded { Part::Rounded } else { Part::Weight };
            return held_pieces(program, (buffer, bucket), part, data);
        }
        Contents::Shard { role: ShardRole::State(index), bucket } => {
            return held_pieces(program, (buffer, bucket), Part::State(index), data);
        }
        Contents::Shard { role: ShardRole::Scale(index), bucket } => {
            return held_pieces(program, (buffer, bucket), Part::Scale(index), data);
        }
        Contents::Shard { role: ShardRole::Rounded | ShardRole::Term, .. }
        | Contents::Gathered { .. }
        | Contents::Term { .. }
        | Contents::Grad(_)
        | Contents::Feed(_)
        | Contents::Stats
        | Contents::Cache(_)
        | Contents::Output
        | Contents::View
        | Contents::Part { .. }
        | Contents::Activation
        | Contents::Frame => return Vec::new(),
    };
    let weight = &program.weights[weight];
    let ranges = weight.ranges_of(data).into_iter();
    let block = ranges.map(|(start, len)| start..start + len).collect();
    vec![Held { weight, part, block: of_part(part, block), first: 0 }]
}

/// What a part has for a block of a weight: one number for each element, or each block of states.
fn of_part(part: Part, mut block: Vec<Range<usize>>) -> Vec<Range<usize>> {
    if let (Part::Scale(_), Some(last)) = (part, block.last_mut()) {
        *last = last.start / STATE_BLOCK..last.end / STATE_BLOCK;
    }
    block
}

/// What the piece of a bucket that a rank holds is of the weights in it.
fn held_pieces<'a>(
    program: &'a Program,
    (buffer, bucket): (&Buffer, BufferId),
    part: Part,
    data: usize,
) -> Vec<Held<'a>> {
    let per = if matches!(part, Part::Scale(_)) { STATE_BLOCK } else { 1 };
    let piece = buffer.sizes.iter().product::<usize>() * per;
    let members = program.members(bucket);
    // Neighbours hold one copy, the next ones another; of experts that neighbours share, every
    // rank at the same place among them.
    let first = members.first().and_then(|member| program.weights[member.weight].experts);
    let place = first.map_or(data, |experts| data / experts.ranks.max(1));
    let whole = program.buffers[bucket.0 as usize].sizes.iter().product::<usize>();
    let place = place % whole.checked_div(piece).unwrap_or(1).max(1);
    let own = place * piece..(place + 1) * piece;
    let mut held = Vec::new();
    for Member { weight, first: start } in members {
        let weight = &program.weights[weight];
        let ranges = weight.ranges_of(data);
        let sizes: Vec<usize> = ranges.iter().map(|r| r.1).collect();
        let end = start + sizes.iter().product::<usize>();
        let (from, to) = (own.start.max(start), own.end.min(end));
        let mut first = from.saturating_sub(own.start);
        for local in
            block::of_elements(from.saturating_sub(start)..to.saturating_sub(start), &sizes)
        {
            let shifted = local.iter().zip(&ranges);
            let block: Vec<_> = shifted.map(|(l, r)| r.0 + l.start..r.0 + l.end).collect();
            let count = block::elements(&block);
            held.push(Held { weight, part, block: of_part(part, block), first: first / per });
            first += count;
        }
    }
    held
}
