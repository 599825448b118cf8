//! Ids that a model does not have, and weights that would be left out: refused by every verb.

use std::fs;
use std::path::{Path, PathBuf};

use ir::DType;
use runtime::execute::Values;
use runtime::load::{Named, write_named};
use runtime::npy;
use runtime::weights::Weights;

use crate::cli::{Scratch, tiny};
use crate::composites::{attributes, model};

/// Tokens and labels of the tiny reference model, which knows 61.
const VOCAB: i64 = 61;

fn reference() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/reference/gpt2-tiny")
}

/// Writes two samples of four ids of 64 bits, all 1 but one.
fn ids(scratch: &Scratch, name: &str, at: usize, id: i64) {
    let mut ids = [1_i64; 8];
    ids[at] = id;
    let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    npy::write(&scratch.0.join(name), DType::I64, &[2, 4], &bytes).expect("it is written");
}

fn stderr(scratch: &Scratch, line: &str, code: i32) -> String {
    let output = scratch.run(line);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{line}: {errors}");
    errors
}

/// Ids have 64 bits in a file: none is taken for another, and none for a row of zeros.
#[test]
fn ids_that_a_model_lacks_are_refused_with_their_place() {
    let scratch = Scratch::new("ids");
    let run = format!("run {} --input input_ids=ids.npy", reference().display());
    let wide = 1_i64 << 32;
    ids(&scratch, "ids.npy", 0, VOCAB - 1);
    scratch.answer(&run);
    for id in [VOCAB, -1, -100, wide + 5, wide - 100, i64::MAX, i64::MIN] {
        ids(&scratch, "ids.npy", 6, id);
        let errors = stderr(&scratch, &run, 2);
        assert!(errors.contains(&format!("token {id} at [1, 2] is not one of 0..60")), "{errors}");
        assert!(errors.contains("E5009"), "{errors}");
    }
    ids(&scratch, "ids.npy", 0, 3);
    let run = format!("{run} --labels labels.npy --json");
    ids(&scratch, "labels.npy", 5, -100);
    assert_eq!(scratch.json(&run)["labels"], 5.0, "two first labels and the ignored one");
    // The first label of a sample belongs to no token before it.
    ids(&scratch, "labels.npy", 4, VOCAB);
    assert_eq!(scratch.json(&run)["labels"], 6.0);
    for id in [VOCAB, -1, -101, wide - 100, wide + 5] {
        ids(&scratch, "labels.npy", 5, id);
        let errors = stderr(&scratch, &run, 2);
        assert!(errors.contains(&format!("label {id} at [1, 1] is not one of 0..60")), "{errors}");
    }
}

/// A compiled file refuses what a directory does.
#[test]
fn compiled_files_know_the_ids_of_their_model() {
    let scratch = tiny("compiled-ids");
    scratch.answer("compile tiny --gbs 2 --seq 4 -o tiny.gtl");
    ids(&scratch, "ids.npy", 0, 255);
    ids(&scratch, "labels.npy", 3, 255);
    let run = "run tiny.gtl --input input_ids=ids.npy --labels labels.npy";
    scratch.answer(run);
    ids(&scratch, "labels.npy", 3, 256);
    let errors = stderr(&scratch, run, 2);
    assert!(errors.contains("label 256 at [0, 3] is not one of 0..255"), "{errors}");
    ids(&scratch, "ids.npy", 7, (1 << 32) + 1);
    let errors = stderr(&scratch, run, 2);
    assert!(errors.contains("token 4294967297 at [1, 3] is not one of 0..255"), "{errors}");
}

/// A file of tokens that were made for a larger model.
#[test]
fn training_refuses_tokens_that_the_model_lacks() {
    let scratch = tiny("tokens-beyond");
    let mut words = vec![0_u8; 1024];
    words[..12].copy_from_slice(&[20_240_520_u32, 1, 500].map(u32::to_le_bytes).concat());
    let tokens = (0..500_u16).map(|at| if at == 321 { 256 } else { at % 256 });
    words.extend(tokens.flat_map(u16::to_le_bytes));
    fs::write(scratch.0.join("tokens.bin"), words).expect("it is written");
    let train = "train tiny --data tokens.bin --from-scratch --seq 4 --gbs 2 --steps 1 --out run";
    let errors = stderr(&scratch, train, 6);
    assert!(errors.contains("E4034") && errors.contains("token 256"), "{errors}");
    assert!(errors.contains("the token 321, at byte 1666"), "{errors}");
}

/// Weights that a checkpoint has beside those that the model reads.
#[test]
fn a_head_beside_a_tied_table_is_compared_with_it() {
    let scratch = Scratch::new("tied");
    let folder = scratch.0.join("model");
    fs::create_dir_all(&folder).expect("it is made");
    fs::copy(reference().join("config.json"), folder.join("config.json")).expect("it is copied");
    let weights = Weights::open(&reference()).expect("the weights open");
    let mut tensors: Vec<Named> = Vec::new();
    for (name, tensor) in weights.tensors().filter(|(name, _)| *name != "lm_head.weight") {
        let bytes = weights.read(name, None, DType::F64).expect("it is read");
        let values = Values { dtype: DType::F64, dims: tensor.dims.clone(), bytes };
        tensors.push(Named { name: name.to_owned(), values });
    }
    let table = tensors.iter().find(|t| t.name.ends_with("wte.weight")).expect("a table").clone();
    ids(&scratch, "ids.npy", 0, 3);
    let run = "run model --input input_ids=ids.npy";
    let write = |more: &[(&str, Named)]| {
        let more = more.iter().map(|(name, t)| Named { name: (*name).to_owned(), ..t.clone() });
        let all: Vec<Named> = tensors.iter().cloned().chain(more).collect();
        write_named(&folder.join("model.safetensors"), &all).expect("it is written");
    };
    write(&[("lm_head.weight", table.clone())]);
    scratch.answer(run);
    let mut other = table.clone();
    other.values.bytes[17] ^= 1;
    write(&[("lm_head.weight", other)]);
    let errors = stderr(&scratch, run, 6);
    assert!(errors.contains("E4009") && errors.contains("`lm_head.weight` differ"), "{errors}");
    assert!(errors.contains("tie_word_embeddings"), "{errors}");
    write(&[("score.weight", table.clone()), ("score.bias", table)]);
    let errors = stderr(&scratch, run, 6);
    assert!(errors.contains("`score.bias`, `score.weight`"), "{errors}");
}

