//! The observation of a prompt by a policy, layer by layer.

use std::fmt;

use super::decided::{Decided, DecidedLayer};
use super::measured_layers::MeasuredLayer;
use crate::backend::{Backend, MeasuredAttention, QueriesAndKeys, TensorRows};
use crate::format::AttentionShape;
use crate::plan::RowLayout;
use crate::policy::{
    ColumnRequest, KeepRule, LayerStatistics, Policy, QueryPositions, RowStatsSource, Selection, Spans, StatsRequest,
};
use crate::{Error, Result};

/// A prompt that is passing through a model. It holds the measurements that a policy needs of every layer, and the
/// dense keys and values from which [`ModelCache::compress`](super::ModelCache::compress) packs the tokens that stay.
///
/// Tensors are held, not copied, until the prompt is dropped: budgets by sparsity need the last layer before the first
/// can be packed.
pub struct ObservedPrompt<B: Backend> {
    backend: B,
    policy: Policy,
    spans: Spans,
    /// The measured query rows; `None` if nothing is measured.
    rows: Option<QueryPositions>,
    /// The statistics to measure.
    columns: ColumnRequest,
    layers: Vec<PromptLayer<B>>,
}

/// A layer of the prompt.
struct PromptLayer<B: Backend> {
    layer: MeasuredLayer,
    observed: Option<ObservedLayer<B>>,
}

/// The tensors given for a layer, and its measurements.
pub(super) struct ObservedLayer<B: Backend> {
    pub(super) shape: AttentionShape,
    pub(super) dense: DenseLayer<B::Tensor>,
    measured: Option<MeasuredAttention<B::Tensor, B::Words>>,
    /// Counts that ranks have summed; `None` where the device holds them, or none were requested.
    counted: Option<Vec<u32>>,
}

impl<B: Backend> ObservedLayer<B> {
    /// A layer that nothing was measured of.
    pub(super) const fn unmeasured(shape: AttentionShape, dense: DenseLayer<B::Tensor>) -> Self {
        Self { shape, dense, measured: None, counted: None }
    }
}

/// Keys and values of one layer for all tokens of a prompt.
#[derive(Clone, Debug)]
pub struct DenseLayer<T> {
    /// Layout of keys and values in their tensors; the same for both.
    pub rows: RowLayout,
    /// The keys, `[tokens, kv_heads, head_dim]`, after rotary embedding.
    pub keys: T,
    /// The values, in the same shape.
    pub values: T,
}

/// The queries to measure: those of [`ObservedPrompt::query_rows`], one row for each, `[rows, query_heads, head_dim]`.
/// They are measured causally: each sees the tokens up to its own. A policy is therefore not for queries of an image
/// that see each other in the model.
#[derive(Debug)]
pub struct MeasuredQueries<'a, T> {
    /// The queries, after rotary embedding, with their layout. It has one head per query head.
    pub queries: TensorRows<'a, T>,
    /// Their natural log-sum-exp over the keys that they see, f32 `[query_heads, rows]`, if the engine's own attention
    /// provides it: keys are then read once instead of twice. A policy that counts entries ([`Policy::threshold`])
    /// cannot use it.
    pub known_lse: Option<&'a T>,
}

impl<T> Clone for MeasuredQueries<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for MeasuredQueries<'_, T> {}

/// The rows to measure and their queries, if anything is measured.
type RowsAndQueries<'s, 'a, T> = Option<(&'s QueryPositions, MeasuredQueries<'a, T>)>;

impl<B: Backend> ObservedPrompt<B> {
    pub(super) fn new(backend: B, layers: Vec<MeasuredLayer>, policy: Policy, spans: Spans) -> Result<Self> {
        let rows = policy.query_rows(&spans)?;
        let layers = layers.into_iter().map(|layer| PromptLayer { layer, observed: None }).collect();
        let columns = columns(&policy);
        Ok(Self { backend, policy, spans, rows, columns, layers })
    }

    /// The policy.
    pub const fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Text and images of the prompt.
    pub const fn spans(&self) -> &Spans {
        &self.spans
    }

    /// The query rows that are measured in every layer, as the first policy requires; `None` if it measures nothing.
    pub const fn query_rows(&self) -> Option<&QueryPositions> {
        self.rows.as_ref()
    }

