//! `counterpoint attention` from files to files.

use safetensors::{Dtype, SafeTensors};

use crate::support::{Folder, Tensor, qkv, safetensors, values_of};

/// Attention written down as its definition says, in f64, on one mask given as a predicate.
struct Dense {
    seqlen: usize,
    heads_q: usize,
    heads_kv: usize,
    dim: usize,
}

impl Dense {
    fn run(
        &self,
        q: &[f64],
        k: &[f64],
        v: &[f64],
        sees: impl Fn(usize, usize) -> bool,
    ) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
        let Dense { seqlen, heads_q, heads_kv, dim } = *self;
        let scale = 1.0 / (dim as f64).sqrt();
        let mut out = vec![0.0; seqlen * heads_q * dim];
        let mut lse = vec![f64::NEG_INFINITY; seqlen * heads_q];
        let mut max_logits = vec![f64::NEG_INFINITY; heads_q];
        for row in 0..seqlen {
            for head in 0..heads_q {
                let at = (row * heads_q + head) * dim;
                let key_at = |col: usize| (col * heads_kv + head / (heads_q / heads_kv)) * dim;
                let seen: Vec<usize> = (0..seqlen).filter(|&col| sees(row, col)).collect();
                let score =
                    |col: usize| (0..dim).map(|d| q[at + d] * k[key_at(col) + d]).sum::<f64>() * scale;
                max_logits[head] = seen.iter().map(|&col| score(col)).fold(max_logits[head], f64::max);
                let sum: f64 = seen.iter().map(|&col| score(col).exp()).sum();
                lse[row * heads_q + head] = sum.ln();
                for &col in &seen {
                    let weight = score(col).exp() / sum;
                    (0..dim).for_each(|d| out[at + d] += weight * v[key_at(col) + d]);
                }
            }
        }
        (out, lse, max_logits)
    }
}

fn stored(folder: &Folder, name: &str, tensor: &str) -> (Dtype, Vec<usize>, Vec<f64>) {
    let bytes = folder.read(name);
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let view = file.tensor(tensor).unwrap();
    (view.dtype(), view.shape().to_vec(), values_of(view.dtype(), view.data()))
}

fn relative(a: &[f64], b: &[f64]) -> f64 {
    let norm = |of: &mut dyn Iterator<Item = f64>| of.map(|x| x * x).sum::<f64>().sqrt();
    norm(&mut a.iter().zip(b).map(|(a, b)| a - b)) / norm(&mut b.iter().copied())
}

#[test]
fn agrees_with_the_definition_for_every_number_of_ranks() {
    let folder = Folder::new();
    let (seqlen, heads_q, heads_kv, dim) = (37, 4, 2, 5);
    let tensors = qkv(Dtype::F64, seqlen, heads_q, heads_kv, dim);
    folder.write("in.safetensors", safetensors(&tensors));
    // Two documents; the last three rows see nothing.
    folder.write(
        "mask.json",
        r#"{"seqlen_q": 37, "seqlen_k": 37, "slices": [
            {"q": [0, 20], "k": [0, 20], "type": "causal"}, {"q": [20, 34], "k": [20, 37], "type": "full"}]}"#,
    );
    let sees = |row: usize, col: usize| if row < 20 { col <= row } else { row < 34 && col >= 20 };
    let [q, k, v, _] = &tensors[..] else { panic!() };
    let dense = Dense { seqlen, heads_q, heads_kv, dim };
    let (out, lse, max_logits) = dense.run(&q.values(), &k.values(), &v.values(), sees);
    for ranks in [1, 2, 3, 8] {
        let files = "--mask mask.json --input in.safetensors --output out.safetensors";
        folder.run(&format!("attention {files} --cp-size {ranks} --chunk-size 6 --max-logits")).ok();
        let (dtype, shape, values) = stored(&folder, "out.safetensors", "out");
        assert_eq!((dtype, &shape[..]), (Dtype::F64, &[37, 4, 5][..]));
        assert!(relative(&values, &out) < 1e-12, "{ranks} ranks: {}", relative(&values, &out));
        let (dtype, shape, values) = stored(&folder, "out.safetensors", "max_logits");
        assert_eq!((dtype, &shape[..]), (Dtype::F64, &[4][..]));
        assert!(relative(&values, &max_logits) < 1e-12, "{ranks} ranks: {values:?} {max_logits:?}");
        let (dtype, shape, values) = stored(&folder, "out.safetensors", "lse");
        assert_eq!((dtype, &shape[..]), (Dtype::F64, &[37, 4][..]));
        for (value, expected) in values.iter().zip(&lse) {
            assert!(value == expected || (value - expected).abs() < 1e-12, "{value} {expected}");
        }
        assert_eq!(folder.names(), ["in.safetensors", "mask.json", "out.safetensors"]);
    }
}

