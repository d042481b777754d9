//! Runs of queries, and where they lie in a plan.

use std::ops::Range;

use super::attend::{PlannedSpan, SpanView, StoreView};
#[cfg(feature = "cuda")]
use super::visible::window_start;
use super::visible::{Advance, RowLimits, Seen, Stand, Visible};
use super::{limit, reject};
use crate::format::AttentionShape;
use crate::{Error, Result};

/// Consecutive queries of one sequence. The runs of a plan lie one after the other in the tensor of queries, so that
/// batches may be ragged: one query for a sequence that decodes, next to a chunk of another's prompt.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct QueryRun {
    /// The sequence.
    pub sequence: usize,
    /// Queries, at least 1.
    pub queries: usize,
    /// What they see.
    pub visible: Visible,
    /// The position after the last query's; none: after the last position of the spans of the sequence.
    pub end: Option<usize>,
}

impl QueryRun {
    /// One query that sees all tokens of a sequence: a decode step.
    pub const fn decode(sequence: usize) -> Self {
        Self::new(sequence, 1, Visible::All)
    }

    /// The queries of the newest `queries` tokens of a sequence.
    pub const fn causal(sequence: usize, queries: usize) -> Self {
        Self::new(sequence, queries, Visible::Causal)
    }

    /// Queries of the newest tokens of a sequence.
    pub const fn new(sequence: usize, queries: usize, visible: Visible) -> Self {
        Self { sequence, queries, visible, end: None }
    }

    /// One decoding query for each of the sequences `0..sequences`.
    pub fn decode_batch(sequences: usize) -> Vec<Self> {
        (0..sequences).map(Self::decode).collect()
    }
}

/// A run of a plan and where its queries lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedRun {
    /// The run.
    pub run: QueryRun,
    /// Its first row in the tensor of queries.
    pub first_row: usize,
    stand: Stand,
}

impl PlannedRun {
    /// The same run once its sequence has one more token.
    pub(super) fn move_on(&mut self) {
        self.run.end = self.run.end.map(|end| end + 1);
        self.stand = Stand { end: self.stand.end + 1, length: self.stand.length + 1, ..self.stand };
    }

    /// The positions that a query of the run sees; none for a query that the run does not have.
    pub fn limits(&self, query: usize) -> RowLimits {
        self.stand.limits(&self.run.visible, query)
    }

    /// What a query of the run sees of a span of its sequence; nothing for a query that the run does not have.
    pub fn seen(&self, query: usize, span: &PlannedSpan) -> Seen {
        seen_by(self.limits(query), span)
    }

    /// Whether a query of the run sees every position up to its own, and no other.
    pub(crate) fn sees_causally(&self, query: usize) -> bool {
        let RowLimits { from, to, tree } = self.limits(query);
        let masked = (tree..to).all(|position| self.sees(query, position as usize));
        from == 0 && to as usize == self.stand.position(query) + 1 && masked
    }

    /// Whether the first query sees the newest token of its sequence.
    #[cfg(feature = "cuda")]
    pub(crate) fn sees_newest(&self) -> bool {
        self.limits(0).to as usize == self.stand.length
    }

    /// What the queries from `first` to `last`, which move evenly, see of a span together.
    #[cfg(feature = "cuda")]
    pub(crate) fn seen_between(&self, first: usize, last: usize, span: &PlannedSpan) -> Seen {
        let (RowLimits { from, .. }, RowLimits { to, .. }) = (self.limits(first), self.limits(last));
        seen_by(RowLimits { from, to, tree: to }, span)
    }

    /// Whether the queries see the first tokens of every span, by the stored order alone.
    pub(crate) const fn sees_prefixes(&self) -> bool {
        matches!(self.run.visible, Visible::All | Visible::Causal)
    }

    /// Whether what a query sees is what the one before it sees, moved by a position.
    #[cfg(feature = "cuda")]
    pub(crate) const fn moves_evenly(&self) -> bool {
        matches!(self.run.visible, Visible::All | Visible::Causal | Visible::Window { .. })
    }

