//! Lower bounds on stage partitions over groups that differ in what they are fast at.

use std::rc::Rc;

use super::Used;

/// Seconds of a micro-batch of layers on one stage's devices, by what is recomputed.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Seconds {
    /// Of all layers.
    pub(super) all: [f64; 3],
    /// Of all layers of each class.
    pub(super) classes: Rc<[[f64; 3]]>,
}

/// The part of the seconds of all layers that their classes make up at least, in each way that a
/// group may be used: 1 where all ways are faster than others by the same for all classes.
pub(super) fn likeness<'u>(ways: impl Iterator<Item = &'u Used>) -> f64 {
    let mut least: Vec<f64> = Vec::new();
    for Seconds { all, classes } in ways.map(|used| &used.seconds) {
        least.resize(classes.len(), f64::INFINITY);
        for (least, class) in least.iter_mut().zip(classes.iter()) {
            *least = least.min(class[0] / all[0]);
        }
    }
    least.iter().sum::<f64>().min(1.0)
}

/// Lower bound on the bottleneck time, in seconds of a micro-batch, over all stage partitions.
///
/// Let a stage of group g do a part of each class k, all of which takes it Tₖ. With any weight w of
/// each group, the weighted seconds of all stages are at least the sum over classes of the least
/// w Tₖ of any group, and at most those of the slowest stage times the sum of all stages' w. The
/// best weights (the dual of sharing classes out) are near the speeds on all layers, or on those of
/// one class.
pub(super) fn bottleneck_s(used: &[Used], recomputed: usize) -> f64 {
    let classes = used.first().map_or(0, |used| used.seconds.classes.len());
    let by = |seconds: &dyn Fn(&Used) -> f64| {
        let least = |class: usize| {
            let weighted = used.iter().map(|u| u.seconds.classes[class][recomputed] / seconds(u));
            weighted.fold(f64::INFINITY, f64::min)
        };
        let stages: f64 = used.iter().map(|u| f64::from(u.stages) / seconds(u)).sum();
        (0..classes).map(least).sum::<f64>() / stages
    };
    let of_all = by(&|used| used.seconds.all[recomputed]);
    let of_each = (0..classes).map(|class| by(&|used| used.seconds.classes[class][recomputed]));
    of_each.filter(|bottleneck_s| bottleneck_s.is_finite()).fold(of_all, f64::max)
}

