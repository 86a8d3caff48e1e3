//! Lists the files below `kernels/` for `compile/headers.rs`, so that adding one needs no second place to be changed.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

fn main() -> io::Result<()> {
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default()).join("kernels");
    // Cargo looks at everything below a folder.
    println!("cargo::rerun-if-changed={}", root.display());
    let mut files = Vec::new();
    list(&root, &mut files)?;
    files.sort();
    let mut code = String::from("&[\n");
    for file in &files {
        let name = file.strip_prefix(&root).unwrap_or(file);
        let _ = writeln!(code, "    Header {{ name: {name:?}, text: include_str!({file:?}) }},");
    }
    code.push_str("]\n");
    let out = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default());
    fs::write(out.join("headers.rs"), code)
}

fn list(folder: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            list(&path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "cuh") {
            files.push(path);
        }
    }
    Ok(())
}
