//! The table of operators: the translation of each one that is supported.

use super::proto::is_standard;
use super::site::{Site, Translated};
use super::{
    attention, bits, casts, einsum, elementwise as each, indexing, inverse, losses, moving, pools,
    quantise, recurrent, resize, sampling, scatters, selected, shapes, signal, sums, training,
};
use crate::op::{Binary, Comparison, Unary};

/// How an operator is translated.
pub(super) type Translate = fn(&mut Site) -> Translated;

/// The translation of an operator of a domain; none when it is not supported.
pub(super) fn translation(domain: &str, operator: &str) -> Option<Translate> {
    if domain == "ai.onnx.preview.training" {
        return trained(operator);
    }
    if !is_standard(domain) {
        return None;
    }
    let simple = elementwise(operator).or_else(|| moved(operator)).or_else(|| summed(operator));
    simple.or_else(|| composed(operator)).or_else(|| whole(operator))
}

/// Refuses integers where an operator is of floating-point numbers only: the same ops on integers
/// would round every step.
pub(super) fn takes_integers(s: &Site) -> Result<(), String> {
    let operator = s.node.op_type.as_str();
    let is_of_floats = matches!(
        operator,
        "AveragePool"
            | "BatchNormalization"
            | "Ceil"
            | "Celu"
            | "Conv"
            | "ConvTranspose"
            | "Cosh"
            | "Det"
            | "Elu"
            | "Floor"
            | "Gelu"
            | "GlobalAveragePool"
            | "GlobalLpPool"
            | "GlobalMaxPool"
            | "GridSample"
            | "GroupNormalization"
            | "HardSigmoid"
            | "HardSwish"
            | "Hardmax"
            | "InstanceNormalization"
            | "IsInf"
            | "LRN"
            | "LayerNormalization"
            | "LeakyRelu"
            | "LogSoftmax"
            | "LpNormalization"
            | "LpPool"
            | "Mean"
            | "MeanVarianceNormalization"
            | "Mish"
            | "RMSNormalization"
            | "Reciprocal"
            | "Round"
            | "Selu"
            | "Sigmoid"
            | "Sinh"
            | "Softmax"
            | "Softplus"
            | "Softsign"
            | "Swish"
            | "Tan"
            | "ThresholdedRelu"
    );
    match s.element(0) {
        Some(element) if is_of_floats && !element.carrier().is_float() => {
            Err(format!("elements of type {}", element.name()))
        }
        Some(_) | None => Ok(()),
    }
}

fn elementwise(operator: &str) -> Option<Translate> {
    Some(match operator {
        "Neg" => |s| each::unary(s, Unary::Neg),
        "Abs" => |s| each::unary(s, Unary::Abs),
        "Exp" => |s| each::unary(s, Unary::Exp),
        "Log" => |s| each::unary(s, Unary::Log),
        "Sqrt" => |s| each::unary(s, Unary::Sqrt),
        "Tanh" => |s| each::unary(s, Unary::Tanh),
        "Erf" => |s| each::unary(s, Unary::Erf),
        "Sin" => |s| each::unary(s, Unary::Sin),
        "Cos" => |s| each::unary(s, Unary::Cos),
        "Floor" => |s| each::unary(s, Unary::Floor),
        "Add" | "Sum" => |s| each::binary(s, Binary::Add),
        "Sub" => |s| each::binary(s, Binary::Sub),
        "Mul" => |s| each::binary(s, Binary::Mul),
        "Div" => |s| each::binary(s, Binary::Div),
        "Max" => |s| each::binary(s, Binary::Max),
        "Min" => |s| each::binary(s, Binary::Min),
        "Mean" => each::mean,
        "Mod" => each::modulo,
        "Pow" => each::power,
        "Equal" => |s| each::compare(s, Comparison::Eq, false),
        "Less" => |s| each::compare(s, Comparison::Lt, false),
        "LessOrEqual" => |s| each::compare(s, Comparison::Le, false),
        "Greater" => |s| each::compare(s, Comparison::Lt, true),
        "GreaterOrEqual" => |s| each::compare(s, Comparison::Le, true),
        "Not" => each::not,
        "And" => |s| each::logic(s, "And"),
        "Or" => |s| each::logic(s, "Or"),
        "Xor" => |s| each::logic(s, "Xor"),
        "Where" => each::choose,
        "Cast" => casts::cast,
        "CastLike" => casts::cast_like,
        "IsNaN" => each::is_nan,
        "IsInf" => each::is_infinite,
        "Shrink" => each::shrink,
        "Clip" => each::clip,
        "Reciprocal" => each::reciprocal,
        "Sign" => each::sign,
        "Ceil" => each::ceil,
        "Round" => each::round,
        "Relu" | "Sigmoid" | "HardSigmoid" | "HardSwish" | "Softplus" | "Mish" | "Softsign"
        | "ThresholdedRelu" | "LeakyRelu" | "PRelu" | "Gelu" | "Elu" | "Selu" | "Celu" => {
            each::activation
        }
        "Tan" | "Sinh" | "Cosh" => each::trigonometric,
        "Identity" => each::identity,
        "Dropout" => each::dropout,
        _ => return None,
    })
}

