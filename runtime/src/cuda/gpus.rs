//! The GPUs on which the ranks of a process run, one each, and the machine code that they load.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use kernels::Kernel;
use kernels::cuda::Arch;

use super::compiled::Compiled;
use super::context::Context;
use super::mailboxes::Mailboxes;
use super::nccl::{self, Id, Nccl};
use super::nvrtc::Nvrtc;
use crate::error::Error;

/// The GPUs of some ranks, opened, with the kernels of their programs.
#[derive(Debug)]
pub struct Gpus {
    pub(super) contexts: Vec<Arc<Context>>,
    pub(super) compiled: Arc<Compiled>,
}

impl Gpus {
    /// Whether there is NCCL: where not, ranks exchange through the host's memory what GPUs could
    /// exchange themselves.
    pub fn have_nccl() -> bool {
        nccl::is_present()
    }

    /// Mailboxes of the ranks, from a first one on.
    pub(crate) fn mailboxes(&self, first: usize) -> Mailboxes {
        Mailboxes::new(&self.contexts, first)
    }

    /// The ends of groups of ranks, for each rank from a first one on.
    ///
    /// # Errors
    /// The GPUs cannot be connected.
    pub(crate) fn connect(
        &self,
        first: usize,
        groups: &[(Vec<usize>, Id)],
        scratch: &[usize],
    ) -> Result<Vec<Nccl>, Error> {
        let world = Nccl::world(&self.contexts, first, groups, scratch);
        let help = "NCCL_DEBUG=INFO says why; without `libnccl.so` they exchange over the host";
        world.map_err(|why| gpu_error(format!("GPUs are not connected: {why}"), help))
    }

    /// Ids by which the members of some groups find each other; none where there is no NCCL.
    ///
    /// # Errors
    /// NCCL has none.
    pub(crate) fn ids(groups: usize) -> Result<Option<Vec<Id>>, Error> {
        if !nccl::is_present() {
            return Ok(None);
        }
        let help = "NCCL_DEBUG=INFO says why";
        let refused = |why| gpu_error(format!("NCCL has no ids: {why}"), help);
        nccl::ids(groups).map(Some).map_err(refused)
    }

    /// Opens one GPU per rank, those with some numbers in the driver's order, and compiles the
    /// kernels for their architecture. Machine code is cached in a folder, where one is given.
    ///
    /// # Errors
    /// There are too few GPUs or they are of another architecture; no compiler; text that it
    /// refuses.
    pub fn open(
        numbers: Range<usize>,
        kernels: &[Kernel],
        arch: Arch,
        folder: Option<&Path>,
    ) -> Result<Gpus, Error> {
        let missing = "`gantline doctor` says what is missing; `--cluster cpu-local` runs on cores";
        let lacking = |why: String| gpu_error(why, missing);
        let listed = super::gpus().map_err(|absent| lacking(absent.to_string()))?;
        if listed.len() < numbers.end {
            let (is, has) = (plural(numbers.end), plural(listed.len()));
            let reason = format!("the plan is for {is}, and this machine has {has}");
            let help = format!(
                "plan for this machine, with `--ranks {}`, or train on several: see README.md",
                listed.len()
            );
            return Err(gpu_error(reason, &help));
        }
        let open = |ordinal: usize| {
            let context = Context::open(ordinal).map_err(|absent| lacking(absent.to_string()))?;
            let name = &listed[ordinal].name;
            match context.arch() {
                Some(found) if found == arch => Ok(context),
                Some(found) => {
                    let what = format!("the plan is for {arch}, and GPU {ordinal} ({name}) is");
                    let help = format!("plan for GPUs like it: `--cluster {}`", like(found));
                    Err(gpu_error(format!("{what} {found}"), &help))
                }
                None => {
                    let what = format!("GPU {ordinal} ({name}) has an architecture for which");
                    Err(lacking(format!("{what} no kernels are written")))
                }
            }
        };
        let contexts: Vec<Arc<Context>> = numbers.map(open).collect::<Result<_, _>>()?;
        let nvrtc = Nvrtc::open().map_err(|absent| lacking(absent.to_string()))?;
        let compiled = Compiled::new(&nvrtc, kernels, arch, folder);
        let refused = |log| {
            let help = "this is a defect of the kernels' text, or an NVRTC that is older than 12.9";
            gpu_error(format!("the kernels are not compiled: {log}"), help)
        };
        Ok(Gpus { contexts, compiled: Arc::new(compiled.map_err(refused)?) })
    }

    /// Some of the GPUs.
    ///
    /// # Panics
    /// There are fewer.
    pub fn some(&self, which: Range<usize>) -> Gpus {
        Gpus { contexts: self.contexts[which].to_vec(), compiled: Arc::clone(&self.compiled) }
    }
}

fn gpu_error(reason: String, help: &str) -> Error {
    Error::Gpu { reason, help: help.to_owned() }
}

/// A preset of GPUs of an architecture.
fn like(arch: Arch) -> &'static str {
    match arch {
        Arch::Sm80 => "a100",
        Arch::Sm89 => "l4",
        Arch::Sm90a => "h100",
        Arch::Sm100 => "b200",
    }
}

fn plural(count: usize) -> String {
    match count {
        1 => "1 GPU".to_owned(),
        count => format!("{count} GPUs"),
    }
}
