//! Named scratch tensors that layers share, as Megatron-LM's `GlobalMemoryBuffer` has them.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use counterpoint_plan::DType;
use counterpoint_schedule::{BufferRole, BufferSpec};

use crate::{Backend, ExecError};

/// Memory of one rank for tensors that are needed for a short time again and again, gathered activations say: a name and an element
/// type stand for one allocation, of which every tensor of that name is a view. It grows at least to twice its length, so that
/// slowly growing tensors rarely allocate (Megatron-LM's `GlobalMemoryBuffer`).
///
/// A view of grown memory is of other memory than the views before, which stay valid. Who writes one of the views ends what the
/// others of the same memory held.
///
/// ```
/// use std::sync::Arc;
/// use counterpoint_exec::{Backend, CpuMachine, GlobalBuffer, Machine, World, WorldConfig};
/// use counterpoint_plan::DType;
///
/// # fn main() -> Result<(), counterpoint_exec::ExecError> {
/// let machine = CpuMachine::new(0, None)?;
/// let (backend, _) = machine.connect(&World::new(1, WorldConfig::default()))?.remove(0);
/// let mut memory = GlobalBuffer::new();
/// let tokens = memory.get(&backend, "gathered", DType::Bf16, &[512, 64])?;
/// let fewer = memory.get(&backend, "gathered", DType::Bf16, &[100, 64])?;
/// assert_eq!(backend.layout(&fewer), (vec![100, 64], DType::Bf16));
/// assert_eq!(memory.bytes(), 512 * 64 * 2);
/// # drop(tokens);
/// # Ok(())
/// # }
/// ```
pub struct GlobalBuffer<B: Backend> {
    allocations: HashMap<(String, DType), Allocation<B>>,
}

struct Allocation<B: Backend> {
    elements: usize,
    memory: B::Buffer,
}

impl<B: Backend> Allocation<B> {
    /// Of so many elements, or of as many as are needed where those do not fit.
    fn new(backend: &B, spec: &BufferSpec, needed: usize, elements: usize) -> Result<Self, ExecError> {
        let of = |elements: usize| {
            let memory = backend.allocate(&BufferSpec { shape: vec![elements], ..spec.clone() })?;
            Ok(Self { elements, memory })
        };
        match of(elements) {
            Err(ExecError::OutOfMemory { .. }) if elements > needed => of(needed),
            allocation => allocation,
        }
    }
}

impl<B: Backend> Default for GlobalBuffer<B> {
    fn default() -> Self {
        Self { allocations: HashMap::new() }
    }
}

impl<B: Backend> GlobalBuffer<B> {
    /// Without any memory.
    pub fn new() -> Self {
        Self::default()
    }

    /// A tensor of this name, contents arbitrary.
    ///
    /// # Errors
    /// [`ExecError::OutOfMemory`] when it must grow and cannot.
    pub fn get(
        &mut self,
        backend: &B,
        name: &str,
        dtype: DType,
        shape: &[usize],
    ) -> Result<B::Buffer, ExecError> {
        let role = BufferRole::Scratch;
        self.view(backend, &BufferSpec { name: name.to_owned(), dtype, shape: shape.to_vec(), role })
    }

    pub(crate) fn view(&mut self, backend: &B, spec: &BufferSpec) -> Result<B::Buffer, ExecError> {
        let wanted: usize = spec.shape.iter().product();
        let allocation = match self.allocations.entry((spec.name.clone(), spec.dtype)) {
            Entry::Vacant(entry) => entry.insert(Allocation::new(backend, spec, wanted, wanted)?),
            Entry::Occupied(entry) => {
                let allocation = entry.into_mut();
                if allocation.elements < wanted {
                    *allocation =
                        Allocation::new(backend, spec, wanted, wanted.max(2 * allocation.elements))?;
                }
                allocation
            }
        };
        backend.view(&allocation.memory, spec)
    }

    /// Whether a tensor allocates nothing.
    pub(crate) fn has(&self, spec: &BufferSpec) -> bool {
        let allocation = self.allocations.get(&(spec.name.clone(), spec.dtype));
        allocation.is_some_and(|allocation| allocation.elements >= spec.shape.iter().product())
    }

