//! Masks as text: builder expressions and JSON, and what is said about wrong ones.

use std::time::Instant;

use counterpoint_mask::expression::BUILDERS;
use counterpoint_mask::{AttnSlice, Documents, Mask, MaskError, MaskPreset, MaskType, Range, Window};
use proptest::prelude::*;

/// The files that exist in these tests.
fn read(path: &str) -> Result<String, String> {
    match path {
        "lengths.txt" => Ok("\u{feff}100\r\n\r\n 300 \r\n0\r\n1k\r\n".to_owned()),
        "one_line.txt" => Ok("0, 12, 30\n".to_owned()),
        "many_lines.txt" => Ok("0,\n12,\n30,\n".to_owned()),
        "numpy.txt" => Ok("[ 0 12\n 30]\n".to_owned()),
        "brackets.txt" => Ok("[\n  0,\n  12,\n  30\n]\n".to_owned()),
        "commas.txt" => Ok("[12,18]".to_owned()),
        "gap.txt" => Ok("0,,12\n".to_owned()),
        "bad.txt" => Ok("100\n2.5\n".to_owned()),
        "rows.txt" => Ok("\u{feff}100\n011\n".to_owned()),
        "mask.json" => Ok(Mask::causal(16).unwrap().to_json()),
        "broken.json" => Ok("{\"seqlen_q\": 4".to_owned()),
        _ => Err("no such file".to_owned()),
    }
}

