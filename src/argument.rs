//! What an argument names: a preset or a path, whose bytes need not be UTF-8.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

use clap::builder::{OsStringValueParser, TypedValueParser, ValueParserFactory};
use serde::{Deserialize, Serialize};

/// An argument that names a preset or a path.
///
/// Shown, bytes that are no UTF-8 are replaced; stored, it reads back to the byte.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Stored", into = "Stored")]
pub struct PathArg(PathBuf);

/// As it stands in files, which are UTF-8.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum Stored {
    Text(String),
    Bytes { bytes: Vec<u8> },
}

impl PathArg {
    /// As a path.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Whether it is this text.
    pub fn is(&self, text: &str) -> bool {
        self.0.as_os_str() == text
    }

    /// The name and the file of `NAME=FILE`.
    pub fn pair(&self) -> Option<(String, PathArg)> {
        let bytes = self.0.as_os_str().as_bytes();
        let at = bytes.iter().position(|byte| *byte == b'=')?;
        let (name, file) = (&bytes[..at], &bytes[at + 1..]);
        let name = String::from_utf8_lossy(name).into_owned();
        Some((name, PathArg::from(OsStr::from_bytes(file).to_owned())))
    }
}

impl AsRef<Path> for PathArg {
    fn as_ref(&self) -> &Path {
        &self.0
    }
}

impl From<&str> for PathArg {
    fn from(text: &str) -> PathArg {
        PathArg(PathBuf::from(text))
    }
}

impl From<OsString> for PathArg {
    fn from(argument: OsString) -> PathArg {
        PathArg(PathBuf::from(argument))
    }
}

/// As it is shown, which names it in diagnostics.
impl From<&PathArg> for String {
    fn from(argument: &PathArg) -> String {
        argument.to_string()
    }
}

impl From<Stored> for PathArg {
    fn from(stored: Stored) -> PathArg {
        match stored {
            Stored::Text(text) => PathArg(PathBuf::from(text)),
            Stored::Bytes { bytes } => PathArg::from(OsString::from_vec(bytes)),
        }
    }
}

impl From<PathArg> for Stored {
    fn from(named: PathArg) -> Stored {
        match named.0.into_os_string().into_string() {
            Ok(text) => Stored::Text(text),
            Err(other) => Stored::Bytes { bytes: other.into_vec() },
        }
    }
}

impl fmt::Display for PathArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.display().fmt(f)
    }
}

impl ValueParserFactory for PathArg {
    type Parser = clap::builder::MapValueParser<OsStringValueParser, fn(OsString) -> PathArg>;

    fn value_parser() -> Self::Parser {
        OsStringValueParser::new().map(PathArg::from)
    }
}

/// The largest count that a flag takes. Chosen: far above any real one, and products of two fit.
const COUNT_MAX: usize = 1 << 30;

/// Reads a flag that is a count of at least one.
pub fn positive(text: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(0) => Err("at least 1 is needed".to_owned()),
        Ok(number) if number <= COUNT_MAX => Ok(number),
        Ok(_) => Err(format!("at most {COUNT_MAX} is possible")),
        Err(_) => Err("not a whole number".to_owned()),
    }
}

/// Reads a flag that is a number of tokens of a sample: `4096`, or `4k` for the same.
pub fn length(text: &str) -> Result<usize, String> {
    let Some(thousands) = text.strip_suffix(['k', 'K']) else { return positive(text) };
    match positive(thousands)? {
        number if number <= COUNT_MAX / 1024 => Ok(1024 * number),
        _ => Err(format!("at most {}k is possible", COUNT_MAX / 1024)),
    }
}

/// Reads a flag that is a finite number of at least zero.
pub fn amount(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number >= 0.0 => Ok(number),
        Ok(_) => Err("a finite number of at least 0 is needed".to_owned()),
        Err(_) => Err("not a number".to_owned()),
    }
}

/// Seconds of an hour.
pub const HOUR_S: f64 = 3600.0;

const DAY_S: f64 = 24.0 * HOUR_S;

/// The largest number of tokens, price, and number of watts. Chosen: far above any real one, and
/// products of them are finite.
const MANY_MAX: f64 = 1e18;

/// The currency of a price that names none.
pub const USUAL_CURRENCY: &str = "USD";

/// An amount of money.
#[derive(Clone, Debug, PartialEq)]
pub struct Money {
    /// How much.
    pub value: f64,
    /// In which currency, by its three letters.
    pub currency: String,
}

