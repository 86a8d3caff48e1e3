//! A process that examines a part, as this one sees it.

use std::env;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use counterpoint_console::{OwnProcess, arguments::Device, program};
use counterpoint_reference::selftest::SelfCheck;
use serde::{Deserialize, Serialize};

use super::group::Group;
use super::ledger::{Examined, GroupChecks, Heard};
use super::part::{Part, Place};
use crate::arguments::SelftestArguments;

/// A part may take so long, and with `--patience` as many times as that: whatever waits inside it has a far shorter limit.
const LIMIT: Duration = Duration::from_secs(900);
/// Hardware queues where kernels wait for those of a neighbour's peers. Ranks that share a GPU have more streams than the driver's usual
/// eight queues, and one that is queued behind a kernel that waits, only because it has the same queue, never runs.
const NEIGHBOUR_QUEUES: &str = "32";

/// A process that examines a part.
pub(super) struct Worker {
    pub(super) part: Part,
    /// The GPUs whose slots it has.
    pub(super) gpus: Vec<usize>,
    /// It ends, and its own processes with it, when its standard input does: it does not outlive us.
    process: OwnProcess,
    text: PathBuf,
    /// Bytes of what it said that were read while it ran, and what they said.
    read: u64,
    heard: (String, Heard),
    began: Instant,
    limit: Duration,
}

impl Worker {
    /// Starts one; what it says goes to a file in `folder`.
    pub(super) fn start(
        part: Part,
        gpus: Vec<usize>,
        arguments: &SelftestArguments,
        folder: &Path,
    ) -> io::Result<Self> {
        let first = part.groups.first().map_or("nothing", |group| group.name());
        let name = format!("{first} {}", part.share).replace(['/', ' '], "-");
        let text = folder.join(name + ".txt");
        let file = File::create(&text)?;
        let mut command = command_for(&part)?;
        command.arg("selftest").stdin(Stdio::piped()).stdout(file.try_clone()?).stderr(file);
        command.args(["--share", &part.share.to_string(), "--patience", &arguments.patience.to_string()]);
        for group in &part.groups {
            command.args(["--group", group.name()]);
        }
        for (flag, given) in [("--quick", arguments.quick), ("--stress", arguments.stress)] {
            command.args(given.then_some(flag));
        }
        if arguments.device == Device::Cuda {
            command.args(["--device", "cuda"]);
        }
        if let (Place::AnyGpu(_), [gpu]) = (part.place, gpus.as_slice()) {
            command.env("CUDA_VISIBLE_DEVICES", visible(*gpu));
        }
        if part.groups.contains(&Group::Neighbours) {
            command.env("CUDA_DEVICE_MAX_CONNECTIONS", NEIGHBOUR_QUEUES);
        }
        let process = OwnProcess::start(&mut command)?;
        Ok(Self {
            part,
            gpus,
            process,
            text,
            read: 0,
            heard: (first.to_owned(), Heard::default()),
            began: Instant::now(),
            limit: LIMIT * arguments.patience,
        })
    }

    /// Whether it has ended, or had all its time and was killed.
    pub(super) fn has_ended(&self) -> bool {
        if self.began.elapsed() > self.limit {
            self.process.end();
            return true;
        }
        !self.process.runs()
    }

    /// The group that it is at and how far it is, by what it last said of that.
    pub(super) fn heard(&mut self) -> (String, Heard) {
        let mut said = Vec::new();
        let from = self.read;
        let more = File::open(&self.text).and_then(|mut file| {
            file.seek(SeekFrom::Start(from))?;
            file.read_to_end(&mut said)
        });
        // A line that it is still writing is read next time.
        let whole = said.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        if more.is_ok() {
            self.read += whole as u64;
        }
        let lines = said[..whole].rsplit(|byte| *byte == b'\n');
        if let Some(Step { step }) = lines.filter_map(|line| serde_json::from_slice(line).ok()).next() {
            self.heard = step;
        }
        self.heard.clone()
    }

    /// What it found, by times that count from `start`. A process that ended without a word is a failed check.
    pub(super) fn found(self, start: Instant) -> Vec<GroupChecks> {
        let status = self.process.status().ok().flatten();
        let text = fs::read(&self.text).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let document = text.lines().rev().find_map(|line| serde_json::from_str::<Examined>(line).ok());
        let after = self.began - start;
        let Some(Examined { mut groups }) = document else {
            let status = status.map_or("killed after its limit".to_owned(), |status| status.to_string());
            let words = |line: &&str| serde_json::from_str::<Step>(line).is_err();
            let said = text.trim_end().lines().rfind(words).unwrap_or("nothing");
            let reason = format!("its process ended ({status}) and said: {said}");
            let failed = |group| {
                let checks = vec![SelfCheck::failed("all of it".to_owned(), 0, reason.clone())];
                GroupChecks::of(group, after, self.began.elapsed(), checks)
            };
            return self.part.groups.iter().copied().map(failed).collect();
        };
        groups.iter_mut().for_each(|group| group.began += after.as_secs_f64());
        groups
    }
}

/// A line that a process writes while it examines: the group that it is at, and how far it is.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Step {
    pub(super) step: (String, Heard),
}

/// This program; where it compiles on all cores, behind whatever has limits to keep.
fn command_for(part: &Part) -> io::Result<Command> {
    let this = program::file()?;
    let nice = Path::new("/usr/bin/nice");
    if !part.compiles() || !nice.exists() {
        return Ok(Command::new(this));
    }
    let mut command = Command::new(nice);
    command.args(["-n", "10"]).arg(this);
    Ok(command)
}

/// How `CUDA_VISIBLE_DEVICES` names a GPU of those that this process sees.
pub(super) fn visible(gpu: usize) -> String {
    let all = env::var("CUDA_VISIBLE_DEVICES").unwrap_or_default();
    let own = all.split(',').nth(gpu).map(str::trim).filter(|own| !own.is_empty());
    own.map_or_else(|| gpu.to_string(), str::to_owned)
}
