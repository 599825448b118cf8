//! Numbers and facts of styles and devices that were chosen with measured runs of models in view,
//! and what stands in their place where a source is to be predicted without a look at its runs.

use super::rates::Rates;
use super::style::Style;

/// Something that was chosen with runs in view.
#[derive(Clone, Copy, Debug)]
pub struct Choice {
    /// What it is.
    pub name: &'static str,
    /// What is taken without a look at the runs, and why.
    pub instead: &'static str,
    /// How the names of the tables begin whose runs were in view.
    pub seen: &'static [&'static str],
    undo: fn(&mut Style, &mut Rates),
}

/// Tables of runs on A100.
const ON_A100: &[&str] = &["bloom", "korthikanti", "mosaicml", "narayanan", "nemo", "vtrain"];
/// Tables of runs whose hosts were late.
const EAGER: &[&str] = &["bloom", "mosaicml", "nanotron", "nemo", "vtrain"];

/// All of them. The spreads of the intervals are not among them: shares of runs in their intervals
/// are always those of runs that were in view.
pub const CHOICES: [Choice; 9] = [
    Choice {
        name: "sustained clock of the A100, 0.95",
        instead: "1.0: the largest products of long runs are as fast as those of short ones \
                  (ml-engineering, MAMF)",
        seen: ON_A100,
        undo: |_, rates| sustain(rates, "A100", 1.0),
    },
    Choice {
        name: "sustained clock of the H100, 0.75",
        instead: "0.73: 1.4 to 1.5 of 1.98 GHz (He 2024)",
        seen: &["megatron_bridge", "nanotron"],
        undo: |_, rates| sustain(rates, "H100", 0.73),
    },
    Choice {
        name: "sustained clock of B200 and GB200, 0.8",
        instead: "0.73, as the H100's",
        seen: &["megatron_bridge"],
        undo: |_, rates| {
            sustain(rates, "B200", 0.73);
            sustain(rates, "GB200", 0.73);
        },
    },
    Choice {
        name: "host of eager releases, 50 µs a launch",
        instead: "29 µs: LitGPT generates a token in 1 ms a layer, of some 35 launches",
        seen: EAGER,
        undo: |style, _| {
            style.host.forward_s = style.host.forward_s.min(5.8e-6);
            style.host.backward_s = style.host.backward_s.min(5.8e-6);
        },
    },
    Choice {
        name: "nanotron's hosts that poll, half of a core",
        instead: "none",
        seen: &["nanotron"],
        undo: |style, _| style.host.polling_share = 0.0,
    },
    Choice {
        name: "nanotron's buckets, 256 MB",
        instead: "25 MiB: the default of PyTorch",
        seen: &["nanotron"],
        undo: |style, _| style.bucket_bytes = style.bucket_bytes.min(26_214_400.0),
    },
    Choice {
        name: "nanotron keeps gathered inputs",
        instead: "it gathers them again, as its code can since 2024",
        seen: &["nanotron"],
        undo: |style, _| style.keeps_gathered = false,
    },
    Choice {
        name: "nanotron prints the memory of its first rank",
        instead: "of the fullest",
        seen: &["nanotron"],
        undo: |style, _| style.prints_first = false,
    },
    Choice {
        name: "reserve of BLOOM's runs, 6.4 GB",
        instead: "2 GB, as Megatron-LM",
        seen: &["bloom"],
        undo: |style, _| style.reserve_bytes = style.reserve_bytes.min(2e9),
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
pub(super) fn set_aside(table: &str, style: &mut Style, rates: &mut Rates) {
    seen(table).for_each(|choice| (choice.undo)(style, rates));
}
