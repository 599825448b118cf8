//! What a step spent its time on, and the timeline that browsers draw of it.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use ir::program::{Program, Step};
use serde::{Deserialize, Serialize};

/// What is timed in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Tracing {
    /// Nothing but the whole.
    #[default]
    None,
    /// Each step of the programs.
    Steps,
    /// Each step and each instruction.
    Instructions,
}

impl Tracing {
    /// The number of spans that some steps of a program make.
    pub(crate) fn span_count(self, program: &Program, steps: &[Step]) -> usize {
        let inner = |step: &Step| match step {
            Step::Call { routine, .. } => program.routines[*routine].instructions.len(),
            Step::Feed { .. }
            | Step::Send { .. }
            | Step::Receive { .. }
            | Step::Move { .. }
            | Step::Await { .. } => 0,
        };
        match self {
            Tracing::None => 0,
            Tracing::Steps => steps.len(),
            Tracing::Instructions => steps.len() + steps.iter().map(inner).sum::<usize>(),
        }
    }
}

/// The time of a step of a program, or of one instruction in it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Span {
    /// The index of the step.
    pub step: usize,
    /// The index of the instruction; none for the whole step.
    pub instruction: Option<usize>,
    /// When it began, from the start of the session on.
    pub start_s: f64,
    /// How long it took.
    pub seconds: f64,
}

/// A span with a name.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// What was done.
    pub name: String,
    /// When and for how long.
    pub span: Span,
}

/// The spans of all ranks in one step.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    /// By rank, in the order in which they ended.
    pub ranks: Vec<Vec<Event>>,
}

impl Trace {
    /// Names spans, given the rank of each.
    pub(crate) fn new(spans: Vec<Vec<Span>>, name: impl Fn(usize, &Span) -> String) -> Trace {
        let event = |rank: usize, span: Span| Event { name: name(rank, &span), span };
        let events = |(rank, spans): (usize, Vec<Span>)| {
            spans.into_iter().map(|span| event(rank, span)).collect()
        };
        Trace { ranks: spans.into_iter().enumerate().map(events).collect() }
    }

    /// How often each name occurs, and for how long altogether, over all ranks.
    pub fn totals(&self) -> BTreeMap<&str, (usize, f64)> {
        let mut totals = BTreeMap::new();
        for event in self.ranks.iter().flatten() {
            let total: &mut (usize, f64) = totals.entry(event.name.as_str()).or_default();
            *total = (total.0 + 1, total.1 + event.span.seconds);
        }
        totals
    }

    /// The JSON that `chrome://tracing` and Perfetto draw, one row for each rank.
    pub fn to_json(&self) -> String {
        let mut out = String::from("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[");
        let mut separator = "\n";
        for (rank, events) in self.ranks.iter().enumerate() {
            let _ = write!(
                out,
                "{separator}{{\"ph\":\"M\",\"pid\":0,\"tid\":{rank},\"name\":\"thread_name\",\
                 \"args\":{{\"name\":\"rank {rank}\"}}}}"
            );
            separator = ",\n";
            for Event { name, span } in events {
                let name = serde_json::Value::from(name.as_str());
                let (start_us, us) = (span.start_s * 1e6, span.seconds * 1e6);
                let _ = write!(
                    out,
                    "{separator}{{\"ph\":\"X\",\"pid\":0,\"tid\":{rank},\"name\":{name},\
                     \"ts\":{start_us:.3},\"dur\":{us:.3}}}"
                );
            }
        }
        out.push_str("\n]}\n");
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeline_is_json_with_one_row_for_each_rank() {
        let span = |step, start_s| Span { step, instruction: None, start_s, seconds: 0.5 };
        let spans = vec![vec![span(0, 1.0), span(1, 1.5)], vec![span(0, 1.25)]];
        let trace = Trace::new(spans, |rank, span| format!("\"{}\" of {rank}", span.step));
        assert_eq!(trace.totals()["\"0\" of 1"], (1, 0.5));
        let json: serde_json::Value = serde_json::from_str(&trace.to_json()).unwrap();
        let events = json["traceEvents"].as_array().unwrap();
        assert_eq!(events.len(), 5);
        assert_eq!(events[1]["name"], "\"0\" of 0");
        assert_eq!((events[2]["ts"].as_f64(), events[2]["dur"].as_f64()), (Some(1.5e6), Some(5e5)));
        assert_eq!(events[4]["tid"], 1);
    }
}
