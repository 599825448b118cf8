//! Mutations of the text of every family that synchronises: each barrier, fence, wait, arrival,
//! commit, byte count, parity, descriptor and tensor map is changed once, and the shim reports it
//! or the results have other bits.
//!
//! A family's text is right by the tests beside it; here its own results are the reference, whose
//! bits no order of threads changes. All mutations take minutes, and give the table in
//! `benches/README.md`:
//! `GANTLINE_TEST_EVERY_KERNEL=1 cargo test --workspace --test engines mutation -- --nocapture`,
//! and with `FAMILY=skinny` those whose names have that.

use gantline_kernels::cuda::{
    Arch, Functions, RoutingStep, StagedOperand, TensorMap, Tile, functions_for,
};
use gantline_kernels::{
    Access, Attention, Experts, Family, Instr, Kernel, LoopABC, Output, Product, RowInput, Rows,
    Scales, Tiling,
};
use ir::DType;
use ir::op::Operands;

use crate::flash_warpgroup::windowed;
use crate::shim::{Library, compiler};
use crate::transpose::transposition;
use crate::{Buffer, Case, Random, cuda, runs_all, same_bits, tensor, wide};

/// Orders of threads that each mutation is tried in.
const SEEDS: u64 = 8;
/// Mutations that are compiled into one library.
const AT_ONCE: usize = 24;

/// A changed place of a text, from one byte to another.
#[derive(Clone, Debug, PartialEq)]
struct Mutation {
    /// What stands there, and what is written instead.
    what: String,
    from: usize,
    to: usize,
    text: String,
}

/// The mutations of a text, in its order.
fn mutations(text: &str) -> Vec<Mutation> {
    let mut all: Vec<Mutation> = Vec::new();
    for call in Call::all(text) {
        let mut add = |(from, to): (usize, usize), new: String| {
            let statement = call.statement(text);
            let number = text[..call.start].matches(statement).count();
            let what = format!("`{statement}` number {number}, `{}` is `{new}`", &text[from..to]);
            all.push(Mutation { what, from, to, text: new });
        };
        let changed = |at: usize| &text[call.arguments[at].0..call.arguments[at].1];
        if change_operands(&call, text, &mut add) {
            continue;
        }
        add((call.start, call.end), String::new());
        match call.name {
            "cp_async_wait" | "warpgroup_wait" => {
                let (from, to) = call.template.expect("it says how many groups may be open");
                let last: u32 = text[from..to].parse().expect("a number");
                add((from, to), (last + 1).to_string());
            }
            "mbarrier_init" => {
                let arrivals: u32 = changed(1).parse().expect("a number");
                add(call.arguments[1], (arrivals + 1).to_string());
                if arrivals > 1 {
                    add(call.arguments[1], (arrivals - 1).to_string());
                }
            }
            "mbarrier_expect" => {
                let bytes: u32 = changed(1).parse().expect("a number");
                add(call.arguments[1], (bytes / 2).to_string());
                add(call.arguments[1], (bytes * 2).to_string());
            }
            "mbarrier_wait" => add(call.arguments[1], format!("1 - ({})", changed(1))),
            "wait_for_turn" | "end_turn" => {
                add(call.arguments[1], format!("{} - 1", changed(1)));
                add(call.arguments[1], format!("{} + 1", changed(1)));
            }
            "store_in_cluster" => add(call.arguments[1], format!("({}) / 2", changed(1))),
            "sync_warpgroup" if changed(0) != "1" => add(call.arguments[0], "1".to_owned()),
            _ => {}
        }
        // The stage of a ring.
        if call.name.starts_with("mbarrier_") && call.name != "mbarrier_init" {
            let own = changed(0);
            if let Some((ring, stage)) = own.split_once(" + ") {
                add(call.arguments[0], format!("{ring} + (({stage}) ^ 1)"));
            }
        }
    }
    all
}

