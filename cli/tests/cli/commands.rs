//! The commands from outside: output, JSON, exit codes.

use crate::common::{self, kvpack};

/// The dump that ships with the repository.
const DUMP: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/data/smollm2_kv.safetensors");

fn json(arguments: &[&str]) -> serde_json::Value {
    let run = kvpack(arguments);
    assert_eq!(run.code, 0, "{}", run.err);
    serde_json::from_str(&run.out).expect("JSON on standard output")
}

#[test]
fn help_names_every_command() {
    let run = kvpack(&["--help"]);
    assert_eq!(run.code, 0);
    let commands = "list check bench eval demo compare generate capture golden quantize shader";
    for command in commands.split(' ') {
        assert!(run.out.contains(command), "{command} is missing:\n{}", run.out);
    }
}

#[test]
fn list_is_json_too() {
    let list = json(&["list", "--json"]);
    assert!(list["adapters"].is_array());
    assert!(list["cpu"]["threads"].as_u64() >= Some(1));
    let evictions = list["evictions"].as_array().expect("evictions");
    assert!(evictions.iter().any(|row| row["recipe"] == "vlcache:SHARE/"), "{evictions:?}");
    let recipes = json(&["list", "--backend", "cpu", "--json"])["recipes"].as_array().expect("recipes").clone();
    let kivi = recipes.iter().find(|row| row["recipe"] == "kivi:2").expect("kivi:2");
    assert_eq!((kivi["bits"].as_f64(), kivi["arithmetic"].as_str()), (Some(3.0), Some("floats")), "{kivi}");
    assert!(recipes.iter().all(|row| row["source"].as_str().is_some_and(|source| !source.is_empty())), "{recipes:?}");
}

#[test]
fn check_passes_on_the_cpu() {
    let run = kvpack(&["check", "--backend", "cpu", "--quick", "--filter", "format-"]);
    assert_eq!(run.code, 0, "{}{}", run.out, run.err);
    assert!(run.out.contains("format-1bit ") && run.out.contains(" 0 failed"), "{}", run.out);
    assert!(run.out.contains("  calibquant:4: 4-bit per channel\n") && run.out.contains("  f16\n"), "{}", run.out);
    // Several at once come in the order of one after the other.
    let names = |run: &common::Run| {
        let rows = run.out.lines().filter(|line| line.starts_with("ok "));
        rows.filter_map(|line| line.split_whitespace().nth(1).map(str::to_owned)).collect::<Vec<_>>()
    };
    let alone = kvpack(&["check", "--backend", "cpu", "--filter", "format-", "--jobs", "1"]);
    let together = kvpack(&["check", "--backend", "cpu", "--filter", "format-", "--jobs", "5"]);
    assert!(names(&alone).len() > 5 && names(&alone) == names(&together), "{}{}", alone.out, together.out);
}

#[test]
fn checks_of_one_kind_and_what_is_served() {
    let run = kvpack(&["check", "--backend", "cpu", "--kind", "top-k"]);
    assert_eq!(run.code, 0, "{}{}", run.out, run.err);
    assert!(run.out.contains("top-k-ties") && !run.out.contains("format-f16"), "{}", run.out);
    let checked = json(&["check", "--backend", "cpu", "--quick", "--filter", "format-4bit", "--json"]);
    let rows = checked["rows"].as_array().expect("rows");
    assert_eq!(checked["kind"], "check");
    assert!(!rows.is_empty() && rows.iter().all(|row| row["outcome"] == "passed" && row["nmse"].is_f64()), "{checked}");
    assert!(rows[0]["formats"].as_array().is_some_and(|formats| !formats.is_empty()), "{checked}");
    assert_eq!(checked["planned"].as_u64(), Some(rows.len() as u64), "a run that ends early has fewer rows");
    let linear = json(&["check", "--backend", "cpu", "--kind", "linear", "--filter", "4bit", "--json"]);
    let rows = linear["rows"].as_array().expect("rows");
    assert!(rows.len() > 10 && rows.iter().all(|row| row["outcome"] == "passed" && row["of"] == "linear"), "{linear}");
    assert!(
        rows.iter().filter(|row| row["nmse"].is_f64()).count() + 1 == rows.len(),
        "all but that of infinity: {linear}"
    );
    let run = kvpack(&["check", "--backend", "cpu", "--kind", "dequantize", "--part", "2/2"]);
    assert!(
        run.code == 0 && run.out.contains("dequantize-8bit-6x4160-g64") && run.out.contains(" 0 failed"),
        "{}",
        run.out
    );
    let run = kvpack(&["check", "--backend", "cpu", "--matrix"]);
    assert_eq!(run.code, 0, "{}{}", run.out, run.err);
    assert!(run.out.contains("4-bit per channel") && run.out.contains("floats"), "{}", run.out);
}

