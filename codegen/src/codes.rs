//! Products of codes: where tensor cores multiply 8 bits, products that read numbers rounded to
//! codes in blocks ([`crate::quantise`]) read the codes and what they are worth.
//!
//! Both operands lie by rows of what is summed, as instructions for 8 bits demand: others are
//! transposed, weights after they are coded, activations before, so that their blocks are of rows.
//! Sums of 128 products are multiplied by both scales and added in F32, so that results differ from
//! those of numbers by the order of sums alone. Where ranks exchange pieces of the numbers, they
//! exchange those of codes and scales instead. Operands that are found otherwise, such as slices of
//! what was exchanged, stay numbers.

use std::collections::HashMap;
use std::ops::Range;

use ir::op::{Binary, Collective, Combiner, Einsum, Unary};
use ir::sharding::PieceOrder;
use ir::target::Arch;
use ir::{DType, Dim, Function, Module, Node, Op, Target, TensorType, ValueId};

use crate::blocks::{Appended, BLOCK, Codes, LARGEST_MIN, code_max};

/// Has products read codes, where the target multiplies them.
///
/// Keeps results and their types. O(nodes + operands).
pub(crate) fn read_codes(function: &mut Function, module: &Module, target: Option<Target>) {
    let multiplies = target.and_then(Target::arch).is_some_and(|arch| arch >= Arch::Sm89);
    let has_codes = |ty: &TensorType| matches!(ty.dtype, DType::F8E4M3 | DType::F8E5M2);
    if !multiplies || !function.values.iter().any(|value| has_codes(&value.ty)) {
        return;
    }
    let mut reader = Reader {
        source: function,
        producers: function.producers(),
        made: Appended::to_values_of(function, module),
        read: HashMap::new(),
        exchanged: HashMap::new(),
    };
    for node in &function.nodes {
        let scaled = reader.scaled(node).unwrap_or_else(|| node.clone());
        reader.made.function.nodes.push(scaled);
    }
    *function = reader.made.function;
    ir::pass::remove_dead_nodes(function);
    ir::pass::remove_common_nodes(function);
}

/// An operand that was rounded to codes.
struct Rounded {
    value: ValueId,
    /// Of the sizes of the operand, cut in blocks.
    codes: ValueId,
    /// What numbers were multiplied with, by block.
    scale: ValueId,
    /// The dims of the operand that each dim of the scale stands for, and whether it is of blocks.
    dims: Vec<(Range<usize>, bool)>,
    /// The exchange of pieces between the codes and the operand.
    gathered: Option<Gathered>,
    /// What was coded, if another order of it can be.
    numbers: Option<ValueId>,
}

/// An exchange after which each rank has the pieces of all.
struct Gathered {
    /// The dim of codes.
    of_codes: usize,
    /// That of the scale, of which each rank has its own pieces; none where all have it whole.
    of_scale: Option<usize>,
    counts: Vec<usize>,
    order: PieceOrder,
    axis: String,
}

/// How a product reads an operand.
struct Order {
    /// The dims that are kept, then those that are summed.
    perm: Vec<usize>,
    /// Their letters.
    letters: Vec<char>,
    runs_first: bool,
    /// How many dims of the scale come before those of the other side.
    split: usize,
    /// How many dims are kept.
    kept: usize,
    /// How many dims a run of what is summed is of.
    blocked: usize,
}

/// Codes by rows, and what they are worth.
#[derive(Clone, Copy)]
struct Read {
    codes: ValueId,
    scales: ValueId,
    runs_first: bool,
}

struct Reader<'f, 'm> {
    source: &'f Function,
    producers: Vec<Option<usize>>,
    made: Appended<'m>,
    /// Codes and what they are worth, by the operand, the order, and how many dims are kept.
    read: HashMap<(ValueId, Vec<usize>, usize), Read>,
    /// Codes and scales that ranks have exchanged, by operand.
    exchanged: HashMap<ValueId, [ValueId; 2]>,
}

