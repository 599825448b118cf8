//! Does it fit: one row per strategy, with what holds the bytes of its fullest rank.

use std::fmt;

use ir::{Diagnostic, Mesh};
use kernels::Bytes;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::cluster::Memory;
use crate::compiled::{Job, Scorer, Usable};
use crate::divisors::divisors;
use crate::elaborate::Name;
use crate::footprint::Footprint;
use crate::limits::{Decision, Limits};

/// The memory of one strategy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Row {
    /// What it is called.
    pub strategy: String,
    /// The bytes of the fullest rank.
    pub footprint: Footprint,
    /// The bytes of the fullest place: of a rank, or of all ranks that share a memory.
    pub need_bytes: u64,
    /// The bytes that it has.
    pub have_bytes: u64,
    /// Whether that place is the memory of a node, which all its ranks share.
    pub is_shared: bool,
}

impl Row {
    /// Whether it fits.
    pub fn fits(&self) -> bool {
        self.need_bytes <= self.have_bytes
    }
}

/// The memory of all strategies of a job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Fit {
    /// The model.
    pub model: String,
    /// The cluster, with what was read from the machine.
    pub cluster: String,
    /// One row per mesh, with and without recomputation, in micro-batches of one sample.
    pub rows: Vec<Row>,
}

impl Fit {
    /// Whether any strategy fits.
    pub fn fits(&self) -> bool {
        self.rows.iter().any(Row::fits)
    }
}

/// The memory of a job under each mesh of its ranks, in micro-batches of one sample unless the
/// limits fix their size.
///
/// # Errors
/// `E3204` when the model cannot use the ranks; what sharding and compiling report, when no
/// strategy can be compiled.
pub fn fit(job: &Job<'_>) -> Result<Fit, Diagnostic> {
    let usable = Usable::of(job)?;
    usable.check(job)?;
    let mut scorer = Scorer::new(job)?;
    let mut rows = Vec::new();
    let mut failed = None;
    let fixed = job.limits.fixed(Decision::Tp);
    let is_useful = |mesh: &Mesh| mesh.tp <= usable.tensor || fixed == Some(mesh.tp);
    let cp = job.limits.fixed(Decision::Cp).unwrap_or(1);
    for mesh in meshes(job.ranks, cp).into_iter().filter(is_useful) {
        for sequence in [false, true] {
            for keep in [1, 0] {
                if sequence && mesh.tp == 1 {
                    continue;
                }
                let Some(limits) = strategy(&job.limits, mesh, sequence, keep) else { continue };
                match scorer.first(&limits) {
                    Ok(scored) => rows.push(Row {
                        // All rows have micro-batches of one size.
                        strategy: strategy_name(&scored.name),
                        footprint: scored
                            .footprints
                            .iter()
                            .copied()
                            .max_by_key(Footprint::total)
                            .unwrap_or_default(),
                        need_bytes: scored.need.0,
                        have_bytes: scored.have.0,
                        is_shared: matches!(job.cluster.memory(), Memory::PerNode(_)),
                    }),
                    Err(diagnostic) => _ = failed.get_or_insert(diagnostic),
                }
            }
        }
    }
    match failed {
        Some(diagnostic) if rows.is_empty() => Err(diagnostic),
        Some(_) | None => {
            Ok(Fit { model: job.model.clone(), cluster: job.cluster.describe(), rows })
        }
    }
}

/// All meshes of a number of ranks, `cp` of which share tokens.
fn meshes(ranks: usize, cp: usize) -> Vec<Mesh> {
    if !ranks.is_multiple_of(cp) {
        return Vec::new();
    }
    let rest = ranks / cp;
    let of_stage = |pp: usize| {
        let mesh = move |tp: usize| Mesh { pp, dp: rest / pp / tp, cp, tp, ..Mesh::ONE };
        divisors(rest / pp).into_iter().map(mesh)
    };
    divisors(rest).into_iter().flat_map(of_stage).collect()
}

/// The limits of one strategy; none when the user's forbid it.
fn strategy(limits: &Limits, mesh: Mesh, sequence: bool, keep: usize) -> Option<Limits> {
    let mut fixed = limits.clone();
    let decisions = [
        (Decision::Pp, mesh.pp),
        (Decision::Dp, mesh.dp),
        (Decision::Cp, mesh.cp),
        (Decision::Tp, mesh.tp),
        (Decision::Sp, usize::from(sequence)),
        (Decision::Keep, keep),
    ];
    for (decision, number) in decisions {
        limits.allow(decision, number).then_some(())?;
        fixed.fix(decision, number);
    }
    if limits.fixed(Decision::Mbs).is_none() {
        fixed.fix(Decision::Mbs, 1);
    }
    Some(fixed)
}

/// The name of a strategy: what its plans have beside one rank and micro-batches of one sample.
fn strategy_name(name: &Name) -> String {
    let name = name.configuration.to_string();
    let words: Vec<&str> = name.split(' ').filter(|word| !word.ends_with("=1")).collect();
    if words.is_empty() { "one rank".to_owned() } else { words.join(" ") }
}

impl fmt::Display for Fit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} on {}\n", self.model, self.cluster)?;
        let width = self.rows.iter().map(|r| r.strategy.chars().count()).max().unwrap_or(0).max(8);
        writeln!(
            f,
            "  {:<width$} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}",
            "strategy", "weights", "grads", "optim", "act", "scratch", "a rank"
        )?;
        for row in &self.rows {
            let Footprint { params, grads, states, activations, workspace, .. } = row.footprint;
            let mut line = format!("  {:<width$}", row.strategy);
            for bytes in [params, grads, states, activations, workspace, row.footprint.total()] {
                line += &format!(" {:>9}", Bytes(bytes).to_string());
            }
            let share = 100.0 * row.need_bytes as f64 / row.have_bytes.max(1) as f64;
            let mark = if row.fits() { "✓" } else { "✗" };
            let of = if row.is_shared { " of the node" } else { "" };
            writeln!(f, "{line}  {mark} {share:.0}%{of}")?;
        }
        let have = Bytes(self.rows.first().map_or(0, |r| r.have_bytes));
        match self.rows.iter().filter(|r| r.fits()).count() {
            0 => {
                let closest = self.rows.iter().min_by_key(|r| r.need_bytes);
                let over = closest.map_or(0, |r| r.need_bytes - r.have_bytes);
                writeln!(f, "✗ nothing fits in {have}; {} is missing at least", Bytes(over))
            }
            count => writeln!(f, "✓ {count} of {} fit in {have}", self.rows.len()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compiled::tests::{cluster, job, module};

    #[test]
    fn every_strategy_has_a_row() {
        let module = module(2);
        let cluster = cluster(3 << 20);
        let fit = fit(&job(&module, &cluster, 2)).unwrap();
        assert_eq!(fit.rows.len(), 8);
        assert!(fit.to_string().lines().all(|l| l.chars().count() <= 110), "{fit}");
    }
}
