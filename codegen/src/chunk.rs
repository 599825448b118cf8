//! Chunks: a value far wider than what it is made of is computed in pieces of its rows.
//!
//! The logits of a vocabulary are the case: fifty times as wide as the hidden states of which they
//! are a product, and read by nothing but the loss and its gradient. Where they are no result, the
//! product and all that follows of it run once for each piece of the rows: operands are cut along
//! these rows, results too, or are sums to which each piece adds its term. What follows from a cut
//! is what [`factors`] says, as for a cut over ranks; the pieces come one after the other.
//!
//! Over parts of a vocabulary, each piece makes the exchanges of its rows; which values are wide
//! follows from the whole function, so that all ranks make them alike.
//!
//! Logits that are kept for the gradient are a result of the forward function, so that whether
//! they are chunked is decided by what the plan keeps.
//!
//! Tokens that ranks dispatch to each other's experts are the other case: see [`token_pieces`].

mod tokens;

use std::collections::BTreeMap;

use ir::factors::{Factor, factors, make_local};
use ir::op::{Collective, Combiner};
use ir::sharding::Layout;
use ir::{Class, Dim, Function, Kind, Module, Node, Op, Target, TensorType, Value, ValueId};

pub(crate) use tokens::cut_tokens;
pub use tokens::token_pieces;

/// From which size on rows are computed in pieces, and how large these are at least.
struct Limits {
    /// The least bytes of a value that is worth its chunks.
    wide_bytes: u64,
    /// The fewest rows of a piece.
    rows_min: usize,
}

impl Limits {
    /// Chosen: on CPUs less than 8 MiB is no matter beside the rest, and each piece packs the
    /// weights again, which for 256 rows takes about a tenth of its time.
    const OF_CPUS: Limits = Limits { wide_bytes: 8 << 20, rows_min: 256 };

    /// Chosen: tiles of 128 × 128 of 1,024 rows fill the multiprocessors of an H100 twenty times
    /// for a vocabulary of 50,000, and the gradient of the table, to which each piece adds, is read
    /// and written eight times for 8,192 tokens.
    const OF_GPUS: Limits = Limits { wide_bytes: 128 << 20, rows_min: 1024 };

    fn of(target: Option<Target>) -> Limits {
        match target {
            Some(Target::Cuda(_)) => Limits::OF_GPUS,
            Some(Target::Cpu(_)) | None => Limits::OF_CPUS,
        }
    }
}

/// How much wider than its operand a product is, at least. Chosen: the inner layers of blocks are
/// up to four times as wide, and kept.
const WIDE_RATIO: usize = 8;

/// The part of a function that runs in pieces.
#[derive(Clone, Debug)]
pub(crate) struct Chunks {
    /// One piece.
    pub(crate) body: Function,
    /// How many there are.
    pub(crate) count: usize,
    /// How the operands of the call lie in pieces.
    pub(crate) operands: Vec<Layout>,
    /// And its results: cut, or sums.
    pub(crate) results: Vec<Layout>,
}

impl Chunks {
    /// Whether a node calls for the pieces.
    pub(crate) fn is_call(&self, node: &Node) -> bool {
        node.callee() == Some(self.body.name.as_str())
    }
}

/// A function in which the part that is worth it is one call, and that part; none where there is
/// no such part.
///
/// Keeps results and their types; sums over rows are added piece by piece. O(nodes²).
pub(crate) fn cut_rows(
    function: &Function,
    module: &Module,
    wide: &Wide,
) -> Option<(Function, Chunks)> {
    let seed = |node: usize| {
        let result = function.nodes[node].results[0];
        let cut = wide.values.get(&function.value(result).name)?;
        let is_whole = function.ty(result).sizes()?.get(cut.dim) == Some(&cut.size);
        let is_made = matches!(function.nodes[node].op, Op::Contract(_));
        let is_kept = function.results.contains(&result);
        let seed = Seed { node, dim: cut.dim, count: cut.count, may_exchange: wide.is_agreed };
        (is_whole && is_made && !is_kept).then_some(seed)
    };
    let seeds = (0..function.nodes.len()).filter_map(seed);
    seeds.filter_map(|seed| Region::grow(function, module, wide, seed)?.outline()).next()
}

