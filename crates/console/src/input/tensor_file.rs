//! Safetensors files, read row by row by the ranks that need the rows, and distinguished by samples of their bytes.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use counterpoint_exec::{HostData, HostTensor, available_memory};
use counterpoint_mask::Range;
use counterpoint_plan::DType;
use half::{bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::header::FileHeader;
use crate::digest::shown;
use crate::error::CliError;
use crate::files;
use crate::input_fault::{FileFault, InputFault};

/// An open safetensors file whose header has been read and found to fit the file. Tensors are read one at a time,
/// straight into vectors of their type: the file is never in memory as a whole as well.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    file: File,
    state: FileState,
    data_start: u64,
    tensors: BTreeMap<String, TensorInfo>,
}

/// Which file of a host it is, and when it was changed last.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileState {
    device: u64,
    number: u64,
    length: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl FileState {
    fn of(file: &File) -> io::Result<Self> {
        let of = file.metadata()?;
        Ok(Self {
            device: of.dev(),
            number: of.ino(),
            length: of.len(),
            modified: (of.mtime(), of.mtime_nsec()),
            changed: (of.ctime(), of.ctime_nsec()),
        })
    }
}

/// Blocks of a sample, and bytes of each: 4 MiB in all.
const SAMPLES: u64 = 64;
const SAMPLE_BYTES: u64 = 64 << 10;

/// Longest header that the format's own library accepts.
const MAX_HEADER_BYTES: u64 = 100_000_000;

impl TensorFile {
    /// Opens the file and checks that its header and its length agree.
    pub fn open(path: &Path) -> Result<Self, CliError> {
        let unreadable = |source| CliError::Unreadable { what: "input", path: path.to_owned(), source };
        let refused = |source: io::Error| unreadable(source.into());
        let broken =
            |reason: FileFault| CliError::NotSafetensors { path: path.to_owned(), reason: Box::new(reason) };
        let mut file = files::open("input", path)?.regular().map_err(unreadable)?;
        let bytes = file.metadata().map_err(refused)?.len();
        if let Some(available) = available_memory().filter(|&available| bytes > available) {
            return Err(CliError::InputTooLarge { path: path.to_owned(), bytes, available });
        }
        if bytes < 8 {
            return Err(broken(FileFault::Short { bytes }));
        }
        let mut length = [0; 8];
        file.read_exact(&mut length).map_err(refused)?;
        let header_bytes = u64::from_le_bytes(length);
        if header_bytes > MAX_HEADER_BYTES || header_bytes > bytes - 8 {
            return Err(broken(FileFault::HeaderLength { header: header_bytes, bytes }));
        }
        let mut header = vec![0; header_bytes as usize];
        file.read_exact(&mut header).map_err(refused)?;
        let header = FileHeader::parse(&header).map_err(broken)?;
        let data_start = 8 + header_bytes;
        let announced = data_start + header.data_bytes as u64;
        match bytes.cmp(&announced) {
            Ordering::Less => return Err(broken(FileFault::Truncated { bytes, announced })),
            Ordering::Equal => {}
            Ordering::Greater => return Err(broken(FileFault::TooLong { bytes, announced })),
        }
        let state = FileState::of(&file).map_err(refused)?;
        Ok(Self { path: path.to_owned(), file, state, data_start, tensors: header.tensors })
    }

    /// Its tensors with their types and shapes.
    pub fn describe(&self) -> String {
        let one = |(name, info): (&String, &TensorInfo)| format!("{name} {} {:?}", info.dtype, info.shape);
        self.tensors.iter().map(one).collect::<Vec<_>>().join(", ")
    }

    /// A digest of its length and of some of its blocks, the first and the last among them: all of a file that is not large. Files of
    /// other tensors differ in it, and it takes milliseconds; a copy that differs in a few rows may not.
    pub fn sample(&mut self) -> Result<String, CliError> {
        let length = self.state.length;
        let mut hash = Sha256::new();
        hash.update(length.to_le_bytes());
        let mut block = vec![0; SAMPLE_BYTES as usize];
        let last = length.saturating_sub(SAMPLE_BYTES);
        for at in 0..SAMPLES {
            let start = last / (SAMPLES - 1) * at + last % (SAMPLES - 1) * at / (SAMPLES - 1);
            let bytes = &mut block[..length.min(SAMPLE_BYTES) as usize];
            let read = self.file.read_exact_at(bytes, start);
            read.map_err(|error| self.unreadable(error))?;
            hash.update(bytes);
        }
        Ok(format!("{length} bytes, sampled {}", shown(hash.finalize().as_slice())))
    }

    /// What says whether two ranks of one host have opened one and the same file.
    pub fn state(&self) -> &FileState {
        &self.state
    }

    /// Refuses a file that was changed since it was opened.
    pub fn refuse_changed(&self) -> Result<(), CliError> {
        let now = FileState::of(&self.file).map_err(|error| self.unreadable(error))?;
        match now == self.state {
            true => Ok(()),
            false => Err(self.unreadable(io::Error::other("it was changed while it was read; run again"))),
        }
    }

