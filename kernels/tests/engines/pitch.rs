//! Arguments whose rows have a pitch: kernels compute the same, and leave alone what is between.

use gantline_kernels::Kernel;
use gantline_kernels::cpu::{Cpu, Isa};
use gantline_kernels::pitch::{Pitch, with_pitch};
use gantline_kernels::verify::verify;

use crate::moves::copies_follow_their_strides;
use crate::product::{
    products_in_one_launch_have_the_bits_of_each_alone, products_of_random_einsums_match,
    programs_on_blocks_have_the_bits_of_a_launch_of_their_own,
};
use crate::rows::random_programs_match_their_interpretation;
use crate::{Buffer, Random, Recorded, recorded, run, same_bits};

/// What is between the rows of an argument: numbers that spoil every sum.
const BETWEEN: f64 = 3e4;

/// The same buffer with a pitch.
fn spread(buffer: &Buffer, pitch: Pitch) -> Buffer {
    fn of<T: Copy>(x: &[T], pitch: Pitch, between: T) -> Vec<T> {
        let mut all = vec![between; x.len().checked_sub(1).map_or(0, |last| pitch.place(last) + 1)];
        x.iter().enumerate().for_each(|(at, x)| all[pitch.place(at)] = *x);
        all
    }
    match buffer {
        Buffer::F32(x) => Buffer::F32(of(x, pitch, BETWEEN as f32)),
        Buffer::F64(x) => Buffer::F64(of(x, pitch, BETWEEN)),
        Buffer::I32(x) => Buffer::I32(of(x, pitch, BETWEEN as i32)),
        Buffer::U32(x) => Buffer::U32(of(x, pitch, BETWEEN as u32)),
        Buffer::I64(x) => Buffer::I64(of(x, pitch, BETWEEN as i64)),
        Buffer::Bool(x) => Buffer::Bool(of(x, pitch, 1)),
        Buffer::Wide(dtype, x) => Buffer::Wide(*dtype, of(x, pitch, 0x4700)),
        Buffer::Byte(dtype, x) => Buffer::Byte(*dtype, of(x, pitch, 0x40)),
    }
}

/// Lengths of rows that an argument may have: what its strides are multiples of.
fn rows_of(kernel: &Kernel, argument: usize, len: usize) -> Vec<usize> {
    let fits = |row: &usize| {
        let pitch = Pitch { row: *row, pitch: row + 3 };
        with_pitch(kernel, argument, pitch).is_some()
    };
    (2..len).filter(fits).collect()
}

/// Checks a few pitches of each argument, and says how many.
fn check(random: &mut Random, of: &Recorded) -> usize {
    let (kernel, case) = (&of.case.kernel, &of.case);
    let cpu = Cpu::with_isa(1, Isa::Avx2);
    let arguments: Vec<usize> =
        kernel.inputs().iter().chain(&kernel.outputs()).map(|a| a.len).collect();
    let mut checked = 0;
    for (argument, len) in arguments.into_iter().enumerate() {
        let rows = rows_of(kernel, argument, len.min(100));
        for _ in 0..rows.len().min(2) {
            let row = random.pick(&rows);
            let pitch = Pitch { row, pitch: row + random.below(9) };
            let changed = with_pitch(kernel, argument, pitch).expect("these rows fit");
            let what = format!("argument {argument} with {pitch:?} of {kernel:?}: {changed:?}");
            assert_eq!(verify(&changed), Ok(()), "{what}");
            let (mut inputs, mut old) = (case.inputs.clone(), case.old.clone());
            let mut wanted = of.found.clone();
            match argument.checked_sub(inputs.len()) {
                None => inputs[argument] = spread(&inputs[argument], pitch),
                Some(output) => {
                    old[output] = spread(&old[output], pitch);
                    wanted[output] = spread(&wanted[output], pitch);
                }
            }
            let found = run(&cpu, &changed, &inputs, &old);
            for (found, wanted) in found.iter().zip(&wanted) {
                assert!(same_bits(found, wanted), "{what}");
            }
            checked += 1;
        }
    }
    checked
}

#[test]
fn rows_may_lie_further_apart() {
    let mut random = Random::new(0);
    for (name, test) in [
        ("einsums", products_of_random_einsums_match as fn()),
        ("products", products_in_one_launch_have_the_bits_of_each_alone),
        ("programs on blocks", programs_on_blocks_have_the_bits_of_a_launch_of_their_own),
        ("rows", random_programs_match_their_interpretation),
        ("copies", copies_follow_their_strides),
    ] {
        let all = recorded(test);
        let all = all.iter().filter(|of| of.case.scalars.is_empty()).take(60);
        let checked: usize = all.map(|of| check(&mut random, of)).sum();
        assert!(checked > 30, "{name}: {checked} arguments have pitches");
    }
}
