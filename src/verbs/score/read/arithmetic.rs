//! Integer arithmetic of a shell: what `$((…))` stands for.
//!
//! ```text
//! sum  := product (("+"|"-") product)*      product := unary (("*"|"/"|"%") unary)*
//! unary := ("+"|"-") unary | atom           atom    := number | variable | (sum)
//! ```
//!
//! Anything else has no value here, rather than another one than a shell gives it: `++` and `--`,
//! `**`, comparisons, assignments, and numbers of another base, such as `010`.

/// Bytes of an expression at most. Chosen: ten times those of a long one; each sign or parenthesis
/// is a call more, and each `$((` is looked at as far as this.
const LENGTH_MAX: usize = 1000;

/// What a variable stands for that a text starts with, after its `$` if it has one, and how many
/// bytes of the text are behind it.
pub(super) type NumberAt<'a> = &'a dyn Fn(&str) -> Option<(i64, usize)>;

/// The value of an expression, where it is one and all its variables are numbers.
pub(super) fn evaluated(text: &str, number_at: NumberAt<'_>) -> Option<i64> {
    if text.contains("++") || text.contains("--") {
        return None;
    }
    let mut rest = Rest { text, number_at };
    let value = rest.sum()?;
    rest.text.trim_start().is_empty().then_some(value)
}

/// Splits what follows a `$((` into the expression and what is behind its `))`.
pub(super) fn split_at_end(text: &str) -> Option<(&str, &str)> {
    let mut open = 0_usize;
    for (at, c) in text.char_indices().take_while(|(at, _)| *at <= LENGTH_MAX) {
        match c {
            '(' => open += 1,
            ')' if open > 0 => open -= 1,
            ')' => return Some((&text[..at], text[at..].strip_prefix("))")?)),
            _ => {}
        }
    }
    None
}

/// A number as a shell reads it, of base ten.
pub(super) fn decimal(word: &str) -> Option<i64> {
    let digits = word.strip_prefix('-').unwrap_or(word);
    let is_octal = digits.len() > 1 && digits.starts_with('0');
    word.parse().ok().filter(|_| !is_octal)
}

/// What is still to be read.
struct Rest<'a> {
    text: &'a str,
    number_at: NumberAt<'a>,
}

impl<'a> Rest<'a> {
    /// Takes the first of these letters, if it is the next one.
    fn take(&mut self, letters: &[char]) -> Option<char> {
        self.text = self.text.trim_start();
        let next = self.text.chars().next().filter(|next| letters.contains(next))?;
        self.text = &self.text[next.len_utf8()..];
        Some(next)
    }

    fn sum(&mut self) -> Option<i64> {
        let mut sum = self.product()?;
        while let Some(sign) = self.take(&['+', '-']) {
            let next = self.product()?;
            sum = if sign == '+' { sum.checked_add(next) } else { sum.checked_sub(next) }?;
        }
        Some(sum)
    }

    fn product(&mut self) -> Option<i64> {
        let mut product = self.unary()?;
        while let Some(sign) = self.take(&['*', '/', '%']) {
            let next = self.unary()?;
            product = match sign {
                '*' => product.checked_mul(next),
                '/' => product.checked_div(next),
                _ => product.checked_rem(next),
            }?;
        }
        Some(product)
    }

    fn unary(&mut self) -> Option<i64> {
        if self.text.len() > LENGTH_MAX {
            return None;
        }
        match self.take(&['+', '-', '(']) {
            Some('+') => self.unary(),
            Some('-') => self.unary()?.checked_neg(),
            Some(_) => {
                let value = self.sum()?;
                self.take(&[')']).map(|_| value)
            }
            None => self.atom(),
        }
    }

    fn atom(&mut self) -> Option<i64> {
        let is_variable = self.take(&['$']).is_some();
        let text: &'a str = self.text;
        if text.starts_with('{') && !is_variable {
            return None;
        }
        if text.starts_with(|c: char| c.is_ascii_digit()) && !is_variable {
            let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '#';
            let (word, after) = text.split_at(text.find(|c| !is_word(c)).unwrap_or(text.len()));
            self.text = after;
            return decimal(word);
        }
        let (value, left) = (self.number_at)(text)?;
        self.text = &text[text.len() - left..];
        Some(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As a shell evaluates them, or not at all.
    #[test]
    fn expressions_have_the_values_of_a_shell() {
        let number_at = |text: &str| {
            let known = [("a", 12), ("B_1", 5), ("{B_1}", 5), ("{none:-3}", 3)];
            let found = known.iter().find(|(name, _)| text.starts_with(name))?;
            Some((found.1, text.len() - found.0.len()))
        };
        for (text, value) in [
            ("1 + 2 * 3", Some(7)),
            ("(1+2)*3", Some(9)),
            ("$a/${B_1} % 2", Some(0)),
            ("a*B_1-a/B_1", Some(58)),
            ("-7 / 2", Some(-3)),
            ("-7 % 2", Some(-1)),
            ("- -2 - +1", Some(1)),
            ("${none:-3}*2", Some(6)),
            ("a / (a - 12)", None),
            ("unset + 1", None),
            ("9223372036854775807 + 1", None),
            ("2 ** 3", None),
            ("++a", None),
            ("5--2", None),
            ("010", None),
            ("0x10", None),
            ("16#10", None),
            ("0 + 1", Some(1)),
            ("1 +", None),
            ("(1", None),
            ("1 2", None),
            ("", None),
        ] {
            assert_eq!(evaluated(text, &number_at), value, "{text}");
        }
        let deep = "(".repeat(100_000);
        assert_eq!(evaluated(&deep, &number_at), None);
        assert_eq!(split_at_end("(1+2)*3)) x"), Some(("(1+2)*3", " x")));
        assert_eq!(split_at_end("1) )"), None);
        assert_eq!(split_at_end("1"), None);
        assert_eq!(split_at_end(&format!("{}))", "1".repeat(2000))), None);
    }
}
