//! A prompt that ranks observe together for a policy.

use std::fmt;

use super::context_parallel::ContextParallel;
use super::statistics::{KeysOfRank, SharedSize};
use super::transport::{TensorOf, Transport};
use crate::Result;
use crate::backend::{Backend, Device, TensorRows};
use crate::cache::{DenseLayer, MeasuredQueries, ObservedPrompt};
use crate::counts::{filled, saturated};
use crate::format::AttentionShape;
use crate::plan::{Elements, RankShare, RowLayout};
use crate::policy::{Policy, QueryPositions, Selection, Spans};

/// A prompt that is passing through a model on several ranks: an [`ObservedPrompt`] of which every rank measures the
/// keys at its positions. The statistics are exchanged layer by layer, so that all ranks have those of the whole
/// prompt.
///
/// Tensors are held until the prompt is dropped, as in an [`ObservedPrompt`].
pub struct SharedPrompt<B: Backend> {
    pub(super) observed: ObservedPrompt<B>,
    share: RankShare,
    /// The positions of this rank on the device, for numbers of KV heads.
    places: Vec<(usize, B::Indices)>,
}

impl<B: Backend> SharedPrompt<B> {
    pub(super) const fn new(observed: ObservedPrompt<B>, share: RankShare) -> Self {
        Self { observed, share, places: Vec::new() }
    }

    /// The policy.
    pub const fn policy(&self) -> &Policy {
        self.observed.policy()
    }

    /// Text and images of the prompt.
    pub const fn spans(&self) -> &Spans {
        self.observed.spans()
    }

    /// The query rows that are measured in every layer: [`ObservedPrompt::query_rows`].
    pub const fn query_rows(&self) -> Option<&QueryPositions> {
        self.observed.query_rows()
    }

    /// Replaces the policy that decides over the measurements: [`ObservedPrompt::decide_by`].
    ///
    /// # Errors
    /// As [`ObservedPrompt::decide_by`].
    pub fn decide_by(&mut self, policy: Policy) -> Result<()> {
        self.observed.decide_by(policy)
    }

    /// The policy's decision, once every layer was observed: [`ObservedPrompt::select`]. It uses the
    /// statistics of all ranks, and works on this rank alone.
    ///
    /// # Errors
    /// As [`ObservedPrompt::select`].
    pub async fn select(&self) -> Result<Selection> {
        self.observed.select().await
    }

    /// The keys of this rank in a layer, in the order of their positions, and how they lie; none where they are the
    /// first rows of the caller's tensor.
    async fn keys_of_rank(
        &mut self,
        backend: &B,
        shape: &AttentionShape,
        dense: &DenseLayer<B::Tensor>,
    ) -> Result<(Option<B::Tensor>, RowLayout)> {
        let (tokens, keys) = (dense.rows.tokens, self.share.tokens(dense.rows.tokens));
        let of_caller = RowLayout { tokens: keys, ..dense.rows };
        if keys == 0 || self.share.positions(0..tokens).last() == Some(keys - 1) {
            return Ok((None, of_caller));
        }
        let heads = shape.kv_heads();
        let known = self.places.iter().position(|(of, _)| *of == heads);
        let at = match known {
            Some(at) => at,
            None => {
                let places: Vec<u32> = self.share.positions(0..tokens).map(saturated).collect();
                let places = backend.upload_indices(&places.repeat(heads), heads, saturated(tokens)).await?;
                self.places.push((heads, places));
                self.places.len() - 1
            }
        };
        let rows = TensorRows { tensor: &dense.keys, layout: dense.rows };
        let gathered = backend.gather(shape, rows, &self.places[at].1)?;
        Ok((Some(gathered), RowLayout::head_major(keys, shape)))
    }
}

impl<T: Transport> ContextParallel<T>
where
    T::Backend: Backend,
{
    /// Measures what the policy of a prompt needs of a layer, and holds its keys and values:
    /// [`ObservedPrompt::observe`](crate::cache::ObservedPrompt::observe). Every rank passes all keys, values and
    /// queries. It measures the keys at its positions; the largest scores, log-sum-exps, column sums and counts of all
    /// ranks are exchanged. Waits for the other ranks, unless the policy measures nothing.
    ///
    /// # Errors
    /// As [`ObservedPrompt::observe`](crate::cache::ObservedPrompt::observe), on this rank or another
    /// ([`Error::Plan`](crate::Error::Plan) names it); [`Error::NotANumber`](crate::Error::NotANumber) when a score is
    /// NaN; [`Error::Transport`](crate::Error::Transport). The layer is as it was.
    pub async fn observe_layer(
        &mut self,
        prompt: &mut SharedPrompt<T::Backend>,
        layer: usize,
        dense: DenseLayer<TensorOf<T>>,
        queries: Option<MeasuredQueries<'_, TensorOf<T>>>,
    ) -> Result<()> {
        let measured = prompt.observed.check_layer(layer, &dense)?;
        let (shape, scale) = (measured.shape, measured.scale());
        let Some((rows, queries)) = prompt.observed.measured_rows(layer, queries)? else {
            prompt.observed.hold(layer, dense, None);
            return Ok(());
        };
        let (share, tokens, columns) = (prompt.share, dense.rows.tokens, prompt.observed.columns());
        let (rows, seeing) = (rows.len(), rows.in_part(share.tokens(tokens), |end| share.tokens(end))?);
        let size = SharedSize::new(&shape, rows, &columns, queries.known_lse.is_some());
        let of_rank = prompt.keys_of_rank(self.transport.backend(), &shape, &dense).await;
        let part = of_rank.as_ref().map_err(Clone::clone).map(|(keys, layout)| {
            let keys = TensorRows { tensor: keys.as_ref().unwrap_or(&dense.keys), layout: *layout };
            KeysOfRank { shape, scale, rows, seeing, queries, keys, columns }
        });
        let shares = (0..self.ranks()).map(|rank| share.placement().share(rank));
        let shares = shares.collect::<Result<Vec<_>>>()?;
        let keys: Vec<usize> = shares.iter().map(|share| share.tokens(tokens)).collect();
        let statistics = self.measure_shared(part, size, &keys).await?;
        let mut sums = filled("column sums", size.column_rows.saturating_mul(tokens), 0.0f32)?;
        for ((of_rank, share), &keys) in statistics.column_sums.iter().zip(&shares).zip(&keys) {
            for (all, of_rank) in sums.chunks_mut(tokens).zip(of_rank.chunks(keys.max(1))) {
                share.positions(0..tokens).zip(of_rank).for_each(|(position, &sum)| all[position] = sum);
            }
        }
        let sums = self.transport.backend().upload(Elements::F32(&sums)).await?;
        prompt.observed.hold(layer, dense, Some((sums, statistics.counts)));
        Ok(())
    }
}

impl<B: Backend> fmt::Debug for SharedPrompt<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedPrompt").field("observed", &self.observed).field("rank", &self.share.rank()).finish()
    }
}
