//! What of a template does not depend on sizes and attributes, read off two of its instances.

use crate::library::{Template, read_instance};
use crate::module::{Attributes, Function, ValueId};
use crate::op::Op;
use crate::rewrite::normal_form;

/// Attributes for which a definition has another form, by which it is found too.
#[derive(Debug)]
pub(super) struct Case {
    /// The composite.
    pub(super) composite: &'static str,
    /// The attributes and their values.
    pub(super) fixed: &'static [(&'static str, f64)],
    /// Whether there are as many key heads as query heads.
    pub(super) has_heads_alike: bool,
    /// Whether the form is what the rules make of the definition.
    pub(super) is_simpler: bool,
}

impl Case {
    /// Nothing is fixed.
    pub(super) const ANY: Case = Case::with("", &[]);

    /// Some attributes are fixed, and nothing is simplified.
    pub(super) const fn with(
        composite: &'static str,
        fixed: &'static [(&'static str, f64)],
    ) -> Case {
        Case { composite, fixed, has_heads_alike: false, is_simpler: false }
    }

    fn attributes(&self) -> impl Iterator<Item = (String, f64)> + '_ {
        self.fixed.iter().map(|(name, value)| ((*name).to_owned(), *value))
    }

    /// The definition, as rules simplify it where they do.
    pub(super) fn form(&self, instance: Function) -> Function {
        if self.is_simpler { normal_form(&instance) } else { instance }
    }
}

/// A template as a pattern for any sizes and attributes.
pub(super) struct Skeleton {
    /// The composite's name.
    pub(super) composite: &'static str,
    /// The attributes that are fixed.
    pub(super) case: &'static Case,
    /// An instance for sample types.
    pub(super) function: Function,
    /// For each node, which of its [`numbers`] are the same in every instance.
    pub(super) fixed: Vec<Vec<bool>>,
    /// For each attribute, a node and the place among its numbers where it stands.
    places: Vec<(String, usize, usize)>,
}

impl Skeleton {
    /// The skeleton of a template in a case.
    ///
    /// # Panics
    /// When a template is not one that can be sampled, which a test rules out.
    pub(super) fn of(template: &'static Template, case: &'static Case) -> Skeleton {
        // Sizes are even and attributes are odd, so that they are told apart, and no number of two
        // instances is the same but by being fixed. Attributes are less than sizes, so that no
        // mask is decided.
        let sample = |size: i64, attribute: usize| {
            let names = template.attributes.iter().map(|(name, _)| name.clone());
            let numbers = (0..).map(|at| (attribute + 2 * at) as f64);
            let mut attributes: Attributes = names.zip(numbers).collect();
            attributes.retain(|name, _| !template.is_optional(name));
            attributes.extend(case.attributes());
            let mut types = template.definition(&attributes).sample_types(size);
            if case.has_heads_alike {
                let heads = types[0].dims[2].clone();
                types[1..3].iter_mut().for_each(|ty| ty.dims[2] = heads.clone());
            }
            let name = &template.name;
            match read_instance(name, &attributes, &types, name) {
                Some(Ok(function)) => (attributes, case.form(function)),
                Some(Err(why)) => panic!("a sample of `{name}` does not read:\n{why}"),
                None => panic!("`{name}` does not take its sample"),
            }
        };
        let (attributes, function) = sample(40, 11);
        let (_, other) = sample(140, 61);
        let pairs = function.nodes.iter().zip(&other.nodes);
        let fixed = pairs
            .map(|(a, b)| {
                let numbers = numbers(&a.op).into_iter().zip(numbers(&b.op));
                numbers.map(|(a, b)| a.to_bits() == b.to_bits()).collect()
            })
            .collect();
        let place = |(name, value): (&String, &f64)| {
            let mut nodes = function.nodes.iter().enumerate();
            let (node, at) = nodes.find_map(|(node, found)| {
                let at = numbers(&found.op).iter().position(|number| number == value)?;
                Some((node, at))
            })?;
            Some((name.clone(), node, at))
        };
        let is_open = |(name, _): &(&String, &f64)| case.fixed.iter().all(|(f, _)| f != name);
        let places = attributes.iter().filter(is_open).filter_map(place).collect();
        Skeleton { composite: &template.name, case, function, fixed, places }
    }

    /// The op of the node that makes the first result.
    pub(super) fn root(&self) -> &Op {
        let root = self.function.results[0];
        match self.function.nodes.iter().find(|node| node.results.contains(&root)) {
            Some(made_by) => &made_by.op,
            None => panic!("`{}` does not compute its first result", self.composite),
        }
    }

    /// The attributes of what the skeleton is bound to, where `op` tells the op that makes a value;
    /// the ones that stand nowhere keep their defaults.
    pub(super) fn attributes<'o>(
        &self,
        op: impl Fn(ValueId) -> Option<&'o Op>,
    ) -> Option<Attributes> {
        let read = |(name, node, at): &(String, usize, usize)| {
            let op = op(self.function.nodes[*node].result())?;
            Some((name.clone(), *numbers(op).get(*at)?))
        };
        let mut attributes: Attributes = self.places.iter().map(read).collect::<Option<_>>()?;
        attributes.extend(self.case.attributes());
        Some(attributes)
    }
}

/// The numbers in an op that a size or an attribute may stand for.
#[expect(clippy::wildcard_enum_match_arm, reason = "the other ops have none")]
pub(super) fn numbers(op: &Op) -> Vec<f64> {
    match op {
        Op::Constant { value, .. } => vec![*value],
        Op::Iota { start, .. } | Op::Gather { start, .. } | Op::ScatterAdd { start, .. } => {
            vec![*start as f64]
        }
        Op::Random { salt, start, extent, per_sample, bits, .. } => {
            let start = start.iter().map(|s| *s as f64);
            let extent = extent.iter().map(|e| e.as_constant().map_or(f64::NAN, |e| e as f64));
            let own = [f64::from(*salt), f64::from(*per_sample), f64::from(bits.count())];
            own.into_iter().chain(start).chain(extent).collect()
        }
        Op::FoldKey { salt } => vec![f64::from(*salt)],
        Op::Slice { start, size, .. } => vec![*start as f64, *size as f64],
        Op::Pad { before, after, .. } => vec![*before as f64, *after as f64],
        _ => Vec::new(),
    }
}
