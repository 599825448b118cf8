//! Mistakes that a compiler could make. Each is planted at the `site`-th place that it fits, and
//! none where there are fewer.

use codegen::compile::Compiled;
use ir::program::{
    ALIGNMENT, BufferId, Contents, Exchange, Feed, Group, Instruction, Program, Ref, Routine,
    ShardRole, Step,
};
use ir::{Axis, DType};
use kernels::Kernel;

/// The most places of one kind that are tried.
pub(super) const SITES_MAX: usize = 12;

pub(super) type Plant = fn(&mut Compiled, usize) -> bool;

pub(super) const ALL: [(&str, Plant); 33] = [
    ("two dependent calls change places", swap_calls),
    ("a call is left out", |c, site| drop_step(c, site, is_layer_call)),
    ("a call is made twice", double_call),
    ("a send is left out", |c, site| drop_step(c, site, is_send)),
    ("a receive is left out", |c, site| drop_step(c, site, is_receive)),
    ("a receive comes first", receive_first),
    ("a fill is left out", drop_fill),
    ("a feed is left out", |c, site| drop_step(c, site, is_feed)),
    ("a feed is of another micro-batch", feed_another),
    ("an update is left out", |c, site| drop_step(c, site, |p, s| calls(p, s, "update"))),
    ("an update comes before the last micro-batch", update_early),
    ("gradients are not reduced", drop_reduction),
    ("gradients are reduced twice", double_reduction),
    ("one class leaves a reduction out", |c, site| {
        drop_step(c, site, |p, s| calls(p, s, "reduce"))
    }),
    ("pieces are not exchanged", |c, site| drop_step(c, site, exchanges_pieces)),
    ("a piece is of another bucket", exchange_another_piece),
    ("pieces are not added", |c, site| drop_step(c, site, |p, s| calls(p, s, "add"))),
    ("the norms of pieces are not summed", drop_sum_of_pieces),
    ("slots change places", swap_slots),
    ("a slot is left out", drop_slot),
    ("a frame is left out", drop_frame),
    ("a buffer shares bytes with a parameter", overlap_parameter),
    ("two locals share bytes", overlap_locals),
    ("a buffer is not aligned", |c, site| shift_buffer(c, site, false, 4)),
    ("a view begins an element late", |c, site| shift_buffer(c, site, true, 4)),
    ("the arena is too small", shrink_arena),
    ("a launch is left out", drop_launch),
    ("a kernel is another one", swap_kernel),
    ("a kernel overwrites a sum", drop_accumulate),
    ("a piece has another size", change_counts),
    ("a collective has another element type", change_dtype),
    ("a sum is rounded on its way", round_exchange),
    ("a reference points beyond", point_beyond),
];

/// Those of them that programs for inference can have, and some of their own.
pub(super) const OF_INFERENCE: [(&str, Plant); 9] = [
    ("a buffer shares bytes with a parameter", overlap_parameter),
    ("two locals share bytes", overlap_locals),
    ("a launch is left out", drop_launch),
    ("a kernel is another one", swap_kernel),
    ("a piece has another size", change_counts),
    ("a collective has another element type", change_dtype),
    ("a reference points beyond", point_beyond),
    ("a step of an entry is left out", drop_step_of_entry),
    ("an entry gives what it has not computed", give_another),
];

/// Mistakes that one rule is there for, and its code.
pub(super) const OF_ONE_RULE: [(&str, &str, Plant); 4] = [
    ("E2106", "a launch passes scalars that its kernel does not admit", pass_beyond),
    ("E2109", "a launch writes where it reads", write_where_it_reads),
    ("E2109", "a launch writes behind what it reads", write_behind),
    ("E2110", "a view is of bytes that come and go", view_of_transient),
];

