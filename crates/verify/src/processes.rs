//! Ranks as processes: they give the bits of threads; and where one of them dies, stops, lacks memory or was given something
//! else, the others end within the limit with a sentence that names it, and the GPUs are as before.

mod layers;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{fs, io, thread};

use counterpoint_console::TemporaryFolder;
use counterpoint_cuda::{CudaError, Device, DeviceBuffer};
use counterpoint_reference::selftest::{Extent, SelfCheck};

use super::cannot_begin::CannotBegin;
use super::case_fault::{CaseFault, RankEnd, last_line, list_ends};
use super::inter_node;
use super::job::{Gpus, Job, ProcessEnd, start};

/// What every rank is given where bits are compared.
const ATTENTION: &str = "attention --device cuda --mask varlen-block-causal:0,500,2500,4096,block=256 --heads-q 4 --heads-kv 2 \
                         --head-dim 64 --chunk-size 128 --backward --deterministic --seed 11";
/// A job that begins collectives again and again, and is in one most of the time.
const COLLECTIVES: &str = "bench group-cast -b 4k -e 256M -f 2 -n 100 -c 10 -w 2";
/// Its limit, and how much longer its end may take: a rank that does not answer is asked what it does, and all is freed, while other
/// parts of the selftest keep cores and GPUs busy.
const LIMIT: Duration = Duration::from_secs(6);
const GRACE: Duration = Duration::from_secs(9);
/// Of every wait of a job that nothing happens to.
const WAIT: Duration = Duration::from_secs(20);
/// Of all of it.
const LONG: Duration = Duration::from_secs(60);
/// Of one that cannot begin.
const SOON: Duration = Duration::from_secs(30);

/// What happens to rank 1, so long after the first row was printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Dies,
    Stops,
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Dies => "dies",
            Self::Stops => "stops",
        })
    }
}

/// Where jobs run, and leave what they say.
pub(super) struct Bench {
    folder: TemporaryFolder,
    gpus: usize,
    /// How many times as long as usual they may take.
    patience: u32,
}

impl Bench {
    /// On all GPUs.
    pub(super) fn new(patience: u32) -> Result<Self, CannotBegin> {
        let folder = TemporaryFolder::new().map_err(CannotBegin::NoFolder)?;
        Ok(Self { folder, gpus: Device::count()?, patience })
    }

    /// What a limit is here.
    fn patient(&self, limit: Duration) -> Duration {
        limit * self.patience
    }

    /// A command line whose waits have a limit.
    fn within(&self, limit: Duration, line: &str) -> String {
        format!("{line} --limit {}", self.patient(limit).as_secs())
    }

    /// Rank 1 is killed while it is in collectives.
    pub(super) fn deaths(&self) -> Vec<SelfCheck> {
        self.faults(Fault::Dies, Duration::from_millis(20))
    }

    /// The same in later and larger ones.
    pub(super) fn late_deaths(&self) -> Vec<SelfCheck> {
        self.faults(Fault::Dies, Duration::from_millis(400))
    }

    /// Rank 1 is stopped, and does not answer any more.
    pub(super) fn stops(&self) -> Vec<SelfCheck> {
        self.faults(Fault::Stops, Duration::from_millis(200))
    }

