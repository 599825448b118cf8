//! The machine that this runs on: read once, written into the cluster; and what it has left.

mod load;

use std::fs;
use std::path::{Path, PathBuf};

use kernels::Bytes;
use serde::{Deserialize, Serialize};

pub use load::Ticks;

/// What a CPU cluster takes from the machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Threads that run at once.
    pub cores: usize,
    /// Bytes of memory that this process may use, by limits that do not change while others work.
    pub memory_bytes: u64,
    /// The widest instruction set.
    pub instruction_set: String,
}

impl Machine {
    /// Reads the machine. Limits of a container and of the process count.
    pub fn detect() -> Machine {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let limits = limits(Path::new("/"));
        // 1 GiB where nothing can be read.
        let memory_bytes = limits.iter().map(|limit| limit.bytes).min().unwrap_or(1 << 30);
        Machine { cores, memory_bytes, instruction_set: instruction_set() }
    }
}

fn instruction_set() -> String {
    format!("{:?}", kernels::cpu::Isa::detect()).to_lowercase()
}

/// A limit on the memory of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    /// What limits it, for people.
    pub name: String,
    /// Bytes at most.
    pub bytes: u64,
    /// Bytes of it that are in use, files in the page cache left out.
    pub used: u64,
}

impl Limit {
    /// Bytes that are left.
    pub fn left(&self) -> u64 {
        self.bytes.saturating_sub(self.used)
    }

    /// The limit in words: ``the machine has 24 GiB, of which 3 GiB are in use``.
    pub fn describe(&self) -> String {
        let Limit { name, bytes, used } = self;
        format!("{name} {}, of which {} are in use", Bytes(*bytes), Bytes(*used))
    }
}

/// The limit that leaves this process the least memory now; none where nothing can be read.
pub fn tightest() -> Option<Limit> {
    limits(Path::new("/")).into_iter().min_by_key(Limit::left)
}

/// Limits by the machine, the groups that the process is in, and the process; `root` is `/`.
fn limits(root: &Path) -> Vec<Limit> {
    let mut limits: Vec<Limit> = machine(root).into_iter().collect();
    limits.extend(groups(root));
    limits.extend(process(root));
    limits
}

/// The value of a line such as `MemTotal:  24 kB`, in bytes.
fn kibibytes(text: &str, key: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    Some(rest.split_whitespace().next()?.parse::<u64>().ok()?.saturating_mul(1024))
}

fn machine(root: &Path) -> Option<Limit> {
    let text = fs::read_to_string(root.join("proc/meminfo")).ok()?;
    let bytes = kibibytes(&text, "MemTotal")?;
    let available = kibibytes(&text, "MemAvailable").unwrap_or(bytes);
    let used = bytes.saturating_sub(available);
    Some(Limit { name: "the machine has".to_owned(), bytes, used })
}

/// The control groups of the process and those above them.
fn groups(root: &Path) -> Vec<Limit> {
    let text = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let mut limits = Vec::new();
    for line in text.lines() {
        // `hierarchy:controllers:path`; the second version has one hierarchy, without names.
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let (mount, files) = if controllers.is_empty() {
            ("sys/fs/cgroup", ["memory.max", "memory.current"])
        } else if controllers.split(',').any(|name| name == "memory") {
            ("sys/fs/cgroup/memory", ["memory.limit_in_bytes", "memory.usage_in_bytes"])
        } else {
            continue;
        };
        let mount = root.join(mount);
        let inner = PathBuf::from(path.trim_start_matches('/'));
        // In a container the path may be the host's: then only the mount itself is there.
        limits.extend(inner.ancestors().filter_map(|path| group(&mount, path, files)));
    }
    limits
}

