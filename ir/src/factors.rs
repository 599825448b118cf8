//! The table `factors`: the iteration factors of each op, and which dims each one indexes.
//!
//! From it follow the legal shardings of an op, the collectives that a sharding needs, and how
//! dims propagate. Cutting a factor over an axis cuts every operand dim that it indexes; the result
//! is cut where the factor indexes it and partial where the factor is reduced away.

use std::cmp::Ordering;

use crate::class::{Class, Stated};
use crate::convolution::DimOrder;
use crate::dim::Dim;
use crate::library::{CompositeFactor, Definition, templates};
use crate::module::{Attributes, Function, Kind, Module, Node, ValueId};
use crate::op::{Binary, Combiner, Einsum, Op, Unary};
use crate::sharding::{Axis, Layout};
use crate::types::TensorType;

/// One iteration factor of a node: the layouts on an axis that cuts it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Factor {
    /// How many units there are to cut.
    pub units: Dim,
    /// What each operand must be: cut or replicated.
    pub operands: Vec<Layout>,
    /// What each result is then.
    pub results: Vec<Layout>,
    /// Attributes of the op that count from the shard's offset.
    pub offsets: Vec<Offset>,
}

/// An attribute that follows from where this rank's piece of the factor lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Offset {
    /// The `start` of an iota, a gather or a scatter.
    Start,
    /// The `start` of one dim of a random draw.
    RandomStart(usize),
    /// An attribute of a composite, by the elements of the operand's or result's piece.
    Attribute {
        /// The attribute.
        name: String,
        /// Elements of a unit of the value by which it is counted.
        unit: usize,
    },
    /// An attribute of a composite that is the elements of the whole operand or result, unless it
    /// says already of what the operand is a piece.
    Whole {
        /// The attribute.
        name: String,
        /// Elements of a unit of the value by which it is counted.
        unit: usize,
    },
}

/// The factors of a node of a function.
pub fn factors(node: &Node, function: &Function, module: &Module) -> Vec<Factor> {
    let operands: Vec<&TensorType> = node.operands.iter().map(|o| function.ty(*o)).collect();
    let result = function.ty(node.results[0]);
    match &node.op {
        Op::Constant { .. } => made_factors(result, |_| None),
        Op::Iota { dim, .. } => made_factors(result, |d| (d == *dim).then_some(Offset::Start)),
        Op::Random { .. } => random_factors(result),
        Op::FoldKey { .. } | Op::Collective { .. } | Op::ScaledContract { .. } => Vec::new(),
        Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select | Op::Cast { .. } => {
            elementwise_factors(operands.len(), result)
        }
        Op::Contract(einsum) => contract_factors(einsum, operands[0], operands[1]),
        Op::Conv(c) => conv_factors(&c.orders, operands[0], operands[1]),
        Op::Reduce { combiner, dims } => reduce_factors(*combiner, dims, operands[0]),
        Op::Prod { dims } => kept_factors(dims, operands[0]),
        Op::ArgMax { dim } => kept_factors(&[*dim], operands[0]),
        Op::Cumulative { dim, .. } | Op::Sort { dim, .. } | Op::TopK { dim, .. } => {
            untouched_factors(&[*dim], &operands, result)
        }
        Op::Reshape { .. } => reshape_factors(operands[0], result),
        Op::Transpose { perm } => transpose_factors(perm, result),
        Op::Broadcast { new, .. } => broadcast_factors(new, result),
        Op::Slice { dim, .. } | Op::Pad { dim, .. } => {
            untouched_factors(&[*dim], &operands, result)
        }
        Op::Reverse { dims } => untouched_factors(dims, &operands, result),
        Op::Window(windows) | Op::Fold { windows, .. } => {
            window_factors(windows.dim, operands[0], result)
        }
        Op::Concat { dim } => untouched_factors(&[*dim], &operands, result),
        Op::Gather { dim, .. } => gather_factors(*dim, operands[0], operands[1], result),
        Op::ScatterAdd { dim, .. } => scatter_factors(*dim, operands[0], result),
        Op::Scatter { dim, .. } => replace_factors(*dim, operands[1], result),
        Op::DynamicUpdateSlice { dim } => untouched_factors(&[*dim], &operands, result),
        Op::DynamicSlice { dim, .. } => untouched_factors(&[*dim], &operands, result),
        Op::Call { function: callee } => call_factors(callee, module),
    }
}