    /// Transports that two ranks can use.
    fn transports(&self) -> &'static [&'static str] {
        if self.gpus > 1 { &["nvlink", "copy-engine", "nccl"] } else { &["nvlink", "copy-engine"] }
    }

    /// Results of processes compared with those of threads.
    pub(super) fn bits(&self, extent: Extent) -> Vec<SelfCheck> {
        let mut cases: Vec<(usize, usize, &str, Gpus)> =
            self.transports().iter().map(|transport| (2, 1, *transport, Gpus::All)).collect();
        if extent == Extent::Full {
            // Ranks that share GPUs; nodes; GPUs that do not see each other.
            cases.extend([(4, 1, "nvlink", Gpus::All), (4, 1, "copy-engine", Gpus::All)]);
            if self.gpus > 1 {
                cases.extend([
                    (2, 2, "hierarchical", Gpus::All),
                    (4, 2, "hierarchical", Gpus::All),
                    (2, 1, "auto", Gpus::OwnOnly),
                ]);
            }
        }
        let mut sizes: Vec<(usize, usize)> = cases.iter().map(|case| (case.0, case.1)).collect();
        sizes.sort_unstable();
        sizes.dedup();
        let threads =
            side_by_side(&sizes, |(ranks, nodes)| self.run("threads", *ranks, *nodes, 1, "auto", Gpus::All));
        let checks = side_by_side(&cases, |&(ranks, nodes, transport, gpus)| {
            let hidden = if gpus == Gpus::OwnOnly { ", each seeing its own GPU only" } else { "" };
            let name = format!(
                "{ranks} processes on {nodes} nodes by {transport}{hidden}: bytes unlike those of threads"
            );
            let known = sizes.iter().position(|size| *size == (ranks, nodes));
            let threads = known.and_then(|at| threads[at].clone()).unwrap_or_else(lost_thread);
            let differing = threads.and_then(|threads| {
                let processes = self.run(transport, ranks, nodes, ranks, transport, gpus)?;
                Ok(differing_bytes(&threads, &processes)?)
            });
            match differing {
                Ok(count) => SelfCheck::of(name, 11, count as f64, 0.0),
                Err(reason) => SelfCheck::failed(name, 11, reason.to_string()),
            }
        });
        checks.into_iter().map(|check| check.unwrap_or_else(lost_check)).collect()
    }

    /// Attention on `ranks` ranks in so many processes; its results.
    fn run(
        &self,
        name: &str,
        ranks: usize,
        nodes: usize,
        processes: usize,
        transport: &str,
        gpus: Gpus,
    ) -> Result<PathBuf, CaseFault> {
        let output = self.folder.path().join(format!("{name}-{ranks}-{nodes}-{processes}.safetensors"));
        let line = format!(
            "{ATTENTION} --cp-size {ranks} --nodes {nodes} --transport {transport} --output {}",
            output.display()
        );
        let line = self.within(WAIT, &line);
        let name = format!("bits-{name}-{ranks}-{nodes}-{processes}");
        let job = start(self.folder.path(), &name, &vec![line; processes], gpus)?;
        let all: Vec<usize> = (0..processes).collect();
        let ended = job.end(&all, self.patient(LONG));
        match ended.iter().enumerate().find(|(_, rank)| rank.code != Some(0)) {
            None => Ok(output),
            Some(rank) => Err(CaseFault::Ended { ends: vec![RankEnd::of(rank)] }),
        }
    }

    /// What crosses between nodes.
    pub(super) fn inter_node(&self) -> Vec<SelfCheck> {
        let rank_0 = |name: &str, line: String| -> io::Result<ProcessEnd> {
            let lines = vec![line; inter_node::RANKS];
            let job = start(self.folder.path(), name, &lines, Gpus::All)?;
            let mut ended = job.end(&(0..inter_node::RANKS).collect::<Vec<_>>(), self.patient(LONG));
            Ok(ended.swap_remove(0))
        };
        let all = || -> io::Result<Vec<SelfCheck>> {
            let keys = rank_0("inter-node", inter_node::LINE.to_owned())?;
            let [two_level, flat] = inter_node::EXCHANGES
                .map(|exchange| rank_0(&format!("hosted-{exchange}"), inter_node::hosted_line(exchange)));
            let mut checks = inter_node::checks(&keys);
            checks.extend(inter_node::hosted_checks([&two_level?, &flat?]));
            Ok(checks)
        };
        all().unwrap_or_else(|error| vec![SelfCheck::failed("a job".to_owned(), 0, error.to_string())])
    }

    /// Ranks with different masks.
    pub(super) fn disagreement(&self) -> Vec<SelfCheck> {
        let line =
            |mask: &str| self.within(WAIT, &format!("attention --device cuda --mask {mask} --cp-size 2"));
        let name = "ranks with different masks: how many do not say so".to_owned();
        let job = start(self.folder.path(), "masks", &[line("causal:1k"), line("causal:2k")], Gpus::All);
        let says = |rank: &ProcessEnd| {
            rank.code != Some(0) && rank.text.contains("the ranks disagree") && rank.text.contains("--mask")
        };
        vec![match job {
            Ok(job) => who_says(name, &job.end(&[0, 1], self.patient(LONG)), says),
            Err(error) => SelfCheck::failed(name, 0, error.to_string()),
        }]
    }

    /// What happens to rank 1 under each transport, all at the same time.
    fn faults(&self, fault: Fault, delay: Duration) -> Vec<SelfCheck> {
        let checks = side_by_side(self.transports(), |transport| self.fault(transport, fault, delay));
        checks.into_iter().map(|check| check.unwrap_or_else(lost_check)).collect()
    }

    fn fault(&self, transport: &str, fault: Fault, delay: Duration) -> SelfCheck {
        let name = format!(
            "{transport}, rank 1 {fault} {delay:?} after its first row: seconds until rank 0 says so"
        );
        let fail = |reason: String| SelfCheck::failed(name.clone(), 0, reason);
        let line = self.within(LIMIT, &format!("{COLLECTIVES} --transports {transport}"));
        let limit = self.patient(LIMIT + GRACE);
        let file = format!("{fault}-{transport}-{}", delay.as_millis());
        let job = match start(self.folder.path(), &file, &[line.clone(), line], Gpus::All) {
            Ok(job) => job,
            Err(error) => return fail(error.to_string()),
        };
        // Two lines of header, then rows.
        let measured = |job: &Job| job.text(0).lines().any(|line| line.contains(transport));
        if !job.wait_for(self.patient(LONG), measured) {
            let text = job.text(0);
            return fail(format!("it measured nothing: {}", last_line(&text)));
        }
        thread::sleep(delay);
        let signal = if fault == Fault::Dies { "KILL" } else { "STOP" };
        if let Err(error) = job.signal(1, signal) {
            return fail(error.to_string());
        }
        let began = Instant::now();
        let ended = job.end(&[0], limit);
        let (took, ProcessEnd { code, text, threads }) = (began.elapsed(), &ended[0]);
        match code {
            None => {
                let (took, doing) = (took.as_secs_f64(), threads.as_deref().unwrap_or("nothing"));
                let said = last_line(text);
                fail(format!(
                    "rank 0 was still running after {took:.1} s; it had said: {said}; threads: {doing}"
                ))
            }
            Some(0) => fail("rank 0 noticed nothing".to_owned()),
            Some(_) if !last_line(text).contains("rank 1") => {
                fail(format!("rank 0 said: {}", last_line(text)))
            }
            Some(_) => SelfCheck::of(name, 0, took.as_secs_f64(), limit.as_secs_f64()),
        }
    }

    /// A GPU whose memory is used up: its rank says how much it lacks, and the others that it does, under each transport.
    pub(super) fn exhaustion(&self, device: &Device) -> Result<Vec<SelfCheck>, CudaError> {
        /// For the drivers of all jobs.
        const LEFT: usize = 4 << 30;
        let free = device.memory()?.free;
        let hog = DeviceBuffer::new(device, free.saturating_sub(LEFT))?;
        let checks = side_by_side(self.transports(), |transport| {
            let line = format!("bench group-cast -b 4G -e 4G -n 1 -c 1 -w 0 --transports {transport}");
            let line = self.within(2 * WAIT, &line);
            let name = format!("{transport}, ranks of which one has no memory left: how many do not say so");
            let job =
                start(self.folder.path(), &format!("memory-{transport}"), &[line.clone(), line], Gpus::All);
            let says = |rank: &ProcessEnd| {
                let text = last_line(&rank.text);
                rank.code.is_some_and(|code| code != 0) && text.contains("memory") && text.contains("rank 1")
            };
            match job {
                // Less than any wait's limit: nobody is to wait for one that has said that it cannot come.
                Ok(job) => who_says(name, &job.end(&[0, 1], self.patient(SOON)), says),
                Err(error) => SelfCheck::failed(name, 0, error.to_string()),
            }
        });
        drop(hog);
        Ok(checks.into_iter().map(|check| check.unwrap_or_else(lost_check)).collect())
    }
}

