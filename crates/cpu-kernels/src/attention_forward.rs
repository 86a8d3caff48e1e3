//! The CPU's attention forward: online softmax over key blocks, whole or in stages that hand a state on.

use std::ops::ControlFlow;
use std::sync::Mutex;

use counterpoint_mask::{Band, Range};
use counterpoint_plan::KEY_BLOCK;
use rayon::ThreadPool;

use crate::element::HostElement;
use crate::key_rows::{Arrived, KeyRows};
use crate::matmul::{Mat, MatMut, matmul};
use crate::normalise::{RowState, normalise};
use crate::poison::PoisonedRows;
use crate::queue::{drain, lock};
use crate::real::{Element, Real};
use crate::score::{Scoring, row_max, row_sum};
use crate::shape::HeadShape;
use crate::shape::{check_len, rows_of};
use crate::tile::{Strips, blocks_of_tile, gather, split_heads, strip};

/// Tensors and numbers of one forward stage, as in [`counterpoint_schedule::AttentionForward`].
pub struct ForwardArgs<'a, T: Element> {
    /// Heads and their sizes.
    pub shape: HeadShape,
    /// `[q_rows, heads_q, head_dim]`
    pub q: &'a [T],
    /// `[key_rows, heads_kv, head_dim]`
    pub k: &'a [T],
    /// `[key_rows, heads_kv, head_dim_v]`
    pub v: &'a [T],
    /// What the stage goes on from and what it leaves.
    pub mode: ForwardMode<'a, T>,
    /// Unmasked pairs in rows of `q` and of all keys; bands do not overlap.
    pub bands: &'a [Band],
    /// Factor on `q k^T`.
    pub scale: f64,
    /// 0 for none.
    pub softcap: f64,
    /// `[heads_q]`: takes the largest score of each query head, if larger than what is there.
    pub max_logits: Option<&'a mut [T::Accumulator]>,
}

/// What a forward stage goes on from and what it leaves, as in [`counterpoint_schedule::ForwardBegin`] and
/// [`counterpoint_schedule::ForwardEnd`].
pub enum ForwardMode<'a, T: Element> {
    /// The only stage: results at once.
    Whole(ResultArgs<'a, T>),
    /// The first of several: begins the state.
    First(StateMutArgs<'a, T::Accumulator>),
    /// In between: continues the state in place.
    Next(StateMutArgs<'a, T::Accumulator>),
    /// The last of several: turns the state into results.
    Last(StateArgs<'a, T::Accumulator>, ResultArgs<'a, T>),
}

/// The state between stages, to read.
#[derive(Clone, Copy)]
pub struct StateArgs<'a, R> {
    /// `[q_rows, heads_q, head_dim_v]`
    pub acc: &'a [R],
    /// `[q_rows, heads_q]`
    pub row_max: &'a [R],
    /// `[q_rows, heads_q]`
    pub row_sum: &'a [R],
}

/// The state between stages, to write.
pub struct StateMutArgs<'a, R> {
    /// `[q_rows, heads_q, head_dim_v]`
    pub acc: &'a mut [R],
    /// `[q_rows, heads_q]`
    pub row_max: &'a mut [R],
    /// `[q_rows, heads_q]`
    pub row_sum: &'a mut [R],
}

/// Results, every element of which is written. A row that saw nothing gets `out = 0` and `lse = -inf` (with a sink, its
/// logsumexp).
pub struct ResultArgs<'a, T: Element> {
    /// `[seqlen_sink, heads_q]`
    pub sink: Option<&'a [T::Accumulator]>,
    /// `[q_rows, heads_q, head_dim_v]`
    pub out: &'a mut [T],
    /// `[q_rows, heads_q]`
    pub lse: &'a mut [T::Accumulator],
}

/// A tile of query rows of one key head: the heads of its group, stacked.
struct Tile<'a, T: Element> {
    head: usize,
    rows: Range,
    bands: &'a [Band],
    weight: u64,
    target: Target<'a, T>,
}

/// A tile's part of what the stage leaves; entries are rows of one head group.
enum Target<'a, T: Element> {
    State {
        acc: Vec<&'a mut [T::Accumulator]>,
        row_max: Vec<&'a mut [T::Accumulator]>,
        row_sum: Vec<&'a mut [T::Accumulator]>,
    },
    Result {
        out: Vec<&'a mut [T]>,
        lse: Vec<&'a mut [T::Accumulator]>,
    },
}

/// What the tiles read.
struct Inputs<'a, T: Element> {
    shape: HeadShape,
    q: &'a [T],
    keys: KeyRows<'a, T>,
    /// The state that a stage turns into results.
    state: Option<StateArgs<'a, T::Accumulator>>,
    sink: &'a [T::Accumulator],
    scoring: Scoring<T::Accumulator>,
    max_logits: Option<&'a Mutex<Vec<T::Accumulator>>>,
}

