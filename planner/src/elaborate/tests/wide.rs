//! Names with context and expert parallelism, and what the checker says of plans that are not what
//! such names mean.

use ir::build::Builder;
use ir::dim::Dim;
use ir::op::{Combiner, Comparison, Op};
use ir::random::mix;
use ir::text::parse_plan;
use ir::{DType, Kind, Sharding, TensorType};

use super::{draw, gpt2, imported, llama, purpose};
use crate::check::check;
use crate::compiled::tests::cluster;
use crate::elaborate::*;

const SEQ: usize = 32;
const EXPERTS: usize = 8;

/// Twelve layers, each with experts behind a router: a softmax over those of the scores that are
/// the two largest of a token.
fn routed() -> Module {
    let mut module = Module::new("routed");
    let of = |dtype, dims: &[usize]| TensorType::of(dtype, dims);
    let weight = |dims: &[usize]| of(DType::F32, dims);
    let activation = |dtype, dims: &[usize]| {
        let dims = [Dim::symbol(Dim::BATCH), Dim::from(SEQ)]
            .into_iter()
            .chain(dims.iter().map(|size| Dim::from(*size)));
        TensorType::new(dtype, dims.collect::<Vec<_>>())
    };
    let (model, inner, vocab) = (16, 24, 64);
    let x = activation(DType::F32, &[model]);
    let ids = activation(DType::I32, &[]);
    let mut b = Builder::new(&mut module, "embed", Kind::Layer);
    let (tokens, table) =
        (b.param("tokens", ids.clone()), b.param("table", weight(&[vocab, model])));
    let word = b.push("word", Op::Gather { dim: 0, start: 0 }, &[table, tokens]);
    b.finish(&[word]);
    let wide = [EXPERTS, inner, model];
    let dims: [&[usize]; 5] = [&[model], &[model, EXPERTS], &wide, &wide, &[EXPERTS, model, inner]];
    let names = ["w_norm", "router", "gate", "up", "down"];
    let mut b = Builder::new(&mut module, "block", Kind::Layer);
    let stream = b.param("x", x);
    let weights: Vec<_> =
        names.iter().zip(dims).map(|(name, dims)| b.param(name, weight(dims))).collect();
    let [norm, router, gate, up, down] = weights[..] else { unreachable!("five weights") };
    let n = b.composite("n", "rms_norm", &[("eps", 1e-6)], &[stream, norm])[0];
    let scores = b.contract("scores", "bsm,me->bse", n, router);
    let chosen = b.push("chosen", Op::TopK { dim: 2, count: 2 }, &[scores]);
    let one_hot = activation(DType::I32, &[2, EXPERTS]);
    let expert = b.iota("expert", 3, DType::I32, one_hot.dims.to_vec());
    let wanted = Op::Broadcast { new: vec![3], dims: one_hot.dims.to_vec() };
    let wanted = b.push("wanted", wanted, &[chosen]);
    let hit = b.compare("hit", Comparison::Eq, expert, wanted);
    let kept = activation(DType::F32, &[2, EXPERTS]);
    let yes = b.constant("yes", 1.0, kept.clone());
    let no = b.constant("no", 0.0, kept);
    let picks = b.push("picks", Op::Select, &[hit, yes, no]);
    let mask = b.reduce("mask", Combiner::Sum, vec![2], picks);
    let shares = b.composite("shares", "softmax", &[], &[scores])[0];
    let gates = b.mul("gates", shares, mask);
    let operands = [n, gates, gate, up, down];
    let mixed = b.composite("mixed", "experts", &[("top_k", 2.0)], &operands)[0];
    let y = b.add("y", stream, mixed);
    b.finish(&[y]);
    let mut b = Builder::new(&mut module, "head", Kind::Layer);
    let x = b.param("x", activation(DType::F32, &[model]));
    let (w, labels) = (b.param("w", weight(&[vocab, model])), b.param("labels", ids.clone()));
    let logits = b.contract("logits", "bsm,vm->bsv", x, w);
    let loss = b.composite("loss", "cross_entropy", &[], &[logits, labels]);
    b.finish(&loss[..2]);
    let mut b = Builder::new(&mut module, "loss", Kind::Layer);
    let table = b.param("table", weight(&[vocab, model]));
    let mut of_layers = Vec::new();
    for layer in 0..12 {
        let own = names.iter().zip(dims);
        let own = own.map(|(name, dims)| b.param(&format!("h{layer}.{name}"), weight(dims)));
        of_layers.push(own.collect::<Vec<_>>());
    }
    let w = b.param("w", weight(&[vocab, model]));
    let (tokens, labels) = (b.param("tokens", ids.clone()), b.param("labels", ids));
    let mut x = b.call("embedded", "embed", &[tokens, table])[0];
    for (layer, own) in of_layers.iter().enumerate() {
        let operands: Vec<_> = std::iter::once(x).chain(own.iter().copied()).collect();
        x = b.call(&format!("layer{layer}"), "block", &operands)[0];
    }
    let loss = b.call("loss", "head", &[x, w, labels]);
    b.finish(&loss);
    module
}

