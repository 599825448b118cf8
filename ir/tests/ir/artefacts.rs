//! The text forms of random plans and programs read back, whatever their names are.

use std::collections::BTreeMap;

use gantline_ir::DType;
use gantline_ir::lora::{Base, Lora};
use gantline_ir::op::Combiner;
use gantline_ir::plan::{
    ContextForm, ExpertParallel, FunctionPlan, Keep, Mesh, Offload, Optimizer, Place, Plan,
    Prediction, Purpose, Schedule, USUAL_ORDER, Zero,
};
use gantline_ir::precision::{Precision, Products, ROLES};
use gantline_ir::program::{
    Buffer, BufferId, Contents, Entry, Exchange, Experts, Feed, Group, Instruction, LocalBuffer,
    Program, Ref, Routed, Routine, ShardRole, Step, WeightShard,
};
use gantline_ir::sharding::{Axis, Layout, PieceOrder, Sharding};
use gantline_ir::target::Target;
use gantline_ir::text::{parse_plan, parse_program};

use crate::draws::{Draws, seeds};

#[test]
fn random_plans_read_back() {
    for seed in seeds(1000) {
        let plan = plan(&mut Draws::new(seed));
        let text = plan.to_string();
        assert_eq!(parse_plan("text", &text).as_ref(), Ok(&plan), "SEED={seed}\n{text}");
    }
}

#[test]
fn random_programs_read_back() {
    for seed in seeds(500) {
        let program = program(&mut Draws::new(seed));
        let text = program.to_string();
        assert_eq!(parse_program("text", &text).as_ref(), Ok(&program), "SEED={seed}\n{text}");
    }
}

/// A name as people give directories: any character but those that no path has.
fn name(r: &mut Draws) -> String {
    let odd =
        ["on", "of", " on ", " of ", "#", " # ", "\"", "\\", "é", "\t", " ", "\u{85}", "[", "%"];
    let mut name = String::new();
    for _ in 0..1 + r.below(4) {
        name += if r.below(4) == 0 {
            odd[r.below(odd.len())]
        } else {
            ["a", "Q7", "gpt2-", "_.x"][r.below(4)]
        };
    }
    name
}

/// A name of a function or value.
fn word(r: &mut Draws) -> String {
    let mut word = "abcdefgh"[r.below(8)..].to_owned();
    word += ["", ".grad", "_7", ".0.w"][r.below(4)];
    word
}

/// Any finite number.
fn number(r: &mut Draws) -> f64 {
    loop {
        let any = f64::from_bits(r.word());
        let number = [any, r.number(0.0, 1.0), 0.0, -0.0, 1e-8, 5e-324, f64::MAX][r.below(7)];
        if number.is_finite() {
            return number;
        }
    }
}

fn some<T>(r: &mut Draws, most: usize, mut make: impl FnMut(&mut Draws) -> T) -> Vec<T> {
    (0..r.below(most + 1)).map(|_| make(r)).collect()
}

fn dtype(r: &mut Draws) -> DType {
    DType::ALL[r.below(DType::ALL.len())]
}

/// Of one type, or each role of another floating-point one.
fn precision(r: &mut Draws) -> Precision {
    let mut precision = Precision::uniform(dtype(r));
    if r.coin() {
        let floats: Vec<DType> = DType::ALL.into_iter().filter(|d| d.is_float()).collect();
        for role in ROLES {
            let to = floats[r.below(floats.len())].name();
            let to = match role {
                "master" if r.coin() => "none",
                "products" => Products::ALL[r.below(Products::ALL.len())].name(),
                _ => to,
            };
            precision.set(role, to).expect("it is a role and a type");
        }
    }
    precision
}

fn sharding(r: &mut Draws) -> Sharding {
    let layout = |r: &mut Draws| match r.below(3) {
        0 => Layout::Replicated,
        1 => Layout::Cut { dim: r.below(4), unit: 1 + r.below(3) * r.below(64) },
        _ => Layout::Partial(Combiner::ALL[r.below(3)]),
    };
    Sharding::new(Axis::ALL.map(|axis| (axis, layout(r))))
}

fn purpose(r: &mut Draws) -> Purpose {
    match r.below(3) {
        0 => Purpose::Training,
        _ => Purpose::Inference { buckets: (0..=r.below(5)).map(|at| 1 + 7 * at).collect() },
    }
}

