//! Whether a Program is well formed and free of data races, without running it.

mod clocks;
mod error;
mod operand_fault;
mod operands;

pub use error::{ProgramError, ProgramThing, SlotFault};
pub use operand_fault::OperandFault;

use crate::{BufferId, BufferRole, GroupCast, Op, Program};
use clocks::{Clocks, Step};

impl Program {
    /// Checks that every index is in range, that producers are queued before those who wait for them, that inputs are only
    /// read, that no two unordered operations touch one buffer with a write among them, and that buffers of a slot, which for
    /// that count as one, are read before the next one reuses the slot. And that a product whose rows travel while it is computed
    /// is in order with every other collective that takes workers: it may hold all of a device's while it waits for other ranks. A
    /// computation that takes rows as they arrive may as well, so the start of what brings them must have been awaited.
    ///
    /// Order comes from streams, events and signals. A kernel barrier orders starts only, so it makes no data safe.
    ///
    /// # Errors
    /// The first thing found wrong.
    ///
    /// And that the tensors of every computation fit it and each other ([`Program::check_operands`]).
    pub fn validate(&self) -> Result<(), ProgramError> {
        self.validate_order()?;
        let mut computations = (0..self.ops.len()).filter(|&index| self.ops[index].op.is_computation());
        computations.try_for_each(|index| self.check_operands(index))
    }

    /// The same but for tensors' shapes and types, which backends look at when they prepare an operation.
    ///
    /// # Errors
    /// The first thing found wrong.
    pub fn validate_order(&self) -> Result<(), ProgramError> {
        let clocks = self.clocks()?;
        self.check_starts(&clocks)?;
        let memory = self.memory()?;
        self.check_fused(&clocks)?;
        // By piece of memory: who uses it, whether to write, and as which buffer.
        let mut users: Vec<Vec<User>> = vec![Vec::new(); self.buffers.len() + self.slots.len()];
        for (index, op) in self.ops.iter().enumerate() {
            for (part, buffers, write) in op.op.uses() {
                for BufferId(buffer) in buffers {
                    let Some(spec) = self.buffers.get(buffer) else {
                        return Err(self.unknown(index, ProgramThing::Buffer));
                    };
                    if write && spec.role == BufferRole::Input {
                        let (op, label, buffer) = (index, op.label.clone(), spec.name.clone());
                        return Err(ProgramError::WritesInput { op, label, buffer });
                    }
                    add_user(&mut users[memory[buffer]], (Step { op: index, part }, write, buffer));
                }
            }
            for buffer in op.op.arriving().into_iter().flat_map(|keys| [keys.k.0, keys.v.0]) {
                if buffer >= self.buffers.len() {
                    return Err(self.unknown(index, ProgramThing::Buffer));
                }
                users[memory[buffer]].push((Step::whole(index), false, buffer));
            }
        }
        // Such a buffer is read as it is delivered, unless the operation reads it otherwise too.
        let arriving = |op: usize, buffer: usize| {
            let op = &self.ops[op].op;
            let arrives = op.arriving().is_some_and(|keys| [keys.k.0, keys.v.0].contains(&buffer));
            arrives && !op.reads().contains(&BufferId(buffer))
        };
        for users in &users {
            for (i, &(step, first_writes, first_buffer)) in users.iter().enumerate() {
                let first = step.op;
                for &(Step { op: second, part }, second_writes, buffer) in &users[i + 1..] {
                    let together = first == second && first_buffer == buffer;
                    let clocks = &clocks[second];
                    let clock =
                        if arriving(second, buffer) { &clocks.delivered } else { clocks.of_part(part) };
                    let ordered = together || clock.follows(self.ops[first].stream.0, step);
                    if (first_writes || second_writes) && !ordered {
                        return Err(ProgramError::Race {
                            first,
                            first_label: self.ops[first].label.clone(),
                            second,
                            second_label: self.ops[second].label.clone(),
                            buffer: self.buffers[buffer].name.clone(),
                        });
                    }
                }
            }
            self.check_reuse(users)?;
        }
        self.check_buffers()
    }

