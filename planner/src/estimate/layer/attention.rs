//! Attention, whose scores are written or stay inside one kernel.

use super::{Lowered, Lowering};
use crate::estimate::price::Pass;
use crate::estimate::profile::Whole;
use crate::estimate::rates::{Arithmetic, AttentionKernel};
use crate::estimate::workload::Item;

impl Lowering<'_> {
    /// Keeps queries, keys and values; and 5 bytes per score where scores are written.
    pub(super) fn attention(&self, item: &Item) -> Lowered {
        let Item::Attention { heads, kv_heads, qk_dim, v_dim, causal } = *item else {
            return Lowered::default();
        };
        let heads = (f64::from(heads) / self.tp()).ceil();
        let kv_heads = (f64::from(kv_heads) / self.tp()).ceil();
        // Programs of `codegen` have heads of one size: shorter ones are padded where they are
        // read, and the result is kept padded, though the next product reads no padding.
        let is_ours = self.profile.whole == Whole::Calls && self.weights.of_training;
        let [own_v, wide] = [v_dim, qk_dim.max(v_dim)].map(f64::from);
        let is_padded = is_ours && qk_dim != v_dim;
        let [qk, v] = if is_padded { [wide; 2] } else { [qk_dim, v_dim].map(f64::from) };
        let tokens = self.tokens();
        let kept = heads * f64::from(qk_dim) + kv_heads * f64::from(qk_dim + v_dim);
        let kept = tokens * kept * self.e();
        let mut lowered = match self.profile.attention {
            AttentionKernel::Separate | AttentionKernel::FusedSoftmax => {
                self.written_attention(heads, qk, v, causal)
            }
            AttentionKernel::Flash1 | AttentionKernel::Flash2 | AttentionKernel::FlashBest => {
                self.flash_attention(heads, [qk, v], kept / self.e(), causal)
            }
        };
        lowered.saved += kept;
        lowered.result = tokens * heads * own_v * self.e();
        if is_padded {
            lowered.saved += tokens * heads * (wide - own_v) * self.e();
        }
        let group = self.inside.cp_group;
        if group.size() > 1 {
            // Keys and values of all ranks are gathered; their gradients are reduced.
            let all = f64::from(self.inside.microbatch) * self.seq * kv_heads * (qk + v) * self.e();
            let context = |seconds| Pass { context_s: seconds, ..Pass::default() };
            lowered.forward += context(self.network.gather_s(all, group));
            lowered.backward += context(2.0 * self.network.gather_s(all, group));
        }
        lowered
    }

    fn written_attention(&self, heads: f64, qk: f64, v: f64, causal: bool) -> Lowered {
        let batch = f64::from(self.inside.microbatch) * heads;
        let (rows, keys) = (self.seq / f64::from(self.inside.cp), self.seq);
        let arithmetic = match self.job.arithmetic {
            // Rows of heads that are not whole pieces of 16 bytes keep tensor cores from loading
            // them: such batched products run on the other ones (Anthony et al. 2024, attention by
            // the power of two in the size of a head).
            _ if [qk, v].iter().any(|dim| dim % 8.0 != 0.0) => Arithmetic::F32,
            wide @ (Arithmetic::F32 | Arithmetic::Tf32) => wide,
            Arithmetic::Half | Arithmetic::F8 | Arithmetic::F4 => Arithmetic::Half,
        };
        let time = |m, n, k| self.rates.product_s(arithmetic, [m, n, k, batch]);
        let scores = batch * rows * keys;
        let (forward_kernels, backward_kernels): (&[f64], &[f64]) = match self.profile.attention {
            // Softmax with scale and mask; and the same backward. The causal one reads half.
            AttentionKernel::FusedSoftmax if causal => (&[3.0], &[4.0]),
            AttentionKernel::FusedSoftmax => (&[4.0], &[6.0]),
            // Mask, softmax; softmax, mask.
            AttentionKernel::Separate
            | AttentionKernel::Flash1
            | AttentionKernel::Flash2
            | AttentionKernel::FlashBest => (&[5.0, 4.0], &[6.0, 5.0]),
        };
        let rows_s = |kernels: &[f64]| -> f64 {
            kernels.iter().map(|bytes| self.rates.rows_s(bytes * scores)).sum()
        };
        let dropout = if self.profile.dropout { self.rates.rows_s(5.0 * scores) } else { 0.0 };
        let attention = |seconds| Pass { attention_s: seconds, ..Pass::default() };
        let tokens = self.tokens();
        // The result is made contiguous; backward, so are the gradients of queries and the rest.
        let copies = self.rates.rows_s(tokens * heads * v * 2.0 * self.e());
        let forward = time(rows, keys, qk) + time(rows, v, keys);
        let backward = time(rows, keys, v) + time(keys, v, rows);
        let backward = backward + time(rows, qk, keys) + time(keys, qk, rows);
        let saved = scores * if self.profile.dropout { 5.0 } else { 2.0 };
        Lowered {
            forward: attention(forward + rows_s(forward_kernels) + dropout + copies),
            backward: attention(backward + rows_s(backward_kernels) + dropout + 4.0 * copies),
            forward_launches: 4.0 + forward_kernels.len() as f64,
            backward_launches: 6.0 + backward_kernels.len() as f64,
            saved,
            saved_attention: saved,
            working: scores * 2.0 * self.e(),
            ..Lowered::default()
        }
    }

    /// Keeps the result's logarithms of sums: 4 bytes a row and head. `elements` are those of
    /// queries, keys and values.
    fn flash_attention(
        &self,
        heads: f64,
        [qk, v]: [f64; 2],
        elements: f64,
        causal: bool,
    ) -> Lowered {
        let batch = f64::from(self.inside.microbatch) * heads;
        let (rows, keys) = (self.seq / f64::from(self.inside.cp), self.seq);
        let seen = if causal && self.profile.skips_masked { 0.5 } else { 1.0 };
        let flops = 2.0 * batch * rows * keys * (qk + v) * seen;
        let [forward_s, backward_s] = self.rates.flash_s(self.profile.attention, flops, keys, qk);
        let attention = |seconds| Pass { attention_s: seconds, ..Pass::default() };
        let around = self.profile.around_attention;
        let copied = |bytes: f64| self.rates.rows_s(bytes * elements);
        let saved = batch * rows * 4.0;
        let result = batch * rows * v * self.e();
        Lowered {
            forward: attention(forward_s + copied(around.forward_bytes)),
            backward: attention(backward_s + copied(around.backward_bytes)),
            forward_launches: 2.0 + around.forward_launches,
            backward_launches: 3.0 + around.backward_launches,
            saved,
            // The product after it keeps its result.
            saved_attention: if self.profile.recomputes_rows { saved + result } else { 0.0 },
            ..Lowered::default()
        }
    }
}
