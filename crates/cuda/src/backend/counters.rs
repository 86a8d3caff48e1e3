//! Kernel barriers, made of events, and what they share with signals.
//!
//! A Program queues every producer before whoever waits for it, so a wait can name the very events that it needs. Waiting
//! for an event never occupies anything on the device, so streams that share a hardware queue cannot block each other for
//! good, which a kernel or a memory operation that waits for a counter could.

use std::sync::{Arc, Mutex};

use crate::sync::lock;
use crate::{CudaError, Device, Event, Stream};

/// Counts the starts of communication operations within a run.
#[derive(Clone)]
pub struct CudaBarrier(Arc<Mutex<Points>>);

/// Points of streams that a run has passed, in the order in which they were enqueued, each with the counter's value there.
struct Points {
    device: Device,
    /// Kept from run to run, so that only the first one makes events.
    events: Vec<Event>,
    values: Vec<u64>,
}

impl Points {
    fn new(device: &Device) -> Arc<Mutex<Self>> {
        Arc::new(Mutex::new(Self { device: device.clone(), events: Vec::new(), values: Vec::new() }))
    }

    fn pass(&mut self, stream: &Stream, value: u64) -> Result<(), CudaError> {
        self.next(value)?.record(stream)
    }

    /// The event of the next point, which is still to be marked.
    fn next(&mut self, value: u64) -> Result<Event, CudaError> {
        let index = self.values.len();
        if index == self.events.len() {
            self.events.push(Event::new(&self.device)?);
        }
        self.values.push(value);
        Ok(self.events[index].clone())
    }
}

impl CudaBarrier {
    /// Of this device's streams.
    pub fn new(device: &Device) -> Self {
        Self(Points::new(device))
    }

    /// Nobody has arrived.
    pub fn begin_run(&self) {
        lock(&self.0).values.clear();
    }

    /// An operation that is enqueued next on `stream` arrives when it may start.
    pub(crate) fn arrive(&self, stream: &Stream) -> Result<(), CudaError> {
        let mut points = lock(&self.0);
        let count = points.values.len() as u64;
        points.pass(stream, count + 1)
    }

    /// The event that the operation enqueued next marks when it has started, which is its arrival.
    ///
    /// # Errors
    /// When the driver makes no event.
    pub fn arrival(&self) -> Result<Event, CudaError> {
        let mut points = lock(&self.0);
        let count = points.values.len() as u64;
        points.next(count + 1)
    }

    /// `stream` goes on once the first `arrivals` operations have arrived: any so many would do, and these were enqueued.
    ///
    /// # Errors
    /// The driver's.
    pub fn wait(&self, stream: &Stream, arrivals: u64) -> Result<(), CudaError> {
        let points = lock(&self.0);
        let arrived = points.events.iter().zip(&points.values);
        arrived.filter(|(_, value)| **value <= arrivals).try_for_each(|(event, _)| stream.wait(event))
    }
}
