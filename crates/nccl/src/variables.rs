//! NCCL's environment variables that no communicator's configuration has a field for. A command of ours sets them before it has threads; in
//! a program of somebody else's they stay as they are, for its own communicators too.
//!
//! NCCL reads each of them once a process, so what is set for a communicator of ours would hold for all later ones, PyTorch's among them,
//! and what was read for an earlier one holds for ours. Nor may a process with threads set any: C functions read the environment at any
//! time, without the lock of Rust's or Python's.

use std::{env, fs};

use counterpoint_driver::CudaError;

use super::NcclFault;

/// Whether NCCL makes multicast objects: 0 for never, 2 where the driver offers them, which it does on hosts that refuse them too.
const MULTICAST: &str = "NCCL_NVLS_ENABLE";
/// What ranks of one host have alike.
const HOST: &str = "NCCL_HOSTID";

/// Decides about variables of NCCL's for this whole process: that it makes no multicast objects for NVLink, which sends and receives do
/// not use and which a host may not allow, and what ranks of this host have alike, where that is given. One that is set stays as it
/// is. Does nothing in a process with other threads; an error says what its ranks miss.
pub fn decide_about_nccl(host: Option<&str>) {
    let is_alone = fs::read_dir("/proc/self/task").is_ok_and(|threads| threads.count() == 1);
    let wanted = [(MULTICAST, Some("0")), (HOST, host)];
    for (name, value) in wanted.into_iter().filter_map(|(name, value)| Some((name, value?))) {
        if is_alone && !is_set(name) {
            // SAFETY: this is the only thread, so nothing reads the environment meanwhile.
            unsafe { env::set_var(name, value) };
        }
    }
}

/// Ranks of one host may stand for ranks of several.
pub(crate) fn host_is_set(host: Option<&str>) -> Result<(), CudaError> {
    let Some(host) = host.filter(|_| !is_set(HOST)) else { return Ok(()) };
    let reason = NcclFault::HostUnset { variable: HOST, host: host.to_owned() };
    Err(CudaError::Transport { transport: "nccl", reason: reason.into() })
}

fn is_set(name: &str) -> bool {
    env::var_os(name).is_some_and(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tests have threads.
    #[test]
    fn a_process_with_threads_is_left_alone() {
        let before = env::var_os(HOST);
        std::thread::scope(|scope| {
            let (ended, wait) = std::sync::mpsc::channel::<()>();
            scope.spawn(move || wait.recv());
            decide_about_nccl(Some("a host of the test's"));
            drop(ended);
        });
        assert_eq!(env::var_os(HOST), before);
    }

    #[test]
    fn a_host_that_is_not_set_is_asked_for() {
        assert_eq!(host_is_set(None), Ok(()));
        if !is_set(HOST) {
            let error = host_is_set(Some("node 1")).unwrap_err().to_string();
            assert!(error.contains("set NCCL_HOSTID to `node 1`"), "{error}");
        }
    }
}
