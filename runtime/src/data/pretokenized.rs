//! Files that hold tokens already: those of llm.c, and those of Megatron.
//!
//! llm.c: 256 words of 32 bits, of which the first three are a magic number, a version and the
//! number of tokens; then the tokens, 16 bits each (GPT-2) or 32 bits each (Llama 3).
//! Megatron: a `.bin` of plain tokens beside a `.idx`: `MMIDIDX\0\0`, version 1, a code for the
//! type of tokens, the numbers of sequences and of document ends; then the lengths of sequences,
//! their places, and the sequences at which documents start, and the number of all at last.

use std::path::Path;

use ir::{Diagnostic, Span};

use crate::error::Failure;
use crate::map::Map;

/// Bytes of an llm.c header.
const HEADER: usize = 1024;
/// llm.c: tokens of 16 bits, version 1.
const MAGIC_16: u32 = 20_240_520;
/// llm.c: tokens of 32 bits, version 7.
const MAGIC_32: u32 = 20_240_801;
/// The start of a Megatron index.
const INDEX_MAGIC: &[u8; 9] = b"MMIDIDX\0\0";
/// Bytes of a Megatron index before its lists.
const INDEX_HEADER: usize = 34;

/// What a file of tokens holds.
#[derive(Debug, PartialEq)]
pub(super) struct Ready {
    pub(super) tokens: Vec<u32>,
    /// Tokens at which documents start, where the file lists them: ascending.
    pub(super) documents: Vec<usize>,
}

/// Whether a file is the index of a Megatron file beside it.
pub(super) fn is_index(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == "idx") && path.with_extension("bin").exists()
}

/// The tokens of a file, if its name ends in `.bin`; other files are text.
///
/// **Errors.** E4033 if it is no known or a damaged format, E4034 if a token is beyond the
/// vocabulary.
pub(super) fn read(path: &Path, bytes: &[u8], vocabulary: usize) -> Result<Option<Ready>, Failure> {
    if path.extension().is_none_or(|extension| extension != "bin") {
        return Ok(None);
    }
    let index = path.with_extension("idx");
    let span = Span::of(path.display().to_string());
    let (start, (width, documents)) = if index.exists() {
        let index_map = Map::open(&index)?;
        let index_span = Span::of(index.display().to_string());
        let read = read_index(&index_map, bytes.len() as u64);
        (0, read.map_err(|headline| damaged(index_span, headline))?)
    } else {
        let width = llm_c_width(bytes).map_err(|headline| damaged(span.clone(), headline))?;
        (HEADER, (width, Vec::new()))
    };
    let data = &bytes[start..];
    let tokens = widen(data, width);
    if let Some(at) = tokens.iter().position(|&token| token as usize >= vocabulary) {
        let beyond = number(&data[at * width..(at + 1) * width]);
        let headline = format!("the file has token {beyond}; the model has {vocabulary}");
        return Err(Diagnostic::error("E4034", span, headline)
            .note(format!("it is the token {at}, at byte {}", start + at * width))
            .help("use tokens that were made for this model")
            .into());
    }
    Ok(Some(Ready { tokens, documents }))
}

fn damaged(span: Span, headline: String) -> Diagnostic {
    Diagnostic::error("E4033", span, headline).note(
        "a `.bin` file is one of llm.c, or one of Megatron with its `.idx` beside it; \
         other files are text",
    )
}

/// Little-endian tokens of 1, 2, 4 or 8 bytes; those beyond 32 bits become the greatest.
fn widen(bytes: &[u8], width: usize) -> Vec<u32> {
    let token = |chunk: &[u8]| u32::try_from(number(chunk)).unwrap_or(u32::MAX);
    bytes.chunks_exact(width).map(token).collect()
}

/// Little-endian bytes as a number.
fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |n, &b| n << 8 | u64::from(b))
}

/// Checks the header of an llm.c file against its size, and returns the bytes of a token.
fn llm_c_width(bytes: &[u8]) -> Result<usize, String> {
    let word = |i: usize| {
        let word = bytes.get(4 * i..)?.first_chunk::<4>()?;
        Some(u32::from_le_bytes(*word))
    };
    let width = match (word(0), word(1)) {
        (Some(MAGIC_16), Some(1)) => 2,
        (Some(MAGIC_32), Some(7)) => 4,
        _ => return Err("not a known file of tokens".to_owned()),
    };
    let count = word(2).unwrap_or(0) as usize;
    let data = bytes.get(HEADER..).ok_or("the file ends before its tokens")?;
    if count.checked_mul(width) != Some(data.len()) {
        return Err(format!(
            "the header says {count} tokens of {width} bytes, and {} bytes follow it",
            data.len()
        ));
    }
    Ok(width)
}

