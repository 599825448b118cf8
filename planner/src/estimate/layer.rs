//! From items to seconds and bytes on one rank: which kernels a profile launches for an item, and
//! what they cost when the item is cut.
//!
//! Activations follow Korthikanti et al. 2022, section 4, item by item; each is said where it is
//! counted. Legend: T tokens of a micro-batch on one rank, e bytes of an element.

mod adapter;
mod any;
mod attention;
mod experts;
mod update;
#[cfg(test)]
mod tests;

pub(super) use any::words_of_rank;

use super::Job;
use super::network::{Group, INNER_INTERFERENCE, Network};
use super::price::{Inside, LayerPrice, Moments, Pass};
use super::profile::{Profile, Selective};
use super::rates::{Arithmetic, Rates, StoredOperands};
use super::workload::{Cut, Frozen, Item};

/// What items are lowered with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lowering<'a> {
    pub(super) rates: &'a Rates,
    pub(super) network: &'a Network,
    pub(super) profile: &'a Profile,
    pub(super) job: &'a Job,
    pub(super) inside: Inside,
    pub(super) seq: f64,
    pub(super) weights: Weights,
}

/// How weights lie that products read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Weights {
    /// Bytes of an element.
    pub(super) bytes: f64,
    /// Whether grouped products take longer than as many products alone ([`GROUPED`]), and rows
    /// are cast to one-byte floats by kernels of their own.
    pub(super) of_training: bool,
    /// What is frozen; none where all weights are trained.
    pub(super) frozen: Option<Frozen>,
}

impl Weights {
    /// Those of a step of training.
    pub(super) fn trained(arithmetic: Arithmetic, frozen: Option<Frozen>) -> Weights {
        Weights { bytes: arithmetic.operand_bytes(), of_training: true, frozen }
    }

    fn stored(&self) -> StoredOperands {
        StoredOperands { weight_bytes: self.bytes, casts_rows: self.of_training }
    }
}

/// How sharply the slower one of host and device decides: they run beside each other, and a queue
/// between them evens out what one kernel lacks.
const QUEUE: f64 = 10.0;

/// The two passes of an item, with what each makes the host do.
#[derive(Clone, Copy, Debug, Default)]
struct Lowered {
    forward: Pass,
    backward: Pass,
    weight_s: f64,
    forward_launches: f64,
    backward_launches: f64,
    saved: f64,
    saved_attention: f64,
    put_off: [f64; 2],
    working: f64,
    room: f64,
    freed: f64,
    late: f64,
    result: f64,
    parameters: [f64; 2],
    moments: Moments,
    /// Bytes of frozen weights: dense ones, and those of experts.
    frozen: [f64; 2],
    tensors: f64,
}

impl Lowered {
    /// Adds the passes, bytes and parameters of an item that runs after these.
    fn add(&mut self, part: &Lowered) {
        self.forward += part.forward;
        self.backward += part.backward;
        self.weight_s += part.weight_s;
        self.forward_launches += part.forward_launches;
        self.backward_launches += part.backward_launches;
        self.saved += part.saved;
        self.late += part.late;
        self.tensors += part.tensors;
        self.moments += part.moments;
        for at in 0..2 {
            self.put_off[at] += part.put_off[at];
            self.parameters[at] += part.parameters[at];
            self.frozen[at] += part.frozen[at];
        }
    }
}

/// What selective recomputation recomputes, and does not keep.
#[derive(Clone, Copy, Debug, Default)]
struct Again {
    pass: Pass,
    launches: f64,
    dropped_bytes: f64,
    kept_bytes: f64,
}

