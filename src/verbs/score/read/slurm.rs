//! Variables that Slurm sets in the environment of a script, where it is known what they are: from
//! the devices that are asked about and those of a node, and from the script's own directives.

use super::said::Word;

/// The devices that a script is started on, as far as they are known without it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Allocation {
    /// All devices.
    pub devices: Option<u32>,
    /// Devices of a node of the cluster.
    pub per_node: Option<u32>,
}

/// Variables with their values. Those that nothing determines are left out, and all of them where
/// the devices that are asked about are not those of the script's directives.
///
/// `flags` are those of the script, with the variables that it sets itself.
pub(super) fn variables(
    text: &str,
    flags: &[Word],
    allocation: Allocation,
) -> Vec<(&'static str, u32)> {
    let directives = directives(text);
    let directive = |names: &[&str]| {
        let found = directives.iter().rfind(|(name, _)| names.contains(&name.as_str()));
        found.and_then(|(_, value)| count(value))
    };
    let flag = |names: &[&str]| {
        let found = flags.iter().rfind(|word| names.contains(&word.name.as_str()));
        found.and_then(|word| count(word.value.as_str()?))
    };
    let started = flag(&["--nproc_per_node", "--nproc-per-node", "--num_gpus"]);
    let of_node = directive(&["--gpus-per-node", "--gres", "--gpus-on-node"]);
    let (stated_nodes, stated) = (directive(&["--nodes", "-N"]), started.or(of_node));
    let Some((nodes, per_node)) = laid_out(allocation, stated_nodes, stated) else {
        return Vec::new();
    };
    // A launcher is one task of a node, which starts the others.
    let stated_tasks = directive(&["--ntasks-per-node"]).or_else(|| flag(&["--ntasks-per-node"]));
    let each = stated_tasks.or(started.map(|_| 1));
    let all = directive(&["--ntasks", "-n"]).or_else(|| nodes?.checked_mul(each?));
    let known = [
        ("SLURM_NNODES", nodes),
        ("SLURM_JOB_NUM_NODES", nodes),
        ("SLURM_GPUS_ON_NODE", per_node),
        ("SLURM_GPUS_PER_NODE", per_node),
        ("SLURM_NTASKS_PER_NODE", stated_tasks),
        ("SLURM_NTASKS", all),
        ("SLURM_NPROCS", all),
    ];
    known.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
}

/// Nodes, and devices of each, as far as they are known; none where what is stated is not so.
fn laid_out(
    allocation: Allocation,
    nodes: Option<u32>,
    per_node: Option<u32>,
) -> Option<(Option<u32>, Option<u32>)> {
    let Some(devices) = allocation.devices else { return Some((nodes, per_node)) };
    // Fewer devices than a node has are a part of one.
    let usual = allocation.per_node.map(|all| all.min(devices));
    let Some(each) = per_node.or(usual).filter(|each| *each > 0) else {
        return Some((nodes, per_node));
    };
    let count = devices / each;
    let is_so = count * each == devices && nodes.is_none_or(|nodes| nodes == count);
    is_so.then_some((Some(count), Some(each)))
}

/// Options of lines `#SBATCH`, each with its value.
fn directives(text: &str) -> Vec<(String, String)> {
    let lines = text.lines().filter_map(|line| line.trim_start().strip_prefix("#SBATCH"));
    let mut all = Vec::new();
    for line in lines {
        let line = line.split(" #").next().unwrap_or_default();
        let mut words = line.split_whitespace().peekable();
        while let Some(word) = words.next() {
            let (name, value) = match word.split_once('=') {
                Some((name, value)) => (name, value),
                None => (word, words.next_if(|next| !next.starts_with('-')).unwrap_or_default()),
            };
            // Of several kinds of resources those that are devices.
            let is_device = |kind: &&str| name != "--gres" || kind.starts_with("gpu");
            let value = value.split(',').find(is_device).unwrap_or_default();
            all.push((name.to_owned(), value.to_owned()));
        }
    }
    all
}

/// The count at the end of a value: 8 of `8`, of `gpu:8` and of `gpu:h100:8`.
fn count(value: &str) -> Option<u32> {
    let number = value.trim().rsplit(':').next()?.parse().ok();
    number.filter(|number| *number > 0)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::script;
    use super::*;

    fn known(text: &str, devices: Option<u32>) -> BTreeMap<&'static str, u32> {
        let flags = script::flags(text, Allocation::default());
        variables(text, &flags, Allocation { devices, per_node: Some(8) }).into_iter().collect()
    }

    /// Variables follow from the devices, those of a node, and what is said to start on each.
    #[test]
    fn variables_are_derived() {
        let torchrun = "EACH=4\ntorchrun --nnodes $SLURM_NNODES --nproc_per_node $EACH x.py\n";
        let tasks = "#SBATCH --ntasks-per-node=8 # one a device\nsrun python x.py\n";
        let whole =
            "#SBATCH -N 4\n#SBATCH --gres=nvme:1,gpu:h100:8 --ntasks 32\nsrun python x.py\n";
        let of = |text: &str, devices, name: &str| known(text, devices).get(name).copied();
        for (text, devices, [nodes, each, all]) in [
            ("srun python x.py", Some(64), [Some(8), Some(8), None]),
            ("srun python x.py", Some(4), [Some(1), Some(4), None]),
            ("srun python x.py", None, [None; 3]),
            ("srun python x.py", Some(12), [None; 3]),
            (torchrun, Some(64), [Some(16), Some(4), Some(16)]),
            (torchrun, Some(6), [None; 3]),
            (tasks, Some(64), [Some(8), Some(8), Some(64)]),
            (whole, None, [Some(4), Some(8), Some(32)]),
            (whole, Some(32), [Some(4), Some(8), Some(32)]),
            (whole, Some(64), [None; 3]),
        ] {
            let about = format!("{text:?} on {devices:?}");
            assert_eq!(of(text, devices, "SLURM_NNODES"), nodes, "{about}");
            assert_eq!(of(text, devices, "SLURM_JOB_NUM_NODES"), nodes, "{about}");
            assert_eq!(of(text, devices, "SLURM_GPUS_ON_NODE"), each, "{about}");
            assert_eq!(of(text, devices, "SLURM_NTASKS"), all, "{about}");
        }
    }
}
