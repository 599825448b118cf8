//! Conversions to and from narrow formats: for every number that they have, and for numbers at
//! every border between two of them.

use std::slice::from_ref;

use gantline_kernels::verify::verify;
use gantline_kernels::{Access, Instr, Kernel, Output, RowInput, Rows, UnaryOp};
use ir::DType;
use ir::formats::{decode, encode};

use crate::{Buffer, Random, run_on_threads, sets};

const NARROW: [DType; 4] = [DType::BF16, DType::F16, DType::F8E4M3, DType::F8E5M2];

/// All codes of a format, and some more so that no vector ends with the last one.
fn codes(dtype: DType) -> Vec<u16> {
    let count: u32 = if dtype.size() == 1 { 1 << 8 } else { 1 << 16 };
    (0..count + 5).map(|code| (code % count) as u16).collect()
}

fn buffer(dtype: DType, codes: &[u16]) -> Buffer {
    match dtype.size() {
        1 => Buffer::Byte(dtype, codes.iter().map(|&code| code as u8).collect()),
        _ => Buffer::Wide(dtype, codes.to_vec()),
    }
}

fn zeros(dtype: DType, len: usize) -> Buffer {
    match dtype {
        DType::I64 => Buffer::I64(vec![0; len]),
        _ => Buffer::new(dtype, &vec![0.0; len]),
    }
}

/// The bits of the elements.
fn bits(buffer: &Buffer) -> Vec<u64> {
    match buffer {
        Buffer::F32(x) => x.iter().map(|x| u64::from(x.to_bits())).collect(),
        Buffer::F64(x) => x.iter().map(|x| x.to_bits()).collect(),
        Buffer::I64(x) => x.iter().map(|&x| x as u64).collect(),
        Buffer::Wide(_, x) => x.iter().map(|&x| u64::from(x)).collect(),
        Buffer::Byte(_, x) => x.iter().map(|&x| u64::from(x)).collect(),
        _ => panic!("no bits of {buffer:?}"),
    }
}

/// The bits that a number is stored as.
fn stored(dtype: DType, x: f64) -> u64 {
    match dtype {
        DType::F64 => x.to_bits(),
        DType::F32 => u64::from((x as f32).to_bits()),
        DType::I64 => x as i64 as u64,
        _ => u64::from(encode(dtype, x)),
    }
}

fn is_nan(dtype: DType, bits: u64) -> bool {
    match dtype {
        DType::F64 => f64::from_bits(bits).is_nan(),
        _ => f32::from_bits(bits as u32).is_nan(),
    }
}

/// One row that is loaded, taken through functions and stored: each value as each of some types.
fn program(compute: DType, from: DType, len: usize, ops: &[UnaryOp], to: &[DType]) -> Rows {
    let access = Access::per_column();
    let mut instrs = vec![Instr::Load { input: 0 }];
    instrs.extend(ops.iter().map(|&op| Instr::Unary { op, x: 0 }));
    let store = |value: usize| {
        let access = access.clone();
        to.iter().map(move |&dtype| Output::Store {
            value,
            access: access.clone(),
            dtype,
            accumulate: false,
        })
    };
    let outputs = (0..instrs.len()).flat_map(store).collect();
    let inputs = vec![RowInput { dtype: from, access: Access::per_column() }];
    Rows { rows: 1, cols: len, dtype: compute, inputs, instrs, outputs }
}

/// Loads numbers, rounds them to each format, and stores all that in each: on all sets.
fn check(compute: DType, input: &Buffer, from: DType) {
    let x = input.numbers();
    let to = [DType::F32, DType::F64, DType::BF16, DType::F16, DType::F8E4M3, DType::F8E5M2];
    let ops = NARROW.map(|dtype| UnaryOp::rounding(dtype).expect("a narrow type has one"));
    let kernel = Kernel::Rows(program(compute, from, x.len(), &ops, &to));
    assert_eq!(verify(&kernel), Ok(()));
    let old: Vec<Buffer> = kernel.outputs().iter().map(|o| zeros(o.dtype, x.len())).collect();
    for isa in sets() {
        let found = run_on_threads(isa, &kernel, from_ref(input), &old);
        for (at, found) in found.iter().enumerate() {
            let (value, to) = (at / to.len(), to[at % to.len()]);
            for (&x, found) in x.iter().zip(bits(found)) {
                let rounded = match value {
                    0 => x,
                    _ => decode(NARROW[value - 1], encode(NARROW[value - 1], x)),
                };
                // What one number of F64 is as another was computed as F32.
                let rounded =
                    if compute == DType::F32 { f64::from(rounded as f32) } else { rounded };
                let want = stored(to, rounded);
                if x.is_nan() && !to.is_narrow() {
                    // What is only moved keeps its bits, what is computed is quiet.
                    assert!(is_nan(to, found), "{found:#x} is a number");
                    continue;
                }
                let (code, through) = (x.to_bits(), value.checked_sub(1).map(|at| ops[at]));
                assert!(
                    found == want,
                    "{x:e} ({code:#x}) of {from} through {through:?} to {to} in {compute} on \
                     {isa:?}: {found:#x}, not {want:#x}",
                );
            }
        }
    }
}

#[test]
fn every_number_of_a_narrow_format_is_converted_to_all_others() {
    for from in NARROW {
        let input = buffer(from, &codes(from));
        check(DType::F32, &input, from);
        check(DType::F64, &input, from);
    }
}

/// Finite numbers of a format, ascending, and what would follow the last one.
fn ladder(dtype: DType) -> Vec<f64> {
    let all = codes(dtype).into_iter().map(|code| decode(dtype, code));
    let mut ladder: Vec<f64> = all.filter(|x| x.is_finite()).collect();
    ladder.sort_by(f64::total_cmp);
    ladder.dedup();
    let [.., before, last] = ladder[..] else { panic!("a format has numbers") };
    ladder.push(last + (last - before));
    ladder.insert(0, -last - (last - before));
    ladder
}

