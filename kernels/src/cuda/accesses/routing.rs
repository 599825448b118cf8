//! Accesses of the steps of routed experts but for their products, whose rows are as `dealt` says.

use super::dealt::{RowsOfExpert, rows_of_experts, token_of};
use super::{Accesses, Blocks, LANES, SECTOR, Sites, Warp, relative};
use crate::cuda::routing::{RoutingStep, RoutingTile, THREADS, chunks, width};
use crate::kernel::Experts;

/// Bytes of a count or of the number of a row.
const NUMBER: u64 = 4;
/// Tokens that a warp counts: one per lane.
const CHUNK: usize = LANES;
/// Warps of a block.
const WARPS: usize = THREADS as usize / LANES;

/// Accesses of a step.
pub(super) fn routing(tile: &RoutingTile) -> Option<Accesses> {
    let of = Dealt::of(tile);
    let mut blocks = Blocks::new();
    match tile.step {
        RoutingStep::Count => of.count_pairs(&mut blocks)?,
        RoutingStep::Place => blocks.count(Vec::new(), 1, |warp| of.list_places(warp))?,
        RoutingStep::Fill => of.count_fill(&mut blocks)?,
        RoutingStep::Gather => of.count_gather(&mut blocks)?,
        RoutingStep::Combine => of.count_combine(&mut blocks)?,
        RoutingStep::Gates(parts) => of.count_gates(parts, &mut blocks)?,
    }
    Some(blocks.count)
}

/// What a row is: beyond those of experts, of no pair, or of one.
fn kind(row: Option<Option<usize>>) -> u64 {
    row.map_or(0, |token| 1 + u64::from(token.is_some()))
}

/// The pairs of tokens and experts.
struct Dealt<'a> {
    e: &'a Experts,
    tile: &'a RoutingTile,
    experts: Vec<RowsOfExpert>,
    /// For each row that an expert has, its token, if a pair has it.
    tokens: Vec<Option<usize>>,
    /// For each token the experts and rows of its pairs, in ascending order of experts.
    pairs: Vec<Vec<[usize; 2]>>,
}

