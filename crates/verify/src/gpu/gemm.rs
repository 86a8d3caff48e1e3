//! Checks of the GEMM kernel: random layouts, types, tiles and epilogues against f64, and its bits against the plainest launch.

use std::thread;

use counterpoint_reference::selftest::{Extent, SelfCheck, Share};
use half::{bf16, f16};

use super::receivers;
use super::subject::clean;
use crate::case_fault::CaseFault;
use counterpoint_bench::gpu::element_bound;
use counterpoint_cuda::kernel::{
    ElementType, Gemm, GemmEpilogue, GemmGrid, GemmLayout, GemmRows, GemmShape, GemmSignals, GemmSpec,
    GemmTensors, RandomFill, Scalar, TileOrder, Warpgroups,
};
use counterpoint_cuda::{CudaError, Device, DeviceBuffer, MemoryGuard, Stream, StreamPriority};

/// Bytes that outputs hold before a run, and where nothing may be written after it.
const POISON: u8 = 0xff;
/// Rows of a tile.
const TILE_ROWS: usize = 128;
/// Launches of a case, so that what a launch leaves behind is what the next one finds.
const LAUNCHES: usize = 2;

/// Random matrix products: every layout, type, tile, epilogue and order, sizes that no tile divides, operands and results in
/// pieces, rows that lie further apart than they are long, k in parts. All elements are compared with f64, then with the bits of the plainest launch of the same
/// shape. `checked` hears of every check, with how many there are.
///
/// # Errors
/// When the GPU is not one that the kernel is for: no check can be made then.
pub fn selftest_gemm(
    device: &Device,
    extent: Extent,
    share: Share,
    mut checked: impl FnMut(&SelfCheck, usize),
) -> Result<Vec<SelfCheck>, CudaError> {
    let count = match extent {
        Extent::Full => 96,
        Extent::Quick => 12,
    };
    let stream = Stream::new(device, StreamPriority::Low)?;
    let mut checks = Vec::new();
    for seed in (0..count).filter(|seed| share.takes(*seed as usize)) {
        let case = Case::random(&stream, seed)?;
        let name = case.describe();
        let guard = MemoryGuard::begin(device);
        let outcome = case.run(&stream);
        let guarded = clean(&guard.report());
        drop(guard);
        let check = match (outcome, guarded) {
            (Ok(share), Ok(())) => SelfCheck::of(name, seed, share, 1.0),
            (Ok(_), Err(error)) => SelfCheck::failed(name, seed, error.to_string()),
            (Err(reason), _) => SelfCheck::failed(name, seed, reason.to_string()),
        };
        checked(&check, share.count(count as usize));
        checks.push(check);
    }
    Ok(checks)
}

struct Case {
    seed: u64,
    spec: GemmSpec,
    shape: GemmShape,
}

/// A few random choices.
pub(super) struct Dice(pub(super) u64);

impl Dice {
    pub(super) fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % end.max(1)
    }
    pub(super) fn of<T: Clone>(&mut self, values: &[T]) -> T {
        values[self.below(values.len())].clone()
    }
}

/// Has receivers get columns: groups that tiles of several widths fit, of which portable kernels take equal ones.
fn receive_columns(dice: &mut Dice, spec: &mut GemmSpec, device: &Device) {
    let groups = dice.of(&[2, 3, 4]);
    spec.column_receivers = vec![64 * (1 + dice.below(4)); groups];
    if device.arch().is_hopper() {
        spec.column_receivers[0] += dice.of(&[0, 64, 192]);
        spec.column_receivers[groups - 1] += 8 * dice.below(9);
    }
    let ends = spec.column_receivers.iter().scan(0, |end, columns| {
        *end += columns;
        Some(*end)
    });
    spec.order = TileOrder::ColumnCuts(ends.take(groups - 1).collect());
    spec.size.n = spec.column_receivers.iter().sum();
    spec.pass_columns = spec.size.n;
}

