//! What the queries of a run see, in positions.

use std::ops::Range;
use std::sync::Arc;

use crate::counts::MOST_TOKENS;
use crate::{Error, Result};

/// What the queries of a run see of their sequence, in positions.
///
/// The queries of a run stand at its last positions, aligned at the bottom right: of n queries of a run that ends
/// before position e, query i stands at position e − n + i.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Visible {
    /// Every query sees all tokens.
    All,
    /// A query sees the positions up to its own.
    Causal,
    /// A query sees its own position and those up to `left` before it.
    Window {
        /// Positions before the query's own; at least 1.
        left: usize,
    },
    /// A query sees what it would see without the spans; one that stands in a span sees all of that span too, also what
    /// lies behind the query or beyond the window: the tokens of an image see each other.
    Spans {
        /// Positions before a query's own that it sees; none: all of them.
        left: Option<usize>,
        /// Intervals of positions, ascending and disjoint.
        spans: Arc<[Range<usize>]>,
    },
    /// A query sees all positions before the newest ones, and of the newest ones those of a mask: tokens of a draft
    /// tree.
    Tree(TreeMask),
}

impl Visible {
    /// Causal queries, and spans that see themselves.
    pub fn spans(spans: &[Range<usize>]) -> Self {
        Self::Spans { left: None, spans: spans.into() }
    }

    /// Checks what does not depend on stored tokens.
    fn check(&self, queries: usize, end: usize) -> Result<()> {
        match self {
            Self::All | Self::Causal => Ok(()),
            Self::Window { left } => check_window(*left),
            Self::Spans { left, spans } => {
                left.map_or(Ok(()), check_window)?;
                check_spans(spans, end)
            }
            Self::Tree(mask) => mask.check(queries, end),
        }
    }
}

fn check_window(left: usize) -> Result<()> {
    if left > 0 {
        return Ok(());
    }
    let reason = "0 positions before the query's own leave nothing but itself; use at least 1".into();
    Err(Error::Plan { what: "sliding window", reason })
}

fn check_spans(spans: &[Range<usize>], end: usize) -> Result<()> {
    let mut before = 0;
    for span in spans {
        if span.is_empty() || span.start < before || span.end > end {
            let reason = format!(
                "{span:?} after position {before} of {end}; spans must have tokens, ascend, be disjoint and end with the \
                 run's last query at the latest"
            );
            return Err(Error::Plan { what: "spans that see themselves", reason });
        }
        before = span.end;
    }
    Ok(())
}

/// Which of the newest tokens the queries of a run see: a bit for every query and token.
///
/// ```
/// use kvpack::plan::TreeMask;
/// // Two drafts after a common first token: 0, then 1 or 2.
/// let tree = TreeMask::from_parents(&[None, Some(0), Some(0)])?;
/// assert!(tree.sees(2, 0) && !tree.sees(2, 1) && tree.sees(2, 2));
/// assert_eq!(tree, TreeMask::from_bits(3, 3, &[0b0101_1001, 0b1])?);
/// # Ok::<(), kvpack::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TreeMask {
    queries: usize,
    tokens: usize,
    /// Rows of whole words, `[queries, tokens / 32 rounded up]`; bits beyond the tokens are 0.
    words: Arc<[u32]>,
}

impl TreeMask {
    /// From packed bits, the lowest bit of a byte first: bit `i · tokens + j` says whether query i sees the j-th of the
    /// newest `tokens` tokens.
    ///
    /// # Errors
    /// [`Error::Plan`] when there are no tokens, fewer tokens than queries, or more or fewer bytes than the bits fill.
    pub fn from_bits(queries: usize, tokens: usize, bytes: &[u8]) -> Result<Self> {
        let needed = queries.checked_mul(tokens).map(|bits| bits.div_ceil(8));
        if tokens == 0 || queries > tokens || needed != Some(bytes.len()) {
            let reason = format!(
                "{} bytes for {queries} queries over the newest {tokens} tokens; there must be at least as many tokens as \
                 queries, and queries · tokens / 8 bytes, rounded up",
                bytes.len()
            );
            return Err(Error::Plan { what: "tree mask", reason });
        }
        Ok(Self::new(queries, tokens, |query, token| {
            let bit = query * tokens + token;
            bytes[bit / 8] >> (bit % 8) & 1 == 1
        }))
    }

