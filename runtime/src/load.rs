//! Weights between the tensors of a checkpoint and the ranks of a session.
//!
//! A model says of each of its weights in which tensor it stands, or which view of it it is
//! ([`ir::import::Source`]). Here such tensors are checked, read block by block, and put together
//! again. A file whose tensors are not exactly those of the model is refused: what is left out or
//! left over would change what the model computes without anybody noticing.

mod scales;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;

use ir::import::{Source, Weight, is_buffer, nearest};
use ir::{DType, Diagnostic, Span};

use crate::block;
use crate::convert::{Stored, convert};
use crate::error::{Error, Failure};
use crate::execute::{Part, Session, Values};
use crate::weights::{self, NewTensor, Tensor, Weights};
use scales::{Scales, is_code};

/// The tensor of a head that some configs tie to the table of tokens.
const HEAD: &str = "lm_head.weight";

/// Diagnostics of one kind that are reported at most.
const REPORTS_MAX: usize = 20;

/// Gives all ranks their shards of the weights of a model; returns how many numbers a whole model
/// has.
///
/// **Cost.** Reads each distinct block once.
/// **Errors.** As [`check_weights`].
pub fn load_weights(
    session: &mut Session,
    model: &[Weight],
    files: &Weights,
) -> Result<u64, Failure> {
    let wrong = check_weights(model, files);
    if !wrong.is_empty() {
        return Err(wrong.into());
    }
    for weight in model {
        let mut values = |block: &[Range<usize>], dtype| read_weight(weight, files, block, dtype);
        session.write_weight(&weight.name, Part::Weight, &mut values)?;
    }
    Ok(model.iter().map(Weight::count).sum())
}

/// What is wrong with files as the weights of a model; nothing where they fit.
///
/// **Errors.** E4006 for a tensor that is missing, E4007 for one of other dims, E4008 for tensors
/// that the model does not have, E4009 for two that would be one; of each at most 20.
pub fn check_weights(model: &[Weight], files: &Weights) -> Vec<Diagnostic> {
    let mut wrong = Vec::new();
    let mut known: BTreeSet<Cow<'_, str>> = BTreeSet::new();
    let mut seen: BTreeSet<&str> = BTreeSet::new();
    for weight in model {
        let numbers = 0..weight.source.count;
        let names = numbers.clone().flat_map(|number| weight.source.names_of(number));
        for name in names {
            if weight.source.scaled.is_some() && is_code(files.get(&name)) {
                known.insert(Source::scales_of(&name).into());
            }
            known.insert(name);
        }
        if seen.insert(weight.source.name()) {
            for number in numbers {
                if wrong.len() >= REPORTS_MAX {
                    break;
                }
                let found = find(weight, number, files);
                let agrees = found.and_then(|tensor| agree(weight, (number, tensor), files));
                wrong.extend(agrees.err());
                wrong.extend(scales::of(weight, number, files).err());
            }
        }
    }
    let is_extra =
        |name: &&str| !known.contains(*name) && !is_buffer(name) && !predicts_further(name, files);
    let extra: Vec<&str> = files.tensors().map(|(name, _)| name).filter(is_extra).collect();
    if !extra.is_empty() {
        wrong.push(too_many(model, files, &extra));
    }
    wrong
}

/// Whether a tensor is of a layer that predicts further tokens from the last layer's activations
/// and embeddings (DeepSeek-AI 2024, section 2.2), which no model here computes: it is stored as a
/// layer after the last, and joins both by `eh_proj`.
fn predicts_further(name: &str, files: &Weights) -> bool {
    let mut layers = name.match_indices("layers.").filter_map(|(at, key)| {
        let start = at + key.len();
        let end = start + name[start..].find('.')?;
        Some(&name[..end])
    });
    layers.any(|layer| files.get(&format!("{layer}.eh_proj.weight")).is_some())
}

