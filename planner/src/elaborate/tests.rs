use ir::DType;
use ir::import::{Options, import, preset, read_config};
use ir::plan::{Offload, Place, Schedule, Zero};
use ir::random::mix;
use ir::text::parse_plan;

use super::*;
use crate::check::check;
use crate::compiled::tests::cluster;

mod wide;

pub(crate) const SAMPLES: usize = 96;

fn imported(config: &str) -> Module {
    let description = read_config("config.json", config, "test").unwrap();
    let options = Options { seq: 32, dtype: DType::F32, dropout: Some(0.0), documents: false };
    import(&description, &options).unwrap().module
}

/// Twelve layers of GPT-2.
pub(crate) fn gpt2() -> Module {
    imported(
        r#"{"model_type": "gpt2", "n_layer": 12, "n_head": 4, "n_embd": 32, "n_positions": 32,
            "vocab_size": 64, "bos_token_id": null, "eos_token_id": null}"#,
    )
}

/// Twelve layers of Llama, whose heads share keys.
pub(crate) fn llama() -> Module {
    imported(
        r#"{"model_type": "llama", "num_hidden_layers": 12, "num_attention_heads": 4,
            "num_key_value_heads": 2, "hidden_size": 32, "intermediate_size": 48,
            "max_position_embeddings": 32, "vocab_size": 64}"#,
    )
}

pub(crate) fn prepared(module: Module) -> Module {
    codegen::prepare::prepare_training(module, "loss").unwrap()
}

pub(crate) fn purpose(module: &Module) -> Purpose<'_> {
    Purpose {
        module,
        entry: "loss",
        model: "test".to_owned(),
        cluster: "nowhere".to_owned(),
        target: None,
        global_batch_size: SAMPLES,
        seq: 32,
        precision: Precision::uniform(DType::F32),
        optimizer: Optimizer::None,
        clip: None,
        lora: None,
        predictions: BTreeMap::new(),
    }
}

/// A random name that fits 12 layers of 4 heads; no word of it says what another says already.
pub(crate) fn draw(seed: u64) -> Configuration {
    let mut state = seed;
    let mut below = |count: usize| {
        state = mix(state.wrapping_add(0x9e37));
        (state >> 33) as usize % count
    };
    let of = |list: &[u32], at: usize| list[at];
    let mut name = Configuration {
        tp: of(&[1, 2, 4], below(3)),
        pp: of(&[1, 2, 3, 4, 5], below(5)),
        dp: of(&[1, 2, 3, 4], below(4)),
        microbatch: of(&[1, 2], below(2)),
        ..Configuration::default()
    };
    let count = name.microbatch_count(SAMPLES as u64).unwrap();
    name.sequence_parallel = name.tp > 1 && below(2) == 0;
    if name.pp > 1 && count.is_multiple_of(name.pp.into()) && below(2) == 0 {
        name.vpp = of(&[2, 3], below(2));
        if name.pp * name.vpp > 12 {
            name.vpp = 1;
        }
    } else if name.pp > 1 {
        name.schedule = Schedule::ALL[below(4)];
        if below(3) == 0 {
            name.stage_layers = vec![1; name.pp as usize];
            name.stage_layers[0] = 13 - name.pp;
        }
    }
    let deepest = name.deepest(12);
    name.recompute = match below(4) {
        0 => Recompute::None,
        1 => Recompute::Attention,
        2 => Recompute::Full,
        _ if deepest > name.vpp => {
            let rounds = (deepest - 1) / name.vpp;
            Recompute::Layers(name.vpp * (1 + below(rounds as usize) as u32))
        }
        _ => Recompute::None,
    };
    name.zero = match below(3) {
        0 => Zero::default(),
        1 => Zero { stage: 1, shard: 0 },
        _ => Zero { stage: 3, shard: name.dp },
    };
    name.offload = Offload {
        optimizer: Place::ALL[below(3)],
        parameters: Place::Device,
        activations: Place::ALL[below(2)],
    };
    if below(3) == 0 {
        name.order = [Axis::Dp, Axis::Tp, Axis::Pp, Axis::Cp];
    }
    name
}

/// A plan of a name is legal, is read back from its text, and has that name.
#[test]
fn names_and_plans_mean_each_other() {
    let (gpt2, llama) = (prepared(gpt2()), prepared(llama()));
    let cluster = cluster(1 << 30);
    let base = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let mut kinds = BTreeSet::new();
    for seed in base..base + 120 {
        let name = draw(mix(seed));
        for module in [&gpt2, &llama] {
            let case = format!("SEED={seed} `{name}` of {}", module.name);
            let plan =
                elaborate(&name, &purpose(module)).unwrap_or_else(|e| panic!("{case} {e:?}"));
            let mut found = check(module, "loss", &plan, &cluster);
            found.retain(|one| !one.headline.contains("ranks"));
            assert!(found.is_empty(), "{case}: {found:?}");
            let text = plan.to_string();
            assert_eq!(parse_plan("text", &text).as_ref(), Ok(&plan), "{case}");
            let back = name_of(module, "loss", &plan).unwrap();
            assert_eq!(back.to_string(), name.to_string(), "{case}");
        }
        kinds.insert((name.vpp > 1, name.stage_layers.is_empty(), name.recompute));
    }
    assert!(kinds.len() > 12, "{kinds:?}");
}

/// A plan that decides something else than its name says so.
#[test]
fn what_a_name_does_not_say_is_counted() {
    let module = prepared(gpt2());
    let name: Configuration = "tp=2 pp=2 dp=2 mbs=1 recompute=layers:2".parse().unwrap();
    let meant = elaborate(&name, &purpose(&module)).unwrap();
    let named = |change: &dyn Fn(&mut Plan)| {
        let mut plan = meant.clone();
        change(&mut plan);
        name_of(&module, "loss", &plan).unwrap().to_string()
    };
    let keeps = |plan: &mut Plan| {
        let block = plan.functions.get_mut("block").unwrap();
        block.exceptions.insert(5, Keep::AllButAttention);
        block.exceptions.insert(6, Keep::Full);
    };
    assert_eq!(named(&keeps), "tp=2 pp=2 dp=2 mbs=1 recompute=layers:2 +2");
    let value = |plan: &mut Plan| {
        plan.functions.get_mut("block").unwrap().shardings.remove("wq");
    };
    assert_eq!(named(&value), "tp=2 pp=2 dp=2 mbs=1 recompute=layers:2 +1");
    let ends = |plan: &mut Plan| plan.stage_ends[0] -= 1;
    let found = named(&ends);
    assert!(found.starts_with("tp=2 pp=2 dp=2 mbs=1 recompute=layers:2 stages=5.7"), "{found}");
    assert_eq!(
        elaborate(&"dp=5".parse().unwrap(), &purpose(&module)).unwrap_err()[0].code,
        "E3401"
    );
}

/// The plan of a large model is short: it grows neither with depth nor with devices.
#[test]
fn plans_of_deep_models_are_short() {
    let description = preset("llama-3-70b").unwrap();
    let options = Options { seq: 4096, dtype: DType::F32, dropout: Some(0.0), documents: false };
    let module = import(&description, &options).unwrap().module;
    let module = codegen::prepare::prepare_training(module, "loss").unwrap();
    let name: Configuration = "tp=8 pp=8 dp=12 mbs=1 vpp=5 sp zero=1".parse().unwrap();
    let plan = elaborate(&name, &Purpose { seq: 4096, ..purpose(&module) }).unwrap();
    let lines = plan.to_string().lines().count();
    assert!(lines <= 400, "{lines} lines");
}
