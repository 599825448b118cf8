//! Flags of Megatron-LM in a script.

use ir::{Axis, DType, Diagnostic};
use planner::configuration::{Configuration, Place, Recompute};
use planner::estimate::profile::ExpertPlacement;

use super::said::Said;
use super::{DecoderSizes, Known, Layout, Overlap, data_parallel_ranks};
use crate::job::Precision;

/// What flags begin with of which no step's time or memory depends: what is learnt and how fast,
/// files, logs, and how processes find each other.
pub(super) const IDLE: &[&str] = &[
    "--adam-",
    "--ckpt-",
    "--clip-grad",
    "--data-cache-path",
    "--data-path",
    "--dataloader-type",
    "--distributed-backend",
    "--distributed-timeout-minutes",
    "--end-weight-decay",
    "--eval-",
    "--exit-",
    "--init-method-std",
    "--load",
    "--log-",
    "--lr",
    "--master",
    "--merge-file",
    "--min-lr",
    "--no-load-",
    "--no-save-",
    "--node",
    "--num-workers",
    "--override-opt_param-scheduler",
    "--rdzv",
    "--save",
    "--seed",
    "--split",
    "--start-weight-decay",
    "--tensorboard-",
    "--timing-log-",
    "--tokenizer-",
    "--train-iters",
    "--train-samples",
    "--use-checkpoint-",
    "--vocab-file",
    "--wandb-",
    "--weight-decay",
];

/// Part of a step's work that is recomputed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Granularity {
    Selective,
    Full,
}

pub(super) fn layout(mut said: Said, known: Known) -> Result<Layout, Vec<Diagnostic>> {
    let mut c = Configuration {
        tp: said.count("--tensor-model-parallel-size"),
        pp: said.count("--pipeline-model-parallel-size"),
        cp: said.count("--context-parallel-size"),
        ep: said.count("--expert-model-parallel-size"),
        microbatch: said.count("--micro-batch-size"),
        // Flags without a value: a word that follows belongs to something else.
        sequence_parallel: said.has("--sequence-parallel"),
        ..Configuration::default()
    };
    if let Some(layers) = said.size("--num-layers-per-virtual-pipeline-stage") {
        c.vpp = chunks(&mut said, known.layers / c.pp, layers);
    }
    if let Some(chunks) = said.size("--num-virtual-stages-per-pipeline-rank") {
        c.vpp = chunks;
    }
    let first = said.number("--decoder-first-pipeline-num-layers");
    let last = said.number("--decoder-last-pipeline-num-layers");
    if (first.is_some() || last.is_some()) && c.pp > 1 {
        c.stage_layers = stages(known.layers, c.pp, first, last);
        leave_out_usual(&mut c, known.layers);
    }
    if let Some(chunks) = chunk_layers(&mut said) {
        laid_out(&mut said, known.layers, &chunks, &mut c);
    }
    c.zero.stage = zero_stage(&mut said);
    c.recompute = recompute(&mut said, c.vpp);
    if said.has("--optimizer-cpu-offload") {
        c.offload.optimizer = Place::Host;
    }
    if said.has("--use-tp-pp-dp-mapping") {
        c.order = [Axis::Tp, Axis::Cp, Axis::Pp, Axis::Dp];
    }
    check_layers(&mut said, known.layers);
    check_decoder(&mut said, known.decoder);
    check_kinds(&mut said, known.decoder);
    let facts = attention(&mut said);
    read_experts(&mut said, &mut c, known.decoder);
    let overlap = Overlap {
        gradients: said.has("--overlap-grad-reduce"),
        weights: said.has("--overlap-param-gather"),
        tensor: said.has("--tp-comm-overlap"),
        in_half: said.has("--grad-reduce-in-bf16"),
    };
    let dtype = element_type(&mut said);
    // Says how, or follows from the rest.
    for name in ASSUMED {
        said.has(name);
    }
    check_together(&mut said, &c);
    let nodes = said.size("--nnodes").unwrap_or(1);
    let each = said.size("--nproc_per_node").or_else(|| said.size("--nproc-per-node"));
    let devices = known.devices.or_else(|| Some(each?.saturating_mul(nodes)));
    c.dp = data_parallel_ranks(&mut said, Known { devices, ..known }, &c);
    let instances = said.count("--num-distributed-optimizer-instances");
    if c.zero.stage > 0 && instances > 1 {
        let copies = known.dp.unwrap_or(c.dp).saturating_mul(known.cp.unwrap_or(c.cp));
        if !copies.is_multiple_of(instances) {
            let name = "--num-distributed-optimizer-instances";
            let headline = format!("`{name}` is {instances}, and dp · cp is {copies}");
            said.refuse(name, headline, "write a number that divides it");
        }
        c.zero.shard = (copies / instances).max(1);
    }
    let batch = said.size("--global-batch-size");
    let seq = said.size("--seq-length");
    let layout = said.layout("megatron", c, [batch, seq])?;
    Ok(Layout { overlap: Some(overlap), dtype, facts, ..layout })
}