/// Mistakes in the workspaces of programs for GPUs, and how the codes begin that find them.
pub(super) const OF_WORKSPACES: [(&str, &str, Plant); 4] = [
    ("E2123", "a workspace is left out", drop_workspace),
    ("E2123", "a workspace is too small", shrink_workspace),
    ("E2109", "a workspace lies in what its launch reads", |c, site| move_workspace(c, site, true)),
    ("E21", "a workspace lies in what is read later", |c, site| move_workspace(c, site, false)),
];

/// The launches with a workspace, and which local that is.
fn workspaces(c: &Compiled) -> Vec<(usize, usize, usize, usize)> {
    let mut places = Vec::new();
    for (program, routine, at) in instructions_where(c, is_launch) {
        let there = &c.programs[program].routines[routine].instructions[at];
        if let Instruction::Launch { workspace: Some(Ref::Local(local)), .. } = there {
            places.push((program, routine, at, *local as usize));
        }
    }
    places
}

fn drop_workspace(c: &mut Compiled, site: usize) -> bool {
    let Some((program, routine, at, _)) = pick(&workspaces(c), site) else { return false };
    let instruction = &mut c.programs[program].routines[routine].instructions[at];
    if let Instruction::Launch { workspace, .. } = instruction {
        *workspace = None;
    }
    true
}

fn shrink_workspace(c: &mut Compiled, site: usize) -> bool {
    let Some((program, routine, _, local)) = pick(&workspaces(c), site) else { return false };
    c.programs[program].routines[routine].locals[local].bytes -= 1;
    true
}

/// Moves a workspace to where a local begins that its launch reads, or one that it does not touch
/// and that is read after it was written before.
fn move_workspace(c: &mut Compiled, site: usize, reads: bool) -> bool {
    let mut places = Vec::new();
    for (program, routine, at, workspace) in workspaces(c) {
        let there = &c.programs[program].routines[routine];
        let used = |range: &[Instruction], wanted: fn(&Instruction) -> Vec<Ref>| -> Vec<usize> {
            let local = |of: Ref| match of {
                Ref::Local(at) => Some(at as usize),
                Ref::Slot(_) => None,
            };
            range.iter().flat_map(wanted).filter_map(local).collect()
        };
        let (before, after) = (&there.instructions[..at], &there.instructions[at + 1..]);
        let read = used(&there.instructions[at..=at], inputs_of);
        let candidates = if reads {
            read
        } else {
            let touched = [read, used(&there.instructions[at..=at], outputs_of)].concat();
            let written = used(before, outputs_of);
            let later = used(after, inputs_of).into_iter();
            later.filter(|of| written.contains(of) && !touched.contains(of)).collect()
        };
        // A whole, so that it stays in its frame.
        let fits = |of: &usize| {
            let (of, own) = (&there.locals[*of], &there.locals[workspace]);
            of.within.is_none() && of.offset + own.bytes <= there.frame_bytes
        };
        places
            .extend(candidates.into_iter().find(fits).map(|of| (program, routine, workspace, of)));
    }
    let Some((program, routine, workspace, of)) = pick(&places, site) else { return false };
    let locals = &mut c.programs[program].routines[routine].locals;
    locals[workspace].offset = locals[of].offset;
    true
}

fn inputs_of(instruction: &Instruction) -> Vec<Ref> {
    match instruction {
        Instruction::Launch { inputs, .. } => inputs.clone(),
        Instruction::Collective { input, gates, .. } => {
            [*input].into_iter().chain(*gates).collect()
        }
    }
}

fn outputs_of(instruction: &Instruction) -> Vec<Ref> {
    match instruction {
        Instruction::Launch { outputs, .. } => outputs.clone(),
        Instruction::Collective { output, .. } => vec![*output],
    }
}

fn drop_step_of_entry(c: &mut Compiled, site: usize) -> bool {
    let mut places = Vec::new();
    for (at, program) in c.programs.iter().enumerate() {
        for (entry, there) in program.entries.iter().enumerate() {
            places.extend((0..there.steps.len()).map(|step| (at, entry, step)));
        }
    }
    let Some((program, entry, step)) = pick(&places, site) else { return false };
    c.programs[program].entries[entry].steps.remove(step);
    true
}

