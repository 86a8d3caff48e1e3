//! What torchrun, mpirun and srun give a process: its rank, the number of ranks, and the rendezvous.

use std::fmt;

use super::RendezvousError;
use crate::{EnvironmentVariable, VariableFault};

/// Names the address where rank 0 listens, whatever the launcher says.
pub const RENDEZVOUS_VARIABLE: &str = "COUNTERPOINT_RENDEZVOUS";

/// Holds what the ranks of a job know each other by.
pub const JOB_SECRET_VARIABLE: &str = "COUNTERPOINT_JOB_SECRET";

/// The variables that this crate reads, the launchers' own apart.
pub const ENVIRONMENT: [EnvironmentVariable; 2] = [
    EnvironmentVariable {
        name: RENDEZVOUS_VARIABLE,
        purpose: "host:port where rank 0 meets the others; MASTER_ADDR and a port after MASTER_PORT otherwise",
    },
    EnvironmentVariable {
        name: JOB_SECRET_VARIABLE,
        purpose: "what ranks of several hosts know each other by, the same 16 or more characters on all; on one host a random \
                  token otherwise",
    },
];

/// The shortest secret that is taken.
pub(super) const SECRET_CHARACTERS: usize = 16;

/// What the ranks of a job were given to know each other by.
#[derive(Clone, PartialEq, Eq)]
pub struct JobSecret(String);

impl JobSecret {
    /// The secret itself.
    pub(super) fn text(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for JobSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JobSecret(..)")
    }
}

/// What started this process as one of several ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// `torchrun`, or a script that sets its variables: `RANK`, `WORLD_SIZE`, `LOCAL_RANK`.
    Torchrun,
    /// Open MPI's `mpirun`: `OMPI_COMM_WORLD_RANK` and its like.
    OpenMpi,
    /// MPICH's `mpirun` and others that speak PMI: `PMI_RANK`, `PMI_SIZE`.
    Pmi,
    /// A step of Slurm's `srun`: `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS`.
    Slurm,
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Torchrun => "torchrun",
            Self::OpenMpi => "Open MPI",
            Self::Pmi => "PMI",
            Self::Slurm => "Slurm",
        })
    }
}

/// What this process is among the ranks that a launcher started, and the rendezvous.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Who says so.
    pub launcher: Launcher,
    /// This process.
    pub rank: usize,
    /// Processes.
    pub world_size: usize,
    /// This process among those of its host, where the launcher says.
    pub local_rank: Option<usize>,
    /// Where rank 0 listens.
    pub point: RendezvousPoint,
    /// Whether all processes are on this host, where the launcher says.
    pub one_host: Option<bool>,
    /// What ranks know each other by; without it, ranks of one user on one host are given a random token.
    pub secret: Option<JobSecret>,
}

/// Where rank 0 listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RendezvousPoint {
    /// Name or address of rank 0's host.
    pub host: String,
    /// Rank 0 takes the first of these that is free; the others look for it at each.
    pub ports: Vec<u16>,
    /// Distinguishes this job from another that listens at one of the ports.
    pub job: String,
}

impl fmt::Display for RendezvousPoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.ports.as_slice() {
            [] => f.write_str(&self.host),
            [port] => write!(f, "{}:{port}", self.host),
            [first, .., last] => write!(f, "{}, ports {first} to {last}", self.host),
        }
    }
}

/// Ports tried one after the other, since others listen too: `torchrun` itself at `MASTER_PORT`.
const PORTS: u16 = 8;

/// Where a launcher keeps what.
struct Names {
    launcher: Launcher,
    rank: &'static str,
    world_size: &'static str,
    local_rank: &'static str,
    /// Ranks on this host, or hosts: what shows that all ranks are on one.
    one_host: OneHost,
    /// What distinguishes jobs.
    job: &'static [&'static str],
}

