//! What one file says of a cluster, before the files are laid over each other.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use ir::import::nearest;
use ir::{DType, Diagnostic, Span};

use super::{
    Between, Cluster, Device, Host, Joined, Kind, Known, Level, Origin, Power, Price, Shape,
};
use crate::machine::Machine;
use crate::quantity::Unit;
use crate::reader::{COUNT_MAX, Reader, Table};

/// The values of one file, or of several laid over each other.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Draft {
    name: Option<String>,
    kind: Option<Kind>,
    device_name: Option<String>,
    detect: Option<bool>,
    cores: Option<usize>,
    instruction_set: Option<String>,
    peak: BTreeMap<DType, Known>,
    memory_bytes: Option<Known>,
    reserved_bytes: Option<Known>,
    memory_bandwidth: Option<Known>,
    launch_s: Option<Known>,
    busy_w: Option<Known>,
    idle_w: Option<Known>,
    host: Host,
    levels: Vec<DraftLevel>,
    nodes: Option<usize>,
    devices_per_node: Option<usize>,
    price: Option<Price>,
    /// Groups of other devices each, with what they extend.
    pub(super) groups: Vec<(Draft, Extends)>,
    /// Links between groups.
    links: Vec<DraftLink>,
    /// Tables that say more than could be read; [`EVERYTHING`] where that may be of any.
    doubted: BTreeSet<&'static str>,
}

/// A link between groups, and where its file says between which.
#[derive(Clone, Debug, PartialEq)]
struct DraftLink {
    between: Between,
    at: Span,
}

/// What is doubted where a whole file, or what it extends, cannot be read.
const EVERYTHING: &str = "";

#[derive(Clone, Debug, Default, PartialEq)]
struct DraftLevel {
    name: String,
    count: Option<usize>,
    bandwidth: Option<Known>,
    latency: Option<Known>,
    shape: Option<Joined>,
    oversubscription: Option<Known>,
    rails: Option<Known>,
}

/// Reads values that keep where they are from.
struct Values<'r, 'a> {
    reader: &'r mut Reader<'a>,
    origin: Origin,
    source: String,
}

impl Values<'_, '_> {
    fn known(&mut self, table: Table<'_>, key: &str, unit: Unit) -> Option<Known> {
        let value = self.reader.quantity(table, key, unit)?;
        Some(Known { value, origin: self.origin, source: self.source.clone() })
    }

    /// A count that says where it is from.
    fn count(&mut self, table: Table<'_>, key: &str) -> Option<Known> {
        let value = self.reader.count(table, key)? as f64;
        Some(Known { value, origin: self.origin, source: self.source.clone() })
    }

    /// How many times more something is: at least once.
    fn ratio(&mut self, table: Table<'_>, key: &str) -> Option<Known> {
        let value = self.reader.ratio(table, key, OVERSUBSCRIPTION_MAX)?;
        Some(Known { value, origin: self.origin, source: self.source.clone() })
    }

    fn shape(&mut self, table: Table<'_>) -> Option<Joined> {
        let shape = read_name(self.reader, table, "shape", &Shape::ALL, Shape::name)?;
        Some(Joined { shape, origin: self.origin, source: self.source.clone() })
    }

    /// A rate or a size, which is never nothing.
    fn positive(&mut self, table: Table<'_>, key: &str, unit: Unit) -> Option<Known> {
        let value = self.reader.positive(table, key, unit)?;
        Some(Known { value, origin: self.origin, source: self.source.clone() })
    }
}

/// What a group may say.
const GROUP_KEYS: [&str; 7] =
    ["name", "extends", "origin", "device", "host", "level", "deployment"];

/// What a file may say beside it.
const ROOT_KEYS: [&str; 2] = ["group", "link"];

const LEVEL_KEYS: [&str; 7] =
    ["name", "count", "bandwidth", "latency", "shape", "oversubscription", "rails"];

/// By how much more than goes through members may send, at most. Chosen: far above any network.
const OVERSUBSCRIPTION_MAX: f64 = 1e3;

/// What is extended, and where that stands.
pub(super) type Extends = Option<(String, Range<usize>)>;