/// The type of products: f32 of a script with a whole model and neither flag.
fn element_type(said: &mut Said) -> Option<Precision> {
    let names = ["--bf16", "--fp16"].map(|name| (name, said.has(name)));
    let is_whole = said.has("--hidden-size");
    said.half_precision(names).or(is_whole.then_some(Precision::Of(DType::F32)))
}

/// How attention is computed, where that is not left to Transformer Engine, which fuses it.
fn attention(said: &mut Said) -> Vec<String> {
    let words = [
        ("auto", None),
        ("flash", None),
        ("fused", None),
        ("unfused", Some("attention=fused-softmax")),
        ("local", Some("attention=fused-softmax")),
    ];
    let word = said.choice("--attention-backend", &words).flatten();
    word.map(str::to_owned).into_iter().collect()
}

/// Refuses flags at which Megatron-LM stops. Source: `validate_args` of
/// `megatron/training/arguments.py` and `TransformerConfig`, at
/// 000c4ac24f61159c138b0975def722c65245983c.
fn check_together(said: &mut Said, c: &Configuration) {
    let is_sharded = said.has("--use-distributed-optimizer") || said.has("--use-megatron-fsdp");
    let granularity = said.text("--recompute-granularity").unwrap_or_default();
    let has_method = said.has("--recompute-method");
    let mut refuse = |name: &str, is_wrong: bool, what: &str, help: &str| {
        if said.has(name) && is_wrong {
            said.refuse(name, format!("`{name}` {what}"), help);
        }
    };
    refuse(
        "--recompute-granularity",
        granularity == "full" && !has_method,
        "is `full`, and no method is there",
        "write `--recompute-method uniform` or `block`",
    );
    refuse(
        "--recompute-method",
        granularity == "selective",
        "is there, and what is recomputed is selective",
        "leave it out, or write `--recompute-granularity full`",
    );
    refuse(
        "--tp-comm-overlap",
        !c.sequence_parallel,
        "is there without sequence parallelism",
        "write `--sequence-parallel`, or leave it out",
    );
    refuse(
        "--overlap-param-gather",
        !is_sharded,
        "is there without the distributed optimizer",
        "write `--use-distributed-optimizer`, or leave it out",
    );
    let has_overlap = said.has("--overlap-grad-reduce");
    if said.has("--overlap-param-gather") && !has_overlap {
        let headline = "`--overlap-param-gather` is there without `--overlap-grad-reduce`";
        said.refuse("--overlap-param-gather", headline.to_owned(), "write both, or neither");
    }
}

/// Refuses a script that leaves out what MODEL has, which is then something else: `validate_args`.
fn check_unsaid(said: &mut Said, own: DecoderSizes) {
    let DecoderSizes { hidden, heads, kv_heads, head_dim, ffn, is_gated, .. } = own;
    // Two thirds of four times as many, in multiples of 64, where there are gates.
    let usual_ffn = if is_gated { hidden * 8 / 3 / 64 * 64 } else { 4 * hidden };
    let is_grouped = head_dim > 0 && kv_heads != heads;
    let unsaid = [
        ("--group-query-attention", is_grouped, format!("{kv_heads} heads of keys and values")),
        ("--num-query-groups", is_grouped, format!("{kv_heads} heads of keys and values")),
        (
            "--ffn-hidden-size",
            own.experts == 0 && ffn != usual_ffn,
            format!("feed-forward layers of {ffn}"),
        ),
        (
            "--kv-channels",
            head_dim > 0 && head_dim * heads != hidden,
            format!("heads of {head_dim}"),
        ),
        ("--num-experts", own.experts > 0, format!("{} experts", own.experts)),
        ("--multi-latent-attention", own.kv_rank > 0, "low-rank attention".to_owned()),
    ];
    for (name, is_needed, what) in unsaid {
        if is_needed && !said.has(name) {
            let headline = format!("MODEL has {what}, and `{name}` is not there");
            said.refuse(name, headline, "write it, or name the model that the script trains");
        }
    }
}

