//! How the runtime fails: by wrong input, or by the outside world.

use std::path::{Path, PathBuf};
use std::{fmt, io};

use ir::Diagnostic;
use kernels::Bytes;
use thiserror::Error;

use crate::communicator::CommError;

/// The outside world failed: a disk, a file system, another rank.
#[derive(Debug, Error)]
pub enum Error {
    /// A call on a file or directory failed.
    #[error("can't {call} `{}`: {source}", path.display())]
    Io {
        /// What was tried: `open`, `write`, `rename`, …
        call: &'static str,
        /// On what.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A checkpoint could not be written; the previous one was not touched.
    #[error("can't write the checkpoint of step {step}: {cause}; {}", kept(*previous))]
    Checkpoint {
        /// The step whose checkpoint failed.
        step: u64,
        /// The directory of the checkpoints.
        root: PathBuf,
        /// The newest complete checkpoint.
        previous: Option<u64>,
        /// Why.
        cause: Box<Error>,
    },
    /// The system refuses to start a thread.
    #[error("the system starts no thread for {whom}: {source}")]
    Threads {
        /// Whom it is for: a rank, the data.
        whom: String,
        /// What the system said.
        source: io::Error,
    },
    /// A disk has too little room for what will be written.
    #[error("the disk of `{}` has {have} left, and {need} are needed for {what}", path.display())]
    Room {
        /// Where it would be written.
        path: PathBuf,
        /// What, in words.
        what: String,
        /// Bytes that it needs.
        need: Bytes,
        /// Bytes that are left.
        have: Bytes,
    },
    /// Another process writes to the directory of a run.
    #[error("`{}` is being written to{}", folder.display(), by(holder))]
    Locked {
        /// The directory.
        folder: PathBuf,
        /// Who writes: process, host, since when; empty where that is not known.
        holder: String,
    },
    /// A call between ranks failed.
    #[error(transparent)]
    Communication(#[from] CommError),
    /// A GPU, its driver or its compiler is not there, or does not do what it is asked for.
    #[error("{reason}")]
    Gpu {
        /// What is lacking or failed.
        reason: String,
        /// What to do about it.
        help: String,
    },
    /// The processes of a run do not find each other, or one is lost.
    #[error("{reason}")]
    Processes {
        /// What is wrong.
        reason: String,
        /// What to do about it.
        help: String,
    },
    /// A step was given up on request, before any rank began its update.
    #[error("the step was abandoned")]
    Abandoned,
}

fn kept(previous: Option<u64>) -> String {
    match previous {
        Some(step) => format!("the checkpoint of step {step} is intact"),
        None => "there is no earlier checkpoint".to_owned(),
    }
}

fn by(holder: &str) -> String {
    if holder.is_empty() { String::new() } else { format!(" by {holder}") }
}

impl Error {
    /// For `map_err`: keeps the call and the path of an I/O error.
    pub fn io(call: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
        move |source| Error::Io { call, path: path.to_owned(), source }
    }

    /// The limit of the system or the process that is reached, where the error tells.
    pub fn limit(&self) -> Option<&'static str> {
        match self {
            Error::Threads { .. } => Some(
                "threads and processes (`ulimit -u`, and `pids.max` of the control group) or \
                 address space (`ulimit -v`)",
            ),
            Error::Io { source, .. } => match source.raw_os_error() {
                Some(libc::EMFILE) => Some("files that are open at once (`ulimit -n`)"),
                Some(libc::ENFILE) => Some("files that are open on this machine"),
                Some(libc::ENOMEM) => Some("address space (`ulimit -v`)"),
                Some(libc::EFBIG) => Some("the size of a file (`ulimit -f`)"),
                _ => None,
            },
            Error::Checkpoint { cause, .. } => cause.limit(),
            Error::Room { .. }
            | Error::Locked { .. }
            | Error::Communication(_)
            | Error::Gpu { .. }
            | Error::Processes { .. }
            | Error::Abandoned => None,
        }
    }

    /// Whether a file may grow no more, by a limit of the process or the file system.
    pub fn is_file_too_large(&self) -> bool {
        match self {
            Error::Io { source, .. } => source.kind() == io::ErrorKind::FileTooLarge,
            Error::Checkpoint { cause, .. } => cause.is_file_too_large(),
            Error::Threads { .. }
            | Error::Room { .. }
            | Error::Locked { .. }
            | Error::Communication(_)
            | Error::Gpu { .. }
            | Error::Processes { .. }
            | Error::Abandoned => false,
        }
    }

    /// Whether the disk, or the user's share of it, is full, or a file may grow no more.
    pub fn is_disk_full(&self) -> bool {
        match self {
            Error::Io { source, .. } => matches!(
                source.kind(),
                io::ErrorKind::StorageFull
                    | io::ErrorKind::QuotaExceeded
                    | io::ErrorKind::FileTooLarge
            ),
            Error::Checkpoint { cause, .. } => cause.is_disk_full(),
            Error::Room { .. } => true,
            Error::Threads { .. }
            | Error::Locked { .. }
            | Error::Communication(_)
            | Error::Gpu { .. }
            | Error::Processes { .. }
            | Error::Abandoned => false,
        }
    }
}

/// What a step that reads the user's files can end with.
#[derive(Debug)]
pub enum Failure {
    /// The input is wrong: at least one diagnostic.
    Input(Vec<Diagnostic>),
    /// The input may be right, and could not be read.
    World(Error),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Input(wrong) => {
                let headlines: Vec<&str> = wrong.iter().map(|d| d.headline.as_str()).collect();
                f.write_str(&headlines.join("; "))
            }
            Failure::World(error) => error.fmt(f),
        }
    }
}

impl From<Diagnostic> for Failure {
    fn from(diagnostic: Diagnostic) -> Failure {
        Failure::Input(vec![diagnostic])
    }
}

impl From<Vec<Diagnostic>> for Failure {
    fn from(diagnostics: Vec<Diagnostic>) -> Failure {
        Failure::Input(diagnostics)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::World(error)
    }
}
