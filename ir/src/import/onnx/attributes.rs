//! The kinds of attributes, which the standard gives to each name.

use super::proto::{AttributeProto, NodeProto};

/// The numbers of kinds in a file.
const FLOAT: i32 = 1;
const INT: i32 = 2;
const TEXT: i32 = 3;
const TENSOR: i32 = 4;
const GRAPH: i32 = 5;
const FLOATS: i32 = 6;
const INTS: i32 = 7;
const TEXTS: i32 = 8;

/// The kinds that attributes may have, by their names.
const KINDS: [(&str, &[i32]); 8] = [
    (
        "align_corners allowzero antialias axis batch_axis batch_dims block_size blocksize \
         ceil_mode center_point_box channels_last chunk_size count_include_pad \
         detect_negative detect_positive dtype end exclude_outside exclusive fmod group \
         hidden_size ignore_index input_forget interleaved inverse is_causal k keepdims \
         kv_num_heads largest layout left_window_size linear_before_reset new_axis \
         noop_with_empty_axes num_groups num_heads num_outputs num_scan_inputs offset_group \
         onesided output_datatype output_dtype output_height output_width p periodic \
         precision q_num_heads qk_matmul_output_mode reverse right_window_size \
         rotary_embedding_dim sampling_ratio saturate select_last_index size \
         softmax_precision sorted spatial start stash_type storage_order time_axis to \
         training_mode transA transB upper value_int",
        &[INT],
    ),
    (
        "alpha beta bias clip cubic_coeff_a decay_factor decay_factor_coefficient epsilon \
         extrapolation_value gamma high lambd low max mean min momentum norm_coefficient \
         norm_coefficient_post scale softcap spatial_scale value_float",
        &[FLOAT],
    ),
    (
        "activation approximate auto_pad coordinate_transformation_mode direction equation \
         keep_aspect_ratio_policy mode nearest_mode padding_mode reduction round_mode \
         update_rule",
        &[TEXT],
    ),
    (
        "axes broadcast_dims dilations ends kernel_shape output_padding output_shape pads \
         perm scan_input_axes scan_input_directions scan_output_axes scan_output_directions \
         shape split starts strides value_ints",
        &[INTS],
    ),
    ("activation_alpha activation_beta scales value_floats", &[FLOATS]),
    ("activations", &[TEXTS]),
    ("body else_branch then_branch", &[GRAPH]),
    ("value", &[TENSOR, FLOAT]),
];

/// The kinds that an attribute may have; none for a name that no translation reads.
fn kinds(name: &str) -> &'static [i32] {
    let found = KINDS.iter().find(|(names, _)| names.split(' ').any(|other| other == name));
    found.map_or(&[], |(_, kinds)| kinds)
}

fn words(kind: i32) -> &'static str {
    match kind {
        FLOAT => "a number",
        INT => "a whole number",
        TEXT => "a text",
        TENSOR => "a tensor",
        FLOATS => "a list of numbers",
        INTS => "a list of whole numbers",
        GRAPH => "a graph",
        TEXTS => "a list of texts",
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
