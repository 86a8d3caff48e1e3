//! What chunks of query rows compute and which keys they read, found from the bands of a mask.

use counterpoint_mask::{Band, Mask, Range};

/// What every chunk of query rows computes and reads, exact to the token: all that a dispatch looks at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkWork {
    seqlen_q: usize,
    seqlen_k: usize,
    chunk_size: usize,
    areas: Vec<u64>,
    /// The ranges of chunk `i` are `ranges[offsets[i]..offsets[i + 1]]`.
    offsets: Vec<usize>,
    ranges: Vec<Range>,
}

impl ChunkWork {
    /// Query rows of the whole sequence.
    pub fn seqlen_q(&self) -> usize {
        self.seqlen_q
    }

    /// Key rows of the whole sequence.
    pub fn seqlen_k(&self) -> usize {
        self.seqlen_k
    }

    /// Query rows of a chunk (the last may have fewer).
    pub fn chunk_size(&self) -> usize {
        self.chunk_size
    }

    /// Number of chunks.
    pub fn num_chunks(&self) -> usize {
        self.areas.len()
    }

    /// Query rows of `chunk`.
    pub fn rows(&self, chunk: usize) -> Range {
        Range::new(chunk * self.chunk_size, ((chunk + 1) * self.chunk_size).min(self.seqlen_q))
    }

    /// Unmasked pairs of `chunk`.
    pub fn area(&self, chunk: usize) -> u64 {
        self.areas[chunk]
    }

    /// Unmasked pairs of all chunks.
    pub fn areas(&self) -> &[u64] {
        &self.areas
    }

    /// The key rows that `chunk` reads: ascending ranges that neither overlap nor touch.
    pub fn needs(&self, chunk: usize) -> &[Range] {
        &self.ranges[self.offsets[chunk]..self.offsets[chunk + 1]]
    }

    /// The key rows that `chunks` together read, merged and ascending.
    pub fn needs_of(&self, chunks: &[u32]) -> Vec<Range> {
        Range::merged(chunks.iter().flat_map(|&chunk| self.needs(chunk as usize)).copied().collect())
    }
}

/// The work of every chunk of `chunk_size` query rows of `mask`. `chunk_size` must be at least 1.
///
/// Each band is cut only by the chunks that its rows reach, so time and memory are linear in slices, chunks and pairs of
/// a slice and a chunk that it touches (apart from sorting the ranges of one chunk).
pub fn chunk_work(mask: &Mask, chunk_size: usize) -> ChunkWork {
    chunk_work_without(mask, chunk_size, &[])
}

/// As [`chunk_work`] of self-attention in which the work of the query rows `offloaded` (merged, ascending) is done where its keys
/// are: it is work of the chunks of these keys, which needs no other rows.
pub fn chunk_work_with_offload(mask: &Mask, chunk_size: usize, offloaded: &[Range]) -> ChunkWork {
    let mut work = chunk_work_without(mask, chunk_size, offloaded);
    for band in mask.bands().flat_map(|band| goes(&band, offloaded)) {
        let Some(band) = band.trim() else { continue };
        for (chunk, area) in work.areas.iter_mut().enumerate().skip(band.k_range.start / chunk_size) {
            let keys = Range::new(chunk * chunk_size, (chunk + 1) * chunk_size);
            if keys.start >= band.k_range.end {
                break;
            }
            *area += band.clip(&band.q_range, &keys).area();
        }
    }
    work
}

/// As [`chunk_work`], without the work of the query rows `offloaded` (merged, ascending).
pub fn chunk_work_without(mask: &Mask, chunk_size: usize, offloaded: &[Range]) -> ChunkWork {
    let chunks = mask.seqlen_q().div_ceil(chunk_size);
    let mut areas = vec![0_u64; chunks];
    let mut counts = vec![0_usize; chunks + 1];
    let mut touched: Vec<(u32, Range)> = Vec::with_capacity(chunks + mask.slices().len());
    for band in mask.bands().flat_map(|band| stays(&band, offloaded)) {
        let Some(band) = band.trim() else { continue };
        let (first, last) = (band.q_range.start / chunk_size, (band.q_range.end - 1) / chunk_size);
        for chunk in first..=last {
            let rows = Range::new(chunk * chunk_size, (chunk + 1) * chunk_size);
            if let Some(piece) = band.clip(&rows, &band.k_range).trim() {
                areas[chunk] += piece.area();
                counts[chunk] += 1;
                touched.push((chunk as u32, piece.k_range));
            }
        }
    }

    // Counting sort by chunk: `counts` becomes the place where the next range of each chunk goes.
    let mut place = 0;
    for count in &mut counts {
        place += std::mem::replace(count, place);
    }
    let mut sorted = vec![Range::new(0, 0); touched.len()];
    for &(chunk, range) in &touched {
        sorted[counts[chunk as usize]] = range;
        counts[chunk as usize] += 1;
    }

    let mut ranges: Vec<Range> = Vec::with_capacity(sorted.len());
    let mut offsets = Vec::with_capacity(chunks + 1);
    offsets.push(0);
    let mut start = 0;
    for chunk in 0..chunks {
        let end = counts[chunk];
        sorted[start..end].sort_unstable();
        let first = ranges.len();
        for &range in &sorted[start..end] {
            match ranges[first..].last_mut() {
                Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                _ => ranges.push(range),
            }
        }
        offsets.push(ranges.len());
        start = end;
    }
    ChunkWork { seqlen_q: mask.seqlen_q(), seqlen_k: mask.seqlen_k(), chunk_size, areas, offsets, ranges }
}

/// The parts of a band in rows that are not among `offloaded`.
fn stays(band: &Band, offloaded: &[Range]) -> Vec<Band> {
    let mut parts = Vec::with_capacity(1);
    let mut start = band.q_range.start;
    for gone in goes(band, offloaded) {
        parts.push(band.clip(&Range::new(start, gone.q_range.start), &band.k_range));
        start = gone.q_range.end;
    }
    parts.push(band.clip(&Range::new(start, band.q_range.end), &band.k_range));
    parts
}

/// The parts of a band in rows of `offloaded`.
fn goes<'a>(band: &Band, offloaded: &'a [Range]) -> impl Iterator<Item = Band> + use<'a> {
    let band = *band;
    let first = offloaded.partition_point(|rows| rows.end <= band.q_range.start);
    let met = offloaded[first..].iter().take_while(move |rows| rows.start < band.q_range.end);
    met.map(move |rows| band.clip(&rows.intersect(&band.q_range), &band.k_range))
}
