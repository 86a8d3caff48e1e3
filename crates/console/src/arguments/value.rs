//! Parsers of single values. Each says what it got, what it wants and so how to mend it.

use std::ffi::OsStr;
use std::time::Duration;

use clap::builder::{PossibleValue, PossibleValuesParser, StringValueParser, TypedValueParser};
use clap::{Arg, Command};
use counterpoint_choose::{DispatchAlgorithm, LayerGroups, MAX_CP_SIZE, PassStages, QueryExchange};
use counterpoint_cost::ProblemSize;
use counterpoint_cuda::TransportKind;
use counterpoint_exec::SlowLink;
use counterpoint_mask::MaskPreset;
use counterpoint_plan::{DType, GemmCollective, GradientShares, TransformerSpec, WaveGroups};

use super::ValueFault;
use crate::FlagFault;
use crate::error::CliError;

/// A number of at least 1, with `k` or `M` for 1024 and 1024 x 1024.
pub fn size(text: &str) -> Result<usize, ValueFault> {
    let (digits, factor) = match text.as_bytes().last() {
        Some(b'k') => (&text[..text.len() - 1], 1 << 10),
        Some(b'M') => (&text[..text.len() - 1], 1 << 20),
        _ => (text, 1),
    };
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(ValueFault::Size { text: text.to_owned() });
    }
    // Only digits: what does not parse is too large.
    match digits.parse::<usize>().ok().and_then(|number| number.checked_mul(factor)) {
        Some(0) => Err(ValueFault::Zero),
        Some(size) if size < 1 << 32 => Ok(size),
        _ => Err(ValueFault::SizeTooLarge { text: text.to_owned() }),
    }
}

/// A number of bytes, with `K`, `M` or `G` (or the same in lower case) for powers of 1024, as nccl-tests takes them.
pub fn bytes(text: &str) -> Result<u64, ValueFault> {
    let wrong = || ValueFault::Bytes { text: text.to_owned() };
    let (digits, shift) = match text.as_bytes().last().map(u8::to_ascii_lowercase) {
        Some(b'k') => (&text[..text.len() - 1], 10),
        Some(b'm') => (&text[..text.len() - 1], 20),
        Some(b'g') => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(wrong());
    }
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    match number.checked_mul(1 << shift) {
        Some(bytes) if (1..=1 << 40).contains(&bytes) => Ok(bytes),
        _ => Err(ValueFault::BytesOutOfRange { text: text.to_owned() }),
    }
}

/// Query and key heads, such as `64:8`.
pub fn heads(text: &str) -> Result<(usize, usize), ValueFault> {
    let wrong = || ValueFault::Heads { text: text.to_owned() };
    let (q, kv) = text.split_once(':').ok_or_else(wrong)?;
    let (q, kv) = (size(q).map_err(|_| wrong())?, size(kv).map_err(|_| wrong())?);
    if q % kv == 0 { Ok((q, kv)) } else { Err(wrong()) }
}

/// A matrix product by its `m:n:k`, such as `8192:8192:3584`.
pub fn product(text: &str) -> Result<ProblemSize, ValueFault> {
    sizes(text).map(ProblemSize::from)
}

/// Three sizes, such as `8192:8192:3584`.
pub fn sizes(text: &str) -> Result<[usize; 3], ValueFault> {
    let wrong = || ValueFault::Product { text: text.to_owned() };
    let sizes: Vec<_> = text.split(':').map(size).collect::<Result<_, _>>().map_err(|_| wrong())?;
    sizes.try_into().map_err(|_| wrong())
}

/// A number of threads.
pub fn threads(text: &str) -> Result<usize, ValueFault> {
    const MOST: usize = 1024;
    match text.parse::<usize>() {
        Ok(threads) if (1..=MOST).contains(&threads) => Ok(threads),
        _ => Err(ValueFault::Threads { text: text.to_owned(), most: MOST }),
    }
}

/// A number of ranks.
pub fn cp_size(text: &str) -> Result<usize, ValueFault> {
    let most = MAX_CP_SIZE;
    match text.parse::<usize>() {
        Ok(cp_size) if (1..=MAX_CP_SIZE).contains(&cp_size) => Ok(cp_size),
        Ok(cp_size) => Err(ValueFault::CpSizeOutOfRange { cp_size, most }),
        Err(_) => Err(ValueFault::CpSize { text: text.to_owned(), most }),
    }
}

/// A number of ranks of a modelled cluster.
pub fn ranks(text: &str) -> Result<usize, ValueFault> {
    let wrong = || ValueFault::Ranks { text: text.to_owned(), most: MAX_CP_SIZE };
    text.parse().ok().filter(|ranks| (1..=MAX_CP_SIZE).contains(ranks)).ok_or_else(wrong)
}

