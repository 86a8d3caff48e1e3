//! Collectives of rows of the ranks in this process, on tensors of Python.

use counterpoint_exec::{ExecError, Group, Machine};

use super::Joined;
use crate::capture::Captures;
use crate::rows::{ReadyRows, RowEngine, RowsCall};

impl<M> RowEngine for Joined<M>
where
    M: Machine + Send + Sync + 'static,
    M::Backend: Captures,
    Group<M>: Send + Sync,
    ReadyRows<M>: Send,
{
    fn call(&self, RowsCall { key, stream, pairs }: &RowsCall) -> Result<(), ExecError> {
        let captures = self.captures(self.callers(*stream).as_deref())?;
        let keepers = pairs.iter().flat_map(|(from, to)| [from.keeper.clone(), to.keeper.clone()]);
        self.call_layer(
            *stream,
            keepers,
            || self.rows.keep(key),
            |callers| {
                // Making them ready may wait for the device, which ends a capture.
                let make = |_| {
                    ReadyRows::check_capture(&self.group, captures)?;
                    ReadyRows::new(&self.group, key)
                };
                self.rows.with(key, make, |ready| ready.enqueue(&self.group, pairs, callers, captures))
            },
        )
    }
}
