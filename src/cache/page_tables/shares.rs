//! Page tables of one of several ranks, which stores some of the positions of every sequence.

use std::ops::Range;

use super::super::StoreId;
use super::super::change::Change;
use super::super::sequence::{Positions, Sequence, Span};
use super::super::step::RunKind;
use super::PageTables;
use crate::format::TILE_TOKENS;
use crate::plan::{Page, QueryRun, RankShare, SpanView, TokenIndices, Visible};
use crate::{Error, Result};

impl<I: TokenIndices + Clone> PageTables<I> {
    /// Stores the positions of one rank alone from now on.
    ///
    /// # Errors
    /// [`Error::Plan`] when a sequence holds tokens, [`Error::Unsupported`] for a recipe whose scores are calibrated.
    pub(in crate::cache) fn set_share(&mut self, share: RankShare) -> Result<()> {
        self.check_share()?;
        self.share = Some(share);
        Ok(())
    }

    /// Checks that the page tables may become those of a rank.
    ///
    /// # Errors
    /// Those of [`PageTables::set_share`].
    pub(in crate::cache) fn check_share(&self) -> Result<()> {
        if let Some(held) = self.sequences.iter().position(|of| of.length > 0 || of.centre.is_some()) {
            let reason = format!("sequence {held} holds tokens, or a centre; say which rank it is before the first");
            return Err(Error::Plan { what: "share of a rank", reason });
        }
        if self.recipe.stores().iter().any(|store| store.calibration.is_some()) {
            return Err(Error::Unsupported {
                what: "calibrated scores of a sequence that ranks share".into(),
                hint: "the extremes of a span's scores are over all its tokens, which lie on several ranks; use a \
                       recipe without calibration"
                    .into(),
            });
        }
        Ok(())
    }

    /// The positions that these page tables store; none where they store all.
    pub(in crate::cache) const fn share(&self) -> Option<&RankShare> {
        self.share.as_ref()
    }

    /// The pieces of some positions, and whether these page tables store them.
    pub(super) fn pieces(&self, positions: Range<usize>) -> impl Iterator<Item = (Range<usize>, bool)> + use<I> {
        self.share.unwrap_or(RankShare::ALL).pieces(positions)
    }

    /// Appends tokens in these rows where appended tokens lie. There is room for those that are stored here.
    pub(super) fn append_rows(
        &mut self,
        change: &mut Change<I>,
        (sequence, kind): (usize, RunKind),
        rows: Range<usize>,
    ) -> Result<()> {
        let (start, first) = (self.sequences[sequence].length, rows.start);
        for (piece, stores) in self.pieces(start..start + rows.len()) {
            if stores {
                let rows = first + (piece.start - start)..first + (piece.end - start);
                rows.into_iter().try_for_each(|row| self.append_token(change, (sequence, kind), row))?;
            } else {
                self.sequences[sequence].length = piece.end;
            }
        }
        Ok(())
    }

    /// Number of consecutive tokens at the end of a sequence of which none was evicted. A rank sees that of its own
    /// tokens, and counts those of other ranks behind the last that it lacks: the least of all ranks is the number.
    pub(in crate::cache) fn unbroken(&self, sequence: usize) -> Result<usize> {
        let of = self.sequence(sequence)?;
        let Some(share) = self.share else { return Ok(of.unbroken()) };
        // One past the last position before this one that the rank is to hold.
        let last_own = |before: usize| share.last_held(before).map_or(0, |last| last + 1);
        let mut from = of.length;
        for span in of.spans.iter().rev() {
            match span.positions {
                Positions::From(start) if start + span.tokens >= last_own(from) => from = start,
                _ => break,
            }
        }
        Ok(of.length - last_own(from))
    }

