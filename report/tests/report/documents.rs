//! The tables and plots of documents match docs/results and the library's recipes, and no line of prose is longer than
//! the code's.
//!
//! `KVPACK_UPDATE=1 cargo test -p kvpack-report --test report documents::` rewrites tables and plots.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use kvpack_report::tables::Device;
use kvpack_report::{RanksReport, read, recipes};

/// Longest line of prose in a document, in characters: that of the code, see rustfmt.toml.
const LINE: usize = 120;

/// Before and behind a generated part: `<!-- made of nvidia-h200: decode -->` … `<!-- end -->`. What is not made of a
/// device is made of the library, or of a source file.
const BEGIN: &str = "<!-- made of ";
const END: &str = "<!-- end -->";

pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Every document of the repository, but for those of others.
pub fn documents() -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = Vec::new();
    for folder in [
        "",
        "docs",
        "docs/results",
        "docs/results/hosts",
        "lab",
        "cli/data",
        "tests/golden",
        "weights",
        "weights/tests/golden",
        "fuzz",
        "hosts/burn",
        "hosts/candle",
        "web",
        "web/npm",
        "cli",
        "device",
        "python",
        "report",
    ] {
        let Ok(entries) = fs::read_dir(root().join(folder)) else { continue };
        let paths = entries.map(|entry| entry.expect("a folder of the repository").path());
        found.extend(paths.filter(|path| path.extension().is_some_and(|extension| extension == "md")));
    }
    found.sort();
    assert!(found.len() >= 5, "README, CHANGELOG, docs: {found:?}");
    found
}

