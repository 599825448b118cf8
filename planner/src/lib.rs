//! Module × cluster → plan.
//!
//! # Diagnostics
//!
//! | code | what is wrong | exit code |
//! |---|---|--:|
//! | `E3101` | a layer that cannot be cut over `tp` as asked | 3 |
//! | `E3102` | a sequence with fewer tokens than tensor-parallel ranks | 3 |
//! | `E3103` | an entry that is not there | 2 |

pub mod link;
pub mod shard;
