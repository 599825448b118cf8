//! What kernels add to.

use crate::kernel::Kernel;
use crate::rows::Output;

impl Kernel {
    /// For each output that can be added to, whether it is.
    pub fn sums(&mut self) -> Vec<&mut bool> {
        match self {
            Kernel::Product(p) => vec![&mut p.accumulate],
            Kernel::Products(p) => {
                let (mut products, mut then) = (Vec::new(), Vec::new());
                for part in &mut p.parts {
                    products.push(&mut part.product.accumulate);
                    let programs = part.then.iter_mut();
                    then.extend(programs.flat_map(|p| &mut p.rows.outputs).map(accumulates));
                }
                products.into_iter().chain(then).collect()
            }
            Kernel::ScatterAdd(g) => vec![&mut g.accumulate],
            Kernel::ExpertsBwd(e) => e.accumulate.iter_mut().collect(),
            Kernel::Rows(r) => r.outputs.iter_mut().map(accumulates).collect(),
            Kernel::Attention(_)
            | Kernel::AttentionBwd(_)
            | Kernel::Experts(_)
            | Kernel::Gather(_)
            | Kernel::Replace(_)
            | Kernel::Lines(_)
            | Kernel::Rope(_)
            | Kernel::Copy(_)
            | Kernel::Place(_)
            | Kernel::Take(_)
            | Kernel::Fill(_) => Vec::new(),
        }
    }
}

fn accumulates(output: &mut Output) -> &mut bool {
    match output {
        Output::Store { accumulate, .. }
        | Output::ColSum { accumulate, .. }
        | Output::TotalSum { accumulate, .. } => accumulate,
    }
}
