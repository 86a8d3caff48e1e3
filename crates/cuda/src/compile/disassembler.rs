use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::library::{Nvrtc, find_program, output_of};

/// The largest kernel takes a second.
const LIMIT: Duration = Duration::from_secs(60);

/// `nvdisasm`, which prints a cubin's machine code. Only tests of kernels want it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Disassembler {
    program: PathBuf,
}

impl Disassembler {
    /// The one beside NVRTC, on `PATH`, in a toolkit or in `python3`'s packages; `None` when there is none.
    pub(crate) fn find() -> Option<Self> {
        // A wheel or a toolkit has lib and bin side by side.
        let lib = Nvrtc::get().ok().and_then(|nvrtc| nvrtc.path().parent());
        let beside = lib.and_then(Path::parent).map(|root| root.join("bin"));
        find_program("nvdisasm", beside).map(|program| Self { program })
    }

    /// Where it is.
    pub(crate) fn program(&self) -> &Path {
        &self.program
    }

    /// The machine code as text.
    pub(super) fn disassemble(&self, image: &[u8]) -> Result<String, String> {
        let file = tempfile::Builder::new().suffix(".cubin").tempfile().map_err(|error| error.to_string())?;
        fs::write(file.path(), image).map_err(|error| error.to_string())?;
        let mut command = Command::new(&self.program);
        // Only the code, and without an analysis of its branches.
        command.args(["--print-code", "--no-dataflow"]).arg(file.path());
        let text = output_of(&mut command, LIMIT)
            .map_err(|reason| format!("{}: {reason}", self.program.display()))?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }
}

/// The disassembler that [`crate::examine`] uses, where there is one.
pub fn disassembler() -> Option<PathBuf> {
    Disassembler::find().map(|disassembler| disassembler.program().to_owned())
}
