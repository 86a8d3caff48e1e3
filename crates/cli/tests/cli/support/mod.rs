//! The binary in a fresh folder, and tensors to feed it.

use std::path::PathBuf;
use std::time::Duration;

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::Value;

/// Of one run. They take seconds; a machine that does much else at the same time makes them a minute.
const MOST: Duration = Duration::from_secs(300);

/// A fresh folder in which the binary runs.
pub(crate) struct Folder {
    folder: tempfile::TempDir,
}

/// What a run left.
pub(crate) struct Ran {
    pub(crate) status: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    command: String,
}

impl Folder {
    pub(crate) fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, contents: impl AsRef<[u8]>) -> &Self {
        std::fs::write(self.path(name), contents).unwrap();
        self
    }

    pub(crate) fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.path(name)).unwrap()
    }

    /// Names of everything in the folder, hidden files too.
    pub(crate) fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.folder.path()).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    /// A `PATH` whose `python3` is this script.
    pub(crate) fn with_python(&self, script: &str) -> String {
        let bin = self.path("bin");
        std::fs::create_dir(&bin).unwrap();
        let program = bin.join("python3");
        std::fs::write(&program, script).unwrap();
        std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        format!("{}:/usr/bin:/bin", bin.display())
    }

    /// Runs a command line, split at spaces.
    pub(crate) fn run(&self, line: &str) -> Ran {
        self.run_with(line, &[])
    }

    /// As [`Folder::run`], with variables.
    pub(crate) fn run_with(&self, line: &str, variables: &[(&str, &str)]) -> Ran {
        let mut command = assert_cmd::Command::new(env!("CARGO_BIN_EXE_counterpoint"));
        command.current_dir(self.folder.path()).args(line.split_whitespace()).timeout(MOST);
        command.env_remove("RUST_BACKTRACE").env_remove("COLUMNS").envs(variables.iter().copied());
        let output = command.output().unwrap();
        Ran {
            status: output.status.code().unwrap_or_else(|| panic!("{line}: ended by a signal or the limit")),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
            command: line.to_owned(),
        }
    }

    /// Runs a command line that must be refused: exit status 2, one sentence that holds all `words`, nothing on stdout,
    /// no file made or changed.
    pub(crate) fn refuses(&self, line: &str, words: &[&str]) {
        let contents = |folder: &Self| -> Vec<(String, Option<Vec<u8>>)> {
            let small = |name: &String| {
                let path = folder.path(name);
                let metadata = std::fs::metadata(&path).ok()?;
                (metadata.is_file() && metadata.len() < 1 << 20).then(|| std::fs::read(path).unwrap())
            };
            folder.names().into_iter().map(|name| (name.clone(), small(&name))).collect()
        };
        let before = contents(self);
        let ran = self.run(line);
        ran.is_refusal(2, words);
        assert!(before == contents(self), "{line}: files changed: {:?}", self.names());
    }
}

impl Ran {
    /// Ended well, with nothing on stderr that looks like an error.
    pub(crate) fn ok(self) -> Self {
        assert_eq!(self.status, 0, "{}\n{}\n{}", self.command, self.stdout, self.stderr);
        assert!(!self.stderr.contains("error"), "{}\n{}", self.command, self.stderr);
        self
    }

    /// Ended with `status`, one sentence on stderr with all `words`, and an empty stdout.
    pub(crate) fn is_refusal(&self, status: i32, words: &[&str]) {
        let Ran { command, stdout, stderr, .. } = self;
        assert_eq!(self.status, status, "{command}\n{stdout}\n{stderr}");
        assert_eq!(stdout, "", "{command}");
        self.is_one_error(words);
    }

