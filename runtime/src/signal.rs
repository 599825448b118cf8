//! Being asked to stop.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use crate::error::Error;

/// Whether SIGINT or SIGTERM has come. The first one is noted; a second one has its usual effect,
/// which is the end of the process.
#[derive(Clone, Debug)]
pub struct StopSignal {
    number: Arc<AtomicUsize>,
}

impl StopSignal {
    /// Begins to watch, for the rest of the process.
    pub fn watch() -> Result<StopSignal, Error> {
        let came = Arc::new(AtomicBool::new(false));
        let number = Arc::new(AtomicUsize::new(0));
        for signal in [SIGINT, SIGTERM] {
            // Actions run in this order: the first signal finds `came` false, and sets it.
            flag::register_conditional_default(signal, Arc::clone(&came))
                .and_then(|_| flag::register(signal, Arc::clone(&came)))
                .and_then(|_| {
                    let value = usize::try_from(signal).expect("signals are positive");
                    flag::register_usize(signal, Arc::clone(&number), value)
                })
                .map_err(Error::io("watch for signals in", Path::new("this process")))?;
        }
        Ok(StopSignal { number })
    }

    /// The name of the signal that has come.
    pub fn name(&self) -> Option<&'static str> {
        match i32::try_from(self.number.load(Ordering::Relaxed)) {
            Ok(SIGINT) => Some("SIGINT"),
            Ok(SIGTERM) => Some("SIGTERM"),
            Ok(_) | Err(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_signal_is_noted() {
        let stop = StopSignal::watch().unwrap();
        assert_eq!(stop.name(), None);
        signal_hook::low_level::raise(SIGTERM).unwrap();
        assert_eq!(stop.name(), Some("SIGTERM"));
    }
}