#[test]
fn the_backward_of_every_type_is_checked() {
    for (dtype, name) in
        [(Dtype::F64, "f64"), (Dtype::F32, "f32"), (Dtype::BF16, "bf16"), (Dtype::F16, "f16")]
    {
        let folder = Folder::new();
        let mut tensors = qkv(dtype, 48, 4, 2, 8);
        tensors.push(Tensor::new("sink", Dtype::F32, &[2, 4]));
        folder.write("in.safetensors", safetensors(&tensors));
        let files = "--mask causal:48 --input in.safetensors --output out.safetensors";
        let how = "--cp-size 3 --chunk-size 7 --backward --softcap 5 --scale 0.3 --check --json";
        let json = folder.run(&format!("attention {files} {how}")).ok().json();
        assert_eq!((&json["check"]["passed"], &json["dtype"]), (&true.into(), &name.into()));
        for (tensor, shape, wanted) in [
            ("out", &[48, 4, 8][..], dtype),
            ("dq", &[48, 4, 8], dtype),
            ("dk", &[48, 2, 8], dtype),
            ("dv", &[48, 2, 8], dtype),
        ] {
            let bytes = folder.read("out.safetensors");
            let file = SafeTensors::deserialize(&bytes).unwrap();
            let view = file.tensor(tensor).unwrap();
            assert_eq!((view.dtype(), view.shape()), (wanted, shape), "{tensor}");
        }
        let statistics = if dtype == Dtype::F64 { Dtype::F64 } else { Dtype::F32 };
        for (tensor, shape) in [("lse", &[48, 4]), ("dsink", &[2, 4])] {
            let (dtype, found, values) = stored(&folder, "out.safetensors", tensor);
            assert_eq!((dtype, &found[..]), (statistics, &shape[..]));
            assert!(values.iter().all(|x| x.is_finite()));
        }
    }
}

