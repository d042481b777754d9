//! Attention of runs of queries over ragged batches.

use anyhow::{Context, Result, bail, ensure};
use kvpack::backend::{AttendOptions, Backend, FilledStores, NewSpan, SpanSource};
use kvpack::cpu::{Cpu, DenseSegment, exact_scored_attention};
use kvpack::plan::{QueryRun, RowLayout, Scoring, TokenRange, TreeMask, Visible};
use kvpack::wgpu::Wgpu;
use kvpack::{AttentionShape, SegmentFormat};
use pollster::block_on;

use super::file::{Elements, GoldenFile};
use super::stored::check_size;
use super::{Computed, Outputs, doubles, named};

/// Products of queries and keys that a file may ask for.
const MOST_PRODUCTS: usize = 1 << 28;

/// `attention.prefill`: by the f64 oracle, and where the input is f16 (so that a cache holds it without loss) by
/// a plan of runs.
pub fn prefill(file: &GoldenFile) -> Result<Computed> {
    let batch = Batch::of_file(file)?;
    let mut kernels = vec![("exact_attention", batch.exact()?)];
    if batch.is_f16 {
        kernels.push(("attend_states f16", batch.attend(&Cpu::new())?));
    }
    Ok(kernels)
}

/// The same through wgpu.
pub fn prefill_on_gpu(file: &GoldenFile, gpu: &Wgpu) -> Result<Computed> {
    prefill_on(file, gpu, "attend_states f16 (wgpu)")
}

/// The same through CUDA.
#[cfg(feature = "cuda")]
pub fn prefill_on_cuda(file: &GoldenFile, cuda: &kvpack::cuda::Cuda) -> Result<Computed> {
    prefill_on(file, cuda, "attend_states f16 (cuda)")
}

fn prefill_on<B: Backend>(file: &GoldenFile, backend: &B, name: &'static str) -> Result<Computed> {
    let batch = Batch::of_file(file)?;
    if !batch.is_f16 {
        return Ok(Vec::new());
    }
    Ok(vec![(name, batch.attend(backend)?)])
}

/// Sequences, and a run of queries for each.
struct Batch {
    shape: AttentionShape,
    /// `[queries, query_heads, head_dim]`, sequence after sequence.
    queries: Vec<f32>,
    /// `[tokens, kv_heads, head_dim]`, sequence after sequence.
    keys: Vec<f32>,
    /// As the keys.
    values: Vec<f32>,
    sequences: Vec<Sequence>,
    scoring: Scoring,
    is_f16: bool,
}

/// A sequence of a batch.
struct Sequence {
    tokens: TokenRange,
    /// Its queries; there may be none.
    queries: usize,
    /// What these see.
    visible: Visible,
}

impl Sequence {
    /// Whether a query sees a token, by the definition of its kind of visibility.
    fn sees(&self, query: usize, token: usize) -> bool {
        let own = self.tokens.len() - self.queries + query;
        let within = |left: usize| token <= own && own - token <= left;
        match &self.visible {
            Visible::All => true,
            Visible::Causal => token <= own,
            Visible::Window { left } => within(*left),
            Visible::Spans { left, spans } => {
                within(left.unwrap_or(usize::MAX))
                    || spans.iter().any(|span| span.contains(&own) && span.contains(&token))
            }
            Visible::Tree(mask) => mask.sees(query, token + mask.tokens() - self.tokens.len()),
        }
    }
}

/// What the queries of a sequence see.
fn visible(file: &GoldenFile, sequence: usize, queries: usize, tokens: usize) -> Result<Visible> {
    if file.has_input("packed_mask") {
        let starts = file.input("mask_indptr")?.indices()?;
        let ends = (starts.get(sequence), starts.get(sequence + 1));
        let (Some(&start), Some(&end)) = ends else { bail!("no mask of sequence {sequence}") };
        let bits = file.input("packed_mask")?.u8()?.get(start as usize..end as usize);
        let bits = bits.with_context(|| format!("the mask of sequence {sequence} is cut short"))?;
        return Ok(Visible::Tree(TreeMask::from_bits(queries, tokens, bits)?));
    }
    let left = file.number("window_left")?;
    let left = (left >= 0.0).then_some(left as usize);
    if file.has_input("spans") {
        let rows = file.input("spans")?.indices()?;
        let of_sequence = rows.chunks_exact(3).filter(|row| row[0] as usize == sequence);
        let spans = of_sequence.map(|row| row[1] as usize..row[2] as usize).collect();
        return Ok(Visible::Spans { left, spans });
    }
    Ok(match left {
        Some(left) => Visible::Window { left },
        None if file.flag("causal") => Visible::Causal,
        None => Visible::All,
    })
}

/// How the scores of a file are made.
fn scoring(file: &GoldenFile, shape: &AttentionShape) -> Result<Scoring> {
    let mut scoring = Scoring::of(shape);
    let cap = file.number("logits_soft_cap")?;
    if cap > 0.0 {
        scoring = scoring.with_soft_cap(cap as f32)?;
    }
    if file.has_input("sinks") {
        scoring = scoring.with_sinks(&file.input("sinks")?.f32()?)?;
    }
    Ok(scoring)
}

