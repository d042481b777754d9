//! What recipes do to answers about documents.

use super::html::Html;
use super::plot::{Plot, Point, Series};
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
        html.plots(&[
            (by_share(report, "A passage of the document, quoted", |row| &row.quotes), caption.into()),
            (by_share(report, "A pass key hidden in the document", |row| &row.passkeys), caption.into()),
        ]);
        html.table(&COLUMNS, report.rows.iter().map(|row| (false, row.cells().to_vec())));
        html.paragraph(&LEGEND.join(" "));
    }
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
    Plot { title: title.into(), x, y, x_logarithmic: true, series, ..Plot::default() }
}
