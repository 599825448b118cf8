//! What guards select, and what of them is an error.

use super::{Setting, Settings, select};
use crate::diagnostic::render;

fn settings() -> Settings {
    let word = |word: &str| Setting::Word {
        word: word.to_owned(),
        words: ["silu", "gelu", "relu"].map(str::to_owned).to_vec(),
    };
    let settings = [
        ("bias", Setting::Flag(true)),
        ("window", Setting::Number(4096.0)),
        ("cap", Setting::Number(0.0)),
        ("activation", word("gelu")),
    ];
    settings.map(|(name, setting)| (name.to_owned(), setting)).into()
}

/// The lines that are left, without blank ones.
fn left(text: &str) -> Vec<String> {
    let selected = select("a.graph", text, &settings()).unwrap_or_else(|d| {
        panic!("{}", d.iter().map(|d| render(d, Some(text))).collect::<String>())
    });
    assert_eq!(selected.len(), text.len());
    assert_eq!(selected.matches('\n').count(), text.matches('\n').count());
    let code = |line: &str| line.split('#').next().unwrap_or_default().trim().to_owned();
    let lines = selected.lines().map(code).filter(|line| !line.is_empty());
    lines.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
}

fn refused(text: &str) -> Vec<String> {
    let diagnostics = select("a.graph", text, &settings()).expect_err(text);
    diagnostics.iter().map(|d| render(d, Some(text))).collect()
}

#[test]
fn conditions_compare_numbers_flags_and_words() {
    let cases = [
        ("bias", true),
        ("not bias", false),
        ("bias == false", false),
        ("window", true),
        ("cap", false),
        ("not cap and window == 4096", true),
        ("window != 4096", false),
        ("window==4096 and activation!=silu", true),
        ("activation == gelu", true),
        ("activation == gelu and cap", false),
    ];
    for (condition, holds) in cases {
        let text = format!("a\nwhen {condition} {{ # why\nyes\n}} else {{\nno\n}}\nb\n");
        let middle = if holds { "yes" } else { "no" };
        assert_eq!(left(&text), ["a", middle, "b"], "{condition}");
    }
}

#[test]
fn blocks_nest_and_bodies_stand_in_them() {
    let text = "when cap {
func @f() {
  when bias {
    hidden
  }
}
} else when window {
func @g() {
  when activation == silu {
    s
  } else when activation == gelu {
    g
  } else when bias {
    never, since one stood before
  } else {
    r
  }
}
} else {
no
}
";
    assert_eq!(left(text), ["func @g() {", "g", "}"]);
}

#[test]
fn entries_of_lists_stand_under_conditions() {
    let cases = [
        ("[B if bias, H if cap, S if window, N]", "[B, S, N]"),
        ("[B if cap, H if cap, S if cap, N] [0 if bias]", "[ N] [0 ]"),
        ("new=[0 if cap, 1 if not bias] %x", "new=[ ] %x"),
        ("[D/2 if bias and window == 4096, N if cap]", "[D/2 ]"),
        ("[a, b] if [c]", "[a, b] if [c]"),
    ];
    for (text, wanted) in cases {
        assert_eq!(left(text), [wanted]);
    }
}

#[test]
fn what_stands_keeps_its_place() {
    let text = "a é\nwhen cap {\n é é\n}\n  b [x if cap, y]\n";
    let selected = select("a.graph", text, &settings()).unwrap();
    for kept in ["a é", "  b [", "y]"] {
        assert_eq!(selected.find(kept), text.find(kept), "{selected:?}");
    }
}

#[test]
fn mistakes_are_told_with_their_places() {
    let cases: [(&str, &[&str]); 14] = [
        ("when windw {\n}\n", &["error[E1002]: `windw` is no setting", "a.graph:1:6"]),
        ("a\n [x if not windw]", &["error[E1002]: `windw`", "a.graph:2:8"]),
        ("when cap {\nwhen windw {\n}\n}\n", &["error[E1002]: `windw` is no setting"]),
        ("when activation {\n}\n", &["E1001", "write `activation == gelu`"]),
        ("when activation == sliu {\n}\n", &["E1002", "one of `silu`, `gelu`, `relu`, never"]),
        ("when window == wide {\n}\n", &["E1002", "`window` is a number, never `wide`"]),
        ("when bias == 1 {\n}\n", &["E1002", "`bias` is `true` or `false`, never `1`"]),
        ("when bias or cap {\n}\n", &["E1001", "expected `name`"]),
        ("when bias and {\n}\n", &["E1001", "expected `name`"]),
        ("when bias\n}\n", &["E1001", "a line `when CONDITION {`"]),
        ("when bias {\n", &["E1001", "a guard without its `}`"]),
        ("when bias {\na }\n}\n", &["E1001", "stands alone"]),
        ("when bias {\n} else {\n} else {\n}\n", &["E1001", "a second `else`"]),
        ("} else {\n}\n", &["E1001", "`else` without a guard"]),
    ];
    for (text, wanted) in cases {
        let found = refused(text);
        for part in wanted {
            assert!(found[0].contains(part), "{text:?}: {found:?}");
        }
    }
    assert_eq!(refused("when bias {\n}\n}\n").len(), 1);
    assert_eq!(refused(&"when x {\n}\n".repeat(100)).len(), super::DIAGNOSTICS_MAX);
}

/// Whatever stands in a text: an answer, and never a text of another length.
#[test]
fn mutated_texts_are_answered() {
    let valid = "when bias and window == 1 {\n%x: f32[B if cap, é] = y\n} else {\n{ }\n}\n";
    for seed in 0..4000_u64 {
        let mut text: Vec<char> = valid.chars().collect();
        for change in 0..1 + seed % 4 {
            let word = crate::random::mix(seed ^ (change << 32));
            let at = word as usize % text.len();
            let other = text[(word >> 32) as usize % text.len()];
            match word >> 20 & 3 {
                0 => text[at] = other,
                1 => text.insert(at, other),
                2 => text.truncate(at + 1),
                _ => {
                    text.remove(at);
                }
            }
            if text.is_empty() {
                text.push('}');
            }
        }
        let text: String = text.into_iter().collect();
        if let Ok(selected) = select("a.graph", &text, &settings()) {
            assert_eq!(selected.len(), text.len(), "seed {seed}: {text:?}");
        }
    }
}
