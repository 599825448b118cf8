//! Reading `config.json` of Hugging Face, as versions 4 and 5 of transformers write it.
//!
//! Fields that are left out have the defaults of their class, since transformers leaves defaults
//! out when it saves. Fields that do not change what is computed are known by name; any other that
//! nobody reads is warned of, so that a misspelt one is seen.

pub(super) mod fields;

use serde_json::Value;

use super::family::{families, family, read_family};
use super::sizes::{SIZED_TYPES, Sizes};
use super::{Architecture, Description, nearest};
use crate::{DType, Diagnostic};
use fields::{Fields, list};

/// The values of `model_type` that are known and not supported, each with what is nearest to it.
const UNSUPPORTED: [(&str, &str); 12] = [
    ("gemma3", "gemma3_text"),
    ("cohere2", "cohere"),
    ("ministral3", "ministral"),
    ("olmo", "llama"),
    ("olmo3", "olmo2"),
    ("internlm2", "llama"),
    ("exaone", "llama"),
    ("gpt_neo", "gpt2"),
    ("glm4", "gemma2"),
    ("nemotron", "starcoder2"),
    ("roberta", "bert"),
    ("vit", "bert"),
];

/// Other names of a `model_type`, of configs whose classes are those of a family.
const OTHER_NAMES: [(&str, &str); 1] = [("kimi_k2", "deepseek_v3")];

/// Reads the text of a `config.json`. `source` names it in diagnostics.
///
/// # Errors
/// `E1103` to `E1107`, see the table of [`crate::import`].
pub fn read_config(source: &str, text: &str, name: &str) -> Result<Description, Vec<Diagnostic>> {
    let mut fields = Fields::parse(source, text)?;
    let model_type = model_type(&mut fields)?;
    let Some(family) = family(model_type) else {
        let architecture = Architecture::Sized(Sizes::read(model_type, &mut fields));
        let warnings = fields.finish()?;
        let name = name.to_owned();
        return Ok(Description { name, architecture, stored: None, scaled: None, warnings });
    };
    refuse_other_heads(&mut fields, &family.classes);
    let stored = stored_dtype(&mut fields);
    let scaled = scaled_blocks(&mut fields);
    let architecture = Architecture::Family(Box::new(read_family(&mut fields, family)));
    let warnings = fields.finish()?;
    Ok(Description { name: name.to_owned(), architecture, stored, scaled, warnings })
}

