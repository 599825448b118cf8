//! The beam: states of a layer after each step, cheapest first, one per set of live layouts.
//!
//! A state says how each value so far lies on `tp` and into which other layouts it was resharded;
//! a second reader of a resharded value pays nothing. What was gathered in the forward pass is
//! gathered again in the backward pass, as nobody keeps gathered values; reduced ones are kept.

use codegen::partition::{Operands, choose};
use ir::op::Combiner;
use ir::sharding::largest_piece;
use ir::{Layout, ValueId};
use rustc_hash::FxHashSet;
use smallvec::SmallVec;

use super::problem::{Demand, Problem, Step, Way};

/// States that are kept after each step. Chosen: on all presets and meshes up to 8, twice as many
/// find nothing cheaper.
pub const BEAM_WIDTH: usize = 64;

/// What a search found.
#[derive(Clone, Debug)]
pub(super) struct Found {
    /// For each value, its layout on `tp`.
    pub(super) layouts: Vec<Layout>,
    /// The estimate of one call, forward and backward.
    pub(super) seconds: f64,
    /// Whether states were left out.
    pub(super) capped: bool,
}

/// A layout in one word, or that none is decided: states are copied and compared all the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Code(u64);

impl Code {
    const UNDECIDED: Code = Code(0);
    /// The bits of a kind, and those of a dim above it.
    const KIND_BITS: u32 = 3;
    const DIM_BITS: u32 = 5;

    fn of(layout: Layout) -> Code {
        let (kind, dim, unit) = match layout {
            Layout::Replicated => (1, 0, 0),
            Layout::Partial(Combiner::Sum) => (2, 0, 0),
            Layout::Partial(Combiner::Max) => (3, 0, 0),
            Layout::Partial(Combiner::Min) => (4, 0, 0),
            Layout::Cut { dim, unit } => (5, dim as u64, unit as u64),
        };
        let code = kind | dim << Code::KIND_BITS | unit << (Code::KIND_BITS + Code::DIM_BITS);
        assert_eq!(Code(code).layout(), Some(layout), "dims and units are small");
        Code(code)
    }

    fn layout(self) -> Option<Layout> {
        let dim = self.0 >> Code::KIND_BITS & ((1 << Code::DIM_BITS) - 1);
        let unit = self.0 >> (Code::KIND_BITS + Code::DIM_BITS);
        match self.0 & ((1 << Code::KIND_BITS) - 1) {
            0 => None,
            1 => Some(Layout::Replicated),
            2 => Some(Layout::Partial(Combiner::Sum)),
            3 => Some(Layout::Partial(Combiner::Max)),
            4 => Some(Layout::Partial(Combiner::Min)),
            _ => Some(Layout::Cut { dim: dim as usize, unit: unit as usize }),
        }
    }
}

struct State {
    seconds: f64,
    /// For each value its layout, once it is decided.
    layouts: Vec<Code>,
    /// Values that were resharded, and to what.
    copies: Vec<(ValueId, Code)>,
    /// The sum of the marks of what is live.
    mark: Mark,
}

/// A set of layouts in two words: an accidental equality would only lose a state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Mark(u64, u64);

impl Mark {
    fn of(value: ValueId, layout: Code, is_copy: bool) -> Mark {
        let word = layout.0 ^ u64::from(value.0) << 40 ^ u64::from(is_copy) << 39;
        let first = ir::random::mix(word);
        Mark(first, ir::random::mix(first ^ word.rotate_left(32)))
    }

    fn add(&mut self, other: Mark) {
        *self = Mark(self.0.wrapping_add(other.0), self.1.wrapping_add(other.1));
    }

    fn remove(&mut self, other: Mark) {
        *self = Mark(self.0.wrapping_sub(other.0), self.1.wrapping_sub(other.1));
    }
}

/// What a step changes in a state.
struct Draft<'s> {
    from: &'s State,
    seconds: f64,
    decided: SmallVec<[(ValueId, Code); 4]>,
    copied: SmallVec<[(ValueId, Code); 2]>,
}

impl Draft<'_> {
    fn layout(&self, value: ValueId) -> Option<Layout> {
        let decided = self.decided.iter().rev().find(|(of, _)| *of == value);
        decided.map_or(self.from.layouts[value.index()], |(_, code)| *code).layout()
    }

    fn decide(&mut self, value: ValueId, layout: Layout) {
        self.decided.push((value, Code::of(layout)));
    }

    fn has_copy(&self, value: ValueId, layout: Layout) -> bool {
        let copy = (value, Code::of(layout));
        self.copied.contains(&copy) || self.from.copies.contains(&copy)
    }

    /// The mark of the state, of what is read after step `at`.
    fn mark(&self, last_use: &[usize], at: usize) -> Mark {
        let is_live = |value: &ValueId| last_use[value.index()] > at;
        let mut mark = self.from.mark;
        for (nth, (value, code)) in self.decided.iter().enumerate() {
            let is_last = self.decided[nth + 1..].iter().all(|(later, _)| later != value);
            if !is_live(value) || !is_last {
                continue;
            }
            let before = self.from.layouts[value.index()];
            if before != Code::UNDECIDED {
                mark.remove(Mark::of(*value, before, false));
            }
            mark.add(Mark::of(*value, *code, false));
        }
        for (value, code) in self.copied.iter().filter(|(value, _)| is_live(value)) {
            mark.add(Mark::of(*value, *code, true));
        }
        mark
    }

    /// The state with the changes; copies that nobody reads after step `at` are forgotten.
    fn apply(self, mark: Mark, last_use: &[usize], at: usize) -> State {
        let mut layouts = self.from.layouts.clone();
        for (value, code) in self.decided {
            layouts[value.index()] = code;
        }
        let copies = self.from.copies.iter().copied().chain(self.copied);
        let copies = copies.filter(|(value, _)| last_use[value.index()] > at).collect();
        State { seconds: self.seconds, layouts, copies, mark }
    }
}

