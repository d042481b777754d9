//! What `docs/adding.md` says is about files that are there.

use std::path::Path;

#[test]
fn every_file_it_names_exists() {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let text = std::fs::read_to_string(root.join("docs/adding.md")).unwrap();
    let quoted = text.split('`').skip(1).step_by(2);
    let named: Vec<&str> = quoted.filter(|word| word.contains('/') && !word.contains(' ')).collect();
    let missing: Vec<&&str> = named.iter().filter(|path| !root.join(path).exists()).collect();
    assert!(named.len() > 40, "{} files are named", named.len());
    assert!(missing.is_empty(), "{missing:?}");
}
