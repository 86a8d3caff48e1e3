//! Profiles of machines: where they lie, and which one a command plans with.

use std::path::{Path, PathBuf};

use counterpoint_cost::MachineProfile;
use counterpoint_exec::EnvironmentVariable;
use counterpoint_files::{folder_in_home, folder_named};

use crate::arguments::Device;
use crate::device;
use crate::error::CliError;
use crate::files;

/// The variable that names the folder of profiles.
const FOLDER_VARIABLE: &str = "COUNTERPOINT_PROFILE_DIR";

/// All that this crate reads.
pub const ENVIRONMENT: [EnvironmentVariable; 1] =
    [EnvironmentVariable { name: FOLDER_VARIABLE, purpose: "the folder of measured machine profiles" }];

/// Where profiles are kept; `None` where the user has no home.
pub fn folder() -> Result<Option<PathBuf>, CliError> {
    let named = folder_named(FOLDER_VARIABLE).map_err(|source| CliError::RelativeFolder { source })?;
    let kept = || folder_in_home("XDG_CONFIG_HOME", ".config").map(|folder| folder.join("counterpoint"));
    Ok(named.or_else(kept))
}

/// The file of a machine's profile in `folder`.
pub fn file_in(folder: &Path, machine: &str) -> PathBuf {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
    let name: String = machine.chars().map(plain).collect();
    let words: Vec<&str> = name.split('-').filter(|word| !word.is_empty()).collect();
    folder.join(format!("{}.json", words.join("-")))
}

/// Longest profile that is read: a thousand times what a measured one takes.
const MAX_BYTES: u64 = 16 << 20;

/// What the file is, in messages.
const WHAT: &str = "machine profile";

/// The profile in a file that was named.
pub fn read(path: &Path) -> Result<MachineProfile, CliError> {
    parsed(path, &files::read_text(WHAT, path, MAX_BYTES)?)
}

fn parsed(path: &Path, text: &str) -> Result<MachineProfile, CliError> {
    MachineProfile::from_json(text)
        .map_err(|source| CliError::Profile { path: path.to_owned(), source: Box::new(source) })
}

/// Makes the folder of profiles, for this user alone.
pub fn make(folder: &Path) -> Result<(), CliError> {
    files::make_kept_folder("folder of machine profiles", folder)
}

/// The profile that plans and simulations are made for: the one that was named, of whatever machine, or the built-in H200. What was
/// measured here and kept is left out on purpose: the same command prints the same plan everywhere.
pub fn modelled(path: Option<&Path>) -> Result<MachineProfile, CliError> {
    path.map_or_else(|| Ok(MachineProfile::h200()), read)
}

/// The profile in the file that was named, which must be of `machine`.
pub fn named(path: Option<&Path>, machine: &str) -> Result<Option<MachineProfile>, CliError> {
    path.map(|path| of(machine, path, read(path)?)).transpose()
}

/// The profile of a file, which must be of `machine`.
fn of(machine: &str, path: &Path, profile: MachineProfile) -> Result<MachineProfile, CliError> {
    let checked = profile.check_machine(machine);
    checked.map_err(|source| CliError::Profile { path: path.to_owned(), source: Box::new(source) })?;
    Ok(profile)
}

/// The profile of `machine`: the one that was named, or the one that was measured here and kept, which must be trusted; `None` without either.
pub fn of_machine(path: Option<&Path>, machine: &str) -> Result<Option<MachineProfile>, CliError> {
    if path.is_some() {
        return named(path, machine);
    }
    let Some(path) = folder()?.map(|folder| file_in(&folder, machine)) else { return Ok(None) };
    let kept = files::read_kept(WHAT, &path, MAX_BYTES)?;
    kept.map(|text| of(machine, &path, parsed(&path, &text)?)).transpose()
}

/// As [`of_machine`], of what `--device` names.
pub fn of_device(path: Option<&Path>, device: Device) -> Result<Option<MachineProfile>, CliError> {
    match device {
        Device::Cpu => of_machine(path, &device::cpu_name()),
        Device::Cuda => {
            let first = counterpoint_cuda::Device::properties_of(0);
            of_machine(path, &first.map_err(|source| CliError::Cuda { source })?.name)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_machines_are_names_of_files() {
        let name = |machine| file_in(Path::new("folder"), machine).display().to_string();
        assert_eq!(name("NVIDIA H200"), "folder/nvidia-h200.json");
        assert_eq!(name("AMD EPYC(tm) / 2 (4 threads)"), "folder/amd-epyc-tm-2-4-threads.json");
    }
}
