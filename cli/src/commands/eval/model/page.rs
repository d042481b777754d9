//! The files of a report: JSON, and a self-contained page.

use std::fmt::Write;
use std::path::Path;

use anyhow::{Context, Result};

use super::plots;
use super::report::ModelReport;

/// Writes `path.json` and `path.html`, each whole or not at all.
///
/// # Errors
/// When a file cannot be written.
pub fn write(report: &ModelReport, path: &Path) -> Result<()> {
    replace(&path.with_extension("json"), &serde_json::to_string_pretty(report)?)?;
    replace(&path.with_extension("html"), &page(report)?)
}

fn replace(path: &Path, content: &str) -> Result<()> {
    let temporary = path.with_extension("tmp");
    let written = std::fs::write(&temporary, content).and_then(|()| std::fs::rename(&temporary, path));
    written.with_context(|| format!("cannot write {}", path.display()))
}

fn page(report: &ModelReport) -> Result<String> {
    let mut html = String::from(concat!(
        "<!doctype html><meta charset=utf-8><title>kvpack eval</title><style>",
        "body{font:15px sans-serif;margin:2em auto;max-width:64em;padding:0 1em}",
        "table{border-collapse:collapse}td,th{padding:.2em .7em;text-align:right;border-bottom:1px solid #ddd}",
        "td:first-child,th:first-child{text-align:left}svg{max-width:100%;height:auto}</style>"
    ));
    let escaped = |text: &str| text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    write!(
        html,
        "<h1>{}</h1><p>Text: {}. Attention on {}. The f16 cache against full-precision attention: NMSE {:.1e} of the \
         log-probabilities of {} tokens.</p><table><tr><th>recipe",
        escaped(&report.model),
        escaped(&report.text),
        escaped(&report.backend),
        report.f16_nmse,
        report.compared_tokens
    )?;
    for length in &report.lengths {
        write!(html, "<th>perplexity, {length} tokens")?;
    }
    html += "<th>KL, nats<th>top-1 agreement<th>pass key, nats<th>found<th>bits per element<th>bytes</tr>";
    for row in &report.rows {
        write!(html, "<tr><td>{}", escaped(&row.recipe))?;
        for perplexity in &row.perplexities {
            write!(html, "<td>{perplexity:.3}")?;
        }
        write!(html, "<td>{:.5}<td>{:.2} %", row.divergence, row.agreement * 100.0)?;
        match row.passkeys_found() {
            Some((log_probability, found)) => {
                write!(html, "<td>{log_probability:.3}<td>{found} of {}", row.passkeys.len())?;
            }
            None => html += "<td>-<td>-",
        }
        write!(html, "<td>{:.3}<td>{}</tr>", row.bits_per_element, row.bytes)?;
    }
    html += "</table>";
    html += &plots::divergence_by_bits(report)?;
    html += &plots::divergence_by_position(report)?;
    Ok(html)
}
