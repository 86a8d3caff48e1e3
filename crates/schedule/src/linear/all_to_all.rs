use std::sync::Arc;

use counterpoint_mask::Range;
use counterpoint_plan::{GroupPart, LinearPlan, OwnedSplit, RemoteSplit};

use super::exchange::Lowering;
use super::forward::group_rows;
use crate::builder::ProgramBuilder;
use crate::{
    Accumulate, BufferRole, Gemm, GemmLayout, GroupCast, Op, OverlapPolicy, Program, RowBlock, StartOrder,
    StreamKind, WaveGemm,
};

/// Label of exchanges of rows in which every rank has some for every other.
pub const ALL_TO_ALL: &str = "all-to-all";

/// Lowers one rank's product whose rows go to the ranks that own their tokens, without sums: what each rank computes for the tokens
/// of all, as experts do, is sent home group by group while the rest is computed. Inputs `x` `[tokens, in_features]` and `weight`
/// `[local out_features, in_features]` of a column-parallel layer; output `y`, `[ranks times local tokens, local out_features]`: for
/// every rank in its order, what it has computed for this rank's tokens.
pub fn lower_product_all_to_all(plan: &LinearPlan, rank: usize, policy: OverlapPolicy) -> Program {
    let mut p = ProgramBuilder::new("product and all-to-all", rank, plan.tp_size, policy);
    let compute = p.stream("compute", StreamKind::Compute);
    let communication = p.stream(ALL_TO_ALL, StreamKind::Communication);
    let mut lowering = Lowering { p, plan, rank, compute };
    let (features, own) = (plan.local_out_features(), plan.tokens_of(rank).len());
    let x = lowering.input("x", &[plan.spec.tokens, plan.spec.in_features]);
    let weight = lowering.input("weight", &[features, plan.spec.in_features]);
    let dtype = plan.spec.dtype;
    let y = lowering.p.buffer("y", dtype, &[plan.tp_size * own, features], BufferRole::Output);
    let weight = vec![RowBlock { buffer: weight, rows: Range::new(0, features) }];
    let mut products = Vec::new();
    for group in 0..plan.groups() {
        let (a, out_rows) = group_rows(plan, group, x);
        let rows = out_rows.iter().map(Range::len).sum();
        let name = format!("share_{group}");
        let out = lowering.p.buffer(&name, dtype, &[rows, features], BufferRole::Scratch);
        let (layout, b, pass_rows) = (GemmLayout::Nt, weight.clone(), plan.spec.tokens);
        let (bias, accumulate) = (None, Accumulate::Start);
        products.push(Gemm { layout, a, b, out, out_rows, pass_rows, bias, accumulate });
    }
    let cast = |group: usize, product: &Gemm| {
        let part = Arc::new(part(plan, rank, group));
        let tensors = vec![(product.out, y)];
        Op::GroupCast(GroupCast { part, tensors, wire_dtype: dtype, arrive: None, delivery: None })
    };
    let casts: Vec<Op> = products.iter().enumerate().map(|(group, product)| cast(group, product)).collect();
    let p = &mut lowering.p;
    if policy.start == StartOrder::Signals && plan.groups() > 1 {
        let signal = p.signal();
        p.push(compute, None, "y", Op::WaveGemm(WaveGemm { groups: products, signal }));
        for (group, cast) in casts.into_iter().enumerate() {
            let value = group as u64 + 1;
            p.push(communication, Some(group), "wait for rows", Op::WaitSignal { signal, value });
            p.push(communication, Some(group), ALL_TO_ALL, cast);
        }
    } else {
        for (group, (product, cast)) in products.into_iter().zip(casts).enumerate() {
            let here = Some(group);
            p.push(compute, here, "y", Op::Gemm(product));
            let ready = p.mark(compute, here, "rows done");
            p.after(communication, here, "wait for rows", ready);
            p.push(communication, here, ALL_TO_ALL, cast);
        }
    }
    let arrived = lowering.p.mark(communication, None, "rows arrived");
    lowering.p.after(compute, None, "wait for the last rows", arrived);
    lowering.p.finish()
}

/// `rank`'s part in a group's exchange: of its packed rows each rank's go to that one, and what comes lies rank after rank.
fn part(plan: &LinearPlan, rank: usize, group: usize) -> GroupPart {
    let mut end = 0;
    let owned = (0..plan.tp_size).map(|to| {
        let rows = plan.group_rows(to, group).len();
        end += rows;
        OwnedSplit { rows: Range::new(end - rows, end), ranks: vec![to as u32] }
    });
    let owned = owned.filter(|split| !split.rows.is_empty()).collect();
    let (own, here) = (plan.tokens_of(rank).len(), plan.group_rows(rank, group));
    let remote = (0..plan.tp_size).map(|from| {
        let rows = Range::new(from * own + here.start, from * own + here.end);
        RemoteSplit { rows, rank: from as u32 }
    });
    GroupPart { remote: remote.filter(|split| !split.rows.is_empty()).collect(), owned }
}
