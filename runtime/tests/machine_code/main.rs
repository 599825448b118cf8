//! The machine code of kernels' CUDA text, without a GPU: which instructions NVRTC makes of it, as
//! NVIDIA's disassembler lists them.

#![allow(clippy::print_stdout, reason = "what is skipped is said")]

mod listing;

use std::collections::BTreeMap;
use std::path::Path;

use gantline_runtime::cuda::nvrtc::Nvrtc;
use ir::DType;
use ir::op::Operands;
use ir::random::DrawBits;
use kernels::cuda::{Arch, SKINNY_ROWS, device_prelude, functions_for};
use kernels::{
    Access, Attention, BinaryOp, Border, Copy, CopyLoop, Dropout, Experts, Family, Instr, Kernel,
    LoopAB, LoopAC, LoopBC, Offset, Output, Product, ReduceOp, RowInput, Rows, Scales, StoredTypes,
    Tiling, UnaryOp,
};

use listing::{disassembler, is, is_float_atomic, is_local, kind};

/// What the code of a kernel has to look like.
struct Expected {
    what: &'static str,
    archs: &'static [Arch],
    kernel: Kernel,
    /// Operations that one of its functions has, with modifiers or without.
    has: &'static [&'static str],
    /// Kinds of operations that none has.
    lacks: &'static [&'static str],
    /// Kinds of operations that access 16 bytes each.
    wide: &'static [&'static str],
}

/// A product of operands of a type that are contiguous along k; those of F32 are read as TF32.
fn product_of(dtype: DType) -> Kernel {
    let Kernel::Product(mut p) = product(256, true) else { unreachable!("it is a product") };
    p.stored = StoredTypes { a: dtype, b: dtype, c: DType::F32 };
    p.operands = if dtype == DType::F32 { Operands::Tf32 } else { Operands::Exact };
    Kernel::Product(p)
}

/// A product of codes with scales, of activations and a weight or of two activations by tokens.
fn scaled(of_weight: bool) -> Kernel {
    let Kernel::Product(mut p) = product_of(DType::F8E4M3) else { unreachable!("it is one") };
    let [_, _, n, k] = p.sizes();
    let (block, of_block) = if of_weight { (Scales::RUN, 1) } else { (1, 1) };
    let runs = k / Scales::RUN;
    let rows = Scales { block: 1, of_block: runs, of_run: 1 };
    p.scales = Some([rows, Scales { block, of_block, of_run: n.div_ceil(block) }]);
    Kernel::Product(p)
}

/// A product whose second operand has rows that start at multiples of 4 bytes.
fn copied_by_threads() -> Kernel {
    let Kernel::Product(mut p) = product(256, false) else { unreachable!("it is a product") };
    p.k[0].b += 2;
    Kernel::Product(p)
}

/// A product of F32 of which neither operand is contiguous along k.
fn strided() -> Kernel {
    let Kernel::Product(mut p) = product(256, false) else { unreachable!("it is a product") };
    (p.m[0].a, p.k[0].a) = (1, 256);
    p.stored = StoredTypes::all(DType::F32);
    p.operands = Operands::Tf32;
    Kernel::Product(p)
}

/// A product of rows of whole vectors; `b` is stored by columns or by rows.
fn product(m: usize, is_transposed: bool) -> Kernel {
    let [n, k] = [192, 2048];
    let mut p = Product::matrix(m, n, k, DType::BF16);
    p.m = vec![LoopAC { size: m, a: k, c: n }];
    if is_transposed {
        p.n = vec![LoopBC { size: n, b: k, c: 1 }];
        p.k = vec![LoopAB { size: k, a: 1, b: 1 }];
    }
    if m <= SKINNY_ROWS {
        p.tiling = Tiling { family: Family::Skinny, split: 2 };
    }
    Kernel::Product(p)
}