#[test]
fn json_has_the_keys_of_the_interface() {
    let folder = Folder::new();
    let line = "attention --mask causal:300 --cp-size 2 --chunk-size 32 --heads-q 4 --heads-kv 2 --head-dim 16 --backward --check --json";
    let ran = folder.run(line).ok();
    assert_eq!(ran.stdout.lines().count(), 1);
    let json = ran.json();
    for (key, value) in
        [("seqlen_q", 300), ("seqlen_k", 300), ("area", 45150), ("cp_size", 2), ("chunk_size", 32)]
    {
        assert_eq!(json[key], value, "{key}");
    }
    for key in ["area", "cp_size", "chunk_size", "num_chunks", "solve_seconds", "balance", "ranks", "comm"] {
        assert!(!json["plan"][key].is_null(), "plan.{key}");
    }
    for key in ["plan", "forward", "backward"] {
        assert!(json["seconds"][key].as_f64().unwrap() > 0.0, "seconds.{key}");
    }
    let overlap = &json["overlap"];
    let seconds = |key: &str| overlap[key].as_f64().unwrap();
    assert!(0.0 < seconds("communication_seconds"));
    assert!(seconds("exposed_seconds") <= seconds("communication_seconds") * (1.0 + 1e-9));
    assert!((-1e-9..=1.0 + 1e-9).contains(&seconds("efficiency")));
    assert_eq!(json["check"]["passed"], true);
    let names: Vec<&str> =
        json["check"]["tensors"].as_array().unwrap().iter().map(|t| t["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["out", "lse", "dq", "dk", "dv"]);
    // What did not happen is null.
    let json = folder.run("attention --mask causal:64 --heads-q 1 --head-dim 4 --json").ok().json();
    assert!(
        json["check"].is_null()
            && json["seconds"]["backward"].is_null()
            && json["overlap"]["efficiency"].is_null()
    );
    assert!(folder.names().is_empty());
}

#[test]
fn the_same_seed_gives_the_same_tensors_on_any_number_of_ranks() {
    let folder = Folder::new();
    let run = |ranks: usize, seed: usize, name: &str| {
        let how =
            format!("--mask causal:100 --heads-q 2 --head-dim 8 --dtype f64 --seed {seed} --cp-size {ranks}");
        folder.run(&format!("attention {how} --chunk-size 16 --output {name}")).ok();
        stored(&folder, name, "out").2
    };
    let one = run(1, 5, "one");
    assert!(relative(&run(4, 5, "four"), &one) < 1e-13);
    assert!(relative(&run(1, 6, "other"), &one) > 0.1);
}

#[test]
fn deterministic_runs_have_the_same_bits() {
    let folder = Folder::new();
    let how = "--mask sliding-window:400,left=150,right=20 --heads-q 2 --head-dim 8 --cp-size 3 --chunk-size 32 --backward --deterministic";
    let run = |more: &str| {
        folder.run(&format!("attention {how} {more} --output out")).ok();
        folder.read("out")
    };
    let first = run("");
    for more in
        ["", "--stages 1", "--stages 3", "--overlap sequential", "--overlap kernel-barrier+sm-margin=1"]
    {
        assert!(run(more) == first, "{more}");
    }
}

#[test]
fn prints_a_table() {
    let folder = Folder::new();
    let line =
        "attention --mask causal:256 --heads-q 2 --head-dim 8 --cp-size 2 --backward --check --output out";
    let ran = folder.run_with(line, &[("NO_COLOR", "1")]).ok();
    for word in [
        "rank",
        "recv rows",
        "forward",
        "backward",
        "overlap efficiency",
        "within bounds",
        "output is in out",
        "dq",
    ] {
        assert!(ran.stdout.contains(word), "{word}\n{}", ran.stdout);
    }
    assert!(!ran.stdout.contains('\u{1b}') && !ran.stdout.contains("NaN"), "{}", ran.stdout);
    assert_eq!(ran.stderr, "");
}

#[test]
fn writes_report_and_trace() {
    let folder = Folder::new();
    let line = "attention --mask causal:256 --heads-q 2 --head-dim 8 --cp-size 2 --backward --check --report report.html --trace trace.json";
    folder.run(line).ok();
    let html = String::from_utf8(folder.read("report.html")).unwrap();
    assert!(html.starts_with("<!DOCTYPE html>") && html.contains("</html>"));
    let trace: serde_json::Value = serde_json::from_slice(&folder.read("trace.json")).unwrap();
    let events = trace["traceEvents"].as_array().or_else(|| trace.as_array()).unwrap();
    for rank in 0..2 {
        assert!(events.iter().any(|event| event["ph"] == "X" && event["pid"] == rank), "rank {rank}");
    }
    assert_eq!(folder.names(), ["report.html", "trace.json"]);
}

#[test]
fn a_slow_link_takes_its_time() {
    let folder = Folder::new();
    let line =
        "attention --mask full:64 --heads-q 1 --head-dim 4 --cp-size 2 --chunk-size 16 --stages 1 --json";
    let slow = folder.run(&format!("{line} --slow-link 50000,1")).ok().json();
    assert!(slow["seconds"]["forward"].as_f64().unwrap() >= 0.05, "{slow}");
    assert!(slow["overlap"]["communication_seconds"].as_f64().unwrap() >= 0.05, "{slow}");
}

#[test]
fn a_wait_past_its_limit_ends_the_run() {
    let folder = Folder::new();
    let line = "attention --mask full:64 --heads-q 1 --head-dim 4 --cp-size 2 --chunk-size 16 --output out --slow-link 20000000,1 --limit 0.3";
    let begin = std::time::Instant::now();
    let ran = folder.run(line);
    ran.is_refusal(1, &["rank"]);
    assert!(begin.elapsed().as_secs() < 15, "the limit is 0.3 s");
    assert!(folder.names().is_empty());
}

/// Results that cannot be right, as their input is not, are written and reported as wrong.
#[test]
fn a_failing_check_writes_the_output_and_says_so() {
    let folder = Folder::new();
    let mut tensors = qkv(Dtype::F32, 8, 1, 1, 4);
    tensors[0] = tensors[0].clone().with(3, f64::NAN);
    folder.write("in.safetensors", safetensors(&tensors[..3]));
    let line =
        "attention --mask full:8 --input in.safetensors --output out --allow-non-finite --check --json";
    let ran = folder.run(line);
    assert_eq!(ran.status, 1);
    assert_eq!(ran.json()["check"]["passed"], false);
    ran.is_one_error(&["out of bounds", "out"]);
    assert_eq!(folder.names(), ["in.safetensors", "out"]);
}

/// Whether a process has a handler for SIGINT, signal 2.
fn catches_interrupts(process: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
    u64::from_str_radix(caught.trim(), 16).unwrap() & 0b10 != 0
}

#[test]
fn an_interrupt_ends_everything_and_leaves_nothing() {
    let folder = Folder::new();
    let line = "attention --mask full:64 --heads-q 1 --head-dim 4 --cp-size 2 --chunk-size 16 --slow-link 60000000,1 --output out --report report.html";
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_counterpoint"))
        .args(line.split_whitespace())
        .current_dir(folder.path("."))
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    // Not before the handler is in place, on however busy a machine; then a moment for the ranks to start.
    let begin = std::time::Instant::now();
    while !catches_interrupts(child.id()) {
        assert!(begin.elapsed().as_secs() < 30, "no handler");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    std::thread::sleep(std::time::Duration::from_millis(700));
    assert!(child.try_wait().unwrap().is_none(), "it runs for a minute");
    let kill = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(kill.success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(folder.names().is_empty(), "{:?}", folder.names());
}
