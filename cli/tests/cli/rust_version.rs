//! The promised Rust version is enough for every crate that Cargo.lock pins, and build.rs looks at every crate of the
//! checkout that the command is made of.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

/// Major, minor and patch of a version.
fn version(text: &str) -> [u32; 3] {
    let mut parts = text.split('.').map(|part| part.parse().unwrap_or_else(|_| panic!("{text} is no Rust version")));
    [(); 3].map(|()| parts.next().unwrap_or(0))
}

/// What Cargo knows of the packages.
fn metadata() -> Value {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let arguments = ["metadata", "--locked", "--offline", "--all-features", "--format-version", "1"];
    let output = Command::new(cargo).args(arguments).current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// A changed file makes the commit of a build one with a `+`, in whichever crate it is.
#[test]
fn the_build_sees_changes_of_every_crate() {
    let (metadata, build) = (metadata(), include_str!("../../build.rs"));
    let root = Path::new(metadata["workspace_root"].as_str().unwrap());
    let (mut crates, mut at) = (vec![Path::new(env!("CARGO_MANIFEST_DIR")).to_owned()], 0);
    while let Some(folder) = crates.get(at).cloned() {
        let of = |package: &&Value| Path::new(package["manifest_path"].as_str().unwrap()).parent() == Some(&folder);
        let package = metadata["packages"].as_array().unwrap().iter().find(of).expect("a package");
        let needed = package["dependencies"].as_array().unwrap().iter().filter(|needed| needed["kind"] != "dev");
        for path in needed.filter_map(|needed| needed["path"].as_str()) {
            if !crates.iter().any(|known| known == Path::new(path)) {
                crates.push(path.into());
            }
        }
        at += 1;
    }
    assert!(crates.len() >= 5, "{crates:?}");
    let sources =
        crates.iter().flat_map(|folder| ["Cargo.toml", "src", "shaders", "cuda"].map(|part| folder.join(part)));
    for source in sources.filter(|source| source.exists()).chain([root.join("Cargo.lock")]) {
        let named = format!("\"{}\"", source.strip_prefix(root).unwrap().display()).replace('\\', "/");
        assert!(build.contains(&named), "build.rs does not look at {named}");
    }
}

#[test]
fn no_pinned_crate_needs_a_newer_compiler() {
    let metadata = metadata();
    let promised = env!("CARGO_PKG_RUST_VERSION");
    let packages = metadata["packages"].as_array().unwrap();
    assert!(packages.len() > 100, "all dependencies are looked at");
    let newer: Vec<String> = packages
        .iter()
        .filter(|package| package["rust_version"].as_str().is_some_and(|needed| version(needed) > version(promised)))
        .map(|package| format!("{} {} needs {}", package["name"], package["version"], package["rust_version"]))
        .collect();
    assert!(
        newer.is_empty(),
        "rust-version is {promised}, but {newer:?}; pin older ones with `cargo update --precise`"
    );
}