/// The elements of a block of a weight, row-major, as little-endian `dtype`.
///
/// **Errors.** E4006 and E4007.
pub fn read_weight(
    weight: &Weight,
    files: &Weights,
    block: &[Range<usize>],
    dtype: DType,
) -> Result<Vec<u8>, Diagnostic> {
    let source = &weight.source;
    let tensors = (0..source.count).map(|number| find(weight, number, files));
    let tensors: Vec<&Tensor> = tensors.collect::<Result<_, _>>()?;
    let stored = tensors[0].stored;
    let whole = block == block::whole(&weight.dims);
    let scales: Vec<Option<Scales>> = (0..source.count)
        .map(|number| scales::of(weight, number, files))
        .collect::<Result<_, _>>()?;
    let scales: Option<Vec<Scales>> = scales.into_iter().collect();
    if whole && source.is_whole() && scales.is_none() {
        return Ok(convert(stored, files.bytes(tensors[0]), dtype));
    }
    if let Some(number) = tensors.iter().position(|tensor| tensor.stored != stored) {
        return Err(differ(source, number, files));
    }
    let (size, each) = (stored.size(), source.tensor_elements().max(1));
    let bytes: Vec<&[u8]> = tensors.into_iter().map(|tensor| files.bytes(tensor)).collect();
    let mut out = Vec::with_capacity(block::elements(block) * size);
    each_run(&weight.dims, block, |start, len| {
        source.each_run(start, len, |from, len| {
            let (tensor, from) =
                if source.count == 1 { (0, from) } else { (from / each, from % each) };
            let codes = &bytes[tensor][from * size..(from + len) * size];
            match &scales {
                None => out.extend_from_slice(codes),
                Some(scales) => scales[tensor].decode(codes, from, &mut out),
            }
        });
    });
    let stored = if scales.is_some() { Stored::DType(DType::F32) } else { stored };
    Ok(convert(stored, &out, dtype))
}

/// Tensors that are one weight have one type.
fn differ(source: &Source, number: usize, files: &Weights) -> Diagnostic {
    let names = [0, number].map(|number| source.names_of(number).next().unwrap_or_default());
    let headline = format!("`{}` and `{}` are of two types", names[0], names[1]);
    Diagnostic::error("E4007", at(files), headline)
        .note("both belong to one weight of the model")
        .help("write all tensors of the checkpoint in one type")
}

/// A tensor under the name that checkpoints have for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    /// The name.
    pub name: String,
    /// The tensor.
    pub values: Values,
}

/// Puts the tensors of a checkpoint together from what belongs to the weights of a model: the
/// weights themselves, their gradients or states. In the order of the model's weights.
///
/// **Errors.** Those of `values`.
pub fn join_weights<E>(
    model: &[Weight],
    values: &mut dyn FnMut(&Weight) -> Result<Values, E>,
) -> Result<Vec<Named>, E> {
    let mut places: BTreeMap<&str, usize> = BTreeMap::new();
    // Of each weight, its tensors follow each other.
    let mut tensors: Vec<Named> = Vec::new();
    for weight in model {
        let Values { dtype, bytes, .. } = values(weight)?;
        let source = &weight.source;
        let size = dtype.size() as usize;
        let each = source.tensor_elements();
        let at = *places.entry(source.name()).or_insert_with(|| {
            let tensor = |number: usize| Named {
                name: source.names_of(number).next().unwrap_or_default().into_owned(),
                values: Values { dtype, dims: source.dims.clone(), bytes: vec![0; each * size] },
            };
            tensors.extend((0..source.count).map(tensor));
            tensors.len() - source.count
        });
        assert_eq!(tensors[at].values.dtype, dtype, "the parts of a tensor have one type");
        let mut own = bytes.as_slice();
        source.each_run(0, bytes.len() / size, |to, len| {
            let (here, rest) = own.split_at(len * size);
            let (tensor, to) = if source.count == 1 { (0, to) } else { (to / each, to % each) };
            let target = &mut tensors[at + tensor].values.bytes;
            target[to * size..(to + len) * size].copy_from_slice(here);
            own = rest;
        });
    }
    Ok(tensors)
}

