//! What a device must do for the backend. Each test says so and passes where there is no GPU or no compiler.
#![allow(unsafe_code)]

use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use counterpoint_cuda::kernel::specialisations;
use counterpoint_cuda::{
    CACHE_VARIABLE, CubinCache, CudaError, Device, DeviceBuffer, Event, Function, Graph, KernelSource,
    Launch, LaunchStart, PinnedBuffer, Stream, StreamPriority, Swizzle, TensorMapElement, TensorMapSpec,
    compiler_version, kernel_source,
};

fn device() -> Option<Device> {
    let device = compiler_version().and_then(|_| Device::open(0));
    match device {
        Ok(device) => Some(device),
        Err(error) if error.is_missing() => {
            println!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Adds `by` to `count` numbers.
fn add(device: &Device) -> Function {
    let source = KernelSource::new("add", device.arch())
        .line("extern \"C\" __global__ void add(unsigned* x, unsigned count, unsigned by) {")
        .line("  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;")
        .line("  if (i < count) x[i] += by;")
        .line("}");
    device.function(&source).unwrap()
}

fn enqueue_add(add: &Function, stream: &Stream, x: &DeviceBuffer, by: u32) -> Result<(), CudaError> {
    let count = (x.len() / 4) as u32;
    // SAFETY: the buffer holds `count` numbers and is kept by its test until the device is idle.
    unsafe { add.launch(stream, &Launch::linear(count.div_ceil(128), 128), &(x.address(), count, by)) }
}

#[test]
fn properties_and_memory() {
    let Some(device) = device() else { return };
    let properties = device.properties();
    println!("{properties:?}, driver {:?}, {:?}", Device::driver_version(), device.memory());
    assert!(properties.sm_count > 0 && properties.shared_bytes_per_block >= 48 << 10);
    assert_eq!(Device::properties_of(0).unwrap(), *properties);
    let count = Device::count().unwrap();
    assert_eq!(Device::open(count), Err(CudaError::DeviceOrdinal { ordinal: count, count }));
    assert_eq!(Device::open(0).unwrap(), device);

    let before = device.memory().unwrap();
    let buffer = DeviceBuffer::new(&device, 1 << 30).unwrap();
    assert!(before.free - device.memory().unwrap().free >= 1 << 30);
    let part = buffer.slice(256..512).unwrap();
    assert_eq!((part.address() - buffer.address(), part.len()), (256, 256));
    assert!(buffer.slice(0..(1 << 30) + 1).is_err());
    drop(buffer);
    assert!(before.free - device.memory().unwrap().free >= 1 << 30, "the slice keeps it");
    drop(part);
    let error = DeviceBuffer::new(&device, before.total + 1).unwrap_err();
    assert!(matches!(error, CudaError::OutOfMemory { bytes, .. } if bytes == before.total + 1), "{error}");
    assert_eq!(DeviceBuffer::new(&device, 0).unwrap().address(), 0);
    assert_eq!(device.take_release_error(), None);
}

#[test]
fn copies_and_fills() {
    let Some(device) = device() else { return };
    let stream = Stream::new(&device, StreamPriority::Low).unwrap();
    let values: Vec<u32> = (0..100_000).collect();
    let buffer = DeviceBuffer::from_slice(&stream, &values).unwrap();
    assert_eq!(buffer.download::<u32>(&stream, 4, 3).unwrap(), [1, 2, 3]);
    assert!(buffer.download::<u32>(&stream, 4, 100_000).is_err());
    assert!(buffer.upload(&stream, 1, &values).is_err());

    let other = DeviceBuffer::new(&device, buffer.len()).unwrap();
    other.fill(&stream, 0xa5).unwrap();
    other.copy_from(&stream, 400, &buffer.slice(0..400).unwrap()).unwrap();
    let words = other.download::<u32>(&stream, 0, 201).unwrap();
    assert_eq!((words[99], words[100], words[199], words[200]), (0xa5a5_a5a5, 0, 99, 0xa5a5_a5a5));
    other.fill_words(&stream, f32::NAN.to_bits()).unwrap();
    assert!(other.download::<f32>(&stream, 0, 100_000).unwrap().iter().all(|x| x.is_nan()));

    let pinned = PinnedBuffer::new(&device, buffer.len()).unwrap();
    pinned.write(0, &values).unwrap();
    let mut read = vec![0u32; values.len()];
    pinned.read(0, &mut read).unwrap();
    assert_eq!(read, values);
    pinned.write(8, &[77u32]).unwrap();
    other.slice(0..12).unwrap().copy_from_pinned(&stream, &pinned, 4).unwrap();
    assert_eq!(other.download::<u32>(&stream, 0, 3).unwrap(), [1, 77, 3]);
    assert!(pinned.write(buffer.len() - 1, &[0u16]).is_err());

    // SAFETY: `buffer` outlives it.
    let borrowed = unsafe { DeviceBuffer::borrow(&device, buffer.address(), 16) };
    assert_eq!(borrowed.download::<u32>(&stream, 0, 4).unwrap(), [0, 1, 2, 3]);
    drop(borrowed);
    // SAFETY: `stream` outlives it.
    let same = unsafe { Stream::borrow(&device, stream.raw()) };
    drop(same.clone());
    drop(same);
    assert_eq!(buffer.download::<u32>(&stream, 0, 1).unwrap(), [0]);
    assert_eq!(device.take_release_error(), None);
}

#[test]
fn launches_are_checked() {
    let Some(device) = device() else { return };
    let stream = Stream::new(&device, StreamPriority::High).unwrap();
    let add = add(&device);
    assert_eq!(add.argument_bytes(), [8, 4, 4]);
    assert_eq!(add.attributes().local_bytes, 0);
    assert!(add.blocks_per_sm(128, 0).unwrap() >= 8);
    let x = DeviceBuffer::from_slice(&stream, &[5u32; 1000]).unwrap();
    enqueue_add(&add, &stream, &x, 3).unwrap();
    assert_eq!(x.download::<u32>(&stream, 0, 1000).unwrap(), [8; 1000]);

    let refused = |launch: Launch| {
        // SAFETY: as in enqueue_add, if it were launched.
        unsafe { add.launch(&stream, &launch, &(x.address(), 1000u32, 1u32)) }.unwrap_err().to_string()
    };
    assert!(refused(Launch::linear(1, 2048)).contains("compiled for 1024"));
    assert!(refused(Launch::linear(0, 128)).contains("empty"));
    assert!(refused(Launch::linear(1, 128).shared_bytes(1 << 20)).contains("1048576 bytes"));
    assert!(refused(Launch::linear(3, 128).cluster([2, 1, 1])).contains("not a multiple of clusters"));
    // SAFETY: as above.
    let error = unsafe { add.launch(&stream, &Launch::linear(1, 128), &(x.address(), 1000u64, 1u32)) };
    assert!(error.unwrap_err().to_string().contains("arguments of [8, 8, 4] bytes, it takes [8, 4, 4]"));
    assert_eq!(x.download::<u32>(&stream, 0, 1000).unwrap(), [8; 1000]);

    let wrong =
        KernelSource::new("wrong", device.arch()).line("extern \"C\" __global__ void wrong() { nonsense; }");
    let error = device.function(&wrong).unwrap_err().to_string();
    assert!(error.contains("wrong") && error.contains("nonsense"), "{error}");
    let absent = KernelSource::new("absent", device.arch()).line("extern \"C\" __global__ void present() {}");
    assert!(device.function(&absent).is_err());
}

#[test]
fn launches_cost_microseconds() {
    let Some(device) = device() else { return };
    let stream = Stream::new(&device, StreamPriority::Low).unwrap();
    let add = add(&device);
    let x = DeviceBuffer::from_slice(&stream, &[0u32; 64]).unwrap();
    let best = (0..20).map(|_| {
        stream.synchronize().unwrap();
        let start = Instant::now();
        for _ in 0..100 {
            enqueue_add(&add, &stream, &x, 1).unwrap();
        }
        start.elapsed() / 100
    });
    let best = best.min().unwrap();
    println!("a launch takes the host {best:?}");
    assert_eq!(x.download::<u32>(&stream, 0, 64).unwrap(), [2000; 64]);
    assert!(best < Duration::from_micros(50), "{best:?}");
}

#[test]
fn all_shared_memory_clusters_and_overlapping_starts() {
    let Some(device) = device() else { return };
    if device.capability().major < 9 {
        return println!("skipped: capability {}", device.capability());
    }
    let stream = Stream::new(&device, StreamPriority::Low).unwrap();
    let source = KernelSource::new("ranks", device.arch())
        .line("extern __shared__ unsigned char memory[];")
        .line("extern \"C\" __global__ void ranks(unsigned* out, unsigned last) {")
        .line("  asm volatile(\"griddepcontrol.wait;\" ::: \"memory\");")
        .line("  unsigned rank, size;")
        .line("  asm(\"mov.u32 %0, %cluster_ctarank; mov.u32 %1, %cluster_nctarank;\" : \"=r\"(rank), \"=r\"(size));")
        .line("  memory[last] = 7;")
        .line("  out[blockIdx.x] += 100 * size + 10 * rank + memory[last];")
        .line("  asm volatile(\"griddepcontrol.launch_dependents;\");")
        .line("}");
    let ranks = device.function(&source).unwrap();
    let bytes = ranks.attributes().max_dynamic_shared_bytes as u32;
    let out = DeviceBuffer::from_slice(&stream, &[0u32; 8]).unwrap();
    let launch = Launch::linear(8, 32).shared_bytes(bytes).cluster([4, 1, 1]).start(LaunchStart::Overlapping);
    for _ in 0..3 {
        // SAFETY: 8 blocks write 8 numbers; the buffer lives on.
        unsafe { ranks.launch(&stream, &launch, &(out.address(), bytes - 1)) }.unwrap();
    }
    let expected: [u32; 8] = std::array::from_fn(|block| 3 * (407 + 10 * (block as u32 % 4)));
    assert_eq!(out.download::<u32>(&stream, 0, 8).unwrap(), expected);
}

#[test]
fn tensor_maps_move_boxes() {
    let Some(device) = device() else { return };
    if !device.arch().is_hopper() {
        return println!("skipped: capability {}", device.capability());
    }
    let stream = Stream::new(&device, StreamPriority::Low).unwrap();
    // Rows of 2 heads of 64; a box is 4 rows of one head, of which the last two lie behind the tensor.
    let source = kernel_source("boxes", device.arch())
        .line("#include \"ptx/tma.cuh\"")
        .line("using namespace counterpoint;")
        .line("extern \"C\" __global__ void boxes(const __grid_constant__ TensorMap map, u16* out, i32 head, i32 row) {")
        .line("  __shared__ alignas(1024) u16 box[4 * 64];")
        .line("  __shared__ u64 barrier;")
        .line("  if (threadIdx.x == 0) {")
        .line("    mbarrier_init(&barrier, 1);")
        .line("    fence_mbarrier_init();")
        .line("    mbarrier_arrive_expect(&barrier, sizeof(box));")
        .line("    tma_load_3d(box, &map, &barrier, 0, head, row);")
        .line("  }")
        .line("  __syncthreads();")
        .line("  mbarrier_wait(&barrier, 0);")
        .line("  for (u32 i = threadIdx.x; i < 4 * 64; i += blockDim.x) out[i] = box[i];")
        .line("}");
    let boxes = device.function(&source).unwrap();
    assert_eq!(boxes.argument_bytes(), [128, 8, 4, 4]);
    let rows = 10;
    let values: Vec<u16> = (0..rows * 128).collect();
    let tensor = DeviceBuffer::from_slice(&stream, &values).unwrap();
    let out = DeviceBuffer::new(&device, 4 * 64 * 2).unwrap();
    for swizzle in [Swizzle::None, Swizzle::Span128] {
        let dims = [64, 2, u64::from(rows)];
        let spec =
            TensorMapSpec::new(TensorMapElement::Bf16, tensor.address(), dims, [64, 1, 4]).swizzle(swizzle);
        assert_eq!(spec.box_bytes(), 512);
        let map = spec.encode(&device, "x").unwrap();
        out.fill(&stream, 0xff).unwrap();
        // SAFETY: `out` holds one box.
        unsafe { boxes.launch(&stream, &Launch::linear(1, 64), &(map, out.address(), 1i32, 8i32)) }.unwrap();
        let found = out.download::<u16>(&stream, 0, 4 * 64).unwrap();
        for (index, &value) in found.iter().enumerate() {
            let (row, column) = (index / 64, index % 64);
            // Within 128 bytes, the 16-byte pieces of row r change places with those at an exclusive or with r.
            let column = if swizzle == Swizzle::None { column } else { column ^ (row % 8) << 3 };
            let expected = if row < 2 { values[(8 + row) * 128 + 64 + column] } else { 0 };
            assert_eq!(value, expected, "{swizzle:?}, row {row}, column {column}");
        }
    }
}

#[test]
fn events_order_streams_and_take_times() {
    let Some(device) = device() else { return };
    let [first, second] =
        [StreamPriority::Low, StreamPriority::High].map(|priority| Stream::new(&device, priority).unwrap());
    let source = KernelSource::new("spin", device.arch())
        .line("extern \"C\" __global__ void spin(unsigned* x, unsigned long long nanoseconds) {")
        .line("  unsigned long long start, now;")
        .line("  asm volatile(\"mov.u64 %0, %globaltimer;\" : \"=l\"(start));")
        .line("  do asm volatile(\"mov.u64 %0, %globaltimer;\" : \"=l\"(now)); while (now - start < nanoseconds);")
        .line("  *x = 41;")
        .line("}");
    let (spin, add) = (device.function(&source).unwrap(), add(&device));
    let x = DeviceBuffer::from_slice(&first, &[0u32]).unwrap();
    let [start, end] = [0, 1].map(|_| Event::timing(&device).unwrap());
    let done = Event::new(&device).unwrap();
    assert!(done.is_done().unwrap(), "nothing recorded, nothing to wait for");
    start.record(&first).unwrap();
    // SAFETY: x holds one number.
    unsafe { spin.launch(&first, &Launch::linear(1, 1), &(x.address(), 20_000_000u64)) }.unwrap();
    end.record(&first).unwrap();
    done.record(&first).unwrap();
    assert!(!done.is_done().unwrap() && !first.is_idle().unwrap());
    second.wait(&done).unwrap();
    enqueue_add(&add, &second, &x, 1).unwrap();
    assert_eq!(x.download::<u32>(&second, 0, 1).unwrap(), [42]);
    end.synchronize().unwrap();
    let time = end.time_since(&start).unwrap();
    assert!(time >= Duration::from_millis(20) && time < Duration::from_millis(40), "{time:?}");
    assert!(done.time_since(&start).is_err(), "takes no time stamps");
    assert!(first.is_idle().unwrap());
}

#[test]
fn graphs_replay() {
    let Some(device) = device() else { return };
    let [first, second] = [0, 1].map(|_| Stream::new(&device, StreamPriority::Low).unwrap());
    let add = add(&device);
    let [x, y] = [0, 1].map(|_| DeviceBuffer::from_slice(&first, &[0u32; 500]).unwrap());
    let [fork, join] = [0, 1].map(|_| Event::new(&device).unwrap());
    let graph = Graph::capture(&first, || -> Result<(), CudaError> {
        enqueue_add(&add, &first, &x, 1)?;
        fork.record(&first)?;
        second.wait(&fork)?;
        enqueue_add(&add, &second, &y, 10)?;
        join.record(&second)?;
        enqueue_add(&add, &first, &x, 1)?;
        first.wait(&join)
    })
    .unwrap();
    graph.upload(&first).unwrap();
    assert_eq!(x.download::<u32>(&first, 0, 1).unwrap(), [0], "capturing runs nothing");
    for _ in 0..3 {
        // SAFETY: buffers and functions live on.
        unsafe { graph.launch(&first) }.unwrap();
    }
    assert_eq!(x.download::<u32>(&first, 0, 500).unwrap(), [6; 500]);
    assert_eq!(y.download::<u32>(&first, 0, 500).unwrap(), [30; 500]);

    // What a capture that has ended left in an event is no wait, and another stream joins no capture by following.
    second.wait(&fork).unwrap();
    let apart = Graph::capture(&first, || -> Result<(), CudaError> {
        fork.record(&first)?;
        second.follow(&fork)?;
        enqueue_add(&add, &second, &y, 10)?;
        enqueue_add(&add, &first, &x, 1)
    })
    .unwrap();
    assert_eq!(y.download::<u32>(&second, 0, 500).unwrap(), [40; 500]);
    assert_eq!(x.download::<u32>(&first, 0, 500).unwrap(), [6; 500]);
    drop(apart);
    enqueue_add(&add, &second, &y, 0xffff_fff6).unwrap();

    // A capture that fails, panics, waits or is not joined ends, and the stream goes on.
    let failed = Graph::capture(&first, || {
        enqueue_add(&add, &first, &x, 1)?;
        Err(CudaError::StreamGone)
    });
    assert_eq!(failed.unwrap_err(), CudaError::StreamGone);
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        Graph::capture(&first, || -> Result<(), CudaError> { panic!("in a capture") })
    }));
    assert!(panicked.is_err());
    assert!(Graph::capture(&first, || first.synchronize()).is_err());
    let unjoined = Graph::capture(&first, || {
        fork.record(&first)?;
        second.wait(&fork)?;
        enqueue_add(&add, &second, &y, 1)
    });
    println!("not joined: {}", unjoined.unwrap_err());
    enqueue_add(&add, &first, &x, 1).unwrap();
    assert_eq!(x.download::<u32>(&first, 0, 500).unwrap(), [7; 500]);
    enqueue_add(&add, &second, &y, 1).unwrap();
    assert_eq!(y.download::<u32>(&second, 0, 500).unwrap(), [31; 500]);
    let again = Graph::capture(&first, || enqueue_add(&add, &first, &x, 1)).unwrap();
    // SAFETY: as above.
    unsafe { again.launch(&first) }.unwrap();
    assert_eq!(x.download::<u32>(&first, 0, 1).unwrap(), [8]);
    assert_eq!(device.take_release_error(), None);
}

