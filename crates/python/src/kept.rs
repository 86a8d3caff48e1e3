//! What was made ready on a group and may be called again, or is made ready ahead of its first call: kept by what it is, latest first.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use counterpoint_exec::ExecError;

/// How many of a kind stay ready, unless it says otherwise.
const KEPT: usize = 32;

/// Layers that are ready, each with the key that all its Programs depend on.
pub(crate) struct Kept<K, L> {
    all: Mutex<All<K, L>>,
    /// Those that were called and no graph replays.
    most: usize,
    /// Those that were asked for ahead and nobody has called yet.
    most_ahead: usize,
}

struct All<K, L> {
    kept: Vec<One<K, L>>,
    /// How many were asked for so far.
    asked: u64,
}

struct One<K, L> {
    key: K,
    slot: Arc<Slot<L>>,
    /// Whether a graph of the caller replays it.
    is_captured: bool,
    was_called: bool,
}

/// What a layer is asked for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Purpose {
    Call,
    /// A call that a graph of the caller captures.
    Capture,
    /// A call that comes later, or never.
    Later,
}

/// Where a layer is, once somebody has made it ready.
struct Slot<L> {
    /// How many others were asked for before it.
    turn: u64,
    /// Whoever makes it ready holds it meanwhile.
    layer: Mutex<Option<L>>,
}

impl<L> Slot<L> {
    /// Has `work` use the layer, which `make` makes ready where it is not.
    fn with<T>(
        &self,
        make: impl FnOnce(u64) -> Result<L, ExecError>,
        work: impl FnOnce(&mut L) -> Result<T, ExecError>,
    ) -> Result<T, ExecError> {
        let mut layer = lock(&self.layer);
        match &mut *layer {
            Some(layer) => work(layer),
            none => work(none.insert(make(self.turn)?)),
        }
    }
}

impl<K, L> Default for Kept<K, L> {
    fn default() -> Self {
        Self::of(KEPT, 0)
    }
}

impl<K, L> Kept<K, L> {
    /// At most so many that no graph replays, and besides them so many that were asked for ahead.
    pub(crate) fn of(most: usize, most_ahead: usize) -> Self {
        Self { all: Mutex::new(All { kept: Vec::new(), asked: 0 }), most, most_ahead }
    }
}

impl<K: Clone + PartialEq, L> Kept<K, L> {
    /// Has `work` use the layer of a key, which `make` makes ready where it is not, with its turn: how many were asked for before it.
    pub(crate) fn with<T>(
        &self,
        key: &K,
        make: impl FnOnce(u64) -> Result<L, ExecError>,
        work: impl FnOnce(&mut L) -> Result<T, ExecError>,
    ) -> Result<T, ExecError> {
        let (slot, _) = self.asked_for(key, Purpose::Call);
        slot.with(make, work)
    }

    /// Asks for the layer of a key, which [`Kept::make`] or the first call makes ready. False where it was asked for before.
    pub(crate) fn ask(&self, key: &K) -> bool {
        self.asked_for(key, Purpose::Later).1
    }

    /// Makes ready what was asked for, unless somebody has, or nobody keeps it any more.
    pub(crate) fn make(
        &self,
        key: &K,
        make: impl FnOnce(u64) -> Result<L, ExecError>,
    ) -> Result<(), ExecError> {
        let slot = lock(&self.all).kept.iter().find(|one| one.key == *key).map(|one| one.slot.clone());
        slot.map_or(Ok(()), |slot| slot.with(make, |_| Ok(())))
    }

    /// The place of a key's layer, and whether it is new.
    fn asked_for(&self, key: &K, purpose: Purpose) -> (Arc<Slot<L>>, bool) {
        let mut gone = Vec::new();
        let mut all = lock(&self.all);
        let known = all.kept.iter().position(|known| known.key == *key);
        let mut latest = match known {
            Some(index) => all.kept.remove(index),
            None => {
                all.asked += 1;
                let slot = Arc::new(Slot { turn: all.asked, layer: Mutex::new(None) });
                One { key: key.clone(), slot, is_captured: false, was_called: false }
            }
        };
        latest.was_called |= purpose == Purpose::Call;
        latest.is_captured |= purpose == Purpose::Capture;
        let slot = latest.slot.clone();
        all.kept.insert(0, latest);
        let (mut called, mut ahead) = (0, 0);
        let mut stays = |one: &mut One<K, L>| {
            let (count, most) = match one.was_called {
                true => (&mut called, self.most),
                false => (&mut ahead, self.most_ahead),
            };
            *count += usize::from(!one.is_captured);
            one.is_captured || *count <= most
        };
        gone.extend(all.kept.extract_if(.., |one| !stays(one)));
        // What goes may be being made ready, and takes a while: not while others wait for the lock.
        drop(all);
        drop(gone);
        (slot, known.is_none())
    }

    /// Has the layer of a key stay from now on, whether or not it is there yet: before it is called for a graph of the caller, which
    /// replays it. Afterwards a call of another thread may have taken its place.
    pub(crate) fn keep(&self, key: &K) {
        self.asked_for(key, Purpose::Capture);
    }

    /// Lets go of layers that graphs replayed.
    pub(crate) fn let_go(&self) {
        lock(&self.all).kept.retain(|kept| !kept.is_captured);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