/// The forms along which context-parallel ranks share a sample: queries of attention, which gathers
/// keys and values, and rows that are told their positions.
pub const SEQUENCE_FORMS: [&str; 2] = ["all-gather", "tokens"];

/// The form in which ranks share the experts of a layer.
pub const EXPERT_FORM: &str = "dispatch";

/// The form of what each of these ranks computes: with the tokens of all of them, its own experts.
pub const EXPERTS_OF_RANK_FORM: &str = "own";

/// The factors of a node, and those of the forms with one of the given names that the composite
/// which it calls has.
pub fn factors_and_forms(
    node: &Node,
    function: &Function,
    module: &Module,
    forms: &[&str],
) -> Vec<Factor> {
    let mut all = factors(node, function, module);
    if let Op::Call { function: callee } = &node.op {
        let named = |declared: &&CompositeFactor| forms.contains(&declared.name.as_str());
        let of = |definition: &Definition| definition.forms.iter().filter(named).cloned().collect();
        all.extend(declared_factors(callee, module, of));
    }
    all
}

impl Factor {
    /// The offsets of the piece that starts at unit `start`, of `units` in the whole: by how many
    /// units each grows, or the length of the whole.
    pub fn offsets_at(&self, start: usize, units: usize) -> impl Iterator<Item = (Offset, i64)> {
        let number = move |offset: &Offset| match offset {
            Offset::Start | Offset::RandomStart(_) | Offset::Attribute { .. } => start,
            Offset::Whole { .. } => units,
        };
        self.offsets.iter().map(move |offset| (offset.clone(), number(offset) as i64))
    }
}

/// Gives an op the sizes that its result has on one rank, and adds the offsets of the pieces, in
/// units of their factors, to the attributes that count from them. Calls are left to the caller.
pub fn make_local(op: &mut Op, dims: &[Dim], offsets: &[(Offset, i64)]) {
    match op.stated_sizes() {
        Stated::Nothing => {}
        Stated::All(stated) => *stated = dims.to_vec(),
        Stated::One { dim, size } => *size = dims[dim].clone(),
    }
    for (offset, units) in offsets {
        match (&mut *op, offset) {
            (Op::Iota { start, .. }, Offset::Start)
            | (Op::Gather { start, .. }, Offset::Start)
            | (Op::ScatterAdd { start, .. }, Offset::Start)
            | (Op::Scatter { start, .. }, Offset::Start) => *start += units,
            (Op::Random { start, .. }, Offset::RandomStart(dim)) => start[*dim] += units,
            (
                _,
                Offset::Start
                | Offset::RandomStart(_)
                | Offset::Attribute { .. }
                | Offset::Whole { .. },
            ) => {}
        }
    }
}

/// The factors with every cut in the smallest unit that has the same pieces over the ranks of an
/// axis, so that layouts that are the same shards are equal. Open sizes stay as they are.
pub fn canonical(
    mut factors: Vec<Factor>,
    node: &Node,
    function: &Function,
    (axis, ranks): (Axis, usize),
) -> Vec<Factor> {
    let shares = |size, unit| axis.piece_order().shares(size, unit, ranks);
    let simplify = |value: &ValueId, layout: &mut Layout| {
        if let Layout::Cut { dim, unit } = layout
            && *unit > 1
            && let Some(size) = function.ty(*value).dims[*dim].as_constant()
        {
            let size = size as usize;
            let wanted = shares(size, *unit);
            let same = |smaller: &usize| shares(size, *smaller) == wanted;
            *unit = (1..=*unit).find(same).unwrap_or(*unit);
        }
    };
    for factor in &mut factors {
        let values = node.operands.iter().chain(&node.results);
        let layouts = factor.operands.iter_mut().chain(&mut factor.results);
        values.zip(layouts).for_each(|(value, layout)| simplify(value, layout));
    }
    factors
}

