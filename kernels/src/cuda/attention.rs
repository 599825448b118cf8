//! Attention: one warp per query, and for the gradients of keys and values one warp per key.
//!
//! Legend: B batch, S queries, T keys, H query heads, G key-value heads, D head dim.
//!
//! Versions:
//! 1. scores of 32 keys at a time, one per lane; the gradient recomputes them three times (dQ; dK
//!    and dV; the bias).

use std::fmt;

use ir::DType;
use ir::random::SHARED_DRAWS;

use super::draws::DrawNumber;
use super::parameter::Parameter;
use super::text::{Text, element, line, number};
use crate::kernel::Attention;

/// Threads of a block.
pub(super) const THREADS: u32 = 128;
/// Warps of a block.
pub(super) const WARPS: u32 = THREADS / 32;

/// A part of the work of attention.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionTile {
    /// What is computed.
    pub attention: Attention,
    /// Which part.
    pub part: Part,
}

/// A part of the work of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The result and `lse`.
    Forward,
    /// `delta`: for each query the dot product of the result with its gradient; and a zero for the
    /// counters of turns of each tile of queries.
    Delta {
        /// Queries of a tile.
        tile: usize,
        /// Counters of a tile.
        counters: usize,
    },
    /// The gradient of queries, and `delta` where it was not computed before.
    Queries,
    /// The gradients of keys and values.
    Keys,
    /// The gradient of the bias.
    Bias,
}

/// For each of batch, heads and queries, the elements of the bias along it.
pub(super) fn bias_sizes(a: &Attention) -> [usize; 3] {
    let strides = a.bias.unwrap_or_default();
    let sizes = [a.batch, a.heads, a.queries];
    std::array::from_fn(|at| if strides[at] > 0 { sizes[at] } else { 1 })
}

/// Elements of the bias.
pub(super) fn bias_elements(a: &Attention) -> usize {
    bias_sizes(a).iter().product::<usize>() * a.keys
}

/// Names of the buffers.
pub(super) struct Names {
    pub(super) q: String,
    pub(super) k: String,
    pub(super) v: String,
    pub(super) bias: Option<String>,
    pub(super) documents: Option<String>,
    pub(super) key: Option<String>,
    pub(super) position: Option<String>,
    pub(super) out: String,
    pub(super) lse: Option<String>,
    pub(super) dout: String,
    pub(super) grads: Vec<String>,
    /// Of `delta`, and on tensor cores of the sums of dQ and of whose turn it is to add.
    pub(super) workspaces: Vec<String>,
}

impl Names {
    pub(super) fn of(a: &Attention, part: Part, parameters: &[Parameter]) -> Names {
        let mut names = parameters.iter().map(Parameter::name);
        let mut next = || names.next().unwrap_or_default();
        let (q, k, v) = (next(), next(), next());
        let bias = a.bias.map(|_| next());
        let documents = a.documents.map(|_| next());
        if part == Part::Forward {
            let key = a.dropout.as_ref().map(|_| next());
            let position = a.position.then(&mut next);
            let (out, lse) = (next(), (!a.position).then(&mut next));
            let (dout, grads, workspaces) = (String::new(), Vec::new(), Vec::new());
            return Names {
                q,
                k,
                v,
                bias,
                documents,
                key,
                position,
                out,
                lse,
                dout,
                grads,
                workspaces,
            };
        }
        let (out, lse, dout) = (next(), Some(next()), next());
        let key = a.dropout.as_ref().map(|_| next());
        let grads = (0..3 + usize::from(a.bias.is_some() && a.bias_grad)).map(|_| next()).collect();
        let (position, workspaces) = (None, names.collect());
        Names { q, k, v, bias, documents, key, position, out, lse, dout, grads, workspaces }
    }
}

/// The address of the row of `D` numbers of a batch, a query or key, and a head.
pub(super) fn row_of(name: &str, strides: [usize; 3], batch: &str, at: &str, head: &str) -> String {
    let [b, s, h] = strides;
    format!("{name} + (u64){batch} * {b} + (u64){at} * {s} + (u64){head} * {h}")
}

/// The number of a tile of `size` queries of head `h` of sample `b`, among all.
pub(super) fn tile_of_queries(a: &Attention, size: usize, tile: &str) -> String {
    format!("(b * {} + h) * {} + {tile}", a.heads, a.queries.div_ceil(size))
}