/// Checks an index against the size of its data, and returns the bytes of a token and the tokens at
/// which documents start.
fn read_index(index: &[u8], data_len: u64) -> Result<(usize, Vec<usize>), String> {
    let number = |at: usize| {
        let bytes = index.get(at..)?.first_chunk::<8>()?;
        Some(u64::from_le_bytes(*bytes))
    };
    if !index.starts_with(INDEX_MAGIC) || number(9) != Some(1) || index.len() < INDEX_HEADER {
        return Err("not an index of Megatron, version 1".to_owned());
    }
    let width = match index[17] {
        1 => 1,
        8 => 2,
        4 => 4,
        5 => 8,
        code => return Err(format!("tokens of type {code} are not whole numbers")),
    };
    let (sequences, documents) = (number(18).unwrap_or(0), number(26).unwrap_or(0));
    let lists = sequences
        .checked_mul(12)
        .and_then(|n| n.checked_add(documents.checked_mul(8)?))
        .and_then(|n| n.checked_add(INDEX_HEADER as u64));
    if lists.is_none_or(|end| end > index.len() as u64) {
        return Err(format!(
            "{sequences} sequences and {documents} document ends don't fit in {} bytes",
            index.len()
        ));
    }
    let lengths = &index[INDEX_HEADER..INDEX_HEADER + 4 * sequences as usize];
    let total: u64 = lengths.as_chunks().0.iter().map(|&n| u64::from(u32::from_le_bytes(n))).sum();
    if total.checked_mul(width as u64) != Some(data_len) {
        return Err(format!(
            "the index says {total} tokens of {width} bytes, and the data has {data_len} bytes"
        ));
    }
    let listed = &index[INDEX_HEADER + 12 * sequences as usize..][..8 * documents as usize];
    Ok((width, first_tokens(lengths, listed)?))
}

/// The first token of each document: `lengths` are the tokens of sequences, `listed` the sequences
/// at which documents start.
fn first_tokens(lengths: &[u8], listed: &[u8]) -> Result<Vec<usize>, String> {
    let mut lengths = lengths.as_chunks().0.iter();
    let (mut sequence, mut token, mut firsts) = (0, 0, Vec::new());
    for first in listed.as_chunks().0 {
        let first = u64::from_le_bytes(*first);
        if first < sequence || first - sequence > lengths.len() as u64 {
            return Err(format!("a document starts at sequence {first}, and there is none"));
        }
        let passed = lengths.by_ref().take((first - sequence) as usize);
        token += passed.map(|length| u32::from_le_bytes(*length) as usize).sum::<usize>();
        sequence = first;
        firsts.push(token);
    }
    Ok(firsts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::mutations;

    fn llm_c_file(magic: u32, version: u32, data: &[u8], width: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        for word in [magic, version, (data.len() / width) as u32] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.resize(HEADER, 0);
        bytes.extend(data);
        bytes
    }

    #[test]
    fn tokens_of_both_formats_are_read() {
        let read = |bytes: &[u8]| {
            let ready = super::read(Path::new("a.bin"), bytes, 1 << 20);
            ready.map(|ready| ready.map(|ready| ready.tokens))
        };
        let short = llm_c_file(MAGIC_16, 1, &[1, 0, 0, 2], 2);
        assert_eq!(read(&short).unwrap().unwrap(), [1, 512]);
        let long = llm_c_file(MAGIC_32, 7, &[1, 0, 2, 0], 4);
        assert_eq!(read(&long).unwrap().unwrap(), [131_073]);
        assert!(read(&short[..short.len() - 1]).is_err());
        assert!(read(b"some text").is_err());
    }

    #[test]
    fn a_token_that_the_model_lacks_is_told_with_its_place() {
        let file = llm_c_file(MAGIC_16, 1, &[1, 0, 44, 1, 2, 0], 2);
        let ready = super::read(Path::new("a.bin"), &file, 301).unwrap().unwrap();
        assert_eq!((ready.tokens, ready.documents), (vec![1, 300, 2], Vec::new()));
        let Err(Failure::Input(wrong)) = super::read(Path::new("a.bin"), &file, 300) else {
            panic!("300 is no token of 300");
        };
        assert_eq!(wrong[0].headline, "the file has token 300; the model has 300");
        assert_eq!(wrong[0].notes, ["it is the token 1, at byte 1026"]);
    }

    fn index() -> Vec<u8> {
        let mut index = INDEX_MAGIC.to_vec();
        index.extend(1_u64.to_le_bytes());
        index.push(8);
        index.extend(2_u64.to_le_bytes());
        index.extend(3_u64.to_le_bytes());
        index.extend([5_i32, 7].iter().flat_map(|n| n.to_le_bytes()));
        index.extend([0_i64, 10, 0, 1, 2].iter().flat_map(|n| n.to_le_bytes()));
        index
    }

    #[test]
    fn an_index_is_checked_against_its_data() {
        assert_eq!(read_index(&index(), 24), Ok((2, vec![0, 5, 12])));
        assert!(read_index(&index(), 26).is_err());
        assert!(read_index(&index()[..60], 24).is_err());
        let mut huge = index();
        huge[18..26].fill(0xff);
        assert!(read_index(&huge, 24).is_err());
        for wrong in [[0_u64, 3, 2], [1, 0, 2], [0, 1, u64::MAX]] {
            let mut damaged = index();
            let start = damaged.len() - 24;
            damaged.truncate(start);
            damaged.extend(wrong.iter().flat_map(|n| n.to_le_bytes()));
            assert!(read_index(&damaged, 24).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn mutants_never_panic() {
        let file = llm_c_file(MAGIC_16, 1, &[7; 20], 2);
        for (_, mutant) in mutations(&file, 300) {
            let _ = llm_c_width(&mutant);
        }
        for (_, mutant) in mutations(&index(), 300) {
            let _ = read_index(&mutant, 24);
        }
    }
}