struct Scratch<R> {
    q: Vec<R>,
    k: Vec<R>,
    v: Vec<R>,
    s: Vec<R>,
    acc: Vec<R>,
    row_max: Vec<R>,
    row_sum: Vec<R>,
    scaled: Vec<R>,
    poisoned_rows: PoisonedRows,
    poisoned_cols: PoisonedRows,
}

/// [`attention_forward_arriving`](crate::attention_forward_arriving()) of one element type.
pub(crate) fn forward<T: Element>(
    args: ForwardArgs<'_, T>,
    arriving_rows: usize,
    threads: &ThreadPool,
    arrived: Arrived<'_, T>,
) -> ControlFlow<()> {
    let shape = args.shape;
    shape.check();
    let group = shape.group();
    let q_rows = rows_of("q", args.q, shape.heads_q * shape.head_dim);
    let own = KeyRows::own(&shape, args.k, args.v, arriving_rows);
    let key_rows = own.rows();
    assert!(args.bands.iter().all(|band| band.k_range.end <= key_rows), "a band leaves the {key_rows} keys");

    let tile_rows = shape.tile_rows();
    let strips = Strips::of_rows(args.bands, q_rows, tile_rows);
    let (targets, state, sink) = args.mode.targets(&shape, q_rows, tile_rows);
    let mut targets = targets.into_iter();
    let mut tiles = Vec::with_capacity(strips.len() * shape.heads_kv);
    for index in 0..strips.len() {
        let (bands, weight) = (strips.bands(index), strips.area(index));
        let rows = strip(index, tile_rows, q_rows);
        for (head, target) in (0..shape.heads_kv).zip(targets.by_ref()) {
            tiles.push(Tile { head, rows, bands, weight, target });
        }
    }
    // A state is left as it is where there is nothing to add; results are written everywhere.
    tiles.retain(|tile| tile.weight > 0 || matches!(tile.target, Target::Result { .. }));
    tiles.sort_by_key(|tile| std::cmp::Reverse(tile.weight));
    let ready = |tile: &Tile<'_, T>| tile.bands.iter().all(|band| own.has_from_the_start(&band.k_range));
    let (ready, mut waiting): (Vec<_>, Vec<_>) = tiles.into_iter().partition(ready);

    let height = tile_rows.min(q_rows) * group;
    let scratch = || Scratch {
        q: vec![T::Accumulator::ZERO; height * shape.head_dim],
        k: vec![T::Accumulator::ZERO; KEY_BLOCK * shape.head_dim],
        v: vec![T::Accumulator::ZERO; KEY_BLOCK * shape.head_dim_v],
        s: vec![T::Accumulator::ZERO; height * KEY_BLOCK],
        acc: vec![T::Accumulator::ZERO; height * shape.head_dim_v],
        row_max: vec![T::Accumulator::ZERO; height],
        row_sum: vec![T::Accumulator::ZERO; height],
        scaled: vec![T::Accumulator::ZERO; shape.head_dim_v],
        poisoned_rows: PoisonedRows::default(),
        poisoned_cols: PoisonedRows::default(),
    };
    if let Some(max_logits) = &args.max_logits {
        check_len("max_logits", max_logits, 1, shape.heads_q);
    }
    let max_logits = args.max_logits.as_ref().map(|known| Mutex::new(known.to_vec()));
    let compute = |keys: KeyRows<'_, T>, tiles: Vec<Tile<'_, T>>| {
        let scoring = Scoring::new(args.scale, args.softcap);
        let inputs = Inputs { shape, q: args.q, keys, state, sink, scoring, max_logits: max_logits.as_ref() };
        drain(threads, tiles, |_| (), scratch, |tile, (), scratch| inputs.compute(tile, key_rows, scratch));
    };
    compute(own, ready);
    arrived(&mut |k, v| compute(own.with_arrived(&shape, k, v), std::mem::take(&mut waiting)))?;
    if let (Some(largest), Some(max_logits)) = (args.max_logits, &max_logits) {
        largest.copy_from_slice(&lock(max_logits));
    }
    ControlFlow::Continue(())
}

/// The tiles' targets, the state that they begin from where it is not in the targets, and the sink.
type Targets<'a, T> = (
    Vec<Target<'a, T>>,
    Option<StateArgs<'a, <T as HostElement>::Accumulator>>,
    &'a [<T as HostElement>::Accumulator],
);

