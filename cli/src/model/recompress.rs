//! A cache that is compressed again as the text grows, by the queries of its newest tokens.

use std::collections::VecDeque;

use anyhow::Result;
use candle_core::Tensor;
use kvpack::backend::TensorRows;
use kvpack::cache::{MeasuredQueries, ModelCache};
use kvpack::plan::RowLayout;
use kvpack::policy::{Policy, Spans};
use kvpack::{AttentionShape, Backend};

use super::dense_prompt::{of_queries, upload};

/// When and how a sequence is compressed again, and the queries that say what stays.
pub(super) struct Recompression {
    every: usize,
    policy: Policy,
    /// `[tokens, query_heads, head_dim]` of each layer, the newest last.
    queries: Vec<VecDeque<Tensor>>,
    times: usize,
}

impl Recompression {
    pub(super) fn new(every: usize, policy: Policy, layers: usize) -> Self {
        Self { every, policy, queries: vec![VecDeque::new(); layers], times: 0 }
    }

    /// How often the sequence was compressed again.
    pub(super) const fn times(&self) -> usize {
        self.times
    }

    /// Remembers the queries of a layer's newest tokens, and forgets older ones than the policy measures.
    pub(super) fn remember(&mut self, layer: usize, queries: &Tensor) -> Result<()> {
        let held = &mut self.queries[layer];
        held.push_back(queries.clone());
        let most = self.policy.rows_again(usize::MAX);
        let mut rows = rows_of(held.iter())?;
        while let Some(oldest) = held.front().map(|oldest| oldest.dim(0)).transpose()?.filter(|old| rows - old >= most)
        {
            held.pop_front();
            rows -= oldest;
        }
        Ok(())
    }

    /// Compresses the sequence again, if that is due.
    pub(super) async fn compress<B: Backend + Clone>(
        &mut self,
        cache: &mut ModelCache<B>,
        sequence: usize,
    ) -> Result<()> {
        if !cache.compression_due(sequence, self.every)? {
            return Ok(());
        }
        // A prompt that was stored as a whole left no queries here.
        let remembered = rows_of(self.queries.first().into_iter().flatten())?;
        let rows = self.policy.rows_again(cache.appended(sequence)?.min(remembered));
        let mut tensors = Vec::new();
        if rows > 0 {
            for queries in &self.queries {
                let queries = Tensor::cat(&queries.iter().collect::<Vec<_>>(), 0)?;
                let newest = queries.narrow(0, queries.dim(0)? - rows, rows)?;
                tensors.push(upload(cache.backend(), &newest).await?);
            }
        }
        let heads = |layer: usize| cache.shape(layer).and_then(of_queries);
        let heads: Vec<AttentionShape> = (0..cache.layers()).map(heads).collect::<kvpack::Result<_>>()?;
        let measured = |(tensor, heads): (_, &AttentionShape)| {
            let queries = TensorRows { tensor, layout: RowLayout::token_major(rows, heads) };
            MeasuredQueries { queries, known_lse: None }
        };
        let measured: Vec<_> = tensors.iter().zip(&heads).map(measured).collect();
        let spans = Spans::new(cache.length(sequence)?, &[])?;
        cache.compress_again(sequence, &self.policy, &spans, &measured).await?;
        self.queries.iter_mut().for_each(VecDeque::clear);
        self.times += 1;
        Ok(())
    }
}

fn rows_of<'a>(mut queries: impl Iterator<Item = &'a Tensor>) -> candle_core::Result<usize> {
    queries.try_fold(0, |rows, queries| Ok(rows + queries.dim(0)?))
}
