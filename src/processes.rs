//! Runs of several processes, on one machine or on many: the first one leads, the others follow.

use std::env;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::available_parallelism;
use std::time::Duration;

use ir::{Diagnostic, Span, Target};
use runtime::execute::{self, Classes, Options, Prepared, Session};
use runtime::processes::{Bootstrap, Launch, Peers, ranks_of};
use runtime::signal::StopSignal;
use runtime::trace::Tracing;

use crate::failure::{Exit, Failure};
use crate::output;
use crate::{GPU_DEADLINE_MIN, check_memory, deadline, gpus};

/// Opens the port to which the other processes of a run come, which this one leads; none where it
/// was started by itself.
///
/// # Errors
/// Those of [`Launch::from_environment`] and [`Launch::open`].
pub fn open() -> Result<Option<Bootstrap>, Failure> {
    let Some(launch) = Launch::from_environment()? else { return Ok(None) };
    let (count, port) = (launch.count, launch.leader.1);
    output::note(&format!("ranks    in {count} processes, led by this one on port {port}"));
    Ok(Some(launch.open()?))
}

/// Waits for the other processes.
///
/// # Errors
/// Those of [`Bootstrap::connect`].
pub fn connect(bootstrap: Bootstrap) -> Result<Peers, Failure> {
    Ok(bootstrap.connect(&output::note)?)
}

/// Has ranks of a run that another process leads, until it ends; none where this process leads, or
/// was started by itself.
///
/// # Errors
/// The leading process is not found or lost; this machine lacks what the ranks need.
pub fn follow() -> Result<Option<Exit>, Failure> {
    let launch = Launch::from_environment()?.filter(|launch| launch.process > 0);
    let Some(launch) = launch else { return Ok(None) };
    let own = launch.clone();
    let peers = launch.connect(&output::note)?;
    // Launchers signal all processes; the first one ends the run.
    let _signals = StopSignal::watch(Duration::MAX)?;
    let code = execute::follow(peers, &|classes, target, (here, threads)| {
        prepare(&own, classes, target, (here, threads)).map_err(|failure| match failure {
            Failure::Input(wrong) => runtime::Failure::Input(wrong),
            Failure::World(error) => runtime::Failure::World(error),
        })
    })?;
    let mut exits = [Exit::Success, Exit::Interrupted, Exit::Killed].into_iter();
    Ok(exits.find(|exit| exit.code() == code).or_else(|| {
        output::note("error: the run has failed: the first process says why");
        Some(Exit::World)
    }))
}

/// Starts the ranks of a run of several processes, of which this one leads. Ranks have as many
/// threads as is said, or their share of the cores of their machine.
///
/// # Errors
/// There are more processes than ranks; a machine lacks what its ranks need; a process is lost.
pub fn lead(
    classes: Classes,
    target: Option<Target>,
    threads: Option<usize>,
    (step_s, disk): (Option<f64>, Option<PathBuf>),
    peers: Peers,
) -> Result<Session, Failure> {
    let (ranks, processes) = (classes.mesh.ranks(), peers.count());
    if ranks < processes {
        let has = if ranks == 1 { "1 rank".to_owned() } else { format!("{ranks} ranks") };
        let headline = format!("{processes} processes are started, and the plan has {has}");
        let wrong = Diagnostic::error("E5001", Span::of("processes"), headline);
        return Err(wrong.help("start fewer, or plan for more ranks").into());
    }
    let here = ranks_of(ranks, processes).swap_remove(0);
    let Prepared { threads_per_rank, gpus } =
        prepare(peers.launch(), &classes, target, (here, threads))?;
    let least = if gpus.is_some() { GPU_DEADLINE_MIN } else { Duration::ZERO };
    let (deadline, tracing) = (deadline(step_s).max(least), Tracing::None);
    let options = Options { threads_per_rank, deadline, tracing, disk };
    let on = (target, gpus.as_ref());
    Ok(Session::lead(Arc::new(classes), (&options, threads), on, peers)?)
}

/// Which GPUs a process sees.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// Opens what the ranks of this process compute on.
fn prepare(
    launch: &Launch,
    classes: &Classes,
    target: Option<Target>,
    (here, threads): (Range<usize>, Option<usize>),
) -> Result<Prepared, Failure> {
    let (number, beside) = launch.local;
    let cores = available_parallelism().map_or(1, usize::from);
    let own = || (cores / (beside * here.len())).max(1);
    let threads_per_rank = threads.unwrap_or_else(own);
    // Those of the processes of this machine that come before it.
    let ranks = ranks_of(classes.mesh.ranks(), launch.count);
    let mut first = here.start - ranks[launch.process.saturating_sub(number)].start;
    if env::var_os(VISIBLE).is_some() {
        // A launcher may show each process its own GPUs alone, which it counts from 0.
        let visible = runtime::cuda::gpus().map_or(0, |gpus| gpus.len());
        first = if visible < first + here.len() { 0 } else { first };
    }
    let gpus = gpus(target, (first..first + here.len(), classes.mesh.ranks()), &classes.kernels)?;
    if gpus.is_none() {
        check_memory(classes, here, threads_per_rank)?;
    }
    Ok(Prepared { threads_per_rank, gpus })
}
