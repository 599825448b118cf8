//! The walk over the nodes of a graph.
//!
//! What does not depend on an input is computed by the interpreter when the model is read, by the
//! same translation: so shapes are numbers where an operator needs them.

use std::collections::BTreeMap;
use std::rc::Rc;

use super::attributes::wrong_attribute;
use super::operators::translation;
use super::proto::NodeProto;
use super::site::{Operand, Site, sizes};
use super::stored::Stored;
use super::{ENTRY, Held, Port};
use crate::build::Builder;
use crate::eval::eval;
use crate::module::{Function, Kind, Module, Value, ValueId};
use crate::op::Op;
use crate::pass::{remove_common_nodes, remove_dead_nodes};
use crate::types::TensorType;
use crate::{DType, Tensor};

/// Elements that a value computed when a model is read has at most. Chosen: half a GiB of `f64`.
const KNOWN_MAX: i64 = 1 << 26;

/// Elements of a weight that is read with the model at most. Chosen: more than any list of sizes or
/// scales has, less than a weight that should stay in its file.
const READ_MAX: usize = 4096;

/// What a name of the graph stands for.
#[derive(Clone)]
enum Meaning {
    /// A value of the function.
    Made(ValueId),
    /// Numbers that do not depend on an input.
    Known(Rc<Tensor>),
    /// A weight.
    Stored(Rc<Stored>),
    /// The result of a node that is not supported.
    Refused,
}

/// A use of an operator that is not supported.
pub(super) struct Refused {
    pub(super) operator: String,
    pub(super) node: String,
    /// Why, where the operator itself is known.
    pub(super) why: Option<String>,
}

/// A translated graph.
pub(super) struct Finished {
    pub(super) function: Function,
    /// The first parameters, by their names, in order.
    pub(super) weights: Vec<(String, Held)>,
}

/// A graph in the middle of its translation.
pub(super) struct Walk<'m> {
    b: Builder<'m>,
    opset: i64,
    meanings: BTreeMap<String, Meaning>,
    /// Weights and constants that become parameters, by the names of their values.
    held: BTreeMap<String, Held>,
    /// Elements of inputs, by the names of the inputs.
    given: BTreeMap<String, Rc<Tensor>>,
    pub(super) refused: Vec<Refused>,
}

