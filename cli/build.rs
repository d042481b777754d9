//! Tells the command which commit it is built from: a report without one cannot be repeated.
//!
//! `KVPACK_COMMIT` says it where it is set. A package of a registry has it in `.cargo_vcs_info.json`; a checkout asks
//! git.

use std::path::Path;
use std::process::Command;

/// What the command is made of, from the root of the checkout: the sources of each of its crates, and what chooses the
/// crates of others.
const SOURCES: [&str; 17] = [
    "Cargo.toml",
    "Cargo.lock",
    "src",
    "shaders",
    "cuda",
    "cli/Cargo.toml",
    "cli/build.rs",
    "cli/src",
    "device/Cargo.toml",
    "device/src",
    "device/cuda",
    "report/Cargo.toml",
    "report/src",
    "weights/Cargo.toml",
    "weights/src",
    "weights/shaders",
    "weights/cuda",
];

fn main() {
    println!("cargo:rerun-if-env-changed=KVPACK_COMMIT");
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let given = std::env::var("KVPACK_COMMIT").ok().filter(|commit| !commit.is_empty());
    let commit = given.or_else(|| of_package(package)).or_else(|| of_checkout(&package.join("..")));
    let version = env!("CARGO_PKG_VERSION");
    match commit {
        Some(commit) => {
            println!("cargo:rustc-env=KVPACK_BUILT_FROM={commit}");
            println!("cargo:rustc-env=KVPACK_VERSION={version} ({commit})");
        }
        None => println!("cargo:rustc-env=KVPACK_VERSION={version}"),
    }
}

/// The commit that `cargo package` wrote into a package.
fn of_package(package: &Path) -> Option<String> {
    let text = std::fs::read_to_string(package.join(".cargo_vcs_info.json")).ok()?;
    let (_, rest) = text.split_once("\"sha1\"")?;
    let commit: String =
        rest.chars().skip_while(|c| !c.is_ascii_hexdigit()).take_while(char::is_ascii_hexdigit).collect();
    (commit.len() >= 10).then(|| commit[..10].to_owned())
}

/// The commit of the checkout, with a `+` behind it where files of the command have been changed. A package that is
/// unpacked within some other repository is not that repository's.
fn of_checkout(root: &Path) -> Option<String> {
    if !root.join(".git").exists() {
        return None;
    }
    for source in SOURCES {
        println!("cargo:rerun-if-changed={}", root.join(source).display());
    }
    let git = |arguments: &[&str]| {
        let output = Command::new("git").arg("-C").arg(root).args(arguments).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    // Every commit, amended ones too, adds a line here.
    if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"]) {
        let log = root.join(log);
        if log.exists() {
            println!("cargo:rerun-if-changed={}", log.display());
        }
    }
    let commit = git(&["rev-parse", "--short=10", "HEAD"])?;
    let status = ["status", "--porcelain", "--untracked-files=no", "--"];
    let changed = git(&[&status[..], &SOURCES].concat())?;
    Some(if changed.is_empty() { commit } else { format!("{commit}+") })
}
