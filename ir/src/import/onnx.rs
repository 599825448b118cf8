//! ONNX files: flat graphs of primitive operators, of any exporter.
//!
//! **In:** the bytes of a file, of opset 7 to 28, and sizes for the dims that it leaves open.
//! **Out:** a module with one entry `main` of the weights, then the inputs; and the weights, which
//! stay in the memory of the file.
//!
//! All sizes are bound when a model is read, so what only depends on sizes is computed then; what
//! depends on the numbers of inputs, such as how many of them are not zero, where the inputs are
//! given. Control flow is laid out, sequences and functions of the model are. Types that the module
//! does not compute in are held in wider ones, and rounded or wrapped by each operator (see
//! [`Element`]). There are no strings, random numbers or decision trees.
//!
//! | code | what is wrong | exit code |
//! |---|---|--:|
//! | `E1110` | an ONNX file that is damaged, or one beside it that is missing | 6 |
//! | `E1111` | operators, or uses of them, that are not supported | 4 |
//! | `E1112` | a dim of an input whose size is not given, or their number | 2 |
//! | `E1113` | a size that is given for a dim that no input has | 2 |

mod attention;
mod attributes;
mod bits;
mod casts;
mod checks;
mod einsum;
mod element;
mod elementwise;
mod given;
mod graph;
mod indexing;
mod inverse;
mod losses;
mod moving;
mod operators;
mod pools;
mod proto;
mod quantise;
mod recurrent;
mod resize;
mod sampling;
mod scatters;
mod selected;
mod shapes;
mod signal;
mod site;
mod narrowing;
mod stored;
mod sums;
mod training;
mod unsigned;

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use bytes::Bytes;
use prost::Message;

use crate::recognise::{Found, recognise};
use crate::types::TensorType;
use crate::{Diagnostic, Dim, Module, Span, Tensor};

pub use checks::{Check, Limit};
pub use element::Element;
pub use given::{Array, Numbers};
use graph::{Finished, Refused, Walk};
use proto::{GraphProto, ModelProto, NodeProto, ValueInfoProto};
use site::check_size;
use stored::Wrong;
pub use stored::{OpenBeside, Stored};

/// The name of the entry.
pub const ENTRY: &str = "main";

/// The oldest set of operators that is read: since then operands repeat as numpy's do.
const OPSET_MIN: i64 = 7;

/// The newest one: what later ones change is not known here.
const OPSET_MAX: i64 = 28;

/// Nodes that a diagnostic names for one operator.
const NAMED_MAX: usize = 3;

/// A model that was an ONNX file.
#[derive(Clone, Debug)]
pub struct Onnx {
    /// The name, as the user knows it.
    pub name: String,
    /// The version of the standard set of operators.
    pub opset: i64,
    /// What exported it.
    pub producer: String,
    /// The module, with the entry [`ENTRY`].
    pub module: Module,
    /// The first parameters of the entry, by the names of their values, in order.
    pub weights: Vec<(String, Held)>,
    /// The further parameters.
    pub inputs: Vec<Port>,
    /// The first results.
    pub outputs: Vec<Port>,
    /// What the further results have to be below, each a number: else the inputs are wrong.
    pub checks: Vec<Check>,
    /// How often each operator occurs in the file.
    pub operators: BTreeMap<String, usize>,
    /// Types of elements that are computed in wider ones.
    pub carried: BTreeSet<Element>,
    /// Operators whose results were computed for the inputs that were given.
    pub forced: BTreeSet<String>,
}

impl Onnx {
    /// Recognises composites in the entry, the elements of weights among what is known of it.
    pub fn recognise(&mut self) -> Vec<Found> {
        let weights = &self.weights;
        let known = |at: usize| weights.get(at).map(|(_, held)| held.tensor());
        recognise(&mut self.module, ENTRY, &|_| true, &known)
    }
}

/// Where the elements of a parameter are.
#[derive(Clone, Debug)]
pub enum Held {
    /// In the file, or beside it.
    Stored(Rc<Stored>),
    /// They were computed when the model was read.
    Tensor(Rc<Tensor>),
}