/// GPT-2 with more positions than a sample has tokens.
fn long_gpt2() -> Module {
    imported(
        r#"{"model_type": "gpt2", "n_layer": 12, "n_head": 4, "n_embd": 32, "n_positions": 48,
            "vocab_size": 64, "bos_token_id": null, "eos_token_id": null}"#,
    )
}

fn planned(module: Module, precision: &Precision) -> Module {
    codegen::prepare::prepare_training_as(module, "loss", precision).unwrap()
}

/// A random name with tokens shared, and experts where there are some.
fn draw_wide(seed: u64, experts: bool) -> Configuration {
    let mut name = draw(seed);
    let below = |at: u64, count: usize| (mix(seed ^ at << 32) >> 33) as usize % count;
    name.cp = [1, 2, 4][below(1, 3)];
    if experts {
        let mesh = mesh_of(&name);
        // With all of `tp` only where its ranks share tokens, equally.
        let shares_tokens =
            name.sequence_parallel && SEQ.is_multiple_of((name.cp * name.tp) as usize);
        let ways = [1, 2, 4, 8]
            .into_iter()
            .flat_map(|ep| [false, true].map(|takes_tp| ExpertParallel { ep, takes_tp }));
        let fits = |way: &ExpertParallel| {
            let is_shared = !way.takes_tp || way.ep > 1 && name.tp > 1 && shares_tokens;
            is_shared && mesh.besides_experts(*way).is_some()
        };
        let all: Vec<ExpertParallel> = ways.filter(fits).collect();
        let way = all[below(2, all.len())];
        (name.ep, name.etp) = (way.ep as u32, etp_of(mesh, way));
    }
    name
}

