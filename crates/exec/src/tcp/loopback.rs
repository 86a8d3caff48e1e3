use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::net::TcpListener;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use super::TcpMachine;
use crate::memory::check_memory;
use crate::monitor::lock;
use crate::{
    CpuBackend, CpuTransport, Ends, ExecError, Launch, Launcher, Machine, MeetingPoint, Rendezvous,
    RendezvousError, SlowLink, World,
};

/// Ranks that are threads of this process and meet as processes do: each has a world of its own, a rendezvous and
/// connections. What proves the transport between processes without starting any.
#[derive(Default)]
pub struct TcpLoopback {
    slow_link: Option<SlowLink>,
    /// Of the ranks that were connected last.
    ranks: Mutex<Vec<Arc<Rendezvous>>>,
}

impl TcpLoopback {
    /// The transport imitates `slow_link`.
    pub fn new(slow_link: Option<SlowLink>) -> Self {
        Self { slow_link, ranks: Mutex::default() }
    }

    fn connect_rank(&self, launch: &Launch, config: &World) -> Result<(Arc<Rendezvous>, End), ExecError> {
        let rendezvous = Rendezvous::join(launch, config.config().limit)?;
        let machine = TcpMachine::new(rendezvous.clone(), 0, self.slow_link)?;
        let world = World::new(launch.world_size, config.config().clone());
        let end = machine.connect(&world)?.pop();
        let gone = || RendezvousError::Broken { rank: launch.rank, reason: "it has no end".to_owned() };
        Ok((rendezvous, end.ok_or_else(gone)?))
    }
}

type End = Ends<TcpLoopback>;

impl Machine for TcpLoopback {
    type Backend = CpuBackend;
    type Transport = CpuTransport;

    /// As many ranks as `world` has, each in a world of its own with the same configuration.
    fn connect(&self, world: &Arc<World>) -> Result<Vec<End>, ExecError> {
        let mut kept = lock(&self.ranks);
        leave(&mut kept);
        let meeting = free_meeting_point()?;
        let connected: Vec<Result<(Arc<Rendezvous>, End), ExecError>> = thread::scope(|scope| {
            let connect = |rank| {
                let (launcher, world_size) = (Launcher::Torchrun, world.size());
                let launch =
                    Launch { launcher, rank, world_size, local_rank: None, meeting: meeting.clone() };
                scope.spawn(move || self.connect_rank(&launch, world))
            };
            let threads: Vec<_> = (0..world.size()).map(connect).collect();
            let join = |(rank, thread): (usize, thread::ScopedJoinHandle<'_, _>)| {
                thread.join().unwrap_or_else(|_| {
                    let (place, message) = ("connecting".to_owned(), "see above".to_owned());
                    Err(ExecError::RankPanicked { rank, place, message })
                })
            };
            threads.into_iter().enumerate().map(join).collect()
        });
        let mut ends = Vec::with_capacity(connected.len());
        for rank in connected {
            let (rendezvous, end) = rank.map_err(|error| world.fail(error))?;
            kept.push(rendezvous);
            ends.push(end);
        }
        Ok(ends)
    }

    fn check_memory(&self, ranks: u64, host: u64) -> Result<(), ExecError> {
        check_memory(ranks.saturating_add(host))
    }
}

impl Drop for TcpLoopback {
    fn drop(&mut self) {
        leave(self.ranks.get_mut().unwrap_or_else(PoisonError::into_inner));
    }
}

/// Rank 0 last, which waits for the others.
fn leave(ranks: &mut Vec<Arc<Rendezvous>>) {
    while ranks.pop().is_some() {}
}

fn free_meeting_point() -> Result<MeetingPoint, ExecError> {
    let host = "127.0.0.1".to_owned();
    let port = TcpListener::bind((host.as_str(), 0)).and_then(|listener| listener.local_addr());
    let port = port.map_err(|error| RendezvousError::Listen {
        address: host.clone(),
        reason: error.to_string(),
        variable: crate::RENDEZVOUS_VARIABLE.to_owned(),
    })?;
    let job = RandomState::new().hash_one(port);
    // The port is free now; should another take it first, the next ones are tried.
    let ports = (0..4).filter_map(|step| port.port().checked_add(step)).collect();
    Ok(MeetingPoint { host, ports, job: format!("{job:x}") })
}
