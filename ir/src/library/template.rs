//! What a template's text says: parameters, gradient, factors, and the body of its instances.
//!
//! A text begins with `template NAME(attributes)` and may have more names by lines
//! `also NAME(attributes)`, which are flags for its guards. Parameters follow, on one line or
//! several, then header lines, then the body. Header lines:
//!
//! - `gradient NAME [%x, d%y] -> [%x]`: the gradient composite, what it takes, and of what its
//!   results are the gradients. With `sign=-sign` an attribute of it has the other sign; with
//!   `bias_grad?%bias` an attribute is 1 where the gradient of a parameter is wanted, and where it
//!   is not, that gradient is no result.
//! - `optional %dbias bias_grad`: a last result that is there where an attribute is 1.
//! - `factor heads %q:2 %bias:H partial %dk offset head_offset=%q`: the dims that a factor cuts, by
//!   number or by size (none where the parameter lacks it; `%dx` has the sizes of `%x`), results
//!   that are partial sums then unless they are cut, and attributes that count from the shard.
//!   With `whole queries=%q` an attribute says of a shard how long the whole is.
//! - `form all-gather %q:1 partial %dk`: as a factor, a way to run the composite on several ranks
//!   that takes exchanges inside of it, or a part for positions that no attribute counts. A factor
//!   is computed on pieces alone; of a form the planner asks by name.
//! - `whole group`, `either sign -1 1`, `bound 0 <= p < 1`: what attributes keep to, see
//!   [`bounds`](super::bounds).

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use super::bounds::Bound;
use crate::DType;
use crate::dim::Dim;
use crate::module::Attributes;
use crate::text::attrs::Names;
use crate::text::guard::{Setting, Settings, has_guards, select};
use crate::types::TensorType;

/// The name of the element type in texts.
const ELEMENT: &str = "T";
/// The name of the type in which numbers of [`ELEMENT`] are added.
const SUM: &str = "W";

/// A composite for any types.
#[derive(Clone, Debug)]
pub struct Template {
    /// The name.
    pub name: String,
    /// The attributes, with their values where they may be left out.
    pub attributes: Vec<(String, Option<f64>)>,
    pub(super) source: &'static str,
    /// The text from behind the attributes on, in which what stands before is blank.
    text: String,
    /// All names under which the text defines a composite.
    names: Vec<String>,
    /// The attributes of all of them.
    shared: BTreeSet<String>,
    /// The attributes that guards ask for.
    optional: BTreeSet<String>,
    /// The definition, where nothing is guarded.
    plain: Option<Definition>,
}

/// What a template says for given attributes.
#[derive(Clone, Debug)]
pub struct Definition {
    /// The composite that computes gradients.
    pub gradient: Option<Gradient>,
    /// The factors along which a call can be cut.
    pub factors: Vec<CompositeFactor>,
    /// The ways to run a call on several ranks that take more than pieces: distributed forms.
    pub forms: Vec<CompositeFactor>,
    /// Results that are there where an attribute is 1: the result and the attribute.
    pub optional_results: Vec<(String, String)>,
    /// What the attributes keep to.
    pub bounds: Vec<Bound>,
    params: Vec<(String, Pattern)>,
    /// Parameters and body, as the parser reads them.
    pub(super) text: String,
}

/// How a composite's gradient is called.
#[derive(Clone, Debug)]
pub struct Gradient {
    /// The composite.
    pub callee: String,
    /// Attributes that differ from the primal's: the name, and the factor to the primal's value.
    pub negated: Vec<String>,
    /// Attributes that are 1 where the gradient of a parameter is wanted: the attribute, and the
    /// parameter. Where it is not, the gradient is no result.
    pub wanted: Vec<(String, String)>,
    /// What is passed.
    pub arguments: Vec<Argument>,
    /// The parameters of the primal whose gradients the results are.
    pub targets: Vec<String>,
}

/// What is passed to a gradient composite.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Argument {
    /// A parameter or result of the primal.
    Value(String),
    /// The cotangent of a result of the primal.
    Cotangent(String),
}