/// Whether query `s` and key `j`, which are there, are of one document, as an expression; none
/// where there are no documents.
pub(super) fn is_together(a: &Attention, names: &Names) -> Option<String> {
    let (name, start, tokens) = (names.documents.as_ref()?, a.documents?, a.keys);
    let of = |token: &str| format!("{name}[(u64)b * {tokens} + {token}]");
    let own = if start == 0 { "(u64)s".to_owned() } else { format!("(u64)s + {start}") };
    Some(format!("{} == {}", of(&own), of("(u64)j")))
}

/// Prints the stream and sample of dropout and, where no launch passes a position, the `offset` of
/// queries among keys.
pub(super) fn print_scalars(a: &Attention, names: &Names, text: &mut Text) {
    if let (Some(key), Some(d)) = (&names.key, &a.dropout) {
        line!(text, "const u64 stream = stream_of({key}, {}u);", d.salt);
        line!(text, "const u64 sample = (u64){key}[3] + (u64)sample_offset;");
    }
    if names.position.is_none() {
        line!(text, "const i64 offset = query_offset;");
    }
}

/// Prints the `offset` of the queries of sample `b` among keys, where a launch passes a position.
pub(super) fn print_offset(names: &Names, text: &mut Text) {
    if let Some(position) = &names.position {
        line!(text, "const i64 offset = query_offset + {position}[b];");
    }
}

/// Prints `g`: the key-value head of a query head.
pub(super) fn print_head(a: &Attention, head: &str, text: &mut Text) {
    line!(text, "const u64 g = ({head} + (u64)head_offset) / {};", a.group);
}

/// Prints `kept`: the factor of dropout of the weight of query `s` and a key, whose number is the
/// sum of three: of a multiple of 16, of the thread's first key from there, and of a step between
/// its keys, which has no bit in common with that.
pub(super) fn print_kept(a: &Attention, [first, own, step]: [&str; 3], text: &mut Text) {
    let dtype = a.dtype.accumulation();
    let compute = element(dtype);
    let Some(d) = &a.dropout else {
        line!(text, "const {compute} kept = {};", number(dtype, 1.0));
        return;
    };
    line!(
        text,
        "const u64 drawn = (((sample + b) * {}ULL + (u64)head_base + h) * {}ULL + (u64)query_base \
         + s) * {}ULL + (u64)key_base + (u64)({first});",
        d.heads_total,
        d.queries_total,
        d.keys_total
    );
    let (p, scale) = (number(DType::F32, d.p), number(dtype, 1.0 / (1.0 - d.p)));
    let zero = number(dtype, 0.0);
    let is_aligned = [d.keys_total, d.key_base].iter().all(|number| number % SHARED_DRAWS == 0);
    let draw = DrawNumber { row: "drawn", col: own, step, is_aligned }.draw(d.bits, "stream");
    line!(text, "const {compute} kept = {draw} >= {p} ? {scale} : {zero};");
}

impl AttentionTile {
    pub(super) fn print(&self, parameters: &[Parameter], text: &mut Text) {
        let names = Names::of(&self.attention, self.part, parameters);
        print_scalars(&self.attention, &names, text);
        match self.part {
            Part::Forward => self.print_forward(&names, text),
            Part::Delta { tile, counters } => {
                self.print_query(&names, text);
                self.print_delta(&names, text);
                let place = tile_of_queries(&self.attention, tile, &format!("s / {tile}"));
                let (is_counter, place) = match counters {
                    1 => ("lane == 0".to_owned(), place),
                    _ => (format!("lane < {counters}"), format!("({place}) * {counters} + lane")),
                };
                let turns = &names.workspaces[2];
                line!(text, "if ({is_counter} && s % {tile} == 0) {turns}[{place}] = 0;");
            }
            Part::Queries => self.print_queries(&names, text),
            Part::Keys => self.print_keys(&names, text),
            Part::Bias => self.print_bias(&names, text),
        }
    }

    fn dtype(&self) -> DType {
        self.attention.dtype.accumulation()
    }

