//! Every relative link of every document leads to a file, and to a heading of it where it names one.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use crate::documents::documents;

/// The targets of the links of a document, without those in blocks of code.
fn targets(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (index, part) in text.split("```").enumerate() {
        let links = part.split("](").skip(1).filter_map(|rest| rest.split([')', ' ', '\n']).next());
        found.extend(links.filter(|_| index % 2 == 0).map(str::to_owned));
    }
    found
}

/// The anchors of a document as GitHub makes them of headings.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = text.lines().filter(|line| line.starts_with('#')).map(|line| line.trim_start_matches('#').trim());
    let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
    headings.map(|heading| heading.to_lowercase().chars().filter(kept).collect::<String>().replace(' ', "-")).collect()
}

/// What is wrong with a link of the document at `from`, if anything is.
fn fault(from: &Path, target: &str) -> Option<&'static str> {
    if target.contains("://") || target.starts_with("mailto:") {
        return None;
    }
    let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
    let file = if file.is_empty() { from.to_owned() } else { from.parent()?.join(file) };
    if !file.exists() {
        return Some("leads to no file");
    }
    let is_document = file.extension().is_some_and(|extension| extension == "md");
    let is_known = || fs::read_to_string(&file).is_ok_and(|text| anchors(&text).contains(anchor));
    (is_document && !anchor.is_empty() && !is_known()).then_some("names no heading of its file")
}

#[test]
fn links_lead_somewhere() {
    let (mut links, mut faults) = (0, Vec::new());
    for path in documents() {
        for target in targets(&fs::read_to_string(&path).expect("a readable document")) {
            links += 1;
            if let Some(fault) = fault(&path, &target) {
                faults.push(format!("{}: {target} {fault}", path.display()));
            }
        }
    }
    assert!(links > 100, "{links} links");
    assert!(faults.is_empty(), "{faults:#?}");
}

#[test]
fn wrong_links_are_found() {
    let readme = Path::new(env!("CARGO_MANIFEST_DIR")).join("../README.md");
    assert_eq!(fault(&readme, "docs/nowhere.md"), Some("leads to no file"));
    assert_eq!(fault(&readme, "docs/performance.md#nowhere"), Some("names no heading of its file"));
    assert_eq!(fault(&readme, "docs/performance.md"), None);
    assert_eq!(targets("[a](b#c) ```\n[d](e)\n``` [f](g)"), ["b#c", "g"]);
}
