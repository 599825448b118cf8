//! Routed experts: what a rank computes for the tokens that come to it, and how these come.
//!
//! Legend: h elements of a token, f those inside an expert's slice, e bytes of an element.

use codegen::chunk::token_pieces;
use ir::program::visited;
use ir::target::{Arch, Target};

use super::{Lowered, Lowering};
use crate::estimate::price::Pass;
use crate::estimate::profile::ExpertPlacement;
use crate::estimate::rates::Arithmetic;
use crate::estimate::workload::Item;

/// Overhead `(r, c)` of grouped matrix products: with n rows for each expert they take
/// `t(n) + c t(min(n, r))` seconds, where `t(n)` is the time of the same products alone. Forward,
/// then for gradients of weights. Source: MooreThreads/SimuMax, 60 grouped products on B200.
const GROUPED: [(f64, f64); 2] = [(300.0, 1.0), (800.0 / 2.8, 2.8)];

/// Grouped products in one kernel whose tiles are those of all experts take no longer than as many
/// products alone. Source: DeepGEMM's README, masked grouped products of 256 to 1,024 rows on H800,
/// which reach the bandwidth of plain ones.
const ALONE: (f64, f64) = (0.0, 0.0);

/// Seconds of products of `experts` experts with `rows` rows for each; `time(n)` is the seconds of
/// the same products alone, with n rows. The overhead is that of going from one expert to the next:
/// the products of a single expert are plain ones.
fn grouped_s(
    (first, recomputed): (f64, f64),
    experts: f64,
    rows: f64,
    time: impl Fn(f64) -> f64,
) -> f64 {
    let next = (experts - 1.0) / experts.max(1.0);
    time(rows) + recomputed * next * time(rows.min(first))
}

/// Bytes of an element of sums in single precision.
const SUM_BYTES: f64 = 4.0;

/// Rows of a tile of a grouped product, whose last tile is filled up for each expert.
const TILE_ROWS: f64 = 128.0;

/// The part of an item of experts that one rank has.
#[derive(Clone, Copy, Debug)]
struct OnRank {
    /// Experts.
    experts: f64,
    /// Elements of a token.
    width: f64,
    /// Elements inside an expert.
    ffn: f64,
    /// Columns of the first products.
    inner: f64,
    /// Tokens that the rank brings, those of ranks with slices of the same experts with them.
    tokens: f64,
    /// Rows of a token at most: experts of it that are here.
    rows: f64,
    /// Experts of a token, times how much busier than others the busiest rank is.
    visits: f64,
}

impl OnRank {
    /// Rows that the rank computes with.
    fn routed(&self) -> f64 {
        self.tokens * self.visits
    }
}

