//! The walk over the nodes of a graph.
//!
//! What does not depend on an input is computed by the interpreter when the model is read, by the
//! same translation: so shapes are numbers where an operator needs them.

mod control;
mod sequence;

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use super::attributes::wrong_attribute;
use super::checks::{Check, Limit};
use super::element::Element;
use super::narrowing::concluded;
use super::operators::{Translate, takes_integers, translation};
use super::proto::{NodeProto, is_standard};
use super::site::{Forcing, Operand, Site, sizes};
use super::stored::Stored;
use super::unsigned::takes_u64;
use super::{Array, ENTRY, Held, Port, called};
use crate::build::Builder;
use crate::eval::eval;
use crate::module::{Function, Kind, Module, Value, ValueId};
use crate::op::Op;
use crate::pass::{remove_common_nodes, remove_dead_nodes};
use crate::tensor::Data;
use crate::types::TensorType;
use crate::{DType, Tensor};
use control::{Functions, is_control};
use sequence::is_of_sequences;

/// Elements that a value computed when a model is read has at most. Chosen: half a GiB of `f64`.
const KNOWN_MAX: i64 = 1 << 26;

/// Elements of a weight that is read with the model at most. Chosen: more than any list of sizes or
/// scales has, less than a weight that should stay in its file.
const READ_MAX: usize = 4096;

/// What a name of the graph stands for.
#[derive(Clone)]
pub(super) enum Meaning {
    /// A value of the function.
    Made(ValueId),
    /// Numbers that do not depend on an input.
    Known(Rc<Tensor>),
    /// A weight.
    Stored(Rc<Stored>),
    /// A sequence of as many values as are known when the model is read.
    Sequence(Rc<Vec<Read>>),
    /// An optional value that is not there.
    Nothing,
    /// The result of a node that is not supported.
    Refused,
}

/// What a node reads or makes.
#[derive(Clone)]
pub(super) struct Read {
    pub(super) name: String,
    pub(super) meaning: Meaning,
    /// The type of its elements, where they are computed in a wider one.
    pub(super) element: Option<Element>,
}

/// Why a node makes nothing.
pub(super) enum Wrong {
    /// A name that nothing before it makes, or another damage.
    Damaged(String),
    /// The operator is not supported.
    Unknown,
    /// This use of it is not supported.
    Use(String),
    /// Something that it reads or holds is refused already.
    Passed,
}

impl From<String> for Wrong {
    fn from(why: String) -> Wrong {
        Wrong::Use(why)
    }
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
    /// The types of the results.
    pub(super) elements: Vec<Element>,
    /// What the numbers after the results have to be below.
    pub(super) checks: Vec<Check>,
}

/// A graph in the middle of its translation.
pub(super) struct Walk<'m> {
    pub(super) b: Builder<'m>,
    pub(super) opset: i64,
    pub(super) meanings: BTreeMap<String, Meaning>,
    /// The types of what is computed in a wider one, by the names in the graph.
    pub(super) elements: BTreeMap<String, Element>,
    /// Functions of the model.
    pub(super) functions: Functions,
    /// Types that are computed in wider ones.
    pub(super) carried: BTreeSet<Element>,
    /// Operators that read elements that depend on inputs, which were computed for them.
    pub(super) forced: BTreeSet<String>,
    /// Weights and constants that become parameters.
    held: BTreeMap<ValueId, Held>,
    /// Elements of inputs that are lists. By their values: a body or a function may have another
    /// value of an input's name.
    given: BTreeMap<ValueId, Rc<Tensor>>,
    /// Elements of all inputs, where they are there.
    inputs: Vec<Option<Rc<Tensor>>>,
    /// The parameters of stored tensors, by where these are: one for each, in whichever graph it is
    /// read.
    placed: BTreeMap<usize, ValueId>,
    pub(super) refused: Vec<Refused>,
    /// Numbers that have to be below limits when the model runs.
    pub(super) checks: Vec<(ValueId, Check)>,
    /// Functions of the model that are being laid out.
    pub(super) depth: usize,
}

