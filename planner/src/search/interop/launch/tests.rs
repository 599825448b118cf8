//! Scripts for Megatron-LM against its own rules, written down again from `validate_args` of
//! `megatron/training/arguments.py` at 000c4ac24f61159c138b0975def722c65245983c.

use std::collections::BTreeMap;

use super::*;
use crate::estimate::described::decoder;
use crate::tools::tests::random;
use crate::tools::{Form, Sizes};

const ARGUMENTS: &str = include_str!("../../../../tests/megatron_arguments.csv");

/// The flags of a script with their values, empty where there is none.
fn arguments(script: &str) -> BTreeMap<String, String> {
    let (_, line) = script.split_once("pretrain_gpt.py\"").unwrap();
    let words: Vec<&str> = line.split_whitespace().filter(|word| *word != "\\").collect();
    let mut all = BTreeMap::new();
    for (at, word) in words.iter().enumerate().filter(|(_, word)| word.starts_with("--")) {
        let value = words.get(at + 1).filter(|next| !next.starts_with("--")).unwrap_or(&"");
        let before = all.insert((*word).to_owned(), value.replace('"', ""));
        assert_eq!(before, None, "{word} is said twice");
    }
    all
}

/// What of flags the parser does not take.
fn unparsed(arguments: &BTreeMap<String, String>) -> Vec<String> {
    let mut known = BTreeMap::new();
    for line in ARGUMENTS.lines().filter(|line| line.starts_with("--")) {
        let [flag, kind, choices] = line.split(',').collect::<Vec<_>>()[..] else {
            panic!("{line}")
        };
        known.insert(flag, (kind, choices));
    }
    let is_wrong = |(flag, value): &(&String, &String)| {
        let Some((kind, choices)) = known.get(flag.as_str()) else { return true };
        !match *kind {
            "switch" => value.is_empty(),
            "int" => value.parse::<u64>().is_ok(),
            "float" => value.parse::<f64>().is_ok(),
            "choice" => choices.split(' ').any(|choice| choice == value.as_str()),
            "pattern" => !value.is_empty() && !value.contains(' '),
            kind => panic!("{flag}: {kind}"),
        }
    };
    arguments.iter().filter(is_wrong).map(|(flag, value)| format!("{flag} {value}")).collect()
}

/// Chunks of a pipeline layout, and the transformer layers in it.
fn laid_out(layout: &str) -> (u64, u64) {
    let mut text = layout.to_owned();
    // `(t*4|)*2`, then `t*4`.
    while let Some(open) = text.find('(') {
        let close = text[open..].find(')').unwrap() + open;
        let digits: String = text[close + 2..].chars().take_while(char::is_ascii_digit).collect();
        let part = text[open + 1..close].repeat(digits.parse().unwrap());
        text.replace_range(open..close + 2 + digits.len(), &part);
    }
    let layers = text.split('t').skip(1).map(|rest| match rest.strip_prefix('*') {
        Some(rest) => {
            let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
            digits.parse().unwrap()
        }
        None => 1,
    });
    (text.split('|').count() as u64, layers.sum())
}

/// A script with what its flags are asked for.
struct Script<'s> {
    text: &'s str,
    all: BTreeMap<String, String>,
    world: u64,
}