fn plan(r: &mut Draws) -> Plan {
    let rate = |r: &mut Draws| number(r).abs();
    let optimizer = match r.coin() {
        true => Optimizer::Sgd { decay: rate(r), decay_biases: rate(r) },
        false => Optimizer::AdamW {
            beta1: rate(r),
            beta2: rate(r),
            eps: rate(r),
            decay: rate(r),
            decay_biases: rate(r),
        },
    };
    let function = |r: &mut Draws| {
        let keep = Keep::ALL[r.below(3)];
        let shardings = some(r, 5, |r| (word(r), sharding(r))).into_iter().collect();
        let mut exceptions: BTreeMap<usize, Keep> =
            some(r, 6, |r| (r.below(12), Keep::ALL[r.below(3)])).into_iter().collect();
        exceptions.retain(|_, other| *other != keep);
        FunctionPlan { exceptions, ..FunctionPlan::new(keep, shardings) }
    };
    let lora = |r: &mut Draws| {
        let targets = some(r, 3, word).into_iter().collect::<Vec<String>>();
        let base = [None, Some(Base::Int8), Some(Base::Nf4)][r.below(3)];
        let targets = if targets.is_empty() { vec!["q".to_owned()] } else { targets };
        Lora { rank: 1 + r.below(64), alpha: 0.5 + r.below(9) as f64, targets, base }
    };
    let prediction = |r: &mut Draws| {
        let origin = ["measured", "fitted", "datasheet", "derived"][r.below(4)].to_owned();
        (word(r), Prediction { value: number(r), origin })
    };
    Plan {
        model: name(r),
        cluster: name(r),
        target: Target::all().nth(r.below(12)),
        mesh: Mesh {
            pp: 1 + r.below(9),
            dp: 1 + r.below(9),
            cp: 1 + r.below(3),
            tp: 1 + r.below(9),
            order: [USUAL_ORDER, [Axis::Pp, Axis::Tp, Axis::Dp, Axis::Cp]][r.below(2)],
        },
        microbatch_size: 1 + r.below(100),
        microbatch_count: 1 + r.below(100),
        seq: r.below(100_000),
        purpose: purpose(r),
        precision: precision(r),
        schedule: Schedule::ALL[r.below(4)],
        context: ContextForm::default(),
        experts: match r.below(4) {
            0 => ExpertParallel::NONE,
            more => ExpertParallel { ep: 1 + more, takes_tp: r.below(2) == 0 },
        },
        zero: match r.below(4) {
            0 => Zero::default(),
            stage => Zero { stage: stage as u8, shard: r.below(3) as u32 },
        },
        offload: Offload {
            optimizer: Place::ALL[r.below(3)],
            parameters: Place::ALL[r.below(3)],
            activations: Place::ALL[r.below(3)],
        },
        stage_ends: (0..1 + r.below(5)).map(|_| r.below(100)).collect(),
        optimizer,
        clip: r.coin().then(|| rate(r).max(5e-324)),
        lora: r.coin().then(|| lora(r)),
        functions: some(r, 3, |r| (word(r), function(r))).into_iter().collect(),
        predictions: some(r, 4, prediction).into_iter().collect(),
    }
}

fn reference(r: &mut Draws) -> Ref {
    let at = r.below(50) as u32;
    if r.coin() { Ref::Slot(at) } else { Ref::Local(at) }
}

fn buffer_id(r: &mut Draws) -> BufferId {
    BufferId(r.below(1000) as u32)
}

fn feed(r: &mut Draws) -> Feed {
    match r.below(6) {
        0 => Feed::Tokens,
        1 => Feed::Labels,
        2 => Feed::Key { path: r.word() as u32 },
        3 => Feed::Scalars,
        4 => Feed::Position,
        5 => Feed::Documents,
        _ => Feed::Last,
    }
}

fn shard_role(r: &mut Draws) -> ShardRole {
    match r.below(7) {
        4 => ShardRole::Scale(r.below(3)),
        5 => ShardRole::Term,
        6 => ShardRole::Param,
        0 => ShardRole::Grad,
        1 => ShardRole::Master,
        2 => ShardRole::Rounded,
        _ => ShardRole::State(r.below(3)),
    }
}

fn contents(r: &mut Draws) -> Contents {
    match r.below(15) {
        13 => Contents::Gathered { weight: r.below(9), bucket: buffer_id(r) },
        14 => Contents::Term { weight: r.below(9), bucket: buffer_id(r) },
        12 => Contents::Scale { weight: r.below(9), index: r.below(3) },
        10 => Contents::Master(r.below(9)),
        11 => Contents::Shard { role: shard_role(r), bucket: buffer_id(r) },
        0 => Contents::Param(r.below(9)),
        1 => Contents::Grad(r.below(9)),
        2 => Contents::State { weight: r.below(9), index: r.below(3) },
        3 => Contents::Feed(feed(r)),
        4 => Contents::Stats,
        5 => Contents::Cache(r.below(9)),
        6 => Contents::Output,
        7 => Contents::View,
        8 => Contents::Activation,
        9 => Contents::Part { of: buffer_id(r) },
        _ => Contents::Frame,
    }
}

