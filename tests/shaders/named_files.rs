//! Documents and comments name shader files and sections that exist.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Markdown, Rust and WGSL files below a folder.
fn texts(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let extension = path.extension().and_then(|extension| extension.to_str());
        if path.is_dir() {
            texts(&path, found);
        } else if matches!(extension, Some("md" | "rs" | "wgsl")) {
            found.push(path);
        }
    }
}

/// What stands in backticks in a comment or a document and names a file: `folder/file.wgsl#section`, or less of it.
fn named(path: &Path, text: &str) -> Vec<String> {
    let is_document = path.extension().is_some_and(|extension| extension == "md");
    let lines = text.lines().filter(|line| is_document || line.trim_start().starts_with("//"));
    let quoted = lines.flat_map(|line| line.split('`').skip(1).step_by(2));
    let names = quoted.filter(|name| name.contains(".wgsl") && !name.contains(['{', ' ']));
    names.map(|name| name.trim_start_matches("shaders/").to_owned()).collect()
}

/// Every `file.wgsl`, `folder/file.wgsl` and both with `#section` that the shaders of the library and of the weights have.
fn names(folder: &Path) -> BTreeSet<String> {
    let mut found = Vec::new();
    texts(folder, &mut found);
    let mut names = BTreeSet::new();
    for path in found {
        let whole = path.strip_prefix(folder).unwrap().to_str().unwrap().replace('\\', "/");
        let text = fs::read_to_string(&path).unwrap();
        let heading = |line: &str| Some(line.strip_prefix("// -------- ")?.strip_suffix(" --------")?.to_owned());
        for name in [&*whole, whole.rsplit('/').next().unwrap()] {
            names.extend(text.lines().filter_map(heading).map(|section| format!("{name}#{section}")));
            names.insert(name.to_owned());
        }
    }
    names
}

#[test]
fn what_is_named_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let names: BTreeSet<String> =
        ["shaders", "weights/shaders"].iter().flat_map(|folder| names(&root.join(folder))).collect();
    let mut found = Vec::new();
    for folder in ["docs", "src", "shaders", "weights/src", "weights/shaders"] {
        texts(&root.join(folder), &mut found);
    }
    let mut count = 0;
    for path in found {
        for name in named(&path, &fs::read_to_string(&path).unwrap()) {
            assert!(names.contains(&name), "{} names {name}", path.display());
            count += 1;
        }
    }
    assert!(count > 50, "{count}");
}
