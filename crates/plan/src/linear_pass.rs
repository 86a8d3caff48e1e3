//! What a pass of a tensor-parallel linear layer takes in each of the ways in which it can be run, and so which of them to take.

use crate::linear::TILE_ROWS;
use crate::{Activations, CostModel, GemmExchange, GemmTraffic, LinearKind, LinearSpec};

/// A pass of a layer on its ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearPass {
    /// The layer.
    pub spec: LinearSpec,
    /// Ranks of the tensor-parallel group, at least 2.
    pub tp_size: usize,
    /// Which pass.
    pub direction: LinearDirection,
}

/// Which pass of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinearDirection {
    /// `y`.
    Forward,
    /// `dx`, and the gradient of the weight unless the weight is frozen or its gradient is deferred.
    Backward {
        /// Whether the pass computes it.
        weight_gradient: bool,
    },
}

/// How a pass and its collectives share a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PassOverlap {
    /// One after the other.
    Sequential,
    /// Rows leave and arrive while the kernel that makes or takes them computes, and those of others by copy engines beside it or
    /// what follows.
    Fused,
    /// Copy engines move rows beside the products, and a few multiprocessors that these leave sum them.
    Beside,
}

/// Multiprocessors that products leave to sums. Two pairs: with 64 of 66 pairs of CTAs most shapes take as many rounds of tiles.
pub const SUMMING_WORKERS: usize = 4;
/// Bytes a second of copies to other ranks, and what it takes until the first of a collective has begun and the last is known to have
/// ended (`docs/kernel-log.md`).
const ENGINE_RATE: f64 = 380e9;
const ENGINE_START: f64 = 25e-6;
/// Bytes a second that one multiprocessor reads, adds and writes beside a product.
const SUM_RATE: f64 = 50e9;
/// How much longer a product takes beside copies, and one whose rows travel while it is computed.
const SLOWER_BESIDE: f64 = 1.02;
const SLOWER_FUSED: f64 = 1.04;
/// By how much of the time that copies take they hold up what a product sends beside them, for engines leave kernels little of a link:
/// measured on two H200s, 36 of 180 us.
const HELD_UP: f64 = 0.2;

/// The parts of a pass, in seconds.
struct Parts {
    /// The product of `y` or `dx`.
    product: f64,
    /// The gradient of the weight, where the pass computes it.
    weight_gradient: f64,
    /// Sums, by kernels and by copy engines.
    sums: [f64; 2],
    /// Of these, the way back to all ranks.
    spread: [f64; 2],
    /// Rows of an operand of the product on their way to all ranks.
    operand: f64,
    /// Rows that only the gradient of the weight needs, by kernels and by copy engines.
    inputs: [f64; 2],
}

impl Parts {
    fn groups(&self) -> usize {
        if self.sums[1] > self.weight_gradient { 2 } else { 1 }
    }
}

impl LinearPass {
    /// The way that is predicted to end soonest, of those that a machine has.
    pub fn fastest(&self, ways: &[PassOverlap], cost: &CostModel) -> PassOverlap {
        let seconds = |way: &PassOverlap| self.seconds(*way, cost);
        let known = ways.iter().filter(|way| seconds(way).is_some());
        let fastest =
            known.min_by(|a, b| seconds(a).partial_cmp(&seconds(b)).unwrap_or(std::cmp::Ordering::Equal));
        fastest.copied().unwrap_or(PassOverlap::Sequential)
    }

    /// What it takes; `None` where it cannot be run so, or there is nothing that travels.
    pub fn seconds(&self, overlap: PassOverlap, cost: &CostModel) -> Option<f64> {
        let traffic = self.traffic()?;
        let parts = self.parts(traffic, cost);
        let Parts { product, weight_gradient, sums, spread, operand, inputs } = parts;
        let sequential = product + weight_gradient + sums[0] + operand + inputs[0];
        match overlap {
            PassOverlap::Sequential => Some(sequential),
            PassOverlap::Fused if !self.has_whole_tiles(traffic) => None,
            PassOverlap::Fused => {
                // Sums for everyone leave under the gradient of the weight, where there is one.
                let (traffic, spread, beside) = match traffic {
                    GemmTraffic::SharesAndSums if weight_gradient > 0.0 => {
                        (GemmTraffic::Shares, 0.0, f64::max(weight_gradient * SLOWER_BESIDE, spread[1]))
                    }
                    _ => (traffic, spread[0], weight_gradient),
                };
                let fused = self.exchange(traffic).seconds(cost).fused;
                // Sums are made with the rank's own tiles, which are the last ones, so they leave no earlier.
                let ranks = self.tp_size as f64;
                let last = f64::max(product / ranks, spread);
                let first = f64::max(fused, product - product / ranks + last) * SLOWER_FUSED;
                Some(f64::max(first + HELD_UP * inputs[1], inputs[1]) + beside)
            }
            PassOverlap::Beside if sums[1] > 0.0 && weight_gradient > 0.0 => {
                let first = f64::max(product * if inputs[1] > 0.0 { SLOWER_BESIDE } else { 1.0 }, inputs[1]);
                Some(first + f64::max(weight_gradient * SLOWER_BESIDE, sums[1] / parts.groups() as f64))
            }
            PassOverlap::Beside => None,
        }
    }

