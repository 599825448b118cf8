//! Assembly: module × plan → one program per class of ranks.
//!
//! A class is a place on the pipeline, context-parallel and tensor-parallel axes; data-parallel
//! ranks run the same program. Where the ranks that hold the same weights share the update (ZeRO
//! 1), gradients too (2) or parameters too (3), each has a piece of every bucket of weights, of
//! the same length. The arena holds what persists (parameters, gradients, optimizer state, or
//! pieces of them, and feeds), then what one micro-batch needs, packed by lifetime. With several
//! micro-batches in flight their values are given separate room for the whole step.

mod class;
mod ends;

use std::sync::Arc;

use ir::program::{Instruction, Program, Routine};
use ir::{Diagnostic, Module, Plan, Span};
use kernels::Kernel;

use crate::calls::{Calls, not_calls};
use crate::evaluation;
use crate::executable::{BUFFERS_MAX, NotYet, check_executable};
use crate::refusal::Refusal;
use crate::routines::Layers;
use crate::weights::weight_places;
pub(crate) use class::Class;
use ends::AllEnds;

/// What a class does before its first micro-batch and after its last one, routine by routine.
#[derive(Clone, Debug, PartialEq)]
pub struct Ends {
    /// Clearing.
    pub begin: Vec<Routine>,
    /// Reductions and updates.
    pub finish: Vec<Routine>,
}

/// Programs and the kernels that they launch.
#[derive(Clone, Debug, PartialEq)]
pub struct Compiled {
    /// One program per class: stages outermost, then places on the context-parallel axis, then on
    /// the tensor-parallel one.
    pub programs: Vec<Program>,
    /// The kernels of all programs.
    pub kernels: Vec<Kernel>,
}

/// Compiles a prepared training module under a plan.
///
/// # Errors
/// `E2001` when the entry is no list of calls, `E2003` for a kernel that cannot be run, else as
/// [`Compiler::programs`].
pub fn compile(module: &Module, entry: &str, plan: &Plan) -> Result<Compiled, Diagnostic> {
    let mut compiler = Compiler::new(module, entry)?;
    let programs = compiler.programs(plan)?;
    Compiled::new(programs, compiler.layers.table.kernels).checked(plan)
}

impl Compiled {
    /// Programs and what they launch of some kernels, in order.
    pub(crate) fn new(mut programs: Vec<Program>, kernels: Vec<Kernel>) -> Compiled {
        let mut numbers: Vec<Option<usize>> = vec![None; kernels.len()];
        let launched = programs.iter().flat_map(|program| &program.routines);
        for instruction in launched.flat_map(|routine| &routine.instructions) {
            if let Instruction::Launch { kernel, .. } = instruction {
                numbers[*kernel] = Some(0);
            }
        }
        numbers.iter_mut().flatten().enumerate().for_each(|(next, number)| *number = next);
        let routines = programs.iter_mut().flat_map(|program| &mut program.routines);
        for instruction in routines.flat_map(|routine| &mut routine.instructions) {
            if let Instruction::Launch { kernel, .. } = instruction {
                *kernel = numbers[*kernel].unwrap_or(*kernel);
            }
        }
        let kept = kernels.into_iter().zip(numbers).filter(|(_, number)| number.is_some());
        Compiled { programs, kernels: kept.map(|(kernel, _)| kernel).collect() }
    }

    /// The same, if every kernel stays within its buffers; in debug builds only if
    /// [`check`](crate::check) finds nothing wrong. Element types that are only planned for have no
    /// kernels to check.
    ///
    /// # Errors
    /// `E2003` for a kernel that would not: no number of a module may get that far.
    ///
    /// # Panics
    /// When the check does: what made the programs has a defect.
    pub(crate) fn checked(self, plan: &Plan) -> Result<Compiled, Diagnostic> {
        if !plan.precision.lacking().is_empty() {
            return Ok(self);
        }
        for kernel in &self.kernels {
            kernels::verify::verify(kernel).map_err(|why| {
                let headline = format!("no such kernel can be run: {kernel}: {why}");
                Diagnostic::error("E2003", Span::of(plan.model.clone()), headline)
            })?;
        }
        if cfg!(debug_assertions) {
            let found = crate::check::check(&self.programs, &self.kernels, plan);
            let first = found.first();
            let first = first.map(|d| format!("{} {}: {}", d.code, d.span.source, d.headline));
            assert!(first.is_none(), "programs are sound: {}", first.unwrap_or_default());
        }
        Ok(self)
    }
}

/// Compiles one module under many plans: what they share is compiled once.
#[derive(Debug)]
pub struct Compiler<'m> {
    module: &'m Module,
    calls: Calls,
    /// The calls that evaluate, where they are others.
    evaluated: Option<Calls>,
    layers: Layers<'m>,
    ends: AllEnds,
}

