//! Tokens of the text form.

use std::ops::Range;

/// A kind of token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Token<'t> {
    /// A word: a keyword, an op, a symbol.
    Word(&'t str),
    /// A number.
    Number(f64),
    /// `%name`
    Value(&'t str),
    /// `@name`
    Function(&'t str),
    /// The index letters after `contract`.
    Einsum(&'t str),
    /// `->`
    Arrow,
    /// `..`
    Pack,
    /// One of `( ) { } [ ] , : = * + - /`
    Mark(char),
    /// The end of a line.
    Newline,
    /// Something that is no token.
    Unknown(char),
}

/// A token and its bytes.
#[derive(Clone, Debug)]
pub(crate) struct Lexeme<'t> {
    /// What it is.
    pub(crate) token: Token<'t>,
    /// Where it stands.
    pub(crate) span: Range<usize>,
}

/// Cuts a text into tokens. Comments vanish.
pub(crate) fn lex(text: &str) -> Vec<Lexeme<'_>> {
    let mut lexemes: Vec<Lexeme<'_>> = Vec::new();
    let bytes = text.as_bytes();
    let mut at = 0;
    while at < bytes.len() {
        let start = at;
        let einsum_follows = matches!(
            lexemes.last(),
            Some(Lexeme { token: Token::Word("contract" | "scaled_contract"), .. })
        );
        let token = match bytes[at] {
            b' ' | b'\t' | b'\r' => {
                at += 1;
                continue;
            }
            b'#' => {
                at += text[at..].find('\n').unwrap_or(text.len() - at);
                continue;
            }
            b'\n' => {
                at += 1;
                Token::Newline
            }
            b'%' | b'@' => {
                at = word_end(bytes, at + 1);
                let name = &text[start + 1..at];
                if bytes[start] == b'%' { Token::Value(name) } else { Token::Function(name) }
            }
            b'-' if bytes.get(at + 1) == Some(&b'>') => {
                at += 2;
                Token::Arrow
            }
            b'.' if bytes.get(at + 1) == Some(&b'.') => {
                at += 2;
                Token::Pack
            }
            b if einsum_follows && (b.is_ascii_alphabetic() || b == b',') => {
                at += text[at..].find([' ', '\n']).unwrap_or(text.len() - at);
                Token::Einsum(&text[start..at])
            }
            b if b.is_ascii_digit() => number(text, &mut at),
            b if b.is_ascii_alphabetic() || b == b'_' => {
                at = word_end(bytes, at);
                Token::Word(&text[start..at])
            }
            b if b"(){}[],:=*+-/".contains(&b) => {
                at += 1;
                Token::Mark(char::from(b))
            }
            _ => {
                let c = text[at..].chars().next().unwrap_or(' ');
                at += c.len_utf8();
                Token::Unknown(c)
            }
        };
        lexemes.push(Lexeme { token, span: start..at });
    }
    lexemes.push(Lexeme { token: Token::Newline, span: text.len()..text.len() });
    lexemes
}

fn word_end(bytes: &[u8], from: usize) -> usize {
    let word = |b: &u8| b.is_ascii_alphanumeric() || *b == b'_' || *b == b'.';
    from + bytes[from..].iter().take_while(|b| word(b)).count()
}

fn number<'t>(text: &'t str, at: &mut usize) -> Token<'t> {
    let bytes = text.as_bytes();
    let start = *at;
    while let Some(b) = bytes.get(*at) {
        let exponent_sign = matches!(b, b'+' | b'-') && matches!(bytes[*at - 1], b'e' | b'E');
        let dot = *b == b'.' && bytes.get(*at + 1).is_some_and(u8::is_ascii_digit);
        if !(b.is_ascii_digit() || dot || matches!(b, b'e' | b'E') || exponent_sign) {
            break;
        }
        *at += 1;
    }
    text[start..*at].parse().map_or(Token::Unknown('0'), Token::Number)
}
