//! Numbers and facts of profiles and devices that were chosen with measured runs of models in view,
//! and what stands in their place where a source is to be predicted without a look at its runs.

use super::profile::{NOTHING, Profile};
use super::rates::Rates;

/// Something that was chosen with runs in view.
#[derive(Clone, Copy, Debug)]
pub struct Choice {
    /// What it is.
    pub name: &'static str,
    /// What is taken without a look at the runs, and why.
    pub instead: &'static str,
    /// How the names of the tables begin whose runs were in view.
    pub seen: &'static [&'static str],
    undo: Undo,
}

/// How a choice is taken back.
#[derive(Clone, Copy, Debug)]
enum Undo {
    /// Of a release.
    Profile(fn(&mut Profile)),
    /// Of a device.
    Rates(fn(&mut Rates)),
}

/// Tables of runs on A100.
const ON_A100: &[&str] = &["bloom", "korthikanti", "mosaicml", "narayanan", "nemo", "vtrain"];
/// Tables of runs whose hosts were late.
const EAGER: &[&str] = &["bloom", "mosaicml", "nanotron", "nemo", "vtrain"];

/// All of them. The spreads of the intervals are not among them: shares of runs in their intervals
/// are always those of runs that were in view.
pub const CHOICES: [Choice; 13] = [
    Choice {
        name: "sustained clock of the A100, 0.95",
        instead: "1.0: the largest products of long runs are as fast as those of short ones \
                  (ml-engineering, MAMF)",
        seen: ON_A100,
        undo: Undo::Rates(|rates| sustain(rates, "A100", 1.0)),
    },
    Choice {
        name: "sustained clock of the H100, 0.75",
        instead: "0.73: 1.4 to 1.5 of 1.98 GHz (He 2024)",
        seen: &["megatron_bridge", "nanotron"],
        undo: Undo::Rates(|rates| sustain(rates, "H100", 0.73)),
    },
    Choice {
        name: "host of eager releases, 50 µs a launch",
        instead: "29 µs: LitGPT generates a token in 1 ms a layer, of some 35 launches",
        seen: EAGER,
        undo: Undo::Profile(|profile| {
            profile.host.forward_s = profile.host.forward_s.min(5.8e-6);
            profile.host.backward_s = profile.host.backward_s.min(5.8e-6);
        }),
    },
    Choice {
        name: "nanotron's hosts that poll, half of a core",
        instead: "none",
        seen: &["nanotron"],
        undo: Undo::Profile(|profile| profile.host.polling_share = 0.0),
    },
    Choice {
        name: "nanotron's buckets, 256 MB",
        instead: "25 MiB: the default of PyTorch",
        seen: &["nanotron"],
        undo: Undo::Profile(|profile| {
            profile.bucket_bytes = profile.bucket_bytes.min(26_214_400.0)
        }),
    },
    Choice {
        name: "how far nanotron's hosts run ahead, and hold what collectives have read",
        instead: "not at all",
        seen: &["nanotron"],
        undo: Undo::Profile(|profile| profile.frees_late = false),
    },
    Choice {
        name: "nanotron prints the memory of its first rank",
        instead: "of the fullest",
        seen: &["nanotron"],
        undo: Undo::Profile(|profile| profile.prints_first = false),
    },
    Choice {
        name: "nanotron copies what it gathers piece by piece, 5 µs each",
        instead: "its copies are not counted, as of no other release",
        seen: &["nanotron"],
        undo: Undo::Profile(|profile| profile.copies_pieces = false),
    },
    Choice {
        name: "nanotron's copies and masks around attention",
        instead: "attention reads the product's result where it lies",
        seen: &["nanotron"],
        undo: Undo::Profile(|profile| profile.around_attention = NOTHING),
    },
    Choice {
        name: "nanotron's host takes four operations for a collective of `tp`",
        instead: "one, as of Megatron-LM",
        seen: &["nanotron"],
        undo: Undo::Profile(|profile| profile.tensor_operations = 1.0),
    },
    Choice {
        name: "reserve of BLOOM's runs, 6.4 GB",
        instead: "2 GB, as Megatron-LM",
        seen: &["bloom"],
        undo: Undo::Profile(|profile| profile.reserve_bytes = profile.reserve_bytes.min(2e9)),
    },
    Choice {
        name: "BLOOM's runs print what their allocators hold",
        instead: "what tensors hold",
        seen: &["bloom"],
        undo: Undo::Profile(|profile| profile.printed_share = 0.0),
    },
    Choice {
        name: "vTrain's vocabulary of 50,257 words and its loss in half precision",
        instead: "the vocabulary of the row, and the loss of Megatron-LM",
        seen: &["vtrain"],
        undo: Undo::Profile(|profile| {
            profile.vocabulary = None;
            profile.loss_bytes = [38.0, 14.0];
            profile.loss_saved_bytes = 4.0;
            profile.loss_working_bytes = 8.0;
        }),
    },
];

fn sustain(rates: &mut Rates, device: &str, share: f64) {
    if rates.name.starts_with(device) {
        for product in &mut rates.product {
            product.sustained_share = share;
        }
    }
}

/// What was chosen with runs of a table in view.
pub fn seen(table: &str) -> impl Iterator<Item = &'static Choice> {
    CHOICES.iter().filter(move |choice| choice.seen.iter().any(|name| table.starts_with(name)))
}

/// Takes back what was chosen with runs of a table in view.
pub(super) fn set_aside(table: &str, profile: &mut Profile, rates: &mut Rates) {
    set_aside_of_style(table, profile);
    for choice in seen(table) {
        if let Undo::Rates(undo) = choice.undo {
            undo(rates);
        }
    }
}

/// Takes back what was chosen of a release.
pub(super) fn set_aside_of_style(table: &str, profile: &mut Profile) {
    for choice in seen(table) {
        if let Undo::Profile(undo) = choice.undo {
            undo(profile);
        }
    }
}
