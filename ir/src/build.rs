//! Building functions by code: names made unique, types inferred.

use std::collections::HashMap;

use crate::DType;
use crate::dim::Dim;
use crate::infer::{OpError, infer};
use crate::module::{Attributes, Function, Kind, Module, Node, Value, ValueId};
use crate::op::{Binary, Combiner, Comparison, Einsum, Op, Unary};
use crate::text::attrs::Names;
use crate::text::parse::Parser;
use crate::types::TensorType;

/// Adds nodes to a function that will join a module.
///
/// # Panics
/// All methods panic when an op's constraint does not hold: the code that builds is wrong then, not
/// the user's input.
pub struct Builder<'m> {
    module: &'m mut Module,
    function: Function,
    /// The values by name.
    names: HashMap<String, ValueId>,
    /// The last number that was put after a name: names are never free again.
    counts: HashMap<String, usize>,
}

impl<'m> Builder<'m> {
    /// Starts a function of a module.
    pub fn new(module: &'m mut Module, name: impl Into<String>, kind: Kind) -> Builder<'m> {
        Builder::resume(module, Function::new(name, kind))
    }

    /// Goes on with a function whose results are not named yet.
    pub fn resume(module: &'m mut Module, function: Function) -> Builder<'m> {
        let mut builder =
            Builder { module, function, names: HashMap::new(), counts: HashMap::new() };
        builder.note_names();
        builder
    }

    /// Notes the names of values that are new.
    fn note_names(&mut self) {
        for at in self.names.len()..self.function.values.len() {
            let name = self.function.values[at].name.clone();
            self.names.entry(name).or_insert(ValueId(at as u32));
        }
    }

    /// The function as far as it is built.
    pub fn function(&self) -> &Function {
        &self.function
    }

    /// The module that the function will join.
    pub fn module(&self) -> &Module {
        self.module
    }

    /// The type of a value.
    pub fn ty(&self, id: ValueId) -> &TensorType {
        self.function.ty(id)
    }

    fn define(&mut self, name: &str, ty: TensorType) -> ValueId {
        let name = self.unique(name);
        let id = ValueId(self.function.values.len() as u32);
        self.names.insert(name.clone(), id);
        self.function.values.push(Value::new(name, ty));
        id
    }

    fn unique(&mut self, name: &str) -> String {
        if !self.names.contains_key(name) {
            return name.to_owned();
        }
        let count = self.counts.entry(name.to_owned()).or_default();
        loop {
            *count += 1;
            let candidate = format!("{name}.{count}");
            if !self.names.contains_key(&candidate) {
                return candidate;
            }
        }
    }

    /// Adds a parameter; all parameters come before the first node.
    pub fn param(&mut self, name: &str, ty: TensorType) -> ValueId {
        assert!(self.function.nodes.is_empty(), "parameters come before nodes");
        self.function.param_count += 1;
        self.define(name, ty)
    }

    /// Says whether a parameter is frozen.
    pub fn set_frozen(&mut self, param: ValueId, is_frozen: bool) {
        self.function.values[param.index()].frozen = is_frozen;
    }

    /// Adds a node and returns its results, named after `name`.
    pub fn push_all(&mut self, name: &str, op: Op, operands: &[ValueId]) -> Vec<ValueId> {
        let names = self.result_names(&op, name);
        self.push_named(&names, op, operands)
    }

    /// Adds a node and returns its results, each named after its entry of `names`.
    pub fn push_named(&mut self, names: &[String], op: Op, operands: &[ValueId]) -> Vec<ValueId> {
        let types: Vec<&TensorType> = operands.iter().map(|o| self.function.ty(*o)).collect();
        let types = match infer(&op, &types, self.module) {
            Ok(types) => types,
            Err(error) => panic!("building `%{}` of `@{}`: {error}", names[0], self.function.name),
        };
        assert!(types.len() == names.len(), "{} names of {} results", names.len(), types.len());
        let results: Vec<ValueId> =
            types.into_iter().zip(names).map(|(ty, name)| self.define(name, ty)).collect();
        let node = Node { op, operands: operands.to_vec(), results: results.clone() };
        self.function.nodes.push(node);
        results
    }

    /// Gives `to` the name `wanted` and what bears it now the name of `to`.
    /// Parameters keep their names: nothing happens when one bears it.
    pub fn claim_name(&mut self, wanted: &str, to: ValueId) {
        let Some(&bearer) = self.names.get(wanted) else { return };
        if bearer.index() >= self.function.param_count {
            let freed = std::mem::take(&mut self.function.values[to.index()].name);
            self.names.insert(freed.clone(), bearer);
            self.names.insert(wanted.to_owned(), to);
            self.function.values[bearer.index()].name = freed;
            self.function.values[to.index()].name = wanted.to_owned();
        }
    }

    /// `name` for one result; `name`, then `name.lse` and so on for the further results of a call.
    fn result_names(&self, op: &Op, name: &str) -> Vec<String> {
        let Op::Call { function } = op else { return vec![name.to_owned()] };
        let Some(callee) = self.module.function(function) else { return vec![name.to_owned()] };
        let further = |r: &ValueId| format!("{name}.{}", callee.value(*r).name);
        let first = std::iter::once(name.to_owned());
        first.chain(callee.results.iter().skip(1).map(further)).collect()
    }

    /// Adds a node of one result, where the op takes such operands.
    ///
    /// # Errors
    /// The constraint that does not hold; nothing is added then.
    pub fn try_push(
        &mut self,
        name: &str,
        op: Op,
        operands: &[ValueId],
    ) -> Result<ValueId, OpError> {
        let types: Vec<&TensorType> = operands.iter().map(|o| self.function.ty(*o)).collect();
        infer(&op, &types, self.module)?;
        Ok(self.push(name, op, operands))
    }

    /// Adds a node of one result.
    pub fn push(&mut self, name: &str, op: Op, operands: &[ValueId]) -> ValueId {
        self.push_all(name, op, operands)[0]
    }

    /// An elementwise function.
    pub fn unary(&mut self, name: &str, unary: Unary, x: ValueId) -> ValueId {
        self.push(name, Op::Unary(unary), &[x])
    }

    /// An elementwise function of two operands.
    pub fn binary(&mut self, name: &str, binary: Binary, a: ValueId, b: ValueId) -> ValueId {
        self.push(name, Op::Binary(binary), &[a, b])
    }

    /// The sum of two values.
    pub fn add(&mut self, name: &str, a: ValueId, b: ValueId) -> ValueId {
        self.binary(name, Binary::Add, a, b)
    }

    /// The product of two values, element by element.
    pub fn mul(&mut self, name: &str, a: ValueId, b: ValueId) -> ValueId {
        self.binary(name, Binary::Mul, a, b)
    }

    /// A comparison.
    pub fn compare(&mut self, name: &str, how: Comparison, a: ValueId, b: ValueId) -> ValueId {
        self.push(name, Op::Compare(how), &[a, b])
    }

    /// A constant of the type of another value.
    pub fn constant_like(&mut self, name: &str, value: f64, like: ValueId) -> ValueId {
        let TensorType { dtype, dims } = self.ty(like).clone();
        self.push(name, Op::Constant { value, dtype, dims }, &[])
    }

    /// A constant.
    pub fn constant(&mut self, name: &str, value: f64, ty: TensorType) -> ValueId {
        let TensorType { dtype, dims } = ty;
        self.push(name, Op::Constant { value, dtype, dims }, &[])
    }

    /// The indices along a dim.
    pub fn iota(&mut self, name: &str, dim: usize, dtype: DType, dims: Vec<Dim>) -> ValueId {
        self.push(name, Op::Iota { dim, start: 0, dtype, dims }, &[])
    }

    /// A contraction such as `bsm,mf->bsf`.
    pub fn contract(&mut self, name: &str, einsum: &str, a: ValueId, b: ValueId) -> ValueId {
        let Some(einsum) = Einsum::parse(einsum) else { panic!("`{einsum}` is no contraction") };
        self.push(name, Op::Contract(einsum), &[a, b])
    }

    /// A reduction.
    pub fn reduce(&mut self, name: &str, how: Combiner, dims: Vec<usize>, x: ValueId) -> ValueId {
        self.push(name, Op::Reduce { combiner: how, dims }, &[x])
    }

    /// A value repeated along new leading dims, up to the dims of another.
    pub fn broadcast_like(&mut self, name: &str, x: ValueId, like: ValueId) -> ValueId {
        let dims = self.ty(like).dims.clone();
        let new = (0..dims.len() - self.ty(x).ndim()).collect();
        self.push(name, Op::Broadcast { new, dims }, &[x])
    }

    /// Adds the node of a line of the IR's text, whose operands are named as in the function.
    ///
    /// # Errors
    /// The drawn diagnostics of what does not read.
    pub(crate) fn push_text(&mut self, line: &str, names: Names) -> Result<ValueId, String> {
        let mut parser = Parser::new("line", line, names);
        let read = parser.node(self.module, &mut self.function);
        self.note_names();
        if read.is_err() {
            let drawn = |d| crate::diagnostic::render(d, Some(line));
            return Err(parser.diagnostics.iter().map(drawn).collect());
        }
        Ok(ValueId(self.function.values.len() as u32 - 1))
    }

    /// A call of a function of the module.
    pub fn call(&mut self, name: &str, function: &str, operands: &[ValueId]) -> Vec<ValueId> {
        self.push_all(name, Op::Call { function: function.to_owned() }, operands)
    }

    /// A call of a composite of the library, which joins the module.
    pub fn composite(
        &mut self,
        name: &str,
        composite: &str,
        attributes: &[(&str, f64)],
        operands: &[ValueId],
    ) -> Vec<ValueId> {
        let given = attributes.iter().map(|(k, v)| ((*k).to_owned(), *v)).collect();
        let function = self.instance(composite, &given, operands);
        self.call(name, &function, operands)
    }

    /// The instance of a composite that takes the operands, which joins the module.
    pub fn instance(
        &mut self,
        composite: &str,
        given: &Attributes,
        operands: &[ValueId],
    ) -> String {
        let types: Vec<TensorType> = operands.iter().map(|o| self.ty(*o).clone()).collect();
        let function = self.module.composite(composite, given, &types);
        function.unwrap_or_else(|| {
            panic!("`{composite}` does not take {types:?} with {given:?}");
        })
    }

    /// Ends the function without adding it to the module.
    pub fn into_function(mut self, results: &[ValueId]) -> Function {
        self.function.results = results.to_vec();
        self.function
    }

    /// Ends the function and adds it to the module. Returns its name.
    pub fn finish(mut self, results: &[ValueId]) -> String {
        self.function.results = results.to_vec();
        let name = self.function.name.clone();
        self.module.add(self.function);
        name
    }
}
