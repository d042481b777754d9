//! The plan of one attention call: runs of queries, and the spans that they see.

use super::Page;
use crate::format::{AttentionShape, Calibration, SegmentFormat, TILE_TOKENS};
use crate::{Error, Result};

/// What the queries of a run see of their sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Visible {
    /// Every query sees all tokens.
    All,
    /// The queries are those of the newest tokens, and each sees the tokens up to its own: of n queries over a sequence
    /// of t tokens, query i sees the first t − n + i + 1 (aligned at the bottom right).
    Causal,
}

/// Consecutive queries of one sequence. The runs of a plan lie one after the other in the tensor of queries, so that
/// batches may be ragged: one query for a sequence that decodes beside a chunk of another's prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QueryRun {
    /// The sequence.
    pub sequence: usize,
    /// Queries, at least 1.
    pub queries: usize,
    /// What they see.
    pub visible: Visible,
}

impl QueryRun {
    /// One query that sees all tokens of a sequence: a decode step.
    pub const fn decode(sequence: usize) -> Self {
        Self { sequence, queries: 1, visible: Visible::All }
    }

    /// The queries of the newest `queries` tokens of a sequence.
    pub const fn causal(sequence: usize, queries: usize) -> Self {
        Self { sequence, queries, visible: Visible::Causal }
    }

    /// One decoding query for each of the sequences `0..sequences`.
    pub fn decode_batch(sequences: usize) -> Vec<Self> {
        (0..sequences).map(Self::decode).collect()
    }
}

/// A span: consecutive stored tokens of one sequence in one store, with ranges of their own.
#[derive(Clone, Debug)]
pub struct SpanView<'a> {
    /// The sequence.
    pub sequence: usize,
    /// Tokens of the sequence that are stored before the span. Only causal runs ask for it.
    pub start: usize,
    /// Tokens of the span; 0 is allowed and adds nothing.
    pub tokens: usize,
    /// Its pages in token order, `tokens / 128` rounded up.
    pub pages: &'a [Page],
    /// Its slot among the span ranges of the store (any value where the format has none).
    pub range_slot: usize,
}

/// What a store holds, and how the scores of its tokens are calibrated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StoreFormat {
    /// Format of its spans.
    pub format: SegmentFormat,
    /// Calibration of the scores of every span, each with its own extremes.
    pub calibration: Option<Calibration>,
}

impl From<SegmentFormat> for StoreFormat {
    fn from(format: SegmentFormat) -> Self {
        Self { format, calibration: None }
    }
}

/// The spans that a call attends to in one store.
#[derive(Clone, Debug)]
pub struct StoreView<'a> {
    /// Format of the store.
    pub format: SegmentFormat,
    /// Calibration of the scores of every span of this store, each with its own extremes.
    pub calibration: Option<Calibration>,
    /// The spans.
    pub spans: Vec<SpanView<'a>>,
}

/// A run of a plan and where its queries lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedRun {
    /// The run.
    pub run: QueryRun,
    /// Its first row in the tensor of queries.
    pub first_row: usize,
    /// Tokens that its last query sees.
    pub tokens: usize,
}

impl PlannedRun {
    /// Tokens of the sequence that a query of the run sees.
    pub const fn visible(&self, query: usize) -> usize {
        match self.run.visible {
            Visible::All => self.tokens,
            Visible::Causal => self.tokens + 1 + query - self.run.queries,
        }
    }
}

/// A span that a run attends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedSpan {
    /// Index of the run.
    pub run: usize,
    /// Tokens of the sequence before the span.
    pub start: usize,
    /// Tokens of the span.
    pub tokens: usize,
    /// Index of the span's first page in [`StorePart::pages`].
    pub first_page: usize,
    /// Slot of the span ranges.
    pub range_slot: usize,
}

/// The part of a plan that concerns one store.
#[derive(Clone, Debug, PartialEq)]
pub struct StorePart {
    store: usize,
    format: SegmentFormat,
    calibration: Option<Calibration>,
    spans: Vec<PlannedSpan>,
    pages: Vec<Page>,
}

impl StorePart {
    /// Index of the store among those handed to [`AttendPlan::new`].
    pub const fn store(&self) -> usize {
        self.store
    }

    /// Its format.
    pub const fn format(&self) -> &SegmentFormat {
        &self.format
    }

    /// Calibration of its scores.
    pub const fn calibration(&self) -> Option<&Calibration> {
        self.calibration.as_ref()
    }

    /// The spans that have tokens.
    pub fn spans(&self) -> &[PlannedSpan] {
        &self.spans
    }

    /// The pages of all spans.
    pub fn pages(&self) -> &[Page] {
        &self.pages
    }

    /// The pages of one span.
    pub fn pages_of(&self, span: &PlannedSpan) -> &[Page] {
        &self.pages[span.first_page..][..span.tokens.div_ceil(TILE_TOKENS)]
    }
}