fn instruction(r: &mut Draws) -> Instruction {
    if r.coin() {
        let (inputs, outputs) = (some(r, 4, reference), some(r, 3, reference));
        let scalars = some(r, 3, |r| r.below(99) as i64 - 9);
        let workspace = r.coin().then(|| reference(r));
        return Instruction::Launch { kernel: r.below(99), scalars, inputs, outputs, workspace };
    }
    let (outer, inner) = (r.below(9), r.below(9));
    let counts = some(r, 4, |r| r.below(99));
    let order = PieceOrder::ALL[r.below(2)];
    let mut routed = || Routed {
        pieces: r.below(9),
        rows: r.below(99),
        width: r.below(99),
        experts: r.below(9),
        top_k: r.below(9),
    };
    let [dispatched, combined] = [routed(), routed()];
    let exchange = match r.below(6) {
        0 => Exchange::AllReduce(Combiner::ALL[r.below(3)]),
        1 => Exchange::AllGather { outer, inner, counts, order },
        2 => Exchange::AllToAll { pieces: r.below(9) },
        3 => Exchange::Dispatch(dispatched),
        4 => Exchange::Combine(combined),
        _ => Exchange::ReduceScatter { outer, inner, counts, order },
    };
    let group = match r.below(7) {
        0 => Group::Axis(Axis::ALL[r.below(4)]),
        1 => Group::Stages(some(r, 4, |r| r.below(8))),
        2 => Group::Data,
        3 => Group::Shards(r.below(9)),
        4 => Group::Copies(r.below(9)),
        5 => Group::Experts(r.below(9)),
        6 => Group::Strided { count: r.below(9), stride: r.below(9) },
        _ => Group::World,
    };
    let input = reference(r);
    let output = if r.coin() { input } else { reference(r) };
    let (dtype, exchanged, elements) = (dtype(r), dtype(r), r.below(1 << 20));
    let gates = r.coin().then(|| reference(r));
    Instruction::Collective { exchange, group, dtype, exchanged, elements, input, output, gates }
}

fn step(r: &mut Draws) -> Step {
    match r.below(6) {
        0 => Step::Feed { feed: feed(r), microbatch: r.below(9), buffer: buffer_id(r) },
        1 => {
            let frame = if r.coin() { Some(buffer_id(r)) } else { None };
            Step::Call { routine: r.below(9), slots: some(r, 5, buffer_id), frame }
        }
        2 => Step::Send { to: r.below(9), buffer: buffer_id(r) },
        3 => Step::Move { from: buffer_id(r), to: buffer_id(r) },
        4 => Step::Await { buffer: buffer_id(r) },
        _ => Step::Receive { from: r.below(9), buffer: buffer_id(r) },
    }
}

fn program(r: &mut Draws) -> Program {
    let shard = |r: &mut Draws| WeightShard {
        name: name(r),
        global: some(r, 4, |r| r.below(999)),
        ranges: some(r, 4, |r| (r.below(99), r.below(99))),
        experts: r.coin().then(|| Experts { dim: r.below(4), ranks: r.below(9) }),
        owned: r.coin(),
    };
    let buffer = |r: &mut Draws| Buffer {
        name: name(r),
        contents: contents(r),
        dtype: dtype(r),
        sizes: some(r, 4, |r| r.below(999)),
        bytes: r.word(),
        offset: r.word(),
    };
    let local = |r: &mut Draws| LocalBuffer {
        name: name(r),
        bytes: r.word(),
        offset: r.word(),
        within: r.coin().then(|| r.below(9) as u32),
    };
    let routine = |r: &mut Draws| Routine {
        name: name(r),
        slots: some(r, 4, |r| (name(r), r.word())),
        locals: some(r, 3, local),
        frame_bytes: r.word(),
        instructions: some(r, 5, instruction),
    };
    let entry = |r: &mut Draws| Entry {
        name: name(r),
        steps: some(r, 5, step),
        outputs: some(r, 2, buffer_id),
    };
    Program {
        name: name(r),
        stage: r.below(9),
        context: r.below(3),
        tensor: r.below(9),
        weights: some(r, 3, shard),
        buffers: some(r, 8, buffer),
        arena_bytes: r.word(),
        host_bytes: if r.coin() { r.word() } else { 0 },
        disk_bytes: if r.coin() { r.word() } else { 0 },
        live_bytes_max: r.word(),
        routines: some(r, 3, routine),
        steps: some(r, 8, step),
        evaluate: some(r, 8, step),
        entries: some(r, 2, entry),
    }
}
