//! Decoder families against transformers (`tests/reference/families`), in float64, by the
//! interpreter: what the modules say, before anything is planned or compiled.

#![allow(clippy::unwrap_used)]

extern crate gantline_ir as ir;

#[path = "families/drawn.rs"]
mod drawn;

use drawn::{draw, each_case, family, is_unsupported, names, root, writes_no_text};
use ir::autodiff::training_step;
use ir::import::{
    Cache, Decoding, DecodingOptions, Description, LogitsOf, Model, Options, Weight, decoding,
    import, read_config,
};
use ir::recognise::is_recognised;
use ir::{DType, Kind, Tensor, eval::eval};
use safetensors::SafeTensors;

/// Tokens of a sequence.
const SEQ: usize = 16;

/// The largest error that rounding in another order explains, with room for a factor of a hundred.
const ERROR_MAX: f64 = 1e-11;

struct Case {
    name: String,
    expected: Vec<u8>,
}

impl Case {
    fn open(name: &str) -> Case {
        let expected = std::fs::read(root().join(name).join("expected.safetensors")).unwrap();
        Case { name: name.to_owned(), expected }
    }

    fn read(&self, config: &str) -> Result<Description, String> {
        let text = std::fs::read_to_string(root().join(&self.name).join(config)).unwrap();
        read_config(config, &text, &self.name).map_err(|wrong| {
            wrong.iter().map(|d| d.headline.as_str()).collect::<Vec<_>>().join("; ")
        })
    }

    fn model(&self) -> Model {
        let options = Options { seq: SEQ, dtype: DType::F64, dropout: None, documents: false };
        let description = self.read("config.json");
        let description = description.unwrap_or_else(|why| panic!("{}: {why}", self.name));
        import(&description, &options).unwrap()
    }

    fn decoding(&self, tokens: usize, capacity: usize) -> Result<Decoding, String> {
        let (dtype, logits) = (DType::F64, LogitsOf::Last);
        let options = DecodingOptions { tokens, capacity, dtype, logits };
        let found = decoding(&self.read("config.json").unwrap(), &options);
        found.map_err(|wrong| wrong[0].headline.clone())
    }

    fn expected(&self, name: &str) -> Tensor {
        let file = SafeTensors::deserialize(&self.expected).unwrap();
        let view = file.tensor(name).unwrap_or_else(|_| panic!("{}: no `{name}`", self.name));
        let words = view.data().chunks_exact(8).map(|b| <[u8; 8]>::try_from(b).unwrap());
        if view.dtype() == safetensors::Dtype::F64 {
            return Tensor::f64(view.shape(), words.map(f64::from_le_bytes).collect());
        }
        Tensor::int(DType::I32, view.shape(), words.map(i64::from_le_bytes).collect())
    }

    /// The names under which the case has the tensors of a weight.
    fn stored(&self, weight: &Weight) -> Vec<String> {
        let file = SafeTensors::deserialize(&self.expected).unwrap();
        let is_there = |name: &String| file.tensor(&format!("grad.{name}")).is_ok();
        let of = |number: usize| {
            let mut names = weight.source.names_of(number).map(|name| name.into_owned());
            let found = names.find(is_there);
            found.unwrap_or_else(|| panic!("{}: no tensor for `{}`", self.name, weight.name))
        };
        (0..weight.source.count).map(of).collect()
    }

    /// What the case has for the tensors of a weight, below each other.
    fn of_weight(&self, weight: &Weight, what: &str) -> Vec<f64> {
        let of = |name: String| self.expected(&format!("{what}.{name}")).to_f64();
        self.stored(weight).into_iter().flat_map(of).collect()
    }

    fn weights(&self, weights: &[Weight]) -> Vec<Tensor> {
        let drawn = |weight: &Weight| {
            let dims = &weight.source.dims;
            let tensor = |name: String| {
                let shape = self.expected(&format!("grad.{name}")).dims;
                assert_eq!(*dims, shape, "{}: {name}", self.name);
                draw(&self.name, &name, dims)
            };
            let all: Vec<f64> = self.stored(weight).into_iter().flat_map(tensor).collect();
            view(&all, weight)
        };
        weights.iter().map(drawn).collect()
    }
}

