//! The kept tokens of one head, from its scores and what is kept in any case.

use super::spans::Spans;
use super::top_k::{HIGHEST_RANK, best, ranks};
use crate::counts::{TokenCount, collected};
use crate::{Error, Result};

/// Keeps `count` tokens: the `protected` ones, which ascend, and of the others those with the best scores. The result
/// ascends; of equal scores the earlier token stays.
///
/// # Errors
/// [`Error::Budget`] when more tokens are protected than may be kept; [`Error::Selection`] when protected tokens do not
/// ascend or do not exist; [`Error::TopK`] when more are to be kept than there are; [`Error::NotANumber`] when a score
/// is NaN.
pub fn keep(scores: &[f32], protected: &[u32], count: usize) -> Result<Vec<u32>> {
    check_protected(protected, scores.len())?;
    if protected.len() > count {
        let (given, allowed) = (protected.len().to_string(), format!("at most {count}, the tokens to keep"));
        return Err(Error::Budget { what: "number of protected tokens", given, allowed });
    }
    if count > scores.len() {
        return Err(Error::TopK { k: count, n: scores.len() });
    }
    let mut ranks = ranks(scores)?;
    protected.iter().for_each(|&token| ranks[token as usize] = HIGHEST_RANK);
    Ok(best(&ranks, count))
}

/// The last `recent` tokens and the `best` best of those before them (H2O).
///
/// # Errors
/// As [`keep`].
pub fn recent_and_best(scores: &[f32], recent: usize, best: usize) -> Result<Vec<u32>> {
    let tokens = scores.len();
    if recent.saturating_add(best) > tokens {
        return Err(Error::TopK { k: recent.saturating_add(best), n: tokens });
    }
    let protected = collected("recent tokens", TokenCount::new(tokens)?.last(recent))?;
    keep(scores, &protected, recent + best)
}

/// The first `sink` and the last `recent` of `tokens` tokens, without any scores (StreamingLLM); all of them where
/// there are no more.
///
/// # Errors
/// [`Error::Limit`] when there are more than [`MOST_TOKENS`](crate::plan::MOST_TOKENS); [`Error::OutOfMemory`] when the
/// host has no room for the kept ones.
pub fn sink_and_recent(tokens: usize, sink: usize, recent: usize) -> Result<Vec<u32>> {
    let count = TokenCount::new(tokens)?;
    let (first, last) = (count.first(sink), count.last(recent));
    collected("kept tokens", first.clone().chain(last.start.max(first.end)..last.end))
}

/// What being text means for a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum TextRule {
    /// Text is scored like images.
    Equal,
    /// Text scores are raised by the largest score of all (LOOK-M eq. 5: `A_s[T] += max A_s`), so that text leaves only
    /// where there is more of it than may stay.
    #[default]
    Raised,
    /// Text always stays, as the published code of LOOK-M has it; text beyond the budget is an error.
    Stays,
}

/// The last `recent` tokens and the `best` best of those before them, text first (LOOK-M eq. 4-8).
///
/// # Errors
/// As [`keep`], and [`Error::Elements`] when there is not one score per token. Under [`TextRule::Stays`] more text than
/// `recent + best` is an [`Error::Budget`].
pub fn text_prior(scores: &[f32], spans: &Spans, rule: TextRule, recent: usize, best: usize) -> Result<Vec<u32>> {
    text_first(scores, &spans.text_mask()?, rule, recent, best)
}

/// The same for tokens of which `text` says whether they are text.
pub(super) fn text_first(
    scores: &[f32],
    text: &[bool],
    rule: TextRule,
    recent: usize,
    best: usize,
) -> Result<Vec<u32>> {
    let tokens = text.len();
    if scores.len() != tokens {
        let given = scores.len();
        return Err(Error::Elements { what: "scores", given, expected: tokens, shape: "[tokens]".into() });
    }
    match rule {
        TextRule::Equal => recent_and_best(scores, recent, best),
        TextRule::Raised => {
            let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let raised = scores.iter().zip(text).map(|(&score, &text)| if text { score + largest } else { score });
            recent_and_best(&raised.collect::<Vec<f32>>(), recent, best)
        }
        TextRule::Stays => {
            let protected = |&token: &u32| text[token as usize] || (token as usize).saturating_add(recent) >= tokens;
            let protected = collected("protected tokens", TokenCount::new(tokens)?.positions().filter(protected))?;
            keep(scores, &protected, recent.saturating_add(best))
        }
    }
}

fn check_protected(protected: &[u32], tokens: usize) -> Result<()> {
    if protected.windows(2).any(|pair| pair[0] >= pair[1]) {
        return Err(Error::Selection { reason: "protected tokens must ascend".into() });
    }
    match protected.last() {
        Some(&last) if last as usize >= tokens => {
            Err(Error::Selection { reason: format!("token {last} is protected, of {tokens}") })
        }
        _ => Ok(()),
    }
}
