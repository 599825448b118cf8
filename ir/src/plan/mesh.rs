//! The mesh: how ranks are numbered along the axes of parallelism.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::sharding::{Axis, Layout, Sharding};

/// The usual placement, innermost first: tensor-parallel ranks are neighbours, stages far apart.
pub const USUAL_ORDER: [Axis; 4] = [Axis::Tp, Axis::Cp, Axis::Dp, Axis::Pp];

/// How ranks share experts. A rank has whole experts where ranks of `tp` share them too
/// (Megatron-LM's `--expert-tensor-parallel-size 1`), or slices of experts along `tp`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ExpertParallel {
    /// Expert-parallel ranks: they share the experts of a layer.
    pub ep: usize,
    /// Whether these are first all along `tp`, which then share tokens too (sequence parallelism);
    /// else none of them.
    pub takes_tp: bool,
}

impl ExpertParallel {
    /// Every rank has all experts, sliced along `tp`.
    pub const NONE: ExpertParallel = ExpertParallel { ep: 1, takes_tp: false };

    /// Ranks along `cp` and `dp` that share experts.
    pub fn along(ep: usize) -> ExpertParallel {
        ExpertParallel { ep, ..ExpertParallel::NONE }
    }

    /// Of the ranks that share experts, those among the ranks that hold the same other weights:
    /// neighbours along `cp` and `dp`. At least one, also where [`Mesh::besides_experts`] is none.
    pub fn data_ranks(self, mesh: Mesh) -> usize {
        match self.takes_tp {
            true => (self.ep / mesh.tp.max(1)).max(1),
            false => self.ep,
        }
    }
}

/// The logical grid of ranks: the size of each axis, and their nesting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Mesh {
    /// Pipeline stages.
    pub pp: usize,
    /// Data parallelism.
    pub dp: usize,
    /// Context parallelism.
    pub cp: usize,
    /// Tensor parallelism.
    pub tp: usize,
    /// The axes, innermost first: neighbours on the first one have neighbouring numbers.
    pub order: [Axis; 4],
}

impl Default for Mesh {
    fn default() -> Mesh {
        Mesh::ONE
    }
}

impl Mesh {
    /// One rank.
    pub const ONE: Mesh = Mesh { pp: 1, dp: 1, cp: 1, tp: 1, order: USUAL_ORDER };

    /// The number of ranks.
    pub fn ranks(self) -> usize {
        self.pp * self.dp * self.cp * self.tp
    }

    /// The number of ranks, if it can be counted.
    pub fn checked_ranks(self) -> Option<usize> {
        Axis::ALL.into_iter().try_fold(1_usize, |ranks, axis| ranks.checked_mul(self.size(axis)))
    }

    /// The size of an axis; 1 of `ep`, which is none.
    pub fn size(self, axis: Axis) -> usize {
        match axis {
            Axis::Pp => self.pp,
            Axis::Dp => self.dp,
            Axis::Cp => self.cp,
            Axis::Tp => self.tp,
            Axis::Ep => 1,
        }
    }

    /// What ranks that share experts leave of the mesh: `ep` takes all of `tp` or none, and factors
    /// of `cp` and `dp`, innermost first. None where these have no such factors.
    pub fn besides_experts(self, experts: ExpertParallel) -> Option<Mesh> {
        let (mut rest, mut left) = (self, experts.ep);
        if experts.takes_tp {
            left = left.checked_div(self.tp).filter(|data| data * self.tp == left)?;
            rest.tp = 1;
        }
        for axis in self.order {
            let size = match axis {
                Axis::Dp => &mut rest.dp,
                Axis::Cp => &mut rest.cp,
                Axis::Pp | Axis::Tp | Axis::Ep => continue,
            };
            let taken = gcd(*size, left);
            (*size, left) = (*size / taken, left / taken);
        }
        (left == 1).then_some(rest)
    }

    /// The difference of the numbers of two neighbours on an axis.
    pub fn stride(self, axis: Axis) -> usize {
        let inside = self.order.into_iter().take_while(|inner| *inner != axis);
        inside.map(|inner| self.size(inner)).product()
    }