    /// Groups of tokens in which it is best run [`PassOverlap::Beside`]: what does not fit under the gradient of the weight begins under the
    /// product of `dx`.
    pub fn groups_beside(&self, cost: &CostModel) -> usize {
        self.traffic().map_or(1, |traffic| self.parts(traffic, cost).groups())
    }

    /// Whether there is a kernel for the product and its sums: rows of each rank are whole tiles, or equal slices of one.
    fn has_whole_tiles(&self, traffic: GemmTraffic) -> bool {
        const SLICES: [usize; 3] = [16, 32, 64];
        let tokens = self.spec.tokens;
        let own = tokens / self.tp_size;
        let tiled = own.is_multiple_of(TILE_ROWS) || SLICES.contains(&own);
        traffic == GemmTraffic::Operand || (tokens.is_multiple_of(self.tp_size) && tiled)
    }

    /// What travels beside the first product; `None` where nothing does.
    fn traffic(&self) -> Option<GemmTraffic> {
        let sums = match self.spec.activations {
            Activations::Replicated => GemmTraffic::SharesAndSums,
            Activations::SequenceParallel => GemmTraffic::Shares,
        };
        let operand =
            (self.spec.activations == Activations::SequenceParallel).then_some(GemmTraffic::Operand);
        match (self.direction, self.spec.kind) {
            _ if self.tp_size < 2 => None,
            (LinearDirection::Forward, LinearKind::Column) => operand,
            (LinearDirection::Forward, LinearKind::Row) => Some(sums),
            (LinearDirection::Backward { .. }, LinearKind::Column) => Some(sums),
            (LinearDirection::Backward { .. }, LinearKind::Row) => operand,
        }
    }

    /// The first product and what travels beside it.
    fn exchange(&self, traffic: GemmTraffic) -> GemmExchange {
        let [m, n, k] = self.spec.product_size(self.spec.tokens, self.tp_size);
        let product = match self.direction {
            LinearDirection::Forward => [m, n, k],
            LinearDirection::Backward { .. } => [m, k, n],
        };
        GemmExchange { traffic, ranks: self.tp_size, product, element_bytes: self.spec.dtype.size() }
    }

