//! Which layouts make sense: one set of rules for what is searched and for what users write.

use ir::{Diagnostic, Span};

use super::workload::{Item, Workload};
use crate::configuration::{Configuration, Recompute, Schedule};
use crate::divisors::gcd;

/// Tokens of a context-parallel rank at least. Chosen: below, its products are all start-up.
pub const TOKENS_MIN: u32 = 64;

/// What tensor-parallel ranks divide: heads, and widths where there are none.
pub fn tensor_units(work: &Workload) -> u32 {
    let heads = items(work).filter_map(|item| {
        if let Item::Attention { heads, .. } = item { Some(*heads) } else { None }
    });
    work.tensor_units.unwrap_or(match heads.fold(0, gcd) {
        0 => work.width,
        heads => heads,
    })
}

/// What expert-parallel ranks divide; 1 where there are no experts.
pub fn expert_units(work: &Workload) -> u32 {
    let counts = items(work).filter_map(|item| {
        if let Item::Experts { count, .. } = item { Some(*count) } else { None }
    });
    counts.fold(0, gcd).max(1)
}

/// The number of equal pieces that so many context-parallel ranks cut a sample into: two each, so
/// that all have as much of a causal mask.
pub fn context_pieces(cp: u32) -> u32 {
    if cp == 1 { 1 } else { cp.saturating_mul(2) }
}

/// Whether a pipeline of `pp` stages is filled by `m` micro-batches as its schedule says: zero
/// bubbles are filled by the micro-batches that a stage has ahead.
pub fn is_filled(schedule: Schedule, pp: u32, m: u64) -> bool {
    let pp = u64::from(pp);
    match schedule {
        Schedule::GPipe | Schedule::OneForwardOneBackward => true,
        Schedule::ZeroBubbleH1 => m >= pp,
        Schedule::ZeroBubbleH2 => m + 2 > 2 * pp,
    }
}

/// Everything about a layout that the model cannot be cut into, or that a step of `global_batch`
/// samples cannot be.
///
/// # Errors
/// `E3401`, once for each.
pub fn check(work: &Workload, c: &Configuration, global_batch: u64) -> Result<(), Vec<Diagnostic>> {
    check_model(work, c)?;
    match c.microbatch_count(global_batch) {
        Some(m) => refuse(c, schedule_wrongs(work, c, m)),
        None => Err(vec![undivided(c, global_batch)]),
    }
}

/// The same of the model alone, whatever the batch.
///
/// # Errors
/// `E3401`, once for each.
pub fn check_model(work: &Workload, c: &Configuration) -> Result<(), Vec<Diagnostic>> {
    c.check(work.depth())?;
    let mut wrong = said(c, model_wrongs(work, c));
    if c.zero.stage > 0 && expert_units(work) > 1 && !may_shard(c, c.zero.shard) {
        wrong.push(unsharded(c));
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong) }
}

/// Whether shards over so many ranks, or over all where it is 0, also divide the copies of experts:
/// where not, the sums of some would be left out.
pub fn may_shard(c: &Configuration, shard: u32) -> bool {
    let copies = expert_copies(c);
    c.ep <= 1 || shard == 0 || copies.is_multiple_of(copies.min(shard.into()))
}

/// Ranks that hold the same experts.
fn expert_copies(c: &Configuration) -> u64 {
    let ranks = [c.dp, c.cp, c.tp].into_iter().map(u64::from).product::<u64>();
    (ranks / u64::from(c.ep.max(1))).max(1)
}

fn unsharded(c: &Configuration) -> Diagnostic {
    let (shard, copies) = (c.zero.shard, expert_copies(c));
    let headline = format!(
        "experts have {copies} copies (dp · cp · tp / ep), which shards over {shard} ranks do not \
         divide"
    );
    let fits =
        |ranks: &u32| c.dp.saturating_mul(c.cp).is_multiple_of(*ranks) && may_shard(c, *ranks);
    let near = (1..shard).rev().find(fits).unwrap_or(1);
    let help = match near {
        1 => format!("write `zero={}`, which shards over all ranks", c.zero.stage),
        near => format!("write `zero={}/{near}`, or another `ep`", c.zero.stage),
    };
    Diagnostic::error("E3401", Span::of(c.to_string()), headline).help(help)
}

