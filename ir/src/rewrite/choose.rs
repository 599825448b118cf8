//! Extraction: one term of each class that is needed, so that their prices sum to the least.
//!
//! A class that several terms read is paid once: the choice is a graph without cycles, not a tree.
//! Terms that cost no less and need no less than another of their class are left out first. Then
//! branch and bound: the class of fewest terms is decided first, a bound counts every class that is
//! needed whatever is chosen, at the price of its cheapest term. A choice that depends on itself is
//! refused as soon as it does. The budget counts decisions; where it ends, the gap to the bound of
//! what was not looked at is reported.

use std::collections::BTreeMap;

use egg::Id;
use fixedbitset::FixedBitSet;
use petgraph::algo::{DfsSpace, has_path_connecting};
use petgraph::visit::{
    Dfs, DfsEvent, GraphBase, GraphRef, IntoNeighbors, Visitable, depth_first_search,
};

use super::term::{Graph, Term};

/// The price of a term, in any unit.
pub type Price = u64;

/// The most decisions of one search. Chosen: about a tenth of a second on one core.
pub const DECISIONS_MAX: usize = 20_000;

/// A term of each class that is needed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The terms.
    pub terms: BTreeMap<Id, Term>,
    /// The sum of their prices.
    pub price: Price,
    /// No choice is cheaper.
    pub bound: Price,
    /// How many decisions were taken.
    pub decisions: usize,
}

impl Choice {
    /// How much cheaper another choice can be at most, as a part of this one's price.
    pub fn gap(&self) -> f64 {
        if self.price == 0 { 0.0 } else { (self.price - self.bound) as f64 / self.price as f64 }
    }
}

/// The cheapest choice for some classes. None when every choice depends on itself.
pub fn choose(
    graph: &Graph,
    results: &[Id],
    price: impl Fn(&Term) -> Price,
    decisions_max: usize,
) -> Option<Choice> {
    solve(&Problem::new(graph, results, price), decisions_max)
}

/// The cheapest choice among classes that are written down: for each class its terms, each a price
/// and the numbers of the classes that it reads. Of the choice only prices say anything.
pub fn choose_among(
    classes: &[Vec<(Price, Vec<usize>)>],
    results: &[usize],
    decisions_max: usize,
) -> Option<Choice> {
    let alternative = |(price, operands): &(Price, Vec<usize>)| {
        let mut operands = operands.clone();
        operands.sort_unstable();
        operands.dedup();
        let term = Term { head: super::term::Head::Param(0), operands: Vec::new() };
        Alternative { term, price: *price, operands }
    };
    let class = |(at, terms): (usize, &Vec<(Price, Vec<usize>)>)| {
        let terms = terms.iter().map(alternative).filter(|term| !term.operands.contains(&at));
        Class::of(terms.collect())
    };
    let ids = (0..classes.len()).map(Id::from).collect();
    let classes = classes.iter().enumerate().map(class).collect();
    let mut problem = Problem { ids, classes, results: results.to_vec() };
    problem.results.sort_unstable();
    problem.results.dedup();
    problem.find_needed();
    solve(&problem, decisions_max)
}

fn solve(problem: &Problem, decisions_max: usize) -> Option<Choice> {
    let greedy = problem.greedy()?;
    let found = Search::new(problem, greedy, decisions_max).run();
    let reached = problem.reached(&found.best);
    let terms = found.best.iter().enumerate().filter_map(|(class, term)| {
        let term = &problem.classes[class].terms[(*term)?];
        reached.contains(class).then(|| (problem.ids[class], term.term.clone()))
    });
    Some(Choice {
        terms: terms.collect(),
        price: found.best_price,
        bound: found.bound.min(found.best_price),
        decisions: found.decisions,
    })
}

/// A term with the numbers of the classes that it reads, each once.
struct Alternative {
    term: Term,
    price: Price,
    operands: Vec<usize>,
}

