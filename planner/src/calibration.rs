//! What was measured on a machine: the rates that predictions are made of.
//!
//! A file that `calibrate` writes and nobody edits. Points are (size, rate) of one rank while all
//! cores are busy; between points rates are interpolated in the logarithm of the size, beyond them
//! the last one holds. The hash of the text goes into the plan.

use std::collections::BTreeMap;
use std::fmt;

use ir::{DType, Diagnostic};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::link::Link;
use crate::origin::Origin;
use crate::quantity::Unit;
use crate::reader::{Reader, Table};

/// Rates by size, ascending.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Curve(pub Vec<[f64; 2]>);

impl Curve {
    /// The rate at a size, and whether it was measured or lies between or beyond what was.
    pub fn at(&self, size: f64) -> Option<(f64, Origin)> {
        let points = &self.0;
        let above = points.iter().position(|[x, _]| *x >= size);
        match above {
            Some(at) if points[at][0] == size => Some((points[at][1], Origin::Measured)),
            Some(0) => Some((points[0][1], Origin::Fitted)),
            Some(at) => {
                let ([x0, y0], [x1, y1]) = (points[at - 1], points[at]);
                let share = (size / x0).ln() / (x1 / x0).ln();
                Some((y0 + share * (y1 - y0), Origin::Fitted))
            }
            None => points.last().map(|[_, y]| (*y, Origin::Fitted)),
        }
    }
}

/// What was measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Calibration {
    /// The machine, for people.
    pub machine: String,
    /// Threads of the rank that was measured.
    pub threads: usize,
    /// Operations per second of matrix products, by element type and operations.
    #[schemars(with = "BTreeMap<String, Curve>")]
    pub product: BTreeMap<DType, Curve>,
    /// Operations per second of causal attention in f32, by operations of one head.
    pub attention: Curve,
    /// Operations per second of its gradient.
    pub attention_bwd: Curve,
    /// Operations per second of a fused elementwise kernel that computes more than it moves.
    pub elementwise_flops_per_s: Option<f64>,
    /// Bytes per second of fused elementwise kernels, by bytes.
    pub rows: Curve,
    /// Bytes per second of copies, by bytes.
    pub copy: Curve,
    /// Seconds of a launch that does next to nothing.
    pub launch_s: Option<f64>,
    /// Collectives of all cores' ranks.
    pub collective: Option<Link>,
    /// Messages between two ranks.
    pub send: Option<Link>,
}

impl Calibration {
    /// Reads the text form.
    ///
    /// # Errors
    /// `E3001` to `E3005`: see the table of the crate.
    pub fn parse(source: &str, text: &str) -> Result<Calibration, Vec<Diagnostic>> {
        let (mut reader, root) = Reader::open(source, text);
        let root = Table::root(&root);
        let keys = [
            "machine",
            "threads",
            "launch",
            "rows",
            "copy",
            "attention",
            "attention_bwd",
            "elementwise",
            "product",
            "collective",
            "send",
        ];
        reader.expect_keys(root, &keys);
        let rates = [Unit::Bytes, Unit::BytesPerSecond];
        let work = [Unit::Flops, Unit::FlopsPerSecond];
        let mut read = Calibration {
            machine: reader.string(root, "machine").unwrap_or_default(),
            threads: reader.count(root, "threads").unwrap_or(1),
            rows: sorted(reader.points(root, "rows", rates)),
            copy: sorted(reader.points(root, "copy", rates)),
            attention: sorted(reader.points(root, "attention", work)),
            attention_bwd: sorted(reader.points(root, "attention_bwd", work)),
            elementwise_flops_per_s: reader.quantity(root, "elementwise", Unit::FlopsPerSecond),
            launch_s: reader.quantity(root, "launch", Unit::Seconds),
            ..Calibration::default()
        };
        if let Some(product) = reader.table(root, "product") {
            let names: Vec<&str> = DType::ALL.iter().map(|d| d.name()).collect();
            reader.expect_keys(product, &names);
            for dtype in DType::ALL {
                let curve = sorted(reader.points(product, dtype.name(), work));
                if !curve.0.is_empty() {
                    read.product.insert(dtype, curve);
                }
            }
        }
        read.collective = read_link(&mut reader, root, "collective");
        read.send = read_link(&mut reader, root, "send");
        if reader.diagnostics.is_empty() { Ok(read) } else { Err(reader.diagnostics) }
    }

