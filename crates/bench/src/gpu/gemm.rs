//! Timing matrix products on one GPU, ours and cuBLASLt's interleaved.

use std::thread;

use half::{bf16, f16};

use counterpoint_cuda::kernel::{GemmEpilogue, GemmRunner, GemmSpec, GemmTensors, RandomFill, Scalar};
use counterpoint_cuda::{CudaError, Device, DeviceBuffer, Event, Stream, StreamPriority};

/// Bytes that are written between two runs: more than the second level cache holds, and long enough that the next run is
/// enqueued before it may start.
const FLUSH_BYTES: usize = 192 << 20;
pub(super) const SEED_A: u64 = 1;
pub(super) const SEED_B: u64 = 2;
pub(super) const SEED_D: u64 = 3;

/// One product's tensors on a GPU, filled with random numbers.
pub struct GemmBench {
    stream: Stream,
    spec: GemmSpec,
    a: DeviceBuffer,
    b: DeviceBuffer,
    d: DeviceBuffer,
    flush: Flush,
}

/// Memory whose writing leaves nothing else in the second level cache.
pub(super) struct Flush(DeviceBuffer);

/// How far a product is from the one in f64, on a sample of its elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GemmError {
    /// Root of the sum of squares of the errors, over that of the elements.
    pub relative: f64,
    /// The largest share of an element's bound: half a unit in the last place of D's type, and what sums in f32 may lose.
    pub of_bound: f64,
}

impl GemmBench {
    /// Puts the tensors of a product with one destination on a GPU.
    ///
    /// # Errors
    /// When they do not fit.
    pub fn new(device: &Device, spec: &GemmSpec) -> Result<Self, CudaError> {
        let stream = Stream::new(device, StreamPriority::Low)?;
        let rows = [
            spec.layout.a_dims(spec.size.m, spec.size.k)[0],
            spec.layout.b_dims(spec.size.n, spec.size.k)[0],
            spec.size.m,
        ];
        let element = spec.element.bytes();
        let bytes = [element, element, spec.output.bytes() as usize];
        let buffer =
            |index: usize| DeviceBuffer::new(device, rows[index] * spec.strides[index] * bytes[index]);
        let [a, b, d] = [buffer(0)?, buffer(1)?, buffer(2)?];
        let fill = RandomFill::new(device, spec.element.scalar())?;
        fill.launch(&stream, &a, SEED_A)?;
        fill.launch(&stream, &b, SEED_B)?;
        stream.synchronize()?;
        let flush = Flush::new(device)?;
        Ok(Self { stream, spec: spec.clone(), a, b, d, flush })
    }

    /// The stream by which products are made ready.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    fn launch(&self, runner: &GemmRunner) -> Result<(), CudaError> {
        let d = [self.d.address()];
        // Any numbers will do for a bias: it is as long as a row of B is at least.
        let (a, b) = ([self.a.address()], self.b.address());
        let tensors = GemmTensors { a: &a, b, d: &d, bias: b, counters: &[] };
        // SAFETY: the tensors are those of the spec; they live as long as this value, and are freed after what is enqueued.
        unsafe { runner.launch(&self.stream, &tensors) }
    }

    /// Runs once, over NaN or over what is added to, and compares a sample with f64.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn error(&self, runner: &GemmRunner) -> Result<GemmError, CudaError> {
        if self.spec.epilogue == GemmEpilogue::Accumulate {
            RandomFill::new(self.stream.device(), self.spec.output)?.launch(&self.stream, &self.d, SEED_D)?;
        } else {
            self.d.fill(&self.stream, 0xff)?;
        }
        self.launch(runner)?;
        let rows = sample(self.spec.size.m, 8);
        let columns = sample(self.spec.size.n, 24);
        let mut found = Vec::with_capacity(rows.len());
        for &row in &rows {
            found.push(self.row(row)?);
        }
        let spec = &self.spec;
        Ok(GemmError::of_sample(&rows, &columns, &found, &|row, column, found| {
            judge(spec, row, column, found)
        }))
    }

    fn row(&self, row: usize) -> Result<Vec<f64>, CudaError> {
        let Self { stream, spec, d, .. } = self;
        download_row(stream, d, spec.output, row * spec.strides[2], spec.size.n)
    }

    /// Seconds of each runner's runs by the device's clock. `order` has the numbers of those that run, one after the other, with the
    /// second level cache flushed before each.
    ///
    /// # Errors
    /// When the driver refuses or a run fails.
    pub fn seconds(&self, runners: &[GemmRunner], order: &[usize]) -> Result<Vec<Vec<f64>>, CudaError> {
        self.flush.seconds(&self.stream, runners.len(), order, |next| self.launch(&runners[next]))
    }
}

