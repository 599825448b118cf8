//! Which rows the pairs of a token and an expert have, and what moves rows there and back.
//!
//! Rows of an expert follow each other in ascending order of tokens, from a whole block tile of
//! products on; up to the next one are zeros. Where a row lies is counted, not negotiated: a warp
//! counts the pairs of 32 tokens with each expert by ballots, one block adds these counts up, and
//! the warps of the tokens write their rows. So it is the same in every launch.
//!
//! A token with more pairs than the kernel has room for keeps the first ones, with gates that are
//! no numbers.
//!
//! Versions:
//! 1. rows are gathered to memory before they are multiplied, by vectors, and added up by tokens.

use std::fmt;

use ir::DType;

use super::parameter::Parameter;
use super::text::{Text, element, line, number};
use crate::kernel::Experts;

/// Threads of a block.
pub(super) const THREADS: u32 = 256;
/// Warps of a block.
const WARPS: u32 = THREADS / 32;
/// Tokens that a warp counts: one per lane.
const CHUNK: usize = 32;
/// What stands for no token, or no row.
const NONE: &str = "0xffffffffu";

/// A step of experts but for their products.
#[derive(Clone, Debug, PartialEq)]
pub struct RoutingTile {
    /// What is computed.
    pub experts: Experts,
    /// The rows of its pairs.
    pub rows: ExpertRows,
    /// Which step.
    pub step: RoutingStep,
}

/// The rows of pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertRows {
    /// Rows of a block tile of products: an expert's rows start at a multiple of it.
    pub tile: usize,
    /// The largest number of tiles, however tokens are routed.
    pub tiles: usize,
    /// Pairs that a token has room for.
    pub per_token: usize,
}

/// Which step, with what it is passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoutingStep {
    /// `gates -> counts`: the pairs of each chunk of tokens, by expert.
    Count,
    /// `chunks -> starts counts experts tokens gates`: counts become sums of those before, and
    /// rows that no pair has are marked.
    Place,
    /// `gates chunks starts -> tokens gates rows`: what each pair's row is.
    Fill,
    /// `x tokens starts -> rows`: rows of tokens, zeros where there is no pair.
    Gather,
    /// `rows places -> y`: the sum of the rows of each token, in ascending order of experts.
    Combine,
    /// `parts tokens starts experts gates -> dgates`: the sum of each row's parts, which are as
    /// many as this.
    Gates(usize),
}

impl ExpertRows {
    /// The rows of a kernel's pairs in tiles of `tile` rows.
    pub(super) fn of(e: &Experts, tile: usize) -> ExpertRows {
        let per_token = e.top_k.min(e.experts);
        let pairs = e.tokens * per_token;
        // Of each expert with pairs the last tile has one row at least.
        let tiles = (pairs + e.experts.min(pairs) * (tile - 1)) / tile;
        ExpertRows { tile, tiles, per_token }
    }

    /// All rows.
    pub(super) fn count(self) -> usize {
        self.tiles * self.tile
    }
}

/// Chunks of tokens.
pub(super) fn chunks(e: &Experts) -> usize {
    e.tokens.div_ceil(CHUNK)
}

/// Elements of a vector of 16 bytes, or fewer where rows of `row` elements are not whole vectors.
pub(super) fn width(dtype: DType, row: usize) -> usize {
    let most = 16 / dtype.size() as usize;
    [8, 4, 2].into_iter().find(|of| *of <= most && row.is_multiple_of(*of)).unwrap_or(1)
}

impl RoutingTile {
    /// Threads that the step needs.
    pub(super) fn count(&self) -> usize {
        let Experts { tokens, model, dtype, .. } = self.experts;
        match self.step {
            RoutingStep::Count | RoutingStep::Fill => chunks(&self.experts) * 32,
            RoutingStep::Place => THREADS as usize,
            RoutingStep::Gather => self.rows.count() * (model / width(dtype, model)),
            RoutingStep::Combine => tokens * (model / width(dtype.accumulation(), model)),
            RoutingStep::Gates(_) => self.rows.count() * 32,
        }
    }

