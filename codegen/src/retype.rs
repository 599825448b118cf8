//! Precision by role: a module in one type → the same with the types that a [`Precision`] says.
//!
//! Every result is rounded to its type, and nothing else rounds, so that what is fused later
//! changes no bit. Products and the attention take operands of the compute type. Reductions are
//! computed in the type of sums, and so are composites without a kernel for narrow types (norms,
//! softmax, losses), whose results are rounded where they have the sizes of a narrow operand;
//! statistics stay as they are. Elementwise operations are computed in the type of sums and
//! rounded once: narrow where all operands are. Wide logits are products that are not rounded, as
//! are those whose sums a model keeps (`sums=kept`).
//! Gradients of weights stay sums: they are rounded where they are added up, if at all.
//!
//! The pass runs between differentiation and the inlining of composites, which still say what
//! belongs together.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use ir::autodiff::gradient_name;
use ir::build::Builder;
use ir::formats::nearest;
use ir::library::templates;
use ir::module::Attributes;
use ir::op::{Binary, Einsum, Operands};
use ir::precision::{Precision, Products};
use ir::{
    CallGraph, Class, DType, Diagnostic, Dim, Function, Kind, Module, Node, Op, Span, TensorType,
    ValueId,
};

use crate::calls::{Calls, Operand};
use crate::catalogue::is_in_catalogue;

/// The module with the types of a precision, from one whose floating-point values are all of the
/// type of sums. Names of values stay; casts are named after what they round.
///
/// # Errors
/// `E2001` when a function that no other calls is no list of calls of layers.
pub fn retype(module: &Module, precision: &Precision) -> Result<Module, Diagnostic> {
    if !precision.compute.is_narrow() {
        let mut typed = module.clone();
        if precision.products == Products::Tf32 {
            round_operands(&mut typed);
        }
        return Ok(typed);
    }
    let is_composite = |f: &&Function| matches!(f.kind, Kind::Composite { .. });
    let mut typed = Module::new(module.name.clone());
    typed.functions = module.functions.iter().filter(is_composite).cloned().collect();
    let layers = Layers { module, precision, roles: roles(module, precision)? };
    let entries = entries(module);
    for function in module.functions.iter().filter(|f| layers.roles.contains_key(&f.name)) {
        let retyped = layers.layer(function, &mut typed);
        typed.functions.push(retyped);
        if let Some(gradient) = module.function(&gradient_name(&function.name)) {
            let retyped = layers.gradient(function, gradient, &mut typed);
            typed.functions.push(retyped);
        }
    }
    for entry in entries {
        let retyped = layers.entry(entry, &typed);
        typed.functions.push(retyped);
    }
    Ok(typed)
}

/// Has products of layers round operands to TF32; those of composites stay exact.
fn round_operands(module: &mut Module) {
    for function in module.functions.iter_mut().filter(|f| f.kind == Kind::Layer) {
        for node in &mut function.nodes {
            if let Op::Contract(einsum) = &mut node.op {
                einsum.operands = Operands::Tf32;
            }
        }
    }
}

/// What the entries of a module say of its layers, by name.
///
/// # Errors
/// As [`retype`].
pub(crate) fn roles(
    module: &Module,
    precision: &Precision,
) -> Result<BTreeMap<String, Roles>, Diagnostic> {
    let mut layers = Layers { module, precision, roles: BTreeMap::new() };
    entries(module).into_iter().try_for_each(|entry| layers.read(entry))?;
    Ok(layers.roles)
}

/// The functions that no other calls, but for gradients.
fn entries(module: &Module) -> Vec<&Function> {
    let calls = CallGraph::of(module);
    let gradients: BTreeSet<String> =
        module.functions.iter().map(|f| gradient_name(&f.name)).collect();
    let is_entry = |f: &&Function| {
        f.kind == Kind::Layer && !calls.is_called(&f.name) && !gradients.contains(&f.name)
    };
    module.functions.iter().filter(is_entry).collect()
}

/// What the entries say of a layer: the roles of its parameters and its results.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Roles {
    pub(crate) is_weight: Vec<bool>,
    pub(crate) results: Vec<ResultRole>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum ResultRole {
    /// What another layer takes, or a cache.
    #[default]
    Activation,
    /// A loss or a count.
    Sum,
    /// Another result of the entry.
    Logits,
}

struct Layers<'a> {
    module: &'a Module,
    precision: &'a Precision,
    roles: BTreeMap<String, Roles>,
}

