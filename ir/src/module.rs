//! Modules: named functions of typed values.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::class::Stated;
use crate::dim::{Bindings, Dim};
use crate::op::Op;
use crate::types::TensorType;

/// A value of one function: an index into [`Function::values`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ValueId(pub u32);

impl ValueId {
    /// The index.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// A named, typed value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Value {
    /// The name, unique in its function, without the leading `%`.
    pub name: String,
    /// The type.
    pub ty: TensorType,
    /// Whether it is a parameter that is not trained: it has no gradient.
    pub frozen: bool,
}

impl Value {
    /// A value that is not frozen.
    pub fn new(name: impl Into<String>, ty: TensorType) -> Value {
        Value { name: name.into(), ty, frozen: false }
    }
}

/// One occurrence of an op.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Node {
    /// What is computed.
    pub op: Op,
    /// From what.
    pub operands: Vec<ValueId>,
    /// Into what: one value, or the results of the called function.
    pub results: Vec<ValueId>,
}

impl Node {
    /// The result of a node that has one.
    pub fn result(&self) -> ValueId {
        self.results[0]
    }

    /// The name of the function that a call calls.
    pub fn callee(&self) -> Option<&str> {
        if let Op::Call { function } = &self.op { Some(function) } else { None }
    }
}

/// The numbers that tell instances of a composite apart, such as `eps=1e-5`.
pub type Attributes = BTreeMap<String, f64>;

/// What a function stands for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Kind {
    /// A layer or an entry: the unit that repeats, or what a user calls.
    Layer,
    /// A named idiom of the library; the nodes are its definition.
    Composite {
        /// The name in the library.
        name: String,
        /// The attributes of this instance.
        attributes: Attributes,
    },
    /// One device launch.
    Kernel,
}

/// Typed parameters, nodes in topological order, results.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Function {
    /// The name, without the leading `@`.
    pub name: String,
    /// What it stands for.
    pub kind: Kind,
    /// All values: parameters first, then the nodes' results in order.
    pub values: Vec<Value>,
    /// How many of the values are parameters.
    pub param_count: usize,
    /// The nodes; operands are defined before they are used.
    pub nodes: Vec<Node>,
    /// What a call yields.
    pub results: Vec<ValueId>,
}

impl Function {
    /// An empty function.
    pub fn new(name: impl Into<String>, kind: Kind) -> Function {
        Function {
            name: name.into(),
            kind,
            values: Vec::new(),
            param_count: 0,
            nodes: Vec::new(),
            results: Vec::new(),
        }
    }

    /// The parameters.
    pub fn params(&self) -> impl ExactSizeIterator<Item = ValueId> + use<> {
        (0..self.param_count).map(|at| ValueId(at as u32))
    }

    /// A value.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.index()]
    }

    /// The type of a value.
    pub fn ty(&self, id: ValueId) -> &TensorType {
        &self.values[id.index()].ty
    }

    /// The value of a name.
    pub fn find(&self, name: &str) -> Option<ValueId> {
        self.values.iter().position(|v| v.name == name).map(|at| ValueId(at as u32))
    }

    /// Whether a parameter has a gradient: a floating-point one that is not frozen.
    pub fn is_differentiable(&self, param: ValueId) -> bool {
        let Value { ty, frozen, .. } = self.value(param);
        ty.dtype.is_float() && !frozen
    }

    /// The parameters that have gradients, in order.
    pub fn differentiable_params(&self) -> impl Iterator<Item = ValueId> {
        self.params().filter(|param| self.is_differentiable(*param))
    }

    /// The types of the parameters.
    pub fn param_types(&self) -> Vec<TensorType> {
        self.params().map(|p| self.ty(p).clone()).collect()
    }

    /// The types of the results.
    pub fn result_types(&self) -> Vec<TensorType> {
        self.results.iter().map(|r| self.ty(*r).clone()).collect()
    }

    /// For each value, the node that makes it; none for parameters.
    pub fn producers(&self) -> Vec<Option<usize>> {
        let mut producers = vec![None; self.values.len()];
        for (at, node) in self.nodes.iter().enumerate() {
            for result in &node.results {
                producers[result.index()] = Some(at);
            }
        }
        producers
    }

    /// Replaces symbols by values in every type and op.
    pub fn bind(&mut self, bindings: &Bindings) {
        for value in &mut self.values {
            value.ty = value.ty.bind(bindings);
        }
        for node in &mut self.nodes {
            bind_op(&mut node.op, bindings);
        }
    }
}

fn bind_op(op: &mut Op, bindings: &Bindings) {
    let bind = |dim: &mut Dim| *dim = dim.bind(bindings);
    match op.stated_sizes() {
        Stated::Nothing => {}
        Stated::All(dims) => dims.iter_mut().for_each(bind),
        Stated::One { size, .. } => bind(size),
    }
    if let Op::Random { extent, .. } = op {
        extent.iter_mut().for_each(bind);
    }
}

/// A named set of functions. A module knows no device and no sharding.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Default)]
pub struct Module {
    /// The name of the model.
    pub name: String,
    /// The functions by name, callees before callers.
    pub functions: Vec<Function>,
}

impl Module {
    /// An empty module.
    pub fn new(name: impl Into<String>) -> Module {
        Module { name: name.into(), functions: Vec::new() }
    }

    /// The function of a name.
    pub fn function(&self, name: &str) -> Option<&Function> {
        self.functions.iter().find(|f| f.name == name)
    }

    /// Adds a function, or finds the equal one that is there under the same name.
    ///
    /// # Panics
    /// When another function has the name.
    pub fn add(&mut self, function: Function) {
        match self.function(&function.name) {
            Some(there) => assert!(*there == function, "two functions `@{}`", function.name),
            None => self.functions.push(function),
        }
    }

    /// Replaces symbols by values everywhere.
    pub fn bind(&mut self, bindings: &Bindings) {
        for function in &mut self.functions {
            function.bind(bindings);
        }
    }
}