    /// Of a tree whose nodes are the newest tokens: a query sees itself, its parent, the parent's parent and so on.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no node, or a parent does not come before its child.
    pub fn from_parents(parents: &[Option<usize>]) -> Result<Self> {
        let wrong = parents.iter().enumerate().find(|(node, parent)| parent.is_some_and(|parent| parent >= *node));
        if parents.is_empty() || wrong.is_some() {
            let reason = match wrong {
                Some((node, parent)) => {
                    format!("node {node} has the parent {parent:?}; parents come before their children")
                }
                None => "it has no nodes; give it one for every query".into(),
            };
            return Err(Error::Plan { what: "tree mask", reason });
        }
        let is_ancestor = |node: usize, of: usize| {
            std::iter::successors(Some(of), |&node| parents[node]).any(|ancestor| ancestor == node)
        };
        Ok(Self::new(parents.len(), parents.len(), |query, token| is_ancestor(token, query)))
    }

    fn new(queries: usize, tokens: usize, sees: impl Fn(usize, usize) -> bool) -> Self {
        let mut words = vec![0u32; queries * tokens.div_ceil(32)];
        for (query, row) in words.chunks_exact_mut(tokens.div_ceil(32)).enumerate() {
            for token in (0..tokens).filter(|&token| sees(query, token)) {
                row[token / 32] |= 1 << (token % 32);
            }
        }
        Self { queries, tokens, words: words.into() }
    }

    /// Queries that it has rows for.
    pub const fn queries(&self) -> usize {
        self.queries
    }

    /// The newest tokens that it has bits for.
    pub const fn tokens(&self) -> usize {
        self.tokens
    }

    /// Whether a query sees one of the newest tokens; false beyond the mask.
    pub fn sees(&self, query: usize, token: usize) -> bool {
        query < self.queries && token < self.tokens && self.row(query)[token / 32] >> (token % 32) & 1 == 1
    }

    fn row_words(&self) -> usize {
        self.tokens.div_ceil(32)
    }

    fn row(&self, query: usize) -> &[u32] {
        &self.words[query * self.row_words()..][..self.row_words()]
    }

    /// One past the last token that a query sees.
    fn seen_end(&self, query: usize) -> usize {
        let last = self.row(query).iter().enumerate().rev().find(|(_, word)| **word != 0);
        last.map_or(0, |(index, word)| index * 32 + (32 - word.leading_zeros() as usize))
    }

    fn check(&self, queries: usize, end: usize) -> Result<()> {
        if self.queries == queries && self.tokens <= end {
            return Ok(());
        }
        let (rows, tokens) = (self.queries, self.tokens);
        let reason = format!(
            "{rows} rows over the newest {tokens} tokens, for a run of {queries} queries that ends at position {end}; there \
             must be a row for every query, and no more tokens than positions"
        );
        Err(Error::Plan { what: "tree mask", reason })
    }
}

/// The positions that one query sees: those of `from..to`, of which a tree mask decides from `tree` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowLimits {
    /// The first.
    pub from: u32,
    /// One past the last; not above `from` where the query sees nothing.
    pub to: u32,
    /// The first position that a tree mask decides; `to` or more where there is none.
    pub tree: u32,
}

impl RowLimits {
    /// No position.
    pub const NOTHING: Self = Self { from: 0, to: 0, tree: 0 };
}

/// Where the queries of a run stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stand {
    /// Queries of the run.
    pub queries: usize,
    /// The position after the last query's.
    pub end: usize,
    /// Positions of the sequence: none lies beyond.
    pub length: usize,
}

/// Where the window of a position begins, `left` before it and below 0 for the first positions.
pub(super) fn window_start(position: usize, left: usize) -> i64 {
    position as i64 - left.min(MOST_TOKENS) as i64
}

impl Stand {
    /// Checks that queries stand somewhere, and see by a mask that suits them.
    pub(super) fn check(&self, visible: &Visible) -> Result<()> {
        if self.queries > self.end && *visible != Visible::All {
            let (queries, positions) = (self.queries, self.end);
            let reason = format!("{queries} queries for the newest positions of a sequence that has {positions}");
            return Err(Error::Plan { what: "queries that see by position", reason });
        }
        visible.check(self.queries, self.end)
    }

    /// Where a query stands.
    pub(super) const fn position(&self, query: usize) -> usize {
        (self.end + query).saturating_sub(self.queries)
    }

