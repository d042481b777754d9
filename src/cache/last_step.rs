//! What a committed step leaves for the next one: its memory, and its plan. A step of decoding that adds a token within
//! the last page of every sequence is then opened without a plan of its own, and without taking memory.

use super::change::Change;
use super::layers::LayerGroup;
use super::page_tables::{GoingOn, PageTables};
use super::write_table::GroupTable;
use super::{Recipe, TokenRun};
use crate::Result;
use crate::backend::Backend;
use crate::plan::{AttendPlan, QueryRun, SpanIndex, TokenIndices, Visible};

/// What the last step of a group left. Nothing in it has to be there.
pub(super) struct LastStep<I> {
    /// An empty change.
    change: Option<Change<I>>,
    plan: Option<AttendPlan>,
    /// How often the sequence of every run of the plan had been changed.
    changes: Vec<u64>,
    /// Where the plan has the last span of every run; empty if that was not looked for.
    ends: Vec<SpanIndex>,
    /// The step of the write table.
    going: GoingOn,
    /// How often the write table had been filled for that step.
    fillings: u64,
}

impl<I> Default for LastStep<I> {
    fn default() -> Self {
        Self { change: None, plan: None, changes: Vec::new(), ends: Vec::new(), going: GoingOn::default(), fillings: 0 }
    }
}

impl<I: TokenIndices + Clone> LastStep<I> {
    /// An empty change of the stores of a recipe.
    pub(super) fn change(&mut self, recipe: &Recipe) -> Change<I> {
        self.change.take().unwrap_or_else(|| Change::new(recipe))
    }

    /// Whether a step of these runs goes on from the one that the write table is of.
    pub(super) fn goes_on(
        &self,
        tables: &PageTables<I>,
        written: &GroupTable,
        (runs, tokens): (&[TokenRun], usize),
    ) -> bool {
        self.fillings == written.fillings() && tables.goes_on(&self.going, runs, tokens)
    }

    /// Appends the tokens of such a step to an empty change.
    pub(super) fn go_on(&mut self, tables: &mut PageTables<I>, change: &mut Change<I>) {
        tables.go_on(&mut self.going, change);
    }

    /// Notes the open change of these runs, of which the write table is.
    pub(super) fn note(
        &mut self,
        tables: &PageTables<I>,
        written: &GroupTable,
        (change, runs): (&Change<I>, &[TokenRun]),
    ) {
        tables.note(&mut self.going, change, runs);
        self.fillings = written.fillings();
    }

    /// The plan of the open change, if that only adds a token to each of the sequences that the last plan reads, within
    /// their pages, and their queries are the same.
    fn grown_plan(&mut self, tables: &PageTables<I>, change: &Change<I>, queries: &[QueryRun]) -> Option<AttendPlan> {
        let mut plan = self.plan.take()?;
        let runs = plan.runs();
        let same_numbers = [runs.len(), change.grown.len(), self.changes.len()] == [queries.len(); 3];
        if !same_numbers || !change.undo.is_empty() {
            return None;
        }
        for ((query, planned), (&grown, &changes)) in
            queries.iter().zip(runs).zip(change.grown.iter().zip(&self.changes))
        {
            let decodes = query.queries == 1 && query.visible == Visible::All && query.end.is_none();
            let sequence = query.sequence;
            let same = planned.run.queries == 1 && [planned.run.sequence, grown] == [sequence; 2];
            let unchanged = tables.changes_of(sequence) == changes + 1;
            // A query may have stood before the newest token: it would stay as far behind.
            let length = tables.sequence(sequence).ok()?.length;
            let newest = planned.run.end.is_none_or(|end| end + 1 == length);
            if !(decodes
                && same
                && unchanged
                && newest
                && tables.recipe().attention().sees_decoding(&planned.run.visible))
            {
                return None;
            }
        }
        let last = |sequence: usize| {
            let span = tables.sequences().get(sequence)?.spans.last()?;
            Some((span.store.index(), span.start()?))
        };
        plan.grow_each(&mut self.ends, last).then_some(plan)
    }
}

impl<B: Backend> LayerGroup<B> {
    /// Opens a change of the page tables that appends, and lays out its writes. On an error nothing has changed.
    pub(super) fn open_append(&mut self, runs: &[TokenRun], tokens: usize) -> Result<Change<B::Indices>> {
        let mut change = self.last.change(self.page_tables.recipe());
        let Self { page_tables, table, last, .. } = self;
        if last.goes_on(page_tables, table, (runs, tokens)) && table.move_on() {
            last.go_on(page_tables, &mut change);
            return Ok(change);
        }
        let change = self.page_tables.append(change, runs, tokens)?;
        let change = self.lay_out(change, tokens)?;
        self.last.note(&self.page_tables, &self.table, (&change, runs));
        Ok(change)
    }

    /// The plan of an open change.
    pub(super) fn open_plan(
        &mut self,
        change: Option<&Change<B::Indices>>,
        queries: &[QueryRun],
    ) -> Result<AttendPlan> {
        let grown = change.and_then(|change| self.last.grown_plan(&self.page_tables, change, queries));
        grown.map_or_else(
            || {
                self.last.ends.clear();
                self.plan(queries)
            },
            Ok,
        )
    }

    /// Commits an open step, and keeps what the next one can use.
    pub(super) fn commit(&mut self, mut change: Change<B::Indices>, plan: AttendPlan) {
        // What the commit changes is not what the plan reads.
        let is_read = change.committed.is_empty();
        self.page_tables.commit_and_clear(&mut change);
        let Self { page_tables, last, .. } = self;
        last.changes.clear();
        last.changes.extend(plan.runs().iter().map(|planned| page_tables.changes_of(planned.run.sequence)));
        (last.change, last.plan) = (Some(change), is_read.then_some(plan));
    }
}
