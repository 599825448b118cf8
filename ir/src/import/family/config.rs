//! From the fields of a config to the symbols of a family, and back.

use serde_json::{Map, Number, Value as Json, json};

use super::expr::{Expr, Scope, Value};
use super::rotary::{self, Wanted};
use super::{Check, Family, FamilyModel, Field, FieldKind, Rule};
use crate::import::activation::Activation;
use crate::import::config::fields::{Fields, SIZE_MAX, check_elements, describe, layers, list};
use crate::import::family::weights::largest_tensors;

/// Fields of all configs of transformers that change nothing of what is computed here, or that
/// `read_config` has looked at.
const GENERIC: [&str; 72] = [
    "architectures",
    "auto_map",
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "chunk_size_feed_forward",
    "cross_attention_hidden_size",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "eos_token_id",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "gradient_checkpointing",
    "hidden_states",
    "id2label",
    "ignore_keys_at_rope_validation",
    "is_decoder",
    "label2id",
    "length_penalty",
    "max_length",
    "min_length",
    "model_type",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_labels",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_past",
    "output_scores",
    "pad_token_id",
    "prefix",
    "problem_type",
    "quantization_config",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "suppress_tokens",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "typical_p",
    "use_bfloat16",
    "use_cache",
    "attn_implementation",
    "classifier_dropout",
    "classifier_bias",
    "classifier_activation",
    "cache_implementation",
    "dtype_plan",
    "return_unused_kwargs",
];

/// Fields of all configs of transformers that have to have one value.
const REQUIRED: [(&str, bool); 3] =
    [("is_causal", true), ("add_cross_attention", false), ("is_encoder_decoder", false)];

/// Reads the config of a family; what is wrong is reported there.
pub(crate) fn read_family(fields: &mut Fields<'_>, family: &'static Family) -> FamilyModel {
    for key in family.objects() {
        fields.open(key);
    }
    let known = GENERIC.to_vec();
    let mut reading = Reading { family, fields, scope: Scope::new(), known, learned: None };
    for (key, value) in REQUIRED {
        reading.require(key, &Value::Flag(value));
    }
    reading.refuse_pruned();
    for rule in &family.rules {
        reading.rule(rule, None);
    }
    let layers = reading.layers();
    reading.warn_of_unknown();
    let Reading { scope, learned, .. } = reading;
    let model = FamilyModel { family, scope, layers, learned };
    for (what, sizes) in largest_tensors(&model) {
        check_elements(fields, &what, &sizes);
    }
    model
}

struct Reading<'f, 't> {
    family: &'static Family,
    fields: &'f mut Fields<'t>,
    scope: Scope,
    known: Vec<&'static str>,
    learned: Option<usize>,
}

impl Reading<'_, '_> {
    /// The symbols that each layer has of its own.
    fn layers(&mut self) -> Vec<Scope> {
        let depth = self.scope.get("L").and_then(Value::size).unwrap_or(1);
        let whole = self.scope.clone();
        let mut layers = Vec::new();
        for layer in 0..depth {
            self.scope.clone_from(&whole);
            self.scope.insert("layer".into(), Value::Number(layer as f64));
            for rule in &self.family.layer_rules {
                self.rule(rule, Some(layer));
            }
            self.scope.remove("layer");
            let own = self.scope.iter().filter(|(name, _)| !whole.contains_key(*name));
            layers.push(own.map(|(name, value)| (name.clone(), value.clone())).collect());
        }
        self.scope = whole;
        layers
    }

    fn rule(&mut self, rule: &'static Rule, layer: Option<usize>) {
        match rule {
            Rule::Field(field) => {
                let value = self.field(field);
                self.scope.insert(field.symbol.to_owned(), value);
            }
            Rule::Let(symbol, expr) => {
                let value = self.value(expr, symbol);
                self.scope.insert((*symbol).to_owned(), value);
            }
            Rule::Require(key, expr) => {
                let value = self.value(expr, key);
                self.require(key, &value);
            }
            Rule::Ignore(keys) => self.known.extend(keys),
            Rule::Multiple(pair) => self.multiple(*pair),
            Rule::Check(check) => self.check(check, layer),
            Rule::Learned(expr) => self.learned = self.value(expr, "positions").size(),
        }
    }

