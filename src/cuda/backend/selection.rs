//! Kernels that measure attention and carry out decisions about tokens.

use super::Cuda;
use crate::Result;
use crate::backend::{
    KeptAndEvicted, MeasuredAttention, MergedTokens, NewQueries, QueriesAndKeys, RowStatistics, ScoredTokens,
    TensorRows, TokenSelection,
};
use crate::cuda::device::indices::Indices;
use crate::cuda::device::span_bytes::SpanReads;
use crate::cuda::device::store::Store;
use crate::cuda::device::tensor::Tensor;
use crate::cuda::select::{
    AttentionStatsPlan, ChunkSimilarityPlan, EvictedPlan, GatherPlan, MergePlan, ReorderChunksPlan, TokenScoresPlan,
    TopKPlan, Words,
};
use crate::format::AttentionShape;
use crate::plan::{ElementType, TokenIndices};
use crate::policy::{ColumnRequest, HeadAggregation, Merging, RowStatsSource, ScoreRequest, StatsRequest};

fn statistics(input: &QueriesAndKeys<'_, Tensor>, request: StatsRequest) -> Result<AttentionStatsPlan> {
    let layouts = [input.queries.layout, input.keys.layout];
    let plan = AttentionStatsPlan::new(&input.shape, input.rows.clone(), layouts, request)?;
    Ok(plan.with_scale(input.scale))
}

impl TokenSelection for Cuda {
    type Words = Words;

    async fn download_words(&self, words: &Words) -> Result<Vec<u32>> {
        words.download(&self.stream)
    }

    fn measure_attention(
        &self,
        input: QueriesAndKeys<'_, Tensor>,
        request: StatsRequest,
        known_lse: Option<&Tensor>,
    ) -> Result<MeasuredAttention<Tensor, Words>> {
        self.check_tensors("attention statistics", &[input.queries.tensor, input.keys.tensor])?;
        self.check_tensors("attention statistics", known_lse.as_slice())?;
        let plan = statistics(&input, request)?;
        let bound = plan.bind(self, input.queries.tensor, input.keys.tensor, known_lse)?;
        bound.launches.launch(&self.stream)?;
        Ok(MeasuredAttention {
            row_max: bound.row_max,
            row_lse: known_lse.is_none().then_some(bound.row_lse),
            column_sums: bound.column_sums,
            counts: bound.counts,
        })
    }

    fn measure_rows(&self, input: QueriesAndKeys<'_, Tensor>) -> Result<RowStatistics<Tensor>> {
        self.check_tensors("row statistics", &[input.queries.tensor, input.keys.tensor])?;
        let columns = ColumnRequest { aggregation: HeadAggregation::Each, threshold: None };
        let request = StatsRequest { columns, rows: RowStatsSource::Measured };
        let plan = statistics(&input, request)?;
        let (launches, rows) = plan.bind_rows(self, input.queries.tensor, input.keys.tensor)?;
        launches.launch(&self.stream)?;
        Ok(rows)
    }

    fn measure_columns(
        &self,
        input: QueriesAndKeys<'_, Tensor>,
        columns: ColumnRequest,
        rows: &RowStatistics<Tensor>,
    ) -> Result<MeasuredAttention<Tensor, Words>> {
        self.check_tensors("column statistics", &[input.queries.tensor, input.keys.tensor, &rows.max, &rows.lse])?;
        let plan = statistics(&input, StatsRequest { columns, rows: RowStatsSource::Known })?;
        let bound = plan.bind_columns(self, input.queries.tensor, input.keys.tensor, rows)?;
        bound.launches.launch(&self.stream)?;
        let (column_sums, counts) = (bound.column_sums, bound.counts);
        Ok(MeasuredAttention { row_max: None, row_lse: None, column_sums, counts })
    }

    fn add_attention(
        &self,
        input: NewQueries<'_, Tensor>,
        columns: ColumnRequest,
        sums: &mut Option<Tensor>,
    ) -> Result<Option<Words>> {
        self.check_tensors("attention statistics", &[input.queries.tensor, input.keys.tensor])?;
        self.check_tensors("attention statistics", input.log_sum_exps.as_slice())?;
        self.check_tensors("attention statistics", sums.as_ref().as_slice())?;
        let (launches, counts) = AttentionStatsPlan::bind_adding(self, input, columns, sums)?;
        launches.launch(&self.stream)?;
        Ok(counts)
    }