fn give_another(c: &mut Compiled, site: usize) -> bool {
    let mut entries = c.programs.iter_mut().flat_map(|program| &mut program.entries);
    let Some(entry) = entries.by_ref().filter(|e| !e.outputs.is_empty()).nth(site) else {
        return false;
    };
    entry.outputs[0] = BufferId(if site.is_multiple_of(2) { 0 } else { u32::MAX });
    true
}

/// The places of something in all steps of a training step, as (program, step).
fn steps_where(
    compiled: &Compiled,
    wanted: impl Fn(&Program, &Step) -> bool,
) -> Vec<(usize, usize)> {
    let mut places = Vec::new();
    for (at, program) in compiled.programs.iter().enumerate() {
        for (step, there) in program.steps.iter().enumerate() {
            if wanted(program, there) {
                places.push((at, step));
            }
        }
    }
    places
}

/// Spreads sites over all places rather than over the first ones.
pub(super) fn pick<T: Copy>(places: &[T], site: usize) -> Option<T> {
    let stride = places.len().div_ceil(SITES_MAX).max(1);
    places.get(site * stride).copied()
}

fn calls(program: &Program, step: &Step, name: &str) -> bool {
    matches!(step, Step::Call { routine, .. } if program.routines[*routine].name == name)
}

fn is_layer_call(program: &Program, step: &Step) -> bool {
    let Step::Call { routine, .. } = step else { return false };
    let name = program.routines[*routine].name.as_str();
    let ends = ["fill", "seed", "reduce", "squares", "scale", "update", "add"];
    !ends.contains(&name) && !exchanges_pieces(program, step)
}

fn exchanges_pieces(program: &Program, step: &Step) -> bool {
    calls(program, step, "reduce-scatter") || calls(program, step, "all-gather")
}

fn is_send(_: &Program, step: &Step) -> bool {
    matches!(step, Step::Send { .. })
}

fn is_receive(_: &Program, step: &Step) -> bool {
    matches!(step, Step::Receive { .. })
}

/// The first feed of a buffer: later ones may repeat what is still there.
fn is_feed(_: &Program, step: &Step) -> bool {
    matches!(step, Step::Feed { feed: Feed::Scalars | Feed::Key { .. }, microbatch: 0, .. })
}

fn drop_step(c: &mut Compiled, site: usize, wanted: fn(&Program, &Step) -> bool) -> bool {
    let Some((program, step)) = pick(&steps_where(c, wanted), site) else { return false };
    c.programs[program].steps.remove(step);
    true
}

fn swap_calls(c: &mut Compiled, site: usize) -> bool {
    let mut places = steps_where(c, is_layer_call);
    places.retain(|(program, step)| {
        let program = &c.programs[*program];
        program.steps.get(step + 1).is_some_and(|next| is_layer_call(program, next))
    });
    let Some((program, step)) = pick(&places, site) else { return false };
    c.programs[program].steps.swap(step, step + 1);
    true
}

fn double_call(c: &mut Compiled, site: usize) -> bool {
    let Some((program, step)) = pick(&steps_where(c, is_layer_call), site) else { return false };
    let again = c.programs[program].steps[step].clone();
    c.programs[program].steps.insert(step, again);
    true
}

/// The first stage waits for what its own message would bring.
fn receive_first(c: &mut Compiled, site: usize) -> bool {
    let places = steps_where(c, |p, s| p.stage == 0 && is_receive(p, s));
    let Some((program, step)) = pick(&places, site) else { return false };
    let receive = c.programs[program].steps.remove(step);
    c.programs[program].steps.insert(0, receive);
    true
}

