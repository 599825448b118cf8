//! Ids: which numbers a model's tokens and labels may be.
//!
//! A table of V rows has none for the id V. Kernels do not say so: a rank that holds a shard of a
//! table yields zeros for the ids of other shards, and so do all of them for an id of no shard. So
//! what an entry looks up by `tokens` and `labels` is read off its functions here, and whoever
//! feeds a batch compares it first.
//!
//! A label is looked up by comparing it with a counter, as `cross_entropy` does. One that is
//! [`IGNORED`] counts for nothing; any other has to be that of a class.
//!
//! What is computed of ids before they are looked up is not followed, but for casts, other dims and
//! columns that are cut out: the module says itself then what other ids are.

use std::fmt;
use std::ops::Range;

use crate::module::{Function, Module, ValueId};
use crate::op::{Comparison, Op};

/// The label that counts for nothing, as PyTorch and transformers have it.
pub const IGNORED: i32 = -100;

/// What the entry of a model asks of the ids that it is fed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ids {
    /// Of its `tokens`.
    pub tokens: Vec<Known>,
    /// Of its `labels`.
    pub labels: Vec<Known>,
}

/// The ids that are known in some columns of `[samples, columns]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Known {
    /// The columns.
    pub columns: Range<usize>,
    /// The ids.
    pub ids: Range<i64>,
}

/// What ids are fed for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Feed {
    /// The tokens of a batch.
    Tokens,
    /// Its labels.
    Labels,
}

/// An id that is not known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unknown {
    /// What it is fed for.
    pub feed: Feed,
    /// Its sample.
    pub sample: usize,
    /// Its column.
    pub column: usize,
    /// The id.
    pub id: i64,
    /// The ids that are known there.
    pub known: Range<i64>,
}

impl fmt::Display for Unknown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.feed {
            Feed::Tokens => "token",
            Feed::Labels => "label",
        };
        let Unknown { sample, column, id, known, .. } = self;
        let last = known.end - 1;
        write!(f, "{what} {id} at [{sample}, {column}] is not one of {}..{last}", known.start)
    }
}

impl Ids {
    /// What an entry of a module asks; nothing where there is no such entry.
    pub fn of(module: &Module, entry: &str) -> Ids {
        let Some(function) = module.function(entry) else { return Ids::default() };
        let known = |name: &str, feed: Feed| {
            let found = function.find(name).filter(|id| id.index() < function.param_count);
            let mut known = Vec::new();
            if let Some(param) = found {
                look_ups(module, function, param, &(0..usize::MAX), feed, &mut known);
            }
            known
        };
        Ids { tokens: known("tokens", Feed::Tokens), labels: known("labels", Feed::Labels) }
    }

    /// The ids that are known in a column; none where any is, or no id is known to all look-ups.
    pub fn range(&self, feed: Feed, column: usize) -> Option<Range<i64>> {
        let here = self.asked(feed).iter().filter(|known| known.columns.contains(&column));
        let all = here.map(|known| known.ids.clone());
        let range = all.reduce(|a, b| a.start.max(b.start)..a.end.min(b.end))?;
        (!range.is_empty()).then_some(range)
    }

    fn asked(&self, feed: Feed) -> &[Known] {
        match feed {
            Feed::Tokens => &self.tokens,
            Feed::Labels => &self.labels,
        }
    }

    /// The first of the tokens or labels of `[samples, columns]`, row-major, that is not known.
    ///
    /// **Cost.** One pass over each for each look-up, some gigabytes a second.
    pub fn unknown<T: Copy + Into<i64>>(
        &self,
        feed: Feed,
        ids: &[T],
        columns: usize,
    ) -> Option<Unknown> {
        self.asked(feed).iter().find_map(|known| known.first_unknown(feed, ids, columns.max(1)))
    }
}

impl Known {
    fn first_unknown<T: Copy + Into<i64>>(
        &self,
        feed: Feed,
        ids: &[T],
        columns: usize,
    ) -> Option<Unknown> {
        let is_ignored = |id: i64| feed == Feed::Labels && id == i64::from(IGNORED);
        let is_known = |id: &T| {
            let id: i64 = (*id).into();
            self.ids.contains(&id) || is_ignored(id)
        };
        let here = self.columns.start.min(columns)..self.columns.end.min(columns);
        for (sample, row) in ids.chunks(columns).enumerate() {
            let row = row.get(here.clone()).unwrap_or_default();
            // Without a branch, so that it is done with vectors.
            if row.iter().fold(true, |all, id| all & is_known(id)) {
                continue;
            }
            let at = row.iter().position(|id| !is_known(id))?;
            let (column, id) = (here.start + at, row[at].into());
            return Some(Unknown { feed, sample, column, id, known: self.ids.clone() });
        }
        None
    }
}

/// Where a value has the ids of a parameter.
#[derive(Clone, Debug)]
struct Trace {
    /// The columns that it has.
    columns: Range<usize>,
    /// Whether its last dim is still that of the columns.
    has_columns: bool,
}

