//! Why a rank stopped.

use crate::communicator::CommError;

/// Why a rank failed.
pub(super) struct Fault {
    /// Where and what, for people.
    pub(super) reason: String,
    /// The failed call; none for a panic.
    pub(super) error: Option<CommError>,
}
