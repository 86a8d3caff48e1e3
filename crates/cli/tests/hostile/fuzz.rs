//! Random arguments, damaged files and random limits: whatever goes in, a status and a sentence come out. Each case follows from a
//! seed, which a failure names; `SEED=… HOSTILE_SECONDS=600 cargo test -p counterpoint-cli --test hostile fuzz` goes on for longer.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use safetensors::Dtype;

use crate::support::{Folder, qkv, safetensors};

/// How long each of these tests goes on with new cases.
const BUDGET: Duration = Duration::from_secs(4);
/// Of one case: they take milliseconds, and a busy machine makes them seconds.
const PATIENCE: Duration = Duration::from_secs(90);

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().expect(name))
}

/// Runs `case` with a random source of its own for each number, until the budget is used up; at least `least` of them.
fn campaign(least: u64, case: impl Fn(&mut StdRng) -> Outcome) {
    let seed = variable("SEED").unwrap_or(19);
    let budget = variable("HOSTILE_SECONDS").map_or(BUDGET, Duration::from_secs);
    let began = Instant::now();
    let mut number = 0;
    while number < least || began.elapsed() < budget {
        case(&mut StdRng::seed_from_u64(seed + number))
            .ends_with_a_sentence(&format!("SEED={}", seed + number));
        number += 1;
    }
    println!("seeds {seed} to {}", seed + number - 1);
}

/// How a run ended.
struct Outcome {
    what: String,
    status: Option<i32>,
    signal: Option<i32>,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    /// Whether files came or went although the input was refused.
    changed: bool,
}

/// A program in a folder, with no other place to write to.
fn run(folder: &Folder, limits: Option<&str>, arguments: &[OsString]) -> Outcome {
    let binary = env!("CARGO_BIN_EXE_counterpoint");
    let script = format!("{}; exec \"$0\" \"$@\"", limits.unwrap_or(":"));
    let mut command = Command::new("sh");
    command.args(["-c", &script, binary]).args(arguments).current_dir(folder.path("."));
    let kept = tempfile::tempdir().unwrap();
    for variable in ["COUNTERPOINT_PROFILE_DIR", "COUNTERPOINT_CACHE_DIR", "HOME"] {
        command.env(variable, kept.path());
    }
    command.env_remove("RUST_BACKTRACE").env_remove("COUNTERPOINT_NVRTC_DIR");
    let before = folder.names();
    let output = assert_cmd::Command::from_std(command).timeout(PATIENCE).output().unwrap();
    let refused = output.status.code() == Some(2);
    Outcome {
        what: format!("{} {arguments:?}", limits.unwrap_or_default()),
        status: output.status.code(),
        signal: output.status.signal(),
        stdout: output.stdout,
        stderr: output.stderr,
        changed: refused && before != folder.names(),
    }
}

impl Outcome {
    /// It ended by itself, with a status that the guide lists, and said why where it did nothing.
    fn ends_with_a_sentence(&self, seed: &str) {
        let (stdout, stderr) = (String::from_utf8_lossy(&self.stdout), String::from_utf8_lossy(&self.stderr));
        let case =
            || format!("{seed}: {}\nstatus {:?}, signal {:?}\n{stderr}", self.what, self.status, self.signal);
        assert!(matches!(self.status, Some(0..=3)), "{}", case());
        let errors = stderr.lines().filter(|line| line.starts_with("error: ")).count();
        assert_eq!(errors, usize::from(self.status != Some(0)), "{}", case());
        assert!(!stderr.contains("panicked") && !stderr.contains("this is a bug"), "{}", case());
        assert!(!self.changed, "files changed; {}", case());
        for text in [&stdout, &stderr] {
            assert!(!text.chars().any(|c| c != '\n' && c.is_control()), "{}\n{text:?}", case());
        }
    }
}

/// A flag of a command as its help shows it.
struct Flag {
    name: String,
    /// What its value is called; `None` where it takes none.
    value: Option<String>,
    /// The values that help lists.
    listed: Vec<String>,
}

/// All flags of a command, from its help: nothing here lists them.
fn flags(folder: &Folder, command: &str) -> Vec<Flag> {
    let help = folder.run_with(&format!("{command} --help"), &[("COLUMNS", "110")]).ok().stdout;
    let (options, _) = help.split_once("Examples:").unwrap();
    let mut found: Vec<Flag> = Vec::new();
    for line in options.lines().map(str::trim) {
        if let Some((_, flag)) =
            line.split_once("--").filter(|(before, _)| before.is_empty() || *before == "-h, ")
        {
            let mut words = flag.split_whitespace();
            let name = words.next().unwrap().to_owned();
            let value = words.next().filter(|word| word.starts_with('<')).map(str::to_owned);
            found.push(Flag { name, value, listed: Vec::new() });
        } else if let Some((_, listed)) = line.split_once("[possible values: ") {
            let flag = found.last_mut().unwrap();
            flag.listed = listed.trim_end_matches(']').split(", ").map(str::to_owned).collect();
        }
    }
    found.retain(|flag| flag.name != "help");
    assert!(found.len() > 1, "{command}: {options}");
    found
}

