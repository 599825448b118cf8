//! TensorBoard's event files, written by hand: they are three formats, each of a few lines.
//!
//! A file is a sequence of records: length (u64), masked CRC-32C of the length (u32), content,
//! masked CRC-32C of the content. The content is a protocol buffer `Event`, of which we write
//! `wall_time` (1, double), `step` (2, int64), `file_version` (3, string), `summary` (5) with
//! values of `tag` (1, string) and `simple_value` (2, float), and `session_log` (7).

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use crate::error::Error;

/// The wire types of protocol buffers.
const VARINT: u8 = 0;
const FIXED64: u8 = 1;
const BYTES: u8 = 2;
const FIXED32: u8 = 5;

/// An event file of one run.
#[derive(Debug)]
pub struct Events {
    path: PathBuf,
    file: File,
}

impl Events {
    /// Begins an event file in a directory. Times are in seconds since 1970.
    ///
    /// If the run goes on after step `resumed`, TensorBoard is told to forget later ones.
    pub fn create(folder: &Path, time_s: f64, resumed: Option<u64>) -> Result<Events, Error> {
        let name = format!("events.out.tfevents.{time_s:.0}.gantline.{}", std::process::id());
        let path = folder.join(name);
        let file = File::create(&path).map_err(Error::io("create", &path))?;
        let mut events = Events { path, file };
        let mut version = Vec::new();
        put_double(&mut version, 1, time_s);
        put_bytes(&mut version, 3, b"brain.Event:2");
        events.write(&version)?;
        if let Some(step) = resumed {
            let mut start = Vec::new();
            put_double(&mut start, 1, time_s);
            put_varint(&mut start, 2, step + 1);
            // SessionLog { status (1): START (1) }.
            put_bytes(&mut start, 7, &[1 << 3 | VARINT, 1]);
            events.write(&start)?;
        }
        Ok(events)
    }

    /// Adds the values of a step, each under its tag, for example `loss/train`.
    pub fn append(&mut self, step: u64, time_s: f64, values: &[(&str, f32)]) -> Result<(), Error> {
        let mut summary = Vec::new();
        for (tag, value) in values {
            let mut entry = Vec::new();
            put_bytes(&mut entry, 1, tag.as_bytes());
            entry.push(2 << 3 | FIXED32);
            entry.extend(value.to_le_bytes());
            put_bytes(&mut summary, 1, &entry);
        }
        let mut event = Vec::new();
        put_double(&mut event, 1, time_s);
        put_varint(&mut event, 2, step);
        put_bytes(&mut event, 5, &summary);
        self.write(&event)
    }

    fn write(&mut self, event: &[u8]) -> Result<(), Error> {
        self.file.write_all(&record(event)).map_err(Error::io("write", &self.path))
    }
}

/// A record with its checksums.
fn record(content: &[u8]) -> Vec<u8> {
    let length = (content.len() as u64).to_le_bytes();
    let checks = [masked(&length), masked(content)].map(u32::to_le_bytes);
    [&length[..], &checks[0], content, &checks[1]].concat()
}

/// The checksum as it is stored: rotated and moved, so that one over data with checksums differs.
fn masked(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC-32C (Castagnoli), bit by bit: events are short.
fn crc32c(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
    !bytes.iter().fold(!0, |crc, &byte| (0..8).fold(crc ^ u32::from(byte), step))
}

fn put_varint(out: &mut Vec<u8>, field: u8, value: u64) {
    out.push(field << 3 | VARINT);
    varint(out, value);
}

fn put_double(out: &mut Vec<u8>, field: u8, value: f64) {
    out.push(field << 3 | FIXED64);
    out.extend(value.to_le_bytes());
}

fn put_bytes(out: &mut Vec<u8>, field: u8, bytes: &[u8]) {
    out.push(field << 3 | BYTES);
    varint(out, bytes.len() as u64);
    out.extend(bytes);
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn checksums_are_castagnolis() {
        // RFC 3720, B.4.
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn the_first_record_is_the_one_that_tensorflow_writes() {
        // Length 24, its checksum, wall time 0 here, version.
        let mut content = Vec::new();
        put_double(&mut content, 1, 0.0);
        put_bytes(&mut content, 3, b"brain.Event:2");
        assert_eq!(content.len(), 24);
        let record = record(&content);
        assert_eq!(record[..12], [24, 0, 0, 0, 0, 0, 0, 0, 0xa3, 0x7f, 0x4b, 0x22]);
        assert_eq!(&record[21..36], b"\x1a\x0dbrain.Event:2");
    }

    #[test]
    fn values_are_encoded_as_protocol_buffers() {
        let scratch = Scratch::new("events");
        let mut events = Events::create(scratch.path(), 1.5, Some(299)).unwrap();
        events.append(300, 2.0, &[("loss", 0.5), ("lr", 1.0)]).unwrap();
        let bytes = std::fs::read(&events.path).unwrap();
        let expected = [
            &[0x09, 0, 0, 0, 0, 0, 0, 0, 0x40, 0x10, 0xac, 0x02, 0x2a, 24][..],
            &[0x0a, 11, 0x0a, 4],
            b"loss",
            &[0x15, 0, 0, 0, 0x3f, 0x0a, 9, 0x0a, 2],
            b"lr",
            &[0x15, 0, 0, 0x80, 0x3f],
        ]
        .concat();
        assert_eq!(bytes[bytes.len() - 4 - expected.len()..bytes.len() - 4], expected);
        assert_eq!(bytes.len(), 40 + (16 + 16) + (16 + expected.len()));
    }
}