    /// Spans of a rank that all queries of a plan see whole, joined: a kernel then reads one span in place of one for
    /// every turn. Their tokens follow each other in whole pages, and no position is asked for.
    pub(in crate::cache) fn joined_spans(&self, sequences: &[usize], runs: &[QueryRun]) -> Result<Vec<JoinedSpan>> {
        let mut joined = Vec::new();
        if self.share.is_none_or(|share| share.placement().ranks() == 1) {
            return Ok(joined);
        }
        for &sequence in sequences {
            let of_sequence = runs.iter().filter(|run| run.sequence == sequence);
            let seen_by_all = of_sequence.map(seen_whole).min().unwrap_or(0);
            let mut last: Option<JoinedSpan> = None;
            for span in &self.sequence(sequence)?.spans {
                let store = &self.recipe.stores()[span.store.index()];
                let Some((start, end)) = span.start().zip(span.end()) else { continue };
                if end > seen_by_all || store.format.has_span_ranges() {
                    continue;
                }
                match last.as_mut().filter(|last| last.store == span.store && last.tokens.is_multiple_of(TILE_TOKENS)) {
                    Some(last) => {
                        (last.tokens, last.end) = (last.tokens + span.tokens, end);
                        last.pages.extend_from_slice(&span.lease.pages);
                    }
                    None => {
                        let (tokens, pages) = (span.tokens, span.lease.pages.clone());
                        let next = JoinedSpan { sequence, store: span.store, start, end, tokens, pages };
                        joined.extend(last.replace(next));
                    }
                }
            }
            joined.extend(last);
        }
        Ok(joined)
    }

    /// Checks that calls which read and write all tokens of a sequence find them here.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub(in crate::cache) fn check_whole(&self, what: &str) -> Result<()> {
        match self.share {
            None => Ok(()),
            Some(share) => Err(Error::Unsupported {
                what: format!("{what} in the cache of rank {} of {}", share.rank(), share.placement().ranks()),
                hint: "a rank stores a part of every sequence; append prompts as TokenRun::prompt or TokenRun::chunk, \
                       and evict through ranks::ContextParallel"
                    .into(),
            }),
        }
    }

    /// Checks that the spans of a sequence which comes from elsewhere are those of this rank.
    ///
    /// # Errors
    /// [`Error::Plan`].
    pub(super) fn check_stores(&self, sequence: &Sequence<I>) -> Result<()> {
        let foreign = |span: &&Span<I>| match span.positions {
            Positions::From(start) => self.pieces(start..start + span.tokens).any(|(_, holds)| !holds),
            Positions::Gathered { .. } => false,
        };
        match sequence.spans.iter().find(foreign) {
            None => Ok(()),
            Some(span) => {
                let reason =
                    format!("a span of {} tokens is not of this rank; swap in what this rank swapped out", span.tokens);
                Err(Error::Plan { what: "swap", reason })
            }
        }
    }
}

/// Spans of a rank that queries see as one.
#[derive(Clone, Debug)]
pub(in crate::cache) struct JoinedSpan {
    sequence: usize,
    pub(in crate::cache) store: StoreId,
    start: usize,
    /// One past the last position.
    end: usize,
    tokens: usize,
    pages: Vec<Page>,
}

impl JoinedSpan {
    /// Whether a span of a sequence is part of it.
    pub(in crate::cache) fn holds<I: TokenIndices>(&self, sequence: usize, span: &Span<I>) -> bool {
        let lies_in = |start: usize| self.start <= start && start < self.end;
        self.sequence == sequence && self.store == span.store && span.start().is_some_and(lies_in)
    }

    /// How a plan sees it.
    pub(in crate::cache) fn view(&self) -> SpanView<'_> {
        let gathered = (self.end - self.start > self.tokens).then_some(self.end);
        let Self { sequence, start, tokens, .. } = *self;
        SpanView { sequence, start, tokens, gathered, pages: &self.pages, range_slot: 0 }
    }
}

/// One past the positions that all queries of a run see whole, from the first on.
fn seen_whole(run: &QueryRun) -> usize {
    let end = run.end.unwrap_or(0);
    match &run.visible {
        Visible::All => usize::MAX,
        Visible::Causal | Visible::Spans { left: None, .. } => end.saturating_add(1).saturating_sub(run.queries),
        Visible::Tree(mask) => end.saturating_sub(mask.tokens()),
        Visible::Window { .. } | Visible::Spans { left: Some(_), .. } => 0,
    }
}
