//! Reading family files. The form is shown in `docs/contributing.md`.
//!
//! The files are part of the program: whoever writes one sees what is wrong with it from a test
//! that reads them all.

use super::expr::Expr;
use super::{
    Check, Code, Family, Field, FieldKind, Line, Preset, Rule, Section, Tensor, WeightInit,
    WeightRule,
};

/// Reads a family file. Sections that it does not have are those of the family that it is like,
/// one of `known`.
///
/// # Errors
/// The line and what is wrong with it.
pub(super) fn parse(text: &'static str, known: &[Family]) -> Result<Family, String> {
    let mut family = Family::default();
    let mut section = "";
    for (number, whole) in text.lines().enumerate() {
        let line = whole.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let at = |why: String| format!("line {}: `{line}`: {why}", number + 1);
        if whole.starts_with(' ') {
            read_line(&mut family, section, line).map_err(at)?;
        } else {
            section = start_section(&mut family, line).map_err(at)?;
        }
    }
    if family.name.is_empty() || family.classes.is_empty() {
        return Err("a family without a name or classes".into());
    }
    let like = family.like;
    if !like.is_empty() {
        let other = known.iter().find(|other| other.name == like);
        complete(&mut family, other.ok_or(format!("`{like}` is no earlier family"))?);
    }
    Ok(family)
}

/// Takes the sections that a family does not have from another.
fn complete(family: &mut Family, other: &Family) {
    fn take<T: Clone>(own: &mut Vec<T>, other: &[T]) {
        if own.is_empty() {
            *own = other.to_vec();
        }
    }
    take(&mut family.rules, &other.rules);
    take(&mut family.layer_rules, &other.layer_rules);
    take(&mut family.shape, &other.shape);
    for (own, other) in [
        (&mut family.embed, &other.embed),
        (&mut family.block, &other.block),
        (&mut family.head, &other.head),
    ] {
        if own.text.is_empty() {
            *own = other.clone();
        }
    }
    for section in [Section::Embed, Section::Layer, Section::Head] {
        if family.weights.iter().all(|rule| rule.section != section) {
            let rules = other.weights.iter().filter(|rule| rule.section == section);
            family.weights.extend(rules.cloned());
        }
    }
}