fn parse(text: &str) -> Mask {
    Mask::parse(text, &read).unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn refusal(text: &str) -> String {
    match Mask::parse(text, &read) {
        Ok(mask) => panic!("{text} was accepted: {mask:?}"),
        Err(error) => error.to_string(),
    }
}

fn documents(lengths: &[usize]) -> Documents {
    Documents::from_lengths(lengths.iter().copied()).unwrap()
}

#[test]
fn expressions() {
    let window = |left, right, global| Window { left, right, global };
    let cases = [
        ("full:4096", Mask::full(4096)),
        ("full:4k", Mask::full(4096)),
        ("full:1M", Mask::full(1 << 20)),
        (" full: 8 , keys = 2k ", Mask::cross_full(8, 2048)),
        ("causal:100", Mask::causal(100)),
        ("causal:2k,keys=1M", Mask::cross_causal(2048, 1 << 20)),
        ("varlen-full:0,100,400", Mask::full(documents(&[100, 300]))),
        ("varlen-causal:0,100,400", Mask::causal(documents(&[100, 300]))),
        ("varlen-causal:0,100,100,400", Mask::causal(documents(&[100, 0, 300]))),
        ("varlen-causal:lengths=100,300", Mask::causal(documents(&[100, 300]))),
        ("varlen-causal:lengths=@lengths.txt", Mask::causal(documents(&[100, 300, 0, 1024]))),
        ("varlen-causal:@lengths.txt", Err(MaskError::StartsNotAtZero { first: Some(100) })),
        ("varlen-full:0,2,5,keys=0,7,9", Mask::cross_full(documents(&[2, 3]), documents(&[7, 2]))),
        ("varlen-full:lengths=2,3,key-lengths=7,2", Mask::cross_full(documents(&[2, 3]), documents(&[7, 2]))),
        ("sliding-window:8k,left=1023,right=0", Mask::sliding_window(8192, window(Some(1023), Some(0), 0))),
        (
            "sliding-window:8k,right=0,global=64,left=1k",
            Mask::sliding_window(8192, window(Some(1024), Some(0), 64)),
        ),
        ("sliding-window:64,left=all,right=4", Mask::sliding_window(64, window(None, Some(4), 0))),
        (
            "varlen-sliding-window:lengths=100,300,left=7,right=2",
            Mask::sliding_window(documents(&[100, 300]), window(Some(7), Some(2), 0)),
        ),
        ("block-causal:2000,block=512", Mask::block_causal(2000, 512)),
        ("varlen-block-causal:0,4096,8192,block=512", Mask::block_causal(documents(&[4096, 4096]), 512)),
        ("sliding-window:64,left=3,right=all", Mask::sliding_window(64, window(Some(3), None, 0))),
        ("varlen-causal:[0, 100, 400]", Mask::causal(documents(&[100, 300]))),
        ("varlen-causal:lengths=[100,300]", Mask::causal(documents(&[100, 300]))),
        ("varlen-full:[0,2,5],keys=[0, 7, 9]", Mask::cross_full(documents(&[2, 3]), documents(&[7, 2]))),
        ("varlen-causal:@one_line.txt", Mask::causal(documents(&[12, 18]))),
        ("varlen-causal:@many_lines.txt", Mask::causal(documents(&[12, 18]))),
        ("varlen-causal:@numpy.txt", Mask::causal(documents(&[12, 18]))),
        ("varlen-causal:@brackets.txt", Mask::causal(documents(&[12, 18]))),
        ("varlen-causal:lengths=@commas.txt", Mask::causal(documents(&[12, 18]))),
        ("prefix-lm:1k,prefix=100", Mask::prefix_lm(1024, 100)),
        ("prefix-lm:10,prefix=10", Mask::full(10)),
        ("varlen-prefix-lm:0,50,90,prefix=10,40", Mask::prefix_lm_each(documents(&[50, 40]), &[10, 40])),
        ("varlen-prefix-lm:0,50,50,90,prefix=9", Mask::prefix_lm_each(documents(&[50, 0, 40]), &[9, 0, 9])),
        ("varlen-prefix-lm:0,50,90,prefix=10", Mask::prefix_lm(documents(&[50, 40]), 10)),
        ("shared-question:128;128,256,512", Mask::shared_question(128, documents(&[128, 256, 512]))),
        ("shared-question:1k;@lengths.txt", Mask::shared_question(1024, documents(&[100, 300, 0, 1024]))),
        ("last-global:0,100,400,global=50", Mask::last_global(documents(&[100, 300]), 1, 50)),
        ("last-global:lengths=100,global=50,block=10", Mask::last_global(100, 10, 50)),
        (
            "block-sparse:100,block=40,rows=100,011,101",
            Mask::block_sparse(100, 100, 40, 40, &[(0, 0), (1, 1), (1, 2), (2, 0), (2, 2)]),
        ),
        (
            "block-sparse:8,keys=12,block=4,rows=@rows.txt",
            Mask::block_sparse(8, 12, 4, 4, &[(0, 0), (1, 1), (1, 2)]),
        ),
        ("preset:block_causal_last_global,8k", Mask::last_global(6 << 10, 2 << 10, 2 << 10)),
        ("preset: sw_global, 4k", MaskPreset::SwGlobal.build(4 << 10)),
        ("mask.json", Mask::causal(16)),
    ];
    for builder in BUILDERS {
        let named = |text: &str| text.trim().split_once(':').is_some_and(|(name, _)| name == builder.name);
        assert!(cases.iter().any(|(text, _)| named(text)), "no case for {}", builder.name);
    }
    for (text, expected) in cases {
        match expected {
            Ok(mask) => assert_eq!(parse(text), mask, "{text}"),
            Err(error) => assert!(refusal(text).contains(&error.to_string()), "{text}: {}", refusal(text)),
        }
    }
    assert_eq!("causal:12".parse(), Mask::causal(12));
}

#[test]
fn wrong_expressions_get_one_clear_sentence() {
    let cases = [
        ("casual:4k", "unknown mask builder \"casual\"; known builders: full, causal, varlen-full, "),
        ("causal", "causal: arguments: missing; write causal:S[,keys=S]"),
        ("causal:", "causal: sequence: missing; the first value is its length, for example 4k"),
        ("causal:0", "causal: seqlen_q is 0; "),
        ("preset:causal", "preset: name: write its name, a comma and its length; names: full, causal, "),
        ("preset:casual,4k", "preset: name: no mask is named \"casual\"; use full, causal, varlen_full, "),
        ("preset:causal,x", "preset: sequence: expected a whole number such as 4096, 4k or 1M, got \"x\""),
        ("causal:-4", "causal: sequence: expected a whole number such as 4096, 4k or 1M, got \"-4\""),
        ("causal:4.5", "causal: sequence: expected a whole number such as 4096, 4k or 1M, got \"4.5\""),
        ("causal:4e3", "got \"4e3\""),
        ("causal:4kk", "got \"4kk\""),
        ("causal:k", "got \"k\""),
        ("causal:4m", "got \"4m\""),
        ("causal:4096M", "causal: sequence: 4096M is too large; at most 4294967295 tokens are supported"),
        ("causal:99999999999999999999999", "99999999999999999999999 is too large"),
        ("causal:18446744073709551615k", "18446744073709551615k is too large"),
        (
            "causal:4k,8k",
            "causal: sequence: expected one length, got 2 values; options are written name=value",
        ),
        ("causal:4k,block=3", "causal: block: unknown option; known: keys"),
        ("causal:4k,keys=1k,keys=2k", "causal: keys: given twice"),
        ("causal:4k,keys=", "causal: keys: expected a whole number such as 4096, 4k or 1M, got \"\""),
        ("causal:4k,keys=1,2", "causal: keys: expected one number, got 2 values"),
        (
            "varlen-causal:",
            "varlen-causal: starts: missing; give cumulative starts such as 0,100,400, or lengths=",
        ),
        ("varlen-causal:100,400", "varlen-causal: starts: cumulative starts begin with 0, not with 100"),
        ("varlen-causal:0", "varlen-causal: seqlen_q is 0"),
        (
            "varlen-causal:0,9,4",
            "varlen-causal: starts: cumulative starts must not decrease, but number 2 is 4 after 9",
        ),
        ("varlen-causal:0,9,x", "varlen-causal: starts[2]: expected a whole number"),
        (
            "varlen-causal:0,9,,12",
            "varlen-causal: starts[2]: expected a whole number such as 4096, 4k or 1M, got \"\"",
        ),
        ("varlen-causal:0,9,lengths=9", "varlen-causal: lengths: give either starts or lengths, not both"),
        (
            "varlen-causal:lengths=1M,4095M",
            "varlen-causal: lengths: the lengths up to number 1 add up to more than",
        ),
        ("varlen-causal:lengths=@none.txt", "varlen-causal: lengths: cannot read \"none.txt\": no such file"),
        ("varlen-causal:lengths=@bad.txt", "varlen-causal: lengths: bad.txt:2: expected a whole number"),
        (
            "varlen-causal:lengths=@lengths.txt,5",
            "varlen-causal: lengths: nothing may follow the file \"lengths.txt\"",
        ),
        (
            "varlen-full:0,4,8,keys=0,8",
            "varlen-full: 2 documents of queries cannot be paired with 1 documents of keys",
        ),
        ("sliding-window:4k", "sliding-window: left: missing; give left=N, or left=all for no limit"),
        ("sliding-window:16,left=3", "sliding-window: right: missing; give right=0 for a causal window"),
        ("sliding-window:16,right=3", "sliding-window: left: missing"),
        ("sliding-window:16,left=3,right=none", "sliding-window: right: expected a whole number"),
        (
            "varlen-causal:[0,12,30",
            "varlen-causal: starts: a list begins with [ and ends with ], or has neither",
        ),
        ("varlen-causal:0,12,30]", "varlen-causal: starts: a list begins with ["),
        ("varlen-causal:[]", "varlen-causal: starts: cumulative starts begin with 0, not with nothing"),
        ("varlen-causal:[0,[12],30]", "varlen-causal: starts[1]: expected a whole number"),
        ("varlen-causal:@gap.txt", "varlen-causal: starts: gap.txt:1: nothing stands between two commas"),
        (
            "prefix-lm:10,prefix=11",
            "prefix-lm: the prefix of document 0 has 11 tokens and the document only 10",
        ),
        ("varlen-prefix-lm:0,50,60,prefix=11", "varlen-prefix-lm: the prefix of document 1 has 11 tokens"),
        ("varlen-prefix-lm:0,50,60,prefix=1,2,3", "3 prefixes cannot be those of 2 documents"),
        ("sliding-window:4k,left=-1", "sliding-window: left: expected a whole number"),
        ("block-causal:4k", "block-causal: block: missing; write block=N"),
        ("block-causal:4k,block=0", "block-causal: block is 0; a block needs at least one token"),
        ("block-causal:4000M,block=2", "block-causal: this mask would need more than 4194304 slices"),
        ("prefix-lm:4k", "prefix-lm: prefix: missing"),
        (
            "shared-question:128",
            "shared-question: answers: missing; write the question's length, a semicolon,",
        ),
        ("shared-question:128;", "shared-question: answers[0]: expected a whole number"),
        ("shared-question:;5", "shared-question: question: expected a whole number"),
        ("shared-question:128;5,x=3", "shared-question: x: unknown option; there are none here"),
        ("last-global:0,5", "last-global: global: missing"),
        (
            "block-sparse:8,block=4",
            "block-sparse: rows: missing; give one word of 0 and 1 for each block row",
        ),
        ("block-sparse:8,block=4,rows=10,2", "block-sparse: rows[1]: expected only 0 and 1, got \"2\""),
        (
            "block-sparse:8,block=4,rows=10,1",
            "block-sparse: rows[1]: expected 2 digits, one for each block column, got 1",
        ),
        (
            "block-sparse:8,block=4,rows=1000,11",
            "block-sparse: rows[0]: expected 2 digits, one for each block column, got 4",
        ),
        ("block-sparse:8,block=4,rows=10,001", "block-sparse: rows[1]: expected 2 digits"),
        (
            "block-sparse:8,block=4,rows=11",
            "block-sparse: rows: expected 2 words, one for each block row, got 1",
        ),
        ("block-sparse:8,block=4,rows=11,11,11", "block-sparse: rows: expected 2 words"),
        ("block-sparse:8,block=0,rows=1", "block-sparse: block is 0; a block needs at least one token"),
        ("none.json", "cannot read \"none.json\": no such file"),
        ("./causal:4k", "cannot read \"./causal:4k\": no such file"),
        ("", "cannot read \"\""),
        ("broken.json", "broken.json: the JSON ends too early"),
    ];
    for (text, expected) in cases {
        let message = refusal(text);
        assert!(message.contains(expected), "{text}\n  said:     {message}\n  expected: {expected}");
        assert!(!message.contains('\n'), "{message}");
    }
    assert!("varlen-full:lengths=@lengths.txt".parse::<Mask>().is_err());
}

proptest! {
    #![proptest_config(crate::cases::cases(2000))]

    /// Nothing that a person can type makes the parser panic, and every refusal is one line.
    #[test]
    fn any_text_is_answered(
        name in prop::sample::select(BUILDERS.iter().map(|builder| builder.name).collect::<Vec<_>>()),
        rest in "[0-9,;=@kMa-z \\[\\]\\-é\n]{0,30}",
        junk in ".{0,30}",
    ) {
        // Long masks of tiny blocks are legal and slow; they have their own test.
        prop_assume!(!(name.contains("block") || name.contains("global")) || !rest.contains(['k', 'M']));
        for text in [format!("{name}:{rest}"), format!("{name}:8,{rest}"), junk] {
            if let Err(error) = Mask::parse(&text, &|_| Err("no such file".to_owned())) {
                let message = error.to_string();
                prop_assert!(!message.is_empty() && !message.contains('\n'), "{:?}", message);
            }
        }
    }

    #[test]
    fn any_json_is_answered(text in "[\\[\\]{}:,\"0-9a-z_. \\-]{0,60}", cut in 0_usize..90) {
        prop_assert!(Mask::from_json(&text).is_err());
        let whole = Mask::causal(4).unwrap().to_json();
        prop_assert!(Mask::from_json(&whole[..cut.min(whole.trim_end().len() - 1)]).is_err());
    }

    #[test]
    fn json_is_read_as_written(lengths in prop::collection::vec((0_usize..20, 0_u8..4), 0..8)) {
        let types = [MaskType::Full, MaskType::Causal, MaskType::InvCausal, MaskType::BiCausal];
        let mut slices = Vec::new();
        let mut start = 0;
        for (length, mask_type) in lengths {
            let range = Range::new(start, start + length + 1);
            slices.push(AttnSlice::new(range, range, types[usize::from(mask_type)]));
            start = range.end;
        }
        let mask = Mask::new(start + 1, start + 7, slices).unwrap();
        prop_assert_eq!(Mask::from_json(&mask.to_json()), Ok(mask.clone()));
        let compact = serde_json::to_string(&mask).unwrap();
        prop_assert_eq!(&serde_json::from_str::<Mask>(&compact).unwrap(), &mask);
        prop_assert_eq!(Mask::from_json(&compact), Ok(mask));
    }
}

#[test]
fn the_documented_form() {
    let text = r#"{"seqlen_q": 1024, "seqlen_k": 1024, "slices": [{"q": [0, 512], "k": [0, 1024], "type": "causal"},
        {"type": "bi_causal", "k": [100, 700], "q": [512, 600]}, {"q": [600, 601], "k": [0, 1], "type": "full"},
        {"q": [700, 800], "k": [0, 100], "type": "inv_causal"}]}"#;
    let slice = |q: (usize, usize), k: (usize, usize), t| {
        AttnSlice::new(Range::new(q.0, q.1), Range::new(k.0, k.1), t)
    };
    let slices = vec![
        slice((0, 512), (0, 1024), MaskType::Causal),
        slice((512, 600), (100, 700), MaskType::BiCausal),
        slice((600, 601), (0, 1), MaskType::Full),
        slice((700, 800), (0, 100), MaskType::InvCausal),
    ];
    assert_eq!(Mask::from_json(text), Mask::new(1024, 1024, slices));
    assert_eq!(
        Mask::causal(8).unwrap().to_json(),
        "{\n  \"seqlen_q\": 8,\n  \"seqlen_k\": 8,\n  \"slices\": [\n    {\"q\": [0, 8], \"k\": [0, 8], \"type\": \"causal\"}\n  ]\n}\n"
    );
}

