//! Names and versions of the JSON documents that `--json` prints: the field `schema` of each.

use std::fmt;

use serde::{Serialize, Serializer};

/// Which document it is, such as `counterpoint.plan/1`. The number rises when a field goes or changes its meaning, not when one is
/// added. docs/json.md has an example of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schema {
    /// `attention`.
    Attention,
    /// `plan`.
    Plan,
    /// `mask`.
    Mask,
    /// A row of `bench plan`.
    BenchPlan,
    /// A row of `bench attention`.
    BenchAttention,
    /// `bench attention --peers`, a variant of a peer.
    BenchAttentionPeer,
    /// A row of `bench fresh-masks`.
    BenchFreshMasks,
    /// A row of `bench cp`.
    BenchCp,
    /// A row of `bench cp` of another implementation.
    BenchCpPeer,
    /// A row of `bench gemm`.
    BenchGemm,
    /// A row of `bench gemm --experts`.
    BenchGroupedGemm,
    /// A row of `bench gemm-collective`.
    BenchGemmCollective,
    /// A row of `bench gemm-collective` of another implementation.
    BenchGemmCollectivePeer,
    /// A row of `bench tp`.
    BenchTp,
    /// A row of `bench tp --shared-input`.
    BenchTpSharedInput,
    /// A row of `bench moe`.
    BenchMoe,
    /// A row of `bench tp` of another implementation.
    BenchTpPeer,
    /// A row of `bench bandwidth`.
    BenchBandwidth,
    /// A row of `bench group-cast` and `bench group-reduce`.
    BenchGroupCollective,
    /// `simulate attention`.
    SimulateAttention,
    /// `simulate moe`.
    SimulateMoe,
    /// `simulate linear`.
    SimulateLinear,
    /// `simulate model`.
    SimulateModel,
    /// A product of `tune gemm`.
    TuneGemm,
    /// A pass of `tune moe`.
    TuneMoe,
    /// What `tune gemm` sums up.
    TuneGemmSummary,
    /// `selftest`.
    Selftest,
    /// What a process of a selftest reports to the one that started it.
    SelftestPart,
    /// `selftest --compile-only`.
    SelftestCompile,
    /// `doctor`.
    Doctor,
    /// `doctor --overlap`.
    DoctorOverlap,
    /// `doctor --calibrate`.
    DoctorProfile,
}

impl Schema {
    /// The document's name and version.
    const fn name(self) -> &'static str {
        match self {
            Self::Attention => "counterpoint.attention/1",
            Self::Plan => "counterpoint.plan/1",
            Self::Mask => counterpoint_mask::MASK_SCHEMA,
            Self::BenchPlan => "counterpoint.bench-plan/1",
            Self::BenchAttention => "counterpoint.bench-attention/1",
            Self::BenchAttentionPeer => "counterpoint.bench-attention-peer/1",
            Self::BenchFreshMasks => "counterpoint.bench-fresh-masks/1",
            Self::BenchCp => "counterpoint.bench-cp/1",
            Self::BenchCpPeer => "counterpoint.bench-cp-peer/1",
            Self::BenchGemm => "counterpoint.bench-gemm/1",
            Self::BenchGroupedGemm => "counterpoint.bench-grouped-gemm/1",
            Self::BenchGemmCollective => "counterpoint.bench-gemm-collective/1",
            Self::BenchGemmCollectivePeer => "counterpoint.bench-gemm-collective-peer/1",
            Self::BenchTp => "counterpoint.bench-tp/1",
            Self::BenchTpSharedInput => "counterpoint.bench-tp-shared-input/1",
            Self::BenchMoe => "counterpoint.bench-moe/1",
            Self::BenchTpPeer => "counterpoint.bench-tp-peer/1",
            Self::BenchBandwidth => "counterpoint.bench-bandwidth/1",
            Self::BenchGroupCollective => "counterpoint.bench-group-collective/1",
            Self::SimulateAttention => "counterpoint.simulate-attention/1",
            Self::SimulateMoe => "counterpoint.simulate-moe/1",
            Self::SimulateLinear => "counterpoint.simulate-linear/1",
            Self::SimulateModel => "counterpoint.simulate-model/1",
            Self::TuneGemm => "counterpoint.tune-gemm/2",
            Self::TuneMoe => "counterpoint.tune-moe/1",
            Self::TuneGemmSummary => "counterpoint.tune-gemm-summary/1",
            Self::Selftest => "counterpoint.selftest/1",
            Self::SelftestPart => "counterpoint.selftest-part/1",
            Self::SelftestCompile => "counterpoint.selftest-compile/1",
            Self::Doctor => "counterpoint.doctor/1",
            Self::DoctorOverlap => "counterpoint.doctor-overlap/1",
            Self::DoctorProfile => "counterpoint.doctor-profile/1",
        }
    }
}

impl fmt::Display for Schema {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Serialize for Schema {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// A document with its schema in front.
#[derive(Debug, Serialize)]
pub struct Documented<'a, T> {
    /// Which document it is.
    pub schema: Schema,
    /// What it holds.
    #[serde(flatten)]
    pub document: &'a T,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_schema_comes_first_and_numbers_keep_their_digits() {
        #[derive(Serialize)]
        struct Figures {
            rows: u64,
            seconds: f64,
        }
        let document = Figures { rows: u64::MAX, seconds: 0.1 };
        let text = serde_json::to_string(&Documented { schema: Schema::Plan, document: &document }).unwrap();
        assert_eq!(text, r#"{"schema":"counterpoint.plan/1","rows":18446744073709551615,"seconds":0.1}"#);
    }
}
