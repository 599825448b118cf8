//! Damaged copies of a file: bytes that changed, and what a hand or a careless program does to a
//! text: numbers beyond all bounds, lines that are there twice or not at all, lists in lists.

use ir::random::mix;

/// Numbers in place of one.
const NUMBERS: [&[u8]; 14] = [
    b"0",
    b"-1",
    b"1",
    b"3",
    b"65536",
    b"1073741824",
    b"2147483648",
    b"4294967297",
    b"1099511627776",
    b"9223372036854775807",
    b"-9223372036854775808",
    b"18446744073709551616",
    b"1e308",
    b"0.5",
];

/// Draws that depend on the seed alone.
pub(crate) struct Draws(u64);

impl Draws {
    pub(crate) fn new(seed: u64) -> Draws {
        Draws(mix(seed ^ 0x5eed_f00d))
    }

    pub(crate) fn below(&mut self, limit: usize) -> usize {
        self.0 = mix(self.0.wrapping_add(0x9e37_79b9_7f4a_7c15));
        (self.0 % limit.max(1) as u64) as usize
    }
}

/// A damaged copy: one to four changes. Half of them are to bytes, wherever they are; where the
/// file is a text, the others are to what stands in it.
pub(crate) fn mutated(valid: &[u8], seed: u64) -> Vec<u8> {
    let mut draws = Draws::new(seed);
    let is_text = std::str::from_utf8(valid).is_ok();
    let mut bytes = valid.to_vec();
    for _ in 0..[1, 1, 2, 4][draws.below(4)] {
        if is_text && draws.below(2) == 0 {
            change_text(&mut bytes, &mut draws);
        } else {
            change_bytes(&mut bytes, &mut draws);
        }
    }
    bytes
}

fn change_bytes(bytes: &mut Vec<u8>, draws: &mut Draws) {
    if bytes.is_empty() {
        bytes.push(draws.below(256) as u8);
        return;
    }
    // Most of a file of weights is weights: its head is damaged more often than its rest.
    let reach = if draws.below(2) == 0 { bytes.len().min(2048) } else { bytes.len() };
    let at = draws.below(reach);
    match draws.below(9) {
        0 => bytes[at] = draws.below(256) as u8,
        1 => bytes[at] ^= 1 << draws.below(8),
        2 => bytes.insert(at, b"0919{}[],:\"-=%@ \n"[draws.below(17)]),
        3 => drop(bytes.remove(at)),
        4 => {
            let end = (at + draws.below(64)).min(bytes.len());
            let piece = bytes[at..end].to_vec();
            let to = draws.below(bytes.len());
            bytes.splice(to..to, piece);
        }
        5 => bytes.truncate(at),
        6 => bytes[at] = 0xff,
        // The largest number of the binary members.
        7 => drop(bytes.splice(at..at + 1, [255, 255, 255, 255, 255, 255, 255, 255, 255, 1])),
        _ => change_number(bytes, at, draws),
    }
}

/// The first number from a place on becomes another.
fn change_number(bytes: &mut Vec<u8>, at: usize, draws: &mut Draws) {
    let from = bytes[at..].iter().position(u8::is_ascii_digit).map(|n| at + n);
    let Some(from) = from else { return };
    let digits = bytes[from..].iter().take_while(|b| b.is_ascii_digit()).count();
    bytes.splice(from..from + digits, NUMBERS[draws.below(NUMBERS.len())].to_vec());
}

fn change_text(bytes: &mut Vec<u8>, draws: &mut Draws) {
    let lines = pieces(bytes, |byte| byte == b'\n');
    let words = pieces(bytes, |byte| !(byte.is_ascii_alphanumeric() || b"_.%@".contains(&byte)));
    let (line, other) = (draws.below(lines.len()), draws.below(lines.len()));
    let (word, another) = (draws.below(words.len()), draws.below(words.len()));
    let of = |bytes: &[u8], pieces: &[[usize; 2]], at: usize| {
        pieces.get(at).map_or_else(Vec::new, |[start, end]| bytes[*start..*end].to_vec())
    };
    let (Some([start, end]), Some([from, to])) = (lines.get(line), words.get(word)) else {
        return change_bytes(bytes, draws);
    };
    match draws.below(11) {
        // A line twice, not at all, or elsewhere.
        0 => {
            let copy = [of(bytes, &lines, line), b"\n".to_vec()].concat();
            bytes.splice(*start..*start, copy);
        }
        1 => drop(bytes.drain(*start..(*end + 1).min(bytes.len()))),
        2 => {
            let copy = of(bytes, &lines, other);
            bytes.splice(*start..*end, copy);
        }
        // A word in place of another, or none.
        3 => {
            let copy = of(bytes, &words, another);
            bytes.splice(*from..*to, copy);
        }
        4 => drop(bytes.drain(*from..*to)),
        // Deeper than anybody writes.
        5 => {
            let (open, close) =
                [("[", "]"), ("{\"a\":", "}"), ("(", ")"), ("{", "}"), ("-", "")][draws.below(5)];
            let depth = [3, 100, 2000, 20_000][draws.below(4)];
            let nested = [
                open.repeat(depth).into_bytes(),
                of(bytes, &words, word),
                close.repeat(depth).into(),
            ];
            bytes.splice(*from..*to, nested.concat());
        }
        // Longer than anybody writes.
        6 => {
            let long = of(bytes, &words, word).repeat([2, 50, 5000][draws.below(3)]);
            bytes.splice(*from..*to, long);
        }
        _ => change_number(bytes, *start, draws),
    }
}

/// Where the pieces between separators are that are not empty.
fn pieces(bytes: &[u8], is_between: impl Fn(u8) -> bool) -> Vec<[usize; 2]> {
    let mut found = Vec::new();
    let mut start = 0;
    for (at, byte) in bytes.iter().chain(b"\n").enumerate() {
        if is_between(*byte) || at == bytes.len() {
            if start < at {
                found.push([start, at]);
            }
            start = at + 1;
        }
    }
    found
}
