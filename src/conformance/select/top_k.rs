//! `top_k`.

use crate::conformance::data::Random;
use crate::conformance::pack::difference;
use crate::conformance::report::{Failure, Report};
use crate::cpu;
use crate::{Backend, Error, Result};

/// The kind of scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scores {
    /// All different, of both signs.
    Distinct,
    /// Seven values, so that most of them tie.
    Ties,
    /// One value.
    Equal,
    /// NaN, infinities, zeros of both signs, the smallest normal and subnormal numbers.
    Special,
}

/// A case of selecting the best scores.
#[derive(Clone, Debug, PartialEq)]
pub struct TopKCase {
    /// Unique name: lower case letters, digits and dashes.
    pub name: String,
    /// KV heads. Each selects independently.
    pub kv_heads: usize,
    /// Scores of each head.
    pub n: usize,
    /// Number of scores to select; 0 must be refused.
    pub k: usize,
    /// The kind of scores.
    pub scores: Scores,
    /// Seed of the data.
    pub seed: u64,
    /// Whether the case belongs to the set that tests run on software drivers.
    pub quick: bool,
}

/// All cases: budgets of 0 and of 100 %, one token, ties, equal scores, NaN, more scores than threads.
pub fn top_k_cases() -> Vec<TopKCase> {
    use Scores::{Distinct, Equal, Special, Ties};
    let sizes = [
        ("one-token", 2, 1, 1, Distinct),
        ("budget-0", 2, 100, 0, Distinct),
        ("budget-100", 3, 257, 257, Ties),
        ("budget-10", 4, 5000, 500, Distinct),
        ("ties", 3, 1000, 333, Ties),
        ("equal", 2, 300, 100, Equal),
        ("special", 4, 600, 200, Special),
        ("many", 2, 70_000, 20_011, Ties),
        // The last of the chosen are zeros, of both signs.
        ("zeros", 4, 600, 280, Special),
    ];
    let case = |(i, (name, kv_heads, n, k, scores)): (usize, (&str, usize, usize, usize, Scores))| TopKCase {
        name: format!("top-k-{name}"),
        kv_heads,
        n,
        k,
        scores,
        seed: 4000 + i as u64,
        quick: matches!(name, "budget-0" | "budget-100" | "ties" | "special" | "zeros"),
    };
    sizes.into_iter().enumerate().map(case).collect()
}

impl TopKCase {
    fn score(&self, random: &mut Random) -> f32 {
        const SPECIAL: [f32; 8] =
            [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, f32::MIN_POSITIVE, 1e-40, -1e-40];
        match self.scores {
            Scores::Distinct => random.gaussian(),
            Scores::Ties => random.below(7) as f32 - 3.0,
            Scores::Equal => 7.0,
            Scores::Special => SPECIAL[random.below(SPECIAL.len())],
        }
    }
}

/// Selects, and compares the indices, which must be equal.
pub(in crate::conformance) async fn run<B: Backend>(backend: &B, case: &TopKCase) -> Result<Report> {
    let mut random = Random::new(case.seed);
    let scores: Vec<f32> = (0..case.kv_heads * case.n).map(|_| case.score(&mut random)).collect();
    let tensor = backend.upload(scores.as_slice().into()).await?;
    let mut failures = Vec::new();
    let chosen = backend.top_k(&tensor, case.kv_heads, case.k);
    if case.k == 0 {
        if !matches!(chosen, Err(Error::NoTokens { .. })) {
            failures.push(Failure::Refusal { message: "the choice of no tokens was not refused for that".into() });
        }
    } else {
        let got = backend.download_indices(&chosen?).await?;
        let want = cpu::top_k(&scores, case.kv_heads, case.k)?;
        let numbers = |indices: Vec<u32>| indices.into_iter().map(|index| index as f32).collect::<Vec<f32>>();
        failures.extend(difference("chosen indices", &numbers(got), &numbers(want)));
    }
    if !matches!(backend.top_k(&tensor, case.kv_heads, case.n + 1), Err(Error::TopK { .. })) {
        failures
            .push(Failure::Refusal { message: "the choice of more than there are was not refused for that".into() });
    }
    Ok(Report { check: case.name.clone(), accuracy: None, failures })
}
