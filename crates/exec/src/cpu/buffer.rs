//! Tensors that the CPU backend's operations share, of this crate's memory or of somebody else's.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};

use counterpoint_plan::DType;
use counterpoint_schedule::BufferSpec;

use super::host_view::{Extent, HostView};
use crate::monitor::lock;
use crate::place::host_place;
use crate::{BufferAccess, ExecError, HostTensor, OpPlace, TensorFault, TensorMut, TensorRef};

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
    stored: RwLock<Stored>,
    users: Mutex<Vec<User>>,
    /// Where memory of somebody else is, and what may be done with it.
    borrowed: Option<Borrowed>,
}

struct Borrowed {
    extent: Extent,
    access: BufferAccess,
    is_dense: bool,
}

/// Where the elements are.
enum Stored {
    /// Here. Of the shape and type of the buffer that was written last.
    Owned(HostTensor),
    /// Where somebody else has them.
    Borrowed(HostView),
}

impl Stored {
    fn shape(&self) -> &[usize] {
        match self {
            Self::Owned(tensor) => tensor.shape(),
            Self::Borrowed(view) => view.shape(),
        }
    }

    fn dtype(&self) -> DType {
        match self {
            Self::Owned(tensor) => tensor.dtype(),
            Self::Borrowed(view) => view.dtype(),
        }
    }
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

impl Memory {
    fn new(stored: Stored) -> Arc<Self> {
        let borrowed = match &stored {
            Stored::Owned(_) => None,
            Stored::Borrowed(view) => {
                let (extent, access, is_dense) = (view.extent(), view.access(), view.is_dense());
                Some(Borrowed { extent, access, is_dense })
            }
        };
        Arc::new(Self { stored: RwLock::new(stored), users: Mutex::default(), borrowed })
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
            memory: Memory::new(Stored::Owned(tensor)),
        }))
    }

    /// A buffer of rank `owner` in the memory of somebody else, read and written in place; `name` is for errors. A strided one can
    /// only be given to calls of a [`Group`](crate::Group), which copy it to or from dense memory, once each.
    pub fn borrowed(owner: usize, name: &str, view: HostView) -> Self {
        Self(Arc::new(Inner {
            owner,
            name: name.to_owned(),
            shape: view.shape().to_vec(),
            dtype: view.dtype(),
            memory: Memory::new(Stored::Borrowed(view)),
        }))
    }

    /// Whether its elements lie one after the other.
    pub fn is_dense(&self) -> bool {
        self.0.memory.borrowed.as_ref().is_none_or(|borrowed| borrowed.is_dense)
    }

    pub(super) fn check_access(&self, access: BufferAccess) -> Result<(), TensorFault> {
        match &self.0.memory.borrowed {
            Some(Borrowed { access: BufferAccess::Read, .. }) if access == BufferAccess::Write => {
                Err(TensorFault::ReadOnly)
            }
            _ => Ok(()),
        }
    }

    pub(super) fn overlaps(&self, other: &Self) -> bool {
        let (own, other) = (&self.0.memory, &other.0.memory);
        match (&own.borrowed, &other.borrowed) {
            _ if Arc::ptr_eq(own, other) => true,
            (Some(a), Some(b)) => a.extent.overlaps(&b.extent),
            _ => false,
        }
    }

    /// A buffer that reuses the memory of this one.
    pub(crate) fn reused(&self, spec: &BufferSpec) -> Self {
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
        let guard = self.access_stored(self.0.owner)?;
        Ok(match &*guard {
            Stored::Owned(tensor) => tensor.clone(),
            Stored::Borrowed(view) => {
                let mut dense = HostTensor::zeros(view.shape().to_vec(), view.dtype());
                view.gather(dense.view_mut().bytes_mut());
                dense
            }
        })
    }

    /// A copy of some rows.
    ///
    /// # Errors
    /// As [`CpuBuffer::tensor`]; [`ExecError::Tensor`] when it does not have them.
    pub fn rows(&self, rows: Range<usize>) -> Result<HostTensor, ExecError> {
        if rows.start > rows.end || rows.end > self.shape()[0] {
            let fault = TensorFault::RowsBeyond { start: rows.start, end: rows.end, rows: self.shape()[0] };
            return Err(ExecError::tensor(self.name(), fault));
        }
        match &*self.access_stored(self.0.owner)? {
            Stored::Owned(tensor) => Ok(tensor.some_rows(rows)),
            Stored::Borrowed(_) => Ok(self.tensor()?.some_rows(rows)),
        }
    }

    /// Replaces its contents.
    ///
    /// # Errors
    /// [`ExecError::DataRace`] while an operation uses it, [`ExecError::Tensor`] for another shape or element type.
    pub fn store(&self, tensor: HostTensor) -> Result<(), ExecError> {
        if tensor.shape() != self.shape() || tensor.dtype() != self.dtype() {
            let fault = TensorFault::CannotTake {
                dtype: self.dtype(),
                shape: self.shape().to_vec(),
                given_dtype: tensor.dtype(),
                given_shape: tensor.shape().to_vec(),
            };
            return Err(ExecError::tensor(self.name(), fault));
        }
        let mut guard = self.write(self.0.owner, &host_place())?;
        match &mut *guard.stored {
            Stored::Owned(stored) => *stored = tensor,
            Stored::Borrowed(view) => view.scatter(tensor.bytes()),
        }
        Ok(())
    }

    /// Number of handles to it.
    #[cfg(test)]
    pub(crate) fn handles(&self) -> usize {
        Arc::strong_count(&self.0)
    }

    /// For the host, to read, whether dense or not.
    fn access_stored(&self, rank: usize) -> Result<RwLockReadGuard<'_, Stored>, ExecError> {
        let user = User { rank, place: host_place(), verb: "reads" };
        self.lock_to_read(&user)
    }

    fn lock_to_read(&self, user: &User) -> Result<RwLockReadGuard<'_, Stored>, ExecError> {
        let stored = match self.0.memory.stored.try_read() {
            Ok(stored) => stored,
            // A writer that panicked has failed the world already; nobody will look at what it left.
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Err(self.race(user)),
        };
        if stored.shape() != self.shape() || stored.dtype() != self.dtype() {
            let held = "its memory holds another buffer by now".to_owned();
            return Err(self.conflict(user, held));
        }
        Ok(stored)
    }

    /// For an operation of `rank`, to read.
    pub(crate) fn read(&self, rank: usize, place: &OpPlace) -> Result<ReadGuard<'_>, ExecError> {
        let user = User { rank, place: place.clone(), verb: "reads" };
        let stored = self.lock_to_read(&user)?;
        Ok(ReadGuard { stored, _using: self.using(user) })
    }

    /// For an operation of `rank`, to write.
    pub(crate) fn write(&self, rank: usize, place: &OpPlace) -> Result<WriteGuard<'_>, ExecError> {
        let user = User { rank, place: place.clone(), verb: "writes" };
        let mut stored = match self.0.memory.stored.try_write() {
            Ok(stored) => stored,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Err(self.race(&user)),
        };
        if let Stored::Owned(tensor) = &mut *stored
            && (tensor.shape() != self.shape() || tensor.dtype() != self.dtype())
        {
            tensor.reshape(self.shape(), self.dtype());
        }
        Ok(WriteGuard { stored, _using: self.using(user) })
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
    stored: RwLockReadGuard<'a, Stored>,
    _using: Using<'a>,
}

