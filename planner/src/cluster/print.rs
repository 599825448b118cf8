//! The text form of a cluster: a file that reads back, with the origin of each number.

use std::fmt;

use super::draft::kind_name;
use super::{Between, Cluster, Host, Joined, Known, Price};
use crate::quantity::Unit;

impl fmt::Display for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "name = {}", quoted(&self.name))?;
        if self.groups.is_empty() {
            return tables(f, self, "");
        }
        for group in &self.groups {
            writeln!(f, "\n[[group]]\nname = {}", quoted(&group.name))?;
            tables(f, group, "group.")?;
        }
        for Between { groups: [one, other], bandwidth, latency } in &self.links {
            writeln!(f, "\n[[link]]\nbetween = [{}, {}]", quoted(one), quoted(other))?;
            line(f, "bandwidth", bandwidth, Unit::BytesPerSecond)?;
            line(f, "latency", latency, Unit::Seconds)?;
        }
        Ok(())
    }
}

/// The tables of devices that are alike; `at` is what their names begin with.
fn tables(f: &mut fmt::Formatter<'_>, cluster: &Cluster, at: &str) -> fmt::Result {
    let device = &cluster.device;
    writeln!(f, "\n[{at}device]\nkind = \"{}\"", kind_name(device.kind))?;
    writeln!(f, "name = {}\ncores = {}", quoted(&device.name), device.cores)?;
    if let Some(isa) = &device.instruction_set {
        writeln!(f, "isa = {}", quoted(isa))?;
    }
    line(f, "launch", &device.launch_s, Unit::Seconds)?;
    writeln!(f, "\n[{at}device.memory]")?;
    line(f, "capacity", &device.memory_bytes, Unit::Bytes)?;
    line(f, "reserved", &device.reserved_bytes, Unit::Bytes)?;
    line(f, "bandwidth", &device.memory_bandwidth, Unit::BytesPerSecond)?;
    writeln!(f, "\n[{at}device.peak]")?;
    for (dtype, rate) in &device.peak {
        line(f, dtype.name(), rate, Unit::FlopsPerSecond)?;
    }
    if let Some(power) = &device.power {
        writeln!(f, "\n[{at}device.power]")?;
        line(f, "busy", &power.busy_w, Unit::Watts)?;
        line(f, "idle", &power.idle_w, Unit::Watts)?;
    }
    if cluster.host != Host::default() {
        writeln!(f, "\n[{at}host]")?;
    }
    if let Some(memory) = &cluster.host.memory_bytes {
        line(f, "memory", memory, Unit::Bytes)?;
    }
    if let Some(bandwidth) = &cluster.host.bandwidth {
        line(f, "bandwidth", bandwidth, Unit::BytesPerSecond)?;
    }
    for level in &cluster.levels {
        writeln!(f, "\n[[{at}level]]\nname = {}", quoted(&level.name))?;
        if let Some(count) = level.count {
            writeln!(f, "count = {count}")?;
        }
        line(f, "bandwidth", &level.bandwidth, Unit::BytesPerSecond)?;
        line(f, "latency", &level.latency, Unit::Seconds)?;
        if let Some(Joined { shape, origin, source }) = &level.shape {
            let known = Known { value: 0.0, origin: *origin, source: source.clone() };
            commented(f, "shape", &format!("{:?}", shape.name()), &known)?;
        }
        for (key, known) in [("oversubscription", &level.oversubscription), ("rails", &level.rails)]
        {
            if let Some(known) = known {
                commented(f, key, &known.value.to_string(), known)?;
            }
        }
    }
    writeln!(f, "\n[{at}deployment]\nnodes = {}", cluster.nodes)?;
    if let Some(devices) = cluster.devices_per_node {
        writeln!(f, "devices_per_node = {devices}")?;
    }
    if let Some(price) = &cluster.price {
        let Price { per_device_hour, currency, as_of, said_by } = price;
        writeln!(f, "\n[{at}deployment.price]")?;
        let text = quoted(&format!("{} {currency}", per_device_hour.value));
        commented(f, "per_device_hour", &text, per_device_hour)?;
        writeln!(f, "as_of = {}", quoted(as_of))?;
        if let Some(said_by) = said_by {
            writeln!(f, "source = {}", quoted(said_by))?;
        }
    }
    Ok(())
}

/// A text as TOML writes it.
pub(super) fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    for letter in text.chars() {
        match letter {
            '"' | '\\' => quoted.extend(['\\', letter]),
            _ if letter.is_control() => quoted += &format!("\\u{:04X}", u32::from(letter)),
            _ => quoted.push(letter),
        }
    }
    quoted + "\""
}

fn line(f: &mut fmt::Formatter<'_>, key: &str, known: &Known, unit: Unit) -> fmt::Result {
    commented(f, key, &format!("{:?}", unit.print(known.value)), known)
}

/// A value with where it is from.
fn commented(f: &mut fmt::Formatter<'_>, key: &str, value: &str, known: &Known) -> fmt::Result {
    let value = format!("{key} = {value}");
    // A comment ends with its line.
    let source = known.source.replace(char::is_control, " ");
    writeln!(f, "{value:<34} # {}, {source}", known.origin)
}
