//! Which groups of nodes wait for which, directly or not, while groups become one.

/// For each group, the groups that it waits for and those that wait for it, as sets of bits.
pub(crate) struct Waits {
    /// Words of one set.
    words: usize,
    before: Vec<u64>,
    after: Vec<u64>,
}

impl Waits {
    /// Those of nodes that are each a group; `sources` are the nodes that each one reads, all
    /// before it. O(edges × nodes).
    pub(crate) fn of(sources: &[Vec<usize>]) -> Waits {
        let words = sources.len().div_ceil(64);
        let none = vec![0; words * sources.len()];
        let mut waits = Waits { words, before: none.clone(), after: none };
        for (at, sources) in sources.iter().enumerate() {
            for source in sources {
                let (known, own) = waits.before.split_at_mut(at * words);
                add(&mut own[..words], &known[source * words..][..words]);
                set(&mut own[..words], *source);
            }
            for source in ones(&waits.before[at * words..][..words]) {
                set(&mut waits.after[source * words..][..words], at);
            }
        }
        waits
    }

    /// Whether a path leads from one group to another through a third.
    pub(crate) fn has_between(&self, a: usize, b: usize) -> bool {
        let [of_a, of_b] = [a, b].map(|group| self.range(group));
        let meet = |x: &[u64], y: &[u64]| x.iter().zip(y).any(|(x, y)| x & y != 0);
        meet(&self.after[of_a.clone()], &self.before[of_b.clone()])
            || meet(&self.after[of_b], &self.before[of_a])
    }

    /// Makes two groups one, which takes the place of the first; nothing is between them.
    pub(crate) fn merge(&mut self, a: usize, b: usize) {
        let (range, words) = (self.range(a), self.words);
        for sets in [&mut self.before, &mut self.after] {
            let other = sets[b * words..][..words].to_vec();
            sets[b * words..][..words].fill(0);
            add(&mut sets[range.clone()], &other);
            [a, b].iter().for_each(|group| clear(&mut sets[range.clone()], *group));
        }
        let [before, after] = [&self.before, &self.after].map(|sets| sets[range.clone()].to_vec());
        for (sets, others, own) in
            [(&mut self.after, &before, &after), (&mut self.before, &after, &before)]
        {
            for other in ones(others) {
                let row = &mut sets[other * words..][..words];
                add(row, own);
                set(row, a);
                clear(row, b);
            }
        }
    }

    fn range(&self, group: usize) -> std::ops::Range<usize> {
        group * self.words..(group + 1) * self.words
    }
}

fn add(row: &mut [u64], other: &[u64]) {
    row.iter_mut().zip(other).for_each(|(word, other)| *word |= other);
}

fn set(row: &mut [u64], at: usize) {
    row[at / 64] |= 1 << (at % 64);
}

fn clear(row: &mut [u64], at: usize) {
    row[at / 64] &= !(1 << (at % 64));
}

/// The members of a set, in order.
fn ones(row: &[u64]) -> impl Iterator<Item = usize> + use<> {
    let words = row.to_vec();
    words.into_iter().enumerate().flat_map(|(at, mut word)| {
        std::iter::from_fn(move || {
            let bit = word.trailing_zeros() as usize;
            word &= word.wrapping_sub(1);
            (bit < 64).then_some(at * 64 + bit)
        })
    })
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
