//! Checks of the cache of compiled kernels: it gives what NVRTC gave, soon, and damage to it is noticed.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::time::Instant;

use counterpoint_reference::selftest::SelfCheck;

use counterpoint_cuda::kernel::specialisations;
use counterpoint_cuda::{CachedCubin, CubinCache, CubinOrigin, CudaError, Device, KernelSource};

/// How many of the kernels that ship are looked at: compiling each takes up to seconds.
const KERNELS: usize = 3;
/// Seconds that a kernel from the cache may take.
const CACHED_SECONDS: f64 = 0.05;

/// The cache of compiled kernels in a folder of its own: what comes out of it is what the compiler gave, soon, and a damaged
/// entry is compiled again.
///
/// # Errors
/// When a kernel does not compile.
pub fn selftest_cache(device: &Device) -> Result<Vec<SelfCheck>, CudaError> {
    let mut checks = Vec::new();
    let folder = match tempfile::tempdir_in(counterpoint_files::temporary_folder()) {
        Ok(folder) => folder,
        Err(error) => return Ok(vec![unwritable(&error)]),
    };
    let all = specialisations();
    let mut sources: Vec<&KernelSource> =
        all.iter().map(|kernel| &kernel.source).filter(|source| source.arch() == device.arch()).collect();
    // From the first to the last, so that not all are variants of one kernel.
    let step = (sources.len() / KERNELS).max(1);
    sources = sources.into_iter().step_by(step).take(KERNELS).collect();
    for source in sources {
        let place = folder.path().join(source.name());
        let cache = CubinCache::at(&place);
        let get = || cache.cubins(&[source]).remove(0);
        let fresh = get()?;
        let began = Instant::now();
        let cached = get()?;
        let seconds = began.elapsed().as_secs_f64();
        let name = source.name();
        checks.push(found(format!("{name} is compiled, then cached"), &fresh, &cached, CubinOrigin::Cache));
        checks.push(SelfCheck::of(format!("{name} from the cache, seconds"), 0, seconds, CACHED_SECONDS));
        if let Err(error) = damage(&place) {
            checks.push(unwritable(&error));
            continue;
        }
        let repaired = get()?;
        checks.push(found(format!("{name} after damage"), &fresh, &repaired, CubinOrigin::Compiled));
    }
    Ok(checks)
}

fn found(name: String, fresh: &CachedCubin, found: &CachedCubin, origin: CubinOrigin) -> SelfCheck {
    let wrong = [
        fresh.origin != CubinOrigin::Compiled,
        found.origin != origin,
        found.cubin.image != fresh.cubin.image,
    ];
    SelfCheck::of(name, 0, wrong.into_iter().filter(|wrong| *wrong).count() as f64, 0.0)
}

/// Flips a bit in the middle of every entry.
fn damage(folder: &PathBuf) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "cubin") {
            let mut bytes = fs::read(&path)?;
            let middle = bytes.len() / 2;
            if let Some(byte) = bytes.get_mut(middle) {
                *byte ^= 1;
            }
            fs::write(&path, bytes)?;
        }
    }
    Ok(())
}

fn unwritable(error: &io::Error) -> SelfCheck {
    SelfCheck::failed("cubin cache".to_owned(), 0, format!("no temporary folder ({error}); set TMPDIR"))
}
