//! How a value lies on the axes of the mesh.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::op::Combiner;

pub use crate::pieces::{Piece, PieceOrder, largest_piece, pieces};

/// An axis of the mesh, outermost first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Axis {
    /// Pipeline stages.
    Pp,
    /// Data parallelism.
    Dp,
    /// Context parallelism.
    Cp,
    /// Tensor parallelism.
    Tp,
    /// Expert parallelism: none of the mesh, but factors of its axes. In a sharding that names it,
    /// the other axes stand for what it leaves of them (see `Mesh::besides_experts`).
    Ep,
}

impl Axis {
    /// All axes of a mesh, outermost first.
    pub const ALL: [Axis; 4] = [Axis::Pp, Axis::Dp, Axis::Cp, Axis::Tp];

    /// The name in texts and flags.
    pub fn name(self) -> &'static str {
        match self {
            Axis::Pp => "pp",
            Axis::Dp => "dp",
            Axis::Cp => "cp",
            Axis::Tp => "tp",
            Axis::Ep => "ep",
        }
    }

    /// Where the pieces lie of a dim that is cut over it.
    pub fn piece_order(self) -> PieceOrder {
        match self {
            Axis::Cp => PieceOrder::Zigzag,
            Axis::Pp | Axis::Dp | Axis::Tp | Axis::Ep => PieceOrder::Ascending,
        }
    }

    /// The axis of a mesh of a name.
    pub fn parse(name: &str) -> Option<Axis> {
        Axis::ALL.into_iter().find(|axis| axis.name() == name)
    }

    /// The axis of a name in a sharding.
    fn parse_of_sharding(name: &str) -> Option<Axis> {
        Axis::parse(name).or_else(|| (name == Axis::Ep.name()).then_some(Axis::Ep))
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How a value lies on one axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Layout {
    /// Every rank has the whole.
    Replicated,
    /// Each rank has a range of one dim, in whole units.
    Cut {
        /// The dim.
        dim: usize,
        /// Elements of a unit.
        unit: usize,
    },
    /// Each rank has a term of the value.
    Partial(Combiner),
}

impl Layout {
    /// A cut in units of one element.
    pub fn cut(dim: usize) -> Layout {
        Layout::Cut { dim, unit: 1 }
    }

    /// The dim that is cut.
    pub fn cut_dim(self) -> Option<usize> {
        match self {
            Layout::Cut { dim, .. } => Some(dim),
            Layout::Replicated | Layout::Partial(_) => None,
        }
    }
}

/// How a value lies on the axes; axes that are not named hold it replicated.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Default)]
pub struct Sharding(Vec<(Axis, Layout)>);

impl Sharding {
    /// A sharding from the layouts per axis.
    pub fn new(layouts: impl IntoIterator<Item = (Axis, Layout)>) -> Sharding {
        let kept = layouts.into_iter().filter(|(_, layout)| *layout != Layout::Replicated);
        let mut layouts: Vec<_> = kept.collect();
        layouts.sort();
        Sharding(layouts)
    }

    /// How the value lies on an axis.
    pub fn on(&self, axis: Axis) -> Layout {
        let found = self.0.iter().find(|(a, _)| *a == axis);
        found.map_or(Layout::Replicated, |(_, layout)| *layout)
    }

    /// The axes on which the value is not replicated.
    pub fn layouts(&self) -> impl Iterator<Item = (Axis, Layout)> {
        self.0.iter().copied()
    }

    /// The text form for a value of `ndim` dims, such as
    /// `[dim0 @ dp, *, dim2 @ tp unit 64] partial sum tp`.
    pub fn display(&self, ndim: usize) -> String {
        let mut dims = vec![String::new(); ndim];
        let mut partial = String::new();
        for (axis, layout) in &self.0 {
            match layout {
                Layout::Cut { dim, unit } => {
                    let unit = if *unit == 1 { String::new() } else { format!(" unit {unit}") };
                    let lead =
                        if dims[*dim].is_empty() { format!("dim{dim} @ ") } else { " + ".into() };
                    dims[*dim] += &format!("{lead}{axis}{unit}");
                }
                Layout::Partial(combiner) => {
                    partial += &format!(" partial {} {axis}", combiner.name());
                }
                Layout::Replicated => {}
            }
        }
        let dims: Vec<&str> = dims.iter().map(|d| if d.is_empty() { "*" } else { d }).collect();
        format!("[{}]{partial}", dims.join(", "))
    }

    /// Reads the text form.
    pub fn parse(text: &str) -> Option<Sharding> {
        let (dims, partial) = text.trim().strip_prefix('[')?.split_once(']')?;
        let mut layouts = Vec::new();
        for (dim, cuts) in dims.split(',').map(str::trim).enumerate() {
            if cuts == "*" || cuts.is_empty() {
                continue;
            }
            let cuts = cuts.strip_prefix(&format!("dim{dim} @ "))?;
            for cut in cuts.split(" + ") {
                let (axis, unit) = match cut.split_once(" unit ") {
                    Some((axis, unit)) => (axis, unit.parse().ok().filter(|u| *u > 0)?),
                    None => (cut, 1),
                };
                layouts.push((Axis::parse_of_sharding(axis)?, Layout::Cut { dim, unit }));
            }
        }
        let words: Vec<&str> = partial.split_whitespace().collect();
        for clause in words.chunks(3) {
            let [keyword, combiner, axis] = clause else { return None };
            let combiner = Combiner::ALL.into_iter().find(|c| c.name() == *combiner)?;
            (*keyword == "partial").then_some(())?;
            layouts.push((Axis::parse_of_sharding(axis)?, Layout::Partial(combiner)));
        }
        Some(Sharding::new(layouts))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_reads_back() {
        let sharding = Sharding::new([
            (Axis::Dp, Layout::cut(0)),
            (Axis::Tp, Layout::Cut { dim: 2, unit: 64 }),
        ]);
        assert_eq!(sharding.display(3), "[dim0 @ dp, *, dim2 @ tp unit 64]");
        assert_eq!(Sharding::parse(&sharding.display(3)), Some(sharding));
        let partial = Sharding::new([
            (Axis::Dp, Layout::Partial(Combiner::Sum)),
            (Axis::Tp, Layout::Partial(Combiner::Sum)),
        ]);
        let expert = "[dim0 @ ep, dim1 @ tp] partial sum dp";
        assert_eq!(Sharding::parse(expert).map(|s| s.display(2)).as_deref(), Some(expert));
        assert_eq!(partial.display(0), "[] partial sum dp partial sum tp");
        assert_eq!(Sharding::parse(&partial.display(0)), Some(partial));
    }
}