/// Every verb that reads a text says the same of it, with place, value and bound.
#[test]
fn attributes_out_of_bounds_are_refused_by_every_verb() {
    let scratch = Scratch::new("bounds");
    ids(&scratch, "ids.npy", 0, 1);
    let with = |name: &str, attribute: &str, value: f64| {
        let mut given = attributes(name);
        let place = given.iter_mut().find(|(name, _)| *name == attribute).expect("it has it");
        place.1 = value;
        model(name, &given)
    };
    let misspelt = model("attention", &attributes("attention")).replace("group=", "grup=");
    let constant = model("attention", &attributes("attention"));
    let constant = constant.replacen("i32[4] = constant 0.0", "i32[4] = constant 4294967296", 1);
    for (text, code, said) in [
        (with("rope", "sign", 2.0), "E1015", "`sign` is 2, and `rope` needs -1 or 1"),
        (with("attention", "query_offset", -1.0), "E1015", "needs 0 <= query_offset"),
        (with("attention", "group", 0.0), "E1015", "`group` is 0, and `attention` needs 1 <="),
        (with("attention", "group", 1.5), "E1015", "needs a whole number"),
        (with("attention", "head_offset", 4.0), "E1015", "here H = 4, group = 2"),
        (with("attention", "kv_offset", 1.0), "E1015", "group * kv_offset <= head_offset"),
        (with("attention", "kv_offset", 4_294_967_296.0), "E1015", "`kv_offset` is 4294967296"),
        (with("attention", "window", -1.0), "E1015", "`window` is -1, and `attention` needs 0 <="),
        (with("attention", "softcap", -0.5), "E1015", "needs 0 <= softcap"),
        (with("dropout", "p", 1.0), "E1015", "`p` is 1, and `dropout` needs 0 <= p < 1"),
        (with("layer_norm", "eps", f64::INFINITY), "E1015", "needs a finite number"),
        (misspelt, "E1014", "did you mean `group`?"),
        (constant, "E1003", "constant (C1): 4294967296 is no i32"),
    ] {
        scratch.write("m.graph", &text);
        let mut all = Vec::new();
        for verb in ["verify @ --ranks 1", "compile @", "plan @", "run @ --input ids.npy"] {
            let errors = stderr(&scratch, &verb.replace('@', "m.graph"), 6);
            assert!(errors.contains(code) && errors.contains(said), "{verb}: {errors}");
            assert!(errors.contains("--> m.graph:"), "{verb} tells no place: {errors}");
            all.push(errors);
        }
        assert!(all.windows(2).all(|pair| pair[0] == pair[1]), "{all:?}");
    }
}

/// The texts of the library with one number changed: computed as they say, and that is said.
#[test]
fn an_edited_body_is_compiled_as_it_is_written() {
    let scratch = Scratch::new("edited");
    for (name, number, other) in [
        ("gelu_tanh", "constant 0.044715", "constant 0.05"),
        ("attention", "constant 0.7", "constant 0.3"),
    ] {
        let text = model(name, &attributes(name));
        scratch.write("as_is.graph", &text);
        let edited = text.replace(number, other);
        assert_ne!(text, edited);
        scratch.write("m.graph", &edited);
        let errors = stderr(&scratch, "verify m.graph --ranks 1", 0);
        assert!(errors.contains("warning[W1017]") && errors.contains(other), "{errors}");
        assert!(!stderr(&scratch, "verify as_is.graph --ranks 1", 0).contains("W1017"));
    }
}

/// A directory runs in the type that its weights are stored in, where no other is asked for.
#[test]
fn inference_is_in_the_type_of_the_files() {
    let scratch = Scratch::new("stored");
    let folder = scratch.0.join("model");
    fs::create_dir_all(&folder).expect("it is made");
    fs::copy(reference().join("config.json"), folder.join("config.json")).expect("it is copied");
    ids(&scratch, "ids.npy", 0, 3);
    let weights = Weights::open(&reference()).expect("the weights open");
    let logits = |name: &str| npy::read(&scratch.0.join(name).join("logits.npy")).expect("logits");
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        let tensors = weights.tensors().map(|(name, tensor)| {
            let bytes = weights.read(name, None, dtype).expect("it is read");
            Named {
                name: name.to_owned(),
                values: Values { dtype, dims: tensor.dims.clone(), bytes },
            }
        });
        let tensors: Vec<Named> = tensors.collect();
        write_named(&folder.join("model.safetensors"), &tensors).expect("it is written");
        let run = "run model --input input_ids=ids.npy";
        let answer = scratch.answer(&format!("{run} -o own"));
        assert!(answer.contains(&format!("in {dtype}")), "{answer}");
        scratch.answer(&format!("{run} --dtype {dtype} -o said"));
        scratch.answer(&format!("{run} --dtype f64 -o exact"));
        assert_eq!(logits("own").bytes, logits("said").bytes, "{dtype}");
        assert_eq!(logits("own").dtype, DType::F32, "numpy has it");
        assert_ne!(logits("own").bytes, logits("exact").bytes);
    }
}
