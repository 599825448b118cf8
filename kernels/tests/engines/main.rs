//! Both engines on random shapes: the CPU against scalar references in f64, and the text of CUDA
//! kernels, executed by a shim, against the CPU and the references.
//!
//! Each test prints its seed when it fails; `SEED=n cargo test -p gantline-kernels` replays it.

// Tests print their seeds, and name only the cases that they treat apart.
#![allow(clippy::print_stdout, clippy::wildcard_enum_match_arm, clippy::needless_range_loop)]

mod accesses;
mod attention;
mod bytes;
mod convolution;
mod counts;
mod cuda;
mod elements;
mod experts;
mod experts_cuda;
mod flash;
mod flash_warpgroup;
mod flash_warpgroup_backward;
mod formats;
mod in_place;
mod integers;
mod longer;
mod moves;
mod mutations;
mod narrow;
mod pairs;
mod pitch;
mod product;
mod rows;
#[allow(dead_code)]
mod shim;
mod skinny;
mod tensor;
mod transpose;
mod turns;
mod warpgroup;
mod whole;
mod wide;

use std::cell::RefCell;

use gantline_kernels::arguments::Argument;
use gantline_kernels::cpu::{Cpu, Isa, Prepared, View, ViewMut};
use gantline_kernels::verify::verify;
use gantline_kernels::{Kernel, Offset};
use ir::formats as reference;

use shim::Library;

/// Whether what takes minutes is run too: other cases of generators that tests draw from, and all
/// mistakes of which tests plant some. What is left out says so.
pub(crate) fn runs_all() -> bool {
    const ALL: &str = "GANTLINE_TEST_EVERY_KERNEL";
    let runs = std::env::var_os(ALL).is_some();
    if !runs {
        println!("a sample, or nothing: {ALL}=1 runs all, for minutes");
    }
    runs
}

/// Random numbers for tests.
pub(crate) struct Random(u64);

impl Random {
    /// The generator of `case`, from `SEED` if it is set. The seed is printed, and shown if the
    /// test fails.
    pub(crate) fn new(case: u64) -> Random {
        let seed = std::env::var("SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(case);
        println!("SEED={seed}");
        Random(ir::random::mix(seed.wrapping_add(0x9e37_79b9)))
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        ir::random::mix(self.0)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    pub(crate) fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len())]
    }

    /// Uniform in `[-1, 1)`.
    pub(crate) fn number(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
    }

    pub(crate) fn numbers(&mut self, n: usize) -> Vec<f64> {
        (0..n).map(|_| self.number()).collect()
    }
}

/// All instruction sets of this machine.
pub(crate) fn sets() -> Vec<Isa> {
    Isa::ALL.into_iter().filter(|i| i.is_available()).collect()
}

pub(crate) fn narrow(x: &[f64]) -> Vec<f32> {
    x.iter().map(|&x| x as f32).collect()
}

pub(crate) fn widen(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

/// A buffer of any type.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Buffer {
    F32(Vec<f32>),
    F64(Vec<f64>),
    I32(Vec<i32>),
    U32(Vec<u32>),
    I64(Vec<i64>),
    Bool(Vec<u8>),
    /// Codes of a format of two bytes.
    Wide(ir::DType, Vec<u16>),
    /// Codes of a format of one byte, or integers of eight bits.
    Byte(ir::DType, Vec<u8>),
}

impl Buffer {
    pub(crate) fn new(dtype: ir::DType, x: &[f64]) -> Buffer {
        match dtype {
            ir::DType::F32 => Buffer::F32(narrow(x)),
            ir::DType::F64 => Buffer::F64(x.to_vec()),
            ir::DType::I32 => Buffer::I32(x.iter().map(|&x| (x * 100.0) as i32).collect()),
            ir::DType::U32 => Buffer::U32(x.iter().map(|&x| (x.abs() * 100.0) as u32).collect()),
            ir::DType::BF16 | ir::DType::F16 => {
                Buffer::Wide(dtype, x.iter().map(|&x| reference::encode(dtype, x)).collect())
            }
            ir::DType::F8E4M3 | ir::DType::F8E5M2 => {
                Buffer::Byte(dtype, x.iter().map(|&x| reference::encode(dtype, x) as u8).collect())
            }
            _ => Buffer::Bool(x.iter().map(|&x| u8::from(x > 0.0)).collect()),
        }
    }

    pub(crate) fn numbers(&self) -> Vec<f64> {
        match self {
            Buffer::F32(x) => widen(x),
            Buffer::F64(x) => x.clone(),
            Buffer::I32(x) => x.iter().map(|&x| f64::from(x)).collect(),
            Buffer::U32(x) => x.iter().map(|&x| f64::from(x)).collect(),
            Buffer::I64(x) => x.iter().map(|&x| x as f64).collect(),
            Buffer::Bool(x) => x.iter().map(|&x| f64::from(x)).collect(),
            Buffer::Wide(dtype, x) => x.iter().map(|&x| reference::decode(*dtype, x)).collect(),
            Buffer::Byte(ir::DType::I8, x) => {
                x.iter().map(|x| f64::from(x.cast_signed())).collect()
            }
            Buffer::Byte(dtype, x) => {
                x.iter().map(|&x| reference::decode(*dtype, u16::from(x))).collect()
            }
        }
    }

