//! Products of small integers that a module computes in floating-point numbers, as products of
//! integers.
//!
//! A quantised model subtracts zero points from numbers of 8 bits and multiplies the differences,
//! of 9 bits, in f64, which has all sums of them. Where [`crate::ranges`] proves that operands have
//! 16 bits and sums 32, kernels multiply integers, and each result is the same number. Differences
//! are multiplied as they are: to take the zero points out as sums of rows and columns would read
//! operands once more, and gains nothing where bytes are multiplied in 16 bits.

use ir::op::{Binary, Convolution, Einsum, Operands};
use ir::{DType, Dim, Function, Node, Op, TensorType, Value, ValueId};

use crate::ranges::{Known, Range, exact, known};

/// Replaces products of floating-point numbers that are small integers. `given` are the ranges of
/// parameters of which more is known than their type.
///
/// Keeps results and their types. O(nodes × products).
pub(crate) fn multiply_integers(function: &mut Function, given: impl Fn(ValueId) -> Option<Range>) {
    let is_product = |node: &Node| matches!(node.op, Op::Contract(_) | Op::Conv(_));
    if !function.nodes.iter().any(is_product) {
        return;
    }
    let known = known(function, given);
    let nodes = std::mem::take(&mut function.nodes);
    let twins = vec![None; function.values.len()];
    let mut pass = Pass { function, known, twins };
    nodes.into_iter().for_each(|node| pass.node(node));
}

/// Stores weights of 8 bits as such, where nothing but products of integers reads them. `given` is
/// as for [`multiply_integers`].
pub(crate) fn store_bytes(function: &mut Function, given: impl Fn(ValueId) -> Option<Range>) {
    let bytes = Range::new(i8::MIN, i8::MAX);
    let mut is_byte: Vec<bool> = function
        .params()
        .map(|param| {
            let fits = given(param).is_some_and(|range| range.is_within(bytes));
            fits && function.ty(param).dtype == DType::I32 && !function.results.contains(&param)
        })
        .collect();
    for node in &function.nodes {
        for (at, operand) in node.operands.iter().enumerate() {
            // An image, whose elements move as those of f32 do, is not made of bytes.
            let is_weight = matches!(node.op, Op::Conv(_)) && at == 1;
            let may_be = is_weight || matches!(node.op, Op::Contract(_));
            let is_read = may_be && function.ty(node.results[0]).dtype == DType::I32;
            if let Some(is_byte) = is_byte.get_mut(operand.index()) {
                *is_byte &= is_read;
            }
        }
    }
    for (value, is_byte) in function.values.iter_mut().zip(is_byte) {
        if is_byte {
            value.ty.dtype = DType::I8;
        }
    }
}

struct Pass<'f> {
    function: &'f mut Function,
    /// Of the values that the function had.
    known: Vec<Option<Known>>,
    /// For floating-point values, the same numbers as integers of 32 bits, where these are made.
    twins: Vec<Option<ValueId>>,
}

