//! Kernel `token_scores`: scores tokens by their column sums.

use rayon::prelude::*;

use crate::Result;
use crate::counts::saturated;
use crate::policy::{ScoreRequest, TextRule, lowered};

/// The scores of the tokens of every KV head, `[kv_heads, tokens]`, computed from their column sums ([`ScoreRequest`]).
/// For every head also the number of tokens from its first NaN sum to the end, or 0 without a NaN. A token has the
/// largest of the sums of its group, or NaN if one is.
///
/// # Errors
/// As [`ScoreRequest::check`].
pub fn token_scores(sums: &[f32], kv_heads: usize, request: &ScoreRequest<'_>) -> Result<(Vec<f32>, Vec<u32>)> {
    request.check(sums.len(), kv_heads)?;
    let text = request.spans.text_mask()?;
    let recent_from = request.tokens() - request.recent;
    let of_head = |of_group: &[f32]| -> Result<(Vec<f32>, u32)> {
        let mut sums = of_group[..request.tokens()].to_vec();
        for of_head in of_group.chunks_exact(request.tokens()).skip(1) {
            sums.iter_mut()
                .zip(of_head)
                .filter(|(sum, of)| **of > **sum || of.is_nan())
                .for_each(|(sum, of)| *sum = *of);
        }
        let mut scores = request.scores.apply(&sums, request.rows, request.recent)?;
        let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        for (token, (score, &text)) in scores.iter_mut().zip(&text).enumerate() {
            if token >= recent_from || (text && request.text == TextRule::Stays) {
                *score = f32::INFINITY;
            } else if !text && request.text == TextRule::Raised {
                *score = lowered(*score, largest);
            }
        }
        let first = sums.iter().position(|sum| sum.is_nan());
        Ok((scores, first.map_or(0, |first| saturated(sums.len() - first))))
    };
    let heads: Vec<_> = sums.par_chunks_exact(request.group * request.tokens()).map(of_head).collect::<Result<_>>()?;
    let (scores, not_numbers): (Vec<_>, Vec<_>) = heads.into_iter().unzip();
    Ok((scores.concat(), not_numbers))
}