impl Again {
    fn add(&mut self, selective: Selective, item: &Item, part: &Lowered) {
        let is_attention = matches!(item, Item::Attention { .. } | Item::Mixing { .. });
        match selective {
            Selective::Attention if is_attention => {
                self.pass += part.forward;
                self.launches += part.forward_launches;
                self.dropped_bytes += part.saved_attention;
            }
            Selective::Operations if !is_attention => {
                // The result of every second product stays; so do sums over ranks, but not what
                // is gathered.
                self.pass += Pass {
                    products_s: part.forward.products_s / 2.0,
                    tensor_s: part.forward.tensor_s / 2.0,
                    ..part.forward
                };
                self.launches += part.forward_launches;
                self.kept_bytes += part.result / 2.0;
            }
            Selective::Operations => self.kept_bytes += part.result,
            Selective::Attention => {}
        }
    }
}

/// How long a device waits for a host that needs `host_s` to give it the work of a pass.
/// A host that waits for each kernel does nothing beside it.
fn dispatch_s(pass: &Pass, host_s: f64, is_blocking: bool) -> f64 {
    let device_s = pass.total_s();
    if is_blocking {
        return host_s;
    }
    let both = (device_s.powf(QUEUE) + host_s.powf(QUEUE)).powf(1.0 / QUEUE);
    (both - device_s).max(0.0)
}

/// Items that were lowered with the same rest: layers of two kinds have most of theirs in common.
#[derive(Debug, Default)]
pub(super) struct KnownItems(Vec<(Item, Lowered)>);

