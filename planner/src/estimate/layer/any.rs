//! The items of modules that are no transformers.

use super::{INNER_INTERFERENCE, Lowered, Lowering};
use crate::estimate::price::{Inside, Pass};
use crate::estimate::profile::VocabularyPadding;
use crate::estimate::workload::{Item, Split};

/// Words of which a rank's piece has a whole number where vocabularies are padded: the default of
/// Megatron-LM (`make-vocab-size-divisible-by`).
const PADDED: f64 = 128.0;
/// Columns of which products load whole pieces: a vocabulary of a multiple is left as it is.
const LOADED: f64 = 8.0;

/// Rows of the vocabulary that each tensor-parallel rank holds, padding included.
pub(in crate::estimate) fn words_of_rank(
    padding: VocabularyPadding,
    vocab: f64,
    ranks: f64,
) -> f64 {
    let pieces = match padding {
        VocabularyPadding::Never => return vocab / ranks,
        VocabularyPadding::ToDivide => ranks,
        VocabularyPadding::ToLoad => ranks * LOADED,
    };
    if vocab % pieces == 0.0 {
        return vocab / ranks;
    }
    (vocab / (PADDED * ranks)).ceil() * PADDED
}

impl Lowering<'_> {
    /// Words that a tensor-parallel rank holds of a vocabulary of `vocab` words. All ranks hold
    /// equally many: a vocabulary that does not divide is padded.
    pub(super) fn words(&self, vocab: f64) -> f64 {
        words_of_rank(self.profile.vocabulary_padding, vocab, self.tp())
    }

    /// One kernel forward; backward, one for what it reads again and one for what it wrote.
    pub(super) fn any_rows(&self, item: &Item) -> Lowered {
        let Item::Rows { reads, writes, saves, parameters, cut } = *item else {
            return Lowered::default();
        };
        let share = if cut { self.tp() } else { 1.0 };
        let bytes = self.stream_tokens() * self.e() * (reads + writes) as f64 / share;
        let launches = if reads + writes > 0 { 1.0 } else { 0.0 };
        Lowered {
            forward: self.rows(bytes),
            backward: self.rows(2.0 * bytes),
            forward_launches: launches,
            backward_launches: 2.0 * launches,
            saved: self.saved(saves),
            parameters: [parameters as f64, 0.0],
            tensors: if parameters > 0 { 1.0 } else { 0.0 },
            ..Lowered::default()
        }
    }

    /// Bytes of elements that are kept whole, and of those that are cut.
    fn saved(&self, [whole, cut]: [u64; 2]) -> f64 {
        self.stream_tokens() * self.e() * (whole as f64 + cut as f64 / self.tp())
    }

    /// Forward one product, backward two, cut over the tensor-parallel ranks as the item says.
    pub(super) fn contraction(&self, item: &Item) -> Lowered {
        let Item::Contraction { rows, k, n, batch, weighted, own, saves, split } = *item else {
            return Lowered::default();
        };
        let [rows, k, n, batch] = [rows, k, n, batch].map(|size| size as f64);
        let tokens = self.tokens();
        let widths = [rows * k * batch, rows * n * batch];
        let cut = |size: f64| (size / self.tp()).ceil();
        let (rows, batch) = if weighted { (rows * tokens, batch) } else { (rows, batch * tokens) };
        let (k, n, batch) = match split {
            Split::Whole => (k, n, batch),
            Split::Columns | Split::ColumnsAgain => (k, cut(n), batch),
            Split::Rows => (cut(k), n, batch),
            Split::Inside => (k, n, batch / self.tp()),
        };
        // Fewer products than one are smaller ones.
        let (n, batch) = if batch < 1.0 { ((n * batch).ceil(), 1.0) } else { (n, batch) };
        let time = |m, n, k| self.rates.product_s(self.job.arithmetic, [m, n, k, batch]);
        let products = |seconds| Pass { products_s: seconds, ..Pass::default() };
        let factor = if weighted { self.rates.weight_factor } else { 1.0 };
        let accumulated = if own { self.profile.accumulate_bytes * k * n * batch } else { 0.0 };
        let [inside, apart] =
            if self.profile.fuses_accumulation { [accumulated, 0.0] } else { [0.0, accumulated] };
        let arithmetic = self.job.arithmetic;
        let second_s =
            self.rates.weight_product_s(arithmetic, [k, n, rows, batch], inside) * factor;
        let mut lowered = Lowered {
            forward: products(time(rows, n, k)),
            backward: products(time(rows, k, n) + second_s),
            weight_s: if weighted { second_s } else { 0.0 },
            forward_launches: 1.0,
            backward_launches: 2.0,
            saved: self.saved(saves),
            put_off: [k, n]
                .map(|width| if weighted { batch * rows * width * self.e() } else { 0.0 }),
            result: batch * rows * n * self.e(),
            // The cotangents of the input and of the result.
            working: batch * rows * (k + n) * self.e(),
            parameters: [if own { k * n * batch } else { 0.0 }, 0.0],
            tensors: if own { 1.0 } else { 0.0 },
            ..Lowered::default()
        };
        if apart > 0.0 {
            lowered.backward += self.rows(apart);
            lowered.backward_launches += 1.0;
        }
        let [input, result] = widths;
        match split {
            Split::Columns => {
                let summed_s = self.summed_s(input);
                let hidden_s = summed_s.min(second_s) * self.profile.tensor_backward_hidden;
                let tensor_s = summed_s - hidden_s + hidden_s * INNER_INTERFERENCE;
                lowered.backward += Pass { tensor_s, ..Pass::default() };
                lowered.backward_launches += self.profile.tensor_operations;
            }
            Split::Rows => {
                lowered.forward += Pass { tensor_s: self.summed_s(result), ..Pass::default() };
                lowered.forward_launches += self.profile.tensor_operations;
            }
            Split::Whole | Split::ColumnsAgain | Split::Inside => {}
        }
        lowered
    }

    /// As the attention of a sequence as long as a sample.
    pub(super) fn mixing(&self, item: &Item) -> Lowered {
        let Item::Mixing { seq, heads, kv_heads, dim, causal, cut } = *item else {
            return Lowered::default();
        };
        let tp = if cut { self.inside.tp } else { 1 };
        let inside = Inside { tp, ..self.inside };
        let sample = Lowering { seq: f64::from(seq), inside, ..*self };
        sample.attention(&Item::Attention { heads, kv_heads, qk_dim: dim, v_dim: dim, causal })
    }

    /// Exposed seconds of the all-reduce of `elements` elements of each token over the
    /// tensor-parallel ranks.
    fn summed_s(&self, elements: f64) -> f64 {
        let bytes = self.tokens() * elements * self.e();
        self.network.all_reduce_s(bytes, self.tensor_group()) * (1.0 - self.profile.tensor_hidden)
    }

    /// A gather or a sum over the tensor-parallel ranks; its gradient is a piece.
    pub(super) fn exchange(&self, elements: u64) -> Lowered {
        if self.inside.tp <= 1 {
            return Lowered::default();
        }
        let tensor_s = self.summed_s(elements as f64);
        Lowered {
            forward: Pass { tensor_s, ..Pass::default() },
            forward_launches: self.profile.tensor_operations,
            ..Lowered::default()
        }
    }
}
