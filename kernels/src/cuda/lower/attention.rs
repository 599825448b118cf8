//! The device functions of attention and of its gradient.

use ir::DType;
use ir::target::Arch;

use crate::cuda::attention::{AttentionTile, Part, THREADS, WARPS, bias_elements};
use crate::cuda::flash::{self, FlashTile};
use crate::cuda::flash_backward::FlashBackward;
use crate::cuda::flash_warpgroup::{self, FlashWarpgroup};
use crate::cuda::flash_warpgroup_backward::{self, FlashWarpgroupBackward};
use crate::cuda::function::{Function, Functions};
use crate::cuda::parameter::{Buffer, Named, Parameter};
use crate::cuda::tile::Tile;
use crate::kernel::Attention;

fn offsets(a: &Attention) -> Vec<Named> {
    let mut all = vec![
        Named::fixed("query_offset", a.query_offset),
        Named::new("head_offset", a.head_offset),
    ];
    if let Some(d) = &a.dropout {
        all.push(Named::fixed("sample_offset", d.sample_offset.cast_signed()));
        all.push(Named::new("head_base", d.head_base));
        all.push(Named::fixed("query_base", d.query_base.cast_signed()));
        all.push(Named::fixed("key_base", d.key_base.cast_signed()));
    }
    all
}

fn function(
    what: String,
    parameters: Vec<Parameter>,
    items: usize,
    tile: AttentionTile,
) -> Function {
    let each = if tile.part == Part::Bias { THREADS } else { WARPS };
    Function {
        what,
        parameters,
        offsets: offsets(&tile.attention),
        grid: items.div_ceil(each as usize) as u64,
        threads: THREADS,
        tile: Tile::Attention(tile),
    }
}

/// The function of the forward pass.
pub(super) fn forward(
    what: &str,
    a: &Attention,
    inputs: &[Parameter],
    outputs: &[Parameter],
    (all, arch): (&mut Functions, Option<Arch>),
) {
    let parameters = inputs.iter().chain(outputs).copied().collect();
    if arch == Some(Arch::Sm90a)
        && let Some(tile) = FlashWarpgroup::of(a)
    {
        all.functions.push(Function {
            what: what.to_owned(),
            parameters,
            offsets: offsets(a),
            grid: tile.blocks(),
            threads: flash_warpgroup::THREADS,
            tile: Tile::FlashWarpgroup(tile),
        });
        return;
    }
    if arch.is_some() && flash::fits(a) {
        let tile = FlashTile::new(a);
        all.functions.push(Function {
            what: what.to_owned(),
            parameters,
            offsets: offsets(a),
            grid: tile.blocks(),
            threads: flash::THREADS as u32,
            tile: Tile::Flash(tile),
        });
        return;
    }
    let tile = AttentionTile { attention: a.clone(), part: Part::Forward };
    let queries = a.batch * a.heads * a.queries;
    all.functions.push(function(what.to_owned(), parameters, queries, tile));
}

/// The function of the gradient on tensor cores.
struct Gradient {
    tile: Tile,
    blocks: u64,
    threads: u32,
    /// Sums of dQ, and counters of turns.
    workspaces: [u64; 2],
    /// What is computed before.
    delta: Part,
}

impl Gradient {
    /// That of an attention on an architecture; none where it does not fit.
    fn of(a: &Attention, arch: Option<Arch>) -> Option<Gradient> {
        if arch == Some(Arch::Sm90a)
            && let Some(tile) = FlashWarpgroupBackward::of(a)
        {
            let counters = flash_warpgroup_backward::PARTS;
            return Some(Gradient {
                blocks: tile.turns().blocks(),
                threads: flash_warpgroup_backward::THREADS,
                workspaces: [tile.sums(), tile.counters()],
                delta: Part::Delta { tile: tile.step, counters },
                tile: Tile::FlashWarpgroupBackward(tile),
            });
        }
        (arch.is_some() && flash::fits(a)).then(|| {
            let tile = FlashBackward::new(a);
            Gradient {
                blocks: tile.blocks(),
                threads: flash::THREADS as u32,
                workspaces: [tile.sums(), tile.counters()],
                delta: Part::Delta { tile: tile.step, counters: 1 },
                tile: Tile::FlashBackward(tile),
            }
        })
    }
}

/// The functions of the gradient.
pub(super) fn backward(
    what: &str,
    a: &Attention,
    inputs: &[Parameter],
    outputs: &[Parameter],
    (all, arch): (&mut Functions, Option<Arch>),
) {
    let dtype = a.dtype.accumulation();
    let of_queries = a.batch * a.heads * a.queries;
    let gradient = Gradient::of(a, arch);
    let mut workspaces = vec![(of_queries as u64, dtype)];
    if let Some(Gradient { workspaces: [sums, counters], .. }) = gradient {
        workspaces.extend([(sums, DType::F32), (counters, DType::U32)]);
    }
    let mut parameters: Vec<Parameter> = inputs.iter().chain(outputs).copied().collect();
    for (count, dtype) in workspaces {
        let buffer = Buffer::Workspace(all.workspaces.len());
        all.workspaces.push(count * dtype.size());
        parameters.push(Parameter { buffer, dtype });
    }
    let mut parts = match &gradient {
        Some(gradient) => vec![("delta", gradient.delta, of_queries)],
        None => vec![
            ("queries", Part::Queries, of_queries),
            ("keys", Part::Keys, a.batch * a.kv_heads * a.keys),
        ],
    };
    if a.bias.is_some() && a.bias_grad {
        parts.push(("bias", Part::Bias, bias_elements(a)));
    }
    for (name, part, items) in parts {
        let tile = AttentionTile { attention: a.clone(), part };
        all.functions.push(function(format!("{what}: {name}"), parameters.clone(), items, tile));
    }
    if let Some(Gradient { tile, blocks, threads, .. }) = gradient {
        let (what, offsets) = (format!("{what}: main"), offsets(a));
        all.functions.push(Function { what, parameters, offsets, grid: blocks, threads, tile });
    }
}
