//! The GPUs on which the ranks of a process run, one each, and the machine code that they load.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use kernels::Kernel;
use kernels::cuda::Arch;

use super::compiled::Compiled;
use super::context::Context;
use super::nccl::{self, Nccl};
use super::nvrtc::Nvrtc;
use crate::error::Error;

/// The GPUs of some ranks, opened, with the kernels of their programs.
#[derive(Debug)]
pub struct Gpus {
    pub(super) contexts: Vec<Arc<Context>>,
    pub(super) compiled: Arc<Compiled>,
}

impl Gpus {
    /// Whether ranks exchange through the host's memory what GPUs could exchange themselves: NCCL
    /// is not there.
    pub fn lack_nccl(&self) -> bool {
        self.contexts.len() > 1 && !nccl::is_present()
    }

    /// The ends of groups of ranks, for each rank; none where there is no NCCL.
    ///
    /// # Errors
    /// The GPUs cannot be connected.
    pub(crate) fn connect(
        &self,
        groups: &[Vec<usize>],
        scratch: &[usize],
    ) -> Result<Option<Vec<Nccl>>, Error> {
        if groups.is_empty() || !nccl::is_present() {
            return Ok(None);
        }
        let world = Nccl::world(&self.contexts, groups, scratch);
        world.map(Some).map_err(|why| Error::Gpu(format!("GPUs are not connected: {why}")))
    }

    /// Opens as many GPUs as there are ranks, in the driver's order, and compiles the kernels for
    /// their architecture. Machine code is kept in a folder, where there is one.
    ///
    /// # Errors
    /// There are too few GPUs or they are of another architecture; no compiler; text that it
    /// refuses.
    pub fn open(
        ranks: usize,
        kernels: &[Kernel],
        arch: Arch,
        folder: Option<&Path>,
    ) -> Result<Gpus, Error> {
        let listed = super::gpus().map_err(|absent| Error::Gpu(absent.to_string()))?;
        if listed.len() < ranks {
            let (is, has) = (plural(ranks), plural(listed.len()));
            return Err(Error::Gpu(format!("the plan is for {is}, and this machine has {has}")));
        }
        let open = |ordinal: usize| {
            let context =
                Context::open(ordinal).map_err(|absent| Error::Gpu(absent.to_string()))?;
            let name = &listed[ordinal].name;
            match context.arch() {
                Some(found) if found == arch => Ok(context),
                Some(found) => {
                    let what = format!("the plan is for {arch}, and GPU {ordinal} ({name}) is");
                    Err(Error::Gpu(format!("{what} {found}")))
                }
                None => {
                    let what = format!("GPU {ordinal} ({name}) has an architecture for which");
                    Err(Error::Gpu(format!("{what} no kernels are written")))
                }
            }
        };
        let contexts: Vec<Arc<Context>> = (0..ranks).map(open).collect::<Result<_, _>>()?;
        let nvrtc = Nvrtc::open().map_err(|absent| Error::Gpu(absent.to_string()))?;
        let compiled = Compiled::new(&nvrtc, kernels, arch, folder);
        let refused = |log| Error::Gpu(format!("the kernels are not compiled: {log}"));
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

fn plural(count: usize) -> String {
    match count {
        1 => "1 GPU".to_owned(),
        count => format!("{count} GPUs"),
    }
}
