//! Text to tokens and back.

use std::path::{Path, PathBuf};

use ir::{Diagnostic, Span};

use crate::error::{Error, Failure};
use crate::map::Map;

/// The name of a tokeniser's file beside a model.
pub const FILE: &str = "tokenizer.json";
/// How many times the tokens of its tokeniser a model has at most, and how many more: vocabularies
/// are padded to a multiple, and some have room to grow. Chosen: published models have 1.02 times.
const PADDED_MAX: f64 = 1.05;
const PADDED_TO: f64 = 256.0;
/// Tokens of the tokeniser that takes bytes.
const BYTES: usize = 256;

/// Turns text into the tokens of a model.
pub struct Tokenizer {
    kind: Kind,
    vocabulary: usize,
}

enum Kind {
    /// A token is a byte.
    Bytes,
    /// A Hugging Face tokeniser.
    File { path: PathBuf, hash: blake3::Hash, tokenizer: Box<tokenizers::Tokenizer> },
}

impl Tokenizer {
    /// Chooses the tokeniser: `file` if given, else `tokenizer.json` beside the model, else bytes.
    ///
    /// `model` is the model's directory or a file in it; `vocabulary` the number of its tokens.
    /// **Errors.** E4001 if `file` is missing; E4020 if it is no tokeniser; E4021 if only bytes
    /// are left and the model has fewer than 256 tokens.
    pub fn choose(
        file: Option<&Path>,
        model: Option<&Path>,
        vocabulary: usize,
    ) -> Result<Tokenizer, Failure> {
        if let Some(file) = file {
            return Tokenizer::open(file, vocabulary);
        }
        if let Some(model) = model {
            let folder = if model.is_dir() { Some(model) } else { model.parent() };
            let beside = folder.map(|folder| folder.join(FILE)).filter(|path| path.exists());
            if let Some(beside) = beside {
                return Tokenizer::open(&beside, vocabulary);
            }
        }
        Ok(Tokenizer::bytes(vocabulary)?)
    }

    /// The tokeniser whose tokens are bytes.
    ///
    /// **Errors.** E4021.
    pub fn bytes(vocabulary: usize) -> Result<Tokenizer, Diagnostic> {
        if vocabulary >= BYTES {
            return Ok(Tokenizer { kind: Kind::Bytes, vocabulary });
        }
        let headline = format!("the model has {vocabulary} tokens, too few for {BYTES} bytes");
        Err(Diagnostic::error("E4021", Span::of("--tokenizer"), headline)
            .note(format!("there is no `{FILE}` beside the model, so a token would be a byte"))
            .help("name the model's tokeniser with --tokenizer FILE"))
    }

    fn open(path: &Path, vocabulary: usize) -> Result<Tokenizer, Failure> {
        let map = Map::open(path)?;
        let mut tokenizer = read(&map)?.map_err(|error| {
            let headline = format!("not a tokeniser: {error}");
            Diagnostic::error("E4020", at(path), headline)
                .help(format!("give the `{FILE}` of a Hugging Face model"))
        })?;
        tokenizer.with_padding(None);
        if let Err(error) = tokenizer.with_truncation(None) {
            let headline = format!("can't use this tokeniser: {error}");
            return Err(Diagnostic::error("E4020", at(path), headline).into());
        }
        let hash = blake3::hash(&map);
        let kind = Kind::File { path: path.to_owned(), hash, tokenizer: Box::new(tokenizer) };
        Ok(Tokenizer { kind, vocabulary })
    }

    /// What speaks for another model's tokeniser: more tokens than the model has, or far fewer. A
    /// few more are those of other inputs, as Gemma 3's is of images, and a model's vocabulary is
    /// often padded.
    pub fn doubt(&self) -> Option<Diagnostic> {
        let Kind::File { path, tokenizer, .. } = &self.kind else { return None };
        let (own, model) = (tokenizer.get_vocab_size(true), self.vocabulary);
        let is_padded = own <= model && model as f64 <= PADDED_MAX * own as f64 + PADDED_TO;
        let headline = format!("the tokeniser has {own} tokens, and the model {model}");
        let warning = Diagnostic::warning("W4024", at(path), headline);
        (!is_padded).then(|| warning.help("check that the tokeniser belongs to the model"))
    }

