//! What a launcher says to the processes that it starts, by variables of their environment.

use std::{env, fmt};

use crate::error::Error;

use super::refusal;

/// The variables of a launcher.
#[derive(Clone, Copy, Debug)]
pub struct Launcher {
    /// Its name.
    pub name: &'static str,
    /// The number of this process.
    pub process: &'static str,
    /// How many there are.
    pub count: &'static str,
    /// The number of this process among those of its machine.
    pub local: &'static str,
    /// How many those are.
    pub local_count: &'static str,
    /// What tells one run from another, where it is the same for all processes.
    pub job: &'static [&'static str],
    /// The machines, that of the first process first.
    pub nodes: Option<&'static str>,
}

/// The launchers that are understood, those first that are started by others: `srun` starts
/// `torchrun`. A script of `sbatch` is no step, so that what it starts itself is by itself.
pub const LAUNCHERS: [Launcher; 4] = [
    Launcher {
        name: "torchrun",
        process: "RANK",
        count: "WORLD_SIZE",
        local: "LOCAL_RANK",
        local_count: "LOCAL_WORLD_SIZE",
        job: &["TORCHELASTIC_RUN_ID"],
        nodes: None,
    },
    Launcher {
        name: "Open MPI",
        process: "OMPI_COMM_WORLD_RANK",
        count: "OMPI_COMM_WORLD_SIZE",
        local: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_count: "OMPI_COMM_WORLD_LOCAL_SIZE",
        job: &["PMIX_NAMESPACE"],
        nodes: None,
    },
    Launcher {
        name: "MPICH",
        process: "PMI_RANK",
        count: "PMI_SIZE",
        local: "MPI_LOCALRANKID",
        local_count: "MPI_LOCALNRANKS",
        job: &[],
        nodes: Some(NODES),
    },
    Launcher {
        name: "Slurm",
        process: "SLURM_PROCID",
        count: "SLURM_STEP_NUM_TASKS",
        local: "SLURM_LOCALID",
        local_count: "SLURM_STEP_TASKS_PER_NODE",
        job: &["SLURM_JOB_ID", "SLURM_STEP_ID"],
        nodes: Some(NODES),
    },
];

/// The address of the first process, and its port.
const ADDRESS: &str = "MASTER_ADDR";
const PORT: &str = "MASTER_PORT";
/// The port where nothing is said: PyTorch's.
const PORT_DEFAULT: u16 = 29500;
/// What `torchrun` sets where its own server has the port.
const AGENT_HAS_PORT: &str = "TORCHELASTIC_USE_AGENT_STORE";
/// What all processes know, and nobody else.
const SECRET: &str = "GANTLINE_SECRET";
/// The machines of a step of Slurm.
const NODES: &str = "SLURM_STEP_NODELIST";
/// One of the processes that were started together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// What has started them.
    pub launcher: &'static str,
    /// Its number; 0 leads.
    pub process: usize,
    /// How many there are: at least two.
    pub count: usize,
    /// Its number among the processes of its machine, and how many these are.
    pub local: (usize, usize),
    /// The machine of the first one, and its port.
    pub leader: (String, u16),
    /// What tells one run from another.
    pub(super) job: String,
    /// What all processes know, and nobody else.
    pub(super) secret: Secret,
}

