//! The update of an optimizer as a block program.

use std::iter::repeat;

use ir::module::Attributes;
use ir::plan::Optimizer;
use ir::precision::Precision;
use ir::{DType, Function, Kind, Module, TensorType};
use kernels::rows::{Output, Rows};

use crate::tile::{Tile, lower_kernel};

/// The block program of an update, and which of its operands each input is.
#[derive(Clone, Debug)]
pub(crate) struct Update {
    pub(crate) rows: Rows,
    pub(crate) inputs: Vec<String>,
}

impl Update {
    /// Computed in the type of sums, from and to what each role is stored as.
    pub(crate) fn new(
        optimizer: Optimizer,
        decay: f64,
        elements: usize,
        precision: &Precision,
    ) -> Result<Update, String> {
        let function = optimizer_function(optimizer, decay, elements, precision.accumulate)?;
        let Tile { mut rows, inputs, .. } = lower_kernel(&function, &Module::default());
        let name = |param: &ir::ValueId| function.value(*param).name.clone();
        let inputs: Vec<String> = inputs.iter().map(name).collect();
        for (input, name) in rows.inputs.iter_mut().zip(&inputs) {
            match name.as_str() {
                "p" => input.dtype = precision.updated(),
                "g" => input.dtype = precision.gradients,
                "m" | "v" => input.dtype = precision.states,
                _ => {}
            }
        }
        let dtypes = std::iter::once(precision.updated()).chain(repeat(precision.states));
        for (output, stored) in rows.outputs.iter_mut().zip(dtypes) {
            if let Output::Store { dtype, .. } = output {
                *dtype = stored;
            }
        }
        let first = rows.outputs.first().filter(|_| precision.master.is_some()).cloned();
        if let Some(Output::Store { value, access, accumulate, .. }) = first {
            let dtype = precision.parameters;
            rows.outputs.push(Output::Store { value, access, dtype, accumulate });
        }
        Ok(Update { inputs, rows })
    }
}

/// The update of `elements` parameters, as a kernel function of the library's composite.
fn optimizer_function(
    optimizer: Optimizer,
    decay: f64,
    elements: usize,
    dtype: DType,
) -> Result<Function, String> {
    let vector = TensorType::of(dtype, &[elements]);
    let scalar = TensorType::scalar(dtype);
    let decay = ("decay", decay);
    let (attributes, vectors, scalars) = match optimizer {
        Optimizer::None => (Vec::new(), 0, 0),
        Optimizer::Sgd { .. } => (vec![decay], 2, 2),
        Optimizer::AdamW { beta1, beta2, eps, .. } => {
            (vec![("beta1", beta1), ("beta2", beta2), ("eps", eps), decay], 4, 4)
        }
    };
    let attributes: Attributes =
        attributes.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    let mut operands = vec![vector; vectors];
    operands.resize(vectors + scalars, scalar);
    let name = optimizer.composite().ok_or("nothing is updated")?;
    let function = ir::library::instantiate(name, &attributes, &operands, name);
    let mut function = function.ok_or_else(|| format!("`{name}` has no instance"))?;
    function.kind = Kind::Kernel;
    Ok(function)
}