#[test]
fn threads_share_a_device() {
    let Some(device) = device() else { return };
    let sources: Arc<Vec<_>> = Arc::new(
        (0..6)
            .map(|index| {
                KernelSource::new(format!("set{index}"), device.arch())
                    .line(format_args!("extern \"C\" __global__ void set{index}(int* x) {{ *x = {index}; }}"))
            })
            .collect(),
    );
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let sources = sources.clone();
            thread::spawn(move || {
                let device = Device::open(0).unwrap();
                let stream = Stream::new(&device, StreamPriority::Low).unwrap();
                let x = DeviceBuffer::new(&device, 4).unwrap();
                for (index, function) in device.functions(&sources).unwrap().iter().enumerate() {
                    // SAFETY: x holds one number.
                    unsafe { function.launch(&stream, &Launch::linear(1, 1), &(x.address(),)) }.unwrap();
                    assert_eq!(x.download::<i32>(&stream, 0, 1).unwrap(), [index as i32]);
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
}

/// Every kernel that ships for this device, and one more.
fn shipped(device: &Device) -> Vec<KernelSource> {
    let ship =
        specialisations().into_iter().map(|one| one.source).filter(|source| source.arch() == device.arch());
    let more = KernelSource::new("more", device.arch())
        .line("extern \"C\" __global__ void more(int* x) { *x = 1; }");
    ship.chain([more]).collect()
}

/// Not a test by itself: a process that loads every kernel and says how long each took.
#[test]
fn child() {
    if std::env::var_os("DEVICE_TEST_CHILD").is_none() {
        return;
    }
    let device = Device::open(0).unwrap();
    let mut seconds: Vec<f64> = Vec::new();
    for source in shipped(&device) {
        let start = Instant::now();
        device.function(&source).unwrap();
        seconds.push(start.elapsed().as_secs_f64());
    }
    assert_eq!(CubinCache::of_process().take_warnings(), []);
    let worst = seconds.iter().copied().fold(0.0, f64::max);
    println!("\nseconds: {worst} {} {}", seconds.iter().sum::<f64>(), seconds.len());
}

#[test]
fn first_and_cached_loads() {
    let Some(device) = device() else { return };
    let folder = tempfile::tempdir().unwrap();
    let run = || -> [f64; 3] {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["child", "--exact", "--nocapture"])
            .env("DEVICE_TEST_CHILD", "1")
            .env(CACHE_VARIABLE, folder.path())
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout).unwrap();
        let figures = text.lines().find_map(|line| line.strip_prefix("seconds: ")).unwrap();
        let figures: Vec<f64> = figures.split(' ').map(|figure| figure.parse().unwrap()).collect();
        figures.try_into().unwrap()
    };
    let ([worst, sum, count], [cached, cached_sum, _]) = (run(), run());
    println!("{count} kernels: compiled in {sum:.2} s, the slowest {worst:.2} s");
    println!("from the cache in {cached_sum:.4} s, the slowest {cached:.4} s");
    assert_eq!(shipped(&device).len() as f64, count);
    assert!(cached < 0.05, "a cached kernel took {cached} s");
}