impl Held {
    /// The elements.
    pub fn tensor(&self) -> Tensor {
        match self {
            Held::Stored(stored) => stored.tensor(),
            Held::Tensor(tensor) => tensor.as_ref().clone(),
        }
    }
}

/// An input or output.
#[derive(Clone, Debug, PartialEq)]
pub struct Port {
    /// Its name in the file.
    pub name: String,
    /// The name of the value.
    pub value: String,
    /// The type of its elements in the file.
    pub element: Element,
    /// The type in the module.
    pub ty: TensorType,
}

impl Port {
    /// The type in the file, such as `f16[2, 3]`.
    pub fn type_text(&self) -> String {
        self.ty.to_string().replacen(self.ty.dtype.name(), self.element.name(), 1)
    }
}

/// What is known of a model's inputs before it is read.
#[derive(Clone, Debug, Default)]
pub struct Given {
    /// Sizes of open dims, by their name or as `INPUT.INDEX`.
    pub dims: BTreeMap<String, usize>,
    /// Elements of inputs. Where an operator has to know an operand when the model is read, such
    /// as the dims of a sum, it is computed from these, and the module computes for them only.
    pub inputs: BTreeMap<String, Array>,
}

/// Reads a model. `open` opens a file beside this one.
///
/// # Errors
/// Those of the table above: of operators that are not supported all at once.
pub fn read_onnx(
    source: &str,
    name: &str,
    bytes: Bytes,
    given: &Given,
    open: OpenBeside,
) -> Result<Onnx, Vec<Diagnostic>> {
    let damaged = |found: String| {
        vec![Diagnostic::error("E1110", Span::of(source), format!("damaged ONNX file: {found}"))]
    };
    let model = ModelProto::decode(bytes).map_err(|error| damaged(error.to_string()))?;
    let sets = model.opset_import.iter().filter(|set| proto::is_standard(&set.domain));
    let stated = sets.map(|set| set.version).max();
    let graph = model.graph.ok_or_else(|| damaged("no graph".to_owned()))?;
    let opset = opset(stated, &graph);
    let opset = opset.ok_or_else(|| damaged("no version of the operators".to_owned()))?;
    if !(OPSET_MIN..=OPSET_MAX).contains(&opset) {
        return Err(vec![unknown_opset(source, &graph, opset)]);
    }
    let types = input_types(source, &graph, given)?;
    let mut module = Module::new(super::module_name(name));
    let functions = model.functions.into_iter().map(|function| {
        let domain = if function.domain == "ai.onnx" { "" } else { &function.domain };
        ((domain.to_owned(), function.name.clone()), Rc::new(function))
    });
    let mut walk = Walk::new(&mut module, opset, functions.collect());
    let inputs = types
        .into_iter()
        .map(|(name, ty, element)| walk.input(&name, ty, element, given.inputs.get(&name)));
    let inputs = inputs.collect();
    let mut operators = BTreeMap::new();
    read_stored(&mut walk, &graph, open).map_err(damaged)?;
    for node in &graph.node {
        *operators.entry(node.op_type.clone()).or_insert(0) += 1;
        walk.node(node).map_err(|missing| {
            damaged(format!("{} reads `{missing}`, which nothing before it makes", called(node)))
        })?;
    }
    let names: Vec<String> = graph.output.iter().map(|output| output.name.clone()).collect();
    walk.check_outputs(&names);
    if !walk.refused.is_empty() {
        return Err(unsupported(source, &walk.refused));
    }
    let (carried, forced) = (walk.carried.clone(), walk.forced.clone());
    let finished = walk.finish(&names).map_err(damaged)?;
    let results = names.into_iter().zip(&finished.function.results).zip(&finished.elements);
    let outputs = results.map(|((name, id), element)| {
        let value = finished.function.value(*id);
        Port { name, value: value.name.clone(), element: *element, ty: value.ty.clone() }
    });
    let outputs = outputs.collect();
    let Finished { function, weights, checks, .. } = finished;
    let producer = model.producer_name;
    module.add(function);
    let name = name.to_owned();
    let onnx = Onnx {
        name,
        opset,
        producer,
        module,
        weights,
        inputs,
        outputs,
        checks,
        operators,
        carried,
        forced,
    };
    Ok(onnx)
}

