//! Names mean nothing: an ONNX graph computes the same under all of them.
//!
//! A seed draws a small graph and names with separators and suffixes, of which many become one when
//! they are written as a module has them. The graph with these names equals the one with plain
//! names, bit for bit: read, evaluated by the interpreter, and compiled.

use std::collections::BTreeMap;

use bytes::Bytes;
use ir::Tensor;
use ir::eval::eval;
use ir::import::onnx::{Array, ENTRY, Given, Onnx, read_onnx};
use ir::rewrite::{Options as Rules, simplify};
use ir::text::parse_module;
use ir::verify::verify;

use crate::draws::Draws;
use crate::onnx_file::{
    FLOAT, INT, branch, call, function, int, model, node, port, stored, stored_floats,
};

/// A value of a graph, by its number; names are given to numbers.
type Id = usize;

/// One part of a graph.
enum Part {
    Weight(Id, Vec<f32>),
    Numbers(Id, Vec<i64>),
    Node(&'static str, Vec<Id>, Vec<Id>, Vec<(&'static str, i64)>),
    /// A function of two operands that is called, with the numbers of its own values.
    Call(Vec<Id>, Id, [Id; 4]),
    /// Zeros of as many elements as a value says, made in a function.
    Zeros(Id, Id, [Id; 2]),
    /// The negative of a value or its sum with a weight of the branch, by its first element's sign.
    If(Id, [Id; 6], Vec<f32>),
}

/// A graph without names.
struct Graph {
    inputs: Vec<(Id, usize)>,
    /// An input of one whole number, which is a size.
    size: Id,
    parts: Vec<Part>,
    outputs: Vec<Id>,
    count: usize,
}

/// Draws parts whose operands are there.
struct Drawing<'r> {
    r: &'r mut Draws,
    parts: Vec<Part>,
    /// Values of floats with their sizes.
    floats: Vec<(Id, usize)>,
    numbers: Vec<(Id, usize)>,
    count: usize,
}

impl Drawing<'_> {
    fn fresh(&mut self) -> Id {
        self.count += 1;
        self.count - 1
    }

    fn float(&mut self) -> (Id, usize) {
        self.floats[self.r.below(self.floats.len())]
    }

    fn weight(&mut self, size: usize) -> Id {
        let numbers = (0..size).map(|_| self.r.number(-2.0, 2.0) as f32).collect();
        let id = self.fresh();
        self.parts.push(Part::Weight(id, numbers));
        self.floats.push((id, size));
        id
    }

    /// Another value of as many elements: one that is there, or a weight.
    fn equal(&mut self, size: usize) -> Id {
        let same: Vec<Id> =
            self.floats.iter().filter(|(_, own)| *own == size).map(|(id, _)| *id).collect();
        match self.r.below(3) {
            0 => self.weight(size),
            _ => same[self.r.below(same.len())],
        }
    }

    fn made(&mut self, operator: &'static str, of: Vec<Id>, size: usize) -> Id {
        let id = self.fresh();
        let axis = if operator == "Concat" { vec![("axis", 0)] } else { Vec::new() };
        self.parts.push(Part::Node(operator, of, vec![id], axis));
        self.floats.push((id, size));
        id
    }

    fn step(&mut self) {
        let (x, size) = self.float();
        match self.r.below(8) {
            0 => {
                let (y, other) = self.float();
                self.made("Concat", vec![x, y], size + other);
            }
            1 => {
                // The same ids are read again where they fit.
                let fits = self.numbers.iter().find(|(_, bound)| *bound <= size).copied();
                let (ids, count) = match fits.filter(|_| self.r.coin()) {
                    Some((ids, bound)) => (ids, bound),
                    None => {
                        let ids = (0..size).map(|_| self.r.below(size) as i64).collect();
                        let id = self.fresh();
                        self.parts.push(Part::Numbers(id, ids));
                        self.numbers.push((id, size));
                        (id, size)
                    }
                };
                self.made("Gather", vec![x, ids], count);
            }
            2 => {
                let y = self.equal(size);
                let id = self.fresh();
                let own = [self.fresh(), self.fresh(), self.fresh(), self.fresh()];
                self.parts.push(Part::Call(vec![x, y], id, own));
                self.floats.push((id, size));
            }
            3 => {
                let own = std::array::from_fn(|_| self.fresh());
                let numbers = (0..size).map(|_| self.r.number(-2.0, 2.0) as f32).collect();
                self.parts.push(Part::If(x, own, numbers));
                self.floats.push((own[0], size));
            }
            4 => {
                self.made("Neg", vec![x], size);
            }
            operator => {
                let y = self.equal(size);
                self.made(["Add", "Mul", "Sub"][operator - 5], vec![x, y], size);
            }
        }
    }
}