fn moved(operator: &str) -> Option<Translate> {
    Some(match operator {
        "Shape" => moving::shape,
        "Size" => moving::size,
        "Constant" => moving::constant,
        "ConstantOfShape" => moving::constant_of_shape,
        "Range" => moving::range,
        "Reshape" => moving::reshape,
        "Flatten" => moving::flatten,
        "Transpose" => moving::transpose,
        "Squeeze" => moving::squeeze,
        "Unsqueeze" => moving::unsqueeze,
        "Concat" => moving::concat,
        "Split" => moving::split,
        "Slice" => moving::slice,
        "Expand" => moving::expand,
        "Tile" => moving::tile,
        "Pad" => shapes::pad,
        "Trilu" => moving::trilu,
        "EyeLike" => moving::eye_like,
        "OneHot" => moving::one_hot,
        "DepthToSpace" | "SpaceToDepth" => moving::depth_and_space,
        "CumSum" => moving::cumulative_sum,
        "Gather" => indexing::gather,
        "GatherElements" => indexing::gather_elements,
        "GatherND" => scatters::gather_of_batches,
        "ScatterElements" | "Scatter" => scatters::elements,
        "ScatterND" => scatters::rows,
        "TopK" => indexing::top_k,
        "ArgMax" => |s| indexing::arg(s, false),
        "ArgMin" => |s| indexing::arg(s, true),
        _ => return None,
    })
}

fn summed(operator: &str) -> Option<Translate> {
    Some(match operator {
        "MatMul" => sums::matmul,
        "Gemm" => sums::gemm,
        "Einsum" => einsum::einsum,
        "Conv" => sums::conv,
        "ConvTranspose" => sums::conv_transpose,
        "AveragePool" => sums::pool,
        "GlobalAveragePool" | "GlobalMaxPool" => sums::global_pool,
        "ReduceSum" | "ReduceMean" | "ReduceMax" | "ReduceMin" | "ReduceProd" | "ReduceL1"
        | "ReduceL2" | "ReduceSumSquare" | "ReduceLogSum" | "ReduceLogSumExp" => sums::reduction,
        "Softmax" | "LogSoftmax" => sums::softmax,
        "LayerNormalization" => sums::layer_norm,
        "RMSNormalization" => sums::rms_norm,
        "BatchNormalization" => sums::batch_norm,
        "InstanceNormalization" => sums::instance_norm,
        "GroupNormalization" => sums::group_norm,
        "LpNormalization" => sums::lp_normal,
        "NegativeLogLikelihoodLoss" => losses::negative_log_likelihood,
        "SoftmaxCrossEntropyLoss" => losses::softmax_cross_entropy,
        "Hardmax" => losses::hardmax,
        _ => return None,
    })
}

/// Of many ops.
fn composed(operator: &str) -> Option<Translate> {
    Some(match operator {
        "Attention" => attention::attention,
        "RotaryEmbedding" => attention::rotary,
        "Swish" | "SwiGLU" => attention::swish,
        "Resize" => resize::resize,
        "Upsample" => resize::upsample,
        "RNN" | "GRU" | "LSTM" => recurrent::recurrent,
        "LinearAttention" => shapes::linear_attention,
        "CausalConvWithState" => shapes::causal_conv,
        "MaxPool" => pools::max_pool,
        "MaxUnpool" => pools::max_unpool,
        "LpPool" => pools::lp_pool,
        "GlobalLpPool" => pools::global_lp_pool,
        "Col2Im" => pools::columns_to_image,
        "AffineGrid" => sampling::affine_grid,
        "GridSample" => sampling::grid_sample,
        "TensorScatter" => scatters::cached,
        "ReverseSequence" => scatters::reverse_sequences,
        "CenterCropPad" => shapes::centre,
        "CumProd" => shapes::cumulative_product,
        "Det" => shapes::determinant,
        "LRN" => shapes::local_response,
        "MeanVarianceNormalization" => shapes::standardised,
        "Acos" | "Asin" | "Atan" | "Acosh" | "Asinh" | "Atanh" => inverse::inverse,
        "HannWindow" | "HammingWindow" | "BlackmanWindow" => signal::window,
        "MelWeightMatrix" => signal::mel_weights,
        "DFT" => signal::fourier,
        "STFT" => signal::short_time_fourier,
        "NonZero" => selected::non_zero,
        "Compress" => selected::compress,
        "Unique" => selected::unique,
        "NonMaxSuppression" => selected::non_max_suppression,
        _ => return None,
    })
}

/// Of training.
fn trained(operator: &str) -> Option<Translate> {
    Some(match operator {
        "Momentum" => training::momentum,
        "Adagrad" => training::adagrad,
        "Adam" => training::adam,
        _ => return None,
    })
}

/// Of integers.
fn whole(operator: &str) -> Option<Translate> {
    Some(match operator {
        "BitShift" => bits::shift,
        "BitwiseNot" => bits::not,
        "BitwiseAnd" | "BitwiseOr" | "BitwiseXor" => bits::bitwise,
        "BitCast" => bits::cast_bits,
        "QuantizeLinear" => quantise::quantise,
        "DequantizeLinear" => quantise::dequantise,
        "DynamicQuantizeLinear" => quantise::quantise_dynamically,
        "MatMulInteger" => quantise::matmul_integer,
        "ConvInteger" => quantise::conv_integer,
        "QLinearMatMul" => quantise::qlinear_matmul,
        "QLinearConv" => quantise::qlinear_conv,
        _ => return None,
    })
}