struct Class {
    terms: Vec<Alternative>,
    /// The price of the cheapest term.
    least: Price,
    /// The classes that every choice with this one has, itself included, ascending.
    needed: Vec<usize>,
}

impl Class {
    fn of(terms: Vec<Alternative>) -> Class {
        let terms = undominated(terms);
        let least = terms.iter().map(|t| t.price).min().unwrap_or(0);
        Class { terms, least, needed: Vec::new() }
    }
}

struct Problem {
    ids: Vec<Id>,
    classes: Vec<Class>,
    results: Vec<usize>,
}

/// For each class the number of its term, if it is decided.
type Decided = Vec<Option<usize>>;

/// A choice for one class and all that it needs.
#[derive(Clone)]
struct Under {
    price: Price,
    terms: Decided,
}

/// The classes, with an edge from each to those that its decided term reads.
#[derive(Clone, Copy)]
struct Reads<'p> {
    classes: &'p [Class],
    decided: &'p Decided,
}

impl GraphBase for Reads<'_> {
    type EdgeId = (usize, usize);
    type NodeId = usize;
}

impl GraphRef for Reads<'_> {}

impl<'p> IntoNeighbors for Reads<'p> {
    type Neighbors = std::iter::Copied<std::slice::Iter<'p, usize>>;

    fn neighbors(self, class: usize) -> Self::Neighbors {
        let term = self.decided[class].map(|at| &self.classes[class].terms[at]);
        term.map_or(&[][..], |term| &term.operands).iter().copied()
    }
}

impl Visitable for Reads<'_> {
    type Map = FixedBitSet;

    fn visit_map(&self) -> FixedBitSet {
        FixedBitSet::with_capacity(self.classes.len())
    }

    fn reset_map(&self, map: &mut FixedBitSet) {
        map.clear();
    }
}

impl Problem {
    fn new(graph: &Graph, results: &[Id], price: impl Fn(&Term) -> Price) -> Problem {
        let mut numbers: BTreeMap<Id, usize> = BTreeMap::new();
        let mut ids = Vec::new();
        let mut number = |id: Id, ids: &mut Vec<Id>| {
            let id = graph.find(id);
            *numbers.entry(id).or_insert_with(|| {
                ids.push(id);
                ids.len() - 1
            })
        };
        let mut results: Vec<usize> = results.iter().map(|id| number(*id, &mut ids)).collect();
        let mut classes: Vec<Class> = Vec::new();
        while classes.len() < ids.len() {
            let class = classes.len();
            let mut terms = Vec::new();
            for term in &graph[ids[class]].nodes {
                let mut operands: Vec<usize> =
                    term.operands.iter().map(|id| number(*id, &mut ids)).collect();
                operands.sort_unstable();
                operands.dedup();
                if !operands.contains(&class) {
                    terms.push(Alternative { term: term.clone(), price: price(term), operands });
                }
            }
            classes.push(Class::of(terms));
        }
        results.sort_unstable();
        results.dedup();
        let mut problem = Problem { ids, classes, results };
        problem.find_needed();
        problem
    }

    /// For each class what every choice with it has: itself, and what all its terms need. Starting
    /// from too much would be unsound where there are cycles, so that it grows from nothing.
    fn find_needed(&mut self) {
        let count = self.classes.len();
        let only = |class: usize| {
            let mut set = FixedBitSet::with_capacity(count);
            set.insert(class);
            set
        };
        let shared = |mut set: FixedBitSet, other: FixedBitSet| {
            set.intersect_with(&other);
            set
        };
        let mut needed: Vec<FixedBitSet> = (0..count).map(only).collect();
        let mut again = true;
        while again {
            again = false;
            for class in (0..count).rev() {
                let of_term = |term: &Alternative| {
                    let mut all = only(class);
                    term.operands.iter().for_each(|operand| all.union_with(&needed[*operand]));
                    all
                };
                let all = self.classes[class].terms.iter().map(of_term).reduce(shared);
                if let Some(all) = all.filter(|all| *all != needed[class]) {
                    needed[class] = all;
                    again = true;
                }
            }
        }
        for (class, needed) in self.classes.iter_mut().zip(needed) {
            class.needed = needed.ones().collect();
        }
    }

