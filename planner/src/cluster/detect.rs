//! A cluster file that says what was found on a machine.

use std::fmt::Write;

use super::{Cluster, Level, names};
use crate::machine::Machine;
use crate::quantity::Unit;

/// A device as its driver names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The name: `NVIDIA H100 80GB HBM3`.
    pub name: String,
    /// Bytes of its memory.
    pub memory_bytes: u64,
}

/// The preset that has the rates of a device, by the name that a driver gives it.
pub fn preset(name: &str) -> Option<&'static str> {
    names::preset(name)
}

/// The text of a cluster file: the devices of a known kind that there are most of, or else the
/// cores. `remark` says in a comment what was not found.
pub fn text(machine: &Machine, found: &[Found], remark: Option<&str>) -> String {
    let mut text = String::new();
    for line in remark.iter().flat_map(|remark| remark.lines()) {
        let _ = writeln!(text, "# {line}");
    }
    let known = found.iter().filter_map(|device| Some((device, preset(&device.name)?)));
    let alike = |device: &Found| found.iter().filter(|other| *other == device).count();
    // Of several kinds with equally many devices, the first.
    let known: Vec<_> = known.collect();
    let most = known.iter().rev().max_by_key(|(device, _)| alike(device));
    for device in found.iter().filter(|device| most.is_none_or(|(kind, _)| kind != device)) {
        let _ = writeln!(text, "# {} is left out", device.name);
    }
    match most {
        Some((device, preset)) => text += &of_devices(machine, device, preset, alike(device)),
        None => text += &of_cores(machine),
    }
    text
}

fn of_devices(machine: &Machine, device: &Found, preset: &str, count: usize) -> String {
    let of_preset = Cluster::load_on(preset, machine).expect("presets are clusters");
    let mut text = format!("# {count} x {}\n", device.name);
    let _ = writeln!(text, "name = \"detected\"\nextends = \"preset:{preset}\"");
    let _ = writeln!(text, "origin = \"measured\"\n\n[device.memory]");
    let _ = writeln!(text, "capacity = {:?}", Unit::Bytes.print(device.memory_bytes as f64));
    let _ = writeln!(text, "\n[host]\nmemory = {:?}", host_bytes(machine));
    // Where the links end with the node, they end with these devices.
    let ends = |level: &&Level| level.count == of_preset.devices_per_node;
    if let Some(inner) = of_preset.levels.first().filter(ends) {
        let _ = writeln!(text, "\n[[level]]\nname = {:?}\ncount = {count}", inner.name);
    }
    let _ = writeln!(text, "\n[deployment]\nnodes = 1\ndevices_per_node = {count}");
    text
}

fn of_cores(machine: &Machine) -> String {
    let Machine { cores, instruction_set, .. } = machine;
    format!(
        "name = \"detected\"\nextends = \"preset:cpu-local\"\norigin = \"measured\"\n\n\
         [device]\ndetect = false\ncores = {cores}\nisa = {instruction_set:?}\n\n\
         [device.memory]\ncapacity = {:?}\n\n[deployment]\nnodes = 1\n",
        host_bytes(machine)
    )
}

fn host_bytes(machine: &Machine) -> String {
    Unit::Bytes.print(machine.memory_bytes as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Kind;

    fn machine() -> Machine {
        Machine { cores: 4, memory_bytes: 8 << 30, instruction_set: "avx2".into() }
    }

    #[test]
    fn what_is_written_is_a_cluster() {
        let device = |name: &str| Found { name: name.to_owned(), memory_bytes: 85_520_809_984 };
        let (h100, t4) = (device("NVIDIA H100 80GB HBM3"), device("Tesla T4"));
        let all = [t4.clone(), h100.clone(), h100.clone(), h100];
        let written = text(&machine(), &all, None);
        assert!(written.contains("# Tesla T4 is left out"), "{written}");
        let cluster = Cluster::parse("detected", &written, &machine()).unwrap();
        assert_eq!((cluster.device.kind, cluster.devices()), (Kind::Gpu, Some(3)));
        assert_eq!(cluster.device.name, "H100 SXM");
        assert_eq!(cluster.device.memory_bytes.value, 85_520_809_984.0);
        assert_eq!(cluster.levels[0].count, Some(3));
        assert_eq!(cluster.host.memory_bytes.unwrap().value, (8u64 << 30) as f64);
        for none in [&[][..], &[device("Voodoo 5")]] {
            let written = text(&machine(), none, Some("nothing\nat all"));
            assert!(written.starts_with("# nothing\n# at all\n"), "{written}");
            // Another machine reads what this one is.
            let other = Machine { cores: 64, ..machine() };
            let cluster = Cluster::parse("detected", &written, &other).unwrap();
            assert_eq!((cluster.device.kind, cluster.device.cores), (Kind::Cpu, 4));
            assert_eq!(cluster.describe(), "detected (4 cores, 8.00 GiB, avx2)");
        }
    }
}