/// Adds the mutations of a call that is needed for what it names or says; whether it is one.
fn change_operands(call: &Call, text: &str, add: &mut dyn FnMut((usize, usize), String)) -> bool {
    let changed = |at: usize| &text[call.arguments[at].0..call.arguments[at].1];
    match call.name {
        "matrix_descriptor" => {
            add(call.arguments[0], format!("{} + 1024", changed(0)));
            add(call.arguments[1], format!("{} * 2", changed(1)));
            add(call.arguments[2], format!("{} / 2", changed(2)));
            add(call.arguments[3], "SWIZZLE_128 + 1".to_owned());
        }
        "warpgroup_mma" | "warpgroup_mma_bytes" => {
            for (argument, (from, to)) in call.arguments.iter().enumerate() {
                let own = changed(argument);
                if let Some((start, step)) = own.split_once(" + ") {
                    add((*from, *to), format!("{start} + ({step}) * 2"));
                }
            }
            for (from, to, new) in call.template.map_or(Vec::new(), |of| majors(text, of)) {
                add((from, to), new.to_owned());
            }
        }
        "sync_block_or" | "sync_warpgroup_or" => {
            let said = call.arguments.last().map_or("", |(from, to)| &text[*from..*to]);
            add((call.start, call.end), format!("({said})"));
        }
        "take_ticket" => {
            let counter = changed(0).split_once(" + ").map_or("", |(start, _)| start);
            add(call.arguments[0], counter.to_owned());
            add(call.arguments[1], format!("{} - 1", changed(1)));
            add(call.arguments[1], format!("{} + 1", changed(1)));
        }
        _ => return false,
    }
    true
}

/// The flags of a template that say which rows are along k, and their opposites; or formats of
/// bytes, and others.
fn majors(text: &str, (from, to): (usize, usize)) -> Vec<(usize, usize, &'static str)> {
    if text[from..to].starts_with("f8") {
        let formats = text[from..to].match_indices("e4m3").map(|(at, _)| from + at);
        return formats.map(|at| (at, at + 4, "e5m2")).collect();
    }
    let flags = text[from..to].match_indices(", ").map(|(at, _)| from + at + 2);
    flags.map(|at| (at, at + 1, if &text[at..=at] == "0" { "1" } else { "0" })).collect()
}

/// A call of a part that orders threads or copies, or that names a matrix.
struct Call {
    name: &'static str,
    /// Its first byte, and the one behind the closing parenthesis.
    start: usize,
    end: usize,
    template: Option<(usize, usize)>,
    arguments: Vec<(usize, usize)>,
}

/// The parts whose calls are changed.
const PARTS: [&str; 32] = [
    "sync_block",
    "sync_block_or",
    "sync_warpgroup_or",
    "take_ticket",
    "sync_cluster",
    "store_in_cluster",
    "wait_for_turn",
    "end_turn",
    "sync_warp",
    "sync_warpgroup",
    "cp_async_commit",
    "cp_async_wait",
    "mbarrier_init",
    "mbarrier_init_fence",
    "mbarrier_expect",
    "mbarrier_wait",
    "mbarrier_arrive",
    "fence_proxy_async",
    "warpgroup_fence",
    "warpgroup_commit",
    "warpgroup_wait",
    "warpgroup_mma",
    "warpgroup_mma_bytes",
    "tma_load",
    "tma_store",
    "tma_store_commit",
    "tma_store_wait",
    "tma_store_numbers",
    "tma_add_numbers",
    "tma_store_end",
    "fence_global_async",
    "matrix_descriptor",
];

impl Call {
    /// The calls of a text, in its order.
    fn all(text: &str) -> Vec<Call> {
        let mut all: Vec<Call> = PARTS.iter().flat_map(|name| Call::of(text, name)).collect();
        all.sort_by_key(|call| call.start);
        all
    }

    /// The calls of a part.
    fn of(text: &str, name: &'static str) -> Vec<Call> {
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let found = text.match_indices(name).filter_map(|(start, _)| {
            let mut at = start + name.len();
            if text[..start].ends_with(is_name) || text[at..].starts_with(is_name) {
                return None;
            }
            let mut template = None;
            if text[at..].starts_with('<') {
                let to = at + text[at..].find('>')?;
                template = Some((at + 1, to));
                at = to + 1;
            }
            text[at..].starts_with('(').then_some(())?;
            let mut arguments = vec![(at + 1, at + 1)];
            let mut depth = 0;
            for (place, c) in text[at..].char_indices().map(|(place, c)| (at + place, c)) {
                depth += i32::from(c == '(') - i32::from(c == ')');
                let last = arguments.last_mut().expect("there is an argument");
                last.1 = place;
                match c {
                    ',' if depth == 1 => arguments.push((place + 2, place + 2)),
                    ')' if depth == 0 => {
                        return Some(Call { name, start, end: place + 1, template, arguments });
                    }
                    _ => {}
                }
            }
            None
        });
        found.collect()
    }

