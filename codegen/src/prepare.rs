//! Preparation: what a training module goes through before it is planned.

use ir::{Diagnostic, Module, Span};

use crate::calls::Calls;
use crate::catalogue::is_in_catalogue;

/// The name of the gradient function of a layer.
pub fn gradient_name(function: &str) -> String {
    format!("{function}.grad")
}

/// The name of the entry that computes the same as `entry` without what is only for training.
pub fn evaluation_name(entry: &str) -> String {
    format!("{entry}_eval")
}

/// Adds the gradient function of every layer that `entry` calls, and inlines the composites that
/// have no kernel of their own, so that shardings and fusion see primitives.
///
/// # Errors
/// `E2001` when the entry is no list of calls, and what differentiation reports.
pub fn prepare_training(mut module: Module, entry: &str) -> Result<Module, Diagnostic> {
    for function in layers(&module, entry)? {
        ir::autodiff::differentiate(&mut module, &function)?;
    }
    finish(&mut module);
    Ok(module)
}

/// As [`prepare_training`], for an entry that only runs forward.
///
/// # Errors
/// `E2001` when the entry is no list of calls.
pub fn prepare_inference(mut module: Module, entry: &str) -> Result<Module, Diagnostic> {
    layers(&module, entry)?;
    finish(&mut module);
    Ok(module)
}

fn layers(module: &Module, entry: &str) -> Result<Vec<String>, Diagnostic> {
    let calls = Calls::of(module, entry).map_err(|why| {
        Diagnostic::error("E2001", Span::of(format!("@{entry}")), why)
            .help("put what is not a call into a function and call that")
    })?;
    Ok(calls.functions().into_iter().map(str::to_owned).collect())
}

fn finish(module: &mut Module) {
    ir::inline::inline_composites(module, is_in_catalogue);
    for function in &mut module.functions {
        ir::pass::remove_dead_nodes(function);
    }
    ir::inline::remove_unused_composites(module);
}
