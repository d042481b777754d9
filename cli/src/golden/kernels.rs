//! The kernels that measure and select, on the CPU and on a GPU.

use anyhow::{Result, ensure};
use kvpack::AttentionShape;
use kvpack::backend::{Device as _, TokenSelection as _};
use kvpack::cpu::{self, DenseRows, KeptTokens, RowStats, StatsInput};
use kvpack::plan::{ElementType, Elements, RowLayout, Scoring, TokenRange};
use kvpack::policy::{
    ColumnRequest, HeadAggregation, Merging, Nearest, QueryPositions, RowStatsSource, ScoreRequest, StatsRequest,
};
use kvpack::wgpu::{AttentionStatsPlan, ChunkSimilarityPlan, Launches, MergePlan, Tensor, Wgpu};
use pollster::block_on;

use super::file::{GoldenFile, part};

/// What runs an op.
#[derive(Clone, Copy)]
pub enum Device<'a> {
    /// The CPU references.
    Cpu,
    /// WGSL.
    Gpu(&'a Wgpu),
}

/// Query rows `[query_heads, rows, head_dim]` and keys `[kv_heads, tokens, head_dim]` of one sequence.
pub struct Attention {
    pub shape: AttentionShape,
    pub rows: QueryPositions,
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
        let [query_heads, tensor_rows, head_dim] = q.last_axes()?;
        let [kv_heads, tokens, _] = k.last_axes()?;
        Ok(Self {
            shape: AttentionShape::new(query_heads, kv_heads, head_dim)?,
            rows: QueryPositions::last(most.min(tensor_rows), tokens)?,
            queries: part(&q.f32()?, sequence, query_heads * tensor_rows * head_dim)?.to_vec(),
            keys: part(&k.f32()?, sequence, kv_heads * tokens * head_dim)?.to_vec(),
            tensor_rows,
        })
    }

    /// Attention whose weights are given, `[query_heads, rows, tokens]`, the last `most` rows: keys are unit vectors,
    /// and queries the logarithms of the weights.
    pub fn of_weights(weights: &[f32], query_heads: usize, group: usize, tokens: usize, most: usize) -> Result<Self> {
        const HEAD_DIM: usize = 256;
        ensure!(
            (1..=HEAD_DIM).contains(&tokens),
            "weights of {tokens} tokens; unit keys make those of 1 to {HEAD_DIM}"
        );
        ensure!(
            query_heads > 0 && group > 0,
            "{query_heads} query heads in groups of {group}; give at least 1 of each"
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
            rows: QueryPositions::last(most.min(tensor_rows), tokens)?,
            queries: weights.chunks(tokens).flat_map(query).collect(),
            keys: (0..kv_heads * tokens).flat_map(key).collect(),
            tensor_rows,
        })
    }

    /// Row and column statistics.
    pub fn measure(
        &self,
        device: Device<'_>,
        aggregation: HeadAggregation,
        threshold: Option<f32>,
    ) -> Result<Measured> {
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
                    scale: Scoring::of(&self.shape).scale(),
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
            Device::Gpu(gpu) => {
                let request = StatsRequest { columns: request, rows: RowStatsSource::Measured };
                let plan = AttentionStatsPlan::new(&self.shape, self.rows.clone(), [queries, keys], request)?;
                let query_rows = block_on(gpu.upload(Elements::F32(&self.queries[skipped..])))?;
                let key_rows = block_on(gpu.upload(Elements::F32(&self.keys)))?;
                let stats = plan.bind(gpu.kernels(), &query_rows, &key_rows, None)?;
                run(gpu, &stats.launches);
                let max = stats.row_max.map(|max| block_on(gpu.download(&max))).transpose()?.unwrap_or_default();
                let row_stats = RowStats { max, lse: block_on(gpu.download(&stats.row_lse))? };
                let counts = stats.counts.map(|counts| block_on(counts.download(gpu.device(), gpu.queue())));
                let sums = block_on(gpu.download(&stats.column_sums))?;
                Ok(Measured { row_stats, sums, counts: counts.transpose()?.unwrap_or_default() })
            }
        }
    }
}

/// Tokens that stay, and all scores.
pub struct Chosen {
    pub kept: Vec<u32>,
    pub scores: Vec<f32>,
}

/// Evicted tokens merged into kept ones.
pub struct Merged {
    pub nearest: Vec<Nearest>,
    pub keys: Vec<f32>,
    pub values: Vec<f32>,
}