/// Numbers that are too small, too large, or none.
const NUMBERS: [&str; 22] = [
    "0",
    "1",
    "2",
    "3",
    "8",
    "64",
    "-1",
    "-0",
    "1.5",
    "1e9",
    "1e300",
    "1e-300",
    "nan",
    "-inf",
    "0x10",
    "1_000",
    "٣",
    "１",
    "9223372036854775807",
    "18446744073709551615",
    "18446744073709551616",
    "99999999999999999999999999",
];
/// What is no number, or many.
const WORDS: [&str; 24] = [
    "",
    " ",
    "auto",
    "all",
    "causal:64",
    "full:8,keys=3",
    "lengths=1,2",
    "@missing",
    "1,1",
    "1:2:3",
    "1:2",
    ",",
    ":",
    "--",
    "-",
    "%s%n",
    "\u{1b}]0;title\u{7}",
    "line\nerror: forged",
    "..",
    "/",
    "/dev/null",
    "/dev/zero",
    "mask.json",
    "é\u{202e}",
];

fn value(random: &mut StdRng, flag: &Flag) -> OsString {
    // How often or how long something is done is the user's own affair.
    let repeated =
        ["iterations", "warmups", "limit", "slow-link", "slow-network", "waves", "cycles", "samples"];
    if repeated.contains(&flag.name.as_str()) {
        return ["", "0", "1", "2", "1,1", "x", "-1", "nan"].choose(random).unwrap().into();
    }
    match random.random_range(0..10) {
        0 => {
            OsString::from_vec((0..random.random_range(1..6)).map(|_| random.random_range(1..=255)).collect())
        }
        1 => "9".repeat(random.random_range(1..3000)).into(),
        2..4 => WORDS.choose(random).unwrap().into(),
        4..7 if !flag.listed.is_empty() => flag.listed.choose(random).unwrap().into(),
        _ => NUMBERS.choose(random).unwrap().into(),
    }
}

/// Small commands that do something, to which flags are added.
const COMMANDS: [(&str, &str); 9] = [
    ("plan", "--mask causal:256 --cp-size 4"),
    ("mask", "causal:32"),
    ("attention", "--mask causal:32 --heads-q 2 --head-dim 4 --cp-size 2"),
    ("simulate attention", "--mask causal:256 --cp-size 4"),
    ("simulate linear", "--kind row --tokens 64 --in-features 64 --out-features 64 --tp-size 2"),
    ("simulate model", "--ranks 8"),
    (
        "tune gemm",
        "--m 16 --n 8 --k 8 --tp-size 2 --collective all-gather --iterations 1 --warmups 0 --plans plans.json",
    ),
    ("bench bandwidth", "-b 4K -e 4K --iterations 1"),
    ("doctor", ""),
];

#[test]
fn arguments() {
    let folder = Folder::new();
    let known: Vec<Vec<Flag>> = COMMANDS.iter().map(|(command, _)| flags(&folder, command)).collect();
    campaign(60, |random| {
        let at = random.random_range(0..COMMANDS.len());
        let (command, usual) = COMMANDS[at];
        let mut arguments: Vec<OsString> = command.split(' ').map(OsString::from).collect();
        let mut usual: Vec<&str> = usual.split_whitespace().collect();
        for _ in 0..random.random_range(1..4) {
            let flag = known[at].choose(random).unwrap();
            // Given once, unless twice is what is tried.
            let given = format!("--{}", flag.name);
            if let Some(place) =
                usual.iter().position(|word| *word == given).filter(|_| random.random_bool(0.9))
            {
                usual.drain(place..(place + 2).min(usual.len()));
            }
            let mut argument = OsString::from(given);
            match &flag.value {
                Some(_) if random.random_bool(0.95) => {
                    argument.push("=");
                    argument.push(value(random, flag));
                }
                _ => {}
            }
            arguments.push(argument);
        }
        arguments.extend(usual.iter().map(OsString::from));
        if random.random_bool(0.1) {
            arguments.push(value(random, &Flag { name: String::new(), value: None, listed: Vec::new() }));
        }
        let folder = Folder::new();
        folder.write("mask.json", MASK);
        run(&folder, None, &arguments)
    });
}

