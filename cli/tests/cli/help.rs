//! What the command says of itself: help, version, and nothing else on standard error.

use crate::common::kvpack;

const COMMANDS: [&str; 11] =
    ["list", "check", "bench", "eval", "demo", "compare", "generate", "capture", "golden", "quantize", "shader"];

/// The help with its lines joined, so that a phrase is found wherever a line ends.
fn help(arguments: &[&str]) -> String {
    let run = kvpack(arguments);
    assert_eq!(run.code, 0, "{}", run.err);
    run.out.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn long_help_is_shown() {
    let parts = [
        ("list", "so that a slow path is never silent"),
        ("check", "cover every kernel once"),
        ("bench", "no step finds its data in a cache of the device"),
        ("eval", "layerN.key and layerN.value [kv_heads, tokens, head_dim]"),
        ("demo", "--keep-first 128 --keep-last 128"),
        ("compare", "a plot of quality and speed"),
        ("generate", "what an f16 cache would take"),
        ("capture", "give the same bytes"),
        ("golden", "inputs and expected outputs"),
        ("quantize", "one after the other, for the inputs that a text gives them"),
        ("shader", "A comment before each part"),
    ];
    assert_eq!(parts.map(|(command, _)| command), COMMANDS);
    for (command, part) in parts {
        let help = help(&[command, "--help"]);
        assert!(help.contains(part), "{command}: '{part}' is not in {help}");
    }
    let help = help(&["--help"]);
    assert!(help.contains("Exit codes") && help.contains("kvpack demo"), "{help}");
    // Every command of the list is one of these.
    let listed = kvpack(&["--help"]).out;
    let listed = listed.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let mut listed: Vec<&str> = listed.filter_map(|line| line.split_whitespace().next()).collect();
    listed.retain(|name| *name != "help");
    let mut known = COMMANDS.to_vec();
    listed.sort_unstable();
    known.sort_unstable();
    assert_eq!(listed, known);
}

#[test]
fn every_suite_and_kind_has_a_help_of_its_own() {
    let bench = help(&["bench", "--help"]);
    for suite in [
        "decode: Nine",
        "append: Storing",
        "causal: The newest",
        "chunks: A context",
        "evict: Keeping",
        "linear: Products",
        "mixed: Sequences",
        "prefill: Prompts",
        "ranks: One sequence",
        "step: A whole",
    ] {
        assert!(bench.contains(suite), "{suite}: {bench}");
    }
    assert!(help(&["check", "--help"]).contains("token-scores"));
    let run = kvpack(&["check", "--kind", "eviktion"]);
    assert!(run.code == 2 && run.err.contains("similar value exists: 'eviction'"), "{}", run.err);
}

/// Words that a stranger reads twice. Each is a habit of this project's prose, not an error in itself.
#[test]
fn help_is_plain_english() {
    let habits = [
        " so many ",
        " beside ",
        " anew",
        " yields ",
        " twin",
        " brings",
        "Most tokens",
        "at most.",
        " less the ",
        "is no recipe but",
        " hold what ",
    ];
    for command in COMMANDS {
        let help = help(&[command, "--help"]);
        for habit in habits {
            assert!(!help.contains(habit), "{command}: '{habit}' is in {help}");
        }
    }
}

#[test]
fn the_version_names_the_commit_where_it_is_known() {
    let run = kvpack(&["--version"]);
    assert_eq!(run.code, 0);
    let version = run.out.trim();
    let plain = format!("kvpack {}", env!("CARGO_PKG_VERSION"));
    let commit = version.strip_prefix(&plain).expect("the version");
    let checkout = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../.git").exists();
    assert!(commit.is_empty() || (commit.starts_with(" (") && commit.ends_with(')')), "{version}");
    assert!(!checkout || commit.len() >= 12, "{version}");
}

/// Without a display, Mesa's device-select layer complains of it, unless it is told not to run.
#[test]
fn drivers_say_nothing() {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_kvpack"));
    let output = command.arg("list").env_remove("XDG_RUNTIME_DIR").env_remove("NODEVICE_SELECT").output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && !message.contains("XDG_RUNTIME_DIR"), "{message}");
}

/// Where an adapter can keep compiled kernels, two processes share one file.
#[test]
fn compiled_kernels_are_kept() {
    let list: serde_json::Value = serde_json::from_str(&kvpack(&["list", "--json"]).out).unwrap();
    let can = |adapter: &serde_json::Value| {
        adapter["all_features"].as_array().is_some_and(|all| all.iter().any(|feature| feature == "PIPELINE_CACHE"))
    };
    if !list["adapters"].as_array().unwrap().first().is_some_and(can) {
        return;
    }
    let cache = std::path::Path::new(crate::common::SCRATCH).join("pipelines");
    let _ = std::fs::remove_dir_all(&cache);
    for _ in 0..2 {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_kvpack"));
        let arguments = ["check", "--backend", "wgpu", "--kind", "top-k", "--filter", "ties"];
        let output = command.args(arguments).env("XDG_CACHE_HOME", &cache).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let kept: Vec<_> = std::fs::read_dir(cache.join("kvpack")).unwrap().collect();
        assert_eq!(kept.len(), 1, "{kept:?}");
    }
}

/// Recipes and their options are suggested.
#[test]
fn misspelt_recipes_get_a_suggestion() {
    for (recipe, said) in [
        ("saw-in4", "did you mean saw-int4?"),
        ("int4+windw=3", "did you mean window?"),
        ("int4+sink", "sink needs a value"),
    ] {
        let run = kvpack(&["shader", "--format", recipe]);
        assert!(run.code == 2 && run.err.contains(said), "{recipe}: {}", run.err);
        let run = kvpack(&["bench", "--backend", "cpu", "--format", recipe]);
        assert!(run.code == 2 && run.err.contains(said), "{recipe}: {}", run.err);
    }
    assert_eq!(kvpack(&["shader", "--format", "int4+center"]).code, 0);
}

/// Without a GPU, every command takes the CPU backend and says so.
#[test]
fn without_a_gpu_the_cpu_is_taken() {
    let list: serde_json::Value = serde_json::from_str(&kvpack(&["list", "--json"]).out).unwrap();
    let adapters = list["adapters"].as_array().unwrap();
    if adapters.iter().any(|adapter| adapter["kind"] != "software") {
        return;
    }
    for arguments in [["check", "--kind", "top-k"], ["list", "--json", "--json"]] {
        let run = kvpack(&arguments[..if arguments[0] == "list" { 2 } else { 3 }]);
        assert_eq!(run.code, 0, "{}", run.err);
        assert!(run.err.contains("running on the CPU backend") && run.out.contains("CPU"), "{}{}", run.out, run.err);
    }
    let adapter = adapters.first().map(|adapter| adapter["name"].as_str().unwrap().to_owned());
    if let Some(name) = adapter {
        let run = kvpack(&["list", "--adapter", &name]);
        assert!(!run.err.contains("CPU backend"), "{}", run.err);
    }
}
