//! A module as a graph in Graphviz's language.
//!
//! A frame for each function, a box for each operation, an arrow for each operand. Composites that
//! are only called are boxes, and their definitions are left out.

use ir::{Function, Kind, Module, ValueId};

/// The text. Equal modules have equal texts.
pub(super) fn print(module: &Module) -> String {
    let mut text = format!("digraph {} {{\n", quoted(&module.name));
    text += "  node [shape=box, fontname=\"monospace\"];\n";
    for function in module.functions.iter().filter(|f| f.kind == Kind::Layer) {
        print_function(&mut text, function);
    }
    text += "}\n";
    text
}

fn print_function(text: &mut String, function: &Function) {
    let mut line = |line: String| *text += &format!("    {line}\n");
    let name = &function.name;
    let value = |id: ValueId| format!("%{}: {}", function.value(id).name, function.ty(id));
    // A value is drawn as what makes it: a parameter, or a node.
    let producers = function.producers();
    let node = |at: usize| quoted(&format!("@{name} {at}"));
    let origin = |id: ValueId| match producers[id.index()] {
        Some(at) => node(at),
        None => quoted(&format!("@{name} %{}", function.value(id).name)),
    };
    line(format!("subgraph {} {{", quoted(&format!("cluster_{name}"))));
    line(format!("  label={};", quoted(&format!("@{name}"))));
    for param in function.params() {
        line(format!("  {} [shape=oval, label={}];", origin(param), quoted(&value(param))));
    }
    for (at, made) in function.nodes.iter().enumerate() {
        let results: Vec<String> = made.results.iter().map(|r| value(*r)).collect();
        let head = match made.callee() {
            Some(callee) => format!("@{callee}"),
            None => ir::infer::name(&made.op).to_owned(),
        };
        let label = quoted(&format!("{head}\n{}", results.join("\n")));
        line(format!("  {} [label={label}];", node(at)));
        for operand in &made.operands {
            let operand_name = quoted(&format!("%{}", function.value(*operand).name));
            line(format!("  {} -> {} [tooltip={operand_name}];", origin(*operand), node(at)));
        }
    }
    for (at, result) in function.results.iter().enumerate() {
        let end = quoted(&format!("@{name} result {at}"));
        line(format!("  {end} [shape=oval, label={}];", quoted(&format!("result {at}"))));
        line(format!("  {} -> {end};", origin(*result)));
    }
    line("}".to_owned());
}

/// A text in quotes, as Graphviz reads it.
fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n"))
}