/// What is added to must be clear; constants are left, as nothing reads some of them, and terms of
/// later micro-batches, between which zeros may stay.
fn drop_fill(c: &mut Compiled, site: usize) -> bool {
    let mut places = steps_where(c, |program, step| {
        let Step::Call { slots, .. } = step else { return false };
        let name = &program.buffers[slots[0].0 as usize].name;
        calls(program, step, "fill") && ["grads", "stats", "terms"].contains(&name.as_str())
    });
    let mut filled = Vec::new();
    places.retain(|(program, step)| {
        let Step::Call { slots, .. } = &c.programs[*program].steps[*step] else { return false };
        let is_first = !filled.contains(&(*program, slots[0]));
        filled.push((*program, slots[0]));
        is_first
    });
    let Some((program, step)) = pick(&places, site) else { return false };
    c.programs[program].steps.remove(step);
    true
}

fn feed_another(c: &mut Compiled, site: usize) -> bool {
    let fed = |_: &Program, step: &Step| {
        matches!(step, Step::Feed { feed: Feed::Tokens | Feed::Labels | Feed::Key { .. }, .. })
    };
    let Some((program, step)) = pick(&steps_where(c, fed), site) else { return false };
    if let Step::Feed { microbatch, .. } = &mut c.programs[program].steps[step] {
        *microbatch = (*microbatch + 1) % 3;
    }
    true
}

fn update_early(c: &mut Compiled, site: usize) -> bool {
    let updates = steps_where(c, |p, s| calls(p, s, "update"));
    let Some((program, step)) = pick(&updates, site) else { return false };
    let program = &mut c.programs[program];
    let last = program.steps.iter().rposition(|s| matches!(s, Step::Feed { .. }));
    let update = program.steps.remove(step);
    program.steps.insert(last.unwrap_or(0), update);
    true
}

/// A bucket scatters to, or is gathered from, the piece of one that is no smaller.
fn exchange_another_piece(c: &mut Compiled, site: usize) -> bool {
    // Where the piece is among the slots: a scatter has it last, a gather first.
    let piece = |program: &Program, step: usize| {
        let is_scatter = calls(program, &program.steps[step], "reduce-scatter");
        let slot = usize::from(is_scatter);
        match &program.steps[step] {
            Step::Call { slots, .. } => (is_scatter, slot, slots[slot]),
            Step::Feed { .. }
            | Step::Send { .. }
            | Step::Receive { .. }
            | Step::Move { .. }
            | Step::Await { .. } => {
                unreachable!("pieces are exchanged by calls")
            }
        }
    };
    let mut places = Vec::new();
    for (at, program) in c.programs.iter().enumerate() {
        let steps = 0..program.steps.len();
        let steps = steps.filter(|step| exchanges_pieces(program, &program.steps[*step]));
        let pieces: Vec<_> = steps.map(|step| (step, piece(program, step))).collect();
        let bytes = |id: BufferId| program.buffers[id.0 as usize].bytes;
        for &(step, (is_scatter, slot, own)) in &pieces {
            let others = pieces.iter().filter(|(other, (kind, _, id))| {
                // Several calls gather the same piece.
                *other != step && *id != own && *kind == is_scatter && bytes(*id) >= bytes(own)
            });
            places.extend(others.map(|(_, (_, _, id))| (at, step, slot, *id)));
        }
    }
    let Some((program, step, slot, other)) = pick(&places, site) else { return false };
    if let Step::Call { slots, .. } = &mut c.programs[program].steps[step] {
        slots[slot] = other;
    }
    true
}

fn drop_sum_of_pieces(c: &mut Compiled, site: usize) -> bool {
    let sums = |program: &Program, step: &Step| {
        let Step::Call { routine, slots, .. } = step else { return false };
        let over_data = |i: &Instruction| {
            matches!(i, Instruction::Collective { group: Group::Axis(Axis::Dp), .. })
        };
        let name = &program.buffers[slots[0].0 as usize].name;
        name == "grad_squares" && program.routines[*routine].instructions.iter().any(over_data)
    };
    drop_step(c, site, sums)
}

