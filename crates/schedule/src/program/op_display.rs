//! The text of each operation in a Program's listing.

use super::display::{ProgramText, dtype_name};
use super::{
    Accumulate, ArrivingKeys, AttentionBackward, AttentionForward, AttentionState, BarrierId, BufferId,
    Delivery, ForwardBegin, ForwardEnd, Gemm, GemmLayout, GroupCast, GroupReduce, KeyBlocks, MaxLogits, Op,
    ReduceOp, RmsNorm, RmsNormBackward, RowArrivals, UserKernel,
};

impl ProgramText<'_> {
    /// What an operation does, without its place and label. Fused operations are their parts, joined by `then`.
    pub(super) fn op(&self, op: &Op) -> String {
        match op {
            Op::AttentionForward(op) => self.attention_forward(op),
            Op::AttentionFinish(op) => {
                let mut reads = vec![("out", op.merged_out), ("lse", op.merged_lse)];
                reads.extend(op.sink.map(|sink| ("sink", sink)));
                let writes = self.operands(&[("out", op.out), ("lse", op.lse)]);
                let rows = self.ranges(&op.rows);
                format!("attention_finish {} -> {writes} | rows {rows}", self.operands(&reads))
            }
            Op::AttentionDelta(op) => {
                let mut reads = vec![("out", op.out), ("dout", op.dout), ("lse", op.lse)];
                reads.extend(op.dlse.map(|dlse| ("dlse", dlse)));
                let mut writes = vec![("delta", op.delta)];
                if let Some((sink, dsink)) = op.sink {
                    reads.push(("sink", sink));
                    writes.push(("dsink", dsink));
                }
                format!("attention_delta {} -> {}", self.operands(&reads), self.operands(&writes))
            }
            Op::AttentionBackward(op) => self.attention_backward(op),
            Op::Fused(parts) => {
                let parts: Vec<String> = parts.iter().map(|part| self.op(part)).collect();
                format!("fused {}", parts.join(" then "))
            }
            Op::Gemm(op) => self.gemm(op),
            Op::WaveGemm(op) => {
                let groups: Vec<String> = op.groups.iter().map(|group| self.gemm(group)).collect();
                let name = if op.grouped { "grouped_gemm" } else { "wave_gemm" };
                let signal = op.signal.map(|signal| format!(" signal {}", signal.0)).unwrap_or_default();
                let arrivals = op.arrivals.as_ref().map(|RowArrivals { signal, values }| {
                    let values: Vec<String> = values.iter().map(u64::to_string).collect();
                    format!(" as signal {} is {}", signal.0, values.join(", "))
                });
                format!("{name}{signal}{}: {}", arrivals.unwrap_or_default(), groups.join("; "))
            }
            Op::UserKernel(op) => self.user_kernel(op),
            Op::ColumnSum(op) => {
                let (src, dst) = (self.blocks(&op.src), self.buffer(op.dst));
                format!("column_sum {src} {} {dst}", arrow(op.accumulate))
            }
            Op::ColumnMax(op) => format!("column_max {} -> {}", self.buffer(op.src), self.buffer(op.dst)),
            Op::RmsNorm(op) => self.rms_norm(op),
            Op::RmsNormBackward(op) => self.rms_norm_backward(op),
            Op::GroupCast(op) => self.group_cast(op),
            Op::GroupReduce(op) => self.group_reduce(op),
            Op::Cast { src, dst } => format!("cast {} -> {}", self.buffer(*src), self.buffer(*dst)),
            Op::Concat { srcs, dst } => format!("concat {} -> {}", self.buffers(srcs), self.buffer(*dst)),
            Op::PlaceRows { src, dst, rows } => {
                let (src, dst, rows) = (self.buffer(*src), self.buffer(*dst), self.ranges(rows));
                format!("place_rows {src} -> {dst} | rows {rows}")
            }
            Op::PlaceColumns { src, dst, columns } => {
                format!("place_columns {} -> {} | columns {columns}", self.buffer(*src), self.buffer(*dst))
            }
            Op::CopyRows { src, dst, rows } => {
                format!("copy_rows {} -> {} | first {rows} rows", self.buffer(*src), self.buffer(*dst))
            }
            Op::ZeroRows { dst, rows } => format!("zero_rows {} rows {rows}", self.buffer(*dst)),
            Op::Record(event) => format!("record event {}", event.0),
            Op::Wait(event) => format!("wait event {}", event.0),
            Op::Await { barrier, arrivals } => format!("wait barrier {} arrivals {arrivals}", barrier.0),
            Op::Signal { signal, value } => format!("raise signal {} to {value}", signal.0),
            Op::WaitSignal { signal, value } => format!("wait signal {} value {value}", signal.0),
        }
    }

    fn attention_forward(&self, op: &AttentionForward) -> String {
        let mut reads = vec![("q", op.q), ("k", op.k), ("v", op.v)];
        self.arriving(op.arriving.as_ref(), &mut reads);
        if let ForwardBegin::Continue(state) = op.begin {
            reads.extend(state_operands(state));
        }
        let mut writes = match op.end {
            ForwardEnd::State(state) => self.operands(&state_operands(state)),
            ForwardEnd::Result { sink, out, lse } => {
                reads.extend(sink.map(|sink| ("sink", sink)));
                self.operands(&[("out", out), ("lse", lse)])
            }
        };
        if let Some(MaxLogits { buffer, accumulate }) = op.max_logits {
            writes = format!("{writes}, max_logits {} {}", arrow(accumulate), self.buffer(buffer));
        }
        let blocks = match op.blocks {
            KeyBlocks::Unaligned => "unaligned",
            KeyBlocks::Aligned => "aligned",
        };
        let options = attention_options(op.scale, op.softcap, op.arriving.as_ref());
        let (reads, bands) = (self.operands(&reads), self.bands(&op.bands));
        format!("attention_forward {reads} -> {writes} | {blocks} key blocks, {options}, {bands}")
    }

    fn attention_backward(&self, op: &AttentionBackward) -> String {
        let mut reads = vec![("q", op.q), ("k", op.k), ("v", op.v)];
        self.arriving(op.arriving.as_ref(), &mut reads);
        reads.extend([("dout", op.dout), ("lse", op.lse), ("delta", op.delta)]);
        let mut writes = vec![("dk", op.dk), ("dv", op.dv)];
        writes.extend(op.rounded_dq.map(|rounded| ("rounded_dq", rounded)));
        let order = if op.deterministic { "deterministic" } else { "any order" };
        let options = attention_options(op.scale, op.softcap, op.arriving.as_ref());
        let (reads, writes, bands) = (self.operands(&reads), self.operands(&writes), self.bands(&op.bands));
        let dq = format!("{} dq={}", arrow(op.accumulate_dq), self.buffer(op.dq));
        format!("attention_backward {reads} {dq} -> {writes} | {order}, {options}, {bands}")
    }

    fn arriving(&self, arriving: Option<&ArrivingKeys>, reads: &mut Vec<(&str, BufferId)>) {
        reads.extend(arriving.iter().flat_map(|keys| [("arriving_k", keys.k), ("arriving_v", keys.v)]));
    }

    fn gemm(&self, op: &Gemm) -> String {
        let layout = match op.layout {
            GemmLayout::Nt => "nt",
            GemmLayout::Nn => "nn",
            GemmLayout::Tn => "tn",
        };
        let bias = op.bias.map(|bias| format!(" bias={}", self.buffer(bias))).unwrap_or_default();
        let columns = op.columns.map(|columns| format!(" columns {columns}")).unwrap_or_default();
        let [a, b] = [&op.a, &op.b].map(|rows| self.blocks(&rows.iter().collect::<Vec<_>>()));
        let out = self.buffer(op.out);
        let (to, pass_rows) = (self.ranges(&op.out_rows.iter().collect::<Vec<_>>()), op.pass_rows);
        let arrow = arrow(op.accumulate);
        format!(
            "gemm_{layout} a={a} b={b}{bias}{columns} {arrow} {out} rows {to} | {pass_rows} rows in the pass"
        )
    }

    fn rms_norm(&self, op: &RmsNorm) -> String {
        let named = [("weight", op.weight), ("residual", op.residual)];
        let reads: Vec<_> = named.into_iter().filter_map(|(name, id)| Some((name, id?))).collect();
        let reads = if reads.is_empty() { String::new() } else { format!(" {}", self.operands(&reads)) };
        let (src, writes) = (self.blocks(&op.src), self.operands(&[("out", op.out), ("sum", op.sum)]));
        format!("rms_norm {src}{reads} -> {writes} | epsilon {:?}", op.epsilon)
    }

    fn rms_norm_backward(&self, op: &RmsNormBackward) -> String {
        let (weight, dweight) = op.weight.unzip();
        let mut reads = vec![("dout", op.dout), ("sum", op.sum)];
        reads.extend(weight.map(|weight| ("weight", weight)));
        reads.extend(op.dsum.map(|dsum| ("dsum", dsum)));
        let mut writes = vec![("dh", op.dh)];
        writes.extend(dweight.map(|dweight| ("dweight", dweight)));
        let (reads, writes) = (self.operands(&reads), self.operands(&writes));
        format!("rms_norm_backward {reads} -> {writes} | epsilon {:?}", op.epsilon)
    }

    fn user_kernel(&self, op: &UserKernel) -> String {
        let parts = op.parts.iter();
        let parts: Vec<String> = parts
            .map(|part| format!("{} -> {}", self.buffers(&part.reads), self.buffers(&part.writes)))
            .collect();
        let signal = op.signal.map(|signal| format!(" signal {}", signal.0)).unwrap_or_default();
        format!("user_kernel {:?}{signal}: {}", op.kernel, parts.join("; "))
    }

    fn group_cast(&self, op: &GroupCast) -> String {
        let delivery = op.delivery.map(|delivery| format!(", {}", delivered(delivery))).unwrap_or_default();
        let (tensors, part, arrive) =
            (self.pairs(&op.tensors, "->"), self.part(&op.part), arrives(op.arrive));
        format!("group_cast {tensors} | wire {}{delivery}{arrive}, {part}", dtype_name(op.wire_dtype))
    }

    fn group_reduce(&self, op: &GroupReduce) -> String {
        let how = match op.op {
            ReduceOp::Sum => "sum",
            ReduceOp::Avg => "avg",
            ReduceOp::Lse => "lse",
        };
        let (wire, reduce) = (dtype_name(op.wire_dtype), dtype_name(op.reduce_dtype));
        let tensors = self.pairs(&op.tensors, arrow(op.accumulate));
        let (part, arrive) = (self.part(&op.part), arrives(op.arrive));
        format!("group_reduce_{how} {tensors} | wire {wire}, reduced in {reduce}{arrive}, {part}")
    }

    fn pairs(&self, tensors: &[(BufferId, BufferId)], arrow: &str) -> String {
        let pairs: Vec<String> = tensors
            .iter()
            .map(|&(input, output)| format!("{} {arrow} {}", self.buffer(input), self.buffer(output)))
            .collect();
        pairs.join(", ")
    }
}

fn state_operands(state: AttentionState) -> [(&'static str, BufferId); 3] {
    [("acc", state.acc), ("row_max", state.row_max), ("row_sum", state.row_sum)]
}

fn arrow(accumulate: Accumulate) -> &'static str {
    match accumulate {
        Accumulate::Start => "->",
        Accumulate::Continue => "+=",
    }
}

fn delivered(delivery: Delivery) -> String {
    format!("delivered in {} parts by signal {}", delivery.parts, delivery.signal.0)
}

fn arrives(barrier: Option<BarrierId>) -> String {
    barrier.map(|barrier| format!(", arrives at barrier {}", barrier.0)).unwrap_or_default()
}

fn attention_options(scale: f64, softcap: f64, arriving: Option<&ArrivingKeys>) -> String {
    let mut out = format!("scale {scale:?}");
    if softcap != 0.0 {
        out.push_str(&format!(", softcap {softcap:?}"));
    }
    if let Some(keys) = arriving {
        out.push_str(&format!(", keys {}", delivered(keys.delivery)));
    }
    out
}