    fn statement<'t>(&self, text: &'t str) -> &'t str {
        &text[self.start..self.end]
    }
}

/// A field of a tensor map, changed: its name, and how; it says whether there is one.
type MapMutation = (&'static str, fn(&mut TensorMap) -> bool);

/// All fields of a tensor map.
const MAP_MUTATIONS: [MapMutation; 13] = [
    ("parameter", |map| {
        map.parameter = usize::from(map.parameter == 0);
        true
    }),
    ("size 0", |map| fewer(&mut map.dims, 0)),
    ("size 1", |map| fewer(&mut map.dims, 1)),
    ("size 2", |map| fewer(&mut map.dims, 2)),
    ("size 3", |map| fewer(&mut map.dims, 3)),
    ("stride 1", |map| longer(&mut map.strides_bytes, 0)),
    ("stride 2", |map| longer(&mut map.strides_bytes, 1)),
    ("stride 3", |map| longer(&mut map.strides_bytes, 2)),
    ("box 0", |map| shorter(&mut map.box_dims, 0)),
    ("box 1", |map| shorter(&mut map.box_dims, 1)),
    ("box 2", |map| shorter(&mut map.box_dims, 2)),
    ("box 3", |map| shorter(&mut map.box_dims, 3)),
    ("box 4", |map| shorter(&mut map.box_dims, 4)),
];

/// One row, column or matrix fewer, or half of them.
fn fewer(sizes: &mut [u64], at: usize) -> bool {
    let Some(size) = sizes.get_mut(at).filter(|size| **size > 1) else { return false };
    *size -= (*size / 2).min(4);
    true
}

fn longer(strides: &mut [u64], at: usize) -> bool {
    let Some(stride) = strides.get_mut(at) else { return false };
    *stride -= 16;
    true
}

fn shorter(sizes: &mut [u32], at: usize) -> bool {
    let Some(size) = sizes.get_mut(at) else { return false };
    *size = if *size > 8 { *size - 8 } else { *size + 1 };
    true
}

/// The tensor maps of a tile.
fn maps(tile: &mut Tile) -> Vec<&mut TensorMap> {
    match tile {
        Tile::Warpgroup(tile) => {
            let operands = tile.operands.iter_mut().filter_map(|operand| match operand {
                StagedOperand::Mapped(operand) => Some(&mut operand.map),
                StagedOperand::Copied(..) => None,
            });
            let operands = operands.chain(tile.other.as_mut());
            operands.chain(tile.result.iter_mut().map(|result| &mut result.map)).collect()
        }
        Tile::FlashWarpgroup(tile) => tile.maps.iter_mut().collect(),
        Tile::FlashWarpgroupBackward(tile) => tile.maps.iter_mut().collect(),
        _ => Vec::new(),
    }
}

/// What is planted: in the text of a function, or in its tensor maps.
#[derive(Clone, Debug)]
enum Planted {
    Text { function: usize, mutation: usize },
    Map { function: usize, map: usize, mutation: usize },
}

/// A kernel of a family.
struct Subject {
    family: &'static str,
    case: Case,
    functions: Functions,
    /// Mutations that change no result: words of what is said of them, and why.
    equivalent: Equivalent,
    /// Which of its functions are changed.
    is_changed: fn(&Tile) -> bool,
}

impl Subject {
    fn new(family: &'static str, arch: Arch, kernel: Kernel, equivalent: Equivalent) -> Subject {
        let functions = functions_for(&kernel, arch);
        let case = Case::new(&mut Random::new(5), kernel);
        Subject { family, case, functions, equivalent, is_changed: |_| true }
    }

    /// The same, of which some functions alone are changed.
    fn only(self, is_changed: fn(&Tile) -> bool) -> Subject {
        Subject { is_changed, ..self }
    }

    /// Everything that can be planted, and what is said of it.
    fn planted(&self) -> Vec<(Planted, String)> {
        let mut all = Vec::new();
        let functions = self.functions.functions.iter().enumerate();
        for (number, function) in functions.filter(|(_, of)| (self.is_changed)(&of.tile)) {
            for (at, mutation) in mutations(&function.text("f")).into_iter().enumerate() {
                let planted = Planted::Text { function: number, mutation: at };
                all.push((planted, format!("function {number}: {}", mutation.what)));
            }
            let mut changed = function.clone();
            for (at, map) in maps(&mut changed.tile).into_iter().enumerate() {
                for (mutation, (what, change)) in MAP_MUTATIONS.iter().enumerate() {
                    if change(&mut map.clone()) {
                        let planted = Planted::Map { function: number, map: at, mutation };
                        all.push((planted, format!("function {number}: {} {what}", map.name)));
                    }
                }
            }
        }
        all
    }

    /// The functions with a changed tensor map, if that is what is planted.
    fn with_map(&self, planted: &Planted) -> Functions {
        let mut functions = self.functions.clone();
        if let Planted::Map { function, map, mutation } = planted {
            let map = maps(&mut functions.functions[*function].tile).swap_remove(*map);
            let is_changed = MAP_MUTATIONS[*mutation].1(map);
            assert!(is_changed, "it has the field");
        }
        functions
    }

    /// Which checks find what is planted, one after the other: whether accesses have hooks. What
    /// warpgroups do with shared memory is checked without, sums that blocks share with them alone,
    /// which takes long.
    fn checks(&self) -> &'static [bool] {
        let any =
            |is_it: fn(&Tile) -> bool| self.functions.functions.iter().any(|f| is_it(&f.tile));
        if any(|tile| matches!(tile, Tile::FlashWarpgroupBackward(_))) {
            &[false, true]
        } else if any(|tile| matches!(tile, Tile::Warpgroup(_) | Tile::FlashWarpgroup(_))) {
            &[false]
        } else {
            &[true]
        }
    }

    /// For each of these whether it is found, by some check.
    fn are_found(&self, name: &str, planted: &[Planted]) -> Vec<bool> {
        let mut found = vec![false; planted.len()];
        for with_hooks in self.checks() {
            let left: Vec<usize> = (0..planted.len()).filter(|at| !found[*at]).collect();
            for (chunk, some) in left.chunks(AT_ONCE).enumerate() {
                let hooks = if *with_hooks { "hooks-" } else { "" };
                let name = format!("{name}-{hooks}{chunk}");
                let of: Vec<Planted> = some.iter().map(|at| planted[*at].clone()).collect();
                for (at, is_found) in some.iter().zip(self.find(&name, &of, *with_hooks)) {
                    found[*at] = is_found;
                }
            }
        }
        found
    }

    /// For each of these whether it is found, within all seeds.
    fn find(&self, name: &str, planted: &[Planted], with_hooks: bool) -> Vec<bool> {
        let change = |at: usize, text: String| match at.checked_sub(1).map(|at| &planted[at]) {
            Some(Planted::Text { function, mutation })
                if text.contains(&format!(" k{at}_{function}(")) =>
            {
                let Mutation { from, to, text: new, .. } = &mutations(&text)[*mutation];
                format!("{}{new}{}", &text[..*from], &text[*to..])
            }
            _ => text,
        };
        let kernel = || self.case.kernel.clone();
        let mut all = vec![(kernel(), self.functions.clone())];
        all.extend(planted.iter().map(|planted| (kernel(), self.with_map(planted))));
        let library = match with_hooks {
            false => Library::changed(name, all, &change),
            true => Library::checked(name, all, &change),
        };
        let library = library.expect("there is a compiler");
        let run = |at: usize, seed: u64| {
            let found = self.case.execute(&library, at, seed);
            (found, library.report())
        };
        let (right, none) = run(0, 0);
        assert_eq!(none, None, "{}: without a mutation nothing is found", self.family);
        let is_found = |at: usize, seed: u64| {
            let (found, report) = run(at, seed);
            report.is_some() || found.iter().zip(&right).any(|(a, b)| !same_bits(a, b))
        };
        assert!((0..SEEDS).all(|seed| !is_found(0, seed)), "{}: order matters", self.family);
        (1..=planted.len()).map(|at| (0..SEEDS).any(|seed| is_found(at, seed))).collect()
    }

    /// Why a mutation changes no result.
    fn reason(&self, what: &str) -> Option<&'static str> {
        let is_it =
            |(words, _): &&(&str, &str)| words.split(" .. ").all(|word| what.contains(word));
        self.equivalent.iter().find(is_it).map(|(_, reason)| *reason)
    }
}

