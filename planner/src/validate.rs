//! Predictions beside measurements: how far the estimator is off, and whether it ranks layouts as
//! the machines do.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

/// A measured run with its prediction.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Compared {
    /// The row's key.
    pub row_id: String,
    /// The table that it comes from.
    pub source: String,
    /// What makes runs comparable: model, devices, batch, sequence, precision.
    pub group: String,
    /// Seconds, measured; none where the row is no measurement of time.
    pub measured_s: Option<f64>,
    /// Seconds, predicted.
    pub predicted_s: f64,
    /// Seconds, the interval.
    pub interval_s: [f64; 2],
    /// GiB, measured; none where the row is no measurement of memory.
    pub measured_gib: Option<f64>,
    /// GiB, predicted.
    pub predicted_gib: f64,
    /// What holds them, by name.
    pub memory: Value,
    /// Whether the prediction says that the run fits.
    pub fits: bool,
    /// What the row left open.
    pub defaults: Vec<String>,
    /// Where the predicted time goes, by name.
    pub breakdown: Value,
}

impl Compared {
    /// Relative error of the step time: above 0 where the prediction is too long.
    pub fn time_error(&self) -> Option<f64> {
        self.measured_s.map(|measured| self.predicted_s / measured - 1.0)
    }

    /// Relative error of the peak memory.
    pub fn memory_error(&self) -> Option<f64> {
        self.measured_gib.map(|measured| self.predicted_gib / measured - 1.0)
    }
}

/// Errors of many rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub struct Errors {
    /// Rows.
    pub rows: usize,
    /// The middle of the absolute errors.
    pub median: f64,
    /// Their mean.
    pub mean: f64,
    /// The largest.
    pub max: f64,
    /// The middle of the signed errors.
    pub bias: f64,
}

impl Errors {
    /// Of signed errors.
    pub fn of(mut signed: Vec<f64>) -> Errors {
        if signed.is_empty() {
            return Errors::default();
        }
        signed.sort_by(f64::total_cmp);
        let mut absolute: Vec<f64> = signed.iter().map(|error| error.abs()).collect();
        absolute.sort_by(f64::total_cmp);
        Errors {
            rows: signed.len(),
            median: middle(&absolute),
            mean: absolute.iter().sum::<f64>() / absolute.len() as f64,
            max: absolute[absolute.len() - 1],
            bias: middle(&signed),
        }
    }
}

/// The middle of sorted numbers.
fn middle(sorted: &[f64]) -> f64 {
    let half = sorted.len() / 2;
    if sorted.is_empty() {
        0.0
    } else if sorted.len() % 2 == 1 {
        sorted[half]
    } else {
        (sorted[half - 1] + sorted[half]) / 2.0
    }
}

/// How well predictions rank the runs of groups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub struct Ranking {
    /// Groups of at least [`GROUP_MIN`] runs.
    pub groups: usize,
    /// Runs in them.
    pub rows: usize,
    /// Kendall's tau-b, the mean over groups.
    pub tau: f64,
    /// How much slower than the fastest run the one that is predicted fastest is: the mean.
    pub regret_mean: f64,
    /// The largest.
    pub regret_max: f64,
}

/// Runs that a group needs for a rank correlation. Chosen: two have only one order.
pub const GROUP_MIN: usize = 3;

/// What a set of rows says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub struct Summary {
    /// Errors of the step time.
    pub time: Errors,
    /// Errors of the peak memory.
    pub memory: Errors,
    /// Share of measured times inside their intervals.
    pub coverage: f64,
    /// The middle of the widths of the intervals, over the prediction.
    pub width: f64,
    /// The ranking inside groups.
    pub ranking: Ranking,
    /// Rows that ran and are predicted not to fit.
    pub refused: usize,
}

/// Sums up rows.
pub fn summarise<'a>(rows: impl Iterator<Item = &'a Compared> + Clone) -> Summary {
    let timed = rows.clone().filter_map(|row| Some((row, row.measured_s?)));
    let inside = |(row, measured): &(&Compared, f64)| {
        row.interval_s[0] <= *measured && *measured <= row.interval_s[1]
    };
    let count = timed.clone().count();
    let mut widths: Vec<f64> = timed
        .clone()
        .map(|(row, _)| (row.interval_s[1] - row.interval_s[0]) / row.predicted_s)
        .collect();
    widths.sort_by(f64::total_cmp);
    Summary {
        time: Errors::of(rows.clone().filter_map(Compared::time_error).collect()),
        memory: Errors::of(rows.clone().filter_map(Compared::memory_error).collect()),
        coverage: timed.clone().filter(inside).count() as f64 / count.max(1) as f64,
        width: middle(&widths),
        ranking: rank(timed.clone()),
        refused: rows.filter(|row| row.measured_s.is_some() && !row.fits).count(),
    }
}

