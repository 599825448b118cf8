//! The device functions of what moves elements.

use ir::DType;

use crate::cuda::function::{Function, Functions};
use crate::cuda::moves::{Move, RowCopy, THREADS};
use crate::cuda::parameter::{Buffer, Parameter};
use crate::cuda::tile::Tile;
use crate::cuda::transpose::Transposition;
use crate::kernel::{Copy, CopyLoop, Fill, Gather, Rope};
use crate::offset::Offset;

fn function(what: &str, parameters: Vec<Parameter>, tile: Move) -> Function {
    let grid = tile.elements().div_ceil(THREADS as usize) as u64;
    Function {
        what: what.to_owned(),
        parameters,
        offsets: tile.offsets(),
        grid,
        threads: THREADS,
        tile: Tile::Move(tile),
    }
}

/// The function that fills a buffer.
pub(super) fn fill(what: &str, f: &Fill, output: Parameter) -> Function {
    function(
        what,
        vec![output],
        Move::Fill { len: f.len, dtype: f.dtype, bits: bits(f.dtype, f.value) },
    )
}

/// The bits of a number in a type.
fn bits(dtype: DType, x: f64) -> u64 {
    match dtype {
        DType::F64 => x.to_bits(),
        DType::F32 => u64::from((x as f32).to_bits()),
        DType::I64 => (x as i64).cast_unsigned(),
        DType::I32 => u64::from((x as i32).cast_unsigned()),
        DType::U32 => u64::from(x as u32),
        DType::I8 => u64::from((x as i8).cast_unsigned()),
        DType::Bool => u64::from(x != 0.0),
        DType::BF16 | DType::F16 | DType::F8E4M3 | DType::F8E5M2 => {
            u64::from(ir::formats::encode(dtype, x))
        }
    }
}

/// The vectors of a copy; none where neither side has aligned ones.
fn by_rows(copy: &Copy) -> Option<RowCopy> {
    let mut copy = copy.clone();
    copy.loops.retain(|l| l.size > 1);
    let mut last = copy.loops.pop()?;
    while let Some(l) = copy.loops.last()
        && l.source == last.size * last.source
        && l.target == last.size * last.target
    {
        last.size *= l.size;
        copy.loops.pop();
    }
    let width = 16 / copy.dtype.size() as usize;
    if [last.source, last.target] != [1, 1] || last.size < width || width == 1 {
        return None;
    }
    let starts =
        |of: fn(&CopyLoop) -> usize| copy.loops.iter().all(|l| of(l).is_multiple_of(width));
    let source = match copy.source_offset {
        Offset::Fixed(offset) => offset.unsigned_abs().is_multiple_of(width as u64),
        Offset::Scalar { .. } => false,
    };
    let is_aligned = [
        source && starts(|l| l.source),
        copy.target_offset.is_multiple_of(width) && starts(|l| l.target),
    ];
    copy.loops.push(last);
    is_aligned.contains(&true).then_some(RowCopy { copy, width, is_aligned })
}

/// The functions of a copy.
pub(super) fn copy(what: &str, c: &Copy, [source, target]: [Parameter; 2], all: &mut Functions) {
    if c.zero_first > 0 {
        let zeros = Move::Fill { len: c.zero_first, dtype: c.dtype, bits: 0 };
        all.functions.push(function(&format!("{what}: zeros"), vec![target], zeros));
    }
    let offset = match c.source_offset {
        Offset::Fixed(offset) => Some(offset.unsigned_abs()),
        Offset::Scalar { .. } => None,
    };
    let tile = by_rows(c).map(Move::CopyRows);
    let tile = tile.or_else(|| Transposition::of(c, offset).map(Move::Transpose));
    let tile = tile.unwrap_or_else(|| Move::Copy(c.clone()));
    all.functions.push(function(what, vec![source, target], tile));
}

/// The function of a window; `tile` is [`Move::Place`] or [`Move::Take`].
pub(super) fn window(what: &str, tile: Move, parameters: Vec<Parameter>) -> Function {
    function(what, parameters, tile)
}

/// The function of a look-up.
pub(super) fn gather(what: &str, g: &Gather, parameters: Vec<Parameter>) -> Function {
    function(what, parameters, Move::Gather(g.clone()))
}

/// The function of a rotary embedding.
pub(super) fn rope(what: &str, r: &Rope, parameters: Vec<Parameter>) -> Function {
    function(what, parameters, Move::Rope(r.clone()))
}

/// The functions that add rows to a table, or write them over its.
pub(super) fn scatter(
    what: &str,
    g: &Gather,
    [ids, rows, table]: [Parameter; 3],
    adds: bool,
    all: &mut Functions,
) {
    if adds && !g.accumulate {
        let zeros = Move::Fill { len: g.outer * g.rows * g.width, dtype: g.dtype, bits: 0 };
        all.functions.push(function(&format!("{what}: zeros"), vec![table], zeros));
    }
    let workspace = all.workspaces.len();
    all.workspaces.push(2 * g.count as u64 * DType::I32.size());
    let links = Parameter { buffer: Buffer::Workspace(workspace), dtype: DType::I32 };
    all.functions.push(function(
        &format!("{what}: links"),
        vec![ids, links],
        Move::Links(g.clone()),
    ));
    let tile = if adds { Move::Scatter(g.clone()) } else { Move::Replace(g.clone()) };
    all.functions.push(function(what, vec![ids, links, rows, table], tile));
}