/// `auto`, a number of equal groups, or the rows of each; behind `columns=` groups of columns.
pub fn groups(text: &str) -> Result<LayerGroups, ValueFault> {
    let wrong = || ValueFault::Groups { text: text.to_owned() };
    if text == "auto" {
        return Ok(LayerGroups::Auto);
    }
    let columns = text.strip_prefix("columns=");
    let sizes = columns.unwrap_or(text).split('+').map(size);
    let sizes: Vec<usize> = sizes.collect::<Result<_, _>>().map_err(|_| wrong())?;
    let groups = match (columns, &sizes[..]) {
        (None, &[groups]) => WaveGroups::Fixed(groups),
        (None, _) => WaveGroups::Sizes(sizes),
        (Some(_), &[groups]) => WaveGroups::Columns(groups),
        (Some(_), _) => WaveGroups::ColumnSizes(sizes),
    };
    Ok(groups.into())
}

/// A collective of tokens.
pub fn collective() -> impl TypedValueParser<Value = GemmCollective> {
    named(GemmCollective::NAMES)
}

/// A mask of the benchmarks.
pub fn mask_preset() -> impl TypedValueParser<Value = MaskPreset> {
    named(MaskPreset::ALL.map(|preset| (preset.name(), preset)))
}

/// A model whose sizes are built in.
pub fn model() -> impl TypedValueParser<Value = TransformerSpec> {
    named(TransformerSpec::PRESETS.map(|model| (model.name, model)))
}

/// `auto` or a number of remote stages, for both passes or for each.
pub fn stages(text: &str) -> Result<PassStages, ValueFault> {
    Ok(text.parse()?)
}

/// A seed.
pub fn seed(text: &str) -> Result<u64, ValueFault> {
    text.parse().map_err(|_| ValueFault::Seed { text: text.to_owned() })
}

/// Largest magnitude of a factor on scores. Whatever lies beyond is a slip, and would leave the range of `f32` together
/// with scores that do not.
const MAX_FACTOR: f64 = 1e6;

/// A factor on scores. Whether it is not too small depends on the tensors, see [`scale_of`].
pub fn scale(text: &str) -> Result<f64, ValueFault> {
    match finite(text)? {
        number if number.abs() <= MAX_FACTOR => Ok(number),
        _ => Err(ValueFault::Factor { most: MAX_FACTOR }),
    }
}

/// The factor on scores of tensors with rows of `head_dim` and statistics in `accumulator`: the one given, which must be
/// 0 or a normal number of that type, or `1 / sqrt(head_dim)`. A subnormal one would lose its digits on the way.
pub fn scale_of(given: Option<f64>, head_dim: usize, accumulator: DType) -> Result<f64, CliError> {
    let Some(scale) = given else { return Ok(1.0 / (head_dim as f64).sqrt()) };
    let smallest = match accumulator {
        DType::F64 => f64::MIN_POSITIVE,
        _ => f64::from(f32::MIN_POSITIVE),
    };
    if scale == 0.0 || scale.abs() >= smallest {
        return Ok(scale);
    }
    let dtype = dtype_name(accumulator);
    let fault = FlagFault::Scale { dtype, smallest, largest: MAX_FACTOR };
    Err(CliError::flag("--scale", format!("{scale:e}"), fault))
}

/// A cap on scores, or 0 for none. Its bounds are normal numbers of every type that statistics have.
pub fn softcap(text: &str) -> Result<f64, ValueFault> {
    match non_negative(text)? {
        number if number == 0.0 || (1.0 / MAX_FACTOR..=MAX_FACTOR).contains(&number) => Ok(number.abs()),
        number => Err(ValueFault::Softcap { number, most: MAX_FACTOR }),
    }
}

/// Any finite number.
fn finite(text: &str) -> Result<f64, ValueFault> {
    let number = text.parse::<f64>().ok().filter(|number| number.is_finite());
    number.ok_or_else(|| ValueFault::Finite { text: text.to_owned() })
}

/// A finite number of at least 0.
fn non_negative(text: &str) -> Result<f64, ValueFault> {
    match finite(text)? {
        number if number >= 0.0 => Ok(number),
        number => Err(ValueFault::Negative { number }),
    }
}

/// Seconds above 0.
pub fn seconds(text: &str) -> Result<Duration, ValueFault> {
    let wrong = || ValueFault::Seconds { text: text.to_owned() };
    let seconds = text.parse::<f64>().ok().filter(|seconds| *seconds > 0.0).ok_or_else(wrong)?;
    Duration::try_from_secs_f64(seconds).map_err(|_| wrong())
}

