use super::*;
use crate::DType;
use crate::import::{Options, import, preset};
use crate::module::Module;
use crate::op::Op;
use crate::verify::verify;

fn model(name: &str) -> Model {
    let description = preset(name).expect("a preset");
    let options = Options { seq: 8, dtype: DType::F32, dropout: Some(0.1), documents: false };
    import(&description, &options).expect("it is imported")
}

fn products(module: &Module, name: &str) -> usize {
    let function = module.function(name).expect("there is such a function");
    function.nodes.iter().filter(|node| matches!(node.op, Op::Contract(_))).count()
}

#[test]
fn what_is_adapted_is_read_and_printed() {
    let lora: Lora = "rank=8,alpha=16,targets=q,v".parse().unwrap();
    assert_eq!((lora.rank, lora.alpha, lora.scale()), (8, 16.0, 2.0));
    assert_eq!(lora.targets, ["q", "v"]);
    assert_eq!(lora.to_string().parse(), Ok(lora));
    let usual: Lora = "r=4".parse().unwrap();
    assert_eq!(usual.to_string(), "rank=4,alpha=4,targets=q,v");
    let order: Lora = "targets=q,k,rank=2".parse().unwrap();
    assert_eq!((order.rank, order.targets.len()), (2, 2));
    for wrong in ["", "rank=0", "rank=x", "alpha=2", "rank=2,alpha=-1", "rank=2,q", "size=3"] {
        assert!(wrong.parse::<Lora>().is_err(), "{wrong}");
    }
}

/// All entries are adapted, dropout or not, and the text of the module is read back.
#[test]
fn every_entry_is_adapted() {
    let mut model = model("gpt2-mini");
    let count = model.param_count();
    let adapters = adapt(&mut model, &"rank=4,targets=c_attn".parse().unwrap()).unwrap();
    assert_eq!(verify(&model.module), []);
    assert_eq!(model.entries, ["loss", "loss_eval", "logits"]);
    let text = model.module.to_string();
    assert_eq!(crate::text::parse_module("m", &text).unwrap(), model.module);
    // Queries, keys and values of a layer share an A, as in peft.
    let names = |part: fn(&Adapter) -> &String| adapters.iter().map(part).collect::<BTreeSet<_>>();
    let layers = model.layer_count;
    assert_eq!((names(|one| &one.a).len(), names(|one| &one.b).len()), (layers, 3 * layers));
    let added = model.param_count() - count;
    assert_eq!(trained_count(&model), added);
    assert_eq!(added, (layers * 4 * (256 + 3 * 256)) as u64);
    for function in ["block", "block_eval"] {
        let own = model.module.function(function).unwrap();
        let trained: Vec<&str> = own
            .params()
            .filter(|param| !own.value(*param).frozen && own.ty(*param).dtype.is_float())
            .map(|param| own.value(param).name.as_str())
            .collect();
        assert_eq!(trained, ["x", "wq_lora_a", "wq_lora_b", "wk_lora_b", "wv_lora_b"]);
    }
}

/// Of the backward pass of a frozen product half is left, the gradient of what is multiplied; and
/// nothing where nothing is trained further up.
#[test]
fn frozen_weights_cost_no_gradient() {
    let step = |is_frozen: fn(&str) -> bool| {
        let mut module = model("gpt2-mini").module;
        crate::freeze::freeze(&mut module, is_frozen);
        crate::autodiff::training_step(&mut module, "loss").unwrap();
        assert_eq!(verify(&module), []);
        module
    };
    let backward = |module: &Module| products(module, "block.grad") - products(module, "block");
    // Six products with weights, each with two gradients; attention is a composite.
    assert_eq!(backward(&step(|_| false)), 12);
    let of_tables = step(|name| name != "wte");
    assert_eq!(backward(&of_tables), 6);
    let results =
        |module: &Module| module.function(crate::autodiff::STEP_PART).unwrap().results.len();
    assert_eq!(results(&of_tables), 3);
    let nothing = step(|_| true);
    assert_eq!(results(&nothing), 2);
    assert!(nothing.function("block.grad").is_none());
}

/// `W` is what products sum over by what they yield, whatever the order of its dims.
#[test]
fn merging_adds_the_product() {
    let adapter = |dims: [usize; 2], contracted: [bool; 2]| Adapter {
        weight: "w".to_owned(),
        a: "a".to_owned(),
        b: "b".to_owned(),
        contracted: contracted.to_vec(),
        dims: dims.to_vec(),
    };
    // A = [[1, 2, 3]], B = [[10], [20]].
    let (a, b) = ([1.0, 2.0, 3.0], [10.0, 20.0]);
    let by_rows = adapter([2, 3], [false, true]).merge(&[0.5; 6], &a, &b, 2.0);
    assert_eq!(by_rows, [20.5, 40.5, 60.5, 40.5, 80.5, 120.5]);
    let by_columns = adapter([3, 2], [true, false]).merge(&[0.5; 6], &a, &b, 2.0);
    assert_eq!(by_columns, [20.5, 40.5, 40.5, 80.5, 60.5, 120.5]);
}

#[test]
fn wrong_targets_and_ranks_are_refused() {
    let wrong = |lora: &str| {
        let why = adapt(&mut model("gpt2-mini"), &lora.parse().unwrap()).unwrap_err();
        (why.code, format!("{} {}", why.headline, why.help.unwrap_or_default()))
    };
    let (code, text) = wrong("rank=4,targets=q_proj");
    assert_eq!(code, "E1201");
    assert!(text.contains("`q_proj`") && text.contains("c_attn") && text.contains("wq"), "{text}");
    // The table of tokens is looked up in, too.
    assert_eq!(wrong("rank=4,targets=wte").0, "E1201");
    assert_eq!(wrong("rank=300,targets=q").0, "E1202");
    assert_eq!(wrong("rank=4,targets=h.1.attn.wq").0, "E1203");
}