impl Script<'_> {
    fn has(&self, flag: &str) -> bool {
        self.all.contains_key(flag)
    }

    fn number(&self, flag: &str) -> Option<u64> {
        self.all.get(flag).map(|text| text.parse().unwrap())
    }

    fn or_one(&self, flag: &str) -> u64 {
        self.number(flag).unwrap_or(1)
    }

    fn word(&self, flag: &str) -> &str {
        self.all.get(flag).map_or("", String::as_str)
    }

    /// Ranks along tp, pp, cp, and what is left for dp.
    fn mesh(&self) -> [u64; 4] {
        let [tp, pp] = ["tensor", "pipeline"]
            .map(|axis| self.or_one(&format!("--{axis}-model-parallel-size")));
        let cp = self.or_one("--context-parallel-size");
        [tp, pp, cp, self.world / (tp * pp * cp)]
    }

    /// What is asserted of stages and their layers.
    fn wrong_stages(&self) -> Vec<(bool, &'static str)> {
        let [_, pp, ..] = self.mesh();
        let layers = self.or_one("--num-layers");
        let layout = self.all.get("--pipeline-model-parallel-layout").map(|text| laid_out(text));
        let chunk = self.number("--num-layers-per-virtual-pipeline-stage");
        let ends = ["first", "last"]
            .map(|end| self.number(&format!("--decoder-{end}-pipeline-num-layers")));
        let is_uneven = ends.iter().any(Option::is_some);
        let vpp = match (layout, chunk) {
            (Some((chunks, _)), _) => chunks / pp,
            (None, Some(chunk)) => layers / pp / chunk,
            (None, None) => 1,
        };
        let inner = ends.iter().flatten().fold(layers, |rest, end| rest - end);
        let named = ends.iter().flatten().count() as u64;
        let is_cut = |chunk| !layers.is_multiple_of(pp) || !(layers / pp).is_multiple_of(chunk);
        let is_even = layers.is_multiple_of(pp);
        vec![
            (layout.is_some() && chunk.is_some(), "more than one of the virtual pipeline flags"),
            (layout.is_some_and(|(n, sum)| !n.is_multiple_of(pp) || sum != layers), "layout"),
            (chunk.is_some() && is_uneven, "uneven stages with layers of a virtual stage"),
            (chunk.is_some_and(is_cut), "layers of a virtual stage"),
            (layout.is_none() && !is_uneven && !is_even, "layers divided by stages"),
            (is_uneven && pp > named && !inner.is_multiple_of(pp - named), "middle stages"),
            (vpp > 1 && pp < 2, "interleaving without stages"),
        ]
    }

    /// What is asserted of sharded states and of overlap.
    fn wrong_shards(&self) -> Vec<(bool, &'static str)> {
        let [tp, _, cp, dp] = self.mesh();
        let is_fsdp = self.has("--use-megatron-fsdp");
        let is_one = self.text.contains("export CUDA_DEVICE_MAX_CONNECTIONS=1");
        let format = self.word("--ckpt-format");
        let is_sharded = self.has("--use-distributed-optimizer") || is_fsdp;
        let gathers = self.has("--overlap-param-gather");
        let instances = self.or_one("--num-distributed-optimizer-instances");
        let is_aware = self.has("--use-precision-aware-optimizer");
        vec![
            (gathers && !(is_sharded && self.has("--overlap-grad-reduce")), "overlap-param-gather"),
            (is_fsdp && format != "fsdp_dtensor", "format of FSDP"),
            (format == "fsdp_dtensor" && !is_fsdp, "format without FSDP"),
            (is_fsdp && is_one, "FSDP with one connection"),
            (is_fsdp && self.has("--use-tp-pp-dp-mapping"), "FSDP with another mapping"),
            ((tp > 1 || cp > 1) && !is_fsdp && !is_one, "several connections"),
            (self.has("--optimizer-cpu-offload") && !is_aware, "offload of another optimizer"),
            (is_aware && !self.has("--use-distributed-optimizer"), "precision-aware optimizer"),
            (!(dp * cp).is_multiple_of(instances), "instances of the distributed optimizer"),
        ]
    }

    /// What is asserted of sizes, sequences, recomputation and experts.
    fn wrong_sizes(&self) -> Vec<(bool, &'static str)> {
        let [tp, pp, cp, dp] = self.mesh();
        let seq = self.or_one("--seq-length");
        let heads = self.or_one("--num-attention-heads");
        let groups = self.number("--num-query-groups").unwrap_or(heads);
        let (experts, ep) =
            (self.number("--num-experts"), self.or_one("--expert-model-parallel-size"));
        let etp = self.number("--expert-tensor-parallel-size").unwrap_or(tp);
        let batch = self.or_one("--global-batch-size");
        let granularity = self.word("--recompute-granularity");
        let has_sp = self.has("--sequence-parallel");
        let is_flex = self.word("--moe-token-dispatcher-type") == "flex";
        let is_rotated = self.word("--position-embedding-type") == "rope";
        vec![
            (!self.world.is_multiple_of(tp * pp * cp), "world size"),
            (!batch.is_multiple_of(self.or_one("--micro-batch-size") * dp), "global batch"),
            (cp > 1 && !seq.is_multiple_of(2 * cp), "seq-length and context-parallel-size"),
            (self.or_one("--max-position-embeddings") < seq, "max_position_embeddings"),
            (granularity == "selective" && self.has("--recompute-method"), "selective by method"),
            (granularity == "full" && !self.has("--recompute-num-layers"), "full without a number"),
            (tp == 1 && has_sp, "sequence parallelism of one rank"),
            (self.has("--tp-comm-overlap") && !has_sp, "tp-comm-overlap"),
            (ep > 1 && !experts.is_some_and(|n| n.is_multiple_of(ep)), "experts"),
            (experts.is_some() && tp > 1 && !has_sp, "experts without sequence parallelism"),
            (experts.is_some() && !self.world.is_multiple_of(etp * ep * pp), "expert ranks"),
            (self.has("--moe-enable-deepep") && !is_flex, "DeepEP without flex"),
            (!heads.is_multiple_of(tp), "heads"),
            (!groups.is_multiple_of(tp), "query groups"),
            (self.has("--rotary-base") && !is_rotated, "rotary base"),
        ]
    }
}

/// What `validate_args` and `TransformerConfig` assert of a script that `world` ranks run.
fn refused(text: &str, world: u64) -> Vec<&'static str> {
    let script = Script { text, all: arguments(text), world };
    let parts = [script.wrong_stages(), script.wrong_shards(), script.wrong_sizes()];
    parts.into_iter().flatten().filter_map(|(is, what)| is.then_some(what)).collect()
}

