//! Accesses of fused loops over rows that reduce nothing, and what loops over rows share.

use std::collections::BTreeSet;

use ir::DType;

use super::{Accesses, Blocks, LANES, SECTOR, Site, Sites, Warp, relative};
use crate::cuda::rows::{Elementwise, THREADS};
use crate::rows::{Access, BinaryOp, Instr, Output, Rows, UnaryOp};

/// A buffer that points access, and how.
pub(super) struct Stream<'r> {
    pub(super) access: &'r Access,
    /// Bytes of an element.
    bytes: usize,
    /// Columns that one access has.
    width: usize,
    site: Site,
}

impl<'r> Stream<'r> {
    /// One of vectors of `width` columns, or of single elements.
    pub(super) fn new(
        (access, bytes): (&'r Access, usize),
        width: usize,
        sites: &mut Sites,
    ) -> Stream<'r> {
        Stream { access, bytes, width, site: sites.device(width * bytes) }
    }

    /// The address of an element.
    pub(super) fn at(&self, row: usize, col: usize) -> u64 {
        let element = self.access.row_start(row) + col * self.access.col_stride;
        (element * self.bytes) as u64
    }

    /// A lane's accesses to the columns of a thread.
    pub(super) fn pass(&self, warp: &mut Warp, lane: usize, row: usize, cols: [usize; 2]) {
        let [first, count] = cols;
        for col in (first..first + count).step_by(self.width) {
            warp.access(self.site, lane, self.at(row, col));
        }
    }
}

/// The values that outputs are made of. What is computed of others is no instruction.
pub(super) fn used(rows: &Rows) -> BTreeSet<usize> {
    made_of(rows, rows.outputs.iter().map(Output::value))
}

/// The same and what reductions are made of, which the lanes of a warp exchange in any case.
pub(super) fn live(rows: &Rows) -> BTreeSet<usize> {
    let vectors = rows.vectors();
    let reduced = rows.instrs.iter().enumerate().filter_map(|(at, instr)| {
        let Instr::Reduce { x, .. } = instr else { return None };
        vectors[*x].then_some(at)
    });
    made_of(rows, rows.outputs.iter().map(Output::value).chain(reduced))
}

fn made_of(rows: &Rows, values: impl Iterator<Item = usize>) -> BTreeSet<usize> {
    let mut open: Vec<usize> = values.collect();
    let mut found = BTreeSet::new();
    while let Some(value) = open.pop() {
        if found.insert(value) {
            open.extend(rows.instrs[value].operands());
        }
    }
    found
}

/// Whether a compiler decides what is loaded: where values are loaded that nothing uses, and in
/// programs of F64 with functions. Those of the library branch, and loads and stores may be moved
/// into the branches.
pub(super) fn is_open(rows: &Rows) -> bool {
    let all = (0..rows.instrs.len()).collect();
    if loaded(rows, &all) != loaded(rows, &live(rows)) {
        return true;
    }
    let is_simple = |instr: &Instr| match instr {
        Instr::Unary { op, .. } => matches!(op, UnaryOp::Neg | UnaryOp::Abs | UnaryOp::Square),
        Instr::Binary { op, .. } => {
            matches!(op, BinaryOp::Add | BinaryOp::Sub | BinaryOp::Mul | BinaryOp::Div)
        }
        Instr::Select { .. } => false,
        Instr::Load { .. }
        | Instr::Const { .. }
        | Instr::Index { .. }
        | Instr::Reduce { .. }
        | Instr::Random(_) => true,
    };
    rows.dtype == DType::F64 && !rows.instrs.iter().all(is_simple)
}

/// The inputs that some values load, each once.
pub(super) fn loaded(rows: &Rows, values: &BTreeSet<usize>) -> BTreeSet<usize> {
    let input = |at: &usize| {
        let Instr::Load { input } = &rows.instrs[*at] else { return None };
        Some(*input)
    };
    values.iter().filter_map(input).collect()
}

/// The words of keys that draws read, each once, as buffers and words.
pub(super) fn key_words(rows: &Rows, live: &BTreeSet<usize>) -> BTreeSet<(usize, usize)> {
    let draw = |at: &usize| {
        let Instr::Random(draw) = &rows.instrs[*at] else { return None };
        Some(draw)
    };
    let words = live.iter().filter_map(draw).flat_map(|draw| {
        let sample = (draw.sample_stride > 0).then_some(3);
        (0..3).chain(sample).map(|word| (draw.key, word))
    });
    words.collect()
}

/// What each thread reads of keys.
pub(super) struct Keys(Vec<(Site, u64)>);

impl Keys {
    pub(super) fn of(rows: &Rows, live: &BTreeSet<usize>, sites: &mut Sites) -> Keys {
        let words = key_words(rows, live).into_iter();
        Keys(words.map(|(_, word)| (sites.device(4), 4 * word as u64)).collect())
    }

    pub(super) fn pass(&self, warp: &mut Warp, lane: usize) {
        self.0.iter().for_each(|(site, at)| warp.access(*site, lane, *at));
    }
}

/// Accesses of one thread per point, per vector of points, or per row.
pub(super) fn elementwise(tile: &Elementwise, grid: u64) -> Option<Accesses> {
    let Elementwise { rows, by_row, vector } = tile;
    if is_open(rows) {
        return None;
    }
    let width = vector.as_ref().map_or(1, |vector| vector.width);
    let (mut sites, live) = (Sites::default(), live(rows));
    let keys = Keys::of(rows, &live, &mut sites);
    let mut streams = Vec::new();
    for input in loaded(rows, &live) {
        let of = &rows.inputs[input];
        let is_vector = vector.as_ref().is_some_and(|vector| vector.inputs[input]);
        let of_access = (&of.access, of.dtype.size() as usize);
        streams.push(Stream::new(of_access, if is_vector { width } else { 1 }, &mut sites));
    }
    for (at, output) in rows.outputs.iter().enumerate() {
        let Output::Store { access, dtype, accumulate, .. } = output else { return None };
        let is_vector = vector.as_ref().is_some_and(|vector| vector.outputs[at]);
        for _ in 0..=usize::from(*accumulate) {
            let of_access = (access, dtype.size() as usize);
            streams.push(Stream::new(of_access, if is_vector { width } else { 1 }, &mut sites));
        }
    }
    let cols = if *by_row { 1 } else { rows.cols };
    let points = rows.rows * cols;
    let per_block = THREADS as usize * width;
    let mut blocks = Blocks::new();
    for block in 0..grid as usize {
        let [from, to] = [block, block + 1].map(|block| (block * per_block).min(points));
        let mut key = vec![(to - from) as u64, (from % cols) as u64];
        for stream in &streams {
            let rows = from / cols..=(to - 1) / cols;
            relative(&mut key, rows.map(|row| stream.at(row, 0)));
            key.push(stream.at(from / cols, from % cols) % SECTOR);
        }
        blocks.count(key, 1, |warp| {
            for (number, point) in (from..to).step_by(width).enumerate() {
                let (lane, row, col) = (number % LANES, point / cols, point % cols);
                if lane == 0 {
                    warp.end();
                }
                keys.pass(warp, lane);
                for stream in &streams {
                    // What is the same for all columns of a vector is loaded once.
                    let count = if stream.access.col_stride == 0 { 1 } else { width };
                    stream.pass(warp, lane, row, [col, count]);
                }
            }
            warp.end();
        })?;
    }
    Some(blocks.count)
}
