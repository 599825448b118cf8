//! Configs, options and what is wrong with them.

use super::*;
use crate::diagnostic::render;
use crate::random::mix;
use crate::text::parse_module;

const OPTIONS: Options = Options { seq: 16, dtype: DType::F32, dropout: None, documents: false };

fn read(text: &str) -> Result<Description, Vec<Diagnostic>> {
    read_config("config.json", text, "model")
}

fn architecture(text: &str) -> Architecture {
    read(text).unwrap_or_else(|wrong| panic!("{text}: {wrong:?}")).architecture
}

fn model(text: &str) -> FamilyModel {
    match architecture(text) {
        Architecture::Family(model) => *model,
        Architecture::Graph(_) | Architecture::Sized(_) => panic!("{text} is of no family"),
    }
}

/// The codes and the drawn text of what is wrong.
fn wrong(text: &str) -> (Vec<&'static str>, String) {
    let wrong = read(text).expect_err(text);
    (wrong.iter().map(|d| d.code).collect(), wrong.iter().map(|d| render(d, Some(text))).collect())
}

fn file(name: &str) -> String {
    let path = format!("{}/../tests/reference/{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(path).unwrap()
}

#[test]
fn absent_fields_have_the_defaults_of_their_class() {
    let gpt2 = preset("gpt2").unwrap().architecture;
    assert_eq!(architecture(r#"{"model_type": "gpt2"}"#), gpt2);
    assert_eq!(architecture(r#"{"architectures": ["GPT2LMHeadModel"]}"#), gpt2);
    let written = r#"{"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024,
        "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": 3072,
        "activation_function": "gelu_new", "resid_pdrop": 0.1, "embd_pdrop": 0.1,
        "attn_pdrop": 0.1, "layer_norm_epsilon": 1e-5, "initializer_range": 0.02,
        "scale_attn_weights": true, "tie_word_embeddings": true}"#;
    assert_eq!(architecture(written), gpt2);
    let llama = model(r#"{"model_type": "llama", "head_dim": null}"#);
    let sizes = ["V", "P", "M", "L", "H", "G", "D", "F"].map(|symbol| llama.size(symbol));
    assert_eq!(sizes, [32000, 2048, 4096, 32, 32, 32, 128, 11008]);
    assert!(!llama.flag("tied") && !llama.flag("attention_bias"));
}

#[test]
fn both_versions_of_transformers_mean_the_same() {
    for case in ["gpt2-untied", "llama-bias-tied"] {
        let five = read(&file(&format!("{case}/config.json"))).unwrap();
        let four = read(&file(&format!("{case}/config.v4.json"))).unwrap();
        assert_eq!(five.architecture, four.architecture);
        assert_eq!((five.stored, four.stored), (Some(DType::F64), Some(DType::F64)));
    }
}

#[test]
fn aliases_are_read_and_newer_spellings_win() {
    let named = r#"{"model_type": "gpt2", "hidden_size": 96, "num_attention_heads": 3,
        "num_hidden_layers": 2, "max_position_embeddings": 64}"#;
    let config = model(named);
    assert_eq!(["M", "H", "L", "P", "F"].map(|s| config.size(s)), [96, 3, 2, 64, 384]);
    let both = r#"{"model_type": "gpt2", "dtype": "bfloat16", "torch_dtype": "float32"}"#;
    assert_eq!(read(both).unwrap().stored, Some(DType::BF16));
    let theta = |fields: &str| {
        let config = model(&format!(r#"{{"model_type": "llama"{fields}}}"#));
        let Value::Rotary(rotary) = &config.scope["rope"] else { panic!("a rotary embedding") };
        rotary.theta
    };
    assert_eq!(theta(""), 1e4);
    assert_eq!(theta(r#", "rope_theta": 5e5"#), 5e5);
    assert_eq!(theta(r#", "rope_parameters": {"rope_theta": 7e5}, "rope_theta": 5e5"#), 7e5);
    let scaling = r#", "rope_scaling": {"type": "default"}, "rope_theta": 5e5"#;
    assert_eq!(theta(&format!(r#"{scaling}, "rope_parameters": {{"rope_theta": 7e5}}"#)), 5e5);
}

#[test]
fn errors_are_told_all_at_once_with_their_places() {
    let text = "{\n  \"model_type\": \"gpt2\",\n  \"n_embd\": 100,\n  \"n_head\": 12,\n  \
                \"n_layer\": \"two\",\n  \"activation_function\": \"mish\",\n  \
                \"add_cross_attention\": true\n}";
    let (codes, drawn) = wrong(text);
    assert_eq!(codes, ["E1105", "E1104", "E1107", "E1107"]);
    assert_eq!(
        drawn,
        "error[E1105]: `n_embd` 100 is not a multiple of `n_head` 12
 --> config.json:3:3
  |
3 |   \"n_embd\": 100,
  |   ^^^^^^^^^^^^^
  = note: 100 = 8 · 12 + 4
error[E1104]: `n_layer` is `\"two\"`, not a whole number from 1 to 2^30
 --> config.json:5:3
  |
5 |   \"n_layer\": \"two\",
  |   ^^^^^^^^^^^^^^^^
error[E1107]: the activation `mish` is not supported
 --> config.json:6:3
  |
6 |   \"activation_function\": \"mish\",
  |   ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  = help: supported are `gelu_new`, `gelu_pytorch_tanh`, `gelu`, `silu`, `swish` and `relu`
error[E1107]: `add_cross_attention` is not supported yet
 --> config.json:7:3
  |
7 |   \"add_cross_attention\": true
  |   ^^^^^^^^^^^^^^^^^^^^^^^^^^^
"
    );
}

#[test]
fn planted_errors_have_their_codes() {
    let cases = [
        ("[1]", "E1103"),
        ("{\"model_type\": }", "E1103"),
        ("{}", "E1104"),
        (r#"{"model_type": 3}"#, "E1104"),
        (r#"{"model_type": "vit"}"#, "E1106"),
        (r#"{"model_type": "gpt2", "is_causal": false}"#, "E1107"),
        (r#"{"model_type": "llama", "is_causal": null}"#, "E1107"),
        (r#"{"model_type": "llama", "pruned_heads": {"0": [1]}}"#, "E1107"),
        (r#"{"model_type": "llama", "pad_token_id": 32000}"#, "E1105"),
        (r#"{"model_type": "llama", "pad_token_id": -1}"#, "E1104"),
        (r#"{"model_type": "llama", "partial_rotary_factor": 0.5}"#, "E1107"),
        (r#"{"model_type": "llama", "rope_scaling": {"rope_type": "ntk"}}"#, "E1107"),
        (r#"{"model_type": "llama", "rope_scaling": {"type": "longrope"}}"#, "E1105"),
        (r#"{"model_type": "gpt2", "architectures": ["GPT2ForTokenClassification"]}"#, "E1107"),
        (r#"{"model_type": "bert", "architectures": ["BertForTokenClassification"]}"#, "E1107"),
        (r#"{"model_type": "gpt2", "dtype": "int4"}"#, "E1107"),
        (r#"{"model_type": "gpt2", "add_cross_attention": true}"#, "E1107"),
        (r#"{"model_type": "gpt2", "n_embd": 0}"#, "E1104"),
        (r#"{"model_type": "gpt2", "n_embd": 768, "hidden_size": 1024}"#, "E1105"),
        (r#"{"model_type": "gpt2", "vocab_size": 99999999999}"#, "E1104"),
        (r#"{"model_type": "gpt2", "n_inner": 1073741824, "n_embd": 1073741824}"#, "E1104"),
        (r#"{"model_type": "gpt2", "n_layer": 2000}"#, "E1104"),
        (r#"{"model_type": "gpt2", "attn_pdrop": 1.0}"#, "E1104"),
        (r#"{"model_type": "gpt2", "layer_norm_epsilon": 0}"#, "E1104"),
        (r#"{"model_type": "llama", "num_key_value_heads": 5}"#, "E1105"),
        (r#"{"model_type": "llama", "head_dim": 7}"#, "E1105"),
        (r#"{"model_type": "llama", "rope_scaling": {"rope_type": "llama3"}}"#, "E1104"),
        (r#"{"model_type": "llama", "rope_parameters": {"rope_theta": "x"}}"#, "E1104"),
        (r#"{"model_type": "llama", "rope_parameters": []}"#, "E1104"),
    ];
    for (text, code) in cases {
        let (codes, drawn) = wrong(text);
        assert!(codes.contains(&code), "{text}: {drawn}");
    }
    assert!(wrong(r#"{"model_type": "lama"}"#).1.contains("did you mean `llama`?"));
}

/// Stored weights are codes with scales where the config says of which blocks; other forms are
/// planned for, with a warning, and have no scales.
#[test]
fn configs_say_how_weights_are_stored() {
    let of = |stored: &str| {
        let text = format!("{{\"model_type\": \"gpt2\", \"quantization_config\": {stored}}}");
        let read = read_config("config.json", &text, "m").expect("it is read");
        let codes: Vec<&str> = read.warnings.iter().map(|warning| warning.code).collect();
        (read.scaled, codes, read.warnings.iter().map(|w| w.headline.clone()).collect::<String>())
    };
    let blocks = r#"{"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 64]}"#;
    assert_eq!(of(blocks), (Some([128, 64]), vec![], String::new()));
    for (stored, method) in [
        ("{}", "an unnamed method"),
        (r#"{"quant_method": "awq", "weight_block_size": [128, 128]}"#, "awq"),
        (r#"{"quant_method": "fp8"}"#, "fp8"),
        (r#"{"quant_method": "fp8", "weight_block_size": [128]}"#, "fp8"),
        (r#"{"quant_method": "fp8", "weight_block_size": [128, 0]}"#, "fp8"),
    ] {
        let (scaled, codes, said) = of(stored);
        assert_eq!((scaled, codes.as_slice()), (None, &["W1114"][..]), "{stored}: {said}");
        assert!(said.contains(method), "{stored}: {said}");
    }
}

/// What DeepSeek's classes compute otherwise, or cannot compute, is refused at its field.
#[test]
fn routers_that_are_not_computed_are_refused() {
    for (of, field, code, said) in [
        ("deepseek_v3", r#""scoring_func": "softmax""#, "E1107", "has to be `sigmoid`"),
        ("deepseek_v3", r#""topk_method": "greedy""#, "E1107", "has to be `noaux_tc`"),
        ("deepseek_v3", r#""moe_layer_freq": 2"#, "E1107", "has to be 1"),
        ("deepseek_v3", r#""n_group": 7"#, "E1105", "256 experts do not fall into 7 groups"),
        ("deepseek_v3", r#""n_group": 256"#, "E1105", "a group of one expert"),
        ("deepseek_v3", r#""topk_group": 9"#, "E1105", "9 of 8 groups are open"),
        ("deepseek_v3", r#""num_experts_per_tok": 129"#, "E1105", "129 experts of 4 groups of 32"),
        ("deepseek_v3", r#""num_key_value_heads": 8"#, "E1105", "`num_attention_heads` there too"),
        ("deepseek_v3", r#""qk_rope_head_dim": 3"#, "E1105", "an even `qk_rope_head_dim`"),
        ("deepseek_v2", r#""num_experts_per_tok": null"#, "E1105", "write `num_experts_per_tok`"),
        ("deepseek_v2", r#""topk_method": "noaux_tc""#, "E1107", "group_limited_greedy"),
        ("deepseek_v2", r#""topk_method": "group_limited_greedy""#, "E1105", "`topk_group`"),
        ("deepseek_v2", r#""norm_topk_prob": true"#, "E1107", "`norm_topk_prob`"),
    ] {
        let text = format!("{{\"model_type\": \"{of}\", {field}}}");
        let (codes, drawn) = wrong(&text);
        assert!(codes.contains(&code) && drawn.contains(said), "{text}: {drawn}");
        assert!(drawn.contains(field.split('"').nth(1).unwrap()), "{text}: {drawn}");
    }
    assert_eq!(model(r#"{"model_type": "kimi_k2"}"#), model(r#"{"model_type": "deepseek_v3"}"#));
}

#[test]
fn mutations_of_a_config_never_panic() {
    let texts = ["gpt2-tiny/config.json", "llama-bias-tied/config.v4.json"].map(file);
    let tokens = ["null", "0", "-1", "1e400", "9007199254740993", "\"x\"", "{", "}", "[]", "\\"];
    let mut imported = 0;
    for seed in 0..4000_u64 {
        let mut state = seed;
        let mut draw = |below: usize| {
            state = mix(state.wrapping_add(0x9e37_79b9_7f4a_7c15));
            (state % below as u64) as usize
        };
        let mut bytes = texts[draw(texts.len())].clone().into_bytes();
        for _ in 0..=draw(3) {
            let at = draw(bytes.len());
            match draw(4) {
                0 => bytes[at] = draw(256) as u8,
                1 => drop(bytes.remove(at)),
                2 => bytes.truncate(at.max(1)),
                _ => drop(bytes.splice(at..at, tokens[draw(tokens.len())].bytes())),
            }
        }
        let text = String::from_utf8_lossy(&bytes);
        match read(&text) {
            Ok(description) => {
                imported += usize::from(import(&description, &OPTIONS).is_ok());
            }
            Err(wrong) => assert!(wrong.iter().all(|d| !render(d, Some(&text)).is_empty())),
        }
    }
    assert!(imported > 400, "only {imported} mutations were imported");
}

#[test]
fn options_that_do_not_fit_are_refused() {
    let gpt2 = preset("gpt2-mini").unwrap();
    let codes = |options: &Options| {
        let wrong = import(&gpt2, options).unwrap_err();
        wrong.iter().map(|d| d.code).collect::<Vec<_>>()
    };
    assert_eq!(codes(&Options { seq: 257, ..OPTIONS }), ["E1108"]);
    let all = Options { seq: 0, dtype: DType::I32, dropout: Some(1.0), documents: false };
    assert_eq!(codes(&all), ["E1108"; 3]);
    let llama = preset("llama-3-8b").unwrap();
    assert!(import(&llama, &Options { seq: 16384, ..OPTIONS }).is_ok());
    assert!(import(&llama, &Options { seq: usize::MAX, ..OPTIONS }).is_err());
    let tokens =
        DecodingOptions { tokens: 9, capacity: 8, dtype: DType::F32, logits: LogitsOf::All };
    assert_eq!(decoding(&llama, &tokens).unwrap_err()[0].code, "E1108");
}

#[test]
fn dropout_takes_a_key_only_where_it_is_used() {
    let gpt2 = preset("gpt2").unwrap();
    let kept = import(&gpt2, &Options { dropout: Some(0.0), ..OPTIONS }).unwrap();
    assert_eq!(kept.entries, ["loss", "logits"]);
    assert!(!kept.module.to_string().contains("key"));
    let dropped = import(&gpt2, &OPTIONS).unwrap();
    assert_eq!(dropped.entries, ["loss", "loss_eval", "logits"]);
    let loss = dropped.module.function("loss").unwrap();
    let last = loss.params().last().unwrap();
    assert_eq!(loss.value(last).name, "key");
    let sites = |name: &str| {
        let printed = dropped.module.function(name).unwrap().to_string();
        printed.matches("dropout").count()
    };
    assert_eq!(
        [sites("embed"), sites("block"), sites("embed_eval"), sites("block_eval")],
        [1, 3, 0, 0]
    );
}

#[test]
fn weights_start_and_lie_where_transformers_has_them() {
    let model = import(&preset("gpt2").unwrap(), &OPTIONS).unwrap();
    let of = |name: &str| model.weights.iter().find(|w| w.name == name).unwrap();
    let key = of("h.3.attn.wk");
    assert_eq!((key.dims.as_slice(), key.layer), ([768, 12, 64].as_slice(), Some(3)));
    assert_eq!(key.source.name(), "transformer.h.3.attn.c_attn.weight");
    assert_eq!(key.source.names[1], "h.3.attn.c_attn.weight");
    assert_eq!(key.source.dims, [768, 2304]);
    let mut runs = Vec::new();
    key.source.each_run(766, 5, |start, len| runs.push((start, len)));
    assert_eq!(runs, [(768 + 766, 2), (2304 + 768, 3)]);
    assert_eq!(key.init, Init::Normal { std: 0.02, zero_row: None });
    assert_eq!(of("h.0.attn.wo").init, Init::Normal { std: 0.02 / 24f64.sqrt(), zero_row: None });
    assert_eq!((of("lnf.w").init, of("lnf.b").init), (Init::Ones, Init::Zeros));
    assert!(key.is_matrix() && !of("h.3.attn.bk").is_matrix());
    assert!(model.weights.iter().all(|w| w.name != "lm_head"), "tied");
    assert!(is_buffer("h.0.attn.bias") && !is_buffer("transformer.h.0.attn.c_attn.bias"));
}

#[test]
fn a_graph_is_a_model_of_its_own() {
    let text = "module tiny
  func @layer(%x: f32[B, S, 4], %w: f32[4, 4]) {
    %y: f32[B, S, 4] = contract bsm,mn->bsn %x %w
    return %y
  }
  func @logits(%table: f32[9, 4], %a: f32[4, 4], %b: f32[4, 4], %tokens: i32[B, S]) {
    %x: f32[B, S, 4] = gather dim=0 start=0 %table %tokens
    %y: f32[B, S, 4] = call @layer %x %a
    %z: f32[B, S, 4] = call @layer %y %b
    %l: f32[B, S, 9] = contract bsm,vm->bsv %z %table
    return %l
  }
";
    let description = read_graph("tiny.graph", text, "tiny").unwrap();
    let model = import(&description, &OPTIONS).unwrap();
    assert_eq!(model.entries, ["logits"]);
    assert_eq!((model.param_count(), model.vocab, model.layer_count), (36 + 32, 9, 2));
    assert!(model.module.to_string().contains("%tokens: i32[B, 16]"));
    let wrong = read_graph("tiny.graph", "module tiny\n  func", "tiny").unwrap_err();
    assert_eq!(exit_code(wrong[0].code), 6);
}

#[test]
fn models_are_found_by_path_and_by_name() {
    let reference = format!("{}/../tests/reference/gpt2-tiny", env!("CARGO_MANIFEST_DIR"));
    let found = resolve(&reference).unwrap();
    assert_eq!(found.description.name, "gpt2-tiny");
    assert!(found.directory.unwrap().join("model.safetensors").exists());
    assert_eq!(resolve(format!("{reference}/config.json")).unwrap().description.name, "gpt2-tiny");
    assert_eq!(resolve("gpt2-xl").unwrap().description.name, "gpt2-xl");
    let wrong = |model: &str| {
        let wrong = resolve(model).unwrap_err();
        (exit_code(wrong[0].code), wrong[0].help.clone().unwrap_or_default())
    };
    assert_eq!(wrong("gpt2-xxl"), (2, "did you mean `gpt2-xl`?".to_owned()));
    assert_eq!(wrong("acme/unheard-of").0, 2);
    assert_eq!(wrong("nowhere/config.json"), (2, String::new()));
    assert_eq!(wrong(&format!("{reference}/model.safetensors")).0, 4);
    assert_eq!(wrong(env!("CARGO_MANIFEST_DIR")).0, 2);
}

#[test]
fn decoding_modules_print_and_read_back() {
    for name in ["gpt2-mini", "llama-3-8b"] {
        for logits in [LogitsOf::All, LogitsOf::Last] {
            let options = DecodingOptions { tokens: 8, capacity: 64, dtype: DType::F32, logits };
            let decoding = decoding(&preset(name).unwrap(), &options).unwrap();
            let module = &decoding.model.module;
            assert_eq!(parse_module("printed", &module.to_string()).unwrap(), *module);
            let decode = module.function("decode").unwrap();
            assert_eq!(decode.results.len(), 1 + decoding.caches.len());
            let types = decode.result_types();
            assert!(decoding.caches.iter().zip(&types[1..]).all(|(cache, ty)| cache.ty == *ty));
        }
    }
}

#[test]
fn fields_that_nobody_reads_are_named() {
    let warnings = |text: &str| -> Vec<(String, Option<String>)> {
        let found = read(text).unwrap().warnings;
        found.into_iter().map(|warning| (warning.headline, warning.help)).collect()
    };
    assert_eq!(warnings(&file("llama-bias-tied/config.json")), []);
    assert_eq!(warnings(&file("gpt2-untied/config.v4.json")), []);
    let text = r#"{"model_type": "llama", "hiden_size": 64, "_x": 1,
        "rope_parameters": {"rope_type": "default", "tetha": 1}}"#;
    let inside = "the field `tetha` of `rope_parameters` is not known, and changes nothing";
    let misspelt = "the field `hiden_size` is not known, and changes nothing";
    let meant = Some("did you mean `hidden_size`?".to_owned());
    assert_eq!(warnings(text), [(inside.to_owned(), None), (misspelt.to_owned(), meant)]);
}

/// A view of a tensor: a fused matrix is split, transposed, and the pairs of a head change places.
#[test]
fn views_name_the_elements_of_a_tensor() {
    // [H=2, 3, D=4, M=3] of which the second third is a weight [M, H, 2, D/2] of pairs.
    let axes = [(3, 1), (2, 36), (2, 3), (2, 6)];
    let source = Source::view(vec!["qkv".into()], vec![24, 3], 12, axes);
    let mut found = Vec::new();
    source.each_run(0, 24, |start, len| found.extend(start..start + len));
    let mut expected = Vec::new();
    for m in 0..3 {
        for h in 0..2 {
            for half in 0..2 {
                for pair in 0..2 {
                    expected.push(((h * 3 + 1) * 4 + 2 * pair + half) * 3 + m);
                }
            }
        }
    }
    assert_eq!(found, expected);
}

/// A function under the name of a gradient would be taken for it.
#[test]
fn names_of_gradients_are_refused() {
    let text = |inner: &str| {
        let square = "%y: f32[2] = mul %x %x\n    return %y";
        let call = format!("%a: f32[2] = call @{inner} %w\n    return %a");
        let function = |name: &str, param: &str, body: &str| {
            format!("  func @{name}(%{param}: f32[2]) {{\n    {body}\n  }}\n")
        };
        let functions = [function(inner, "x", square), function("loss", "w", &call)];
        format!("module m\n{}", functions.concat())
    };
    assert!(super::read_graph("m", &text("square"), "m").is_ok());
    for name in ["loss.grad", "step_part"] {
        let wrong = super::read_graph("m", &text(name), "m").expect_err("the name is taken");
        assert_eq!(wrong[0].code, "E1002", "{wrong:?}");
    }
}
