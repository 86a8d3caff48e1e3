//! Where the streams of a device stand: what memory that was given back waits for, and whether they capture.

use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::{CUevent, CUstream, CUstreamCaptureStatus};

use crate::CudaError;
use crate::library::{Driver, call};

/// `CUDA_ERROR_STREAM_CAPTURE_IMPLICIT`.
const IMPLICIT_CAPTURE: u32 = 906;

/// The streams of a device, so that memory may wait for all of them.
#[derive(Debug, Default)]
pub(crate) struct StreamEnds(Mutex<Ends>);

#[derive(Debug, Default)]
struct Ends {
    /// Handles of streams, as often as somebody made or borrowed them.
    streams: Vec<usize>,
    /// The ends of streams that are gone.
    gone: Vec<Arc<Point>>,
    /// Events that mark nothing.
    spare: Arc<Mutex<Vec<usize>>>,
}

/// A point of a stream.
#[derive(Debug)]
pub(crate) struct Point {
    event: usize,
    spare: Arc<Mutex<Vec<usize>>>,
}

impl Drop for Point {
    fn drop(&mut self) {
        lock(&self.spare).push(self.event);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Point {
    fn mark(driver: &Driver, spare: &Arc<Mutex<Vec<usize>>>, stream: usize) -> Result<Arc<Self>, CudaError> {
        const DISABLE_TIMING: u32 = 2;
        let known = lock(spare).pop();
        let event = match known {
            Some(event) => event,
            None => {
                let mut event = ptr::null_mut();
                // SAFETY: the pointer is to a local; the event goes with its context.
                unsafe { call!(driver, cuEventCreate(&mut event, DISABLE_TIMING)) }?;
                event as usize
            }
        };
        let point = Arc::new(Self { event, spare: spare.clone() });
        // SAFETY: the caller's stream is alive, the event is ours.
        unsafe { call!(driver, cuEventRecord(event as CUevent, stream as CUstream)) }?;
        Ok(point)
    }

    /// Whether the stream has come so far; never sleeps.
    pub(crate) fn is_passed(&self, driver: &Driver) -> Result<bool, CudaError> {
        // SAFETY: the event is alive.
        driver.check_done("cuEventQuery", unsafe { (driver.cuEventQuery)(self.event as CUevent) })
    }
}

impl StreamEnds {
    /// There is a stream, until it leaves.
    pub(crate) fn join(&self, stream: CUstream) {
        lock(&self.0).streams.push(stream as usize);
    }

    /// It is not asked from now on.
    pub(crate) fn leave(&self, stream: CUstream) {
        let mut ends = lock(&self.0);
        if let Some(at) = ends.streams.iter().position(|one| *one == stream as usize) {
            ends.streams.swap_remove(at);
        }
    }

    /// A stream that has left is about to go: what is enqueued there is still to come to its end.
    pub(crate) fn mark_end(&self, driver: &Driver, stream: CUstream) -> Result<(), CudaError> {
        let mut ends = lock(&self.0);
        let stream = stream as usize;
        match captures(driver, stream) {
            Ok(false) => {}
            Ok(true) => return Ok(()),
            Err(error) if error.is_of_no_stream() => return Ok(()),
            Err(error) => return Err(error),
        }
        let point = Point::mark(driver, &ends.spare, stream)?;
        ends.gone.push(point);
        forget_passed(&mut ends.gone, |point| point.is_passed(driver))
    }

    /// All that streams have been given so far, to see it end. `None` while one of them captures.
    pub(crate) fn given(&self, driver: &Driver) -> Result<Option<GivenWork>, CudaError> {
        Ok(self.now(driver)?.map(GivenWork))
    }

    /// Where all streams stand now. `None` while one of them captures: nothing that is marked there would ever be passed.
    pub(crate) fn now(&self, driver: &Driver) -> Result<Option<Vec<Arc<Point>>>, CudaError> {
        let mut ends = lock(&self.0);
        let mut streams = ends.streams.clone();
        streams.sort_unstable();
        streams.dedup();
        let mut there = Vec::with_capacity(streams.len());
        for stream in streams {
            match captures(driver, stream) {
                Ok(true) => return Ok(None),
                Ok(false) => there.push(stream),
                // Its owner has destroyed it, and still has to drop what borrowed it: nothing more comes to be there.
                Err(error) if error.is_of_no_stream() => ends.streams.retain(|one| *one != stream),
                Err(error) => return Err(error),
            }
        }
        forget_passed(&mut ends.gone, |point| point.is_passed(driver))?;
        let points = there.iter().map(|stream| Point::mark(driver, &ends.spare, *stream));
        points.chain(ends.gone.iter().cloned().map(Ok)).collect::<Result<_, _>>().map(Some)
    }
}

/// Takes out what has passed. Where that cannot be said of one, as while another thread captures, all that was not known to have passed
/// stays: memory still waits for it.
fn forget_passed<P, E>(points: &mut Vec<P>, is_passed: impl Fn(&P) -> Result<bool, E>) -> Result<(), E> {
    let mut at = 0;
    while let Some(point) = points.get(at) {
        match is_passed(point)? {
            true => drop(points.swap_remove(at)),
            false => at += 1,
        }
    }
    Ok(())
}

/// What all streams of a GPU had been given at some time.
#[derive(Debug)]
pub struct GivenWork(Vec<Arc<Point>>);

impl GivenWork {
    /// Whether it has ended; never sleeps.
    pub(crate) fn has_ended(&mut self, driver: &Driver) -> Result<bool, CudaError> {
        while let Some(point) = self.0.last()
            && point.is_passed(driver)?
        {
            self.0.pop();
        }
        Ok(self.0.is_empty())
    }
}

/// Whether what is put on a stream goes into a graph.
pub(crate) fn captures(driver: &Driver, stream: usize) -> Result<bool, CudaError> {
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: the stream is alive, the pointer is to a local.
    match unsafe { call!(driver, cuStreamIsCapturing(stream as CUstream, &mut status)) } {
        // What the legacy default stream says while another captures that waits for it.
        Err(CudaError::Driver { code: IMPLICIT_CAPTURE, .. }) => return Ok(true),
        answer => answer?,
    }
    Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

/// The number of the capture that what is put on a stream goes into, which no other capture of the process has; 0 where it runs.
pub(crate) fn capture_of(driver: &Driver, stream: usize) -> Result<u64, CudaError> {
    let (mut status, mut id) = (CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE, 0);
    let (graph, nodes, count) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
    let stream = stream as CUstream;
    // SAFETY: the stream is alive, the pointers are to locals, or null for what is not asked.
    match unsafe {
        call!(driver, cuStreamGetCaptureInfo_v2(stream, &mut status, &mut id, graph, nodes, count))
    } {
        // The legacy default stream, into which nothing is captured.
        Err(CudaError::Driver { code: IMPLICIT_CAPTURE, .. }) => return Ok(0),
        answer => answer?,
    }
    // Numbers begin anywhere; none is 0 in what follows.
    let captures = status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    Ok(if captures { id.max(1) } else { 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_that_nobody_can_ask_about_stay() {
        let mut points = vec![1, -2, 3, -4, 5];
        let refused_at = |refused: i32| {
            move |point: &i32| if *point == refused { Err("capturing") } else { Ok(*point < 0) }
        };
        for refused in [1, 3] {
            assert_eq!(forget_passed(&mut points, refused_at(refused)), Err("capturing"));
            points.sort_unstable();
            assert!(points.ends_with(&[1, 3, 5]), "{points:?}");
        }
        assert_eq!(forget_passed(&mut points, refused_at(0)), Ok(()));
        points.sort_unstable();
        assert_eq!(points, [1, 3, 5]);
    }
}
