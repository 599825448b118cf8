//! The cluster: devices, the links between them, how many there are, and where each number is from.
//!
//! Three layers of TOML: a datasheet (a preset, or a file that others extend), a calibration
//! (measured, see [`crate::calibration`]) and a deployment (the user's file: counts, what is
//! reserved). A file that `extends` another overrides it value by value; each value keeps its
//! origin. Units are mandatory.
//!
//! ```toml
//! name = "two-nodes"
//! extends = "preset:h100"        # or "file:PATH", relative to this file
//! [deployment]
//! nodes = 2
//! ```
//!
//! * `name`; `extends`, what it overrides; `origin`, how its numbers are known.
//! * `[device]`: `kind`, `name`, `launch`, `detect`, `cores`, `isa`; `[device.memory]`: `capacity`,
//!   `reserved`, `bandwidth`; `[device.peak]`: operations per second, by element type;
//!   `[device.power]`: `busy` and `idle`, with the device's share of its node.
//! * `[host]`: `memory` of a node beside its devices, `bandwidth` between both.
//! * `[[level]]`: links, from the device outwards: `name`, `count` of members, `bandwidth` of a
//!   device and direction, `latency`, and where they are not those of switches for all:
//!   * `shape`: `"full"` where each member has a link to each other one, with an equal part of the
//!     bandwidth, `"ring"` where it has links to two neighbours, with half of it each, else
//!     `"switch"`;
//!   * `oversubscription`: 2 where half of the bandwidth goes through when all send at once;
//!   * `rails`, of the second level: switches that each join devices of equal place in their nodes.
//!     What is for another rail hops inside its node, or takes the level beyond.
//! * `[deployment]`: `nodes`, `devices_per_node`, `reserved` bytes of a device.
//! * `[deployment.price]`: `per_device_hour` with its currency, `as_of` a day, `source`.
//! * `[[group]]`: a kind of devices, which says what a file can say, or extends one.
//! * `[[link]]`: `between` the names of two groups, `bandwidth` of the whole link and direction,
//!   `latency`.
//!
//! ```toml
//! name = "two-kinds"
//! [[group]]
//! name = "new"
//! extends = "preset:h100"
//! [group.deployment]
//! nodes = 4
//! [group.deployment.price]
//! per_device_hour = "2.50 USD"
//! as_of = 2026-08-01
//! source = "contract"
//! [[group.level]]
//! name = "infiniband"
//! count = 32                     # nodes of a leaf
//! rails = 8
//! [[group.level]]
//! name = "spine"
//! bandwidth = "50 GB/s"
//! latency = "9 us"
//! oversubscription = 2
//! [[group]]
//! name = "old"
//! extends = "preset:a100"
//! [[link]]
//! between = ["new", "old"]
//! bandwidth = "12.5 GB/s"
//! latency = "30 us"
//! ```

pub mod detect;
mod doubts;
mod draft;
pub(crate) mod names;
mod print;
mod target;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use ir::import::nearest;
use ir::{DType, Diagnostic, Span};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::calibration::Calibration;
use crate::link::Link;
use crate::machine::Machine;
use crate::origin::Origin;
use crate::reader::DIAGNOSTICS_MAX;

use draft::{Draft, Extends};

