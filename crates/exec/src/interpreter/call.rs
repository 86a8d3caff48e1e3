//! Calls of a prepared Program on tensors of the caller: checked first, then enqueued behind each other without waiting.

use std::slice;
use std::sync::Arc;
use std::time::Instant;

use counterpoint_schedule::{BufferRole, BufferSpec};

use super::enqueue::{Enqueue, enqueue_all, range_of_ranks};
use super::steps::collectives;
use super::{Prepared, begins_anew, given, is_bound};
use crate::group_rank::{CallOrder, Ticket};
use crate::{Backend, BufferAccess, ExecError, OpPlace, RunTimes, TensorFault, Transport};

/// A call of a prepared Program: its tensors have been checked, and nothing has been enqueued.
pub struct Call<'a, B: Backend, T: Transport<B>> {
    prepared: &'a Prepared<B, T>,
    /// Every buffer of the Program, as its operations take it.
    table: Vec<B::Buffer>,
    /// Tensors of the caller that are strided, each with its dense copy: those that the Program reads, and those that it writes.
    read: Vec<(B::Buffer, B::Buffer)>,
    written: Vec<(B::Buffer, B::Buffer)>,
    /// The caller's, where it has one.
    stream: Option<&'a Arc<B::Stream>>,
    /// Of the rank's scratch memory.
    lane: usize,
}

impl<'a, B: Backend, T: Transport<B>> Call<'a, B, T> {
    /// A call that reads and writes these tensors, by the names of the Program's inputs and outputs; for others those count that were
    /// bound ([`Prepared::bind`]). With a `stream` it begins once all that the stream was given before has ended, and what the stream
    /// is given later begins once the call has ended; a Program of one stream and of one rank, which waits for no other, is enqueued there. It
    /// follows the rank's earlier calls, but for those of another stream in a group whose calls overlap
    /// ([`Group::overlap_calls`](crate::Group::overlap_calls)).
    ///
    /// # Errors
    /// [`ExecError::Tensor`] with the tensor that is missing, unknown, of another shape or type, of memory that cannot be used so, or
    /// that shares memory with one that is written; [`ExecError::Capture`] within a capture of the stream, where its ranks synchronise on the
    /// host; [`ExecError::Device`] for a stream that its owner has destroyed, as far as the device says so; [`ExecError::Closed`]; the group's first error. Nothing has been enqueued then.
    pub fn new(
        prepared: &'a Prepared<B, T>,
        tensors: &[(&str, B::Buffer)],
        stream: Option<&'a Arc<B::Stream>>,
    ) -> Result<Self, ExecError> {
        prepared.group_rank().check()?;
        if let Some(stream) = stream {
            prepared.check_stream(stream)?;
        }
        let lane = prepared.group_rank().next_lane(prepared.lanes());
        let mut bound = prepared.table_in(lane);
        for (name, buffer) in tensors {
            bound[prepared.check_tensor(name, buffer)?] = Some(buffer.clone());
        }
        let specs = &prepared.program().buffers;
        check_overlaps(prepared, &bound)?;
        let mut call = Self {
            prepared,
            table: Vec::with_capacity(specs.len()),
            read: Vec::new(),
            written: Vec::new(),
            stream,
            lane,
        };
        for (index, (spec, buffer)) in specs.iter().zip(bound).enumerate() {
            let Some(buffer) = buffer else {
                let program = prepared.program().name.clone();
                return Err(ExecError::tensor(&spec.name, TensorFault::NotGiven { program }));
            };
            let taken = call.taken(index, spec, buffer)?;
            call.table.push(taken);
        }
        Ok(call)
    }

    /// The tensor, or dense memory that it is copied to and from.
    fn taken(&mut self, index: usize, spec: &BufferSpec, buffer: B::Buffer) -> Result<B::Buffer, ExecError> {
        let rank = self.prepared.group_rank();
        let takes_strided = || rank.backend().takes_strided(self.prepared.program(), index);
        if !is_bound(spec.role) || rank.backend().is_dense(&buffer) || takes_strided() {
            return Ok(buffer);
        }
        let dense =
            rank.scratch(self.lane, &BufferSpec { name: format!("dense {}", spec.name), ..spec.clone() })?;
        if given(spec.role) {
            self.read.push((buffer.clone(), dense.clone()));
        }
        if spec.role != BufferRole::Input {
            self.written.push((buffer, dense.clone()));
        }
        Ok(dense)
    }

    /// Enqueues the call, and returns at once.
    ///
    /// Ranks of one process may wait for each other on the host while they enqueue: each needs a thread of its own then, or all of them
    /// [`Call::enqueue_ranks`].
    ///
    /// # Errors
    /// The group's first error.
    pub fn enqueue(self) -> Result<Ticket<B>, ExecError> {
        let rank = self.prepared.backend().rank();
        let gone = || ExecError::Closed { rank };
        Self::enqueue_ranks(vec![self])?.pop().ok_or_else(gone)
    }

