//! The CPU's attention backward: FlashAttention-2's loop over key blocks, every sum in a fixed order.

use std::ops::ControlFlow;
use std::sync::Mutex;

use counterpoint_mask::{Band, Range};
use counterpoint_plan::KEY_BLOCK;
use counterpoint_schedule::Accumulate;
use rayon::ThreadPool;

use crate::addition_order::AdditionOrder;
use crate::element::HostElement;
use crate::key_rows::{Arrived, KeyRows};
use crate::matmul::{Mat, MatMut, matmul};
use crate::poison::{PoisonedRows, Reached, is_finite, is_log_weight};
use crate::queue::{drain, lock};
use crate::real::{Element, Real};
use crate::score::Scoring;
use crate::shape::HeadShape;
use crate::shape::{check_len, rows_of};
use crate::tile::{Strips, Visit, gather, split_heads, strip, tiles_of_block};

/// Tensors and numbers of one backward stage, as in [`counterpoint_schedule::AttentionBackward`].
/// `G` is the type of `dk` and `dv`: the accumulator type where they are partial sums, `T` where they are the results.
pub struct BackwardArgs<'a, T: Element, G> {
    /// Heads and their sizes.
    pub shape: HeadShape,
    /// `[q_rows, heads_q, head_dim]`
    pub q: &'a [T],
    /// `[key_rows, heads_kv, head_dim]`
    pub k: &'a [T],
    /// `[key_rows, heads_kv, head_dim_v]`
    pub v: &'a [T],
    /// `[q_rows, heads_q, head_dim_v]`
    pub dout: &'a [T],
    /// `[q_rows, heads_q]`, of the whole row.
    pub lse: &'a [T::Accumulator],
    /// `[q_rows, heads_q]`, of the whole row.
    pub delta: &'a [T::Accumulator],
    /// `[q_rows, heads_q, head_dim]`, begun or continued.
    pub dq: &'a mut [T::Accumulator],
    /// `[key_rows, heads_kv, head_dim]`, every element written.
    pub dk: &'a mut [G],
    /// `[key_rows, heads_kv, head_dim_v]`, every element written.
    pub dv: &'a mut [G],
    /// Unmasked pairs in rows of `q` and of all keys; bands do not overlap.
    pub bands: &'a [Band],
    /// Factor on `q k^T`.
    pub scale: f64,
    /// 0 for none.
    pub softcap: f64,
    /// Whether `dq` begins here.
    pub accumulate_dq: Accumulate,
}

/// A block of key rows of one key head.
struct Block<'a, G> {
    head: usize,
    index: usize,
    cols: Range,
    bands: &'a [Band],
    dk: Vec<&'a mut [G]>,
    dv: Vec<&'a mut [G]>,
}

struct Scratch<R> {
    q: Vec<R>,
    k: Vec<R>,
    v: Vec<R>,
    dout: Vec<R>,
    p: Vec<R>,
    ds: Vec<R>,
    dq: Vec<R>,
    dk: Vec<R>,
    dv: Vec<R>,
    poisoned_rows: PoisonedRows,
    poisoned_cols: PoisonedRows,
    reached: Reached,
}

/// What the blocks read.
struct Inputs<'a, T: Element> {
    shape: HeadShape,
    q: &'a [T],
    keys: KeyRows<'a, T>,
    dout: &'a [T],
    lse: &'a [T::Accumulator],
    delta: &'a [T::Accumulator],
    scoring: Scoring<T::Accumulator>,
}

