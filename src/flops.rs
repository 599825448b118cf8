//! The operations of a model: what its mathematics takes, whoever computes it how.
//!
//! Only products count, one multiplication with addition as two operations. Causal attention counts
//! half of its square, since the other half is masked, and with a window `W` of `N` keys the share
//! `W (2 N - W) / 2 N²`. The backward pass takes twice the forward.

use ir::cost::{cost, share_visited};
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
    let [visited, experts] = share_visited(function);
    let sum = sum.divide(experts).map_or(sum, |of_one| &of_one * &Dim::constant(visited));
    let [seen, of] = share_seen(function);
    // Where queries are no whole number of such parts, the triangle alone is counted.
    let part = sum.divide(of).map(|part| &part * &Dim::constant(seen));
    part.or_else(|| sum.divide(2)).unwrap_or(sum)
}

/// The share of pairs of a query and a key that an attention sees, as a fraction; 1 for what is no
/// attention in which a token sees only those before it.
fn share_seen(function: &Function) -> [i64; 2] {
    let all = [1, 1];
    let Kind::Composite { name, attributes } = &function.kind else { return all };
    let keys = function.params().nth(1).and_then(|k| function.ty(k).dims.get(1)?.as_constant());
    let number = |name: &str| attributes.get(name).copied();
    let (Some(offset), Some(keys)) = (number("query_offset"), keys) else { return all };
    if !name.starts_with("attention") || offset >= keys as f64 {
        return all;
    }
    let window = number("window").unwrap_or(0.0) as i64;
    if (1..keys).contains(&window) && keys < 1 << 30 {
        // Of a square of N² the triangle before the window hides (N - W)² / 2 more.
        [window * (2 * keys - window), 2 * keys * keys]
    } else {
        [1, 2]
    }
}

#[cfg(test)]
mod tests {
    use ir::DType;
    use ir::import::{Options, import, preset};

    use super::*;

    /// Seven eighths of a triangle are hidden by a window of so much of the keys.
    #[test]
    fn a_window_counts_what_it_shows() {
        let flops = |window: f64| {
            let mut module = Module::new("m");
            let mut b = ir::build::Builder::new(&mut module, "f", Kind::Layer);
            let ty = TensorType::of(DType::F32, &[2, 16, 3, 4]);
            let [q, k, v] = ["q", "k", "v"].map(|name| b.param(name, ty.clone()));
            let given = [("scale", 1.0), ("group", 1.0), ("query_offset", 0.0), ("window", window)];
            let out = b.composite("y", "attention", &given, &[q, k, v]);
            b.finish(&out[..1]);
            forward_flops(&module, "f").unwrap()
        };
        let square = 2 * 2 * 2 * 3 * 4 * 16 * 16;
        assert_eq!(flops(0.0), square / 2);
        assert_eq!(flops(16.0), square / 2);
        assert_eq!(flops(8.0), square * 8 * (32 - 8) / (2 * 256));
        assert_eq!(flops(1.0), square * 31 / 512);
    }

    /// 4.492e11 operations for a token of Llama 3 70B, sequences of 8192 tokens, forward and
    /// backward: the figure that published throughputs in tokens and in operations have in common.
    #[test]
    fn a_token_of_llama_70b_costs_what_is_published() {
        let options = Options { seq: 8192, dtype: DType::BF16, dropout: None, documents: false };
        let model = import(&preset("llama-3-70b").unwrap(), &options).unwrap();
        let flops = forward_flops(&model.module, "logits").unwrap();
        let per_token = 3.0 * flops as f64 / 8192.0;
        assert!((per_token / 4.492e11 - 1.0).abs() < 1e-3, "{per_token:e}");
    }
}
