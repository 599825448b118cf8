//! Preparation: what a module goes through before it is planned.
//!
//! A straight list of passes: composites are recognised, gradients added, element types given by
//! role, composites without a kernel inlined, and what is left is simplified, by rules that keep
//! every bit unless more is asked for.

use ir::precision::{Precision, Products};
use ir::rewrite::report::Report;
use ir::rewrite::saturate::Selection;
use ir::rewrite::{Options, simplify};
use ir::{DType, Diagnostic, Dim, Function, Kind, Module, Node, Op, Span};

use crate::calls::Calls;
use crate::catalogue::is_in_catalogue;
use crate::quantise::quantise;
use crate::retype::retype;
use crate::saved::round_saved;

/// The name of the entry that computes the same as `entry` without what is only for training.
pub fn evaluation_name(entry: &str) -> String {
    format!("{entry}_eval")
}

/// What an entry is prepared for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Gradients of the layers that it calls are needed.
    Training,
    /// It only runs forward.
    Inference,
}

/// How a module is prepared.
pub struct Preparation<'p> {
    /// What for.
    pub purpose: Purpose,
    /// The rules that may be applied.
    pub selection: Selection,
    /// The element types by role. The module arrives in the type of sums.
    pub precision: Precision,
    /// Is shown the module after each pass, with the pass's name.
    pub after: &'p mut dyn FnMut(&'static str, &Module),
}

/// Adds the gradient function of every layer that `entry` calls, and inlines the composites that
/// have no kernel of their own, so that shardings and fusion see primitives.
///
/// # Errors
/// `E2001` when the entry is no list of calls, and what differentiation reports.
pub fn prepare_training(module: Module, entry: &str) -> Result<Module, Diagnostic> {
    prepare_training_as(module, entry, &Precision::uniform(DType::F32))
}

/// Prepares a module as [`prepare_training`] does, with the element types of `precision`; the
/// module comes with the type of its sums.
///
/// # Errors
/// Those of [`prepare_training`].
pub fn prepare_training_as(
    module: Module,
    entry: &str,
    precision: &Precision,
) -> Result<Module, Diagnostic> {
    prepare_for(Purpose::Training, module, entry, *precision)
}

/// Prepares a module as [`prepare_training`] does, for an entry that only runs forward.
///
/// # Errors
/// `E2001` when the entry is no list of calls.
pub fn prepare_inference(module: Module, entry: &str) -> Result<Module, Diagnostic> {
    prepare_inference_as(module, entry, &Precision::uniform(DType::F32))
}

/// Prepares a module as [`prepare_inference`] does, with the element types of `precision`; the
/// module comes with the type of its sums.
///
/// # Errors
/// Those of [`prepare_inference`].
pub fn prepare_inference_as(
    module: Module,
    entry: &str,
    precision: &Precision,
) -> Result<Module, Diagnostic> {
    prepare_for(Purpose::Inference, module, entry, *precision)
}

fn prepare_for(
    purpose: Purpose,
    module: Module,
    entry: &str,
    precision: Precision,
) -> Result<Module, Diagnostic> {
    let selection = Selection::for_models();
    let preparation = Preparation { purpose, selection, precision, after: &mut |_, _| {} };
    Ok(prepare(module, entry, preparation)?.0)
}

/// Prepares a module; what recognition and simplification did is returned beside it.
///
/// # Errors
/// `E2001` when the entry is no list of calls, `E2003` when a composite draws what no kernel draws,
/// and what differentiation reports.
pub fn prepare(
    mut module: Module,
    entry: &str,
    preparation: Preparation<'_>,
) -> Result<(Module, [Report; 2]), Diagnostic> {
    let Preparation { purpose, selection, precision, after } = preparation;
    let rules = |composites| Options {
        selection: Selection { composites, ..selection.clone() },
        ..Options::default()
    };
    if ir::pass::yield_once(&mut module) {
        ir::pass::take_once(&mut module);
    }
    after("import", &module);
    let layers = layers(&module, entry)?;
    let recognised = simplify(&mut module, &rules(selection.composites));
    after("recognise", &module);
    if purpose != Purpose::Inference {
        for function in layers {
            ir::autodiff::differentiate(&mut module, &function)?;
        }
        after("autodiff", &module);
    }
    if precision.compute.is_narrow() || precision.products != Products::Own {
        refuse_codes(&module, &precision)?;
        module = retype(&module, &precision)?;
        after("retype", &module);
        quantise(&mut module, &precision)?;
        after("quantise", &module);
    }
    ir::inline::inline_composites(&mut module, is_in_catalogue);
    place_draws(&mut module)?;
    after("inline", &module);
    let simplified = simplify(&mut module, &rules(false));
    if purpose != Purpose::Inference {
        round_saved(&mut module, &precision);
    }
    for function in &mut module.functions {
        ir::pass::remove_dead_nodes(function);
    }
    ir::inline::remove_unused_composites(&mut module);
    after("simplify", &module);
    Ok((module, [recognised, simplified]))
}