/// The family, by `model_type` or, where there is none, by `architectures`.
fn model_type(fields: &mut Fields<'_>) -> Result<&'static str, Vec<Diagnostic>> {
    let built: Vec<&str> = families().iter().map(|family| family.name).collect();
    let types = || built.iter().copied().chain(SIZED_TYPES);
    let Some(word) = fields.word("model_type") else {
        let heads = fields.words("architectures");
        let is_given = |class: &&str| heads.iter().any(|head| head == class);
        return match families().iter().find(|family| family.classes.iter().any(is_given)) {
            Some(family) => Ok(family.name),
            None => {
                let wrong = fields.wrong("E1104", "", "the field `model_type` is missing");
                Err(vec![wrong.help("write `\"model_type\": \"llama\"`, or another type")])
            }
        };
    };
    let other = OTHER_NAMES.iter().find(|(name, _)| *name == word).map(|(_, family)| *family);
    if let Some(model_type) = other.or_else(|| types().find(|m| *m == word)) {
        return Ok(model_type);
    }
    let wrong =
        fields.wrong("E1106", "model_type", format!("models of type `{word}` are not supported"));
    let listed = UNSUPPORTED.iter().find(|(known, _)| *known == word).map(|(_, like)| *like);
    let help = "`gantline models` lists the types that are supported";
    if let (None, Some(near)) = (listed, nearest(&word, types())) {
        return Err(vec![wrong.help(format!("did you mean `{near}`? {help}"))]);
    }
    let wrong = match fields.given("text_config") {
        true => wrong.note("its `text_config` says what the decoder of text is"),
        false => wrong,
    };
    Err(vec![match listed.or_else(|| resembled(fields)) {
        Some(like) => wrong.note(format!("the nearest supported type is `{like}`")).help(format!(
            "for an approximate answer of `plan` and `fit`, write `\"model_type\": \"{like}\"` \
             with the same sizes in a copy; {help}"
        )),
        None => wrong
            .note("none that is supported has such fields")
            .help(format!("to plan it all the same, write it as a `.graph` text; {help}")),
    }])
}

/// The supported type that an unknown config resembles by the names of its fields; none for a
/// model without attention.
fn resembled(fields: &Fields<'_>) -> Option<&'static str> {
    let has = |keys: &[&str]| keys.iter().any(|key| fields.given(key));
    let says = |key: &str, word: &str| {
        fields.value(key).and_then(Value::as_str).is_some_and(|value| value.contains(word))
    };
    if !has(&["num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"]) {
        return None;
    }
    let encodes = fields.value("is_encoder_decoder") == Some(&Value::Bool(true));
    Some(if encodes || has(&["d_kv", "decoder_attention_heads"]) {
        "t5"
    } else if has(&["kv_lora_rank"]) {
        "deepseek_v3"
    } else if has(&["num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"]) {
        "mixtral"
    } else if has(&["type_vocab_size", "image_size"]) {
        "bert"
    } else if has(&["num_key_value_heads", "rms_norm_eps"]) || says("hidden_act", "silu") {
        "llama"
    } else if has(&["rotary_pct", "rotary_emb_base", "rope_theta", "partial_rotary_factor"]) {
        "gpt_neox"
    } else {
        "gpt2"
    })
}

/// Refuses a class with another head, such as a classifier.
fn refuse_other_heads(fields: &mut Fields<'_>, classes: &[&str]) {
    let heads = fields.words("architectures");
    if heads.is_empty() || heads.iter().any(|head| classes.contains(&head.as_str())) {
        return;
    }
    let headline = format!("the class `{}` is not supported", heads[0]);
    let wrong = fields.wrong("E1107", "architectures", headline);
    fields.report(wrong.help(format!("supported are {}", list(classes))));
}

/// The rows and columns of the blocks of stored weights that have one scale each, as in the
/// checkpoints of DeepSeek-V3. Of other forms the weights are not read, and a warning says so.
fn scaled_blocks(fields: &mut Fields<'_>) -> Option<[usize; 2]> {
    const KEY: &str = "quantization_config";
    let stored = fields.object(KEY)?;
    let method = stored.get("quant_method").and_then(Value::as_str).unwrap_or("an unnamed method");
    let sizes = stored.get("weight_block_size").and_then(Value::as_array);
    let sizes: Option<Vec<usize>> = sizes.and_then(|sizes| {
        let size = |size: &Value| usize::try_from(size.as_u64()?).ok().filter(|size| *size > 0);
        sizes.iter().map(size).collect()
    });
    if let ("fp8", Some([rows, columns])) = (method, sizes.as_deref()) {
        return Some([*rows, *columns]);
    }
    let headline = format!("weights that are stored by `{method}` are not read");
    let warning = fields.warning("W1114", KEY, headline);
    fields.warn(
        warning
            .note("read are those of `fp8` with a `weight_block_size` of rows and columns")
            .help("plans are of weights in other types; to load some, store them in bf16"),
    );
    None
}

/// The element type of the stored weights: `dtype` wins over the older `torch_dtype`.
fn stored_dtype(fields: &mut Fields<'_>) -> Option<DType> {
    let key = ["dtype", "torch_dtype"].into_iter().find(|key| fields.given(key))?;
    let word = fields.word(key)?;
    match word.trim_start_matches("torch.") {
        "float64" => Some(DType::F64),
        "float32" | "float" => Some(DType::F32),
        "bfloat16" => Some(DType::BF16),
        "float16" | "half" => Some(DType::F16),
        "auto" => None,
        _ => {
            let headline = format!("weights of type `{word}` are not supported");
            let wrong = fields.wrong("E1107", key, headline);
            let known = ["float64", "float32", "bfloat16", "float16"];
            fields.report(wrong.help(format!("supported are {}", list(&known))));
            None
        }
    }
}
