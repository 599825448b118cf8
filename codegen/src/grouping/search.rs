//! The search: items are assigned in order, and the least that each assignment leads to prunes.
//!
//! What an assignment changes is kept up to date and not found again: which groups wait for which,
//! what can join them no more, and the bytes of values of which all is known.

use std::collections::HashMap;

use ir::rewrite::price::Work;

use super::{Choice, ITEMS_MAX, Mask, Moved, PAIRS_MAX, Problem, bit, mask, ones};

/// Assigned items that share a kernel.
#[derive(Clone, Copy, Default)]
struct Group {
    items: Mask,
    /// The groups that it waits for, through others too.
    waits: Mask,
    /// The items that one of its own waits for, directly or not.
    before: Mask,
    /// The items that wait for one of its own.
    after: Mask,
    /// The items that are apart from one of its own.
    apart: Mask,
    /// The items that cannot join it: those, and those with which there would be a cycle.
    closed: Mask,
}

/// Some items, assigned to groups.
#[derive(Clone)]
struct State {
    groups: Vec<Group>,
    /// For each assigned item, its group.
    of_item: [u8; ITEMS_MAX],
    /// The bytes of values all of whose items are assigned.
    settled: u64,
}

/// What is known of values when some items are assigned.
struct Level {
    /// These items.
    done: Mask,
    /// The values of which the last assigned item is the last one.
    settled: Vec<usize>,
    /// Those of which some items are assigned and some are not.
    open: Vec<usize>,
    /// The least bytes of those of which no item is assigned.
    untouched: u64,
}

impl State {
    const EMPTY: State = State { groups: Vec::new(), of_item: [0; ITEMS_MAX], settled: 0 };

    fn group_of(&self, item: usize) -> usize {
        usize::from(self.of_item[item])
    }

    /// The groups that hold some of the items.
    fn holders(&self, items: Mask) -> Mask {
        ones(items).fold(0, |all, item| all | bit(self.group_of(item)))
    }

    /// This state with one more item, in the group `place` or in a new one; none where groups would
    /// wait for each other.
    fn with(&self, problem: &Problem<'_>, level: &Level, at: usize, place: usize) -> Option<State> {
        let mut next = self.clone();
        if place == next.groups.len() {
            next.groups.push(Group::default());
        }
        next.of_item[at] = place as u8;
        let others = level.done & !bit(at);
        let earlier = self.holders(problem.before[at] & others) & !bit(place);
        let later = self.holders(problem.after[at] & others) & !bit(place);
        let group = &mut next.groups[place];
        group.items |= bit(at);
        group.before |= problem.before[at];
        group.after |= problem.after[at];
        group.apart |= problem.apart[at];
        let waits = ones(earlier)
            .fold(group.waits | earlier, |waits, group| waits | self.groups[group].waits);
        for (at, group) in next.groups.iter_mut().enumerate() {
            if at == place {
                group.waits |= waits;
            } else if bit(at) & later != 0 || group.waits & (later | bit(place)) != 0 {
                if waits & bit(at) != 0 {
                    return None;
                }
                group.waits |= waits | bit(place);
            }
        }
        next.close();
        for value in &level.settled {
            next.settled += next.bytes(problem, level.done, *value);
        }
        Some(next)
    }

    /// Finds the items that can join groups no more.
    fn close(&mut self) {
        let mut within = (0, 0);
        for group in &mut self.groups {
            group.closed = group.apart;
            // What stands between items of a group can be in no other.
            let hull = group.before & group.after & !group.items;
            within = (within.0 | hull, within.1 | within.0 & hull);
        }
        for at in 0..self.groups.len() {
            let Group { waits, after, before, items, .. } = self.groups[at];
            for earlier in ones(waits) {
                self.groups[earlier].closed |= after;
                self.groups[at].closed |= self.groups[earlier].before;
            }
            let own = before & after & !items;
            self.groups[at].closed |= within.0 & !own | within.1;
        }
    }

    /// The least bytes that a value costs, when some items are assigned.
    fn bytes(&self, problem: &Problem<'_>, done: Mask, value: usize) -> u64 {
        let Moved { bytes, producer, is_kept, readers } = &problem.moved[value];
        let reading = self.holders(readers & done);
        let (away, times) = match *producer {
            None => (!0, reading.count_ones()),
            Some(at) if done & bit(at) != 0 => {
                let own = self.group_of(at);
                (self.groups[own].closed, (reading & !bit(own)).count_ones())
            }
            // It may be made in one of the groups that it can join.
            Some(at) => {
                let may_own = ones(reading).any(|group| self.groups[group].closed & bit(at) == 0);
                (problem.apart[at], reading.count_ones() - u32::from(may_own))
            }
        };
        let own = producer.filter(|at| done & bit(*at) != 0).map(|at| self.group_of(at));
        let reading = reading & !own.map_or(0, bit);
        let elsewhere = readers & !done & away;
        let others = ones(reading).fold(elsewhere, |all, group| all & self.groups[group].closed);
        let others = problem.apart_among(others);
        let is_stored = producer.is_some() && (*is_kept || times > 0 || elsewhere != 0);
        bytes * u64::from(times + others + u32::from(is_stored))
    }

