//! Runs the `kvpack` binary.

use std::process::Command;

/// A sound model of head_dim 80 with random weights.
pub const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus/model/hd80.gguf");

/// A directory for what tests write.
pub const SCRATCH: &str = env!("CARGO_TARGET_TMPDIR");

/// What a run of the binary left behind.
pub struct Run {
    /// Exit code.
    pub code: i32,
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub err: String,
}

/// Runs `kvpack` with arguments, without the adapter choice of the environment.
pub fn kvpack(arguments: &[&str]) -> Run {
    let output = Command::new(env!("CARGO_BIN_EXE_kvpack"))
        .args(arguments)
        .env_remove("WGPU_ADAPTER_NAME")
        .output()
        .expect("the binary was built with the test");
    let run = Run {
        code: output.status.code().expect("not ended by a signal"),
        out: String::from_utf8(output.stdout).expect("UTF-8"),
        err: String::from_utf8(output.stderr).expect("UTF-8"),
    };
    // Vulkan's validation layers write to standard output, which no log of a test run has.
    let message = run.out.lines().find(|line| line.contains("VUID-") || line.contains("Validation "));
    assert!(message.is_none(), "kvpack {arguments:?} broke a rule of Vulkan: {}", message.unwrap_or_default());
    run
}
