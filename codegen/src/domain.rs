//! The domain of a fused kernel: which nodes can share one pass over rows and columns.

use ir::op::{Binary, Combiner, Unary};
use ir::{DType, Function, Node, Op, ValueId};

use crate::leaf::is_leaf;
use crate::precision::{Bounds, Need, together};

/// `sizes[..split]` are rows, `sizes[split..]` columns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Domain {
    /// The sizes of all dims.
    pub sizes: Vec<usize>,
    /// Where the columns start.
    pub split: usize,
}

/// What a value is in a domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// One element per point.
    Full,
    /// One element per row.
    Row,
    /// One element per column: leaves the kernel.
    Column,
    /// One element: leaves the kernel, unless the domain itself is one point.
    Total,
}

impl Domain {
    /// The number of rows.
    pub fn rows(&self) -> usize {
        self.sizes[..self.split].iter().product()
    }

    /// The number of columns.
    pub fn cols(&self) -> usize {
        self.sizes[self.split..].iter().product()
    }

    /// The domain in which all the nodes of a function can be computed in one pass and in one type;
    /// none when there is no such domain. `nodes` are fusible, in order.
    pub fn of(function: &Function, nodes: &[usize]) -> Option<Domain> {
        Sites::new(function).domain(nodes)
    }
}

/// The nodes of a function of which many domains are asked for: what these follow from, found once.
pub(crate) struct Sites<'f> {
    pub(crate) function: &'f Function,
    pub(crate) producers: Vec<Option<usize>>,
    /// For each node, the sizes over which it is computed.
    sizes: Vec<Option<Vec<usize>>>,
    /// For each node, at how many points that is.
    counts: Vec<usize>,
    /// For each node, what it is computed in.
    needs: Vec<Need>,
}