    /// The same where the model was trained with a tokeniser of this identity.
    pub fn doubt_of_other(&self, trained_with: &str) -> Option<Diagnostic> {
        if self.identity() == trained_with {
            return None;
        }
        let headline =
            format!("the model was trained with another tokeniser than `{}`", self.name());
        let warning = Diagnostic::warning("W4024", Span::of("--tokenizer"), headline);
        Some(warning.help("leave `--tokenizer` out: the run has its own"))
    }

    /// Whether a token is a byte, which the user should be told.
    pub fn is_bytes(&self) -> bool {
        self.file().is_none()
    }

    /// The file that says what the tokens are; none where they are bytes.
    pub fn file(&self) -> Option<&Path> {
        match &self.kind {
            Kind::Bytes => None,
            Kind::File { path, .. } => Some(path),
        }
    }

    /// What tells tokenisers apart: `bytes`, or the hash of the file.
    pub fn identity(&self) -> String {
        match &self.kind {
            Kind::Bytes => "bytes".to_owned(),
            Kind::File { hash, .. } => hash.to_hex().to_string(),
        }
    }

    /// The file, or `bytes`.
    pub fn name(&self) -> String {
        self.file().map_or("bytes".to_owned(), |path| path.display().to_string())
    }

    /// The number of the model's tokens.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// The token of this exact text, for example `</s>`; none among bytes.
    pub fn token(&self, text: &str) -> Option<u32> {
        match &self.kind {
            Kind::Bytes => None,
            Kind::File { tokenizer, .. } => tokenizer.token_to_id(text),
        }
    }

    /// The tokens of a text; `source` is its name. No special tokens are added.
    ///
    /// **Cost.** Some 50 bytes per token meanwhile, besides the result.
    /// **Errors.** E4022 if it holds a zero byte, or isn't UTF-8 and the tokeniser needs text;
    /// E4023 if a token is not one of the model's.
    pub fn encode(&self, text: &[u8], source: &str) -> Result<Vec<u32>, Diagnostic> {
        // What git and grep go by, too: no encoding of text but UTF-16 and UTF-32 has zero bytes.
        if let Some(at) = text.iter().position(|byte| *byte == 0) {
            let headline = format!("not text: byte {at} is zero");
            return Err(Diagnostic::error("E4022", Span::of(source), headline)
                .help("leave the file out, or convert it to UTF-8"));
        }
        let Kind::File { path, tokenizer, .. } = &self.kind else {
            return Ok(text.iter().map(|&byte| byte.into()).collect());
        };
        let text = std::str::from_utf8(text).map_err(|error| {
            let headline = format!("not UTF-8 text: byte {} is not", error.valid_up_to());
            Diagnostic::error("E4022", Span::of(source), headline)
                .note(format!("the tokeniser `{}` takes text", path.display()))
                .help("convert the file to UTF-8, or leave it out")
        })?;
        let encoding = tokenizer.encode_fast(text, false).map_err(|error| {
            let headline = format!("the tokeniser can't encode this text: {error}");
            Diagnostic::error("E4020", at(path), headline).note(format!("the text is `{source}`"))
        })?;
        let tokens = encoding.get_ids().to_vec();
        if let Some(&beyond) = tokens.iter().find(|&&token| token as usize >= self.vocabulary) {
            let headline =
                format!("the tokeniser makes token {beyond}; the model has {}", self.vocabulary);
            return Err(Diagnostic::error("E4023", at(path), headline)
                .help("use the tokeniser that belongs to the model"));
        }
        Ok(tokens)
    }