    /// A choice of a least price for each class as if nothing else were needed, sharing counted.
    fn greedy(&self) -> Option<Decided> {
        let mut best: Vec<Option<Under>> = vec![None; self.classes.len()];
        let mut again = true;
        while again {
            again = false;
            for class in (0..self.classes.len()).rev() {
                for (at, term) in self.classes[class].terms.iter().enumerate() {
                    let Some(found) = self.under(&best, class, at, term) else { continue };
                    if best[class].as_ref().is_none_or(|there| found.price < there.price) {
                        best[class] = Some(found);
                        again = true;
                    }
                }
            }
        }
        let mut decided = vec![None; self.classes.len()];
        let mut open = self.results.clone();
        while let Some(class) = open.pop() {
            if decided[class].is_none() {
                let at = best[class].as_ref()?.terms[class]?;
                decided[class] = Some(at);
                open.extend(&self.classes[class].terms[at].operands);
            }
        }
        if self.is_acyclic(&decided) { Some(decided) } else { self.first_come(&best) }
    }

    /// Where the best of each class do not fit together: those of the first result, then of the
    /// next what is still open, each a whole without cycles.
    fn first_come(&self, best: &[Option<Under>]) -> Option<Decided> {
        let mut decided: Decided = vec![None; self.classes.len()];
        for result in &self.results {
            let under = best[*result].as_ref()?;
            for (class, at) in under.terms.iter().enumerate() {
                decided[class] = decided[class].or(*at);
            }
        }
        self.is_acyclic(&decided).then_some(decided)
    }

    /// What a term has under it when each class is the best so far.
    fn under(
        &self,
        best: &[Option<Under>],
        class: usize,
        at: usize,
        term: &Alternative,
    ) -> Option<Under> {
        let mut terms: Decided = vec![None; self.classes.len()];
        for operand in &term.operands {
            for (mine, theirs) in terms.iter_mut().zip(&best[*operand].as_ref()?.terms) {
                *mine = mine.or(*theirs);
            }
        }
        if terms[class].is_some() {
            return None;
        }
        terms[class] = Some(at);
        Some(Under { price: self.price(&terms), terms })
    }

    fn reads<'p>(&'p self, decided: &'p Decided) -> Reads<'p> {
        Reads { classes: &self.classes, decided }
    }

    /// Whether nothing that the results reach through what is decided depends on itself.
    fn is_acyclic(&self, decided: &Decided) -> bool {
        let check = |event| if let DfsEvent::BackEdge(..) = event { Err(()) } else { Ok(()) };
        depth_first_search(self.reads(decided), self.results.iter().copied(), check).is_ok()
    }

    fn price(&self, decided: &Decided) -> Price {
        let of = |(class, at): (usize, &Option<usize>)| {
            at.map_or(0, |at| self.classes[class].terms[at].price)
        };
        decided.iter().enumerate().map(of).sum()
    }

    /// The classes that the results reach through what is decided.
    fn reached(&self, decided: &Decided) -> FixedBitSet {
        let reads = self.reads(decided);
        let mut walk = Dfs::empty(reads);
        for class in &self.results {
            walk.move_to(*class);
            while walk.next(reads).is_some() {}
        }
        walk.discovered
    }
}

/// Leaves out terms for which another of the class costs no more and reads no class in addition. Of
/// equal ones the first stays.
fn undominated(terms: Vec<Alternative>) -> Vec<Alternative> {
    let is_worse = |(at, term): (usize, &Alternative)| {
        terms.iter().enumerate().any(|(other_at, other)| {
            let is_subset = other.operands.iter().all(|o| term.operands.contains(o));
            let is_equal = other.price == term.price && other.operands == term.operands;
            is_subset && other.price <= term.price && other_at != at && (!is_equal || other_at < at)
        })
    };
    let keep: Vec<bool> = terms.iter().enumerate().map(|pair| !is_worse(pair)).collect();
    terms.into_iter().zip(keep).filter_map(|(term, keep)| keep.then_some(term)).collect()
}