impl GemmError {
    /// Of a sample of elements, whose rows were `found` and are judged by threads.
    pub(super) fn of_sample(
        rows: &[usize],
        columns: &[usize],
        found: &[Vec<f64>],
        judge: &(dyn Fn(usize, usize, f64) -> Judged + Sync),
    ) -> Self {
        let parts: Vec<Vec<Judged>> = thread::scope(|scope| {
            let judge = |(&row, found): (&usize, &Vec<f64>)| {
                let found = found.clone();
                scope.spawn(move || columns.iter().map(|&column| judge(row, column, found[column])).collect())
            };
            let threads: Vec<_> = rows.iter().zip(found).map(judge).collect();
            threads.into_iter().filter_map(|thread| thread.join().ok()).collect()
        });
        let all: Vec<&Judged> = parts.iter().flatten().collect();
        if all.len() != rows.len() * columns.len() {
            return Self { relative: f64::NAN, of_bound: f64::NAN };
        }
        let sum = |of: fn(&Judged) -> f64| all.iter().map(|judged| of(judged)).sum::<f64>();
        // Not `max`, which would overlook a NaN.
        let worse =
            |worst: f64, judged: &&Judged| if judged.of_bound <= worst { worst } else { judged.of_bound };
        Self {
            relative: (sum(|judged| judged.error * judged.error) / sum(|judged| judged.right * judged.right))
                .sqrt(),
            of_bound: all.iter().fold(0.0, worse),
        }
    }
}

impl Flush {
    pub(super) fn new(device: &Device) -> Result<Self, CudaError> {
        Ok(Self(DeviceBuffer::new(device, FLUSH_BYTES)?))
    }

    /// Seconds of each of `count` runners' runs by the device's clock, in the order of those that run, with the cache flushed before each.
    pub(super) fn seconds(
        &self,
        stream: &Stream,
        count: usize,
        order: &[usize],
        launch: impl Fn(usize) -> Result<(), CudaError>,
    ) -> Result<Vec<Vec<f64>>, CudaError> {
        let device = stream.device();
        let mut events = Vec::with_capacity(order.len());
        for &next in order {
            let (begin, end) = (Event::timing(device)?, Event::timing(device)?);
            self.0.fill(stream, 0)?;
            begin.record(stream)?;
            launch(next)?;
            end.record(stream)?;
            events.push((begin, end));
        }
        stream.synchronize()?;
        let mut seconds = vec![Vec::new(); count];
        for (&next, (begin, end)) in order.iter().zip(&events) {
            seconds[next].push(end.time_since(begin)?.as_secs_f64());
        }
        Ok(seconds)
    }
}

/// So many elements of a tensor from `first` on.
pub(super) fn download_row(
    stream: &Stream,
    tensor: &DeviceBuffer,
    scalar: Scalar,
    first: usize,
    count: usize,
) -> Result<Vec<f64>, CudaError> {
    let offset = first * scalar.bytes() as usize;
    Ok(match scalar {
        Scalar::F32 => tensor.download::<f32>(stream, offset, count)?.into_iter().map(f64::from).collect(),
        Scalar::Bf16 => tensor.download::<bf16>(stream, offset, count)?.into_iter().map(f64::from).collect(),
        Scalar::F16 => tensor.download::<f16>(stream, offset, count)?.into_iter().map(f64::from).collect(),
    })
}

