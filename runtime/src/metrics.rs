//! What a run reports for later: lines of JSON, TensorBoard events, a picture of the loss.

mod events;
mod lines;
mod plot;

pub use events::Events;
pub use lines::{Lines, series};
pub use plot::{Plot, Point};