/// A factor along which a composite can be cut.
#[derive(Clone, Debug)]
pub struct CompositeFactor {
    /// The name; a factor of `..` stands for one factor per packed dim.
    pub name: String,
    /// The values that it cuts, by name.
    pub places: Vec<Place>,
    /// The results that are partial sums when it is cut, where they are not cut themselves.
    pub partial: Vec<String>,
    /// Attributes that grow by the offset of the shard of a value.
    pub offsets: Vec<(String, String)>,
    /// Attributes that say how long the dim of a value is in the whole.
    pub wholes: Vec<(String, String)>,
}

/// Where a factor stands in a value.
#[derive(Clone, Debug)]
pub struct Place {
    /// The parameter or result.
    pub value: String,
    /// The dim; none for every packed dim.
    pub dim: Option<usize>,
    /// The attribute that counts the elements of one unit; none for one.
    pub unit: Option<String>,
}

#[derive(Clone, Debug)]
struct Pattern {
    dtype: String,
    dims: Vec<DimPattern>,
}

#[derive(Clone, Debug)]
enum DimPattern {
    Pack,
    Symbol(String),
    Constant(i64),
}

impl Template {
    /// The given attributes and the defaults of the rest; of optional attributes those that are not
    /// the default.
    pub fn complete(&self, given: &Attributes) -> Option<Attributes> {
        if given.keys().any(|key| self.attributes.iter().all(|(name, _)| name != key)) {
            return None;
        }
        let mut complete = Attributes::new();
        for (name, default) in &self.attributes {
            let value = given.get(name).copied().or(*default)?;
            if !self.optional.contains(name) || Some(value) != *default {
                complete.insert(name.clone(), value);
            }
        }
        Some(complete)
    }

    /// The given attributes and the defaults of all others that have one.
    pub(super) fn all(&self, given: &Attributes) -> Attributes {
        let default = |(name, default): &(String, Option<f64>)| {
            Some((name.clone(), given.get(name).copied().or(*default)?))
        };
        self.attributes.iter().filter_map(default).collect()
    }

    /// Whether guards ask for an attribute.
    pub fn is_optional(&self, attribute: &str) -> bool {
        self.optional.contains(attribute)
    }

    /// What the text says for given attributes; what is not given has its default.
    ///
    /// # Panics
    /// Never: the texts are part of the program, and a test reads them.
    pub fn definition(&self, given: &Attributes) -> Cow<'_, Definition> {
        if let Some(plain) = &self.plain {
            return Cow::Borrowed(plain);
        }
        let given = self.all(given);
        let number = |name: &str| given.get(name).copied().unwrap_or(0.0);
        // What only another name of the text has is 0 here.
        let mut settings: Settings =
            self.shared.iter().map(|name| (name.clone(), Setting::Number(number(name)))).collect();
        let flag = |name: &String| (name.clone(), Setting::Flag(*name == self.name));
        settings.extend(self.names.iter().map(flag));
        let selected = select(self.source, &self.text, &settings).unwrap_or_else(|diagnostics| {
            let drawn = |d| crate::diagnostic::render(d, Some(&self.text));
            let drawn: String = diagnostics.iter().map(drawn).collect();
            panic!("the library's `{}` does not read:\n{drawn}", self.name)
        });
        let definition = read_definition(&selected, &self.text);
        let wrong = || panic!("{}: cannot read the header of\n{selected}", self.source);
        Cow::Owned(definition.unwrap_or_else(wrong))
    }
}

impl Definition {
    /// The parameters' names and numbers of dims, of which `..` counts as one.
    #[cfg(test)]
    pub(super) fn params(&self) -> impl Iterator<Item = (&str, usize)> {
        self.params.iter().map(|(name, pattern)| (name.as_str(), pattern.dims.len()))
    }

