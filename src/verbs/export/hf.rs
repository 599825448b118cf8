//! A run as a directory of Hugging Face: what `from_pretrained` of transformers takes.

use std::fs;
use std::path::Path;

use ir::import::{Architecture, Model, Options};
use ir::precision::Precision;
use ir::{DType, Diagnostic, Span};
use runtime::block;
use runtime::checkpoint::Checkpoint;
use runtime::execute::Values;
use runtime::load::{join_weights, write_named};
use serde_json::{Value, json};

use crate::adapters::Adapters;
use crate::failure::{Failure, usage};
use crate::run::{Run, Settings};

const WEIGHTS: &str = "model.safetensors";
const CONFIG: &str = "config.json";
const TOKENIZER: &str = "tokenizer.json";

/// Writes the newest checkpoint of a run, its adapters merged; returns the files.
///
/// # Errors
/// `E5003` and `E5004` for what is no run, `E4040` without a checkpoint, `E5010` for a model that
/// transformers has no class for, `E5001` where weights are already.
pub(super) fn export(source: &Path, folder: &Path) -> Result<Vec<String>, Failure> {
    let (run, settings) = Run::open(source)?;
    let checkpoint = run.latest()?;
    let description = run.description(&settings)?;
    let precision = settings.precision()?;
    let stored = ir::file::read_text(&run.model_folder().join(CONFIG)).ok();
    let stored = stored.map(of_numbers);
    let config = stored.or_else(|| config_of(&description.architecture, precision.updated()));
    let Some(config) = config else {
        let headline = "transformers has no class for a model that is written as a graph";
        let source = Span::of(source.display().to_string());
        return Err(Diagnostic::error("E5010", source, headline).into());
    };
    let target = folder.join(WEIGHTS);
    if target.exists() {
        let headline = format!("`{}` is there already", target.display());
        return Err(usage("--output", headline).help("name another directory").into());
    }
    let Settings { seq, .. } = &settings;
    let options =
        Options { seq: *seq, dtype: precision.accumulate, dropout: None, documents: false };
    let model = crate::import(&description, &options)?;
    let lora = settings.lora.as_ref();
    let adapters = lora.map(|lora| Adapters::of(&description, lora, *seq)).transpose()?;
    write_named(&target, &weights(&model, &checkpoint, &precision, adapters.as_ref())?)?;
    let mut written = vec![target.display().to_string()];
    let tokenizer = ir::file::read(&run.model_folder().join(TOKENIZER)).ok();
    let files = [(CONFIG, Some(config.into_bytes())), (TOKENIZER, tokenizer)];
    for (name, bytes) in files {
        let path = folder.join(name);
        let Some(bytes) = bytes else { continue };
        fs::write(&path, bytes).map_err(runtime::Error::io("write", &path))?;
        written.push(path.display().to_string());
    }
    Ok(written)
}

/// The tensors of a checkpoint, under the names and in the shapes of transformers; adapters are
/// merged. What is updated has the type of masters, where there are any; buffers have none.
fn weights(
    model: &Model,
    checkpoint: &Checkpoint,
    precision: &Precision,
    adapters: Option<&Adapters>,
) -> Result<Vec<runtime::load::Named>, Failure> {
    let tensors = join_weights(&model.weights, &mut |weight| {
        let dtype = if weight.frozen { precision.parameters } else { precision.updated() };
        if let Some(adapters) = adapters {
            return adapters.read(checkpoint, &weight.name, &weight.dims, dtype);
        }
        let bytes = checkpoint.read(&weight.name, &block::whole(&weight.dims), dtype)?;
        Ok::<_, Failure>(Values { dtype, dims: weight.dims.clone(), bytes })
    })?;
    Ok(tensors)
}

/// A `config.json` of weights that are numbers, where it was of codes.
fn of_numbers(config: String) -> String {
    let Ok(Value::Object(mut fields)) = serde_json::from_str(&config) else { return config };
    match fields.remove("quantization_config") {
        Some(_) => format!("{:#}\n", Value::Object(fields)),
        None => config,
    }
}

/// A `config.json` of a model that was a preset; none where transformers has no class for it.
fn config_of(architecture: &Architecture, dtype: DType) -> Option<String> {
    let Architecture::Family(model) = architecture else { return None };
    let mut config = model.config();
    let kind = if dtype == DType::BF16 { "bfloat" } else { "float" };
    let dtype = format!("{kind}{}", 8 * dtype.size());
    config.extend([("dtype", json!(dtype)), ("bos_token_id", Value::Null)].map(named));
    config.extend([named(("eos_token_id", Value::Null))]);
    Some(format!("{:#}\n", Value::Object(config)))
}

fn named((name, value): (&str, Value)) -> (String, Value) {
    (name.to_owned(), value)
}

#[cfg(test)]
mod tests {
    use ir::import::{preset, presets, read_config};

    use super::*;

    #[test]
    fn configs_of_presets_read_back() {
        for name in presets() {
            let description = preset(name).expect("a preset");
            let text = config_of(&description.architecture, DType::F32).expect("it has a class");
            let read = read_config("config.json", &text, name).expect("it reads");
            assert_eq!(read.architecture, description.architecture, "{name}");
            assert_eq!(read.warnings, [], "{name}");
            assert_eq!(read.stored, Some(ir::DType::F32));
        }
    }
}
