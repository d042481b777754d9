//! Documents show what was measured: their tables are those that are made of docs/results, and no line of prose is
//! longer than the code's.
//!
//! `KVPACK_UPDATE=1 cargo test -p kvpack-report --test documents` writes the tables anew.

use std::fs;
use std::path::{Path, PathBuf};

use kvpack_report::read;
use kvpack_report::tables::Device;

/// Longest line of prose in a document, in characters: that of the code, see rustfmt.toml.
const LINE: usize = 120;

/// Before and behind a generated part: `<!-- made of nvidia-h200: decode -->` … `<!-- end -->`.
const BEGIN: &str = "<!-- made of ";
const END: &str = "<!-- end -->";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Every document of the repository, but for those of others.
fn documents() -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = Vec::new();
    for folder in ["", "docs", "docs/lab", "data", "tests/golden", "fuzz", "hosts/burn", "hosts/candle"] {
        let Ok(entries) = fs::read_dir(root().join(folder)) else { continue };
        let paths = entries.map(|entry| entry.expect("a folder of the repository").path());
        found.extend(paths.filter(|path| path.extension().is_some_and(|extension| extension == "md")));
    }
    found.sort();
    assert!(found.len() >= 5, "README, CHANGELOG, docs: {found:?}");
    found
}

/// What a part is made of; nothing where the device has not been measured.
fn made(device: &str, part: &str) -> String {
    let file = root().join("docs/results").join(format!("{device}.json"));
    let Ok(text) = fs::read_to_string(&file) else { return String::new() };
    let measured = read(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let device = Device::new(measured).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    match part {
        "provenance" => device.provenance(),
        "decode" => device.decode(),
        "other formats" => device.other_formats(),
        "against peers" => device.against_peers(),
        part => panic!("documents have no part '{part}'"),
    }
}

/// A document with its generated parts made anew.
fn remade(text: &str) -> String {
    let mut new = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(BEGIN) {
        let line_end = at + rest[at..].find('\n').expect("a line end behind a marker");
        let marker = rest[at + BEGIN.len()..line_end].trim_end().trim_end_matches("-->").trim();
        let (device, part) = marker.split_once(": ").expect("a device and a part");
        let end = line_end + rest[line_end..].find(END).unwrap_or_else(|| panic!("no {END} behind '{marker}'"));
        let made = made(device, part);
        new += &rest[..=line_end];
        // A blank line on both sides, or Markdown takes a table for a part of the comment.
        if !made.is_empty() {
            new += &format!("\n{made}\n");
        }
        rest = &rest[end..];
    }
    new + rest
}

#[test]
fn tables_are_made_of_the_results() {
    let mut differ = Vec::new();
    for path in documents() {
        let text = fs::read_to_string(&path).expect("a readable document");
        let remade = remade(&text);
        if remade != text {
            if std::env::var_os("KVPACK_UPDATE").is_some() {
                fs::write(&path, remade).expect("a writable document");
            } else {
                differ.push(path);
            }
        }
    }
    assert!(
        differ.is_empty(),
        "{differ:?} do not show what lies in docs/results; \
         write them anew with KVPACK_UPDATE=1 cargo test -p kvpack-report --test documents"
    );
}

#[test]
fn every_result_can_be_read() {
    for entry in fs::read_dir(root().join("docs/results")).expect("docs/results") {
        let path = entry.expect("a file").path();
        if path.extension().is_some_and(|extension| extension == "json") {
            let text = fs::read_to_string(&path).expect("a readable result");
            let measured = read(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            Device::new(measured).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        }
    }
}

#[test]
fn the_performance_page_is_short() {
    let lines = fs::read_to_string(root().join("docs/performance.md")).expect("docs/performance.md").lines().count();
    assert!(lines <= 120, "docs/performance.md has {lines} lines; what was tried belongs into docs/lab");
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
            // A link cannot be broken.
            let is_one_word = line.split_whitespace().count() <= 2;
            if !code && !is_table && !is_one_word && line.chars().count() > LINE {
                long.push(format!("{}:{}", path.display(), number + 1));
            }
        }
    }
    assert!(long.is_empty(), "longer than {LINE} characters: {long:#?}");
}