    fn begin_word_reads(&self, words: &[&Words], _: &[&Store]) -> Result<SpanReads> {
        let memories: Vec<_> = words.iter().map(|words| (words.memory(), words.len() * size_of::<u32>())).collect();
        memories.iter().try_for_each(|(memory, _)| memory.check_stream("words", &self.stream))?;
        SpanReads::begin_memories(&self.stream, &memories)
    }

    fn token_scores(
        &self,
        sums: &Tensor,
        kv_heads: usize,
        request: &ScoreRequest<'_>,
    ) -> Result<ScoredTokens<Tensor, Words>> {
        self.check_tensors("token_scores", &[sums])?;
        request.check(sums.elements(), kv_heads)?;
        let scores = Tensor::zeroed(&self.stream, kv_heads * request.tokens(), ElementType::F32)?;
        let not_numbers = Words::zeroed(&self.stream, "sums that are not numbers", kv_heads)?;
        let plan = TokenScoresPlan::new(kv_heads, request)?;
        plan.bind(self, sums, &scores, &not_numbers)?.launch(&self.stream)?;
        Ok(ScoredTokens { scores, not_numbers })
    }

    fn evicted(&self, kept: &Indices) -> Result<Indices> {
        kept.memory().check_stream("evicted", &self.stream)?;
        let plan = EvictedPlan::new(kept.shape())?;
        let others = Indices::zeroed(&self.stream, plan.indices())?;
        plan.bind(self, kept, &others)?.launch(&self.stream)?;
        Ok(others)
    }

    fn top_k(&self, scores: &Tensor, kv_heads: usize, k: usize) -> Result<Indices> {
        self.check_tensors("top_k", &[scores])?;
        let plan = TopKPlan::new(kv_heads, scores.elements() / kv_heads.max(1), k)?;
        let chosen = Indices::zeroed(&self.stream, plan.indices())?;
        plan.bind(self, scores, &chosen)?.launch(&self.stream)?;
        Ok(chosen)
    }

    fn gather(&self, shape: &AttentionShape, rows: TensorRows<'_, Tensor>, kept: &Indices) -> Result<Tensor> {
        self.check_tensors("gather", &[rows.tensor])?;
        kept.memory().check_stream("gather", &self.stream)?;
        let plan = GatherPlan::new(shape, rows.layout, kept.shape().count())?;
        let gathered = Tensor::zeroed(&self.stream, plan.elements(), rows.tensor.element_type())?;
        plan.bind(self, rows.tensor, kept, &gathered)?.launch(&self.stream)?;
        Ok(gathered)
    }

    fn merge_tokens(
        &self,
        input: KeptAndEvicted<'_, Tensor, Indices>,
        merging: Merging,
    ) -> Result<MergedTokens<Tensor, Words>> {
        self.check_tensors("merge_tokens", &[input.keys, input.values])?;
        input.kept.memory().check_stream("merge_tokens", &self.stream)?;
        input.evicted.memory().check_stream("merge_tokens", &self.stream)?;
        let counts = [input.kept.shape().count(), input.evicted.shape().count()];
        let plan = MergePlan::new(&input.shape, input.rows, counts, merging)?;
        let bound = plan.bind(self, [input.keys, input.values], input.kept, input.evicted)?;
        bound.launches.launch(&self.stream)?;
        Ok(MergedTokens {
            nearest: bound.nearest,
            similarities: bound.similarities,
            keys: bound.keys,
            values: bound.values,
        })
    }

    fn chunk_similarity(&self, query: &Tensor, chunks: &Tensor) -> Result<Tensor> {
        self.check_tensors("chunk_similarity", &[query, chunks])?;
        let count = chunks.elements() / query.elements().max(1);
        let plan = ChunkSimilarityPlan::new(query.elements(), count)?;
        let similarities = Tensor::zeroed(&self.stream, count, ElementType::F32)?;
        plan.bind(self, query, chunks, &similarities)?.launch(&self.stream)?;
        Ok(similarities)
    }

    fn reorder_chunks(
        &self,
        shape: &AttentionShape,
        rows: TensorRows<'_, Tensor>,
        chunk_tokens: usize,
        order: &[u32],
    ) -> Result<Tensor> {
        self.check_tensors("reorder_chunks", &[rows.tensor])?;
        let plan = ReorderChunksPlan::new(shape, rows.layout, chunk_tokens, order)?;
        let reordered = Tensor::zeroed(&self.stream, plan.elements(), rows.tensor.element_type())?;
        plan.bind(self, rows.tensor, &reordered)?.launch(&self.stream)?;
        Ok(reordered)
    }
}
