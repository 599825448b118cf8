//! The domain of a fused kernel: which nodes can share one pass over rows and columns.

use ir::op::{Binary, Combiner};
use ir::{Function, Node, Op, ValueId};

use crate::fuse::is_leaf;
use crate::precision::compute_dtype;

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
        compute_dtype(function, nodes.iter().copied())?;
        let sizes = widest(function, nodes)?;
        let splits = splits(function, nodes, &sizes)?;
        let fits = |split: &usize| {
            let domain = Domain { sizes: sizes.clone(), split: *split };
            extents(function, nodes, &domain).is_some()
        };
        // Fewer, longer rows first: they are what the vector unit likes.
        splits.into_iter().find(fits).map(|split| Domain { sizes, split })
    }
}

/// Whether a node computes exactly in floating point what it does with integers.
pub(crate) fn is_int_op_exact(node: &Node, function: &Function) -> bool {
    let float = |v: &ValueId| function.ty(*v).dtype.is_float();
    let rounds = matches!(node.op, Op::Unary(_) | Op::Binary(Binary::Div | Binary::Pow));
    !rounds || node.operands.iter().all(float)
}

/// The dims of the widest node: those of its operand for a reduction.
pub(crate) fn widest(function: &Function, nodes: &[usize]) -> Option<Vec<usize>> {
    let mut widest: Option<Vec<usize>> = None;
    for at in nodes {
        let sizes = node_sizes(function, &function.nodes[*at])?;
        let count = |s: &[usize]| (s.iter().product::<usize>(), s.len());
        if widest.as_ref().is_none_or(|w| count(w) < count(&sizes)) {
            widest = Some(sizes);
        }
    }
    widest
}

fn node_sizes(function: &Function, node: &Node) -> Option<Vec<usize>> {
    let reduces = matches!(node.op, Op::Reduce { .. });
    function.ty(if reduces { node.operands[0] } else { node.result() }).sizes()
}

/// The splits that reductions and narrower values leave open.
fn splits(function: &Function, nodes: &[usize], sizes: &[usize]) -> Option<Vec<usize>> {
    let mut forced: Option<usize> = None;
    for at in nodes {
        let node = &function.nodes[*at];
        let narrow = node_sizes(function, node)?;
        let here = if narrow != sizes {
            Some(narrow.len())
        } else if let Op::Reduce { dims, .. } = &node.op {
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
        Some(split) if split <= sizes.len() => Some(vec![split]),
        Some(_) => None,
        None => Some((0..=sizes.len()).collect()),
    }
}

/// What each node's result is in the domain; none when one does not fit.
pub fn extents(
    function: &Function,
    nodes: &[usize],
    domain: &Domain,
) -> Option<Vec<(ValueId, Extent)>> {
    let mut extents: Vec<(ValueId, Extent)> = Vec::new();
    let producers = function.producers();
    for at in nodes {
        let node = &function.nodes[*at];
        let here = |value: ValueId| extents.iter().find(|(v, _)| *v == value).map(|(_, e)| *e);
        let own = node_extent(function, node, domain)?;
        let operand_extent = if matches!(node.op, Op::Reduce { .. }) {
            extent_of(&node_sizes(function, node)?, domain)?
        } else {
            own
        };
        for operand in &node.operands {
            let fits = match here(*operand) {
                Some(extent) => extent == operand_extent,
                None => leaf_fits(function, &producers, *operand, operand_extent, domain, &here),
            };
            if !fits {
                return None;
            }
        }
        extents.push((node.result(), own));
    }
    Some(extents)
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

fn node_extent(function: &Function, node: &Node, domain: &Domain) -> Option<Extent> {
    let Op::Reduce { combiner, dims } = &node.op else {
        return extent_of(&function.ty(node.result()).sizes()?, domain);
    };
    let operand = extent_of(&node_sizes(function, node)?, domain)?;
    let (split, ndim) = (domain.split, domain.sizes.len());
    let columns = dims.iter().copied().eq(split..ndim);
    let rows = dims.iter().copied().eq(0..split);
    let sum = *combiner == Combiner::Sum;
    match operand {
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
                        strides(function, value, new, extent, domain).is_some()
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
    let columns = &strides[domain.split..];
    let mut stride: Option<usize> = None;
    let mut inner = 1;
    for (dim, column) in columns.iter().enumerate().rev() {
        let size = domain.sizes[domain.split + dim];
        if size != 1 {
            let base = *stride.get_or_insert(*column);
            if *column != base * inner {
                return None;
            }
        }
        inner *= size;
    }
    Some((strides[..domain.split].to_vec(), stride.unwrap_or(0)))
}
