//! The expressions of family files: numbers, words and flags from the fields of a config.
//!
//! ```text
//! expr    := "if" expr "then" expr "else" expr | or
//! or      := and ("or" and)*            and := not ("and" not)*
//! not     := "not" not | compare        compare := sum (("=="|"!="|"<"|"<="|">"|">=") sum)?
//! sum     := product (("+"|"-") product)*
//! product := power (("*"|"/"|"%") power)*
//! power   := unary ("^" power)?         unary := "-" unary | atom
//! atom    := number | "word" | true | false | none | (expr)
//!          | name | name "[" expr "]" | name "(" expr, … ")"
//! ```
//!
//! `a[i]` is an entry of a list; functions are `sqrt`, `ln`, `min`, `max`, `floor`, and of a rotary
//! embedding `score_gain`. A name that nothing stands for is an error, and so is arithmetic with
//! `none`.

use std::collections::BTreeMap;
use std::fmt;

use super::rotary::Rotary;

/// What a name of a family file stands for.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A field that is null.
    None,
    /// True or false.
    Flag(bool),
    /// A number.
    Number(f64),
    /// One of several words.
    Word(String),
    /// One entry for each layer.
    List(Vec<Value>),
    /// The angles of a rotary embedding.
    Rotary(Rotary),
}

/// The values of names.
pub type Scope = BTreeMap<String, Value>;

impl Value {
    /// The number, a flag being 0 or 1.
    pub fn number(&self) -> Option<f64> {
        match self {
            Value::Number(number) => Some(*number),
            Value::Flag(flag) => Some(f64::from(u8::from(*flag))),
            Value::None | Value::Word(_) | Value::List(_) | Value::Rotary(_) => None,
        }
    }

    /// The number, where it is a whole one from 0 on.
    pub fn size(&self) -> Option<usize> {
        let number = self.number().filter(|n| n.fract() == 0.0 && (0.0..9e15).contains(n))?;
        Some(number as usize)
    }

    /// The word.
    pub(crate) fn word(&self) -> Option<&str> {
        if let Value::Word(word) = self { Some(word) } else { None }
    }

    /// The rotary embedding.
    pub fn rotary(&self) -> Option<&Rotary> {
        if let Value::Rotary(rotary) = self { Some(rotary) } else { None }
    }

    fn flag(&self) -> Result<bool, String> {
        let Value::Flag(flag) = self else {
            return Err(format!("{self} is neither true nor false"));
        };
        Ok(*flag)
    }

    fn operand(&self) -> Result<f64, String> {
        self.number().ok_or_else(|| format!("{self} is no number"))
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::None => write!(f, "none"),
            Value::Flag(flag) => write!(f, "{flag}"),
            Value::Number(number) => write!(f, "{number}"),
            Value::Word(word) => write!(f, "`{word}`"),
            Value::List(items) => {
                let items: Vec<String> = items.iter().map(Value::to_string).collect();
                write!(f, "[{}]", items.join(", "))
            }
            Value::Rotary(rotary) => write!(f, "{rotary}"),
        }
    }
}

/// An expression.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Expr {
    /// A constant.
    Value(Value),
    /// A name.
    Name(String),
    /// An entry of a list.
    Entry(String, Box<Expr>),
    /// A function of arguments.
    Call(String, Vec<Expr>),
    /// An operator between two operands.
    Binary(&'static str, Box<Expr>, Box<Expr>),
    /// The opposite of a flag.
    Not(Box<Expr>),
    /// One of two values.
    If(Box<[Expr; 3]>),
}

impl Expr {
    /// Reads an expression.
    pub(crate) fn parse(text: &str) -> Result<Expr, String> {
        let mut parser = Parser { tokens: lex(text)?, at: 0 };
        let expr = parser.expr()?;
        match parser.tokens.get(parser.at) {
            None => Ok(expr),
            Some(token) => Err(format!("`{token}` is not expected in `{text}`")),
        }
    }

