//! A function as an e-graph, and a function made of what was chosen in it.

use std::collections::{BTreeMap, BTreeSet};

use egg::{Id, Language};

use super::facts::Facts;
use super::pattern::add;
use super::term::{Graph, Head, Term, rebuild};
use crate::module::{Function, Kind, Module, Node, Value, ValueId};
use crate::op::Op;
use crate::types::TensorType;

/// A function in an e-graph.
#[derive(Clone, Debug)]
pub struct Region {
    /// The e-graph. Its facts hold the functions that calls call.
    pub graph: Graph,
    /// The classes of the function's results.
    pub results: Vec<Id>,
    /// The function as it was.
    pub function: Function,
    /// The class of each of its values.
    values: Vec<Id>,
    /// The terms of its nodes.
    original: Vec<Term>,
}

impl Region {
    /// Adds every node of a function of a module that verifies.
    ///
    /// # Panics
    /// When a node does not take its operands.
    pub fn of(function: &Function, module: &Module) -> Region {
        let params = function.param_types();
        let facts = Facts { params, module: callees(function, module), ..Facts::default() };
        let mut graph = Graph::new(facts);
        let param = |at: usize| Term { head: Head::Param(at as u32), operands: Vec::new() };
        let mut values: Vec<Id> =
            (0..function.param_count).map(|at| graph.add(param(at))).collect();
        let mut original = Vec::new();
        for node in &function.nodes {
            let operands = node.operands.iter().map(|o| values[o.index()]).collect();
            let Some((class, term)) = add(&mut graph, &node.op, operands) else {
                panic!("verified: nodes of `@{}` take their operands", function.name)
            };
            original.push(term);
            if node.callee().is_some() {
                for at in 0..node.results.len() {
                    values.push(project(&mut graph, class, at));
                }
            } else {
                values.push(class);
            }
        }
        rebuild(&mut graph);
        let results = function.results.iter().map(|r| values[r.index()]).collect();
        Region { graph, results, function: function.clone(), values, original }
    }

    /// The class of a value of the function as it was.
    pub fn class(&self, value: ValueId) -> Id {
        self.graph.find(self.values[value.index()])
    }

    /// The terms of the function as it was.
    pub fn original_terms(&self) -> impl Iterator<Item = Term> + '_ {
        self.original.iter().cloned()
    }

    /// The name of a class's first value, or what it is where it has none.
    pub fn name_of(&self, class: Id) -> String {
        let class = self.graph.find(class);
        let mut values = (0..self.values.len()).map(|at| ValueId(at as u32));
        match values.find(|value| self.class(*value) == class) {
            Some(value) => self.function.value(value).name.clone(),
            None => format!("({})", self.graph[class].nodes[0].discriminant()),
        }
    }

    /// Each class that the results need with its term: the choice where there is none, as no rule
    /// has added any. Of a number and what computes it, the number.
    pub fn as_it_is(&self) -> BTreeMap<Id, Term> {
        self.as_it_is_for(&self.results)
    }

    /// As [`Region::as_it_is`], for other results.
    pub fn as_it_is_for(&self, results: &[Id]) -> BTreeMap<Id, Term> {
        let mut choice = BTreeMap::new();
        let mut open: Vec<Id> = results.to_vec();
        while let Some(class) = open.pop() {
            let class = self.graph.find(class);
            if choice.contains_key(&class) {
                continue;
            }
            let terms = &self.graph[class].nodes;
            let term = terms.iter().find(|t| t.operands.is_empty()).unwrap_or(&terms[0]).clone();
            open.extend(&term.operands);
            choice.insert(class, term);
        }
        choice
    }

    /// The function made of the chosen term of each class.
    ///
    /// Values that are still there keep their names, nodes their order as far as operands allow.
    ///
    /// # Panics
    /// When a chosen term depends on itself.
    pub fn emit(&self, choice: &BTreeMap<Id, Term>) -> Function {
        let mut emitter = Emitter::new(self, choice);
        for class in emitter.in_order() {
            emitter.visit(class);
        }
        emitter.finish()
    }
}

/// The functions that a function calls, and all composites: rules may call those.
fn callees(function: &Function, module: &Module) -> Module {
    let called: BTreeSet<&str> = function.nodes.iter().filter_map(Node::callee).collect();
    let is_needed = |f: &&Function| {
        matches!(f.kind, Kind::Composite { .. }) || called.contains(f.name.as_str())
    };
    let functions = module.functions.iter().filter(is_needed).cloned().collect();
    Module { name: module.name.clone(), functions }
}

/// One result of a call.
pub(super) fn project(graph: &mut Graph, tuple: Id, at: usize) -> Id {
    graph.add(Term { head: Head::Projection(at as u32), operands: vec![tuple] })
}

struct Emitter<'r> {
    region: &'r Region,
    choice: &'r BTreeMap<Id, Term>,
    /// The first value of each class, by whose place the class is ordered.
    first: BTreeMap<Id, ValueId>,
    /// The value by whose name a class is named: a result, else the first one.
    named: BTreeMap<Id, ValueId>,
    /// The values of the classes that are there: one, or those of a call.
    made: BTreeMap<Id, Vec<ValueId>>,
    open: Vec<Id>,
    names: BTreeSet<String>,
    function: Function,
}

