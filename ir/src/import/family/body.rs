//! From the lines of `embed`, `block` and `head` to nodes.
//!
//! A line is an op of the IR in its own text, a composite of the library with its attributes, or
//! one of the statements below. Attributes are expressions; the parameters of a function are its
//! weights, by the last part of their names (`wq` for `attn.wq`, `ln1_w` for `ln1.w`).
//!
//! | statement | is |
//! |---|---|
//! | `linear EINSUM w=W b=B %x` | a product with a weight, plus the bias where there is one |
//! | `attend scale=… [p=…] [window=…] … %q %k %v` | causal attention, also over a cache |
//! | `rotate rope=… %x %position` | the rotary embedding |
//! | `dropout p=… %x` | dropout, or nothing where p is 0 |
//! | `stack N w` | the weights `w0`, `w1`, … below each other |
//! | `same %x` | `x` under another name |
//! | `largest COUNT %x` | the largest elements along the last dim, and zeros for all others |
//! | `chosen COUNT %x` | ones in the places of these, and zeros in all others |
//! | `constant_like VALUE %x` | a number in the dims of `x` |
//! | `embedding [pad=…] %table %ids` | rows of a table; the row `pad` has no gradient |
//! | `activate ACT %x` | an activation function |
//! | `position` | the position of the first token; in decoding, that of each sample |
//! | `positions %tokens` | the positions of the tokens, in their documents where these are given |
//! | `broadcast_like %x %y` | `x` repeated along the leading dims of `y` that it lacks |
//!
//! `attend` takes the further attributes of the composite `attention`, and `alibi=GAIN alibi_max=8`
//! for a bias that grows with the distance.
//!
//! A function with a parameter `documents` keeps packed documents apart: attention sees keys of the
//! query's own document only, and learned positions count from its first token. Rotary embeddings
//! and ALiBi count from the start of the sample all the same: scores depend on differences of
//! positions only.

use std::collections::BTreeMap;

use super::expr::{Expr, Scope, Value};
use super::rotary::{Angles, Ramp, Rotary};
use super::routing::{chosen, largest};
use super::{Code, Family, FamilyModel, FieldKind, Line};
use crate::DType;
use crate::build::Builder;
use crate::dim::Dim;
use crate::import::activation::Activation;
use crate::library::templates;
use crate::module::ValueId;
use crate::op::{Binary, Comparison, Op, Unary};
use crate::random::DrawBits;
use crate::text::attrs::Names;
use crate::text::guard::{Setting, Settings, select};
use crate::types::TensorType;

/// The parameter of what keeps packed documents apart.
pub(crate) const DOCUMENTS: &str = "documents";

/// The functions of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// `tokens`, weights [, `position`] [, `key`] to activations.
    Embed,
    /// `x`, weights [, `k_cache`, `v_cache`, `position`] [, `key`] to activations [and caches], of
    /// the layers that are like this one.
    Block(usize),
    /// `x`, weights, `w_lm` to logits.
    Head,
}

/// The least probability, of dropping and of keeping, for draws of 16 bits. Chosen: rounding it
/// changes it by a sixtieth at most.
const SHORT_MIN: f64 = 1.0 / 1024.0;

/// What a function is made for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Mode {
    /// Training, with the dropout of the config or this one at every site, and the bits of its
    /// draws.
    Train(Option<f64>, DrawBits),
    /// Evaluation and generation: no dropout.
    Eval,
}

/// What a layer computes beside products, norms and attention to all earlier tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionTraits {
    /// The most tokens that a query attends to, where these are fewer than all.
    pub window: Option<usize>,
    /// The soft cap of scores, where there is one.
    pub soft_cap: Option<f64>,
    /// Whether scores have a bias that grows with the distance (ALiBi).
    pub is_biased: bool,
    /// Whether queries and keys are rotated.
    pub is_rotated: bool,
}

