//! Models written as `.graph` texts.
//!
//! An entry is a function that no other calls. The weights are those parameters of `loss`, or else
//! of the first entry, that come before `tokens`; without `tokens`, the leading ones that are
//! floating-point and do not depend on the batch. The symbol `S` is bound to the sequence length.

use super::family::DOCUMENTS;
use super::{Architecture, Description, Init, Model, Options, Source, Weight};
use crate::autodiff::{GRAD, STEP_PART};
use crate::call_graph::CallGraph;
use crate::dim::{Bindings, Dim};
use crate::library::check::settle;
use crate::module::{Function, Kind, Module, Node};
use crate::text::lex::{Lexeme, Token, lex};
use crate::types::TensorType;
use crate::verify::verify;
use crate::{DType, Diagnostic, Span, text};

/// The standard deviation with which weights of a graph start: that of GPT-2.
const INIT_STD: f64 = 0.02;

/// Reads the text of a module as a model.
///
/// A composite that names one of the library and has another body is compiled as its body says,
/// and a warning `W1017` of the description says so.
///
/// # Errors
/// Those of [`text::parse_module`] and [`verify`]; `E1002` for a name that training gives to
/// another function.
pub fn read_graph(source: &str, text: &str, name: &str) -> Result<Description, Vec<Diagnostic>> {
    let mut module = text::parse_module(source, text)?;
    let warnings = settle(&mut module, |function| place(source, text, function));
    let mut wrong = verify(&module);
    wrong.extend(taken_names(&module, |function| place(source, text, function)));
    if !wrong.is_empty() {
        return Err(wrong);
    }
    let architecture = Architecture::Graph(Box::new(module));
    Ok(Description { name: name.to_owned(), architecture, stored: None, scaled: None, warnings })
}

/// Functions under names that training gives to others, which would be taken for those.
fn taken_names(module: &Module, place: impl Fn(&str) -> Span) -> Vec<Diagnostic> {
    let taken = |function: &Function| {
        let name = &function.name;
        let of = name.strip_suffix(GRAD).and_then(|of| module.function(of));
        let what = match of {
            Some(of) => format!("the gradient of `@{}`", of.name),
            None if name == STEP_PART => "a step of training".to_owned(),
            None => return None,
        };
        let headline = format!("`@{name}` is the name of {what}");
        let wrong = Diagnostic::error("E1002", place(name), headline);
        Some(wrong.help("give the function another name"))
    };
    module.functions.iter().filter_map(taken).collect()
}

/// Where a function's name stands in a text.
fn place(source: &str, text: &str, function: &str) -> Span {
    let lexemes = lex(text);
    let is_here = |pair: &&[Lexeme<'_>]| {
        matches!(pair[0].token, Token::Word("composite" | "func"))
            && pair[1].token == Token::Function(function)
    };
    let found = lexemes.windows(2).find(is_here);
    let bytes = found.map_or(0..0, |pair| pair[0].span.start..pair[1].span.end);
    Span { source: source.to_owned(), bytes }
}

/// The model of a module, for sequences of the given length.
///
/// # Errors
/// Those of [`verify`] that depend on the length.
pub(super) fn import_graph(
    description: &Description,
    module: &Module,
    options: &Options,
) -> Result<Model, Vec<Diagnostic>> {
    let mut module = module.clone();
    module.bind(&Bindings::from([("S".to_owned(), options.seq as i64)]));
    let wrong = verify(&module);
    if !wrong.is_empty() {
        return Err(wrong);
    }
    let entries = entries(&module);
    let loss = entries.iter().find(|entry| *entry == "loss").or(entries.first());
    let main = loss.and_then(|entry| module.function(entry));
    if options.documents {
        check_documents(description, main)?;
    }
    let logits = module.function("logits").and_then(|f| f.result_types().first().cloned());
    Ok(Model {
        name: description.name.clone(),
        weights: main.map(weights).unwrap_or_default(),
        config: description.architecture.clone(),
        vocab: logits.and_then(|ty| size(ty.dims.last()?)).unwrap_or(0),
        positions_max: options.seq,
        layer_count: main.map_or(0, |main| layer_count(&module, main)),
        entries,
        module,
    })
}

/// Refuses a graph that does not keep packed documents apart.
fn check_documents(
    description: &Description,
    main: Option<&Function>,
) -> Result<(), Vec<Diagnostic>> {
    let params = main.into_iter().flat_map(|main| main.params().map(|param| main.value(param)));
    let fits = |ty: &TensorType| ty.dtype == DType::I32 && ty.ndim() == 2;
    if params.into_iter().any(|value| value.name == DOCUMENTS && fits(&value.ty)) {
        return Ok(());
    }
    let name = &description.name;
    let headline = format!("`{name}` does not take `%{DOCUMENTS}: i32[B, S]`");
    let wrong = Diagnostic::error("E1107", Span::of(name), headline)
        .note("the attention of a graph is masked by the graph itself")
        .help("pass `%documents` to each `attention` of its text, or train without the mask");
    Err(vec![wrong])
}

fn size(dim: &Dim) -> Option<usize> {
    usize::try_from(dim.as_constant()?).ok()
}

/// The functions that no other calls.
fn entries(module: &Module) -> Vec<String> {
    let calls = CallGraph::of(module);
    let entry = |f: &&Function| f.kind == Kind::Layer && !calls.is_called(&f.name);
    module.functions.iter().filter(entry).map(|f| f.name.clone()).collect()
}

/// How often the layer is called that is called most.
fn layer_count(module: &Module, main: &Function) -> usize {
    let layers = module.functions.iter().filter(|f| f.kind == Kind::Layer);
    let callees = || main.nodes.iter().filter_map(Node::callee);
    layers.map(|layer| callees().filter(|c| *c == layer.name).count()).max().unwrap_or(0)
}

fn weights(main: &Function) -> Vec<Weight> {
    let tokens = main.params().position(|p| main.value(p).name == "tokens");
    let mut weights = Vec::new();
    for param in main.params().take(tokens.unwrap_or(usize::MAX)) {
        let value = main.value(param);
        let (Some(dims), true) = (value.ty.sizes(), value.ty.dtype.is_float()) else { break };
        let init = match dims.len() {
            0 | 1 => Init::Zeros,
            _ => Init::Normal { std: INIT_STD, zero_row: None },
        };
        let names = vec![value.name.clone()];
        let source = Source::whole(names, dims.clone());
        weights.push(Weight {
            name: value.name.clone(),
            dims,
            init,
            source,
            layer: None,
            frozen: value.frozen,
        });
    }
    weights
}
