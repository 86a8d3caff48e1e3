//! What stays on the board and for how long, and how parts are found there.

use std::thread;

use counterpoint_schedule::StreamKind;

use super::*;
use crate::WorldConfig;
use crate::collective::Listener;

/// Nothing travels.
struct Nothing;

impl Payload for Nothing {
    fn spent(&self) -> Self {
        Self
    }
}

/// Says whether it is what is left.
struct Memory(bool);

impl Payload for Memory {
    fn spent(&self) -> Self {
        Self(false)
    }
}

/// Else who comes late would not find where memory is, or memory would stay that nobody needs.
#[test]
fn a_post_keeps_its_memory_until_its_rank_and_all_users_are_through() {
    let world = World::new(3, WorldConfig::default());
    let place = OpPlace::new(0, "cast k v");
    for finishes_first in [true, false] {
        let board = Board::<Memory>::new(&world);
        let users = [1, 2].map(|rank| PeerRows { rank, rows: Vec::new() });
        let contract =
            crate::collective::contract::Contract { kind: String::new(), tensors: Vec::new(), plan: None };
        let collective = Collective {
            contract,
            pattern: crate::collective::pattern::Pattern::default(),
            tensors: Vec::new(),
            reduction: None,
            delivery_parts: None,
        };
        let post = Post {
            place: place.clone(),
            collective: Arc::new(collective),
            at: Instant::now(),
            payload: Memory(true),
        };
        board.publish(0, 0, post, &users);
        let has_memory = || board.slots[0].peek(|slot| slot.posts[&0].post.payload.0);
        board.acknowledge(0, 0, 1);
        if finishes_first {
            board.finish(0, 0, &place);
            assert!(has_memory());
            board.acknowledge(0, 0, 2);
        } else {
            board.acknowledge(0, 0, 2);
            assert!(has_memory());
            board.finish(0, 0, &place);
        }
        assert!(!has_memory());
    }
}

/// Publishes the part of a rank when it is asked for the third time, as one that finds it in shared memory then.
struct Third<'a>(&'a Board<Nothing>, AtomicU64);

impl Listener for Third<'_> {
    fn listen(&self, peer: usize) -> bool {
        if self.1.fetch_add(1, Ordering::Relaxed) == 2 {
            let contract = crate::collective::contract::Contract {
                kind: String::new(),
                tensors: Vec::new(),
                plan: None,
            };
            let pattern = crate::collective::pattern::Pattern::default();
            let (tensors, reduction, delivery_parts) = (Vec::new(), None, None);
            let collective = Arc::new(Collective { contract, pattern, tensors, reduction, delivery_parts });
            let (place, at) = (OpPlace::new(0, "cast k v"), Instant::now());
            self.0.publish(peer, 0, Post { place, collective, at, payload: Nothing }, &[]);
        }
        true
    }
}

/// Nobody wakes who waits for a part that comes so, asleep or not.
#[test]
fn what_no_thread_listens_to_is_found_by_who_waits() {
    for polls in [Duration::ZERO, Duration::from_secs(10)] {
        let world = World::new(2, WorldConfig::default());
        let board = Board::<Nothing>::of_rank(&world, 0);
        let status = world.register_stream(0, "group-cast", StreamKind::Communication);
        let place = OpPlace::new(0, "cast k v");
        let listener = Third(&board, AtomicU64::new(0));
        let waiter = Waiter { rank: 0, place: &place, status: &status, polls, listener: Some(&listener) };
        assert_eq!(board.post_of(&world, &waiter, 1, 0).unwrap().place.label, place.label);
    }
}

/// What rank 0 hears that waits for a rank of another process that has left.
fn heard(fails: bool) -> ExecError {
    let world = World::new(2, WorldConfig::default());
    let board = Board::<Nothing>::of_rank(&world, 0);
    let place = OpPlace::new(0, "cast k v");
    let status = world.register_stream(0, "group-cast", StreamKind::Communication);
    let waiter = Waiter { rank: 0, place: &place, status: &status, polls: Duration::ZERO, listener: None };
    board.leave(1, 0);
    thread::scope(|scope| {
        if fails {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(20));
                let (place, message) = ("`cast k v`".to_owned(), "on purpose".to_owned());
                world.fail(ExecError::RankPanicked { rank: 1, place, message })
            });
        }
        board.post_of(&world, &waiter, 1, 0).err().unwrap()
    })
}

/// Its farewell may come before the news of its failure.
#[test]
fn a_rank_that_failed_and_left_is_said_to_have_failed() {
    assert!(matches!(heard(true), ExecError::RankPanicked { rank: 1, .. }), "{}", heard(true));
    assert!(matches!(heard(false), ExecError::Left { left: 1, rank: 0, .. }), "{}", heard(false));
}