/// The wide values of a function, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Wide {
    values: BTreeMap<String, Cut>,
    /// The elements of all values, where one is wide.
    counts: BTreeMap<String, usize>,
    /// Whether all ranks find the same, so that they make each exchange as often.
    is_agreed: bool,
}

/// Which dim of a value is cut, how long that is, and in how many pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Cut {
    dim: usize,
    size: usize,
    count: usize,
}

/// What a name was made of to tell it from an equal one: a copy is `again`, or has a number.
pub(crate) fn stem(name: &str) -> Option<&str> {
    let (stem, end) = name.rsplit_once('.')?;
    let is_number = !end.is_empty() && end.bytes().all(|byte| byte.is_ascii_digit());
    (end == "again" || is_number).then_some(stem)
}

impl Wide {
    /// The wide values of a function that one rank runs by itself.
    pub(crate) fn of(function: &Function, target: Option<Target>) -> Wide {
        Wide { is_agreed: false, ..Wide::of_ranks(function, &|_| None, [1; 3], target) }
    }

    /// The wide values of a function that `ranks` ranks along `[dp, cp, tp]` share; `tokens` says
    /// which dim of a value is cut along `cp`. They follow from the whole function, so that a rank
    /// with a shorter piece of the vocabulary finds the same.
    pub(crate) fn of_ranks(
        function: &Function,
        tokens: &dyn Fn(&str) -> Option<usize>,
        ranks: [usize; 3],
        target: Option<Target>,
    ) -> Wide {
        let limits = Limits::of(target);
        let name = |node: &Node| function.value(node.results[0]).name.clone();
        let nodes = function.nodes.iter();
        let cut = |node: &Node| cut(function, node, (tokens(&name(node)), ranks), &limits);
        let found = nodes.filter_map(|node| Some((name(node), cut(node)?)));
        let values: BTreeMap<String, Cut> = found.collect();
        let count = |value: &Value| Some((value.name.clone(), value.ty.count()?));
        let all = function.values.iter().filter(|_| !values.is_empty());
        Wide { counts: all.filter_map(count).collect(), values, is_agreed: true }
    }
}

/// A product whose result is wide, which dim of that is cut, and in how many pieces.
#[derive(Clone, Copy, Debug)]
struct Seed {
    node: usize,
    dim: usize,
    count: usize,
    may_exchange: bool,
}

/// How the result of a node is cut if it is wide.
fn cut(
    function: &Function,
    node: &Node,
    (tokens, [dp, cp, tp]): (Option<usize>, [usize; 3]),
    limits: &Limits,
) -> Option<Cut> {
    let cp = if tokens.is_some() { cp } else { 1 };
    let Op::Contract(einsum) = &node.op else { return None };
    let ty = function.ty(node.result());
    let (sizes, elements) = (ty.sizes()?, ty.count()?);
    let bytes = ty.bytes()? / ((dp * cp * tp) as u64);
    if bytes < limits.wide_bytes {
        return None;
    }
    // As few as make a piece no longer wide.
    let wanted = bytes.div_ceil(limits.wide_bytes).max(2);
    let sides = [(&einsum.a, &einsum.b), (&einsum.b, &einsum.a)];
    for ((own, other), operand) in sides.into_iter().zip(&node.operands) {
        let is_row = |dim: &usize| {
            let letter = &einsum.result[*dim];
            own.contains(letter) && !other.contains(letter)
        };
        let rows: Vec<usize> = (0..sizes.len()).filter(is_row).collect();
        let count = rows.iter().map(|dim| sizes[*dim]).product::<usize>();
        let count = count / (dp * cp * limits.rows_min);
        // Samples, the first dim, are cut over ranks already.
        let uncut = rows.into_iter().filter(|dim| dp == 1 || *dim > 0);
        let dim = uncut.max_by_key(|dim| sizes[*dim]);
        let narrow = function.ty(*operand).count()?;
        if let Some(dim) = dim.filter(|_| elements >= WIDE_RATIO * narrow) {
            let size = if tokens == Some(dim) { sizes[dim] / cp } else { sizes[dim] };
            return pieces(size, wanted, count).map(|count| Cut { dim, size, count });
        }
    }
    None
}

