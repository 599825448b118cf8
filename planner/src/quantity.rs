//! Numbers with units, as texts: `450 GB/s`, `80 GiB`, `2.5 us`, `989 TFLOP/s`, `700 W`.

/// What a number counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// `B`, `kB`, `KiB`, …
    Bytes,
    /// `GB/s`, `GiB/s`, `Gb/s` or `Gbps`, …: per device, one direction.
    BytesPerSecond,
    /// `GFLOP/s`, `TFLOP/s`, …; a fused multiply-add counts two.
    FlopsPerSecond,
    /// `ns`, `us`, `ms`, `s`.
    Seconds,
    /// `FLOP`, `MFLOP`, …
    Flops,
    /// `W`, `kW`, …
    Watts,
}

/// A factor: a power of ten, which decimal digits take exactly, times a power of two.
#[derive(Clone, Copy)]
struct Scale {
    ten: i32,
    two: i32,
}

impl Scale {
    fn ten(ten: i32) -> Scale {
        Scale { ten, two: 0 }
    }

    /// The number that stands before the unit. Positive powers of ten are exact.
    fn number(self, value: f64) -> f64 {
        let value = value / 2f64.powi(self.two);
        if self.ten < 0 { value * 10f64.powi(-self.ten) } else { value / 10f64.powi(self.ten) }
    }
}

const DECIMAL: [(&str, i32); 6] = [("P", 15), ("T", 12), ("G", 9), ("M", 6), ("k", 3), ("", 0)];
const BINARY: [(&str, i32); 4] = [("Ti", 40), ("Gi", 30), ("Mi", 20), ("Ki", 10)];
const TIME: [(&str, i32); 5] = [("s", 0), ("ms", -3), ("us", -6), ("µs", -6), ("ns", -9)];

impl Unit {
    /// A text of the unit, for help.
    pub fn example(self) -> &'static str {
        match self {
            Unit::Bytes => "80 GiB",
            Unit::BytesPerSecond => "12.5 GB/s",
            Unit::FlopsPerSecond => "989 TFLOP/s",
            Unit::Seconds => "30 us",
            Unit::Flops => "10 GFLOP",
            Unit::Watts => "700 W",
        }
    }

    /// Reads a number with its unit, in SI base units; none when the text is not of this unit.
    ///
    /// `900 GB/s bidirectional` is 450 GB/s.
    pub fn parse(self, text: &str) -> Option<f64> {
        let (text, half) = match text.trim().strip_suffix("bidirectional") {
            Some(text) if self == Unit::BytesPerSecond => (text.trim(), 0.5),
            _ => (text.trim(), 1.0),
        };
        let (digits, exponent, unit) = split(text)?;
        let scale = self.scale(unit)?;
        let ten = scale.ten.saturating_add(exponent.parse().ok()?);
        let number: f64 = format!("{}e{ten}", digits.replace(',', "")).parse().ok()?;
        let value = number * 2f64.powi(scale.two) * half;
        (value.is_finite() && value >= 0.0).then_some(value)
    }

    /// Whether a text ends with a unit of this kind, whatever stands before it.
    pub(crate) fn ends(self, text: &str) -> bool {
        let text = text.trim().strip_suffix("bidirectional").unwrap_or(text).trim();
        split(text).is_some_and(|(_, _, unit)| self.scale(unit).is_some())
    }

    fn scale(self, unit: &str) -> Option<Scale> {
        match self {
            Unit::Bytes => bytes(unit),
            Unit::BytesPerSecond => {
                let unit = unit.strip_suffix("/s").or_else(|| unit.strip_suffix("ps"))?;
                bytes(unit)
                    .or_else(|| prefix(unit.strip_suffix('b')?).map(|s| Scale { two: -3, ..s }))
            }
            Unit::FlopsPerSecond => {
                let unit = unit.strip_suffix("/s")?;
                let unit = unit.strip_suffix("FLOP").or_else(|| unit.strip_suffix("OP"))?;
                prefix(unit)
            }
            Unit::Seconds => find(&TIME, unit).map(Scale::ten),
            Unit::Flops => prefix(unit.strip_suffix("FLOP")?),
            Unit::Watts => prefix(unit.strip_suffix('W')?),
        }
    }

    /// Prints a number so that [`Unit::parse`] reads the same one.
    pub fn print(self, value: f64) -> String {
        let scales: Vec<(String, Scale)> = match self {
            Unit::Bytes => BINARY
                .iter()
                .map(|(name, two)| (format!("{name}B"), Scale { ten: 0, two: *two }))
                .chain(named("B"))
                .collect(),
            Unit::BytesPerSecond => named("B/s"),
            Unit::FlopsPerSecond => named("FLOP/s"),
            Unit::Flops => named("FLOP"),
            Unit::Watts => named("W"),
            Unit::Seconds => {
                TIME.iter().map(|(name, ten)| ((*name).to_owned(), Scale::ten(*ten))).collect()
            }
        };
        let exact = scales
            .iter()
            .map(|(name, scale)| format!("{} {name}", scale.number(value)))
            .filter(|text| self.parse(text) == Some(value))
            .min_by_key(String::len);
        exact.unwrap_or_else(|| {
            let (name, scale) = &scales[scales.len() - 1];
            format!("{} {name}", scale.number(value))
        })
    }
}