    /// Whether threads of a block synchronise, those of a warp alone too.
    pub(super) fn synchronizes(&self) -> bool {
        match self.step {
            RoutingStep::Count | RoutingStep::Place | RoutingStep::Fill | RoutingStep::Gates(_) => {
                true
            }
            RoutingStep::Gather | RoutingStep::Combine => false,
        }
    }

    /// The type that is computed in.
    fn compute(&self) -> &'static str {
        element(self.experts.dtype.accumulation())
    }

    pub(super) fn print(&self, parameters: &[Parameter], text: &mut Text) {
        let names: Vec<String> = parameters.iter().map(Parameter::name).collect();
        match self.step {
            RoutingStep::Count => self.print_count(&names, text),
            RoutingStep::Place => self.print_place(&names, text),
            RoutingStep::Fill => self.print_fill(&names, text),
            RoutingStep::Gather => self.print_gather(&names, text),
            RoutingStep::Combine => self.print_combine(&names, text),
            RoutingStep::Gates(parts) => self.print_gates(parts, &names, text),
        }
    }

    /// Prints the warp's chunk, and the lane's token.
    fn print_token(&self, text: &mut Text) {
        line!(text, "const u32 lane = threadIdx.x % 32;");
        line!(text, "const u64 chunk = (u64)blockIdx.x * {WARPS} + threadIdx.x / 32;");
        line!(text, "const u64 token = chunk * {CHUNK} + lane;");
        line!(text, "const bool is_there = token < {};", self.experts.tokens);
    }

    /// Opens the loop over experts, with the gate of the lane's token.
    fn open_experts(&self, gates: &str, text: &mut Text) {
        let (count, compute) = (self.experts.experts, self.compute());
        line!(text, "for (u32 expert = 0; expert < {count}; expert += 1) {{");
        line!(text, "{compute} gate = 0;");
        line!(text, "if (is_there) gate = Load<{compute}>::of({gates}[token * {count} + expert]);");
    }

    fn print_count(&self, names: &[String], text: &mut Text) {
        let [gates, counts] = [&names[0], &names[1]];
        let chunks = chunks(&self.experts);
        self.print_token(text);
        line!(text, "u32 pairs = 0;");
        self.open_experts(gates, text);
        line!(text, "const bool is_pair = gate != 0 && pairs < {};", self.rows.per_token);
        line!(text, "pairs += is_pair ? 1 : 0;");
        line!(text, "const u32 count = bits_set(ballot(is_pair));");
        line!(
            text,
            "if (lane == 0 && chunk < {chunks}) {counts}[(u64)expert * {chunks} + chunk] = count;"
        );
        text.end();
    }

    fn print_place(&self, names: &[String], text: &mut Text) {
        let ExpertRows { tile, tiles, .. } = self.rows;
        let (count, chunks) = (self.experts.experts, chunks(&self.experts));
        let [before, starts, counts, experts, tokens, gates] =
            [0, 1, 2, 3, 4, 5].map(|at: usize| &names[at]);
        let each_expert =
            format!("for (u32 expert = warp; expert < {count}; expert += {WARPS}) {{");
        line!(text, "const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;");
        line!(text, "{each_expert}");
        line!(text, "u32* const of_expert = {before} + (u64)expert * {chunks};");
        line!(text, "u32 before = 0;");
        line!(text, "for (u64 first = 0; first < {chunks}; first += 32) {{");
        line!(text, "const u64 chunk = first + lane;");
        line!(text, "const u32 own = chunk < {chunks} ? of_expert[chunk] : 0;");
        line!(text, "const u32 sum = sum_up_to_lane(own);");
        line!(text, "if (chunk < {chunks}) of_expert[chunk] = before + sum - own;");
        line!(text, "before += shuffle(sum, 31);");
        text.end();
        line!(text, "if (lane == 0) {counts}[expert] = before;");
        text.end();
        line!(text, "sync_block();");
        line!(text, "if (warp == 0) {{");
        line!(text, "u32 before = 0;");
        line!(text, "for (u32 first = 0; first < {count}; first += 32) {{");
        line!(text, "const u32 expert = first + lane;");
        line!(text, "const u32 own = expert < {count} ? {counts}[expert] : 0;");
        line!(text, "const u32 padded = (own + {}) / {tile} * {tile};", tile - 1);
        line!(text, "const u32 sum = sum_up_to_lane(padded);");
        line!(text, "if (expert < {count}) {starts}[expert] = before + sum - padded;");
        line!(text, "before += shuffle(sum, 31);");
        text.end();
        line!(text, "if (lane == 0) {starts}[{count}] = before;");
        text.end();
        line!(text, "sync_block();");
        line!(text, "{each_expert}");
        line!(text, "const u32 start = {starts}[expert], next = {starts}[expert + 1];");
        // Nothing is written beyond the rows, whatever gates are.
        let all = self.rows.count();
        line!(text, "const u32 end = next < {all} ? next : {all};");
        line!(text, "for (u32 at = start / {tile} + lane; at < end / {tile}; at += 32) {{");
        line!(text, "{experts}[at] = expert;");
        text.end();
        line!(text, "for (u32 row = start + {counts}[expert] + lane; row < end; row += 32) {{");
        line!(text, "{tokens}[row] = {NONE};");
        line!(text, "{gates}[row] = 0;");
        text.end();
        text.end();
        let none = format!("{starts}[{count}] / {tile} + threadIdx.x");
        line!(
            text,
            "for (u32 at = {none}; at < {tiles}; at += {THREADS}) {experts}[at] = {count};"
        );
    }

    fn print_fill(&self, names: &[String], text: &mut Text) {
        let ExpertRows { per_token, .. } = self.rows;
        let (count, chunks, compute) =
            (self.experts.experts, chunks(&self.experts), self.compute());
        let [gates, before, starts, tokens, of_rows, places] =
            [0, 1, 2, 3, 4, 5].map(|at: usize| &names[at]);
        let may_lack_room = per_token < count;
        self.print_token(text);
        if may_lack_room {
            line!(text, "u32 all = 0;");
            self.open_experts(gates, text);
            line!(text, "all += gate != 0 ? 1 : 0;");
            text.end();
        }
        line!(text, "u32 pairs = 0;");
        self.open_experts(gates, text);
        line!(text, "const bool is_pair = gate != 0 && pairs < {per_token};");
        line!(text, "const u32 mask = ballot(is_pair);");
        line!(text, "if (!is_pair) continue;");
        line!(text, "const u32 before = {before}[(u64)expert * {chunks} + chunk];");
        line!(
            text,
            "const u32 row = {starts}[expert] + before + bits_set(mask & ((1u << lane) - 1));"
        );
        line!(text, "{tokens}[row] = (u32)token;");
        if may_lack_room {
            let nan = number(self.experts.dtype.accumulation(), f64::NAN);
            line!(text, "{of_rows}[row] = all > {per_token} ? ({compute}){nan} : gate;");
        } else {
            line!(text, "{of_rows}[row] = gate;");
        }
        line!(text, "{places}[token * {per_token} + pairs] = row;");
        line!(text, "pairs += 1;");
        text.end();
        line!(text, "if (!is_there) return;");
        line!(text, "for (; pairs < {per_token}; pairs += 1) {{");
        line!(text, "{places}[token * {per_token} + pairs] = {NONE};");
        text.end();
    }

    /// Prints the thread's element, `at`, and ends those beyond the last one.
    fn print_element(&self, text: &mut Text) {
        line!(text, "const u64 at = (u64)blockIdx.x * {THREADS} + threadIdx.x;");
        line!(text, "if (at >= {}) return;", self.count());
    }

    fn print_gather(&self, names: &[String], text: &mut Text) {
        let Experts { model, dtype, experts, .. } = self.experts;
        let (width, kind) = (width(dtype, model), element(dtype));
        let [x, tokens, starts, rows] = [0, 1, 2, 3].map(|at: usize| &names[at]);
        self.print_element(text);
        line!(text, "const u64 row = at / {0}, column = at % {0} * {width};", model / width);
        line!(text, "if (row >= {starts}[{experts}]) return;");
        line!(text, "const u32 token = {tokens}[row];");
        let vector = format!("Vector<{kind}, {width}>");
        line!(text, "{vector} moved = {{}};");
        line!(text, "if (token != {NONE}) {{");
        line!(text, "moved = load_vector<{kind}, {width}>({x} + (u64)token * {model} + column);");
        text.end();
        line!(text, "store_vector({rows} + row * {model} + column, moved);");
    }

    fn print_combine(&self, names: &[String], text: &mut Text) {
        let Experts { model, dtype, .. } = self.experts;
        let (sums, per_token) = (dtype.accumulation(), self.rows.per_token);
        let (width, compute, kept) = (width(sums, model), element(sums), element(dtype));
        let [rows, places, y] = [0, 1, 2].map(|at: usize| &names[at]);
        self.print_element(text);
        line!(text, "const u64 token = at / {0}, column = at % {0} * {width};", model / width);
        line!(text, "{compute} sum[{width}] = {{}};");
        line!(text, "NO_UNROLL");
        line!(text, "for (u32 pair = 0; pair < {per_token}; pair += 1) {{");
        line!(text, "const u32 row = {places}[token * {per_token} + pair];");
        line!(text, "if (row == {NONE}) break;");
        let kind = format!("{compute}, {width}");
        let from = format!("{rows} + (u64)row * {model} + column");
        line!(text, "const Vector<{kind}> x = load_vector<{kind}>({from});");
        line!(text, "UNROLL");
        line!(text, "for (u32 e = 0; e < {width}; e += 1) sum[e] = sum[e] + x.x[e];");
        text.end();
        line!(text, "Vector<{kept}, {width}> rounded;");
        line!(text, "UNROLL");
        line!(text, "for (u32 e = 0; e < {width}; e += 1) {{");
        line!(text, "rounded.x[e] = Store<{kept}>::of(sum[e]);");
        text.end();
        line!(text, "store_vector({y} + token * {model} + column, rounded);");
    }

    fn print_gates(&self, parts: usize, names: &[String], text: &mut Text) {
        let Experts { experts: count, dtype, .. } = self.experts;
        let (compute, kept, tile) = (self.compute(), element(dtype), self.rows.tile);
        let [sums, tokens, starts, experts, gates, to] =
            [0, 1, 2, 3, 4, 5].map(|at: usize| &names[at]);
        line!(text, "const u32 lane = threadIdx.x % 32;");
        line!(text, "const u64 row = (u64)blockIdx.x * {WARPS} + threadIdx.x / 32;");
        line!(text, "if (row >= {starts}[{count}]) return;");
        line!(text, "const u32 token = {tokens}[row];");
        line!(text, "if (token == {NONE}) return;");
        line!(text, "{compute} sum = 0;");
        line!(text, "for (u32 part = lane; part < {parts}; part += 32) {{");
        line!(text, "sum = sum + {sums}[row * {parts} + part];");
        text.end();
        line!(text, "UNROLL");
        line!(text, "for (u32 bits = 16; bits > 0; bits /= 2) {{");
        line!(text, "sum = sum + shuffle_xor(sum, (i32)bits);");
        text.end();
        line!(text, "if (lane > 0) return;");
        // Of a gate that is no number, or of a token that lacks room.
        line!(text, "if (is_nan({gates}[row])) sum = {gates}[row];");
        line!(
            text,
            "{to}[(u64)token * {count} + {experts}[row / {tile}]] = Store<{kept}>::of(sum);"
        );
    }
}

impl fmt::Display for RoutingTile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.step {
            RoutingStep::Count => "one warp per 32 tokens counts their pairs",
            RoutingStep::Place => "one block places the rows of experts",
            RoutingStep::Fill => "one warp per 32 tokens writes the rows of their pairs",
            RoutingStep::Gather => "one thread per vector of a row",
            RoutingStep::Combine => "one thread per vector of a token",
            RoutingStep::Gates(_) => "one warp per row",
        })
    }
}