    /// Types that operands may have, with sizes all different, even and from `smallest` on.
    pub(crate) fn sample_types(&self, smallest: i64) -> Vec<TensorType> {
        let mut symbols: Vec<&str> = vec![".."];
        let mut size_of = |symbol| {
            let at = symbols.iter().position(|s| *s == symbol).unwrap_or_else(|| {
                symbols.push(symbol);
                symbols.len() - 1
            });
            Dim::constant(smallest + 2 * at as i64)
        };
        self.params
            .iter()
            .map(|(_, pattern)| {
                let dims = pattern.dims.iter().map(|dim| match dim {
                    DimPattern::Pack => size_of(".."),
                    DimPattern::Symbol(name) => size_of(name),
                    DimPattern::Constant(size) => Dim::constant(*size),
                });
                TensorType::new(
                    pattern.dtype.parse().unwrap_or(DType::F64),
                    dims.collect::<Vec<_>>(),
                )
            })
            .collect()
    }

    /// For each parameter, whether it is of the type in which elements are added.
    pub fn sums(&self) -> Vec<bool> {
        self.params.iter().map(|(_, pattern)| pattern.dtype == SUM).collect()
    }

    /// How many dims `..` stands for, for operands of the given types.
    pub fn pack_len(&self, operands: &[TensorType]) -> usize {
        let packed = self.params.iter().zip(operands).find_map(|((_, pattern), ty)| {
            let fixed = pattern.dims.iter().filter(|d| !matches!(d, DimPattern::Pack)).count();
            (fixed < pattern.dims.len()).then(|| ty.ndim().saturating_sub(fixed))
        });
        packed.unwrap_or(0)
    }

    /// What the names in the text stand for; none where operands do not match the parameters.
    pub(super) fn bind(&self, attributes: Attributes, operands: &[TensorType]) -> Option<Names> {
        let mut names = Names { template: true, attributes, ..Names::default() };
        if operands.len() != self.params.len() {
            return None;
        }
        let mut pack: Option<Vec<Dim>> = None;
        for ((_, pattern), ty) in self.params.iter().zip(operands) {
            match pattern.dtype.parse::<DType>() {
                Ok(dtype) if dtype == ty.dtype => {}
                Ok(_) => return None,
                Err(()) => {
                    let bound = names.dtypes.entry(pattern.dtype.clone()).or_insert(ty.dtype);
                    if *bound != ty.dtype {
                        return None;
                    }
                    if pattern.dtype == ELEMENT {
                        names.dtypes.insert(SUM.to_owned(), ty.dtype.accumulation());
                    }
                }
            }
            bind_dims(&pattern.dims, &ty.dims, &mut names.dims, &mut pack)?;
        }
        names.pack = pack.unwrap_or_default();
        Some(names)
    }
}

fn bind_dims(
    pattern: &[DimPattern],
    dims: &[Dim],
    bound: &mut BTreeMap<String, Dim>,
    pack: &mut Option<Vec<Dim>>,
) -> Option<()> {
    let packed = matches!(pattern.first(), Some(DimPattern::Pack));
    let fixed = pattern.len() - usize::from(packed);
    let lead = dims.len().checked_sub(fixed)?;
    if packed {
        let there = pack.get_or_insert_with(|| dims[..lead].to_vec());
        if there[..] != dims[..lead] {
            return None;
        }
    } else if lead != 0 {
        return None;
    }
    for (pattern, dim) in pattern[usize::from(packed)..].iter().zip(&dims[lead..]) {
        let fits = match pattern {
            DimPattern::Symbol(name) => bound.entry(name.clone()).or_insert(dim.clone()) == dim,
            DimPattern::Constant(size) => dim.as_constant() == Some(*size),
            DimPattern::Pack => false,
        };
        if !fits {
            return None;
        }
    }
    Some(())
}

/// Reads the templates of a text.
///
/// # Panics
/// Where the text is none: it is part of the program.
pub(super) fn read_templates(source: &'static str, text: &str) -> Vec<Template> {
    let mut templates = Vec::new();
    let starts: Vec<usize> = text.match_indices("\ntemplate ").map(|(at, _)| at + 1).collect();
    for (at, start) in starts.iter().enumerate() {
        let end = starts.get(at + 1).copied().unwrap_or(text.len());
        let piece = &text[*start..end];
        let read = read_template(source, piece);
        templates.extend(read.unwrap_or_else(|| panic!("{source}: cannot read\n{piece}")));
    }
    templates
}