impl Layers<'_> {
    /// Reads what an entry passes to its layers.
    fn read(&mut self, entry: &Function) -> Result<(), Diagnostic> {
        let error = |why| Diagnostic::error("E2001", Span::of(format!("@{}", entry.name)), why);
        let calls = Calls::of(self.module, &entry.name).map_err(error)?;
        for call in &calls.calls {
            let Some(function) = self.module.function(&call.function) else { continue };
            let roles = self.roles.entry(call.function.clone()).or_default();
            roles.is_weight.resize(function.param_count, false);
            roles.results.resize(function.results.len(), ResultRole::Activation);
            for (is_weight, operand) in roles.is_weight.iter_mut().zip(&call.operands) {
                *is_weight |= matches!(operand, Operand::Weight(_));
            }
            for (role, result) in roles.results.iter_mut().zip(&call.results) {
                if calls.results.contains(result) && calls.replaced_cache(*result).is_none() {
                    let is_scalar = entry.ty(*result).ndim() == 0;
                    *role = if is_scalar { ResultRole::Sum } else { ResultRole::Logits };
                }
            }
        }
        Ok(())
    }

    fn param_dtype(&self, roles: &Roles, param: usize) -> DType {
        let Precision { parameters, compute, .. } = *self.precision;
        if roles.is_weight[param] { parameters } else { compute }
    }

    fn result_dtype(&self, roles: &Roles, result: usize) -> DType {
        match roles.results[result] {
            ResultRole::Activation => self.precision.compute,
            ResultRole::Sum => self.precision.accumulate,
            ResultRole::Logits => self.precision.logits,
        }
    }

    /// The values whose products are logits: all of a layer that makes a result of the entry.
    fn logits(&self, roles: &Roles, primal: &Function) -> BTreeSet<String> {
        let is_last = roles.results.iter().any(|role| *role != ResultRole::Activation);
        let products = primal.nodes.iter().filter(|node| matches!(node.op, Op::Contract(_)));
        let names = products.map(|node| primal.value(node.result()).name.clone());
        let is_wide = is_last && !self.precision.logits.is_narrow();
        if is_wide { names.collect() } else { BTreeSet::new() }
    }

    fn layer(&self, function: &Function, typed: &mut Module) -> Function {
        let roles = &self.roles[&function.name];
        let params: Vec<DType> =
            (0..function.param_count).map(|at| self.param_dtype(roles, at)).collect();
        let results: Vec<DType> =
            (0..function.results.len()).map(|at| self.result_dtype(roles, at)).collect();
        let wide = self.logits(roles, function);
        Retyper::new(self.precision, self.module, function, typed, wide).run(&params, &results)
    }

    fn gradient(&self, primal: &Function, gradient: &Function, typed: &mut Module) -> Function {
        let roles = &self.roles[&primal.name];
        let is_float = |id: &ValueId| primal.ty(*id).dtype.is_float();
        let mut params: Vec<DType> =
            (0..primal.param_count).map(|at| self.param_dtype(roles, at)).collect();
        let mut results = Vec::new();
        for (at, result) in primal.results.iter().enumerate() {
            let dtype = self.result_dtype(roles, at);
            results.push(dtype);
            if is_float(result) {
                params.push(dtype);
            }
        }
        let mut wide = self.logits(roles, primal);
        let of_weights = primal.differentiable_params().enumerate();
        for (at, param) in of_weights {
            if roles.is_weight[param.index()] {
                results.push(self.precision.accumulate);
                let result = gradient.results[primal.results.len() + at];
                wide.extend(summands(gradient, result));
            } else {
                results.push(self.precision.compute);
            }
        }
        // A value that is a result in two roles has the type that it is made in.
        Retyper::new(self.precision, self.module, gradient, typed, wide).run(&params, &results)
    }

    /// An entry: a list of calls, whose values have the types of the layers' results.
    fn entry(&self, entry: &Function, typed: &Module) -> Function {
        let mut retyped = entry.clone();
        for param in entry.params() {
            let value = &mut retyped.values[param.index()];
            let is_cache = value.ty.dims.iter().any(|dim| dim.mentions(Dim::BATCH));
            if value.ty.dtype.is_float() {
                let Precision { parameters, compute, .. } = *self.precision;
                value.ty.dtype = if is_cache { compute } else { parameters };
            }
        }
        for node in &entry.nodes {
            let Some(callee) = node.callee().and_then(|callee| typed.function(callee)) else {
                continue;
            };
            for (result, ty) in node.results.iter().zip(callee.result_types()) {
                retyped.values[result.index()].ty = ty;
            }
        }
        retyped
    }
}

