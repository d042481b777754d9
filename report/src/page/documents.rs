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
    html.verdict(&subjects.iter().flat_map(|subject| verdict(subject, subjects.len() > 1)).collect::<Vec<_>>());
    for Subject { name, report } in subjects {
        let called = if subjects.len() > 1 { format!("{name}: ") } else { String::new() };
        html.paragraph(&format!(
            "{called}{} answers questions about {} documents of {} tokens from {}. Attention on {}. {}",
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
        html.paragraph(
            &LEGEND.map(str::to_owned).into_iter().chain(report.contributions()).collect::<Vec<_>>().join(" "),
        );
    }
}

/// Shares of a prompt that differ by no more than this part of them are said in one sentence.
const SAME_SHARE: f64 = 0.1;

/// Which policy answers best, for every share of the prompt that some keep.
fn verdict(Subject { name, report }: &Subject<'_, DocumentsReport>, many: bool) -> Vec<String> {
    let mut rows: Vec<&DocumentsRow> = report.rows.iter().filter(|row| row.kept < 1.0).collect();
    rows.sort_by(|a, b| b.kept.total_cmp(&a.kept));
    let same = |a: &&DocumentsRow, b: &&DocumentsRow| b.kept >= a.kept * (1.0 - SAME_SHARE);
    let sentence = |rows: &[&DocumentsRow]| {
        let best = |answers: fn(&DocumentsRow) -> &Vec<AnswerRow>| {
            let divergence = |row: &DocumentsRow| DocumentsRow::spread(answers(row), |answer| answer.divergence).0;
            let row = rows.iter().min_by(|a, b| divergence(a).total_cmp(&divergence(b)))?;
            Some((row.recipe.as_str(), divergence(row)))
        };
        let ((quotes, of_quotes), (keys, of_keys)) = (best(|row| &row.quotes)?, best(|row| &row.passkeys)?);
        let share = rows.iter().map(|row| row.kept).sum::<f64>() / rows.len() as f64 * 100.0;
        Some(format!(
            "{}Of what keeps about {share:.0} % of the prompt, {quotes} quotes nearest to full precision (KL {of_quotes:.3}), \
             and {keys} answers nearest for pass keys (KL {of_keys:.3}).",
            if many { format!("{name}: ") } else { String::new() }
        ))
    };
    rows.chunk_by(same).filter_map(sentence).collect()
}

/// The largest number of budgets that are drawn: those of the first policies.
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