/// Reads `template NAME(attributes)` and what follows; lines `also NAME(attributes)` give the text
/// further names, which are flags for its guards.
fn read_template(source: &'static str, text: &str) -> Option<Vec<Template>> {
    let mut heads: Vec<(String, Vec<(String, Option<f64>)>)> = Vec::new();
    let mut at = 0;
    for keyword in std::iter::once("template ").chain(std::iter::repeat("also ")) {
        let Some(rest) = text[at..].strip_prefix(keyword) else { break };
        let (head, _) = rest.split_once(')')?;
        let (name, attributes) = head.split_once('(')?;
        let attributes = attributes.split(',').map(str::trim).filter(|a| !a.is_empty());
        heads.push((name.to_owned(), attributes.map(read_attribute).collect()));
        at += keyword.len() + head.len() + 1;
        at += text[at..].len() - text[at..].trim_start().len();
    }
    let blank: String = text[..at].chars().map(|c| if c == '\n' { c } else { ' ' }).collect();
    let text = blank + &text[at..];
    let names: Vec<String> = heads.iter().map(|(name, _)| name.clone()).collect();
    let shared: BTreeSet<String> =
        heads.iter().flat_map(|(_, attributes)| attributes).map(|(name, _)| name.clone()).collect();
    let guards: Vec<&str> = text.lines().flat_map(conditions).collect();
    let is_guard = |name: &String| guards.contains(&name.as_str());
    let plain = match has_guards(&text) {
        true => None,
        false => Some(read_definition(&text, &text)?),
    };
    let template = |(name, attributes): (String, Vec<(String, Option<f64>)>)| Template {
        name,
        optional: attributes
            .iter()
            .map(|(name, _)| name)
            .filter(|n| is_guard(n))
            .cloned()
            .collect(),
        attributes,
        source,
        text: text.clone(),
        names: names.clone(),
        shared: shared.clone(),
        plain: plain.clone(),
    };
    Some(heads.into_iter().map(template).collect())
}

/// The words of the conditions in a line: of that of a block, and of those of items of lists.
fn conditions(line: &str) -> impl Iterator<Item = &str> {
    let block = line.find("when ").map_or("", |at| &line[at..]);
    let items = line.split(" if ").skip(1).filter_map(|rest| rest.split([',', ']']).next());
    items.chain([block]).flat_map(|condition| condition.split([' ', '{']))
}

/// Reads what is selected of a text: parameters, header lines, body.
fn read_definition(selected: &str, text: &str) -> Option<Definition> {
    let open = selected.find('(')?;
    let close = open + selected[open..].find(')')?;
    let body = close + selected[close..].find("\n{")? + 1;
    let header = &selected[close + 1..body];
    let blank: String = header.chars().map(|c| if c == '\n' { c } else { ' ' }).collect();
    let mut definition = Definition {
        gradient: None,
        factors: Vec::new(),
        forms: Vec::new(),
        optional_results: Vec::new(),
        bounds: Vec::new(),
        params: Vec::new(),
        text: [&selected[..=close], &blank, &selected[body..]].concat(),
    };
    for param in selected[open + 1..close].split('%').skip(1) {
        let (name, ty) = param.trim_end().trim_end_matches(',').split_once(": ")?;
        definition.params.push((name.to_owned(), read_pattern(ty)?));
    }
    for line in header.lines().map(str::trim).filter(|line| !line.is_empty()) {
        match line.split_once(' ')? {
            ("gradient", rest) => definition.gradient = Some(read_gradient(rest)?),
            ("factor", rest) => {
                definition.factors.push(read_factor(rest, &definition.params, text)?);
            }
            ("form", rest) => {
                definition.forms.push(read_factor(rest, &definition.params, text)?);
            }
            ("optional", rest) => {
                let (result, attribute) = rest.strip_prefix('%')?.split_once(' ')?;
                definition.optional_results.push((result.to_owned(), attribute.to_owned()));
            }
            (keyword, rest) => definition.bounds.extend(Bound::read(keyword, rest)?),
        }
    }
    Some(definition)
}

fn read_attribute(text: &str) -> (String, Option<f64>) {
    match text.split_once('=') {
        Some((name, value)) => (name.to_owned(), value.parse().ok()),
        None => (text.to_owned(), None),
    }
}

