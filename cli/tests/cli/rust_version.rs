//! The promised Rust version is enough for every crate that Cargo.lock pins.

use std::process::Command;

use serde_json::Value;

/// Major, minor and patch of a version.
fn version(text: &str) -> [u32; 3] {
    let mut parts = text.split('.').map(|part| part.parse().unwrap_or_else(|_| panic!("{text} is no Rust version")));
    [(); 3].map(|()| parts.next().unwrap_or(0))
}

#[test]
fn no_pinned_crate_needs_a_newer_compiler() {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let arguments = ["metadata", "--locked", "--offline", "--all-features", "--format-version", "1"];
    let output = Command::new(cargo).args(arguments).current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
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