    /// Has memory for a tensor, and no more: one of its name and type that is no longer allocates nothing later.
    pub(crate) fn reserve(&mut self, backend: &B, spec: &BufferSpec) -> Result<(), ExecError> {
        if !self.has(spec) {
            let wanted = spec.shape.iter().product();
            let made = Allocation::new(backend, spec, wanted, wanted)?;
            self.allocations.insert((spec.name.clone(), spec.dtype), made);
        }
        Ok(())
    }

    /// Bytes of all its memory.
    pub fn bytes(&self) -> u64 {
        let bytes = |((_, dtype), allocation): (&(String, DType), &Allocation<B>)| {
            allocation.elements as u64 * dtype.size() as u64
        };
        self.allocations.iter().map(bytes).sum()
    }

    /// Gives all memory back; views that are still held keep theirs.
    pub fn clear(&mut self) {
        self.allocations.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CpuMachine, HostTensor, Machine, World, WorldConfig};

    #[test]
    fn names_and_types_have_memory_of_their_own_that_grows_geometrically() {
        let machine = CpuMachine::new(0, None).unwrap();
        let (backend, _) = machine.connect(&World::new(1, WorldConfig::default())).unwrap().remove(0);
        let mut memory = GlobalBuffer::new();
        let mut get = |name: &str, dtype, rows: usize| {
            let view = memory.get(&backend, name, dtype, &[rows, 3]).unwrap();
            (view, memory.bytes())
        };
        let (first, bytes) = get("a", DType::F32, 10);
        assert_eq!(bytes, 120);
        first.store(HostTensor::from_vec(vec![10, 3], vec![1.0f32; 30])).unwrap();
        // A shorter view is of the same memory: its write ends what the longer one held.
        let (second, bytes) = get("a", DType::F32, 4);
        assert_eq!(bytes, 120);
        assert_eq!(first.tensor().unwrap().rows(), 10);
        second.store(HostTensor::from_vec(vec![4, 3], vec![2.0f32; 12])).unwrap();
        assert!(first.tensor().is_err());
        assert_eq!(get("a", DType::F32, 11).1, 240);
        assert_eq!(get("a", DType::F32, 20).1, 240);
        assert_eq!(get("a", DType::F32, 100).1, 1200);
        assert_eq!(second.tensor().unwrap(), HostTensor::from_vec(vec![4, 3], vec![2.0f32; 12]));
        assert_eq!(get("a", DType::Bf16, 1).1, 1206);
        assert_eq!(get("b", DType::F32, 1).1, 1218);
        // No more than is asked for, and nothing for what is there.
        let spec = |name: &str, rows| {
            let (name, shape) = (name.to_owned(), vec![rows, 3]);
            BufferSpec { name, dtype: DType::Bf16, shape, role: BufferRole::Scratch }
        };
        memory.reserve(&backend, &spec("b", 10)).unwrap();
        assert_eq!(memory.bytes(), 1278);
        memory.reserve(&backend, &spec("b", 9)).unwrap();
        memory.view(&backend, &spec("b", 10)).unwrap();
        assert_eq!(memory.bytes(), 1278);
        memory.clear();
        assert_eq!(memory.bytes(), 0);
    }

    /// A collective without rows reads a tensor without any, which nobody has written, whatever holds the memory.
    #[test]
    fn a_view_without_rows_is_there_without_a_write() {
        let machine = CpuMachine::new(0, None).unwrap();
        let (backend, _) = machine.connect(&World::new(1, WorldConfig::default())).unwrap().remove(0);
        let mut memory = GlobalBuffer::new();
        let full = memory.get(&backend, "a", DType::F32, &[4, 3]).unwrap();
        full.store(HostTensor::from_vec(vec![4, 3], vec![1.0f32; 12])).unwrap();
        let empty = memory.get(&backend, "a", DType::F32, &[0, 3]).unwrap();
        assert_eq!(empty.tensor().unwrap().rows(), 0);
        assert_eq!(full.tensor().unwrap().rows(), 4);
    }
}
