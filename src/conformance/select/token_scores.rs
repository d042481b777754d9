//! `token_scores`.

use super::far;
use crate::conformance::data::Random;
use crate::conformance::pack::difference;
use crate::conformance::report::Report;
use crate::cpu;
use crate::plan::TokenRange;
use crate::policy::{
    HeadAggregation, Pool, Pooling, QueryPositions, ScoreRequest, ScoreRule, Spans, TextRule, Weighing,
};
use crate::{Backend, Result};

/// A case of scores computed from column sums.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenScoresCase {
    /// Unique name: lower case letters, digits and dashes.
    pub name: String,
    /// KV heads. Each is scored independently.
    pub kv_heads: usize,
    /// Tokens of each.
    pub tokens: usize,
    /// Positions of the query rows.
    pub positions: Vec<u32>,
    /// The images.
    pub images: Vec<TokenRange>,
    /// How the sums become scores.
    pub scores: ScoreRule,
    /// How text is preferred.
    pub text: TextRule,
    /// The number of last tokens that always stay.
    pub recent: usize,
    /// Whether a sum of the last head is NaN.
    pub not_a_number: bool,
    /// Seed of the data.
    pub seed: u64,
    /// Whether the case belongs to the set that tests run on software drivers.
    pub quick: bool,
}

/// All cases: plain sums, means, both poolings, every rule for text, images that touch, nothing recent, all recent.
pub fn token_scores_cases() -> Vec<TokenScoresCase> {
    use TextRule::{Equal, Raised, Stays};
    use Weighing::{MeanOfVisible, Sum};
    let sizes = [
        ("one-token", 1, Sum, None, Equal, 0),
        ("recent", 300, Sum, None, Equal, 30),
        ("all-recent", 300, Sum, Some(Pool::Average), Equal, 300),
        ("mean", 5000, MeanOfVisible, None, Equal, 100),
        ("average-of-7", 2500, Sum, Some(Pool::Average), Equal, 32),
        ("maximum-of-7", 700, MeanOfVisible, Some(Pool::Max), Raised, 8),
        ("text-raised", 4100, Sum, None, Raised, 50),
        ("text-stays", 600, Sum, None, Stays, 50),
        ("not-a-number", 600, Sum, None, Equal, 10),
    ];
    let case = |(i, (name, tokens, weighing, pool, text, recent)): (usize, (&str, usize, _, Option<Pool>, _, _))| {
        let pooling = pool.map(|pool| Pooling::new(pool, 7).expect("7 is odd"));
        let image = |start: usize, end: usize| TokenRange::new(start * tokens / 8, end * tokens / 8).ok();
        TokenScoresCase {
            name: format!("token-scores-{name}"),
            kv_heads: 3,
            tokens,
            positions: (0..tokens as u32).filter(|position| position % 3 == 1 || tokens == 1).collect(),
            images: [image(1, 2), image(2, 4), image(5, 7)].into_iter().flatten().collect(),
            scores: ScoreRule { aggregation: HeadAggregation::Mean, weighing, pooling },
            text,
            recent,
            not_a_number: name == "not-a-number",
            seed: 6000 + i as u64,
            quick: matches!(name, "maximum-of-7" | "text-stays" | "not-a-number"),
        }
    };
    sizes.into_iter().enumerate().map(case).collect()
}

/// Scores the tokens, and compares them with the reference within rounding.
pub(in crate::conformance) async fn run<B: Backend>(backend: &B, case: &TokenScoresCase) -> Result<Report> {
    let mut random = Random::new(case.seed);
    let mut sums: Vec<f32> = (0..case.kv_heads * case.tokens).map(|_| random.below(1000) as f32 / 500.0).collect();
    if case.not_a_number {
        let last_head = (case.kv_heads - 1) * case.tokens;
        [sums[last_head + case.tokens / 2], sums[last_head + case.tokens - 1]] = [f32::NAN; 2];
    }
    let rows = QueryPositions::new(case.positions.clone(), case.tokens)?;
    let spans = Spans::new(case.tokens, &case.images)?;
    let (scores, text, recent) = (case.scores, case.text, case.recent);
    let request = ScoreRequest { rows: &rows, spans: &spans, scores, group: 1, text, recent };
    let on_device = backend.upload(sums.as_slice().into()).await?;
    let scored = backend.token_scores(&on_device, case.kv_heads, &request)?;
    let got = backend.download(&scored.scores).await?;
    let not_numbers = backend.download_words(&scored.not_numbers).await?;
    let (want, want_not_numbers) = cpu::token_scores(&sums, case.kv_heads, &request)?;
    let mut failures = Vec::new();
    // NaN cannot be compared. Its place was already compared through the words.
    let number = |scores: Vec<f32>| scores.into_iter().map(|x| if x.is_nan() { -1.0 } else { x }).collect::<Vec<f32>>();
    failures.extend(far("scores of tokens", &number(got), &number(want), 1e-6));
    let words = |words: Vec<u32>| words.into_iter().map(|word| word as f32).collect::<Vec<f32>>();
    failures.extend(difference("sums that are not numbers", &words(not_numbers), &words(want_not_numbers)));
    Ok(Report { check: case.name.clone(), accuracy: None, failures })
}