/// A line without indentation: a fact about the family, or the beginning of a section.
fn start_section(family: &mut Family, line: &'static str) -> Result<&'static str, String> {
    let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
    let rest = rest.trim();
    match word {
        "family" => family.name = rest,
        "title" => family.title = rest,
        "classes" => family.classes = rest.split_whitespace().collect(),
        "like" => family.like = rest,
        "config" | "layer" | "embed" | "block" | "head" | "shape" => {}
        "weights" => {
            let (of, prefixes) = rest.split_once(' ').unwrap_or((rest, "\"\""));
            let section = match of {
                "embed" => Section::Embed,
                "layer" => Section::Layer,
                "head" => Section::Head,
                _ => return Err(format!("`{of}` has no weights")),
            };
            family.prefixes = prefixes.split_whitespace().map(|p| p.trim_matches('"')).collect();
            family.section = section;
        }
        "preset" => {
            let [name, dtype, count] = rest.split_whitespace().collect::<Vec<_>>()[..] else {
                return Err("a preset has a name, an element type and a count".into());
            };
            let dtype = dtype.parse().map_err(|()| format!("`{dtype}` is no element type"))?;
            let count = count.replace(',', "").parse().map_err(|_| "no count of parameters")?;
            family.presets.push(Preset { name, dtype, count, config: "" });
        }
        _ => return Err(format!("`{word}` begins nothing")),
    }
    Ok(word)
}

fn read_line(family: &mut Family, section: &str, line: &'static str) -> Result<(), String> {
    match section {
        "config" => family.rules.push(read_rule(line)?),
        "layer" => family.layer_rules.push(read_rule(line)?),
        "shape" => {
            let (name, expr) = line.split_once('=').ok_or("`=` is missing")?;
            family.shape.push((name.trim(), Expr::parse(expr)?));
        }
        "weights" => {
            let rule = read_weight(family.section, &family.prefixes, line)?;
            family.weights.push(rule);
        }
        "embed" => add_line(&mut family.embed, line)?,
        "block" => add_line(&mut family.block, line)?,
        "head" => add_line(&mut family.head, line)?,
        "preset" => {
            let preset = family.presets.last_mut().ok_or("no preset begins")?;
            preset.config = line;
        }
        _ => return Err("nothing begins here".into()),
    }
    Ok(())
}

/// A line of `config` or `layer`.
fn read_rule(line: &'static str) -> Result<Rule, String> {
    let (word, rest) = line.split_once(' ').ok_or("one word alone")?;
    let rest = rest.trim();
    let assignment = || rest.split_once('=').ok_or("`=` is missing");
    Ok(match word {
        "let" => {
            let (symbol, expr) = assignment()?;
            Rule::Let(symbol.trim(), Expr::parse(expr)?)
        }
        "require" => {
            let (key, value) = assignment()?;
            Rule::Require(key.trim(), Expr::parse(value)?)
        }
        "ignore" => Rule::Ignore(rest.split_whitespace().collect()),
        "multiple" => {
            let (whole, by) = rest.split_once(" of ").ok_or("`of` is missing")?;
            Rule::Multiple([whole.trim(), by.trim()])
        }
        "learned" => Rule::Learned(Expr::parse(rest)?),
        "check" => {
            let (expr, rest) = rest.split_once(" at ").ok_or("`at` is missing")?;
            let (key, message) = rest.trim().split_once(' ').ok_or("a message is missing")?;
            let (headline, help) = message.split_once(" | ").unwrap_or((message, ""));
            Rule::Check(Check { holds: Expr::parse(expr)?, key, headline, help })
        }
        symbol => Rule::Field(read_field(symbol, rest)?),
    })
}

/// `KIND FIELD|ALIAS = DEFAULT`, and for a rotary embedding `rotary NAME=EXPR …`.
fn read_field(symbol: &'static str, rest: &'static str) -> Result<Field, String> {
    let (kind, rest) = rest.split_once(' ').ok_or("a field has a kind and a name")?;
    if kind == "rotary" {
        let arguments = split(rest).into_iter().map(|argument| {
            let (name, expr) = argument.split_once('=').ok_or("`=` is missing")?;
            Ok::<_, String>((name, Expr::parse(expr)?))
        });
        let arguments = arguments.collect::<Result<_, _>>()?;
        let kind = FieldKind::Rotary(arguments);
        return Ok(Field { symbol, kind, optional: false, keys: Vec::new(), default: None });
    }
    let (keys, default) = match rest.split_once(" = ") {
        Some((keys, default)) => (keys, Some(Expr::parse(default)?)),
        None => (rest, None),
    };
    let keys: Vec<&'static str> = keys.trim().split('|').collect();
    let (kind, optional) = match kind.strip_suffix('?') {
        Some(kind) => (kind, true),
        None => (kind, false),
    };
    let kind = match kind {
        "size" => FieldKind::Size,
        "depth" => FieldKind::Depth,
        "count" => FieldKind::Count,
        "number" => FieldKind::Number,
        "real" => FieldKind::Real,
        "positive" => FieldKind::Positive,
        "probability" => FieldKind::Probability,
        "dropout" => FieldKind::Dropout,
        "flag" => FieldKind::Flag,
        "activation" => FieldKind::Activation,
        "list" => FieldKind::List,
        _ => {
            let words = kind.strip_prefix("word(").and_then(|words| words.strip_suffix(')'));
            FieldKind::Word(words.ok_or(format!("`{kind}` is no kind"))?.split('|').collect())
        }
    };
    Ok(Field { symbol, kind, optional, keys, default })
}

/// `NAME [DIMS] INIT TENSOR [TENSOR'S DIMS] if CONDITION for i in COUNT`.
fn read_weight(
    section: Section,
    prefixes: &[&'static str],
    line: &'static str,
) -> Result<WeightRule, String> {
    let (line, count) = match line.split_once(" for i in ") {
        Some((line, count)) => (line, Some(Expr::parse(count)?)),
        None => (line, None),
    };
    let (line, condition) = match line.split_once(" if ") {
        Some((line, condition)) => (line, Some(Expr::parse(condition)?)),
        None => (line, None),
    };
    let words = split(line);
    let (name, dims, init, path, stored) = match words[..] {
        [name, dims, init, path] => (name, dims, init, path, None),
        [name, dims, init, path, stored] => (name, dims, init, path, Some(stored)),
        _ => return Err("a weight has a name, dims, a start and a tensor".into()),
    };
    let init = match init {
        "ones" => WeightInit::Ones,
        "zeros" => WeightInit::Zeros,
        "frozen(zeros)" => WeightInit::Frozen,
        _ => {
            let normal = init.strip_prefix("normal(").and_then(|init| init.strip_suffix(')'));
            let normal = normal.ok_or(format!("`{init}` starts no weight"))?;
            let (std, zero_row) = match normal.split_once(", ") {
                Some((std, zero_row)) => (std, Some(Box::new(Expr::parse(zero_row)?))),
                None => (normal, None),
            };
            WeightInit::Normal(Box::new(Expr::parse(std)?), zero_row)
        }
    };
    let names = match path.strip_prefix('/') {
        Some(whole) => whole.split("|/").map(str::to_owned).collect(),
        None => prefixes.iter().map(|prefix| format!("{prefix}{path}")).collect(),
    };
    let dims = read_dims(dims)?;
    let tensor = Tensor { names, dims: stored.map(read_dims).transpose()? };
    Ok(WeightRule { section, name, dims, init, tensor, condition, count })
}

/// `[H D, M]`: dims, each a product of axes.
fn read_dims(text: &'static str) -> Result<Vec<Vec<&'static str>>, String> {
    let inside = text.strip_prefix('[').and_then(|text| text.strip_suffix(']'));
    let inside = inside.ok_or(format!("`{text}` is no list of dims"))?;
    Ok(inside.split(',').map(split).collect())
}

/// A line of a function: a guard ([`crate::text::guard`]) or what [`read_statement`] reads.
fn add_line(code: &mut Code, line: &'static str) -> Result<(), String> {
    if !line.starts_with("when ") && !line.starts_with('}') {
        code.lines.push((code.text.lines().count(), read_statement(line)?));
    }
    code.text += &format!("{line}\n");
    Ok(())
}

/// A line of a function that is no guard: `%a = op words key=value %operands` or `return %a`.
fn read_statement(line: &'static str) -> Result<Line, String> {
    if let Some(result) = line.strip_prefix("return ") {
        return Ok(Line::Return(result.trim().trim_start_matches('%')));
    }
    let (results, call) = line.split_once(" = ").ok_or("`=` is missing")?;
    let result = results.trim().strip_prefix('%').ok_or("`%` is missing")?;
    let (result, ty) = match result.split_once(": ") {
        Some((result, ty)) => (result, Some(ty)),
        None => (result, None),
    };
    let mut words = split(call).into_iter();
    let op = words.next().ok_or("an op is missing")?;
    let (mut bare, mut named, mut operands) = (Vec::new(), Vec::new(), Vec::new());
    for word in words {
        if let Some(operand) = word.strip_prefix('%') {
            operands.push(operand);
        } else if let Some((key, value)) = word.split_once('=') {
            named.push((key, value));
        } else {
            bare.push(word);
        }
    }
    Ok(Line::Call { result, ty, op, bare, named, operands })
}

/// Words at spaces that are in no brackets or quotation marks.
fn split(text: &'static str) -> Vec<&'static str> {
    let (mut words, mut depth, mut quoted, mut start) = (Vec::new(), 0_usize, false, 0);
    for (at, c) in text.char_indices() {
        match c {
            '(' | '[' => depth += 1,
            ')' | ']' => depth = depth.saturating_sub(1),
            '"' => quoted = !quoted,
            ' ' if depth == 0 && !quoted => {
                words.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    words.push(&text[start..]);
    words.retain(|word| !word.is_empty());
    words
}