impl<'a, T: Element> ForwardMode<'a, T> {
    /// Cuts what the stage leaves into tiles, strip by strip and within a strip by key head. A state that begins is made
    /// the empty one.
    fn targets(self, shape: &HeadShape, q_rows: usize, tile_rows: usize) -> Targets<'a, T> {
        match self {
            Self::First(state) => {
                state.acc.fill(T::Accumulator::ZERO);
                state.row_max.fill(-T::Accumulator::INFINITY);
                state.row_sum.fill(T::Accumulator::ZERO);
                (state.targets(shape, q_rows, tile_rows), None, &[])
            }
            Self::Next(state) => (state.targets(shape, q_rows, tile_rows), None, &[]),
            Self::Whole(result) => {
                let sink = result.sink.unwrap_or(&[]);
                (result.targets(shape, q_rows, tile_rows), None, sink)
            }
            Self::Last(state, result) => {
                check_state(state.acc, state.row_max, state.row_sum, shape, q_rows);
                let sink = result.sink.unwrap_or(&[]);
                (result.targets(shape, q_rows, tile_rows), Some(state), sink)
            }
        }
    }
}

impl<'a, R: Real> StateMutArgs<'a, R> {
    fn targets<T: Element<Accumulator = R>>(
        self,
        shape: &HeadShape,
        q_rows: usize,
        tile_rows: usize,
    ) -> Vec<Target<'a, T>> {
        check_state(self.acc, self.row_max, self.row_sum, shape, q_rows);
        let (heads, group) = (shape.heads_kv, shape.group());
        let acc = split_heads(self.acc, heads, group * shape.head_dim_v, tile_rows);
        let row_max = split_heads(self.row_max, heads, group, tile_rows);
        let row_sum = split_heads(self.row_sum, heads, group, tile_rows);
        let parts = acc.into_iter().zip(row_max).zip(row_sum);
        parts.map(|((acc, row_max), row_sum)| Target::State { acc, row_max, row_sum }).collect()
    }
}

impl<'a, T: Element> ResultArgs<'a, T> {
    fn targets(self, shape: &HeadShape, q_rows: usize, tile_rows: usize) -> Vec<Target<'a, T>> {
        check_len("out", self.out, q_rows, shape.heads_q * shape.head_dim_v);
        check_len("lse", self.lse, q_rows, shape.heads_q);
        rows_of("sink", self.sink.unwrap_or(&[]), shape.heads_q);
        let (heads, group) = (shape.heads_kv, shape.group());
        let out = split_heads(self.out, heads, group * shape.head_dim_v, tile_rows);
        let lse = split_heads(self.lse, heads, group, tile_rows);
        out.into_iter().zip(lse).map(|(out, lse)| Target::Result { out, lse }).collect()
    }
}

fn check_state<R>(acc: &[R], row_max: &[R], row_sum: &[R], shape: &HeadShape, q_rows: usize) {
    check_len("acc", acc, q_rows, shape.heads_q * shape.head_dim_v);
    check_len("row_max", row_max, q_rows, shape.heads_q);
    check_len("row_sum", row_sum, q_rows, shape.heads_q);
}