impl Graph {
    fn draw(r: &mut Draws) -> Graph {
        let mut d =
            Drawing { r, parts: Vec::new(), floats: Vec::new(), numbers: Vec::new(), count: 0 };
        let mut inputs = Vec::new();
        for _ in 0..1 + d.r.below(2) {
            let size = 2 + d.r.below(3);
            let id = d.fresh();
            inputs.push((id, size));
            d.floats.push((id, size));
        }
        let size = d.fresh();
        (0..2).for_each(|_| {
            let size = 2 + d.r.below(3);
            d.weight(size);
        });
        let mut outputs = Vec::new();
        for _ in 0..3 + d.r.below(8) {
            d.step();
            let (last, _) = d.floats[d.floats.len() - 1];
            if d.r.coin() && !outputs.contains(&last) {
                outputs.push(last);
            }
        }
        // In a function, the size is another than the input's, whatever its name there.
        let (twice, zeros) = (d.fresh(), d.fresh());
        let own = [d.fresh(), d.fresh()];
        d.parts.push(Part::Node("Add", vec![size, size], vec![twice], Vec::new()));
        d.parts.push(Part::Zeros(twice, zeros, own));
        outputs.push(zeros);
        let (last, _) = d.floats[d.floats.len() - 1];
        if !outputs.contains(&last) {
            outputs.push(last);
        }
        Graph { inputs, size, parts: d.parts, outputs, count: d.count }
    }

    /// The bytes of a file. The outer names are unique, and those in functions among themselves.
    fn file(&self, names: &[String]) -> Vec<u8> {
        let of = |id: &Id| names[*id].as_str();
        let all = |ids: &[Id]| ids.iter().map(|id| names[*id].as_str()).collect::<Vec<_>>();
        let (mut graph, mut functions) = (Vec::new(), Vec::new());
        for part in &self.parts {
            match part {
                Part::Weight(id, numbers) => graph.push(stored_floats(of(id), numbers)),
                Part::Numbers(id, numbers) => {
                    graph.push(stored(of(id), &[numbers.len() as i64], numbers));
                }
                Part::Node(operator, inputs, outputs, attributes) => {
                    let attributes: Vec<Vec<u8>> =
                        attributes.iter().map(|(name, value)| int(name, *value)).collect();
                    graph.push(node(operator, &all(inputs), &all(outputs), &attributes));
                }
                Part::Call(inputs, output, own) => {
                    let name = format!("F{output}");
                    graph.push(call(&name, &all(inputs), &[of(output)]));
                    let [a, b, sum, made] = own.each_ref().map(of);
                    let nodes =
                        [node("Sub", &[a, b], &[sum], &[]), node("Mul", &[sum, a], &[made], &[])];
                    functions.push(function(&name, &[a, b], made, &nodes));
                }
                Part::Zeros(input, output, own) => {
                    let name = format!("F{output}");
                    graph.push(call(&name, &[of(input)], &[of(output)]));
                    let [size, made] = own.each_ref().map(of);
                    let nodes = [node("ConstantOfShape", &[size], &[made], &[])];
                    functions.push(function(&name, &[size], made, &nodes));
                }
                Part::If(x, own, numbers) => {
                    let [y, first, bound, is_low, inner, weight] = own.each_ref().map(of);
                    graph.push(node("ReduceSum", &[of(x)], &[first], &[int("keepdims", 0)]));
                    graph.push(node("Sub", &[first, first], &[bound], &[]));
                    graph.push(node("Less", &[first, bound], &[is_low], &[]));
                    let then = [node("Neg", &[of(x)], &[inner], &[])];
                    let other = [
                        stored_floats(weight, numbers),
                        node("Add", &[of(x), weight], &[inner], &[]),
                    ];
                    let branches =
                        [branch("then_branch", &then, inner), branch("else_branch", &other, inner)];
                    graph.push(node("If", &[is_low], &[y], &branches));
                }
            }
        }
        let inputs = self.inputs.iter().map(|(id, size)| port(11, of(id), FLOAT, &[*size as i64]));
        graph.extend(inputs);
        graph.push(port(11, of(&self.size), INT, &[1]));
        graph.extend(self.outputs.iter().map(|id| port(12, of(id), FLOAT, &[])));
        model(&graph, &functions)
    }