/// `ALPHA_US,GB_PER_S`.
pub fn slow_link(text: &str) -> Result<SlowLink, ValueFault> {
    let wrong = || ValueFault::Link { text: text.to_owned() };
    let (alpha, rate) = text.split_once(',').ok_or_else(wrong)?;
    let alpha = non_negative(alpha).map_err(|_| wrong())?;
    let rate = non_negative(rate).ok().filter(|rate| *rate > 0.0).ok_or_else(wrong)?;
    let alpha = Duration::try_from_secs_f64(alpha * 1e-6).map_err(|_| wrong())?;
    Ok(SlowLink { alpha, bytes_per_second: rate * 1e9, network: None })
}

/// The names of dispatch algorithms, as serde has them too.
pub const DISPATCHES: [(&str, DispatchAlgorithm); 4] = [
    ("affinity", DispatchAlgorithm::Affinity),
    ("min-heap", DispatchAlgorithm::MinHeap),
    ("sequential", DispatchAlgorithm::Sequential),
    ("zigzag", DispatchAlgorithm::Zigzag),
];

/// What `--dispatch` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DispatchAsked {
    /// The one that is predicted to end a forward and a backward first.
    Auto,
    /// This.
    Named(DispatchAlgorithm),
}

impl DispatchAsked {
    /// The one that is named; else what plans are made with that nobody compares.
    pub fn named(self) -> DispatchAlgorithm {
        match self {
            Self::Auto => DispatchAlgorithm::default(),
            Self::Named(algorithm) => algorithm,
        }
    }
}

/// A dispatch algorithm, or `auto`.
pub fn dispatch() -> impl TypedValueParser<Value = DispatchAsked> {
    let [a, b, c, d] = DISPATCHES.map(|(name, algorithm)| (name, DispatchAsked::Named(algorithm)));
    named([("auto", DispatchAsked::Auto), a, b, c, d])
}

/// When queries travel.
const QUERY_EXCHANGES: [(&str, QueryExchange); 3] = [
    ("auto", QueryExchange::Auto),
    ("fewest-bytes", QueryExchange::FewestBytes),
    ("never", QueryExchange::Never),
];

/// When queries travel.
pub fn query_exchange() -> impl TypedValueParser<Value = QueryExchange> {
    named(QUERY_EXCHANGES)
}

/// In what gradients travel, as the command line names it.
const GRADIENT_SHARES: [(&str, GradientShares); 2] =
    [("accumulators", GradientShares::Accumulators), ("elements", GradientShares::Elements)];

/// In what gradients travel.
pub fn gradient_shares() -> impl TypedValueParser<Value = GradientShares> {
    named(GRADIENT_SHARES)
}

/// An element type.
pub fn dtype() -> impl TypedValueParser<Value = DType> {
    named(DType::ALL.map(|dtype| (dtype.name(), dtype)))
}

/// A transport between GPUs, with NCCL's settings behind the names of those that it moves rows of.
pub fn transport() -> impl TypedValueParser<Value = TransportKind> {
    TransportParser
}

#[derive(Clone)]
struct TransportParser;

impl TypedValueParser for TransportParser {
    type Value = TransportKind;

    fn parse_ref(
        &self,
        command: &Command,
        argument: Option<&Arg>,
        value: &OsStr,
    ) -> Result<TransportKind, clap::Error> {
        if value.to_string_lossy().contains('+') {
            let settings = StringValueParser::new().try_map(|text| text.parse::<TransportKind>());
            return settings.parse_ref(command, argument, value);
        }
        named(TransportKind::NAMES).parse_ref(command, argument, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(TransportKind::NAMES.into_iter().map(|(name, _)| PossibleValue::new(name))))
    }
}

/// The name of a dispatch algorithm.
pub fn dispatch_name(algorithm: DispatchAlgorithm) -> &'static str {
    name_of(DISPATCHES, algorithm)
}

/// The name of an element type.
pub fn dtype_name(dtype: DType) -> &'static str {
    dtype.name()
}

