//! The time of a step: the programs of all classes, run against prices on one clock per class.
//!
//! Data-parallel ranks run the same program in lockstep, so one stands for all. A collective ends
//! for all members at once, after the last has come; a message is there when its sender is done.
//! Ranks that share cores are slowed down so that no core does more than a second's work a second.

use std::collections::{BTreeMap, VecDeque};

use ir::program::{Group, Instruction, Program, Step};
use ir::{Axis, Mesh};
use kernels::Kernel;
use serde::{Deserialize, Serialize};

use crate::price::{LaunchPrice, Prices};

/// Where the time of a rank goes, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Breakdown {
    /// Matrix products and attention.
    pub products_s: f64,
    /// All other kernels of layers.
    pub kernels_s: f64,
    /// Collectives over `tp`.
    pub tensor_s: f64,
    /// The reduction of gradients over `dp`, of the loss and of the norm.
    pub reduction_s: f64,
    /// Messages between stages.
    pub messages_s: f64,
    /// Waiting for other stages and for slower members of a collective.
    pub wait_s: f64,
    /// Clearing and updating.
    pub update_s: f64,
}

impl Breakdown {
    /// The parts by name; their sum is the step.
    pub fn parts(&self) -> [(&'static str, f64); 7] {
        [
            ("products", self.products_s),
            ("other kernels", self.kernels_s),
            ("tp collectives", self.tensor_s),
            ("dp reduction", self.reduction_s),
            ("messages", self.messages_s),
            ("waiting", self.wait_s),
            ("update", self.update_s),
        ]
    }

    /// The sum of the parts.
    pub fn total(&self) -> f64 {
        self.parts().iter().map(|(_, seconds)| seconds).sum()
    }
}

/// The predicted time of a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepTime {
    /// Until the last rank is done.
    pub seconds: f64,
    /// The time of that rank.
    pub breakdown: Breakdown,
    /// For each stage, the share of the step in which its first rank computes.
    pub busy: Vec<f64>,
    /// By how much sharing cores slowed the kernels down.
    pub slowdown: f64,
}

/// A part of a routine between two collectives, or one.
enum Item {
    Compute { products: f64, kernels: f64 },
    Collective { group: Group, seconds: f64 },
}

struct Class<'a> {
    program: &'a Program,
    routines: Vec<Vec<Item>>,
    is_layer: Vec<bool>,
    clock: f64,
    time: Breakdown,
    at_step: usize,
    at_item: usize,
    /// How often the class was in each group.
    visits: BTreeMap<Vec<usize>, usize>,
}

/// Arrivals at a collective: the class and its time.
type Meeting = BTreeMap<usize, f64>;

struct Simulation<'a> {
    mesh: Mesh,
    prices: &'a Prices<'a>,
    slowdown: f64,
    classes: Vec<Class<'a>>,
    meetings: BTreeMap<(Vec<usize>, usize), Meeting>,
    /// Messages on their way: when they are there.
    messages: BTreeMap<(usize, usize), VecDeque<f64>>,
}

/// The time of a step of the programs of all classes, stages outermost.
///
/// # Panics
/// When the programs wait for each other in a circle, which codegen's schedules never do.
pub fn simulate(
    prices: &Prices<'_>,
    mesh: Mesh,
    programs: &[Program],
    kernels: &[Kernel],
) -> StepTime {
    let launches: Vec<LaunchPrice> = kernels.iter().map(|k| prices.launch(k)).collect();
    let full = prices.oversubscription();
    let alone = run(prices, mesh, programs, &launches, 1.0);
    if full == 1.0 {
        return alone;
    }
    // Ranks that wait leave their core to others: the slowdown is the share of busy ranks.
    let busy = alone.busy.iter().sum::<f64>() / alone.busy.len() as f64;
    run(prices, mesh, programs, &launches, (full * busy).max(1.0))
}

fn run(
    prices: &Prices<'_>,
    mesh: Mesh,
    programs: &[Program],
    launches: &[LaunchPrice],
    slowdown: f64,
) -> StepTime {
    let classes = programs.iter().map(|program| Class::new(program, prices, launches)).collect();
    let mut simulation = Simulation {
        mesh,
        prices,
        slowdown,
        classes,
        meetings: BTreeMap::new(),
        messages: BTreeMap::new(),
    };
    loop {
        let mut moved = false;
        for class in 0..simulation.classes.len() {
            moved |= simulation.advance(class);
        }
        if simulation.classes.iter().all(|c| c.at_step == c.program.steps.len()) {
            break;
        }
        assert!(moved, "the programs wait for each other");
    }
    let last = simulation.classes.iter().max_by(|a, b| a.clock.total_cmp(&b.clock));
    let last = last.expect("a plan has a rank");
    let share = |c: &Class<'_>| {
        (c.time.products_s + c.time.kernels_s + c.time.update_s) / last.clock.max(f64::MIN_POSITIVE)
    };
    let firsts = simulation.classes.iter().step_by(mesh.tp.max(1));
    StepTime {
        seconds: last.clock,
        breakdown: last.time,
        busy: firsts.map(share).collect(),
        slowdown,
    }
}

