//! Tells the command which commit it is built from: a report without one cannot be repeated.
//!
//! `KVPACK_COMMIT` says it where there is no repository.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-env-changed=KVPACK_COMMIT");
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for sources in ["src", "shaders", "cuda", "cli/src", "report/src", "Cargo.lock"] {
        println!("cargo:rerun-if-changed={}", root.join(sources).display());
    }
    let git = |arguments: &[&str]| {
        let output = Command::new("git").arg("-C").arg(&root).args(arguments).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    // Every commit, amended ones too, adds a line here.
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
        let log = root.join(log);
        if log.exists() {
            println!("cargo:rerun-if-changed={}", log.display());
        }
    }
    let commit = std::env::var("KVPACK_COMMIT").ok().filter(|commit| !commit.is_empty()).or_else(|| {
        let commit = git(&["rev-parse", "--short=10", "HEAD"])?;
        let changed = git(&["status", "--porcelain", "--untracked-files=no", "--", "src", "shaders", "cuda", "cli"])?;
        Some(if changed.is_empty() { commit } else { format!("{commit}+") })
    });
    if let Some(commit) = commit {
        println!("cargo:rustc-env=KVPACK_BUILT_FROM={commit}");
    }
}