impl FamilyModel {
    /// What a layer computes beside products, norms and attention to all earlier tokens.
    pub fn attention_traits(&self, layer: usize) -> AttentionTraits {
        let body = self.body(Part::Block(layer), Mode::Eval, DType::F32);
        let mut traits =
            AttentionTraits { window: None, soft_cap: None, is_biased: false, is_rotated: false };
        for line in &body.lines {
            let Line::Call { op, named, .. } = *line else { continue };
            traits.is_rotated |= *op == "rotate";
            if *op != "attend" {
                continue;
            }
            let number = |key: &str| {
                let found = named.iter().find(|(name, _)| *name == key);
                found.map(|(_, expr)| body.number(expr)).filter(|number| *number != 0.0)
            };
            traits.window = number("window").map(|window| window as usize);
            traits.soft_cap = number("softcap");
            traits.is_biased |= number("alibi").is_some();
        }
        traits
    }

    /// Whether logits are bent by a soft cap.
    pub fn caps_logits(&self) -> bool {
        let body = self.body(Part::Head, Mode::Eval, DType::F32);
        body.lines.iter().any(|line| matches!(line, Line::Call { op: "tanh", .. }))
    }
}

/// Lines of one function with the values of its names.
struct Body<'m> {
    lines: Vec<&'static Line>,
    scope: Scope,
    model: &'m FamilyModel,
    dtype: DType,
    /// The bits of draws.
    bits: DrawBits,
}

impl FamilyModel {
    fn body(&self, part: Part, mode: Mode, dtype: DType) -> Body<'_> {
        let (code, mut scope) = match part {
            Part::Embed => (&self.family.embed, self.scope.clone()),
            Part::Block(layer) => (&self.family.block, self.scope_of(layer)),
            Part::Head => (&self.family.head, self.scope.clone()),
        };
        for symbol in self.family.dropouts() {
            let value = match mode {
                Mode::Train(None, _) => continue,
                Mode::Train(Some(p), _) => p,
                Mode::Eval => 0.0,
            };
            scope.insert(symbol.to_owned(), Value::Number(value));
        }
        let lines = active(self.family, code, &scope);
        let bits = match mode {
            Mode::Train(_, bits) => bits,
            Mode::Eval => DrawBits::default(),
        };
        Body { lines, scope, model: self, dtype, bits }
    }

    /// Whether the function drops anything, and takes a key therefore.
    pub(crate) fn drops(&self, part: Part, mode: Mode) -> bool {
        let body = self.body(part, mode, DType::F32);
        body.lines.iter().any(|line| {
            let Line::Call { op: "dropout" | "attend", named, .. } = line else { return false };
            named.iter().any(|(key, value)| *key == "p" && body.number(value) > 0.0)
        })
    }

    /// Whether the function attends to other tokens, or looks up their positions.
    pub(crate) fn reads_documents(&self, part: Part) -> bool {
        let body = self.body(part, Mode::Eval, DType::F32);
        let reads = |line: &&Line| matches!(line, Line::Call { op: "attend" | "positions", .. });
        body.lines.iter().any(reads)
    }

    /// Adds the nodes of a function whose parameters are there; returns its results.
    pub(crate) fn build(
        &self,
        b: &mut Builder<'_>,
        part: Part,
        mode: Mode,
        dtype: DType,
    ) -> Vec<ValueId> {
        let mut body = self.body(part, mode, dtype);
        let seq = b.ty(ValueId(0)).dims[1].clone();
        let tokens = seq.as_constant().map_or(1.0, |seq| seq as f64);
        body.scope.insert("S".into(), Value::Number(tokens));
        let mut making = Making { body, values: BTreeMap::new(), salt: 0, caches: Vec::new() };
        making.run(b)
    }
}

/// The lines whose guards hold.
fn active(family: &'static Family, code: &'static Code, scope: &Scope) -> Vec<&'static Line> {
    let Family { name, .. } = family;
    let selected = select(name, &code.text, &settings(family, scope));
    let selected = selected.unwrap_or_else(|wrong| {
        let why: Vec<&str> = wrong.iter().map(|one| one.headline.as_str()).collect();
        panic!("the family `{name}`: {}", why.join("; "))
    });
    let left: Vec<bool> = selected.lines().map(|line| !line.trim().is_empty()).collect();
    code.lines.iter().filter(|(number, _)| left[*number]).map(|(_, line)| line).collect()
}