    /// The value where names stand for those of the scope.
    pub(crate) fn eval(&self, scope: &Scope) -> Result<Value, String> {
        match self {
            Expr::Value(value) => Ok(value.clone()),
            Expr::Name(name) => find(scope, name).cloned(),
            Expr::Entry(name, at) => {
                let at = at.eval(scope)?.size().ok_or("an index that is no whole number")?;
                let list = find(scope, name)?;
                let Value::List(items) = list else {
                    return Err(format!("`{name}` is {list}, no list"));
                };
                items.get(at).cloned().ok_or_else(|| format!("`{name}` has no entry {at}"))
            }
            Expr::Call(name, arguments) => {
                let arguments: Vec<Value> =
                    arguments.iter().map(|a| a.eval(scope)).collect::<Result<_, _>>()?;
                call(name, &arguments)
            }
            Expr::Binary(op, a, b) => binary(op, a.eval(scope)?, || b.eval(scope)),
            Expr::Not(operand) => Ok(Value::Flag(!operand.eval(scope)?.flag()?)),
            Expr::If(parts) => {
                let [condition, yes, no] = &**parts;
                if condition.eval(scope)?.flag()? { yes.eval(scope) } else { no.eval(scope) }
            }
        }
    }

    /// Whether the condition holds.
    pub(crate) fn holds(&self, scope: &Scope) -> Result<bool, String> {
        self.eval(scope)?.flag()
    }

    /// The word that the expression is.
    pub(crate) fn as_word(&self) -> Option<&str> {
        if let Expr::Value(value) = self { value.word() } else { None }
    }

    /// `a` and `b` of an expression `a / b` between two names.
    pub(crate) fn as_quotient(&self) -> Option<[&str; 2]> {
        let Expr::Binary("/", a, b) = self else { return None };
        match (&**a, &**b) {
            (Expr::Name(a), Expr::Name(b)) => Some([a, b]),
            _ => None,
        }
    }
}

fn find<'s>(scope: &'s Scope, name: &str) -> Result<&'s Value, String> {
    scope.get(name).ok_or_else(|| format!("nothing is called `{name}`"))
}

fn call(name: &str, arguments: &[Value]) -> Result<Value, String> {
    let number = |at: usize| arguments.get(at).ok_or("an argument is missing")?.operand();
    Ok(Value::Number(match name {
        "sqrt" => number(0)?.sqrt(),
        "ln" => number(0)?.ln(),
        "floor" => number(0)?.floor(),
        "min" => number(0)?.min(number(1)?),
        "max" => number(0)?.max(number(1)?),
        "score_gain" => {
            let rotary = arguments.first().and_then(Value::rotary);
            rotary.ok_or("it is no rotary embedding")?.score_gain
        }
        _ => return Err(format!("there is no function `{name}`")),
    }))
}

fn binary(op: &str, a: Value, b: impl FnOnce() -> Result<Value, String>) -> Result<Value, String> {
    if op == "and" || op == "or" {
        let first = a.flag()?;
        return Ok(Value::Flag(if first == (op == "or") { first } else { b()?.flag()? }));
    }
    let b = b()?;
    if op == "==" || op == "!=" {
        return Ok(Value::Flag((a == b) == (op == "==")));
    }
    let (a, b) = (a.operand()?, b.operand()?);
    Ok(match op {
        "+" => Value::Number(a + b),
        "-" => Value::Number(a - b),
        "*" => Value::Number(a * b),
        "/" => Value::Number(a / b),
        "%" => Value::Number(a % b),
        "^" => Value::Number(a.powf(b)),
        "<" => Value::Flag(a < b),
        "<=" => Value::Flag(a <= b),
        ">" => Value::Flag(a > b),
        _ => Value::Flag(a >= b),
    })
}

#[derive(Clone, Debug, PartialEq)]
enum Token {
    Number(f64),
    Text(String),
    Name(String),
    Mark(&'static str),
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Token::Number(number) => write!(f, "{number}"),
            Token::Text(text) => write!(f, "\"{text}\""),
            Token::Name(name) => write!(f, "{name}"),
            Token::Mark(mark) => write!(f, "{mark}"),
        }
    }
}

