//! What ranks of a replay say to each other: messages, collectives, and who waits for whom.

pub(super) mod rank;

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use ir::program::{Exchange, Group, Instruction, Routed};
use ir::sharding::Axis;
use ir::{DType, Diagnostic, Span};

use super::labels::{Label, Labels};
use super::{Findings, Setup};
use rank::{Labelled, Rank};

/// A message on its way; sending never waits.
pub(super) struct Message {
    pub(super) length: u64,
    pub(super) dtype: DType,
    pub(super) label: Label,
    pub(super) name: String,
}

/// Who takes part in a collective: classes, and whether all ranks along `dp` do.
type Members = (Vec<usize>, bool);

/// A member that waits in a collective.
struct Arrival<'p> {
    class: usize,
    collective: &'p Instruction,
    offer: Labelled,
    place: String,
}

/// What the ranks of a replay share.
pub(super) struct World<'s, 'p> {
    pub(super) setup: &'s Setup<'p>,
    pub(super) labels: Labels,
    pub(super) findings: &'s mut Findings,
    /// By sender and receiver.
    mail: BTreeMap<(usize, usize), VecDeque<Message>>,
    meetings: BTreeMap<Members, Vec<Arrival<'p>>>,
    /// Members disagree: what follows would say nothing.
    is_broken: bool,
}

/// Replays a phase of all classes.
pub(super) fn replay<'p>(setup: &Setup<'p>, findings: &mut Findings) {
    let mut world = World {
        setup,
        labels: Labels::new(setup.plan.microbatch_count),
        findings,
        mail: BTreeMap::new(),
        meetings: BTreeMap::new(),
        is_broken: false,
    };
    let mut ranks: Vec<Rank<'p>> =
        (0..setup.programs.len()).map(|class| Rank::new(setup, class)).collect();
    loop {
        let mut moved = false;
        for rank in &mut ranks {
            while !world.is_broken && rank.advance(&mut world) {
                moved = true;
            }
        }
        moved |= world.settle(&mut ranks);
        if !moved || world.is_broken {
            break;
        }
    }
    if world.is_broken {
        return;
    }
    if ranks.iter().any(|rank| !rank.is_done(setup.phase)) {
        world.report_deadlock(&ranks);
        return;
    }
    world.report_unread(&ranks);
    rank::batches::finish(&mut world, &ranks);
}

