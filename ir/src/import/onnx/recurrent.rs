//! `RNN`, `GRU` and `LSTM`: a step for each element of the sequence.
//!
//! Legend: T steps, B batch, I inputs, H hidden numbers, G gates times H.

use super::site::{Made, Site, Translated};
use crate::DType;
use crate::module::ValueId;
use crate::op::{Binary, Comparison, Unary};

/// Steps at most. Chosen: each is some twenty ops, and longer sequences would make modules that
/// take minutes to compile.
const STEPS_MAX: usize = 4096;

/// An activation with its numbers.
#[derive(Clone)]
struct Activation {
    name: String,
    alpha: f64,
    beta: f64,
}

/// What the steps of one direction have in common.
struct Layer {
    hidden: usize,
    /// `X W + b` of all steps, `[T, B, G]`.
    inputs: ValueId,
    /// `[G, H]`
    recurrence: ValueId,
    /// `[G]`, of the recurrence.
    bias: Option<ValueId>,
    /// Weights that look at the cell, `[H]`: of the input, the output and the forget gate.
    peepholes: Option<[ValueId; 3]>,
    activations: Vec<Activation>,
    clip: Option<f64>,
}

/// Which operator is unrolled.
#[derive(Clone, Copy, PartialEq)]
enum Cell {
    Rnn,
    Gru,
    Lstm,
}

impl Cell {
    fn gates(self) -> usize {
        match self {
            Cell::Rnn => 1,
            Cell::Gru => 3,
            Cell::Lstm => 4,
        }
    }

    fn activations(self) -> &'static [&'static str] {
        match self {
            Cell::Rnn => &["Tanh"],
            Cell::Gru => &["Sigmoid", "Tanh"],
            Cell::Lstm => &["Sigmoid", "Tanh", "Tanh"],
        }
    }
}

pub(super) fn recurrent(s: &mut Site) -> Translated {
    let cell = match s.node.op_type.as_str() {
        "RNN" => Cell::Rnn,
        "GRU" => Cell::Gru,
        _ => Cell::Lstm,
    };
    let by_batch = s.int("layout", 0) != 0;
    let turn = |s: &mut Site, x: ValueId| if by_batch { s.transpose(x, &[1, 0, 2]) } else { Ok(x) };
    let (x, w, r) = (s.operand(0)?, s.operand(1)?, s.operand(2)?);
    let x = turn(s, x)?;
    let [steps, batch, _] = s.dims(x)[..] else { return Err("a sequence of three dims".into()) };
    let [directions, _, hidden] = s.dims(r)[..] else { return Err("weights of three dims".into()) };
    if steps > STEPS_MAX || steps == 0 {
        return Err(format!("{steps} steps, not 1 to {STEPS_MAX}"));
    }
    let direction = s.text("direction", "forward");
    let wanted = if direction == "bidirectional" { 2 } else { 1 };
    if directions != wanted || s.dims(r)[1] != cell.gates() * hidden {
        return Err(format!("weights of dims {:?} for `{direction}`", s.dims(r)));
    }
    let activations = activations(s, cell, directions)?;
    let masks = masks(s, steps, batch, hidden)?;
    let (mut all, mut last, mut last_cells) = (Vec::new(), Vec::new(), Vec::new());
    for (at, activations) in activations.into_iter().enumerate() {
        let layer = layer(s, cell, [x, w, r], at, activations)?;
        let state = |s: &mut Site, operand: usize| match s.optional(operand) {
            Some(state) => {
                let state = turn(s, state)?;
                part(s, state, at, &[batch, hidden])
            }
            None => s.constant(0.0, s.dtype(x), &[batch, hidden]),
        };
        let mut h = state(s, 5)?;
        let mut c = if cell == Cell::Lstm { state(s, 6)? } else { h };
        let backward = direction == "reverse" || at == 1;
        let mut outputs = vec![h; steps];
        for round in 0..steps {
            let t = if backward { steps - 1 - round } else { round };
            let input = s.cut(layer.inputs, 0, t, 1)?;
            let input = s.reshape(input, &[batch, cell.gates() * hidden])?;
            let (new_h, new_c) = match cell {
                Cell::Rnn => (rnn(s, &layer, input, h)?, c),
                Cell::Gru => (gru(s, &layer, input, h)?, c),
                Cell::Lstm => lstm(s, &layer, input, h, c)?,
            };
            outputs[t] = new_h;
            (h, c) = match &masks {
                None => (new_h, new_c),
                // After its end a sequence yields zeros, and its state stays.
                Some(masks) => {
                    let zero = s.number(0.0, new_h)?;
                    outputs[t] = s.select(masks[t], new_h, zero)?;
                    (s.select(masks[t], new_h, h)?, s.select(masks[t], new_c, c)?)
                }
            };
        }
        all.push(stacked(s, &outputs)?);
        last.push(h);
        last_cells.push(c);
    }
    let y = joined(s, &all, by_batch)?;
    let (last, last_cells) = (stacked(s, &last)?, stacked(s, &last_cells)?);
    let mut results = vec![y, turn(s, last)?];
    if cell == Cell::Lstm {
        results.push(turn(s, last_cells)?);
    }
    Ok(results)
}