/// Sums of columns without a reduction: each warp takes rows of its own.
fn columns() -> Kernel {
    let [rows, cols] = [200, 72];
    let input = RowInput { dtype: DType::F32, access: Access::full(rows, cols) };
    Kernel::Rows(Rows {
        rows,
        cols,
        dtype: DType::F32,
        inputs: vec![input],
        instrs: vec![Instr::Load { input: 0 }],
        outputs: vec![Output::ColSum { value: 0, accumulate: false }],
    })
}

fn product(sizes: [usize; 3], dtype: DType, change: impl Fn(&mut Product)) -> Kernel {
    let [m, n, k] = sizes;
    let mut p = Product::matrix(m, n, k, dtype);
    p.stored.c = DType::F32;
    change(&mut p);
    Kernel::Product(p)
}

/// Rows that are longer than `k`, and two matrices.
fn batched(p: &mut Product) {
    let [_, m, n, k] = p.sizes();
    let row = k.next_multiple_of(8) + 8;
    p.m[0].a = row;
    p.batch.push(LoopABC { size: 2, a: m * row, b: (k + 4) * p.k[0].b, c: m * n });
}

/// Rows of the second operand start at multiples of 4 bytes.
fn unaligned(p: &mut Product) {
    p.k[0].b = p.sizes()[2] + 4;
    batched(p);
}