/// A plan of a name is legal, is read back from its text, and has that name.
#[test]
fn names_with_context_and_experts_and_plans_mean_each_other() {
    let uniform = Precision::uniform(DType::F32);
    let mixed = Precision::training(DType::BF16);
    let modules = [
        (planned(gpt2(), &uniform), uniform, false),
        (planned(llama(), &mixed), mixed, false),
        (planned(long_gpt2(), &mixed), mixed, false),
        (planned(routed(), &uniform), uniform, true),
        (planned(routed(), &mixed), mixed, true),
    ];
    let cluster = cluster(1 << 30);
    let base = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let (mut wide, mut lines) = ([0; 5], 0);
    for seed in base..base + 60 {
        for (module, precision, experts) in &modules {
            let name = draw_wide(mix(seed), *experts);
            let case = format!("SEED={seed} `{name}` of {}", module.name);
            let purpose = Purpose { precision: *precision, ..purpose(module) };
            let plan = elaborate(&name, &purpose).unwrap_or_else(|e| panic!("{case} {e:?}"));
            let mut found = check(module, "loss", &plan, &cluster);
            found.retain(|one| !one.headline.starts_with("the mesh"));
            assert!(found.is_empty(), "{case}: {found:?}\n{plan}");
            let text = plan.to_string();
            assert_eq!(parse_plan("text", &text).as_ref(), Ok(&plan), "{case}");
            assert_eq!(parse_plan("text", &text).unwrap().to_string(), text, "{case}");
            let back = name_of(module, "loss", &plan).unwrap();
            assert_eq!(back.to_string(), name.to_string(), "{case}");
            let takes_tp = plan.experts.takes_tp;
            let words = [name.cp > 1, name.ep > 1, name.cp > 1 && name.ep > 1, takes_tp];
            let shares = name.cp > 1 && name.tp > 1 && name.sequence_parallel;
            let kinds = words.into_iter().chain([shares]);
            wide.iter_mut().zip(kinds).for_each(|(count, is)| *count += usize::from(is));
            lines = lines.max(text.lines().count());
        }
    }
    assert!(
        wide.iter().all(|count| *count >= 20),
        "cp, ep, both, ep with tp, cp with sp: {wide:?}"
    );
    assert!(lines <= 400, "{lines} lines");
}

fn said(name: &str, module: &Module) -> Plan {
    elaborate(&name.parse().unwrap(), &purpose(module)).unwrap()
}

fn line(plan: &Plan, value: &str) -> String {
    let text = plan.to_string();
    let start = format!("    %{value}: ");
    let found = text.lines().find_map(|line| line.strip_prefix(&start));
    found.unwrap_or("").to_owned()
}

/// Megatron's layout: a rank has a part of the tokens, gathers keys and values, and has a part of
/// the sums that are gradients.
#[test]
fn tokens_are_split_and_gradients_are_partial() {
    let module = planned(llama(), &Precision::uniform(DType::F32));
    let plan = said("tp=2 cp=2 pp=1 dp=2 mbs=1 sp", &module);
    for (value, wanted) in [
        ("x", "[dim0 @ dp, dim1 @ cp + tp]"),
        ("k", "[dim0 @ dp, dim1 @ cp, dim2 @ tp]"),
        ("mixed", "[dim0 @ dp, dim1 @ cp, dim2 @ tp]"),
        ("wq", "[dim0 @ tp]"),
        ("d.wq", "[dim0 @ tp] partial sum dp partial sum cp"),
        ("d.ln1_w", "[] partial sum dp partial sum cp partial sum tp"),
        ("tokens", "[dim0 @ dp, dim1 @ cp]"),
        ("loss", "[] partial sum dp partial sum cp"),
    ] {
        assert_eq!(line(&plan, value), wanted, "%{value} in\n{plan}");
    }
    assert!(plan.to_string().contains("\n  context all-gather\n"));
    codegen::executable::check_executable(&plan).unwrap();
}

/// Experts lie whole on the ranks that share them, and their gradients are sums over the copies.
#[test]
fn experts_are_split_and_their_gradients_summed_over_the_copies() {
    let module = planned(routed(), &Precision::uniform(DType::F32));
    let plan = said("tp=2 cp=2 ep=4 pp=1 dp=8 mbs=1 sp", &module);
    for (value, wanted) in [
        ("gate", "[dim0 @ ep, dim1 @ tp]"),
        ("down", "[dim0 @ ep, *, dim2 @ tp]"),
        ("d.gate", "[dim0 @ ep, dim1 @ tp] partial sum dp"),
    ] {
        assert_eq!(line(&plan, value), wanted, "%{value} in\n{plan}");
    }
    let router = line(&plan, "d.router");
    assert!(router.contains("partial sum dp partial sum cp"), "{router}");
    let all = said("tp=1 cp=2 ep=8 pp=1 dp=4 mbs=1", &module);
    assert_eq!(line(&all, "gate"), "[dim0 @ ep]");
    assert_eq!(line(&all, "d.gate"), "[dim0 @ ep]");
    codegen::executable::check_executable(&all).unwrap();
    let part = said("tp=1 cp=4 ep=2 pp=1 dp=2 mbs=1", &module);
    let wrong = codegen::executable::check_executable(&part).unwrap_err();
    assert!(wrong.headline.contains("a part of `cp`"), "{wrong:?}");
}

