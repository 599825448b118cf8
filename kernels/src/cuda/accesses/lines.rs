//! Accesses of operations along a dim.

use super::{Accesses, Blocks, LANES, Site, Sites, Warp, relative};
use crate::cuda::lines::{LineTile, THREADS};
use crate::kernel::{Line, Lines};

/// Accesses of one thread per line or element; none where values decide: of what is largest, and of
/// orders.
pub(super) fn lines(tile: &LineTile, grid: u64) -> Option<Accesses> {
    let of = &tile.lines;
    if matches!(of.how, Line::ArgMax | Line::Order { .. }) {
        return None;
    }
    let (each, bytes, mut sites) = (tile.each(), of.dtype.size(), Sites::default());
    let [load, store] = [0; 2].map(|_| sites.device(bytes as usize));
    let place = |thread: usize| Place {
        own: thread / of.inner % each,
        outer: thread / (of.inner * each),
        column: thread % of.inner,
    };
    let mut blocks = Blocks::new();
    for block in 0..grid as usize {
        let first = block * THREADS as usize;
        let threads = first..(first + THREADS as usize).min(tile.threads());
        let mut key = vec![threads.len() as u64];
        for extent in [of.extent, of.result] {
            let start = |thread: usize| place(thread).line(extent, of.inner) as u64 * bytes;
            relative(&mut key, threads.clone().map(start));
        }
        // Threads that follow each other have the next element, or the next line.
        let at = place(threads.start);
        key.extend([at.own as u64, at.column as u64]);
        blocks.count(key, 1, |warp| {
            for (number, thread) in threads.enumerate() {
                let lane = number % LANES;
                if lane == 0 {
                    warp.end();
                }
                place(thread).list(of, warp, lane, [load, store]);
            }
            warp.end();
        })?;
    }
    Some(blocks.count)
}

/// What a thread takes: an element of a line, of some outer dims and a column.
struct Place {
    own: usize,
    outer: usize,
    column: usize,
}

impl Place {
    /// The first element of the thread's line, of `extent` elements.
    fn line(&self, extent: usize, inner: usize) -> usize {
        self.outer * extent * inner + self.column
    }

    fn list(&self, of: &Lines, warp: &mut Warp, lane: usize, [load, store]: [Site; 2]) {
        let Lines { extent, result, inner, how, dtype, .. } = *of;
        let mut access = |site: Site, extent: usize, at: usize| {
            let place = self.line(extent, inner) + at * inner;
            warp.access(site, lane, place as u64 * dtype.size());
        };
        let mut sum = |of: &mut dyn Iterator<Item = usize>| {
            of.for_each(|at| access(load, extent, at));
            access(store, result, self.own);
        };
        match how {
            Line::Cumulative(_) => (0..extent).for_each(|at| {
                access(load, extent, at);
                access(store, result, at);
            }),
            Line::Prod => sum(&mut (0..extent)),
            Line::Reverse => sum(&mut [extent - 1 - self.own].into_iter()),
            Line::Fold { size, stride, dilation } => {
                let place = |at: &usize| at / size * stride + at % size * dilation;
                sum(&mut (0..extent).filter(|at| place(at) == self.own));
            }
            Line::Pool { size, stride, dilation, .. } => {
                sum(&mut (0..size).map(|tap| self.own * stride + tap * dilation));
            }
            Line::ArgMax | Line::Order { .. } => {}
        }
    }
}
