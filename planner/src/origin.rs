//! Where a value comes from.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How a number is known.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// Measured on this machine.
    Measured,
    /// Between or beyond measured points, or fitted to runs elsewhere.
    Fitted,
    /// As the user says.
    Given,
    /// As the vendor says.
    Datasheet,
}

impl Origin {
    /// All of them.
    pub const ALL: [Origin; 4] =
        [Origin::Measured, Origin::Fitted, Origin::Given, Origin::Datasheet];

    /// How the numbers of a file are known that does not say it.
    pub(crate) fn of_source(source: &str) -> Origin {
        if source.starts_with("preset:") { Origin::Datasheet } else { Origin::Given }
    }

    /// The name in texts.
    pub fn name(self) -> &'static str {
        match self {
            Origin::Measured => "measured",
            Origin::Fitted => "fitted",
            Origin::Given => "given",
            Origin::Datasheet => "datasheet",
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