#[test]
fn bench_prints_checked_rows() {
    let bench = json(&["bench", "--backend", "cpu", "--quick", "--shape", "g1-b1-4k", "--footprint", "1", "--json"]);
    let rows = bench["shapes"][0]["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 6);
    // On a busy machine the bandwidth may be read lower than what a row takes: such a row has no figures.
    let (timed, others): (Vec<_>, Vec<_>) = rows.iter().partition(|row| row["outcome"] == "timed");
    assert!(timed.len() >= 3 && others.iter().all(|row| row.to_string().contains("read bandwidth")), "{bench}");
    for row in timed {
        assert!(row["nmse"].as_f64().unwrap() < 1e-6 && row["step_us"].as_f64().unwrap() > 0.0, "{row}");
        let (us, spread) = (row["step_us"].as_f64().unwrap(), &row["spread"]);
        assert!(spread["samples"].as_u64() >= Some(5), "{row}");
        assert!(spread["low_us"].as_f64().unwrap() <= us && us <= spread["high_us"].as_f64().unwrap(), "{row}");
        // No recipe has 3 bits and a range per channel.
        assert_eq!(row["recipe"].is_string(), row["format"] != "3-bit per channel", "{row}");
        // Nothing is faster than a row without figures.
        assert_eq!(row["times_f16"].as_f64() > Some(0.0), rows[0]["outcome"] == "timed", "{row}");
        assert!(row["nmse_int16"].is_null(), "the CPU rounds no query: {row}");
    }
    // What it takes to repeat them.
    let run = &bench["run"];
    assert!(run["command"].as_str().unwrap().starts_with("kvpack bench --backend cpu --quick"), "{run}");
    assert!(run["date"].as_str().unwrap().ends_with(" UTC") && run["driver"].is_string(), "{run}");
    assert_eq!(bench["kind"], "bench");
    // Without it the figures stand beside no bandwidth.
    assert!(bench["shapes"][0]["read_gigabytes_per_second"].as_f64().unwrap() > 0.0);
}

/// Sizes of one's own, as CSV and Markdown, with a recipe; the files of the report are there too.
#[test]
fn bench_takes_sizes_and_prints_tables() {
    let files = std::path::Path::new(common::SCRATCH).join("bench-sizes");
    let sizes = ["--batch", "1,2", "--tokens", "256", "--heads", "4/2", "--head-dim", "64", "--format", "kivi:4"];
    let short = ["--backend", "cpu", "--footprint", "1", "--seconds", "0.01"];
    let run = |style: &[&str]| kvpack(&[["bench"].as_slice(), &sizes, &short, style].concat());
    let csv = run(&["--csv", "--report", files.to_str().unwrap()]);
    assert_eq!(csv.code, 0, "{}", csv.err);
    let lines: Vec<&str> = csv.out.lines().collect();
    assert!(lines.len() == 5 && lines[0].starts_with("shape,sequences,tokens,"), "{}", csv.out);
    assert!(lines[2].starts_with("b1-256-h4x2-d64,1,256,4,2,64,kivi:4,"), "{}", csv.out);
    // Commas within quotes are none of the separators'.
    let cells = |line: &str| line.split('"').step_by(2).map(|part| part.matches(',').count()).sum::<usize>();
    assert!(lines.iter().all(|line| cells(line) == cells(lines[0])), "{}", csv.out);
    let report = std::fs::read_to_string(files.with_extension("json")).unwrap();
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["shapes"].as_array().map(Vec::len), Some(2));
    // What is printed is what the last reading of the bandwidth has left: as in the report.
    let final_rows = report["shapes"].as_array().unwrap().iter().flat_map(|shape| shape["rows"].as_array().unwrap());
    for (line, row) in lines[1..].iter().zip(final_rows) {
        assert!(line.contains(&format!(",{},", row["outcome"].as_str().unwrap())), "{line}: {row}");
        if let Some(percent) = row["percent_of_read"].as_f64() {
            let printed = line.rsplit(',').nth(4).unwrap().parse::<f64>().unwrap();
            assert!((printed / percent - 1.0).abs() < 1e-12, "{line}: {row}");
        }
    }
    assert!(std::fs::read_to_string(files.with_extension("html")).unwrap().contains("kivi:4"));
    let markdown = run(&["--markdown"]);
    assert!(markdown.out.lines().count() == 6 && markdown.out.contains("| `kivi:4` |"), "{}", markdown.out);
    let table = run(&[]);
    assert!(table.out.contains("b2-256-h4x2-d64: 2 sequences of 256 tokens"), "{}", table.out);
    let both = kvpack(&["bench", "--batch", "1", "--shape", "g1-b1-4k"]);
    assert!(both.code == 2 && both.err.contains("take the place of"), "{}", both.err);
}