/// Refuses a script that names a model's sizes, and kinds of layers that MODEL has not.
fn check_kinds(said: &mut Said, decoder: Option<DecoderSizes>) {
    let Some(own) = decoder.filter(|_| said.has("--hidden-size")) else { return };
    let help = "name the model that the script trains";
    let kinds = [
        ("--swiglu", own.is_gated, "gated feed-forward layers"),
        ("--untie-embeddings-and-output-weights", !own.is_tied, "a head with a weight of its own"),
    ];
    for (name, is_there, what) in kinds {
        let headline = match (said.has(name), is_there) {
            (true, false) => format!("`{name}` is there, and MODEL does not have {what}"),
            (false, true) => format!("MODEL has {what}, and `{name}` is not there"),
            (true, true) | (false, false) => continue,
        };
        said.refuse(name, headline, help);
    }
    check_unsaid(said, own);
    // Its table of words is padded to a multiple of 128 for each tensor-parallel rank.
    let padded = |words: u32| words.next_multiple_of(128);
    if let Some(words) = said.size("--vocab-size")
        && padded(words) != padded(own.vocab)
        && words.saturating_add(1) != own.vocab
    {
        let headline = format!("`--vocab-size` is {words}, and MODEL has {}", own.vocab);
        said.refuse("--vocab-size", headline, help);
    }
    let norm = said.text("--normalization");
    if own.is_gated && norm.is_some_and(|norm| norm != "RMSNorm") {
        said.notes.push("`--normalization`: norms are priced as MODEL has them".to_owned());
    }
}

/// What is sharded.
fn zero_stage(said: &mut Said) -> u8 {
    let mut stage = u8::from(said.has("--use-distributed-optimizer"));
    let strategies = [("no_shard", 0), ("optim", 1), ("optim_grads", 2), ("optim_grads_params", 3)];
    let strategy = said.choice("--data-parallel-sharding-strategy", &strategies);
    if said.has("--use-megatron-fsdp") {
        stage = strategy.filter(|stage| *stage > 0).unwrap_or(stage);
    }
    if said.has("--use-torch-fsdp2") { 3 } else { stage }
}

/// Flags that follow from others, that MODEL says, or that the execution profile assumes.
const ASSUMED: [&str; 24] = [
    "--ckpt-format",
    "--use-precision-aware-optimizer",
    "--attention-dropout",
    "--cross-entropy-loss-fusion",
    "--disable-bias-linear",
    "--add-qkv-bias",
    "--qk-layernorm",
    "--group-query-attention",
    "--hidden-dropout",
    "--max-position-embeddings",
    "--mock-data",
    "--moe-grouped-gemm",
    "--moe-layer-freq",
    "--moe-router-dtype",
    "--moe-router-pre-softmax",
    "--multi-latent-attention",
    "--no-gradient-accumulation-fusion",
    "--position-embedding-type",
    "--q-lora-rank",
    "--qk-head-dim",
    "--qk-pos-emb-head-dim",
    "--rotary-base",
    "--use-mcore-models",
    "--v-head-dim",
];