    /// Measures what the policy needs of a layer, and holds its keys and values. Observing a layer again replaces the
    /// earlier observation. The call does not wait: measurements stay on the device until the prompt is compressed.
    ///
    /// `queries` are those of [`ObservedPrompt::query_rows`], and are ignored if that is `None`.
    ///
    /// # Errors
    /// [`Error::Plan`] when there is no such layer; [`Error::Selection`] when there is not one row per token of the
    /// prompt, or queries are missing; [`Error::Elements`] when a tensor is shorter than its layout requires;
    /// [`Error::Unsupported`] when attention is measured in a layer with a soft cap, or with sinks and without
    /// `known_lse`; as [`measure_attention`](crate::backend::TokenSelection::measure_attention).
    pub fn observe(
        &mut self,
        layer: usize,
        dense: DenseLayer<B::Tensor>,
        queries: Option<MeasuredQueries<'_, B::Tensor>>,
    ) -> Result<()> {
        let MeasuredLayer { shape, attention } = self.check_layer(layer, &dense)?;
        let measured = match self.measured_rows(layer, queries)? {
            None => None,
            Some((rows, queries)) => {
                let keys = TensorRows { tensor: &dense.keys, layout: dense.rows };
                let scale = attention.scale(&shape);
                let input = QueriesAndKeys { shape, scale, rows, queries: queries.queries, keys };
                let known = queries.known_lse.is_some();
                let source = if known { RowStatsSource::KnownLse } else { RowStatsSource::Measured };
                let request = StatsRequest { columns: self.columns, rows: source };
                Some(self.backend.measure_attention(input, request, queries.known_lse)?)
            }
        };
        self.layers[layer].observed = Some(ObservedLayer { shape, dense, measured, counted: None });
        Ok(())
    }

    /// A layer, if there is one and its rows are those of the prompt.
    ///
    /// # Errors
    /// [`Error::Plan`], [`Error::Selection`], [`Error::Elements`]: those of [`ObservedPrompt::observe`].
    pub(crate) fn check_layer(&self, layer: usize, dense: &DenseLayer<B::Tensor>) -> Result<MeasuredLayer> {
        let layers = self.layers.len();
        let Some(PromptLayer { layer: of, .. }) = self.layers.get(layer) else {
            return Err(Error::Plan { what: "layer", reason: format!("layer {layer} of a prompt of {layers} layers") });
        };
        let tokens = self.spans.tokens();
        if dense.rows.tokens != tokens {
            let reason = format!("layer {layer} has {} tokens; the prompt has {tokens}", dense.rows.tokens);
            return Err(Error::Selection { reason });
        }
        dense.rows.check("keys", self.backend.elements(&dense.keys), &of.shape)?;
        dense.rows.check("values", self.backend.elements(&dense.values), &of.shape)?;
        Ok(of.clone())
    }