/// Clusters that need no file, with their texts.
pub const PRESETS: [(&str, &str); 32] = [
    ("cpu-local", include_str!("preset/cpu-local.toml")),
    ("v100", include_str!("preset/v100.toml")),
    ("v100-16gb", include_str!("preset/v100-16gb.toml")),
    ("a100", include_str!("preset/a100.toml")),
    ("a100-40gb", include_str!("preset/a100-40gb.toml")),
    ("a100-pcie", include_str!("preset/a100-pcie.toml")),
    ("a800", include_str!("preset/a800.toml")),
    ("h100", include_str!("preset/h100.toml")),
    ("h100-96gb", include_str!("preset/h100-96gb.toml")),
    ("h100-pcie", include_str!("preset/h100-pcie.toml")),
    ("h100-nvl", include_str!("preset/h100-nvl.toml")),
    ("h800", include_str!("preset/h800.toml")),
    ("h20", include_str!("preset/h20.toml")),
    ("h200", include_str!("preset/h200.toml")),
    ("gh200", include_str!("preset/gh200.toml")),
    ("b200", include_str!("preset/b200.toml")),
    ("b300", include_str!("preset/b300.toml")),
    ("gb200-nvl72", include_str!("preset/gb200-nvl72.toml")),
    ("gb300-nvl72", include_str!("preset/gb300-nvl72.toml")),
    ("mi300x", include_str!("preset/mi300x.toml")),
    ("mi250x", include_str!("preset/mi250x.toml")),
    ("mi325x", include_str!("preset/mi325x.toml")),
    ("mi355x", include_str!("preset/mi355x.toml")),
    ("rtx4090", include_str!("preset/rtx4090.toml")),
    ("rtx3090", include_str!("preset/rtx3090.toml")),
    ("l40s", include_str!("preset/l40s.toml")),
    ("l4", include_str!("preset/l4.toml")),
    ("a6000", include_str!("preset/a6000.toml")),
    ("a40", include_str!("preset/a40.toml")),
    ("a10", include_str!("preset/a10.toml")),
    ("a10g", include_str!("preset/a10g.toml")),
    ("t4", include_str!("preset/t4.toml")),
];

/// Digits of a calibration's hash that a plan shows. Chosen: 64 bits.
const HASH_DIGITS: usize = 16;

/// A number, how it is known, and which file says so.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Known {
    /// In SI base units.
    pub value: f64,
    /// How it is known.
    pub origin: Origin,
    /// The preset or file.
    pub source: String,
}

/// The kind of devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Ranks share the cores and the memory of their node.
    Cpu,
    /// A rank has a device of its own.
    Gpu,
}

/// The type of all devices. Of a CPU, rates of operations are those of one core; memory and its
/// bandwidth are those of a node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Device {
    /// CPU or GPU.
    pub kind: Kind,
    /// For people.
    pub name: String,
    /// Operations per second of dense products, by element type.
    #[schemars(with = "BTreeMap<String, Known>")]
    pub peak: BTreeMap<DType, Known>,
    /// Bytes of memory.
    pub memory_bytes: Known,
    /// Bytes that are not ours: context, libraries, other programs.
    pub reserved_bytes: Known,
    /// Bytes per second to and from memory.
    pub memory_bandwidth: Known,
    /// Seconds from one launch to the next, at least.
    pub launch_s: Known,
    /// Cores of a node of CPUs.
    pub cores: usize,
    /// The instruction set, where it was read.
    pub instruction_set: Option<String>,
    /// What it draws with its share of the node, where the user says so.
    pub power: Option<Power>,
}

/// What a device draws, with its share of the node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Power {
    /// Watts while it computes.
    pub busy_w: Known,
    /// Watts while it waits or communicates; those of computing where nothing is said.
    pub idle_w: Known,
}

impl Power {
    /// As many watts, whatever a device does.
    pub fn constant(watts: f64, source: &str) -> Power {
        let known = Known { value: watts, origin: Origin::Given, source: source.to_owned() };
        Power { busy_w: known.clone(), idle_w: known }
    }

    /// The limit of a board by its datasheet, whatever the device does.
    pub fn of_board(watts: f64) -> Power {
        let source = "the board's limit in the datasheet".to_owned();
        let known = Known { value: watts, origin: Origin::Datasheet, source };
        Power { busy_w: known.clone(), idle_w: known }
    }

    /// Joules that a device draws in `seconds`, for `busy_s` of which it computes:
    /// `idle_w · seconds + (busy_w - idle_w) · busy_s`.
    pub fn joules(&self, seconds: f64, busy_s: f64) -> f64 {
        let (busy_w, idle_w) = (self.busy_w.value, self.idle_w.value);
        idle_w * seconds + (busy_w - idle_w) * busy_s
    }
}

/// What an hour of a device costs, as the user says: nobody else knows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Price {
    /// Money for an hour of a device.
    pub per_device_hour: Known,
    /// In which, by its three letters.
    pub currency: String,
    /// The day on which it was so: `2026-08-01`.
    pub as_of: String,
    /// Who says so: a contract, a list.
    pub said_by: Option<String>,
}

