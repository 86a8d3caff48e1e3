use crate::ExecError;

/// Bytes that the system can still give without swapping (`MemAvailable` of `/proc/meminfo`); `None` where it does not say.
pub fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

/// Refuses what cannot fit, before anything is allocated.
///
/// # Errors
/// [`ExecError::OutOfMemory`] with both figures.
pub fn check_memory(needed: u64) -> Result<(), ExecError> {
    match available_memory() {
        Some(available) if needed > available => {
            Err(ExecError::OutOfMemory { rank: None, needed, available })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_what_cannot_fit() {
        assert_eq!(check_memory(0), Ok(()));
        if available_memory().is_some() {
            let error = check_memory(u64::MAX).unwrap_err();
            assert!(
                matches!(error, ExecError::OutOfMemory { needed: u64::MAX, available, .. } if available > 0)
            );
        }
    }
}