    /// That buffers can be distinguished by their names, and have rows.
    fn check_buffers(&self) -> Result<(), ProgramError> {
        let mut names: Vec<&str> = self.buffers.iter().map(|spec| spec.name.as_str()).collect();
        names.sort_unstable();
        if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(ProgramError::NamedTwice { name: twice[0].to_owned() });
        }
        match self.buffers.iter().find(|spec| spec.shape.is_empty()) {
            Some(spec) => Err(ProgramError::NoRowAxis { name: spec.name.clone() }),
            None => Ok(()),
        }
    }

    /// That nobody keeps what it waits for from starting: where a group-cast need not be over, its start has been awaited.
    fn check_starts(&self, clocks: &[Clocks]) -> Result<(), ProgramError> {
        // Of the barriers: how many have arrived, and how many each stream has awaited.
        let mut arrived = vec![0u64; self.num_barriers];
        let mut awaited = vec![vec![0u64; self.num_barriers]; self.streams.len()];
        // By signal: the group-cast that raises it, and its arrival at a barrier.
        let mut casts: Vec<Option<(usize, Option<Arrival>)>> = vec![None; self.num_signals];
        for (index, op) in self.ops.iter().enumerate() {
            op.op.arrives().for_each(|barrier| arrived[barrier.0] += 1);
            match &op.op {
                Op::GroupCast(GroupCast { delivery: Some(delivery), arrive, .. }) => {
                    let start = arrive.map(|barrier| (barrier.0, arrived[barrier.0]));
                    casts[delivery.signal.0] = Some((index, start));
                }
                Op::Await { barrier, arrivals } => {
                    let awaited = &mut awaited[op.stream.0][barrier.0];
                    *awaited = (*awaited).max(*arrivals);
                }
                _ => {}
            }
            let Some(keys) = op.op.arriving() else { continue };
            let Some((cast, start)) = casts[keys.delivery.signal.0] else { continue };
            let over = clocks[index].start.follows(self.ops[cast].stream.0, Step::whole(cast));
            let started = start.is_some_and(|(barrier, count)| awaited[op.stream.0][barrier] >= count);
            if !over && !started {
                return Err(ProgramError::StartNotAwaited { op: index, label: op.label.clone() });
            }
        }
        Ok(())
    }

    fn check_fused(&self, clocks: &[Clocks]) -> Result<(), ProgramError> {
        let is_refused = |op: &Op| matches!(op, Op::Fused(parts) if !are_fusable(parts));
        if let Some(op) = self.ops.iter().position(|op| is_refused(&op.op)) {
            return Err(ProgramError::NotFusable { op, label: self.ops[op].label.clone() });
        }
        // Copy engines need no worker.
        let by_engines = |op: &Op| matches!(op, Op::GroupCast(_)) && op.is_left_to_engines(self.policy.mover);
        let takes_workers = |op: &Op| op.is_collective() && !by_engines(op);
        let collectives = self.ops.iter().enumerate().filter(|(_, op)| takes_workers(&op.op));
        let collectives: Vec<(usize, bool)> =
            collectives.map(|(index, op)| (index, op.op.is_fused_gemm())).collect();
        for (place, &(first, first_fused)) in collectives.iter().enumerate() {
            for &(second, second_fused) in &collectives[place + 1..] {
                let ordered = clocks[second].start.follows(self.ops[first].stream.0, Step::whole(first));
                if (first_fused || second_fused) && !ordered {
                    return Err(ProgramError::UnorderedFused {
                        first,
                        first_label: self.ops[first].label.clone(),
                        second,
                        second_label: self.ops[second].label.clone(),
                    });
                }
            }
        }
        Ok(())
    }

    /// For every buffer the piece of memory that it lies in: its own, or from `buffers.len()` on its slot's.
    fn memory(&self) -> Result<Vec<usize>, ProgramError> {
        let mut memory: Vec<usize> = (0..self.buffers.len()).collect();
        for (slot, buffers) in self.slots.iter().enumerate() {
            for &BufferId(buffer) in buffers {
                let reason = match self.buffers.get(buffer) {
                    None => SlotFault::UnknownBuffer,
                    Some(spec) if spec.role != BufferRole::Scratch => SlotFault::NotScratch,
                    Some(_) if memory[buffer] != buffer => SlotFault::HasSlot,
                    Some(_) => {
                        memory[buffer] = self.buffers.len() + slot;
                        continue;
                    }
                };
                return Err(ProgramError::Slot { slot, reason });
            }
        }
        Ok(memory)
    }

    /// Whether each reader of a piece of memory finds there what was last written as its own buffer. `users` are ordered where
    /// one of two writes, and an operation's reads come before its writes.
    fn check_reuse(&self, users: &[User]) -> Result<(), ProgramError> {
        let mut held: Option<usize> = None;
        for &(Step { op, .. }, write, buffer) in users {
            match held {
                Some(other) if other != buffer && !write => {
                    return Err(ProgramError::Overwritten {
                        op,
                        label: self.ops[op].label.clone(),
                        buffer: self.buffers[buffer].name.clone(),
                        other: self.buffers[other].name.clone(),
                    });
                }
                _ => held = Some(buffer),
            }
        }
        Ok(())
    }

    fn unknown(&self, op: usize, what: ProgramThing) -> ProgramError {
        ProgramError::Unknown { op, label: self.ops[op].label.clone(), what }
    }
}

/// Who uses a piece of memory, whether to write, and as which buffer.
type User = (Step, bool, usize);

/// Adds a user. Parts of an operation that use a buffer one after the other, hundreds of experts' products say, are as its last one: who
/// comes behind that comes behind all, and they follow each other.
fn add_user(users: &mut Vec<User>, (step, write, buffer): User) {
    let same = |user: &&mut User| user.0.op == step.op && user.2 == buffer;
    let mut of_operation = users.iter_mut().rev().take(2).take_while(same);
    match of_operation.find(|user| user.1 == write) {
        Some(user) => user.0 = user.0.max(step),
        None => users.push((step, write, buffer)),
    }
}

/// Whether there are kernels for these parts of a fused operation.
fn are_fusable(parts: &[Op]) -> bool {
    matches!(
        parts,
        [Op::Gemm(_), Op::GroupReduce(_)]
            | [Op::Gemm(_), Op::GroupReduce(_), Op::GroupCast(_)]
            | [Op::GroupCast(_), Op::Gemm(_)]
            | [Op::AttentionBackward(_), Op::GroupReduce(_)]
    )
}

/// A barrier, and how many have arrived at it by then.
type Arrival = (usize, u64);
