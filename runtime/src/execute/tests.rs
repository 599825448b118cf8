//! Sessions of hand-written programs, on one rank and on several.

use ir::ids::Known;
use ir::program::{Exchange, Group, Instruction, Ref};
use kernels::cpu::Prepared;
use kernels::{Copy, CopyLoop, Offset, Product};

use super::tiny::{Layout, SEQ, all_reduce, finish, mesh, options, routine, session};
use super::*;
use crate::local::arena::Arena;

fn write(session: &mut Session, part: Part, value: impl Fn(usize) -> f32) {
    let mut values = |block: &[std::ops::Range<usize>], dtype: DType| {
        assert_eq!(dtype, DType::F32);
        Ok::<_, ()>(block[0].clone().flat_map(|i| value(i).to_le_bytes()).collect())
    };
    assert_eq!(session.write_weight("w", part, &mut values), Ok(true));
}

fn scalars(step: u32) -> Scalars {
    Scalars { step, rate: 0.0625, ..Scalars::default() }
}

#[test]
fn every_mesh_trains_to_the_same_bits() {
    let tokens: Vec<i32> = (0..8 * SEQ as i32).map(|i| i * 7 % 13).collect();
    let batch = Batch { tokens: &tokens, ..Batch::default() };
    let train = |dp: usize, tp: usize, size: usize| {
        let mut session = session(mesh(dp, tp), size, 8 / dp / size);
        write(&mut session, Part::Weight, |i| i as f32);
        write(&mut session, Part::State(0), |_| 1.0);
        let before = session.evaluate(&batch).unwrap();
        let reports: Vec<StepReport> =
            (1..4).map(|step| session.step(&batch, scalars(step)).unwrap()).collect();
        assert_eq!(before.loss(), reports[0].loss());
        assert_eq!(before.count, 8.0 * SEQ as f64);
        assert!(reports[2].loss() < reports[0].loss());
        assert_eq!(reports[2].ranks.len(), dp * tp);
        let tensors = [Part::Weight, Part::Grad, Part::State(0)];
        let tensors = tensors.map(|part| session.read_weight("w", part).unwrap());
        assert_eq!(tensors[0].dims, [SEQ]);
        (tensors, reports.into_iter().map(|r| r.loss_sum).collect::<Vec<_>>())
    };
    let reference = train(1, 1, 8);
    let expected = |i: usize| tokens.iter().skip(i).step_by(SEQ).sum::<i32>() as f64 / 8.0;
    for (i, w) in reference.0[0].to_f64().into_iter().enumerate() {
        assert!((w - expected(i)).abs() < 1.5, "w[{i}] is {w}, the mean is {}", expected(i));
    }
    for (dp, tp, size) in [(1, 1, 2), (2, 1, 4), (1, 2, 1), (2, 2, 2), (4, 1, 1), (1, 4, 4)] {
        assert_eq!(train(dp, tp, size), reference, "dp {dp}, tp {tp}, size {size}");
    }
}

#[test]
fn feeds_hold_the_samples_of_their_micro_batch_and_rank() {
    let mut session = session(mesh(2, 2), 3, 2);
    let tokens: Vec<i32> = (0..12 * SEQ as i32).collect();
    let given = Scalars { seed: 9, step: 5, rate: 0.5, clip: 2.0, ..Scalars::default() };
    session.step(&Batch { tokens: &tokens, ..Batch::default() }, given).unwrap();
    for rank in 0..4 {
        let program = session.classes().program_of(rank);
        let buffer = |feed| {
            let at = program.buffers.iter().position(|b| b.contents == Contents::Feed(feed));
            BufferId(at.unwrap() as u32)
        };
        // The second micro-batch starts after 2 * 3 samples.
        let first = 6 + rank as i32 / 2 * 3;
        let rows = session.read(rank, buffer(Feed::Tokens));
        let expected: Vec<u8> =
            (first * SEQ as i32..(first + 3) * SEQ as i32).flat_map(i32::to_le_bytes).collect();
        assert_eq!(rows, expected, "rank {rank}");
        let key = [9, 5, 3, first as u32].map(u32::to_le_bytes).concat();
        assert_eq!(session.read(rank, buffer(Feed::Key { path: 3 })), key);
        let scalars = [0.5_f32, 1.0, 1.0, 2.0, 1.0].map(f32::to_le_bytes).concat();
        assert_eq!(session.read(rank, buffer(Feed::Scalars)), scalars);
    }
}