enum OneHost {
    /// A variable of the number of ranks on this host, which are all when it equals the number of ranks.
    LocalSize(&'static str),
    /// A variable of the number of hosts.
    Hosts(&'static str),
}

/// Innermost first: `torchrun` may itself be started by another.
const LAUNCHERS: [Names; 4] = [
    Names {
        launcher: Launcher::Torchrun,
        rank: "RANK",
        world_size: "WORLD_SIZE",
        local_rank: "LOCAL_RANK",
        one_host: OneHost::LocalSize("LOCAL_WORLD_SIZE"),
        job: &["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"],
    },
    Names {
        launcher: Launcher::OpenMpi,
        rank: "OMPI_COMM_WORLD_RANK",
        world_size: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        one_host: OneHost::LocalSize("OMPI_COMM_WORLD_LOCAL_SIZE"),
        job: &["PMIX_NAMESPACE"],
    },
    Names {
        launcher: Launcher::Slurm,
        rank: "SLURM_PROCID",
        // Not SLURM_NTASKS, which a job's script has too, without being a rank.
        world_size: "SLURM_STEP_NUM_TASKS",
        local_rank: "SLURM_LOCALID",
        one_host: OneHost::Hosts("SLURM_STEP_NUM_NODES"),
        job: &["SLURM_JOB_ID", "SLURM_STEP_ID"],
    },
    Names {
        launcher: Launcher::Pmi,
        rank: "PMI_RANK",
        world_size: "PMI_SIZE",
        local_rank: "MPI_LOCALRANKID",
        one_host: OneHost::LocalSize("MPI_LOCALNRANKS"),
        job: &["PMI_JOBID"],
    },
];

impl Launch {
    /// What the environment says: `None` where no launcher started this process.
    ///
    /// # Errors
    /// [`RendezvousError::Variable`] when a launcher's variables are incomplete or make no sense, or none of them says where
    /// rank 0 is.
    pub fn from_environment() -> Result<Option<Self>, RendezvousError> {
        Self::from_variables(|name| std::env::var(name).ok())
    }

    /// As [`Launch::from_environment`], from other variables.
    ///
    /// # Errors
    /// As there.
    pub fn from_variables(
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<Self>, RendezvousError> {
        let variables = Variables(&variable);
        let set = |names: &&Names| variables.has(names.rank) && variables.has(names.world_size);
        let Some(names) = LAUNCHERS.iter().find(set) else { return variables.none() };
        let world_size = variables.number(names.world_size)?;
        if world_size == 0 {
            return Err(wrong(names.world_size, VariableFault::NoRanks));
        }
        let rank = variables.number(names.rank)?;
        if rank >= world_size {
            let counter = names.world_size.to_owned();
            return Err(wrong(names.rank, VariableFault::RankBeyond { rank, counter, world_size }));
        }
        let local_rank =
            variables.has(names.local_rank).then(|| variables.number(names.local_rank)).transpose()?;
        let one_host = variables.one_host(names, world_size)?;
        let point = variables.rendezvous_point(names, one_host)?;
        let secret = variables.secret()?;
        Ok(Some(Self { launcher: names.launcher, rank, world_size, local_rank, point, one_host, secret }))
    }
}

/// An environment.
struct Variables<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Variables<'_> {
    fn get(&self, name: &str) -> Option<String> {
        (self.0)(name).filter(|value| !value.is_empty())
    }

    fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    fn number(&self, name: &str) -> Result<usize, RendezvousError> {
        let value = self.get(name).unwrap_or_default();
        value.parse().map_err(|_| wrong(name, VariableFault::NotANumber { value }))
    }

    /// No launcher, unless half of torchrun's variables is there: a slip in a script that imitates it.
    fn none(&self) -> Result<Option<Launch>, RendezvousError> {
        match (self.has("RANK"), self.has("WORLD_SIZE")) {
            (true, false) => Err(wrong("WORLD_SIZE", VariableFault::SetAlone { set: "RANK".to_owned() })),
            _ => Ok(None),
        }
    }

    fn secret(&self) -> Result<Option<JobSecret>, RendezvousError> {
        let Some(secret) = self.get(JOB_SECRET_VARIABLE) else { return Ok(None) };
        if secret.chars().count() < SECRET_CHARACTERS {
            return Err(wrong(JOB_SECRET_VARIABLE, VariableFault::ShortSecret { least: SECRET_CHARACTERS }));
        }
        Ok(Some(JobSecret(secret)))
    }

    fn one_host(&self, names: &Names, world_size: usize) -> Result<Option<bool>, RendezvousError> {
        let (name, alone) = match names.one_host {
            OneHost::LocalSize(name) => (name, world_size),
            OneHost::Hosts(name) => (name, 1),
        };
        self.has(name).then(|| Ok(self.number(name)? == alone)).transpose()
    }

    fn rendezvous_point(
        &self,
        names: &Names,
        one_host: Option<bool>,
    ) -> Result<RendezvousPoint, RendezvousError> {
        let mut job: Vec<String> = names.job.iter().filter_map(|name| self.get(name)).collect();
        if let Some(address) = self.get(RENDEZVOUS_VARIABLE) {
            let no_address =
                || wrong(RENDEZVOUS_VARIABLE, VariableFault::NotAnAddress { value: address.clone() });
            let (host, port) = address.rsplit_once(':').ok_or_else(no_address)?;
            let port = port.parse().ok().filter(|&port: &u16| port > 0);
            let port = port.filter(|_| !host.is_empty());
            let port = port.ok_or_else(no_address)?;
            return Ok(RendezvousPoint { host: bare(host), ports: vec![port], job: job.join(" ") });
        }
        if let (Some(host), true) = (self.get("MASTER_ADDR"), self.has("MASTER_PORT")) {
            let port = u16::try_from(self.number("MASTER_PORT")?).ok().filter(|&port| port > 0);
            let port = port.ok_or_else(|| wrong("MASTER_PORT", VariableFault::NotAPort))?;
            job.push(format!("port {port}"));
            return Ok(RendezvousPoint { host: bare(&host), ports: ports_after(port), job: job.join(" ") });
        }
        if one_host != Some(true) || job.is_empty() {
            let first = ["MASTER_ADDR", "MASTER_PORT"].into_iter().find(|name| !self.has(name));
            let (launcher, address) = (names.launcher.to_string(), RENDEZVOUS_VARIABLE.to_owned());
            return Err(wrong(first.unwrap_or("MASTER_ADDR"), VariableFault::NoPlace { launcher, address }));
        }
        // Below the ports that systems hand out by themselves.
        let first = 20_000 + (hash(&job.join(" ")) % 10_000) as u16;
        let ports = (first..first + PORTS).collect();
        Ok(RendezvousPoint { host: "127.0.0.1".to_owned(), ports, job: job.join(" ") })
    }
}

/// The ports after `port`, or before it where there are none.
fn ports_after(port: u16) -> Vec<u16> {
    let after: Vec<u16> = (1..=PORTS).filter_map(|step| port.checked_add(step)).collect();
    if after.is_empty() { (1..=PORTS).map(|step| port - step).collect() } else { after }
}

/// An IPv6 address without its brackets.
fn bare(host: &str) -> String {
    host.trim_start_matches('[').trim_end_matches(']').to_owned()
}

/// FNV-1a (Fowler, Noll, Vo).
fn hash(text: &str) -> u64 {
    text.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

fn wrong(variable: &str, reason: VariableFault) -> RendezvousError {
    RendezvousError::Variable { variable: variable.to_owned(), reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(variables: &[(&str, &str)]) -> Result<Option<Launch>, String> {
        let get = |name: &str| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        };
        Launch::from_variables(get).map_err(|error| error.to_string())
    }

    #[test]
    fn torchruns_variables() {
        let torchrun = [
            ("RANK", "1"),
            ("WORLD_SIZE", "4"),
            ("LOCAL_RANK", "1"),
            ("MASTER_ADDR", "node7"),
            ("MASTER_PORT", "29500"),
            ("TORCHELASTIC_RUN_ID", "run"),
            // Under srun: torchrun's own count.
            ("SLURM_PROCID", "0"),
            ("SLURM_STEP_NUM_TASKS", "1"),
        ];
        let found = launch(&torchrun).unwrap().unwrap();
        assert_eq!((found.launcher, found.rank, found.world_size), (Launcher::Torchrun, 1, 4));
        assert_eq!(found.local_rank, Some(1));
        // torchrun's agent listens at MASTER_PORT itself.
        assert_eq!(found.point.ports, (29501..=29508).collect::<Vec<u16>>());
        assert_eq!((found.point.host.as_str(), found.point.job.as_str()), ("node7", "run port 29500"));
        let mut named = torchrun.to_vec();
        named.push((RENDEZVOUS_VARIABLE, "[::1]:7000"));
        let found = launch(&named).unwrap().unwrap();
        assert_eq!(found.point.to_string(), "::1:7000");
        assert_eq!(ports_after(65535), (65527..=65534).rev().collect::<Vec<u16>>());
    }

    #[test]
    fn mpi_on_one_host_needs_no_address() {
        let mut variables = vec![
            ("OMPI_COMM_WORLD_RANK", "2"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "2"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
            ("PMIX_NAMESPACE", "1234"),
        ];
        let found = launch(&variables).unwrap().unwrap();
        assert_eq!((found.launcher, found.rank, found.world_size), (Launcher::OpenMpi, 2, 4));
        assert_eq!(found.point.host, "127.0.0.1");
        assert!(found.point.ports.iter().all(|port| (20_000..30_008).contains(port)));
        variables[4].1 = "1235";
        assert_ne!(launch(&variables).unwrap().unwrap().point, found.point);
        variables[3].1 = "2";
        assert!(
            launch(&variables).unwrap_err().contains("MASTER_ADDR is not set, and Open MPI does not say")
        );
        variables.extend([("MASTER_ADDR", "a"), ("MASTER_PORT", "1")]);
        assert_eq!(launch(&variables).unwrap().unwrap().point.host, "a");
    }

    #[test]
    fn secrets_are_long_and_never_printed() {
        let with =
            |secret| launch(&[("PMI_RANK", "0"), ("PMI_SIZE", "2"), (RENDEZVOUS_VARIABLE, "h:1"), secret]);
        let found = with((JOB_SECRET_VARIABLE, "0123456789abcdef")).unwrap().unwrap();
        assert_eq!(found.secret.as_ref().map(JobSecret::text), Some("0123456789abcdef"));
        assert!(!format!("{found:?}").contains("0123"), "{found:?}");
        assert_eq!(with((JOB_SECRET_VARIABLE, "")).unwrap().unwrap().secret, None);
        let error = with((JOB_SECRET_VARIABLE, "0123456789abcde")).unwrap_err();
        assert!(error.contains("COUNTERPOINT_JOB_SECRET is too short") && !error.contains("0123"), "{error}");
    }

    #[test]
    fn slurm_steps_are_ranks_and_scripts_are_not() {
        let script = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8"), ("SLURM_JOB_ID", "5")];
        assert_eq!(launch(&script), Ok(None));
        let step = [
            ("SLURM_PROCID", "3"),
            ("SLURM_STEP_NUM_TASKS", "8"),
            ("SLURM_STEP_NUM_NODES", "1"),
            ("SLURM_JOB_ID", "5"),
            ("SLURM_LOCALID", "3"),
        ];
        assert_eq!(launch(&step).unwrap().unwrap().launcher, Launcher::Slurm);
        let pmi = [("PMI_RANK", "0"), ("PMI_SIZE", "2"), (RENDEZVOUS_VARIABLE, "h:1")];
        assert_eq!(launch(&pmi).unwrap().unwrap().launcher, Launcher::Pmi);
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        assert_eq!(launch(&[]), Ok(None));
        for (variables, words) in [
            (&[("RANK", "0")][..], "WORLD_SIZE is not set, but RANK is"),
            (&[("RANK", "2"), ("WORLD_SIZE", "2")], "RANK is 2, but WORLD_SIZE is 2"),
            (&[("RANK", "x"), ("WORLD_SIZE", "2")], "RANK is `x`, which is not a whole number"),
            (&[("RANK", "0"), ("WORLD_SIZE", "0")], "WORLD_SIZE is 0"),
            (&[("RANK", "0"), ("WORLD_SIZE", "2")], "MASTER_ADDR is not set"),
            (&[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a")], "MASTER_PORT is not set"),
            (
                &[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "70000")],
                "MASTER_PORT is not a port",
            ),
            (
                &[("RANK", "0"), ("WORLD_SIZE", "2"), (RENDEZVOUS_VARIABLE, "nowhere")],
                "COUNTERPOINT_RENDEZVOUS is `nowhere`",
            ),
        ] {
            let error = launch(variables).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }
}