    /// The value of an expression. What does not come out is the config's fault: a number that is
    /// missing, a list that is too short.
    fn value(&mut self, expr: &Expr, what: &str) -> Value {
        expr.eval(&self.scope).unwrap_or_else(|why| {
            let headline = format!("`{what}` does not follow from the other fields: {why}");
            let wrong = self.fields.wrong("E1105", what, headline);
            self.fields.report(wrong);
            Value::Number(1.0)
        })
    }

    fn require(&mut self, key: &'static str, wanted: &Value) {
        self.known.push(key);
        let Some(given) = self.fields.value(key).cloned() else { return };
        let agrees = match wanted {
            // A list without entries is none.
            Value::None => given.is_null() || given.as_array().is_some_and(Vec::is_empty),
            // A flag that is null is false.
            Value::Flag(flag) => given == Json::Bool(*flag) || given.is_null() && !flag,
            Value::Number(number) => given.as_f64() == Some(*number),
            Value::Word(word) => given.as_str() == Some(word),
            Value::List(_) | Value::Rotary(_) => false,
        };
        if agrees {
            return;
        }
        let wrong = if given == Json::Bool(true) {
            self.fields.wrong("E1107", key, format!("`{key}` is not supported yet"))
        } else {
            let headline = format!("`{key}` is {}, which is not supported", describe(&given));
            let wrong = self.fields.wrong("E1107", key, headline);
            wrong.help(match wanted == &Value::None {
                true => format!("leave `{key}` out"),
                false => format!("`{key}` has to be {wanted}, as it is where it is left out"),
            })
        };
        self.fields.report(wrong);
    }

    fn refuse_pruned(&mut self) {
        self.known.push("pruned_heads");
        let pruned = self.fields.value("pruned_heads").and_then(Json::as_object);
        if pruned.is_some_and(|heads| !heads.is_empty()) {
            let headline = "pruned heads are not supported";
            let wrong = self.fields.wrong("E1107", "pruned_heads", headline);
            self.fields.report(wrong);
        }
    }

    fn size_of(&self, symbol: &str) -> usize {
        self.scope.get(symbol).and_then(Value::size).unwrap_or(1)
    }

