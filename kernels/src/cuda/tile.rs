//! The tile program of a device function: what each thread does, with every size decided.

use std::fmt;

use super::attention::{AttentionTile, Part};
use super::flash::FlashTile;
use super::flash_backward::FlashBackward;
use super::flash_warpgroup::FlashWarpgroup;
use super::function::Function;
use super::lines::LineTile;
use super::moves::Move;
use super::parameter::{Named, Parameter};
use super::product::ProductTile;
use super::reduction::{PartialSums, RowReduction};
use super::rows::Elementwise;
use super::slices::SliceSum;
use super::tensor::TensorTile;
use super::text::{Text, element, line, whole};
use super::warpgroup::{TensorMap, WarpgroupTile};
use crate::offset::Offset;

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
    /// A part of its gradient on tensor cores.
    FlashBackward(FlashBackward),
    /// An operation along a dim.
    Lines(LineTile),
    /// Elements that are moved.
    Move(Move),
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
            | Tile::FlashBackward(_) => true,
            Tile::Attention(tile) => tile.part != Part::Bias,
            Tile::Elementwise(_) | Tile::SliceSum(_) | Tile::Lines(_) | Tile::Move(_) => false,
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
            | Tile::Lines(_)
            | Tile::Move(_) => false,
        }
    }

    /// The tensor maps that a launch passes after the scalars, in order.
    pub fn maps(&self) -> Vec<&TensorMap> {
        match self {
            Tile::Warpgroup(tile) => tile.maps(),
            Tile::FlashWarpgroup(tile) => tile.maps.iter().collect(),
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
            | Tile::Move(_) => Vec::new(),
        }
    }

    /// Bytes of dynamic shared memory that a launch gives each block.
    pub fn dynamic_shared_bytes(&self) -> usize {
        match self {
            Tile::Warpgroup(tile) => tile.shared_bytes(),
            Tile::FlashWarpgroup(tile) => tile.shared_bytes(),
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
            | Tile::Move(_) => 0,
        }
    }

    fn print(&self, parameters: &[Parameter], text: &mut Text) {
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
            Tile::Lines(tile) => tile.print(parameters, text),
            Tile::Move(tile) => tile.print(parameters, text),
        }
    }

    /// The type that a parameter points to.
    fn pointer(&self, parameter: &Parameter) -> &'static str {
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
            | Tile::Lines(_) => element(parameter.dtype),
        }
    }
}

impl Function {
    /// What the text passes: types and names.
    fn declared(&self) -> Vec<(String, String)> {
        let buffer = |parameter: &Parameter| {
            let constant = matches!(parameter.buffer, super::Buffer::Input(_));
            let kind = if constant { "const " } else { "" };
            (format!("{kind}{}*", self.tile.pointer(parameter)), parameter.name())
        };
        let mut all: Vec<(String, String)> = Vec::new();
        for parameter in &self.parameters {
            let declared = buffer(parameter);
            // An operand that is read twice is passed once.
            if !all.contains(&declared) {
                all.push(declared);
            }
        }
        all.extend(self.passed_offsets().map(|named| ("i64".to_owned(), named.name.clone())));
        all
    }

    fn passed_offsets(&self) -> impl Iterator<Item = &Named> {
        self.offsets.iter().filter(|named| named.is_scalar())
    }

    /// The parameters as the text passes them: each buffer once.
    pub fn passed(&self) -> Vec<super::Buffer> {
        let mut all = Vec::new();
        for parameter in &self.parameters {
            if !all.contains(&parameter.buffer) {
                all.push(parameter.buffer);
            }
        }
        all
    }

    /// The text of the function under a name.
    pub fn text(&self, name: &str) -> String {
        let mut text = Text::default();
        let mut parameters: Vec<String> =
            self.declared().iter().map(|(kind, name)| format!("{kind} {name}")).collect();
        let maps = self.tile.maps().into_iter();
        parameters.extend(maps.map(|map| format!("TENSOR_MAP {}", map.name)));
        line!(text, "// {self}");
        line!(text, "KERNEL({}) {name}({}) {{", self.threads, parameters.join(", "));
        for Named { name, offset } in &self.offsets {
            if let Offset::Fixed(value) = offset {
                line!(text, "const i64 {name} = {};", whole(*value));
            }
        }
        self.tile.print(&self.parameters, &mut text);
        text.end();
        text.into_text()
    }

    /// The text that launches the function on a CPU: `NAME_launch` takes buffers in the order of
    /// [`Function::passed`], scalars, and a seed of the order of threads.
    pub fn launcher(&self, name: &str) -> String {
        let mut text = Text::default();
        let count = self.declared().len() - self.passed_offsets().count();
        let argument = |(at, (kind, _)): (usize, &(String, String))| match at {
            at if at < count => format!("({kind})buffers[{at}]"),
            at => format!("scalars[{}]", at - count),
        };
        let mut arguments: Vec<String> = self.declared().iter().enumerate().map(argument).collect();
        arguments.extend(self.tile.maps().into_iter().map(|map| {
            let buffer = self.parameters[map.parameter].buffer;
            let at = self.passed().iter().position(|passed| *passed == buffer);
            map.host(&format!("buffers[{}]", at.expect("every buffer is passed")))
        }));
        let signature = "void* const* buffers, const i64* scalars, u64 seed";
        line!(text, "extern \"C\" void {name}_launch({signature}) {{");
        line!(text, "(void)buffers, (void)scalars;");
        let call = format!("[&] {{ {name}({}); }}", arguments.join(", "));
        let (threads, synchronizes) = (self.threads, self.synchronizes());
        let grid = match self.is_persistent() {
            true => format!("shim::resident({}, seed)", self.grid),
            false => self.grid.to_string(),
        };
        line!(text, "shim::launch({grid}, {threads}, {synchronizes}, seed, {call});");
        text.end();
        text.into_text()
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
            Tile::Lines(tile) => tile.fmt(f),
            Tile::Move(tile) => tile.fmt(f),
        }
    }
}