impl<'f> Sites<'f> {
    pub(crate) fn new(function: &'f Function) -> Sites<'f> {
        let mut bounds = Bounds::of(function);
        let nodes = function.nodes.iter();
        let sizes: Vec<_> = nodes.clone().map(|node| node_sizes(function, node)).collect();
        Sites {
            function,
            producers: function.producers(),
            counts: sizes.iter().map(|sizes| sizes.iter().flatten().product()).collect(),
            sizes,
            needs: nodes.map(|node| bounds.need(node)).collect(),
        }
    }

    /// As [`Domain::of`].
    pub(crate) fn domain(&self, nodes: &[usize]) -> Option<Domain> {
        nodes.iter().try_fold(Need::Any, |found, at| together(found, self.needs[*at]))?;
        let sizes = self.widest(nodes)?;
        let mut splits = self.splits(nodes, sizes)?;
        let mut domain = Domain { sizes: sizes.to_vec(), split: 0 };
        let mut known = vec![None; self.function.values.len()];
        // Fewer, longer rows first: they are what the vector unit likes.
        let fits = splits.any(|split| {
            domain.split = split;
            self.find_extents(nodes, &domain, &mut known).is_some()
        });
        fits.then_some(domain)
    }

    /// The dims of the widest node: those of its operand for a reduction.
    pub(crate) fn widest(&self, nodes: &[usize]) -> Option<&[usize]> {
        let mut widest: Option<(usize, &[usize])> = None;
        for at in nodes {
            let (sizes, count) = (self.sizes[*at].as_deref()?, self.counts[*at]);
            if widest.is_none_or(|(most, w)| (most, w.len()) < (count, sizes.len())) {
                widest = Some((count, sizes));
            }
        }
        widest.map(|(_, sizes)| sizes)
    }

    /// The splits that reductions and narrower values leave open.
    fn splits(&self, nodes: &[usize], sizes: &[usize]) -> Option<std::ops::RangeInclusive<usize>> {
        let mut forced: Option<usize> = None;
        for at in nodes {
            let narrow = self.sizes[*at].as_deref()?;
            let here = if narrow != sizes {
                Some(narrow.len())
            } else if let Op::Reduce { dims, .. } = &self.function.nodes[*at].op {
                let inner =
                    if dims.first() == Some(&0) { Some(dims.len()) } else { dims.first().copied() };
                inner.filter(|_| dims.len() < sizes.len())
            } else {
                None
            };
            match (forced, here) {
                (Some(a), Some(b)) if a != b => return None,
                (None, Some(_)) => forced = here,
                _ => {}
            }
        }
        match forced {
            Some(split) if split <= sizes.len() => Some(split..=split),
            Some(_) => None,
            None => Some(0..=sizes.len()),
        }
    }

    /// As [`extents`].
    fn extents(&self, nodes: &[usize], domain: &Domain) -> Option<Vec<(ValueId, Extent)>> {
        let mut known = vec![None; self.function.values.len()];
        self.find_extents(nodes, domain, &mut known)?;
        let result = |at: &usize| self.function.nodes[*at].result();
        let extent = |value: ValueId| Some((value, known[value.index()]?));
        nodes.iter().map(|at| extent(result(at))).collect()
    }

    /// Finds what each node's result is, by value; none when one does not fit. What is `known` of
    /// these results in another domain is forgotten first.
    fn find_extents(
        &self,
        nodes: &[usize],
        domain: &Domain,
        known: &mut [Option<Extent>],
    ) -> Option<()> {
        let Sites { function, producers, sizes, .. } = self;
        nodes.iter().for_each(|at| known[function.nodes[*at].result().index()] = None);
        for at in nodes {
            let node = &function.nodes[*at];
            let over = extent_of(sizes[*at].as_deref()?, domain)?;
            let own = node_extent(node, over, domain, sums_rows(function, node))?;
            let here = |value: ValueId| known[value.index()];
            for operand in &node.operands {
                let fits = match here(*operand) {
                    Some(extent) => extent == over,
                    None => leaf_fits(function, producers, *operand, over, domain, &here),
                };
                if !fits {
                    return None;
                }
            }
            known[node.result().index()] = Some(own);
        }
        Some(())
    }
}

/// Whether a node computes exactly, in what it is computed in, what it does with integers.
#[expect(clippy::wildcard_enum_match_arm, reason = "no other op rounds")]
pub(crate) fn is_int_op_exact(node: &Node, function: &Function) -> bool {
    let float = |v: &ValueId| function.ty(*v).dtype.is_float();
    let dtype = function.ty(node.result()).dtype;
    let rounds = match node.op {
        // Integers of 64 bits are computed in those.
        _ if dtype == DType::I64 => false,
        Op::Unary(Unary::Neg | Unary::Abs) => dtype != DType::I32,
        Op::Unary(_) | Op::Binary(Binary::Div | Binary::Pow) => true,
        _ => false,
    };
    !rounds || node.operands.iter().all(float)
}

/// The sizes over which a node is computed: those of its operand for a reduction.
fn node_sizes(function: &Function, node: &Node) -> Option<Vec<usize>> {
    let reduces = matches!(node.op, Op::Reduce { .. });
    function.ty(if reduces { node.operands[0] } else { *node.results.first()? }).sizes()
}

/// What each node's result is in the domain; none when one does not fit.
pub fn extents(
    function: &Function,
    nodes: &[usize],
    domain: &Domain,
) -> Option<Vec<(ValueId, Extent)>> {
    Sites::new(function).extents(nodes, domain)
}

fn extent_of(sizes: &[usize], domain: &Domain) -> Option<Extent> {
    if sizes == domain.sizes {
        Some(Extent::Full)
    } else if sizes == &domain.sizes[..domain.split] {
        Some(Extent::Row)
    } else {
        None
    }
}

/// Whether a sum over rows, which is of the type that a kernel computes in, is one of the node's.
pub(crate) fn sums_rows(function: &Function, node: &Node) -> bool {
    let dtype = function.ty(node.result()).dtype;
    let is_sum = matches!(node.op, Op::Reduce { combiner: Combiner::Sum, .. });
    is_sum && (dtype.is_float() || dtype == DType::I64)
}

/// The extent of the result of a node that is computed over another.
fn node_extent(node: &Node, over: Extent, domain: &Domain, sum: bool) -> Option<Extent> {
    let Op::Reduce { dims, .. } = &node.op else { return Some(over) };
    let (split, ndim) = (domain.split, domain.sizes.len());
    let columns = dims.iter().copied().eq(split..ndim);
    let rows = dims.iter().copied().eq(0..split);
    match over {
        Extent::Full if columns && split < ndim => Some(Extent::Row),
        Extent::Full if dims.len() == ndim && sum => Some(Extent::Total),
        Extent::Full if rows && sum => Some(Extent::Column),
        Extent::Row if rows && sum => Some(Extent::Total),
        Extent::Full | Extent::Row | Extent::Column | Extent::Total => None,
    }
}

/// Whether an operand that no node of the group makes can be loaded, or made again, at the points
/// of the domain.
#[expect(clippy::wildcard_enum_match_arm, reason = "only leaves come here")]
fn leaf_fits(
    function: &Function,
    producers: &[Option<usize>],
    value: ValueId,
    extent: Extent,
    domain: &Domain,
    here: &impl Fn(ValueId) -> Option<Extent>,
) -> bool {
    let node = producers[value.index()].map(|at| &function.nodes[at]);
    let Some(node) = node.filter(|n| is_leaf(&n.op)) else {
        // A buffer of the operand's own dims, row-major.
        return true;
    };
    match &node.op {
        Op::Constant { .. } => true,
        Op::Iota { dim, .. } => extent == Extent::Row || counts_columns(*dim, domain),
        Op::Random { .. } => true,
        Op::Broadcast { new, .. } => {
            let source = node.operands[0];
            let over = |source_extent: Extent| {
                let columns = new.iter().copied().eq(domain.split..domain.sizes.len());
                extent == Extent::Full && source_extent == Extent::Row && columns
            };
            match here(source) {
                Some(source_extent) => over(source_extent),
                None => {
                    let inner = producers[source.index()].map(|at| &function.nodes[at]);
                    let nested = inner.is_some_and(|n| is_leaf(&n.op));
                    if nested {
                        matches!(inner.map(|n| &n.op), Some(Op::Constant { .. }))
                    } else {
                        extent == Extent::Row
                            || column_stride(function, value, new, domain).is_some()
                    }
                }
            }
        }
        _ => false,
    }
}

/// Whether the index along a dim is linear in the column: it is a row's, or the only column dim.
fn counts_columns(dim: usize, domain: &Domain) -> bool {
    dim < domain.split
        || domain.sizes[dim + 1..].iter().product::<usize>() == 1
            && domain.sizes[domain.split..dim].iter().product::<usize>() == 1
}

/// The strides of a broadcast buffer over the dims of the domain, the columns as one stride.
/// None when the columns are not evenly spaced.
pub fn strides(
    function: &Function,
    value: ValueId,
    new: &[usize],
    extent: Extent,
    domain: &Domain,
) -> Option<(Vec<usize>, usize)> {
    let sizes = function.ty(value).sizes()?;
    let mut strides = vec![0; sizes.len()];
    let mut step = 1;
    for dim in (0..sizes.len()).rev() {
        if !new.contains(&dim) {
            strides[dim] = step;
            step *= sizes[dim];
        }
    }
    if extent == Extent::Row {
        return Some((strides, 0));
    }
    let stride = column_stride(function, value, new, domain)?;
    Some((strides[..domain.split].to_vec(), stride))
}

/// The stride of a broadcast buffer along the columns; none when they are not evenly spaced.
fn column_stride(
    function: &Function,
    value: ValueId,
    new: &[usize],
    domain: &Domain,
) -> Option<usize> {
    let dims = &function.ty(value).dims;
    let (mut step, mut inner) = (1, 1);
    let mut stride: Option<usize> = None;
    for dim in (domain.split..dims.len()).rev() {
        let size = usize::try_from(dims[dim].as_constant()?).ok()?;
        let own = if new.contains(&dim) { 0 } else { step };
        if own != 0 {
            step *= size;
        }
        if size != 1 && own != *stride.get_or_insert(own) * inner {
            return None;
        }
        inner *= size;
    }
    Some(stride.unwrap_or(0))
}
