//! The tile program of a device function: what each thread does, with every size decided.

use std::fmt;

use super::attention::{AttentionTile, Part};
use super::flash::FlashTile;
use super::flash_backward::FlashBackward;
use super::flash_warpgroup::FlashWarpgroup;
use super::flash_warpgroup_backward::FlashWarpgroupBackward;
use super::lines::LineTile;
use super::moves::Move;
use super::parameter::Parameter;
use super::product::ProductTile;
use super::reduction::{PartialSums, RowReduction};
use super::routing::RoutingTile;
use super::rows::Elementwise;
use super::slices::SliceSum;
use super::tensor::TensorTile;
use super::tensor_map::TensorMap;
use super::text::{Text, element};
use super::warpgroup::WarpgroupTile;

/// A tile program.
#[derive(Clone, Debug, PartialEq)]
pub enum Tile {
    /// A fused loop over rows without reductions.
    Elementwise(Elementwise),
    /// A fused loop over rows with reductions.
    RowReduction(RowReduction),
    /// The second pass of column and total sums.
    PartialSums(PartialSums),
    /// A matrix product on CUDA cores.
    Product(ProductTile),
    /// A matrix product on tensor cores.
    Tensor(TensorTile),
    /// A matrix product on tensor cores that warpgroups share.
    Warpgroup(WarpgroupTile),
    /// The second pass of a product whose slices of k are summed by blocks of their own.
    SliceSum(SliceSum),
    /// A part of attention or its gradient.
    Attention(AttentionTile),
    /// Attention on tensor cores.
    Flash(FlashTile),
    /// Attention on tensor cores that warpgroups share.
    FlashWarpgroup(FlashWarpgroup),
    /// Its gradient on tensor cores, but for that of the bias.
    FlashBackward(FlashBackward),
    /// The same on tensor cores that warpgroups share.
    FlashWarpgroupBackward(FlashWarpgroupBackward),
    /// An operation along a dim.
    Lines(LineTile),
    /// Elements that are moved.
    Move(Move),
    /// A step of routed experts but for their products.
    Routing(RoutingTile),
}

impl Tile {
    /// Whether threads of a block synchronise.
    pub fn synchronizes(&self) -> bool {
        match self {
            Tile::RowReduction(_)
            | Tile::PartialSums(_)
            | Tile::Product(_)
            | Tile::Tensor(_)
            | Tile::Warpgroup(_)
            | Tile::Flash(_)
            | Tile::FlashWarpgroup(_)
            | Tile::FlashBackward(_)
            | Tile::FlashWarpgroupBackward(_) => true,
            Tile::Attention(tile) => tile.part != Part::Bias,
            Tile::Move(tile) => tile.synchronizes(),
            Tile::Routing(tile) => tile.synchronizes(),
            Tile::Elementwise(_) | Tile::SliceSum(_) | Tile::Lines(_) => false,
        }
    }

    /// Whether fewer blocks compute the same, each several tiles.
    pub fn is_persistent(&self) -> bool {
        match self {
            Tile::Warpgroup(tile) => tile.is_persistent(),
            Tile::Elementwise(_)
            | Tile::RowReduction(_)
            | Tile::PartialSums(_)
            | Tile::Product(_)
            | Tile::Tensor(_)
            | Tile::SliceSum(_)
            | Tile::Attention(_)
            | Tile::Flash(_)
            | Tile::FlashWarpgroup(_)
            | Tile::FlashBackward(_)
            | Tile::FlashWarpgroupBackward(_)
            | Tile::Lines(_)
            | Tile::Move(_)
            | Tile::Routing(_) => false,
        }
    }

    /// Blocks that have each other's shared memory.
    pub fn cluster(&self) -> u32 {
        let Tile::RowReduction(tile) = self else { return 1 };
        tile.cluster
    }

    /// Whether blocks pass each other numbers by counters in global memory: they take turns or
    /// tickets.
    pub(super) fn passes(&self) -> bool {
        match self {
            Tile::FlashBackward(_) | Tile::FlashWarpgroupBackward(_) => true,
            Tile::Tensor(tile) => tile.tickets.is_some(),
            Tile::Warpgroup(tile) => tile.tickets.is_some(),
            Tile::Elementwise(_)
            | Tile::RowReduction(_)
            | Tile::PartialSums(_)
            | Tile::Product(_)
            | Tile::SliceSum(_)
            | Tile::Attention(_)
            | Tile::Flash(_)
            | Tile::FlashWarpgroup(_)
            | Tile::Lines(_)
            | Tile::Move(_)
            | Tile::Routing(_) => false,
        }
    }

    /// The number of the workspace whose sums blocks add to by turns, if they do, and its bytes.
    pub fn shared_sums(&self) -> Option<(usize, u64)> {
        match self {
            Tile::FlashBackward(tile) => Some(tile.shared_sums()),
            Tile::FlashWarpgroupBackward(tile) => Some(tile.shared_sums()),
            Tile::Elementwise(_)
            | Tile::RowReduction(_)
            | Tile::PartialSums(_)
            | Tile::Product(_)
            | Tile::Tensor(_)
            | Tile::Warpgroup(_)
            | Tile::SliceSum(_)
            | Tile::Attention(_)
            | Tile::Flash(_)
            | Tile::FlashWarpgroup(_)
            | Tile::Lines(_)
            | Tile::Move(_)
            | Tile::Routing(_) => None,
        }
    }