/// `a + a -> b`, as a product with a matrix of one element, 2.
fn doubled(len: usize) -> Kernel {
    Kernel::Product(Product::matrix(len, 1, 1, DType::F32))
}

/// Three stages; each doubles what comes and sends it on, and doubles what comes back. Stage 0
/// keeps what comes back of each micro-batch. `slots` messages are kept apart on each stage.
fn pipeline(stages: usize, count: usize) -> Classes {
    let mut programs = Vec::new();
    for stage in 0..stages {
        let mut layout = Layout { buffers: Vec::new(), end: 0 };
        let two = layout.add(Contents::Param(0), DType::F32, &[1]);
        let mut activation = || layout.add(Contents::Activation, DType::F32, &[4]);
        let values: Vec<[BufferId; 4]> =
            (0..count).map(|_| [(); 4].map(|()| activation())).collect();
        let launch = Instruction::Launch {
            kernel: 0,
            scalars: Vec::new(),
            inputs: vec![Ref::Slot(0), Ref::Slot(1)],
            outputs: vec![Ref::Slot(2)],
            workspace: None,
        };
        let call = |from, to| Step::Call { routine: 0, slots: vec![from, two, to], frame: None };
        let (is_first, is_last) = (stage == 0, stage == stages - 1);
        let forward = |m: usize| {
            let [x, y, dy, _] = values[m];
            let mut steps = vec![call(x, if is_last { dy } else { y })];
            if !is_first {
                steps.insert(0, Step::Receive { from: stage - 1, buffer: x });
            }
            if !is_last {
                steps.push(Step::Send { to: stage + 1, buffer: y });
            }
            steps
        };
        let backward = |m: usize| {
            let [_, _, dy, dx] = values[m];
            let mut steps = vec![call(dy, dx)];
            if !is_last {
                steps.insert(0, Step::Receive { from: stage + 1, buffer: dy });
            }
            if !is_first {
                steps.push(Step::Send { to: stage - 1, buffer: dx });
            }
            steps
        };
        let warm_up = (stages - 1 - stage).min(count);
        let mut steps: Vec<Step> = (0..warm_up).flat_map(forward).collect();
        for m in 0..count {
            if m + warm_up < count {
                steps.extend(forward(m + warm_up));
            }
            steps.extend(backward(m));
        }
        let routines = vec![routine("double", 3, [launch])];
        let weight = ir::program::WeightShard {
            name: "two".into(),
            global: vec![1],
            ranges: vec![(0, 1)],
            experts: None,
            owned: stage == 0,
        };
        programs.push(finish(stage, 0, vec![weight], layout, routines, [steps, Vec::new()]));
    }
    let mesh = Mesh { pp: stages, dp: 2, tp: 1, ..Mesh::ONE };
    Classes { programs, kernels: vec![doubled(4)], mesh, ids: Ids::default() }
}

#[test]
fn stages_exchange_micro_batches_in_1f1b_order() {
    for (stages, count) in [(1, 1), (2, 1), (2, 4), (3, 2), (4, 6)] {
        let classes = Arc::new(pipeline(stages, count));
        let mut session = Session::start(Arc::clone(&classes), &options()).unwrap();
        let two = |_: &[std::ops::Range<usize>], _| Ok::<_, ()>(2_f32.to_le_bytes().to_vec());
        session.write_weight("two", Part::Weight, &mut { two }).unwrap();
        assert_eq!(session.read_weight("two", Part::Weight).unwrap().to_f64(), [2.0]);
        for rank in 0..2 {
            for m in 0..count {
                let x = [(rank * 10 + m) as f32; 4].map(f32::to_le_bytes).concat();
                session.write(rank, BufferId(1 + 4 * m as u32), &x);
            }
        }
        for _ in 0..3 {
            session.step(&Batch::default(), Scalars::default()).unwrap();
            for rank in 0..2 {
                for m in 0..count {
                    let factor = 2_f32.powi(2 * stages as i32);
                    let expected = [(rank * 10 + m) as f32 * factor; 4].map(f32::to_le_bytes);
                    assert_eq!(session.read(rank, BufferId(4 + 4 * m as u32)), expected.concat());
                }
            }
        }
    }
}

