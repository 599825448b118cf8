//! The text form of a cluster: a file that reads back, with the origin of each number.

use std::fmt;

use super::draft::kind_name;
use super::{Cluster, Host, Known};
use crate::quantity::Unit;

impl fmt::Display for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let device = &self.device;
        writeln!(f, "name = {:?}", self.name)?;
        writeln!(f, "\n[device]\nkind = \"{}\"", kind_name(device.kind))?;
        writeln!(f, "name = {:?}\ncores = {}", device.name, device.cores)?;
        if let Some(isa) = &device.instruction_set {
            writeln!(f, "isa = {isa:?}")?;
        }
        line(f, "launch", &device.launch_s, Unit::Seconds)?;
        f.write_str("\n[device.memory]\n")?;
        line(f, "capacity", &device.memory_bytes, Unit::Bytes)?;
        line(f, "reserved", &device.reserved_bytes, Unit::Bytes)?;
        line(f, "bandwidth", &device.memory_bandwidth, Unit::BytesPerSecond)?;
        f.write_str("\n[device.peak]\n")?;
        for (dtype, rate) in &device.peak {
            line(f, dtype.name(), rate, Unit::FlopsPerSecond)?;
        }
        if let Some(power) = &device.power {
            f.write_str("\n[device.power]\n")?;
            line(f, "busy", &power.busy_w, Unit::Watts)?;
            line(f, "idle", &power.idle_w, Unit::Watts)?;
        }
        if self.host != Host::default() {
            f.write_str("\n[host]\n")?;
        }
        if let Some(memory) = &self.host.memory_bytes {
            line(f, "memory", memory, Unit::Bytes)?;
        }
        if let Some(bandwidth) = &self.host.bandwidth {
            line(f, "bandwidth", bandwidth, Unit::BytesPerSecond)?;
        }
        for level in &self.levels {
            writeln!(f, "\n[[level]]\nname = {:?}", level.name)?;
            if let Some(count) = level.count {
                writeln!(f, "count = {count}")?;
            }
            line(f, "bandwidth", &level.bandwidth, Unit::BytesPerSecond)?;
            line(f, "latency", &level.latency, Unit::Seconds)?;
        }
        writeln!(f, "\n[deployment]\nnodes = {}", self.nodes)?;
        if let Some(devices) = self.devices_per_node {
            writeln!(f, "devices_per_node = {devices}")?;
        }
        Ok(())
    }
}

fn line(f: &mut fmt::Formatter<'_>, key: &str, known: &Known, unit: Unit) -> fmt::Result {
    let value = format!("{key} = {:?}", unit.print(known.value));
    writeln!(f, "{value:<34} # {}, {}", known.origin, known.source)
}