    fn parts(&self, traffic: GemmTraffic, cost: &CostModel) -> Parts {
        let LinearSpec { tokens, dtype, .. } = self.spec;
        let exchange = self.exchange(traffic);
        let [_, n, k] = exchange.product;
        let product = cost.matmul_seconds(exchange.product);
        let weight_gradient = match self.direction {
            LinearDirection::Backward { weight_gradient: true } => cost.matmul_seconds([k, n, tokens]),
            _ => 0.0,
        };
        let own = tokens.div_ceil(self.tp_size) as f64;
        let row = |columns: usize| (columns * dtype.size()) as f64;
        let to_others = |columns: usize| own * (self.tp_size as f64 - 1.0) * row(columns);
        let by_kernels = |columns: usize| cost.launch_seconds + cost.link.seconds(to_others(columns) as u64);
        let by_engines = |columns: usize| ENGINE_START + to_others(columns) / ENGINE_RATE;
        let adding = own * (self.tp_size as f64 + 1.0) * row(n) / (SUMMING_WORKERS as f64 * SUM_RATE);
        let (sums, spread) = match traffic {
            GemmTraffic::Shares => ([by_kernels(n), by_engines(n) + adding], [0.0; 2]),
            GemmTraffic::SharesAndSums => {
                let spread = [by_kernels(n), by_engines(n)];
                ([2.0 * spread[0], 2.0 * spread[1] + adding], spread)
            }
            GemmTraffic::Operand => ([0.0; 2], [0.0; 2]),
        };
        let operand = if traffic == GemmTraffic::Operand { by_kernels(k) } else { 0.0 };
        let regathers = self.spec.kind == LinearKind::Column
            && self.spec.activations == Activations::SequenceParallel
            && matches!(self.direction, LinearDirection::Backward { weight_gradient: true });
        let inputs = if regathers { [by_kernels(n), by_engines(n)] } else { [0.0; 2] };
        Parts { product, weight_gradient, sums, spread, operand, inputs }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;

    const WAYS: [PassOverlap; 3] = [PassOverlap::Sequential, PassOverlap::Fused, PassOverlap::Beside];

    fn pass(
        kind: LinearKind,
        activations: Activations,
        direction: LinearDirection,
        [tokens, hidden, local]: [usize; 3],
    ) -> LinearPass {
        let (in_features, out_features) = match kind {
            LinearKind::Column => (hidden, 4 * local),
            LinearKind::Row => (4 * local, hidden),
        };
        let dtype = DType::Bf16;
        let spec =
            LinearSpec { kind, activations, tokens, in_features, out_features, has_bias: false, dtype };
        LinearPass { spec, tp_size: 4, direction }
    }

    const BACKWARD: LinearDirection = LinearDirection::Backward { weight_gradient: true };

    /// The sums of dx fit under the gradient of the weight; where there is none they are best made in the product.
    #[test]
    fn sums_hide_under_the_gradient_of_the_weight() {
        for activations in [Activations::Replicated, Activations::SequenceParallel] {
            for shape in [[2048, 12288, 12288], [8192, 8192, 7168], [16384, 8192, 7168]] {
                let found =
                    pass(LinearKind::Column, activations, BACKWARD, shape).fastest(&WAYS, &CostModel::H200);
                assert_eq!(found, PassOverlap::Beside, "{activations:?} {shape:?}");
            }
            let frozen = LinearDirection::Backward { weight_gradient: false };
            let found = pass(LinearKind::Column, activations, frozen, [8192, 8192, 7168]);
            assert_eq!(found.fastest(&WAYS, &CostModel::H200), PassOverlap::Fused);
        }
    }

    /// Sums to everyone take longer than the gradient, sums to their owners do not.
    #[test]
    fn what_does_not_fit_begins_earlier() {
        let groups = |activations| {
            pass(LinearKind::Column, activations, BACKWARD, [8192, 8192, 7168])
                .groups_beside(&CostModel::H200)
        };
        assert_eq!([Activations::Replicated, Activations::SequenceParallel].map(groups), [2, 1]);
    }

    /// Rows that are no tiles of their owner are summed by no kernel that multiplies.
    #[test]
    fn rows_that_are_no_tiles_are_not_fused() {
        for (tokens, fits) in [(8192, true), (8200, false), (8191, false), (4 * 32, true), (4 * 48, false)] {
            let pass =
                pass(LinearKind::Column, Activations::SequenceParallel, BACKWARD, [tokens, 8192, 7168]);
            assert_eq!(pass.seconds(PassOverlap::Fused, &CostModel::H200).is_some(), fits, "{tokens}");
            assert!(pass.seconds(PassOverlap::Beside, &CostModel::H200).is_some());
        }
    }

    /// A machine without copy engines or kernels that meet has what it has.
    #[test]
    fn only_what_a_machine_has_is_chosen() {
        let pass = pass(LinearKind::Column, Activations::Replicated, BACKWARD, [8192, 8192, 7168]);
        for ways in [&WAYS[..2], &WAYS[..1]] {
            assert_eq!(pass.fastest(ways, &CostModel::H200), ways[ways.len() - 1]);
        }
    }

    /// Forwards, and the backward whose dy travels, have one product that hides all.
    #[test]
    fn one_product_and_its_rows_are_one_kernel() {
        for (kind, activations, direction) in [
            (LinearKind::Column, Activations::SequenceParallel, LinearDirection::Forward),
            (LinearKind::Row, Activations::SequenceParallel, LinearDirection::Forward),
            (LinearKind::Row, Activations::Replicated, LinearDirection::Forward),
            (LinearKind::Row, Activations::SequenceParallel, BACKWARD),
        ] {
            let pass = pass(kind, activations, direction, [8192, 8192, 7168]);
            assert_eq!(pass.fastest(&WAYS, &CostModel::H200), PassOverlap::Fused, "{kind:?} {direction:?}");
        }
    }

    /// Nothing travels where all ranks have all tokens already, or there is one rank.
    #[test]
    fn what_does_not_travel_needs_no_overlap() {
        let forward =
            pass(LinearKind::Column, Activations::Replicated, LinearDirection::Forward, [512, 256, 256]);
        let one = LinearPass {
            tp_size: 1,
            ..pass(LinearKind::Row, Activations::Replicated, BACKWARD, [512, 256, 256])
        };
        for pass in [forward, one] {
            assert!(WAYS.iter().all(|way| pass.seconds(*way, &CostModel::H200).is_none()));
            assert_eq!(pass.fastest(&WAYS, &CostModel::H200), PassOverlap::Sequential);
        }
    }

    /// A link that is slow hides under nothing, and no way is faster than its bytes.
    #[test]
    fn a_slow_link_is_waited_for() {
        let mut cost = CostModel::H200;
        cost.link.bytes_per_second = 1e9;
        let pass =
            pass(LinearKind::Row, Activations::Replicated, LinearDirection::Forward, [4096, 4096, 4096]);
        let bytes = 2.0 * 3.0 * 1024.0 * 4096.0 * 2.0;
        for way in [PassOverlap::Sequential, PassOverlap::Fused] {
            assert!(pass.seconds(way, &cost).unwrap() > bytes / 1e9, "{way:?}");
        }
    }
}