/// Says of each draw which of its elements belong to one sample, as long as the dims tell: draws of
/// what counts no samples are the same on all ranks and for all micro-batches.
fn place_draws(module: &mut Module) -> Result<(), Diagnostic> {
    let sample = Dim::symbol(Dim::BATCH);
    for function in &mut module.functions {
        let is_composite = matches!(function.kind, Kind::Composite { .. });
        for node in &mut function.nodes {
            let Op::Random { dims, per_sample, .. } = &mut node.op else { continue };
            let Some(first) = dims.first() else { continue };
            let count = match first.mentions(Dim::BATCH) {
                true => first.ratio(&sample).and_then(|count| u32::try_from(count).ok()),
                false => Some(0),
            };
            match count {
                // The kernels of composites count one.
                Some(count) if count == *per_sample || !is_composite => *per_sample = count,
                Some(_) | None => return Err(unplaced(&function.name, first)),
            }
        }
    }
    Ok(())
}

fn unplaced(function: &str, first: &Dim) -> Diagnostic {
    let headline =
        format!("`@{function}` draws numbers along `{first}`, which no kernel tells by samples");
    Diagnostic::error("E2003", Span::of(format!("@{function}")), headline)
        .note("what a rank draws begins at its first sample")
        .help(format!("make `{}` the first dim of what is dropped", Dim::BATCH))
}

/// Refuses products of codes where numbers become narrow: no role says what becomes of codes.
fn refuse_codes(module: &Module, precision: &Precision) -> Result<(), Diagnostic> {
    let is_read = |node: &&Node| matches!(node.op, Op::ScaledContract { .. });
    let reads = |function: &Function| function.nodes.iter().any(|node| is_read(&node));
    let Some(function) = module.functions.iter().find(|function| reads(function)) else {
        return Ok(());
    };
    if !precision.compute.is_narrow() {
        return Ok(());
    }
    let headline = format!("`scaled_contract` reads codes, which have no {}", precision.compute);
    Err(Diagnostic::error("E2003", Span::of(format!("@{}", function.name)), headline)
        .help("use `--dtype f32`"))
}

fn layers(module: &Module, entry: &str) -> Result<Vec<String>, Diagnostic> {
    let calls = Calls::of(module, entry).map_err(|why| {
        Diagnostic::error("E2001", Span::of(format!("@{entry}")), why)
            .help("put what is not a call into a function and call that")
    })?;
    Ok(calls.functions().into_iter().map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use ir::import::{Options, import, read_config};

    use super::*;

    /// What routers compare is not rounded where activations are: scores whose sums are kept have
    /// the type of sums, and so has what follows from them up to the gates.
    #[test]
    fn routers_compare_what_is_not_rounded() {
        let config = r#"{"model_type": "deepseek_v3", "vocab_size": 20, "num_hidden_layers": 1,
            "hidden_size": 16, "moe_intermediate_size": 8, "num_attention_heads": 2,
            "num_key_value_heads": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 4, "v_head_dim": 4, "n_routed_experts": 8, "n_group": 4,
            "topk_group": 2, "num_experts_per_tok": 2, "first_k_dense_replace": 0}"#;
        let description = read_config("config.json", config, "tiny").unwrap();
        let options = Options { seq: 8, dtype: DType::F32, dropout: None, documents: false };
        let module = import(&description, &options).unwrap().module;
        let precision = Precision::training(DType::BF16);
        let module = prepare_training_as(module, "loss", &precision).unwrap();
        for function in ["block", &ir::autodiff::gradient_name("block")] {
            let function = module.function(function).unwrap();
            let types = |op: &dyn Fn(&ir::Op) -> bool| {
                let nodes = function.nodes.iter().filter(|node| op(&node.op));
                let read = nodes.map(|node| function.ty(node.operands[0]).dtype);
                read.collect::<Vec<DType>>()
            };
            let compared = types(&|op| matches!(op, ir::Op::TopK { .. }));
            assert_eq!(compared, [DType::F32; 3], "{function}");
            let router = function.find("logits").expect("there are scores of experts");
            let makes = function.nodes.iter().find(|node| node.results.contains(&router)).unwrap();
            let dtypes = [makes.operands[0], router].map(|value| function.ty(value).dtype);
            assert_eq!(dtypes, [DType::BF16, DType::F32], "{function}");
            // Keys of which all heads share a part are as narrow as others.
            let keys = function.find("k_own").expect("there are keys");
            assert_eq!(function.ty(keys).dtype, DType::BF16, "{function}");
        }
    }
}
