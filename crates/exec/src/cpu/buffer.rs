use std::fmt;
use std::ops::{Deref, DerefMut, Range};
use std::sync::{Arc, Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};

use counterpoint_plan::DType;
use counterpoint_schedule::BufferSpec;

use crate::monitor::lock;
use crate::place::host_place;
use crate::{ExecError, HostTensor, OpPlace};

/// A tensor that the CPU backend's operations share. Cloning it clones a handle.
///
/// Operations lock it without waiting. The operations of a correct Program never contend, because events order them; so a
/// lock that cannot be had at once is a data race, and is reported as one, naming both sides.
#[derive(Clone)]
pub struct CpuBuffer(Arc<Inner>);

struct Inner {
    owner: usize,
    name: String,
    shape: Vec<usize>,
    dtype: DType,
    memory: Arc<Memory>,
}

/// What buffers of a slot have in common; a buffer of its own has one of its own.
struct Memory {
    /// Of the shape and type of the buffer that was written last.
    tensor: RwLock<HostTensor>,
    users: Mutex<Vec<User>>,
}

/// Who uses a buffer, for errors.
#[derive(Clone, PartialEq)]
struct User {
    rank: usize,
    place: OpPlace,
    verb: &'static str,
}

impl fmt::Display for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} {} it in {}", self.rank, self.verb, self.place)
    }
}

impl fmt::Debug for CpuBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { name, shape, dtype, .. } = &*self.0;
        write!(f, "CpuBuffer({name}: {dtype:?} {shape:?})")
    }
}

impl CpuBuffer {
    /// A buffer of rank `owner` that holds `tensor`; `name` is for errors.
    pub fn new(owner: usize, name: &str, tensor: HostTensor) -> Self {
        Self(Arc::new(Inner {
            owner,
            name: name.to_owned(),
            shape: tensor.shape().to_vec(),
            dtype: tensor.dtype(),
            memory: Arc::new(Memory { tensor: RwLock::new(tensor), users: Mutex::default() }),
        }))
    }

    /// A buffer that takes turns with this one in the same memory.
    pub(crate) fn in_turn(&self, spec: &BufferSpec) -> Self {
        Self(Arc::new(Inner {
            owner: self.0.owner,
            name: spec.name.clone(),
            shape: spec.shape.clone(),
            dtype: spec.dtype,
            memory: self.0.memory.clone(),
        }))
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Its shape.
    pub fn shape(&self) -> &[usize] {
        &self.0.shape
    }

    /// Its element type.
    pub fn dtype(&self) -> DType {
        self.0.dtype
    }

    /// A copy of its contents.
    ///
    /// # Errors
    /// [`ExecError::DataRace`] while an operation writes it.
    pub fn tensor(&self) -> Result<HostTensor, ExecError> {
        Ok(self.read(self.0.owner, &host_place())?.clone())
    }

    /// A copy of some rows.
    ///
    /// # Errors
    /// As [`CpuBuffer::tensor`]; [`ExecError::Tensor`] when it does not have them.
    pub fn rows(&self, rows: Range<usize>) -> Result<HostTensor, ExecError> {
        let tensor = self.read(self.0.owner, &host_place())?;
        if rows.start > rows.end || rows.end > tensor.rows() {
            let reason = format!("it has {} rows and not {rows:?}", tensor.rows());
            return Err(ExecError::Tensor { name: self.name().to_owned(), reason });
        }
        Ok(tensor.some_rows(rows))
    }

    /// Replaces its contents.
    ///
    /// # Errors
    /// [`ExecError::DataRace`] while an operation uses it, [`ExecError::Tensor`] for another shape or element type.
    pub fn store(&self, tensor: HostTensor) -> Result<(), ExecError> {
        if tensor.shape() != self.shape() || tensor.dtype() != self.dtype() {
            let reason = format!(
                "it holds {:?} {:?} and cannot take {:?} {:?}",
                self.dtype(),
                self.shape(),
                tensor.dtype(),
                tensor.shape()
            );
            return Err(ExecError::Tensor { name: self.name().to_owned(), reason });
        }
        *self.write(self.0.owner, &host_place())? = tensor;
        Ok(())
    }

    /// Number of handles to it.
    #[cfg(test)]
    pub(crate) fn handles(&self) -> usize {
        Arc::strong_count(&self.0)
    }

    /// For an operation of `rank`, to read.
    pub(crate) fn read(&self, rank: usize, place: &OpPlace) -> Result<ReadGuard<'_>, ExecError> {
        let user = User { rank, place: place.clone(), verb: "reads" };
        let tensor = match self.0.memory.tensor.try_read() {
            Ok(tensor) => tensor,
            // A writer that panicked has failed the world already; nobody will look at what it left.
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Err(self.race(&user)),
        };
        if tensor.shape() != self.shape() || tensor.dtype() != self.dtype() {
            let held = "its memory holds another buffer by now".to_owned();
            return Err(self.conflict(&user, held));
        }
        Ok(ReadGuard { tensor, _using: self.using(user) })
    }

    /// For an operation of `rank`, to write.
    pub(crate) fn write(&self, rank: usize, place: &OpPlace) -> Result<WriteGuard<'_>, ExecError> {
        let user = User { rank, place: place.clone(), verb: "writes" };
        let mut tensor = match self.0.memory.tensor.try_write() {
            Ok(tensor) => tensor,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Err(self.race(&user)),
        };
        if tensor.shape() != self.shape() || tensor.dtype() != self.dtype() {
            tensor.reshape(self.shape(), self.dtype());
        }
        Ok(WriteGuard { tensor, _using: self.using(user) })
    }

    fn using(&self, user: User) -> Using<'_> {
        lock(&self.0.memory.users).push(user.clone());
        Using { buffer: self, user }
    }

    fn race(&self, wanted: &User) -> ExecError {
        let held = lock(&self.0.memory.users)
            .first()
            .map_or_else(|| "another operation uses it".to_owned(), ToString::to_string);
        self.conflict(wanted, held)
    }

    fn conflict(&self, wanted: &User, held: String) -> ExecError {
        let Inner { owner, name, .. } = &*self.0;
        ExecError::DataRace { owner: *owner, buffer: name.clone(), wanted: wanted.to_string(), held }
    }
}

/// An entry in a buffer's list of users.
struct Using<'a> {
    buffer: &'a CpuBuffer,
    user: User,
}

impl Drop for Using<'_> {
    fn drop(&mut self) {
        let mut users = lock(&self.buffer.0.memory.users);
        if let Some(index) = users.iter().position(|user| *user == self.user) {
            users.swap_remove(index);
        }
    }
}

/// Read access of one operation. The tensor is unlocked before its user leaves the list (fields drop in order), so that a
/// race finds a name.
pub(crate) struct ReadGuard<'a> {
    tensor: RwLockReadGuard<'a, HostTensor>,
    _using: Using<'a>,
}

impl Deref for ReadGuard<'_> {
    type Target = HostTensor;

    fn deref(&self) -> &HostTensor {
        &self.tensor
    }
}

/// Write access of one operation.
pub(crate) struct WriteGuard<'a> {
    tensor: RwLockWriteGuard<'a, HostTensor>,
    _using: Using<'a>,
}

impl Deref for WriteGuard<'_> {
    type Target = HostTensor;

    fn deref(&self) -> &HostTensor {
        &self.tensor
    }
}

impl DerefMut for WriteGuard<'_> {
    fn deref_mut(&mut self) -> &mut HostTensor {
        &mut self.tensor
    }
}
