//! What must hold among hostile others, on any machine: ranks that are processes of this program, with strangers at their port, another
//! job at it, a rank that is killed or stopped or was started with something else, and an input that is old on one rank.

use std::io::Write;
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};
use std::{fs, thread};

use counterpoint_console::TemporaryFolder;
use counterpoint_reference::selftest::SelfCheck;
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use super::cannot_begin::CannotBegin;
use super::case_fault::{CaseFault, RankEnd};
use super::job::{Gpus, Job, ProcessEnd, free_port, start_at};

const ATTENTION: &str = "attention --mask causal:64 --heads-q 2 --head-dim 8 --chunk-size 16 --cp-size 2";
/// Every collective takes a second, so that what happens meanwhile happens in one.
const SLOW: &str = "--backward --slow-link 1000000,1";
/// Of every wait of a job that something happens to, and how much longer its end may take.
const LIMIT: Duration = Duration::from_secs(5);
const GRACE: Duration = Duration::from_secs(8);
/// Of every wait of the others, and of all of such a job.
const WAIT: Duration = Duration::from_secs(30);
const LONG: Duration = Duration::from_secs(60);
/// Connections of strangers.
const STRANGERS: usize = 500;

/// Where jobs run.
pub(super) struct Hostile {
    folder: TemporaryFolder,
    /// How many times as long as usual they may take.
    patience: u32,
}

impl Hostile {
    pub(super) fn new(patience: u32) -> Result<Self, CannotBegin> {
        let folder = TemporaryFolder::new().map_err(CannotBegin::NoFolder)?;
        Ok(Self { folder, patience })
    }