/// Whether an op maps partial operands to a partial result, term by term.
pub fn passes_partial(op: &Op) -> bool {
    match op.class() {
        Class::View | Class::Join | Class::Indexed => true,
        Class::Elementwise => {
            matches!(op, Op::Unary(Unary::Neg) | Op::Binary(Binary::Add | Binary::Sub))
        }
        Class::Reduction => matches!(op, Op::Reduce { combiner: Combiner::Sum, .. }),
        Class::Scan => matches!(op, Op::Cumulative { combiner: Combiner::Sum, .. }),
        Class::Source | Class::Product | Class::Call | Class::Collective => false,
    }
}

/// Whether an operand of an op that passes partial values on is a term; if not, it is an index and
/// every rank needs it whole.
fn is_term(op: &Op, operand: usize) -> bool {
    let is_index = match operand {
        0 => matches!(op, Op::ScatterAdd { .. }),
        1 => matches!(op, Op::Gather { .. } | Op::Scatter { .. } | Op::DynamicSlice { .. }),
        _ => matches!(op, Op::DynamicUpdateSlice { .. }) && operand == 2,
    };
    passes_partial(op) && !is_index
}

/// The ways in which an op maps terms of a sum to terms of its result: which operands are terms in
/// each of them. The others are whole on every rank.
///
/// A sum passes through whatever is linear: through all operands of an addition at once, through
/// one operand of a product, the numerator of a quotient, or the two values of a selection.
pub fn term_ways(op: &Op, operands: usize) -> Vec<Vec<bool>> {
    if passes_partial(op) {
        return vec![(0..operands).map(|at| is_term(op, at)).collect()];
    }
    let alone = |at: usize| (0..operands).map(|operand| operand == at).collect();
    if matches!(op, Op::Contract(_) | Op::Conv(_) | Op::Binary(Binary::Mul)) {
        (0..operands).map(alone).collect()
    } else if matches!(op, Op::Binary(Binary::Div)) {
        vec![alone(0)]
    } else if matches!(op, Op::Select) {
        vec![(0..operands).map(|at| at > 0).collect()]
    } else {
        Vec::new()
    }
}

/// Whether operands that lie so on an axis are what one of the [`term_ways`] takes: terms where it
/// takes terms, and none elsewhere. Of each it is told whether it is zero, and so a term of any
/// sum; zeros alone are no terms, as nothing is to be summed.
pub fn are_terms(way: &[bool], operands: impl Iterator<Item = (Layout, bool)>) -> bool {
    let mut any = false;
    let fits = operands.zip(way).all(|((layout, is_zero), takes_term)| {
        let is_term = layout == Layout::Partial(Combiner::Sum);
        any |= is_term;
        is_term == *takes_term || (is_zero && layout == Layout::Replicated)
    });
    fits && any
}

/// For each value of a function whether it is zero throughout: a constant, seen through views. Zero
/// is a sum of zeros, on however many ranks.
pub fn zeros(function: &Function) -> Vec<bool> {
    let mut zeros = vec![false; function.values.len()];
    for node in &function.nodes {
        zeros[node.results[0].index()] = if let Op::Constant { value, .. } = node.op {
            value == 0.0
        } else {
            node.op.class() == Class::View && zeros[node.operands[0].index()]
        };
    }
    zeros
}

fn factor(units: &Dim, operands: Vec<Layout>, results: Vec<Layout>) -> Factor {
    Factor { units: units.clone(), operands, results, offsets: Vec::new() }
}

