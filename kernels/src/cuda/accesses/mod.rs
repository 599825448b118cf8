//! What device functions access, counted from their tile programs: sectors of device memory, and
//! turns of the banks of shared memory, beside the least that the bytes take.
//!
//! No text is compiled or executed. A family lists, for each warp of a block, the addresses of each
//! load and store (a *site*) of each lane in the order of the text; what the lanes access by one
//! site between two barriers, each for the same time, is one request, as in the shim that executes
//! the text in tests. Blocks whose addresses differ by multiples of a sector are counted once
//! (`Blocks::count`).
//!
//! Counted are fused loops over rows, products and attention on CUDA cores, by `mma.sync` and by
//! `wgmma`, the steps that route tokens, sums of slices, operations along a dim, and what moves
//! elements to places that the kernel names. Of shared memory `ldmatrix` alone counts by
//! `mma.sync`, and by `wgmma` what threads access. Each row of a box that TMA copies is a request,
//! of which nothing is fetched beyond the tensor; what is fetched early to the L2 cache counts
//! once, where it is read. Scales count as often as the text loads them, once for each sum: a
//! compiler may load those of a row once.
//!
//! Two things that are known at run time alone are assumed ([`Function::assumed`]): that tokens are
//! spread evenly over experts (`dealt`), and on CUDA cores that all tokens of a sample are of one
//! document. On tensor cores the numbers of documents decide no access: they are read of each query
//! and key that see each other but for their documents.
//!
//! Nothing is known here of two weights of experts that share block tiles on CUDA cores, of what is
//! largest, of orders, of what ids, positions or launch scalars decide, and of loops whose loads a
//! compiler may move or leave out: those that nothing uses, and in F64 those beside functions of
//! the library.
//!
//! Buffers start at multiples of a sector, as those of an arena do, and arrays in shared memory at
//! the first bank.

mod attention;
mod dealt;
mod flash;
mod flash_backward;
mod flash_warpgroup_backward;
mod lines;
mod moves;
mod pairs;
mod product;
mod reduction;
mod routing;
mod rows;
mod scales;
mod spans;
mod tensor;
mod warpgroup;

use std::collections::BTreeMap;
use std::fmt;

use super::attention::Part;
use super::function::Function;
use super::moves::Move;
use super::routing::RoutingStep;
use super::tile::Tile;

/// Lanes of a warp.
const LANES: usize = 32;
/// Bytes of a sector of device memory.
const SECTOR: u64 = 32;
/// Banks of shared memory, each of four bytes.
const BANKS: u64 = 32;
/// Where the second of two buffers starts that one load has addresses of: behind all of the first.
const OTHER: u64 = 1 << 40;
/// Most addresses that are looked at for a function. Chosen: some seconds.
const MOST: u64 = 1 << 27;

/// What all blocks of a function access.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Accesses {
    /// Sectors of device memory that requests touch, and as many as their bytes fill.
    pub sectors: [u64; 2],
    /// Turns of the banks of shared memory that requests take, and as many as their words fill.
    pub turns: [u64; 2],
}

impl Accesses {
    /// Those of two functions, or of a block that is repeated.
    pub fn plus(self, times: u64, other: Accesses) -> Accesses {
        let sum = |a: [u64; 2], b: [u64; 2]| [a[0] + times * b[0], a[1] + times * b[1]];
        Accesses { sectors: sum(self.sectors, other.sectors), turns: sum(self.turns, other.turns) }
    }
}

impl Function {
    /// What it accesses, where that follows from its tile program, and perhaps from what is
    /// [assumed](Function::assumed) of data.
    pub fn accesses(&self) -> Option<Accesses> {
        match &self.tile {
            Tile::Elementwise(tile) => rows::elementwise(tile, self.grid),
            Tile::RowReduction(tile) => reduction::row_reduction(tile, self.grid),
            Tile::PartialSums(tile) => reduction::partial_sums(tile, self.grid),
            Tile::Tensor(tile) => tensor::tensor(tile),
            Tile::SliceSum(tile) => tensor::slice_sum(tile, self.grid),
            Tile::Move(Move::Transpose(tile)) => moves::transpose(tile, self.grid),
            Tile::Move(tile) => moves::elements(tile, self.grid),
            Tile::Product(tile) => product::product(tile),
            Tile::Lines(tile) => lines::lines(tile, self.grid),
            Tile::Flash(tile) => flash::flash(tile),
            Tile::Attention(tile) => attention::attention(tile, self.grid),
            Tile::FlashBackward(tile) => flash_backward::flash_backward(tile),
            Tile::FlashWarpgroup(tile) => flash::flash_warpgroup(tile),
            Tile::FlashWarpgroupBackward(tile) => flash_warpgroup_backward::backward(tile),
            Tile::Warpgroup(tile) => warpgroup::warpgroup(tile),
            Tile::Routing(tile) => routing::routing(tile),
        }
    }
}