fn attention(sizes: [usize; 4], change: impl Fn(&mut Attention)) -> Attention {
    let mut a = windowed(&mut Random::new(11), sizes);
    change(&mut a);
    a
}

/// Two heads of queries on one of keys.
fn grouped(a: &mut Attention) {
    let layout = Attention::contiguous(a.keys, 1, a.dim);
    (a.kv_heads, a.group, a.k, a.v) = (1, 2, layout, layout);
}

/// Two samples, whose last query sees the last key.
fn in_two_samples(a: &mut Attention) {
    a.batch = 2;
    a.query_offset = (a.keys - a.queries) as i64;
}

/// Mutations that change no result: words of what is said of them, and why.
type Equivalent = &'static [(&'static str, &'static str)];

const OF_SUMS: Equivalent = &[
    ("function 0: `sync_block()` number 1,", "the barrier before the row's sum is stored remains"),
    ("function 0: `sync_block()` number 2,", "the row's sum is not stored in place of an input"),
];
/// The producer fills stages in order, and readers release them in order: it waits for both of two
/// stages before it fills the first.
const OF_PAIRS: &str = "of two stages both are waited for before the first is filled";
const OF_LEADING: &str = "of a K-major matrix, or of 64 rows, the leading offset is not read";
const OF_TURNS: &str = "stages are released in turn, and filled in order";
/// The wait is there for the compiler, which may then use these registers for others.
const OF_WEIGHTS: &str = "dV is waited for again with dK, and P stays in its registers until then";
const OF_STAGES: Equivalent =
    &[("`16` is `16 * 2`", OF_LEADING), ("mbarrier_wait(empty .. `empty + stage` is", OF_PAIRS)];
const OF_ONE_TILE: Equivalent = &[
    OF_STAGES[0],
    OF_STAGES[1],
    ("`8192` is `8192 * 2`", OF_LEADING),
    ("`empty + (count - 1) % 8` is", "of two stages both are released before the first is filled"),
    ("mbarrier_arrive(empty + (count - 1) % 8)` number 1, .. is ``", "the block ends"),
];
/// As of stages; rows of tokens are transposed in gradients of weights.
const OF_ROWS: Equivalent = &[OF_STAGES[0], OF_STAGES[1], ("`8192` is `8192 * 2`", OF_LEADING)];
/// The last one deadlocks where the producer sleeps while both warpgroups take a whole step, which
/// orders of threads that are tried here do not have: other lengths had one.
const OF_KEYS: Equivalent = &[
    ("`16` is `16 * 2`", OF_LEADING),
    ("mbarrier_wait(k_empty .. `k_empty + stage` is", OF_PAIRS),
    ("mbarrier_wait(v_empty .. `v_empty + stage` is", OF_PAIRS),
    ("`v_empty + (step - 1) % 2` is", "of two stages both are released before the first is filled"),
    ("`k_empty + step % 2` is", OF_TURNS),
];

