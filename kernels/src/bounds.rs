//! Whether programs stay within what they have: every reference is in range, and every range is
//! long enough for what uses it.
//!
//! This looks at each buffer, routine and step once and follows no order of execution; what it
//! accepts can't make a rank touch memory that is not its own, whatever its steps compute. Codes:
//!
//! | code | what is wrong |
//! |---|---|
//! | E2101 | the programs are not one for each place on `pp`, `cp` and `tp`, with equal entries |
//! | E2102 | a kernel that can't be executed |
//! | E2103 | a buffer or a local whose bytes, place or contents are impossible |
//! | E2104 | a reference to a buffer, routine, slot, local, kernel or stage that is not there |
//! | E2105 | slots or a frame that do not fit the routine that is called with them |
//! | E2106 | arguments or scalars that do not fit their kernel |
//! | E2107 | a buffer of another element type than its use |
//! | E2108 | a collective whose counts, elements or buffers do not fit its group |
//! | E2109 | a call that writes where it reads or writes at once |
//! | E2126 | a move not between device and host or disk, or an operand not in the device's memory |

mod apart;
mod routine;
mod steps;

use std::ops::RangeInclusive;

use ir::plan::{MICROBATCHES_MAX, Mesh, Place, RANKS_MAX, TOKENS_MAX};
use ir::program::{
    ALIGNMENT, Buffer, BufferId, Contents, Feed, Program, STATE_BLOCK, ShardRole, Step, scale_dims,
};
use ir::{DType, Diagnostic, Span};

use crate::kernel::Kernel;
use crate::verify::verify;

/// The most diagnostics of one check.
const DIAGNOSTICS_MAX: usize = 20;
/// The largest arena: 2^46 bytes, so that sums of offsets do not overflow. Chosen.
const BYTES_MAX: u64 = 1 << 46;

/// What is found, at most twenty.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    pub(crate) found: Vec<Diagnostic>,
}

impl Findings {
    fn add(&mut self, code: &'static str, place: &str, headline: impl Into<String>) {
        if self.found.len() < DIAGNOSTICS_MAX {
            self.found.push(Diagnostic::error(code, Span::of(place), headline));
        }
    }

    /// Adds a finding unless something holds.
    fn require(&mut self, holds: bool, code: &'static str, place: &str, text: &dyn Fn() -> String) {
        if !holds {
            self.add(code, place, text());
        }
    }
}

/// Checks the programs of all classes of ranks and the kernels that they launch.
///
/// **Cost.** Linear in the size of the programs; reserves no memory in proportion to any number
/// that stands in them.
pub fn verify_programs(programs: &[Program], kernels: &[Kernel], mesh: Mesh) -> Vec<Diagnostic> {
    let mut findings = Findings::default();
    if !is_grid(programs, mesh) {
        let Mesh { pp, cp, tp, .. } = mesh;
        let headline = format!(
            "{} programs are not one for each of pp={pp} stages, and of cp={cp} and tp={tp} places",
            programs.len(),
        );
        findings.add("E2101", "programs", headline);
        return findings.found;
    }
    let names = |p: &Program| p.entries.iter().map(|e| e.name.clone()).collect::<Vec<_>>();
    if programs.iter().any(|program| names(program) != names(&programs[0])) {
        findings.add("E2101", "programs", "the programs have different entries");
        return findings.found;
    }
    let mut scalars = Vec::new();
    for (index, kernel) in kernels.iter().enumerate() {
        match verify(kernel).and_then(|()| kernel.scalars()) {
            Ok(ranges) => scalars.push(ranges),
            Err(why) => {
                let headline = format!("kernel {index} can't be executed: {why}");
                findings.add("E2102", "kernels", headline);
            }
        }
    }
    if !findings.found.is_empty() {
        return findings.found;
    }
    for program in programs {
        let place = class_name(program);
        let check = ProgramCheck { program, kernels, scalars: &scalars, mesh, place };
        check.buffers(&mut findings);
        if findings.found.is_empty() {
            check.routines(&mut findings);
            check.steps(&mut findings);
        }
    }
    feeds_agree(programs, &mut findings);
    findings.found
}

