//! Generation: tokens at a position, attention over a cache of static capacity.

use super::entry::{Callees, Maker, check_seq};
use super::family::{FamilyModel, Mode};
use super::{Architecture, Description, Model, model, module_name, not_built};
use crate::build::Builder;
use crate::dim::Dim;
use crate::module::{Kind, Module, ValueId};
use crate::op::Op;
use crate::types::TensorType;
use crate::{DType, Diagnostic, Span};

/// What [`decoding`] builds for.
#[derive(Clone, Debug, PartialEq)]
pub struct DecodingOptions {
    /// Tokens in one call: the length of a bucket for the prompt, 1 after it.
    pub tokens: usize,
    /// Tokens that the cache holds.
    pub capacity: usize,
    /// The element type of weights, caches and activations.
    pub dtype: DType,
    /// Of which tokens logits are wanted.
    pub logits: LogitsOf,
}

/// Of which tokens logits are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitsOf {
    /// Of all: `[B, tokens, V]`.
    All,
    /// Of the one whose index among the tokens is the last parameter, `last: i32[]`: `[B, 1, V]`.
    Last,
}

/// A model with the entry `decode`.
#[derive(Clone, Debug)]
pub struct Decoding {
    /// The model.
    pub model: Model,
    /// The caches: parameters that follow the weights, results that follow the logits, of the same
    /// types and in the same order. They start as zeros, or as anything finite.
    pub caches: Vec<Cache>,
}

/// The keys or the values of one layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cache {
    /// The parameter's name, such as `h.0.k`.
    pub name: String,
    /// The parameter's type: `[B, capacity, key heads, size of a head]`.
    pub ty: TensorType,
}

/// Builds the entry `decode(weights…, caches…, tokens, position[, last]) -> (logits, caches…)`.
///
/// Token `i` of sample `b` stands at `position[b] + i`, sees everything of its sample before it,
/// and is written into the caches there. A prompt may be padded to the length of its bucket: what
/// padding writes is not seen by the tokens before it, and is written over by those that follow.
/// `position[b] + tokens` must not exceed the capacity, since a range that would end past it is
/// moved back.
///
/// # Errors
/// `E1107` for a graph, `E1108` for options that do not fit the model.
pub fn decoding(
    description: &Description,
    options: &DecodingOptions,
) -> Result<Decoding, Vec<Diagnostic>> {
    let family = match &description.architecture {
        Architecture::Family(family) => family,
        Architecture::Sized(_) => return Err(vec![not_built(description)]),
        Architecture::Graph(_) => {
            let headline = "a graph has no cache, so that nothing can be generated from it";
            return Err(vec![Diagnostic::error("E1107", Span::of(&description.name), headline)]);
        }
    };
    let wrong = check_options(family, options);
    if !wrong.is_empty() {
        return Err(wrong);
    }
    let mut module = Module::new(module_name(&description.name));
    let maker = Maker::new(family, options.tokens, options.dtype);
    let dims = [
        Dim::symbol(Dim::BATCH),
        Dim::from(options.capacity),
        Dim::from(family.size("G")),
        Dim::from(family.size("D")),
    ];
    let cache = TensorType::new(options.dtype, dims);
    let caches: Vec<Cache> = (0..family.layers.len())
        .flat_map(|layer| ["k", "v"].map(|which| format!("h.{layer}.{which}")))
        .map(|name| Cache { name, ty: cache.clone() })
        .collect();
    let position = ("position", positions());
    let placed = family.learned.map(|_| position.clone());
    maker.add_embed(&mut module, "embed_at", Mode::Eval, placed.as_slice());
    let cached = |_| vec![("k_cache", cache.clone()), ("v_cache", cache.clone()), position.clone()];
    let blocks = maker.add_blocks(&mut module, "block_cached", Mode::Eval, &cached);
    let callees = Callees { embed: "embed_at".into(), blocks, mode: Mode::Eval };
    add_entry(&mut module, maker, &callees, &caches, options.logits);
    let model = model(description, family, module, vec!["decode".to_owned()]);
    Ok(Decoding { model, caches })
}

/// Where the tokens of a call begin, in each sample.
fn positions() -> TensorType {
    TensorType::new(DType::I32, [Dim::symbol(Dim::BATCH)])
}

/// The diagnostics of options that do not fit the model.
fn check_options(family: &FamilyModel, options: &DecodingOptions) -> Vec<Diagnostic> {
    let mut wrong: Vec<Diagnostic> = check_seq(family, options.capacity).into_iter().collect();
    let (tokens, capacity) = (options.tokens, options.capacity);
    if tokens == 0 || tokens > capacity {
        let headline = format!("{tokens} tokens at once do not fit a cache of {capacity}");
        wrong.push(Diagnostic::error("E1108", Span::of("--seq"), headline));
    }
    if !options.dtype.is_float() {
        let headline = format!("`{}` is no floating-point type", options.dtype);
        wrong.push(Diagnostic::error("E1108", Span::of("--dtype"), headline));
    }
    if let Some(end) = family.cached_max().filter(|end| capacity > *end) {
        let headline = format!("a cache of {capacity} tokens is longer than {end}");
        wrong.push(
            Diagnostic::error("E1108", Span::of("--max-tokens"), headline)
                .note("beyond it the rotary angles of this model depend on the length")
                .note("cached keys would keep those of the shorter text")
                .help(format!("generate up to {end} tokens, the prompt's included")),
        );
    }
    wrong
}

fn add_entry(
    module: &mut Module,
    mut maker: Maker<'_>,
    callees: &Callees,
    caches: &[Cache],
    logits: LogitsOf,
) {
    let ids = maker.types.ids.clone();
    let scalar = TensorType::scalar(DType::I32);
    if logits == LogitsOf::Last {
        let mut b = Builder::new(module, "take_last", Kind::Layer);
        let (x, last) = (b.param("x", maker.types.x.clone()), b.param("last", scalar.clone()));
        let x = b.push("x_last", Op::DynamicSlice { dim: 1, size: Dim::from(1) }, &[x, last]);
        b.finish(&[x]);
        maker.types.x.dims[1] = Dim::from(1);
    }
    maker.add_head_logits(module);
    let mut b = Builder::new(module, "decode", Kind::Layer);
    let weights = maker.take_weights(&mut b);
    let caches: Vec<ValueId> = caches.iter().map(|c| b.param(&c.name, c.ty.clone())).collect();
    let tokens = b.param("tokens", ids);
    let position = b.param("position", positions());
    let last = (logits == LogitsOf::Last).then(|| b.param("last", scalar));
    let placed = maker.model.learned.map(|_| position);
    let operands = [tokens].into_iter().chain(weights.embed).chain(placed);
    let mut x = b.call("x", &callees.embed, &operands.collect::<Vec<_>>())[0];
    let mut written = Vec::new();
    for (layer, (weights, cache)) in weights.layers.into_iter().zip(caches.chunks(2)).enumerate() {
        let operands = [x].into_iter().chain(weights).chain(cache.iter().copied());
        let operands: Vec<ValueId> = operands.chain([position]).collect();
        let block = &callees.blocks[maker.kinds[layer]];
        let results = b.call(&format!("h.{layer}.x"), block, &operands);
        x = results[0];
        written.extend_from_slice(&results[1..]);
    }
    if let Some(last) = last {
        x = b.call("x_last", "take_last", &[x, last])[0];
    }
    let operands: Vec<ValueId> = [x].into_iter().chain(weights.head).collect();
    let logits = b.call("logits", "head_logits", &operands)[0];
    let results: Vec<ValueId> = [logits].into_iter().chain(written).collect();
    b.finish(&results);
}