impl Dealt<'_> {
    fn of(tile: &RoutingTile) -> Dealt<'_> {
        let (e, rows) = (&tile.experts, tile.rows);
        let count = e.pairs().min(e.tokens * rows.per_token);
        let experts = rows_of_experts(count, e.experts, rows.tile);
        let all: usize = experts.iter().map(|of| of.tiles * rows.tile).sum();
        let (mut tokens, mut pairs) = (vec![None; all], vec![Vec::new(); e.tokens]);
        for pair in 0..count {
            let (token, expert) = (token_of(pair, [count, e.tokens]), pair % e.experts);
            let row = experts[expert].first + pair / e.experts;
            tokens[row] = Some(token);
            pairs[token].push([expert, row]);
        }
        pairs.iter_mut().for_each(|of| of.sort_unstable());
        Dealt { e, tile, experts, tokens, pairs }
    }

    /// Bytes of an element of tensors, and of sums.
    fn bytes(&self) -> [u64; 2] {
        [self.e.dtype.size(), self.e.dtype.accumulation().size()]
    }

    /// The byte of the gate of a token and an expert.
    fn gate(&self, token: usize, expert: usize) -> u64 {
        (token * self.e.experts + expert) as u64 * self.bytes()[0]
    }

    /// Tokens of a warp.
    fn of_chunk(&self, chunk: usize) -> std::ops::Range<usize> {
        chunk * CHUNK..((chunk + 1) * CHUNK).min(self.e.tokens)
    }

    /// Counts what counts pairs, whatever these are.
    fn count_pairs(&self, blocks: &mut Blocks) -> Option<()> {
        for chunk in 0..chunks(self.e) {
            let (tokens, mut sites) = (self.of_chunk(chunk), Sites::default());
            let [gate, count] = [self.bytes()[0], NUMBER].map(|bytes| sites.device(bytes as usize));
            blocks.count(vec![tokens.len() as u64], 1, |warp| {
                for expert in 0..self.e.experts {
                    for (lane, token) in tokens.clone().enumerate() {
                        warp.access(gate, lane, self.gate(token, expert));
                    }
                    warp.access(count, 0, (expert * chunks(self.e) + chunk) as u64 * NUMBER);
                }
                warp.end();
            })?;
        }
        Some(())
    }

    /// Lists what the block does that places rows.
    fn list_places(&self, warp: &mut Warp) {
        let (count, chunks) = (self.e.experts, chunks(self.e));
        let mut sites = Sites::default();
        let mut numbers = || [0; 2].map(|_| sites.device(NUMBER as usize));
        let (of_chunk, of_expert) = (numbers(), numbers());
        for first in 0..WARPS {
            for expert in (first..count).step_by(WARPS) {
                for chunk in 0..chunks {
                    let at = (expert * chunks + chunk) as u64 * NUMBER;
                    of_chunk.iter().for_each(|site| warp.access(*site, chunk % LANES, at));
                }
                warp.access(of_expert[0], 0, expert as u64 * NUMBER);
            }
            warp.end();
        }
        let [starts, [last, _]] = [numbers(), numbers()];
        for expert in 0..count {
            let at = expert as u64 * NUMBER;
            starts.iter().for_each(|site| warp.access(*site, expert % LANES, at));
        }
        warp.access(last, 0, count as u64 * NUMBER);
        warp.end();
        (0..WARPS).for_each(|first| self.list_marks(warp, first));
    }

    /// Lists how a warp marks the tiles of experts, and rows that no pair has.
    fn list_marks(&self, warp: &mut Warp, first: usize) {
        let (count, tile, mut sites) = (self.e.experts, self.tile.rows.tile, Sites::default());
        let [start, next, experts, counted, token, all, none] =
            [0; 7].map(|_| sites.device(NUMBER as usize));
        let gate = sites.device(self.bytes()[1] as usize);
        let number = |at: usize| at as u64 * NUMBER;
        for expert in (first..count).step_by(WARPS) {
            let of = self.experts[expert];
            for lane in 0..LANES {
                warp.access(start, lane, number(expert));
                warp.access(next, lane, number(expert + 1));
                warp.access(counted, lane, number(expert));
            }
            for at in 0..of.tiles {
                warp.access(experts, at % LANES, number(of.first / tile + at));
            }
            for (at, row) in (of.first + of.count..of.first + of.tiles * tile).enumerate() {
                warp.access(token, at % LANES, number(row));
                warp.access(gate, at % LANES, row as u64 * self.bytes()[1]);
            }
        }
        let used = self.tokens.len() / tile;
        for lane in 0..LANES {
            warp.access(all, lane, number(count));
            let own = used + first * LANES + lane;
            for at in (own..self.tile.rows.tiles).step_by(THREADS as usize) {
                warp.access(none, lane, number(at));
            }
        }
        warp.end();
    }

    /// Counts what writes the rows of pairs.
    fn count_fill(&self, blocks: &mut Blocks) -> Option<()> {
        for chunk in 0..chunks(self.e) {
            blocks.count(vec![chunk as u64], 1, |warp| self.list_fill(warp, chunk))?;
        }
        Some(())
    }

    fn list_fill(&self, warp: &mut Warp, chunk: usize) {
        let ([of_gate, of_sum], per_token) = (self.bytes(), self.tile.rows.per_token);
        let mut sites = Sites::default();
        let gates = [0; 2].map(|_| sites.device(of_gate as usize));
        let [before, start, token, place, none] = [0; 5].map(|_| sites.device(NUMBER as usize));
        let gate = sites.device(of_sum as usize);
        // Where a token may lack room, its pairs are counted before.
        let loops = if per_token < self.e.experts { 2 } else { 1 };
        let number = |at: usize| at as u64 * NUMBER;
        for (lane, own) in self.of_chunk(chunk).enumerate() {
            for site in &gates[..loops] {
                (0..self.e.experts).for_each(|of| warp.access(*site, lane, self.gate(own, of)));
            }
            let of_place = |at: usize| number(own * per_token + at);
            for (at, [expert, row]) in self.pairs[own].iter().enumerate() {
                warp.access(before, lane, number(expert * chunks(self.e) + chunk));
                warp.access(start, lane, number(*expert));
                warp.access(token, lane, number(*row));
                warp.access(gate, lane, *row as u64 * of_sum);
                warp.access(place, lane, of_place(at));
            }
            for at in self.pairs[own].len()..per_token {
                warp.access(none, lane, of_place(at));
            }
        }
        warp.end();
    }

    /// Counts what gathers rows, by vectors.
    fn count_gather(&self, blocks: &mut Blocks) -> Option<()> {
        let (model, of_row) = (self.e.model, self.e.model as u64 * self.bytes()[0]);
        let width = width(self.e.dtype, model);
        let per_row = model / width;
        let vector = width * self.bytes()[0] as usize;
        let mut sites = Sites::default();
        let [all, token] = [0; 2].map(|_| sites.device(NUMBER as usize));
        let [load, store] = [0; 2].map(|_| sites.device(vector));
        for first in (0..self.tile.count()).step_by(LANES) {
            let lanes = LANES.min(self.tile.count() - first);
            let rows = first / per_row..=(first + lanes - 1) / per_row;
            let mut key = vec![lanes as u64, (first % per_row) as u64];
            key.push((*rows.start() as u64 * of_row) % SECTOR);
            key.push(*rows.start() as u64 % (SECTOR / NUMBER));
            let own = |row: usize| self.tokens.get(row).copied();
            key.extend(rows.clone().map(|row| kind(own(row))));
            let tokens: Vec<usize> = rows.filter_map(own).flatten().collect();
            relative(&mut key, tokens.iter().map(|token| *token as u64 * of_row));
            blocks.count(key, 1, |warp| {
                for lane in 0..lanes {
                    let (row, at) = ((first + lane) / per_row, (first + lane) % per_row);
                    warp.access(all, lane, self.e.experts as u64 * NUMBER);
                    let Some(own) = self.tokens.get(row) else { continue };
                    warp.access(token, lane, row as u64 * NUMBER);
                    let column = (at * vector) as u64;
                    if let Some(own) = own {
                        warp.access(load, lane, *own as u64 * of_row + column);
                    }
                    warp.access(store, lane, row as u64 * of_row + column);
                }
                warp.end();
            })?;
        }
        Some(())
    }

    /// Counts what adds up the rows of tokens, by vectors.
    fn count_combine(&self, blocks: &mut Blocks) -> Option<()> {
        let (model, [bytes, of_sum], mut sites) = (self.e.model, self.bytes(), Sites::default());
        let (width, per_token) =
            (width(self.e.dtype.accumulation(), model), self.tile.rows.per_token);
        let per_row = model / width;
        let place = sites.device(NUMBER as usize);
        let [load, store] = [of_sum, bytes].map(|bytes| sites.device(width * bytes as usize));
        for first in (0..self.tile.count()).step_by(LANES) {
            let lanes = LANES.min(self.tile.count() - first);
            let tokens = first / per_row..=(first + lanes - 1) / per_row;
            let mut key = vec![lanes as u64, (first % per_row) as u64];
            key.push((*tokens.start() * per_token) as u64 % (SECTOR / NUMBER));
            key.push((tokens.start() * model) as u64 * bytes % SECTOR);
            key.extend(tokens.clone().map(|token| self.pairs[token].len() as u64));
            let of_row = |[_, row]: &[usize; 2]| (row * model) as u64 * of_sum;
            for pair in 0..per_token {
                let pairs = tokens.clone().filter_map(|token| self.pairs[token].get(pair));
                relative(&mut key, pairs.map(of_row));
            }
            blocks.count(key, 1, |warp| {
                for lane in 0..lanes {
                    let (token, at) = ((first + lane) / per_row, (first + lane) % per_row);
                    let pairs = &self.pairs[token];
                    // The first that is no row ends the loop.
                    for pair in 0..per_token.min(pairs.len() + 1) {
                        warp.access(place, lane, (token * per_token + pair) as u64 * NUMBER);
                    }
                    for [_, row] in pairs {
                        warp.access(load, lane, (row * model + at * width) as u64 * of_sum);
                    }
                    warp.access(store, lane, (token * model + at * width) as u64 * bytes);
                }
                warp.end();
            })?;
        }
        Some(())
    }

    /// Counts what adds up parts of the gradients of gates.
    fn count_gates(&self, parts: usize, blocks: &mut Blocks) -> Option<()> {
        let ([bytes, of_sum], mut sites) = (self.bytes(), Sites::default());
        let [all, token, expert] = [0; 3].map(|_| sites.device(NUMBER as usize));
        let [part, gate] = [0; 2].map(|_| sites.device(of_sum as usize));
        let to = sites.device(bytes as usize);
        for row in 0..self.tile.rows.count() {
            let own = self.tokens.get(row);
            let first = (row * parts) as u64 * of_sum;
            blocks.count(vec![kind(own.copied()), first % SECTOR], 1, |warp| {
                (0..LANES).for_each(|lane| warp.access(all, lane, 0));
                let read = own.map_or(0..0, |_| 0..LANES);
                read.for_each(|lane| warp.access(token, lane, 0));
                if let Some(Some(_)) = own {
                    for at in 0..parts {
                        warp.access(part, at % LANES, first + at as u64 * of_sum);
                    }
                    [gate, expert, to].iter().for_each(|site| warp.access(*site, 0, 0));
                }
                warp.end();
            })?;
        }
        Some(())
    }
}
