//! The time of a step: the programs of all classes, run against prices on one clock.
//!
//! Data-parallel ranks run the same program in lockstep, so one stands for all. A collective ends
//! for all members at once, after the last has come; a message is there when its sender is done.
//! Ranks that compute share the cores of their node evenly, each at most one core's speed; a rank
//! that waits or communicates leaves its share to the others. So a step never takes less than its
//! work divided by the cores, nor than its longest chain.

mod script;

use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::rc::Rc;

use ir::program::{BufferId, Group, Program};
use ir::{Axis, Mesh};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::price::{LaunchPrice, Prices};
pub(crate) use script::{Move, Part, Script, Timed, add_parts};

/// Where the time of a rank goes, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Breakdown {
    /// Matrix products and attention.
    pub products_s: f64,
    /// All other kernels of layers.
    pub kernels_s: f64,
    /// Collectives over `tp`.
    pub tensor_s: f64,
    /// Collectives over `cp`.
    #[serde(default)]
    pub context_s: f64,
    /// Exchanges of ranks that share experts.
    #[serde(default)]
    pub experts_s: f64,
    /// The reduction of gradients, of the loss and of the norm.
    pub reduction_s: f64,
    /// Messages between stages.
    pub messages_s: f64,
    /// Waiting for other stages and for slower members of a collective.
    pub wait_s: f64,
    /// Waiting for what comes from the host or a disk, or goes there.
    #[serde(default)]
    pub offload_s: f64,
    /// Clearing and updating.
    pub update_s: f64,
}