impl Draft {
    /// Reads one file: its values, what it extends and where that stands, and what is wrong.
    pub(super) fn read(source: &str, text: &str) -> (Draft, Extends, Vec<Diagnostic>) {
        let (mut reader, root) = Reader::open(source, text);
        let root = Table::root(&root);
        let keys = [&GROUP_KEYS[..], &ROOT_KEYS].concat();
        if reader.is_foreign(root, &keys) {
            return (Draft::unknown(), None, reader.diagnostics);
        }
        reader.expect_keys(root, &keys);
        let is_whole = reader.wrong_count == 0;
        let (mut draft, extends) = Draft::of(&mut reader, source, root);
        draft.doubted.extend(Some(EVERYTHING).filter(|_| !is_whole));
        for group in reader.tables(root, "group") {
            let before = reader.wrong_count;
            reader.expect_keys(group, &GROUP_KEYS);
            let is_whole = reader.wrong_count == before;
            let (mut own, extends) = Draft::of(&mut reader, source, group);
            own.doubted.extend(Some(EVERYTHING).filter(|_| !is_whole));
            draft.groups.push((own, extends));
        }
        for link in reader.tables(root, "link") {
            draft.links.extend(read_link(&mut reader, source, link));
        }
        if !draft.groups.is_empty() && (draft.says_devices() || extends.is_some()) {
            let headline = "a cluster of groups says nothing of devices itself".to_owned();
            reader.report("E3004", root.bytes("group"), headline).help =
                Some("write it in the groups".to_owned());
        }
        (draft, extends, reader.diagnostics)
    }

    /// What is known of a cluster whose file cannot be read.
    pub(super) fn unknown() -> Draft {
        Draft { doubted: BTreeSet::from([EVERYTHING]), ..Draft::default() }
    }

    /// Doubts a table if the reader has found more wrong values than `wrong_count`.
    fn doubt_since(&mut self, wrong_count: usize, reader: &Reader<'_>, table: &'static str) {
        self.doubted.extend(Some(table).filter(|_| reader.wrong_count > wrong_count));
    }

    /// Whether a table may say more than is known.
    fn doubts(&self, table: &str) -> bool {
        self.doubted.contains(EVERYTHING) || self.doubted.contains(table)
    }

    /// The values of a table that is a file or a group of one.
    fn of(reader: &mut Reader<'_>, source: &str, root: Table<'_>) -> (Draft, Extends) {
        let mut draft = Draft { name: reader.string(root, "name"), ..Draft::default() };
        let extends = reader.string(root, "extends").map(|text| (text, root.bytes("extends")));
        let origin = read_name(reader, root, "origin", &Origin::ALL, Origin::name);
        let origin = origin.unwrap_or(Origin::of_source(source));
        let mut values = Values { reader, origin, source: source.to_owned() };
        let before = values.reader.wrong_count;
        match values.reader.table(root, "device") {
            Some(device) => draft.read_device(&mut values, device),
            None => draft.doubt_since(before, values.reader, EVERYTHING),
        }
        if let Some(host) = values.reader.table(root, "host") {
            values.reader.expect_keys(host, &["memory", "bandwidth"]);
            draft.host.memory_bytes = values.positive(host, "memory", Unit::Bytes);
            draft.host.bandwidth = values.positive(host, "bandwidth", Unit::BytesPerSecond);
        }
        let before = values.reader.wrong_count;
        for table in values.reader.tables(root, "level") {
            values.reader.expect_keys(table, &LEVEL_KEYS);
            if table.bytes("name").is_empty() {
                let headline = "a `[[level]]` has no `name`".to_owned();
                values.reader.report("E3003", root.bytes("level"), headline).help =
                    Some("write one, such as `name = \"infiniband\"`".to_owned());
            }
            draft.levels.push(DraftLevel {
                name: values.reader.string(table, "name").unwrap_or_default(),
                count: values.reader.count(table, "count"),
                bandwidth: values.positive(table, "bandwidth", Unit::BytesPerSecond),
                latency: values.known(table, "latency", Unit::Seconds),
                shape: values.shape(table),
                oversubscription: values.ratio(table, "oversubscription"),
                rails: values.count(table, "rails"),
            });
        }
        draft.doubt_since(before, values.reader, "level");
        let before = values.reader.wrong_count;
        if let Some(table) = values.reader.table(root, "deployment") {
            let keys = ["nodes", "devices_per_node", "reserved", "price"];
            values.reader.expect_keys(table, &keys);
            draft.nodes = values.reader.count(table, "nodes");
            draft.devices_per_node = values.reader.count(table, "devices_per_node");
            let reserved = values.known(table, "reserved", Unit::Bytes);
            draft.reserved_bytes = reserved.or(draft.reserved_bytes);
            if let Some(price) = values.reader.table(table, "price") {
                draft.price = read_price(&mut values, price);
            }
        }
        draft.doubt_since(before, values.reader, "deployment");
        (draft, extends)
    }

