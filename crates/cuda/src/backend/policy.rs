//! What a policy asks of a backend.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use counterpoint_exec::ExecError;
use counterpoint_schedule::{HardwareQueues, OverlapPolicy, WorkerShare};

use super::CudaBackend;
use super::counters::lock;
use crate::partition::Partition;

impl CudaBackend {
    /// Takes from `policy` what this backend does for it.
    pub(super) fn follow_policy(&self, policy: &OverlapPolicy) -> Result<(), ExecError> {
        let refused = |reason| ExecError::Policy { rank: self.0.rank, policy: policy.to_string(), reason };
        policy_check(policy, crate::environment::max_connections().as_deref())
            .map_err(|reason| refused(reason.to_owned()))?;
        self.0.margin.store(policy.sm_margin().try_into().unwrap_or(u32::MAX), Ordering::Relaxed);
        *lock(&self.0.partition) = match policy.workers {
            WorkerShare::Common | WorkerShare::Margin(_) => None,
            WorkerShare::Partition(workers) => {
                let partition = Partition::new(&self.0.device, workers.try_into().unwrap_or(u32::MAX));
                let hint = "use sm-margin=N";
                Some(Arc::new(
                    partition
                        .map_err(|error| refused(format!("this GPU cannot be parted ({error}); {hint}")))?,
                ))
            }
        };
        Ok(())
    }
}

/// What of a policy this backend cannot do. Streams of communication have the high priority whatever the policy, a margin is
/// the launchers' business; `connections` is what the driver was told.
fn policy_check(policy: &OverlapPolicy, connections: Option<&str>) -> Result<(), &'static str> {
    match policy {
        OverlapPolicy { queues: HardwareQueues::Single, .. } if connections != Some("1") => Err(
            "the driver reads CUDA_DEVICE_MAX_CONNECTIONS when the program starts; set it to 1 and start again",
        ),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::policy_check;

    #[test]
    fn policies_that_cannot_be_followed_are_refused() {
        let check = |policy: &str, connections| policy_check(&policy.parse().unwrap(), connections);
        for policy in
            ["sequential", "concurrent+priority", "kernel-barrier+sm-margin=8", "partition=8", "copy-engine"]
        {
            assert_eq!(check(policy, None), Ok(()));
        }
        assert_eq!(check("single-connection", Some("1")), Ok(()));
        for connections in [None, Some("8")] {
            assert!(check("single-connection", connections).is_err(), "{connections:?}");
        }
    }
}
