//! The library of composites: named idioms, kept as texts in the IR's own form.
//!
//! A template is written for any element type `T`, with `W` for the type in which numbers of that
//! are added (f32 for narrow ones, else `T` itself: casts between equal types vanish), any sizes
//! and, with `..`, any number of leading dims; an instance is a function of the module. Besides its
//! definition a template states the [`bounds`] of its attributes, and may name its gradient
//! composite and its *factors*: the iteration factors along which it can be cut, the units of the
//! cut, which results are partial sums then, and which attributes count from the shard's offset.
//! Its *forms* are further ways to run it on several ranks, with exchanges inside. The planner
//! reads factors and forms as data.
//!
//! Kernels, gradients and factors go by a composite's name, so a module from outside may use a name
//! of the library only for what the library defines: attributes out of bounds are refused, and a
//! composite with another body gets a name of its own.
//!
//! Parts of a text may be guarded by attributes (see `text::guard`): parameters, header lines, the
//! body. An attribute that guards ask for is *optional*: an instance names it only where it is not
//! the default, so that what it adds costs nothing where it is not wanted.

pub mod bounds;
pub(crate) mod check;
mod template;

use std::collections::BTreeMap;
use std::sync::OnceLock;

use crate::module::{Attributes, Function, Kind, Module};
use crate::pass::remove_casts_to_same;
use crate::text::parse::Parser;
use crate::types::TensorType;

use template::read_templates;
pub use template::{Argument, CompositeFactor, Definition, Gradient, Place, Template};

const TEXTS: [(&str, &str); 7] = [
    ("norm.graph", include_str!("library/norm.graph")),
    ("activation.graph", include_str!("library/activation.graph")),
    ("attention.graph", include_str!("library/attention.graph")),
    ("experts.graph", include_str!("library/experts.graph")),
    ("embedding.graph", include_str!("library/embedding.graph")),
    ("loss.graph", include_str!("library/loss.graph")),
    ("optimizer.graph", include_str!("library/optimizer.graph")),
];

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
    instance_of(templates().get(composite)?, given, operands, name)
}

