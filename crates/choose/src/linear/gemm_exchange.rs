//! What a product with its collective takes, one after the other and in one kernel, and so which of them to run.

use counterpoint_cost::{CostModel, ProblemSize};
use counterpoint_plan::GemmCollective;

/// A product that each of several ranks computes, and the rows that travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmExchange {
    /// What travels: partial sums of rows of the result to their owners, the same and the sums to everyone, or rows of the first operand.
    pub collective: GemmCollective,
    /// Ranks, at least 2.
    pub ranks: usize,
    /// A rank's product.
    pub product: ProblemSize,
    /// Bytes of an element.
    pub element_bytes: usize,
}

/// Seconds of a [`GemmExchange`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GemmExchangeSeconds {
    /// The product and the collective one after the other.
    pub sequential: f64,
    /// As one kernel, in which rows travel while tiles are computed.
    pub fused: f64,
}

/// Rows and columns of the result that multiprocessors of a GPU compute at the same time.
const ROUND: usize = 132 * 128 * 256;
/// Rows of a tile: of an operand that travels while tiles are computed, each rank's rows are whole ones.
const TILE_ROWS: usize = 128;
/// How much longer than alone a product of several rounds takes whose rows travel: alone, warpgroups take tiles in turn. By the two ways of a
/// product alone, on an H200, 0 to 5 %.
const TOGETHER: f64 = 1.03;
/// From the end of a product's last tiles to the end of its sums, of which those from others come last. Measured on H200s: 20 us
/// while parts were added from memory, of which half was that.
const LAST_SUMS: f64 = 10e-6;
/// The same of sums that go to everyone: they are on their way once more, and all ranks hear of it.
const LAST_SPREAD: f64 = 14e-6;
/// Until the first rows of an operand have come, and the part of the link's rate at which they come while tiles are computed.
const FIRST_ROWS: f64 = 15e-6;
const ROWS_RATE: f64 = 0.7;
/// Few rows of each rank, these bytes of a tile at most, leave at once: so long until the first are there, and at the link's rate
/// (on four H200s 512 x 8192 x 4096 took 64 us where the product takes 47).
const AT_ONCE_BYTES: usize = 2 << 20;
const AT_ONCE: f64 = 7e-6;

impl GemmExchange {
    /// What it takes by a machine's costs.
    pub fn seconds(&self, cost: &CostModel) -> GemmExchangeSeconds {
        let Self { collective, ranks, product: size @ ProblemSize { m, n, k }, element_bytes } = *self;
        let own = m.div_ceil(ranks) as f64;
        let others = ranks as f64 - 1.0;
        let bytes = |columns: usize| own * others * (columns * element_bytes) as f64;
        let travel = |columns: usize| cost.link.seconds(bytes(columns) as u64);
        // Few rows wait for the other operand.
        let reading = (n * k * element_bytes) as f64 / cost.memory_bytes_per_second;
        let product = cost.matmul_seconds(size).max(reading);
        let together = if m * n > ROUND { TOGETHER } else { 1.0 };
        match collective {
            GemmCollective::ReduceScatter => GemmExchangeSeconds {
                sequential: product + cost.launch_seconds + travel(n),
                fused: (together * product).max(bytes(n) / cost.link.bytes_per_second) + LAST_SUMS,
            },
            GemmCollective::AllReduce => GemmExchangeSeconds {
                sequential: product + 2.0 * (cost.launch_seconds + travel(n)),
                fused: (together * product).max(2.0 * bytes(n) / cost.link.bytes_per_second) + LAST_SPREAD,
            },
            // All tiles wait for all rows.
            GemmCollective::AllGather
                if m.div_ceil(ranks) <= TILE_ROWS
                    && m.div_ceil(ranks) * k * element_bytes <= AT_ONCE_BYTES =>
            {
                GemmExchangeSeconds {
                    sequential: product + cost.launch_seconds + travel(k),
                    fused: together * product + AT_ONCE + bytes(k) / cost.link.bytes_per_second,
                }
            }
            GemmCollective::AllGather => {
                let rounds = (m * n).div_ceil(ROUND) as f64;
                let tiled = m.div_ceil(ranks).next_multiple_of(TILE_ROWS) * ranks;
                let product_of_tiles =
                    together * cost.matmul_seconds(ProblemSize { m: tiled, ..size }).max(reading);
                let rate = ROWS_RATE * cost.link.bytes_per_second;
                // After the rows of the j-th other rank have come, the products of what remains.
                let after = |rank: usize| {
                    let came = FIRST_ROWS + rank as f64 * own * (k * element_bytes) as f64 / rate;
                    let remains = (ranks - rank) as f64 / ranks as f64;
                    came + product_of_tiles * remains.max(1.0 / rounds)
                };
                GemmExchangeSeconds {
                    sequential: product + cost.launch_seconds + travel(k),
                    fused: (1..ranks).map(after).fold(product_of_tiles, f64::max),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(collective: GemmCollective, ranks: usize, product: [usize; 3]) -> GemmExchangeSeconds {
        let product = product.into();
        GemmExchange { collective, ranks, product, element_bytes: 2 }.seconds(&CostModel::H200)
    }

    #[test]
    fn long_products_hide_what_travels() {
        for collective in
            [GemmCollective::ReduceScatter, GemmCollective::AllReduce, GemmCollective::AllGather]
        {
            let GemmExchangeSeconds { sequential, fused } = seconds(collective, 4, [8192, 8192, 3584]);
            assert!(fused < 0.85 * sequential, "{collective:?}: {fused} compared with {sequential}");
        }
    }

    /// Measured on four GPUs: 34, 64 and 122 us compared with 39, 70 and 124.
    #[test]
    fn few_rows_travel_under_the_product_too() {
        for m in [128, 512, 1024] {
            for collective in [GemmCollective::ReduceScatter, GemmCollective::AllGather] {
                let few = seconds(collective, 4, [m, 8192, 4096]);
                assert!(few.fused < few.sequential, "{m} {collective:?}: {few:?}");
            }
        }
    }

    /// More rows than leave at once, of which two ranks' would share a tile: four rows of tiles instead of one.
    #[test]
    fn rows_that_fill_no_tile_come_first() {
        let few = seconds(GemmCollective::AllGather, 4, [128, 8192, 65536]);
        assert!(few.fused > 1.2 * few.sequential, "{few:?}");
    }

    /// A slow link makes both as long as what travels.
    #[test]
    fn nothing_is_faster_than_the_link() {
        let mut cost = CostModel::H200;
        cost.link.bytes_per_second = 1e9;
        let exchange = GemmExchange {
            collective: GemmCollective::ReduceScatter,
            ranks: 2,
            product: [1024, 1024, 1024].into(),
            element_bytes: 2,
        };
        let found = exchange.seconds(&cost);
        assert!(found.fused > 1e-3 && found.sequential > 1e-3, "{found:?}");
    }
}
