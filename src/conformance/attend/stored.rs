//! A case's data in the stores of a backend.

use super::case::{AttendCase, Fill, Paging, SpanCase, StoreCase};
use crate::backend::{FilledSpan, FilledStores, NewSpan, SpanSource};
use crate::conformance::data::{CENTRE_TOKENS, SequenceData};
use crate::conformance::guards::{self, Guards};
use crate::conformance::report::Failure;
use crate::plan::{AttendPlan, QueryRun, Scoring, TokenRange};
use crate::{Backend, Result};

/// The stores of a case, filled: one for each of its segments.
pub(super) struct Stored<B: Backend> {
    stores: FilledStores<B>,
    /// All spans, sequence after sequence.
    spans: Vec<FilledSpan>,
    guards: Guards,
}

/// The stored keys and values of one span, dense, `[kv_heads, tokens, head_dim]`.
pub(super) struct StoredSpan {
    pub span: NewSpan,
    pub keys: Vec<f32>,
    pub values: Vec<f32>,
}

impl<B: Backend> Stored<B> {
    /// Fills stores on `backend` as the case describes. `tensors` are the keys and values of each sequence on it.
    pub(super) async fn fill(
        backend: &B,
        case: &AttendCase,
        data: &[SequenceData],
        tensors: &[(B::Tensor, B::Tensor)],
    ) -> Result<Self> {
        let formats: Vec<_> = case.segments.iter().map(|segment| segment.format).collect();
        let mut stores = FilledStores::new(backend, case.shape, &formats)?;
        let mut shuffled = None;
        if let Paging::Scattered { shard_pages } = case.paging {
            stores = stores.with_shards_of(shard_pages);
            shuffled = Some(case.seed);
        }
        if case.centred {
            stores = stores.with_centres(case.sequences.len());
        }
        let (spans, mut guards) = guards::place(backend, &mut stores, &new_spans(case), shuffled).await?;
        guards.write(backend, &mut stores, &case.shape, case.input.elements).await?;
        for (sequence, ((keys, _), data)) in tensors.iter().zip(data).enumerate().filter(|_| case.centred) {
            let first = TokenRange::new(0, data.rows.tokens.min(CENTRE_TOKENS))?;
            stores.set_centre(backend, sequence, keys, (data.rows, first))?;
        }
        for placed in spans.iter().filter(|placed| placed.span.tokens > 0) {
            let NewSpan { store, sequence, start, tokens } = placed.span;
            let ((keys, values), rows) = (&tensors[sequence], data[sequence].rows);
            match case.segments[store].fill {
                Fill::Quantize => {
                    let tokens = TokenRange::new(start, start + tokens)?.into();
                    stores.quantize(backend, placed, SpanSource { rows, tokens, keys, values })?;
                }
                Fill::Append => stores.append(backend, placed, rows, [keys, values], start)?,
            }
        }
        Ok(Self { stores, spans, guards })
    }

    /// Reads all spans that have tokens back through `dequantize`.
    pub(super) async fn read_back(&self, backend: &B) -> Result<Vec<StoredSpan>> {
        let mut read = Vec::with_capacity(self.spans.len());
        for span in self.spans.iter().filter(|span| span.span.tokens > 0) {
            let (keys, values) = self.stores.read(backend, span).await?;
            read.push(StoredSpan { span: span.span, keys, values });
        }
        Ok(read)
    }

    /// The plan of one step over everything stored.
    pub(super) fn plan(&self, case: &AttendCase) -> Result<AttendPlan> {
        self.plan_over(case, &case.scoring, |_| true)
    }

    /// The plan of one step over some of the stores, with a scoring for these.
    pub(super) fn plan_over(
        &self,
        case: &AttendCase,
        scoring: &Scoring,
        is_wanted: impl Fn(usize) -> bool,
    ) -> Result<AttendPlan> {
        let calibrations: Vec<_> = case.segments.iter().map(|segment: &StoreCase| segment.calibration).collect();
        let spans = self.spans.iter().filter(|span| is_wanted(span.span.store));
        // Queries stand behind all tokens of their sequence, also where some stores are left out.
        let ends_at = |run: QueryRun| QueryRun { end: run.end.or(Some(case.tokens(run.sequence))), ..run };
        let runs: Vec<QueryRun> = case.runs().into_iter().map(ends_at).collect();
        self.stores.plan(&runs, spans, &calibrations)?.with_scoring(scoring.clone())
    }

    /// The stores.
    pub(super) fn stores(&self) -> Vec<&B::Store> {
        self.stores.stores()
    }

    /// Failures of the guards: writes outside the spans.
    pub(super) async fn guard_failures(&self, backend: &B) -> Result<Vec<Failure>> {
        self.guards.failures(backend, &self.stores).await
    }
}

/// All spans of a case.
fn new_spans(case: &AttendCase) -> Vec<NewSpan> {
    let mut spans = Vec::new();
    for (sequence, of_sequence) in case.sequences.iter().enumerate() {
        let mut start = 0;
        for &SpanCase { segment, tokens } in of_sequence {
            spans.push(NewSpan { store: segment, sequence, start, tokens });
            start += tokens;
        }
    }
    spans
}
