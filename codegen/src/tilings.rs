//! Tilings of products: how tensor cores of the target sum them, from sizes that are not sharded.
//!
//! They follow from the whole function, so that ranks that share a product sum alike, and have the
//! bits of one rank that has all of it. Products are told by the names of their results, which the
//! cut over ranks and into pieces keeps.

use std::collections::BTreeMap;

use ir::op::Einsum;
use ir::target::{Arch, Target};
use ir::{DType, Function, Node, Op, TensorType};
use kernels::cuda::tiling;
use kernels::{Product, Tiling};

use crate::chunk::stem;

/// The tilings of a function's products: the default ones where no GPU is compiled for.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tilings {
    arch: Option<Arch>,
    /// Points of batch, m and n over all ranks, by the name of a product's result.
    wholes: BTreeMap<String, [usize; 3]>,
}

impl Tilings {
    /// Those of a function that is not sharded, whose sizes are bound. O(nodes).
    pub fn of(function: &Function, target: Option<Target>) -> Tilings {
        let Some(arch) = target.and_then(Target::arch) else { return Tilings::default() };
        let whole = |node: &Node| {
            let Op::Contract(einsum) = &node.op else { return None };
            let value = function.value(node.result());
            Some((value.name.clone(), points(einsum, &value.ty)?))
        };
        Tilings { arch: Some(arch), wholes: function.nodes.iter().filter_map(whole).collect() }
    }

    /// The tiling of a rank's product, whose result has a name. What the whole function does not
    /// name is not sharded.
    pub(crate) fn tiling(&self, name: &str, product: &Product) -> Tiling {
        let Some(arch) = self.arch.filter(|_| product.dtype == DType::F32) else {
            return Tiling::default();
        };
        let known = self.wholes.get(name).or_else(|| self.wholes.get(stem(name)?));
        let [batch, m, n, k] = product.sizes();
        tiling(arch, known.copied().unwrap_or([batch, m, n]), k)
    }
}

/// Points of batch, m and n of a product with a result of a type.
fn points(einsum: &Einsum, result: &TensorType) -> Option<[usize; 3]> {
    let mut points = [1; 3];
    for (letter, size) in einsum.result.iter().zip(result.sizes()?) {
        let group = match (einsum.a.contains(letter), einsum.b.contains(letter)) {
            (true, true) => 0,
            (true, false) => 1,
            _ => 2,
        };
        points[group] *= size;
    }
    Some(points)
}

#[cfg(test)]
mod tests {
    use ir::build::Builder;
    use ir::target::InstructionSet;
    use ir::{Axis, Kind, Layout, Module, Sharding};
    use kernels::{Family, Kernel};

    use super::*;
    use crate::lower::{KernelTable, Slots, lower_routine};
    use crate::partition::{Place, Shardings, partition};
    use crate::unsharded::Unsharded;

    /// `y = x w`.
    fn layer(rows: usize) -> (Module, Function) {
        let mut module = Module::default();
        let mut b = Builder::new(&mut module, "f", Kind::Layer);
        let mut param =
            |name: &str, sizes: [usize; 2]| b.param(name, TensorType::of(DType::BF16, &sizes));
        let [x, w] = [param("x", [rows, 8192]), param("w", [8192, 1024])];
        let y = b.contract("y", "ij,jk->ik", x, w);
        let function = b.into_function(&[y]);
        (module, function)
    }

    /// The sizes and tilings of the products of ranks that have columns of `w` and `y` each.
    fn tilings(rows: usize, tp: usize, target: Option<Target>) -> Vec<([usize; 4], Tiling)> {
        let (module, function) = layer(rows);
        let columns = || Sharding::new([(Axis::Tp, Layout::cut(1))]);
        let shardings: Shardings =
            ["w", "y"].map(|name| (name.to_owned(), columns())).into_iter().collect();
        let tilings = Tilings::of(&function, target);
        let whole = Unsharded { target, tilings, ..Unsharded::default() };
        let of_rank = |rank: usize| {
            let (sizes, coordinates) = ([1, 1, 1, tp], [0, 0, 0, rank]);
            let place = Place { sizes, coordinates, takes_tp: false, microbatch_size: 1, target };
            let local = partition(&module, &function, &shardings, place).expect("it is cut");
            let mut table = KernelTable::default();
            let own = (&local.function, &local.module);
            lower_routine(own, (&[], &whole), Slots::default(), &mut table)
                .expect("it has kernels");
            let product = |kernel: &Kernel| {
                let Kernel::Product(product) = kernel else { return None };
                Some((product.sizes(), product.tiling))
            };
            table.kernels.iter().find_map(product).expect("a product")
        };
        (0..tp).map(of_rank).collect()
    }

    /// Ranks that share a product tile it as one rank does that has all of it, and not as their
    /// parts would be tiled by themselves.
    #[test]
    fn ranks_tile_their_parts_as_the_whole() {
        for arch in [Arch::Sm80, Arch::Sm90a] {
            let target = Some(Target::Cuda(arch));
            let [(_, whole)] = tilings(512, 1, target)[..] else { panic!("one rank") };
            assert!(whole.split > 1 && whole.family == Family::Wide, "{whole:?}");
            for tp in [2, 4] {
                for ([batch, m, n, k], part) in tilings(512, tp, target) {
                    assert_eq!((part, n), (whole, 1024 / tp), "{arch}, tp={tp}");
                    assert_ne!(tiling(arch, [batch, m, n], k), whole, "{arch}, tp={tp}");
                }
            }
            let [(_, skinny)] = tilings(16, 1, target)[..] else { panic!("one rank") };
            assert_eq!(skinny.family, Family::Skinny);
            assert!(tilings(16, 4, target).iter().all(|(_, part)| *part == skinny));
        }
        let cpu = Some(Target::Cpu(InstructionSet::Amx));
        assert_eq!(tilings(512, 2, cpu)[1].1, Tiling::default());
    }
}