const OF_GRADIENT: Equivalent = &[
    ("`16` is `16 * 2`", OF_LEADING),
    ("`16384` is `16384 * 2`", OF_LEADING),
    ("mbarrier_wait(stage_empty .. `stage_empty + stage` is", OF_PAIRS),
    ("mbarrier_arrive(stage_empty .. `stage_empty + stage` is", OF_TURNS),
    ("`sync_warp()` number 2,", "all lanes exchange what they have read before one releases it"),
    ("`warpgroup_wait<1>(v_acc)` number 0,", OF_WEIGHTS),
    ("`warpgroup_commit()` number 2,", OF_WEIGHTS),
    ("map stride 3", "there is one sample"),
    ("k_map stride 2", "there is one head of keys"),
    ("v_map stride 2", "there is one head of keys"),
];

/// Tokens, experts, and the sizes of tokens and of what is inside of experts.
const FEW: [usize; 4] = [90, 3, 136, 72];

/// Experts that random gates, of which none is 0, route all tokens to.
fn experts([tokens, experts, model, inner]: [usize; 4], dtype: DType) -> Experts {
    let (top_k, of, accumulate) = (experts, experts, [false; 3]);
    Experts { tokens, experts, model, inner, top_k, of, accumulate, dtype }
}

/// A kernel of each family.
fn subjects() -> Vec<Subject> {
    let older = Arch::Sm80;
    let of = Subject::new;
    let mut all = vec![
        of("softmax, a block a row", older, Kernel::Rows(tensor::softmax()), &[]),
        of("sums of rows, columns and all", older, Kernel::Rows(cuda::sums(280)), OF_SUMS),
        of("sums of columns by warps", older, columns(), &[]),
    ];
    let mut by_clusters =
        of("norm by clusters", Arch::Sm90a, wide::norm(DType::F64, [6, 12_290]), &[]);
    by_clusters.functions = wide::in_turn(&by_clusters.case.kernel);
    all.push(by_clusters);
    all.extend(products());
    all.extend([
        of("experts on CUDA cores", older, Kernel::Experts(experts(FEW, DType::F32)), &[]),
        of("experts by mma.sync", older, Kernel::Experts(experts(FEW, DType::BF16)), &[]),
        of(
            "their gradient on CUDA cores",
            older,
            Kernel::ExpertsBwd(experts(FEW, DType::F32)),
            &[],
        )
        .only(is_behind_tables),
        of("their gradient by mma.sync", older, Kernel::ExpertsBwd(experts(FEW, DType::BF16)), &[])
            .only(is_behind_tables),
        of("transposition", older, transposed(), &[]),
        of("attention on CUDA cores", older, Kernel::Attention(tensor::attention()), &[]),
        of("its gradient", older, Kernel::AttentionBwd(tensor::attention()), &[]),
        of(
            "attention by mma.sync",
            older,
            Kernel::Attention(attention([150, 290, 1, 64], |_| {})),
            &[],
        ),
        of(
            "its gradient by mma.sync",
            older,
            Kernel::AttentionBwd(attention([150, 200, 2, 64], grouped)),
            &[],
        ),
        of(
            "attention by wgmma",
            Arch::Sm90a,
            Kernel::Attention(attention([150, 760, 2, 80], in_two_samples)),
            OF_KEYS,
        ),
    ]);
    all.extend(by_warpgroups());
    all
}

