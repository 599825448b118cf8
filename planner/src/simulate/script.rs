//! What a class of ranks does in a step, with prices in place of instructions.

use std::rc::Rc;

use ir::plan::Place;
use ir::program::{BufferId, Group, Instruction, Program, Routine, Step};

use crate::price::{LaunchPrice, Prices};

/// Kernels between two collectives, or one of these.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Part {
    /// Seconds of matrix products and attention, and of all other kernels.
    Compute { products: f64, kernels: f64 },
    /// A collective once all members are there.
    Collective { group: Group, seconds: f64 },
}

/// A routine as the clock sees it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Timed {
    /// In order; no two parts that compute stand side by side.
    pub(crate) parts: Vec<Part>,
    /// Whether it belongs to a layer; else it clears, reduces or updates.
    pub(crate) is_layer: bool,
}

/// What a class does next.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Move {
    /// Runs a routine of the script.
    Call { routine: usize },
    /// Sends to a stage, which takes so long.
    Send { to: usize, seconds: f64 },
    /// Waits for a message of a stage.
    Receive { from: usize },
    /// Begins a copy between memory spaces, which takes so long after those before it.
    Copy { ends: [BufferId; 2], seconds: f64 },
    /// Waits for the copies from and to a buffer.
    Await { buffer: BufferId },
}

/// A step of a class.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Script {
    /// The routines that are called.
    pub(crate) routines: Vec<Rc<Timed>>,
    /// In order.
    pub(crate) moves: Vec<Move>,
}

impl Script {
    /// What a program does in a step. `launches` are the prices of the kernels that it launches.
    pub(crate) fn of(program: &Program, prices: &Prices<'_>, launches: &[LaunchPrice]) -> Script {
        let is_layer =
            |name: &str| [".forward", ".backward", ".weights"].iter().any(|e| name.ends_with(e));
        Script::of_steps(program, &program.steps, is_layer, prices, launches)
    }

    /// What a program does in an entry, which only has layers.
    pub(crate) fn of_entry(
        program: &Program,
        entry: usize,
        prices: &Prices<'_>,
        launches: &[LaunchPrice],
    ) -> Script {
        let steps = &program.entries[entry].steps;
        Script::of_steps(program, steps, |_| true, prices, launches)
    }

    fn of_steps(
        program: &Program,
        steps: &[Step],
        is_layer: impl Fn(&str) -> bool,
        prices: &Prices<'_>,
        launches: &[LaunchPrice],
    ) -> Script {
        let timed = |routine: &Routine| {
            let is_layer = is_layer(&routine.name);
            let mut timed = Timed { parts: Vec::new(), is_layer };
            add_parts(&mut timed.parts, routine, prices, launches);
            Rc::new(timed)
        };
        let next = |step: &Step| match step {
            Step::Feed { .. } => None,
            Step::Call { routine, .. } => Some(Move::Call { routine: *routine }),
            Step::Send { to, buffer } => {
                let seconds = prices.send(program.buffers[buffer.0 as usize].bytes);
                Some(Move::Send { to: *to, seconds })
            }
            Step::Receive { from, .. } => Some(Move::Receive { from: *from }),
            Step::Move { from, to } => {
                let buffers = [from, to].map(|id| &program.buffers[id.0 as usize]);
                let mut places = buffers.into_iter().filter_map(|b| program.place_of(b));
                let away = places.find(|place| *place != Place::Device).unwrap_or_default();
                let seconds = prices.copy(away, buffers[0].bytes);
                Some(Move::Copy { ends: [*from, *to], seconds })
            }
            Step::Await { buffer } => Some(Move::Await { buffer: *buffer }),
        };
        Script {
            routines: program.routines.iter().map(timed).collect(),
            moves: steps.iter().filter_map(next).collect(),
        }
    }
}

/// Appends the parts of a routine.
pub(crate) fn add_parts(
    parts: &mut Vec<Part>,
    routine: &Routine,
    prices: &Prices<'_>,
    launches: &[LaunchPrice],
) {
    for instruction in &routine.instructions {
        match instruction {
            Instruction::Launch { kernel, .. } => {
                let LaunchPrice { seconds, is_product } = launches[*kernel];
                let both = if is_product { [seconds, 0.0] } else { [0.0, seconds] };
                add_compute(parts, both);
            }
            Instruction::Collective { exchange, group, dtype, elements, .. } => {
                let seconds = prices.collective(exchange, group, *dtype, *elements);
                parts.push(Part::Collective { group: group.clone(), seconds });
            }
        }
    }
}

/// Appends kernels: seconds of products, and of others.
fn add_compute(parts: &mut Vec<Part>, [of_products, of_others]: [f64; 2]) {
    if let Some(Part::Compute { products, kernels }) = parts.last_mut() {
        *products += of_products;
        *kernels += of_others;
    } else {
        parts.push(Part::Compute { products: of_products, kernels: of_others });
    }
}

impl Timed {
    /// Appends what another routine does.
    pub(crate) fn append(&mut self, other: &Timed) {
        for part in &other.parts {
            match part {
                Part::Compute { products, kernels } => {
                    add_compute(&mut self.parts, [*products, *kernels]);
                }
                Part::Collective { .. } => self.parts.push(part.clone()),
            }
        }
    }

    /// Seconds of all parts, and of those that compute.
    pub(crate) fn seconds(&self) -> [f64; 2] {
        let mut sums = [0.0; 2];
        for part in &self.parts {
            match part {
                Part::Compute { products, kernels } => {
                    sums[0] += products + kernels;
                    sums[1] += products + kernels;
                }
                Part::Collective { seconds, .. } => sums[0] += seconds,
            }
        }
        sums
    }
}
