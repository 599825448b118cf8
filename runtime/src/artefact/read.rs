//! Reading an artefact that anybody may have made.

use std::collections::BTreeMap;
use std::io::{Cursor, Read};
use std::path::Path;

use ir::text::{parse_module, parse_plan};
use ir::{Diagnostic, Span};
use kernels::bounds::verify_programs;
use kernels::cuda::{Arch, unit};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use zip::{CompressionMethod, ZipArchive};

use super::{
    Contents, FORMAT, KERNELS, Limits, MANIFEST, MEMBERS, MODULE, Manifest, PLAN, PROGRAMS, REPORT,
    VERSION, source_member,
};
use crate::error::Failure;
use crate::map::Map;

type Wrong = Vec<Diagnostic>;

/// Members, by their names.
type Parts = BTreeMap<String, Vec<u8>>;

/// Reads an artefact, on any machine.
///
/// **Errors.** E4001 if there is no such file, E4070 if it is no artefact, E4071 if it is of
/// another version, E4072 if it is damaged, E4073 if its parts contradict each other, E4075 if it
/// is larger than the limits; the codes of [`kernels::bounds`] if its programs are impossible.
pub fn read(path: &Path, limits: &Limits) -> Result<Contents, Failure> {
    let map = Map::open(path)?;
    Ok(decode(&path.display().to_string(), &map, limits)?)
}

/// Reads the bytes of an artefact; `source` names it in diagnostics.
///
/// # Errors
/// As [`read`], other than for the file.
pub fn decode(source: &str, bytes: &[u8], limits: &Limits) -> Result<Contents, Wrong> {
    let size = bytes.len() as u64;
    if size > limits.file_bytes {
        let limit = limits.file_bytes;
        let text = format!("the file has {size} bytes, and {limit} are believed to be an artefact");
        return Err(vec![Diagnostic::error("E4075", Span::of(source), text)]);
    }
    let file = Artefact { source };
    let parts = file.unpack(bytes)?;
    let manifest = file.manifest(&parts[MANIFEST])?;
    file.compare(&manifest, &parts)?;
    let text = |name: &str| {
        let damaged = || file.damaged(&format!("`{name}` is not text"));
        std::str::from_utf8(&parts[name]).map_err(|_| vec![damaged()])
    };
    let place = |name: &str| format!("{source}/{name}");
    let contents = Contents {
        module: parse_module(&place(MODULE), text(MODULE)?)?,
        plan: parse_plan(&place(PLAN), text(PLAN)?)?,
        programs: file.binary(PROGRAMS, &parts)?,
        kernels: file.binary(KERNELS, &parts)?,
        archs: file.archs(&parts),
        requirements: manifest.requirements,
        report: file.json(REPORT, &parts[REPORT])?,
    };
    file.agree(&contents)?;
    file.compare_sources(&contents, &parts)?;
    Ok(contents)
}

/// An artefact by the name of its file.
struct Artefact<'a> {
    source: &'a str,
}

