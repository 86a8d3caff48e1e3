//! Element types that kernels convert between, and which of them hold all values of another.

use counterpoint_plan::DType;

/// An element type that kernels convert from and to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scalar {
    /// 32-bit IEEE float.
    F32,
    /// bfloat16.
    Bf16,
    /// 16-bit IEEE float.
    F16,
}

impl Scalar {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::F32, Self::Bf16, Self::F16];

    /// `None` for f64, which no kernel takes.
    pub const fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::F32 => Some(Self::F32),
            DType::Bf16 => Some(Self::Bf16),
            DType::F16 => Some(Self::F16),
            DType::F64 => None,
        }
    }

    /// As it stands in kernels' names.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        }
    }

    /// Its type in `scalar.cuh`.
    pub(crate) const fn cpp(self) -> &'static str {
        match self {
            Self::F32 => "counterpoint::F32",
            Self::Bf16 => "counterpoint::Bf16",
            Self::F16 => "counterpoint::F16",
        }
    }

    /// Bytes of one element.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// Whether every value of this type is one of `wire` too.
    pub fn survives(self, wire: Self) -> bool {
        self == wire || wire == Self::F32
    }
}