    /// The tensor maps that a launch passes after the scalars, in order.
    pub fn maps(&self) -> Vec<&TensorMap> {
        match self {
            Tile::Warpgroup(tile) => tile.maps(),
            Tile::FlashWarpgroup(tile) => tile.maps.iter().collect(),
            Tile::FlashWarpgroupBackward(tile) => tile.maps.iter().collect(),
            Tile::Elementwise(_)
            | Tile::RowReduction(_)
            | Tile::PartialSums(_)
            | Tile::Product(_)
            | Tile::Tensor(_)
            | Tile::SliceSum(_)
            | Tile::Attention(_)
            | Tile::Flash(_)
            | Tile::FlashBackward(_)
            | Tile::Lines(_)
            | Tile::Move(_)
            | Tile::Routing(_) => Vec::new(),
        }
    }

    /// Bytes of dynamic shared memory that a launch gives each block.
    pub fn dynamic_shared_bytes(&self) -> usize {
        match self {
            Tile::Warpgroup(tile) => tile.shared_bytes(),
            Tile::FlashWarpgroup(tile) => tile.shared_bytes(),
            Tile::FlashWarpgroupBackward(tile) => tile.shared_bytes(),
            Tile::Elementwise(_)
            | Tile::RowReduction(_)
            | Tile::PartialSums(_)
            | Tile::Product(_)
            | Tile::Tensor(_)
            | Tile::SliceSum(_)
            | Tile::Attention(_)
            | Tile::Flash(_)
            | Tile::FlashBackward(_)
            | Tile::Lines(_)
            | Tile::Move(_)
            | Tile::Routing(_) => 0,
        }
    }

    /// Prints what is fetched before the launches before it have ended.
    pub(super) fn print_prefetch(&self, text: &mut Text) {
        if let Tile::Warpgroup(tile) = self {
            tile.print_prefetch(text);
        }
    }

    pub(super) fn print(&self, parameters: &[Parameter], text: &mut Text) {
        match self {
            Tile::Elementwise(tile) => tile.print(parameters, text),
            Tile::RowReduction(tile) => tile.print(parameters, text),
            Tile::PartialSums(tile) => tile.print(parameters, text),
            Tile::Product(tile) => tile.print(parameters, text),
            Tile::Tensor(tile) => tile.print(parameters, text),
            Tile::Warpgroup(tile) => tile.print(parameters, text),
            Tile::SliceSum(tile) => tile.print(parameters, text),
            Tile::Attention(tile) => tile.print(parameters, text),
            Tile::Flash(tile) => tile.print(parameters, text),
            Tile::FlashWarpgroup(tile) => tile.print(parameters, text),
            Tile::FlashBackward(tile) => tile.print(parameters, text),
            Tile::FlashWarpgroupBackward(tile) => tile.print(parameters, text),
            Tile::Lines(tile) => tile.print(parameters, text),
            Tile::Move(tile) => tile.print(parameters, text),
            Tile::Routing(tile) => tile.print(parameters, text),
        }
    }

    /// The type that a parameter points to.
    pub(super) fn pointer(&self, parameter: &Parameter) -> &'static str {
        match self {
            Tile::Move(tile) => tile.pointer(parameter),
            Tile::Elementwise(_)
            | Tile::RowReduction(_)
            | Tile::PartialSums(_)
            | Tile::Product(_)
            | Tile::Tensor(_)
            | Tile::Warpgroup(_)
            | Tile::SliceSum(_)
            | Tile::Attention(_)
            | Tile::Flash(_)
            | Tile::FlashWarpgroup(_)
            | Tile::FlashBackward(_)
            | Tile::FlashWarpgroupBackward(_)
            | Tile::Lines(_)
            | Tile::Routing(_) => element(parameter.dtype),
        }
    }
}

impl fmt::Display for Tile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Tile::Elementwise(tile) => tile.fmt(f),
            Tile::RowReduction(tile) => tile.fmt(f),
            Tile::PartialSums(tile) => tile.fmt(f),
            Tile::Product(tile) => tile.fmt(f),
            Tile::Tensor(tile) => tile.fmt(f),
            Tile::Warpgroup(tile) => tile.fmt(f),
            Tile::SliceSum(tile) => tile.fmt(f),
            Tile::Attention(tile) => tile.fmt(f),
            Tile::Flash(tile) => tile.fmt(f),
            Tile::FlashWarpgroup(tile) => tile.fmt(f),
            Tile::FlashBackward(tile) => tile.fmt(f),
            Tile::FlashWarpgroupBackward(tile) => tile.fmt(f),
            Tile::Lines(tile) => tile.fmt(f),
            Tile::Move(tile) => tile.fmt(f),
            Tile::Routing(tile) => tile.fmt(f),
        }
    }
}
