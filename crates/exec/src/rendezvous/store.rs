//! The key-value store on rank 0 by which ranks join, gather and hear of failures: its logic, without sockets.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::message::{Keep, Reply, Request};
use crate::ExecError;

/// Bytes of a rank, which go to any number of others.
pub(super) type Payload = Arc<Vec<u8>>;

/// The state of the store on rank 0, without sockets or clocks: what is to be said to whom after what was heard from whom.
#[derive(Debug)]
pub(super) struct Store {
    world_size: usize,
    values: BTreeMap<String, Payload>,
    /// Who waits for a value, in the order in which they asked.
    wanted: BTreeMap<String, Vec<(usize, u64, Keep)>>,
    counters: BTreeMap<String, i64>,
    gatherings: BTreeMap<String, Gathering>,
    left: BTreeSet<usize>,
    /// What all were sent of the first failure.
    failure: Option<Reply>,
}

#[derive(Debug, Default)]
struct Gathering {
    /// By rank: the question's id and the payload.
    parts: BTreeMap<usize, (u64, Payload)>,
}

/// A message to a rank.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Letter {
    pub(super) to: usize,
    pub(super) reply: Reply,
    pub(super) payload: Payload,
}

impl Store {
    pub(super) fn new(world_size: usize) -> Self {
        Self {
            world_size,
            values: BTreeMap::new(),
            wanted: BTreeMap::new(),
            counters: BTreeMap::new(),
            gatherings: BTreeMap::new(),
            left: BTreeSet::new(),
            failure: None,
        }
    }

    /// What follows from a request of `rank`.
    pub(super) fn hear(&mut self, rank: usize, request: Request, payload: Payload) -> Vec<Letter> {
        let one = |to, reply| vec![Letter { to, reply, payload: Arc::default() }];
        match request {
            Request::Set { key } => self.set(key, payload),
            Request::Get { id, key, keep } => self.get(rank, id, key, keep),
            Request::Find { id, key } => match self.values.get(&key).cloned() {
                Some(payload) => vec![Letter { to: rank, reply: Reply::Value { id }, payload }],
                None => one(rank, Reply::Unset { id }),
            },
            Request::Add { id, key, by } => {
                let value = self.counters.entry(key).or_default();
                *value = value.wrapping_add(by);
                one(rank, Reply::Count { id, value: *value })
            }
            Request::Gather { id, place } => self.gather(rank, id, place, payload),
            Request::Missing { id, place } => {
                let came = |rank: &usize| {
                    self.gatherings.get(&place).is_some_and(|gathering| gathering.parts.contains_key(rank))
                };
                let ranks = (0..self.world_size).filter(|rank| !came(rank)).collect();
                one(rank, Reply::Missing { id, ranks })
            }
            Request::Fail { error } => self.fail(rank, error),
            Request::Ask { id, rank: asked } => one(asked, Reply::Describe { asker: rank, id }),
            Request::Activity { asker, id, activity } => one(asker, Reply::Activity { id, activity }),
            Request::Leave => self.leave(rank),
        }
    }

    /// Who waits for others at a place that `rank` has not come to waits no longer.
    fn leave(&mut self, rank: usize) -> Vec<Letter> {
        self.left.insert(rank);
        let in_vain = |_: &String, gathering: &mut Gathering| !gathering.parts.contains_key(&rank);
        let ended = self.gatherings.extract_if(.., in_vain).flat_map(|(_, gathering)| gathering.parts);
        ended.map(|(to, (id, _))| left(to, id, rank)).collect()
    }

    /// What follows when the connection of `rank` has ended.
    pub(super) fn lose(&mut self, rank: usize) -> Vec<Letter> {
        if self.left.contains(&rank) {
            return Vec::new();
        }
        self.end(rank, &Reply::Lost { rank })
    }

    /// An error of `rank` ends the job.
    pub(super) fn fail(&mut self, rank: usize, error: ExecError) -> Vec<Letter> {
        self.end(rank, &Reply::Failed { rank, error })
    }

