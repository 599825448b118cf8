// The cases of `tests/reference/exports`: their names and files, and their weights, which are
// drawn. `tests/reference/README.md` describes the files.

use std::path::PathBuf;

use crate::drawn::uniform;

/// The names of all cases, in order.
pub(crate) fn names() -> Vec<String> {
    let entries = std::fs::read_dir(root()).expect("there are cases");
    let name = |entry: std::io::Result<std::fs::DirEntry>| {
        entry.expect("it reads").file_name().into_string().expect("it is text")
    };
    let files: Vec<String> = entries.map(name).collect();
    let mut names: Vec<String> =
        files.iter().filter_map(|file| file.strip_suffix(".onnx")).map(str::to_owned).collect();
    names.sort();
    names
}

/// Where the cases are.
pub(crate) fn root() -> PathBuf {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let below = here.join("tests/reference/exports");
    if below.is_dir() { below } else { here.join("../tests/reference/exports") }
}

/// A file of a case.
pub(crate) fn file(case: &str, ending: &str) -> Vec<u8> {
    std::fs::read(root().join(format!("{case}.{ending}"))).expect("the case has the file")
}

/// The elements of a weight in f32, from the name of the file that holds them in the model:
/// `NAME_MIDDLE_WIDTH_COUNT`.
pub(crate) fn weight(recipe: &str) -> Vec<f32> {
    let parts: Vec<&str> = recipe.split('_').collect();
    let &[name, middle, width, count] = parts.as_slice() else { panic!("no recipe: {recipe}") };
    let number = |text: &str| -> f64 { text.parse().expect("a number") };
    let drawn = uniform(name, count.parse().expect("a count"));
    drawn.into_iter().map(|x| (number(middle) + number(width) * x) as f32).collect()
}

/// The recipes of a model, which stand in it as names of files.
pub(crate) fn recipes(model: &[u8]) -> Vec<String> {
    let is_of_name = |byte: &u8| byte.is_ascii_alphanumeric() || b"-._".contains(byte);
    let key = b"location";
    let places = model.windows(key.len()).enumerate().filter(|(_, window)| window == key);
    // After the key: the number of the field of the value, its length in one byte, the value.
    let texts = places.map(|(at, _)| {
        let after = &model[at + key.len()..];
        &after[2..2 + usize::from(after[1])]
    });
    let texts = texts.filter(|text| text.iter().all(is_of_name));
    texts.map(|text| String::from_utf8(text.to_vec()).expect("ASCII")).collect()
}

/// Sizes of the dims that some cases leave open.
pub(crate) fn open_dims(case: &str) -> &'static [(&'static str, usize)] {
    if case.contains("-open-") { &[("batch", 2), ("length", 8)] } else { &[] }
}