impl Case {
    fn random(stream: &Stream, seed: u64) -> Result<Self, CudaError> {
        let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) + 1);
        let element = dice.of(&ElementType::ALL);
        let layout = dice.of(&GemmLayout::ALL);
        // One size in four has more tiles than a GPU computes at once.
        let (m, n, k) = match dice.below(4) {
            0 => (1 + dice.below(2000), 1 + dice.below(1800), 1 + dice.below(150)),
            1 => (1 + dice.below(300), 1 + dice.below(300), 1 + dice.below(2500)),
            _ => (1 + dice.below(500), 1 + dice.below(600), 1 + dice.below(600)),
        };
        let mut spec = GemmSpec::new(m, n, k, layout, element);
        spec.output = dice.of(&[element.scalar(), Scalar::F32]);
        spec.epilogue = dice.of(&[GemmEpilogue::Store, GemmEpilogue::StoreBias, GemmEpilogue::Accumulate]);
        if dice.below(3) == 0 {
            let receivers = dice.of(&[2, 3, 4]);
            if dice.below(2) == 0 {
                // Whole units, for the order that goes round them.
                spec.size.m = receivers * 256 * (1 + dice.below(2));
                spec.pass_rows = spec.size.m;
                spec.receivers = vec![spec.size.m / receivers; receivers];
                spec.order = TileOrder::Shards { shards: receivers, first: dice.below(receivers) };
            } else {
                // Where A lies along m, its rows begin at multiples of 16 bytes.
                let unit = if layout == GemmLayout::Tn { 8 } else { 1 };
                spec.receivers = cut(&mut dice, spec.size.m, receivers, unit);
            }
        }
        let in_columns = spec.receivers.len() == 1 && dice.below(5) == 0;
        if in_columns {
            receive_columns(&mut dice, &mut spec, stream.device());
        }
        let n = spec.size.n;
        let rows = layout.a_dims(spec.size.m, k)[0];
        spec.sources = vec![GemmRows { tensor: 0, first: 0, count: rows }];
        let ordered = spec.order != TileOrder::Grouped;
        if dice.below(2) == 0 && !ordered {
            // K comes in whole blocks, and end with a tensor.
            let unit = if layout == GemmLayout::Tn { 64 } else { 1 };
            let mut first = 0;
            let pieces = cut(&mut dice, rows, 3, unit);
            spec.sources = pieces
                .into_iter()
                .enumerate()
                .map(|(index, count)| {
                    first += count;
                    GemmRows { tensor: (index + 1) % 2, first: first - count, count }
                })
                .collect();
            if layout != GemmLayout::Tn {
                spec.sources.rotate_left(1);
            }
        }
        let columns = [layout.a_dims(spec.size.m, k)[1], layout.b_dims(n, k)[1], n];
        spec.strides = columns.map(|columns| columns.next_multiple_of(8) + 8 * dice.below(3));
        if in_columns {
            spec.strides[2] = n;
        }
        spec.sm_margin = dice.of(&[0, 0, 5, 100]) as u32;
        spec.grid = dice.of(&[GemmGrid::Persistent, GemmGrid::PerUnit]);
        let shape = dice.of(&Gemm::shapes(stream.device(), &spec)?);
        let units = Gemm::with_shape(stream, &spec, shape)?.units().len();
        if spec.order == TileOrder::Grouped {
            let cut = spec.size.m.div_ceil(TILE_ROWS).min(1 + dice.below(3));
            spec.order = match dice.below(4) {
                0 => TileOrder::Table((0..units as u32).rev().collect()),
                1 => TileOrder::Cuts([cut].into()),
                _ => TileOrder::Grouped,
            };
        }
        let groups = 1 + dice.below(units.min(5));
        let sizes = (0..groups).map(|i| ((i + 1) * units / groups - i * units / groups) as u32).collect();
        spec.signals = match dice.below(4) {
            0 => GemmSignals::None,
            3 => GemmSignals::Receivers,
            1 => GemmSignals::Device { sizes },
            _ => GemmSignals::System { sizes },
        };
        Ok(Self { seed, spec, shape })
    }

    fn describe(&self) -> String {
        let GemmSpec { size, layout, element, output, epilogue, sources, receivers, sm_margin, grid, .. } =
            &self.spec;
        let GemmShape { columns, pair, warpgroups, splits, serial_parts, handed_parts } = self.shape;
        let order = match &self.spec.order {
            TileOrder::Grouped => "grouped",
            TileOrder::Shards { .. } => "by shards",
            TileOrder::ShardBlocks { .. } => "by blocks of shards",
            TileOrder::ShardAhead { .. } => "with a shard ahead",
            TileOrder::Cuts(_) => "with cuts",
            TileOrder::ColumnCuts(_) => "with cuts of columns",
            TileOrder::Table(_) => "by a table",
        };
        let signals = match &self.spec.signals {
            GemmSignals::None => 0,
            GemmSignals::Receivers => receivers.len().max(self.spec.column_receivers.len()),
            GemmSignals::Device { sizes } | GemmSignals::System { sizes } => sizes.len(),
        };
        format!(
            "{} {} {size} to {}, {epilogue:?}, tiles of {columns} in {pair:?}, {warpgroups:?}, {splits} parts of K, {serial_parts} serial \
             and {handed_parts} handed over, {order}, \
             {} pieces, {} receivers, columns of receivers {:?}, {signals} groups, {grid:?}, margin {sm_margin}",
            element.name(),
            layout.name(),
            output.name(),
            sources.len(),
            receivers.len(),
            self.spec.column_receivers,
        )
    }

    /// The largest share of an element's bound, or what else is wrong.
    fn run(&self, stream: &Stream) -> Result<f64, CaseFault> {
        let tensors = Tensors::new(stream, &self.spec, self.seed)?;
        let (special, heard) = self.launch(stream, &self.spec, self.shape, &tensors)?;
        let gemm = Gemm::with_shape(stream, &self.spec, self.shape)?;
        let wanted: Vec<u32> = gemm.signals_of().iter().map(|signals| signals * LAUNCHES as u32).collect();
        if heard != wanted {
            return Err(CaseFault::Counters { counted: heard, wanted });
        }
        let plain = GemmSpec {
            order: TileOrder::Grouped,
            receivers: vec![self.spec.size.m],
            column_receivers: Vec::new(),
            signals: GemmSignals::None,
            sm_margin: 0,
            grid: GemmGrid::Persistent,
            ..self.spec.clone()
        };
        // Bits depend on the parts of k alone.
        let alike = |shape: &GemmShape| {
            shape.parts() == self.shape.parts() && shape.warpgroups != Warpgroups::Pingpong
        };
        let shapes = Gemm::shapes(stream.device(), &plain)?;
        let shape = shapes.into_iter().find(alike).unwrap_or(self.shape);
        let (plain, _) = self.launch(stream, &plain, shape, &tensors)?;
        let unlike = special.iter().zip(&plain).filter(|(a, b)| a != b).count();
        if unlike > 0 || special.len() != plain.len() {
            return Err(CaseFault::UnlikePlain { bytes: unlike });
        }
        self.judge(&special, &tensors)
    }

    /// Bytes of D with all destinations' rows together, and what counters rose by.
    fn launch(
        &self,
        stream: &Stream,
        spec: &GemmSpec,
        shape: GemmShape,
        tensors: &Tensors,
    ) -> Result<(Vec<u8>, Vec<u32>), CudaError> {
        let device = stream.device();
        let gemm = Gemm::with_shape(stream, spec, shape)?;
        let row_bytes = spec.strides[2] * spec.output.bytes() as usize;
        let groups = gemm.signals_of().len();
        let mut d = Vec::new();
        let mut counters = Vec::new();
        let places = receivers::places_of(spec);
        for place in &places {
            let before: Vec<u8> =
                place.lines(row_bytes).flat_map(|line| tensors.d_before[line].to_vec()).collect();
            let share = DeviceBuffer::new(device, before.len())?;
            share.upload(stream, 0, &before)?;
            d.push(share);
            if groups > 0 {
                counters.push(DeviceBuffer::from_slice(stream, &vec![0u32; groups])?);
            }
        }
        let addresses =
            |buffers: &[DeviceBuffer]| buffers.iter().map(DeviceBuffer::address).collect::<Vec<_>>();
        let (d_addresses, counter_addresses) = (addresses(&d), addresses(&counters));
        let a: Vec<u64> = tensors.a.iter().map(DeviceBuffer::address).collect();
        let arguments = GemmTensors {
            a: &a,
            b: tensors.b.address(),
            d: &d_addresses,
            bias: tensors.bias.address(),
            counters: &counter_addresses,
        };
        for _ in 0..LAUNCHES {
            // SAFETY: the tensors are those of the spec, and live until the downloads below have waited for the stream.
            unsafe { gemm.launch(stream, &arguments) }?;
        }
        let mut all = vec![0; spec.size.m * row_bytes];
        for (place, share) in places.iter().zip(&d) {
            let bytes = share.download::<u8>(stream, 0, share.len())?;
            for (line, bytes) in place.lines(row_bytes).zip(bytes.chunks_exact(place.bytes.len())) {
                all[line].copy_from_slice(bytes);
            }
        }
        let mut heard = vec![0; groups];
        if spec.signals == GemmSignals::Receivers {
            for (share, counter) in heard.iter_mut().zip(&counters) {
                *share = counter.download::<u32>(stream, 0, 1)?[0];
            }
            return Ok((all, heard));
        }
        for counter in &counters {
            for (sum, value) in heard.iter_mut().zip(counter.download::<u32>(stream, 0, groups)?) {
                *sum += value;
            }
        }
        Ok((all, heard))
    }

    /// The largest share of an element's bound, or where one is beyond it. Rows are dealt among threads.
    fn judge(&self, found: &[u8], tensors: &Tensors) -> Result<f64, CaseFault> {
        let spec = &self.spec;
        let (a, b) = (&tensors.rows_of_a(spec), &tensors.columns_of_b(spec));
        let threads = thread::available_parallelism().map_or(1, usize::from).min(spec.size.m);
        thread::scope(|scope| {
            let part = |part: usize| {
                let rows = spec.size.m * part / threads..spec.size.m * (part + 1) / threads;
                scope.spawn(move || {
                    rows.map(|row| {
                        self.judge_row(row, found, tensors, &a[row * spec.size.k..][..spec.size.k], b)
                    })
                    .try_fold(0.0, |worst, share| share.map(|share| f64::max(worst, share)))
                })
            };
            let parts: Vec<_> = (0..threads).map(part).collect();
            let ended = |_| Err(CaseFault::EndedEarly);
            let shares = parts.into_iter().map(|part| part.join().unwrap_or_else(ended));
            shares.into_iter().try_fold(0.0, |worst, share| share.map(|share| f64::max(worst, share)))
        })
    }

    fn judge_row(
        &self,
        row: usize,
        found: &[u8],
        tensors: &Tensors,
        a: &[f32],
        b: &[f32],
    ) -> Result<f64, CaseFault> {
        let spec = &self.spec;
        let width = spec.output.bytes() as usize;
        let mut worst = 0.0;
        for column in 0..spec.strides[2] {
            let at = (row * spec.strides[2] + column) * width;
            let (found, before) = (&found[at..at + width], &tensors.d_before[at..at + width]);
            if column >= spec.size.n {
                if found != before {
                    return Err(CaseFault::PastEnd { row, column });
                }
                continue;
            }
            let (mut right, mut squares) = (0.0f64, 0.0f64);
            for (x, y) in a.iter().zip(&b[column * spec.size.k..][..spec.size.k]) {
                let term = f64::from(*x) * f64::from(*y);
                right += term;
                squares += term * term;
            }
            let mut magnitude = right.abs();
            let mut k = spec.size.k;
            match spec.epilogue {
                GemmEpilogue::Store => {}
                GemmEpilogue::StoreBias => {
                    let bias = RandomFill::value(spec.element.scalar(), tensors.seed + 2, column as u64);
                    right += f64::from(bias);
                    magnitude += right.abs();
                }
                GemmEpilogue::Accumulate => {
                    let before = decode(spec.output, before);
                    // Each launch rounds the product and the sum.
                    let sums = (1..=LAUNCHES).map(|launch| (before + launch as f64 * right).abs());
                    magnitude = LAUNCHES as f64 * right.abs() + sums.sum::<f64>();
                    right = before + LAUNCHES as f64 * right;
                    k *= LAUNCHES;
                }
            }
            let bound = element_bound(spec.output, magnitude.max(right.abs()), squares, k);
            let share = (decode(spec.output, found) - right).abs() / bound;
            if share.is_nan() || share > 1.0 {
                return Err(CaseFault::OutOfBound { row, column, share });
            }
            worst = f64::max(worst, share);
        }
        Ok(worst)
    }
}

