//! `kvpack demo`, and the dump that the command brings.

use std::fs;
use std::path::Path;

use crate::common::{MODEL, SCRATCH, kvpack};

fn json(text: &str) -> serde_json::Value {
    serde_json::from_str(text).expect("JSON")
}

/// The mean error of a recipe.
fn error(report: &serde_json::Value, recipe: &str) -> f64 {
    let mut rows = report["summary"].as_array().expect("rows").iter();
    rows.find(|row| row["recipe"] == recipe).and_then(|row| row["mean_error"].as_f64()).expect("the recipe's error")
}

/// On a small dump, so that it takes seconds.
#[test]
fn the_demo_agrees_with_the_command_that_it_names() {
    let directory = Path::new(SCRATCH).join("demo");
    fs::create_dir_all(&directory).unwrap();
    let path = |name: &str| directory.join(name).to_str().expect("UTF-8").to_owned();
    let (dump, report) = (path("dump.safetensors"), path("report"));
    let text = path("text");
    fs::write(&text, "word ".repeat(2000)).unwrap();
    let captured = kvpack(&[
        "capture",
        "--model",
        MODEL,
        "--text",
        &text,
        "--tokens",
        "300",
        "--queries",
        "4",
        "--layers",
        "0",
        &dump,
    ]);
    assert_eq!(captured.code, 0, "{}", captured.err);
    assert!(captured.out.contains("next: kvpack eval "), "{}", captured.out);

    let demo = kvpack(&["demo", "--backend", "cpu", "--report", &report, &dump]);
    assert_eq!(demo.code, 0, "{}{}", demo.out, demo.err);
    // Figures say how far their samples lie apart.
    assert!(demo.out.contains("A decode step, f16: ") && demo.out.contains("(n = "), "{}", demo.out);
    assert!(fs::read_to_string(format!("{report}.html")).unwrap().contains("int4"));
    let shown = json(&fs::read_to_string(format!("{report}.json")).unwrap());

    let named = format!("kvpack eval {dump} --keep-first 128 --keep-last 128");
    assert!(demo.out.contains(&named), "{}", demo.out);
    let mut arguments: Vec<&str> = named.split(' ').skip(1).collect();
    arguments.extend(["--backend", "cpu", "--format", "int4", "--json"]);
    let eval = kvpack(&arguments);
    assert_eq!(eval.code, 0, "{}", eval.err);
    assert_eq!(error(&shown, "int4"), error(&json(&eval.out), "int4"));

    // What it recommends can be pasted.
    let line = demo.out.lines().find(|line| line.trim_start().starts_with("4 bits")).expect("a row of 4 bits");
    let recipe = line.split_whitespace().nth(2).unwrap();
    assert_eq!(kvpack(&["shader", "--format", recipe]).code, 0, "{recipe}");
}

/// As after `cargo install`: there is no file of the repository.
#[test]
fn a_dump_is_bundled() {
    let run = kvpack(&["eval", "--backend", "cpu", "--layer", "15", "--format", "f16", "--json"]);
    assert_eq!(run.code, 0, "{}", run.err);
    let report = json(&run.out);
    assert_eq!((report["file"].as_str(), report["layers"][0]["tokens"].as_u64()), (Some("smollm2_kv"), Some(1152)));
    assert!(error(&report, "f16") < 1e-3);
}