    fn read_device(&mut self, values: &mut Values<'_, '_>, device: Table<'_>) {
        let before = values.reader.wrong_count;
        let keys = ["kind", "name", "detect", "cores", "isa", "launch", "memory", "peak", "power"];
        values.reader.expect_keys(device, &keys);
        let kinds = [Kind::Cpu, Kind::Gpu];
        self.kind = read_name(values.reader, device, "kind", &kinds, kind_name);
        self.device_name = values.reader.string(device, "name");
        self.detect = values.reader.flag(device, "detect");
        self.cores = values.reader.count(device, "cores");
        self.instruction_set = values.reader.string(device, "isa");
        self.launch_s = values.known(device, "launch", Unit::Seconds);
        self.doubt_since(before, values.reader, "device");
        let before = values.reader.wrong_count;
        if let Some(memory) = values.reader.table(device, "memory") {
            values.reader.expect_keys(memory, &["capacity", "reserved", "bandwidth"]);
            self.memory_bytes = values.positive(memory, "capacity", Unit::Bytes);
            self.reserved_bytes = values.known(memory, "reserved", Unit::Bytes);
            self.memory_bandwidth = values.positive(memory, "bandwidth", Unit::BytesPerSecond);
        }
        self.doubt_since(before, values.reader, "device.memory");
        let before = values.reader.wrong_count;
        if let Some(power) = values.reader.table(device, "power") {
            values.reader.expect_keys(power, &["busy", "idle"]);
            self.busy_w = values.known(power, "busy", Unit::Watts);
            self.idle_w = values.known(power, "idle", Unit::Watts);
        }
        self.doubt_since(before, values.reader, "device.power");
        let before = values.reader.wrong_count;
        if let Some(peak) = values.reader.table(device, "peak") {
            let names: Vec<&str> = DType::ALL.iter().map(|d| d.name()).collect();
            values.reader.expect_keys(peak, &names);
            for dtype in DType::ALL {
                let rate = values.positive(peak, dtype.name(), Unit::FlopsPerSecond);
                self.peak.extend(rate.map(|rate| (dtype, rate)));
            }
        }
        self.doubt_since(before, values.reader, "device.peak");
    }

    /// Whether it says anything of devices, links or nodes, and not of groups of them.
    pub(super) fn says_devices(&self) -> bool {
        let Draft { name, groups, links, .. } = self.clone();
        *self != Draft { name, groups, links, ..Draft::default() }
    }

    /// These values where the upper file has none.
    pub(super) fn overlay(mut self, upper: Draft) -> Draft {
        self.peak.extend(upper.peak);
        self.doubted.extend(upper.doubted);
        for level in upper.levels {
            match self.levels.iter_mut().find(|l| l.name == level.name) {
                Some(there) => {
                    there.count = level.count.or(there.count);
                    there.bandwidth = level.bandwidth.or(there.bandwidth.take());
                    there.latency = level.latency.or(there.latency.take());
                    there.shape = level.shape.or(there.shape.take());
                    there.oversubscription =
                        level.oversubscription.or(there.oversubscription.take());
                    there.rails = level.rails.or(there.rails.take());
                }
                None => self.levels.push(level),
            }
        }
        Draft {
            name: upper.name.or(self.name),
            kind: upper.kind.or(self.kind),
            device_name: upper.device_name.or(self.device_name),
            detect: upper.detect.or(self.detect),
            cores: upper.cores.or(self.cores),
            instruction_set: upper.instruction_set.or(self.instruction_set),
            peak: self.peak,
            memory_bytes: upper.memory_bytes.or(self.memory_bytes),
            reserved_bytes: upper.reserved_bytes.or(self.reserved_bytes),
            memory_bandwidth: upper.memory_bandwidth.or(self.memory_bandwidth),
            launch_s: upper.launch_s.or(self.launch_s),
            busy_w: upper.busy_w.or(self.busy_w),
            idle_w: upper.idle_w.or(self.idle_w),
            host: Host {
                memory_bytes: upper.host.memory_bytes.or(self.host.memory_bytes),
                bandwidth: upper.host.bandwidth.or(self.host.bandwidth),
            },
            levels: self.levels,
            nodes: upper.nodes.or(self.nodes),
            devices_per_node: upper.devices_per_node.or(self.devices_per_node),
            price: upper.price.or(self.price),
            links: if upper.links.is_empty() { self.links } else { upper.links },
            groups: if upper.groups.is_empty() { self.groups } else { upper.groups },
            doubted: self.doubted,
        }
    }

