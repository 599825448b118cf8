//! How often ops occur in the layers of a module.

use std::collections::BTreeMap;

use ir::{Function, Kind, Module};

use crate::documents::FunctionRow;
use crate::output::Table;

/// How often each op occurs in a function, calls of composites under their own names.
fn ops(module: &Module, function: &Function) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for node in &function.nodes {
        let callee = node.callee().and_then(|name| module.function(name));
        let name = match callee.map(|callee| (&callee.kind, &callee.name)) {
            Some((Kind::Composite { name, .. }, _)) => name.clone(),
            Some((Kind::Layer | Kind::Kernel, name)) => format!("@{name}"),
            None => ir::infer::name(&node.op).to_owned(),
        };
        *counts.entry(name).or_insert(0) += 1;
    }
    counts
}

/// A function, for programs.
pub(crate) fn function_row(module: &Module, function: &Function) -> FunctionRow {
    FunctionRow { name: function.name.clone(), ops: ops(module, function) }
}

pub(crate) fn layers(module: &Module) -> impl Iterator<Item = &Function> {
    module.functions.iter().filter(|f| matches!(f.kind, Kind::Layer))
}

/// The ops of every layer.
pub(crate) fn op_table(module: &Module) -> Table {
    let mut table = Table::new(["function  ops"]);
    let width = layers(module).map(|f| f.name.len()).max().unwrap_or(0);
    for function in layers(module) {
        let ops: Vec<String> =
            ops(module, function).iter().map(|(name, n)| format!("{n} {name}")).collect();
        table.row([format!("{:<width$}  {}", function.name, ops.join(", "))]);
    }
    table
}