/// The outputs of all directions, `[T, B, H]` each, as `[T, D, B, H]`, or `[B, T, D, H]`.
fn joined(s: &mut Site, all: &[ValueId], by_batch: bool) -> Made {
    let mut parts = Vec::new();
    for of in all {
        let [steps, batch, hidden] = s.dims(*of)[..] else { return Err("outputs".to_owned()) };
        parts.push(s.reshape(*of, &[steps, 1, batch, hidden])?);
    }
    let y = s.concat(1, &parts)?;
    if by_batch { s.transpose(y, &[2, 0, 1, 3]) } else { Ok(y) }
}

fn stacked(s: &mut Site, parts: &[ValueId]) -> Made {
    let mut rows = Vec::new();
    for part in parts {
        let dims = [&[1][..], &s.dims(*part)].concat();
        rows.push(s.reshape(*part, &dims)?);
    }
    s.concat(0, &rows)
}

/// The part of one direction.
fn part(s: &mut Site, x: ValueId, at: usize, dims: &[usize]) -> Made {
    if s.dims(x).get(1..) != Some(dims) {
        return Err(format!("an operand of dims {:?}, not of {dims:?}", s.dims(x)));
    }
    let one = s.cut(x, 0, at, 1)?;
    s.reshape(one, dims)
}

/// For each step, whether the sequences have not ended; none where all are whole.
fn masks(
    s: &mut Site,
    steps: usize,
    batch: usize,
    hidden: usize,
) -> Result<Option<Vec<ValueId>>, String> {
    let Some(lengths) = s.optional(4) else { return Ok(None) };
    if let Some(known) = s.hint(4)
        && known.to_f64().iter().all(|length| *length >= steps as f64)
    {
        return Ok(None);
    }
    let lengths = s.cast(lengths, DType::I32)?;
    let lengths = s.reshape(lengths, &[batch, 1])?;
    let lengths = s.broadcast(lengths, &[batch, hidden])?;
    let mut masks = Vec::new();
    for t in 0..steps {
        let t = s.number(t as f64, lengths)?;
        masks.push(s.compare(Comparison::Lt, t, lengths)?);
    }
    Ok(Some(masks))
}

/// The activations of each direction.
fn activations(s: &Site, cell: Cell, directions: usize) -> Result<Vec<Vec<Activation>>, String> {
    let defaults = cell.activations();
    let names = s.texts("activations").filter(|names| !names.is_empty()).unwrap_or_else(|| {
        (0..directions).flat_map(|_| defaults.iter().map(|name| (*name).to_owned())).collect()
    });
    if names.len() != directions * defaults.len() {
        return Err(format!("{} activations", names.len()));
    }
    let mut alphas = s.floats("activation_alpha").unwrap_or_default().into_iter();
    let mut betas = s.floats("activation_beta").unwrap_or_default().into_iter();
    let mut all = Vec::new();
    for name in names {
        // Numbers are listed for the activations that have any.
        let (alpha, beta) = match name.to_ascii_lowercase().as_str() {
            "affine" => (Some(1.0), Some(0.0)),
            "leakyrelu" => (Some(0.01), None),
            "thresholdedrelu" | "elu" => (Some(1.0), None),
            "scaledtanh" => (Some(1.0), Some(1.0)),
            "hardsigmoid" => (Some(0.2), Some(0.5)),
            "relu" | "tanh" | "sigmoid" | "softsign" | "softplus" => (None, None),
            _ => return Err(format!("the activation `{name}`")),
        };
        let number = |default: Option<f64>, list: &mut std::vec::IntoIter<f32>| match default {
            Some(default) => list.next().map_or(default, f64::from),
            None => 0.0,
        };
        let (alpha, beta) = (number(alpha, &mut alphas), number(beta, &mut betas));
        all.push(Activation { name: name.to_ascii_lowercase(), alpha, beta });
    }
    Ok(all.chunks(defaults.len()).map(<[Activation]>::to_vec).collect())
}

