//! What of a template does not depend on sizes and attributes, read off two of its instances.

use crate::library::{Template, read_instance};
use crate::module::{Attributes, Function, ValueId};
use crate::op::Op;

/// A template as a pattern for any sizes and attributes.
pub(super) struct Skeleton {
    /// The composite's name.
    pub(super) composite: String,
    /// An instance for sample types.
    pub(super) function: Function,
    /// For each node, which of its [`numbers`] are the same in every instance.
    pub(super) fixed: Vec<Vec<bool>>,
    /// For each attribute, a node and the place among its numbers where it stands.
    places: Vec<(String, usize, usize)>,
}

impl Skeleton {
    /// The skeleton of a template.
    ///
    /// # Panics
    /// When a template is not one that can be sampled, which a test rules out.
    pub(super) fn of(template: &Template) -> Skeleton {
        // Sizes are even and attributes are odd, so that they are told apart, and no number of two
        // instances is the same but by being fixed.
        let sample = |size: i64, attribute: usize| {
            let names = template.attributes.iter().map(|(name, _)| name.clone());
            let numbers = (0..).map(|at| (attribute + 2 * at) as f64);
            let attributes: Attributes = names.zip(numbers).collect();
            let types = template.sample_types(size);
            let name = &template.name;
            match read_instance(name, &attributes, &types, name) {
                Some(Ok(function)) => (attributes, function),
                Some(Err(why)) => panic!("a sample of `{name}` does not read:\n{why}"),
                None => panic!("`{name}` does not take its sample"),
            }
        };
        let (attributes, function) = sample(40, 1009);
        let (_, other) = sample(140, 2009);
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
        let places = attributes.iter().filter_map(place).collect();
        Skeleton { composite: template.name.clone(), function, fixed, places }
    }

    /// The attributes of what the skeleton is bound to; the ones that stand nowhere keep their
    /// defaults.
    pub(super) fn attributes(
        &self,
        function: &Function,
        bound: &[Option<ValueId>],
    ) -> Option<Attributes> {
        let read = |(name, node, at): &(String, usize, usize)| {
            let value = bound[self.function.nodes[*node].result().index()]?;
            let made_by = function.nodes.iter().find(|node| node.results.contains(&value))?;
            Some((name.clone(), *numbers(&made_by.op).get(*at)?))
        };
        self.places.iter().map(read).collect()
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
        Op::Random { salt, start, extent, .. } => {
            let start = start.iter().map(|s| *s as f64);
            let extent = extent.iter().map(|e| e.as_constant().map_or(f64::NAN, |e| e as f64));
            [f64::from(*salt)].into_iter().chain(start).chain(extent).collect()
        }
        Op::FoldKey { salt } => vec![f64::from(*salt)],
        Op::Slice { start, size, .. } => vec![*start as f64, *size as f64],
        Op::Pad { before, after, .. } => vec![*before as f64, *after as f64],
        _ => Vec::new(),
    }
}