/// The elements of a tensor that are a weight.
fn view(all: &[f64], weight: &Weight) -> Tensor {
    let mut elements = Vec::new();
    weight.source.each_run(0, weight.dims.iter().product(), |start, len| {
        elements.extend_from_slice(&all[start..start + len]);
    });
    Tensor::f64(&weight.dims, elements)
}

fn supported() -> Vec<String> {
    names().into_iter().filter(|name| !is_unsupported(name)).collect()
}

fn largest(x: &[f64]) -> f64 {
    x.iter().fold(0.0, |m: f64, x| m.max(x.abs()))
}

/// `max|x − r| / max|r|`; NaN where one is.
fn error(x: &[f64], r: &[f64]) -> f64 {
    assert_eq!(x.len(), r.len());
    let off = x.iter().zip(r).map(|(x, r)| (x - r).abs());
    off.fold(0.0, |m: f64, x| if x.is_nan() { x } else { m.max(x) }) / largest(r)
}

/// The label of each token is the next one; the last has none.
fn shifted(labels: &Tensor) -> Tensor {
    let labels = labels.to_f64();
    let next = |at: usize| if (at + 1).is_multiple_of(SEQ) { -100 } else { labels[at + 1] as i64 };
    let count = labels.len();
    Tensor::int(DType::I32, &[count / SEQ, SEQ], (0..count).map(next).collect())
}

#[test]
fn every_family_has_three_cases() {
    let names = names();
    assert!(names.len() >= 90, "{} cases", names.len());
    for case in &names {
        let of = names.iter().filter(|name| family(name) == family(case)).count();
        assert!(of >= 3, "`{case}` has {of} of its family");
    }
    for entry in drawn::UNSUPPORTED.iter().chain(drawn::WITHOUT_TEXT) {
        let is_there = |name: &String| name == entry || family(name) == *entry;
        assert!(names.iter().any(is_there), "`{entry}` names no case");
    }
}

/// A config is refused with a diagnostic or computed as transformers does; nothing between.
#[test]
fn what_is_not_supported_is_refused() {
    for name in names().iter().filter(|name| is_unsupported(name)) {
        let found = Case::open(name).read("config.json").and_then(|description| {
            let options = Options { seq: SEQ, dtype: DType::F64, dropout: None, documents: false };
            import(&description, &options).map_err(|wrong| wrong[0].headline.clone())
        });
        assert!(found.is_err(), "`{name}` is not refused: take it off UNSUPPORTED");
    }
}

#[test]
fn both_spellings_of_a_config_are_one_model() {
    let mut count = 0;
    for name in supported() {
        let case = Case::open(&name);
        if !root().join(&name).join("config.v4.json").exists() {
            continue;
        }
        let read = |config: &str| case.read(config).unwrap_or_else(|why| panic!("{name}: {why}"));
        let [new, old] = ["config.json", "config.v4.json"].map(read);
        // What is computed; the spelling of defaults may differ.
        let options = Options { seq: SEQ, dtype: DType::F64, dropout: None, documents: false };
        let [new, old] = [new, old].map(|read| import(&read, &options).unwrap());
        assert_eq!(new.module.to_string(), old.module.to_string(), "{name}");
        assert_eq!(new.weights, old.weights, "{name}");
        count += 1;
    }
    assert!(count > 0, "no config of transformers 4");
}

/// Lists that transformers writes out follow from other fields where they are left out.
#[test]
fn lists_of_layers_follow_from_other_fields() {
    let options = Options { seq: SEQ, dtype: DType::F64, dropout: None, documents: false };
    for name in [
        "smollm3-interval",
        "smollm3-windows",
        "qwen2-windows",
        "qwen2_moe-windows",
        "qwen3-windows",
        "gemma2-capped",
        "gemma3_text-pattern",
        "ministral-windows",
    ] {
        let text = std::fs::read_to_string(root().join(name).join("config.json")).unwrap();
        let mut fields: serde_json::Map<String, serde_json::Value> =
            serde_json::from_str(&text).unwrap();
        assert!(fields.remove("layer_types").is_some(), "{name}");
        fields.remove("no_rope_layers");
        let short = serde_json::Value::Object(fields).to_string();
        let modules = [text, short].map(|text| {
            let description = read_config("config.json", &text, name).unwrap();
            import(&description, &options).unwrap().module.to_string()
        });
        assert_eq!(modules[0], modules[1], "{name}");
    }
}