/// Kernels of which some functions run on warpgroups.
fn by_warpgroups() -> Vec<Subject> {
    let of = |family, kernel, equivalent| Subject::new(family, Arch::Sm90a, kernel, equivalent);
    // Two heads of queries on one of keys, whose last query sees the last key.
    let gradient = |sizes: [usize; 4]| {
        let a = attention(sizes, |a| {
            grouped(a);
            a.query_offset = (a.keys - a.queries) as i64;
        });
        Kernel::AttentionBwd(a)
    };
    let is_gradient = |tile: &Tile| matches!(tile, Tile::FlashWarpgroupBackward(_));
    let of_experts = |family, kernel, equivalent| {
        let mut subject = of(family, kernel, equivalent);
        subject.case.inputs[1] = one_and_the_others();
        subject
    };
    let e = Experts { top_k: 1, ..experts(MORE, DType::BF16) };
    vec![
        of("gradient of attention by wgmma", gradient([150, 290, 2, 80]), OF_GRADIENT)
            .only(is_gradient),
        of("the same, heads of 64", gradient([200, 390, 2, 64]), OF_GRADIENT).only(is_gradient),
        of_experts("experts by wgmma", Kernel::Experts(e.clone()), OF_STAGES).only(is_product),
        of_experts("their gradient by wgmma", Kernel::ExpertsBwd(e.clone()), OF_ROWS)
            .only(is_product),
    ]
}

/// Tokens, experts, and the sizes of tokens and of what is inside of experts: there are no more
/// tiles of rows than [`one_and_the_others`] needs, and the last one is full.
const MORE: [usize; 4] = [257, 2, 136, 168];

/// A transposition of BF16 by tiles in shared memory.
fn transposed() -> Kernel {
    Kernel::Copy(transposition(&mut Random::new(4), DType::BF16, [70, 45]))
}

/// Gates of the first token to the first expert, and of all others to the second.
fn one_and_the_others() -> Buffer {
    let mut random = Random::new(6);
    let gate = |token: usize| {
        let gate = 0.5 + random.number().abs();
        if token == 0 { [gate, 0.0] } else { [0.0, gate] }
    };
    let gates: Vec<[f64; 2]> = (0..MORE[0]).map(gate).collect();
    Buffer::new(DType::BF16, gates.as_flattened())
}

/// Whether a function reads where the rows of experts are, and does not say so: what says so is
/// changed in the forward pass, since a gradient has bounds of k from there, and reads anything.
fn is_behind_tables(tile: &Tile) -> bool {
    let Tile::Routing(tile) = tile else { return true };
    !matches!(tile.step, RoutingStep::Count | RoutingStep::Place | RoutingStep::Fill)
}

/// Whether a function multiplies rows of experts on warpgroups.
fn is_product(tile: &Tile) -> bool {
    matches!(tile, Tile::Warpgroup(_))
}

/// A product of each family.
fn products() -> Vec<Subject> {
    let (older, newer) = (Arch::Sm80, Arch::Sm90a);
    let halves = DType::BF16;
    let skinny = |p: &mut Product| p.tiling = Tiling { family: Family::Skinny, split: 3 };
    let sliced = |p: &mut Product| p.tiling.split = 2;
    let along_k = |p: &mut Product| (p.n[0].b, p.k[0].b) = (p.sizes()[3], 1);
    let with_scales = |p: &mut Product| {
        along_k(p);
        let [_, m, n, _] = p.sizes();
        let of = |block: usize, side: usize| {
            let blocks = side.div_ceil(block);
            Scales { block, of_block: 1, of_run: blocks }
        };
        p.scales = Some([of(1, m), of(Scales::RUN, n)]);
    };
    let of = Subject::new;
    vec![
        of("product on CUDA cores", older, product([70, 65, 40], DType::F32, |_| {}), &[]),
        of("product by mma.sync", older, product([136, 136, 100], halves, batched), &[]),
        of("product by mma.sync, skinny", older, product([9, 70, 2120], halves, skinny), &[]),
        of("product by mma.sync, slices", older, product([130, 40, 1200], halves, sliced), &[]),
        of(
            "product in TF32",
            older,
            product([70, 65, 72], DType::F32, |p| p.operands = Operands::Tf32),
            &[],
        ),
        of("product in FP8", Arch::Sm89, product([70, 65, 144], DType::F8E4M3, along_k), &[]),
        of("product by wgmma", newer, product([136, 136, 460], halves, batched), OF_STAGES),
        of(
            "product by wgmma, K-major",
            newer,
            product([136, 136, 456], halves, along_k),
            OF_STAGES,
        ),
        of(
            "product by wgmma, copied",
            newer,
            product([136, 138, 524], halves, unaligned),
            OF_STAGES,
        ),
        of(
            "product in FP8 by wgmma",
            newer,
            // A result that is stored to an operand instead is no longer than that.
            product([136, 136, 560], DType::F8E4M3, along_k),
            OF_STAGES,
        ),
        of(
            "product of codes with scales",
            Arch::Sm89,
            product([70, 65, 256], DType::F8E4M3, with_scales),
            &[],
        ),
        of(
            "product of codes with scales by wgmma",
            newer,
            product([136, 136, 640], DType::F8E4M3, with_scales),
            OF_STAGES,
        ),
        of("product by wgmma, skinny", newer, product([9, 72, 2120], halves, skinny), OF_ONE_TILE),
        of("product by wgmma, slices", newer, product([136, 136, 2240], halves, sliced), OF_STAGES),
    ]
}

