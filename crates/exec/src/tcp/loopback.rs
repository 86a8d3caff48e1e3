//! Ranks that are threads of one process and join as processes do.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use counterpoint_choose::LinearMachine;

use super::TcpMachine;
use crate::machine::linear_on_cpus;
use crate::memory::check_memory;
use crate::monitor::lock;
use crate::{
    CpuBackend, CpuTransport, Ends, ExecError, JobToken, Machine, RENDEZVOUS_VARIABLE, Rendezvous,
    RendezvousError, RendezvousHost, SlowLink, StoreFault, World,
};

/// Ranks that are threads of this process and join as processes do: each has a world of its own, a rendezvous and
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

    fn connect_rank(
        &self,
        rank: usize,
        rendezvous: Result<Arc<Rendezvous>, ExecError>,
        of_world: &World,
    ) -> Result<(Arc<Rendezvous>, End), ExecError> {
        let rendezvous = rendezvous?;
        let machine = TcpMachine::new(rendezvous.clone(), 0, self.slow_link)?;
        let world = World::new(of_world.size(), of_world.config().clone());
        let end = machine.connect(&world)?.pop();
        let gone = || RendezvousError::Broken { rank, reason: StoreFault::NoEnd };
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
        let (world_size, limit) = (world.size(), world.config().limit);
        let token = JobToken::random().map_err(|error| cannot_listen(error.to_string()))?;
        let host = host(world_size, &token, limit)?;
        let address = SocketAddr::new(LOOPBACK, host.port());
        let mut host = Some(host);
        let connected: Vec<Result<(Arc<Rendezvous>, End), ExecError>> = thread::scope(|scope| {
            let connect = |rank| {
                let (token, host) = (&token, host.take());
                scope.spawn(move || {
                    let rendezvous = match host {
                        Some(host) => host.join(LOOPBACK, limit),
                        None => Rendezvous::join(address, rank, world_size, token, limit),
                    };
                    self.connect_rank(rank, rendezvous, world)
                })
            };
            let threads: Vec<_> = (0..world_size).map(connect).collect();
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

    fn linear(&self, ranks: usize) -> LinearMachine {
        linear_on_cpus(ranks, self.slow_link)
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

const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

fn host(world_size: usize, token: &JobToken, limit: Duration) -> Result<RendezvousHost, ExecError> {
    let listener = TcpListener::bind((LOOPBACK, 0)).map_err(|error| cannot_listen(error.to_string()))?;
    Rendezvous::host(listener, world_size, token, limit)
}

fn cannot_listen(text: String) -> RendezvousError {
    let (address, variable) = (LOOPBACK.to_string(), RENDEZVOUS_VARIABLE.to_owned());
    RendezvousError::Listen { address, text, variable }
}