fn made_factors(result: &TensorType, offset: impl Fn(usize) -> Option<Offset>) -> Vec<Factor> {
    let made = |(dim, size): (usize, &Dim)| Factor {
        offsets: offset(dim).into_iter().collect(),
        ..factor(size, Vec::new(), vec![Layout::cut(dim)])
    };
    result.dims.iter().enumerate().map(made).collect()
}

fn random_factors(result: &TensorType) -> Vec<Factor> {
    let mut factors = made_factors(result, |dim| Some(Offset::RandomStart(dim)));
    for factor in &mut factors {
        factor.operands = vec![Layout::Replicated];
    }
    factors
}

fn elementwise_factors(operands: usize, result: &TensorType) -> Vec<Factor> {
    let cut = |(dim, size): (usize, &Dim)| {
        factor(size, vec![Layout::cut(dim); operands], vec![Layout::cut(dim)])
    };
    result.dims.iter().enumerate().map(cut).collect()
}

fn contract_factors(e: &Einsum, a: &TensorType, b: &TensorType) -> Vec<Factor> {
    let place = |letters: &[char], letter: char| {
        let at = letters.iter().position(|c| *c == letter);
        at.map_or(Layout::Replicated, Layout::cut)
    };
    let size = |letter: char| {
        let in_a = e.a.iter().position(|c| *c == letter).map(|at| &a.dims[at]);
        in_a.or_else(|| e.b.iter().position(|c| *c == letter).map(|at| &b.dims[at]))
    };
    let mut factors = Vec::new();
    for letter in e.letters() {
        let Some(units) = size(letter) else { continue };
        let result = match place(&e.result, letter) {
            Layout::Replicated => Layout::Partial(Combiner::Sum),
            cut @ (Layout::Cut { .. } | Layout::Partial(_)) => cut,
        };
        factors.push(factor(units, vec![place(&e.a, letter), place(&e.b, letter)], vec![result]));
    }
    factors
}

/// Samples; without groups, kernels and channels; else whole groups.
fn conv_factors(orders: &[DimOrder; 3], x: &TensorType, w: &TensorType) -> Vec<Factor> {
    let whole = Layout::Replicated;
    // Dims by their parts, and where those lie.
    let [in_x, in_w, in_y] = [0, 1, 2].map(|of| move |dim: usize| orders[of].place(dim));
    let cut = Layout::cut;
    let (x, w) = (orders[0].usual(&x.dims), orders[1].usual(&w.dims));
    let samples = vec![cut(in_x(0)), whole];
    let mut factors = vec![factor(&x[0], samples, vec![cut(in_y(0))])];
    let groups = x[1].ratio(&w[1]).unwrap_or(1);
    if groups == 1 {
        let sum = Layout::Partial(Combiner::Sum);
        factors.push(factor(&w[0], vec![whole, cut(in_w(0))], vec![cut(in_y(1))]));
        factors.push(factor(&x[1], vec![cut(in_x(1)), cut(in_w(1))], vec![sum]));
        return factors;
    }
    let unit = |dim: &Dim| {
        dim.divide(groups).and_then(|d| d.as_constant()).and_then(|d| usize::try_from(d).ok())
    };
    if let (Some(inputs), Some(outputs)) = (unit(&x[1]), unit(&w[0])) {
        let group = |dim: usize, unit: usize| Layout::Cut { dim, unit };
        let operands = vec![group(in_x(1), inputs), group(in_w(0), outputs)];
        let units = Dim::constant(groups);
        factors.push(factor(&units, operands, vec![group(in_y(1), outputs)]));
    }
    factors
}

fn reduce_factors(combiner: Combiner, dims: &[usize], x: &TensorType) -> Vec<Factor> {
    let cut = |(dim, size): (usize, &Dim)| {
        let result = if dims.contains(&dim) {
            Layout::Partial(combiner)
        } else {
            Layout::cut(dim - dims.iter().filter(|d| **d < dim).count())
        };
        factor(size, vec![Layout::cut(dim)], vec![result])
    };
    x.dims.iter().enumerate().map(cut).collect()
}