    fn compute(&self) -> &'static str {
        element(self.dtype())
    }

    /// Numbers of a head that a lane holds.
    fn held(&self) -> usize {
        self.attention.dim.div_ceil(32).max(1)
    }

    /// Finds the warp's query, and what it sees.
    fn print_query(&self, names: &Names, text: &mut Text) {
        let Attention { batch, heads, queries, .. } = self.attention;
        line!(text, "const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;");
        line!(text, "const u64 item = (u64)blockIdx.x * {WARPS} + warp;");
        line!(text, "if (item >= {}) return;", batch * heads * queries);
        line!(text, "const u64 b = item / {}, h = item / {queries} % {heads};", heads * queries);
        line!(text, "const u64 s = item % {queries};");
        print_head(&self.attention, "h", text);
        print_offset(names, text);
        self.print_visible(text);
    }

    /// Prints the keys that query `s` sees.
    fn print_visible(&self, text: &mut Text) {
        let Attention { causal, window, keys, .. } = self.attention;
        if !causal {
            line!(text, "const i64 begin = 0, end = {keys};");
            return;
        }
        line!(text, "i64 end = (i64)s + offset + 1;");
        line!(text, "end = end < 0 ? 0 : end > {keys} ? {keys} : end;");
        if window == 0 {
            line!(text, "const i64 begin = 0;");
        } else {
            line!(text, "i64 begin = (i64)s + offset + 1 - {window};");
            line!(text, "begin = begin < 0 ? 0 : begin > end ? end : begin;");
        }
    }

    /// Whether the warp's query sees key `j`, from `begin` on, as an expression.
    fn seen_before_end(&self, names: &Names) -> String {
        match is_together(&self.attention, names) {
            Some(together) => format!("j < end && {together}"),
            None => "j < end".to_owned(),
        }
    }

    /// Prints the dot product of two rows of `D` numbers.
    fn print_dot(&self, name: &str, [x, y]: [&str; 2], text: &mut Text) {
        let (compute, dim) = (self.compute(), self.attention.dim);
        line!(text, "{compute} {name} = 0;");
        line!(text, "for (u32 d = 0; d < {dim}; d += 1) {{");
        line!(
            text,
            "{name} = fma_of(Load<{compute}>::of({x}[d]), Load<{compute}>::of({y}[d]), {name});"
        );
        text.end();
    }

    /// Prints `score` of query `s` and key `j`, and before it `capped`, without the bias.
    fn print_score(&self, names: &Names, text: &mut Text) {
        let Attention { scale, softcap, bias, .. } = self.attention;
        self.print_dot("product", ["q", "(k_row)"], text);
        let dtype = self.dtype();
        line!(text, "{} capped = product * {};", self.compute(), number(dtype, scale));
        if softcap != 0.0 {
            let cap = number(dtype, softcap);
            line!(text, "capped = {cap} * tanh_of(capped / {cap});");
        }
        match (bias, &names.bias) {
            (Some([b, h, s]), Some(name)) => {
                let place = format!("(u64)b * {b} + (u64)h * {h} + (u64)s * {s} + (u64)j");
                line!(text, "score = capped + Load<{}>::of({name}[{place}]);", self.compute());
            }
            _ => line!(text, "score = capped;"),
        }
    }

    fn print_forward(&self, names: &Names, text: &mut Text) {
        let (a, dtype, compute) = (&self.attention, self.dtype(), self.compute());
        let (memory, held) = (element(a.dtype), self.held());
        let lowest = number(dtype, f64::NEG_INFINITY);
        line!(text, "SHARED({compute}, weights, {THREADS});");
        self.print_query(names, text);
        line!(text, "const {memory}* q = {};", row_of(&names.q, a.q, "b", "s", "h"));
        line!(text, "const {memory}* k = {};", row_of(&names.k, a.k, "b", "0", "g"));
        line!(text, "const {memory}* v = {};", row_of(&names.v, a.v, "b", "0", "g"));
        line!(text, "{compute} most = {lowest}, sum = 0, sums[{held}] = {{}};");
        line!(text, "for (i64 first = begin; first < end; first += 32) {{");
        line!(text, "const i64 j = first + lane;");
        line!(text, "{compute} score = {lowest};");
        line!(text, "if ({}) {{", self.seen_before_end(names));
        line!(text, "const {memory}* k_row = k + j * {};", a.k[1]);
        self.print_score(names, text);
        text.end();
        line!(text, "{compute} top = larger(most, score);");
        line!(
            text,
            "for (int bits = 16; bits > 0; bits /= 2) top = larger(top, shuffle_xor(top, bits));"
        );
        line!(text, "const {compute} factor = top == {lowest} ? 1 : exp_of(most - top);");
        line!(text, "{compute} weight = score == {lowest} ? 0 : exp_of(score - top);");
        line!(text, "most = top;");
        line!(text, "sum = sum * factor + weight;");
        if a.dropout.is_some() {
            print_kept(&self.attention, ["0", "j", "0"], text);
            line!(text, "weight = weight * kept;");
        }
        line!(text, "weights[threadIdx.x] = weight;");
        line!(text, "sync_warp();");
        line!(text, "for (u32 i = 0; i < {held}; i += 1) sums[i] = sums[i] * factor;");
        line!(text, "for (u32 t = 0; t < 32 && first + t < end; t += 1) {{");
        self.print_add(
            "sums",
            "weights[warp * 32 + t]",
            &format!("v + (first + t) * {}", a.v[1]),
            text,
        );
        text.end();
        line!(text, "sync_warp();");
        text.end();
        line!(text, "for (int bits = 16; bits > 0; bits /= 2) sum = sum + shuffle_xor(sum, bits);");
        line!(text, "{memory}* out = {};", row_of(&names.out, a.out, "b", "s", "h"));
        self.print_row("out", "sum > 0 ? sums[i] / sum : 0", text);
        if let Some(lse) = &names.lse {
            line!(text, "if (lane == 0) {lse}[item] = sum > 0 ? most + log_of(sum) : {lowest};");
        }
    }

    /// Adds a row of `D` numbers times a factor to what lanes hold.
    fn print_add(&self, sums: &str, factor: &str, row: &str, text: &mut Text) {
        let (compute, memory) = (self.compute(), element(self.attention.dtype));
        line!(text, "const {compute} {sums}_factor = {factor};");
        line!(text, "const {memory}* {sums}_row = {row};");
        line!(text, "for (u32 i = 0; i < {}; i += 1) {{", self.held());
        line!(text, "const u32 d = i * 32 + lane;");
        line!(
            text,
            "if (d < {}) {sums}[i] = fma_of({sums}_factor, Load<{compute}>::of({sums}_row[d]), \
             {sums}[i]);",
            self.attention.dim
        );
        text.end();
    }

    /// Writes what lanes hold as a row of `D` numbers.
    fn print_row(&self, target: &str, value: &str, text: &mut Text) {
        line!(text, "for (u32 i = 0; i < {}; i += 1) {{", self.held());
        line!(text, "const u32 d = i * 32 + lane;");
        let memory = element(self.attention.dtype);
        line!(
            text,
            "if (d < {}) {target}[d] = Store<{memory}>::of(({})({value}));",
            self.attention.dim,
            self.compute()
        );
        text.end();
    }

    /// Prints `weight` of a pair that is seen, after dropout, and `slope`, the gradient of its
    /// score before it was capped and scaled; `raised` is that of the biased score.
    fn print_slopes(&self, names: &Names, text: &mut Text) {
        let (a, dtype, compute) = (&self.attention, self.dtype(), self.compute());
        line!(text, "{compute} score = 0;");
        self.print_score(names, text);
        self.print_dot("dot", ["dout_row", "(v_row)"], text);
        print_kept(&self.attention, ["0", "j", "0"], text);
        line!(text, "const {compute} share = exp_of(score - lse_of);");
        line!(text, "weight = share * kept;");
        line!(text, "raised = share * (dot * kept - delta);");
        let cap = if a.softcap == 0.0 {
            String::new()
        } else {
            let cap = number(dtype, a.softcap);
            format!(" * (1 - (capped / {cap}) * (capped / {cap}))")
        };
        line!(text, "slope = raised{cap} * {};", number(dtype, a.scale));
    }

    /// Prints `delta` of query `s`, into the workspace too, and `dout_row`.
    fn print_delta(&self, names: &Names, text: &mut Text) {
        let (a, compute, memory) = (&self.attention, self.compute(), element(self.attention.dtype));
        for (name, buffer) in [("out", &names.out), ("dout_row", &names.dout)] {
            line!(text, "const {memory}* {name} = {};", row_of(buffer, a.out, "b", "s", "h"));
        }
        line!(text, "{compute} delta = 0;");
        line!(text, "for (u32 d = lane; d < {}; d += 32) {{", a.dim);
        line!(
            text,
            "delta = fma_of(Load<{compute}>::of(dout_row[d]), Load<{compute}>::of(out[d]), delta);"
        );
        text.end();
        line!(
            text,
            "for (int bits = 16; bits > 0; bits /= 2) delta = delta + shuffle_xor(delta, bits);"
        );
        line!(text, "if (lane == 0) {}[item] = delta;", names.workspaces[0]);
    }

    fn print_queries(&self, names: &Names, text: &mut Text) {
        let (a, dtype, compute) = (&self.attention, self.dtype(), self.compute());
        let (memory, held) = (element(a.dtype), self.held());
        let lse = names.lse.as_deref().unwrap_or_default();
        line!(text, "SHARED({compute}, slopes, {THREADS});");
        self.print_query(names, text);
        line!(text, "const {memory}* q = {};", row_of(&names.q, a.q, "b", "s", "h"));
        line!(text, "const {memory}* k = {};", row_of(&names.k, a.k, "b", "0", "g"));
        line!(text, "const {memory}* v = {};", row_of(&names.v, a.v, "b", "0", "g"));
        self.print_delta(names, text);
        line!(text, "const {compute} lse_of = {lse}[item];");
        line!(text, "const bool is_empty = lse_of == {};", number(dtype, f64::NEG_INFINITY));
        line!(text, "{compute} sums[{held}] = {{}};");
        line!(text, "for (i64 first = begin; first < end && !is_empty; first += 32) {{");
        line!(text, "const i64 j = first + lane;");
        line!(text, "{compute} weight = 0, slope = 0, raised = 0;");
        line!(text, "if ({}) {{", self.seen_before_end(names));
        line!(text, "const {memory}* k_row = k + j * {};", a.k[1]);
        line!(text, "const {memory}* v_row = v + j * {};", a.v[1]);
        self.print_slopes(names, text);
        text.end();
        line!(text, "slopes[threadIdx.x] = slope;");
        line!(text, "sync_warp();");
        line!(text, "for (u32 t = 0; t < 32 && first + t < end; t += 1) {{");
        self.print_add(
            "sums",
            "slopes[warp * 32 + t]",
            &format!("k + (first + t) * {}", a.k[1]),
            text,
        );
        text.end();
        line!(text, "sync_warp();");
        text.end();
        line!(text, "{memory}* dq = {};", row_of(&names.grads[0], a.q, "b", "s", "h"));
        self.print_row("dq", "sums[i]", text);
    }

    fn print_keys(&self, names: &Names, text: &mut Text) {
        let (a, compute) = (&self.attention, self.compute());
        let Attention { batch, heads, queries, keys, kv_heads, .. } = *a;
        let (memory, held) = (element(a.dtype), self.held());
        line!(text, "SHARED({compute}, slopes, {THREADS});");
        line!(text, "SHARED({compute}, weights, {THREADS});");
        line!(text, "const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;");
        line!(text, "const u64 item = (u64)blockIdx.x * {WARPS} + warp;");
        line!(text, "if (item >= {}) return;", batch * kv_heads * keys);
        line!(text, "const u64 b = item / {}, own = item / {keys} % {kv_heads};", kv_heads * keys);
        line!(text, "const i64 j = (i64)(item % {keys});");
        line!(text, "const {memory}* k_row = {};", row_of(&names.k, a.k, "b", "j", "own"));
        line!(text, "const {memory}* v_row = {};", row_of(&names.v, a.v, "b", "j", "own"));
        line!(text, "{compute} dk_sums[{held}] = {{}}, dv_sums[{held}] = {{}};");
        line!(text, "for (u64 h = 0; h < {heads}; h += 1) {{");
        print_head(&self.attention, "h", text);
        line!(text, "if (g != own) continue;");
        line!(text, "for (u64 first = 0; first < {queries}; first += 32) {{");
        line!(text, "const u64 s = first + lane;");
        line!(text, "{compute} weight = 0, slope = 0, raised = 0;");
        line!(text, "if (s < {queries}) {{");
        self.print_pair(names, text);
        text.end();
        line!(text, "slopes[threadIdx.x] = slope;");
        line!(text, "weights[threadIdx.x] = weight;");
        line!(text, "sync_warp();");
        line!(text, "for (u32 t = 0; t < 32 && first + t < {queries}; t += 1) {{");
        let row = |name: &str, strides| row_of(name, strides, "b", "(first + t)", "h");
        self.print_add("dk_sums", "slopes[warp * 32 + t]", &row(&names.q, a.q), text);
        self.print_add("dv_sums", "weights[warp * 32 + t]", &row(&names.dout, a.out), text);
        text.end();
        line!(text, "sync_warp();");
        text.end();
        text.end();
        line!(text, "{memory}* dk = {};", row_of(&names.grads[1], a.k, "b", "j", "own"));
        line!(text, "{memory}* dv = {};", row_of(&names.grads[2], a.v, "b", "j", "own"));
        self.print_row("dk", "dk_sums[i]", text);
        self.print_row("dv", "dv_sums[i]", text);
    }

    /// Prints the slopes of query `s` and key `j`, if it sees that.
    fn print_pair(&self, names: &Names, text: &mut Text) {
        let (a, dtype, compute) = (&self.attention, self.dtype(), self.compute());
        let memory = element(a.dtype);
        let lse = names.lse.as_deref().unwrap_or_default();
        self.print_visible(text);
        let row = format!("(b * {} + h) * {} + s", a.heads, a.queries);
        line!(text, "const {compute} lse_of = {lse}[{row}];");
        let lowest = number(dtype, f64::NEG_INFINITY);
        let seen = self.seen_before_end(names);
        line!(text, "if (begin <= j && {seen} && lse_of != {lowest}) {{");
        line!(text, "const {compute} delta = {}[{row}];", names.workspaces[0]);
        line!(text, "const {memory}* q = {};", row_of(&names.q, a.q, "b", "s", "h"));
        line!(text, "const {memory}* dout_row = {};", row_of(&names.dout, a.out, "b", "s", "h"));
        self.print_slopes(names, text);
        text.end();
    }

    fn print_bias(&self, names: &Names, text: &mut Text) {
        let (a, compute) = (&self.attention, self.compute());
        let ([batch, heads, queries], keys) = (bias_sizes(a), a.keys);
        let memory = element(a.dtype);
        line!(text, "const u64 item = (u64)blockIdx.x * {THREADS} + threadIdx.x;");
        line!(text, "if (item >= {}) return;", bias_elements(a));
        line!(text, "const i64 j = (i64)(item % {keys});");
        line!(text, "const u64 at_s = item / {keys} % {queries};");
        line!(text, "const u64 at_h = item / {} % {heads};", keys * queries);
        line!(text, "const u64 at_b = item / {};", keys * queries * heads);
        line!(text, "{compute} sum = 0;");
        let all = [("b", batch, a.batch), ("h", heads, a.heads), ("s", queries, a.queries)];
        for (name, own, size) in all {
            // Along what the bias is the same for, all are summed.
            let (first, end) = match own {
                1 => ("0".to_owned(), size.to_string()),
                _ => (format!("at_{name}"), format!("at_{name} + 1")),
            };
            line!(text, "for (u64 {name} = {first}; {name} < {end}; {name} += 1) {{");
        }
        print_head(&self.attention, "h", text);
        line!(text, "const {memory}* k_row = {};", row_of(&names.k, a.k, "b", "j", "g"));
        line!(text, "const {memory}* v_row = {};", row_of(&names.v, a.v, "b", "j", "g"));
        line!(text, "{compute} weight = 0, slope = 0, raised = 0;");
        self.print_pair(names, text);
        line!(text, "sum = sum + raised;");
        (0..3).for_each(|_| text.end());
        let [b, h, s] = a.bias.unwrap_or_default();
        let place = format!("at_b * {b} + at_h * {h} + at_s * {s} + (u64)j");
        line!(text, "{}[{place}] = Store<{memory}>::of(sum);", names.grads[3]);
    }
}

impl fmt::Display for AttentionTile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.part {
            Part::Delta { .. } => "one warp per query",
            Part::Forward | Part::Queries => "one warp per query, one lane per key",
            Part::Keys => "one warp per key, one lane per query",
            Part::Bias => "one thread per element of the bias",
        })
    }
}