struct Tensors {
    seed: u64,
    /// As many as the sources name.
    a: Vec<DeviceBuffer>,
    b: DeviceBuffer,
    bias: DeviceBuffer,
    /// Poison, and what is added to where something is.
    d_before: Vec<u8>,
}

impl Tensors {
    fn new(stream: &Stream, spec: &GemmSpec, seed: u64) -> Result<Self, CudaError> {
        let device = stream.device();
        let scalar = spec.element.scalar();
        let bytes = spec.element.bytes();
        let fill = RandomFill::new(device, scalar)?;
        let seed = seed * 10;
        let filled = |elements: usize, seed: u64| -> Result<DeviceBuffer, CudaError> {
            let buffer = DeviceBuffer::new(device, elements * bytes)?;
            fill.launch(stream, &buffer, seed)?;
            Ok(buffer)
        };
        // The last row has no padding behind it.
        let elements = |[rows, columns]: [usize; 2], stride: usize| (rows - 1) * stride + columns;
        let width = spec.output.bytes() as usize;
        let mut d_before = vec![POISON; spec.size.m * spec.strides[2] * width];
        if spec.epilogue == GemmEpilogue::Accumulate {
            for row in 0..spec.size.m {
                for column in 0..spec.size.n {
                    let index = row * spec.strides[2] + column;
                    let value = RandomFill::value(spec.output, seed + 3, index as u64);
                    d_before[index * width..(index + 1) * width]
                        .copy_from_slice(&encode(spec.output, value)[..width]);
                }
            }
        }
        let count = spec.sources.iter().map(|source| source.tensor + 1).max().unwrap_or(0);
        let a = |tensor: usize| {
            let read = spec.sources.iter().filter(|source| source.tensor == tensor);
            let rows = read.map(|source| source.first + source.count).max().unwrap_or(1);
            let columns = spec.layout.a_dims(spec.size.m, spec.size.k)[1];
            filled(elements([rows, columns], spec.strides[0]), seed + 4 + tensor as u64)
        };
        Ok(Self {
            seed,
            a: (0..count).map(a).collect::<Result<_, _>>()?,
            b: filled(elements(spec.layout.b_dims(spec.size.n, spec.size.k), spec.strides[1]), seed + 1)?,
            bias: filled(spec.size.n, seed + 2)?,
            d_before,
        })
    }