impl fmt::Display for Price {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Price { per_device_hour, currency, as_of, said_by } = self;
        write!(f, "{} {currency} as of {as_of}", per_device_hour.value)?;
        said_by.as_ref().map_or(Ok(()), |by| write!(f, " ({by})"))
    }
}

/// The memory of a node beside its devices, where what is offloaded lies.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Host {
    /// Bytes of a node.
    pub memory_bytes: Option<Known>,
    /// Bytes per second between this memory and all devices of the node together, each direction:
    /// what lies between the sockets and the switches that devices share. None where each device
    /// has its own link all the way.
    pub bandwidth: Option<Known>,
}

/// How the members of a level are joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Shape {
    /// Any to any, each with all of its bandwidth, as through switches.
    Switch,
    /// Each has a link to each other one, with an equal part of its bandwidth.
    Full,
    /// Each has links to two neighbours, with half of its bandwidth each.
    Ring,
}

impl Shape {
    /// All of them.
    pub const ALL: [Shape; 3] = [Shape::Switch, Shape::Full, Shape::Ring];

    /// The name in files.
    pub fn name(self) -> &'static str {
        match self {
            Shape::Switch => "switch",
            Shape::Full => "full",
            Shape::Ring => "ring",
        }
    }
}

/// A shape, and how it is known.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Joined {
    /// The shape.
    pub shape: Shape,
    /// How it is known.
    pub origin: Origin,
    /// The file or preset that says so.
    pub source: String,
}

/// A link between two groups of devices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Between {
    /// The names of the groups.
    pub groups: [String; 2],
    /// Bytes per second of the whole link, each direction.
    pub bandwidth: Known,
    /// Seconds to the first byte.
    pub latency: Known,
}

/// Links between `count` members, each of them what the level inside spans.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Level {
    /// For people.
    pub name: String,
    /// Number of members; none where the level spans all that there are.
    pub count: Option<usize>,
    /// Bytes per second, per device and direction.
    pub bandwidth: Known,
    /// Seconds to the first byte.
    pub latency: Known,
    /// How members are joined; none for switches.
    pub shape: Option<Joined>,
    /// How much more bandwidth members have than goes through when all of them send at once; none
    /// for as much.
    pub oversubscription: Option<Known>,
    /// Switches between nodes that join devices of equal place in them, and no others; none where
    /// the switches are joined.
    pub rails: Option<Known>,
}

impl Level {
    /// Bytes per second, per device and direction, when all send at once.
    pub fn bytes_per_s(&self) -> f64 {
        let shared_by = self.oversubscription.as_ref().map_or(1.0, |known| known.value);
        self.bandwidth.value / shared_by
    }
}

/// A cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Cluster {
    /// The name.
    pub name: String,
    /// The devices.
    pub device: Device,
    /// The links, from the device outwards.
    pub levels: Vec<Level>,
    /// Nodes.
    pub nodes: usize,
    /// Devices of a node; none where ranks are threads, whose number is free.
    pub devices_per_node: Option<usize>,
    /// The memory of a node beside its devices.
    pub host: Host,
    /// What an hour of a device costs, where the user says so.
    pub price: Option<Price>,
    /// What was measured.
    pub calibration: Option<Calibration>,
    /// Clusters of other devices each, which this one is made of, in the order of ranks; none where
    /// all devices are alike. The rest is that of the first then.
    pub groups: Vec<Cluster>,
    /// Links between groups that are narrower than the networks of both.
    pub links: Vec<Between>,
    /// What kernels are compiled for in place of what the devices run; none as a rule.
    #[serde(skip)]
    pub compiled_for: Option<ir::Target>,
}

/// Where the bytes of ranks must fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// Those of each rank.
    PerRank(u64),
    /// Those of all ranks of a node together.
    PerNode(u64),
}

impl Memory {
    /// This memory where a job may use at most `bytes` bytes of each rank or node; none for all.
    pub fn limited(self, bytes: Option<f64>) -> Memory {
        let less = |have: u64| bytes.map_or(have, |bytes| have.min(bytes as u64));
        match self {
            Memory::PerRank(have) => Memory::PerRank(less(have)),
            Memory::PerNode(have) => Memory::PerNode(less(have)),
        }
    }
}

