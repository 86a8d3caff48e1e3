//! A check that tensor-parallel layers on ranks as processes give the bits of ranks as threads.

use counterpoint_reference::selftest::SelfCheck;

use super::super::case_fault::{CaseFault, RankEnd};
use super::super::job::{Gpus, start};
use super::{Bench, LONG, lost_check, lost_thread, side_by_side};

/// Layers whose passes gather, scatter and sum, as parts and in one kernel. Few: NCCL takes two seconds to connect each.
const LAYERS: &str = "bench tp --device cuda --tp-size 2 --shapes 512:256:192 --iterations 3 --groups 2 --overlap fused --json";
/// A row's word for the bits of its results.
const BITS: &str = "\"bits\":\"";

impl Bench {
    /// Tensor-parallel layers on processes compared with the same on threads, row by row.
    pub(in super::super) fn layers(&self) -> Vec<SelfCheck> {
        let jobs: Vec<(usize, &str)> = [(1, "auto")]
            .into_iter()
            .chain(self.transports().iter().map(|transport| (2, *transport)))
            .collect();
        let words = side_by_side(&jobs, |&(processes, transport)| self.words(processes, transport));
        let threads = words.first().cloned().flatten().unwrap_or_else(lost_thread);
        let checks = jobs.iter().zip(words).skip(1).map(|((_, transport), words)| {
            let name =
                format!("layers on 2 processes by {transport}: rows of other bits than those of threads");
            let Some(words) = words else { return lost_check() };
            match threads.clone().and_then(|threads| Ok((threads, words?))) {
                Ok((threads, words)) => {
                    let unlike = threads.iter().zip(&words).filter(|(a, b)| a != b).count();
                    let unlike =
                        unlike + threads.len().abs_diff(words.len()) + usize::from(threads.is_empty());
                    SelfCheck::of(name, 0, unlike as f64, 0.0)
                }
                Err(reason) => SelfCheck::failed(name, 0, reason.to_string()),
            }
        });
        checks.collect()
    }

    /// Of every row.
    fn words(&self, processes: usize, transport: &str) -> Result<Vec<String>, CaseFault> {
        let line = format!("{LAYERS} --transport {transport}");
        let name = format!("layers-{transport}-{processes}");
        let job = start(self.folder.path(), &name, &vec![line; processes], Gpus::All);
        let job = job?;
        let all: Vec<usize> = (0..processes).collect();
        let ended = job.end(&all, self.patient(LONG));
        match ended.iter().enumerate().find(|(_, rank)| rank.code != Some(0)) {
            Some(rank) => Err(CaseFault::Ended { ends: vec![RankEnd::of(rank)] }),
            None => {
                let of_row = |line: &str| line.split(BITS).nth(1)?.split('"').next().map(str::to_owned);
                Ok(ended
                    .first()
                    .map(|rank| rank.text.lines().filter_map(of_row).collect())
                    .unwrap_or_default())
            }
        }
    }
}