/// Refuses a script for a model of other sizes than the one that is asked about.
fn check_decoder(said: &mut Said, decoder: Option<DecoderSizes>) {
    let names = [
        "--hidden-size",
        "--num-attention-heads",
        "--num-query-groups",
        "--kv-channels",
        "--kv-lora-rank",
        "--ffn-hidden-size",
        "--num-experts",
        "--moe-router-topk",
    ];
    let Some(own) = decoder else { return };
    let DecoderSizes { hidden, heads, kv_heads, head_dim, kv_rank, ffn, experts, top_k, .. } = own;
    let sizes = [hidden, heads, kv_heads, head_dim, kv_rank, ffn, experts, top_k];
    // With experts in every layer, the size of others is said or not; heads of parts have sizes of
    // their own.
    let is_open = |name: &str| match name {
        "--ffn-hidden-size" => experts > 0,
        "--kv-channels" => head_dim == 0,
        _ => false,
    };
    for (name, size) in names.into_iter().zip(sizes) {
        let Some(written) = said.size(name).filter(|written| *written != size) else { continue };
        if !is_open(name) {
            let headline = format!("`{name}` is {written}, and MODEL has {size}");
            said.refuse(name, headline, "name the model that the script trains");
        }
    }
}

/// Reads how experts are cut inside: over all ranks of `tp` where nothing says it.
fn read_experts(said: &mut Said, c: &mut Configuration, decoder: Option<DecoderSizes>) {
    let has_experts = decoder.map_or(c.ep > 1, |decoder| decoder.experts > 0);
    let slices = said.size("--expert-tensor-parallel-size").unwrap_or(c.tp);
    if has_experts && slices != ExpertPlacement::FromTensor.slices(c) {
        c.etp = slices;
    }
    // DeepEP is what the profile has where experts lie on several ranks.
    let dispatcher = said.text("--moe-token-dispatcher-type");
    let has_deepep = said.has("--moe-enable-deepep");
    if c.ep > 1 && !has_deepep {
        let dispatcher = dispatcher.unwrap_or_else(|| "allgather".to_owned());
        said.notes.push(format!("the dispatcher `{dispatcher}` is priced as DeepEP"));
    }
}

/// Refuses a script for a model of another depth than the one that is asked about.
fn check_layers(said: &mut Said, layers: u32) {
    let Some(own) = said.size("--num-layers").filter(|own| layers > 0 && *own != layers) else {
        return;
    };
    let headline = format!("the script is for a model of {own} layers, and MODEL has {layers}");
    said.refuse("--num-layers", headline, "name the model that the script trains");
}

/// Number of chunks of `layers` layers in a stage of `stage` layers.
fn chunks(said: &mut Said, stage: u32, layers: u32) -> u32 {
    if !stage.is_multiple_of(layers) {
        let name = "--num-layers-per-virtual-pipeline-stage";
        let headline = format!("`{name}` is {layers}, and a stage has {stage} layers");
        said.refuse(name, headline, "write a number that divides them");
    }
    (stage / layers).max(1)
}

/// The flag of stages that are laid out by hand.
const LAYOUT: &str = "--pipeline-model-parallel-layout";

/// Transformer layers of each chunk that a layout names, first to last: letters of layers, parted
/// by `|`; `t*3` and `(t|)*3` are repeated.
fn chunk_layers(said: &mut Said) -> Option<Vec<u32>> {
    let text = said.text(LAYOUT)?;
    let chunks = unrolled(&text.replace(',', "")).map(|letters| {
        let chunks: Vec<String> = letters.split('|').map(str::to_owned).collect();
        chunks
    });
    let is_known = |chunk: &String| chunk.chars().all(|letter| "EtmL".contains(letter));
    match chunks.filter(|chunks| chunks.iter().all(is_known)) {
        Some(chunks) => {
            if chunks.iter().any(|chunk| chunk.contains('m')) {
                said.notes.push(format!("`{LAYOUT}`: layers `m` that predict more are not priced"));
            }
            Some(chunks.iter().map(|chunk| chunk.matches('t').count() as u32).collect())
        }
        None => {
            let headline = format!("`{LAYOUT}` is `{text}`, which is no layout of stages");
            let help = "write transformer layers in each stage: `Et*3|(t*4|)*2t*3L`";
            said.refuse(LAYOUT, headline, help);
            None
        }
    }
}

/// Letters that a layout may stand for. Chosen: more than any model has layers.
const LETTERS_MAX: usize = 1 << 16;

