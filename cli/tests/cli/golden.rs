//! `kvpack golden` over the vectors of the repository, and over files that are wrong.

use std::path::Path;
use std::process::{Command, Output};

const VECTORS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden");

fn golden(directory: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kvpack")).arg("golden").arg(directory).output().unwrap()
}

/// A directory of its own with one file of the repository, changed.
fn changed(name: &str, file: &str, change: impl Fn(&mut Vec<u8>)) -> std::path::PathBuf {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&directory).unwrap();
    let mut bytes = std::fs::read(Path::new(VECTORS).join(file)).unwrap();
    change(&mut bytes);
    std::fs::write(directory.join(file), bytes).unwrap();
    directory
}

#[test]
fn all_vectors_of_the_repository_agree() {
    let files = std::fs::read_dir(VECTORS).unwrap();
    let count = files.filter(|f| f.as_ref().unwrap().path().extension().is_some_and(|e| e == "safetensors")).count();
    let output = golden(Path::new(VECTORS));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}");
    assert!(text.contains(&format!("{count} of {count} files agree, 0 are of ops")), "{text}");
    let with_gpu = text.contains("hadamard back (wgpu)");
    assert!(with_gpu || String::from_utf8(output.stderr).unwrap().contains("no GPU adapter"), "{text}");
}

#[test]
fn a_wrong_output_is_found_and_named() {
    // The last byte of the packed codes.
    let directory = changed("wrong-output", "calibquant.pack.01-b1_d64.safetensors", |bytes| {
        *bytes.last_mut().unwrap() ^= 1;
    });
    let output = golden(&directory);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("packed["), "{text}");
}

#[test]
fn a_truncated_file_is_broken_and_an_empty_directory_an_error() {
    let directory = changed("truncated", "calibquant.pack.01-b1_d64.safetensors", |bytes| bytes.truncate(500));
    let output = golden(&directory);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8(output.stdout).unwrap().contains("BROKEN"));
    let empty = Path::new(env!("CARGO_TARGET_TMPDIR")).join("empty");
    std::fs::create_dir_all(&empty).unwrap();
    assert_eq!(golden(&empty).status.code(), Some(2));
}

/// Files that asked for groups that do not divide, for gigabytes and for seconds: each its own result, and
/// the others too.
#[test]
fn hostile_files_are_results_of_their_own() {
    let directory = changed("hostile", "calibquant.pack.01-b1_d64.safetensors", |_| {});
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/golden");
    for seed in ["kivi-min", "panic-golden-11-0", "blow-heads-200k", "slow-codebook"] {
        let name = format!("{seed}.safetensors");
        std::fs::copy(seeds.join(&name), directory.join(&name)).unwrap();
    }
    let start = std::time::Instant::now();
    let output = golden(&directory);
    let (text, message) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert_eq!(output.status.code(), Some(1), "{text}{message}");
    assert!(text.contains("1 of 5 files agree"), "{text}");
    for reason in
        ["groups of 16 do not divide 4", "groups of 64 do not divide 200", "100000 query heads", "d = 4294967296"]
    {
        assert!(text.contains(reason), "'{reason}' is not in: {text}");
    }
    assert!(!message.contains("panicked"), "{message}");
    // Less than a second; what was wrong here took minutes. A busy machine has time enough.
    assert!(start.elapsed().as_secs() < 60, "{:?}", start.elapsed());
}

#[test]
fn unknown_ops_are_listed_and_do_not_fail() {
    let directory = changed("unknown-op", "calibquant.pack.01-b1_d64.safetensors", |bytes| {
        let at = bytes.windows(15).position(|window| window == b"calibquant.pack").unwrap();
        bytes[at..at + 15].copy_from_slice(b"calibquant.puck");
    });
    let output = golden(&directory);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}");
    assert!(text.contains("not implemented: calibquant.puck (1)"), "{text}");
}
