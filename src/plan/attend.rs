//! The plan of one attention call: runs of queries, and the spans that they see.

use super::grown::Origin;
use super::runs::{PlannedRun, QueryRun, Sequences, place_runs};
use super::scoring::Scoring;
use super::visible::Seen;
use super::{Page, limit, reject};
use crate::format::{AttentionShape, Calibration, SegmentFormat, TILE_TOKENS};
use crate::{Error, Result};

/// A span: consecutive stored tokens of one sequence in one store, with ranges of their own.
#[derive(Clone, Debug)]
pub struct SpanView<'a> {
    /// The sequence.
    pub sequence: usize,
    /// Position of its first token. Only queries that see by position ask for it.
    pub start: usize,
    /// Tokens of the span; 0 is allowed and adds nothing.
    pub tokens: usize,
    /// One past the positions that its tokens were gathered from, those from `start` on, where others of them were
    /// evicted: queries see all of it or nothing. None where the tokens follow each other.
    pub gathered: Option<usize>,
    /// Its pages in token order, `tokens / 128` rounded up.
    pub pages: &'a [Page],
    /// Its slot among the span ranges of the store (any value where the format has none).
    pub range_slot: usize,
}

impl SpanView<'_> {
    /// One past its last position.
    pub(super) fn end(&self) -> usize {
        self.gathered.unwrap_or(self.start.saturating_add(self.tokens))
    }
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

/// A span that a run attends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedSpan {
    /// Index of the run.
    pub run: usize,
    /// Position of its first token.
    pub start: usize,
    /// Tokens of the span.
    pub tokens: usize,
    /// One past the positions that it was gathered from, see [`SpanView::gathered`].
    pub gathered: Option<usize>,
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
    pub(super) spans: Vec<PlannedSpan>,
    pub(super) pages: Vec<Page>,
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
        let pages = self.pages.get(span.first_page..).unwrap_or_default();
        pages.get(..span.tokens.div_ceil(TILE_TOKENS)).unwrap_or_default()
    }
}

/// What an attention call computes: every query of every run over the spans that it sees.
///
/// It is not cut into pieces of work: every backend cuts it for itself, by how much of it the device runs at once. What
/// is in it was checked, and cannot be changed: spans have exactly their pages, what queries see is known of every
/// span, and all counts fit the 32-bit words of the kernels. A query that sees no token has the output 0 and the
/// log-sum-exp −∞, or that of its sink.
///
/// ```
/// use kvpack::plan::{AttendPlan, Page, QueryRun, SpanView, StoreView};
/// use kvpack::{AttentionShape, SegmentFormat};
/// let shape = AttentionShape::new(8, 2, 64)?;
/// let pages = [Page { shard: 0, index: 4 }, Page { shard: 0, index: 2 }];
/// let span = SpanView { sequence: 0, start: 0, tokens: 200, gathered: None, pages: &pages, range_slot: 0 };
/// let store = StoreView { format: SegmentFormat::F16, calibration: None, spans: vec![span] };
/// let plan = AttendPlan::new(shape, &[QueryRun::causal(0, 3)], &[store])?;
/// assert_eq!(plan.rows(), 3);
/// assert_eq!(plan.runs()[0].limits(0).to, 198);
/// # Ok::<(), kvpack::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct AttendPlan {
    pub(super) shape: AttentionShape,
    pub(super) runs: Vec<PlannedRun>,
    rows: usize,
    pub(super) segments: Vec<StorePart>,
    pub(super) scoring: Scoring,
    pub(super) origin: Origin,
}

/// Plans are equal that ask for the same, whatever they were made from.
impl PartialEq for AttendPlan {
    fn eq(&self, other: &Self) -> bool {
        let of = |plan: &Self| (plan.shape, plan.rows);
        of(self) == of(other)
            && self.runs == other.runs
            && self.segments == other.segments
            && self.scoring == other.scoring
    }
}

