//! What variables of CUDA, NCCL and the launcher that this job was started with do to overlap, with what to do about them.

use counterpoint_console::launched::launch;
use serde::Serialize;

/// What is found of one variable, or of several that only make sense together.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    name: &'static str,
    /// `None` where it is not set.
    value: Option<String>,
    verdict: Verdict,
    /// What it does here, and what to do.
    advice: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Verdict {
    Fine,
    /// It costs time, overlap or devices.
    Costs,
}

/// When a variable is spoken of.
enum When {
    /// Its value is this number.
    Is(&'static str),
    /// Its value is one of these words, whatever their case.
    IsOneOf(&'static [&'static str]),
    /// Its value is a number other than 0, as libraries read switches.
    On,
    /// It is set, to whatever.
    Set,
    Unset,
    /// It is set to what CUDA does not read as a number from 1 to 32.
    NoQueues,
}

impl When {
    fn holds(&self, value: Option<&str>) -> bool {
        let value = value.map(str::trim);
        match (self, value) {
            (Self::Is(number), Some(value)) => value == *number,
            (Self::IsOneOf(words), Some(value)) => words.iter().any(|word| value.eq_ignore_ascii_case(word)),
            (Self::On, Some(value)) => value.parse().is_ok_and(|number: i64| number != 0),
            (Self::Set, Some(_)) => true,
            (Self::NoQueues, Some(value)) => {
                !value.parse().is_ok_and(|queues: u32| (1..=32).contains(&queues))
            }
            (Self::Unset, None) => true,
            (Self::Unset, Some(_)) | (_, None) => false,
        }
    }
}

use Verdict::{Costs, Fine};

/// What is known of each variable; of those of one name the first that holds is printed.
const KNOWN: &[(&str, When, Verdict, &str)] = &[
    (
        "CUDA_DEVICE_MAX_CONNECTIONS",
        When::Unset,
        Fine,
        "leave it so: barriers and signals order what must start first, and only policies with +single-connection need it to be 1",
    ),
    (
        "CUDA_DEVICE_MAX_CONNECTIONS",
        When::NoQueues,
        Costs,
        "the driver takes 1 to 32 hardware queues: set it to 1 for policies with +single-connection, or leave it unset",
    ),
    (
        "CUDA_DEVICE_MAX_CONNECTIONS",
        When::Is("1"),
        Fine,
        "kernels start in the order in which they are enqueued, as Megatron-LM wants it and policies with +single-connection need it; nothing else here does",
    ),
    (
        "CUDA_DEVICE_MAX_CONNECTIONS",
        When::Set,
        Fine,
        "leave it so: barriers and signals order what must start first, whatever the number; set it to 1 for policies with +single-connection",
    ),
    (
        "CUDA_LAUNCH_BLOCKING",
        When::On,
        Costs,
        "the host waits for every kernel, so nothing overlaps: unset it but to debug",
    ),
    (
        "CUDA_VISIBLE_DEVICES",
        When::IsOneOf(&["", "-1", "NoDevFiles"]),
        Costs,
        "it hides every GPU from this job: name those that it may use, or unset it",
    ),
    (
        "NCCL_P2P_DISABLE",
        When::On,
        Costs,
        "NCCL sends between GPUs of a host through its memory: unset it, or use --transport nvlink",
    ),
    (
        "NCCL_P2P_LEVEL",
        When::IsOneOf(&["0", "LOC"]),
        Costs,
        "NCCL sends between GPUs of a host through its memory: unset it, or use --transport nvlink",
    ),
    (
        "NCCL_SHM_DISABLE",
        When::On,
        Costs,
        "NCCL sends over the network where GPUs of a host do not reach each other: unset it",
    ),
    (
        "NCCL_IB_DISABLE",
        When::On,
        Costs,
        "NCCL sends between hosts by sockets: unset it where there is InfiniBand or RoCE",
    ),
    (
        "NCCL_NVLS_ENABLE",
        When::On,
        Costs,
        "NCCL makes multicast objects that sends and receives do not use, and that a host may refuse: unset it, and the command sets it to 0",
    ),
    (
        "NCCL_CGA_CLUSTER_SIZE",
        When::IsOneOf(&["0", "1"]),
        Fine,
        "NCCL's blocks start one by one, as multiprocessors become free: a margin may be smaller than NCCL's kernels",
    ),
    (
        "NCCL_CGA_CLUSTER_SIZE",
        When::Set,
        Fine,
        "NCCL's blocks start in clusters of so many: with +sm-margin=N make N no less than all of its blocks, or set it to 0 (--transport nccl+cluster-size=0)",
    ),
    (
        "NCCL_CTA_POLICY",
        When::IsOneOf(&["0", "DEFAULT"]),
        Fine,
        "NCCL takes as many multiprocessors as are fastest: with +sm-margin=N make N as many (--transport nccl+max-ctas=N)",
    ),
    (
        "NCCL_CTA_POLICY",
        When::Set,
        Fine,
        "NCCL takes fewer multiprocessors where it loses no bandwidth: a margin may be smaller; measure the link with doctor --calibrate",
    ),
    (
        "NCCL_MIN_CTAS",
        When::Set,
        Costs,
        "NCCL takes more multiprocessors from products than choices by prediction count on: unset it, and let +sm-margin=N say what products leave",
    ),
    (
        "NCCL_MIN_NCHANNELS",
        When::Set,
        Costs,
        "NCCL takes more multiprocessors from products than choices by prediction count on: unset it, and let +sm-margin=N say what products leave",
    ),
    (
        "NCCL_MAX_CTAS",
        When::Set,
        Costs,
        "NCCL sends slower than choices by prediction count on: unset it, or measure the link with doctor --calibrate",
    ),
    (
        "NCCL_MAX_NCHANNELS",
        When::Set,
        Costs,
        "NCCL sends slower than choices by prediction count on: unset it, or measure the link with doctor --calibrate",
    ),
    (
        "NCCL_DEBUG",
        When::IsOneOf(&["INFO", "TRACE"]),
        Costs,
        "NCCL writes what it does, of some calls every time: set it to WARN for times that count",
    ),
    (
        "TORCH_NCCL_BLOCKING_WAIT",
        When::On,
        Costs,
        "the host waits for every collective of PyTorch's, so nothing of this job's runs under those: unset it",
    ),
    (
        "NCCL_BLOCKING_WAIT",
        When::On,
        Costs,
        "the host waits for every collective of PyTorch's, so nothing of this job's runs under those: unset it",
    ),
];

