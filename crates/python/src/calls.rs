//! A plan that is ready on the ranks of this process, to be called with tensors of PyTorch.

use std::sync::Arc;

use counterpoint_exec::MemoryKeeper;
use counterpoint_plan::DType;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::borrow::{Borrowed, graph as graph_of};
use crate::engine::{Direction, PassCall, Passes};
use crate::error::engine;
use crate::interrupt::interruptible;
use crate::ranks::Ranks;
use crate::solution::Content;
use crate::timeline::Timeline;

/// Forward and backward of a plan, ready. A call is one of each layer and step: nothing of it is kept between calls.
#[pyclass(frozen, module = "counterpoint._native")]
pub(crate) struct Calls {
    ranks: Py<Ranks>,
    passes: Option<Arc<dyn Passes>>,
    shapes: Shapes,
    waits: Waits,
}

/// Where a call waits, and so what ends its wait when Python handles a signal.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Waits {
    /// Nowhere, or where the engine itself looks for signals.
    InTheEngine,
    /// Where it does not: on a thread that the caller can leave.
    OnAThread,
}

/// Where a tensor lies: its address, and where it is not dense the elements from a row to the next and from a head to the next.
struct Place {
    address: usize,
    apart: Option<[usize; 2]>,
}

/// An address, or (address, row, head).
impl<'py> FromPyObject<'_, 'py> for Place {
    type Error = PyErr;

    fn extract(object: pyo3::Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        if object.is_instance_of::<PyTuple>() {
            let (address, row, head) = object.extract()?;
            return Ok(Self { address, apart: Some([row, head]) });
        }
        Ok(Self { address: object.extract()?, apart: None })
    }
}

/// Of the tensors of a call, which have the rows of all ranks here.
struct Shapes {
    queries: usize,
    keys: usize,
    ranks: usize,
    sink: usize,
    heads_q: usize,
    heads_k: usize,
    head_dim: usize,
    head_dim_v: usize,
    dtype: DType,
}

impl Calls {
    pub(crate) fn new(ranks: Py<Ranks>, passes: Arc<dyn Passes>, content: &Content, waits: Waits) -> Self {
        let here = ranks.get().here();
        let spec = &content.spec;
        let shapes = Shapes {
            queries: here.clone().map(|rank| content.q_rows(rank)).sum(),
            keys: here.clone().map(|rank| content.k_rows(rank)).sum(),
            ranks: here.len(),
            sink: spec.seqlen_sink,
            heads_q: spec.heads_q,
            heads_k: spec.heads_kv,
            head_dim: spec.head_dim,
            head_dim_v: spec.head_dim_v,
            dtype: spec.dtype,
        };
        Self { ranks, passes: Some(passes), shapes, waits }
    }

    fn run(&self, py: Python<'_>, call: PassCall) -> PyResult<Option<Timeline>> {
        let ranks = self.ranks.get().engine_to_call(py)?;
        let passes = self.passes.clone();
        // Goes last, with Python's lock.
        let _kept = call.keeper.clone();
        let called = ranks.clone();
        let run = move || {
            called.poll()?;
            passes.map_or(Ok(None), |passes| passes.run(call))
        };
        let native = match self.waits {
            Waits::InTheEngine => engine(py, run),
            Waits::OnAThread => interruptible(py, run, |reason| py.detach(|| ranks.fail(reason))),
        }?;
        Ok(native.map(|native| Timeline { native }))
    }
}

impl Shapes {
    fn heads(&self, place: Place, shape: [usize; 3], keeper: &MemoryKeeper) -> Borrowed {
        let [row, head] = place.apart.unwrap_or([shape[1] * shape[2], shape[2]]);
        let (shape, strides, keeper) = (shape.to_vec(), vec![row, head, 1], keeper.clone());
        Borrowed { address: place.address, shape, strides, dtype: self.dtype, keeper }
    }

    fn dense(&self, address: usize, shape: [usize; 3], keeper: &MemoryKeeper) -> Borrowed {
        self.heads(Place { address, apart: None }, shape, keeper)
    }

    /// `[rows, heads of queries]`, dense, of the accumulator's type.
    fn statistic(&self, address: usize, rows: usize, keeper: &MemoryKeeper) -> Borrowed {
        let (shape, strides) = (vec![rows, self.heads_q], vec![self.heads_q, 1]);
        Borrowed { address, shape, strides, dtype: self.dtype.accumulator(), keeper: keeper.clone() }
    }

    /// A copy for each rank of `[heads of queries]`, likewise.
    fn of_heads(&self, address: usize, keeper: &MemoryKeeper) -> Borrowed {
        let (shape, strides) = (vec![self.ranks * self.heads_q], vec![1]);
        Borrowed { address, shape, strides, dtype: self.dtype.accumulator(), keeper: keeper.clone() }
    }

    fn q(&self) -> [usize; 3] {
        [self.queries, self.heads_q, self.head_dim]
    }

    fn k(&self) -> [usize; 3] {
        [self.keys, self.heads_k, self.head_dim]
    }

