//! Training data: files to one sequence of tokens, and the batches of each step.

mod batches;
mod prefetch;
mod pretokenized;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ir::{Diagnostic, Span};

pub use batches::{Batch, Batches};
pub use prefetch::Prefetch;

use crate::error::{Error, Failure};
use crate::map::Map;
use crate::tokens::Tokenizer;

/// One token in this many, at the end of the data, is for validation.
const VALIDATION_SHARE: usize = 10;

/// Data as tokens.
#[derive(Clone, Debug)]
pub struct Corpus {
    tokens: Arc<[u32]>,
    /// The first tokens of documents, as files and the lists in them say: ascending, from 0 on.
    firsts: Vec<usize>,
    /// The first tokens of the documents that are kept apart.
    apart: Option<Arc<[usize]>>,
    files: usize,
    hash: blake3::Hash,
}

impl Corpus {
    /// Reads the files that `--data` arguments name, and turns them into tokens.
    ///
    /// An argument is a file, a directory (with all below it, hidden files left out) or a glob
    /// pattern. Files are read in the order of the bytes of their paths, each once, and simply
    /// follow each other. Files of tokens (`.bin` of llm.c, `.bin` with `.idx` of Megatron) are
    /// taken as they are. A file is a document, but for those of Megatron, which list theirs.
    ///
    /// **Errors.** E4030 for an argument without files, E4031 if there are no tokens at all,
    /// E4033 and E4034 for files of tokens; those of [`Tokenizer::encode`].
    pub fn load<P: AsRef<Path>>(arguments: &[P], tokenizer: &Tokenizer) -> Result<Corpus, Failure> {
        let paths = expand(arguments)?;
        let (mut tokens, mut firsts) = (Vec::new(), Vec::new());
        for path in &paths {
            let map = Map::open(path)?;
            firsts.push(tokens.len());
            match pretokenized::read(path, &map, tokenizer.vocabulary())? {
                Some(ready) => {
                    firsts.extend(ready.documents.iter().map(|first| tokens.len() + first));
                    tokens.extend(ready.tokens);
                }
                None => tokens.extend(tokenizer.encode(&map, &path.display().to_string())?),
            }
        }
        if tokens.is_empty() {
            let headline = format!("{} files, and no tokens in them", paths.len());
            let shown = arguments.iter().map(|path| path.as_ref().display().to_string());
            let at = Span::of(shown.collect::<Vec<_>>().join(" "));
            return Err(Diagnostic::error("E4031", at, headline).into());
        }
        // An empty file or document is none.
        firsts.dedup();
        firsts.retain(|first| *first < tokens.len());
        Ok(Corpus { firsts, ..Corpus::new(tokens, &tokenizer.identity(), paths.len()) })
    }

    /// Tokens that are already in memory; `identity` is that of their tokeniser.
    pub fn new(tokens: Vec<u32>, identity: &str, files: usize) -> Corpus {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&(identity.len() as u64).to_le_bytes());
        hasher.update(identity.as_bytes());
        for chunk in tokens.chunks(1 << 14) {
            let bytes: Vec<u8> = chunk.iter().flat_map(|token| token.to_le_bytes()).collect();
            hasher.update(&bytes);
        }
        let firsts = Vec::from_iter((!tokens.is_empty()).then_some(0));
        Corpus { tokens: tokens.into(), firsts, apart: None, files, hash: hasher.finalize() }
    }

    /// The same with documents kept apart. They end where files and the lists in them say and,
    /// where there is such a token, after each `end`, which belongs to the document that it ends.
    pub fn with_documents_apart(self, end: Option<u32>) -> Corpus {
        let mut apart = self.firsts.clone();
        let ends = self.tokens.iter().enumerate().filter(|(_, token)| Some(**token) == end);
        apart.extend(ends.map(|(at, _)| at + 1).filter(|first| *first < self.tokens.len()));
        apart.sort_unstable();
        apart.dedup();
        let mut hasher = blake3::Hasher::new();
        hasher.update(self.hash.as_bytes());
        apart.iter().for_each(|first| _ = hasher.update(&(*first as u64).to_le_bytes()));
        Corpus { apart: Some(apart.into()), hash: hasher.finalize(), ..self }
    }

    /// The number of documents that are kept apart; none where they are not.
    pub fn documents(&self) -> Option<usize> {
        self.apart.as_ref().map(|firsts| firsts.len())
    }

    /// All tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The number of files they are from.
    pub fn files(&self) -> usize {
        self.files
    }

    /// Tokens that are trained on: the first of them.
    pub fn training_tokens(&self) -> usize {
        self.tokens.len() - self.validation_tokens()
    }

    /// Tokens that are kept for validation: the last tenth.
    pub fn validation_tokens(&self) -> usize {
        self.tokens.len() / VALIDATION_SHARE
    }

    /// The hash of the tokens, their tokeniser and the documents that are kept apart, in
    /// hexadecimal: equal data, equal hash.
    pub fn hash(&self) -> String {
        self.hash.to_hex().to_string()
    }

    /// The batches of a run. `global_batch` samples of `seq` tokens make one step.
    ///
    /// **Errors.** E4032 if there are too few tokens for one step.
    pub fn batches(
        &self,
        seed: u64,
        seq: usize,
        global_batch: usize,
    ) -> Result<Batches, Diagnostic> {
        Batches::new(self, seed, seq, global_batch)
    }
}