    /// The field that gave a symbol.
    fn key_of(&self, symbol: &str) -> &'static str {
        let field = self.family.fields().find(|field| field.symbol == symbol);
        field.map_or("", |field| self.fields.key_of(&field.keys))
    }

    fn multiple(&mut self, [whole, by]: [&'static str; 2]) {
        let (size, part) = (self.size_of(whole), self.size_of(by).max(1));
        if !size.is_multiple_of(part) {
            self.indivisible([whole, by], size, part);
        }
    }

    fn indivisible(&mut self, [whole, by]: [&str; 2], size: usize, part: usize) {
        let (what, by) = (self.key_of(whole), self.key_of(by));
        let headline = format!("`{what}` {size} is not a multiple of `{by}` {part}");
        let wrong = self.fields.wrong("E1105", what, headline);
        let rest = size % part;
        self.fields.report(wrong.note(format!("{size} = {} · {part} + {rest}", size / part)));
    }

    fn check(&mut self, check: &'static Check, layer: Option<usize>) {
        let value = self.value(&check.holds, check.key);
        if value != Value::Flag(false) {
            return;
        }
        let mut headline = check.headline.to_owned();
        for (symbol, value) in &self.scope {
            headline = headline.replace(&format!("{{{symbol}}}"), &value.to_string());
        }
        if let Some(layer) = layer {
            headline = format!("layer {layer}: {headline}");
        }
        let wrong = self.fields.wrong("E1105", check.key, headline);
        let help = check.help;
        self.fields.report(if help.is_empty() { wrong } else { wrong.help(help) });
    }

    fn field(&mut self, field: &'static Field) -> Value {
        self.known.extend(&field.keys);
        let keys = field.keys.as_slice();
        if let FieldKind::Rotary(arguments) = &field.kind {
            return Value::Rotary(self.rotary(arguments));
        }
        if field.optional && self.fields.value(keys[0]) == Some(&Json::Null) {
            return Value::None;
        }
        if !self.fields.given(self.fields.key_of(keys)) {
            return self.default(field);
        }
        let key = self.fields.key_of(keys);
        match &field.kind {
            FieldKind::Size | FieldKind::Count => {
                let read = if matches!(field.kind, FieldKind::Size) {
                    self.fields.optional_size(keys)
                } else {
                    self.fields.optional_count(keys)
                };
                // One that is wrong is reported, and is its default for what follows.
                read.map_or_else(|| self.default(field), |size| Value::Number(size as f64))
            }
            FieldKind::Depth => Value::Number(layers(self.fields, keys, 1) as f64),
            FieldKind::Number => Value::Number(self.fields.number_of(keys, 1.0)),
            FieldKind::Real => Value::Number(self.fields.real(keys, 1.0)),
            FieldKind::Positive => Value::Number(self.fields.positive(key, 1.0)),
            FieldKind::Probability | FieldKind::Dropout => {
                Value::Number(self.fields.probability(key, 0.0))
            }
            FieldKind::Flag => Value::Flag(self.fields.flag(key, false)),
            FieldKind::Activation => match self.fields.word(key) {
                // As it is written, so that an export says what the config said.
                Some(word) if Activation::named(&word).is_some() => Value::Word(word),
                Some(_) => {
                    let read = Activation::read(self.fields, key, Activation::Relu);
                    Value::Word(read.name().to_owned())
                }
                None => Value::Word(Activation::Relu.name().to_owned()),
            },
            FieldKind::Word(words) => self.word(key, words),
            FieldKind::List => self.list(key),
            FieldKind::Rotary(_) => Value::None,
        }
    }

    /// The value of a field that is left out.
    fn default(&mut self, field: &'static Field) -> Value {
        let Some(default) = &field.default else { return Value::None };
        let value = self.value(default, field.keys[0]);
        let whole = matches!(field.kind, FieldKind::Size | FieldKind::Depth | FieldKind::Count);
        if !whole || value == Value::None || value.size().is_some_and(|size| size <= SIZE_MAX) {
            return value;
        }
        match default.as_quotient() {
            Some([whole, by]) => {
                let (size, part) = (self.size_of(whole), self.size_of(by).max(1));
                self.indivisible([whole, by], size, part);
                Value::Number((size / part).max(1) as f64)
            }
            None => {
                let key = field.keys[0];
                let headline = format!("`{key}` would be {value}, not a whole number up to 2^30");
                let wrong = self.fields.wrong("E1105", key, headline);
                self.fields.report(wrong.help(format!("write `{key}`")));
                Value::Number(1.0)
            }
        }
    }

    fn word(&mut self, key: &str, words: &[&'static str]) -> Value {
        let Some(word) = self.fields.word(key) else { return Value::Word(words[0].to_owned()) };
        if !words.contains(&word.as_str()) {
            let headline = format!("`{key}` is `{word}`, which is not supported");
            let wrong = self.fields.wrong("E1107", key, headline);
            self.fields.report(wrong.help(format!("supported are {}", list(words))));
            return Value::Word(words[0].to_owned());
        }
        Value::Word(word)
    }

    fn list(&mut self, key: &str) -> Value {
        let depth = self.size_of("L");
        let entry = |item: &Json| match item {
            Json::Bool(flag) => Some(Value::Flag(*flag)),
            Json::Number(number) => number.as_f64().map(Value::Number),
            Json::String(word) => Some(Value::Word(word.clone())),
            Json::Null | Json::Array(_) | Json::Object(_) => None,
        };
        let items = self.fields.value(key).and_then(Json::as_array);
        let items: Option<Vec<Value>> = items.and_then(|items| items.iter().map(entry).collect());
        match items {
            Some(items) if items.len() == depth => Value::List(items),
            Some(items) => {
                let headline = format!("`{key}` has {} entries for {depth} layers", items.len());
                let wrong = self.fields.wrong("E1105", key, headline);
                self.fields.report(wrong);
                Value::None
            }
            None => {
                let headline = format!("`{key}` is no list with one entry for each layer");
                let wrong = self.fields.wrong("E1104", key, headline);
                self.fields.report(wrong);
                Value::None
            }
        }
    }

    fn rotary(&mut self, arguments: &'static [(&'static str, Expr)]) -> super::Rotary {
        let mut wanted = Wanted {
            head: 1,
            theta: 10_000.0,
            partial: None,
            positions: self.size_of("P"),
            layers: None,
            theta_field: "rope_theta",
            partial_field: "partial_rotary_factor",
            is_longrope: false,
            scaled: true,
            scores: false,
            head_field: "head_dim",
        };
        for (name, expr) in arguments {
            let value = self.value(expr, name);
            match (*name, &value) {
                ("head", _) => wanted.head = value.size().unwrap_or(1).max(1),
                ("theta", _) => wanted.theta = value.number().unwrap_or(wanted.theta),
                ("partial", _) => wanted.partial = value.number(),
                ("scaled", Value::Flag(scaled)) => wanted.scaled = *scaled,
                ("scores", Value::Flag(scores)) => wanted.scores = *scores,
                ("head_field", _) => {
                    wanted.head_field = expr.as_word().unwrap_or(wanted.head_field);
                }
                ("layers", _) => wanted.layers = expr.as_word(),
                ("longrope", Value::Flag(is)) => wanted.is_longrope = *is,
                ("partial_field", _) => {
                    wanted.partial_field = expr.as_word().unwrap_or(wanted.partial_field);
                }
                ("theta_field", _) => wanted.theta_field = expr.as_word().unwrap_or("rope_theta"),
                _ => {}
            }
        }
        self.known.extend(rotary::FIELDS);
        self.known.extend([wanted.theta_field, wanted.partial_field]);
        rotary::read(self.fields, &wanted)
    }

    /// Names the fields that nobody reads.
    fn warn_of_unknown(&mut self) {
        let unknown: Vec<String> = self.fields.keys().map(str::to_owned).collect();
        for name in unknown {
            if !self.known.contains(&name.as_str()) && !name.starts_with('_') {
                let known = self.known.clone();
                self.fields.warn_of_unknown("", &name, known);
            }
        }
    }
}

