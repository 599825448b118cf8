//! What an execution profile adds to a vocabulary so that tensor-parallel ranks share it evenly.
//! Counts of parameters are the model's own; this is the difference to what devices hold.
//!
//! Over groups of devices it is counted in the memory and the time of each group and not itemised:
//! groups differ in `tp`, and stages in which tables they hold, so that no one number is added.

use ir::Diagnostic;
use schemars::JsonSchema;
use serde::Serialize;

use super::Estimator;
use super::layer::words_of_rank;
use super::profile::{Profile, VocabularyPadding};
use super::workload::{Cut, Item};
use crate::configuration::Configuration;

/// Rows that are added to the tables of a vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Padding {
    /// Words of the model.
    pub words: u64,
    /// Words with those that are added.
    pub padded_words: u64,
    /// Parameters that are added, over all ranks that share the tables.
    pub parameters: u64,
    /// Bytes that the fullest device holds more: weights, gradients, states and logits.
    pub bytes: f64,
}

impl Estimator<'_> {
    /// What is added to the vocabulary in a configuration; none where nothing is.
    ///
    /// # Errors
    /// Those of [`Estimator::estimate`].
    pub fn padding(&self, c: &Configuration) -> Result<Option<Padding>, Vec<Diagnostic>> {
        let Profile { vocabulary_padding, whole_logits, .. } = self.profile;
        let ends = || self.work.first.iter().chain(&self.work.last);
        let rows = |vocab: u32| {
            let ranks = f64::from(c.tp);
            (words_of_rank(vocabulary_padding, f64::from(vocab), ranks) * ranks).round() as u64
        };
        let mut found = Padding { words: 0, padded_words: 0, parameters: 0, bytes: 0.0 };
        for item in ends() {
            let (vocab, width) = if let Item::Embedding { vocab, width, .. } = *item {
                // Where logits are whole, the table is.
                if whole_logits { continue } else { (vocab, width) }
            } else if let Item::Product { k, n, cut: Cut::Words, bias } = *item {
                if self.work.tied { continue } else { (n, k + u32::from(bias)) }
            } else {
                continue;
            };
            let (words, padded_words) = (u64::from(vocab), rows(vocab));
            let parameters = padded_words.saturating_sub(words) * u64::from(width);
            (found.words, found.padded_words) = (words, padded_words);
            found.parameters += parameters;
        }
        if found.parameters == 0 {
            return Ok(None);
        }
        let profile = Profile { vocabulary_padding: VocabularyPadding::Never, ..self.profile };
        let unpadded = Estimator { profile, ..self.clone() };
        let [with, without] = [self, &unpadded].map(|estimator| estimator.estimate(c));
        found.bytes = with?.memory.total_bytes() - without?.memory.total_bytes();
        Ok(Some(found))
    }
}

#[cfg(test)]
mod tests {
    use crate::cluster::Cluster;
    use crate::estimate::described::described;
    use crate::estimate::rates::Arithmetic;
    use crate::estimate::workload::Item;
    use crate::estimate::{Estimator, Job, profile};
    use crate::machine::Machine;

    /// GPT-2's 50,257 words: on one rank a multiple of 128, on eight one of 1,024.
    #[test]
    fn padding_is_of_the_profile_and_counted() {
        let machine = Machine { cores: 4, memory_bytes: 8 << 30, instruction_set: "avx2".into() };
        let cluster = Cluster::load_on("h100", &machine).unwrap();
        let job = Job { global_batch: 64, arithmetic: Arithmetic::Half };
        let of = |model: &str, layout: &str| {
            let work = described(model, None).unwrap().work;
            let estimator = Estimator::new(&work, &cluster, profile::GANTLINE, job).unwrap();
            estimator.padding(&layout.parse().unwrap()).unwrap()
        };
        for (layout, padded) in [("tp=1 dp=8 mbs=1", 50_304), ("tp=8 mbs=1", 51_200)] {
            let found = of("gpt3-175b", layout).unwrap();
            assert_eq!((found.words, found.padded_words), (50_257, padded), "{layout}");
            // Tied: one table.
            assert_eq!(found.parameters, (padded - 50_257) * 12_288, "{layout}");
            let each = found.parameters as f64 / if padded == 51_200 { 8.0 } else { 1.0 };
            assert!(found.bytes > 2.0 * each, "{layout}: {found:?}");
        }
        // Two tables, and none where nothing is left over.
        let of_llama = described("llama-2-7b", None).unwrap().work;
        let mut odd = of_llama.clone();
        assert_eq!(of("llama-2-7b", "tp=8 mbs=1"), None);
        for item in odd.first.iter_mut().chain(&mut odd.last) {
            if let Item::Embedding { vocab, .. } = item {
                *vocab = 32_001;
            }
            if let Item::Product { n, .. } = item {
                *n = 32_001;
            }
        }
        let estimator = Estimator::new(&odd, &cluster, profile::GANTLINE, job).unwrap();
        let found = estimator.padding(&"tp=8 mbs=1".parse().unwrap()).unwrap().unwrap();
        assert_eq!(found.parameters, 2 * (32_768 - 32_001) * 4096);
    }
}