/// The files that arguments name: each once, ordered by the bytes of their paths.
///
/// **Errors.** E4030, one for each argument without files.
pub fn expand<P: AsRef<Path>>(arguments: &[P]) -> Result<Vec<PathBuf>, Failure> {
    let mut paths = Vec::new();
    let mut diagnostics = Vec::new();
    for argument in arguments {
        let argument = argument.as_ref();
        match matches(argument) {
            Ok(found) if found.is_empty() => diagnostics.push(no_files(argument)),
            Ok(found) => paths.extend(found),
            Err(Failure::Input(found)) => diagnostics.extend(found),
            Err(Failure::World(error)) => return Err(error.into()),
        }
    }
    if !diagnostics.is_empty() {
        return Err(diagnostics.into());
    }
    paths.sort_by(|a, b| a.as_os_str().as_bytes().cmp(b.as_os_str().as_bytes()));
    let mut seen = BTreeSet::new();
    let mut files = Vec::new();
    for path in paths {
        let file = path.canonicalize().map_err(Error::io("resolve", &path))?;
        if seen.insert(file) {
            files.push(path);
        }
    }
    Ok(files)
}

fn no_files(argument: &Path) -> Diagnostic {
    let is_dir = argument.is_dir();
    let argument = argument.display().to_string();
    let headline = if is_dir { "no files in this directory" } else { "no files match" };
    let help = "name a text file, a directory, or a pattern in quotes: 'docs/**/*.md'";
    let diagnostic = Diagnostic::error("E4030", Span::of(argument.as_str()), headline).help(help);
    if argument.contains(['*', '?', '[']) {
        return diagnostic.note("`*` stays within one directory, `**` goes through all below");
    }
    diagnostic
}

/// The files that one argument names, in no order. A pattern is text.
fn matches(argument: &Path) -> Result<Vec<PathBuf>, Failure> {
    let mut files = Vec::new();
    if argument.exists() {
        collect(argument, &mut files)?;
        return Ok(files);
    }
    let Some(argument) = argument.to_str() else { return Ok(files) };
    let found = glob::glob(argument).map_err(|error| {
        let headline = format!("not a pattern of file names: {error}");
        Diagnostic::error("E4030", Span::of(argument), headline)
    })?;
    for path in found {
        let path = path.map_err(|error| Error::Io {
            call: "read the directory",
            path: error.path().to_owned(),
            source: error.into(),
        })?;
        collect(&path, &mut files)?;
    }
    Ok(files)
}

/// Adds a file, or all files below a directory but hidden ones and links to directories.
fn collect(path: &Path, files: &mut Vec<PathBuf>) -> Result<(), Error> {
    if !path.is_dir() {
        if !pretokenized::is_index(path) {
            files.push(path.to_owned());
        }
        return Ok(());
    }
    for entry in std::fs::read_dir(path).map_err(Error::io("read the directory", path))? {
        let entry = entry.map_err(Error::io("read the directory", path))?;
        let inside = entry.path();
        let hidden = entry.file_name().as_bytes().starts_with(b".");
        let links_away = inside.is_symlink() && inside.is_dir();
        if !hidden && !links_away {
            collect(&inside, files)?;
        }
    }
    Ok(())
}