    /// What a query sees; nothing beyond the queries of the run. The kinds of visibility differ only here and in
    /// [`Stand::advance`]; all positions fit 32 bits.
    pub(super) fn limits(&self, visible: &Visible, query: usize) -> RowLimits {
        if query >= self.queries {
            return RowLimits::NOTHING;
        }
        let position = self.position(query);
        let window = |left: Option<usize>| left.map_or(0, |left| position.saturating_sub(left));
        let plain =
            |seen: Range<usize>| RowLimits { from: seen.start as u32, to: seen.end as u32, tree: seen.end as u32 };
        match visible {
            Visible::All => plain(0..self.length),
            Visible::Causal => plain(0..position + 1),
            Visible::Window { left } => plain(window(Some(*left))..position + 1),
            Visible::Spans { left, spans } => {
                let (from, to) = (window(*left), position + 1);
                let after = spans.partition_point(|span| span.end <= position);
                match spans.get(after).filter(|span| span.start <= position) {
                    // Both hold the query's own position, and so are one interval together.
                    Some(span) => plain(from.min(span.start)..to.max(span.end)),
                    None => plain(from..to),
                }
            }
            Visible::Tree(mask) => {
                let tree = self.end - mask.tokens;
                let to = tree + mask.seen_end(query);
                RowLimits { from: 0, to: to as u32, tree: tree as u32 }
            }
        }
    }

    /// How the queries from `query` on go on with what it sees; none where they do not so evenly.
    pub(super) fn advance(&self, visible: &Visible, query: usize) -> Option<Advance> {
        let (left, position) = (self.queries.checked_sub(query).filter(|left| *left > 0)?, self.position(query));
        let alike = |queries: usize, moves| Advance { queries: queries.min(left), moves, window: None };
        match visible {
            Visible::All => Some(alike(left, false)),
            Visible::Causal => Some(alike(left, true)),
            Visible::Window { left: before } => {
                Some(Advance { window: Some(window_start(position, *before)), ..alike(left, true) })
            }
            // In a span that sees itself all see what it ends with; before it they are causal.
            Visible::Spans { left: None, spans } => {
                Some(match spans.get(spans.partition_point(|span| span.end <= position)) {
                    Some(span) if span.start <= position => alike(span.end - position, false),
                    Some(span) => alike(span.start - position, true),
                    None => alike(left, true),
                })
            }
            Visible::Spans { .. } | Visible::Tree(_) => None,
        }
    }

    /// Whether a query sees a position.
    pub(super) fn sees(&self, visible: &Visible, query: usize, position: usize) -> bool {
        let limits = self.limits(visible, query);
        let bit = |mask: &TreeMask| mask.sees(query, position - limits.tree as usize);
        match visible {
            Visible::Tree(mask) if position >= limits.tree as usize => bit(mask),
            _ => (limits.from as usize) <= position && position < limits.to as usize,
        }
    }
}

/// How a query and those after it go on with what it sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Advance {
    /// The query and as many after it as go on alike.
    pub queries: usize,
    /// Whether each sees one more position at the end than the one before it.
    pub moves: bool,
    /// Where the window of the first begins, before position 0 for the first queries of a sequence. That of each
    /// further one begins a position later.
    pub window: Option<i64>,
}

/// What a query sees of a span, as tokens of the span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// The first.
    pub from: usize,
    /// One past the last; `from` where it sees nothing.
    pub to: usize,
    /// The first token that bits decide; `to` where there are none.
    pub tree: usize,
}

impl Seen {
    /// Nothing of a span.
    pub const NOTHING: Self = Self { from: 0, to: 0, tree: 0 };

    /// Whether the query sees nothing of the span. Bits may hide what is left.
    pub const fn is_empty(&self) -> bool {
        self.from >= self.to
    }

    /// Whether some of these tokens of the span are hidden from the query, or may be by bits.
    pub(super) fn hides_some_of(&self, tokens: &Range<usize>) -> bool {
        tokens.start < self.from || self.tree < tokens.end
    }

