//! The text form: reads back, and never panics on what is no module.

use gantline_ir::diagnostic::render;
use gantline_ir::text::parse_module;
use gantline_ir::verify::verify;

use crate::draws::{Draws, seeds};
use crate::generate;

#[test]
fn random_modules_read_back() {
    for seed in seeds(300) {
        let module = generate::module(&mut Draws::new(seed));
        let text = module.to_string();
        let back = parse_module("text", &text).unwrap_or_else(|found| {
            panic!("SEED={seed}\n{}", render(&found[0], Some(&text)));
        });
        assert_eq!(back, module, "SEED={seed}\n{text}");
        assert_eq!(back.to_string(), text, "SEED={seed}");
        assert_eq!(verify(&module), [], "SEED={seed}\n{text}");
    }
}

/// Flips, inserts, removes and copies bytes. What still reads must verify.
#[test]
fn mutated_texts_never_panic() {
    let bytes = b"%@#=-+*/,.:[]{}()>\n 0919eBx\xff\xc3\xa9\0";
    let mut accepted = 0;
    for seed in seeds(3000) {
        let mut r = Draws::new(seed);
        let mut text = generate::module(&mut r).to_string().into_bytes();
        for _ in 0..1 + r.below(4) {
            let (at, from) = (r.below(text.len()), r.below(text.len()));
            let length = r.below(12).min(text.len() - from);
            match r.below(4) {
                0 => text[at] = bytes[r.below(bytes.len())],
                1 => text.insert(at, bytes[r.below(bytes.len())]),
                2 => drop(text.drain(from..from + length)),
                _ => {
                    let piece = text[from..from + length].to_vec();
                    text.splice(at..at, piece);
                }
            }
        }
        let text = String::from_utf8_lossy(&text);
        match std::panic::catch_unwind(|| parse_module("text", &text)) {
            Ok(Ok(module)) => {
                accepted += 1;
                let back = parse_module("text", &module.to_string());
                assert_eq!(back.as_ref(), Ok(&module), "SEED={seed}\n{text}");
                // Only a size that no parameter gives is left for verification to find.
                let found = verify(&module);
                assert!(found.iter().all(|d| d.code == "E1009"), "SEED={seed} {found:?}\n{text}");
            }
            Ok(Err(found)) => {
                assert!(!found.is_empty(), "SEED={seed}");
                found.iter().for_each(|d| drop(render(d, Some(&text))));
            }
            Err(_) => panic!("SEED={seed} panics on\n{text}"),
        }
    }
    assert!(accepted > 0 || std::env::var("SEED").is_ok(), "no mutation was harmless");
}

/// One mistake is one diagnostic, of a size that people read.
#[test]
fn a_mistake_is_told_once_and_briefly() {
    let rest = "{\n    %y: f32[2] = neg %x\n    return %y\n  }\n";
    let twice =
        format!("module m\n  func @f(%x: f32[2], %x: f32[2]) {rest}  func @g(%x: f32[2]) {rest}");
    let found = parse_module("text", &twice).unwrap_err();
    let said: Vec<&str> = found.iter().map(|d| d.headline.as_str()).collect();
    assert_eq!(said, ["`%x` is defined twice"]);
    let product = vec!["4294967296"; 20_000].join("*");
    for dims in [product.as_str(), "4294967296, 4294967296, 4294967296", "B/3+B*B*-9"] {
        let text = format!("module m\n  func @f(%x: f32[{dims}]) {rest}");
        let found = parse_module("text", &text).unwrap_err();
        assert_eq!(found.len(), 1, "{found:?}");
        let drawn = render(&found[0], Some(&text));
        assert!(drawn.len() < 2_000, "{} bytes: {}", drawn.len(), &drawn[..500]);
    }
    // The mark stays under what it marks.
    let text =
        format!("module m\n  func @f(%x: f32[2]) {{\n    %{}: f32[2] = ned %x\n", "y".repeat(900));
    let found = parse_module("text", &text).unwrap_err();
    let drawn = render(&found[0], Some(&text));
    let lines: Vec<Vec<char>> = drawn.lines().map(|line| line.chars().collect()).collect();
    let marked = lines[4].iter().position(|c| *c == '^').unwrap();
    assert_eq!(lines[3][marked..marked + 3].iter().collect::<String>(), "ned", "{drawn}");
}