fn group(mount: &Path, path: &Path, [limit, usage]: [&str; 2]) -> Option<Limit> {
    let folder = mount.join(path);
    let number = |file: &str| -> Option<u64> {
        fs::read_to_string(folder.join(file)).ok()?.trim().parse().ok()
    };
    // `max` is no number; the first version writes a number that no machine has.
    let bytes = number(limit).filter(|bytes| *bytes < 1 << 60)?;
    let stat = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let cached = |key: &str| {
        let value = stat.lines().find_map(|line| line.strip_prefix(key)?.trim().parse().ok());
        value.unwrap_or(0_u64)
    };
    let files = cached("inactive_file ") + cached("active_file ");
    let used = number(usage).unwrap_or(0).saturating_sub(files);
    let name = format!("its control group `/{}` may use", path.display());
    Some(Limit { name, bytes, used })
}

/// What `ulimit` says.
fn process(root: &Path) -> Vec<Limit> {
    let limits = fs::read_to_string(root.join("proc/self/limits")).unwrap_or_default();
    let status = fs::read_to_string(root.join("proc/self/status")).unwrap_or_default();
    let rows = [("Max address space", "VmSize", "-v"), ("Max data size", "VmData", "-d")];
    let limit = |(row, used, flag): (&str, &str, &str)| {
        let line = limits.lines().find_map(|line| line.strip_prefix(row))?;
        let bytes = line.split_whitespace().next()?.parse().ok()?;
        let used = kibibytes(&status, used).unwrap_or(0);
        Some(Limit { name: format!("the process has (`ulimit {flag}`)"), bytes, used })
    };
    rows.into_iter().filter_map(limit).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tree of files below a directory of its own, removed at the end.
    struct Tree(PathBuf);

    impl Tree {
        fn new(name: &str, files: &[(&str, &str)]) -> Tree {
            let root = std::env::temp_dir().join(format!("gantline-{name}-{}", std::process::id()));
            for (path, text) in files {
                let path = root.join(path);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            Tree(root)
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    const MEMINFO: (&str, &str) =
        ("proc/meminfo", "MemTotal:  8388608 kB\nMemFree: 1 kB\nMemAvailable:  6291456 kB\n");

    #[test]
    fn the_tightest_limit_counts_and_cached_files_are_no_use() {
        let group = "sys/fs/cgroup/jobs/7";
        let tree = Tree::new(
            "groups",
            &[
                MEMINFO,
                ("proc/self/cgroup", "0::/jobs/7\n"),
                (&format!("{group}/memory.max"), "max\n"),
                ("sys/fs/cgroup/jobs/memory.max", "4294967296\n"),
                ("sys/fs/cgroup/jobs/memory.current", "3221225472\n"),
                ("sys/fs/cgroup/jobs/memory.stat", "anon 5\ninactive_file 1073741824\n"),
            ],
        );
        let found = limits(&tree.0);
        assert_eq!(found.len(), 2, "{found:?}");
        assert_eq!((found[0].bytes, found[0].left()), (8 << 30, 6 << 30));
        assert_eq!((found[1].bytes, found[1].left()), (4 << 30, 2 << 30));
        assert!(
            found[1].describe().contains("`/jobs` may use 4.00 GiB"),
            "{}",
            found[1].describe()
        );
    }

    #[test]
    fn the_first_version_of_groups_and_ulimit_are_read() {
        let limits_text = "Limit  Soft Limit  Hard Limit  Units\n\
                           Max data size  unlimited  unlimited  bytes\n\
                           Max address space  2147483648  unlimited  bytes\n";
        let tree = Tree::new(
            "first",
            &[
                MEMINFO,
                ("proc/self/cgroup", "4:cpu,cpuacct:/x\n3:memory:/host/path\n"),
                ("sys/fs/cgroup/memory/memory.limit_in_bytes", "3221225472\n"),
                ("sys/fs/cgroup/memory/memory.usage_in_bytes", "1073741824\n"),
                ("proc/self/limits", limits_text),
                ("proc/self/status", "Name: x\nVmSize:  1048576 kB\n"),
            ],
        );
        let found = limits(&tree.0);
        let left: Vec<u64> = found.iter().map(Limit::left).collect();
        assert_eq!(left, [6 << 30, 2 << 30, 1 << 30], "{found:?}");
    }

    #[test]
    fn this_machine_has_memory() {
        assert!(Machine::detect().memory_bytes > 1 << 26);
    }
}