    fn v(&self) -> [usize; 3] {
        [self.keys, self.heads_k, self.head_dim_v]
    }

    fn out(&self) -> [usize; 3] {
        [self.queries, self.heads_q, self.head_dim_v]
    }
}

#[pymethods]
impl Calls {
    /// Writes `out` and `lse`, which are dense, as `sink` is, and `max_logits` if the plan asks for it, of which there is a copy for each
    /// rank here. `tensors` are all tensors of the call, whose shapes and types the caller has
    /// checked. Its times, where they are taken. Collective.
    #[pyo3(signature = (stream, q, k, v, sink, out, lse, max_logits, tensors, /))]
    fn forward(
        &self,
        py: Python<'_>,
        stream: u64,
        q: Place,
        k: Place,
        v: Place,
        sink: Option<usize>,
        out: usize,
        lse: usize,
        max_logits: Option<usize>,
        tensors: Py<PyAny>,
    ) -> PyResult<Option<Timeline>> {
        let keeper: MemoryKeeper = Arc::new(tensors);
        let shapes = &self.shapes;
        let mut inputs = vec![
            ("q", shapes.heads(q, shapes.q(), &keeper)),
            ("k", shapes.heads(k, shapes.k(), &keeper)),
            ("v", shapes.heads(v, shapes.v(), &keeper)),
        ];
        inputs.extend(sink.map(|sink| ("sink", shapes.statistic(sink, shapes.sink, &keeper))));
        let mut outputs = vec![
            ("out", shapes.dense(out, shapes.out(), &keeper)),
            ("lse", shapes.statistic(lse, shapes.queries, &keeper)),
        ];
        outputs.extend(max_logits.map(|address| ("max_logits", shapes.of_heads(address, &keeper))));
        self.run(py, PassCall { direction: Direction::Forward, stream, inputs, outputs, keeper })
    }

    /// Writes `dq`, `dk`, `dv`, and `dsink`, which has a copy for each rank here; all are dense. `out` and `lse` are the forward's. `dlse`
    /// is dense, and read where the plan asks for it.
    #[pyo3(signature = (stream, dout, q, k, v, sink, out, lse, dlse, dq, dk, dv, dsink, tensors, /))]
    fn backward(
        &self,
        py: Python<'_>,
        stream: u64,
        dout: Place,
        q: Place,
        k: Place,
        v: Place,
        sink: Option<usize>,
        out: usize,
        lse: usize,
        dlse: Option<usize>,
        dq: usize,
        dk: usize,
        dv: usize,
        dsink: Option<usize>,
        tensors: Py<PyAny>,
    ) -> PyResult<Option<Timeline>> {
        let keeper: MemoryKeeper = Arc::new(tensors);
        let shapes = &self.shapes;
        let mut inputs = vec![
            ("dout", shapes.heads(dout, shapes.out(), &keeper)),
            ("q", shapes.heads(q, shapes.q(), &keeper)),
            ("k", shapes.heads(k, shapes.k(), &keeper)),
            ("v", shapes.heads(v, shapes.v(), &keeper)),
            ("out", shapes.dense(out, shapes.out(), &keeper)),
            ("lse", shapes.statistic(lse, shapes.queries, &keeper)),
        ];
        inputs.extend(sink.map(|sink| ("sink", shapes.statistic(sink, shapes.sink, &keeper))));
        inputs.extend(dlse.map(|dlse| ("dlse", shapes.statistic(dlse, shapes.queries, &keeper))));
        let mut outputs = vec![
            ("dq", shapes.dense(dq, shapes.q(), &keeper)),
            ("dk", shapes.dense(dk, shapes.k(), &keeper)),
            ("dv", shapes.dense(dv, shapes.v(), &keeper)),
        ];
        let rows = shapes.ranks * shapes.sink;
        outputs.extend(dsink.map(|dsink| ("dsink", shapes.statistic(dsink, rows, &keeper))));
        self.run(py, PassCall { direction: Direction::Backward, stream, inputs, outputs, keeper })
    }

    /// Has a graph of PyTorch's, which launches are on `stream`, do calls of these where it does those of `old`: how many. `graph` and
    /// `executable` are its handles.
    #[pyo3(signature = (old, graph, executable, stream, /))]
    fn update_graph(
        &self,
        py: Python<'_>,
        old: &Self,
        graph: usize,
        executable: usize,
        stream: u64,
    ) -> PyResult<usize> {
        let ranks = self.ranks.get().engine_to_call(py)?;
        let (Some(new), Some(old)) = (self.passes.clone(), old.passes.clone()) else { return Ok(0) };
        engine(py, move || {
            ranks.poll()?;
            new.update(graph_of(graph, executable), &old, stream)
        })
    }
}

impl Drop for Calls {
    fn drop(&mut self) {
        if self.ranks.get().is_forked() {
            // Its threads, or its device, are those of another process.
            std::mem::forget(self.passes.take());
        }
    }
}