/// What an op does not know is not passed over.
#[test]
fn attributes_that_an_op_does_not_have_are_refused() {
    for (line, said) in [
        ("reduce sum dim=0 dims=[0] %x", "`reduce` has no attribute `dim`; it has `dims`"),
        ("reduce sum max dims=[0] %x", "`reduce` takes one word before its operands"),
        ("exp dim=0 %x", "`exp` has no attribute `dim`; it has none"),
        ("exp fast %x", "`exp` takes no word before its operands"),
        ("slice dim=0 start=0 size=1 size=2 %x", "`size` is said twice"),
        ("gather dim=0 start=1.5 %x %i", "`start` of `gather` is no whole number, or a huge one"),
        ("gather dim=0 start=one %x %i", "`gather` is no op, or its attributes are off"),
        ("random salt=1 start=0 %k", "`random` is no op, or its attributes are off"),
        ("contract i,i->i sums=[1] %x %x", "`contract` is no op, or its attributes are off"),
    ] {
        let text = format!(
            "module m\n  func @f(%x: f32[2], %i: i32[2], %k: u32[4]) {{\n    %y = {line}\n    \
             return %y\n  }}\n"
        );
        let found = parse_module("text", &text).unwrap_err();
        assert_eq!((found[0].code, found[0].headline.as_str()), ("E1001", said), "{line}");
    }
    // What is declared may be said again.
    for (line, is_read) in [
        ("f32[1] = dynamic_slice dim=0 size=1 %x %n", true),
        ("f32[1] = dynamic_slice dim=0 size=2 %x %n", false),
        ("f64[2] = cast f64 %x", true),
        ("f64[2] = cast f32 %x", false),
    ] {
        let text = format!(
            "module m\n  func @f(%x: f32[2], %n: i32[]) {{\n    %y: {line}\n    return %y\n  }}\n"
        );
        assert_eq!(parse_module("text", &text).is_ok(), is_read, "{line}");
    }
}

/// Inputs that once crashed, or are likely to.
#[test]
fn extreme_numbers_are_refused() {
    let big = 8_000_000_000_000_000_i64;
    for line in [
        format!("%y: f32[{big}*{big}] = constant 1"),
        format!("%y: f32[{big}*B*{big}*B] = constant 1"),
        format!("%y: f32[{big}, {big}, {big}] = constant 1\n%z: f32[1] = reshape %y"),
        format!("%y: f32[2] = pad dim=0 before={big} after={big} %x"),
        format!("%y: f32[2] = slice dim=0 start={big} size={big} %x"),
        format!("%y: f32[2] = slice dim={big} start=0 size=1 %x"),
        format!("%y: f32[2] = random salt=1 start=[0] extent=[{big}*{big}] %k"),
        "%y: f32[-2] = constant 1".to_owned(),
        "%y: f32[2] = constant 1e999".to_owned(),
        "%y: f32[2, 2] = broadcast new=[0, 0] %x".to_owned(),
        "%y: f32[2] = broadcast new=[64] %x".to_owned(),
        "%y: f32[2] = transpose perm=[] %x".to_owned(),
        "%y: f32[2] = concat dim=0".to_owned(),
        "%y: f32[2] = iota dim=0 start=99999999999999999999".to_owned(),
    ] {
        let text = format!(
            "module m\n  func @f(%x: f32[2], %k: u32[4]) {{\n    {line}\n    return %y\n  }}\n"
        );
        match std::panic::catch_unwind(|| parse_module("text", &text)) {
            Ok(Ok(module)) => assert_eq!(parse_module("text", &module.to_string()), Ok(module)),
            Ok(Err(found)) => assert!(!found.is_empty(), "{line}"),
            Err(_) => panic!("panics on {line}"),
        }
    }
}