impl Pass<'_> {
    fn node(&mut self, mut node: Node) {
        // A call may have no result.
        let Some(result) = node.results.first().copied() else {
            return self.function.nodes.push(node);
        };
        if let Op::Cast { dtype: DType::I32 } = node.op
            && let Some(twin) = self.twins[node.operands[0].index()]
        {
            // A cast between equal types is a view.
            let dims = self.function.ty(result).dims.clone();
            node = Node { op: Op::Reshape { dims }, operands: vec![twin], results: vec![result] };
        }
        if !self.is_exact(&node) {
            return self.function.nodes.push(node);
        }
        let operands = node.operands.iter().map(|operand| self.twin(*operand)).collect();
        let sums = self.made(result, node.op, operands);
        self.twins[result.index()] = Some(sums);
        let dtype = self.function.ty(result).dtype;
        let op = Op::Cast { dtype };
        self.function.nodes.push(Node { op, operands: vec![sums], results: vec![result] });
    }

    /// Whether a node is a product whose operands have 16 bits, and whose sums have 32 and are all
    /// numbers of its type.
    fn is_exact(&self, node: &Node) -> bool {
        #[expect(clippy::wildcard_enum_match_arm, reason = "other ops are no products")]
        let terms = match &node.op {
            Op::Contract(einsum) => self.terms(node, einsum),
            Op::Conv(c) => self.taps(node, c),
            _ => None,
        };
        let dtype = self.function.ty(node.results[0]).dtype;
        let (Some(terms), Some(exact)) = (terms, exact(dtype)) else { return false };
        let words = Range::new(i16::MIN, i16::MAX);
        let largest = |operand: &ValueId| {
            let known = self.known[operand.index()]?;
            let is_word = known.is_whole && known.range.is_within(words);
            is_word.then(|| known.range.low.abs().max(known.range.high.abs()))
        };
        let largest: Option<Vec<i128>> = node.operands.iter().map(largest).collect();
        largest.is_some_and(|largest| {
            let most = i128::from(terms) * largest.iter().product::<i128>();
            most <= i128::from(i32::MAX).min(exact.high)
        })
    }

    /// How many products are added to one element of a contraction.
    fn terms(&self, node: &Node, einsum: &Einsum) -> Option<i64> {
        let sizes = self.function.ty(node.operands[0]).sizes()?;
        let summed = einsum.a.iter().zip(&sizes).filter(|(l, _)| !einsum.result.contains(l));
        let terms = summed.map(|(_, size)| *size as i64).product();
        (einsum.operands == Operands::Exact).then_some(terms)
    }

    /// The same of a convolution.
    fn taps(&self, node: &Node, c: &Convolution) -> Option<i64> {
        let weights = c.orders[1].usual(&self.function.ty(node.operands[1]).sizes()?);
        Some(weights.iter().skip(1).map(|size| *size as i64).product())
    }

    /// The integers that a value holds, in 32 bits: by the integers that it was made of, where it
    /// was, so that these are not converted twice.
    fn twin(&mut self, value: ValueId) -> ValueId {
        if self.function.ty(value).dtype == DType::I32 {
            return value;
        }
        if let Some(twin) = self.twins.get(value.index()).copied().flatten() {
            return twin;
        }
        let producer = self.function.nodes.iter().rev().find(|node| node.results.contains(&value));
        let (op, operands) = match producer {
            Some(node) => (Some(node.op.clone()), node.operands.clone()),
            None => (None, Vec::new()),
        };
        #[allow(clippy::wildcard_enum_match_arm, reason = "other ops are cast as a whole")]
        let twin = match op {
            Some(Op::Constant { value: number, dims, .. }) => {
                let op = Op::Constant { value: number, dtype: DType::I32, dims };
                self.made(value, op, Vec::new())
            }
            Some(Op::Cast { .. }) if self.is_word(operands[0]) => self.twin(operands[0]),
            Some(Op::Binary(Binary::Sub | Binary::Add)) if self.is_zero(operands[1]) => {
                self.twin(operands[0])
            }
            Some(op @ Op::Binary(Binary::Sub | Binary::Add))
                if operands.iter().all(|operand| self.is_word(*operand)) =>
            {
                let operands = operands.iter().map(|operand| self.twin(*operand)).collect();
                self.made(value, op, operands)
            }
            Some(
                op @ (Op::Broadcast { .. }
                | Op::Reshape { .. }
                | Op::Transpose { .. }
                | Op::Slice { .. }),
            ) => {
                let x = self.twin(operands[0]);
                self.made(value, op, vec![x])
            }
            _ => self.made(value, Op::Cast { dtype: DType::I32 }, vec![value]),
        };
        if let Some(known) = self.twins.get_mut(value.index()) {
            *known = Some(twin);
        }
        twin
    }

    /// Whether all elements of a value that the function had are integers of 16 bits.
    fn is_word(&self, value: ValueId) -> bool {
        let words = Range::new(i16::MIN, i16::MAX);
        let known = self.known.get(value.index()).copied().flatten();
        known.is_some_and(|known| known.is_whole && known.range.is_within(words))
    }

    fn is_zero(&self, value: ValueId) -> bool {
        let known = self.known.get(value.index()).copied().flatten();
        known.is_some_and(|known| known.is_whole && known.range == Range::new(0, 0))
    }

    /// A new value of integers with the dims of another one.
    fn made(&mut self, like: ValueId, op: Op, operands: Vec<ValueId>) -> ValueId {
        let dims: Vec<Dim> = self.function.ty(like).dims.clone();
        let name = format!("{}.i32", self.function.value(like).name);
        let made = ValueId(self.function.values.len() as u32);
        self.function.values.push(Value::new(name, TensorType { dtype: DType::I32, dims }));
        self.function.nodes.push(Node { op, operands, results: vec![made] });
        made
    }
}

#[cfg(test)]
mod tests {
    use ir::build::Builder;
    use ir::{Kind, Module};

    use super::*;

    /// The element types of result, image and weights after the pass, of a 2 × 2 convolution in f64
    /// of integers up to `most`.
    fn convolution(channels: usize, most: [i64; 2]) -> [DType; 3] {
        let mut module = Module::default();
        let mut b = Builder::new(&mut module, "f", Kind::Layer);
        let [x, w] = [[1, channels, 5, 5], [3, channels, 2, 2]]
            .map(|dims| b.param("x", TensorType::of(DType::I32, &dims)));
        let operands = [x, w].map(|of| b.push("wide", Op::Cast { dtype: DType::F64 }, &[of]));
        let convolution = Convolution {
            stride: vec![1; 2],
            before: vec![0; 2],
            after: vec![0; 2],
            dilation: vec![1; 2],
            spread: vec![1; 2],
            orders: Default::default(),
        };
        let y = b.push("y", Op::Conv(convolution), &operands);
        let mut function = b.into_function(&[y]);
        let given = |param: ValueId| Some(Range::new(-most[param.index()], most[param.index()]));
        multiply_integers(&mut function, given);
        ir::pass::remove_dead_nodes(&mut function);
        store_bytes(&mut function, given);
        let product = function.nodes.iter().find(|node| matches!(node.op, Op::Conv(_)));
        let result = product.expect("it is there").result();
        [result, x, w].map(|value| function.ty(value).dtype)
    }

    /// The elements of a window count in all channels.
    #[test]
    fn sums_fit_32_bits_or_stay_as_they_are() {
        // Three channels of four products each: 12 × 13,378² is too large.
        assert_eq!(convolution(3, [13_377; 2])[0], DType::I32);
        assert_eq!(convolution(3, [13_378; 2])[0], DType::F64);
        assert_eq!(convolution(1, [32_768, 2])[0], DType::F64, "it has more than 16 bits");
    }

    /// Images have borders, which are packed as elements of 32 bits.
    #[test]
    fn weights_of_bytes_are_stored_as_such_and_images_are_not() {
        assert_eq!(convolution(2, [100; 2]), [DType::I32, DType::I32, DType::I8]);
        assert_eq!(convolution(2, [100, 200]), [DType::I32; 3]);
    }
}