    /// The text of some tokens. What isn't UTF-8 becomes U+FFFD.
    pub fn decode(&self, tokens: &[u32]) -> String {
        let mut decoder = self.decoder();
        let text: String = tokens.iter().map(|&token| decoder.push(token)).collect();
        text + &decoder.finish()
    }

    /// Decodes tokens one by one.
    pub fn decoder(&self) -> Decoder<'_> {
        Decoder { tokenizer: self, pending: Vec::new(), seen: 0 }
    }

    /// The text of a few tokens.
    fn text(&self, tokens: &[u32]) -> String {
        match &self.kind {
            Kind::Bytes => {
                let byte = |&token: &u32| u8::try_from(token).unwrap_or(b'?');
                let bytes: Vec<u8> = tokens.iter().map(byte).collect();
                String::from_utf8_lossy(&bytes).into_owned()
            }
            Kind::File { tokenizer, .. } => {
                tokenizer.decode(tokens, true).unwrap_or_else(|_| '\u{fffd}'.to_string())
            }
        }
    }
}

fn at(path: &Path) -> Span {
    Span::of(path.display().to_string())
}

/// Decodes a stream of tokens; text comes out as soon as it can't change any more.
///
/// A character may take several tokens, and a token's text may depend on the one before it (a
/// leading space). So a few tokens are decoded again with the next one: those of the last piece
/// that came out, and those after it.
pub struct Decoder<'a> {
    tokenizer: &'a Tokenizer,
    /// The tokens of the last piece, then those that are not out yet.
    pending: Vec<u32>,
    /// How many of `pending` are out.
    seen: usize,
}

/// Tokens after which text comes out although it ends in U+FFFD: no character is longer.
const PENDING_MAX: usize = 8;

impl Decoder<'_> {
    /// Takes a token, and returns the text that is now certain; perhaps none.
    pub fn push(&mut self, token: u32) -> String {
        self.pending.push(token);
        let before = self.tokenizer.text(&self.pending[..self.seen]);
        let after = self.tokenizer.text(&self.pending);
        let may_change = after.ends_with('\u{fffd}') || after.len() <= before.len();
        if may_change && self.pending.len() - self.seen < PENDING_MAX {
            return String::new();
        }
        let text = after.get(before.len()..).unwrap_or("").to_owned();
        self.pending.drain(..self.seen);
        self.seen = self.pending.len();
        text
    }

    /// The text of the tokens that are not out yet.
    pub fn finish(self) -> String {
        let before = self.tokenizer.text(&self.pending[..self.seen]);
        let after = self.tokenizer.text(&self.pending);
        after.get(before.len()..).unwrap_or("").to_owned()
    }
}

/// The name of the thread that reads a tokeniser. A panic of it is no defect of ours.
pub const READER: &str = "tokeniser";