impl<'f> Reader<'f, '_> {
    /// The node that makes a value of the source.
    fn producer(&self, value: ValueId) -> Option<&'f Node> {
        self.producers[value.index()].map(|at| &self.source.nodes[at])
    }

    /// The product of codes that a node is; none where it is no product of two matrices of codes.
    fn scaled(&mut self, node: &Node) -> Option<Node> {
        let Op::Contract(einsum) = &node.op else { return None };
        // The rows of the result are those of the first operand.
        let (einsum, operands) = match einsum.result.first().is_some_and(|c| einsum.b.contains(c)) {
            true => (swapped(einsum), [node.operands[1], node.operands[0]]),
            false => (einsum.clone(), [node.operands[0], node.operands[1]]),
        };
        let is_batch = |c: &char| einsum.a.contains(c) && einsum.b.contains(c);
        let dtype = self.made.function.ty(node.result()).dtype;
        if einsum.result.iter().any(is_batch) || !matches!(dtype, DType::F32 | DType::BF16) {
            return None;
        }
        let summed: Vec<char> = einsum.a.iter().copied().filter(is_batch).collect();
        let side = |at: usize, letters: &[char]| {
            let kept = einsum.result.iter().copied().filter(|c| letters.contains(c));
            let rounded = self.rounded(operands[at])?;
            let order = Order::of(&rounded.dims, letters, [&kept.collect::<Vec<_>>(), &summed])?;
            Some((rounded, order))
        };
        let (of_a, of_b) = (side(0, &einsum.a)?, side(1, &einsum.b)?);
        let [in_a, in_b] = [&of_a, &of_b].map(|(_, order)| order.letters.clone());
        let read = Einsum {
            is_wide: dtype == DType::F32,
            ..Einsum::new(in_a, in_b, einsum.result.clone())
        };
        let [a, b] = [of_a, of_b].map(|of| self.operand(of));
        let runs_first = [a.runs_first, b.runs_first];
        let op = Op::ScaledContract { einsum: read, runs_first };
        let operands = vec![a.codes, b.codes, a.scales, b.scales];
        self.made.is_of_type(&op, &operands, node.result()).then_some(Node {
            op,
            operands,
            results: node.results.clone(),
        })
    }

    /// What an operand was rounded from, seen through casts and views.
    fn rounded(&self, value: ValueId) -> Option<Rounded> {
        let (mut at, mut gather) = (value, None);
        let [codes, scales] = loop {
            let node = self.producer(at)?;
            #[expect(clippy::wildcard_enum_match_arm, reason = "nothing else is looked through")]
            match &node.op {
                Op::Reshape { .. } => {}
                // Both hold all numbers that codes are.
                Op::Cast { dtype: DType::F32 | DType::BF16 } => {}
                Op::Collective { kind: Collective::AllGather { dim, counts, order }, axis }
                    if gather.is_none() =>
                {
                    gather = Some((node.operands[0], *dim, (counts, *order), axis));
                }
                Op::Binary(Binary::Div) => break [node.operands[0], node.operands[1]],
                _ => return None,
            }
            at = node.operands[0];
        };
        let cast = self.producer(codes).filter(|node| matches!(node.op, Op::Cast { .. }))?;
        let repeat = self.producer(scales)?;
        let Op::Broadcast { new, .. } = &repeat.op else { return None };
        let (codes, scale) = (cast.operands[0], repeat.operands[0]);
        // Numbers are products of codes and powers of two, which nothing rounds.
        self.made_by::<1>(scale, is_power)?;
        let ty = self.made.function.ty(codes);
        let is_code = matches!(ty.dtype, DType::F8E4M3 | DType::F8E5M2);
        if !is_code || self.made.function.ty(scale).dtype != DType::F32 {
            return None;
        }
        let mut sizes = ty.sizes()?;
        let gathered = match gather {
            None => None,
            Some((piece, dim, (counts, order), axis)) => {
                let piece = self.made.function.ty(piece).sizes()?;
                let of = Gathered::of((&piece, dim), (&sizes, new), (counts, order, axis))?;
                sizes[of.of_codes] = of.counts.iter().sum();
                Some(of)
            }
        };
        if new.iter().any(|at| sizes[*at] != BLOCK) {
            return None;
        }
        let dims = cut(&self.made.function.ty(value).sizes()?, &sizes, new)?;
        let is_whole = |numbers: &ValueId| {
            let (own, whole) = (self.source.ty(*numbers), self.source.ty(value));
            own.dims == whole.dims && own.dtype.is_float()
        };
        let numbers = self.numbers(codes, scale, new).filter(is_whole);
        Some(Rounded { value, codes, scale, dims, gathered, numbers })
    }

    /// What was coded as [`Appended::codes`] does it: then another order of it is coded alike.
    fn numbers(&self, codes: ValueId, scale: ValueId, inside: &[usize]) -> Option<ValueId> {
        let format = self.made.function.ty(codes).dtype;
        let [scaled] = self.made_by(codes, |op| matches!(op, Op::Cast { .. }))?;
        let [wide, scales] = self.made_by(scaled, |op| matches!(op, Op::Binary(Binary::Mul)))?;
        let [repeated] = self.made_by(scales, |op| matches!(op, Op::Broadcast { .. }))?;
        let [room] = self.made_by(scale, is_power)?;
        let [most, top] = self.made_by(room, |op| matches!(op, Op::Binary(Binary::Div)))?;
        let [largest, least] = self.made_by(top, |op| matches!(op, Op::Binary(Binary::Max)))?;
        let is_largest =
            |op: &Op| matches!(op, Op::Reduce { combiner: Combiner::Max, dims } if dims == inside);
        let cast = |value| self.made_by(value, |op| matches!(op, Op::Cast { .. }));
        let narrow = |value| cast(value).map_or(value, |[narrow]| narrow);
        let [sizes] = self.made_by(narrow(largest), is_largest)?;
        let [sized] = self.made_by(sizes, |op| matches!(op, Op::Unary(Unary::Abs)))?;
        let constant = |value: ValueId, wanted: f64| {
            let op = &self.producer(value)?.op;
            matches!(op, Op::Constant { value, .. } if *value == wanted).then_some(())
        };
        constant(most, code_max(format))?;
        constant(least, LARGEST_MIN)?;
        let cut = narrow(wide);
        let [numbers] = self.made_by(cut, |op| matches!(op, Op::Reshape { .. }))?;
        (sized == cut && repeated == scale).then_some(numbers)
    }

    /// The operands of what makes a value, if it is such an op.
    fn made_by<const N: usize>(
        &self,
        value: ValueId,
        is_it: impl Fn(&Op) -> bool,
    ) -> Option<[ValueId; N]> {
        let node = self.producer(value).filter(|node| is_it(&node.op))?;
        node.operands[..].try_into().ok()
    }

    /// The codes of an operand by rows of what is summed, and what they are worth.
    fn operand(&mut self, (rounded, order): (Rounded, Order)) -> Read {
        let key = (rounded.value, order.perm.clone(), order.kept);
        if let Some(there) = self.read.get(&key) {
            return *there;
        }
        let read = match rounded.numbers(&order) {
            Some(numbers) => self.coded_again(numbers, &rounded, &order),
            None => self.as_coded(rounded, &order),
        };
        self.read.insert(key, read);
        read
    }

    /// The codes that there are, transposed where they lie otherwise.
    fn as_coded(&mut self, rounded: Rounded, order: &Order) -> Read {
        let Rounded { value, codes, scale, gathered, .. } = rounded;
        let [codes, scale] = match gathered {
            None => [codes, scale],
            Some(of) => self.gathered(value, [codes, scale], of),
        };
        let name = format!("{}.whole", self.made.function.value(codes).name);
        let dims = self.made.function.ty(value).dims.clone();
        let mut whole = self.made.push(&name, Op::Reshape { dims }, &[codes]);
        if !order.perm.is_sorted() {
            let perm = order.perm.clone();
            whole = self.made.push(&format!("{name}.by_rows"), Op::Transpose { perm }, &[whole]);
        }
        let scales = self.worth(scale, order.split);
        Read { codes: whole, scales, runs_first: order.runs_first }
    }

    /// Codes of transposed numbers: what is summed is blocks of rows, so that one pass makes them.
    fn coded_again(&mut self, numbers: ValueId, rounded: &Rounded, order: &Order) -> Read {
        let TensorType { dtype: format, .. } = *self.made.function.ty(rounded.codes);
        let name = format!("{}.by_rows", self.made.function.value(rounded.codes).name);
        let perm = order.perm.clone();
        let turned = self.made.push(&format!("{name}.of"), Op::Transpose { perm }, &[numbers]);
        let dims = self.made.function.ty(turned).dims.clone();
        let mut cut = dims.clone();
        let inner = cut.split_off(dims.len() - order.blocked);
        let points: i64 = inner.iter().filter_map(Dim::as_constant).product();
        cut.push(Dim::constant(points / BLOCK as i64));
        cut.push(Dim::constant(BLOCK as i64));
        let inside = [cut.len() - 1];
        let Codes { codes, scale, .. } = self.made.codes((&name, turned), (&cut, &inside), format);
        let whole = self.made.push(&format!("{name}.whole"), Op::Reshape { dims }, &[codes]);
        let scales = self.worth(scale, order.kept);
        Read { codes: whole, scales, runs_first: false }
    }

    /// What codes of one are worth as a matrix, given how many dims of their scale are its rows.
    fn worth(&mut self, scale: ValueId, split: usize) -> ValueId {
        let name = self.made.function.value(scale).name.clone();
        let dims = self.made.function.ty(scale).dims.clone();
        let count = |dims: &[Dim]| dims.iter().filter_map(Dim::as_constant).product::<i64>();
        let matrix = [count(&dims[..split]), count(&dims[split..])].map(Dim::constant).to_vec();
        let one = self.made.constant(&format!("{name}.one"), 1.0, scale);
        let worth = Op::Binary(Binary::Div);
        let worth = self.made.push(&format!("{name}.worth"), worth, &[one, scale]);
        self.made.push(&format!("{name}.by_runs"), Op::Reshape { dims: matrix }, &[worth])
    }

    /// The codes of an operand and their scale, with the pieces of all ranks.
    fn gathered(
        &mut self,
        operand: ValueId,
        [codes, scale]: [ValueId; 2],
        Gathered { of_codes, of_scale, counts, order, axis }: Gathered,
    ) -> [ValueId; 2] {
        if let Some(there) = self.exchanged.get(&operand) {
            return *there;
        }
        let both = [(codes, Some(of_codes)), (scale, of_scale)].map(|(pieces, dim)| {
            let Some(dim) = dim else { return pieces };
            let kind = Collective::AllGather { dim, counts: counts.clone(), order };
            let name = format!("{}.{axis}", self.made.function.value(pieces).name);
            self.made.push(&name, Op::Collective { kind, axis: axis.clone() }, &[pieces])
        });
        self.exchanged.insert(operand, both);
        both
    }
}