/// What guards compare: numbers, flags, and the words of a field. `none`, lists and rotary
/// embeddings are asked about in `config`, whose answer is a flag.
fn settings(family: &Family, scope: &Scope) -> Settings {
    let words = |name: &str| {
        family.fields().find(|field| field.symbol == name).and_then(|field| {
            let FieldKind::Word(words) = &field.kind else { return None };
            Some(words.iter().map(|word| (*word).to_owned()).collect())
        })
    };
    let setting = |(name, value): (&String, &Value)| {
        let setting = match value {
            Value::Number(number) => Setting::Number(*number),
            Value::Flag(flag) => Setting::Flag(*flag),
            Value::Word(word) => Setting::Word { word: word.clone(), words: words(name)? },
            Value::None | Value::List(_) | Value::Rotary(_) => return None,
        };
        Some((name.clone(), setting))
    };
    scope.iter().filter_map(setting).collect()
}

fn known<T>(what: &str, value: Result<T, String>) -> T {
    value.unwrap_or_else(|why| panic!("the family's `{what}`: {why}"))
}

impl Body<'_> {
    fn value(&self, text: &str) -> Value {
        known(text, Expr::parse(text).and_then(|expr| expr.eval(&self.scope)))
    }

    fn number(&self, text: &str) -> f64 {
        let value = self.value(text);
        value.number().unwrap_or_else(|| panic!("the family's `{text}` is {value}, no number"))
    }

    /// What names stand for in a line of the IR.
    fn names(&self) -> Names {
        let mut names = Names { template: true, ..Names::default() };
        for (name, value) in &self.scope {
            if let Some(size) = value.size().filter(|_| matches!(value, Value::Number(_))) {
                names.dims.insert(name.clone(), Dim::from(size));
            }
            if let Some(number) = value.number() {
                names.attributes.insert(name.clone(), number);
            }
        }
        names.dims.insert("B".into(), Dim::symbol(Dim::BATCH));
        names.dtypes.insert("T".into(), self.dtype);
        names.dtypes.insert("F".into(), self.wide());
        names
    }

    /// The type in which angles are computed.
    fn wide(&self) -> DType {
        if self.dtype == DType::F64 { DType::F64 } else { DType::F32 }
    }
}

/// A line with what it takes.
struct Call<'l> {
    result: &'l str,
    op: &'l str,
    bare: &'l [&'static str],
    named: &'l [(&'static str, &'static str)],
    operands: Vec<ValueId>,
}

impl Call<'_> {
    fn named(&self, key: &str) -> Option<&'static str> {
        self.named.iter().find(|(name, _)| *name == key).map(|(_, value)| *value)
    }
}

struct Making<'m> {
    body: Body<'m>,
    /// Values by the names of the lines, where these differ from those in the function.
    values: BTreeMap<&'static str, ValueId>,
    /// Sites of dropout so far, which tell their draws apart.
    salt: u32,
    caches: Vec<ValueId>,
}

