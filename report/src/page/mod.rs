//! One self-contained page of HTML about what was measured: a verdict in words, plots, tables.

mod bench;
mod conformance;
mod documents;
mod escaped;
mod eval;
mod html;
mod model;
mod plot;

pub use bench::plot as decode_step;
use html::Html;
pub use plot::{Plot, Point, Reference, Scale, Series};

use crate::family::Family;
use crate::{BenchReport, ConformanceReport, DocumentsReport, EvalReport, Measured, ModelReport, PeersReport};

/// One report and what to call it beside others.
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

/// Reports beside each other: devices, builds, or kinds of measurement.
pub fn compare(named: &[(String, Measured)]) -> String {
    let mut html = Html::new(&named.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(" · "));
    let mut evals: Vec<Subject<'_, EvalReport>> = Vec::new();
    let mut models: Vec<Subject<'_, ModelReport>> = Vec::new();
    let mut documents: Vec<Subject<'_, DocumentsReport>> = Vec::new();
    let mut benches: Vec<Subject<'_, BenchReport>> = Vec::new();
    let mut peers: Vec<Subject<'_, PeersReport>> = Vec::new();
    let mut checks: Vec<Subject<'_, ConformanceReport>> = Vec::new();
    for (name, measured) in named {
        match measured {
            Measured::Eval(report) => evals.push(Subject { name, report }),
            Measured::Model(report) => models.push(Subject { name, report }),
            Measured::Documents(report) => documents.push(Subject { name, report }),
            Measured::Bench(report) => benches.push(Subject { name, report }),
            Measured::Peers(report) => peers.push(Subject { name, report }),
            Measured::Check(report) => checks.push(Subject { name, report }),
        }
    }
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
    if !checks.is_empty() {
        html.section("Conformance");
        conformance::sections(&mut html, &checks);
    }
    html.finish()
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

/// The run of a report in a sentence, as far as it is known.
fn run_in_words(run: Option<&crate::Run>) -> String {
    let Some(run) = run else { return String::new() };
    let commit = run.commit.as_ref().map_or(String::new(), |commit| format!(", commit {commit}"));
    format!("{}{commit}, driver {}: {}", run.date, run.driver, run.command)
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
