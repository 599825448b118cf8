//! Paths through stages that interleave chunks (Narayanan et al. 2021).
//!
//! A stage holds v chunks of layers, and micro-batches go round: p passes of a chunk, then p of the
//! next one. It does N = m v passes of each kind, of which the first r = 2 (p − 1 − s) + (v − 1) p
//! are ahead, then F and B in turn, then the r gradients that are left; chunks of gradients are in
//! reverse. The first chunk of all holds the embedding, the last one the head, and some have a
//! layer less: what follows from a chunk depends on which it is.
//!
//! - The first B of all waits until a stage has done v − 1 rounds of p, what comes before it and
//!   what comes after; or until a stage has done its forward passes ahead.
//! - From then on a stage is busy with its pairs and the gradients that are left, or one above it
//!   that is slower is.
//! - Or it is busy until its last F, which goes down, and comes back in as many rounds.

/// A chunk, as far as times differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Chunk {
    First,
    Inner,
    Last,
}

/// Seconds of a pass of a micro-batch through the first chunk, an inner one, and the last.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Chunks {
    pub(super) first_s: f64,
    pub(super) inner_s: f64,
    pub(super) last_s: f64,
}

impl Chunks {
    fn of(&self, chunk: Chunk) -> f64 {
        match chunk {
            Chunk::First => self.first_s,
            Chunk::Inner => self.inner_s,
            Chunk::Last => self.last_s,
        }
    }

    fn plus(self, other: Chunks, times: f64) -> Chunks {
        Chunks {
            first_s: self.first_s + times * other.first_s,
            inner_s: self.inner_s + times * other.inner_s,
            last_s: self.last_s + times * other.last_s,
        }
    }
}

/// Stages that follow each other and are alike.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Interleaved {
    /// The first of them.
    pub(super) index: u32,
    /// How many there are.
    pub(super) count: u32,
    /// Forward passes.
    pub(super) forward: Chunks,
    /// Backward passes.
    pub(super) backward: Chunks,
}

/// How micro-batches go round.
#[derive(Clone, Copy, Debug)]
struct Rounds {
    /// Stages.
    p: f64,
    /// Chunks of each.
    v: f64,
    /// Micro-batches.
    m: f64,
}

impl Rounds {
    /// Passes of a stage, of each kind.
    fn passes(&self) -> f64 {
        self.m * self.v
    }

    /// Forward passes that a stage is ahead.
    fn ahead(&self, s: f64) -> f64 {
        (2.0 * (self.p - 1.0 - s) + (self.v - 1.0) * self.p).min(self.passes())
    }

    /// The chunk of a forward pass, counted from 0; of a gradient, counted from the end.
    fn chunk(&self, pass: f64) -> Chunk {
        let round = (pass / self.p).floor() % self.v;
        if round == 0.0 {
            Chunk::First
        } else if round + 1.0 < self.v {
            Chunk::Inner
        } else {
            Chunk::Last
        }
    }

    /// Seconds of a stage's first `passes` forward passes, or of its last `passes` backward passes.
    fn sum(&self, chunks: Chunks, passes: f64) -> f64 {
        let Rounds { p, v, .. } = *self;
        let all = (passes / (p * v)).floor();
        let rest = passes - all * p * v;
        let inner = (v - 2.0) * p;
        all * self.round(chunks)
            + rest.min(p) * chunks.first_s
            + (rest - p).clamp(0.0, inner) * chunks.inner_s
            + (rest - p - inner).max(0.0) * chunks.last_s
    }

    /// Seconds of p passes of each chunk.
    fn round(&self, chunks: Chunks) -> f64 {
        self.p * (chunks.first_s + (self.v - 2.0) * chunks.inner_s + chunks.last_s)
    }

    /// Seconds of p passes of each chunk but the last.
    fn early(&self, chunks: Chunks) -> f64 {
        self.p * (chunks.first_s + (self.v - 2.0) * chunks.inner_s)
    }
}

/// A stage of a pipeline, with the sums of those before it.
#[derive(Clone, Copy, Debug)]
struct Point {
    s: f64,
    forward: Chunks,
    backward: Chunks,
    before_f: Chunks,
    before_b: Chunks,
}