impl<'m> Compiler<'m> {
    /// A compiler of a prepared training module.
    ///
    /// # Errors
    /// `E2001` when the entry is no list of calls.
    pub fn new(module: &'m Module, entry: &str) -> Result<Compiler<'m>, Diagnostic> {
        let calls = Calls::of_entry(module, entry)?;
        let error = |why| not_calls(entry, why);
        if !calls.caches.is_empty() {
            let why = format!("`@{entry}` takes caches, and nothing is trained through them");
            return Err(error(why));
        }
        let function = module.function(entry);
        function.map_or(Ok(()), |f| calls.check_gradients(f)).map_err(error)?;
        let evaluated = evaluation::calls(module, entry, &calls).map_err(error)?;
        let layers = Layers::new(module);
        Ok(Compiler { module, calls, evaluated, layers, ends: AllEnds::default() })
    }

    /// The calls of the entry.
    pub fn calls(&self) -> &Calls {
        &self.calls
    }

    /// The layers that were compiled so far, and more on demand.
    pub fn layers(&mut self) -> &mut Layers<'m> {
        &mut self.layers
    }

    /// The kernels that all programs so far launch.
    pub fn kernels(&self) -> &[Kernel] {
        self.layers.kernels()
    }

    /// The programs of a plan: stages outermost, then places on the context-parallel axis, then on
    /// the tensor-parallel one.
    ///
    /// # Errors
    /// `E2002` when the plan does not fit the module, `E2003` when nodes have no kernel, `E2004`
    /// when the plan decides what no program does.
    pub fn programs(&mut self, plan: &Plan) -> Result<Vec<Program>, Diagnostic> {
        classes(plan).map(|place| self.program(plan, place)).collect()
    }

    /// Whether the ranks of a plan hold weights as it says: whole blocks, where states have scales.
    ///
    /// # Errors
    /// `E2002`, with a weight and why it cannot be cut.
    pub fn check_weights(&self, plan: &Plan) -> Result<(), Diagnostic> {
        for place @ [stage, _, tensor] in classes(plan) {
            let places = weight_places(self.module, &self.calls, plan, stage, tensor);
            places.map_err(|why| refused(plan, place, &why.into()))?;
        }
        Ok(())
    }

    /// The program of one class, by its place on the pipeline, context-parallel and tensor-parallel
    /// axes.
    ///
    /// # Errors
    /// Those of [`Compiler::programs`].
    pub fn program(&mut self, plan: &Plan, place: [usize; 3]) -> Result<Program, Diagnostic> {
        check_executable(plan)?;
        let class = Class::new(self, plan, place);
        class.and_then(Class::program).map_err(|why| refused(plan, place, &why))
    }

    /// The program of one micro-batch of a stage's first rank along `cp` and `tp`, whose arena is
    /// that of the whole step.
    ///
    /// # Errors
    /// Those of [`Compiler::programs`], and more values to place than
    /// [`BUFFERS_MAX`](crate::footprint::BUFFERS_MAX).
    pub(crate) fn skeleton(&mut self, plan: &Plan, stage: usize) -> Result<Program, NotYet> {
        let place = [stage, 0, 0];
        let class = Class::new(self, plan, place);
        let class = class.map_err(|why| refused(plan, place, &why))?;
        let (kept, most) = (class.kept_count(), BUFFERS_MAX);
        if kept > most {
            let decision = format!(
                "{kept} values are kept at once on stage {stage}, {most} are placed at most"
            );
            return Err(NotYet { decision });
        }
        Ok(class.skeleton().map_err(|why| refused(plan, place, &why))?)
    }

    /// What the program of one class does before its first micro-batch and after its last one,
    /// without the work of compiling what is between: the same for all along `cp`.
    ///
    /// # Errors
    /// Those of [`Compiler::programs`].
    pub fn ends(
        &mut self,
        plan: &Plan,
        stage: usize,
        tensor: usize,
    ) -> Result<Arc<Ends>, Diagnostic> {
        let Compiler { module, calls, layers, ends, .. } = self;
        let place = [stage, 0, tensor];
        let made = ends.of(module, calls, plan, place, &mut layers.table);
        made.map_err(|why| refused(plan, place, &why))
    }
}

/// The places of all classes on the pipeline, context-parallel and tensor-parallel axes.
fn classes(plan: &Plan) -> impl Iterator<Item = [usize; 3]> {
    let mesh = plan.mesh;
    (0..mesh.classes()).map(move |class| mesh.class_coordinates(class))
}

fn refused(plan: &Plan, [stage, context, tensor]: [usize; 3], why: &Refusal) -> Diagnostic {
    let context = match plan.mesh.cp {
        1 => String::new(),
        _ => format!(" context-parallel rank {context},"),
    };
    Diagnostic::error(why.code(), Span::of(plan.model.clone()), why.to_string())
        .note(format!("compiling stage {stage},{context} tensor-parallel rank {tensor}"))
}