/// What proves that a process belongs to a run; empty where nothing is said.
#[derive(Clone, Default, PartialEq, Eq)]
pub(super) struct Secret(String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

impl Secret {
    #[cfg(test)]
    pub(super) fn of(text: &str) -> Secret {
        Secret(text.to_owned())
    }

    /// Proves, to whoever knows the secret too, that this is said by somebody who does.
    pub(super) fn prove(&self, said: &[u8]) -> [u8; 32] {
        let key = blake3::derive_key("gantline: processes of a run", self.0.as_bytes());
        *blake3::keyed_hash(&key, said).as_bytes()
    }
}

impl Launch {
    /// What the environment says; none where this process was started by itself.
    ///
    /// # Errors
    /// Variables that contradict each other, or do not say which machine has the first process.
    pub fn from_environment() -> Result<Option<Launch>, Error> {
        Launch::read(&|name| env::var(name).ok())
    }

    /// As [`Launch::from_environment`], where `get` has the values of variables.
    fn read(get: &dyn Fn(&str) -> Option<String>) -> Result<Option<Launch>, Error> {
        let get = |name: &str| get(name).filter(|value| !value.is_empty());
        let number = |name: &str| -> Result<Option<usize>, Error> {
            let Some(text) = get(name) else { return Ok(None) };
            let wrong = || {
                let help = "start the processes with a launcher, or unset the variable";
                refusal(format!("{name} is `{text}`, and not a number"), help)
            };
            text.parse().map(Some).map_err(|_| wrong())
        };
        for launcher in LAUNCHERS {
            let (Some(process), Some(count)) = (number(launcher.process)?, number(launcher.count)?)
            else {
                continue;
            };
            if count < 2 {
                return Ok(None);
            }
            if process >= count {
                let names = (launcher.process, launcher.count);
                let reason = format!("{} is {process}, and {} is {count}", names.0, names.1);
                return Err(refusal(reason, "processes are numbered from 0"));
            }
            let local = local(&get, launcher);
            let nodes = launcher.nodes.and_then(get);
            let leader = (leader(&get, nodes, local.1 == count)?, port(&get)?);
            let job =
                launcher.job.iter().filter_map(|name| get(name)).collect::<Vec<_>>().join(" ");
            let secret = Secret(get(SECRET).unwrap_or_default());
            let launcher = launcher.name;
            return Ok(Some(Launch { launcher, process, count, local, leader, job, secret }));
        }
        Ok(None)
    }
}

/// The number of a process among those of its machine, and how many these are: as its launcher
/// says, or another one that has started that.
fn local(get: &dyn Fn(&str) -> Option<String>, launcher: Launcher) -> (usize, usize) {
    let said = |launcher: Launcher| {
        let local = get(launcher.local)?.parse().ok()?;
        // Slurm writes `2(x3),1` for machines with different numbers.
        let first = |text: String| text.split(['(', ',']).next()?.parse().ok();
        Some((local, get(launcher.local_count).and_then(first).unwrap_or(1).max(local + 1)))
    };
    said(launcher).or_else(|| LAUNCHERS.into_iter().find_map(said)).unwrap_or((0, 1))
}

/// The machine of the first process.
fn leader(
    get: &dyn Fn(&str) -> Option<String>,
    nodes: Option<String>,
    is_one_machine: bool,
) -> Result<String, Error> {
    let of_step = || nodes.as_deref().and_then(first_node);
    let own = || is_one_machine.then(|| "127.0.0.1".to_owned());
    get(ADDRESS).or_else(of_step).or_else(own).ok_or_else(|| {
        let reason = "no variable says on which machine the first process is".to_owned();
        let help = "set MASTER_ADDR to its name for all of them: `mpirun -x MASTER_ADDR=HOST …`";
        refusal(reason, help)
    })
}

fn port(get: &dyn Fn(&str) -> Option<String>) -> Result<u16, Error> {
    let Some(text) = get(PORT) else { return Ok(PORT_DEFAULT) };
    let is_taken = get(AGENT_HAS_PORT).is_some_and(|is| is.eq_ignore_ascii_case("true"));
    let port = text.parse().ok().and_then(|port: u16| port.checked_add(u16::from(is_taken)));
    port.filter(|port| *port > 0)
        .ok_or_else(|| refusal(format!("{PORT} is `{text}`"), "set it to the number of a port"))
}

/// The first of a list of machines as Slurm writes it: `node[03-07,9],gpu1` begins with `node03`.
fn first_node(list: &str) -> Option<String> {
    let (prefix, rest) = list.split_at(list.find(['[', ',']).unwrap_or(list.len()));
    let Some(rest) = rest.strip_prefix('[') else { return Some(prefix.to_owned()) };
    let (inside, after) = rest.split_once(']')?;
    let first = inside.split([',', '-']).next()?;
    let suffix = after.split(',').next()?;
    Some(format!("{prefix}{first}{suffix}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Option<Launch>, Error> {
        let find = |name: &str| variables.iter().find(|(known, _)| *known == name);
        Launch::read(&|name| find(name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn launchers_are_understood() {
        let launch = |variables: &[(&str, &str)]| read(variables).unwrap().unwrap();
        let torch = [
            ("RANK", "9"),
            ("WORLD_SIZE", "16"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "8"),
            ("MASTER_ADDR", "n1"),
            ("MASTER_PORT", "4000"),
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
            ("SLURM_PROCID", "1"),
            ("SLURM_STEP_NUM_TASKS", "2"),
        ];
        let found = launch(&torch);
        assert_eq!((found.process, found.count, found.local), (9, 16, (1, 8)));
        assert_eq!(found.leader, ("n1".to_owned(), 4001), "torchrun's own server has the port");

        let slurm = [
            ("SLURM_PROCID", "2"),
            ("SLURM_STEP_NUM_TASKS", "4"),
            ("SLURM_LOCALID", "0"),
            ("SLURM_STEP_NODELIST", "gpu[07-09,12]-ib,login"),
            ("SLURM_JOB_ID", "77"),
            ("SLURM_STEP_TASKS_PER_NODE", "2(x2)"),
        ];
        // Slurm's plugin for PMI sets these two beside its own.
        let pmi = [("PMI_RANK", "2"), ("PMI_SIZE", "4")];
        assert_eq!(launch(&[&slurm[..], &pmi].concat()).local, (0, 2));
        let found = launch(&slurm);
        assert_eq!((found.process, found.leader.0.as_str()), (2, "gpu07-ib"));
        assert_eq!(found.local, (0, 2));
        assert_eq!((found.leader.1, found.job.as_str()), (PORT_DEFAULT, "77"));

        let mpi = [
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
        ];
        assert_eq!(launch(&mpi).leader.0, "127.0.0.1", "all are on one machine");
        let apart = read(&[mpi[0], mpi[1]]).unwrap_err();
        assert!(apart.to_string().contains("first process"), "{apart}");
    }

    #[test]
    fn processes_by_themselves_have_no_launch() {
        assert_eq!(read(&[]).unwrap(), None);
        assert_eq!(read(&[("RANK", "0"), ("WORLD_SIZE", "1")]).unwrap(), None);
        assert_eq!(read(&[("RANK", "3")]).unwrap(), None, "a name that others use, too");
        let batch = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4")];
        assert_eq!(read(&batch).unwrap(), None, "a script of sbatch is no step");
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for (process, count) in [("4", "4"), ("x", "2"), ("0", "-1")] {
            read(&[("RANK", process), ("WORLD_SIZE", count), ("MASTER_ADDR", "a")]).unwrap_err();
        }
        let port =
            [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "http")];
        read(&port).unwrap_err();
    }

    #[test]
    fn the_first_node_is_found() {
        let cases = [
            ("n1", "n1"),
            ("n1,n2", "n1"),
            ("n[1-4]", "n1"),
            ("n[08,10-12]", "n08"),
            ("a[1-2]b,c", "a1b"),
        ];
        for (list, first) in cases {
            assert_eq!(first_node(list).as_deref(), Some(first));
        }
        assert_eq!(first_node("n[1"), None);
    }
}