/// Those of a reduction whose pieces no collective combines: the dims that the result keeps.
fn kept_factors(dims: &[usize], x: &TensorType) -> Vec<Factor> {
    let mut factors = reduce_factors(Combiner::Sum, dims, x);
    factors.retain(|factor| matches!(factor.results[0], Layout::Cut { .. }));
    factors
}

/// Dims of an operand of a reshape and of its result that hold the same elements, outermost first.
pub(crate) type ReshapeGroup = (Vec<usize>, Vec<usize>);

/// The smallest groups of dims that hold the same elements, up to one whose sizes are not known,
/// and whether they are all dims. Dims of one element are in none.
pub(crate) fn reshape_groups(x: &[Dim], result: &[Dim]) -> (Vec<ReshapeGroup>, bool) {
    let one = Dim::constant(1);
    let mut of_x = (0..x.len()).filter(|dim| x[*dim] != one);
    let mut of_result = (0..result.len()).filter(|dim| result[*dim] != one);
    let mut groups: Vec<ReshapeGroup> = Vec::new();
    loop {
        let (i, j) = match (of_x.next(), of_result.next()) {
            (Some(i), Some(j)) => (i, j),
            (None, None) => return (groups, true),
            (Some(_), None) | (None, Some(_)) => return (groups, false),
        };
        let (mut from, mut into) = (vec![i], vec![j]);
        let (mut size, mut other) = (x[i].clone(), result[j].clone());
        while size != other {
            let sizes = size.as_constant().zip(other.as_constant());
            let side = match sizes {
                Some((a, b)) if a < b => of_x.next(),
                Some(_) => of_result.next(),
                None => None,
            };
            let (Some((a, b)), Some(next)) = (sizes, side) else { return (groups, false) };
            if a < b {
                size = &size * &x[next];
                from.push(next);
            } else {
                other = &other * &result[next];
                into.push(next);
            }
        }
        groups.push((from, into));
    }
}

/// A dim is kept, or is the outermost of a group of dims that one side splits.
fn reshape_factors(x: &TensorType, result: &TensorType) -> Vec<Factor> {
    let inside = |ty: &TensorType, dims: &[usize]| {
        let product = dims[1..].iter().fold(Dim::constant(1), |all, dim| &all * &ty.dims[*dim]);
        product.as_constant().and_then(|count| usize::try_from(count).ok())
    };
    let of = |(from, into): ReshapeGroup| {
        let (units_x, units_r) = (&x.dims[from[0]], &result.dims[into[0]]);
        // The outer dim of the split side counts units; the other side's units are what it splits.
        let (units, unit_x, unit_r) = match (inside(x, &from)?, inside(result, &into)?) {
            (1, in_r) => (units_r, in_r, 1),
            (in_x, 1) => (units_x, 1, in_x),
            // Heads of 64 in blocks of 128: two heads are a block.
            (in_x, in_r) if in_r.is_multiple_of(in_x) => (units_r, in_r / in_x, 1),
            (in_x, in_r) if in_x.is_multiple_of(in_r) => (units_x, 1, in_x / in_r),
            _ => return None,
        };
        let operand = Layout::Cut { dim: from[0], unit: unit_x };
        let result = Layout::Cut { dim: into[0], unit: unit_r };
        Some(factor(units, vec![operand], vec![result]))
    };
    reshape_groups(&x.dims, &result.dims).0.into_iter().filter_map(of).collect()
}

fn transpose_factors(perm: &[usize], result: &TensorType) -> Vec<Factor> {
    let cut = |(dim, size): (usize, &Dim)| {
        factor(size, vec![Layout::cut(perm[dim])], vec![Layout::cut(dim)])
    };
    result.dims.iter().enumerate().map(cut).collect()
}