    /// Enqueues the calls of several ranks, one each, from this thread.
    ///
    /// # Errors
    /// The group's first error.
    pub fn enqueue_ranks(calls: Vec<Self>) -> Result<Vec<Ticket<B>>, ExecError> {
        let mut orders: Vec<_> = calls.iter().map(|call| call.prepared.group_rank().order()).collect();
        calls.iter().try_for_each(|call| call.prepared.group_rank().check())?;
        let _range = range_of_ranks(calls.iter().map(|call| call.prepared));
        let origin = Instant::now();
        let Some(first) = calls.first() else { return Ok(Vec::new()) };
        first.prepared.backend().within(|| {
            let mut queues = Vec::with_capacity(calls.len());
            for (call, order) in calls.iter().zip(&mut orders) {
                let queue = Enqueue::of_table(call.prepared, &call.table, call.streams());
                let queue = queue.begin(origin, RunTimes::Nothing)?;
                call.begin(order).map_err(|error| call.prepared.backend().fail(error))?;
                queues.push(queue);
            }
            enqueue_all(&mut queues)?;
            let ends = calls.iter().zip(&mut orders);
            ends.map(|(call, order)| call.end(order).map_err(|error| call.prepared.backend().fail(error)))
                .collect()
        })
    }

    /// The caller's stream, where nothing of the call is on another one.
    fn only_stream(&self) -> Option<&'a Arc<B::Stream>> {
        let is_alone = self.prepared.backend().world_size() == 1 && self.prepared.streams().len() == 1;
        self.stream.filter(|_| is_alone)
    }

    /// What the call is enqueued on.
    fn streams(&self) -> &'a [Arc<B::Stream>] {
        self.only_stream().map_or(self.prepared.streams(), slice::from_ref)
    }

    /// Whether calls on other streams of the caller need not follow it.
    fn overlaps(&self) -> bool {
        self.prepared.lanes() > 1 && self.stream.is_some()
    }

    /// Where the call begins and ends: its first stream, or the caller's where others may run under it on all of its own.
    fn outer_stream(&self) -> Option<&'a Arc<B::Stream>> {
        self.stream.filter(|_| self.overlaps()).or(self.streams().first())
    }

    /// The others: the caller's, those that it is ordered with.
    fn neighbours(&self, outer: &Arc<B::Stream>) -> Vec<Arc<B::Stream>> {
        let mut neighbours = self.prepared.group_rank().neighbours();
        neighbours.extend(self.stream.cloned());
        neighbours.retain(|stream| !Arc::ptr_eq(stream, outer));
        neighbours
    }

    /// Has `waits` wait for an event, for a neighbour's sake. A call goes into the graph that somebody captures on the caller's stream, and
    /// into none that is captured on another neighbour.
    fn order(
        &self,
        neighbour: &Arc<B::Stream>,
        waits: &B::Stream,
        place: &OpPlace,
        event: &B::Event,
    ) -> Result<(), ExecError> {
        let backend = self.prepared.backend();
        match self.stream {
            Some(own) if Arc::ptr_eq(own, neighbour) => backend.wait(waits, place, event),
            _ => backend.follow(waits, place, event),
        }
    }

    /// Has all streams of the call begin behind the calls that it follows and the caller's stream.
    fn begin(&self, order: &mut CallOrder<B>) -> Result<(), ExecError> {
        let (backend, streams) = (self.prepared.backend(), self.streams());
        let Some(outer) = self.outer_stream() else { return Ok(()) };
        let place = &self.prepared.edges[0];
        let captured = order.captured.iter().map(|(on, ended)| (on, ended));
        let before = order.before(self.lane, self.overlaps()).chain(captured);
        for (_, ended) in before.filter(|(on, _)| !Arc::ptr_eq(on, outer)) {
            backend.follow(outer, place, ended)?;
        }
        let events = self.prepared.group_rank().events(self.lane);
        for stream in self.neighbours(outer) {
            let ready = events.take(backend)?;
            backend.record(&stream, place, &ready)?;
            self.order(&stream, outer, place, &ready)?;
            events.put(ready);
        }
        if backend.poisons() {
            let specs = self.prepared.program().buffers.iter();
            let written = specs.zip(&self.table).filter(|(spec, _)| begins_anew(spec.role));
            backend.poison(outer, place, written.map(|(_, buffer)| buffer.clone()).collect())?;
        }
        let copied = |(strided, dense): &(B::Buffer, B::Buffer)| backend.copy(outer, place, strided, dense);
        self.read.iter().try_for_each(copied)?;
        let mut others = streams.iter().filter(|stream| !Arc::ptr_eq(stream, outer)).peekable();
        if others.peek().is_none() {
            return Ok(());
        }
        let fork = match &order.fork {
            Some(fork) => fork.clone(),
            None => order.fork.insert(backend.create_event()?).clone(),
        };
        backend.record(outer, place, &fork)?;
        others.try_for_each(|stream| backend.wait(stream, place, &fork))
    }

    /// Has the call end on one stream, and the caller's behind it.
    fn end(&self, order: &mut CallOrder<B>) -> Result<Ticket<B>, ExecError> {
        let (backend, streams) = (self.prepared.backend(), self.streams());
        let events = self.prepared.group_rank().events(self.lane);
        let place = &self.prepared.edges[1];
        let ended = events.take(backend)?;
        let Some(outer) = self.outer_stream() else {
            return Ok(Ticket::new(backend, ended, place.clone(), events));
        };
        for (index, stream) in streams.iter().filter(|stream| !Arc::ptr_eq(stream, outer)).enumerate() {
            if order.joins.len() <= index {
                order.joins.push(backend.create_event()?);
            }
            backend.record(stream, place, &order.joins[index])?;
            backend.wait(outer, place, &order.joins[index])?;
        }
        let copied = |(strided, dense): &(B::Buffer, B::Buffer)| backend.copy(outer, place, dense, strided);
        self.written.iter().try_for_each(copied)?;
        backend.record(outer, place, &ended)?;
        for stream in &self.neighbours(outer) {
            self.order(stream, stream, place, &ended)?;
        }
        if backend.is_captured(&ended) {
            order.captured = Some((outer.clone(), ended.clone()));
            let copies = self.read.iter().chain(&self.written).map(|(_, dense)| dense);
            order.keep_for_graphs(backend, copies);
        } else {
            order.note_end(self.lane, outer, &ended, self.overlaps());
        }
        Ok(Ticket::new(backend, ended, place.clone(), events))
    }
}