fn instance_of(
    template: &Template,
    given: &Attributes,
    operands: &[TensorType],
    name: &str,
) -> Option<Result<Function, String>> {
    let attributes = template.complete(given)?;
    let definition = template.definition(&attributes);
    let names = definition.bind(template.all(&attributes), operands)?;
    let kind = Kind::Composite { name: template.name.clone(), attributes };
    let mut function = Function::new(name, kind);
    let mut parser = Parser::new(template.source, &definition.text, names);
    parser.skip_newlines();
    let read = parser.params(&mut function);
    let read = read.map(|()| parser.skip_newlines());
    let read = read.and_then(|()| parser.body(&Module::default(), &mut function));
    Some(match read {
        Ok(()) => {
            remove_casts_to_same(&mut function);
            Ok(function)
        }
        Err(_) => {
            let drawn = |d| crate::diagnostic::render(d, Some(&definition.text));
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;

    #[test]
    fn all_templates_read_and_print_and_read_back() {
        let ty = |dims: &[usize]| TensorType::of(DType::F32, dims);
        let scalar = TensorType::scalar(DType::F32);
        let key = TensorType::of(DType::U32, &[4]);
        let labels = TensorType::of(DType::I32, &[2, 5]);
        let (x, w, row) = (ty(&[2, 5, 8]), ty(&[8]), ty(&[2, 5]));
        let (q, kv, lse) = (ty(&[2, 5, 4, 8]), ty(&[2, 5, 2, 8]), ty(&[2, 4, 5]));
        for template in templates().values() {
            let given = template.attributes.iter().filter(|(_, d)| d.is_none());
            let whole = ["group", "salt", "query_offset", "top_k"];
            let value = |n: &str| match n {
                "heads" => 4.0,
                _ if whole.contains(&n) => 2.0,
                _ => 0.5,
            };
            let given: Attributes = given.map(|(n, _)| (n.clone(), value(n))).collect();
            let definition = template.definition(&given);
            let operands: Vec<TensorType> = definition
                .params()
                .map(|(name, ndim)| match (name, ndim) {
                    ("q" | "out" | "dout", _) | ("x", 4) => q.clone(),
                    ("k" | "v", 4) => kv.clone(),
                    ("key", _) => key.clone(),
                    ("position", ndim) => TensorType::of(DType::I32, &[2][..ndim]),
                    ("labels", _) => labels.clone(),
                    ("lse", 3) => lse.clone(),
                    ("lse" | "mean" | "rstd", _) => row.clone(),
                    ("w_gate" | "w_up", _) => ty(&[8, 6, 8]),
                    ("w_down", _) => ty(&[8, 8, 6]),
                    ("w" | "b", _) => w.clone(),
                    (_, 0) => scalar.clone(),
                    _ if template.name.starts_with("rope") => q.clone(),
                    ("shut", _) => TensorType::of(DType::Bool, &[2, 5, 8]),
                    _ => x.clone(),
                })
                .collect();
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

    /// A text with guarded parameters, results, gradient and factors, and two names.
    const GUARDED: &str = "
template scaled(by, shift=0, per_row=0)
also scaled_twice(by, shift=0, per_row=0)
(
  %x: T[B, N],
  when shift {
  %b: T[B if per_row, N],
  }
)
when shift {
gradient scaled_bwd %x %b d%y -> %x %b
} else {
gradient scaled_bwd %x d%y -> %x
}
factor rows %x:0 %y:0 %b:B
factor columns %x:1 %y:1 %b:N
{
  %c: T[B, N] = constant by
  %s = mul %x %c
  when scaled_twice {
  %m = mul %s %c
  } else {
  %m = neg %s
  }
  when shift {
    when per_row {
  %y = add %m %b
    } else {
  %bb: T[B, N] = broadcast new=[0 if not per_row] %b
  %y = add %m %bb
    }
  return %y %s
  } else {
  %y = neg %m
  return %y
  }
}
";

    #[test]
    fn attributes_decide_what_a_guarded_template_says() {
        let templates = read_templates("guarded", GUARDED);
        let names: Vec<&str> = templates.iter().map(|t| t.name.as_str()).collect();
        assert_eq!(names, ["scaled", "scaled_twice"]);
        let ty = |dims: &[usize]| TensorType::of(DType::F64, dims);
        let (x, b) = (ty(&[2, 3]), ty(&[3]));
        let instance = |at: usize, given: &[(&str, f64)], operands: &[TensorType]| {
            let given = given.iter().map(|(name, value)| ((*name).to_owned(), *value));
            let made = instance_of(&templates[at], &given.collect(), operands, "f")?;
            Some(made.unwrap().to_string())
        };
        let plain = instance(0, &[("by", 2.0)], std::slice::from_ref(&x)).unwrap();
        assert!(plain.contains("= scaled(by=2.0) (%x: f64[2, 3])"), "{plain}");
        assert!(plain.contains("neg %s") && plain.contains("neg %m"), "{plain}");
        let same = instance(0, &[("by", 2.0), ("shift", 0.0)], std::slice::from_ref(&x));
        assert_eq!(same, Some(plain));
        let twice = instance(1, &[("by", 2.0)], std::slice::from_ref(&x)).unwrap();
        assert!(twice.contains("%m: f64[2, 3] = mul %s %c"), "{twice}");
        let shifted = instance(0, &[("by", 2.0), ("shift", 1.0)], &[x.clone(), b.clone()]);
        let shifted = shifted.unwrap();
        assert!(
            shifted.contains("scaled(by=2.0, shift=1.0) (%x: f64[2, 3], %b: f64[3])"),
            "{shifted}"
        );
        assert!(shifted.contains("return %y %s"), "{shifted}");
        let given = [("by", 2.0), ("shift", 1.0), ("per_row", 1.0)];
        assert_eq!(instance(0, &given, &[x.clone(), b]), None, "the operand has rows");
        let rows = instance(0, &given, &[x.clone(), x.clone()]).unwrap();
        assert!(rows.contains("per_row=1.0") && rows.contains("add %m %b"), "{rows}");
        assert_eq!(instance(0, &[("by", 2.0)], &[x.clone(), x]), None, "one operand too many");
    }

    #[test]
    fn guards_reach_the_header() {
        let templates = read_templates("guarded", GUARDED);
        let definition = |given: &[&str]| {
            let given = given.iter().map(|name| ((*name).to_owned(), 1.0));
            templates[0].definition(&given.collect()).into_owned()
        };
        let places = |definition: &Definition, factor: usize| {
            let places = definition.factors[factor].places.iter();
            places.map(|p| format!("{}:{}", p.value, p.dim.unwrap())).collect::<Vec<_>>().join(" ")
        };
        let (plain, shared) = (definition(&[]), definition(&["shift"]));
        assert_eq!(plain.gradient.as_ref().unwrap().targets, ["x"]);
        assert_eq!(shared.gradient.as_ref().unwrap().targets, ["x", "b"]);
        assert_eq!(places(&plain, 0), "x:0 y:0");
        assert_eq!(places(&shared, 0), "x:0 y:0");
        assert_eq!(places(&shared, 1), "x:1 y:1 b:0");
        let rows = definition(&["shift", "per_row"]);
        assert_eq!([places(&rows, 0), places(&rows, 1)], ["x:0 y:0 b:0", "x:1 y:1 b:1"]);
        assert!(templates[0].is_optional("shift") && templates[0].is_optional("per_row"));
        assert!(!templates[0].is_optional("by"));
    }
}
