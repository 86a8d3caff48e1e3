//! Files that a run leaves: checked before it, written after it, whole or not at all.

use std::path::{Path, PathBuf};

use counterpoint_exec::{AttentionOutputs, HostData, HostTensor};
use counterpoint_files::{AtomicFiles, Destination, WriteError, check_writable};
use counterpoint_report::printable;
use safetensors::Dtype;
use safetensors::tensor::{View, serialize};

use crate::console;
use crate::error::CliError;
use crate::files::Claim;
use crate::interrupt;

/// The output files of a command.
#[derive(Debug, Default)]
pub struct Outputs {
    files: Vec<Output>,
    for_owner: bool,
}

/// One of them: the flag that names it, the path, and where that leads.
#[derive(Debug)]
struct Output {
    flag: &'static str,
    path: PathBuf,
    destination: Destination,
    _claim: Claim,
}

impl Outputs {
    /// The files that were asked for, after a look at whether they can be written and none is another one, or an input.
    pub fn check(asked: &[(&'static str, Option<&Path>)]) -> Result<Self, CliError> {
        let mut outputs = Self::default();
        for &(flag, path) in asked {
            let Some(path) = path else { continue };
            let destination = check_writable(path).map_err(|source| CliError::Output { flag, source })?;
            let _claim = Claim::of(flag, path, &destination)?;
            outputs.files.push(Output { flag, path: path.to_owned(), destination, _claim });
        }
        Ok(outputs)
    }

    /// Those that this user trusts later: new ones are open to nobody else's changes.
    pub fn for_owner(self) -> Self {
        Self { for_owner: true, ..self }
    }

    /// Writes what `contents` makes for each flag: all of the files or, where one of them cannot be made or written,
    /// none. Devices and pipes come first. They may keep us waiting, which an interruption must be able to end.
    pub fn write(&self, contents: impl Fn(&str) -> Result<Vec<u8>, CliError>) -> Result<(), CliError> {
        let made = self
            .files
            .iter()
            .map(|output| Ok((output, contents(output.flag)?)))
            .collect::<Result<Vec<_>, _>>()?;
        let (streams, files): (Vec<_>, Vec<_>) =
            made.into_iter().partition(|(output, _)| !matches!(output.destination, Destination::File { .. }));
        let mut batch = if self.for_owner { AtomicFiles::for_owner() } else { AtomicFiles::default() };
        for (output, bytes) in &streams {
            console::note_waiting(&output.path, "reads from it");
            batch.stage(&output.path, bytes).map_err(|error| self.refused(error))?;
        }
        interrupt::not_during(|| {
            files.iter().try_for_each(|(output, bytes)| batch.stage(&output.path, bytes))?;
            batch.commit()
        })
        .map_err(|error| self.refused(error))
    }

    fn refused(&self, source: WriteError) -> CliError {
        let output = self.files.iter().find(|output| output.path == source.path());
        CliError::Output { flag: output.map_or("output", |output| output.flag), source }
    }

    /// Where they lie, a line each.
    pub fn places(&self) -> String {
        let place =
            |(flag, path): (&str, &Path)| format!("{} is in {}\n", flag.trim_start_matches('-'), shown(path));
        self.files().map(place).collect()
    }

    /// Path by flag, for documents.
    pub fn files(&self) -> impl Iterator<Item = (&'static str, &Path)> {
        self.files.iter().map(|output| (output.flag, output.path.as_path()))
    }
}

/// A path as a line of text may hold it.
pub fn shown(path: &Path) -> String {
    printable(&path.display().to_string()).into_owned()
}

/// The results as a safetensors file.
pub fn outputs_as_safetensors(outputs: &AttentionOutputs) -> Result<Vec<u8>, CliError> {
    let all = [
        ("out", Some(&outputs.out)),
        ("lse", Some(&outputs.lse)),
        ("max_logits", outputs.max_logits.as_ref()),
        ("dq", outputs.dq.as_ref()),
        ("dk", outputs.dk.as_ref()),
        ("dv", outputs.dv.as_ref()),
        ("dsink", outputs.dsink.as_ref()),
    ];
    let views = all.into_iter().filter_map(|(name, tensor)| Some((name, Bytes(tensor?))));
    serialize(views, None).map_err(|source| CliError::Unstorable { source: Box::new(source) })
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
    use crate::files;

    #[test]
    fn one_file_by_two_names() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out");
        let clash = |a: &Path, b: &Path| Outputs::check(&[("--a", Some(a)), ("--b", Some(b))]).is_err();
        let dotted = folder.path().join(".").join("out");
        let [link, hard] = ["link", "hard"].map(|name| folder.path().join(name));
        std::os::unix::fs::symlink("out", &link).unwrap();
        for _ in 0..2 {
            assert!(clash(&path, &dotted) && clash(&path, &link) && clash(&link, &dotted));
            assert!(!clash(&path, &folder.path().join("other")));
            std::fs::write(&path, b"x").unwrap();
        }
        std::fs::hard_link(&path, &hard).unwrap();
        assert!(clash(&path, &hard) && clash(&hard, &link));
        assert!(!clash(Path::new("/dev/null"), Path::new("/dev/null")));
    }

    /// Whichever is opened first.
    #[test]
    fn no_output_is_an_input() {
        let folder = tempfile::tempdir().unwrap();
        let [path, link, hard, other] = ["in", "link", "hard", "other"].map(|name| folder.path().join(name));
        std::fs::write(&path, b"x").unwrap();
        std::os::unix::fs::symlink("in", &link).unwrap();
        std::fs::hard_link(&path, &hard).unwrap();
        let names = [&path, &link, &hard];
        for written in names {
            let _outputs = Outputs::check(&[("--b", Some(written))]).unwrap();
            for read in names {
                let error = files::read_text("input", read, 10).unwrap_err().to_string();
                assert!(error.contains("--b") && error.contains("input"), "{error}");
            }
        }
        let _kept_open = files::open("input", &path).unwrap();
        for written in names {
            assert!(matches!(Outputs::check(&[("--b", Some(written))]), Err(CliError::InputReplaced { .. })));
        }
        assert!(Outputs::check(&[("--b", Some(&other))]).is_ok());
    }

    #[test]
    fn tensors_read_back() {
        let tensor = |data| HostTensor::new(vec![1, 2], data);
        let outputs = AttentionOutputs {
            out: tensor(HostData::F16(vec![half::f16::from_f32(0.5), half::f16::NEG_INFINITY])),
            lse: tensor(HostData::F32(vec![1.5, f32::NEG_INFINITY])),
            max_logits: Some(tensor(HostData::F32(vec![2.5, 0.5]))),
            dq: None,
            dk: None,
            dv: None,
            dsink: Some(tensor(HostData::F64(vec![1e300, -2.0]))),
        };
        let bytes = outputs_as_safetensors(&outputs).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let mut names = file.names();
        names.sort_unstable();
        assert_eq!(names, ["dsink", "lse", "max_logits", "out"]);
        let lse = file.tensor("lse").unwrap();
        assert_eq!((lse.dtype(), lse.shape()), (Dtype::F32, &[1, 2][..]));
        assert_eq!(lse.data(), [1.5f32.to_le_bytes(), f32::NEG_INFINITY.to_le_bytes()].concat());
        let dsink = file.tensor("dsink").unwrap();
        assert_eq!(dsink.data(), [1e300f64.to_le_bytes(), (-2.0f64).to_le_bytes()].concat());
    }
}