/// [`attention_backward_arriving`](crate::attention_backward_arriving()) of one element type and one of `dk` and `dv`.
// Long: three nested loops over tiles that share the buffers above them.
pub(crate) fn backward<T, G>(
    args: BackwardArgs<'_, T, G>,
    arriving_rows: usize,
    threads: &ThreadPool,
    arrived: Arrived<'_, T>,
) -> ControlFlow<()>
where
    T: Element,
    G: HostElement<Accumulator = T::Accumulator>,
{
    let shape = args.shape;
    shape.check();
    let group = shape.group();
    let q_rows = rows_of("q", args.q, shape.heads_q * shape.head_dim);
    let own = KeyRows::own(&shape, args.k, args.v, arriving_rows);
    let key_rows = own.rows();
    check_len("dout", args.dout, q_rows, shape.heads_q * shape.head_dim_v);
    check_len("lse", args.lse, q_rows, shape.heads_q);
    check_len("delta", args.delta, q_rows, shape.heads_q);
    check_len("dq", args.dq, q_rows, shape.heads_q * shape.head_dim);
    check_len("dk", args.dk, key_rows, shape.heads_kv * shape.head_dim);
    check_len("dv", args.dv, key_rows, shape.heads_kv * shape.head_dim_v);
    assert!(
        args.bands.iter().all(|band| band.q_range.end <= q_rows),
        "a band leaves the {q_rows} query rows"
    );

    if args.accumulate_dq == Accumulate::Start {
        args.dq.fill(T::Accumulator::ZERO);
    }
    let tile_rows = shape.tile_rows();
    let dq: Vec<Mutex<Vec<&mut [T::Accumulator]>>> =
        split_heads(args.dq, shape.heads_kv, group * shape.head_dim, tile_rows)
            .into_iter()
            .map(Mutex::new)
            .collect();

    let strips = Strips::of_columns(args.bands, key_rows);
    let mut dk = split_heads(args.dk, shape.heads_kv, shape.head_dim, KEY_BLOCK).into_iter();
    let mut dv = split_heads(args.dv, shape.heads_kv, shape.head_dim_v, KEY_BLOCK).into_iter();
    let mut blocks = Vec::with_capacity(strips.len() * shape.heads_kv);
    for index in 0..strips.len() {
        let cols = strip(index, KEY_BLOCK, key_rows);
        // Neighbours in the queue are blocks of different heads, which never wait for each other.
        for ((head, dk), dv) in (0..shape.heads_kv).zip(dk.by_ref()).zip(dv.by_ref()) {
            blocks.push(Block { head, index, cols, bands: strips.bands(index), dk, dv });
        }
    }

    let mut waiting = blocks.split_off(blocks.partition_point(|block| own.has_from_the_start(&block.cols)));

    let order = AdditionOrder::new(shape.heads_kv);
    let height = tile_rows.min(q_rows) * group;
    let scratch = || Scratch {
        q: vec![T::Accumulator::ZERO; height * shape.head_dim],
        k: vec![T::Accumulator::ZERO; KEY_BLOCK * shape.head_dim],
        v: vec![T::Accumulator::ZERO; KEY_BLOCK * shape.head_dim_v],
        dout: vec![T::Accumulator::ZERO; height * shape.head_dim_v],
        p: vec![T::Accumulator::ZERO; height * KEY_BLOCK],
        ds: vec![T::Accumulator::ZERO; height * KEY_BLOCK],
        dq: vec![T::Accumulator::ZERO; height * shape.head_dim],
        dk: vec![T::Accumulator::ZERO; KEY_BLOCK * shape.head_dim],
        dv: vec![T::Accumulator::ZERO; KEY_BLOCK * shape.head_dim_v],
        poisoned_rows: PoisonedRows::default(),
        poisoned_cols: PoisonedRows::default(),
        reached: Reached::default(),
    };
    let begin = |block: &Block<'_, G>| order.begin(block.head, block.index);
    let compute = |keys: KeyRows<'_, T>, blocks: Vec<Block<'_, G>>| {
        let scoring = Scoring::new(args.scale, args.softcap);
        let (q, dout, lse, delta) = (args.q, args.dout, args.lse, args.delta);
        let inputs = Inputs { shape, q, keys, dout, lse, delta, scoring };
        drain(threads, blocks, begin, scratch, |mut block, ticket, scratch| {
            let (dim, dim_v) = (shape.head_dim, shape.head_dim_v);
            inputs.keys.gather(&shape, block.head, block.cols, &mut scratch.k, &mut scratch.v);
            let cols = block.cols.len();
            scratch.poisoned_cols.clear();
            scratch.poisoned_cols.take_out_of(&mut scratch.k[..cols * dim], dim);
            scratch.poisoned_cols.take_out_of(&mut scratch.v[..cols * dim_v], dim_v);
            scratch.reached.cols.clear();
            scratch.dk.fill(T::Accumulator::ZERO);
            scratch.dv.fill(T::Accumulator::ZERO);
            for visit in tiles_of_block(block.bands, block.cols, q_rows, tile_rows) {
                inputs.visit(block.head, &visit, scratch);
                ticket.reach(visit.index);
                let first = visit.rows.start - visit.index * tile_rows;
                let mut dq = lock(&dq[visit.index * shape.heads_kv + block.head]);
                let sums = dq[first..first + visit.rows.len()].iter_mut();
                for (sum, part) in sums.zip(scratch.dq.chunks_exact(group * dim)) {
                    for (sum, &x) in sum.iter_mut().zip(part) {
                        *sum += x;
                    }
                }
                drop(dq);
                ticket.pass(visit.index);
            }
            scratch.reached.cols.fill_nan(&mut scratch.dk, dim);
            scratch.reached.cols.fill_nan(&mut scratch.dv, dim_v);
            for (row, dk) in block.dk.iter_mut().zip(scratch.dk.chunks_exact(dim)) {
                G::narrow_slice(dk, row);
            }
            for (row, dv) in block.dv.iter_mut().zip(scratch.dv.chunks_exact(dim_v)) {
                G::narrow_slice(dv, row);
            }
        });
    };
    compute(own, blocks);
    arrived(&mut |k, v| compute(own.with_arrived(&shape, k, v), std::mem::take(&mut waiting)))
}