/// A plan that differs from a legal one in one field is refused, and what is wrong is named.
/// Where ranks of `tp` share experts, what is cut over these says nothing of `tp`, which cuts the
/// tokens that they compute with.
#[test]
fn plans_whose_ranks_along_tp_share_experts_wrongly_are_refused() {
    let module = planned(routed(), &Precision::uniform(DType::F32));
    let cluster = cluster(1 << 30);
    let meant = said("tp=2 ep=4 etp=1 pp=1 dp=4 mbs=1 sp", &module);
    let found_in = |plan: &Plan| {
        let mut found = check(&module, "loss", plan, &cluster);
        found.retain(|one| !one.headline.starts_with("the mesh"));
        found.iter().map(|one| format!("{} {}", one.code, one.headline)).collect::<Vec<_>>()
    };
    assert_eq!(found_in(&meant), [""; 0]);
    let tokens = meant.functions["block"].shardings["mixed"].display(3);
    assert_eq!(tokens, "[dim0 @ dp, dim1 @ tp, *]");
    for (value, text, code, words) in [
        ("gate", "[dim0 @ ep, dim1 @ tp]", "E3304", "`%gate` of `block` lies on tp in parts"),
        ("down", "[dim0 @ ep] partial sum tp", "E3304", "`%down` of `block` lies on tp in parts"),
        ("d.gate", "[dim0 @ ep, dim1 @ tp] partial sum dp", "E3304", "lies on tp in parts"),
        ("gate", "[dim0 @ tp]", "E3306", "experts of `%gate` are cut over tp"),
        ("mixed", "[dim0 @ dp]", "E3306", "`%mixed` of `block` is not cut by tokens over tp"),
    ] {
        let mut plan = meant.clone();
        let block = plan.functions.get_mut("block").unwrap();
        let sharding = Sharding::parse(text).unwrap();
        assert!(block.shardings.insert(value.to_owned(), sharding).is_some(), "{value}");
        let found = found_in(&plan);
        let is_it = |one: &String| one.starts_with(code) && one.contains(words);
        assert!(found.iter().any(is_it), "{value} {text}: {found:?}");
    }
    let mut uneven = meant.clone();
    uneven.seq = 33;
    assert!(found_in(&uneven).iter().any(|one| one.contains("and not 33 tokens equally")));
}

