//! The entry as a list of calls: what codegen and planner see of a module.

use std::collections::BTreeMap;

use ir::random::Key;
use ir::{Diagnostic, Dim, Function, Kind, Module, Op, Span, ValueId};

/// What a call passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operand {
    /// A weight: an index into [`Calls::weights`].
    Weight(usize),
    /// A cache: an index into [`Calls::caches`].
    Cache(usize),
    /// The token ids.
    Tokens,
    /// The labels.
    Labels,
    /// The first tokens of the tokens' documents.
    Documents,
    /// The random key, folded to a path.
    Key(u32),
    /// The position of the first token.
    Position,
    /// The index of the token whose logits are wanted.
    Last,
    /// A result of an earlier call.
    Value(ValueId),
}

/// One call of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// The layer.
    pub function: String,
    /// What is passed for each parameter.
    pub operands: Vec<Operand>,
    /// The entry's values that the call defines.
    pub results: Vec<ValueId>,
}

/// A weight of the entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Weight {
    /// The name of the entry's parameter.
    pub name: String,
    /// The sizes.
    pub sizes: Vec<usize>,
    /// Whether it is not trained: it has no gradient.
    pub frozen: bool,
}

/// An entry whose nodes are calls of layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Calls {
    /// The weights, in the order of the entry's parameters.
    pub weights: Vec<Weight>,
    /// The names of the caches, in the order of the entry's parameters. The last results of the
    /// entry replace them, in the same order.
    pub caches: Vec<String>,
    /// The calls in order.
    pub calls: Vec<Call>,
    /// The entry's results.
    pub results: Vec<ValueId>,
}

/// The diagnostic of an entry that is no list of calls, or none that is trained.
pub(crate) fn not_calls(entry: &str, why: String) -> Diagnostic {
    Diagnostic::error("E2001", Span::of(format!("@{entry}")), why)
}

impl Calls {
    /// The calls of the entry of a module, by its name, as [`Calls::of`] finds them.
    ///
    /// # Errors
    /// `E2001`, which names what is no call of a layer.
    pub fn of_entry(module: &Module, entry: &str) -> Result<Calls, Diagnostic> {
        Calls::of(module, entry).map_err(|why| not_calls(entry, why))
    }

    /// For each call, how many earlier calls are of the same function.
    pub fn numbers(&self) -> Vec<usize> {
        let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
        let mut numbers = Vec::with_capacity(self.calls.len());
        for call in &self.calls {
            let next = seen.entry(&call.function).or_default();
            numbers.push(*next);
            *next += 1;
        }
        numbers
    }

    /// Reads an entry. Floating-point parameters are weights, or caches where they have samples;
    /// `tokens`, `labels`, `documents`, `key`, `position` and `last` are fed.
    ///
    /// # Errors
    /// A sentence that names what is no call of a layer.
    #[expect(
        clippy::wildcard_enum_match_arm,
        reason = "an entry is a list of calls, whatever else there is"
    )]
    pub fn of(module: &Module, entry: &str) -> Result<Calls, String> {
        let function =
            module.function(entry).ok_or_else(|| format!("there is no entry `@{entry}`"))?;
        let mut operands: Vec<Option<Operand>> = vec![None; function.values.len()];
        let mut calls = Calls {
            weights: Vec::new(),
            caches: Vec::new(),
            calls: Vec::new(),
            results: function.results.clone(),
        };
        for param in function.params() {
            operands[param.index()] = Some(fed(function, param, &mut calls)?);
        }
        for node in &function.nodes {
            let passed = |id: &ValueId| operands[id.index()].ok_or("an operand is not defined");
            match &node.op {
                Op::FoldKey { salt } => {
                    let Operand::Key(path) = passed(&node.operands[0])? else {
                        return Err("`fold_key` takes the key".to_owned());
                    };
                    let folded = Key { seed: 0, step: 0, path, sample: 0 }.fold(*salt).path;
                    operands[node.result().index()] = Some(Operand::Key(folded));
                }
                Op::Call { function: callee } if is_layer(module, callee) => {
                    let passed = node.operands.iter().map(passed).collect::<Result<_, _>>()?;
                    for result in &node.results {
                        operands[result.index()] = Some(Operand::Value(*result));
                    }
                    let results = node.results.clone();
                    calls.calls.push(Call { function: callee.clone(), operands: passed, results });
                }
                _ => {
                    let op = ir::infer::name(&node.op);
                    return Err(format!("`@{entry}` holds `{op}`: an entry is a list of calls"));
                }
            }
        }
        Ok(calls)
    }

    /// Whether gradients can flow back through all calls.
    ///
    /// # Errors
    /// A sentence that names a value which no call takes, or which one call takes twice.
    pub(crate) fn check_gradients(&self, entry: &Function) -> Result<(), String> {
        for call in &self.calls {
            let values: Vec<&Operand> =
                call.operands.iter().filter(|o| matches!(o, Operand::Value(_))).collect();
            for (at, operand) in values.iter().enumerate() {
                if let (Operand::Value(value), true) = (operand, values[..at].contains(operand)) {
                    let name = &entry.value(*value).name;
                    return Err(format!("a call of `@{}` takes `%{name}` twice", call.function));
                }
            }
            for result in &call.results {
                let is_taken = |c: &Call| c.operands.contains(&Operand::Value(*result));
                if !self.results.contains(result) && !self.calls.iter().any(is_taken) {
                    let name = &entry.value(*result).name;
                    return Err(format!("`%{name}` is a result that no call takes"));
                }
            }
        }
        Ok(())
    }

    /// The cache that a result of the entry replaces; none for any other value.
    pub fn replaced_cache(&self, value: ValueId) -> Option<usize> {
        let first = self.results.len().saturating_sub(self.caches.len());
        self.results[first..].iter().position(|result| *result == value)
    }

    /// The layers that are called, each once, in the order of their first call.
    pub fn functions(&self) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::new();
        for call in &self.calls {
            if !names.contains(&call.function.as_str()) {
                names.push(&call.function);
            }
        }
        names
    }

    /// For each parameter of a layer that a weight is passed for, that weight, at its first call.
    pub fn first_call(&self, function: &str) -> Option<&Call> {
        self.calls.iter().find(|c| c.function == function)
    }
}

fn is_layer(module: &Module, name: &str) -> bool {
    module.function(name).is_some_and(|f| f.kind == Kind::Layer)
}

fn fed(function: &Function, param: ValueId, calls: &mut Calls) -> Result<Operand, String> {
    let value = function.value(param);
    match value.name.as_str() {
        "tokens" => Ok(Operand::Tokens),
        "labels" => Ok(Operand::Labels),
        "documents" if !value.ty.dtype.is_float() => Ok(Operand::Documents),
        "key" => Ok(Operand::Key(0)),
        "position" => Ok(Operand::Position),
        "last" => Ok(Operand::Last),
        name if value.ty.dtype.is_float()
            && value.ty.dims.iter().any(|d| d.mentions(Dim::BATCH)) =>
        {
            calls.caches.push(name.to_owned());
            Ok(Operand::Cache(calls.caches.len() - 1))
        }
        name if value.ty.dtype.is_float() => {
            let sizes = value.ty.sizes();
            let sizes = sizes.ok_or_else(|| format!("the weight `{name}` has open sizes"))?;
            calls.weights.push(Weight { name: name.to_owned(), sizes, frozen: value.frozen });
            Ok(Operand::Weight(calls.weights.len() - 1))
        }
        name => Err(format!("the entry's parameter `{name}` is neither a weight nor fed")),
    }
}
