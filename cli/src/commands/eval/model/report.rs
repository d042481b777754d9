//! What an evaluation found, as a table.

use std::time::Duration;

use kvpack::Backend;
use kvpack::cache::ModelRecipe;
use kvpack_report::{ModelReport, RecipeRow, Run};

use super::Task;
use super::score::{Score, mean};
use super::wanted::protected;
use crate::model::{CHUNK_TOKENS, PackedAttention};
use crate::print::{self, one_line, say};

/// A report without rows.
pub fn report(task: &Task<'_>, (backend, run): (String, Run), compared_tokens: usize, f16_nmse: f64) -> ModelReport {
    ModelReport {
        run: Some(run),
        model: task.model.config.name.clone(),
        text: task.text.clone(),
        against: task.against.as_ref().map(|model| model.config.name.clone()),
        backend,
        lengths: task.lengths.clone(),
        compared_tokens,
        f16_nmse,
        passkey_tokens: task.passkeys.first().map_or(0, |passkey| passkey.tokens.len()),
        rows: Vec::new(),
    }
}

/// The row of a recipe, without its pass keys.
pub fn row<B: Backend>(
    task: &Task<'_>,
    recipe: &ModelRecipe,
    score: &Score,
    attention: &PackedAttention<B>,
    total: Duration,
) -> RecipeRow {
    let bytes: u64 = attention.memory().map(|memory| memory.in_use_bytes()).sum();
    let elements: u64 = attention.memory().map(|memory| memory.elements()).sum();
    RecipeRow {
        recipe: recipe.to_string(),
        perplexities: task.lengths.iter().map(|&length| score.perplexity(length)).collect(),
        divergence: mean(&score.divergences),
        divergence_by_chunk: score.divergences.chunks(CHUNK_TOKENS).map(mean).collect(),
        agreement: score.agreements as f64 / score.divergences.len() as f64,
        passkeys: Vec::new(),
        bytes,
        bits_per_element: bytes as f64 * 8.0 / elements.max(1) as f64,
        attention_seconds: attention.time().as_secs_f64(),
        model_seconds: total.saturating_sub(attention.time()).as_secs_f64(),
    }
}

/// Prints the report as a table.
pub fn print(report: &ModelReport) -> anyhow::Result<()> {
    say!("{} reads {} on {}", one_line(&report.model), one_line(&report.text), report.backend)?;
    say!(
        "f16 cache against candle's full-precision attention: NMSE {:.1e} of the log-probabilities of {} tokens",
        report.f16_nmse,
        report.compared_tokens
    )?;
    let perplexities = report.lengths.iter().map(|length| format!("ppl {length}"));
    let header: Vec<String> = std::iter::once("recipe".to_owned())
        .chain(perplexities)
        .chain(["KL", "top-1", "pass key", "found", "bits", "bytes", "attention s", "model s"].map(str::to_owned))
        .collect();
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    let mut table = print::results(&header, 1);
    for row in &report.rows {
        let passkeys = row.passkeys_found();
        let mut cells = vec![row.recipe.clone()];
        cells.extend(row.perplexities.iter().map(|perplexity| format!("{perplexity:.3}")));
        cells.extend([
            format!("{:.5}", row.divergence),
            print::percent(row.agreement),
            passkeys.map_or("-".into(), |(log_probability, _)| format!("{log_probability:.3}")),
            passkeys.map_or("-".into(), |(_, found)| format!("{found} of {}", row.passkeys.len())),
            format!("{:.3}", row.bits_per_element),
            row.bytes.to_string(),
            format!("{:.1}", row.attention_seconds),
            format!("{:.1}", row.model_seconds),
        ]);
        table.add_row(cells);
    }
    say!("{table}")?;
    let mark = report.against.as_ref().map_or_else(String::new, |model| format!(" of {}", one_line(model)));
    say!("\nppl N: perplexity of the first N tokens. pass key: mean log-probability of its digits.")?;
    say!("KL: mean divergence from the predictions{mark} with an f16 cache, in nats.")?;
    say!("top-1: positions whose likeliest token is that of the same predictions.")?;
    say!("bits: per element of keys and values, with all ranges and what the recipe keeps in f16.")?;
    // Of a recipe nothing is known where weights differ, too.
    let verdict = if report.against.is_none() { verdict(&report.rows) } else { Vec::new() };
    if !verdict.is_empty() {
        say!("\n{}", verdict.join("\n"))?;
    }
    Ok(())
}

/// Above this divergence from the f16 cache, in nats, a recipe is said not to be for a model: perplexity is
/// about a tenth off.
const LARGEST_DIVERGENCE: f64 = 0.1;

/// Which recipe is the smallest that leaves the model as it is, and which change it.
fn verdict(rows: &[RecipeRow]) -> Vec<String> {
    // NaN is not below.
    let (keep, change): (Vec<&RecipeRow>, Vec<&RecipeRow>) =
        rows.iter().partition(|row| row.divergence <= LARGEST_DIVERGENCE);
    let smallest = keep.into_iter().min_by(|a, b| a.bits_per_element.total_cmp(&b.bits_per_element));
    let smallest = smallest.map(|row| {
        let RecipeRow { recipe, bits_per_element, divergence, .. } = row;
        format!(
            "{recipe} is the smallest of these that keeps what this model says: {bits_per_element:.2} bits, KL \
             {divergence:.3}; the limit is {LARGEST_DIVERGENCE}."
        )
    });
    let change = change.into_iter().map(|row| {
        let untried = protected(&row.recipe).filter(|recipe| rows.iter().all(|other| other.recipe != *recipe));
        let advice = untried.map_or_else(String::new, |recipe| format!(" Try {recipe}."));
        format!("{} changes what this model says: KL {:.3}.{advice}", row.recipe, row.divergence)
    });
    smallest.into_iter().chain(change).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_name_what_to_take_and_what_to_try() {
        let row = |recipe: &str, divergence, bits_per_element| RecipeRow {
            recipe: recipe.into(),
            perplexities: vec![1.0],
            divergence,
            divergence_by_chunk: vec![divergence],
            agreement: 1.0,
            passkeys: Vec::new(),
            bytes: 1,
            bits_per_element,
            attention_seconds: 0.0,
            model_seconds: 0.0,
        };
        let rows = [row("f16", 0.0, 16.0), row("int8", 0.01, 8.5), row("int4", 8.9, 4.5), row("kivi:2", f64::NAN, 2.5)];
        let said = verdict(&rows);
        assert!(said[0].starts_with("int8 is the smallest") && said.len() == 3, "{said:?}");
        assert!(said[1].contains("KL 8.900") && said[1].ends_with("Try int4+centre+sink=128+window=128."), "{said:?}");
        assert!(said[2].starts_with("kivi:2 changes") && said[2].ends_with("Try kivi:2+sink=128."), "{said:?}");
        let tried = verdict(&[rows[2].clone(), row("int4+centre+sink=128+window=128", 0.05, 4.5)]);
        assert!(tried[0].starts_with("int4+centre+sink=128+window=128 is") && !tried[1].contains("Try"), "{tried:?}");
        assert!(verdict(&[]).is_empty());
    }
}