impl Family {
    /// The objects inside a config that have fields of the family, as in `attn_config.clip_qkv`.
    fn objects(&self) -> Vec<&'static str> {
        let mut objects: Vec<&'static str> = Vec::new();
        for rule in &self.rules {
            let keys = match rule {
                Rule::Field(field) => field.keys.as_slice(),
                Rule::Require(key, _) => std::slice::from_ref(key),
                Rule::Ignore(keys) => keys,
                Rule::Let(..) | Rule::Multiple(_) | Rule::Check(_) | Rule::Learned(_) => &[],
            };
            objects.extend(keys.iter().filter_map(|key| Some(key.split_once('.')?.0)));
        }
        objects.sort_unstable();
        objects.dedup();
        objects
    }
}

/// The fields of a config that says what a model is.
pub(super) fn write(model: &FamilyModel) -> Map<String, Json> {
    let mut config = Map::new();
    config.insert("architectures".into(), json!([model.family.classes[0]]));
    config.insert("model_type".into(), json!(model.family.name));
    let mut nested = Map::new();
    for rule in &model.family.rules {
        let Rule::Field(field) = rule else { continue };
        let Some(value) = model.scope.get(field.symbol) else { continue };
        if let (Value::Rotary(rotary), FieldKind::Rotary(arguments)) = (value, &field.kind) {
            let layers = arguments.iter().find(|(name, _)| *name == "layers");
            match layers.and_then(|(_, expr)| expr.as_word()) {
                Some(kind) => drop(nested.insert(kind.into(), rotary.parameters.clone().into())),
                None => {
                    config.insert("rope_parameters".into(), rotary.parameters.clone().into());
                }
            }
            continue;
        }
        let value = written(value, &field.kind);
        match field.keys[0].split_once('.') {
            None => drop(config.insert(field.keys[0].to_owned(), value)),
            Some((object, key)) => {
                let object = config.entry(object).or_insert_with(|| json!({}));
                object[key] = value;
            }
        }
    }
    if !nested.is_empty() {
        config.insert("rope_parameters".into(), nested.into());
    }
    config
}

fn written(value: &Value, kind: &FieldKind) -> Json {
    match value {
        Value::None | Value::Rotary(_) => Json::Null,
        Value::Flag(flag) => json!(flag),
        Value::Number(_)
            if matches!(kind, FieldKind::Size | FieldKind::Depth | FieldKind::Count) =>
        {
            value.size().map_or(Json::Null, |size| Json::Number(Number::from(size)))
        }
        // transformers checks some of them for whole numbers.
        Value::Number(number) if matches!(kind, FieldKind::Dropout) && *number == 0.0 => json!(0),
        Value::Number(number) if matches!(kind, FieldKind::List) && number.fract() == 0.0 => {
            json!(*number as i64)
        }
        Value::Number(number) => json!(number),
        Value::Word(word) => json!(word),
        Value::List(items) => items.iter().map(|item| written(item, kind)).collect(),
    }
}