impl Device<'_> {
    /// The `count` tokens of every head that stay, by their column sums, and what these are as scores.
    pub fn choose(self, sums: &[f32], kv_heads: usize, request: &ScoreRequest<'_>, count: usize) -> Result<Chosen> {
        match self {
            Self::Cpu => {
                let (scores, _) = cpu::token_scores(sums, kv_heads, request)?;
                Ok(Chosen { kept: cpu::top_k(&scores, kv_heads, count)?, scores })
            }
            Self::Gpu(gpu) => {
                let sums = block_on(gpu.upload(Elements::F32(sums)))?;
                let scored = gpu.token_scores(&sums, kv_heads, request)?;
                let kept = gpu.top_k(&scored.scores, kv_heads, count)?;
                let scores = block_on(gpu.download(&scored.scores))?;
                Ok(Chosen { kept: block_on(gpu.download_indices(&kept))?, scores })
            }
        }
    }

    /// Keys and values `[kv_heads, tokens, head_dim]` merged by the keys that are nearest.
    pub fn merge(
        self,
        shape: &AttentionShape,
        [keys, values]: [&[f32]; 2],
        tokens: KeptTokens<'_>,
        merging: Merging,
    ) -> Result<Merged> {
        let count = keys.len() / shape.head_dim() / shape.kv_heads();
        let layout = RowLayout::head_major(count, shape);
        match self {
            Self::Cpu => {
                let dense = |elements| DenseRows { elements: Elements::F32(elements), layout };
                let nearest = cpu::nearest_kept(shape, dense(keys), tokens)?;
                let merged = |rows| cpu::merge_tokens(shape, dense(rows), tokens, &nearest, merging);
                let (keys, values) = (merged(keys)?, merged(values)?);
                Ok(Merged { nearest, keys, values })
            }
            Self::Gpu(gpu) => {
                let heads = shape.kv_heads();
                let counts = [tokens.kept.len() / heads, tokens.evicted.len() / heads];
                let plan = MergePlan::new(shape, layout, counts, merging)?;
                let upload = |rows: &[f32]| block_on(gpu.upload(Elements::F32(rows)));
                let (keys, values) = (upload(keys)?, upload(values)?);
                let indices = |tokens: &[u32]| block_on(gpu.upload_indices(tokens, heads, count as u32));
                let (kept, evicted) = (indices(tokens.kept)?, indices(tokens.evicted)?);
                let bound = plan.bind(gpu.kernels(), [&keys, &values], &kept, &evicted)?;
                run(gpu, &bound.launches);
                let places = block_on(bound.nearest.download(gpu.device(), gpu.queue()))?;
                let similarities = block_on(gpu.download(&bound.similarities))?;
                let nearest = places.into_iter().zip(similarities);
                Ok(Merged {
                    nearest: nearest.map(|(kept, similarity)| Nearest { kept, similarity }).collect(),
                    keys: block_on(gpu.download(&bound.keys))?,
                    values: block_on(gpu.download(&bound.values))?,
                })
            }
        }
    }

    /// Similarities of chunks with a query.
    pub fn chunk_similarity(self, query: &[f32], chunks: &[f32]) -> Result<Vec<f32>> {
        match self {
            Self::Cpu => Ok(cpu::chunk_similarity(query, chunks)?),
            Self::Gpu(gpu) => {
                ensure!(!query.is_empty(), "an empty query");
                let count = chunks.len() / query.len();
                let plan = ChunkSimilarityPlan::new(query.len(), count)?;
                let upload = |rows: &[f32]| block_on(gpu.upload(Elements::F32(rows)));
                let similarities = Tensor::zeroed(gpu.device(), count, ElementType::F32)?;
                run(gpu, &plan.bind(gpu.kernels(), &upload(query)?, &upload(chunks)?, &similarities)?);
                Ok(block_on(gpu.download(&similarities))?)
            }
        }
    }

    /// The name of what ran.
    pub const fn named(self, [on_cpu, on_gpu]: [&'static str; 2]) -> &'static str {
        match self {
            Self::Cpu => on_cpu,
            Self::Gpu(_) => on_gpu,
        }
    }
}

fn run(gpu: &Wgpu, launches: &Launches) {
    let mut encoder = gpu.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    launches.encode(&mut encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default()));
    gpu.queue().submit([encoder.finish()]);
}