    /// A as `[m, k]`.
    fn rows_of_a(&self, spec: &GemmSpec) -> Vec<f32> {
        let places: Vec<(usize, usize)> = spec
            .sources
            .iter()
            .flat_map(|source| (source.first..source.first + source.count).map(|row| (source.tensor, row)))
            .collect();
        let scalar = spec.element.scalar();
        let value = |row: usize, column: usize| {
            let (tensor, row) = places[row];
            let index = row * spec.strides[0] + column;
            RandomFill::value(scalar, self.seed + 4 + tensor as u64, index as u64)
        };
        let along_k = spec.layout.a_dims(1, 2) == [1, 2];
        let all = (0..spec.size.m).flat_map(|row| (0..spec.size.k).map(move |k| (row, k)));
        all.map(|(row, k)| if along_k { value(row, k) } else { value(k, row) }).collect()
    }

    /// B as `[n, k]`.
    fn columns_of_b(&self, spec: &GemmSpec) -> Vec<f32> {
        let along_k = spec.layout.b_dims(1, 2) == [1, 2];
        let stride = spec.strides[1];
        let place = |row: usize, k: usize| if along_k { row * stride + k } else { k * stride + row };
        let all = (0..spec.size.n).flat_map(|row| (0..spec.size.k).map(move |k| (row, k)));
        let value = |(row, k)| RandomFill::value(spec.element.scalar(), self.seed + 1, place(row, k) as u64);
        all.map(value).collect()
    }
}

