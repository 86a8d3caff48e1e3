//! Arguments that are numbers, in whatever form Python has them: lists, ranges, tensors, arrays; and seconds.

use std::time::Duration;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::error::raise;

/// `value` as nested Python lists, where it is an array or a tensor.
pub(crate) fn listed<'py>(value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    match value.getattr_opt("tolist")? {
        Some(tolist) => tolist.call0(),
        None => Ok(value.clone()),
    }
}

/// `value` as a list of `T`; `wanted` says what it must be.
pub(crate) fn list<'py, T>(name: &str, wanted: &str, value: &Bound<'py, PyAny>) -> PyResult<Vec<T>>
where
    T: for<'a> FromPyObject<'a, 'py, Error = PyErr>,
{
    let mistaken = |_: PyErr| {
        let message = format!("{name} must be {wanted}, not {}", described(value));
        PyTypeError::new_err(message)
    };
    let items = listed(value)?.try_iter().map_err(mistaken)?;
    items.map(|item| item?.extract::<T>()).collect::<PyResult<Vec<T>>>().map_err(mistaken)
}

/// Numbers of tokens, none negative.
pub(crate) fn sizes(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<usize>> {
    let numbers: Vec<i64> = list(name, "a list or a tensor of one axis of whole numbers", value)?;
    numbers
        .iter()
        .enumerate()
        .map(|(index, &number)| size(value.py(), &format!("{name}[{index}]"), number))
        .collect()
}

/// A number of tokens, not negative.
pub(crate) fn size(py: Python<'_>, name: &str, number: i64) -> PyResult<usize> {
    usize::try_from(number)
        .map_err(|_| raise(py, "MaskError", &format!("{name} is {number}; it must not be negative"), &[]))
}

/// A limit that -1 or None lifts.
pub(crate) fn limit(py: Python<'_>, name: &str, number: Option<i64>) -> PyResult<Option<usize>> {
    match number {
        None | Some(-1) => Ok(None),
        Some(number) if number >= 0 => Ok(Some(number as usize)),
        Some(number) => {
            let message = format!("{name} is {number}; it must be a number of tokens, or -1 for no limit");
            Err(raise(py, "MaskError", &message, &[]))
        }
    }
}

/// What a value is, in a few words.
pub(crate) fn described(value: &Bound<'_, PyAny>) -> String {
    let text = value.repr().map(|text| text.to_string()).unwrap_or_default();
    let kind = value.get_type().name().map(|name| name.to_string()).unwrap_or_default();
    match text.chars().count() {
        0..=60 => format!("{text} ({kind})"),
        _ => format!("a {kind}"),
    }
}

/// A time to wait.
pub(crate) fn duration(py: Python<'_>, seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| raise(py, "Error", &format!("{seconds:e} is no number of seconds to wait"), &[]))
}