impl<'m> Walk<'m> {
    pub(super) fn new(module: &'m mut Module, opset: i64) -> Walk<'m> {
        let b = Builder::new(module, ENTRY, Kind::Layer);
        let (meanings, held, given) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Walk { b, opset, meanings, held, given, refused: Vec::new() }
    }

    /// Notes the elements of an input; of other dims than the input's they are none.
    pub(super) fn given(&mut self, port: &Port, tensor: &Tensor) {
        if port.ty.sizes().as_deref() == Some(&tensor.dims) {
            let cast = Tensor::from_f64(port.ty.dtype, &tensor.dims, tensor.to_f64());
            self.given.insert(port.name.clone(), Rc::new(cast));
        }
    }

    /// Adds an input. All come before the first node.
    pub(super) fn input(&mut self, name: &str, ty: TensorType) -> Port {
        let id = self.b.param(&value_name(name), ty.clone());
        self.meanings.insert(name.to_owned(), Meaning::Made(id));
        Port { name: name.to_owned(), value: self.b.function().value(id).name.clone(), ty }
    }

    /// Adds a stored tensor: a weight, or numbers to compute with where it is small or of integers.
    pub(super) fn stored(&mut self, name: &str, stored: Stored) {
        let is_weight = stored.dtype.is_float() && stored.dims.iter().product::<usize>() > 1;
        let meaning = match is_weight {
            true => Meaning::Stored(Rc::new(stored)),
            false => Meaning::Known(Rc::new(stored.tensor())),
        };
        self.meanings.insert(name.to_owned(), meaning);
    }

    /// Notes that a stored tensor is not supported.
    pub(super) fn refuse_tensor(&mut self, name: &str, why: String) {
        self.meanings.insert(name.to_owned(), Meaning::Refused);
        let (operator, node) = ("a stored tensor".to_owned(), name.to_owned());
        self.refused.push(Refused { operator, node, why: Some(why) });
    }

    /// Translates a node.
    ///
    /// # Errors
    /// The name of an operand that no node before it makes.
    pub(super) fn node(&mut self, node: &NodeProto) -> Result<(), String> {
        let mut operands = Vec::new();
        for name in &node.input {
            match self.meanings.get(name) {
                _ if name.is_empty() => operands.push(None),
                Some(meaning) => operands.push(Some((name, meaning.clone()))),
                None => return Err(name.clone()),
            }
        }
        let standard = node.domain.is_empty() || node.domain == "ai.onnx";
        let translate = translation(&node.op_type).filter(|_| standard);
        let is_refused = |m: &Meaning| matches!(m, Meaning::Refused);
        let made = match translate {
            None => Err(None),
            Some(_) if operands.iter().flatten().any(|(_, m)| is_refused(m)) => Ok(None),
            Some(translate) => self.translate(node, &operands, translate).map(Some).map_err(Some),
        };
        let results = match made {
            Ok(Some(results)) => results,
            Ok(None) => Vec::new(),
            Err(why) => {
                let first = node.output.first().cloned().unwrap_or_default();
                let name = if node.name.is_empty() { first } else { node.name.clone() };
                let operator = match standard {
                    true => node.op_type.clone(),
                    false => format!("{}.{}", node.domain, node.op_type),
                };
                self.refused.push(Refused { operator, node: name, why });
                Vec::new()
            }
        };
        let rest = std::iter::repeat(Meaning::Refused);
        for (name, meaning) in node.output.iter().zip(results.into_iter().chain(rest)) {
            self.meanings.insert(name.clone(), meaning);
        }
        Ok(())
    }

    fn translate(
        &mut self,
        node: &NodeProto,
        operands: &[Option<(&String, Meaning)>],
        translate: super::operators::Translate,
    ) -> Result<Vec<Meaning>, String> {
        if let Some(wrong) = wrong_attribute(node) {
            return Err(wrong);
        }
        let name = value_name(node.output.first().map_or("", String::as_str));
        let known = |m: &Meaning| match m {
            Meaning::Known(tensor) => Some(Rc::clone(tensor)),
            Meaning::Made(_) | Meaning::Stored(_) | Meaning::Refused => None,
        };
        let all: Option<Vec<Option<Rc<Tensor>>>> = operands
            .iter()
            .map(|o| match o {
                Some((_, meaning)) => known(meaning).map(Some),
                None => Some(None),
            })
            .collect();
        if let Some(known) = all {
            return computed(node, self.opset, name, &known, translate);
        }
        let mut given = Vec::new();
        for operand in operands {
            given.push(operand.as_ref().map(|(name, meaning)| self.operand(name, meaning)));
        }
        let before = self.b.function().values.len();
        let (b, opset) = (&mut self.b, self.opset);
        let mut site =
            Site { b, node, opset, operands: given, name: name.clone(), held: Vec::new() };
        let results = translate(&mut site)?;
        let held = site.held;
        if let Some(first) = results.first().filter(|first| first.index() >= before) {
            self.b.claim_name(&name, *first);
        }
        let wanted = node.output.iter().rposition(|name| !name.is_empty()).map_or(0, |at| at + 1);
        if results.len() < wanted {
            return Err(format!("output {}", results.len()));
        }
        let meaning = |id: ValueId| match held.iter().find(|(held, _)| *held == id) {
            Some((_, tensor)) => Meaning::Known(Rc::clone(tensor)),
            None => Meaning::Made(id),
        };
        Ok(results.into_iter().map(meaning).collect())
    }

    fn operand(&mut self, name: &str, meaning: &Meaning) -> Operand {
        let id = self.value(name, meaning);
        let known = match meaning {
            Meaning::Known(tensor) => Some(Rc::clone(tensor)),
            Meaning::Stored(stored) if stored.dims.iter().product::<usize>() <= READ_MAX => {
                Some(Rc::new(stored.tensor()))
            }
            Meaning::Made(_) => self.given.get(name).map(Rc::clone),
            Meaning::Stored(_) | Meaning::Refused => None,
        };
        Operand { id, known }
    }

    /// The value of a name; what is no value yet becomes one, a parameter where it is no formula.
    fn value(&mut self, name: &str, meaning: &Meaning) -> ValueId {
        let id = match meaning {
            Meaning::Made(id) => return *id,
            Meaning::Refused => panic!("nodes that read a refused value are not translated"),
            Meaning::Known(tensor) => match formula(tensor) {
                Some(op) => return self.b.push(&value_name(name), op, &[]),
                None => self.held(name, tensor.ty(), Held::Tensor(Rc::clone(tensor))),
            },
            Meaning::Stored(stored) => {
                let ty = TensorType::of(stored.dtype, &stored.dims);
                self.held(name, ty, Held::Stored(Rc::clone(stored)))
            }
        };
        // Only the value is kept: numbers that shapes need are known by the meaning.
        if let Meaning::Stored(_) = meaning {
            self.meanings.insert(name.to_owned(), Meaning::Made(id));
        }
        id
    }

    /// A value that becomes a parameter when the walk ends.
    fn held(&mut self, name: &str, ty: TensorType, held: Held) -> ValueId {
        let id = self.b.constant(&value_name(name), 0.0, ty);
        let name = self.b.function().value(id).name.clone();
        self.held.insert(name, held);
        id
    }

    /// Ends the function: weights first, then the inputs.
    ///
    /// # Errors
    /// The name of an output that no node makes.
    pub(super) fn finish(mut self, outputs: &[String]) -> Result<Finished, String> {
        let mut results = Vec::new();
        for name in outputs {
            let meaning = self.meanings.get(name).cloned().ok_or_else(|| name.clone())?;
            results.push(self.value(name, &meaning));
        }
        let mut function = self.b.into_function(&results);
        remove_dead_nodes(&mut function);
        let weights = constants_to_params(&mut function, self.held);
        remove_common_nodes(&mut function);
        Ok(Finished { function, weights })
    }
}

/// What is computed when the model is read.
fn computed(
    node: &NodeProto,
    opset: i64,
    name: String,
    operands: &[Option<Rc<Tensor>>],
    translate: super::operators::Translate,
) -> Result<Vec<Meaning>, String> {
    let mut module = Module::new("known");
    let mut b = Builder::new(&mut module, ENTRY, Kind::Layer);
    let mut given = Vec::new();
    for (at, tensor) in operands.iter().enumerate() {
        let operand = tensor.as_ref().map(|tensor| Operand {
            id: b.param(&format!("operand{at}"), tensor.ty()),
            known: Some(Rc::clone(tensor)),
        });
        given.push(operand);
    }
    let mut site = Site { b: &mut b, node, opset, operands: given, name, held: Vec::new() };
    let results = translate(&mut site)?;
    let held = site.held;
    let function = b.into_function(&results);
    let large =
        |value: &Value| value.ty.elements().as_constant().is_none_or(|count| count > KNOWN_MAX);
    if function.values.iter().any(large) {
        return Err(format!("more than {KNOWN_MAX} elements that no input changes"));
    }
    module.add(function);
    let args: Vec<Tensor> = operands.iter().flatten().map(|t| t.as_ref().clone()).collect();
    let computed = eval(&module, ENTRY, &args).map_err(|diagnostic| diagnostic.headline)?;
    let meaning = |(id, tensor): (&ValueId, Tensor)| {
        let held = held.iter().find(|(held, _)| held == id);
        Meaning::Known(held.map_or_else(|| Rc::new(tensor), |(_, tensor)| Rc::clone(tensor)))
    };
    Ok(results.iter().zip(computed).map(meaning).collect())
}

/// One op that yields a tensor: all elements equal, or counting up along one dim.
fn formula(tensor: &Tensor) -> Option<Op> {
    let (numbers, dtype, dims) = (tensor.to_f64(), tensor.dtype, sizes(&tensor.dims));
    let first = *numbers.first().unwrap_or(&0.0);
    if numbers.iter().all(|n| n.to_bits() == first.to_bits()) {
        return Some(Op::Constant { value: first, dtype, dims });
    }
    let counts = numbers.iter().enumerate().all(|(at, n)| *n == first + at as f64);
    let is_count = tensor.dims.len() == 1 && counts && matches!(dtype, DType::I32 | DType::I64);
    is_count.then_some(Op::Iota { dim: 0, start: first as i64, dtype, dims })
}

/// Makes the named values, which nodes without operands define, the first parameters.
fn constants_to_params(
    function: &mut Function,
    mut held: BTreeMap<String, Held>,
) -> Vec<(String, Held)> {
    let names: Vec<String> = function.values.iter().map(|v| v.name.clone()).collect();
    let is_held = |id: &ValueId| held.contains_key(&names[id.index()]);
    let ids = || (0..names.len()).map(|at| ValueId(at as u32));
    let order: Vec<ValueId> =
        ids().filter(|id| is_held(id)).chain(ids().filter(|id| !is_held(id))).collect();
    let count = ids().filter(is_held).count();
    let mut place = vec![ValueId(0); order.len()];
    for (at, id) in order.iter().enumerate() {
        place[id.index()] = ValueId(at as u32);
    }
    function.nodes.retain(|node| !node.results.iter().any(is_held));
    function.values = order.iter().map(|id| function.values[id.index()].clone()).collect();
    function.param_count += count;
    for node in &mut function.nodes {
        let ids = node.operands.iter_mut().chain(&mut node.results);
        ids.for_each(|id| *id = place[id.index()]);
    }
    function.results.iter_mut().for_each(|id| *id = place[id.index()]);
    let weights = function.values[..count].iter();
    weights.filter_map(|value| held.remove_entry(&value.name)).collect()
}

/// A name with everything replaced that a value's name cannot have.
fn value_name(name: &str) -> String {
    let letter = |c: char| if c.is_ascii_alphanumeric() || c == '.' { c } else { '_' };
    let name: String = name.chars().map(letter).collect();
    let name = name.trim_matches('_');
    if name.is_empty() { "v".to_owned() } else { name.to_owned() }
}