impl<B: Backend, T: Transport<B>> Prepared<B, T> {
    /// Enqueues a call of the Programs of several ranks from this thread, each on its own tensors, by name, and with its own stream
    /// where there are any.
    ///
    /// # Errors
    /// As [`Call::new`]; nothing has been enqueued on any rank then. The group's first error.
    pub fn call_ranks(
        ranks: &[&Self],
        tensors: &[Vec<(&str, B::Buffer)>],
        streams: Option<&[&Arc<B::Stream>]>,
    ) -> Result<Vec<Ticket<B>>, ExecError> {
        let given = streams.map_or(ranks.len(), <[_]>::len);
        if tensors.len() != ranks.len() || given != ranks.len() {
            let given = format!("tensors for {} ranks and {given} streams", tensors.len());
            let needed = format!("the {} ranks here", ranks.len());
            return Err(ExecError::tensor("a call's tensors", TensorFault::Count { given, needed }));
        }
        let calls =
            ranks.iter().zip(tensors).enumerate().map(|(index, (rank, tensors))| {
                Call::new(rank, tensors, streams.map(|streams| streams[index]))
            });
        Call::enqueue_ranks(calls.collect::<Result<_, _>>()?)
    }

    /// Refuses a call on a stream that is gone, and one on a stream that captures, where ranks synchronise on the host.
    fn check_stream(&self, stream: &B::Stream) -> Result<(), ExecError> {
        // A rank by itself waits for no other.
        if !self.backend().captures(stream)? || self.backend().world_size() == 1 {
            return Ok(());
        }
        let transport = self.group_rank().transport();
        let mut captured = collectives(&self.steps).map(|collective| transport.can_be_captured(collective));
        captured.try_for_each(|captured| captured).map_err(|reason| ExecError::Capture {
            rank: self.backend().rank(),
            program: self.program().name.clone(),
            reason,
        })
    }

    /// The tensors that a call takes: what it reads, adds to and writes.
    pub fn tensors(&self) -> impl Iterator<Item = &BufferSpec> {
        self.program().buffers.iter().filter(|spec| is_bound(spec.role))
    }
}

/// Refuses tensors of which one is written and shares memory with another.
fn check_overlaps<B: Backend, T: Transport<B>>(
    prepared: &Prepared<B, T>,
    bound: &[Option<B::Buffer>],
) -> Result<(), ExecError> {
    let specs = prepared.program().buffers.iter().zip(bound);
    let given: Vec<(&BufferSpec, &B::Buffer)> = specs
        .filter_map(|(spec, buffer)| Some((spec, buffer.as_ref()?)))
        .filter(|(spec, _)| is_bound(spec.role))
        .collect();
    for (at, (spec, buffer)) in given.iter().enumerate() {
        let access = if spec.role == BufferRole::Input { BufferAccess::Read } else { BufferAccess::Write };
        prepared.backend().check_buffer(&spec.name, buffer, access)?;
        for (other, memory) in &given[..at] {
            let written = [spec, other].into_iter().find(|spec| spec.role != BufferRole::Input);
            if let Some(written) = written
                && prepared.backend().overlap(buffer, memory)
            {
                let with = if written.name == spec.name { &other.name } else { &spec.name };
                return Err(ExecError::tensor(&written.name, TensorFault::Aliased { with: with.clone() }));
            }
        }
    }
    Ok(())
}
