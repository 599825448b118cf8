//! Copies whose rows are contiguous along one loop in the source and along another in the target:
//! by tiles in shared memory, so that both sides are accessed by vectors of 16 bytes.
//!
//! A tile has 128 bytes along both loops: rows of eight vectors. It is stored to shared memory as
//! it is loaded, a vector of a row at a time, and read down its columns. The vectors of a row are
//! permuted by an XOR with the number of the group of rows that a thread reads together, so that
//! eight lanes that store a row, and 32 that read four columns, access different banks.

use std::fmt;

use super::index::nest;
use super::text::{Text, line, moved};
use crate::kernel::{Copy, CopyLoop};

/// Threads of a block.
pub(super) const THREADS: u32 = 256;
/// Bytes of a vector, and vectors of a row of a tile.
const VECTOR: usize = 16;
const VECTORS: usize = 8;

/// A copy by tiles.
#[derive(Clone, Debug, PartialEq)]
pub struct Transposition {
    /// What is copied: its last two loops are that along which the target is contiguous, and that
    /// along which the source is.
    pub copy: Copy,
    /// Whether all vectors of the source are aligned, and those of the target.
    pub is_aligned: [bool; 2],
}

impl Transposition {
    /// The tiles of a copy; none where no two loops are as long as a vector and contiguous, one in
    /// the source and one in the target.
    pub(super) fn of(copy: &Copy, source_offset: Option<u64>) -> Option<Transposition> {
        let mut copy = copy.clone();
        copy.loops.retain(|l| l.size > 1);
        let width = VECTOR / copy.dtype.size() as usize;
        let in_source = take_merged(&mut copy.loops, |l| l.source)?;
        let in_target = take_merged(&mut copy.loops, |l| l.target)?;
        if in_source.size < width || in_target.size < width {
            return None;
        }
        let fits = |stride: usize| stride.is_multiple_of(width);
        let is_aligned = [
            source_offset.is_some_and(|offset| offset.is_multiple_of(width as u64))
                && fits(in_target.source)
                && copy.loops.iter().all(|l| fits(l.source)),
            fits(copy.target_offset)
                && fits(in_source.target)
                && copy.loops.iter().all(|l| fits(l.target)),
        ];
        copy.loops.extend([in_target, in_source]);
        Some(Transposition { copy, is_aligned })
    }

    /// Elements of a vector, and of a side of a tile.
    pub(super) fn sizes(&self) -> [usize; 2] {
        let width = VECTOR / self.copy.dtype.size() as usize;
        [width, VECTORS * width]
    }

    /// All loops but the last two; and these.
    pub(super) fn loops(&self) -> (&[CopyLoop], [&CopyLoop; 2]) {
        let (outer, inner) = self.copy.loops.split_at(self.copy.loops.len() - 2);
        (outer, [&inner[0], &inner[1]])
    }

    /// Blocks: of the outer loops, of tiles along the target's loop and along the source's.
    pub(super) fn tiles(&self) -> usize {
        let (outer, inner) = self.loops();
        let side = self.sizes()[1];
        outer.iter().map(|l| l.size).product::<usize>()
            * inner.iter().map(|l| l.size.div_ceil(side)).product::<usize>()
    }

