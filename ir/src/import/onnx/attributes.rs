//! The kinds of attributes, which the standard gives to each name.

use super::proto::{AttributeProto, NodeProto};

/// The numbers of kinds in a file.
const FLOAT: i32 = 1;
const INT: i32 = 2;
const TEXT: i32 = 3;
const TENSOR: i32 = 4;
const FLOATS: i32 = 6;
const INTS: i32 = 7;

/// The kinds that an attribute may have; none for a name that no translation reads.
fn kinds(name: &str) -> &'static [i32] {
    match name {
        "allowzero"
        | "axis"
        | "batch_dims"
        | "blocksize"
        | "ceil_mode"
        | "count_include_pad"
        | "detect_negative"
        | "detect_positive"
        | "dtype"
        | "end"
        | "exclusive"
        | "fmod"
        | "group"
        | "ignore_index"
        | "k"
        | "keepdims"
        | "largest"
        | "noop_with_empty_axes"
        | "num_groups"
        | "num_outputs"
        | "p"
        | "reverse"
        | "select_last_index"
        | "start"
        | "to"
        | "training_mode"
        | "transA"
        | "transB"
        | "upper"
        | "value_int" => &[INT],
        "alpha" | "beta" | "bias" | "epsilon" | "gamma" | "lambd" | "max" | "min"
        | "value_float" => &[FLOAT],
        "approximate" | "auto_pad" | "equation" | "mode" | "reduction" => &[TEXT],
        "axes" | "dilations" | "ends" | "kernel_shape" | "output_padding" | "output_shape"
        | "pads" | "perm" | "shape" | "split" | "starts" | "strides" | "value_ints" => &[INTS],
        "value_floats" => &[FLOATS],
        // Of a constant, or what is padded with.
        "value" => &[TENSOR, FLOAT],
        _ => &[],
    }
}

fn words(kind: i32) -> &'static str {
    match kind {
        FLOAT => "a number",
        INT => "a whole number",
        TEXT => "a text",
        TENSOR => "a tensor",
        FLOATS => "a list of numbers",
        INTS => "a list of whole numbers",
        _ => "of another kind",
    }
}

/// What is wrong with the attributes of a node: one of another kind than its name has, or one that
/// stands there twice.
pub(super) fn wrong_attribute(node: &NodeProto) -> Option<String> {
    let mut seen: Vec<&str> = Vec::new();
    for AttributeProto { name, kind, .. } in &node.attribute {
        if seen.contains(&name.as_str()) {
            return Some(format!("two attributes `{name}`"));
        }
        seen.push(name);
        let allowed = kinds(name);
        if let (false, Some(wanted)) = (*kind == 0 || allowed.contains(kind), allowed.first()) {
            let (wanted, found) = (words(*wanted), words(*kind));
            return Some(format!("the attribute `{name}` is {found}, not {wanted}"));
        }
    }
    None
}
