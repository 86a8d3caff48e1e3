//! What NCCL is to know of this process before it has threads, from the words of the command and the variables of the launcher.

use std::ffi::OsString;
use std::{env, fs};

use counterpoint_console::program;
use counterpoint_cuda::decide_about_nccl;
use counterpoint_exec::Launch;

/// Has NCCL make no multicast objects, and take ranks of the nodes that `--nodes` imitates on one host for those of as many hosts: in
/// this process and those that it starts. A process that has threads is left as it is.
pub fn decide_before_threads() {
    let launch = Launch::from_environment().ok().flatten();
    decide_about_nccl(launch.and_then(|launch| host_of(&launch, &program::arguments(), gpus())).as_deref());
}

/// What a rank is to call its host, where it shares that with ranks of other nodes. What is wrong with the words is said elsewhere.
fn host_of(launch: &Launch, words: &[OsString], gpus: usize) -> Option<String> {
    let Launch { rank, world_size, .. } = *launch;
    let nodes: usize = value_of(words, "--nodes")?.parse().ok()?;
    if launch.one_host != Some(true) || nodes < 2 || !world_size.is_multiple_of(nodes) {
        return None;
    }
    // Ranks that share a GPU must not find each other on one host.
    Some(match world_size > gpus.max(1) {
        true => format!("rank {rank}"),
        false => format!("node {}", rank / (world_size / nodes)),
    })
}

/// What follows a flag, in a word of its own or behind `=`.
fn value_of<'a>(words: &'a [OsString], flag: &str) -> Option<&'a str> {
    words.iter().enumerate().find_map(|(at, word)| match word.to_str()?.strip_prefix(flag)? {
        "" => words.get(at + 1)?.to_str(),
        rest => rest.strip_prefix('='),
    })
}

/// GPUs that this process sees, without asking the driver, which starts threads.
fn gpus() -> usize {
    let there = fs::read_dir("/proc/driver/nvidia/gpus").map_or(0, Iterator::count);
    let named = env::var("CUDA_VISIBLE_DEVICES").map(|names| names.split(',').count());
    named.map_or(there, |named| named.min(there))
}

#[cfg(test)]
mod tests {
    use counterpoint_exec::{Launcher, RendezvousPoint};

    use super::*;

    fn launch(rank: usize, one_host: Option<bool>) -> Launch {
        let point = RendezvousPoint { host: "localhost".to_owned(), ports: vec![1], job: "job".to_owned() };
        let (launcher, local_rank) = (Launcher::Torchrun, None);
        Launch { launcher, rank, world_size: 4, local_rank, point, one_host, secret: None }
    }

    #[test]
    fn ranks_of_imitated_nodes_are_on_hosts_of_their_own() {
        let host = |line: &str, rank, one_host, gpus| {
            let words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            host_of(&launch(rank, one_host), &words, gpus)
        };
        let here = Some(true);
        for line in ["bench cp --device cuda --nodes 2 --masks causal", "attention --nodes=2"] {
            let nodes: Vec<_> = (0..4).filter_map(|rank| host(line, rank, here, 4)).collect();
            assert_eq!(nodes, ["node 0", "node 0", "node 1", "node 1"], "{line}");
            assert_eq!(host(line, 3, here, 2).as_deref(), Some("rank 3"), "{line}");
            assert_eq!(host(line, 3, Some(false), 4), None, "{line}");
            assert_eq!(host(line, 3, None, 4), None, "{line}");
        }
        for line in ["attention", "attention --nodes 1", "attention --nodes", "attention --nodes 3"] {
            assert_eq!(host(line, 3, here, 4), None, "{line}");
        }
    }
}