impl<'a> Class<'a> {
    fn new(program: &'a Program, prices: &Prices<'_>, launches: &[LaunchPrice]) -> Class<'a> {
        let items = |routine: &ir::program::Routine| {
            let mut items = Vec::new();
            for instruction in &routine.instructions {
                match instruction {
                    Instruction::Launch { kernel, .. } => {
                        let LaunchPrice { seconds, is_product } = launches[*kernel];
                        if !matches!(items.last(), Some(Item::Compute { .. })) {
                            items.push(Item::Compute { products: 0.0, kernels: 0.0 });
                        }
                        if let Some(Item::Compute { products, kernels }) = items.last_mut() {
                            *if is_product { products } else { kernels } += seconds;
                        }
                    }
                    Instruction::Collective { exchange, group, dtype, elements, .. } => {
                        let seconds = prices.collective(exchange, group, *dtype, *elements);
                        items.push(Item::Collective { group: group.clone(), seconds });
                    }
                }
            }
            items
        };
        let is_layer = |routine: &ir::program::Routine| {
            routine.name.ends_with(".forward") || routine.name.ends_with(".backward")
        };
        Class {
            program,
            routines: program.routines.iter().map(items).collect(),
            is_layer: program.routines.iter().map(is_layer).collect(),
            clock: 0.0,
            time: Breakdown::default(),
            at_step: 0,
            at_item: 0,
            visits: BTreeMap::new(),
        }
    }
}

impl Simulation<'_> {
    /// Runs a class until it has to wait. Whether it moved.
    fn advance(&mut self, class: usize) -> bool {
        let mut moved = false;
        loop {
            let at = self.classes[class].at_step;
            let Some(step) = self.classes[class].program.steps.get(at) else { return moved };
            let done = match step {
                Step::Feed { .. } => true,
                Step::Call { routine, .. } => self.call(class, *routine, &mut moved),
                Step::Send { to, buffer } => {
                    let bytes = self.classes[class].program.buffers[buffer.0 as usize].bytes;
                    let seconds = self.prices.send(bytes);
                    let me = &mut self.classes[class];
                    me.clock += seconds;
                    me.time.messages_s += seconds;
                    let there = me.clock;
                    let to = to * self.mesh.tp + class % self.mesh.tp;
                    self.messages.entry((class, to)).or_default().push_back(there);
                    true
                }
                Step::Receive { from, .. } => {
                    let from = from * self.mesh.tp + class % self.mesh.tp;
                    let there = self.messages.entry((from, class)).or_default().pop_front();
                    there.is_some_and(|there| {
                        self.classes[class].wait_until(there);
                        true
                    })
                }
            };
            if !done {
                return moved;
            }
            moved = true;
            self.classes[class].at_step += 1;
            self.classes[class].at_item = 0;
        }
    }

    /// Runs a call from where it stands. Whether it ended.
    fn call(&mut self, class: usize, routine: usize, moved: &mut bool) -> bool {
        loop {
            let me = &mut self.classes[class];
            let Some(item) = me.routines[routine].get(me.at_item) else { return true };
            match item {
                Item::Compute { products, kernels } => {
                    let (products, kernels) = (products * self.slowdown, kernels * self.slowdown);
                    me.clock += products + kernels;
                    if me.is_layer[routine] {
                        me.time.products_s += products;
                        me.time.kernels_s += kernels;
                    } else {
                        me.time.update_s += products + kernels;
                    }
                }
                Item::Collective { group, seconds } => {
                    let (group, seconds) = (group.clone(), *seconds);
                    if !self.meet(class, &group, seconds) {
                        return false;
                    }
                }
            }
            *moved = true;
            self.classes[class].at_item += 1;
        }
    }

    /// Comes to a collective. Whether all members are there; the class is past it then.
    fn meet(&mut self, class: usize, group: &Group, seconds: f64) -> bool {
        let members = self.members(class, group);
        let visit = self.classes[class].visits.get(&members).copied().unwrap_or(0);
        let meeting = self.meetings.entry((members.clone(), visit)).or_default();
        meeting.entry(class).or_insert(self.classes[class].clock);
        if meeting.len() < members.len() {
            return false;
        }
        let start = meeting.values().copied().fold(0.0, f64::max);
        let me = &mut self.classes[class];
        me.wait_until(start);
        me.clock += seconds;
        match group {
            Group::Axis(Axis::Tp) => me.time.tensor_s += seconds,
            Group::Axis(_) | Group::Stages(_) | Group::World => me.time.reduction_s += seconds,
        }
        *me.visits.entry(members).or_insert(0) += 1;
        true
    }

    /// The classes whose ranks are in a group of a class.
    fn members(&self, class: usize, group: &Group) -> Vec<usize> {
        let tp = self.mesh.tp;
        let (stage, tensor) = (class / tp, class % tp);
        match group {
            Group::Axis(Axis::Tp) => (stage * tp..(stage + 1) * tp).collect(),
            Group::Axis(Axis::Pp) => (0..self.mesh.pp).map(|s| s * tp + tensor).collect(),
            Group::Axis(Axis::Dp | Axis::Cp) => vec![class],
            Group::Stages(stages) => stages.iter().map(|s| s * tp + tensor).collect(),
            Group::World => (0..self.classes.len()).collect(),
        }
    }
}

impl Class<'_> {
    fn wait_until(&mut self, time: f64) {
        if time > self.clock {
            self.time.wait_s += time - self.clock;
            self.clock = time;
        }
    }
}
