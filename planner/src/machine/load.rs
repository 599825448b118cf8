//! How busy the cores are with the work of others, while something is measured.

use std::fs;
use std::path::Path;

/// Clock ticks since the machine started, of the cores that this process may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticks {
    /// Of all cores together, busy or not.
    all: u64,
    /// In which a core was busy, or taken by another virtual machine.
    busy: u64,
    /// In which this process ran, over all of its threads.
    own: u64,
}

impl Ticks {
    /// The ticks until now; none where the system does not count them.
    pub fn now() -> Option<Ticks> {
        Ticks::read(Path::new("/"))
    }

    /// The share of the cores' time since `before` that others took: 0 to 1. None where no tick
    /// has passed.
    pub fn others_since(self, before: Ticks) -> Option<f64> {
        let since = |now: u64, before: u64| now.saturating_sub(before) as f64;
        let all = since(self.all, before.all);
        let others = since(self.busy, before.busy) - since(self.own, before.own);
        (all > 0.0).then(|| (others / all).clamp(0.0, 1.0))
    }

    fn read(root: &Path) -> Option<Ticks> {
        let text = |name: &str| fs::read_to_string(root.join("proc").join(name)).ok();
        let allowed = allowed(&text("self/status")?)?;
        let mut ticks = Ticks { all: 0, busy: 0, own: own(&text("self/stat")?)? };
        for line in text("stat")?.lines() {
            let Some((core, counts)) = line.strip_prefix("cpu").and_then(|l| l.split_once(' '))
            else {
                continue;
            };
            let Ok(core) = core.parse::<usize>() else { continue };
            if !allowed.iter().any(|range| range.contains(&core)) {
                continue;
            }
            // user, nice, system, idle, iowait, irq, softirq, steal; guests are in user and nice.
            let counts: Vec<u64> =
                counts.split_whitespace().take(8).filter_map(|count| count.parse().ok()).collect();
            let all: u64 = counts.iter().sum();
            ticks.all += all;
            ticks.busy += all - counts.iter().skip(3).take(2).sum::<u64>();
        }
        (ticks.all > 0).then_some(ticks)
    }
}

/// The cores that a process may use, from its `status`: `0-3,8`.
fn allowed(status: &str) -> Option<Vec<std::ops::RangeInclusive<usize>>> {
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse().ok()?..=last.parse().ok()?)
    };
    list.trim().split(',').map(range).collect()
}

/// User and system time of a process, from its `stat`: the name of the program stands in
/// parentheses and may hold any character.
fn own(stat: &str) -> Option<u64> {
    let (_, fields) = stat.rsplit_once(')')?;
    let mut times = fields.split_whitespace().skip(11).map(str::parse::<u64>);
    Some(times.next()?.ok()? + times.next()?.ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What another process takes of the cores that this one may use is seen, and what happens on
    /// other cores is not.
    #[test]
    fn the_work_of_others_is_seen() {
        let at = |[idle, busy, elsewhere, own]: [u64; 4]| {
            let core = |n: usize, busy: u64| format!("cpu{n} {busy} 0 0 {idle} 0 0 0 0 0 0\n");
            let stat = format!("cpu  1 2 3\n{}{}intr 5\n", core(0, busy), core(1, elsewhere));
            let process = format!("7 (a b) c) R{} {own} 0 1 2\n", " 0".repeat(10));
            let root = std::env::temp_dir().join(format!("gantline-ticks-{}", std::process::id()));
            fs::create_dir_all(root.join("proc/self")).unwrap();
            for (path, text) in [
                ("stat", stat.as_str()),
                ("self/stat", &process),
                ("self/status", "Name:\tx\nCpus_allowed_list:\t0\n"),
            ] {
                fs::write(root.join("proc").join(path), text).unwrap();
            }
            let read = Ticks::read(&root);
            fs::remove_dir_all(&root).unwrap();
            read.unwrap()
        };
        let before = at([100, 50, 10, 5]);
        assert_eq!(at([100, 150, 900, 105]).others_since(before), Some(0.0));
        assert_eq!(at([100, 150, 900, 55]).others_since(before), Some(0.5));
        assert_eq!(at([200, 50, 900, 5]).others_since(before), Some(0.0));
        assert_eq!(before.others_since(before), None);
    }
}