impl<'m> Walk<'m> {
    pub(super) fn new(module: &'m mut Module, opset: i64, functions: Functions) -> Walk<'m> {
        Walk {
            b: Builder::new(module, ENTRY, Kind::Layer),
            opset,
            meanings: BTreeMap::new(),
            elements: BTreeMap::new(),
            functions,
            carried: BTreeSet::new(),
            forced: BTreeSet::new(),
            held: BTreeMap::new(),
            given: BTreeMap::new(),
            inputs: Vec::new(),
            placed: BTreeMap::new(),
            refused: Vec::new(),
            checks: Vec::new(),
            depth: 0,
        }
    }

    /// Adds an input. All come before the first node. Its elements are noted where they are given
    /// and of its dims.
    pub(super) fn input(
        &mut self,
        name: &str,
        ty: TensorType,
        element: Element,
        given: Option<&Array>,
    ) -> Port {
        let id = self.b.param(&value_name(name), ty.clone());
        self.meanings.insert(name.to_owned(), Meaning::Made(id));
        self.note(name, Some(element).filter(|element| element.is_carried()));
        let given = given.filter(|array| ty.sizes().as_deref() == Some(&array.dims));
        let given = given.and_then(|array| element.tensor_of(array).ok()).map(Rc::new);
        if let Some(list) = given.as_ref().filter(|t| t.dims.len() < 2 && t.count() <= READ_MAX) {
            self.given.insert(id, Rc::clone(list));
        }
        self.inputs.push(given);
        Port { name: name.to_owned(), value: self.b.function().value(id).name.clone(), element, ty }
    }

    /// Notes the type of what a name stands for.
    pub(super) fn note(&mut self, name: &str, element: Option<Element>) {
        match element {
            Some(element) => {
                self.carried.insert(element);
                self.elements.insert(name.to_owned(), element)
            }
            None => self.elements.remove(name),
        };
    }

    /// The type of what a name stands for.
    pub(super) fn element_of(&self, name: &str, dtype: DType) -> Element {
        self.elements.get(name).copied().unwrap_or(Element::natural(dtype))
    }

    /// Adds a stored tensor: a weight, or numbers to compute with where it is small or of integers.
    pub(super) fn stored(&mut self, name: &str, stored: Stored) {
        self.note(name, Some(stored.element).filter(|element| element.is_carried()));
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
        let mut reads = Vec::new();
        for name in &node.input {
            let element = self.elements.get(name).copied();
            match self.meanings.get(name).cloned() {
                _ if name.is_empty() => reads.push(None),
                Some(meaning) => reads.push(Some(Read { name: name.clone(), meaning, element })),
                None => return Err(name.clone()),
            }
        }
        let made = match self.made(node, &reads) {
            Ok(made) => made,
            Err(Wrong::Damaged(found)) => return Err(found),
            Err(Wrong::Passed) => Vec::new(),
            Err(wrong) => {
                let first = node.output.first().cloned().unwrap_or_default();
                let name = if node.name.is_empty() { first } else { node.name.clone() };
                let operator = match is_standard(&node.domain) {
                    true => node.op_type.clone(),
                    false => format!("{}.{}", node.domain, node.op_type),
                };
                let why = if let Wrong::Use(why) = wrong { Some(why) } else { None };
                self.refused.push(Refused { operator, node: name, why });
                Vec::new()
            }
        };
        let rest = std::iter::repeat((Meaning::Refused, None));
        let made = made.into_iter().map(|read| (read.meaning, read.element)).chain(rest);
        for (name, (meaning, element)) in node.output.iter().zip(made) {
            self.meanings.insert(name.clone(), meaning);
            self.note(name, element);
        }
        Ok(())
    }

    /// What a node makes.
    fn made(&mut self, node: &NodeProto, reads: &[Option<Read>]) -> Result<Vec<Read>, Wrong> {
        let own = self.functions.get(&(node.domain.clone(), node.op_type.clone())).cloned();
        if let Some(function) = own {
            return self.inlined(node, &function, reads);
        }
        let standard = is_standard(&node.domain);
        if standard && is_control(&node.op_type) {
            return self.controlled(node, reads);
        }
        let is_refused = |read: &Read| matches!(read.meaning, Meaning::Refused);
        let any_refused = reads.iter().flatten().any(is_refused);
        let is_sequence = |read: &Read| matches!(read.meaning, Meaning::Sequence(_));
        let of_sequences = is_of_sequences(&node.op_type)
            || (node.op_type == "Identity" && reads.iter().flatten().any(is_sequence));
        if standard && of_sequences {
            return if any_refused { Err(Wrong::Passed) } else { self.sequenced(node, reads) };
        }
        let translate = translation(&node.domain, &node.op_type).ok_or(Wrong::Unknown)?;
        if any_refused {
            return Err(Wrong::Passed);
        }
        Ok(self.translate(node, reads, translate)?)
    }

    pub(super) fn translate(
        &mut self,
        node: &NodeProto,
        reads: &[Option<Read>],
        translate: Translate,
    ) -> Result<Vec<Read>, String> {
        if let Some(wrong) = wrong_attribute(node) {
            return Err(wrong);
        }
        let name = value_name(node.output.first().map_or("", String::as_str));
        let elements: Vec<Option<Element>> =
            reads.iter().map(|read| read.as_ref().and_then(|read| read.element)).collect();
        if elements.contains(&Some(Element::U64)) && !takes_u64(&node.op_type) {
            return Err("elements of type u64".to_owned());
        }
        let all: Option<Vec<Option<Rc<Tensor>>>> = reads
            .iter()
            .map(|read| match read {
                Some(Read { meaning: Meaning::Known(tensor), .. }) => Some(Some(Rc::clone(tensor))),
                Some(_) => None,
                None => Some(None),
            })
            .collect();
        if let Some(known) = all {
            return computed(node, self.opset, name, &known, elements, translate);
        }
        let mut operands = Vec::new();
        for read in reads {
            operands.push(match read {
                Some(read) => Some(self.operand(&read.name, &read.meaning)?),
                None => None,
            });
        }
        let before = self.b.function().values.len();
        let (b, opset) = (&mut self.b, self.opset);
        let forcing = Forcing { held: &self.held, inputs: &self.inputs };
        let mut site = Site::new(b, node, opset, operands, elements, name.clone());
        takes_integers(&site)?;
        site.forcing = Some(forcing);
        let results = translate(&mut site)?;
        let first = results.first().copied();
        let results = concluded(&mut site, results)?;
        let (held, has_forced, demands) = (site.held, site.has_forced.get(), site.demands);
        let check = |of: Limit| Check { node: called(node), of };
        self.checks.extend(demands.into_iter().map(|(value, of)| (value, check(of))));
        self.held.extend(site.arrays.into_iter().map(|(id, array)| (id, Held::Tensor(array))));
        if let Some(first) = first.filter(|first| first.index() >= before) {
            let named = results.first().map_or(first, |(id, _)| *id);
            self.b.claim_name(&name, named);
        }
        if has_forced {
            self.forced.insert(node.op_type.clone());
        }
        let wanted = node.output.iter().rposition(|name| !name.is_empty()).map_or(0, |at| at + 1);
        if results.len() < wanted {
            return Err(format!("output {}", results.len()));
        }
        let read = |(id, element): (ValueId, Option<Element>)| {
            let meaning = match held.iter().find(|(held, _)| *held == id) {
                Some((_, tensor)) => Meaning::Known(Rc::clone(tensor)),
                None => Meaning::Made(id),
            };
            Read { name: name.clone(), meaning, element }
        };
        Ok(results.into_iter().map(read).collect())
    }

    /// The elements of a tensor, where they do not depend on an input, or are computed for those
    /// that are given.
    pub(super) fn known(&mut self, read: &Read) -> Option<Rc<Tensor>> {
        match &read.meaning {
            Meaning::Known(tensor) => Some(Rc::clone(tensor)),
            Meaning::Stored(stored) => Some(Rc::new(stored.tensor())),
            Meaning::Made(id) => self.given.get(id).map(Rc::clone).or_else(|| {
                let forcing = Forcing { held: &self.held, inputs: &self.inputs };
                forcing.elements(&self.b, *id)
            }),
            Meaning::Sequence(_) | Meaning::Nothing | Meaning::Refused => None,
        }
    }

    fn operand(&mut self, name: &str, meaning: &Meaning) -> Result<Operand, String> {
        let id = self.value(name, meaning)?;
        let known = match meaning {
            Meaning::Known(tensor) => Some(Rc::clone(tensor)),
            Meaning::Stored(stored) if stored.dims.iter().product::<usize>() <= READ_MAX => {
                Some(Rc::new(stored.tensor()))
            }
            Meaning::Made(id) => self.given.get(id).map(Rc::clone),
            Meaning::Stored(_) | Meaning::Sequence(_) | Meaning::Nothing | Meaning::Refused => None,
        };
        Ok(Operand { id, known })
    }

    /// The value of a name; what is no value yet becomes one, a parameter where it is no formula.
    pub(super) fn value(&mut self, name: &str, meaning: &Meaning) -> Result<ValueId, String> {
        match meaning {
            Meaning::Made(id) => Ok(*id),
            Meaning::Refused => panic!("nodes that read a refused value are not translated"),
            Meaning::Sequence(_) => Err(format!("`{name}` is a sequence")),
            Meaning::Nothing => Err(format!("`{name}` is an optional value that is not there")),
            Meaning::Known(tensor) => Ok(match formula(tensor) {
                Some(op) => self.b.push(&value_name(name), op, &[]),
                None => {
                    let place = Rc::as_ptr(tensor) as usize;
                    let held = Held::Tensor(Rc::clone(tensor));
                    self.held(name, tensor.ty(), place, held)
                }
            }),
            Meaning::Stored(stored) => {
                let ty = TensorType::of(stored.dtype, &stored.dims);
                let place = Rc::as_ptr(stored) as usize;
                Ok(self.held(name, ty, place, Held::Stored(Rc::clone(stored))))
            }
        }
    }

    /// A value that becomes a parameter when the walk ends: one for each place, which what is held
    /// keeps.
    fn held(&mut self, name: &str, ty: TensorType, place: usize, held: Held) -> ValueId {
        if let Some(id) = self.placed.get(&place) {
            return *id;
        }
        let id = self.b.constant(&value_name(name), 0.0, ty);
        self.held.insert(id, held);
        self.placed.insert(place, id);
        id
    }

    /// Refuses outputs that are no tensors.
    pub(super) fn check_outputs(&mut self, outputs: &[String]) {
        for name in outputs {
            let what = match self.meanings.get(name) {
                Some(Meaning::Sequence(_)) => "a sequence",
                Some(Meaning::Nothing) => "an optional value that is not there",
                Some(
                    Meaning::Made(_) | Meaning::Known(_) | Meaning::Stored(_) | Meaning::Refused,
                )
                | None => continue,
            };
            let (operator, why) = ("an output".to_owned(), Some(what.to_owned()));
            self.refused.push(Refused { operator, node: name.clone(), why });
        }
    }

    /// Ends the function: weights first, then the inputs.
    ///
    /// # Errors
    /// What is wrong with an output.
    pub(super) fn finish(mut self, outputs: &[String]) -> Result<Finished, String> {
        let (mut results, mut elements) = (Vec::new(), Vec::new());
        for name in outputs {
            let meaning = self.meanings.get(name).cloned();
            let meaning = meaning.ok_or_else(|| format!("nothing makes `{name}`"))?;
            let id = self.value(name, &meaning)?;
            elements.push(self.element_of(name, self.b.ty(id).dtype));
            results.push(id);
        }
        let (demanded, checks): (Vec<ValueId>, _) = self.checks.into_iter().unzip();
        results.extend(demanded);
        let mut function = self.b.into_function(&results);
        let live = live_values(&function);
        self.held.retain(|id, _| live[id.index()]);
        let weights = constants_to_params(&mut function, self.held);
        remove_dead_nodes(&mut function);
        remove_common_nodes(&mut function);
        Ok(Finished { function, weights, elements, checks })
    }
}

/// What is computed when the model is read.
fn computed(
    node: &NodeProto,
    opset: i64,
    name: String,
    operands: &[Option<Rc<Tensor>>],
    elements: Vec<Option<Element>>,
    translate: Translate,
) -> Result<Vec<Read>, String> {
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
    let mut site = Site::new(&mut b, node, opset, given, elements, name.clone());
    takes_integers(&site)?;
    let results = translate(&mut site)?;
    let results = concluded(&mut site, results)?;
    let (held, arrays, demands) = (site.held, site.arrays, site.demands);
    let ids = results.iter().map(|(id, _)| *id);
    let ids: Vec<ValueId> = ids.chain(demands.iter().map(|(id, _)| *id)).collect();
    let mut function = b.into_function(&ids);
    let arrays = arrays.into_iter().map(|(id, array)| (id, Held::Tensor(array))).collect();
    let arrays = constants_to_params(&mut function, arrays);
    let large =
        |value: &Value| value.ty.elements().as_constant().is_none_or(|count| count > KNOWN_MAX);
    if function.values.iter().any(large) {
        return Err(format!("more than {KNOWN_MAX} elements that no input changes"));
    }
    module.add(function);
    let mut args: Vec<Tensor> = arrays.iter().map(|(_, held)| held.tensor()).collect();
    args.extend(operands.iter().flatten().map(|t| t.as_ref().clone()));
    let computed = eval(&module, ENTRY, &args).map_err(|diagnostic| diagnostic.headline)?;
    for ((_, of), number) in demands.iter().zip(&computed[results.len()..]) {
        let check = Check { node: called(node), of: *of };
        check.wrong(number.scalar()).map_or(Ok(()), Err)?;
    }
    let read = |((id, element), tensor): (&(ValueId, Option<Element>), Tensor)| {
        let held = held.iter().find(|(held, _)| held == id);
        let tensor = held.map_or_else(|| Rc::new(tensor), |(_, tensor)| Rc::clone(tensor));
        Read { name: name.clone(), meaning: Meaning::Known(tensor), element: *element }
    };
    Ok(results.iter().zip(computed).map(read).collect())
}

impl Forcing<'_> {
    /// The elements of a value of a function in the middle of its making, by the interpreter; none
    /// where an input is not given.
    pub(super) fn elements(&self, b: &Builder, id: ValueId) -> Option<Rc<Tensor>> {
        let mut function = b.function().clone();
        function.results = vec![id];
        let live = live_values(&function);
        let held = self.held.iter().filter(|(id, _)| live[id.index()]);
        let held = held.map(|(id, held)| (*id, held.clone())).collect();
        let weights = constants_to_params(&mut function, held);
        remove_dead_nodes(&mut function);
        let mut args: Vec<Tensor> = weights.iter().map(|(_, held)| held.tensor()).collect();
        for input in self.inputs {
            args.push(input.as_ref()?.as_ref().clone());
        }
        let mut module = b.module().clone();
        module.add(function);
        let mut found = eval(&module, ENTRY, &args).ok()?;
        found.pop().map(Rc::new)
    }
}

