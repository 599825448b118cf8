//! The kernels of programs as machine code of one architecture, which all ranks load.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kernels::Kernel;
use kernels::cuda::{Arch, Functions, device_prelude, functions_for, name};

use super::context::{Context, Failure};
use super::launch::{Launch, Module};
use super::nvrtc::Nvrtc;

/// Kernels whose text is compiled at once: each time the prelude is read again, and kernels of one
/// text wait for each other. Chosen.
const AT_ONCE: usize = 4;

/// Files of machine code that are kept; the oldest go first. Chosen: some hundred plans, and a few
/// hundred megabytes.
const KEPT_MAX: usize = 4096;

/// Kernels, compiled.
#[derive(Debug)]
pub struct Compiled {
    functions: Vec<Functions>,
    /// Of [`AT_ONCE`] kernels each.
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
        let texts: Vec<String> = functions.chunks(AT_ONCE).map(text).collect();
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
        Ok(Compiled { functions, cubins: cubins? })
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
        let parts = kernels.chunks(AT_ONCE).zip(self.functions.chunks(AT_ONCE)).zip(&self.cubins);
        for ((kernels, functions), cubin) in parts {
            let module = Arc::new(Module::load(context, cubin)?);
            for (at, (kernel, functions)) in kernels.iter().zip(functions).enumerate() {
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

/// The text of some kernels.
fn text(functions: &[Functions]) -> String {
    let mut text = device_prelude();
    for (at, functions) in functions.iter().enumerate() {
        for (number, function) in functions.functions.iter().enumerate() {
            text.push('\n');
            text += &function.text(&name(at, number));
        }
    }
    text
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
