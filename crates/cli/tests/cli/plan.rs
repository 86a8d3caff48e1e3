//! `counterpoint plan` and `counterpoint bench plan`.

use serde_json::Value;

use crate::support::Folder;

/// Keys of an object, sorted.
fn keys(value: &Value) -> Vec<&str> {
    let mut keys: Vec<&str> = value.as_object().unwrap().keys().map(String::as_str).collect();
    keys.sort_unstable();
    keys
}

fn numbers(value: &Value) -> Vec<u64> {
    value.as_array().unwrap().iter().map(|number| number.as_u64().unwrap()).collect()
}

#[test]
fn json_has_the_keys_of_the_interface_and_adds_up() {
    let folder = Folder::new();
    let mask = "varlen-causal:lengths=700,40,300,1000,8";
    for (ranks, dispatch) in
        [(1, "affinity"), (3, "affinity"), (4, "min-heap"), (4, "sequential"), (5, "zigzag")]
    {
        let line =
            format!("plan --mask {mask} --cp-size {ranks} --chunk-size 100 --dispatch {dispatch} --json");
        let plan = folder.run(&line).ok().json();
        assert_eq!(
            keys(&plan),
            [
                "area",
                "balance",
                "chunk_size",
                "comm",
                "cp_size",
                "dispatches",
                "imbalance",
                "inputs",
                "num_chunks",
                "overlap",
                "ranks",
                "schema",
                "solve_seconds"
            ]
        );
        assert_eq!(
            keys(&plan["comm"]),
            ["all_gather_tokens", "lower_bound_tokens", "query_tokens", "recv_tokens", "ring_tokens"]
        );
        let triangle = |n: u64| n * (n + 1) / 2;
        let area = [700, 40, 300, 1000, 8].map(triangle).iter().sum::<u64>();
        assert_eq!(plan["area"], area);
        assert_eq!(
            (&plan["cp_size"], &plan["chunk_size"], &plan["num_chunks"]),
            (&ranks.into(), &100.into(), &21.into())
        );
        assert!(plan["solve_seconds"].as_f64().unwrap() > 0.0);
        assert_eq!(plan["comm"]["ring_tokens"], (ranks - 1) * 2048);

        let all = plan["ranks"].as_array().unwrap();
        assert_eq!(all.len() as u64, ranks);
        let mut chunks: Vec<u64> = all.iter().flat_map(|rank| numbers(&rank["chunks"])).collect();
        chunks.sort_unstable();
        assert_eq!(chunks, (0..21).collect::<Vec<_>>());
        let sum = |key: &str| all.iter().map(|rank| rank[key].as_u64().unwrap()).sum::<u64>();
        assert_eq!((sum("tokens"), sum("area")), (2048, area));
        assert_eq!(sum("recv_tokens"), plan["comm"]["recv_tokens"].as_u64().unwrap());
        assert_eq!(sum("send_tokens"), sum("recv_tokens"));
        assert!(plan["comm"]["lower_bound_tokens"].as_u64() <= plan["comm"]["recv_tokens"].as_u64());
        let largest = all.iter().map(|rank| rank["area"].as_u64().unwrap()).max().unwrap();
        let balance = largest as f64 / (area as f64 / ranks as f64);
        assert!((plan["balance"].as_f64().unwrap() - balance).abs() < 1e-9);
        for (at, rank) in all.iter().enumerate() {
            assert_eq!(
                keys(rank),
                [
                    "area",
                    "chunks",
                    "hosted_area",
                    "query_recv_tokens",
                    "query_send_tokens",
                    "rank",
                    "recv_ranges",
                    "recv_tokens",
                    "send_tokens",
                    "stages",
                    "tokens"
                ]
            );
            assert_eq!(rank["rank"], at);
            let ranges: Vec<Vec<u64>> = rank["recv_ranges"].as_array().unwrap().iter().map(numbers).collect();
            assert!(ranges.iter().all(|range| range.len() == 2 && range[0] < range[1]), "{ranges:?}");
            assert!(ranges.windows(2).all(|pair| pair[0][1] < pair[1][0]), "merged and sorted: {ranges:?}");
            assert_eq!(
                ranges.iter().map(|range| range[1] - range[0]).sum::<u64>(),
                rank["recv_tokens"].as_u64().unwrap()
            );
            let stages = rank["stages"].as_array().unwrap();
            let total = |key: &str| stages.iter().map(|stage| stage[key].as_u64().unwrap()).sum::<u64>();
            assert_eq!(total("area"), rank["area"].as_u64().unwrap());
            assert_eq!(total("recv_tokens"), rank["recv_tokens"].as_u64().unwrap());
        }
    }
}