fn broadcast_factors(new: &[usize], result: &TensorType) -> Vec<Factor> {
    let cut = |(dim, size): (usize, &Dim)| {
        let operand = if new.contains(&dim) {
            Layout::Replicated
        } else {
            Layout::cut(dim - new.iter().filter(|n| **n < dim).count())
        };
        factor(size, vec![operand], vec![Layout::cut(dim)])
    };
    result.dims.iter().enumerate().map(cut).collect()
}

/// The dims that the op does not touch; scalar operands stay replicated.
fn untouched_factors(
    touched: &[usize],
    operands: &[&TensorType],
    result: &TensorType,
) -> Vec<Factor> {
    let cut = |(dim, size): (usize, &Dim)| {
        // Where ranges begin may be told for points of the first dim.
        let layout = |x: &&TensorType| match dim < x.ndim() {
            true => Layout::cut(dim),
            false => Layout::Replicated,
        };
        let operands = operands.iter().map(layout).collect();
        (!touched.contains(&dim)).then(|| factor(size, operands, vec![Layout::cut(dim)]))
    };
    result.dims.iter().enumerate().filter_map(cut).collect()
}

/// The dims beside the windows: one of the whole side, two of the side that is split. Windows
/// overlap, so that a piece of them would need its neighbours' elements.
fn window_factors(at: usize, x: &TensorType, result: &TensorType) -> Vec<Factor> {
    let place = |dim: usize, ty: &TensorType| {
        let split = ty.ndim() > x.ndim().min(result.ndim());
        Layout::cut(if dim > at && split { dim + 1 } else { dim })
    };
    let whole = if x.ndim() < result.ndim() { x } else { result };
    let beside = whole.dims.iter().enumerate().filter(|(dim, _)| *dim != at);
    let cut = |(dim, size)| factor(size, vec![place(dim, x)], vec![place(dim, result)]);
    beside.map(cut).collect()
}

fn gather_factors(
    dim: usize,
    table: &TensorType,
    ids: &TensorType,
    result: &TensorType,
) -> Vec<Factor> {
    let mut factors = Vec::new();
    for (at, size) in result.dims.iter().enumerate() {
        let operands = if at < dim {
            vec![Layout::cut(at), Layout::Replicated]
        } else if at < dim + ids.ndim() {
            vec![Layout::Replicated, Layout::cut(at - dim)]
        } else {
            vec![Layout::cut(at + 1 - ids.ndim()), Layout::Replicated]
        };
        factors.push(factor(size, operands, vec![Layout::cut(at)]));
    }
    let operands = vec![Layout::cut(dim), Layout::Replicated];
    let rows = factor(&table.dims[dim], operands, vec![Layout::Partial(Combiner::Sum)]);
    factors.push(Factor { offsets: vec![Offset::Start], ..rows });
    factors
}

fn scatter_factors(dim: usize, ids: &TensorType, result: &TensorType) -> Vec<Factor> {
    let mut factors = Vec::new();
    for (at, size) in ids.dims.iter().enumerate() {
        let operands = vec![Layout::cut(at), Layout::cut(dim + at)];
        factors.push(factor(size, operands, vec![Layout::Partial(Combiner::Sum)]));
    }
    for (at, size) in result.dims.iter().enumerate() {
        if at == dim {
            let operands = vec![Layout::Replicated, Layout::Replicated];
            let rows = factor(size, operands, vec![Layout::cut(at)]);
            factors.push(Factor { offsets: vec![Offset::Start], ..rows });
        } else {
            let in_x = if at < dim { at } else { at + ids.ndim() - 1 };
            let operands = vec![Layout::Replicated, Layout::cut(in_x)];
            factors.push(factor(size, operands, vec![Layout::cut(at)]));
        }
    }
    factors
}

