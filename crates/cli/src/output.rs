//! Files that a run leaves: checked before it, written after it, whole or not at all.

use std::path::{Path, PathBuf};

use counterpoint_exec::{AttentionOutputs, HostData, HostTensor};
use counterpoint_report::{check_writable, write_atomically};
use safetensors::Dtype;
use safetensors::tensor::{View, serialize};

use crate::error::CliError;
use crate::interrupt;

/// The output files of a command: the flag that names each, and the path.
#[derive(Debug, Default)]
pub(crate) struct Outputs {
    files: Vec<(&'static str, PathBuf)>,
}

impl Outputs {
    /// The files that were asked for, after a look at whether they can be written and none is another one, or an input.
    pub(crate) fn check(
        asked: &[(&'static str, Option<&Path>)],
        inputs: &[(&'static str, Option<&Path>)],
    ) -> Result<Self, CliError> {
        let given = |flags: &[(&'static str, Option<&Path>)]| -> Vec<(&'static str, PathBuf)> {
            flags.iter().filter_map(|(flag, path)| path.map(|path| (*flag, path.to_owned()))).collect()
        };
        let (files, inputs) = (given(asked), given(inputs));
        for (at, (flag, path)) in files.iter().enumerate() {
            check_writable(path).map_err(|source| CliError::Output { flag, source })?;
            let others = files[..at].iter().chain(&inputs);
            if let Some((other, _)) = others.into_iter().find(|(_, other)| same_file(other, path)) {
                return Err(CliError::SameFile { first: other, second: flag, path: path.clone() });
            }
        }
        Ok(Self { files })
    }

    /// Writes what `contents` makes for each flag. They are all made before the first is written.
    pub(crate) fn write(&self, contents: impl Fn(&str) -> Result<Vec<u8>, CliError>) -> Result<(), CliError> {
        let made = self.files.iter().map(|(flag, _)| contents(flag)).collect::<Result<Vec<_>, _>>()?;
        interrupt::not_during(|| {
            for ((flag, path), bytes) in self.files.iter().zip(made) {
                write_atomically(path, &bytes).map_err(|source| CliError::Output { flag, source })?;
            }
            Ok(())
        })
    }

    /// Path by flag, to tell people where things lie.
    pub(crate) fn files(&self) -> impl Iterator<Item = (&'static str, &Path)> {
        self.files.iter().map(|(flag, path)| (*flag, path.as_path()))
    }
}

/// Whether two paths lead to one regular file, existing or not. Devices may be written to twice.
fn same_file(a: &Path, b: &Path) -> bool {
    if [a, b].iter().any(|path| path.exists() && !path.is_file()) {
        return false;
    }
    let real = |path: &Path| {
        path.canonicalize().ok().or_else(|| {
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
            Some(folder.unwrap_or(Path::new(".")).canonicalize().ok()?.join(path.file_name()?))
        })
    };
    real(a).is_some_and(|a| Some(a) == real(b))
}

/// The results as a safetensors file.
pub(crate) fn outputs_as_safetensors(outputs: &AttentionOutputs) -> Result<Vec<u8>, CliError> {
    let all = [
        ("out", Some(&outputs.out)),
        ("lse", Some(&outputs.lse)),
        ("dq", outputs.dq.as_ref()),
        ("dk", outputs.dk.as_ref()),
        ("dv", outputs.dv.as_ref()),
        ("dsink", outputs.dsink.as_ref()),
    ];
    let views = all.into_iter().filter_map(|(name, tensor)| Some((name, Bytes(tensor?))));
    serialize(views, None)
        .map_err(|error| CliError::Tensor { name: "out", reason: format!("cannot be stored: {error}") })
}

/// A tensor as little-endian bytes.
struct Bytes<'a>(&'a HostTensor);

impl View for Bytes<'_> {
    fn dtype(&self) -> Dtype {
        match self.0.data() {
            HostData::F64(_) => Dtype::F64,
            HostData::F32(_) => Dtype::F32,
            HostData::Bf16(_) => Dtype::BF16,
            HostData::F16(_) => Dtype::F16,
        }
    }

    fn shape(&self) -> &[usize] {
        self.0.shape()
    }

    fn data(&self) -> std::borrow::Cow<'_, [u8]> {
        let bytes: Vec<u8> = match self.0.data() {
            HostData::F64(values) => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            HostData::F32(values) => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            HostData::Bf16(values) => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            HostData::F16(values) => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        };
        bytes.into()
    }

    fn data_len(&self) -> usize {
        self.0.len() * self.0.dtype().size()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_file_by_two_names() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out");
        assert!(same_file(&path, &folder.path().join(".").join("out")));
        assert!(!same_file(&path, &folder.path().join("other")));
        std::fs::write(&path, b"x").unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(same_file(&path, &link));
        assert!(!same_file(Path::new("/dev/null"), Path::new("/dev/null")));
    }

    #[test]
    fn tensors_read_back() {
        let tensor = |data| HostTensor::new(vec![1, 2], data);
        let outputs = AttentionOutputs {
            out: tensor(HostData::F16(vec![half::f16::from_f32(0.5), half::f16::NEG_INFINITY])),
            lse: tensor(HostData::F32(vec![1.5, f32::NEG_INFINITY])),
            dq: None,
            dk: None,
            dv: None,
            dsink: Some(tensor(HostData::F64(vec![1e300, -2.0]))),
        };
        let bytes = outputs_as_safetensors(&outputs).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let mut names = file.names();
        names.sort_unstable();
        assert_eq!(names, ["dsink", "lse", "out"]);
        let lse = file.tensor("lse").unwrap();
        assert_eq!((lse.dtype(), lse.shape()), (Dtype::F32, &[1, 2][..]));
        assert_eq!(lse.data(), [1.5f32.to_le_bytes(), f32::NEG_INFINITY.to_le_bytes()].concat());
        let dsink = file.tensor("dsink").unwrap();
        assert_eq!(dsink.data(), [1e300f64.to_le_bytes(), (-2.0f64).to_le_bytes()].concat());
    }
}
