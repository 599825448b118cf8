//! The device functions of products: which tile program computes one.

use ir::DType;
use ir::target::Arch;

use super::aligned::aligned;
use super::rows;
use crate::cuda::function::{Function, Functions};
use crate::cuda::grouped::Grouped;
use crate::cuda::parameter::{Buffer, Parameter};
use crate::cuda::product::{ProductTile, THREADS};
use crate::cuda::scales::ScaleParameters;
use crate::cuda::shared::Operand;
use crate::cuda::slices::{self, SliceSum};
use crate::cuda::tensor::{self, Elements, TensorTile};
use crate::cuda::tickets::{COUNTERS, tickets};
use crate::cuda::tile::Tile;
use crate::cuda::warpgroup::WarpgroupTile;
use crate::kernel::{Product, Products, Source};

/// Adds the functions of a product of two buffers, behind which are their scales where there are
/// some; with others that are added to it.
pub(super) fn function(
    what: &str,
    product: &Product,
    (factors, c): (&[Parameter], Parameter),
    others: [Option<Parameter>; 2],
    (all, arch): (&mut Functions, Option<Arch>),
) {
    let (a, b, scales) = (factors[0], factors[1], &factors[2..]);
    let by_warpgroups = arch == Some(Arch::Sm90a)
        && tensor::fits(product, Arch::Sm90a).is_some_and(|of| on_warpgroups(product, of));
    let (product, [a, b]) = match by_warpgroups {
        true => aligned(what, product, [a, b], all),
        false => (product.clone(), [a, b]),
    };
    let product = &product;
    let slices = arch.filter(|arch| tensor::fits(product, *arch).is_some());
    let is_split = slices.and_then(|_| slices::workspace(product)).is_some();
    let by_tickets = is_split && tickets(product).is_some();
    let workspace =
        Parameter { buffer: Buffer::Workspace(all.workspaces.len()), dtype: DType::F32 };
    let with_others = |mut parameters: Vec<Parameter>| {
        let added = others.map(|parameter| {
            parameter.map(|parameter| {
                parameters.push(parameter);
                parameters.len() - 1
            })
        });
        (parameters, added)
    };
    let mut own = vec![a, b, c];
    own.extend(is_split.then_some(workspace));
    own.extend(by_tickets.then_some(COUNTERS));
    own.extend(scales);
    let own_count = own.len();
    let (mut parameters, added) = with_others(own);
    let BlockTiles { tile, tiles, threads } = BlockTiles::of(product, added, arch);
    let mut product = product.clone();
    if let Tile::Tensor(tile) = &tile {
        // As tensor cores compute it, an image may be the first operand.
        product = tile.product.clone();
        if tile.image == Some(Operand::A) {
            parameters.swap(0, 1);
        }
    }
    let tiles: u64 = tiles.iter().map(|tiles| *tiles as u64).product();
    let mut function = Function {
        what: what.to_owned(),
        parameters,
        offsets: Vec::new(),
        grid: tiles,
        threads,
        tile,
    };
    if !is_split {
        all.functions.push(function);
        return;
    }
    all.workspaces.push(slices::bytes(&product));
    function.grid *= product.tiling.split as u64;
    if by_tickets {
        all.tickets = all.tickets.max(tiles);
        all.functions.push(function);
        return;
    }
    function.parameters.truncate(own_count);
    let (parameters, [bias, addend]) = with_others(vec![workspace, c]);
    let sum = SliceSum { product, bias, addend };
    all.functions.extend([function, slice_sum(sum, what, parameters)]);
}

/// Whether `wgmma` multiplies elements of a product that tensor cores do: those of two bytes or of
/// one, unless an operand is an image.
fn on_warpgroups(product: &Product, elements: Elements) -> bool {
    product.borders.is_empty() && matches!(elements, Elements::Halves | Elements::Bytes)
}

/// The function that adds slices, given the workspace, the result and what is added to it.
fn slice_sum(sum: SliceSum, what: &str, parameters: Vec<Parameter>) -> Function {
    let [batch, m, n, _] = sum.product.sizes();
    Function {
        what: format!("{what}: slices"),
        parameters,
        offsets: Vec::new(),
        grid: ((batch * m * n) as u64).div_ceil(slices::THREADS),
        threads: slices::THREADS as u32,
        tile: Tile::SliceSum(sum),
    }
}

