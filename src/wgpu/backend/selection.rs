//! The token selection of the wgpu backend.

use super::Wgpu;
use crate::Result;
use crate::backend::{
    KeptAndEvicted, MeasuredAttention, MergedTokens, NewQueries, QueriesAndKeys, RowStatistics, ScoredTokens,
    TensorRows, TokenSelection,
};
use crate::format::AttentionShape;
use crate::plan::{ElementType, TokenIndices};
use crate::policy::{ColumnRequest, HeadAggregation, Merging, RowStatsSource, ScoreRequest, StatsRequest};
use crate::wgpu::device::{Indices, SpanReads, Store, Tensor};
use crate::wgpu::select::{
    AttentionStatsPlan, ChunkSimilarityPlan, EvictedPlan, GatherPlan, MergePlan, ReorderChunksPlan, TokenScoresPlan,
    TopKPlan, Words,
};

impl Wgpu {
    fn statistics(&self, input: &QueriesAndKeys<'_, Tensor>, request: StatsRequest) -> Result<AttentionStatsPlan> {
        let layouts = [input.queries.layout, input.keys.layout];
        let plan = AttentionStatsPlan::new(&input.shape, input.rows.clone(), layouts, request)?;
        Ok(plan.with_scale(input.scale).for_device(&self.capabilities))
    }
}

impl TokenSelection for Wgpu {
    type Words = Words;

    async fn download_words(&self, words: &Words) -> Result<Vec<u32>> {
        self.check_not_recording("a download")?;
        words.download(self.device(), &self.queue).await
    }

    fn measure_attention(
        &self,
        input: QueriesAndKeys<'_, Tensor>,
        request: StatsRequest,
        known_lse: Option<&Tensor>,
    ) -> Result<MeasuredAttention<Tensor, Words>> {
        let plan = self.statistics(&input, request)?;
        let bound = plan.bind(&self.kernels, input.queries.tensor, input.keys.tensor, known_lse)?;
        self.run("kvpack measure_attention", &bound.launches)?;
        Ok(MeasuredAttention {
            row_max: bound.row_max,
            row_lse: known_lse.is_none().then_some(bound.row_lse),
            column_sums: bound.column_sums,
            counts: bound.counts,
        })
    }

    fn measure_rows(&self, input: QueriesAndKeys<'_, Tensor>) -> Result<RowStatistics<Tensor>> {
        let columns = ColumnRequest { aggregation: HeadAggregation::Each, threshold: None };
        let request = StatsRequest { columns, rows: RowStatsSource::Measured };
        let plan = self.statistics(&input, request)?;
        let (launches, rows) = plan.bind_rows(&self.kernels, input.queries.tensor, input.keys.tensor)?;
        self.run("kvpack measure_rows", &launches)?;
        Ok(rows)
    }

    fn measure_columns(
        &self,
        input: QueriesAndKeys<'_, Tensor>,
        columns: ColumnRequest,
        rows: &RowStatistics<Tensor>,
    ) -> Result<MeasuredAttention<Tensor, Words>> {
        let plan = self.statistics(&input, StatsRequest { columns, rows: RowStatsSource::Known })?;
        let bound = plan.bind_columns(&self.kernels, input.queries.tensor, input.keys.tensor, rows)?;
        self.run("kvpack measure_columns", &bound.launches)?;
        let (column_sums, counts) = (bound.column_sums, bound.counts);
        Ok(MeasuredAttention { row_max: None, row_lse: None, column_sums, counts })
    }

    fn add_attention(
        &self,
        input: NewQueries<'_, Tensor>,
        columns: ColumnRequest,
        sums: &mut Option<Tensor>,
    ) -> Result<Option<Words>> {
        let (launches, counts) = AttentionStatsPlan::bind_adding(&self.kernels, input, columns, sums)?;
        self.run("kvpack add_attention", &launches)?;
        Ok(counts)
    }