    /// The coordinate of a rank on an axis.
    pub fn coordinate(self, rank: usize, axis: Axis) -> usize {
        rank / self.stride(axis) % self.size(axis)
    }

    /// The rank with another coordinate on one axis, and the same on all others.
    pub fn along(self, rank: usize, axis: Axis, coordinate: usize) -> usize {
        let stride = self.stride(axis);
        rank - self.coordinate(rank, axis) * stride + coordinate * stride
    }

    /// The rank at coordinates on `pp`, `dp`, `cp` and `tp`.
    pub fn rank(self, coordinates: [usize; 4]) -> usize {
        let at = |(axis, coordinate): (Axis, usize)| coordinate * self.stride(axis);
        Axis::ALL.into_iter().zip(coordinates).map(at).sum()
    }

    /// What a sharding says where ranks share experts: one that names `ep` says it of what `ep`
    /// leaves of the mesh.
    pub fn relevant_besides(self, experts: ExpertParallel, sharding: &Sharding) -> Sharding {
        let names_experts = sharding.on(Axis::Ep) != Layout::Replicated;
        let rest = if names_experts { self.besides_experts(experts) } else { Some(self) };
        rest.unwrap_or(self).relevant(sharding)
    }

    /// What a sharding says on this mesh: on an axis of one rank every value is whole. What is cut
    /// over experts stays so.
    pub fn relevant(self, sharding: &Sharding) -> Sharding {
        let is_of_several = |(axis, _): &(Axis, Layout)| self.size(*axis) > 1 || *axis == Axis::Ep;
        Sharding::new(sharding.layouts().filter(is_of_several))
    }

    /// The ranks that hold the same weights: those along `dp` and `cp`.
    pub fn data_ranks(self) -> usize {
        self.dp * self.cp
    }

    /// The number of a rank among those that hold its weights: `cp` is counted first.
    pub fn data_index(self, rank: usize) -> usize {
        self.coordinate(rank, Axis::Dp) * self.cp + self.coordinate(rank, Axis::Cp)
    }

    /// Of the ranks that hold the weights of `rank`, the one with a number.
    pub fn along_data(self, rank: usize, index: usize) -> usize {
        self.along(self.along(rank, Axis::Dp, index / self.cp), Axis::Cp, index % self.cp)
    }

    /// Whether `count` neighbours among the ranks that hold the same weights can have one copy of
    /// them: whole samples of some, or whole shares of one.
    pub fn has_shards_of(self, count: usize) -> bool {
        let fits = |a: usize, b: usize| a.checked_rem(b) == Some(0);
        fits(self.data_ranks(), count) && (fits(count, self.cp) || fits(self.cp, count))
    }

    /// The number of classes of ranks: data-parallel ranks run one program.
    pub fn classes(self) -> usize {
        self.pp * self.cp * self.tp
    }

    /// The class of a rank: stages outermost, then places on `cp`, then on `tp`.
    pub fn class_of(self, rank: usize) -> usize {
        self.class_at([Axis::Pp, Axis::Cp, Axis::Tp].map(|axis| self.coordinate(rank, axis)))
    }

    /// The class at a place on `pp`, `cp` and `tp`.
    pub fn class_at(self, [stage, context, tensor]: [usize; 3]) -> usize {
        (stage * self.cp + context) * self.tp + tensor
    }

    /// The coordinates of a class on `pp`, `cp` and `tp`.
    pub fn class_coordinates(self, class: usize) -> [usize; 3] {
        [class / self.tp / self.cp, class / self.tp % self.cp, class % self.tp]
    }

    /// The class at the same place of another stage.
    pub fn on_stage(self, class: usize, stage: usize) -> usize {
        let of_stage = self.cp * self.tp;
        stage * of_stage + class % of_stage
    }

    /// The first data-parallel rank of a class.
    pub fn first_of_class(self, class: usize) -> usize {
        let [stage, context, tensor] = self.class_coordinates(class);
        self.rank([stage, 0, context, tensor])
    }
}

impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[pp={}, dp={}, ", self.pp, self.dp)?;
        if self.cp != 1 {
            write!(f, "cp={}, ", self.cp)?;
        }
        write!(f, "tp={}]", self.tp)?;
        if self.order != USUAL_ORDER {
            write!(f, " order {}", self.order.map(Axis::name).join("."))?;
        }
        Ok(())
    }
}