const MASK: &str = r#"{"seqlen_q": 64, "seqlen_k": 64, "slices": [{"q": [0, 32], "k": [0, 64], "type": "full"}, {"q": [32, 64], "k": [0, 48], "type": "causal"}]}"#;
const TUNED: &str = "tune gemm --m 64 --n 8 --k 8 --tp-size 2 --collective all-gather --iterations 1 --warmups 0 --waves 2 --plans plans.json";
/// Files, and what reads them.
const READERS: [(&str, &str); 9] = [
    ("mask.json", "mask mask.json"),
    ("mask.json", "plan --mask mask.json --cp-size 3"),
    ("lengths.txt", "plan --mask varlen-causal:lengths=@lengths.txt --cp-size 2"),
    ("in.st", "attention --mask causal:8 --input in.st --output out.st --backward --cp-size 2"),
    ("profile.json", "plan --mask causal:512 --cp-size 4 --profile profile.json"),
    (
        "profile.json",
        "simulate linear --kind row --tokens 64 --in-features 64 --out-features 64 --tp-size 2 --profile profile.json",
    ),
    ("profile.json", "simulate model --ranks 8 --profile profile.json"),
    (
        "profile.json",
        "attention --mask causal:32 --heads-q 1 --head-dim 4 --cp-size 2 --profile profile.json",
    ),
    ("plans.json", TUNED),
];

/// Bytes turned, left out, doubled, put in, cut off, and numbers replaced by others.
fn damage(random: &mut StdRng, bytes: &mut Vec<u8>) {
    for _ in 0..random.random_range(1..4) {
        let (at, count) = (random.random_range(0..bytes.len().max(1)), random.random_range(1..9));
        let end = (at + count).min(bytes.len());
        match random.random_range(0..8) {
            0 => bytes.truncate(at),
            1 => drop(bytes.drain(at..end)),
            2 => bytes.extend_from_within(at..end),
            3 => drop(bytes.splice(at..at, (0..count).map(|_| random.random()).collect::<Vec<u8>>())),
            4 if at < bytes.len() => bytes[at] ^= 1 << random.random_range(0..8),
            _ => replace_number(random, bytes),
        }
    }
}

fn replace_number(random: &mut StdRng, bytes: &mut Vec<u8>) {
    let is_number = |byte: &u8| byte.is_ascii_digit() || b"+-.e".contains(byte);
    let starts: Vec<usize> = (0..bytes.len())
        .filter(|&at| bytes[at].is_ascii_digit() && (at == 0 || !is_number(&bytes[at - 1])))
        .collect();
    let Some(&start) = starts.choose(random) else { return };
    let end =
        bytes[start..].iter().position(|byte| !is_number(byte)).map_or(bytes.len(), |length| start + length);
    bytes.splice(start..end, NUMBERS.choose(random).unwrap().bytes());
}

#[test]
fn files() {
    let made = Folder::new();
    made.run("doctor --calibrate --output profile.json").ok();
    made.run(TUNED).ok();
    made.write("mask.json", MASK)
        .write("lengths.txt", "3\n5\n120\n")
        .write("in.st", safetensors(&qkv(Dtype::F32, 8, 2, 2, 4)));
    campaign(60, |random| {
        let (file, line) = *READERS.choose(random).unwrap();
        let mut bytes = made.read(file);
        damage(random, &mut bytes);
        let folder = Folder::new();
        folder.write(file, &bytes);
        let arguments: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        let mut ended = run(&folder, None, &arguments);
        ended.what = format!("{line}, where {file} holds {:?}", String::from_utf8_lossy(&bytes));
        ended
    });
}

/// With less memory than is needed, and with hardly enough: refused, or an error.
#[test]
fn limits_on_memory() {
    // Below that the system's loader refuses the program, or the language's start ends it.
    let loads = |kilobytes: &u32| {
        let limits = format!("ulimit -v {kilobytes}");
        matches!(run(&Folder::new(), Some(&limits), &["--version".into()]).status, Some(0..=3))
    };
    let least = (10_000..1_000_000).step_by(250).find(loads).unwrap() + 500;
    campaign(30, |random| {
        let lines = [
            "plan --mask causal:4k --cp-size 8 --json",
            "attention --mask causal:256 --heads-q 2 --head-dim 16 --cp-size 4 --backward --check",
            "attention --mask causal:256 --heads-q 2 --head-dim 16 --cp-size 2 --report report.html",
            "attention --mask causal:2k --heads-q 4 --head-dim 64 --cp-size 2",
            "mask causal:64k",
            "simulate model --ranks 8",
            "doctor",
            "doctor --calibrate --output profile.json",
            TUNED,
        ];
        let line = *lines.choose(random).unwrap();
        let arguments: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        let more = *[5_000, 25_000, 75_000, 450_000].choose(random).unwrap();
        let limits = format!("ulimit -v {}", least + random.random_range(0..more));
        run(&Folder::new(), Some(&limits), &arguments)
    });
}
