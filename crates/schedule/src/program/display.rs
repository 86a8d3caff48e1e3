//! The text of a [`Program`]: its streams and buffers, then one line per operation.

use std::fmt::{self, Write};

use counterpoint_mask::{Band, Range};
use counterpoint_plan::{DType, GroupPart};

use super::{BufferId, BufferRole, BufferSpec, Program, RowBlock, StreamId, StreamKind};

/// Items of a list that the short text shows before it gives their number instead.
const SHORT_LIST: usize = 4;

/// `{}` shortens lists of more than four items (bands, row ranges, splits) to the first ones and their number. `{:#}` writes every
/// item: two Programs do the same if and only if their long texts are equal.
///
/// A line is `index stream stage operation operands -> results | attributes # label`. A buffer is written as its name and shape;
/// `+=` instead of `->` marks a result that is added to.
impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = ProgramText { program: self, full: f.alternate() };
        writeln!(f, "{}, rank {} of {}, policy {}", self.name, self.rank, self.world_size, self.policy)?;
        for (index, stream) in self.streams.iter().enumerate() {
            let kind = match stream.kind {
                StreamKind::Compute => "compute",
                StreamKind::Communication => "communication",
            };
            writeln!(f, "stream {index}: {} ({kind})", stream.name)?;
        }
        let widest = self.buffers.iter().map(|buffer| buffer.name.len()).max().unwrap_or(0);
        for BufferSpec { name, dtype, shape, role } in &self.buffers {
            let (role, dtype) = (role_name(*role), dtype_name(*dtype));
            writeln!(f, "buffer {name:widest$}  {role:7}  {dtype:4} {shape:?}")?;
        }
        for (index, slot) in self.slots.iter().enumerate() {
            let names: Vec<&str> = slot.iter().map(|&id| text.name(id)).collect();
            writeln!(f, "slot {index}: {}", names.join(", "))?;
        }
        let (events, barriers, signals) = (self.num_events, self.num_barriers, self.num_signals);
        writeln!(f, "{events} events, {barriers} barriers, {signals} signals")?;
        let streams = self.streams.iter().map(|stream| stream.name.len()).max().unwrap_or(0);
        for (index, op) in self.ops.iter().enumerate() {
            let stage = op.stage.map_or_else(|| "-".to_owned(), |stage| stage.to_string());
            let (stream, what) = (text.stream(op.stream), text.op(&op.op));
            write!(f, "{index:3}  {stream:streams$}  {stage:>2}  {what}")?;
            match op.label.as_str() {
                "" => writeln!(f)?,
                label => writeln!(f, "  # {label}")?,
            }
        }
        Ok(())
    }
}

pub(super) fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "f64",
        DType::F32 => "f32",
        DType::Bf16 => "bf16",
        DType::F16 => "f16",
    }
}

fn role_name(role: BufferRole) -> &'static str {
    match role {
        BufferRole::Input => "input",
        BufferRole::Output => "output",
        BufferRole::Updated => "updated",
        BufferRole::Scratch => "scratch",
        BufferRole::Persistent => "persistent",
    }
}

/// Writes the parts of a Program's lines. It must not panic on a Program that validation refuses: errors print Programs.
pub(super) struct ProgramText<'a> {
    program: &'a Program,
    full: bool,
}

impl ProgramText<'_> {
    fn name(&self, id: BufferId) -> &str {
        self.program.buffers.get(id.0).map_or("?", |buffer| &buffer.name)
    }

    fn stream(&self, id: StreamId) -> &str {
        self.program.streams.get(id.0).map_or("?", |stream| &stream.name)
    }

    /// A buffer's name and shape.
    pub(super) fn buffer(&self, id: BufferId) -> String {
        match self.program.buffers.get(id.0) {
            Some(buffer) => {
                let shape: Vec<String> = buffer.shape.iter().map(usize::to_string).collect();
                format!("{}[{}]", buffer.name, shape.join(","))
            }
            None => format!("?{}", id.0),
        }
    }

    /// Several buffers, each under the name of its operand.
    pub(super) fn operands(&self, operands: &[(&str, BufferId)]) -> String {
        let texts: Vec<String> =
            operands.iter().map(|&(name, id)| format!("{name}={}", self.buffer(id))).collect();
        texts.join(" ")
    }

    pub(super) fn buffers(&self, ids: &[BufferId]) -> String {
        let texts: Vec<String> = ids.iter().map(|&id| self.buffer(id)).collect();
        texts.join(" ")
    }

    /// A list in brackets, shortened unless everything is asked for.
    fn list<T>(&self, items: impl ExactSizeIterator<Item = T>, text: impl Fn(T) -> String) -> String {
        let count = items.len();
        if self.full || count <= SHORT_LIST {
            let all: Vec<String> = items.map(text).collect();
            return format!("[{}]", all.join(", "));
        }
        let first: Vec<String> = items.take(SHORT_LIST - 1).map(text).collect();
        format!("[{}, ... {count} in all]", first.join(", "))
    }

    pub(super) fn ranges(&self, ranges: &[Range]) -> String {
        self.list(ranges.iter(), rows)
    }

    pub(super) fn blocks(&self, blocks: &[RowBlock]) -> String {
        self.list(blocks.iter(), |block| format!("{} rows {}", self.buffer(block.buffer), rows(&block.rows)))
    }

    pub(super) fn bands(&self, bands: &[Band]) -> String {
        let area: u64 = bands.iter().map(Band::area).sum();
        format!("area {area} bands {}", self.list(bands.iter(), band))
    }

    /// A rank's part in a group-cast, or in the group-reduce of the same rows where these go back.
    pub(super) fn part(&self, part: &GroupPart) -> String {
        let owned = self.list(part.owned.iter(), |split| {
            let ranks: Vec<String> = split.ranks.iter().map(u32::to_string).collect();
            format!("{}:{}", rows(&split.rows), ranks.join("+"))
        });
        let remote = self.list(part.remote.iter(), |split| format!("{}:{}", rows(&split.rows), split.rank));
        let (own_rows, remote_rows) = (part.send_rows(), part.recv_rows());
        format!("owned {own_rows} rows {owned} remote {remote_rows} rows {remote}")
    }
}

fn rows(range: &Range) -> String {
    format!("{}..{}", range.start, range.end)
}

/// Rows, columns and, where they are bounded, the diagonals `column - row` between which pairs are unmasked.
fn band(band: &Band) -> String {
    let mut out = format!("{}x{}", rows(&band.q_range), rows(&band.k_range));
    if band.diag_min != Band::NO_MIN || band.diag_max != Band::NO_MAX {
        out.push_str(" diagonals ");
        if band.diag_min != Band::NO_MIN {
            let _ = write!(out, "{}", band.diag_min);
        }
        out.push_str("..");
        if band.diag_max != Band::NO_MAX {
            let _ = write!(out, "={}", band.diag_max);
        }
    }
    out
}