/// Two stages with two tensor ranks each; stage `s`, tensor `t` holds `[10 s + t]` in a buffer of
/// its own and runs the given instructions on slots `own`, `pair [2]`, `sum [1]`.
fn exchange(instructions: &[Instruction]) -> Session {
    let mut programs = Vec::new();
    for (stage, tensor) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        let mut layout = Layout { buffers: Vec::new(), end: 0 };
        let slots = [1, 2, 1].map(|n| layout.add(Contents::Activation, DType::F32, &[n]));
        let routines = vec![routine("exchange", 3, instructions.to_vec())];
        let steps = vec![Step::Call { routine: 0, slots: slots.to_vec(), frame: None }];
        programs.push(finish(stage, tensor, Vec::new(), layout, routines, [steps, Vec::new()]));
    }
    let mesh = Mesh { pp: 2, dp: 1, tp: 2, ..Mesh::ONE };
    let classes = Classes { programs, kernels: Vec::new(), mesh, ids: Ids::default() };
    let mut session = Session::start(Arc::new(classes), &options()).unwrap();
    for rank in 0..4 {
        let value = [0.0_f32, 1.0, 10.0, 11.0][rank];
        session.write(rank, BufferId(0), &value.to_le_bytes());
    }
    session.step(&Batch::default(), Scalars::default()).unwrap();
    session
}

#[test]
fn groups_are_the_ranks_along_axes_and_stages() {
    let collective = |exchange, group, elements, input, output| Instruction::Collective {
        exchange,
        group,
        dtype: DType::F32,
        exchanged: DType::F32,
        elements,
        input: Ref::Slot(input),
        output: Ref::Slot(output),
        gates: None,
    };
    let counts = vec![1, 1];
    let gather = Exchange::gather_of(counts.clone());
    let scatter = Exchange::scatter_of(counts);
    let floats = |session: &Session, rank: usize, buffer: u32| -> Vec<f32> {
        let bytes = session.read(rank, BufferId(buffer));
        bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect()
    };
    let session = exchange(&[
        collective(gather, Group::Axis(Axis::Tp), 1, 0, 1),
        all_reduce(Group::Stages(vec![0, 1]), 2, Ref::Slot(1)),
        collective(scatter, Group::Axis(Axis::Pp), 2, 1, 2),
        all_reduce(Group::World, 1, Ref::Slot(0)),
    ]);
    for rank in 0..4 {
        assert_eq!(floats(&session, rank, 0), [22.0]);
        assert_eq!(floats(&session, rank, 1), [10.0, 12.0]);
        assert_eq!(floats(&session, rank, 2), [[20.0], [24.0]][rank / 2]);
    }
}

#[test]
fn a_rank_that_panics_is_named_and_nothing_hangs() {
    let mut classes = tiny::classes(mesh(2, 2), 1, 2);
    let bad = classes.programs[1].routines[1].instructions.first_mut().unwrap();
    let Instruction::Launch { outputs, .. } = bad else { panic!() };
    outputs.pop();
    let mut session = Session::start(Arc::new(classes), &options()).unwrap();
    let tokens = vec![1; 4 * SEQ];
    let batch = Batch { tokens: &tokens, ..Batch::default() };
    session.evaluate(&batch).unwrap();
    for _ in 0..2 {
        let error = session.step(&batch, Scalars::default()).unwrap_err().to_string();
        let expected = "rank 1 failed: step 4 (call `forward`), instruction 0 (launch rows k";
        let same_class = expected.replace("rank 1", "rank 3");
        assert!(error.starts_with(expected) || error.starts_with(&same_class), "{error}");
        assert!(error.contains("panicked: a launch passes every output"), "{error}");
    }
}

