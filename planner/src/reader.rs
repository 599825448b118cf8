//! TOML tables read key by key, with everything that is wrong collected as diagnostics.

use ir::import::nearest;
use ir::{Diagnostic, Span};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::quantity::Unit;

/// The most diagnostics that one reading reports.
pub(crate) const DIAGNOSTICS_MAX: usize = 20;

/// The largest count. Chosen: as for flags, far above any machine.
pub(crate) const COUNT_MAX: usize = 1 << 30;

/// The largest quantity, in SI base units. Chosen: far above any machine, and bytes are counted in
/// 64 bits.
const QUANTITY_MAX: f64 = 1e18;

/// A file that is being read.
#[derive(Debug)]
pub(crate) struct Reader<'a> {
    source: &'a str,
    pub(crate) diagnostics: Vec<Diagnostic>,
    /// The last one beyond those that are reported.
    beyond: Vec<Diagnostic>,
    /// How much was wrong so far.
    pub(crate) wrong_count: usize,
}

/// A table of a file: its keys, and what it is called there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Table<'t> {
    path: &'t str,
    keys: &'t DeTable<'t>,
}

impl<'a> Reader<'a> {
    /// Reads the text; what is no TOML is reported, and what can be read is returned.
    pub(crate) fn open(source: &'a str, text: &'a str) -> (Reader<'a>, Spanned<DeTable<'a>>) {
        let (table, errors) = DeTable::parse_recoverable(text);
        let (diagnostics, beyond) = (Vec::new(), Vec::new());
        let mut reader = Reader { source, diagnostics, beyond, wrong_count: 0 };
        for error in errors {
            let mut bytes = error.span().unwrap_or(0..0);
            if bytes.is_empty() {
                // What lacks something is marked where it ends.
                bytes.start = bytes.start.saturating_sub(1);
                bytes.end = bytes.start + 1;
            }
            let message = error.message().lines().next().unwrap_or("not TOML").to_owned();
            let headline = format!("cannot read the file: {message}");
            let help = "write TOML: `key = \"text\"`, `key = 8`, `[table]`".to_owned();
            reader.report("E3001", bytes, headline).help = Some(help);
        }
        (reader, table)
    }

    /// Whether the text is no TOML and has none of some keys: it is another file, of which nothing
    /// is shown. What was found is then one diagnostic without a place.
    pub(crate) fn is_foreign(&mut self, table: Table<'_>, keys: &[&str]) -> bool {
        let has_key = table.keys.keys().any(|key| keys.contains(&key.get_ref().as_ref()));
        if self.diagnostics.is_empty() || has_key {
            return false;
        }
        self.diagnostics.clear();
        self.beyond.clear();
        self.report("E3001", 0..0, "this is no TOML".to_owned()).help =
            Some("give a file that `gantline cluster show` could have printed".to_owned());
        true
    }

    pub(crate) fn span(&self, bytes: std::ops::Range<usize>) -> Span {
        Span { source: self.source.to_owned(), bytes }
    }

    pub(crate) fn report(
        &mut self,
        code: &'static str,
        bytes: std::ops::Range<usize>,
        headline: String,
    ) -> &mut Diagnostic {
        let diagnostic = Diagnostic::error(code, self.span(bytes), headline);
        self.wrong_count += 1;
        let is_full = self.diagnostics.len() >= DIAGNOSTICS_MAX;
        let list = if is_full { &mut self.beyond } else { &mut self.diagnostics };
        if is_full {
            list.clear();
        }
        list.push(diagnostic);
        list.last_mut().expect("one was pushed")
    }

    fn wrong_type(
        &mut self,
        table: Table<'_>,
        key: &str,
        value: &Spanned<DeValue<'_>>,
        want: &str,
    ) {
        let headline = format!("`{}` is {}, not {want}", table.name(key), kind(value.get_ref()));
        self.report("E3004", value.span(), headline).help = Some(format!("write {want}"));
    }

    /// Reports keys that are not among the known ones.
    pub(crate) fn expect_keys(&mut self, table: Table<'_>, known: &[&str]) {
        for key in table.keys.keys() {
            let name = key.get_ref().as_ref();
            if known.contains(&name) {
                continue;
            }
            let headline = format!("unknown key `{}`", table.name(name));
            let near = nearest(name, known.iter().copied()).map(str::to_owned);
            let keys = known.iter().map(|k| format!("`{k}`")).collect::<Vec<_>>().join(", ");
            let diagnostic = self.report("E3002", key.span(), headline);
            diagnostic.help = Some(match near {
                Some(near) => format!("did you mean `{near}`?"),
                None => format!("the keys here are {keys}"),
            });
        }
    }

    pub(crate) fn string(&mut self, table: Table<'_>, key: &str) -> Option<String> {
        let value = table.keys.get(key)?;
        let text = value.get_ref().as_str().map(str::to_owned);
        if text.is_none() {
            self.wrong_type(table, key, value, "a text");
        }
        text
    }