impl Artefact<'_> {
    fn wrong(&self, code: &'static str, headline: &str) -> Diagnostic {
        Diagnostic::error(code, Span::of(self.source), headline)
    }

    fn no_artefact(&self, headline: &str) -> Diagnostic {
        self.wrong("E4070", headline).help("give a file that `gantline compile` wrote")
    }

    fn damaged(&self, headline: &str) -> Diagnostic {
        let help = "copy the file again, or compile it again";
        self.wrong("E4072", headline).help(help)
    }

    /// The members: those of every artefact and text of kernels, each stored as it is.
    fn unpack(&self, bytes: &[u8]) -> Result<Parts, Wrong> {
        if !bytes.starts_with(b"PK") {
            return Err(vec![self.no_artefact("the file is no artefact: it is no zip")]);
        }
        let zip = ZipArchive::new(Cursor::new(bytes));
        let mut zip = zip.map_err(|error| vec![self.damaged(&format!("the zip: {error}"))])?;
        let mut parts = BTreeMap::new();
        if zip.len() > MEMBERS.len() + Arch::ALL.len() {
            let text = format!("the zip has {} members; an artefact has fewer", zip.len());
            return Err(vec![self.no_artefact(&text)]);
        }
        for index in 0..zip.len() {
            let member = zip.by_index(index);
            let mut member = member.map_err(|error| {
                vec![self.damaged(&format!("member {index} of the zip: {error}"))]
            })?;
            let named = String::from_utf8_lossy(member.name_raw()).into_owned();
            let sources: Vec<String> = Arch::ALL.into_iter().map(source_member).collect();
            let known = MEMBERS.into_iter().chain(sources.iter().map(String::as_str));
            let name = known.into_iter().find(|name| *name == named).map(str::to_owned);
            let Some(name) = name.filter(|name| !parts.contains_key(name)) else {
                let text = format!("the zip has `{named}`, or has it twice");
                return Err(vec![self.no_artefact(&text)]);
            };
            let (size, packed) = (member.size(), member.compressed_size());
            let is_stored = member.compression() == CompressionMethod::Stored && size == packed;
            if !is_stored || member.encrypted() || size > bytes.len() as u64 {
                let text = format!("`{name}` says that it has {size} bytes, in {packed} bytes");
                return Err(vec![self.damaged(&text)]);
            }
            let mut content = Vec::with_capacity(size as usize);
            let copied = member.by_ref().take(size + 1).read_to_end(&mut content);
            match copied {
                Ok(read) if read as u64 == size => parts.insert(name, content),
                Ok(_) => return Err(vec![self.damaged(&format!("`{name}` is cut off"))]),
                Err(error) => {
                    return Err(vec![self.damaged(&format!("`{name}` is damaged: {error}"))]);
                }
            };
        }
        match MEMBERS.into_iter().find(|name| !parts.contains_key(*name)) {
            Some(name) => Err(vec![self.no_artefact(&format!("the zip has no `{name}`"))]),
            None => Ok(parts),
        }
    }

    /// The architectures for which there is text.
    fn archs(&self, parts: &Parts) -> Vec<Arch> {
        Arch::ALL.into_iter().filter(|arch| parts.contains_key(&source_member(*arch))).collect()
    }

    /// Whether text is that of the kernels: what a GPU runs is what programs say.
    fn compare_sources(&self, contents: &Contents, parts: &Parts) -> Result<(), Wrong> {
        let differs = |arch: &&Arch| {
            parts[&source_member(**arch)] != unit(&contents.kernels, **arch).into_bytes()
        };
        let wrong: Vec<Diagnostic> = contents
            .archs
            .iter()
            .filter(differs)
            .map(|arch| {
                let text = format!("the text for {arch} is not that of its kernels");
                self.wrong("E4073", &text).help("compile it again")
            })
            .collect();
        if wrong.is_empty() { Ok(()) } else { Err(wrong) }
    }

    fn json<T: DeserializeOwned>(&self, name: &str, bytes: &[u8]) -> Result<T, Wrong> {
        serde_json::from_slice(bytes)
            .map_err(|error| vec![self.damaged(&format!("`{name}` can't be read: {error}"))])
    }

    /// The manifest; versions come first, as others may say the rest otherwise.
    fn manifest(&self, bytes: &[u8]) -> Result<Manifest, Wrong> {
        #[derive(Deserialize)]
        struct Versions {
            format: u64,
            gantline: String,
        }
        let Versions { format, gantline } = self.json(MANIFEST, bytes)?;
        if (format, gantline.as_str()) != (FORMAT, VERSION) {
            let text = format!(
                "the artefact has format {format} of version {gantline}; this program reads \
                 format {FORMAT} of version {VERSION}"
            );
            let help = format!("compile it again, or use version {gantline}");
            return Err(vec![self.wrong("E4071", &text).help(help)]);
        }
        self.json(MANIFEST, bytes)
    }

    /// Compares members with what the manifest says of them.
    fn compare(&self, manifest: &Manifest, parts: &Parts) -> Result<(), Wrong> {
        let mut wrong = Vec::new();
        for (name, bytes) in parts.iter().filter(|(name, _)| *name != MANIFEST) {
            match manifest.members.get(name) {
                None => wrong.push(self.damaged(&format!("the manifest does not know `{name}`"))),
                Some(member) if member.bytes != bytes.len() as u64 => {
                    let text = format!("`{name}` has {} bytes, not {}", bytes.len(), member.bytes);
                    wrong.push(self.damaged(&text));
                }
                Some(member) if member.blake3 != blake3::hash(bytes).to_hex().as_str() => {
                    wrong.push(self.damaged(&format!("`{name}` is damaged: its hash is another")));
                }
                Some(_) => {}
            }
        }
        if wrong.is_empty() { Ok(()) } else { Err(wrong) }
    }

    /// Decodes a binary member. Lists grow as their elements are read, so that a length that
    /// stands in the member reserves nothing.
    fn binary<T: DeserializeOwned>(&self, name: &str, parts: &Parts) -> Result<T, Wrong> {
        let damaged = |why: String| vec![self.damaged(&format!("`{name}` can't be read: {why}"))];
        match postcard::take_from_bytes(&parts[name]) {
            Ok((value, [])) => Ok(value),
            Ok((_, rest)) => Err(damaged(format!("{} bytes are left over", rest.len()))),
            Err(error) => Err(damaged(error.to_string())),
        }
    }

    /// Whether plan, programs, kernels and requirements are about the same thing.
    fn agree(&self, contents: &Contents) -> Result<(), Wrong> {
        let mut wrong = verify_programs(&contents.programs, &contents.kernels, contents.plan.mesh);
        for found in &mut wrong {
            found.notes.push(format!("in `{}`, whose hash is right: it was made so", self.source));
        }
        if !wrong.is_empty() {
            return Err(wrong);
        }
        let ranks = contents.plan.mesh.ranks();
        let needs = &contents.requirements;
        if needs.ranks != ranks {
            let text = format!("the manifest says {} ranks, the plan {ranks}", needs.ranks);
            wrong.push(self.wrong("E4073", &text));
        }
        let arenas = contents.arena_bytes();
        if needs.machine.memory_bytes < arenas {
            let said = needs.machine.memory_bytes;
            let text = format!("the manifest says {said} bytes of memory, the programs {arenas}");
            wrong.push(self.wrong("E4073", &text));
        }
        if wrong.is_empty() { Ok(()) } else { Err(wrong) }
    }
}