    pub(super) fn print(&self, [source, target]: [&String; 2], text: &mut Text) {
        let (outer, [in_target, in_source]) = self.loops();
        let ([width, side], kind) = (self.sizes(), moved(self.copy.dtype));
        let [rows, columns] = [in_target.size, in_source.size];
        let [tiles_down, tiles_across] = [rows, columns].map(|size| size.div_ceil(side));
        line!(text, "SHARED({kind}, tile, {});", side * side);
        line!(text, "const u64 outer = blockIdx.x / {};", tiles_down * tiles_across);
        line!(text, "const u64 first_row = blockIdx.x / {tiles_across} % {tiles_down} * {side};");
        line!(text, "const u64 first_column = blockIdx.x % {tiles_across} * {side};");
        let of = |stride: fn(&CopyLoop) -> usize| {
            let loops: Vec<[usize; 2]> = outer.iter().map(|l| [l.size, stride(l)]).collect();
            nest(&loops, "outer")
        };
        let (from, to) = (of(|l| l.source), of(|l| l.target));
        line!(text, "const {kind}* const from = {source} + (u64)start + ({from});");
        line!(text, "{kind}* const to = {target} + {} + ({to});", self.copy.target_offset);
        let vectors = side * VECTORS;
        line!(text, "UNROLL");
        line!(text, "for (u32 i = threadIdx.x; i < {vectors}; i += {THREADS}) {{");
        line!(text, "const u32 row = i / {VECTORS}, vector = i % {VECTORS};");
        line!(text, "const u64 y = first_row + row, x = first_column + vector * {width};");
        line!(text, "const {kind}* const place = from + y * {} + x;", in_target.source);
        line!(text, "Vector<{kind}, {width}> v = {{}};");
        // Zeros where there is nothing, as columns are read whole.
        let end = self.end([("y", rows), ("x", columns)]);
        if let Some(end) = &end {
            line!(text, "if (!({end})) {{");
        }
        self.print_access(self.is_aligned[0], ("x", columns), true, text);
        if end.is_some() {
            text.end();
        }
        let swizzled = format!("(vector ^ row / {width}) * {width}");
        line!(text, "store_vector(tile + row * {side} + {swizzled}, v);");
        text.end();
        line!(text, "sync_block();");
        line!(text, "UNROLL");
        line!(text, "for (u32 i = threadIdx.x; i < {vectors}; i += {THREADS}) {{");
        line!(text, "const u32 column = i / {VECTORS}, vector = i % {VECTORS};");
        line!(text, "const u64 x = first_column + column, y = first_row + vector * {width};");
        if let Some(end) = self.end([("x", columns), ("y", rows)]) {
            line!(text, "if ({end}) continue;");
        }
        line!(text, "{kind}* const place = to + x * {} + y;", in_source.target);
        line!(text, "Vector<{kind}, {width}> v;");
        line!(text, "UNROLL");
        line!(text, "for (u32 e = 0; e < {width}; e += 1) {{");
        let swizzled = format!("(column / {width} ^ vector) * {width} + column % {width}");
        line!(text, "v.x[e] = tile[(vector * {width} + e) * {side} + {swizzled}];");
        text.end();
        self.print_access(self.is_aligned[1], ("y", rows), false, text);
        text.end();
    }

    /// Whether a vector lies behind the end of a loop; none where no tile does. Without a test
    /// loads do not wait for each other.
    fn end(&self, of: [(&str, usize); 2]) -> Option<String> {
        let side = self.sizes()[1];
        let ends = of.iter().filter(|(_, size)| !size.is_multiple_of(side));
        let ends: Vec<String> = ends.map(|(name, size)| format!("{name} >= {size}")).collect();
        (!ends.is_empty()).then(|| ends.join(" || "))
    }

    /// Prints the load or the store of a vector at `place`, of which only what is before the end
    /// is accessed.
    fn print_access(
        &self,
        is_aligned: bool,
        (at, end): (&str, usize),
        is_load: bool,
        text: &mut Text,
    ) {
        let ([width, _], kind) = (self.sizes(), moved(self.copy.dtype));
        let [one, all] = match is_load {
            true => ["v.x[e] = place[e]", "v = load_vector<KIND, WIDTH>(place)"],
            false => ["place[e] = v.x[e]", "store_vector(place, v)"],
        };
        let all = all.replace("KIND", kind).replace("WIDTH", &width.to_string());
        let is_whole = end.is_multiple_of(width);
        match (is_aligned, is_whole) {
            (true, true) => line!(text, "{all};"),
            (true, false) => {
                line!(text, "if ({at} + {width} <= {end}) {{");
                line!(text, "{all};");
                line!(text, "}} else {{");
                line!(text, "for (u32 e = 0; e < {}; e += 1) {one};", end % width);
                text.end();
            }
            (false, _) => {
                line!(text, "UNROLL");
                line!(text, "for (u32 e = 0; e < {width}; e += 1) {{");
                let guard =
                    if is_whole { String::new() } else { format!("if ({at} + e < {end}) ") };
                line!(text, "{guard}{one};");
                text.end();
            }
        }
    }
}

/// Takes the loop whose stride is one, with those that go on where it ends in both buffers.
fn take_merged(loops: &mut Vec<CopyLoop>, stride: impl Fn(&CopyLoop) -> usize) -> Option<CopyLoop> {
    let at = loops.iter().position(|l| stride(l) == 1)?;
    let mut whole = loops.remove(at);
    let goes_on = |whole: &CopyLoop, l: &CopyLoop| {
        l.source == whole.size * whole.source && l.target == whole.size * whole.target
    };
    while let Some(at) = loops.iter().position(|l| goes_on(&whole, l)) {
        whole.size *= loops.remove(at).size;
    }
    Some(whole)
}

impl fmt::Display for Transposition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [_, side] = self.sizes();
        write!(f, "one block per tile of {side}x{side}, transposed in shared memory")
    }
}