impl Cluster {
    /// Reads a preset, by name, or a file.
    ///
    /// # Errors
    /// All that is wrong: see the table of the crate.
    pub fn load(name_or_path: impl AsRef<Path>) -> Result<Cluster, Vec<Diagnostic>> {
        Cluster::load_on(name_or_path, &Machine::detect())
    }

    /// Reads a preset, by name, or a file; `machine` need not be this machine.
    ///
    /// # Errors
    /// Those of [`Cluster::load`].
    pub fn load_on(
        name_or_path: impl AsRef<Path>,
        machine: &Machine,
    ) -> Result<Cluster, Vec<Diagnostic>> {
        let path = name_or_path.as_ref();
        let at = match PRESETS.iter().find(|(name, _)| Path::new(name) == path) {
            Some((name, _)) => Source::Preset((*name).to_owned()),
            None => Source::File(path.to_owned()),
        };
        let text = at.read(&Span::of("--cluster"))?;
        read(&at, &text, machine, &mut Vec::new())
    }

    /// Reads the text of a cluster file. `source` names it in diagnostics.
    ///
    /// # Errors
    /// Those of [`Cluster::load`].
    pub fn parse(source: &str, text: &str, machine: &Machine) -> Result<Cluster, Vec<Diagnostic>> {
        read(&Source::File(PathBuf::from(source)), text, machine, &mut Vec::new())
    }

    /// The link between two groups, by their places, where the file says what it is.
    pub fn between(&self, one: usize, other: usize) -> Option<&Between> {
        let [one, other] = [one, other].map(|group| Some(&self.groups.get(group)?.name));
        let (one, other) = one.zip(other)?;
        let is_it = |link: &&Between| {
            let [a, b] = &link.groups;
            (a == one && b == other) || (a == other && b == one)
        };
        self.links.iter().find(is_it)
    }

    /// All devices; none where ranks are threads.
    pub fn devices(&self) -> Option<usize> {
        if !self.groups.is_empty() {
            let devices = self.groups.iter().filter_map(Cluster::devices);
            return Some(devices.fold(0, usize::saturating_add));
        }
        self.devices_per_node.map(|devices| devices.saturating_mul(self.nodes))
    }

    /// The links of a group of ranks that lies within `span` consecutive ranks.
    pub fn link(&self, span: usize) -> Link {
        let level = self.level(span);
        let link =
            Link { latency_s: level.latency.value, bandwidth_bytes_per_s: level.bytes_per_s() };
        let measured = self.calibration.as_ref().and_then(|c| c.collective);
        match (self.device.kind, measured) {
            (Kind::Cpu, Some(measured)) => measured,
            (Kind::Cpu | Kind::Gpu, _) => link,
        }
    }

    /// The innermost level that spans `span` consecutive ranks.
    pub fn level(&self, span: usize) -> &Level {
        let mut reach: usize = 1;
        for level in &self.levels {
            reach = reach.saturating_mul(level.count.unwrap_or(usize::MAX));
            if span <= reach {
                return level;
            }
        }
        self.levels.last().expect("a cluster has a level")
    }

    /// Threads of each of `ranks` ranks on a node of CPUs; at least one.
    pub fn threads(&self, ranks: usize) -> usize {
        (self.device.cores / ranks.max(1)).max(1)
    }

    /// By how much ranks slow each other down: those above the cores take turns.
    pub fn oversubscription(&self, ranks: usize) -> f64 {
        match self.device.kind {
            Kind::Cpu => (ranks as f64 / self.device.cores as f64).max(1.0),
            Kind::Gpu => 1.0,
        }
    }

    /// The element type that one trains in where nothing else is said: the first of bf16, f16 and
    /// f32 that all devices have products in.
    pub fn usual_dtype(&self) -> DType {
        let usual = [DType::BF16, DType::F16];
        usual.into_iter().find(|dtype| self.multiplies(*dtype)).unwrap_or(DType::F32)
    }

    /// Whether all devices have products in a type; in f32 all have.
    pub fn multiplies(&self, dtype: DType) -> bool {
        let has =
            |cluster: &Cluster| dtype == DType::F32 || cluster.device.peak.contains_key(&dtype);
        if self.groups.is_empty() { has(self) } else { self.groups.iter().all(has) }
    }