/// A convolution of kernels of 3 x 3 on images of 64 channels, which are contiguous or are not.
fn convolution(is_channels_last: bool) -> Kernel {
    let [images, channels, outputs, side, taps] = [8, 64, 128, 28, 9];
    let points = side * side;
    let [of_channel, step] = if is_channels_last { [1, channels] } else { [points, 1] };
    let [tap, depth] = if is_channels_last { [channels, 1] } else { [1, taps] };
    let mut p = Product::matrix(outputs, images, channels, DType::BF16);
    p.m[0] = LoopAC { size: outputs, a: channels * taps, c: points };
    p.n = vec![LoopBC { size: images, b: channels * points, c: outputs * points }];
    p.n.extend([side, 1].map(|c| LoopBC { size: side, b: 0, c }));
    p.k = vec![LoopAB { size: channels, a: depth, b: of_channel }];
    p.k.extend([3, 1].map(|a| LoopAB { size: 3, a: a * tap, b: 0 }));
    let border = |dim: usize| Border {
        n: 1 + dim,
        k: 1 + dim,
        stride: 1,
        dilation: 1,
        before: 1,
        spread: 1,
        size: side,
        step: [side, 1][dim] * step,
    };
    p.borders = vec![border(0), border(1)];
    Kernel::Product(p)
}

/// A product of few block tiles, each of whose sums several blocks share.
fn split() -> Kernel {
    let Kernel::Product(mut p) = product(256, true) else { unreachable!("it is a product") };
    p.tiling.split = 4;
    Kernel::Product(p)
}

fn attention(dim: usize) -> Attention {
    let [batch, length, heads, kv_heads] = [1, 512, 4, 2];
    let [q, k] = [heads, kv_heads].map(|heads| Attention::contiguous(length, heads, dim));
    Attention {
        batch,
        queries: length,
        keys: length,
        heads,
        kv_heads,
        dim,
        scale: 0.125,
        causal: true,
        window: 0,
        softcap: 0.0,
        bias: None,
        bias_grad: false,
        documents: None,
        query_offset: 0,
        head_offset: Offset::ZERO,
        group: 2,
        q,
        k,
        v: k,
        out: q,
        dropout: None,
        position: false,
        dtype: DType::BF16,
    }
}

/// Attention whose scores are bounded, within documents.
fn capped() -> Attention {
    Attention { softcap: 30.0, documents: Some(0), ..attention(128) }
}

/// A program of two inputs, of one row after the other, with what it computes of `a + b`.
fn rows(dtype: DType, more: &[Instr], value: usize) -> Kernel {
    rows_of([512, 2048], dtype, more, value)
}

/// The same of a shape.
fn rows_of([rows, cols]: [usize; 2], dtype: DType, more: &[Instr], value: usize) -> Kernel {
    let input = || RowInput { dtype, access: Access::full(rows, cols) };
    let mut instrs = vec![Instr::Load { input: 0 }, Instr::Load { input: 1 }];
    instrs.push(Instr::Binary { op: BinaryOp::Add, a: 0, b: 1 });
    instrs.extend_from_slice(more);
    let access = Access::full(rows, cols);
    let outputs = vec![Output::Store { value, access, dtype, accumulate: false }];
    Kernel::Rows(Rows {
        rows,
        cols,
        dtype: DType::F32,
        inputs: vec![input(), input()],
        instrs,
        outputs,
    })
}

fn transposition() -> Kernel {
    let [rows, columns] = [512, 2048];
    Kernel::Copy(Copy {
        loops: vec![
            CopyLoop { size: columns, source: 1, target: rows },
            CopyLoop { size: rows, source: columns, target: 1 },
        ],
        source_offset: Offset::ZERO,
        target_offset: 0,
        zero_first: 0,
        dtype: DType::BF16,
    })
}

fn by_mma(what: &'static str, kernel: Kernel) -> Expected {
    Expected {
        what,
        archs: &[Arch::Sm80],
        kernel,
        has: &["HMMA", "LDSM", "LDGSTS"],
        lacks: &["HGMMA"],
        wide: &["LDGSTS"],
    }
}

/// A product whose slices the block adds that takes the last ticket.
fn by_tickets(of: Expected) -> Expected {
    let has = &["HMMA", "LDSM", "LDGSTS", "ATOMG.E.INC.STRONG.GPU", "MEMBAR.ALL.GPU"];
    Expected { has, ..of }
}

/// The same by warpgroups, which lets the next launch start and fetches its weights before it waits
/// for the one before.
fn fetched_early(of: Expected) -> Expected {
    Expected {
        has: &[
            "HGMMA",
            "UTMALDG",
            "SYNCS",
            "PREEXIT",
            "UTMAPF",
            "ACQBULK",
            "ATOMG.E.INC.STRONG.GPU",
            "MEMBAR.ALL.GPU",
        ],
        ..of
    }
}

