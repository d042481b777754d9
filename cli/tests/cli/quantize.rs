//! `kvpack quantize`, and the commands that read what it wrote.

use std::path::{Path, PathBuf};

use crate::common::{MODEL, SCRATCH, kvpack};

/// A folder that does not exist.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(SCRATCH).join(name);
    let _ = std::fs::remove_dir_all(&folder);
    folder
}

#[test]
fn a_quantised_model_is_evaluated_and_writes() {
    let folder = folder("quantised");
    let output = folder.to_str().unwrap();
    let quantize = |options: &[&str]| kvpack(&[&["quantize", MODEL, "-o", output, "--group", "32"], options].concat());
    // What an interrupted run leaves.
    std::fs::create_dir(&folder).unwrap();
    let run = quantize(&["--bits", "8", "--tokens", "64"]);
    assert_eq!(run.code, 0, "{}{}", run.out, run.err);
    assert!(run.out.contains("bits per weight"), "{}", run.out);
    for file in ["model.safetensors", "quantize_config.json", "config.json", "model.gguf"] {
        assert!(folder.join(file).is_file(), "{file}");
    }
    let run = quantize(&[]);
    assert!(run.code == 2 && run.err.contains("exists; name a new folder"), "{}", run.err);
    let run = kvpack(&["generate", "--backend", "cpu", "--model", output, "--tokens", "3", "a"]);
    assert_eq!(run.code, 0, "{}{}", run.out, run.err);
    let lengths = ["--lengths", "32", "--passkey-tokens", "0", "--recipes", "f16"];
    let run = kvpack(&[&["eval", "--backend", "cpu", "--model", output], &lengths[..]].concat());
    assert_eq!(run.code, 0, "{}{}", run.out, run.err);
    // The weights of the file are the mark: codes of 8 bits change its predictions a little, and none of its own.
    let against = |model: &str| {
        let run = kvpack(
            &[&["eval", "--backend", "cpu", "--json", "--model", model, "--against", MODEL], &lengths[..]].concat(),
        );
        assert_eq!(run.code, 0, "{}{}", run.out, run.err);
        let report: serde_json::Value = serde_json::from_str(&run.out).unwrap();
        assert!(report["against"].is_string(), "{report}");
        report["rows"][0]["divergence"].as_f64().unwrap()
    };
    assert_eq!(against(MODEL), 0.0);
    let divergence = against(output);
    assert!(divergence > 1e-9 && divergence < 0.01, "{divergence}");
    // A file of the folder that is cut off.
    let weights = folder.join("model.safetensors");
    let bytes = std::fs::read(&weights).unwrap();
    std::fs::write(&weights, &bytes[..bytes.len() - 1]).unwrap();
    let run = kvpack(&["generate", "--backend", "cpu", "--model", output, "a"]);
    assert!(run.code == 2 && run.err.contains("not a whole safetensors file"), "{}", run.err);
}

#[test]
fn what_cannot_be_quantised_leaves_nothing() {
    let folder = folder("not-quantised");
    let output = folder.to_str().unwrap();
    for (options, words) in [
        (&["--bits", "5"][..], "2, 3, 4 or 8 bits"),
        (&["--group", "0"], "group_size"),
        (&["--method", "rtn", "--act-order"], "--act-order is for"),
        (&["--method", "awq", "--text", "text.txt", "--shrink"], "--shrink is for"),
        (&["--method", "rtn", "--text", "text.txt"], "--text is about"),
        (&["--method", "rtn", "--tokens", "2048"], "--tokens is about"),
        (&["--tokens", "0"], "--tokens is 0"),
        (&["--tokens", "100000000"], "--tokens is 100000000"),
        (&["--method", "rtn", "--layout", "awq", "--bits", "3", "--group", "-1"], "it has 4 bits"),
    ] {
        let run = kvpack(&[&["quantize", MODEL, "-o", output], options].concat());
        assert_eq!(run.code, 2, "{options:?}: {}{}", run.out, run.err);
        assert!(run.err.contains(words), "{options:?}: {}", run.err);
        assert!(!folder.exists(), "{options:?}");
    }
}
