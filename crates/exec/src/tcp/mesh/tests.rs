//! Two ranks on threads, connected as processes are.

use std::sync::OnceLock;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use super::*;
use crate::WorldConfig;

const RANKS: usize = 2;
/// Messages that a connection takes only while its other end reads.
const LONG: usize = 64 << 20;
const QUESTIONS: usize = 3;

/// Answers requests, as the inbox of a GPU rank does.
#[derive(Default)]
struct Answering {
    mesh: OnceLock<Arc<Mesh<Question>>>,
    answered: AtomicUsize,
    taken: AtomicUsize,
}

#[derive(Serialize, Deserialize)]
enum Question {
    Ask,
    Answer,
    Rows,
}

impl Recipient for Answering {
    type Message = Question;

    fn receive(&self, peer: usize, message: Question, payload: &[u8]) -> Result<(), ConnectionFault> {
        match message {
            Question::Ask => {
                // By now this rank is in the middle of its rows.
                thread::sleep(10 * LOOK);
                self.mesh.wait().answer(peer, Question::Answer).unwrap();
            }
            Question::Answer => _ = self.answered.fetch_add(1, Ordering::AcqRel),
            Question::Rows => _ = self.taken.fetch_add(payload.len(), Ordering::AcqRel),
        }
        Ok(())
    }
}

/// Both are in the middle of a long message to each other when the other's question comes: who reads must go on reading.
#[test]
fn ranks_that_write_much_to_each_other_answer_meanwhile() {
    let limit = Duration::from_secs(10);
    let token = JobToken::random().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let host = Mutex::new(Some(Rendezvous::host(listener, RANKS, &token, limit).unwrap()));
    let join = |rank: usize| {
        let host = lock(&host).take_if(|_| rank == 0);
        host.map_or_else(
            || Rendezvous::join(address, rank, RANKS, &token, limit),
            |host| host.join(address.ip(), limit),
        )
    };
    let run = |rank: usize| {
        let rendezvous = join(rank).unwrap();
        let world = World::new(RANKS, WorldConfig { limit, ..WorldConfig::default() });
        rendezvous.attach(&world).unwrap();
        let inbox = Arc::new(Answering::default());
        let mesh = Arc::new(Mesh::connect(&rendezvous, &world, &inbox, "test").unwrap());
        inbox.mesh.set(mesh.clone()).ok();
        let (peer, rows) = (1 - rank, vec![7; LONG]);
        for _ in 0..QUESTIONS {
            mesh.send(peer, &Question::Ask, &[]).unwrap();
        }
        mesh.send(peer, &Question::Rows, &[&rows]).unwrap();
        let deadline = Instant::now() + limit;
        let done = || {
            let (answered, taken) = (&inbox.answered, &inbox.taken);
            (answered.load(Ordering::Acquire), taken.load(Ordering::Acquire)) == (QUESTIONS, LONG)
        };
        while !done() && Instant::now() < deadline {
            world.check().unwrap();
            thread::sleep(LOOK);
        }
        assert!(done(), "rank {rank}: {:?} answers, {:?} bytes", inbox.answered, inbox.taken);
        rendezvous.barrier("the end").unwrap();
        world.check().unwrap();
    };
    thread::scope(|scope| {
        for rank in 0..RANKS {
            scope.spawn({
                let run = &run;
                move || run(rank)
            });
        }
    });
}