    /// True or false.
    pub(crate) fn flag(&mut self, table: Table<'_>, key: &str) -> Option<bool> {
        let value = table.keys.get(key)?;
        let flag = value.get_ref().as_bool();
        if flag.is_none() {
            self.wrong_type(table, key, value, "true or false");
        }
        flag
    }

    /// A positive whole number.
    pub(crate) fn count(&mut self, table: Table<'_>, key: &str) -> Option<usize> {
        let value = table.keys.get(key)?;
        let number = value.get_ref().as_integer();
        let written = number.map(|n| n.to_string());
        let number = number.and_then(|n| usize::from_str_radix(n.as_str(), n.radix()).ok());
        if let Some(written) = written.filter(|_| number.is_none_or(|n| n == 0)) {
            let headline = format!("`{}` is {written}, and counts begin with 1", table.name(key));
            let help = format!("write a whole number of 1 to {COUNT_MAX}");
            self.report("E3004", value.span(), headline).help = Some(help);
            return None;
        }
        if number.is_none() {
            self.wrong_type(table, key, value, "a positive whole number");
            return None;
        }
        if let Some(number) = number.filter(|number| *number > COUNT_MAX) {
            let headline = format!("`{}` is {number}, more than {COUNT_MAX}", table.name(key));
            self.report("E3004", value.span(), headline);
            return None;
        }
        number
    }

    /// A number with a unit that is more than nothing, in SI base units.
    pub(crate) fn positive(&mut self, table: Table<'_>, key: &str, unit: Unit) -> Option<f64> {
        let number = self.quantity(table, key, unit)?;
        if number > 0.0 {
            return Some(number);
        }
        let headline = format!("`{}` is 0, and nothing could be done with it", table.name(key));
        let help = format!("write more, such as \"{}\"", unit.example());
        self.report("E3005", table.bytes(key), headline).help = Some(help);
        None
    }

    /// A number with a unit, in SI base units.
    pub(crate) fn quantity(&mut self, table: Table<'_>, key: &str, unit: Unit) -> Option<f64> {
        let value = table.keys.get(key)?;
        self.quantity_of(&table.name(key), value, unit)
    }

    fn quantity_of(&mut self, name: &str, value: &Spanned<DeValue<'_>>, unit: Unit) -> Option<f64> {
        let text = value.get_ref().as_str();
        let number = text.and_then(|text| unit.parse(text));
        let is_large = number.is_some_and(|number| number > QUANTITY_MAX);
        let number = number.filter(|_| !is_large);
        let found = shown(value.get_ref());
        if number.is_none() {
            let positive = text.and_then(|text| unit.parse(text.trim().strip_prefix('-')?));
            let why = match text {
                Some(_) if is_large => "which is more than there can be",
                Some(_) if positive.is_some() => "which is negative",
                Some(text) if unit.ends(text) => "whose number cannot be read",
                Some(_) | None => "which has no unit that fits",
            };
            let headline = format!("`{name}` is {found}, {why}");
            let help = format!("write a text with a unit, such as \"{}\"", unit.example());
            self.report("E3005", value.span(), headline).help = Some(help);
        }
        number
    }

    /// A number without a unit, from 1 to `most`.
    pub(crate) fn ratio(&mut self, table: Table<'_>, key: &str, most: f64) -> Option<f64> {
        let value = table.keys.get(key)?;
        let digits = value.get_ref().as_integer().map(ToString::to_string);
        let digits = digits.or_else(|| Some(value.get_ref().as_float()?.to_string()));
        let number = digits.and_then(|digits| digits.parse::<f64>().ok());
        if let Some(number) = number.filter(|number| (1.0..=most).contains(number)) {
            return Some(number);
        }
        let name = table.name(key);
        let headline = format!("`{name}` is {}, no ratio", shown(value.get_ref()));
        let help = format!("write a number from 1 to {most}, such as `{key} = 2`");
        self.report("E3004", value.span(), headline).help = Some(help);
        None
    }

    /// Two texts.
    pub(crate) fn pair(&mut self, table: Table<'_>, key: &str) -> Option<[String; 2]> {
        let Some(value) = table.keys.get(key) else {
            let headline = format!("there is no `{}`", table.name(key));
            let help = format!("write `{key} = [\"one\", \"other\"]`");
            self.report("E3003", table.span(), headline).help = Some(help);
            return None;
        };
        let texts = value.get_ref().as_array().map(|all| {
            let text = |one: &Spanned<DeValue<'_>>| one.get_ref().as_str().map(str::to_owned);
            all.iter().map(text).collect::<Option<Vec<String>>>()
        });
        let pair = texts.flatten().and_then(|texts| <[String; 2]>::try_from(texts).ok());
        if pair.is_none() {
            self.wrong_type(table, key, value, "a list of two texts");
        }
        pair
    }