fn layer(
    s: &mut Site,
    cell: Cell,
    [x, w, r]: [ValueId; 3],
    at: usize,
    activations: Vec<Activation>,
) -> Result<Layer, String> {
    let (hidden, inputs) = (s.dims(r)[2], s.dims(x)[2]);
    let width = cell.gates() * hidden;
    let w = part(s, w, at, &[width, inputs])?;
    let recurrence = part(s, r, at, &[width, hidden])?;
    let mut inputs = s.contract("tbi,gi->tbg", x, w)?;
    let mut bias = None;
    if let Some(biases) = s.optional(3) {
        let both = part(s, biases, at, &[2 * width])?;
        let (own, other) = (s.cut(both, 0, 0, width)?, s.cut(both, 0, width, width)?);
        let dims = s.dims(inputs);
        let own = s.broadcast(own, &dims)?;
        inputs = s.add(inputs, own)?;
        bias = Some(other);
    }
    let mut peepholes = None;
    if let Some(weights) = s.optional(7).filter(|_| cell == Cell::Lstm) {
        let all = part(s, weights, at, &[3 * hidden])?;
        let one = |s: &mut Site, at: usize| s.cut(all, 0, at * hidden, hidden);
        peepholes = Some([one(s, 0)?, one(s, 1)?, one(s, 2)?]);
    }
    let clip = s.has("clip").then(|| s.float("clip", 0.0));
    Ok(Layer { hidden, inputs, recurrence, bias, peepholes, activations, clip })
}

/// One gate of `[B, G]`.
fn gate(s: &mut Site, layer: &Layer, x: ValueId, at: usize) -> Made {
    s.cut(x, 1, at * layer.hidden, layer.hidden)
}

/// What the state adds, with its bias, `[B, G]`.
fn recurred(s: &mut Site, layer: &Layer, h: ValueId) -> Made {
    let product = s.contract("bh,gh->bg", h, layer.recurrence)?;
    with_bias(s, product, layer.bias)
}

fn with_bias(s: &mut Site, x: ValueId, bias: Option<ValueId>) -> Made {
    let Some(bias) = bias else { return Ok(x) };
    let bias = s.broadcast(bias, &s.dims(x))?;
    s.add(x, bias)
}

fn rnn(s: &mut Site, layer: &Layer, input: ValueId, h: ValueId) -> Made {
    let from_state = recurred(s, layer, h)?;
    let sum = s.add(input, from_state)?;
    activated(s, layer, 0, sum)
}

fn gru(s: &mut Site, layer: &Layer, input: ValueId, h: ValueId) -> Made {
    let hidden = layer.hidden;
    let from_state = recurred(s, layer, h)?;
    let mut gates = [h, h];
    for (at, made) in gates.iter_mut().enumerate() {
        let (a, b) = (gate(s, layer, input, at)?, gate(s, layer, from_state, at)?);
        let sum = s.add(a, b)?;
        *made = activated(s, layer, 0, sum)?;
    }
    let [update, reset] = gates;
    let own = gate(s, layer, input, 2)?;
    let from_state = if s.int("linear_before_reset", 0) != 0 {
        let from_state = gate(s, layer, from_state, 2)?;
        s.mul(reset, from_state)?
    } else {
        let left = s.mul(reset, h)?;
        let weights = s.cut(layer.recurrence, 0, 2 * hidden, hidden)?;
        let product = s.contract("bh,gh->bg", left, weights)?;
        let bias = match layer.bias {
            Some(bias) => Some(s.cut(bias, 0, 2 * hidden, hidden)?),
            None => None,
        };
        with_bias(s, product, bias)?
    };
    let sum = s.add(own, from_state)?;
    let new = activated(s, layer, 1, sum)?;
    let one = s.number(1.0, update)?;
    let rest = s.sub(one, update)?;
    let (new, old) = (s.mul(rest, new)?, s.mul(update, h)?);
    s.add(new, old)
}

