//! Scores of tokens, computed from column sums on a device. The tokens with the best scores stay.

use super::eviction::TextRule;
use super::method::{KeepRule, Policy, ScoreRule};
use super::query_positions::QueryPositions;
use super::spans::Spans;
use crate::plan::TokenRange;
use crate::{Error, Result};

/// How column sums become the scores of tokens. The tokens with the best scores are those that [`Policy::select`] keeps
/// of a KV head. Tokens that stay in any case score +∞. Where text is raised ([`TextRule::Raised`]), it keeps its scores,
/// and images score 0 or less, in order. Sums are not negative.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScoreRequest<'a> {
    /// The query rows that were summed.
    pub rows: &'a QueryPositions,
    /// Text and images.
    pub spans: &'a Spans,
    /// How the sums become scores. They are aggregated over the heads of a group, or those of `group` heads.
    pub scores: ScoreRule,
    /// Query heads of a KV head whose sums lie one after the other: a token has the largest of them. 1 if they are
    /// aggregated.
    pub group: usize,
    /// How text is preferred.
    pub text: TextRule,
    /// The number of last tokens that always stay and are not pooled.
    pub recent: usize,
}

impl Policy {
    /// The request for scores of tokens of which `count` stay; `None` if the policy does not use scores.
    ///
    /// # Errors
    /// [`Error::Budget`] when there are more protected tokens than `count`; [`Error::TopK`] when more tokens are to
    /// stay than exist.
    pub fn score_request<'a>(
        &self,
        spans: &'a Spans,
        rows: &'a QueryPositions,
        count: usize,
    ) -> Result<Option<ScoreRequest<'a>>> {
        let KeepRule::Best { recent, text } = self.keep else { return Ok(None) };
        let request = ScoreRequest { rows, spans, scores: self.scores, group: 1, text, recent: recent.of(count)? };
        let (protected, tokens) = (request.protected(), spans.tokens());
        if protected > count {
            let (given, allowed) = (protected.to_string(), format!("at most {count}, the tokens to keep"));
            return Err(Error::Budget { what: "number of protected tokens", given, allowed });
        }
        if count > tokens {
            return Err(Error::TopK { k: count, n: tokens });
        }
        Ok(Some(request))
    }
}

impl ScoreRequest<'_> {
    /// Tokens of a head.
    pub const fn tokens(&self) -> usize {
        self.spans.tokens()
    }

    /// The sums of `kv_heads` heads.
    pub(crate) const fn sums(&self, kv_heads: usize) -> usize {
        kv_heads.saturating_mul(self.group).saturating_mul(self.tokens())
    }

    /// Checks that there is one sum for every token of `kv_heads` heads, or of every query head of a group, and that
    /// rows and spans cover the same prompt.
    ///
    /// # Errors
    /// [`Error::Elements`] or [`Error::Selection`].
    pub fn check(&self, sums: usize, kv_heads: usize) -> Result<()> {
        let expected = self.sums(kv_heads);
        if kv_heads == 0 || self.group == 0 || sums != expected {
            let shape = format!("[{kv_heads} × {}, {}]", self.group, self.tokens());
            return Err(Error::Elements { what: "column sums of a layer", given: sums, expected, shape });
        }
        if self.rows.tokens() != self.tokens() {
            let (rows, spans) = (self.rows.tokens(), self.tokens());
            let reason = format!("the query rows cover {rows} tokens, but the spans cover {spans}");
            return Err(Error::Selection { reason });
        }
        if self.recent > self.tokens() {
            return Err(Error::TopK { k: self.recent, n: self.tokens() });
        }
        Ok(())
    }

    /// Number of tokens that stay in any case.
    fn protected(&self) -> usize {
        if self.text != TextRule::Stays {
            return self.recent;
        }
        let recent_from = self.tokens().saturating_sub(self.recent);
        let before = |image: &TokenRange| image.end().min(recent_from).saturating_sub(image.start());
        self.tokens() - self.spans.images().iter().map(before).sum::<usize>()
    }
}
