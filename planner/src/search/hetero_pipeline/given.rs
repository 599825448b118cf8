//! A pipeline over groups that someone else laid out.

use ir::{Diagnostic, Span};

use super::{Candidate, Cut, HeteroPipeline, Lines, StagePartitions, Used};
use crate::configuration::{Configuration, Recompute};
use crate::estimate::legal;
use crate::search::groups::{GroupRequest, ranks_wrong};

/// What a pipeline over groups costs, the first stages first; each layout names the layers of its
/// stages.
pub(in crate::search) fn score(
    asked: &GroupRequest<'_>,
    layouts: &[(usize, Configuration)],
) -> Result<HeteroPipeline, Vec<Diagnostic>> {
    let (whole, count) = whole(asked, layouts)?;
    let mut lines = Lines::new(asked).map_err(|wrong| vec![wrong])?;
    let used = layouts.iter().map(|(group, c)| {
        // The layers of a stage are those of the cut.
        let configuration = Configuration { pp: whole.pp, stage_layers: Vec::new(), ..c.clone() };
        let inside = lines.inside(*group, &configuration, c.pp);
        let seconds = lines.seconds(*group, inside);
        Used { group: *group, inside, stages: c.pp, configuration, seconds }
    });
    let used: Vec<Used> = used.collect();
    let candidate = Candidate { used, count, bound_s: 0.0, bottleneck_s: 0.0 };
    let step = lines.priced_step(&candidate, &whole.stage_layers);
    Ok(lines
        .told(&candidate, Cut { layers: whole.stage_layers, step, cuts: StagePartitions::Given }))
}

/// The pipeline as one layout, where the layouts of its parts make one, and its micro-batches.
fn whole(
    asked: &GroupRequest<'_>,
    layouts: &[(usize, Configuration)],
) -> Result<(Configuration, u64), Vec<Diagnostic>> {
    let mut wrong = Vec::new();
    let mut say = |c: &Configuration, headline: String, help: &str| {
        let span = Span::of(c.to_string());
        wrong.push(Diagnostic::error("E3401", span, headline).help(help));
    };
    let copies = |c: &Configuration| (c.dp, c.cp, c.microbatch, c.zero, c.recompute);
    let [(_, first), ..] = layouts else {
        let span = Span::of(asked.cluster.name.clone());
        return Err(vec![Diagnostic::error("E3401", span, "no layout is given")]);
    };
    for (group, c) in layouts {
        let name = &asked.cluster.groups[*group].name;
        let stages = c.stage_layers.len();
        if stages != c.pp as usize {
            let headline = format!("`{name}` has pp={}, and layers for {stages} stages", c.pp);
            say(c, headline, "write the layers of each stage: `stages=4.4`");
        }
        if copies(c) != copies(first) {
            let headline =
                format!("`{name}` has other copies than the first group of the pipeline");
            say(c, headline, "write the same dp, cp, mbs, zero and recompute for all groups");
        }
        let plain = Configuration {
            tp: c.tp,
            cp: c.cp,
            ep: c.ep,
            etp: c.etp,
            pp: c.pp,
            dp: c.dp,
            microbatch: c.microbatch,
            sequence_parallel: c.sequence_parallel,
            zero: c.zero,
            recompute: if c.recompute == Recompute::Auto { Recompute::None } else { c.recompute },
            stage_layers: c.stage_layers.clone(),
            ..Configuration::default()
        };
        if plain != *c {
            let headline = format!(
                "a pipeline over groups is 1F1B without chunks, offload, placement or \
                 recompute=auto, and `{name}` is not"
            );
            say(c, headline, &format!("write `{plain}`"));
        }
    }
    let each = |of: fn(&Configuration) -> u32| layouts.iter().map(move |(_, c)| of(c));
    let whole = Configuration {
        pp: each(|c| c.pp).fold(0, u32::saturating_add),
        stage_layers: layouts.iter().flat_map(|(_, c)| c.stage_layers.clone()).collect(),
        ..first.clone()
    };
    if wrong.is_empty() {
        for (group, c) in layouts {
            let stage_layers = whole.stage_layers.clone();
            let all = Configuration { pp: whole.pp, stage_layers, ..c.clone() };
            let found = legal::check(asked.work, &all, asked.job.global_batch);
            wrong.extend(found.err().into_iter().flatten());
            wrong.extend(ranks_wrong(asked, *group, c));
        }
    }
    match whole.microbatch_count(asked.job.global_batch) {
        Some(count) if wrong.is_empty() => Ok((whole, count)),
        Some(_) | None => Err(wrong),
    }
}
