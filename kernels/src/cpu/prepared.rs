//! A kernel with all that does not depend on where its arguments are, so that a launch decides
//! nothing.

use super::{block, product, scaled};
use crate::arguments::Argument;
use crate::kernel::Kernel;

/// A kernel ready to be launched many times by one rank, with the same scalars each time.
#[derive(Debug)]
pub struct Prepared {
    kernel: Kernel,
    scalars: Vec<i64>,
    /// The kernel bound to the scalars.
    pub(super) bound: Kernel,
    pub(super) inputs: Vec<Argument>,
    pub(super) outputs: Vec<Argument>,
    in_place: Vec<(usize, usize)>,
    pub(super) work: Work,
}

/// What is decided once.
#[derive(Debug)]
pub(super) enum Work {
    Product(Box<product::Plan>),
    Rows(block::Plans),
    Products(product::Plans),
    /// The kernel that reads numbers instead of codes, and these.
    Scaled(Box<Prepared>, scaled::Numbers),
    /// Kernels that decide nothing worth keeping.
    Direct,
}

impl Prepared {
    /// Decides what can be decided without arguments.
    ///
    /// # Panics
    ///
    /// If the kernel does not admit the scalars: an invariant of the caller.
    pub fn new(kernel: &Kernel, scalars: &[i64]) -> Prepared {
        let bound = kernel.bind(scalars);
        let scaled = scaled::Numbers::of(&bound);
        let scaled = scaled.map(|(of, read)| Work::Scaled(Box::new(Prepared::new(&read, &[])), of));
        let work = scaled.unwrap_or_else(|| match &bound {
            Kernel::Product(p) => Work::Product(Box::new(product::plan(p))),
            Kernel::Products(p) => Work::Products(product::Plans::new(p)),
            Kernel::Rows(_) => Work::Rows(block::Plans::default()),
            Kernel::Attention(_)
            | Kernel::AttentionBwd(_)
            | Kernel::Experts(_)
            | Kernel::ExpertsBwd(_)
            | Kernel::Gather(_)
            | Kernel::ScatterAdd(_)
            | Kernel::Replace(_)
            | Kernel::Lines(_)
            | Kernel::Rope(_)
            | Kernel::Copy(_)
            | Kernel::Place(_)
            | Kernel::Take(_)
            | Kernel::Fill(_) => Work::Direct,
        });
        let (inputs, outputs) = (kernel.inputs(), kernel.outputs());
        let (scalars, in_place) = (scalars.to_vec(), kernel.in_place());
        Prepared { kernel: kernel.clone(), scalars, bound, inputs, outputs, in_place, work }
    }

    /// The kernel.
    pub fn kernel(&self) -> &Kernel {
        &self.kernel
    }

    /// What its launches pass to it.
    pub fn scalars(&self) -> &[i64] {
        &self.scalars
    }

    /// Which input may be which output, as [`Kernel::in_place`].
    pub fn in_place(&self) -> &[(usize, usize)] {
        &self.in_place
    }

    /// What it reads, as [`Kernel::inputs`].
    pub fn inputs(&self) -> &[Argument] {
        &self.inputs
    }

    /// What it writes, as [`Kernel::outputs`].
    pub fn outputs(&self) -> &[Argument] {
        &self.outputs
    }
}
