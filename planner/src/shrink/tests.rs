use ir::plan::Optimizer;

use super::*;
use crate::check::check;
use crate::compiled::tests::cluster;
use crate::elaborate::elaborate;
use crate::elaborate::tests::{draw, gpt2, llama, prepared, purpose};

const SGD: Optimizer = Optimizer::Sgd { decay: 0.0, decay_biases: 0.0 };

/// Every plan in small has all that the whole one decides, is legal, has few ranks, and is its own
/// plan in small.
#[test]
fn plans_in_small_keep_every_decision() {
    let given = [
        "tp=4 pp=4 dp=4 mbs=2 sp zero=1/2 schedule=zb-h2",
        "tp=2 pp=3 dp=4 mbs=1 vpp=2 zero=3 recompute=full order=pp.tp.cp.dp",
        "cp=2 dp=4 mbs=1 zero=2/4",
        "pp=5 dp=2 mbs=2 stages=3.2.3.2.2 offload-optimizer=host",
    ];
    let (mut seen, mut small) = (BTreeSet::new(), 0);
    for module in [gpt2(), llama()].map(prepared) {
        let purpose = crate::elaborate::Purpose { optimizer: SGD, ..purpose(&module) };
        let calls = codegen::calls::Calls::of_entry(&module, "loss").unwrap();
        let calls: Vec<&str> = calls.calls.iter().map(|call| call.function.as_str()).collect();
        let names = given.map(|text| text.parse().unwrap());
        for name in names.into_iter().chain((0..200).map(draw)) {
            let Ok(plan) = elaborate(&name, &purpose) else { continue };
            let shrunk = shrink(&plan, &calls).unwrap();
            assert_eq!(shrunk.lost, Vec::new(), "{name}: {}", shrunk.plan);
            assert!(shrunk.plan.mesh.ranks() <= 32, "{name}: {}", shrunk.plan.mesh);
            let found = check(&module, "loss", &shrunk.plan, &cluster(1 << 34));
            assert!(found.is_empty(), "{name}: {found:?}\n{}", shrunk.plan);
            assert_eq!(shrink(&shrunk.plan, &calls).unwrap().plan, shrunk.plan, "{name}");
            small += usize::from(shrunk.plan.mesh.ranks() < plan.mesh.ranks());
            seen.extend(shrunk.kept);
        }
    }
    assert!(small > 100 && seen.len() > 20, "{small} are smaller, {seen:?}");
}

/// A plan of many calls is shrunk to a module of few: stages keep their shares.
#[test]
fn stages_are_shared_by_fewer_calls() {
    let module = prepared(gpt2());
    let name = "pp=3 dp=1 mbs=8 vpp=2 recompute=layers:2".parse().unwrap();
    let plan = elaborate(&name, &purpose(&module)).unwrap();
    for calls in 4..14 {
        let functions = [&["embed"], &vec!["block"; calls - 2][..], &["head"]].concat();
        let small = shrink(&plan, &functions).unwrap().plan;
        let kept = &small.functions["block"].exceptions;
        let all = plan.functions["block"].exceptions.len();
        assert!(kept.keys().all(|call| *call < calls - 2), "{calls}: {kept:?}");
        assert!(!kept.is_empty() && kept.len() <= all, "{calls}: {kept:?}");
        let ends = small.stage_ends;
        assert!(ends.len() == 4 && ends[3] == calls, "{calls}: {ends:?}");
        assert!(ends.windows(2).all(|pair| pair[0] < pair[1]) && ends[0] > 0, "{calls}: {ends:?}");
    }
    // No stage is empty, and all have as many chunks.
    for calls in [2, 3] {
        let functions = &["embed", "block", "head"][3 - calls..];
        let ends = shrink(&plan, functions).unwrap().plan.stage_ends;
        assert!(ends.len() == 2 && ends[1] == calls, "{ends:?}");
    }
    assert_eq!(shrink(&plan, &["all"]).unwrap_err().code, "E3302");
}
