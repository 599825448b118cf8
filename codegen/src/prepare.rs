//! Preparation: what a module goes through before it is planned.
//!
//! A straight list of passes: composites are recognised, gradients added, composites without a
//! kernel inlined, and what is left is simplified, by rules that keep every bit unless more is
//! asked for.

use ir::rewrite::report::Report;
use ir::rewrite::saturate::Selection;
use ir::rewrite::{Options, simplify};
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
    /// Is shown the module after each pass, with the pass's name.
    pub after: &'p mut dyn FnMut(&'static str, &Module),
}

/// Adds the gradient function of every layer that `entry` calls, and inlines the composites that
/// have no kernel of their own, so that shardings and fusion see primitives.
///
/// # Errors
/// `E2001` when the entry is no list of calls, and what differentiation reports.
pub fn prepare_training(module: Module, entry: &str) -> Result<Module, Diagnostic> {
    prepare_for(Purpose::Training, module, entry)
}

/// As [`prepare_training`], for an entry that only runs forward.
///
/// # Errors
/// `E2001` when the entry is no list of calls.
pub fn prepare_inference(module: Module, entry: &str) -> Result<Module, Diagnostic> {
    prepare_for(Purpose::Inference, module, entry)
}

fn prepare_for(purpose: Purpose, module: Module, entry: &str) -> Result<Module, Diagnostic> {
    let selection = Selection::exact();
    let preparation = Preparation { purpose, selection, after: &mut |_, _| {} };
    Ok(prepare(module, entry, preparation)?.0)
}

/// Prepares a module; what recognition and simplification did is returned beside it.
///
/// # Errors
/// `E2001` when the entry is no list of calls, and what differentiation reports.
pub fn prepare(
    mut module: Module,
    entry: &str,
    preparation: Preparation<'_>,
) -> Result<(Module, [Report; 2]), Diagnostic> {
    let Preparation { purpose, selection, after } = preparation;
    let rules = |composites| Options {
        selection: Selection { composites, ..selection.clone() },
        ..Options::default()
    };
    after("import", &module);
    let layers = layers(&module, entry)?;
    let recognised = simplify(&mut module, &rules(selection.composites));
    after("recognise", &module);
    if purpose == Purpose::Training {
        for function in layers {
            ir::autodiff::differentiate(&mut module, &function)?;
        }
        after("autodiff", &module);
    }
    ir::inline::inline_composites(&mut module, is_in_catalogue);
    after("inline", &module);
    let simplified = simplify(&mut module, &rules(false));
    for function in &mut module.functions {
        ir::pass::remove_dead_nodes(function);
    }
    ir::inline::remove_unused_composites(&mut module);
    after("simplify", &module);
    Ok((module, [recognised, simplified]))
}

fn layers(module: &Module, entry: &str) -> Result<Vec<String>, Diagnostic> {
    let calls = Calls::of(module, entry).map_err(|why| {
        Diagnostic::error("E2001", Span::of(format!("@{entry}")), why)
            .help("put what is not a call into a function and call that")
    })?;
    Ok(calls.functions().into_iter().map(str::to_owned).collect())
}