/// What is found of this job.
pub(super) fn findings() -> Vec<Finding> {
    let mut findings = of(|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()));
    if let Err(error) = launch() {
        findings.push(Finding { name: "launcher", value: None, verdict: Costs, advice: error.to_string() });
    }
    findings
}

fn of(value_of: impl Fn(&str) -> Option<String>) -> Vec<Finding> {
    let mut findings: Vec<Finding> = Vec::new();
    for (name, when, verdict, advice) in KNOWN {
        let value = value_of(name);
        let printed = findings.last().is_some_and(|last| last.name == *name);
        if !printed && when.holds(value.as_deref()) {
            findings.push(Finding { name, value, verdict: *verdict, advice: (*advice).to_owned() });
        }
    }
    findings
}

impl Finding {
    /// One line.
    pub(super) fn describe(&self) -> String {
        let Self { name, value, verdict, advice } = self;
        let mark = if *verdict == Fine { "ok" } else { "costs" };
        match value {
            Some(value) => format!("{mark:5}  {name}={value}: {advice}"),
            None => format!("{mark:5}  {name}: {advice}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(variables: &[(&str, &str)]) -> Vec<(&'static str, Verdict)> {
        let value = |name: &str| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        };
        let findings = of(value);
        findings.into_iter().map(|finding| (finding.name, finding.verdict)).collect()
    }

    const QUEUES: &str = "CUDA_DEVICE_MAX_CONNECTIONS";

    #[test]
    fn hardware_queues_are_always_spoken_of() {
        for (value, verdict) in [
            ("1", Fine),
            ("8", Fine),
            (" 32 ", Fine),
            ("0", Costs),
            ("33", Costs),
            ("one", Costs),
            ("", Costs),
        ] {
            assert_eq!(found(&[(QUEUES, value)]), [(QUEUES, verdict)], "{value}");
        }
        assert_eq!(found(&[]), [(QUEUES, Fine)]);
    }

    #[test]
    fn what_costs_overlap_is_found_and_what_does_not_is_left_out() {
        for (name, value) in [
            ("CUDA_LAUNCH_BLOCKING", "1"),
            ("CUDA_VISIBLE_DEVICES", ""),
            ("NCCL_P2P_DISABLE", "1"),
            ("NCCL_P2P_LEVEL", "loc"),
            ("NCCL_IB_DISABLE", "1"),
            ("NCCL_MAX_NCHANNELS", "2"),
            ("NCCL_DEBUG", "Info"),
            ("TORCH_NCCL_BLOCKING_WAIT", "1"),
        ] {
            assert_eq!(found(&[(name, value)])[1..], [(name, Costs)], "{name}={value}");
        }
        for (name, value) in [
            ("CUDA_LAUNCH_BLOCKING", "0"),
            ("CUDA_VISIBLE_DEVICES", "0,1"),
            ("NCCL_P2P_LEVEL", "NVL"),
            ("NCCL_NVLS_ENABLE", "0"),
            ("NCCL_DEBUG", "WARN"),
        ] {
            assert_eq!(found(&[(name, value)]).len(), 1, "{name}={value}");
        }
    }

    #[test]
    fn every_sentence_says_what_to_do() {
        for (name, _, verdict, advice) in KNOWN.iter().filter(|(_, _, verdict, _)| *verdict == Costs) {
            let does = ["unset", "set it", "use ", "name those"].iter().any(|words| advice.contains(words));
            assert!(does, "{name} {verdict:?}: {advice}");
        }
    }
}