impl<'p> World<'_, 'p> {
    fn class_at(&self, place: [usize; 3]) -> usize {
        let found = self.setup.programs.iter().position(|p| p.place() == place);
        found.expect("bounds: every stage and place has a program")
    }

    /// The number of ranks in a group.
    pub(super) fn size_of(&self, group: &Group) -> usize {
        match group {
            Group::Axis(axis) => self.setup.plan.mesh.size(*axis),
            Group::Data => self.setup.plan.mesh.data_ranks(),
            Group::Shards(count) => *count,
            Group::Copies(count) => self.setup.plan.mesh.data_ranks() / count,
            Group::Strided { count, .. } | Group::Experts(count) => *count,
            Group::Stages(stages) => stages.len(),
            Group::World => self.setup.plan.mesh.ranks(),
        }
    }

    /// The members of the group that a class is in.
    fn members(&self, class: usize, group: &Group) -> Members {
        let [stage, context, tensor] = self.setup.programs[class].place();
        let mesh = self.setup.plan.mesh;
        let of_stages = |stages: &mut dyn Iterator<Item = usize>| -> Vec<usize> {
            stages.map(|stage| self.class_at([stage, context, tensor])).collect()
        };
        let of_contexts = |contexts: &mut dyn Iterator<Item = usize>| -> Vec<usize> {
            contexts.map(|context| self.class_at([stage, context, tensor])).collect()
        };
        match group {
            Group::Axis(Axis::Dp) => (vec![class], mesh.dp > 1),
            Group::Axis(Axis::Ep) => (vec![class], false),
            Group::Axis(Axis::Cp) => (of_contexts(&mut (0..mesh.cp)), false),
            Group::Data => (of_contexts(&mut (0..mesh.cp)), mesh.dp > 1),
            // Neighbours are whole samples of some ranks along `dp`, or shares of one sample.
            Group::Shards(count) if count.is_multiple_of(mesh.cp) => {
                (of_contexts(&mut (0..mesh.cp)), count / mesh.cp > 1)
            }
            Group::Shards(count) => {
                let first = context / count * count;
                (of_contexts(&mut (first..first + count)), false)
            }
            // All classes along `tp`, of neighbours as above.
            Group::Experts(count) => {
                let on_data = count / mesh.tp;
                let first = context / on_data * on_data;
                let contexts = match on_data.is_multiple_of(mesh.cp) {
                    true => 0..mesh.cp,
                    false => first..first + on_data,
                };
                let at = |t| contexts.clone().map(move |c| [stage, c, t]);
                let places = (0..mesh.tp).flat_map(at);
                (places.map(|place| self.class_at(place)).collect(), on_data / mesh.cp > 1)
            }
            Group::Copies(stride) | Group::Strided { stride, .. }
                if stride.is_multiple_of(mesh.cp) =>
            {
                (vec![class], self.size_of(group) > 1)
            }
            Group::Copies(stride) | Group::Strided { stride, .. } => {
                let own = (context % stride..mesh.cp).step_by(*stride);
                (of_contexts(&mut { own }), mesh.dp > 1)
            }
            Group::Axis(Axis::Pp) => (of_stages(&mut (0..mesh.pp)), false),
            Group::Axis(Axis::Tp) => {
                let places = 0..mesh.tp;
                (places.map(|t| self.class_at([stage, context, t])).collect(), false)
            }
            Group::Stages(stages) => (of_stages(&mut stages.iter().copied()), false),
            Group::World => {
                let all = (0..mesh.classes()).map(|class| mesh.class_coordinates(class));
                (all.map(|place| self.class_at(place)).collect(), mesh.dp > 1)
            }
        }
    }

    pub(super) fn send(&mut self, from: &Rank<'p>, stage: usize, message: Message) {
        let to = self.class_at([stage, from.program.context, from.program.tensor]);
        self.mail.entry((from.class, to)).or_default().push_back(message);
    }

    /// Takes the oldest message from a stage; none if it has not been sent yet.
    pub(super) fn receive(
        &mut self,
        to: &Rank<'p>,
        stage: usize,
        length: u64,
        dtype: DType,
    ) -> Option<Label> {
        let from = self.class_at([stage, to.program.context, to.program.tensor]);
        let message = self.mail.get_mut(&(from, to.class))?.pop_front()?;
        if message.length != length || message.dtype != dtype {
            let Message { length: sent, dtype: other, name, .. } = &message;
            let text = format!(
                "receives {length} bytes of {dtype} where stage {stage} sends `{name}`, {sent} \
                 bytes of {other}"
            );
            self.findings.add_at(self.setup, "E2119", to.at(), text);
        }
        Some(message.label)
    }

    /// Notes that a rank waits in a collective.
    pub(super) fn arrive(&mut self, rank: &Rank<'p>, collective: &'p Instruction, offer: Labelled) {
        let Instruction::Collective { group, .. } = collective else { return };
        let members = self.members(rank.class, group);
        let place = self.setup.describe(rank.at());
        let arrival = Arrival { class: rank.class, collective, offer, place };
        self.meetings.entry(members).or_default().push(arrival);
    }

    /// Ends the collectives at which all members have arrived.
    fn settle(&mut self, ranks: &mut [Rank<'p>]) -> bool {
        let is_complete = |(members, arrived): (&Members, &Vec<Arrival<'p>>)| {
            (members.0.len() == arrived.len()).then(|| members.clone())
        };
        let complete: Vec<Members> = self.meetings.iter().filter_map(is_complete).collect();
        for members in &complete {
            let arrived = self.meetings.remove(members).unwrap_or_default();
            if let Some(other) =
                arrived.iter().find(|a| !agree(a.collective, arrived[0].collective))
            {
                let calls = [&arrived[0], other].map(|a| describe(a.collective));
                let headline = format!("{} meets {}", calls[0], calls[1]);
                let found = Diagnostic::error("E2118", Span::of(&arrived[0].place), headline)
                    .note(format!("the other is {}", other.place));
                self.findings.push(found);
                self.is_broken = true;
                return false;
            }
            let parts = self.merge(&arrived);
            let all = parts.iter().map(|(_, label)| *label);
            let label = all.fold(Labels::NONE, |union, label| self.labels.union(union, label));
            let alike = self.are_alike(&arrived, &parts);
            let unlike = || "members have terms of other micro-batches".to_owned();
            if let Some(fault) = self.labels.fault(label).or((!alike).then(unlike)) {
                let at = ranks[arrived[0].class].at();
                self.findings.add_at(self.setup, "E2113", at, fault);
            }
            for arrival in &arrived {
                ranks[arrival.class].conclude(self, label, &parts);
            }
        }
        !complete.is_empty()
    }

    /// The labels of what all members put in, byte by byte.
    fn merge(&mut self, arrived: &[Arrival<'p>]) -> Labelled {
        let all = || arrived.iter().flat_map(|arrival| &arrival.offer);
        let mut bounds: Vec<u64> = all().flat_map(|(range, _)| [range.start, range.end]).collect();
        bounds.sort_unstable();
        bounds.dedup();
        let mut merged: Labelled = bounds.windows(2).map(|w| (w[0]..w[1], Labels::NONE)).collect();
        for (range, label) in all() {
            let first = merged.partition_point(|(part, _)| part.start < range.start);
            for (part, union) in &mut merged[first..] {
                if part.start >= range.end {
                    break;
                }
                *union = self.labels.union(*union, *label);
            }
        }
        merged
    }

    /// Whether members put in values of the same micro-batches, or none of any.
    fn are_alike(&self, arrived: &[Arrival<'p>], merged: &Labelled) -> bool {
        let fits = |(range, label): &(Range<u64>, Label)| {
            let first = merged.partition_point(|(part, _)| part.start < range.start);
            let parts = merged[first..].iter().take_while(|(part, _)| part.start < range.end);
            *label == Labels::NONE || parts.clone().all(|(_, union)| union == label)
        };
        arrived.iter().flat_map(|arrival| &arrival.offer).all(fits)
    }

    fn report_deadlock(&mut self, ranks: &[Rank<'p>]) {
        let waiting = ranks.iter().filter(|rank| !rank.is_done(self.setup.phase));
        let mut found =
            Diagnostic::error("E2120", Span::of("programs"), "ranks wait for each other");
        for rank in waiting.take(8) {
            found = found.note(format!("{} waits", self.setup.describe(rank.at())));
        }
        self.findings.push(found);
    }

    fn report_unread(&mut self, ranks: &[Rank<'p>]) {
        for ((from, _), mail) in &self.mail {
            if let Some(message) = mail.front() {
                let text = format!("`{}` is sent and never received", message.name);
                self.findings.add_at(self.setup, "E2119", ranks[*from].at(), text);
            }
        }
    }
}

/// Whether two members make the same call; each puts in elements of its own number.
fn agree(a: &Instruction, b: &Instruction) -> bool {
    let (
        Instruction::Collective { exchange: x, dtype: p, exchanged: s, elements: m, .. },
        Instruction::Collective { exchange: y, dtype: q, exchanged: t, elements: n, .. },
    ) = (a, b)
    else {
        return false;
    };
    let same_length = !matches!(x, Exchange::AllReduce(_)) || m == n;
    x == y && p == q && s == t && same_length
}

fn describe(collective: &Instruction) -> String {
    let Instruction::Collective { exchange, dtype, exchanged, elements, .. } = collective else {
        return String::new();
    };
    let kind = match exchange {
        Exchange::AllReduce(combiner) => {
            let form = if exchanged == dtype { String::new() } else { format!(" as {exchanged}") };
            return format!("an all-reduce {} of {elements} {dtype}{form}", combiner.name());
        }
        Exchange::AllGather { counts, .. } => ("all-gather", counts),
        Exchange::ReduceScatter { counts, .. } => ("reduce-scatter", counts),
        Exchange::AllToAll { pieces } => {
            return format!("an all-to-all of {elements} {dtype} in {pieces} pieces");
        }
        Exchange::Dispatch(Routed { pieces, rows, width, .. }) => {
            return format!("a dispatch of {rows} rows of {width} {dtype} to {pieces} ranks");
        }
        Exchange::Combine(Routed { pieces, rows, width, .. }) => {
            return format!("a combination of {rows} rows of {width} {dtype} of {pieces} ranks");
        }
    };
    let counts: Vec<String> = kind.1.iter().map(ToString::to_string).collect();
    format!("an {} of {dtype} in pieces of {}", kind.0, counts.join(", "))
}
