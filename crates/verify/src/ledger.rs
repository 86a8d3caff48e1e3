//! What a selftest has found so far, and the document of it.

use std::fmt::Write;
use std::time::Duration;

use counterpoint_console::{self as console, CheckFault, CliError};
use counterpoint_reference::selftest::{SelfCheck, Share};
use counterpoint_report::{Column, table};
use serde::{Deserialize, Serialize};

use crate::arguments::SelftestArguments;
use crate::group::Group;

/// What a process found, as it reports to the one that started it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Examined {
    pub(super) groups: Vec<GroupChecks>,
}

/// How far a process is with a group, as it reports to the one that started it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Heard {
    /// Checks that were made, of all groups.
    pub(super) checks: usize,
    /// Of these, those that failed.
    pub(super) failed: usize,
}

/// Which lines a selftest prints while it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Detail {
    /// None: the document has them.
    Document,
    /// Of checks that failed.
    Failures,
    /// Of every check, and when each group was examined.
    Everything,
}

impl Detail {
    /// As flags ask for it.
    pub(super) fn of(arguments: &SelftestArguments) -> Self {
        match arguments {
            SelftestArguments { json: true, .. } => Self::Document,
            SelftestArguments { verbose: true, .. } => Self::Everything,
            _ => Self::Failures,
        }
    }
}

/// The checks of a group or of a share of it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct GroupChecks {
    pub(super) group: String,
    /// Seconds after the beginning.
    pub(super) began: f64,
    /// Two families of kernels that are examined together took this together.
    pub(super) seconds: f64,
    pub(super) checks: Vec<SelfCheck>,
}

impl GroupChecks {
    pub(super) fn of(group: Group, began: Duration, took: Duration, checks: Vec<SelfCheck>) -> Self {
        let (group, began, seconds) = (group.name().to_owned(), began.as_secs_f64(), took.as_secs_f64());
        Self { group, began, seconds, checks }
    }
}

/// Checks as they come in: printed, then one document.
pub(super) struct Ledger {
    checks: Vec<(usize, String, SelfCheck)>,
    groups: Vec<GroupFigures>,
    detail: Detail,
}

/// When a group, or a share of it, was examined.
#[derive(Debug, Serialize)]
struct GroupFigures {
    group: String,
    share: String,
    checks: usize,
    failed: usize,
    /// Seconds after the beginning.
    began: f64,
    seconds: f64,
}

/// What a selftest found, as JSON has it.
#[derive(Debug, Serialize)]
pub(super) struct SelftestDocument {
    device: String,
    checks: Vec<SelfCheck>,
    groups: Vec<GroupFigures>,
    passed: usize,
    failed: usize,
    seconds: f64,
}

impl Ledger {
    /// Nothing yet.
    pub(super) fn new(detail: Detail) -> Self {
        Self { checks: Vec::new(), groups: Vec::new(), detail }
    }

    /// How much was found.
    pub(super) fn heard(&self) -> Heard {
        let failed = self.groups.iter().map(|group| group.failed).sum();
        Heard { checks: self.checks.len(), failed }
    }

    /// Takes what a process has found, and gives what is to be printed of it.
    pub(super) fn add(&mut self, share: Share, groups: Vec<GroupChecks>) -> String {
        let mut text = String::new();
        for GroupChecks { group, began, seconds, checks } in groups {
            let failed = checks.iter().filter(|check| !check.passed).count();
            let share = share.to_string();
            let place = Group::named(&group).map_or(usize::MAX, |group| group as usize);
            let count = checks.len();
            for mut check in checks {
                check.name = format!("{group}: {}", check.name);
                let printed = match self.detail {
                    Detail::Document => false,
                    Detail::Failures => !check.passed,
                    Detail::Everything => true,
                };
                if printed {
                    text.push_str(&line(&check));
                }
                self.checks.push((place, share.clone(), check));
            }
            // Of a selftest that is cut off, this is what shows where its time went.
            if self.detail == Detail::Everything {
                let _ = writeln!(
                    text,
                    "took    {group} {share}, {count} checks: {began:.1} s to {:.1} s",
                    began + seconds
                );
            }
            self.groups.push(GroupFigures { group, share, checks: count, failed, began, seconds });
        }
        text
    }