/// A device of docs/results; none where it has not been measured.
fn device(name: &str) -> Option<Device> {
    let file = root().join("docs/results").join(format!("{name}.json"));
    let text = fs::read_to_string(&file).ok()?;
    let measured = read(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    Some(Device::new(measured).unwrap_or_else(|error| panic!("{}: {error}", file.display())))
}

/// A part of what was measured on several GPUs.
fn ranks(name: &str, part: &str) -> String {
    let file = root().join("docs/results/ranks").join(format!("{name}.json"));
    let text = fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let report: RanksReport = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    match part {
        "provenance" => report.provenance(),
        "exchanges" => report.exchange_table(),
        "steps" => report.step_table(),
        part => panic!("documents have no part 'ranks, {part}'"),
    }
}

/// The names of the devices of docs/results.
fn devices() -> Vec<String> {
    let entries = fs::read_dir(root().join("docs/results")).expect("docs/results");
    let paths = entries.map(|entry| entry.expect("a file").path());
    let results = paths.filter(|path| path.extension().is_some_and(|extension| extension == "json"));
    results.map(|path| path.file_stem().expect("a name").to_string_lossy().into_owned()).collect()
}

/// The lines of a source file between `// --- part` and `// --- end`, as a block of code.
fn code(file: &str, part: &str) -> String {
    let text = fs::read_to_string(root().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
    let (begin, end) = (format!("// --- {part}"), "// --- end");
    let behind = text.lines().skip_while(|line| line.trim() != begin).skip(1);
    let lines: Vec<&str> = behind.take_while(|line| line.trim() != end).collect();
    assert!(!lines.is_empty(), "{file} has no lines between '{begin}' and '{end}'");
    let indents = lines.iter().filter(|line| !line.trim().is_empty()).map(|line| line.len() - line.trim_start().len());
    let indent = indents.min().unwrap_or(0);
    let lines = lines.iter().map(|line| line.get(indent..).unwrap_or_default());
    // Doctests have neither the crates nor the types around it.
    format!("```rust,ignore\n{}\n```\n", lines.collect::<Vec<_>>().join("\n"))
}

/// What a part of the document at `path` is made of; nothing where the device has not been measured.
fn made(path: &Path, of: &str, part: &str) -> String {
    if (of, part) == ("the library", "recipes") {
        return recipes::table().expect("recipes");
    }
    if of.ends_with(".rs") {
        return code(of, part);
    }
    if let Some(part) = part.strip_prefix("ranks, ") {
        return ranks(of, part);
    }
    let Some(measured) = device(of) else { return String::new() };
    match part {
        "provenance" => measured.provenance(),
        "decode" => measured.decode(),
        "other formats" => measured.other_formats(),
        "against peers" => measured.against_peers(),
        "plot" => {
            let docs = if path.parent().is_some_and(|folder| folder.ends_with("docs")) { "" } else { "docs/" };
            measured.captioned(&format!("{docs}results/{of}.svg"))
        }
        part => panic!("documents have no part '{part}'"),
    }
}

/// A document with its generated parts regenerated.
fn remade(path: &Path, text: &str) -> String {
    let mut new = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(BEGIN) {
        let line_end = at + rest[at..].find('\n').expect("a line end behind a marker");
        let marker = rest[at + BEGIN.len()..line_end].trim_end().trim_end_matches("-->").trim();
        let (of, part) = marker.split_once(": ").expect("a device and a part");
        let end = line_end + rest[line_end..].find(END).unwrap_or_else(|| panic!("no {END} behind '{marker}'"));
        let made = made(path, of, part);
        new += &rest[..=line_end];
        // A blank line on both sides, or Markdown takes a table for a part of the comment.
        if !made.is_empty() {
            new += &format!("\n{made}\n");
        }
        rest = &rest[end..];
    }
    new + rest
}

/// Rewrites texts that differ if KVPACK_UPDATE is set, and fails if it is not.
fn rewritten(texts: impl Iterator<Item = (PathBuf, String)>) {
    let mut differ = Vec::new();
    for (path, new) in texts {
        if fs::read_to_string(&path).ok().as_ref() == Some(&new) {
            continue;
        }
        if std::env::var_os("KVPACK_UPDATE").is_some() {
            fs::write(&path, new).expect("a writable document");
        } else {
            differ.push(path);
        }
    }
    assert!(
        differ.is_empty(),
        "{differ:?} do not match their sources; \
         rewrite them with KVPACK_UPDATE=1 cargo test -p kvpack-report --test report documents::"
    );
}

#[test]
fn tables_are_made_of_the_results() {
    rewritten(documents().into_iter().map(|path| {
        let text = fs::read_to_string(&path).expect("a readable document");
        let new = remade(&path, &text);
        (path, new)
    }));
}

#[test]
fn plots_are_made_of_the_results() {
    let plots = devices().into_iter().filter_map(|name| {
        let plot = device(&name)?.plot()?;
        Some((root().join("docs/results").join(format!("{name}.svg")), plot.file()))
    });
    rewritten(plots);
}

#[test]
fn every_result_can_be_read() {
    assert!(devices().iter().all(|name| device(name).is_some()));
}

/// The words of a text that hold a digit.
fn numbers(text: &str) -> impl Iterator<Item = &str> {
    let words = text.split(|c: char| !c.is_alphanumeric() && c != '.').map(|word| word.trim_matches('.'));
    words.filter(|word| word.contains(|c: char| c.is_ascii_digit()))
}

/// Whoever reads the first screen finds each of its numbers again, with all that belongs to it.
#[test]
fn numbers_of_the_first_screen_are_on_the_performance_page() {
    let readme = fs::read_to_string(root().join("README.md")).expect("README.md");
    let (first_screen, _) = readme.split_once("\n## ").expect("a second heading");
    let lines: Vec<&str> =
        first_screen.lines().filter(|line| !line.starts_with("![") && !line.starts_with("[![")).collect();
    let first_screen = lines.join("\n");
    let performance = fs::read_to_string(root().join("docs/performance.md")).expect("docs/performance.md");
    // Speed is on the performance page; what recipes lose is in the table below.
    let (_, below) = readme.split_once("\n## ").expect("a second heading");
    let known: BTreeSet<&str> = numbers(&performance).chain(numbers(below)).collect();
    let unknown: Vec<&str> = numbers(&first_screen).filter(|number| !known.contains(number)).collect();
    assert!(numbers(&first_screen).count() > 40, "a table and a plot");
    assert!(unknown.is_empty(), "on the first screen, and neither in docs/performance.md nor below: {unknown:?}");
}

/// A plot that GitHub shows must bring everything: it loads nothing and runs nothing.
#[test]
fn plots_need_no_other_file() {
    for (name, plot) in devices().into_iter().filter_map(|name| Some((name.clone(), device(&name)?.plot()?))) {
        let svg = plot.file();
        assert!(svg.contains("prefers-color-scheme: dark") && svg.contains("class=\"ground\""), "{name}: both schemes");
        for outside in ["<script", "href=", "url(", "@import"] {
            assert!(!svg.contains(outside), "{name}: {outside}");
        }
    }
}

#[test]
fn the_performance_page_is_short() {
    let lines = fs::read_to_string(root().join("docs/performance.md")).expect("docs/performance.md").lines().count();
    assert!(lines <= 120, "docs/performance.md has {lines} lines; what was tried belongs into lab");
}

#[test]
fn lines_of_prose_are_no_longer_than_lines_of_code() {
    let mut long = Vec::new();
    for path in documents() {
        let mut code = false;
        for (number, line) in fs::read_to_string(&path).expect("a readable document").lines().enumerate() {
            if line.trim_start().starts_with("```") {
                code = !code;
            }
            let is_table = line.trim_start().starts_with('|');
            let is_command = line.starts_with("    ");
            // A link cannot be broken.
            let is_one_word = line.split_whitespace().count() <= 2;
            if !code && !is_table && !is_command && !is_one_word && line.chars().count() > LINE {
                long.push(format!("{}:{}", path.display(), number + 1));
            }
        }
    }
    assert!(long.is_empty(), "longer than {LINE} characters: {long:#?}");
}