    /// The rows to measure and their queries; `None` if nothing is measured.
    ///
    /// # Errors
    /// [`Error::Selection`] when queries are missing; those of [`LayerAttention::check_measured`].
    ///
    /// [`LayerAttention::check_measured`]: crate::plan::LayerAttention::check_measured
    pub(crate) fn measured_rows<'a>(
        &self,
        layer: usize,
        queries: Option<MeasuredQueries<'a, B::Tensor>>,
    ) -> Result<RowsAndQueries<'_, 'a, B::Tensor>> {
        match (&self.rows, queries) {
            (None, _) => Ok(None),
            (Some(rows), Some(queries)) => {
                let attention = self.layers.get(layer).map(|layer| &layer.layer.attention);
                attention.map_or(Ok(()), |of| of.check_measured(layer, queries.known_lse.is_some()))?;
                Ok(Some((rows, queries)))
            }
            (Some(rows), None) => {
                let reason =
                    format!("the policy measures {} query rows, but layer {layer} came without queries", rows.len());
                Err(Error::Selection { reason })
            }
        }
    }

    /// The statistics to measure.
    pub(crate) const fn columns(&self) -> ColumnRequest {
        self.columns
    }

    /// Holds a layer that was checked, and that ranks have measured: column sums, and the counts if they were
    /// requested.
    pub(crate) fn hold(
        &mut self,
        layer: usize,
        dense: DenseLayer<B::Tensor>,
        statistics: Option<(B::Tensor, Option<Vec<u32>>)>,
    ) {
        let Some(of_layer) = self.layers.get_mut(layer) else { return };
        let (column_sums, counted) = statistics.unzip();
        let measured = |column_sums| MeasuredAttention { row_max: None, row_lse: None, column_sums, counts: None };
        let (measured, counted) = (column_sums.map(measured), counted.flatten());
        of_layer.observed = Some(ObservedLayer { shape: of_layer.layer.shape, dense, measured, counted });
    }

    /// Replaces the policy that decides over the measurements: with another share, other layer budgets, another way to
    /// merge.
    ///
    /// # Errors
    /// [`Error::Selection`] when it needs other query rows, another aggregation of heads or a threshold that was not
    /// counted: observe the prompt again for it. On an error the policy is unchanged.
    pub fn decide_by(&mut self, policy: Policy) -> Result<()> {
        let rows = policy.query_rows(&self.spans)?;
        let needed = columns(&policy);
        let counted = needed.threshold.is_none() || needed.threshold == self.columns.threshold;
        let aggregated = needed.aggregation == self.columns.aggregation;
        let scored = matches!(policy.keep, KeepRule::Best { .. });
        let measured = if rows.is_none() { !scored } else { rows == self.rows && aggregated && counted };
        if !measured {
            let reason = "the policy needs statistics that were not measured; observe the prompt again for it".into();
            return Err(Error::Selection { reason });
        }
        self.policy = policy;
        Ok(())
    }

    /// The policy's decision, once every layer was observed: the tokens that stay. The device chooses them as in
    /// [`ModelCache::compress`](super::ModelCache::compress), and the result is downloaded.
    ///
    /// # Errors
    /// [`Error::Selection`] when a layer was not observed, or layers differ in KV heads; as [`Policy::select`];
    /// [`Error::DeviceLost`].
    pub async fn select(&self) -> Result<Selection> {
        self.decide().await?.selection(&self.backend).await
    }

    /// Lets the device choose the tokens that stay. If budgets depend on counts of attention entries, these counts are
    /// downloaded: 4 bytes for each query head and measured row of a layer. Nothing else is. The host decides for a
    /// policy that does not use scores.
    pub(super) async fn decide(&self) -> Result<Decided<B>> {
        let layers = self.observed()?;
        let kv_heads = layers.first().map_or(0, |layer| layer.shape.kv_heads());
        if let Some(other) = layers.iter().position(|layer| layer.shape.kv_heads() != kv_heads) {
            let given = layers[other].shape.kv_heads();
            let reason =
                format!("layer {other} has {given} KV heads and layer 0 has {kv_heads}; budgets are shared by heads");
            return Err(Error::Selection { reason });
        }
        let mut counted = Vec::with_capacity(layers.len());
        for layer in &layers {
            counted.push(match &layer.counted {
                Some(counts) => LayerStatistics { column_sums: Vec::new(), counts: counts.clone() },
                None => counts(&self.backend, layer.measured.as_ref()).await?,
            });
        }
        let tokens = self.spans.tokens();
        let (Some(rows), KeepRule::Best { .. }) = (&self.rows, self.policy.keep) else {
            let selection = self.policy.select(&self.spans, layers.len(), kv_heads, &counted)?;
            return Decided::upload(&self.backend, selection).await;
        };
        let budgets = self.policy.budgets(&self.spans, layers.len(), kv_heads, &counted)?;
        let mut decided = Vec::with_capacity(layers.len());
        for (layer, count) in layers.iter().zip(budgets) {
            let of_layer = match (&layer.measured, self.policy.score_request(&self.spans, rows, count)?) {
                (Some(measured), Some(request)) => {
                    DecidedLayer::by_scores(&self.backend, &measured.column_sums, (kv_heads, count), &request)?
                }
                _ => DecidedLayer::none(),
            };
            decided.push(of_layer);
        }
        Ok(Decided { tokens, kv_heads, layers: decided })
    }

    /// All layers, if all were observed.
    ///
    /// # Errors
    /// [`Error::Selection`].
    pub(super) fn observed(&self) -> Result<Vec<&ObservedLayer<B>>> {
        let missing = |layer: usize| {
            let reason = format!("layer {layer} was not observed; pass it to ObservedPrompt::observe first");
            Error::Selection { reason }
        };
        let layers = self.layers.iter().enumerate();
        layers.map(|(index, layer)| layer.observed.as_ref().ok_or_else(|| missing(index))).collect()
    }
}

/// The input of a layer's budget: the counts, if there are any.
pub(super) async fn counts<B: Backend>(
    backend: &B,
    measured: Option<&MeasuredAttention<B::Tensor, B::Words>>,
) -> Result<LayerStatistics> {
    let counts = match measured.and_then(|measured| measured.counts.as_ref()) {
        Some(counts) => backend.download_words(counts).await?,
        None => Vec::new(),
    };
    Ok(LayerStatistics { column_sums: Vec::new(), counts })
}

impl<B: Backend> fmt::Debug for ObservedPrompt<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObservedPrompt")
            .field("policy", &self.policy)
            .field("tokens", &self.spans.tokens())
            .field("layers", &self.layers.len())
            .finish_non_exhaustive()
    }
}

/// The attention statistics that a policy needs of its rows.
pub(super) fn columns(policy: &Policy) -> ColumnRequest {
    ColumnRequest { aggregation: policy.scores.aggregation, threshold: policy.threshold() }
}
