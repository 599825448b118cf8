//! Integer arithmetic of a shell: what `$((…))` stands for.
//!
//! ```text
//! sum  := product (("+"|"-") product)*      product := unary (("*"|"/"|"%") unary)*
//! unary := ("+"|"-") unary | atom           atom    := number | name | "$"name | "${"…"}" | (sum)
//! ```

/// The value of an expression, where it is one and all its names have values; `value_of` gives that
/// of a name, with what of `${…}` follows it.
pub(super) fn evaluated(text: &str, value_of: &dyn Fn(&str) -> Option<i64>) -> Option<i64> {
    let mut rest = Rest { text, value_of };
    let value = rest.sum()?;
    rest.text.trim_start().is_empty().then_some(value)
}

/// The expression that stands at the start of `text`, behind `$((`, and what is behind its end.
pub(super) fn split_at_end(text: &str) -> Option<(&str, &str)> {
    let mut open = 0_usize;
    for (at, c) in text.char_indices() {
        match c {
            '(' => open += 1,
            ')' if open > 0 => open -= 1,
            ')' => return Some((&text[..at], text[at..].strip_prefix("))")?)),
            _ => {}
        }
    }
    None
}

/// What is still to be read.
struct Rest<'a> {
    text: &'a str,
    value_of: &'a dyn Fn(&str) -> Option<i64>,
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
        // Each sign or parenthesis is one more call: no script has as many as a stack has room for.
        if self.text.len() > 1000 {
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
        let rest: &'a str = self.text;
        if let Some(braced) = rest.strip_prefix('{').filter(|_| is_variable) {
            let (name, after) = braced.split_once('}')?;
            self.text = after;
            return (self.value_of)(name);
        }
        let is_letter = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let (word, after) = rest.split_at(rest.find(|c| !is_letter(c)).unwrap_or(rest.len()));
        self.text = after;
        if word.starts_with(|c: char| c.is_ascii_digit()) && !is_variable {
            return word.parse().ok();
        }
        (self.value_of)(word)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As a shell evaluates them.
    #[test]
    fn expressions_have_the_values_of_a_shell() {
        let value_of = |name: &str| match name {
            "a" => Some(12),
            "B_1" => Some(5),
            "none:-3" => Some(3),
            _ => None,
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
            ("1 +", None),
            ("(1", None),
            ("1 2", None),
            ("", None),
        ] {
            assert_eq!(evaluated(text, &value_of), value, "{text}");
        }
        let deep = "(".repeat(100_000);
        assert_eq!(evaluated(&deep, &value_of), None);
        assert_eq!(split_at_end("(1+2)*3)) x"), Some(("(1+2)*3", " x")));
        assert_eq!(split_at_end("1) )"), None);
        assert_eq!(split_at_end("1"), None);
    }
}
