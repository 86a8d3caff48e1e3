//! Ranks that reach each other as processes do, as threads of one process, each with a GPU of the driver that has none.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use counterpoint_cuda::{CudaProcess, Timing, TransportKind};
use counterpoint_exec::{Group, JobToken, Rendezvous, WorldConfig};
use counterpoint_plan::Topology;

pub(crate) const LIMIT: Duration = Duration::from_secs(20);

pub(crate) fn config() -> WorldConfig {
    WorldConfig { limit: LIMIT, poison: false, ..WorldConfig::default() }
}

/// Runs `rank` on so many ranks that reach each other as processes do, each on a GPU of its own.
pub(crate) fn on_processes<R: Send>(
    ranks: usize,
    transport: TransportKind,
    rank: impl Fn(&Arc<Rendezvous>, &Group<CudaProcess>) -> R + Sync,
) -> Vec<R> {
    on_processes_that_fail(ranks, transport, |rendezvous, group| {
        let done = rank(rendezvous, group);
        group.clone().close().unwrap();
        done
    })
}

/// The same, who do not close the group.
pub(crate) fn on_processes_that_fail<R: Send>(
    ranks: usize,
    transport: TransportKind,
    rank: impl Fn(&Arc<Rendezvous>, &Group<CudaProcess>) -> R + Sync,
) -> Vec<R> {
    let here = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let token = JobToken::random().unwrap();
    let host = Rendezvous::host(TcpListener::bind((here, 0)).unwrap(), ranks, &token, LIMIT).unwrap();
    let address = SocketAddr::new(here, host.port());
    let mut host = Some(host);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks)
            .map(|number| {
                let (token, host, rank) = (&token, host.take(), &rank);
                scope.spawn(move || {
                    let rendezvous = match host {
                        Some(host) => host.join(here, LIMIT),
                        None => Rendezvous::join(address, number, ranks, token, LIMIT),
                    }
                    .unwrap();
                    let topology = Topology::flat(ranks);
                    let machine =
                        CudaProcess::new(&rendezvous, Some(number), Timing::Off, transport, topology)
                            .unwrap();
                    let group = Group::connect(&machine, ranks, config()).unwrap();
                    rank(&rendezvous, &group)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}
