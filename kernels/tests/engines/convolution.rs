//! Convolutions of groups and of several images: each element is the chain of multiply-adds that a
//! product promises, whatever copies of its operands there are.

use gantline_kernels::cpu::Isa;
use gantline_kernels::verify::verify;
use gantline_kernels::{
    Border, Kernel, LoopAB, LoopABC, LoopAC, LoopBC, Product, StoredTypes, Tiling,
};
use ir::DType;
use ir::op::Operands;

use crate::{Buffer, Random, run_on_threads, same_bits, sets};

/// `image[N, G, C, Y, X]` and `kernels[G, O, C, V, U]` to `[N, G, O, Y, X]`.
#[derive(Debug)]
struct Convolution {
    images: usize,
    groups: usize,
    channels: usize,
    outputs: usize,
    image: [usize; 2],
    kernel: [usize; 2],
    result: [usize; 2],
    stride: [usize; 2],
    dilation: [usize; 2],
    before: [i64; 2],
    /// Whether there are borders of one dim alone, the last: the kernel is one point high.
    is_line: bool,
}

impl Convolution {
    fn random(random: &mut Random) -> Convolution {
        let is_line = random.below(5) == 0;
        let mut pair = |low: usize, most: usize| [0, 1].map(|_| low + random.below(most));
        let (image, mut kernel, mut result) = (pair(1, 24), pair(1, 6), pair(1, 50));
        let (mut stride, dilation) = (pair(1, 3), pair(1, 3));
        let mut before = pair(0, 8).map(|n| n as i64 - 3);
        if is_line {
            (kernel[0], result[0], stride[0], before[0]) = (1, image[0], 1, 0);
        }
        // Few rows, and few channels with them, half of the time.
        let most = if random.below(2) == 0 { [40, 9, 4] } else { [3, 70, 30] };
        let [groups, channels, outputs] = most.map(|most| 1 + random.below(most));
        let images = 1 + random.below(3);
        Convolution {
            images,
            groups,
            channels,
            outputs,
            image,
            kernel,
            result,
            stride,
            dilation,
            before,
            is_line,
        }
    }

    fn product(&self, accumulate: bool) -> Product {
        let [points, taps, results] = [self.image, self.kernel, self.result].map(|[a, b]| a * b);
        let (step, of_y) = ([self.image[1], 1], [self.result[1], 1]);
        let (inputs, outputs) = (self.channels * points, self.outputs * results);
        let own = |at: usize| if self.is_line && at == 0 { step[0] } else { 0 };
        let side = |at: usize| LoopBC { size: self.result[at], b: own(at), c: of_y[at] };
        let tap = |at: usize| LoopAB { size: self.kernel[at], a: [self.kernel[1], 1][at], b: 0 };
        let border = |at: usize| Border {
            n: 1 + at,
            k: 1 + at,
            stride: self.stride[at],
            dilation: self.dilation[at],
            before: self.before[at],
            spread: 1,
            size: self.image[at],
            step: step[at],
        };
        let group = self.outputs * self.channels * taps;
        Product {
            batch: vec![LoopABC { size: self.groups, a: group, b: inputs, c: outputs }],
            m: vec![LoopAC { size: self.outputs, a: self.channels * taps, c: results }],
            n: vec![
                LoopBC { size: self.images, b: self.groups * inputs, c: self.groups * outputs },
                side(0),
                side(1),
            ],
            k: vec![LoopAB { size: self.channels, a: taps, b: points }, tap(0), tap(1)],
            accumulate,
            dtype: DType::F32,
            stored: StoredTypes::all(DType::F32),
            operands: Operands::Exact,
            borders: if self.is_line { vec![border(1)] } else { vec![border(0), border(1)] },
            tiling: Tiling::default(),
        }
    }

    /// The element of the image that a tap of a point of the result reads, without the channel.
    fn read(&self, y: [usize; 2], tap: [usize; 2]) -> Option<usize> {
        let at = |at: usize| {
            let position = y[at] * self.stride[at] + tap[at] * self.dilation[at];
            let position = usize::try_from(position as i64 - self.before[at]).ok()?;
            (position < self.image[at]).then_some(position)
        };
        Some(at(0)? * self.image[1] + at(1)?)
    }

    /// One element, whose operands begin at the first of its image and of its row of kernels.
    fn element(
        &self,
        old: Option<f32>,
        [kernels, image]: [&[f32]; 2],
        y: [usize; 2],
        step: fn(f32, f32, f32) -> f32,
    ) -> f32 {
        let (points, taps) = (self.image[0] * self.image[1], self.kernel[0] * self.kernel[1]);
        let number = |k: usize| {
            let (channel, tap) = (k / taps, k % taps);
            let element = self.read(y, [tap / self.kernel[1], tap % self.kernel[1]]);
            element.map_or(0.0, |element| image[channel * points + element])
        };
        let all: Vec<usize> = (0..self.channels * taps).collect();
        let blocks = all.chunks(Product::K_BLOCK);
        let sums = blocks.map(|k| k.iter().fold(0.0, |sum, &k| step(kernels[k], number(k), sum)));
        let sum = old.into_iter().chain(sums).reduce(|sum, block| sum + block);
        sum.expect("there are points")
    }

    fn reference(
        &self,
        [kernels, image]: [&[f32]; 2],
        old: Option<&[f32]>,
        step: fn(f32, f32, f32) -> f32,
    ) -> Vec<f32> {
        let (points, taps) = (self.image[0] * self.image[1], self.kernel[0] * self.kernel[1]);
        let (inputs, row) = (self.channels * points, self.channels * taps);
        let mut all = Vec::new();
        for at in 0..self.images * self.groups * self.outputs {
            let (image_of, group) = (at / self.outputs, at / self.outputs % self.groups);
            let kernels = &kernels[(group * self.outputs + at % self.outputs) * row..][..row];
            let image = &image[image_of * inputs..][..inputs];
            for y in 0..self.result[0] * self.result[1] {
                let place = [y / self.result[1], y % self.result[1]];
                let old = old.map(|old| old[all.len()]);
                all.push(self.element(old, [kernels, image], place, step));
            }
        }
        all
    }
}

#[test]
fn convolutions_have_the_bits_of_their_chains() {
    for case in 0..24 {
        let mut random = Random::new(case);
        let convolution = Convolution::random(&mut random);
        let p = convolution.product(random.below(2) == 0);
        let kernel = Kernel::Product(p.clone());
        verify(&kernel).unwrap_or_else(|why| panic!("{p:?}: {why}"));
        let lens: Vec<usize> =
            kernel.inputs().iter().chain(&kernel.outputs()).map(|a| a.len).collect();
        let numbers = |random: &mut Random, at: usize| -> Vec<f32> {
            random.numbers(lens[at]).into_iter().map(|x| x as f32).collect()
        };
        let [a, b, c] = [0, 1, 2].map(|at| numbers(&mut random, at));
        for isa in sets() {
            // Without the instruction a step is rounded twice.
            let step = match isa {
                Isa::Portable => |a: f32, b: f32, sum: f32| a * b + sum,
                Isa::Avx2 | Isa::Avx512 | Isa::Avx512Bf16 | Isa::Amx => f32::mul_add,
            };
            let old = p.accumulate.then_some(&c[..]);
            let want = convolution.reference([&a, &b], old, step);
            let inputs = [Buffer::F32(a.clone()), Buffer::F32(b.clone())];
            let got = run_on_threads(isa, &kernel, &inputs, &[Buffer::F32(c.clone())]);
            assert!(same_bits(&got[0], &Buffer::F32(want)), "{case} {isa:?} {convolution:?}");
        }
    }
}