fn name_of<T: PartialEq, const N: usize>(names: [(&'static str, T); N], value: T) -> &'static str {
    names.into_iter().find(|(_, named)| *named == value).map_or("unknown", |(name, _)| name)
}

/// One of a few names, listed in help and in errors.
fn named<T: Copy + Send + Sync + 'static, const N: usize>(
    names: [(&'static str, T); N],
) -> impl TypedValueParser<Value = T> {
    PossibleValuesParser::new(names.map(|(name, _)| name)).try_map(move |text| {
        let found = names.iter().find(|(name, _)| *name == text);
        found.map(|(_, value)| *value).ok_or_else(|| ValueFault::Name { text: text.clone() })
    })
}

#[cfg(test)]
mod tests {
    use counterpoint_choose::StageCount;

    use super::*;

    #[test]
    fn sizes() {
        for (text, value) in [("1", 1), ("512", 512), ("4k", 4096), ("1M", 1 << 20), ("4095M", 4095 << 20)] {
            assert_eq!(size(text), Ok(value), "{text}");
        }
        for text in [
            "",
            "k",
            "0",
            "0k",
            "-1",
            "+1",
            "1.5",
            "1 k",
            "1K",
            "4096M",
            "4294967296",
            "99999999999999999999999",
        ] {
            assert!(size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn products() {
        assert_eq!(product("4k:8:3584"), Ok(ProblemSize { m: 4096, n: 8, k: 3584 }));
        for text in ["", "1", "1:2", "1:2:3:4", "1:0:3", "1:x:3"] {
            assert!(product(text).unwrap_err().to_string().contains("give m, n and k"), "{text}");
        }
    }

    #[test]
    fn numbers_of_bytes() {
        for (text, value) in [("1", 1), ("64K", 64 << 10), ("8m", 8 << 20), ("1G", 1 << 30)] {
            assert_eq!(bytes(text), Ok(value), "{text}");
        }
        for text in ["", "M", "0", "-1", "1.5G", "2000G", "99999999999999999999G"] {
            assert!(bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn ranks_and_stages() {
        assert_eq!(cp_size("4096"), Ok(4096));
        for text in ["0", "4097", "-1", "two", ""] {
            assert!(cp_size(text).unwrap_err().to_string().contains("between 1 and 4096"), "{text}");
        }
        assert_eq!(stages("auto"), Ok(PassStages::AUTO));
        assert_eq!(stages("3"), Ok(StageCount::Fixed(3).into()));
        assert_eq!(stages("0"), Ok(StageCount::Fixed(0).into()), "all work at once");
        for text in ["-1", "many", "1025"] {
            assert!(stages(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sequences_of_groups() {
        assert_eq!(groups("auto"), Ok(LayerGroups::Auto));
        assert_eq!(groups("4"), Ok(WaveGroups::Fixed(4).into()));
        assert_eq!(groups("1k+512"), Ok(WaveGroups::Sizes(vec![1024, 512]).into()));
        assert_eq!(groups("columns=4"), Ok(WaveGroups::Columns(4).into()));
        assert_eq!(groups("columns=1k+512"), Ok(WaveGroups::ColumnSizes(vec![1024, 512]).into()));
        for text in ["", "0", "4+", "4+0", "a+b", "-1"] {
            assert!(groups(text).unwrap_err().to_string().contains("256+512+256"), "{text}");
        }
    }

    #[test]
    fn factors_on_scores() {
        for (text, value) in
            [("0", 0.0), ("-0.125", -0.125), ("1e6", 1e6), ("-1000000", -1e6), ("1e-40", 1e-40)]
        {
            assert_eq!(scale(text), Ok(value), "{text}");
        }
        for text in ["1000001", "-1e7", "1e38", "1e300", "1e400", "inf", "nan"] {
            assert!(scale(text).is_err(), "{text}");
        }
        for accumulator in [DType::F32, DType::F64] {
            assert_eq!(scale_of(None, 4, accumulator).unwrap(), 0.5);
            let smallest =
                if accumulator == DType::F32 { f64::from(f32::MIN_POSITIVE) } else { f64::MIN_POSITIVE };
            for value in [0.0, 1.0, smallest, -smallest] {
                assert_eq!(scale_of(Some(value), 4, accumulator).unwrap(), value);
            }
            assert!(scale_of(Some(0.99 * smallest), 4, accumulator).is_err());
            assert!(scale_of(Some(-0.99 * smallest), 4, accumulator).is_err());
        }
        for (text, value) in [("0", 0.0), ("-0", 0.0), ("1e-6", 1e-6), ("30", 30.0), ("1e6", 1e6)] {
            assert_eq!(softcap(text).map(f64::to_bits), Ok(f64::to_bits(value)), "{text}");
        }
        for text in ["-1", "1e-7", "1e-300", "1e7", "1e300", "nan"] {
            assert!(softcap(text).is_err(), "{text}");
        }
    }

    #[test]
    fn times_and_links() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for text in ["0", "-1", "nan", "inf", "1e300", "soon"] {
            assert!(seconds(text).is_err(), "{text}");
        }
        let link = slow_link("200,0.5").unwrap();
        assert_eq!((link.alpha, link.bytes_per_second), (Duration::from_micros(200), 5e8));
        for text in ["", "200", "200,0", "-1,1", "a,b", "1,2,3", "1,inf"] {
            assert!(slow_link(text).is_err(), "{text}");
        }
        assert_eq!(seed("18446744073709551615"), Ok(u64::MAX));
        for text in ["18446744073709551616", "-1", "0.5", "x"] {
            assert!(seed(text).unwrap_err().to_string().contains("from 0 to 18446744073709551615"), "{text}");
        }
        assert!(finite("nan").is_err() && non_negative("-0.5").is_err());
        assert_eq!(non_negative("0"), Ok(0.0));
    }
}