/// `length` in at most `parts` ranges, all but the last of them multiples of `unit`.
fn cut(dice: &mut Dice, length: usize, parts: usize, unit: usize) -> Vec<usize> {
    let mut rest = length;
    let mut counts = Vec::new();
    for _ in 1..parts {
        let count = (1 + dice.below(length / parts)).next_multiple_of(unit);
        if count < rest {
            counts.push(count);
            rest -= count;
        }
    }
    counts.push(rest);
    counts
}

pub(super) fn encode(scalar: Scalar, value: f32) -> [u8; 4] {
    let mut bytes = [0; 4];
    match scalar {
        Scalar::F32 => bytes = value.to_le_bytes(),
        Scalar::Bf16 => bytes[..2].copy_from_slice(&bf16::from_f32(value).to_le_bytes()),
        Scalar::F16 => bytes[..2].copy_from_slice(&f16::from_f32(value).to_le_bytes()),
    }
    bytes
}

pub(super) fn decode(scalar: Scalar, bytes: &[u8]) -> f64 {
    match (scalar, bytes) {
        (Scalar::F32, &[a, b, c, d]) => f64::from(f32::from_le_bytes([a, b, c, d])),
        (Scalar::Bf16, &[a, b]) => f64::from(bf16::from_le_bytes([a, b])),
        (Scalar::F16, &[a, b]) => f64::from(f16::from_le_bytes([a, b])),
        _ => f64::NAN,
    }
}
