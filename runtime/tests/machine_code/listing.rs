//! Machine code as NVIDIA's disassembler lists it: the operations of each function.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Where the disassembler is, for users who say it.
pub(crate) const VARIABLE: &str = "GANTLINE_NVDISASM";

/// The disassembler: the file that the variable names, or one of the path.
pub(crate) fn disassembler() -> Option<PathBuf> {
    if let Some(said) = std::env::var_os(VARIABLE) {
        return Some(PathBuf::from(said)).filter(|path| path.is_file());
    }
    let folders = std::env::var_os("PATH")?;
    std::env::split_paths(&folders)
        .map(|folder| folder.join("nvdisasm"))
        .find(|path| path.is_file())
}

/// The operations of each function of a cubin, in order: `LDG.E.128`.
///
/// The cubin is written to a file of its own in `folder`, since the disassembler reads no pipe.
pub(crate) fn operations(
    disassembler: &Path,
    cubin: &[u8],
    folder: &Path,
    name: &str,
) -> BTreeMap<String, Vec<String>> {
    let path = folder.join(format!("{name}.cubin"));
    std::fs::write(&path, cubin).expect("the file is written");
    let output = Command::new(disassembler).arg("-c").arg(&path).output();
    let output = output.expect("the disassembler starts");
    std::fs::remove_file(&path).expect("the file was there");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    read(&String::from_utf8_lossy(&output.stdout))
}

/// What a listing says: instructions stand behind their address, `/*0050*/`, and their predicate.
fn read(listing: &str) -> BTreeMap<String, Vec<String>> {
    let mut functions: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut of: Option<&mut Vec<String>> = None;
    for line in listing.lines() {
        if let Some((_, section)) = line.split_once(".section\t.text.") {
            let name = section.split([',', '\t']).next().unwrap_or_default();
            of = Some(functions.entry(name.to_owned()).or_default());
        }
        let Some((_, instruction)) = line.split_once("*/") else { continue };
        let mut words = instruction.split([' ', ';', '{', '}']).filter(|word| !word.is_empty());
        let operation = words.find(|word| !word.starts_with('@'));
        if let (Some(of), Some(operation)) = (&mut of, operation) {
            of.push(operation.to_owned());
        }
    }
    assert!(functions.values().all(|of| of.len() > 1), "the listing is not understood: {listing}");
    functions
}

/// The kind of an operation: `LDG` of `LDG.E.128`.
pub(crate) fn kind(operation: &str) -> &str {
    operation.split('.').next().unwrap_or_default()
}

/// Whether an operation has a modifier.
pub(crate) fn is(operation: &str, modifier: &str) -> bool {
    operation.split('.').any(|part| part == modifier)
}

/// Whether an operation reads or writes memory of the thread's own: spills and stacks.
pub(crate) fn is_local(operation: &str) -> bool {
    ["LDL", "STL"].contains(&kind(operation))
}

/// Whether an operation adds to floating-point numbers in memory, whose sum depends on the order.
pub(crate) fn is_float_atomic(operation: &str) -> bool {
    let floats = ["F16", "F16x2", "BF16", "BF16x2", "BF16_V2", "F32", "F64"];
    ["RED", "REDG", "REDS", "ATOM", "ATOMG", "ATOMS", "UTMAREDG", "UBLKRED"]
        .contains(&kind(operation))
        && floats.iter().any(|float| is(operation, float))
}