impl<'r> Emitter<'r> {
    fn new(region: &'r Region, choice: &'r BTreeMap<Id, Term>) -> Emitter<'r> {
        let old = &region.function;
        let mut first = BTreeMap::new();
        for at in 0..old.values.len() {
            let id = ValueId(at as u32);
            first.entry(region.class(id)).or_insert(id);
        }
        let mut named = first.clone();
        for result in old.results.iter().rev() {
            named.insert(region.class(*result), *result);
        }
        let mut function = Function::new(old.name.clone(), old.kind.clone());
        function.values = old.values[..old.param_count].to_vec();
        function.param_count = old.param_count;
        let mut made = BTreeMap::new();
        for param in old.params() {
            made.entry(region.class(param)).or_insert(vec![param]);
        }
        let names = function.values.iter().map(|v| v.name.clone()).collect();
        Emitter { region, choice, first, named, made, open: Vec::new(), names, function }
    }

    /// The chosen classes in the order of their first values.
    fn in_order(&self) -> Vec<Id> {
        let chosen = self.first.iter().filter(|(class, _)| self.choice.contains_key(*class));
        let mut order: Vec<(ValueId, Id)> = chosen.map(|(class, value)| (*value, *class)).collect();
        order.sort_unstable();
        let results = self.region.results.iter().map(|id| self.region.graph.find(*id));
        order.into_iter().map(|(_, class)| class).chain(results).collect()
    }

    /// Adds what a class needs, then the class.
    fn visit(&mut self, class: Id) {
        if self.made.contains_key(&class) {
            return;
        }
        assert!(!self.open.contains(&class), "a choice has no cycles");
        self.open.push(class);
        let term = self.choice.get(&class).expect("every class that is needed is chosen").clone();
        for operand in &term.operands {
            self.visit(self.region.graph.find(*operand));
        }
        self.open.pop();
        let of = |id: &Id| self.made[&self.region.graph.find(*id)].clone();
        match term.head {
            Head::Param(at) => {
                self.made.insert(class, vec![ValueId(at)]);
            }
            Head::Projection(at) => {
                let value = of(&term.operands[0])[at as usize];
                self.made.insert(class, vec![value]);
            }
            Head::Op(name, op) => {
                let op = self.region.graph.analysis.ops.get(op).clone();
                let operands = term.operands.iter().map(|id| of(id)[0]).collect();
                let results = self.define(class, name);
                self.function.nodes.push(Node { op, operands, results: results.clone() });
                self.made.insert(class, results);
            }
        }
    }

    /// New values for the results of a class.
    fn define(&mut self, class: Id, op: &str) -> Vec<ValueId> {
        let data = &self.region.graph[class].data;
        let (types, is_tuple) = (data.types.clone(), data.is_tuple);
        let names = if is_tuple { self.result_names(class) } else { vec![self.name(class, op)] };
        let mut ids = Vec::new();
        for (ty, name) in types.into_iter().zip(names) {
            ids.push(self.push(name, ty));
        }
        ids
    }

    fn push(&mut self, name: String, ty: TensorType) -> ValueId {
        let name = self.unique(name);
        self.names.insert(name.clone());
        self.function.values.push(Value::new(name, ty));
        ValueId(self.function.values.len() as u32 - 1)
    }

    /// The name of the class; else that of what is being made of it, with the op.
    fn name(&self, class: Id, op: &str) -> String {
        if let Some(named) = self.named.get(&class) {
            return self.region.function.value(*named).name.clone();
        }
        let named = self.open.iter().rev().find_map(|open| self.named.get(open));
        match named {
            Some(user) => format!("{}.{op}", self.region.function.value(*user).name),
            None => op.to_owned(),
        }
    }

    /// Results bear the names of their classes, and `first.lse` where there are none.
    fn result_names(&self, tuple: Id) -> Vec<String> {
        let graph = &self.region.graph;
        let term = &self.choice[&tuple];
        let callee = term.op().and_then(|op| {
            let Op::Call { function } = graph.analysis.ops.get(op) else { return None };
            graph.analysis.module.function(function)
        });
        let results_of = |callee: &Function| -> Vec<String> {
            callee.results.iter().map(|r| callee.value(*r).name.clone()).collect()
        };
        let inner = callee.map(results_of).unwrap_or_default();
        let projected = |at: usize| {
            let operands = vec![tuple];
            graph.lookup(Term { head: Head::Projection(at as u32), operands })
        };
        let known: Vec<Option<String>> = (0..inner.len())
            .map(|at| {
                // A value that a cheaper term computes keeps its name for that.
                let class = projected(at)?;
                let chosen = self.choice.get(&class)?;
                let is_this = matches!(chosen.head, Head::Projection(_))
                    && graph.find(chosen.operands[0]) == tuple;
                let named = self.named.get(&class).filter(|_| is_this)?;
                Some(self.region.function.value(*named).name.clone())
            })
            .collect();
        let prefix = known.iter().flatten().next().cloned().unwrap_or_else(|| "call".to_owned());
        let named = known.into_iter().zip(&inner);
        named.map(|(known, inner)| known.unwrap_or_else(|| format!("{prefix}.{inner}"))).collect()
    }

    fn unique(&self, name: String) -> String {
        let taken = |candidate: &String| self.names.contains(candidate);
        let candidates = (1..).map(|count| format!("{name}.{count}"));
        std::iter::once(name.clone()).chain(candidates).find(|c| !taken(c)).unwrap_or(name)
    }

    fn finish(mut self) -> Function {
        let of = |id: &Id| self.made[&self.region.graph.find(*id)][0];
        self.function.results = self.region.results.iter().map(of).collect();
        self.function
    }
}