/// The names of the values that a gradient is a sum of, through views.
pub(crate) fn summands(function: &Function, result: ValueId) -> Vec<String> {
    let producers = function.producers();
    let mut names = Vec::new();
    let mut work = vec![result];
    while let Some(value) = work.pop() {
        let Some(at) = producers[value.index()] else { continue };
        let node = &function.nodes[at];
        names.push(function.value(value).name.clone());
        if matches!(node.op, Op::Binary(Binary::Add)) || node.op.class() == Class::View {
            work.extend(&node.operands);
        }
    }
    names
}

struct Retyper<'a> {
    narrow: DType,
    sum: DType,
    source: &'a Module,
    function: &'a Function,
    /// The values that are not rounded to the narrow type.
    wide: BTreeSet<String>,
    builder: Builder<'a>,
    /// For each value of the function, the value that holds it; none for a constant that nobody
    /// read yet.
    made: Vec<Option<ValueId>>,
    casts: HashMap<(ValueId, DType), ValueId>,
    /// The constants of the function, and those that were made of them.
    constants: HashMap<ValueId, f64>,
    constants_made: HashMap<(ValueId, DType), ValueId>,
}

impl<'a> Retyper<'a> {
    fn new(
        precision: &Precision,
        source: &'a Module,
        function: &'a Function,
        typed: &'a mut Module,
        wide: BTreeSet<String>,
    ) -> Retyper<'a> {
        Retyper {
            narrow: precision.compute,
            sum: precision.accumulate,
            source,
            function,
            wide,
            builder: Builder::new(typed, function.name.clone(), Kind::Layer),
            made: vec![None; function.values.len()],
            casts: HashMap::new(),
            constants: HashMap::new(),
            constants_made: HashMap::new(),
        }
    }

    fn run(mut self, params: &[DType], results: &[DType]) -> Function {
        for (param, dtype) in self.function.params().zip(params) {
            let value = self.function.value(param);
            let ty = match value.ty.dtype.is_float() {
                true => value.ty.with_dtype(*dtype),
                false => value.ty.clone(),
            };
            let made = self.builder.param(&value.name, ty);
            self.builder.set_frozen(made, value.frozen);
            self.made[param.index()] = Some(made);
        }
        for node in &self.function.nodes {
            self.node(node);
        }
        let typed = self.function.results.iter().zip(results);
        let mut results = Vec::new();
        for (result, dtype) in typed {
            let made = self.as_type(*result, *dtype);
            // Plans know results by their names.
            self.builder.claim_name(self.name(*result), made);
            results.push(made);
        }
        let mut function = self.builder.into_function(&results);
        ir::pass::remove_dead_nodes(&mut function);
        function
    }

    fn is_float(&self, value: ValueId) -> bool {
        self.function.ty(value).dtype.is_float()
    }

    /// The type of the value that holds one of the function.
    fn dtype(&self, value: ValueId) -> DType {
        match self.made[value.index()] {
            Some(made) => self.builder.ty(made).dtype,
            None => self.function.ty(value).dtype,
        }
    }

    fn is_wide(&self, value: ValueId) -> bool {
        self.wide.contains(&self.function.value(value).name)
    }

    fn name(&self, value: ValueId) -> &'a str {
        &self.function.value(value).name
    }

    /// A value in a type; integers and truths as they are.
    fn as_type(&mut self, value: ValueId, dtype: DType) -> ValueId {
        if let (Some(number), true) = (self.constants.get(&value), self.is_float(value)) {
            return self.constant(value, *number, dtype);
        }
        let made = self.made[value.index()].expect("nodes are in topological order");
        if !self.is_float(value) || self.builder.ty(made).dtype == dtype {
            return made;
        }
        self.cast(made, dtype)
    }

    fn cast(&mut self, made: ValueId, dtype: DType) -> ValueId {
        if let Some(there) = self.casts.get(&(made, dtype)) {
            return *there;
        }
        let name = format!("{}.{dtype}", self.builder.function().value(made).name);
        let to = self.builder.push(&name, Op::Cast { dtype }, &[made]);
        let from = self.builder.ty(made).dtype;
        self.casts.insert((made, dtype), to);
        // What a narrow number was widened from is that number.
        if from.is_narrow() {
            self.casts.insert((to, from), made);
        }
        to
    }

    fn constant(&mut self, value: ValueId, number: f64, dtype: DType) -> ValueId {
        if let Some(there) = self.constants_made.get(&(value, dtype)) {
            return *there;
        }
        let TensorType { dims, .. } = self.function.ty(value).clone();
        let op = Op::Constant { value: number, dtype, dims };
        let made = self.builder.push(self.name(value), op, &[]);
        self.constants_made.insert((value, dtype), made);
        made
    }

    fn define(&mut self, value: ValueId, made: ValueId) {
        self.made[value.index()] = Some(made);
    }

    /// Adds a node of one result.
    fn push(&mut self, node: &Node, op: Op, operands: &[ValueId]) {
        let made = self.builder.push(self.name(node.result()), op, operands);
        self.define(node.result(), made);
    }

    /// Adds a node of one result that is computed in the type of sums, and rounded unless its
    /// readers want it as it is.
    fn push_rounded(&mut self, node: &Node, op: Op, operands: &[ValueId]) {
        let (result, narrow) = (node.result(), self.narrow);
        if self.is_wide(result) {
            return self.push(node, op, operands);
        }
        let name = self.name(result);
        let wide = self.builder.push(&format!("{name}.{}", self.sum), op, operands);
        let made = self.builder.push(name, Op::Cast { dtype: narrow }, &[wide]);
        self.define(result, made);
    }

    fn all_as(&mut self, operands: &[ValueId], dtype: DType) -> Vec<ValueId> {
        operands.iter().map(|operand| self.as_type(*operand, dtype)).collect()
    }

    fn as_made(&mut self, operands: &[ValueId]) -> Vec<ValueId> {
        operands.iter().map(|operand| self.as_type(*operand, self.dtype(*operand))).collect()
    }

    fn node(&mut self, node: &Node) {
        match node.op.class() {
            Class::Source => self.source(node),
            Class::Elementwise => self.elementwise(node),
            Class::Product => self.product(node),
            Class::Reduction | Class::Scan => self.reduction(node),
            Class::View | Class::Join => {
                let dtype = self.common(&node.operands);
                let operands = self.all_as(&node.operands, dtype);
                self.push(node, node.op.clone(), &operands);
            }
            Class::Indexed => self.indexed(node),
            Class::Call => self.call(node),
            Class::Collective => {
                let operands = self.as_made(&node.operands);
                self.push(node, node.op.clone(), &operands);
            }
        }
    }

    #[expect(clippy::wildcard_enum_match_arm, reason = "others keep their types")]
    fn source(&mut self, node: &Node) {
        match node.op {
            Op::Constant { value, dtype, .. } if dtype.is_float() => {
                self.constants.insert(node.result(), value);
            }
            _ => {
                let operands = self.as_made(&node.operands);
                self.push(node, node.op.clone(), &operands);
            }
        }
    }

    /// The narrow type where all floating-point operands are, but for constants that are numbers
    /// of it; else that of sums.
    fn common(&self, operands: &[ValueId]) -> DType {
        let is_narrow = |operand: &ValueId| match self.constants.get(operand) {
            Some(number) => nearest(self.narrow, *number).to_bits() == number.to_bits(),
            None => !self.is_float(*operand) || self.dtype(*operand) == self.narrow,
        };
        if operands.iter().all(is_narrow) { self.narrow } else { self.sum }
    }

    #[expect(clippy::wildcard_enum_match_arm, reason = "others are computed alike")]
    fn elementwise(&mut self, node: &Node) {
        let result = node.result();
        match node.op {
            Op::Cast { dtype } if dtype.is_float() => {
                let own = self.function.ty(result).dtype;
                let operands = self.as_made(&node.operands);
                self.push(node, Op::Cast { dtype: own }, &operands);
            }
            Op::Cast { .. } => {
                let operands = self.as_made(&node.operands);
                self.push(node, node.op.clone(), &operands);
            }
            Op::Compare(_) => {
                let operands = self.all_as(&node.operands, self.common(&node.operands));
                self.push(node, node.op.clone(), &operands);
            }
            _ => {
                let has_sums = node.operands.iter().any(|operand| {
                    let is_constant = self.constants.contains_key(operand);
                    !is_constant && self.is_float(*operand) && self.dtype(*operand) == self.sum
                });
                let dtype =
                    if self.is_wide(result) { self.sum } else { self.common(&node.operands) };
                let operands = self.all_as(&node.operands, dtype);
                // A constant that is no narrow number is one of the type of sums.
                if self.is_float(result) && dtype == self.sum && !has_sums {
                    self.push_rounded(node, node.op.clone(), &operands);
                } else {
                    self.push(node, node.op.clone(), &operands);
                }
            }
        }
    }

    #[expect(clippy::wildcard_enum_match_arm, reason = "only contractions have wide results")]
    fn product(&mut self, node: &Node) {
        let operands = self.all_as(&node.operands, self.narrow);
        let op = match &node.op {
            Op::Contract(einsum) => {
                let is_wide = einsum.is_wide || self.is_wide(node.result());
                Op::Contract(Einsum { is_wide, ..einsum.clone() })
            }
            other => other.clone(),
        };
        self.push(node, op, &operands);
    }

    /// In the type of sums, orders and places too, whose kernels compare no narrow numbers.
    fn reduction(&mut self, node: &Node) {
        let operands = match node.operands.iter().all(|operand| self.is_float(*operand)) {
            true => self.all_as(&node.operands, self.sum),
            false => self.as_made(&node.operands),
        };
        self.push(node, node.op.clone(), &operands);
    }

    #[expect(clippy::wildcard_enum_match_arm, reason = "others only move elements")]
    fn indexed(&mut self, node: &Node) {
        match node.op {
            Op::ScatterAdd { .. } => {
                let operands = self.all_as(&node.operands, self.sum);
                self.push_rounded(node, node.op.clone(), &operands);
            }
            Op::DynamicUpdateSlice { .. } | Op::Scatter { .. } => {
                let dtype = self.dtype(node.operands[0]);
                let operands = self.all_as(&node.operands, dtype);
                self.push(node, node.op.clone(), &operands);
            }
            _ => {
                let operands = self.as_made(&node.operands);
                self.push(node, node.op.clone(), &operands);
            }
        }
    }

    fn call(&mut self, node: &Node) {
        let callee = node.callee().and_then(|callee| self.source.function(callee));
        let Some(callee) = callee else {
            let operands = self.as_made(&node.operands);
            return self.push(node, node.op.clone(), &operands);
        };
        match &callee.kind {
            Kind::Composite { name, attributes } if is_in_catalogue(name) => {
                self.narrow_composite(node, name, attributes);
            }
            Kind::Composite { .. } | Kind::Layer | Kind::Kernel => self.wide_composite(node),
        }
    }

    /// A composite that has kernels for narrow types.
    fn narrow_composite(&mut self, node: &Node, name: &str, attributes: &Attributes) {
        let sums = templates()[name].definition(attributes).sums();
        let typed = node.operands.iter().zip(sums);
        let operands: Vec<ValueId> = typed
            .map(|(operand, is_sum)| {
                self.as_type(*operand, if is_sum { self.sum } else { self.narrow })
            })
            .collect();
        let function = self.builder.instance(name, attributes, &operands);
        self.call_all(node, function, &operands, |_, _| None);
    }

    /// A composite that is computed in the type of sums. Results with the sizes of a narrow operand
    /// are rounded, statistics are not.
    fn wide_composite(&mut self, node: &Node) {
        let narrow_dims: Vec<Vec<Dim>> = node
            .operands
            .iter()
            .filter(|o| self.is_float(**o) && self.dtype(**o) == self.narrow)
            .map(|o| self.function.ty(*o).dims.clone())
            .collect();
        let operands = self.all_as(&node.operands, self.sum);
        let function = node.callee().unwrap_or_default().to_owned();
        self.call_all(node, function, &operands, |this, result| {
            let ty = this.function.ty(result);
            let rounds = ty.dtype.is_float() && narrow_dims.contains(&ty.dims);
            (rounds && !this.is_wide(result)).then_some(this.narrow)
        });
    }

    /// Calls a function; results are rounded to the type that `rounded` says.
    fn call_all(
        &mut self,
        node: &Node,
        function: String,
        operands: &[ValueId],
        rounded: impl Fn(&Self, ValueId) -> Option<DType>,
    ) {
        let to: Vec<Option<DType>> = node.results.iter().map(|r| rounded(self, *r)).collect();
        let names = node.results.iter().zip(&to).map(|(result, to)| {
            let name = self.name(*result);
            if to.is_some() { format!("{name}.{}", self.sum) } else { name.to_owned() }
        });
        let names: Vec<String> = names.collect();
        let made = self.builder.push_named(&names, Op::Call { function }, operands);
        for ((result, made), to) in node.results.iter().zip(made).zip(to) {
            let made = match to {
                Some(dtype) => self.builder.push(self.name(*result), Op::Cast { dtype }, &[made]),
                None => made,
            };
            self.define(*result, made);
        }
    }
}
