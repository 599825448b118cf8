//! The device files and networks that come with the planner, and how a cluster finds its own.

use std::sync::OnceLock;

use ir::{DType, Diagnostic, Span};
use serde::Deserialize;

use super::network::{Beyond, Fabric, Inner, Network, Wires};
use super::rates::{Arithmetic, ProductRates, Rates};
use crate::cluster::{Cluster, Device, Kind, Level, PRESETS, Power, Shape};
use crate::machine::Machine;

/// A device and the links between devices of a node, as a file holds them.
#[derive(Clone, Debug, Deserialize)]
struct DeviceFile {
    device: Rates,
    inner: Inner,
}

/// A device without timings of its own: another one's, scaled.
#[derive(Clone, Debug, Deserialize)]
struct Scaled {
    name: String,
    like: String,
    processors: f64,
    half_flops: f64,
    f32_flops: f64,
    tf32_flops: Option<f64>,
    watts: Option<[f64; 2]>,
    board_watts: Option<f64>,
    sustained_share: Option<f64>,
    f8_flops: Option<f64>,
    f4_flops: Option<f64>,
    memory_bytes_per_s: f64,
    host_bytes_per_s: f64,
    spread: f64,
}

#[derive(Clone, Debug, Deserialize)]
struct ScaledFile {
    device: Vec<Scaled>,
}

#[derive(Clone, Debug, Deserialize)]
struct FabricFile {
    fabric: Vec<Fabric>,
}

/// The files: one a device.
const FILES: [(&str, &str); 5] = [
    ("a100-80gb", include_str!("../device/a100-80gb.toml")),
    ("h100", include_str!("../device/h100.toml")),
    ("h200", include_str!("../device/h200.toml")),
    ("b200", include_str!("../device/b200.toml")),
    ("gb200", include_str!("../device/gb200.toml")),
];
/// Devices that were not timed.
const SCALED: &str = include_str!("../device/scaled.toml");
/// Networks between nodes.
const FABRICS: &str = include_str!("../device/fabrics.toml");

struct Known {
    devices: Vec<DeviceFile>,
    fabrics: Vec<Fabric>,
    /// The presets: what the devices and links were that the files tell of.
    presets: Vec<Cluster>,
}

fn read<T: for<'de> Deserialize<'de>>(name: &str, text: &str) -> T {
    toml::from_str(text).unwrap_or_else(|error| panic!("the file {name} of this crate: {error}"))
}

fn known() -> &'static Known {
    static READ: OnceLock<Known> = OnceLock::new();
    READ.get_or_init(|| {
        let mut devices: Vec<DeviceFile> =
            FILES.iter().map(|(name, text)| read(name, text)).collect();
        let scaled: ScaledFile = read("scaled", SCALED);
        for device in scaled.device {
            let like = devices.iter().find(|known| known.device.name == device.like);
            let like = like.unwrap_or_else(|| panic!("{} is like {}", device.name, device.like));
            let mut scaled = scale(like, &device);
            if let Some(flops) = device.f8_flops {
                let products = one_byte_products(&devices, flops, &scaled);
                scaled.device.product.push(products);
            }
            devices.push(scaled);
        }
        devices.iter_mut().for_each(|file| file.device.add_wide_products());
        // Of no machine: no preset with devices of its own looks at it.
        let machine = Machine { cores: 1, memory_bytes: 1, instruction_set: String::new() };
        let presets = PRESETS.iter().filter_map(|(name, _)| Cluster::load_on(name, &machine).ok());
        Known {
            devices,
            fabrics: read::<FabricFile>("fabrics", FABRICS).fabric,
            presets: presets.filter(|preset| preset.device.kind == Kind::Gpu).collect(),
        }
    })
}