    /// The least work of groupings that continue this one.
    fn least(&self, problem: &Problem<'_>, level: &Level) -> Work {
        let left = first(problem.nodes.len()) & !level.done;
        let new = self.groups.iter().fold(left, |new, group| new & group.closed);
        let known = problem.grow_clique(new & problem.clique, new);
        let new = known.count_ones().max(problem.grow_clique(0, new).count_ones());
        let open = level.open.iter().map(|value| self.bytes(problem, level.done, *value));
        let bytes = self.settled + level.untouched + open.sum::<u64>();
        Work { launches: self.groups.len() as u64 + u64::from(new), bytes, ..Work::default() }
    }
}

/// The first items.
fn first(count: usize) -> Mask {
    if count == ITEMS_MAX { !0 } else { bit(count) - 1 }
}

impl Problem<'_> {
    /// The order in which items are assigned: those of a clique first, each of which is a group,
    /// then those with the fewest of them to join.
    fn order(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.nodes.len()).collect();
        order.sort_by_key(|at| {
            let joins = self.clique & !self.apart[*at];
            (self.clique & bit(*at) == 0, joins.count_ones())
        });
        order
    }

    /// What is known of values, by how many items are assigned.
    fn levels(&self, order: &[usize]) -> Vec<Level> {
        let mut places = vec![0; order.len()];
        order.iter().enumerate().for_each(|(place, at)| places[*at] = place);
        let ends = |value: &Moved| {
            let items = value.readers | value.producer.map_or(0, bit);
            let places = ones(items).map(|at| places[at]);
            places.fold((usize::MAX, 0), |(start, end), at| (start.min(at), end.max(at)))
        };
        let ends: Vec<(usize, usize)> = self.moved.iter().map(ends).collect();
        let untouched: Vec<u64> =
            (0..ends.len()).map(|value| State::EMPTY.bytes(self, 0, value)).collect();
        let level = |assigned: usize| {
            let done = mask(&order[..assigned]);
            let mut level = Level { done, settled: Vec::new(), open: Vec::new(), untouched: 0 };
            for (value, (start, end)) in ends.iter().enumerate() {
                if assigned <= *start {
                    level.untouched += untouched[value];
                } else if assigned <= *end {
                    level.open.push(value);
                } else if assigned == end + 1 {
                    level.settled.push(value);
                }
            }
            level
        };
        (0..=order.len()).map(level).collect()
    }

    /// The cheapest grouping, or the given one if none is found that is cheaper.
    pub(crate) fn solve(&self, given: Vec<Mask>) -> (Vec<Mask>, Choice) {
        let order = self.order();
        let levels = self.levels(&order);
        let price = |work: Work| work.price_at(self.launch_bytes);
        let root = price(State::EMPTY.least(self, &levels[0]));
        let greedy = price(self.work(&given));
        let mut search = Search {
            problem: self,
            order,
            levels,
            best: (greedy, given),
            root,
            known: HashMap::new(),
            tries: 0,
            pairs: 0,
            is_cut: false,
        };
        search.assign(0, &State::EMPTY);
        let Search { best: (price, groups), tries, is_cut, .. } = search;
        let bound = if is_cut { root } else { price };
        let (work, launch_bytes) = (self.work(&groups), self.launch_bytes);
        let choice = Choice { work, launch_bytes, greedy, bound, tries };
        (groups, choice)
    }
}

struct Search<'p, 'f> {
    problem: &'p Problem<'f>,
    order: Vec<usize>,
    levels: Vec<Level>,
    /// The cheapest grouping so far, and its price.
    best: (u64, Vec<Mask>),
    /// The bound of all groupings.
    root: u64,
    /// Whether the items of a group fit a domain, for groups that were looked at.
    known: HashMap<Mask, bool>,
    tries: usize,
    /// Pairs of groups that were looked at.
    pairs: usize,
    /// Whether some groupings were not looked at for want of pairs.
    is_cut: bool,
}

impl Search<'_, '_> {
    /// Whether nothing is left to gain or too much was looked at.
    fn is_done(&mut self) -> bool {
        let is_best = self.best.0 <= self.root;
        self.is_cut |= !is_best && self.pairs >= PAIRS_MAX;
        is_best || self.is_cut
    }

    /// Tries all groups for the next item and those after it, the most promising first.
    fn assign(&mut self, assigned: usize, state: &State) {
        let problem = self.problem;
        let Some(at) = self.order.get(assigned).copied() else {
            let launches = state.groups.len() as u64;
            let work = Work { launches, bytes: state.settled, ..Work::default() };
            let price = work.price_at(problem.launch_bytes);
            if price < self.best.0 {
                self.best = (price, state.groups.iter().map(|group| group.items).collect());
            }
            return;
        };
        let mut children = Vec::new();
        for place in (0..=state.groups.len()).rev() {
            let group = state.groups.get(place).copied().unwrap_or_default();
            let joined = group.items | bit(at);
            let is_closed = group.closed & bit(at) != 0;
            if is_closed || !*self.known.entry(joined).or_insert_with(|| problem.fits(joined)) {
                continue;
            }
            let level = &self.levels[assigned + 1];
            let Some(next) = state.with(problem, level, at, place) else { continue };
            self.tries += 1;
            self.pairs += next.groups.len() * next.groups.len();
            let least = next.least(problem, level).price_at(problem.launch_bytes);
            if least < self.best.0 {
                children.push((least, next));
            }
        }
        // Stable: of equal ones the new group comes first, then the latest.
        children.sort_by_key(|(least, _)| *least);
        for (least, next) in children {
            if least >= self.best.0 || self.is_done() {
                return;
            }
            self.assign(assigned + 1, &next);
        }
    }
}