/// Rows are in the report as soon as they end: a run that is killed has lost nothing.
#[test]
fn a_killed_bench_leaves_its_rows() {
    use std::io::{BufRead, BufReader};
    let files = std::path::Path::new(common::SCRATCH).join("bench-killed");
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_kvpack"));
    command.args(["bench", "--backend", "cpu", "--tokens", "256", "--footprint", "1", "--report"]);
    let mut child = command.arg(&files).stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    // The second row is there when the files of the first one are. Lines about the shape stand before them, and a warning
    // below a row that was timed next to other programs.
    let is_row = |line: &String| line.contains(" %") && !line.contains("% read") && !line.starts_with("unsteady");
    let rows: Vec<String> = lines.by_ref().map(Result::unwrap).filter(is_row).take(2).collect();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(rows.len() == 2 && rows[0].starts_with("f16 "), "{rows:?}");
    let report = std::fs::read_to_string(files.with_extension("json")).unwrap();
    let report: serde_json::Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["shapes"][0]["rows"][0]["format"], "f16");
}

#[test]
fn bench_times_what_it_appended() {
    let bench = json(&["bench", "--backend", "cpu", "--suite", "append", "--format", "V 4-bit per token", "--json"]);
    let rows = bench["rows"].as_array().expect("rows");
    for (token, packs) in [("packed", false), ("f16 window", true)] {
        let mut of_kind = rows.iter().filter(|row| row["token"] == token).peekable();
        assert!(of_kind.peek().is_some(), "{rows:?}");
        assert!(of_kind.all(|row| row["append_us"].as_f64() > Some(0.0) && row["pack_us"].is_number() == packs));
    }
}

/// What can be wrong with a model, or asked too much of it, from outside.
#[test]
fn models_that_cannot_run_are_errors() {
    let missing = kvpack(&["generate", "--model", "/no/such.gguf", "a prompt"]);
    assert_eq!(missing.code, 2);
    assert!(missing.err.contains("/no/such.gguf") && missing.err.contains("fetch-model.sh"), "{}", missing.err);
    let no_model = kvpack(&["eval", "--model", DUMP]);
    assert_eq!(no_model.code, 2);
    assert!(no_model.err.contains("GGUF"), "{}", no_model.err);
    let recipe = kvpack(&["generate", "--recipe", "kiwi:2", "a prompt"]);
    assert_eq!(recipe.code, 2);
    assert!(recipe.err.contains("the methods are f16"), "{}", recipe.err);
    // What evicts tokens is refused where all are kept.
    let evicts = kvpack(&["shader", "--format", "h2o:0.2/saw-int4"]);
    assert_eq!(evicts.code, 2);
    assert!(evicts.err.contains("evicts tokens"), "{}", evicts.err);
}

