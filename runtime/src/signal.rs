//! Being asked to stop.
//!
//! | signal | when it comes again |
//! |---|---|
//! | SIGTERM, SIGINT, SIGHUP, SIGUSR1 | within a second the same; later an end [`AT_ONCE`] |
//! | SIGXCPU, SIGXFSZ | the same request: the system repeats them |
//!
//! Signals that are ignored when the process starts, as SIGHUP under `nohup`, stay ignored.

use std::fmt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGXCPU, SIGXFSZ};
use signal_hook::iterator::Signals;
use signal_hook::low_level;

use crate::error::Error;

/// The signals that ask a run to stop, with their names.
const ASKING: [(i32, &str); 6] = [
    (SIGTERM, "SIGTERM"),
    (SIGINT, "SIGINT"),
    (SIGHUP, "SIGHUP"),
    (SIGUSR1, "SIGUSR1"),
    (SIGXCPU, "SIGXCPU"),
    (SIGXFSZ, "SIGXFSZ"),
];

/// Within this time a repeated signal is the same request: GNU `timeout` and terminals signal both
/// a process and its group.
const SAME: Duration = Duration::from_secs(1);

/// The exit code of a process that is asked twice.
pub const AT_ONCE: i32 = 130;

/// What is done when the grace is over.
type Then = Box<dyn FnOnce() + Send>;

/// Whether the process is asked to stop. The first signal is noted; [`StopSignal::after_grace`]
/// says what is done if the work has not ended some time later.
#[derive(Clone)]
pub struct StopSignal {
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    first: Option<(&'static str, Instant)>,
    is_grace_over: bool,
    then: Option<Then>,
}

impl fmt::Debug for StopSignal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("StopSignal").field(&self.name()).finish()
    }
}

impl StopSignal {
    /// Begins to watch, for the rest of the process.
    ///
    /// **Errors.** The system refuses the handlers or the thread that waits for them.
    pub fn watch(grace: Duration) -> Result<StopSignal, Error> {
        let ignored = ignored();
        let watched = ASKING.iter().map(|(number, _)| *number).filter(|n| !ignored.contains(n));
        let here = Path::new("this process");
        let mut signals = Signals::new(watched).map_err(Error::io("watch for signals in", here))?;
        let stop = StopSignal { state: Arc::default() };
        let watching = stop.clone();
        thread::Builder::new()
            .name("signals".to_owned())
            .spawn(move || signals.forever().for_each(|signal| watching.came(signal, grace)))
            .map_err(|source| Error::Threads { whom: "signals".to_owned(), source })?;
        Ok(stop)
    }

    /// The name of the signal that came first.
    pub fn name(&self) -> Option<&'static str> {
        self.lock().first.map(|(name, _)| name)
    }

    /// The same, of a signal that is on its way: the system tells who writes beyond a limit first.
    pub fn awaited_name(&self) -> Option<&'static str> {
        let start = Instant::now();
        while self.name().is_none() && start.elapsed() < SAME {
            thread::sleep(SAME / 100);
        }
        self.name()
    }

    /// Says what is done, once, when the grace is over; at once if it is.
    pub fn after_grace(&self, then: impl FnOnce() + Send + 'static) {
        let mut state = self.lock();
        if state.is_grace_over {
            drop(state);
            then();
        } else {
            state.then = Some(Box::new(then));
        }
    }

    fn came(&self, signal: i32, grace: Duration) {
        let name = ASKING.iter().find(|(number, _)| *number == signal).map(|(_, name)| *name);
        let Some(name) = name else { return };
        let mut state = self.lock();
        match state.first {
            None => {
                state.first = Some((name, Instant::now()));
                drop(state);
                self.begin_grace(grace);
            }
            Some((_, at)) if at.elapsed() <= SAME || signal == SIGXCPU || signal == SIGXFSZ => {}
            Some(_) => low_level::exit(AT_ONCE),
        }
    }

    fn begin_grace(&self, grace: Duration) {
        let stop = self.clone();
        let end = move || {
            thread::sleep(grace);
            let mut state = stop.lock();
            state.is_grace_over = true;
            let then = state.then.take();
            drop(state);
            if let Some(then) = then {
                then();
            }
        };
        // Without a thread a run stops after its step, however long that takes.
        let _ = thread::Builder::new().name("grace".to_owned()).spawn(end);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The signals that this process ignores, as its parent wished. None where the system does not say.
fn ignored() -> Vec<i32> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    (1..=64).filter(|signal| mask >> (signal - 1) & 1 == 1).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn the_first_signal_is_noted_and_its_repetition_is_the_same_request() {
        let stop = StopSignal::watch(Duration::from_millis(50)).unwrap();
        assert_eq!(stop.name(), None);
        let (sender, receiver) = mpsc::channel();
        stop.after_grace(move || sender.send(()).unwrap());
        low_level::raise(SIGUSR1).unwrap();
        low_level::raise(SIGTERM).unwrap();
        receiver.recv_timeout(Duration::from_secs(30)).unwrap();
        assert_eq!(stop.name(), Some("SIGUSR1"));
        // After the grace it is done at once.
        let (sender, receiver) = mpsc::channel();
        stop.after_grace(move || sender.send(()).unwrap());
        receiver.try_recv().unwrap();
    }
}