/// Another device's timings, by the ratios of the datasheets.
fn scale(like: &DeviceFile, to: &Scaled) -> DeviceFile {
    let mut file = like.clone();
    let device = &mut file.device;
    let half = device.product_rates(Arithmetic::Half).peak_flops;
    let faster = to.half_flops / half;
    let wider = to.memory_bytes_per_s / device.memory_bytes_per_s;
    device.name.clone_from(&to.name);
    device.processors = to.processors;
    device.memory_bytes_per_s = to.memory_bytes_per_s;
    device.host_bytes_per_s = to.host_bytes_per_s;
    device.f32_flops = to.f32_flops;
    device.tf32_flops = to.tf32_flops;
    device.board_watts = to.board_watts;
    let clock = to.watts.map_or(1.0, |[theirs, ours]| (ours / theirs).sqrt());
    for product in &mut device.product {
        let share = to.sustained_share.unwrap_or(product.sustained_share * clock);
        product.sustained_share = share.min(1.0);
        let own = to.f4_flops.filter(|_| product.arithmetic == Arithmetic::F4);
        product.peak_flops = own.unwrap_or(product.peak_flops * faster);
        product.bytes_per_s *= wider;
        product.spread = to.spread;
    }
    // Attention is slower than products: more power than was there when it was timed is no help.
    device.attention.forward_flops *= faster * clock.min(1.0);
    device.attention.backward_flops *= faster * clock.min(1.0);
    device.attention.spread = device.attention.spread.max(to.spread);
    file
}

/// One-byte products of a device that is like one without them: with the shares of the first device
/// that has some, and as much memory for each operation.
fn one_byte_products(devices: &[DeviceFile], flops: f64, of: &DeviceFile) -> ProductRates {
    let rates = devices.iter().flat_map(|file| &file.device.product);
    let timed = rates.into_iter().find(|rates| rates.arithmetic == Arithmetic::F8);
    let timed = timed.expect("a device file has one-byte products").clone();
    let faster = flops / timed.peak_flops;
    ProductRates {
        peak_flops: flops,
        bytes_per_s: timed.bytes_per_s * faster,
        sustained_share: of.device.product_rates(Arithmetic::Half).sustained_share,
        spread: 0.25,
        ..timed
    }
}

/// The file of a cluster's device: by its name, else the one with the nearest rate of products.
fn file(cluster: &Cluster) -> Result<&'static DeviceFile, Diagnostic> {
    let device = &cluster.device;
    if device.kind == Kind::Cpu {
        let headline = "this estimate is for devices with memory of their own, not for CPUs";
        let span = Span::of(cluster.name.clone());
        let help = "use a preset such as `a100`, or compile a plan for the ranks of this machine";
        return Err(Diagnostic::error("E3404", span, headline).help(help));
    }
    let files = &known().devices;
    let named = files.iter().find(|file| file.device.name == device.name);
    let far = |file: &&DeviceFile| {
        let ours = device.peak.values().map(|known| known.value).fold(0.0, f64::max);
        let theirs = file.device.product.iter().map(|p| p.peak_flops).fold(0.0, f64::max);
        (ours / theirs).ln().abs()
    };
    let nearest = files.iter().min_by(|a, b| far(a).total_cmp(&far(b)));
    Ok(named.or(nearest).expect("device files come with the planner"))
}

/// What a device draws at most, by the datasheet of its board; none for a device that no table
/// names.
pub fn board_power(cluster: &Cluster) -> Option<Power> {
    let files = &known().devices;
    let named = files.iter().find(|file| file.device.name == cluster.device.name)?;
    named.device.board_watts.map(Power::of_board)
}

/// The rates of a cluster's device.
///
/// A device file tells of the device as its preset describes it. Where the cluster says other
/// peaks, another bandwidth or another launch, the timings follow in proportion.
pub(super) fn rates(cluster: &Cluster) -> Result<Rates, Diagnostic> {
    let file = file(cluster)?;
    Ok(as_said(file.device.clone(), &cluster.device, &preset(file).device))
}

/// Operations per second of a device as its cluster says, in the arithmetic that products of one
/// run in: the next wider one where the device lacks it.
pub(super) fn peak_flops(cluster: &Cluster, rates: &Rates, arithmetic: Arithmetic) -> f64 {
    let used = rates.product_rates(arithmetic);
    let types: &[DType] = match used.arithmetic {
        Arithmetic::F32 => &[DType::F32],
        Arithmetic::Half => &[DType::BF16, DType::F16],
        Arithmetic::F8 => &[DType::F8E4M3, DType::F8E5M2],
        Arithmetic::Tf32 | Arithmetic::F4 => &[],
    };
    let said = types.iter().find_map(|dtype| cluster.device.peak.get(dtype));
    said.map_or(used.peak_flops, |known| known.value)
}

