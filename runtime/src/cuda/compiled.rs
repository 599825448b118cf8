//! The kernels of programs as machine code of one architecture, which all ranks load.

use std::fs;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kernels::Kernel;
use kernels::cuda::{Arch, Functions, device_prelude, functions_for, name};

use super::context::{Context, Failure};
use super::launch::{Launch, Module};
use super::nvrtc::Nvrtc;

/// Kernels whose text is compiled at once, on average: each time the prelude is read again, and
/// kernels of one text wait for each other. Chosen.
const AT_ONCE: usize = 4;
/// The most. Chosen.
const AT_ONCE_MAX: usize = 8;

/// Files of machine code that are kept; the oldest go first. Chosen: some hundred plans, and a few
/// hundred megabytes.
const KEPT_MAX: usize = 4096;

/// Kernels, compiled.
#[derive(Debug)]
pub struct Compiled {
    functions: Vec<Functions>,
    /// Which kernels each of the cubins is of.
    parts: Vec<Range<usize>>,
    cubins: Vec<Vec<u8>>,
}

impl Compiled {
    /// Compiles kernels, on all cores. What was compiled before is taken from a folder, where there
    /// is one, and what is new is kept there.
    ///
    /// # Errors
    /// What the compiler says of text that it refuses.
    pub fn new(
        nvrtc: &Nvrtc,
        kernels: &[Kernel],
        arch: Arch,
        folder: Option<&Path>,
    ) -> Result<Compiled, String> {
        let functions: Vec<Functions> =
            kernels.iter().map(|kernel| functions_for(kernel, arch)).collect();
        let parts = parts(&functions);
        let texts: Vec<String> = parts.iter().map(|of| text(&functions[of.clone()])).collect();
        let one = |text: &String| {
            let kept = folder.map(|folder| place(folder, nvrtc, text, arch));
            if let Some(cubin) = kept.as_deref().and_then(read) {
                return Ok(cubin);
            }
            let cubin = nvrtc.compile(text, arch.name())?.bytes;
            if let Some(kept) = kept {
                // What cannot be kept is compiled again.
                let _ = keep(&kept, &cubin);
            }
            Ok(cubin)
        };
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let next = AtomicUsize::new(0);
        let work = || {
            let mut done = Vec::new();
            while let Some((at, text)) = {
                let at = next.fetch_add(1, Ordering::Relaxed);
                texts.get(at).map(|text| (at, text))
            } {
                done.push((at, one(text)));
            }
            done
        };
        let mut all: Vec<(usize, Result<Vec<u8>, String>)> = std::thread::scope(|scope| {
            let workers: Vec<_> =
                (0..threads.min(texts.len())).map(|_| scope.spawn(work)).collect();
            let join = |worker: std::thread::ScopedJoinHandle<'_, _>| {
                worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            workers.into_iter().flat_map(join).collect()
        });
        all.sort_by_key(|(at, _)| *at);
        folder.into_iter().for_each(forget_oldest);
        let cubins: Result<Vec<Vec<u8>>, String> = all.into_iter().map(|(_, of)| of).collect();
        Ok(Compiled { functions, parts, cubins: cubins? })
    }

    /// The launches of all kernels, on a GPU.
    ///
    /// # Errors
    /// The machine code is not for this GPU.
    pub(super) fn load(
        &self,
        context: &Arc<Context>,
        kernels: &[Kernel],
    ) -> Result<Vec<Launch>, Failure> {
        let mut launches = Vec::new();
        for (part, cubin) in self.parts.iter().zip(&self.cubins) {
            let module = Arc::new(Module::load(context, cubin)?);
            let of_part = kernels[part.clone()].iter().zip(&self.functions[part.clone()]);
            for (at, (kernel, functions)) in of_part.enumerate() {
                launches.push(Launch::new(&module, kernel, functions, |number| name(at, number))?);
            }
        }
        Ok(launches)
    }
}

/// Lets go of machine code that was written long ago.
fn forget_oldest(folder: &Path) {
    let files = fs::read_dir(folder).into_iter().flatten().flatten();
    let written = |file: &fs::DirEntry| file.metadata().and_then(|of| of.modified()).ok();
    let mut files: Vec<_> = files.filter_map(|file| Some((written(&file)?, file.path()))).collect();
    files.sort();
    let surplus = files.len().saturating_sub(KEPT_MAX);
    for (_, path) in files.drain(..surplus) {
        // Another process may have done so, and what is needed is compiled again.
        let _ = fs::remove_file(path);
    }
}