impl Rounded {
    /// The numbers that are coded again for an order: where codes would have to be transposed, and
    /// blocks are of what is summed alone.
    fn numbers(&self, order: &Order) -> Option<ValueId> {
        let is_turned = !order.perm.is_sorted() && self.gathered.is_none();
        let blocked = self.dims.iter().filter(|(_, is_blocked)| *is_blocked).count();
        self.numbers.filter(|_| is_turned && blocked == 1)
    }
}

impl Gathered {
    /// The exchange of codes and scales that stands for one of numbers, given the sizes of this
    /// rank's piece of numbers and the dim along which pieces lie, the sizes of its codes and which
    /// of their dims are inside of blocks; none where blocks are cut, unless there is one, whose
    /// scale all ranks have.
    fn of(
        (piece, dim): (&[usize], usize),
        (sizes, inside): (&[usize], &[usize]),
        (counts, order, axis): (&[usize], PieceOrder, &str),
    ) -> Option<Gathered> {
        // Ranks without elements would not see which dim is cut.
        if counts.contains(&0) {
            return None;
        }
        let mut outside = (0..sizes.len()).filter(|at| !inside.contains(at));
        let axis = axis.to_owned();
        if piece == sizes {
            let of_scale = outside.clone().position(|at| at == dim);
            return Some(Gathered {
                of_codes: dim,
                of_scale,
                counts: counts.to_vec(),
                order,
                axis,
            });
        }
        let dims = cut(piece, sizes, inside)?;
        let at = dims.iter().position(|(of, _)| of.start == dim)?;
        let (of, is_blocked) = &dims[at];
        let (of_codes, inner) =
            (outside.nth(at)?, piece[dim + 1..of.end].iter().product::<usize>());
        let points = counts.iter().map(|count| count * inner);
        if *is_blocked && sizes[of_codes + 1] != BLOCK {
            let (of_codes, counts) = (of_codes + 1, points.collect());
            let is_one = sizes[of_codes - 1] == 1;
            return is_one.then_some(Gathered { of_codes, of_scale: None, counts, order, axis });
        }
        let block = if *is_blocked { BLOCK } else { 1 };
        let blocks = |points: usize| points.is_multiple_of(block).then_some(points / block);
        let counts = points.map(blocks).collect::<Option<Vec<usize>>>()?;
        let of_scale = Some(at);
        order.allows(&counts).then_some(Gathered { of_codes, of_scale, counts, order, axis })
    }
}

