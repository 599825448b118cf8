//! The CPU that executes kernels.
//!
//! A kernel becomes tasks that write disjoint parts of the outputs; a task runs on one thread, in
//! code compiled for the instruction set found at run time. How many threads there are decides who
//! runs a task, never what it computes.
//!
//! Reading order: `view` the arguments; `vector`, `x86`, `formats` and `math` the instruction sets;
//! `pack`, `plane`, `tiles`, `thin`, `rounded`, `pairs`, `product`, `integers` and `scaled` matrix
//! products; `block` fused expressions; `attention`, `attention_bwd`, `attention_few`,
//! `routed`, `experts`, `experts_bwd`, `lines`, `moves` and `windows` the rest.

mod view;

mod formats;
mod math;
mod scratch;
mod vector;
#[cfg(target_arch = "x86_64")]
mod x86;

mod attention;
mod attention_bwd;
mod attention_few;
mod block;
mod experts;
mod experts_bwd;
mod extent;
mod frame;
mod blocked;
mod integers;
mod lines;
mod moves;
mod pack;
mod pairs;
mod plane;
mod prepared;
mod product;
mod rounded;
mod routed;
mod scaled;
mod thin;
mod tiles;
mod windows;

pub use prepared::Prepared;
pub use vector::Isa;
pub use view::{Element, View, ViewMut};

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::{fmt, io};

use ir::DType;
use rayon::prelude::*;

use crate::arguments::Argument;
use crate::kernel::Kernel;
use crate::units::Bytes;
use prepared::Work;
use scratch::{Buffer, Bump};

/// Cost, in cycles of one thread, below which a launch stays on its caller's thread. Chosen: waking
/// a pool takes some ten microseconds.
const INLINE_CYCLES: u64 = 40_000;

/// Runs of tasks per thread, at least, where there are more tasks. Chosen: what is left when the
/// others are done is a hundredth of a launch.
const RUNS: usize = 64;

/// The threads and the scratch memory of one rank.
pub struct Cpu {
    isa: Isa,
    pool: Option<rayon::ThreadPool>,
    /// One per thread, reused by all launches.
    scratch: Vec<Mutex<Buffer>>,
    /// Partial sums that the tasks of one launch share.
    shared: Mutex<Buffer>,
}

impl fmt::Debug for Cpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cpu").field("isa", &self.isa).field("threads", &self.threads()).finish()
    }
}

impl Cpu {
    /// A CPU of `threads` threads; with one, kernels run on the thread that launches them.
    ///
    /// # Panics
    ///
    /// If the system refuses to start threads.
    pub fn new(threads: usize) -> Cpu {
        Cpu::with_isa(threads, Isa::detect())
    }

    /// As [`Cpu::new`].
    ///
    /// # Errors
    ///
    /// The system refuses to start threads.
    pub fn start(threads: usize) -> io::Result<Cpu> {
        Cpu::start_with(threads, Isa::detect())
    }

    /// A CPU that uses one instruction set: to compare sets with each other.
    ///
    /// # Panics
    ///
    /// If the machine lacks the set, or the system refuses to start threads.
    pub fn with_isa(threads: usize, isa: Isa) -> Cpu {
        assert!(isa.is_available(), "an executor is made for an available instruction set");
        Cpu::start_with(threads, isa).expect("the system starts threads")
    }

    fn start_with(threads: usize, isa: Isa) -> io::Result<Cpu> {
        let threads = threads.max(1);
        let build = || rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        let pool = (threads > 1).then(build).transpose().map_err(io::Error::other)?;
        let scratch = (0..threads).map(|_| Mutex::default()).collect();
        Ok(Cpu { isa, pool, scratch, shared: Mutex::default() })
    }