    /// Operations per second of one of `ranks` ranks on a node; as f32 where the type has no rate.
    pub fn flops_per_s(&self, dtype: DType, ranks: usize) -> Known {
        let peak = &self.device.peak;
        let known = peak.get(&dtype).or_else(|| peak.get(&DType::F32));
        let mut known =
            known.or_else(|| peak.values().next()).expect("a device has a rate").clone();
        if self.device.kind == Kind::Cpu {
            known.value *= self.threads(ranks) as f64;
        }
        known
    }

    /// Bytes per second to and from memory of one of `ranks` ranks on a node.
    pub fn memory_bandwidth(&self, ranks: usize) -> Known {
        let mut known = self.device.memory_bandwidth.clone();
        if self.device.kind == Kind::Cpu {
            known.value /= ranks.clamp(1, self.device.cores) as f64;
        }
        known
    }

    /// Where the bytes of ranks must fit.
    pub fn memory(&self) -> Memory {
        let device = &self.device;
        let bytes = (device.memory_bytes.value - device.reserved_bytes.value).max(0.0) as u64;
        match device.kind {
            Kind::Cpu => Memory::PerNode(bytes),
            Kind::Gpu => Memory::PerRank(bytes),
        }
    }

    /// Ranks of a node when there are `ranks` in all.
    pub fn ranks_per_node(&self, ranks: usize) -> usize {
        self.devices_per_node.unwrap_or_else(|| ranks.div_ceil(self.nodes)).min(ranks)
    }

    /// The name with what was read from the machine and the hash of the calibration: what a plan
    /// writes down.
    pub fn describe(&self) -> String {
        let mut text = self.name.clone();
        if let Some(isa) = &self.device.instruction_set {
            let memory = kernels::Bytes(self.device.memory_bytes.value as u64);
            text += &format!(" ({} cores, {memory}, {isa})", self.device.cores);
        }
        if let Some(calibration) = &self.calibration {
            text += &format!(" calibrated {}", &calibration.hash()[..HASH_DIGITS]);
        }
        text
    }
}

/// Where a text of a cluster is.
#[derive(Clone, Debug, PartialEq)]
enum Source {
    Preset(String),
    File(PathBuf),
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Preset(name) => write!(f, "preset:{name}"),
            Source::File(path) => write!(f, "{}", path.display()),
        }
    }
}

impl Source {
    /// What `extends` means in a file.
    fn parse(text: &str, from: &Source) -> Option<Source> {
        if let Some(name) = text.strip_prefix("preset:") {
            return Some(Source::Preset(name.to_owned()));
        }
        let path = Path::new(text.strip_prefix("file:")?);
        let folder = match from {
            Source::File(file) => file.parent().unwrap_or(Path::new("")),
            Source::Preset(_) => Path::new(""),
        };
        Some(Source::File(folder.join(path)))
    }

    /// Whether both are the same, however their paths are written.
    fn is(&self, other: &Source) -> bool {
        match (self, other) {
            (Source::File(a), Source::File(b)) => {
                let [a, b] = [a, b].map(|path| path.canonicalize().unwrap_or(path.clone()));
                a == b
            }
            _ => self == other,
        }
    }

    /// The text; `at` is the place that asks for it.
    fn read(&self, at: &Span) -> Result<String, Vec<Diagnostic>> {
        let names = || PRESETS.iter().map(|(name, _)| *name);
        let known = || names().map(|n| format!("`{n}`")).collect::<Vec<_>>().join(", ");
        match self {
            Source::Preset(name) => {
                let found = PRESETS.iter().find(|(preset, _)| preset == name);
                found.map(|(_, text)| (*text).to_owned()).ok_or_else(|| {
                    let headline = format!("there is no cluster preset `{name}`");
                    let near = nearest(name, names());
                    let help = near.map(|n| format!("did you mean `{n}`?"));
                    let help = help.unwrap_or_else(|| format!("the presets are {}", known()));
                    vec![Diagnostic::error("E3006", at.clone(), headline).help(help)]
                })
            }
            Source::File(path) => ir::file::read_text(path).map_err(|error| {
                let shown = path.display().to_string();
                if error.kind() == std::io::ErrorKind::NotFound {
                    let headline = format!("`{shown}` is neither a cluster preset nor a file");
                    let near = nearest(&shown, names());
                    let help = near.map(|n| format!("did you mean `{n}`?"));
                    let help = help.unwrap_or_else(|| format!("the presets are {}", known()));
                    return vec![Diagnostic::error("E3006", at.clone(), headline).help(help)];
                }
                if error.kind() == std::io::ErrorKind::InvalidData {
                    let headline = format!("`{shown}` is not UTF-8 text");
                    let help = "give a cluster file, which is TOML".to_owned();
                    return vec![Diagnostic::error("E3001", at.clone(), headline).help(help)];
                }
                let headline = format!("cannot read `{shown}`: {error}");
                vec![Diagnostic::error("E3007", at.clone(), headline)]
            }),
        }
    }
}