/// A gradient of attention, whose blocks wait for each other by an acquire and a release.
fn by_turns(what: &'static str, a: Attention) -> Expected {
    Expected {
        archs: &[Arch::Sm80, Arch::Sm89, Arch::Sm100],
        has: &["HMMA", "LDSM", "LDGSTS", "LDG.E.STRONG.GPU", "MEMBAR.ALL.GPU", "STG.E.STRONG.GPU"],
        ..by_mma(what, Kernel::AttentionBwd(a))
    }
}

/// The same by warpgroups: TMA stores the first part of a sum, and adds the others in turn.
fn by_turns_of_tma(what: &'static str, a: Attention) -> Expected {
    Expected {
        has: &[
            "HGMMA",
            "UTMALDG",
            "SYNCS",
            "USETMAXREG",
            "LDGSTS",
            "UBLKCP.G.S",
            "UBLKRED.G.S.ADD.F32",
            "LDG.E.STRONG.GPU",
            "STG.E.STRONG.GPU",
        ],
        lacks: &["HMMA"],
        ..by_wgmma(what, Kernel::AttentionBwd(a))
    }
}

/// What is looked for in gradients of attention.
fn gradients() -> Vec<Expected> {
    let dropout = Some(Dropout {
        p: 0.1,
        salt: 3,
        bits: DrawBits::B16,
        sample_offset: 0,
        heads_total: 4,
        head_base: Offset::ZERO,
        queries_total: 512,
        query_base: 0,
        keys_total: 512,
        key_base: 0,
    });
    let dropped = |dim: usize| Attention { dropout: dropout.clone(), ..attention(dim) };
    let whole = |dim: usize| Attention { causal: false, ..attention(dim) };
    let windowed = |dim: usize| Attention { window: 130, documents: Some(0), ..attention(dim) };
    let by_tma = by_turns_of_tma;
    vec![
        by_turns("gradient of attention of heads of 64", attention(64)),
        by_turns("gradient of attention of heads of 128", attention(128)),
        by_tma("gradient of attention of heads of 64", attention(64)),
        by_tma("gradient of attention of heads of 128", attention(128)),
        by_tma("gradient of attention of heads of 64, all keys seen", whole(64)),
        by_tma("gradient of attention of heads of 128, all keys seen", whole(128)),
        by_tma("gradient of attention of heads of 64 with dropout", dropped(64)),
        by_turns("gradient of attention of heads of 128 with dropout", dropped(128)),
        by_tma("gradient of attention of heads of 96 in windows of documents", windowed(96)),
        by_tma("gradient of attention with a cap", capped()),
    ]
}

fn by_wgmma(what: &'static str, kernel: Kernel) -> Expected {
    Expected {
        what,
        archs: &[Arch::Sm90a],
        kernel,
        has: &["HGMMA", "UTMALDG", "SYNCS"],
        lacks: &["HMMA", "LDGSTS"],
        wide: &[],
    }
}

/// What is looked for in products of neither BF16 nor F16.
fn products_of_other_elements() -> [Expected; 9] {
    [
        Expected {
            archs: &Arch::ALL,
            has: &["HMMA.1688.F32.TF32", "LDSM", "LDGSTS"],
            ..by_mma("product of F32", product_of(DType::F32))
        },
        Expected {
            archs: &Arch::ALL,
            has: &["HMMA.1688.F32.TF32", "LDSM", "LDGSTS"],
            wide: &[],
            ..by_mma("product of strided F32", strided())
        },
        Expected {
            archs: &[Arch::Sm89],
            has: &["QMMA.16832.F32.E4M3.E4M3", "LDSM", "LDGSTS"],
            ..by_mma("product of bytes", product_of(DType::F8E4M3))
        },
        Expected {
            has: &["QGMMA.64x128x32.F32.E4M3.E4M3", "UTMALDG", "UTMASTG", "USETMAXREG"],
            ..by_wgmma("product of bytes by warpgroups", product_of(DType::F8E4M3))
        },
        Expected {
            archs: &[Arch::Sm100],
            has: &["HMMA.16816.F32", "LDSM", "LDGSTS"],
            ..by_mma("product of bytes, converted", product_of(DType::F8E4M3))
        },
        Expected {
            archs: &[Arch::Sm89],
            has: &["QMMA.16832.F32.E4M3.E4M3", "LDSM", "LDGSTS"],
            ..by_mma("product of codes with scales", scaled(true))
        },
        Expected {
            archs: &[Arch::Sm100],
            has: &["HMMA.16816.F32", "LDSM", "LDGSTS"],
            ..by_mma("product of codes with scales, converted", scaled(false))
        },
        Expected {
            has: &["QGMMA.64x128x32.F32.E4M3.E4M3", "UTMALDG", "UTMASTG", "USETMAXREG"],
            ..by_wgmma("product of codes with scales by warpgroups", scaled(true))
        },
        Expected {
            has: &["QGMMA.64x128x32.F32.E4M3.E4M3", "UTMALDG", "UTMASTG", "USETMAXREG"],
            ..by_wgmma("product of codes with scales of rows by warpgroups", scaled(false))
        },
    ]
}