/// What transformers reads otherwise, or not at all, is read like that or refused.
#[test]
fn older_and_ignored_fields_are_read_or_refused() {
    let text = |case: &str| std::fs::read_to_string(root().join(case).join("config.json")).unwrap();
    let read = |text: &str| read_config("config.json", text, "m");
    let options = Options { seq: SEQ, dtype: DType::F64, dropout: None, documents: false };
    let phi3 = text("phi3-longrope_short");
    let older = phi3.replace("\"rope_type\": \"longrope\"", "\"rope_type\": \"su\"");
    assert_ne!(phi3, older);
    let [new, old] = [phi3, older].map(|t| import(&read(&t).unwrap(), &options).unwrap().module);
    assert_eq!(new.to_string(), old.to_string());
    for (case, from, to, key) in [
        ("mpt-plain", "\"alibi\": true", "\"alibi\": false", "attn_config.alibi"),
        ("mpt-plain", "\"alibi_bias_max\": 8", "\"alibi_bias_max\": 4", "alibi_bias_max"),
        ("mpt-plain", "\"expansion_ratio\": 4", "\"expansion_ratio\": 2", "expansion_ratio"),
        ("mpt-plain", "\"logit_scale\": null", "\"logit_scale\": 0.5", "logit_scale"),
        ("opt-pre_norm", "\"layerdrop\": 0.0", "\"layerdrop\": 0.1", "layerdrop"),
        ("falcon-new", "\"parallel_attn\": true", "\"parallel_attn\": false", "parallel"),
        ("gptj-partial", "\"rotary_dim\": 4", "\"rotary_dim\": 10", "10 elements"),
        ("gptj-partial", "\"rotary_dim\": 4", "\"rotary_dim\": 3", "of 3 numbers"),
    ] {
        let text = text(case);
        let edited = text.replace(from, to);
        assert_ne!(edited, text, "{case} does not say {from}");
        let wrong = read(&edited).err().unwrap_or_else(|| panic!("{case} with {to} is read"));
        assert!(wrong[0].headline.contains(key), "{case} with {to}: {}", wrong[0].headline);
    }
}

#[test]
fn logits_and_loss_of_families_are_transformers() {
    each_case(&supported(), |name| {
        let case = Case::open(name);
        let model = case.model();
        let weights = case.weights(&model.weights);
        let with = |more: &[Tensor]| [&weights, more].concat();
        let tokens = case.expected("input_ids");
        let given = with(std::slice::from_ref(&tokens));
        let logits = &eval(&model.module, "logits", &given).unwrap()[0];
        let of_logits = error(&logits.to_f64(), &case.expected("logits").to_f64());
        assert!(of_logits < ERROR_MAX, "{name}: logits differ by {of_logits:e}");
        let labels = shifted(&case.expected("labels"));
        let results = eval(&model.module, "loss", &with(&[tokens, labels])).unwrap();
        let loss = results[0].scalar() / results[1].scalar();
        let of_loss = error(&[loss], &case.expected("loss").to_f64());
        assert!(of_loss < ERROR_MAX, "{name}: the loss differs by {of_loss:e}");
    });
}

#[test]
fn every_tensor_of_a_family_is_a_weight() {
    for name in supported() {
        let case = Case::open(&name);
        let file = SafeTensors::deserialize(&case.expected).unwrap();
        let stored = file.tensors().into_iter();
        let stored =
            stored.filter_map(|(n, view)| Some((n.strip_prefix("grad.")?.to_owned(), view)));
        let model = case.model();
        let mut count = 0;
        for (tensor, view) in stored {
            count += view.shape().iter().product::<usize>() as u64;
            let is_known = |weight: &Weight| {
                let mut all = (0..weight.source.count).flat_map(|n| weight.source.names_of(n));
                all.any(|name| name == tensor)
            };
            assert!(model.weights.iter().any(is_known), "{name}: {tensor}");
        }
        assert_eq!(model.param_count(), count, "{name}");
        // What is exported is called as transformers calls it.
        for weight in &model.weights {
            let first = |number: usize| weight.source.names_of(number).next().unwrap().into_owned();
            let called: Vec<String> = (0..weight.source.count).map(first).collect();
            assert_eq!(called, case.stored(weight), "{name}: {}", weight.name);
        }
    }
}

