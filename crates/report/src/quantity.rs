//! Numbers for people: seconds, bytes, rates, counts and ratios with three digits and the unit that fits.

/// Shown where there is no number to show.
const NOTHING: &str = "–";

/// `value` with three significant digits, and all digits before the point.
pub(crate) fn three_digits(value: f64) -> String {
    let decimals = match value.abs() {
        // The limits lie where rounding would carry into a further digit.
        v if v >= 99.95 => 0,
        v if v >= 9.995 => 1,
        v if v >= 0.9995 || v == 0.0 => 2,
        _ => 3,
    };
    format!("{value:.decimals$}")
}

/// `value` in the largest of `units` (factor, name; largest first) that leaves at least 1 after rounding.
fn in_units(value: f64, units: &[(f64, &str)]) -> String {
    if !value.is_finite() {
        return NOTHING.to_owned();
    }
    let fits = |&&(factor, _): &&(f64, &str)| value.abs() / factor >= 0.9995;
    let smallest = &units[units.len() - 1];
    let &(factor, name) = units.iter().find(fits).unwrap_or(smallest);
    if value == 0.0 {
        return format!("0 {name}");
    }
    format!("{} {name}", three_digits(value / factor))
}

/// Seconds in the unit that fits: `1.23 s`, `45.6 ms`, `789 us`, `12.0 ns`. A dash when not finite.
pub fn format_seconds(seconds: f64) -> String {
    if seconds == 0.0 {
        return "0 s".to_owned();
    }
    in_units(seconds, &[(1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")])
}

/// Bytes in decimal units (1 GB = 1e9 bytes), as bandwidths are given.
pub fn format_bytes(bytes: u64) -> String {
    if bytes < 1000 {
        return format!("{bytes} B");
    }
    in_units(bytes as f64, &[(1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")])
}

/// A number of things, such as `1 rank` or `4,096 ranks`. `noun` is the singular, of which the plural takes an s.
pub fn format_counted(number: usize, noun: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{} {noun}{plural}", format_count(number as u64))
}

/// A whole number with thousands separated by commas: rows, tokens, areas.
pub fn format_count(count: u64) -> String {
    let digits = count.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A position on a token axis, with the 1024-based `k` and `M` of mask expressions where it is a multiple of them.
pub fn format_tokens(tokens: u64) -> String {
    const K: u64 = 1 << 10;
    const M: u64 = 1 << 20;
    match tokens {
        0 => "0".to_owned(),
        t if t.is_multiple_of(M) => format!("{}M", format_count(t / M)),
        // Half and quarter millions read better as millions once there is a whole one.
        t if t > M && (t * 4).is_multiple_of(M) => format!("{}M", t as f64 / M as f64),
        t if t.is_multiple_of(K) => format!("{}k", format_count(t / K)),
        t => format_count(t),
    }
}

/// Floating-point operations a second in the unit that fits: `780 TFLOP/s` of a GPU, `43.0 GFLOP/s` of a CPU. A dash when
/// not finite.
pub fn format_flops(flops_per_second: f64) -> String {
    in_units(flops_per_second, &[(1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s")])
}

/// Bytes a second, in units of 1e9.
pub fn format_gbps(bytes_per_second: f64) -> String {
    if !bytes_per_second.is_finite() {
        return NOTHING.to_owned();
    }
    format!("{} GB/s", three_digits(bytes_per_second / 1e9))
}

/// A ratio such as `1.15x`. A dash when not finite.
pub fn format_ratio(ratio: f64) -> String {
    if ratio.is_finite() { format!("{}x", three_digits(ratio)) } else { NOTHING.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn seconds_pick_their_unit() {
        for (seconds, text) in [
            (0.0, "0 s"),
            (1.5e-10, "0.150 ns"),
            (1.23456e-6, "1.23 us"),
            (9.9996e-4, "1.00 ms"),
            (0.0456, "45.6 ms"),
            (0.99949, "999 ms"),
            (0.9996, "1.00 s"),
            (12.345, "12.3 s"),
            (4321.0, "4321 s"),
            (f64::NAN, "–"),
            (f64::INFINITY, "–"),
        ] {
            assert_eq!(format_seconds(seconds), text, "{seconds}");
        }
    }

    #[test]
    fn other_quantities() {
        assert_eq!(format_bytes(0), "0 B");
        assert_eq!(format_bytes(999), "999 B");
        assert_eq!(format_bytes(1000), "1.00 kB");
        assert_eq!(format_bytes(999_960), "1.00 MB");
        assert_eq!(format_bytes(134_217_728), "134 MB");
        assert_eq!(format_bytes(u64::MAX), "18447 PB");
        assert_eq!(format_count(0), "0");
        assert_eq!(format_count(999), "999");
        assert_eq!(format_count(1000), "1,000");
        assert_eq!(format_count(1_048_576), "1,048,576");
        assert_eq!(format_tokens(0), "0");
        assert_eq!(format_tokens(1000), "1,000");
        assert_eq!(format_tokens(131_072), "128k");
        assert_eq!(format_tokens(1 << 20), "1M");
        assert_eq!(format_tokens(3 << 19), "1.5M");
        assert_eq!(format_flops(7.8e14), "780 TFLOP/s");
        assert_eq!(format_flops(1.23e10), "12.3 GFLOP/s");
        assert_eq!(format_gbps(3.5e11), "350 GB/s");
        assert_eq!(format_ratio(1.149), "1.15x");
        assert_eq!(format_ratio(f64::NAN), "–");
    }

    proptest! {
        #[test]
        fn seconds_read_back_within_half_a_digit(exponent in -9.0f64..4.0) {
            let seconds = 10f64.powf(exponent);
            let text = format_seconds(seconds);
            let (number, unit) = text.split_once(' ').unwrap();
            let factor = match unit { "s" => 1.0, "ms" => 1e-3, "us" => 1e-6, "ns" => 1e-9, _ => panic!("{unit}") };
            let back: f64 = number.parse::<f64>().unwrap() * factor;
            prop_assert!((back / seconds - 1.0).abs() < 0.0051, "{} -> {}", seconds, text);
        }

        #[test]
        fn counts_read_back(count: u64) {
            prop_assert_eq!(format_count(count).replace(',', "").parse::<u64>().unwrap(), count);
        }
    }
}
