//! Which layouts make sense: one set of rules for what is searched and for what users write.

use ir::{Diagnostic, Span};

use super::workload::{Item, Workload};
use crate::configuration::{Configuration, Recompute, Schedule, divisor_within};
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

/// Number of equal pieces that a sample is split into over `cp` context-parallel ranks: two for
/// each rank, so that all ranks have equal parts of a causal mask; 1 without context parallelism.
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

/// What is wrong with a layout, and the way out.
type Wrong = (String, String);

/// Everything about a layout that the model cannot be cut into, or that a step of `global_batch`
/// samples cannot be.
///
/// # Errors
/// `E3401`, once for each.
pub fn check(work: &Workload, c: &Configuration, global_batch: u64) -> Result<(), Vec<Diagnostic>> {
    let mut wrong = check_model(work, c).err().unwrap_or_default();
    if c.is_countable() {
        match c.microbatch_count(global_batch) {
            Some(m) => wrong.extend(said(c, schedule_wrongs(work, c, m))),
            None => wrong.push(undivided(c, global_batch)),
        }
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong) }
}

/// Checks a configuration against the model alone, whatever the batch.
///
/// # Errors
/// `E3401`, once for each.
pub fn check_model(work: &Workload, c: &Configuration) -> Result<(), Vec<Diagnostic>> {
    let mut wrong = c.check(work.depth()).err().unwrap_or_default();
    if c.is_countable() {
        wrong.extend(said(c, model_wrongs(work, c)));
        if c.zero.stage > 0 && expert_units(work) > 1 && !may_shard(c, c.zero.shard) {
            wrong.push(unsharded(c));
        }
    }
    if wrong.is_empty() { Ok(()) } else { Err(wrong) }
}

/// Whether sharding over `shard` ranks (0: over all of them) also divides the copies of experts:
/// where it does not, the gradient sums of some experts would be left out.
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

fn said(c: &Configuration, wrong: Vec<Wrong>) -> Vec<Diagnostic> {
    let said =
        |(headline, help)| Diagnostic::error("E3401", Span::of(c.to_string()), headline).help(help);
    wrong.into_iter().map(said).collect()
}

/// A batch that micro-batches do not divide.
pub(super) fn undivided(c: &Configuration, global_batch: u64) -> Diagnostic {
    let Configuration { dp, microbatch, .. } = c;
    let headline = format!("{global_batch} samples over dp={dp} in micro-batches of {microbatch}");
    let at_once = u64::from(*dp) * u64::from(*microbatch);
    let less = global_batch.checked_div(at_once).unwrap_or(0) * at_once;
    let near = [less, less + at_once].into_iter().filter(|samples| *samples > 0);
    let near = near.map(|samples| samples.to_string()).collect::<Vec<_>>().join(" or ");
    let help = format!("choose a batch that is a multiple of dp × mbs = {at_once}, such as {near}");
    Diagnostic::error("E3401", Span::of(c.to_string()), headline).help(help)
}

/// What of the model the layout does not divide.
fn model_wrongs(work: &Workload, c: &Configuration) -> Vec<Wrong> {
    let mut wrong = Vec::new();
    let heads = tensor_units(work);
    if !heads.is_multiple_of(c.tp) {
        let near = divisor_within(heads.into(), c.tp.into());
        let headline = format!("`tp` is {}, which does not divide {heads}", c.tp);
        wrong.push((headline, format!("use tp={near}, or another divisor")));
    }
    let experts = expert_units(work);
    if !experts.is_multiple_of(c.ep) {
        let near = divisor_within(experts.into(), c.ep.into());
        let headline = format!("`ep` is {}, which does not divide {experts} experts", c.ep);
        wrong.push((headline, format!("use ep={near}")));
    }
    if experts == 1 && c.etp > 0 {
        let headline = format!("`etp` is {}, and there are no experts", c.etp);
        wrong.push((headline, "leave `etp` out".to_owned()));
    }
    let (seq, cp) = (work.seq, c.cp);
    let near = || {
        let may = |cp: &u32| seq.is_multiple_of(context_pieces(*cp));
        let near = (1..cp.min(seq / TOKENS_MIN + 1)).rev().find(may).unwrap_or(1);
        format!("use cp={near}, or another length of sequences")
    };
    if !seq.is_multiple_of(context_pieces(cp)) {
        let headline = format!("`cp` is {cp}, and {seq} tokens are not twice as many equal pieces");
        wrong.push((headline, near()));
    } else if cp > 1 && seq / cp < TOKENS_MIN {
        let each = seq / cp;
        let headline = format!("`cp` is {cp}: {each} tokens a rank, and it takes {TOKENS_MIN}");
        wrong.push((headline, near()));
    }
    if c.stage_layers.contains(&0) {
        let help = "give each stage a layer, or use fewer stages".to_owned();
        wrong.push(("a stage has no layer".to_owned(), help));
    }
    let deepest = c.deepest(work.depth());
    if let Recompute::Layers(layers) = c.recompute
        && layers > deepest
    {
        let headline = format!("{layers} layers of a stage are recomputed, and it has {deepest}");
        wrong.push((headline, format!("write recompute=full, or recompute=layers:{deepest}")));
    }
    wrong
}