impl AttendPlan {
    /// Plans the queries of `runs` over `stores`, with the scoring of the shape.
    ///
    /// # Errors
    /// [`Error::Plan`] when a span has more or fewer pages than its tokens need, when it is of a sequence that no run
    /// names, when a run that sees by position has more queries than its sequence has positions, a mask that does not
    /// suit it, or spans that overlap; [`Error::Unsupported`] when a query would see a part of a gathered span, or
    /// other than the first tokens of a calibrated one; [`Error::NoTokens`] for no runs or a run without queries;
    /// [`Error::Limit`] when kernels cannot count what is asked for.
    pub fn new(shape: AttentionShape, runs: &[QueryRun], stores: &[StoreView<'_>]) -> Result<Self> {
        let sequences = Sequences::new(runs);
        let (runs, rows) = place_runs(&shape, runs, &sequences, stores)?;
        let segments = stores.iter().enumerate();
        let segments = segments.map(|(index, store)| StorePart::new(index, &shape, &sequences, store));
        let segments = segments.collect::<Result<Vec<_>>>()?;
        let segments = segments.into_iter().filter(|segment| !segment.spans.is_empty()).collect();
        let plan = Self { shape, runs, rows, segments, scoring: Scoring::of(&shape), origin: Origin::new() };
        plan.check_calibrated()?;
        Ok(plan)
    }

    /// The same plan with a scoring of the layer's own.
    ///
    /// # Errors
    /// [`Error::Elements`] when there are more or fewer sinks than query heads, [`Error::Unsupported`] for a soft cap
    /// on calibrated scores.
    pub fn with_scoring(self, scoring: Scoring) -> Result<Self> {
        scoring.check(&self.shape)?;
        let calibrated = self.segments.iter().any(|segment| segment.calibration.is_some());
        if calibrated && scoring.soft_cap().is_some() {
            return Err(Error::Unsupported {
                what: "a soft cap on calibrated scores".into(),
                hint: "both bend the scores, and no method says which comes first; use a recipe without calibration"
                    .into(),
            });
        }
        Ok(Self { scoring, ..self })
    }

    /// How products of queries and keys become logits.
    pub const fn scoring(&self) -> &Scoring {
        &self.scoring
    }

    /// Checks that a query sees the first tokens of a calibrated span: its extremes are over those.
    fn check_calibrated(&self) -> Result<()> {
        for span in self.segments.iter().filter(|segment| segment.calibration.is_some()).flat_map(StorePart::spans) {
            let run = &self.runs[span.run];
            let is_first = |seen: Seen| seen.is_empty() || (seen.from == 0 && seen.tree == seen.to);
            if !run.sees_prefixes() && !(0..run.run.queries).all(|query| is_first(run.seen(query, span))) {
                return Err(Error::Unsupported {
                    what: format!(
                        "calibrated scores of a span that queries see other than from its beginning ({:?})",
                        run.run
                    ),
                    hint: "use a recipe without calibration in layers with windows or trees".into(),
                });
            }
        }
        Ok(())
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

impl StorePart {
    fn new(store: usize, shape: &AttentionShape, sequences: &Sequences, view: &StoreView<'_>) -> Result<Self> {
        view.format.check(shape)?;
        let mut spans = Vec::with_capacity(view.spans.len());
        let mut pages = Vec::with_capacity(view.spans.iter().map(|span| span.pages.len()).sum());
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
                let SpanView { start, tokens, gathered, range_slot, .. } = *span;
                spans.push(PlannedSpan { run, start, tokens, gathered, first_page: pages.len(), range_slot });
            }
            pages.extend_from_slice(span.pages);
        }
        // The kernels count tokens of the page table in 32 bits.
        let tokens = (pages.len() as u64).saturating_mul(TILE_TOKENS as u64);
        limit("tokens of a segment", tokens, "attend to fewer sequences per call")?;
        Ok(Self { store, format: view.format, calibration: view.calibration, spans, pages })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Visible;

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
        SpanView {
            sequence,
            start,
            tokens,
            gathered: None,
            pages: &PAGES[..tokens.div_ceil(TILE_TOKENS)],
            range_slot: 0,
        }
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
        assert_eq!(plan.runs()[0].limits(0).to, 296);
        assert_eq!((plan.runs()[2].limits(0).to, plan.runs()[2].limits(1).to), (299, 300));
        // The two runs of sequence 1 share its pages.
        let spans = plan.segments()[0].spans();
        assert_eq!(spans.iter().map(|span| (span.run, span.first_page)).collect::<Vec<_>>(), [(1, 0), (0, 1), (2, 1)]);
        assert_eq!(plan.segments()[0].pages().len(), 4);
    }

    #[test]
    fn what_cannot_be_planned_is_named() {
        let refused = |runs: &[QueryRun], spans| AttendPlan::new(shape(), runs, &[f16(spans)]).unwrap_err().to_string();
        let decode = [QueryRun::decode(0)];
        assert!(refused(&[], vec![span(0, 0, 1)]).contains("at least one run"));
        assert!(refused(&[QueryRun::causal(0, 0)], vec![span(0, 0, 1)]).contains("at least one query"));
        assert!(refused(&decode, vec![span(0, 0, 1), span(1, 0, 1)]).contains("sequence 1"));
        assert!(refused(&decode, vec![SpanView { tokens: 129, ..span(0, 0, 1) }]).contains("2 pages"));
        assert!(refused(&[QueryRun::causal(0, 12)], vec![span(0, 0, 11)]).contains("12 queries"));
        let twice = vec![span(0, 5, 5), span(0, 5, 5)];
        assert!(refused(&[QueryRun::causal(0, 10)], twice).contains("must not overlap"));
        let late = QueryRun { end: Some(4), ..QueryRun::causal(0, 5) };
        assert!(refused(&[late], vec![span(0, 0, 11)]).contains("5 queries"));
        let calibration = crate::Calibration::new(0.0, 1.0).ok();
        let store = StoreView { format: SegmentFormat::F16, calibration, spans: vec![span(0, 0, 20)] };
        let window = QueryRun::new(0, 3, Visible::Window { left: 4 });
        let error = AttendPlan::new(shape(), &[window], std::slice::from_ref(&store)).unwrap_err().to_string();
        assert!(error.contains("calibrated") && error.contains("Window"), "{error}");
        let plan = AttendPlan::new(shape(), &[QueryRun::causal(0, 3)], &[store]).unwrap();
        let capped = Scoring::of(&shape()).with_soft_cap(30.0).unwrap();
        assert!(plan.clone().with_scoring(capped).unwrap_err().to_string().contains("soft cap"));
        assert!(plan.with_scoring(Scoring::of(&shape()).with_sinks(&[0.0]).unwrap()).is_err());
        assert!(refused(&[QueryRun::causal(0, usize::MAX)], vec![span(0, 0, 11)]).contains("elements of the queries"));
    }

    /// A sequence's number is a name, whatever it is.
    #[test]
    fn sequences_may_have_any_number() {
        let runs = [QueryRun::decode(usize::MAX), QueryRun::causal(1 << 50, 2)];
        let spans = vec![span(usize::MAX, 0, 5), span(1 << 50, 0, 9)];
        let plan = AttendPlan::new(shape(), &runs, &[f16(spans)]).unwrap();
        assert_eq!([0, 1].map(|run| plan.runs()[run].limits(0).to), [5, 8]);
        let error = AttendPlan::new(shape(), &runs, &[f16(vec![span(usize::MAX, 0, 5)])]).unwrap_err();
        assert!(error.to_string().contains("2 queries"), "{error}");
    }

    /// What survived eviction is seen whole by later queries; which part of it another one sees nobody knows.
    #[test]
    fn gathered_spans_are_seen_whole_or_not_at_all() {
        let gathered = SpanView { gathered: Some(100), ..span(0, 20, 30) };
        let plan = |runs: &[QueryRun]| AttendPlan::new(shape(), runs, &[f16(vec![gathered.clone(), span(0, 100, 50)])]);
        let seen = |run: QueryRun, query: usize| {
            let plan = plan(&[run]).unwrap();
            let spans = plan.segments()[0].spans();
            [0, 1].map(|span| plan.runs()[0].seen(query, &spans[span])).map(|seen| (seen.from, seen.to))
        };
        let window = |left| QueryRun::new(0, 3, Visible::Window { left });
        assert_eq!(seen(QueryRun::causal(0, 50), 0), [(0, 30), (0, 1)]);
        assert_eq!(seen(QueryRun { end: Some(20), ..QueryRun::causal(0, 20) }, 19), [(0, 0), (0, 0)]);
        assert_eq!(seen(window(40), 0), [(0, 0), (7, 48)]);
        assert_eq!(seen(window(129), 0), [(0, 30), (0, 48)]);
        for refused in [window(128), window(60), QueryRun::causal(0, 52)] {
            let error = plan(&[refused]).unwrap_err();
            assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        }
        let full = SpanView { gathered: Some(49), ..span(0, 20, 30) };
        assert!(AttendPlan::new(shape(), &[QueryRun::decode(0)], &[f16(vec![full])]).is_err());
    }

    /// A sequence without tokens, and tokens that no query of a rank sees, are no errors.
    #[test]
    fn nothing_to_see_is_no_error() {
        let plan = AttendPlan::new(shape(), &[QueryRun::decode(0)], &[f16(vec![])]).unwrap();
        assert!(plan.segments().is_empty());
        let far = QueryRun { end: Some(1000), ..QueryRun::new(0, 2, Visible::Window { left: 5 }) };
        let plan = AttendPlan::new(shape(), &[far], &[f16(vec![span(0, 0, 10)])]).unwrap();
        assert!(plan.runs()[0].seen(1, &plan.segments()[0].spans()[0]).is_empty());
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
