//! From column sums to scores whose best are the tokens that stay: what a device is asked to choose by.

use super::eviction::TextRule;
use super::method::{KeepRule, Policy, ScoreRule, Weighing};
use super::pooling::Pool;
use super::query_rows::QueryRows;
use super::spans::Spans;
use crate::plan::TokenRange;
use crate::{Error, Result};

/// How column sums become the scores of tokens. The best of them, as many as stay, are what [`Policy::select`] keeps of a KV
/// head: tokens that stay in any case score +∞.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScoreRequest<'a> {
    /// The query rows that were summed over.
    pub rows: &'a QueryRows,
    /// Text and images.
    pub spans: &'a Spans,
    /// What becomes of the sums, which are aggregated over the heads of a group already.
    pub scores: ScoreRule,
    /// What being text means.
    pub text: TextRule,
    /// So many last tokens stay in any case, and are not pooled.
    pub recent: usize,
}

impl Policy {
    /// How tokens are scored of which `count` stay; `None` where the policy looks at no scores.
    ///
    /// # Errors
    /// [`Error::Budget`] when more tokens stay in any case than may; [`Error::TopK`] when more are to stay than there are.
    pub fn score_request<'a>(
        &self,
        spans: &'a Spans,
        rows: &'a QueryRows,
        count: usize,
    ) -> Result<Option<ScoreRequest<'a>>> {
        let KeepRule::Best { recent, text } = self.keep else { return Ok(None) };
        let request = ScoreRequest { rows, spans, scores: self.scores, text, recent: recent.of(count) };
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

/// What the kernels of all devices are told of a request, in numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ScoreTables {
    pub(crate) tokens: usize,
    /// The first of the recent tokens.
    pub(crate) recent_from: usize,
    /// Tokens that are pooled on either side.
    pub(crate) half_width: usize,
    /// Positions of the rows; none where they are not looked at.
    pub(crate) rows: Vec<u32>,
    /// Where images begin and end, in order: a token is text if an even number of these are at or before it. None where
    /// text is scored like images.
    pub(crate) boundaries: Vec<u32>,
    /// The constants of the kernel: `WEIGHING` 0 sum, 1 mean of the rows that see a token; `POOL` 0 none, 1 average, 2 maximum;
    /// `TEXT` 0 like images, 1 raised, 2 stays.
    pub(crate) constants: [(&'static str, usize); 3],
}

impl ScoreRequest<'_> {
    pub(crate) fn tables(&self) -> ScoreTables {
        let weighing = usize::from(self.scores.weighing == Weighing::MeanOfVisible);
        let (pool, half_width) = match self.scores.pooling {
            None => (0, 0),
            Some(pooling) => (if pooling.pool() == Pool::Average { 1 } else { 2 }, pooling.width() / 2),
        };
        let text = match self.text {
            TextRule::Equal => 0,
            TextRule::Raised => 1,
            TextRule::Stays => 2,
        };
        let edges = |image: &TokenRange| [image.start() as u32, image.end() as u32];
        let boundaries = self.spans.images().iter().flat_map(edges).collect();
        ScoreTables {
            tokens: self.tokens(),
            recent_from: self.tokens() - self.recent,
            half_width,
            rows: if weighing == 1 { self.rows.positions().to_vec() } else { Vec::new() },
            boundaries: if text > 0 { boundaries } else { Vec::new() },
            constants: [("WEIGHING", weighing), ("POOL", pool), ("TEXT", text)],
        }
    }

    /// Tokens of a head.
    pub const fn tokens(&self) -> usize {
        self.spans.tokens()
    }

    /// Checks that there is one sum for every token of `kv_heads` heads, and that rows and spans are of the same prompt.
    ///
    /// # Errors
    /// [`Error::Elements`] or [`Error::Selection`].
    pub fn check(&self, sums: usize, kv_heads: usize) -> Result<()> {
        let expected = kv_heads * self.tokens();
        if kv_heads == 0 || sums != expected {
            let shape = format!("[{kv_heads}, {}]", self.tokens());
            return Err(Error::Elements { what: "column sums of a layer", given: sums, expected, shape });
        }
        if self.rows.tokens() != self.tokens() {
            let (rows, spans) = (self.rows.tokens(), self.tokens());
            let reason = format!("query rows of a context of {rows} tokens, and spans of {spans}");
            return Err(Error::Selection { reason });
        }
        if self.recent > self.tokens() {
            return Err(Error::TopK { k: self.recent, n: self.tokens() });
        }
        Ok(())
    }

    /// Tokens that stay in any case.
    fn protected(&self) -> usize {
        if self.text != TextRule::Stays {
            return self.recent;
        }
        let text = self.spans.text_mask();
        let recent_from = text.len().saturating_sub(self.recent);
        text.iter().enumerate().filter(|&(token, &text)| text || token >= recent_from).count()
    }
}
