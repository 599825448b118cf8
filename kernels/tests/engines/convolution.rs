//! Convolutions of groups and of several images: each element is the chain of multiply-adds that a
//! product promises, whatever copies of its operands there are; on tensor cores it is as near to
//! the exact sum as the bound.

use gantline_kernels::cpu::Isa;
use gantline_kernels::cuda::{Arch, Functions, Tile, functions_for};
use gantline_kernels::verify::verify;
use gantline_kernels::{
    Border, Kernel, LoopAB, LoopABC, LoopAC, LoopBC, Product, StoredTypes, Tiling,
};
use ir::DType;
use ir::op::Operands;

use crate::shim::{Library, compiler};
use crate::tensor::{mistaken, ulp};
use crate::{Buffer, Case, Random, run_on_threads, same_bits, sets};

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
    spread: [usize; 2],
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
            spread: [1, 1],
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
            spread: self.spread[at],
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
            scales: None,
            tiling: Tiling::default(),
        }
    }

    /// The element of the image that a tap of a point of the result reads, without the channel.
    fn read(&self, y: [usize; 2], tap: [usize; 2]) -> Option<usize> {
        let at = |at: usize| {
            let position = y[at] * self.stride[at] + tap[at] * self.dilation[at];
            let position = usize::try_from(position as i64 - self.before[at]).ok()?;
            let (element, rest) = (position / self.spread[at], position % self.spread[at]);
            (rest == 0 && element < self.image[at]).then_some(element)
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

/// How images and kernels lie: `[N, G, C, Y, X]` and `[G, O, C, V, U]`; `[N, Y, X, G, C]` and
/// `[G, O, V, U, C]`; or, as in gradients of kernels of such images, whose samples are channels,
/// `[G, C, Y, X, N]` and `[G, O, C, V, U]`.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Layout {
    ChannelsFirst,
    ChannelsLast,
    SamplesLast,
}

/// A convolution of narrow numbers on tensor cores, and what it should give.
struct Narrow {
    convolution: Convolution,
    layout: Layout,
    product: Product,
    case: Case,
}

impl Narrow {
    /// A convolution, a gradient of its input, whose image has zeros between its elements, or one
    /// of its kernels, which are large.
    fn random(number: u64) -> Narrow {
        let mut random = Random::new(number + 4000);
        let mut pair = |low: usize, most: usize| [0, 1].map(|_| low + random.below(most));
        let [image, kernel, result] = match number % 3 {
            0 => [pair(3, 12), pair(1, 4), pair(1, 12)],
            1 => [pair(2, 8), pair(1, 4), pair(1, 14)],
            _ => [pair(6, 10), pair(4, 8), pair(1, 4)],
        };
        let (stride, dilation) = (pair(1, 2), pair(1, 2));
        let before = pair(0, 4).map(|n| n as i64 - 1);
        let spread = if number % 3 == 1 { pair(1, 2) } else { [1, 1] };
        let convolution = Convolution {
            images: random.pick(&[1, 2, 3, 8, 16]),
            groups: random.pick(&[1, 1, 2]),
            channels: random.pick(&[1, 3, 4, 8, 16, 24]),
            outputs: random.pick(&[1, 8, 20, 70, 130]),
            image,
            kernel,
            result,
            stride,
            dilation,
            before,
            spread,
            is_line: false,
        };
        let layout =
            random.pick(&[Layout::ChannelsFirst, Layout::ChannelsLast, Layout::SamplesLast]);
        let dtype = random.pick(&[DType::BF16, DType::F16]);
        let c = random.pick(&[DType::F32, dtype]);
        let mut product = convolution.product(c == DType::F32 && random.below(2) == 0);
        product.stored = StoredTypes { a: dtype, b: dtype, c };
        match layout {
            Layout::ChannelsFirst => {}
            Layout::ChannelsLast => convolution.lay_channels_last(&mut product),
            Layout::SamplesLast => convolution.lay_samples_last(&mut product),
        }
        let k = product.sizes()[3];
        product.tiling =
            Tiling { split: random.pick(&[1, 1, 2]), ..product.tiling }.without_empty(k);
        let case = Case::new(&mut random, Kernel::Product(product.clone()));
        Narrow { convolution, layout, product, case }
    }

    /// The furthest of all elements from its exact sum, as a share of the bound.
    fn share(&self, found: &Buffer) -> f64 {
        let c = &self.convolution;
        let [kernels, image] = [0, 1].map(|at: usize| self.case.inputs[at].numbers());
        let (found, old) = (found.numbers(), self.case.old[0].numbers());
        let [points, taps, results] = [c.image, c.kernel, c.result].map(|[a, b]| a * b);
        let mut most: f64 = 0.0;
        for at in 0..c.images * c.groups * c.outputs * results {
            let (y, at_o) = (at % results, at / results);
            let (o, g) = (at_o % c.outputs, at_o / c.outputs % c.groups);
            let n = at_o / c.outputs / c.groups;
            let place = match self.layout {
                Layout::ChannelsFirst => at,
                Layout::ChannelsLast => {
                    (n * results + y) * c.groups * c.outputs + g * c.outputs + o
                }
                Layout::SamplesLast => ((g * c.outputs + o) * results + y) * c.images + n,
            };
            let old = if self.product.accumulate { old[place] } else { 0.0 };
            let (mut sum, mut all) = (old, old.abs());
            for (channel, tap) in (0..c.channels).flat_map(|c| (0..taps).map(move |tap| (c, tap))) {
                let [y, tap_of] =
                    [[y / c.result[1], y % c.result[1]], [tap / c.kernel[1], tap % c.kernel[1]]];
                let Some(point) = c.read(y, tap_of) else { continue };
                let row = (g * c.outputs + o) * c.channels * taps;
                let first = row + channel * taps + tap;
                let (x, w) = match self.layout {
                    Layout::ChannelsFirst => {
                        (((n * c.groups + g) * c.channels + channel) * points + point, first)
                    }
                    Layout::ChannelsLast => (
                        ((n * points + point) * c.groups + g) * c.channels + channel,
                        row + tap * c.channels + channel,
                    ),
                    Layout::SamplesLast => {
                        (((g * c.channels + channel) * points + point) * c.images + n, first)
                    }
                };
                let term = kernels[w] * image[x];
                sum += term;
                all += term.abs();
            }
            let terms = (c.channels * taps + 4) as f64;
            let limit = terms * 2_f64.powi(-23) * all;
            let limit = limit + ulp(self.product.stored.c, sum.abs() + limit);
            let share = (found[place] - sum).abs() / limit;
            most = most.max(if share.is_nan() { f64::INFINITY } else { share });
        }
        most
    }
}

impl Convolution {
    /// Changes the strides of the product to those of channels that are contiguous.
    fn lay_channels_last(&self, p: &mut Product) {
        let [points, taps, results] = [self.image, self.kernel, self.result].map(|[a, b]| a * b);
        let [inputs, outputs] = [self.channels, self.outputs].map(|own| self.groups * own);
        let group = self.outputs * self.channels * taps;
        p.batch = vec![LoopABC { size: self.groups, a: group, b: self.channels, c: self.outputs }];
        p.m[0] = LoopAC { size: self.outputs, a: self.channels * taps, c: 1 };
        (p.n[0].b, p.n[0].c) = (points * inputs, results * outputs);
        (p.n[1].c, p.n[2].c) = (self.result[1] * outputs, outputs);
        (p.k[0].a, p.k[0].b) = (1, 1);
        (p.k[1].a, p.k[2].a) = (self.kernel[1] * self.channels, self.channels);
        for (border, step) in p.borders.iter_mut().zip([self.image[1] * inputs, inputs]) {
            border.step = step;
        }
    }

    /// Changes the strides of the product to those of samples that are contiguous.
    fn lay_samples_last(&self, p: &mut Product) {
        let (n, groups) = (self.images, &mut p.batch[0]);
        (groups.b, groups.c) = (groups.b * n, groups.c * n);
        p.m[0].c *= n;
        p.n.iter_mut().for_each(|of| of.c *= n);
        (p.n[0].b, p.n[0].c) = (1, 1);
        p.k[0].b *= n;
        p.borders.iter_mut().for_each(|border| border.step *= n);
    }
}

/// Convolutions of narrow numbers, with their products.
pub(crate) fn narrow(count: u64) -> impl Iterator<Item = (Case, Product)> {
    (0..count).map(Narrow::random).map(|of| (of.case, of.product))
}

/// The functions of a convolution, all of which are by tensor cores but for sums of slices.
fn on_tensor_cores(kernel: &Kernel, arch: Arch) -> (Kernel, Functions) {
    let functions = functions_for(kernel, arch);
    assert!(matches!(functions.functions[0].tile, Tile::Tensor(_)), "{kernel:?} on {arch}");
    (kernel.clone(), functions)
}

#[test]
fn convolutions_on_tensor_cores_are_as_near_to_exact_sums_as_the_bound() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let cases: Vec<Narrow> = (0..45).map(Narrow::random).collect();
    let kernels = cases.iter().map(|of| &of.case.kernel);
    let all: Vec<(Kernel, Functions)> =
        kernels.clone().map(|kernel| on_tensor_cores(kernel, Arch::Sm80)).collect();
    assert!(kernels.zip(&all).all(|(kernel, of)| on_tensor_cores(kernel, Arch::Sm90a) == *of));
    let by = |wanted: &str| {
        let texts = all.iter().map(|(_, of)| of.functions[0].to_string());
        texts.filter(|text| text.contains(wanted)).count()
    };
    let counts =
        ["a K-major by 8 of", "b K-major by 1 of", "b MN-major by 1 of", "b MN-major by 8 of"]
            .map(by);
    assert!(std::env::var("SEED").is_ok() || counts.iter().all(|count| *count > 2), "{counts:?}");
    let library = Library::new("convolutions", all).expect("there is a compiler");
    for (at, of) in cases.iter().enumerate() {
        let found = of.case.execute(&library, at, 0);
        let share = of.share(&found[0]);
        assert!(share <= 1.0, "{at}: {share} of the bound, {:?} {:?}", of.layout, of.convolution);
        let again = of.case.execute(&library, at, 5 + at as u64);
        assert!(same_bits(&again[0], &found[0]), "case {at}: the order of threads changes bits");
    }
}

