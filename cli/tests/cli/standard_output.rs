//! A standard output that is closed, or whose disk is full.

use std::fs::File;
use std::process::{Command, Stdio};

use crate::common::{MODEL, SCRATCH};

const DUMP: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus/dump/escape.safetensors");
const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus/golden");

/// Every command that prints, as tables, text or JSON.
fn commands() -> Vec<Vec<String>> {
    let captured = format!("{SCRATCH}/stdout-capture.safetensors");
    let commands: [&[&str]; 10] = [
        &["--help"],
        &["list"],
        &["list", "--json"],
        &["check", "--all", "--backend", "cpu", "--filter", "segments-many-heads"],
        &[
            "bench",
            "--backend",
            "cpu",
            "--quick",
            "--shape",
            "g1-b1-4k",
            "--format",
            "8-bit per channel",
            "--footprint",
            "1",
        ],
        &["eval", "--backend", "cpu", "--format", "f16", DUMP],
        &["eval", "--backend", "cpu", "--model", MODEL, "--recipes", "f16", "--lengths", "5", "--passkey-tokens", "0"],
        &["generate", "--backend", "cpu", "--model", MODEL, "--tokens", "2", "a b"],
        &["capture", "--model", MODEL, "--tokens", "4", "--queries", "2", &captured],
        &["golden", "--backend", "cpu", GOLDEN],
    ];
    commands.iter().map(|arguments| arguments.iter().map(|&a| a.to_owned()).collect()).collect()
}

/// Runs a command with this standard output and returns exit code and standard error.
fn run(arguments: &[String], stdout: Stdio) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvpack"));
    let output = command.args(arguments).stdout(stdout).env_remove("WGPU_ADAPTER_NAME").output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn a_closed_pipe_ends_commands_quietly() {
    for arguments in commands() {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let (code, message) = run(&arguments, writer.into());
        assert_eq!(code, Some(141), "{arguments:?}: {message}");
        // Drivers may have words of their own.
        assert!(!message.contains("panicked") && !message.contains("standard output"), "{arguments:?}: {message}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_an_error() {
    for arguments in commands() {
        let (code, message) = run(&arguments, File::create("/dev/full").unwrap().into());
        assert_eq!(code, Some(2), "{arguments:?}: {message}");
        assert!(message.contains("error: cannot write to standard output: No space left"), "{arguments:?}: {message}");
        assert!(!message.contains("panicked"), "{arguments:?}: {message}");
    }
}

/// Nobody may listen to errors either.
#[test]
fn a_closed_standard_error_is_no_panic() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvpack"));
    let output = command.args(["eval", "--backend", "cpu", "/no/such/file"]).stderr(writer).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
}