/// Ties between neighbours, what is next to ties and to numbers, and bits at random.
#[test]
fn numbers_are_rounded_once_to_the_nearest() {
    let mut random = Random::new(1);
    for dtype in NARROW {
        let ladder = ladder(dtype);
        let ties = ladder.windows(2).map(|pair| f64::midpoint(pair[0], pair[1]));
        let borders: Vec<f64> = ladder.iter().copied().chain(ties).collect();
        let near = |x: f64| {
            let x = x as f32;
            [x.next_down(), x, x.next_up()]
        };
        let mut single: Vec<f32> = borders.iter().flat_map(|&x| near(x)).collect();
        let special =
            [0x7f80_0001, 0xff80_0001, 0x7fbf_ffff, 0x7fc0_0000, 0xffc1_2345, 0xffff_ffff];
        single.extend(special.map(f32::from_bits));
        single.extend([f32::MIN, f32::MAX, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0]);
        single.extend((0..100_003).map(|_| f32::from_bits(random.bits() as u32)));
        check(DType::F32, &Buffer::F32(single), DType::F32);
        // So near to a tie that a number of F32 in between would be that.
        let near = |x: f64| [x.next_down(), x, x.next_up()];
        let mut double: Vec<f64> = borders.iter().flat_map(|&x| near(x)).collect();
        double.extend([f64::MIN, f64::MAX, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 5e-324]);
        double.extend((0..20_003).map(|_| f64::from_bits(random.bits())).filter(|x| !x.is_nan()));
        check(DType::F64, &Buffer::F64(double), DType::F64);
    }
}

/// Each function of every number is that of the number of F32 that it is, rounded once.
#[test]
fn functions_of_every_number_are_those_of_f32_rounded() {
    for dtype in [DType::BF16, DType::F16] {
        let codes = codes(dtype);
        let narrow = buffer(dtype, &codes);
        let wide = Buffer::new(DType::F32, &narrow.numbers());
        let ops = UnaryOp::ALL.map(|op| op);
        let kernel =
            |from: DType| Kernel::Rows(program(DType::F32, from, codes.len(), &ops, &[from]));
        let old = |dtype: DType| vec![zeros(dtype, codes.len()); ops.len() + 1];
        for isa in sets() {
            let found = run_on_threads(isa, &kernel(dtype), from_ref(&narrow), &old(dtype));
            let want = run_on_threads(isa, &kernel(DType::F32), from_ref(&wide), &old(DType::F32));
            for (at, (found, want)) in found.iter().zip(&want).enumerate() {
                let rounded = want.numbers().into_iter().map(|x| stored(dtype, x));
                for (i, (found, want)) in bits(found).into_iter().zip(rounded).enumerate() {
                    let op = at.checked_sub(1).map(|at| ops[at]);
                    let code = codes[i];
                    assert_eq!(found, want, "{op:?} of {dtype} {code:#x} on {isa:?}");
                }
            }
        }
    }
}

/// Integers of 64 bits are rounded once, and come of narrow numbers towards zero.
#[test]
fn integers_of_64_bits_are_converted() {
    let mut random = Random::new(3);
    let mut integers: Vec<i64> = vec![0, 1, -1, i64::MAX, i64::MIN, (1 << 53) + 1];
    for shift in 0..63 {
        // Next to a tie of BF16, by less than F64 has.
        let tie = (1_i64 << shift) + (1_i64 << shift >> 8);
        integers.extend([tie - 1, tie, tie + 1, -tie, -tie - 1]);
        integers.push(random.bits() as i64 >> shift);
    }
    let kernel = Kernel::Rows(program(DType::I64, DType::I64, integers.len(), &[], &NARROW));
    assert_eq!(verify(&kernel), Ok(()));
    let old = NARROW.map(|dtype| zeros(dtype, integers.len()));
    for isa in sets() {
        let found = run_on_threads(isa, &kernel, &[Buffer::I64(integers.clone())], &old);
        for (found, dtype) in found.iter().zip(NARROW) {
            let ladder = ladder(dtype);
            for (&x, found) in integers.iter().zip(bits(found)) {
                // The nearest number of the ladder, by integers alone.
                let far = |y: &f64| (*y as i128 - i128::from(x)).abs();
                let whole = ladder.iter().filter(|y| y.fract() == 0.0 && y.abs() < 1e30);
                let nearest = whole.clone().map(far).min().expect("there are integers");
                let found = decode(dtype, found as u16);
                let last = ladder[ladder.len() - 2];
                if found.is_finite() {
                    assert_eq!(far(&found), nearest, "{x} is no {found} of {dtype}");
                    let ties = whole.filter(|y| far(y) == nearest).count();
                    let even = encode(dtype, found).is_multiple_of(2);
                    assert!(ties == 1 || even, "{x} is tied and {found} of {dtype} is odd");
                } else {
                    assert!(x.unsigned_abs() as f64 > last, "{x} is {found} of {dtype}");
                }
            }
        }
    }
    for dtype in NARROW {
        let codes = codes(dtype);
        let kernel = Kernel::Rows(program(DType::I64, dtype, codes.len(), &[], &[DType::I64]));
        let input = buffer(dtype, &codes);
        for isa in sets() {
            let old = [zeros(DType::I64, codes.len())];
            let found = run_on_threads(isa, &kernel, from_ref(&input), &old);
            let want: Vec<u64> = input.numbers().iter().map(|x| *x as i64 as u64).collect();
            assert_eq!(bits(&found[0]), want, "{dtype}");
        }
    }
}
