//! One self-contained page of HTML about what was measured: a verdict in words, plots, tables.

mod bench;
mod conformance;
mod documents;
mod escaped;
mod eval;
mod html;
mod model;
mod plot;
mod suite;
mod tradeoff;

pub use bench::plot as decode_step;
use html::Html;
pub use plot::{Plot, Point, Reference, Scale, Series};

use crate::family::Family;
use crate::{
    BenchReport, ConformanceReport, DocumentsReport, EvalReport, Measured, ModelReport, PeersReport, SuiteReport,
};

/// One report and its name among others.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a, T> {
    /// A file, a device or a build.
    pub name: &'a str,
    /// The report.
    pub report: &'a T,
}

/// Widths of codes that a verdict speaks about.
const SIZES: [u32; 5] = [8, 4, 3, 2, 1];

/// The page of one evaluation.
pub fn of_eval(report: &EvalReport) -> String {
    let mut html = Html::new(&format!("What formats do to attention: {}", report.file));
    eval::sections(&mut html, &[Subject { name: &report.file, report }]);
    html.finish()
}

/// The page of one evaluation of a model.
pub fn of_model(report: &ModelReport) -> String {
    let mut html = Html::new(&format!("What recipes do to {}", report.model));
    model::sections(&mut html, &[Subject { name: &report.model, report }]);
    html.finish()
}

/// The page of one evaluation of documents.
pub fn of_documents(report: &DocumentsReport) -> String {
    let mut html = Html::new(&format!("What eviction does to answers of {}", report.model));
    documents::sections(&mut html, &[Subject { name: &report.model, report }]);
    html.finish()
}

/// The page of one benchmark.
pub fn of_bench(report: &BenchReport) -> String {
    let mut html = Html::new(&format!("Decode steps on {}", report.backend));
    bench::sections(&mut html, &[Subject { name: &report.backend, report }], &[]);
    html.finish()
}