fn read_pattern(text: &str) -> Option<Pattern> {
    let (dtype, dims) = text.strip_suffix(']')?.split_once('[')?;
    let dims = dims.split(',').map(str::trim).filter(|d| !d.is_empty()).map(|dim| match dim {
        ".." => DimPattern::Pack,
        _ => dim.parse().map_or_else(|_| DimPattern::Symbol(dim.to_owned()), DimPattern::Constant),
    });
    Some(Pattern { dtype: dtype.to_owned(), dims: dims.collect() })
}

/// Reads `callee key=-key key?%x [%x, d%y] -> [%x]`, with or without brackets.
fn read_gradient(text: &str) -> Option<Gradient> {
    let text = text.replace(['[', ']', ','], " ");
    let (call, targets) = text.split_once(" -> ")?;
    let mut words = call.split_whitespace();
    let mut gradient = Gradient {
        callee: words.next()?.to_owned(),
        negated: Vec::new(),
        wanted: Vec::new(),
        arguments: Vec::new(),
        targets: Vec::new(),
    };
    for word in words {
        if let Some(name) = word.strip_prefix("d%") {
            gradient.arguments.push(Argument::Cotangent(name.to_owned()));
        } else if let Some(name) = word.strip_prefix('%') {
            gradient.arguments.push(Argument::Value(name.to_owned()));
        } else if let Some((key, param)) = word.split_once("?%") {
            gradient.wanted.push((key.to_owned(), param.to_owned()));
        } else {
            let (key, value) = word.split_once("=-")?;
            gradient.negated.push((key == value).then(|| key.to_owned())?);
        }
    }
    let targets = targets.split_whitespace();
    gradient.targets = targets.map(|t| t.trim_start_matches('%').to_owned()).collect();
    gradient.wanted.retain(|(_, param)| gradient.targets.contains(param));
    Some(gradient)
}

/// Reads `name %x:2*unit … partial %dw … offset attribute=%x … whole attribute=%x …`.
///
/// A symbol in place of a number is the dim of the parameter that has it as its size, and for `%dx`
/// that of `%x`; a parameter without such a dim, or one that is not there, is not cut.
fn read_factor(line: &str, params: &[(String, Pattern)], text: &str) -> Option<CompositeFactor> {
    let dim_of = |value: &str, symbol: &str| {
        let of = |wanted: &str| params.iter().find(|(name, _)| name == wanted);
        let (_, pattern) = of(value).or_else(|| of(value.strip_prefix('d')?))?;
        let is_it = |dim: &DimPattern| matches!(dim, DimPattern::Symbol(s) if s == symbol);
        pattern.dims.iter().position(is_it)
    };
    let mut words = line.split(' ').filter(|word| !word.is_empty());
    let name = words.next()?.to_owned();
    let (places, partial, offsets, wholes) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut factor = CompositeFactor { name, places, partial, offsets, wholes };
    let mut section = "places";
    for word in words {
        match (section, word) {
            (_, "partial" | "offset" | "whole") => section = word,
            ("places", _) => {
                let (value, place) = word.strip_prefix('%')?.split_once(':')?;
                let (dim, unit) = match place.split_once('*') {
                    Some((dim, unit)) => (dim, Some(unit.to_owned())),
                    None => (place, None),
                };
                let is_symbol = dim.starts_with(|c: char| c.is_ascii_alphabetic());
                let dim = match dim {
                    ".." => None,
                    _ if is_symbol => match dim_of(value, dim) {
                        Some(dim) => Some(dim),
                        None if text.contains(&format!("%{value}")) => continue,
                        None => return None,
                    },
                    _ => Some(dim.parse().ok()?),
                };
                factor.places.push(Place { value: value.to_owned(), dim, unit });
            }
            ("partial", _) => factor.partial.push(word.strip_prefix('%')?.to_owned()),
            _ => {
                let (attribute, value) = word.split_once("=%")?;
                let named = (attribute.to_owned(), value.to_owned());
                let is_offset = section == "offset";
                let told = if is_offset { &mut factor.offsets } else { &mut factor.wholes };
                told.push(named);
            }
        }
    }
    Some(factor)
}
