//! The README's example, as it is printed there.

use std::path::Path;
use std::process::Output;

use crate::scratch::Scratch;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// The command of the README's console block that shows a verb, and the lines that it shows.
fn example(verb: &str) -> (String, Vec<String>) {
    let text = std::fs::read_to_string(Path::new(ROOT).join("README.md")).expect("a README");
    let begin = format!("console\n$ gantline {verb} ");
    let block = text.split("```").find(|block| block.contains(&begin));
    let mut lines = block.expect("the README shows the verb").lines().skip(1);
    let line = lines.next().and_then(|line| line.strip_prefix("$ gantline "));
    (line.expect("a command").to_owned(), lines.map(str::to_owned).collect())
}

/// Whether a line is as shown, where `…` stands for anything.
fn is_as(shown: &str, line: &str) -> bool {
    let mut pieces = shown.split('…');
    let first = pieces.next().expect("a text has a first piece");
    let Some(mut rest) = line.strip_prefix(first) else { return false };
    let Some(last) = pieces.next_back() else { return rest.is_empty() };
    for piece in pieces {
        let Some(at) = rest.find(piece) else { return false };
        rest = &rest[at + piece.len()..];
    }
    rest.ends_with(last)
}

/// Runs the example for so many steps, and holds what it says against the README.
pub(crate) fn check(scratch: &Scratch, steps: usize, more: &str) -> String {
    let (line, shown) = example("train");
    let out = scratch.0.join("run1").display().to_string();
    let of_steps = |text: &str| text.replace("run1", &out).replace("200", &steps.to_string());
    let mut command = scratch.command(&[], &format!("{}{more}", of_steps(&line)));
    let Output { status, stdout, stderr } =
        command.current_dir(ROOT).output().expect("the program starts");
    let [stdout, stderr] = [stdout, stderr].map(|b| String::from_utf8(b).expect("UTF-8"));
    assert!(status.success(), "{stderr}");
    let cut = shown.iter().position(|line| line == "…").expect("progress is left out");
    let compare = |shown: &[String], lines: Vec<&str>| {
        assert_eq!(shown.len(), lines.len(), "{lines:#?}");
        for (shown, line) in shown.iter().zip(lines) {
            assert!(is_as(&of_steps(shown), line), "README: {shown}\nfound:  {line}");
        }
    };
    compare(&shown[..cut], stderr.lines().take(cut).collect());
    compare(&shown[cut + 1..], stdout.lines().collect());
    stdout
}

#[test]
fn the_example_looks_as_the_readme_shows_it() {
    check(&Scratch::new("readme"), 2, " --val-batches 1");
}

#[test]
fn plans_are_explained_as_the_readme_shows_it() {
    let (line, shown) = example("explain");
    let output = Scratch::new("readme-explain").command(&[], &line).output();
    let Output { status, stdout, stderr } = output.expect("the program starts");
    assert!(status.success(), "{}", String::from_utf8_lossy(&stderr));
    let text = String::from_utf8(stdout).expect("UTF-8");
    let mut lines = text.lines();
    // Lines are left out where the README has a line of dots.
    for shown in shown.iter().filter(|line| *line != "…") {
        assert!(lines.any(|line| is_as(shown, line)), "README: {shown}\nfound:\n{text}");
    }
}
