//! What device functions take of a multiprocessor, as NVRTC compiles them, without a GPU.

use std::collections::BTreeMap;

use kernels::cuda::{Arch, Occupancy, Taken, functions_for, name, unit};
use runtime::artefact::Contents;
use runtime::cuda::nvrtc::{Nvrtc, Used};
use serde_json::{Value, json};

use crate::output::{self, Table};

/// The functions of a file on one architecture.
pub(super) struct Resources {
    pub(super) arch: Arch,
    /// The functions of each kernel.
    kernels: Vec<Vec<Resource>>,
}

/// What a function takes.
struct Resource {
    name: String,
    threads: u32,
    dynamic_bytes: u32,
    /// None where there is no compiler.
    used: Option<Used>,
}

impl Resource {
    fn taken(&self) -> Option<Taken> {
        let used = self.used.as_ref()?;
        let shared_bytes = used.shared_bytes + self.dynamic_bytes;
        Some(Taken { threads: self.threads, registers: used.registers, shared_bytes })
    }

    fn to_json(&self, arch: Arch) -> Value {
        let (used, taken) = (self.used.as_ref(), self.taken());
        let occupancy = taken.map(|taken| Occupancy::of(arch, taken));
        json!({
            "name": self.name,
            "registers": used.map(|used| used.registers),
            "spill_bytes": used.map(|used| used.spill_bytes),
            "stack_bytes": used.map(|used| used.stack_bytes),
            "shared_bytes": taken.map(|taken| taken.shared_bytes),
            "dynamic_shared_bytes": self.dynamic_bytes,
            "blocks_per_multiprocessor": occupancy.map(|of| of.blocks),
            "occupancy": occupancy.map(|of| of.share),
            "limit": occupancy.map(|of| of.limit.to_string()),
        })
    }
}

impl Resources {
    /// Those of the functions of a kernel.
    pub(super) fn of_kernel(&self, at: usize) -> Value {
        self.kernels[at].iter().map(|of| of.to_json(self.arch)).collect()
    }

    /// The table of all functions.
    pub(super) fn table(&self) -> Table {
        let mut table = Table::new([
            "function",
            "registers",
            "spilled",
            "shared memory",
            "blocks/SM",
            "occupancy",
            "limited by",
        ]);
        for of in self.kernels.iter().flatten() {
            let Some((used, taken)) = of.used.as_ref().zip(of.taken()) else { continue };
            let occupancy = Occupancy::of(self.arch, taken);
            table.row([
                of.name.clone(),
                used.registers.to_string(),
                output::bytes(u64::from(used.spill_bytes)),
                output::bytes(u64::from(taken.shared_bytes)),
                occupancy.blocks.to_string(),
                format!("{:.0}%", 100.0 * occupancy.share),
                occupancy.limit.to_string(),
            ]);
        }
        table
    }
}

/// What the functions of a file take on each of its architectures, and by which compiler that is
/// known or why it is not.
pub(super) fn resources(contents: &Contents) -> (Vec<Resources>, Result<String, String>) {
    let nvrtc = Nvrtc::open();
    let mut failed = None;
    let mut of_arch = |arch: &Arch| {
        let mut used: BTreeMap<String, Used> = BTreeMap::new();
        if let Ok(nvrtc) = &nvrtc {
            match nvrtc.compile(&unit(&contents.kernels, *arch), arch.name()) {
                Ok(cubin) => used.extend(cubin.used.into_iter().map(|of| (of.name.clone(), of))),
                Err(log) => failed = Some(format!("NVRTC does not compile them for {arch}: {log}")),
            }
        }
        let of_kernel = |(at, kernel)| {
            let functions = functions_for(kernel, *arch).functions.into_iter().enumerate();
            let resource = |(number, function): (usize, kernels::cuda::Function)| {
                let name = name(at, number);
                Resource {
                    used: used.remove(&name),
                    name,
                    threads: function.threads,
                    dynamic_bytes: function.tile.dynamic_shared_bytes() as u32,
                }
            };
            functions.map(resource).collect()
        };
        let kernels = contents.kernels.iter().enumerate().map(of_kernel).collect();
        Resources { arch: *arch, kernels }
    };
    let all = contents.archs.iter().map(&mut of_arch).collect();
    let known = match (nvrtc, failed) {
        (_, Some(failed)) => Err(failed),
        (Err(absent), None) => Err(absent.to_string()),
        (Ok(nvrtc), None) => {
            let (major, minor) = nvrtc.version();
            Ok(format!("NVRTC {major}.{minor}"))
        }
    };
    (all, known)
}
