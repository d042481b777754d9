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
    let list = Command::new(env!("CARGO_BIN_EXE_kvpack")).args(["list", "--json"]).output().unwrap();
    let list: serde_json::Value = serde_json::from_slice(&list.stdout).unwrap();
    let has_adapter = list["adapters"].as_array().is_some_and(|adapters| !adapters.is_empty());
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvpack"));
    let output = command.arg("golden").arg(VECTORS).args(["--backend", if has_adapter { "wgpu" } else { "cpu" }]);
    let output = output.output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}");
    assert!(text.contains("108 of 108 files agree, 0 are of ops"), "{text}");
    assert_eq!(text.contains("hadamard back (wgpu)"), has_adapter, "{text}");
}

#[test]
fn all_vectors_of_weights_agree() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../weights/tests/golden");
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvpack"));
    let output = command.arg("golden").arg(&folder).args(["--backend", "cpu"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}");
    assert!(text.contains("22 of 22 files agree, 0 are of ops"), "{text}");
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

/// The bytes of a file of the repository with other parameters.
fn with_params(file: &str, change: impl Fn(&mut serde_json::Value)) -> Vec<u8> {
    let bytes = std::fs::read(Path::new(VECTORS).join(file)).unwrap();
    let (length, rest) = bytes.split_first_chunk().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let mut header: serde_json::Value = serde_json::from_slice(header).unwrap();
    let params = &mut header["__metadata__"]["params"];
    let mut changed: serde_json::Value = serde_json::from_str(params.as_str().unwrap()).unwrap();
    change(&mut changed);
    *params = changed.to_string().into();
    let header = header.to_string();
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

/// Parameters that ask for memory or divide by zero: each file is broken by itself, in little memory, and the others
/// are compared.
#[test]
fn parameters_that_ask_for_too_much_are_results_of_their_own() {
    let directory = changed("parameters", "calibquant.pack.01-b1_d64.safetensors", |_| {});
    let cases: [(&str, &[&str], u64, &str); 7] = [
        ("pyramidkv.budget.01-l32_L1000", &["layers"], 1 << 32, "the largest count"),
        ("pyramidkv.budget.02-l32_L4000", &["layers"], 1 << 31, "ask for 2147483648 elements of 'kept_total'"),
        ("streamingllm.select.01-s4_r60_kf", &["length", "recent"], (1 << 32) - 1, "elements of 'kept'"),
        ("streamingllm.select.02-s4_r128", &["batch", "heads"], (1 << 32) - 1, "elements of 'kept'"),
        ("vlcache.plan.01-l2_h2", &["group"], 0, "'group' is 0"),
        ("vlcache.sparsity.02-attn_gqa2", &["group"], 0, "'group' is 0"),
        ("vlcache.plan.02-l4_gqa2", &["recent_fraction"], 1 << 32, "of its tokens"),
    ];
    for (file, names, value, _) in cases {
        let file = format!("{file}.safetensors");
        let bytes = with_params(&file, |params| names.iter().for_each(|&name| params[name] = value.into()));
        std::fs::write(directory.join(file), bytes).unwrap();
    }
    // A sixth of what the first of them asked for.
    let limited = "ulimit -v 6000000; exec \"$0\" golden --backend cpu \"$1\"";
    let mut command = Command::new("sh");
    let output = command.args(["-c", limited, env!("CARGO_BIN_EXE_kvpack")]).arg(&directory).output().unwrap();
    let (text, message) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert_eq!(output.status.code(), Some(1), "{text}{message}");
    assert!(text.contains(&format!("1 of {} files agree", cases.len() + 1)), "{text}");
    for (file, _, _, reason) in cases {
        let line = text.lines().find(|line| line.starts_with(&format!("{file}: ")));
        assert!(line.is_some_and(|line| line.contains(reason)), "{file}: '{reason}' is not in {text}");
    }
    assert!(!message.contains("panicked"), "{message}");
}

/// A plan has as many layers as its file.
#[test]
fn plans_of_more_than_four_layers_are_compared() {
    let name = "vlcache.plan.01-l2_h2.safetensors";
    let bytes = std::fs::read(Path::new(VECTORS).join(name)).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    // The first layer five times, compared by what it keeps: five layers alike share the budget evenly.
    const LAYERS: usize = 5;
    let attn = file.tensor("in.attn").unwrap();
    let layer = attn.data().len() / attn.shape()[0];
    let weights = attn.data()[..layer].repeat(LAYERS);
    let shape = [&[LAYERS], &attn.shape()[1..]].concat();
    let sparsity = file.tensor("out.layer_sparsity").unwrap();
    let one = sparsity.data().len() / sparsity.shape()[0];
    let sparsities = sparsity.data()[..one].repeat(LAYERS);
    let view =
        |dtype, shape: &[usize], data| safetensors::tensor::TensorView::new(dtype, shape.to_vec(), data).unwrap();
    let mut metadata = header.metadata().clone().unwrap();
    let compare: serde_json::Value = serde_json::from_str(&metadata["compare"]).unwrap();
    let only = serde_json::json!({ "layer_sparsity": compare["layer_sparsity"] });
    metadata.insert("compare".into(), only.to_string());
    let tensors = vec![
        ("in.attn", view(attn.dtype(), &shape, &weights)),
        ("out.layer_sparsity", view(sparsity.dtype(), &[LAYERS], &sparsities)),
    ];
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("five-layers");
    std::fs::create_dir_all(&directory).unwrap();
    std::fs::write(directory.join(name), safetensors::serialize(tensors, Some(metadata)).unwrap()).unwrap();
    let output = golden(&directory);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.contains("1 of 1 files agree"), "{text}");
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