/// A layout without repetitions; none where it cannot be read.
fn unrolled(text: &str) -> Option<String> {
    let mut letters = String::new();
    // Where what may be repeated begins.
    let mut last = 0;
    let mut open = None;
    let mut rest = text.chars().peekable();
    while let Some(letter) = rest.next() {
        match letter {
            '(' if open.is_none() => open = Some(letters.len()),
            ')' => last = open.take()?,
            '*' => {
                let mut count = String::new();
                while let Some(digit) = rest.next_if(char::is_ascii_digit) {
                    count.push(digit);
                }
                let count: usize = count.parse().ok()?;
                let part = letters.split_off(last);
                if part.len().saturating_mul(count) > LETTERS_MAX {
                    return None;
                }
                letters += &part.repeat(count);
            }
            '(' => return None,
            _ => {
                last = letters.len();
                letters.push(letter);
            }
        }
        if letters.len() > LETTERS_MAX {
            return None;
        }
    }
    open.is_none().then_some(letters)
}

/// Takes over the stages that a layout names; chunks go round all stages.
fn laid_out(said: &mut Said, layers: u32, chunks: &[u32], c: &mut Configuration) {
    let (count, pp) = (chunks.len() as u32, c.pp);
    let sum: u32 = chunks.iter().sum();
    if !count.is_multiple_of(pp) || sum != layers {
        let headline = format!("`{LAYOUT}` has {sum} layers in {count} stages");
        let help = format!("write {layers} layers in {pp} stages, or as often for more chunks");
        return said.refuse(LAYOUT, headline, help);
    }
    c.vpp = count / pp;
    let stage = |stage: usize| chunks.iter().skip(stage).step_by(pp as usize).sum();
    c.stage_layers = (0..pp as usize).map(stage).collect();
    leave_out_usual(c, layers);
    if c.stage_layers.contains(&0) {
        let headline = format!("`{LAYOUT}` has a stage without a transformer layer");
        said.refuse(LAYOUT, headline, "give each stage one");
    } else if c.chunks(layers) != chunks {
        let headline = format!("`{LAYOUT}` cuts stages into chunks that are not priced");
        let help = "write chunks of a stage that are equal, or have one layer less beside the ends";
        said.refuse(LAYOUT, headline, help);
    }
}

/// Leaves stages out that are as even as can be.
pub(super) fn leave_out_usual(c: &mut Configuration, layers: u32) {
    let told = std::mem::take(&mut c.stage_layers);
    let is_usual = (0..c.pp).zip(&told).all(|(stage, own)| c.layers_of(layers, stage).0 == *own);
    if !is_usual {
        c.stage_layers = told;
    }
}

/// What is recomputed, in stages of `vpp` chunks.
fn recompute(said: &mut Said, vpp: u32) -> Recompute {
    let count = said.size("--recompute-num-layers");
    let is_block = said.choice("--recompute-method", &[("uniform", false), ("block", true)]);
    let granularities = [("selective", Granularity::Selective), ("full", Granularity::Full)];
    let granularity = said.choice("--recompute-granularity", &granularities);
    let is_selective = said.has("--recompute-activations");
    match granularity {
        Some(Granularity::Selective) => Recompute::Attention,
        Some(Granularity::Full) if is_block == Some(true) => {
            // It counts those of a chunk.
            Recompute::Layers(count.unwrap_or(1).saturating_mul(vpp))
        }
        Some(Granularity::Full) => {
            if let Some(count) = count.filter(|count| *count > 1) {
                said.notes.push(format!(
                    "`--recompute-num-layers` is {count}: layers are priced as kept one by one"
                ));
            }
            Recompute::Full
        }
        None if is_selective => Recompute::Attention,
        None => Recompute::None,
    }
}

/// Layers of stages where the first, the last or both are named: the others share what is left.
fn stages(layers: u32, pp: u32, first: Option<u32>, last: Option<u32>) -> Vec<u32> {
    let named = [first, last].into_iter().flatten();
    let others = pp - named.clone().count() as u32;
    let rest = layers.saturating_sub(named.fold(0, u32::saturating_add));
    let mut left = others;
    let mut given = 0;
    (0..pp)
        .map(|stage| match (stage, first, last) {
            (0, Some(first), _) => first,
            (stage, _, Some(last)) if stage + 1 == pp => last,
            _ => {
                let size = (rest - given).div_ceil(left.max(1));
                (given, left) = (given + size, left.saturating_sub(1));
                size
            }
        })
        .collect()
}