/// The preset of a device file.
fn preset(file: &DeviceFile) -> &'static Cluster {
    let found = known().presets.iter().find(|preset| preset.device.name == file.device.name);
    found.expect("each device file has a preset")
}

/// Rates of the device `to`, scaled from `rates`, which are those of the similar device `from`.
fn as_said(mut rates: Rates, to: &Device, from: &Device) -> Rates {
    let half = faster(to, from, &[DType::BF16, DType::F16], DType::F32);
    let bytes = faster(to, from, &[DType::F8E4M3, DType::F8E5M2], DType::BF16);
    let single = if to.peak.contains_key(&DType::F32) {
        faster(to, from, &[DType::F32], DType::BF16)
    } else {
        half
    };
    let wider = to.memory_bandwidth.value / from.memory_bandwidth.value;
    let launch = |seconds: f64| {
        let (to, from) = (to.launch_s.value, from.launch_s.value);
        // A slower launch lengthens each kernel; a faster one shortens what is start-up.
        if to >= from { seconds + (to - from) } else { seconds * (to / from) }
    };
    for product in &mut rates.product {
        product.peak_flops *= match product.arithmetic {
            Arithmetic::F32 => single,
            Arithmetic::Half | Arithmetic::Tf32 => half,
            Arithmetic::F8 | Arithmetic::F4 => bytes,
        };
        product.bytes_per_s *= wider;
        product.floor_s = launch(product.floor_s);
    }
    rates.attention.forward_flops *= half;
    rates.attention.backward_flops *= half;
    rates.attention.floor_s = launch(rates.attention.floor_s);
    rates.memory_bytes_per_s *= wider;
    rates.kernel_s = launch(rates.kernel_s);
    rates
}

/// How much faster products of some types are: of the first of them that differs, and as those of
/// the next wider type where a device has none of them.
fn faster(to: &Device, from: &Device, types: &[DType], wider: DType) -> f64 {
    let peak = |device: &Device, dtype: &DType| device.peak.get(dtype).map(|known| known.value);
    let ratios = types.iter().filter_map(|dtype| Some(peak(to, dtype)? / peak(from, dtype)?));
    let ratios: Vec<f64> = ratios.collect();
    if let Some(same) = ratios.first() {
        return *ratios.iter().find(|ratio| **ratio != 1.0).unwrap_or(same);
    }
    let best = |device: &Device| {
        let all = types.iter().chain([&wider]).find_map(|dtype| peak(device, dtype));
        all.or_else(|| device.peak.values().next().map(|known| known.value)).unwrap_or(1.0)
    };
    best(to) / best(from)
}

/// Seconds by which the first byte takes longer over a level than over the links of that name that
/// were timed, or else of that place. Those of presets were.
fn more_s(level: &Level, place: usize, preset: &Cluster) -> f64 {
    if level.latency.source.starts_with("preset:") {
        return 0.0;
    }
    let all = preset.levels.iter().chain(known().presets.iter().flat_map(|other| &other.levels));
    let named = all.into_iter().find(|other| other.name == level.name);
    let timed = named.or(preset.levels.get(place)).or(preset.levels.last());
    level.latency.value - timed.map_or(0.0, |timed| timed.latency.value)
}

