//! `--what-if`: what about a cluster could be other.

use std::fmt;
use std::str::FromStr;

use ir::import::nearest;
use kernels::Bytes;
use planner::cluster::PRESETS;
use planner::quantity::Unit;

/// Something about a cluster that could be other.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// A factor on the number of NICs of a node, and so on the bandwidth between nodes.
    Nics(f64),
    /// Bytes of a device.
    Memory(f64),
    /// The devices and links of a preset.
    Device(String),
    /// The number of devices.
    Devices(usize),
}

const FORMS: [(&str, &str); 4] = [
    ("nics", "nics=2: twice the bandwidth between nodes"),
    ("memory", "memory=141GB: of each device"),
    ("device", "device=b200: the devices and links of a preset"),
    ("devices", "devices=128: this number of devices"),
];

impl FromStr for Change {
    type Err = String;

    fn from_str(text: &str) -> Result<Change, String> {
        let forms = || FORMS.map(|(_, form)| form).join("; ");
        let (key, value) = text.split_once('=').ok_or_else(|| format!("write {}", forms()))?;
        let wrong = |why: &str| format!("`{key}` is not `{value}`: {why}");
        match key {
            "nics" => {
                let times = value.parse().ok().filter(|times| (0.01..=1024.0).contains(times));
                times.map(Change::Nics).ok_or_else(|| wrong("write how many times those there are"))
            }
            "memory" => {
                let bytes = Unit::Bytes.parse(value).filter(|bytes| *bytes > 0.0);
                bytes.map(Change::Memory).ok_or_else(|| wrong("write a size such as 141GB"))
            }
            "device" => {
                if PRESETS.iter().any(|(name, _)| *name == value) {
                    return Ok(Change::Device(value.to_owned()));
                }
                let names = || PRESETS.iter().map(|(name, _)| *name);
                let near = nearest(value, names()).map(|near| format!("did you mean `{near}`? "));
                let all = names().collect::<Vec<_>>().join(", ");
                Err(wrong(&format!("{}presets are {all}", near.unwrap_or_default())))
            }
            "devices" => {
                let count = value.parse().ok().filter(|count| *count > 0);
                count.map(Change::Devices).ok_or_else(|| wrong("write a number of devices"))
            }
            _ => {
                let names = FORMS.map(|(name, _)| name);
                let near = nearest(key, names).map(|near| format!("did you mean `{near}`? "));
                Err(format!("{}write {}", near.unwrap_or_default(), forms()))
            }
        }
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Change::Nics(times) => write!(f, "nics={times}"),
            Change::Memory(bytes) => write!(f, "memory={}", Bytes(*bytes as u64)),
            Change::Device(name) => write!(f, "device={name}"),
            Change::Devices(count) => write!(f, "devices={count}"),
        }
    }
}
