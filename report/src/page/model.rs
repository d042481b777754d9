//! What recipes do to a model that reads a text.

use kvpack::TILE_TOKENS;

use super::html::Html;
use super::plot::{Plot, Point, Reference, Scale, Series, mark_front};
use super::{Subject, by_family, megabytes, percent, run_in_words};
use crate::family::{Family, Named};
use crate::{ModelReport, RecipeRow};

/// Sizes of a whole cache that a verdict speaks about, in bits per element.
const BUDGETS: [f64; 5] = [9.0, 6.0, 5.0, 4.0, 3.0];

/// The largest number of lines of a plot of divergence by position: the recipes that diverge least.
const LINES: usize = 8;

/// A divergence below this is that of the last bits of the arithmetic.
const LEAST: f64 = 1e-7;

/// Adds what there is to say about some models.
pub fn sections(html: &mut Html, subjects: &[Subject<'_, ModelReport>]) {
    let many = subjects.len() > 1;
    for subject in subjects {
        html.verdict(&verdict(subject, many));
    }
    for Subject { report, .. } in subjects {
        html.paragraph(&format!(
            "{} reads {}. Attention on {}. The f16 cache against full-precision attention: NMSE {:.1e} of the \
             log-probabilities of {} tokens. KL is the divergence from the predictions{} with an f16 cache, in nats. {}",
            report.model,
            report.text,
            report.backend,
            report.f16_nmse,
            report.compared_tokens,
            report.against.as_ref().map_or_else(String::new, |model| format!(" of {model}")),
            run_in_words(report.run.as_ref())
        ));
    }
    let titled = |title: &str, name: &str| if many { format!("{title}: {name}") } else { title.to_owned() };
    let mut plots = Vec::new();
    for Subject { name, report } in subjects {
        let caption = "The whole cache at the end of the text, with windows and ranges. A ring marks what no other recipe \
                       beats in both. Numbers are the width of a code; the line goes through recipes without options.";
        plots.push((by_bytes(report, titled("KL divergence by size of the cache", name)), caption.to_owned()));
        if let Some(plot) = by_perplexity(report, titled("Perplexity by size of the cache", name)) {
            let caption = "Lower left is better. The dashed line is the perplexity with an f16 cache.";
            plots.push((plot, caption.to_owned()));
        }
        let caption = "Chunks of 128 tokens; the recipes that diverge least.";
        plots.push((by_position(report, titled("KL divergence by position in the text", name)), caption.to_owned()));
    }
    html.plots(&plots);
    for Subject { name, report } in subjects {
        if many {
            html.paragraph(name);
        }
        table(html, report);
    }
}

/// The recipe with the least divergence among those whose cache is no larger.
fn best(report: &ModelReport, bits: f64) -> Option<&RecipeRow> {
    let fits = |row: &&RecipeRow| row.bits_per_element <= bits && row.recipe != "f16";
    report.rows.iter().filter(fits).min_by(|a, b| a.divergence.total_cmp(&b.divergence))
}

/// The recipe of the smallest cache that leaves the predictions nearly as they are.
pub fn sentence(subjects: &[Subject<'_, ModelReport>]) -> Option<String> {
    let subject = subjects.first()?;
    let keeps = subject.report.rows.iter().filter(|row| row.divergence <= NEARLY_THE_SAME && row.recipe != "f16");
    let smallest = keeps.min_by(|a, b| a.bits_per_element.total_cmp(&b.bits_per_element))?;
    Some(format!(
        "{} keeps the predictions of {} (KL {:.4}) in a cache of {:.1} bits per element.",
        smallest.recipe, subject.report.model, smallest.divergence, smallest.bits_per_element
    ))
}

/// A divergence from the f16 cache, in nats, below which predictions are called the same.
const NEARLY_THE_SAME: f64 = 0.01;

fn verdict(Subject { name, report }: &Subject<'_, ModelReport>, many: bool) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    let mut last = None;
    for bits in BUDGETS {
        let Some(row) = best(report, bits) else { continue };
        // A smaller budget that nothing better fits says nothing new.
        if last == Some(&row.recipe) {
            continue;
        }
        last = Some(&row.recipe);
        lines.push(format!(
            "{}Within {bits} bits per element, {} is nearest to f16: KL {:.5}, {} of the likeliest tokens the same, {}.",
            if many { format!("{name}: ") } else { String::new() },
            row.recipe,
            row.divergence,
            percent(row.agreement),
            megabytes(row.bytes)
        ));
    }
    lines
}

fn by_bytes(report: &ModelReport, title: String) -> Plot {
    let point = |row: &RecipeRow| {
        let named = Named::recipe(&row.recipe).filter(|named| named.family != Family::F16)?;
        let tip = format!(
            "{}\nKL {:.5}, perplexity {:.2}\n{} of the likeliest tokens the same\n{}, {:.2} bits per element",
            row.recipe,
            row.divergence,
            row.perplexities.last().copied().unwrap_or(f64::NAN),
            percent(row.agreement),
            megabytes(row.bytes),
            row.bits_per_element
        );
        let (x, y) = (row.bytes as f64 / 1e6, row.divergence.max(LEAST));
        Some((named.family, Point { x, y, label: named.width.to_string(), tip, on_line: named.plain, front: false }))
    };
    let mut series = by_family(report.rows.iter().filter_map(point).collect());
    mark_front(&mut series);
    Plot { title, x: "cache, MB".into(), y: "KL, nats".into(), y_scale: Scale::Logarithmic, series, ..Plot::default() }
}

/// Perplexity at the longest length next to that of the f16 cache; `None` where that was not measured.
fn by_perplexity(report: &ModelReport, title: String) -> Option<Plot> {
    let perplexity = |row: &RecipeRow| row.perplexities.last().copied().filter(|x| x.is_finite());
    let f16 = report.rows.iter().find(|row| row.recipe == "f16").and_then(perplexity)?;
    let point = |row: &RecipeRow| {
        let named = Named::recipe(&row.recipe).filter(|named| named.family != Family::F16)?;
        let (x, y) = (row.bytes as f64 / 1e6, perplexity(row)?);
        let tip = format!("{}\nperplexity {y:.3}, f16 {f16:.3}\n{}", row.recipe, megabytes(row.bytes));
        Some((named.family, Point { x, y, label: named.width.to_string(), tip, on_line: named.plain, front: false }))
    };
    let mut series = by_family(report.rows.iter().filter_map(point).collect());
    mark_front(&mut series);
    let sizes = || series.iter().flat_map(|series| series.points.iter().map(|point| point.x));
    let (least, most) = (sizes().reduce(f64::min)?, sizes().reduce(f64::max)?);
    let name = format!("f16: perplexity {f16:.2}");
    let references = vec![Reference { name, dashed: true, points: vec![(least, f16), (most, f16)] }];
    let (x, y) = ("cache, MB".into(), "perplexity".into());
    Some(Plot { title, x, y, y_scale: Scale::Logarithmic, series, references, ..Plot::default() })
}

fn by_position(report: &ModelReport, title: String) -> Plot {
    let mut rows: Vec<&RecipeRow> = report.rows.iter().filter(|row| row.divergence > LEAST).collect();
    rows.sort_by(|a, b| a.divergence.total_cmp(&b.divergence));
    let series = rows.into_iter().take(LINES).enumerate().map(|(colour, row)| {
        let point = |(chunk, &y): (usize, &f64)| {
            let x = (chunk as f64 + 0.5) * TILE_TOKENS as f64;
            let tip = format!("{}\ntokens {} and on: KL {y:.5}", row.recipe, chunk * TILE_TOKENS);
            Point { x, y: y.max(LEAST), label: String::new(), tip, on_line: true, front: false }
        };
        Series {
            name: row.recipe.clone(),
            colour,
            points: row.divergence_by_chunk.iter().enumerate().map(point).collect(),
        }
    });
    Plot {
        title,
        x: "tokens".into(),
        y: "KL, nats".into(),
        y_scale: Scale::Logarithmic,
        series: series.collect(),
        ..Plot::default()
    }
}

fn table(html: &mut Html, report: &ModelReport) {
    let perplexities: Vec<String> = report.lengths.iter().map(|length| format!("ppl {length}")).collect();
    let mut header = vec!["recipe"];
    header.extend(perplexities.iter().map(String::as_str));
    header.extend(["KL, nats", "top-1", "pass key, nats", "found", "bits of the whole cache", "size"]);
    let best: Vec<&str> =
        BUDGETS.iter().filter_map(|&bits| best(report, bits)).map(|row| row.recipe.as_str()).collect();
    let rows = report.rows.iter().map(|row| {
        let passkeys = row.passkeys_found();
        let mut cells = vec![row.recipe.clone()];
        cells.extend(row.perplexities.iter().map(|perplexity| format!("{perplexity:.2}")));
        cells.extend([
            format!("{:.5}", row.divergence),
            percent(row.agreement),
            passkeys.map_or("–".into(), |(log_probability, _)| format!("{log_probability:.3}")),
            passkeys.map_or("–".into(), |(_, found)| format!("{found} of {}", row.passkeys.len())),
            format!("{:.2}", row.bits_per_element),
            megabytes(row.bytes),
        ]);
        (best.contains(&row.recipe.as_str()), cells)
    });
    html.table(&header, rows);
}
