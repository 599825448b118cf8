//! The device files and networks that come with the planner, and how a cluster finds its own.

use std::sync::OnceLock;

use ir::{Diagnostic, Span};
use serde::Deserialize;

use super::network::{Fabric, Inner, Network};
use super::rates::{Arithmetic, ProductRates, Rates};
use crate::cluster::{Cluster, Kind};

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
        Known { devices, fabrics: read::<FabricFile>("fabrics", FABRICS).fabric }
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

/// The rates of a cluster's device.
pub(super) fn rates(cluster: &Cluster) -> Result<Rates, Diagnostic> {
    Ok(file(cluster)?.device.clone())
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
    Ok(Network {
        node: node.max(1) as u64,
        inner: found.inner.clone(),
        inner_bytes_per_s: inner.bandwidth.value,
        outer: fabric.unwrap_or(&fabrics[0]).clone(),
        outer_bytes_per_s: outer.bandwidth.value,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::estimate::network::Group;
    use crate::machine::Machine;

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
            assert_eq!(rates(&cluster).unwrap().name, cluster.device.name, "{name}");
            let network = network(&cluster).unwrap();
            let group = |size| Group { size, stride: 1 };
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
            let group = Group { size: 8 * nodes, stride: 1 };
            let n = group.size as f64;
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