/// Families of which one mistake each is planted where not all are. Chosen: half a minute.
const SAMPLE: usize = 3;

/// Tries some of what can be planted, and returns its table and what is missed.
fn tried(subjects: &[Subject], is_wanted: impl Fn(usize, usize) -> bool) -> (String, Vec<String>) {
    let mut table =
        String::from("| family | planted | found | equivalent | missed |\n|---|--:|--:|--:|--:|\n");
    let mut missed = Vec::new();
    for (number, subject) in subjects.iter().enumerate() {
        let all = subject.planted();
        assert!(!all.is_empty(), "{}: something can be planted", subject.family);
        let all: Vec<(Planted, String)> = all
            .into_iter()
            .enumerate()
            .filter(|(at, _)| is_wanted(number, *at))
            .map(|(_, of)| of)
            .collect();
        let mut counts = [0; 3];
        let planted: Vec<Planted> = all.iter().map(|(planted, _)| planted.clone()).collect();
        let found = subject.are_found(&format!("mutations-{number}"), &planted);
        for ((_, what), is_found) in all.iter().zip(found) {
            let at = match (is_found, subject.reason(what)) {
                (true, _) => 0,
                (false, Some(_)) => 1,
                (false, None) => 2,
            };
            counts[at] += 1;
            if at == 2 {
                missed.push(format!("{}: {what}", subject.family));
            }
        }
        let [found, equivalent, lost] = counts;
        let line =
            format!("| {} | {} | {found} | {equivalent} | {lost} |", subject.family, all.len());
        println!("{line}");
        table += &(line + "\n");
    }
    (table, missed)
}

#[test]
fn all_mutations_are_found_or_change_no_result() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    if !runs_all() {
        return;
    }
    let mut subjects = subjects();
    if let Ok(family) = std::env::var("FAMILY") {
        subjects.retain(|subject| subject.family.contains(&family));
    }
    let (table, missed) = tried(&subjects, |_, _| true);
    println!("{table}");
    assert!(missed.is_empty(), "not found:\n{}", missed.join("\n"));
}

/// One of a few families, or of each; `SEED` draws which.
#[test]
fn a_mutation_of_each_family_is_found() {
    if compiler().is_none() {
        println!("skipped: no C++ compiler");
        return;
    }
    let mut subjects = subjects();
    let mut random = Random::new(3);
    if !runs_all() {
        let first = random.below(subjects.len());
        subjects.rotate_left(first);
        subjects.truncate(SAMPLE);
    }
    let drawn: Vec<usize> = subjects
        .iter()
        .map(|subject| {
            let planted = subject.planted();
            let may_be = |(_, what): &&(Planted, String)| subject.reason(what).is_none();
            let count = planted.iter().filter(may_be).count();
            let at = random.below(count);
            planted.iter().enumerate().filter(|(_, of)| may_be(of)).nth(at).map_or(0, |(at, _)| at)
        })
        .collect();
    let (_, missed) = tried(&subjects, |number, at| drawn[number] == at);
    assert!(missed.is_empty(), "not found:\n{}", missed.join("\n"));
}
