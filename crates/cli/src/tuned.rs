//! Tuned plans: where they lie, and reading and writing them.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use counterpoint_plan::TunedPlans;
use counterpoint_report::write_atomically;

use crate::error::CliError;
use crate::{interrupt, profile};

/// What was tuned on this machine, and maybe on others whose plans lie beside it: what linear layers take their groups from.
pub(crate) fn kept() -> Result<TunedPlans, CliError> {
    // Without a folder nothing was kept.
    if profile::folder().is_none() { Ok(TunedPlans::default()) } else { Ok(TunedFile::open(None)?.plans) }
}

/// The file of tuned plans.
#[derive(Debug)]
pub(crate) struct TunedFile {
    path: PathBuf,
    /// What it holds.
    pub(crate) plans: TunedPlans,
}

impl TunedFile {
    /// The file that was named, or the one in the folder of profiles. One that is not there holds nothing yet.
    pub(crate) fn open(named: Option<&Path>) -> Result<Self, CliError> {
        let path = match named {
            Some(path) => path.to_owned(),
            None => profile::folder().map(|folder| folder.join("tuned-plans.json")).ok_or_else(|| {
                let message = "there is no folder to keep tuned plans in (no HOME); name a file by --plans";
                CliError::Usage { message: message.to_owned() }
            })?,
        };
        let plans = match fs::read_to_string(&path) {
            Ok(text) => TunedPlans::from_json(&text)
                .map_err(|source| CliError::Tuned { path: path.clone(), source: Box::new(source) })?,
            Err(error) if error.kind() == ErrorKind::NotFound => TunedPlans::default(),
            Err(source) => return Err(CliError::Unreadable { what: "file of tuned plans", path, source }),
        };
        Ok(Self { path, plans })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Writes it, whole or not at all.
    pub(crate) fn write(&self) -> Result<(), CliError> {
        let failed = |source| CliError::Output { flag: "--plans", source };
        interrupt::not_during(|| {
            if let Some(folder) = self.path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
                // Where it cannot be made, writing says so with the path.
                let _ = fs::create_dir_all(folder);
            }
            write_atomically(&self.path, self.plans.to_json().as_bytes())
        })
        .map_err(failed)
    }
}
