//! What is launched for each layer on one rank: the fusions that were chosen after the cut, for
//! people.

use std::collections::BTreeMap;

use ir::Module;
use ir::plan::Keep;
use ir::program::{Instruction, Ref, Routine};
use kernels::{Kernel, price};

use crate::calls::Calls;
use crate::grouping::Choice;
use crate::partition::Place;
use crate::refusal::Refusal;
use crate::routines::{GradientSums, LayerDecisions, Layers};

/// One half of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launched {
    /// The layer.
    pub layer: String,
    /// `forward` or `backward`.
    pub half: &'static str,
    /// Its launches, in order.
    pub launches: Vec<Launch>,
    /// What is known of the choice of fused kernels, before products take some of them.
    pub choice: Option<Choice>,
}

/// One launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// What is computed and how much of it, as kernels print themselves.
    pub kernel: String,
    /// The names of the values that it writes.
    pub values: Vec<String>,
    /// Bytes that it moves at least.
    pub bytes: u64,
    /// Operations.
    pub flops: u64,
}

/// What one rank launches for each layer of a prepared training module, for one sample, when all
/// that the gradient reads is kept.
///
/// # Errors
/// When the entry is no list of calls, or something has no kernel.
pub fn launched(module: &Module, entry: &str) -> Result<Vec<Launched>, Refusal> {
    let calls = Calls::of(module, entry)?;
    let mut layers = Layers::new(module);
    let place = Place {
        sizes: [1; 4],
        coordinates: [0; 4],
        takes_tp: false,
        microbatch_size: 1,
        target: None,
    };
    let mut all = Vec::new();
    for name in calls.functions() {
        let function = module.function(name).ok_or("a call of nothing")?;
        let whole = BTreeMap::new();
        let decisions = LayerDecisions { shardings: &whole, keep: Keep::Full, is_late: &[] };
        let adds = vec![false; function.param_count];
        let sums = GradientSums { adds: &adds, rounded: &vec![None; adds.len()] };
        let layer = layers.layer(name, decisions, place, sums, false)?;
        let halves = [("forward", &layer.forward), ("backward", &layer.backward)];
        for ((half, routine), choice) in halves.into_iter().zip(layer.choices) {
            let launches = launches(routine, layers.kernels());
            all.push(Launched { layer: name.to_owned(), half, launches, choice });
        }
    }
    Ok(all)
}

fn launches(routine: &Routine, kernels: &[Kernel]) -> Vec<Launch> {
    let name = |at: &Ref| match *at {
        Ref::Slot(slot) => routine.slots[slot as usize].0.clone(),
        Ref::Local(local) => routine.locals[local as usize].name.clone(),
    };
    let launch = |instruction: &Instruction| {
        let Instruction::Launch { kernel, outputs, .. } = instruction else { return None };
        let kernel = &kernels[*kernel];
        Some(Launch {
            kernel: kernel.to_string(),
            values: outputs.iter().map(name).collect(),
            bytes: price::bytes(kernel).0,
            flops: price::flops(kernel).0,
        })
    };
    routine.instructions.iter().filter_map(launch).collect()
}