    fn begin_word_reads(&self, words: &[&Words], stores: &[&Store]) -> Result<SpanReads> {
        self.check_not_recording("a download")?;
        self.check_all_submitted("reading of counts", stores)?;
        let buffers: Vec<_> = words.iter().map(|words| (words.buffer(), words.len() as u64 * 4)).collect();
        SpanReads::begin_buffers(self.device(), &self.queue, &buffers)
    }

    fn token_scores(
        &self,
        sums: &Tensor,
        kv_heads: usize,
        request: &ScoreRequest<'_>,
    ) -> Result<ScoredTokens<Tensor, Words>> {
        request.check(sums.elements(), kv_heads)?;
        let scores = Tensor::zeroed(self.device(), kv_heads * request.tokens(), ElementType::F32)?;
        let not_numbers = Words::zeroed(self.device(), "sums that are not numbers", kv_heads)?;
        let plan = TokenScoresPlan::new(kv_heads, request)?;
        self.run("kvpack token_scores", &plan.bind(&self.kernels, sums, &scores, &not_numbers)?)?;
        Ok(ScoredTokens { scores, not_numbers })
    }

    fn evicted(&self, kept: &Indices) -> Result<Indices> {
        let plan = EvictedPlan::new(kept.shape())?;
        let others = Indices::zeroed(self.device(), plan.indices())?;
        self.run("kvpack evicted", &plan.bind(&self.kernels, kept, &others)?)?;
        Ok(others)
    }

    fn top_k(&self, scores: &Tensor, kv_heads: usize, k: usize) -> Result<Indices> {
        let plan = TopKPlan::new(kv_heads, scores.elements() / kv_heads.max(1), k)?;
        let chosen = Indices::zeroed(self.device(), plan.indices())?;
        self.run("kvpack top_k", &plan.bind(&self.kernels, scores, &chosen)?)?;
        Ok(chosen)
    }

    fn gather(&self, shape: &AttentionShape, rows: TensorRows<'_, Tensor>, kept: &Indices) -> Result<Tensor> {
        let plan = GatherPlan::new(shape, rows.layout, kept.shape().count())?;
        let gathered = Tensor::zeroed(self.device(), plan.elements(), rows.tensor.element_type())?;
        self.run("kvpack gather", &plan.bind(&self.kernels, rows.tensor, kept, &gathered)?)?;
        Ok(gathered)
    }

    fn merge_tokens(
        &self,
        input: KeptAndEvicted<'_, Tensor, Indices>,
        merging: Merging,
    ) -> Result<MergedTokens<Tensor, Words>> {
        let counts = [input.kept.shape().count(), input.evicted.shape().count()];
        let plan = MergePlan::new(&input.shape, input.rows, counts, merging)?;
        let bound = plan.bind(&self.kernels, [input.keys, input.values], input.kept, input.evicted)?;
        self.run("kvpack merge_tokens", &bound.launches)?;
        Ok(MergedTokens {
            nearest: bound.nearest,
            similarities: bound.similarities,
            keys: bound.keys,
            values: bound.values,
        })
    }

    fn chunk_similarity(&self, query: &Tensor, chunks: &Tensor) -> Result<Tensor> {
        let count = chunks.elements() / query.elements().max(1);
        let plan = ChunkSimilarityPlan::new(query.elements(), count)?;
        let similarities = Tensor::zeroed(self.device(), count, ElementType::F32)?;
        self.run("kvpack chunk_similarity", &plan.bind(&self.kernels, query, chunks, &similarities)?)?;
        Ok(similarities)
    }

    fn reorder_chunks(
        &self,
        shape: &AttentionShape,
        rows: TensorRows<'_, Tensor>,
        chunk_tokens: usize,
        order: &[u32],
    ) -> Result<Tensor> {
        let plan = ReorderChunksPlan::new(shape, rows.layout, chunk_tokens, order)?;
        let reordered = Tensor::zeroed(self.device(), plan.elements(), rows.tensor.element_type())?;
        self.run("kvpack reorder_chunks", &plan.bind(&self.kernels, rows.tensor, &reordered)?)?;
        Ok(reordered)
    }
}
