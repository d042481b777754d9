//! Attention of runs of queries over ragged batches.

use anyhow::{Result, ensure};
use kvpack::backend::{AttendOptions, Backend, FilledStores, NewSpan, SpanSource};
use kvpack::cpu::{Cpu, DenseSegment, exact_attention};
use kvpack::plan::{QueryRun, RowLayout, TokenRange, Visible};
use kvpack::wgpu::Wgpu;
use kvpack::{AttentionShape, SegmentFormat};
use pollster::block_on;

use super::file::{Elements, GoldenFile};
use super::stored::check_size;
use super::{Computed, Outputs, doubles, named};

/// Products of queries and keys that a file may ask for.
const MOST_PRODUCTS: usize = 1 << 28;

/// What a file asks of attention that plans do not have, if anything.
pub fn beyond(file: &GoldenFile) -> Result<Option<&'static str>> {
    Ok(match () {
        () if file.number("window_left")? >= 0.0 => Some("a window for every query"),
        () if file.number("logits_soft_cap")? > 0.0 => Some("soft caps"),
        () if file.has_input("sinks") => Some("sinks without values"),
        () if file.has_input("spans") => Some("spans that see themselves"),
        () if file.has_input("packed_mask") => Some("masks"),
        () => None,
    })
}

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

/// The same on a GPU.
pub fn prefill_on_gpu(file: &GoldenFile, gpu: &Wgpu) -> Result<Computed> {
    let batch = Batch::of_file(file)?;
    if !batch.is_f16 {
        return Ok(Vec::new());
    }
    Ok(vec![("attend_states f16 (wgpu)", batch.attend(gpu)?)])
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
    visible: Visible,
    is_f16: bool,
}

/// A sequence of a batch.
struct Sequence {
    tokens: TokenRange,
    /// Its queries; there may be none.
    queries: usize,
}

impl Batch {
    fn of_file(file: &GoldenFile) -> Result<Self> {
        let [query_rows, query_heads, head_dim] = file.input("q")?.axes()?;
        let [all_tokens, kv_heads, key_channels] = file.input("k")?.axes()?;
        ensure!(key_channels == head_dim, "keys of {key_channels} channels beside queries of {head_dim}");
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
        let sequence = |(tokens, queries): (&[u32], &[u32])| {
            let tokens = TokenRange::new(tokens[0] as usize, tokens[1] as usize)?;
            let queries = (queries[1] - queries[0]) as usize;
            ensure!(queries <= tokens.len(), "{queries} queries of a sequence of {} tokens", tokens.len());
            Ok(Sequence { tokens, queries })
        };
        Ok(Self {
            shape,
            queries: file.input("q")?.f32()?,
            keys: file.input("k")?.f32()?,
            values: file.input("v")?.f32()?,
            sequences: tokens.windows(2).zip(queries.windows(2)).map(sequence).collect::<Result<_>>()?,
            visible: if file.flag("causal") { Visible::Causal } else { Visible::All },
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
                let hidden = match self.visible {
                    Visible::All => 0,
                    Visible::Causal => sequence.queries - 1 - query,
                };
                let tokens = sequence.tokens.len() - hidden;
                let seen = |rows| self.head_major(rows, sequence.tokens.start(), tokens);
                let (keys, values) = (seen(&self.keys), seen(&self.values));
                let segment = DenseSegment { keys: &keys, values: &values, tokens, calibration: None };
                let state = exact_attention(&self.shape, &[segment], queries.next().unwrap_or_default())?;
                outputs.extend(state.outputs);
                lse.extend(state.lse);
            }
        }
        Ok(named([("o", outputs), ("lse", lse)]))
    }

    /// Rows `[kv_heads, tokens, head_dim]` of the tokens from `first` on.
    fn head_major(&self, rows: &[f32], first: usize, tokens: usize) -> Vec<f32> {
        let (kv_heads, head_dim) = (self.shape.kv_heads(), self.shape.head_dim());
        let row = |head: usize, token: usize| &rows[((first + token) * kv_heads + head) * head_dim..][..head_dim];
        (0..kv_heads).flat_map(|head| (0..tokens).flat_map(move |token| row(head, token))).copied().collect()
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
        let runs = asked().map(|(index, of)| QueryRun { sequence: index, queries: of.queries, visible: self.visible });
        let (new, runs): (Vec<_>, Vec<_>) = (asked().map(span).collect(), runs.collect());
        let mut stores = FilledStores::new(backend, self.shape, &[SegmentFormat::F16])?;
        let spans = block_on(stores.fill(backend, &new))?;
        let plan = stores.plan(&runs, spans.iter(), &[])?;
        let states = block_on(backend.attend_states(&plan, &stores.stores(), &queries, AttendOptions::default()))?;
        let download = |tensor: &B::Tensor| Ok::<_, kvpack::Error>(doubles(&block_on(backend.download(tensor))?));
        Ok(named([("o", download(&states.outputs)?), ("lse", download(&states.lse)?)]))
    }
}