    /// Whether the job has failed.
    pub(super) fn has_failed(&self) -> bool {
        self.failure.is_some()
    }

    /// What a rank that joins now must know.
    pub(super) fn greet(&self, rank: usize) -> Vec<Letter> {
        let letter = |reply: &Reply| Letter { to: rank, reply: reply.clone(), payload: Arc::default() };
        self.failure.iter().map(letter).collect()
    }

    /// Notifies all but `rank` of the first failure.
    fn end(&mut self, rank: usize, reply: &Reply) -> Vec<Letter> {
        if self.failure.is_some() {
            return Vec::new();
        }
        self.failure = Some(reply.clone());
        let others = (0..self.world_size).filter(|&other| other != rank);
        others.map(|to| Letter { to, reply: reply.clone(), payload: Arc::default() }).collect()
    }

    fn set(&mut self, key: String, value: Payload) -> Vec<Letter> {
        let mut letters = Vec::new();
        for (to, id, keep) in self.wanted.remove(&key).unwrap_or_default() {
            letters.push(Letter { to, reply: Reply::Value { id }, payload: value.clone() });
            if keep == Keep::No {
                return letters;
            }
        }
        self.values.insert(key, value);
        letters
    }

    fn get(&mut self, to: usize, id: u64, key: String, keep: Keep) -> Vec<Letter> {
        let value = match keep {
            Keep::Yes => self.values.get(&key).cloned(),
            Keep::No => self.values.remove(&key),
        };
        match value {
            Some(payload) => vec![Letter { to, reply: Reply::Value { id }, payload }],
            None => {
                self.wanted.entry(key).or_default().push((to, id, keep));
                Vec::new()
            }
        }
    }

    fn gather(&mut self, rank: usize, id: u64, place: String, payload: Payload) -> Vec<Letter> {
        let gathering = self.gatherings.entry(place.clone()).or_default();
        if let Some(&gone) = self.left.iter().find(|gone| !gathering.parts.contains_key(gone)) {
            // Whoever came before has heard when that one left.
            self.gatherings.remove(&place);
            return vec![left(rank, id, gone)];
        }
        gathering.parts.insert(rank, (id, payload));
        if gathering.parts.len() < self.world_size {
            return Vec::new();
        }
        // The place may be used again.
        let parts = self.gatherings.remove(&place).unwrap_or_default().parts;
        let lengths: Vec<usize> = parts.values().map(|(_, part)| part.len()).collect();
        let all: Payload = Arc::new(parts.values().flat_map(|(_, part)| part.iter().copied()).collect());
        let letter = |(&to, (id, _)): (&usize, &(u64, Payload))| Letter {
            to,
            reply: Reply::Gathered { id: *id, lengths: lengths.clone() },
            payload: all.clone(),
        };
        parts.iter().map(letter).collect()
    }
}