/// What is looked for in convolutions.
fn convolutions() -> [Expected; 2] {
    [
        by_mma("convolution of contiguous channels", convolution(true)),
        Expected { wide: &["STG"], ..by_mma("convolution of planes", convolution(false)) },
    ]
}

/// What is looked for in routed experts and in their gradient.
fn experts() -> Vec<Expected> {
    let e = |dtype: DType| Experts {
        tokens: 512,
        experts: 8,
        model: 512,
        inner: 1536,
        top_k: 2,
        of: 8,
        accumulate: [true, true, false],
        dtype,
    };
    let forward = |dtype| Kernel::Experts(Experts { accumulate: [false; 3], ..e(dtype) });
    let backward = |dtype| Kernel::ExpertsBwd(e(dtype));
    let of =
        |what, kernel, archs, has, lacks| Expected { what, archs, kernel, has, lacks, wide: &[] };
    let (by_mma, by_wgmma): (&[Arch], &[Arch]) =
        (&[Arch::Sm80, Arch::Sm89, Arch::Sm100], &[Arch::Sm90a]);
    let mma: &[&str] = &["HMMA.16816.F32", "LDSM", "LDGSTS", "VOTE"];
    let wgmma: &[&str] = &["HGMMA.64x128x16.F32", "UTMALDG", "UTMASTG", "USETMAXREG", "VOTE"];
    vec![
        of("experts of BF16", forward(DType::BF16), by_mma, mma, &["HGMMA"][..]),
        of("gradient of experts of F16", backward(DType::F16), by_mma, mma, &["HGMMA"]),
        of("experts of BF16 by warpgroups", forward(DType::BF16), by_wgmma, wgmma, &["HMMA"]),
        of("gradient of experts by warpgroups", backward(DType::BF16), by_wgmma, wgmma, &["HMMA"]),
        of("experts of F32", forward(DType::F32), by_mma, &["FFMA", "VOTE"], &["HMMA"]),
        of("gradient of experts of F32", backward(DType::F32), by_mma, &["FFMA"], &["HMMA"]),
    ]
}

/// A kernel that moves memory by 16 bytes a thread.
fn stream(what: &'static str, kernel: Kernel) -> Expected {
    Expected {
        what,
        archs: &[Arch::Sm80, Arch::Sm90a],
        kernel,
        has: &["LDG", "STG"],
        lacks: &[],
        wide: &["LDG", "STG"],
    }
}

/// Kernels that move memory.
fn streams() -> Vec<Expected> {
    let softmax = [
        Instr::Reduce { op: ReduceOp::Max, x: 2 },
        Instr::Binary { op: BinaryOp::Sub, a: 2, b: 3 },
        Instr::Unary { op: UnaryOp::Exp, x: 4 },
        Instr::Reduce { op: ReduceOp::Sum, x: 5 },
        Instr::Binary { op: BinaryOp::Div, a: 5, b: 6 },
    ];
    let mut all = vec![
        stream("sum of BF16", rows(DType::BF16, &[], 2)),
        stream("sum of F32", rows(DType::F32, &[], 2)),
        stream("softmax of BF16", rows(DType::BF16, &softmax, 7)),
    ];
    // Of these a thread keeps 80 registers, and 32 of each block of a cluster of four.
    let wide = |what, cols| stream(what, rows_of([64, cols], DType::BF16, &softmax, 7));
    all.extend([
        Expected { archs: &[Arch::Sm80, Arch::Sm89], ..wide("softmax by larger blocks", 40_960) },
        Expected {
            archs: &[Arch::Sm90a, Arch::Sm100],
            has: &["LDG", "STG", "UCGABAR_ARV", "UCGABAR_WAIT"],
            ..wide("softmax by clusters", 65_536)
        },
    ]);
    // The only branch of a map is that of threads without points, which end.
    let map = |what, op, x| Expected {
        has: &["LDG", "STG", "MUFU", "F2FP"],
        lacks: &["BSSY", "CALL", "F2I", "FRND"],
        ..stream(what, rows(DType::BF16, &[Instr::Unary { op, x }], 3))
    };
    all.extend([
        map("GELU of BF16", UnaryOp::GeluTanh, 2),
        map("SiLU of BF16", UnaryOp::Silu, 2),
        map("hyperbolic tangent of BF16", UnaryOp::Tanh, 2),
        Expected {
            has: &["LDG", "STS", "LDS", "STG", "BAR"],
            ..stream("transposition of BF16", transposition())
        },
    ]);
    all
}