    pub(crate) fn view(&self) -> View<'_> {
        match self {
            Buffer::F32(x) => View::of(x),
            Buffer::F64(x) => View::of(x),
            Buffer::I32(x) => View::of(x),
            Buffer::U32(x) => View::of(x),
            Buffer::I64(x) => View::of(x),
            Buffer::Bool(x) => View::of(x),
            Buffer::Wide(_, x) => View::of(x),
            Buffer::Byte(_, x) => View::of(x),
        }
    }

    pub(crate) fn view_mut(&mut self) -> ViewMut<'_> {
        match self {
            Buffer::F32(x) => ViewMut::of(x),
            Buffer::F64(x) => ViewMut::of(x),
            Buffer::I32(x) => ViewMut::of(x),
            Buffer::U32(x) => ViewMut::of(x),
            Buffer::I64(x) => ViewMut::of(x),
            Buffer::Bool(x) => ViewMut::of(x),
            Buffer::Wide(_, x) => ViewMut::of(x),
            Buffer::Byte(_, x) => ViewMut::of(x),
        }
    }
}

/// A launch: a kernel, its scalars and inputs, and what its outputs hold before.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) kernel: Kernel,
    pub(crate) scalars: Vec<i64>,
    pub(crate) inputs: Vec<Buffer>,
    pub(crate) old: Vec<Buffer>,
}

impl Case {
    /// A launch on random numbers.
    pub(crate) fn new(random: &mut Random, kernel: Kernel) -> Case {
        verify(&kernel).unwrap_or_else(|why| panic!("{kernel:?}: {why}"));
        let mut buffers = |arguments: Vec<Argument>| {
            arguments.iter().map(|of| Buffer::new(of.dtype, &random.numbers(of.len))).collect()
        };
        let (inputs, old) = (buffers(kernel.inputs()), buffers(kernel.outputs()));
        Case { kernel, scalars: Vec::new(), inputs, old }
    }

    /// The outputs of the case, which is a kernel of a library, in the shim.
    pub(crate) fn execute(&self, library: &Library, at: usize, seed: u64) -> Vec<Buffer> {
        self.run(|inputs, outputs| library.launch(at, &self.scalars, inputs, outputs, seed))
    }

    /// The same launch, which passes the offsets of the kernel as scalars, the last one first.
    pub(crate) fn with_scalars(&self) -> Case {
        let mut kernel = self.kernel.clone();
        let offsets = kernel.offsets_mut().into_iter().rev();
        let scalars = offsets.enumerate().map(|(slot, offset)| {
            let (value, most) = (offset.bound(), offset.most());
            *offset = Offset::Scalar { slot, least: value - i64::from(value > 0), most };
            value
        });
        let scalars = scalars.collect();
        Case { kernel, scalars, ..self.clone() }
    }

    /// Runs a launch on copies of the outputs.
    fn run(&self, launch: impl FnOnce(&[View<'_>], &[ViewMut<'_>])) -> Vec<Buffer> {
        let mut outputs = self.old.clone();
        let inputs: Vec<View> = self.inputs.iter().map(Buffer::view).collect();
        let views: Vec<ViewMut> = outputs.iter_mut().map(Buffer::view_mut).collect();
        launch(&inputs, &views);
        drop(views);
        outputs
    }
}

/// A launch that a test has run, with the outputs of AVX2.
pub(crate) struct Recorded {
    pub(crate) case: Case,
    pub(crate) found: Vec<Buffer>,
}

thread_local! {
    /// The launches of this thread's test, while they are recorded.
    static RECORD: RefCell<Option<Vec<Recorded>>> = const { RefCell::new(None) };
}

/// The launches of a test.
pub(crate) fn recorded(test: fn()) -> Vec<Recorded> {
    RECORD.set(Some(Vec::new()));
    test();
    RECORD.take().unwrap_or_default()
}

/// Runs a launch on copies of the outputs' old contents.
pub(crate) fn run(cpu: &Cpu, kernel: &Kernel, inputs: &[Buffer], old: &[Buffer]) -> Vec<Buffer> {
    let (inputs, old) = (inputs.to_vec(), old.to_vec());
    let case = Case { kernel: kernel.clone(), scalars: Vec::new(), inputs, old };
    let passing = case.with_scalars();
    assert!(passing.scalars.is_empty() || verify(&passing.kernel).is_ok(), "{kernel:?}");
    let on = |cpu: &Cpu| {
        let mut prepared = Prepared::new(&passing.kernel, &passing.scalars);
        passing.run(|inputs, outputs| cpu.launch(&mut prepared, inputs, outputs))
    };
    let outputs = on(cpu);
    RECORD.with_borrow_mut(|record| {
        let is_known = |all: &Vec<Recorded>| all.last().is_some_and(|r| r.case.kernel == *kernel);
        let Some(all) = record.as_mut().filter(|all| !is_known(all)) else { return };
        let found = on(&Cpu::with_isa(1, Isa::Avx2));
        all.push(Recorded { case: case.clone(), found });
    });
    outputs
}

/// Runs on one, two and three threads, which must agree in every bit.
pub(crate) fn run_on_threads(
    isa: Isa,
    kernel: &Kernel,
    inputs: &[Buffer],
    old: &[Buffer],
) -> Vec<Buffer> {
    let one = run(&Cpu::with_isa(1, isa), kernel, inputs, old);
    for threads in [2, 3] {
        let many = run(&Cpu::with_isa(threads, isa), kernel, inputs, old);
        let same = one.iter().zip(&many).all(|(a, b)| same_bits(a, b));
        assert!(same, "{threads} threads change bits of {kernel:?}");
    }
    one
}

pub(crate) fn same_bits(a: &Buffer, b: &Buffer) -> bool {
    let (a, b) = (a.numbers(), b.numbers());
    a.len() == b.len() && a.iter().zip(&b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// Asserts `|got - want| <= tolerance * (1 + |want|)` everywhere.
pub(crate) fn assert_close(got: &[f64], want: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
        let close =
            (g - w).abs() <= tolerance * (1.0 + w.abs()) || g == w || g.is_nan() && w.is_nan();
        assert!(close, "{what}: element {i} is {g}, not {w}");
    }
}