/// The number of equal pieces of `size` that is next to `wanted`, and `most` at most; none where
/// there is but one.
fn pieces(size: usize, wanted: u64, most: usize) -> Option<usize> {
    let fits = |count: &usize| size.is_multiple_of(*count);
    let enough = usize::try_from(wanted).ok().and_then(|wanted| (wanted.max(2)..=most).find(fits));
    enough.or_else(|| (2..=most).rev().find(fits))
}

/// A function with a call in place of some of its nodes; what follows of that comes after it.
fn around(function: &Function, is_inside: &dyn Fn(usize) -> bool, call: Node) -> Function {
    let mut waits = vec![false; function.values.len()];
    call.results.iter().for_each(|result| waits[result.index()] = true);
    let (mut before, mut after) = (Vec::new(), Vec::new());
    for (_, node) in function.nodes.iter().enumerate().filter(|(at, _)| !is_inside(*at)) {
        if node.operands.iter().any(|operand| waits[operand.index()]) {
            node.results.iter().for_each(|result| waits[result.index()] = true);
            after.push(node.clone());
        } else {
            before.push(node.clone());
        }
    }
    let nodes = before.into_iter().chain([call]).chain(after).collect();
    Function { nodes, ..function.clone() }
}

/// Nodes that run in pieces.
struct Region<'f> {
    function: &'f Function,
    module: &'f Module,
    wide: &'f Wide,
    seed: Seed,
    producers: Vec<Option<usize>>,
    /// For each node, how its operands lie if it is one of them.
    inside: Vec<Option<Vec<Layout>>>,
    /// How values of the region lie.
    layouts: Vec<Option<Layout>>,
    /// Values that depend on results of the region through other nodes.
    after: Vec<bool>,
    /// What the region reads, and how that is cut.
    inputs: Vec<(ValueId, Layout)>,
}

