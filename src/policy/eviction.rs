//! The kept tokens of one head, chosen by score and by protection.

use super::spans::Spans;
use super::top_k::{HIGHEST_RANK, best, ranks};
use crate::counts::{TokenCount, collected};
use crate::{Error, Result};

/// Keeps `count` tokens: the `protected` ones, which ascend, and the best-scored of the others. The result ascends.
/// Ties go to the earlier token.
///
/// # Errors
/// [`Error::Budget`] when there are more protected tokens than tokens to keep; [`Error::Selection`] when protected
/// tokens do not ascend or do not exist; [`Error::TopK`] when more tokens are to be kept than exist;
/// [`Error::NotANumber`] when a score is NaN.
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

/// The last `recent` tokens, and the `best` best-scored of those before them (H2O).
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

/// The first `sink` and the last `recent` of `tokens` tokens, without any scores (StreamingLLM). All tokens if there
/// are no more than that.
///
/// # Errors
/// [`Error::Limit`] when there are more than [`MOST_TOKENS`](crate::plan::MOST_TOKENS); [`Error::OutOfMemory`] when the
/// host has no memory for the kept ones.
pub fn sink_and_recent(tokens: usize, sink: usize, recent: usize) -> Result<Vec<u32>> {
    let count = TokenCount::new(tokens)?;
    let (first, last) = (count.first(sink), count.last(recent));
    collected("kept tokens", first.clone().chain(last.start.max(first.end)..last.end))
}

/// How text tokens are preferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum TextRule {
    /// Text is scored like images.
    Equal,
    /// Text scores are raised by the largest score of all (LOOK-M eq. 5: `A_s[T] += max A_s`). Nothing is rounded, so
    /// text keeps its order. Text is evicted only if there is more of it than `best`, or its score is 0: then it
    /// ties with images of the largest score. Scores are not negative.
    #[default]
    Raised,
    /// Text always stays, as in the published code of LOOK-M. Text beyond the budget is an error.
    Stays,
}

/// The last `recent` tokens, and the `best` best-scored of those before them, text first (LOOK-M eq. 4-8).
///
/// # Errors
/// As [`keep`], and [`Error::Elements`] when there is not one score per token. Under [`TextRule::Stays`] more text than
/// `recent + best` is an [`Error::Budget`].
pub fn text_prior(scores: &[f32], spans: &Spans, rule: TextRule, recent: usize, best: usize) -> Result<Vec<u32>> {
    text_first(scores, &spans.text_mask()?, rule, recent, best)
}

/// [`text_prior`] with a mask of the text tokens.
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
            let of_token = |(&score, &text): (&f32, &bool)| if text { score } else { lowered(score, largest) };
            recent_and_best(&scores.iter().zip(text).map(of_token).collect::<Vec<f32>>(), recent, best)
        }
        TextRule::Stays => {
            let protected = |&token: &u32| text[token as usize] || (token as usize).saturating_add(recent) >= tokens;
            let protected = collected("protected tokens", TokenCount::new(tokens)?.positions().filter(protected))?;
            keep(scores, &protected, recent.saturating_add(best))
        }
    }
}

/// The score of an image where text is raised: 0 for the largest score of all, and less in the order of
/// the others. Adding the largest to text would round its score. NaN stays NaN.
pub(crate) fn lowered(score: f32, largest: f32) -> f32 {
    if score.is_nan() {
        return score;
    }
    if score >= largest {
        return 0.0;
    }
    // Bits ascend with numbers from 0 on, and descend with negative ones.
    f32::from_bits(0xff7f_ffff - (score.max(0.0) + 0.0).to_bits())
}

fn check_protected(protected: &[u32], tokens: usize) -> Result<()> {
    if protected.windows(2).any(|pair| pair[0] >= pair[1]) {
        return Err(Error::Selection { reason: "protected tokens must ascend".into() });
    }
    match protected.last() {
        Some(&last) if last as usize >= tokens => {
            Err(Error::Selection { reason: format!("token {last} is protected, but there are {tokens} tokens") })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::lowered;

    #[test]
    fn images_are_ordered_below_text() {
        let scores = [0.0, f32::from_bits(1), 4e-4, 1.0, f32::from_bits(0x3f80_0001), 16384.0, f32::MAX];
        let below = scores.map(|score| lowered(score, f32::MAX));
        assert!(below.is_sorted_by(|a, b| a < b), "{below:?}");
        assert_eq!((below[0], below[6]), (f32::MIN, 0.0));
        assert_eq!(lowered(-0.0, 1.0), lowered(0.0, 1.0));
        assert_eq!([lowered(0.0, 0.0), lowered(f32::INFINITY, f32::INFINITY)], [0.0; 2]);
        assert!(lowered(f32::MAX, f32::INFINITY) <= 0.0 && lowered(f32::NAN, 1.0).is_nan());
    }
}
