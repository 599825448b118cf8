//! A picture of the loss, as SVG text.

use std::fmt::Write as _;
use std::path::Path;

use crate::disk::replace;
use crate::error::Error;

/// A step and a value.
pub type Point = (u64, f64);

/// Pixels.
const WIDTH: f64 = 800.0;
const HEIGHT: f64 = 480.0;
const LEFT: f64 = 72.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 44.0;
const BOTTOM: f64 = 56.0;
/// Points of a line that are drawn; more are averaged. Chosen: one for each pixel.
const POINTS_MAX: usize = 700;
/// Ticks that are aimed at.
const TICKS: f64 = 7.0;

/// Training and validation loss over steps.
#[derive(Clone, Debug, Default)]
pub struct Plot {
    /// What the picture is of.
    pub title: String,
    /// The loss of training steps.
    pub training: Vec<Point>,
    /// The loss of validations.
    pub validation: Vec<Point>,
}

impl Plot {
    /// Writes the picture to a file.
    pub fn write(&self, path: &Path) -> Result<(), Error> {
        replace(path, self.to_svg().as_bytes())
    }

    /// The picture. Values that aren't finite are left out.
    pub fn to_svg(&self) -> String {
        let lines = [thin(&self.training), thin(&self.validation)];
        let all = || lines.iter().flatten();
        let x = Axis::over(all().map(|point| point.0));
        let y = Axis::over(all().map(|point| point.1));
        let place = |&(step, value): &(f64, f64)| {
            let left = LEFT + x.share(step) * (WIDTH - LEFT - RIGHT);
            let top = HEIGHT - BOTTOM - y.share(value) * (HEIGHT - TOP - BOTTOM);
            (left, top)
        };
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
             font-family=\"sans-serif\" font-size=\"14\">\n\
             <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n"
        );
        draw_axes(&mut out, &x, &y, &place);
        let _ = writeln!(
            out,
            "<text x=\"{LEFT}\" y=\"26\" font-size=\"16\">{}</text>",
            escape(&self.title)
        );
        for (number, (points, name)) in lines.iter().zip(["training", "validation"]).enumerate() {
            let colour = ["#1f77b4", "#d95f02"][number];
            let placed: Vec<(f64, f64)> = points.iter().map(place).collect();
            draw_line(&mut out, &placed, colour, name == "validation");
            if !points.is_empty() {
                draw_legend(&mut out, number, colour, name);
            }
        }
        out + "</svg>\n"
    }
}

/// Finite points in the order of their steps, averaged in groups if they are too many.
fn thin(points: &[Point]) -> Vec<(f64, f64)> {
    let mut finite: Vec<(f64, f64)> = points
        .iter()
        .filter(|point| point.1.is_finite())
        .map(|&(step, value)| (step as f64, value))
        .collect();
    finite.sort_by(|a, b| a.0.total_cmp(&b.0));
    let group = finite.len().div_ceil(POINTS_MAX).max(1);
    let mean = |points: &[(f64, f64)]| {
        let n = points.len() as f64;
        let sum = points.iter().fold((0.0, 0.0), |sum, point| (sum.0 + point.0, sum.1 + point.1));
        (sum.0 / n, sum.1 / n)
    };
    finite.chunks(group).map(mean).collect()
}

/// An axis between two of its ticks.
struct Axis {
    start: f64,
    step: f64,
    count: usize,
}

impl Axis {
    /// Ticks at multiples of 1, 2 or 5 times a power of ten, around all values.
    fn over(values: impl Iterator<Item = f64>) -> Axis {
        let (min, max) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(min, max), value| {
            (min.min(value), max.max(value))
        });
        let (min, max) = if min <= max { (min, max) } else { (0.0, 1.0) };
        let least = max.abs().max(1e-6) * 1e-6;
        let rough = ((max - min) / TICKS).max(least);
        let power = 10_f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|m| m * power).into_iter().find(|s| *s >= rough);
        let step = step.unwrap_or(10.0 * power);
        let start = (min / step).floor() * step;
        let count = (((max - start) / step).ceil() as usize).max(1);
        Axis { start, step, count }
    }

    fn share(&self, value: f64) -> f64 {
        (value - self.start) / (self.step * self.count as f64)
    }

    /// The values of the ticks, with their texts.
    fn ticks(&self) -> impl Iterator<Item = (f64, String)> {
        let digits = (-self.step.log10().floor()).clamp(0.0, 9.0) as usize;
        (0..=self.count).map(move |i| {
            let value = self.start + i as f64 * self.step;
            (value, group_digits(&format!("{value:.digits$}")))
        })
    }
}

