//! An NCCL without a GPU, for tests of how ranks call it: compiled by itself as `libnccl.so.2` ([`super`] says how). As NCCL does, it connects
//! ranks for a size of reduce-scatter in the first call, inside which each waits for the others' calls, unless one group has them all.
//! It sums f32 at once when the last rank has called, for what the driver loaded with it takes for memory of a device is memory. Sends and
//! receives do nothing.

#![allow(non_snake_case, clippy::missing_safety_doc)]

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_char, c_int, c_void};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// What names a group of ranks.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Id([u8; 128]);

/// A rank's end.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank {
    group: u8,
    rank: usize,
    ranks: usize,
}

/// A reduce-scatter of one rank.
#[derive(Clone, Copy)]
struct Sum {
    from: usize,
    to: usize,
    elements: usize,
}

/// What a rank has asked for between the begin and the end of a group of calls.
type Asked = Vec<(Rank, Vec<Sum>)>;

#[derive(Default)]
struct Books {
    groups: u8,
    /// Ranks that have called a size, until all of a group have.
    connecting: BTreeMap<(u8, Vec<usize>), BTreeSet<usize>>,
    /// Sizes for which a group is connected.
    connected: BTreeSet<(u8, Vec<usize>)>,
    /// Calls whose sums are not formed yet, by how many their rank has made before.
    calls: BTreeMap<(u8, usize), BTreeMap<usize, Vec<Sum>>>,
    made: BTreeMap<(u8, usize), usize>,
}

static BOOKS: Mutex<Option<Books>> = Mutex::new(None);
static CALLED: Condvar = Condvar::new();

thread_local! {
    static DEPTH: Cell<usize> = const { Cell::new(0) };
    static ASKED: RefCell<Asked> = const { RefCell::new(Vec::new()) };
}

const INTERNAL_ERROR: u32 = 3;
/// The real one waits for ever; the test is to fail.
const LIMIT: Duration = Duration::from_secs(5);

fn with<R>(use_books: impl FnOnce(&mut Books) -> R) -> R {
    use_books(BOOKS.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default())
}

/// Connects the ranks that have asked; `false` where the others never call.
fn connect(asked: &Asked) -> bool {
    let key = |(rank, sums): &(Rank, Vec<Sum>)| (rank.group, sums.iter().map(|sum| sum.elements).collect());
    with(|books| {
        for call in asked {
            let key = key(call);
            if !books.connected.contains(&key) {
                let here = books.connecting.entry(key.clone()).or_default();
                here.insert(call.0.rank);
                if here.len() == call.0.ranks {
                    books.connecting.remove(&key);
                    books.connected.insert(key);
                }
            }
        }
    });
    CALLED.notify_all();
    let books = BOOKS.lock().unwrap_or_else(PoisonError::into_inner);
    let waits = |books: &mut Option<Books>| {
        books.as_ref().is_some_and(|books| !asked.iter().all(|call| books.connected.contains(&key(call))))
    };
    let waited = CALLED.wait_timeout_while(books, LIMIT, waits).unwrap_or_else(PoisonError::into_inner);
    !waited.1.timed_out()
}

/// Forms the sums of a call that all ranks have made.
fn launch((rank, sums): (Rank, Vec<Sum>)) {
    with(|books| {
        let made = books.made.entry((rank.group, rank.rank)).or_default();
        let call = (rank.group, *made);
        *made += 1;
        let of_ranks = books.calls.entry(call).or_default();
        of_ranks.insert(rank.rank, sums);
        if of_ranks.len() < rank.ranks {
            return;
        }
        let of_ranks = books.calls.remove(&call).unwrap_or_default();
        for (to_rank, own) in &of_ranks {
            for (at, sum) in own.iter().enumerate() {
                for element in 0..sum.elements {
                    let total: f32 = of_ranks
                        .values()
                        // SAFETY: what a caller names lies in memory that lives until the call has ended.
                        .map(|sums| unsafe {
                            *(sums[at].from as *const f32).add(to_rank * sum.elements + element)
                        })
                        .sum();
                    // SAFETY: as above.
                    unsafe { *(sum.to as *mut f32).add(element) = total };
                }
            }
        }
    });
}

fn end() -> u32 {
    let asked = ASKED.take();
    if !connect(&asked) {
        return INTERNAL_ERROR;
    }
    asked.into_iter().for_each(launch);
    0
}

/// # Safety
/// As of NCCL's function of this name; so below.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { *version = 22_809 };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetErrorString(_code: u32) -> *const c_char {
    c"the other ranks never called".as_ptr()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetUniqueId(id: *mut Id) -> u32 {
    let number = with(|books| {
        books.groups += 1;
        books.groups
    });
    // SAFETY: the caller's promise.
    unsafe { *id = Id([number; 128]) };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankConfig(
    handle: *mut *mut Rank,
    ranks: c_int,
    id: Id,
    rank: c_int,
    _config: *const c_void,
) -> u32 {
    let rank = Rank { group: id.0[0], rank: rank as usize, ranks: ranks as usize };
    // SAFETY: the caller's promise.
    unsafe { *handle = Box::into_raw(Box::new(rank)) };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetAsyncError(_handle: *mut Rank, result: *mut u32) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { *result = 0 };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommAbort(handle: *mut Rank) -> u32 {
    // SAFETY: made by ncclCommInitRankConfig, and nobody has it any more.
    drop(unsafe { Box::from_raw(handle) });
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGroupStart() -> u32 {
    DEPTH.set(DEPTH.get() + 1);
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGroupEnd() -> u32 {
    DEPTH.set(DEPTH.get() - 1);
    if DEPTH.get() == 0 { end() } else { 0 }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclReduceScatter(
    from: usize,
    to: usize,
    elements: usize,
    _kind: c_int,
    _op: c_int,
    handle: *mut Rank,
    _stream: usize,
) -> u32 {
    // SAFETY: a handle is alive while it is used.
    let rank = unsafe { *handle };
    if rank.rank == 1 && std::env::var_os("HOLLOW_NCCL_REFUSES_RANK_1").is_some() {
        return INTERNAL_ERROR;
    }
    let sum = Sum { from, to, elements };
    ASKED.with_borrow_mut(|asked| match asked.iter_mut().find(|(known, _)| *known == rank) {
        Some((_, sums)) => sums.push(sum),
        None => asked.push((rank, vec![sum])),
    });
    if DEPTH.get() == 0 { end() } else { 0 }
}

/// Functions that do nothing here.
macro_rules! idle {
    ($($name:ident($($kind:ty),*);)*) => {
        $(
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($(_: $kind),*) -> u32 {
                0
            }
        )*
    };
}

idle! {
    ncclSend(usize, usize, c_int, c_int, usize, usize);
    ncclRecv(usize, usize, c_int, c_int, usize, usize);
    ncclAllGather(usize, usize, usize, c_int, usize, usize);
    ncclAllReduce(usize, usize, usize, c_int, c_int, usize, usize);
}
