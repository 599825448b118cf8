//! The library of composites: named idioms, kept as texts in the IR's own form.
//!
//! A template is written for any element type `T`, any sizes and, with `..`, any number of leading
//! dims; an instance is a function of the module. Besides its definition a template may name its
//! gradient composite and its *factors*: the iteration factors along which it can be cut, the units
//! of the cut, which results are partial sums then, and which attributes count from the shard's
//! offset. The planner reads factors as data.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use crate::DType;
use crate::dim::Dim;
use crate::module::{Attributes, Function, Kind, Module};
use crate::text::attrs::Names;
use crate::text::parse::Parser;
use crate::types::TensorType;

const TEXTS: [(&str, &str); 5] = [
    ("norm.graph", include_str!("library/norm.graph")),
    ("activation.graph", include_str!("library/activation.graph")),
    ("attention.graph", include_str!("library/attention.graph")),
    ("loss.graph", include_str!("library/loss.graph")),
    ("optimizer.graph", include_str!("library/optimizer.graph")),
];

/// A composite for any types.
#[derive(Clone, Debug)]
pub struct Template {
    /// The name.
    pub name: String,
    /// The attributes, with their values where they may be left out.
    pub attributes: Vec<(String, Option<f64>)>,
    /// The composite that computes gradients.
    pub gradient: Option<Gradient>,
    /// The factors along which a call can be cut.
    pub factors: Vec<CompositeFactor>,
    params: Vec<(String, Pattern)>,
    source: &'static str,
    /// The text from the parameters on.
    definition: String,
    body: String,
}

/// How a composite's gradient is called.
#[derive(Clone, Debug)]
pub struct Gradient {
    /// The composite.
    pub callee: String,
    /// Attributes that differ from the primal's: the name, and the factor to the primal's value.
    pub negated: Vec<String>,
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
    /// The results that are partial sums when it is cut.
    pub partial: Vec<String>,
    /// Attributes that grow by the offset of the shard of a value.
    pub offsets: Vec<(String, String)>,
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

/// All templates, by name.
///
/// # Panics
/// Never: the texts are part of the program, and a test reads them.
pub fn templates() -> &'static BTreeMap<String, Template> {
    static TEMPLATES: OnceLock<BTreeMap<String, Template>> = OnceLock::new();
    TEMPLATES.get_or_init(|| {
        let mut templates = BTreeMap::new();
        for (source, text) in TEXTS {
            for template in read_templates(source, text) {
                templates.insert(template.name.clone(), template);
            }
        }
        templates
    })
}

/// An instance of a composite for operands of the given types, named `name`.
///
/// Attributes that are not given take their default values. None when there is no such composite,
/// an attribute is missing or unknown, or the operands do not match its parameters.
pub fn instantiate(
    composite: &str,
    given: &Attributes,
    operands: &[TensorType],
    name: &str,
) -> Option<Function> {
    match read_instance(composite, given, operands, name)? {
        Ok(function) => Some(function),
        Err(why) => panic!("the library's `{composite}` does not read:\n{why}"),
    }
}

/// As [`instantiate`], but with the diagnostics where the definition does not read: where the
/// operands match the parameters, and sizes inside do not come out whole.
pub(crate) fn read_instance(
    composite: &str,
    given: &Attributes,
    operands: &[TensorType],
    name: &str,
) -> Option<Result<Function, String>> {
    let template = templates().get(composite)?;
    let attributes = template.complete(given)?;
    let names = template.bind(&attributes, operands)?;
    let kind = Kind::Composite { name: composite.to_owned(), attributes };
    let mut function = Function::new(name, kind);
    let mut parser = Parser::new(template.source, &template.definition, names);
    let read = parser.params(&mut function);
    let read = read.map(|()| parser.skip_newlines());
    let mut parser = Parser::new(template.source, &template.body, parser.names);
    let read = read.and_then(|()| parser.body(&Module::default(), &mut function));
    Some(match read {
        Ok(()) => Ok(function),
        Err(_) => {
            let drawn = |d| crate::diagnostic::render(d, Some(&template.body));
            Err(parser.diagnostics.iter().map(drawn).collect())
        }
    })
}