    /// Whether stderr is one sentence with all `words`.
    pub(crate) fn is_one_error(&self, words: &[&str]) {
        let Ran { command, stderr, .. } = self;
        assert!(stderr.starts_with("error: ") && stderr.ends_with('\n'), "{command}\n{stderr}");
        assert_eq!(stderr.lines().count(), 1, "{command}\n{stderr}");
        for word in words {
            assert!(stderr.contains(word), "{command}: no `{word}` in\n{stderr}");
        }
        for wrong in ["panicked", "RUST_BACKTRACE", "src/", "Error {", "unwrap"] {
            assert!(!stderr.contains(wrong), "{command}\n{stderr}");
        }
    }

    /// stdout as one JSON document.
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.stdout)
            .unwrap_or_else(|error| panic!("{}: {error}\n{}", self.command, self.stdout))
    }

    /// stdout as one JSON object a line.
    pub(crate) fn json_lines(&self) -> Vec<Value> {
        self.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

/// A tensor of a test file.
#[derive(Clone)]
pub(crate) struct Tensor {
    pub(crate) name: &'static str,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

impl Tensor {
    /// Numbers in [-1, 1) that depend on nothing but the name and the position.
    pub(crate) fn new(name: &'static str, dtype: Dtype, shape: &[usize]) -> Self {
        let mut state = name.bytes().fold(7u64, |state, byte| state * 31 + u64::from(byte));
        let values = (0..shape.iter().product()).map(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 11) as f64 / (1u64 << 52) as f64 - 1.0
        });
        Self { name, dtype, shape: shape.to_vec(), bytes: values.flat_map(|x| bytes_of(dtype, x)).collect() }
    }

    /// With one element replaced.
    pub(crate) fn with(mut self, at: usize, value: f64) -> Self {
        let bytes = bytes_of(self.dtype, value);
        let place = at * bytes.len();
        self.bytes[place..place + bytes.len()].copy_from_slice(&bytes);
        self
    }

    /// The elements.
    pub(crate) fn values(&self) -> Vec<f64> {
        values_of(self.dtype, &self.bytes)
    }
}

fn bytes_of(dtype: Dtype, value: f64) -> Vec<u8> {
    match dtype {
        Dtype::F64 => value.to_le_bytes().to_vec(),
        Dtype::F32 => (value as f32).to_le_bytes().to_vec(),
        Dtype::BF16 => half::bf16::from_f64(value).to_le_bytes().to_vec(),
        Dtype::F16 => half::f16::from_f64(value).to_le_bytes().to_vec(),
        _ => vec![value as i8 as u8; dtype.bitsize() / 8],
    }
}

/// The elements of a tensor of `f32` or `f64`.
pub(crate) fn values_of(dtype: Dtype, bytes: &[u8]) -> Vec<f64> {
    match dtype {
        Dtype::F64 => bytes.as_chunks().0.iter().map(|&x| f64::from_le_bytes(x)).collect(),
        Dtype::F32 => bytes.as_chunks().0.iter().map(|&x| f64::from(f32::from_le_bytes(x))).collect(),
        Dtype::BF16 => bytes.as_chunks().0.iter().map(|&x| half::bf16::from_le_bytes(x).to_f64()).collect(),
        other => panic!("{other}"),
    }
}

/// A safetensors file.
pub(crate) fn safetensors(tensors: &[Tensor]) -> Vec<u8> {
    let views = tensors.iter().map(|tensor| {
        (tensor.name, TensorView::new(tensor.dtype, tensor.shape.clone(), &tensor.bytes).unwrap())
    });
    safetensors::serialize(views, None).unwrap()
}

/// q, k, v and dout of `seqlen` tokens.
pub(crate) fn qkv(
    dtype: Dtype,
    seqlen: usize,
    heads_q: usize,
    heads_kv: usize,
    head_dim: usize,
) -> Vec<Tensor> {
    vec![
        Tensor::new("q", dtype, &[seqlen, heads_q, head_dim]),
        Tensor::new("k", dtype, &[seqlen, heads_kv, head_dim]),
        Tensor::new("v", dtype, &[seqlen, heads_kv, head_dim]),
        Tensor::new("dout", dtype, &[seqlen, heads_q, head_dim]),
    ]
}
