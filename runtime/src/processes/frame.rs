//! What travels on a connection between two processes: frames of a head and some bytes.

use std::io::{self, Read, Write};

/// Bytes of a head: kind, two numbers, length.
const HEAD_BYTES: usize = 24;
/// Bytes that are read at a time, so that a length that lies takes no memory.
const READ_BYTES: u64 = 1 << 20;
/// Frames up to this length are written at once with their head.
const SMALL_BYTES: usize = 1 << 14;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A message from one rank to another.
    Message,
    /// A piece of a collective, from one rank to another.
    Collective,
    /// A rank has failed; the bytes say why.
    Failure,
    /// A rank has ended.
    RankEnded,
    /// Ranks have finished some instructions.
    Heartbeat,
    /// A command of the leader of a session, or a reply.
    Control,
    /// Nothing more comes.
    Close,
}

const KINDS: [Kind; 7] = [
    Kind::Message,
    Kind::Collective,
    Kind::Failure,
    Kind::RankEnded,
    Kind::Heartbeat,
    Kind::Control,
    Kind::Close,
];

/// The head of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) kind: Kind,
    /// The rank that it is of.
    pub(super) from: u32,
    /// The rank that it is for.
    pub(super) to: u32,
    /// Bytes that follow; of progress, the instructions.
    pub(super) length: u64,
}

impl Head {
    /// A head with no ranks.
    pub(super) fn of(kind: Kind, length: usize) -> Head {
        Head { kind, from: 0, to: 0, length: length as u64 }
    }

    fn bytes(self) -> [u8; HEAD_BYTES] {
        let mut bytes = [0; HEAD_BYTES];
        bytes[..4].copy_from_slice(&(self.kind as u32).to_le_bytes());
        bytes[4..8].copy_from_slice(&self.from.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.to.to_le_bytes());
        bytes[16..].copy_from_slice(&self.length.to_le_bytes());
        bytes
    }

    /// Reads the next head.
    pub(super) fn read(source: &mut impl Read) -> io::Result<Head> {
        let mut bytes = [0; HEAD_BYTES];
        source.read_exact(&mut bytes)?;
        let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|i| bytes[at + i]));
        let kind = KINDS.get(word(0) as usize).copied();
        let kind = kind.ok_or_else(|| io::Error::other("it sends what is no frame"))?;
        let length = u64::from(word(16)) | u64::from(word(20)) << 32;
        Ok(Head { kind, from: word(4), to: word(8), length })
    }
}

/// Writes a frame, whose parts follow each other.
pub(super) fn write(target: &mut impl Write, head: Head, parts: [&[u8]; 2]) -> io::Result<()> {
    let length = parts.iter().map(|part| part.len()).sum::<usize>();
    if length <= SMALL_BYTES {
        let mut frame = head.bytes().to_vec();
        parts.iter().for_each(|part| frame.extend_from_slice(part));
        return target.write_all(&frame);
    }
    target.write_all(&head.bytes())?;
    parts.iter().try_for_each(|part| target.write_all(part))
}

/// Reads the bytes of a frame behind those that are there.
pub(super) fn read(source: &mut impl Read, length: u64, bytes: &mut Vec<u8>) -> io::Result<()> {
    let mut left = length;
    while left > 0 {
        let (start, next) = (bytes.len(), left.min(READ_BYTES));
        bytes.resize(start + next as usize, 0);
        source.read_exact(&mut bytes[start..])?;
        left -= next;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_back() {
        for (number, kind) in KINDS.into_iter().enumerate() {
            assert_eq!(kind as usize, number);
            for length in [0, 5, SMALL_BYTES + 7, 3 << 20] {
                let body: Vec<u8> = (0..length).map(|at| at as u8).collect();
                let head = Head { from: 7, to: 1 << 20, ..Head::of(kind, length) };
                let (mut wire, mut back) = (Vec::new(), Vec::new());
                let (a, b) = body.split_at(length / 3);
                write(&mut wire, head, [a, b]).unwrap();
                let mut source = wire.as_slice();
                assert_eq!(Head::read(&mut source).unwrap(), head);
                read(&mut source, head.length, &mut back).unwrap();
                assert!(back == body && source.is_empty());
            }
        }
    }

    #[test]
    fn lengths_that_lie_take_no_memory() {
        let mut bytes = Vec::new();
        read(&mut [1; 10].as_slice(), 1 << 40, &mut bytes).unwrap_err();
        assert!(bytes.capacity() < 1 << 22);
        assert!(Head::read(&mut [9; HEAD_BYTES].as_slice()).is_err(), "no such kind");
    }
}
