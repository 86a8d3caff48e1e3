//! `counterpoint mask`, and what every command does with a bad MASK.

use crate::support::Folder;

#[test]
fn prints_json_and_a_picture() {
    let ran = Folder::new().run("mask causal:16").ok();
    let (json, picture) = ran.stdout.split_once("\n\n").unwrap();
    let json: serde_json::Value = serde_json::from_str(json).unwrap();
    assert_eq!(json["slices"], serde_json::json!([{"q": [0, 16], "k": [0, 16], "type": "causal"}]));
    assert!(picture.contains('█') && picture.contains('·'), "{picture}");
    assert!(picture.contains("136"), "the area is printed: {picture}");
    assert_eq!(ran.stderr, "");
}

#[test]
fn json_reads_back_as_the_same_mask() {
    let folder = Folder::new();
    for mask in [
        "full:5",
        "causal:4k",
        "varlen-full:0,100,400",
        "varlen-causal:lengths=300,0,96",
        "sliding-window:1k,left=100,right=3",
        "block-causal:2k,block=512",
        "varlen-block-causal:0,4096,8192,block=512",
        "prefix-lm:300,prefix=100",
        "shared-question:128;128,256,512",
    ] {
        let ran = folder.run(&format!("mask {mask} --json")).ok();
        let document = ran.json();
        for key in ["seqlen_q", "seqlen_k", "slices"] {
            assert!(!document[key].is_null(), "{mask}: {key}");
        }
        folder.write("mask.json", &ran.stdout);
        assert_eq!(folder.run("mask mask.json --json").ok().json(), document, "{mask}");
    }
}

#[test]
fn lengths_from_a_file() {
    let folder = Folder::new();
    folder.write("lengths.txt", "100\n300\n\n");
    let from_file = folder.run("mask varlen-causal:lengths=@lengths.txt --json").ok().json();
    assert_eq!(from_file, folder.run("mask varlen-causal:0,100,400 --json").ok().json());
    folder.refuses("mask varlen-causal:lengths=@missing.txt", &["missing.txt"]);
    folder.write("words.txt", "100\nmany\n");
    folder.refuses("mask varlen-causal:lengths=@words.txt", &["many"]);
}