/// What accesses are counted of where that is known at run time alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Assumed {
    /// As many pairs of a token and an expert as are expected, dealt to the experts in turn and to
    /// the tokens in their order.
    EvenRouting,
    /// Samples that are one document each.
    OneDocument,
}

impl fmt::Display for Assumed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Assumed::EvenRouting => "tokens that are spread evenly over experts",
            Assumed::OneDocument => "samples of one document each",
        })
    }
}

impl Function {
    /// What [its accesses](Function::accesses) are counted of where data decide.
    pub fn assumed(&self) -> Option<Assumed> {
        match &self.tile {
            Tile::Product(tile) => tile.grouped.map(|_| Assumed::EvenRouting),
            Tile::Tensor(tile) => tile.grouped.map(|_| Assumed::EvenRouting),
            Tile::Warpgroup(tile) => tile.grouped.map(|_| Assumed::EvenRouting),
            // How many pairs there are changes nothing where they are counted.
            Tile::Routing(tile) => {
                (tile.step != RoutingStep::Count).then_some(Assumed::EvenRouting)
            }
            Tile::Attention(tile) => {
                let reads = !matches!(tile.part, Part::Delta { .. });
                let has_documents = tile.attention.documents.is_some();
                (reads && has_documents).then_some(Assumed::OneDocument)
            }
            Tile::Elementwise(_)
            | Tile::RowReduction(_)
            | Tile::PartialSums(_)
            | Tile::SliceSum(_)
            | Tile::Flash(_)
            | Tile::FlashWarpgroup(_)
            | Tile::FlashBackward(_)
            | Tile::FlashWarpgroupBackward(_)
            | Tile::Lines(_)
            | Tile::Move(_) => None,
        }
    }
}

/// A load or a store of the text. Those of one site are by one instruction.
#[derive(Clone, Copy, Debug)]
struct Site {
    number: usize,
    /// Bytes of each lane.
    bytes: u64,
    is_shared: bool,
}

/// Hands out sites.
#[derive(Default)]
struct Sites(usize);

impl Sites {
    fn device(&mut self, bytes: usize) -> Site {
        self.0 += 1;
        Site { number: self.0 - 1, bytes: bytes as u64, is_shared: false }
    }

    fn shared(&mut self, bytes: usize) -> Site {
        Site { is_shared: true, ..self.device(bytes) }
    }
}

/// The accesses of a warp.
#[derive(Default)]
struct Warp {
    /// For each site, the addresses of each lane in order: none of a lane that takes no part.
    sites: Vec<Option<(Site, [Vec<Option<u64>>; LANES])>>,
    count: Accesses,
    looked_at: u64,
}

impl Warp {
    /// A lane accesses bytes from an address on.
    fn access(&mut self, site: Site, lane: usize, at: u64) {
        self.pass(site, lane, Some(at));
    }

    /// The same, or a lane takes no part in a request of others.
    fn pass(&mut self, site: Site, lane: usize, at: Option<u64>) {
        if self.sites.len() <= site.number {
            self.sites.resize_with(site.number + 1, || None);
        }
        let (_, lanes) = self.sites[site.number].get_or_insert_with(|| (site, Default::default()));
        lanes[lane].push(at);
        self.looked_at += 1;
    }

    /// Ends the warp: counts its requests.
    fn end(&mut self) {
        let mut at: Vec<u64> = Vec::with_capacity(LANES);
        for (site, lanes) in self.sites.iter_mut().flatten() {
            let most = lanes.iter().map(Vec::len).max().unwrap_or(0);
            for time in 0..most {
                at.clear();
                at.extend(lanes.iter().filter_map(|of| of.get(time).copied().flatten()));
                match site.is_shared {
                    true => count_turns(&at, site.bytes, &mut self.count.turns),
                    false => count_sectors(&mut at, site.bytes, &mut self.count.sectors),
                }
            }
            lanes.iter_mut().for_each(Vec::clear);
        }
    }
}

/// Sectors of a request, and as many as its bytes fill.
fn count_sectors(at: &mut [u64], bytes: u64, to: &mut [u64; 2]) {
    at.sort_unstable();
    let (mut sectors, mut filled) = (0, 0);
    // What follows the last byte, and the last sector.
    let (mut end, mut next) = (0, 0);
    for from in at.iter().copied() {
        let until = from + bytes;
        if until <= end {
            continue;
        }
        filled += until - from.max(end);
        end = until;
        let first = (from / SECTOR).max(next);
        next = until.div_ceil(SECTOR);
        sectors += next - first.min(next);
    }
    to[0] += sectors;
    to[1] += filled.div_ceil(SECTOR);
}

