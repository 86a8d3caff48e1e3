//! The products that `bench gemm --experts` measures: those that are named, or usual layers of experts.

use counterpoint_console::{CliError, UsageFault};
use counterpoint_cost::ProblemSize;
use counterpoint_cuda::kernel::{ElementType, GemmLayout};

use crate::arguments::BenchGemmArguments;
use crate::gemm::products::layouts;
use crate::gpu::ExpertProducts;

/// Experts of a rank, rows of each on average, features in and out: experts of 2 M to 34 M weights, with few rows and many.
const LAYERS: [[usize; 4]; 6] = [
    [8, 1024, 2048, 1024],
    [8, 2048, 2048, 1024],
    [16, 1024, 4096, 2048],
    [32, 256, 4096, 2048],
    [8, 2048, 4096, 8192],
    [8, 2048, 8192, 4096],
];

/// The products to measure.
pub(super) fn chosen(
    arguments: &BenchGemmArguments,
    element: ElementType,
) -> Result<Vec<ExpertProducts>, CliError> {
    let counts = arguments.experts.as_deref().unwrap_or_default();
    if counts.is_empty() != arguments.shapes.is_empty() {
        return Err(CliError::usage(match counts.is_empty() {
            true => UsageFault::ExpertsWithoutNumber,
            false => UsageFault::ExpertsWithoutShapes,
        }));
    }
    let of = |size: ProblemSize, layout: GemmLayout, experts: usize| {
        let rows = if layout == GemmLayout::Tn { size.k } else { size.m };
        let Some(rows) = ExpertProducts::uneven(rows, experts) else {
            return Err(CliError::usage(UsageFault::FewRows { rows, experts }));
        };
        Ok(ExpertProducts { layout, element, size, rows, sm_margin: arguments.sm_margin })
    };
    if counts.is_empty() {
        let count = if arguments.quick { 1 } else { LAYERS.len() };
        let all = LAYERS.iter().take(count).flat_map(|layer| GemmLayout::ALL.map(|layout| (layer, layout)));
        return all.map(|(layer, layout)| of(size(*layer, layout), layout, layer[0])).collect();
    }
    let (shapes, layouts) = (&arguments.shapes, layouts(arguments));
    let sizes = shapes.iter().flat_map(|size| layouts.iter().map(move |layout| (*size, *layout)));
    let all =
        sizes.flat_map(|(size, layout)| counts.iter().map(move |count| (size, layout, *count as usize)));
    all.map(|(size, layout, experts)| of(size, layout, experts)).collect()
}

/// Of all experts: results of a forward, gradients of its input, gradients of its weights.
fn size([experts, rows, features_in, features_out]: [usize; 4], layout: GemmLayout) -> ProblemSize {
    let rows = experts * rows;
    match layout {
        GemmLayout::Nt => [rows, features_out, features_in],
        GemmLayout::Nn => [rows, features_in, features_out],
        GemmLayout::Tn => [features_out, features_in, rows],
    }
    .into()
}

#[cfg(test)]
mod tests {
    use clap::{Args, FromArgMatches};

    use super::*;

    fn asked(line: &str) -> Result<Vec<ExpertProducts>, CliError> {
        let command = BenchGemmArguments::augment_args(clap::Command::new("gemm").no_binary_name(true));
        let matches = command.try_get_matches_from(line.split_whitespace()).unwrap();
        chosen(&BenchGemmArguments::from_arg_matches(&matches).unwrap(), ElementType::Bf16)
    }

    #[test]
    fn usual_layers_have_all_passes_and_named_ones_their_experts() {
        let usual = asked("--experts").unwrap();
        assert_eq!((usual.len(), asked("--experts --quick").unwrap().len()), (18, 3));
        for products in &usual {
            let rows = if products.layout == GemmLayout::Tn { products.size.k } else { products.size.m };
            assert_eq!(products.rows.iter().sum::<usize>(), rows);
        }
        // The three products of a layer are as large.
        assert!(
            usual.chunks(3).all(|layer| layer.iter().all(|one| one.size.flops() == layer[0].size.flops()))
        );
        let named = asked("--experts=4,8 --shapes 1024:64:128 --layouts nt,tn --sm-margin 8").unwrap();
        let found: Vec<_> = named.iter().map(|one| (one.layout, one.rows.len(), one.sm_margin)).collect();
        let (nt, tn) = (GemmLayout::Nt, GemmLayout::Tn);
        assert_eq!(found, [(nt, 4, 8), (nt, 8, 8), (tn, 4, 8), (tn, 8, 8)]);
        assert_eq!(named[2].rows.iter().sum::<usize>(), 128);
    }

    #[test]
    fn what_does_not_fit_is_said() {
        let refusal = |line| asked(line).unwrap_err().to_string();
        assert!(refusal("--experts --shapes 128:64:64").contains("--experts=8"));
        assert!(refusal("--experts=8").contains("--shapes"));
        assert!(refusal("--experts=64 --shapes 32:64:64").contains("32 rows"));
    }
}