    /// Money: a number above 0 and the three letters of its currency.
    pub(crate) fn money(&mut self, table: Table<'_>, key: &str) -> Option<(f64, String)> {
        let name = table.name(key);
        let Some(value) = table.keys.get(key) else {
            let headline = format!("there is no `{name}`");
            let help = format!("write `{key}`, such as \"2.50 USD\"");
            self.report("E3003", table.span(), headline).help = Some(help);
            return None;
        };
        let text = value.get_ref().as_str();
        let parts = text.and_then(|text| text.trim().split_once(' '));
        let number = parts.and_then(|(number, _)| number.parse::<f64>().ok());
        let number = number.filter(|number| number.is_finite() && *number > 0.0);
        let currency = parts.map(|(_, currency)| currency.trim());
        let currency =
            currency.filter(|c| c.len() == 3 && c.bytes().all(|b| b.is_ascii_uppercase()));
        if let Some((number, currency)) = number.zip(currency) {
            return Some((number, currency.to_owned()));
        }
        let headline =
            format!("`{name}` is {}, no price with its currency", shown(value.get_ref()));
        let help = "write a number above 0 and three letters, such as \"2.50 USD\"".to_owned();
        self.report("E3005", value.span(), headline).help = Some(help);
        None
    }

    /// A day, as a text or as TOML has them: `2026-08-01`.
    pub(crate) fn day(&mut self, table: Table<'_>, key: &str) -> Option<String> {
        let name = table.name(key);
        let help = format!("write the day from which it is, such as `{key} = 2026-08-01`");
        let Some(value) = table.keys.get(key) else {
            let headline = format!("there is no `{name}`");
            self.report("E3003", table.span(), headline).help = Some(help);
            return None;
        };
        let written = value.get_ref().as_datetime().map(ToString::to_string);
        let text = written.or_else(|| value.get_ref().as_str().map(str::to_owned));
        let text = text.unwrap_or_default();
        let day = text.parse::<toml::value::Datetime>().ok().filter(|when| when.time.is_none());
        if let Some(day) = day.and_then(|when| when.date) {
            return Some(day.to_string());
        }
        let headline = format!("`{name}` is {}, and no day", shown(value.get_ref()));
        self.report("E3004", value.span(), headline).help = Some(help);
        None
    }

    /// A list of pairs of numbers with units.
    pub(crate) fn points(
        &mut self,
        table: Table<'_>,
        key: &str,
        units: [Unit; 2],
    ) -> Vec<[f64; 2]> {
        let Some(value) = table.keys.get(key) else { return Vec::new() };
        let Some(rows) = value.get_ref().as_array() else {
            self.wrong_type(table, key, value, "a list of pairs");
            return Vec::new();
        };
        let name = table.name(key);
        let mut points = Vec::new();
        for row in rows.iter() {
            match row.get_ref().as_array() {
                Some(pair) if pair.len() == 2 => {
                    let x = self.quantity_of(&name, &pair[0], units[0]);
                    let y = self.quantity_of(&name, &pair[1], units[1]);
                    points.extend(x.zip(y).map(|(x, y)| [x, y]));
                }
                Some(_) | None => self.wrong_type(table, key, row, "a pair"),
            }
        }
        points
    }

    pub(crate) fn table<'t>(&mut self, table: Table<'t>, key: &'t str) -> Option<Table<'t>> {
        let value = table.keys.get(key)?;
        let keys = value.get_ref().as_table();
        if keys.is_none() {
            self.wrong_type(table, key, value, "a table");
        }
        keys.map(|keys| Table { path: key, keys })
    }

    /// The tables of `[[key]]`.
    pub(crate) fn tables<'t>(&mut self, table: Table<'t>, key: &'t str) -> Vec<Table<'t>> {
        let Some(value) = table.keys.get(key) else { return Vec::new() };
        let mut tables = Vec::new();
        let Some(rows) = value.get_ref().as_array() else {
            self.wrong_type(table, key, value, "a list of tables");
            return tables;
        };
        for row in rows.iter() {
            match row.get_ref().as_table() {
                Some(keys) => tables.push(Table { path: key, keys }),
                None => self.wrong_type(table, key, row, "a table"),
            }
        }
        tables
    }
}

impl<'t> Table<'t> {
    pub(crate) fn root(table: &'t Spanned<DeTable<'t>>) -> Table<'t> {
        Table { path: "", keys: table.get_ref() }
    }

    /// The bytes of a key's value.
    pub(crate) fn bytes(&self, key: &str) -> std::ops::Range<usize> {
        self.keys.get(key).map_or(0..0, Spanned::span)
    }

    /// The bytes of its first value; none of an empty table.
    pub(crate) fn span(&self) -> std::ops::Range<usize> {
        self.keys.values().next().map_or(0..0, Spanned::span)
    }

    fn name(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }
}

/// A text or a number as it was written; for other values, the name of their kind.
fn shown(value: &DeValue<'_>) -> String {
    let digits = || Some(value.as_integer()?.to_string());
    let digits = || digits().or_else(|| Some(value.as_float()?.to_string()));
    let found = value.as_str().map(str::to_owned).or_else(digits);
    found.map_or_else(|| kind(value).to_owned(), |text| format!("`{text}`"))
}

fn kind(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a text",
        DeValue::Integer(_) => "a whole number",
        DeValue::Float(_) => "a number",
        DeValue::Boolean(_) => "true or false",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}