impl Module {
    /// The name of an instance of a composite, which is added where it is not there yet.
    /// None as for [`instantiate`].
    pub fn composite(
        &mut self,
        composite: &str,
        given: &Attributes,
        operands: &[TensorType],
    ) -> Option<String> {
        let wanted = templates().get(composite)?.complete(given)?;
        let mut count = 0;
        for function in &self.functions {
            let Kind::Composite { name, attributes } = &function.kind else { continue };
            if name != composite {
                continue;
            }
            if *attributes == wanted && function.param_types() == operands {
                return Some(function.name.clone());
            }
            count += 1;
        }
        let mut name =
            if count == 0 { composite.to_owned() } else { format!("{composite}.{count}") };
        while self.function(&name).is_some() {
            count += 1;
            name = format!("{composite}.{count}");
        }
        let function = instantiate(composite, &wanted, operands, &name)?;
        self.functions.push(function);
        Some(name)
    }
}

impl Template {
    /// The given attributes and the defaults of the rest.
    pub fn complete(&self, given: &Attributes) -> Option<Attributes> {
        if given.keys().any(|key| self.attributes.iter().all(|(name, _)| name != key)) {
            return None;
        }
        self.attributes
            .iter()
            .map(|(name, default)| Some((name.clone(), given.get(name).copied().or(*default)?)))
            .collect()
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

    /// How many dims `..` stands for, for operands of the given types.
    pub fn pack_len(&self, operands: &[TensorType]) -> usize {
        let packed = self.params.iter().zip(operands).find_map(|((_, pattern), ty)| {
            let fixed = pattern.dims.iter().filter(|d| !matches!(d, DimPattern::Pack)).count();
            (fixed < pattern.dims.len()).then(|| ty.ndim().saturating_sub(fixed))
        });
        packed.unwrap_or(0)
    }

    fn bind(&self, attributes: &Attributes, operands: &[TensorType]) -> Option<Names> {
        let mut names =
            Names { template: true, attributes: attributes.clone(), ..Names::default() };
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

fn read_templates(source: &'static str, text: &str) -> Vec<Template> {
    let mut templates = Vec::new();
    let starts: Vec<usize> = text.match_indices("\ntemplate ").map(|(at, _)| at + 1).collect();
    for (at, start) in starts.iter().enumerate() {
        let end = starts.get(at + 1).copied().unwrap_or(text.len());
        let piece = &text[*start..end];
        let template = read_template(source, piece);
        templates.push(template.unwrap_or_else(|| panic!("{source}: cannot read\n{piece}")));
    }
    templates
}

fn read_template(source: &'static str, text: &str) -> Option<Template> {
    let open = text.find("\n{")? + 1;
    let mut header = text[..open].lines();
    let first = header.next()?.strip_prefix("template ")?;
    let (name, rest) = first.split_once('(')?;
    let (attributes, params) = rest.split_once(") (")?;
    let params = params.strip_suffix(')')?;
    let mut template = Template {
        name: name.to_owned(),
        attributes: attributes.split(", ").filter(|a| !a.is_empty()).map(read_attribute).collect(),
        gradient: None,
        factors: Vec::new(),
        params: Vec::new(),
        source,
        definition: format!("({params})"),
        body: text[open..].to_owned(),
    };
    for param in params.split(", %") {
        let (name, ty) = param.trim_start_matches('%').split_once(": ")?;
        template.params.push((name.to_owned(), read_pattern(ty)?));
    }
    for line in header {
        match line.split_once(' ')? {
            ("gradient", rest) => template.gradient = Some(read_gradient(rest)?),
            ("factor", rest) => template.factors.push(read_factor(rest)?),
            _ => return None,
        }
    }
    Some(template)
}

fn read_attribute(text: &str) -> (String, Option<f64>) {
    match text.split_once('=') {
        Some((name, value)) => (name.to_owned(), value.parse().ok()),
        None => (text.to_owned(), None),
    }
}

fn read_pattern(text: &str) -> Option<Pattern> {
    let (dtype, dims) = text.strip_suffix(']')?.split_once('[')?;
    let dims = dims.split(", ").filter(|d| !d.is_empty()).map(|dim| match dim {
        ".." => DimPattern::Pack,
        _ => dim.parse().map_or_else(|_| DimPattern::Symbol(dim.to_owned()), DimPattern::Constant),
    });
    Some(Pattern { dtype: dtype.to_owned(), dims: dims.collect() })
}

/// Reads `callee key=-key %x d%y -> %x`.
fn read_gradient(text: &str) -> Option<Gradient> {
    let (call, targets) = text.split_once(" -> ")?;
    let mut words = call.split(' ');
    let callee = words.next()?.to_owned();
    let (mut negated, mut arguments) = (Vec::new(), Vec::new());
    for word in words {
        if let Some(name) = word.strip_prefix("d%") {
            arguments.push(Argument::Cotangent(name.to_owned()));
        } else if let Some(name) = word.strip_prefix('%') {
            arguments.push(Argument::Value(name.to_owned()));
        } else {
            let (key, value) = word.split_once("=-")?;
            negated.push((key == value).then(|| key.to_owned())?);
        }
    }
    let targets = targets.split(' ').map(|t| t.trim_start_matches('%').to_owned()).collect();
    Some(Gradient { callee, negated, arguments, targets })
}

/// Reads `name %x:2*unit … partial %dw … offset attribute=%x …`.
fn read_factor(text: &str) -> Option<CompositeFactor> {
    let mut words = text.split(' ');
    let name = words.next()?.to_owned();
    let mut factor =
        CompositeFactor { name, places: Vec::new(), partial: Vec::new(), offsets: Vec::new() };
    let mut section = "places";
    for word in words {
        match (section, word) {
            (_, "partial" | "offset") => section = word,
            ("places", _) => {
                let (value, place) = word.strip_prefix('%')?.split_once(':')?;
                let (dim, unit) = match place.split_once('*') {
                    Some((dim, unit)) => (dim, Some(unit.to_owned())),
                    None => (place, None),
                };
                let dim = if dim == ".." { None } else { Some(dim.parse().ok()?) };
                factor.places.push(Place { value: value.to_owned(), dim, unit });
            }
            ("partial", _) => factor.partial.push(word.strip_prefix('%')?.to_owned()),
            _ => {
                let (attribute, value) = word.split_once("=%")?;
                factor.offsets.push((attribute.to_owned(), value.to_owned()));
            }
        }
    }
    Some(factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_templates_read_and_print_and_read_back() {
        let ty = |dims: &[usize]| TensorType::of(DType::F32, dims);
        let scalar = TensorType::scalar(DType::F32);
        let position = TensorType::scalar(DType::I32);
        let key = TensorType::of(DType::U32, &[4]);
        let labels = TensorType::of(DType::I32, &[2, 5]);
        let (x, w, row) = (ty(&[2, 5, 8]), ty(&[8]), ty(&[2, 5]));
        let (q, kv, lse) = (ty(&[2, 5, 4, 8]), ty(&[2, 5, 2, 8]), ty(&[2, 4, 5]));
        for template in templates().values() {
            let operands: Vec<TensorType> = template
                .params
                .iter()
                .map(|(name, pattern)| match (name.as_str(), pattern.dims.len()) {
                    ("q" | "out" | "dout", _) | ("x", 4) => q.clone(),
                    ("k" | "v", 4) => kv.clone(),
                    ("key", _) => key.clone(),
                    ("position", _) => position.clone(),
                    ("labels", _) => labels.clone(),
                    ("lse", 3) => lse.clone(),
                    ("lse" | "mean" | "rstd", _) => row.clone(),
                    ("w" | "b", _) => w.clone(),
                    (_, 0) => scalar.clone(),
                    _ if template.name == "rope" => q.clone(),
                    _ => x.clone(),
                })
                .collect();
            let given = template.attributes.iter().filter(|(_, d)| d.is_none());
            let whole = ["group", "salt", "heads", "query_offset"];
            let value = |n: &str| if whole.contains(&n) { 2.0 } else { 0.5 };
            let given: Attributes = given.map(|(n, _)| (n.clone(), value(n))).collect();
            let mut module = Module::new("library");
            let name = module.composite(&template.name, &given, &operands);
            assert!(name.is_some(), "`{}` does not take {operands:?}", template.name);
            let text = module.to_string();
            let back = crate::text::parse_module("text", &text).unwrap_or_else(|d| {
                panic!("{}\n{text}", crate::diagnostic::render(&d[0], Some(&text)))
            });
            assert_eq!(back, module, "{}", template.name);
        }
    }
}