/// Random plans that are within Megatron-LM's space start: its parser takes every flag, and its
/// validation asserts nothing.
#[test]
fn megatron_takes_what_is_written_for_it() {
    let target = Target::parse("megatron").unwrap();
    for (model, experts) in [("gpt2-medium", 0), ("llama-3-8b", 0), ("mixtral-8x7b", 8)] {
        let mut decoder = decoder(model).unwrap();
        decoder.shape.layers = 24;
        let (heads, kv_heads) = (decoder.shape.heads, decoder.shape.kv_heads);
        let mut whole = 0;
        for seed in 0..60_000 {
            let (c, sizes) = random(seed);
            let sizes = Sizes { kv_heads, experts, ..sizes };
            // What the model and the batch refuse, whatever the tool.
            let is_legal = c.check(24).is_ok()
                && heads.is_multiple_of(c.tp)
                && experts.max(1).is_multiple_of(c.ep)
                && (c.cp == 1 || sizes.seq.is_multiple_of(2 * c.cp))
                && (c.tp > 1 || !c.sequence_parallel);
            if !is_legal || !target.refusals(&c, sizes, Form::Launch).is_empty() {
                continue;
            }
            whole += 1;
            let devices = c.ranks() as u32;
            let purpose =
                Use { global_batch: c.dp * c.microbatch * 2 * c.pp, seq: sizes.seq, layers: 24 };
            let launch = Launch {
                target,
                configuration: &c,
                purpose,
                decoder: Some(&decoder),
                nodes: devices,
                per_node: 1,
            };
            let script = &files(&launch).unwrap()[0].text;
            assert_eq!(unparsed(&arguments(script)), [""; 0], "SEED={seed} {model} {c}");
            let wrong = refused(script, devices.into());
            assert_eq!(wrong, [""; 0], "SEED={seed} {model} {c}\n{script}");
        }
        assert!(whole >= 50, "{model}: {whole} plans");
    }
}

/// DeepSpeed is started on all nodes by PyTorch's launcher, which needs no file of hosts, and its
/// configuration leaves the batch of a step to micro-batch, accumulation and ranks: transformers'
/// Trainer multiplies by all ranks, and stops at another product.
#[test]
fn deepspeed_starts_on_many_nodes() {
    let c: Configuration = "tp=2 cp=2 dp=4 mbs=1 zero=3".parse().unwrap();
    let purpose = Use { global_batch: 64, seq: 4096, layers: 32 };
    let target = Target::parse("deepspeed").unwrap();
    let (decoder, nodes) = (decoder("llama-3-8b").unwrap(), 2);
    let decoder = Some(&decoder);
    let launch = Launch { target, configuration: &c, purpose, decoder, nodes, per_node: 8 };
    let [config, script] = &files(&launch).unwrap()[..] else { panic!("two files") };
    assert!(script.text.contains("torchrun --nnodes 2 --nproc_per_node 8"), "{}", script.text);
    let json: serde_json::Value = serde_json::from_str(&config.text).unwrap();
    assert_eq!(json.get("train_batch_size"), None);
    assert_eq!(json["gradient_accumulation_steps"], 16);
}

/// The rules above are no less strict than they say: scripts with one flag changed are refused.
#[test]
fn broken_scripts_are_refused() {
    let target = Target::parse("megatron").unwrap();
    let decoder = decoder("llama-3-8b").unwrap();
    let script = |text: &str| {
        let c: Configuration = text.parse().unwrap();
        let purpose = Use { global_batch: 64, seq: 4096, layers: 32 };
        let launch = Launch {
            target,
            configuration: &c,
            purpose,
            decoder: Some(&decoder),
            nodes: 2,
            per_node: 8,
        };
        files(&launch).unwrap()[0].text.clone()
    };
    for (plan, from, to, said) in [
        ("tp=2 dp=8 sp zero=1", "--sequence-parallel \\\n", "", "tp-comm-overlap"),
        ("tp=2 dp=8 sp zero=1", "CONNECTIONS=1", "CONNECTIONS=8", "several connections"),
        ("tp=2 dp=8 sp zero=1", "-optimizer \\\n", "-optim \\\n", "overlap-param-gather"),
        ("pp=2 dp=8 vpp=4", "stage 4", "stage 3", "layers of a virtual stage"),
        (
            "pp=4 dp=4 stages=7.9.9.7",
            "first-pipeline-num-layers 7",
            "first-pipeline-num-layers 8",
            "middle stages",
        ),
        ("dp=16 zero=3", "fsdp_dtensor", "torch_dist", "format of FSDP"),
        ("dp=16 recompute=full", "--recompute-num-layers 1 \\\n", "", "full without a number"),
        ("dp=16", "--global-batch-size 64", "--global-batch-size 65", "global batch"),
    ] {
        let whole = script(plan);
        assert_eq!(refused(&whole, 16), [""; 0], "{plan}");
        assert!(whole.contains(from), "{plan}: {whole}");
        let wrong = refused(&whole.replace(from, to), 16);
        assert!(wrong.contains(&said), "{plan}: {wrong:?}");
    }
    let unknown = script("dp=16").replace("--swiglu", "--swigluu").replace("RMSNorm", "rms");
    assert_eq!(unparsed(&arguments(&unknown)), ["--normalization rms", "--swigluu "]);
}