    /// The hash of the text form, in hexadecimal.
    pub fn hash(&self) -> String {
        blake3::hash(self.to_string().as_bytes()).to_hex().to_string()
    }
}

fn sorted(mut points: Vec<[f64; 2]>) -> Curve {
    points.retain(|[x, y]| *x > 0.0 && *y > 0.0);
    points.sort_by(|a, b| a[0].total_cmp(&b[0]));
    Curve(points)
}

fn read_link(reader: &mut Reader<'_>, root: Table<'_>, key: &'static str) -> Option<Link> {
    let table = reader.table(root, key)?;
    reader.expect_keys(table, &["latency", "bandwidth"]);
    let latency_s = reader.quantity(table, "latency", Unit::Seconds)?;
    let bandwidth_bytes_per_s = reader.quantity(table, "bandwidth", Unit::BytesPerSecond)?;
    Some(Link { latency_s, bandwidth_bytes_per_s })
}

impl fmt::Display for Calibration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "machine = {:?}\nthreads = {}", self.machine, self.threads)?;
        if let Some(launch) = self.launch_s {
            writeln!(f, "launch = {:?}", Unit::Seconds.print(launch))?;
        }
        if let Some(rate) = self.elementwise_flops_per_s {
            writeln!(f, "elementwise = {:?}", Unit::FlopsPerSecond.print(rate))?;
        }
        let curve = |f: &mut fmt::Formatter<'_>, key: &str, curve: &Curve, units: [Unit; 2]| {
            writeln!(f, "{key} = [")?;
            for [x, y] in &curve.0 {
                writeln!(f, "  [{:?}, {:?}],", units[0].print(*x), units[1].print(*y))?;
            }
            f.write_str("]\n")
        };
        curve(f, "rows", &self.rows, [Unit::Bytes, Unit::BytesPerSecond])?;
        curve(f, "copy", &self.copy, [Unit::Bytes, Unit::BytesPerSecond])?;
        for (key, points) in
            [("attention", &self.attention), ("attention_bwd", &self.attention_bwd)]
        {
            if !points.0.is_empty() {
                curve(f, key, points, [Unit::Flops, Unit::FlopsPerSecond])?;
            }
        }
        if !self.product.is_empty() {
            f.write_str("\n[product]\n")?;
        }
        for (dtype, points) in &self.product {
            curve(f, dtype.name(), points, [Unit::Flops, Unit::FlopsPerSecond])?;
        }
        for (key, link) in [("collective", self.collective), ("send", self.send)] {
            let Some(link) = link else { continue };
            let latency = Unit::Seconds.print(link.latency_s);
            let bandwidth = Unit::BytesPerSecond.print(link.bandwidth_bytes_per_s);
            writeln!(f, "\n[{key}]\nlatency = {latency:?}\nbandwidth = {bandwidth:?}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn curves_interpolate_between_points_and_hold_beyond() {
        let curve = Curve(vec![[1e3, 1e9], [1e5, 3e9]]);
        assert_eq!(curve.at(1e3), Some((1e9, Origin::Measured)));
        assert_eq!(curve.at(1e4), Some((2e9, Origin::Fitted)));
        assert_eq!(curve.at(1.0), Some((1e9, Origin::Fitted)));
        assert_eq!(curve.at(1e9), Some((3e9, Origin::Fitted)));
        assert_eq!(Curve::default().at(1.0), None);
    }

    #[test]
    fn text_reads_back() {
        let link = Link { latency_s: 7.3e-6, bandwidth_bytes_per_s: 4.2e9 };
        let calibration = Calibration {
            machine: "test".into(),
            threads: 2,
            product: BTreeMap::from([(DType::F32, Curve(vec![[2e6, 3.1e10], [2e9, 6.4e10]]))]),
            attention: Curve(vec![[1e6, 1e10], [1e8, 2e10]]),
            attention_bwd: Curve(vec![[1e6, 8e9]]),
            elementwise_flops_per_s: Some(4e9),
            rows: Curve(vec![[65536.0, 5e9]]),
            copy: Curve(vec![[65536.0, 7e9], [1e8, 6e9]]),
            launch_s: Some(1.25e-6),
            collective: Some(link),
            send: Some(link),
        };
        let text = calibration.to_string();
        assert_eq!(Calibration::parse("test", &text), Ok(calibration), "{text}");
    }
}
