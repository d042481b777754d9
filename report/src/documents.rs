//! What recipes do to answers about documents.

use serde::{Deserialize, Serialize};

use crate::Run;

/// Everything about one model and the documents of one text.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename = "documents")]
pub struct DocumentsReport {
    /// The run.
    pub run: Option<Run>,
    /// The model.
    pub model: String,
    /// The text that the documents were cut from.
    pub text: String,
    /// Where attention ran.
    pub backend: String,
    /// Documents, each with two questions.
    pub documents: usize,
    /// Tokens of each, without the question.
    pub document_tokens: usize,
    /// One row for each recipe; the first is that of full precision.
    pub rows: Vec<DocumentsRow>,
}

/// One recipe.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DocumentsRow {
    /// The recipe.
    pub recipe: String,
    /// Share of the prompt's tokens that layers keep, on average.
    pub kept: f64,
    /// The same for each layer: its budget. Empty where all tokens stay.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kept_by_layer: Vec<f64>,
    /// Bits for each element of keys and values of the whole prompt, evicted ones counted among them.
    pub bits_per_element: f64,
    /// A passage of each document, quoted.
    pub quotes: Vec<AnswerRow>,
    /// A pass key hidden in each document.
    pub passkeys: Vec<AnswerRow>,
}

/// One answer, read token by token; its first token is given.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct AnswerRow {
    /// Mean log-probability of its tokens, in nats.
    #[serde(deserialize_with = "crate::not_a_number::number")]
    pub log_probability: f64,
    /// Mean KL divergence from the predictions of full precision, in nats.
    #[serde(deserialize_with = "crate::not_a_number::number")]
    pub divergence: f64,
    /// Share of its tokens that were the likeliest.
    pub found: f64,
    /// Share of the kept tokens that are among as many tokens to which the answer attends most; of policies alone.
    pub hit_rate: Option<f64>,
    /// Contribution of each modality: its share of what the answer attends to in the prompt; of full precision alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub contribution: Option<ByModality>,
    /// Coverage of each modality: the share of what the answer attends to in it that falls to kept tokens; of
    /// policies alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub coverage: Option<ByModality>,
}

/// Shares of the attention of an answer. Modalities are those of VL-Cache (arXiv 2410.23317, section 3.2); the document
/// stands for the image.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ByModality {
    /// Of the document.
    #[serde(deserialize_with = "crate::not_a_number::number")]
    pub document: f64,
    /// Of the question after it.
    #[serde(deserialize_with = "crate::not_a_number::number")]
    pub text: f64,
}

impl ByModality {
    /// The mean of some.
    fn mean(of: impl Iterator<Item = Self>) -> Option<Self> {
        let (count, sum) = of.fold((0, Self { document: 0.0, text: 0.0 }), |(count, sum), each| {
            (count + 1, Self { document: sum.document + each.document, text: sum.text + each.text })
        });
        (count > 0).then(|| Self { document: sum.document / f64::from(count), text: sum.text / f64::from(count) })
    }
}

impl DocumentsReport {
    /// What the answers attend to, in a sentence.
    pub fn contributions(&self) -> Option<String> {
        let first = self.rows.first()?;
        let of = |answers: &[AnswerRow]| ByModality::mean(answers.iter().filter_map(|answer| answer.contribution));
        let (quotes, passkeys) = (of(&first.quotes)?, of(&first.passkeys)?);
        let share = |of: ByModality| format!("{:.0} %", of.document * 100.0);
        Some(format!(
            "Of what answers attend to in their prompts, {} is in the document for quotes and {} for pass keys; the rest is in \
             the question.",
            share(quotes),
            share(passkeys)
        ))
    }
}

impl DocumentsRow {
    /// Mean and standard deviation over the documents.
    pub fn spread(answers: &[AnswerRow], of: impl Fn(&AnswerRow) -> f64) -> (f64, f64) {
        let count = answers.len() as f64;
        let mean = answers.iter().map(&of).sum::<f64>() / count;
        let squares: f64 = answers.iter().map(|answer| (of(answer) - mean).powi(2)).sum();
        (mean, (squares / (count - 1.0).max(1.0)).sqrt())
    }
}