impl Batch {
    fn of_file(file: &GoldenFile) -> Result<Self> {
        let [query_rows, query_heads, head_dim] = file.input("q")?.axes()?;
        let [all_tokens, kv_heads, key_channels] = file.input("k")?.axes()?;
        ensure!(
            key_channels == head_dim,
            "keys have {key_channels} channels and queries {head_dim}; both must have the same"
        );
        let shape = AttentionShape::new(query_heads, kv_heads, head_dim)?;
        check_size(query_heads, all_tokens, head_dim)?;
        let products = [query_rows, query_heads, all_tokens, head_dim].into_iter().fold(1, usize::saturating_mul);
        ensure!(products <= MOST_PRODUCTS, "{products} products of queries and keys; at most {MOST_PRODUCTS} are made");
        ensure!(file.input("v")?.shape == file.input("k")?.shape, "keys and values have different shapes");
        let (tokens, queries) = (file.input("kv_indptr")?.indices()?, file.input("q_indptr")?.indices()?);
        let ends = |starts: &[u32]| (starts.first().copied(), starts.last().map(|&end| end as usize));
        ensure!(
            tokens.len() == queries.len()
                && ends(&tokens) == (Some(0), Some(all_tokens))
                && ends(&queries) == (Some(0), Some(query_rows))
                && queries.is_sorted(),
            "sequences from {tokens:?} to {queries:?} do not cover {all_tokens} tokens and {query_rows} queries"
        );
        let sequence = |(index, (tokens, queries)): (usize, (&[u32], &[u32]))| {
            let tokens = TokenRange::new(tokens[0] as usize, tokens[1] as usize)?;
            let queries = (queries[1] - queries[0]) as usize;
            ensure!(queries <= tokens.len(), "{queries} queries of a sequence of {} tokens", tokens.len());
            Ok(Sequence { tokens, queries, visible: visible(file, index, queries, tokens.len())? })
        };
        Ok(Self {
            shape,
            queries: file.input("q")?.f32()?,
            keys: file.input("k")?.f32()?,
            values: file.input("v")?.f32()?,
            sequences: tokens.windows(2).zip(queries.windows(2)).enumerate().map(sequence).collect::<Result<_>>()?,
            scoring: scoring(file, &shape)?,
            is_f16: matches!(file.input("k")?.elements, Elements::F16(_)),
        })
    }

    /// Every query over what it sees.
    fn exact(&self) -> Result<Outputs> {
        let row = self.shape.query_heads() * self.shape.head_dim();
        let mut queries = self.queries.chunks_exact(row);
        let (mut outputs, mut lse) = (Vec::new(), Vec::new());
        for sequence in &self.sequences {
            for query in 0..sequence.queries {
                let seen: Vec<usize> =
                    (0..sequence.tokens.len()).filter(|&token| sequence.sees(query, token)).collect();
                let of_seen = |rows| self.head_major(rows, sequence.tokens.start(), &seen);
                let (keys, values) = (of_seen(&self.keys), of_seen(&self.values));
                let segment = DenseSegment { keys: &keys, values: &values, tokens: seen.len(), calibration: None };
                let query = queries.next().unwrap_or_default();
                let state = exact_scored_attention(&self.shape, &self.scoring, &[segment], query)?;
                outputs.extend(state.outputs);
                lse.extend(state.lse);
            }
        }
        Ok(named([("o", outputs), ("lse", lse)]))
    }

    /// Rows `[kv_heads, tokens, head_dim]` of these tokens of a sequence that begins at token `first`.
    fn head_major(&self, rows: &[f32], first: usize, tokens: &[usize]) -> Vec<f32> {
        let (kv_heads, head_dim) = (self.shape.kv_heads(), self.shape.head_dim());
        let row = |head: usize, token: usize| &rows[((first + token) * kv_heads + head) * head_dim..][..head_dim];
        (0..kv_heads).flat_map(|head| tokens.iter().flat_map(move |&token| row(head, token))).copied().collect()
    }

    /// All of it as one plan over an f16 store.
    fn attend<B: Backend>(&self, backend: &B) -> Result<Outputs> {
        let upload = |rows: &Vec<f32>| block_on(backend.upload(rows.as_slice().into()));
        let [queries, keys, values] = [upload(&self.queries)?, upload(&self.keys)?, upload(&self.values)?];
        let rows = RowLayout::token_major(self.keys.len() / self.shape.kv_heads() / self.shape.head_dim(), &self.shape);
        // A sequence without queries is none of the plan's.
        let asked = || self.sequences.iter().enumerate().filter(|(_, sequence)| sequence.queries > 0);
        let span = |(index, sequence): (usize, &Sequence)| {
            let source = SpanSource { rows, tokens: sequence.tokens.into(), keys: &keys, values: &values };
            (NewSpan { store: 0, sequence: index, start: 0, tokens: sequence.tokens.len() }, source)
        };
        let runs = asked().map(|(index, of)| QueryRun::new(index, of.queries, of.visible.clone()));
        let (new, runs): (Vec<_>, Vec<_>) = (asked().map(span).collect(), runs.collect());
        let mut stores = FilledStores::new(backend, self.shape, &[SegmentFormat::F16])?;
        let spans = block_on(stores.fill(backend, &new))?;
        let plan = stores.plan(&runs, spans.iter(), &[])?.with_scoring(self.scoring.clone())?;
        let states = block_on(backend.attend_states(&plan, &stores.stores(), &queries, AttendOptions::default()))?;
        let download = |tensor: &B::Tensor| Ok::<_, kvpack::Error>(doubles(&block_on(backend.download(tensor))?));
        Ok(named([("o", download(&states.outputs)?), ("lse", download(&states.lse)?)]))
    }
}
