//! Pages behind a layer's sliding window, which no later query sees.

use super::super::change::Change;
use super::super::sequence::SpanKind;
use super::PageTables;
use crate::format::TILE_TOKENS;
use crate::plan::{AttendPlan, TokenIndices, TokenRange};
use crate::{Error, Result};

/// Tokens behind the window whose pages stay, so that drafts can be taken back.
const TAKEN_BACK: usize = TILE_TOKENS;

impl<I: TokenIndices + Clone> PageTables<I> {
    /// Releases the pages of a sequence that no query from its end on sees, once the change is committed. Does nothing
    /// in a layer that sees all.
    pub(super) fn release_behind_window(&mut self, change: &mut Change<I>, sequence: usize) {
        let Some(unseen) = self.unseen_behind_window(sequence) else { return };
        let Ok(positions) = TokenRange::new(0, unseen) else { return };
        self.remember(change, sequence, 0);
        change.freed.extend(self.sequences[sequence].forget(positions));
        self.sequences[sequence].released = unseen;
    }

    /// The end of the positions that no query from the end of a sequence on sees, if it still holds pages of them. It
    /// holds all pages of a prompt of which nothing is packed yet.
    pub(super) fn unseen_behind_window(&self, sequence: usize) -> Option<usize> {
        let (left, of) = (self.recipe.attention().window()?, &self.sequences[sequence]);
        let unseen = of.length.saturating_sub(left.saturating_add(TAKEN_BACK)) / TILE_TOKENS * TILE_TOKENS;
        let is_packed = || of.spans.iter().all(|span| span.kind != SpanKind::Unpacked);
        (unseen > of.released && is_packed()).then_some(unseen)
    }

    /// Number of steps with a token of a sequence before one leaves a page behind that no query sees.
    pub(super) fn steps_until_unseen(&self, sequence: usize) -> usize {
        let Some(left) = self.recipe.attention().window() else { return usize::MAX };
        let of = &self.sequences[sequence];
        let next = (of.released / TILE_TOKENS + 1) * TILE_TOKENS;
        left.saturating_add(TAKEN_BACK + next).saturating_sub(of.length)
    }

    /// Checks that a sequence of `length` tokens still holds what its next query sees.
    ///
    /// # Errors
    /// [`Error::Plan`].
    pub(super) fn check_window(&self, sequence: usize, length: usize) -> Result<()> {
        let (released, left) = (self.sequences[sequence].released, self.recipe.attention().window());
        let Some(left) = left.filter(|&left| length > 0 && length.saturating_sub(left) < released) else {
            return Ok(());
        };
        let reason = format!(
            "sequence {sequence} released the tokens before position {released} behind a sliding window of {left} \
             positions, and cannot keep {length}; keep at least {}, or none",
            released.saturating_add(left)
        );
        Err(Error::Plan { what: "truncation", reason })
    }

    /// Checks that a plan sees nothing that was released behind a sliding window, and all or nothing of what other ranks
    /// gathered.
    ///
    /// # Errors
    /// [`Error::Plan`], [`Error::Unsupported`].
    pub(in crate::cache) fn check_seen(&self, plan: &AttendPlan) -> Result<()> {
        for planned in plan.runs() {
            let of = self.sequence(planned.run.sequence)?;
            of.elsewhere.iter().try_for_each(|gathered| planned.check_sees(gathered.clone()))?;
            let released = of.released;
            if released == 0 {
                continue;
            }
            let first = (0..planned.run.queries).map(|query| planned.limits(query).from as usize).min();
            if let Some(first) = first.filter(|&first| first < released) {
                let reason = format!(
                    "a query of sequence {} sees position {first}, but those before {released} were released behind a \
                     sliding window; ask for the newest queries",
                    planned.run.sequence
                );
                return Err(Error::Plan { what: "attention plan", reason });
            }
        }
        Ok(())
    }
}