/// What belongs to the weights of a model, from the ranks that hold it. Buffers, which are not
/// trained, have no other part than themselves.
///
/// # Panics
/// When the session has no such part of one of the weights.
pub fn collect_weights(session: &Session, model: &[Weight], part: Part) -> Vec<Named> {
    let mut read = |weight: &Weight| {
        let values = session.read_weight(&weight.name, part);
        let values = values.expect("the session runs a program of this model");
        Ok::<_, std::convert::Infallible>(values)
    };
    let has_part = |weight: &&Weight| part == Part::Weight || !weight.frozen;
    let model: Vec<Weight> = model.iter().filter(has_part).cloned().collect();
    let Ok(tensors) = join_weights(&model, &mut read);
    tensors
}

/// Writes the weights of a session as the `model.safetensors` of a directory, which is made.
///
/// **Errors.** Writing fails.
pub fn export_weights(session: &Session, model: &[Weight], dir: &Path) -> Result<(), Error> {
    write_named(&dir.join(weights::FILE), &collect_weights(session, model, Part::Weight))
}

/// Writes tensors as a safetensors file that transformers reads.
///
/// **Errors.** Writing fails.
pub fn write_named(path: &Path, tensors: &[Named]) -> Result<(), Error> {
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir).map_err(Error::io("create", dir))?;
    }
    let tensors: Vec<NewTensor<'_>> = tensors
        .iter()
        .map(|Named { name, values }| NewTensor {
            name,
            dtype: values.dtype,
            dims: &values.dims,
            bytes: &values.bytes,
        })
        .collect();
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    weights::write(path, &tensors, &metadata)
}

/// The tensor of a weight with a number.
fn find<'f>(weight: &Weight, number: usize, files: &'f Weights) -> Result<&'f Tensor, Diagnostic> {
    let source = &weight.source;
    let found = source.names_of(number).find_map(|name| Some((files.get(&name)?, name)));
    let Some((tensor, name)) = found else { return Err(missing(source, number, files)) };
    if tensor.dims == source.dims {
        return Ok(tensor);
    }
    let (there, wanted) = (list(&tensor.dims), list(&source.dims));
    let headline = format!("tensor `{name}` is {there}, and the model has {wanted}");
    Err(Diagnostic::error("E4007", at(files), headline)
        .note(format!("it is the weight `{}` of the model", weight.name))
        .help("check that the weights and the `config.json` belong together"))
}

/// Checks that all tensors that the files have for a weight are equal: one of them is read.
fn agree(
    weight: &Weight,
    (number, tensor): (usize, &Tensor),
    files: &Weights,
) -> Result<(), Diagnostic> {
    let names =
        || weight.source.names_of(number).filter_map(|name| Some((files.get(&name)?, name)));
    let are_same = |a: &Tensor, b: &Tensor| {
        a.dims == b.dims && a.stored == b.stored && files.bytes(a) == files.bytes(b)
    };
    let Some((_, first)) = names().next() else { return Ok(()) };
    let scales = |name: &str| {
        let is_scaled = weight.source.scaled.is_some() && is_code(Some(tensor));
        is_scaled.then(|| files.get(&Source::scales_of(name))).flatten()
    };
    let is_same = |(there, other): &(&Tensor, Cow<'_, str>)| {
        let both = match (scales(&first), scales(other)) {
            (Some(a), Some(b)) => are_same(a, b),
            (None, None) => true,
            (Some(_), None) | (None, Some(_)) => false,
        };
        are_same(tensor, there) && both
    };
    let Some((there, other)) = names().find(|other| !is_same(other)) else { return Ok(()) };
    let headline = format!("tensors `{first}` and `{other}` differ, and the model has one of them");
    let wrong = Diagnostic::error("E4009", at(files), headline)
        .note(format!("both are the weight `{}` of the model", weight.name));
    let wrong = match there.dims == tensor.dims {
        true => wrong,
        false => {
            wrong.note(format!("one is {}, the other {}", list(&tensor.dims), list(&there.dims)))
        }
    };
    let untied = "write `\"tie_word_embeddings\": false` in the `config.json`, or ";
    let untied = if other == HEAD { untied } else { "" };
    Err(wrong.help(format!("{untied}remove the one that is not the model's")))
}