    /// Number of threads.
    pub fn threads(&self) -> usize {
        self.scratch.len()
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Runs one launch of a kernel without scalars and returns when its outputs are written.
    ///
    /// # Panics
    ///
    /// If an argument is missing or shorter than the kernel says: an invariant of the caller.
    pub fn execute(&self, kernel: &Kernel, inputs: &[View], outputs: &[ViewMut]) {
        self.launch(&mut Prepared::new(kernel, &[]), inputs, outputs);
    }

    /// As [`Cpu::execute`], of a kernel that is launched again and again.
    ///
    /// # Panics
    ///
    /// As [`Cpu::execute`].
    pub fn launch(&self, prepared: &mut Prepared, inputs: &[View], outputs: &[ViewMut]) {
        check(&prepared.inputs, inputs.iter().map(View::len), "input");
        check(&prepared.outputs, outputs.iter().map(ViewMut::len), "output");
        if let Work::Scaled(reader, of) = &mut prepared.work {
            let numbers = of.read(inputs);
            return self.launch(reader, &of.inputs(inputs, &numbers), outputs);
        }
        if let Kernel::Rows(r) = &prepared.bound
            && r.dtype == DType::I64
        {
            return block::whole::execute(self, r, inputs, outputs);
        }
        if let (Kernel::Product(p), Work::Product(plan)) = (&prepared.bound, &prepared.work)
            && integers::fits(p)
        {
            return integers::execute(self, p, plan, inputs, outputs);
        }
        if let Kernel::ScatterAdd(g) = &prepared.bound
            && !g.dtype.is_float()
        {
            return moves::scatter_add_whole(self, g, inputs, outputs);
        }
        let dtype = compute_type(&prepared.bound);
        assert!(matches!(dtype, DType::F32 | DType::F64), "kernels compute in f32 or f64");
        if dtype == DType::F64 {
            self.launch_typed::<f64>(prepared, inputs, outputs);
        } else {
            self.launch_typed::<f32>(prepared, inputs, outputs);
        }
    }

    fn launch_typed<S: vector::Scalar>(
        &self,
        prepared: &mut Prepared,
        inputs: &[View],
        outputs: &[ViewMut],
    ) {
        match (&prepared.bound, &mut prepared.work) {
            (Kernel::Product(p), Work::Product(plan)) => {
                product::execute::<S>(self, p, plan, inputs, outputs);
            }
            (Kernel::Products(p), Work::Products(plans)) => {
                product::execute_all::<S>(self, p, plans, inputs, outputs);
            }
            (Kernel::Rows(r), Work::Rows(plans)) => {
                block::execute::<S>(self, r, plans, inputs, outputs);
            }
            (kernel, _) => self.launch_directly::<S>(kernel, inputs, outputs),
        }
    }

    fn launch_directly<S: vector::Scalar>(
        &self,
        kernel: &Kernel,
        inputs: &[View],
        outputs: &[ViewMut],
    ) {
        match kernel {
            Kernel::Product(_) | Kernel::Products(_) | Kernel::Rows(_) => {
                unreachable!("these are launched by a plan")
            }
            Kernel::Attention(a) if attention_few::fits(a) => {
                attention_few::execute::<S>(self, a, inputs, outputs);
            }
            Kernel::Attention(a) => attention::execute::<S>(self, a, inputs, outputs),
            Kernel::AttentionBwd(a) => attention_bwd::execute::<S>(self, a, inputs, outputs),
            Kernel::Experts(e) => experts::execute::<S>(self, e, inputs, outputs),
            Kernel::ExpertsBwd(e) => experts_bwd::execute::<S>(self, e, inputs, outputs),
            Kernel::Gather(g) => moves::gather(self, g, inputs, outputs),
            Kernel::ScatterAdd(g) => moves::scatter_add::<S>(self, g, inputs, outputs),
            Kernel::Replace(g) => moves::replace(self, g, inputs, outputs),
            Kernel::Lines(l) => lines::execute(self, l, inputs, outputs),
            Kernel::Rope(r) => moves::rope::<S>(self, r, inputs, outputs),
            Kernel::Copy(c) => moves::copy(self, c, inputs, outputs),
            Kernel::Place(w) => windows::place(self, w, inputs, outputs),
            Kernel::Take(w) => windows::take(self, w, inputs, outputs),
            Kernel::Fill(f) => moves::fill(f, outputs),
        }
    }

    /// Runs tasks `0..tasks` on all threads, each with `scratch_bytes` of its thread's scratch.
    /// A launch that costs less than waking the pool, in cycles, runs here.
    fn for_each(
        &self,
        tasks: usize,
        cycles: u64,
        scratch_bytes: usize,
        task: impl Fn(usize, &mut Bump) + Sync,
    ) {
        let run = |index: usize, thread: usize| {
            let mut buffer = lock(&self.scratch[thread]);
            task(index, &mut buffer.bump(scratch_bytes));
        };
        // Many small tasks go in runs, a few for each thread.
        let run_length = (tasks / (RUNS * self.threads())).max(1);
        match &self.pool {
            Some(pool) if tasks > 1 && cycles > INLINE_CYCLES => pool.install(|| {
                (0..tasks).into_par_iter().with_max_len(run_length).for_each(|index| {
                    let thread = rayon::current_thread_index();
                    run(index, thread.expect("tasks run on threads of the pool"));
                });
            }),
            _ => (0..tasks).for_each(|index| run(index, 0)),
        }
    }
}

/// A panic in another launch leaves scratch that holds anything, which is what scratch holds.
fn lock<T>(buffer: &Mutex<T>) -> MutexGuard<'_, T> {
    buffer.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The type a kernel's arithmetic is done in; F32 for what moves elements, which has none, and for
/// lines, which go by the type of their elements.
fn compute_type(kernel: &Kernel) -> DType {
    match kernel {
        Kernel::Product(p) => p.dtype,
        Kernel::Products(p) => p.dtype(),
        Kernel::Rows(r) => r.dtype,
        Kernel::Attention(a) | Kernel::AttentionBwd(a) => a.dtype.accumulation(),
        Kernel::Experts(e) | Kernel::ExpertsBwd(e) => e.dtype.accumulation(),
        Kernel::ScatterAdd(g) => g.dtype,
        Kernel::Rope(r) => r.dtype.accumulation(),
        Kernel::Gather(_)
        | Kernel::Replace(_)
        | Kernel::Lines(_)
        | Kernel::Copy(_)
        | Kernel::Place(_)
        | Kernel::Take(_)
        | Kernel::Fill(_) => DType::F32,
    }
}

fn check(wanted: &[Argument], lens: impl ExactSizeIterator<Item = usize>, what: &str) {
    assert!(wanted.len() == lens.len(), "a launch passes every {what} its kernel lists");
    for (index, (argument, len)) in wanted.iter().zip(lens).enumerate() {
        let bytes = argument.bytes();
        assert!(bytes <= len, "{what} {index} holds the {bytes} bytes its kernel uses, not {len}");
    }
}

/// Bytes of scratch beyond the arguments; see [`crate::price::workspace`].
pub(crate) fn workspace(kernel: &Kernel, threads: usize) -> Bytes {
    let [per_thread, shared] = if compute_type(kernel) == DType::F64 {
        scratch_of::<f64>(kernel)
    } else {
        scratch_of::<f32>(kernel)
    };
    let numbers = scaled::Numbers::bytes(kernel);
    Bytes((per_thread * threads.max(1) + shared + numbers) as u64)
}

/// Bytes of scratch per thread and per launch.
fn scratch_of<S: vector::Scalar>(kernel: &Kernel) -> [usize; 2] {
    match kernel {
        Kernel::Rows(r) if r.dtype == DType::I64 => [block::whole::scratch(r), 0],
        Kernel::Product(p) if integers::fits(p) => [integers::scratch(p), 0],
        Kernel::Product(p) => [product::scratch::<S>(p), 0],
        Kernel::Products(p) => [product::scratch_of_all::<S>(p), 0],
        Kernel::Rows(r) => block::scratch::<S>(r),
        Kernel::Attention(a) if attention_few::fits(a) => [attention_few::scratch::<S>(a), 0],
        Kernel::Attention(a) => [attention::scratch::<S>(a), 0],
        Kernel::AttentionBwd(a) => [attention_bwd::scratch::<S>(a), 0],
        Kernel::Experts(e) => experts::scratch::<S>(e),
        Kernel::ExpertsBwd(e) => experts_bwd::scratch::<S>(e),
        Kernel::Rope(r) => [moves::rope_scratch::<S>(r), 0],
        Kernel::Gather(_)
        | Kernel::ScatterAdd(_)
        | Kernel::Replace(_)
        | Kernel::Lines(_)
        | Kernel::Copy(_)
        | Kernel::Place(_)
        | Kernel::Take(_)
        | Kernel::Fill(_) => [0, 0],
    }
}