/// The version of the operators of a graph. Without standard ones, all that there are are refused.
fn opset(stated: Option<i64>, graph: &GraphProto) -> Option<i64> {
    let has_standard = graph.node.iter().any(|node| proto::is_standard(&node.domain));
    stated.or((!has_standard).then_some(OPSET_MIN))
}

/// Reads the stored tensors of a graph.
///
/// # Errors
/// What is damaged.
fn read_stored(walk: &mut Walk, graph: &GraphProto, open: OpenBeside) -> Result<(), String> {
    for tensor in &graph.initializer {
        match stored::stored(tensor, open) {
            Ok(stored) => walk.stored(&tensor.name, stored),
            Err(Wrong::Damaged(found)) => return Err(format!("tensor `{}`: {found}", tensor.name)),
            Err(Wrong::Unsupported(found)) => walk.refuse_tensor(&tensor.name, found),
        }
    }
    Ok(())
}

fn unknown_opset(source: &str, graph: &GraphProto, opset: i64) -> Diagnostic {
    let names: BTreeSet<&str> = graph.node.iter().map(|n| n.op_type.as_str()).collect();
    let names = names.into_iter().collect::<Vec<_>>().join(", ");
    let headline = format!("opset {opset} is not supported");
    let wrong = Diagnostic::error("E1111", Span::of(source), headline);
    let wrong = wrong.note(format!("its operators may mean something else there: {names}"));
    wrong.help(format!("export it with opset {OPSET_MIN} to {OPSET_MAX}"))
}

/// How a node is named to people: many exporters leave the name out.
fn called(node: &NodeProto) -> String {
    match (node.name.as_str(), node.output.first()) {
        ("", Some(output)) => format!("the `{}` that makes `{output}`", node.op_type),
        ("", None) => format!("a `{}`", node.op_type),
        (name, _) => format!("`{name}`"),
    }
}

/// The types of the inputs that are no weights; everything that is open is reported at once.
fn input_types(
    source: &str,
    graph: &GraphProto,
    given: &Given,
) -> Result<Vec<(String, TensorType, Element)>, Vec<Diagnostic>> {
    let sizes = &given.dims;
    let stored: BTreeSet<&str> = graph.initializer.iter().map(|t| t.name.as_str()).collect();
    let inputs = graph.input.iter().filter(|input| !stored.contains(input.name.as_str()));
    let (mut types, mut open, mut named, mut wrong) = (vec![], vec![], BTreeSet::new(), vec![]);
    let mut unranked = Vec::new();
    for input in inputs {
        if let Some((at, size)) = negative_dim(input) {
            let headline =
                format!("damaged ONNX file: dim {at} of the input `{}` is {size}", input.name);
            wrong.push(Diagnostic::error("E1110", Span::of(source), headline));
            continue;
        }
        let array = given.inputs.get(&input.name);
        if is_unranked(input) && array.is_none() {
            unranked.push(format!("`{}`", input.name));
            continue;
        }
        match input_type(input, array, sizes, &mut open, &mut named) {
            Ok((ty, element)) => types.push((input.name.clone(), ty, element)),
            Err(found) => {
                let headline = format!("input `{}`: {found} are not supported", input.name);
                wrong.push(Diagnostic::error("E1111", Span::of(source), headline));
            }
        }
    }
    if !open.is_empty() {
        let help = open.iter().map(|name| format!("--dim {name}=N")).collect::<Vec<_>>().join(" ");
        let headline = format!("the size of {} is not given", open.join(", "));
        wrong.push(Diagnostic::error("E1112", Span::of(source), headline).help(help));
    }
    if !unranked.is_empty() {
        let names = unranked.join(", ");
        let headline = format!("the number of dims of {names} is not given");
        let note = "the file says nothing of them, and an array that is run has them";
        let help = "export the model with the dims of its inputs";
        wrong.push(Diagnostic::error("E1112", Span::of(source), headline).note(note).help(help));
    }
    for name in sizes.keys().filter(|name| !named.contains(*name)) {
        let headline = format!("no input has a dim `{name}`");
        let known = named.iter().cloned().collect::<Vec<_>>().join(", ");
        let diagnostic = Diagnostic::error("E1113", Span::of("--dim"), headline);
        wrong.push(match named.is_empty() {
            true => diagnostic.note("every dim of the inputs is fixed"),
            false => diagnostic.note(format!("open dims are {known}")),
        });
    }
    if wrong.is_empty() { Ok(types) } else { Err(wrong) }
}