    /// The tokens of a span of `tokens` tokens that begins at position `start`.
    pub(super) fn of(limits: RowLimits, start: usize, tokens: usize) -> Self {
        let place = |position: u32| (position as usize).saturating_sub(start).min(tokens);
        let (from, to) = (place(limits.from), place(limits.to));
        if from >= to {
            return Self::NOTHING;
        }
        Self { from, to, tree: place(limits.tree).clamp(from, to) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn stand(queries: usize, end: usize) -> Stand {
        Stand { queries, end, length: end }
    }

    /// The definition, position by position.
    fn sees(visible: &Visible, queries: usize, end: usize, query: usize, position: usize) -> bool {
        let own = end - queries + query;
        let causal = |left: usize| position <= own && position + left >= own;
        match visible {
            Visible::All => true,
            Visible::Causal => causal(usize::MAX / 2),
            Visible::Window { left } => causal(*left),
            Visible::Spans { left, spans } => {
                causal(left.unwrap_or(usize::MAX / 2))
                    || spans.iter().any(|span| span.contains(&own) && span.contains(&position))
            }
            Visible::Tree(mask) => position < end - mask.tokens() || mask.sees(query, position - (end - mask.tokens())),
        }
    }

    /// A bit decides the last token of a tile, before which the query sees all.
    #[test]
    fn bits_of_a_last_token_hide_it() {
        let seen = Seen { from: 0, to: 200, tree: 127 };
        assert!(seen.hides_some_of(&(0..128)) && !seen.hides_some_of(&(0..127)));
        assert!(
            Seen { from: 1, ..seen }.hides_some_of(&(0..100)) && !Seen { from: 1, ..seen }.hides_some_of(&(1..100))
        );
    }

    #[test]
    fn what_hides_everything_or_overlaps_is_refused() {
        let refused = |visible: Visible, queries, end| stand(queries, end).check(&visible).unwrap_err().to_string();
        assert!(refused(Visible::Window { left: 0 }, 1, 10).contains("at least 1"));
        assert!(refused(Visible::Causal, 11, 10).contains("11 queries"));
        for spans in [vec![1..2, 3..3], vec![2..5, 4..6], vec![6..8, 1..2], vec![1..2, 8..11]] {
            assert!(refused(Visible::spans(&spans), 1, 10).contains("disjoint"), "{spans:?}");
        }
        assert!(
            refused(Visible::Spans { left: Some(0), spans: std::iter::once(1..2).collect() }, 1, 10)
                .contains("at least 1")
        );
        let tree = TreeMask::from_parents(&[None, Some(0)]).unwrap();
        assert!(refused(Visible::Tree(tree.clone()), 3, 10).contains("a row for every query"));
        assert!(refused(Visible::Tree(tree), 2, 1).contains("2 queries"));
        for (queries, tokens, bytes) in [(1, 0, 0), (3, 2, 1), (2, 5, 1), (2, 5, 3), (usize::MAX, usize::MAX, 0)] {
            assert!(TreeMask::from_bits(queries, tokens, &vec![0; bytes]).is_err(), "{queries} {tokens} {bytes}");
        }
        assert!(TreeMask::from_parents(&[Some(0)]).is_err() && TreeMask::from_parents(&[]).is_err());
        stand(1, 10).check(&Visible::spans(&[2..5, 5..10])).unwrap();
        stand(5, 0).check(&Visible::All).unwrap();
    }

    /// A window without end begins before every position.
    #[test]
    fn windows_of_any_width_begin_before_their_position() {
        for left in [1, 1 << 40, 1 << 63, usize::MAX - 1, usize::MAX] {
            let advance = stand(3, 10).advance(&Visible::Window { left }, 1).unwrap();
            let begins = advance.window.unwrap();
            assert_eq!(begins.max(0), 8i64.saturating_sub_unsigned(left as u64).max(0), "{left}");
            assert!(begins >= -(MOST_TOKENS as i64));
        }
    }

    fn visibilities(queries: usize, end: usize) -> impl Strategy<Value = Visible> {
        let cuts = move || prop::collection::vec(0..=end, 0..7);
        let spans = move || {
            cuts().prop_map(|mut cuts| {
                cuts.sort_unstable();
                cuts.dedup();
                cuts.chunks_exact(2).map(|cut| cut[0]..cut[1]).collect::<Vec<_>>()
            })
        };
        prop_oneof![
            Just(Visible::All),
            Just(Visible::Causal),
            (1..=end).prop_map(|left| Visible::Window { left }),
            (prop::option::of(1..=end), spans()).prop_map(|(left, spans)| Visible::Spans { left, spans: spans.into() }),
            (queries..=end).prop_flat_map(move |tokens| {
                prop::collection::vec(any::<u8>(), (queries * tokens).div_ceil(8))
                    .prop_map(move |bits| Visible::Tree(TreeMask::from_bits(queries, tokens, &bits).unwrap()))
            }),
        ]
    }

    proptest! {
        /// Limits and bits agree with the definition, for every query, position and span.
        #[test]
        fn limits_are_the_definition(
            (queries, end, visible) in (1usize..20, 0usize..100).prop_flat_map(|(queries, more)| {
                let end = queries + more;
                (Just(queries), Just(end), visibilities(queries, end))
            }),
            (start, tokens) in (0usize..120, 1usize..60),
        ) {
            let stand = stand(queries, end);
            stand.check(&visible).unwrap();
            for query in 0..queries {
                for position in 0..end {
                    prop_assert_eq!(stand.sees(&visible, query, position), sees(&visible, queries, end, query, position));
                }
                let seen = Seen::of(stand.limits(&visible, query), start, tokens);
                for token in (0..tokens).filter(|token| start + token < end) {
                    let is_seen = stand.sees(&visible, query, start + token);
                    prop_assert!(!is_seen || (seen.from..seen.to).contains(&token));
                    prop_assert!(is_seen || token >= seen.tree || !(seen.from..seen.to).contains(&token));
                }
            }
        }
    }
}