/// The links of a cluster: how they behave is known of the device and of the network that the
/// outer level is named after, InfiniBand where there is none; how fast they are is the cluster's.
pub(super) fn network(cluster: &Cluster) -> Result<Network, Diagnostic> {
    let found = file(cluster)?;
    let inner = cluster.levels.first().expect("a cluster has a level");
    let outer = cluster.levels.get(1).unwrap_or(inner);
    let node = inner.count.unwrap_or_else(|| cluster.devices_per_node.unwrap_or(1));
    let fabrics = &known().fabrics;
    let fabric = fabrics.iter().find(|fabric| fabric.name == outer.name);
    let node = node.max(1) as u64;
    let preset = preset(found);
    let (mut near, mut far) = (found.inner.clone(), fabric.unwrap_or(&fabrics[0]).clone());
    let inner_more_s = more_s(inner, 0, preset);
    near.start_s = (near.start_s + inner_more_s).max(0.0);
    let outer_more_s = if cluster.levels.len() > 1 { more_s(outer, 1, preset) } else { 0.0 };
    for seconds in [&mut far.step_s, &mut far.hop_s, &mut far.start_s] {
        *seconds = (*seconds + outer_more_s).max(0.0);
    }
    let devices = cluster.devices().unwrap_or(1) as u64;
    let mut reach = node;
    let wires = |level: &Level, inside: u64| {
        let shape = level.shape.as_ref().map_or(Shape::Switch, |joined| joined.shape);
        let all = devices.div_ceil(inside.max(1));
        Wires { shape, members: level.count.map_or(all, |count| count as u64).max(1) }
    };
    let of_rail = outer.rails.as_ref().map(|rails| (node / (rails.value as u64).max(1)).max(1));
    let outer_wires = if cluster.levels.len() > 1 { wires(outer, node) } else { Wires::SWITCH };
    let beyond = cluster.levels.windows(2).skip(1).map(|pair| {
        // Without a count all there are lie within the level.
        reach = reach.saturating_mul(pair[0].count.map_or(u64::MAX, |count| count as u64));
        Beyond {
            reach,
            bytes_per_s: pair[1].bytes_per_s(),
            wires: wires(&pair[1], reach),
            more_s: (pair[1].latency.value - outer.latency.value).max(0.0),
        }
    });
    Ok(Network {
        node,
        inner: near,
        inner_bytes_per_s: inner.bytes_per_s(),
        outer: far,
        outer_bytes_per_s: outer.bytes_per_s(),
        wires: [Wires { members: node, ..wires(inner, 1) }, outer_wires],
        of_rail,
        inner_more_s,
        beyond: beyond.collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::configuration::Configuration;
    use crate::estimate::network::Group;
    use crate::machine::Machine;
    use crate::search::tests::permutations;
    use ir::Axis;

    /// Every preset with devices of its own finds its file by name.
    #[test]
    fn presets_have_device_files() {
        let machine = Machine { cores: 4, memory_bytes: 8 << 30, instruction_set: "avx2".into() };
        for (name, _) in crate::cluster::PRESETS {
            let cluster = Cluster::load_on(name, &machine).unwrap();
            if cluster.device.kind == Kind::Cpu {
                assert_eq!(rates(&cluster).unwrap_err().code, "E3404");
                continue;
            }
            // To the bit: a preset is what its file tells of.
            assert_eq!(rates(&cluster).unwrap(), file(&cluster).unwrap().device, "{name}");
            assert_eq!(rates(&cluster).unwrap().name, cluster.device.name, "{name}");
            assert!(network(&cluster).unwrap().beyond.is_empty(), "{name}");
            let network = network(&cluster).unwrap();
            let group = Group::near;
            let mut before = 0.0;
            for size in [1, 2, 3, 4, 6, 8, 16, 64, 512] {
                let now = network.all_reduce_s(1e8, group(size));
                assert!(now >= before * 0.8, "{name}: {size} members {now}, fewer {before}");
                before = now;
                for bytes in [1.0, 1e3, 3e5, 1e7, 3e8, 1e10] {
                    let [a, b] = [bytes, 4.0 * bytes].map(|v| network.gather_s(v, group(size)));
                    assert!(a <= b * 1.2, "{name}: {bytes} bytes over {size} members");
                }
            }
        }
    }

    /// How many collectives of a configuration are slower than those of as many neighbours; fails
    /// where one is faster.
    fn far_ones(network: &Network, c: &Configuration, bytes: f64) -> usize {
        let all = |group: Group| {
            let exchange = network.exchange_s(bytes, group, 1.0);
            [network.all_reduce_s(bytes, group), network.gather_s(bytes, group), exchange]
        };
        let (data, stage, mut slower) = (Group::data(c), Group::stage(c), 0);
        let parts = [2, 3, 8].into_iter().filter(|n| data.size().is_multiple_of(*n));
        let parts = parts.flat_map(|n| [data.first(n), data.every(n), stage.first(n)]);
        for group in parts.chain([data, stage, Group::along(c, Axis::Tp)]) {
            let near = all(Group::near(group.size()));
            for (near, far) in near.into_iter().zip(all(group)) {
                let about = format!("{c}: {group:?}, {bytes} bytes, {} a node", network.node);
                assert!(far >= near * (1.0 - 1e-12), "{about}: {far} s, neighbours {near} s");
                slower += usize::from(far > near);
            }
        }
        slower
    }

    /// On every preset, with the network it has and with others, faster and slower, in all orders
    /// of the axes: ranks that are further apart never exchange faster than neighbours.
    #[test]
    fn no_group_is_faster_for_lying_further_apart() {
        let machine = Machine { cores: 4, memory_bytes: 8 << 30, instruction_set: "avx2".into() };
        let (mut state, mut rises) = (11, 0);
        for (name, _) in crate::cluster::PRESETS {
            let cluster = Cluster::load_on(name, &machine).unwrap();
            if cluster.device.kind == Kind::Cpu {
                continue;
            }
            for sample in 0..24 {
                let mut next = |low: f64, high: f64| {
                    state = ir::random::mix(state);
                    low * (high / low).powf(state as f64 / u64::MAX as f64)
                };
                let mut cluster = cluster.clone();
                if sample > 0 {
                    for level in &mut cluster.levels {
                        level.bandwidth.value *= next(0.1, 10.0);
                    }
                }
                let mut network = network(&cluster).unwrap();
                let fabrics = &known().fabrics;
                network.outer = fabrics[sample % fabrics.len()].clone();
                network.node = if sample < 4 { network.node } else { next(1.0, 20.0) as u64 };
                let mut below = |n: f64| next(1.0, n) as u32;
                let (tp, cp, dp, pp) = (below(9.0), below(5.0), below(33.0), below(5.0));
                let sizes = Configuration { tp, cp, dp, pp, ..Configuration::default() };
                let bytes = next(1.0, 1e10);
                for order in permutations() {
                    rises += far_ones(&network, &Configuration { order, ..sizes.clone() }, bytes);
                }
            }
        }
        assert!(rises > 1000, "{rises}");
    }

    /// The peak is the one that the cluster says, in every type that its devices have, and in
    /// another one that of the next wider type; times are priced with one near it, or lower.
    #[test]
    fn peaks_are_those_of_the_presets() {
        for preset in &known().presets {
            let rates = rates(preset).unwrap();
            let peak = |arithmetic| peak_flops(preset, &rates, arithmetic);
            for (dtype, arithmetic) in [
                (DType::F32, Arithmetic::F32),
                (DType::F16, Arithmetic::Half),
                (DType::BF16, Arithmetic::Half),
                (DType::F8E4M3, Arithmetic::F8),
            ] {
                let (name, ours) = (&preset.name, peak(arithmetic));
                match preset.device.peak.get(&dtype) {
                    Some(said) => {
                        assert_eq!(ours, said.value, "{name} in {dtype}");
                        let ratio = rates.product_rates(arithmetic).peak_flops / ours;
                        // Some devices keep no such clock: two thirds of it on MI300X.
                        assert!((0.6..1.05).contains(&ratio), "{name} in {dtype}: {ratio}");
                    }
                    None => assert!(ours <= peak(Arithmetic::Half), "{name} in {dtype}"),
                }
            }
        }
    }

    fn like_h100(more: &str) -> Cluster {
        let machine = Machine { cores: 4, memory_bytes: 8 << 30, instruction_set: "avx2".into() };
        let text = format!("name = \"mine\"\nextends = \"preset:h100\"\n{more}");
        Cluster::parse("mine.toml", &text, &machine).unwrap()
    }

    /// Whatever a device is called and said to reach, no product is faster than its peak nor than
    /// its memory, a kernel takes a launch at least, and twice as fast a device takes half as long.
    #[test]
    fn devices_are_as_fast_as_their_file_says() {
        let mut state = 7;
        for sample in 0..50 {
            let mut next = |low: f64, high: f64| {
                state = ir::random::mix(state);
                low * (high / low).powf(state as f64 / u64::MAX as f64)
            };
            let (tera, rate, micro) = (next(20.0, 20e3), next(0.2, 50.0), next(4.0, 2e3));
            let name = ["H100 SXM", "NewChip"][sample % 2];
            let device = |factor: f64| {
                let (tera, rate) = (factor * tera, factor * rate);
                rates(&like_h100(&format!(
                    "[device]\nname = {name:?}\nlaunch = \"{micro:.3} us\"\n[device.peak]\n\
                     bf16 = \"{tera:.6} TFLOP/s\"\nf16 = \"{tera:.6} TFLOP/s\"\n\
                     [device.memory]\nbandwidth = \"{rate:.9} TB/s\"\n"
                )))
                .unwrap()
            };
            let sizes = [65536.0, 16384.0, 8192.0, 1.0];
            let [one, two] = [device(1.0), device(2.0)];
            let seconds = one.product_s(Arithmetic::Half, sizes);
            let flops = 2.0 * sizes.iter().product::<f64>();
            let what = format!("{tera} TFLOP/s, {rate} TB/s, {micro} us of {name}: {seconds}");
            assert!(seconds > flops / (tera * 1e12), "{what}");
            assert!(one.rows_s(1e10) > 1e10 / (rate * 1e12), "{what}");
            assert!(one.rows_s(1.0) >= (micro - 4.0) * 1e-6, "{what}");
            // Another name is like the nearest device, which may be another at twice the rates; and
            // what is start-up stays.
            if name == "H100 SXM" {
                let [a, b] = [&one, &two]
                    .map(|rates| rates.product_s(Arithmetic::Half, sizes) + rates.rows_s(1e12));
                assert!((1.3..2.01).contains(&(a / b)), "{what}: {a} and {b}");
            }
        }
    }

    /// A latency is taken by each collective and message; a level beyond the outer one slows down
    /// what crosses it, and nothing else.
    #[test]
    fn all_levels_of_a_file_are_crossed() {
        let plain = network(&like_h100("")).unwrap();
        let late = "[[level]]\nname = \"nvlink\"\nlatency = \"1 s\"\n\
                    [[level]]\nname = \"infiniband\"\nlatency = \"2 s\"\n";
        let late = network(&like_h100(late)).unwrap();
        let far = |rate: &str| {
            network(&like_h100(&format!(
                "[[level]]\nname = \"infiniband\"\ncount = 16\n\
                 [[level]]\nname = \"spine\"\nbandwidth = {rate:?}\nlatency = \"5.5 us\"\n"
            )))
            .unwrap()
        };
        let (slow, even) = (far("1 MB/s"), far("50 GB/s"));
        let all = |network: &Network, size: u64, stride: u64| {
            let group = Group::apart(size, stride, 1024);
            let [a, b] = [network.all_reduce_s(1e8, group), network.gather_s(1e8, group)];
            [a, b, network.exchange_s(1e8, group, 1.0), network.send_s(1e8, stride)]
        };
        for (size, stride) in
            [(2, 1), (8, 1), (4, 2), (16, 1), (16, 8), (64, 2), (256, 1), (4, 128)]
        {
            let now = all(&plain, size, stride);
            let least = if size * stride > 8 { 2.0 } else { 1.0 };
            let sends = if stride >= 8 { 2.0 } else { 1.0 };
            for (late, least) in all(&late, size, stride).iter().zip([least, least, least, sends]) {
                assert!(*late > 0.99 * least, "{size} members {stride} apart: {late} s");
            }
            // The outer level's rate all the way changes nothing.
            assert_eq!(all(&even, size, stride), now, "{size} members {stride} apart");
            if size * stride <= 128 {
                assert_eq!(all(&slow, size, stride), now, "{size} members {stride} apart");
            } else {
                // At least an n-th of the bytes leaves a domain of 128 devices.
                let least = 1e8 / size as f64 / (128.0 * 1e6);
                let [reduce, gather, exchange, _] = all(&slow, size, stride);
                let slower = reduce.min(gather).min(exchange);
                assert!(slower > least, "{size} members {stride} apart: {slower} s");
                assert!(reduce > 2.0 * now[0] && gather > 2.0 * now[1] && exchange > 2.0 * now[2]);
            }
        }
        assert!(slow.send_s(1e8, 128) > 100.0 && slow.send_s(1e8, 64) < 1.0);
    }

    /// A pipeline waits for those of its messages that leave a node: where any two of its stages
    /// that follow each other lie on two nodes, and only there.
    #[test]
    fn messages_across_an_edge_are_far() {
        let network = network(&like_h100("")).unwrap();
        let node = |rank: u64| rank / 8;
        let (mut far, mut all) = (0, 0);
        for (size, stride) in (2..12).flat_map(|size| [1, 2, 3, 4, 6, 8, 16].map(|s| (size, s))) {
            let extent = size * stride;
            let group = Group::apart(size, stride, 8 * extent);
            let firsts = (0..8).flat_map(|at| (0..stride).map(move |rank| at * extent + rank));
            let members = firsts.flat_map(|first| (0..size - 1).map(move |at| first + at * stride));
            let is_far = members.clone().any(|rank| node(rank) != node(rank + stride));
            let apart = network.furthest(group, stride);
            assert_eq!(apart, if is_far { stride.max(8) } else { stride }, "{size}, {stride}");
            (far, all) = (far + usize::from(is_far && stride < 8), all + 1);
        }
        assert!(far > 10 && all - far > 10, "{far} of {all}");
    }

    /// The Ultra-Scale Playbook, appendix: bus bandwidth of 256 MB in GB/s on 2 to 64 nodes of
    /// eight H100 with 400 GB/s, all-reduce and all-gather.
    #[test]
    fn collectives_between_nodes_are_met() {
        let machine = Machine { cores: 4, memory_bytes: 8 << 30, instruction_set: "avx2".into() };
        let mut cluster = Cluster::load_on("h100", &machine).unwrap();
        cluster.levels[1].name = "efa".into();
        cluster.levels[1].bandwidth.value = 50e9;
        let network = network(&cluster).unwrap();
        let timed = [(2, 362.0, 185.0), (4, 160.0, 119.0), (8, 100.0, 69.0), (16, 85.0, 55.0)];
        for (nodes, all_reduce, gather) in timed.into_iter().chain([(32, 65.0, 28.0)]) {
            let group = Group::near(8 * nodes);
            let n = group.size() as f64;
            let carried = 256e6 * (n - 1.0) / n / 1e9;
            let ours = [
                2.0 * carried / network.all_reduce_s(256e6, group),
                carried / network.gather_s(256e6, group),
            ];
            for (ours, theirs) in ours.into_iter().zip([all_reduce, gather]) {
                let off = (ours / theirs).ln().abs();
                assert!(off < 0.25, "{nodes} nodes: {ours:.0} against {theirs} GB/s");
            }
        }
    }

    /// Products and collectives agree with single timings of the tables that they were fitted to.
    #[test]
    fn single_kernels_are_met() {
        let a100 = &known().devices[0].device;
        let half = Arithmetic::Half;
        // m, n, k and µs: ai-dynamo/aiconfigurator, a100_sxm and h100_sxm.
        let timed = [([8192.0, 4096.0, 4096.0], 1035.5), ([2048.0, 16384.0, 4096.0], 1037.4)];
        for ([m, n, k], us) in timed {
            let ours = a100.kernel_product_s(half, [m, n, k, 1.0]) * 1e6;
            assert!((ours / us - 1.0_f64).abs() < 0.06, "{m} {n} {k}: {ours} against {us}");
        }
        let h100 = &known().devices[1].device;
        let ours = h100.kernel_product_s(half, [8192.0, 4096.0, 4096.0, 1.0]) * 1e6;
        assert!((ours / 343.6 - 1.0_f64).abs() < 0.06, "{ours}");
    }
}
