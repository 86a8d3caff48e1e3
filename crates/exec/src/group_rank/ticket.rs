//! The end of a call, to wait for or to order other work behind.

use std::sync::{Arc, Mutex};

use crate::monitor::lock;
use crate::{Backend, ExecError, OpPlace};

/// A call on its way. Dropping it waits for nothing: the call goes on, and its tensors stay in use until it has ended.
#[must_use = "the call may still run: wait for it before its tensors are used"]
pub struct Ticket<B: Backend> {
    backend: B,
    event: B::Event,
    place: OpPlace,
    pool: EventPool<B>,
}

impl<B: Backend> Ticket<B> {
    pub(crate) fn new(backend: &B, event: B::Event, place: OpPlace, pool: &EventPool<B>) -> Self {
        Self { backend: backend.clone(), event, place, pool: pool.clone() }
    }

    /// Sleeps until the call has ended.
    ///
    /// # Errors
    /// The group's first error; [`ExecError::Stalled`] when nothing moves for the group's limit.
    pub fn wait(&self) -> Result<(), ExecError> {
        self.backend.wait_on_host(&self.event)
    }

    /// Whether the call has ended; never sleeps.
    ///
    /// # Errors
    /// The group's first error.
    pub fn is_done(&self) -> Result<bool, ExecError> {
        self.backend.has_happened(&self.event)
    }

    /// What is enqueued on `stream` from now on starts after the call.
    ///
    /// # Errors
    /// The group's first error.
    pub fn order(&self, stream: &B::Stream) -> Result<(), ExecError> {
        self.backend.wait(stream, &self.place, &self.event)
    }
}

impl<B: Backend> Drop for Ticket<B> {
    fn drop(&mut self) {
        // Records follow each other, so that whoever waits for this one waits for it still.
        self.pool.put(self.event.clone());
    }
}

/// Events that no ticket has.
pub(crate) struct EventPool<B: Backend>(Arc<Mutex<Vec<B::Event>>>);

impl<B: Backend> Clone for EventPool<B> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<B: Backend> Default for EventPool<B> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<B: Backend> EventPool<B> {
    pub(crate) fn take(&self, backend: &B) -> Result<B::Event, ExecError> {
        match lock(&self.0).pop() {
            Some(event) => Ok(event),
            None => backend.create_event(),
        }
    }

    pub(crate) fn put(&self, event: B::Event) {
        lock(&self.0).push(event);
    }
}
