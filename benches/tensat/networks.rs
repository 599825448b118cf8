//! The networks of the TASO and TENSAT papers, one sample each, with the sizes of their papers.

use ir::op::{Binary, Unary};

use crate::net::{Built, Conv, Net, Pool, Value, build};

/// The networks, with the search time in seconds and the speed-up in percent that TENSAT reports
/// (Yang et al. 2021, a T4).
pub(crate) fn networks() -> Vec<(&'static str, Built, [f64; 2])> {
    vec![
        ("BERT", build(&[1, 64, 1024], &bert), [1.4, 9.2]),
        ("ResNeXt-50", build(&[1, 3, 224, 224], &resnext), [0.7, 8.8]),
        ("NasRNN", build(&[6, 512], &nas_rnn), [0.5, 68.9]),
        ("Inception-v3", build(&[1, 3, 299, 299], &inception), [5.1, 10.0]),
        ("SqueezeNet", build(&[1, 3, 224, 224], &squeeze_net), [0.3, 24.5]),
        ("VGG-19", build(&[1, 3, 224, 224], &vgg), [0.4, 8.9]),
    ]
}

/// Eight layers of 1,024 columns and 16 heads on 64 tokens (Devlin et al. 2018).
fn bert(net: &mut Net<'_>, tokens: Value) -> Value {
    (0..8).fold(tokens, |x, _| {
        let mixed = net.attention(x, 16);
        let projected = net.linear(mixed, 1024);
        let sum = net.binary(Binary::Add, x, projected);
        let x = net.layer_norm(sum);
        let inner = net.linear(x, 4096);
        let inner = net.composite("gelu_erf", inner);
        let outer = net.linear(inner, 1024);
        let sum = net.binary(Binary::Add, x, outer);
        net.layer_norm(sum)
    })
}

/// Blocks of 32 groups in four stages (Xie et al. 2017).
fn resnext(net: &mut Net<'_>, image: Value) -> Value {
    let x = net.conv(image, Conv::square(64, 7, 2, 3));
    let mut x = net.pool(x, Pool::Max, 3, 2, 1);
    for (stage, blocks) in [3, 4, 6, 3].into_iter().enumerate() {
        let width = 128 << stage;
        for block in 0..blocks {
            let stride = if stage > 0 && block == 0 { 2 } else { 1 };
            let y = net.conv(x, Conv::square(width, 1, 1, 0));
            let y = net.conv(y, Conv { groups: 32, ..Conv::square(width, 3, stride, 1) });
            let y = net.conv(y, Conv { relu: false, ..Conv::square(2 * width, 1, 1, 0) });
            if block == 0 {
                x = net.conv(x, Conv { relu: false, ..Conv::square(2 * width, 1, stride, 0) });
            }
            let sum = net.binary(Binary::Add, x, y);
            x = net.composite("relu", sum);
        }
    }
    x
}

/// The cell that a search found (Zoph and Le 2017), five steps of 512 columns: the first row is
/// the state, the others are the inputs.
fn nas_rnn(net: &mut Net<'_>, rows: Value) -> Value {
    use Binary::{Add, Mul};
    let [mut state, inputs @ ..] = std::array::from_fn::<Value, 6, _>(|at| net.row(rows, at));
    for input in inputs {
        let gates: [Value; 8] = std::array::from_fn(|_| {
            let (a, b) = (net.linear(state, 512), net.linear(input, 512));
            net.binary(Add, a, b)
        });
        let sigmoids = [1, 3, 4, 6].map(|at| net.sigmoid(gates[at]));
        let tanhs = [2, 5].map(|at| net.unary(Unary::Tanh, gates[at]));
        let relus = [0, 7].map(|at| net.composite("relu", gates[at]));
        let first = net.binary(Add, relus[0], sigmoids[1]);
        let second = net.binary(Add, sigmoids[0], tanhs[0]);
        let third = net.binary(Mul, sigmoids[2], tanhs[1]);
        let fourth = net.binary(Mul, sigmoids[3], relus[1]);
        let second = net.sigmoid(second);
        let [first, third, fourth] = [first, third, fourth].map(|x| net.unary(Unary::Tanh, x));
        let left = net.binary(Add, second, third);
        let right = net.binary(Mul, first, fourth);
        let [left, right] = [left, right].map(|x| net.unary(Unary::Tanh, x));
        let product = net.binary(Mul, left, right);
        state = net.unary(Unary::Tanh, product);
    }
    state
}

/// The published blocks without the side loss and the last layer (Szegedy et al. 2016).
fn inception(net: &mut Net<'_>, image: Value) -> Value {
    let x = net.conv(image, Conv::square(32, 3, 2, 0));
    let x = net.conv(x, Conv::square(32, 3, 1, 0));
    let x = net.conv(x, Conv::square(64, 3, 1, 1));
    let x = net.pool(x, Pool::Max, 3, 2, 0);
    let x = net.conv(x, Conv::square(80, 1, 1, 0));
    let x = net.conv(x, Conv::square(192, 3, 1, 0));
    let mut x = net.pool(x, Pool::Max, 3, 2, 0);
    for pooled in [32, 64, 64] {
        x = inception_a(net, x, pooled);
    }
    x = inception_b(net, x);
    for inner in [128, 160, 160, 192] {
        x = inception_c(net, x, inner);
    }
    x = inception_d(net, x);
    for _ in 0..2 {
        x = inception_e(net, x);
    }
    net.pool(x, Pool::Mean, 8, 1, 0)
}