fn refuse(c: &Configuration, wrong: Vec<String>) -> Result<(), Vec<Diagnostic>> {
    if wrong.is_empty() { Ok(()) } else { Err(said(c, wrong)) }
}

fn said(c: &Configuration, wrong: Vec<String>) -> Vec<Diagnostic> {
    let said = |text| Diagnostic::error("E3401", Span::of(c.to_string()), text);
    wrong.into_iter().map(said).collect()
}

/// A batch that micro-batches do not divide.
pub(super) fn undivided(c: &Configuration, global_batch: u64) -> Diagnostic {
    let Configuration { dp, microbatch, .. } = c;
    let headline = format!("{global_batch} samples over dp={dp} in micro-batches of {microbatch}");
    let help = "choose a batch that is a multiple of dp × mbs";
    Diagnostic::error("E3401", Span::of(c.to_string()), headline).help(help)
}

/// What of the model the layout does not divide.
fn model_wrongs(work: &Workload, c: &Configuration) -> Vec<String> {
    let mut wrong = Vec::new();
    let heads = tensor_units(work);
    if !heads.is_multiple_of(c.tp) {
        wrong.push(format!("`tp` is {}, which does not divide {heads}", c.tp));
    }
    let experts = expert_units(work);
    if !experts.is_multiple_of(c.ep) {
        wrong.push(format!("`ep` is {}, which does not divide {experts} experts", c.ep));
    }
    let (seq, cp) = (work.seq, c.cp);
    if !seq.is_multiple_of(context_pieces(cp)) {
        wrong.push(format!("`cp` is {cp}, and {seq} tokens are not twice as many equal pieces"));
    } else if cp > 1 && seq / cp < TOKENS_MIN {
        let each = seq / cp;
        wrong.push(format!("`cp` is {cp}: {each} tokens a rank, and it takes {TOKENS_MIN}"));
    }
    if c.stage_layers.contains(&0) {
        wrong.push("a stage has no layer".to_owned());
    }
    let deepest = c.deepest(work.depth());
    if let Recompute::Layers(layers) = c.recompute
        && layers > deepest
    {
        wrong.push(format!("{layers} layers of a stage are computed again, and it has {deepest}"));
    }
    wrong
}

/// What of the order of `m` micro-batches cannot be.
fn schedule_wrongs(work: &Workload, c: &Configuration, m: u64) -> Vec<String> {
    let mut wrong = Vec::new();
    let Configuration { pp, vpp, .. } = *c;
    let name = c.schedule.name();
    if pp > 1 && !is_filled(c.schedule, pp, m) {
        wrong.push(format!("{m} micro-batches are too few for {name} over {pp} stages"));
    }
    if vpp > 1 {
        if let Some((stage, layers)) = unfilled(c, work.depth()) {
            wrong.push(format!(
                "stage {stage} has {layers} layers for {vpp} chunks: none but the first and the \
                 last chunk of all may be empty"
            ));
        }
        if let Recompute::Layers(again) = c.recompute
            && !again.is_multiple_of(vpp)
        {
            wrong.push(format!(
                "{again} layers of a stage are computed again, not equally many of {vpp} chunks"
            ));
        }
        // Interleaving goes round in groups of as many micro-batches as there are stages.
        if !m.is_multiple_of(u64::from(pp)) {
            wrong.push(format!("`vpp` is {vpp}, and {pp} stages do not divide {m} micro-batches"));
        }
    }
    wrong
}

/// The first stage that has too few layers for its chunks, and how many it has.
pub fn unfilled(c: &Configuration, depth: u32) -> Option<(u32, u32)> {
    let mut stage = 0;
    while stage < c.pp {
        let (layers, alike) = c.layers_of(depth, stage);
        // Of stages that are alike an end has the most room.
        for at in [stage, stage + 1].into_iter().take(alike.min(2) as usize) {
            if !c.fills_chunks(layers, at) {
                return Some((at, layers));
            }
        }
        stage += alike;
    }
    None
}