impl<T: Element> Inputs<'_, T> {
    /// Takes one tile through all of its key blocks.
    fn compute(&self, mut tile: Tile<'_, T>, key_rows: usize, scratch: &mut Scratch<T::Accumulator>) {
        let shape = &self.shape;
        let group = shape.group();
        let (dim, dim_v) = (shape.head_dim, shape.head_dim_v);
        let q_width = group * dim;
        gather(self.q, shape.heads_q * dim, tile.rows, tile.head * q_width, q_width, &mut scratch.q);
        scratch.poisoned_rows.clear();
        scratch.poisoned_rows.take_out_of(&mut scratch.q[..tile.rows.len() * q_width], dim);
        self.load_state(&tile, scratch);

        for visit in blocks_of_tile(tile.bands, tile.rows, key_rows) {
            let cols = visit.cols.len();
            self.keys.gather(shape, tile.head, visit.cols, &mut scratch.k, &mut scratch.v);
            scratch.poisoned_cols.clear();
            scratch.poisoned_cols.take_out_of(&mut scratch.k[..cols * dim], dim);
            scratch.poisoned_cols.take_out_of(&mut scratch.v[..cols * dim_v], dim_v);
            let first = (visit.rows.start - tile.rows.start) * group;
            let rows = visit.rows.len() * group;
            self.scoring.scores(&visit, group, dim, &scratch.q[first * dim..], &scratch.k, &mut scratch.s);
            let sums = &mut scratch.row_sum[first..first + rows];
            scratch.poisoned_cols.poison_sums_of_viewers(&scratch.s[..rows * KEY_BLOCK], sums);
            let acc = &mut scratch.acc[first * dim_v..(first + rows) * dim_v];
            online_softmax(
                &mut scratch.s[..rows * KEY_BLOCK],
                &mut scratch.row_max[first..first + rows],
                sums,
                acc,
                dim_v,
            );
            matmul(
                T::Accumulator::ONE,
                Mat::new(&scratch.s, rows, cols, KEY_BLOCK),
                Mat::new(&scratch.v, cols, dim_v, dim_v),
                T::Accumulator::ONE,
                MatMut::new(acc, rows, dim_v, dim_v),
            );
        }

        scratch.poisoned_rows.poison_sums(&scratch.row_max, &mut scratch.row_sum);
        if let Some(max_logits) = self.max_logits {
            let of_group = &mut lock(max_logits)[tile.head * group..(tile.head + 1) * group];
            for maxima in scratch.row_max[..tile.rows.len() * group].chunks_exact(group) {
                of_group.iter_mut().zip(maxima).for_each(|(largest, max)| *largest = max.larger(*largest));
            }
        }
        match &mut tile.target {
            Target::State { acc, row_max, row_sum } => {
                store(&scratch.acc, acc);
                store(&scratch.row_max, row_max);
                store(&scratch.row_sum, row_sum);
            }
            Target::Result { out, lse } => self.finish(tile.head, out, lse, scratch),
        }
    }

    /// The state that the tile goes on from.
    fn load_state(&self, tile: &Tile<'_, T>, scratch: &mut Scratch<T::Accumulator>) {
        let HeadShape { heads_q, head_dim_v, .. } = self.shape;
        let group = self.shape.group();
        match (&tile.target, self.state) {
            (Target::State { acc, row_max, row_sum }, _) => {
                load(acc, &mut scratch.acc);
                load(row_max, &mut scratch.row_max);
                load(row_sum, &mut scratch.row_sum);
            }
            (Target::Result { .. }, Some(state)) => {
                let rows = |src, dim: usize, dst: &mut Vec<_>| {
                    gather::<T::Accumulator>(
                        src,
                        heads_q * dim,
                        tile.rows,
                        tile.head * group * dim,
                        group * dim,
                        dst,
                    );
                };
                rows(state.acc, head_dim_v, &mut scratch.acc);
                rows(state.row_max, 1, &mut scratch.row_max);
                rows(state.row_sum, 1, &mut scratch.row_sum);
            }
            (Target::Result { .. }, None) => {
                scratch.acc.fill(T::Accumulator::ZERO);
                scratch.row_max.fill(-T::Accumulator::INFINITY);
                scratch.row_sum.fill(T::Accumulator::ZERO);
            }
        }
    }

    /// Normalises the state of a tile into its rows of the results.
    fn finish(
        &self,
        head: usize,
        out: &mut [&mut [T]],
        lse: &mut [&mut [T::Accumulator]],
        scratch: &mut Scratch<T::Accumulator>,
    ) {
        let (group, dim) = (self.shape.group(), self.shape.head_dim_v);
        for (row, (out, lse)) in out.iter_mut().zip(lse).enumerate() {
            for (member, (out, lse)) in out.chunks_exact_mut(dim).zip(lse.iter_mut()).enumerate() {
                let at = row * group + member;
                let state = RowState {
                    acc: &scratch.acc[at * dim..(at + 1) * dim],
                    max: scratch.row_max[at],
                    sum: scratch.row_sum[at],
                };
                let sinks = self.sink.iter().skip(head * group + member).step_by(self.shape.heads_q).copied();
                *lse = normalise(&state, sinks, &mut scratch.scaled, out);
            }
        }
    }
}

/// Turns the scores `s` (rows of [`KEY_BLOCK`]) into `exp(s - max)` under the rows' new maxima, and brings sums and
/// accumulators under them.
fn online_softmax<R: Real>(s: &mut [R], maxima: &mut [R], sums: &mut [R], acc: &mut [R], dim_v: usize) {
    let rows = s.chunks_exact_mut(KEY_BLOCK).zip(acc.chunks_exact_mut(dim_v));
    for ((s, acc), (max, sum)) in rows.zip(maxima.iter_mut().zip(sums.iter_mut())) {
        let new_max = row_max(s).larger(*max);
        if new_max == -R::INFINITY {
            // Nothing seen so far: -inf - -inf would be NaN.
            s.fill(R::ZERO);
            continue;
        }
        for x in s.iter_mut() {
            *x = (*x - new_max).fast_exp();
        }
        if *max != new_max {
            let factor = (*max - new_max).fast_exp();
            *sum *= factor;
            for x in acc.iter_mut() {
                *x *= factor;
            }
            *max = new_max;
        }
        *sum += row_sum(s);
    }
}

fn load<R: Copy>(parts: &[&mut [R]], dst: &mut [R]) {
    let Some(width) = parts.first().map(|part| part.len()) else { return };
    for (part, dst) in parts.iter().zip(dst.chunks_exact_mut(width)) {
        dst.copy_from_slice(part);
    }
}

fn store<R: Copy>(src: &[R], parts: &mut [&mut [R]]) {
    let Some(width) = parts.first().map(|part| part.len()) else { return };
    for (src, part) in src.chunks_exact(width).zip(parts.iter_mut()) {
        part.copy_from_slice(src);
    }
}
