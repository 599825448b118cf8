//! What devices are called, by drivers and in tables, and the presets that describe them.

/// Words of a device's name in capitals, the preset that describes it, and the year of its
/// processor; the first whose words all stand in a name counts. A GH200 with 141 GB has an H200's
/// processor and memory, an RTX 6000 Ada an L40S's; a card has its card's links, whatever memory.
pub(crate) const DEVICES: [(&str, &str, u16); 37] = [
    ("GB300", "gb300-nvl72", 2024),
    ("GB200", "gb200-nvl72", 2024),
    ("B300", "b300", 2024),
    ("B200", "b200", 2024),
    ("GH200 141GB", "h200", 2022),
    ("GH200 144GB", "h200", 2022),
    ("GH200", "gh200", 2022),
    ("GRACE HOPPER", "gh200", 2022),
    ("H200", "h200", 2022),
    ("H800", "h800", 2022),
    ("H20", "h20", 2022),
    ("H100 96GB", "h100-96gb", 2022),
    ("H100 PCIE", "h100-pcie", 2022),
    ("H100 NVL", "h100-nvl", 2022),
    ("H100 94GB", "h100-nvl", 2022),
    ("H100", "h100", 2022),
    ("A100 PCIE", "a100-pcie", 2020),
    ("A100 40GB", "a100-40gb", 2020),
    ("A100", "a100", 2020),
    ("A800", "a800", 2020),
    ("V100 16GB", "v100-16gb", 2017),
    ("V100", "v100", 2017),
    ("MI300X", "mi300x", 2023),
    ("MI325", "mi325x", 2023),
    ("MI355", "mi355x", 2025),
    ("MI250", "mi250x", 2021),
    ("4090", "rtx4090", 2022),
    ("3090", "rtx3090", 2020),
    ("6000 ADA", "l40s", 2022),
    ("A6000", "a6000", 2020),
    ("L40", "l40s", 2022),
    ("A40", "a40", 2020),
    ("A10G", "a10g", 2020),
    ("A10", "a10", 2020),
    ("L4", "l4", 2022),
    ("T4", "t4", 2018),
    ("MI300", "mi300x", 2023),
];

/// The preset that has the rates of a device.
pub(crate) fn preset(name: &str) -> Option<&'static str> {
    let name = spoken(name);
    let all = |words: &str| words.split(' ').all(|word| says(&name, word));
    DEVICES.iter().find(|(words, _, _)| all(words)).map(|(_, preset, _)| *preset)
}

/// The year of the processor of a preset's devices; none where no name has it.
pub(crate) fn year(preset: &str) -> Option<u16> {
    DEVICES.iter().find(|(_, other, _)| *other == preset).map(|(_, _, year)| *year)
}

/// A name in capitals, with one space for all between letters and digits, and none before a unit:
/// `GH200 144 GB` says `144GB`.
fn spoken(name: &str) -> String {
    let words = name.split(|letter: char| !letter.is_ascii_alphanumeric());
    let words: Vec<String> =
        words.filter(|word| !word.is_empty()).map(str::to_ascii_uppercase).collect();
    words.join(" ").replace(" GB", "GB")
}

/// Whether a word stands in a name, and is not the beginning or end of a longer number: a T400 is
/// no T4.
fn says(name: &str, word: &str) -> bool {
    let is_digit = |letter: Option<char>| letter.is_some_and(|letter| letter.is_ascii_digit());
    let starts = is_digit(word.chars().next());
    let ends = is_digit(word.chars().next_back());
    name.match_indices(word).any(|(at, _)| {
        let before = name[..at].chars().next_back();
        let after = name[at + word.len()..].chars().next();
        !(starts && is_digit(before) || ends && is_digit(after))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::PRESETS;

    /// Names that drivers give, as nvidia-smi lists them, and names of tables.
    #[test]
    fn devices_are_known_by_many_names() {
        for (name, expected) in [
            ("NVIDIA H100 80GB HBM3", "h100"),
            ("NVIDIA H100 PCIe", "h100-pcie"),
            ("NVIDIA H100 NVL", "h100-nvl"),
            ("NVIDIA H200", "h200"),
            ("NVIDIA A100-SXM4-80GB", "a100"),
            ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
            ("NVIDIA A100-PCIE-40GB", "a100-pcie"),
            ("NVIDIA A100 80GB PCIe", "a100-pcie"),
            ("NVIDIA A10G", "a10g"),
            ("Tesla V100-SXM2-16GB", "v100-16gb"),
            ("Tesla V100-SXM2-32GB", "v100"),
            ("NVIDIA GeForce RTX 4090", "rtx4090"),
            ("NVIDIA RTX A6000", "a6000"),
            ("NVIDIA RTX 6000 Ada Generation", "l40s"),
            ("NVIDIA L40S", "l40s"),
            ("NVIDIA L4", "l4"),
            ("Tesla T4", "t4"),
            ("NVIDIA B200", "b200"),
            ("NVIDIA GH200 480GB", "gh200"),
            ("GH200 144 GB", "h200"),
            ("H100-96GB-HBM2e", "h100-96gb"),
            ("RTX4090-24GB", "rtx4090"),
            ("AMD Instinct MI325X", "mi325x"),
        ] {
            assert_eq!(preset(name), Some(expected), "{name}");
        }
        for other in ["NVIDIA T400", "NVIDIA RTX A4000", "NVIDIA RTX A1000", "Voodoo 5", ""] {
            assert_eq!(preset(other), None, "{other}");
        }
    }

    /// Each name's preset is there, and each preset but that of this machine has a name and a year.
    #[test]
    fn names_and_presets_are_the_same() {
        for (name, _) in PRESETS.iter().filter(|(name, _)| *name != "cpu-local") {
            assert!(year(name).is_some(), "{name}");
        }
        for (words, named, when) in DEVICES {
            assert!(PRESETS.iter().any(|(name, _)| *name == named), "{named}");
            assert_eq!(year(named), Some(when), "{words}");
        }
    }
}
