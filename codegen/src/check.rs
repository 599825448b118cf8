//! An independent check of compiled programs: a symbolic replay of all classes of ranks together.
//!
//! Nothing here calls what made the programs. First [`kernels::bounds`] looks at every reference;
//! then the steps of all classes are replayed, instruction by instruction. A byte of an arena holds
//! not a number but a note: which buffer it was written as, from which micro-batches it was
//! computed, as which element type, and over which axes it was summed. A read must find the notes
//! that it expects, so that buffers that share bytes while both are needed, stale values, missing
//! clears and missing reductions are found, whatever the reason.
//!
//! Ranks along `dp` run one program. One of them stands for all: they take each step together, so
//! that a collective along `dp` never waits, and what finishes for one finishes for all.
//!
//! **Not checked**: what a kernel computes, and tensor-parallel sums inside of routines; tests of
//! results against one rank do that.
//!
//! Besides those of [`kernels::bounds`]:
//!
//! | code | what is wrong |
//! |---|---|
//! | E2110 | a view of bytes that are not those of whole buffers that persist |
//! | E2111 | bytes are read that nothing wrote |
//! | E2112 | bytes are read that another buffer has since overwritten |
//! | E2113 | values of several micro-batches are mixed, or a sum lacks terms |
//! | E2114 | a micro-batch runs too often, too seldom, or with other calls than the rest |
//! | E2115 | a parameter, state or cache is changed where it must not be, or not changed |
//! | E2116 | a sum over ranks is missing, doubled, or over other ranks |
//! | E2117 | bytes are read as another element type than they were written as |
//! | E2118 | members of a group make different calls |
//! | E2119 | a message of another length or type than is received, or that nobody receives |
//! | E2120 | ranks wait for each other |
//! | E2122 | the norm leaves out a gradient, counts it twice, or counts something else |
//! | E2123 | a workspace that is not as large as its kernel needs on the plan's target |
//! | E2124 | the ranks of a stage do not have each element of a weight |
//! | E2127 | what is being copied is read or written before the copy is awaited |

mod access;
mod labels;
mod memory;
mod places;
mod state;
mod traffic;

use std::collections::{BTreeMap, BTreeSet};

use ir::program::{Program, Step};
use ir::{Diagnostic, Plan, Span};
use kernels::Kernel;
use kernels::bounds::{class_name, verify_programs};

use access::AllEffects;
use places::Places;

/// The most diagnostics of one check.
const DIAGNOSTICS_MAX: usize = 20;

/// Checks the programs of all classes of ranks against each other and against their plan.
///
/// Returns what is wrong, at most twenty diagnostics; none when the programs are sound.
///
/// **Cost.** Steps × instructions × logarithm of the buffers, for each class.
pub fn check(programs: &[Program], kernels: &[Kernel], plan: &Plan) -> Vec<Diagnostic> {
    let found = verify_programs(programs, kernels, plan.mesh);
    if !found.is_empty() {
        return found;
    }
    let mut findings = Findings::default();
    let ranks = plan.mesh.data_ranks();
    check_weights(programs, plan, &mut findings);
    let places: Vec<Places> =
        programs.iter().map(|p| Places::of(p, (programs, ranks), &mut findings)).collect();
    let is_whole = plan.stage_ends.len().is_multiple_of(plan.mesh.pp);
    if plan.stage_ends.is_empty() || !is_whole || plan.microbatch_count == 0 {
        findings.add("E2114", "plan", "the plan has no micro-batch, or not one end per chunk");
    }
    if !findings.found.is_empty() {
        return findings.found;
    }
    let effects = AllEffects::of(programs, kernels, plan.target);
    let entries = programs.first().map_or(0, |program| program.entries.len());
    for phase in [Phase::Step, Phase::Evaluate].into_iter().chain((0..entries).map(Phase::Entry)) {
        let setup = Setup { programs, places: &places, effects: &effects, plan, phase };
        // A class that takes part with no step at all is found by those who wait for it.
        if programs.iter().any(|p| !phase.steps(p).is_empty()) {
            traffic::replay(&setup, &mut findings);
        }
    }
    findings.found
}