#[test]
fn the_text_of_families_is_transformers() {
    each_case(&supported(), |name| {
        let case = Case::open(name);
        let prompt = case.expected("prompt").to_f64();
        let expected = case.expected("generated").to_f64();
        let capacity = expected.len() - 1;
        let found = (case.decoding(prompt.len(), capacity), case.decoding(1, capacity));
        if writes_no_text(name) {
            assert!(found.0.is_err() && found.1.is_err(), "{name} writes text");
            return;
        }
        let (prefill, decode) = (found.0.unwrap(), found.1.unwrap());
        let weights = case.weights(&prefill.model.weights);
        let int = |dims: &[usize], x: &[f64]| Tensor::from_f64(DType::I32, dims, x.to_vec());
        let empty = |cache: &Cache| {
            let bound = cache.ty.bind(&[("B".to_owned(), 1)].into());
            Tensor::filled(DType::F64, &bound.sizes().unwrap(), 0.0)
        };
        let mut caches: Vec<Tensor> = prefill.caches.iter().map(empty).collect();
        let last = prompt.len() as f64 - 1.0;
        let mut more = vec![int(&[1, prompt.len()], &prompt), int(&[1], &[0.0]), int(&[], &[last])];
        let mut module = &prefill.model.module;
        let mut generated = prompt;
        while generated.len() < expected.len() {
            let args = [&weights[..], &caches, &more].concat();
            let mut results = eval(module, "decode", &args).unwrap();
            caches = results.split_off(1);
            let logits = results[0].to_f64();
            let best = (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap();
            let position = generated.len() as f64;
            generated.push(best as f64);
            more = vec![int(&[1, 1], &[best as f64]), int(&[1], &[position]), int(&[], &[0.0])];
            module = &decode.model.module;
        }
        assert_eq!(generated, expected, "{name}");
    });
}

/// Families call composites already: recognition by meaning changes no bit of their programs.
#[test]
fn nothing_is_left_to_recognise_in_families() {
    each_case(&supported(), |name| {
        let module = Case::open(name).model().module;
        for function in module.functions.iter().filter(|f| f.kind == Kind::Layer) {
            let is_left = is_recognised(&module, &function.name, &|_| true);
            assert!(!is_left, "{name}: @{}", function.name);
        }
    });
}

#[test]
fn gradients_of_families_are_transformers() {
    each_case(&supported(), |name| {
        let case = Case::open(name);
        let mut model = case.model();
        let mut args = case.weights(&model.weights);
        args.push(case.expected("input_ids"));
        args.push(shifted(&case.expected("labels")));
        let entry = training_step(&mut model.module, "loss").unwrap();
        let results = eval(&model.module, &entry, &args).unwrap();
        let count = results[1].scalar();
        let theirs = |weight: &Weight| case.of_weight(weight, "grad");
        let overall = model.weights.iter().map(|w| largest(&theirs(w)));
        let overall = overall.fold(0.0, f64::max);
        let (frozen, trained): (Vec<_>, Vec<_>) = model.weights.iter().partition(|w| w.frozen);
        for buffer in frozen {
            assert_eq!(largest(&theirs(buffer)), 0.0, "{name}: {} has a gradient", buffer.name);
        }
        assert_eq!(results.len(), 2 + trained.len(), "{name}");
        for (weight, gradient) in trained.into_iter().zip(&results[2..]) {
            // The gradient of a key's bias is zero but for rounding, so that only the whole tensor
            // of the checkpoint is a scale to measure by, or the largest of all.
            let whole = theirs(weight);
            let scale = largest(&whole).max(1e-3 * overall);
            let expected = view(&whole, weight).to_f64();
            let gradient = gradient.to_f64().into_iter().map(|g| g / count);
            let off = gradient.zip(expected).map(|(g, e)| (g - e).abs());
            let off = off.fold(0.0, |m: f64, x| if x.is_nan() { x } else { m.max(x) }) / scale;
            assert!(off < ERROR_MAX, "{name}: d.{} differs by {off:e}", weight.name);
        }
    });
}
