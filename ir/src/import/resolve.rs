//! The MODEL argument of the command line: which description it means.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::{Description, nearest, preset, presets, read_config, read_graph};
use crate::{Diagnostic, Span};

/// A description and where it comes from.
#[derive(Clone, Debug)]
pub struct Resolved {
    /// The description.
    pub description: Description,
    /// The directory where weights would lie beside it; none for a preset.
    pub directory: Option<PathBuf>,
}

/// Finds what a MODEL argument means: a directory with a `config.json`, that of a run with a
/// description in `model`, the path of a config, of a `.graph` text, or the name of a preset, in
/// this order.
///
/// # Errors
/// `E1101` when there is no such thing, `E1102` when it cannot be read, and those of
/// [`read_config`] and [`crate::text::parse_module`].
pub fn resolve(model: impl AsRef<Path>) -> Result<Resolved, Vec<Diagnostic>> {
    let path = model.as_ref();
    // A preset's name is text.
    let known = || path.to_str().and_then(preset);
    let model = &*path.to_string_lossy();
    if path.is_dir() {
        // A run keeps the description of its model apart from its checkpoints.
        let files = ["config.json", "model/config.json", "model/model.graph"];
        let files = files.map(|name| path.join(name));
        if let Some(file) = files.iter().find(|file| file.is_file()) {
            return read(file, &directory_name(path));
        }
        if known().is_none() {
            let headline = format!("there is no `config.json` in the directory `{model}`");
            return Err(vec![unknown(model, headline)]);
        }
    }
    if path.is_file() {
        let stem = path.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
        let parent = path.parent().map(directory_name).unwrap_or_default();
        let name = if stem == "config" && !parent.is_empty() { parent } else { stem };
        return read(path, &name);
    }
    if let Some(description) = known() {
        return Ok(Resolved { description, directory: None });
    }
    let is_path = model.ends_with(".json") || model.ends_with(".graph");
    let headline = if is_path {
        format!("there is no file `{model}`")
    } else {
        format!("`{model}` is no preset, file or directory")
    };
    let wrong = unknown(model, headline);
    Err(vec![match nearest(model, presets()) {
        Some(near) if !is_path => wrong.help(format!("did you mean `{near}`?")),
        _ if !is_path && model.split('/').count() == 2 => {
            wrong.help("models of the Hugging Face hub are named by the directory they lie in")
        }
        _ => wrong,
    }])
}

fn unknown(model: &str, headline: String) -> Diagnostic {
    Diagnostic::error("E1101", Span::of(model), headline)
        .note("a model is a directory with a `config.json`, a `config.json`, a `.graph` text")
        .note("or one of the presets that `gantline models` lists")
}

/// The last part of a path, also of one such as `.`.
fn directory_name(path: &Path) -> String {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

fn read(path: &Path, name: &str) -> Result<Resolved, Vec<Diagnostic>> {
    let source = path.display().to_string();
    let extension = path.extension().map(|e| e.to_string_lossy().to_lowercase());
    let kind = extension.unwrap_or_default();
    if kind != "json" && kind != "graph" {
        let headline = format!("`{source}` is no kind of model that is supported");
        let wrong = Diagnostic::error("E1106", Span::of(&source), headline);
        return Err(vec![wrong.note("files are told apart by `.json` and `.graph`")]);
    }
    let text = crate::file::read_text(path).map_err(|error| {
        let (code, headline) = if error.kind() == ErrorKind::InvalidData {
            ("E1103", format!("`{source}` is not UTF-8 text"))
        } else {
            ("E1102", format!("cannot read `{source}`: {error}"))
        };
        vec![Diagnostic::error(code, Span::of(&source), headline)]
    })?;
    let description = match kind.as_str() {
        "graph" => read_graph(&source, &text, name)?,
        _ => read_config(&source, &text, name)?,
    };
    Ok(Resolved { description, directory: path.parent().map(Path::to_owned) })
}