/// The stages that the longest paths go through: both ends of those that are alike, and the first
/// of them that does not do all forward passes at first, with its neighbours.
fn points(rounds: &Rounds, all: &[Interleaved]) -> (Vec<Point>, Chunks, Chunks) {
    let mut points = Vec::with_capacity(2 * all.len() + 3);
    let (mut before_f, mut before_b) = (Chunks::default(), Chunks::default());
    let Rounds { p, v, .. } = *rounds;
    let kink = (p - 1.0 - 0.5 * (rounds.passes() - (v - 1.0) * p)).floor();
    for alike in all {
        let (count, from) = (f64::from(alike.count), f64::from(alike.index));
        let kinks = [0.0, 1.0, 2.0].map(|more| kink - from + more);
        let inner = kinks.into_iter().filter(|at| 0.0 < *at && *at < count - 1.0);
        let ends = [0.0].into_iter().chain(inner).chain((count > 1.0).then_some(count - 1.0));
        let Interleaved { forward, backward, .. } = *alike;
        points.extend(ends.map(|at| Point {
            s: from + at,
            forward,
            backward,
            before_f: before_f.plus(forward, at),
            before_b: before_b.plus(backward, at),
        }));
        before_f = before_f.plus(forward, count);
        before_b = before_b.plus(backward, count);
    }
    (points, before_f, before_b)
}

/// Seconds from the start of the first pass to the end of the last, of `m` micro-batches through
/// stages with `chunks` chunks each.
pub(super) fn passes_s(all: &[Interleaved], chunks: u32, m: u64) -> f64 {
    let p = all.iter().map(|alike| f64::from(alike.count)).sum();
    let rounds = Rounds { p, v: f64::from(chunks), m: m as f64 };
    let (points, sum_f, sum_b) = points(&rounds, all);
    let n = rounds.passes();
    let most = |path: &dyn Fn(&Point) -> f64| points.iter().map(path).fold(0.0, f64::max);
    // Until the last chunk of the first micro-batch is at the bottom, and from there to the end.
    let down_s = most(&|at: &Point| {
        at.before_f.first_s + rounds.early(at.forward) + sum_f.last_s - at.before_f.last_s
    });
    let up_s = most(&|at: &Point| {
        at.before_b.first_s + rounds.early(at.backward) + sum_b.last_s - at.before_b.last_s
    });
    // When the first B has come all the way up.
    let mut first_up_s = down_s + sum_b.last_s;
    let mut longest_s = down_s + up_s;
    for (index, at) in points.iter().enumerate().rev() {
        let above = &points[..index];
        let r = rounds.ahead(at.s);
        let ahead = (r + 1.0).min(n);
        let chunk = rounds.chunk(ahead - 1.0);
        let come = at.before_f.of(chunk) + at.forward.of(chunk);
        let own_s = at.before_f.first_s + rounds.sum(at.forward, ahead);
        let ahead_s = above.iter().fold(own_s, |most, other| {
            let down_s = come - other.before_f.of(chunk) - other.forward.of(chunk);
            most.max(other.before_f.first_s + rounds.sum(other.forward, ahead) + down_s)
        });
        let back_s = at.before_b.last_s + at.backward.last_s;
        first_up_s = first_up_s.max(ahead_s + back_s);
        let first_s = first_up_s - back_s;
        let pairs_s = rounds.sum(at.forward, n) - rounds.sum(at.forward, ahead)
            + rounds.sum(at.backward, n)
            - rounds.sum(at.backward, r.min(n - 1.0));
        let left = r.min(n - 1.0);
        let pairs_end_s = first_s + pairs_s;
        longest_s =
            longest_s.max(pairs_end_s + rounds.sum(at.backward, left) + at.before_b.first_s);
        // The gradient that pairs end with goes up to a stage that does those that are left.
        let chunk = rounds.chunk(left);
        for other in above {
            let up_s = at.before_b.of(chunk) - other.before_b.of(chunk);
            let left_s = rounds.sum(other.backward, left) + other.before_b.first_s;
            longest_s = longest_s.max(pairs_end_s + up_s + left_s);
        }
        if n > r {
            let last_s = pairs_end_s - at.backward.of(chunk);
            let down_s = sum_f.last_s - at.before_f.last_s - at.forward.last_s;
            longest_s = longest_s.max(last_s + down_s + up_s);
        }
    }
    longest_s
}
