//! One page of every kind of report: what stands in it. `scripts/test-web.sh report` looks at the page in a browser.

use std::fs;
use std::path::Path;

use kvpack_report::page::compare;
use kvpack_report::{
    AnswerRow, CheckOutcome, CheckRow, ConformanceReport, DocumentsReport, DocumentsRow, Measured, ModelReport,
    RecipeRow, read,
};

/// A recipe whose divergence grows with the text.
fn recipe(recipe: &str, bits_per_element: f64, divergence: f64) -> RecipeRow {
    RecipeRow {
        recipe: recipe.into(),
        perplexities: vec![20.0 * divergence.exp()],
        divergence,
        divergence_by_chunk: (1..=8).map(|chunk| divergence * f64::from(chunk) / 4.0).collect(),
        agreement: (-divergence).exp(),
        passkeys: Vec::new(),
        bytes: (bits_per_element * 5e6) as u64,
        bits_per_element,
        attention_seconds: 1.0,
        model_seconds: 1.0,
    }
}

fn model() -> ModelReport {
    let rows = [
        ("f16", 16.0, 0.0),
        ("int8", 8.5, 0.0003),
        ("int4", 4.5, 0.08),
        ("turboquant:4", 4.5, 0.05),
        ("turboquant:3", 3.5, 0.2),
        ("turboquant:2", 2.5, 1.0),
        ("kivi:4", 5.3, 0.003),
        ("kivi:2", 3.4, 0.16),
        ("kivi:2+sink=128", 3.8, 0.09),
    ];
    ModelReport {
        run: None,
        model: "a model".into(),
        text: "a text".into(),
        backend: "CPU".into(),
        lengths: vec![1024],
        compared_tokens: 512,
        f16_nmse: 4e-9,
        against: None,
        passkey_tokens: 0,
        rows: rows.map(|(name, bits, divergence)| recipe(name, bits, divergence)).into(),
    }
}

/// A policy of 30 layers that keeps `share` of a prompt, more in the first layers by `slope`.
fn policy(recipe: &str, share: f64, slope: f64) -> DocumentsRow {
    let answer = |divergence: f64| AnswerRow {
        log_probability: -divergence,
        divergence,
        found: 0.5,
        hit_rate: Some(0.6),
        contribution: None,
        coverage: None,
    };
    DocumentsRow {
        recipe: recipe.into(),
        kept: share,
        kept_by_layer: (0..30).map(|layer| share * (1.0 + slope * (14.5 - f64::from(layer)) / 14.5)).collect(),
        bits_per_element: 16.0 * share,
        quotes: vec![answer(1.0 - share), answer(1.2 - share)],
        passkeys: vec![answer(0.9 - share), answer(1.0 - share)],
    }
}

fn documents() -> DocumentsReport {
    let mut rows = Vec::new();
    for share in [0.5, 0.2, 0.1] {
        rows.push(policy(&format!("vlcache:{share}"), share, 0.8));
        rows.push(policy(&format!("vlcache:{share}/saw-int4"), share, 0.8));
        rows.push(policy(&format!("h2o:{share}"), share, 0.0));
    }
    DocumentsReport {
        run: None,
        model: "a model".into(),
        text: "a text".into(),
        backend: "CPU".into(),
        documents: 2,
        document_tokens: 640,
        rows,
    }
}

fn checks(backend: &str, outcome: CheckOutcome) -> ConformanceReport {
    let row = |format: &str, outcome, nmse| CheckRow {
        check: format!("format-{format}").replace([' ', ','], "-"),
        of: "attention".into(),
        formats: vec!["f16".into(), format.into()],
        outcome,
        nmse,
        reason: (outcome != CheckOutcome::Passed).then(|| "no kernel".into()),
    };
    let rows = vec![
        row("4-bit per channel", CheckOutcome::Passed, Some(2e-9)),
        row("4-bit per token", outcome, None),
        row("K 3-bit codebook and 1-bit sketch, V 4-bit codebook", CheckOutcome::Passed, Some(3e-9)),
    ];
    ConformanceReport { backend: backend.into(), run: None, planned: None, rows }
}