/// Collects what a function looks up by the ids of a parameter, which has these columns.
#[expect(clippy::wildcard_enum_match_arm, reason = "the other ops look nothing up")]
fn look_ups(
    module: &Module,
    function: &Function,
    param: ValueId,
    columns: &Range<usize>,
    feed: Feed,
    known: &mut Vec<Known>,
) {
    let producers = function.producers();
    let counter = |value: ValueId| match producers[value.index()].map(|at| &function.nodes[at].op) {
        Some(Op::Iota { dim, start, dims, .. }) => {
            Some(*start..start + dims.get(*dim)?.as_constant()?)
        }
        _ => None,
    };
    let mut traces: Vec<Option<Trace>> = vec![None; function.values.len()];
    let has_columns = function.ty(param).ndim() == 2;
    traces[param.index()] = Some(Trace { columns: columns.clone(), has_columns });
    for node in &function.nodes {
        for (at, operand) in node.operands.iter().enumerate() {
            let Some(trace) = traces[operand.index()].clone() else { continue };
            let mut note = |ids: Option<Range<i64>>| {
                let Some(ids) = ids else { return };
                let found = Known { columns: trace.columns.clone(), ids };
                if !known.contains(&found) {
                    known.push(found);
                }
            };
            match &node.op {
                Op::Gather { dim, start } if at == 1 => {
                    let rows = function.ty(node.operands[0]).dims[*dim].as_constant();
                    note(rows.map(|rows| *start..start.saturating_add(rows)));
                }
                Op::Compare(Comparison::Eq) if feed == Feed::Labels => {
                    note(counter(node.operands[1 - at]));
                }
                Op::Call { function: callee } => {
                    if let Some(callee) = module.function(callee) {
                        let inner = ValueId(at as u32);
                        look_ups(module, callee, inner, &trace.columns, feed, known);
                    }
                }
                op => traces[node.result().index()] = trace.through(op),
            }
        }
    }
}

impl Trace {
    /// Where the result of an op has the ids that its operand has here.
    #[expect(clippy::wildcard_enum_match_arm, reason = "what other ops yield are other numbers")]
    fn through(&self, op: &Op) -> Option<Trace> {
        match op {
            Op::Cast { dtype } if !dtype.is_float() => Some(self.clone()),
            Op::Reshape { .. } | Op::Transpose { .. } | Op::Broadcast { .. } => {
                Some(Trace { has_columns: false, ..self.clone() })
            }
            Op::Slice { dim: 1, start, size } if self.has_columns => {
                let from = self.columns.start + start;
                Some(Trace { columns: from..from + size, has_columns: true })
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::parse_module;

    const TEXT: &str = "module m
  func @embed(%tokens: i32[B, 4], %wide: f32[9, 2], %first: f32[3, 2], %moved: f32[5, 2]) {
    %x: f32[B, 4, 2] = gather dim=0 start=0 %wide %tokens
    %cut: i32[B, 2] = slice dim=1 start=1 size=2 %tokens
    %one: i32[B, 1] = slice dim=1 start=1 size=1 %cut
    %flat: i32[B] = reshape %one
    %a: f32[B, 2] = gather dim=0 start=0 %first %flat
    %b: f32[B, 2, 2] = gather dim=0 start=10 %moved %cut
    %other: i32[B, 4] = add %tokens %tokens
    %y: f32[B, 4, 2] = gather dim=0 start=0 %first %other
    return %x
  }
  func @head(%labels: i32[B, 4]) {
    %id: i32[B, 4, 7] = iota dim=2 start=0
    %label: i32[B, 4, 7] = broadcast new=[2] %labels
    %hit: bool[B, 4, 7] = eq %id %label
    return %hit
  }
  func @loss(
    %wide: f32[9, 2],
    %first: f32[3, 2],
    %moved: f32[5, 2],
    %tokens: i32[B, 4],
    %labels: i32[B, 4]
  ) {
    %x: f32[B, 4, 2] = call @embed %tokens %wide %first %moved
    %hit: bool[B, 4, 7] = call @head %labels
    return %x %hit
  }
";

    #[test]
    fn ids_are_those_of_the_tables_that_they_look_up() {
        let module = parse_module("m", TEXT).unwrap();
        let ids = Ids::of(&module, "loss");
        let known = |columns: Range<usize>, ids: Range<i64>| Known { columns, ids };
        let tokens = [known(0..usize::MAX, 0..9), known(2..3, 0..3), known(1..3, 10..15)];
        assert_eq!(ids.tokens, tokens);
        assert_eq!(ids.labels, [known(0..usize::MAX, 0..7)]);
        assert_eq!(Ids::of(&module, "none"), Ids::default());
    }

    #[test]
    fn the_first_id_that_is_not_known_is_told_with_its_place() {
        let known = |columns: Range<usize>, ids: Range<i64>| Known { columns, ids };
        let ids = Ids {
            tokens: vec![known(0..usize::MAX, 0..9), known(1..2, 0..3)],
            labels: vec![known(0..usize::MAX, 0..7)],
        };
        let said = |feed: Feed, values: &[i64]| {
            ids.unknown(feed, values, 3).map(|unknown| unknown.to_string())
        };
        assert_eq!(said(Feed::Tokens, &[0, 2, 8, 8, 0, 0]), None);
        let wide = (1_i64 << 32) + 5;
        assert_eq!(
            said(Feed::Tokens, &[0, 2, 8, 8, 0, wide]).unwrap(),
            "token 4294967301 at [1, 2] is not one of 0..8"
        );
        assert_eq!(
            said(Feed::Tokens, &[0, 2, 8, 8, 3, 0]).unwrap(),
            "token 3 at [1, 1] is not one of 0..2"
        );
        assert_eq!(said(Feed::Tokens, &[0, -100, 0]).unwrap().split(' ').nth(1), Some("-100"));
        assert_eq!(said(Feed::Labels, &[0, -100, 6]), None);
        for label in [-1, 7, -101, (1 << 32) - 100] {
            let found = said(Feed::Labels, &[0, 1, 2, 3, label, 6]).unwrap();
            assert_eq!(found, format!("label {label} at [1, 1] is not one of 0..6"));
        }
    }
}
