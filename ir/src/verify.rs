//! Verification: whether a module is what the other files of this crate take for granted.
//!
//! Shares nothing with the code that builds, differentiates or rewrites modules but the table
//! `infer`.

use std::collections::BTreeSet;

use crate::dim::Dim;
use crate::infer::infer;
use crate::library::check::check;
use crate::module::{Function, Kind, Module, Node, ValueId};
use crate::numbers;
use crate::types::TensorType;
use crate::{Diagnostic, Span};

/// The most diagnostics that one verification reports.
const DIAGNOSTICS_MAX: usize = 20;

/// Everything that is wrong with a module, in the order of its functions and nodes; at most twenty.
///
/// `E1004` a value or function that is read before it is defined, or not at all; `E1005` a node
/// whose results have other types than its op yields; `E1006` a name that stands twice; `E1007` a
/// call of a function that is not above the caller, so that there is no recursion; `E1008` a
/// parameter, node or value that is out of order; `E1009` a size that no parameter gives; `E1014`
/// to `E1016` a composite that is not what the library has under its name; `E1018` what is frozen
/// and no floating-point parameter, or a frozen parameter that is passed what may be trained.
pub fn verify(module: &Module) -> Vec<Diagnostic> {
    let mut found = Vec::new();
    let mut above = Module::new(module.name.clone());
    for function in &module.functions {
        let mut verifier = Verifier { function, found: Vec::new() };
        if above.function(&function.name).is_some() {
            verifier.report("E1006", format!("two functions `@{}`", function.name));
        }
        if verifier.values() {
            verifier.nodes(module, &above);
            verifier.sizes();
            verifier.frozen_values();
            if verifier.found.is_empty() {
                verifier.found = check(function);
            }
        }
        found.append(&mut verifier.found);
        above.functions.push(function.clone());
    }
    found.truncate(DIAGNOSTICS_MAX);
    found
}

struct Verifier<'f> {
    function: &'f Function,
    found: Vec<Diagnostic>,
}