#[test]
fn ids_without_a_row_are_refused_before_anything_runs() {
    let mut classes = tiny::classes(mesh(2, 1), 1, 2);
    classes.ids.tokens = vec![Known { columns: 0..usize::MAX, ids: 0..13 }];
    let mut session = Session::start(Arc::new(classes), &options()).unwrap();
    let mut tokens = vec![12; 4 * SEQ];
    let mut ran = |tokens: &[i32]| {
        let batch = Batch { tokens, ..Batch::default() };
        session.step(&batch, Scalars::default()).map(|report| report.loss_sum)
    };
    let loss = ran(&tokens).unwrap();
    tokens[SEQ + 3] = 13;
    let Err(Failure::Input(wrong)) = ran(&tokens) else { panic!("13 is no row of 13") };
    assert_eq!(wrong[0].headline, "token 13 at [1, 3] is not one of 0..12");
    // Nothing was wrong with the ranks.
    tokens[SEQ + 3] = 12;
    assert_eq!(ran(&tokens).unwrap(), loss);
}

#[test]
fn a_missing_message_ends_at_the_deadline() {
    let mut classes = pipeline(2, 2);
    let steps = &mut classes.programs[0].steps;
    let last = steps.iter().rposition(|step| matches!(step, Step::Send { .. })).unwrap();
    steps.remove(last);
    let options = Options { deadline: Duration::from_millis(100), ..options() };
    let mut session = Session::start(Arc::new(classes), &options).unwrap();
    let start = Instant::now();
    let error = session.step(&Batch::default(), Scalars::default()).unwrap_err().to_string();
    assert!(start.elapsed() < Duration::from_secs(10));
    assert!(error.contains("receive of 16 bytes from rank"), "{error}");
    assert!(error.contains("step "), "{error}");
}

#[test]
fn a_trace_names_what_was_timed() {
    let classes = Arc::new(tiny::classes(mesh(2, 1), 1, 2));
    for (tracing, spans) in [(Tracing::None, 0), (Tracing::Steps, 11), (Tracing::Instructions, 20)]
    {
        let options = Options { tracing, ..options() };
        let mut session = Session::start(Arc::clone(&classes), &options).unwrap();
        let tokens = vec![1; 4 * SEQ];
        for step in 1..3 {
            session.step(&Batch { tokens: &tokens, ..Batch::default() }, scalars(step)).unwrap();
            let trace = session.trace();
            assert_eq!(trace.ranks.iter().map(Vec::len).collect::<Vec<_>>(), [spans; 2]);
            let totals = trace.totals();
            assert_eq!(totals.contains_key("call `forward`"), spans > 0);
            assert_eq!(totals.contains_key("all-reduce sum over dp"), spans > 11);
        }
    }
}

#[test]
fn memory_that_is_not_there_is_an_error() {
    let mut classes = tiny::classes(mesh(1, 1), 1, 1);
    classes.programs[0].arena_bytes = u64::MAX / 4;
    let error = Session::start(Arc::new(classes), &options()).err().unwrap().to_string();
    assert_eq!(error, "rank 0 failed: can't reserve 4611686018427387903 bytes of memory");
}

#[test]
fn a_copy_between_buffers_of_other_sizes_uses_their_starts() {
    let loops = vec![CopyLoop { size: 2, source: 1, target: 2 }];
    let copy = Copy {
        loops,
        source_offset: Offset::ZERO,
        target_offset: 0,
        zero_first: 0,
        dtype: DType::F32,
    };
    let mut arena = Arena::new(256).unwrap();
    arena.bytes_mut(0..8).copy_from_slice(&[1_f32, 2.0].map(f32::to_le_bytes).concat());
    let mut cpu = kernels::cpu::Cpu::new(1);
    let mut copy = Prepared::new(&Kernel::Copy(copy), &[]);
    arena.launch(&mut cpu, &mut copy, [&[0..64], &[64..128]], None);
    assert_eq!(arena.bytes(64..76), [1_f32, 0.0, 2.0].map(f32::to_le_bytes).concat());
}
