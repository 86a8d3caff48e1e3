//! The graph of modules inside each crate: who uses whom, re-exports resolved to where a thing is defined. It has no cycles.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// A module's names from the crate's root on.
type Module = Vec<String>;

#[test]
fn modules_use_each_other_one_way() {
    let mut wrong = Vec::new();
    for entry in fs::read_dir(root().join("crates")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        // Its modules are Python's classes, which return each other.
        if name == "python" {
            continue;
        }
        let tree = Tree::read(&root().join("crates").join(&name).join("src"));
        let edges = tree.edges();
        for knot in knots(&edges) {
            wrong.push(format!("crate {name}: these use each other in a circle: {}", knot.join(", ")));
            let inside = edges.iter().filter(|((from, to), _)| knot.contains(from) && knot.contains(to));
            wrong.extend(inside.map(|((from, to), what)| format!("    {from} uses {to} for {what}")));
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn a_circle_through_a_re_export_is_seen() {
    let sources = [
        ("", "mod a; mod b; mod c; pub use a::inner::Thing;"),
        ("a", "mod inner;\nuse crate::b::Other;"),
        ("a::inner", "pub struct Thing;"),
        ("b", "use crate::{Thing, c::*};\npub struct Other;"),
        ("c", "// use crate::b::Other;\n#[cfg(test)]\nmod tests {\n    use crate::b::Other;\n}"),
    ];
    let tree = Tree::of(sources.map(|(name, text)| (name.to_owned(), text.to_owned())));
    assert_eq!(knots(&tree.edges()), [["a", "b"]]);
    let path = "mod a; mod b;";
    let sources = [("", path), ("a", "fn f() { crate::b::g() }"), ("b", "pub fn g() { super::a::f() }")];
    let tree = Tree::of(sources.map(|(name, text)| (name.to_owned(), text.to_owned())));
    assert_eq!(knots(&tree.edges()), [["a", "b"]]);
}

/// The sources of a crate, by module, without comments and tests.
struct Tree {
    sources: BTreeMap<Module, String>,
    /// What each module re-exports under which name.
    exports: BTreeMap<Module, BTreeMap<String, Vec<String>>>,
}

impl Tree {
    fn read(folder: &Path) -> Self {
        let mut sources = Vec::new();
        let mut folders = vec![(folder.to_owned(), Vec::new())];
        while let Some((folder, module)) = folders.pop() {
            for entry in fs::read_dir(&folder).unwrap() {
                let path = entry.unwrap().path();
                let stem = path.file_stem().unwrap().to_str().unwrap().to_owned();
                if path.is_dir() && stem == "tests" {
                    continue;
                } else if path.is_dir() {
                    folders.push((path, [module.clone(), vec![stem]].concat()));
                } else if path.extension().is_some_and(|extension| extension == "rs") && stem != "tests" {
                    let own =
                        if matches!(&stem[..], "mod" | "lib" | "main") { Vec::new() } else { vec![stem] };
                    let name = [module.clone(), own].concat().join("::");
                    sources.push((name, fs::read_to_string(&path).unwrap()));
                }
            }
        }
        Self::of(sources)
    }

    fn of(sources: impl IntoIterator<Item = (String, String)>) -> Self {
        let named =
            |name: String| name.split("::").filter(|name| !name.is_empty()).map(str::to_owned).collect();
        let sources: BTreeMap<Module, String> =
            sources.into_iter().map(|(name, text)| (named(name), code(&text))).collect();
        let mut tree = Self { sources, exports: BTreeMap::new() };
        for (module, text) in &tree.sources {
            let mut exports = BTreeMap::new();
            for (is_public, path) in uses(text) {
                if let (true, Some(path), Some(last)) = (is_public, tree.absolute(module, &path), path.last())
                {
                    exports.insert(last.clone(), path);
                }
            }
            tree.exports.insert(module.clone(), exports);
        }
        tree
    }

    /// From the crate's root on, if it leads into this crate.
    fn absolute(&self, module: &Module, path: &[String]) -> Option<Vec<String>> {
        let (first, rest) = path.split_first()?;
        match first.as_str() {
            "crate" => Some(rest.to_vec()),
            "self" => Some([module, rest].concat()),
            "super" => {
                let above = &module[..module.len().checked_sub(1)?];
                match rest.first().is_some_and(|next| next == "super") {
                    true => self.absolute(&above.to_vec(), rest),
                    false => Some([above, rest].concat()),
                }
            }
            _ => {
                let inner = [&module[..], &path[..1]].concat();
                self.sources.contains_key(&inner).then(|| [&module[..], path].concat())
            }
        }
    }

    /// The module that defines what a path from the root leads to.
    fn definer(&self, path: &[String], hops: usize) -> Module {
        let mut at = Module::new();
        for (index, name) in path.iter().enumerate() {
            let inner = [&at[..], std::slice::from_ref(name)].concat();
            if self.sources.contains_key(&inner) {
                at = inner;
                continue;
            }
            return match self.exports[&at].get(name).filter(|_| hops > 0) {
                Some(target) => self.definer(&[&target[..], &path[index + 1..]].concat(), hops - 1),
                None => at,
            };
        }
        at
    }

    /// Between modules at the root: who uses whom, and for what.
    fn edges(&self) -> BTreeMap<(String, String), String> {
        let mut edges = BTreeMap::new();
        for (module, text) in &self.sources {
            let paths = uses(text).into_iter().map(|(_, path)| path).chain(paths(text));
            for path in paths.filter_map(|path| self.absolute(module, &path)) {
                let definer = self.definer(&path, 8);
                if let (Some(from), Some(to)) = (module.first(), definer.first())
                    && from != to
                {
                    edges.entry((from.clone(), to.clone())).or_insert_with(|| path.join("::"));
                }
            }
        }
        edges
    }
}

/// The text without comments, and without the tests behind it.
fn code(text: &str) -> String {
    let mut lines = text.lines().filter(|line| !line.trim_start().starts_with("//")).peekable();
    let mut kept = String::new();
    while let Some(line) = lines.next() {
        let tests = line == "#[cfg(test)]"
            && lines.peek().is_some_and(|next| next.contains("mod ") && next.ends_with('{'));
        if tests {
            break;
        }
        kept.push_str(line);
        kept.push('\n');
    }
    kept
}

/// The paths of all `use` declarations, and whether others see them.
fn uses(text: &str) -> Vec<(bool, Vec<String>)> {
    let mut found = Vec::new();
    for (at, _) in text.match_indices("use ") {
        let statement = text[..at].rsplit([';', '}', '{', '\n']).next().unwrap_or_default().trim();
        let is_public = statement.starts_with("pub");
        // Not a word that ends in it, and no prose.
        if !(statement.is_empty() || is_public) {
            continue;
        }
        let Some(end) = text[at..].find(';') else { continue };
        let tree: String = text[at + "use ".len()..at + end].split_whitespace().collect::<Vec<_>>().join(" ");
        expand(&[], &tree, &mut |path| found.push((is_public, path)));
    }
    found
}

fn expand(before: &[String], tree: &str, found: &mut impl FnMut(Vec<String>)) {
    let (head, list) = match tree.find('{') {
        Some(at) => (&tree[..at], tree[at + 1..].rsplit_once('}').map(|(list, _)| list)),
        None => (tree.split(" as ").next().unwrap_or(tree), None),
    };
    let names =
        head.split("::").map(str::trim).filter(|name| !name.is_empty() && *name != "*" && *name != "self");
    let is_relative = before.is_empty() && head.trim_start().starts_with("self");
    let own = if is_relative { vec!["self".to_owned()] } else { Vec::new() };
    let path: Vec<String> = before.iter().cloned().chain(own).chain(names.map(str::to_owned)).collect();
    let Some(list) = list else { return found(path) };
    let (mut depth, mut begin) = (0, 0);
    for (at, letter) in list.char_indices().chain([(list.len(), ',')]) {
        match letter {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                let item = list[begin..at].trim();
                if !item.is_empty() {
                    expand(&path, item, found);
                }
                begin = at + 1;
            }
            _ => {}
        }
    }
}

/// Paths outside `use` declarations that begin at the root or above.
fn paths(text: &str) -> Vec<Vec<String>> {
    let is_name = |letter: char| letter.is_alphanumeric() || letter == '_';
    let starts = text.match_indices("crate::").chain(text.match_indices("super::"));
    let starts = starts
        .filter(|(at, _)| !text[..*at].ends_with(|letter| is_name(letter) || letter == ':' || letter == '$'));
    starts
        .map(|(at, _)| {
            let end = text[at..]
                .find(|letter| !is_name(letter) && letter != ':')
                .map_or(text.len(), |end| at + end);
            text[at..end].split("::").filter(|name| !name.is_empty()).map(str::to_owned).collect()
        })
        .collect()
}

/// Sets of modules in each of which every one reaches every other.
fn knots(edges: &BTreeMap<(String, String), String>) -> Vec<Vec<String>> {
    let reached = |from: &String| {
        let (mut seen, mut open) = (BTreeSet::new(), vec![from.clone()]);
        while let Some(module) = open.pop() {
            for (_, to) in edges.keys().filter(|(from, _)| *from == module) {
                if seen.insert(to.clone()) {
                    open.push(to.clone());
                }
            }
        }
        seen
    };
    let modules: BTreeSet<&String> = edges.keys().map(|(from, _)| from).collect();
    let reach: BTreeMap<&String, BTreeSet<String>> =
        modules.iter().map(|&module| (module, reached(module))).collect();
    let mut knots: Vec<Vec<String>> = Vec::new();
    for (&module, reaches) in &reach {
        if reaches.contains(module) && !knots.iter().flatten().any(|known| known == module) {
            let back = |other: &&String| reach.get(other).is_some_and(|set| set.contains(module));
            knots.push(reaches.iter().filter(back).cloned().collect());
        }
    }
    knots
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}
