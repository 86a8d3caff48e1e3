//! Tuned plans: where they lie, and reading and changing them.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use counterpoint_choose::{TunedPlace, TunedPlans};
use counterpoint_exec::SlowLink;
use counterpoint_files::{AtomicFiles, Destination, DistrustError, FileLock, check_writable};

use crate::device::cpu_name;
use crate::error::CliError;
use crate::files;
use crate::interrupt;
use crate::profile;
use crate::{FlagFault, UsageFault};

/// What the file is, in messages.
const WHAT: &str = "file of tuned plans";

/// Longest file of them that is read: room for a hundred thousand plans.
const MAX_BYTES: u64 = 64 << 20;

/// How long another process may keep the file to itself: writing it takes milliseconds.
const LOCK_LIMIT: Duration = Duration::from_secs(30);

/// The flag that names the file.
const FLAG: &str = "--plans";

/// What was tuned on this machine, and maybe on others whose plans lie in the same file: what layers take their groups from. Nobody else may
/// have written it.
pub fn kept() -> Result<TunedPlans, CliError> {
    // Without a folder nothing was kept.
    kept_file()?.map_or_else(|| Ok(TunedPlans::default()), |path| read(&path, false))
}

/// What was tuned and is in a file that was named, which must be there.
pub fn named(path: &Path) -> Result<TunedPlans, CliError> {
    plans(path, &files::read_text(WHAT, path, MAX_BYTES)?)
}

/// Where plans of CPU ranks that are threads are tuned and used; an imitated link is named by its figures.
pub fn place_of_threads(slow_link: Option<SlowLink>) -> TunedPlace {
    on_cpus("threads", slow_link)
}

/// Likewise of CPU ranks that are processes.
pub fn place_of_processes(slow_link: Option<SlowLink>) -> TunedPlace {
    on_cpus("tcp", slow_link)
}

fn on_cpus(name: &str, slow_link: Option<SlowLink>) -> TunedPlace {
    let transport = slow_link.map_or_else(
        || name.to_owned(),
        |link| format!("{name} {:?} {} GB/s", link.alpha, link.bytes_per_second / 1e9),
    );
    TunedPlace { device: cpu_name(), transport }
}

/// The file in the folder of profiles; `None` where the user has no home.
fn kept_file() -> Result<Option<PathBuf>, CliError> {
    Ok(profile::folder()?.map(|folder| folder.join("tuned-plans.json")))
}

/// What a file holds, whether it was named or must be trusted. One that is not there holds nothing yet.
fn read(path: &Path, is_named: bool) -> Result<TunedPlans, CliError> {
    let text = match is_named {
        true => files::read_text_if_there(WHAT, path, MAX_BYTES)?,
        false => files::read_kept(WHAT, path, MAX_BYTES)?,
    };
    text.map_or_else(|| Ok(TunedPlans::default()), |text| plans(path, &text))
}

fn plans(path: &Path, text: &str) -> Result<TunedPlans, CliError> {
    TunedPlans::from_json(text)
        .map_err(|source| CliError::Tuned { path: path.to_owned(), source: Box::new(source) })
}

/// A file of tuned plans that is added to.
#[derive(Debug)]
pub struct TunedFile {
    /// As the user knows it.
    path: PathBuf,
    /// Where it lies, so that all who change it hold one lock.
    target: PathBuf,
    /// Whether the user named it; else it is the one that is kept, which nobody else may have written.
    is_named: bool,
    /// What it held when it was last looked at.
    pub plans: TunedPlans,
}

impl TunedFile {
    /// The file that was named, or the one in the folder of profiles. That it can be read and written is known then.
    pub fn open(named: Option<&Path>) -> Result<Self, CliError> {
        let path = match named {
            Some(path) => path.to_owned(),
            None => kept_file()?.ok_or_else(|| CliError::usage(UsageFault::NoPlansFolder))?,
        };
        let is_named = named.is_some();
        match path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            // Where it cannot be made, the next lines say so with the path.
            Some(folder) if is_named => drop(fs::create_dir_all(folder)),
            Some(folder) => match files::make_kept_folder("folder of tuned plans", folder) {
                Err(CliError::Distrusted { source: DistrustError::Io(_), .. }) => {}
                made => made?,
            },
            None => {}
        }
        let destination = check_writable(&path).map_err(|source| CliError::Output { flag: FLAG, source })?;
        let Destination::File { path: target, .. } = destination else {
            return Err(CliError::flag(FLAG, path.display().to_string(), FlagFault::NoRegularFile));
        };
        let plans = read(&target, is_named)?;
        Ok(Self { path, target, is_named, plans })
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Adds to what the file holds by now, which other processes may have added to, and writes it whole or not at all.
    pub fn keep(&mut self, add: impl FnOnce(&mut TunedPlans)) -> Result<(), CliError> {
        let lock = FileLock::acquire(&self.target, LOCK_LIMIT)
            .map_err(|source| CliError::Locked { flag: FLAG, source })?;
        interrupt::not_during(|| {
            self.plans = read(&self.target, self.is_named)?;
            add(&mut self.plans);
            let mut files = if self.is_named { AtomicFiles::default() } else { AtomicFiles::for_owner() };
            let staged = files.stage(&self.target, self.plans.to_json().as_bytes());
            let written = staged.and_then(|()| files.commit());
            drop(lock);
            written.map_err(|source| CliError::Output { flag: FLAG, source })
        })
    }
}
