//! How much memory this process can still have: what the machine, its control groups and its own limits leave.

use std::fs;
use std::path::Path;

use crate::ExecError;

/// Bytes that this process can still take without swapping and without being stopped: the least of what the machine has, what
/// every control group around the process leaves (v1 and v2), and what its limit on address space leaves (`ulimit -v`). `None`
/// where the system says none of it.
pub fn available_memory() -> Option<u64> {
    available_under(Path::new("/"))
}

/// Of the system whose files lie under `root`.
fn available_under(root: &Path) -> Option<u64> {
    let read = |path: &str| fs::read_to_string(root.join(path.trim_start_matches('/'))).ok();
    [of_machine(&read), of_control_groups(&read), of_address_space(&read)].into_iter().flatten().min()
}

/// The text of a system's file, where there is one.
type Read<'a> = &'a dyn Fn(&str) -> Option<String>;

/// `MemAvailable`.
fn of_machine(read: Read) -> Option<u64> {
    kibibytes(&read("/proc/meminfo")?, "MemAvailable:")
}

/// Bytes of addresses that `ulimit -v` leaves this process, where it limits them.
pub fn address_space_left() -> Option<u64> {
    of_address_space(&|path| fs::read_to_string(path).ok())
}

fn address_limit(read: Read) -> Option<u64> {
    let limits = read("/proc/self/limits")?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max address space"))?;
    // The soft limit; `unlimited` is no number.
    line.split_whitespace().next()?.parse().ok()
}

/// What `ulimit -v` leaves.
fn of_address_space(read: Read) -> Option<u64> {
    let limit = address_limit(read)?;
    Some(limit.saturating_sub(kibibytes(&read("/proc/self/status")?, "VmSize:")?))
}

/// The least that any group around this process leaves. A group's page cache can be given back, so the part of it that nobody
/// uses counts as left.
fn of_control_groups(read: Read) -> Option<u64> {
    let membership = read("/proc/self/cgroup")?;
    let groups = membership.lines().filter_map(|line| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        let version = match controllers {
            "" => Version {
                mount: "/sys/fs/cgroup",
                limit: "memory.max",
                usage: "memory.current",
                cache: "inactive_file",
            },
            _ if controllers.split(',').any(|name| name == "memory") => Version {
                mount: "/sys/fs/cgroup/memory",
                limit: "memory.limit_in_bytes",
                usage: "memory.usage_in_bytes",
                cache: "total_inactive_file",
            },
            _ => return None,
        };
        // Inside a container its own group may be the root of what can be seen.
        Path::new(path).ancestors().filter_map(|group| version.left(&group.display().to_string(), read)).min()
    });
    groups.min()
}

/// Where a version of control groups keeps its figures.
struct Version {
    mount: &'static str,
    limit: &'static str,
    usage: &'static str,
    cache: &'static str,
}

impl Version {
    fn left(&self, group: &str, read: Read) -> Option<u64> {
        let file = |name: &str| read(&format!("{}/{}/{name}", self.mount, group.trim_matches('/')));
        // `max` is no number.
        let limit: u64 = file(self.limit)?.trim().parse().ok()?;
        let usage: u64 = file(self.usage)?.trim().parse().ok()?;
        let statistics = file("memory.stat").unwrap_or_default();
        let cache = statistics.lines().find_map(|line| line.strip_prefix(self.cache)?.trim().parse().ok());
        Some(limit.saturating_sub(usage.saturating_sub(cache.unwrap_or(0))))
    }
}

/// A figure of a list of `name value kB`.
fn kibibytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

/// Refuses what cannot fit, before anything is allocated.
///
/// # Errors
/// [`ExecError::OutOfMemory`] with both figures.
pub fn check_memory(needed: u64) -> Result<(), ExecError> {
    match available_memory() {
        Some(available) if needed > available => {
            Err(ExecError::OutOfMemory { rank: None, needed, available })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_what_cannot_fit() {
        assert_eq!(check_memory(0), Ok(()));
        if available_memory().is_some() {
            let error = check_memory(u64::MAX).unwrap_err();
            assert!(
                matches!(error, ExecError::OutOfMemory { needed: u64::MAX, available, .. } if available > 0)
            );
        }
    }

    /// The least of what systems with these files leave.
    fn left(files: &[(&str, &str)]) -> Option<u64> {
        let folder = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        available_under(folder.path())
    }

    const MACHINE: (&str, &str) = ("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n");

    #[test]
    fn every_limit_counts() {
        assert_eq!(left(&[]), None);
        assert_eq!(left(&[MACHINE]), Some(8000 * 1024));
        // Version 2: the group itself has no limit, the one around it has.
        let group = ("proc/self/cgroup", "0::/jobs/mine\n");
        let own = [
            ("sys/fs/cgroup/jobs/mine/memory.max", "max\n"),
            ("sys/fs/cgroup/jobs/mine/memory.current", "5\n"),
        ];
        let around = [
            ("sys/fs/cgroup/jobs/memory.max", "1000000\n"),
            ("sys/fs/cgroup/jobs/memory.current", "700000\n"),
            ("sys/fs/cgroup/jobs/memory.stat", "anon 5\ninactive_file 100000\nactive_file 7\n"),
        ];
        let files: Vec<_> = [MACHINE, group].into_iter().chain(own).chain(around).collect();
        assert_eq!(left(&files), Some(400_000));
        // In a container whose path is not to be seen, the root is its group.
        let root = [("sys/fs/cgroup/memory.max", "500\n"), ("sys/fs/cgroup/memory.current", "100\n")];
        assert_eq!(left(&[[MACHINE, group], root].concat()), Some(400));
        // Version 1, among other controllers.
        let files = [
            MACHINE,
            ("proc/self/cgroup", "12:cpu,cpuacct:/x\n5:memory:/box\n0::/\n"),
            ("sys/fs/cgroup/memory/box/memory.limit_in_bytes", "9000\n"),
            ("sys/fs/cgroup/memory/box/memory.usage_in_bytes", "8000\n"),
            ("sys/fs/cgroup/memory/box/memory.stat", "inactive_file 1\ntotal_inactive_file 500\n"),
        ];
        assert_eq!(left(&files), Some(1500));
    }

    #[test]
    fn address_space_counts() {
        let limits = |soft: &str| {
            format!(
                "Limit  Soft Limit  Hard Limit  Units\nMax address space         {soft}    unlimited    bytes\n"
            )
        };
        let status = ("proc/self/status", "Name:\tx\nVmSize:\t    1000 kB\n");
        let (small, none) = (limits("3072000"), limits("unlimited"));
        assert_eq!(left(&[MACHINE, status, ("proc/self/limits", &small)]), Some(3_072_000 - 1_024_000));
        assert_eq!(left(&[MACHINE, status, ("proc/self/limits", &none)]), Some(8000 * 1024));
    }
}