impl Making<'_> {
    fn run(&mut self, b: &mut Builder<'_>) -> Vec<ValueId> {
        for line in self.body.lines.clone() {
            match line {
                Line::Return(name) => {
                    let result = self.operand(b, name);
                    return [result].into_iter().chain(self.caches.drain(..)).collect();
                }
                Line::Call { result, ty, op, bare, named, operands } => {
                    let operands = operands.iter().map(|name| self.operand(b, name)).collect();
                    let call = Call { result, op, bare, named, operands };
                    let value = self.call(b, &call, *ty);
                    self.values.insert(result, value);
                }
            }
        }
        panic!("a function of the family `{}` does not return", self.body.model.family.name)
    }

    fn operand(&self, b: &Builder<'_>, name: &str) -> ValueId {
        self.values.get(name).copied().unwrap_or_else(|| param(b, name))
    }

    fn call(&mut self, b: &mut Builder<'_>, call: &Call<'_>, ty: Option<&str>) -> ValueId {
        match call.op {
            "linear" => linear(b, call),
            "attend" => self.attend(b, call),
            "rotate" => self.rotate(b, call),
            "dropout" => self.dropout(b, call),
            "embedding" => self.embedding(b, call),
            "activate" => {
                let word = self.body.value(call.bare[0]);
                let activation = word.word().and_then(Activation::named);
                let activation = activation.unwrap_or_else(|| panic!("{word} activates nothing"));
                b.composite(call.result, activation.composite(), &[], &call.operands)[0]
            }
            "position" => b
                .function()
                .find("position")
                .unwrap_or_else(|| b.constant("start", 0.0, TensorType::scalar(DType::I32))),
            "positions" => positions(b, call.operands[0]),
            "same" => call.operands[0],
            "stack" => self.stack(b, call),
            "largest" => {
                let count = self.body.number(call.bare[0]) as usize;
                largest(b, call.result, count, call.operands[0])
            }
            "chosen" => {
                let count = self.body.number(call.bare[0]) as usize;
                chosen(b, call.result, count, call.operands[0])
            }
            "constant_like" => {
                b.constant_like(call.result, self.body.number(call.bare[0]), call.operands[0])
            }
            "broadcast_like" => {
                let [x, like] = call.operands[..] else { panic!("a value, and one with its dims") };
                let has_all = b.ty(x).ndim() == b.ty(like).ndim();
                if has_all { x } else { b.broadcast_like(call.result, x, like) }
            }
            op if templates().contains_key(op) => {
                let attributes: Vec<(&str, f64)> =
                    call.named.iter().map(|(key, expr)| (*key, self.body.number(expr))).collect();
                b.composite(call.result, op, &attributes, &call.operands)[0]
            }
            _ => self.primitive(b, call, ty),
        }
    }

    /// A line of the IR's own text.
    fn primitive(&self, b: &mut Builder<'_>, call: &Call<'_>, ty: Option<&str>) -> ValueId {
        let mut names = self.body.names();
        let mut text = format!("%{}", call.result);
        if let Some(ty) = ty {
            text += &format!(": {ty}");
        }
        text += &format!(" = {}", call.op);
        for bare in call.bare {
            if call.op == "constant" {
                names.attributes.insert("value".into(), self.body.number(bare));
                text += " value";
            } else {
                text += &format!(" {bare}");
            }
        }
        for (key, value) in call.named {
            text += &format!(" {key}={value}");
        }
        for operand in &call.operands {
            text += &format!(" %{}", b.function().value(*operand).name);
        }
        let family = self.body.model.family.name;
        match b.push_text(&text, names) {
            Ok(value) => value,
            Err(why) => panic!("the family `{family}`: {text}\n{why}"),
        }
    }

    fn next_salt(&mut self) -> f64 {
        self.salt += 1;
        f64::from(self.salt - 1)
    }

    /// The bits of draws for a probability: those near 0 and 1 are too coarse in 65,536ths.
    fn bits(&self, p: f64) -> DrawBits {
        let is_coarse = p.min(1.0 - p) < SHORT_MIN;
        if is_coarse { DrawBits::B24 } else { self.body.bits }
    }

    fn dropout(&mut self, b: &mut Builder<'_>, call: &Call<'_>) -> ValueId {
        let (p, salt) = (call.named("p").map_or(0.0, |p| self.body.number(p)), self.next_salt());
        if p == 0.0 {
            return call.operands[0];
        }
        let operands = [call.operands[0], param(b, "key")];
        let attributes: Vec<(&str, f64)> =
            [("p", p), ("salt", salt)].into_iter().chain(self.bits(p).attribute()).collect();
        b.composite(call.result, "dropout", &attributes, &operands)[0]
    }

    /// Causal attention: over the tokens themselves or, where there is a `k_cache`, over the cache
    /// with the tokens written into it.
    ///
    /// Shapes: `q` is `[B, S, H, D]`, `k` and `v` are `[B, S, G, D]`, caches `[B, C, G, D]`.
    fn attend(&mut self, b: &mut Builder<'_>, call: &Call<'_>) -> ValueId {
        let (heads, key_heads) = (self.body.model.size("H"), self.body.model.size("G"));
        let number = |key: &str| call.named(key).map_or(0.0, |expr| self.body.number(expr));
        let p = number("p");
        let mut attributes =
            vec![("scale", number("scale")), ("group", (heads / key_heads) as f64)];
        // What is 0 is left out: the composite is named without it.
        let further = call
            .named
            .iter()
            .filter(|(key, _)| !["scale", "p", "alibi", "alibi_max"].contains(key));
        attributes.extend(further.map(|(key, _)| (*key, number(key))).filter(|(_, n)| *n != 0.0));
        let salt = self.next_salt();
        let [q, k, v] = call.operands[..] else { panic!("attention of three values") };
        let alibi = call.named("alibi").map(|gain| {
            (self.body.number(gain), self.body.number(call.named("alibi_max").unwrap_or("8")))
        });
        if alibi.is_some() {
            attributes.extend([("bias", 1.0), ("bias_heads", 1.0)]);
        }
        if let Some(k_cache) = b.function().find("k_cache") {
            let (v_cache, position) = (param(b, "v_cache"), param(b, "position"));
            let update = Op::DynamicUpdateSlice { dim: 1 };
            let keys = b.push("keys", update.clone(), &[k_cache, k, position]);
            let values = b.push("values", update, &[v_cache, v, position]);
            self.caches = vec![keys, values];
            let bias = alibi.map(|(gain, max)| self.alibi(b, keys, max, gain));
            let operands = [q, keys, values].into_iter().chain(bias).chain([position]);
            let operands: Vec<ValueId> = operands.collect();
            return b.composite(call.result, "attention_cached", &attributes, &operands)[0];
        }
        attributes.push(("query_offset", 0.0));
        let bias = alibi.map(|(gain, max)| self.alibi(b, k, max, gain));
        let documents = b.function().find(DOCUMENTS);
        if documents.is_some() {
            attributes.push(("documents", 1.0));
        }
        let operands = [q, k, v].into_iter().chain(bias).chain(documents);
        if p == 0.0 {
            let operands: Vec<ValueId> = operands.collect();
            return b.composite(call.result, "attention", &attributes, &operands)[0];
        }
        attributes.extend([("p", p), ("salt", salt), ("heads", heads as f64)]);
        attributes.extend(self.bits(p).attribute());
        let operands: Vec<ValueId> = operands.chain([param(b, "key")]).collect();
        b.composite(call.result, "attention_dropout", &attributes, &operands)[0]
    }

    /// Weights of one type below each other.
    fn stack(&self, b: &mut Builder<'_>, call: &Call<'_>) -> ValueId {
        let (count, name) = (self.body.number(call.bare[0]) as usize, call.bare[1]);
        let mut rows = Vec::new();
        for i in 0..count {
            let row = param(b, &format!("{name}{i}"));
            let dims = [Dim::from(1)].into_iter().chain(b.ty(row).dims.clone()).collect();
            rows.push(b.push(
                &format!("{name}{i}_row"),
                Op::Broadcast { new: vec![0], dims },
                &[row],
            ));
        }
        b.push(call.result, Op::Concat { dim: 0 }, &rows)
    }

    /// The bias of ALiBi (Press et al. 2022), `gain · slope_h · j` for head `h` and key `j`. Only
    /// differences between keys count, so that the query's position is left out.
    ///
    /// Slopes are `2^(-max · r / n)`, where n is the number of heads H rounded up to a power of
    /// two, and r counts from 1; where n is not H, even numbers come first, then odd ones.
    ///
    /// Shapes: `[H, N]` for the keys `[B, N, G, D]`.
    fn alibi(&self, b: &mut Builder<'_>, keys: ValueId, max: f64, gain: f64) -> ValueId {
        let heads = self.body.model.size("H");
        let (wide, n) = (self.body.wide(), heads.next_power_of_two());
        let grid = vec![Dim::from(heads), b.ty(keys).dims[1].clone()];
        let head = b.iota("head", 0, DType::I32, grid.clone());
        let number = |b: &mut Builder<'_>, value: f64| b.constant_like("count", value, head);
        let rank = if n == heads {
            let one = number(b, 1.0);
            b.add("rank", head, one)
        } else {
            let (half, twice) = (number(b, (n / 2) as f64), b.add("twice", head, head));
            let (two, back) = (number(b, 2.0), number(b, 1.0 - n as f64));
            let (even, odd) = (b.add("even", twice, two), b.add("odd", twice, back));
            let is_even = b.compare("is_even", Comparison::Lt, head, half);
            b.push("rank", Op::Select, &[is_even, even, odd])
        };
        let rank = b.push("rank_wide", Op::Cast { dtype: wide }, &[rank]);
        let step = b.constant_like("step", -max / n as f64, rank);
        let (exponent, base) = (b.mul("exponent", rank, step), b.constant_like("base", 2.0, rank));
        let slope = b.binary("slope", Binary::Pow, base, exponent);
        let gain = b.constant_like("gain", gain, slope);
        let slope = b.mul("slope_gain", slope, gain);
        let key = b.iota("key", 1, DType::I32, grid);
        let key = b.push("key_wide", Op::Cast { dtype: wide }, &[key]);
        let bias = b.mul("alibi", slope, key);
        b.push("alibi_t", Op::Cast { dtype: self.body.dtype }, &[bias])
    }

    /// Rows of a table. The row of the padding is not trained: its gradient is shut off.
    fn embedding(&self, b: &mut Builder<'_>, call: &Call<'_>) -> ValueId {
        let [table, ids] = call.operands[..] else { panic!("an embedding of a table and ids") };
        let gather = Op::Gather { dim: 0, start: 0 };
        let pad = call.named("pad").map_or(Value::None, |pad| self.body.value(pad));
        let Some(pad) = pad.number() else { return b.push(call.result, gather, &[table, ids]) };
        let rows = b.push("rows", gather, &[table, ids]);
        let padding = b.constant_like("padding", pad, ids);
        let padded = b.compare("is_padding", Comparison::Eq, ids, padding);
        let dims = b.ty(rows).dims.clone();
        let padded = b.push("is_padding_x", Op::Broadcast { new: vec![2], dims }, &[padded]);
        b.composite(call.result, "shut_gradient", &[], &[rows, padded])[0]
    }

    fn rotate(&self, b: &mut Builder<'_>, call: &Call<'_>) -> ValueId {
        let [x, position] = call.operands[..] else { panic!("a rotation of heads and a position") };
        let rope = self.body.value(call.named("rope").unwrap_or("rope"));
        let rotary = rope.rotary().unwrap_or_else(|| panic!("{rope} is no rotary embedding"));
        let name = call.result;
        let size = b.ty(x).dims[3].as_constant().unwrap_or(0) as usize;
        if rotary.dim == size {
            return self.turn(b, name, rotary, x, position);
        }
        let part = |start, size| Op::Slice { dim: 3, start, size };
        let turned = b.push(&format!("{name}_part"), part(0, rotary.dim), &[x]);
        let rest = b.push(&format!("{name}_rest"), part(rotary.dim, size - rotary.dim), &[x]);
        let turned = self.turn(b, &format!("{name}_turned"), rotary, turned, position);
        b.push(name, Op::Concat { dim: 3 }, &[turned, rest])
    }

    fn turn(
        &self,
        b: &mut Builder<'_>,
        name: &str,
        rotary: &Rotary,
        x: ValueId,
        position: ValueId,
    ) -> ValueId {
        let seq = self.body.value("S").size().unwrap_or(1);
        let by_sample = (b.ty(position).ndim() > 0).then_some(("by_sample", 1.0));
        match rotary.angles(seq) {
            Angles::Formula(theta, None) if rotary.gain == 1.0 => {
                let attributes: Vec<_> = [("theta", theta)].into_iter().chain(by_sample).collect();
                b.composite(name, "rope", &attributes, &[x, position])[0]
            }
            Angles::Formula(theta, ramp) => {
                let none = Ramp { offset: 0.0, by_pair: 0.0, by_frequency: 0.0, stretch: 0.0 };
                let ramp = ramp.unwrap_or(none);
                let attributes = [
                    ("theta", theta),
                    ("offset", ramp.offset),
                    ("by_pair", ramp.by_pair),
                    ("by_frequency", ramp.by_frequency),
                    ("stretch", ramp.stretch),
                    ("gain", rotary.gain),
                ];
                let attributes: Vec<_> = attributes.into_iter().chain(by_sample).collect();
                b.composite(name, "rope_scaled", &attributes, &[x, position])[0]
            }
            Angles::Table(table) => self.turn_by(b, name, &table, rotary.gain, [x, position]),
        }
    }

    /// The rotation by frequencies that follow no formula, written out.
    fn turn_by(
        &self,
        b: &mut Builder<'_>,
        name: &str,
        table: &[f64],
        gain: f64,
        [x, position]: [ValueId; 2],
    ) -> ValueId {
        let (x_ty, wide) = (b.ty(x).clone(), self.body.wide());
        let samples = b.ty(position).dims.clone();
        let of_samples = samples.len();
        let grid: Vec<Dim> =
            samples.into_iter().chain([x_ty.dims[1].clone(), Dim::from(table.len())]).collect();
        let row = b.iota("row", of_samples, DType::I32, grid.clone());
        let new = vec![of_samples, of_samples + 1];
        let from = b.push("from", Op::Broadcast { new, dims: grid.clone() }, &[position]);
        let at = b.add("at", row, from);
        let at = b.push("at_wide", Op::Cast { dtype: wide }, &[at]);
        let pair = b.iota("pair", of_samples + 1, DType::I32, grid.clone());
        let ty = TensorType::new(wide, grid);
        let mut frequency = b.constant("frequency", table[0], ty.clone());
        for (i, value) in table.iter().enumerate().skip(1) {
            let i = b.constant_like("i", i as f64, pair);
            let reached = b.compare("reached", Comparison::Le, i, pair);
            let value = b.constant("value", *value, ty.clone());
            frequency = b.push("frequency", Op::Select, &[reached, value, frequency]);
        }
        let angle = b.mul("angle", at, frequency);
        let gain = b.constant("gain", gain, ty);
        let half = vec![
            x_ty.dims[0].clone(),
            x_ty.dims[1].clone(),
            x_ty.dims[2].clone(),
            Dim::from(table.len()),
        ];
        let [cos, sin] = [("cos", Unary::Cos), ("sin", Unary::Sin)].map(|(name, unary)| {
            let wave = b.unary(name, unary, angle);
            let wave = b.mul(&format!("{name}_gain"), wave, gain);
            let wave = b.push(&format!("{name}_t"), Op::Cast { dtype: x_ty.dtype }, &[wave]);
            let new = if of_samples == 0 { vec![0, 2] } else { vec![2] };
            let spread = Op::Broadcast { new, dims: half.clone() };
            b.push(&format!("{name}_x"), spread, &[wave])
        });
        let part = |start| Op::Slice { dim: 3, start, size: table.len() };
        let a = b.push("a", part(0), &[x]);
        let c = b.push("b", part(table.len()), &[x]);
        let (ac, bs) = (b.mul("ac", a, cos), b.mul("bs", c, sin));
        let (bc, as_) = (b.mul("bc", c, cos), b.mul("as", a, sin));
        let left = b.binary("left", Binary::Sub, ac, bs);
        let right = b.add("right", bc, as_);
        b.push(name, Op::Concat { dim: 3 }, &[left, right])
    }
}