/// Places spread over `size`, the first and the last among them.
pub(super) fn sample(size: usize, count: usize) -> Vec<usize> {
    let count = count.min(size);
    let steps = count.max(2) - 1;
    // Not all at multiples of a tile.
    (0..count)
        .map(|i| (i * (size - 1) / steps + (i * 37) % 61 * usize::from(i > 0 && i < steps)).min(size - 1))
        .collect()
}

/// An element and its error.
pub(super) struct Judged {
    right: f64,
    error: f64,
    pub(super) of_bound: f64,
}

/// What is added to an element's product.
pub(super) enum Added {
    Nothing,
    /// Before it is rounded.
    Bias(f64),
    /// The element that is there, to the rounded product.
    Held(f64),
}

impl Judged {
    /// What was `found` of an element of type `output`, by the terms of its sum.
    pub(super) fn new(output: Scalar, terms: impl Iterator<Item = f64>, added: &Added, found: f64) -> Self {
        let (mut right, mut squares, mut count) = (0.0, 0.0, 0);
        for term in terms {
            right += term;
            squares += term * term;
            count += 1;
        }
        let mut rounded = right.abs();
        match added {
            Added::Nothing => {}
            Added::Bias(bias) => right += bias,
            Added::Held(held) => {
                right += held;
                rounded += right.abs();
            }
        }
        let bound = element_bound(output, rounded.max(right.abs()), squares, count);
        let error = (found - right).abs();
        Self { right, error, of_bound: error / bound }
    }
}

fn judge(spec: &GemmSpec, row: usize, column: usize, found: f64) -> Judged {
    let scalar = spec.element.scalar();
    let [stride_a, stride_b, stride_d] = spec.strides;
    let value = |seed, stride: usize, row: usize, column: usize| {
        f64::from(RandomFill::value(scalar, seed, (row * stride + column) as u64))
    };
    let a_along_k = spec.layout.a_dims(1, 2) == [1, 2];
    let b_along_k = spec.layout.b_dims(1, 2) == [1, 2];
    let term = |k: usize| {
        let a = if a_along_k { value(SEED_A, stride_a, row, k) } else { value(SEED_A, stride_a, k, row) };
        let b =
            if b_along_k { value(SEED_B, stride_b, column, k) } else { value(SEED_B, stride_b, k, column) };
        a * b
    };
    let added = match spec.epilogue {
        GemmEpilogue::Store => Added::Nothing,
        GemmEpilogue::StoreBias => Added::Bias(value(SEED_B, stride_b, 0, column)),
        GemmEpilogue::Accumulate => {
            let index = (row * stride_d + column) as u64;
            Added::Held(f64::from(RandomFill::value(spec.output, SEED_D, index)))
        }
    };
    Judged::new(spec.output, (0..spec.size.k).map(term), &added, found)
}

/// What an element may err: half a unit in the last place of its type, and what a sum in f32 loses whose every step of 16 terms
/// may cut off a unit of a partial sum. Partial sums are taken to be within 4 standard deviations.
pub fn element_bound(output: Scalar, magnitude: f64, squares: f64, k: usize) -> f64 {
    let half_unit = match output {
        Scalar::F32 => 2f64.powi(-24),
        Scalar::Bf16 => 2f64.powi(-8),
        Scalar::F16 => 2f64.powi(-11),
    };
    // Elements of f16 may be smaller than it has normal numbers.
    let smallest = if output == Scalar::F16 { 2f64.powi(-25) } else { 0.0 };
    let steps = (k as f64 / 16.0).ceil() + 2.0;
    1.01 * half_unit * magnitude + smallest + steps * 2f64.powi(-23) * (4.0 * squares.sqrt() + magnitude)
}