/// What of the order of `m` micro-batches cannot be.
fn schedule_wrongs(work: &Workload, c: &Configuration, m: u64) -> Vec<Wrong> {
    let mut wrong = Vec::new();
    let Configuration { pp, vpp, .. } = *c;
    let name = c.schedule.name();
    let at_once = u64::from(c.dp) * u64::from(c.microbatch);
    if pp > 1 && !is_filled(c.schedule, pp, m) {
        let enough = match c.schedule {
            Schedule::ZeroBubbleH2 => 2 * u64::from(pp) - 1,
            Schedule::GPipe | Schedule::OneForwardOneBackward | Schedule::ZeroBubbleH1 => pp.into(),
        };
        let enough = enough.saturating_mul(at_once);
        let headline = format!("{m} micro-batches are too few for {name} over {pp} stages");
        wrong.push((headline, format!("use schedule=1f1b, or a batch of {enough} samples")));
    }
    if vpp > 1 {
        if let Some((stage, layers)) = unfilled(c, work.depth()) {
            wrong.push((
                format!(
                    "stage {stage} has {layers} layers for {vpp} chunks: none but the first and \
                     the last chunk of all may be empty"
                ),
                format!("use a smaller `vpp`, or give the stage {vpp} layers"),
            ));
        }
        if let Recompute::Layers(recomputed) = c.recompute
            && !recomputed.is_multiple_of(vpp)
        {
            let less = (recomputed / vpp * vpp).max(vpp);
            wrong.push((
                format!("recompute=layers:{recomputed} is no multiple of vpp={vpp} chunks"),
                format!("write recompute=layers:{less}, or another multiple of {vpp}"),
            ));
        }
        // Interleaving goes round in groups of as many micro-batches as there are stages.
        if !m.is_multiple_of(u64::from(pp)) {
            let round = u64::from(pp) * at_once;
            wrong.push((
                format!("`vpp` is {vpp}, and {pp} stages do not divide {m} micro-batches"),
                format!("use a batch that is a multiple of pp × dp × mbs = {round}, or no `vpp`"),
            ));
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
    use crate::search::models;

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
            ("pp=2 vpp=2 recompute=layers:4", "pp=2 vpp=2 recompute=layers:3", 8, "vpp=2 chunks"),
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

    /// All that is wrong is said at once, of the layout, the model and the batch, each with a way
    /// out; what cannot be counted is said alone.
    #[test]
    fn all_rules_refuse_at_once() {
        let work = models::shape("llama-3-8b").unwrap().workload().unwrap();
        let found = |text: &str, batch| {
            let found = check(&work, &text.parse().unwrap(), batch).unwrap_err();
            assert!(found.iter().all(|wrong| wrong.help.is_some()), "{found:?}");
            found
        };
        let text = "tp=3 cp=3 dp=2 pp=2 mbs=3 zero=2/5 recompute=layers:40 stages=1.2";
        let headlines: Vec<String> = found(text, 8).into_iter().map(|w| w.headline).collect();
        for said in [
            "shards over 5",
            "2 stages of 3 layers",
            "does not divide 32",
            "equal pieces",
            "40 layers of a stage",
            "8 samples over dp=2",
        ] {
            let count = headlines.iter().filter(|headline| headline.contains(said)).count();
            assert_eq!(count, 1, "{said}: {headlines:?}");
        }
        assert_eq!(headlines.len(), 6, "{headlines:?}");
        let found = found("pp=8 vpp=3 dp=2 tp=3 schedule=zb-h2", 4);
        assert_eq!(found.len(), 4, "{found:?}");
        let none = check(&work, &"tp=0 pp=0 dp=3".parse().unwrap(), 8).unwrap_err();
        assert_eq!(none.len(), 2, "{none:?}");
        let many = "tp=4000000000 cp=4000000000 dp=4000000000 ep=3".parse().unwrap();
        assert_eq!(check(&work, &many, 8).unwrap_err().len(), 1);
    }

    /// What is proposed in the place of a number is refused by that rule no more.
    #[test]
    fn ways_out_are_ways_out() {
        for (text, batch, mended, enough) in [
            ("tp=12", 8, "tp=8", 8),
            ("cp=96", 8, "cp=64", 8),
            ("cp=8192", 8, "cp=128", 8),
            ("pp=9 schedule=zb-h1", 8, "pp=9 schedule=zb-h1", 9),
            ("pp=5 dp=2 schedule=zb-h2", 8, "pp=5 dp=2 schedule=zb-h2", 18),
            ("pp=4 vpp=2 dp=2", 6, "pp=4 vpp=2 dp=2", 8),
            ("dp=4 mbs=4", 40, "dp=4 mbs=4", 32),
            ("pp=2 recompute=layers:17", 8, "pp=2 recompute=layers:16", 8),
        ] {
            let work = models::shape("llama-3-8b").unwrap().workload().unwrap();
            let found = check(&work, &text.parse().unwrap(), batch).unwrap_err();
            let help = found[0].help.clone().unwrap();
            let last = mended.split(' ').rfind(|word| !text.contains(word));
            let said = last.map_or(enough.to_string(), str::to_owned);
            assert!(found.len() == 1 && help.contains(&said), "{text}: {found:?}");
            assert!(check(&work, &mended.parse().unwrap(), enough).is_ok(), "{mended}");
        }
    }
}