impl State {
    /// Takes values that are read for the last time out of the mark.
    fn forget(&mut self, dying: &[ValueId]) {
        for value in dying {
            let code = self.layouts[value.index()];
            if code != Code::UNDECIDED {
                self.mark.remove(Mark::of(*value, code, false));
            }
        }
        for (value, code) in self.copies.iter().filter(|(value, _)| dying.contains(value)) {
            self.mark.remove(Mark::of(*value, *code, true));
        }
    }
}

/// The cheapest layouts of a layer; or the name of the value that cannot be made as demanded.
pub(super) fn search(problem: &Problem<'_>) -> Result<Found, String> {
    let mut layouts = vec![Code::UNDECIDED; problem.function.values.len()];
    for param in problem.function.params() {
        layouts[param.index()] = match problem.demands[param.index()] {
            Demand::Is(layout) => Code::of(layout),
            Demand::Stored { .. } => Code::UNDECIDED,
            Demand::Free | Demand::Gradient(_) | Demand::Same(_) => Code::of(Layout::Replicated),
        };
    }
    let mark = Mark::default();
    let mut beam = vec![State { seconds: 0.0, layouts, copies: Vec::new(), mark }];
    let mut capped = false;
    for (at, step) in problem.steps.iter().enumerate() {
        let last_use = &problem.last_use;
        let dying: Vec<ValueId> =
            (0..last_use.len()).filter(|v| last_use[*v] == at).map(|v| ValueId(v as u32)).collect();
        for state in &mut beam {
            if at == problem.late_from {
                forget_gathered(state);
            }
            state.forget(&dying);
        }
        let mut next: Vec<Draft<'_>> = Vec::new();
        for state in &beam {
            next.extend(step.ways.iter().filter_map(|way| advance(problem, state, step, way)));
        }
        next.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        let mut seen = FxHashSet::default();
        let mut kept = Vec::new();
        for draft in next {
            let mark = draft.mark(last_use, at);
            if !seen.insert(mark) {
                continue;
            }
            if kept.len() == BEAM_WIDTH {
                capped = true;
                break;
            }
            kept.push(draft.apply(mark, last_use, at));
        }
        beam = kept;
        if beam.is_empty() {
            let node = &problem.function.nodes[step.node];
            return Err(problem.function.value(node.results[0]).name.clone());
        }
    }
    let best = beam.swap_remove(0);
    let layouts = best.layouts.iter().enumerate();
    let layouts = layouts.map(|(at, code)| code.layout().unwrap_or_else(|| unused(problem, at)));
    Ok(Found { layouts: layouts.collect(), seconds: best.seconds, capped })
}

/// The layout of a value that nobody reads.
fn unused(problem: &Problem<'_>, at: usize) -> Layout {
    match problem.demands[at] {
        Demand::Stored { cut: true } => problem.stored_cut(ValueId(at as u32)),
        Demand::Is(layout) => layout,
        Demand::Stored { cut: false } | Demand::Free | Demand::Gradient(_) | Demand::Same(_) => {
            Layout::Replicated
        }
    }
}

fn forget_gathered(state: &mut State) {
    let State { layouts, copies, mark, .. } = state;
    copies.retain(|(value, code)| {
        let is_reduced = matches!(layouts[value.index()].layout(), Some(Layout::Partial(_)));
        if !is_reduced {
            mark.remove(Mark::of(*value, *code, true));
        }
        is_reduced
    });
}

fn advance<'s>(
    problem: &Problem<'_>,
    state: &'s State,
    step: &Step,
    way: &Way,
) -> Option<Draft<'s>> {
    let node = &problem.function.nodes[step.node];
    let bad = |(result, layout): (&ValueId, &Layout)| match problem.demands[result.index()] {
        Demand::Is(wanted) => wanted != *layout,
        Demand::Free | Demand::Stored { .. } | Demand::Gradient(_) | Demand::Same(_) => false,
    };
    if node.results.iter().zip(&way.yields).any(bad) {
        return None;
    }
    let seconds = state.seconds + way.seconds;
    let (decided, copied) = (SmallVec::new(), SmallVec::new());
    let mut next = Draft { from: state, seconds, decided, copied };
    for (operand, wanted) in node.operands.iter().zip(&way.wanted) {
        bring(problem, &mut next, *operand, *wanted)?;
    }
    if way.ambiguous {
        let from: Option<Vec<Layout>> = node.operands.iter().map(|o| next.layout(*o)).collect();
        let sizes: Vec<u64> = node.operands.iter().map(|o| problem.elements[o.index()]).collect();
        // Terms are summed before they meet zeros.
        let operands = Operands { layouts: &from?, sizes: &sizes, zeros: &[], are_placed: false };
        let chosen = choose(node, (&step.factors, &|_| true), &operands, &way.yields)?;
        if chosen != way.choice {
            return None;
        }
    }
    for (result, layout) in node.results.iter().zip(&way.yields) {
        accept(problem, &mut next, *result, *layout)?;
        next.decide(*result, *layout);
    }
    Some(next)
}

