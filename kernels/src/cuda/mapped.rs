//! What TMA copies to shared memory for `wgmma`, and what it stores of results.

use ir::DType;

use super::index::coordinate_of;
use super::loops::Loops;
use super::tensor_map::TensorMap;
use super::text::{Text, line};
use crate::kernel::Product;

/// Rows of the result of a warpgroup.
pub(super) const ROWS: usize = 64;
/// Elements of a row of a stage that is along m or n.
pub(super) const SIDE: usize = 64;
/// Bytes of 64 rows or columns of a stage of an operand.
pub(super) const HALF: usize = 64 * SWIZZLE_ROW;
/// Bytes of a row of the swizzle.
pub(super) const SWIZZLE_ROW: usize = 128;

/// An operand that TMA copies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MappedOperand {
    /// Whether rows of a tile are along k; else along m or n.
    pub k_major: bool,
    /// What the launch passes.
    pub map: TensorMap,
    /// The loops over batch that the map has dims for.
    batch: Vec<usize>,
}

/// A result that TMA stores.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MappedResult {
    /// What the launch passes.
    pub map: TensorMap,
    /// The loops over batch that the map has dims for; none where it is of a workspace, whose last
    /// dim counts slices and batches.
    batch: Option<Vec<usize>>,
}

/// Several loops as one: its size and stride. A single point has any stride.
pub(super) fn merged(loops: &[[usize; 2]]) -> Option<[usize; 2]> {
    let mut whole: Option<[usize; 2]> = None;
    for [size, stride] in loops.iter().rev().filter(|[size, _]| *size > 1) {
        match &mut whole {
            None => whole = Some([*size, *stride]),
            Some([inside, step]) if *stride == *inside * *step => *inside *= size,
            Some(_) => return None,
        }
    }
    Some(whole.unwrap_or([1, 0]))
}

impl MappedOperand {
    /// How TMA copies tiles of an operand with `extent` rows or columns, given its loops over
    /// batch, over m or n, and over k; none where a box of five dims with strides of 16 bytes
    /// cannot have them.
    pub(super) fn of(
        (name, parameter, dtype): (&'static str, usize, DType),
        [batch, side, k]: [&[[usize; 2]]; 3],
        extent: usize,
    ) -> Option<MappedOperand> {
        let (side, k) = (merged(side)?, merged(k)?);
        let bytes = dtype.size() as usize;
        let (chunk, row) = (16 / bytes, SWIZZLE_ROW / bytes);
        let may_lead = |[size, stride]: [usize; 2]| size == 1 || stride == 1;
        let may_follow =
            |[size, stride]: [usize; 2]| size == 1 || stride > 0 && stride.is_multiple_of(chunk);
        let k_major = may_lead(k) && may_follow(side);
        let mn_major = bytes == 2 && extent >= SIDE && may_lead(side) && may_follow(k);
        if !(k_major || mn_major) {
            return None;
        }
        let ([first, _], [second, stride]) = if k_major { (k, side) } else { (side, k) };
        let stride = if second == 1 { first.next_multiple_of(chunk) } else { stride };
        let mut map = TensorMap {
            name,
            parameter,
            dtype,
            dims: vec![first as u64, second as u64],
            strides_bytes: vec![(stride * bytes) as u64],
            box_dims: vec![row as u32, if k_major { extent } else { row } as u32],
        };
        let batch = map.add_batch(batch)?;
        Some(MappedOperand { k_major, map, batch })
    }

    /// Prints the copies of a stage, which has `extent` rows or columns; the second half of them
    /// may be of another tensor of the same shape.
    pub(super) fn print_copy(
        &self,
        (side, extent): (&str, usize),
        (batch, other): (&[usize], Option<&TensorMap>),
        text: &mut Text,
    ) {
        let TensorMap { name, .. } = &self.map;
        let operand = name.trim_end_matches("_map");
        let boxes = if self.k_major && other.is_none() { 1 } else { extent / SIDE };
        for at in 0..boxes {
            let to = format!("{operand}_stage + {}", at * HALF);
            let name = other.filter(|_| at == 1).map_or(*name, |map| map.name);
            let first = if other.is_some() { 0 } else { at * SIDE };
            let coordinates = self.coordinates(&format!("block_{side} + {first}"), batch);
            line!(text, "tma_load({to}, {name}, full + stage, {coordinates});");
        }
    }

    /// The coordinates of the box of a step, from a row or column on.
    pub(super) fn coordinates(&self, side: &str, batch: &[usize]) -> String {
        let k = format!("(i32)(first_k + step * {})", self.map.box_dims[0]);
        let side = format!("(i32)({side})");
        let [first, second] = if self.k_major { [k, side] } else { [side, k] };
        let of_batch = |at: &usize| format!(", (i32)({})", coordinate_of(batch, *at, "batch"));
        let batch: String = self.batch.iter().map(of_batch).collect();
        format!("{first}, {second}{batch}")
    }
}

impl MappedResult {
    /// How TMA stores the result of a product, which is parameter 2; none where it cannot.
    pub(super) fn of(p: &Product) -> Option<MappedResult> {
        let loops = Loops::of(p);
        let ([rows, stride], [columns, unit]) = (merged(&loops.m[1])?, merged(&loops.n[1])?);
        let bytes = p.stored.c.size() as usize;
        let fits =
            (columns == 1 || unit == 1) && (rows == 1 || (stride * bytes).is_multiple_of(16));
        let stride = if rows == 1 { columns.next_multiple_of(16) } else { stride };
        let mut map = TensorMap {
            name: "c_map",
            parameter: 2,
            dtype: p.stored.c,
            dims: vec![columns as u64, rows as u64],
            strides_bytes: vec![(stride * bytes) as u64],
            box_dims: vec![(SWIZZLE_ROW / bytes) as u32, ROWS as u32],
        };
        let batch = map.add_batch(&loops.batch[2]).filter(|_| fits && matches!(bytes, 2 | 4))?;
        Some(MappedResult { map, batch: Some(batch) })
    }

    /// How TMA stores the slices of a product, to the workspace of that parameter; none where it
    /// cannot.
    pub(super) fn of_slices(p: &Product, parameter: usize) -> Option<MappedResult> {
        let [batch, m, n, _] = p.sizes();
        let bytes = DType::F32.size() as usize;
        let mut map = TensorMap {
            name: "c_map",
            parameter,
            dtype: DType::F32,
            dims: vec![n as u64, m as u64],
            strides_bytes: vec![(n * bytes) as u64],
            box_dims: vec![(SWIZZLE_ROW / bytes) as u32, ROWS as u32],
        };
        map.add_batch(&[[p.tiling.split * batch, m * n]])?;
        Some(MappedResult { map, batch: None })
    }

    /// Columns of a box.
    pub(super) fn columns(&self) -> usize {
        self.map.box_dims[0] as usize
    }

    /// Bytes of an element.
    pub(super) fn bytes(&self) -> usize {
        self.map.dtype.size() as usize
    }

    /// The coordinates of a tile along batch, and slices where there are some.
    pub(super) fn batch(&self, product: &Product) -> String {
        let sizes: Vec<usize> = product.batch.iter().map(|l| l.size).collect();
        let coordinate = |at| format!(", (i32)({})", coordinate_of(&sizes, at, "batch"));
        match &self.batch {
            Some(batch) => batch.iter().copied().map(coordinate).collect(),
            None => format!(", (i32)(slice * {}ULL + batch)", product.sizes()[0]),
        }
    }
}