/// The ranks of a stage together have each element of its weights, and share experts as the plan
/// says.
fn check_weights(programs: &[Program], plan: &Plan, findings: &mut Findings) {
    let mut held: BTreeMap<(usize, &str), BTreeSet<Vec<(usize, usize)>>> = BTreeMap::new();
    let all =
        || programs.iter().flat_map(|program| program.weights.iter().map(move |w| (program, w)));
    for (program, weight) in all() {
        let blocks = held.entry((program.stage, &weight.name)).or_default();
        blocks.extend((0..plan.mesh.data_ranks()).map(|data| weight.ranges_of(data)));
    }
    for (program, weight) in all() {
        let elements = |block: &Vec<(usize, usize)>| block.iter().map(|r| r.1).product::<usize>();
        let blocks = &held[&(program.stage, weight.name.as_str())];
        let is_whole =
            blocks.iter().map(elements).sum::<usize>() == weight.global.iter().product::<usize>();
        let sharers = plan.experts.ep / if plan.experts.takes_tp { plan.mesh.tp } else { 1 };
        let is_shared = weight.experts.is_none_or(|experts| experts.ranks == sharers);
        if !is_whole || !is_shared {
            let headline = format!("ranks do not have each element of `{}`", weight.name);
            findings.add("E2124", &class_name(program), headline);
        }
    }
}

/// Which steps are replayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Step,
    Evaluate,
    /// One of the entries of programs for inference.
    Entry(usize),
}

impl Phase {
    fn steps(self, program: &Program) -> &[Step] {
        match self {
            Phase::Step => &program.steps,
            Phase::Evaluate => &program.evaluate,
            Phase::Entry(entry) => &program.entries[entry].steps,
        }
    }

    fn name(self, program: &Program) -> &str {
        match self {
            Phase::Step => "step",
            Phase::Evaluate => "evaluate",
            Phase::Entry(entry) => &program.entries[entry].name,
        }
    }
}

/// What all ranks of a replay have in common.
struct Setup<'a> {
    programs: &'a [Program],
    places: &'a [Places],
    effects: &'a AllEffects<'a>,
    plan: &'a Plan,
    phase: Phase,
}

/// Where something was found: a class, a step, an instruction of the routine it calls.
#[derive(Clone, Copy, Debug)]
struct At {
    class: usize,
    step: usize,
    instruction: Option<usize>,
}

impl Setup<'_> {
    fn describe(&self, at: At) -> String {
        let program = &self.programs[at.class];
        let class = class_name(program);
        let phase = self.phase.name(program);
        let routine = match self.phase.steps(program).get(at.step) {
            Some(Step::Call { routine, .. }) => program.routines[*routine].name.as_str(),
            Some(Step::Feed { .. }) => "feed",
            Some(Step::Send { .. }) => "send",
            Some(Step::Receive { .. }) => "receive",
            Some(Step::Move { .. }) => "move",
            Some(Step::Await { .. }) => "await",
            None => return format!("{class}, the end of {phase}"),
        };
        let instruction = at.instruction.map_or_else(String::new, |i| format!(", instruction {i}"));
        format!("{class}, {phase} {} (`{routine}`){instruction}", at.step)
    }

    /// What is one finding however often it is met: an instruction of a routine, not of a call.
    fn identity(&self, at: At) -> [usize; 3] {
        let step = self.phase.steps(&self.programs[at.class]).get(at.step);
        match (step, at.instruction) {
            (Some(Step::Call { routine, .. }), Some(instruction)) => {
                [at.class, *routine, instruction]
            }
            _ => [at.class, usize::MAX, at.step],
        }
    }
}

/// What is found, each thing once.
#[derive(Default)]
struct Findings {
    found: Vec<Diagnostic>,
    seen: BTreeSet<(&'static str, [usize; 3])>,
}

impl Findings {
    fn push(&mut self, diagnostic: Diagnostic) {
        if self.found.len() < DIAGNOSTICS_MAX {
            self.found.push(diagnostic);
        }
    }

    fn add(&mut self, code: &'static str, place: &str, headline: impl Into<String>) {
        self.push(Diagnostic::error(code, Span::of(place), headline));
    }

    fn add_at(&mut self, setup: &Setup<'_>, code: &'static str, at: At, headline: String) {
        if self.seen.insert((code, setup.identity(at))) {
            self.add(code, &setup.describe(at), headline);
        }
    }
}