/// Longer marks come first.
const MARKS: [&str; 18] =
    ["==", "!=", "<=", ">=", "<", ">", "+", "-", "*", "/", "%", "^", "(", ")", "[", "]", ",", ":"];

fn lex(text: &str) -> Result<Vec<Token>, String> {
    let mut tokens = Vec::new();
    let mut rest = text.trim_start();
    while let Some(first) = rest.chars().next() {
        let len_while = |is: &dyn Fn(char) -> bool| rest.find(|c| !is(c)).unwrap_or(rest.len());
        let len = if first.is_ascii_digit() {
            let len = len_while(&|c| c.is_ascii_alphanumeric() || c == '.');
            // The sign of an exponent.
            let len = match rest[..len].ends_with('e') && rest[len..].starts_with('-') {
                true => {
                    let digits = &rest[len + 1..];
                    let end = digits.find(|c: char| !c.is_ascii_digit());
                    len + 1 + end.unwrap_or(digits.len())
                }
                false => len,
            };
            let number = rest[..len].parse();
            tokens.push(Token::Number(number.map_err(|_| format!("no number in `{rest}`"))?));
            len
        } else if first == '"' {
            let end = rest[1..].find('"').ok_or("a text that does not end")?;
            tokens.push(Token::Text(rest[1..=end].to_owned()));
            end + 2
        } else if first.is_ascii_alphabetic() || first == '_' {
            let len = len_while(&|c| c.is_ascii_alphanumeric() || c == '_');
            tokens.push(Token::Name(rest[..len].to_owned()));
            len
        } else {
            let mark = MARKS.into_iter().find(|mark| rest.starts_with(mark));
            let mark = mark.ok_or_else(|| format!("`{first}` means nothing in `{text}`"))?;
            tokens.push(Token::Mark(mark));
            mark.len()
        };
        rest = rest[len..].trim_start();
    }
    Ok(tokens)
}

struct Parser {
    tokens: Vec<Token>,
    at: usize,
}

