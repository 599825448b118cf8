//! `metrics.jsonl`: one JSON object per step.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::disk::replace;
use crate::error::Error;

/// A file of one JSON object per line, each with a `step`.
#[derive(Debug)]
pub struct Lines {
    path: PathBuf,
    file: File,
}

impl Lines {
    /// Begins a new file, in place of one that may be there.
    pub fn create(path: &Path) -> Result<Lines, Error> {
        let file = File::create(path).map_err(Error::io("create", path))?;
        Ok(Lines { path: path.to_owned(), file })
    }

    /// Goes on with a file after a step: lines of later steps, and a line that a crash cut short,
    /// are removed. Begins a new file if there is none.
    pub fn resume(path: &Path, step: u64) -> Result<Lines, Error> {
        let Some(text) = read(path)? else { return Lines::create(path) };
        let kept: String = text
            .split_inclusive('\n')
            .filter(|line| line.ends_with('\n'))
            .filter(|line| parse(line).is_some_and(|(at, _)| at <= step))
            .collect();
        if kept.len() != text.len() {
            replace(path, kept.as_bytes())?;
        }
        let file = OpenOptions::new().append(true).open(path).map_err(Error::io("open", path))?;
        Ok(Lines { path: path.to_owned(), file })
    }

    /// Adds the line of a step, in one write. What isn't finite becomes `null`.
    pub fn append(&mut self, step: u64, values: &[(&str, Value)]) -> Result<(), Error> {
        let mut line = format!("{{\"step\":{step}");
        for (key, value) in values {
            line += &format!(",{}:{value}", Value::from(*key));
        }
        line += "}\n";
        self.file.write_all(line.as_bytes()).map_err(Error::io("write", &self.path))
    }
}

/// The finite values of a key by step, in the order of the lines; none if there is no file.
pub fn series(path: &Path, key: &str) -> Result<Vec<(u64, f64)>, Error> {
    let text = read(path)?.unwrap_or_default();
    let value =
        |line| parse(line).and_then(|(step, object)| Some((step, object.get(key)?.as_f64()?)));
    Ok(text.lines().filter_map(value).collect())
}

fn read(path: &Path) -> Result<Option<String>, Error> {
    match ir::file::read(path) {
        Ok(bytes) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::io("read", path)(error)),
    }
}

fn parse(line: &str) -> Option<(u64, Map<String, Value>)> {
    let object: Map<String, Value> = serde_json::from_str(line).ok()?;
    let step = object.get("step")?.as_u64()?;
    Some((step, object))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn lines_of_later_steps_go_when_a_run_resumes() {
        let scratch = Scratch::new("lines");
        let path = scratch.join("metrics.jsonl");
        let mut lines = Lines::resume(&path, 0).unwrap();
        for step in 1..=5 {
            lines
                .append(step, &[("loss", (step as f64 / 2.0).into()), ("lr", f64::NAN.into())])
                .unwrap();
        }
        drop(lines);
        let mut text = fs::read_to_string(&path).unwrap();
        assert!(text.starts_with("{\"step\":1,\"loss\":0.5,\"lr\":null}\n"));
        text.push_str("{\"step\":2,\"lo");
        fs::write(&path, text).unwrap();
        let mut lines = Lines::resume(&path, 3).unwrap();
        lines.append(4, &[("loss", 9.0.into())]).unwrap();
        assert_eq!(series(&path, "loss").unwrap(), [(1, 0.5), (2, 1.0), (3, 1.5), (4, 9.0)]);
        assert_eq!(series(&path, "lr").unwrap(), []);
        assert_eq!(series(&scratch.join("none"), "loss").unwrap(), []);
    }
}