    fn unreadable(&self, error: io::Error) -> CliError {
        CliError::Unreadable { what: "input", path: self.path.clone(), source: error.into() }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Names of its tensors, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Type and shape of a tensor.
    pub fn header(&self, name: &str) -> Option<(Dtype, &[usize])> {
        self.tensors.get(name).map(|info| (info.dtype, info.shape.as_slice()))
    }

    /// The error for a tensor that is not there.
    pub fn missing(&self, name: &'static str) -> CliError {
        let names: Vec<String> = self.names().map(|name| format!("`{name}`")).collect();
        CliError::MissingTensor {
            path: self.path.clone(),
            name,
            why: if name == "dout" { ", which --backward needs" } else { "" },
            found: if names.is_empty() { "none".to_owned() } else { names.join(", ") },
        }
    }

    /// The error for a tensor that is not what it must be: `reason` says what it is and what it must be.
    pub(super) fn wrong(&self, name: &'static str, reason: InputFault) -> CliError {
        CliError::Tensor { path: self.path.clone(), name, reason: Box::new(reason) }
    }

    /// The type of a tensor's elements, where attention takes it.
    pub(super) fn float(&self, name: &'static str) -> Result<DType, CliError> {
        let dtype = self.tensors.get(name).ok_or_else(|| self.missing(name))?.dtype;
        float_type(dtype).ok_or_else(|| self.wrong(name, InputFault::Type { dtype }))
    }

    /// Reads rows of a tensor, those of `ranges` one after the other. The ranges must lie inside it.
    pub fn read_rows(&mut self, name: &'static str, ranges: &[Range]) -> Result<HostTensor, CliError> {
        let info = self.tensors.get(name).cloned().ok_or_else(|| self.missing(name))?;
        let dtype = self.float(name)?;
        let mut shape = info.shape;
        shape[0] = ranges.iter().map(Range::len).sum();
        let row_elements: usize = shape[1..].iter().product();
        let rows = RowsOfFile {
            file: &mut self.file,
            start: self.data_start + info.data_offsets.0 as u64,
            row_elements,
            ranges,
        };
        let data = match dtype {
            DType::F64 => rows.read(f64::from_le_bytes).map(HostData::F64),
            DType::F32 => rows.read(f32::from_le_bytes).map(HostData::F32),
            DType::Bf16 => rows.read(bf16::from_le_bytes).map(HostData::Bf16),
            DType::F16 => rows.read(f16::from_le_bytes).map(HostData::F16),
        };
        let unreadable = |source: io::Error| CliError::Unreadable {
            what: "input",
            path: self.path.clone(),
            source: source.into(),
        };
        Ok(HostTensor::new(shape, data.map_err(unreadable)?))
    }
}

/// The element type of the file's, where attention takes it.
fn float_type(dtype: Dtype) -> Option<DType> {
    match dtype {
        Dtype::F64 => Some(DType::F64),
        Dtype::F32 => Some(DType::F32),
        Dtype::BF16 => Some(DType::Bf16),
        Dtype::F16 => Some(DType::F16),
        _ => None,
    }
}

/// Rows of a tensor in its file.
struct RowsOfFile<'a> {
    file: &'a mut File,
    /// Where the tensor begins.
    start: u64,
    row_elements: usize,
    ranges: &'a [Range],
}

impl RowsOfFile<'_> {
    /// Reads numbers of `N` little-endian bytes, in blocks that stay in the cache.
    fn read<T, const N: usize>(self, convert: impl Fn([u8; N]) -> T) -> io::Result<Vec<T>> {
        let elements = self.ranges.iter().map(|range| range.len() * self.row_elements).sum();
        let mut out: Vec<T> = Vec::with_capacity(elements);
        let mut block = vec![0; N * elements.min(1 << 15)];
        for range in self.ranges {
            let row_bytes = (self.row_elements * N) as u64;
            self.file.seek(SeekFrom::Start(self.start + range.start as u64 * row_bytes))?;
            let end = out.len() + range.len() * self.row_elements;
            while out.len() < end {
                let bytes = &mut block[..N * (end - out.len()).min(1 << 15)];
                self.file.read_exact(bytes)?;
                let (numbers, _) = bytes.as_chunks::<N>();
                out.extend(numbers.iter().map(|&number| convert(number)));
            }
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn reads_what_the_library_writes() {
        let values: Vec<f32> = (0..70_000).map(|i| i as f32 * 0.25).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let halves: Vec<u8> = [1.0f32, -2.5].iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect();
        let views = [
            ("q", safetensors::tensor::TensorView::new(Dtype::F32, vec![70, 10, 100], &bytes).unwrap()),
            ("k", safetensors::tensor::TensorView::new(Dtype::BF16, vec![2, 1, 1], &halves).unwrap()),
            ("empty", safetensors::tensor::TensorView::new(Dtype::F64, vec![0, 4], &[]).unwrap()),
        ];
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&safetensors::serialize(views, None).unwrap()).unwrap();
        let mut tensors = TensorFile::open(file.path()).unwrap();
        assert_eq!(tensors.names().collect::<Vec<_>>(), ["empty", "k", "q"]);
        assert_eq!(tensors.header("q"), Some((Dtype::F32, &[70, 10, 100][..])));
        assert_eq!(
            tensors.read_rows("q", &[Range::new(0, 70)]).unwrap(),
            HostTensor::new(vec![70, 10, 100], HostData::F32(values))
        );
        let rows = tensors.read_rows("q", &[Range::new(69, 70), Range::new(0, 0), Range::new(3, 5)]).unwrap();
        let numbers = (69_000..70_000).chain(3_000..5_000).map(|i| i as f32 * 0.25).collect();
        assert_eq!(rows, HostTensor::new(vec![3, 10, 100], HostData::F32(numbers)));
        let expected = HostData::Bf16(vec![bf16::from_f32(1.0), bf16::from_f32(-2.5)]);
        assert_eq!(
            tensors.read_rows("k", &[Range::new(0, 2)]).unwrap(),
            HostTensor::new(vec![2, 1, 1], expected)
        );
        assert_eq!(
            tensors.read_rows("empty", &[]).unwrap(),
            HostTensor::new(vec![0, 4], HostData::F64(vec![]))
        );
    }
}