/// What an attention call computes: every query of every run over the spans that it sees.
///
/// It is not cut into pieces of work: every backend cuts it for itself, by how much of it the device runs at once. What
/// is in it was checked, and cannot be changed: spans have exactly their pages, every query sees a token, and all
/// counts fit the 32-bit words of the kernels.
///
/// ```
/// use kvpack::plan::{AttendPlan, Page, QueryRun, SpanView, StoreView};
/// use kvpack::{AttentionShape, SegmentFormat};
/// let shape = AttentionShape::new(8, 2, 64)?;
/// let pages = [Page { shard: 0, index: 4 }, Page { shard: 0, index: 2 }];
/// let span = SpanView { sequence: 0, start: 0, tokens: 200, pages: &pages, range_slot: 0 };
/// let store = StoreView { format: SegmentFormat::F16, calibration: None, spans: vec![span] };
/// let plan = AttendPlan::new(shape, &[QueryRun::causal(0, 3)], &[store])?;
/// assert_eq!(plan.rows(), 3);
/// assert_eq!(plan.runs()[0].visible(0), 198);
/// # Ok::<(), kvpack::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct AttendPlan {
    shape: AttentionShape,
    runs: Vec<PlannedRun>,
    rows: usize,
    segments: Vec<StorePart>,
}

impl AttendPlan {
    /// Plans the queries of `runs` over `stores`.
    ///
    /// # Errors
    /// [`Error::Plan`] when a span has more or fewer pages than its tokens need, when it is of a sequence that no run
    /// names, when a causal run has more queries than its sequence has tokens, or spans of its sequence that do not
    /// follow each other; [`Error::NoTokens`] for no runs or a run without queries; [`Error::Limit`] when kernels
    /// cannot count what is asked for.
    pub fn new(shape: AttentionShape, runs: &[QueryRun], stores: &[StoreView<'_>]) -> Result<Self> {
        let sequences = Sequences::new(runs);
        let (runs, rows) = place_runs(&shape, runs, &sequences, stores)?;
        let segments = stores.iter().enumerate();
        let segments = segments.map(|(index, store)| StorePart::new(index, &shape, &sequences, store));
        let segments = segments.collect::<Result<Vec<_>>>()?;
        let segments = segments.into_iter().filter(|segment| !segment.spans.is_empty()).collect();
        Ok(Self { shape, runs, rows, segments })
    }

    /// Shape of the layer.
    pub const fn shape(&self) -> &AttentionShape {
        &self.shape
    }

    /// The runs, in the order of their queries.
    pub fn runs(&self) -> &[PlannedRun] {
        &self.runs
    }

    /// Rows of queries, and of the output: those of all runs.
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// One per store that has tokens.
    pub fn segments(&self) -> &[StorePart] {
        &self.segments
    }

    /// Elements of the queries and of the output, `[rows, query_heads, head_dim]`.
    pub const fn elements(&self) -> usize {
        self.rows * self.shape.query_heads() * self.shape.head_dim()
    }

    /// Checks that a tensor, named `what`, has the elements of the queries.
    ///
    /// # Errors
    /// [`Error::Elements`].
    pub fn check_elements(&self, what: &'static str, given: usize) -> Result<()> {
        if given == self.elements() {
            return Ok(());
        }
        let (rows, heads, head_dim) = (self.rows, self.shape.query_heads(), self.shape.head_dim());
        let shape = format!("{rows} queries × {heads} query heads × {head_dim} channels");
        Err(Error::Elements { what, given, expected: self.elements(), shape })
    }
}

fn reject<T>(what: &'static str, reason: String) -> Result<T> {
    Err(Error::Plan { what, reason })
}

/// The runs of every sequence: (sequence, index of a run), sorted.
struct Sequences(Vec<(usize, usize)>);

impl Sequences {
    fn new(runs: &[QueryRun]) -> Self {
        let mut sorted: Vec<_> = runs.iter().enumerate().map(|(index, run)| (run.sequence, index)).collect();
        sorted.sort_unstable();
        Self(sorted)
    }

    /// The runs of a sequence, as places in the list; empty where no run is of it.
    fn runs_of(&self, sequence: usize) -> std::ops::Range<usize> {
        let start = self.0.partition_point(|&(other, _)| other < sequence);
        start..start + self.0[start..].partition_point(|&(other, _)| other == sequence)
    }