    /// The cluster of all groups.
    fn complete_groups(
        mut self,
        source: &str,
        machine: &Machine,
    ) -> Result<Cluster, Vec<Diagnostic>> {
        let (mut groups, mut wrong) = (Vec::new(), Vec::new());
        // A group that is wrong in itself is there all the same for links.
        let names: Vec<String> =
            self.groups.iter().filter_map(|(group, _)| group.name.clone()).collect();
        for (group, _) in std::mem::take(&mut self.groups) {
            let kind = group.kind;
            match group.complete(source, machine) {
                Ok(group) if kind == Some(Kind::Gpu) && group.groups.is_empty() => {
                    groups.push(group);
                }
                Ok(group) => {
                    let headline = format!("`{}` is no group of devices of its own", group.name);
                    let help = "extend a cluster of GPUs that are alike";
                    wrong.push(Diagnostic::error("E3004", Span::of(source), headline).help(help));
                }
                Err(more) => wrong.extend(more),
            }
        }
        let devices = groups.iter().filter_map(Cluster::devices).fold(0, usize::saturating_add);
        wrong.extend(too_many(source, devices));
        wrong.extend(two_currencies(source, &groups));
        wrong.extend(wrong_links(&self.links, &names));
        let links: Vec<Between> = self.links.into_iter().map(|link| link.between).collect();
        match groups.first() {
            Some(first) if wrong.is_empty() => {
                let name = self.name.unwrap_or_else(|| source.to_owned());
                Ok(Cluster { name, groups: groups.clone(), links, ..first.clone() })
            }
            Some(_) | None => Err(wrong),
        }
    }

    /// The cluster; what is missing is reported, all at once, and so is what cannot be. Of tables
    /// that are doubted nothing is said to be missing: then there is no cluster.
    pub(super) fn complete(
        mut self,
        source: &str,
        machine: &Machine,
    ) -> Result<Cluster, Vec<Diagnostic>> {
        if !self.groups.is_empty() {
            return self.complete_groups(source, machine);
        }
        if self.detect == Some(true) {
            self.take_machine(machine);
        }
        let doubted = self.doubted.clone();
        let mut missing = Missing { source, doubted: &doubted, diagnostics: Vec::new() };
        missing.diagnostics.extend(wrong_links(&self.links, &[]));
        let levels = complete_levels(std::mem::take(&mut self.levels), &mut missing);
        let devices_per_node = self.devices_per_node;
        if self.kind == Some(Kind::Gpu) {
            missing.need(devices_per_node, "deployment.devices_per_node", "8");
        }
        let (name, nodes) = (self.name.take(), self.nodes.unwrap_or(1));
        let devices = devices_per_node.map(|each| nodes.saturating_mul(each));
        missing.diagnostics.extend(devices.and_then(|devices| too_many(source, devices)));
        if !self.doubts("level") && !self.doubts("deployment") {
            missing.diagnostics.extend(wrong_counts(source, &levels, devices_per_node));
            missing.diagnostics.extend(wrong_ways(source, &levels, self.kind, devices_per_node));
        }
        let (host, price) = (std::mem::take(&mut self.host), self.price.take());
        let device = self.complete_device(source, &mut missing);
        match device {
            Some(device) if missing.diagnostics.is_empty() && doubted.is_empty() => Ok(Cluster {
                name: name.unwrap_or_else(|| source.to_owned()),
                device,
                levels,
                nodes,
                devices_per_node,
                host,
                price,
                calibration: None,
                groups: Vec::new(),
                links: Vec::new(),
                compiled_for: None,
            }),
            Some(_) | None => Err(missing.diagnostics),
        }
    }