/// The table of what is looked for.
fn expectations() -> Vec<Expected> {
    let by_warpgroups = |what, kernel| Expected {
        has: &["HGMMA", "UTMALDG", "SYNCS", "USETMAXREG"],
        ..by_wgmma(what, kernel)
    };
    let stored_by_tma = |what, kernel| Expected {
        has: &["HGMMA", "UTMALDG", "UTMASTG", "SYNCS", "USETMAXREG"],
        ..by_wgmma(what, kernel)
    };
    let stored_by_quads =
        |what, kernel| Expected { wide: &["LDGSTS", "STG"], ..by_mma(what, kernel) };
    let mut all = vec![
        stored_by_quads("product by rows", product(256, false)),
        stored_by_quads("product by columns", product(256, true)),
        by_mma("attention of heads of 64", Kernel::Attention(attention(64))),
        by_mma("attention of heads of 128", Kernel::Attention(attention(128))),
        by_mma("product in slices", split()),
        by_tickets(by_mma("product of few rows by rows", product(4, false))),
        by_tickets(by_mma("product of few rows by columns", product(4, true))),
        stored_by_tma("product by rows", product(256, false)),
        stored_by_tma("product by columns", product(256, true)),
        stored_by_tma("product in slices", split()),
        Expected {
            has: &["HGMMA", "UTMALDG", "UTMASTG", "SYNCS", "FENCE"],
            ..by_wgmma("product of rows that start anywhere", copied_by_threads())
        },
        fetched_early(by_wgmma("product of few rows by rows", product(4, false))),
        fetched_early(by_wgmma("product of few rows by columns", product(4, true))),
        by_warpgroups("attention of heads of 64", Kernel::Attention(attention(64))),
        by_warpgroups("attention of heads of 128", Kernel::Attention(attention(128))),
        by_warpgroups("attention with a cap", Kernel::Attention(capped())),
    ];
    all.extend(streams());
    all.extend(products_of_other_elements().into_iter().chain(convolutions()));
    all.extend(gradients());
    all.extend(experts());
    all
}