#[test]
fn a_name_of_a_file_is_a_file() {
    let folder = Folder::new();
    folder.write("causal:4", r#"{"seqlen_q": 2, "seqlen_k": 2, "slices": []}"#);
    // An expression means the same whatever lies in the current folder.
    assert_eq!(folder.run("mask causal:4 --json").ok().json()["seqlen_q"], 4);
    assert_eq!(folder.run("mask ./causal:4 --json").ok().json()["seqlen_q"], 2);
    folder.refuses("mask missing.json", &["missing.json"]);
}

#[test]
fn files_that_never_end() {
    let folder = Folder::new();
    folder.refuses("mask /dev/zero", &["/dev/zero", "device"]);
    folder.refuses("mask varlen-full:lengths=@/dev/zero", &["/dev/zero", "device"]);
}

#[test]
fn draws_svg() {
    let folder = Folder::new();
    folder.run("mask varlen-causal:lengths=300,700 --svg mask.svg").ok();
    let svg = String::from_utf8(folder.read("mask.svg")).unwrap();
    assert!(svg.contains("<svg") && svg.trim_end().ends_with("</svg>"), "{svg}");
    assert_eq!(folder.names(), ["mask.svg"]);
    folder.refuses("mask causal:4 --svg missing/mask.svg", &["--svg", "missing"]);
    std::fs::create_dir(folder.path("folder")).unwrap();
    folder.refuses("mask causal:4 --svg folder", &["--svg", "folder"]);
}

#[test]
fn bad_expressions() {
    let folder = Folder::new();
    for (mask, words) in [
        ("nonsense", &["nonsense"][..]),
        ("nonsense:4", &["nonsense", "causal"]),
        ("causal", &["causal"]),
        ("causal:", &["causal"]),
        ("causal:x", &["x"]),
        ("causal:-4", &["-4"]),
        ("causal:1.5", &["1.5"]),
        ("causal:99999999999999999999999", &["99999999999999999999999"]),
        ("causal:4,block=2", &["block"]),
        ("sliding-window:16", &["left"]),
        ("varlen-causal:0,300,100", &["300", "100"]),
        ("block-causal:16,block=0", &["block"]),
    ] {
        for command in ["mask", "plan --cp-size 2 --mask", "attention --mask"] {
            folder.refuses(&format!("{command} {mask}"), words);
        }
    }
    let ran =
        assert_cmd::Command::new(env!("CARGO_BIN_EXE_counterpoint")).args(["mask", ""]).output().unwrap();
    assert_eq!(ran.status.code(), Some(2));
}

#[test]
fn text_in_another_encoding() {
    let folder = Folder::new();
    let utf16 = |text: &str| text.encode_utf16().flat_map(u16::to_le_bytes).collect::<Vec<u8>>();
    folder.write("mask.json", [&[0xff, 0xfe], &utf16("{}")[..]].concat());
    folder.write("lengths.txt", [0xff, 0xfe, 0x31, 0]);
    folder.refuses("mask mask.json", &["mask.json", "save it as UTF-8"]);
    folder.refuses("mask varlen-causal:lengths=@lengths.txt", &["lengths.txt", "save it as UTF-8"]);
}

#[test]
fn bad_json() {
    let folder = Folder::new();
    let slice = |body: &str| {
        format!(
            r#"{{"seqlen_q": 8, "seqlen_k": 8, "slices": [{{"q": [0, 2], "k": [0, 8], "type": "full"}}, {body}]}}"#
        )
    };
    let good = r#"{"q": [2, 4], "k": [0, 8], "type": "causal"}"#;
    folder.write("good.json", slice(good));
    folder.run("mask good.json").ok();
    let bad: Vec<(String, &[&str])> = vec![
        ("this is no JSON".into(), &["JSON"]),
        ("".into(), &["JSON"]),
        ("[]".into(), &["mask"]),
        (slice(good)[..60].into(), &["JSON"]),
        (slice(good) + "x", &["JSON"]),
        (r#"{"seqlen_q": 8, "slices": []}"#.into(), &["seqlen_k"]),
        (r#"{"seqlen_q": 8, "seqlen_k": 8, "slices": [], "name": 1}"#.into(), &["name"]),
        (r#"{"seqlen_q": "8", "seqlen_k": 8, "slices": []}"#.into(), &["seqlen_q"]),
        (r#"{"seqlen_q": -8, "seqlen_k": 8, "slices": []}"#.into(), &["seqlen_q", "-8"]),
        (r#"{"seqlen_q": 8.5, "seqlen_k": 8, "slices": []}"#.into(), &["seqlen_q", "8.5"]),
        (r#"{"seqlen_q": 99999999999999999999999, "seqlen_k": 8, "slices": []}"#.into(), &["seqlen_q"]),
        (
            r#"{"seqlen_q": 18446744073709551615, "seqlen_k": 8, "slices": []}"#.into(),
            &["18446744073709551615"],
        ),
        (slice(r#"{"q": [2, 4], "k": [0, 8], "type": "causal", "weight": 1}"#), &["slices[1]", "weight"]),
        (slice(r#"{"q": [2, 4], "k": [0, 8], "type": "diagonal"}"#), &["slices[1]", "diagonal"]),
        (slice(r#"{"q": [2, 4], "k": [0, 8]}"#), &["slices[1]", "type"]),
        (slice(r#"{"q": [2], "k": [0, 8], "type": "full"}"#), &["slices[1]", "q"]),
        (slice(r#"{"q": [2, 4, 6], "k": [0, 8], "type": "full"}"#), &["slices[1]", "q"]),
        (slice(r#"{"q": [2, -4], "k": [0, 8], "type": "full"}"#), &["slices[1]", "-4"]),
        (slice(r#"{"q": [2, 4.5], "k": [0, 8], "type": "full"}"#), &["slices[1]", "4.5"]),
        (slice(r#"{"q": [2, 1e3], "k": [0, 8], "type": "full"}"#), &["slices[1]"]),
        (slice(r#"{"q": [2, 9], "k": [0, 8], "type": "full"}"#), &["slice", "1", "9", "8"]),
        (slice(r#"{"q": [2, 4], "k": [0, 18446744073709551616], "type": "full"}"#), &["slices[1]"]),
        (slice(r#"{"q": [4, 2], "k": [0, 8], "type": "full"}"#), &["slice", "1", "4", "2"]),
        (slice(r#"{"q": [4, 4], "k": [0, 8], "type": "full"}"#), &["slice", "1", "4"]),
        // Both slices and one pair of theirs.
        (
            slice(r#"{"q": [1, 4], "k": [3, 8], "type": "full"}"#),
            &["slices[0]", "slices[1]", "row 1", "column 3"],
        ),
    ];
    for (text, words) in bad {
        folder.write("mask.json", &text);
        for command in ["mask", "plan --cp-size 2 --mask", "attention --output out.safetensors --mask"] {
            let mut words = words.to_vec();
            words.push("mask.json");
            folder.refuses(&format!("{command} mask.json"), &words);
        }
    }
    folder.write("bytes.json", [0xff, 0xfe, 0x00]);
    folder.refuses("mask bytes.json", &["bytes.json"]);
}