/// One op that yields a tensor: all elements equal, or counting up along one dim.
fn formula(tensor: &Tensor) -> Option<Op> {
    // Ops hold numbers of binary64, which some of 64 bits are not.
    let is_exact = |x: &i64| *x != i64::MAX && (*x as f64) as i64 == *x;
    if matches!(&tensor.data, Data::Int(numbers) if !numbers.iter().all(is_exact)) {
        return None;
    }
    let (numbers, dtype, dims) = (tensor.to_f64(), tensor.dtype, sizes(&tensor.dims));
    let first = *numbers.first().unwrap_or(&0.0);
    if numbers.iter().all(|n| n.to_bits() == first.to_bits()) {
        return Some(Op::Constant { value: first, dtype, dims });
    }
    let Data::Int(numbers) = &tensor.data else { return None };
    let start = *numbers.first()?;
    let counts = numbers.iter().zip(start..).all(|(n, at)| *n == at);
    let is_count = tensor.dims.len() == 1 && counts && matches!(dtype, DType::I32 | DType::I64);
    is_count.then_some(Op::Iota { dim: 0, start, dtype, dims })
}

/// Makes the values, which nodes without operands define, the first parameters.
fn constants_to_params(
    function: &mut Function,
    held: BTreeMap<ValueId, Held>,
) -> Vec<(String, Held)> {
    let is_held = |id: &ValueId| held.contains_key(id);
    let ids = || (0..function.values.len()).map(|at| ValueId(at as u32));
    let order: Vec<ValueId> =
        ids().filter(is_held).chain(ids().filter(|id| !is_held(id))).collect();
    let mut place = vec![ValueId(0); order.len()];
    for (at, id) in order.iter().enumerate() {
        place[id.index()] = ValueId(at as u32);
    }
    function.nodes.retain(|node| !node.results.iter().any(is_held));
    function.values = order.iter().map(|id| function.values[id.index()].clone()).collect();
    function.param_count += held.len();
    for node in &mut function.nodes {
        let ids = node.operands.iter_mut().chain(&mut node.results);
        ids.for_each(|id| *id = place[id.index()]);
    }
    function.results.iter_mut().for_each(|id| *id = place[id.index()]);
    // Both are in ascending order of the ids that were.
    let names = function.values.iter().map(|value| value.name.clone());
    names.zip(held.into_values()).collect()
}