impl Lowering<'_> {
    /// The price of items that run one after another. `width` is that of their input.
    pub(super) fn price(&self, items: &[Item], width: u32) -> LayerPrice {
        self.price_knowing(&mut KnownItems::default(), items, width)
    }

    /// The price of items that run one after another; those in `known` are not lowered again.
    pub(super) fn price_knowing(
        &self,
        known: &mut KnownItems,
        items: &[Item],
        width: u32,
    ) -> LayerPrice {
        let mut sum = Lowered::default();
        let mut recomputed = Again::default();
        let [mut working, mut room, mut freed] = [0.0f64; 3];
        for (at, item) in items.iter().enumerate() {
            let lowered =
                known.0.iter().find(|(other, _)| other == item).map(|(_, lowered)| *lowered);
            let part = lowered.unwrap_or_else(|| self.item_updated(item));
            if lowered.is_none() {
                known.0.push((*item, part));
            }
            recomputed.add(self.profile.selective, item, &part);
            sum.add(&part);
            sum.saved += self.kept_result(items, at, &part);
            sum.saved -= self.row_result(items, at, &part);
            working = working.max(part.working);
            room = room.max(part.room);
            freed = freed.max(part.freed);
        }
        let input_bytes = self.stream_tokens() * f64::from(width) * self.e();
        if self.profile.selective == Selective::Operations {
            recomputed.dropped_bytes = (sum.saved - recomputed.kept_bytes - input_bytes).max(0.0);
        }
        let host = self.profile.host;
        let wait = |mut pass: Pass, launches: f64, each_s: f64| {
            let host_s = launches * host.operations * each_s;
            pass.dispatch_s += dispatch_s(&pass, host_s, host.is_blocking);
            pass
        };
        // Ranks that share collectives wait for whichever host is late.
        let slower = host.polling_share * self.tp();
        let late = |device: &Pass, pass: &Pass, launches: f64, each_s: f64| {
            let host_s = launches * host.operations * each_s * (1.0 + slower);
            let waits_s = dispatch_s(device, host_s, host.is_blocking);
            (waits_s - (pass.dispatch_s - device.dispatch_s)).max(0.0)
        };
        let forward = wait(sum.forward, sum.forward_launches, host.forward_s);
        let backward = wait(sum.backward, sum.backward_launches, host.backward_s);
        LayerPrice {
            forward,
            backward,
            forward_late_s: late(&sum.forward, &forward, sum.forward_launches, host.forward_s),
            backward_late_s: late(&sum.backward, &backward, sum.backward_launches, host.backward_s),
            weight_s: sum.weight_s,
            attention_again: wait(recomputed.pass, recomputed.launches, host.forward_s),
            forward_again: forward,
            saved_bytes: sum.saved,
            saved_attention_bytes: recomputed.dropped_bytes,
            put_off_bytes: sum.put_off,
            tensors: sum.tensors,
            moments: sum.moments,
            frozen_bytes: sum.frozen,
            input_bytes,
            working_bytes: working,
            room_bytes: room,
            freed_bytes: freed,
            late_bytes: sum.late,
            parameters: sum.parameters[0],
            expert_parameters: sum.parameters[1],
        }
    }

    /// Bytes of the input that a product or an adapter keeps, where that is the result of a norm or
    /// of a gate, which is recomputed.
    fn row_result(&self, items: &[Item], at: usize, part: &Lowered) -> f64 {
        let is_row = |item: Option<&Item>| {
            matches!(item, Some(Item::Norm { .. } | Item::Activation { gated: true, .. }))
        };
        let is_product = |item: &Item| matches!(item, Item::Product { .. } | Item::Adapter { .. });
        let before = &items[..at];
        if !self.profile.recomputes_rows {
            return 0.0;
        }
        if matches!(items[at], Item::Product { .. }) && is_row(before.last()) {
            return part.saved;
        }
        let Item::Adapter { k, .. } = items[at] else { return 0.0 };
        if is_row(before.iter().rfind(|item| !is_product(item))) {
            (self.stream_tokens() * f64::from(k) * self.e()).min(part.saved)
        } else {
            0.0
        }
    }

    /// Tokens of a micro-batch that a rank's products see.
    fn tokens(&self) -> f64 {
        f64::from(self.inside.microbatch) * self.seq / f64::from(self.inside.cp)
    }

    /// Tokens of a micro-batch that a rank holds between products.
    fn stream_tokens(&self) -> f64 {
        let cut = if self.inside.sequence_parallel { self.tp() } else { 1.0 };
        self.tokens() / cut
    }

    fn tp(&self) -> f64 {
        f64::from(self.inside.tp)
    }

    /// Bytes of an element of an activation.
    fn e(&self) -> f64 {
        self.job.arithmetic.element_bytes()
    }

    fn tensor_group(&self) -> Group {
        self.inside.tp_group
    }

    fn rows(&self, bytes: f64) -> Pass {
        Pass { rows_s: self.rates.rows_s(bytes), ..Pass::default() }
    }

    /// An item with the moments of its parameters, and with its products' inputs as they are kept.
    fn item_updated(&self, item: &Item) -> Lowered {
        let mut lowered = self.item(item);
        if self.weights.frozen.is_some() {
            self.freeze(item, &mut lowered);
        }
        lowered.moments = self.moments(item, lowered.parameters);
        let saved_bytes = self.profile.stated.saved_bytes.filter(|_| self.weights.of_training);
        if let (Some(bytes), Item::Product { .. }) = (saved_bytes, item) {
            self.keep_narrow(&mut lowered, bytes);
        }
        lowered
    }

    /// Keeps a product's input with `bytes` bytes an element: cast forward, and back for the
    /// gradient of the weight.
    fn keep_narrow(&self, lowered: &mut Lowered, bytes: f64) {
        let stored = self.e().min(self.job.arithmetic.operand_bytes());
        if bytes >= stored || lowered.saved == 0.0 {
            return;
        }
        let elements = lowered.saved / stored;
        lowered.saved = elements * bytes;
        lowered.forward += self.rows(elements * (self.e() + bytes));
        lowered.backward += self.rows(elements * (self.e() + bytes));
        lowered.forward_launches += 1.0;
        lowered.backward_launches += 1.0;
    }

    fn item(&self, item: &Item) -> Lowered {
        match *item {
            Item::Norm { width, parameters, heads } => self.norm([width, parameters], heads),
            Item::Product { k, n, cut, bias } => self.product(k, n, cut, bias),
            Item::Attention { .. } => self.attention(item),
            Item::Rope { width } => self.rope(width),
            Item::Activation { width, gated } => self.activation(width, gated),
            Item::Residual { width } => self.residual(width),
            Item::Experts { .. } => self.experts(item),
            Item::Embedding { vocab, width, positions } => self.embedding(vocab, width, positions),
            Item::Loss { vocab } => self.loss(vocab),
            Item::Rows { .. } => self.any_rows(item),
            Item::Contraction { .. } => self.contraction(item),
            Item::Mixing { .. } => self.mixing(item),
            Item::Exchange { elements } => self.exchange(elements),
            Item::Adapter { .. } => self.adapter(item),
        }
    }

    /// Keeps its input: 2 bytes an element.
    fn norm(&self, [width, parameters]: [u32; 2], is_of_heads: bool) -> Lowered {
        let elements = if is_of_heads {
            self.tokens() * f64::from(width) / self.tp()
        } else {
            self.stream_tokens() * f64::from(width)
        };
        let kernels = if self.profile.fused_norm { 1.0 } else { 6.0 };
        Lowered {
            forward: self.rows(elements * 2.0 * self.e()) * kernels,
            backward: self.rows(elements * 3.0 * self.e()) * kernels
                + self.rows(elements * 2.0 * self.e()),
            forward_launches: kernels,
            backward_launches: kernels + 1.0,
            saved: elements * self.e(),
            parameters: [f64::from(parameters), 0.0],
            tensors: (f64::from(parameters) / f64::from(width.max(1))).ceil(),
            ..Lowered::default()
        }
    }

    /// Keeps its input, whole or its part: 2 bytes an element. The input of a product after a
    /// gather is kept as the part, and gathered again (Korthikanti et al. 2022, section 4.2.2).
    fn product(&self, k: u32, n: u32, cut: Cut, bias: bool) -> Lowered {
        let tokens = self.tokens();
        let (k_all, n_all) = (f64::from(k), f64::from(n));
        let (k, n) = match cut {
            Cut::Columns => (k_all, (n_all / self.tp()).ceil()),
            Cut::Words => (k_all, self.words(n_all)),
            Cut::Rows => ((k_all / self.tp()).ceil(), n_all),
            Cut::Whole => (k_all, n_all),
        };
        let arithmetic = self.job.arithmetic;
        let time = |m, n, k| {
            self.rates.stored_product_s(arithmetic, [m, n, k, 1.0], self.weights.stored())
        };
        let products = |seconds| Pass { products_s: seconds, ..Pass::default() };
        let trains = if self.weights.frozen.is_some() { 0.0 } else { 1.0 };
        let accumulated = trains * self.profile.accumulate_bytes * k * n;
        let [inside, apart] =
            if self.profile.fuses_accumulation { [accumulated, 0.0] } else { [0.0, accumulated] };
        let weight_s = trains
            * self.rates.weight_product_s(arithmetic, [k, n, tokens, 1.0], inside)
            * self.rates.weight_factor;
        let input = if cut == Cut::Rows { tokens * k } else { self.stream_tokens() * k };
        let result = if cut == Cut::Rows { self.stream_tokens() } else { tokens } * n * self.e();
        let mut lowered = Lowered {
            forward: products(time(tokens, n, k)),
            backward: products(time(tokens, k, n) + weight_s),
            weight_s,
            forward_launches: 1.0,
            backward_launches: 2.0,
            // In one-byte arithmetic the cast input is kept.
            saved: input * self.e().min(arithmetic.operand_bytes()),
            put_off: [input * self.e(), result],
            result,
            parameters: [k * n + if bias { n } else { 0.0 }, 0.0],
            tensors: if bias { 2.0 } else { 1.0 },
            // The input and its cotangent are whole for a while where ranks keep parts.
            working: match cut {
                Cut::Columns | Cut::Words if self.inside.sequence_parallel => {
                    2.0 * tokens * k * self.e()
                }
                Cut::Columns | Cut::Words | Cut::Rows | Cut::Whole => 0.0,
            },
            ..Lowered::default()
        };
        let is_scattered = cut == Cut::Rows && self.inside.sequence_parallel;
        if is_scattered && self.profile.frees_late {
            lowered.late = tokens * n * self.e();
        }
        if apart > 0.0 {
            lowered.backward += self.rows(apart);
            lowered.backward_launches += 1.0;
        }
        if bias && trains > 0.0 {
            lowered.backward += self.rows(tokens * n * self.e());
            lowered.backward_launches += 1.0;
        }
        self.reduce(&mut lowered, cut, [k_all, n_all], weight_s);
        lowered
    }

    /// The collectives of a product that is cut: `f` and `g` of Shoeybi et al. 2019, or their
    /// halves of Korthikanti et al. 2022.
    fn reduce(&self, lowered: &mut Lowered, cut: Cut, [k, n]: [f64; 2], weight_s: f64) {
        let (group, tokens) = (self.tensor_group(), self.tokens());
        if group.size() <= 1 {
            return;
        }
        let visible = 1.0 - self.profile.tensor_hidden;
        let tensor = |seconds: f64| Pass { tensor_s: seconds, ..Pass::default() };
        let gather_s =
            |width: f64| self.network.gather_s(tokens * width * self.e(), group) * visible;
        let reduce_s =
            |width: f64| self.network.all_reduce_s(tokens * width * self.e(), group) * visible;
        let gather = |width: f64| tensor(gather_s(width));
        // Beside the gradient of the weight, as far as that is long enough.
        let beside = |seconds: f64, behind_s: f64| {
            let hidden = seconds.min(behind_s) * self.profile.tensor_backward_hidden;
            seconds - hidden + hidden * INNER_INTERFERENCE
        };
        match (cut, self.inside.sequence_parallel) {
            (Cut::Whole, _) => {}
            (Cut::Columns | Cut::Words, false) => {
                lowered.backward += tensor(beside(reduce_s(k), weight_s))
            }
            (Cut::Rows, false) => lowered.forward += tensor(reduce_s(n)),
            (Cut::Columns | Cut::Words, true) => {
                lowered.forward += gather(k);
                // The input once more for the weight's gradient, and the input's gradient.
                lowered.backward += tensor(2.0 * beside(gather_s(k), weight_s / 2.0));
            }
            (Cut::Rows, true) => {
                lowered.forward += gather(n);
                lowered.backward += gather(n);
            }
        }
        if matches!(cut, Cut::Whole) {
            return;
        }
        lowered.forward_launches += self.profile.tensor_operations;
        lowered.backward_launches += self.profile.tensor_operations;
    }

    /// Keeps its result: what it rotates is part of a larger value, which stays. Where only the
    /// result is kept, that is what attention keeps.
    fn rope(&self, width: u32) -> Lowered {
        let elements = self.tokens() * (f64::from(width) / self.tp()).ceil();
        let bytes = elements * 2.0 * self.e();
        let kernels = if self.profile.fused_rope { 1.0 } else { 5.0 };
        Lowered {
            forward: self.rows(bytes) * kernels,
            backward: self.rows(bytes) * kernels,
            forward_launches: kernels,
            backward_launches: kernels,
            saved: if self.profile.recomputes_rows { 0.0 } else { elements * self.e() },
            ..Lowered::default()
        }
    }

    /// Keeps its input: 2 bytes an element, of both halves where one gates the other.
    fn activation(&self, width: u32, gated: bool) -> Lowered {
        let elements = self.tokens() * (f64::from(width) / self.tp()).ceil();
        let inputs = if gated { 2.0 } else { 1.0 };
        let moved = elements * self.e() * (inputs + 1.0);
        let back = elements * self.e() * (2.0 * inputs + 1.0);
        let (forward, backward, launches, extra) = if self.profile.fused_activation {
            (self.rows(moved), self.rows(back), 1.0, 0.0)
        } else {
            // The function, then the product or the bias, each a kernel; what is between is kept.
            let one = self.rows(elements * 2.0 * self.e());
            (one + self.rows(moved), one + self.rows(back), 2.0, 1.0)
        };
        Lowered {
            forward,
            backward,
            forward_launches: launches,
            backward_launches: launches + 1.0,
            saved: elements * self.e() * (inputs + extra),
            // The cotangents of the result, of what is between, and of the inputs.
            working: elements * self.e() * (1.0 + extra + inputs),
            ..Lowered::default()
        }
    }

    /// Keeps the mask of dropout: 1 byte an element.
    fn residual(&self, width: u32) -> Lowered {
        let elements = self.stream_tokens() * f64::from(width);
        let mask = if self.profile.dropout { 1.0 } else { 0.0 };
        let kernels = if self.profile.fused_residual { 1.0 } else { 1.0 + mask };
        let between = (kernels - 1.0) * 2.0 * self.e();
        Lowered {
            forward: self.rows(elements * (3.0 * self.e() + mask + between)),
            // The gradient passes through, and is added to that of the branch.
            backward: self.rows(elements * (3.0 * self.e() + (2.0 * self.e() + mask) * mask)),
            forward_launches: kernels,
            backward_launches: 1.0 + mask,
            saved: elements * mask,
            ..Lowered::default()
        }
    }

    fn embedding(&self, vocab: u32, width: u32, positions: u32) -> Lowered {
        let (tokens, width) = (self.tokens(), f64::from(width));
        let whole = self.profile.whole_logits;
        let rows = if whole { f64::from(vocab) } else { self.words(vocab.into()) };
        let bytes = tokens * width * 2.0 * self.e();
        let group = self.tensor_group();
        let seconds = if whole {
            0.0
        } else if self.inside.sequence_parallel {
            self.network.gather_s(tokens * width * self.e(), group)
        } else {
            self.network.all_reduce_s(tokens * width * self.e(), group)
        };
        let tensor = Pass { tensor_s: seconds, ..Pass::default() };
        let gradient = rows * width * (self.e() + self.profile.accumulate_bytes);
        Lowered {
            forward: self.rows(bytes) * 3.0 + tensor,
            backward: self.rows(bytes) * 3.0 + self.rows(gradient),
            // With what a micro-batch needs once: its tokens, masks and positions, and the scale of
            // the loss.
            forward_launches: 20.0,
            backward_launches: 12.0,
            saved: tokens * width * if self.profile.dropout { 1.0 } else { 0.0 },
            parameters: [rows * width + f64::from(positions) * width, 0.0],
            tensors: if positions > 0 { 2.0 } else { 1.0 },
            ..Lowered::default()
        }
    }

    fn loss(&self, vocab: u32) -> Lowered {
        let (is_cut, whole) = (self.inside.tp > 1, self.profile.whole_logits);
        let columns = if whole { f64::from(vocab) } else { self.words(vocab.into()) };
        let logits = self.tokens() * columns;
        let [forward, backward] = self.profile.loss_bytes;
        let gathered = if whole { logits * self.e() } else { 0.0 };
        let tensor_s = self.network.gather_s(gathered, self.tensor_group());
        let gather = Pass { tensor_s, ..Pass::default() };
        let more = if is_cut { self.profile.loss_cut_bytes } else { 0.0 };
        Lowered {
            forward: self.rows(logits * forward) + gather,
            backward: self.rows(logits * backward),
            forward_launches: 12.0,
            backward_launches: 6.0,
            saved: logits * self.profile.loss_saved_bytes,
            working: logits * (self.profile.loss_working_bytes + more),
            // The head's result, where the loss keeps something larger in its stead.
            freed: if self.profile.loss_saved_bytes > self.e() { logits * self.e() } else { 0.0 },
            ..Lowered::default()
        }
    }
}
