//! Finalists: the plans that a search would answer with, compiled, so that their memory is that of
//! the programs.
//!
//! The search prices memory in closed form, an expectation. A finalist is elaborated and compiled
//! as far as its arenas ([`codegen::footprint()`]). Where the program does not fit, the search is
//! repeated within as much less memory as the program had too much, at most [`FINALISTS_MAX`]
//! times. Plans that no program carries out yet keep the expectation, and the reason.

use codegen::compile::Compiler;
use codegen::footprint::{Footprint, NotYet};
use ir::{Diagnostic, Span};
use kernels::Bytes;

use crate::configuration::Configuration;
use crate::elaborate::{Purpose, elaborate};
use crate::estimate::memory::Memory;
use crate::search::request::{Chosen, SearchResult};

#[cfg(test)]
mod tests;

/// Finalists of a search that are compiled at most. Chosen: an answer in seconds.
pub const FINALISTS_MAX: usize = 8;

/// Compiles plans of one model, which share what is compiled for them.
#[derive(Debug)]
pub struct Lowering<'m> {
    purpose: Purpose<'m>,
    compiler: Compiler<'m>,
}

impl<'m> Lowering<'m> {
    /// A lowering of plans for a purpose.
    ///
    /// # Errors
    /// An entry that is no list of calls.
    pub fn new(purpose: Purpose<'m>) -> Result<Lowering<'m>, NotYet> {
        let compiler = Compiler::new(purpose.module, purpose.entry)?;
        Ok(Lowering { purpose, compiler })
    }

    /// The footprint of the fullest device of the plan that a name means.
    ///
    /// # Errors
    /// What no program carries out, or a name that means no plan.
    pub fn footprint(&mut self, name: &Configuration) -> Result<Footprint, NotYet> {
        let plan = elaborate(name, &self.purpose).map_err(first)?;
        self.compiler.footprint(&plan)
    }
}

/// What the first of some diagnostics says.
fn first(all: Vec<Diagnostic>) -> NotYet {
    let none = || NotYet { decision: "it means no plan".to_owned() };
    all.into_iter().next().map_or_else(none, NotYet::from)
}

/// What the fullest device holds under its compiled program.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Held {
    /// What the program allocates.
    pub footprint: Footprint,
    /// Bytes of what is beside it: context, libraries, communicators.
    pub reserve_bytes: f64,
    /// Bytes on the host beyond its capacity.
    pub host_excess_bytes: f64,
}

impl Held {
    /// All bytes.
    pub fn total_bytes(&self) -> f64 {
        self.footprint.total() as f64 + self.reserve_bytes + self.host_excess_bytes
    }

    /// The bytes by the roles of the closed form. Operands of collectives are working memory; what
    /// aligns buffers, and gaps between them, are activations.
    pub fn memory(&self) -> Memory {
        let Footprint { params, grads, masters, states, activations, .. } = self.footprint;
        let Footprint { stage, workspace, .. } = self.footprint;
        let kept = self.footprint.kept();
        Memory {
            stage: stage as u32,
            weights_bytes: params as f64,
            gradients_bytes: grads as f64,
            optimizer_bytes: (masters + states) as f64,
            activations_bytes: kept as f64,
            working_bytes: (activations - kept + workspace) as f64,
            reserve_bytes: self.reserve_bytes,
            host_excess_bytes: self.host_excess_bytes,
            ..Memory::default()
        }
    }
}

/// A plan whose compiled program does not fit.
#[derive(Clone, Debug, PartialEq)]
pub struct Oversized {
    /// The plan, as it was expected to be.
    pub chosen: Chosen,
    /// What its program holds.
    pub held: Held,
}

/// What became of the finalists of a search.
#[derive(Clone, Debug, PartialEq)]
pub struct Finalists {
    /// What the answer's program holds, or why there is no program yet.
    pub held: Result<Held, NotYet>,
    /// Better plans whose programs do not fit, the best first.
    pub oversized: Vec<Oversized>,
}

/// Compiles the best plan of a search; while its program does not fit, the answer becomes that of
/// `search` within so many bytes of a device. The bound of the first search stays, since it holds
/// for more plans.
///
/// # Errors
/// `E3201` where no finalist's program fits.
pub fn settle(
    answer: &mut SearchResult,
    lower: &mut dyn FnMut(&Configuration) -> Result<Held, NotYet>,
    search: &mut dyn FnMut(f64) -> Option<SearchResult>,
) -> Result<Finalists, Diagnostic> {
    let (have, bound_s) = (answer.have_bytes, answer.bound_s);
    let mut limit = have;
    let mut oversized: Vec<Oversized> = Vec::new();
    while oversized.len() < FINALISTS_MAX {
        let best = &answer.best[0];
        let held = lower(&best.configuration);
        let need = held.as_ref().map_or(0.0, Held::total_bytes);
        let Some(held) = held.as_ref().ok().copied().filter(|_| need > have) else {
            return Ok(Finalists { held, oversized });
        };
        oversized.push(Oversized { chosen: best.clone(), held });
        // What the closed form lacks of this program it may lack of the next one; but what is
        // smaller than this one may fit, where nothing else does.
        let smaller = best.estimate.memory.total_bytes() - 1.0;
        let limits = [(limit - (need - have)).min(smaller), smaller];
        let found = limits.into_iter().find_map(|limit| Some((limit, search(limit)?)));
        let next;
        (limit, next) = found.ok_or_else(|| none_fits(&oversized, have))?;
        let effort = answer.space;
        *answer = SearchResult { have_bytes: have, bound_s, ..next };
        answer.space.evaluated += effort.evaluated;
        answer.space.total = effort.total;
        answer.gap = bound_s.map(|bound_s| answer.best[0].estimate.step_time_s / bound_s - 1.0);
    }
    Err(none_fits(&oversized, have))
}

fn none_fits(oversized: &[Oversized], have: f64) -> Diagnostic {
    let headline = format!("the programs of {} finalists do not fit in memory", oversized.len());
    let mut diagnostic = Diagnostic::error("E3201", Span::of(""), headline);
    let least =
        oversized.iter().min_by(|a, b| a.held.total_bytes().total_cmp(&b.held.total_bytes()));
    if let Some(Oversized { chosen, held }) = least {
        let [need, have] = [held.total_bytes(), have].map(|bytes| Bytes(bytes as u64));
        let footprint = held.footprint;
        diagnostic = diagnostic
            .note(format!(
                "smallest is {}: its program needs {need} of {have}",
                chosen.configuration
            ))
            .note(format!("a device of stage {} holds {footprint}", footprint.stage));
    }
    diagnostic.help("use devices with more memory, or more of them")
}