/// The digits of a text, its power of ten, and its unit.
fn split(text: &str) -> Option<(&str, &str, &str)> {
    let is_digit = |c: char| c.is_ascii_digit();
    let end = text.find(|c: char| !(is_digit(c) || c == '.' || c == ','))?;
    let (digits, rest) = text.split_at(end);
    let after = rest.strip_prefix(['e', 'E']).unwrap_or("");
    let sign = usize::from(after.starts_with(['+', '-']));
    let power = after[sign..].find(|c: char| !is_digit(c)).map_or(after.len(), |at| sign + at);
    match power > sign {
        true => Some((digits, &after[..power], after[power..].trim())),
        false => Some((digits, "0", rest.trim())),
    }
}

fn named(unit: &str) -> Vec<(String, Scale)> {
    DECIMAL.iter().map(|(name, ten)| (format!("{name}{unit}"), Scale::ten(*ten))).collect()
}

fn find(names: &[(&str, i32)], name: &str) -> Option<i32> {
    names.iter().find(|(n, _)| *n == name).map(|(_, power)| *power)
}

fn prefix(name: &str) -> Option<Scale> {
    find(&DECIMAL, name).map(Scale::ten)
}

fn bytes(unit: &str) -> Option<Scale> {
    let name = unit.strip_suffix('B')?;
    find(&BINARY, name).map(|two| Scale { ten: 0, two }).or_else(|| prefix(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_read() {
        assert_eq!(Unit::BytesPerSecond.parse("450 GB/s"), Some(450e9));
        assert_eq!(Unit::BytesPerSecond.parse("400 Gb/s"), Some(50e9));
        assert_eq!(Unit::BytesPerSecond.parse("900 GB/s bidirectional"), Some(450e9));
        assert_eq!(Unit::Bytes.parse("1,024 MiB"), Some(1_073_741_824.0));
        assert_eq!(Unit::Seconds.parse("2.5 us"), Some(2.5e-6));
        assert_eq!(Unit::FlopsPerSecond.parse("989 TFLOP/s"), Some(989e12));
        assert_eq!(Unit::Watts.parse("1.2 kW"), Some(1200.0));
        assert_eq!(Unit::Bytes.parse("1.5e3 MB"), Some(1.5e9));
        assert_eq!(Unit::Seconds.parse("2E-2 ms"), Some(2e-5));
        for text in [
            "80",
            "80 GiB/s",
            "GB",
            "",
            "-1 GB",
            "1e999 GB",
            "1 Gb",
            "µ",
            "1e GB",
            "e3 GB",
            "1e99999999999 GB",
        ] {
            assert_eq!(Unit::Bytes.parse(text), None, "{text}");
        }
    }

    #[test]
    fn numbers_read_back() {
        for value in [0.0, 1.0, 1023.0, 79.6e9, 1.5 * 1_048_576.0, 1_234_567.0] {
            for unit in
                [Unit::Bytes, Unit::BytesPerSecond, Unit::FlopsPerSecond, Unit::Flops, Unit::Watts]
            {
                assert_eq!(unit.parse(&unit.print(value)), Some(value), "{}", unit.print(value));
            }
        }
        for value in [1.2345678e-6, 7.3e-6, 0.1, 2.0, 1.0 / 3.0] {
            assert_eq!(Unit::Seconds.parse(&Unit::Seconds.print(value)), Some(value));
        }
        assert_eq!(Unit::Seconds.print(2.5e-6), "2.5 us");
        let sizes = [2e12, 2_199_023_255_552.0, 85_899_345_920.0, 1.5e9, 7.0];
        assert_eq!(
            sizes.map(|size| Unit::Bytes.print(size)),
            ["2 TB", "2 TiB", "80 GiB", "1.5 GB", "7 B"]
        );
        assert_eq!(Unit::BytesPerSecond.print(450e9), "450 GB/s");
    }
}