/// The class of a program, for people.
pub fn class_name(program: &Program) -> String {
    let Program { name, stage, context, tensor, .. } = program;
    let context = if *context > 0 { format!(" context {context}") } else { String::new() };
    format!("program {name} stage {stage}{context} tensor {tensor}")
}

fn is_grid(programs: &[Program], mesh: Mesh) -> bool {
    let ranks = mesh.checked_ranks();
    let mut places: Vec<[usize; 3]> = programs.iter().map(Program::place).collect();
    places.sort_unstable();
    places.dedup();
    ranks.is_some_and(|n| (1..=RANKS_MAX).contains(&n))
        && programs.len() == mesh.classes()
        && places.len() == programs.len()
        && places.iter().all(|[stage, context, tensor]| {
            *stage < mesh.pp && *context < mesh.cp && *tensor < mesh.tp
        })
}

/// One program under check.
struct ProgramCheck<'a> {
    program: &'a Program,
    kernels: &'a [Kernel],
    /// For each kernel, what it admits as scalars.
    scalars: &'a [Vec<RangeInclusive<i64>>],
    mesh: Mesh,
    place: String,
}

impl ProgramCheck<'_> {
    fn buffers(&self, findings: &mut Findings) {
        for place in Place::ALL {
            let (bytes, start) = self.program.arena(place);
            let is_aligned = bytes == 0 || start.is_multiple_of(ALIGNMENT);
            findings.require(bytes <= BYTES_MAX && is_aligned, "E2103", &self.place, &|| {
                format!("an arena of {bytes} bytes on the {}", place.name())
            });
        }
        for weight in &self.program.weights {
            let inside = |(global, (start, size)): (&usize, &(usize, usize))| {
                start.checked_add(*size).is_some_and(|end| end <= *global)
            };
            let fits = weight.global.len() == weight.ranges.len()
                && weight.global.iter().zip(&weight.ranges).all(inside)
                && bytes_of(&weight.global, DType::F64).is_some();
            findings.require(fits, "E2103", &self.place, &|| {
                format!("the shard of weight `{}` does not lie in it", weight.name)
            });
        }
        for buffer in &self.program.buffers {
            if let Err(why) = self.buffer(buffer) {
                let headline = format!("buffer `{}` {why}", buffer.name);
                findings.add("E2103", &self.place, headline);
            }
        }
        self.contents_are_distinct(findings);
    }

    fn buffer(&self, buffer: &Buffer) -> Result<(), String> {
        let Buffer { contents, dtype, sizes, bytes, offset, .. } = buffer;
        if bytes_of(sizes, *dtype) != Some(*bytes) {
            return Err(format!("has {bytes} bytes, which its sizes do not make"));
        }
        if self.program.place_of(buffer).is_none() {
            let arena = self.program.arena_bytes;
            return Err(format!("of {bytes} bytes at {offset} leaves the arena of {arena} bytes"));
        }
        let is_view = matches!(contents, Contents::View | Contents::Part { .. });
        let step = if is_view { dtype.size() } else { ALIGNMENT };
        if !offset.is_multiple_of(step) {
            return Err(format!("at {offset} is not aligned to {step} bytes"));
        }
        if let Some((_, bucket)) = contents.passing() {
            let whole = self.buffer_at(bucket).filter(|b| b.contents == Contents::View);
            let lies = |whole: &Buffer| {
                let before = offset.checked_sub(whole.offset);
                let ends = before.and_then(|before| before.checked_add(*bytes));
                whole.dtype == *dtype && ends.is_some_and(|end| end <= whole.bytes)
            };
            if !whole.is_some_and(lies) {
                return Err("does not lie in its bucket".to_owned());
            }
        }
        match contents {
            Contents::Param(weight)
            | Contents::Master(weight)
            | Contents::Grad(weight)
            | Contents::Gathered { weight, .. }
            | Contents::Term { weight, .. }
            | Contents::State { weight, .. } => {
                let shard = self.program.weights.get(*weight);
                let shard = shard.ok_or_else(|| format!("is of weight {weight}, which is none"))?;
                let same = shard.ranges.iter().map(|r| r.1).eq(sizes.iter().copied());
                let text = || format!("has other sizes than the shard of `{}`", shard.name);
                if same { Ok(()) } else { Err(text()) }
            }
            Contents::Scale { weight, .. } => {
                let shard = self.program.weights.get(*weight);
                let shard = shard.ok_or_else(|| format!("is of weight {weight}, which is none"))?;
                let local: Vec<usize> = shard.ranges.iter().map(|r| r.1).collect();
                let starts = shard.ranges.last().is_some_and(|r| r.0.is_multiple_of(STATE_BLOCK));
                let same = starts && scale_dims(&local).as_ref() == Some(sizes);
                let text = || format!("has no scale for each block of `{}`", shard.name);
                if same { Ok(()) } else { Err(text()) }
            }
            Contents::Feed(feed) => fed(*feed, *dtype, sizes),
            Contents::Stats => {
                let numbers = matches!(dtype, DType::F32 | DType::F64) && sizes[..] == [3];
                if numbers { Ok(()) } else { Err("is no three numbers".to_owned()) }
            }
            Contents::Shard { bucket, role } => self.piece(*bucket, *role, sizes),
            Contents::Part { of } => self.part(*of, buffer),
            Contents::Cache(_) if sizes.len() < 2 => Err("is no cache of tokens".to_owned()),
            Contents::Output if sizes.is_empty() => Err("has no samples".to_owned()),
            Contents::Cache(_)
            | Contents::Output
            | Contents::View
            | Contents::Activation
            | Contents::Frame => Ok(()),
        }
    }

    /// A part lies in a buffer of its type that is no part itself.
    fn part(&self, of: BufferId, buffer: &Buffer) -> Result<(), String> {
        let whole = self.buffer_at(of).filter(|whole| {
            let is_whole = !matches!(whole.contents, Contents::View | Contents::Part { .. });
            let [start, end] = [whole.offset, whole.offset.saturating_add(whole.bytes)];
            let lies = start <= buffer.offset && buffer.offset.saturating_add(buffer.bytes) <= end;
            is_whole && lies && whole.dtype == buffer.dtype
        });
        whole.map(|_| ()).ok_or_else(|| "is no part of a buffer".to_owned())
    }

    /// Neighbours among the ranks with the same weights hold the pieces of one copy of a bucket, or
    /// of experts all ranks with the same ones.
    fn piece(&self, bucket: BufferId, role: ShardRole, sizes: &[usize]) -> Result<(), String> {
        let whole = self.buffer_at(bucket).filter(|b| b.contents == Contents::View);
        let elements = whole.map_or(0, |whole| whole.sizes.iter().product());
        let per = if matches!(role, ShardRole::Scale(_)) { STATE_BLOCK } else { 1 };
        let piece = sizes.iter().product::<usize>().saturating_mul(per);
        let ranks = elements.checked_div(piece).unwrap_or(self.mesh.data_ranks());
        let is_whole = ranks.checked_mul(piece) == Some(elements);
        let has_experts = self.program.weights.iter().any(|weight| weight.experts.is_some());
        let members = if has_experts { self.program.members(bucket) } else { Vec::new() };
        let first = members.first().and_then(|first| self.program.weights.get(first.weight));
        let is_share = match first.and_then(|weight| weight.experts) {
            Some(experts) => {
                let all = ranks.checked_mul(experts.ranks);
                all.is_some_and(|all| self.mesh.has_shards_of(all))
            }
            None => self.mesh.has_shards_of(ranks),
        };
        let fits = whole.is_some() && is_whole && is_share;
        if fits { Ok(()) } else { Err("is no piece of a bucket".to_owned()) }
    }

    /// A weight has one buffer of each kind that outlasts a call, a feed one of each size, and
    /// there is one of statistics.
    fn contents_are_distinct(&self, findings: &mut Findings) {
        let mut seen: Vec<String> = Vec::new();
        for buffer in &self.program.buffers {
            match &buffer.contents {
                Contents::View
                | Contents::Part { .. }
                | Contents::Activation
                | Contents::Frame
                | Contents::Output => {}
                // Calls have those of their own.
                Contents::Gathered { .. }
                | Contents::Term { .. }
                | Contents::Shard { role: ShardRole::Term, .. } => {}
                // Entries read tokens in several numbers.
                Contents::Feed(feed) => seen.push(format!("{feed:?} {:?}", buffer.sizes)),
                contents @ (Contents::Param(_)
                | Contents::Master(_)
                | Contents::Grad(_)
                | Contents::State { .. }
                | Contents::Scale { .. }
                | Contents::Shard { .. }
                | Contents::Stats
                | Contents::Cache(_)) => seen.push(format!("{contents:?}")),
            }
        }
        let count = seen.len();
        seen.sort_unstable();
        seen.dedup();
        findings.require(seen.len() == count, "E2103", &self.place, &|| {
            "two buffers hold the same parameter, gradient, state, cache or feed".to_owned()
        });
    }

    fn buffer_at(&self, id: BufferId) -> Option<&Buffer> {
        self.program.buffers.get(id.0 as usize)
    }
}

