//! The ends of a step: what a class does before its first micro-batch and after its last one.
//!
//! They do not depend on what is in between, and on weights only by their number, so that most of
//! the classes that a search looks at have the ends of another one.

use std::collections::HashMap;
use std::sync::Arc;

use ir::{Module, Plan};

use super::Ends;
use super::class::{Class, clears, loss_is_partial, training_store};
use crate::calls::Calls;
use crate::lower::KernelTable;
use crate::refusal::Refusal;
use crate::store::{extents, extents_of_units};
use crate::weights::{shards, shares_gradients, weight_places};

/// The ends that were compiled, by all that they depend on, as bytes.
#[derive(Debug, Default)]
pub(super) struct AllEnds(HashMap<Vec<u8>, Arc<Ends>>);

impl AllEnds {
    /// The ends of a class.
    pub(super) fn of(
        &mut self,
        module: &Module,
        calls: &Calls,
        plan: &Plan,
        place: [usize; 3],
        table: &mut KernelTable,
    ) -> Result<Arc<Ends>, Refusal> {
        let [stage, _, tensor] = place;
        let weights = weight_places(module, calls, plan, stage, tensor)?;
        let clears = clears(calls, plan, stage)?;
        let has_loss = stage + 1 == plan.mesh.pp;
        let of_loss = [tensor > 0, loss_is_partial(module, calls, plan), clears, has_loss];
        let shards = shards(plan);
        let of_update = (plan.optimizer, plan.offload.optimizer, plan.offload.parameters);
        let of_plan = (plan.mesh, plan.experts, of_update, plan.precision, plan.target, shards);
        let shares = shares_gradients(plan).then_some(plan.zero.stage);
        let units =
            shares.map(|stage| (stage, extents_of_units(&weights, &plan.precision, shards)));
        let of_weights = (extents(&weights, &plan.precision), units);
        let key = postcard::to_stdvec(&(of_plan, of_loss, of_weights));
        let key = key.expect("these are numbers and lists");
        if let Some(there) = self.0.get(&key) {
            return Ok(Arc::clone(there));
        }
        let store = training_store(weights, plan);
        let class = Class::with((module, calls), plan, place, store, table)?;
        let made = Arc::new(class.ends()?);
        self.0.insert(key, Arc::clone(&made));
        Ok(made)
    }
}