impl<T: Element> Inputs<'_, T> {
    /// The five products of one tile and one block: adds to the block's `dk`, `dv` and leaves the tile's part of `dq` in
    /// the scratch.
    fn visit(&self, head: usize, visit: &Visit, scratch: &mut Scratch<T::Accumulator>) {
        let HeadShape { heads_q, head_dim: dim, head_dim_v: dim_v, .. } = self.shape;
        let group = self.shape.group();
        let (rows, cols) = (visit.rows.len() * group, visit.cols.len());
        gather(self.q, heads_q * dim, visit.rows, head * group * dim, group * dim, &mut scratch.q);
        gather(
            self.dout,
            heads_q * dim_v,
            visit.rows,
            head * group * dim_v,
            group * dim_v,
            &mut scratch.dout,
        );
        scratch.poisoned_rows.clear();
        scratch.poisoned_rows.take_out_of(&mut scratch.q[..rows * dim], dim);
        scratch.poisoned_rows.take_out_of(&mut scratch.dout[..rows * dim_v], dim_v);
        let q = Mat::new(&scratch.q, rows, dim, dim);
        let k = Mat::new(&scratch.k, cols, dim, dim);
        let v = Mat::new(&scratch.v, cols, dim_v, dim_v);
        let dout = Mat::new(&scratch.dout, rows, dim_v, dim_v);

        self.scoring.products(visit, group, dim, &scratch.q, &scratch.k, &mut scratch.p);
        let dp = MatMut::new(&mut scratch.ds, rows, cols, KEY_BLOCK);
        matmul(T::Accumulator::ONE, dout, v.transposed(), T::Accumulator::ZERO, dp);

        let statistics = (visit.rows.start..visit.rows.end)
            .flat_map(|row| (0..group).map(move |g| row * heads_q + head * group + g));
        for (index, at) in statistics.clone().enumerate() {
            if !self.has_statistics(at) {
                scratch.poisoned_rows.insert(index);
            }
        }
        let products = &scratch.p[..rows * KEY_BLOCK];
        scratch.reached.spread(&scratch.poisoned_rows, &scratch.poisoned_cols, products);

        let stacked = scratch.p.chunks_exact_mut(KEY_BLOCK).zip(scratch.ds.chunks_exact_mut(KEY_BLOCK));
        for (at, (p, ds)) in statistics.zip(stacked) {
            self.scoring.gradient(self.lse[at], self.delta[at], &mut p[..cols], &mut ds[..cols]);
        }
        scratch.poisoned_rows.silence(&mut scratch.p);
        scratch.poisoned_rows.silence(&mut scratch.ds);

        let p = Mat::new(&scratch.p, rows, cols, KEY_BLOCK);
        let ds = Mat::new(&scratch.ds, rows, cols, KEY_BLOCK);
        let (one, scale) = (T::Accumulator::ONE, self.scoring.scale());
        matmul(one, p.transposed(), dout, one, MatMut::new(&mut scratch.dv, cols, dim_v, dim_v));
        matmul(scale, ds.transposed(), q, one, MatMut::new(&mut scratch.dk, cols, dim, dim));
        matmul(scale, ds, k, T::Accumulator::ZERO, MatMut::new(&mut scratch.dq, rows, dim, dim));
        scratch.reached.rows.fill_nan(&mut scratch.dq, dim);
    }

    /// Whether the statistics of a row and head are numbers. Minus infinity is one: it says that the row saw nothing.
    fn has_statistics(&self, at: usize) -> bool {
        is_log_weight(self.lse[at]) && is_finite(self.delta[at])
    }
}