/// Lower bound on the seconds of one micro-batch through all layers, with each class of layers on
/// the stage that is fastest for it.
pub(super) fn least_s(used: &[Used], recomputed: usize) -> f64 {
    let classes = used.first().map_or(0, |used| used.seconds.classes.len());
    let least = |class: usize| {
        let seconds = used.iter().map(|used| used.seconds.classes[class][recomputed]);
        seconds.fold(f64::INFINITY, f64::min)
    };
    (0..classes).map(least).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::configuration::Configuration;
    use crate::estimate::price::Inside;
    use crate::estimate::profile::ExpertPlacement;
    use crate::search::oracle::{Random, seeds};

    /// Groups with stages that take so long for all layers of each class.
    fn used(groups: &[(u32, Vec<f64>)]) -> Vec<Used> {
        let one = |(group, (stages, classes)): (usize, &(u32, Vec<f64>))| {
            let configuration = Configuration::default();
            let inside = Inside::of(&configuration, ExpertPlacement::FromTensor);
            let classes: Rc<[[f64; 3]]> = classes.iter().map(|s| [*s, *s, 2.0 * s]).collect();
            let all =
                [0, 1, 2].map(|recomputed| classes.iter().map(|class| class[recomputed]).sum());
            Used {
                group,
                inside,
                stages: *stages,
                configuration,
                seconds: Seconds { all, classes },
            }
        };
        groups.iter().enumerate().map(one).collect()
    }

    /// The slowest stage and one micro-batch on all, of the best cut and of the shortest; tried.
    fn tried(counts: &[u32], used: &[Used]) -> [f64; 2] {
        let depth: u32 = counts.iter().sum();
        let stages: Vec<&Used> =
            used.iter().flat_map(|used| std::iter::repeat_n(used, used.stages as usize)).collect();
        let class = |layer: u32| {
            let ends = counts.iter().scan(0, |end, count| {
                *end += count;
                Some(*end)
            });
            ends.take_while(|end| *end <= layer).count()
        };
        let mut best = [f64::INFINITY; 2];
        for cut in 0..1u32 << (depth - 1) {
            if cut.count_ones() as usize + 1 != stages.len() {
                continue;
            }
            let mut seconds = vec![0.0; stages.len()];
            for layer in 0..depth {
                let stage = (cut & ((1 << layer) - 1)).count_ones() as usize;
                let class = class(layer);
                seconds[stage] +=
                    stages[stage].seconds.classes[class][0] / f64::from(counts[class]);
            }
            best[0] = best[0].min(seconds.iter().copied().fold(0.0, f64::max));
            best[1] = best[1].min(seconds.iter().sum());
        }
        best
    }

    /// Two groups that are each twice as fast for one of two classes: the cut between classes takes
    /// each a second, and one micro-batch two.
    #[test]
    fn groups_are_fast_at_other_layers() {
        let used = used(&[(1, vec![1.0, 2.0]), (1, vec![2.0, 1.0])]);
        assert_eq!(tried(&[1, 1], &used), [1.0, 2.0]);
        assert_eq!((bottleneck_s(&used, 0), least_s(&used, 0)), (1.0, 2.0));
        assert!((likeness(used.iter()) - 2.0 / 3.0).abs() < 1e-12);
    }

    /// No cut has a faster slowest stage, or is faster for one micro-batch, whatever groups are
    /// fast at; and where all are alike in that, the bound is that of their speeds.
    #[test]
    fn no_cut_is_faster_than_the_bounds() {
        let mut near = 0;
        for seed in seeds(0, 300) {
            let random = &mut Random(seed);
            let counts: Vec<u32> =
                (0..1 + random.below(3)).map(|_| 1 + random.below(3) as u32).collect();
            let depth: u32 = counts.iter().sum();
            let is_uniform = random.below(3) == 0;
            let works: Vec<f64> =
                counts.iter().map(|n| f64::from(*n) * random.between(0.5, 2.0)).collect();
            let mut group = || {
                let speed = random.between(0.5, 2.0);
                let mut one = |work: &f64| {
                    let other = if is_uniform { 1.0 } else { random.between(0.4, 2.5) };
                    work / speed * other
                };
                let classes: Vec<f64> = works.iter().map(&mut one).collect();
                (1 + random.below(2) as u32, classes)
            };
            let groups: Vec<(u32, Vec<f64>)> = vec![group(), group()];
            let used = used(&groups);
            let stages: u32 = used.iter().map(|used| used.stages).sum();
            if stages > depth {
                continue;
            }
            let [slowest_s, one_s] = tried(&counts, &used);
            let (pace, least) = (bottleneck_s(&used, 0), least_s(&used, 0));
            let about = format!("SEED={seed}: {counts:?} layers, {groups:?}");
            assert!(pace <= slowest_s * (1.0 + 1e-9), "{about}: {pace}, and {slowest_s} s");
            assert!(least <= one_s * (1.0 + 1e-9), "{about}: {least}, and {one_s} s");
            let speeds: f64 = used.iter().map(|used| used.speed(0)).sum();
            let floor = likeness(used.iter()) / speeds;
            assert!(floor <= pace * (1.0 + 1e-9), "{about}: {floor} above {pace}");
            assert!(!is_uniform || (pace * speeds - 1.0).abs() < 1e-9, "{about}");
            near += usize::from(pace > 0.8 * slowest_s);
        }
        assert!(near > 20, "{near} are near");
    }
}