/// The reductions of a step, in the order in which all classes make them, but for those over
/// tensor-parallel ranks, which are not checked.
fn reductions(program: &Program) -> Vec<usize> {
    let is_checked = |step: &Step| {
        let Step::Call { routine, .. } = step else { return false };
        let over_tensor = |i: &Instruction| {
            matches!(i, Instruction::Collective { group: Group::Axis(Axis::Tp), .. })
        };
        !program.routines[*routine].instructions.iter().any(over_tensor)
    };
    let reduces = |step: &Step| calls(program, step, "reduce") && is_checked(step);
    let steps = program.steps.iter().enumerate();
    steps.filter(|(_, step)| reduces(step)).map(|(at, _)| at).collect()
}

fn drop_reduction(c: &mut Compiled, site: usize) -> bool {
    if !c.programs.iter().all(|p| site < reductions(p).len()) || site > 1 {
        return false;
    }
    for program in &mut c.programs {
        let step = reductions(program)[site];
        program.steps.remove(step);
    }
    true
}

fn double_reduction(c: &mut Compiled, site: usize) -> bool {
    if !c.programs.iter().all(|p| site < reductions(p).len()) || site > 1 {
        return false;
    }
    for program in &mut c.programs {
        let step = reductions(program)[site];
        let again = program.steps[step].clone();
        program.steps.insert(step, again);
    }
    true
}

/// The last value that is read and the first that is written, of equal size.
fn swap_slots(c: &mut Compiled, site: usize) -> bool {
    let places = steps_where(c, |program, step| {
        let Step::Call { slots, .. } = step else { return false };
        is_layer_call(program, step) && activations(program, slots).len() > 1
    });
    let Some((program, step)) = pick(&places, site) else { return false };
    let program = &mut c.programs[program];
    let Step::Call { slots, .. } = &mut program.steps[step] else { return false };
    let bytes = |id: BufferId| program.buffers[id.0 as usize].bytes;
    let among: Vec<usize> = (0..slots.len())
        .filter(|at| program.buffers[slots[*at].0 as usize].contents == Contents::Activation)
        .collect();
    let (a, b) = (among[0], among[among.len() - 1]);
    let differ = bytes(slots[a]) != bytes(slots[b]) || slots[a] != slots[b];
    slots.swap(a, b);
    differ
}

fn activations(program: &Program, slots: &[BufferId]) -> Vec<BufferId> {
    let is_activation =
        |id: &&BufferId| program.buffers[id.0 as usize].contents == Contents::Activation;
    slots.iter().filter(is_activation).copied().collect()
}

fn drop_slot(c: &mut Compiled, site: usize) -> bool {
    let Some((program, step)) = pick(&steps_where(c, is_layer_call), site) else { return false };
    if let Step::Call { slots, .. } = &mut c.programs[program].steps[step] {
        slots.remove(site % slots.len());
    }
    true
}

fn drop_frame(c: &mut Compiled, site: usize) -> bool {
    let framed = |_: &Program, step: &Step| matches!(step, Step::Call { frame: Some(_), .. });
    let Some((program, step)) = pick(&steps_where(c, framed), site) else { return false };
    if let Step::Call { frame, .. } = &mut c.programs[program].steps[step] {
        *frame = None;
    }
    true
}

/// Buffers by program, for which something holds.
fn buffers_where(c: &Compiled, wanted: fn(&Contents) -> bool) -> Vec<(usize, usize)> {
    let mut places = Vec::new();
    for (at, program) in c.programs.iter().enumerate() {
        let there = program.buffers.iter().enumerate();
        places.extend(there.filter(|(_, b)| wanted(&b.contents)).map(|(b, _)| (at, b)));
    }
    places
}