    /// Where the window of a query begins, before the first position for the first queries; none without a window.
    #[cfg(feature = "cuda")]
    pub(crate) fn window_start(&self, query: usize) -> Option<i64> {
        match self.run.visible {
            Visible::Window { left } => Some(window_start(self.stand.position(query), left)),
            _ => None,
        }
    }

    /// How the queries from `query` on go on with what it sees; none where they do not so evenly.
    pub(super) fn advance(&self, query: usize) -> Option<Advance> {
        self.stand.advance(&self.run.visible, query)
    }

    /// Whether a query of the run sees a position; false for a query that the run does not have.
    pub fn sees(&self, query: usize, position: usize) -> bool {
        self.stand.sees(&self.run.visible, query, position)
    }

    /// Checks that every query sees all of a gathered span, or nothing: where its tokens stood is not known.
    fn check_gathered(&self, span: &SpanView<'_>) -> Result<()> {
        let Some(end) = span.gathered else { return Ok(()) };
        let start = span.start;
        if end < start.saturating_add(span.tokens) {
            let reason = format!("{} tokens cannot be gathered from positions {start} to {end}", span.tokens);
            return reject("span", reason);
        }
        self.check_sees(start..end)
    }

    /// Checks that every query sees all of some positions, or none.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub(crate) fn check_sees(&self, Range { start, end }: Range<usize>) -> Result<()> {
        let is_exact = |limits: RowLimits| sees_whole(limits, start, end) || sees_none(limits, start, end);
        match (0..self.run.queries).map(|query| self.limits(query)).find(|&limits| !is_exact(limits)) {
            None => Ok(()),
            Some(RowLimits { from, to, .. }) => {
                let sequence = self.run.sequence;
                let what = format!(
                    "queries that see positions {from} to {to}, with a span of sequence {sequence} that was gathered \
                     from positions {start} to {end}"
                );
                let hint = "which of its tokens a query sees is known only where it is all or none; let the queries see \
                            the whole of it, or keep tokens as runs of positions";
                Err(Error::Unsupported { what, hint: hint.into() })
            }
        }
    }
}

/// What queries of such limits see of a span.
fn seen_by(limits: RowLimits, span: &PlannedSpan) -> Seen {
    match span.gathered {
        None => Seen::of(limits, span.start, span.tokens),
        // A plan is made only where it is all of them or none.
        Some(end) if sees_whole(limits, span.start, end) => Seen { from: 0, to: span.tokens, tree: span.tokens },
        Some(_) => Seen::NOTHING,
    }
}

fn sees_whole(limits: RowLimits, start: usize, end: usize) -> bool {
    limits.from as usize <= start && end <= limits.to.min(limits.tree) as usize
}

fn sees_none(limits: RowLimits, start: usize, end: usize) -> bool {
    limits.to as usize <= start || end <= limits.from as usize || limits.to <= limits.from
}

/// The runs of every sequence: (sequence, index of a run), sorted.
pub(super) struct Sequences(pub(super) Vec<(usize, usize)>);

impl Sequences {
    pub(super) fn new(runs: &[QueryRun]) -> Self {
        let mut sorted: Vec<_> = runs.iter().enumerate().map(|(index, run)| (run.sequence, index)).collect();
        sorted.sort_unstable();
        Self(sorted)
    }

    /// The runs of a sequence, as places in the list; empty where no run is of it.
    pub(super) fn runs_of(&self, sequence: usize) -> std::ops::Range<usize> {
        let start = self.0.partition_point(|&(other, _)| other < sequence);
        start..start + self.0[start..].partition_point(|&(other, _)| other == sequence)
    }

    /// The place of the first run of a sequence.
    fn find(&self, sequence: usize) -> Option<usize> {
        let runs = self.runs_of(sequence);
        (!runs.is_empty()).then_some(runs.start)
    }
}

