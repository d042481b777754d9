//! Dumps that are truncated, hostile or wrong: one clear message, exit code 2, no panic.

use std::collections::HashMap;
use std::path::Path;

use half::f16;
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use crate::common::kvpack;

/// A tensor to be written: name, element type, shape, bytes.
type Entry = (&'static str, Dtype, Vec<usize>, Vec<u8>);

fn halves(name: &'static str, shape: [usize; 3]) -> Entry {
    let count = shape.iter().product::<usize>();
    let bytes = (0..count).flat_map(|i| f16::from_f32((i as f32 * 0.37).sin()).to_le_bytes()).collect();
    (name, Dtype::F16, shape.into(), bytes)
}

/// Two KV heads, four query heads, nine tokens.
fn good() -> Vec<Entry> {
    vec![
        halves("layer3.key", [2, 9, 64]),
        halves("layer3.value", [2, 9, 64]),
        halves("layer3.query_prompt", [4, 2, 64]),
        halves("layer3.query_decode", [4, 1, 64]),
    ]
}

fn bytes(entries: &[Entry], metadata: Option<(&str, &str)>) -> Vec<u8> {
    let views = entries.iter().map(|(name, dtype, shape, data)| {
        (*name, TensorView::new(*dtype, shape.clone(), data).expect("bytes fit the shape"))
    });
    let metadata = metadata.map(|(key, value)| HashMap::from([(key.to_owned(), value.to_owned())]));
    safetensors::serialize(views, metadata).expect("a whole file")
}

/// Evaluates a file with these bytes and returns exit code and standard error.
fn eval(name: &str, bytes: &[u8]) -> (i32, String) {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(&path, bytes).expect("the directory of the test is writable");
    let run = kvpack(&["eval", "--backend", "cpu", path.to_str().expect("UTF-8")]);
    (run.code, run.err)
}

#[track_caller]
fn is_refused(name: &str, bytes: &[u8], words: &[&str]) {
    let (code, message) = eval(name, bytes);
    assert_eq!(code, 2, "{message}");
    assert!(message.starts_with("error: ") && !message.contains("panicked"), "{message}");
    assert_eq!(message.trim_end().lines().count(), 1, "{message}");
    for word in words {
        assert!(message.contains(word), "'{word}' is not in: {message}");
    }
}

fn with(change: impl FnOnce(&mut Vec<Entry>)) -> Vec<u8> {
    let mut entries = good();
    change(&mut entries);
    bytes(&entries, None)
}

#[test]
fn a_good_file_passes() {
    let (code, message) = eval("good", &bytes(&good(), None));
    assert_eq!((code, message.as_str()), (0, ""));
}

#[test]
fn other_element_types_pass() {
    let wide = |entry: &mut Entry, dtype| {
        let count: usize = entry.2.iter().product();
        let one = |i: usize| 0.01 * i as f32;
        let data = match dtype {
            Dtype::F32 => (0..count).flat_map(|i| one(i).to_le_bytes()).collect(),
            _ => (0..count).flat_map(|i| half::bf16::from_f32(one(i)).to_le_bytes()).collect(),
        };
        *entry = (entry.0, dtype, entry.2.clone(), data);
    };
    let file = with(|entries| {
        wide(&mut entries[0], Dtype::F32);
        wide(&mut entries[1], Dtype::BF16);
    });
    assert_eq!(eval("other-types", &file).0, 0);
}

#[test]
fn missing_and_unreadable_files() {
    for path in ["/no/such/file.safetensors", env!("CARGO_TARGET_TMPDIR")] {
        let run = kvpack(&["eval", "--backend", "cpu", path]);
        assert_eq!(run.code, 2);
        assert!(run.err.contains("cannot read") && run.err.contains(path), "{}", run.err);
    }
}

#[test]
fn truncated_files() {
    let whole = bytes(&good(), None);
    for length in [0, 1, 7, 8, 9, 100, whole.len() / 2, whole.len() - 1] {
        is_refused(&format!("truncated-{length}"), &whole[..length], &["not a whole safetensors file"]);
    }
}

#[test]
fn hostile_headers() {
    let with_length = |length: u64, rest: &[u8]| [&length.to_le_bytes(), rest].concat();
    let not_whole = ["not a whole safetensors file"];
    is_refused("huge-header", &with_length(u64::MAX, b"{}"), &not_whole);
    is_refused("large-header", &with_length(99_999_999, b"{}"), &not_whole);
    is_refused("no-json", &with_length(4, b"####"), &not_whole);
    is_refused("no-utf8", &with_length(4, &[0xff; 4]), &not_whole);
    let header = |offsets: &str, shape: &str| {
        let json = format!(r#"{{"layer0.key":{{"dtype":"F16","shape":{shape},"data_offsets":{offsets}}}}}"#);
        with_length(json.len() as u64, json.as_bytes())
    };
    is_refused("offsets-beyond", &header("[0,1000000]", "[1,1,500000]"), &not_whole);
    is_refused("offsets-reversed", &header("[10,0]", "[1,1,5]"), &not_whole);
    is_refused("shape-overflow", &header("[0,2]", "[4611686018427387904,4611686018427387904,2]"), &not_whole);
}

#[test]
fn names_and_missing_tensors() {
    is_refused("no-tensors", &bytes(&[], None), &["no tensors", "layer<N>.key"]);
    let file = bytes(&[halves("model.layers.0.k", [2, 9, 64])], None);
    is_refused("misnamed", &file, &["model.layers.0.k", "layer<N>.key"]);
    is_refused("no-value", &with(|e| drop(e.remove(1))), &["layer 3", "no values"]);
    is_refused("no-key", &with(|e| drop(e.remove(0))), &["layer 3", "no keys"]);
    is_refused("no-queries", &with(|e| e.truncate(2)), &["layer 3", "no queries"]);
    is_refused("queries-only", &with(|e| drop(e.drain(..2))), &["layer 3", "no keys"]);
}

#[test]
fn shapes_that_do_not_fit() {
    is_refused(
        "value-shape",
        &with(|e| e[1] = halves("layer3.value", [2, 8, 64])),
        &["layer3.value", "[2, 8, 64]", "[2, 9, 64]"],
    );
    is_refused(
        "query-dim",
        &with(|e| e[3] = halves("layer3.query_decode", [4, 1, 80])),
        &["layer3.query_decode", "64 channels"],
    );
    is_refused("query-heads", &with(|e| e[3] = halves("layer3.query_decode", [2, 1, 64])), &["4 query heads"]);
    is_refused("too-many-queries", &with(|e| e[2] = halves("layer3.query_prompt", [4, 10, 64])), &["at most 9"]);
    let groups = with(|e| {
        e[2] = halves("layer3.query_prompt", [3, 2, 64]);
        e[3] = halves("layer3.query_decode", [3, 1, 64]);
    });
    is_refused("groups", &groups, &["layer 3", "multiple"]);
    let dims = with(|e| {
        *e = vec![
            halves("layer3.key", [2, 9, 72]),
            halves("layer3.value", [2, 9, 72]),
            halves("layer3.query_decode", [4, 1, 72]),
        ];
    });
    is_refused("head-dim", &dims, &["72", "Pad"]);
    let flat = with(|e| e[0] = ("layer3.key", Dtype::F16, vec![18, 64], e[0].3.clone()));
    is_refused("two-axes", &flat, &["layer3.key", "three axes"]);
    let empty = with(|e| e[0] = ("layer3.key", Dtype::F16, vec![2, 0, 64], Vec::new()));
    is_refused("no-tokens", &empty, &["layer3.key", "none of them 0"]);
}

#[test]
fn elements_that_no_cache_holds() {
    let integers = with(|e| e[0].1 = Dtype::I16);
    is_refused("integers", &integers, &["layer3.key", "I16", "F16, BF16 and F32"]);
    let spoil = |tensor: usize, element: usize, value: f32| {
        with(|e| e[tensor].3[2 * element..][..2].copy_from_slice(&f16::from_f32(value).to_le_bytes()))
    };
    is_refused("nan-key", &spoil(0, (9 + 4) * 64 + 5, f32::NAN), &["layer3.key", "NaN", "[1, 4, 5]"]);
    is_refused("inf-value", &spoil(1, 0, f32::INFINITY), &["layer3.value", "inf", "[0, 0, 0]"]);
    is_refused("nan-query", &spoil(2, 64, f32::NAN), &["layer3.query_prompt", "[0, 1, 0]"]);
}

/// The demo keeps 256 tokens in f16, and refuses dumps that have no more.
#[test]
fn the_demo_needs_tokens_to_pack() {
    for (tokens, code) in [(9, 2), (200, 2), (256, 2), (300, 0)] {
        let entries = [
            halves("layer3.key", [1, tokens, 64]),
            halves("layer3.value", [1, tokens, 64]),
            halves("layer3.query_decode", [2, 1, 64]),
        ];
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("demo-{tokens}"));
        std::fs::write(&path, bytes(&entries, None)).expect("the directory of the test is writable");
        let path = path.to_str().expect("UTF-8");
        let run = kvpack(&["demo", "--backend", "cpu", "--report", &format!("{path}-report"), path]);
        assert_eq!(run.code, code, "{tokens} tokens: {}{}", run.out, run.err);
        assert!(!run.err.contains("panicked"), "{}", run.err);
        match code {
            0 => assert!(run.out.contains("A decode step, f16: "), "{}", run.out),
            _ => assert!(run.err.contains(&format!("to pack of {tokens};")), "{}", run.err),
        }
    }
}

#[test]
fn masks() {
    let file = |mask| bytes(&good(), Some(("mask", mask)));
    assert_eq!(eval("mask-causal", &file("causal")).0, 0);
    assert_eq!(eval("mask-none", &file("none: every query comes later")).0, 0);
    is_refused("mask-unknown", &file("sliding"), &["'sliding'", "'causal' or 'none'"]);
}

/// Escape sequences of a file are shown, not obeyed, on standard output and standard error; and no line is forged.
#[test]
fn escape_sequences_do_not_reach_the_terminal() {
    let quiet = |text: &str| assert!(!text.contains(['\u{1b}', '\u{7}', '\u{9b}']), "{text:?}");
    let seed = concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz/corpus/dump/escape.safetensors");
    let run = kvpack(&["eval", "--backend", "cpu", "--format", "f16", seed]);
    assert_eq!(run.code, 0, "{}", run.err);
    quiet(&run.out);
    assert!(run.out.contains("model: \\u{1b}]0;owned\\u{7}\\u{1b}[2J"), "{}", run.out);

    let named = bytes(&good(), Some(("model", "\u{9b}2J\nAll 1 layers")));
    let (code, _) = eval("escape-model", &named);
    assert_eq!(code, 0);
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("escape-model");
    let run = kvpack(&["eval", "--backend", "cpu", "--format", "f16", path.to_str().expect("UTF-8")]);
    quiet(&run.out);
    assert_eq!(run.out.matches("\nAll 1 layers").count(), 1, "{}", run.out);

    let hostile = [halves("\u{1b}[2J\nerror: none", [2, 9, 64])];
    is_refused("escape-name", &bytes(&hostile, None), &["\\u{1b}[2J\\nerror: none"]);
    is_refused("escape-mask", &bytes(&good(), Some(("mask", "\u{1b}[31m"))), &["\\u{1b}[31m"]);
}