    fn complete_device(self, source: &str, missing: &mut Missing<'_>) -> Option<Device> {
        let is_sure = !self.doubts("device.memory") && !self.doubts("deployment");
        let draws_sure = !self.doubts("device.power");
        let kind = missing.need(self.kind, "device.kind", "\"gpu\"");
        let memory_bytes = missing.need(self.memory_bytes, "device.memory.capacity", "\"80 GiB\"");
        let memory_bandwidth =
            missing.need(self.memory_bandwidth, "device.memory.bandwidth", "\"3.35 TB/s\"");
        let launch_s = missing.need(self.launch_s, "device.launch", "\"4 us\"");
        let rate = self.peak.values().next();
        missing.need(rate, "device.peak.f32", "\"60 TFLOP/s\"");
        let nothing = Known { value: 0.0, origin: Origin::Datasheet, source: source.to_owned() };
        let reserved_bytes = self.reserved_bytes.unwrap_or(nothing);
        if let Some(all) =
            memory_bytes.as_ref().filter(|all| is_sure && all.value <= reserved_bytes.value)
        {
            let print = |known: &Known| Unit::Bytes.print(known.value);
            let (all, reserved) = (print(all), print(&reserved_bytes));
            let headline = format!("of {all} of a device's memory, {reserved} are reserved");
            let help = "write a `reserved` that leaves something for a job";
            missing
                .diagnostics
                .push(Diagnostic::error("E3004", Span::of(source), headline).help(help));
        }
        let cores = match kind {
            Some(Kind::Cpu) => missing.need(self.cores, "device.cores", "16"),
            Some(Kind::Gpu) | None => Some(self.cores.unwrap_or(1)),
        };
        if self.idle_w.is_some() {
            missing.need(self.busy_w.as_ref(), "device.power.busy", "\"700 W\"");
        }
        let power = self
            .busy_w
            .map(|busy_w| Power { idle_w: self.idle_w.unwrap_or_else(|| busy_w.clone()), busy_w });
        if let Some(Power { busy_w, idle_w }) = &power
            && draws_sure
            && (busy_w.value < idle_w.value || busy_w.value == 0.0)
        {
            let print = |known: &Known| Unit::Watts.print(known.value);
            let headline =
                format!("a busy device draws {}, and an idle one {}", print(busy_w), print(idle_w));
            missing.diagnostics.push(
                Diagnostic::error("E3004", Span::of(source), headline)
                    .help("write a `device.power.busy` of at least `device.power.idle`"),
            );
        }
        Some(Device {
            kind: kind?,
            name: self.device_name.unwrap_or_else(|| "device".to_owned()),
            peak: self.peak,
            memory_bytes: memory_bytes?,
            reserved_bytes,
            memory_bandwidth: memory_bandwidth?,
            launch_s: launch_s?,
            cores: cores?,
            instruction_set: self.instruction_set,
            power,
        })
    }

    fn take_machine(&mut self, machine: &Machine) {
        self.cores.get_or_insert(machine.cores);
        self.instruction_set.get_or_insert_with(|| machine.instruction_set.clone());
        self.memory_bytes.get_or_insert_with(|| Known {
            value: machine.memory_bytes as f64,
            origin: Origin::Measured,
            source: "this machine".to_owned(),
        });
    }
}

/// A link between two groups.
fn read_link(reader: &mut Reader<'_>, source: &str, table: Table<'_>) -> Option<DraftLink> {
    reader.expect_keys(table, &["between", "origin", "bandwidth", "latency"]);
    let origin = read_name(reader, table, "origin", &Origin::ALL, Origin::name);
    let origin = origin.unwrap_or(Origin::of_source(source));
    let mut values = Values { reader, origin, source: source.to_owned() };
    let bandwidth = values.positive(table, "bandwidth", Unit::BytesPerSecond);
    let latency = values.known(table, "latency", Unit::Seconds);
    for (key, unit) in [("bandwidth", Unit::BytesPerSecond), ("latency", Unit::Seconds)] {
        if table.bytes(key).is_empty() {
            let headline = format!("a `[[link]]` has no `{key}`");
            let help = format!("write one, such as `{key} = {:?}`", unit.example());
            reader.report("E3003", table.span(), headline).help = Some(help);
        }
    }
    let groups = reader.pair(table, "between")?;
    let at = reader.span(table.bytes("between"));
    Some(DraftLink { between: Between { groups, bandwidth: bandwidth?, latency: latency? }, at })
}