/// Pays for an operand in the layout that a way wants; none when it cannot be had.
fn bring(
    problem: &Problem<'_>,
    state: &mut Draft<'_>,
    value: ValueId,
    wanted: Layout,
) -> Option<()> {
    let at = value.index();
    if state.layout(value).is_none() {
        let layout = first_layout(problem, state, value, wanted)?;
        state.decide(value, layout);
    }
    let layout = state.layout(value)?;
    if layout == wanted || state.has_copy(value, wanted) {
        return Some(());
    }
    if problem.made[at].is_some() && layout != Layout::Replicated {
        // Two readers want it differently: it is made whole, and sliced.
        state.decide(value, Layout::Replicated);
        state.seconds += problem.bytes[at] / problem.rates.memory_bytes_per_s;
        if wanted == Layout::Replicated {
            return Some(());
        }
    }
    let layout = state.layout(value)?;
    state.seconds += reshard_seconds(problem, value, layout, wanted)?;
    state.copied.push((value, Code::of(wanted)));
    Some(())
}

/// The layout of a value that its first reader decides.
fn first_layout(
    problem: &Problem<'_>,
    state: &mut Draft<'_>,
    value: ValueId,
    wanted: Layout,
) -> Option<Layout> {
    if let Some(cuts) = &problem.made[value.index()] {
        let layout = if cuts.contains(&wanted) { wanted } else { Layout::Replicated };
        let local = local_bytes(problem, value, layout);
        state.seconds += local / problem.rates.memory_bytes_per_s;
        return Some(layout);
    }
    match (problem.demands[value.index()], wanted) {
        (_, Layout::Partial(_)) => None,
        (_, Layout::Cut { .. }) => Some(wanted),
        (Demand::Stored { cut: true }, Layout::Replicated) => Some(problem.stored_cut(value)),
        (_, Layout::Replicated) => Some(Layout::Replicated),
    }
}

/// Whether a result may lie so. A gradient decides where its parameter lies when nobody read that.
fn accept(
    problem: &Problem<'_>,
    state: &mut Draft<'_>,
    value: ValueId,
    layout: Layout,
) -> Option<()> {
    let (of, terms) = match problem.demands[value.index()] {
        Demand::Gradient(of) => (of, true),
        Demand::Same(of) => (of, false),
        Demand::Free | Demand::Is(_) | Demand::Stored { .. } => return Some(()),
    };
    if state.layout(of).is_none() {
        let wanted = if matches!(layout, Layout::Partial(_)) { Layout::Replicated } else { layout };
        let first = first_layout(problem, state, of, wanted)?;
        state.decide(of, first);
    }
    let stored = state.layout(of)?;
    let term = stored == Layout::Replicated && layout == Layout::Partial(Combiner::Sum);
    (stored == layout || (terms && term)).then_some(())
}

/// The bytes of the largest piece.
fn local_bytes(problem: &Problem<'_>, value: ValueId, layout: Layout) -> f64 {
    let bytes = problem.bytes[value.index()];
    let Layout::Cut { dim, unit } = layout else { return bytes };
    let size = problem.function.ty(value).dims[dim].as_constant().unwrap_or(1).max(1) as usize;
    let largest = largest_piece(size, unit, problem.tp).unwrap_or(size);
    bytes * largest as f64 / size as f64
}

/// The time of bringing a value from one layout to another, as partition does it: pieces are padded
/// to the largest.
fn reshard_seconds(problem: &Problem<'_>, value: ValueId, from: Layout, to: Layout) -> Option<f64> {
    let members = problem.tp;
    let padded = |layout: Layout| local_bytes(problem, value, layout) * members as f64;
    let slice = || match to {
        Layout::Cut { .. } => local_bytes(problem, value, to) / problem.rates.memory_bytes_per_s,
        Layout::Replicated | Layout::Partial(_) => 0.0,
    };
    let link = problem.rates.link;
    match (from, to) {
        (_, Layout::Partial(_)) => None,
        (Layout::Partial(Combiner::Sum), Layout::Cut { .. }) => {
            Some(link.reduce_scatter(padded(to), members).0)
        }
        (Layout::Partial(_), _) => {
            Some(link.all_reduce(problem.bytes[value.index()], members).0 + slice())
        }
        (Layout::Cut { .. }, _) => Some(link.all_gather(padded(from), members).0 + slice()),
        (Layout::Replicated, _) => Some(slice()),
    }
}
