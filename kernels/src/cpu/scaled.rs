//! Products of codes with scales: what operands are worth is written to memory first, and
//! multiplied as numbers of F32.
//!
//! Plans for CPUs have no such products; those for GPUs are compared with them.

use std::collections::BTreeSet;

use ir::DType;
use ir::formats::decode;

use super::view::View;
use crate::arguments::Argument;
use crate::kernel::{Kernel, Product, ProductPart, Products, Scales, Source};

/// Where the inputs of a kernel come from whose products read numbers instead of codes and scales.
#[derive(Debug)]
pub(super) struct Numbers {
    /// By its inputs, the number of an input of the kernel with scales, or beyond these that of
    /// what is read.
    sources: Vec<usize>,
    reads: Vec<Read>,
}

/// An operand of codes: its number, that of its scales, and what it is to which product.
#[derive(Debug)]
struct Read {
    codes: usize,
    scales: usize,
    /// Whether it is `b`.
    is_b: bool,
    product: Product,
    argument: Argument,
}

impl Numbers {
    /// Those of a kernel that has scales, and the kernel that reads them.
    pub(super) fn of(kernel: &Kernel) -> Option<(Numbers, Kernel)> {
        let inputs = kernel.inputs().len();
        let Products { mut parts } = products_of(kernel)?;
        let mut reads = Vec::new();
        for part in parts.iter_mut().filter(|part| part.scales.is_some()) {
            let product = part.product.clone();
            let arguments = Kernel::Product(product.clone()).inputs();
            let numbers = part.scales.take().into_iter().flatten().zip([part.a, part.b]);
            for ((scales, codes), is_b) in numbers.zip([false, true]) {
                *(if is_b { &mut part.b } else { &mut part.a }) = inputs + reads.len();
                let (product, argument) = (product.clone(), arguments[usize::from(is_b)]);
                reads.push(Read { codes, scales, is_b, product, argument });
            }
            part.product.scales = None;
            (part.product.stored.a, part.product.stored.b) = (DType::F32, DType::F32);
        }
        let sources: BTreeSet<usize> = parts.iter().flat_map(ProductPart::operands).collect();
        let sources: Vec<usize> = sources.into_iter().collect();
        let number = |of: &mut usize| *of = sources.partition_point(|source| source < of);
        for part in &mut parts {
            [&mut part.a, &mut part.b].into_iter().for_each(number);
            part.bias.iter_mut().chain(&mut part.addend).for_each(number);
            for source in part.then.iter_mut().flat_map(|then| &mut then.inputs) {
                if let Source::Operand(of) = source {
                    number(of);
                }
            }
        }
        Some((Numbers { sources, reads }, Kernel::Products(Products { parts })))
    }

    /// What codes are worth, given the inputs of the kernel with scales.
    pub(super) fn read(&self, inputs: &[View]) -> Vec<Vec<f32>> {
        self.reads.iter().map(|read| read.numbers(inputs)).collect()
    }

    /// The inputs of the kernel that reads numbers.
    pub(super) fn inputs<'a>(&self, inputs: &[View<'a>], numbers: &'a [Vec<f32>]) -> Vec<View<'a>> {
        let input = |source: &usize| match source.checked_sub(inputs.len()) {
            None => inputs[*source],
            Some(read) => View::of(&numbers[read]),
        };
        self.sources.iter().map(input).collect()
    }

    /// Bytes of what codes of a kernel are worth.
    pub(super) fn bytes(kernel: &Kernel) -> usize {
        let parts = products_of(kernel).map_or_else(Vec::new, |products| products.parts);
        let scaled = parts.into_iter().map(|part| part.product).filter(|p| p.scales.is_some());
        let of = |p: Product| Kernel::Product(p).inputs()[..2].iter().map(|input| input.len).sum();
        scaled.map(of).map(|numbers: usize| numbers * size_of::<f32>()).sum()
    }
}

/// The products of a launch of which some have scales.
fn products_of(kernel: &Kernel) -> Option<Products> {
    #[expect(clippy::wildcard_enum_match_arm, reason = "nothing else has scales")]
    match kernel {
        Kernel::Product(p) if p.scales.is_some() => {
            let part = ProductPart { scales: Some([2, 3]), ..ProductPart::of(0, 1, p.clone()) };
            Some(Products { parts: vec![part] })
        }
        Kernel::Products(p) if p.parts.iter().any(|part| part.scales.is_some()) => Some(p.clone()),
        _ => None,
    }
}

impl Read {
    fn numbers(&self, inputs: &[View]) -> Vec<f32> {
        let Read { codes, scales, is_b, product: p, argument } = self;
        let worth: Vec<f32> =
            (0..=u8::MAX).map(|code| decode(argument.dtype, u16::from(code)) as f32).collect();
        let (codes, scales) = (bytes_of(&inputs[*codes]), bytes_of(&inputs[*scales]));
        let side: Vec<[usize; 2]> = match is_b {
            false => p.m.iter().map(|l| [l.size, l.a]).collect(),
            true => p.n.iter().map(|l| [l.size, l.b]).collect(),
        };
        let k: Vec<[usize; 2]> =
            p.k.iter().map(|l| [l.size, if *is_b { l.b } else { l.a }]).collect();
        let Some(Scales { block, of_block, of_run }) = p.scales.map(|of| of[usize::from(*is_b)])
        else {
            unreachable!("only operands with scales are read")
        };
        let (rows, sums) = (places(&side), places(&k));
        let mut numbers = vec![0.0; argument.len];
        for (row, of_row) in rows.iter().enumerate() {
            for (at, of_k) in sums.iter().enumerate() {
                let place = row / block * of_block + at / Scales::RUN * of_run;
                let scale = scales.as_chunks().0[place];
                let code = codes[of_row + of_k];
                numbers[of_row + of_k] = worth[usize::from(code)] * f32::from_ne_bytes(scale);
            }
        }
        numbers
    }
}

/// Where the points of a nest lie, in order.
fn places(loops: &[[usize; 2]]) -> Vec<usize> {
    loops.iter().fold(vec![0], |outer, [size, stride]| {
        outer.iter().flat_map(|from| (0..*size).map(move |at| from + at * stride)).collect()
    })
}

fn bytes_of<'a>(view: &View<'a>) -> &'a [u8] {
    // SAFETY: a view is of that many bytes, which nobody writes during the launch.
    unsafe { std::slice::from_raw_parts(view.as_ptr(), view.len()) }
}
