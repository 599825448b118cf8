//! Frozen weights, and the adapters that are trained beside them.

use super::{Lowered, Lowering};
use crate::estimate::price::Pass;
use crate::estimate::serving::storage::Format;
use crate::estimate::workload::{Cut, Item};

impl Lowering<'_> {
    /// Takes from an item what only the gradients of its weights need. The gradient of its input
    /// stays: adapters of earlier layers need it.
    pub(super) fn freeze(&self, item: &Item, lowered: &mut Lowered) {
        if matches!(item, Item::Adapter { .. }) {
            return;
        }
        let [dense, experts] = lowered.parameters;
        let held = |parameters: f64| parameters * self.profile.weight_bytes;
        lowered.frozen = [held(dense), held(experts)];
        lowered.parameters = [0.0; 2];
        lowered.tensors = 0.0;
        match *item {
            Item::Product { cut, k, .. } => {
                // The input is kept by the adapter, where there is one.
                lowered.saved = 0.0;
                lowered.backward_launches -= 1.0;
                if cut != Cut::Words {
                    self.store_base(lowered, f64::from(k));
                }
            }
            Item::Experts { .. } => {
                lowered.backward.products_s -= lowered.weight_s;
                lowered.weight_s = 0.0;
            }
            Item::Contraction { weighted: true, .. } => {
                lowered.backward.products_s -= lowered.weight_s;
                lowered.weight_s = 0.0;
            }
            // Nothing before the embedding is trained.
            Item::Embedding { .. } => lowered.backward = Pass::default(),
            Item::Contraction { .. }
            | Item::Attention { .. }
            | Item::Mixing { .. }
            | Item::Norm { .. }
            | Item::Rope { .. }
            | Item::Activation { .. }
            | Item::Residual { .. }
            | Item::Loss { .. }
            | Item::Rows { .. }
            | Item::Exchange { .. }
            | Item::Adapter { .. } => {}
        }
    }

    /// Bytes of attention's result that is kept for its own gradient, where no adapter keeps it as
    /// the input of the next product.
    pub(super) fn kept_result(&self, items: &[Item], at: usize, part: &Lowered) -> f64 {
        let is_attention = matches!(items[at], Item::Attention { .. } | Item::Mixing { .. });
        let is_kept = matches!(items.get(at + 2), Some(Item::Adapter { .. }));
        match self.weights.frozen {
            Some(_) if is_attention && !is_kept => part.result,
            Some(_) | None => 0.0,
        }
    }

    /// Stores the weight of a frozen product of `k` rows in few bits: each use converts it to the
    /// type that products compute in, which reads it, writes it whole, and reads that.
    fn store_base(&self, lowered: &mut Lowered, k: f64) {
        let base = self.weights.frozen.and_then(|frozen| frozen.base);
        let Some(format) = base.and_then(|base| Format::of_weights(base.name())) else { return };
        let parameters = lowered.frozen[0] / self.profile.weight_bytes;
        let stored = format.bytes(parameters / k, k);
        let whole = parameters * self.e();
        lowered.frozen[0] = stored;
        lowered.forward += self.rows(stored + whole);
        lowered.backward += self.rows(stored + whole);
        lowered.forward_launches += 1.0;
        lowered.backward_launches += 1.0;
        lowered.working += whole;
    }

    /// Two products of low rank for each part, whose result is scaled and added: kernels of their
    /// own in peft and torchtune. Keeps the input of the adapted product, and what is between.
    ///
    /// Where tensor parallelism cuts columns, the ranks have all of `A`, and sum its gradient's
    /// input; where it cuts rows, they sum `x A`.
    pub(super) fn adapter(&self, item: &Item) -> Lowered {
        let Item::Adapter { k, n, rank, parts, cut } = *item else { return Lowered::default() };
        let tokens = self.tokens();
        let [mut k, mut n, rank, parts] = [k, n, rank, parts].map(f64::from);
        match cut {
            Cut::Columns | Cut::Words => n = (n / self.tp()).ceil(),
            Cut::Rows => k = (k / self.tp()).ceil(),
            Cut::Whole => {}
        }
        let each = (n / parts).ceil();
        let arithmetic = self.job.arithmetic;
        let time = |m, n, k| self.rates.product_s(arithmetic, [m, n, k, 1.0]);
        let gradient = |m, n| self.rates.weight_product_s(arithmetic, [m, n, tokens, 1.0], 0.0);
        let products = |seconds| Pass { products_s: seconds, ..Pass::default() };
        let weight_s = parts * (gradient(k, rank) + gradient(rank, each));
        let between = tokens * rank * parts * self.e();
        let summed = Pass {
            tensor_s: self.network.all_reduce_s(between, self.tensor_group()),
            ..Pass::default()
        };
        let [summed_forward, summed_backward] = match cut {
            Cut::Rows => [summed, Pass::default()],
            Cut::Columns | Cut::Words => [Pass::default(), summed],
            Cut::Whole => [Pass::default(); 2],
        };
        // Scaled, and added to the product's result; backward scaled, and added to its input's.
        let (result, input) = (tokens * n * self.e(), tokens * k * self.e());
        let kept = if cut == Cut::Rows { tokens * k } else { self.stream_tokens() * k };
        Lowered {
            forward: products(parts * (time(tokens, rank, k) + time(tokens, each, rank)))
                + self.rows(5.0 * result)
                + summed_forward,
            backward: products(
                parts * (time(tokens, rank, each) + time(tokens, k, rank)) + weight_s,
            ) + self.rows(2.0 * result + 3.0 * parts * input)
                + summed_backward,
            weight_s,
            forward_launches: 4.0 * parts,
            backward_launches: 6.0 * parts,
            saved: kept * self.e() + between,
            result,
            working: result,
            parameters: [parts * k * rank + rank * n, 0.0],
            tensors: 2.0 * parts,
            ..Lowered::default()
        }
    }
}