#[test]
fn a_page_shows_every_kind_of_report() {
    let results = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/results/nvidia-h200.json");
    let mut named: Vec<(String, Measured)> = vec![
        ("model".into(), Measured::Model(model())),
        ("documents".into(), Measured::Documents(documents())),
        ("right".into(), Measured::Check(checks("one", CheckOutcome::Passed))),
        ("lacking".into(), Measured::Check(checks("another", CheckOutcome::Unsupported))),
    ];
    if let Ok(text) = fs::read_to_string(results) {
        // Steps of every format, and of parts of the sequences.
        let of_shape = |report: &Measured| match report {
            Measured::Bench(report) => report.shapes.iter().all(|shape| shape.shape == "g4-b8-32k"),
            Measured::Peers(_) => true,
            _ => false,
        };
        let reports = read(&text).expect("results").into_iter().filter(of_shape);
        named.extend(reports.map(|report| ("H200".to_owned(), report)));
    }
    let page = compare(&named);
    for part in [
        "is nearest to f16: KL",
        "KL divergence by size of the cache",
        "KL divergence by position in the text",
        "Perplexity by size of the cache",
        "Of what keeps about 20 % of the prompt, vlcache:0.2 quotes nearest to full precision (KL 0.900), and vlcache:0.2",
        "A passage of the document, quoted",
        "Budgets of the layers",
        "vlcache:0.5\nlayer 0: 90.0 % of the prompt&#39;s tokens",
        "right is right in all that was checked: 3 checks passed, 0 failed.",
        "1 are not served and say so",
        "<td>per token, 4 bits</td><td>✓ 1 of 1</td><td>not served</td>",
        "<h1>kvpack: model, documents, right, lacking and H200</h1>",
        "<p>All 5 checks passed.",
        "kivi:4 keeps the predictions of a model (KL 0.0030)",
    ] {
        assert!(page.contains(&part.replace("&#39;", "'")), "{part}");
    }
    if page.contains("Decode steps") {
        assert!(
            page.contains("A decode step over 4 bits is ")
                && page.contains("the fastest f16 attention of another library")
        );
        assert!(page.matches("<li>H200").count() <= 6, "a few verdicts, not one for every shape");
    }
    // Budgets that are the same in every layer say nothing, and what packs the kept tokens does not change them.
    let swatches = |name: &str| page.matches(&format!("</svg>{name}</li>")).count();
    assert_eq!((swatches("vlcache:0.5"), swatches("h2o:0.5"), swatches("vlcache:0.5/saw-int4")), (1, 0, 0));
    fs::write(Path::new(env!("CARGO_TARGET_TMPDIR")).join("every-kind.html"), page).expect("a writable folder");
}

/// A decode step in f16 and at 4 bits on a backend.
fn bench(backend: &str, options: &str) -> String {
    let row = |format: &str, us: f64| {
        format!(
            r#"{{"format": "{format}", "parts": ["{format}"], "nmse": 2e-9, "nmse_int16": null, "bytes": 1000,
            "copies": 2, "outcome": "timed", "timer": "clock", "launches": [], "step_us": {us}, "gigabytes_per_second": 1.0,
            "read_gigabytes_per_second": 9.0, "percent_of_read": 90.0, "times_f16": {}, "times_plain_f32": null,
            "guard_low_percent": 0.5}}"#,
            240.0 / us
        )
    };
    let rows = [row("f16", 240.0), row("4-bit per channel", 60.0)].join(",");
    format!(
        r#"{{"kind": "bench", "backend": "{backend}", "not_default": [{options}], "run": null, "shapes": [{{
        "shape": "g4-b8-32k", "sequences": 8, "tokens": 32768, "query_heads": 32, "kv_heads": 8, "head_dim": 128,
        "read_gigabytes_per_second": 9.0, "plain_f32_us": null, "rows": [{rows}]}}]}}"#
    )
}

const PEERS: &str = r#"{"kind": "peers", "device": "Card", "driver": "D 1", "date": "2026-01-02", "command": "x",
    "rows": [{"peer": "library 2", "shape": "g4-b8-32k", "format": "f16", "step_us": 243.25}]}"#;

#[test]
fn peers_are_compared_with_kvpack_on_their_device() {
    let page = |reports: &[String]| {
        let reports = read(&format!("[{}]", reports.join(","))).unwrap();
        compare(&reports.into_iter().map(|report| ("all".to_owned(), report)).collect::<Vec<_>>())
    };
    let elsewhere = page(&[bench("Card 2 (CUDA, sm_90)", "\"query int8\""), PEERS.into()]);
    assert!(!elsewhere.contains("library 2") && !elsewhere.contains("fastest f16 of another library"), "{elsewhere}");
    assert!(elsewhere.contains("Not the default: query int8."), "{elsewhere}");
    let both = page(&[bench("CPU (8 threads)", ""), bench("Card (Vulkan, f16)", ""), PEERS.into()]);
    let fastest = "The fastest f16 of another library: 4 bits 4.1.";
    assert_eq!(both.matches(fastest).count(), 1, "of the card alone: {both}");
    assert!(both.contains("library 2, f16, Card"), "the line of the plot: {both}");
    assert!(both.contains("<td>–</td><td>–</td><td>243.2</td><td>–</td>"), "in the card's column: {both}");
}
