//! What recipes do to answers about documents.

use super::html::Html;
use super::plot::{Plot, Point, Scale, Series};
use super::{Subject, run_in_words};
use crate::documents::{COLUMNS, LEGEND};
use crate::{AnswerRow, DocumentsReport, DocumentsRow};

/// A divergence below this is that of the last bits of the arithmetic.
const LEAST: f64 = 1e-7;

/// Adds what there is to say about some models.
pub fn sections(html: &mut Html, subjects: &[Subject<'_, DocumentsReport>]) {
    for Subject { name, report } in subjects {
        html.paragraph(&format!(
            "{name}: {} answers questions about {} documents of {} tokens from {}. Attention on {}. {}",
            report.model,
            report.documents,
            report.document_tokens,
            report.text,
            report.backend,
            run_in_words(report.run.as_ref())
        ));
        let caption = "Of the answer's predictions from those of full precision, the mean over documents.";
        let mut plots = vec![
            (by_share(report, "A passage of the document, quoted", |row| &row.quotes), caption.to_owned()),
            (by_share(report, "A pass key hidden in the document", |row| &row.passkeys), caption.to_owned()),
        ];
        if let Some(budgets) = budgets(report) {
            let caption = "How policies share their budget out, the mean over documents. Those that keep as many tokens in \
                           every layer are left out.";
            plots.push((budgets, caption.to_owned()));
        }
        html.plots(&plots);
        html.table(&COLUMNS, report.rows.iter().map(|row| (false, row.cells().to_vec())));
        html.paragraph(&LEGEND.join(" "));
    }
}

/// Budgets that are drawn, at most: those of the first policies.
const BUDGETS: usize = 8;

/// Kept tokens by layer, a line for every policy whose layers differ; none where no policy's do.
fn budgets(report: &DocumentsReport) -> Option<Plot> {
    let mut series: Vec<Series> = Vec::new();
    for row in &report.rows {
        let name = row.recipe.split('/').next().unwrap_or(&row.recipe);
        let differ = row.kept_by_layer.iter().any(|&kept| (kept - row.kept).abs() > 0.01 * row.kept);
        if !differ || series.len() == BUDGETS || series.iter().any(|series| series.name == name) {
            continue;
        }
        let point = |(layer, kept): (usize, &f64)| {
            let y = kept * 100.0;
            let tip = format!("{name}\nlayer {layer}: {y:.1} % of the prompt's tokens");
            Point { x: layer as f64, y, label: String::new(), tip, on_line: true, front: false }
        };
        let points = row.kept_by_layer.iter().enumerate().map(point).collect();
        series.push(Series { name: name.to_owned(), colour: series.len(), points });
    }
    (!series.is_empty()).then(|| Plot {
        title: "Budgets of the layers".into(),
        x: "layer".into(),
        y: "% of the prompt's tokens".into(),
        series,
        ..Plot::default()
    })
}

/// The divergence of policies by the share of tokens that they keep, a line for each policy.
fn by_share(report: &DocumentsReport, title: &str, answers: fn(&DocumentsRow) -> &Vec<AnswerRow>) -> Plot {
    let mut series: Vec<Series> = Vec::new();
    for row in report.rows.iter().filter(|row| row.kept < 1.0) {
        let (policy, format) = row.recipe.split_once('/').unwrap_or((&row.recipe, "f16"));
        let policy = policy.split(':').next().unwrap_or(policy);
        let name = if format == "f16" { policy.to_owned() } else { format!("{policy}, {format}") };
        let (divergence, deviation) = DocumentsRow::spread(answers(row), |answer| answer.divergence);
        let tip = format!("{}\nKL {divergence:.4} ± {deviation:.4}", row.recipe);
        let (x, y) = (row.kept * 100.0, divergence.max(LEAST));
        let point = Point { x, y, label: String::new(), tip, on_line: true, front: false };
        match series.iter_mut().find(|series| series.name == name) {
            Some(series) => series.points.push(point),
            None => series.push(Series { name, colour: series.len(), points: vec![point] }),
        }
    }
    series.iter_mut().for_each(|series| series.points.sort_by(|a, b| a.x.total_cmp(&b.x)));
    let (x, y) = ("% of the prompt's tokens".into(), "KL, nats".into());
    Plot {
        title: title.into(),
        x,
        y,
        x_scale: Scale::PowersOfTwo,
        y_scale: Scale::Logarithmic,
        series,
        ..Plot::default()
    }
}
