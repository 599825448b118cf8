//! What follows from a function that is not sharded, so that all ranks that share it decide alike.

use ir::{Axis, Function, Target};

use crate::chunk::Wide;
use crate::partition::{Place, Shardings};
use crate::tilings::Tilings;

/// Decisions that are the same on all ranks, whatever their shards are like.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Unsharded {
    /// What kernels are compiled for; none where CPUs alone run them.
    pub(crate) target: Option<Target>,
    /// What is computed in pieces of its rows.
    pub(crate) wide: Wide,
    /// Whether the function is one of these pieces.
    pub(crate) is_piece: bool,
    /// How products are summed.
    pub(crate) tilings: Tilings,
}

impl Unsharded {
    /// Those of a function whose sizes are bound, for the ranks of a place. O(nodes).
    pub(crate) fn of(function: &Function, shardings: &Shardings, place: Place) -> Unsharded {
        let Place { sizes: [dp, _, cp, tp], target, .. } = place;
        let tokens = |name: &str| shardings.get(name)?.on(Axis::Cp).cut_dim();
        let wide = Wide::of_ranks(function, &tokens, [dp, cp, tp], target);
        Unsharded { target, wide, tilings: Tilings::of(function, target), is_piece: false }
    }

    /// Those of one of the pieces: it is not cut again.
    pub(crate) fn of_piece(&self) -> Unsharded {
        Unsharded { wide: Wide::default(), is_piece: true, ..self.clone() }
    }
}
