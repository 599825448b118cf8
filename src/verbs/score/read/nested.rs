//! Values of nested files, JSON and TOML, each under its names joined by points and with its place.

use std::ops::Range;

use ir::{Diagnostic, Span};
use serde_json::Value as Json;
use toml::de::{DeTable, DeValue};

use super::said::Word;

/// The values of JSON that is known to be well formed.
pub(super) fn json_words(text: &str) -> Vec<Word> {
    let mut walk = Walk { text, at: 0, words: Vec::new() };
    walk.value("", 0..0);
    walk.words
}

struct Walk<'t> {
    text: &'t str,
    at: usize,
    words: Vec<Word>,
}

impl Walk<'_> {
    fn next(&self) -> u8 {
        self.text.as_bytes().get(self.at).copied().unwrap_or(0)
    }

    fn skip_spaces(&mut self) {
        while self.next().is_ascii_whitespace() {
            self.at += 1;
        }
    }

    /// Goes past a text with its quotes.
    fn skip_text(&mut self) {
        self.at += 1;
        while !matches!(self.next(), b'"' | 0) {
            self.at += 1 + usize::from(self.next() == b'\\');
        }
        self.at += 1;
    }

    /// Goes past a value that is no object.
    fn skip_value(&mut self) {
        let mut depth = 0;
        loop {
            match self.next() {
                b'"' => {
                    self.skip_text();
                    continue;
                }
                b'[' | b'{' => depth += 1,
                b']' | b'}' | b',' if depth == 0 => return,
                b']' | b'}' => depth -= 1,
                b if depth == 0 && b.is_ascii_whitespace() => return,
                0 => return,
                _ => {}
            }
            self.at += 1;
        }
    }

    /// Adds the values of what begins here; `name` ends in a point, or is empty.
    fn value(&mut self, name: &str, key: Range<usize>) {
        self.skip_spaces();
        let start = self.at;
        if self.next() != b'{' {
            self.skip_value();
            let value = self.read(start).unwrap_or(Json::Null);
            let name = name.trim_end_matches('.').to_owned();
            self.words.push(Word { name, value, places: [key, start..self.at] });
            return;
        }
        self.at += 1;
        loop {
            self.skip_spaces();
            match self.next() {
                b'"' => {}
                b',' => {
                    self.at += 1;
                    continue;
                }
                _ => break,
            }
            let start = self.at;
            self.skip_text();
            let key = start..self.at;
            let own = self.read(start);
            let own = own.as_ref().and_then(Json::as_str).unwrap_or_default();
            self.skip_spaces();
            // The colon.
            self.at += 1;
            self.value(&format!("{name}{own}."), key);
        }
        self.at += 1;
    }

    /// What stands between a place and here.
    fn read(&self, start: usize) -> Option<Json> {
        serde_json::from_str(self.text.get(start..self.at)?).ok()
    }
}

/// The values of TOML.
///
/// # Errors
/// `E5016` for each place that is no TOML.
pub(super) fn toml_words(source: &str, text: &str) -> Result<Vec<Word>, Vec<Diagnostic>> {
    let (table, errors) = DeTable::parse_recoverable(text);
    if !errors.is_empty() {
        let told = |error: toml::de::Error| {
            let bytes = shown(text, error.span().unwrap_or(0..0));
            let message = error.message().lines().next().unwrap_or("not TOML");
            let span = Span { source: source.to_owned(), bytes };
            Diagnostic::error("E5016", span, format!("not TOML: {message}"))
                .help("write `key = \"text\"`, `key = 8`, `[table]`")
        };
        return Err(errors.into_iter().map(told).collect());
    }
    let mut words = Vec::new();
    add_table("", table.get_ref(), &mut words);
    words.sort_by_key(|word: &Word| word.places[0].start);
    Ok(words)
}

/// A place with at least one character: what lacks something is marked where it ends.
pub(super) fn shown(text: &str, bytes: Range<usize>) -> Range<usize> {
    let end = bytes.end.min(text.len());
    if bytes.start < end {
        return bytes.start..end;
    }
    let start = text[..floor(text, end)].char_indices().next_back().map_or(0, |(at, _)| at);
    start..end
}

fn floor(text: &str, mut at: usize) -> usize {
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}

fn add_table(before: &str, table: &DeTable<'_>, words: &mut Vec<Word>) {
    for (key, value) in table.iter() {
        let name = format!("{before}{}", key.get_ref());
        match value.get_ref().as_table() {
            Some(inner) => add_table(&format!("{name}."), inner, words),
            None => {
                let (value, places) = (json_of(value.get_ref()), [key.span(), value.span()]);
                words.push(Word { name, value, places });
            }
        }
    }
}

fn json_of(value: &DeValue<'_>) -> Json {
    match value {
        DeValue::String(text) => Json::from(text.as_ref()),
        DeValue::Integer(number) => match i64::from_str_radix(number.as_str(), number.radix()) {
            Ok(number) => Json::from(number),
            Err(_) => Json::from(number.as_str()),
        },
        DeValue::Float(number) => match number.as_str().parse::<f64>() {
            Ok(number) => Json::from(number),
            Err(_) => Json::from(number.as_str()),
        },
        DeValue::Boolean(is) => Json::Bool(*is),
        DeValue::Datetime(time) => Json::from(time.to_string()),
        DeValue::Array(list) => list.iter().map(|value| json_of(value.get_ref())).collect(),
        DeValue::Table(table) => {
            let pair = |(key, value): (&toml::Spanned<_>, &toml::Spanned<DeValue<'_>>)| {
                (AsRef::<str>::as_ref(key.get_ref()).to_owned(), json_of(value.get_ref()))
            };
            Json::Object(table.iter().map(pair).collect())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every value stands where its text does, and is what a parser of the whole file says.
    #[test]
    fn values_are_where_they_stand() {
        let json = " {\"a\": {\"b\\\"c\": [1, {\"x\": \"}\"}], \"d\" : -2.5e3 } , \"e\":\"é,\"}";
        let words = json_words(json);
        let names: Vec<&str> = words.iter().map(|word| word.name.as_str()).collect();
        assert_eq!(names, ["a.b\"c", "a.d", "e"]);
        let texts: Vec<&str> = words.iter().map(|word| &json[word.places[1].clone()]).collect();
        assert_eq!(texts, ["[1, {\"x\": \"}\"}]", "-2.5e3", "\"é,\""]);
        assert_eq!(&json[words[1].places[0].clone()], "\"d\"");
        assert_eq!(words[2].value, "é,");
        let toml = "x = 0x10\n[a]\n\"b c\" = [1, { y = true }]\nd = 1.5\n";
        let words = toml_words("t", toml).unwrap();
        let names: Vec<&str> = words.iter().map(|word| word.name.as_str()).collect();
        assert_eq!(names, ["x", "a.b c", "a.d"]);
        let values: Vec<String> = words.iter().map(|word| word.value.to_string()).collect();
        assert_eq!(values, ["16", "[1,{\"y\":true}]", "1.5"]);
        let texts: Vec<&str> = words.iter().map(|word| &toml[word.places[1].clone()]).collect();
        assert_eq!(texts, ["0x10", "[1, { y = true }]", "1.5"]);
    }

    /// What is cut off anywhere ends, and so does what is no JSON at all.
    #[test]
    fn every_text_is_walked_to_its_end() {
        let json = "{\"a\": [1, {\"b\": \"c\\\"\"}], \"d\": {\"e\": null}}";
        for end in 0..=json.len() {
            json_words(&json[..end]);
            json_words(&json[end..]);
        }
    }
}