/// Reads a tokeniser, on a thread of its own: the library panics on parts that it does not expect.
///
/// # Errors
/// The system starts no thread.
fn read(bytes: &[u8]) -> Result<Result<tokenizers::Tokenizer, String>, Error> {
    std::thread::scope(|scope| {
        let body = || tokenizers::Tokenizer::from_bytes(bytes).map_err(|error| error.to_string());
        let reader = std::thread::Builder::new().name(READER.to_owned());
        let refused = |source| Error::Threads { whom: format!("the {READER}"), source };
        let read = reader.spawn_scoped(scope, body).map_err(refused)?.join();
        Ok(read.unwrap_or_else(|_| Err("one of its parts is damaged".to_owned())))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    /// A byte-level BPE with seven tokens.
    const SMALL: &str = r#"{"version":"1.0","truncation":null,"padding":null,
        "added_tokens":[],"normalizer":null,"post_processor":null,
        "pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,
        "use_regex":true},
        "decoder":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,
        "use_regex":true},
        "model":{"type":"BPE","dropout":null,"unk_token":null,"fuse_unk":false,
        "continuing_subword_prefix":null,"end_of_word_suffix":null,
        "vocab":{"a":0,"b":1,"Ã":2,"©":3,"ab":4,"Ġ":5,"Ġab":6},"merges":["a b","Ġ ab"]}}"#;

    fn code<T>(result: Result<T, Failure>) -> &'static str {
        match result {
            Err(Failure::Input(diagnostics)) => diagnostics[0].code,
            Ok(_) | Err(Failure::World(_)) => "",
        }
    }

    #[test]
    fn the_file_beside_the_model_is_found_else_bytes_are_taken() {
        let scratch = Scratch::new("tokens");
        let choose = |file: Option<&str>, vocabulary| {
            let file = file.map(|name| scratch.join(name));
            Tokenizer::choose(file.as_deref(), Some(scratch.path()), vocabulary)
        };
        assert!(choose(None, 256).unwrap().is_bytes());
        assert_eq!(code(choose(None, 255)), "E4021");
        std::fs::write(scratch.join(FILE), SMALL).unwrap();
        let tokenizer = choose(None, 7).unwrap();
        assert!(!tokenizer.is_bytes());
        assert_eq!(tokenizer.encode("ab aé".as_bytes(), "text").unwrap(), [4, 5, 0, 2, 3]);
        assert_eq!(tokenizer.encode(b"ab\xff", "text").unwrap_err().code, "E4022");
        assert_eq!(choose(None, 5).unwrap().encode(b"ab ab", "text").unwrap_err().code, "E4023");
        // Of a few tokens more or many, that are padding or another model's.
        let doubt = |vocabulary| choose(None, vocabulary).unwrap().doubt().map(|one| one.code);
        for (vocabulary, expected) in
            [(5, Some("W4024")), (7, None), (256, None), (300, Some("W4024"))]
        {
            assert_eq!(doubt(vocabulary), expected, "{vocabulary}");
        }
        assert!(tokenizer.doubt_of_other(&tokenizer.identity()).is_none());
        assert!(tokenizer.doubt_of_other("bytes").is_some());
        assert_eq!(code(choose(Some("none.json"), 7)), "E4001");
        std::fs::write(scratch.join("bad.json"), "{}").unwrap();
        assert_eq!(code(choose(Some("bad.json"), 7)), "E4020");
        // Parts that the library panics on.
        let decoder = SMALL.find("\"decoder\":").unwrap();
        for damaged in [
            SMALL[..decoder + 20].to_owned(),
            SMALL.replace("\"decoder\":{\"type\":\"ByteLevel\"", "\"decoder\":{\"type\":5"),
        ] {
            std::fs::write(scratch.join("bad.json"), damaged).unwrap();
            assert_eq!(code(choose(Some("bad.json"), 7)), "E4020");
        }
    }

    #[test]
    fn a_stream_holds_characters_back_until_they_are_whole() {
        let scratch = Scratch::new("stream");
        std::fs::write(scratch.join(FILE), SMALL).unwrap();
        let tokenizer = Tokenizer::choose(None, Some(scratch.path()), 7).unwrap();
        let mut decoder = tokenizer.decoder();
        let pieces: Vec<String> = [4, 2, 3, 6, 2].iter().map(|&t| decoder.push(t)).collect();
        assert_eq!(pieces, ["ab", "", "é", " ab", ""]);
        assert_eq!(decoder.finish(), "\u{fffd}");
        assert_eq!(tokenizer.decode(&[4, 2, 3, 6]), "abé ab");

        let bytes = Tokenizer::bytes(300).unwrap();
        let text = "naïve → 😀 ok";
        let tokens = bytes.encode(text.as_bytes(), "").unwrap();
        assert_eq!(bytes.decode(&tokens), text);
        assert_eq!(bytes.encode(b"a\0b", "").unwrap_err().code, "E4022");
        assert_eq!(bytes.encode(b"na\xefve", "").map(|tokens| tokens.len()), Ok(5));
        assert_eq!(bytes.decode(&[0xff, 0x61, 299]), "\u{fffd}a?");
    }
}
