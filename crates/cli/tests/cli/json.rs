//! The documents that `--json` prints.

use serde_json::Value;

use crate::support::Folder;

/// Small commands, and the schema of what each prints.
const DOCUMENTS: [(&str, &str); 10] = [
    ("plan --mask causal:1k --cp-size 2", "counterpoint.plan/1"),
    ("mask causal:8", "counterpoint.mask/1"),
    ("attention --mask causal:64 --cp-size 2", "counterpoint.attention/1"),
    ("bench plan --mask causal:4k --cp-size 2", "counterpoint.bench-plan/1"),
    ("bench fresh-masks --ranks 2 --tokens 64", "counterpoint.bench-fresh-masks/1"),
    (
        "simulate linear --kind row --tokens 1k --in-features 1k --out-features 1k --tp-size 2",
        "counterpoint.simulate-linear/1",
    ),
    ("simulate attention --mask causal:1k --cp-size 2", "counterpoint.simulate-attention/1"),
    ("simulate model --ranks 8", "counterpoint.simulate-model/1"),
    ("selftest --quick --only tcp", "counterpoint.selftest/1"),
    ("doctor", "counterpoint.doctor/1"),
];

#[test]
fn every_document_says_first_what_it_is() {
    let folder = Folder::new();
    for (line, schema) in DOCUMENTS {
        let ran = folder.run(&format!("{line} --json")).ok();
        let documents: Vec<Value> =
            serde_json::Deserializer::from_str(&ran.stdout).into_iter().map(Result::unwrap).collect();
        assert!(!documents.is_empty(), "{line}");
        assert!(documents.iter().all(|document| document["schema"] == schema), "{line}\n{}", ran.stdout);
        let first = ran.stdout.trim_start_matches(['{', '\n', ' ']);
        assert!(first.starts_with("\"schema\""), "{line}\n{first}");
    }
}

/// What is printed may be given again.
#[test]
fn a_printed_mask_is_a_mask_file() {
    let folder = Folder::new();
    let printed = folder.run("mask varlen-causal:0,3,9 --json").ok().stdout;
    folder.write("mask.json", &printed).write("other.json", printed.replace("mask/1", "plan/1"));
    assert_eq!(folder.run("mask mask.json --json").ok().stdout, printed);
    folder.refuses("mask other.json", &["other.json", "schema", "counterpoint.mask/1"]);
}

const PAGE: &str = include_str!("../../../../docs/json.md");
const SCHEMAS: &str = include_str!("../../../console/src/schema.rs");

/// A document of the page: its schema, the command that prints it where any machine can run it, and the example.
struct Documented<'a> {
    schema: &'a str,
    command: Option<&'a str>,
    example: Value,
}

fn documented() -> Vec<Documented<'static>> {
    let fenced = |section: &'static str, language: &str| -> Option<&'static str> {
        let (_, rest) = section.split_once(&format!("```{language}\n"))?;
        rest.split_once("\n```").map(|(text, _)| text)
    };
    PAGE.split("\n## `")
        .skip(1)
        .map(|section| {
            let (schema, _) = section.split_once('`').unwrap();
            let command = fenced(section, "sh").map(|line| line.strip_prefix("counterpoint ").unwrap());
            let example = serde_json::from_str(fenced(section, "json").unwrap())
                .unwrap_or_else(|error| panic!("{schema}: {error}"));
            Documented { schema, command, example }
        })
        .collect()
}

/// What differs between two documents in keys and types, of lists in their first elements. `null` stands for what is not known.
fn differences(place: &str, example: &Value, real: &Value, found: &mut Vec<String>) {
    match (example, real) {
        (Value::Object(a), Value::Object(b)) => {
            for key in a.keys().chain(b.keys().filter(|key| !a.contains_key(*key))) {
                match (a.get(key), b.get(key)) {
                    (Some(a), Some(b)) => differences(&format!("{place}.{key}"), a, b, found),
                    (Some(_), None) => found.push(format!("{place}.{key} is documented and not printed")),
                    _ => found.push(format!("{place}.{key} is printed and not documented")),
                }
            }
        }
        (Value::Array(a), Value::Array(b)) => {
            if let (Some(a), Some(b)) = (a.first(), b.first()) {
                differences(&format!("{place}[0]"), a, b, found);
            }
        }
        (Value::Null, _) | (_, Value::Null) => {}
        (a, b) if std::mem::discriminant(a) == std::mem::discriminant(b) => {}
        (a, b) => found.push(format!("{place} is documented as {a} and printed as {b}")),
    }
}

/// The page's examples are what commands print: the same keys, the same types.
#[test]
fn documents_are_as_the_page_says() {
    let folder = Folder::new();
    let mut run = 0;
    for Documented { schema, command, example } in documented() {
        assert_eq!(example["schema"], schema);
        let Some(command) = command else { continue };
        let ran = folder.run(command);
        if ran.status == 3 {
            continue;
        }
        let ran = ran.ok();
        let documents = serde_json::Deserializer::from_str(&ran.stdout).into_iter::<Value>();
        let real = documents.map(Result::unwrap).find(|document| document["schema"] == schema);
        let real = real.unwrap_or_else(|| panic!("{command} prints no {schema}:\n{}", ran.stdout));
        let mut found = Vec::new();
        differences("", &example, &real, &mut found);
        assert!(found.is_empty(), "{schema}: {found:#?}");
        run += 1;
    }
    assert!(run >= 15, "{run}");
}

/// Every schema is on the page, and nothing else is.
#[test]
fn every_schema_is_documented() {
    let quoted =
        SCHEMAS.split('"').filter(|text| text.starts_with("counterpoint.") && !text.contains(['{', ' ']));
    let mut schemas: Vec<&str> = quoted.chain([counterpoint_mask_schema()]).collect();
    // One process of a selftest sends it to another.
    schemas.retain(|schema| *schema != "counterpoint.selftest-part/1");
    schemas.sort_unstable();
    schemas.dedup();
    let mut documented: Vec<&str> = documented().iter().map(|document| document.schema).collect();
    documented.sort_unstable();
    assert_eq!(documented, schemas);
}

/// The crate of masks names its own.
fn counterpoint_mask_schema() -> &'static str {
    "counterpoint.mask/1"
}