/// The block tiles of a product.
pub(super) struct BlockTiles {
    pub(super) tile: Tile,
    /// Along batch, m and n.
    pub(super) tiles: [usize; 3],
    pub(super) threads: u32,
}

impl BlockTiles {
    /// Those of a product, given the numbers of parameters that are added to it.
    fn of(product: &Product, added: [Option<usize>; 2], arch: Option<Arch>) -> BlockTiles {
        let [bias, addend] = added;
        let fitting = arch.and_then(|arch| Some((arch, tensor::fits(product, arch)?)));
        let Some((arch, elements)) = fitting else {
            let scales = ScaleParameters::of(product, 3);
            let tile =
                ProductTile { product: product.clone(), bias, addend, scales, grouped: None };
            let tiles = tile.tiles();
            return BlockTiles { tile: Tile::Product(tile), tiles, threads: THREADS };
        };
        if arch == Arch::Sm90a && on_warpgroups(product, elements) {
            let tile = WarpgroupTile::of(product, added);
            let (tiles, threads) = (tile.tiles(), tile.threads());
            return BlockTiles { tile: Tile::Warpgroup(tile), tiles, threads };
        }
        let tile = TensorTile::of(product, elements, added, None);
        let (tiles, threads) = (tile.tiles(), tile.threads());
        BlockTiles { tile: Tile::Tensor(tile), tiles, threads }
    }
}

impl BlockTiles {
    /// Those of a product of the rows of experts.
    pub(super) fn of_experts(
        product: &Product,
        grouped: Grouped,
        arch: Option<Arch>,
    ) -> BlockTiles {
        let fitting = arch.and_then(|arch| Some((arch, tensor::fits(product, arch)?)));
        if let Some((arch, elements)) = fitting {
            if arch == Arch::Sm90a && on_warpgroups(product, elements) {
                let tile = WarpgroupTile::of_experts(product, grouped);
                return BlockTiles {
                    tiles: tile.tiles(),
                    threads: tile.threads(),
                    tile: Tile::Warpgroup(tile),
                };
            }
            let tile = TensorTile::of(product, elements, [None; 2], Some(grouped));
            return BlockTiles {
                tiles: tile.tiles(),
                threads: tile.threads(),
                tile: Tile::Tensor(tile),
            };
        }
        let tile = ProductTile {
            product: product.clone(),
            bias: None,
            addend: None,
            scales: None,
            grouped: Some(grouped),
        };
        let tiles = tile.tiles();
        BlockTiles { tile: Tile::Product(tile), tiles, threads: THREADS }
    }

    /// Runs of columns whose parts of the gradients of gates are stored.
    pub(super) fn parts(&self) -> usize {
        if let Tile::Tensor(tile) = &self.tile { tile.parts() } else { self.tiles[2] }
    }
}

/// Several products, and the programs on their results.
pub(super) fn functions(
    what: &str,
    products: &Products,
    inputs: &[Parameter],
    outputs: &[Parameter],
    (all, arch): (&mut Functions, Option<Arch>),
) {
    let mut beside = products.parts.len();
    for (at, part) in products.parts.iter().enumerate() {
        let operand = |number: usize| inputs[number];
        let factors: Vec<Parameter> = part.factors().map(operand).collect();
        let added = [part.bias, part.addend].map(|number| number.map(operand));
        let what_part = &format!("{what}: part {at}");
        function(what_part, &part.product, (&factors, outputs[at]), added, (all, arch));
        let Some(then) = &part.then else { continue };
        let read: Vec<Parameter> = then
            .inputs
            .iter()
            .map(|source| match source {
                Source::Operand(number) => inputs[*number],
                Source::Result(number) => outputs[*number],
            })
            .collect();
        let mut written: Vec<Parameter> =
            outputs[at..].iter().take(usize::from(part.in_place)).copied().collect();
        let more = part.beside().len();
        written.extend(&outputs[beside..beside + more]);
        beside += more;
        let what = &format!("{what}: then {at}");
        rows::functions(what, &then.rows, &read, &written, (all, arch));
    }
}