/// Turns of a request, and as many as its words fill: a turn serves 128 bytes, of 16 bytes a lane
/// eight lanes.
fn count_turns(at: &[u64], bytes: u64, to: &mut [u64; 2]) {
    let at_once = (4 * BANKS / bytes.max(4)) as usize;
    for lanes in at.chunks(at_once) {
        let mut words: Vec<u64> =
            lanes.iter().flat_map(|at| at / 4..(at + bytes).div_ceil(4)).collect();
        words.sort_unstable();
        words.dedup();
        let mut banks = [0; BANKS as usize];
        words.iter().for_each(|word| banks[(word % BANKS) as usize] += 1);
        to[0] += banks.into_iter().max().unwrap_or(0);
        to[1] += (words.len() as u64).div_ceil(BANKS);
    }
}

/// Blocks of which some have the same counts.
struct Blocks {
    /// What was counted, by all that the counts of a block depend on.
    known: BTreeMap<Vec<u64>, Accesses>,
    count: Accesses,
    looked_at: u64,
}

impl Blocks {
    fn new() -> Blocks {
        Blocks { known: BTreeMap::new(), count: Accesses::default(), looked_at: 0 }
    }

    /// Counts a block `times` times, unless one with the same key was counted. None where too much
    /// would have to be looked at.
    fn count(&mut self, key: Vec<u64>, times: u64, list: impl FnOnce(&mut Warp)) -> Option<()> {
        self.looked_at += key.len() as u64 + 1;
        let count = match self.known.get(&key) {
            Some(count) => *count,
            None => {
                let mut warp = Warp::default();
                list(&mut warp);
                self.looked_at += warp.looked_at;
                self.known.insert(key, warp.count);
                warp.count
            }
        };
        self.count = self.count.plus(times, count);
        (self.looked_at <= MOST).then_some(())
    }
}

/// The offset of a linear index over nested loops, outermost first, given as sizes and strides.
fn nested(loops: &[[usize; 2]], index: usize) -> u64 {
    let mut rest = index;
    let mut offset = 0;
    for (at, [size, stride]) in loops.iter().enumerate().rev() {
        let is_outermost = loops[..at].iter().all(|[size, _]| *size <= 1);
        let size = (*size).max(1);
        offset += stride * if is_outermost { rest } else { rest % size };
        rest /= size;
    }
    offset as u64
}

/// Appends addresses to a key: how the first lies in a sector, and where the others are from there.
fn relative(key: &mut Vec<u64>, at: impl IntoIterator<Item = u64>) {
    let mut first = None;
    for at in at {
        match first {
            None => {
                first = Some(at);
                key.push(at % SECTOR);
            }
            Some(first) => key.push(at.wrapping_sub(first)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sectors(at: &[u64], bytes: u64) -> [u64; 2] {
        let mut count = [0; 2];
        count_sectors(&mut at.to_vec(), bytes, &mut count);
        count
    }

    fn turns(at: &[u64], bytes: u64) -> [u64; 2] {
        let mut count = [0; 2];
        count_turns(at, bytes, &mut count);
        count
    }

    /// Requests whose sectors and turns are plain.
    #[test]
    fn requests_take_the_sectors_and_turns_of_their_addresses() {
        let strided = |stride: u64| (0..32).map(|lane| lane * stride).collect::<Vec<u64>>();
        assert_eq!(sectors(&strided(16), 16), [16, 16]);
        assert_eq!(sectors(&strided(32), 4), [32, 4]);
        assert_eq!(sectors(&strided(0), 4), [1, 1]);
        // Two bytes in each of two sectors; and twice the same.
        assert_eq!(sectors(&[30], 4), [2, 1]);
        assert_eq!(sectors(&[64, 0, 64], 4), [2, 1]);
        assert_eq!(turns(&strided(4), 4), [1, 1]);
        assert_eq!(turns(&strided(8), 4), [2, 1]);
        assert_eq!(turns(&strided(128), 4), [32, 1]);
        assert_eq!(turns(&strided(0), 4), [1, 1]);
        assert_eq!(turns(&strided(16), 16), [4, 4]);
        // Rows of 128 bytes in one bank each, eight lanes at a time.
        assert_eq!(turns(&strided(128), 16), [32, 4]);
    }
}