/// What can be wrong in how an image is copied.
const MISTAKES: [(&str, usize, &str); 6] = [
    ("p0 >= 0", 0, "true"),
    ("p1 % 2 == 0", 0, "true"),
    ("p1 / 2 < 7", 0, "p1 / 2 <= 7"),
    ("(i64)(k / 8 % 3)", 0, "(i64)(k / 8 % 2)"),
    ("place = is_there ? place : batch_a;", 0, "is_there = true;"),
    ("m / 16 % 8", 0, "m / 16 % 9"),
];

#[test]
fn mistakes_in_how_images_are_copied_are_found() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let convolution = Convolution {
        images: 2,
        groups: 1,
        channels: 8,
        outputs: 20,
        image: [8, 7],
        kernel: [3, 3],
        result: [8, 16],
        stride: [1, 1],
        dilation: [1, 1],
        before: [1, 3],
        spread: [1, 2],
        is_line: false,
    };
    let mut product = convolution.product(false);
    product.stored = StoredTypes { a: DType::BF16, b: DType::BF16, c: DType::F32 };
    convolution.lay_channels_last(&mut product);
    let case = Case::new(&mut Random::new(6), Kernel::Product(product.clone()));
    let of = Narrow { convolution, layout: Layout::ChannelsLast, product, case };
    let change = |at: usize, text: String| match at {
        0 => text,
        _ => mistaken(&text, MISTAKES[at - 1]),
    };
    let all = vec![on_tensor_cores(&of.case.kernel, Arch::Sm80); MISTAKES.len() + 1];
    let library = Library::changed("image_mistakes", all, &change).expect("there is a compiler");
    let share = |at: usize| of.share(&of.case.execute(&library, at, 0)[0]);
    assert!(share(0) <= 1.0, "without a mistake nothing is found");
    for (at, mistake) in MISTAKES.iter().enumerate() {
        assert!(share(at + 1) > 1.0, "{mistake:?} is not found");
    }
}