#[test]
fn bench_times_prompts_that_it_checked() {
    let bench = json(&["bench", "--backend", "cpu", "--suite", "prefill", "--format", "saw-int4", "--json"]);
    let rows = bench["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 6, "three batches in f16 and in a packed format");
    for row in rows {
        assert!(row["nmse"].as_f64().unwrap() < 1e-6 && row["tflops"].as_f64() > Some(0.0), "{row}");
        let us = row["wall_us"].as_f64().unwrap();
        assert!(row["low_us"].as_f64().unwrap() <= us && us <= row["high_us"].as_f64().unwrap(), "{row}");
    }
    let unknown = kvpack(&["bench", "--backend", "cpu", "--suite", "prefill", "--format", "saw-int5"]);
    assert!(
        unknown.code == 2 && unknown.err.contains("did you mean") && unknown.err.contains("saw-int4"),
        "{}",
        unknown.err
    );
}

#[test]
fn bench_takes_a_dump() {
    let bench = json(&[
        "bench",
        "--backend",
        "cpu",
        "--quick",
        "--format",
        "1-bit per channel",
        "--footprint",
        "1",
        "--json",
        DUMP,
    ]);
    assert_eq!(bench["shapes"][0]["shape"], "smollm2_kv layer 15");
    // f16 and the one format of 1 bit per channel.
    assert_eq!(bench["shapes"][0]["rows"].as_array().map(Vec::len), Some(2));
}

/// What the documentation says of the shipped data: one bit takes a fifteenth of f16, and calibration does not lose.
#[test]
fn eval_at_one_bit_is_small_and_calibration_does_not_lose() {
    let files = std::env::temp_dir().join(format!("kvpack-eval-{}", std::process::id()));
    let path = files.to_str().expect("UTF-8");
    let eval = json(&["eval", "--backend", "cpu", "--format", "1-bit per channel", "--json", "--report", path, DUMP]);
    let written = std::fs::read_to_string(files.with_extension("json")).expect("the report's JSON");
    assert_eq!(eval, serde_json::from_str::<serde_json::Value>(&written).expect("JSON"));
    let page = std::fs::read_to_string(files.with_extension("html")).expect("the report's page");
    assert_eq!(page.matches("<figure>").count(), 2, "errors of the outputs and of the rows");
    assert!(page.contains("<ul class=\"verdict\"><li>At 1 bit, calibquant:1 loses least"), "{page}");
    assert!(page.matches("calibquant:1").count() >= 4, "in the verdict, the table and both plots");
    // Devices or builds beside each other, under the names that they are given.
    let (json_file, compared) = (files.with_extension("json"), files.with_extension("compared.html"));
    let (old, new) = (format!("old={}", json_file.display()), format!("new={}", json_file.display()));
    let run = kvpack(&["compare", &old, &new, "--out", compared.to_str().expect("UTF-8")]);
    assert_eq!(run.code, 0, "{}", run.err);
    let page = std::fs::read_to_string(&compared).expect("the compared page");
    assert!(page.contains("<th>old</th><th>new</th>") && page.contains("<h1>kvpack: old and new</h1>"), "{page}");
    std::fs::remove_file(compared).expect("it was written");
    for extension in ["json", "html"] {
        std::fs::remove_file(files.with_extension(extension)).expect("it was written");
    }
    let rows = eval["summary"].as_array().expect("rows");
    assert_eq!(rows.len(), 3);
    let number =
        |row: &serde_json::Value, field: &str| row[field].as_f64().unwrap_or_else(|| panic!("{field} of {row}"));
    assert!(number(&rows[0], "mean_error") < 1e-5 && rows[0]["mean_calibrated_error"].is_null(), "{}", rows[0]);
    for row in &rows[1..] {
        assert!(number(row, "times_smaller") > 15.0, "{row}");
        assert!(number(row, "mean_calibrated_error") <= number(row, "mean_error"), "{row}");
    }
}

#[cfg(feature = "cuda")]
#[test]
fn cuda_without_a_driver_is_named() {
    if ::kvpack::cuda::driver_present() {
        return;
    }
    let run = kvpack(&["check", "--backend", "cuda", "--quick"]);
    assert_eq!(run.code, 2, "{}", run.err);
    assert!(run.err.contains("libcuda"), "{}", run.err);
}

#[test]
fn wrong_usage_has_exit_code_2_and_says_what_to_do() {
    let cases: [(&[&str], &str); 29] = [
        (&["check", "--backend", "cpu", "--filter", "no such case"], "no check matches"),
        (&["check", "--backend", "cpu", "--adapter", "x"], "leave one of the two out"),
        (&["check", "--backend", "cpu", "--path", "floor"], "leave one of the two out"),
        (&["check", "--backend", "cuda", "--path", "floor"], "leave one of the two out"),
        (&["check", "--adapter", "no such adapter"], "no such adapter"),
        (&["bench", "--backend", "cpu", "--shape", "no such shape"], "g4-b8-32k"),
        (&["bench", "--backend", "cpu", "--format", "no such format"], "4-bit per token"),
        (&["eval", "--backend", "cpu", DUMP, "--format", "no such format"], "4-bit per token"),
        (&["bench", "--backend", "cpu", "--quick", "--query", "int8"], "leave --query out"),
        (&["bench", "--backend", "cpu", "--seconds", "inf"], "above 0"),
        (&["bench", "--backend", "cpu", "--seconds=-1"], "above 0"),
        (&["bench", "--backend", "cpu", "--seconds", "-1"], "above 0"),
        (&["bench", "--backend", "cpu", "--tokens", "-4"], "from 1 to"),
        (&["generate", "--tokens", "-1"], "give a whole number"),
        (&["bench", "--backend", "cpu", "--suite", "step", "--format", "4-bit"], "leave --format out"),
        (&["bench", "--backend", "cpu", "--suite", "step", "--shape", "g4"], "leave --shape out"),
        (&["bench", "--backend", "cpu", "--suite", "prefill", "--shape", "g4"], "'8 drafts of 4 over 128, 32/8×64'"),
        (&["bench", "--suite", "ranks", "--backend", "cpu"], "runs on NVIDIA GPUs"),
        (&["bench", "--suite", "ranks", "--ranks", "3"], "give 1, 2, 4 or 8"),
        (&["bench", "--suite", "ranks", "--ranks", "8"], "8 ranks need 8 NVIDIA GPUs"),
        (&["bench", "--suite", "decode", "--ranks", "2"], "belongs to --suite ranks"),
        (&["bench", "--suite", "linear", "--backend", "cpu"], "only as a reference"),
        (&["bench", "--backend", "cpu", "--suite", "append", "--seconds", "0.1"], "leave --seconds out"),
        (&["bench", "--backend", "cpu", "--suite", "causal", "--query", "int8"], "leave --query out"),
        (&["bench", "--backend", "cpu", "--suite", "evict", "--footprint", "1"], "leave --footprint out"),
        (&["eval", "--backend", "cpu", "--model", common::MODEL, "--keep-first", "1"], "cannot be used with"),
        (&["eval", "--backend", "cpu", "--model", common::MODEL, "--keep-last", "1"], "cannot be used with"),
        (&["eval", "--backend", "cpu", "--model", common::MODEL, "--documents", "18446744073709551615"], "needs some"),
        (&["eval", "--backend", "cpu", DUMP, "--keep-first", "1000", "--keep-last", "152"], "keep fewer"),
    ];
    for (arguments, hint) in cases {
        let run = kvpack(arguments);
        assert_eq!(run.code, 2, "{arguments:?}: {}", run.err);
        assert!(run.err.contains(hint), "{arguments:?}: {}", run.err);
    }
}

/// The suites that time what a policy and a mixture cost check what they time, and have every row.
#[test]
fn bench_times_eviction_and_chunks() {
    let evict = json(&["bench", "--backend", "cpu", "--suite", "evict", "--json"]);
    let rows = evict["rows"].as_array().expect("rows");
    for what in ["statistics", "top_k", "merge_tokens", "gather and pack", "ModelCache::compress", "decode step"] {
        let mut of_kind = rows.iter().filter(|row| row["what"].as_str().is_some_and(|text| text.contains(what)));
        let row = of_kind.next().unwrap_or_else(|| panic!("no row of {what} in {rows:?}"));
        // The CPU has no clock of its own.
        assert!(row["call_us"].as_f64() > Some(0.0) && row["kernels_us"].is_null(), "{row}");
    }
    let chunks = json(&["bench", "--backend", "cpu", "--suite", "chunks", "--json"]);
    assert_eq!(chunks["steps"].as_array().map(Vec::len), Some(7));
    assert_eq!(chunks["packing"].as_array().map(Vec::len), Some(4));
    assert!([evict, chunks].iter().all(|report| report["skipped"].as_array().is_some_and(Vec::is_empty)));
}