fn overlap_parameter(c: &mut Compiled, site: usize) -> bool {
    let transient = |contents: &Contents| {
        matches!(contents, Contents::Activation | Contents::Frame | Contents::Feed(_))
    };
    let Some((program, buffer)) = pick(&buffers_where(c, transient), site) else { return false };
    let program = &mut c.programs[program];
    let is_parameter = |contents: &Contents| {
        let is_master =
            matches!(contents, Contents::Shard { role, .. } if *role == ShardRole::Master);
        is_master || matches!(contents, Contents::Param(_))
    };
    let param = program.buffers.iter().find(|b| is_parameter(&b.contents));
    let Some(offset) = param.map(|param| param.offset) else { return false };
    program.buffers[buffer].offset = offset;
    true
}

fn shift_buffer(c: &mut Compiled, site: usize, is_view: bool, bytes: u64) -> bool {
    let places = match is_view {
        true => views(c),
        false => buffers_where(c, |contents| *contents != Contents::View),
    };
    let Some((program, buffer)) = pick(&places, site) else { return false };
    c.programs[program].buffers[buffer].offset += bytes;
    true
}

/// The views that something uses: others may lie anywhere.
fn views(c: &Compiled) -> Vec<(usize, usize)> {
    let mut places = buffers_where(c, |contents| *contents == Contents::View);
    places.retain(|(program, buffer)| {
        let passes = |step: &Step| match step {
            Step::Call { slots, .. } => slots.iter().any(|id| id.0 as usize == *buffer),
            Step::Feed { .. }
            | Step::Send { .. }
            | Step::Receive { .. }
            | Step::Move { .. }
            | Step::Await { .. } => false,
        };
        c.programs[*program].steps.iter().any(passes)
    });
    places
}

/// A view is of bytes that come and go.
fn view_of_transient(c: &mut Compiled, site: usize) -> bool {
    let holds = |program: &Program, view: usize| {
        let bytes = program.buffers[view].bytes;
        let mut there = program.buffers.iter();
        let transient =
            |contents: &Contents| matches!(contents, Contents::Activation | Contents::Frame);
        there.find(|b| transient(&b.contents) && b.bytes >= bytes).map(|b| b.offset)
    };
    let mut places = views(c);
    places.retain(|(program, view)| holds(&c.programs[*program], *view).is_some());
    let Some((program, view)) = pick(&places, site) else { return false };
    let program = &mut c.programs[program];
    program.buffers[view].offset = holds(program, view).unwrap_or(0);
    true
}

/// The launches of routines with an input and an output in locals, which may be one or may not.
fn locals_of_launches(c: &Compiled, in_place: bool) -> Vec<(usize, usize, [usize; 2])> {
    let mut places = Vec::new();
    for (program, routine, at) in instructions_where(c, is_launch) {
        let there = &c.programs[program].routines[routine];
        let Instruction::Launch { kernel, inputs, outputs, .. } = &there.instructions[at] else {
            continue;
        };
        let allowed = c.kernels[*kernel].in_place();
        for (i, input) in inputs.iter().enumerate() {
            for (o, output) in outputs.iter().enumerate() {
                let (Ref::Local(a), Ref::Local(b)) = (input, output) else { continue };
                if a != b && allowed.contains(&(i, o)) == in_place {
                    places.push((program, routine, [*a as usize, *b as usize]));
                }
            }
        }
    }
    places
}

/// A launch writes where it reads, though not point by point alike.
fn write_where_it_reads(c: &mut Compiled, site: usize) -> bool {
    let places = locals_of_launches(c, false);
    let Some((program, routine, [input, output])) = pick(&places, site) else { return false };
    let locals = &mut c.programs[program].routines[routine].locals;
    locals[output].offset = locals[input].offset;
    true
}

/// A launch that may work in place writes a little behind what it reads.
fn write_behind(c: &mut Compiled, site: usize) -> bool {
    let mut places = locals_of_launches(c, true);
    places.retain(|(program, routine, [input, _])| {
        c.programs[*program].routines[*routine].locals[*input].bytes > ALIGNMENT
    });
    let Some((program, routine, [input, output])) = pick(&places, site) else { return false };
    let locals = &mut c.programs[program].routines[routine].locals;
    locals[output].offset = locals[input].offset + ALIGNMENT;
    true
}