/// A dim with a size that no tensor has; some exporters write -1 for an open one.
fn negative_dim(input: &ValueInfoProto) -> Option<(usize, i64)> {
    let tensor = input.r#type.as_ref()?.tensor_type.as_ref()?;
    let sizes = tensor.shape.as_ref()?.dim.iter().map(|dim| dim.dim_value.unwrap_or(0));
    sizes.enumerate().find(|(_, size)| *size < -1)
}

/// Whether a file does not say how many dims an input has.
fn is_unranked(input: &ValueInfoProto) -> bool {
    let tensor = input.r#type.as_ref().and_then(|ty| ty.tensor_type.as_ref());
    tensor.is_some_and(|tensor| tensor.shape.is_none())
}

fn input_type(
    input: &ValueInfoProto,
    array: Option<&Array>,
    sizes: &BTreeMap<String, usize>,
    open: &mut Vec<String>,
    named: &mut BTreeSet<String>,
) -> Result<(TensorType, Element), String> {
    let tensor = input.r#type.as_ref().and_then(|ty| ty.tensor_type.as_ref());
    let tensor = tensor.ok_or("values that are no tensors")?;
    let element = Element::of(tensor.elem_type)?;
    let mut dims = Vec::new();
    if let Some(array) = array.filter(|_| tensor.shape.is_none()) {
        dims.extend(array.dims.iter().map(|size| Dim::from(*size)));
    }
    for (at, dim) in tensor.shape.iter().flat_map(|shape| &shape.dim).enumerate() {
        if let Some(size) = dim.dim_value.and_then(|size| usize::try_from(size).ok()) {
            dims.push(Dim::from(size));
            continue;
        }
        let given = dim.dim_param.clone().filter(|name| !name.is_empty());
        let name = given.unwrap_or_else(|| format!("{}.{at}", input.name));
        named.insert(name.clone());
        match sizes.get(&name) {
            Some(size) => dims.push(Dim::from(*size)),
            None if open.contains(&name) => {}
            None => open.push(name),
        }
    }
    let ty = TensorType { dtype: element.carrier(), dims };
    let sizes = ty.sizes().unwrap_or_default();
    check_size(&sizes).map_err(|_| format!("{ty} and other values of more than 2^33 elements"))?;
    Ok((ty, element))
}

/// One diagnostic for each operator, with the nodes that use it.
fn unsupported(source: &str, refused: &[Refused]) -> Vec<Diagnostic> {
    let mut operators: BTreeMap<(&str, Option<&str>), Vec<&str>> = BTreeMap::new();
    for one in refused {
        let key = (one.operator.as_str(), one.why.as_deref());
        operators.entry(key).or_default().push(&one.node);
    }
    let diagnostic = |((operator, why), nodes): ((&str, Option<&str>), Vec<&str>)| {
        let headline = match why {
            Some(why) => format!("this use of `{operator}` is not supported: {why}"),
            None => format!("the operator `{operator}` is not supported"),
        };
        let named: Vec<String> =
            nodes.iter().take(NAMED_MAX).map(|node| format!("`{node}`")).collect();
        let more = nodes.len() - named.len();
        let more = if more == 0 { String::new() } else { format!(" and {more} more") };
        let note = format!("of nodes {}{more}", named.join(", "));
        Diagnostic::error("E1111", Span::of(source), headline).note(note)
    };
    operators.into_iter().map(diagnostic).collect()
}
