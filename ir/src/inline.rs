//! Inlining: calls replaced by the nodes of what they call.

use std::collections::BTreeSet;

use crate::call_graph::CallGraph;
use crate::module::{Function, Kind, Module, Node, Value, ValueId};
use crate::pass::renumber_values;

/// Replaces calls of composites by their nodes, but those of composites whose library name `keep`
/// holds, and removes composites that nobody calls any more.
///
/// A value `%mean` of a composite whose call defines `%ln` becomes `%ln.mean`; the results of the
/// call keep their names.
pub fn inline_composites(module: &mut Module, keep: impl Fn(&str) -> bool) -> bool {
    let library = composites(module);
    let mut changed = false;
    for function in &mut module.functions {
        changed |= inline_calls(function, &library, |callee, _| match &callee.kind {
            Kind::Composite { name, .. } => !keep(name),
            Kind::Layer | Kind::Kernel => false,
        });
    }
    changed | remove_unused_composites(module)
}

/// Removes composites that no function calls. Linear.
pub fn remove_unused_composites(module: &mut Module) -> bool {
    let others = module.functions.iter().filter(|f| !matches!(f.kind, Kind::Composite { .. }));
    let used = CallGraph::of(module).reached(others.map(|f| f.name.as_str()));
    let used: BTreeSet<String> = used.into_iter().map(str::to_owned).collect();
    let count = module.functions.len();
    module.functions.retain(|f| used.contains(&f.name));
    module.functions.len() < count
}

/// The composites of a module, as a module.
pub(crate) fn composites(module: &Module) -> Module {
    let is_composite = |f: &&Function| matches!(f.kind, Kind::Composite { .. });
    let functions = module.functions.iter().filter(is_composite).cloned().collect();
    Module { name: module.name.clone(), functions }
}

/// Replaces the calls of functions of `library` that are selected, until none is left. The selector
/// is given the callee and the name of the call's first result.
pub(crate) fn inline_calls(
    function: &mut Function,
    library: &Module,
    select: impl Fn(&Function, &str) -> bool,
) -> bool {
    let mut changed = false;
    loop {
        let mut again = false;
        let mut same: Vec<ValueId> = ids(function.values.len()).collect();
        for mut node in std::mem::take(&mut function.nodes) {
            node.operands.iter_mut().for_each(|o| *o = same[o.index()]);
            let name = &function.values[node.results[0].index()].name;
            let callee = node.callee().and_then(|callee| library.function(callee));
            match callee.filter(|callee| select(callee, name)) {
                Some(callee) => {
                    again = true;
                    splice(function, callee, &node, &mut same);
                }
                None => function.nodes.push(node),
            }
        }
        if !again {
            return changed;
        }
        changed = true;
        function.results.iter_mut().for_each(|r| *r = same[r.index()]);
        renumber_values(function);
    }
}

fn ids(count: usize) -> impl Iterator<Item = ValueId> {
    (0..count).map(|at| ValueId(at as u32))
}

/// Appends the callee's nodes. A result that the callee computes keeps the id and name that the
/// call gave it; one that it only passes on is replaced in `same`.
fn splice(function: &mut Function, callee: &Function, call: &Node, same: &mut Vec<ValueId>) {
    let mut of: Vec<Option<ValueId>> = call.operands.iter().copied().map(Some).collect();
    of.resize(callee.values.len(), None);
    for (inner, outer) in callee.results.iter().zip(&call.results) {
        match of[inner.index()] {
            Some(there) => same[outer.index()] = there,
            None => of[inner.index()] = Some(*outer),
        }
    }
    let prefix = function.value(call.results[0]).name.clone();
    for node in &callee.nodes {
        let mut results = Vec::with_capacity(node.results.len());
        for result in &node.results {
            let id = match of[result.index()] {
                Some(id) => id,
                None => {
                    let id = ValueId(function.values.len() as u32);
                    let Value { name, ty, .. } = callee.value(*result);
                    let name = unique(function, format!("{prefix}.{name}"));
                    function.values.push(Value::new(name, ty.clone()));
                    same.push(id);
                    of[result.index()] = Some(id);
                    id
                }
            };
            results.push(id);
        }
        let operand = |id: &ValueId| of[id.index()].expect("verified: defined before it is used");
        let operands = node.operands.iter().map(operand).collect();
        function.nodes.push(Node { op: node.op.clone(), operands, results });
    }
}

fn unique(function: &Function, name: String) -> String {
    let mut count = 0;
    let mut candidate = name.clone();
    while function.find(&candidate).is_some() {
        count += 1;
        candidate = format!("{name}.{count}");
    }
    candidate
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::parse_module;

    #[test]
    fn results_keep_names_and_passed_values_are_replaced() {
        let text = "module m
  composite @pair = pair() (%a: f32[2], %b: f32[2]) {
    %s: f32[2] = add %a %b
    %t: f32[2] = neg %s
    return %t %a
  }
  func @f(%x: f32[2], %y: f32[2]) {
    %p: f32[2], %q: f32[2] = call @pair %x %y
    %r: f32[2] = mul %p %q
    return %r %q
  }
";
        let inlined = "module m
  func @f(%x: f32[2], %y: f32[2]) {
    %p.s: f32[2] = add %x %y
    %p: f32[2] = neg %p.s
    %r: f32[2] = mul %p %x
    return %r %x
  }
";
        let mut module = parse_module("m", text).unwrap();
        let mut kept = module.clone();
        assert!(!inline_composites(&mut kept, |name| name == "pair"));
        assert_eq!(kept, module);
        assert!(inline_composites(&mut module, |_| false));
        assert_eq!(module.to_string(), inlined);
    }
}
