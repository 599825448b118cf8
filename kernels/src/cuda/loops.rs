//! The loops of a product over its three buffers, and the borders of an image.

use super::index::coordinate_of;
use super::text::{Text, line};
use crate::border::Border;
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

/// Loops of which each goes on where the one inside it ends, as one; those of one point are left
/// out.
pub(super) fn joined(loops: &[[usize; 2]]) -> Vec<[usize; 2]> {
    let mut all: Vec<[usize; 2]> = Vec::new();
    for [size, stride] in loops.iter().copied().filter(|[size, _]| *size != 1) {
        match all.last_mut() {
            Some([outer, step]) if *step == size * stride => {
                *outer *= size;
                *step = stride;
            }
            _ => all.push([size, stride]),
        }
    }
    all
}

/// Prints where an element of an image lies along dims with zeros around them, given its indices
/// along the pixels of the result, and the sizes of these loops, and along k: `place` moves there,
/// and `is_there` becomes false of a zero.
pub(super) fn print_borders(p: &Product, (n, n_sizes): (&str, &[usize]), k: &str, text: &mut Text) {
    let k_sizes: Vec<usize> = p.k.iter().map(|l| l.size).collect();
    for (at, border) in p.borders.iter().enumerate() {
        let n = coordinate_of(n_sizes, border.n, n);
        let k = coordinate_of(&k_sizes, border.k, k);
        let Border { stride, dilation, before, spread, size, step, .. } = border;
        line!(
            text,
            "const i64 p{at} = (i64)({n}) * {stride} + (i64)({k}) * {dilation} - ({before}LL);"
        );
        let (is_whole, element) = match spread {
            1 => (String::new(), format!("p{at}")),
            _ => (format!(" && p{at} % {spread} == 0"), format!("p{at} / {spread}")),
        };
        line!(text, "is_there = is_there && p{at} >= 0{is_whole} && {element} < {size};");
        line!(text, "place += is_there ? (u64)({element}) * {step} : 0;");
    }
}