/// The parameter of a name.
fn param(b: &Builder<'_>, name: &str) -> ValueId {
    match b.function().find(name) {
        Some(id) => id,
        None => panic!("`@{}` has no value `{name}`", b.function().name),
    }
}

/// A product with the parameter `w` plus, where there is one, the parameter `b` along the last
/// dims.
fn linear(b: &mut Builder<'_>, call: &Call<'_>) -> ValueId {
    let (name, einsum, x) = (call.result, call.bare[0], call.operands[0]);
    let weight = param(b, call.named("w").unwrap_or_default());
    let bias = call.named("b").and_then(|bias| b.function().find(bias));
    let Some(bias) = bias else { return b.contract(name, einsum, x, weight) };
    let product = b.contract(&format!("{name}_0"), einsum, x, weight);
    let wide = b.broadcast_like(&format!("{name}_b"), bias, product);
    b.add(name, product, wide)
}

/// The positions `i32[S]` of the tokens, from 0 on; where there is a `position`, those of each
/// sample from it on, `i32[B, S]`. With `documents`, those in each token's document, `i32[B, S]`.
fn positions(b: &mut Builder<'_>, tokens: ValueId) -> ValueId {
    let dims = b.ty(tokens).dims.clone();
    if let Some(documents) = b.function().find(DOCUMENTS) {
        let row = b.iota("row", 1, DType::I32, dims);
        return b.binary("at", Binary::Sub, row, documents);
    }
    let Some(position) = b.function().find("position") else {
        return b.iota("row", 0, DType::I32, vec![dims[1].clone()]);
    };
    let row = b.iota("row", 1, DType::I32, dims.clone());
    let from = b.push("from", Op::Broadcast { new: vec![1], dims }, &[position]);
    b.add("at", row, from)
}