impl ReadGuard<'_> {
    pub(crate) fn view(&self) -> TensorRef<'_> {
        match &*self.stored {
            Stored::Owned(tensor) => tensor.view(),
            Stored::Borrowed(view) => view.view(),
        }
    }

    pub(crate) fn shape(&self) -> &[usize] {
        self.stored.shape()
    }

    pub(crate) fn dtype(&self) -> DType {
        self.stored.dtype()
    }
}

/// Write access of one operation.
pub(crate) struct WriteGuard<'a> {
    stored: RwLockWriteGuard<'a, Stored>,
    _using: Using<'a>,
}

impl WriteGuard<'_> {
    pub(crate) fn view(&mut self) -> TensorMut<'_> {
        match &mut *self.stored {
            Stored::Owned(tensor) => tensor.view_mut(),
            Stored::Borrowed(view) => view.view_mut(),
        }
    }

    pub(crate) fn shape(&self) -> &[usize] {
        self.stored.shape()
    }

    pub(crate) fn dtype(&self) -> DType {
        self.stored.dtype()
    }
}

/// Copies one tensor to another of the same shape and type, one of which may be strided.
pub(super) fn copy(from: &CpuBuffer, to: &CpuBuffer, rank: usize, place: &OpPlace) -> Result<(), ExecError> {
    let from = from.read(rank, place)?;
    let mut to = to.write(rank, place)?;
    match (&*from.stored, &mut *to.stored) {
        (Stored::Borrowed(from), Stored::Owned(to)) => from.gather(to.view_mut().bytes_mut()),
        (Stored::Owned(from), Stored::Borrowed(to)) => to.scatter(from.bytes()),
        (Stored::Owned(from), Stored::Owned(to)) => to.view_mut().bytes_mut().copy_from_slice(from.bytes()),
        (Stored::Borrowed(from), Stored::Borrowed(to)) => {
            let mut dense = HostTensor::zeros(from.shape().to_vec(), from.dtype());
            from.gather(dense.view_mut().bytes_mut());
            to.scatter(dense.bytes());
        }
    }
    Ok(())
}