/// Sums up the rows of each source, by name.
pub fn by_source(rows: &[Compared]) -> BTreeMap<String, Summary> {
    let mut names: Vec<&String> = rows.iter().map(|row| &row.source).collect();
    names.sort();
    names.dedup();
    let of = |name: &String| summarise(rows.iter().filter(|row| row.source == *name));
    names.into_iter().map(|name| (name.clone(), of(name))).collect()
}

fn rank<'a>(rows: impl Iterator<Item = (&'a Compared, f64)>) -> Ranking {
    let mut groups: BTreeMap<&str, Vec<(f64, f64)>> = BTreeMap::new();
    for (row, measured) in rows {
        groups.entry(&row.group).or_default().push((row.predicted_s, measured));
    }
    let mut ranking = Ranking::default();
    for runs in groups.values().filter(|runs| runs.len() >= GROUP_MIN) {
        let fastest = runs.iter().map(|run| run.1).fold(f64::INFINITY, f64::min);
        let chosen = runs.iter().min_by(|a, b| a.0.total_cmp(&b.0)).map_or(fastest, |run| run.1);
        let regret = chosen / fastest - 1.0;
        ranking.groups += 1;
        ranking.rows += runs.len();
        ranking.tau += kendall(runs);
        ranking.regret_mean += regret;
        ranking.regret_max = ranking.regret_max.max(regret);
    }
    let groups = ranking.groups.max(1) as f64;
    ranking.tau /= groups;
    ranking.regret_mean /= groups;
    ranking
}

/// Kendall's tau-b of pairs: 1 for the same order, −1 for the opposite one; 0 where either side
/// has no order.
pub fn kendall(pairs: &[(f64, f64)]) -> f64 {
    let (mut balance, mut left, mut right) = (0.0, 0.0, 0.0);
    for (i, a) in pairs.iter().enumerate() {
        for b in &pairs[..i] {
            let x = (a.0 > b.0) as i8 - (a.0 < b.0) as i8;
            let y = (a.1 > b.1) as i8 - (a.1 < b.1) as i8;
            balance += f64::from(x * y);
            left += f64::from(x.abs());
            right += f64::from(y.abs());
        }
    }
    if left * right == 0.0 { 0.0 } else { balance / (left * right).sqrt() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(group: &str, measured: f64, predicted: f64) -> Compared {
        Compared {
            row_id: String::new(),
            source: "table".into(),
            group: group.into(),
            measured_s: Some(measured),
            predicted_s: predicted,
            interval_s: [predicted * 0.9, predicted * 1.1],
            measured_gib: None,
            predicted_gib: 0.0,
            memory: Value::Null,
            fits: true,
            defaults: Vec::new(),
            breakdown: Value::Null,
        }
    }

    #[test]
    fn orders_are_compared() {
        let same = [(1.0, 10.0), (2.0, 20.0), (3.0, 30.0)];
        assert_eq!(kendall(&same), 1.0);
        let turned = same.map(|(a, b)| (a, -b));
        assert_eq!(kendall(&turned), -1.0);
        // One of three pairs is turned: (2 − 1) / 3.
        assert!((kendall(&[(1.0, 1.0), (2.0, 3.0), (3.0, 2.0)]) - 1.0 / 3.0).abs() < 1e-12);
        assert_eq!(kendall(&[(1.0, 1.0), (1.0, 2.0)]), 0.0);
    }

    #[test]
    fn errors_coverage_and_regret_are_counted() {
        let rows =
            [run("a", 1.0, 1.05), run("a", 2.0, 1.0), run("a", 4.0, 3.9), run("b", 1.0, 2.0)];
        let summary = summarise(rows.iter());
        assert_eq!((summary.time.rows, summary.time.max), (4, 1.0));
        assert!((summary.time.mean - (0.05 + 0.5 + 0.025 + 1.0) / 4.0).abs() < 1e-12);
        assert_eq!(summary.coverage, 0.5);
        assert!((summary.width - 0.2).abs() < 1e-12);
        // The second run is predicted fastest and takes twice as long as the fastest one.
        assert_eq!((summary.ranking.groups, summary.ranking.regret_max), (1, 1.0));
        assert_eq!(by_source(&rows)["table"].time.rows, 4);
    }
}