/// `gone` never comes to what `to` asked for.
fn left(to: usize, id: u64, gone: usize) -> Letter {
    Letter { to, reply: Reply::Left { id, rank: gone }, payload: Arc::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RendezvousError;

    fn bytes(bytes: &[u8]) -> Payload {
        Arc::new(bytes.to_vec())
    }

    fn get(id: u64, key: &str, keep: Keep) -> Request {
        Request::Get { id, key: key.to_owned(), keep }
    }

    fn set(key: &str) -> Request {
        Request::Set { key: key.to_owned() }
    }

    fn value(to: usize, id: u64, payload: &[u8]) -> Letter {
        Letter { to, reply: Reply::Value { id }, payload: bytes(payload) }
    }

    #[test]
    fn values_are_given_to_those_who_came_first_and_later() {
        let mut store = Store::new(3);
        assert_eq!(store.hear(1, get(7, "a", Keep::Yes), bytes(&[])), []);
        assert_eq!(store.hear(2, get(8, "a", Keep::Yes), bytes(&[])), []);
        assert_eq!(store.hear(0, set("a"), bytes(&[5])), [value(1, 7, &[5]), value(2, 8, &[5])]);
        assert_eq!(store.hear(0, get(1, "a", Keep::No), bytes(&[])), [value(0, 1, &[5])]);
        assert_eq!(store.hear(0, get(2, "a", Keep::Yes), bytes(&[])), []);
        assert_eq!(store.hear(1, set("a"), bytes(&[6])), [value(0, 2, &[6])]);
        // Taken by one who waited: nothing is left.
        assert_eq!(store.hear(1, get(3, "b", Keep::No), bytes(&[])), []);
        assert_eq!(store.hear(1, set("b"), bytes(&[6])), [value(1, 3, &[6])]);
        assert!(!store.values.contains_key("b"));
    }

    #[test]
    fn a_gathering_waits_for_all_and_can_be_held_again() {
        let mut store = Store::new(2);
        let gather = |id| Request::Gather { id, place: "p".to_owned() };
        for round in [3u64, 5] {
            assert_eq!(store.hear(1, gather(round), bytes(&[1, 2])), []);
            let missing = store.hear(1, Request::Missing { id: 9, place: "p".to_owned() }, bytes(&[]));
            assert_eq!(missing[0].reply, Reply::Missing { id: 9, ranks: vec![0] });
            let letters = store.hear(0, gather(round + 1), bytes(&[7]));
            assert_eq!(letters.len(), 2);
            assert_eq!(letters[1].reply, Reply::Gathered { id: round, lengths: vec![1, 2] });
            assert!(letters.iter().all(|letter| *letter.payload == [7, 1, 2]));
        }
    }

    #[test]
    fn a_gathering_ends_when_one_leaves_that_has_not_come() {
        let mut store = Store::new(3);
        let gather = |id, place: &str| Request::Gather { id, place: place.to_owned() };
        // It has come to the first place, and not to the second.
        assert_eq!(store.hear(2, gather(1, "p"), bytes(&[9])), []);
        assert_eq!(store.hear(0, gather(2, "q"), bytes(&[])), []);
        let sent = store.hear(2, Request::Leave, bytes(&[]));
        assert_eq!(sent, [left(0, 2, 2)]);
        assert_eq!(store.hear(1, gather(3, "q"), bytes(&[])), [left(1, 3, 2)]);
        assert_eq!(store.hear(1, gather(4, "p"), bytes(&[])), []);
        assert_eq!(store.hear(0, gather(5, "p"), bytes(&[])).len(), 3);
        assert!(store.gatherings.is_empty());
    }

    #[test]
    fn the_first_failure_is_the_only_one_sent() {
        let mut store = Store::new(3);
        let error = ExecError::from(RendezvousError::RankFailed { rank: 1, error: "x".to_owned() });
        let letters = store.hear(1, Request::Fail { error: error.clone() }, bytes(&[]));
        assert_eq!(letters.iter().map(|letter| letter.to).collect::<Vec<_>>(), [0, 2]);
        assert!(letters.iter().all(|letter| letter.reply == Reply::Failed { rank: 1, error: error.clone() }));
        assert_eq!(store.lose(1), []);
        assert_eq!(store.greet(2)[0].reply, Reply::Failed { rank: 1, error });

        let mut store = Store::new(3);
        store.hear(2, Request::Leave, bytes(&[]));
        assert_eq!(store.lose(2), []);
        assert_eq!(store.lose(1).len(), 2);
    }

    #[test]
    fn counters_and_questions() {
        let mut store = Store::new(2);
        let add = |by| Request::Add { id: 1, key: "c".to_owned(), by };
        assert_eq!(store.hear(0, add(2), bytes(&[]))[0].reply, Reply::Count { id: 1, value: 2 });
        assert_eq!(store.hear(1, add(-3), bytes(&[]))[0].reply, Reply::Count { id: 1, value: -1 });
        let asked = store.hear(0, Request::Ask { id: 4, rank: 1 }, bytes(&[]));
        assert_eq!((asked[0].to, &asked[0].reply), (1, &Reply::Describe { asker: 0, id: 4 }));
    }
}
