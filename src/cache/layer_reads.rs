//! Reads of layers that share their page tables: plans of attention, attention states, and the stored contents.

use super::layers::LayerGroup;
use super::sequence::{Sequence, Span};
use super::{Positions, SpanPositions, StoreFormat, StoreId};
use crate::Result;
use crate::backend::{AttendOptions, AttentionStates, Backend, RowCentres, SpanRead};
use crate::counts::saturated;
use crate::format::{Calibration, SegmentFormat};
use crate::plan::{AttendPlan, ElementType, QueryRun, SpanView, StoreView, TokenIndices, TokenRange, Visible};

/// A span of a sequence as dense f32 rows `[kv_heads, tokens, head_dim]`.
#[derive(Clone, Debug)]
pub struct StoredSpan<T> {
    /// Number of its tokens.
    pub tokens: usize,
    /// Its store.
    pub store: StoreId,
    /// Its format.
    pub format: SegmentFormat,
    /// Calibration of its scores.
    pub calibration: Option<Calibration>,
    /// The decoded keys.
    pub keys: T,
    /// The decoded values.
    pub values: T,
}

impl<B: Backend> LayerGroup<B> {
    /// The plan of query runs over the sequences, the same for every layer.
    pub(super) fn plan(&self, runs: &[QueryRun]) -> Result<AttendPlan> {
        let stores = self.recipe().stores().iter();
        // Most sequences have a span or two in a store.
        let view = |store: &StoreFormat| {
            let spans = Vec::with_capacity(2 * runs.len());
            StoreView { format: store.format, calibration: store.calibration, spans }
        };
        let mut views: Vec<StoreView<'_>> = stores.map(view).collect();
        let ends_at = |run: &QueryRun| {
            let length = self.page_tables.sequence(run.sequence)?.length;
            // A query of an empty sequence sees nothing. A window needs a position to end at, which it does not have.
            let end = run.end.unwrap_or(length);
            let sees_nothing = end == 0 && run.queries == 1 && run.visible == Visible::All;
            let visible = if sees_nothing { Visible::All } else { self.recipe().attention().visible(run)? };
            Ok(QueryRun { end: Some(end), visible, ..run.clone() })
        };
        let runs = runs.iter().map(ends_at).collect::<Result<Vec<_>>>()?;
        let mut sequences: Vec<usize> = runs.iter().map(|run| run.sequence).collect();
        sequences.sort_unstable();
        sequences.dedup();
        let joined = self.page_tables.joined_spans(&sequences, &runs)?;
        for of in &joined {
            views[of.store.index()].spans.push(of.view());
        }
        for sequence in sequences {
            let is_joined = |span: &&Span<B::Indices>| !joined.iter().any(|joined| joined.holds(sequence, span));
            for span in self.page_tables.sequence(sequence)?.spans.iter().filter(is_joined) {
                let (pages, range_slot) = (&span.lease.pages, span.lease.range_slot());
                let (start, gathered) = match &span.positions {
                    Positions::From(start) => (*start, None),
                    Positions::Gathered { base, indices } => (*base, Some(base + indices.shape().below() as usize)),
                };
                let view = &mut views[span.store.index()];
                view.spans.push(SpanView { sequence, start, tokens: span.tokens, gathered, pages, range_slot });
            }
        }
        let plan = self.recipe().attention().score(AttendPlan::new(self.shape, &runs, &views)?)?;
        self.page_tables.check_seen(&plan)?;
        Ok(plan)
    }

    pub(super) fn attend_options(&self, output: ElementType) -> AttendOptions {
        AttendOptions { query: self.recipe().query(), output, split: self.split }
    }

    /// Attends in one layer into a tensor, whose element type is used.
    pub(super) async fn attend_into(
        &self,
        layer: usize,
        plan: &AttendPlan,
        queries: &B::Tensor,
        output: &mut B::Tensor,
    ) -> Result<()> {
        plan.check_elements("queries", self.backend.elements(queries))?;
        let options = self.attend_options(ElementType::F32);
        self.backend.attend_into(plan, &self.stores(layer), queries, output, options).await
    }

    /// The positions of the tokens of a sequence in a layer, span by span.
    pub(super) async fn positions(&self, layer: usize, sequence: usize) -> Result<Vec<SpanPositions>> {
        let mut positions = Vec::new();
        for span in &self.page_tables.sequence(sequence)?.spans {
            positions.push(match &span.positions {
                Positions::From(start) => SpanPositions::Run(TokenRange::new(*start, start + span.tokens)?),
                Positions::Gathered { base, indices } => {
                    // The pass of an engine may have chosen them.
                    self.backend.check_submitted("positions of tokens", &self.stores(layer))?;
                    let indices = self.backend.download_indices(span.of_layers.get(layer).unwrap_or(indices)).await?;
                    SpanPositions::PerHead(indices.into_iter().map(|index| base + index as usize).collect())
                }
            });
        }
        Ok(positions)
    }

    /// Attends with the queries of a plan in one layer, and returns the states over the original keys.
    pub(super) async fn attend_states(
        &self,
        layer: usize,
        plan: &AttendPlan,
        queries: &B::Tensor,
    ) -> Result<AttentionStates<B::Tensor>> {
        let (stores, options) = (self.stores(layer), self.attend_options(ElementType::F32));
        let states = self.backend.attend_states(plan, &stores, queries, options).await?;
        if !self.recipe().is_centred() {
            return Ok(states);
        }
        let (mut slots, mut centred) = (Vec::new(), false);
        for planned in plan.runs() {
            let centre = self.page_tables.sequence(planned.run.sequence)?.centre;
            centred |= centre.is_some();
            // A sequence without tokens has none. Any moves its log-sum-exp of −∞ nowhere.
            slots.extend(std::iter::repeat_n(saturated(centre.unwrap_or(0)), planned.run.queries));
        }
        if !centred {
            return Ok(states);
        }
        let centres = RowCentres { slots: &slots, scale: plan.scoring().scale() };
        self.backend.uncentre_lse(stores[0], queries, centres, states).await
    }

    /// The contents of a sequence in a layer, span by span, as dense f32 rows on the device.
    pub(super) fn dequantize(&self, layer: usize, sequence: usize) -> Result<Vec<StoredSpan<B::Tensor>>> {
        self.dequantize_held(layer, self.page_tables.sequence(sequence)?)
    }

    /// The same for what a sequence holds, or held before a change that is open.
    pub(super) fn dequantize_held(
        &self,
        layer: usize,
        held: &Sequence<B::Indices>,
    ) -> Result<Vec<StoredSpan<B::Tensor>>> {
        let (mut stored, stores, centre) = (Vec::new(), self.stores(layer), held.centre);
        for span in &held.spans {
            let store = self.recipe().stores()[span.store.index()];
            let lease = &span.lease;
            let read = SpanRead { pages: &lease.pages, tokens: span.tokens, range_slot: lease.range_slot(), centre };
            let (keys, values) = self.backend.dequantize(stores[span.store.index()], read)?;
            let (format, calibration) = (store.format, store.calibration);
            stored.push(StoredSpan { tokens: span.tokens, store: span.store, format, calibration, keys, values });
        }
        Ok(stored)
    }
}
