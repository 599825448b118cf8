//! Plans of inference for GPUs, as files that `generate --plan` carries out.

use std::collections::BTreeMap;

use ir::plan::Prediction;
use ir::plan::buckets::usual_buckets;
use ir::precision::Precision;
use ir::{Diagnostic, Mesh, Plan, Span};
use planner::check::check_memory;
use planner::inference::Replicas;

use super::{AtOnce, Copies, Row};
use crate::failure::{Failure, usage};
use crate::generation::{DECODE, Pieces};
use crate::job;
use crate::output;
use crate::verbs::flags::RequestFlags;

/// Programs that are compiled at most, each for fewer slots than the one before. Chosen: their
/// memory is a line of the slots, which two of them tell.
const COMPILED_MAX: usize = 4;

/// Said of pipelines.
const ONE_GROUP: &str = "warning: the answer lets groups of sequences follow each other through \
                         the stages; programs have one group, whose stages wait for each other, \
                         and the plan predicts nothing";

/// The plan of a row, with as many of its slots as its compiled programs have memory for.
///
/// # Errors
/// What programs do not carry out; a model that cannot be built; `E3308` where no slot fits.
pub(super) fn plan(copies: &Copies<'_>, row: &Row, asked: &RequestFlags) -> Result<Plan, Failure> {
    refuse_others(copies, row)?;
    let subject = copies.subject;
    let (dtype, _) = subject.dtype.computed();
    let precision = Precision::uniform(dtype);
    let description = crate::resolve_quietly(asked.model.path())?.description;
    let capacity = match copies.wanted.lengths {
        Some(lengths) => usize::try_from(lengths.context()).unwrap_or(usize::MAX),
        None => subject.seq as usize,
    };
    let pieces = Pieces::of(&description, &usual_buckets(capacity), capacity, &precision)?;
    let (tp, pp, dp) = (row.copy.tp as usize, row.copy.pp as usize, row.copies as usize);
    let mesh = Mesh { pp, dp, tp, ..Mesh::ONE };
    let (model, modules) = (&pieces.model.name, &pieces.modules);
    let mut slots = row.sequences.div_ceil(u64::from(row.copies)).max(1) as usize;
    let mut none = None;
    for _ in 0..COMPILED_MAX {
        let replicas = Replicas { model, modules, entry: DECODE, mesh, slots, capacity, precision };
        let all = slots as u64 * u64::from(row.copies);
        let plan = Plan {
            cluster: subject.cluster.describe(),
            target: subject.cluster.target(),
            predictions: predictions(&copies.row_of(row.copy, row.copies, AtOnce::Stated(all))),
            ..replicas.plan()?
        };
        let programs = pieces.compile(&plan)?;
        let footprints = programs.footprints(&subject.cluster, mesh.ranks());
        let Some(wrong) = check_memory(&plan, &footprints, &subject.cluster) else {
            if pp > 1 {
                output::note(ONE_GROUP);
            }
            return Ok(plan);
        };
        none = Some(wrong);
        if slots == 1 {
            break;
        }
        // What there is of what is needed, and a little less for what does not grow with slots.
        let need = footprints.iter().map(planner::footprint::Footprint::total).max().unwrap_or(1);
        let share = copies.have_bytes() / need as f64;
        slots = ((slots as f64 * share * 0.95) as usize).clamp(1, slots - 1);
    }
    Err(none.map_or_else(|| usage("--for", "no slot fits".to_owned()).into(), Failure::from))
}

/// What is predicted of a row, where programs do what is priced: in a pipeline they have one group
/// of sequences.
fn predictions(row: &Row) -> BTreeMap<String, Prediction> {
    if row.copy.pp > 1 {
        return BTreeMap::new();
    }
    let seconds = [
        ("token_s", row.token_s()),
        ("first_token_s", row.prompt.map(|prompt| prompt.latency_s)),
        ("tokens_per_s", row.rate().map(|rate| rate * row.devices())),
    ];
    let told = |value: f64| Prediction { value, origin: "fitted".to_owned() };
    seconds.into_iter().filter_map(|(name, value)| Some((name.to_owned(), told(value?)))).collect()
}

/// Refuses what is priced and not carried out.
fn refuse_others(copies: &Copies<'_>, row: &Row) -> Result<(), Failure> {
    let requests = &copies.wanted.requests;
    let refuse = |what: &str| {
        let headline = format!("programs for inference have no {what} yet");
        Diagnostic::error("E5010", Span::of("--for"), headline)
            .help("leave it out, or leave out -o and --plan: the answer stands")
    };
    let alone = copies.serving.alone(row.copy.tp, row.copy.pp);
    let given = [
        (row.copy.ep != alone.ep, "`ep` over replicas"),
        (requests.weight_dtype.is_some(), "weights of another type"),
        (requests.kv_dtype.is_some(), "KV caches of another type"),
        (requests.shared_prefix.is_some(), "shared prefix"),
        (requests.draft_tokens.is_some(), "speculative decoding"),
        (requests.engine.is_some(), "other engine's execution"),
    ];
    let refused = given.into_iter().filter(|(is_given, _)| *is_given);
    let mut refused: Vec<Diagnostic> = refused.map(|(_, what)| refuse(what)).collect();
    let (dtype, products) = copies.subject.dtype.computed();
    if products != ir::precision::Products::Own || job::check_executable(dtype).is_err() {
        refused.push(refuse(&format!("products in {}", copies.subject.dtype)));
    }
    if refused.is_empty() { Ok(()) } else { Err(refused.into()) }
}