struct Search<'p> {
    problem: &'p Problem,
    decisions_max: usize,
    decisions: usize,
    best: Decided,
    best_price: Price,
    /// The least bound of what was not looked at.
    bound: Price,
    /// The classes of more than one term.
    contested: Vec<usize>,
    /// What is decided; classes of one term are from the start.
    decided: Decided,
    /// How often each class is counted in the bound of the open choice.
    counted: Vec<u32>,
    /// The price of what is decided, and the least price of what else is counted.
    sum: Price,
    /// Room for a walk along what is decided.
    space: DfsSpace<usize, FixedBitSet>,
}

impl<'p> Search<'p> {
    fn new(problem: &'p Problem, greedy: Decided, decisions_max: usize) -> Search<'p> {
        let best_price = problem.price(&greedy);
        let count = problem.classes.len();
        let is_single = |class: &Class| class.terms.len() == 1;
        let contested = (0..count).filter(|at| !is_single(&problem.classes[*at])).collect();
        let decided = problem.classes.iter().map(|c| is_single(c).then_some(0)).collect();
        let space = DfsSpace::new(problem.reads(&decided));
        Search {
            problem,
            decisions_max,
            decisions: 0,
            best: greedy,
            best_price,
            bound: Price::MAX,
            contested,
            decided,
            counted: vec![0; count],
            sum: 0,
            space,
        }
    }

    fn run(mut self) -> Search<'p> {
        let results = self.problem.results.clone();
        for class in &results {
            self.count(*class);
        }
        self.branch();
        self
    }

    /// Counts what a class needs.
    fn count(&mut self, class: usize) {
        for at in &self.problem.classes[class].needed {
            if self.counted[*at] == 0 {
                self.sum += self.problem.classes[*at].least;
            }
            self.counted[*at] += 1;
        }
    }

    fn uncount(&mut self, class: usize) {
        for at in &self.problem.classes[class].needed {
            self.counted[*at] -= 1;
            if self.counted[*at] == 0 {
                self.sum -= self.problem.classes[*at].least;
            }
        }
    }

    /// The class of fewest terms among those that are needed and open.
    fn next(&self) -> Option<usize> {
        let is_open = |class: &usize| self.counted[*class] > 0 && self.decided[*class].is_none();
        let open = self.contested.iter().copied().filter(is_open);
        open.min_by_key(|class| (self.problem.classes[*class].terms.len(), *class))
    }

    fn branch(&mut self) {
        if self.sum >= self.best_price {
            return;
        }
        let Some(class) = self.next() else {
            self.best = self.decided.clone();
            self.best_price = self.sum;
            return;
        };
        let problem = self.problem;
        let mut order: Vec<usize> = (0..problem.classes[class].terms.len()).collect();
        let greedy = self.best[class];
        order.sort_by_key(|at| (greedy != Some(*at), problem.classes[class].terms[*at].price));
        for at in order {
            if self.decisions >= self.decisions_max {
                self.bound = self.bound.min(self.sum);
                return;
            }
            self.decisions += 1;
            self.decide(class, at);
        }
    }

    fn decide(&mut self, class: usize, at: usize) {
        let problem = self.problem;
        let term = &problem.classes[class].terms[at];
        let reads = problem.reads(&self.decided);
        let is_cyclic =
            |operand: &usize| has_path_connecting(reads, *operand, class, Some(&mut self.space));
        if term.operands.iter().any(is_cyclic) {
            return;
        }
        self.decided[class] = Some(at);
        self.sum += term.price - problem.classes[class].least;
        for operand in &term.operands {
            self.count(*operand);
        }
        self.branch();
        for operand in &term.operands {
            self.uncount(*operand);
        }
        self.sum -= term.price - problem.classes[class].least;
        self.decided[class] = None;
    }
}