/// Commas between thousands.
fn group_digits(number: &str) -> String {
    let (whole, rest) = number.split_at(number.find('.').unwrap_or(number.len()));
    let (sign, digits) = whole.split_at(usize::from(whole.starts_with('-')));
    let mut out = sign.to_owned();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out + rest
}

fn draw_axes(out: &mut String, x: &Axis, y: &Axis, place: &impl Fn(&(f64, f64)) -> (f64, f64)) {
    let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    for (value, text) in y.ticks() {
        let at = place(&(x.start, value)).1;
        let _ = writeln!(
            out,
            "<path d=\"M{LEFT} {at:.1}H{right}\" stroke=\"#dddddd\"/>\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{text}</text>",
            LEFT - 8.0,
            at + 5.0
        );
    }
    for (value, text) in x.ticks() {
        let at = place(&(value, y.start)).0;
        let _ = writeln!(
            out,
            "<path d=\"M{at:.1} {bottom}v6\" stroke=\"black\"/>\
             <text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{text}</text>",
            bottom + 22.0
        );
    }
    let middle = (LEFT + right) / 2.0;
    let centre = (TOP + bottom) / 2.0;
    let _ = writeln!(
        out,
        "<path d=\"M{LEFT} {TOP}V{bottom}H{right}\" fill=\"none\" stroke=\"black\"/>\n\
         <text x=\"{middle}\" y=\"{}\" text-anchor=\"middle\">step</text>\n\
         <text x=\"18\" y=\"{centre}\" text-anchor=\"middle\" \
         transform=\"rotate(-90 18 {centre})\">loss</text>",
        HEIGHT - 12.0
    );
}

fn draw_line(out: &mut String, points: &[(f64, f64)], colour: &str, dots: bool) {
    let path: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    if points.len() > 1 {
        let _ = writeln!(
            out,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"/>",
            path.join(" ")
        );
    }
    if dots || points.len() == 1 {
        for (x, y) in points {
            let _ =
                writeln!(out, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>");
        }
    }
}

fn draw_legend(out: &mut String, number: usize, colour: &str, name: &str) {
    let (x, y) = (WIDTH - RIGHT - 110.0, TOP + 10.0 + 20.0 * number as f64);
    let _ = writeln!(
        out,
        "<path d=\"M{x} {y}h22\" stroke=\"{colour}\" stroke-width=\"3\"/>\
         <text x=\"{}\" y=\"{}\">{name}</text>",
        x + 28.0,
        y + 5.0
    );
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_numbers_around_the_values() {
        let texts = |values: &[f64]| -> Vec<String> {
            Axis::over(values.iter().copied()).ticks().map(|tick| tick.1).collect()
        };
        assert_eq!(texts(&[0.0, 7000.0])[..3], ["0", "1,000", "2,000"]);
        assert_eq!(texts(&[2.1, 11.0]), ["2", "4", "6", "8", "10", "12"]);
        assert_eq!(texts(&[0.31, 0.46])[0], "0.30");
        assert_eq!(texts(&[]).len(), 6);
        assert!(texts(&[3.0]).len() >= 2);
        assert_eq!(group_digits("-1234567.5"), "-1,234,567.5");
    }

    #[test]
    fn both_lines_lie_inside_the_picture() {
        let training: Vec<Point> = (0..5000).map(|i| (i, 3.0 + 100.0 / (i + 10) as f64)).collect();
        let validation = vec![(1000, 3.5), (2000, f64::NAN), (3000, 3.3)];
        let plot = Plot { title: "a < b".to_owned(), training, validation };
        let svg = plot.to_svg();
        assert!(svg.contains("a &lt; b") && svg.contains(">training<"));
        assert_eq!(svg.matches("<polyline").count(), 2);
        assert_eq!(svg.matches("<circle").count(), 2);
        let points =
            svg.split("points=\"").skip(1).flat_map(|s| s.split('"').next()).flat_map(|list| {
                list.split(' ').map(|p| p.split_once(',').unwrap()).collect::<Vec<_>>()
            });
        for (x, y) in points {
            let (x, y): (f64, f64) = (x.parse().unwrap(), y.parse().unwrap());
            assert!((LEFT..=WIDTH - RIGHT).contains(&x), "{x}");
            assert!((TOP..=HEIGHT - BOTTOM).contains(&y), "{y}");
        }
        assert_eq!(Plot::default().to_svg().matches("<polyline").count(), 0);
    }
}
