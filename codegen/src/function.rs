//! Function → routine, on one device and without a plan: for what is evaluated, not trained.

use ir::program::Routine;
use ir::{DType, Diagnostic, Module, Span, TensorType, ValueId};
use kernels::Kernel;

use crate::catalogue::is_in_catalogue;
use crate::integers::{multiply_integers, store_bytes};
use crate::lower::KernelTable;
use crate::narrow::narrow_integers;
use crate::ranges::Range;
use crate::routines::routine;

/// A function as one device runs it.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// Launches over the parameters, then the results.
    pub routine: Routine,
    /// What is launched.
    pub kernels: Vec<Kernel>,
    /// The types of the parameters: integers that fit have 32 bits, and weights of products 8.
    pub params: Vec<TensorType>,
    /// The types of the results.
    pub results: Vec<TensorType>,
}

/// Compiles a function of fixed sizes that calls composites only.
///
/// # Errors
/// `E2003` with all nodes that have no kernel.
pub fn compile_function(module: &Module, name: &str) -> Result<Compiled, Diagnostic> {
    compile_within(module, name, |_| None)
}

/// Compiles a function as [`compile_function`] does, where `given` says between which integers the
/// elements of a parameter lie.
///
/// # Errors
/// Those of [`compile_function`].
pub fn compile_within(
    module: &Module,
    name: &str,
    given: impl Fn(ValueId) -> Option<Range>,
) -> Result<Compiled, Diagnostic> {
    let mut module = module.clone();
    ir::inline::inline_composites(&mut module, is_in_catalogue);
    if let Some(function) = module.functions.iter_mut().find(|f| f.name == name) {
        narrow_integers(function, &given);
        multiply_integers(function, &given);
    }
    module.functions.iter_mut().for_each(|f| {
        ir::pass::remove_dead_nodes(f);
    });
    let refused = |why: String| Diagnostic::error("E2003", Span::of(format!("@{name}")), why);
    let missing = || refused(format!("there is no function `@{name}`"));
    let function = module.function(name).ok_or_else(missing)?;
    let held = |dtype| {
        matches!(
            dtype,
            DType::F32 | DType::F64 | DType::I32 | DType::U32 | DType::I64 | DType::Bool
        )
    };
    if let Some(value) = function.values.iter().find(|value| !held(value.ty.dtype)) {
        return Err(refused(format!("there is no kernel for the type of `%{}`", value.name)));
    }
    let mut stored = function.clone();
    store_bytes(&mut stored, &given);
    let function = &stored;
    let mut table = KernelTable::default();
    let made = routine(function, &module, &[], &[], &mut table);
    let made = made.map_err(|why| refused(why.to_string()))?;
    for kernel in &table.kernels {
        kernels::verify::verify(kernel).map_err(|why| refused(format!("{kernel}: {why}")))?;
    }
    Ok(Compiled {
        routine: made,
        kernels: table.kernels,
        params: function.param_types(),
        results: function.result_types(),
    })
}
