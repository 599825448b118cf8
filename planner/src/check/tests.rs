use ir::op::Combiner;
use ir::plan::Keep;
use ir::{Axis, Layout, Sharding};

use super::*;
use crate::compiled::tests::{cluster, job, module};
use crate::compiled::{Job, search};

fn data_parallel<'a>(module: &'a Module, cluster: &'a Cluster) -> Job<'a> {
    let mut job: Job<'_> = job(module, cluster, 4);
    let fix = ["pp=1".to_owned(), "tp=2".to_owned(), "sp=1".to_owned(), "keep=full".to_owned()];
    job.limits = crate::limits::Limits::parse(&fix, &[], &[]).unwrap();
    job.evaluations_max = 1;
    job
}

fn found(change: impl Fn(&mut Plan)) -> Vec<&'static str> {
    let module = module(2);
    let cluster = cluster(1 << 30);
    let mut plan = search(&data_parallel(&module, &cluster)).unwrap().plan;
    change(&mut plan);
    check(&module, "loss", &plan, &cluster).iter().map(|d| d.code).collect()
}

fn set(plan: &mut Plan, value: &str, layouts: &[(Axis, Layout)]) {
    assert!(set_new(plan, value, layouts).is_some(), "{value}");
}

fn set_new(plan: &mut Plan, value: &str, layouts: &[(Axis, Layout)]) -> Option<Sharding> {
    let block = plan.functions.get_mut("block").unwrap();
    let sharding = Sharding::new(layouts.iter().copied());
    block.shardings.insert(value.to_owned(), sharding)
}

#[test]
fn plans_that_were_found_are_legal() {
    assert!(found(|_| {}).is_empty());
}

#[test]
fn illegal_plans_are_found() {
    assert_eq!(found(|p| p.mesh.tp = 0), ["E3301"]);
    assert_eq!(found(|p| p.stage_ends = vec![2]), ["E3302"]);
    assert_eq!(found(|p| p.stage_ends = vec![0, 4]), ["E3302", "E3302"]);
    assert_eq!(found(|p| p.microbatch_count = 0), ["E3303"]);
    assert_eq!(found(|p| p.stage_ends = vec![2, 4]), ["E3302"]);
    assert_eq!(found(|p| p.experts.ep = 3), ["E3301"]);
    assert_eq!(found(|p| p.zero = Zero { stage: 1, shard: 3 }), ["E3301"]);
    let more = |p: &mut Plan| {
        p.functions.get_mut("block").unwrap().exceptions.insert(2, Keep::None);
    };
    assert_eq!(found(more), ["E3302"]);
    let tp = Axis::Tp;
    // What is not listed is replicated.
    let removed = found(|p| {
        p.functions.get_mut("block").unwrap().shardings.remove("wq");
    });
    assert!(removed.contains(&"E3306"), "{removed:?}");
    assert_eq!(found(|p| _ = set_new(p, "other", &[(tp, Layout::cut(0))])), ["E3304"]);
    assert_eq!(found(|p| set(p, "wq", &[(tp, Layout::cut(7))])), ["E3304"]);
    assert_eq!(found(|p| set(p, "wq", &[(tp, Layout::Cut { dim: 0, unit: 48 })])), ["E3304"]);
    assert_eq!(found(|p| set(p, "q_0", &[(tp, Layout::cut(0))])), ["E3304"]);
    // A square root of terms is no term.
    let terms = [(Axis::Dp, Layout::cut(0)), (tp, Layout::Partial(Combiner::Sum))];
    assert!(found(|p| set(p, "n1.rstd", &terms)).contains(&"E3305"));
    assert!(found(|p| set(p, "wq", &[])).contains(&"E3306"));
    assert!(found(|p| set(p, "d.wq", &[(tp, Layout::cut(2))])).contains(&"E3306"));
    // Ranks of dp add what they have of a gradient.
    let whole = |p: &mut Plan| {
        let on_tp = p.functions["block"].shardings["d.wq"].on(tp);
        set(p, "d.wq", &[(tp, on_tp)]);
    };
    assert!(found(whole).contains(&"E3306"));
    let module = module(2);
    let cluster = cluster(1 << 30);
    let mut plan = search(&data_parallel(&module, &cluster)).unwrap().plan;
    whole(&mut plan);
    let error = codegen::compile::compile(&module, "loss", &plan).unwrap_err();
    assert_eq!(error.code, "E2002");
    // The layer before passes it on cut along the sequence.
    assert!(found(|p| set(p, "x", &[(Axis::Dp, Layout::cut(0))])).contains(&"E3307"));
}
