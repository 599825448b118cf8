//! From which micro-batches a value was computed.

use std::collections::{BTreeSet, HashMap};

/// A label: an index into [`Labels`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Label(u32);

/// Micro-batches, and whether their terms were added up.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Set {
    batches: BTreeSet<usize>,
    is_sum: bool,
}

/// All labels of a replay, each once.
pub(super) struct Labels {
    sets: Vec<Set>,
    ids: HashMap<Set, Label>,
    unions: HashMap<(Label, Label), Label>,
    count: usize,
}

impl Labels {
    /// The label of what depends on no micro-batch: parameters, constants.
    pub(super) const NONE: Label = Label(0);

    /// Labels of a step of `count` micro-batches.
    pub(super) fn new(count: usize) -> Labels {
        let mut labels =
            Labels { sets: Vec::new(), ids: HashMap::new(), unions: HashMap::new(), count };
        labels.id(Set { batches: BTreeSet::new(), is_sum: false });
        labels
    }

    fn id(&mut self, set: Set) -> Label {
        if let Some(id) = self.ids.get(&set) {
            return *id;
        }
        let id = Label(self.sets.len() as u32);
        self.sets.push(set.clone());
        self.ids.insert(set, id);
        id
    }

    /// The label of a micro-batch's own values.
    pub(super) fn of(&mut self, microbatch: usize) -> Label {
        self.id(Set { batches: BTreeSet::from([microbatch]), is_sum: false })
    }

    /// The label of a value computed from two.
    pub(super) fn union(&mut self, a: Label, b: Label) -> Label {
        if a == b || b == Labels::NONE {
            return a;
        }
        if a == Labels::NONE {
            return b;
        }
        if let Some(known) = self.unions.get(&(a, b)) {
            return *known;
        }
        let (x, y) = (&self.sets[a.0 as usize], &self.sets[b.0 as usize]);
        let batches = x.batches.union(&y.batches).copied().collect();
        let set = Set { batches, is_sum: x.is_sum || y.is_sum };
        let union = self.id(set);
        self.unions.insert((a, b), union);
        union
    }

    /// The label of a sum over micro-batches with the same terms.
    pub(super) fn summed(&mut self, label: Label) -> Label {
        if label == Labels::NONE {
            return label;
        }
        let set = Set { is_sum: true, ..self.sets[label.0 as usize].clone() };
        self.id(set)
    }

    /// The micro-batch whose own value this is.
    pub(super) fn microbatch(&self, label: Label) -> Option<usize> {
        let set = &self.sets[label.0 as usize];
        if set.is_sum { None } else { set.batches.first().copied() }
    }

    /// Whether it is a sum over micro-batches.
    pub(super) fn is_sum(&self, label: Label) -> bool {
        self.sets[label.0 as usize].is_sum
    }

    /// Whether it is the sum over all micro-batches.
    pub(super) fn is_complete(&self, label: Label) -> bool {
        let set = &self.sets[label.0 as usize];
        set.is_sum && set.batches.len() == self.count
    }

    /// Why a value with this label can't be meant; none when it can.
    pub(super) fn fault(&self, label: Label) -> Option<String> {
        let set = &self.sets[label.0 as usize];
        let some: Vec<String> = set.batches.iter().take(4).map(ToString::to_string).collect();
        let more = if set.batches.len() > 4 { ", …" } else { "" };
        let listed = format!("{}{more}", some.join(", "));
        if !set.is_sum && set.batches.len() > 1 {
            return Some(format!("combines values of micro-batches {listed}"));
        }
        if set.is_sum && set.batches.len() != self.count {
            let count = self.count;
            return Some(format!("takes a sum of micro-batches {listed} for that of all {count}"));
        }
        None
    }
}