fn is_power(op: &Op) -> bool {
    matches!(op, Op::Unary(Unary::PowerFloor))
}

/// The same product of the operands in the other order.
fn swapped(einsum: &Einsum) -> Einsum {
    Einsum { a: einsum.b.clone(), b: einsum.a.clone(), ..einsum.clone() }
}

impl Order {
    /// The order of an operand whose scale has `dims`; none where dims that are kept and summed
    /// are mixed, lie otherwise than in the result and in the other operand, or have no whole runs.
    fn of(
        dims: &[(Range<usize>, bool)],
        letters: &[char],
        [kept, summed]: [&[char]; 2],
    ) -> Option<Order> {
        let own = |of: &[char]| letters.iter().copied().filter(|c| of.contains(c)).collect();
        let in_order: [Vec<char>; 2] = [own(kept), own(summed)];
        if in_order[0] != kept || in_order[1] != summed {
            return None;
        }
        let is_summed = |(dims, _): &(Range<usize>, bool)| summed.contains(&letters[dims.start]);
        let runs_first = dims.first().is_some_and(is_summed);
        let split = dims.iter().take_while(|of| is_summed(of) == runs_first).count();
        if dims[split..].iter().any(|of| is_summed(of) == runs_first) {
            return None;
        }
        // A block is of what is innermost on its side, and what is summed has some.
        let place = |c: &char| letters.iter().position(|own| own == c);
        let ends_in =
            |of: &[char], dims: &Range<usize>| of.last().and_then(place) == Some(dims.end - 1);
        let fits =
            |of: &&(Range<usize>, bool)| ends_in(if is_summed(of) { summed } else { kept }, &of.0);
        let blocked: Vec<&(Range<usize>, bool)> =
            dims.iter().filter(|(_, blocked)| *blocked).collect();
        if !blocked.iter().all(fits) || !blocked.iter().any(|of| is_summed(of)) {
            return None;
        }
        let perm = kept.iter().chain(summed).filter_map(place).collect();
        let run = blocked.iter().find(|of| is_summed(of)).map(|(dims, _)| dims.len())?;
        let letters = [kept, summed].concat();
        Some(Order { perm, letters, runs_first, split, kept: kept.len(), blocked: run })
    }
}

/// The dims of an operand that each dim of its scale stands for, and whether they are cut in
/// blocks, given the sizes of the operand, those of its codes and which of the latter are inside of
/// blocks.
fn cut(sizes: &[usize], cut: &[usize], inside: &[usize]) -> Option<Vec<(Range<usize>, bool)>> {
    let (mut dims, mut next) = (Vec::new(), 0);
    for at in (0..cut.len()).filter(|at| !inside.contains(at)) {
        let is_blocked = inside.contains(&(at + 1));
        let count = if is_blocked { cut[at] * cut[at + 1] } else { cut[at] };
        let first = next;
        let mut found = 1;
        while next == first || found < count {
            found *= sizes.get(next)?;
            next += 1;
        }
        if found != count {
            return None;
        }
        dims.push((first..next, is_blocked));
    }
    (next == sizes.len()).then_some(dims)
}

#[cfg(test)]
mod tests;