impl Parser {
    fn eat_mark(&mut self, marks: &[&'static str]) -> Option<&'static str> {
        let Some(Token::Mark(mark)) = self.tokens.get(self.at) else { return None };
        let found = marks.iter().find(|m| *m == mark)?;
        self.at += 1;
        Some(found)
    }

    fn eat_word(&mut self, word: &str) -> bool {
        let found = matches!(self.tokens.get(self.at), Some(Token::Name(name)) if name == word);
        self.at += usize::from(found);
        found
    }

    fn need(&mut self, mark: &'static str) -> Result<(), String> {
        self.eat_mark(&[mark]).map(|_| ()).ok_or_else(|| format!("`{mark}` is missing"))
    }

    fn expr(&mut self) -> Result<Expr, String> {
        if !self.eat_word("if") {
            return self.or();
        }
        let condition = self.expr()?;
        let words = (self.eat_word("then"), self.expr()?, self.eat_word("else"));
        let (true, yes, true) = words else { return Err("`if` without `then` and `else`".into()) };
        Ok(Expr::If(Box::new([condition, yes, self.expr()?])))
    }

    fn or(&mut self) -> Result<Expr, String> {
        let mut left = self.and()?;
        while self.eat_word("or") {
            left = Expr::Binary("or", Box::new(left), Box::new(self.and()?));
        }
        Ok(left)
    }

    fn and(&mut self) -> Result<Expr, String> {
        let mut left = self.not()?;
        while self.eat_word("and") {
            left = Expr::Binary("and", Box::new(left), Box::new(self.not()?));
        }
        Ok(left)
    }

    fn not(&mut self) -> Result<Expr, String> {
        if self.eat_word("not") {
            return Ok(Expr::Not(Box::new(self.not()?)));
        }
        let left = self.sum()?;
        match self.eat_mark(&["==", "!=", "<=", ">=", "<", ">"]) {
            Some(op) => Ok(Expr::Binary(op, Box::new(left), Box::new(self.sum()?))),
            None => Ok(left),
        }
    }

    fn sum(&mut self) -> Result<Expr, String> {
        let mut left = self.product()?;
        while let Some(op) = self.eat_mark(&["+", "-"]) {
            left = Expr::Binary(op, Box::new(left), Box::new(self.product()?));
        }
        Ok(left)
    }

    fn product(&mut self) -> Result<Expr, String> {
        let mut left = self.power()?;
        while let Some(op) = self.eat_mark(&["*", "/", "%"]) {
            left = Expr::Binary(op, Box::new(left), Box::new(self.power()?));
        }
        Ok(left)
    }

    fn power(&mut self) -> Result<Expr, String> {
        let base = self.unary()?;
        match self.eat_mark(&["^"]) {
            Some(op) => Ok(Expr::Binary(op, Box::new(base), Box::new(self.power()?))),
            None => Ok(base),
        }
    }

    fn unary(&mut self) -> Result<Expr, String> {
        if self.eat_mark(&["-"]).is_some() {
            let zero = Expr::Value(Value::Number(0.0));
            return Ok(Expr::Binary("-", Box::new(zero), Box::new(self.unary()?)));
        }
        self.atom()
    }

    fn atom(&mut self) -> Result<Expr, String> {
        if self.eat_mark(&["("]).is_some() {
            let inner = self.expr()?;
            self.need(")")?;
            return Ok(inner);
        }
        let token = self.tokens.get(self.at).cloned().ok_or("an operand is missing")?;
        self.at += 1;
        let name = match token {
            Token::Number(number) => return Ok(Expr::Value(Value::Number(number))),
            Token::Text(text) => return Ok(Expr::Value(Value::Word(text))),
            Token::Mark(mark) => return Err(format!("`{mark}` is no operand")),
            Token::Name(name) => name,
        };
        match name.as_str() {
            "true" | "false" => return Ok(Expr::Value(Value::Flag(name == "true"))),
            "none" => return Ok(Expr::Value(Value::None)),
            _ => {}
        }
        if self.eat_mark(&["["]).is_some() {
            let at = self.expr()?;
            self.need("]")?;
            return Ok(Expr::Entry(name, Box::new(at)));
        }
        if self.eat_mark(&["("]).is_none() {
            return Ok(Expr::Name(name));
        }
        let mut arguments = vec![self.expr()?];
        while self.eat_mark(&[","]).is_some() {
            arguments.push(self.expr()?);
        }
        self.need(")")?;
        Ok(Expr::Call(name, arguments))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_have_the_usual_precedence() {
        let kinds = Value::List(vec![Value::Word("full".into()), Value::Word("sliding".into())]);
        let scope = Scope::from([
            ("M".into(), Value::Number(64.0)),
            ("H".into(), Value::Number(4.0)),
            ("tied".into(), Value::Flag(true)),
            ("window".into(), Value::None),
            ("kinds".into(), kinds),
        ]);
        let number = |text: &str| Expr::parse(text).unwrap().eval(&scope).unwrap().number();
        assert_eq!(number("1 + 2 * 3 ^ 2 ^ 0 - 8 / 4"), Some(5.0));
        assert_eq!(number("-M / H + 1e-1"), Some(-15.9));
        assert_eq!(number("1/sqrt(M/H)"), Some(0.25));
        assert_eq!(number("if not tied or M % 3 == 1 and H < 5 then 7 else 8"), Some(7.0));
        assert_eq!(number("if kinds[H - 3] == \"sliding\" then 1 else 0"), Some(1.0));
        assert_eq!(number("if window == none then max(M, H) else window"), Some(64.0));
        let wrong = |text: &str| Expr::parse(text).and_then(|e| e.eval(&scope)).unwrap_err();
        assert_eq!(wrong("window + 1"), "none is no number");
        assert_eq!(wrong("modle"), "nothing is called `modle`");
        assert_eq!(wrong("kinds[2] == 1"), "`kinds` has no entry 2");
        assert_eq!(wrong("M M"), "`M` is not expected in `M M`");
        assert_eq!(wrong("(M"), "`)` is missing");
    }
}