/// Which kernels are compiled together. A part ends where the text of a kernel says so, so that
/// plans with some kernels in common have parts in common, whose machine code is kept.
fn parts(all: &[Functions]) -> Vec<Range<usize>> {
    let (mut parts, mut first) = (Vec::new(), 0);
    for (at, functions) in all.iter().enumerate() {
        let hash = blake3::hash(text_of(0, functions).as_bytes());
        let ends = usize::from(hash.as_bytes()[0]).is_multiple_of(AT_ONCE);
        let count = at + 1 - first;
        if ends || count == AT_ONCE_MAX || at + 1 == all.len() {
            parts.push(first..at + 1);
            first = at + 1;
        }
    }
    parts
}

/// The text of some kernels.
fn text(functions: &[Functions]) -> String {
    let of = functions.iter().enumerate().map(|(at, functions)| text_of(at, functions));
    device_prelude() + &of.collect::<String>()
}

/// The text of a kernel, by its number among those that are compiled together.
fn text_of(at: usize, functions: &Functions) -> String {
    let functions = functions.functions.iter().enumerate();
    functions.map(|(number, of)| "\n".to_owned() + &of.text(&name(at, number))).collect()
}

/// Where what a text is compiled to is kept.
fn place(folder: &Path, nvrtc: &Nvrtc, text: &str, arch: Arch) -> PathBuf {
    let (major, minor) = nvrtc.version();
    let all = format!("{arch} by NVRTC {major}.{minor}\n{text}");
    folder.join(format!("{}.cubin", blake3::hash(all.as_bytes()).to_hex()))
}

/// What is kept, if it is what was written.
fn read(path: &Path) -> Option<Vec<u8>> {
    let bytes = fs::read(path).ok()?;
    let (hash, cubin) = bytes.split_first_chunk::<{ blake3::OUT_LEN }>()?;
    (blake3::hash(cubin) == *hash && !cubin.is_empty()).then(|| cubin.to_vec())
}

/// Keeps machine code behind its hash; a file is there whole or not at all.
fn keep(path: &Path, cubin: &[u8]) -> io::Result<()> {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    fs::create_dir_all(path.parent().unwrap_or(Path::new(".")))?;
    let draft = path.with_extension(format!("{}-{number}", std::process::id()));
    fs::write(&draft, [blake3::hash(cubin).as_bytes(), cubin].concat())?;
    fs::rename(draft, path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ir::DType;
    use kernels::Product;

    /// Of a plan with one more kernel than another, few parts are compiled again.
    #[test]
    fn plans_share_what_is_compiled() {
        let functions = |sizes: Range<usize>| -> Vec<Functions> {
            let kernel = |n| Kernel::Product(Product::matrix(64, n, 64, DType::BF16));
            sizes.map(|n| functions_for(&kernel(n), Arch::Sm90a)).collect()
        };
        let texts = |all: &[Functions]| -> Vec<String> {
            let parts = parts(all);
            assert_eq!(parts.iter().map(Range::len).sum::<usize>(), all.len());
            assert!(parts.iter().all(|part| (1..=AT_ONCE_MAX).contains(&part.len())));
            parts.into_iter().map(|part| text(&all[part])).collect()
        };
        let whole = texts(&functions(1..60));
        assert!((60 / AT_ONCE_MAX..60 / 2).contains(&whole.len()), "{}", whole.len());
        for first in 2..12 {
            let fewer = texts(&functions(first..60));
            let again = fewer.iter().filter(|text| !whole.contains(text)).count();
            assert!(again <= 2, "{again} of {} parts", fewer.len());
        }
    }

    /// A file that is not what was written is not used.
    #[test]
    fn what_is_kept_is_checked() {
        let folder = std::env::temp_dir().join(format!("gantline-cubins-{}", std::process::id()));
        let path = folder.join("a.cubin");
        assert_eq!(read(&path), None);
        keep(&path, b"machine code").unwrap();
        assert_eq!(read(&path).as_deref(), Some(&b"machine code"[..]));
        let mut bytes = fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&path, &bytes).unwrap();
        assert_eq!(read(&path), None);
        fs::write(&path, b"short").unwrap();
        assert_eq!(read(&path), None);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
        fs::remove_dir_all(&folder).unwrap();
    }
}
