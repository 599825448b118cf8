//! Tensor maps: the descriptors of the tensors that TMA copies.

use ir::DType;

/// The most dims of a tensor map.
const DIMS: usize = 5;

/// A parameter of the launch that describes a tensor to TMA: what `cuTensorMapEncodeTiled` takes,
/// with zeros out of bounds, element strides of one, no interleaving and the swizzle of 128 bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorMap {
    /// The name of the parameter.
    pub name: &'static str,
    /// Which of the function's parameters the tensor starts at, at a multiple of 16 bytes.
    pub parameter: usize,
    /// BF16, F16, F32, F8E4M3 or F8E5M2.
    pub dtype: DType,
    /// Elements of each dim, the contiguous one first.
    pub dims: Vec<u64>,
    /// Bytes from an element to the next of each dim but the first: multiples of 16.
    pub strides_bytes: Vec<u64>,
    /// Elements of a box along each dim. Those of the first one are the 128 bytes of the swizzle.
    pub box_dims: Vec<u32>,
}

impl TensorMap {
    /// The same for the host's prelude, of a tensor that starts at an address.
    pub(super) fn host(&self, base: &str) -> String {
        let list = |of: &mut dyn Iterator<Item = String>| of.collect::<Vec<String>>().join(", ");
        let dims = list(&mut self.dims.iter().map(u64::to_string));
        let strides = list(&mut self.strides_bytes.iter().map(u64::to_string));
        let boxed = list(&mut self.box_dims.iter().map(u32::to_string));
        let (count, bytes) = (self.dims.len(), self.dtype.size());
        format!("TensorMap{{{base}, {count}, {{{dims}}}, {{{strides}}}, {{{boxed}}}, {bytes}}}")
    }

    /// Adds dims of loops over batch, and returns which ones have them; none where the map cannot
    /// be encoded.
    pub(super) fn add_batch(&mut self, batch: &[[usize; 2]]) -> Option<Vec<usize>> {
        let bytes = self.dtype.size() as usize;
        let mut dims = Vec::new();
        for (at, [size, stride]) in batch.iter().enumerate() {
            if *size <= 1 || *stride == 0 {
                continue;
            }
            dims.push(at);
            self.dims.push(*size as u64);
            self.strides_bytes.push((stride * bytes) as u64);
            self.box_dims.push(1);
        }
        let is_encodable = self.dims.len() <= DIMS
            && self.dims.iter().all(|size| *size <= 1 << 31)
            && self.strides_bytes.iter().all(|bytes| bytes.is_multiple_of(16) && *bytes < 1 << 40);
        is_encodable.then_some(dims)
    }
}