    /// The document of all groups, in their order.
    pub(super) fn finish(mut self, device: String, took: Duration) -> SelftestDocument {
        self.checks.sort_by(|(a, a_share, _), (b, b_share, _)| (a, a_share).cmp(&(b, b_share)));
        let checks: Vec<SelfCheck> = self.checks.into_iter().map(|(_, _, check)| check).collect();
        let passed = checks.iter().filter(|check| check.passed).count();
        self.groups.sort_by(|a, b| a.began.total_cmp(&b.began));
        SelftestDocument {
            device,
            failed: checks.len() - passed,
            passed,
            checks,
            groups: self.groups,
            seconds: took.as_secs_f64(),
        }
    }
}

fn line(check: &SelfCheck) -> String {
    let SelfCheck { name, seed, error, bound, .. } = check;
    match &check.reason {
        _ if check.passed => format!("ok      {name}, seed {seed}: {error:.2e} of {bound:.2e}\n"),
        Some(reason) => format!("FAILED  {name}, seed {seed}: {reason}\n"),
        None => format!("FAILED  {name}, seed {seed}: {error:.2e} of {bound:.2e}\n"),
    }
}

impl SelftestDocument {
    /// When each group was examined, and what failed once more.
    pub(super) fn table(&self) -> String {
        let columns = [
            Column::name("group"),
            Column::name("share"),
            Column::number("checks", 1),
            Column::number("failed", 0),
            Column::number("from (s)", 3),
            Column::number("took (s)", 2),
        ];
        let rows = self.groups.iter().map(|GroupFigures { group, share, checks, failed, began, seconds }| {
            let figures =
                [checks.to_string(), failed.to_string(), format!("{began:.1}"), format!("{seconds:.1}")];
            [group.clone(), share.clone()].into_iter().chain(figures).collect()
        });
        let mut text = table(&columns, rows, &console::style());
        self.checks.iter().filter(|check| !check.passed).for_each(|check| text.push_str(&line(check)));
        text
    }

    /// One row of figures.
    pub(super) fn last_line(&self) -> String {
        let share = |check: &SelfCheck| if check.bound > 0.0 { check.error / check.bound } else { 0.0 };
        let worst = self.checks.iter().filter(|check| check.passed).map(share).fold(0.0, f64::max);
        format!(
            "{}: {} passed, {} failed, the closest at {:.0} % of its bound, {:.1} s\n",
            self.device,
            self.passed,
            self.failed,
            100.0 * worst,
            self.seconds
        )
    }