#[test]
fn plans_that_share_tokens_or_experts_wrongly_are_refused() {
    let module = planned(routed(), &Precision::uniform(DType::F32));
    let cluster = cluster(1 << 30);
    let meant = said("tp=2 cp=4 ep=2 pp=1 dp=2 mbs=1 sp", &module);
    let codes = |change: &dyn Fn(&mut Plan)| {
        let mut plan = meant.clone();
        change(&mut plan);
        let mut found = check(&module, "loss", &plan, &cluster);
        found.retain(|one| !one.headline.starts_with("the mesh"));
        found.iter().map(|one| format!("{} {}", one.code, one.headline)).collect::<Vec<_>>()
    };
    let set = |plan: &mut Plan, value: &str, text: &str| {
        let block = plan.functions.get_mut("block").unwrap();
        let sharding = Sharding::parse(text).unwrap();
        assert!(block.shardings.insert(value.to_owned(), sharding).is_some(), "{value}");
    };
    assert_eq!(codes(&|_| {}), [""; 0]);
    let refused = |change: &dyn Fn(&mut Plan), code: &str, words: &str| {
        let found = codes(change);
        let is_it = |one: &String| one.starts_with(code) && one.contains(words);
        assert!(found.iter().any(is_it), "{code} {words}: {found:?}");
    };
    refused(&|p| set(p, "gate", "[dim0 @ ep, dim1 @ tp, dim2 @ cp]"), "E3306", "`%gate` is cut");
    refused(&|p| set(p, "router", "[dim0 @ cp, dim1 @ tp]"), "E3306", "`%router` is cut over cp");
    refused(&|p| set(p, "gate", "[dim0 @ tp]"), "E3306", "experts of `%gate` are cut over tp");
    refused(&|p| set(p, "gate", "[*, dim1 @ tp]"), "E3306", "`%gate` is not cut over ep=2");
    refused(&|p| set(p, "gate", "[dim0 @ ep + tp]"), "E3304", "`%gate` of `block` is cut twice");
    refused(&|p| set(p, "router", "[*, dim1 @ ep]"), "E3306", "`%router` is cut over ep=2");
    refused(&|p| set(p, "d.gate", "[*, dim1 @ tp]"), "E3306", "gradient of `%gate` does not lie");
    refused(
        &|p| set(p, "d.w_norm", "[] partial sum dp"),
        "E3306",
        "`%w_norm` is whole on each rank of cp=4",
    );
    refused(&|p| p.experts.ep = 3, "E3301", "3 ranks share experts");
    refused(&|p| p.experts.ep = 16, "E3301", "16 ranks share experts, of dp · cp = 8");
    refused(&|p| p.experts.ep = 1, "E3304", "`%gate` of `block` is cut over ep");
    refused(&|p| p.mesh.cp = 3, "E3301", "cp=3 shares 6 equal pieces of 32 tokens");
    refused(&|p| set(p, "x", "[dim0 @ dp, dim1 @ tp]"), "E3307", "`%x` and its gradient lie");
    let both = |p: &mut Plan| ["x", "d.x"].map(|x| set(p, x, "[dim0 @ dp, dim1 @ tp]"));
    refused(&|p| _ = both(p), "E3307", "two shardings");
    // What a plan does not list is whole.
    let without = |plan: &mut Plan, function: &str, value: &str| {
        let planned = plan.functions.get_mut(function).unwrap();
        assert!(planned.shardings.remove(value).is_some(), "{value}");
    };
    let sum = "`%loss` is whole on each rank of";
    refused(&|p| without(p, "head", "loss"), "E3306", sum);
    refused(&|p| without(p, "embed", "tokens"), "E3307", "which is fed,");
    let mut many = meant.clone();
    (many.mesh.dp, many.microbatch_count, many.experts.ep) = (8, 12, 16);
    let found = check(&module, "loss", &many, &cluster);
    let is_it = |one: &Diagnostic| one.headline.contains("ep=16 does not divide the 8 experts of");
    assert!(found.iter().any(is_it), "{found:?}");
    let wrong = elaborate(&"cp=2 ep=16 pp=1 dp=8".parse().unwrap(), &purpose(&module));
    assert_eq!(wrong.unwrap_err()[0].code, "E3101");
    for wrong in ["tp=2 ep=2", "tp=4 ep=2 etp=2 dp=2 sp", "tp=4 ep=2 etp=1 dp=2 sp", "tp=2 etp=1"] {
        let found = elaborate(&wrong.parse().unwrap(), &purpose(&module));
        assert_eq!(found.unwrap_err()[0].code, "E3405", "{wrong}");
    }
    let plain = planned(gpt2(), &Precision::uniform(DType::F32));
    let wrong = elaborate(&"ep=2 dp=2".parse().unwrap(), &purpose(&plain)).unwrap_err();
    assert!(wrong[0].headline.contains("no layer"), "{wrong:?}");
    let wrong = elaborate(&"cp=3 dp=2".parse().unwrap(), &purpose(&plain)).unwrap_err();
    assert_eq!((wrong[0].code, wrong.len()), ("E3401", 1));
}
