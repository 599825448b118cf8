//! The bytes of small ONNX files, written by hand: fields of messages, one after the other.

pub(crate) const FLOAT: u64 = 1;
pub(crate) const INT: u64 = 7;

/// A field of a message: a number.
pub(crate) fn number(tag: u64, value: i64) -> Vec<u8> {
    [varint(tag << 3), varint(value as u64)].concat()
}

/// A field of a message: bytes, a text or another message.
pub(crate) fn bytes(tag: u64, content: &[u8]) -> Vec<u8> {
    [varint(tag << 3 | 2), varint(content.len() as u64), content.to_vec()].concat()
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut all = Vec::new();
    while value >= 128 {
        all.push(value as u8 | 128);
        value >>= 7;
    }
    all.push(value as u8);
    all
}

/// An attribute: a field with its value, and the number of its kind.
pub(crate) fn attribute(name: &str, value: Vec<u8>, kind: i64) -> Vec<u8> {
    bytes(5, &[bytes(1, name.as_bytes()), value, number(20, kind)].concat())
}

pub(crate) fn int(name: &str, value: i64) -> Vec<u8> {
    attribute(name, number(3, value), 2)
}

pub(crate) fn ints(name: &str, values: &[i64]) -> Vec<u8> {
    attribute(name, values.iter().flat_map(|value| number(8, *value)).collect(), 7)
}

pub(crate) fn node(
    operator: &str,
    inputs: &[&str],
    outputs: &[&str],
    attributes: &[Vec<u8>],
) -> Vec<u8> {
    let mut all: Vec<u8> = inputs.iter().flat_map(|name| bytes(1, name.as_bytes())).collect();
    all.extend(outputs.iter().flat_map(|name| bytes(2, name.as_bytes())));
    all.extend(bytes(4, operator.as_bytes()));
    all.extend(attributes.concat());
    bytes(1, &all)
}

/// Whole numbers in the file, with their dims.
pub(crate) fn stored(name: &str, dims: &[i64], values: &[i64]) -> Vec<u8> {
    let mut all: Vec<u8> = dims.iter().flat_map(|dim| number(1, *dim)).collect();
    all.extend(number(2, INT as i64));
    all.extend(values.iter().flat_map(|value| number(7, *value)));
    all.extend(bytes(8, name.as_bytes()));
    bytes(5, &all)
}

pub(crate) fn port(tag: u64, name: &str, element: u64, dims: &[i64]) -> Vec<u8> {
    let shape: Vec<u8> = dims.iter().flat_map(|dim| bytes(1, &number(1, *dim))).collect();
    let tensor = [number(1, element as i64), bytes(2, &shape)].concat();
    bytes(tag, &[bytes(1, name.as_bytes()), bytes(2, &bytes(1, &tensor))].concat())
}

/// Floats in the file, along one dim.
pub(crate) fn stored_floats(name: &str, values: &[f32]) -> Vec<u8> {
    let raw: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let all = [number(1, values.len() as i64), number(2, FLOAT as i64), bytes(9, &raw)].concat();
    bytes(5, &[all, bytes(8, name.as_bytes())].concat())
}

/// A node of a function of the file.
pub(crate) fn call(function: &str, inputs: &[&str], outputs: &[&str]) -> Vec<u8> {
    let mut all: Vec<u8> = inputs.iter().flat_map(|name| bytes(1, name.as_bytes())).collect();
    all.extend(outputs.iter().flat_map(|name| bytes(2, name.as_bytes())));
    all.extend(bytes(4, function.as_bytes()));
    all.extend(bytes(7, b"own"));
    bytes(1, &all)
}

/// A function of the file; its nodes are written as those of a graph.
pub(crate) fn function(name: &str, inputs: &[&str], output: &str, nodes: &[Vec<u8>]) -> Vec<u8> {
    let mut all = bytes(1, name.as_bytes());
    all.extend(inputs.iter().flat_map(|name| bytes(4, name.as_bytes())));
    all.extend(bytes(5, output.as_bytes()));
    for node in nodes {
        // The same message under another tag.
        all.push(7 << 3 | 2);
        all.extend(&node[1..]);
    }
    all.extend(bytes(9, &number(2, 18)));
    all.extend(bytes(10, b"own"));
    bytes(25, &all)
}

/// An attribute that is a graph without inputs.
pub(crate) fn branch(name: &str, parts: &[Vec<u8>], output: &str) -> Vec<u8> {
    let graph = [parts.concat(), port(12, output, FLOAT, &[])].concat();
    attribute(name, bytes(6, &graph), 5)
}

/// A file of opset 18.
pub(crate) fn model(graph: &[Vec<u8>], functions: &[Vec<u8>]) -> Vec<u8> {
    let sets = [bytes(8, &number(2, 18)), own_set()].concat();
    [number(1, 8), bytes(7, &graph.concat()), sets, functions.concat()].concat()
}

fn own_set() -> Vec<u8> {
    bytes(8, &[bytes(1, b"own"), number(2, 1)].concat())
}

/// A file of an input `x` of floats, nodes and stored numbers, which yields `y`.
pub(crate) fn file(opset: i64, dims: &[i64], parts: &[Vec<u8>]) -> Vec<u8> {
    let graph = [parts.concat(), port(11, "x", FLOAT, dims), port(12, "y", FLOAT, &[])].concat();
    [number(1, 8), bytes(7, &graph), bytes(8, &number(2, opset))].concat()
}
