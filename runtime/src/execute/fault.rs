//! Why a rank stopped.

use serde::{Deserialize, Serialize};

/// Why a rank failed.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Fault {
    /// Where and what, for people.
    pub(super) reason: String,
    /// Whether it failed by itself, rather than because another rank did.
    pub(super) is_cause: bool,
}