    /// All of it; `heard` gets each as it is made.
    pub(super) fn checks(&self, heard: impl Fn(&SelfCheck)) -> Vec<SelfCheck> {
        type Check = (&'static str, fn(&Hostile) -> Result<(), CaseFault>);
        let all: [Check; 6] = [
            ("strangers at the port", Self::strangers),
            ("two jobs at one port", Self::two_jobs),
            ("ranks that were started with other flags", Self::other_flags),
            ("an input that is old on one rank", Self::stale_input),
            ("a rank that is killed", |hostile| hostile.fault("KILL", "rank 1 is gone")),
            ("a rank that is stopped", |hostile| hostile.fault("STOP", "rank 1")),
        ];
        let check = |(name, check): Check| {
            let made = match check(self) {
                Ok(()) => SelfCheck::of(name.to_owned(), 0, 0.0, 0.0),
                Err(reason) => SelfCheck::failed(name.to_owned(), 0, reason.to_string()),
            };
            heard(&made);
            made
        };
        all.into_iter().map(check).collect()
    }

    fn start(&self, name: &str, lines: &[String], port: u16) -> Result<Job, CaseFault> {
        // A job of the same name in a folder of its own is, by all that the launcher says, the same job.
        let folder = self.folder.path().join(name);
        fs::create_dir_all(&folder)?;
        Ok(start_at(&folder, "job", lines, Gpus::All, port)?)
    }

    fn within(&self, limit: Duration, line: &str) -> String {
        format!("{line} --limit {}", (limit * self.patience).as_secs())
    }

    fn port() -> Result<u16, CaseFault> {
        Ok(free_port()?)
    }

    fn strangers(&self) -> Result<(), CaseFault> {
        let port = Self::port()?;
        let line = self.within(WAIT, &format!("{ATTENTION} {SLOW}"));
        let job = self.start("strangers", &vec![line; 2], port)?;
        let mut open = Vec::new();
        let begun = Instant::now();
        while open.len() < STRANGERS && begun.elapsed() < LIMIT {
            let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port + 1)) else {
                thread::sleep(Duration::from_millis(5));
                continue;
            };
            let noise: &[u8] = match open.len() % 4 {
                0 => b"",
                1 => b"cntr",
                2 => b"cntrpnt\n\x02\0\0\0 a nonce of thirty-two characters and no proof at all, only more text than that",
                _ => b"GET / HTTP/1.1\r\n\r\n",
            };
            // Those that are turned away at once cannot be written to.
            let _ = stream.write_all(noise);
            open.push(stream);
        }
        well(&job.end(&[0, 1], LONG * self.patience))
    }

    fn two_jobs(&self) -> Result<(), CaseFault> {
        let port = Self::port()?;
        let line = |seed| self.within(WAIT, &format!("{ATTENTION} {SLOW} --seed {seed}"));
        let first = self.start("first", &vec![line(1); 2], port)?;
        let second = self.start("second", &vec![line(2); 2], port)?;
        let ended = [first, second].map(|job| job.end(&[0, 1], LONG * self.patience));
        let (wells, others): (Vec<_>, Vec<_>) = ended.iter().partition(|job| well(job).is_ok());
        let conflict = |rank: &ProcessEnd| rank.code == Some(2) && rank.text.contains("another job");
        match (wells.len(), others.iter().flat_map(|job| job.iter()).all(conflict)) {
            (1 | 2, true) => Ok(()),
            _ => {
                let ends = others.iter().flat_map(|job| job.iter().enumerate().map(RankEnd::of));
                Err(CaseFault::Ended { ends: ends.collect() })
            }
        }
    }

    fn other_flags(&self) -> Result<(), CaseFault> {
        let line = |stages| self.within(WAIT, &format!("{ATTENTION} --stages {stages}"));
        let job = self.start("flags", &[line(1), line(2)], Self::port()?)?;
        refused(&job.end(&[0, 1], LIMIT + GRACE), "--stages is 1 on rank 0 and 2 on rank 1")
    }

    fn stale_input(&self) -> Result<(), CaseFault> {
        let path = |rank: usize| self.folder.path().join(format!("{rank}.safetensors"));
        for rank in 0..2u8 {
            write_input(&path(usize::from(rank)), rank)
                .map_err(|error| CaseFault::System { text: error.to_string() })?;
        }
        let output = self.folder.path().join("out.safetensors");
        let line = |rank| {
            let line = "attention --mask full:64 --cp-size 2 --dispatch sequential";
            self.within(
                WAIT,
                &format!("{line} --input {} --output {}", path(rank).display(), output.display()),
            )
        };
        let job = self.start("stale", &[line(0), line(1)], Self::port()?)?;
        refused(&job.end(&[0, 1], LIMIT + GRACE), "--input")
    }

    /// What happens to rank 1 is reported by rank 0 within one limit.
    fn fault(&self, signal: &str, words: &str) -> Result<(), CaseFault> {
        let line = self.within(LIMIT, &format!("{ATTENTION} {SLOW} --stages 3"));
        let job = self.start(signal, &vec![line; 2], Self::port()?)?;
        thread::sleep(Duration::from_millis(1500));
        job.signal(1, signal)?;
        let ended = job.end(&[0], LIMIT * self.patience + GRACE);
        match ended[0].code {
            Some(1) if ended[0].text.contains(words) => Ok(()),
            _ => Err(CaseFault::ended(&ended[..1])),
        }
    }
}

/// q, k and v of 64 rows, the last element of v as given.
fn write_input(path: &Path, last: u8) -> Result<(), safetensors::SafeTensorError> {
    let mut bytes = vec![0; 64 * 2 * 8 * 4];
    let of = |bytes| TensorView::new(Dtype::F32, vec![64, 2, 8], bytes);
    let zeros = bytes.clone();
    // The lowest bits of a number near 0.
    if let Some(element) = bytes.rchunks_mut(4).next() {
        element[0] = last;
    }
    let views = [("q", of(&zeros)?), ("k", of(&zeros)?), ("v", of(&bytes)?)];
    safetensors::serialize_to_file(views, None, path)
}

fn well(ended: &[ProcessEnd]) -> Result<(), CaseFault> {
    if ended.iter().all(|rank| rank.code == Some(0)) { Ok(()) } else { Err(CaseFault::ended(ended)) }
}

fn refused(ended: &[ProcessEnd], words: &str) -> Result<(), CaseFault> {
    let is_refused = |rank: &ProcessEnd| rank.code == Some(2) && rank.text.contains(words);
    if ended.iter().all(is_refused) { Ok(()) } else { Err(CaseFault::ended(ended)) }
}