fn shrink_arena(c: &mut Compiled, site: usize) -> bool {
    let Some(program) = c.programs.get_mut(site) else { return false };
    program.arena_bytes -= 64;
    true
}

/// The instructions of all routines for which something holds, as (program, routine, instruction).
pub(super) fn instructions_where(
    c: &Compiled,
    wanted: impl Fn(&Instruction) -> bool,
) -> Vec<(usize, usize, usize)> {
    let mut places = Vec::new();
    for (at, program) in c.programs.iter().enumerate() {
        for (routine, there) in program.routines.iter().enumerate() {
            let instructions = there.instructions.iter().enumerate();
            let found = instructions.filter(|(_, i)| wanted(i));
            places.extend(found.map(|(instruction, _)| (at, routine, instruction)));
        }
    }
    places
}

fn is_launch(instruction: &Instruction) -> bool {
    matches!(instruction, Instruction::Launch { .. })
}

/// A scalar is beyond what the kernel was verified for, or there is one too many or too few.
fn pass_beyond(c: &mut Compiled, site: usize) -> bool {
    let passes =
        |i: &Instruction| matches!(i, Instruction::Launch { scalars, .. } if !scalars.is_empty());
    let Some((program, routine, at)) = pick(&instructions_where(c, passes), site) else {
        return false;
    };
    let instruction = &mut c.programs[program].routines[routine].instructions[at];
    if let Instruction::Launch { kernel, scalars, .. } = instruction {
        let admitted = c.kernels[*kernel].scalars().expect("the kernel is sound");
        match site % 4 {
            0 => scalars[0] = admitted[0].end() + 1,
            1 => scalars[0] = admitted[0].start() - 1,
            2 => scalars.push(0),
            _ => scalars.clear(),
        }
    }
    true
}

/// Two locals that one launch reads get one place.
fn overlap_locals(c: &mut Compiled, site: usize) -> bool {
    let locals = |instruction: &Instruction| -> Vec<usize> {
        let Instruction::Launch { inputs, .. } = instruction else { return Vec::new() };
        let local = |r: &Ref| if let Ref::Local(at) = r { Some(*at as usize) } else { None };
        let mut used: Vec<usize> = inputs.iter().filter_map(local).collect();
        used.sort_unstable();
        used.dedup();
        used
    };
    let places = instructions_where(c, |i| locals(i).len() > 1);
    let Some((program, routine, at)) = pick(&places, site) else { return false };
    let routine = &mut c.programs[program].routines[routine];
    let used = locals(&routine.instructions[at]);
    routine.locals[used[0]].offset = routine.locals[used[1]].offset;
    true
}

fn drop_launch(c: &mut Compiled, site: usize) -> bool {
    let places = instructions_where(c, is_launch);
    let Some((program, routine, at)) = pick(&places, site) else { return false };
    let routine = &mut c.programs[program].routines[routine];
    // Constants of which nothing reads some are filled by one routine.
    if routine.name == "fill" {
        routine.slots[0].1 += 1 << 30;
    }
    routine.instructions.remove(at);
    true
}

/// One that wants more bytes, or fewer arguments.
fn swap_kernel(c: &mut Compiled, site: usize) -> bool {
    let Some((program, routine, at)) = pick(&instructions_where(c, is_launch), site) else {
        return false;
    };
    let bytes =
        |k: &Kernel| k.inputs().iter().chain(&k.outputs()).map(|a| a.bytes()).sum::<usize>();
    let largest = (0..c.kernels.len()).max_by_key(|at| bytes(&c.kernels[*at])).unwrap_or(0);
    let instruction = &mut c.programs[program].routines[routine].instructions[at];
    if let Instruction::Launch { kernel, .. } = instruction {
        let small = c.kernels.iter().position(|k| k.inputs().len() > 3);
        *kernel = if *kernel == largest { small.unwrap_or(0) } else { largest };
    }
    true
}