impl Verifier<'_> {
    fn report(&mut self, code: &'static str, headline: String) {
        let span = Span::of(format!("@{}", self.function.name));
        self.found.push(Diagnostic::error(code, span, headline));
    }

    fn name(&self, id: ValueId) -> &str {
        &self.function.value(id).name
    }

    /// Whether every id is that of a value, and values stand in the order of their definition.
    fn values(&mut self) -> bool {
        let function = self.function;
        let mut names = BTreeSet::new();
        for value in &function.values {
            if !names.insert(&value.name) {
                self.report("E1006", format!("two values `%{}`", value.name));
            }
        }
        let count = function.values.len();
        let operands = function.nodes.iter().flat_map(|n| n.operands.iter());
        let missing = operands.chain(&function.results).filter(|id| id.index() >= count).count();
        if missing > 0 {
            self.report("E1004", format!("{missing} values are read that do not exist"));
        }
        let defined = function.nodes.iter().flat_map(|n| n.results.iter().copied());
        let in_order = function.params().chain(defined).map(ValueId::index).eq(0..count);
        if !in_order {
            let headline = "values are not the parameters and then what the nodes define";
            self.report("E1008", headline.to_owned());
        }
        missing == 0 && in_order
    }

    fn nodes(&mut self, module: &Module, above: &Module) {
        let function = self.function;
        let mut defined = function.param_count;
        for node in &function.nodes {
            for operand in node.operands.iter().filter(|o| o.index() >= defined) {
                let headline = format!("`%{}` is read before it is defined", self.name(*operand));
                self.report("E1004", headline);
            }
            if self.callee(node, module, above) {
                self.types(node, above);
                self.frozen(node, above);
            }
            defined += node.results.len();
        }
    }

    /// Whether what a node calls, if anything, is above the function.
    fn callee(&mut self, node: &Node, module: &Module, above: &Module) -> bool {
        let Some(callee) = node.callee().filter(|callee| above.function(callee).is_none()) else {
            return true;
        };
        if module.function(callee).is_some() {
            self.report("E1007", format!("`@{callee}` is called above its definition"));
        } else {
            self.report("E1004", format!("no function `@{callee}`"));
        }
        false
    }

    fn types(&mut self, node: &Node, above: &Module) {
        let function = self.function;
        let operands: Vec<&TensorType> = node.operands.iter().map(|o| function.ty(*o)).collect();
        let inferred = infer(&node.op, &operands, above);
        match inferred.and_then(|types| numbers::check(&node.op).map(|()| types)) {
            Err(error) => self.report("E1005", error.to_string()),
            Ok(types) if types.len() != node.results.len() => {
                let headline =
                    format!("{} results in place of {}", node.results.len(), types.len());
                self.report("E1005", headline);
            }
            Ok(types) => {
                for (result, ty) in node.results.iter().zip(types) {
                    if *function.ty(*result) != ty {
                        let (name, given) = (self.name(*result), function.ty(*result));
                        let headline = format!("`%{name}` is {ty}, not {given}");
                        self.report("E1005", headline);
                    }
                }
            }
        }
    }

    /// Only floating-point parameters of layers are frozen.
    fn frozen_values(&mut self) {
        let function = self.function;
        for (at, value) in function.values.iter().enumerate().filter(|(_, value)| value.frozen) {
            let is_param = at < function.param_count && function.kind == Kind::Layer;
            if !is_param || !value.ty.dtype.is_float() {
                let headline =
                    format!("`%{}` is frozen, and no floating-point parameter", value.name);
                self.report("E1018", headline);
            }
        }
    }

    /// What is passed for a frozen parameter has no gradient there, so it must be frozen itself.
    fn frozen(&mut self, node: &Node, above: &Module) {
        let Some(callee) = node.callee().and_then(|callee| above.function(callee)) else { return };
        for (param, operand) in callee.params().zip(&node.operands) {
            let passed = self.function.value(*operand);
            if callee.value(param).frozen && !passed.frozen {
                let headline = format!(
                    "`@{}` takes a frozen `%{}`, and `%{}` is not frozen",
                    callee.name,
                    callee.value(param).name,
                    passed.name
                );
                self.report("E1018", headline);
            }
        }
    }

    /// A symbol must be a whole dim of a parameter somewhere, so that arguments bind it.
    fn sizes(&mut self) {
        let function = self.function;
        let dims = |types: &[TensorType]| -> Vec<Dim> {
            types.iter().flat_map(|ty| ty.dims.iter().cloned()).collect()
        };
        let given = dims(&function.param_types());
        let all: Vec<TensorType> = function.values.iter().map(|v| v.ty.clone()).collect();
        let symbols: BTreeSet<String> =
            dims(&all).iter().flat_map(|d| d.symbols()).map(str::to_owned).collect();
        for symbol in symbols {
            if !given.contains(&Dim::symbol(&symbol)) {
                self.report("E1009", format!("no parameter has a dim `{symbol}`"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::parse_module;

    const TEXT: &str = "module m
  func @inner(%a: f32[B, 2]) {
    %b: f32[B, 2] = neg %a
    return %b
  }
  func @outer(%x: f32[B, 2], %w: f32[2, 3]) {
    %h: f32[B, 2] = call @inner %x
    %y: f32[B, 3] = contract bm,mf->bf %h %w
    return %y %h
  }
";

    fn codes(plant: impl Fn(&mut Module)) -> Vec<(&'static str, String)> {
        let mut module = parse_module("m", TEXT).unwrap();
        assert_eq!(verify(&module), []);
        plant(&mut module);
        verify(&module).into_iter().map(|d| (d.code, d.headline)).collect()
    }

    #[test]
    fn planted_errors_are_found() {
        let one = |found: &[(&str, String)], code: &str, headline: &str| {
            assert_eq!(found, [(code, headline.to_owned())]);
        };
        let found = codes(|m| m.functions[1].nodes.swap(0, 1));
        assert_eq!(found[0].0, "E1008", "{found:?}");
        let found = codes(|m| m.functions[1].nodes[0].operands[0] = ValueId(3));
        one(&found[..1], "E1004", "`%y` is read before it is defined");
        let found = codes(|m| m.functions[1].results[0] = ValueId(9));
        one(&found, "E1004", "1 values are read that do not exist");
        let found = codes(|m| m.functions[1].values[3].ty.dims[1] = Dim::from(4));
        one(&found, "E1005", "`%y` is f32[B, 3], not f32[B, 4]");
        let found = codes(|m| m.functions[1].nodes[1].operands.swap(0, 1));
        assert_eq!(found[0].0, "E1005", "{found:?}");
        let found = codes(|m| m.functions[1].values[1].name = "x".to_owned());
        one(&found, "E1006", "two values `%x`");
        let found = codes(|m| m.functions[0].name = "outer".to_owned());
        assert_eq!(found.iter().map(|f| f.0).collect::<Vec<_>>(), ["E1006", "E1004"]);
        let found = codes(|m| m.functions.swap(0, 1));
        one(&found, "E1007", "`@inner` is called above its definition");
        let found = codes(|m| m.functions[0].values[0].frozen = true);
        one(&found, "E1018", "`@inner` takes a frozen `%a`, and `%x` is not frozen");
        let found = codes(|m| m.functions[1].values[2].frozen = true);
        one(&found, "E1018", "`%h` is frozen, and no floating-point parameter");
        let whole = |m: &mut Module| {
            m.functions[0].values[0].frozen = true;
            m.functions[1].values[0].frozen = true;
        };
        assert_eq!(codes(whole), []);
        let found =
            codes(|m| m.functions[1].values[0].ty.dims[0] = &Dim::symbol("B") + &Dim::from(1));
        assert!(found.contains(&("E1009", "no parameter has a dim `B`".to_owned())), "{found:?}");
    }
}
