//! Lists the device models, so that a new one is a file in `models` and no line of code.

use std::fmt::Write;
use std::path::Path;
use std::{env, fs};

fn main() {
    let folder = Path::new(&env::var("CARGO_MANIFEST_DIR").expect("set by cargo")).join("models");
    println!("cargo::rerun-if-changed={}", folder.display());
    let entries = fs::read_dir(&folder).expect("the folder of device models");
    let mut files: Vec<_> = entries.map(|entry| entry.expect("an entry of that folder").path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    files.sort();
    let mut list = String::from("[");
    for file in files {
        let name = file.file_name().unwrap_or_default();
        let _ = write!(list, "({name:?}, include_str!({file:?})),");
    }
    list.push(']');
    let target = Path::new(&env::var("OUT_DIR").expect("set by cargo")).join("models.rs");
    fs::write(target, list).expect("the list of device models");
}