/// Convolutions one after the other.
fn chain(net: &mut Net<'_>, x: Value, convs: &[Conv]) -> Value {
    convs.iter().fold(x, |x, conv| net.conv(x, *conv))
}

/// The mean of each element's neighbours, then a convolution of one element.
fn pooled(net: &mut Net<'_>, x: Value, outputs: usize) -> Value {
    let mean = net.pool(x, Pool::Mean, 3, 1, 1);
    net.conv(mean, Conv::square(outputs, 1, 1, 0))
}

fn inception_a(net: &mut Net<'_>, x: Value, outputs: usize) -> Value {
    let one = Conv::same(64, [1, 1]);
    let parts = [
        net.conv(x, one),
        chain(net, x, &[Conv::same(48, [1, 1]), Conv::same(64, [5, 5])]),
        chain(net, x, &[one, Conv::same(96, [3, 3]), Conv::same(96, [3, 3])]),
        pooled(net, x, outputs),
    ];
    net.concat(1, &parts)
}

fn inception_b(net: &mut Net<'_>, x: Value) -> Value {
    let last = Conv::square(96, 3, 2, 0);
    let parts = [
        net.conv(x, Conv::square(384, 3, 2, 0)),
        chain(net, x, &[Conv::same(64, [1, 1]), Conv::same(96, [3, 3]), last]),
        net.pool(x, Pool::Max, 3, 2, 0),
    ];
    net.concat(1, &parts)
}

fn inception_c(net: &mut Net<'_>, x: Value, inner: usize) -> Value {
    let [one, row, col] = [[1, 1], [1, 7], [7, 1]].map(|size| Conv::same(inner, size));
    let [last_row, last_col] = [[1, 7], [7, 1]].map(|size| Conv::same(192, size));
    let parts = [
        net.conv(x, Conv::same(192, [1, 1])),
        chain(net, x, &[one, row, last_col]),
        chain(net, x, &[one, col, row, col, last_row]),
        pooled(net, x, 192),
    ];
    net.concat(1, &parts)
}

fn inception_d(net: &mut Net<'_>, x: Value) -> Value {
    let [one, row, col] = [[1, 1], [1, 7], [7, 1]].map(|size| Conv::same(192, size));
    let parts = [
        chain(net, x, &[one, Conv::square(320, 3, 2, 0)]),
        chain(net, x, &[one, row, col, Conv::square(192, 3, 2, 0)]),
        net.pool(x, Pool::Max, 3, 2, 0),
    ];
    net.concat(1, &parts)
}

fn inception_e(net: &mut Net<'_>, x: Value) -> Value {
    let [row, col] = [[1, 3], [3, 1]].map(|size| Conv::same(384, size));
    let a = net.conv(x, Conv::same(384, [1, 1]));
    let b = chain(net, x, &[Conv::same(448, [1, 1]), Conv::same(384, [3, 3])]);
    let parts = [
        net.conv(x, Conv::same(320, [1, 1])),
        net.conv(a, row),
        net.conv(a, col),
        net.conv(b, row),
        net.conv(b, col),
        pooled(net, x, 192),
    ];
    net.concat(1, &parts)
}

/// Eight fire modules (Iandola et al. 2016, version 1.1).
fn squeeze_net(net: &mut Net<'_>, image: Value) -> Value {
    let mut x = net.conv(image, Conv::square(64, 3, 2, 0));
    for (squeeze, count) in [(16, 2), (32, 2), (48, 2), (64, 2)] {
        if squeeze != 64 {
            x = net.pool(x, Pool::Max, 3, 2, 0);
        }
        for _ in 0..count {
            let squeezed = net.conv(x, Conv::same(squeeze, [1, 1]));
            let ones = net.conv(squeezed, Conv::same(4 * squeeze, [1, 1]));
            let threes = net.conv(squeezed, Conv::same(4 * squeeze, [3, 3]));
            x = net.concat(1, &[ones, threes]);
        }
    }
    let classes = net.conv(x, Conv::same(1000, [1, 1]));
    let size = net.dims(classes)[2];
    net.pool(classes, Pool::Mean, size, 1, 0)
}

/// Sixteen convolutions and three layers of 4,096 (Simonyan and Zisserman 2014).
fn vgg(net: &mut Net<'_>, image: Value) -> Value {
    let mut x = image;
    for (width, count) in [(64, 2), (128, 2), (256, 4), (512, 4), (512, 4)] {
        for _ in 0..count {
            x = net.conv(x, Conv::same(width, [3, 3]));
        }
        x = net.pool(x, Pool::Max, 2, 2, 0);
    }
    let count = net.dims(x).iter().product();
    let mut x = net.reshape(x, &[1, count]);
    for width in [4096, 4096] {
        x = net.linear(x, width);
        x = net.composite("relu", x);
    }
    net.linear(x, 1000)
}
