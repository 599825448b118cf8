//! The fields of a JSON object, read with their places; what is wrong is collected.

use std::ops::Range;

use serde_json::{Map, Value};

use crate::{Diagnostic, Span};

/// The largest size of one dim: an index fits in `i32`, with room to add two.
pub(crate) const SIZE_MAX: usize = 1 << 30;

/// The most elements of one tensor, chosen so that bytes of thousands of them fit in `i64`.
pub(crate) const ELEMENTS_MAX: usize = 1 << 48;

/// The most layers: chosen, about ten times the deepest model that is known.
const LAYERS_MAX: usize = 1024;

/// The most diagnostics that one reading reports.
const DIAGNOSTICS_MAX: usize = 20;

/// The fields of an object and what was found wrong with them.
///
/// A field that is wrong is reported and read as its default, so that the next one can be looked
/// at; [`Fields::finish`] tells whether any was.
pub(crate) struct Fields<'t> {
    source: &'t str,
    text: &'t str,
    object: Map<String, Value>,
    diagnostics: Vec<Diagnostic>,
    warnings: Vec<Diagnostic>,
}

impl<'t> Fields<'t> {
    /// Reads a text.
    pub(crate) fn parse(source: &'t str, text: &'t str) -> Result<Fields<'t>, Vec<Diagnostic>> {
        match serde_json::from_str(text) {
            Ok(Value::Object(object)) => {
                let (diagnostics, warnings) = (Vec::new(), Vec::new());
                Ok(Fields { source, text, object, diagnostics, warnings })
            }
            Ok(other) => {
                let headline = format!("the config is {}, not an object", describe(&other));
                Err(vec![Diagnostic::error("E1103", whole(source), headline)])
            }
            Err(error) => {
                let at = offset(text, error.line(), error.column());
                let span = Span { source: source.to_owned(), bytes: at..at + 1 };
                let mut wrong = Diagnostic::error("E1103", span, "the config is not JSON");
                let why = error.to_string();
                wrong = wrong.label(why.split(" at line ").next().unwrap_or(&why).to_owned());
                Err(vec![wrong])
            }
        }
    }

    /// The diagnostics in the order of the text, if there are any, or else the warnings.
    pub(crate) fn finish(mut self) -> Result<Vec<Diagnostic>, Vec<Diagnostic>> {
        self.diagnostics.sort_by_key(|wrong| wrong.span.bytes.start);
        if self.diagnostics.is_empty() { Ok(self.warnings) } else { Err(self.diagnostics) }
    }

    /// The names of all fields.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &str> {
        self.object.keys().map(String::as_str)
    }

    /// A field as it is written, null too.
    pub(crate) fn value(&self, key: &str) -> Option<&Value> {
        self.object.get(key)
    }

    /// Warns of a field that nobody reads: of the object in the field `inside`, or of the config.
    pub(crate) fn warn_of_unknown<'n>(
        &mut self,
        inside: &str,
        name: &str,
        known: impl IntoIterator<Item = &'n str>,
    ) {
        let (key, of) = match inside {
            "" => (name, String::new()),
            _ => (inside, format!(" of `{inside}`")),
        };
        let headline = format!("the field `{name}`{of} is not known, and changes nothing");
        let warning = self.warning("W1109", key, headline);
        self.warn(match crate::import::nearest(name, known) {
            Some(near) => warning.help(format!("did you mean `{near}`?")),
            None => warning,
        });
    }

    /// Where a field stands.
    fn span(&self, key: &str) -> Span {
        let bytes = place(self.text, key).unwrap_or(0..0);
        Span { source: self.source.to_owned(), bytes }
    }

    /// A diagnostic at a field.
    pub(crate) fn wrong(
        &self,
        code: &'static str,
        key: &str,
        headline: impl Into<String>,
    ) -> Diagnostic {
        Diagnostic::error(code, self.span(key), headline)
    }

    /// A warning at a field.
    pub(crate) fn warning(
        &self,
        code: &'static str,
        key: &str,
        headline: impl Into<String>,
    ) -> Diagnostic {
        Diagnostic::warning(code, self.span(key), headline)
    }

    /// Notes a warning.
    pub(crate) fn warn(&mut self, warning: Diagnostic) {
        if self.warnings.len() < DIAGNOSTICS_MAX {
            self.warnings.push(warning);
        }
    }

    /// Notes a diagnostic.
    pub(crate) fn report(&mut self, wrong: Diagnostic) {
        if self.diagnostics.len() < DIAGNOSTICS_MAX {
            self.diagnostics.push(wrong);
        }
    }

    fn report_type<T>(&mut self, key: &str, wanted: &str) -> Option<T> {
        let found = self.object.get(key).map(describe).unwrap_or_default();
        let wrong = self.wrong("E1104", key, format!("`{key}` is {found}, not {wanted}"));
        self.report(wrong);
        None
    }

    /// Whether a field is there and not null.
    pub(crate) fn given(&self, key: &str) -> bool {
        self.object.get(key).is_some_and(|value| !value.is_null())
    }

    /// The one of several names of a field that is there, or the first.
    pub(crate) fn key_of(&self, keys: &[&'static str]) -> &'static str {
        keys.iter().find(|key| self.given(key)).unwrap_or(&keys[0])
    }

    /// The first of several fields that is there and not null.
    pub(crate) fn key_of_any<const N: usize>(
        &self,
        keys: [&'static str; N],
    ) -> Option<&'static str> {
        keys.into_iter().find(|key| self.given(key))
    }

    /// Puts the fields of the object in the field `key` beside it, as `key.name`.
    pub(crate) fn open(&mut self, key: &'static str) {
        let inside = self.object(key).unwrap_or_default();
        self.object.remove(key);
        self.object
            .extend(inside.into_iter().map(|(name, value)| (format!("{key}.{name}"), value)));
    }

    /// A field; none when it is absent or null. Several names have to agree.
    fn get(&mut self, keys: &[&'static str]) -> Option<(&'static str, Value)> {
        let key = self.key_of(keys);
        let value = self.object.get(key).filter(|value| !value.is_null())?.clone();
        let other = |other: &&&str| self.given(other) && self.object.get(**other) != Some(&value);
        if let Some(other) = keys.iter().find(other) {
            let found = self.object.get(*other).map(describe).unwrap_or_default();
            let headline = format!("`{key}` is {}, but `{other}` is {found}", describe(&value));
            let wrong = self.wrong("E1105", other, headline);
            self.report(wrong.note(format!("`{other}` is another name of `{key}`")));
        }
        Some((key, value))
    }

    /// A size of at least one.
    pub(crate) fn size(&mut self, keys: &[&'static str], default: usize) -> usize {
        self.optional_size(keys).unwrap_or(default)
    }

    /// A size of at least one, if it is given.
    pub(crate) fn optional_size(&mut self, keys: &[&'static str]) -> Option<usize> {
        let (key, value) = self.get(keys)?;
        let size = value.as_u64().and_then(|size| usize::try_from(size).ok());
        match size {
            Some(size @ 1..=SIZE_MAX) => Some(size),
            _ => self.report_type(key, "a whole number from 1 to 2^30"),
        }
    }

    /// A whole number from zero on, if it is given.
    pub(crate) fn optional_count(&mut self, keys: &[&'static str]) -> Option<usize> {
        let (key, value) = self.get(keys)?;
        let count = value.as_u64().and_then(|count| usize::try_from(count).ok());
        let count = count.filter(|count| *count <= SIZE_MAX);
        count.or_else(|| self.report_type(key, "a whole number from 0 to 2^30"))
    }

    /// A finite number of at least zero, under the first of several names.
    pub(crate) fn number_of(&mut self, keys: &[&'static str], default: f64) -> f64 {
        let key = self.key_of(keys);
        self.get(keys).map_or(default, |_| self.number(key, default))
    }

    /// Any finite number.
    pub(crate) fn real(&mut self, keys: &[&'static str], default: f64) -> f64 {
        let Some((key, value)) = self.get(keys) else { return default };
        let number = value.as_f64().filter(|n| n.is_finite());
        number.or_else(|| self.report_type(key, "a number")).unwrap_or(default)
    }

    /// A finite number of at least zero.
    pub(crate) fn number(&mut self, key: &'static str, default: f64) -> f64 {
        let Some((key, value)) = self.get(&[key]) else { return default };
        let number = value.as_f64().filter(|n| n.is_finite() && *n >= 0.0);
        number.or_else(|| self.report_type(key, "a number from 0 on")).unwrap_or(default)
    }

    /// A finite number above zero.
    pub(crate) fn positive(&mut self, key: &'static str, default: f64) -> f64 {
        let number = self.number(key, default);
        if number > 0.0 {
            return number;
        }
        self.report_type(key, "a number above 0").unwrap_or(default)
    }

    /// A probability below one.
    pub(crate) fn probability(&mut self, key: &'static str, default: f64) -> f64 {
        let number = self.number(key, default);
        if number < 1.0 {
            return number;
        }
        self.report_type(key, "a probability below 1").unwrap_or(default)
    }

    /// True or false.
    pub(crate) fn flag(&mut self, key: &'static str, default: bool) -> bool {
        let Some((key, value)) = self.get(&[key]) else { return default };
        value.as_bool().or_else(|| self.report_type(key, "true or false")).unwrap_or(default)
    }

    /// A text, if it is given.
    pub(crate) fn word(&mut self, key: &str) -> Option<String> {
        match self.object.get(key)? {
            Value::Null => None,
            Value::String(word) => Some(word.clone()),
            Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => {
                self.report_type(key, "a text")
            }
        }
    }

    /// A list of texts; empty when it is not given.
    pub(crate) fn words(&mut self, key: &str) -> Vec<String> {
        let Some(value) = self.object.get(key).filter(|value| !value.is_null()) else {
            return Vec::new();
        };
        let words = value.as_array().and_then(|items| {
            items.iter().map(|item| item.as_str().map(str::to_owned)).collect::<Option<Vec<_>>>()
        });
        words.or_else(|| self.report_type(key, "a list of texts")).unwrap_or_default()
    }

    /// An object inside, if it is given.
    pub(crate) fn object(&mut self, key: &str) -> Option<Map<String, Value>> {
        let value = self.object.get(key).filter(|value| !value.is_null())?;
        let object = value.as_object().cloned();
        object.or_else(|| self.report_type(key, "an object"))
    }
}

/// The byte of a line and a column, both from 1.
fn offset(text: &str, line: usize, column: usize) -> usize {
    let start: usize = text.split_inclusive('\n').take(line.saturating_sub(1)).map(str::len).sum();
    (start + column.saturating_sub(1)).min(text.len().saturating_sub(1))
}

/// Where a field of the outermost object stands: its key and its value up to the end of the line.
fn place(text: &str, key: &str) -> Option<Range<usize>> {
    let bytes = text.as_bytes();
    let (mut depth, mut at) = (0_usize, 0);
    while at < bytes.len() {
        match bytes[at] {
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth = depth.saturating_sub(1),
            b'"' => {
                let end = string_end(bytes, at);
                let colon = text[end..].trim_start().starts_with(':');
                if depth == 1 && colon && text[at + 1..end].strip_suffix('"') == Some(key) {
                    let line = text[at..].find(['\n', '}']).map_or(text.len(), |n| at + n);
                    let field = text[at..line].trim_end().trim_end_matches(',');
                    return Some(at..at + field.len());
                }
                at = end;
                continue;
            }
            _ => {}
        }
        at += 1;
    }
    None
}

/// The end of the string that starts at a quotation mark.
fn string_end(bytes: &[u8], start: usize) -> usize {
    let mut at = start + 1;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    bytes.len()
}

/// Reads the number of layers.
pub(crate) fn layers(fields: &mut Fields<'_>, keys: &[&'static str], default: usize) -> usize {
    let layers = fields.size(keys, default);
    if layers > LAYERS_MAX {
        let headline = format!("{layers} layers are more than the {LAYERS_MAX} that are supported");
        let wrong = fields.wrong("E1104", fields.key_of(keys), headline);
        fields.report(wrong);
        return default;
    }
    layers
}

/// The quotient of two fields, one of which has to divide the other.
pub(crate) fn quotient(
    fields: &mut Fields<'_>,
    [(what, whole), (by_what, by)]: [(&'static str, usize); 2],
) -> usize {
    if !whole.is_multiple_of(by) {
        let headline = format!("`{what}` {whole} is not a multiple of `{by_what}` {by}");
        let wrong = fields.wrong("E1105", what, headline);
        let rest = whole % by;
        fields.report(wrong.note(format!("{whole} = {} · {by} + {rest}", whole / by)));
    }
    (whole / by).max(1)
}

/// Reports a tensor with more elements than can be counted with.
pub(crate) fn check_elements(fields: &mut Fields<'_>, what: &str, sizes: &[usize]) {
    let count = sizes.iter().try_fold(1_usize, |product, size| product.checked_mul(*size));
    if count.is_none_or(|count| count > ELEMENTS_MAX) {
        let text = sizes.iter().map(usize::to_string).collect::<Vec<_>>().join(" · ");
        let headline = format!("{what} would have {text} elements, more than 2^48");
        let wrong = fields.wrong("E1104", "", headline);
        fields.report(wrong);
    }
}

/// `a`, `b` and `c`, each in backticks.
pub(crate) fn list(names: &[&str]) -> String {
    let quoted: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
    match quoted.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, rest)) => format!("{} and {last}", rest.join(", ")),
        None => String::new(),
    }
}

/// What a JSON value is, for people.
pub(crate) fn describe(value: &Value) -> String {
    let text = match value {
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => value.to_string(),
        Value::Array(_) => return "a list".into(),
        Value::Object(_) => return "an object".into(),
    };
    if text.chars().count() <= 40 {
        return format!("`{text}`");
    }
    format!("`{}…`", text.chars().take(40).collect::<String>())
}

/// The span of a whole source.
pub(crate) fn whole(source: &str) -> Span {
    Span::of(source)
}