impl fmt::Display for Money {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.value, self.currency)
    }
}

/// Reads what an hour of a device costs: `2.5EUR`, or `2.5` in [`USUAL_CURRENCY`].
pub fn price(text: &str) -> Result<Money, String> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let currency = match &text[digits.len()..] {
        "" => USUAL_CURRENCY,
        letters if letters.len() == 3 && letters.bytes().all(|b| b.is_ascii_uppercase()) => letters,
        _ => return Err("write a number and three letters, such as 2.5EUR".to_owned()),
    };
    let value = amount(digits.trim_end())?;
    if value > MANY_MAX {
        return Err(format!("at most {MANY_MAX:e} is possible"));
    }
    Ok(Money { value, currency: currency.to_owned() })
}

/// Reads a large number: `300B`, `1.5T`, `2e12`.
pub fn many(text: &str) -> Result<f64, String> {
    let suffixes = [('K', 1e3), ('M', 1e6), ('B', 1e9), ('G', 1e9), ('T', 1e12)];
    let found = suffixes.iter().find_map(|(suffix, factor)| {
        Some((text.strip_suffix([*suffix, suffix.to_ascii_lowercase()])?, *factor))
    });
    let (digits, factor) = found.unwrap_or((text, 1.0));
    let number = amount(digits)? * factor;
    match number {
        ..1.0 => Err("at least 1 is needed".to_owned()),
        1.0..=MANY_MAX => Ok(number),
        _ => Err(format!("at most {MANY_MAX:e} is possible")),
    }
}

/// The units of times, in seconds.
const TIMES: [(&[&str], f64); 7] = [
    (&["us"], 1e-6),
    (&["ms"], 1e-3),
    (&["s", "sec", "second", "seconds"], 1.0),
    (&["m", "min", "minute", "minutes"], 60.0),
    (&["h", "hour", "hours"], HOUR_S),
    (&["d", "day", "days"], DAY_S),
    (&["w", "week", "weeks"], 7.0 * DAY_S),
];

/// Reads a time: `500ms`, `90m`, `12h`, `30d` or `30 days`, in seconds.
pub fn duration(text: &str) -> Result<f64, String> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let unit = text[digits.len()..].to_ascii_lowercase();
    let found = TIMES.iter().find(|(units, _)| units.contains(&unit.as_str()));
    let (_, factor) = found.ok_or("write a time with its unit: 500ms, 10s, 90m, 12h or 30d")?;
    let seconds = amount(digits.trim_end())? * factor;
    match seconds {
        ..=0.0 => Err("more than no time is needed".to_owned()),
        _ if seconds <= MANY_MAX => Ok(seconds),
        _ => Err(format!("at most {MANY_MAX:e} seconds are possible")),
    }
}

/// Reads a probability.
pub fn share(text: &str) -> Result<f64, String> {
    let share = text.parse().ok().filter(|share| (0.0..=1.0).contains(share));
    share.ok_or_else(|| "write a number from 0 to 1".to_owned())
}

/// Reads what a device draws: more than nothing.
pub fn watts(text: &str) -> Result<f64, String> {
    let watts = amount(text)?;
    match watts {
        ..=0.0 => Err("more than 0 W is needed".to_owned()),
        _ if watts <= MANY_MAX => Ok(watts),
        _ => Err(format!("at most {MANY_MAX:e} W are possible")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_times_are_read() {
        assert_eq!(many("300B"), Ok(300e9));
        assert_eq!(many("1.5t"), Ok(1.5e12));
        assert_eq!(many("12"), Ok(12.0));
        assert!(many("0").is_err() && many("-3B").is_err() && many("B").is_err());
        assert_eq!(duration("90m"), Ok(5400.0));
        assert_eq!(duration("30d"), Ok(30.0 * 86400.0));
        assert_eq!((duration("30 days"), duration("2weeks")), (duration("30d"), duration("14d")));
        assert_eq!((duration("500ms"), duration("250us")), (Ok(0.5), Ok(250e-6)));
        assert!(many("1e300T").is_err() && price("1e30").is_err() && watts("1e300").is_err());
        for (text, said) in [("2.5EUR", "2.5 EUR"), ("3 CHF", "3 CHF"), ("2", "2 USD")] {
            assert_eq!(price(text).map(|money| money.to_string()), Ok(said.to_owned()));
        }
        assert!(price("2.5eur").is_err() && price("EUR").is_err() && price("2dollars").is_err());
        assert!(duration("30").is_err() && duration("0h").is_err());
    }
}