impl Breakdown {
    /// The parts by name; their sum is the step.
    pub fn parts(&self) -> [(&'static str, f64); 10] {
        [
            ("products", self.products_s),
            ("other kernels", self.kernels_s),
            ("tp collectives", self.tensor_s),
            ("cp collectives", self.context_s),
            ("ep collectives", self.experts_s),
            ("dp reduction", self.reduction_s),
            ("messages", self.messages_s),
            ("waiting", self.wait_s),
            ("offload", self.offload_s),
            ("update", self.update_s),
        ]
    }

    /// The part to which an exchange along an axis belongs, or one of other ranks.
    fn exchanged_over(&mut self, axis: Option<Axis>) -> &mut f64 {
        match axis {
            Some(Axis::Tp) => &mut self.tensor_s,
            Some(Axis::Cp) => &mut self.context_s,
            Some(Axis::Ep) => &mut self.experts_s,
            Some(Axis::Pp | Axis::Dp) | None => &mut self.reduction_s,
        }
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
#[derive(Clone, Copy)]
enum Item {
    Compute { products: f64, kernels: f64 },
    Collective { group: usize, axis: Option<Axis>, seconds: f64 },
}

/// What a class is doing.
#[derive(Clone, Copy, PartialEq)]
enum Doing {
    /// Deciding what comes next.
    Nothing,
    /// Kernels that take so long alone, and for how long they have run.
    Compute {
        left: f64,
        since: f64,
    },
    /// A collective, a message that it sends, or a copy that it waits for, until then.
    Transfer {
        until: f64,
        of: Transferred,
    },
    /// Waiting for others since then.
    Waiting {
        since: f64,
    },
    Done,
}

/// What a class waits for to arrive.
#[derive(Clone, Copy, PartialEq)]
enum Transferred {
    Collective,
    Message,
    Copy,
}

struct Class<'a> {
    script: &'a Script,
    routines: Vec<Vec<Item>>,
    doing: Doing,
    time: Breakdown,
    at_move: usize,
    at_item: usize,
    /// What its kernels would take alone.
    alone_s: f64,
    /// When the last copy that was begun ends, and when those of each buffer do.
    copies_end: f64,
    copied: BTreeMap<BufferId, f64>,
}

/// The classes of a group, and how many of them have come to the collective.
struct Meeting {
    members: Vec<usize>,
    come: usize,
}

struct Simulation<'a> {
    mesh: Mesh,
    prices: &'a Prices<'a>,
    now: f64,
    classes: Vec<Class<'a>>,
    meetings: Vec<Meeting>,
    /// Messages that have arrived, by sender and receiver.
    messages: BTreeMap<(usize, usize), usize>,
    /// For each class, how many ranks of each class share the node of its first rank; none where
    /// no cores are shared.
    neighbours: Option<Vec<Vec<f64>>>,
}

/// The time of a step of the programs of all classes, stages outermost. `launches` are the prices
/// of the kernels that they launch.
///
/// O(steps · classes).
///
/// # Panics
/// When the programs wait for each other in a circle, which codegen's schedules never do.
pub fn simulate<P: Borrow<Program>>(
    prices: &Prices<'_>,
    mesh: Mesh,
    programs: &[P],
    launches: &[LaunchPrice],
) -> StepTime {
    let script = |program: &P| Script::of(program.borrow(), prices, launches);
    let scripts: Vec<Script> = programs.iter().map(script).collect();
    simulate_scripts(prices, mesh, &scripts)
}

/// The time of an entry of a replica's programs, one per class, stages outermost. All `dp` replicas
/// of the mesh run it at once and share the cores.
///
/// # Panics
/// When the programs wait for each other in a circle.
pub fn simulate_entry<P: Borrow<Program>>(
    prices: &Prices<'_>,
    mesh: Mesh,
    programs: &[P],
    launches: &[LaunchPrice],
    entry: usize,
) -> StepTime {
    let script = |program: &P| Script::of_entry(program.borrow(), entry, prices, launches);
    let scripts: Vec<Script> = programs.iter().map(script).collect();
    simulate_scripts(prices, mesh, &scripts)
}

/// The time of a step of the scripts of all classes, stages outermost.
///
/// # Panics
/// When the scripts wait for each other in a circle.
pub(crate) fn simulate_scripts(prices: &Prices<'_>, mesh: Mesh, scripts: &[Script]) -> StepTime {
    let mut simulation = Simulation::new(prices, mesh, scripts);
    simulation.run();
    let seconds = simulation.now;
    // The rank that worked and waited to the end; the first, where several did.
    let total = |c: &Class<'_>| c.time.total();
    let classes = simulation.classes.iter();
    let last = classes.reduce(|a, b| if total(b) > total(a) { b } else { a });
    let last = last.expect("a plan has a rank");
    let computed = |t: &Breakdown| t.products_s + t.kernels_s + t.update_s;
    let share = |c: &Class<'_>| computed(&c.time) / seconds.max(f64::MIN_POSITIVE);
    let firsts = simulation.classes.iter().step_by((mesh.cp * mesh.tp).max(1));
    StepTime {
        seconds,
        breakdown: last.time,
        busy: firsts.map(share).collect(),
        slowdown: computed(&last.time) / last.alone_s.max(f64::MIN_POSITIVE),
    }
}

impl<'a> Simulation<'a> {
    fn new(prices: &'a Prices<'a>, mesh: Mesh, scripts: &'a [Script]) -> Simulation<'a> {
        let mut simulation = Simulation {
            mesh,
            prices,
            now: 0.0,
            classes: Vec::new(),
            meetings: Vec::new(),
            messages: BTreeMap::new(),
            neighbours: neighbours(prices, mesh),
        };
        for (at, script) in scripts.iter().enumerate() {
            let class = simulation.class(at, script);
            simulation.classes.push(class);
        }
        simulation
    }

    fn class(&mut self, at: usize, script: &'a Script) -> Class<'a> {
        let mut item = |part: &Part, is_layer: bool| match part {
            Part::Compute { products, kernels } => {
                Item::Compute { products: *products, kernels: *kernels }
            }
            Part::Collective { group, seconds } => {
                let axis = match group {
                    Group::Axis(axis) => Some(*axis),
                    // Inside of layers, neighbours share experts.
                    Group::Shards(_) | Group::Experts(_) if is_layer => Some(Axis::Ep),
                    Group::Shards(_)
                    | Group::Experts(_)
                    | Group::Data
                    | Group::Copies(_)
                    | Group::Strided { .. }
                    | Group::Stages(_)
                    | Group::World => None,
                };
                let group = self.meeting(self.members(at, group));
                Item::Collective { group, axis, seconds: *seconds }
            }
        };
        let mut items =
            |timed: &Rc<Timed>| timed.parts.iter().map(|part| item(part, timed.is_layer)).collect();
        let routines = script.routines.iter().map(&mut items).collect();
        Class {
            script,
            routines,
            doing: Doing::Nothing,
            time: Breakdown::default(),
            at_move: 0,
            at_item: 0,
            alone_s: 0.0,
            copies_end: 0.0,
            copied: BTreeMap::new(),
        }
    }

    fn meeting(&mut self, members: Vec<usize>) -> usize {
        let known = self.meetings.iter().position(|m| m.members == members);
        known.unwrap_or_else(|| {
            self.meetings.push(Meeting { members, come: 0 });
            self.meetings.len() - 1
        })
    }

    /// The classes whose ranks are in a group of a class.
    fn members(&self, class: usize, group: &Group) -> Vec<usize> {
        let Mesh { pp, cp, tp, .. } = self.mesh;
        let [stage, context, tensor] = self.mesh.class_coordinates(class);
        let at = |stage, context, tensor| self.mesh.class_at([stage, context, tensor]);
        match group {
            Group::Axis(Axis::Tp) => (0..tp).map(|other| at(stage, context, other)).collect(),
            Group::Axis(Axis::Pp) => (0..pp).map(|other| at(other, context, tensor)).collect(),
            Group::Axis(Axis::Dp | Axis::Ep) => vec![class],
            Group::Axis(Axis::Cp) | Group::Data => {
                (0..cp).map(|other| at(stage, other, tensor)).collect()
            }
            // Ranks along `dp` come at once, so that of their groups it matters which classes wait.
            Group::Shards(count) => {
                let first = context / count * count;
                (first..cp.min(first + count)).map(|other| at(stage, other, tensor)).collect()
            }
            Group::Experts(count) => {
                let on_data = count / tp;
                let first = context / on_data * on_data;
                let contexts = first..cp.min(first + on_data);
                let of_place = |t| contexts.clone().map(move |c| at(stage, c, t));
                (0..tp).flat_map(of_place).collect()
            }
            Group::Copies(stride) | Group::Strided { stride, .. } => {
                let own = (context % stride..cp).step_by(*stride);
                own.map(|other| at(stage, other, tensor)).collect()
            }
            Group::Stages(stages) => {
                stages.iter().map(|other| at(*other, context, tensor)).collect()
            }
            Group::World => (0..pp * cp * tp).collect(),
        }
    }

    fn run(&mut self) {
        loop {
            for class in 0..self.classes.len() {
                self.advance(class);
            }
            if self.classes.iter().any(|c| c.doing == Doing::Nothing) {
                // A message woke a class that had its turn.
                continue;
            }
            let speeds = self.speeds();
            let ends = self.classes.iter().zip(&speeds).filter_map(|(c, speed)| match c.doing {
                Doing::Compute { left, .. } => Some(self.now + left / speed),
                Doing::Transfer { until, .. } => Some(until),
                Doing::Nothing | Doing::Waiting { .. } | Doing::Done => None,
            });
            let Some(next) = ends.reduce(f64::min) else {
                let all_done = self.classes.iter().all(|c| c.doing == Doing::Done);
                assert!(all_done, "the programs wait for each other");
                return;
            };
            self.pass(next, &speeds);
        }
    }

    /// For each class, the share of a core that its ranks have while they compute.
    fn speeds(&self) -> Vec<f64> {
        let Some(neighbours) = &self.neighbours else { return vec![1.0; self.classes.len()] };
        let computes = |(c, ranks): (&Class<'_>, &f64)| match c.doing {
            Doing::Compute { .. } => *ranks,
            Doing::Nothing | Doing::Transfer { .. } | Doing::Waiting { .. } | Doing::Done => 0.0,
        };
        let cores = self.prices.cores();
        let active = |n: &Vec<f64>| self.classes.iter().zip(n).map(computes).sum::<f64>();
        neighbours.iter().map(|n| (cores / active(n).max(1.0)).min(1.0)).collect()
    }

    /// Lets time pass until the first class is done with what it does.
    fn pass(&mut self, next: f64, speeds: &[f64]) {
        let passed = next - self.now;
        for (class, speed) in self.classes.iter_mut().zip(speeds) {
            match &mut class.doing {
                Doing::Compute { left, .. } => {
                    // What ends now ends exactly, whatever rounding says.
                    let is_over = self.now + *left / speed <= next;
                    *left = if is_over { 0.0 } else { (*left - passed * speed).max(0.0) };
                }
                Doing::Transfer { .. } | Doing::Nothing | Doing::Waiting { .. } | Doing::Done => {}
            }
        }
        self.now = next;
    }

    /// Runs a class until it computes, transfers or waits.
    fn advance(&mut self, class: usize) {
        loop {
            match self.classes[class].doing {
                Doing::Compute { left, since } if left <= 0.0 => self.end_compute(class, since),
                Doing::Transfer { until, of } if until <= self.now => {
                    self.end_transfer(class, of);
                }
                Doing::Nothing => {
                    if !self.start(class) {
                        return;
                    }
                }
                Doing::Compute { .. }
                | Doing::Transfer { .. }
                | Doing::Waiting { .. }
                | Doing::Done => return,
            }
        }
    }

    fn item(&self, class: usize) -> Option<(usize, Item)> {
        let me = &self.classes[class];
        let Some(Move::Call { routine }) = me.script.moves.get(me.at_move) else {
            return None;
        };
        Some((*routine, *me.routines[*routine].get(me.at_item)?))
    }

    fn end_compute(&mut self, class: usize, since: f64) {
        let Some((routine, Item::Compute { products, kernels })) = self.item(class) else {
            unreachable!("a class computes what its program says");
        };
        let me = &mut self.classes[class];
        let (took, alone) = (self.now - since, products + kernels);
        let of_products = if alone > 0.0 { took * products / alone } else { 0.0 };
        if me.script.routines[routine].is_layer {
            me.time.products_s += of_products;
            me.time.kernels_s += took - of_products;
        } else {
            me.time.update_s += took;
        }
        me.alone_s += alone;
        me.at_item += 1;
        me.doing = Doing::Nothing;
    }

    fn end_transfer(&mut self, class: usize, of: Transferred) {
        let me = &mut self.classes[class];
        me.doing = Doing::Nothing;
        match of {
            Transferred::Collective => me.at_item += 1,
            Transferred::Copy => me.next_move(),
            Transferred::Message => self.end_message(class),
        }
    }

    fn end_message(&mut self, class: usize) {
        let me = &mut self.classes[class];
        let Move::Send { to, .. } = me.script.moves[me.at_move] else {
            unreachable!("a class sends what its program says");
        };
        me.next_move();
        let (from, to) = (self.mesh.class_coordinates(class)[0], self.mesh.on_stage(class, to));
        *self.messages.entry((class, to)).or_insert(0) += 1;
        let now = self.now;
        let receiver = &mut self.classes[to];
        if let (Doing::Waiting { .. }, Some(Move::Receive { from: wanted })) =
            (receiver.doing, receiver.script.moves.get(receiver.at_move))
            && *wanted == from
        {
            receiver.wake(now);
            receiver.doing = Doing::Nothing;
        }
    }

    /// Starts what comes next, or passes what takes no time. Whether the class goes on at once.
    fn start(&mut self, class: usize) -> bool {
        let (mesh, now) = (self.mesh, self.now);
        let me = &mut self.classes[class];
        let Some(next) = me.script.moves.get(me.at_move) else {
            // A step ends when its copies have.
            if me.copies_end > now {
                me.wait_for_copies(me.copies_end, now);
                return true;
            }
            me.doing = Doing::Done;
            return false;
        };
        match next {
            Move::Call { .. } => return self.start_item(class),
            Move::Copy { ends, seconds } => {
                me.copies_end = me.copies_end.max(now) + seconds;
                for buffer in ends {
                    me.copied.insert(*buffer, me.copies_end);
                }
                me.next_move();
            }
            Move::Await { buffer } => {
                let until = me.copied.get(buffer).copied().unwrap_or(now);
                me.wait_for_copies(until.max(now), now);
            }
            Move::Send { seconds, .. } => {
                me.time.messages_s += seconds;
                me.doing = Doing::Transfer { until: now + seconds, of: Transferred::Message };
            }
            Move::Receive { from } => {
                let there = self.messages.entry((mesh.on_stage(class, *from), class)).or_insert(0);
                if *there == 0 {
                    me.doing = Doing::Waiting { since: now };
                    return false;
                }
                *there -= 1;
                me.next_move();
            }
        }
        true
    }

    fn start_item(&mut self, class: usize) -> bool {
        let now = self.now;
        match self.item(class) {
            None => self.classes[class].next_move(),
            Some((_, Item::Compute { products, kernels })) => {
                let left = products + kernels;
                self.classes[class].doing = Doing::Compute { left, since: now };
            }
            Some((_, Item::Collective { group, axis, seconds })) => {
                let meeting = &mut self.meetings[group];
                meeting.come += 1;
                self.classes[class].doing = Doing::Waiting { since: now };
                if meeting.come < meeting.members.len() {
                    return false;
                }
                meeting.come = 0;
                for member in &self.meetings[group].members {
                    let member = &mut self.classes[*member];
                    member.wake(now);
                    member.doing =
                        Doing::Transfer { until: now + seconds, of: Transferred::Collective };
                    *member.time.exchanged_over(axis) += seconds;
                }
            }
        }
        true
    }
}

impl Class<'_> {
    fn wait_for_copies(&mut self, until: f64, now: f64) {
        self.time.offload_s += until - now;
        self.doing = Doing::Transfer { until, of: Transferred::Copy };
    }

    fn next_move(&mut self) {
        self.at_move += 1;
        self.at_item = 0;
    }

    fn wake(&mut self, now: f64) {
        if let Doing::Waiting { since } = self.doing {
            self.time.wait_s += now - since;
        }
    }
}

/// For each class, how many ranks of each class are on the node of its first rank; none where a
/// core is there for every rank.
fn neighbours(prices: &Prices<'_>, mesh: Mesh) -> Option<Vec<Vec<f64>>> {
    if prices.oversubscription() <= 1.0 {
        return None;
    }
    let node = |class, data| {
        mesh.along(mesh.first_of_class(class), Axis::Dp, data) / prices.ranks_per_node()
    };
    let of = |class: usize| {
        let own = node(class, 0);
        let there = |other| (0..mesh.dp).filter(|data| node(other, *data) == own).count() as f64;
        (0..mesh.classes()).map(there).collect()
    };
    Some((0..mesh.classes()).map(of).collect())
}
