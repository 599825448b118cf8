//! The operations of a model: what its mathematics takes, whoever computes it how.
//!
//! Only products count, one multiplication with addition as two operations. Causal attention counts
//! half of its square, since the other half is masked. The backward pass takes twice the forward.

use ir::cost::cost;
use ir::dim::Bindings;
use ir::{Dim, Function, Kind, Module, TensorType};

/// Operations of one forward run of a function with one sample; none if a size is open.
pub fn forward_flops(module: &Module, function: &str) -> Option<u64> {
    let one = Bindings::from([(Dim::BATCH.to_owned(), 1)]);
    let doubled = doubled_flops(module, function).bind(&one).as_constant()?;
    u64::try_from(doubled / 2).ok()
}

/// Twice the operations, so that half an attention is a polynomial with whole coefficients.
fn doubled_flops(module: &Module, name: &str) -> Dim {
    let Some(function) = module.function(name) else { return Dim::default() };
    let mut sum = Dim::default();
    for node in &function.nodes {
        let flops = match node.callee() {
            Some(callee) => doubled_flops(module, callee),
            None => {
                let types = |ids: &[ir::ValueId]| -> Vec<&TensorType> {
                    ids.iter().map(|id| function.ty(*id)).collect()
                };
                let (operands, results) = (types(&node.operands), types(&node.results));
                &cost(&node.op, &operands, &results, module).product_flops * &Dim::from(2)
            }
        };
        sum = &sum + &flops;
    }
    if is_causal_attention(function) { sum.divide(2).unwrap_or(sum) } else { sum }
}

/// Whether a function is attention in which a token sees only those before it.
fn is_causal_attention(function: &Function) -> bool {
    let Kind::Composite { name, attributes } = &function.kind else { return false };
    let keys = function.params().nth(1).and_then(|k| function.ty(k).dims.get(1)?.as_constant());
    let offset = attributes.get("query_offset");
    let sees_less = offset.zip(keys).is_some_and(|(offset, keys)| *offset < keys as f64);
    name.starts_with("attention") && sees_less
}

#[cfg(test)]
mod tests {
    use ir::DType;
    use ir::import::{Options, import, preset};

    use super::*;

    /// 4.492e11 operations for a token of Llama 3 70B, sequences of 8192 tokens, forward and
    /// backward: the figure that published throughputs in tokens and in operations have in common.
    #[test]
    fn a_token_of_llama_70b_costs_what_is_published() {
        let options = Options { seq: 8192, dtype: DType::BF16, dropout: None };
        let model = import(&preset("llama-3-70b").unwrap(), &options).unwrap();
        let flops = forward_flops(&model.module, "logits").unwrap();
        let per_token = 3.0 * flops as f64 / 8192.0;
        assert!((per_token / 4.492e11 - 1.0).abs() < 1e-3, "{per_token:e}");
    }
}