/// For each value, whether a result depends on it.
fn live_values(function: &Function) -> Vec<bool> {
    let mut live = vec![false; function.values.len()];
    function.results.iter().for_each(|id| live[id.index()] = true);
    for node in function.nodes.iter().rev() {
        if node.results.iter().any(|id| live[id.index()]) {
            node.operands.iter().for_each(|id| live[id.index()] = true);
        }
    }
    live
}

/// A name with everything replaced that a value's name cannot have.
pub(super) fn value_name(name: &str) -> String {
    let letter = |c: char| if c.is_ascii_alphanumeric() || c == '.' { c } else { '_' };
    let name: String = name.chars().map(letter).collect();
    let name = name.trim_matches('_');
    if name.is_empty() { "v".to_owned() } else { name.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers that ops cannot hold stay tensors.
    #[test]
    fn formulas_keep_integers_of_64_bits() {
        let of =
            |numbers: &[i64]| formula(&Tensor::int(DType::I64, &[numbers.len()], numbers.to_vec()));
        let power = 1 << 53;
        let steps = [2 * power, 2 * power, 2 * power, 2 * power + 4];
        for numbers in [&[power + 1, power + 1][..], &[power, power + 1], &[i64::MAX; 3], &steps] {
            assert_eq!(of(numbers), None, "{numbers:?}");
        }
        assert!(
            matches!(of(&[power; 2]), Some(Op::Constant { value, .. }) if value == power as f64)
        );
        assert!(matches!(of(&[-2, -1, 0]), Some(Op::Iota { start: -2, .. })));
    }
}
