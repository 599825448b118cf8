//! Collectives against a naive computation, and what happens when ranks disagree or fail.

use std::time::Duration;

use ir::DType;
use ir::formats::nearest;
use ir::random::mix;
use ir::sharding::PieceOrder;

use super::*;
use crate::scratch::Numbers;

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(500);

/// Runs one closure per rank, each on its own thread with its own end, and collects the results:
/// those where all ranks are in one process, where they are in two, and where each has its own.
fn ranks<T: Send>(size: usize, deadline: Duration, run: impl Fn(Local) -> T + Sync) -> Vec<Vec<T>> {
    let in_processes = |processes| {
        std::thread::scope(|scope| {
            let run = &run;
            let spawn = |end| scope.spawn(move || run(end));
            let ends = world_of(size, processes, deadline).into_iter();
            let threads: Vec<_> = ends.map(spawn).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    };
    let mut counts = vec![1, 2.min(size), size];
    counts.dedup();
    counts.into_iter().map(in_processes).collect()
}

/// The ends of a world in several processes, which here are parts of one.
fn world_of(size: usize, processes: usize, deadline: Duration) -> Vec<Local> {
    let here = |process| size * process / processes..size * (process + 1) / processes;
    let parts: Vec<_> = (0..processes).map(|at| Local::part(size, here(at), deadline)).collect();
    let (ends, inbox): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
    let ranges: Vec<_> = (0..processes).map(here).collect();
    for (process, part) in inbox.iter().enumerate() {
        let others = ranges.iter().cloned().zip(inbox.iter().cloned());
        let others = others.enumerate().filter(|(at, _)| *at != process).map(|(_, it)| it);
        part.connect(Arc::new(Short(others.collect())));
    }
    ends.into_iter().flatten().collect()
}

/// A wire that delivers at once.
struct Short(Vec<(Range<usize>, Inbox)>);

impl Transport for Short {
    fn send(&self, channel: Channel, from: usize, to: usize, parts: [&[u8]; 2]) {
        let (_, inbox) = self.0.iter().find(|(ranks, _)| ranks.contains(&to)).unwrap();
        assert!(inbox.takes(from, to));
        let mut message = inbox.buffer(channel, from, to);
        parts.iter().for_each(|part| message.extend_from_slice(part));
        inbox.deliver(channel, from, to, message);
    }

    fn broadcast_failure(&self, rank: usize, reason: &str) {
        self.0.iter().for_each(|(_, inbox)| inbox.note_failure(rank, reason));
    }

    fn broadcast_end(&self, rank: usize) {
        self.0.iter().for_each(|(_, inbox)| inbox.note_end(rank));
    }

    fn machine(&self, rank: usize) -> String {
        format!("the machine of rank {rank}")
    }
}

/// Random elements as bytes.
#[allow(clippy::wildcard_enum_match_arm)]
fn elements(state: &mut Numbers, dtype: DType, n: usize) -> Vec<u8> {
    let one = |state: &mut Numbers| match dtype {
        DType::F32 => (state.below(1 << 24) as f32 / 999.0 - 5000.0).to_le_bytes().to_vec(),
        DType::F64 => (state.below(1 << 40) as f64 / 999.0 - 5000.0).to_le_bytes().to_vec(),
        DType::I32 => (mix(state.below(1 << 40) as u64) as i32).to_le_bytes().to_vec(),
        DType::BF16 => half::bf16::from_f32(state.below(256) as f32).to_le_bytes().to_vec(),
        _ => panic!("no such test"),
    };
    (0..n).flat_map(|_| one(state)).collect()
}

/// Combines whole buffers in member order, one element at a time.
#[allow(clippy::wildcard_enum_match_arm)]
fn naive(dtype: DType, combiner: Combiner, buffers: &[&[u8]]) -> Vec<u8> {
    let size = dtype.size() as usize;
    let mut out = Vec::new();
    for at in (0..buffers[0].len()).step_by(size) {
        macro_rules! fold {
            ($type:ty, $add:expr) => {{
                let read = |b: &&[u8]| <$type>::from_le_bytes(b[at..at + size].try_into().unwrap());
                let merge = |a: $type, b: $type| match combiner {
                    Combiner::Sum => $add(a, b),
                    Combiner::Max => a.max(b),
                    Combiner::Min => a.min(b),
                };
                let result = buffers.iter().map(read).reduce(merge).unwrap();
                out.extend(result.to_le_bytes());
            }};
        }
        match dtype {
            DType::F32 => fold!(f32, |a, b| a + b),
            DType::F64 => fold!(f64, |a, b| a + b),
            DType::I32 => fold!(i32, i32::wrapping_add),
            _ => panic!("no such test"),
        }
    }
    out
}

/// The bytes of one member's piece of a whole tensor.
fn piece_of(whole: &[u8], blocks: &Blocks, member: usize, size: usize) -> Vec<u8> {
    let (total, own) = (blocks.counts.iter().sum::<usize>(), blocks.counts[member]);
    let before: usize = blocks.counts[..member].iter().sum();
    let half = own / 2;
    let ranges = match blocks.order {
        PieceOrder::Ascending => vec![before..before + own],
        PieceOrder::Zigzag => {
            let (first, last) = (member * half, total - (member + 1) * half);
            vec![first..first + half, last..last + half]
        }
    };
    let mut piece = Vec::new();
    for (o, range) in (0..blocks.outer).flat_map(|o| ranges.iter().map(move |range| (o, range))) {
        let at = |element: usize| (o * total + element) * blocks.inner * size;
        piece.extend(&whole[at(range.start)..at(range.end)]);
    }
    piece
}

#[test]
fn collectives_equal_the_naive_ones_bit_for_bit() {
    let mut state = Numbers::new();
    for case in 0..120 {
        let n = 1 + case % 8;
        let dtype = [DType::F32, DType::F64, DType::I32][state.below(3)];
        let combiner = [Combiner::Sum, Combiner::Max, Combiner::Min][state.below(3)];
        let size = dtype.size() as usize;
        let long = if case % 10 == 0 { 1500 } else { 5 };
        let order = PieceOrder::ALL[state.below(2)];
        let even = 2 * state.below(long);
        let count = |_| match order {
            PieceOrder::Ascending => state.below(long),
            PieceOrder::Zigzag => even,
        };
        let counts = (0..n).map(count).collect();
        let blocks = Blocks { outer: 1 + state.below(3), inner: 1 + state.below(3), counts, order };
        let mut members: Vec<usize> = (0..n).collect();
        members.rotate_left(state.below(n));
        let group = Group::new(7, members);
        let wholes: Vec<Vec<u8>> =
            (0..n).map(|_| elements(&mut state, dtype, blocks.total())).collect();
        let all: Vec<&[u8]> = wholes.iter().map(Vec::as_slice).collect();
        let reduced = naive(dtype, combiner, &all);
        ranks(n, LONG, |end| {
            let me = group.position(end.rank()).unwrap();
            for _ in 0..3 {
                let mut buffer = wholes[me].clone();
                end.all_reduce(&group, dtype.into(), combiner, &mut buffer).unwrap();
                assert_eq!(buffer, reduced, "all_reduce, case {case}");

                let mut piece = vec![0; blocks.piece(me) * size];
                let types = dtype.into();
                end.reduce_scatter(&group, types, combiner, &blocks, &wholes[me], &mut piece)
                    .unwrap();
                assert_eq!(piece, piece_of(&reduced, &blocks, me, size), "scatter, case {case}");

                let mut whole = vec![0; reduced.len()];
                end.all_gather(&group, dtype, &blocks, &piece, &mut whole).unwrap();
                assert_eq!(whole, reduced, "all_gather, case {case}");
                end.barrier(&group).unwrap();
            }
        });
    }
}

/// Each term is rounded to the type between ranks, and so is their sum, which is taken in f32.
#[test]
fn sums_of_f32_are_exchanged_as_narrower_numbers() {
    let group = Group::new(3, vec![2, 0, 1]);
    for exchanged in [DType::BF16, DType::F16] {
        let mut state = Numbers::new();
        let mut draw = || state.below(1 << 20) as f32 / 4096.0 - 128.0;
        let terms: Vec<Vec<f32>> = (0..3).map(|_| (0..2000).map(|_| draw()).collect()).collect();
        let round = |x: f32| nearest(exchanged, f64::from(x)) as f32;
        let sum =
            |at: usize| round(round(terms[2][at]) + round(terms[0][at]) + round(terms[1][at]));
        let expected: Vec<u8> = (0..2000).flat_map(|at| sum(at).to_le_bytes()).collect();
        ranks(3, LONG, |end| {
            let of_rank = &terms[end.rank()];
            let mut buffer: Vec<u8> = of_rank.iter().flat_map(|x| x.to_le_bytes()).collect();
            let types = Types { dtype: DType::F32, exchanged };
            end.all_reduce(&group, types, Combiner::Sum, &mut buffer).unwrap();
            assert_eq!(buffer, expected, "{exchanged}");
            assert_eq!(end.counters().all_reduce_bytes, 2 * 2 * (2000 * 2) / 3);
        });
    }
}

#[test]
fn narrow_floats_accumulate_in_f32() {
    let group = Group::new(0, (0..4).collect());
    // 256 + 1 is not a bf16: added one by one in bf16 the ones would vanish.
    let values = [256.0_f32, 1.0, 1.0, 2.0];
    for sums in ranks(4, LONG, |end| {
        let mut bytes = half::bf16::from_f32(values[end.rank()]).to_le_bytes();
        end.all_reduce(&group, DType::BF16.into(), Combiner::Sum, &mut bytes).unwrap();
        half::bf16::from_le_bytes(bytes).to_f32()
    }) {
        assert_eq!(sums, [260.0; 4]);
    }
}

#[test]
fn a_maximum_with_nan_is_nan() {
    let group = Group::new(0, vec![0, 1]);
    for nan_at in 0..2 {
        for results in ranks(2, LONG, |end| {
            let value = if end.rank() == nan_at { f32::NAN } else { 3.0 };
            let mut bytes = value.to_le_bytes();
            end.all_reduce(&group, DType::F32.into(), Combiner::Max, &mut bytes).unwrap();
            f32::from_le_bytes(bytes)
        }) {
            assert!(results.iter().all(|r| r.is_nan()));
        }
    }
}

#[test]
fn disjoint_groups_share_an_id_and_overlapping_groups_interleave() {
    for sums in ranks(8, LONG, |end| {
        let r = end.rank();
        let row = Group::new(0, (0..4).map(|i| r / 4 * 4 + i).collect());
        let column = Group::new(1, vec![r % 4, r % 4 + 4]);
        let mut value = (r as i32).to_le_bytes();
        for _ in 0..50 {
            end.all_reduce(&row, DType::I32.into(), Combiner::Max, &mut value).unwrap();
            end.all_reduce(&column, DType::I32.into(), Combiner::Sum, &mut value).unwrap();
            value = (i32::from_le_bytes(value) % 97 + r as i32).to_le_bytes();
        }
        i32::from_le_bytes(value) - r as i32
    }) {
        assert!(sums.iter().all(|&s| s == sums[0]), "{sums:?}");
    }
}

#[test]
fn bytes_are_counted_by_the_usual_formulas() {
    let group = Group::new(0, (0..4).collect());
    for counters in ranks(4, LONG, |end| {
        let mut buffer = [0; 4 * 100];
        end.all_reduce(&group, DType::F32.into(), Combiner::Sum, &mut buffer).unwrap();
        let blocks = Blocks::flat(vec![25; 4]);
        let mut piece = [0; 4 * 25];
        let types = DType::F32.into();
        end.reduce_scatter(&group, types, Combiner::Sum, &blocks, &buffer, &mut piece).unwrap();
        end.all_gather(&group, DType::F32, &blocks, &piece, &mut buffer).unwrap();
        let mut received = [0; 4 * 100];
        end.all_to_all(&group, DType::F32, &buffer, &mut received).unwrap();
        end.send((end.rank() + 1) % 4, &[1; 10]).unwrap();
        end.receive((end.rank() + 3) % 4, &mut [0; 10]).unwrap();
        end.counters()
    }) {
        let expected = Counters {
            all_reduce_bytes: 600,
            all_gather_bytes: 300,
            reduce_scatter_bytes: 300,
            all_to_all_bytes: 300,
            routed_bytes: 0,
            send_bytes: 10,
            calls: 6,
        };
        assert_eq!(counters, [expected; 4]);
    }
}

#[test]
fn members_swap_pieces() {
    let members = [3, 0, 2];
    let group = Group::new(0, members.to_vec());
    for received in ranks(4, LONG, |end| {
        let send: Vec<u8> = (0..3).flat_map(|to| [10 * end.rank() as u8 + to; 2]).collect();
        let mut receive = vec![0; 6];
        if group.position(end.rank()).is_some() {
            end.all_to_all(&group, DType::I8, &send, &mut receive).unwrap();
        }
        receive
    }) {
        for (at, rank) in members.into_iter().enumerate() {
            let expected: Vec<u8> = members.iter().flat_map(|m| [(10 * m + at) as u8; 2]).collect();
            assert_eq!(received[rank], expected, "rank {rank}");
        }
        assert_eq!(received[1], [0; 6], "who is no member gets nothing");
    }
}

/// Tokens come to the ranks that have an expert of theirs, and no others do; of terms the same are
/// summed, in the order of members, and others, which are no numbers here, are not read.
#[test]
fn tokens_go_where_their_gates_lead() {
    let mut draws = Numbers::new();
    for case in 0..20 {
        let [members, rows, width, experts] = [4, 9, 7, 3].map(|most| 1 + draws.below(most));
        let all = members * rows;
        let gates: Vec<f32> = (0..all * members * experts)
            .map(|_| match draws.below(3 * experts) {
                0 => draws.below(100) as f32 - 50.0,
                other if other % 2 == 0 => 0.0,
                _ => -0.0,
            })
            .collect();
        let visits = |token: usize, member: usize| {
            let first = (token * members + member) * experts;
            gates[first..first + experts].iter().any(|gate| *gate != 0.0)
        };
        let bytes = |numbers: &mut dyn Iterator<Item = f32>| -> Vec<u8> {
            numbers.flat_map(f32::to_le_bytes).collect()
        };
        let number = |token: usize, at: usize| (token * width + at) as f32;
        let group = Group::new(0, (0..members).collect());
        for found in ranks(members, LONG, |end| {
            let me = end.rank();
            let expert = (0..all).flat_map(|token| {
                let first = (token * members + me) * experts;
                first..first + experts
            });
            let theirs = bytes(&mut expert.map(|at| gates[at]));
            let own = me * rows * members * experts..(me + 1) * rows * members * experts;
            let own = bytes(&mut gates[own].iter().copied());
            let tokens = |gates| Tokens { rows, width, experts, gates };
            let x = (0..rows * width).map(|at| number(me * rows + at / width, at % width));
            let mut brought = bytes(&mut (0..all * width).map(|_| f32::NAN));
            let send = bytes(&mut x.into_iter());
            end.dispatch(&group, DType::F32, &tokens(&theirs), &send, &mut brought).unwrap();
            let terms = brought.clone();
            let mut summed = vec![1; rows * width * 4];
            end.combine(&group, DType::F32, &tokens(&own), &terms, &mut summed).unwrap();
            (brought, summed, end.counters().routed_bytes)
        }) {
            let mut moved = 0;
            for (me, (brought, summed, _)) in found.iter().enumerate() {
                let value = |token: usize, at: usize| match visits(token, me) {
                    true => number(token, at),
                    false => f32::NAN,
                };
                let wanted = (0..all * width).map(|at| value(at / width, at % width));
                assert_eq!(*brought, bytes(&mut wanted.into_iter()), "case {case}: rank {me}");
                let visitors = |token: usize| (0..members).filter(|m| visits(token, *m)).count();
                let sum = |at: usize| {
                    let token = me * rows + at / width;
                    visitors(token) as f32 * number(token, at % width)
                };
                let wanted = bytes(&mut (0..rows * width).map(sum));
                assert_eq!(*summed, wanted, "case {case}: sums of rank {me}");
                let others = (0..members).filter(|other| *other != me);
                let from = |other: usize| (0..rows).filter(move |at| visits(other * rows + at, me));
                moved += 2 * others.flat_map(from).count() * width * 4;
            }
            let counted: u64 = found.iter().map(|(_, _, bytes)| bytes).sum();
            assert_eq!(counted, moved as u64, "case {case}");
        }
    }
}

#[test]
fn messages_keep_their_order_and_sends_never_wait() {
    let n = 4;
    ranks(n, LONG, |end| {
        let (next, last) = ((end.rank() + 1) % n, (end.rank() + n - 1) % n);
        // Everyone sends everything first: a send that waited would deadlock here.
        for i in 0..100_u32 {
            end.send(next, &i.to_le_bytes()).unwrap();
            end.send(last, &vec![i as u8; i as usize]).unwrap();
        }
        for i in 0..100_u32 {
            let mut number = [0; 4];
            end.receive(last, &mut number).unwrap();
            assert_eq!(u32::from_le_bytes(number), i);
            let mut bytes = vec![0; i as usize];
            end.receive(next, &mut bytes).unwrap();
            assert_eq!(bytes, vec![i as u8; i as usize]);
        }
        // Ping-pong.
        for i in 0..100_u8 {
            let mut byte = [0];
            if end.rank() % 2 == 0 {
                end.send(next, &[i]).unwrap();
                end.receive(next, &mut byte).unwrap();
            } else {
                end.receive(last, &mut byte).unwrap();
                end.send(last, &byte).unwrap();
            }
            assert_eq!(byte, [i]);
        }
    });
}

#[test]
fn different_calls_are_an_error_that_names_both() {
    type Case = (&'static str, fn(&Local, usize) -> Result<(), CommError>);
    fn reduce(
        end: &Local,
        members: Vec<usize>,
        dtype: DType,
        bytes: usize,
    ) -> Result<(), CommError> {
        let group = Group::new(3, members);
        end.all_reduce(&group, dtype.into(), Combiner::Sum, &mut vec![0; bytes])
    }
    let cases: [Case; 5] = [
        ("all_reduce sum f32[1, 8, 1] of group 3", |end, odd| {
            reduce(end, vec![0, 1], DType::F32, 32 + 4 * odd)
        }),
        ("all_reduce sum i32[1, 8, 1] of group 3", |end, odd| {
            reduce(end, vec![0, 1], [DType::F32, DType::I32][odd], 32)
        }),
        ("with its members in another order", |end, odd| {
            reduce(end, vec![odd, 1 - odd], DType::F32, 32)
        }),
        ("barrier of group 3", |end, odd| match odd {
            0 => reduce(end, vec![0, 1], DType::F32, 32),
            _ => end.barrier(&Group::new(3, vec![0, 1])),
        }),
        ("cut into other pieces", |end, odd| {
            let blocks = Blocks::flat(vec![4 - odd, 4 + odd]);
            let send = vec![0; 4 * blocks.counts[end.rank()]];
            let group = Group::new(3, vec![0, 1]);
            end.all_gather(&group, DType::F32, &blocks, &send, &mut [0; 32])
        }),
    ];
    for (expected, case) in cases {
        for errors in ranks(2, LONG, |end| case(&end, end.rank()).unwrap_err().to_string()) {
            for error in errors {
                assert!(error.contains(expected), "{error}");
                assert!(error.contains("rank 0") && error.contains("rank 1"), "{error}");
            }
        }
    }
}

#[test]
fn a_message_of_another_length_is_an_error() {
    for errors in ranks(2, LONG, |end| match end.rank() {
        0 => end.send(1, &[0; 8]).and_then(|()| end.receive(1, &mut [0; 1])),
        _ => end.receive(0, &mut [0; 4]),
    }) {
        let expected = "rank 0 called send of 8 bytes to rank 1, \
                    but rank 1 called receive of 4 bytes from rank 0";
        assert_eq!(errors[1].as_ref().unwrap_err().to_string(), expected);
        assert!(matches!(errors[0], Err(CommError::Peer { rank: 1, .. })));
    }
}

#[test]
fn a_missing_rank_is_named_when_the_deadline_passes() {
    let group = Group::new(0, vec![0, 1, 2]);
    for errors in ranks(3, SHORT, |mut end| match end.rank() {
        2 => {
            end.set_deadline(LONG);
            end.receive(0, &mut [0; 4]).unwrap_err().to_string()
        }
        _ => end.barrier(&group).unwrap_err().to_string(),
    }) {
        let named = ["in receive of 4 bytes from rank 0", "on the machine of rank 2"]
            .map(|what| format!("rank 2, which is {what}"));
        assert!(errors.iter().all(|e| named.iter().any(|named| e.contains(named))), "{errors:#?}");
        assert!(
            errors[2].starts_with("rank 0 failed: ") || errors[2].starts_with("rank 1 failed: ")
        );
    }
}

#[test]
fn a_missing_message_is_named_when_the_deadline_passes() {
    for errors in ranks(2, SHORT, |end| end.receive(1 - end.rank(), &mut [0; 4]).unwrap_err()) {
        assert!(errors.iter().any(|e| matches!(e, CommError::Deadline { .. })), "{errors:?}");
    }
}

#[test]
fn a_panic_frees_the_others() {
    let group = Group::new(0, vec![0, 1, 2]);
    let ends = Local::world(3, LONG);
    std::thread::scope(|scope| {
        let group = &group;
        let spawn = |end: Local| {
            scope.spawn(move || {
                end.barrier(group).unwrap();
                assert!(end.rank() != 1, "on purpose");
                match end.rank() {
                    0 => end.barrier(group).unwrap_err(),
                    _ => end.receive(0, &mut [0; 4]).unwrap_err(),
                }
            })
        };
        let threads: Vec<_> = ends.into_iter().map(spawn).collect();
        let results: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        let failed = CommError::Peer { rank: 1, reason: "it panicked".to_owned() };
        assert_eq!(results[0].as_ref().unwrap(), &failed);
        assert!(results[1].is_err());
        assert_eq!(results[2].as_ref().unwrap(), &failed);
    });
}

#[test]
fn an_abort_frees_the_others_now_and_later() {
    let group = Group::new(0, vec![0, 1]);
    for errors in ranks(2, LONG, |end| match end.rank() {
        0 => {
            end.abort("disk full");
            None
        }
        _ => {
            end.barrier(&group).unwrap_err();
            Some(end.send(0, &[1]).unwrap_err().to_string())
        }
    }) {
        assert_eq!(errors[1].as_deref(), Some("rank 0 failed: disk full"));
    }
}

#[test]
fn a_rank_that_has_ended_is_not_waited_for() {
    let group = Group::new(0, vec![0, 1]);
    for errors in ranks(2, LONG, |end| (end.rank() == 1).then(|| end.barrier(&group).unwrap_err()))
    {
        assert!(matches!(errors[1], Some(CommError::Left { rank: 1, left: 0, .. })), "{errors:?}");
    }
}

#[test]
fn a_reduction_of_8_bit_floats_is_refused() {
    let group = Group::new(0, vec![0]);
    for errors in ranks(1, LONG, |end| {
        end.all_reduce(&group, DType::F8E4M3.into(), Combiner::Sum, &mut [0; 4]).unwrap_err()
    }) {
        assert!(matches!(errors[0], CommError::Unsupported { rank: 0, .. }));
    }
}