/// What is wrong with the operations of the functions of a kernel.
fn wrong(expected: &Expected, functions: &[&Vec<String>]) -> Vec<String> {
    let all = || functions.iter().flat_map(|of| of.iter().map(String::as_str));
    let mut wrong = Vec::new();
    for wanted in expected.has {
        let is_it = |operation: &str| {
            operation
                .strip_prefix(wanted)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        if !all().any(is_it) {
            wrong.push(format!("no {wanted}"));
        }
    }
    for operation in all() {
        // Of the only additions that are looked for each has its turn.
        let is_wanted = |wanted: &&str| kind(wanted) == kind(operation);
        let is_atomic = is_float_atomic(operation) && !expected.has.iter().any(is_wanted);
        let narrow = expected.wide.contains(&kind(operation)) && !is(operation, "128");
        let unwanted = expected.lacks.contains(&kind(operation));
        if narrow || unwanted || is_local(operation) || is_atomic {
            wrong.push(operation.to_owned());
        }
    }
    wrong
}

/// NVRTC and a disassembler, or nothing where they may be missing.
fn tools() -> Option<(Nvrtc, std::path::PathBuf)> {
    let is_wanted = std::env::var_os("GANTLINE_REQUIRE_NVRTC").is_some();
    match (Nvrtc::open(), disassembler()) {
        (Ok(nvrtc), Some(disassembler)) => Some((nvrtc, disassembler)),
        (Err(absent), _) => {
            assert!(!is_wanted, "{absent}");
            println!("skipped: {absent}");
            None
        }
        (Ok(_), None) => {
            let absent = format!("no nvdisasm; {} says where it is", listing::VARIABLE);
            assert!(!is_wanted, "{absent}");
            println!("skipped: {absent}");
            None
        }
    }
}

/// The operations of each function of a text.
fn compiled(
    (nvrtc, disassembler): &(Nvrtc, std::path::PathBuf),
    text: &str,
    arch: Arch,
    name: &str,
) -> BTreeMap<String, Vec<String>> {
    let cubin = nvrtc.compile(&(device_prelude() + text), arch.name());
    let cubin = cubin.unwrap_or_else(|log| panic!("{name}: {log}"));
    assert_eq!(cubin.warnings, Vec::<String>::new(), "{name} for {arch}");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    listing::operations(disassembler, &cubin.bytes, folder, &format!("{name}-{arch}"))
}

#[test]
fn kernels_have_the_instructions_that_they_were_written_for() {
    let Some(tools) = tools() else { return };
    for arch in Arch::ALL {
        let all = expectations();
        let of_arch: Vec<&Expected> = all.iter().filter(|of| of.archs.contains(&arch)).collect();
        let name = |at: usize, number: usize| format!("k{at}_{number}");
        let mut text = String::new();
        for (at, expected) in of_arch.iter().enumerate() {
            let functions = functions_for(&expected.kernel, arch).functions;
            for (number, function) in functions.iter().enumerate() {
                text += &function.text(&name(at, number));
            }
        }
        let found = compiled(&tools, &text, arch, "kernels");
        for (at, expected) in of_arch.iter().enumerate() {
            let prefix = format!("k{at}_");
            let functions = found.iter().filter(|(name, _)| name.starts_with(&prefix));
            let functions: Vec<&Vec<String>> =
                functions.map(|(_, operations)| operations).collect();
            let what = expected.what;
            assert!(!functions.is_empty(), "{what}: its functions are listed");
            // The end of a listing is a loop that nothing enters, and its padding.
            let operations = functions.iter().flat_map(|of| of.iter());
            let count = operations.filter(|operation| kind(operation) != "NOP").count();
            println!("{what} for {arch}: {count} operations");
            let waits = |of: &&Vec<String>| of.iter().any(|operation| kind(operation) == "ACQBULK");
            let has_waits = functions.iter().all(waits);
            assert_eq!(has_waits, arch >= Arch::Sm90a, "{what} for {arch} waits for launches");
            assert_eq!(wrong(expected, &functions), Vec::<String>::new(), "{what} for {arch}");
        }
    }
}

/// A defect of each sort, and the operation that the check finds it by.
const DEFECTS: [(&str, &str); 6] = [
    ("KERNEL(32) f(float* c) { atomicAdd(c, 1.0f); }", "RED"),
    ("KERNEL(32) f(float* c) { c[1] = atomicAdd(c, 1.0f); }", "ATOM"),
    ("KERNEL(32) f(double* c) { atomicAdd(c, 1.0); }", "RED"),
    (
        "KERNEL(32) f(float* c, int n) { float x[90]; \
         for (int i = 0; i < n; i += 1) x[(i * 7 + n) % 90] = c[i]; c[n] = x[n % 90]; }",
        "LDL",
    ),
    ("KERNEL(32) f(float* c) { c[threadIdx.x] = 1.0f; }", "STG"),
    (
        "KERNEL(32) f(float* c, const float* x) { store_vector(c, load_vector<float, 2>(x)); }",
        "LDG",
    ),
];

/// The check is not vacuous: it finds each defect, and nothing in tickets, which are integers.
#[test]
fn defects_in_machine_code_are_found() {
    let Some(tools) = tools() else { return };
    let none = Expected { has: &[], lacks: &[], wide: &["LDG", "STG"], ..expectations().remove(0) };
    for (text, operation) in DEFECTS {
        for arch in [Arch::Sm80, Arch::Sm90a] {
            let found = compiled(&tools, text, arch, "defect");
            let wrong = wrong(&none, &found.values().collect::<Vec<_>>());
            assert!(wrong.iter().any(|of| kind(of).starts_with(operation)), "{text}: {wrong:?}");
        }
    }
    let ticket = "KERNEL(32) f(int* c) { if (atomicAdd(c, 1) == 7) c[1] = 0; }";
    let found = compiled(&tools, ticket, Arch::Sm80, "ticket");
    let plain = Expected { wide: &[], ..none };
    assert_eq!(wrong(&plain, &found.values().collect::<Vec<_>>()), Vec::<String>::new());
}