impl Lowering<'_> {
    /// Routed experts, evenly loaded: each rank computes for as many tokens as it holds, times
    /// `top_k`.
    pub(super) fn experts(&self, item: &Item) -> Lowered {
        let Item::Experts { count, top_k, width, ffn, gated, busiest } = *item else {
            return Lowered::default();
        };
        let (count, ep) = (f64::from(count), f64::from(self.inside.ep));
        let slices = self.inside.slices_group.size() as f64;
        let experts = (count / ep).ceil();
        let ffn = (f64::from(ffn) / slices).ceil();
        let tokens = self.stream_tokens();
        let tokens = if self.inside.sequence_parallel { tokens } else { self.tokens() / self.tp() };
        // All wait for the busiest rank; where each has all experts, none is busier.
        let busiest = if self.inside.ep > 1 { busiest } else { 1.0 };
        let here = OnRank {
            experts,
            width: f64::from(width),
            ffn,
            inner: if gated { 2.0 * ffn } else { ffn },
            tokens: tokens * slices,
            rows: f64::from(top_k).min(experts),
            visits: f64::from(top_k) * busiest,
        };
        let [forward, backward, weight] = self.expert_products(&here, count);
        let (h, f, inner) = (here.width, here.ffn, here.inner);
        let arithmetic = self.job.arithmetic;
        // Its few columns are padded: five experts take no longer than six.
        let columns = (count / 8.0).ceil() * 8.0;
        let router = self.rates.product_s(arithmetic, [here.tokens, columns, h, 1.0]);
        let routed = here.routed();
        let act = self.rates.rows_s(routed * (inner + f) * self.e());
        // Sorted by rank, then by expert, and back.
        let permute = self.rates.rows_s(routed * h * 2.0 * self.e()) * 4.0;
        let casts = f64::from(matches!(arithmetic, Arithmetic::F8 | Arithmetic::F4));
        // A loop launches two products forward and four backward for an expert; before each, a cast
        // and the scales of both operands. Nothing is around these launches.
        let alone = if self.profile.product_per_expert { experts } else { 0.0 };
        let alone = alone / self.profile.host.operations.max(1.0);
        let pieces = self.token_pieces(&here, top_k);
        let [sent, sent_back] = match self.computes_experts_again() {
            true => self.dispatched_in_pieces(&here, (count, top_k), pieces),
            false => self.dispatched(&here, top_k),
        };
        let pass = |products_s: f64, rows_s: f64| Pass { products_s, rows_s, ..Pass::default() };
        let lowered = Lowered {
            forward: pass(forward + router, act + permute) + sent,
            backward: pass(backward + weight + 2.0 * router, 2.0 * act + permute) + sent_back,
            weight_s: weight,
            forward_launches: 30.0 + alone * (2.0 + 6.0 * casts),
            backward_launches: 38.0 + alone * (4.0 + 10.0 * casts),
            saved: routed * self.e() * (h + inner + f) + here.tokens * h * self.e(),
            put_off: [h + f, inner + h].map(|width| routed * self.e() * width),
            working: routed * h * self.e(),
            parameters: [h * count, experts * h * (inner + f)],
            tensors: 1.0 + experts * if gated { 3.0 } else { 2.0 },
            ..Lowered::default()
        };
        match self.computes_experts_again() {
            true => self.again(lowered, &here, (count, pieces)),
            false => lowered,
        }
    }

    /// Whether the backward pass has nothing of what is inside of experts.
    fn computes_experts_again(&self) -> bool {
        self.profile.experts_again && self.weights.of_training
    }

    /// Seconds of the products of experts: forward, the gradients of tokens, and those of weights.
    fn expert_products(&self, here: &OnRank, count: f64) -> [f64; 3] {
        let OnRank { experts, width: h, ffn: f, inner, .. } = *here;
        let arithmetic = self.job.arithmetic;
        let each = (here.routed() * f64::from(self.inside.ep) / count).max(1.0);
        let time = |m, n, k| {
            self.rates.stored_product_s(arithmetic, [m, n, k, experts], self.weights.stored())
        };
        let gradient =
            |m, n, rows| self.rates.weight_product_s(arithmetic, [m, n, rows, experts], 0.0);
        let [products, gradients] = GROUPED;
        let products = if self.weights.of_training { products } else { ALONE };
        let first = |m| time(m, inner, h);
        let forward = grouped_s(products, experts, each, |m| first(m) + time(m, h, f));
        let backward = grouped_s(products, experts, each, |m| time(m, h, inner) + time(m, f, h));
        let again = if self.computes_experts_again() {
            grouped_s(products, experts, each, first)
        } else {
            0.0
        };
        let weight =
            grouped_s(gradients, experts, each, |m| gradient(h, inner, m) + gradient(f, h, m));
        [forward, backward + again, weight]
    }

    /// The same where only what the router makes is kept: what is inside is computed in room for
    /// all rows of a piece that may come, since any token may visit the experts that are here.
    fn again(&self, lowered: Lowered, here: &OnRank, (count, pieces): (f64, f64)) -> Lowered {
        let OnRank { experts, width: h, ffn: f, inner, .. } = *here;
        let (e, ranks) = (self.e(), f64::from(self.inside.ep));
        let tokens = here.tokens * ranks / pieces;
        let rows = tokens * here.rows + experts * (TILE_ROWS - 1.0);
        // Of tokens the rows, and those of both gradients, one of which is a sum; of what is inside
        // the result, its gradient, which is a sum, and those of both factors.
        let of_rows = rows * (h * (2.0 * e + SUM_BYTES) + f * (3.0 * e + SUM_BYTES));
        let are_gathered = ranks > 1.0 || self.inside.sequence_parallel;
        let gathered = if are_gathered { GATHERED * tokens * h * e } else { 0.0 };
        // Each further piece reads and writes the sums that gradients of weights are.
        let sums_s = self.rates.rows_s(2.0 * experts * h * (inner + f) * SUM_BYTES);
        let rows_s = self.rates.rows_s(here.routed() * f * e) + (pieces - 1.0) * sums_s;
        Lowered {
            saved: here.tokens * count * e,
            put_off: [here.tokens * h * e; 2],
            working: 0.0,
            room: of_rows + gathered,
            backward: lowered.backward + Pass { rows_s, ..Pass::default() },
            forward_launches: lowered.forward_launches * pieces,
            backward_launches: lowered.backward_launches * pieces,
            ..lowered
        }
    }

    /// What it takes to bring tokens to their experts and results back, in both passes.
    fn dispatched(&self, here: &OnRank, top_k: u32) -> [Pass; 2] {
        let (ep, slices) = (self.inside.ep_group, self.inside.slices_group);
        let expert = |expert_s: f64| Pass { expert_s, ..Pass::default() };
        let bytes = here.tokens / slices.size() as f64 * here.width * self.e();
        // A token whose experts share a node goes there once.
        let nodes = self.network.nodes(ep);
        let hit = nodes * (1.0 - (1.0 - 1.0 / nodes).powi(top_k as i32));
        let once = if self.profile.experts_once { (hit / f64::from(top_k)).min(1.0) } else { 1.0 };
        let exchange_s = self.network.exchange_s(bytes * here.visits, ep, once);
        // Ranks to which tokens are sent gather each as often as experts visit it
        // (`token_dispatcher.py` of Megatron-LM).
        let is_sent = self.profile.experts == ExpertPlacement::FromTensor;
        let each = if is_sent && self.inside.sequence_parallel { here.visits } else { 1.0 };
        let sliced = self.over_slices(bytes * slices.size() as f64 * each);
        [expert(2.0 * exchange_s) + sliced[0], expert(2.0 * exchange_s) + sliced[1]]
    }

    /// In how many pieces our own programs dispatch tokens.
    fn token_pieces(&self, here: &OnRank, top_k: u32) -> f64 {
        if self.inside.ep == 1 || !self.computes_experts_again() {
            return 1.0;
        }
        let tokens = here.tokens / f64::from(self.inside.microbatch);
        let of_rank = [self.inside.microbatch as usize, tokens as usize, here.width as usize];
        let routing = (self.inside.ep as usize, here.experts as usize, top_k as usize);
        let target = Some(Target::Cuda(Arch::Sm90a));
        token_pieces(of_rank, self.e() as u64, routing, target) as f64
    }

    /// The same in our own programs: a token goes once to each rank with an expert of it, and that
    /// sends the sum of its terms back; the backward pass brings gradients, too, and takes those of
    /// tokens and gates back. Gates go to all.
    fn dispatched_in_pieces(
        &self,
        here: &OnRank,
        (count, top_k): (f64, u32),
        pieces: f64,
    ) -> [Pass; 2] {
        let (ep, slices) = (self.inside.ep_group, self.inside.slices_group);
        let exchange_s = |bytes: f64| pieces * self.network.exchange_s(bytes / pieces, ep, 1.0);
        let ranks = self.inside.ep as usize;
        let visited = visited(ranks, here.experts as usize, top_k as usize);
        let busiest = here.visits / f64::from(top_k);
        let own = here.tokens / slices.size() as f64 * self.e();
        let (all, whole) = (ep.size() as f64 * visited * busiest, slices.size() as f64);
        // Ranks of `tp` have gathered their tokens, and have terms of all.
        let sent_s = exchange_s(own * whole * here.width * all);
        let gates_s = self.network.exchange_s(own * whole * count, ep, 1.0);
        let sliced = self.over_slices(own * whole * here.width);
        let expert = |expert_s: f64| Pass { expert_s, ..Pass::default() };
        let passes = [2.0 * sent_s + gates_s, 3.0 * sent_s + 2.0 * gates_s].map(expert);
        [passes[0] + sliced[0], passes[1] + sliced[1]]
    }

    /// What ranks exchange that each hold a slice of the same experts, in both passes: all have the
    /// same tokens, `bytes` of them, and sum their terms. Where tokens are cut over `tp`, they are
    /// gathered and scattered.
    fn over_slices(&self, bytes: f64) -> [Pass; 2] {
        let group = self.inside.slices_group;
        if group.size() <= 1 {
            return [Pass::default(); 2];
        }
        let tensor = |tensor_s: f64| Pass { tensor_s, ..Pass::default() };
        if !self.inside.sequence_parallel {
            return [tensor(self.network.all_reduce_s(bytes, group)); 2];
        }
        let one_s = self.network.gather_s(bytes, group);
        // What was gathered is gathered once more for gradients of weights.
        [tensor(2.0 * one_s), tensor(3.0 * one_s)]
    }
}

/// Values of all tokens that a backward pass gathers or scatters: tokens, their gradients, and the
/// sums of both.
const GATHERED: f64 = 4.0;
