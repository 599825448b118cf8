//! Control flow that is static: `If` of a known condition, `Loop` of a known number of rounds and
//! `Scan` are laid out as the nodes of their bodies; functions of the model as theirs.
//!
//! What a body makes is pure, so that an `If` of an unknown condition computes both branches and
//! chooses.

use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

use super::{Meaning, Read, Walk, Wrong};
use crate::import::onnx::element::Element;
use crate::import::onnx::operators::translation;
use crate::import::onnx::proto::{AttributeProto, FunctionProto, GraphProto, NodeProto};
use crate::import::onnx::stored;
use crate::module::ValueId;
use crate::op::Op;
use crate::types::TensorType;
use crate::{DType, Tensor};

/// Functions of a model, by their domains and names.
pub(in crate::import::onnx) type Functions = BTreeMap<(String, String), Rc<FunctionProto>>;

/// Rounds of a loop at most. Chosen: each is laid out on its own, and longer sequences would make
/// modules that take minutes to compile.
const ROUNDS_MAX: i64 = 4096;

/// Functions within functions at most: a function that calls itself has no end.
const DEPTH_MAX: usize = 64;

/// Whether an operator holds graphs.
pub(in crate::import::onnx) fn is_control(operator: &str) -> bool {
    matches!(operator, "If" | "Loop" | "Scan" | "SequenceMap")
}

/// What a body makes, in the order of its outputs.
type Made = Result<Vec<Read>, Wrong>;

fn attribute<'n>(node: &'n NodeProto, name: &str) -> Option<&'n AttributeProto> {
    node.attribute.iter().find(|a| a.name == name)
}

fn graph<'n>(node: &'n NodeProto, name: &str) -> Result<&'n GraphProto, Wrong> {
    let found = attribute(node, name).and_then(|a| a.g.as_deref());
    found.ok_or_else(|| Wrong::Damaged(format!("a graph `{name}` of `{}`", node.op_type)))
}

pub(in crate::import::onnx) fn int(name: &str, value: i64) -> AttributeProto {
    AttributeProto { name: name.to_owned(), i: value, kind: 2, ..AttributeProto::default() }
}

fn known(name: &str, tensor: Tensor) -> Read {
    Read { name: name.to_owned(), meaning: Meaning::Known(Rc::new(tensor)), element: None }
}