impl<'f> Region<'f> {
    /// All that follows from a product row by row; none where a wide value leaves that.
    fn grow(
        function: &'f Function,
        module: &'f Module,
        wide: &'f Wide,
        seed: Seed,
    ) -> Option<Region<'f>> {
        let values = function.values.len();
        let mut region = Region {
            function,
            module,
            wide,
            seed,
            producers: function.producers(),
            inside: vec![None; function.nodes.len()],
            layouts: vec![None; values],
            after: vec![false; values],
            inputs: Vec::new(),
        };
        for at in seed.node..function.nodes.len() {
            region.visit(at)?;
        }
        let leaves = |value: &ValueId| region.is_wide_here(*value);
        (!region.outputs().iter().any(leaves)).then_some(region)
    }

    /// Whether a value is one of the region's that are cut, and wide.
    fn is_wide_here(&self, value: ValueId) -> bool {
        matches!(self.layouts[value.index()], Some(Layout::Cut { .. })) && self.is_wide(value)
    }

    /// Whether a value is as large as the seed over all ranks: shards of different values may be
    /// as large as each other on some ranks only.
    fn is_wide(&self, value: ValueId) -> bool {
        let seed = self.function.nodes[self.seed.node].result();
        let count = self.count(seed);
        count.is_some() && self.count(value) == count
    }

    /// The elements of a value over all ranks. What the cut over ranks adds, an exchange or a
    /// piece, is of a value that the whole function names.
    fn count(&self, value: ValueId) -> Option<usize> {
        let name = self.function.value(value).name.as_str();
        let known = self.wide.counts.get(name).or_else(|| self.wide.counts.get(stem(name)?));
        known.copied().or_else(|| {
            let node = &self.function.nodes[self.producers[value.index()]?];
            let is_of = matches!(node.op, Op::Collective { .. } | Op::Slice { .. });
            if is_of { self.count(node.operands[0]) } else { None }
        })
    }

    /// Takes a node in, or leaves it after the region if it depends on that.
    fn visit(&mut self, at: usize) -> Option<()> {
        let node = &self.function.nodes[at];
        if self.inside[at].is_some() {
            return Some(());
        }
        let is_seed = at == self.seed.node;
        let is_cut = |o: &ValueId| matches!(self.layouts[o.index()], Some(Layout::Cut { .. }));
        let waits = node.operands.iter().any(|o| self.after[o.index()]);
        if is_seed || !waits && node.operands.iter().any(is_cut) {
            let wanted = is_seed.then(|| Layout::cut(self.seed.dim));
            if let Some(factor) = self.factor(at, wanted) {
                return self.take(at, &factor);
            }
        }
        if is_seed || node.operands.iter().any(|o| self.is_wide_here(*o)) {
            return None;
        }
        if waits || node.operands.iter().any(|o| self.layouts[o.index()].is_some()) {
            node.results.iter().for_each(|result| self.after[result.index()] = true);
        }
        Some(())
    }

    /// How a node is cut so that its operands lie as they do, and its result as is wanted.
    fn factor(&self, at: usize, wanted: Option<Layout>) -> Option<Factor> {
        let node = &self.function.nodes[at];
        if let Op::Collective { kind: Collective::AllReduce(_), .. } = node.op
            && self.seed.may_exchange
        {
            // Piece by piece, as often on all ranks.
            let cut = self.layouts[node.operands[0].index()].or(wanted)?;
            let (units, cut) = (Dim::from(self.seed.count), vec![cut]);
            return Some(Factor { units, operands: cut.clone(), results: cut, offsets: vec![] });
        }
        if matches!(node.op.class(), Class::Call | Class::Collective) {
            return None;
        }
        let fits = |factor: &Factor| {
            let mut operands = node.operands.iter().zip(&factor.operands);
            let yields = |layout: &Layout| match *layout {
                Layout::Cut { unit, .. } => unit == 1,
                Layout::Partial(combiner) => combiner == Combiner::Sum,
                Layout::Replicated => false,
            };
            operands.all(|(o, layout)| self.layouts[o.index()].is_none_or(|l| l == *layout))
                && factor.results.iter().all(yields)
                && factor.offsets.is_empty()
                && wanted.is_none_or(|wanted| factor.results[0] == wanted)
        };
        factors(node, self.function, self.module).into_iter().find(fits)
    }

    fn take(&mut self, at: usize, factor: &Factor) -> Option<()> {
        let node = &self.function.nodes[at];
        self.inside[at] = Some(factor.operands.clone());
        for (result, layout) in node.results.iter().zip(&factor.results) {
            self.layouts[result.index()] = Some(*layout);
        }
        for (operand, layout) in node.operands.iter().zip(&factor.operands) {
            if self.layouts[operand.index()].is_some() {
                continue;
            }
            if self.after[operand.index()] {
                return None;
            }
            let cut = matches!(layout, Layout::Cut { .. });
            match self.producers[operand.index()] {
                Some(producer) if cut && self.is_wide(*operand) => self.pull(producer, *layout)?,
                _ if !self.inputs.contains(&(*operand, *layout)) => {
                    self.inputs.push((*operand, *layout));
                }
                _ => {}
            }
        }
        Some(())
    }

    /// Takes in a node that makes a wide operand: one that is computed for each element.
    fn pull(&mut self, at: usize, wanted: Layout) -> Option<()> {
        let op = &self.function.nodes[at].op;
        let is_cheap = matches!(op.class(), Class::Source | Class::Elementwise);
        if !is_cheap && !matches!(op, Op::Broadcast { .. }) {
            return None;
        }
        let factor = self.factor(at, Some(wanted))?;
        self.take(at, &factor)
    }

    /// The values of the region that something else reads, in order.
    fn outputs(&self) -> Vec<ValueId> {
        let function = self.function;
        let is_inside = |(_, cut): &(&Node, &Option<Vec<Layout>>)| cut.is_some();
        let (inside, outside): (Vec<_>, Vec<_>) =
            function.nodes.iter().zip(&self.inside).partition(is_inside);
        let outside = outside.into_iter().flat_map(|(node, _)| &node.operands);
        let read: Vec<ValueId> = outside.chain(&function.results).copied().collect();
        let made = inside.into_iter().flat_map(|(node, _)| &node.results).copied();
        made.filter(|result| read.contains(result)).collect()
    }

    /// The type of a piece of a value.
    fn piece(&self, value: ValueId, layout: Layout) -> Option<TensorType> {
        let mut ty = self.function.ty(value).clone();
        if let Layout::Cut { dim, .. } = layout {
            let size = ty.sizes()?[dim];
            let piece = size.is_multiple_of(self.seed.count).then_some(size / self.seed.count)?;
            ty.dims[dim] = Dim::from(piece);
        }
        Some(ty)
    }

    fn outline(self) -> Option<(Function, Chunks)> {
        let name = format!("{}.rows", self.function.name);
        let outputs = self.outputs();
        let chunks = Chunks {
            body: self.body(&name, &outputs)?,
            count: self.seed.count,
            operands: self.inputs.iter().map(|(_, layout)| *layout).collect(),
            results: outputs.iter().filter_map(|value| self.layouts[value.index()]).collect(),
        };
        let call = Node {
            op: Op::Call { function: name },
            operands: self.inputs.iter().map(|(value, _)| *value).collect(),
            results: outputs,
        };
        Some((around(self.function, &|at| self.inside[at].is_some(), call), chunks))
    }

    /// The function of one piece.
    fn body(&self, name: &str, outputs: &[ValueId]) -> Option<Function> {
        let mut body = Function::new(name, Kind::Layer);
        let mut made: Vec<Option<ValueId>> = vec![None; self.function.values.len()];
        let define = |body: &mut Function, value: ValueId, layout: Layout, name: String| {
            let mut own = self.function.value(value).clone();
            (own.ty, own.name) = (self.piece(value, layout)?, name);
            body.values.push(own);
            Some(ValueId(body.values.len() as u32 - 1))
        };
        for (at, (value, layout)) in self.inputs.iter().enumerate() {
            let name = format!("{}.in{at}", self.function.value(*value).name);
            define(&mut body, *value, *layout, name)?;
        }
        body.param_count = self.inputs.len();
        for (node, layouts) in self.function.nodes.iter().zip(&self.inside) {
            let Some(layouts) = layouts else { continue };
            let operand = |(o, layout): (&ValueId, &Layout)| {
                let input = self.inputs.iter().position(|input| *input == (*o, *layout));
                made[o.index()].or_else(|| input.map(|at| ValueId(at as u32)))
            };
            let operands = node.operands.iter().zip(layouts);
            let operands: Option<Vec<ValueId>> = operands.map(operand).collect();
            let mut results = Vec::new();
            for result in &node.results {
                let layout = self.layouts[result.index()]?;
                let name = self.function.value(*result).name.clone();
                let own = define(&mut body, *result, layout, name)?;
                made[result.index()] = Some(own);
                results.push(own);
            }
            let mut op = node.op.clone();
            make_local(&mut op, &body.ty(results[0]).dims.clone(), &[]);
            body.nodes.push(Node { op, operands: operands?, results });
        }
        body.results = outputs.iter().map(|value| made[value.index()]).collect::<Option<_>>()?;
        Some(body)
    }
}