/// Dims beside the ids, and the slices themselves: ids of other ranks' slices are left out.
fn replace_factors(dim: usize, ids: &TensorType, result: &TensorType) -> Vec<Factor> {
    let cut = |(at, size): (usize, &Dim)| {
        let updates = match at.cmp(&dim) {
            Ordering::Less => Layout::cut(at),
            Ordering::Equal => Layout::Replicated,
            Ordering::Greater => Layout::cut(at + ids.ndim() - 1),
        };
        let operands = vec![Layout::cut(at), Layout::Replicated, updates];
        let offsets = if at == dim { vec![Offset::Start] } else { Vec::new() };
        Factor { offsets, ..factor(size, operands, vec![Layout::cut(at)]) }
    };
    result.dims.iter().enumerate().map(cut).collect()
}

fn call_factors(callee: &str, module: &Module) -> Vec<Factor> {
    declared_factors(callee, module, |definition| definition.factors.clone())
}

/// Those of the declared factors of a composite that an instance of it has.
fn declared_factors(
    callee: &str,
    module: &Module,
    declared: impl Fn(&Definition) -> Vec<CompositeFactor>,
) -> Vec<Factor> {
    let Some(function) = module.function(callee) else { return Vec::new() };
    let Kind::Composite { name, attributes } = &function.kind else { return Vec::new() };
    let Some(template) = templates().get(name) else { return Vec::new() };
    let definition = template.definition(attributes);
    let pack = definition.pack_len(&function.param_types());
    let mut factors = Vec::new();
    for declared in declared(&definition) {
        let packed = declared.places.iter().any(|p| p.dim.is_none());
        let dims = if packed { 0..pack } else { 0..1 };
        factors.extend(dims.filter_map(|at| composite_factor(&declared, at, function, attributes)));
    }
    factors
}

/// A declared factor as it stands in an instance; `packed` is the dim meant by `..`.
fn composite_factor(
    declared: &CompositeFactor,
    packed: usize,
    function: &Function,
    attributes: &Attributes,
) -> Option<Factor> {
    let unit_of = |attribute: &Option<String>| match attribute {
        Some(name) => attributes.get(name).map(|unit| *unit as usize),
        None => Some(1),
    };
    let layout = |value: &str| -> Option<Layout> {
        let Some(place) = declared.places.iter().find(|p| p.value == value) else {
            return Some(Layout::Replicated);
        };
        Some(Layout::Cut { dim: place.dim.unwrap_or(packed), unit: unit_of(&place.unit)? })
    };
    let name = |id: &crate::ValueId| function.value(*id).name.as_str();
    let operands: Option<Vec<Layout>> = function.params().map(|p| layout(name(&p))).collect();
    let result = |id: &crate::ValueId| {
        let is_cut = declared.places.iter().any(|p| p.value == name(id));
        if !is_cut && declared.partial.iter().any(|p| p == name(id)) {
            Some(Layout::Partial(Combiner::Sum))
        } else {
            layout(name(id))
        }
    };
    let results: Option<Vec<Layout>> = function.results.iter().map(result).collect();
    let first = declared.places.first()?;
    let size = &function.ty(function.find(&first.value)?).dims[first.dim.unwrap_or(packed)];
    let units = size.divide(unit_of(&first.unit)? as i64)?;
    let counted = |(attribute, value): &(String, String)| {
        let place = declared.places.iter().find(|p| p.value == *value)?;
        Some((attribute.clone(), unit_of(&place.unit)?))
    };
    let offset = |named| counted(named).map(|(name, unit)| Offset::Attribute { name, unit });
    let whole = |named| counted(named).map(|(name, unit)| Offset::Whole { name, unit });
    let offsets = declared.offsets.iter().map(offset);
    let offsets: Option<Vec<Offset>> = offsets.chain(declared.wholes.iter().map(whole)).collect();
    Some(Factor { units, operands: operands?, results: results?, offsets: offsets? })
}
