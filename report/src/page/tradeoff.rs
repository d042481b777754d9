//! Quality and speed in one plot: what a format loses against what its decode step takes.

use super::html::Html;
use super::plot::{Plot, Point, Scale, mark_front};
use super::{Subject, by_family, percent};
use crate::family::{Family, Named};
use crate::{BenchReport, BenchRow, EvalReport, ModelReport, ShapeReport, SummaryRow};

/// Where it is known what formats lose.
enum Loss<'a> {
    Eval(&'a Subject<'a, EvalReport>),
    Model(&'a Subject<'a, ModelReport>),
}

impl Loss<'_> {
    const fn name(&self) -> &str {
        match self {
            Self::Eval(subject) => subject.name,
            Self::Model(subject) => subject.name,
        }
    }

    const fn axis(&self) -> &'static str {
        match self {
            Self::Eval(_) => "error of the attention outputs",
            Self::Model(_) => "KL divergence from the f16 cache, nats",
        }
    }

    /// What the format of a row loses, as a number and in words.
    fn of(&self, row: &BenchRow) -> Option<(f64, String)> {
        match self {
            Self::Eval(subject) => {
                // The same format has other words in the two reports; the recipe is one.
                let same = |other: &&SummaryRow| match (&row.recipe, &other.recipe) {
                    (Some(own), Some(other)) => own == other,
                    _ => row.format == other.format,
                };
                let other = subject.report.summary.iter().find(same)?;
                Some((other.mean_error, format!("error of the outputs {}", percent(other.mean_error))))
            }
            Self::Model(subject) => {
                let recipe = row.recipe.as_deref()?;
                let other = subject.report.rows.iter().find(|other| other.recipe == recipe)?;
                Some((other.divergence, format!("KL {:.5}", other.divergence)))
            }
        }
    }
}

/// Adds a plot for every benchmark of a device and every evaluation, where rows of both are of the same format. The
/// shape is the one with the most rows, the first of several.
pub fn section(
    html: &mut Html,
    benches: &[Subject<'_, BenchReport>],
    evals: &[Subject<'_, EvalReport>],
    models: &[Subject<'_, ModelReport>],
) {
    let evals = evals.iter().map(Loss::Eval);
    let losses: Vec<Loss<'_>> = evals.chain(models.iter().map(Loss::Model)).collect();
    let caption = "Lower left is better: less lost, less time. A ring marks what no other format beats in both. Numbers are the \
                   width of a code.";
    let mut plots = Vec::new();
    for bench in benches {
        // Of shapes with as many rows the first.
        let shapes = bench.report.shapes.iter().rev();
        let Some(shape) = shapes.max_by_key(|shape| shape.rows.len()) else { continue };
        plots.extend(losses.iter().filter_map(|loss| Some((plot(bench.name, shape, loss)?, caption.to_owned()))));
    }
    if !plots.is_empty() {
        html.section("Quality and speed");
        html.plots(&plots);
    }
}

fn plot(device: &str, shape: &ShapeReport, loss: &Loss<'_>) -> Option<Plot> {
    let point = |row: &BenchRow| {
        let figures = row.outcome.figures()?;
        let named = Named::format(&row.format).filter(|named| row.parts.len() == 1 && named.family != Family::F16)?;
        let (x, lost) = loss.of(row).filter(|(x, _)| *x > 0.0)?;
        let tip = format!("{}\n{lost}\n{:.1} µs", row.name(), figures.step_us);
        let label = named.width.to_string();
        Some((named.family, Point { x, y: figures.step_us, label, tip, on_line: named.plain, front: false }))
    };
    let mut series = by_family(shape.rows.iter().filter_map(point).collect());
    mark_front(&mut series);
    let points = series.iter().map(|series| series.points.len()).sum::<usize>();
    (points > 1).then(|| Plot {
        title: format!("{} on {device}, and what {} loses", shape.shape, loss.name()),
        x: loss.axis().into(),
        y: "µs of a decode step".into(),
        x_scale: Scale::Logarithmic,
        y_scale: Scale::Logarithmic,
        series,
        references: Vec::new(),
    })
}