fn read(
    at: &Source,
    text: &str,
    machine: &Machine,
    above: &mut Vec<Source>,
) -> Result<Cluster, Vec<Diagnostic>> {
    let (draft, mut wrong) = merge(at, text, above);
    // Report wrong values together with values that could not be read.
    let made = draft.complete(&at.to_string(), machine);
    wrong.extend(made.as_ref().err().into_iter().flatten().cloned());
    wrong.truncate(DIAGNOSTICS_MAX);
    match made {
        Ok(cluster) if wrong.is_empty() => Ok(cluster),
        Ok(_) | Err(_) => Err(wrong),
    }
}

/// A file laid over what it extends, as far as that can be read, and what cannot. `above` are the
/// files that led here.
fn merge(at: &Source, text: &str, above: &mut Vec<Source>) -> (Draft, Vec<Diagnostic>) {
    let (mut draft, extends, mut diagnostics) = Draft::read(&at.to_string(), text);
    above.push(at.clone());
    let base = below(extends, at, above, &mut diagnostics);
    draft.groups = std::mem::take(&mut draft.groups)
        .into_iter()
        .map(|(group, extends)| {
            let base = below(extends, at, &mut above.clone(), &mut diagnostics);
            (base.overlay(group), None)
        })
        .collect();
    if !base.groups.is_empty() && draft.says_devices() {
        let headline = "what it extends is made of groups, which alone say what devices are";
        let help = "write the groups here, each with what it extends";
        diagnostics.push(Diagnostic::error("E3004", Span::of(at.to_string()), headline).help(help));
    }
    (base.overlay(draft), diagnostics)
}

/// Files that extend each other, at most. Chosen: far more than anybody keeps apart.
const EXTENDS_MAX: usize = 16;

/// What a file or a group of it extends; nothing where it extends none.
fn below(
    extends: Extends,
    at: &Source,
    above: &mut Vec<Source>,
    diagnostics: &mut Vec<Diagnostic>,
) -> Draft {
    let Some((wanted, bytes)) = extends else { return Draft::default() };
    let span = Span { source: at.to_string(), bytes };
    let (draft, wrong) = match Source::parse(&wanted, at) {
        None => {
            let headline = format!("`extends` is `{wanted}`, neither a preset nor a file");
            let help = "write \"preset:NAME\" or \"file:PATH\"";
            (Draft::unknown(), vec![Diagnostic::error("E3008", span, headline).help(help)])
        }
        Some(next) if above.iter().any(|source| source.is(&next)) => {
            let way = above.iter().chain([&next]).map(|s| format!("`{s}`"));
            let way = way.collect::<Vec<_>>().join(" extends ");
            let headline = "a cluster extends itself".to_owned();
            let wrong = Diagnostic::error("E3008", span, headline).note(way);
            (Draft::unknown(), vec![wrong.help("leave `extends` out of one of them")])
        }
        Some(_) if above.len() >= EXTENDS_MAX => {
            let headline = format!("more than {EXTENDS_MAX} files extend each other");
            let help = "write what they say in fewer files";
            (Draft::unknown(), vec![Diagnostic::error("E3008", span, headline).help(help)])
        }
        Some(next) => match next.read(&span) {
            Ok(text) => merge(&next, &text, above),
            Err(wrong) => (Draft::unknown(), wrong),
        },
    };
    diagnostics.extend(wrong);
    draft
}