/// What is wrong with links: between groups that are not there, or one group, or written twice.
fn wrong_links(links: &[DraftLink], groups: &[String]) -> Vec<Diagnostic> {
    let mut wrong = Vec::new();
    let names = || groups.iter().map(String::as_str);
    for (place, DraftLink { between, at }) in links.iter().enumerate() {
        let report = |headline: String| Diagnostic::error("E3004", at.clone(), headline);
        let [one, other] = &between.groups;
        for name in between.groups.iter().filter(|name| !names().any(|known| known == **name)) {
            let near = nearest(name, names()).map(|near| format!("did you mean `{near}`?"));
            let all = names().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
            let all = if all.is_empty() { "there are none here".to_owned() } else { all };
            let help = near.unwrap_or_else(|| format!("write names of groups: {all}"));
            wrong.push(report(format!("there is no group `{name}`")).help(help));
        }
        if one == other {
            let help = "write the names of two groups";
            wrong.push(report(format!("a link of `{one}` with itself")).help(help));
        }
        if names().filter(|name| *name == one).count() > 1 {
            let help = "write another `name` in one of them";
            wrong.push(report(format!("two groups are called `{one}`")).help(help));
        }
        let is_same = |link: &DraftLink| {
            let [a, b] = &link.between.groups;
            [a, b] == [one, other] || [a, b] == [other, one]
        };
        if links[..place].iter().any(is_same) {
            let help = "write it once, with all of its bandwidth";
            wrong.push(report(format!("a second link of `{one}` and `{other}`")).help(help));
        }
    }
    wrong
}

/// What is wrong with shapes and rails: where they are said of levels that cannot have them.
fn wrong_ways(
    source: &str,
    levels: &[Level],
    kind: Option<Kind>,
    each: Option<usize>,
) -> Vec<Diagnostic> {
    let mut wrong = Vec::new();
    let mut report = |headline: String, help: String| {
        wrong.push(Diagnostic::error("E3004", Span::of(source), headline).help(help));
    };
    for (place, level) in levels.iter().enumerate() {
        let name = &level.name;
        if kind == Some(Kind::Cpu) && (level.shape.is_some() || level.rails.is_some()) {
            let headline = format!("level `{name}` of CPUs has a shape or rails");
            report(headline, "leave it out: ranks of CPUs share memory".to_owned());
        }
        let Some(rails) = level.rails.as_ref().map(|rails| rails.value as usize) else { continue };
        if place != 1 {
            let headline = format!("level `{name}` has rails, and does not join nodes");
            let help = "write them in the second level: they join devices of equal place in nodes";
            report(headline, help.to_owned());
        }
        let node = levels[0].count.or(each);
        if let Some(node) = node.filter(|node| !node.is_multiple_of(rails)) {
            let headline = format!("level `{name}` has {rails} rails, and a node {node} devices");
            report(headline, format!("write a number that divides {node}"));
        }
    }
    wrong
}

/// What an hour of a device costs: with its currency and its day.
fn read_price(values: &mut Values<'_, '_>, table: Table<'_>) -> Option<Price> {
    let Values { reader, origin, source } = values;
    reader.expect_keys(table, &["per_device_hour", "as_of", "source"]);
    let (price, day) = (reader.money(table, "per_device_hour"), reader.day(table, "as_of"));
    let said_by = reader.string(table, "source");
    let (value, currency) = price?;
    let per_device_hour = Known { value, origin: *origin, source: source.clone() };
    Some(Price { per_device_hour, currency, as_of: day?, said_by })
}

/// What is wrong with prices that cannot be added.
fn two_currencies(source: &str, groups: &[Cluster]) -> Option<Diagnostic> {
    let mut prices = groups.iter().filter_map(|group| Some((&group.name, group.price.as_ref()?)));
    let (first, price) = prices.next()?;
    let (other, another) = prices.find(|(_, other)| other.currency != price.currency)?;
    let (one, two) = (&price.currency, &another.currency);
    let headline = format!("`{first}` is paid for in {one}, and `{other}` in {two}");
    let help = "write all prices in one currency";
    Some(Diagnostic::error("E3004", Span::of(source), headline).help(help))
}

