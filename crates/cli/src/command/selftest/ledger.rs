use std::time::Duration;

use counterpoint_exec::selftest::SelfCheck;
use serde::Serialize;

use crate::console;
use crate::error::CliError;
use crate::progress::Progress;

/// Checks as they are made: counted on the terminal, then printed, then one document.
pub(super) struct Ledger {
    checks: Vec<SelfCheck>,
    section: &'static str,
    heard: usize,
    progress: Option<Progress>,
    quiet: bool,
    only: Option<String>,
}

/// What a selftest found, as JSON has it.
#[derive(Debug, Serialize)]
pub(super) struct SelftestDocument {
    device: String,
    checks: Vec<SelfCheck>,
    passed: usize,
    failed: usize,
    seconds: f64,
}

impl Ledger {
    /// `quiet` keeps the lines of single checks to itself; `only` is a part of the names of sections that are wanted.
    pub(super) fn new(quiet: bool, only: Option<&str>) -> Self {
        let only = only.map(str::to_owned);
        Self { checks: Vec::new(), section: "", heard: 0, progress: None, quiet, only }
    }

    /// Begins the checks of one device or one part, if they are wanted; its name goes before theirs.
    #[must_use]
    pub(super) fn section(&mut self, name: &'static str) -> bool {
        let wanted = self.only.as_ref().is_none_or(|only| name.contains(only.as_str()));
        if wanted {
            self.section = name;
            self.heard = 0;
            self.progress = Some(Progress::new());
        }
        wanted
    }

    /// A check of `cases` has been made. They come in any order.
    pub(super) fn hear(&mut self, check: &SelfCheck, cases: usize) {
        self.heard += 1;
        let Some(progress) = &self.progress else { return };
        progress.step(format!("{}: {} checks of {cases} cases; {}", self.section, self.heard, check.name));
    }

    /// Takes the checks of the section, in order.
    pub(super) fn add(&mut self, checks: Vec<SelfCheck>) -> Result<(), CliError> {
        self.progress = None;
        let mut text = String::new();
        for mut check in checks {
            check.name = format!("{}: {}", self.section, check.name);
            text.push_str(&line(&check));
            self.checks.push(check);
        }
        if self.quiet { Ok(()) } else { console::print(&text) }
    }

    /// The document of all sections.
    pub(super) fn finish(self, device: String, took: Duration) -> SelftestDocument {
        let passed = self.checks.iter().filter(|check| check.passed).count();
        SelftestDocument {
            device,
            failed: self.checks.len() - passed,
            passed,
            checks: self.checks,
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
        let first = names.next().unwrap_or("there was nothing to check");
        let count = console::count(self.failed, "check");
        Err(CliError::CheckFailed {
            what: format!("{count} of {} failed, the first: {first}", self.checks.len()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finished(checks: Vec<SelfCheck>) -> SelftestDocument {
        let mut ledger = Ledger::new(true, Some("gp"));
        assert!(!ledger.section("cpu") && ledger.section("gpu"));
        ledger.add(checks).unwrap();
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
            let error = document.verdict().unwrap_err();
            assert!(error.to_string().contains("1 check of 2 failed, the first: gpu: window"), "{error}");
            assert_eq!(error.exit_status(), 1);
        }
        assert!(finished(Vec::new()).verdict().is_err(), "a selftest of nothing proves nothing");
    }

    #[test]
    fn the_document_has_the_fields_that_scripts_read() {
        let json =
            serde_json::to_value(finished(vec![SelfCheck::of("causal".to_owned(), 7, 0.0, 0.5)])).unwrap();
        assert_eq!(
            json["checks"][0],
            serde_json::json!(
                {"name": "gpu: causal", "seed": 7, "passed": true, "error": 0.0, "bound": 0.5}
            )
        );
        for field in ["device", "passed", "failed", "seconds"] {
            assert!(json.get(field).is_some(), "{field}");
        }
    }
}
