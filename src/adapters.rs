//! Adapters of runs: what training with `--lora` added to a model, and the weights with it merged.

use std::ops::Range;

use ir::DType;
use ir::import::{Description, Options, Weight};
use ir::lora::{Adapter, Lora, adapt};
use runtime::block;
use runtime::checkpoint::Checkpoint;
use runtime::convert::{Stored, convert};
use runtime::execute::{Part, Session, Values};

use crate::failure::Failure;

/// The adapters that a run was trained with.
#[derive(Clone, Debug)]
pub struct Adapters {
    lora: Lora,
    /// One for each adapted weight.
    adapters: Vec<Adapter>,
    /// `A` and `B` as weights, in peft's names.
    weights: Vec<Weight>,
}

impl Adapters {
    /// The adapters that `lora` gives to a model.
    ///
    /// # Errors
    /// Those of [`adapt`].
    pub fn of(description: &Description, lora: &Lora, seq: usize) -> Result<Adapters, Failure> {
        let options = Options { seq, dtype: DType::F32, dropout: Some(0.0), documents: false };
        let mut model = crate::import(description, &options)?;
        let adapters = adapt(&mut model, lora)?;
        let is_new =
            |weight: &Weight| adapters.iter().any(|one| [&one.a, &one.b].contains(&&weight.name));
        let weights = model.weights.into_iter().filter(is_new).collect();
        Ok(Adapters { lora: lora.clone(), adapters, weights })
    }

    /// Reads a weight from a checkpoint, with what was added to it.
    ///
    /// # Errors
    /// `E4043` for a tensor that the checkpoint lacks; damage.
    pub fn read(
        &self,
        checkpoint: &Checkpoint,
        name: &str,
        dims: &[usize],
        dtype: DType,
    ) -> Result<Values, Failure> {
        let mut numbers = numbers(checkpoint, name, dims)?;
        if let Some(adapter) = self.adapters.iter().find(|adapter| adapter.weight == name) {
            let [a, b] = [&adapter.a, &adapter.b].map(|name| self.numbers_of(checkpoint, name));
            numbers = adapter.merge(&numbers, &a?, &b?, self.lora.scale());
        }
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        let bytes = convert(Stored::DType(DType::F64), &bytes, dtype);
        Ok(Values { dtype, dims: dims.to_vec(), bytes })
    }

    fn numbers_of(&self, checkpoint: &Checkpoint, name: &str) -> Result<Vec<f64>, Failure> {
        let weight = self.weights.iter().find(|weight| weight.name == name);
        let weight = weight.expect("an adapter names weights that were added");
        numbers(checkpoint, name, &weight.dims)
    }

    /// Overwrites the adapted weights of a session that holds those of a checkpoint.
    ///
    /// # Errors
    /// Those of [`Adapters::read`].
    pub fn merge_into(
        &self,
        session: &mut Session,
        checkpoint: &Checkpoint,
    ) -> Result<(), Failure> {
        for Adapter { weight, dims, .. } in &self.adapters {
            let whole = block::whole(dims);
            let mut values = |block: &[Range<usize>], dtype: DType| {
                let merged = self.read(checkpoint, weight, dims, dtype)?;
                let size = dtype.size() as usize;
                let mut bytes = vec![0; block::elements(block) * size];
                block::copy_overlap(&merged.bytes, &whole, &mut bytes, block, size);
                Ok::<_, Failure>(bytes)
            };
            session.write_weight(weight, Part::Weight, &mut values)?;
        }
        Ok(())
    }
}

/// The numbers of a whole tensor of a checkpoint.
fn numbers(checkpoint: &Checkpoint, name: &str, dims: &[usize]) -> Result<Vec<f64>, Failure> {
    // What is missing is reported by reading it.
    let stored = checkpoint.tensors().find(|(known, ..)| *known == name);
    let stored = stored.map_or(DType::F32, |(_, _, stored)| stored);
    let bytes = checkpoint.read(name, &block::whole(dims), stored)?;
    Ok(Values { dtype: stored, dims: dims.to_vec(), bytes }.to_f64())
}
