//! Which groups of nodes wait for which, directly or not, while groups become one.

use fixedbitset::FixedBitSet;

/// For each group, the groups that it waits for and those that wait for it.
pub(crate) struct Waits {
    before: Vec<FixedBitSet>,
    after: Vec<FixedBitSet>,
}

impl Waits {
    /// Those of nodes that are each a group; `sources` are the nodes that each one reads, all
    /// before it. O(edges × nodes).
    pub(crate) fn of(sources: &[Vec<usize>]) -> Waits {
        let none = vec![FixedBitSet::with_capacity(sources.len()); sources.len()];
        let mut waits = Waits { before: none.clone(), after: none };
        for (at, sources) in sources.iter().enumerate() {
            let (known, own) = waits.before.split_at_mut(at);
            for source in sources {
                own[0].union_with(&known[*source]);
                own[0].insert(*source);
            }
            own[0].ones().for_each(|source| waits.after[source].insert(at));
        }
        waits
    }

    /// Whether a path leads from one group to another through a third.
    pub(crate) fn has_between(&self, a: usize, b: usize) -> bool {
        !self.after[a].is_disjoint(&self.before[b]) || !self.after[b].is_disjoint(&self.before[a])
    }

    /// Makes two groups one, which takes the place of the first; nothing is between them.
    pub(crate) fn merge(&mut self, a: usize, b: usize) {
        for sets in [&mut self.before, &mut self.after] {
            let other = std::mem::take(&mut sets[b]);
            sets[a].union_with(&other);
            [a, b].iter().for_each(|group| sets[a].remove(*group));
        }
        let (before, after) = (self.before[a].clone(), self.after[a].clone());
        for (sets, others, own) in
            [(&mut self.after, &before, &after), (&mut self.before, &after, &before)]
        {
            for other in others.ones() {
                sets[other].union_with(own);
                sets[other].insert(a);
                sets[other].remove(b);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use ir::random::mix;

    use super::*;

    /// Whether a path of at least `steps` edges leads from one group to another.
    fn leads(edges: &[(usize, usize)], from: usize, to: usize, steps: usize) -> bool {
        let mut next = edges.iter().filter(|(source, _)| *source == from);
        next.any(|(_, at)| {
            steps <= 1 && *at == to || *at != to && leads(edges, *at, to, steps.saturating_sub(1))
        })
    }

    /// What is kept up to date is what a walk along the edges finds.
    #[test]
    fn merged_groups_wait_for_what_a_walk_finds() {
        let (mut between, mut merged) = (0, 0);
        for seed in 0..40 {
            let draw =
                |n: usize, below: usize| (mix(seed << 32 ^ mix(n as u64)) % below as u64) as usize;
            // Sets of more than one word, whose members are far apart.
            let (count, far) = (12, 7);
            let mut sources = vec![Vec::new(); count * far];
            for at in 1..count {
                for source in 0..at {
                    if draw(at * count + source, 5) == 0 {
                        sources[at * far].push(source * far);
                    }
                }
            }
            let mut waits = Waits::of(&sources);
            let mut of_node: Vec<usize> = (0..sources.len()).collect();
            for step in 0..30 {
                let [a, b] = [0, 1].map(|n| of_node[far * draw(1000 + 2 * step + n, count)]);
                if a == b {
                    continue;
                }
                let edges = sources.iter().enumerate().flat_map(|(to, from)| {
                    from.iter().map(|from| (of_node[*from], of_node[to])).collect::<Vec<_>>()
                });
                let edges: Vec<_> = edges.filter(|(from, to)| from != to).collect();
                let found = leads(&edges, a, b, 2) || leads(&edges, b, a, 2);
                assert_eq!(waits.has_between(a, b), found, "seed {seed}, step {step}");
                if found {
                    between += 1;
                } else {
                    waits.merge(a, b);
                    of_node.iter_mut().filter(|group| **group == b).for_each(|group| *group = a);
                    merged += 1;
                }
            }
        }
        assert!(between > 100 && merged > 100, "{between} between, {merged} merged");
    }
}