    /// Numbers that are the same for functions as for the graph around them.
    fn inner(&self) -> Vec<Id> {
        let own = self.parts.iter().flat_map(|part| match part {
            Part::Call(_, _, own) => own.to_vec(),
            Part::Zeros(_, _, own) => own.to_vec(),
            Part::Weight(..) | Part::Numbers(..) | Part::Node(..) | Part::If(..) => Vec::new(),
        });
        own.collect()
    }
}

const SEPARATORS: [&str; 7] = ["/", ".", ":", "_", "-", "__", " "];
const SUFFIXES: [&str; 8] = ["", ".1", "_1", "/1", ".2", ":0", "_", ".x"];
const PIECES: [&str; 10] = ["a", "b", "x", "w", "v", "", "é", "日本", "0", "i"];

/// A name; every second one differs from one that is there by little.
fn name(r: &mut Draws, there: &[String]) -> String {
    let pick = |r: &mut Draws, of: &[&'static str]| of[r.below(of.len())];
    if there.is_empty() || r.coin() {
        let mut name = pick(r, &PIECES).to_owned();
        for _ in 0..r.below(3) {
            name += pick(r, &SEPARATORS);
            name += pick(r, &PIECES);
        }
        return name + pick(r, &SUFFIXES);
    }
    let near = &there[r.below(there.len())];
    match r.below(3) {
        0 => format!("{near}{}", pick(r, &SUFFIXES)),
        1 => format!("{}{near}", pick(r, &SEPARATORS)),
        _ => {
            let (from, to) = (pick(r, &SEPARATORS), pick(r, &SEPARATORS));
            near.replace(from, to)
        }
    }
}

/// Names of all values: those of the graph are unique; those in functions are often names of it.
fn names(r: &mut Draws, graph: &Graph) -> Vec<String> {
    let inner = graph.inner();
    let mut all: Vec<String> = Vec::new();
    for id in 0..graph.count {
        let outer: Vec<String> = all.clone();
        let own: Vec<&String> = inner.iter().filter_map(|id| all.get(*id)).collect();
        let found = loop {
            let found = match inner.contains(&id) && r.coin() {
                true => outer[r.below(outer.len())].clone(),
                false => name(r, &outer),
            };
            let is_taken = match inner.contains(&id) {
                true => own.contains(&&found),
                false => outer.contains(&found),
            };
            if !found.is_empty() && !is_taken {
                break found;
            }
        };
        all.push(found);
    }
    all
}

fn read(file: Vec<u8>, arrays: &BTreeMap<String, Array>, what: &str) -> Onnx {
    let mut open = |_: &str| Err("nothing is beside it".to_owned());
    let given = Given { inputs: arrays.clone(), ..Given::default() };
    let read = read_onnx("names.onnx", "names", Bytes::from(file), &given, &mut open);
    let onnx = read.unwrap_or_else(|found| panic!("{found:?}\n{what}"));
    assert_eq!(verify(&onnx.module), [], "{what}");
    let text = onnx.module.to_string();
    assert_eq!(parse_module("text", &text).map(|m| m.to_string()), Ok(text), "{what}");
    onnx
}

/// The bits of the results, and those of what is compiled.
fn results(onnx: &Onnx, inputs: &[Tensor], what: &str) -> [Vec<Vec<u64>>; 2] {
    let weights = onnx.weights.iter().map(|(_, held)| held.tensor());
    let args: Vec<Tensor> = weights.chain(inputs.iter().cloned()).collect();
    let bits = |numbers: Vec<f64>| numbers.into_iter().map(f64::to_bits).collect::<Vec<u64>>();
    let said = eval(&onnx.module, ENTRY, &args).unwrap_or_else(|why| panic!("{why:?}\n{what}"));
    let said = said.into_iter().map(|tensor| bits(tensor.to_f64())).collect();
    let mut module = onnx.module.clone();
    ir::outline::outline(&mut module, ENTRY, onnx.weights.len());
    simplify(&mut module, &Rules::default());
    let known: Vec<bool> = (0..args.len()).map(|at| at < onnx.weights.len()).collect();
    let compiled = crate::integers::compiled(&module, ENTRY, &args, &known);
    let (found, _) = compiled.unwrap_or_else(|why| panic!("{why}\n{what}"));
    let found = found.into_iter().map(|tensor| bits(tensor.to_f64())).collect();
    [said, found]
}

/// Names of a graph that a seed draws: see the head of this file.
///
/// # Panics
/// When they make a difference.
pub(crate) fn renamed(seed: u64) {
    let mut r = Draws::new(seed);
    let graph = Graph::draw(&mut r);
    let plain: Vec<String> = (0..graph.count).map(|id| format!("plain{id}")).collect();
    let drawn = names(&mut r, &graph);
    let what = format!("SEED={seed} {drawn:?}");
    let mut inputs: Vec<Tensor> = Vec::new();
    for (_, size) in &graph.inputs {
        let numbers = (0..*size).map(|_| r.number(-2.0, 2.0) as f32).collect();
        inputs.push(Tensor::f32(&[*size], numbers));
    }
    inputs.push(Tensor::int(ir::DType::I64, &[1], vec![1 + r.below(3) as i64]));
    let ids: Vec<Id> = graph.inputs.iter().map(|(id, _)| *id).chain([graph.size]).collect();
    let [first, second] = [&plain, &drawn].map(|names| {
        let arrays = ids.iter().zip(&inputs);
        let arrays = arrays.map(|(id, tensor)| (names[*id].clone(), Array::from(tensor))).collect();
        let onnx = read(graph.file(names), &arrays, &what);
        let found: Vec<&str> = onnx.outputs.iter().map(|port| port.name.as_str()).collect();
        let wanted: Vec<&str> = graph.outputs.iter().map(|id| names[*id].as_str()).collect();
        assert_eq!(found, wanted, "{what}");
        let mut values: Vec<&str> = onnx.weights.iter().map(|(name, _)| name.as_str()).collect();
        values.sort_unstable();
        assert!(values.windows(2).all(|pair| pair[0] != pair[1]), "{values:?}: {what}");
        results(&onnx, &inputs, &what)
    });
    assert_eq!(first, second, "{what}");
}

/// How many graphs the tests look at; the bench takes more.
#[cfg(test)]
const CASES: u64 = 120;

#[test]
fn names_of_a_graph_make_no_difference() {
    crate::draws::seeds(CASES).into_iter().for_each(renamed);
}