fn drop_accumulate(c: &mut Compiled, site: usize) -> bool {
    // What comes first may as well overwrite the zero that it is added to: of the squares, and of
    // the statistics where there is one micro-batch.
    let later = |step: &Step| matches!(step, Step::Feed { microbatch, .. } if *microbatch > 0);
    let has_later = c.programs.iter().flat_map(|p| &p.steps).any(later);
    let matters = |r: &&Routine| r.name != "squares" && (has_later || r.name.ends_with("backward"));
    let routines = c.programs.iter().flat_map(|p| &p.routines).filter(matters);
    let used: Vec<usize> = routines
        .flat_map(|r| &r.instructions)
        .filter_map(|i| match i {
            Instruction::Launch { kernel, .. } => Some(*kernel),
            Instruction::Collective { .. } => None,
        })
        .collect();
    let mut places = Vec::new();
    for (at, kernel) in c.kernels.iter_mut().enumerate() {
        let adds = kernel.sums().iter().any(|adds| **adds);
        if adds && used.contains(&at) {
            places.push(at);
        }
    }
    let Some(kernel) = pick(&places, site) else { return false };
    c.kernels[kernel].sums().into_iter().for_each(|adds| *adds = false);
    true
}

fn change_counts(c: &mut Compiled, site: usize) -> bool {
    let cut = |i: &Instruction| {
        matches!(
            i,
            Instruction::Collective {
                exchange: Exchange::AllGather { .. } | Exchange::ReduceScatter { .. },
                ..
            }
        )
    };
    let Some((program, routine, at)) = pick(&instructions_where(c, cut), site) else {
        return false;
    };
    let instruction = &mut c.programs[program].routines[routine].instructions[at];
    if let Instruction::Collective {
        exchange: Exchange::AllGather { counts, .. } | Exchange::ReduceScatter { counts, .. },
        ..
    } = instruction
    {
        counts[0] -= 1;
        counts[1] += 1;
    }
    true
}

fn round_exchange(c: &mut Compiled, site: usize) -> bool {
    let sums = |i: &Instruction| {
        let Instruction::Collective { exchange, dtype: DType::F32, .. } = i else { return false };
        matches!(exchange, Exchange::AllReduce(_) | Exchange::ReduceScatter { .. })
    };
    let places = instructions_where(c, sums);
    let Some((program, routine, at)) = pick(&places, site) else { return false };
    let instruction = &mut c.programs[program].routines[routine].instructions[at];
    if let Instruction::Collective { exchanged, .. } = instruction {
        *exchanged = DType::BF16;
    }
    true
}

fn change_dtype(c: &mut Compiled, site: usize) -> bool {
    let places = instructions_where(c, |i| !is_launch(i));
    let Some((program, routine, at)) = pick(&places, site) else { return false };
    let instruction = &mut c.programs[program].routines[routine].instructions[at];
    if let Instruction::Collective { dtype, .. } = instruction {
        *dtype = DType::I32;
    }
    true
}

fn point_beyond(c: &mut Compiled, site: usize) -> bool {
    let Some((program, routine, at)) = pick(&instructions_where(c, is_launch), site) else {
        return false;
    };
    let instruction = &mut c.programs[program].routines[routine].instructions[at];
    if let Instruction::Launch { kernel, inputs, outputs, .. } = instruction {
        match (site % 4, inputs.first_mut()) {
            (0, _) => *kernel = usize::MAX,
            (1, Some(input)) => *input = Ref::Slot(u32::MAX),
            (2, Some(input)) => *input = Ref::Local(9999),
            _ => outputs[0] = Ref::Slot(u32::MAX),
        }
    }
    true
}
