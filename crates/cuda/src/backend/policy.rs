//! What a policy asks of a backend.

use std::sync::Arc;

use counterpoint_exec::{ExecError, PolicyFault};
use counterpoint_schedule::{CommunicationPriority, HardwareQueues, OverlapPolicy, StreamKind, WorkerShare};

use super::CudaBackend;
use crate::StreamPriority;
use crate::sync::lock;
use counterpoint_driver::Partition;

impl CudaBackend {
    /// Whether this backend can do what `policy` asks for.
    pub(super) fn can_follow(&self, policy: &OverlapPolicy) -> Result<(), ExecError> {
        policy_check(policy, crate::environment::max_connections().as_deref())
            .map_err(|reason| self.refused(policy, reason))
    }

    /// The multiprocessors that `policy` gives to communication and to computation, where it parts them. Kept for the next streams
    /// of a policy that parts them so.
    pub(super) fn partition(&self, policy: &OverlapPolicy) -> Result<Option<Arc<Partition>>, ExecError> {
        let WorkerShare::Partition(workers) = policy.workers else { return Ok(None) };
        let mut known = lock(&self.0.partition);
        if let Some((_, partition)) = known.iter().find(|(of, _)| *of == workers) {
            return Ok(Some(partition.clone()));
        }
        let partition = Partition::new(&self.0.device, workers.try_into().unwrap_or(u32::MAX));
        let partition =
            Arc::new(partition.map_err(|error| {
                self.refused(policy, PolicyFault::Partition { reason: error.to_string() })
            })?);
        known.push((workers, partition.clone()));
        Ok(Some(partition))
    }

    fn refused(&self, policy: &OverlapPolicy, reason: PolicyFault) -> ExecError {
        ExecError::Policy { rank: self.0.rank, policy: policy.to_string(), reason }
    }
}

/// Of streams of this kind: those of communication are above the others, unless the policy says that they are not.
pub(super) fn stream_priority(kind: StreamKind, priority: CommunicationPriority) -> StreamPriority {
    match (kind, priority) {
        (StreamKind::Communication, CommunicationPriority::Usual | CommunicationPriority::High) => {
            StreamPriority::High
        }
        (StreamKind::Communication, CommunicationPriority::Ordinary) | (StreamKind::Compute, _) => {
            StreamPriority::Low
        }
    }
}

/// What of a policy this backend cannot do. Priorities are the streams' business, a margin is the launchers'; `connections` is what the
/// driver was given.
fn policy_check(policy: &OverlapPolicy, connections: Option<&str>) -> Result<(), PolicyFault> {
    match policy {
        OverlapPolicy { queues: HardwareQueues::Single, .. } if connections != Some("1") => {
            Err(PolicyFault::HardwareQueues)
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn communication_is_above_computation_unless_its_priority_is_ordinary() {
        use CommunicationPriority::{High, Ordinary, Usual};
        let of = |kind, priority| stream_priority(kind, priority) == StreamPriority::High;
        assert_eq!(
            [Usual, High, Ordinary].map(|how| of(StreamKind::Communication, how)),
            [true, true, false]
        );
        assert_eq!([Usual, High, Ordinary].map(|how| of(StreamKind::Compute, how)), [false; 3]);
    }

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