/// What is wrong with a cluster of more devices than there can be.
fn too_many(source: &str, devices: usize) -> Option<Diagnostic> {
    let headline = format!("the cluster has more than {COUNT_MAX} devices");
    (devices > COUNT_MAX).then(|| Diagnostic::error("E3004", Span::of(source), headline))
}

/// What is wrong with the members of levels: nodes are as large as the innermost one or divide it,
/// and what lies beyond a level begins somewhere.
fn wrong_counts(source: &str, levels: &[Level], each: Option<usize>) -> Vec<Diagnostic> {
    let mut wrong = Vec::new();
    if let (Some(each), Some(Level { name, count: Some(count), .. })) = (each, levels.first())
        && !count.is_multiple_of(each)
        && !each.is_multiple_of(*count)
    {
        let headline = format!("level `{name}` spans {count} devices, and a node has {each}");
        let help = "write counts one of which divides the other";
        wrong.push(Diagnostic::error("E3004", Span::of(source), headline).help(help));
    }
    for (place, pair) in levels.windows(2).enumerate() {
        if pair[0].count.is_none() && (place > 0 || each.is_none()) {
            let (inner, outer) = (&pair[0].name, &pair[1].name);
            let headline = format!("level `{inner}` has no end, and `{outer}` lies beyond it");
            let help = format!("write a `count` for `{inner}`: how many of the level inside");
            wrong.push(Diagnostic::error("E3004", Span::of(source), headline).help(help));
        }
    }
    wrong
}

fn complete_levels(drafts: Vec<DraftLevel>, missing: &mut Missing<'_>) -> Vec<Level> {
    missing.need(drafts.first(), "level", "a table `[[level]]`");
    let mut levels = Vec::new();
    for level in drafts {
        let at = |key: &str| format!("level.{}.{key}", level.name);
        let bandwidth = missing.need(level.bandwidth, &at("bandwidth"), "\"50 GB/s\"");
        let latency = missing.need(level.latency, &at("latency"), "\"5 us\"");
        levels.extend(bandwidth.zip(latency).map(|(bandwidth, latency)| Level {
            name: level.name,
            count: level.count,
            bandwidth,
            latency,
            shape: level.shape,
            oversubscription: level.oversubscription,
            rails: level.rails,
        }));
    }
    levels
}

/// The name of a kind in texts.
pub(super) fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Cpu => "cpu",
        Kind::Gpu => "gpu",
    }
}

/// One of a few names.
fn read_name<T: Copy>(
    reader: &mut Reader<'_>,
    table: Table<'_>,
    key: &str,
    all: &[T],
    name: impl Fn(T) -> &'static str,
) -> Option<T> {
    let text = reader.string(table, key)?;
    let found = all.iter().copied().find(|item| name(*item) == text);
    if found.is_none() {
        let names = all.iter().map(|item| format!("`{}`", name(*item)));
        let near = nearest(&text, all.iter().map(|item| name(*item)));
        let help = match near {
            Some(near) => format!("did you mean `{near}`?"),
            None => format!("write one of {}", names.collect::<Vec<_>>().join(", ")),
        };
        let headline = format!("`{key}` is `{text}`, which is not known");
        reader.report("E3004", table.bytes(key), headline).help = Some(help);
    }
    found
}

struct Missing<'a> {
    source: &'a str,
    /// Tables of which nothing is said to be missing.
    doubted: &'a BTreeSet<&'static str>,
    diagnostics: Vec<Diagnostic>,
}

impl Missing<'_> {
    fn need<T>(&mut self, value: Option<T>, key: &str, example: &str) -> Option<T> {
        let table = if key.starts_with("level") { "level" } else { key };
        let table = table.rsplit_once('.').map_or(table, |(table, _)| table);
        let is_doubted = self.doubted.contains(EVERYTHING) || self.doubted.contains(table);
        if value.is_none() && !is_doubted {
            let headline = format!("the cluster has no `{key}`");
            self.diagnostics.push(
                Diagnostic::error("E3003", Span::of(self.source), headline)
                    .help(format!("write `{key}`, such as {example}, or extend a preset")),
            );
        }
        value
    }
}
