//! Every bad input of `counterpoint attention`: one sentence, exit status 2, nothing written.

use safetensors::Dtype;

use crate::support::{Folder, Tensor, qkv, safetensors, values_of};

const LINE: &str = "attention --mask full:6 --input in.safetensors --output out.safetensors";

fn refuses(tensors: &[Tensor], flags: &str, words: &[&str]) {
    let folder = Folder::new();
    folder.write("in.safetensors", safetensors(tensors));
    folder.refuses(&format!("{LINE} {flags}"), words);
}

/// q, k and v with one of them replaced.
fn with(tensor: Tensor) -> Vec<Tensor> {
    let mut all = qkv(Dtype::F32, 6, 4, 2, 8);
    all.retain(|other| other.name != tensor.name);
    all.push(tensor);
    all
}

#[test]
fn broken_files() {
    let folder = Folder::new();
    folder.refuses(LINE, &["in.safetensors", "cannot be read"]);
    std::fs::create_dir(folder.path("in.safetensors")).unwrap();
    folder.refuses(LINE, &["in.safetensors", "a folder"]);
    std::fs::remove_dir(folder.path("in.safetensors")).unwrap();
    let made = std::process::Command::new("mkfifo").arg(folder.path("in.safetensors")).status().unwrap();
    assert!(made.success());
    folder.refuses(LINE, &["in.safetensors", "not a regular file"]);
    std::fs::remove_file(folder.path("in.safetensors")).unwrap();
    let whole = safetensors(&qkv(Dtype::F32, 6, 4, 2, 8));
    for length in [0, 5, 8, 9, 100, whole.len() / 2, whole.len() - 1] {
        folder.write("in.safetensors", &whole[..length]);
        folder.refuses(LINE, &["in.safetensors", "is not a whole safetensors file", "write it again"]);
    }
    folder.write("in.safetensors", &whole[..whole.len() - 1]);
    folder.refuses(LINE, &["truncated"]);
    folder.write("in.safetensors", [&whole[..], b"tail"].concat());
    folder.refuses(LINE, &["too long"]);
    // A header that is no JSON, one that announces too much, offsets that overlap.
    let mut broken = whole.clone();
    broken[8] = b'x';
    folder.write("in.safetensors", &broken);
    folder.refuses(LINE, &["header"]);
    let mut broken = whole.clone();
    broken[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    folder.write("in.safetensors", &broken);
    folder.refuses(LINE, &["header of 18446744073709551615 bytes"]);
    let header = br#"{"q":{"dtype":"F32","shape":[1,1,1],"data_offsets":[0,4]},"k":{"dtype":"F32","shape":[1,1,1],"data_offsets":[0,4]}}"#;
    folder.write("in.safetensors", [&(header.len() as u64).to_le_bytes()[..], header, &[0; 8]].concat());
    folder.refuses(LINE, &["header"]);
    let header = br#"{"q":{"dtype":"F32","shape":[4294967296,4294967296,4294967296],"data_offsets":[0,4]}}"#;
    folder.write("in.safetensors", [&(header.len() as u64).to_le_bytes()[..], header, &[0; 4]].concat());
    folder.refuses(LINE, &["header"]);
    folder.write("in.safetensors", "{\"seqlen_q\": 8}");
    folder.refuses(LINE, &["in.safetensors"]);
}

#[test]
fn a_file_larger_than_memory() {
    let folder = Folder::new();
    let file = std::fs::File::create(folder.path("in.safetensors")).unwrap();
    file.set_len(12 << 40).unwrap(); // sparse: takes no room
    drop(file);
    folder.refuses(LINE, &["in.safetensors", "13.2 TB", "available"]);
}

#[test]
fn missing_and_extra_tensors() {
    let all = qkv(Dtype::F32, 6, 4, 2, 8);
    for name in ["q", "k", "v"] {
        let rest: Vec<Tensor> = all.iter().filter(|tensor| tensor.name != name).cloned().collect();
        refuses(&rest, "", &["in.safetensors", &format!("no tensor `{name}`"), "`dout`"]);
    }
    refuses(&all[..3], "--backward", &["no tensor `dout`", "--backward"]);
    refuses(&[], "", &["no tensor `q`", "none"]);
    refuses(&with(Tensor::new("bias", Dtype::F32, &[6])), "", &["`bias`", "remove it"]);
}

#[test]
fn unused_dout_is_noted() {
    let folder = Folder::new();
    folder.write("in.safetensors", safetensors(&qkv(Dtype::F32, 6, 4, 2, 8)));
    let ran = folder.run(LINE).ok();
    assert!(ran.stderr.contains("dout was not read"), "{}", ran.stderr);
}

#[test]
fn dimensions_and_shapes() {
    let f32 = Dtype::F32;
    for (tensor, words) in [
        (Tensor::new("q", f32, &[6, 32]), &["`q`", "2 dimensions", "[6, 32]", "must have 3"][..]),
        (Tensor::new("k", f32, &[1, 6, 2, 8]), &["`k`", "4 dimensions"]),
        (Tensor::new("v", f32, &[96]), &["`v`", "1 dimensions"]),
        (Tensor::new("q", f32, &[5, 4, 8]), &["`q`", "seqlen_q 5", "must be 6", "mask"]),
        (Tensor::new("k", f32, &[7, 2, 8]), &["`k`", "seqlen_k 7", "must be 6", "mask"]),
        (Tensor::new("v", f32, &[7, 2, 8]), &["`v`", "seqlen_k 7", "must be 6", "mask"]),
        (Tensor::new("v", f32, &[6, 4, 8]), &["`v`", "heads_kv 4", "must be 2"]),
        (Tensor::new("k", f32, &[6, 2, 4]), &["`k`", "head_dim 4", "must be 8"]),
        (Tensor::new("q", f32, &[6, 3, 8]), &["3 query heads", "2 key heads", "divide"]),
        (Tensor::new("q", f32, &[6, 1, 8]), &["1 query heads", "2 key heads"]),
        (Tensor::new("q", f32, &[6, 4, 0]), &["`q`", "head_dim 0"]),
        (Tensor::new("q", f32, &[6, 0, 8]), &["`q`", "heads_q 0"]),
        (Tensor::new("k", f32, &[6, 0, 8]), &["`k`", "heads_kv 0"]),
        (Tensor::new("v", f32, &[6, 2, 0]), &["`v`", "head_dim_v 0"]),
        (Tensor::new("sink", f32, &[4]), &["`sink`", "1 dimensions"]),
        (Tensor::new("sink", f32, &[1, 3]), &["`sink`", "heads_q 3", "must be 4"]),
        (Tensor::new("sink", f32, &[0, 4]), &["`sink`", "seqlen_sink 0"]),
    ] {
        refuses(&with(tensor), "", words);
    }
    for shape in [[5, 4, 8], [6, 2, 8], [6, 4, 7]] {
        refuses(&with(Tensor::new("dout", f32, &shape)), "--backward", &["`dout`", "must be"]);
    }
}

#[test]
fn element_types() {
    for (dtype, name) in
        [(Dtype::I32, "I32"), (Dtype::U8, "U8"), (Dtype::F8_E4M3, "F8_E4M3"), (Dtype::BOOL, "BOOL")]
    {
        refuses(&with(Tensor::new("k", dtype, &[6, 2, 8])), "", &["`k`", name, "F64, F32, BF16 or F16"]);
    }
    refuses(&with(Tensor::new("v", Dtype::BF16, &[6, 2, 8])), "", &["`v`", "BF16", "`q` is F32"]);
    refuses(&with(Tensor::new("dout", Dtype::F64, &[6, 4, 8])), "--backward", &["`dout`", "F64", "F32"]);
    refuses(&with(Tensor::new("sink", Dtype::F64, &[1, 4])), "", &["`sink`", "F64"]);
    refuses(&with(Tensor::new("sink", Dtype::BF16, &[1, 4])), "", &["`sink`", "BF16"]);
    // A type that no version of the format knows.
    let folder = Folder::new();
    let header = br#"{"q":{"dtype":"F7","shape":[1],"data_offsets":[0,4]}}"#;
    folder.write("in.safetensors", [&(header.len() as u64).to_le_bytes()[..], header, &[0; 4]].concat());
    folder.refuses(LINE, &["F7"]);
}

#[test]
fn non_finite_numbers() {
    for dtype in [Dtype::F64, Dtype::F32, Dtype::BF16, Dtype::F16] {
        for (name, heads) in [("q", 4), ("k", 2), ("v", 2), ("dout", 4)] {
            for (value, text) in [(f64::NAN, "NaN"), (f64::INFINITY, "inf"), (f64::NEG_INFINITY, "-inf")] {
                let mut all = qkv(dtype, 6, 4, 2, 8);
                let at = (3 * heads + 1) * 8 + 5;
                all.retain(|tensor| tensor.name != name);
                // The one before it in the file is another tensor's; the one after it does not count.
                let shape = [6, heads, 8];
                all.push(Tensor::new(name, dtype, &shape).with(at, value).with(at + 2, f64::NAN));
                refuses(
                    &all,
                    "--backward",
                    &[&format!("`{name}` holds {text} at [3, 1, 5]"), "--allow-non-finite"],
                );
            }
        }
    }
    let sink = Tensor::new("sink", Dtype::F32, &[2, 4]).with(6, f64::NAN);
    refuses(&with(sink), "", &["`sink` holds NaN at [1, 2]"]);
}

#[test]
fn non_finite_numbers_pass_when_allowed() {
    let folder = Folder::new();
    let out = |tensors: &[Tensor]| {
        folder.write("in.safetensors", safetensors(tensors));
        folder.run(&format!("{LINE} --allow-non-finite")).ok();
        let bytes = folder.read("out.safetensors");
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        values_of(Dtype::F32, file.tensor("out").unwrap().data())
    };
    let q = Tensor::new("q", Dtype::F32, &[6, 4, 8]);
    let clean = out(&with(q.clone()));
    // One element of q: only its own row and head of out may differ.
    let touched = out(&with(q.with(0, f64::NAN)));
    assert_eq!(clean[8..], touched[8..]);
    assert_ne!(clean[..8], touched[..8]);
}

#[test]
fn what_cannot_fit() {
    let folder = Folder::new();
    folder.refuses("attention --mask full:4194304 --heads-q 4096 --head-dim 4096", &["tensors", "available"]);
    // Tensors that take half of the memory with their copies, and a reference that takes more than all of it.
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:")).unwrap();
    let available = 1024 * line.trim().trim_end_matches(" kB").parse::<usize>().unwrap();
    let head_dim = available / 4 / (4 * 1024 * 2);
    let line = format!("attention --mask causal:1k --heads-q 1 --head-dim {head_dim} --dtype bf16 --check");
    folder.refuses(&line, &["--check", "available"]);
}

#[test]
fn outputs_that_cannot_be_written() {
    let folder = Folder::new();
    folder.write("in.safetensors", safetensors(&qkv(Dtype::F32, 6, 4, 2, 8)));
    folder.write("file", "");
    let line = "attention --mask full:6 --input in.safetensors --output";
    for (output, words) in [
        ("missing/out", &["--output", "missing"][..]),
        ("file/out", &["--output", "file"]),
        (".", &["--output"]),
        ("in.safetensors", &["--output", "input in.safetensors", "same file"]),
        ("./in.safetensors", &["same file"]),
        ("out --trace out", &["--output", "--trace", "same file"]),
        ("out --report missing/report.html", &["--report", "missing"]),
        ("out --trace missing/trace.json", &["--trace", "missing"]),
    ] {
        folder.refuses(&format!("{line} {output}"), words);
    }
}

#[test]
fn numbers_that_are_none_are_refused_in_words() {
    let folder = Folder::new();
    for (number, words) in [
        ("x", "it must be a whole number"),
        ("1.5", "it must be a whole number"),
        ("99999999999999999999999", "it is too large"),
    ] {
        folder.refuses(&format!("bench tp --iterations {number}"), &["--iterations", number, words]);
    }
}