/// The bytes of a row-major tensor; none if there are more than an arena holds.
fn bytes_of(sizes: &[usize], dtype: DType) -> Option<u64> {
    let bytes = sizes.iter().try_fold(dtype.size(), |n, s| n.checked_mul(*s as u64));
    bytes.filter(|bytes| *bytes <= BYTES_MAX && sizes.iter().all(|s| *s as u64 <= BYTES_MAX))
}

/// Whether a buffer has the type that the host writes.
fn fed(feed: Feed, dtype: DType, sizes: &[usize]) -> Result<(), String> {
    let fits = match feed {
        Feed::Tokens | Feed::Labels | Feed::Documents => {
            let points = sizes.iter().product::<usize>();
            dtype == DType::I32 && sizes.len() == 2 && (1..=TOKENS_MAX).contains(&points)
        }
        Feed::Key { .. } => dtype == DType::U32 && sizes == [4],
        Feed::Scalars => matches!(dtype, DType::F32 | DType::F64) && sizes == [5],
        Feed::Position => dtype == DType::I32 && sizes.len() == 1,
        Feed::Last => dtype == DType::I32 && sizes.iter().product::<usize>() == 1,
    };
    if fits { Ok(()) } else { Err("is of no type that the host feeds".to_owned()) }
}

/// In each phase, tokens, labels and documents of all classes are cut from the global batch in one
/// way.
fn feeds_agree(programs: &[Program], findings: &mut Findings) {
    for phase in 0..phases(&programs[0]).len() {
        let fed = programs.iter().flat_map(|program| {
            phases(program)[phase].1.iter().filter_map(|step| match step {
                Step::Feed {
                    feed: Feed::Tokens | Feed::Labels | Feed::Documents, buffer, ..
                } => program.buffers.get(buffer.0 as usize),
                Step::Feed { .. }
                | Step::Call { .. }
                | Step::Send { .. }
                | Step::Receive { .. }
                | Step::Move { .. }
                | Step::Await { .. } => None,
            })
        });
        let mut sizes = fed.map(|buffer| &buffer.sizes);
        let first = sizes.next();
        let agree = first.is_none_or(|first| sizes.all(|s| s == first));
        findings.require(agree, "E2103", "programs", &|| {
            "tokens, labels and documents of one phase have several sizes".to_owned()
        });
    }
}

/// The names of a program's phases, and their steps.
fn phases(program: &Program) -> Vec<(String, &[Step])> {
    let mut phases = vec![
        ("step".to_owned(), &program.steps[..]),
        ("evaluate".to_owned(), &program.evaluate[..]),
    ];
    for entry in &program.entries {
        phases.push((format!("entry {}", entry.name), &entry.steps));
    }
    phases
}