/// Reports next to each other: devices, builds, or kinds of measurement.
pub fn compare(named: &[(String, Measured)]) -> String {
    let mut html = Html::new(&title(named));
    let mut evals: Vec<Subject<'_, EvalReport>> = Vec::new();
    let mut models: Vec<Subject<'_, ModelReport>> = Vec::new();
    let mut documents: Vec<Subject<'_, DocumentsReport>> = Vec::new();
    let mut benches: Vec<Subject<'_, BenchReport>> = Vec::new();
    let mut peers: Vec<Subject<'_, PeersReport>> = Vec::new();
    let mut checks: Vec<Subject<'_, ConformanceReport>> = Vec::new();
    let mut suites: [Vec<Subject<'_, SuiteReport>>; SUITES.len()] = Default::default();
    for (name, measured) in named {
        match measured {
            Measured::Eval(report) => evals.push(Subject { name, report }),
            Measured::Model(report) => models.push(Subject { name, report }),
            Measured::Documents(report) => documents.push(Subject { name, report }),
            Measured::Bench(report) => benches.push(Subject { name, report }),
            Measured::Peers(report) => peers.push(Subject { name, report }),
            Measured::Check(report) => checks.push(Subject { name, report }),
            Measured::Append(report) => suites[0].push(Subject { name, report }),
            Measured::Causal(report) => suites[1].push(Subject { name, report }),
            Measured::Chunks(report) => suites[2].push(Subject { name, report }),
            Measured::Evict(report) => suites[3].push(Subject { name, report }),
            Measured::Linear(report) => suites[4].push(Subject { name, report }),
            Measured::Prefill(report) => suites[5].push(Subject { name, report }),
            Measured::Ranks(report) => suites[6].push(Subject { name, report }),
            Measured::Step(report) => suites[7].push(Subject { name, report }),
        }
    }
    // CUDA first, so that it has the colour that it has in every other plot.
    benches.sort_by_key(|subject| !subject.report.backend.contains("(CUDA"));
    let opening = opening(&benches, &peers, (&evals, &models), &checks);
    if !opening.is_empty() {
        html.paragraph(&opening);
    }
    tradeoff::section(&mut html, &benches, &evals, &models);
    if !evals.is_empty() {
        html.section("Attention outputs");
        eval::sections(&mut html, &evals);
    }
    if !models.is_empty() {
        html.section("A running model");
        model::sections(&mut html, &models);
    }
    if !documents.is_empty() {
        html.section("Answers about documents");
        documents::sections(&mut html, &documents);
    }
    if !benches.is_empty() {
        html.section("Decode steps");
        bench::sections(&mut html, &benches, &peers);
    }
    for ((title, about), subjects) in SUITES.into_iter().zip(&suites).filter(|(_, subjects)| !subjects.is_empty()) {
        html.section(title);
        suite::sections(&mut html, about, subjects);
    }
    if !checks.is_empty() {
        html.section("Conformance");
        conformance::sections(&mut html, &checks);
    }
    html.finish()
}

/// Suites with rows of their own: a headline, and what their rows are about. In the order of [`Measured`].
const SUITES: [(&str, &str); 8] = [
    (
        "Storing new tokens",
        "append_us: microseconds to store one token for each sequence. pack_us: microseconds per step to pack full \
         pages, spread over the 128 steps that fill them. Each launch packs the same pages, which fit a cache of 34 MB.",
    ),
    (
        "Causal runs",
        "run_us: the newest queries of a sequence in one run. apart_us: the same queries as decode steps of as many \
         sequences.",
    ),
    (
        "Chunks of several precisions",
        "us: microseconds of a decode step. kernels_us and call_us: microseconds of packing.",
    ),
    (
        "Eviction",
        "kernels_us: microseconds of the kernels. call_us: microseconds of the call by the wall clock, with its work \
         on the host.",
    ),
    (
        "Products with packed weights",
        "us: microseconds of a product of the rows with the weights of a layer. teraflops: 10^12 operations per \
         second.",
    ),
    (
        "Prompts and drafts",
        "wall_us: microseconds of a call of KvCache::attend_into by the wall clock, the median; half of the samples \
         lie from low_us to high_us. tflops: 10^12 operations per second.",
    ),
    (
        "One sequence over several GPUs",
        "exchanges, us: microseconds to exchange attention states alone. rows, us: microseconds of a step of one \
         query, attention, exchange and merge. efficiency: the time on one GPU over that on all of them, times their number.",
    ),
    (
        "Whole decode steps",
        "Microseconds per layer. wall_us: by the wall clock, steps queued one after the other. store_us and attend_us: \
         the kernels.",
    ),
];

/// `a, b and c compared`, each name once.
fn title(named: &[(String, Measured)]) -> String {
    let mut names: Vec<&str> = Vec::new();
    for (name, _) in named {
        // A file of several devices has its name before theirs.
        let name = name.split(", ").next().unwrap_or(name);
        if !names.contains(&name) {
            names.push(name);
        }
    }
    match names.as_slice() {
        [] => "kvpack".into(),
        [name] => format!("kvpack: {name}"),
        [names @ .., last] => format!("kvpack: {} and {last}", names.join(", ")),
    }
}

/// The page in a sentence or two: right or wrong, how fast, at which loss.
fn opening(
    benches: &[Subject<'_, BenchReport>],
    peers: &[Subject<'_, PeersReport>],
    (evals, models): (&[Subject<'_, EvalReport>], &[Subject<'_, ModelReport>]),
    checks: &[Subject<'_, ConformanceReport>],
) -> String {
    let sentences = [
        conformance::sentence(checks),
        bench::sentence(benches, peers),
        eval::sentence(evals),
        model::sentence(models),
    ];
    sentences.into_iter().flatten().collect::<Vec<_>>().join(" ")
}

/// The colour of a family, the same in every plot.
fn colour(family: Family) -> usize {
    match family {
        Family::F16 => 7,
        Family::PerChannel => 0,
        Family::PerToken => 1,
        Family::Rotated => 2,
        Family::Codebook => 3,
        Family::Renormalised => 4,
        Family::Sketch => 5,
        Family::Groups => 6,
    }
}

/// A line for every family that has points, each with a label, in the order of [`Family::ALL`].
fn by_family(points: Vec<(Family, Point)>) -> Vec<Series> {
    let of = |family: Family| {
        let points = points.iter().filter(|(of, _)| *of == family).map(|(_, point)| point.clone()).collect();
        Series { name: family.name().into(), colour: colour(family), points }
    };
    Family::ALL.into_iter().map(of).filter(|series: &Series| !series.points.is_empty()).collect()
}

/// A report's name with its backend, where the name does not have that.
fn with_backend(name: &str, backend: &str) -> String {
    if name.ends_with(backend) { name.to_owned() } else { format!("{name}: {backend}") }
}

/// The run of a report in a sentence, as far as it is known.
fn run_in_words(run: Option<&crate::Run>) -> String {
    let Some(run) = run else { return String::new() };
    let commit = run.commit.as_ref().map_or(String::new(), |commit| format!(", commit {commit}"));
    format!("{}{commit}, driver {}: {}", run.date, run.driver, run.command)
}

/// A recipe with its format on a line of its own, or a format alone.
fn recipe_and_format(name: &str, format: &str) -> String {
    if name == format { format.to_owned() } else { format!("{name}\n{format}") }
}

/// A fraction in percent with two or three digits that count.
fn percent(fraction: f64) -> String {
    let value = fraction * 100.0;
    match value {
        10.0.. => format!("{value:.1} %"),
        0.1.. => format!("{value:.2} %"),
        0.001.. => format!("{value:.4} %"),
        _ => format!("{value:.1e} %"),
    }
}

/// Bytes in millions.
fn megabytes(bytes: u64) -> String {
    format!("{:.2} MB", bytes as f64 / 1e6)
}