/// The columns of a table of rows.
pub const COLUMNS: [&str; 12] =
    ["recipe", "kept", "bits", "quote ppl", "log p", "KL", "top-1", "hits", "covered", "key log p", "key KL", "found"];

/// What the columns say, line by line.
pub const LEGEND: [&str; 5] = [
    "kept: share of the prompt's tokens. bits: of the cache, for each element of the whole prompt.",
    "quote: a passage of the document is to go on as it is written there. key: a pass key hidden in it.",
    "ppl, log p, KL (from full precision): of the answer's tokens after the first, in nats; ± over documents, one standard \
     deviation.",
    "hits: kept tokens that are among as many tokens to which the answer attends most.",
    "covered: of what the answer attends to in the document, and in the question, the share that falls to kept tokens.",
];

impl DocumentsRow {
    /// The cells of its [`COLUMNS`].
    pub fn cells(&self) -> [String; 12] {
        let percent = |share: f64| format!("{:.1} %", share * 100.0);
        let with_spread = |(mean, deviation): (f64, f64)| format!("{mean:.3} ± {deviation:.3}");
        let log_probability = Self::spread(&self.quotes, |answer| answer.log_probability);
        let hits: Option<Vec<f64>> = self.quotes.iter().map(|answer| answer.hit_rate).collect();
        let covered = ByModality::mean(self.quotes.iter().filter_map(|answer| answer.coverage));
        let found = self.passkeys.iter().filter(|answer| answer.found == 1.0).count();
        [
            self.recipe.clone(),
            percent(self.kept),
            format!("{:.3}", self.bits_per_element),
            format!("{:.3}", (-log_probability.0).exp()),
            with_spread(log_probability),
            with_spread(Self::spread(&self.quotes, |answer| answer.divergence)),
            percent(Self::spread(&self.quotes, |answer| answer.found).0),
            hits.map_or("–".into(), |hits| percent(hits.iter().sum::<f64>() / hits.len() as f64)),
            covered.map_or("–".into(), |of| format!("{:.0} / {:.0} %", of.document * 100.0, of.text * 100.0)),
            with_spread(Self::spread(&self.passkeys, |answer| answer.log_probability)),
            with_spread(Self::spread(&self.passkeys, |answer| answer.divergence)),
            format!("{found} of {}", self.passkeys.len()),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_say_mean_and_spread() {
        let answer = |log_probability, found| AnswerRow {
            log_probability,
            divergence: 0.5,
            found,
            hit_rate: None,
            contribution: None,
            coverage: None,
        };
        let covering = |document| Some(ByModality { document, text: 0.9 });
        let quotes = vec![
            AnswerRow { coverage: covering(0.5), ..answer(-1.0, 0.5) },
            AnswerRow { coverage: covering(0.7), ..answer(-3.0, 1.0) },
        ];
        let passkeys = vec![answer(-1.0, 0.9), answer(-1.0, 1.0)];
        let (recipe, kept_by_layer) = ("h2o:0.1".into(), vec![0.1; 2]);
        let row = DocumentsRow { recipe, kept: 0.1, kept_by_layer, bits_per_element: 1.6, quotes, passkeys };
        let cells = row.cells();
        assert_eq!(cells[..5], ["h2o:0.1", "10.0 %", "1.600", "7.389", "-2.000 ± 1.414"]);
        assert_eq!(cells[5..9], ["0.500 ± 0.000", "75.0 %", "–", "60 / 90 %"]);
        assert_eq!(cells[9..], ["-1.000 ± 0.000", "0.500 ± 0.000", "1 of 2"]);
        let mut report = DocumentsReport {
            run: None,
            model: "a model".into(),
            text: "a text".into(),
            backend: "CPU".into(),
            documents: 2,
            document_tokens: 640,
            rows: vec![row],
        };
        assert_eq!(report.contributions(), None);
        let first = &mut report.rows[0];
        for answer in first.quotes.iter_mut().chain(&mut first.passkeys) {
            answer.contribution = Some(ByModality { document: answer.found, text: 1.0 - answer.found });
        }
        let said = report.contributions().unwrap();
        assert!(said.contains("75 % is in the document for quotes and 95 % for pass keys"), "{said}");
    }
}