#[cfg(test)]
mod tests {
    use ir::DType;
    use ir::build::Builder;
    use ir::target::Arch;

    use super::*;

    /// Logits of 4,096 tokens and 50,257 words, 393 MiB in bf16: as many pieces of 256 rows as
    /// there are on CPUs, and as many as make a piece no longer wide on GPUs.
    #[test]
    fn pieces_are_larger_on_gpus() {
        let mut module = Module::default();
        let mut b = Builder::new(&mut module, "f", Kind::Layer);
        let mut param =
            |name: &str, dims: &[usize]| b.param(name, TensorType::of(DType::BF16, dims));
        let [x, table] = [param("x", &[4096, 768]), param("table", &[50257, 768])];
        let logits = b.contract("logits", "td,vd->tv", x, table);
        let function = b.into_function(&[logits]);
        let pieces = |target| Wide::of(&function, target).values["logits"].count;
        assert_eq!([None, Some(Target::Cuda(Arch::Sm90a))].map(pieces), [16, 4]);
    }

    /// A name loses what tells it from an equal one, and nothing that is its own.
    #[test]
    fn stems_are_names_without_what_tells_them_apart() {
        let stems = ["logits.again", "w1.1", "d.logits.12", "logits2", "w1", "x.gather", "x."];
        let found = stems.map(stem);
        assert_eq!(found, [Some("logits"), Some("w1"), Some("d.logits"), None, None, None, None]);
    }
}
