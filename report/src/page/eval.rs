//! What formats do to the attention outputs of a dump.

use std::f64::consts::PI;

use super::html::Html;
use super::plot::{Plot, Point, Reference, Scale, mark_front};
use super::{SIZES, Subject, by_family, megabytes, percent, recipe_and_format, run_in_words};
use crate::family::{Family, Named};
use crate::{EvalReport, SummaryRow};

/// Adds what there is to say about some evaluations.
pub fn sections(html: &mut Html, subjects: &[Subject<'_, EvalReport>]) {
    for subject in subjects {
        html.verdict(&verdict(subject, subjects.len() > 1));
    }
    for Subject { report, .. } in subjects {
        html.paragraph(&described(report));
    }
    let plots = subjects.iter().map(|subject| {
        let caption = "Bits count the packed tokens alone, with their ranges. A ring marks what no other format beats in \
                       both: the Pareto front. Numbers are the width of a code.";
        (outputs(subject, subjects.len() > 1), caption.to_owned())
    });
    let mut plots: Vec<(Plot, String)> = plots.collect();
    plots.extend(subjects.iter().filter_map(|subject| {
        let caption = "How much of the keys and values themselves is lost, relative to their squares. The squares are \
                       those of the keys as they are, also where a format stores them minus a centre. No code of R bits \
                       loses less than 2^-2R of rows that are Gaussian, as rotated rows nearly are; TurboQuant proves to \
                       lose at most √3π/2 times that. Formats that follow the channels may lose less, because real \
                       channels differ, and so may formats with a centre, because it holds a part of the keys.";
        Some((rows(subject, subjects.len() > 1)?, caption.to_owned()))
    }));
    html.plots(&plots);
    match subjects {
        [subject] => table(html, subject.report),
        _ => side_by_side(html, subjects),
    }
}

/// The format with the least error for every width of a code.
fn best(report: &EvalReport, size: u32) -> Option<&SummaryRow> {
    let of_size = |row: &&SummaryRow| Named::format(&row.format).is_some_and(|named| named.width == size);
    report.summary.iter().filter(of_size).min_by(|a, b| a.mean_error.total_cmp(&b.mean_error))
}

/// What the best format of 4 bits loses, in the first evaluation.
pub fn sentence(subjects: &[Subject<'_, EvalReport>]) -> Option<String> {
    let row = best(subjects.first()?.report, 4)?;
    let (name, error) = (row.name(), percent(row.mean_error));
    Some(format!("Of the formats of 4 bits, {name} loses least: {error} of the attention outputs."))
}

fn verdict(Subject { name, report }: &Subject<'_, EvalReport>, many: bool) -> Vec<String> {
    let of_size = |size: u32| {
        let row = best(report, size)?;
        Some(format!(
            "{}At {size} bit{}, {} loses least: {} of the attention outputs, in {:.2} bits per element of the packed tokens, \
             {:.1} times smaller than f16.",
            if many { format!("{name}: ") } else { String::new() },
            if size == 1 { "" } else { "s" },
            row.name(),
            percent(row.mean_error),
            row.packed_bits,
            16.0 / row.packed_bits
        ))
    };
    SIZES.into_iter().filter_map(of_size).collect()
}

fn described(report: &EvalReport) -> String {
    let described =
        |what: &str, text: &Option<String>| text.as_ref().map_or(String::new(), |text| format!("{what}: {text}. "));
    format!(
        "{}{}Attention on {}, {} layers; the first {} and the last {} tokens stay in f16. Errors are relative L2 errors of the \
         attention outputs against exact attention over the dump, the mean over the layers. {}",
        described("Model", &report.model),
        described("Text", &report.text),
        report.backend,
        report.layers.len(),
        report.kept_first,
        report.kept_last,
        run_in_words(report.run.as_ref())
    )
}

/// Error of the outputs against bits.
fn outputs(Subject { name, report }: &Subject<'_, EvalReport>, many: bool) -> Plot {
    let mut series = by_family(points(report, |row| Some(100.0 * row.mean_error)));
    mark_front(&mut series);
    Plot {
        title: titled("Error of the attention outputs", name, many),
        x: "bits per element of the packed tokens".into(),
        y: "relative L2 error in percent".into(),
        x_scale: Scale::PowersOfTwo,
        y_scale: Scale::Logarithmic,
        series,
        ..Plot::default()
    }
}

/// Error of the rows against bits, with the error that theory predicts.
fn rows(Subject { name, report }: &Subject<'_, EvalReport>, many: bool) -> Option<Plot> {
    let mut series = by_family(points(report, |row| row.row_error));
    if series.is_empty() {
        return None;
    }
    mark_front(&mut series);
    let curve = |factor: f64| (4..=144).map(|i| f64::from(i) / 16.0).map(|r| (r, factor * 4f64.powf(-r))).collect();
    let gauss = Reference { name: "Gaussian bound, 2^-2R".into(), dashed: false, points: curve(1.0) };
    let turbo = Reference { name: "TurboQuant's bound".into(), dashed: true, points: curve(3f64.sqrt() * PI / 2.0) };
    Some(Plot {
        title: titled("Error of the stored rows, and what theory allows", name, many),
        x: "bits per element of the packed tokens".into(),
        y: "squared error, relative".into(),
        x_scale: Scale::PowersOfTwo,
        y_scale: Scale::Logarithmic,
        series,
        references: vec![gauss, turbo],
    })
}

fn titled(title: &str, name: &str, many: bool) -> String {
    if many { format!("{title}: {name}") } else { title.into() }
}

/// f16 is no code: it would leave the plot half empty.
fn points(report: &EvalReport, error: impl Fn(&SummaryRow) -> Option<f64>) -> Vec<(Family, Point)> {
    let point = |row: &SummaryRow| {
        let named = Named::format(&row.format).filter(|named| named.family != Family::F16)?;
        let y = error(row).filter(|error| *error > 0.0)?;
        let tip = format!(
            "{}\noutputs: {} (worst layer {})\n{:.2} bits per element of the packed tokens\nwhole cache: {}, {:.2} bits",
            recipe_and_format(row.name(), &row.format),
            percent(row.mean_error),
            percent(row.worst_error),
            row.packed_bits,
            megabytes(row.bytes),
            row.bits_per_element
        );
        let point =
            Point { x: row.packed_bits, y, label: named.width.to_string(), tip, on_line: named.plain, front: false };
        Some((named.family, point))
    };
    report.summary.iter().filter_map(point).collect()
}

fn table(html: &mut Html, report: &EvalReport) {
    let best: Vec<&str> = SIZES.iter().filter_map(|&size| best(report, size)).map(|row| row.format.as_str()).collect();
    // A column of dashes says nothing.
    let calibrated = report.summary.iter().any(|row| row.mean_calibrated_error.is_some());
    let mut header = vec!["recipe and format", "mean error", "worst layer"];
    if calibrated {
        header.push("calibrated");
    }
    header.extend(["error of rows", "bits of packed tokens", "×", "bits of the whole cache", "size"]);
    let rows = report.summary.iter().map(|row| {
        let name = recipe_and_format(row.name(), &row.format);
        let mut cells = vec![name, percent(row.mean_error), percent(row.worst_error)];
        if calibrated {
            cells.push(row.mean_calibrated_error.map_or("–".into(), percent));
        }
        cells.extend([
            row.row_error.map_or("–".into(), |error| format!("{error:.1e}")),
            format!("{:.2}", row.packed_bits),
            format!("{:.2}", 16.0 / row.packed_bits),
            format!("{:.2}", row.bits_per_element),
            megabytes(row.bytes),
        ]);
        (best.contains(&row.format.as_str()), cells)
    });
    html.table(&header, rows);
}

/// The errors of several evaluations, a column for each.
fn side_by_side(html: &mut Html, subjects: &[Subject<'_, EvalReport>]) {
    let mut header = vec!["mean error of the outputs"];
    header.extend(subjects.iter().map(|subject| subject.name));
    let mut formats: Vec<&str> = Vec::new();
    for row in subjects.iter().flat_map(|subject| &subject.report.summary) {
        if !formats.contains(&row.format.as_str()) {
            formats.push(&row.format);
        }
    }
    let row = |format: &str| {
        let of = |subject: &Subject<'_, EvalReport>| {
            let row = subject.report.summary.iter().find(|row| row.format == format);
            row.map_or("–".into(), |row| percent(row.mean_error))
        };
        let mut rows = subjects.iter().flat_map(|subject| &subject.report.summary);
        let name = rows.find(|row| row.format == format).map_or(format, SummaryRow::name);
        std::iter::once(recipe_and_format(name, format)).chain(subjects.iter().map(of)).collect()
    };
    html.table(&header, formats.iter().map(|format| (false, row(format))));
}
