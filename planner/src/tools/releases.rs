//! Releases whose runs were measured, with the profile that each is priced by.

use crate::estimate::profile::{
    DEEPSPEED as DEEPSPEED_2021, MEGATRON_2022, MEGATRON_BRIDGE, Profile, TORCH_FSDP,
    TORCHTITAN_2025,
};

/// A release of a tool.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Release {
    /// The name behind the `@`.
    pub name: &'static str,
    /// How it executes a step.
    pub profile: Profile,
    /// Whose runs its prices were compared with.
    pub measured: &'static str,
}

/// Places of releases in their tables, where rules ask for the first that has something.
pub(super) const CORE_0_13: usize = 1;
/// The first release of DeepSpeed with `tensor_parallel.autotp_size` in training.
pub(super) const DEEPSPEED_0_16: usize = 1;

pub(super) const MEGATRON: &[Release] = &[
    Release { name: "v3.0", profile: MEGATRON_2022, measured: "runs of Megatron-LM v3.0" },
    Release {
        name: "core-0.13",
        profile: MEGATRON_BRIDGE,
        measured: "runs of Megatron-Core of 2025",
    },
];

pub(super) const DEEPSPEED: &[Release] = &[
    Release { name: "0.5", profile: DEEPSPEED_2021, measured: "runs of DeepSpeed ZeRO-3 of 2021" },
    // Nobody published steps of later releases with their layouts.
    Release {
        name: "0.16",
        profile: DEEPSPEED_2021,
        measured: "runs of DeepSpeed ZeRO-3 of 2021, the newest that were published",
    },
];

pub(super) const TORCHTITAN: &[Release] = &[
    Release { name: "0.0.2", profile: TORCH_FSDP, measured: "compiled runs of torchtitan of 2024" },
    Release {
        name: "0.2",
        profile: TORCHTITAN_2025,
        measured: "compiled runs of torchtitan of 2025",
    },
];

/// Numbers in a name: 0 and 13 of `core-0.13`.
fn numbers(name: &str) -> Vec<u32> {
    let parts = name.split(|letter: char| !letter.is_ascii_digit());
    parts.filter_map(|part| part.parse().ok()).collect()
}

/// What of a name is no number: `core-` of `core-0.13`.
fn series(name: &str) -> String {
    name.chars().filter(char::is_ascii_alphabetic).collect()
}

/// The name of the release that is nearest to another: of the same series if there is one, the
/// newest that is not newer, or else the oldest.
pub(super) fn nearest_to(all: &'static [Release], wanted: &str) -> &'static str {
    let same: Vec<&Release> =
        all.iter().filter(|release| series(release.name) == series(wanted)).collect();
    let of_series = if same.is_empty() { all.iter().collect() } else { same };
    let older = of_series.iter().rfind(|release| numbers(release.name) <= numbers(wanted));
    let nearest = match numbers(wanted).is_empty() {
        true => of_series.last(),
        false => older.or(of_series.first()),
    };
    nearest.map_or("", |release| release.name)
}