#[test]
fn wrong_json_gets_one_clear_sentence_with_its_place() {
    let one = |slice: &str| format!(r#"{{"seqlen_q": 8, "seqlen_k": 8, "slices": [{slice}]}}"#);
    let good = r#"{"q": [0, 4], "k": [0, 4], "type": "full"}"#;
    let whole = "expected a whole number from 0 to 4294967295, got ";
    let cases = [
        (String::new(), "the JSON ends too early; something is not closed".to_owned()),
        ("hello".to_owned(), "this is not JSON: expected value (line 1, column 1)".to_owned()),
        ("[1, 2]".to_owned(), "expected an object with seqlen_q, seqlen_k and slices, got a list".to_owned()),
        ("[8, 8, []]".to_owned(), "expected an object with seqlen_q, seqlen_k and slices, got a list".to_owned()),
        (one("[[0, 4], [0, 4], \"full\"]"), "slices[0]: expected an object with q, k and type, got a list".to_owned()),
        ("null".to_owned(), "expected an object with seqlen_q, seqlen_k and slices, got null".to_owned()),
        (one(good) + "x", "this is not JSON: trailing characters".to_owned()),
        (one(good).replace("]}", "],}"), "this is not JSON: trailing comma".to_owned()),
        (one(good).replace("\"seqlen_q\": 8,", ""), "missing field `seqlen_q`".to_owned()),
        (one(good).replace("\"seqlen_q\": 8", "\"seqlen_q\": -8"), format!("seqlen_q: {whole}-8")),
        (one(good).replace("\"seqlen_q\": 8", "\"seqlen_q\": 8,\"seqlen_q\": 8"), "duplicate field `seqlen_q`".to_owned()),
        (one(good).replace("\"seqlen_k\": 8", "\"seqlen_k\": 4294967296"), format!("seqlen_k: {whole}4294967296")),
        (one(good).replace("\"slices\"", "\"slice\""), "unknown field `slice`, expected one of `seqlen_q`, `seqlen_k`, `slices`".to_owned()),
        (one(good).replace("{\"seqlen_q\"", "{\"schema\": \"counterpoint.plan/1\", \"seqlen_q\""), "schema: expected counterpoint.mask/1, got \"counterpoint.plan/1\"".to_owned()),
        (one("3"), "slices[0]: expected an object with q, k and type, got 3".to_owned()),
        (one(&format!("{good}, {}", good.replace("[0, 4]", "[0, -1]"))), format!("slices[1].q[1]: {whole}-1")),
        (one(&good.replace("\"k\": [0, 4]", "\"k\": [0.5, 4]")), format!("slices[0].k[0]: {whole}0.5")),
        (one(&good.replace("\"k\": [0, 4]", "\"k\": [0, 1e30]")), format!("slices[0].k[1]: {whole}1e+30")),
        (one(&good.replace("\"k\": [0, 4]", "\"k\": [0, 1e999]")), "slices[0].k[1]: this number is too large; at most 4294967295 tokens are supported".to_owned()),
        (one(&good.replace("\"k\": [0, 4]", "\"k\": [0, 18446744073709551616]")), format!("slices[0].k[1]: {whole}")),
        (one(&good.replace("\"k\": [0, 4]", "\"k\": [0, \"4\"]")), format!("slices[0].k[1]: {whole}\"4\"")),
        (one(&good.replace("\"k\": [0, 4]", "\"k\": [0, true]")), format!("slices[0].k[1]: {whole}true")),
        (one(&good.replace("\"k\": [0, 4]", "\"k\": [0, null]")), format!("slices[0].k[1]: {whole}null")),
        (one(&good.replace("\"k\": [0, 4]", "\"k\": [0, [4]]")), format!("slices[0].k[1]: {whole}a list")),
        (one(&good.replace("\"k\": [0, 4]", "\"k\": [0]")), "slices[0].k: expected two numbers [start, end], got 1 number".to_owned()),
        (one(&good.replace("\"k\": [0, 4]", "\"k\": []")), "slices[0].k: expected two numbers [start, end], got 0 numbers".to_owned()),
        (one(&good.replace("\"k\": [0, 4]", "\"k\": [0, 4, 5]")), "slices[0].k: expected two numbers [start, end], got 3 numbers".to_owned()),
        (one(&good.replace("\"k\": [0, 4]", "\"k\": 4")), "slices[0].k: expected two numbers [start, end], got 4".to_owned()),
        (one(&good.replace("\"k\": [0, 4], ", "")), "slices[0]: missing field `k`".to_owned()),
        (one(&good.replace("\"k\"", "\"kk\"")), "unknown field `kk`, expected one of `q`, `k`, `type`".to_owned()),
        (one(&good.replace("\"full\"", "\"diagonal\"")), "slices[0].type: expected one of full, causal, inv_causal, bi_causal, got \"diagonal\"".to_owned()),
        (one(&good.replace("\"k\"", "\"a\\nb\"")), "unknown field `a\\nb`, expected one of".to_owned()),
        (one(&good.replace("\"full\"", &format!("\"{}\"", "x".repeat(5000)))), "xxx… (line 1, column ".to_owned()),
        (one(&good.replace("\"full\"", "1")), "slices[0].type: expected one of full, causal, inv_causal, bi_causal, got 1".to_owned()),
        (one(&good.replace("\"full\"", "null")), "slices[0].type: expected one of full, causal, inv_causal, bi_causal, got null".to_owned()),
        (one(&good.replace("\"full\"", "[]")), "slices[0].type: expected one of full, causal, inv_causal, bi_causal, got a list".to_owned()),
        (one(&good.replace("\"full\"", "{\"full\": null}")), "slices[0].type: expected one of full, causal, inv_causal, bi_causal, got an object".to_owned()),
        (one("").replace("[]", "{}"), "slices: expected a list, got an object".to_owned()),
        (one(&good.replace("[0, 4]", "[-0.5, 4]")), format!("slices[0].q[0]: {whole}-0.5")),
        (one(&good.replace("[0, 4]", "[4, 0]")), "slices[0].q: the range [4, 0) is reversed".to_owned()),
        (one(&good.replace("[0, 4]", "[4, 4]")), "slices[0].q: the range [4, 4) is empty".to_owned()),
        (one(&good.replace("[0, 4]", "[4, 9]")), "slices[0].q: the range [4, 9) is outside the sequence of 8 tokens; end it at 8 or before, or make seqlen_q larger".to_owned()),
        (one(&format!("{good},{good}")), "slices[0] and slices[1] overlap: both hold row 0, column 0".to_owned()),
    ];
    for (text, expected) in cases {
        let message = match Mask::from_json(&text) {
            Ok(_) => panic!("{text} was accepted"),
            Err(error) => error.to_string(),
        };
        assert!(message.contains(&expected), "{text}\n  said:     {message}\n  expected: {expected}");
        assert!(
            message.len() < 400
                && !message.contains('\n')
                && !message.contains("invalid")
                && !message.contains("integer"),
            "{message}"
        );
    }
}

/// What some editors and some writers of numbers put there, and means nothing.
#[test]
fn byte_order_marks_and_minus_zero() {
    let mask = Mask::causal(8).unwrap();
    let text = mask.to_json();
    assert_eq!(Mask::from_json(&format!("\u{feff}{text}")), Ok(mask.clone()));
    assert_eq!(Mask::from_json(&text.replace("[0,", "[-0,")), Ok(mask));
}

#[test]
fn a_hundred_thousand_slices_are_read_fast() {
    let mask = Mask::block_causal(200_000, 2).unwrap();
    assert_eq!(mask.slices().len(), 100_000);
    let text = mask.to_json();
    let started = Instant::now();
    let again = Mask::from_json(&text).unwrap();
    let seconds = started.elapsed().as_secs_f64();
    println!("100,000 slices read and validated in {seconds:.3} s");
    assert_eq!(again, mask);
    assert!(seconds < 5.0, "{seconds} s");
}
