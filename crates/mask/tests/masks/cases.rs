//! What the property tests of masks share: how many random cases they try, and where a failing seed is kept.

use proptest::test_runner::{Config, FileFailurePersistence};

/// So many random cases a property. The seed of a failure is printed, and kept next to the test.
pub(crate) fn cases(cases: u32) -> Config {
    let persistence = FileFailurePersistence::WithSource("regressions");
    Config { cases, failure_persistence: Some(Box::new(persistence)), ..Config::default() }
}