#[test]
fn the_same_plan_every_time() {
    let folder = Folder::new();
    let line = "plan --mask sliding-window:4k,left=300,right=10 --cp-size 6 --heads-q 16 --heads-kv 2 --json";
    let plan = || {
        let mut plan = folder.run(line).ok().json();
        plan["solve_seconds"] = Value::Null;
        plan
    };
    assert_eq!(plan(), plan());
}

#[test]
fn fixed_stages_and_few_chunks() {
    let folder = Folder::new();
    let plan = folder.run("plan --mask causal:2k --cp-size 2 --chunk-size 256 --stages 3 --json").ok().json();
    for rank in plan["ranks"].as_array().unwrap() {
        assert_eq!(rank["stages"].as_array().unwrap().len(), 4, "stage 0 and three remote ones");
    }
    // More ranks than chunks: some own nothing and still take part.
    let plan = folder.run("plan --mask causal:100 --cp-size 8 --chunk-size 64 --json").ok().json();
    let idle = plan["ranks"].as_array().unwrap().iter().filter(|rank| rank["tokens"] == 0).count();
    assert_eq!((idle, plan["ranks"].as_array().unwrap().len()), (6, 8));
}

#[test]
fn more_chunks_than_a_plan_takes() {
    let folder = Folder::new();
    let said = ["chunk_size 1 cuts 4194304 rows into 4194304 chunks", "at least 4"];
    folder.refuses("plan --mask causal:4M --cp-size 2 --chunk-size 1", &said);
    // A development build says so on stderr before it measures.
    let ran = folder.run("bench plan --mask causal:4M --cp-size 2 --chunk-size 1");
    assert_eq!((ran.status, ran.stdout.as_str()), (2, ""));
    assert!(said.iter().all(|word| ran.stderr.contains(word)), "{}", ran.stderr);
}