/// Numbers the rows of all runs, finds where their queries stand and checks what they see.
pub(super) fn place_runs(
    shape: &AttentionShape,
    runs: &[QueryRun],
    sequences: &Sequences,
    stores: &[StoreView<'_>],
) -> Result<(Vec<PlannedRun>, usize)> {
    let rows = count_rows(shape, runs)?;
    let mut spans: Vec<&SpanView<'_>> = Vec::with_capacity(stores.iter().map(|store| store.spans.len()).sum());
    spans.extend(stores.iter().flat_map(|store| &store.spans).filter(|span| span.tokens > 0));
    let lengths = Lengths::new(runs, sequences, &spans)?;
    let mut first_row = 0;
    let mut planned = Vec::with_capacity(runs.len());
    for run in runs {
        let length = lengths.of(sequences, run.sequence);
        let end = run.end.unwrap_or(length);
        limit("positions of a sequence", end.max(length) as u64, "a position is a 32-bit word")?;
        let stand = Stand { queries: run.queries, end, length: length.max(end) };
        stand.check(&run.visible)?;
        planned.push(PlannedRun { run: run.clone(), first_row, stand });
        first_row += run.queries;
    }
    for span in spans.iter().filter(|span| span.gathered.is_some()) {
        for &(_, run) in &sequences.0[sequences.runs_of(span.sequence)] {
            planned[run].check_gathered(span)?;
        }
    }
    Ok((planned, rows))
}

/// Rows of queries of all runs.
fn count_rows(shape: &AttentionShape, runs: &[QueryRun]) -> Result<usize> {
    if runs.is_empty() {
        return Err(Error::NoTokens { what: "attention plan", hint: "a call needs at least one run of queries" });
    }
    if runs.iter().any(|run| run.queries == 0) {
        return Err(Error::NoTokens { what: "run of queries", hint: "give it at least one query, or leave it out" });
    }
    let rows = runs.iter().fold(0usize, |rows, run| rows.saturating_add(run.queries));
    // Indices of single elements of queries and output are 32-bit words on the device.
    let heads = (shape.query_heads() as u64).saturating_mul(shape.head_dim() as u64);
    limit("elements of the queries", (rows as u64).saturating_mul(heads), "attend with fewer queries per call")?;
    Ok(rows)
}

/// Positions of every sequence, at the place of its first run.
struct Lengths(Vec<usize>);

impl Lengths {
    fn new(runs: &[QueryRun], sequences: &Sequences, spans: &[&SpanView<'_>]) -> Result<Self> {
        let mut lengths = vec![0; runs.len()];
        for span in spans {
            if let Some(place) = sequences.find(span.sequence) {
                lengths[place] = lengths[place].max(span.end());
            }
        }
        if runs.iter().any(|run| run.visible != Visible::All) {
            check_disjoint(runs, sequences, spans)?;
        }
        Ok(Self(lengths))
    }

    fn of(&self, sequences: &Sequences, sequence: usize) -> usize {
        sequences.find(sequence).map_or(0, |place| self.0[place])
    }
}

/// Checks that no two runs of positions of a sequence overlap, where a query asks for positions.
fn check_disjoint(runs: &[QueryRun], sequences: &Sequences, spans: &[&SpanView<'_>]) -> Result<()> {
    let mut by_start: Vec<&&SpanView<'_>> = spans.iter().filter(|span| span.gathered.is_none()).collect();
    by_start.sort_by_key(|span| span.start);
    let mut ends = vec![0; runs.len()];
    for span in by_start {
        let of_sequence = sequences.runs_of(span.sequence);
        let by_position = |&(_, run): &(usize, usize)| runs[run].visible != Visible::All;
        if !sequences.0[of_sequence.clone()].iter().any(by_position) {
            continue;
        }
        if span.start < ends[of_sequence.start] {
            let (sequence, start, before) = (span.sequence, span.start, ends[of_sequence.start]);
            let reason = format!(
                "a span of sequence {sequence} begins at position {start}, and another one ends at {before}; spans of a \
                 sequence whose queries see by position must not overlap"
            );
            return reject("attention plan", reason);
        }
        ends[of_sequence.start] = span.end();
    }
    Ok(())
}
