//! The loops of a product over its three buffers.

use crate::kernel::Product;

/// The loops of a product, as sizes and strides in each of its buffers.
pub(super) struct Loops {
    pub(super) batch: [Vec<[usize; 2]>; 3],
    pub(super) m: [Vec<[usize; 2]>; 2],
    pub(super) n: [Vec<[usize; 2]>; 2],
    pub(super) k: [Vec<[usize; 2]>; 2],
}

impl Loops {
    pub(super) fn of(p: &Product) -> Loops {
        Loops {
            batch: [
                p.batch.iter().map(|l| [l.size, l.a]).collect(),
                p.batch.iter().map(|l| [l.size, l.b]).collect(),
                p.batch.iter().map(|l| [l.size, l.c]).collect(),
            ],
            m: [
                p.m.iter().map(|l| [l.size, l.a]).collect(),
                p.m.iter().map(|l| [l.size, l.c]).collect(),
            ],
            n: [
                p.n.iter().map(|l| [l.size, l.b]).collect(),
                p.n.iter().map(|l| [l.size, l.c]).collect(),
            ],
            k: [
                p.k.iter().map(|l| [l.size, l.a]).collect(),
                p.k.iter().map(|l| [l.size, l.b]).collect(),
            ],
        }
    }
}