fn missing(source: &Source, number: usize, files: &Weights) -> Diagnostic {
    let names: Vec<Cow<'_, str>> = source.names_of(number).collect();
    let headline = format!("no tensor `{}` in the weights", names[0]);
    let mut diagnostic = Diagnostic::error("E4006", at(files), headline)
        .help("check that the weights and the `config.json` belong together");
    if let [_, others @ ..] = &names[..]
        && !others.is_empty()
    {
        let others: Vec<String> = others.iter().map(|name| format!("`{name}`")).collect();
        diagnostic = diagnostic.note(format!("nor is there {}", others.join(" or ")));
    }
    let all = files.tensors().map(|(name, _)| name);
    match nearest(&names[0], all) {
        Some(similar) => diagnostic.note(format!("the most similar name is `{similar}`")),
        None => diagnostic.note(format!("there are {} others", files.tensors().count())),
    }
}

fn too_many(model: &[Weight], files: &Weights, extra: &[&str]) -> Diagnostic {
    let numbers = |name: &&str| -> u64 {
        let tensor = files.get(name);
        tensor.map_or(0, |tensor| tensor.dims.iter().map(|d| *d as u64).product())
    };
    let wanted: u64 = model.iter().map(Weight::count).sum();
    let more: u64 = extra.iter().map(numbers).sum();
    let headline = match extra {
        [one] => format!("tensor `{one}` belongs to no weight of the model"),
        [first, ..] => format!(
            "{} tensors belong to no weight of the model, the first is `{first}`",
            extra.len()
        ),
        [] => unreachable!("it is called for tensors that are too many"),
    };
    let mut wrong = Diagnostic::error("E4008", at(files), headline);
    if extra.len() > 1 {
        let names = extra.iter().take(REPORTS_MAX).map(|name| format!("`{name}`"));
        let names: Vec<String> = names.collect();
        let rest = if extra.len() > REPORTS_MAX { ", …" } else { "" };
        wrong = wrong.note(format!("they are {}{rest}", names.join(", ")));
    }
    wrong
        .note(format!("the model has {wanted} parameters; these are {more} more"))
        .help("check that the weights and the `config.json` belong together")
}

fn at(files: &Weights) -> Span {
    Span::of(files.source().display().to_string())
}

fn list(dims: &[usize]) -> String {
    let dims: Vec<String> = dims.iter().map(usize::to_string).collect();
    format!("[{}]", dims.join(", "))
}

/// Calls `run` with the first element and the length of each run of a block, in order.
fn each_run(dims: &[usize], block: &[Range<usize>], mut run: impl FnMut(usize, usize)) {
    let whole_dims = (0..dims.len()).rev().take_while(|d| block[*d] == (0..dims[*d])).count();
    // The innermost dims that are whole, and the one outside of them, are one run.
    let outer = (dims.len() - whole_dims).saturating_sub(1);
    let len = block::elements(&block[outer..]);
    let strides = |dim: usize| -> usize { dims[dim + 1..].iter().product() };
    let inner = block.get(outer).map_or(0, |range| range.start * strides(outer));
    for index in 0..block::elements(&block[..outer]) {
        let (mut rest, mut start) = (index, inner);
        for dim in (0..outer).rev() {
            start += (block[dim].start + rest % block[dim].len()) * strides(dim);
            rest /= block[dim].len();
        }
        run(start, len);
    }
}

#[cfg(test)]
mod tests;
