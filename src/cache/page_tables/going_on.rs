//! Steps of decoding that go on from the step before: every sequence gets a token in the slot behind its newest one,
//! and nothing else changes. They look at neither spans nor pages.

use super::super::Appended;
use super::super::TokenRun;
use super::super::change::Change;
use super::super::step::RunKind;
use super::PageTables;
use crate::counts::MOST_TOKENS;
use crate::format::TILE_TOKENS;
use crate::plan::TokenIndices;

/// A step that put a token into the open page of every sequence, and how long steps of the same runs can go on so.
#[derive(Clone, Debug, Default)]
pub(in crate::cache) struct GoingOn {
    runs: Vec<TokenRun>,
    /// How often the sequence of every run had been changed once its token was there.
    changes: Vec<u64>,
    /// Number of steps that may follow.
    steps: usize,
}

impl GoingOn {
    /// Forgets the step: none goes on from it.
    pub(in crate::cache) fn clear(&mut self) {
        self.runs.clear();
        self.changes.clear();
        self.steps = 0;
    }
}

impl<I: TokenIndices + Clone> PageTables<I> {
    /// Notes an open change of these runs, from which the next step may go on.
    pub(in crate::cache) fn note(&self, going: &mut GoingOn, change: &Change<I>, runs: &[TokenRun]) {
        going.clear();
        if change.places.len() != runs.len() {
            return;
        }
        going.runs.extend_from_slice(runs);
        going.changes.extend(runs.iter().map(|run| self.changes_of(run.sequence())));
        let places = runs.iter().zip(&change.places);
        going.steps = places.map(|(run, &(_, _, slot))| self.steps_behind(run, slot)).min().unwrap_or(0);
    }

    /// Whether a step of these runs goes on from the one that was noted: nothing has changed their sequences since.
    pub(in crate::cache) fn goes_on(&self, going: &GoingOn, runs: &[TokenRun], tokens: usize) -> bool {
        let unchanged = |(run, &changes): (&TokenRun, &u64)| self.changes_of(run.sequence()) == changes;
        going.steps > 0
            && going.runs == runs
            && tokens == runs.len()
            && self.share.is_none()
            && runs.iter().zip(&going.changes).all(unchanged)
    }

    /// Appends the tokens of a step that goes on to an empty change. It lists no writes: they are those of the step
    /// before, each a slot further.
    pub(in crate::cache) fn go_on(&mut self, going: &mut GoingOn, change: &mut Change<I>) {
        for (run, changes) in going.runs.iter().zip(&mut going.changes) {
            let sequence = run.sequence();
            debug_assert!(self.place_in_page(run).is_some(), "a step of {run:?} does more than to go on");
            self.sequences[sequence].push_in_page();
            self.changes[sequence] += 1;
            *changes = self.changes[sequence];
            change.grown.push(sequence);
        }
        going.steps -= 1;
    }

    /// Number of further steps in which a run, whose token was put into a slot of its page, changes nothing else: the
    /// page has slots, no window is due, no page is left behind by a sliding window, and tokens go to the same store.
    fn steps_behind(&self, run: &TokenRun, slot: usize) -> usize {
        let of = &self.sequences[run.sequence()];
        let (in_page, countable) = (TILE_TOKENS - 1 - slot, MOST_TOKENS.saturating_sub(of.length));
        let in_store = match self.recipe.appended() {
            Appended::AtOnce(_) if of.length <= self.recipe.sink() => self.recipe.sink() - of.length,
            Appended::Tiles { newer, .. } if run.kind() == RunKind::Decode => {
                of.steps_until_window(self.recipe.sink(), newer)
            }
            Appended::AtOnce(_) | Appended::Tiles { .. } | Appended::Keep => usize::MAX,
        };
        in_page.min(countable).min(in_store).min(self.steps_until_unseen(run.sequence()))
    }
}
