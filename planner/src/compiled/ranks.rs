//! How many ranks a model can use: meshes on which each rank has work of its own.

use std::collections::BTreeSet;

use ir::factors::factors;
use ir::plan::ContextForm;
use ir::{Class, Diagnostic, Dim, Function, Mesh, Module, Node, Span};

use super::{Job, allows};
use crate::divisors::{divisors, gcd};
use crate::limits::{Decision, Limits};
use crate::shard::{experts_of, layers};

/// Numbers of ranks that are suggested instead. Chosen: enough to see a pattern.
const SUGGESTED: usize = 3;

/// The most ranks along the axes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usable {
    /// Pipeline stages: calls of layers.
    pub stages: usize,
    /// Tensor-parallel ranks: heads of the attention with the fewest; where there is none, pieces
    /// of the product with the most.
    pub tensor: usize,
    /// Expert-parallel ranks: the experts of a layer; 1 where layers have none.
    pub experts: usize,
    /// The weights of the entry that experts compute with.
    pub weights_of_experts: BTreeSet<String>,
}

impl Usable {
    /// What a job's model can use.
    ///
    /// # Errors
    /// `E3103` when the module has no such entry.
    pub fn of(job: &Job<'_>) -> Result<Usable, Diagnostic> {
        let layers = layers(job.module, job.entry)?;
        let stages = layers.iter().map(|layer| layer.calls).sum();
        let functions = layers.iter().filter_map(|layer| job.module.function(&layer.function));
        let tensor = tensor_max(job.module, functions);
        let experts = experts_of(job.module, &layers);
        let weights_of_experts = experts.keys().cloned().collect();
        let experts = experts.into_values().reduce(gcd).unwrap_or(1);
        Ok(Usable { stages, tensor, experts, weights_of_experts })
    }

    /// The meshes of `ranks` ranks that a job allows. More tensor-parallel ranks than are useful
    /// are allowed only where the job fixes their number; ranks that share tokens where it does,
    /// and where they are too many to have samples of their own, which exchanges less.
    pub fn meshes(&self, job: &Job<'_>, ranks: usize) -> Vec<Mesh> {
        let is_fixed = job.limits.fixed(Decision::Tp).is_some();
        let mut meshes = Vec::new();
        for pp in divisors(ranks)
            .into_iter()
            .filter(|pp| *pp <= self.stages && allows(job, Decision::Pp, *pp))
        {
            let useful = |tp: &usize| *tp <= self.tensor || is_fixed;
            let all = divisors(ranks / pp).into_iter().filter(useful);
            for tp in all.filter(|tp| allows(job, Decision::Tp, *tp)) {
                let of_stage = ranks / pp / tp;
                for cp in divisors(of_stage).into_iter().filter(|cp| shares_tokens(job, *cp)) {
                    let dp = of_stage / cp;
                    let samples = job.global_batch_size;
                    let is_needed = cp == 1 || !samples.is_multiple_of(of_stage);
                    let is_allowed = is_needed || job.limits.fixed(Decision::Cp) == Some(cp);
                    let fits = allows(job, Decision::Dp, dp) && samples.is_multiple_of(dp);
                    if is_allowed && fits {
                        meshes.push(Mesh { pp, dp, cp, tp, ..Mesh::ONE });
                    }
                }
            }
        }
        meshes
    }

    /// Whether a job's ranks can all be used, within its limits or without.
    ///
    /// # Errors
    /// `E3204` with the model's limits and the next smaller numbers of ranks that can be, and where
    /// tokens are no pieces of one size for as many ranks as are told to share them.
    pub fn check(&self, job: &Job<'_>) -> Result<(), Diagnostic> {
        let pieces = ContextForm::default().pieces(job.limits.fixed(Decision::Cp).unwrap_or(1));
        if !job.seq.is_multiple_of(pieces) {
            let headline = format!("{} tokens are not {pieces} equal pieces", job.seq);
            let help = "use a `cp` whose double divides the tokens, or another --seq";
            return Err(Diagnostic::error("E3204", Span::of("--fix"), headline).help(help));
        }
        let free = Job { limits: Limits::default(), ..job.clone() };
        if !self.meshes(job, job.ranks).is_empty() || !self.meshes(&free, job.ranks).is_empty() {
            return Ok(());
        }
        let Usable { stages, tensor, .. } = self;
        let (model, ranks, samples) = (&job.model, job.ranks, job.global_batch_size);
        let headline = format!("`{model}` cannot use {ranks} ranks in steps of {samples} samples");
        let fewer = (1..ranks).rev().filter(|fewer| !self.meshes(job, *fewer).is_empty());
        let fewer: Vec<String> = fewer.take(SUGGESTED).map(|n| n.to_string()).collect();
        let help = match fewer.is_empty() {
            true => "use another batch".to_owned(),
            false => format!("use --ranks {}, or another batch", fewer.join(" or ")),
        };
        Err(Diagnostic::error("E3204", Span::of("--ranks"), headline)
            .note("pp · dp · cp · tp is the number of ranks")
            .note(format!("pp is at most {stages}, its calls of layers; dp divides {samples}"))
            .note(format!("tp is at most {tensor}, the pieces of its attention or products"))
            .note(format!("2 · cp divides {}, the tokens of a sample", job.seq))
            .help(help))
    }
}

/// Whether a job allows `cp` ranks to share its tokens: they have equal pieces.
fn shares_tokens(job: &Job<'_>, cp: usize) -> bool {
    let pieces = ContextForm::default().pieces(cp);
    allows(job, Decision::Cp, cp) && job.seq.is_multiple_of(pieces)
}

/// The most pieces of the call of a composite that can be cut into the fewest; without such calls,
/// of the product that can be cut into the most.
fn tensor_max<'m>(module: &Module, functions: impl Iterator<Item = &'m Function>) -> usize {
    let pieces = |node: &Node, function: &Function| {
        let factors = factors(node, function, module).into_iter();
        let factors = factors.filter(|factor| !factor.units.mentions(Dim::BATCH));
        factors.filter_map(|factor| factor.units.as_constant()).max().map(|units| units as usize)
    };
    let (mut of_calls, mut of_products) = (None, 1);
    for function in functions {
        for node in &function.nodes {
            let class = node.op.class();
            if class != Class::Call && class != Class::Product {
                continue;
            }
            let Some(pieces) = pieces(node, function) else { continue };
            if class == Class::Call {
                of_calls = Some(of_calls.map_or(pieces, |least: usize| least.min(pieces)));
            } else {
                of_products = of_products.max(pieces);
            }
        }
    }
    of_calls.unwrap_or(of_products)
}