#[test]
fn prints_a_table_that_explains_itself() {
    let folder = Folder::new();
    let ran = folder.run("plan --mask causal:4k --cp-size 4 --nodes 2").ok();
    for word in [
        "rank",
        "balance",
        "recv rows",
        "lower bound",
        "ring attention",
        "all-gather",
        "2 nodes",
        "forward",
        "backward",
    ] {
        assert!(ran.stdout.contains(word), "{word}\n{}", ran.stdout);
    }
    assert!(!ran.stdout.contains('\u{1b}') && ran.stderr.is_empty());
    assert!(folder.names().is_empty());
    // A mask without a pair has nothing to balance.
    folder.write("empty.json", r#"{"seqlen_q": 64, "seqlen_k": 64, "slices": []}"#);
    let ran = folder.run("plan --mask empty.json --cp-size 4").ok();
    assert!(!ran.stdout.contains("NaN") && !ran.stdout.contains("inf"), "{}", ran.stdout);
    // Queries and keys of different lengths.
    folder.run("plan --mask causal:1k,keys=3k --cp-size 4").ok();
}

/// Queries that travel cross between nodes once for a node, unless there are so few that a step more is not worth it.
#[test]
fn queries_between_nodes_are_counted() {
    let folder = Folder::new();
    let of = |queries: usize| {
        let heads = "--heads-q 16 --heads-kv 16 --head-dim 128";
        folder.run(&format!("plan --mask full:{queries},keys=128k --cp-size 8 --nodes 2 {heads}")).ok().stdout
    };
    let many = of(1024);
    let once =
        "1,024 query rows, each once for a node that hosts it (4,096 if each went to every host by itself)";
    assert!(many.contains(once), "{many}");
    let few = of(8);
    assert!(few.contains("32 query rows, to each host by itself; as many partial results back"), "{few}");
}

#[test]
fn writes_a_report() {
    let folder = Folder::new();
    for json in ["", " --json"] {
        let ran = folder.run(&format!("plan --mask causal:4k --cp-size 4 --report plan.html{json}")).ok();
        assert_eq!(json.is_empty(), ran.stdout.contains("plan.html"));
        let html = String::from_utf8(folder.read("plan.html")).unwrap();
        assert!(html.starts_with("<!DOCTYPE html>") && html.contains("</html>"));
        assert!(!html.contains("http://") || html.contains("www.w3.org"), "no network");
        assert_eq!(folder.names(), ["plan.html"]);
    }
}

#[test]
fn bench_plan_checks_and_prints_rows() {
    let folder = Folder::new();
    let line = "bench plan --mask causal:4k --mask varlen-causal:lengths=600,1448 --cp-size 2 --cp-size 3";
    let rows = folder.run(&format!("{line} --json")).ok().json_lines();
    assert_eq!(rows.len(), 2 * 2 * 4);
    for row in &rows {
        for key in [
            "name",
            "shape",
            "dtype",
            "mask",
            "device",
            "ranks",
            "seconds",
            "ratio",
            "verified",
            "dispatch",
            "balance",
            "recv_tokens",
        ] {
            assert!(!row[key].is_null(), "{key} in {row}");
        }
        let seconds = |key: &str| row["seconds"][key].as_f64().unwrap();
        assert!(
            0.0 < seconds("min")
                && seconds("min") <= seconds("median")
                && seconds("median") <= seconds("max")
        );
        assert_eq!(row["seconds"]["count"], 10);
        assert!(row["balance"].as_f64().unwrap() >= 1.0 - 1e-12);
        if row["dispatch"] == "min-heap" {
            assert_eq!((&row["ratio"], &row["recv_ratio_to_min_heap"]), (&1.0.into(), &1.0.into()));
        }
    }
    let ran = folder.run(line).ok();
    for word in ["affinity", "min-heap", "sequential", "zigzag", "10 solves"] {
        assert!(ran.stdout.contains(word), "{word}\n{}", ran.stdout);
    }
}

#[test]
fn ranks_that_own_nothing_are_named() {
    let folder = Folder::new();
    let line = "plan --mask causal:1k --cp-size 4 --json --chunk-size";
    let said = folder.run(&format!("{line} 512")).ok().stderr;
    assert!(said.contains("2 of 4 ranks own no rows: the mask has 2 chunks of 512 rows"), "{said}");
    assert_eq!(folder.run(&format!("{line} 256")).ok().stderr, "");
}

#[test]
fn programs_are_printed_one_line_an_operation() {
    let folder = Folder::new();
    let line = "plan --mask causal:2k --cp-size 2 --dispatch zigzag --stages 2 --chunk-size 256 --program";
    let all = folder.run(line).ok().stdout;
    for rank in 0..2 {
        let one = folder.run(&format!("{line} {rank}")).ok().stdout;
        assert!(one.starts_with(&format!("attention forward, rank {rank} of 2, policy ")), "{one}");
        assert!(one.contains(&format!("\nattention backward, rank {rank} of 2, policy ")));
        assert!(all.contains(&one), "all ranks hold rank {rank}");
        for words in
            ["buffer q ", "group_cast k[1024,8,128] -> ", "attention_forward q=q[1024,8,128] ", "# delta"]
        {
            assert!(one.contains(words), "{words}\n{one}");
        }
    }
    folder.refuses(&format!("{line} 2"), &["--program 2 is not a rank", "ranks 0 to 1"]);
    folder.refuses(&format!("{line} --json"), &["--program", "--json"]);
}

/// A row for every dispatch, the chosen one marked, and a sentence exactly where another is predicted to be faster.
#[test]
fn every_dispatch_is_predicted_and_a_faster_one_is_named() {
    let folder = Folder::new();
    let mut faster = 0;
    for line in [
        "plan --mask causal:64k --cp-size 8 --heads-q 16",
        "plan --mask varlen-causal:lengths=5000,300,2000,892 --cp-size 16 --nodes 2",
        "plan --mask causal:64k --cp-size 8 --heads-q 16 --dispatch sequential",
    ] {
        let plan = folder.run(&format!("{line} --json")).ok().json();
        let rows = plan["dispatches"].as_array().unwrap();
        let names: Vec<&str> = rows.iter().map(|row| row["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["affinity", "min-heap", "sequential", "zigzag"]);
        let seconds = |row: &Value| {
            let part = |key: &str| row[key].as_f64().unwrap();
            assert!(part("forward_seconds") > 0.0 && part("backward_seconds") > 0.0, "{row}");
            part("forward_seconds") + part("backward_seconds")
        };
        let chosen: Vec<&Value> = rows.iter().filter(|row| row["chosen"] == true).collect();
        let named = line.split("--dispatch ").nth(1);
        let asked = named.unwrap_or(chosen[0]["name"].as_str().unwrap());
        assert_eq!((chosen.len(), chosen[0]["name"].as_str()), (1, Some(asked)));
        if named.is_none() {
            // A default is not predicted slower than what is offered.
            let least = rows.iter().map(seconds).fold(f64::INFINITY, f64::min);
            assert!(seconds(chosen[0]) <= 1.01 * least, "{plan}");
        }
        assert_eq!(chosen[0]["recv_tokens"], plan["comm"]["recv_tokens"]);
        assert_eq!(chosen[0]["balance"], plan["balance"]);
        let inputs = &plan["inputs"];
        assert_eq!(inputs["attention"]["dtype"], "bf16");
        assert_eq!(inputs["model"]["machine"], "NVIDIA H200");
        assert_eq!(inputs["config"]["dispatch"], asked);
        assert_eq!(inputs["fingerprint"].as_str().unwrap().len(), 64);
        // Rows are what plans with these dispatches are.
        let zigzag = folder
            .run(&format!("{} --dispatch zigzag --json", line.split(" --dispatch").next().unwrap()))
            .ok()
            .json();
        assert_eq!(zigzag["comm"]["recv_tokens"], rows[3]["recv_tokens"]);
        assert_eq!(zigzag["balance"], rows[3]["balance"]);
        let text = folder.run(line).ok().stdout;
        assert!(text.contains(&format!("{asked} (chosen)")) && text.contains("on NVIDIA H200"), "{text}");
        let fastest = rows.iter().min_by(|a, b| seconds(a).total_cmp(&seconds(b))).unwrap();
        let is_faster = seconds(fastest) < 0.995 * seconds(chosen[0]);
        faster += usize::from(is_faster);
        let sentence =
            format!("{} is predicted to be faster than {asked}", fastest["name"].as_str().unwrap());
        assert_eq!(text.contains(&sentence), is_faster, "{text}");
    }
    assert!(faster > 0, "no line above has a faster dispatch");
}

/// What is said to help does, and where a plan is level nothing is said.
#[test]
fn a_plan_that_is_not_level_says_why_and_what_helps() {
    let folder = Folder::new();
    let mut remedies = 0;
    for line in [
        "plan --mask causal:300 --cp-size 4",
        "plan --mask causal:4k --cp-size 32 --chunk-size 128",
        "plan --mask varlen-causal:lengths=3000,40,300,1000,8 --cp-size 20 --dispatch zigzag",
        "plan --mask causal:64k --cp-size 8",
        "plan --mask full:64k --cp-size 8 --dispatch sequential",
    ] {
        let plan = folder.run(&format!("{line} --json")).ok().json();
        let text = folder.run(line).ok().stdout;
        let balance = plan["balance"].as_f64().unwrap();
        let imbalance = &plan["imbalance"];
        let said = format!("balance {balance:.3}: ");
        assert_eq!(imbalance.is_null(), balance <= 1.02, "{line}: {imbalance}");
        assert_eq!(text.contains(&said), balance > 1.02, "{line}: {text}");
        let Some(tried) = imbalance["remedies"].as_array() else { continue };
        for remedy in tried {
            let flag = remedy["flag"].as_str().unwrap();
            let name = flag.split(' ').next().unwrap();
            // Of a flag given twice the last would be refused.
            let mut words: Vec<&str> = line.split(' ').collect();
            if let Some(at) = words.iter().position(|word| *word == name) {
                words.drain(at..at + 2);
            }
            let other = folder.run(&format!("{} {flag} --json", words.join(" "))).ok().json();
            assert_eq!(other["balance"], remedy["balance"], "{line} {flag}");
            assert!(
                remedy["balance"].as_f64().unwrap() < balance && text.contains(flag),
                "{line} {flag}: {text}"
            );
            remedies += 1;
        }
        let by_time = imbalance["reason"].as_str().unwrap().starts_with("levelled by predicted time");
        assert!(!tried.is_empty() || by_time || text.contains("no other dispatch"), "{line}: {text}");
    }
    assert!(remedies >= 3, "{remedies}");
}

/// A profile's machine is named, of whatever kind it is; a CPU's is planned for in f32.
#[test]
fn the_machine_of_a_profile_is_named() {
    let folder = Folder::new();
    let inputs = folder.run("plan --mask causal:4k --cp-size 4 --json").ok().json()["inputs"].take();
    let mut cost = inputs["config"]["cost"].clone();
    cost["tiles"] = Value::Null;
    cost["forward_flops_per_second"] = 1e11.into();
    cost["backward_flops_per_second"] = 1e11.into();
    let profile = serde_json::json!({"version": 1, "machine": "Some CPU", "devices": 1, "cost": cost});
    folder.write("profile.json", profile.to_string());
    let line = "plan --mask causal:4k --cp-size 4 --profile profile.json";
    let text = folder.run(line).ok().stdout;
    assert!(text.contains("forward on Some CPU, predicted") && !text.contains("H200"), "{text}");
    let other = folder.run(&format!("{line} --json")).ok().json()["inputs"].take();
    assert_eq!(
        (&other["model"]["machine"], &other["attention"]["dtype"]),
        (&"Some CPU".into(), &"f32".into())
    );
    assert_ne!(other["fingerprint"], inputs["fingerprint"]);
}

/// Of many ranks figures are made without pieces: those that the plan itself has.
#[test]
fn many_ranks_have_the_figures_of_their_plan() {
    let folder = Folder::new();
    let line = "plan --mask causal:40k --cp-size 300 --nodes 30 --json";
    let figures = |line: &str| {
        let mut plan = folder.run(line).ok().json();
        for changes in ["solve_seconds", "dispatches", "overlap"] {
            plan[changes] = Value::Null;
        }
        plan["imbalance"]["compute_balance"] = Value::Null;
        plan
    };
    // A report needs the pieces.
    assert_eq!(figures(line), figures(&format!("{line} --report plan.html")));
    let text = folder.run(line.trim_end_matches(" --json")).ok().stdout;
    for word in ["300 ranks on 30 nodes", "(chosen)", "predicted rank by rank", "up to 256 ranks"] {
        assert!(text.contains(word), "{word}: {text}");
    }
}

/// Within a gigabyte of address space, and so of memory: figures of 16M tokens on 4,096 ranks are made within 15 s of one core; pieces
/// of many ranks are refused with both figures.
#[test]
fn memory_is_predicted() {
    let run = |arguments: &str| {
        let limited = format!(
            "ulimit -v 1000000; ulimit -t 15; exec {} {arguments}",
            env!("CARGO_BIN_EXE_counterpoint")
        );
        let ran = std::process::Command::new("bash").args(["-c", &limited]).output().unwrap();
        (ran.status.code(), String::from_utf8(ran.stdout).unwrap(), String::from_utf8(ran.stderr).unwrap())
    };
    let (status, stdout, stderr) = run("plan --mask full:16M --cp-size 4096");
    assert_eq!((status, stderr.as_str()), (Some(0), ""));
    assert!(stdout.contains("4,096 ranks") || stdout.contains("4096 ranks"), "{stdout}");
    // Query offload of all rows would come in billions of pieces: it is left out, and said to be.
    for when in ["auto", "fewest-bytes"] {
        let (status, stdout, stderr) =
            run(&format!("plan --mask full:16M --cp-size 4096 --query-exchange {when}"));
        assert_eq!((status, stderr.lines().count()), (Some(0), 1), "{stderr}");
        assert!(stdout.contains("(chosen)"), "{stdout}");
        for word in ["note: query offload comes in 4294967296 pieces", "was not weighed", "fewer ranks"] {
            assert!(stderr.contains(word), "{word}: {stderr}");
        }
    }
    let (status, _, stderr) = run("plan --mask full:4M --cp-size 2048 --program 0");
    assert_eq!(status, Some(2), "{stderr}");
    for word in ["takes 7.5", "of memory are available", "--chunk-size"] {
        assert!(stderr.contains(word), "{word}: {stderr}");
    }
}
