//! The routines of one class of ranks: each layer forward and backward, once.

use ir::plan::FunctionPlan;
use ir::program::Routine;
use ir::{Function, Module};

use crate::fuse::fuse;
use crate::lower::{KernelTable, lower_routine};
use crate::partition::{Place, partition};
use crate::prepare::gradient_name;
use crate::specialise::{Halves, specialise};

/// A layer as one class of ranks runs it.
#[derive(Clone, Debug)]
pub struct Layer {
    /// The layer's name.
    pub name: String,
    /// How many parameters it has.
    pub param_count: usize,
    /// The parameters that have a gradient, in order.
    pub differentiable: Vec<usize>,
    /// The forward and backward functions, before fusion.
    pub halves: Halves,
    /// The forward routine: parameters, then results and kept values.
    pub forward: Routine,
    /// Which results of the primal are added to their slots.
    pub result_adds: Vec<bool>,
    /// The backward routine: parameters, then gradients of the differentiable parameters.
    pub backward: Routine,
}

/// The layer of one class of ranks.
///
/// Results named in `accumulate_results` are added to their slots, as are the gradients of the
/// parameters that `adds` marks.
///
/// # Errors
/// A sentence, when the plan does not fit the layer or an op has no kernel.
pub fn layer(
    module: &Module,
    name: &str,
    plan: &FunctionPlan,
    place: Place,
    adds: &[bool],
    accumulate_results: bool,
    table: &mut KernelTable,
) -> Result<Layer, String> {
    let primal = module.function(name).ok_or_else(|| format!("there is no layer `@{name}`"))?;
    let gradient = module.function(&gradient_name(name));
    let gradient = gradient.ok_or_else(|| format!("`@{name}` has no gradient function"))?;
    let local = partition(module, gradient, &plan.shardings, place)?;
    let halves = specialise(&local.function, primal.param_count, primal.results.len(), plan.keep);
    let differentiable: Vec<usize> = primal
        .params()
        .filter(|p| primal.ty(*p).dtype.is_float())
        .map(ir::ValueId::index)
        .collect();
    let result_adds = vec![accumulate_results; primal.results.len()];
    let mut forward_adds = result_adds.clone();
    forward_adds.resize(halves.forward.results.len(), false);
    let forward = routine(&halves.forward, &local.module, &forward_adds, &[], table)?;
    let adds: Vec<bool> = differentiable.iter().map(|p| adds[*p]).collect();
    let backward = routine(&halves.backward, &local.module, &adds, &[], table)?;
    Ok(Layer {
        name: name.to_owned(),
        param_count: primal.param_count,
        differentiable,
        halves,
        forward,
        result_adds,
        backward,
    })
}

/// Fuses and lowers one local function; `accumulate` and `in_place` are as [`lower_routine`] wants
/// them.
///
/// # Errors
/// A sentence that names an op without a kernel.
pub fn routine(
    function: &Function,
    composites: &Module,
    accumulate: &[bool],
    in_place: &[Option<usize>],
    table: &mut KernelTable,
) -> Result<Routine, String> {
    let mut module = composites.clone();
    let mut function = function.clone();
    ir::pass::remove_common_nodes(&mut function);
    let fused = fuse(&function, &mut module);
    lower_routine(&fused, &module, accumulate, in_place, table)
        .map_err(|why| format!("`@{}`: {why}", function.name))
}