    /// The place of the first run of a sequence.
    fn find(&self, sequence: usize) -> Option<usize> {
        let runs = self.runs_of(sequence);
        (!runs.is_empty()).then_some(runs.start)
    }
}

/// Numbers the rows of all runs and finds how many tokens each sees.
fn place_runs(
    shape: &AttentionShape,
    runs: &[QueryRun],
    sequences: &Sequences,
    stores: &[StoreView<'_>],
) -> Result<(Vec<PlannedRun>, usize)> {
    if runs.is_empty() {
        return Err(Error::NoTokens { what: "attention plan", hint: "a call needs at least one run of queries" });
    }
    let mut rows = 0usize;
    let mut planned = Vec::with_capacity(runs.len());
    for run in runs {
        if run.queries == 0 {
            return Err(Error::NoTokens {
                what: "run of queries",
                hint: "give it at least one query, or leave it out",
            });
        }
        planned.push(PlannedRun { run: *run, first_row: rows, tokens: 0 });
        rows = rows.saturating_add(run.queries);
    }
    // Indices of single elements of queries and output are 32-bit words on the device.
    let heads = (shape.query_heads() as u64).saturating_mul(shape.head_dim() as u64);
    limit("elements of the queries", (rows as u64).saturating_mul(heads), "attend with fewer queries per call")?;

    let mut spans: Vec<&SpanView<'_>> =
        stores.iter().flat_map(|store| &store.spans).filter(|span| span.tokens > 0).collect();
    if runs.iter().any(|run| run.visible == Visible::Causal) {
        spans.sort_by_key(|span| span.start);
    }
    // At the place of the first run of every sequence.
    let mut lengths = vec![SequenceLength::default(); runs.len()];
    for span in spans {
        if let Some(place) = sequences.find(span.sequence) {
            lengths[place].add(span);
        }
    }
    for planned in &mut planned {
        let sequence = planned.run.sequence;
        let length = sequences.find(sequence).map_or_else(SequenceLength::default, |place| lengths[place]);
        planned.tokens = length.tokens;
        if length.tokens == 0 {
            return reject(
                "attention plan",
                format!("sequence {sequence} has no tokens to attend to; store some first"),
            );
        }
        if planned.run.visible == Visible::Causal {
            if !length.follows {
                let reason = format!(
                    "the spans of sequence {sequence} hold {} tokens and do not follow each other from 0 on, as those of a \
                     causal run do",
                    length.tokens
                );
                return reject("attention plan", reason);
            }
            if planned.run.queries > length.tokens {
                let (queries, tokens) = (planned.run.queries, length.tokens);
                let reason = format!("{queries} queries for the newest tokens of a sequence that holds {tokens}");
                return reject("causal attention", reason);
            }
        }
    }
    Ok((planned, rows))
}

/// Tokens of a sequence.
#[derive(Clone, Copy)]
struct SequenceLength {
    tokens: usize,
    /// True if every span begins where those before it end, in the order in which they were added.
    follows: bool,
}

impl Default for SequenceLength {
    fn default() -> Self {
        Self { tokens: 0, follows: true }
    }
}

impl SequenceLength {
    /// Adds the span that begins next.
    fn add(&mut self, span: &SpanView<'_>) {
        self.follows &= span.start == self.tokens;
        self.tokens = self.tokens.saturating_add(span.tokens);
    }
}

impl StorePart {
    fn new(store: usize, shape: &AttentionShape, sequences: &Sequences, view: &StoreView<'_>) -> Result<Self> {
        view.format.check(shape)?;
        let (mut spans, mut pages) = (Vec::with_capacity(view.spans.len()), Vec::new());
        for span in &view.spans {
            let of_sequence = sequences.runs_of(span.sequence);
            if of_sequence.is_empty() {
                let sequence = span.sequence;
                return reject("span", format!("it is of sequence {sequence}, for which no run of queries asks"));
            }
            let needed = span.tokens.div_ceil(TILE_TOKENS);
            if span.pages.len() != needed {
                let (tokens, given) = (span.tokens, span.pages.len());
                return reject("span", format!("{tokens} tokens lie in {needed} pages, {given} were given"));
            }
            if span.tokens == 0 {
                continue;
            }
            limit("range slots of a store", span.range_slot as u64, "use a store of fewer slots")?;
            for &(_, run) in &sequences.0[of_sequence] {
                let (start, tokens, range_slot) = (span.start, span.tokens, span.range_slot);
                spans.push(PlannedSpan { run, start, tokens, first_page: pages.len(), range_slot });
            }
            pages.extend_from_slice(span.pages);
        }
        // The kernels count tokens of the page table in 32 bits.
        let tokens = (pages.len() as u64).saturating_mul(TILE_TOKENS as u64);
        limit("tokens of a segment", tokens, "attend to fewer sequences per call")?;
        Ok(Self { store, format: view.format, calibration: view.calibration, spans, pages })
    }
}

fn limit(what: &str, needed: u64, hint: &'static str) -> Result<()> {
    let allowed = u64::from(u32::MAX);
    if needed <= allowed { Ok(()) } else { Err(Error::Limit { what: what.into(), needed, allowed, hint }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGES: [Page; 4] = [
        Page { shard: 0, index: 3 },
        Page { shard: 0, index: 4 },
        Page { shard: 1, index: 0 },
        Page { shard: 1, index: 7 },
    ];

    fn shape() -> AttentionShape {
        AttentionShape::new(4, 2, 64).unwrap()
    }

    fn span(sequence: usize, start: usize, tokens: usize) -> SpanView<'static> {
        SpanView { sequence, start, tokens, pages: &PAGES[..tokens.div_ceil(TILE_TOKENS)], range_slot: 0 }
    }

    fn f16(spans: Vec<SpanView<'_>>) -> StoreView<'_> {
        StoreView { format: SegmentFormat::F16, calibration: None, spans }
    }

    #[test]
    fn runs_lie_one_after_the_other() {
        let runs = [QueryRun::causal(1, 5), QueryRun::decode(0), QueryRun::causal(1, 2)];
        let plan = AttendPlan::new(shape(), &runs, &[f16(vec![span(0, 0, 10), span(1, 0, 300)])]).unwrap();
        assert_eq!(plan.runs().iter().map(|run| run.first_row).collect::<Vec<_>>(), [0, 5, 6]);
        assert_eq!((plan.rows(), plan.elements()), (8, 8 * 4 * 64));
        assert_eq!(plan.runs()[0].visible(0), 296);
        assert_eq!((plan.runs()[2].visible(0), plan.runs()[2].visible(1)), (299, 300));
        // The two runs of sequence 1 share its pages.
        let spans = plan.segments()[0].spans();
        assert_eq!(spans.iter().map(|span| (span.run, span.first_page)).collect::<Vec<_>>(), [(1, 0), (0, 1), (2, 1)]);
        assert_eq!(plan.segments()[0].pages().len(), 4);
    }

    #[test]
    fn what_cannot_be_planned_is_named() {
        let refused = |runs: &[QueryRun], spans| AttendPlan::new(shape(), runs, &[f16(spans)]).unwrap_err().to_string();
        let decode = [QueryRun::decode(0)];
        assert!(refused(&decode, vec![]).contains("sequence 0 has no tokens"));
        assert!(refused(&[], vec![span(0, 0, 1)]).contains("at least one run"));
        assert!(refused(&[QueryRun::causal(0, 0)], vec![span(0, 0, 1)]).contains("at least one query"));
        assert!(refused(&decode, vec![span(0, 0, 1), span(1, 0, 1)]).contains("sequence 1"));
        assert!(refused(&decode, vec![SpanView { tokens: 129, ..span(0, 0, 1) }]).contains("2 pages"));
        assert!(refused(&[QueryRun::causal(0, 12)], vec![span(0, 0, 11)]).contains("12 queries"));
        assert!(refused(&[QueryRun::causal(0, 2)], vec![span(0, 1, 11)]).contains("follow each other"));
        // As many tokens as they reach to, and none where some queries stand.
        let twice = vec![span(0, 5, 5), span(0, 5, 5)];
        assert!(refused(&[QueryRun::causal(0, 10)], twice).contains("follow each other"));
        assert!(refused(&[QueryRun::causal(0, usize::MAX)], vec![span(0, 0, 11)]).contains("elements of the queries"));
    }

    /// A sequence's number is a name, whatever it is.
    #[test]
    fn sequences_may_have_any_number() {
        let runs = [QueryRun::decode(usize::MAX), QueryRun::causal(1 << 50, 2)];
        let spans = vec![span(usize::MAX, 0, 5), span(1 << 50, 0, 9)];
        let plan = AttendPlan::new(shape(), &runs, &[f16(spans)]).unwrap();
        assert_eq!(plan.runs().iter().map(|run| run.tokens).collect::<Vec<_>>(), [5, 9]);
        let error = AttendPlan::new(shape(), &runs, &[f16(vec![span(usize::MAX, 0, 5)])]).unwrap_err();
        assert!(error.to_string().contains("no tokens"), "{error}");
    }

    /// Counts that the 32-bit words of kernels would cut short are refused.
    #[test]
    fn counts_beyond_32_bits_are_refused() {
        let slot = SpanView { range_slot: 1 << 32, ..span(0, 0, 1) };
        let error = AttendPlan::new(shape(), &[QueryRun::decode(0)], &[f16(vec![slot])]).unwrap_err();
        assert!(matches!(error, Error::Limit { needed: 0x1_0000_0000, .. }), "{error}");
        let pages = vec![PAGES[0]; (1 << 32) / TILE_TOKENS];
        let long = SpanView { tokens: 1 << 32, pages: &pages, ..span(0, 0, 1) };
        let error = AttendPlan::new(shape(), &[QueryRun::decode(0)], &[f16(vec![long])]).unwrap_err();
        assert!(matches!(error, Error::Limit { needed: 0x1_0000_0000, .. }), "{error}");
    }
}