impl Walk<'_> {
    /// What a node with graphs makes.
    pub(in crate::import::onnx) fn controlled(
        &mut self,
        node: &NodeProto,
        reads: &[Option<Read>],
    ) -> Made {
        match node.op_type.as_str() {
            "If" => self.branch(node, reads),
            "Loop" => self.rounds(node, reads),
            "Scan" => self.scan(node, reads),
            _ => self.each(node, reads),
        }
    }

    /// What the nodes of a graph make of what its inputs are; what it reads from outside it finds
    /// there.
    fn body(&mut self, graph: &GraphProto, inputs: Vec<Read>) -> Made {
        let (meanings, elements) = (self.meanings.clone(), self.elements.clone());
        let refused = self.refused.len();
        if graph.input.len() != inputs.len() {
            let found = format!("a body of {} inputs for {}", graph.input.len(), inputs.len());
            return Err(Wrong::Damaged(found));
        }
        for (port, read) in graph.input.iter().zip(inputs) {
            self.meanings.insert(port.name.clone(), read.meaning);
            self.note(&port.name, read.element);
        }
        for tensor in &graph.initializer {
            let beside = &mut |_: &str| Err("elements of a body in another file".to_owned());
            match stored::stored(tensor, beside) {
                Ok(found) => self.stored(&tensor.name, found),
                Err(wrong) => self.refuse_tensor(&tensor.name, wrong.text()),
            }
        }
        for node in &graph.node {
            self.node(node).map_err(Wrong::Damaged)?;
        }
        let names: Vec<&str> = graph.output.iter().map(|port| port.name.as_str()).collect();
        let made = self.named(&names);
        (self.meanings, self.elements) = (meanings, elements);
        if self.refused.len() > refused { Err(Wrong::Passed) } else { made }
    }

    /// What names stand for.
    fn named(&self, names: &[&str]) -> Made {
        let one = |name: &&str| {
            let meaning = self.meanings.get(*name).cloned();
            let meaning = meaning.ok_or_else(|| Wrong::Damaged((*name).to_owned()))?;
            if let Meaning::Refused = meaning {
                return Err(Wrong::Passed);
            }
            let element = self.elements.get(*name).copied();
            Ok(Read { name: (*name).to_owned(), meaning, element })
        };
        names.iter().map(one).collect()
    }

    /// What the nodes of a function make, with the attributes of its caller.
    pub(in crate::import::onnx) fn inlined(
        &mut self,
        node: &NodeProto,
        function: &FunctionProto,
        reads: &[Option<Read>],
    ) -> Made {
        if self.depth == DEPTH_MAX {
            return Err(Wrong::Use(format!("functions in {DEPTH_MAX} functions")));
        }
        let outer = (std::mem::take(&mut self.meanings), std::mem::take(&mut self.elements));
        for (at, name) in function.input.iter().enumerate() {
            let read = reads.get(at).cloned().flatten();
            let (meaning, element) =
                read.map_or((Meaning::Nothing, None), |read| (read.meaning, read.element));
            self.meanings.insert(name.clone(), meaning);
            self.note(name, element);
        }
        let own =
            function.opset_import.iter().find(|set| super::super::proto::is_standard(&set.domain));
        let version = own.map_or(self.opset, |set| set.version);
        let opset = std::mem::replace(&mut self.opset, version);
        let refused = self.refused.len();
        self.depth += 1;
        let mut made = Ok(());
        for inner in &function.node {
            let bound = bound(inner, node, function, &self.meanings);
            made = made.and_then(|()| self.node(&bound).map_err(Wrong::Damaged));
        }
        let names: Vec<&str> = function.output.iter().map(String::as_str).collect();
        let made = made.and_then(|()| self.named(&names));
        self.depth -= 1;
        self.opset = opset;
        (self.meanings, self.elements) = outer;
        if self.refused.len() > refused { Err(Wrong::Passed) } else { made }
    }

    /// Values that an operator makes of others.
    pub(in crate::import::onnx) fn applied(
        &mut self,
        operator: &str,
        attributes: &[AttributeProto],
        reads: &[Read],
    ) -> Result<Read, Wrong> {
        let (op_type, attribute) = (operator.to_owned(), attributes.to_vec());
        let output = vec![reads.first().map_or(operator, |read| &read.name).to_owned()];
        let node = NodeProto { op_type, attribute, output, ..NodeProto::default() };
        let translate = translation("", operator).ok_or(Wrong::Unknown)?;
        let reads: Vec<Option<Read>> = reads.iter().cloned().map(Some).collect();
        let made = self.translate(&node, &reads, translate)?;
        made.into_iter().next().ok_or(Wrong::Unknown)
    }

    fn branch(&mut self, node: &NodeProto, reads: &[Option<Read>]) -> Made {
        let condition = reads.first().cloned().flatten();
        let condition = condition.ok_or_else(|| Wrong::Use("no condition".to_owned()))?;
        let (then, other) = (graph(node, "then_branch")?, graph(node, "else_branch")?);
        if let Some(truth) = self.truth(&condition)? {
            return self.body(if truth { then } else { other }, Vec::new());
        }
        let before = self.checks.len();
        let a = self.body(then, Vec::new())?;
        let between = self.checks.len();
        let b = self.body(other, Vec::new())?;
        let after = self.checks.len();
        self.check_where(&condition, before..between, true)?;
        self.check_where(&condition, between..after, false)?;
        if a.len() != b.len() {
            return Err(Wrong::Use("branches with unlike results".to_owned()));
        }
        let mut chosen = Vec::new();
        for (a, b) in a.into_iter().zip(b) {
            let types = [self.tensor(&a)?, self.tensor(&b)?].map(|id| self.b.ty(id).clone());
            if types[0] != types[1] || a.element != b.element {
                let [a, b] = types;
                let why = format!("the condition depends on an input, and branches make {a}, {b}");
                return Err(Wrong::Use(why));
            }
            chosen.push(self.applied("Where", &[], &[condition.clone(), a, b])?);
        }
        Ok(chosen)
    }

    /// Checks of a branch that is not taken say nothing: their numbers are minus one there.
    fn check_where(
        &mut self,
        condition: &Read,
        checks: Range<usize>,
        is_then: bool,
    ) -> Result<(), Wrong> {
        if checks.is_empty() {
            return Ok(());
        }
        let condition = self.tensor(condition)?;
        if self.b.ty(condition).elements().as_constant() != Some(1) {
            return Err(Wrong::Use("a condition of more than one element".to_owned()));
        }
        let condition = match self.b.ty(condition).ndim() {
            0 => condition,
            _ => self.b.push("taken", Op::Reshape { dims: Vec::new() }, &[condition]),
        };
        let none = self.b.constant("none", -1.0, TensorType::of(DType::F64, &[]));
        for at in checks {
            let number = self.checks[at].0;
            let (then, other) = if is_then { (number, none) } else { (none, number) };
            self.checks[at].0 = self.b.push("check", Op::Select, &[condition, then, other]);
        }
        Ok(())
    }

    fn tensor(&mut self, read: &Read) -> Result<ValueId, Wrong> {
        if let Meaning::Refused = read.meaning {
            return Err(Wrong::Passed);
        }
        Ok(self.value(&read.name, &read.meaning)?)
    }

    /// A condition, where it is known.
    fn truth(&mut self, read: &Read) -> Result<Option<bool>, Wrong> {
        if let Meaning::Refused = read.meaning {
            return Err(Wrong::Passed);
        }
        match self.known(read) {
            Some(tensor) if tensor.count() == 1 => Ok(Some(tensor.scalar() != 0.0)),
            Some(_) => Err(Wrong::Use("a condition of more than one element".to_owned())),
            None => Ok(None),
        }
    }

    /// Rounds until the count is reached or the condition does not hold.
    fn rounds(&mut self, node: &NodeProto, reads: &[Option<Read>]) -> Made {
        let body = graph(node, "body")?;
        let state: Option<Vec<Read>> = reads.iter().skip(2).cloned().collect();
        let mut state = state.ok_or_else(|| Wrong::Use("a state is missing".to_owned()))?;
        let unknown = |what: &str| Wrong::Use(format!("the {what} depends on an input"));
        let count = match reads.first().cloned().flatten() {
            Some(read) => {
                let count = self.known(&read).ok_or_else(|| unknown("number of rounds"))?;
                count.to_f64().first().map_or(0, |count| *count as i64)
            }
            None => i64::MAX,
        };
        let mut goes_on = match reads.get(1).cloned().flatten() {
            Some(read) => self.truth(&read)?.ok_or_else(|| unknown("condition"))?,
            None => true,
        };
        let mut gathered: Vec<Vec<Read>> = Vec::new();
        let mut round = 0;
        while goes_on && round < count {
            if round == ROUNDS_MAX {
                return Err(Wrong::Use(format!("more than {ROUNDS_MAX} rounds")));
            }
            let number = known("round", Tensor::int(crate::DType::I64, &[], vec![round]));
            let mut inputs = vec![number, known("goes_on", Tensor::bool(&[], vec![true]))];
            inputs.extend(state.iter().cloned());
            let mut made = self.body(body, inputs)?;
            if made.len() <= state.len() {
                return Err(Wrong::Damaged("a body that makes less than its state".to_owned()));
            }
            let parts = made.split_off(1 + state.len());
            state = made.split_off(1);
            gathered.resize(parts.len(), Vec::new());
            gathered.iter_mut().zip(parts).for_each(|(all, part)| all.push(part));
            goes_on = self.truth(&made[0])?.ok_or_else(|| unknown("condition"))?;
            round += 1;
        }
        let scanned = body.output.len().saturating_sub(1 + state.len());
        if gathered.is_empty() && scanned > 0 {
            return Err(Wrong::Use("no rounds, of which something is gathered".to_owned()));
        }
        for parts in gathered {
            state.push(self.stacked(parts, 0, false)?);
        }
        Ok(state)
    }

    /// Parts side by side along a new dim.
    pub(in crate::import::onnx) fn stacked(
        &mut self,
        parts: Vec<Read>,
        axis: i64,
        reversed: bool,
    ) -> Result<Read, Wrong> {
        let mut rows = Vec::new();
        let axes = known("axes", Tensor::int(crate::DType::I64, &[1], vec![axis]));
        for part in parts {
            rows.push(self.applied("Unsqueeze", &[], &[part, axes.clone()])?);
        }
        if reversed {
            rows.reverse();
        }
        self.applied("Concat", &[int("axis", axis)], &rows)
    }

    /// One round for each element of sequences that lie along dims.
    fn scan(&mut self, node: &NodeProto, reads: &[Option<Read>]) -> Made {
        if self.opset < 9 {
            return Err(Wrong::Use(format!("Scan of opset {}", self.opset)));
        }
        let body = graph(node, "body")?;
        let reads: Option<Vec<Read>> = reads.iter().cloned().collect();
        let mut state = reads.ok_or_else(|| Wrong::Use("an operand is missing".to_owned()))?;
        let count = attribute(node, "num_scan_inputs").map_or(0, |a| a.i);
        let first = usize::try_from(count).ok().and_then(|count| state.len().checked_sub(count));
        let first = first.ok_or_else(|| Wrong::Use(format!("{count} sequences")))?;
        let scanned = state.split_off(first);
        let number = |name: &str, at: usize| {
            attribute(node, name).and_then(|a| a.ints.get(at).copied()).unwrap_or(0)
        };
        let mut sizes = Vec::new();
        for (at, read) in scanned.iter().enumerate() {
            let id = self.tensor(read)?;
            let dims = self.b.ty(id).sizes().unwrap_or_default();
            let dim = crate::import::onnx::site::dim_at(number("scan_input_axes", at), dims.len())?;
            sizes.push((dim, dims[dim]));
        }
        let length = sizes.first().map_or(0, |(_, size)| *size);
        let fits = sizes.iter().all(|(_, size)| *size == length);
        if !fits || length == 0 || length as i64 > ROUNDS_MAX {
            return Err(Wrong::Use(format!("sequences of {sizes:?}")));
        }
        let mut gathered: Vec<Vec<Read>> = Vec::new();
        for round in 0..length {
            let mut inputs = state.clone();
            for (at, (read, (dim, _))) in scanned.iter().zip(&sizes).enumerate() {
                let backward = number("scan_input_directions", at) != 0;
                let index = if backward { length - 1 - round } else { round };
                let index = known("at", Tensor::int(crate::DType::I64, &[], vec![index as i64]));
                let axis = int("axis", *dim as i64);
                inputs.push(self.applied("Gather", &[axis], &[read.clone(), index])?);
            }
            let mut made = self.body(body, inputs)?;
            let parts = made.split_off(first.min(made.len()));
            state = made;
            gathered.resize(parts.len(), Vec::new());
            gathered.iter_mut().zip(parts).for_each(|(all, part)| all.push(part));
        }
        for (at, parts) in gathered.into_iter().enumerate() {
            let backward = number("scan_output_directions", at) != 0;
            let axis = number("scan_output_axes", at);
            state.push(self.stacked(parts, axis, backward)?);
        }
        Ok(state)
    }

    /// A body for each element of sequences.
    fn each(&mut self, node: &NodeProto, reads: &[Option<Read>]) -> Made {
        let body = graph(node, "body")?;
        let reads: Option<Vec<Read>> = reads.iter().cloned().collect();
        let reads = reads.ok_or_else(|| Wrong::Use("an operand is missing".to_owned()))?;
        let Some(Meaning::Sequence(first)) = reads.first().map(|read| &read.meaning) else {
            return Err(Wrong::Use("no sequence".to_owned()));
        };
        let mut made: Vec<Vec<Read>> = vec![Vec::new(); body.output.len()];
        for at in 0..first.len() {
            let of = |read: &Read| match &read.meaning {
                Meaning::Sequence(all) => all.get(at).cloned(),
                Meaning::Made(_)
                | Meaning::Known(_)
                | Meaning::Stored(_)
                | Meaning::Nothing
                | Meaning::Refused => Some(read.clone()),
            };
            let inputs: Option<Vec<Read>> = reads.iter().map(of).collect();
            let inputs = inputs.ok_or_else(|| Wrong::Use("sequences of unlike length".into()))?;
            let results = self.body(body, inputs)?;
            made.iter_mut().zip(results).for_each(|(all, one)| all.push(one));
        }
        let sequence = |all: Vec<Read>| Read {
            name: node.output.first().cloned().unwrap_or_default(),
            meaning: Meaning::Sequence(Rc::new(all)),
            element: None::<Element>,
        };
        Ok(made.into_iter().map(sequence).collect())
    }
}

/// A node of a function with the attributes that its caller gives; operands that the caller leaves
/// out are left out.
fn bound(
    inner: &NodeProto,
    caller: &NodeProto,
    function: &FunctionProto,
    meanings: &BTreeMap<String, Meaning>,
) -> NodeProto {
    let mut node = inner.clone();
    let value = |attribute: &AttributeProto| {
        if attribute.ref_attr_name.is_empty() {
            return Some(attribute.clone());
        }
        let of = |all: &[AttributeProto]| {
            all.iter().find(|a| a.name == attribute.ref_attr_name).cloned()
        };
        let found = of(&caller.attribute).or_else(|| of(&function.attribute_proto));
        found.map(|found| AttributeProto { name: attribute.name.clone(), ..found })
    };
    node.attribute = inner.attribute.iter().filter_map(value).collect();
    for name in &mut node.input {
        if let Some(Meaning::Nothing) = meanings.get(name.as_str()) {
            name.clear();
        }
    }
    while node.input.last().is_some_and(String::is_empty) {
        node.input.pop();
    }
    node
}