fn items(work: &Workload) -> impl Iterator<Item = &Item> {
    work.layers.iter().flat_map(|layer| &layer.items)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::space::models;

    /// What is wrong with a layout of a batch, in words.
    fn told(model: &str, text: &str, batch: u64) -> Vec<String> {
        let work = models::shape(model).unwrap().workload().unwrap();
        let found = check(&work, &text.parse().unwrap(), batch);
        found.err().into_iter().flatten().map(|diagnostic| diagnostic.headline).collect()
    }

    /// Each rule alone refuses what breaks it, and nothing that just keeps it: 32 heads and layers,
    /// 8,192 tokens.
    #[test]
    fn each_rule_refuses_what_breaks_it_alone() {
        for (keeps, breaks, batch, said) in [
            ("tp=4", "tp=3", 8, "does not divide 32"),
            ("cp=4", "cp=3", 8, "twice as many equal pieces"),
            ("cp=128", "cp=8192", 8, "twice as many equal pieces"),
            ("cp=128", "cp=256", 8, "32 tokens a rank"),
            ("pp=2 stages=31.1", "pp=2 stages=32.0", 8, "no layer"),
            ("pp=2 recompute=layers:16", "pp=2 recompute=layers:17", 8, "17 layers of a stage"),
            ("pp=2 stages=20.12 recompute=layers:20", "pp=2 recompute=layers:20", 8, "it has 16"),
            ("pp=8 schedule=zb-h1", "pp=9 schedule=zb-h1", 8, "8 micro-batches are too few"),
            ("pp=4 schedule=zb-h2", "pp=4 mbs=7 schedule=zb-h2", 7, "1 micro-batches are too few"),
            ("pp=4 schedule=zb-h2", "pp=5 schedule=zb-h2", 8, "8 micro-batches are too few"),
            ("pp=2 vpp=17", "pp=2 vpp=17 stages=17.15", 8, "stage 1 has 15 layers for 17 chunks"),
            ("pp=4 vpp=8 stages=7.9.9.7", "pp=4 vpp=8 stages=8.7.9.8", 8, "stage 1 has 7 layers"),
            ("pp=2 vpp=2 recompute=layers:4", "pp=2 vpp=2 recompute=layers:3", 8, "of 2 chunks"),
            ("pp=2 vpp=2", "pp=4 vpp=2", 6, "4 stages do not divide 6 micro-batches"),
            ("dp=4 mbs=2", "dp=4 mbs=4", 8, "8 samples over dp=4"),
        ] {
            assert_eq!(told("llama-3-8b", keeps, batch), [""; 0], "{keeps}");
            let found = told("llama-3-8b", breaks, batch);
            let is_alone = found.len() == 1 && found[0].contains(said);
            assert!(is_alone, "{breaks}: {found:?}");
        }
        assert_eq!(told("mixtral-8x7b", "dp=8 ep=4", 8), [""; 0]);
        let found = told("mixtral-8x7b", "dp=12 ep=6", 12);
        assert_eq!(found, ["`ep` is 6, which does not divide 8 experts"]);
        // Six copies of experts, and twelve of the rest.
        for (keeps, breaks) in [("1/3", "1/4"), ("1/6", "3/4"), ("3", "2/4"), ("1/12", "1/4")] {
            let text = |zero| format!("dp=12 ep=2 zero={zero}");
            assert_eq!(told("mixtral-8x7b", &text(keeps), 12), [""; 0], "{keeps}");
            let found = told("mixtral-8x7b", &text(breaks), 12);
            let is_alone = found.len() == 1 && found[0].contains("6 copies");
            assert!(is_alone, "{breaks}: {found:?}");
            assert_eq!(told("mixtral-8x7b", &format!("dp=12 zero={breaks}"), 12), [""; 0]);
        }
    }
}