    /// An error when a check failed, or when there was none.
    pub(super) fn verdict(&self) -> Result<(), CliError> {
        if self.failed == 0 && self.passed > 0 {
            return Ok(());
        }
        let mut names = self.checks.iter().filter(|check| !check.passed).map(|check| check.name.as_str());
        let (failed, checks, first) = (self.failed, self.checks.len(), names.next().map(str::to_owned));
        Err(CliError::check(CheckFault::SelfTest { failed, checks, first }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(group: Group, checks: Vec<SelfCheck>) -> GroupChecks {
        GroupChecks::of(group, Duration::from_secs(2), Duration::from_millis(500), checks)
    }

    fn finished(checks: Vec<SelfCheck>) -> SelftestDocument {
        let mut ledger = Ledger::new(Detail::Document);
        assert_eq!(ledger.add(Share::ALL, vec![group(Group::Gemm, checks)]), "");
        ledger.finish("a device".to_owned(), Duration::from_millis(1500))
    }

    #[test]
    fn what_failed_is_counted_named_and_an_error() {
        let right = SelfCheck::of("causal".to_owned(), 7, 1e-3, 4e-3);
        let document = finished(vec![right.clone()]);
        document.verdict().unwrap();
        assert_eq!(
            document.last_line(),
            "a device: 1 passed, 0 failed, the closest at 25 % of its bound, 1.5 s\n"
        );
        for wrong in [
            SelfCheck::of("window".to_owned(), 8, 5e-3, 4e-3),
            SelfCheck::of("window".to_owned(), 8, f64::NAN, 4e-3),
            SelfCheck::failed("window".to_owned(), 8, "out of memory".to_owned()),
        ] {
            assert!(line(&wrong).starts_with("FAILED  window, seed 8: "));
            let document = finished(vec![right.clone(), wrong]);
            assert_eq!((document.passed, document.failed), (1, 1));
            assert!(document.table().contains("FAILED  gemm: window, seed 8"), "{}", document.table());
            let error = document.verdict().unwrap_err();
            assert!(error.to_string().contains("1 check of 2 failed, the first: gemm: window"), "{error}");
            assert_eq!(error.exit_status(), 1);
        }
        assert!(finished(Vec::new()).verdict().is_err(), "a selftest of nothing proves nothing");
    }

    #[test]
    fn checks_are_in_the_order_of_groups_whenever_they_came() {
        let mut ledger = Ledger::new(Detail::Document);
        let check = |name: &str| vec![SelfCheck::of(name.to_owned(), 0, 0.0, 0.0)];
        ledger.add(Share::ALL, vec![group(Group::Gemm, check("a"))]);
        ledger.add("2/2".parse().unwrap(), vec![group(Group::Attention, check("c"))]);
        ledger.add("1/2".parse().unwrap(), vec![group(Group::Attention, check("b"))]);
        let document = ledger.finish("a device".to_owned(), Duration::ZERO);
        let names: Vec<&str> = document.checks.iter().map(|check| check.name.as_str()).collect();
        assert_eq!(names, ["attention: b", "attention: c", "gemm: a"]);
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        let table: Vec<String> = document.table().lines().map(words).collect();
        assert_eq!(table[0], "group share checks failed from (s) took (s)");
        assert!(table.contains(&"gemm 1/1 1 0 2.0 0.5".to_owned()), "{table:?}");
    }

    #[test]
    fn failures_are_printed_as_they_come_and_the_rest_when_asked() {
        let right = SelfCheck::of("causal".to_owned(), 7, 1e-3, 4e-3);
        let wrong = SelfCheck::of("window".to_owned(), 8, 5e-3, 4e-3);
        let printed = |detail| {
            let mut ledger = Ledger::new(detail);
            let text = ledger.add(Share::ALL, vec![group(Group::Gemm, vec![right.clone(), wrong.clone()])]);
            assert_eq!(ledger.heard(), Heard { checks: 2, failed: 1 });
            text
        };
        assert_eq!(printed(Detail::Document), "");
        assert_eq!(printed(Detail::Failures), "FAILED  gemm: window, seed 8: 5.00e-3 of 4.00e-3\n");
        assert_eq!(printed(Detail::Everything).lines().count(), 3);
    }

    #[test]
    fn the_document_has_the_fields_that_scripts_read() {
        let json =
            serde_json::to_value(finished(vec![SelfCheck::of("causal".to_owned(), 7, 0.0, 0.5)])).unwrap();
        assert_eq!(
            json["checks"][0],
            serde_json::json!(
                {"name": "gemm: causal", "seed": 7, "passed": true, "error": 0.0, "bound": 0.5}
            )
        );
        assert_eq!(
            json["groups"][0],
            serde_json::json!(
                {"group": "gemm", "share": "1/1", "checks": 1, "failed": 0, "began": 2.0, "seconds": 0.5}
            )
        );
        for field in ["device", "passed", "failed", "seconds"] {
            assert!(json.get(field).is_some(), "{field}");
        }
    }
}
