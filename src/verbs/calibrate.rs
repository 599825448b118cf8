//! `calibrate -o FILE`: the rates of this machine, for predictions.

use std::sync::{Barrier, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use ir::DType;
use planner::calibrate::{Links, Sizes, calibrate};
use planner::calibration::Calibration;
use planner::link::Link;
use planner::machine::Machine;
use runtime::local::Local;
use runtime::{Combiner, CommError, Communicator, Group};

use crate::argument::{PathArg, amount};
use crate::failure::{Exit, Failure};
use crate::output;

/// Flags of `calibrate`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The file to write; without it, the measurements are printed
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathArg>,
    /// Seconds that measuring takes, about
    #[arg(long, value_name = "SECONDS", default_value = "7", value_parser = amount)]
    pub budget: f64,
}

/// Bytes of the small and the large message. Chosen: latency rules one, bandwidth the other.
const SIZES: [usize; 2] = [4 << 10, 4 << 20];
/// The share of the budget for links; four measurements take a quarter of it each.
const LINK_SHARE: f64 = 0.25;
/// How long a rank waits before measuring fails.
const DEADLINE: Duration = Duration::from_secs(60);

/// Measures.
pub fn run(args: &Args) -> Result<Exit, Failure> {
    let cores = Machine::detect().cores;
    let budget = args.budget.min(600.0);
    output::note(&format!("measuring {cores} cores for about {budget:.0} s"));
    let text = measured(&Sizes::ALL, budget)?.to_string();
    match &args.output {
        None => output::answer(&text),
        Some(path) => {
            let path = path.path();
            std::fs::write(path, &text).map_err(runtime::Error::io("write", path))?;
            let shown = path.display();
            output::note(&format!("wrote {shown}: use it with --calibration {shown}"));
        }
    }
    Ok(Exit::Success)
}

/// The rates of this machine, measured in about `budget` seconds.
pub fn measured(sizes: &Sizes, budget: f64) -> Result<Calibration, Failure> {
    let machine = Machine::detect();
    let share = Duration::from_secs_f64(budget * LINK_SHARE / 4.0);
    let members = machine.cores.max(2);
    check_threads(members)?;
    let collective = |bytes| seconds_of_all_reduce(members, bytes, share);
    // `Link::all_reduce` is `α log2 n + 2 V β (n-1)/n`.
    let n = members as f64;
    let (hops, volume) = (n.log2().ceil(), 2.0 * (n - 1.0) / n);
    let links = Links {
        collective: Some(link(
            sizes,
            [collective(SIZES[0])?, collective(SIZES[1])?],
            [hops, volume],
        )),
        send: Some(link(
            sizes,
            [seconds_of_send(SIZES[0], share)?, seconds_of_send(SIZES[1], share)?],
            [1.0, 1.0],
        )),
    };
    let rest = Duration::from_secs_f64(budget * (1.0 - LINK_SHARE));
    Ok(calibrate(&machine, links, (sizes, rest)))
}

/// Checks that the system starts `count` threads at once: threads that measure wait for each other.
fn check_threads(count: usize) -> Result<(), runtime::Error> {
    let end = OnceLock::new();
    thread::scope(|scope| {
        let wait = || *end.wait();
        let all = (0..count).try_for_each(|_| {
            let spawned = thread::Builder::new().spawn_scoped(scope, wait);
            spawned.map(drop)
        });
        let _ = end.set(());
        all.map_err(|source| runtime::Error::Threads { whom: "measuring".to_owned(), source })
    })
}

/// Latency and bandwidth from the times of both sizes: `hops α + volume V β`.
fn link(sizes: &Sizes, seconds: [f64; 2], [hops, volume]: [f64; 2]) -> Link {
    let bytes = (SIZES[1] - SIZES[0]) as f64 * volume;
    let bandwidth = bytes / (seconds[1] - seconds[0]).max(1e-9);
    let latency = (seconds[0] - SIZES[0] as f64 * volume / bandwidth).max(1e-8) / hops;
    Link { latency_s: sizes.rounded(latency), bandwidth_bytes_per_s: sizes.rounded(bandwidth) }
}

fn seconds_of_all_reduce(members: usize, bytes: usize, share: Duration) -> Result<f64, Failure> {
    let work = |local: &Local, group: &Group, data: &mut [u8]| {
        local.all_reduce(group, DType::F32.into(), Combiner::Sum, data)
    };
    measure(members, bytes, share, &work)
}

/// A message there and back, halved.
fn seconds_of_send(bytes: usize, share: Duration) -> Result<f64, Failure> {
    let work = |local: &Local, _: &Group, data: &mut [u8]| match local.rank() {
        0 => local.send(1, data).and_then(|()| local.receive(1, data)),
        _ => local.receive(0, data).and_then(|()| local.send(0, data)),
    };
    Ok(measure(2, bytes, share, &work)? / 2.0)
}

type Work<'a> = dyn Fn(&Local, &Group, &mut [u8]) -> Result<(), CommError> + Sync + 'a;

/// The median time of one piece of work that all ranks do together.
fn measure(size: usize, bytes: usize, share: Duration, work: &Work<'_>) -> Result<f64, Failure> {
    let barrier = Barrier::new(size);
    let group = &Group::new(0, (0..size).collect());
    let once = |local: &Local, repeats: usize| -> Result<Vec<f64>, CommError> {
        let mut data = vec![0u8; bytes];
        barrier.wait();
        (0..repeats)
            .map(|_| {
                let start = Instant::now();
                work(local, group, &mut data)?;
                Ok(start.elapsed().as_secs_f64())
            })
            .collect()
    };
    let world = |repeats: usize| -> Result<f64, Failure> {
        let locals = Local::world(size, DEADLINE);
        let times: Vec<Result<Vec<f64>, CommError>> = thread::scope(|scope| {
            let once = &once;
            let threads: Vec<_> = locals
                .into_iter()
                .map(|local| scope.spawn(move || once(&local, repeats)))
                .collect();
            let join = |thread: thread::ScopedJoinHandle<'_, _>| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            threads.into_iter().map(join).collect()
        });
        let mut first = Vec::new();
        for of_rank in times {
            let of_rank = of_rank.map_err(runtime::Error::from)?;
            if first.is_empty() {
                first = of_rank;
            }
        }
        first.sort_by(f64::total_cmp);
        Ok(first[first.len() / 2])
    };
    let estimate = world(5)?.max(1e-7);
    let repeats = (share.as_secs_f64() / estimate).clamp(5.0, 20_000.0);
    world(repeats as usize)
}
