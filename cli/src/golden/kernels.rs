//! The kernels that measure and select, on the CPU.

use anyhow::Result;
use kvpack::AttentionShape;
use kvpack::cpu::{self, ColumnRequest, DenseRows, KeptTokens, RowStats, StatsInput};
use kvpack::plan::{Elements, RowLayout, TokenRange};
use kvpack::policy::{HeadAggregation, Merging, Nearest, QueryRows};

use super::file::{GoldenFile, part};

/// What runs an op.
#[derive(Clone, Copy)]
pub enum Device {
    /// The CPU twins.
    Cpu,
}

/// Query rows `[query_heads, rows, head_dim]` and keys `[kv_heads, tokens, head_dim]` of one sequence.
pub struct Attention {
    pub shape: AttentionShape,
    pub rows: QueryRows,
    queries: Vec<f32>,
    keys: Vec<f32>,
    /// Query rows in the tensor, of which the last are measured.
    tensor_rows: usize,
}

/// What was measured.
pub struct Measured {
    pub row_stats: RowStats,
    pub sums: Vec<f32>,
    pub counts: Vec<u32>,
}

impl Attention {
    /// The last `most` rows of sequence `sequence` of a file, whose queries are called `queries`.
    pub fn of_file(file: &GoldenFile, queries: &str, sequence: usize, most: usize) -> Result<Self> {
        let (q, k) = (file.input(queries)?, file.input("k")?);
        let last = |shape: &[usize], at: usize| shape.len().checked_sub(at).map_or(0, |axis| shape[axis]);
        let (query_heads, tensor_rows, head_dim) = (last(&q.shape, 3), last(&q.shape, 2), last(&q.shape, 1));
        let (kv_heads, tokens) = (last(&k.shape, 3), last(&k.shape, 2));
        Ok(Self {
            shape: AttentionShape::new(query_heads, kv_heads, head_dim)?,
            rows: QueryRows::last(most.min(tensor_rows), tokens)?,
            queries: part(&q.f32()?, sequence, query_heads * tensor_rows * head_dim)?.to_vec(),
            keys: part(&k.f32()?, sequence, kv_heads * tokens * head_dim)?.to_vec(),
            tensor_rows,
        })
    }

    /// Attention whose weights are given, `[query_heads, rows, tokens]`, the last `most` rows: keys are unit vectors, and
    /// queries the logarithms of the weights.
    pub fn of_weights(weights: &[f32], query_heads: usize, group: usize, tokens: usize, most: usize) -> Result<Self> {
        const HEAD_DIM: usize = 256;
        anyhow::ensure!(
            tokens <= HEAD_DIM,
            "weights of {tokens} tokens, at most {HEAD_DIM} can be made from unit keys"
        );
        let kv_heads = query_heads / group;
        let root = (HEAD_DIM as f32).sqrt();
        let query = |weights: &[f32]| {
            let mut row = vec![0.0; HEAD_DIM];
            row.iter_mut().zip(weights).for_each(|(x, weight)| *x = weight.max(1e-30).ln() * root);
            row
        };
        let key = |i: usize| (0..HEAD_DIM).map(move |channel| f32::from(u8::from(channel == i % tokens)));
        let tensor_rows = weights.len() / query_heads / tokens;
        Ok(Self {
            shape: AttentionShape::new(query_heads, kv_heads, HEAD_DIM)?,
            rows: QueryRows::last(most.min(tensor_rows), tokens)?,
            queries: weights.chunks(tokens).flat_map(query).collect(),
            keys: (0..kv_heads * tokens).flat_map(key).collect(),
            tensor_rows,
        })
    }

    /// Row and column statistics.
    pub fn measure(&self, device: Device, aggregation: HeadAggregation, threshold: Option<f32>) -> Result<Measured> {
        let head_dim = self.shape.head_dim();
        let skipped = (self.tensor_rows - self.rows.len()) * head_dim;
        let queries =
            RowLayout { tokens: self.rows.len(), token_stride: head_dim, head_stride: self.tensor_rows * head_dim };
        let keys = RowLayout::head_major(self.rows.tokens(), &self.shape);
        let request = ColumnRequest { aggregation, threshold };
        match device {
            Device::Cpu => {
                let input = StatsInput {
                    shape: self.shape,
                    rows: &self.rows,
                    queries: DenseRows { elements: Elements::F32(&self.queries[skipped..]), layout: queries },
                    keys: DenseRows { elements: Elements::F32(&self.keys), layout: keys },
                };
                // In two parts, so that there is something to put together.
                let tokens = self.rows.tokens();
                let cut = (tokens / 2).max(1);
                let ranges = [Some((0, cut)), Some((cut, tokens)).filter(|_| cut < tokens)];
                let ranges: Vec<TokenRange> = ranges
                    .into_iter()
                    .flatten()
                    .map(|(start, end)| TokenRange::new(start, end))
                    .collect::<kvpack::Result<_>>()?;
                let parts = ranges.iter().map(|&range| cpu::attention_row_stats(&input, range));
                let row_stats = cpu::sum_partials(&parts.collect::<kvpack::Result<Vec<_>>>()?)?;
                let all = TokenRange::new(0, tokens)?;
                let columns = cpu::attention_column_stats(&input, all, request, &row_stats.lse, &row_stats.max)?;
                Ok(Measured { row_stats, sums: columns.sums, counts: columns.counts })
            }
        }
    }
}

impl Device {
    /// The last `recent` tokens and the `best` best before them, of one head.
    pub fn recent_and_best(self, scores: &[f32], recent: usize, best: usize) -> Result<Vec<u32>> {
        let before = scores.len() - recent;
        let mut kept = match self {
            Self::Cpu => cpu::top_k(&scores[..before], 1, best)?,
        };
        kept.extend(before as u32..scores.len() as u32);
        Ok(kept)
    }

    /// Nearest kept keys.
    pub fn nearest_kept(self, shape: &AttentionShape, keys: &[f32], tokens: KeptTokens<'_>) -> Result<Vec<Nearest>> {
        let layout = RowLayout::head_major(keys.len() / shape.head_dim() / shape.kv_heads(), shape);
        match self {
            Self::Cpu => Ok(cpu::nearest_kept(shape, DenseRows { elements: Elements::F32(keys), layout }, tokens)?),
        }
    }

    /// Merged rows.
    pub fn merge_tokens(
        self,
        shape: &AttentionShape,
        rows: &[f32],
        tokens: KeptTokens<'_>,
        nearest: &[Nearest],
        merging: Merging,
    ) -> Result<Vec<f32>> {
        let layout = RowLayout::head_major(rows.len() / shape.head_dim() / shape.kv_heads(), shape);
        match self {
            Self::Cpu => {
                let rows = DenseRows { elements: Elements::F32(rows), layout };
                Ok(cpu::merge_tokens(shape, rows, tokens, nearest, merging)?)
            }
        }
    }

    /// Similarities of chunks with a query.
    pub fn chunk_similarity(self, query: &[f32], chunks: &[f32]) -> Result<Vec<f32>> {
        match self {
            Self::Cpu => Ok(cpu::chunk_similarity(query, chunks)?),
        }
    }

    /// The name of what ran, after the kernels it ran.
    pub const fn named(self, on_cpu: &'static str) -> &'static str {
        match self {
            Self::Cpu => on_cpu,
        }
    }
}
