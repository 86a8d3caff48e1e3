//! NCCL's own reduce-scatter behind group-reduces, with a driver and an NCCL that have no GPU.

#![allow(unsafe_code)]

use std::thread;
use std::time::{Duration, Instant};

use counterpoint_cuda::{CudaMachine, Device, Timing};
use counterpoint_exec::{
    Backend, CollectiveSpec, Group, GroupCollective, HostData, HostTensor, Machine, Reduce, TensorPair,
};
use counterpoint_mask::Range;
use counterpoint_plan::{DType, GroupPart, OwnedSplit, RemoteSplit};
use counterpoint_schedule::{Accumulate, ReduceOp};

mod hollow_driver;
mod support;

use hollow_driver::processes::{config, on_processes, on_processes_that_fail};

const RANKS: usize = 2;
const COLUMNS: usize = 8;

/// A reduce-scatter of so many rows for each rank.
fn reduce_scatter(rows: usize) -> CollectiveSpec {
    let part = GroupPart {
        owned: vec![OwnedSplit { rows: Range::new(0, rows), ranks: (0..RANKS as u32).collect() }],
        remote: (0..RANKS)
            .map(|owner| RemoteSplit {
                rows: Range::new(owner * rows, (owner + 1) * rows),
                rank: owner as u32,
            })
            .collect(),
    };
    let reduce = Reduce {
        op: ReduceOp::Sum,
        accumulate: Accumulate::Start,
        wire_dtype: DType::F32,
        reduce_dtype: DType::F32,
    };
    let pair = TensorPair {
        input: (vec![RANKS * rows, COLUMNS], DType::F32),
        output: (vec![rows, COLUMNS], DType::F32),
    };
    CollectiveSpec {
        label: "sums".to_owned(),
        part,
        what: GroupCollective::Reduce(reduce),
        tensors: vec![pair],
    }
}

fn tensor(rows: usize, value: impl Fn(usize) -> f32) -> HostTensor {
    let values = (0..rows * COLUMNS).map(value).collect();
    HostTensor::new(vec![rows, COLUMNS], HostData::F32(values))
}

/// What a rank gives: small whole numbers, which no order of a sum rounds.
fn given(rank: usize, rows: usize) -> HostTensor {
    tensor(RANKS * rows, |at| (at * (rank + 2)) as f32)
}

fn wanted(rank: usize, rows: usize) -> HostTensor {
    let factor: usize = (0..RANKS).map(|other| other + 2).sum();
    tensor(rows, |at| ((rank * rows * COLUMNS + at) * factor) as f32)
}

/// Sums of two sizes, the first of them twice, over all ranks of this process at once or a thread each.
fn sums<M: Machine>(group: &Group<M>, a_thread_each: bool, all_have_called: impl Fn(usize)) {
    for (call, rows) in [4, 64, 4].into_iter().enumerate() {
        let calls = group.collective(|_| reduce_scatter(rows)).unwrap();
        let tensors: Vec<_> = group
            .ranks()
            .iter()
            .map(|rank| {
                let upload = |name, tensor| rank.backend().upload(name, tensor).unwrap();
                (upload("given", given(rank.rank(), rows)), upload("sums", tensor(rows, |_| f32::NAN)))
            })
            .collect();
        let pairs: Vec<_> = tensors.iter().map(|(from, to)| [(from, to)]).collect();
        if a_thread_each {
            thread::scope(|scope| {
                for (rank, pair) in calls.ranks().iter().zip(&pairs) {
                    scope.spawn(|| rank.call(pair, None).unwrap());
                }
            });
        } else {
            let pairs: Vec<_> = pairs.iter().map(|pair| &pair[..]).collect();
            drop(calls.call(&pairs, None).unwrap());
        }
        group.synchronize().unwrap();
        // No kernel waits here for those of other processes.
        all_have_called(call);
        for (rank, (_, sums)) in group.ranks().iter().zip(&tensors) {
            let found = rank.backend().download(sums).unwrap();
            assert_eq!(found, wanted(rank.rank(), rows), "{rows} rows, rank {}", rank.rank());
        }
    }
}

fn two_gpus() -> Group<CudaMachine> {
    let devices = (0..RANKS).map(|ordinal| Device::open(ordinal).unwrap()).collect();
    let machine = CudaMachine::new(devices, Timing::Off).unwrap();
    let machine = machine.with_transport("nccl+library-sums".parse().unwrap()).unwrap();
    Group::connect(&machine, RANKS, config()).unwrap()
}

#[test]
fn ranks_of_one_thread_are_summed_by_nccl_itself() {
    if support::no_compiler() || !hollow_driver::is_loaded("ranks_of_one_thread_are_summed_by_nccl_itself") {
        return;
    }
    let group = two_gpus();
    sums(&group, false, |_| ());
    group.close().unwrap();
    // The ranks are connected already, and those sizes known.
    sums(&two_gpus(), false, |_| ());
}

#[test]
fn ranks_of_a_thread_each_are_summed_by_nccl_itself() {
    if support::no_compiler() || !hollow_driver::is_loaded("ranks_of_a_thread_each_are_summed_by_nccl_itself")
    {
        return;
    }
    sums(&two_gpus(), true, |_| ());
}

#[test]
fn ranks_of_a_process_each_are_summed_by_nccl_itself() {
    if support::no_compiler()
        || !hollow_driver::is_loaded("ranks_of_a_process_each_are_summed_by_nccl_itself")
    {
        return;
    }
    on_processes(2, "nccl+library-sums".parse().unwrap(), |rendezvous, group| {
        sums(group, false, |call| {
            rendezvous.all_gather(&format!("sums {call}"), &[]).unwrap();
        });
    });
}

/// Rank 0 is inside NCCL by then, which waits for rank 1 for ever, and is given up.
#[test]
fn a_rank_that_waits_inside_nccl_hears_that_another_has_failed() {
    let name = "a_rank_that_waits_inside_nccl_hears_that_another_has_failed";
    if support::no_compiler() || !hollow_driver::is_loaded(name) {
        return;
    }
    // SAFETY: no other thread of this process is there yet.
    unsafe { std::env::set_var("HOLLOW_NCCL_REFUSES_RANK_1", "1") };
    let found = on_processes_that_fail(2, "nccl+library-sums".parse().unwrap(), |_, group| {
        let calls = group.collective(|_| reduce_scatter(4)).unwrap();
        let backend = group.ranks()[0].backend();
        let given = backend.upload("given", tensor(RANKS * 4, |_| 1.0)).unwrap();
        let sums = backend.upload("sums", tensor(4, |_| 0.0)).unwrap();
        let began = Instant::now();
        let error = calls.call(&[&[(&given, &sums)]], None).map(drop).unwrap_err();
        (error.to_string(), began.elapsed())
    });
    for (rank, (error, waited)) in found.iter().enumerate() {
        assert!(error.contains("the other ranks never called"), "rank {rank}: {error}");
        assert!(*waited < Duration::from_secs(4), "rank {rank}: {waited:?}");
    }
}