fn lstm(
    s: &mut Site,
    layer: &Layer,
    input: ValueId,
    h: ValueId,
    c: ValueId,
) -> Result<(ValueId, ValueId), String> {
    let from_state = recurred(s, layer, h)?;
    let sum = s.add(input, from_state)?;
    let looking = |s: &mut Site, gate: ValueId, at: usize, cell: ValueId| -> Made {
        let Some(peepholes) = layer.peepholes else { return Ok(gate) };
        let weights = s.broadcast(peepholes[at], &s.dims(cell))?;
        let seen = s.mul(weights, cell)?;
        s.add(gate, seen)
    };
    let own = gate(s, layer, sum, 0)?;
    let own = looking(s, own, 0, c)?;
    let input_gate = activated(s, layer, 0, own)?;
    let forget_gate = if s.int("input_forget", 0) != 0 {
        let one = s.number(1.0, input_gate)?;
        s.sub(one, input_gate)?
    } else {
        let own = gate(s, layer, sum, 2)?;
        let own = looking(s, own, 2, c)?;
        activated(s, layer, 0, own)?
    };
    let candidate = gate(s, layer, sum, 3)?;
    let candidate = activated(s, layer, 1, candidate)?;
    let (old, new) = (s.mul(forget_gate, c)?, s.mul(input_gate, candidate)?);
    let cell = s.add(old, new)?;
    let own = gate(s, layer, sum, 1)?;
    let own = looking(s, own, 1, cell)?;
    let output_gate = activated(s, layer, 0, own)?;
    let shown = activated(s, layer, 2, cell)?;
    Ok((s.mul(output_gate, shown)?, cell))
}

/// The activation of an operand, which is clipped first.
fn activated(s: &mut Site, layer: &Layer, at: usize, x: ValueId) -> Made {
    let Activation { name, alpha, beta } = layer.activations[at].clone();
    let x = match layer.clip {
        Some(clip) => {
            let low = s.with(Binary::Max, x, -clip)?;
            s.with(Binary::Min, low, clip)?
        }
        None => x,
    };
    let zero = s.number(0.0, x)?;
    match name.as_str() {
        "tanh" => s.unary(Unary::Tanh, x),
        "sigmoid" => {
            let minus = s.unary(Unary::Neg, x)?;
            let e = s.unary(Unary::Exp, minus)?;
            let below = s.with(Binary::Add, e, 1.0)?;
            let one = s.number(1.0, x)?;
            s.div(one, below)
        }
        "relu" => s.with(Binary::Max, x, 0.0),
        "affine" => {
            let scaled = s.with(Binary::Mul, x, alpha)?;
            s.with(Binary::Add, scaled, beta)
        }
        "leakyrelu" => {
            let low = s.with(Binary::Mul, x, alpha)?;
            let below = s.compare(Comparison::Lt, x, zero)?;
            s.select(below, low, x)
        }
        "thresholdedrelu" => {
            let bound = s.number(alpha, x)?;
            let above = s.compare(Comparison::Lt, bound, x)?;
            s.select(above, x, zero)
        }
        "scaledtanh" => {
            let scaled = s.with(Binary::Mul, x, beta)?;
            let bounded = s.unary(Unary::Tanh, scaled)?;
            s.with(Binary::Mul, bounded, alpha)
        }
        "hardsigmoid" => {
            let scaled = s.with(Binary::Mul, x, alpha)?;
            let moved = s.with(Binary::Add, scaled, beta)?;
            let low = s.with(Binary::Max, moved, 0.0)?;
            s.with(Binary::Min, low, 1.0)
        }
        "elu" => {
            let low = s.with(Binary::Min, x, 0.0)?;
            let e = s.unary(Unary::Exp, low)?;
            let less = s.with(Binary::Sub, e, 1.0)?;
            let low = s.with(Binary::Mul, less, alpha)?;
            let below = s.compare(Comparison::Lt, x, zero)?;
            s.select(below, low, x)
        }
        "softsign" => {
            let size = s.unary(Unary::Abs, x)?;
            let below = s.with(Binary::Add, size, 1.0)?;
            s.div(x, below)
        }
        _ => super::elementwise::softplus(s, x),
    }
}