/// `run` of each of `cases`, all at the same time; `None` where it panicked.
fn side_by_side<C: Sync, R: Send>(cases: &[C], run: impl Fn(&C) -> R + Sync) -> Vec<Option<R>> {
    let run = &run;
    thread::scope(|scope| {
        let threads: Vec<_> = cases.iter().map(|case| scope.spawn(move || run(case))).collect();
        threads.into_iter().map(|thread| thread.join().ok()).collect()
    })
}

/// How many of a job's ranks did not end as `says` wants.
fn who_says(name: String, ended: &[ProcessEnd], says: impl Fn(&ProcessEnd) -> bool) -> SelfCheck {
    let silent: Vec<_> = ended.iter().enumerate().filter(|(_, rank)| !says(rank)).collect();
    let ends: Vec<RankEnd> = silent.iter().copied().map(RankEnd::of).collect();
    let reason = list_ends(&ends);
    let check = SelfCheck::of(name, 0, silent.len() as f64, 0.0);
    SelfCheck { reason: Some(reason).filter(|_| !check.passed), ..check }
}

fn lost_check() -> SelfCheck {
    SelfCheck::failed("a job".to_owned(), 0, "the thread that watched it panicked".to_owned())
}

fn lost_thread<T>() -> Result<T, CaseFault> {
    Err(CaseFault::NoThreads)
}

/// How many bytes of two files differ, those that only one has among them.
fn differing_bytes(one: &Path, other: &Path) -> io::Result<usize> {
    let (one, other) = (fs::read(one)?, fs::read(other)?);
    let differing = one.iter().zip(&other).filter(|(a, b)| a != b).count();
    Ok(differing + one.len().abs_diff(other.len()))
}