/// The greatest common divisor (gcd); `a` is not 0.
fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Reads a nesting of the axes, innermost first: `tp.cp.dp.pp`.
pub fn parse_order(text: &str) -> Option<[Axis; 4]> {
    let axes: Vec<Axis> = text.split('.').map(Axis::parse).collect::<Option<_>>()?;
    let order: [Axis; 4] = axes.try_into().ok()?;
    Axis::ALL.into_iter().all(|axis| order.contains(&axis)).then_some(order)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every rank has coordinates of its own, and its class those of its program.
    #[test]
    fn ranks_are_numbered_once() {
        let meshes = [
            Mesh { pp: 2, dp: 3, cp: 2, tp: 4, ..Mesh::ONE },
            Mesh { pp: 3, dp: 2, cp: 5, tp: 2, order: [Axis::Dp, Axis::Pp, Axis::Tp, Axis::Cp] },
        ];
        for mesh in meshes {
            let mut seen = vec![0; mesh.classes()];
            for rank in 0..mesh.ranks() {
                let at = Axis::ALL.map(|axis| mesh.coordinate(rank, axis));
                assert_eq!(mesh.rank(at), rank, "{mesh}");
                let class = mesh.class_of(rank);
                assert_eq!(mesh.class_coordinates(class), [at[0], at[2], at[3]], "{mesh}");
                assert_eq!(mesh.along(rank, Axis::Dp, 0), mesh.first_of_class(class), "{mesh}");
                let next = (at[0] + 1) % mesh.pp;
                let neighbour = mesh.class_of(mesh.along(rank, Axis::Pp, next));
                assert_eq!(mesh.on_stage(class, next), neighbour, "{mesh}");
                let data = mesh.data_index(rank);
                assert_eq!(mesh.along_data(rank, data), rank, "{mesh}");
                let other = mesh.along_data(rank, (data + 1) % mesh.data_ranks());
                assert_eq!(mesh.data_index(other), (data + 1) % mesh.data_ranks(), "{mesh}");
                assert_eq!(mesh.coordinate(other, Axis::Tp), at[3], "{mesh}");
                seen[class] += 1;
            }
            assert!(seen.iter().all(|ranks| *ranks == mesh.dp), "{mesh}: {seen:?}");
        }
        assert_eq!(Mesh { dp: 2, tp: 3, ..Mesh::ONE }.coordinate(4, Axis::Tp), 1);
    }

    #[test]
    fn experts_take_the_innermost_factors() {
        let mesh = Mesh { pp: 2, dp: 6, cp: 4, tp: 8, ..Mesh::ONE };
        let all = |mesh: Mesh, ep, takes_tp| {
            let rest = mesh.besides_experts(ExpertParallel { ep, takes_tp });
            rest.map(|rest| [rest.dp, rest.cp, rest.tp])
        };
        let rest = |mesh: Mesh, ep| all(mesh, ep, false).map(|[dp, cp, _]| [dp, cp]);
        assert_eq!(rest(mesh, 1), Some([6, 4]));
        assert_eq!(rest(mesh, 2), Some([6, 2]));
        assert_eq!(rest(mesh, 8), Some([3, 1]));
        assert_eq!(rest(mesh, 24), Some([1, 1]));
        assert_eq!(rest(mesh, 5), None);
        let outside = Mesh { order: [Axis::Tp, Axis::Dp, Axis::Cp, Axis::Pp], ..mesh };
        assert_eq!(rest(outside, 2), Some([3, 4]));
        assert_eq!(all(mesh, 8, false), Some([3, 1, 8]));
        assert_eq!(all(mesh, 8, true), Some([6, 4, 1]));
        assert_eq!(all(mesh, 64, true), Some([3, 1, 1]));
        assert_eq!(all(mesh, 4, true), None);
        assert_eq!(all(mesh, 8 * 5, true), None);
        let data = |ep, takes_tp| ExpertParallel { ep, takes_tp }.data_ranks(mesh);
        assert_eq!([data(8, false), data(8, true), data(64, true)], [8, 1, 8]);
    }
}
