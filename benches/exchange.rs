//! Collectives of four ranks in one, two and four processes of this machine.
//!
//! ```text
//! cargo bench --bench exchange
//! ```
//! Prints the median time of an all-reduce in f32, of an all-gather of as many bytes, and of a
//! message there and back. `benches/torch_exchange.py` times the same in `torch.distributed` over
//! gloo.

#![allow(clippy::print_stdout, reason = "the answer of a bench is what it prints")]

use std::env;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ir::DType;
use runtime::local::Local;
use runtime::processes::{Handler, Launch, TcpTransport, ranks_of};
use runtime::{Blocks, Combiner, Communicator, Group};

const RANKS: usize = 4;
/// Bytes of a tensor.
const SIZES: [usize; 4] = [1 << 10, 1 << 16, 1 << 20, 1 << 26];
const DEADLINE: Duration = Duration::from_secs(60);

/// Nobody to talk to.
struct Deaf;

impl Handler for Deaf {
    fn on_message(&self, _: usize, _: Vec<u8>) {}

    fn on_loss(&self, process: usize, why: &str) {
        panic!("process {process}: {why}");
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Times a call that all ranks make, after some that are not counted.
fn time(end: &Local, group: &Group, count: usize, mut call: impl FnMut()) -> f64 {
    let mut times = Vec::new();
    for round in 0..count + 2 {
        end.barrier(group).expect("the others are there");
        let start = Instant::now();
        call();
        if round > 1 {
            times.push(start.elapsed().as_secs_f64());
        }
    }
    median(times)
}

/// What one rank measures: by size, the time of an all-reduce, an all-gather and a message.
fn measure(end: &Local) -> Vec<[f64; 3]> {
    let group = Group::new(0, (0..RANKS).collect());
    let peer = (end.rank() + RANKS / 2) % RANKS;
    let of_size = |bytes: usize| {
        let count = if bytes > 1 << 20 { 9 } else { 200 };
        let mut buffer = vec![0; bytes];
        let piece = vec![1; bytes / RANKS];
        let reduce = time(end, &group, count, || {
            let sum = Combiner::Sum;
            end.all_reduce(&group, DType::F32.into(), sum, &mut buffer).expect("all are there");
        });
        let blocks = Blocks::flat(vec![bytes / RANKS / 4; RANKS]);
        let gather = time(end, &group, count, || {
            end.all_gather(&group, DType::F32, &blocks, &piece, &mut buffer).expect("all are");
        });
        let message = time(end, &group, count, || {
            if end.rank() < peer {
                end.send(peer, &buffer).expect("it is there");
                end.receive(peer, &mut buffer).expect("it is there");
            } else {
                end.receive(peer, &mut buffer).expect("it is there");
                end.send(peer, &buffer).expect("it is there");
            }
        });
        [reduce, gather, message]
    };
    SIZES.map(of_size).to_vec()
}

/// The part of one process: what its first rank measures.
fn part(launch: Option<Launch>) -> Vec<[f64; 3]> {
    let (process, count) = launch.as_ref().map_or((0, 1), |it| (it.process, it.count));
    let here = ranks_of(RANKS, count).swap_remove(process);
    let (ends, inbox) = Local::part(RANKS, here, DEADLINE);
    let transport = launch.map(|launch| {
        let peers = launch.connect(&|_| ()).expect("the others come");
        let handler: Arc<dyn Handler> = Arc::new(Deaf);
        TcpTransport::start(peers, RANKS, &inbox, &handler, DEADLINE).expect("threads start")
    });
    let measured = std::thread::scope(|scope| {
        let spawn = |end: Local| scope.spawn(move || measure(&end));
        let threads: Vec<_> = ends.into_iter().map(spawn).collect();
        let all = threads.into_iter().map(|thread| thread.join().expect("a rank ends"));
        all.collect::<Vec<_>>().swap_remove(0)
    });
    if let Some(transport) = transport {
        transport.close();
    }
    measured
}

fn main() {
    let launch = Launch::from_environment().expect("the environment makes sense");
    if let Some(launch) = launch {
        let is_first = launch.process == 0;
        let measured = part(Some(launch));
        if is_first {
            print(&measured);
        }
        return;
    }
    println!("in 1 process");
    print(&part(None));
    let own = env::current_exe().expect("this program has a path");
    for count in [2, 4] {
        println!("in {count} processes");
        let start = |process: usize| {
            let mut command = Command::new(&own);
            command.env("RANK", process.to_string()).env("WORLD_SIZE", count.to_string());
            command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", "29641");
            command.spawn().expect("this program starts")
        };
        let all: Vec<_> = (0..count).map(start).collect();
        for mut one in all {
            assert!(one.wait().expect("it ends").success());
        }
    }
}

fn print(measured: &[[f64; 3]]) {
    println!("     bytes  all-reduce  all-gather  message there and back");
    for (bytes, [reduce, gather, message]) in SIZES.iter().zip(measured) {
        let [reduce, gather, message] = [reduce, gather, message].map(|s| s * 1e6);
        println!("{bytes:>10} {reduce:>8.0} us {gather:>8.0} us {message:>8.0} us");
    }
}
