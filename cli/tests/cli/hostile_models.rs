//! Model files, lengths and texts that are hostile or wrong: one clear message, exit code 2, no panic, soon.

use std::path::Path;

use crate::common::{MODEL, Run, SCRATCH, kvpack};

fn seed(name: &str) -> String {
    format!("{}/../fuzz/corpus/model/{name}.gguf", env!("CARGO_MANIFEST_DIR"))
}

#[track_caller]
fn is_refused(run: &Run, words: &[&str]) {
    assert_eq!(run.code, 2, "{}", run.err);
    assert!(run.err.starts_with("error: ") && !run.err.contains("panicked"), "{}", run.err);
    assert_eq!(run.err.trim_end().lines().count(), 1, "{}", run.err);
    for word in words {
        assert!(run.err.contains(word), "'{word}' is not in: {}", run.err);
    }
}

#[test]
fn headers_that_divide_by_zero_or_overflow() {
    for (name, words) in [
        ("alignment0", ["general.alignment", "power of two"]),
        ("heads57b", ["144115188075855874", "65535"]),
        ("panic-gguf-11-0", ["blk.0.ffn_up.weight", "288230376151711872"]),
    ] {
        is_refused(&kvpack(&["generate", "--backend", "cpu", "--model", &seed(name), "a"]), &words);
        let output = format!("{SCRATCH}/capture-no-dump");
        is_refused(&kvpack(&["capture", "--model", &seed(name), &output]), &words);
        assert!(!Path::new(&output).exists());
    }
}

#[test]
fn more_tokens_than_numbers_count() {
    let output = format!("{SCRATCH}/capture-no-tokens");
    for tokens in ["18446744073709551615", "18446744073709551600"] {
        let capture = kvpack(&["capture", "--model", MODEL, "--tokens", tokens, "--queries", "32", &output]);
        is_refused(&capture, &["are needed", tokens.get(..10).unwrap()]);
        let generate = kvpack(&["generate", "--backend", "cpu", "--model", MODEL, "--tokens", tokens, "a"]);
        is_refused(&generate, &["do not fit the model's context"]);
    }
    assert!(!Path::new(&output).exists());
}

/// kivi's groups of 32 channels do not divide 80: known before anything is computed.
#[test]
fn recipes_are_checked_before_any_is_evaluated() {
    let eval = |recipes: &[&str]| {
        let options = ["eval", "--backend", "cpu", "--model", MODEL, "--lengths", "20", "--passkey-tokens", "0"];
        kvpack(&[&options[..], &["--recipes"], recipes].concat())
    };
    let run = eval(&["f16", "kivi:2", "calibquant:4"]);
    is_refused(&run, &["recipe kivi:2", "head_dim 80"]);
    assert!(!run.err.contains("perplexity"), "nothing was evaluated: {}", run.err);
    // Among all, those that do not fit are left out, and the others printed.
    let run = eval(&["all"]);
    assert_eq!(run.code, 0, "{}", run.err);
    assert!(run.err.contains("left out kivi:2"), "{}", run.err);
    assert!(run.out.contains("calibquant:4") && !run.out.contains("kivi:2"), "{}", run.out);
}

#[test]
fn what_ranks_chunks_is_checked() {
    let text = &format!("{SCRATCH}/context.txt");
    std::fs::write(text, "A hatter had tea. ".repeat(5)).expect("the directory of tests");
    let rank = |more: &[&str]| {
        let options = ["generate", "--backend", "cpu", "--model", MODEL, "--recipe", "mix=f16:0.5,int8", "a"];
        kvpack(&[&options[..], more].concat())
    };
    is_refused(&rank(&[]), &["--context"]);
    let missing = format!("{SCRATCH}/no-encoder");
    for (ranking, words) in [
        (format!("minilm:{missing}"), ["config.json", "fetch-encoder.sh"]),
        (format!("{missing}.safetensors"), ["no-encoder.safetensors", "cannot be read"]),
    ] {
        is_refused(&rank(&["--context", text, "--tokens", "1", "--rank-by", &ranking]), &words);
    }
    // What ranks nothing is told, not left unused.
    for (option, value) in [("--rank-by", "bm25"), ("--chunk-tokens", "32")] {
        let plain = kvpack(&["generate", "a", "--recipe", "int4", "--context", text, "--model", MODEL, option, value]);
        is_refused(&plain, &[option, "int4", "cocktail"]);
        let (recipes, more) = (["--recipes", "h2o:0.2 int4"], ["--documents", "1", option, value]);
        let documents = kvpack(&[&["eval", "--model", MODEL][..], &recipes, &more].concat());
        is_refused(&documents, &[option, "h2o:0.2 int4", "cocktail"]);
    }
    let draws = |recipe: &str, count: &str| {
        kvpack(&["eval", "--model", MODEL, "--recipes", recipe, "--documents", "1", "--draws", count])
    };
    is_refused(&draws("int4", "3"), &["--draws", "int4", "cocktail"]);
    let none = draws("cocktail", "0");
    assert!(none.code == 2 && none.err.contains("0 is not in 1.."), "{}", none.err);
    let unknown = rank(&["--context", text, "--rank-by", "words"]);
    assert!(unknown.code == 2 && unknown.err.contains("'words' is none of these"), "{}", unknown.err);
    is_refused(&rank(&["--context", text, "--chunk-tokens", "8"]), &["16 to 128"]);
}

#[cfg(unix)]
#[test]
fn files_that_never_end() {
    for run in [
        kvpack(&["eval", "--backend", "cpu", "/dev/zero"]),
        kvpack(&["generate", "--backend", "cpu", "--model", "/dev/zero", "a"]),
        kvpack(&["capture", "--model", MODEL, "--text", "/dev/zero", &format!("{SCRATCH}/endless")]),
    ] {
        is_refused(&run, &["regular file", "/dev/zero"]);
    }
}

#[test]
fn a_footprint_has_bounds() {
    for footprint in ["18446744073709551615", "16385", "0"] {
        let run = kvpack(&["bench", "--backend", "cpu", "--footprint", footprint]);
        assert_eq!(run.code, 2, "{}", run.err);
        assert!(run.err.contains("1..=16384"), "{}", run.err);
    }
}
